"""A fault on one rank of a save is an error on all of them, and the path has the checkpoint of before."""

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import modelstate as ms
from modelstate.distributed import writing
from modelstate.distributed.agreement import Agreement
from tests.distributed import models
from tests.distributed.ranks import Ranks, die, late, survivors
from tests.faults import Request, faulty_writes
from tests.sweeps import sample

TIMEOUT_SECONDS = 2.0
NAME = "model.safetensors"
OLD, NEW = 7, 3
"""Seeds of the models."""
Fault = AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class Result:
    """What a save left, as one rank sees it."""

    error: str
    """The class of the error; empty where there was none."""
    text: str
    is_ours: bool
    files: tuple[str, ...]
    """The files in the directory, when all ranks have ended."""
    seed: int
    """The seed of the model that is at the path."""


def _seed_at(path: Path) -> int:
    with ms.open(path) as checkpoint:
        checkpoint.verify()
        return int(checkpoint.tensor("steps"))


def _put_old(folder: Path, shard_size_bytes: int | None) -> None:
    """Puts the old checkpoint at the path, with the first rank."""
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        ms.save(models.plain("fsdp", seed=OLD), folder / NAME, shard_size_bytes=shard_size_bytes)
    dist.barrier()


def _attempt(
    folder: Path, save: Callable[[nn.Module], object], fault: Callable[[], Fault], rank: int, alone: bool = False
) -> Result:
    """Saves a new model, with the fault on one rank; `alone` where other ranks may be dead afterwards."""
    net = models.sharded("fsdp", seed=NEW)
    dist.barrier()
    error: Exception | None = None
    with fault() if dist.get_rank() == rank else nullcontext():
        try:
            save(net)
        except Exception as raised:
            error = raised
    if not alone:
        dist.barrier()
    files = tuple(sorted(os.listdir(folder)))
    seed = _seed_at(folder / NAME) if not alone else -1
    if not alone:
        dist.barrier()
    kind = type(error).__name__ if error else ""
    return Result(kind, str(error or ""), isinstance(error, ms.ModelStateError), files, seed)


# Errors of writes.


def _fail_at_calls(folder: Path, rank: int, shard_size_bytes: int | None) -> list[tuple[str, Result]]:
    def save(net: nn.Module) -> None:
        ms.save(net, folder / NAME, shard_size_bytes=shard_size_bytes)

    _put_old(folder, shard_size_bytes)
    calls: list[Any] = [None]
    with faulty_writes() as seen:
        save(models.sharded("fsdp", seed=OLD))
    calls[0] = [(request.number, request.call) for request in seen.requests]
    dist.broadcast_object_list(calls, src=rank)
    results = []
    for number, call in sample(calls[0], lambda place: place[1], more=0):
        error = OSError(errno.ENOSPC if number % 2 else errno.EIO, "as asked")
        fault = _fault(at=number, error=error)
        results.append((call, _attempt(folder, save, fault, rank)))
        if results[-1][1].seed == NEW:
            _put_old(folder, shard_size_bytes)
    return results


def _fault(**options: Any) -> Callable[[], Fault]:
    return lambda: faulty_writes(**options)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "shard_size_bytes"), [(0, 1500), (2, None)])
def test_an_io_error_at_each_kind_of_call(
    rank: int, shard_size_bytes: int | None, ranks: Ranks, tmp_path: Path
) -> None:
    by_rank = ranks.values(_fail_at_calls, tmp_path / "run", rank, shard_size_bytes)
    failed = set()
    for attempts in zip(*by_rank, strict=True):
        call = attempts[0][0]
        results = [result for _, result in attempts]
        if call != "unlink":  # what is not removed now is removed by the next save
            assert not any(".unfinished" in file for file in results[0].files), (call, results[0])
        if {result.error for result in results} == {""}:
            assert call in ("close", "unlink", "fallocate", "link"), call
            assert {result.seed for result in results} == {NEW}
            continue
        failed.add(call)
        assert {result.error for result in results} == {"WriteFailedError"}, (call, results)
        assert all(f"rank {rank}" in result.text or result is results[rank] for result in results)
        assert {result.seed for result in results} == {OLD}, call
        assert len(set(results[0].files)) == len(by_rank[0][0][1].files), call
    assert {"open_to_write", "pwritev", "fsync"} <= failed
    if rank == 0:
        assert {"fallocate", "replace"} <= failed


