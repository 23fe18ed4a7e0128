"""Adapters of diffusers and of kohya's tools: names, alpha of each module, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import modelstate as ms
from modelstate.errors import CombineError, PlanError

State = dict[str, torch.Tensor]
BASE: State = {
    "unet.down_blocks.0.attn1.to_q.weight": torch.randn(6, 4, dtype=torch.float64),
    "unet.down_blocks.0.attn1.to_out.0.weight": torch.randn(4, 4, dtype=torch.float64),
    "unet.conv_in.weight": torch.randn(5, 3, 3, 3, dtype=torch.float64),
    "unet.proj_in.weight": torch.randn(5, 3, 1, 1, dtype=torch.float64),
    "text_encoder.text_model.layers.0.mlp.fc1.weight": torch.randn(8, 4, dtype=torch.float64),
}
KOHYA = {
    "lora_unet_down_blocks_0_attn1_to_q": "unet.down_blocks.0.attn1.to_q",
    "lora_unet_down_blocks_0_attn1_to_out_0": "unet.down_blocks.0.attn1.to_out.0",
    "lora_unet_conv_in": "unet.conv_in",
    "lora_unet_proj_in": "unet.proj_in",
    "lora_te_text_model_layers_0_mlp_fc1": "text_encoder.text_model.layers.0.mlp.fc1",
}


def matrices(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A and B for a weight."""
    out, *into = weight.shape
    ones = [1] * (len(into) - 1)
    return torch.randn(rank, *into, dtype=weight.dtype), torch.randn(out, rank, *ones, dtype=weight.dtype)


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """The sum in float64, by a product of the matrices without any convolution."""
    product = b.double().flatten(1) @ a.double().flatten(1)
    return (weight.double() + scaling * product.reshape(weight.shape)).to(weight.dtype)


def kohya(base: State, names: dict[str, str], alphas: dict[str, float]) -> tuple[State, State]:
    """Returns an adapter in the format of kohya's tools, and what is to come of it; each module has another rank."""
    adapter: State = {}
    expected = dict(base)
    for rank, (name, module) in enumerate(names.items(), 1):
        weight = base[f"{module}.weight"]
        a, b = matrices(weight, rank)
        adapter |= {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b}
        alpha = alphas.get(name, rank)
        if name in alphas:
            adapter[f"{name}.alpha"] = torch.tensor(alpha)
        expected[f"{module}.weight"] = merged(weight, a, b, alpha / rank)
    return adapter, expected


def assert_close(checkpoint: ms.Checkpoint, expected: State) -> None:
    assert set(checkpoint) == set(expected)
    for name, value in expected.items():
        assert torch.allclose(checkpoint.tensor(name), value, rtol=1e-12, atol=1e-12), name


def test_each_module_of_kohyas_tools_has_its_own_alpha(tmp_path: Path) -> None:
    alphas = {"lora_unet_down_blocks_0_attn1_to_q": 0.5, "lora_unet_conv_in": 7.0}
    adapter, expected = kohya(BASE, KOHYA, alphas)
    save_file(BASE, tmp_path / "base.safetensors")
    save_file(adapter, tmp_path / "kohya.safetensors")
    sources = [tmp_path / "base.safetensors", tmp_path / "kohya.safetensors"]
    assert_close(ms.open(sources, combine=ms.merge.LoRA()), expected)
    assert_close(ms.open([BASE, adapter], combine=ms.merge.LoRA()), expected)


@pytest.mark.parametrize("prefix", ["", "unet.", "model.diffusion_model."])
def test_a_base_may_be_one_part_of_the_pipeline(prefix: str) -> None:
    base = {prefix + name.removeprefix("unet."): value for name, value in BASE.items() if name.startswith("unet.")}
    names = {
        name: prefix + module.removeprefix("unet.") for name, module in KOHYA.items() if module.startswith("unet.")
    }
    adapter, expected = kohya(base, names, {})
    assert_close(ms.open([base, adapter], combine=ms.merge.LoRA()), expected)


@pytest.mark.parametrize("part", ["", "unet."])
def test_files_of_diffusers_have_the_rank_as_alpha(part: str) -> None:
    base = {part + "q.weight": torch.zeros(4, 4), part + "k.weight": torch.zeros(4, 4)}
    adapter = {
        "unet.q.lora_A.weight": torch.ones(4, 4),
        "unet.q.lora_B.weight": torch.ones(4, 4),
        "unet.k.lora_A.weight": torch.ones(2, 4),
        "unet.k.lora_B.weight": torch.ones(4, 2),
    }
    checkpoint = ms.open([base, adapter], combine=ms.merge.LoRA())
    assert checkpoint.tensor(part + "q.weight").eq(4).all()
    assert checkpoint.tensor(part + "k.weight").eq(2).all()
    with_alpha = adapter | {"unet.k.alpha": torch.tensor([1.0], dtype=torch.float16)}
    assert ms.open([base, with_alpha], combine=ms.merge.LoRA()).tensor(part + "k.weight").eq(1).all()


