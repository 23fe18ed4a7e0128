"""Whether a request's inputs are those that a program was exported for."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from modelstate.errors import ProgramInputError
from modelstate.live.sizes import Size
from modelstate.plan.torch_private import expression_of, flatten, keyword_order

_UNBOUNDED = 2**62
ANY = object()
"""In the place of a constant that a file has no word for."""


class _Tensor(NamedTuple):
    name: str
    shape: tuple[Any, ...]
    """Numbers, and expressions of sizes that were exported as dynamic."""
    sizes: tuple[tuple[int, int], ...]
    """Those of them that are numbers, by their dimension: what is looked at first."""
    dynamic: tuple[tuple[int, Any], ...]
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]
    """Its dimensions as they lay in memory at the export, the farthest apart first."""


class _Constant(NamedTuple):
    name: str
    value: object


class _Number(NamedTuple):
    name: str
    expression: Any


class Inputs:
    """The inputs of a program: their structure, and what each of them has to be."""

    def __init__(self, where: str, spec: Any, values: Sequence[tuple[str, Any]], ranges: Mapping[Any, Any]) -> None:
        """`values` are names with what they were at the export: tensors without data, sizes, constants."""
        self._where, self._spec = where, spec
        self._names = keyword_order(spec)
        self._wanted = [_wanted(name, value) for name, value in values]
        self._ranges = {symbol: (_number(one.lower), _number(one.upper)) for symbol, one in ranges.items()}

    @classmethod
    def described_by(cls, where: str, spec: Any, found: Mapping[str, Any]) -> "Inputs":
        """The inputs as `described` has put them. Raises `KeyError`, `TypeError`, `ValueError` and `RuntimeError`."""
        inputs = cls(where, spec, (), {})
        inputs._wanted = [_from_json(one) for one in found["values"]]
        inputs._ranges = {Size(name): (low, high) for name, (low, high) in found["ranges"].items()}
        if len(inputs._wanted) != spec.num_leaves:
            raise ValueError(f"{len(inputs._wanted)} inputs, and {spec.num_leaves} in their structure")
        return inputs

    def described(self) -> dict[str, Any]:
        """All but their structure, as JSON has it."""
        ranges = {str(symbol): list(bounds) for symbol, bounds in self._ranges.items()}
        return {"values": [_to_json(one) for one in self._wanted], "ranges": ranges}

    def as_exported(self, inputs: list[Any]) -> list[torch.Tensor]:
        """The tensors among checked inputs, each with its elements in the order that it had at the export.

        A library of compiled code goes by that order, and looks at no stride. What lies in another one is copied.
        """
        found: list[torch.Tensor] = []
        for wanted, value in zip(self._wanted, inputs, strict=True):
            if isinstance(wanted, _Tensor):
                found.append(value if _lies_in(value, wanted.order) else _ordered(value, wanted.order))
        return found

    @property
    def numbers(self) -> list[str]:
        """The names of those that are whole numbers, other ones in each request."""
        return [one.name for one in self._wanted if isinstance(one, _Number)]

    def flat(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """The inputs in the order in which the program takes them. Raises `ProgramInputError`."""
        if named and list(named) != self._names and named.keys() == set(self._names):
            named = {name: named[name] for name in self._names}
        leaves, spec = flatten((args, named))
        if spec != self._spec:
            raise self._wrong("the arguments have another structure", str(self._spec), str(spec))
        symbols: dict[Any, int] = {}
        later: list[tuple[str, Any, int]] = []
        for wanted, value in zip(self._wanted, leaves, strict=True):
            if isinstance(wanted, _Tensor):
                self._check_tensor(wanted, value, symbols, later)
            elif isinstance(wanted, _Number):
                if type(value) is not int:
                    raise self._wrong(f"{wanted.name} is no whole number", "an int", type(value).__name__)
                self._bind(wanted.name, wanted.expression, value, symbols, later)
            elif wanted.value is not ANY and (type(value) is not type(wanted.value) or value != wanted.value):
                raise self._wrong(f"{wanted.name} was a constant at the export", repr(wanted.value), repr(value))
        for name, expression, value in later:
            if symbols.keys() >= expression.free_symbols and int(expression.subs(symbols)) != value:
                raise self._wrong(f"a size of {name} does not follow from the others", expression, value)
        return leaves

    def _check_tensor(
        self, wanted: _Tensor, value: Any, symbols: dict[Any, int], later: list[tuple[str, Any, int]]
    ) -> None:
        if not isinstance(value, torch.Tensor):
            raise self._wrong(f"{wanted.name} is no tensor", _shown(wanted), type(value).__name__)
        shape = value.shape
        if (
            len(shape) != len(wanted.shape)
            or value.dtype != wanted.dtype
            or value.device != wanted.device
            or any(shape[index] != size for index, size in wanted.sizes)
        ):
            raise self._wrong(f"{wanted.name} is another kind of tensor", _shown(wanted), _tensor(value))
        for index, expression in wanted.dynamic:
            self._bind(wanted.name, expression, shape[index], symbols, later)

    def _bind(
        self, name: str, expression: Any, value: int, symbols: dict[Any, int], later: list[tuple[str, Any, int]]
    ) -> None:
        if not expression.is_symbol:
            later.append((name, expression, value))
            return
        first = symbols.setdefault(expression, value)
        if first != value:
            raise self._wrong(f"sizes that must be equal differ, the second one in {name}", first, value)
        low, high = self._ranges.get(expression, (0, None))
        if value < (low or 0) or (high is not None and value > high):
            upper = "" if high is None else f" to {high}"
            raise self._wrong(f"a size of {name} is out of its range", f"from {low}{upper}", value)

    def _wrong(self, what: str, expected: object, found: object) -> ProgramInputError:
        return ProgramInputError(
            what,
            where=self._where,
            expected=expected,
            found=found,
            remedy="give what the program was exported for, or export it with dynamic_shapes= that allow this",
        )


def _wanted(name: str, value: Any) -> _Tensor | _Constant | _Number:
    if isinstance(value, torch.Tensor):
        shape = tuple(expression_of(size) for size in value.shape)
        fixed = tuple((index, int(size)) for index, size in enumerate(shape) if _is_fixed(size))
        dynamic = tuple((index, size) for index, size in enumerate(shape) if not _is_fixed(size))
        return _Tensor(name, shape, fixed, dynamic, value.dtype, value.device, _order(value))
    if isinstance(value, torch.SymInt):
        expression = expression_of(value)
        return _Constant(name, int(expression)) if _is_fixed(expression) else _Number(name, expression)
    return _Constant(name, value)


def _to_json(wanted: _Tensor | _Constant | _Number) -> dict[str, Any]:
    if isinstance(wanted, _Tensor):
        return {
            "name": wanted.name,
            "shape": [int(size) if _is_fixed(size) else str(size) for size in wanted.shape],
            "dtype": str(wanted.dtype).removeprefix("torch."),
            "device": str(wanted.device),
            "order": list(wanted.order),
        }
    if isinstance(wanted, _Number):
        return {"name": wanted.name, "number": str(wanted.expression)}
    plain = isinstance(wanted.value, int | float | str | None)
    return (
        {"name": wanted.name, "constant": wanted.value} if plain else {"name": wanted.name, "any": repr(wanted.value)}
    )


def _from_json(found: Mapping[str, Any]) -> _Tensor | _Constant | _Number:
    name = str(found["name"])
    if "number" in found:
        return _Number(name, Size(found["number"]))
    if "shape" not in found:
        return _Constant(name, found.get("constant", ANY))
    shape = tuple(size if type(size) is int else Size(size) for size in found["shape"])
    fixed = tuple((index, size) for index, size in enumerate(shape) if isinstance(size, int))
    dynamic = tuple((index, size) for index, size in enumerate(shape) if not isinstance(size, int))
    dtype, order = getattr(torch, found["dtype"]), tuple(map(int, found["order"]))
    if not isinstance(dtype, torch.dtype) or sorted(order) != [*range(len(shape))]:
        raise ValueError(f"input {name}: {found['dtype']!r}, dimensions {order}")
    return _Tensor(name, shape, fixed, dynamic, dtype, torch.device(found["device"]), order)


def _order(value: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the farthest apart to the nearest; in their own order where the strides say nothing."""
    strides = [expression_of(step) for step in value.stride()]
    if value.is_contiguous() or not all(map(_is_fixed, strides)):
        return tuple(range(value.dim()))
    return tuple(sorted(range(value.dim()), key=lambda index: -int(strides[index])))


def _lies_in(value: torch.Tensor, order: tuple[int, ...]) -> bool:
    return (value if order == tuple(range(len(order))) else value.permute(order)).is_contiguous()


def _ordered(value: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    back = sorted(range(len(order)), key=order.__getitem__)
    return value.permute(order).contiguous().permute(back)


def _is_fixed(size: Any) -> bool:
    return isinstance(size, int) or bool(getattr(size, "is_number", False))


def _number(bound: Any) -> int | None:
    """A bound of a size; None where there is none."""
    return int(bound) if -_UNBOUNDED < bound < _UNBOUNDED else None


def _shown(wanted: _Tensor) -> str:
    return f"shape {list(wanted.shape)}, {wanted.dtype}, {wanted.device}"


def _tensor(value: torch.Tensor) -> str:
    return f"shape {list(value.shape)}, {value.dtype}, {value.device}"
