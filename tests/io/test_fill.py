"""Memory that gets its pages with the bytes of a file in them: what is filled is right, the rest is left to read."""

import errno
import mmap
import os
import platform
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.io import engine, linux, system
from modelstate.io.engine import Request, read_ranges
from modelstate.io.memory import UffdFiller
from modelstate.spec import ByteRange
from tests.faults import faulty_reads

PAGE = mmap.PAGESIZE
MB = 1 << 20


def is_here() -> bool:
    try:
        os.close(system.userfaultfd())
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not is_here(), reason="this process gets no userfaultfd")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fill") / "bytes"
    torch.manual_seed(0)
    path.write_bytes(torch.randint(0, 256, (9 * MB + 77,), dtype=torch.uint8).numpy().tobytes())
    return path


class Memory:
    """Some that nobody has touched."""

    def __init__(self, nbytes: int) -> None:
        self.pages = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pages.madvise(mmap.MADV_NOHUGEPAGE)
        self.bytes = torch.frombuffer(self.pages, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()


class Counting(UffdFiller):
    """Knows how much it has filled."""

    filled = 0

    def fill(self, descriptor: int, path: str, start: int, address: int, nbytes: int) -> tuple[int, int]:
        first, last = super().fill(descriptor, path, start, address, nbytes)
        type(self).filled += last - first
        return first, last


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counting]:
    """Counts the bytes that loads fill."""
    monkeypatch.setattr(engine, "UffdFiller", Counting)
    Counting.filled = 0
    return Counting


ranges = st.lists(
    st.tuples(st.integers(0, 3 * PAGE), st.sampled_from([0, 1, PAGE, MB - 1, MB, 2 * MB + 5, 3 * MB]), st.booleans()),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@settings(max_examples=40)
@given(gaps=ranges, begin=st.integers(0, PAGE))
def test_every_byte_is_where_it_belongs(gaps: list[tuple[int, int, bool]], begin: int, path: Path) -> None:
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    room = Memory(12 * MB)
    requests, expected = [], torch.zeros(len(room.bytes), dtype=torch.uint8)
    at, to = 0, begin
    for gap, nbytes, apart in gaps:
        at += gap
        to += PAGE if apart else gap  # next to each other in both, or not
        if at + nbytes > len(data) or to + nbytes > 12 * MB:
            break
        requests.append(Request(ByteRange(str(path), at, nbytes), room.address + to))
        expected[to : to + nbytes] = data[at : at + nbytes]
        at, to = at + nbytes, to + nbytes
    read_ranges(requests, fingerprints={}, is_fresh=True)
    assert torch.equal(room.bytes, expected)


def test_whole_pages_are_filled_and_no_others(path: Path) -> None:
    room = Memory(4 * MB)
    descriptor = os.open(path, os.O_RDONLY)
    with closing(UffdFiller()) as filler:
        first, last = filler.fill(descriptor, str(path), 5, room.address + 100, 3 * MB)
    os.close(descriptor)
    assert (first, last) == (PAGE - 100, 3 * MB - 100)
    filled = room.bytes[100 + first : 100 + last].clone()
    assert filled.numpy().tobytes() == path.read_bytes()[5 + first : 5 + last]
    room.bytes.fill_(7)  # and the memory is as any other
    assert int(room.bytes.sum()) == 7 * len(room.bytes)


def test_the_file_does_not_count_as_memory_of_the_process(path: Path) -> None:
    room = Memory(8 * MB)
    descriptor = os.open(path, os.O_RDONLY)
    with closing(UffdFiller()) as filler:
        filler.fill(descriptor, str(path), 0, room.address, 8 * MB)
        shown = Path("/proc/self/smaps").read_text().partition(str(path))[2]
        assert int(re.findall(r"Rss: *([0-9]+) kB", shown)[0]) < 200
    os.close(descriptor)


def test_pages_that_are_there_are_left_alone(path: Path) -> None:
    room = Memory(4 * MB)
    room.bytes[2 * MB] = 9
    descriptor = os.open(path, os.O_RDONLY)
    with closing(UffdFiller()) as filler:
        found = filler.fill(descriptor, str(path), 0, room.address, 4 * MB)
    os.close(descriptor)
    assert found == (0, 2 * MB)
    assert room.bytes[2 * MB] == 9


def test_memory_that_was_used_before_is_read_into(path: Path, counted: type[Counting]) -> None:
    """Without an attempt to fill it, which would take milliseconds."""
    room, tried = Memory(4 * MB), list[int]()
    room.bytes.fill_(9)
    request = Request(ByteRange(str(path), 3, 3 * MB), room.address)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counted, "fill", lambda *arguments: tried.append(1) or (0, 0))
        read_ranges([request], fingerprints={}, is_fresh=True)
    assert not tried
    assert room.bytes[: 3 * MB].numpy().tobytes() == path.read_bytes()[3 : 3 + 3 * MB]
    untouched = Memory(4 * MB)
    read_ranges([Request(request.source, untouched.address)], fingerprints={}, is_fresh=True)
    assert counted.filled == 3 * MB


