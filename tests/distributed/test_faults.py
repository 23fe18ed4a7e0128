"""A fault on one rank is an error on all of them, and no rank has changed anything."""

import errno
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import modelstate as ms
from modelstate.distributed import connections
from modelstate.loading import collective, load as loading
from modelstate.transaction.transaction import Transaction
from tests.distributed import models, sources
from tests.distributed.models import Net
from tests.distributed.ranks import Ranks, die, late, survivors
from tests.faults import Request, faulty_reads

FAULTY = 1
"""The rank with the fault."""
TIMEOUT_SECONDS = 1.0
"""Of the ranks that wait for a rank in vain."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a load left on one rank."""

    error: str
    """The class of the error; empty where there was none."""
    text: str
    is_ours: bool
    changed: tuple[str, ...]
    """The names of the tensors that have other bits, or are other objects, than before; of the optimizer too."""


def _write(folder: Path) -> None:
    for seed, name in enumerate(("whole", "other"), 7):
        sources.write(dict(models.plain("fsdp", seed=seed).state_dict()), folder / name, "safetensors")
    if dist.get_rank() == 0:
        ms.save({"model": models.plain("fsdp", seed=7)}, folder / "run.safetensors", overwrite=True)
    data = (folder / "whole" / "model.safetensors").read_bytes()
    if dist.get_rank() == 0:
        (folder / "short.safetensors").write_bytes(data[: len(data) * 2 // 3])
    fine_tuned = dict(models.plain("fsdp", seed=7).state_dict())
    fine_tuned["head.weight"] = fine_tuned["head.weight"] + 1
    sources.write(fine_tuned, folder / "fine-tuned", "safetensors")


def _trained(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    """A sharded network, and an optimizer with state."""
    net = models.sharded(kind)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return net, optimizer


def _tensors(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    named = [*net.named_parameters(remove_duplicate=False), *net.named_buffers()]
    named += [
        (f"optimizer.{index}.{key}", value)
        for index, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    ]
    return dict(named)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return models.local(tensor).detach().reshape(-1).view(torch.uint8)


def _attempt(
    load: Callable[[Net], object], fault: Callable[[], AbstractContextManager[object]], kind: str = "fsdp"
) -> Result:
    """Loads into a new network, with the fault if this is the rank for it."""
    net, optimizer = _trained(kind)
    tensors = _tensors(net, optimizer)
    before = {name: (models.local(tensor).data_ptr(), models.local(tensor).clone()) for name, tensor in tensors.items()}
    error: BaseException | None = None
    dist.barrier()
    with fault() if dist.get_rank() == FAULTY else nullcontext():
        try:
            load(net)
        except Exception as raised:
            error = raised
    after = _tensors(net, optimizer)
    changed = tuple(
        name
        for name, (address, values) in before.items()
        if after[name] is not tensors[name]
        or models.local(after[name]).data_ptr() != address
        or not torch.equal(_bits(after[name]), _bits(values))
    )
    text = "" if error is None else str(error)
    return Result(type(error).__name__ if error else "", text, isinstance(error, ms.ModelStateError), changed)


# Errors of reads.


def _fail_at_each_request(folder: Path) -> list[tuple[str, Result]]:
    path = folder / "whole" / "model.safetensors"
    with faulty_reads() as seen:
        ms.load(models.sharded("fsdp"), path)
    requests: list[Any] = [seen.requests]
    dist.broadcast_object_list(requests, src=FAULTY)
    return [
        (
            request.call,
            _attempt(
                lambda net: ms.load(net, path),
                lambda number=request.number: faulty_reads(at=number, error=OSError(errno.EIO, "bad sector")),
            ),
        )
        for request in requests[0]
    ]


@pytest.mark.slow
def test_an_io_error_at_each_request_in_turn(ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(_write, tmp_path)
    by_rank = ranks.values(_fail_at_each_request, tmp_path)
    assert len(by_rank[0]) > 10
    failed = 0
    for attempts in zip(*by_rank, strict=True):
        calls, results = zip(*attempts, strict=True)
        errors = {result.error for result in results}
        if errors == {""}:  # the request is not needed, or it is made again
            assert calls[0] in ("preadv_cached", "stat", "fstat", "mmap"), calls
            continue
        failed += 1
        assert len(errors) == 1, errors
        for result in results:
            assert result.is_ours, result
            assert not result.changed
            assert f"rank {FAULTY}" in result.text or result is results[FAULTY]
    assert failed > 5


# Ranks that die, or come too late.


def _stop_at(place: str, stop: Callable[[], object]) -> AbstractContextManager[object]:
    """Calls `stop` at a place within a load."""
    kind, _, number = place.partition(" ")
    if kind == "request":

        def at_request(request: Request) -> None:
            stop()

        return faulty_reads(at=int(number), before=at_request)
    if kind == "vote":
        return _before_call(connections.Connections, "maximum", int(number), stop)
    return _before_call(Transaction, "commit", 1, stop)


@contextmanager
def _before_call(owner: Any, name: str, number: int, stop: Callable[[], object]) -> Iterator[None]:
    real, calls = getattr(owner, name), 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            stop()
        return real(*args, **options)

    with mock.patch.object(owner, name, call):
        yield


def _attempt_with_stop(folder: Path, place: str, stop: Callable[[], object]) -> Result:
    path = folder / "whole" / "model.safetensors"
    ms.load(models.sharded("fsdp"), path)  # connections are made by the first load
    return _attempt(lambda net: ms.load(net, path, timeout_seconds=TIMEOUT_SECONDS), lambda: _stop_at(place, stop))


BEFORE_THE_DECISION = ("request 1", "vote 1", "request 12", "vote 3")
"""Places within the phases of a load: opening, the vote of planning, reading, and the vote that decides."""


@pytest.mark.slow
@pytest.mark.parametrize("place", BEFORE_THE_DECISION)
def test_a_rank_that_is_killed_before_the_decision(place: str, ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(_write, tmp_path)
    outcomes = ranks.run(_attempt_with_stop, tmp_path, place, die)
    assert [outcome.died for outcome in outcomes] == [rank == FAULTY for rank in range(4)]
    for result in survivors(outcomes):
        assert result.error == "RankLostError", result
        assert not result.changed, result


@pytest.mark.slow
def test_a_rank_that_is_killed_in_the_commit_does_not_keep_the_others_from_theirs(ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(_write, tmp_path)
    results = survivors(ranks.run(_attempt_with_stop, tmp_path, "commit", die))
    assert len(results) == 3, results[FAULTY]
    assert len({(result.error, result.changed) for result in results}) == 1
    assert all(result.changed for result in results)


def _interrupted_at_the_commit(folder: Path) -> tuple[str, bool]:
    """The error of a rank with Ctrl-C behind the vote that decides, and whether the rank has loaded."""
    path = folder / "whole" / "model.safetensors"
    net = models.sharded("fsdp")
    fault = _before_call(loading, "commit_values", 1, lambda: signal.raise_signal(signal.SIGINT))
    error = ""
    try:
        with fault if dist.get_rank() == FAULTY else nullcontext():
            ms.load(net, path)
    except KeyboardInterrupt:
        error = "KeyboardInterrupt"
    dist.barrier()  # an interrupted rank closes its connections, which fails a load that has begun on the others
    loaded = models.sharded("fsdp")
    ms.load(loaded, path)
    pairs = zip(net.parameters(), loaded.parameters(), strict=True)
    return error, all(torch.equal(models.local(one), models.local(other)) for one, other in pairs)


@pytest.mark.slow
def test_an_interrupt_behind_the_decision_waits_for_the_commit(ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(_write, tmp_path)
    outcomes = ranks.values(_interrupted_at_the_commit, tmp_path)
    assert outcomes == [("KeyboardInterrupt" if rank == FAULTY else "", True) for rank in range(4)]


def _late(folder: Path, place: str) -> tuple[Result, Result]:
    """One rank stops until all others have ended a load. Returns what it was, and another load."""
    with late(FAULTY, place) as wait_for_others:
        first = _attempt_with_stop(folder, place, wait_for_others)
    return first, _attempt(lambda net: ms.load(net, folder / "whole" / "model.safetensors"), nullcontext)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["request 12", "vote 3"])
def test_a_rank_that_comes_too_late(place: str, ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(_write, tmp_path)
    for rank, (first, next_load) in enumerate(ranks.values(_late, tmp_path, place)):
        assert first.error == "RankLostError", (rank, first)
        assert not first.changed
        assert next_load.error == ""
        assert next_load.changed


def _fail_in_place(folder: Path) -> Result:
    path = folder / "whole" / "model.safetensors"

    def fail() -> None:
        raise OSError(errno.EIO, "bad sector")

    return _attempt(lambda net: ms.load(net, path, in_place=True), lambda: _before_call(loading, "overwrite", 1, fail))


@pytest.mark.slow
def test_an_error_does_not_promise_what_a_read_in_place_has_overwritten(ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(_write, tmp_path)
    for rank, result in enumerate(ranks.values(_fail_in_place, tmp_path)):
        assert bool(result.changed) == (rank != FAULTY)
        if rank != FAULTY:
            assert "bad sector" in result.text
            assert "values that are read in place are overwritten" in result.text
            assert "nothing has been changed" not in result.text


# Errors where the other ranks wait for this one within a phase.


def _fail_while_others_wait(folder: Path, what: str) -> tuple[Result, Result]:
    """A load with a fault on one rank, and the next one without."""
    whole = folder / "run.safetensors"

    def load(net: Net) -> None:
        if what == "damage":  # of the copy that this rank reads; the others wait for random numbers of the first rank
            rank = dist.get_rank()
            source = folder / f"damaged {rank}.safetensors" if rank == FAULTY else whole
            options: dict[str, Any] = {"init_missing": True}
            options |= {"rules": [ms.rules.Ignore("head.weight")]}
            ms.load(net, source, key="model", verify=True, **options)
        else:
            ms.load(net, whole, key="model", read_once=True)

    def fault() -> AbstractContextManager[object]:
        if what == "damage":
            return nullcontext()
        return mock.patch.object(collective, "allocate", side_effect=MemoryError("as asked"))

    data = bytearray(whole.read_bytes())
    data[-5] ^= 1
    if dist.get_rank() == FAULTY:
        (folder / f"damaged {FAULTY}.safetensors").write_bytes(data)
    failed = _attempt(load, fault, "hsdp")
    dist.barrier()
    return failed, _attempt(lambda net: ms.load(net, whole, key="model", read_once=True), nullcontext, "hsdp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "own", "others"),
    [("damage", "ChecksumError", "ChecksumError"), ("no memory for replicas", "MemoryError", "DistributedError")],
)
def test_an_error_where_other_ranks_wait_within_a_phase(
    what: str, own: str, others: str, ranks: Ranks, tmp_path: Path
) -> None:
    ranks.values(_write, tmp_path)
    for rank, (failed, later) in enumerate(ranks.values(_fail_while_others_wait, tmp_path, what, timeout=30)):
        assert failed.error == (own if rank == FAULTY else others), failed
        assert not failed.changed
        assert not later.error
        assert later.changed


# Ranks that load something else.


def _raise_on_its_rank(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == FAULTY:
        raise ValueError("as asked")
    return tensor


def _load_something_else(folder: Path) -> dict[str, tuple[str, Result]]:
    """The error that each load should end with, and how it ends."""
    path = folder / "whole" / "model.safetensors"
    here = dist.get_rank() == FAULTY
    pair = dist.new_group([0, FAULTY])
    state = dict(models.plain("fsdp").state_dict())

    def with_other_model(net: Net) -> object:
        other = models.plain("uneven")
        models.SHARD["fsdp"](other)
        return ms.load(other if here else net, path)

    loads: dict[str, tuple[str, Callable[[Net], object]]] = {
        "file": (
            "DistributedError",
            lambda net: ms.load(net, folder / ("other" if here else "whole") / "model.safetensors"),
        ),
        "another head": (
            "DistributedError",
            lambda net: ms.load(net, folder / ("fine-tuned" if here else "whole") / "model.safetensors"),
        ),
        "no file": (
            "SourceNotFoundError",
            lambda net: ms.load(net, folder / ("none" if here else "whole") / "model.safetensors"),
        ),
        "model": ("PlanError", with_other_model),
        "rules": (
            "DistributedError",
            lambda net: ms.load(net, path, rules=[ms.rules.Cast("*.bias", torch.float32)] if here else []),
        ),
        "options": ("DistributedError", lambda net: ms.load(net, path, dtype=torch.bfloat16 if here else None)),
        "short": ("TruncatedFileError", lambda net: ms.load(net, folder / "short.safetensors" if here else path)),
        "timeout": ("OptionError", lambda net: ms.load(net, path, timeout_seconds="soon" if here else 20)),  # type: ignore[arg-type]
        "group": ("DistributedError", lambda net: ms.load(net, path, process_group=pair if here else None)),
        "no group": ("DistributedError", lambda net: ms.load(net, path, process_group=5 if here else None)),  # type: ignore[arg-type]
        "argument": ("OptionError", lambda net: ms.load(net, path, max_memory_bytes=-1 if here else None)),
        "no model": ("OptionError", lambda net: ms.load(5 if here else net, path, process_group=dist.group.WORLD)),  # type: ignore[arg-type]
        "order": ("OptionError", lambda net: ms.load(*((path, net) if here else (net, path)))),  # type: ignore[arg-type]
        "keyword of torch": ("OptionError", lambda net: ms.load(net, path, **({"strict": True} if here else {}))),
        "unknown keyword": ("OptionError", lambda net: ms.load(net, path, **({"verfy": True} if here else {}))),
        "background": ("OptionError", lambda net: ms.load(net, path, background=here)),
        "restore": (
            "SourceNotFoundError",
            lambda net: ms.restore({"model": net}, folder / ("none" if here else "run.safetensors")),
        ),
        "objects": (
            "OptionError",
            lambda net: ms.restore({"model": net, **({"a..b": 1} if here else {})}, folder / "run.safetensors"),
        ),
        "restored names": (
            "OptionError",
            lambda net: ms.restore({"model": net}, folder / "run.safetensors", allow_missing=here or ()),
        ),
        "transform": ("TransformError", lambda net: ms.load(net, path, transform=_raise_on_its_rank)),
        "unfit": ("PlanError", lambda net: ms.load(net, {"embed.weight": torch.ones(3)})),
        "surplus": ("PlanError", lambda net: ms.load(net, {**state, "more": torch.ones(4)})),
        "integers": (
            "PlanError",
            lambda net: ms.load(net, {**state, "head.weight": torch.ones(20, 8, dtype=torch.int8)}),
        ),
    }
    results = {}
    for name, (error, load) in loads.items():
        results[name] = error, _attempt(load, nullcontext)
        dist.barrier()
    return results


@pytest.mark.slow
def test_a_rank_that_loads_something_else(ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(_write, tmp_path)
    by_rank = ranks.values(_load_something_else, tmp_path)
    for results in by_rank:
        assert not {name: (error, result) for name, (error, result) in results.items() if result.error != error}
        assert not any(result.changed for _, result in results.values())
    for name in ("file", "another head", "rules", "options"):
        assert f"ranks {FAULTY}: " in by_rank[0][name][1].text, by_rank[0][name][1].text
    for name in ("no file", "short", "timeout", "group", "objects"):
        assert f"rank {FAULTY}: " in by_rank[0][name][1].text, by_rank[0][name][1].text
