"""Each rank reads its own bytes and no others, counted by the kernel and at the system calls, not by the report."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import modelstate as ms
from tests.distributed import models, sources
from tests.distributed.ranks import Ranks
from tests.faults import faulty_reads
from tests.proxy import fault_proxy
from tests.remote.servers import file_server

SIZES: dict[str, Any] = {"width": 256, "hidden": 4096, "rows": 1024}
"""Of a network of 21 MB, whose narrowest column shard is a run of 4 kB, with gaps of 12 kB."""
_HEAD_BYTES = 64 << 10
"""What each rank reads to open a remote file."""
SURPLUS = 1.05
"""The header, and a few bytes by which ranks compare their files."""


def _plain() -> models.Net:
    torch.manual_seed(0)
    return models.Net(**SIZES)


def _read_so_far() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar:"))


@contextmanager
def _kept_in_memory(path: Path) -> Iterator[None]:
    """Locks the pages of files: a block that the kernel takes out of the page cache meanwhile is read again."""
    kept = []
    for part in [path] if path.is_file() else path.iterdir():
        with open(part, "rb") as file:  # for reading, so that ranks get their leases
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        # Not all users may lock pages.
        ctypes.CDLL(None).mlock(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes))
        kept.append(memory)
    yield
    del kept


def _held_bytes(net: models.Net) -> int:
    return sum(models.local(tensor).nbytes for tensor in net.state_dict().values())


def _load(kind: str, path: Path, meta: bool, read_once: bool = False) -> tuple[int, int, int, int, int]:
    """Returns the bytes that this rank holds, and those that it has read by the kernel, the calls and the report.

    The last number is that of the bytes that more than one rank has read, by the report.
    """
    ms.load(models.sharded(kind), dict(models.plain(kind).state_dict()))  # imports, and connections of the ranks
    ms.open(path)  # imports of the format
    if meta:
        with ms.skeleton():
            net = models.Net(**SIZES)
    else:
        net = _plain()
    models.SHARD[kind](net)
    with faulty_reads() as seen:  # which also keeps a load from filling memory through userfaultfd, uncounted
        before = _read_so_far()
        report = ms.load(net, path, read_once=read_once)
        by_kernel = _read_so_far() - before
    calls = [request for request in seen.requests if request.call in ("pread", "preadv", "preadv_cached")]
    by_calls, read_to = 0, dict.fromkeys((request.path for request in calls), 0)
    for request in sorted(calls, key=lambda request: request.start):  # a call that returns less is made again
        end, path = request.start + request.nbytes, request.path
        by_calls += max(end - max(read_to[path], request.start), 0)
        read_to[path] = max(read_to[path], end)
    assert "4 ranks: " in str(report)
    assert all(rank.reading_seconds > 0 for rank in report.ranks)
    return _held_bytes(net), by_kernel, by_calls, report.ranks[dist.get_rank()].read_bytes, report.reread_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "meta"), [("hsdp", True), ("fsdp+tp", False), ("shard1", True)])
def test_the_ranks_read_the_model_and_its_replicas(kind: str, meta: bool, ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    ms.save(_plain(), path)
    with _kept_in_memory(path):
        results = ranks.values(_load, kind, path, meta)
    held = sum(held for held, *_ in results)
    replicas = {"hsdp": 2, "replicated": 4}.get(kind, 1)
    state_bytes = sum(value.nbytes for value in _plain().state_dict().values())
    assert held == pytest.approx(replicas * state_bytes, rel=0.01)
    by_kernel, by_calls, reported = (sum(result[at] for result in results) for at in (1, 2, 3))
    # Narrow columns are read with the rows around them.
    assert reported > held if kind == "shard1" else reported == held
    assert {reread for *_, reread in results} == {reported - state_bytes}
    # A thread reads a block of such rows, which ends without the gap behind its last row.
    least = 0.99 * reported if kind == "shard1" else reported
    assert least <= by_kernel <= SURPLUS * reported, results
    assert least <= by_calls <= SURPLUS * reported, results


def _write(folder: Path, form: str) -> Path:
    return sources.write(dict(_plain().state_dict()), folder, form)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["shards", "zip", "dcp"])
def test_the_ranks_read_the_model_from_other_formats(form: str, ranks: Ranks, tmp_path: Path) -> None:
    path = ranks.values(_write, tmp_path, form)[0]
    with _kept_in_memory(path):
        results = ranks.values(_load, "fsdp", path, False)
    held, by_kernel, by_calls, reported, _ = map(sum, zip(*results, strict=True))
    assert held == reported
    # A checkpoint of DCP has an archive for each part of a tensor. Each rank reads the headers of all archives.
    most = SURPLUS * held + (4 * 4 * 8192 * len(_plain().state_dict()) if form == "dcp" else 0)
    assert held <= by_kernel <= most, results
    assert held <= by_calls <= most, results


# From a server, which counts by a proxy.


def _loaded(source: str, kind: str, read_once: bool = False) -> dict[str, torch.Tensor]:
    with ms.skeleton():
        net = models.Net(**SIZES)
    models.SHARD[kind](net)
    ms.load(net, source, read_once=read_once)
    return models.gathered(net)


def _equals(url: str, path: str, kind: str, read_once: bool) -> bool:
    remote, local = _loaded(url, kind, read_once), _loaded(path, kind)
    return bool(remote) and all(torch.equal(remote[name], value) for name, value in local.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "read_once", "copies"),
    [("fsdp", False, 1), ("hsdp", False, 2), ("hsdp", True, 1), ("replicated", True, 1)],
)
def test_the_server_sends_each_part_once_for_each_rank_that_reads_it(
    kind: str, read_once: bool, copies: int, ranks: Ranks, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    pytest.importorskip("obstore")
    ms.save(_plain(), path)
    sent_bytes = copies * sum(value.nbytes for value in _plain().state_dict().values())
    with file_server(tmp_path) as server, fault_proxy(server) as proxy:
        assert all(ranks.values(_equals, f"{proxy.url}/{path.name}", str(path), kind, read_once))
        assert sent_bytes <= proxy.downloaded_bytes <= SURPLUS * sent_bytes + 4 * _HEAD_BYTES
