"""Files that are not in the page cache are asked for before they are needed."""

import os
import time
from collections.abc import Callable
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
from modelstate.errors import TransformError
from modelstate.io import linux, prefetch
from modelstate.io.engine import can_read_uncached
from modelstate.io.linux import cached_share
from modelstate.io.prefetch import LEAST_BYTES, is_cold, merged, read_ahead
from modelstate.io.uncached import BUFFER_BYTES
from modelstate.spec import ByteRange
from tests.faults import Request, faulty_reads
from tests.formats.files import evict
from tests.loading.test_background import shown_bytes


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


def past_the_cache(path: Path) -> None:
    """Skips the test where nothing can be read past the page cache."""
    if not can_read_uncached(str(path), None):
        pytest.skip("no O_DIRECT on this file system, or no huge pages")


@pytest.fixture
def no_way_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "can_read_uncached", lambda *_: False)


def filled() -> nn.Module:
    return nn.Sequential(*[nn.Linear(2048, 1024, bias=False) for _ in range(8)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (model, {"map": False}),
        (filled, {"in_place": False}),
        (filled, {"in_place": True}),
        (model, {"dtype": torch.bfloat16}),
        (model, {"map": False, "background": True}),
    ],
    ids=["memory of its own", "staged", "in place", "cast on meta", "background"],
)
def test_what_is_read_is_read_past_the_page_cache(
    build: Callable[[], nn.Module], options: dict[str, Any], cold: Path
) -> None:
    past_the_cache(cold)
    module = build()
    report = ms.load(module, cold, **options)
    report = report.result() if options.get("background") else report
    assert "67.1 MB of it are read past it" in " ".join(report.notes)
    assert (share(cold) or 0) < 0.1
    assert [layer.weight.unique().tolist() for layer in module] == [[i] for i in range(8)]
    assert 4 * BUFFER_BYTES <= report.peak_memory_bytes <= 67_108_864 + 16 * (BUFFER_BYTES + (1 << 20))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"in_place": True}, {"in_place": True, "dtype": torch.bfloat16}])
def test_without_the_memory_for_it_the_file_is_read_ahead(options: dict[str, Any], cold: Path) -> None:
    module, budget = filled().to(options.get("dtype", torch.float32)), 1 << 20
    report = ms.load(module, cold, max_memory_bytes=budget, **options)
    assert "67.1 MB of it are read ahead" in " ".join(report.notes)
    assert report.peak_memory_bytes <= budget
    assert module[5].weight[3, 3] == 5


@pytest.mark.slow
def test_what_a_transform_gets_is_read_ahead(cold: Path) -> None:
    past_the_cache(cold)
    module = model()
    half = {f"{i}.weight": lambda name, tensor: tensor + 1 for i in range(4)}
    report = ms.load(module, cold, map=False, transform=half)
    notes = " ".join(report.notes)
    assert "33.6 MB of it are read past it" in notes
    assert "33.6 MB of it are read ahead" in notes
    assert [layer.weight[9, 9].item() for layer in module] == [1, 2, 3, 4, 4, 5, 6, 7]


@pytest.mark.slow
@pytest.mark.usefixtures("no_way_past")
def test_what_is_read_is_read_ahead(cold: Path) -> None:
    module = model()
    report = ms.load(module, cold, map=False)
    assert "67.1 MB of it are read ahead" in " ".join(report.notes)
    deadline = time.monotonic() + 60
    while (share(cold) or 0) < 0.99 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (share(cold) or 0) > 0.99
    assert module[5].weight[3, 3] == 5


def test_a_map_of_a_cold_file_is_brought_in_behind_the_load(cold: Path) -> None:
    module = model()
    report = ms.load(module, cold)
    assert "its map is brought in, while the program goes on" in " ".join(report.notes)
    until = time.monotonic() + 60
    while (share(cold) or 0) < 0.99 and time.monotonic() < until:
        time.sleep(0.01)
    assert (share(cold) or 0) > 0.99
    assert module[5].weight[3, 3] == 5


@pytest.mark.slow
def test_a_map_of_a_warm_file_is_left_alone(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold.read_bytes()
    monkeypatch.setattr(prefetch, "prefault_async", lambda *_: pytest.fail("a thread for nothing"))
    module = model()
    assert ms.load(module, cold).notes == ()
    assert shown_bytes(cold) == 0
    assert module[5].weight[3, 3] == 5


@pytest.mark.slow
def test_nothing_is_brought_in_behind_a_load_that_failed(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, _: torch.Tensor) -> torch.Tensor:
        raise ValueError(name)

    monkeypatch.setattr(prefetch, "prefault_async", lambda *_, **__: pytest.fail("a thread for nothing"))
    with pytest.raises(TransformError):
        ms.load(model(), cold, transform={"0.weight": fails})


@pytest.mark.slow
def test_a_map_can_be_left_to_who_uses_it(cold: Path) -> None:
    report = ms.load(model(), cold, prefault=False)
    assert report.notes == ()
    assert (share(cold) or 0) < 0.1  # nothing was read


@pytest.mark.slow
def test_a_map_can_be_waited_for(cold: Path) -> None:
    module = model()
    before = shown_bytes(cold)
    ms.load(module, cold, prefault=True)
    assert share(cold) == 1
    assert shown_bytes(cold) - before >= cold.stat().st_size // 4096 * 4096 - 4096
    assert module[5].weight[3, 3] == 5


def test_waiting_for_a_map_that_cannot_be_read_changes_nothing(cold: Path) -> None:
    module = model()

    def cut(request: Request) -> None:
        if request.call == "mmap":
            os.truncate(cold, 4096)

    with faulty_reads(before=cut), pytest.raises(ms.errors.ReadFailedError):
        ms.load(module, cold, prefault=True)
    assert all(param.is_meta for param in module.parameters())


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


@pytest.mark.usefixtures("no_way_past")
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
def test_a_kernel_before_6_5_is_asked_about_a_map(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "_syscall", lambda *_: -1)
    assert share(cold) == 0.0
    descriptor = os.open(cold, os.O_RDONLY)
    try:
        os.pread(descriptor, 16 << 20, 32 << 20)
        assert cached_share(descriptor, 32 << 20, 16 << 20) == 1.0
        assert cached_share(descriptor, (32 << 20) + 5, 100) == 1.0
        assert cached_share(descriptor, 0, 8 << 20) == 0.0
        assert cached_share(descriptor, 0, 1 << 30) is None  # behind the end of the file
    finally:
        os.close(descriptor)
    assert is_cold(ByteRange(str(cold), 0, cold.stat().st_size))


@pytest.mark.slow
def test_a_kernel_that_cannot_tell(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "_syscall", None)
    assert share(cold) is None
    assert not is_cold(ByteRange(str(cold), 0, cold.stat().st_size))
    assert read_ahead([ByteRange(str(cold), 0, cold.stat().st_size)], {}) == 0


@pytest.mark.slow
def test_never_more_than_half_of_the_memory(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "available_bytes", lambda: 40 << 20)
    assert read_ahead([ByteRange(str(cold), 0, cold.stat().st_size)], {}) == 20 << 20


def test_a_file_that_is_gone_is_not_our_error(tmp_path: Path) -> None:
    assert read_ahead([ByteRange(str(tmp_path / "gone"), 0, 2 * LEAST_BYTES)], {}) == 0


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
