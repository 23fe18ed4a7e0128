"""`load(..., background=True)`: the same result as without it, and a model that is left alone until then."""

import gc
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig

import modelstate as ms
from modelstate import errors
from modelstate.place import staged as staged_module
from modelstate.plan.rules.values import Fill
from tests.place.fingerprint import interrupted_at, whole
from tests.place.test_load import Tied, made, other

SOON = 30.0
"""Seconds in which everything here ends that does not hang."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "model.pt"
    torch.save(other(Tied()), found)
    return found


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert ended()


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("modelstate-load")]


def ended() -> bool:
    """Whether no thread of a load is left, after a while."""
    return eventually(lambda: not threads())


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + SOON
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


class Gate:
    """A transform that stops at its first tensor until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.names: list[str] = []
        self.threads: set[str] = set()

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.names.append(name)
        self.threads.add(threading.current_thread().name)
        self.reached.set()
        assert self.opened.wait(SOON)
        return tensor


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.opened.set()


# The same as a load.


def doubled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "own memory": {"map": False},
    "cast": {"dtype": torch.bfloat16},
    "transform": {"transform": doubled},
    "transform of some": {"transform": {"embed.*": doubled}},
    "quantized": {"transform": {"*.0.weight": ms.Quantize(Int8WeightOnlyConfig(set_inductor_config=False))}},
    "verified": {"verify": True},
}


FORMS = ["torch", "legacy", "safetensors", "mapping"]
CASES = [(way, form) for way in WAYS for form in FORMS if form == "torch" or way != "verified"]


@pytest.mark.parametrize("target", ["materialised", "skeleton", "mixed"])
@pytest.mark.parametrize(("way", "form"), CASES)
def test_the_result_is_that_of_a_load(way: str, target: str, form: str, tmp_path: Path) -> None:
    source: Any = tmp_path / "checkpoint"
    if form == "mapping":
        source = other(Tied())
    elif form == "safetensors":
        save_file({name: value.clone() for name, value in other(Tied()).items()}, source)
    else:
        torch.save(other(Tied()), source, _use_new_zipfile_serialization=form == "torch")
    torch.manual_seed(0)
    expected, module = made(target), made(target)
    state = module.state_dict(keep_vars=True)
    there = ms.load(expected, source, **WAYS[way])
    report = ms.load(module, source, background=True, **WAYS[way]).result()

    after = module.state_dict(keep_vars=True)
    assert list(after) == list(expected.state_dict())
    for name, tensor in expected.state_dict(keep_vars=True).items():
        assert after[name] is state[name]
        assert type(after[name]) is type(tensor)
        assert (after[name].dtype, after[name].requires_grad) == (tensor.dtype, tensor.requires_grad)
        assert after[name].stride() == tensor.stride()
        assert torch.equal(_plain(after[name]), _plain(tensor))
    assert report.steps == there.steps
    assert report.notes == there.notes
    assert (report.slots, report.verified_bytes, report.references_lost) == (7, there.verified_bytes, ())
    assert report.peak_memory_bytes == there.peak_memory_bytes
    assert module.head.weight is module.embed.weight


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    convert = getattr(tensor, "dequantize", None)
    return convert() if convert is not None and type(tensor) not in (torch.Tensor, nn.Parameter) else tensor


def test_what_was_brought_in_is_what_is_put_in_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read again in `result`, but for what costs nothing."""
    from modelstate.place import load as load_module

    module, again = made("materialised"), []
    handle = ms.load(module, path, background=True)
    assert eventually(handle.done)
    real = load_module.stage

    def spied(preparation: Any, progress: Any) -> None:
        again.extend(made.name for made in preparation.assignments if made.final is None)
        real(preparation, progress)

    monkeypatch.setattr(load_module, "stage", spied)
    assert len(handle.result().loaded) == 7
    assert again == []


def test_maps_are_in_memory_when_they_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2048, 2048)}, path)
    with ms.skeleton():
        module = nn.Linear(2048, 2048, bias=False)
    ms.load(module, path)
    assert shown_bytes(path) < 1 << 20
    with ms.skeleton():
        module = nn.Linear(2048, 2048, bias=False)
    handle = ms.load(module, path, background=True)
    assert eventually(handle.done)
    assert shown_bytes(path) >= module.weight.nbytes
    handle.result()
    assert shown_bytes(path) >= module.weight.nbytes
    assert torch.equal(module.weight, torch.ones(2048, 2048))


def shown_bytes(path: Path) -> int:
    """How much of the maps of a file is in the memory of this process."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counts = line.endswith(str(path))
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_seconds_are_those_from_the_call_to_the_result(path: Path) -> None:
    started = time.perf_counter()
    handle = ms.load(made("materialised"), path, background=True)
    time.sleep(0.2)
    report = handle.result()
    assert 0.2 < report.seconds < time.perf_counter() - started