def test_the_metadata_of_diffusers_has_alpha(tmp_path: Path) -> None:
    base = {"prior.q.weight": torch.zeros(4, 4), "text_encoder.q.weight": torch.zeros(4, 4)}
    adapter = {
        f"{part}.q.lora_{kind}.weight": torch.ones(size)
        for part in ("prior", "text_encoder")
        for kind, size in (("A", (2, 4)), ("B", (4, 2)))
    }
    config = {"prior.lora_alpha": 6, "prior.r": 2, "prior.alpha_pattern": {}, "prior.peft_type": "LORA"}
    path = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(adapter, path, metadata={"format": "pt", "lora_adapter_metadata": json.dumps(config)})
    checkpoint = ms.open([base, path], combine=ms.merge.LoRA())
    assert checkpoint.tensor("prior.q.weight").eq(6).all()
    assert checkpoint.tensor("text_encoder.q.weight").eq(2).all()
    save_file(adapter, path, metadata={"lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": 3})})
    assert ms.open([base, path], combine=ms.merge.LoRA()).tensor("prior.q.weight").eq(3).all()
    damaged = ["{", "[1]", '{"prior.lora_alpha": "x"}']
    for text in (*damaged, '{"lora_alpha": 1, "kasa_config": {"beta": 1}}', '{"prior.r": 2}'):
        save_file(adapter, path, metadata={"lora_adapter_metadata": text})
        with pytest.raises(CombineError, match="damaged" if text in damaged else "kasa_config|without the lora_alpha"):
            ms.open([base, path], combine=ms.merge.LoRA())


def pair(name: str, into: int = 4, out: int = 4) -> State:
    return {f"{name}.lora_down.weight": torch.ones(2, into), f"{name}.lora_up.weight": torch.ones(out, 2)}


@pytest.mark.parametrize(
    ("base", "adapter", "says"),
    [
        (["a_b.c", "a.b_c"], pair("lora_unet_a_b_c"), "one of several modules, and does not say which: a.b_c, a_b.c"),
        (["unet.q", "q"], pair("lora_unet_q"), "one of several modules"),
        (["x"], pair("lora_te1_x") | pair("lora_te2_x"), "another matrix for the same"),
        (["x"], pair("lora_unet_y_z"), "'y_z' with dots for some underscores, which the base lacks"),
        (["x"], pair("lora_y_z"), "'y_z' with dots"),
        (["x"], pair("lora_unet_x") | {"lora_unet_x.alpha": torch.ones(2)}, "not one finite number"),
        (["x"], pair("lora_unet_x") | {"lora_unet_x.alpha": torch.tensor(float("nan"))}, "not one finite number"),
        (["x"], pair("lora_unet_x") | {"lora_unet_x.alpha": torch.ones((), device="meta")}, "not one finite number"),
        (["x", "y"], pair("lora_unet_x") | {"lora_unet_y.alpha": torch.tensor(1.0)}, "there are no matrices"),
        (["x"], {"lora_unet_x.lora_down.weight": torch.ones(2, 4)}, "lacks its counterpart"),
        (["x"], {"base_model.model.x.lora_A.weight": torch.ones(2, 4)}, "lacks its counterpart"),
        (["x"], {f"base_model.model.x.lora_{k}.weight": torch.ones(4, 4) for k in "AB"}, "alpha=..."),
        (["x"], {f"x.lora_{k}.default.weight": torch.ones(4, 4) for k in "AB"}, "alpha=..."),
        (["x"], {f"x.lora_{k}": torch.ones(4, 4) for k in "AB"}, "alpha=..."),
    ],
)
def test_what_is_not_clear_is_refused(base: list[str], adapter: State, says: str) -> None:
    with pytest.raises(CombineError) as caught:
        ms.open([{f"{name}.weight": torch.ones(4, 4) for name in base}, adapter], combine=ms.merge.LoRA())
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("names", "method"),
    [
        (["lora_unet_x.dora_scale"], "DoRA of LyCORIS"),
        (["lora_unet_x.lora_mid.weight"], "LoCon"),
        (["lora_unet_x.hada_w1_a", "lora_unet_x.hada_w1_b", "lora_unet_x.hada_w2_a", "lora_unet_x.hada_w2_b"], "LoHa"),
        (["lycoris_x.lokr_w1", "lycoris_x.lokr_w2"], "LoKr"),
        (["lora_unet_x.oft_blocks"], "OFT"),
    ],
)
@pytest.mark.parametrize("with_lora", [False, True])
def test_other_methods_are_refused_by_name(names: list[str], method: str, with_lora: bool) -> None:
    adapter: dict[str, Any] = dict.fromkeys(names, torch.ones(4, 4)) | (pair("lora_unet_x") if with_lora else {})
    with pytest.raises(CombineError) as caught:
        ms.open([{"x.weight": torch.ones(4, 4)}, adapter], combine=ms.merge.LoRA())
    assert f"not merged here: {method}" in str(caught.value)
    assert "LyCORIS" in str(caught.value)


def test_a_load_of_a_file_of_kohyas_tools_alone_says_what_it_is() -> None:
    with pytest.raises(PlanError, match=r"ms\.merge\.LoRA\(\)"):
        ms.load(torch.nn.ModuleDict({"x": torch.nn.Linear(4, 4, bias=False)}), pair("lora_unet_x"))


def test_old_names_of_diffusers_are_not_answered_with_an_average() -> None:
    adapter = {"unet.attn1.processor.to_q_lora.down.weight": torch.ones(2, 4)}
    with pytest.raises(CombineError) as caught:
        ms.open([{"unet.attn1.to_q.weight": torch.ones(4, 4)}, adapter], combine=ms.merge.LoRA())
    assert "Average" not in str(caught.value)
    assert "save it with such names" in str(caught.value)
