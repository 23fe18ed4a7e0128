"""Ctrl-C in the middle of a large load: it ends soon, no thread goes on, and the module is what it was."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.programs import Program

pytestmark = pytest.mark.slow

BATCHES = 12
# Every request takes a quarter of a second. Says when the second is under way, and when it has been interrupted.
PROGRAM = """
import os, sys, threading, time, torch, modelstate as ms
from torch import nn
from tests.faults import faulty_reads

def slowly(request):
    if request.call == "preadv":
        if request.number > first.number:
            print("reading", flush=True)
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
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("modelstate")]
    assert not names, names
    links = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    assert os.path.realpath(sys.argv[1]) not in links, links
    assert model.weight.data_ptr() == memory and model.weight.dtype is torch.float32
    assert in_place or (model.weight == 1).all()
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.mark.parametrize("signals", [1, 3])
def test_ctrl_c_in_the_middle_of_a_load(signals: int, path: Path) -> None:
    """First of one that stages, then of one in place."""
    child, number = Program(PROGRAM, path), 0
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
