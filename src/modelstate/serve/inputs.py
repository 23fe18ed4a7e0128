"""Checks the inputs of a request against those of the export: structure, shapes, dtypes, constants and guards.

`Size` and `Condition` evaluate expressions of sizes. sympy is not used: its import takes as long as opening a package,
and a substitution takes 100 times as long as a compiled expression, for each size of each request. Only arithmetic and
comparisons of sizes are compiled. `Inputs` checks a call. `conditions` translates the guards of `torch.export` into
texts for `Condition`, since a package of AOTInductor does not check them.
"""

import ast
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsInt

import torch

from modelstate.errors import ProgramInputError
from modelstate.text_format import listed
from modelstate.torch_compat.private import expression_of, flatten, keyword_order, leaf_paths, text_of_size

if TYPE_CHECKING:
    from modelstate.torch_compat.private import TreeSpec

_FUNCTIONS: dict[str, object] = {
    "__builtins__": {},
    "Max": max,
    "Min": min,
    "max": max,
    "min": min,
    "Mod": operator.mod,
    "FloorDiv": operator.floordiv,
    "abs": abs,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "torch.sym_float": float,
}
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.And, ast.Or, ast.Not),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)


class Size:
    """An expression of symbols and integers. It can call only the functions of `_FUNCTIONS`.

    Raises `ValueError` for any other text.
    """

    __slots__ = ("_code", "is_symbol", "symbols", "text")

    def __init__(self, text: str) -> None:
        tree = _parsed(text)
        self._code, self.symbols = _compiled(tree, text, int)
        self.is_symbol = isinstance(tree.body, ast.Name)
        self.text = tree.body.id if isinstance(tree.body, ast.Name) else text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text

    def value(self, values: Mapping[str, int]) -> int:
        """Returns the number for these values of the symbols. Raises `ZeroDivisionError`."""
        number: int = eval(self._code, _FUNCTIONS, values)
        return number

    def solved(self, symbol: str, value: int, values: Mapping[str, int]) -> int | None:
        """Solves a linear expression for a symbol; None where no integer >= 0 gives this value."""
        at_zero, at_one = (self.value({**values, symbol: number}) for number in (0, 1))
        if at_zero == at_one:
            return None
        solution = (value - at_zero) // (at_one - at_zero)
        return solution if solution >= 0 and self.value({**values, symbol: solution}) == value else None


class Condition:
    """A condition on the inputs of a call: comparisons of sizes such as `name.shape[0]`, and of numbers.

    `ranks` has the name and number of dimensions of each input, None for a number. Raises `ValueError` for any other
    text, and for an input or a dimension that `ranks` does not have.
    """

    __slots__ = ("_code", "_sizes", "text")

    def __init__(self, text: str, ranks: Sequence[tuple[str, int | None]]) -> None:
        sizes: dict[str, tuple[int, int | None]] = {}
        for index, (name, rank) in enumerate(ranks):
            sizes |= {name: (index, None)} if rank is None else {}
            sizes |= {f"{name}.shape[{dim}]": (index, dim) for dim in range(rank or 0)}
        tree: ast.Expression = _PathsToNames().visit(_parsed(text))
        self._code, names = _compiled(tree, text, bool)
        if not names <= sizes.keys():
            raise ValueError(f"no size of an input: {', '.join(sorted(names - sizes.keys()))}")
        self._sizes = [(name, *sizes[name]) for name in names]
        self.text = text

    def holds(self, inputs: Sequence[object]) -> bool:
        """Whether the inputs of a call fulfil the condition. Their numbers of dimensions have been checked."""
        sizes = dict[str, object]()
        for name, at, dim in self._sizes:
            value = inputs[at]
            sizes[name] = value.shape[dim] if isinstance(value, torch.Tensor) and dim is not None else value
        try:
            return bool(eval(self._code, _FUNCTIONS, sizes))
        except (ZeroDivisionError, OverflowError):
            return False


class _PathsToNames(ast.NodeTransformer):
    """Replaces paths such as `x.shape[0]` and `math.floor` by single names with that text."""

    def visit(self, node: ast.AST) -> Any:
        is_path = isinstance(node, ast.Attribute | ast.Subscript)
        return ast.Name(ast.unparse(node), ast.Load()) if is_path else self.generic_visit(node)


