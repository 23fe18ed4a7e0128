"""Prepares a state for a safetensors file: its plain tensors by name, and the manifest for everything else."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, TypeGuard

import msgspec
import torch
from torch.nn.parameter import is_lazy

from modelstate.codec.codec import encode
from modelstate.errors import CodecError, UnsavableError, keep_interrupt
from modelstate.formats.block_writer import LazyTensor, check_expanded
from modelstate.formats.manifest import (
    ALGORITHM,
    BLOCK_BYTES,
    FORMAT,
    KEY,
    MAX_PATH_CHARACTERS,
    are_usual_versions,
    digest_of_all,
)
from modelstate.formats.safetensors import NOT_A_NAME, listed_problems, parts_of, why_not
from modelstate.formats.tree import EXTRA_STATE
from modelstate.spec import version_metadata
from modelstate.text_format import is_unicode, quote
from modelstate.torch_compat.plain import is_plain_or_sparse, is_sharded, remedies_for, why_not_plain
from modelstate.version import __version__

_TORCHS_OWN = ("torch.distributed.", "torch.nested.", "torch._subclasses.")
"""Modules of wrapper subclasses that their parts do not describe completely."""
OfShard = Callable[[torch.Tensor], LazyTensor | str]
"""Returns what is written for a DTensor, or the reason why it cannot be written."""
_MAX_DEPTH = 90
_MAX_NODES = 5_000_000
"""The limit of values: a few shared lists can stand for more values than any memory holds."""


class SerializedState(msgspec.Struct):
    """The plain tensors of a state, and the fields of its manifest."""

    tensors: dict[str, torch.Tensor | LazyTensor] = msgspec.field(default_factory=dict)
    """Of tied tensors only the first. Includes the parts of subclasses and the tensors within other values."""
    names: int = 0
    """The number of tensor names in the state."""
    aliases: dict[str, str] = msgspec.field(default_factory=dict)
    subclasses: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    versions: object = None
    extra: dict[str, object] = msgspec.field(default_factory=dict)
    extra_tensors: list[str] = msgspec.field(default_factory=list)
    tree: Any = None
    attached: object = None

    @property
    def live(self) -> dict[str, torch.Tensor]:
        """The tensors that are in memory; with a live state these are all."""
        return {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, torch.Tensor)}

    @property
    def plain_names(self) -> set[str]:
        """The names of the tensors that are no parts of a subclass or of another value."""
        of_subclasses = {part for entry in self.subclasses.values() for part in entry["parts"].values()}
        return self.tensors.keys() - of_subclasses - {*self.extra_tensors}

    @property
    def nbytes(self) -> int:
        """The size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def values(self, path: str = "") -> dict[str, object]:
        """Returns what stands for each value that is no tensor, by its name; the names begin with `path`."""
        prefix = f"{path}." if path else ""
        named = {f"{prefix}{name}": value for name, value in self.extra.items()}
        named |= {f"tied names of {path or 'tensors'}": self.aliases, "extra=": self.attached}
        for key in ("subclasses", "versions", "extra_tensors"):
            named[f"the {key} of {path or 'the state'}"] = getattr(self, key)
        return named | dict(_values_of(self.tree, path))

    def manifest(self, schema: str | None, digests: Mapping[str, str], patched: Set[str] = frozenset()) -> str:
        """The manifest as JSON. Its length does not depend on the digests. Of `patched` tensors, it has one digest."""
        manifest: dict[str, object] = {"format": FORMAT, "writer": f"{KEY} {__version__}"}
        if schema is not None:
            manifest["schema"] = schema
        of_whole = {name: digest for name, digest in digests.items() if name not in patched}
        fields: dict[str, object] = {"algorithm": ALGORITHM, "block_bytes": BLOCK_BYTES, "tensors": of_whole}
        if patched:
            fields["patched"] = digest_of_all({name: digests[name] for name in patched})
        if parts := {name: own for name, tensor in self.tensors.items() if (own := parts_of(tensor))}:
            fields["parts"] = parts
        manifest["digests"] = fields
        for key in ("aliases", "subclasses", "versions", "extra", "extra_tensors", "tree", "attached"):
            if value := getattr(self, key):
                manifest[key] = value
        return json.dumps(manifest, allow_nan=False, separators=(",", ":"))


