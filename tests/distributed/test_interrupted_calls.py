"""Calls that one of four ranks is interrupted in, or raises in between two votes: they end on all ranks."""

import time
from contextlib import suppress

import pytest
import torch.distributed as dist

from modelstate import errors
from modelstate.distributed import connections as connections_module
from tests.distributed.ranks import Ranks
from tests.distributed.test_agreement import agreement, phases

pytestmark = pytest.mark.slow


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