def _parsed(text: str) -> ast.Expression:
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no size: {text[:80]!r}") from error


def _compiled(tree: ast.Expression, text: str, result: type) -> tuple[types.CodeType, frozenset[str]]:
    """Compiles an expression of allowed nodes, and returns the names of its symbols. Raises `ValueError`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        is_number = not isinstance(node, ast.Constant) or isinstance(node.value, int | float)
        if not isinstance(node, _NODES) or not is_number or (isinstance(node, ast.Call) and node.keywords):
            raise ValueError(f"no size: {text[:80]!r}")
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS:
            names.add(node.id)
    try:
        code = compile(ast.fix_missing_locations(tree), "<size>", "eval")
        is_valid = type(eval(code, _FUNCTIONS, dict.fromkeys(names, 3))) is result
    except (ZeroDivisionError, OverflowError):
        is_valid = True
    except (TypeError, ValueError, RecursionError, MemoryError):
        is_valid = False  # such as a call with a wrong number of arguments
    if not is_valid:
        raise ValueError(f"no size: {text[:80]!r}")
    return code, frozenset(names)


_UNBOUNDED = 2**62
ANY = object()
"""Replaces a constant that JSON cannot represent. It is not compared."""


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int | Size, ...]
    """Numbers, and expressions for dynamic sizes."""
    fixed: tuple[tuple[int, int], ...]
    """The dimensions and sizes that are numbers, which are checked first."""
    dynamic: tuple[tuple[int, Size], ...]
    """The dimensions and sizes that are expressions."""
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]
    """The dimensions in the order of their strides at the export, the largest stride first."""


class _Constant(NamedTuple):
    name: str
    value: object


class _Number(NamedTuple):
    name: str
    expression: Size


_Input = _Tensor | _Constant | _Number


class _Pending(NamedTuple):
    """A size of a call whose expression has yet to be compared."""

    name: str
    size: Size
    value: int


class Inputs:
    """The inputs of a program: their structure, and the requirements on each of them.

    Args:
        where: the name of the program, for errors.
        spec: the structure of the inputs.
        values: the name and the exported value of each input: a tensor without data, a symbolic size, or a constant.
        ranges: the bounds of symbolic sizes.
    """

    def __init__(
        self, where: str, spec: "TreeSpec", values: Sequence[tuple[str, object]], ranges: Mapping[object, Any]
    ) -> None:
        self._where, self._spec = where, spec
        self._keywords = keyword_order(spec)
        self._inputs = [_input_of(name, value) for name, value in values]
        self._ranges = {
            text_of_size(size): (_bound(bounds.lower), _bound(bounds.upper)) for size, bounds in ranges.items()
        }
        self._conditions: list[Condition] = []
        self._written: frozenset[str] = frozenset()
        self.guard_function: Callable[..., None] | None = None
        """Torch's own check, for guards that no condition expresses; it is called with the inputs, and raises."""

    @classmethod
    def described_by(cls, where: str, spec: "TreeSpec", described: Mapping[str, Any]) -> "Inputs":
        """Reads what `described` returns. Raises `KeyError`, `TypeError`, `ValueError` and `RuntimeError`."""
        inputs = cls(where, spec, (), {})
        inputs._inputs = [_from_json(item) for item in described["values"]]
        inputs._ranges = {Size(size).text: (low, high) for size, (low, high) in described["ranges"].items()}
        if len(inputs._inputs) != spec.num_leaves:
            raise ValueError(f"{len(inputs._inputs)} inputs, and {spec.num_leaves} in their structure")
        inputs.require(described.get("conditions", ()), described.get("written", ()))
        return inputs

    def described(self) -> dict[str, object]:
        """Returns all requirements but the structure, as values for JSON."""
        return {
            "values": [_to_json(wanted) for wanted in self._inputs],
            "ranges": {size: list(bounds) for size, bounds in self._ranges.items()},
            "conditions": [condition.text for condition in self._conditions],
            "written": sorted(self._written),
        }

    @property
    def names(self) -> list[str]:
        """The names of all tensors, numbers and constants."""
        return [wanted.name for wanted in self._inputs]

    def require(self, conditions: Sequence[str], written: Sequence[str] = ()) -> None:
        """Adds conditions on sizes, and the names of inputs that the program writes to. Raises `ValueError`."""
        ranks = [(wanted.name, _rank(wanted)) for wanted in self._inputs]
        if not {*self.names}.issuperset(written):
            raise ValueError(f"{sorted(written)} of {self.names}")
        self._conditions += [Condition(text, ranks) for text in conditions]
        self._written |= frozenset(written)

    def as_exported(self, inputs: list[object]) -> list[torch.Tensor]:
        """Returns the tensors among checked inputs, each with the order of strides that it had at the export.

        Compiled code assumes that order, and does not read strides. A tensor with another order is copied.
        """
        tensors: list[torch.Tensor] = []
        for wanted, value in zip(self._inputs, inputs, strict=True):
            if isinstance(wanted, _Tensor) and isinstance(value, torch.Tensor):
                is_in_order = wanted.order == tuple(range(len(wanted.order)))
                if not (value if is_in_order else value.permute(wanted.order)).is_contiguous():
                    value = self._reordered(wanted, value)
                tensors.append(value)
        return tensors

    def _reordered(self, wanted: _Tensor, value: torch.Tensor) -> torch.Tensor:
        if wanted.name in self._written:
            raise self._error(
                f"the program writes to {wanted.name}, whose memory order differs from that of the export",
                f"dimensions {list(wanted.order)} from the farthest apart to the nearest, without gaps",
                f"shape {list(value.shape)}, stride {list(value.stride())}",
                "give a tensor with that order: any other is copied, and the program would write to the copy",
            )
        inverse = sorted(range(len(wanted.order)), key=wanted.order.__getitem__)
        return value.permute(wanted.order).contiguous().permute(inverse)

    @property
    def numbers(self) -> list[str]:
        """The names of inputs that are integers and vary from request to request."""
        return [wanted.name for wanted in self._inputs if isinstance(wanted, _Number)]

    def flat(self, args: tuple[object, ...], named: dict[str, object]) -> list[object]:
        """Checks the arguments of a call, and returns them flat, in the program's order. Raises `ProgramInputError`."""
        if named and list(named) != self._keywords and named.keys() == set(self._keywords):
            named = {name: named[name] for name in self._keywords}
        leaves, spec = flatten((args, named))
        if spec != self._spec:
            raise self._error("the arguments have another structure", str(self._spec), str(spec))
        symbols: dict[str, int] = {}
        pending: list[_Pending] = []
        for wanted, value in zip(self._inputs, leaves, strict=True):
            if isinstance(wanted, _Tensor):
                self._check_tensor(wanted, value, symbols, pending)
            elif isinstance(wanted, _Number):
                if type(value) is not int:
                    raise self._error(f"{wanted.name} is not an integer", "an int", type(value).__name__)
                self._bind(wanted.name, wanted.expression, value, symbols, pending)
            elif wanted.value is not ANY and not _is_same(wanted.value, value):
                raise self._error(f"{wanted.name} was a constant at the export", repr(wanted.value), repr(value))
        if pending:
            self._check_pending(pending, symbols)
        for condition in self._conditions:
            if not condition.holds(leaves):
                raise self._error("the sizes do not go together", condition.text, _sizes_text(self._inputs, leaves))
        if self.guard_function is not None:
            try:
                self.guard_function(*leaves)
            except Exception as error:
                raise self._error(
                    "the guards of torch.export refuse the inputs", "inputs for which they hold", str(error)
                ) from error
        return leaves

    def _check_tensor(self, wanted: _Tensor, value: object, symbols: dict[str, int], pending: list[_Pending]) -> None:
        if not isinstance(value, torch.Tensor):
            raise self._error(f"{wanted.name} is not a tensor", _tensor_text(wanted), type(value).__name__)
        shape = value.shape
        if (
            len(shape) != len(wanted.shape)
            or value.dtype != wanted.dtype
            or value.device != wanted.device
            or any(shape[dim] != size for dim, size in wanted.fixed)
        ):
            raise self._error(f"{wanted.name} is another kind of tensor", _tensor_text(wanted), _tensor_text(value))
        for dim, expression in wanted.dynamic:
            self._bind(wanted.name, expression, shape[dim], symbols, pending)

    def _bind(self, name: str, size: Size, value: int, symbols: dict[str, int], pending: list[_Pending]) -> None:
        """Sets a symbol to the size of an input, or leaves an expression for `_check_pending`."""
        if size.is_symbol:
            first = symbols.setdefault(size.text, value)
            if first != value:
                raise self._error(f"sizes that must be equal differ, the second one in {name}", first, value)
        else:
            pending.append(_Pending(name, size, value))
        self._check_range(name, size.text, value)

    def _check_range(self, name: str, size: str, value: int) -> None:
        low, high = self._ranges.get(size, (0, None))
        if value < (low or 0) or (high is not None and value > high):
            upper = "" if high is None else f" to {high}"
            raise self._error(f"a size of {name} is out of its range", f"from {low}{upper}", value)

    def _check_pending(self, pending: list[_Pending], symbols: dict[str, int]) -> None:
        """Checks sizes that are expressions. An expression with one unknown symbol determines that symbol."""
        while pending:
            undetermined = []
            for name, size, value in pending:
                unknown = size.symbols - symbols.keys()
                if len(unknown) > 1:
                    undetermined.append(_Pending(name, size, value))
                elif unknown:
                    (symbol,) = unknown
                    solution = size.solved(symbol, value, symbols)
                    if solution is None:
                        raise self._error(f"a size of {name} is not possible", size, value)
                    symbols[symbol] = solution
                    if size.text not in self._ranges:
                        self._check_range(name, symbol, solution)
                elif size.value(symbols) != value:
                    raise self._error(f"a size of {name} does not follow from the others", size, value)
            if len(undetermined) == len(pending):
                raise self._error("the sizes do not determine their symbols", pending[0].size, pending[0].value)
            pending = undetermined

    def _error(self, what: str, expected: object, found: object, remedy: str = "") -> ProgramInputError:
        return ProgramInputError(
            what,
            where=self._where,
            expected=expected,
            found=found,
            remedy=remedy or "give inputs like those of the export, or export with dynamic_shapes= that allow these",
        )


