"""`load(..., background=True)`: the result of a load, and a model that is left alone until then."""

import gc
import os
import signal
import textwrap
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.faults import Request, faulty_reads, until
from tests.loading.fingerprint import whole
from tests.loading.loads import stored
from tests.loading.test_load import Tied, made, other
from tests.programs import run_program

SOON = 60.0
"""Seconds in which everything here ends that does not hang."""


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("modelstate-load")]


def wait_for_end() -> None:
    """Waits until no thread of a load is left."""
    until(lambda: not threads())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_for_end()


class Gate:
    """A transform that stops at its first tensor until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.names: list[str] = []

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.names.append(name)
        self.reached.set()
        assert self.opened.wait(SOON)
        return tensor


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    torch.save(other(Tied()), path)
    return path


EVER: list[Any] = []


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


# The same as a load.


def doubled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "own memory": {"map": False},
    "cast": {"dtype": torch.bfloat16},
    "transform": {"transform": doubled},
    "transform of some": {"transform": {"embed.*": doubled}},
    "verified": {"verify": True},
}


try:
    from torchao.quantization import Int8WeightOnlyConfig

    QUANTIZE = ms.loading.Quantize(Int8WeightOnlyConfig(set_inductor_config=False))
    WAYS["quantized"] = {"transform": {"*.0.weight": QUANTIZE}}
except ImportError:  # no version of it works with this torch
    pass


FORMS = ["torch", "safetensors", "mapping"]
CASES = [(way, form) for way in WAYS for form in FORMS if form == "torch" or way != "verified"]


@pytest.mark.slow_except(15)
@pytest.mark.parametrize("target", ["materialised", "skeleton", "mixed"])
@pytest.mark.parametrize(("way", "form"), CASES)
def test_the_result_is_that_of_a_load(way: str, target: str, form: str, tmp_path: Path) -> None:
    source = stored(other(Tied()), tmp_path, form)
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


# The model until then.


def test_the_model_is_left_alone_until_the_result(path: Path, gate: Gate) -> None:
    module = made("materialised")
    before = whole(module)
    handle = ms.load(module, path, background=True, transform=gate)
    assert whole(module) == before
    assert gate.reached.wait(SOON)
    assert not handle.done
    assert "coming in" in repr(handle)
    gate.opened.set()
    until(lambda: handle.done)
    assert "ready" in repr(handle)
    assert whole(module) == before
    handle.result()
    assert "loaded" in repr(handle)
    assert torch.equal(module.embed.weight, other(Tied())["embed.weight"])


def test_a_transform_is_called_once_for_each_in_the_order_of_the_file(path: Path, gate: Gate) -> None:
    gate.opened.set()
    ms.load(made("materialised"), path, background=True, transform=gate).result()
    assert gate.names == [name for name in other(Tied()) if name not in ("head.weight", "body.same")]


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


# The model's own code.


def test_the_models_code_counts_once(tmp_path: Path) -> None:
    source = Watched()
    torch.save(source.state_dict(), tmp_path / "model.pt")
    module = Watched()
    EVER.clear()
    before = whole(module)
    torch.manual_seed(1)
    random_state = torch.get_rng_state()
    handle = ms.load(module, tmp_path / "model.pt", background=True)
    assert whole(module) == before
    assert EVER == []
    until(lambda: handle.done)
    assert torch.equal(torch.get_rng_state(), random_state)
    report = handle.result()
    assert EVER == module.calls == [{"n": 1}]
    assert torch.equal(module.layer.weight, source.layer.weight * 2)
    assert torch.equal(module.layer.bias, source.layer.bias)
    assert report.coverage == 1.0


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


# Results, cancelling, and handles that are dropped.


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


def test_cancelled_in_the_middle(path: Path, gate: Gate) -> None:
    module = made("materialised")
    before = whole(module)
    handle = ms.load(module, path, background=True, transform=gate)
    assert gate.reached.wait(SOON)
    assert handle.cancel(wait=False)
    assert not handle.cancel(wait=False)
    assert handle.done
    gate.opened.set()
    wait_for_end()
    assert len(gate.names) == 1
    for _ in range(2):
        with pytest.raises(errors.BackgroundCancelledError, match="was cancelled"):
            handle.result()
    assert "cancelled" in repr(handle)
    assert whole(module) == before


def test_left_without_a_result(path: Path) -> None:
    module = made("materialised")
    before = whole(module)
    with ms.load(module, path, background=True) as handle:
        pass
    with pytest.raises(errors.BackgroundCancelledError):
        handle.result()
    with pytest.raises(ZeroDivisionError), ms.load(module, path, background=True) as handle:
        _ = 1 / 0
    assert handle.done
    assert threads() == []
    assert whole(module) == before


@pytest.mark.slow
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
        wait_for_end()
        assert len(gate.names) == 1
        until(lambda: owner() is None)
        assert all(storage() is None for storage in kept)
    finally:
        gc.enable()


def test_a_load_does_not_wait_for_itself(tmp_path: Path, path: Path) -> None:
    found: list[BaseException] = []
    handles: list[ms.loading.LoadHandle] = []
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


def test_in_a_forked_process_there_is_no_result(path: Path, gate: Gate) -> None:
    handle = ms.load(made("materialised"), path, background=True, transform=gate)
    assert gate.reached.wait(SOON)
    child = os.fork()
    if child == 0:
        try:
            handle.result()
        except errors.BackgroundCancelledError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    gate.opened.set()
    assert handle.result().coverage == 1.0


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


# Interrupts, and the end of the program.


@pytest.mark.slow
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
    wait_for_end()
    assert len(gate.names) == 1
    with pytest.raises(errors.BackgroundCancelledError):
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
    with pytest.raises(errors.BackgroundCancelledError, match="interrupted"):
        handle.result()


EXIT = """
    import time, sys, torch
    import modelstate as ms
    from torch import nn

    def slow(name, tensor):
        time.sleep(60)
        return tensor

    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(500)])
    handle = ms.load(module, sys.argv[1], background=True, transform=slow)
    time.sleep(0.1)
    assert not handle.done
    print("end", flush=True)
