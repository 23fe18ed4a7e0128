"""Values that are whole on each rank: where they differ between the ranks, nothing is saved without an error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import modelstate as ms
from modelstate.errors import DistributedError
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.slow


class Counting(nn.Linear):
    """A module with extra state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def net(value: float = 5.0) -> nn.ModuleDict:
    model = nn.ModuleDict({"dense": nn.Linear(2, 2), "expert": Counting(), "norm": nn.BatchNorm1d(2)})
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def trained(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def objects_with(case: str) -> tuple[dict[str, Any], str]:
    """Returns objects that differ on the last rank, and the name of the value that does."""
    odd = dist.get_rank() == 3
    model = net()
    optimizer = trained(model)
    changes: dict[str, tuple[str, Callable[[], object]]] = {
        "parameter": ("model.expert.weight", lambda: nn.init.constant_(model["expert"].weight, 7.0)),
        "frozen": ("model.dense.bias", lambda: nn.init.constant_(model["dense"].bias, 7.0)),
        "buffer": ("model.norm.running_mean", lambda: nn.init.constant_(model["norm"].running_mean, 7.0)),
        "dtype": ("model.norm.running_mean", lambda: model["norm"].running_mean.data.double()),
        "extra state": ("model.expert._extra_state", lambda: setattr(model["expert"], "count", 3)),
        "moments": (
            "optimizer.state.model.dense.weight.exp_avg",
            lambda: optimizer.state[model["dense"].weight]["exp_avg"].zero_(),
        ),
        "options": ("optimizer.param_groups", lambda: optimizer.param_groups[0].update(lr=0.5)),
    }
    name, change = changes[case]
    if case == "frozen":
        for param in model["dense"].parameters():
            param.requires_grad_(False)
    if odd:
        with torch.no_grad():
            change()
        if case == "dtype":
            model["norm"].running_mean = model["norm"].running_mean.double()
    return {"model": model, "optimizer": optimizer}, name


CASES = ["parameter", "frozen", "buffer", "dtype", "extra state", "moments", "options"]


def refused(call: Callable[[], object]) -> str:
    """Returns the text of the error."""
    with pytest.raises(DistributedError) as raised:
        call()
    return str(raised.value)


def save_differing(folder: Path, case: str) -> list[tuple[bool, bool]]:
    """For each way to save: whether the error names the value, and whether a checkpoint is there."""
    objects, name = objects_with(case)
    world = dist.group.WORLD
    found = []
    with ms.Store(folder / "store", process_group=world) as store:
        calls: list[Callable[[], object]] = [
            lambda: store.check(objects),
            lambda: store.save(1, objects),
            lambda: store.save(2, objects, background=True).result(),
            lambda: ms.save(objects, folder / "x.safetensors", process_group=world),
        ]
        for call in calls:
            text = refused(call)
            dist.barrier()
            is_named = name in text or name.removeprefix("model.") in text or "the states" in text
            found.append((is_named, bool(store.steps()) or (folder / "x.safetensors").exists()))
    return found


@pytest.mark.parametrize("case", CASES)
def test_values_that_differ_are_refused_with_their_names(ranks: Ranks, tmp_path: Path, case: str) -> None:
    assert ranks.values(save_differing, tmp_path, case) == [[(True, False)] * 4] * 4


def save_after_a_good_one(folder: Path) -> bool:
    """A save whose unchanged files could be linked, and one tensor that differs on one rank."""
    model = net()
    with ms.Store(folder / "store", process_group=dist.group.WORLD) as store:
        store.save(1, {"model": model})
        assert store.save(2, {"model": model}).linked_bytes if dist.get_rank() == 0 else store.save(2, {"model": model})
        if dist.get_rank() == 1:
            nn.init.zeros_(model["dense"].weight)
        text = refused(lambda: store.save(3, {"model": model}))
        dist.barrier()
        return "model.dense.weight: 1 of" in text and store.steps() == (1, 2)


def test_a_linked_file_is_compared_too(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(save_after_a_good_one, tmp_path) == [True] * 4


def save_beside_shards(folder: Path) -> list[bool]:
    """A whole module beside one of FSDP2, and a whole tensor within one of FSDP2."""
    rank, found = dist.get_rank(), []
    torch.manual_seed(0)
    sharded, whole = fully_shard(nn.Linear(4, 4)), net(value=rank)
    within = nn.BatchNorm1d(4)
    fully_shard(within)
    nn.init.constant_(within.running_var, rank + 1)
    with ms.Store(folder / "store") as store:
        for objects, name in (
            ({"sharded": sharded, "whole": whole}, "whole.dense.weight"),
            ({"within": within, "sharded": sharded}, "running_var"),
        ):
            for call in (store.check, lambda objects: store.save(1, objects)):
                found.append(name in refused(lambda call=call, objects=objects: call(objects)))
        found.append("running_var" in refused(lambda: ms.save(within, folder / "x.safetensors")))
        store.save(1, {"sharded": sharded})
    return found


def test_whole_values_beside_shards(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(save_beside_shards, tmp_path) == [[True] * 5] * 4


def save_replicated(folder: Path) -> list[str]:
    """A DTensor that is replicated on all ranks, and differs."""
    model, mesh = nn.Module(), init_device_mesh("cpu", (4,))
    value = torch.full((2, 2), float(dist.get_rank()))
    model.weight = nn.Parameter(DTensor.from_local(value, mesh, [Replicate()]))
    with ms.Store(folder / "store") as store:
        calls: list[Callable[[], object]] = [
            lambda: store.save(1, {"model": model}),
            lambda: ms.save(model, folder / "x.safetensors"),
        ]
        return [refused(call) for call in calls]


def test_replicated_dtensors_are_compared(ranks: Ranks, tmp_path: Path) -> None:
    assert all("found: weight: 1 of" in text for texts in ranks.values(save_replicated, tmp_path) for text in texts)


# What may differ.


def plain_values(folder: Path) -> tuple[int, str]:
    rank = dist.get_rank()
    objects = {"model": net(), "epoch": 10 + rank}
    with ms.Store(folder / "store", process_group=dist.group.WORLD) as store:
        store.check(objects)
        store.save(1, objects)
        text = refused(lambda: ms.save(objects, folder / "x.safetensors", process_group=dist.group.WORLD))
        return store.restore({"model": net(), "epoch": 0})["epoch"], text


def test_a_store_saves_plain_values_for_each_rank_and_a_file_does_not(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.values(plain_values, tmp_path)
    assert [epoch for epoch, _ in found] == [10, 11, 12, 13]
    assert all("found: epoch: 1 of" in text for _, text in found)


def batch_norm_of_ddp(folder: Path, synced: bool) -> list[Any]:
    rank = dist.get_rank()
    wrapped = DistributedDataParallel(net().requires_grad_(), broadcast_buffers=synced)
    nn.init.constant_(wrapped.module["norm"].running_mean, rank)
    other = net()
    with ms.Store(folder / "store", process_group=dist.group.WORLD) as store:
        for objects in [{"model": wrapped.module}, *([] if synced else [{"model": wrapped}])]:
            assert "the wrapper itself" in refused(lambda objects=objects: store.save(1, objects))
        if not synced:
            return []
        store.check({"model": wrapped})
        store.save(1, {"model": wrapped})
        store.save(2, {"model": nn.Sequential(wrapped)}, background=True).result()
        store.restore({"model": other}, 1)
        found = other["norm"].running_mean.tolist()
        nn.init.constant_(wrapped.module["dense"].weight, rank)
        assert "model.dense.weight: 1 of" in refused(lambda: store.save(3, {"model": wrapped}))
    return found


@pytest.mark.parametrize("synced", [True, False])
def test_buffers_that_data_parallel_takes_from_the_first_rank(ranks: Ranks, tmp_path: Path, synced: bool) -> None:
    assert ranks.values(batch_norm_of_ddp, tmp_path, synced) == [[0.0, 0.0] if synced else []] * 4


# What the error says to do.


class Own:
    """The state of a module, as an object of its own."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> Any:
        return self.module.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.module.load_state_dict(state)


def follow_the_remedies(folder: Path) -> list[float]:
    rank, world = dist.get_rank(), dist.group.WORLD
    mine, found = nn.Linear(2, 2), []
    nn.init.constant_(mine.weight, rank)
    nn.init.constant_(mine.bias, rank)

    def restored(store: ms.Store, objects: dict[str, Any], tensor: Callable[[], torch.Tensor]) -> None:
        store.save(1, objects)
        with torch.no_grad():
            mine.weight.fill_(-1)
        store.restore(objects)
        found.append(tensor().detach().flatten()[0].item())

    with ms.Store(folder / "store", process_group=world) as store:
        refused(lambda: store.save(1, {"dense": net(), "expert": mine}))
        restored(store, {"dense": net(), "expert": Own(mine)}, lambda: mine.weight)
    with ms.Store(folder / f"rank{rank}") as store:
        restored(store, {"dense": net(), "expert": mine}, lambda: mine.weight)
    sharded = nn.Module()
    mesh = init_device_mesh("cpu", (4,))
    sharded.weight = nn.Parameter(DTensor.from_local(mine.weight.detach().clone(), mesh, [Shard(0)]))
    with ms.Store(folder / "sharded") as store:
        store.save(1, {"expert": sharded})
        with torch.no_grad():
            sharded.weight.to_local().fill_(-1)
        store.restore({"expert": sharded})
        found.append(sharded.weight.to_local().flatten()[0].item())
    for tensor in (mine.weight, mine.bias):
        dist.broadcast(tensor.detach(), src=0)
    with ms.Store(folder / "broadcast", process_group=world) as store:
        restored(store, {"expert": mine}, lambda: mine.weight)
    return found


def test_the_remedies_work(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(follow_the_remedies, tmp_path) == [[rank, rank, rank, 0] for rank in range(4)]
