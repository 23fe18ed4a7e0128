"""Models of transformers, from what `save_pretrained` writes: what is loaded is what `from_pretrained` loads."""

import copy
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError, RuleError

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", minversion="5")
# Its modules are imported when they are used: it takes two seconds, which each worker would spend on the collection.

IDS = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
IMAGE = {"pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {**TEXT, "num_key_value_heads": 2, "max_position_embeddings": 64}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


class Case(NamedTuple):
    model: str
    config: str
    options: dict[str, Any]
    inputs: dict[str, torch.Tensor]


RENAMED = [
    Case("MixtralForCausalLM", "MixtralConfig", {**EXPERTS, "num_local_experts": 4}, IDS),
    Case(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**EXPERTS, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
        IDS,
    ),
    Case("GPTNeoXForCausalLM", "GPTNeoXConfig", {**TEXT, "max_position_embeddings": 64}, IDS),
    Case("ViTForImageClassification", "ViTConfig", VISION, IMAGE),
    Case("DINOv3ConvNextModel", "DINOv3ConvNextConfig", {"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4}, IMAGE),
    Case(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "vision_config": {"model_type": "clip_vision_model", **VISION, "projection_dim": 32},
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_id": 98,
        },
        IDS,
    ),
]
UNCHANGED = [Case("BertModel", "BertConfig", TEXT, IDS), Case("LlamaForCausalLM", "LlamaConfig", TEXT, IDS)]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def made(case: Case, seed: int) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, case.config)(**case.options)
    return getattr(transformers, case.model)(config).eval()


def saved(case: Case, path: Path, **options: Any) -> Any:
    """Writes a model with random weights, and returns what `from_pretrained` makes of the files."""
    made(case, 1).save_pretrained(path, **options)
    return getattr(transformers, case.model).from_pretrained(path).eval()


def skeleton(case: Case) -> Any:
    with ms.skeleton():
        return made(case, 2)


def assert_same(model: nn.Module, stock: nn.Module) -> None:
    for own, other in ((model.state_dict(), stock.state_dict()), (model.named_buffers(), stock.named_buffers())):
        found, expected = dict(own), dict(other)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name


def answers(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    # A copy has aligned memory: on that of a mapped file, torch's kernels may differ in the last bit.
    with torch.no_grad():
        return [one for one in copy.deepcopy(model)(**inputs).to_tuple() if isinstance(one, torch.Tensor)]


def mapping_notes(report: Any) -> list[str]:
    return [note for note in report.notes if "as transformers does it" in note]


@pytest.mark.parametrize("case", RENAMED, ids=lambda case: case.model)
def test_what_transformers_renames_loads_unaided(case: Case, tmp_path: Path) -> None:
    stock = saved(case, tmp_path, max_shard_size="40KB")
    assert set(ms.open(tmp_path)) != set(stock.state_dict())  # else nothing is tried here
    plan = ms.plan(made(case, 2), tmp_path)
    assert plan.ok
    assert mapping_notes(plan)
    materialised = made(case, 2)
    kept = dict(materialised.named_parameters())
    for model, options in ((skeleton(case), {}), (materialised, {}), (skeleton(case), {"map": False})):
        report = ms.load(model, tmp_path, **options)
        assert report.coverage == 1
        assert mapping_notes(report)
        assert any(rule.startswith(f"from_transformers({case.model})") for step in report.steps for rule in step.rules)
        assert_same(model, stock)
        found, expected = answers(model, case.inputs), answers(stock, case.inputs)
        assert len(found) == len(expected) > 0
        assert all(map(torch.equal, found, expected))
    assert all(parameter is kept[name] for name, parameter in materialised.named_parameters())


@pytest.mark.parametrize("case", UNCHANGED, ids=lambda case: case.model)
def test_where_names_fit_nothing_is_converted(case: Case, tmp_path: Path) -> None:
    stock, model = saved(case, tmp_path), skeleton(case)
    report = ms.load(model, tmp_path)
    assert not mapping_notes(report)
    assert not any(step.rules for step in report.steps)
    assert_same(model, stock)


MIXTRAL, VIT = RENAMED[0], next(case for case in RENAMED if case.model.startswith("ViT"))


def test_names_of_the_module_itself_are_never_converted(tmp_path: Path) -> None:
    model = made(MIXTRAL, 1)
    ms.save(model, tmp_path / "own.safetensors")
    again = skeleton(MIXTRAL)
    assert not mapping_notes(ms.load(again, tmp_path / "own.safetensors"))
    assert_same(again, model)


def test_a_plan_and_a_load_in_the_background_convert_as_well(tmp_path: Path) -> None:
    stock = saved(MIXTRAL, tmp_path)
    first, second = made(MIXTRAL, 2), made(MIXTRAL, 3)
    assert mapping_notes(ms.load(first, ms.plan(first, tmp_path)))
    assert mapping_notes(ms.load(second, tmp_path, background=True).result())
    for model in (first, second):
        assert_same(model, stock)


def without_an_expert(state: dict[str, torch.Tensor]) -> None:
    del state["model.layers.1.block_sparse_moe.experts.2.w1.weight"]


def with_another_shape(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.block_sparse_moe.experts.1.w2.weight"] = torch.zeros(64, 32)


def with_another_dtype(state: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    state[name] = state[name].half()


def with_both_names(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.mlp.gate.weight"] = torch.zeros(4, 32)


def with_a_name_more(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.nothing"] = torch.zeros(1)


@pytest.mark.parametrize(
    "damage",
    [without_an_expert, with_another_shape, with_another_dtype, with_both_names, with_a_name_more],
    ids=lambda damage: damage.__name__,
)
def test_what_does_not_fit_one_to_one_is_refused(
    damage: Callable[[dict[str, torch.Tensor]], None], tmp_path: Path
) -> None:
    saved(MIXTRAL, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    state = load_file(file)
    damage(state)
    save_file(state, file)
    model = made(MIXTRAL, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for rules in ((), ms.rules.from_transformers(model)):
        with pytest.raises(ms.PlanError):
            ms.load(model, tmp_path, rules=rules)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_allowed_names_and_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    whole = saved(VIT, tmp_path / "whole")
    base = transformers.ViTModel(whole.config, add_pooling_layer=False)
    with pytest.raises(ms.PlanError, match="classifier") as caught:
        ms.load(base, tmp_path / "whole")
    assert {problem.name for problem in caught.value.problems} == {"classifier.weight", "classifier.bias"}
    ms.load(base, tmp_path / "whole", allow_unexpected=["classifier.*"])
    assert_same(base, whole.vit)
    base.save_pretrained(tmp_path / "base")
    again = made(VIT, 2)
    head = again.classifier.weight.clone()
    with pytest.raises(ms.PlanError, match="classifier") as caught:
        ms.load(again, tmp_path / "base")
    assert {problem.name for problem in caught.value.problems} == {"classifier.weight", "classifier.bias"}
    ms.load(again, tmp_path / "base", allow_missing=["classifier.*"])
    assert_same(again.vit, whole.vit)
    assert torch.equal(again.classifier.weight, head)


def test_what_fits_in_part_is_not_left_to_the_code_of_the_model(tmp_path: Path) -> None:
    """A hook that fills in what is lacking does not know what else was made to fit."""
    saved(VIT, tmp_path)
    model = made(VIT, 2)
    (file,) = tmp_path.glob("*.safetensors")
    state = load_file(file)
    del state["classifier.bias"]
    save_file(state, file)

    def fill_in(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state.setdefault(f"{prefix}bias", torch.zeros(2))

    model.classifier.register_load_state_dict_pre_hook(fill_in)
    with pytest.raises(ms.PlanError, match="only in part") as caught:
        ms.load(model, tmp_path)
    assert "rules=ms.rules.from_transformers(model)" in str(caught.value)
    ms.load(model, tmp_path, rules=ms.rules.from_transformers(model))
    assert not model.classifier.bias.any()


def test_the_rules_work_with_others_and_for_a_part(tmp_path: Path) -> None:
    stock = saved(MIXTRAL, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    state = {f"module.{name}": value for name, value in load_file(file).items()}
    model = made(MIXTRAL, 2)
    rules = ms.rules.from_transformers(model)
    ms.load(model, state, rules=[ms.rules.Prefix(strip="module."), rules])
    assert_same(model, stock)
    assert rules.apply(load_file(file)).keys() == stock.state_dict().keys()
    assert rules.apply(stock.state_dict()).keys() == stock.state_dict().keys()  # nothing to convert
    assert repr(rules) == "Rules([from_transformers(MixtralForCausalLM)])"
    with pytest.raises(RuleError, match="save_pretrained"):
        rules.reverse()

    wrapper = nn.ModuleDict({"encoder": made(MIXTRAL, 3)})
    with pytest.raises(ms.PlanError):
        ms.load(wrapper, tmp_path)
    ms.load(wrapper, tmp_path, rules=[rules, ms.rules.Prefix(add="encoder.")])
    assert_same(wrapper["encoder"], stock)


def test_the_state_of_an_optimizer_goes_with_the_weights(tmp_path: Path) -> None:
    """A run whose parameters had the names of the file: its moments are stacked as the experts are."""
    model = made(MIXTRAL, 2)
    saved(MIXTRAL, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    names = load_file(file)
    state = {"state": {name: {"exp_avg": value, "step": torch.tensor(3.0)} for name, value in names.items()}}
    optimizer = torch.optim.AdamW(model.parameters())
    groups = [{**optimizer.param_groups[0], "params": list(names)}]
    rules = ms.rules.from_transformers(model)
    for values in state["state"].values():
        values["exp_avg_sq"] = values["exp_avg"].square()
    ms.load_optimizer_state(model, optimizer, {**state, "param_groups": groups}, rules=rules)
    expected = rules.apply(names)
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], expected[name]), name
        assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], expected[name].square()), name


def test_other_modules_have_no_such_rules() -> None:
    with pytest.raises(OptionError, match="models of transformers only"):
        ms.rules.from_transformers(nn.Linear(2, 2))
    namesake = type("PreTrainedModel", (nn.Linear,), {})(2, 2)
    with pytest.raises(ms.PlanError):
        ms.load(namesake, {"beta": torch.zeros(2)})


# Operations that need large models, or models that are not in this version: a model that has them all.


@cache
def odd_classes() -> tuple[Any, Any]:
    """Returns the class of the model, and that of its configuration."""

    class OddConfig(transformers.PretrainedConfig):
        model_type = "modelstate_odd"

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.num_attention_heads, self.pieces = 2, 3

    class Odd(transformers.PreTrainedModel):
        config_class = OddConfig
        base_model_prefix = "body"

        def __init__(self, config: OddConfig) -> None:
            super().__init__(config)
            names = {
                (8, 4): "q k v",
                (8,): "qb kb vb",
                (6, 4): "gate up",
                (4, 6): "woven",
                (5, 3): "long",
                (2, 3): "short",
                (3, 4): "turned",
                (4, 4): "square",
                (3, 5): "kept",
                (2, 24): "flat",
                (2, 3, 2, 2, 2): "deep",
                (2, 6, 4): "text vision",
                (6, 2): "ngram",
                (2,): "norm1 norm2",
            }
            for shape, of_shape in names.items():
                for name in of_shape.split():
                    part = nn.Module()
                    part.weight = nn.Parameter(torch.zeros(shape))
                    self.add_module(name, part)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            pass

    return Odd, OddConfig


def odd_mapping() -> list[Any]:
    loading = importlib.import_module("transformers.core_model_loading")
    rope = loading.PermuteForRope(permute_layer_names=["q", "k"])
    converter = loading.WeightConverter
    return [
        loading.WeightRenaming("^old_", ""),
        loading.GroupWeightRename(["norm0", "norm1"], ["norm1", "norm2"]),
        converter("qkv.weight", ["q.weight", "k.weight", "v.weight"], [loading.Chunk(0), rope]),
        converter("qkv.bias", ["qb.weight", "kb.weight", "vb.weight"], [loading.Chunk(0), rope]),
        converter("w13.weight", ["gate.weight", "up.weight"], [loading.Interleave(0), loading.Chunk(0)]),
        converter("twisted.weight", "woven.weight", [loading.Interleave(1, inverse=True)]),
        converter("both.weight", ["long.weight", "short.weight"], [loading.Split(0)]),
        converter("stood.weight", "turned.weight", [loading.Transpose(0, 1)]),
        converter("square.weight", "square.weight", [loading.Transpose(0, 1, check_dims=True)]),
        converter("kept.weight", "kept.weight", [loading.Transpose(0, 1, check_dims=True)]),
        converter("conv.weight", "flat.weight", [loading.Conv3dToLinear(3, (2, 2, 2))]),
        converter("rows.weight", "deep.weight", [loading.LinearToConv3d(3, (2, 2, 2))]),
        converter(
            ["experts.*.a.weight", "experts.*.b.weight"],
            ["text.weight", "vision.weight"],
            [loading.ErnieFuseAndSplitTextVisionExperts()],
        ),
        converter("part_*.weight", "ngram.weight", [loading.Concatenate(0)]),
    ]


def odd_file() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "qkv.weight": torch.randn(24, 4),
        "qkv.bias": torch.randn(24),
        "old_w13.weight": torch.randn(12, 4),
        "twisted.weight": torch.randn(4, 6),
        "both.weight": torch.randn(7, 3),
        "stood.weight": torch.randn(4, 3),
        "square.weight": torch.randn(4, 4),
        "kept.weight": torch.randn(5, 3),
        "conv.weight": torch.randn(2, 3, 2, 2, 2),
        "body.rows.weight": torch.randn(2, 24),
        **{f"experts.{index}.{one}.weight": torch.randn(3, 4) for index in range(4) for one in "ab"},
        **{f"part_{index}.weight": torch.randn(1, 2) for index in (10, 11, 0, 1, 2, 3)},
        "norm0.weight": torch.randn(2),
        "norm1.weight": torch.randn(2),
    }


@pytest.fixture
def mapping(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    conversion_mapping = importlib.import_module("transformers.conversion_mapping")
    conversion_mapping.get_checkpoint_conversion_mapping("")  # fills the table
    table = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setitem(table, "Odd", made := odd_mapping())
    monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", {"Odd"})
    return made


def test_every_operation_does_what_it_does_in_transformers(mapping: list[Any], tmp_path: Path) -> None:
    Odd, OddConfig = odd_classes()
    save_file(odd_file(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    OddConfig().save_pretrained(tmp_path)
    stock, info = Odd.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(value.count_nonzero() for value in stock.state_dict().values())
    with ms.skeleton():
        model = Odd(OddConfig())
    assert mapping_notes(ms.load(model, tmp_path))
    assert_same(model, stock)
    again = Odd(OddConfig())
    ms.load(again, ms.plan(again, tmp_path))
    assert_same(again, stock)


def test_an_operation_that_is_not_known_is_no_guess(mapping: list[Any], tmp_path: Path) -> None:
    loading = importlib.import_module("transformers.core_model_loading")

    class Doubled(loading.Concatenate):  # type: ignore[misc]
        """Not the class that its name would have it be."""

        def convert(self, *args: Any, **named: Any) -> Any:
            return {name: 2 * value for name, value in super().convert(*args, **named).items()}

    Doubled.__name__ = "Concatenate"
    mapping[-1] = loading.WeightConverter("part_*.weight", "ngram.weight", [Doubled(0)])
    save_file(odd_file(), tmp_path / "model.safetensors")
    Odd, OddConfig = odd_classes()
    model = Odd(OddConfig())
    with pytest.raises(ms.PlanError, match="names of the checkpoint that the model lacks"):
        ms.load(model, tmp_path)
    with pytest.raises(ms.PlanError, match="is not known here"):
        ms.load(model, tmp_path, rules=ms.rules.from_transformers(model))
    assert not any(value.count_nonzero() for value in model.state_dict().values())


def test_a_mapping_that_cannot_be_read_is_said(
    mapping: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_signature() -> None: ...

    conversion_mapping = importlib.import_module("transformers.conversion_mapping")
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", other_signature)
    save_file(odd_file(), tmp_path / "model.safetensors")
    Odd, OddConfig = odd_classes()
    plan = ms.plan(Odd(OddConfig()), tmp_path)
    assert not plan.ok
    assert any("conversion mapping cannot be used" in note for note in plan.notes)
