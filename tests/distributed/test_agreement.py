"""Phases that all ranks end, or that raise on every rank, on four processes."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import modelstate as ms
from modelstate import errors
from modelstate.distributed import connections as connections_module
from modelstate.distributed.agreement import Agreement, Digest, agreement_of
from modelstate.problems import Problem, ProblemKind, plan_error
from tests.distributed import models
from tests.distributed.ranks import Outcome, Ranks, die

pytestmark = pytest.mark.slow


def agreement(timeout_seconds: float = 20) -> Agreement:
    return Agreement(range(4), timeout_seconds)


def phases(do: Callable[[int], object] | None = None, digests: Sequence[int] = (1, 2, 3)) -> str:
    """Two phases. The second one decides."""
    names = ("the model", "the source", "the rules")
    parts = [Digest(name, f"{name} {number}", number) for name, number in zip(names, digests, strict=True)]
    ranks = agreement()
    with ranks.collective():
        with ranks.phase("planning", lambda: parts):
            if do is not None:
                do(dist.get_rank())
        with ranks.phase("reading", decides=True):
            pass
    return "committed"


def good() -> list[str]:
    return [phases() for _ in range(5)]


def raising(ranks: Sequence[int], kind: str) -> str:
    def do(rank: int) -> None:
        if rank not in ranks:
            return
        if kind == "read":
            raise errors.ReadFailedError("reading failed", where="file, byte 7", found=f"EIO of {len(ranks)}")
        if kind == "plan":
            raise plan_error(
                "Net",
                "x.pt",
                [
                    Problem(ProblemKind.MISSING, "a.w", (2,)),
                    *[Problem(ProblemKind.WRONG_SHAPE, "b.w", (1,), (2,))] * (rank == 2),
                ],
            )
        signal.raise_signal(signal.SIGUSR2)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR2, interrupt)
    return phases(do)


def failures(outcomes: Sequence[Outcome], kind: type[Exception]) -> list[str]:
    assert all(outcome.failure is not None and kind.__name__ == outcome.failure.classes[0] for outcome in outcomes), (
        outcomes
    )
    return [outcome.failure.text for outcome in outcomes if outcome.failure is not None]


def test_all_ranks_end_their_phases(ranks: Ranks) -> None:
    assert ranks.values(good) == [["committed"] * 5] * 4


def test_an_error_of_one_rank_is_raised_on_all(ranks: Ranks) -> None:
    texts = failures(ranks.run(raising, [2], "read"), errors.ReadFailedError)
    assert all("rank 2: reading failed" in text and "EIO of 1" in text and "1 of 4 ranks" in text for text in texts)
    assert ranks.values(good) == [["committed"] * 5] * 4  # the connections are as before


def test_the_same_error_of_all_ranks_is_their_own(ranks: Ranks) -> None:
    texts = failures(ranks.run(raising, [0, 1, 2, 3], "read"), errors.ReadFailedError)
    assert all(text.startswith("file, byte 7: reading failed") for text in texts)


def test_the_problems_of_all_ranks_are_in_one_error(ranks: Ranks) -> None:
    outcomes = ranks.run(raising, [1, 2, 3], "plan")
    texts = failures(outcomes, errors.PlanError)
    assert all("ranks 1, 3:" in text and "rank 2:" in text and "b.w" in text for text in texts)
    assert {outcome.failure.problems for outcome in outcomes if outcome.failure} == {("MISSING", "WRONG_SHAPE")}


def test_an_interrupt_of_one_rank_ends_the_others(ranks: Ranks) -> None:
    outcomes = ranks.run(raising, [1], "interrupt")
    failed = [outcome.failure for outcome in outcomes if outcome.failure]
    kinds = ["DistributedError", "KeyboardInterrupt", "DistributedError", "DistributedError"]
    assert [failure.classes[0] for failure in failed] == kinds
    assert all("rank 1: KeyboardInterrupt" in failure.text for failure in failed if failure.is_ours)


def other_calls(kind: str, other: str) -> str:
    """The end of a call of a kind, which is another one on rank 3, and of the next call."""
    call = other if dist.get_rank() == 3 else kind
    ranks, parts = Agreement(range(4), 20, call=call), [Digest("the models", "Net", 1)]
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: phases_of(ranks, lambda: parts),
        "restore": lambda: phases_of(ranks, lambda: parts),
        "loop": lambda: ranks.texts("stopping", "a text"),
        "choice": lambda: ranks.decided("choosing", lambda: "a choice"),
    }
    try:
        calls[call]()
    except errors.DistributedError as error:
        return f"{error.found}, {phases()}"
    return "no error"


def phases_of(ranks: Agreement, digests: Callable[[], Sequence[Digest]]) -> None:
    with ranks.collective(), ranks.phase("planning", digests):
        pass


@pytest.mark.parametrize(
    ("kind", "other"), [("load", "restore"), ("load", "loop"), ("choice", "load"), ("loop", "choice")]
)
def test_ranks_in_different_calls(ranks: Ranks, kind: str, other: str) -> None:
    phase_names = {"load": "planning", "restore": "planning", "loop": "stopping", "choice": "choosing"}
    found = f"ranks 0-2: {kind} ({phase_names[kind]}); ranks 3: {other} ({phase_names[other]})"
    assert ranks.values(other_calls, kind, other, timeout=30) == [f"{found}, committed"] * 4


def killed_after_the_commit() -> list[str]:
    """Rank 2 dies when the others exchange reports of a call. The next one begins later on one of them."""
    ranks = agreement(60)
    with ranks.collective():
        with ranks.phase("planning"):
            pass
        if dist.get_rank() == 2:
            die()
        reported = sorted(ranks.exchanged([dist.get_rank()]))
    time.sleep(1.0 * (dist.get_rank() == 3))
    begun = agreement_of((), dist.group.WORLD, 60)

    try:
        with begun.collective(), begun.phase("planning"):
            return [str(reported), "committed"]
    except errors.RankLostError as error:
        return [str(reported), str(error).partition("\n")[0]]


def test_a_rank_that_is_killed_between_two_calls(ranks: Ranks) -> None:
    outcomes = ranks.run(killed_after_the_commit, timeout=30)
    for rank in (0, 1, 3):
        known, error = outcomes[rank].value
        assert known == f"[{rank}]"
        # A rank that survives is not said to have failed.
        assert re.fullmatch(r"the ranks 0-3, noticed by rank [013]: a rank did not end planning; nothing .*", error)


def lost_before_the_first_vote(connecting: bool) -> list[str]:
    """Rank 2 dies before the ranks meet, or when they have met. Returns the error, and what the others do then."""
    if dist.get_rank() == 2 and not connecting:
        die()
    dying = mock.patch.object(connections_module, "gloo_group", die) if dist.get_rank() == 2 else nullcontext()
    said = []
    with mock.patch.object(connections_module, "CONNECT_SECONDS", -3.0), dying:
        try:
            with Agreement(range(4), 60 if connecting else 1, channel="new").phase("planning"):
                said.append("committed")
        except errors.RankLostError as error:
            said.append(str(error.found))
    with Agreement((0, 1, 3), 20).phase("planning"):
        said.append("committed")
    return said


@pytest.mark.parametrize("connecting", [False, True])
def test_a_rank_that_dies_before_the_first_vote(ranks: Ranks, connecting: bool) -> None:
    outcomes = ranks.run(lost_before_the_first_vote, connecting, timeout=30)
    assert outcomes[2].died
    for outcome in (outcomes[0], outcomes[1], outcomes[3]):
        error, later = outcome.value
        assert connecting or error.endswith("the ranks 2")
        assert later == "committed"  # the other ranks can go on with a mesh of their own


def split_votes() -> str:
    """Some ranks see that all have ended a phase, and others lose the connection in that moment."""
    connections = connections_module.connections_of(dist.group.WORLD, (0, 1, 2, 3), 20, "")
    maximum: Any = connections.maximum

    def broken(*arguments: Any) -> list[int]:
        result: list[int] = maximum(*arguments)
        if dist.get_rank() in (1, 3):
            raise RuntimeError("connection closed by peer")
        return result

    connections.maximum = broken  # type: ignore[method-assign]
    try:
        with agreement().phase("reading", decides=True):
            pass
        return "committed"
    except errors.RankLostError:
        return "not committed"
    finally:
        del connections.maximum


def test_ranks_that_see_different_votes_do_the_same(ranks: Ranks) -> None:
    for _ in range(5):
        assert len(set(ranks.values(split_votes))) == 1


def groups() -> dict[str, object]:
    results: dict[str, object] = {}
    net = models.sharded("fsdp+tp")
    results["mesh"] = agreement_of(net).ranks
    results["plain"] = agreement_of(nn.Linear(2, 2)).ranks
    pair = dist.new_group([0, 1])
    calls = {"world": "modelstate.load", "pair": "modelstate.load", "pair of a store": "Store.save"}
    for name, call in calls.items():
        group = dist.group.WORLD if name == "world" else pair
        try:
            results[name] = agreement_of(net, group, call=call).ranks
        except errors.DistributedError as error:
            results[name] = str(error)
    return results


def test_the_ranks_are_those_of_the_mesh(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.values(groups)):
        assert found["mesh"] == found["world"] == (0, 1, 2, 3)
        assert found["plain"] == ()
        # Two of the ranks are in the group: all of them get both errors.
        assert "ranks 0-1: a mesh of a DTensor has ranks that do not take part in" in str(found["pair"]), rank
        assert "meshes over the ranks 0-3\n" in str(found["pair"])
        assert "ranks 2-3: this rank is not among the ranks" in str(found["pair"])
        assert "to do: modelstate.load(process_group=)" in str(found["pair"])
        assert "to do: modelstate.Store(process_group=)" in str(found["pair of a store"])


class Own(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        pytest.fail("the code of the model was called")


@pytest.mark.parametrize("cls", [nn.Linear, Own])
def test_dtensors_without_a_process_group(cls: type[nn.Linear]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    net = cls(2, 2)
    fully_shard(net)
    dist.destroy_process_group()
    with pytest.raises(errors.DistributedError, match="there is no process group"):
        ms.load(net, {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})


VOTE_AND_END = """
import atexit, os, sys