def _values_of(node: Any, path: str) -> Iterator[tuple[str, object]]:
    """Yields the values of a tree of the manifest, by their paths."""
    if not isinstance(node, dict):
        yield path, node
        return
    for kind, items in node.items():
        if kind in ("dict", "list", "tuple"):
            for key, item in items if kind == "dict" else enumerate(items):
                yield from _values_of(item, f"{path}.{key}" if path else str(key))
        else:
            yield path if kind == "value" else f"{path}.{kind}", items


def serialize(
    state: Any,
    where: str,
    attached: Mapping[str, object] | None = None,
    *,
    as_tree: bool = False,
    of_shard: OfShard | None,
) -> SerializedState:
    """Splits a state into plain tensors and a manifest.

    A state dict of tensors and extra state stays flat. An uninitialised tensor of a lazy module is a value other than a
    tensor. Anything else is a tree, whose tensors are named by their paths.

    Args:
        state: The state.
        where: The target, for messages.
        attached: Values that are saved beside the state.
        as_tree: Whether a flat state is written as a tree, too.
        of_shard: Called with each DTensor. Without it, DTensors are refused.

    Raises:
        UnsavableError: Tensors or names cannot be stored; the error lists all of them.
        CodecError: A value cannot be encoded.
    """
    is_flat = not as_tree and all(
        isinstance(value, torch.Tensor | LazyTensor)
        or (isinstance(name, str) and is_unicode(name) and name.rpartition(".")[2] == EXTRA_STATE)
        for name, value in state.items()
    )
    serializer = _Serializer(where, map(str, state) if isinstance(state, Mapping) else (), of_shard)
    if is_flat:
        serializer.add_flat(state)
    else:
        serializer.state.tree = serializer.node(state if as_tree or _kind(state) else dict(state), "", 0)
    if attached:
        serializer.state.attached = serializer.encode(dict(attached), f"{where}: extra")
    serializer.check()
    return serializer.state


def _is_tensor(value: object) -> TypeGuard[torch.Tensor | LazyTensor]:
    return isinstance(value, LazyTensor) or (isinstance(value, torch.Tensor) and not is_lazy(value))


_TWO_VALUES = "two values have this name when their keys are joined with dots"