def _input_of(name: str, value: object) -> _Input:
    if isinstance(value, torch.Tensor):
        shape = tuple(_size(expression_of(size)) for size in value.shape)
        return _Tensor(name, shape, *_fixed_and_dynamic(shape), value.dtype, value.device, _order(value))
    if isinstance(value, torch.SymInt):
        size = _size(expression_of(value))
        return _Constant(name, size) if isinstance(size, int) else _Number(name, size)
    return _Constant(name, value)


def _to_json(wanted: _Input) -> dict[str, object]:
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
    if isinstance(wanted.value, int | float | str | None):
        return {"name": wanted.name, "constant": wanted.value}
    return {"name": wanted.name, "any": repr(wanted.value)}


def _from_json(item: Mapping[str, Any]) -> _Input:
    name = str(item["name"])
    if "number" in item:
        return _Number(name, Size(item["number"]))
    if "shape" not in item:
        return _Constant(name, item.get("constant", ANY))
    shape = tuple(size if type(size) is int else Size(size) for size in item["shape"])
    dtype, order = getattr(torch, item["dtype"]), tuple(map(int, item["order"]))
    if not isinstance(dtype, torch.dtype) or sorted(order) != [*range(len(shape))]:
        raise ValueError(f"input {name}: {item['dtype']!r}, dimensions {order}")
    return _Tensor(name, shape, *_fixed_and_dynamic(shape), dtype, torch.device(item["device"]), order)


