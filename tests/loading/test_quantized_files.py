"""Checkpoints of quantized weights for plain models: the scales are named, and what is advised gives right weights."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

import modelstate as ms
from modelstate.errors import PlanError

RULES = re.compile(r"rules=(\[.*?\])(?:;|$)", re.MULTILINE)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(192, 320), nn.LayerNorm(320), nn.Linear(320, 130)).bfloat16()


Block = tuple[int, int]


def spread(scale: torch.Tensor, block: Block, shape: torch.Size) -> torch.Tensor:
    """The scale of each number of a weight."""
    rows = scale.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def quantize(weight: torch.Tensor, dtype: torch.dtype, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers, and the scale of each block."""
    scale = F.max_pool2d(weight.abs()[None], block, ceil_mode=True)[0] / torch.finfo(dtype).max
    return (weight / spread(scale, block, weight.shape)).to(dtype), scale


Layout = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def scaled(
    dtype: torch.dtype, suffix: str, block: Block | None = None, prefix: str = "", **more: torch.Tensor
) -> Layout:
    """A state dict of `plain()` with the weights of the Linears quantized, and what it means."""
    expected = plain().state_dict()
    state = {prefix + name: value for name, value in expected.items()} | more
    for name in ("0", "2"):
        weight = expected[f"{name}.weight"].float()
        of = block or (int(weight.shape[0]), int(weight.shape[1]))
        numbers, scale = quantize(weight, dtype, of)
        state[f"{prefix}{name}.weight"] = numbers
        state[f"{prefix}{name}.{suffix}"] = scale if block else scale.reshape(())
        expected[f"{name}.weight"] = (numbers.double() * spread(scale.double(), of, weight.shape)).float().bfloat16()
    return state, expected


def advised(error: PlanError) -> list[Any]:
    (code,) = RULES.findall(str(error))
    rules = eval(code, {"ms": ms})
    assert isinstance(rules, list)
    return rules


def refusal(model: nn.Module, source: Any, **options: Any) -> PlanError:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError) as caught:
        ms.load(model, source, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return caught.value


E4M3, ROW, SQUARE = torch.float8_e4m3fn, (1, 1 << 10), (128, 128)
EMPTY, ONE = torch.zeros(0, dtype=E4M3), torch.ones(())
LAYOUTS: dict[str, Layout] = {
    "tensor": scaled(E4M3, "weight_scale"),
    "tensor, e5m2": scaled(torch.float8_e5m2, "weight_scale"),
    "comfy": scaled(E4M3, "scale_weight", **{"scaled_fp8": EMPTY, "0.scale_input": ONE}),
    "rows": scaled(E4M3, "weight_scale", ROW),
    "blocks": scaled(E4M3, "weight_scale_inv", SQUARE),
    "short name": scaled(E4M3, "scale", SQUARE),
    "activations": scaled(E4M3, "weight_scale", **{"0.input_scale": ONE}),
    "wrapped": scaled(E4M3, "weight_scale_inv", SQUARE, prefix="module."),
    "compiled": scaled(E4M3, "weight_scale", prefix="_orig_mod."),
}
TENSOR = LAYOUTS["tensor"][0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_advised_rules_multiply_by_the_scales(layout: str, tmp_path: Path) -> None:
    state, expected = LAYOUTS[layout]
    save_file(state, tmp_path / "f.safetensors")
    model = plain()
    error = refusal(model, tmp_path / "f.safetensors")
    assert [problem.kind.name for problem in error.problems] == ["QUANTIZED_WEIGHT"] * 2
    assert "allow_unexpected" not in str(error)
    ms.load(model, tmp_path / "f.safetensors", rules=advised(error))
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert model[0].weight.abs().max() < 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"allow_unexpected": ["*weight_scale"]},
        {"allow_unexpected": ["*"]},
        {"rules": [ms.rules.Ignore("*.weight_scale")]},
        {"rules": [ms.rules.Rename("*.weight_scale", "elsewhere.*")], "allow_unexpected": ["elsewhere.*"]},
    ],
    ids=str,
)
def test_leaving_out_the_scales_is_refused(options: dict[str, Any]) -> None:
    error = refusal(plain(), TENSOR, **options)
    assert {problem.name for problem in error.problems if problem.kind.name == "QUANTIZED_WEIGHT"} == {
        "0.weight",
        "2.weight",
    }


