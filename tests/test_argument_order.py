"""Swapped arguments are answered with the right call."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError

MODEL = nn.Linear(2, 2)
STATE = MODEL.state_dict()
OPTIMIZER = torch.optim.SGD(MODEL.parameters())

SWAPPED: dict[str, Callable[[ms.Store], object]] = {
    "ms.load(model, 'm.pt')": lambda _: ms.load("m.pt", MODEL),  # type: ignore[call-overload]
    "ms.load(model, 'dir/m.pt')": lambda _: ms.load(Path("dir/m.pt"), MODEL, strict=False),  # type: ignore[call-overload]
    "ms.load(model, source)": lambda _: ms.load(STATE, MODEL),  # type: ignore[call-overload]
    "ms.plan(model, 'm.pt')": lambda _: ms.plan("m.pt", MODEL),  # type: ignore[arg-type]
    "ms.plan(model, source)": lambda _: ms.plan(ms.open(STATE), MODEL),  # type: ignore[arg-type]
    "ms.suggest(model, 'm.pt')": lambda _: ms.suggest("m.pt", MODEL),  # type: ignore[arg-type]
    "ms.load(model, 'n.pt')": lambda _: ms.load_state_dict("n.pt", MODEL),  # type: ignore[arg-type]
    "ms.load_state_dict(model, state_dict)": lambda _: ms.load_state_dict(STATE, MODEL),  # type: ignore[arg-type]
    "ms.save(state, 'out.safetensors')": lambda _: ms.save("out.safetensors", MODEL),  # type: ignore[arg-type]
    "ms.save(state, 'out.pt')": lambda _: ms.save("out.pt", STATE),  # type: ignore[arg-type]
    "ms.restore(objects, 'm.pt')": lambda _: ms.restore("m.pt", {"model": MODEL}),  # type: ignore[arg-type]
    "ms.restore(objects, source)": lambda _: ms.restore(ms.open(STATE), {"model": MODEL}),
    "ms.convert(model, torch.float16)": lambda _: ms.convert(torch.float16, MODEL),  # type: ignore[arg-type]
    "ms.convert_checkpoint(source, 'o.pt')": lambda _: ms.convert_checkpoint("o.pt", STATE),  # type: ignore[arg-type]
    "ms.optimizer_state(model, optimizer)": lambda _: ms.optimizer_state(OPTIMIZER, MODEL),  # type: ignore[arg-type]
    "ms.load_optimizer_state(model, optimizer)": lambda _: ms.load_optimizer_state(OPTIMIZER, MODEL, {}),  # type: ignore[arg-type]
    "store.save(10, objects)": lambda store: store.save({"model": MODEL}, 10),  # type: ignore[call-overload]
    "store.open('model', 10)": lambda store: store.open(10, "model"),  # type: ignore[arg-type]
    "ms.resumable('runs', objects)": lambda _: ms.resumable({"model": MODEL}, "runs", steps=1, save_every=1),  # type: ignore[arg-type]
    "store.restore(objects, 'latest')": lambda store: store.restore("latest", {"model": MODEL}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("right", SWAPPED)
def test_the_error_shows_the_right_call(right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = {name: value.clone() for name, value in STATE.items()}
    with ms.Store(tmp_path / "store") as store:
        with pytest.raises(OptionError, match="in the wrong order") as caught:
            SWAPPED[right](store)
        assert caught.value.remedy == right
        assert caught.value.expected != caught.value.found
        assert store.steps() == ()
    assert all(torch.equal(STATE[name], value) for name, value in before.items())
    assert list(tmp_path.iterdir()) == []


def test_other_wrong_arguments_keep_their_errors(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="not a model"):
        ms.load("m.pt", "model")  # type: ignore[call-overload]
    with pytest.raises(ms.errors.SourceTypeError):
        ms.load(MODEL, MODEL)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="dict-like"):
        ms.load_state_dict(MODEL, "m.pt")  # type: ignore[arg-type]
