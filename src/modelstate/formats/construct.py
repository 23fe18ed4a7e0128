"""Creates the tree of a checkpoint from the value of a pickle, after an audit of everything that it asks for."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from modelstate.errors import DamagedFileError, ForbiddenGlobalError, OpenError, UnsupportedTensorError, code_errors
from modelstate.formats.torch_globals import TorchGlobals, is_never, set_state, unsupported
from modelstate.formats.unpickle import (
    Allowed,
    DeferredCall,
    DeferredTensor,
    Keys,
    SafeGlobal,
    Storage,
    invalid,
    places_in,
)
from modelstate.problems import option
from modelstate.spec import Refused, StoredComposite, StoredTensor, set_version_metadata, version_metadata
from modelstate.text_format import listed
from modelstate.torch_compat.dtypes import QUANTIZED

MAX_DEPTH = 100
_SAME_VERSION = "use the version of the library that wrote it"

TENSOR, INERT = 1, 2
"""What a value contains: tensors, refused parts."""

_PLAIN = frozenset(
    {str, int, float, bool, type(None), bytes, bytearray, complex, torch.dtype, torch.device, torch.Size, torch.layout}
)
_SEQUENCES = frozenset({list, tuple, set, frozenset})
MAPPINGS = frozenset({dict, OrderedDict, Counter})

Path = tuple[Any, ...]
"""The path of the parent and a key; the root is empty. It is converted to text only for an error."""


def dotted(path: Path) -> str:
    """The path as text: keys joined with dots."""
    names: list[str] = []
    while path:
        path, key = path
        names.append(key if isinstance(key, str) else str(key)[:100])
    return ".".join(reversed(names))


class _Audit:
    """What each container in the value of a pickle of `data_nbytes` bytes contains.

    Raises `DamagedFileError` where containers are shared so often that the value stands for far more than the file has
    bytes.
    """

    def __init__(self, value: object, data_nbytes: int) -> None:
        self.sizes: dict[int, tuple[int, int, int]] = {}
        """What `visit` has returned for each container, by its id."""
        self.open: set[int] = set()
        self.too_deep: set[int] = set()
        """The ids of containers that are not audited, since more than 100 others are around them."""
        nodes, characters, self.all_flags = self.visit(value, 0)
        if nodes > 100_000 + data_nbytes or characters > 1_000_000 + 16 * data_nbytes:
            raise DamagedFileError(
                "the pickle stands for more than any memory: it holds the same containers again and again",
                found=f"{nodes:.3g} values, {characters:.3g} characters of names, from {data_nbytes} bytes",
                remedy="do not trust this file",
            )

    def flags(self, node: object) -> int:
        """What a node contains."""
        sizes = self.sizes.get(id(node))
        return sizes[2] if sizes is not None else TENSOR if type(node) is StoredTensor else 0

    def visit(self, node: Any, depth: int) -> tuple[int, int, int]:
        """Returns the nodes, the characters of names and the flags below a node. Shared parts count each time."""
        kind = type(node)
        if kind in _PLAIN:
            return 1, 0, 0
        if kind is StoredTensor:
            return 1, 0, TENSOR
        key = id(node)
        if key in self.sizes:
            return self.sizes[key]
        if key in self.open:
            # An object of an allowed class may hold itself. Of a container, the constructor replaces the inner one.
            return 1, 0, 0 if kind is DeferredCall else INERT
        if depth > MAX_DEPTH:
            self.too_deep.add(key)
            return 1, 0, INERT
        self.open.add(key)
        nodes, characters, flags = 1, 0, _FLAGS.get(kind, 0)
        if kind is Storage and node.dtype in QUANTIZED:
            flags = INERT
        for name, child in _children(node):
            below = (1, 0, TENSOR) if type(child) is StoredTensor else self.visit(child, depth + 1)
            nodes += below[0]
            characters += below[1] + below[0] * (1 + len(name) if type(name) is str else 8)
            flags |= below[2]
        self.open.discard(key)
        self.sizes[key] = nodes, characters, flags
        return nodes, characters, flags


_FLAGS: dict[type, int] = {Refused: INERT, Storage: TENSOR, DeferredTensor: TENSOR}
_FINISHED = MAPPINGS | _SEQUENCES | {Refused, Allowed, SafeGlobal, Storage, DeferredTensor, DeferredCall}
"""The classes of the nodes that are not values themselves."""
_SAME = object()
"""Used as a key where the path of a child is that of the node."""


def _children(node: Any, bare: bool = False) -> Iterator[tuple[object, object]]:
    """The direct children of a node, with their keys in the path.

    The items of a `bare` sequence, such as the arguments of a call, have the path of the sequence.
    """
    kind = type(node)
    if kind in MAPPINGS:
        for key, value in node.items():
            if type(key) not in _PLAIN:
                yield _SAME, key
            yield key, value
        if (versions := version_metadata(node)) is not None:
            yield "_metadata", versions
    elif kind in _SEQUENCES:
        yield from ((_SAME, item) for item in node) if bare else enumerate(node)
    elif kind is Refused:
        yield _SAME, node.held
    elif kind is DeferredTensor:
        yield _SAME, node.parts
    elif kind is DeferredCall:
        yield from ((_SAME, piece) for piece in node.pieces)


def _refused_in(node: object) -> Iterator[tuple[Refused, Path]]:
    """Yields the placeholders in a node, with their paths."""
    waiting: list[tuple[object, Path, bool]] = [(node, (), False)]
    seen = set[int]()
    while waiting:
        node, path, bare = waiting.pop()
        if id(node) in seen or type(node) in _PLAIN:
            continue
        seen.add(id(node))
        if type(node) is Refused:
            yield node, path
        children = [*_children(node, bare)]
        waiting += [(child, path if name is _SAME else (path, name), name is _SAME) for name, child in children[::-1]]


def construct(value: object, *, path: str, data_nbytes: int, names: TorchGlobals, skip_forbidden: bool) -> object:
    """Creates the tree of a checkpoint.

    Args:
        value: The value that `unpickle` has returned.
        path: The file, for messages.
        data_nbytes: The size of the pickle.
        names: The names that the pickle asked for.
        skip_forbidden: Whether a class or function that is not allowed leaves a `Refused` in the tree.

    Raises:
        ForbiddenGlobalError: The pickle asks for a class or function that is not allowed.
        DamagedFileError: A tensor contradicts itself, or an allowed class raised.

    A tensor of a kind that is not supported, and a container within itself or within more than 100 others, become a
    `Refused`.
    """
    try:
        audit = _Audit(value, data_nbytes)
        found = [*_refused_in(value)] if audit.all_flags & INERT else []
        if not skip_forbidden:
            _raise_refused(found, path, names)
        for refused, place in found:
            if refused.error is not None and not isinstance(refused.error, UnsupportedTensorError):
                refused.error.where = f"{path}: {dotted(place)}" if place else path
                raise refused.error
        return _Constructor(audit, path).make(value, ())
    except RecursionError as error:
        raise DamagedFileError(
            "containers in the pickle are nested too deep for Python's stack",
            where=path,
            remedy="open it where fewer calls are on the stack; or load it where it was written, and save the state "
            "dicts in it alone",
        ) from error


def _raise_refused(found: Sequence[tuple[Refused, Path]], path: str, names: TorchGlobals) -> None:
    refused = [(each.name, dotted(place)) for each, place in found if each.error is None]
    # A class that the pickle asked for and then dropped has no place, but it was asked for.
    refused += [(name, "") for name in sorted(names.refused - {name for name, _ in refused})]
    if not refused:
        return
    failed = "; ".join(f"{name} is allowed, but its import failed: {why}" for name, why in names.failed.items())
    error = forbidden("the pickle asks for classes or functions that are not allowed", path, refused, can_skip=True)
    error.found += f" ({failed})" if failed else ""
    raise error


def refusal(found: Mapping[str, Refused], source: str) -> OpenError:
    """Returns the error for values that are not read, by their paths, where they are needed."""
    refused = ((value, path) for path, node in found.items() for value, _ in _refused_in(node))
    names = list(dict.fromkeys((value.name, path) for value, path in refused if value.error is None))
    if names:
        what = "a value is not read, since it takes classes or functions that are not allowed"
        return forbidden(what, source, names, can_skip=False, keys=tuple(found))
    first, value = next(iter(found.items()))
    cause = value.error or UnsupportedTensorError("it is not read")
    others = listed([path for path in found if path != first], 5)
    return type(cause)(
        cause.what,
        where=f"{source}: {first}",
        found=cause.found or (f"the same, or a similar value, at {others}" if others else ""),
        remedy=cause.remedy,
        names=tuple(found),
    )


def forbidden(
    what: str, path: str, refused: list[tuple[str, str]], *, can_skip: bool, keys: tuple[str, ...] = ()
) -> ForbiddenGlobalError:
    """The error for classes and functions that a file asks for.

    Args:
        what: What is wrong.
        path: The file, or its directory.
        refused: The names of the classes and functions, each with its path in the value.
        can_skip: Whether the file can be opened without them.
        keys: The keys of the values that are not read.
    """
    unique = dict(reversed(refused))
    ordered = list(dict.fromkeys(name for name, _ in refused))
    never = [name for name in ordered if is_never(name)]
    allow, names = ordered, ", ".join(f'"{name}"' for name in ordered)
    options = f"{option('--allow', *ordered)} if you trust them" + ("; or --skip-forbidden" if can_skip else "")
    remedy = f'if you trust them: ms.load(model, ms.open("{path}", allow=[{names}]))'
    skipping = f'ms.open("{path}", skip_forbidden=True)'
    if never:
        allow, options, remedy = [], "", f"do not trust this file: {never[0]} has no place in a checkpoint"
    elif any(name.startswith("torch.nn.modules.") for name in ordered):
        allow, options = [], "--skip-forbidden" if can_skip else ""
        remedy = "the file holds a whole module: save its state_dict() where it can be loaded"
        remedy += f"; or {skipping} finds its parameters and buffers without running its code" if can_skip else ""
    elif can_skip:
        remedy += f"; without them: {skipping}, which leaves placeholders in their places"
    return ForbiddenGlobalError(
        what,
        where=path,
        refused=refused,
        allow=allow,
        found=listed((f"{name} at {unique[name]}" if unique[name] else name for name in ordered), 10),
        remedy=remedy,
        options=options,
        names=keys,
    )


class _Constructor:
    """Creates the values of a tree; or, from its parts by the ids of their nodes, the value of a composite."""

    def __init__(self, audit: _Audit, path: str, parts: dict[int, Any] | None = None) -> None:
        self.audit, self.path, self.is_composite = audit, path, parts is not None
        self.values: dict[int, Any] = parts or {}
        self.open: set[int] = set()
        self.keys = Keys()

    def make(self, node: object, path: Path) -> Any:
        """The finished value of a node."""
        key = id(node)
        if key in self.audit.too_deep:
            what = f"a container within more than {MAX_DEPTH} others"
            return unsupported(what, "load it where it was written, and save it flatter")
        if key not in self.values:
            if type(node) not in _FINISHED:
                return node
            if key in self.open:
                return _within_itself(node)
            self.open.add(key)
            self.values[key] = self.finish(node, path)
            self.open.discard(key)
        return self.values[key]

    def finish(self, node: Any, path: Path) -> object:
        kind, flags = type(node), self.audit.flags(node)
        if kind in MAPPINGS:
            return self.mapping(node, path)
        if kind is list or kind is tuple:
            return kind(self.make(item, (path, index)) for index, item in enumerate(node))
        if kind is set or kind is frozenset:
            return kind(self.hashable(item, path) for item in node)
        if kind is Allowed:
            return node.real
        if kind is SafeGlobal:
            return Refused(node.name) if node.real is None else node.real
        if kind is Storage:
            if node.dtype in QUANTIZED:
                what, remedy = f"a quantized storage ({node.dtype})", "save the dequantize()d form of its tensor"
                return unsupported(what, remedy)
            return _whole(node)
        if kind is Refused:
            fields = node.module_fields
            return node if fields is None else self.module_state(fields, path)
        if flags & INERT:
            return _with_refused(node, node) or _within_itself(node)
        if kind is DeferredTensor:
            if not self.is_composite:
                return self.composite(node, path)
            return _with_grad(node.make(self.make(node.parts, path)), node)
        if flags & TENSOR and not self.is_composite:
            return unsupported(f"an object of {node.name} with tensors in it", "save the tensors beside it")
        try:
            with self.errors_of(node.name, path):  # an allowed class may raise anything for damaged values
                args, kwargs = self.make(node.args, path), self.make(node.kwargs, path)
                if refused := _with_refused(node, (args, kwargs)):
                    return refused
                make = partial(node.make.__new__, node.make) if node.new else node.make
                target = self.values[id(node)] = make(*args, **kwargs)
                pieces = [self.make(piece, path) for piece in (node.states, node.appended, node.inserted)]
                return _with_refused(node, pieces) or _filled(target, *pieces)
        except UnsupportedTensorError as error:
            return invalid(error)

    def mapping(self, node: Any, path: Path) -> Any:
        mapping = type(node)()
        for key, value in node.items():
            mapping[self.hashable(key, path)] = self.make(value, (path, key))
        if (versions := version_metadata(node)) is not None:
            set_version_metadata(mapping, self.make(versions, (path, "_metadata")))
        return mapping

    def module_state(self, fields: dict[str, Any], path: Path) -> OrderedDict[str, object]:
        """The tensors of a pickled module whose class is not allowed, by the names in its `state_dict()`.

        No code of the module runs, so state-dict hooks and extra state have no effect.
        """
        state: OrderedDict[str, object] = OrderedDict()
        transient = fields.get("_non_persistent_buffers_set")
        transient = transient if isinstance(transient, set) else ()
        tensors = list(fields["_parameters"].items())
        tensors += [(name, value) for name, value in fields["_buffers"].items() if name not in transient]
        for name, value in tensors:
            if value is not None:
                state[str(name)] = self.make(value, (path, name))
        for name, child in fields["_modules"].items():
            below = child.module_fields if type(child) is Refused else None
            if below is not None:
                inner = self.module_state(below, (path, name))
                state.update((f"{name}.{key}", value) for key, value in inner.items())
            elif child is not None:
                state[str(name)] = self.make(child, (path, name))
        return state

    def hashable(self, key: object, path: Path) -> object:
        if type(key) in (str, Refused):
            return key
        value = self.make(key, path)
        items = value if type(value) is tuple else (value,)
        if any(isinstance(item, np.generic) for item in items):  # they have the hashes of Python's numbers
            plain = tuple(item.item() if isinstance(item, np.generic) else item for item in items)
            self.keys.check(plain if type(value) is tuple else plain[0])
        with self.errors_of(type(value).__name__, path):
            hash(value)
        return value

    def errors_of(self, name: str, path: Path) -> AbstractContextManager[None]:
        return code_errors(
            DamagedFileError,
            f"an object of {name} cannot be created from the values in the pickle",
            where=f"{self.path}: {dotted(path)}",
            remedy=f"{_SAME_VERSION}, or leave it out of what is allowed",
        )

    def composite(self, recipe: DeferredTensor, path: Path) -> StoredComposite:
        """Describes a tensor that consists of others, which are found here and read later."""
        parts: dict[int, StoredTensor | Storage] = {}
        plain: dict[int, object] = {}
        """The values of the nodes without tensors."""
        names: dict[int, str] = {}
        waiting, seen = [recipe.parts], set[int]()
        while waiting:
            node: Any = waiting.pop()
            if type(node) in (StoredTensor, Storage):
                parts[id(node)] = node
            elif not self.audit.flags(node) & TENSOR:
                plain[id(node)] = self.make(node, path)
            elif id(node) not in seen:
                seen.add(id(node))
                children = list(_children(node, bare=True))
                names |= {id(child): key for key, child in children if type(key) is str}
                waiting += reversed([child for _, child in children])
        place, kind = f"{self.path}: {dotted(path)}", recipe.kind

        def build(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            what = f"a tensor of kind {kind} cannot be made of its parts"
            with places_in(place), code_errors(DamagedFileError, what, where=place, remedy=_SAME_VERSION):
                read = (_with_grad(tensor, node) for tensor, node in zip(tensors, parts.values(), strict=True))
                inner = _Constructor(self.audit, self.path, plain | dict(zip(parts, read, strict=True)))
                return recipe.make(inner.make(recipe.parts, path))

        part_names = tuple(names[part] for part in parts if part in names)
        return StoredComposite(
            kind=kind,
            dtype=recipe.dtype,
            shape=recipe.shape,
            parts=tuple(replace(_whole(node), requires_grad=False, is_parameter=False) for node in parts.values()),
            build=build,
            is_parameter=recipe.is_parameter,
            requires_grad=recipe.requires_grad,
            part_names=part_names if len(set(part_names)) == len(parts) else (),
        )


def _whole(node: StoredTensor | Storage) -> StoredTensor:
    """A tensor as it is; of a storage, the tensor of all its elements."""
    if isinstance(node, StoredTensor):
        return node
    return StoredTensor.view(node.dtype, (node.numel,), (1,), node.region, node.offset)


def _with_grad(tensor: torch.Tensor, node: StoredTensor | Storage | DeferredTensor) -> torch.Tensor:
    if isinstance(node, Storage):
        return tensor
    if node.is_parameter:
        return torch.nn.Parameter(tensor, node.requires_grad)
    return tensor.detach().requires_grad_() if node.requires_grad else tensor


def _filled(target: Any, states: Any, appended: Any, inserted: Any) -> object:
    if appended:
        add = target.append if hasattr(target, "append") else target.add
        for item in appended:
            add(item)
    for key, value in inserted:
        target[key] = value
    for state in states:
        set_state(target, state)
    return target


def _with_refused(node: object, pieces: object) -> Refused | None:
    """The placeholder for an object with refused values among its pieces; None where there are none."""
    for inner, _ in _refused_in(pieces):
        return Refused(inner.name, node, error=inner.error)
    return None


def _within_itself(node: object) -> Refused:
    kind = f"an object of {node.name}" if type(node) is DeferredCall else f"a {type(node).__name__}"
    return unsupported(f"{kind} that holds itself", "load it where it was written, and save it without the loop")