def _fail_before_the_digests_are_sent(folder: Path) -> Result:
    def fault() -> Fault:
        return mock.patch.object(Agreement, "texts", side_effect=MemoryError("as asked"))

    _put_old(folder, None)
    return _attempt(folder, lambda net: ms.save(net, folder / NAME), fault, rank=2)


@pytest.mark.slow
def test_a_lack_of_memory_where_other_ranks_wait_within_a_phase(ranks: Ranks, tmp_path: Path) -> None:
    for rank, result in enumerate(ranks.values(_fail_before_the_digests_are_sent, tmp_path / "run", timeout=30)):
        assert result.error == ("MemoryError" if rank == 2 else "DistributedError"), result
        assert "as asked" in result.text
        assert result.files == (NAME,)
        assert result.seed == OLD


# Ranks that die, or come too late.


def _at(call: str, number: int, do: Callable[[Request], object]) -> Callable[[], Fault]:
    """Calls a function before a system call of a kind is made the given time."""
    seen = 0

    def before(request: Request) -> None:
        nonlocal seen
        seen += request.call == call
        if request.call == call and seen == number:
            do(request)

    return lambda: faulty_writes(before=before)


def _attempt_with_stop(folder: Path, rank: int, call: str, number: int, stop: Callable[[Request], object]) -> Result:
    def save(net: nn.Module) -> None:
        ms.save(net, folder / NAME, timeout_seconds=TIMEOUT_SECONDS)

    _put_old(folder, None)
    save(models.sharded("fsdp", seed=OLD))  # connections are made by the first save
    return _attempt(folder, save, _at(call, number, stop), rank, alone=True)


KILLED = {
    "while the first rank creates the file": (0, "fallocate", 1, OLD),
    "while another rank writes": (2, "pwritev", 1, OLD),
    "before another rank has synced": (1, "fsync", 1, OLD),
    "while the first rank writes the header": (0, "pwritev", 2, OLD),
    "before the first rank commits": (0, "replace", 1, OLD),
    "when the first rank has committed": (0, "unlink", 1, NEW),
}


@pytest.mark.slow
@pytest.mark.parametrize("when", KILLED)
def test_a_rank_that_is_killed(when: str, ranks: Ranks, tmp_path: Path) -> None:
    rank, call, number, seed = KILLED[when]
    folder = tmp_path / "run"
    outcomes = ranks.run(_attempt_with_stop, folder, rank, call, number, die)
    assert [outcome.died for outcome in outcomes] == [other == rank for other in range(4)]
    for result in survivors(outcomes):
        assert result.error == "RankLostError"
        # Only the first rank knows whether it has begun to commit.
        assert ("nothing has been changed" in result.text) is (call not in ("replace", "unlink")), result.text
    assert _seed_at(folder / NAME) == seed
    ms.save(models.plain("fsdp", seed=NEW), folder / NAME)
    assert os.listdir(folder) == [NAME]
    assert _seed_at(folder / NAME) == NEW


def _save_steps(folder: Path) -> str:
    """Saves two steps. The first rank dies when the second one is committed and it prunes. Returns the error."""
    net = models.sharded("fsdp", seed=OLD)
    with ms.Store(folder, keep=1, timeout_seconds=TIMEOUT_SECONDS) as store:
        store.save(1, {"model": net})
        dist.barrier()
        with _at("rmdir", 1, die)() if dist.get_rank() == 0 else nullcontext():
            try:
                store.save(2, {"model": net})
            except ms.errors.RankLostError as error:
                return str(error)
    return ""


