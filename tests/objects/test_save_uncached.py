"""Large files go to the disk past the page cache: the same bytes, and every promise of a save is kept."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from modelstate.formats.block_writer import write_blocks
from modelstate.io import atomic, system
from modelstate.io.atomic import new_file
from tests.objects import saves
from tests.objects.saves import NAME, save, version_at
from tests.sweeps import EXHAUSTIVE

BLOCK_BYTES = 4 << 20


@pytest.fixture(autouse=True)
def all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones as well, in this module, of tensors that have pages in them."""
    monkeypatch.setattr(atomic, "LEAST_UNCACHED_BYTES", 0)
    monkeypatch.setattr(saves, "LENGTH", 3000)


def can_be_past_cache(directory: Path) -> bool:
    """Whether the file system of a directory has such writes."""
    probe = directory / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def written(directory: Path, start: int, tensors: list[torch.Tensor]) -> tuple[bytes, list[int]]:
    """The file, and how many bytes went past the cache in each write that did."""
    lengths: list[int] = []
    real = system.pwritev

    def pwritev(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        if system_flags(descriptor) & os.O_DIRECT:
            lengths.append(count)
        return count

    path = directory / "x"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "pwritev", pwritev)
        with new_file(str(path)) as output:
            output.write_at(0, b"\1" * start)
            with output.past_page_cache(1):
                write_blocks(output, start, tensors)
            assert output.nbytes == start + sum(tensor.nbytes for tensor in tensors)
    content = path.read_bytes()
    path.unlink()
    return content, lengths


def system_flags(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_GETFL)


@pytest.mark.slow
@settings(max_examples=settings().max_examples if EXHAUSTIVE else 30)
@given(
    start=st.integers(1, 9000),
    sizes=st.lists(st.sampled_from([0, 1, 7, 4095, 4096, 4097, 12288, BLOCK_BYTES, BLOCK_BYTES + 5]), max_size=8),
)
def test_the_same_bytes(start: int, sizes: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("files")
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    content, lengths = written(directory, start, tensors)
    assert content == b"\1" * start + b"".join(tensor.numpy().tobytes() for tensor in tensors)
    pages = (start + sum(sizes)) // 4096 - -(-start // 4096)
    if can_be_past_cache(directory) and pages > 2 * len(sizes):
        assert sum(lengths) >= 4096 * (pages - 2 * len(sizes))
        assert all(length % 4096 == 0 for length in lengths)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_has_no_such_writes(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one has no such descriptors, `test_platforms` shows."""
    real, met = system.pwritev, list[int]()

    def pwritev(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if system_flags(descriptor) & os.O_DIRECT:
            met.append(descriptor)
            raise OSError(number, os.strerror(number))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(system, "pwritev", pwritev)
    save(tmp_path, 2, "file")
    assert version_at(tmp_path / NAME) == 2
    assert met or not can_be_past_cache(tmp_path)