def _size(expression: SupportsInt) -> int | Size:
    return int(expression) if _is_fixed(expression) else Size(text_of_size(expression))


def _fixed_and_dynamic(
    shape: Sequence[int | Size],
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, Size], ...]]:
    """Splits a shape into the dimensions whose sizes are numbers, and those whose sizes are expressions."""
    fixed = tuple((dim, size) for dim, size in enumerate(shape) if isinstance(size, int))
    return fixed, tuple((dim, size) for dim, size in enumerate(shape) if isinstance(size, Size))


def _rank(wanted: _Input) -> int | None:
    """The number of dimensions that conditions may refer to; None for a number."""
    if isinstance(wanted, _Tensor):
        return len(wanted.shape)
    is_number = isinstance(wanted, _Number) or isinstance(wanted.value, int | float)
    return None if is_number else 0


def _order(value: torch.Tensor) -> tuple[int, ...]:
    """The dimensions by decreasing stride; in their own order for contiguous tensors and symbolic strides."""
    strides = [expression_of(step) for step in value.stride()]
    if value.is_contiguous() or not all(map(_is_fixed, strides)):
        return tuple(range(value.dim()))
    return tuple(sorted(range(value.dim()), key=lambda dim: -int(strides[dim])))


def _is_fixed(size: object) -> bool:
    return isinstance(size, int) or bool(getattr(size, "is_number", False))


