"""`load(..., background=True)`: what is refused, by the call or by the result."""

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.loading import background
from tests.loading.fingerprint import whole
from tests.loading.handles import SOON, Gate, eventually
from tests.loading.test_load import Tied, made, other

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "model.pt"
    torch.save(other(Tied()), found)
    return found


# A model that is no longer what it was.


def _replaced_by_another_shape(module: Any) -> None:
    module.body[0].bias = nn.Parameter(torch.zeros(9))


def _gone(module: Any) -> None:
    module.body[1] = nn.Identity()


def _another_dtype(module: Any) -> None:
    module.body.double()


def _another_order(module: Any) -> None:
    module.embed.weight.data = module.embed.weight.detach().t().contiguous().t()


def _another_class(module: Any) -> None:
    class Mine(nn.Parameter):
        pass

    module.body[0].bias = Mine(torch.zeros(6))


def _untied(module: Any) -> None:
    module.head.weight = nn.Parameter(torch.zeros(11, 6))


def _emptied(module: Any) -> None:
    module.body[0].to("meta")


CHANGES = [_replaced_by_another_shape, _gone, _another_dtype, _another_order, _another_class, _untied, _emptied]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_is_refused(change: Callable[[Any], None], path: Path) -> None:
    module = made("materialised")
    handle = ms.load(module, path, background=True)
    change(module)
    before = whole(module)
    with pytest.raises(errors.PlanError) as caught:
        handle.result()
    assert "nothing has been changed" in str(caught.value)
    assert "load again" in str(caught.value)
    assert whole(module) == before