class _Serializer:
    def __init__(self, where: str, names: Iterable[str], of_shard: OfShard | None) -> None:
        self.state, self._of_shard = SerializedState(), of_shard
        self._where = where
        self._wrong: dict[object, str] = {}
        """The names that cannot be stored, with the reasons."""
        self._refused: list[object] = []
        self._by_bytes: dict[object, str] = {}
        self._leaves: set[str] = set()
        """The paths of the tensors and of the other values of a tree."""
        self._nodes = self._characters = 0
        self._holds: dict[int, bool] = {}
        self._prefix = "_modelstate_extra."
        taken = list(names)  # in a tree, the names of tensors begin with these
        while any(f"{name}.".startswith(self._prefix) for name in taken):
            self._prefix = "_" + self._prefix

    def add_flat(self, state: Mapping[Any, Any]) -> None:
        others: list[tuple[str, object]] = []
        for name, value in state.items():
            if not _is_tensor(value) and isinstance(name, str) and is_unicode(name):
                others.append((name, value))
                continue
            self.state.names += 1
            owner = self.add(name, value)
            if owner != name:
                self.state.aliases[name] = owner
        for name, value in others:
            if name not in self._wrong:
                self.state.extra[name] = self.encode(value, f"{self._where}: {name}")
        self.state.versions = self._versions(state)

    def encode(self, value: object, where: str) -> object:
        """Encodes a value; tensors within it become tensors of the file."""
        return encode(value, where, leaf=self._put)

    def node(self, value: Any, path: str, depth: int) -> object:
        """The manifest's node for a part of a tree."""
        kind = _kind(value)
        is_leaf = kind is None or (depth > 0 and not self._holds_tensors(value))
        self.state.names += _is_tensor(value)
        if is_leaf or path.rpartition(".")[2] == EXTRA_STATE:
            if path in self._leaves:
                self._wrong[path] = _TWO_VALUES
                return {}
            self._leaves.add(path)
        if _is_tensor(value):
            return self.add(path if depth else "tensor", value)
        if is_leaf:
            return {"value": self.encode(value, self._at(path))}
        pairs = list(value.items() if kind == "dict" else enumerate(value))
        self._nodes += len(pairs)
        self._characters += sum(len(path) + len(str(key)) + depth + 2 for key, _ in pairs)  # as the reader counts them
        is_large = self._nodes > _MAX_NODES or self._characters > MAX_PATH_CHARACTERS
        if depth > _MAX_DEPTH or is_large:
            raise CodecError(
                "a value that holds itself, is nested too deeply, or has too many values or too long keys",
                where=self._at(path),
                expected=f"at most {_MAX_DEPTH} levels, {_MAX_NODES:,} values, and paths of {MAX_PATH_CHARACTERS:,} "
                "characters together",
            )
        names = [f"{path}.{key}" if depth else str(key) for key, _ in pairs]
        nodes = [self.node(item, name, depth + 1) for name, (_, item) in zip(names, pairs, strict=True)]
        if kind != "dict":
            return {kind: nodes}
        keys = [encode(key, self._at(path)) for key, _ in pairs]
        entry: dict[str, object]
        if nodes == names and keys and {str, int}.issuperset(map(type, keys)):
            entry = {"tensors": keys}
        else:
            entry = {"dict": [[key, node] for key, node in zip(keys, nodes, strict=True)]}
        if isinstance(value, OrderedDict):
            entry["ordered"] = True
        if (versions := self._versions(value)) is not None:
            entry["versions"] = versions
        return entry

    def add(self, name: Any, tensor: torch.Tensor | LazyTensor) -> str:
        """Adds a tensor. Returns the name that its bytes are stored under: this one, or that of a tied tensor."""
        state = self.state
        if type(name) is str and (name in state.tensors or name in state.subclasses or name in state.aliases):
            self._wrong[name] = _TWO_VALUES
            return name
        if isinstance(tensor, torch.Tensor) and _is_wrapper(tensor):
            return self._add_subclass(name, tensor)
        if self._of_shard is not None and isinstance(tensor, torch.Tensor) and is_sharded(tensor):
            shard = self._of_shard(tensor)
            if isinstance(shard, str):
                self._wrong[name] = shard
                return str(name)
            tensor = shard
        problem = why_not(name, tensor)
        if not problem and isinstance(tensor, torch.Tensor):
            problem = why_not_plain(tensor)
        if problem:
            self._wrong[name] = problem
            self._refused.append(tensor)
            return str(name)
        key: object
        if isinstance(tensor, torch.Tensor):
            # One with a lazy conjugation or negation shares memory with the tensor without it, but is not tied to it.
            tensor = tensor.detach().resolve_conj().resolve_neg()
            place = tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype
            key = place if tensor.numel() else id(tensor)
        else:
            key = tensor.key
        owner = self._by_bytes.setdefault(key, name)
        if owner == name:
            self.state.tensors[name] = tensor
        return owner

    def _add_subclass(self, name: object, tensor: torch.Tensor) -> str:
        if not isinstance(name, str) or not is_unicode(name):
            self._wrong[name] = NOT_A_NAME
            return str(name)
        # `Module.state_dict` returns a new object for each subclass tensor: tensors are tied if their parts are.
        cls = type(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor)
        try:
            attributes, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            within = {key: getattr(tensor, key) for key in attributes}
        except Exception as error:
            keep_interrupt(error)
            self._wrong[name] = f"its class {cls.__qualname__} raised {type(error).__name__} in __tensor_flatten__"
            return name
        self.state.subclasses[name] = {}
        parts = {key: self.add(f"{name}.{key}", part) for key, part in within.items()}
        # The manifest lists the parts before the tensor that consists of them.
        del self.state.subclasses[name]
        description = {
            "class": f"{cls.__module__}.{cls.__qualname__}",
            "parts": parts,
            "context": encode(context, f"{self._where}: {name}, its context"),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "dtype": encode(tensor.dtype),
        }
        owner = self._by_bytes.setdefault(json.dumps(description), name)
        if owner == name:
            self.state.subclasses[name] = description
        return owner

    def check(self) -> None:
        if not self._wrong:
            check_expanded(self.state.tensors, self._where)
            return
        remedy = "convert them to tensors and names that the format has, or leave them out"
        if all("on the meta device" in problem for problem in self._wrong.values()):
            remedy = "load values into them first, or leave them out"
        elif {_TWO_VALUES, NOT_A_NAME}.issuperset(self._wrong.values()):
            remedy = "give them other names, or leave them out"
        remedy = "; ".join(remedies_for(self._refused)) or remedy
        # A file of `torch.save` holds what safetensors cannot: other dtypes, layouts and names.
        if len(self._refused) == len(self._wrong) and all(
            isinstance(tensor, LazyTensor) or (isinstance(tensor, torch.Tensor) and is_plain_or_sparse(tensor))
            for tensor in self._refused
        ):
            remedy += "; ms.save to a path that ends in .pt keeps them"
        raise UnsavableError(
            f"{len(self._wrong)} of {self.state.names} tensors cannot be stored in a safetensors file",
            where=self._where,
            found=listed_problems(self._wrong),
            remedy=remedy,
        )

    def _put(self, tensor: torch.Tensor) -> str:
        name = f"{self._prefix}{len(self.state.extra_tensors)}"
        if problem := why_not_plain(tensor) or why_not(name, tensor):
            raise ValueError(problem)
        self.state.tensors[name] = tensor
        self.state.extra_tensors.append(name)
        return name

    def _versions(self, state: Mapping[object, object]) -> object:
        versions = version_metadata(state)
        if versions is None:
            return None
        saved = {str(path): dict(entry) for path, entry in versions.items() if isinstance(entry, Mapping)}
        return saved if are_usual_versions(saved) else self.encode(saved, f"{self._where}: _metadata")

    def _holds_tensors(self, value: Any, depth: int = 0) -> bool:
        """Whether the containers that a tree can have contain a tensor, or a state dict with `_metadata`."""
        if depth > _MAX_DEPTH:
            return True  # `node` raises the error for the depth
        if (known := self._holds.get(id(value))) is not None:
            return known
        items = value.values() if isinstance(value, Mapping) else value
        self._holds[id(value)] = version_metadata(value) is not None or any(
            isinstance(item, torch.Tensor | LazyTensor)
            or (_kind(item) is not None and self._holds_tensors(item, depth + 1))
            for item in items
        )
        return self._holds[id(value)]

    def _at(self, path: str) -> str:
        return f"{self._where}: {quote(path)}"


def _kind(value: object) -> str | None:
    """The kind of a container in a tree; None for a value that is encoded as a whole."""
    if type(value) in (dict, OrderedDict):
        return "dict"
    return type(value).__name__ if type(value) in (list, tuple) else None


def _is_wrapper(tensor: torch.Tensor) -> bool:
    cls = type(tensor)
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        return False
    has_both = hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")
    return has_both and not cls.__module__.startswith(_TORCHS_OWN)
