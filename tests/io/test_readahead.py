"""Files that are not in the page cache are asked for before they are needed."""

import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.io import linux
from modelstate.io.linux import cached_share
from modelstate.io.prefetch import is_cold, merged, read_ahead
from modelstate.spec import ByteRange
from tests.formats.files import evict


def share(path: Path) -> float | None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return cached_share(descriptor, 0, path.stat().st_size)
    finally:
        os.close(descriptor)


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A checkpoint of 64 MB that is not in the page cache."""
    path = tmp_path / "cold.safetensors"
    save_file({f"{i}.weight": torch.full((1024, 2048), float(i)) for i in range(8)}, path)
    if share(path) is None:
        pytest.skip("this kernel does not say what is in its page cache (cachestat)")
    evict(path)
    if share(path):
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


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"map": False}, {}], ids=["read", "mapped"])
def test_what_is_loaded_is_read_ahead(options: dict[str, Any], cold: Path) -> None:
    module = model()
    report = ms.load(module, cold, **options)
    assert "67.1 MB of it are read ahead" in " ".join(report.notes)
    deadline = time.monotonic() + 60
    while (share(cold) or 0) < 0.99 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (share(cold) or 0) > 0.99
    assert module[5].weight[3, 3] == 5


@pytest.mark.slow
def test_the_kernel_reads_what_it_was_asked_for(cold: Path) -> None:
    nbytes = cold.stat().st_size
    assert read_ahead([ByteRange(str(cold), 0, nbytes)], {}) == nbytes
    deadline = time.monotonic() + 60
    while (share(cold) or 0) < 0.99 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (share(cold) or 0) > 0.99  # and nobody has read a byte


@pytest.mark.slow
def test_what_is_warm_is_left_alone(cold: Path) -> None:
    cold.read_bytes()
    report = ms.load(model(), cold, map=False)
    assert report.notes == ()


def test_only_what_is_wanted_is_asked_for(cold: Path) -> None:
    with ms.skeleton():
        part = nn.Sequential(*[nn.Linear(2048, 1024, bias=False) for _ in range(3)])
    report = ms.load(part, cold, map=False, allow_unexpected=["3.*", "4.*", "5.*", "6.*", "7.*"])
    assert "25.2 MB of it are read ahead" in " ".join(report.notes)


@pytest.mark.slow
def test_a_plan_asks_for_nothing(cold: Path) -> None:
    ms.plan(model(), cold)
    assert (share(cold) or 0) < 0.1


@pytest.mark.slow
def test_a_kernel_that_cannot_tell(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "_syscall", None)
    assert share(cold) is None
    assert not is_cold(ByteRange(str(cold), 0, cold.stat().st_size), {})
    assert read_ahead([ByteRange(str(cold), 0, cold.stat().st_size)], {}) == 0


@pytest.mark.slow
def test_never_more_than_half_of_the_memory(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "available_bytes", lambda: 40 << 20)
    assert read_ahead([ByteRange(str(cold), 0, cold.stat().st_size)], {}) == 20 << 20


def test_a_file_that_is_gone_is_not_our_error(tmp_path: Path) -> None:
    assert read_ahead([ByteRange(str(tmp_path / "gone"), 0, 32 << 20)], {}) == 0


ranges = st.lists(st.builds(ByteRange, st.sampled_from("ab"), st.integers(0, 9 << 20), st.integers(0, 3 << 20)))


@pytest.mark.slow
@given(ranges)
def test_merged_ranges_cover_the_ranges_and_lie_apart(given_ranges: list[ByteRange]) -> None:
    spans = merged(given_ranges)
    for one in given_ranges:
        covering = [s for s in spans if s.path == one.path and s.start <= one.start]
        assert not one.nbytes or any(one.start + one.nbytes <= s.start + s.nbytes for s in covering)
    for first, second in pairwise(spans):
        assert first.path < second.path or second.start - (first.start + first.nbytes) > 1 << 20