# The model until then.


def test_the_model_is_left_alone_until_the_result(path: Path, gate: Gate) -> None:
    module = made("materialised")
    before = whole(module)
    handle = ms.load(module, path, background=True, transform=gate)
    assert whole(module) == before
    assert gate.reached.wait(SOON)
    assert not handle.done()
    assert "coming in" in repr(handle)
    gate.opened.set()
    assert eventually(handle.done)
    assert "ready" in repr(handle)
    assert whole(module) == before
    handle.result()
    assert "loaded" in repr(handle)
    assert torch.equal(module.embed.weight, other(Tied())["embed.weight"])


def test_a_transform_is_called_once_for_each_in_the_order_of_the_file(path: Path, gate: Gate) -> None:
    gate.opened.set()
    ms.load(made("materialised"), path, background=True, transform=gate).result()
    assert gate.names == [name for name in other(Tied()) if name not in ("head.weight", "body.same")]
    assert gate.threads == {"modelstate-load"}


def test_the_model_may_be_trained_meanwhile(path: Path, gate: Gate) -> None:
    module = made("materialised")
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad])
    handle = ms.load(module, path, background=True, transform=gate, optimizers=[optimizer])
    assert gate.reached.wait(SOON)
    module(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    gate.opened.set()
    handle.result()
    assert torch.equal(module.embed.weight, other(Tied())["embed.weight"])
    assert module.embed.weight in optimizer.state


def test_optimizers_follow_as_they_are_at_the_result(path: Path) -> None:
    module = made("materialised")
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad])
    handle = ms.load(module, path, background=True, dtype=torch.float64, optimizers=[optimizer])
    module(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    handle.result()
    state = optimizer.state[module.embed.weight]
    assert state["exp_avg"].dtype is torch.float64
    assert state["exp_avg"].abs().sum() > 0


def test_a_tensor_that_gets_no_value_keeps_what_it_has_become(path: Path) -> None:
    module = made("materialised")
    handle = ms.load(module, path, background=True, device="cpu")
    module.position.add_(5)
    handle.result()
    assert module.position.tolist() == [5, 6, 7, 8, 9, 10]


# The model's own code.


class Watched(nn.Module):
    """Counts what its loading code is called for, looks at a value, and draws a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls: list[Any] = []
        self.register_load_state_dict_post_hook(Watched.hook)

    @staticmethod
    def hook(module: Any, _: Any) -> None:
        torch.rand(1)
        with torch.no_grad():
            module.layer.weight.mul_(2)

    def get_extra_state(self) -> Any:
        return {"n": 1}

    def set_extra_state(self, state: Any) -> None:
        self.calls.append(state)
        EVER.append(state)


EVER: list[Any] = []


def test_the_models_code_counts_once(tmp_path: Path) -> None:
    source = Watched()
    torch.save(source.state_dict(), tmp_path / "model.pt")
    module, before = Watched(), None
    EVER.clear()
    before = whole(module)
    torch.manual_seed(1)
    handle = ms.load(module, tmp_path / "model.pt", background=True)
    assert whole(module) == before
    assert EVER == []
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert eventually(handle.done)
    assert torch.equal(torch.rand(1), expected)
    report = handle.result()
    assert EVER == module.calls == [{"n": 1}]
    assert torch.equal(module.layer.weight, source.layer.weight * 2)
    assert torch.equal(module.layer.bias, source.layer.bias)
    assert report.coverage == 1.0


def test_the_call_draws_no_random_numbers(tmp_path: Path) -> None:
    torch.save(Watched().state_dict(), tmp_path / "model.pt")
    module = Watched()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    handle = ms.load(module, tmp_path / "model.pt", background=True)
    assert torch.equal(torch.get_rng_state(), before)
    handle.cancel()


def test_set_extra_state_that_raises_is_an_error_of_the_result(tmp_path: Path) -> None:
    class Refusing(Watched):
        def set_extra_state(self, state: Any) -> None:
            raise LookupError("not this")

    torch.save(Watched().state_dict(), tmp_path / "model.pt")
    module = Refusing()
    before = whole(module)
    handle = ms.load(module, tmp_path / "model.pt", background=True)
    with pytest.raises(errors.ModelCodeError, match="not this") as first:
        handle.result()
    assert whole(module) == before
    with pytest.raises(errors.ModelCodeError) as second:
        handle.result()
    assert second.value is first.value


def test_a_lazy_module_gets_its_shapes(tmp_path: Path) -> None:
    torch.save(nn.Linear(5, 3).state_dict(), tmp_path / "model.pt")
    expected, module = nn.LazyLinear(3), nn.LazyLinear(3)
    ms.load(expected, tmp_path / "model.pt")
    handle = ms.load(module, tmp_path / "model.pt", background=True)
    assert torch.nn.parameter.is_lazy(module.weight)
    handle.result()
    assert torch.equal(module.weight, expected.weight)


def test_an_initialiser_draws_its_numbers_at_the_result(tmp_path: Path) -> None:
    state = nn.Linear(3, 3).state_dict()
    del state["weight"]
    torch.save(state, tmp_path / "model.pt")
    module = nn.Linear(3, 3)
    handle = ms.load(module, tmp_path / "model.pt", background=True, rules=[Fill("weight")])
    assert eventually(handle.done)
    torch.manual_seed(3)
    handle.result()
    torch.manual_seed(3)
    assert torch.equal(module.weight, nn.Linear(3, 3).weight)


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
    expected = errors.PlanError if change in (_replaced_by_another_shape, _gone) else errors.StalePlanError
    with pytest.raises(expected) as caught:
        handle.result()
    assert "nothing has been changed" in str(caught.value)
    if expected is errors.StalePlanError:
        assert "load again" in str(caught.value)
    assert whole(module) == before


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
        assert eventually(handle.done)
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
        ({"rules": [ms.Prefix(strip="no.")]}, errors.PlanError),
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
    assert handle.done()
    assert not handle.cancel()
    assert "failed" in repr(handle)
    assert whole(module) == before


def test_a_file_that_changes_before_the_result(path: Path) -> None:
    module = made("materialised")
    before = whole(module)
    handle = ms.load(module, path, background=True)
    assert eventually(handle.done)
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
    real = staged_module.Staged.bring_in

    def cut_first(self: Any, progress: Any) -> None:
        os.truncate(path, 8192)
        real(self, progress)

    monkeypatch.setattr(staged_module.Staged, "bring_in", cut_first)
    before = whole(module)
    handle = ms.load(module, path, background=True)
    with pytest.raises(errors.ReadFailedError):
        handle.result()
    assert whole(module) == before


def test_a_plan_is_carried_out_by_one_result(path: Path) -> None:
    module = made("materialised")
    plan = ms.plan(module, path)
    first, second = (ms.load(module, plan, background=True) for _ in range(2))
    assert first.result().steps == plan.steps
    with pytest.raises(errors.StalePlanError, match="has been carried out"):
        second.result()
    with pytest.raises(errors.StalePlanError, match="has been carried out"):
        ms.load(module, plan, background=True)
    plan = ms.plan(module, path, in_place=True)
    with pytest.raises(errors.OptionError, match="in_place"):
        ms.load(module, plan, background=True)


def test_a_plan_for_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    trained = nn.Linear(2, 2)
    torch.save({"model": {"model": trained.state_dict()}, "step": 1}, tmp_path / "model.pt")
    for background in (False, True):
        module = nn.Linear(2, 2)
        plan = ms.plan(module, tmp_path / "model.pt", key="model.model")
        loaded: Any = ms.load(module, plan, background=background)
        assert (loaded.result() if background else loaded).source.endswith("[model.model]")
        assert torch.equal(module.weight, trained.weight)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "1", True, 1j])
def test_a_timeout_that_is_none(timeout: Any, path: Path) -> None:
    with ms.load(made("materialised"), path, background=True) as handle:
        with pytest.raises(errors.OptionError, match="timeout="):
            handle.result(timeout)
        assert handle.result(SOON).coverage == 1.0


def test_a_timeout_lets_the_load_go_on(path: Path, gate: Gate) -> None:
    module = made("materialised")
    handle = ms.load(module, path, background=True, transform=gate)
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="the load goes on") as caught:
            handle.result(timeout)
        assert isinstance(caught.value, errors.LoadTimeoutError)
    gate.opened.set()
    assert handle.result().coverage == 1.0


# Its end.


def test_the_result_is_the_same_each_time_and_in_every_thread(path: Path, gate: Gate) -> None:
    module, found = made("materialised"), []
    handle = ms.load(module, path, background=True, transform=gate)
    waiting = [threading.Thread(target=lambda: found.append(handle.result())) for _ in range(8)]
    for thread in waiting:
        thread.start()
    gate.opened.set()
    for thread in waiting:
        thread.join(SOON)
    assert len(found) == 8
    assert all(report is handle.result() for report in found)
    assert not handle.cancel()


def test_two_handles_at_once(tmp_path: Path) -> None:
    models = [nn.Linear(64, 64) for _ in range(8)]
    for index, model in enumerate(models):
        torch.save(model.state_dict(), tmp_path / f"{index}.pt")
    targets = [nn.Linear(64, 64) for _ in models]
    handles = [ms.load(one, tmp_path / f"{index}.pt", background=True) for index, one in enumerate(targets)]
    threads_of = [threading.Thread(target=handle.result) for handle in handles]
    for thread in threads_of:
        thread.start()
    for thread in threads_of:
        thread.join(SOON)
    assert all(torch.equal(one.weight, two.weight) for one, two in zip(models, targets, strict=True))
    assert gc.isenabled()


def test_cancelled_in_the_middle(path: Path, gate: Gate) -> None:
    module = made("materialised")
    before = whole(module)
    handle = ms.load(module, path, background=True, transform=gate)
    assert gate.reached.wait(SOON)
    assert handle.cancel(wait=False)
    assert not handle.cancel(wait=False)
    assert handle.done()
    gate.opened.set()
    assert ended()
    assert len(gate.names) == 1
    for _ in range(2):
        with pytest.raises(errors.LoadCancelledError, match="was cancelled"):
            handle.result()
    assert "cancelled" in repr(handle)
    assert whole(module) == before


def test_cancel_waits_for_the_thread(path: Path) -> None:
    def slow(name: str, tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return tensor

    handle = ms.load(made("materialised"), path, background=True, transform=slow)
    handle.cancel()
    assert threads() == []


@pytest.mark.parametrize("way", [{}, {"map": False}, {"verify": True}, {"dtype": torch.bfloat16}])
@pytest.mark.parametrize("target", ["materialised", "skeleton"])
def test_every_way_of_bringing_in_says_what_it_has_done_and_can_be_stopped(
    way: dict[str, Any], target: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    real = staged_module.Staged.bring_in
    monkeypatch.setattr(staged_module.Staged, "bring_in", lambda self, _: kept.append(self))
    handle = ms.load(made(target), path, background=True, **way)
    assert eventually(handle.done)
    told: list[int] = []

    def stop(nbytes: int) -> None:
        told.append(nbytes)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        real(kept[0], stop)
    assert len(told) == 1
    told.clear()
    real(kept[0], told.append)
    assert 0 < kept[0].nbytes <= sum(told) <= kept[0].nbytes + mmap.PAGESIZE  # which a map begins at


def test_left_without_a_result(path: Path) -> None:
    module = made("materialised")
    before = whole(module)
    with ms.load(module, path, background=True) as handle:
        pass
    with pytest.raises(errors.LoadCancelledError):
        handle.result()
    with pytest.raises(ZeroDivisionError), ms.load(module, path, background=True) as handle:
        _ = 1 / 0
    assert handle.done()
    assert threads() == []
    assert whole(module) == before


def test_a_dropped_handle_ends_and_is_freed(path: Path, gate: Gate) -> None:
    gc.collect()
    gc.disable()
    try:
        module = made("materialised")
        kept: list[Any] = []

        def noted(name: str, tensor: torch.Tensor) -> torch.Tensor:
            result = gate(name, tensor)
            kept.append(weakref.ref(result.untyped_storage()))
            return result

        handle = ms.load(module, path, background=True, transform=noted)
        assert gate.reached.wait(SOON)
        there, owner = weakref.ref(handle), weakref.ref(module)
        del handle, module
        assert there() is None
        gate.opened.set()
        assert ended()
        assert len(gate.names) == 1
        assert eventually(lambda: owner() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["dropped", "cancelled", "stale", "loaded"])
def test_what_was_brought_in_is_freed(end: str, tmp_path: Path) -> None:
    torch.save(nn.Linear(4096, 4096, bias=False).state_dict(), tmp_path / "model.pt")
    module: Any = nn.Linear(4096, 4096, bias=False)
    gc.collect()  # what an error of an earlier test has kept would be freed in the middle
    before = resident_bytes()
    handle: Any = ms.load(module, tmp_path / "model.pt", background=True)
    assert eventually(handle.done)
    assert resident_bytes() - before > 60 << 20
    if end == "dropped":
        del handle
    elif end == "cancelled":
        handle.cancel()
    elif end == "stale":
        module.weight = nn.Parameter(module.weight.detach(), requires_grad=False)
        module.weight.data = module.weight.t()
        with pytest.raises(errors.StalePlanError):
            handle.result()
    else:
        handle.result()
    assert eventually(lambda: resident_bytes() - before < 20 << 20)


def test_what_was_brought_in_is_freed_by_the_thread_that_was_cancelled(tmp_path: Path, gate: Gate) -> None:
    source = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 1, bias=False))
    torch.save(source.state_dict(), tmp_path / "model.pt")
    gc.collect()
    before = resident_bytes()
    pick = {"1.weight": gate, "0.weight": lambda _, tensor: tensor + 1}
    handle = ms.load(source, tmp_path / "model.pt", background=True, transform=pick)
    assert gate.reached.wait(SOON)
    assert resident_bytes() - before > 60 << 20
    handle.cancel(wait=False)
    gate.opened.set()
    assert ended()
    assert resident_bytes() - before < 20 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_an_interrupt_while_it_waits(path: Path, gate: Gate) -> None:
    module = made("materialised")
    before = whole(module)
    handle = ms.load(module, path, background=True, transform=gate)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    gate.opened.set()
    assert ended()
    assert len(gate.names) == 1
    with pytest.raises(errors.LoadCancelledError):
        handle.result()
    assert whole(module) == before


def test_an_interrupt_while_it_is_put_in_place(tmp_path: Path) -> None:
    class Interrupted(Watched):
        def set_extra_state(self, state: Any) -> None:
            signal.raise_signal(signal.SIGINT)

    torch.save(Watched().state_dict(), tmp_path / "model.pt")
    module = Interrupted()
    before = whole(module)
    handle = ms.load(module, tmp_path / "model.pt", background=True)
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    assert whole(module) == before
    with pytest.raises(errors.LoadCancelledError, match="interrupted"):
        handle.result()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # within a finalizer
def test_an_interrupt_anywhere(path: Path) -> None:
    """Ctrl-C at lines all over the call and the result: the old model or the new one, and no thread left."""

    def load(module: nn.Module) -> None:
        ms.load(module, path, background=True).result()

    new = made("materialised")
    load(new)
    goal, outcomes = whole(new)[0], set()
    lines = interrupted_at(0, lambda: load(made("materialised")))
    for line in [*range(5, lines, lines // 40), *range(lines - 60, lines, 3)]:
        module = made("materialised")
        with torch.no_grad():
            module.embed.weight.zero_()
        before = whole(module)
        interrupted_at(line, lambda: load(module))  # noqa: B023
        now = whole(module)
        assert now == before or now[0] == goal
        assert ended()
        outcomes.add(now == before)
    assert outcomes == {True, False}
    assert gc.isenabled()


def test_an_interrupted_result_does_not_lock_the_handle(path: Path) -> None:
    module = made("materialised")
    lines = interrupted_at(0, ms.load(made("materialised"), path, background=True).result)
    for line in [*range(1, 12), *range(lines - 12, lines)]:
        handle = ms.load(module, path, background=True)
        interrupted_at(line, handle.result)
        found: list[Any] = []
        again = threading.Thread(target=lambda: found.append(outcome_of(handle)))  # noqa: B023
        again.start()
        again.join(SOON)
        assert found
        handle.cancel()


def outcome_of(handle: ms.LoadHandle) -> Any:
    try:
        return handle.result()
    except errors.LoadCancelledError as error:
        return error


def test_a_load_does_not_wait_for_itself(tmp_path: Path, path: Path) -> None:
    found: list[BaseException] = []
    handles: list[ms.LoadHandle] = []
    ready = threading.Event()

    def waiting(name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert ready.wait(SOON)
        with pytest.raises(errors.OptionError, match="for itself") as caught:
            handles[0].result()
        found.append(caught.value)
        return tensor

    handles.append(ms.load(made("materialised"), path, background=True, transform=waiting))
    ready.set()
    handles[0].result()
    assert len(found) == 7
    handles.clear()

    class Asking(Watched):
        def set_extra_state(self, state: Any) -> None:
            assert not handles[0].cancel()
            handles[0].result()

    torch.save(Watched().state_dict(), tmp_path / "asking.pt")
    handles.append(ms.load(Asking(), tmp_path / "asking.pt", background=True))
    with pytest.raises(errors.ModelStateError, match="for itself"):
        handles[0].result()


# The end of the program.


EXIT = """
    import time, sys, torch
    import modelstate as ms
    from torch import nn

    def slow(name, tensor):
        time.sleep({seconds})
        return tensor

    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(500)])
    handle = ms.load(module, sys.argv[1], background=True, transform=slow)
    time.sleep(0.1)
    assert not handle.done()
    print("end", flush=True)
