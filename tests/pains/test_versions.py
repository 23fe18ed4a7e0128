"""`_metadata`: modules say in it which version of themselves wrote a state dict, and it is easily lost."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from tests.pains.conftest import StockFails


class Turned(nn.Module):
    """Version 1 kept its weight the other way round, and files of it are turned as they are loaded."""

    _version = 2

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0).view(3, 3) + fill)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].T
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_a_rebuilt_dict_takes_the_wrong_branch(stock_fails: StockFails, tmp_path: Path) -> None:
    saved = nn.Sequential(Turned(10.0))
    torch.save(saved.state_dict(), tmp_path / "saved.pt")
    theirs, ours = nn.Sequential(Turned()), nn.Sequential(Turned())
    rebuilt = {name: value.clone() for name, value in torch.load(tmp_path / "saved.pt").items()}
    theirs.load_state_dict(rebuilt)
    stock_fails(
        "a rebuilt dict is taken for one of the first version", torch.equal(theirs[0].weight, saved[0].weight.T)
    )

    ms.load(ours, tmp_path / "saved.pt")
    assert torch.equal(ours[0].weight, saved[0].weight)


@pytest.mark.parametrize("source", ["a rebuilt dict", "safetensors"])
def test_the_loss_is_noted(source: str, tmp_path: Path) -> None:
    state = {name: value.detach().clone() for name, value in nn.Sequential(Turned(10.0)).state_dict().items()}
    save_file(state, tmp_path / "state.safetensors")
    plan = ms.plan(nn.Sequential(Turned()), state if source == "a rebuilt dict" else tmp_path / "state.safetensors")
    assert any("version" in note and "Turned" in note for note in plan.notes)


def test_no_loss_no_note(tmp_path: Path) -> None:
    torch.save(nn.Sequential(Turned(10.0)).state_dict(), tmp_path / "saved.pt")
    assert not ms.plan(nn.Sequential(Turned()), tmp_path / "saved.pt").notes
    # Where no module looks at its version, nothing has been lost.
    assert not ms.plan(nn.Linear(2, 2), dict(nn.Linear(2, 2).state_dict())).notes


def test_versions_travel_from_within_a_training_checkpoint(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Sequential(Turned(10.0)))
    torch.save({"step": 3, "model": saved.state_dict()}, tmp_path / "training.pt")
    assert ms.open(tmp_path / "training.pt", key="model").versions == saved.state_dict()._metadata
    for target, key in ((saved, None), (nn.Sequential(nn.Sequential(Turned())), "model")):
        ms.load(target, tmp_path / "training.pt", key=key)
        assert torch.equal(target[0][0].weight, Turned(10.0).weight)


def test_versions_travel_with_a_part_of_a_state_dict(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"module": nn.Sequential(Turned(10.0))})
    torch.save(saved.state_dict(), tmp_path / "part.pt")
    ours = nn.Sequential(Turned())
    ms.load(ours, tmp_path / "part.pt", key="module")
    assert torch.equal(ours[0].weight, saved["module"][0].weight)


def test_batch_norm_of_the_first_version(stock_fails: StockFails, tmp_path: Path) -> None:
    """Files from before `num_batches_tracked` are recognised by their version, and not by what they lack."""

    def lacking() -> Any:
        state = nn.BatchNorm1d(3).state_dict()
        del state["num_batches_tracked"]
        return state

    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        nn.BatchNorm1d(3).load_state_dict(lacking())
    theirs = nn.BatchNorm1d(3)
    theirs.num_batches_tracked.fill_(99)
    result = theirs.load_state_dict(dict(lacking()))
    stock_fails(
        "a rebuilt dict hides that a buffer is missing",
        not result.missing_keys and theirs.num_batches_tracked.item() == 99,
    )

    torch.save(lacking(), tmp_path / "damaged.pt")
    for source in (lacking(), tmp_path / "damaged.pt"):
        with pytest.raises(ms.PlanError) as caught:
            ms.load(nn.BatchNorm1d(3), source)
        assert [p.name for p in caught.value.problems] == ["num_batches_tracked"]

    old = lacking()
    old._metadata[""]["version"] = 1
    torch.save(old, tmp_path / "old.pt")
    for source in (old, tmp_path / "old.pt", dict(lacking())):
        report = ms.load(nn.BatchNorm1d(3), source)
        assert any("num_batches_tracked" in note for note in report.notes)


def test_metadata_is_not_written_to(stock_fails: StockFails) -> None:
    """The state dict of one load decides about the next."""
    theirs, ours = nn.Linear(2, 2).state_dict(), nn.Linear(2, 2).state_dict()
    nn.Linear(2, 2).load_state_dict(theirs, assign=True)
    stock_fails("assign=True is remembered in the state dict", "assign_to_params_buffers" in theirs._metadata[""])

    ms.load_state_dict(nn.Linear(2, 2), ours, assign=True)
    ms.load(nn.Linear(2, 2), ours)
    assert ours._metadata == nn.Linear(2, 2).state_dict()._metadata


def test_hooks_see_strict(stock_fails: StockFails) -> None:
    """What a hook sees is true here, where there is no other way to load."""
    seen: list[bool] = []

    def hook(module: nn.Module, state: Any, prefix: str, metadata: Any, strict: bool, *lists: list[str]) -> None:
        seen.append(strict)

    model = nn.Linear(2, 2)
    model.register_load_state_dict_pre_hook(hook)
    model.load_state_dict(model.state_dict(), strict=False)
    stock_fails("a pre-hook sees strict=True under strict=False", seen.pop() is True)
    ms.load(model, nn.Linear(2, 2).state_dict())
    assert seen == [True]
