"""A checkpoint as a state that can be saved: its tensors come later, everything else is there."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from modelstate.codec.plain import is_quantized
from modelstate.errors import KeyNotFoundError, MemoryBudgetError, OptionError
from modelstate.read.checkpoint import Checkpoint, bytes_key
from modelstate.read.overflow import Overflows
from modelstate.read.pickled import Refused
from modelstate.read.ranges import read_threads
from modelstate.read.tree import is_container, rebuild, subtree
from modelstate.spec import Encoded, Stored, StoredComposite
from modelstate.words import size
from modelstate.write.later import Later, OnCast, later, storages_of, whole


@dataclass(slots=True)
class Streamed:
    """A state, of which tensors may come later, and what is said of it."""

    state: Mapping[Any, Any]
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Text that the file said of itself."""
    attached: Mapping[str, Any] | None = None
    schema: str | None = None
    overflows: Overflows = field(default_factory=Overflows)
    """Counts what becomes infinite or NaN by a cast while it is written."""
    notes: Sequence[str] = ()
    """What else the report says."""


def streamed(checkpoint: Checkpoint, cast: torch.dtype | None = None) -> Streamed:
    """All of a checkpoint, with its floating point tensors `cast` to a dtype.

    Raises `OptionError` for a cast that torch does not have, and `CodecError` for a value that cannot be decoded.
    """
    making = Making(checkpoint, cast)
    return around(checkpoint, making.node(_root(checkpoint), ""), making)


def around(checkpoint: Checkpoint, state: Mapping[Any, Any], making: "Making") -> Streamed:
    """A state that is made of a checkpoint, with what its file says of itself."""
    told = {key: value for key, value in checkpoint.contents.metadata.items() if type(value) is str}
    schema = told.pop("schema", None)
    attached = (
        checkpoint.metadata.get("extra") if isinstance(checkpoint.contents.metadata.get("extra"), Encoded) else None
    )
    return Streamed(state, told, attached, schema, making.overflows, making.notes())


