"""The child of a fork serves and swaps, whatever other threads were doing at that moment."""

import pytest

from tests.programs import run_program

pytestmark = pytest.mark.slow

# The program in the child is one that torch itself can run there. A matrix product waits for locks of its library, and
# outside inference mode each operation takes a lock of its tensor's autograd data, which a thread of the parent may
# have held at the fork.
SCRIPT = """
import faulthandler, os, signal, threading, traceback
import torch
from torch import nn
import modelstate as ms

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.ones(2))

    @torch.inference_mode()
    def forward(self, x):
        return x * self.p

torch.set_num_threads(1)
torch.set_grad_enabled(False)
x, live = torch.ones(2), ms.Live(Scaled().eval())
state = lambda k: {"p": torch.full((2,), float(k))}
live.swap(state(1))
inside, ended = threading.Event(), threading.Event()
errors = []

def in_child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        faulthandler.dump_traceback_later(60)
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0

def serves_and_swaps():
    assert live(x).tolist() == [1.0, 1.0]
    live.swap(state(5), timeout_seconds=60)
    assert live(x).tolist() == [5.0, 5.0]
    live.swap(state(6), timeout_seconds=60)
    assert live.rollback(timeout_seconds=60) and live(x).tolist() == [5.0, 5.0]

def thread(work):
    def run():
        torch.set_grad_enabled(False)
        work()
    one = threading.Thread(target=run, daemon=True)
    one.start()
    return one
"""

SERVING = """
def serve():
    while not ended.is_set():
        live(x)
threads = [thread(serve) for _ in range(3)]
for _ in range(20):
    in_child(serves_and_swaps)
"""

PINNED = """
def serve():
    inside.set()
    ended.wait(60)
threads = [thread(serve)]
inside.wait(60)
with live.version() as mine:
    def work():
        live.swap(state(2), timeout_seconds=60)
        assert mine(x).tolist() == [1.0, 1.0]
        assert live(x).tolist() == [2.0, 2.0]
    in_child(work)
in_child(serves_and_swaps)
"""

SWAPPING = """
def canary(v):
    inside.set()
    return ended.wait(60)
threads = [thread(lambda: live.swap(state(9), canary=canary))]
inside.wait(60)
in_child(serves_and_swaps)
"""


FOLLOWING = """
import tempfile
directory = tempfile.mkdtemp()
store = ms.Store(directory)
store.save(1, {"model": Scaled()})
def canary(v):
    inside.set()
    return ended.wait(60)
following = ms.follow(live, directory, canary=canary, poll_seconds=10_000)
threads = []
inside.wait(60)
def polls():
    ended.set()
    assert not following.is_running
    assert [event.action for event in following.poll()] == ["swapped"]
in_child(polls)
"""


@pytest.mark.parametrize(
    "script", [SERVING, PINNED, SWAPPING, FOLLOWING], ids=["serving", "pinned", "swapping", "following"]
)
def test_the_child_of_a_fork(script: str) -> None:
    end = "\nended.set()\nfor one in threads:\n    one.join(60)\nassert live(x).shape == (2,)\n"
    done = run_program(SCRIPT + script + end)
    assert done.returncode == 0, done.stderr
