"""A tensor that is put together of rows that come one after the other, plain or of a class that can be flattened."""

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from modelstate.errors import TransformError
from modelstate.place.memory import PageWatch, fresh_tensors
from modelstate.plan.placement import is_plain
from modelstate.spec import contiguous_stride


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The plain tensors that a tensor is made of, each with the tensor's rows; None where it is not of that kind."""
    if is_plain(tensor):
        parts = {"": tensor}
    else:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            return None
        parts = {name: getattr(tensor, name) for name in flatten()[0]}
    rows = tensor.shape[0]
    fit = all(is_plain(part) and part.dim() and len(part) == rows and part.is_contiguous() for part in parts.values())
    return parts if fit else None


class _Part(NamedTuple):
    name: str
    columns: torch.Size
    """The shape of a row."""
    dtype: torch.dtype
    device: torch.device


class _Kind(NamedTuple):
    """What all pieces of a tensor have in common."""

    cls: type
    context: str
    parts: tuple[_Part, ...]
    freezes: bool


class Joined:
    """A tensor of so many rows, of which some are given at a time, from any thread and in any order."""

    def __init__(self, name: str, rows: int, watch: PageWatch) -> None:
        self._name, self._rows, self._watch = name, rows, watch
        self._kind: _Kind | None = None
        self._context: Any = None
        self._shape = torch.Size()
        self._parts: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def put(self, first: int, some: torch.Tensor) -> None:
        """Takes the rows from `first` on. Raises `TransformError` where they are not like those that came before."""
        for name, part in self.begin(some).items():
            self._parts[name][first : first + part.shape[0]].copy_(part)

    def begin(self, some: torch.Tensor) -> dict[str, torch.Tensor]:
        """Makes the memory for rows that are like these, without taking them, and returns their parts.

        Raises `TransformError` where they are not like those that came before.
        """
        parts = parts_of(some)
        kind = None if parts is None else _kind(some, parts)
        with self._lock:
            if self._kind is None and kind is not None:
                self._begin(kind, _context(some), some.shape[1:])
        if parts is None or kind != self._kind:
            raise TransformError(
                "what the transform returned for some rows cannot be joined; nothing has been changed",
                where=self._name,
                expected="plain tensors, or tensors of one class, whose parts have as many rows"
                if self._kind is None
                else f"the same for all rows: {self._kind}",
                found=type(some).__name__ if kind is None else kind,
                remedy="let rows_at_once return None, so that it gets the whole tensor",
            )
        return parts

    @property
    def has_begun(self) -> bool:
        """Whether any rows have come, which say what parts there are."""
        return self._kind is not None

    def at(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """The memory for so many rows from the first on, by part, once it has begun."""
        return {name: part[first : first + count] for name, part in self._parts.items()}

    def _begin(self, kind: _Kind, context: Any, columns: torch.Size) -> None:
        self._context, self._shape = context, torch.Size((self._rows, *columns))
        on_cpu = {part.name: part for part in kind.parts if part.device.type == "cpu"}
        layouts = [(torch.Size((self._rows, *part.columns)), None, part.dtype) for part in on_cpu.values()]
        fresh = dict(zip(on_cpu, fresh_tensors(layouts, self._watch), strict=True))
        for name, columns, dtype, device in kind.parts:
            there = fresh.get(name)
            made = torch.empty((self._rows, *columns), dtype=dtype, device=device) if there is None else there
            self._parts[name] = made
        self._kind = kind

    @property
    def whole(self) -> torch.Tensor:
        """The tensor, when all rows have come."""
        assert self._kind is not None
        if "" in self._parts:
            return self._parts[""]
        cls: Any = self._kind.cls
        made: torch.Tensor = cls.__tensor_unflatten__(
            self._parts, self._context, self._shape, contiguous_stride(self._shape)
        )
        return made

    @property
    def freezes(self) -> bool:
        """Whether the rows came as a parameter that gets no gradient."""
        return self._kind is not None and self._kind.freezes


def _kind(some: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> _Kind:
    context = "" if is_plain(some) else repr(_context(some))
    like = tuple(_Part(name, part.shape[1:], part.dtype, part.device) for name, part in parts.items())
    return _Kind(type(some.data), context, like, isinstance(some, torch.nn.Parameter) and not some.requires_grad)


def _context(some: torch.Tensor) -> Any:
    return None if is_plain(some) else some.__tensor_flatten__()[1]  # type: ignore[attr-defined]
