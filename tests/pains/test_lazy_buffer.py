"""A buffer that is set while the model runs: torch has no way to declare one whose shape is not known before."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails


class Undeclared(nn.Module):
    """Registers the buffer when it has a value, as a first forward pass does."""

    def __init__(self, p: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        if p is not None:
            self.register_buffer("p", p)


class DeclaredFirst(Undeclared):
    """Sets the attribute to None before, so that it can be asked for."""

    def __init__(self, p: torch.Tensor | None = None) -> None:
        super().__init__()
        self.p = None
        if p is not None:
            self.register_buffer("p", p)


class RegisteredAsNone(Undeclared):
    """Registers None, and assigns later."""

    def __init__(self, p: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("p", None)
        self.p = p


class Dummy(Undeclared):
    """Registers a tensor of a shape that may turn out to be another."""

    def __init__(self, p: torch.Tensor | None = None) -> None:
        super().__init__(torch.zeros(1) if p is None else p)


class InExtraState(Undeclared):
    """Keeps it as extra state, under a name that other tools do not know, and old files do not have."""

    def __init__(self, p: torch.Tensor | None = None) -> None:
        super().__init__()
        self.p = p

    def get_extra_state(self) -> dict[str, torch.Tensor | None]:
        return {"p": self.p}

    def set_extra_state(self, state: dict[str, torch.Tensor | None]) -> None:
        self.p = state["p"]


class Lazy(Undeclared):
    """Ours: None until it is assigned."""

    def __init__(self, p: torch.Tensor | None = None) -> None:
        super().__init__()
        ms.register_lazy_buffer(self, "p")
        self.p = p


VALUE = torch.tensor([1.0, 2, 3])


def fails(load: Callable[[], object], text: str) -> bool:
    """Whether it raises an error with this text."""
    try:
        load()
    except (RuntimeError, KeyError) as error:
        return text in str(error)
    return False


def test_none_of_torchs_ways_loads_it(stock_fails: StockFails) -> None:
    for build in (Undeclared, RegisteredAsNone):
        refused = fails(
            partial(build().load_state_dict, build(VALUE).state_dict()), 'Unexpected key(s) in state_dict: "p"'
        )
        stock_fails(f"{build.__name__}: unexpected in a fresh model", refused)
    stock_fails(
        "None stands in the way of registering", fails(lambda: DeclaredFirst(VALUE), "attribute 'p' already exists")
    )
    state = Dummy(VALUE).state_dict()
    stock_fails("a dummy has the wrong shape", fails(lambda: Dummy().load_state_dict(state), "size mismatch for p"))
    # Once it is set, the way back is closed as well: a checkpoint from before it was set no longer loads.
    old = RegisteredAsNone().state_dict()
    stock_fails(
        "a checkpoint from before it was set lacks it",
        fails(lambda: RegisteredAsNone(VALUE).load_state_dict(old), 'Missing key(s) in state_dict: "p"'),
    )


def test_extra_state_hides_it(stock_fails: StockFails, tmp_path: Path) -> None:
    state = InExtraState(VALUE).state_dict()
    stock_fails("it is no tensor of the state dict", "p" not in state)
    stock_fails("it does not move with the model", InExtraState(VALUE).to("meta").p.device.type == "cpu")
    old = Undeclared().state_dict()
    text = 'Missing key(s) in state_dict: "_extra_state"'
    stock_fails(
        "files from before it was kept no longer load", fails(lambda: InExtraState().load_state_dict(old), text)
    )
    stock_fails("safetensors cannot keep it", fails_to_save(state, tmp_path / "extra.safetensors"))


def fails_to_save(state: dict[str, torch.Tensor], path: Path) -> bool:
    try:
        save_file(state, path)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("load", [lambda m, s: m.load_state_dict(s), ms.load], ids=["load_state_dict", "load"])
def test_ours_loads_into_any_from_any(load: Callable[[nn.Module, object], object], tmp_path: Path) -> None:
    for value in (None, VALUE, torch.ones(2, 2)):
        for there in (None, torch.zeros(3), torch.zeros(7)):
            target = Lazy(there)
            load(target, Lazy(value).state_dict())
            assert (target.p is None) if value is None else torch.equal(target.p, value)
    target = Lazy(VALUE)
    load(target, Undeclared().state_dict())  # from before the model had it
    assert target.p is None

    save_file(Lazy(VALUE).state_dict(), tmp_path / "state.safetensors")
    assert torch.equal(ms.open(tmp_path / "state.safetensors").tensor("p"), VALUE)
    assert Lazy(VALUE).to("meta").p.is_meta


def test_ours_leaves_no_hole() -> None:
    state = Lazy(VALUE).state_dict()
    del state["p"]
    for load in (ms.load, ms.load_state_dict, nn.Module.load_state_dict):
        with pytest.raises(RuntimeError, match="p"):
            load(Lazy(), state)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="weight"):
        ms.load(Lazy(), {"p": VALUE})