def _bound(bound: Any) -> int | None:
    """Converts a bound of a size; None where the size is unbounded."""
    return int(bound) if -_UNBOUNDED < bound < _UNBOUNDED else None


def _sizes_text(inputs: Sequence[_Input], leaves: Sequence[object]) -> str:
    """Describes the shapes and numbers of a call."""
    texts = [
        f"{wanted.name}.shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{wanted.name} {value}"
        for wanted, value in zip(inputs, leaves, strict=True)
        if not isinstance(wanted, _Constant)
    ]
    return listed(texts, 8)


def _tensor_text(tensor: torch.Tensor | _Tensor) -> str:
    return f"shape {list(tensor.shape)}, {tensor.dtype}, {tensor.device}"


def conditions(guards: Sequence[str], spec: "TreeSpec", arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Translates guards, which refer to arguments of the module, into conditions on the names of a program's inputs.

    Expressions other than sizes stay as they are, and `Condition` refuses them.

    Args:
        guards: Python expressions, such as `L['x'].size()[0] >= 2`.
        spec: the structure of the inputs.
        arguments: the names of positional arguments.
        names: the names of the program's inputs.

    Raises:
        ValueError: a guard is not Python, or a container of the inputs has no paths.
    """
    if not guards:
        return []
    name_of = _names_by_expression(spec, arguments, names)
    try:
        texts = [ast.unparse(_RenameInputs(name_of).visit(ast.parse(guard.strip(), mode="eval"))) for guard in guards]
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"no condition: {error}") from error
    return [*dict.fromkeys(texts)]


def _names_by_expression(spec: "TreeSpec", arguments: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Returns the name of each input by the expressions that guards may use for it."""
    paths = leaf_paths(spec, arguments)
    name_of = {f"L['flat_args'][{index}]": name for index, name in enumerate(names)}  # of a strict export
    name_of |= {f"L[{argument!r}]{rest}": name for name, (argument, rest) in zip(names, paths, strict=True)}
    for name, (argument, rest) in zip(names, paths, strict=True):
        variadic, _, number = argument.rpartition("_")
        if number.isdigit():  # an element of *args
            name_of.setdefault(f"L[{variadic!r}][{number}]{rest}", name)
    normalized: dict[str, str] = {}
    for text, name in name_of.items():
        try:
            normalized[ast.unparse(ast.parse(text, mode="eval"))] = name
        except SyntaxError:  # the path into a container with a notation of its own
            normalized[text] = name
    return normalized


class _RenameInputs(ast.NodeTransformer):
    """Replaces expressions for inputs by their names, and `x.size()[0]` by `x.shape[0]`."""

    def __init__(self, name_of: Mapping[str, str]) -> None:
        self._name_of = name_of

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        name = self._name_of.get(ast.unparse(node))
        return self.generic_visit(node) if name is None else ast.Name(name)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        name = self._name_of.get(ast.unparse(node))
        if name is not None:
            return ast.Name(name)
        match node.value:
            case ast.Call(func=ast.Attribute(value=value, attr="size"), args=[], keywords=[]):
                return ast.Subscript(ast.Attribute(self.visit(value), "shape"), node.slice)
        return self.generic_visit(node)


def _is_same(constant: object, value: object) -> bool:
    """Whether a constant of the export is given: NaN, too."""
    is_equal = value == constant or (value != value and constant != constant)
    return type(value) is type(constant) and is_equal
