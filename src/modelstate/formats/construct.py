"""Builds the tree of a checkpoint from the value of a pickle, after an audit of what it asks for."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from modelstate.errors import ForbiddenGlobalError, ModelStateError, OpenError, PickleError, UnsupportedTensorError
from modelstate.formats.pickled import (
    Allowed,
    DeferredCall,
    DeferredTensor,
    InvalidTensor,
    Refused,
    SafeGlobal,
    Storage,
)
from modelstate.formats.rebuild import QUANTIZED, set_state
from modelstate.formats.torch_globals import TorchGlobals, is_never
from modelstate.spec import StoredComposite, StoredTensor

MAX_DEPTH = 100

TENSOR, INERT, UNFINISHED = 1, 2, 4
"""What a value has in it: tensors, refused or flawed parts, something that has still to be made."""

_PLAIN = frozenset(
    {str, int, float, bool, type(None), bytes, bytearray, complex, torch.dtype, torch.device, torch.Size, torch.layout}
)
_SEQUENCES = frozenset({list, tuple, set, frozenset})
MAPPINGS = frozenset({dict, OrderedDict, Counter})

Path = tuple[Any, ...]
"""The parent's path and a key; the root is empty. It is text only where an error needs it."""


@dataclass(slots=True)
class Audit:
    """What was found in a value."""

    refused: list[tuple[str, Path]] = field(default_factory=list)
    flawed: list[tuple[OpenError, Path]] = field(default_factory=list)
    holds: dict[int, int] = field(default_factory=dict)
    """The flags of each container, by its id."""
    keep: list[object] = field(default_factory=list)
    """Keeps every id from being used again."""

    def flags(self, node: object) -> int:
        """What `node` has in it."""
        return self.holds.get(id(node), TENSOR if type(node) is StoredTensor else 0)


def dotted(path: Path) -> str:
    """The path as text: keys joined with dots."""
    names: list[str] = []
    while path:
        path, key = path
        names.append(key if isinstance(key, str) else str(key)[:100])
    return ".".join(reversed(names))


def audit(value: object, data_nbytes: int) -> Audit:
    """Looks through the value of a pickle of `data_nbytes` bytes.

    Raises `PickleError` where containers hold themselves, are nested deeper than 100, or are shared so often that the
    value stands for far more than the file has bytes.
    """
    walker = _Walker()
    nodes, characters, _ = walker.visit(value, (), 0)
    if nodes > 100_000 + data_nbytes or characters > 1_000_000 + 16 * data_nbytes:
        raise PickleError(
            "the pickle stands for more than any memory: it holds the same containers again and again",
            found=f"{nodes:.3g} values, {characters:.3g} characters of names, from {data_nbytes} bytes",
            remedy="do not trust this file",
        )
    return walker.found


class _Walker:
    def __init__(self) -> None:
        self.found = Audit()
        self.sizes: dict[int, tuple[int, int, int]] = {}
        self.open: set[int] = set()

    def visit(self, node: Any, path: Path, depth: int, bare: bool = False) -> tuple[int, int, int]:
        """Nodes, characters of names and flags of what is below `node`, as if nothing was shared.

        The items of a `bare` sequence, such as the arguments of a call, have the path of the sequence.
        """
        kind = type(node)
        if kind in _PLAIN:
            return 1, 0, 0
        if kind is StoredTensor and not node.attributes:
            return 1, 0, TENSOR
        key = id(node)
        if key in self.sizes:
            return self.sizes[key]
        if key in self.open:
            raise PickleError(
                "a container in the pickle holds itself",
                where=dotted(path)[:1000],
                remedy="load it where it was written, and save the state dicts in it alone",
            )
        if depth > MAX_DEPTH:
            raise PickleError(
                "containers in the pickle are nested too deep",
                expected=f"at most {MAX_DEPTH} levels",
                remedy="load it where it was written, and save the state dicts in it alone",
            )
        self.open.add(key)
        nodes, characters, flags = 1, 0, self.own_flags(node, path)
        for name, child in _children(node, bare):
            if type(child) is StoredTensor and not child.attributes:
                below = (1, 0, TENSOR)
            else:
                below = self.visit(child, path if name is _SAME else (path, name), depth + 1, name is _SAME)
            nodes += below[0]
            characters += below[1] + below[0] * (1 + len(name) if type(name) is str else 8)
            flags |= below[2]
        self.open.discard(key)
        self.sizes[key] = nodes, characters, flags
        self.found.holds[key] = flags
        self.found.keep.append(node)
        return nodes, characters, flags

    def own_flags(self, node: Any, path: Path) -> int:
        kind = type(node)
        if kind is Refused:
            self.found.refused.append((node.name, path))
            return INERT if node.module_fields is None else INERT | UNFINISHED
        if kind is InvalidTensor:
            self.found.flawed.append((node.error, path))
            return INERT
        if kind is StoredTensor:
            return TENSOR
        if kind is Storage:
            if node.dtype in QUANTIZED:
                self.found.flawed.append((_quantized_storage(node.dtype), path))
            return TENSOR | UNFINISHED
        if kind is DeferredTensor:
            return TENSOR | UNFINISHED
        if kind in (DeferredCall, Allowed, SafeGlobal):
            return UNFINISHED
        return 0


