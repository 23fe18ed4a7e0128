"""`Quantize`: quantizes weights with torchao while they are loaded, row by row where torchao does so, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from modelstate.errors import OptionError, PackageError, TransformError, keep_interrupt
from modelstate.io.engine import BLOCK_BYTES
from modelstate.io.memory import fresh_tensors
from modelstate.planning.transforms import BlockTransform
from modelstate.spec import contiguous_stride
from modelstate.torch_compat.plain import same_values

_HIGHEST, _LOWEST = 127, -128
_STEPS = (_HIGHEST - _LOWEST) / 2
_LEAST_SCALE = torch.finfo(torch.float32).eps
_MOST_COLUMNS = 1 << 16
"""The most columns of a sample, which then has 2 MB; torchao copies it several times."""
_HEAP_IN_PLACE_BYTES = 8 << 20
"""Memory that the heap of a thread keeps between two calls of the quantization in place."""
_HEAP_BYTES = 32 << 20
"""Memory that the heap of a thread keeps between two calls of torchao."""
# Numbers of copies, by a part of the config's name. Measured with torchao 0.18 on float32 and bfloat16 weights: two
# copies for these configs, and four for others. One is added, because free blocks of the heap that are too small to be
# used can add up to the size of a weight.
_COPIES = {"Int8WeightOnly": 3, "Int8DynamicActivation": 3, "IntxWeightOnly": 3}
_MOST_COPIES = 5
_INT8 = {"Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"}
_ROW_BY_ROW = {*_INT8, "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"}
_PARTS = {"qdata", "scale"}
_CONSTANT = "zero_point"
_INSTALL = {"mslk": "pip install mslk-cuda, or mslk-rocm; the package of the name mslk alone may be empty"}


class QuantizedRows:
    """Quantizes a weight by rows with torchao, and collects the parts of the results."""

    def __init__(self, quantize: Callable[[torch.Tensor], torch.Tensor], like: Any, extra_bytes: int) -> None:
        """`like` is the tensor that `quantize` returns for some rows."""
        names, self._context = like.__tensor_flatten__()
        self._quantize, self.extra_bytes = quantize, extra_bytes
        self._class: Any = type(like.data)
        self._parts = {name: getattr(like, name) for name in names}
        self._needs_grad: bool = like.requires_grad

    def parts(self, rows: int) -> dict[str, torch.Tensor]:
        """Allocates the parts of a weight of so many rows."""
        layouts = [(torch.Size((rows, *part.shape[1:])), None, part.dtype) for part in self._parts.values()]
        return dict(zip(self._parts, fresh_tensors(layouts), strict=True))

    def whole(self, parts: dict[str, torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """Returns the weight that consists of these parts."""
        result = self._class.__tensor_unflatten__(parts, self._context, shape, contiguous_stride(shape))
        return nn.Parameter(result, requires_grad=self._needs_grad)

    def write(self, rows: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Writes the quantized rows to the parts of the result. May overwrite `rows`."""
        result = self._quantize(rows)
        for name, part in parts.items():
            part.copy_(getattr(result, name))

    def is_exact(self, sample: torch.Tensor) -> bool:
        """Whether the rows of a sample, in two blocks, are what torchao makes of all of them, bit for bit."""
        if any(len(part) != len(sample) for part in self._parts.values()):
            return False
        parts, half = self.parts(len(sample)), len(sample) // 2
        for rows in (slice(0, half), slice(half, None)):
            self.write(sample[rows].clone(), {name: part[rows] for name, part in parts.items()})
        whole: Any = self.whole(parts, sample.shape)
        pairs = [(parts[name], expected) for name, expected in self._parts.items()]
        is_same = repr(whole.__tensor_flatten__()[1]) == repr(self._context)
        return is_same and all(a.stride() == b.stride() and same_values(a, b) for a, b in pairs)


