"""What a value becomes on its way: `ModuleTransform`, the choice of the transform of each tensor, and shards.

Of a slot that is a DTensor, a rank loads its region of the source into its local tensor. For the rest of the load such
a slot is the local tensor, and its source is the region that belongs there: all routes of plain tensors apply. The
DTensor itself gets other memory only where the local tensor cannot keep its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import ClassVar, Protocol

import msgspec
import torch
from torch import nn

from modelstate.distributed.shards import LocalShard, shard_of
from modelstate.errors import DistributedError, TransformError, code_errors
from modelstate.problems import Problem, ProblemKind, one_line
from modelstate.rules.expression import Derived, Source, lacks_values
from modelstate.spec import StoredTensor, slices_of
from modelstate.text_format import short_repr
from modelstate.torch_compat.modules import named_modules_of
from modelstate.torch_compat.plain import is_plain, is_sharded
from modelstate.torch_compat.sharding import local_tensor, mesh_device_type, same_layout
from modelstate.transaction.slots import Slots

Transform = Callable[[str, torch.Tensor], torch.Tensor]
"""Takes a name in the model, and the tensor as it is in the checkpoint. Returns the tensor to load."""


class ModuleTransform(ABC):
    """A transform that selects its tensors by their modules, and is applied after all other changes.

    It is called with each tensor as the load would leave it (checked, cast and on its device) and with the module that
    owns the tensor. Tensors that it does not apply to are loaded as without a transform. The slot gets the class and
    the dtype of the result. A result that is an `nn.Parameter` without `requires_grad` clears `requires_grad` of the
    slot.

    Examples:
        >>> class Doubled(modelstate.loading.ModuleTransform):
        ...     def applies_to(self, name, module):
        ...         return isinstance(module, nn.Linear)
        ...     def __call__(self, name, tensor, module):
        ...         return tensor * 2
        >>> report = modelstate.load(model, "model.safetensors", transform=Doubled())
    """

    returns_plain: ClassVar[bool] = True
    """Whether the results are plain tensors. FSDP2 gathers no others."""

    @abstractmethod
    def applies_to(self, name: str, module: nn.Module) -> bool:
        """Whether the transform applies to a tensor. Called before any value is read.

        Args:
            name: The name of the tensor in the model.
            module: The module that has the tensor as an attribute, as it is before the load; it may be on meta.
        """

    @abstractmethod
    def __call__(self, name: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """Returns the tensor to load, of the same shape. The memory of `tensor` is reused after the call."""

    def extra_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The most memory that a call needs in addition to its argument and its result, in bytes.

        The plan of a load contains the largest of these numbers.

        Args:
            shape: The shape of the argument.
            dtype: The dtype of the argument.
        """
        return 0

    def block_shape(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...] | None:
        """The shape of the blocks whose results do not depend on each other; None if a call needs the whole tensor.

        A rank of a sharded model transforms its part of a tensor, if it holds whole blocks.

        Args:
            shape: The shape of the whole tensor.
            dtype: The dtype of the tensor.
        """
        return None


