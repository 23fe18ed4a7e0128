"""What is not marked as a guess is right, and nothing is loaded with a guess."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.errors import ModelStateError, PlanError, RuleError
from tests.suggestion.made_up import MadeUp, made_up
from tests.suggestion.test_suggest import Tree


def checked(made: MadeUp) -> ms.suggestion.Suggestion:
    """Returns the suggestion; what it gives a name of the model that it does not mark as a guess is the truth."""
    found = ms.suggest(made.model, made.state)
    state = {
        name: torch.arange(value.numel(), dtype=torch.float64).reshape(value.shape) + 1000 * at
        for at, (name, value) in enumerate(made.state.items())
    }
    applied = ms.rules.Rules(found.accept_guesses()).apply(state)
    for name, value in made.model.state_dict().items():
        if name in found.guesses or name not in applied or applied[name].shape != value.shape:
            continue
        assert name in made.truth, f"{name} has no source, and gets one\n{found}"
        (source,), is_transposed = made.truth[name]
        whole = state[source].T if is_transposed else state[source]
        parts = [whole] if whole.shape == value.shape else whole.chunk(3)
        assert any(torch.equal(applied[name], part) for part in parts), f"{name} is not of {source}\n{found}"
    assert found.complete is not bool(found.guesses or found.missing or found.unused or found.ambiguous)
    return found


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_a_match_that_is_not_marked_is_right(seed: int) -> None:
    checked(made_up(seed))


def test_wrong_matches_of_made_up_models_are_marked() -> None:
    """Without marks, some of these suggestions are wrong."""
    found = [checked(made_up(seed)) for seed in (*range(60), 9516622)]
    assert any(suggestion.guesses for suggestion in found)
    assert any(suggestion.complete for suggestion in found)


@pytest.fixture
def guessed() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and a checkpoint that share one name; the two others are alike in nothing but their size."""
    model = nn.ModuleDict({"encoder": nn.Linear(4, 4), "mixer": nn.Linear(4, 4, bias=False)})
    state = {
        "encoder.weight": torch.ones(4, 4),
        "encoder.bias": torch.ones(4),
        "router.weight": torch.full((4, 4), 2.0),
    }
    return model, state


def test_a_guess_is_marked_and_never_complete(guessed: tuple[nn.Module, dict[str, torch.Tensor]]) -> None:
    found = ms.suggest(*guessed)
    (rule,) = found.accept_guesses()
    assert rule.rename("router.weight") == "mixer.weight"
    assert list(found) == [ms.rules.Guess(rule)]
    assert found.guesses == ("mixer.weight",)
    assert not found.complete
    assert "ms.rules.Guess(ms.rules.Rename(" in str(found)
    assert "1 guesses" in repr(found)
    data = json.loads(found.to_json())
    assert data["rules"][0]["guess"] is True
    assert data["guesses"] == ["mixer.weight"]
    assert data["complete"] is False


def test_a_load_with_a_guess_is_refused_until_it_is_accepted(
    guessed: tuple[nn.Module, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    model, state = guessed
    found = ms.suggest(model, state)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError) as caught:
        ms.load(model, state, rules=found)
    assert len(caught.value.problems) == 1
    assert "guess" in str(caught.value)
    assert "rules=suggestion.accept_guesses()" in str(caught.value)
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(ModelStateError, match="guesses"):
        ms.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=found)
    with pytest.raises(RuleError, match="guesses"):
        ms.rules.Rules(found).apply(state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ms.load(model, state, rules=found.accept_guesses())
    assert torch.equal(model["mixer"].weight, state["router.weight"])


def test_what_is_printed_is_refused_until_the_guess_is_taken_out(
    guessed: tuple[nn.Module, dict[str, torch.Tensor]],
) -> None:
    model, state = guessed
    code = str(ms.suggest(model, state))
    pasted: dict[str, list[ms.rules.Rule]] = {}
    exec(code, {"ms": ms}, pasted)
    with pytest.raises(PlanError, match="guess"):
        ms.load(model, state, rules=pasted["rules"])
    exec(code.replace("ms.rules.Guess(", "("), {"ms": ms}, pasted)
    ms.load(model, state, rules=pasted["rules"])


def test_the_copies_of_two_prefixes_are_guesses() -> None:
    model = nn.ModuleDict({"net": nn.Linear(3, 3)})
    state = {f"{part}.{name}": value for part in ("online", "average") for name, value in model.state_dict().items()}
    assert not any(rule for rule in ms.suggest(model, state) if not isinstance(rule, ms.rules.Guess))


@pytest.mark.parametrize("names", [("conv2", "conv1"), ("h.1.mixer", "blocks.0.mixer"), ("h.0.norm", "norm")])
def test_another_number_is_a_guess_where_something_lacks_a_match(names: tuple[str, str]) -> None:
    source, target = ({f"{name}.weight": torch.ones(4, 4), "a": torch.ones(3)} for name in names)
    found = checked(MadeUp(Tree(target | {"grown": torch.ones(5)}), source, {"a": (("a",), False)}))
    assert f"{names[1]}.weight" in (*found.guesses, *found.missing)
