"""Saves in the background: what was copied is what is saved, and no error is lost, whatever the program does next."""

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.faults import Request, faulty_writes
from tests.programs import Program
from tests.store.common import Held, Training, litter, program


class Gate:
    """Holds up the write of a save until it is opened, and may make it fail."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self.opened.set()

    def before(self, request: Request) -> None:
        if request.call == "mkdir" and "unfinished" in request.path:
            self.reached.set()
            assert self.opened.wait(60)
            if self.error is not None:
                raise self.error

    def close(self) -> None:
        self.reached.clear()
        self.opened.clear()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    with faulty_writes(before=gate.before):
        yield gate
        gate.opened.set()


def test_what_is_overwritten_at_once_is_saved_as_it_was(tmp_path: Path, gate: Gate) -> None:
    store, training = ms.Store(tmp_path), Training().train()
    array, values = np.arange(4.0), [1, 2]
    strided = torch.arange(12.0).view(3, 4).t()
    held = Held(array=array, values=values, strided=strided, bits=torch.tensor([True, False]))
    bits = training.bits()
    gate.close()
    pending = store.save(1, {**training.objects, "held": held}, background=True)
    assert pending is not None
    assert not pending.done
    assert store.steps() == ()
    with torch.no_grad():
        for param in training.model.parameters():
            param.fill_(7)
        for state in training.optimizer.state.values():
            state["exp_avg"].fill_(7)
        strided.fill_(7)
    array[:], values[0] = 7, 7
    gate.opened.set()
    saved = pending.result()
    assert store.steps() == (1,)
    assert (saved.staging_bytes, saved.blocked_seconds < saved.seconds) == (pending.staging_bytes, True)
    fresh, other = Training(1), Held()
    store.restore({**fresh.objects, "held": other})
    assert fresh.bits() == bits
    assert (other.values["array"] == np.arange(4.0)).all()
    assert other.values["values"] == [1, 2]
    assert torch.equal(other.values["strided"], torch.arange(12.0).view(3, 4).t())
    assert store.verify() == {1: ""}


@pytest.mark.slow
def test_the_next_save_waits_or_is_skipped(tmp_path: Path, gate: Gate) -> None:
    store, training = ms.Store(tmp_path), Training().train()
    gate.close()
    first = store.save(1, training.objects, background=True)
    assert first is not None
    assert store.save(2, training.objects, background=True, when_busy="skip") is None
    with pytest.raises(errors.BackgroundTimeoutError):
        store.wait(0.01)
    with pytest.raises(errors.BackgroundTimeoutError):
        first.result(0.01)
    threading.Timer(0.3, gate.opened.set).start()
    began = time.monotonic()
    third = store.save(3, training.objects, background=True)
    assert time.monotonic() - began > 0.2
    assert first.done
    assert third is not None
    third.result()
    assert store.save(4, training.objects, when_busy="skip") is not None
    assert store.steps() == (1, 3, 4)


@pytest.mark.parametrize("heard", ["save", "wait", "result", "close", "restore", "verify", "prune"])
def test_an_error_comes_through_once(tmp_path: Path, gate: Gate, heard: str) -> None:
    store, training = ms.Store(tmp_path), Training().train()
    store.save(1, training.objects)
    gate.error = OSError(errno.ENOSPC, "no space left on device")
    pending = store.save(2, training.objects, background=True)
    assert pending is not None
    while not pending.done:
        time.sleep(0.01)
    gate.error = None
    hear: dict[str, Callable[[], object]] = {
        "save": lambda: store.save(3, training.objects),
        "wait": store.wait,
        "result": pending.result,
        "close": store.close,
        "restore": lambda: store.restore(training.objects),
        "verify": store.verify,
        "prune": lambda: store.prune(1),
    }
    with pytest.raises(errors.WriteFailedError, match="no space left"):
        hear[heard]()
    store.wait()
    assert store.steps() == (1,)
    store.save(3, training.objects)
    assert store.verify() == {1: "", 3: ""}
    assert not litter(tmp_path)


@pytest.mark.slow
def test_an_interrupted_close_does_not_let_another_writer_in(tmp_path: Path, gate: Gate) -> None:
    store, training = ms.Store(tmp_path), Training().train()
    gate.close()
    store.save(1, training.objects, background=True)
    assert gate.reached.wait(60)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        store.close()
    other = ms.Store(tmp_path)
    with pytest.raises(errors.LockedError):
        other.save(2, training.objects)
    gate.opened.set()
    store.close()
    other.save(2, training.objects)
    assert other.verify() == {1: "", 2: ""}


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
def test_a_cancelled_save_leaves_no_checkpoint(tmp_path: Path, gate: Gate, wait: bool) -> None:
    store, training = ms.Store(tmp_path), Training().train()
    gate.close()
    pending = store.save(1, training.objects, background=True)
    assert pending is not None
    assert gate.reached.wait(60)
    if wait:
        threading.Timer(0.2, gate.opened.set).start()
    assert pending.cancel(wait=wait)
    assert pending.done == wait
    gate.opened.set()
    with pytest.raises(errors.BackgroundCancelledError, match="was cancelled"):
        pending.result()
    assert store.steps() == ()
    assert not litter(tmp_path)
    second = store.save(1, training.objects, background=True)
    assert second is not None
    assert second.result().step == 1
    assert not second.cancel()
    assert store.verify() == {1: ""}


@pytest.mark.slow
def test_threads_that_save_at_once_take_turns(tmp_path: Path) -> None:
    store, training = ms.Store(tmp_path, keep=3), Training().train()
    failed: list[BaseException] = []

    def save(first: int) -> None:
        try:
            for step in range(first, 24, 4):
                store.save(step, training.objects, background=step % 3 != 0)  # type: ignore[call-overload]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.wait()
    assert not failed
    assert store.steps()[-1] == 23
    assert set(store.verify().values()) == {""}
    assert not litter(tmp_path)


@pytest.mark.slow
def test_a_signal_whose_handler_saves(tmp_path: Path, gate: Gate) -> None:
    """It comes while the same thread saves: waiting for that would be for ever."""
    store = ms.Store(tmp_path)
    found: list[BaseException] = []

    def handler(*_: object) -> None:
        try:
            store.save(2, {"value": 2})
        except errors.LockedError as error:
            found.append(error)
        gate.opened.set()

    previous = signal.signal(signal.SIGUSR2, handler)
    try:
        gate.close()
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR2)).start()
        store.save(1, {"value": 1})
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert len(found) == 1
    assert store.steps() == (1,)


SLOW = """
import sys, time, threading, torch, modelstate as ms
from modelstate.io import system
real = system.fsync
def fsync(descriptor):
    time.sleep(0.05)
    real(descriptor)
