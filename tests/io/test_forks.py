"""Processes that are forked while other threads are at work in modelstate: nothing waits for threads that are gone."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import BackgroundCancelledError
from modelstate.process import gc_paused
from tests.io.test_lease import saved
from tests.programs import Forks

pytestmark = pytest.mark.filterwarnings("ignore:.*fork")


def in_child(check: Callable[[], bool], seconds: int = 100) -> str:
    """What a check says in a forked child: "True", "False", "hangs", or that it raises."""
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "hangs" if os.WTERMSIG(status) == signal.SIGALRM else f"signal {os.WTERMSIG(status)}"
    return {0: "True", 1: "False", 2: "raises"}[os.WEXITSTATUS(status)]


def use(path: Path) -> bool:
    """Every part of modelstate that guards the state of a Python module."""
    with ms.skeleton():
        model = nn.Linear(64, 64)
    is_meta = model.weight.is_meta
    ms.load(model, ms.open(path))
    ms.load(nn.utils.skip_init(nn.Linear, 64, 64), path)  # torch holds a lock of its own while it initialises
    ms.convert(model, dtype=torch.float64)
    with ms.serve.without_state_dict_hooks(model):
        model.state_dict()
    return is_meta and bool(model.weight.eq(1).all()) and gc.isenabled()


@contextmanager
def at_work(work: Callable[[], object]) -> Iterator[None]:
    """Three threads call a function again and again; the interpreter changes threads as often as it can."""
    stop, interval = threading.Event(), sys.getswitchinterval()

    def repeat() -> None:
        while not stop.is_set():
            work()

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        yield
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_children_that_are_forked_while_other_threads_work(tmp_path: Path) -> None:
    """Fifteen of them, at any moment."""
    path = saved(tmp_path / "model.safetensors", size=64)
    torch.set_num_threads(1)
    assert use(path)  # Python has locks of its own while it imports a module for the first time
    with at_work(partial(use, path)):
        found = {in_child(partial(use, path)) for _ in range(15)}
    assert found == {"True"}


def test_the_collector_goes_on_in_children() -> None:
    """Threads pause it, as loads do; a child is forked at any moment."""

    def pause() -> None:
        with gc_paused():
            pass

    with at_work(pause):
        found = {in_child(gc.isenabled) for _ in range(200)}
    assert found == {"True"}
    assert gc.isenabled()


@pytest.fixture
def other_thread() -> "Callable[[Callable[[threading.Event, threading.Event], None]], None]":
    """Runs a function in another thread, until the test is over."""
    release = threading.Event()
    threads: list[threading.Thread] = []

    def start(function: Callable[[threading.Event, threading.Event], None]) -> None:
        inside = threading.Event()
        threads.append(threading.Thread(target=function, args=(inside, release)))
        threads[-1].start()
        assert inside.wait(60)

    yield start  # type: ignore[misc]
    release.set()
    for thread in threads:
        thread.join()


def test_a_child_is_not_in_the_skeleton_of_another_thread(other_thread: Callable[..., None]) -> None:
    def build(inside: threading.Event, release: threading.Event) -> None:
        with ms.skeleton():
            inside.set()
            release.wait(60)

    other_thread(build)
    assert in_child(lambda: not nn.Linear(2, 2).weight.is_meta) == "True"
    with ms.skeleton():
        assert in_child(lambda: nn.Linear(2, 2).weight.is_meta) == "True"


def test_a_child_does_not_wait_for_the_thread_that_puts_values_in_place(
    tmp_path: Path, other_thread: Callable[..., None]
) -> None:
    model = nn.Linear(64, 64)
    handle = ms.load(model, saved(tmp_path / "model.safetensors", size=64), background=True)

    def put_in_place(inside: threading.Event, release: threading.Event) -> None:
        def wait(*_: object) -> None:
            inside.set()
            release.wait(60)

        model.register_load_state_dict_post_hook(wait)
        handle.result()

    def has_no_result() -> bool:
        with pytest.raises(BackgroundCancelledError, match="forked"):
            handle.result()
        return not handle.cancel() and handle.done

    other_thread(put_in_place)
    assert in_child(has_no_result, seconds=10) == "True"


def test_a_child_loads_into_a_model_that_another_thread_was_loading(other_thread: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    parent = os.getpid()

    def load(inside: threading.Event, release: threading.Event) -> None:
        def wait(*_: object) -> None:
            if os.getpid() == parent and threading.current_thread() is not threading.main_thread():
                inside.set()
                release.wait(60)

        model.register_load_state_dict_post_hook(wait)
        ms.load(model, state)

    other_thread(load)
    assert in_child(lambda: ms.load(model, state).coverage == 1, seconds=10) == "True"


def test_no_lock_of_a_python_module_is_forgotten() -> None:
    """A plain lock at the level of a module is held for ever in a child, if a thread held it at the fork."""
    import importlib
    import pkgutil

    import modelstate
    from modelstate import forks

    kinds = type(threading.Lock()), type(threading.RLock()), threading.Condition
    names = [module.name for module in pkgutil.walk_packages(modelstate.__path__, "modelstate.")]
    names = [name for name in names if not name.endswith("__main__") and ".integrations." not in name]
    modules = [importlib.import_module(name) for name in names]
    known = {*map(id, forks._locks)}
    forgotten = []
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, kinds) and id(value) not in known:
                forgotten.append(f"{module.__name__}.{name}")
    assert not forgotten


FIRST_CALLS = """
import os, signal, sys, threading
import torch
import modelstate as ms

path, started = sys.argv[1], threading.Event()
# Before the threads: torch holds a lock of its own while it draws random numbers.
models = [torch.nn.Linear(8, 8) for _ in range(12)]

def first_call():
    started.set()
    ms.load(models.pop(), path)

sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=first_call) for _ in range(2)]
for thread in threads:
    thread.start()
started.wait()
for _ in range(10):
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        ms.load(models.pop(), path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
for thread in threads:
    thread.join()
"""


WHILE_REPLACED = """
import os, subprocess, sys, torch, modelstate as ms

with ms.skeleton():
    model = torch.nn.Linear(4096, 4096)
ms.load(model, sys.argv[1])
writer = subprocess.Popen(["truncate", "-s", "100", sys.argv[1]])
while writer.poll() is None:
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
assert model.weight.eq(1).all()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "size"), [(FIRST_CALLS, 8), (WHILE_REPLACED, 4096)], ids=["calls", "replaced"])
def test_children_that_are_forked_at_any_moment(
    program: str, size: int, tmp_path: Path, new_interpreter: Forks
) -> None:
    """The modules that a first call imports are imported in the child; memory of a map is being replaced by another."""
    done = new_interpreter.run(program, saved(tmp_path / "model.safetensors", size=size))
    assert done.returncode == 0, done.stderr