class BlockFunction(Protocol):
    """Computes the result of a transform from some rows of a tensor, straight into the memory of the result.

    Several threads call `write` at once, each with other rows, while the tensor is read.
    """

    extra_bytes: int
    """The memory that a thread needs for its calls."""

    def parts(self, rows: int) -> dict[str, torch.Tensor]:
        """Allocates the plain tensors that a result of so many rows consists of."""

    def write(self, rows: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Transforms rows, whose memory it may overwrite, into the same rows of the parts."""

    def whole(self, parts: dict[str, torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """Returns the result that consists of these parts."""


class BlockTransform(ModuleTransform):
    """A transform of this library that may compute its result in blocks of rows."""

    @abstractmethod
    def block_function(self, shape: tuple[int, ...], dtype: torch.dtype) -> BlockFunction | None:
        """Returns the function for a tensor on the CPU; None if a call needs the whole tensor."""


Pairs = tuple[tuple[str, Transform | ModuleTransform | None], ...]
"""Glob patterns with their transforms. The first pattern that matches counts; None leaves its tensors alone."""


class Transforms:
    """The transforms of a load, by the names of tensors of the model."""

    def __init__(self, given: Transform | ModuleTransform | Pairs, root: nn.Module, slots: Slots) -> None:
        self.problems: list[Problem] = []
        self._by_pattern = isinstance(given, tuple)
        self._pairs: Pairs = given if isinstance(given, tuple) else (("*", given),)
        self._modules = named_modules_of(root)
        self._matching, self._winning, self._applied = set[int](), set[int](), set[int]()
        """The positions of patterns that match, that are the first to match, and whose transforms apply."""
        self._chosen: dict[str, Transform | Bound | None] = {}
        for slot in slots.tensors:
            self._chosen.update(dict.fromkeys(slot.names, self._choose(slot.names)))

    def of(self, name: str) -> Transform | Bound | None:
        """Returns the transform of the tensor of this name. A `Bound` one gets the tensor as it would be loaded."""
        if name not in self._chosen:  # code of the model has created the tensor during the load
            self._chosen[name] = self._choose((name,))
        return self._chosen[name]

    def idle(self) -> Iterator[Problem]:
        """Yields a problem for each pattern, and for each transform, without effect."""
        for index, (pattern, transform) in enumerate(self._pairs):
            name, why = pattern if self._by_pattern else str(transform), None
            if self._by_pattern and index not in self._winning:
                why = "earlier patterns match all of its names" if index in self._matching else ""
            elif isinstance(transform, ModuleTransform) and index not in self._applied:
                matched = "the names that match" if self._by_pattern else "the model's tensors"
                why = f"{transform} applies to none of {matched}"
            if why is not None:
                yield Problem(ProblemKind.IDLE_PATTERN, name, found="transform", why=why)

    def _choose(self, names: tuple[str, ...]) -> Transform | Bound | None:
        """Chooses for a tensor with these names. The first pattern that matches a name of a tied tensor counts."""
        paths = [name.rpartition(".")[0] for name in names]
        texts = *names, *paths
        hits = [at for at, (pattern, _) in enumerate(self._pairs) if any(fnmatchcase(text, pattern) for text in texts)]
        self._matching.update(hits)
        if not hits:
            return None
        self._winning.add(hits[0])
        transform = self._pairs[hits[0]][1]
        if not isinstance(transform, ModuleTransform):
            return transform
        owners: dict[str, nn.Module] = {}
        for name, path in zip(names, paths, strict=True):
            module = self._modules.get(path)
            with _method_errors(name, "applies_to"):
                if module is not None and transform.applies_to(name, module):
                    owners[name] = module
        if not owners:
            return None
        self._applied.add(hits[0])
        first = next(iter(owners))
        if others := tuple(name for name in names if name not in owners):
            self.problems.append(Problem(ProblemKind.UNEVEN_TRANSFORM, first, found=str(transform), others=others))
        return Bound(transform, owners[first])


class Bound(msgspec.Struct, frozen=True):
    """A transform of modules with the module that owns a tensor: a function of name and tensor."""

    transform: ModuleTransform
    module: nn.Module

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.transform(name, tensor, self.module)

    def block_shape(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...] | None:
        """Returns the checked result of `block_shape`. Raises `TransformError`."""
        with _method_errors(name, "block_shape"):
            blocks = self.transform.block_shape(shape, dtype)
            if blocks is not None and not (len(blocks) == len(shape) and all(type(n) is int and n > 0 for n in blocks)):
                raise ValueError(f"block_shape returned {blocks!r} for a tensor of shape {shape}")
            return blocks

    def extra_bytes(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Returns the checked result of `extra_bytes`. Raises `TransformError`."""
        with _method_errors(name, "extra_bytes"):
            nbytes = self.transform.extra_bytes(shape, dtype)
            if not (type(nbytes) is int and nbytes >= 0):
                raise TypeError(f"extra_bytes returned {nbytes!r}; it must return an integer >= 0")
            return nbytes


BY_TRANSFORM = "transform="


def called(transform: Transform, name: str, value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Calls a transform, and returns its result, a tensor of this shape. Raises `TransformError`."""
    with transform_errors(name):
        result = transform(name, value)
    if not isinstance(result, torch.Tensor) or result.shape != torch.Size(shape) or result.is_meta:
        is_tensor = isinstance(result, torch.Tensor)
        raise TransformError(
            "the transform returned something that cannot be loaded; nothing has been changed",
            where=name,
            expected=f"a tensor of shape {tuple(shape)}",
            found=f"shape {tuple(result.shape)} on {result.device}" if is_tensor else short_repr(result),
            remedy="have it return a tensor of this shape with values; to change shapes, use rules=",
        )
    return result


def transform_errors(name: str) -> AbstractContextManager[None]:
    """Turns exceptions of a transform into `TransformError` with the name of the tensor."""
    remedy = "see the traceback of the cause; a transform is called with the name and the tensor"
    return code_errors(TransformError, "the transform raised; nothing has been changed", where=name, remedy=remedy)


def _method_errors(name: str, method: str) -> AbstractContextManager[None]:
    what = f"{method}() of the transform failed; nothing has been changed"
    return code_errors(TransformError, what, where=name)


# Slots that are DTensors.


class ShardedSlot(msgspec.Struct, frozen=True, eq=False):
    """A DTensor of the model, and the value of the whole tensor."""

    tensor: torch.Tensor
    """The DTensor."""
    shard: LocalShard
    """The part of it that this rank holds."""
    value: torch.Tensor
    """The value of the whole tensor, as it is in the checkpoint."""

    def local_value(self, stored: Source | None) -> tuple[torch.Tensor, Source | None]:
        """Returns what is loaded into the local tensor, and its source, for the source of the whole tensor.

        A value that is not a view of the whole one is without memory until it is computed.
        """
        value = self.value
        if is_sharded(value):
            given, value = shard_of(value), local_tensor(value)
            if given is None or not given.is_whole:
                return value, None if stored is None else value
        if isinstance(stored, Derived) and not stored.parts:
            # Initial values are computed once, and whole: they are random numbers, equal on all ranks.
            change, shape = stored.change, self.shard.shape
            source: Source = Derived(stored.dtype, shape, (), lambda: self._part_of(change()), is_certain=False)
        else:
            source = self.shard.of(value if stored is None or is_sharded(self.value) else stored)
        if isinstance(source, torch.Tensor):
            return source, None if stored is None else source
        is_view = isinstance(stored, StoredTensor) and isinstance(source, StoredTensor)
        if is_view and is_plain(value) and len(boxes := self.shard.boxes()) == 1:
            return value[slices_of(boxes[0][0])], source
        device = "meta" if value.is_meta or lacks_values(source) else "cpu"
        return torch.empty(self.shard.shape, dtype=value.dtype, device=device), source

    def cropped(self, transform: Transform, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns the part of a transform's result that this rank holds."""
        result = transform(name, whole)
        if not isinstance(result, torch.Tensor) or result.shape != self.tensor.shape or not is_plain(result):
            raise TransformError(
                "the transform returned something that cannot be split over the ranks; nothing has been changed",
                where=name,
                expected=f"a plain tensor of shape {tuple(self.tensor.shape)}",
                found=f"{type(result).__name__} of shape {tuple(getattr(result, 'shape', ()))}",
            )
        return self._part_of(result)

    def _part_of(self, whole: torch.Tensor) -> torch.Tensor:
        local = whole.new_empty(self.shard.shape)
        for box, place in self.shard.boxes():
            local[slices_of(place)] = whole[slices_of(box)]
        return local


def sharded_slot(
    name: str, tensor: torch.Tensor, value: torch.Tensor, device: torch.device | None
) -> ShardedSlot | Problem:
    """Returns the slot of a DTensor, or the problem that keeps its ranks from loading their regions of `value`.

    `device` is the device that the load asks for.
    """

    def unloadable(why: str) -> Problem:
        return Problem(ProblemKind.UNLOADABLE_LAYOUT, name, why=why)

    mesh_device, local = mesh_device_type(tensor), local_tensor(tensor)
    if device is not None and device.type not in (mesh_device, tensor.device.type):
        return unloadable(f"its mesh is on {mesh_device}, and device= asks for {device.type}")
    try:
        shard, given = shard_of(tensor), shard_of(value) if is_sharded(value) else None
    except DistributedError as error:
        return unloadable(one_line(error))
    if shard is None:
        return unloadable("this rank is not in the mesh of the DTensor")
    if not is_plain(local):
        return unloadable(f"its local tensor is a {type(local).__name__}")
    if is_sharded(value) and (given is None or not (given.is_whole or same_layout(tensor, value))):
        return Problem(ProblemKind.OTHER_SHARDING, name)
    if not (is_sharded(value) or is_plain(value)):
        return unloadable(f"the value is a {type(value).__name__}, which has no regions")
    return ShardedSlot(tensor, shard, value)