def failing(descriptor):
    time.sleep(0.2)
    raise OSError(28, "no space left")
store = ms.Store(sys.argv[1])
state = {f"w{n}": torch.full((1 << 18,), float(n)) for n in range(9)}
store.save(1, {"state": state})
system.fsync = fsync if sys.argv[2] == "slow" else failing
changed = {name: tensor + 1 for name, tensor in state.items()}
# The second object is begun when the program is at its end.
store.save(2, {"state": changed, "other": dict(changed)}, background=True)
"""
ENDS = {"exit": "sys.exit(3)", "error": "raise RuntimeError('mine')", "forgotten": "del store\nimport gc; gc.collect()"}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_program_waits(tmp_path: Path, end: str) -> None:
    done = program(SLOW + ENDS[end], tmp_path, "slow")
    assert done.returncode == {"exit": 3, "error": 1}.get(end, 0)
    assert "not saved" not in done.stderr
    assert ("mine" in done.stderr) == (end == "error")
    store = ms.Store(tmp_path)
    assert store.verify() == {1: "", 2: ""}
    assert not litter(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["error", "forgotten"])
def test_the_end_of_a_program_says_what_was_not_saved(tmp_path: Path, end: str) -> None:
    done = program(SLOW + ENDS[end], tmp_path, "failing")
    assert done.stderr.count("modelstate: step 2 was not saved: ") == 1, done.stderr
    assert "no space left" in done.stderr
    assert ms.Store(tmp_path).verify() == {1: ""}
    assert not litter(tmp_path)


@pytest.mark.slow
def test_ctrl_c_at_the_end_says_what_was_not_saved(tmp_path: Path) -> None:
    code = SLOW.replace("0.05", "5") + "print('ending', flush=True)"
    process = Program(code, tmp_path, "slow", finalizes=True)
    while process.written() != "ending\n":
        assert not process.has_ended, process.wait()
        time.sleep(0.01)
    for _ in range(2):
        time.sleep(0.5)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
    said = process.wait(60).stderr
    store = ms.Store(tmp_path)
    assert store.verify(1) == {1: ""}
    assert store.steps() == (1, 2) or "step 2 was not saved" in said, said


@pytest.mark.slow
def test_ctrl_c_in_a_save_that_blocks(tmp_path: Path) -> None:
    store, training = ms.Store(tmp_path), Training(width=100).train()
    store.save(1, training.objects)
    for number in range(1, 100, 4):
        with faulty_writes(at=number, error=KeyboardInterrupt()) as faults, suppress(KeyboardInterrupt):
            store.save(2, training.train().objects, overwrite=True)
        if len(faults.requests) < number:
            break
        assert not litter(tmp_path), faults.requests[-1]
        assert store.verify()[1] == ""
        assert set(store.verify().values()) == {""}
    else:
        pytest.fail("a save makes fewer calls than that")
    assert store.verify() == {1: "", 2: ""}


def test_a_forked_child_has_nothing_to_do_with_it(tmp_path: Path, gate: Gate) -> None:
    store, training = ms.Store(tmp_path), Training().train()
    gate.close()
    pending = store.save(1, training.objects, background=True)
    assert pending is not None
    read, write = os.pipe()
    child = os.fork()
    if not child:
        said = []
        try:
            said.append(str(pending.done))
            store.wait()
            try:
                pending.result()
            except errors.BackgroundCancelledError:
                said.append("not mine")
            try:
                store.save(2, {"value": 2})
            except errors.LockedError:
                said.append("locked")
            said.append(str(store.steps()))
        except BaseException as error:
            said.append(repr(error))
        finally:
            os.write(write, " ".join(said).encode())
            os._exit(0)
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 1000) == b"True not mine locked ()"
    os.close(read)
    gate.opened.set()
    assert pending.result().step == 1
    assert store.verify() == {1: ""}


def test_a_commit_is_not_stopped(tmp_path: Path) -> None:
    handles = SimpleQueue[ms.store.PendingSave]()

    def cancel(request: Request) -> None:
        if request.call == "replace" and re.search(r"/\.step-[^/]*unfinished$", request.path):
            handles.get().cancel(wait=False)

    with faulty_writes(before=cancel), ms.Store(tmp_path) as store:
        pending = store.save(1, {"model": nn.Linear(2, 2)}, background=True)
        handles.put(pending)
        assert pending.result().step == 1
    assert ms.Store(tmp_path).verify() == {1: ""}
