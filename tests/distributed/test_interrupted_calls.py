"""Calls that one of four ranks is interrupted in, or raises in between two votes: they end on all ranks."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch.distributed as dist

from modelstate import errors
from modelstate.distributed import connections as connections_module
from modelstate.distributed.agreement import Agreement
from modelstate.distributed.reports import Digest
from modelstate.process import Stopped, stopped_by
from modelstate.torch_compat import sharding
from tests.distributed.ranks import Ranks
from tests.distributed.test_agreement import agreement, end_of, phases

pytestmark = pytest.mark.slow


def interrupted_in_the_wait(is_cancelled: bool) -> str:
    """Rank 0 does not come, and rank 1 is interrupted, or cancelled, while it waits for it."""
    if dist.get_rank() == 0:
        return ""
    stop = threading.Event()
    if dist.get_rank() == 1:
        do = stop.set if is_cancelled else lambda: os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.3, do).start()
    try:
        with stopped_by(stop.is_set), Agreement(range(4), 60, channel=f"{is_cancelled=}").phase("planning"):
            return "committed"
    except (KeyboardInterrupt, Stopped) as error:
        return type(error).__name__
    except errors.ModelStateError as error:
        return error.what.split("\n")[-1]


@pytest.mark.parametrize(
    ("is_cancelled", "own", "others"),
    [(False, "KeyboardInterrupt", "KeyboardInterrupt"), (True, "Stopped", "this rank has cancelled it")],
)
def test_an_interrupt_in_the_wait_for_a_rank_ends_the_wait_of_the_others(
    ranks: Ranks, is_cancelled: bool, own: str, others: str
) -> None:
    reason = f"rank 1: {others}"
    assert ranks.values(interrupted_in_the_wait, is_cancelled, timeout=30) == ["", own, reason, reason]


def raised_between_votes(kind: type[BaseException], rank: int, is_noticed: bool) -> tuple[str, str]:
    """The error of a call in which a rank raises between two votes, and the end of the next call.

    The other ranks may notice it before their next vote.
    """
    ranks, kind_of_error = agreement(60), ""
    try:
        with ranks.held():
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
            with within.held(), within.phase("reading"):
                pass
    except BaseException as error:
        kind_of_error = type(error).__name__
    dist.barrier()
    return kind_of_error, phases()


@pytest.mark.parametrize(("kind", "is_noticed"), [(MemoryError, False), (KeyboardInterrupt, True)])
def test_an_error_between_two_votes_ends_the_wait_of_the_others(
    ranks: Ranks, kind: type[BaseException], is_noticed: bool
) -> None:
    outcomes = ranks.values(raised_between_votes, kind, 1, is_noticed, timeout=30)
    names = ["DistributedError", kind.__name__, "DistributedError", "DistributedError"]
    assert outcomes == [(name, "committed") for name in names]


def interrupted_call(when: str, is_connected: bool) -> list[str]:
    """The ends of three calls: rank 1 is interrupted in the second, which rank 3 begins when rank 1 has ended it.

    Or all ranks are interrupted before its first vote.
    """
    key = f"interrupted {when}, {is_connected=}"
    ranks, interrupted = Agreement(range(4), 20, channel=key), sharding.default_store()

    def interrupt_at(place: str) -> None:
        if when == place and dist.get_rank() == 1:
            raise KeyboardInterrupt

    def first_call() -> None:
        with ranks.held():
            for name in ("planning", "committing"):
                with ranks.phase(name):
                    pass

    def second_call() -> None:
        with ranks.held():
            interrupt_at("before the first vote")
            if when == "on all ranks":
                raise KeyboardInterrupt
            if when == "after the last vote, over new connections":
                ranks.abandon(MemoryError())
            with ranks.phase("planning"):
                interrupt_at("within the first phase")
            with ranks.phase("committing"):
                pass
            interrupt_at("after the last vote")
            interrupt_at("after the last vote, over new connections")

    ends = [end_of(first_call)] if is_connected else []
    if dist.get_rank() == 3 and not when.startswith("after the last vote"):
        interrupted.wait([key])
    ends.append(end_of(second_call))
    if dist.get_rank() == 1:
        interrupted.set(key, "")
    dist.barrier()
    return [*ends, end_of(first_call)]


@pytest.mark.parametrize(
    ("when", "is_connected"),
    [
        ("before the first vote", True),
        ("before the first vote", False),
        ("within the first phase", True),
        ("after the last vote", True),
        ("after the last vote", False),
        ("after the last vote, over new connections", True),
        ("on all ranks", True),
        ("on all ranks", False),
    ],
)
def test_ranks_that_begin_a_call_which_another_one_has_ended(ranks: Ranks, when: str, is_connected: bool) -> None:
    others = "committed" if when.startswith("after the last vote") else "DistributedError"
    if when == "on all ranks":
        others = "KeyboardInterrupt"
    before = ["committed"] if is_connected else []
    wanted = [[*before, end, "committed"] for end in (others, "KeyboardInterrupt", others, others)]
    assert ranks.values(interrupted_call, when, is_connected, timeout=40) == wanted


def interrupted_before_its_turn() -> list[str]:
    """The ends of two calls and of the next one: on rank 1 the thread of the second is interrupted in the first."""
    key, ends = "before its turn", list[str]()
    is_begun, is_interrupted = threading.Event(), threading.Event()

    def call(do: Callable[[], object] = lambda: None) -> None:
        ranks = Agreement(range(4), 60, channel=key)
        with ranks.held():
            with ranks.phase("planning"):
                do()
            with ranks.phase("committing"):
                pass

    def wait() -> None:
        is_begun.set()
        is_interrupted.wait()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    thread = threading.Thread(target=lambda: ends.append(end_of(lambda: call(wait))))
    thread.start()
    is_begun.wait()
    if dist.get_rank() == 1:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        second = end_of(call)
        signal.signal(signal.SIGALRM, before)
    is_interrupted.set()
    thread.join()
    ends.append(second if dist.get_rank() == 1 else end_of(call))
    dist.barrier()
    return [*ends, end_of(call)]


def test_an_interrupt_in_the_wait_for_another_thread_ends_the_wait_of_the_others(ranks: Ranks) -> None:
    others = ["committed", "DistributedError", "committed"]
    wanted = [others, ["committed", "KeyboardInterrupt", "committed"], others, others]
    assert ranks.values(interrupted_before_its_turn, timeout=30) == wanted


def interrupted_calls() -> list[str]:
    """The errors of three calls. Rank 1 is interrupted in two of them, before rank 3 begins the first."""
    interrupted, ends = sharding.default_store(), []
    if dist.get_rank() == 3:
        interrupted.wait(["two calls"])
    for number in range(3):
        ranks = Agreement(range(4), 20, channel="two calls")
        try:
            with ranks.held():
                if dist.get_rank() == 1 and number < 2:
                    raise KeyboardInterrupt(number)
                with ranks.phase("planning", lambda number=number: [Digest("the call", "", number)]):
                    ends.append("committed")
        except (KeyboardInterrupt, errors.DistributedError) as error:
            ends.append(str(getattr(error, "what", error))[-1])
        if dist.get_rank() == 1 and number == 1:
            interrupted.set("two calls", "")
    return ends


def test_a_rank_that_begins_two_calls_which_another_one_has_ended(ranks: Ranks) -> None:
    assert ranks.values(interrupted_calls, timeout=40) == [["0", "1", "committed"]] * 4


def interrupted_after_a_timeout() -> list[str]:
    """The ends of calls. Rank 1 is interrupted when ranks 0 and 2 wait no longer, and rank 3 begins its call then."""
    key, ends, interrupted = "after a timeout", list[str](), sharding.default_store()

    def call(timeout_seconds: float, before: Callable[[], object] = lambda: None) -> None:
        ranks = Agreement(range(4), timeout_seconds, channel=key)
        with ranks.held():
            before()
            with ranks.phase("planning"):
                pass

    def interrupt() -> None:
        connections = connections_module.connections_of(dist.group.WORLD, (0, 1, 2, 3), 20, key)
        while not connections.is_abandoned():
            time.sleep(0.01)
        raise KeyboardInterrupt

    ends.append(end_of(lambda: call(20)))
    if dist.get_rank() == 1:
        ends.append(end_of(lambda: call(20, interrupt)))
        interrupted.set(key, "")
    elif dist.get_rank() != 3:
        ends.append(end_of(lambda: call(0.3)))
    interrupted.wait([key])
    return [*ends, end_of(lambda: call(20))]


def test_an_interrupt_after_a_timeout_does_not_end_the_call_of_a_late_rank(ranks: Ranks) -> None:
    lost, end = ["committed", "RankLostError", "committed"], ["committed", "committed"]
    wanted = [lost, ["committed", "KeyboardInterrupt", "committed"], lost, end]
    assert ranks.values(interrupted_after_a_timeout, timeout=40) == wanted
