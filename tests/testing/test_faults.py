"""`faulty_reads`, on loads that are known."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import modelstate as ms
from modelstate.errors import OptionError, ReadFailedError
from modelstate.io import system
from modelstate.testing import Faults, Request, faulty_reads
from modelstate.testing.faults import READ_CALLS

STATE = {"weight": torch.arange(12.0).view(4, 3), "bias": torch.ones(4)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(STATE, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def load(path: Path, **options: Any) -> torch.nn.Module:
    model = torch.nn.Linear(3, 4)
    ms.load(model, path, **options)
    return model


def calls(faults: Faults) -> set[str]:
    return {request.call for request in faults.requests}


def test_without_arguments_it_counts(path: Path) -> None:
    with faulty_reads() as faults:
        model = load(path)
    assert torch.equal(model.weight, STATE["weight"])
    assert calls(faults) == set(READ_CALLS) - {"stat", "mmap", "mlock", "preadv_cached"}
    assert [request.number for request in faults.requests] == list(range(1, len(faults.requests) + 1))
    assert {request.path for request in faults.requests} == {str(path)}
    (read,) = [request for request in faults.requests if request.call == "preadv"]
    assert (read.start, read.nbytes) == (os.path.getsize(path) - 64, 64)


def test_what_is_read_of_a_map_is_no_request(path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(3, 4)
    with faulty_reads() as faults:
        ms.load(model, path)
        assert torch.equal(model.weight, STATE["weight"])
    assert calls(faults) == set(READ_CALLS) - {"preadv", "preadv_cached", "mlock"}


def test_an_error_at_each_in_turn(path: Path) -> None:
    with faulty_reads() as clean:
        load(path)
    for number, request in enumerate(clean.requests, 1):
        with faulty_reads(at=number, error=OSError(errno.EIO, "broken")) as faults, pytest.raises(ReadFailedError):
            load(path)
        assert faults.requests == clean.requests[:number]
        assert faults.requests[-1] == request


@pytest.mark.parametrize("short", [1, 7, 1000])
def test_short_reads_are_gone_on_with(path: Path, short: int) -> None:
    with faulty_reads(short=short) as faults:
        model = load(path)
    assert torch.equal(model.weight, STATE["weight"])
    assert torch.equal(model.bias, STATE["bias"])
    reads = [request for request in faults.requests if request.call == "preadv"]
    assert len(reads) == -(-64 // short)


def test_a_read_that_gives_nothing_is_the_end(path: Path) -> None:
    with faulty_reads() as clean:
        load(path)
    (read,) = [request for request in clean.requests if request.call == "preadv"]
    with faulty_reads(at=read.number, short=0), pytest.raises(ReadFailedError, match="ends before the tensor does"):
        load(path)


def test_the_callback_hears_of_each_before_it_is_made(path: Path) -> None:
    heard: list[Request] = []
    with faulty_reads(before=heard.append) as faults:
        load(path)
    assert heard == faults.requests


def test_what_the_callback_raises_comes_in_place_of_the_request(path: Path) -> None:
    def broken(request: Request) -> None:
        if request.call == "preadv":
            raise OSError(errno.ESTALE, "gone")

    with faulty_reads(before=broken), pytest.raises(ReadFailedError, match="gone"):
        load(path)


def test_it_ends_with_the_context(path: Path) -> None:
    before = {name: getattr(system, name) for name in READ_CALLS}
    with pytest.raises(ReadFailedError), faulty_reads(error=OSError):
        load(path)
    assert {name: getattr(system, name) for name in READ_CALLS} == before
    load(path)


def test_contexts_in_each_other(path: Path) -> None:
    with faulty_reads() as outer, pytest.raises(ReadFailedError), faulty_reads(at=4, error=OSError) as inner:
        load(path)
    assert len(inner.requests) == 4
    assert outer.requests == inner.requests[:3]


def test_requests_of_all_threads_are_numbered_once(path: Path) -> None:
    with faulty_reads() as faults:
        threads = [threading.Thread(target=load, args=(path,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(request.number for request in faults.requests) == list(range(1, len(faults.requests) + 1))


@pytest.mark.parametrize(
    "options",
    [
        {"at": 0},
        {"at": True},
        {"at": "1"},
        {"short": -1},
        {"short": 1.5},
        {"error": "no"},
        {"error": int},
        {"before": 1},
    ],
    ids=str,
)
def test_arguments_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught, faulty_reads(**options):
        pass
    assert f"{next(iter(options))}=" in caught.value.what


WRITERS = ("system.py", "lock.py", "atomic.py", "linux.py")
READING = ("os.open(", "os.fstat(", "os.pread(", "os.preadv(", "mmap.mmap(", "os.read(")


def test_all_of_read_goes_through_here() -> None:
    """But for memory that is no file's, and for maps whose pages are counted and not read."""
    for file in Path(system.__file__).parent.glob("*.py"):
        lines = [line for line in file.read_text().splitlines() if "mmap.mmap(-1" not in line]
        found = [call for call in READING for line in lines if call in line]
        assert not found or file.name in WRITERS, (file.name, found)
