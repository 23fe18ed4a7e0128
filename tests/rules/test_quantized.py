"""`Dequantize`: quantized weights times their scales, compared with the product in float64."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError, RuleError

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SHAPE = (150, 130)


def expanded(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, ...]) -> torch.Tensor:
    """The scale of each element, taken element by element."""
    indices = [torch.tensor([i // of for i in range(size)]) for size, of in zip(shape, block, strict=True)]
    return scale.double()[torch.meshgrid(*indices, indexing="ij")]


def stored(shape: tuple[int, ...], dtype: torch.dtype, scales: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator) * 40
    scale = torch.rand(scales, generator=generator) / 100 + 1e-4
    return (weight.round() if dtype is torch.int8 else weight).to(dtype), scale


# The shape of the scales, `block=`, and the elements of each dimension that have one scale.
GRANULARITIES: dict[str, tuple[tuple[int, ...], list[int] | None, tuple[int, int]]] = {
    "tensor": ((), None, SHAPE),
    "tensor of one": ((1,), None, SHAPE),
    "rows": ((150, 1), None, (1, 130)),
    "rows as a vector": ((150,), None, (1, 130)),
    "columns": ((1, 130), None, (150, 1)),
    "blocks": ((2, 2), [128, 128], (128, 128)),
    "groups of columns": ((150, 5), [1, 32], (1, 32)),
    "blocks of rows": ((3, 1), [64, 130], (64, 130)),
}


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [*FLOAT8, torch.int8], ids=str)
def test_a_load_multiplies_by_the_scales(granularity: str, dtype: torch.dtype, tmp_path: Path) -> None:
    sizes, block, of_one = GRANULARITIES[granularity]
    weight, scale = stored(SHAPE, dtype, sizes)
    by_dimension = scale.reshape(1, 1) if scale.numel() == 1 else scale.reshape(sizes + (1,) * (2 - len(sizes)))
    exact = weight.double() * expanded(by_dimension, SHAPE, of_one)
    rule = ms.rules.Dequantize("*.weight", "*.weight_scale", block)
    for target in (torch.float32, torch.bfloat16, torch.float16):
        norm = torch.ones(3, dtype=target)
        save_file({"a.weight": weight, "a.weight_scale": scale, "norm.weight": norm}, tmp_path / "f.safetensors")
        model = nn.ModuleDict({"a": nn.Linear(130, 150, bias=False), "norm": nn.RMSNorm(3)}).to(target)
        ms.load(model, tmp_path / "f.safetensors", rules=rule)
        expected = exact.float().to(target)
        assert torch.equal(model["a"].weight, expected)
        assert torch.equal(model["norm"].weight, norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu], ids=str)
def test_the_scales_may_have_other_floating_point_dtypes(dtype: torch.dtype) -> None:
    weight, scale = stored((4, 6), torch.float8_e4m3fn, (4, 1))
    result = ms.rules.Rules([ms.rules.Dequantize("w", "s")]).apply({"w": weight, "s": scale.to(dtype)})
    assert result.keys() == {"w"}
    assert result["w"].dtype == torch.float32
    assert torch.equal(result["w"], (weight.double() * scale.to(dtype).double()).float())


def test_experts_have_blocks_of_their_own() -> None:
    weight, scale = stored((3, 5, 6), torch.float8_e4m3fn, (3, 3, 2))
    expected = (weight.double() * expanded(scale, (3, 5, 6), (1, 2, 4))).float()
    rule = ms.rules.Dequantize("w", "s", block=[2, 4])
    assert torch.equal(ms.rules.Rules([rule]).apply({"w": weight, "s": scale})["w"], expected)


def test_the_product_can_be_split_and_renamed() -> None:
    weight, scale = stored((12, 4), torch.float8_e5m2, (12, 1))
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "qkv"}).bfloat16()
    rules = [ms.rules.Dequantize("*.weight", "*.weight_scale"), ms.rules.Split("qkv.*", ["q.*", "k.*", "v.*"])]
    ms.load(model, {"qkv.weight": weight, "qkv.weight_scale": scale}, rules=rules)
    for part, name in zip((weight.float() * scale).split(4), "qkv", strict=True):
        assert torch.equal(model[name].weight, part.bfloat16())


@pytest.mark.parametrize(
    ("scales", "block"), [((), None), ((11, 1), None), ((1, 9), None), ((4, 3), [3, 4]), ((11, 3), [1, 4])], ids=str
)
def test_every_part_of_a_product_is_that_of_the_whole(scales: tuple[int, ...], block: list[int] | None) -> None:
    weight, scale = stored((11, 9), torch.float8_e4m3fn, scales)
    product, state = ms.rules.Dequantize("w", "s", block), {"w": weight, "s": scale}
    whole = ms.rules.Rules([product]).apply(state)["w"]
    for rows, columns in itertools.product(((2, 5, 4), (5, 6), (1, 10)), ((3, 6), (4, 2, 3))):
        split = [
            ms.rules.Split("w", [f"{index}" for index in range(len(rows))], sizes=rows),
            *[ms.rules.Split(f"{i}", [f"{i}.{j}" for j in range(len(columns))], 1, columns) for i in range(len(rows))],
        ]
        parts = ms.rules.Rules([product, *split]).apply(state)
        for i, of_rows in enumerate(whole.split(rows)):
            for j, part in enumerate(of_rows.split(columns, 1)):
                assert torch.equal(parts[f"{i}.{j}"], part)


def test_a_file_is_converted(tmp_path: Path) -> None:
    weight, scale = stored(SHAPE, torch.float8_e4m3fn, (2, 2))
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "f.safetensors")
    rules = [ms.rules.Dequantize("*.weight", "*.weight_scale_inv", block=[128, 128]), ms.rules.Cast("*", "bf16")]
    ms.convert_checkpoint(tmp_path / "f.safetensors", tmp_path / "plain.safetensors", rules=rules)
    expected = (weight.double() * expanded(scale, SHAPE, (128, 128))).float().bfloat16()
    converted = ms.open(tmp_path / "plain.safetensors")
    assert [*converted] == ["a.weight"]
    assert torch.equal(converted.tensor("a.weight"), expected)


def test_a_cast_of_numbers_without_their_scales_is_refused(tmp_path: Path) -> None:
    weight, scale = stored(SHAPE, torch.float8_e4m3fn, ())
    save_file({"a.weight": weight, "a.weight_scale": scale}, tmp_path / "f.safetensors")
    convert = partial(ms.convert_checkpoint, tmp_path / "f.safetensors", tmp_path / "g.safetensors", dtype="bf16")
    rename = ms.rules.Rename("a.*", "b.*")
    with pytest.raises(OptionError, match=r"rules=\[ms.rules.Dequantize\('\*.weight', '\*.weight_scale'\)\]"):
        convert()
    with pytest.raises(OptionError, match=r"rules=\[\*rules, ms.rules.Dequantize"):
        convert(rules=[rename])
    assert not (tmp_path / "g.safetensors").exists()
    convert(rules=[rename, ms.rules.Dequantize("*.weight", "*.weight_scale")])
    assert torch.equal(ms.open(tmp_path / "g.safetensors").tensor("b.weight"), (weight.float() * scale).bfloat16())


@pytest.mark.parametrize(
    ("weight", "scale", "block", "says"),
    [
        (torch.ones(4, 4), torch.ones(4), None, "it is torch.float32, not float8 or int8"),
        (torch.ones(4, 4, dtype=torch.uint8), torch.ones(4), None, "not float8 or int8"),
        (torch.ones(4, 4).to(FLOAT8[0]), torch.ones(4, 1, dtype=torch.uint8), None, "not floating-point"),
        (torch.ones(192, 4).to(FLOAT8[0]), torch.ones(2, 1), None, "block= says how many elements"),
        (torch.ones(4, 4).to(FLOAT8[0]), torch.ones(4, 1, 1), None, "block= says"),
        (torch.ones(192, 4).to(FLOAT8[0]), torch.ones(2, 1), [64, 128], "does not fit"),
        (torch.ones(4, 4).to(FLOAT8[0]), torch.ones(2, 2), [2, 2, 2], "does not fit"),
        (torch.ones(4, 4).to(FLOAT8[0]), "0.5", None, "not a tensor"),
    ],
)  # fmt: skip
def test_what_cannot_be_multiplied_is_said(weight: Any, scale: Any, block: list[int] | None, says: str) -> None:
    with pytest.raises(RuleError, match=says):
        ms.rules.Rules([ms.rules.Dequantize("w", "s", block)]).apply({"w": weight, "s": scale})


def test_a_rule_without_scales_is_idle_and_has_no_way_back() -> None:
    with pytest.raises(RuleError, match="match nothing"):
        ms.rules.Rules([ms.rules.Dequantize("*.weight", "*.weight_scale")]).apply({"a.weight": torch.ones(1)})
    with pytest.raises(RuleError, match="the scales are lost"):
        ms.rules.Dequantize("*.weight", "*.weight_scale").reverse()
    with pytest.raises(RuleError, match="wildcards"):
        ms.rules.Dequantize("*.weight", "weight_scale")
    with pytest.raises(RuleError, match="block= takes sizes"):
        ms.rules.Dequantize("w", "s", block=128)  # type: ignore[arg-type]
