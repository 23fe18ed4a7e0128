"""Files of the old `weight_norm`, which the parametrization of that name reads, and what else they need."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

import modelstate as ms
from tests.loading.fingerprint import whole
from tests.pains.conftest import StockFails

BACK = ms.rules.known.weight_norm().reverse()
SPECTRAL = ms.rules.known.spectral_norm()
X = torch.eye(3)


@pytest.fixture(autouse=True)
def _deprecations() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def old(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(old_weight_norm(nn.Linear(3, 4)))


def new(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)))


def skeleton(seed: int) -> nn.Module:
    with ms.skeleton():
        return new(seed)


def on_meta(seed: int) -> nn.Module:
    with torch.device("meta"):
        return new(seed)


@pytest.mark.parametrize("make", [new, skeleton, on_meta])
def test_old_files_load_into_the_parametrization(make: type, tmp_path: Path) -> None:
    saved = old(1)
    torch.save(saved.state_dict(), tmp_path / "old.pt")
    theirs, ours = new(2), make(2)
    theirs.load_state_dict(torch.load(tmp_path / "old.pt"))
    report = ms.load(ours, tmp_path / "old.pt")
    assert torch.equal(ours(X), theirs(X))
    assert torch.equal(ours(X), saved(X))
    # The report says where a value came from, though it went there under another name.
    sources = {step.name: step.source for step in report.steps}
    assert sources["0.parametrizations.weight.original0"] == "0.weight_g"
    assert sources["0.parametrizations.weight.original1"] == "0.weight_v"


def test_new_files_into_the_old_module(stock_fails: StockFails) -> None:
    saved, ours = new(1), old(2)
    refused = False
    try:
        old(2).load_state_dict(saved.state_dict())
    except RuntimeError:
        refused = True
    stock_fails("files of the parametrization do not load into the old module", refused)

    before = whole(ours)
    with pytest.raises(ms.PlanError, match="weight_g"):
        ms.load(ours, saved.state_dict())
    assert whole(ours) == before
    ms.load(ours, saved.state_dict(), rules=BACK)
    assert torch.equal(ours(X), saved(X))


def test_spectral_norm(stock_fails: StockFails) -> None:
    torch.manual_seed(1)
    saved = nn.Sequential(old_spectral_norm(nn.Linear(3, 4))).eval()
    ours = nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4))).eval()
    refused = False
    try:
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4))).load_state_dict(saved.state_dict())
    except RuntimeError:
        refused = True
    stock_fails("old files of spectral_norm do not load into the parametrization", refused)

    before = whole(ours)
    with pytest.raises(ms.PlanError, match="weight_orig"):
        ms.load(ours, saved.state_dict())
    assert whole(ours) == before
    ms.load(ours, saved.state_dict(), rules=SPECTRAL)
    torch.testing.assert_close(ours(X), saved(X))
