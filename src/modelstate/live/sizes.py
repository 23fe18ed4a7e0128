"""Sizes that depend on others, as text: what a program file says of inputs that were exported as dynamic."""

import ast
import operator
from collections.abc import Mapping
from typing import Any

_BINARY: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_OF_MANY = ("Max", "Min")
_FUNCTIONS: dict[str, Any] = {"Max": max, "Min": min, "Mod": operator.mod, "FloorDiv": operator.floordiv}


class Size:
    """An expression of symbols and whole numbers, which nothing but these functions can be called from.

    It has the few methods of a `sympy` expression that inputs are checked with; a process that serves need not import
    that. Raises `ValueError` for any other text.
    """

    __slots__ = ("_tree", "free_symbols", "is_symbol", "text")

    def __init__(self, text: str) -> None:
        try:
            self._tree = ast.parse(text, mode="eval").body
            names = {*_names(self._tree)}
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"no size: {text[:80]!r}") from error
        self.text = self._tree.id if isinstance(self._tree, ast.Name) else text
        self.is_symbol = isinstance(self._tree, ast.Name)
        self.free_symbols: frozenset[Any] = frozenset({self}) if self.is_symbol else frozenset(map(Size, names))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text

    def subs(self, values: Mapping[Any, int]) -> int:
        """The number that it is with these values of its symbols."""
        return _value(self._tree, {symbol.text: number for symbol, number in values.items()})


def _names(node: ast.expr) -> list[str]:
    """The symbols in an expression. Raises `ValueError` for what is no expression of sizes."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Constant(value=int()):
            return []
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _names(left) + _names(right)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _names(operand)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and _is_count(
            name, len(args)
        ):
            return [found for one in args for found in _names(one)]
    raise ValueError(f"no size: {ast.unparse(node)!r}")


def _is_count(function: str, arguments: int) -> bool:
    return arguments == 2 or (arguments > 2 and function in _OF_MANY)


def _value(node: ast.expr, values: Mapping[str, int]) -> int:
    found: int
    match node:
        case ast.Name(id=name):
            found = values[name]
        case ast.Constant(value=int(number)):
            found = number
        case ast.BinOp(left=left, op=op, right=right):
            found = _BINARY[type(op)](_value(left, values), _value(right, values))
        case ast.UnaryOp(operand=operand):
            found = -_value(operand, values)
        case ast.Call(func=ast.Name(id=name), args=args):
            found = _FUNCTIONS[name](*(_value(one, values) for one in args))
        case _:
            raise ValueError(ast.unparse(node))
    return found