def test_a_tensor_that_shrinks_before_its_value_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value is read into memory of the size that it has in the file, which no change of the model makes smaller."""
    ms.save(nn.Linear(2000, 500), tmp_path / "model.safetensors")
    module, has_shrunk, prefetch = nn.Linear(2000, 500), threading.Event(), background.prefetch_range
    monkeypatch.setattr(background, "prefetch_range", lambda *args: has_shrunk.wait(SOON) and prefetch(*args))
    handle = ms.load(module, tmp_path / "model.safetensors", background=True)
    module.weight.data = torch.zeros(1, 1)
    has_shrunk.set()
    with pytest.raises(errors.PlanError):
        handle.result()
    assert torch.equal(module.weight, torch.zeros(1, 1))


def test_a_parameter_that_was_replaced_by_one_like_it_is_loaded(path: Path) -> None:
    module = made("materialised")
    handle = ms.load(module, path, background=True)
    module.body[0].bias = nn.Parameter(torch.zeros(6), requires_grad=False)
    handle.result()
    assert torch.equal(module.body[0].bias, other(Tied())["body.0.bias"])


def test_memory_of_a_mapping_that_the_model_has_come_to_hold() -> None:
    """Each tensor of the mapping becomes the memory of the other parameter: none may be read after it was written."""
    pair = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    kept: dict[str, torch.Tensor] = {}
    for transform in (None, lambda name, _: kept[name]):
        one, two = torch.ones(2, 2), torch.zeros(2, 2)
        kept.update({"0.weight": one, "1.weight": two})
        handle = ms.load(pair, {"0.weight": one, "1.weight": two}, background=True, transform=transform)
        assert eventually(partial(getattr, handle, "done"))
        pair[0].weight.data, pair[1].weight.data = two, one
        handle.result()
        assert torch.equal(pair[0].weight, torch.ones(2, 2))
        assert torch.equal(pair[1].weight, torch.zeros(2, 2))


# Errors.


def test_what_stands_in_the_way_is_raised_by_the_call(path: Path) -> None:
    module = made("materialised")
    before = whole(module)
    for arguments, expected in (
        ({"in_place": True}, errors.OptionError),
        ({"max_memory_bytes": 1}, errors.MemoryBudgetError),
        ({"max_memory_bytes": "much"}, errors.OptionError),
        ({"rules": [ms.rules.Prefix(strip="no.")]}, errors.PlanError),
        ({"dtype": torch.int8}, errors.OptionError),
        ({"key": "nowhere"}, errors.KeyNotFoundError),
        ({"optimizers": [torch.optim.SGD(nn.Linear(2, 2).parameters())]}, errors.OptionError),
    ):
        with pytest.raises(expected):
            ms.load(module, path, background=True, **arguments)
    with pytest.raises(errors.PlanError):
        ms.load(nn.Linear(2, 2), path, background=True)
    with pytest.raises(errors.SourceNotFoundError):
        ms.load(module, path.with_name("other.pt"), background=True)
    assert whole(module) == before


def test_a_file_without_checksums_is_refused_by_the_call(tmp_path: Path) -> None:
    save_file(dict(nn.Linear(2, 2).state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(errors.ChecksumError, match="nothing to verify"):
        ms.load(nn.Linear(2, 2), tmp_path / "model.safetensors", background=True, verify=True)


def test_damage_is_an_error_of_the_result(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(other(Tied())["embed.weight"].numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    module = made("materialised")
    before = whole(module)
    handle = ms.load(module, path, background=True, verify=True)
    with pytest.raises(errors.ChecksumError, match=r"embed\.weight"):
        handle.result()
    assert whole(module) == before


def test_a_transform_that_raises_is_an_error_of_the_result(path: Path) -> None:
    def raising(name: str, tensor: torch.Tensor) -> torch.Tensor:
        raise LookupError("not mine")

    module = made("materialised")
    before = whole(module)
    handle = ms.load(module, path, background=True, transform=raising)
    for _ in range(2):
        with pytest.raises(errors.TransformError, match="not mine"):
            handle.result()
    assert handle.done
    assert not handle.cancel()
    assert "failed" in repr(handle)
    assert whole(module) == before


def test_a_file_that_changes_before_the_result(path: Path) -> None:
    module = made("materialised")
    before = whole(module)
    handle = ms.load(module, path, background=True)
    assert eventually(lambda: handle.done)
    torch.save(other(Tied()), path)
    with pytest.raises(errors.ReadFailedError, match="has changed"):
        handle.result()
    assert whole(module) == before


@pytest.mark.parametrize("target", ["materialised", "skeleton"])
def test_a_file_that_is_cut_while_it_comes_in(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error and no SIGBUS, for a map too."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(1024, 1024)}, path)
    module: Any = nn.Linear(1024, 1024, bias=False)
    if target == "skeleton":
        module.to("meta")
    real = background.StagedLoad.read

    def cut_first(self: Any, progress: Any) -> None:
        os.truncate(path, 8192)
        real(self, progress)

    monkeypatch.setattr(background.StagedLoad, "read", cut_first)
    before = whole(module)
    handle = ms.load(module, path, background=True)
    with pytest.raises(errors.ReadFailedError):
        handle.result()
    assert whole(module) == before


def test_a_plan_is_executed_by_several_results(path: Path) -> None:
    module = made("materialised")
    plan = ms.plan(module, path)
    first, second = (ms.load(module, plan, background=True) for _ in range(2))
    assert first.result().steps == plan.steps
    assert second.result().steps == plan.steps
    plan = ms.plan(module, path, in_place=True)
    with pytest.raises(errors.OptionError, match="in_place"):
        ms.load(module, plan, background=True)


def test_a_plan_for_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    trained = nn.Linear(2, 2)
    torch.save({"model": {"model": trained.state_dict()}, "step": 1}, tmp_path / "model.pt")
    for in_background in (False, True):
        module = nn.Linear(2, 2)
        plan = ms.plan(module, tmp_path / "model.pt", key="model.model")
        loaded: Any = ms.load(module, plan, background=in_background)
        assert (loaded.result() if in_background else loaded).source.endswith("[model.model]")
        assert torch.equal(module.weight, trained.weight)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "1", True, 1j])
def test_a_timeout_that_is_none(timeout: Any, path: Path) -> None:
    with ms.load(made("materialised"), path, background=True) as handle:
        with pytest.raises(errors.OptionError, match="timeout_seconds="):
            handle.result(timeout)
        assert handle.result(SOON).coverage == 1.0


def test_a_timeout_lets_the_load_go_on(path: Path, gate: Gate) -> None:
    module = made("materialised")
    handle = ms.load(module, path, background=True, transform=gate)
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="the load goes on") as caught:
            handle.result(timeout)
        assert isinstance(caught.value, errors.BackgroundTimeoutError)
    gate.opened.set()
    assert handle.result().coverage == 1.0
