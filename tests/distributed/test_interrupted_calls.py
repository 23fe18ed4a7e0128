"""Calls that one of four ranks is interrupted in, or raises in between two votes: they end on all ranks."""

import os
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch.distributed as dist

from modelstate import errors
from modelstate.distributed import connections as connections_module
from modelstate.distributed.agreement import Agreement
from modelstate.process import Stopped, stopped_by
from tests.distributed.ranks import Ranks
from tests.distributed.test_agreement import agreement, phases

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


@pytest.mark.parametrize(("kind", "is_noticed"), [(MemoryError, False), (KeyboardInterrupt, True)])
def test_an_error_between_two_votes_ends_the_wait_of_the_others(
    ranks: Ranks, kind: type[BaseException], is_noticed: bool
) -> None:
    outcomes = ranks.values(raised_between_votes, kind, 1, is_noticed, timeout=30)
    names = ["DistributedError", kind.__name__, "DistributedError", "DistributedError"]
    assert outcomes == [(name, "committed") for name in names]
