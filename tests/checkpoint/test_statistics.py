"""Statistics of tensors against NumPy."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.errors import ComparisonError, OptionError
from tests.faults import faulty_reads

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.bool),
)


def added(values: torch.Tensor) -> Any:
    (tensor,) = ms.inspect({"w": values}).stats().tensors
    return tensor.statistics


def cast(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point or dtype is torch.bool:
        return torch.tensor(values, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    finite = [value if math.isfinite(value) else 0 for value in values]
    return torch.tensor([int(min(max(value, info.min), info.max)) for value in finite], dtype=dtype)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(width=32) | st.integers(-3, 3).map(float), min_size=1, max_size=30), st.sampled_from(DTYPES))
def test_statistics_are_those_of_numpy(values: list[float], dtype: torch.dtype) -> None:
    tensor = cast(values, dtype)
    found = added(tensor)
    wide = tensor.to(torch.float64).numpy()
    finite = wide[np.isfinite(wide)]
    assert (found.elements, found.finite) == (len(values), len(finite))
    assert (found.nan, found.infinite) == (int(np.isnan(wide).sum()), int(np.isinf(wide).sum()))
    assert found.zeros == (wide == 0).mean()
    if not len(finite):
        assert (found.min, found.max, found.mean, found.std) == (None, None, None, None)
        return
    assert (found.min, found.max) == (finite.min(), finite.max())
    size = float(np.abs(finite).max())
    assert found.mean == pytest.approx(math.fsum(finite / len(finite)), rel=1e-5, abs=1e-6 * size)
    scaled = finite / (size or 1.0)
    assert found.std == pytest.approx(float(scaled.std()) * (size or 1.0), rel=1e-4, abs=1e-6 * size)


def test_a_small_deviation_beside_a_large_mean() -> None:
    tensor = 1000 + 0.001 * torch.arange(600_000, dtype=torch.float64).sin()
    found = added(tensor.float())
    assert found.std == pytest.approx(float(tensor.float().double().std(unbiased=False)), rel=1e-3)


def test_complex_numbers_have_no_order() -> None:
    found = added(torch.tensor([1j, 0, complex(math.nan, 1)]))
    assert (found.min, found.mean, found.std) == (None, None, None)
    assert (found.nan, found.zeros, found.finite) == (1, 1 / 3, 2)


def test_values_whose_squares_leave_the_range_of_float64() -> None:
    huge, largest = (torch.tensor([value] * 5 + [-value] * 5, dtype=torch.float64) for value in (1e200, 1.7e308))
    assert (added(huge).min, added(huge).max, added(huge).mean, added(huge).std) == (-1e200, 1e200, 0.0, None)
    assert (added(largest).max, added(largest).mean, added(largest).std) == (1.7e308, None, None)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shared = torch.randn(10, 4)
    layers = {f"layer.{i}.{kind}": torch.randn(4, 4) for i in range(3) for kind in ("q", "k")}
    return {"embed": shared, **layers, "head": shared, "count": torch.tensor([3, 4]), "half": torch.ones(3).half()}


def test_text(state: dict[str, torch.Tensor]) -> None:
    stats = ms.inspect(state).stats()
    lines = str(stats).splitlines()
    assert lines[0].startswith("mapping: 10 tensors, ")
    assert lines[1] == "dtypes: float32 (8), int64 (1), float16 (1)"
    assert any(line.startswith("layer.*.q (3 ×)") for line in lines)
    assert sum(line.startswith("layer.") for line in stats.text(fold=False).splitlines()) == 6
    assert "\x1b" not in str(ms.inspect({"a\x1b[1m": torch.ones(2)}).stats())


def test_a_folded_row_has_the_limits_of_all_and_counts_ties_once() -> None:
    zeros, ones = torch.zeros(10), torch.ones(10)
    row = ms.inspect({"l.0.w": zeros, "l.1.w": zeros, "l.2.w": ones}).stats().text().splitlines()[-1].split()
    assert row[0] == "l.*.w"
    assert " ".join(row[-6:]) == "float32 80 B 0 1 66.7%"
    sparse = [torch.sparse_coo_tensor([[0]], [torch.nan], (4,)) for _ in range(2)]
    text = ms.inspect({f"l.{i}.w": tensor for i, tensor in enumerate(sparse)}).stats().text()
    assert text.splitlines()[-1].endswith(" 2")


def test_json(state: dict[str, torch.Tensor]) -> None:
    found = json.loads(
        ms.inspect(state | {"bad": torch.tensor([math.nan])}).stats().to_json(), parse_constant=pytest.fail
    )
    assert found["totals"]["tensors"] == 11
    assert found["totals"]["nan"] == 1
    assert found["tensors"][-1]["mean"] is None


def test_some_names_alone(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "m.safetensors")
    stats = ms.inspect(tmp_path / "m.safetensors").stats(only=["layer.0.*"])
    assert [tensor.name for tensor in stats.tensors] == ["layer.0.k", "layer.0.q"]
    assert stats.read_bytes == 2 * 64
    with pytest.raises(OptionError, match="no name matches the patterns"):
        ms.inspect(tmp_path / "m.safetensors").stats(only=["x.*"])
    for only in ("x.*", 5, [1], None):
        with pytest.raises(OptionError, match="only= must be glob patterns"):
            ms.inspect(tmp_path / "m.safetensors").stats(only=only)  # type: ignore[arg-type]


def test_tensors_in_other_layouts(tmp_path: Path) -> None:
    base = torch.randn(40, 30)
    torch.save({"t": base.t(), "rows": base[::3], "s": torch.eye(3).to_sparse()}, tmp_path / "m.pt")
    stats = {tensor.name: tensor for tensor in ms.inspect(tmp_path / "m.pt").stats().tensors}
    assert stats["t"].statistics.mean == pytest.approx(float(base.mean()), abs=1e-6)
    assert stats["rows"].statistics.max == float(base[::3].max())
    assert (stats["s"].kind, stats["s"].statistics.mean) == ("sparse_coo", None)
    assert [(part.name, part.statistics.max) for part in stats["s"].parts] == [("s, indices", 2), ("s, values", 1.0)]


@pytest.mark.parametrize("writer", ["torch.save", "modelstate.save", "none"])
@pytest.mark.parametrize("bits", [8, 4, "float8"])
def test_the_payloads_of_quantized_tensors(writer: str, bits: int | str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config = {
        8: quantization.Int8WeightOnlyConfig,
        4: lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
        "float8": quantization.Float8WeightOnlyConfig,
    }[bits]
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    quantization.quantize_(model, config())
    weight = model[0].weight
    path = tmp_path / ("m.pt" if writer == "torch.save" else "m.safetensors")
    if writer == "torch.save":
        torch.save(model.state_dict(), path)
    elif writer == "modelstate.save":
        ms.save(model, path)
    source: object = model.state_dict() if writer == "none" else path
    found = {tensor.name: tensor for tensor in ms.inspect(source).stats().tensors}["0.weight"]  # type: ignore[arg-type]
    assert (found.statistics.mean, found.kind.startswith("torchao.")) == (None, True)
    parts = {part.name: part for part in found.parts}
    assert found.bytes == sum(part.bytes for part in found.parts) < 2 * 64 * 32
    for name in ("qdata", "scale"):
        values, statistics = getattr(weight, name), parts[f"0.weight, {name}"].statistics
        assert statistics.max == values.float().max().item()
        assert statistics.mean == pytest.approx(values.double().mean().item(), rel=1e-5, abs=1e-6)
    diff = ms.diff(source, model)  # type: ignore[arg-type]
    assert diff.is_equal
    assert {"qdata", "scale"} <= {tensor.part for tensor in diff.tensors}


def test_a_negative_view_has_values_of_its_own() -> None:
    values = torch.tensor([1 + 2j, 3 + 4j])
    stats = ms.inspect({"imag": values.imag, "conj": values.conj().imag}).stats()
    assert [tensor.statistics.max for tensor in stats.tensors] == [4.0, -2.0]


def test_tensors_without_values() -> None:
    with pytest.raises(ComparisonError, match="2 tensors cannot be read"):
        ms.inspect(nn.Linear(2, 2, device="meta").state_dict()).stats()


def test_an_average_is_read_region_by_region(tmp_path: Path) -> None:
    tensors = [torch.rand(4096, 4096, generator=torch.manual_seed(seed)) for seed in range(2)]
    paths = [tmp_path / f"{index}.safetensors" for index in range(2)]
    for path, tensor in zip(paths, tensors, strict=True):
        save_file({"weight": tensor}, path)
    average = ms.inspect(ms.open(paths, combine=ms.merge.Average()))
    with faulty_reads() as clean:
        found = average.stats().tensors[0].statistics
    mean = torch.stack(tensors).mean(0)
    assert (found.min, found.max) == (mean.min().item(), mean.max().item())
    assert sum(request.nbytes for request in clean.requests if request.call == "preadv") == 2 * mean.nbytes


def test_an_expanded_tensor_is_refused_before_its_elements_are_counted(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(2**40), "v": torch.ones(3)}, tmp_path / "x.pt")
    torch.save({"w": torch.ones(2)[:1].expand(2**40), "v": torch.ones(3)}, tmp_path / "y.pt")
    for call in (
        lambda **options: ms.inspect(tmp_path / "x.pt").stats(**options),
        lambda **options: ms.diff(tmp_path / "x.pt", tmp_path / "y.pt", **options),
    ):
        with pytest.raises(ms.errors.UnsupportedTensorError, match=r"w: expanded views") as caught:
            call()
        assert "only=" in caught.value.remedy
        call(only=["v"])
    checkpoint = ms.open(tmp_path / "x.pt")
    assert checkpoint.tensor("w").shape == checkpoint.value("w").shape == (2**40,)
    assert "x.pt" in checkpoint._repr_html_()
