"""Whether a request's inputs are those that a program was exported for: shapes, dtypes, guards."""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from modelstate.errors import ProgramInputError
from modelstate.torch_compat.private import expression_of, flatten, keyword_order, leaf_paths, text_of_size

_Value = Callable[[Any], Any]
"""What an expression is, of the values of its symbols or of the inputs of a call."""


class _Function(NamedTuple):
    call: Callable[..., Any]
    fewest: int
    most: int


_BINARY: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS = {
    "Max": _Function(max, 2, 99),
    "Min": _Function(min, 2, 99),
    "max": _Function(max, 2, 99),
    "min": _Function(min, 2, 99),
    "Mod": _Function(operator.mod, 2, 2),
    "FloorDiv": _Function(operator.floordiv, 2, 2),
}
_BINARY_OF_CONDITIONS = {**_BINARY, ast.Div: operator.truediv}
_FUNCTIONS_OF_CONDITIONS = {
    **_FUNCTIONS,
    "abs": _Function(abs, 1, 1),
    "math.floor": _Function(math.floor, 1, 1),
    "math.ceil": _Function(math.ceil, 1, 1),
    "math.trunc": _Function(math.trunc, 1, 1),
    "torch.sym_float": _Function(float, 1, 1),
}
_COMPARED: dict[type, Any] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_DEEPEST = 100
"""Levels of an expression: a call of it has as many, wherever in a program that is."""


