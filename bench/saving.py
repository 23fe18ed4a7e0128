"""The ways to save a model, what the disk takes for the same bytes, and what a store adds to it."""

import hashlib
import itertools
import mmap
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

import modelstate as ms
from bench.measure import Stages
from bench.models import QUICK, sizes_of, with_memory

Save = Callable[[nn.Module, Path], None]

BARE, SYNCED = "bare write, {} threads", "bare write with fsync"
BARE_SYNCED, BARE_DIRECT = f"{SYNCED}, {{}} threads", f"{SYNCED}, O_DIRECT, {{}} threads"
_CHUNK_BYTES = 8 << 20


def _synced(save: Save) -> Save:
    """The same, with everything that it has written synced, as one would have to do it oneself."""

    def work(model: nn.Module, folder: Path) -> None:
        save(model, folder)
        for path in [*folder.rglob("*"), folder]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    return work


def _torch(model: nn.Module, folder: Path) -> None:
    torch.save(model.state_dict(), folder / "model.pt")


def _safetensors(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_model

    save_model(model, str(folder / "model.safetensors"))


def _dcp(model: nn.Module, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(model.state_dict(), checkpoint_id=str(folder), no_dist=True)


def _torchsnapshot(model: nn.Module, folder: Path) -> None:
    from torchsnapshot import Snapshot

    Snapshot.take(str(folder / "snapshot"), {"model": model})


def _tensorizer(model: nn.Module, folder: Path) -> None:
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(folder / "model.tensors"))
    serializer.write_module(model)
    serializer.close()


def _ours(model: nn.Module, folder: Path) -> None:
    ms.save(model, folder / "model.safetensors")


def _store(model: nn.Module, folder: Path) -> None:
    with ms.Store(folder / "store") as store:
        store.save(1, {"model": model})


SAVE: dict[str, Save] = {
    "modelstate.save": _ours,
    "modelstate.Store.save": _store,
    "torch.save": _torch,
    "torch.save, then fsync": _synced(_torch),
    "safetensors save_model": _safetensors,
    "safetensors save_model, then fsync": _synced(_safetensors),
    "DCP": _dcp,
    "DCP, then fsync": _synced(_dcp),
    "torchsnapshot": _torchsnapshot,
    "torchsnapshot, then fsync": _synced(_torchsnapshot),
    "tensorizer": _tensorizer,
    "tensorizer, then fsync": _synced(_tensorizer),
}
PACKAGES = {"torchsnapshot": "torchsnapshot", "tensorizer": "tensorizer"}


def measure(*, contender: str, folder: str, quick: bool) -> None:
    """From a module in memory to files. Saves a tiny model first, so that imports do not count."""
    save, tiny, large = SAVE[contender], Path(folder) / "tiny", Path(folder) / "large"
    for each in (tiny, large):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir(parents=True)
    save(with_memory("tiny", QUICK), tiny)
    model = with_memory("large", sizes_of(quick))
    os.sync()
    stages = Stages()
    save(model, large)
    stages.end("ready", nbytes=_bytes_of(model))


def bare_writes(*, nbytes: int, folder: str) -> None:
    """So many bytes of touched memory into a new file of the right size, by as many threads as there are processors."""
    nbytes = -(-nbytes // _CHUNK_BYTES) * _CHUNK_BYTES
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    count, path = len(os.sched_getaffinity(0)), Path(folder) / "bare"
    _write(path, memoryview(memory), count, 0, sync=False)  # the first write waits for free pages of the page cache
    stages = Stages()
    for name, flag, sync in ((BARE, 0, False), (BARE_SYNCED, 0, True), (BARE_DIRECT, os.O_DIRECT, True)):
        path.unlink()
        os.sync()
        begun = time.perf_counter()
        _write(path, memoryview(memory), count, flag, sync)
        stages.end(name.format(count), seconds=time.perf_counter() - begun, nbytes=nbytes)
    path.unlink()
    view = memoryview(memory).toreadonly()
    for name, digest in digests().items():
        begun = time.perf_counter()
        for at in range(0, nbytes, _CHUNK_BYTES):
            digest(view[at : at + _CHUNK_BYTES])
        stages.end(name, seconds=time.perf_counter() - begun, nbytes=nbytes)


def digests() -> dict[str, Callable[[memoryview], object]]:
    """What a checkpoint could keep of its tensors, as far as it is installed."""
    found: dict[str, Callable[[memoryview], object]] = {
        "XXH3-128, 1 thread": xxhash.xxh3_128,
        "CRC-32 (zlib), 1 thread": zlib.crc32,
        "SHA-256, 1 thread": hashlib.sha256,
    }
    with suppress(ImportError):
        from blake3 import blake3

        found["BLAKE3, 1 thread"] = lambda view: blake3(view).digest()
    with suppress(ImportError):
        from crc32c import crc32c

        found["CRC-32C, 1 thread"] = crc32c
    return found


def _write(path: Path, view: memoryview, count: int, flag: int, sync: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag)
    os.posix_fallocate(descriptor, 0, len(view))
    chunks, lock = iter(range(0, len(view), _CHUNK_BYTES)), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                at = next(chunks, None)
            if at is None:
                return
            end = min(at + _CHUNK_BYTES, len(view))
            while at < end:
                at += os.pwrite(descriptor, view[at:end], at)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


BLOCKED, MEMCPY = "Store.save(background=True), until it returns", "memcpy of the same bytes"
FULL, FROZEN = "Store.save, everything has changed", "Store.save, 90% has not changed"


def blocked(*, folder: str, quick: bool) -> None:
    """How long training waits, with staging memory that an earlier save has made; and a copy of the same bytes."""
    model, path = with_memory("large", sizes_of(quick)), Path(folder) / "store"
    state = {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}
    copies = [torch.ones_like(value) for value in state.values()]
    shutil.rmtree(path, ignore_errors=True)
    stages = Stages()
    with ms.Store(path, keep=1) as store:
        first = store.save(1, {"model": model}, background=True)
        assert first is not None
        first.result()
        begun = time.perf_counter()
        pending = store.save(2, {"model": model}, background=True)
        seconds = time.perf_counter() - begun
        assert pending is not None
        pending.result()
    stages.end(BLOCKED, seconds=seconds, nbytes=_bytes_of(model))
    begun = time.perf_counter()
    torch._foreach_copy_(copies, list(state.values()))
    stages.end(MEMCPY, seconds=time.perf_counter() - begun, nbytes=_bytes_of(model))


Wait = Callable[[], object]


@contextmanager
def _by_store(model: nn.Module, folder: Path) -> Iterator[Callable[[], Wait]]:
    steps = itertools.count()
    with ms.Store(folder / "store", keep=1) as store:

        def save() -> Wait:
            pending = store.save(next(steps), {"model": model}, background=True)
            assert pending is not None
            return pending.result

        yield save


@contextmanager
def _by_dcp(model: nn.Module, folder: Path) -> Iterator[Callable[[], Wait]]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stager = DefaultStager()

    def save() -> Wait:
        response: Any = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder / "dcp", async_stager=stager)
        response.staging_completion.result()
        wait: Wait = response.upload_completion.result
        return wait

    yield save
    stager.close()
    dist.destroy_process_group()


@contextmanager
def _by_loop(model: nn.Module, folder: Path) -> Iterator[Callable[[], Wait]]:
    copies: dict[str, torch.Tensor] = {}

    def save() -> Wait:
        state = model.state_dict()
        if not copies:
            copies.update({name: torch.empty_like(value, device="cpu").pin_memory() for name, value in state.items()})
        for name, value in state.items():
            copies[name].copy_(value, non_blocking=True)
        torch.cuda.synchronize()
        return lambda: None

    yield save


STORE = "Store.save(background=True)"
FROM_GPU = {
    STORE: _by_store,
    "copy_ of each tensor to pinned memory, nothing written": _by_loop,
    "DCP async_save, until it is staged": _by_dcp,
}
FIRST, SECOND = "{}, the first", "{}, the second"


def from_gpu(*, contender: str, folder: str, quick: bool) -> None:
    """How long training on a GPU waits for a save in the background, the first and the second time."""
    shutil.rmtree(folder, ignore_errors=True)
    model = with_memory("large", sizes_of(quick)).cuda()
    stages = Stages()
    with FROM_GPU[contender](model, Path(folder)) as save:
        for name in (FIRST, SECOND):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            wait = save()
            seconds = time.perf_counter() - begun
            stages.end(name.format(contender), seconds=seconds, nbytes=_bytes_of(model))
            wait()


def frozen(*, folder: str, quick: bool) -> None:
    """A second checkpoint in which everything, or a tenth, has changed since the first."""
    model, path = with_memory("large", sizes_of(quick)), Path(folder) / "store"
    params = list(model.parameters())
    total, left = _bytes_of(model), 0
    changing: list[Any] = []
    for param in reversed(params):
        if left < total / 10:
            changing.append(param)
            left += param.nbytes
    for param in params:
        param.requires_grad_(any(param is one for one in changing))
    stages = Stages()
    for name, some in ((FULL, params), (FROZEN, changing)):
        shutil.rmtree(path, ignore_errors=True)
        with ms.Store(path) as store:
            store.save(1, {"model": model})
            with torch.no_grad():
                torch._foreach_add_([param.data for param in some], 1.0)
            os.sync()
            begun = time.perf_counter()
            saved = store.save(2, {"model": model})
            seconds = time.perf_counter() - begun
        stages.end(name, seconds=seconds, nbytes=saved.written_bytes)


def _bytes_of(model: nn.Module) -> int:
    return sum(param.nbytes for param in {id(one): one for one in model.parameters()}.values())
