"""What `torch.export` has found that the sizes of a program's inputs must fulfil, as conditions of ours."""

import ast
from collections.abc import Sequence
from typing import Any

from modelstate.plan.torch_private import leaf_paths


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
