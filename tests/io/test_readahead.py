"""Files that are not in the page cache are asked for before they are needed."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.io import system
from tests.faults import Request, faulty_reads
from tests.formats.files import cached_share, evict


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A checkpoint of 64 MB that is not in the page cache."""
    path = tmp_path / "cold.safetensors"
    save_file({f"{i}.weight": torch.full((1024, 2048), float(i)) for i in range(8)}, path)
    if cached_share(path) is None:
        pytest.skip("this kernel does not say what is in its page cache")
    evict(path)
    if cached_share(path):
        pytest.skip("this file system keeps everything in memory")
    return path


def model() -> nn.Module:
    with ms.skeleton():
        return nn.Sequential(*[nn.Linear(2048, 1024, bias=False) for _ in range(8)])


def filled() -> nn.Module:
    return nn.Sequential(*[nn.Linear(2048, 1024, bias=False) for _ in range(8)])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"in_place": True}, {"in_place": True, "dtype": torch.bfloat16}])
def test_a_cold_file_is_read_ahead_within_the_budget(options: dict[str, Any], cold: Path) -> None:
    module, budget = filled().to(options.get("dtype", torch.float32)), 1 << 20
    report = ms.load(module, cold, max_memory_bytes=budget, **options)
    assert "67.1 MB of it are read ahead" in " ".join(report.notes)
    assert report.peak_memory_bytes <= budget
    assert module[5].weight[3, 3] == 5


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_load_in_place_goes_past_the_page_cache(is_refused: bool, cold: Path) -> None:
    values = {f"{i}.weight": torch.arange(i, i + 1024 * 2049).view(1024, 2049).float() for i in range(8)}
    save_file(values, cold, {"odd": "x" * 13})
    evict(cold)
    module, refused = nn.Sequential(*[nn.Linear(2049, 1024, bias=False) for _ in range(8)]), list[Request]()

    def refuse(request: Request) -> None:
        """As a file system that takes the flag, and refuses the read. Only such reads are of 2 MiB."""
        if is_refused and request.call == "preadv" and request.nbytes == 2 << 20:
            refused.append(request)
            raise OSError(errno.EINVAL, "not a multiple of the block")

    with faulty_reads(before=refuse):
        report = ms.load(module, cold, in_place=True)
    assert "67.1 MB of it are read past it" in " ".join(report.notes)
    assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
    assert bool(refused) is is_refused
    assert report.peak_memory_bytes >= 2 << 20  # the page that a thread reads through
    assert is_refused or (cached_share(cold) or 0) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"map": False}, {}], ids=["read", "mapped"])
def test_what_is_loaded_is_read_ahead_unless_it_is_there(options: dict[str, Any], cold: Path) -> None:
    module = model()
    ms.plan(module, cold)
    assert (cached_share(cold) or 0) < 0.1
    report = ms.load(module, cold, **options)
    assert "67.1 MB of it are read ahead" in " ".join(report.notes)
    deadline = time.monotonic() + 60
    while (cached_share(cold) or 0) < 0.99 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (cached_share(cold) or 0) > 0.99
    assert module[5].weight[3, 3] == 5
    assert ms.load(model(), cold, **options).notes == ()


def test_at_most_half_of_the_available_memory_is_read_ahead(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "available_bytes", lambda: 40_000_000)
    module = model()
    report = ms.load(module, cold)
    assert "20.0 MB of it are read ahead" in " ".join(report.notes)
    assert module[5].weight[3, 3] == 5


def test_only_what_is_wanted_is_asked_for(cold: Path) -> None:
    report = ms.load(model()[:3], cold, map=False, allow_unexpected=["3.*", "4.*", "5.*", "6.*", "7.*"])
    assert "25.2 MB of it are read ahead" in " ".join(report.notes)


def test_a_disk_that_fails_is_an_error_before_the_commit(cold: Path) -> None:
    with cold.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # the kernel reads no more than that
        file.read(56 << 20)

    def fail(request: Request) -> None:
        if request.call == "preadv" and request.nbytes >= 64 << 10:  # not the header
            raise OSError(errno.EIO, "bad sector")

    module = filled()
    before = [value.clone() for value in module.parameters()]
    with faulty_reads(before=fail), pytest.raises(ms.errors.ReadFailedError, match="bad sector"):
        ms.load(module, cold)
    assert all(map(torch.equal, module.parameters(), before))