def threads_within(tensors: Mapping[str, Any], max_memory_bytes: int | None, where: str) -> int:
    """How many threads may make tensors at once. Raises `MemoryBudgetError` where one is too many."""
    needs = {name: one.memory_bytes for name, one in tensors.items() if isinstance(one, Later)}
    threads = read_threads()
    if max_memory_bytes is None or not needs:
        return threads
    largest = max(needs, key=lambda name: needs[name])
    if needs[largest] > max_memory_bytes:
        raise MemoryBudgetError(
            "a tensor needs more memory while it is written than there may be",
            where=f"{where}: {largest}",
            expected=f"at most {size(max_memory_bytes)}",
            found=f"{needs[largest]:,} bytes",
            remedy=f"max_memory_bytes={needs[largest]} or more",
        )
    return max(1, min(threads, max_memory_bytes // max(needs[largest], 1)))


class Making:
    """Makes tensors of a checkpoint such that come later."""

    def __init__(self, checkpoint: Checkpoint, cast: torch.dtype | None = None) -> None:
        self._checkpoint, self._cast = checkpoint, cast
        self._read_all = partial(checkpoint.read_all, threads=1)
        self._values = checkpoint.flat.values
        self.overflows = Overflows()
        self._made_now: dict[int, torch.Tensor] = {}
        """What is in memory all the time, by the ids of what is stored."""
        self._uncast: dict[str, list[str]] = {}
        """By the names of classes that are not cast, the names of tensors."""

    def node(self, node: Any, path: str) -> Any:
        """A part of the tree, by its path."""
        if path in self._values:
            return allowed(rebuild(node, self._checkpoint.read))
        if not is_container(node):
            return self.tensor(node, path)
        if isinstance(node, Mapping):
            made: Any = OrderedDict() if isinstance(node, OrderedDict) else {}
            for key, one in node.items():
                if not isinstance(one, Refused):
                    made[key] = self.node(one, f"{path}.{key}" if path else str(key))
            if hasattr(node, "_metadata"):
                made._metadata = node._metadata
            return made
        items = [
            self.node(one, f"{path}.{index}" if path else str(index))
            for index, one in enumerate(node)
            if not isinstance(one, Refused)
        ]
        return items if isinstance(node, list) else tuple(items)

    def tensor(self, stored: Stored, path: str) -> Any:
        """What stands for a tensor. What is made of others is read here and now."""
        if not _is_plain(stored):
            if id(stored) not in self._made_now:
                value = stored if isinstance(stored, torch.Tensor) else self._checkpoint.read(stored)
                self._made_now[id(stored)] = self._cast_now(value, path)
            return self._made_now[id(stored)]
        cast = self.cast_of(stored, path)
        if isinstance(stored, torch.Tensor):
            if cast is None:
                return stored
            shape, key, storages = tuple(stored.shape), bytes_key(stored, path), storages_of(stored)
            return whole(cast, shape, key, stored.detach, 0, storages, self.on_cast(path))
        return later(stored, bytes_key(stored, path), self._read_all, cast, self.on_cast(path))

    def _cast_now(self, value: torch.Tensor, path: str) -> torch.Tensor:
        """A sparse tensor, cast; a subclass of tensors as it is. Raises `OptionError` for one that is quantized."""
        to = self._cast
        if to is None or value.dtype == to or not value.dtype.is_floating_point:
            return value
        if is_quantized(value):
            raise OptionError(
                "a quantized tensor cannot be cast",
                where=f"{self._checkpoint.source}: {path}",
                expected=f"a tensor of {to}, or one that can be cast to it",
                found=f"{type(value).__name__} of {value.dtype}",
                remedy="leave out dtype=, or name another part with key=",
            )
        if type(value) not in _PLAIN or value.layout not in _SPARSE:
            self._uncast.setdefault(type(value).__name__, []).append(path)
            return value
        with torch.inference_mode(False), torch.no_grad():
            try:
                cast = value.detach().to(to)
            except (RuntimeError, NotImplementedError) as error:
                raise self._no_cast(value.dtype, path, error) from error
            self.overflows.check(path, _elements(value.detach()), _elements(cast))
        return cast

    def _no_cast(self, dtype: torch.dtype, path: str, error: Exception) -> OptionError:
        return OptionError(
            f"torch cannot cast {dtype} to {self._cast}", where=f"{self._checkpoint.source}: {path}", found=error
        )

    def notes(self) -> list[str]:
        """What is to be said of the tensors that were made."""
        return [
            f"{'1 tensor' if len(paths) == 1 else f'{len(paths)} tensors'} of the class {name} "
            f"{'is' if len(paths) == 1 else 'are'} not cast: {', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''}"
            for name, paths in self._uncast.items()
        ]

    def on_cast(self, path: str) -> OnCast:
        """What hears of the casts of a tensor."""
        return partial(self.overflows.check, path)

    def cast_of(self, tensor: Any, path: str) -> torch.dtype | None:
        """What a tensor is cast to, if it is. Raises `OptionError` where torch has no such cast."""
        to = self._cast
        if to is None or tensor.dtype == to or not tensor.dtype.is_floating_point or not _is_plain(tensor):
            return None
        try:
            torch.zeros(tensor.dtype.itemsize, dtype=torch.uint8).view(tensor.dtype).to(to)
        except (RuntimeError, NotImplementedError) as error:
            raise self._no_cast(tensor.dtype, path, error) from error
        return to


def allowed(value: Any) -> Any:
    """The value without the placeholders that stand in it for what a file may not use."""
    if type(value) in (dict, OrderedDict):
        kept = {key: allowed(one) for key, one in value.items() if not isinstance(one, Refused)}
        return kept if type(value) is dict else OrderedDict(kept)
    if type(value) in (list, tuple):
        return type(value)(allowed(one) for one in value if not isinstance(one, Refused))
    return value


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a sparse tensor that it stores."""
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def _is_plain(tensor: Any) -> bool:
    if isinstance(tensor, torch.Tensor):
        return type(tensor) in _PLAIN and tensor.layout is torch.strided
    return not isinstance(tensor, StoredComposite) or tensor.kind == "dcp shards"


def _root(checkpoint: Checkpoint) -> Mapping[Any, Any]:
    """The tree of the checkpoint; its names alone, where its key is a part of them."""
    with suppress(KeyNotFoundError):
        node = subtree(checkpoint.contents.tree, checkpoint.key, checkpoint.source)
        if isinstance(node, Mapping):
            return node
    return flat_root(checkpoint)


def flat_root(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """All tensors and values of a checkpoint by their names."""
    made: Any = OrderedDict[str, Any]({**checkpoint.flat.tensors, **checkpoint.flat.values})
    if checkpoint.versions is not None:
        made._metadata = checkpoint.versions
    return made  # type: ignore[no-any-return]