def count_threads_of_gloo():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    os.write(1, b"%d\\n" % sum("gloo" in name for name in names))

atexit.register(count_threads_of_gloo)  # first, so that it runs last
import torch.distributed as dist
from modelstate.distributed.agreement import Agreement

other = os.fork()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(other == 0), world_size=2)
with Agreement((0, 1), 20).phase("the last vote"):
    pass
dist.destroy_process_group()
"""


def test_no_thread_of_gloo_is_left_when_the_interpreter_ends(tmp_path: Path) -> None:
    # Such a thread may have a tensor, and aborts the process where it releases it at that moment.
    command = [sys.executable, "-c", VOTE_AND_END, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["0", "0"]


def load_where_one_rank_has_no_memory() -> tuple[str, ...]:
    ranks = agreement_of(models.sharded("fsdp"), None, 20)
    with ranks.before("planning"):
        if dist.get_rank() == 1:
            raise MemoryError("no memory")
    with ranks.phase("planning"):
        pass
    return ()


def test_an_error_of_another_library_before_a_phase_reaches_all_ranks(ranks: Ranks) -> None:
    outcomes = ranks.run(load_where_one_rank_has_no_memory)
    kinds = [outcome.failure.classes[0] for outcome in outcomes if outcome.failure]
    assert kinds == ["DistributedError", "MemoryError", "DistributedError", "DistributedError"]


def raised_between_votes(kind: type[BaseException], rank: int, is_noticed: bool) -> tuple[str, str]:
    """The error of a call in which a rank raises between two votes, and the end of the next call.

    The other ranks may notice it before their next vote.
    """
    ranks, kind_of_error = agreement(60), ""
    try:
        with ranks.collective():
            with suppress(errors.ReadFailedError), ranks.phase("looking"):
                raise errors.ReadFailedError("an error after which all ranks go on")
            with ranks.phase("planning"):
                pass
            if dist.get_rank() == rank:
                raise kind("as asked")
            connections = connections_module.connections_of(dist.group.WORLD, ranks.ranks, 60, "")
            while is_noticed and not connections.is_abandoned():
                time.sleep(0.01)
            within = agreement(60)  # a call within the call, as of the code of a model
            with within.collective(), within.phase("reading"):
                pass
    except BaseException as error:
        kind_of_error = type(error).__name__
    dist.barrier()
    return kind_of_error, phases()


def interrupted_before_a_call() -> tuple[str, str]:
    """The error of a call before which a rank is interrupted, when the others have not begun it; and the next call."""
    ranks, kind_of_error = agreement(5), phases()
    connections = connections_module.connections_of(dist.group.WORLD, ranks.ranks, 60, "")
    try:
        with ranks.before("planning"):
            if dist.get_rank() == 1:
                raise KeyboardInterrupt
            while not connections.is_abandoned():
                time.sleep(0.01)
        with ranks.collective(), ranks.phase("planning"):
            pass
    except BaseException as error:
        kind_of_error = type(error).__name__
    dist.barrier()
    return kind_of_error, phases()


def test_an_interrupt_before_a_call_ends_the_wait_of_the_others(ranks: Ranks) -> None:
    names = ["DistributedError", "KeyboardInterrupt", "DistributedError", "DistributedError"]
    assert ranks.values(interrupted_before_a_call) == [(name, "committed") for name in names]


@pytest.mark.parametrize(("kind", "is_noticed"), [(MemoryError, False), (KeyboardInterrupt, True)])
def test_an_error_between_two_votes_ends_the_wait_of_the_others(
    ranks: Ranks, kind: type[BaseException], is_noticed: bool
) -> None:
    outcomes = ranks.values(raised_between_votes, kind, 1, is_noticed, timeout=30)
    names = ["DistributedError", kind.__name__, "DistributedError", "DistributedError"]
    assert outcomes == [(name, "committed") for name in names]


def alarmed(place: str) -> tuple[str, str, str]:
    """The error of a call in which an alarm of rank 1 raises while it waits for rank 0; and the next call."""
    ranks, kind_of_error, text = agreement(60), phases(), ""
    connections = connections_module.connections_of(dist.group.WORLD, ranks.ranks, 60, "")

    def alarm(number: int, frame: object) -> None:
        raise TimeoutError("an alarm")

    signal.signal(signal.SIGALRM, alarm)
    try:
        with ranks.collective():
            with ranks.phase("reading", decides=place == "the last vote"):
                if dist.get_rank() == 1:
                    signal.setitimer(signal.ITIMER_REAL, 0.2)
                while dist.get_rank() == 0 and not connections.is_abandoned():
                    time.sleep(0.01)
                if place == "connecting" and dist.get_rank() < 2:
                    ranks.connect((0, 1))
            with ranks.phase("the end"):  # the others may have seen that all have voted before
                pass
    except Exception as error:
        kind_of_error, text = type(error).__name__, str(error)
    dist.barrier()
    return kind_of_error, text, phases()


@pytest.mark.parametrize("place", ["a vote", "the last vote", "connecting"])
def test_an_alarm_while_a_rank_waits_is_raised_as_it_is(ranks: Ranks, place: str) -> None:
    for rank, (kind, text, then) in enumerate(ranks.values(alarmed, place, timeout=30)):
        assert (kind, then) == ("TimeoutError" if rank == 1 else "DistributedError", "committed")
        assert text == "an alarm" if rank == 1 else "rank 1: TimeoutError: an alarm" in text