class Size:
    """An expression of symbols and whole numbers, which nothing but these functions can be called from.

    Raises `ValueError` for any other text. A process that serves need not import `sympy`.
    """

    __slots__ = ("_value", "is_symbol", "symbols", "text")

    def __init__(self, text: str) -> None:
        tree = _parsed(text, "size")
        names: set[str] = set()

        def leaf(node: ast.expr) -> _Value | None:
            if not isinstance(node, ast.Name):
                return None
            names.add(node.id)
            return operator.itemgetter(node.id)

        self._value = _arithmetic(tree, leaf, _BINARY, _FUNCTIONS, int, _DEEPEST)
        self.is_symbol = isinstance(tree, ast.Name)
        self.text = tree.id if isinstance(tree, ast.Name) else text
        self.symbols = frozenset(names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text

    def value(self, values: Mapping[str, int]) -> int:
        """The number that it is with these values of its symbols. Raises `ZeroDivisionError`."""
        found: int = self._value(values)
        return found

    def solved(self, symbol: str, value: int, values: Mapping[str, int]) -> int | None:
        """What a symbol must be, which it is a multiple of and a sum with; None where there is no whole number."""
        first, second = (self.value({**values, symbol: one}) for one in (0, 1))
        if first == second:
            return None
        found = (value - first) // (second - first)
        return found if found >= 0 and self.value({**values, symbol: found}) == value else None


class Condition:
    """What the sizes of inputs must fulfil: comparisons of `name.shape[0]`, and of inputs that are numbers.

    Raises `ValueError` for any other text, and where it is of other inputs than `ranks` has dimensions of, None for
    numbers.
    """

    __slots__ = ("_value", "text")

    def __init__(self, text: str, ranks: Sequence[tuple[str, int | None]]) -> None:
        places = {name: (place, rank) for place, (name, rank) in enumerate(ranks)}

        def leaf(node: ast.expr) -> _Value | None:
            match node:
                case ast.Name(id=name) if name in places and places[name][1] is None:
                    return operator.itemgetter(places[name][0])
                case ast.Subscript(
                    value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=ast.Constant(value=int(index))
                ) if name in places and index in range(places[name][1] or 0):
                    place = places[name][0]
                    return lambda inputs: inputs[place].shape[index]
            return None

        self._value = _condition(_parsed(text, "condition"), leaf, _DEEPEST)
        self.text = text

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Whether it is so for the inputs of a call, which have been checked to have such dimensions."""
        try:
            return bool(self._value(inputs))
        except (ZeroDivisionError, OverflowError):
            return False


def _parsed(text: str, what: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no {what}: {text[:80]!r}") from error


def _condition(node: ast.expr, leaf: Callable[[ast.expr], _Value | None], depth: int) -> _Value:
    def part(one: ast.expr) -> _Value:
        return _condition(one, leaf, depth - 1)

    def number(one: ast.expr) -> _Value:
        return _arithmetic(one, leaf, _BINARY_OF_CONDITIONS, _FUNCTIONS_OF_CONDITIONS, (int, float), depth - 1)

    match node:
        case _ if depth <= 0:
            pass
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            compare, one, other = _COMPARED[type(op)], number(left), number(right)
            return lambda values: compare(one(values), other(values))
        case ast.BoolOp(op=ast.And(), values=nodes):
            parts = [*map(part, nodes)]
            return lambda values: all(one(values) for one in parts)
        case ast.BoolOp(op=ast.Or(), values=nodes):
            parts = [*map(part, nodes)]
            return lambda values: any(one(values) for one in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = part(operand)
            return lambda values: not inner(values)
    raise ValueError("no condition of sizes")


def _arithmetic(
    node: ast.expr,
    leaf: Callable[[ast.expr], _Value | None],
    binary: Mapping[type, Any],
    functions: Mapping[str, _Function],
    numbers: type | tuple[type, ...],
    depth: int,
) -> _Value:
    def part(one: ast.expr) -> _Value:
        return _arithmetic(one, leaf, binary, functions, numbers, depth - 1)

    if depth > 0:
        found = leaf(node)
        if found is not None:
            return found
        match node:
            case ast.Constant(value=constant) if isinstance(constant, numbers):
                return lambda values: constant
            case ast.BinOp(left=left, op=op, right=right) if type(op) in binary:
                call, one, other = binary[type(op)], part(left), part(right)
                return lambda values: call(one(values), other(values))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = part(operand)
                return lambda values: -inner(values)
            case ast.Call(func=ast.Name() | ast.Attribute(value=ast.Name()) as name, args=args, keywords=[]):
                function = functions.get(ast.unparse(name))
                if function is not None and function.fewest <= len(args) <= function.most:
                    function_of, parts = function.call, [*map(part, args)]
                    return lambda values: function_of(*[one(values) for one in parts])
    raise ValueError("no size, or of too many levels")


_UNBOUNDED = 2**62
ANY = object()
"""In the place of a constant that a file has no word for."""


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int | Size, ...]
    """Numbers, and expressions of sizes that were exported as dynamic."""
    sizes: tuple[tuple[int, int], ...]
    """Those of them that are numbers, by their dimension: what is looked at first."""
    dynamic: tuple[tuple[int, Size], ...]
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]
    """Its dimensions as they lay in memory at the export, the farthest apart first."""


class _Constant(NamedTuple):
    name: str
    value: object


class _Number(NamedTuple):
    name: str
    expression: Size


class Inputs:
    """The inputs of a program: their structure, and what each of them has to be."""

    def __init__(self, where: str, spec: Any, values: Sequence[tuple[str, Any]], ranges: Mapping[Any, Any]) -> None:
        """`values` are names with what they were at the export: tensors without data, sizes, constants."""
        self._where, self._spec = where, spec
        self._names = keyword_order(spec)
        self._wanted = [_wanted(name, value) for name, value in values]
        self._ranges = {text_of_size(size): (_number(one.lower), _number(one.upper)) for size, one in ranges.items()}
        self._conditions: list[Condition] = []
        self._written: frozenset[str] = frozenset()
        self._check: Callable[..., None] | None = None

    @classmethod
    def described_by(cls, where: str, spec: Any, found: Mapping[str, Any]) -> "Inputs":
        """The inputs as `described` has put them. Raises `KeyError`, `TypeError`, `ValueError` and `RuntimeError`."""
        inputs = cls(where, spec, (), {})
        inputs._wanted = [_from_json(one) for one in found["values"]]
        inputs._ranges = {Size(size).text: (low, high) for size, (low, high) in found["ranges"].items()}
        if len(inputs._wanted) != spec.num_leaves:
            raise ValueError(f"{len(inputs._wanted)} inputs, and {spec.num_leaves} in their structure")
        inputs.require(found.get("conditions", ()), found.get("written", ()))
        return inputs

    def described(self) -> dict[str, Any]:
        """All but their structure, as JSON has it."""
        return {
            "values": [_to_json(one) for one in self._wanted],
            "ranges": {size: list(bounds) for size, bounds in self._ranges.items()},
            "conditions": [one.text for one in self._conditions],
            "written": sorted(self._written),
        }

    @property
    def names(self) -> list[str]:
        """Theirs, one for each tensor, number and constant."""
        return [one.name for one in self._wanted]

    def require(self, conditions: Sequence[str], written: Sequence[str] = ()) -> None:
        """What their sizes must fulfil besides, and which of them the program writes to. Raises `ValueError`."""
        ranks = [(one.name, _rank(one)) for one in self._wanted]
        if not {*self.names}.issuperset(written):
            raise ValueError(f"{sorted(written)} of {self.names}")
        self._conditions += [Condition(text, ranks) for text in conditions]
        self._written |= frozenset(written)

    @property
    def is_complete(self) -> bool:
        """Whether `described` says all that is checked."""
        return self._check is None

    def require_by(self, check: Callable[..., None]) -> None:
        """Has a function look at the inputs as well, which raises."""
        self._check = check

    def as_exported(self, inputs: list[Any]) -> list[torch.Tensor]:
        """The tensors among checked inputs, each with its elements in the order that it had at the export.

        A library of compiled code goes by that order, and looks at no stride. What lies in another one is copied.
        """
        found: list[torch.Tensor] = []
        for wanted, value in zip(self._wanted, inputs, strict=True):
            if isinstance(wanted, _Tensor):
                if not _lies_in(value, wanted.order):
                    value = self._copied(wanted, value)
                found.append(value)
        return found

    def _copied(self, wanted: _Tensor, value: torch.Tensor) -> torch.Tensor:
        if wanted.name in self._written:
            raise self._wrong(
                f"the program writes to {wanted.name}, which does not lie in memory as at the export",
                f"dimensions {list(wanted.order)} from the farthest apart to the nearest, without gaps",
                f"shape {list(value.shape)}, stride {list(value.stride())}",
                "give a tensor that lies so: another one would be copied, and the copy written to",
            )
        return _ordered(value, wanted.order)

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
        symbols: dict[str, int] = {}
        later: list[tuple[str, Size, int]] = []
        for wanted, value in zip(self._wanted, leaves, strict=True):
            if isinstance(wanted, _Tensor):
                self._check_tensor(wanted, value, symbols, later)
            elif isinstance(wanted, _Number):
                if type(value) is not int:
                    raise self._wrong(f"{wanted.name} is no whole number", "an int", type(value).__name__)
                self._bind(wanted.name, wanted.expression, value, symbols, later)
            elif wanted.value is not ANY and (type(value) is not type(wanted.value) or value != wanted.value):
                raise self._wrong(f"{wanted.name} was a constant at the export", repr(wanted.value), repr(value))
        if later:
            self._settle(later, symbols)
        for condition in self._conditions:
            if not condition.holds(leaves):
                raise self._wrong("the sizes do not go together", condition.text, _sizes(self._wanted, leaves))
        if self._check is not None:
            try:
                self._check(*leaves)
            except Exception as error:
                raise self._wrong("torch refuses them", "inputs for which its guards hold", str(error)) from error
        return leaves

    def _check_tensor(
        self, wanted: _Tensor, value: Any, symbols: dict[str, int], later: list[tuple[str, Size, int]]
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
        self, name: str, size: Size, value: int, symbols: dict[str, int], later: list[tuple[str, Size, int]]
    ) -> None:
        if size.is_symbol:
            first = symbols.setdefault(size.text, value)
            if first != value:
                raise self._wrong(f"sizes that must be equal differ, the second one in {name}", first, value)
        else:
            later.append((name, size, value))
        self._check_range(name, size.text, value)

    def _check_range(self, name: str, size: str, value: int) -> None:
        low, high = self._ranges.get(size, (0, None))
        if value < (low or 0) or (high is not None and value > high):
            upper = "" if high is None else f" to {high}"
            raise self._wrong(f"a size of {name} is out of its range", f"from {low}{upper}", value)

    def _settle(self, later: list[tuple[str, Size, int]], symbols: dict[str, int]) -> None:
        """Checks sizes that are expressions. A symbol that no size is by itself is what the first of them says."""
        while later:
            waiting = []
            for name, size, value in later:
                unknown = size.symbols - symbols.keys()
                if len(unknown) > 1:
                    waiting.append((name, size, value))
                elif unknown:
                    (symbol,) = unknown
                    found = size.solved(symbol, value, symbols)
                    if found is None:
                        raise self._wrong(f"a size of {name} is none that it can have", size, value)
                    symbols[symbol] = found
                    if size.text not in self._ranges:
                        self._check_range(name, symbol, found)
                elif size.value(symbols) != value:
                    raise self._wrong(f"a size of {name} does not follow from the others", size, value)
            if len(waiting) == len(later):
                raise self._wrong("sizes do not say what their symbols are", later[0][1], later[0][2])
            later = waiting

    def _wrong(self, what: str, expected: object, found: object, remedy: str = "") -> ProgramInputError:
        return ProgramInputError(
            what,
            where=self._where,
            expected=expected,
            found=found,
            remedy=remedy
            or "give what the program was exported for, or export it with dynamic_shapes= that allow this",
        )


def _wanted(name: str, value: Any) -> _Tensor | _Constant | _Number:
    if isinstance(value, torch.Tensor):
        shape = tuple(_size(expression_of(size)) for size in value.shape)
        return _Tensor(name, shape, *_kinds(shape), value.dtype, value.device, _order(value))
    if isinstance(value, torch.SymInt):
        found = _size(expression_of(value))
        return _Constant(name, found) if isinstance(found, int) else _Number(name, found)
    return _Constant(name, value)


def _to_json(wanted: _Tensor | _Constant | _Number) -> dict[str, Any]:
    if isinstance(wanted, _Tensor):
        return {
            "name": wanted.name,
            "shape": [size if isinstance(size, int) else size.text for size in wanted.shape],
            "dtype": str(wanted.dtype).removeprefix("torch."),
            "device": str(wanted.device),
            "order": list(wanted.order),
        }
    if isinstance(wanted, _Number):
        return {"name": wanted.name, "number": wanted.expression.text}
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
    dtype, order = getattr(torch, found["dtype"]), tuple(map(int, found["order"]))
    if not isinstance(dtype, torch.dtype) or sorted(order) != [*range(len(shape))]:
        raise ValueError(f"input {name}: {found['dtype']!r}, dimensions {order}")
    return _Tensor(name, shape, *_kinds(shape), dtype, torch.device(found["device"]), order)


def _size(expression: Any) -> int | Size:
    return int(expression) if _is_fixed(expression) else Size(text_of_size(expression))


def _kinds(shape: Sequence[int | Size]) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, Size], ...]]:
    """The sizes that are numbers, and those that are not, by their dimension."""
    fixed = tuple((index, size) for index, size in enumerate(shape) if isinstance(size, int))
    return fixed, tuple((index, size) for index, size in enumerate(shape) if isinstance(size, Size))


def _rank(wanted: _Tensor | _Constant | _Number) -> int | None:
    """How many dimensions conditions may name; None for what is a number itself."""
    if isinstance(wanted, _Tensor):
        return len(wanted.shape)
    is_number = isinstance(wanted, _Number) or isinstance(wanted.value, int | float)
    return None if is_number else 0


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


def _sizes(wanted: Sequence[_Tensor | _Constant | _Number], leaves: Sequence[Any]) -> str:
    """What conditions are of, in a call."""
    shown = [
        f"{one.name}.shape {list(value.shape)}" if isinstance(one, _Tensor) else f"{one.name} {value}"
        for one, value in zip(wanted, leaves, strict=True)
        if not isinstance(one, _Constant)
    ]
    return ", ".join(shown[:8])


def _shown(wanted: _Tensor) -> str:
    return f"shape {list(wanted.shape)}, {wanted.dtype}, {wanted.device}"


def _tensor(value: torch.Tensor) -> str:
    return f"shape {list(value.shape)}, {value.dtype}, {value.device}"


def conditions(guards: Sequence[str], spec: Any, arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Guards, which go by the arguments of the module, by the names of the program's inputs.

    `spec` is the structure of the inputs, `arguments` has the names of positional ones. What is not about sizes is as
    it was, for `Condition` to refuse. Raises `ValueError` for what is no Python, and for containers without paths.
    """
    if not guards:
        return []
    places = _places(spec, arguments, names)
    try:
        found = [ast.unparse(_Renamed(places).visit(ast.parse(guard.strip(), mode="eval"))) for guard in guards]
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"no condition: {error}") from error
    return [*dict.fromkeys(found)]


