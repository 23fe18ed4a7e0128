"""A tensor that is put together of rows that come one after the other, plain or of a class that can be flattened."""

import threading
from typing import Any

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


class Joined:
    """A tensor of so many rows, of which some are given at a time, from any thread and in any order."""

    def __init__(self, name: str, rows: int, watch: PageWatch) -> None:
        self._name, self._rows, self._watch = name, rows, watch
        self._first: torch.Tensor | None = None
        self._parts: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def put(self, first: int, some: torch.Tensor) -> None:
        """Takes the rows from `first` on. Raises `TransformError` where they are not like those that came before."""
        parts = parts_of(some)
        with self._lock:
            if self._first is None and parts is not None:
                self._begin(some, parts)
        if parts is None or parts.keys() != self._parts.keys() or type(some) is not type(self._first):
            raise TransformError(
                "what the transform returned for some rows cannot be joined; nothing has been changed",
                where=self._name,
                expected="plain tensors, or tensors of one class, whose parts have as many rows",
                found=type(some).__name__,
                remedy="let rows_at_once return None, so that it gets the whole tensor",
            )
        for name, part in parts.items():
            self._parts[name][first : first + part.shape[0]].copy_(part)

    def _begin(self, some: torch.Tensor, parts: dict[str, torch.Tensor]) -> None:
        self._first = some
        layouts = [(torch.Size((self._rows, *part.shape[1:])), None, part.dtype) for part in parts.values()]
        self._parts = dict(zip(parts, fresh_tensors(layouts, self._watch), strict=True))
        self._parts = {
            name: part if parts[name].device.type == "cpu" else torch.empty_like(part, device=parts[name].device)
            for name, part in self._parts.items()
        }

    @property
    def whole(self) -> torch.Tensor:
        """The tensor, when all rows have come."""
        some = self._first
        assert some is not None
        if is_plain(some):
            return self._parts[""]
        shape = torch.Size((self._rows, *some.shape[1:]))
        _, context = some.__tensor_flatten__()  # type: ignore[attr-defined]
        cls: Any = type(some.data)
        made: torch.Tensor = cls.__tensor_unflatten__(self._parts, context, shape, contiguous_stride(shape))
        return made

    @property
    def freezes(self) -> bool:
        """Whether the rows came as a parameter that gets no gradient."""
        return isinstance(self._first, torch.nn.Parameter) and not self._first.requires_grad
