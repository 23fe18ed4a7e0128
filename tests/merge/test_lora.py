"""Adapters of LoRA merged into their base, with peft itself as the oracle where it is installed."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import modelstate as ms
from modelstate.errors import CombineError, OptionError
from tests.formats.files import same


class Net(nn.Module):
    def __init__(self, square: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.lin = square(6, 6)
        self.gpt = Conv1D(8, 6)
        self.conv = nn.Conv2d(3, 5, 3)
        self.one = nn.Conv2d(3, 5, 1)
        self.line = nn.Conv1d(3, 4, 2)
        self.blocks = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))
        self.head = nn.Linear(6, 2)


ALL = ["emb", "lin", "conv", "one", "line", "blocks.0", "blocks.1"]


def by_peft(base: nn.Module, configs: list[dict[str, Any]], directory: Path) -> dict[str, torch.Tensor]:
    """What peft merges; the adapters are left in `directory`, random in all that they have."""
    peft: Any = pytest.importorskip("peft", reason="peft is not installed: its own results are not compared")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, config in enumerate(configs):
            model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**config))
            for name, parameter in model.named_parameters():
                if "lora" in name or "head" in name or "bias" in name:
                    nn.init.normal_(parameter)
            model.save_pretrained(directory / str(index))
        merged = peft.PeftModel.from_pretrained(copy.deepcopy(base), directory / "0", adapter_name="x0")
        for index in range(1, len(configs)):
            merged.load_adapter(directory / str(index), adapter_name=f"x{index}")
        if len(configs) > 1:
            merged.base_model.set_adapter([f"x{index}" for index in range(len(configs))])
        return dict(merged.merge_and_unload().state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "configs",
    [
        [{"target_modules": ALL}],
        [{"target_modules": ["gpt"]}],
        [
            {
                "target_modules": ALL,
                "use_rslora": True,
                "bias": "all",
                "modules_to_save": ["head"],
                "rank_pattern": {"lin": 2},
                "alpha_pattern": {r"blocks\.1": 3},
            }
        ],
        [{"target_modules": ALL, "bias": "lora_only"}],
        [{"target_modules": ["lin", "conv", "blocks.0"], "lora_bias": True, "modules_to_save": ["head"]}],
        [{"target_modules": ["lin", "blocks.0"], "lora_bias": True, "bias": "all"}],
        [{"target_modules": ALL}, {"target_modules": ["lin", "emb"], "r": 2}],
        [{"target_modules": ALL, "use_dora": True, "modules_to_save": ["head"]}],
        [{"target_modules": ["gpt"], "use_dora": True, "use_rslora": True}],
    ],
    ids=[
        *("all kinds", "Conv1D", "patterns", "bias", "lora_bias", "lora_bias and bias", "two adapters"),
        *("DoRA", "DoRA of Conv1D"),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_the_result_is_that_of_peft(configs: list[dict[str, Any]], dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = Net().to(dtype)
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    wanted = by_peft(base, [{"r": 4, "lora_alpha": 7} | config for config in configs], tmp_path)
    adapters = [tmp_path / str(index) for index in range(len(configs))]
    checkpoint = ms.open([tmp_path / "base.safetensors", *adapters], combine=ms.merge.LoRA())
    assert set(checkpoint) == set(wanted)
    assert [name for name in wanted if not same(checkpoint.tensor(name), wanted[name])] == []
    model = Net().to(dtype)
    ms.load(model, checkpoint)
    assert all(same(value, wanted[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_adapters_with_dora(dtype: torch.dtype, tmp_path: Path) -> None:
    """peft takes the first adapter off the weight for the norm of the second, and adds it again, which rounds."""
    base = Net().to(dtype)
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    configs = [{"target_modules": ["lin", "emb", "conv"], "r": 4, "use_dora": True}] * 2
    expected = by_peft(base, configs, tmp_path)
    checkpoint = ms.open([tmp_path / name for name in ("base.safetensors", "0", "1")], combine=ms.merge.LoRA())
    for name, value in expected.items():
        error = (checkpoint.tensor(name).double() - value.double()).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * value.double().abs().max()


def test_dora_without_a_magnitude(tmp_path: Path) -> None:
    with pytest.raises(CombineError, match="lora_magnitude_vector, which DoRA needs"):
        ms.open([BASE, adapter(tmp_path / "a", config={"lora_alpha": 1, "use_dora": True})], combine=ms.merge.LoRA())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("saved", [torch.float16, torch.float32, torch.float64])
@pytest.mark.usefixtures("one_thread")
def test_an_adapter_of_another_dtype(saved: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed: its own results are not compared")
    base = Net().to(dtype)
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    by_peft(base, [{"target_modules": ALL, "r": 4}], tmp_path)
    file = tmp_path / "0" / "adapter_model.safetensors"
    save_file({name: tensor.to(saved) for name, tensor in load_file(file).items()}, file)
    wanted = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "0").merge_and_unload().state_dict()
    checkpoint = ms.open([tmp_path / "base.safetensors", tmp_path / "0"], combine=ms.merge.LoRA())
    assert [name for name in wanted if not same(checkpoint.tensor(name), wanted[name])] == []


@pytest.mark.slow
def test_an_embedding_that_is_saved_beside_its_adapter(tmp_path: Path) -> None:
    """peft writes the weight of an embedding that it trains, `base_layer`, and what is added to that."""
    base = Net()
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    wanted = by_peft(base, [{"target_modules": ["emb", "lin"], "r": 4}], tmp_path)
    file = tmp_path / "0" / "adapter_model.safetensors"
    saved = {"base_model.model.emb.base_layer.weight": base.emb.weight.detach() * 3}
    save_file(load_file(file) | saved, file)
    checkpoint = ms.open([tmp_path / "base.safetensors", tmp_path / "0"], combine=ms.merge.LoRA())
    assert same(checkpoint.tensor("lin.weight"), wanted["lin.weight"])
    difference = checkpoint.tensor("emb.weight") - (wanted["emb.weight"] + 2 * base.emb.weight)
    assert difference.abs().max() < 1e-5
    with pytest.raises(CombineError, match="another tensor has changed"):
        ms.open(
            [BASE, matrices("lin"), {"base_model.model.lin.weight": torch.ones(4, 3)}], combine=ms.merge.LoRA(alpha=2)
        )


# Files in peft's format, by hand.


def adapter(directory: Path, tensors: dict[str, torch.Tensor] | None = None, config: Any = None) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors or matrices("lin"), directory / "adapter_model.safetensors")
    if config is not None:
        text = config if isinstance(config, str) else json.dumps({"peft_type": "LORA", "r": 2} | config)
        (directory / "adapter_config.json").write_text(text)
    return directory


def matrices(module: str, out: int = 4, into: int = 3, rank: int = 2, name: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    path, name = f"base_model.model.{module}", f".{name}" if name else ""
    return {
        f"{path}.lora_A{name}.weight": torch.randn(rank, into),
        f"{path}.lora_B{name}.weight": torch.randn(out, rank),
    }


BASE = {"lin.weight": torch.arange(12.0).reshape(4, 3), "lin.bias": torch.ones(4), "sq.weight": torch.ones(3, 3)}


def product(module: str = "lin", **sizes: int) -> torch.Tensor:
    a, b = matrices(module, **sizes).values()
    return b @ a


@pytest.mark.parametrize("name", ["", "default", "my.adapter"])
def test_w_plus_alpha_by_rank_times_b_a(name: str, tmp_path: Path) -> None:
    found = adapter(tmp_path / "a", matrices("lin", name=name), {"lora_alpha": 3})
    checkpoint = ms.open([BASE, found], combine=ms.merge.LoRA())
    assert torch.equal(checkpoint.tensor("lin.weight"), BASE["lin.weight"] + product() * 1.5)
    assert checkpoint.tensor("lin.bias").data_ptr() == BASE["lin.bias"].data_ptr()
    assert checkpoint["lin.weight"].nbytes == 48


def test_what_is_given_counts_instead_of_the_file(tmp_path: Path) -> None:
    config = {"lora_alpha": 3, "alpha_pattern": {"lin": 100}}
    found = adapter(tmp_path / "a", config=config)
    for options, scaling in (({}, 50), ({"alpha": 5}, 2.5), ({"alpha": 4, "rslora": True}, 4 / 2**0.5)):
        checkpoint = ms.open([BASE, found], combine=ms.merge.LoRA(**options))
        assert torch.equal(checkpoint.tensor("lin.weight"), BASE["lin.weight"] + product() * scaling)
    without = ms.open([BASE, load_file(found / "adapter_model.safetensors")], combine=ms.merge.LoRA(alpha=5))
    assert torch.equal(without.tensor("lin.weight"), BASE["lin.weight"] + product() * 2.5)


@pytest.mark.parametrize("pattern", ["lin", "lin|other", "(?:lin|other)", "li?n?", "l[iy].", "(l|m)(i|y).*", "l.{2}"])
def test_patterns_of_modules(pattern: str, tmp_path: Path) -> None:
    found = adapter(tmp_path / "a", config={"lora_alpha": 3, "alpha_pattern": {pattern: 100}})
    checkpoint = ms.open([BASE, found], combine=ms.merge.LoRA())
    assert torch.equal(checkpoint.tensor("lin.weight"), BASE["lin.weight"] + product() * 50)


def test_a_tied_weight_changes_under_all_its_names() -> None:
    base = {"lin.weight": (weight := torch.ones(4, 3)), "head.weight": weight}
    checkpoint = ms.open([base, matrices("lin")], combine=ms.merge.LoRA(alpha=2))
    assert checkpoint.aliases == (("lin.weight", "head.weight"),)
    assert torch.equal(checkpoint.tensor("head.weight"), weight + product())
    replaced = matrices("lin") | {"base_model.model.head.weight": torch.zeros(4, 3)}
    checkpoint = ms.open([base, replaced], combine=ms.merge.LoRA(alpha=2))
    assert torch.equal(checkpoint.tensor("lin.weight"), weight + product())
    assert (checkpoint.tensor("head.weight").sum(), weight.sum()) == (0, 12)


def test_modules_to_save(tmp_path: Path) -> None:
    tensors = matrices("lin") | {"base_model.model.head.weight": torch.ones(2, 3)}
    with pytest.raises(CombineError, match=r"head\.weight"):
        ms.open([BASE, adapter(tmp_path / "a", tensors, {"lora_alpha": 2})], combine=ms.merge.LoRA())
    found = adapter(tmp_path / "b", tensors, {"lora_alpha": 2, "modules_to_save": ["head"]})
    assert ms.open([BASE, found], combine=ms.merge.LoRA()).tensor("head.weight").eq(1).all()
    half = {"base_model.model.lin.bias": torch.full((4,), 2.0)}
    merged = ms.open([BASE | {"lin.bias": torch.ones(4).half()}, half], combine=ms.merge.LoRA())
    assert same(merged.tensor("lin.bias"), torch.full((4,), 2.0).half())
    with pytest.raises(CombineError, match="another tensor has changed"):
        ms.open([BASE, half, half], combine=ms.merge.LoRA())
    larger = matrices("lin", out=5) | {"base_model.model.lin.base_layer.weight": torch.ones(5, 3)}
    merged = ms.open([BASE, larger], combine=ms.merge.LoRA(alpha=2))
    assert torch.equal(merged.tensor("lin.weight"), 1 + product(out=5))


@pytest.mark.parametrize(
    ("module", "of_base"),
    [
        ("te_lin", "lin"),
        ("transformer_blocks.0.lin", "blocks.0.lin"),
        ("text_encoder_2.layers.0.lin", "2.layers.0.lin"),
        ("attn.to.q", "attn.to_q"),
        ("layers.1_0.lin", "layers.1.0.lin"),
    ],
)
def test_a_name_that_resembles_another_one_is_not_that_one(module: str, of_base: str) -> None:
    with pytest.raises(CombineError, match="which the base lacks"):
        ms.open([{f"{of_base}.weight": torch.ones(4, 3)}, matrices(module)], combine=ms.merge.LoRA(alpha=2))


def test_a_square_weight_that_could_be_either() -> None:
    base = BASE | {"gpt.weight": torch.ones(3, 4)}
    tensors = matrices("sq", out=3) | matrices("gpt") | matrices("lin")
    with pytest.raises(CombineError, match="fan_in_fan_out"):
        ms.open([base, tensors], combine=ms.merge.LoRA(alpha=2))
    for flips in (False, True):
        checkpoint = ms.open([base, tensors], combine=ms.merge.LoRA(alpha=2, fan_in_fan_out=flips))
        delta = product("sq", out=3)
        assert torch.equal(checkpoint.tensor("sq.weight"), base["sq.weight"] + (delta.T if flips else delta))
        assert torch.equal(checkpoint.tensor("gpt.weight"), base["gpt.weight"] + product("gpt").T)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (matrices("lim"), "for 'lim.weight', which the base lacks (but 'lin.weight')"),
        (matrices("lin", out=5), "does not fit"),
        (dict(list(matrices("lin").items())[:1]), "counterpart"),
        (
            {
                "base_model.model.lin.lora_A.weight": torch.ones(2, 3),
                "base_model.model.lin.lora_B.weight": torch.ones(4, 1),
            },
            "fit",
        ),
        (
            {
                "base_model.model.lin.lora_A.weight": torch.ones(()),
                "base_model.model.lin.lora_B.weight": torch.ones(()),
            },
            "fit",
        ),
        (matrices("lin", name="a") | matrices("lin", name="b"), "several adapters"),
        (matrices("lin") | {"base_model.model.lin.lora_embedding_A": torch.ones(2, 3)}, "counterpart"),
        (matrices("lin") | {"base_model.model.lin.weight": torch.ones(5, 3)}, "'lin.weight' of shape (5, 3)"),
        (matrices("lin") | {"lin.lora_A.weight": torch.ones(2, 3)}, "another matrix for the same"),
        (matrices("lin") | {"base_model.model.lin.lora_magnitude_vector": torch.ones(3)}, "(3,)) does not fit"),
        (matrices("lin") | {"base_model.model.lin.lora_B.bias": torch.ones(3)}, "lora_B.bias"),
        ({name: t.half() if "_A" in name else t for name, t in matrices("lin").items()}, "float16"),
        (matrices("int"), "nothing can be added"),
    ],
)
def test_an_adapter_that_does_not_fit(tensors: dict[str, torch.Tensor], said: str) -> None:
    base = BASE | {"int.weight": torch.ones(4, 3, dtype=torch.int8)}
    with pytest.raises(CombineError) as caught:
        ms.open([base, tensors], combine=ms.merge.LoRA(alpha=1))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        *("{", "[]", '"LORA"', "[" * 100_000, '{"r": NaN, "lora_alpha": 1}'),
        *({"lora_alpha": "8"}, {"lora_alpha": float("nan")}, {"lora_alpha": True}, {"r": 0}, {"r": 3}, {"r": 2.0}, {}),
        *({"peft_type": "LOHA"}, {"use_qalora": True}, {"layer_replication": [[0, 2]]}, {"target_parameters": "x"}),
        *(
            {"alpha_pattern": {"(": 1}},
            {"alpha_pattern": {"(a+)+b": 1}},
            {"alpha_pattern": {".?" * 40 + "!": 1}},
            {"alpha_pattern": {"(.|.)" * 40 + "!": 1}},
            {"alpha_pattern": {"(?:.|.)" * 40 + "!": 1}},
            {"rank_pattern": ["x"]},
            {"rank_pattern": {"x": 0}},
        ),
        *({"modules_to_save": "head"}, {"use_rslora": "yes"}, {"lora_alpha": 10**400}, {"kasa_config": {"beta": 1}}),
        *({"alpha_pattern": {"lin": None}}, {"rank_pattern": {"lin": None}}, '{"lin.lora_alpha": 1}'),
        *(
            {"init_lora_weights": init}
            for init in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq", "mica")
        ),
    ],
    ids=lambda config: str(config)[:30],
)
def test_a_configuration_that_cannot_be_used(config: Any, tmp_path: Path) -> None:
    config = {"lora_alpha": 1} | config if isinstance(config, dict) and config else config
    with pytest.raises(CombineError):
        ms.open([BASE, adapter(tmp_path / "a", config=config)], combine=ms.merge.LoRA())


def test_an_adapter_whose_base_was_changed_for_it(tmp_path: Path) -> None:
    """peft takes the first matrices off the base when it loads such an adapter; no file has them."""
    found = adapter(tmp_path / "a", config={"lora_alpha": 1, "init_lora_weights": "pissa"})
    with pytest.raises(CombineError, match="path_initial_model_for_weight_conversion"):
        ms.open([BASE, found], combine=ms.merge.LoRA())
    for init in (True, False, "gaussian", "eva", "orthogonal"):
        config = {"lora_alpha": 1, "init_lora_weights": init}
        ms.open([BASE, adapter(tmp_path / "b", config=config)], combine=ms.merge.LoRA())


@pytest.mark.parametrize("adapter", ["adapter", Path("adapter")])
def test_an_adapter_in_the_place_of_alpha(adapter: Any) -> None:
    with pytest.raises(OptionError, match=r"ms\.open\(\[first, second\], combine=ms\.merge\.LoRA\(\)\)"):
        ms.merge.LoRA(adapter)


def test_options_that_mean_nothing() -> None:
    for options in (
        *({"alpha": "8"}, {"alpha": float("inf")}, {"alpha": True}, {"alpha": 10**400}),
        *({"rslora": "yes"}, {"fan_in_fan_out": "a"}),
    ):
        with pytest.raises(OptionError):
            ms.merge.LoRA(**options)  # type: ignore[arg-type]
    with pytest.raises(CombineError, match="no adapter"):
        ms.open([BASE], combine=ms.merge.LoRA())
    with pytest.raises(CombineError, match="it has no tensors"):
        ms.open([BASE, {}], combine=ms.merge.LoRA())
    with pytest.raises(CombineError, match=r"alpha=\.\.\."):
        ms.open([BASE, matrices("lin")], combine=ms.merge.LoRA())


# Where it is forgotten that an adapter is one.


def small_adapter() -> dict[str, torch.Tensor]:
    return {
        "base_model.model.0.lora_A.weight": torch.ones(1, 4),
        "base_model.model.0.lora_B.weight": torch.ones(2, 1),
        "base_model.model.1.weight": torch.ones(2),
    }


@pytest.mark.parametrize("case", ["with its base", "before its base", "alone"])
def test_an_adapter_that_is_not_merged_is_answered_with_lora(case: str) -> None:
    base = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))
    parts = {
        "with its base": [base.state_dict(), small_adapter()],
        "before its base": [small_adapter(), base.state_dict()],
    }
    before = {name: value.clone() for name, value in base.state_dict().items()}
    with pytest.raises(ms.PlanError) as caught:
        ms.load(base, ms.open(parts.get(case, [small_adapter()])))
    kinds = [problem.kind.name for problem in caught.value.problems]
    assert kinds[:3] == ["UNMERGED_ADAPTER"] * 3
    assert set(kinds[3:]) == ({"MISSING"} if case == "alone" else set())
    assert "ms.open([base, adapter], combine=ms.merge.LoRA())" in str(caught.value)
    assert "allow_unexpected" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())


def test_a_model_that_has_an_adapter_itself_is_not_told_to_merge() -> None:
    model = nn.ModuleDict({"lora_A": nn.Linear(2, 2, bias=False), "lora_B": nn.Linear(2, 2, bias=False)})
    wrapped = nn.ModuleDict({"q": model})
    state = {name.replace("weight", "default.weight"): value for name, value in wrapped.state_dict().items()}
    kinds = {problem.kind.name for problem in ms.plan(wrapped, state).problems}
    assert kinds == {"MISSING", "UNEXPECTED"}


@pytest.mark.parametrize("others", [[], [{"0.weight": torch.ones(2, 4)}]], ids=["alone", "before its base"])
def test_the_base_has_to_come_first(others: list[dict[str, torch.Tensor]]) -> None:
    with pytest.raises(CombineError, match="the first checkpoint is an adapter") as caught:
        ms.open([small_adapter(), *others], combine=ms.merge.LoRA(alpha=1))
    assert caught.value.remedy == "ms.open([base, adapter], combine=ms.merge.LoRA())"


def test_a_second_model_is_not_taken_for_an_adapter() -> None:
    base, other = Net().state_dict(), Net().state_dict()
    with pytest.raises(CombineError, match="not an adapter") as raised:
        ms.open([base, other], combine=ms.merge.LoRA())
    assert "ms.merge.Average()" in str(raised.value)