def _quantized_storage(dtype: torch.dtype) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"a quantized storage ({dtype}) is not supported", remedy="save the dequantize()d form of its tensor"
    )


_SAME = object()
"""In place of a key: the path stays that of the node."""


def _children(node: Any, bare: bool) -> Iterator[tuple[Any, Any]]:
    """What is directly in a node, with its part of the path."""
    kind = type(node)
    if kind in MAPPINGS:
        for key, value in node.items():
            if type(key) not in _PLAIN:
                yield _SAME, key
            yield key, value
        if hasattr(node, "_metadata"):
            yield "_metadata", node._metadata
    elif kind in _SEQUENCES:
        yield from ((_SAME, item) for item in node) if bare else enumerate(node)
    elif kind is StoredTensor:
        yield _SAME, node.attributes
    elif kind is Refused:
        yield _SAME, node.held
    elif kind is DeferredTensor:
        yield _SAME, node.parts
    elif kind is DeferredCall:
        for piece in (node.args, node.kwargs, node.states, node.appended, node.inserted):
            yield _SAME, piece


def construct(value: object, *, path: str, data_nbytes: int, names: TorchGlobals, skip_forbidden: bool) -> object:
    """The tree of a checkpoint out of the value that `unpickle` made of `data_nbytes` bytes.

    What was refused stays in it as `Refused` with `skip_forbidden`, and raises `ForbiddenGlobalError` without. Raises
    the error of the first tensor that is not read here or contradicts itself, with its place, and `PickleError` where
    an allowed class raises.
    """
    try:
        return _constructed(value, path, data_nbytes, names, skip_forbidden)
    except RecursionError as error:
        raise PickleError("containers in the pickle are nested too deep for Python's stack", where=path) from error


def _constructed(value: object, path: str, data_nbytes: int, names: TorchGlobals, skip_forbidden: bool) -> object:
    found = audit(value, data_nbytes)
    if not skip_forbidden:
        _raise_refused(found, path, names)
    for error, place in found.flawed:
        error.where = f"{path}: {dotted(place)}" if place else path
        raise error
    return _Constructor(found, path).make(value, ())


def _raise_refused(found: Audit, path: str, names: TorchGlobals) -> None:
    refused = [(name, dotted(place)) for name, place in found.refused]
    # What the pickle asked for and threw away has no place, but it was asked for.
    refused += [(name, "") for name in sorted(names.refused - {name for name, _ in refused})]
    if not refused:
        return
    unique = dict(reversed(refused))
    ordered = list(dict.fromkeys(name for name, _ in refused))
    shown = [f"{name}" + (f" at {unique[name]}" if unique[name] else "") for name in ordered[:10]]
    if len(ordered) > 10:
        shown.append(f"and {len(ordered) - 10} more")
    never = [name for name in ordered if is_never(name)]
    failed = "; ".join(f"{name} is allowed, but its import failed: {why}" for name, why in names.failed.items())
    allow: list[str] = []
    if never:
        remedy = f"do not trust this file: {never[0]} has no place in a checkpoint"
    elif any(name.startswith("torch.nn.modules.") for name in ordered):
        remedy = (
            f'the file holds a whole module: ms.open("{path}", skip_forbidden=True) finds its parameters and buffers '
            "without running its code; or save its state_dict() where it can be loaded"
        )
    else:
        allow = ordered
        listed = ", ".join(f'"{name}"' for name in ordered)
        remedy = (
            f'if you trust them: ms.load(model, ms.open("{path}", allow=[{listed}])); '
            f'without them: ms.open("{path}", skip_forbidden=True), which leaves placeholders in their places'
        )
    raise ForbiddenGlobalError(
        f"the pickle asks for {len(ordered)} {'class or function' if len(ordered) == 1 else 'classes or functions'} "
        "that {} not allowed".format("is" if len(ordered) == 1 else "are"),
        refused=refused,
        allow=allow,
        where=path,
        found=", ".join(shown) + (f" ({failed})" if failed else ""),
        remedy=remedy,
    )


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a part in what a composite is made of."""

    index: int
    is_parameter: bool
    requires_grad: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Something that is made when the tensors are there."""

    make: Callable[[Any], Any]
    template: Any