"""


@pytest.mark.parametrize("seconds", [0.05, 60])
def test_the_program_ends_with_a_running_handle(seconds: float, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(nn.Sequential(*[nn.Linear(4, 4) for _ in range(500)]).state_dict(), path)
    code = textwrap.dedent(EXIT.format(seconds=seconds))
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"end\n"
    started = time.monotonic()
    _, told = child.communicate(timeout=SOON)
    assert (child.returncode, told) == (0, b"")
    assert time.monotonic() - started < 10


SLOW = """
    import os, sys, time, torch
    import modelstate as ms
    from modelstate.read import ranges
    from torch import nn

    def slowly(*arguments, read=os.preadv):
        time.sleep(0.1)
        return read(*arguments)

    os.preadv, ranges.BATCH_BYTES = slowly, 4096
    handle = ms.load(nn.Linear(2048, 2048), sys.argv[1], background=True)
    time.sleep(0.3)
    assert not handle.done()
    print("end", flush=True)
"""


def test_the_end_of_the_program_does_not_wait_for_all_reads(tmp_path: Path) -> None:
    """4000 reads of a tenth of a second, which Python would wait for before it calls what is registered at exit."""
    path = tmp_path / "model.pt"
    torch.save(nn.Linear(2048, 2048).state_dict(), path)
    code = [sys.executable, "-c", textwrap.dedent(SLOW), str(path)]
    child = subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"end\n"
    started = time.monotonic()
    _, told = child.communicate(timeout=SOON)
    assert (child.returncode, told) == (0, b"")
    assert time.monotonic() - started < 10


def test_in_a_forked_process_there_is_no_result(path: Path, gate: Gate) -> None:
    handle = ms.load(made("materialised"), path, background=True, transform=gate)
    assert gate.reached.wait(SOON)
    child = os.fork()
    if child == 0:
        try:
            handle.result()
        except errors.LoadCancelledError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    gate.opened.set()
    assert handle.result().coverage == 1.0