class Int8Rows(QuantizedRows):
    """Quantizes float32 rows as torchao does, without torchao's copies of the rows, which take most of the time.

    The operations and their order are those of torchao's symmetric quantization. They overwrite the rows.
    """

    def write(self, rows: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Writes the quantized rows to the parts of the result. Overwrites `rows`."""
        # Few operations, because threads wait for the interpreter lock before each of them.
        largest = torch.maximum(rows.amin(1, keepdim=True).neg_(), rows.amax(1, keepdim=True))
        scale = torch.clamp(largest.div_(_STEPS), min=_LEAST_SCALE, out=parts["scale"])
        parts["qdata"].copy_(rows.mul_(scale.reciprocal()).round_().clamp_(_LOWEST, _HIGHEST))
        if _CONSTANT in parts:
            parts[_CONSTANT].copy_(self._parts[_CONSTANT][:1])


def _sample(columns: int) -> torch.Tensor:
    """Rows of both signs, of one sign, of zeros, and of very large and very small numbers."""
    like: Any = {"dtype": torch.float32, "device": "cpu"}  # the caller may have changed torch's defaults
    factors = torch.tensor([1.0, 0.02, 3e-8, 1e-38, 1e30, 1.0, 1.0, 0.0], **like).view(8, 1)
    rows = torch.arange(8 * columns, **like).mul(0.7).sin().view(8, columns) * factors
    rows[5].abs_()
    rows[6].abs_().neg_()
    return rows


@dataclass(frozen=True, slots=True)
class Quantize(BlockTransform):
    """Quantizes the weights of `nn.Linear` during the load, as `torchao.quantization.quantize_(model, config)` does.

    For the argument `transform` of `modelstate.load`, alone or for a pattern. Each weight is read, cast to its dtype,
    and quantized, one at a time. All other tensors are loaded unchanged. A weight gets torchao's tensor class, and
    `requires_grad=False`. Like `quantize_`, most configs change settings of inductor for the whole process, unless they
    are created with `set_inductor_config=False`.

    Args:
        config: A config of torchao, such as `Int8WeightOnlyConfig()`.

    Raises:
        PackageError: torchao is not installed.
        OptionError: The config is not a config of weights.

    Examples:
        >>> from torchao.quantization import Int8WeightOnlyConfig
        >>> quantize = modelstate.loading.Quantize(Int8WeightOnlyConfig())
        >>> report = modelstate.load(model, "model.safetensors", transform={"*.mlp.*": quantize})
    """

    returns_plain: ClassVar[bool] = False

    config: Any
    _checked: dict[tuple[int, torch.dtype], QuantizedRows | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """From numbers of columns to the quantization by rows; None where torchao needs the whole weight."""

    def __post_init__(self) -> None:
        try:
            from torchao.core.config import AOBaseConfig
            from torchao.quantization import FqnToConfig
        except ImportError as error:
            raise PackageError(
                "quantizing needs torchao, which is not installed", found=error, remedy="pip install torchao"
            ) from error

        is_mapping = isinstance(self.config, FqnToConfig)
        if is_mapping or not isinstance(self.config, AOBaseConfig):
            is_class = isinstance(self.config, type) and issubclass(self.config, AOBaseConfig)
            instance = f"an instance: ms.loading.Quantize({self.config.__name__}())" if is_class else ""
            raise OptionError(
                "this is a class, not a config of torchao" if is_class else "not a config of torchao for a weight",
                expected="such as torchao.quantization.Int8WeightOnlyConfig()",
                found=self.config,
                remedy="patterns of names: transform={'*.mlp.*': Quantize(config), ...}" if is_mapping else instance,
            )

    def __str__(self) -> str:
        return f"Quantize({type(self.config).__name__})"

    def applies_to(self, name: str, module: nn.Module) -> bool:
        """Whether `quantize_` quantizes the tensor: the weight of a Linear.

        The output projection of `nn.MultiheadAttention` is not quantized.

        Args:
            name: The name of the tensor in the model.
            module: The module that owns the tensor.
        """
        is_left = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
        return isinstance(module, nn.Linear) and not is_left and name.rpartition(".")[2] == "weight"

    def __call__(self, name: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """Returns the weight of a Linear after `quantize_`."""
        from torchao.quantization import quantize_

        has_bias = getattr(module, "bias", None) is not None
        layer = nn.Linear(1, 1, has_bias, device="meta")
        layer.out_features, layer.in_features = tensor.shape
        layer.weight = nn.Parameter(tensor, requires_grad=getattr(module.weight, "requires_grad", True))
        if has_bias:
            layer.bias = nn.Parameter(torch.zeros(len(tensor), dtype=tensor.dtype, device=tensor.device))
        bias, container = layer.bias, nn.Sequential(layer)  # which keeps a layer that replaces this one
        try:
            quantize_(container, self.config)
        except ImportError as error:
            package = (re.findall(r"[Rr]equires (\w+)", str(error)) or [error.name or "a package"])[0]
            raise PackageError(
                f"this config of torchao needs {package}, which is not installed; nothing has been changed",
                where=f"{type(self.config).__name__}, {name}",
                found=error,
                remedy=_INSTALL.get(package, f"install {package} as torchao's documentation says"),
            ) from error
        weight = layer.weight
        touched = container[0] is not layer or type(layer) is not nn.Linear or layer.bias is not bias
        vars(layer).pop("extra_repr", None)  # a bound method, set by torchao, that keeps the layer alive
        if touched or not isinstance(weight, torch.Tensor):
            raise TransformError(
                "the config changes more than the weight; nothing has been changed",
                where=name,
                found=f"{type(self.config).__name__} changes the layer to {container[0]}",
                remedy="load without it, then quantize_(model, config)",
            )
        return weight

    def _exact_rows(self, columns: int, dtype: torch.dtype) -> QuantizedRows | None:
        """The quantization by rows of so many columns, whose result for a sample is torchao's, bit for bit."""
        if not 0 < columns <= _MOST_COLUMNS or not _by_rows(self.config):
            return None
        quantize = partial(self, "some rows", module=nn.Linear(1, 1, bias=False, device="meta"))
        sample = _sample(columns).to(dtype)
        try:
            expected: Any = quantize(sample.clone())
            names = set(expected.__tensor_flatten__()[0])
        except Exception as error:  # a shape that torchao refuses, for example; it raises again for the weight itself
            keep_interrupt(error)
            return None
        of_block = self._copies * 4 * max(BLOCK_BYTES // dtype.itemsize, columns)
        found = [QuantizedRows(quantize, expected, of_block + _HEAP_BYTES)]
        is_int8 = type(self.config).__name__ in _INT8 and _PARTS <= names <= {*_PARTS, _CONSTANT}
        if is_int8 and dtype == torch.float32 and expected.scale.shape == (len(sample), 1):  # one scale for each row
            found.insert(0, Int8Rows(quantize, expected, _HEAP_IN_PLACE_BYTES))
        return next((rows for rows in found if rows.is_exact(sample)), None)

    @property
    def _copies(self) -> int:
        """The copies in float32 that torchao makes of what it quantizes."""
        return next((n for part, n in _COPIES.items() if part in type(self.config).__name__), _MOST_COPIES)

    def block_shape(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...] | None:
        """The shape of a group of the config, or of a row; None where the config has no separate scales for rows.

        Args:
            shape: The shape of the weight.
            dtype: The dtype of the weight.
        """
        if len(shape) != 2 or not _by_rows(self.config):
            return None
        return 1, getattr(self.config.granularity, "group_size", shape[1])

    def block_function(self, shape: tuple[int, ...], dtype: torch.dtype) -> QuantizedRows | None:
        """Returns the quantization by rows; None where its result would differ from torchao's."""
        if len(shape) != 2:
            return None
        key = shape[1], dtype
        if key not in self._checked:
            self._checked[key] = self._exact_rows(*key)
        return self._checked[key]

    def extra_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The memory for torchao's copies of the weight in float32.

        Args:
            shape: The shape of the weight.
            dtype: The dtype of the weight.
        """
        return self._copies * torch.Size(shape).numel() * max(dtype.itemsize, 4) + _HEAP_BYTES


def _by_rows(config: Any) -> bool:
    """Whether torchao quantizes each row of a weight separately, and keeps the order of rows."""
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