class _Constructor:
    def __init__(self, found: Audit, path: str) -> None:
        self.found = found
        self.path = path
        self.made: dict[int, Any] = {}

    def make(self, node: Any, path: Path) -> Any:
        """The finished value; containers keep their identity where they can."""
        flags = self.found.flags(node)
        if not flags & UNFINISHED:
            return node
        if id(node) not in self.made:
            self.made[id(node)] = self.finish(node, path, flags)
        return self.made[id(node)]

    def finish(self, node: Any, path: Path, flags: int) -> Any:
        kind = type(node)
        if kind in MAPPINGS:
            return self.mapping(node, path)
        if kind is list or kind is tuple:
            items = [self.make(item, (path, index)) for index, item in enumerate(node)]
            if kind is tuple:
                return tuple(items)
            node[:] = items
            return node
        if kind is set or kind is frozenset:
            return kind(self.hashable(item, path) for item in node)
        if kind is Allowed:
            return node.real
        if kind is SafeGlobal:
            return Refused(node.name) if node.real is None else node.real
        if kind is Storage:
            return StoredTensor(node.dtype, (node.numel,), (1,), node.region, node.offset)
        if kind is StoredTensor:
            return replace(node, attributes=self.make(node.attributes, path))
        if kind is Refused:
            fields = node.module_fields
            return node if fields is None else self.module_state(fields, path)
        if flags & INERT:
            return Refused(node.name if kind is DeferredCall else node.kind, node)
        if kind is DeferredTensor:
            return self.composite(node, path)
        if flags & TENSOR:
            raise UnsupportedTensorError(
                f"tensors inside an object of {node.name} are not supported",
                where=f"{self.path}: {dotted(path)}",
                remedy="leave it out of what is allowed, and open with skip_forbidden=True to read the rest",
            )
        pieces = (node.args, node.kwargs, node.states, node.appended, node.inserted)
        return self.run(node, tuple(self.make(piece, path) for piece in pieces), path)

    def mapping(self, node: Any, path: Path) -> Any:
        items = [(self.hashable(key, path), self.make(value, (path, key))) for key, value in node.items()]
        if any(new is not old for (new, _), old in zip(items, node, strict=True)):
            node.clear()
        for key, value in items:
            node[key] = value
        if hasattr(node, "_metadata"):
            node._metadata = self.make(node._metadata, (path, "_metadata"))
        return node

    def module_state(self, fields: dict[str, Any], path: Path) -> OrderedDict[str, Any]:
        """The tensors of a pickled module whose class is not allowed, by the names that its `state_dict()` has.

        No code of the module runs, so state-dict hooks and extra state have no effect.
        """
        found: OrderedDict[str, Any] = OrderedDict()
        transient = fields.get("_non_persistent_buffers_set")
        transient = transient if isinstance(transient, set) else ()
        tensors = list(fields["_parameters"].items())
        tensors += [(name, value) for name, value in fields["_buffers"].items() if name not in transient]
        for name, value in tensors:
            if value is not None:
                found[str(name)] = self.make(value, (path, name))
        for name, child in fields["_modules"].items():
            below = child.module_fields if type(child) is Refused else None
            if below is not None:
                state = self.module_state(below, (path, name))
                found.update((f"{name}.{key}", value) for key, value in state.items())
            elif child is not None:
                found[str(name)] = self.make(child, (path, name))
        return found

    def hashable(self, key: Any, path: Path) -> Any:
        if type(key) is Refused:
            return key
        made = self.make(key, path)
        try:
            hash(made)
        except Exception as error:
            raise self.failed(type(made).__name__, path, error) from error
        return made

    def run(self, recipe: DeferredCall, pieces: Sequence[Any], path: Path) -> Any:
        try:
            return _follow(recipe, pieces)
        except ModelStateError:
            raise
        except Exception as error:
            # Whatever an allowed class raises at values that may be damaged.
            raise self.failed(recipe.name, path, error) from error

    def failed(self, name: str, path: Path, error: Exception) -> PickleError:
        return PickleError(
            f"an object of {name} cannot be made of what the pickle has",
            where=f"{self.path}: {dotted(path)}",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            remedy="use the version of the library that wrote it, or leave it out of what is allowed",
        )

    # Tensors that are made of others.

    def composite(self, recipe: DeferredTensor, path: Path) -> StoredComposite:
        parts: dict[int, tuple[int, StoredTensor]] = {}
        template = self.template(recipe.parts, path, parts, {})
        place, kind = f"{self.path}: {dotted(path)}", recipe.kind

        def build(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            try:
                return recipe.make(_fill(template, tensors, {}))
            except OpenError as error:
                error.where = error.where or place
                raise
            except Exception as error:
                raise PickleError(
                    f"a tensor of kind {kind} cannot be made of its parts",
                    where=place,
                    found=f"{type(error).__name__}: {str(error)[:200]}",
                    remedy="use the version of the library that wrote it",
                ) from error

        return StoredComposite(
            kind=kind,
            dtype=recipe.dtype,
            shape=recipe.shape,
            parts=tuple(part for _, part in parts.values()),
            build=build,
            is_parameter=recipe.is_parameter,
            requires_grad=recipe.requires_grad,
        )

    def template(self, node: Any, path: Path, parts: dict[int, tuple[int, StoredTensor]], memo: dict[int, Any]) -> Any:
        """A copy of the tree with slots for the tensors, so that each build makes objects of its own."""
        if not self.found.flags(node) & TENSOR:
            return self.make(node, path)
        if id(node) not in memo:
            memo[id(node)] = self.templated(node, path, parts, memo)
        return memo[id(node)]

    def templated(self, node: Any, path: Path, parts: dict[int, tuple[int, StoredTensor]], memo: dict[int, Any]) -> Any:
        def below(child: Any) -> Any:
            return self.template(child, path, parts, memo)

        kind = type(node)
        if kind is Storage:
            node = StoredTensor(node.dtype, (node.numel,), (1,), node.region, node.offset)
            self.found.keep.append(node)
            kind = StoredTensor
        if kind is StoredTensor:
            index, _ = parts.setdefault(id(node), (len(parts), replace(node, requires_grad=False, is_parameter=False)))
            return _Slot(index, node.is_parameter, node.requires_grad)
        if kind in MAPPINGS:
            return {self.hashable(key, path): below(value) for key, value in node.items()}
        if kind is list:
            return [below(item) for item in node]
        if kind is tuple:
            return tuple(below(item) for item in node)
        if kind is DeferredTensor:
            return _Call(_as_saved(node), below(node.parts))
        if kind is DeferredCall:
            pieces = (node.args, node.kwargs, node.states, node.appended, node.inserted)
            return _Call(lambda filled: _follow(node, filled), tuple(below(piece) for piece in pieces))
        raise PickleError("the pickle is damaged: tensors where none can be", found=kind.__name__)


def _as_saved(recipe: DeferredTensor) -> Callable[[Any], torch.Tensor]:
    def make(parts: Any) -> torch.Tensor:
        return _with_grad(recipe.make(parts), recipe.is_parameter, recipe.requires_grad)

    return make


def _with_grad(tensor: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.detach().requires_grad_() if requires_grad else tensor


def _fill(node: Any, tensors: Sequence[torch.Tensor], memo: dict[int, Any]) -> Any:
    """The template with its tensors in place."""
    kind = type(node)
    if kind not in (_Slot, _Call, dict, list, tuple):
        return node
    if id(node) not in memo:
        if kind is _Slot:
            memo[id(node)] = _with_grad(tensors[node.index], node.is_parameter, node.requires_grad)
        elif kind is _Call:
            memo[id(node)] = node.make(_fill(node.template, tensors, memo))
        elif kind is dict:
            memo[id(node)] = {key: _fill(value, tensors, memo) for key, value in node.items()}
        else:
            memo[id(node)] = kind(_fill(item, tensors, memo) for item in node)
    return memo[id(node)]


def _follow(recipe: DeferredCall, pieces: Sequence[Any]) -> Any:
    """Makes what the recipe says, in the order in which a pickle does."""
    args, kwargs, states, appended, inserted = pieces
    cls: Any = recipe.make
    made: Any = cls.__new__(cls, *args, **kwargs) if recipe.new else cls(*args)
    if appended:
        add = made.append if hasattr(made, "append") else made.add
        for item in appended:
            add(item)
    for key, value in inserted:
        made[key] = value
    for state in states:
        set_state(made, state)
    return made
