"""What a checkpoint lacks gets first values from the model's own initialisation, or the error says how it can."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import ModelCodeError, OptionError, PlanError
from tests.loading.fingerprint import whole
from tests.loading.loads import built


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)


def without(model: nn.Module, *beginnings: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if not name.startswith(beginnings)}


HOWS = pytest.mark.parametrize("how", ["skeleton", "meta", "real"])


@HOWS
def test_a_new_head_is_initialised_as_the_constructor_does(how: str, tmp_path: Path) -> None:
    trained, model = Classifier(), built(Classifier, how)
    torch.save(without(trained, "head."), tmp_path / "x.pt")
    head = model.head.weight
    torch.manual_seed(3)
    report = ms.load(model, tmp_path / "x.pt", init_missing=True)
    torch.manual_seed(3)
    expected = nn.Linear(4, 3)
    assert model.head.weight is head
    assert torch.equal(model.head.weight, expected.weight)
    assert torch.equal(model.head.bias, expected.bias)
    assert torch.equal(model.body.weight, trained.body.weight)
    assert report.coverage == 1
    steps = {step.name: step for step in report.steps}
    assert (steps["head.bias"].source, steps["head.bias"].rules) == ("", ("Linear.reset_parameters",))
    assert steps["body.bias"].rules == ()
    assert "2 initialised by Linear.reset_parameters: head.bias, head.weight" in report.notes


@HOWS
def test_what_a_plan_says_is_what_a_load_does(how: str) -> None:
    model, source = built(Classifier, how), without(Classifier(), "head.", "norm.running")
    before = whole(model) if how == "real" else None
    state = torch.get_rng_state()
    plan = ms.plan(model, source, init_missing=True)
    assert torch.equal(state, torch.get_rng_state())
    assert plan.ok, str(plan)
    assert before is None or whole(model) == before
    report = ms.load(model, plan)
    assert report.steps == plan.steps
    assert model.norm.running_var.tolist() == [1, 1, 1, 1]
    assert {step.rules for step in plan.steps if step.name.startswith("norm.running")} == {
        ("BatchNorm1d.reset_parameters",)
    }


@HOWS
def test_a_module_keeps_what_the_file_has_of_it(how: str) -> None:
    model, source = built(Classifier, how), without(Classifier(), "head.bias")
    ms.load(model, source, init_missing=True)
    assert torch.equal(model.head.weight, source["head.weight"])
    assert 0 < model.head.bias.abs().max() <= 0.5


def test_on_a_model_with_values_allowed_names_keep_them() -> None:
    model = Classifier()
    kept = model.head.weight.detach().clone(), model.head.bias.detach().clone()
    report = ms.load(model, without(Classifier(), "head."), allow_missing=["head.bias"], init_missing=True)
    assert not torch.equal(model.head.weight, kept[0])
    assert torch.equal(model.head.bias, kept[1])
    assert [step.name for step in report.steps if step.rules] == ["head.weight"]


def test_allowed_names_without_values_are_initialised() -> None:
    with ms.skeleton():
        model = Classifier()
    ms.load(model, without(Classifier(), "head."), allow_missing=["head.*"], init_missing=True)
    assert not model.head.weight.is_meta
    assert model.head.weight.abs().max() <= 0.5


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out = nn.Linear(4, 4)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("there", ["embed.weight", "head.weight", ""])
def test_tied_weights(there: str) -> None:
    with ms.skeleton():
        model = Tied()
    source = without(Tied(), *({"embed.", "head."} - {there.removesuffix("weight")}))
    ms.load(model, source, init_missing=True)
    assert model.head.weight is model.embed.weight
    if there:
        assert torch.equal(model.embed.weight, source[there])
    else:
        assert model.embed.weight.abs().max() > 0.5  # of an embedding, and not of a linear layer


class Pretrained(nn.Module):
    """As the models of Hugging Face do it."""

    def __init__(self) -> None:
        super().__init__()
        self.std = 0.02
        self.block = nn.ModuleDict({"proj": nn.Linear(64, 64), "attn": nn.MultiheadAttention(8, 2)})
        self.scale = nn.Parameter(torch.ones(3))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, self.std)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, Pretrained):
            module.scale.data.fill_(7.0)
            for name, param in module.named_parameters():
                if name.endswith("attn.out_proj.weight"):
                    param.data.normal_(5.0, 0.001)


@HOWS
def test_init_weights_of_the_model(how: str) -> None:
    model, source = built(Pretrained, how), without(Pretrained(), "block.proj", "scale", "block.attn")
    report = ms.load(model, source | {"block.attn.in_proj_bias": torch.ones(24)}, init_missing=True)
    assert model.block.proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.block.proj.bias.any()
    assert model.scale.tolist() == [7, 7, 7]
    assert model.block.attn.in_proj_weight.std() > 0.1
    assert model.block.attn.in_proj_bias.eq(1).all()
    assert model.block.attn.out_proj.weight.mean().item() == pytest.approx(5, abs=0.1)
    how_of = {step.name: step.rules for step in report.steps}
    assert how_of["block.proj.weight"] == ("Linear.reset_parameters, Pretrained._init_weights",)


@pytest.mark.slow
def test_a_model_of_hugging_face() -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    trained, base = transformers.LlamaForSequenceClassification(config), transformers.LlamaModel(config)
    with torch.device("meta"):
        model = transformers.LlamaForSequenceClassification(config)
    with pytest.raises(PlanError, match="init_missing=True"):
        ms.load(model, base.state_dict(), rules=[ms.rules.Prefix(add="model.")])
    report = ms.load(model, base.state_dict(), rules=[ms.rules.Prefix(add="model.")], init_missing=True)
    assert model.score.weight.std().item() == pytest.approx(0.02, rel=0.3)
    new = {step.name for step in report.steps if not step.source}
    assert new == {"score.weight", *(name for name, _ in trained.named_buffers())}
    ids = torch.arange(6)[None]
    model.config.pad_token_id = 0
    trained.load_state_dict(model.state_dict())
    trained.config.pad_token_id = 0
    assert torch.equal(trained.eval()(ids).logits, model.eval()(ids).logits)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((2,), 5.0))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


@HOWS
def test_what_nothing_initialises_is_a_problem_that_names_fill(how: str) -> None:
    """`reset_parameters` is there, and leaves this one alone: no uninitialised memory is taken for values."""
    model = nn.Sequential(built(Scaled, how), nn.Linear(2, 2))
    before = whole(model) if how == "real" else None
    source = without(nn.Sequential(Scaled(), nn.Linear(2, 2)), "0.")
    with pytest.raises(
        PlanError,
        match=r"no method of the model initialises 0\.scale .*: rules=\[ms\.rules\.Fill\('0\.scale', value\)\]",
    ) as caught:
        ms.load(model, source, init_missing=True)
    assert [problem.name for problem in caught.value.problems] == ["0.scale"]
    assert ("allow_missing=[" in str(caught.value)) == (how == "real")
    assert before is None or whole(model) == before
    with pytest.raises(PlanError, match="no reset_parameters or _init_weights"):
        ms.load(model, source, rules=[ms.rules.Fill("0.*")])
    ms.load(model, source, rules=[ms.rules.Fill("0.scale", 2.0)], init_missing=True)
    assert model[0].scale.tolist() == [2, 2]
    assert model[0].weight.tolist() == [1, 1, 1]


def test_a_method_that_makes_no_value_changes_nothing() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.a[:2].fill_(1)
                self.a[:2].fill_(1)  # as many elements as there are, and not all of them

    model = Half()
    before = whole(model)
    for options in ({"init_missing": True}, {"rules": [ms.rules.Fill("a")]}):
        with pytest.raises(ModelCodeError, match=r"a: the model's own initialisation .*(.|\n)*Fill\('a', value\)"):
            ms.load(model, {"b": torch.zeros(2)}, **options)  # type: ignore[arg-type]
        assert whole(model) == before


def test_a_method_that_raises_is_no_initialiser() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if hasattr(self, "ready"):
                raise RuntimeError("only once")

    model = Broken(2, 2)
    model.ready = True
    before = whole(model)
    with pytest.raises(PlanError, match="no method of the model initialises weight"):
        ms.load(model, {"bias": torch.zeros(2)}, init_missing=True)
    assert whole(model) == before


def test_other_names_are_still_found_out() -> None:
    """A checkpoint that fits under other names is not taken for one that lacks everything."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    before = whole(model)
    with pytest.raises(PlanError, match=r"net\.x\."):
        ms.load(model, {f"net.x.{name}": value for name, value in model.state_dict().items()}, init_missing=True)
    with pytest.raises(PlanError, match="no tensor"):
        ms.load(model, {}, init_missing=True)
    assert whole(model) == before


def test_in_the_background_and_with_dtype() -> None:
    with ms.skeleton():
        model = Classifier()
    handle = ms.load(
        model, without(Classifier(), "head."), init_missing=True, dtype=torch.bfloat16, background=True, map=False
    )
    torch.manual_seed(5)
    handle.result()
    torch.manual_seed(5)
    assert torch.equal(model.head.weight, nn.Linear(4, 3).weight.bfloat16())


@pytest.mark.parametrize("given", [["head.*"], 1, None])
def test_an_option_that_is_none(given: Any) -> None:
    with pytest.raises(OptionError, match="init_missing"):
        ms.plan(Classifier(), {}, init_missing=given)
