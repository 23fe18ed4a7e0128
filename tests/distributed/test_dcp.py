"""`ms.dcp` below the real `torch.distributed.checkpoint`, on four ranks: FSDP2 with its optimizer, and others."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor

import modelstate as ms
from tests.distributed import models
from tests.distributed.ranks import Outcome, Ranks

pytestmark = pytest.mark.slow
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def trained(kind: str, seed: int) -> tuple[models.Net, torch.optim.Optimizer]:
    """A sharded network after a step of AdamW."""
    net = models.sharded(kind, seed=seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 / (1 + seed), fused=True)
    for parameter in net.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return net, optimizer


def whole_state(net: models.Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of all ranks, on rank 0."""
    optim: Any = get_optimizer_state_dict(net, optimizer, options=FULL)
    return {"model": get_model_state_dict(net, options=FULL), "optimizer": optim}


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def load_whole(kind: str, path: str) -> dict[str, Any]:
    """Returns the state of a model and an optimizer that a file was loaded into."""
    net, optimizer = trained(kind, seed=2)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, storage_reader=ms.dcp.Reader(path, verify=True))
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return whole_state(net, optimizer)


def load_training(kind: str, path: str) -> bool:
    """Whether a model and an optimizer become those of the file."""
    found = load_whole(kind, path)
    return dist.get_rank() > 0 or equal(found, torch.load(f"{path}.pt", weights_only=False))


def write_training(kind: str, path: str) -> None:
    state = whole_state(*trained(kind, seed=1))
    if dist.get_rank() == 0:
        ms.save(state, path)
        torch.save(state, f"{path}.pt")
    dist.barrier()


@pytest.mark.parametrize("kind", ["fsdp", "fsdp+tp", "shard1", "empty"])
def test_a_model_and_its_optimizer(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "x.safetensors")
    ranks.values(write_training, kind, path)
    assert ranks.values(load_training, kind, path) == [True] * 4


def load_wrongly(folder: str, what: str) -> bool:
    """Loads something that does not fit on rank 1. Returns whether any tensor has changed."""
    net, options = models.sharded("fsdp"), dict[str, Any]()
    path, state = f"{folder}/x.safetensors", net.state_dict()
    before = models.gathered(net)
    if what == "an unexpected name":
        del state["head.weight"]
    elif dist.get_rank() == 1 and what == "another source":
        path = f"{folder}/y.safetensors"
    elif dist.get_rank() == 1 and what == "a missing file":
        path = f"{folder}/z.safetensors"
    elif what == "damage":
        path, options = f"{folder}/damaged.safetensors", {"verify": True}
    try:
        dcp.load(state, storage_reader=ms.dcp.Reader(path, **options))
    except BaseException:
        # The state dict has the parameters themselves.
        assert equal(before, models.gathered(net))
        raise
    return False


