"""`Quantize`: weights that torchao quantizes while they are loaded, row by row for int8."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from modelstate.errors import OptionError, PackageError, TransformError
from modelstate.planning.transforms import ModuleTransform, RowsWriter

_HIGHEST, _LOWEST = 127, -128
_STEPS = (_HIGHEST - _LOWEST) / 2
_LEAST_SCALE = torch.finfo(torch.float32).eps
_MOST_COLUMNS = 1 << 16
"""Of which a sample is taken: 2 MB of it, and torchao's copies of them."""
_PARTS = {"qdata", "scale"}
_CONSTANT = "zero_point"


class Int8Rows:
    """What torchao makes of float32 rows, without its copies of them, which take most of the time.

    The operations are those of torchao's symmetric quantization, in its order, but write to the rows themselves.
    """

    def __init__(self, like: Any) -> None:
        """`like` is what torchao made of some rows."""
        self.like: torch.Tensor = like
        names, self._context = like.__tensor_flatten__()
        self._class: Any = type(like.data)
        self._parts = {name: getattr(like, name) for name in names}
        self._needs_grad: bool = like.requires_grad

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows that are overwritten."""
        parts = {
            name: torch.empty((len(rows), *part.shape[1:]), dtype=part.dtype, device="cpu")
            for name, part in self._parts.items()
        }
        self.write(rows, parts)
        made = self._class.__tensor_unflatten__(parts, self._context, rows.shape, rows.stride())
        return nn.Parameter(made, requires_grad=self._needs_grad)

    def write(self, rows: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """The same, to where its parts belong."""
        # Few operations: where several threads compute, each of them waits its turn for the interpreter.
        largest = torch.maximum(rows.amin(1, keepdim=True).neg_(), rows.amax(1, keepdim=True))
        scale = torch.clamp(largest.div_(_STEPS), min=_LEAST_SCALE, out=parts["scale"])
        parts["qdata"].copy_(rows.mul_(scale.reciprocal()).round_().clamp_(_LOWEST, _HIGHEST))
        if _CONSTANT in parts:
            parts[_CONSTANT].copy_(self._parts[_CONSTANT][:1])


def int8_rows(torchao: Callable[[torch.Tensor], torch.Tensor], columns: int) -> Int8Rows | None:
    """What makes of float32 rows of so many columns what `torchao` does.

    Both are compared on a sample, bit for bit: None where they differ.
    """
    if columns > _MOST_COLUMNS:
        return None
    sample = _sample(columns)
    try:
        expected: Any = torchao(sample.clone())
    except Exception:  # of a shape, for example, that torchao cannot take: whatever it is, it will say it again
        return None
    flatten = getattr(expected, "__tensor_flatten__", None)
    if flatten is None or not _PARTS <= set(flatten()[0]) <= {*_PARTS, _CONSTANT}:
        return None
    names, context = flatten()
    if expected.scale.shape != (len(sample), 1):  # several for each row
        return None
    made = Int8Rows(expected)
    found: Any = made(sample.clone())
    same = all(_same(getattr(found, name), getattr(expected, name)) for name in names)
    return made if same and repr(found.__tensor_flatten__()[1]) == repr(context) else None


def _sample(columns: int) -> torch.Tensor:
    """Rows of both signs, of one, of none, and of very large and very small numbers."""
    like: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the caller's defaults are
    waves = torch.arange(8 * columns, **like).mul(0.7).sin().view(8, columns)
    factors = torch.tensor([1.0, 0.02, 3e-8, 1e-38, 1e30, 1.0, 1.0, 0.0], **like).view(8, 1)
    rows = waves * factors
    rows[5].abs_()
    rows[6].abs_().neg_()
    return rows


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


@dataclass(frozen=True, slots=True)
class Quantize(ModuleTransform):
    """Gives the weights of `nn.Linear` what `torchao.quantization.quantize_(model, config)` would after the load.

    For `transform=` of `modelstate.load`, alone or under a pattern. Each weight is read, cast to its dtype, and
    quantized, one at a time; everything else is loaded as it is. A weight gets torchao's tensor class, and the
    `requires_grad` that torchao gives it: False. Like `quantize_`, most configs change settings of inductor for the
    whole process, unless they are built with `set_inductor_config=False`.

    Raises `PackageError` without torchao, `OptionError` for a config that is not one of a weight.
    """

    config: Any
    """One of torchao's configs, as `Int8WeightOnlyConfig()`."""
    _checked: dict[int, Int8Rows | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By the number of columns, how rows are quantized in place; None where torchao has to do it."""

    def __post_init__(self) -> None:
        quantization = _torchao()
        from torchao.core.config import AOBaseConfig

        if not isinstance(self.config, AOBaseConfig):
            raise OptionError(
                "not a config of torchao", expected="as torchao.quantization.Int8WeightOnlyConfig()", found=self.config
            )
        if isinstance(self.config, quantization.FqnToConfig):
            raise OptionError(
                "names go to configs by the patterns of transform=",
                found=type(self.config).__name__,
                remedy="transform={'*.mlp.*': Quantize(config), ...}",
            )

    def __str__(self) -> str:
        return f"Quantize({type(self.config).__name__})"

    def applies_to(self, name: str, module: nn.Module) -> bool:
        """Whether `quantize_` would take it: the weight of a Linear, but for the output of `nn.MultiheadAttention`."""
        is_linear = isinstance(module, nn.Linear)
        takes_part = is_linear and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
        return takes_part and name.rpartition(".")[2] == "weight"

    def __call__(self, name: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """The weight that a Linear has after `quantize_`."""
        is_ordered = tensor.dim() == 2 and tensor.is_contiguous() and tensor.device.type == "cpu"
        in_place = self._in_place(tensor.shape[1], tensor.dtype) if is_ordered and len(tensor) else None
        return self._by_torchao(name, tensor, module) if in_place is None else in_place(tensor)

    def _in_place(self, columns: int, dtype: torch.dtype) -> Int8Rows | None:
        """The same without memory for the steps between, where that is known to be the same."""
        if type(self.config).__name__ not in _INT8 or dtype != torch.float32 or not columns:
            return None
        if columns not in self._checked:
            layer = nn.Linear(1, 1, bias=False, device="meta")
            self._checked[columns] = (
                int8_rows(lambda rows: self._by_torchao("a sample", rows, layer), columns)
                if _by_rows(self.config)
                else None
            )
        return self._checked[columns]

    def _by_torchao(self, name: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
        layer = _linear(tensor, module)
        bias, quantize_ = layer.bias, _torchao().quantize_
        if _by_rows(self.config):
            # Many small calls: without a model around the layer each takes a third less. It is known to stay.
            model: Any = layer
            quantize_(layer, self.config)
        else:
            holder = nn.Sequential(layer)
            quantize_(holder, self.config)
            model = holder[0]
        weight: Any = layer.weight
        touched = model is not layer or type(layer) is not nn.Linear or layer.bias is not bias
        vars(layer).pop("extra_repr", None)  # a method that torchao has bound to the layer, and that keeps it alive
        if touched or not isinstance(weight, torch.Tensor):
            raise TransformError(
                "the config changes more than the weight; nothing has been changed",
                where=name,
                found=f"{type(self.config).__name__} makes of the layer: {model}",
                remedy="load without it, then quantize_(model, config)",
            )
        return weight

    def rows_at_once(self, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """As many as are fast, where the config has scales of their own for rows."""
        if len(shape) != 2 or not _by_rows(self.config):
            return None
        most_bytes = _ROWS_BYTES if self._in_place(shape[1], dtype) is None else _ROWS_BYTES_IN_PLACE
        return min(max(most_bytes // max(shape[1] * max(dtype.itemsize, 4), 1), 1), shape[0])

    def rows_writer(self, shape: tuple[int, ...], dtype: torch.dtype, module: nn.Module) -> RowsWriter | None:
        """Where they are quantized in place."""
        in_place = self._in_place(shape[1], dtype) if len(shape) == 2 else None
        return None if in_place is None else RowsWriter(in_place.like, in_place.write)

    def extra_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """What torchao takes meanwhile: copies of the weight as float32."""
        if len(shape) == 2 and self._in_place(shape[1], dtype) is not None:
            return _HEAP_IN_PLACE_BYTES
        copies = next((n for part, n in _COPIES.items() if part in type(self.config).__name__), _MOST_COPIES)
        return copies * torch.Size(shape).numel() * max(dtype.itemsize, 4) + _HEAP_BYTES


# As measured with torchao 0.18, on float32 and bfloat16 weights, by what is in the name of a config: two for these and
# four for others; and one more, for up to the size of a weight can lie in holes of the heap that are just too small.
_COPIES = {"Int8WeightOnly": 3, "Int8DynamicActivation": 3, "IntxWeightOnly": 3}
_MOST_COPIES = 5
_HEAP_BYTES, _HEAP_IN_PLACE_BYTES = 32 << 20, 8 << 20
"""What a thread's heap keeps of it between two calls; and where it is computed in place."""


_ROWS_BYTES, _ROWS_BYTES_IN_PLACE = 2 << 20, 8 << 20
"""As float32. The more, the less do threads wait for each other between the calls; but torchao makes copies of them."""


def _by_rows(config: Any) -> bool:
    """Whether torchao quantizes each row of a weight by itself, and keeps rows in their order."""
    from torchao.quantization.granularity import PerAxis, PerGroup, PerRow

    if type(config).__name__ not in _ROW_BY_ROW:
        return False
    packing = getattr(config, "intx_packing_format", None)
    if packing is not None and packing.value != "unpacked_to_int8":
        return False
    granularity = config.granularity[-1] if isinstance(config.granularity, list | tuple) else config.granularity
    if isinstance(granularity, PerRow):
        return getattr(granularity, "dim", -1) == -1
    return isinstance(granularity, PerGroup) or (isinstance(granularity, PerAxis) and granularity.axis == 0)


_INT8 = {"Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"}
_ROW_BY_ROW = {
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
}


def _linear(weight: torch.Tensor, like: nn.Module) -> nn.Linear:
    """A Linear with this weight, and a bias where the other has one."""
    layer = nn.Linear.__new__(nn.Linear)  # without the values of its own that it would begin with
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features = weight.shape
    needs_grad = like.weight.requires_grad if isinstance(like.weight, torch.Tensor) else True
    layer.weight = nn.Parameter(weight, requires_grad=needs_grad)
    has_bias: bool = getattr(like, "bias", None) is not None
    if has_bias:
        layer.bias = nn.Parameter(torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device))
    else:
        layer.register_parameter("bias", None)
    return layer


def _torchao() -> Any:
    try:
        from torchao import quantization
    except ImportError as error:
        raise PackageError(
            "quantizing needs torchao, which is not here", found=error, remedy="pip install torchao"
        ) from error
    return quantization
