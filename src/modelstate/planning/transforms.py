"""Which transform is for which tensor."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from modelstate.errors import TransformError
from modelstate.problems import IdlePattern, Problem, UnevenTransform
from modelstate.process import cached_attribute
from modelstate.transaction.slots import Slots, named_modules_of

Transform = Callable[[str, torch.Tensor], torch.Tensor]
"""Makes of a name in the model, and of the tensor as the checkpoint has it, the tensor to load."""


class RowsWriter(NamedTuple):
    """Writes rows of a tensor, as they become, to where they stay."""

    like: torch.Tensor
    """What some rows become: the result gets its class, its `requires_grad`, and parts of its dtypes and columns."""
    write: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], None]
    """Gets some rows, whose memory may be overwritten, and the same rows of the parts of the result: by the names of
    `__tensor_flatten__`, or `""` for a plain tensor. Called from several threads at once."""


class ModuleTransform(ABC):
    """A transform of what a module has been given: it says which tensors it is for, and sees them last.

    It gets each tensor as the load would leave it, checked, cast and on its device, and the module that owns it. What
    it is not for is loaded as without a transform. The result gives the tensor's place its class and dtype; where it
    is an `nn.Parameter` without `requires_grad`, the place gets no gradient any more.
    """

    @abstractmethod
    def applies_to(self, name: str, module: nn.Module) -> bool:
        """Whether it is for the tensor of this name, which is an attribute of `module`. Asked before anything is read.

        `module` is as it is before the load, perhaps on meta.
        """

    @abstractmethod
    def __call__(self, name: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """What to load, of the same shape. The memory of `tensor` is used again afterwards."""

    def extra_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The most memory that a call takes for such a tensor, beside what it is given and what it returns, in bytes.

        A plan counts it for the tensor that takes most.
        """
        return 0

    def rows_at_once(self, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """How many rows, of dimension 0, of such a tensor are best remade at a time; None for all of them.

        Only where some rows of the result depend on the same rows of the tensor alone. Then the tensor is remade while
        it is read, by calls from several threads at once, each with some of its rows, and what they return is joined:
        plain tensors, or tensors of one class whose `__tensor_flatten__` gives plain tensors with as many rows.
        """
        return None

    def rows_writer(self, shape: tuple[int, ...], dtype: torch.dtype, module: nn.Module) -> RowsWriter | None:
        """What writes rows of a tensor of the module's to where they stay, on the CPU; None where calls return them.

        It saves making a tensor of what becomes of some rows, and copying that.
        """
        return None


Pairs = tuple[tuple[str, Transform | ModuleTransform | None], ...]
"""Glob patterns, each with the transform of what it matches first; None leaves that alone."""


class Choice(NamedTuple):
    """What is done to one tensor on its way."""

    first: Transform | None = None
    """Called with the tensor as the checkpoint has it. What it returns is asked for, whatever its dtype."""
    last: ModuleTransform | None = None
    """Called with the tensor as it would be loaded."""
    module: nn.Module | None = None
    """The owner, for `last`."""


_NOTHING = Choice()


class Transforms:
    """The transforms of a load, and for which tensors of the model they are."""

    def __init__(self, given: Transform | ModuleTransform | Pairs | None, root: nn.Module, slots: Slots) -> None:
        self.problems: list[Problem] = []
        self._pairs: Pairs = given if isinstance(given, tuple) else () if given is None else (("*", given),)
        self._by_pattern = isinstance(given, tuple)
        self._root, self._slots = root, slots
        self._winning: set[int] = set()
        self._matching: set[int] = set()
        self._applied: set[int] = set()
        self._choices: dict[str, Choice] = {}
        if self._by_pattern or isinstance(given, ModuleTransform):
            for slot in slots.tensors:
                self._choices.update(dict.fromkeys(slot.names, self._choose(slot.names)))
        elif given is not None and not isinstance(given, tuple):
            self._everywhere = Choice(given)

    _everywhere: Choice | None = None

    def of(self, name: str) -> Choice:
        """What is done to the tensor of this name."""
        if self._everywhere is not None:
            return self._everywhere
        if not self._pairs:
            return _NOTHING
        found = self._choices.get(name)
        if found is None:  # a tensor that code of the model has made since
            found = self._choices[name] = self._choose((name,))
        return found

    def idle(self) -> Iterator[Problem]:
        """A problem for each pattern, and each transform, that changes nothing."""
        if self._everywhere is not None:
            return
        for index, (pattern, transform) in enumerate(self._pairs):
            name = pattern if self._by_pattern else str(transform)
            if self._by_pattern and index not in self._winning:
                why = "a pattern before it takes all that it matches" if index in self._matching else ""
                yield IdlePattern(name, "transform", why)
            elif isinstance(transform, ModuleTransform) and index not in self._applied:
                matched = "what it matches" if self._by_pattern else "the model's tensors"
                yield IdlePattern(name, "transform", f"{transform} is for none of {matched}")

    def _choose(self, names: tuple[str, ...]) -> Choice:
        """For a tensor with these names. A tied one has several, and the first pattern that matches any of them."""
        places = [(name, *name.rpartition(".")[::2]) for name in names]
        hits = [
            index
            for index, (pattern, _) in enumerate(self._pairs)
            if any(fnmatchcase(name, pattern) or fnmatchcase(path, pattern) for name, path, _ in places)
        ]
        self._matching.update(hits)
        if not hits:
            return _NOTHING
        self._winning.add(hits[0])
        transform = self._pairs[hits[0]][1]
        if not isinstance(transform, ModuleTransform):
            return Choice(transform) if transform is not None else _NOTHING
        owners = [(name, self._modules_by_path.get(path)) for name, path, _ in places]
        applies = [module is not None and _asked(transform, name, module) for name, module in owners]
        if not any(applies):
            return _NOTHING
        self._applied.add(hits[0])
        if not all(applies):
            others = tuple(name for name, applied in zip(names, applies, strict=True) if not applied)
            name = names[applies.index(True)]
            self.problems.append(UnevenTransform(name, str(transform), others))
        return Choice(None, transform, owners[applies.index(True)][1])

    @cached_attribute
    def _modules_by_path(self) -> dict[str, nn.Module]:
        return named_modules_of(self._root)


def _asked(transform: ModuleTransform, name: str, module: nn.Module) -> bool:
    with _asking(name, "whether it is for a tensor"):
        return transform.applies_to(name, module)


def asked_rows(transform: ModuleTransform, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
    """What it says of the rows of a tensor. Raises `TransformError`."""
    with _asking(name, "how many rows of a tensor it takes at once"):
        rows = transform.rows_at_once(shape, dtype)
        if rows is not None and not (_is_number(rows) and rows > 0):
            raise TypeError(f"rows_at_once returned {rows!r}, and no number of rows from 1, or None")
        return rows


def asked_writer(bound: "Bound", name: str, shape: tuple[int, ...], dtype: torch.dtype) -> RowsWriter | None:
    """What it says writes rows of a tensor. Raises `TransformError`."""
    with _asking(name, "what writes rows of a tensor"):
        writer = bound.transform.rows_writer(shape, dtype, bound.module)
        if not (writer is None or isinstance(writer, RowsWriter)):
            raise TypeError(f"rows_writer returned {writer!r}, and no RowsWriter, or None")
        if writer is not None and (writer.like.shape[1:] != shape[1:] or writer.like.device.type != "cpu"):
            raise ValueError(f"rows of shape {tuple(writer.like.shape[1:])} on {writer.like.device}, of {shape[1:]}")
        return writer


def asked_bytes(transform: ModuleTransform, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What it says of the memory that it takes. Raises `TransformError`."""
    with _asking(name, "how much memory it takes for a tensor"):
        nbytes = transform.extra_bytes(shape, dtype)
        if not (_is_number(nbytes) and nbytes >= 0):
            raise TypeError(f"extra_bytes returned {nbytes!r}, and no number of bytes from 0")
        return nbytes


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@contextmanager
def _asking(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise TransformError(
            f"the transform cannot say {what}; nothing has been changed",
            where=name,
            found=f"{type(error).__name__}: {error}",
        ) from error


@dataclass(frozen=True, slots=True)
class Bound:
    """A module's transform as a function of name and tensor."""

    transform: ModuleTransform
    module: nn.Module

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.transform(name, tensor, self.module)


def bound(choice: Choice) -> Bound | None:
    """The last transform, with its module."""
    return Bound(choice.last, choice.module) if choice.last is not None and choice.module is not None else None