@pytest.mark.parametrize(
    "name", ["wscale", "weight.scale", "dequant_scale", "weight_scaling_factor", "qscale", "weight_s"]
)
@pytest.mark.parametrize("per_row", [False, True])
def test_scales_under_other_names_are_a_guess(name: str, per_row: bool) -> None:
    source, _ = scaled(E4M3, name, ROW if per_row else None)
    model = plain()
    for options in ({}, {"allow_unexpected": [f"*.{name}"]}):
        error = refusal(model, source, **options)
        assert f"with scales: {name.rpartition('.')[2]}, a guess by name and shape" in str(error)
        assert "allow_unexpected" not in str(error)
        ms.load(model, source, rules=advised(error))
        expected = (source["0.weight"].float() * source[f"0.{name}"]).bfloat16()
        assert torch.equal(model[0].weight, expected)


def test_a_cast_of_the_weight_takes_the_numbers_as_they_are() -> None:
    model, state = plain(), TENSOR
    ms.load(model, state, rules=[ms.rules.Cast("*.weight", "bf16"), ms.rules.Ignore("*.weight_scale")])
    assert torch.equal(model[0].weight, state["0.weight"].bfloat16())


def test_a_transform_may_use_the_scales_itself() -> None:
    model, state = plain(), TENSOR

    def dequantize(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.float() * state[f"{name}_scale"]).bfloat16()

    transform = {"0.weight": dequantize, "2.weight": dequantize}
    ms.load(model, state, transform=transform, allow_unexpected=["*.weight_scale"])
    assert torch.equal(model[0].weight, dequantize("0.weight", state["0.weight"]))


def test_float8_without_scales_is_read_as_it_is() -> None:
    model = plain()
    state = {name: value.to(torch.float8_e4m3fn) for name, value in plain().state_dict().items()}
    ms.load(model, state)
    assert torch.equal(model[0].weight, state["0.weight"].bfloat16())


