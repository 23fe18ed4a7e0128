"""Arguments that are wrong, or in the wrong order, raise an error of modelstate, and nothing is changed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError, SourceTypeError, UnsavableError

MODEL: nn.Module = nn.Linear(2, 2)
STATE = MODEL.state_dict()
OPTIMIZER = torch.optim.SGD(MODEL.parameters())

WRONG: list[tuple[Callable[[ms.Store], object], type[Exception]]] = [
    (lambda _: ms.load("m.pt", MODEL), OptionError),  # type: ignore[call-overload]
    (lambda _: ms.load(MODEL, MODEL), SourceTypeError),  # type: ignore[call-overload]
    (lambda _: ms.plan("m.pt", MODEL), OptionError),  # type: ignore[arg-type]
    (lambda _: ms.suggest("m.pt", MODEL), OptionError),  # type: ignore[arg-type]
    (lambda _: ms.load_state_dict("n.pt", MODEL), TypeError),  # type: ignore[arg-type]
    (lambda _: ms.load_state_dict(MODEL, "m.pt"), TypeError),  # type: ignore[arg-type]
    (lambda _: ms.save("out.safetensors", MODEL), UnsavableError),  # type: ignore[arg-type]
    (lambda _: ms.restore("m.pt", {"model": MODEL}), OptionError),  # type: ignore[arg-type]
    (lambda _: ms.convert(torch.float16, MODEL), OptionError),  # type: ignore[arg-type]
    (lambda _: ms.convert_checkpoint("o.pt", STATE), UnsavableError),  # type: ignore[arg-type]
    (lambda _: ms.optimizer_state(OPTIMIZER, MODEL), OptionError),  # type: ignore[arg-type]
    (lambda _: ms.load_optimizer_state(OPTIMIZER, MODEL, {}), OptionError),  # type: ignore[arg-type]
    (lambda store: store.save({"model": MODEL}, 10), OptionError),  # type: ignore[call-overload]
    (lambda store: store.open(10, "model"), OptionError),  # type: ignore[arg-type]
    (lambda store: store.restore("latest", {"model": MODEL}), OptionError),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "error"), WRONG)
def test_what_is_wrong_is_refused(
    call: Callable[[ms.Store], object], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {name: value.clone() for name, value in STATE.items()}
    with ms.Store(tmp_path / "store") as store, pytest.raises(error):
        call(store)
    assert all(torch.equal(STATE[name], value) for name, value in before.items())
    assert list(tmp_path.iterdir()) == []
