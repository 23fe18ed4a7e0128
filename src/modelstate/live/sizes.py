"""Sizes that depend on others, and conditions that sizes must fulfil, as a program file has them: text."""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