class Scaled(nn.Module):
    """A Linear that computes with numbers and scales."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4, dtype=dtype), requires_grad=False)
        self.register_buffer("weight_scale", torch.zeros(()))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
def test_a_model_with_slots_for_the_scales_takes_them(dtype: torch.dtype) -> None:
    model = Scaled(dtype)
    state = {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(2.0)}
    ms.load(model, state)
    assert torch.equal(model.weight.float(), torch.ones(4, 4))
    assert model.weight_scale.item() == 2


@pytest.mark.parametrize("rows", [48, 96])
def test_the_rules_of_weights_with_other_blocks_name_each_weight(rows: int) -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 96, bias=False) for name in "ab"})
    state = {}
    for name, block in (("a", (32, 64)), ("b", (rows, 64))):
        numbers, scale = quantize(model[name].weight.detach(), torch.float8_e4m3fn, block)
        state |= {f"{name}.weight": numbers, f"{name}.weight_scale": scale}
    error = refusal(model, state)
    if rows == 48:  # 64 would fit, too
        assert "gives: rules=[ms.rules.Dequantize('b.weight', 'b.weight_scale', block=...)]" in str(error)
        rules = [
            ms.rules.Dequantize("a.weight", "a.weight_scale", block=[32, 64]),
            ms.rules.Dequantize("b.weight", "b.weight_scale", block=[48, 64]),
        ]
    else:
        rules = advised(error)
    ms.load(model, state, rules=rules)
    expected = state["b.weight"].float() * state["b.weight_scale"].repeat_interleave(rows, 0)
    assert torch.equal(model["b"].weight, expected)


def test_rules_follow_those_for_the_scales() -> None:
    state = {f"old.{name}": value for name, value in TENSOR.items()}
    rules = [ms.rules.Rename("old.*", "*")]
    error = refusal(plain(), state, rules=rules)
    (code,) = RULES.findall(str(error))
    assert code == "[ms.rules.Dequantize('*.weight', '*.weight_scale'), *rules]"
    model = plain()
    ms.load(model, state, rules=eval(code, {"ms": ms, "rules": rules}))
    assert model[0].weight.abs().max() < 0.1


def linear(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"fc.{name}": value for name, value in tensors.items()}


INT32, UINT8 = torch.ones(8, 4, dtype=torch.int32), torch.ones(16, 1, dtype=torch.uint8)
OTHERS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "NF4 of bitsandbytes": (
        linear(weight=UINT8)
        | {
            "fc.weight.absmax": torch.ones(1),
            "fc.weight.quant_map": torch.ones(16),
            "fc.weight.nested_absmax": torch.ones(1),
            "fc.weight.quant_state.bitsandbytes__nf4": UINT8,
        },
        "bitsandbytes",
    ),
    "LLM.int8() of bitsandbytes": (
        linear(weight=torch.ones(8, 4, dtype=torch.int8), SCB=torch.ones(8), weight_format=torch.tensor(0)),
        "bitsandbytes",
    ),
    "GPTQ": (linear(qweight=INT32, qzeros=INT32, scales=torch.ones(1), g_idx=torch.ones(4)), "gptqmodel"),
    "AWQ": (linear(qweight=INT32, qzeros=INT32, scales=torch.ones(1)), "autoawq"),
    "compressed-tensors": (
        linear(weight_packed=INT32, weight_scale=torch.ones(8, 1), weight_shape=torch.tensor([8, 4])),
        "compressed-tensors",
    ),
    "zero points": (
        linear(
            weight=torch.ones(8, 4, dtype=torch.int8),
            weight_scale=torch.ones(8, 1),
            weight_zero_point=torch.ones(8, 1, dtype=torch.int8),
        ),
        "compressed-tensors",
    ),
    "MXFP4": (linear(weight_blocks=UINT8, weight_scales=UINT8), "Mxfp4Config"),
    "MXFP8": (linear(weight=torch.ones(8, 4).to(torch.float8_e4m3fn), weight_scale=UINT8[:8]), "modelopt"),
    "NVFP4": (
        linear(weight=torch.ones(8, 2, dtype=torch.uint8), weight_scale=torch.ones(8, 1), weight_scale_2=torch.ones(1)),
        "modelopt",
    ),
    "quanto": (linear() | {"fc.weight._data": INT32, "fc.weight._scale": torch.ones(8, 1)}, "optimum-quanto"),
    "HQQ": (linear(W_q=UINT8, scale=torch.ones(1), zero=torch.ones(1)), "hqq"),
}


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_other_layouts_are_named_with_what_reads_them(layout: str, prefix: str) -> None:
    state, tool = OTHERS[layout]
    model = nn.ModuleDict({"fc": nn.Linear(4, 8), "norm": nn.LayerNorm(8)})
    rest = {name: value for name, value in model.state_dict().items() if name != "fc.weight"}
    error = refusal(model, {prefix + name: value for name, value in (state | rest).items()})
    assert [(problem.kind.name, problem.name) for problem in error.problems] == [("QUANTIZED_WEIGHT", "fc.weight")]
    assert tool in str(error)
    assert "rules=" not in str(error)
    assert "allow_" not in str(error)


def test_other_problems_stay() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(4, 8), "norm": nn.LayerNorm(8), "out": nn.Linear(8, 2)})
    state = OTHERS["GPTQ"][0] | {"fc.bias": torch.ones(9), "norm.weight": torch.ones(8), "norm.bias": torch.ones(8)}
    state |= {"out.weight": torch.ones(2, 8), "more": torch.ones(1)}
    error = refusal(model, state)
    found = {(problem.kind.name, problem.name) for problem in error.problems}
    assert found == {
        ("QUANTIZED_WEIGHT", "fc.weight"),
        ("WRONG_SHAPE", "fc.bias"),
        ("MISSING", "out.bias"),
        ("UNEXPECTED", "more"),
    }


def test_values_that_are_kept_by_choice_are_no_problem() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(4, 8), "norm": nn.LayerNorm(8)})
    state = OTHERS["GPTQ"][0] | {name: value for name, value in model.state_dict().items() if name != "fc.weight"}
    ms.load(model, state, allow_missing=["fc.weight"], allow_unexpected=["fc.*"])


@pytest.mark.usefixtures("process_group")
def test_a_rank_multiplies_the_rows_that_it_holds(tmp_path: Path) -> None:
    weight, scale = quantize(torch.randn(300, 4), torch.float8_e4m3fn, (128, 128))
    save_file({"weight": weight, "weight_scale_inv": scale}, tmp_path / "f.safetensors")
    model = nn.Linear(4, 300, bias=False).bfloat16()
    mesh = init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    rule = ms.rules.Dequantize("weight", "weight_scale_inv", block=[128, 128])
    ms.load(model, tmp_path / "f.safetensors", rules=rule)
    assert isinstance(model.weight, DTensor)
    expected = (weight.double() * scale.double().repeat_interleave(128, 0)[:300]).float().bfloat16()
    assert torch.equal(model.weight.to_local(), expected)