@pytest.mark.slow
def test_an_error_does_not_deny_a_step_that_the_first_rank_has_committed(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.run(_save_steps, tmp_path / "run")
    assert [outcome.died for outcome in outcomes] == [True, False, False, False]
    for outcome in outcomes[1:]:
        assert "committing step 2; step-000000002 is complete, or does not exist" in outcome.value, outcome
    assert ms.Store(tmp_path / "run").verify() == {2: ""}


def _late(folder: Path, rank: int) -> tuple[Result, Result]:
    """One rank stops until all others have ended a save. Returns what it was, and another save."""
    with late(rank, "a save") as wait_for_others:
        first = _attempt_with_stop(folder, rank, "pwritev", 1, wait_for_others)
    return first, _attempt(folder, lambda net: ms.save(net, folder / NAME), nullcontext, rank)


@pytest.mark.slow
def test_a_first_rank_that_comes_too_late(ranks: Ranks, tmp_path: Path) -> None:
    for first, after in ranks.values(_late, tmp_path / "run", 0):
        assert first.error == "RankLostError", first
        assert after.error == "", after
        assert after.files == (NAME,)
        assert after.seed == NEW


# Ranks that save something else.


def _save_something_else(folder: Path) -> dict[str, tuple[str, Result]]:
    """The error that each save should end with, and how it ends."""
    here = dist.get_rank() == 1
    path = folder / NAME
    _put_old(folder, None)
    (folder.parent / "elsewhere").mkdir(exist_ok=True)

    def with_other_model(net: nn.Module) -> object:
        if here:
            net = models.plain("uneven")
            models.SHARD["fsdp"](net)
        return ms.save(net, path)

    def with_other_buffer(net: Any) -> object:
        net.steps.fill_(NEW + here)
        return ms.save(net, path)

    def with_other_version(net: nn.Module) -> object:
        with mock.patch.object(writing, "__version__", "9.9.9") if here else nullcontext():
            return ms.save(net, path)

    def with_replicas(_: nn.Module) -> object:
        mesh = models.mesh(2, 2)["inner"]  # of the ranks 0 and 1, or of 2 and 3
        values = torch.arange(8.0).view(4, 2)
        same = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)
        ms.save({"w": same}, folder.parent / "same.safetensors", process_group=dist.group.WORLD)
        other = distribute_tensor(values + (dist.get_rank() == 3), mesh, [Shard(0)], src_data_rank=None)
        return ms.save({"w": other}, path, process_group=dist.group.WORLD)

    saves: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
        "directory": (
            "DistributedError",
            lambda net: ms.save(net, (folder.parent / "elsewhere" if here else folder) / NAME),
        ),
        "no directory": ("DistributedError", lambda net: ms.save(net, (folder / "none" if here else folder) / NAME)),
        "name": ("DistributedError", lambda net: ms.save(net, folder / ("other.safetensors" if here else NAME))),
        "suffix": ("UnsavableError", lambda net: ms.save(net, folder / ("other.zip" if here else NAME))),
        "model": ("DistributedError", with_other_model),
        "buffer": ("DistributedError", with_other_buffer),
        "extra": ("DistributedError", lambda net: ms.save(net, path, extra={"rank": int(here)})),
        "option": ("DistributedError", lambda net: ms.save(net, path, shard_size_bytes=1500 if here else None)),
        "argument": ("OptionError", lambda net: ms.save(net, path, shard_size_bytes=-1 if here else None)),
        "replica": ("DistributedError", with_replicas),
        "version": ("DistributedError", with_other_version),
        "timeout": ("OptionError", lambda net: ms.save(net, path, timeout_seconds=-1 if here else 60)),
        "codec": ("CodecError", lambda net: ms.save({"model": net, "x": object() if here else 1}, path)),
        "exists": ("TargetExistsError", lambda net: ms.save(net, path, overwrite=False)),
        "torch": ("UnsavableError", lambda net: ms.save(net, folder / "x.pt")),
    }
    return {name: (error, _attempt(folder, save, nullcontext, 0)) for name, (error, save) in saves.items()}


@pytest.mark.slow
def test_a_rank_that_saves_something_else(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks.values(_save_something_else, tmp_path / "run")
    for results in by_rank:
        assert not {name: (error, result) for name, (error, result) in results.items() if result.error != error}
        assert {(result.files, result.seed) for _, result in results.values()} == {((NAME,), OLD)}
    assert torch.equal(ms.open(tmp_path / "same.safetensors").tensor("w"), torch.arange(8.0).view(4, 2))
    for rank, name, text in (
        (0, "replica", "ranks of different meshes"),
        (0, "directory", "directory that all ranks share"),
        (2, "buffer", "found: steps: 1 of"),
        (0, "version", "ranks 1: model.safetensors, overwrite=True, shard_size_bytes=None"),
        (0, "version", "modelstate 9.9.9"),
        (0, "option", "shard_size_bytes=1500"),
        (0, "extra", "found: extra=: 1 of"),
    ):
        assert text in by_rank[rank][name][1].text
