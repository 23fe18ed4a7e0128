"""`_metadata`: modules say in it which version of themselves wrote a state dict, and it is easily lost."""

from pathlib import Path
from typing import Any

import pytest
import torch
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
