"""What `torch.distributed.checkpoint` leaves behind after the faults of `test_faults`: the reason for that file."""

import datetime
import os
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from tests.distributed import models, sources
from tests.distributed.models import Net
from tests.distributed.ranks import Ranks
from tests.pains.conftest import StockFails, stock_fails

__all__ = ["stock_fails"]
pytestmark = pytest.mark.slow
TIMEOUT = datetime.timedelta(seconds=2)
PARAMETERS = len([*models.plain("fsdp").parameters()])


def _write(folder: Path) -> None:
    for seed, name in enumerate(("whole", "other"), 7):
        sources.write_dcp(dict(models.plain("fsdp", seed=seed).state_dict()), folder / name)


def _changed(net: Net, before: dict[str, torch.Tensor]) -> int:
    """The number of parameters that this rank holds other values of than before."""
    return sum(not torch.equal(param.to_local(), before[name]) for name, param in net.named_parameters())


class _Reader(dcp.FileSystemReader):
    """Calls a function before it opens the second file for its tensors."""

    def __init__(self, path: Path, before: Callable[[Path], object]) -> None:
        super().__init__(path)
        self._before = before

    def read_data(self, plan: Any, planner: Any) -> Any:
        opened, create_stream = count(1), self.fs.create_stream

        def create(path: Any, mode: str) -> Any:
            if next(opened) == 2:
                self._before(path)
            return create_stream(path, mode)

        self.fs.create_stream = create
        return super().read_data(plan, planner)


def _fail(path: Path) -> None:
    raise OSError(5, "Input/output error", str(path))


def _die(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep(path: Path) -> None:
    time.sleep(1.5 * TIMEOUT.total_seconds())


FAULTS: dict[str, Callable[[Path], object]] = {"io error": _fail, "killed": _die, "late": _sleep}


def _load(folder: Path, fault: str) -> tuple[int, int, str]:
    """Loads with a fault on rank 1; returns how many parameters changed, of how many, and the error."""
    at_fault = dist.get_rank() == 1
    # Each rank of HSDP reads two of the four files.
    net = models.plain("uneven" if at_fault and fault == "other model" else "fsdp", seed=1)
    models.SHARD["hsdp"](net)
    before = {name: param.to_local().clone() for name, param in net.named_parameters()}
    path = folder / ("other" if at_fault and fault == "other file" else "whole")
    reader = _Reader(path, FAULTS[fault]) if at_fault and fault in FAULTS else dcp.FileSystemReader(path)
    error = ""
    try:
        group = dist.new_group(timeout=TIMEOUT)
        dcp.load(get_model_state_dict(net), storage_reader=reader, process_group=group)
    except BaseException as raised:  # CheckpointException is no Exception
        error = type(raised).__name__
    return _changed(net, before), len(before), error


def _load_of_all(ranks: Ranks, folder: Path, fault: str) -> list[tuple[int, int, str]]:
    """Returns the results of `_load` on the ranks that are left."""
    ranks.values(_write, folder)
    outcomes = ranks.run(_load, folder, fault)
    ranks.discard()
    assert not any(outcome.failure for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes if not outcome.died]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_leaves_the_others_loaded(
    fault: str, ranks: Ranks, tmp_path: Path, stock_fails: StockFails
) -> None:
    results = _load_of_all(ranks, tmp_path, fault)
    assert len(results) == (3 if fault == "killed" else 4)
    assert all(error for _, _, error in results)
    stock_fails(f"{fault}: ranks are left with values of the checkpoint", all(changed for changed, _, _ in results))


def test_another_file_on_one_rank_is_not_noticed(ranks: Ranks, tmp_path: Path, stock_fails: StockFails) -> None:
    results = _load_of_all(ranks, tmp_path, "other file")
    stock_fails("other file: no error, and a mixture of both files", results == [(PARAMETERS, PARAMETERS, "")] * 4)


def test_another_model_on_one_rank_is_an_error_before_anything_is_read(ranks: Ranks, tmp_path: Path) -> None:
    assert _load_of_all(ranks, tmp_path, "other model") == [(0, PARAMETERS, "CheckpointException")] * 4


def _load_unfit(folder: Path) -> list[bool]:
    """Loads a checkpoint with another name and with integers; returns whether that was accepted."""
    net = models.sharded("fsdp")
    state = dict(models.plain("fsdp", seed=7).state_dict())
    sources.write_dcp({**state, "more": torch.ones(4)}, folder / "more")
    integers = torch.ones_like(state["head.weight"], dtype=torch.int8)
    sources.write_dcp({**state, "head.weight": integers}, folder / "integers")
    dcp.load(get_model_state_dict(net), checkpoint_id=folder / "more")
    dcp.load(get_model_state_dict(net), checkpoint_id=folder / "integers")
    return [True, bool((models.whole(net.head.weight) == 1).all())]


def test_names_and_dtypes_that_do_not_fit_are_not_noticed(
    ranks: Ranks, tmp_path: Path, stock_fails: StockFails
) -> None:
    more, integers = ranks.values(_load_unfit, tmp_path)[0]
    stock_fails("a name that the model lacks: no error", more)
    stock_fails("integers for weights: no error", integers)
