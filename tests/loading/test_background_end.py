"""`load(..., background=True)`: results, cancelling, interrupts, and the end of the program."""

import gc
import mmap
import os
import signal
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.io.engine import read_threads
from modelstate.loading import background
from tests.loading.fingerprint import interrupted_at, whole
from tests.loading.handles import SOON, Gate, Watched, ended, eventually, threads
from tests.loading.test_load import Tied, made, other
from tests.programs import run_program

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "model.pt"
    torch.save(other(Tied()), found)
    return found


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
    assert handle.done
    gate.opened.set()
    assert ended()
    assert len(gate.names) == 1
    for _ in range(2):
        with pytest.raises(errors.BackgroundCancelledError, match="was cancelled"):
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
    real = background.StagedLoad.read
    monkeypatch.setattr(background.StagedLoad, "read", lambda self, _: kept.append(self))
    handle = ms.load(made(target), path, background=True, **way)
    assert eventually(lambda: handle.done)
    told: list[int] = []

    def stop(nbytes: int) -> None:
        told.append(nbytes)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        real(kept[0], stop)
    assert 0 < len(told) <= read_threads()  # each of them may be about to tell
    told.clear()
    real(kept[0], told.append)
    assert 0 < kept[0].nbytes <= sum(told) <= kept[0].nbytes + mmap.PAGESIZE  # which a map begins at


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
        assert ended()
        assert len(gate.names) == 1
        assert eventually(lambda: owner() is None)
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["dropped", "cancelled", "stale", "loaded"])
def test_what_was_brought_in_is_freed(end: str, tmp_path: Path) -> None:
    torch.save(nn.Linear(4096, 4096, bias=False).state_dict(), tmp_path / "model.pt")
    module: Any = nn.Linear(4096, 4096, bias=False)
    gc.collect()  # what an error of an earlier test has kept would be freed in the middle
    before = resident_bytes()
    handle: Any = ms.load(module, tmp_path / "model.pt", background=True)
    assert eventually(lambda: handle.done)
    assert resident_bytes() - before > 60 << 20
    if end == "dropped":
        del handle
    elif end == "cancelled":
        handle.cancel()
    elif end == "stale":
        module.weight = nn.Parameter(module.weight.detach(), requires_grad=False)
        module.weight.data = module.weight.t()
        with pytest.raises(errors.PlanError):
            handle.result()
    else:
        handle.result()
    assert eventually(lambda: resident_bytes() - before < 20 << 20)


@pytest.mark.slow
def test_a_load_that_has_failed_keeps_nothing(tmp_path: Path) -> None:
    torch.save(nn.Linear(64, 64).state_dict(), tmp_path / "model.pt")

    def fails(name: str, tensor: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError(name)

    module = nn.Linear(64, 64)
    owner = weakref.ref(module)
    handle = ms.load(module, tmp_path / "model.pt", background=True, transform=fails)
    with pytest.raises(errors.TransformError):
        handle.result()
    assert ended()
    del handle, module
    gc.collect()  # an error and the frames that it came through hold each other
    assert owner() is None


@pytest.mark.slow
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
    """The memory of this process without the pages of files, which the kernel may drop at any time."""
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - of_files) * os.sysconf("SC_PAGESIZE")


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
    assert ended()
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def outcome_of(handle: ms.loading.LoadHandle) -> Any:
    try:
        return handle.result()
    except errors.BackgroundCancelledError as error:
        return error


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
    assert not handle.done
    print("end", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 60])
def test_the_program_ends_with_a_running_handle(seconds: float, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(nn.Sequential(*[nn.Linear(4, 4) for _ in range(500)]).state_dict(), path)
    done = run_program(textwrap.dedent(EXIT.format(seconds=seconds)), path, timeout=SOON, finalizes=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


SLOW = """
    import os, sys, time, torch
    import modelstate as ms
    from modelstate.io import engine, system
    from torch import nn

    def slowly(*arguments, read=os.preadv):
        time.sleep(0.1)
        return read(*arguments)

    system.preadv, engine.BATCH_BYTES, engine._MOST_BATCH_BYTES = slowly, 4096, 4096
    handle = ms.load(nn.Linear(2048, 2048), sys.argv[1], background=True)
    time.sleep(0.3)
    assert not handle.done
    print("end", flush=True)
"""


@pytest.mark.slow
def test_the_end_of_the_program_does_not_wait_for_all_reads(tmp_path: Path) -> None:
    """4000 reads of a tenth of a second, which Python would wait for before it calls what is registered at exit."""
    path = tmp_path / "model.pt"
    torch.save(nn.Linear(2048, 2048).state_dict(), path)
    done = run_program(textwrap.dedent(SLOW), path, timeout=SOON, finalizes=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


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


LAST = """
    import atexit, sys, torch
    import modelstate as ms
    from torch import nn

    ways = [{"verify": True}, {"dtype": torch.bfloat16}, {"transform": lambda _, t: t + 1}, {"in_place": True}]

    def last():
        for way in ways:
            model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
            ms.load(model, sys.argv[1], **way)
            print(str(model[1].weight.dtype)[6:], model[1].weight.mean().item())

    atexit.register(last)
"""


@pytest.mark.slow
def test_a_load_that_is_the_last_thing_that_a_program_does(tmp_path: Path) -> None:
    """At its end Python starts no threads any more."""
    path = tmp_path / "model.safetensors"
    ms.save(
        {
            f"{n}.{kind}": torch.ones(300, 300)[:, : 300 if kind == "weight" else 1].squeeze()
            for n in (0, 1)
            for kind in ("weight", "bias")
        },
        path,
    )
    done = run_program(textwrap.dedent(LAST), path, timeout=SOON, finalizes=True)
    assert done.stderr == ""
    assert done.stdout.split() == ["float32", "1.0", "bfloat16", "1.0", "float32", "2.0", "float32", "1.0"]
