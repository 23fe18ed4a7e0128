"""Adapters of fused experts (`target_parameters` of peft), merged into small models of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.errors import CombineError
from tests.formats.files import same
from tests.merge.test_lora import by_peft

SMALL = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "vocab_size": 30,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("mlp.experts", {"num_local_experts": 3}),
    "Qwen3Moe": ("mlp.experts", {"num_experts": 3, "moe_intermediate_size": 7, "decoder_sparse_step": 1}),
    "GptOss": ("mlp.experts", {"num_local_experts": 3}),
    "Llama4Text": ("feed_forward.experts", {"num_local_experts": 3, "interleave_moe_layer_step": 1}),
}


EXPERTS = {"r": 2, "target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def model_of(family: str, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL | MODELS[family][1] | sizes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


@pytest.mark.slow_except(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", MODELS)
def test_the_result_is_that_of_peft(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    experts = MODELS[family][0]
    base = model_of(family).to(dtype)
    save_file({name: value.clone() for name, value in base.state_dict().items()}, tmp_path / "base.safetensors")
    config = {
        "r": 2,
        "lora_alpha": 5,
        "target_modules": ["q_proj"],
        "target_parameters": [f"{experts}.gate_up_proj", f"{experts}.down_proj", "k_proj.weight"],
        "rank_pattern": {"0.self_attn.k_proj.weight": 3},
        "alpha_pattern": {f"{experts}.down_proj": 7},
    }
    expected = by_peft(base, [config], tmp_path)
    checkpoint = ms.open([tmp_path / "base.safetensors", tmp_path / "0"], combine=ms.merge.LoRA())
    changed = [name for name, value in base.state_dict().items() if not same(value, expected[name])]
    assert len(changed) == 8
    assert [name for name in expected if not same(checkpoint.tensor(name), expected[name])] == []
    target = model_of(family).to(dtype)
    ms.load(target, checkpoint)
    assert [name for name, value in target.state_dict().items() if not same(value, expected[name])] == []


@pytest.mark.slow
def test_square_experts(tmp_path: Path) -> None:
    """GptOss has the inputs first. Its down projection is square here; the other one tells."""
    base = model_of("GptOss", intermediate_size=12)
    expected = by_peft(base, [EXPERTS], tmp_path / "both")
    checkpoint = ms.open([base.state_dict(), tmp_path / "both" / "0"], combine=ms.merge.LoRA())
    assert [name for name in expected if not same(checkpoint.tensor(name), expected[name])] == []
    expected = by_peft(base, [EXPERTS | {"target_parameters": ["experts.down_proj"]}], tmp_path / "one")
    sources = [base.state_dict(), tmp_path / "one" / "0"]
    with pytest.raises(CombineError, match="fan_in_fan_out"):
        ms.open(sources, combine=ms.merge.LoRA())
    checkpoint = ms.open(sources, combine=ms.merge.LoRA(fan_in_fan_out=True))
    assert [name for name in expected if not same(checkpoint.tensor(name), expected[name])] == []


def nested(parameters: int, experts: int = 3) -> dict[str, torch.Tensor]:
    """Returns matrices of rank 2 for experts of 4 outputs and 5 inputs."""
    matrices = {}
    for depth in range(parameters):
        path = f"base_model.model.moe{'.base_layer' * depth}"
        matrices[f"{path}.lora_A.weight"] = torch.ones(2 * experts, 5)
        matrices[f"{path}.lora_B.weight"] = torch.ones(4, 2 * experts)
    return matrices


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (nested(2), r"fits several of moe\.w1, moe\.w2"),
        (nested(1), r"1 pair of matrices for moe\.w1, moe\.w2"),
        (nested(2, experts=2), "does not fit"),
        (nested(2) | {"base_model.model.moe.lora_magnitude_vector": torch.ones(4)}, "fits several"),
    ],
)
def test_matrices_whose_parameter_is_not_clear(tensors: dict[str, torch.Tensor], says: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_parameters": ["moe.w1", "moe.w2"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    base = {"moe.w1": torch.zeros(3, 4, 5), "moe.w2": torch.zeros(3, 4, 5)}
    with pytest.raises(CombineError, match=says):
        ms.open([base, tmp_path], combine=ms.merge.LoRA())


@pytest.mark.slow
def test_experts_that_the_base_has_one_by_one(tmp_path: Path) -> None:
    """transformers writes the experts of Mixtral as separate weights, and fuses them when it reads these."""
    base: Any = model_of("Mixtral")
    expected = by_peft(base, [EXPERTS], tmp_path)
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(CombineError, match=r"down_proj', which the base lacks") as caught:
        ms.open([tmp_path / "base", tmp_path / "0"], combine=ms.merge.LoRA())
    assert "ms.convert_checkpoint(base, path, rules=ms.rules.from_transformers(model))" in caught.value.remedy
    fused = tmp_path / "fused.safetensors"
    ms.convert_checkpoint(tmp_path / "base", fused, rules=ms.rules.from_transformers(base))
    checkpoint = ms.open([fused, tmp_path / "0"], combine=ms.merge.LoRA())
    assert [name for name in expected if not same(checkpoint.tensor(name), expected[name])] == []