"""


@pytest.mark.slow
def test_the_program_ends_with_a_running_handle(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(nn.Sequential(*[nn.Linear(4, 4) for _ in range(500)]).state_dict(), path)
    done = run_program(textwrap.dedent(EXIT), path, timeout=SOON, finalizes=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


# Models, files and sources that change, and other refusals.


def test_a_model_that_has_changed_is_refused(path: Path) -> None:
    """`tests/planning/test_executed_plan.py` has the kinds of changes."""
    module = made("materialised")
    handle = ms.load(module, path, background=True)
    module.body[0].bias = nn.Parameter(torch.zeros(9))
    before = whole(module)
    with pytest.raises(errors.PlanError) as caught:
        handle.result()
    assert "nothing has been changed" in str(caught.value)
    assert "load again" in str(caught.value)
    assert whole(module) == before


def test_a_tensor_that_shrinks_before_its_value_is_read_is_refused(tmp_path: Path) -> None:
    """The value is read into memory of the size that it has in the file, which no change of the model makes smaller."""
    ms.save(nn.Linear(2000, 500), tmp_path / "model.safetensors")
    module, has_shrunk = nn.Linear(2000, 500), threading.Event()
    with faulty_reads(before=lambda request: request.call == "preadv" and has_shrunk.wait(SOON)):
        handle = ms.load(module, tmp_path / "model.safetensors", background=True)
        module.weight.data = torch.zeros(1, 1)
        has_shrunk.set()
        with pytest.raises(errors.PlanError):
            handle.result()
    assert torch.equal(module.weight, torch.zeros(1, 1))


def test_memory_of_a_mapping_that_the_model_has_come_to_hold() -> None:
    """Each tensor of the mapping becomes the memory of the other parameter: none may be read after it was written."""
    pair = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    kept: dict[str, torch.Tensor] = {}
    for transform in (None, lambda name, _: kept[name]):
        one, two = torch.ones(2, 2), torch.zeros(2, 2)
        kept.update({"0.weight": one, "1.weight": two})
        handle = ms.load(pair, {"0.weight": one, "1.weight": two}, background=True, transform=transform)
        until(partial(getattr, handle, "done"))
        pair[0].weight.data, pair[1].weight.data = two, one
        handle.result()
        assert torch.equal(pair[0].weight, torch.ones(2, 2))
        assert torch.equal(pair[1].weight, torch.zeros(2, 2))


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


def test_a_file_that_changes_when_all_has_been_read(path: Path) -> None:
    module, expected = made("materialised"), torch.load(path)
    handle = ms.load(module, path, background=True)
    until(lambda: handle.done)
    torch.save({name: value + 1 for name, value in other(Tied()).items()}, path)
    handle.result()
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    path, module = tmp_path / "model.safetensors", nn.Linear(1024, 1024, bias=False)
    save_file({"weight": torch.ones(1024, 1024)}, path)
    before = whole(module)

    def cut(request: Request) -> None:
        if request.call == "preadv":
            os.truncate(path, 8192)

    with faulty_reads(before=cut), pytest.raises(errors.ReadFailedError):
        ms.load(module, path, background=True).result()
    assert whole(module) == before