def is_equality(condition: str) -> bool:
    """Whether a condition holds for single sizes, or for every so many, and not from one size on."""
    ops = [op for node in ast.walk(ast.parse(condition)) if isinstance(node, ast.Compare) for op in node.ops]
    return any(isinstance(op, ast.Eq | ast.NotEq) for op in ops)


def _places(spec: Any, arguments: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """The name of each input, by the expressions that guards may have for it."""
    paths = leaf_paths(spec, arguments)
    found = {f"L['flat_args'][{index}]": name for index, name in enumerate(names)}  # of a strict export
    found |= {f"L[{argument!r}]{rest}": name for name, (argument, rest) in zip(names, paths, strict=True)}
    for name, (argument, rest) in zip(names, paths, strict=True):
        of_many, _, number = argument.rpartition("_")
        if number.isdigit():  # one of *args
            found.setdefault(f"L[{of_many!r}][{number}]{rest}", name)
    return {_normal(text): name for text, name in found.items()}


def _normal(text: str) -> str:
    try:
        return ast.unparse(ast.parse(text, mode="eval"))
    except SyntaxError:  # the way into a container that has its own words for it
        return text


class _Renamed(ast.NodeTransformer):
    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        name = self._places.get(ast.unparse(node))
        return self.generic_visit(node) if name is None else ast.Name(name)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        name = self._places.get(ast.unparse(node))
        if name is not None:
            return ast.Name(name)
        match node.value:
            case ast.Call(func=ast.Attribute(value=value, attr="size"), args=[], keywords=[]):
                return ast.Subscript(ast.Attribute(self.visit(value), "shape"), node.slice)
        return self.generic_visit(node)