def message(outcome: Outcome) -> str:
    assert outcome.failure is not None
    assert "CheckpointException" in outcome.failure.classes, outcome.failure.traceback
    return outcome.failure.text


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("an unexpected name", "head.weight"),
        ("another source", "the ranks have different sources"),
        ("a missing file", "z.safetensors"),
        ("damage", "are not what their checksums say"),
    ],
)
def test_all_ranks_raise_before_a_tensor_is_touched(ranks: Ranks, what: str, text: str, tmp_path: Path) -> None:
    ms.save(models.plain("fsdp", seed=5), tmp_path / "x.safetensors")
    ms.save(models.plain("fsdp", seed=6), tmp_path / "y.safetensors")
    data = bytearray((tmp_path / "x.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(data)
    for outcome in ranks.run(load_wrongly, str(tmp_path), what):
        assert text in message(outcome)


# Saving.


def save_training(kind: str, path: str, way: str) -> bool:
    """Saves a model and an optimizer, and compares the file with the whole state on rank 0."""
    net, optimizer = trained(kind, seed=1)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    rank = dist.get_rank()
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 5, "losses": [0.5, 0.25]}
    state["loader"] = {f"rank_{rank}": {"position": 10 * rank}}  # names that only one rank has
    if way == "async":
        group = dist.new_group(backend="gloo")  # the gathers of DCP's thread are over a group of its own
        saving = dcp.async_save(state, storage_writer=ms.dcp.Writer(path, timeout_seconds=20), process_group=group)
        time.sleep(0.003 * rank)  # the ranks vote in another order in both threads
        for number in range(3):
            ms.save(net, f"{path}-{number}.safetensors", timeout_seconds=20)
        saving.result()
        assert ms.open(f"{path}-2.safetensors").keys() == net.state_dict().keys()
    else:
        dcp.save(state, checkpoint_id=path, storage_writer=ms.dcp.Writer(shard_size_bytes=2000))
    whole = whole_state(net, optimizer)
    dist.barrier()
    found = ms.open(path)
    assert found.extra["step"] == 5
    assert found.extra["losses"] == [0.5, 0.25]
    assert [found.extra[f"loader.rank_{number}.position"] for number in range(4)] == [0, 10, 20, 30]
    return rank > 0 or all(equal(value, found.value(part)) for part, value in whole.items())


@pytest.mark.parametrize(("kind", "way"), [("fsdp+tp", "sync"), ("shard1", "sync"), ("fsdp", "async")])
def test_a_save_has_the_whole_state(ranks: Ranks, kind: str, way: str, tmp_path: Path) -> None:
    path = tmp_path / ("x.safetensors" if way == "async" else "step-5")
    assert ranks.values(save_training, kind, str(path), way) == [True] * 4
    assert ranks.values(load_saved, kind, str(path)) == [True] * 4
    files = sorted(file.name for file in path.iterdir()) if path.is_dir() else [path.name]
    assert len(files) > 2 if way == "sync" else files == ["x.safetensors"]


def load_saved(kind: str, path: str) -> bool:
    whole = load_whole(kind, path)
    return dist.get_rank() > 0 or all(equal(value, ms.open(path).value(part)) for part, value in whole.items())


def save_wrongly(path: str, what: str) -> None:
    net = models.sharded("fsdp")
    state: dict[str, Any] = {"model": net.state_dict(), "step": 5}
    if dist.get_rank() in (1, 2) and what == "a tensor":
        state["more"] = torch.full((3,), dist.get_rank())
    elif dist.get_rank() == 2:
        if what == "a value":
            state["step"] = 6
        elif what == "a value, and other names":
            state |= {"step": 6, "more": 1}
        elif what == "a directory":
            path = f"{path}/elsewhere/x.safetensors"
        elif what == "a value that cannot be pickled":
            state["more"] = lambda: None
    group = dist.new_group([0, 2]) if what == "a group" else None
    dcp.save(
        state,
        storage_writer=ms.dcp.Writer(
            None if dist.get_rank() == 2 and what == "no path" else path,
            process_group=group if dist.get_rank() == 2 else None,
        ),
    )


WRONG = {
    "a value": "differ",
    "a value, and other names": "differ",
    "a tensor": "differs between the ranks",
    "a directory": "differ",
    "a value that cannot be pickled": "describing the state failed on 1 of 4 ranks",
    "no path": "has no path",
    "a group": "are not those of dcp.save",
}


@pytest.mark.parametrize("what", WRONG)
def test_ranks_that_differ_save_nothing(ranks: Ranks, what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    ms.save({"old": torch.ones(1)}, path)
    for outcome in ranks.run(save_wrongly, str(path), what, timeout=40):
        assert WRONG[what] in message(outcome)
    assert list(ms.open(path)) == ["old"]
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def stage_of_pipeline(value: float) -> dict[str, Any]:
    """The state of one of two stages, each of two ranks, with a tie."""
    stage, inner = dist.get_rank() // 2, models.mesh(2, 2)["inner"]
    weight = distribute_tensor(torch.arange(15.0).view(5, 3) * value + stage, inner, [Shard(stage)], src_data_rank=None)
    layer = {"weight": weight, "tied": weight, "scale": torch.full((3,), value + stage)}
    return {"layers": {str(stage): layer}, "shared": torch.full((2,), value), "step": int(value)}


def save_and_load_a_pipeline(path: str) -> bool:
    """Whether each stage gets back what it has saved, and the file has the layers of both."""
    dcp.save({"model": stage_of_pipeline(3.0)}, storage_writer=ms.dcp.Writer(path))
    loaded, expected = stage_of_pipeline(0.0), stage_of_pipeline(3.0)
    state = {"model": loaded}
    dcp.load(state, storage_reader=ms.dcp.Reader(path, verify=True))
    found = ms.open(path)
    for stage in "01":
        weight = torch.arange(15.0).view(5, 3) * 3 + int(stage)
        assert torch.equal(found.tensor(f"model.layers.{stage}.weight"), weight)
        assert torch.equal(found.tensor(f"model.layers.{stage}.tied"), weight)
        assert torch.equal(found.tensor(f"model.layers.{stage}.scale"), torch.full((3,), 3.0 + int(stage)))
    return equal(whole_values(state["model"]), whole_values(expected))


def whole_values(tree: Any) -> Any:
    return {key: whole_values(value) for key, value in tree.items()} if isinstance(tree, dict) else models.whole(tree)


def test_ranks_of_a_pipeline_save_together(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(save_and_load_a_pipeline, str(tmp_path / "x.safetensors")) == [True] * 4


# Converting what ranks have saved, without ranks.


def save_with_positions(folder: str, kind: str) -> None:
    """Saves the state of an optimizer by the positions of its parameters: by DCP, and by `ms.save`."""
    net, optimizer = trained(kind, seed=1)
    state = {"model": net.state_dict(), "optim": optimizer.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    ms.save(state, f"{folder}/ours.safetensors", shard_size_bytes=2000)
    whole = models.gathered(net)
    moments = {index: models.whole(values["exp_avg"]) for index, values in enumerate(optimizer.state.values())}
    if dist.get_rank() == 0:
        torch.save((whole, moments), f"{folder}/whole.pt")


@pytest.mark.parametrize("kind", ["fsdp+tp", "shard1"])
def test_conversion_of_what_ranks_have_saved(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    ranks.values(save_with_positions, str(tmp_path), kind)
    whole, moments = torch.load(tmp_path / "whole.pt")
    del whole["table"]  # is not persistent
    for name in ("dcp", "ours.safetensors"):
        one, shards, back = (tmp_path / f"{name}-{form}.safetensors" for form in ("one", "shards", "back"))
        limit = 64 << 10
        ms.convert_checkpoint(tmp_path / name, one, max_memory_bytes=limit)
        ms.convert_checkpoint(one, shards, shard_size_bytes=2000, max_memory_bytes=limit)
        ms.convert_checkpoint(shards, back, max_memory_bytes=limit)
        assert one.read_bytes() == back.read_bytes()
        for path in (one, shards):
            state = ms.open(path).value()
            assert equal(dict(state["model"]), whole)
            assert state["step"] == 3
            net = models.plain(kind, seed=3)
            optimizer = torch.optim.AdamW(net.parameters())
            optimizer.load_state_dict(state["optim"])
            assert equal({index: values["exp_avg"] for index, values in enumerate(optimizer.state.values())}, moments)
            ms.load(net, path, key="model", verify=True)
