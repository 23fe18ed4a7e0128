"""The background task behind loads, saves and following: results, cancelling, and the end of the program."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from modelstate import errors
from modelstate.background import AtExit, BackgroundTask
from tests.store.common import program

SOON = 60.0


def started(work: Callable[[BackgroundTask[Any]], Any], at_exit: AtExit = AtExit.CANCEL, **options: Any) -> Any:
    task: BackgroundTask[Any] = BackgroundTask(work, kind="load", where="a.pt", at_exit=at_exit, **options)
    task.start()
    return task


def test_a_result_and_an_error_come_back_each_time() -> None:
    task = started(lambda _: 5)
    assert [task.result(SOON), task.result()] == [5, 5]
    assert task.done
    assert not task.cancel()
    failed = started(lambda _: os.environ["MISSING_NAME"])
    lengths = []
    for _ in range(2):
        with pytest.raises(KeyError, match="MISSING_NAME") as raised:
            failed.result(SOON)
        lengths.append(len(raised.traceback))
    assert lengths[0] == lengths[1]
    assert not failed.has_unreported_error


def test_a_task_whose_start_is_interrupted_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    task = BackgroundTask(lambda _: 1, kind="task", where="here", at_exit=AtExit.FINISH)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        task.start()
    assert task.wait(10)


def test_a_timeout_lets_the_task_run() -> None:
    opened = threading.Event()
    task = started(lambda _: opened.wait(SOON))
    with pytest.raises(errors.BackgroundTimeoutError, match="the load goes on") as caught:
        task.result(0.01)
    assert isinstance(caught.value, TimeoutError)
    assert not task.wait(0)
    opened.set()
    assert task.result(SOON)


@pytest.mark.parametrize("wait", [True, False])
def test_cancel_ends_a_sleep_and_discards(wait: bool) -> None:
    discarded = threading.Event()

    def work(task: BackgroundTask[None]) -> None:
        while True:
            task.sleep(1000)
            task.check()

    task = started(work, discard=discarded.set)
    assert task.cancel(wait=wait)
    assert task.wait(SOON)
    assert discarded.is_set()
    with pytest.raises(errors.BackgroundCancelledError, match="was cancelled"):
        task.result()


def test_a_forked_child_has_no_result() -> None:
    opened = threading.Event()
    task = started(lambda _: opened.wait(SOON))
    child = os.fork()
    if not child:
        try:
            assert task.done
            task.result()
        except errors.BackgroundCancelledError as error:
            os._exit(7 if "forked" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    opened.set()
    assert task.result(SOON)


@pytest.mark.slow
def test_the_end_of_a_program() -> None:
    """It waits for one kind, cancels the others, the last kind when the threads have ended, and prints an error."""
    code = """
import threading, time
from modelstate.background import AtExit, BackgroundTask

def finish(task):
    time.sleep(0.3)
    print("finished", flush=True)

def fail(task):
    raise ValueError("no space")

def endless(name):
    def work(task):
        task.sleep(1000)
        print(name, flush=True)
    return work

def thread():
    time.sleep(0.6)
    print("thread", flush=True)

for work, at_exit in ((finish, AtExit.FINISH), (fail, AtExit.FINISH), (endless("cancelled"), AtExit.CANCEL),
                      (endless("cancelled last"), AtExit.CANCEL_LAST)):
    BackgroundTask(work, kind="save", where="a", at_exit=at_exit, failure="a was not saved").start()
threading.Thread(target=thread).start()
print("end", flush=True)
"""
    done = program(code)
    assert done.stdout.splitlines() == ["end", "cancelled", "finished", "thread", "cancelled last"]
    assert done.stderr == "modelstate: a was not saved: no space\n"
    assert done.returncode == 0
