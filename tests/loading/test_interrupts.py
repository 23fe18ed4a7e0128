"""Ctrl-C and exceptions of the user's signal handlers: they come out as themselves, and the model is whole."""

import copy
import gc
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._C import _len_torch_dispatch_stack

import modelstate as ms
from modelstate.errors import ModelCodeError, OptionError, TransformError
from tests.programs import Program
from tests.sweeps import EXHAUSTIVE, sample

# In the middle of a large load.

BATCHES = 12
# Every request takes a quarter of a second. Says when the second is under way, and when it has been interrupted.
PROGRAM = """
import os, sys, time, torch, modelstate as ms
from torch import nn
from tests.faults import count_threads, faulty_reads, wait_for_threads

def slowly(request):
    if request.call == "preadv":
        if request.number > first.number:
            os.write(1, b"reading\\n")  # at once: two threads do it
        time.sleep(0.25)

class First:
    number = 0

def linear():
    module = nn.utils.skip_init(nn.Linear, 4096, 6144, bias=False)
    nn.init.ones_(module.weight)
    return module

first = First()
with faulty_reads() as clean:
    ms.load(linear(), sys.argv[1], in_place=False)
first.number = min(request.number for request in clean.requests if request.call == "preadv")
threads = count_threads()
for in_place in (False, True):
    model = linear()
    memory = model.weight.data_ptr()
    try:
        with faulty_reads(before=slowly):
            ms.load(model, sys.argv[1], in_place=in_place)
    except KeyboardInterrupt as error:
        error.__traceback__ = error.__context__ = None  # which keep what the load has in its frames
        print("interrupted", flush=True)
    time.sleep(0.2)  # a thread that was interrupted as it started ends by itself, with nothing done
    wait_for_threads(threads)
    links = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    assert os.path.realpath(sys.argv[1]) not in links, links
    assert model.weight.data_ptr() == memory and model.weight.dtype is torch.float32
    assert in_place or (model.weight == 1).all()
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("interrupts") / "x.safetensors"
    save_file({"weight": torch.zeros(6144, 4096)}, path)
    assert path.stat().st_size > BATCHES * (8 << 20)
    return path


def line(child: Program, number: int) -> str:
    """Waits for this line of the output."""
    while len(lines := child.written().split("\n")[:-1]) <= number:
        assert not child.has_ended, child.wait()
        time.sleep(0.005)
    return lines[number]


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 3])
def test_ctrl_c_in_the_middle_of_a_load(signals: int, large: Path) -> None:
    """First one that stages, then one in place: each ends soon, no thread goes on, and the module is what it was."""
    child, number = Program(PROGRAM, large), 0
    for _ in range(2):
        assert line(child, number) == "reading"
        for _ in range(signals):
            os.kill(child.pid, signal.SIGINT)
            time.sleep(0.05)
        requests = 0
        while (said := line(child, number + 1 + requests)) == "reading":
            requests += 1
        assert said == "interrupted"
        assert requests < BATCHES - 2  # what is under way is waited for, and no more
        number += requests + 2
    done = child.wait()
    assert done.returncode == 0, done.stderr


# Exceptions of signal handlers.


class Alarm(TimeoutError):
    pass


class Broken(ValueError):
    pass


class Stop(KeyboardInterrupt):
    pass


KINDS = [Alarm, Broken, Stop]


class Handler:
    """Raises an exception of a class when a signal arrives, and keeps it."""

    kind: type[BaseException] = Alarm
    raised: BaseException | None = None

    def __call__(self, number: int, frame: object) -> None:
        self.raised = self.kind("of the user")
        raise self.raised


@pytest.fixture
def handler() -> Iterator[Handler]:
    handler = Handler()
    before = {number: signal.signal(number, handler) for number in (signal.SIGUSR1, signal.SIGALRM)}
    yield handler
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, old in before.items():
        signal.signal(number, old)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8).half())
        self.extra = torch.randn(3)
        self.signals, self.error = False, False

    def get_extra_state(self) -> Any:
        return self.extra.clone()

    def set_extra_state(self, state: Any) -> None:
        self.extra.copy_(state)
        if self.signals:
            signal.raise_signal(signal.SIGUSR1)
        if self.error:
            raise Alarm


def state(model: Net) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers(), model.extra)]


def is_equal(before: list[torch.Tensor], now: list[torch.Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(before, now, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_in_code_of_the_model(handler: Handler, kind: type[BaseException], tmp_path: Path) -> None:
    model, path, handler.kind = Net(), tmp_path / "net.safetensors", kind
    ms.save(Net(), path)
    before, is_meant = state(model), False

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGUSR1)
        return tensor

    def replaced(name: str, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return transform(name, tensor)
        except kind as error:
            if is_meant:
                raise ValueError from error
            raise ValueError  # noqa: B904  (as `inspect` does)

    for call, function in ((ms.load, None), (ms.load, transform), (ms.convert, transform), (ms.load, replaced)):
        model.signals = function is None
        with pytest.raises(kind) as raised:
            call(model, *[path] * (call is ms.load), transform=function)  # type: ignore[operator]
        assert raised.value is handler.raised
    is_meant = True
    with pytest.raises(TransformError):
        ms.load(model, path, transform=replaced)
    assert is_equal(before, state(model))


def test_errors_of_the_models_own_code_stay_what_they_are(handler: Handler, tmp_path: Path) -> None:
    model, path = Net(), tmp_path / "net.safetensors"
    ms.save(Net(), path)
    model.error = True
    with pytest.raises(ModelCodeError) as raised:
        ms.load(model, path)
    assert isinstance(raised.value.__cause__, Alarm)
    try:
        signal.raise_signal(signal.SIGUSR1)
    except Alarm:
        with pytest.raises(OptionError):  # while the program handles the exception of its handler
            ms.load(model, path, dtype="no such")


OPERATIONS: dict[str, Callable[[Any, Path], object]] = {
    "load": lambda model, path: ms.load(model, path / "net.safetensors"),
    "load a torch file": lambda model, path: ms.load(model, path / "net.pt", in_place=False),
    "load with another dtype": lambda model, _: ms.load(
        model.layers[::2],
        {name: value * 0 for name, value in model.layers[::2].state_dict().items()},
        dtype=torch.float64,
    ),
    "plan": lambda model, path: ms.plan(model, path / "net.safetensors"),
    "save": lambda model, path: ms.save(model, Path(tempfile.mkdtemp(dir=path)) / "saved.safetensors"),
    "restore": lambda model, path: ms.restore({"net": model}, path / "objects.safetensors"),
    "convert": lambda model, _: ms.convert(model, torch.bfloat16),
    "initialise": lambda model, _: ms.load(
        model, {"layers.0.weight": torch.ones(8, 8)}, init_missing=True, allow_missing=["_extra_state", "layers.1.*"]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_at_calls_within_the_library(name: str, handler: Handler, tmp_path: Path) -> None:
    """At a call of each function; where nothing is compared, of those that no operation before it has called."""
    ms.save(Net(), tmp_path / "net.safetensors")
    ms.save(Net(), tmp_path / "net.pt")
    ms.save({"net": Net()}, tmp_path / "objects.safetensors")
    calls, stop, like = list[str](), -1, Net()

    def on_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("modelstate."):
            calls.append(frame.f_code.co_qualname)
            if len(calls) - 1 == stop:
                signal.raise_signal(signal.SIGUSR1)

    def run(model: Net, name: str = name) -> None:
        calls.clear()
        sys.setprofile(on_call)
        try:
            OPERATIONS[name](model, tmp_path)
        finally:
            sys.setprofile(None)

    is_compared, called = name.startswith(("load", "restore")), set[str]()
    for other in itertools.takewhile(lambda other: other != name, [] if is_compared else OPERATIONS):
        run(Net(), other)
        called.update(calls)
    run(Net())
    run(right := copy.deepcopy(like))
    places: dict[str, list[int]] = {}
    for place, function in enumerate(calls):
        places.setdefault(function, []).append(place)
    middle = [found[len(found) // 2] for function, found in places.items() if function not in called]
    for stop in range(len(calls)) if EXHAUSTIVE else middle:
        model, handler.raised, handler.kind = copy.deepcopy(like), None, KINDS[stop % 3]
        before, raised = state(model), None
        try:
            run(model)
        except BaseException as error:
            raised = error
        if raised is not None:
            # Python itself may raise another exception in its place, within the import system or `threading`.
            assert raised is handler.raised or not isinstance(raised, ms.ModelStateError)
            raised = handler.raised = None
            if _len_torch_dispatch_stack():
                gc.collect()  # of frames that the exception has kept
            assert _len_torch_dispatch_stack() == 0, "a mode of the library is still active"
            if is_compared:  # the model is as before, or the commit was over
                assert is_equal(before, state(model)) or is_equal(state(right), state(model))


def is_open(path: Path) -> bool:
    """Whether this process has the file open."""
    links = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    return os.path.realpath(path) in links


@pytest.mark.parametrize("kind", ["into memory", "onto meta", "in the background"])
def test_nothing_is_left_open(kind: str, handler: Handler, tmp_path: Path) -> None:
    """An interrupt as a function of C returns: the file is closed, and the garbage collector goes on."""
    path, calls, stop = tmp_path / "x.safetensors", list[str](), -1
    save_file(nn.Linear(256, 256).state_dict(), path)

    def on_call(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_return" and frame.f_globals.get("__name__", "").startswith(("modelstate.", "contextlib")):
            calls.append(f"{frame.f_code.co_qualname} {function.__name__}")
            if len(calls) - 1 == stop:
                signal.raise_signal(signal.SIGUSR1)

    def run() -> None:
        model = nn.Linear(256, 256, device="meta" if kind == "onto meta" else None)
        calls.clear()
        sys.setprofile(on_call)
        try:
            if kind == "in the background":
                ms.load(model, path, background=True).result()
            else:
                ms.load(model, path)
        finally:
            sys.setprofile(None)

    run()
    run()
    for place in sample(range(len(calls)), calls.__getitem__):
        stop = place
        with suppress(Alarm):
            run()
        handler.raised = None
        assert gc.isenabled(), calls[-1]
        deadline = time.monotonic() + 20
        while is_open(path):  # by a thread that ends by itself
            assert time.monotonic() < deadline, calls[-1]
            gc.collect()  # of what refers to itself, such as the maps of a checkpoint
            time.sleep(0.005)