def test_a_file_that_is_cut_ends_what_is_filled(tmp_path: Path, path: Path) -> None:
    room, short = Memory(4 * MB), tmp_path / "short"
    short.write_bytes(path.read_bytes()[: 4 * MB])
    descriptor = os.open(short, os.O_RDONLY)
    with closing(UffdFiller()) as filler:
        assert filler.fill(descriptor, str(short), 0, room.address, MB) == (0, MB)  # the map is made
        os.truncate(short, 2 * MB)
        first, last = filler.fill(descriptor, str(short), MB, room.address + MB, 3 * MB)
    os.close(descriptor)
    assert (first, last) == (0, MB)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1536) for _ in range(6))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    save_file(Net().state_dict(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def skeleton() -> Net:
    with ms.skeleton():
        return Net()


def same(model: nn.Module, path: Path) -> bool:
    state = load_file(path)
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_load_fills_its_memory(checkpoint: Path, counted: type[Counting]) -> None:
    model = skeleton()
    ms.load(model, checkpoint, map=False)
    assert same(model, checkpoint)
    assert counted.filled > 25 * MB  # of 38, less what was tried with huge pages
    model.layers[0].weight.data.zero_()  # memory of its own: the file stays what it is
    assert not same(model, checkpoint)
    ms.load(model, checkpoint, in_place=True)
    assert same(model, checkpoint)


@pytest.mark.parametrize("failed", [errno.EPERM, errno.ENOSYS, errno.EMFILE])
def test_where_the_kernel_does_not_have_it(
    failed: int, checkpoint: Path, counted: type[Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise OSError(failed, os.strerror(failed))

    monkeypatch.setattr(system, "userfaultfd", refuse)
    model = skeleton()
    ms.load(model, checkpoint, map=False)
    assert same(model, checkpoint)
    assert counted.filled == 0


def test_injected_faults_meet_every_byte(checkpoint: Path, counted: type[Counting]) -> None:
    with faulty_reads() as faults:
        ms.load(skeleton(), checkpoint, map=False)
    assert counted.filled == 0
    assert sum(request.nbytes for request in faults.requests if request.call == "preadv") > 30 * MB


@pytest.mark.parametrize("change", ["cut", "written"])
def test_a_file_that_changes_meanwhile(
    change: str, checkpoint: Path, counted: type[Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = Counting.fill

    def meanwhile(self: Counting, *args: object) -> tuple[int, int]:
        if change == "cut":
            os.truncate(checkpoint, 20 * MB)
        else:
            with open(checkpoint, "r+b") as file:
                file.seek(-8, os.SEEK_END)
                file.write(b"\1" * 8)
        return fill(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Counting, "fill", meanwhile)
    model = skeleton()
    with pytest.raises(errors.ReadFailedError):
        ms.load(model, checkpoint, map=False)
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.slow
def test_no_descriptor_and_no_map_is_left(checkpoint: Path, counted: type[Counting]) -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count(str(checkpoint))

    ms.load(skeleton(), checkpoint, map=False)
    before = held()
    for _ in range(3):
        ms.load(skeleton(), checkpoint, map=False)
    assert held() == before
    assert before[1] == 0


def test_where_system_calls_are_filtered() -> None:
    """A filter may end the process that makes a call which is not on its list."""
    program = """
import ctypes, sys
from modelstate.io import system

libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges


class Line(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]


class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.POINTER(Line))]


load, equal, give = 0x20, 0x15, 0x06
end, allow = 0x80000000, 0x7FFF0000
lines = (Line * 4)(
    Line(load, 0, 0, 0), Line(equal, 0, 1, int(sys.argv[1])), Line(give, 0, 0, end), Line(give, 0, 0, allow)
)
assert libc.prctl(22, 2, ctypes.byref(Filter(4, lines)), 0, 0) == 0
try:
    system.userfaultfd()
except PermissionError:
    print("refused")
"""
    number = linux._USERFAULTFD[platform.machine()]
    done = subprocess.run([sys.executable, "-c", program, str(number)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "refused\n", done.stderr
