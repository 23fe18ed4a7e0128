"""A store on several ranks: one checkpoint from all of them, which all of them restore, or none."""

import errno
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import modelstate as ms
from modelstate.store import PendingSave
from tests.distributed import models
from tests.distributed.ranks import Ranks, die, error_of, survivors
from tests.faults import failing
from tests.sweeps import EXHAUSTIVE

pytestmark = pytest.mark.slow


def plain_objects() -> dict[str, Any]:
    """A model that is whole on all ranks, and random generators that differ between the ranks."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    torch.manual_seed(rank)
    return {
        "model": model,
        "rng": ms.RNG({"own": torch.Generator().manual_seed(100 + rank)}),
        "shuffle": torch.Generator().manual_seed(7),
        "epoch": 3,
    }


def drawn(objects: dict[str, Any]) -> tuple[float, float]:
    return float(torch.rand(())), float(torch.rand((), generator=objects["shuffle"]))


# Random generators.


def save_and_draw(folder: Path) -> tuple[float, float]:
    objects = plain_objects()
    store = ms.Store(folder / "store", process_group=dist.group.WORLD)
    store.save(1, objects)
    store.close()
    return drawn(objects)


def restored_draw(folder: Path, ranks: list[int]) -> tuple[float, float] | None:
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None
    objects = plain_objects()
    torch.manual_seed(1000 + dist.get_rank())
    objects["shuffle"].manual_seed(99)
    restored = ms.Store(folder / "store", process_group=group).restore(objects)
    assert (restored.step, restored["epoch"]) == (1, 3)
    return drawn(objects)


def test_each_rank_gets_its_own_random_numbers_back(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.values(save_and_draw, tmp_path)
    assert len({own for own, _ in expected}) == 4
    assert len({shared for _, shared in expected}) == 1
    assert ranks.values(restored_draw, tmp_path, [0, 1, 2, 3]) == expected
    assert ranks.values(restored_draw, tmp_path, [0, 1]) == [*expected[:2], None, None]
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    assert torch.equal(ms.Store(tmp_path / "store").open("model").tensor("weight"), model.weight)


def save_on(folder: Path, ranks: list[int]) -> None:
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        with ms.Store(folder / "store", process_group=group) as store:
            store.save(1, plain_objects())


def fresh_draw() -> float:
    torch.manual_seed(1000 + dist.get_rank())
    return float(torch.rand(()))


def test_further_ranks_keep_their_generators(ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(save_on, tmp_path, [0, 1])
    found = [own for own, _ in ranks.values(restored_draw, tmp_path, [0, 1, 2, 3])]
    fresh = ranks.values(fresh_draw)
    assert found[2:] == fresh[2:]
    assert found[0] != fresh[0]
    assert found[1] != fresh[1]


class Position:
    """An object whose state differs from rank to rank."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "table": torch.arange(self.value if isinstance(self.value, int) else 0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert len(state["table"]) == state["value"]
        self.value = state["value"]


def positions(folder: Path, ranks: list[int]) -> tuple[int, str, str]:
    """The position after a restore on all ranks, and the error of a restore on some of them."""
    rank = dist.get_rank()
    with ms.Store(folder / "store", process_group=dist.group.WORLD) as store:
        store.save(1, {"position": Position(10 * rank), "same": Position(5)})
        objects = {"position": Position(0), "same": Position(0)}
        store.restore(objects)
    group = dist.new_group(ranks)
    if rank in ranks:
        smaller = ms.Store(folder / "store", process_group=group)
        kind, text = error_of(lambda: smaller.restore({"position": Position(0), "same": Position(0)}))
        smaller.restore({"same": objects["same"]}, allow_unexpected=["position"])
    else:
        kind = text = ""
    assert objects["same"].value == 5
    return objects["position"].value, kind, text


def test_other_objects_need_as_many_ranks(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.values(positions, tmp_path, [0, 1])
    assert [value for value, _, _ in found] == [0, 10, 20, 30]
    assert all(kind == "ObjectStateError" and "4 ranks" in text and "2 ranks" in text for _, kind, text in found[:2])


# The step.


def restore_from_different(folder: Path, case: str) -> tuple[str, str, bool]:
    """The error of a restore where rank 2 has another store, another step, or other objects."""
    odd = dist.get_rank() == 2
    name = "other" if odd and case in ("directory", "missing") else "store"
    if dist.get_rank() == 0:
        for directory, weight in (("store", 1.0), ("other", 2.0)):
            if directory == "store" or case == "directory":
                with ms.Store(folder / directory) as store:
                    store.save(1, {"model": nn.Linear(4, 2)}, metrics={"weight": weight})
                    store.save(2, {"model": nn.Linear(4, 2)})
    dist.barrier()
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    store = ms.Store(folder / name, process_group=dist.group.WORLD)
    step: Any = 1 if odd and case == "step" else 2 if case == "step" else "latest"
    kind, text = error_of(lambda: store.restore({"model": model}, step))
    return kind, text, torch.equal(before, model.weight)


@pytest.mark.parametrize("case", ["directory", "missing", "step"])
def test_ranks_with_another_checkpoint(ranks: Ranks, tmp_path: Path, case: str) -> None:
    for kind, text, is_unchanged in ranks.values(restore_from_different, tmp_path, case):
        assert kind == "DistributedError"
        assert "2" in text
        assert is_unchanged


def save_with_different(folder: Path, case: str) -> tuple[str, bool]:
    odd = dist.get_rank() == 2
    objects = plain_objects()
    if odd and case == "objects":
        del objects["epoch"]
    if odd and case == "name":
        objects["a/b"] = 1
    if case == "encoding":
        objects["position"] = Position(0)
        objects["position"].value = object() if odd else 0
    directory = folder / ("other" if odd and case == "directory" else "store")
    with ms.Store(directory, process_group=dist.group.WORLD) as store:
        kind, _ = error_of(lambda: store.check(objects) if case == "directory" else None)
        if case != "directory":
            kind, text = error_of(lambda: store.save(2 if odd and case == "step" else 1, objects))
            assert case != "step" or "step=2" in text, text
        dist.barrier()
        return kind, bool(store.steps())


@pytest.mark.parametrize("case", ["objects", "step", "directory", "name", "encoding"])
def test_ranks_that_save_different_things(ranks: Ranks, tmp_path: Path, case: str) -> None:
    error = {"name": "OptionError", "encoding": "CodecError"}.get(case, "DistributedError")
    assert ranks.values(save_with_different, tmp_path, case) == [(error, False)] * 4


def call_with_no_such_arguments(folder: Path, case: str) -> str:
    """The class of the error of a call where rank 2 passes arguments that the function does not take."""
    objects: Any = {"model": models.sharded("fsdp")}  # the ranks are those of its mesh
    odd = dist.get_rank() == 2
    store: Any = ms.Store(folder / "store", timeout_seconds=30)
    save: Any = ms.save
    path = folder / "x.safetensors"
    calls: dict[str, Callable[[], object]] = {
        "model for step": lambda: store.save(*(objects["model"], 1) if odd else (1, objects)),
        "steps": lambda: ms.resumable(folder / "loop", objects, steps=0 if odd else 2, save_every=1),
        "no step": lambda: store.save(*[objects] if odd else [1, objects]),
        "option": lambda: store.save(1, objects, **{"safe": True} if odd else {}),
        "no path": lambda: save(objects, *[] if odd else [path]),
        "option of ms.save": lambda: save(objects, path, **{"safe_serialization": True} if odd else {}),
    }
    try:
        calls[case]()
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("case", ["model for step", "steps", "no step", "option", "no path", "option of ms.save"])
def test_arguments_of_one_rank_that_a_function_does_not_take(ranks: Ranks, tmp_path: Path, case: str) -> None:
    own, others = ("TypeError", "DistributedError") if case in ("no step", "no path") else ("OptionError",) * 2
    assert ranks.values(call_with_no_such_arguments, tmp_path, case, timeout=100) == [others, others, own, others]
    assert not list(tmp_path.iterdir())


def damaged_latest(folder: Path) -> tuple[int, list[int]]:
    with ms.Store(folder / "store", process_group=dist.group.WORLD) as store:
        for step in (1, 2):
            objects = plain_objects()
            nn.init.constant_(objects["model"].weight, step)
            saved = store.save(step, objects)
        dist.barrier()
        if dist.get_rank() == 0:
            path = next(Path(saved.path).glob("model-*.safetensors"))
            data = bytearray(path.read_bytes())
            data[-9] ^= 1  # of the weight
            path.write_bytes(data)
        dist.barrier()
        restored = store.restore(plain_objects())
        return restored.step, sorted(restored.skipped)


def test_all_ranks_pass_over_a_damaged_step(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(damaged_latest, tmp_path) == [(1, [2])] * 4


# Loops.


def loop(folder: Path, signalled: int | None, background: bool) -> tuple[int, int, str, list[float]]:
    """A run of 6 steps on all ranks; one of them gets a signal in step 3."""
    objects = plain_objects()
    with ms.Store(folder / "store", process_group=dist.group.WORLD, keep=2) as store:
        run = ms.resumable(
            store, objects, steps=6, save_every=2, deadline=ms.Deadline(hours=None, since="now"), background=background
        )
        values = []
        for step in run:
            values.append(float(torch.rand(())))
            if step == 3 and dist.get_rank() == signalled:
                os.kill(os.getpid(), signal.SIGUSR1)
        return run.start, run.done, run.stopped, values


@pytest.mark.parametrize("background", [False, True])
def test_a_signal_to_one_rank_stops_all_of_them(ranks: Ranks, tmp_path: Path, background: bool) -> None:
    stopped = ranks.values(loop, tmp_path, 1, background)
    resumed = ranks.values(loop, tmp_path, None, background)
    whole = ranks.values(loop, tmp_path / "whole", None, background)
    assert [outcome[:2] for outcome in stopped] == [(0, 4)] * 4
    assert [outcome[2] for outcome in stopped] == [
        f"{'' if rank == 1 else 'rank 1: '}SIGUSR1 was received" for rank in range(4)
    ]
    assert [outcome[:3] for outcome in resumed] == [(4, 6, "")] * 4
    for first, second, expected in zip(stopped, resumed, whole, strict=True):
        assert first[3] + second[3] == expected[3]
    assert ms.Store(tmp_path / "store").steps() == (4, 6)


# Sharded models.


def train(objects: dict[str, Any], step: int) -> None:
    """A step whose gradients depend on the step and the parameters, in every layout alike."""
    for parameter in objects["model"].parameters():
        parameter.grad = parameter.detach() * 0.1 + step
    objects["optimizer"].step()
    objects["scheduler"].step()


def bits(net: models.Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = models.gathered(net)
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"{name}.{key}"] = models.whole(value).clone()
    return state


def training(net: models.Net) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return {"model": net, "optimizer": optimizer, "scheduler": scheduler}


def sharded_objects(kind: str, seed: int, meta: bool = False) -> dict[str, Any]:
    return training(models.sharded(kind, meta=meta, seed=seed))


def resumed_bits(folder: Path, kind: str, background: bool) -> list[str]:
    """What differs between a run of six steps, and one that is resumed after three."""
    objects = sharded_objects(kind, seed=1) | {"rng": ms.RNG()}
    torch.manual_seed(dist.get_rank())
    store = ms.Store(folder / "store")
    for step in range(6):
        train(objects, step)
        if step == 2:
            saved = store.save(3, objects, background=background)
            numbers = [float(torch.rand(()))]
    store.close()
    assert saved is not None
    expected = bits(objects["model"], objects["optimizer"])
    other = sharded_objects(kind, seed=2, meta=True) | {"rng": ms.RNG()}
    assert ms.Store(folder / "store").restore(other).step == 3
    numbers.append(float(torch.rand(())))
    for step in range(3, 6):
        train(other, step)
    found = bits(other["model"], other["optimizer"])
    assert found.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    return wrong if numbers[0] == numbers[1] else [*wrong, "random numbers"]


@pytest.mark.parametrize("kind", ["fsdp", "fsdp+tp", "tied"])
def test_a_resumed_run_equals_one_without_an_interruption(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    assert ranks.values(resumed_bits, tmp_path, kind, kind == "fsdp") == [[]] * 4


def objects_on(layout: str | int, seed: int, meta: bool = False) -> dict[str, Any]:
    """Those of a run in a layout on all ranks, or on the first few of them, sharded by FSDP2: none on other ranks."""
    if isinstance(layout, str):
        return sharded_objects(layout, seed, meta)
    mesh, net = DeviceMesh("cpu", list(range(layout))), models.plain("fsdp", seed=seed)
    return training(fully_shard(net, mesh=mesh)) if dist.get_rank() < layout else {}


def save_trained(folder: Path, layout: str | int) -> dict[str, torch.Tensor]:
    objects = objects_on(layout, seed=1)
    if not objects:
        return {}
    for step in range(3):
        train(objects, step)
    with ms.Store(folder / "store") as store:
        store.save(3, objects)
    for step in range(3, 5):
        train(objects, step)
    return bits(objects["model"], objects["optimizer"])


def resumed_on(folder: Path, layout: str | int) -> dict[str, torch.Tensor]:
    objects = objects_on(layout, seed=2, meta=True)
    if not objects:
        return {}
    assert ms.Store(folder / "store").restore(objects).step == 3
    for step in range(3, 5):
        train(objects, step)
    return bits(objects["model"], objects["optimizer"])


def check_same(found: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    for of_rank in found:
        assert of_rank.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(of_rank[name], value)] == []


@pytest.mark.parametrize(
    ("saved", "layouts"),
    [("fsdp", (2, 3, "tp")), (2, ("fsdp",)), ("fsdp+tp", (2,)), ("tp", ("fsdp",))],
    ids=["fsdp", "fewer ranks", "2-d", "tp"],
)
def test_a_run_goes_on_with_other_ranks_and_layouts(
    ranks: Ranks, tmp_path: Path, saved: str | int, layouts: tuple[str | int, ...]
) -> None:
    expected = ranks.values(save_trained, tmp_path, saved)[0]
    for layout in layouts:
        found = ranks.values(resumed_on, tmp_path, layout)
        check_same(found if isinstance(layout, str) else found[:layout], expected)
    objects = training(models.plain("fsdp", seed=3))
    assert ms.Store(tmp_path / "store").restore(objects).step == 3
    for step in range(3, 5):
        train(objects, step)
    check_same([bits(objects["model"], objects["optimizer"])], expected)


# Faults.


def save_with(folder: Path, fault: Callable[[], AbstractContextManager[object]], odd: int) -> tuple[str, str]:
    """The error of a save of step 2, where one rank has a fault, after a save of step 1."""
    objects = sharded_objects("fsdp", seed=1)
    store = ms.Store(folder / "store", timeout_seconds=20)
    store.save(1, objects)
    train(objects, 0)
    with fault() if dist.get_rank() == odd else nullcontext():
        result = error_of(lambda: store.save(2, objects))
    store.close()
    return result


def full_disk() -> AbstractContextManager[object]:
    return failing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "pwritev")


def failing_disk() -> AbstractContextManager[object]:
    return failing(OSError(errno.EIO, os.strerror(errno.EIO)), "fsync")


def check_store(folder: Path, step: int) -> None:
    """The store is whole, and its newest step is restored."""
    store = ms.Store(folder / "store")
    assert set(store.verify().values()) == {""}
    assert store.latest() == step
    assert store.restore(training(models.plain("fsdp", seed=5))).step == step


@pytest.mark.parametrize("fault", [full_disk, failing_disk])
@pytest.mark.parametrize("odd", [0, 2])
def test_an_error_of_one_rank_leaves_the_last_step(
    ranks: Ranks, tmp_path: Path, fault: Callable[[], AbstractContextManager[object]], odd: int
) -> None:
    for kind, text in ranks.values(save_with, tmp_path, fault, odd):
        assert kind == "WriteFailedError", text
    check_store(tmp_path, 1)
    assert not list((tmp_path / "store").glob("*.unfinished"))


def after_an_error_in_the_background(folder: Path, call: str) -> tuple[str, str, tuple[int, ...]]:
    """The errors of a call and of a save, after a failed save whose error one rank has taken; and the steps."""
    objects = sharded_objects("fsdp", seed=1)
    with ms.Store(folder / "store", timeout_seconds=30) as store:
        store.save(1, objects)
        with full_disk() if dist.get_rank() == 0 else nullcontext():
            pending = store.save(2, objects | {"epoch": 2}, background=True)
            assert pending is not None
            pending.wait()
        if dist.get_rank() == 2:
            assert error_of(pending.result)[0]
        calls: dict[str, Any] = {
            "save": lambda: store.save(3, objects),
            "check": lambda: store.check(objects),
            "restore": lambda: store.restore(objects),
        }
        return error_of(calls[call])[0], error_of(lambda: store.save(4, objects))[0], store.steps()


@pytest.mark.parametrize("call", ["save", "check", "restore"])
def test_an_error_in_the_background_is_raised_once_on_all_ranks(ranks: Ranks, tmp_path: Path, call: str) -> None:
    expected = ("WriteFailedError", "", (1, 4))
    assert ranks.values(after_an_error_in_the_background, tmp_path, call, timeout=100) == [expected] * 4


def killed_at_the_start_of_a_thread(folder: Path) -> list[str]:
    """The errors of a save in the background, before whose start a rank dies, and of the end of the store."""
    store = ms.Store(folder / "store", timeout_seconds=5)
    with mock.patch.object(PendingSave, "start", die) if dist.get_rank() == 1 else nullcontext():
        errors = [error_of(lambda: store.save(1, sharded_objects("fsdp", seed=1), background=True))[0]]
    return [*errors, error_of(store.close)[0]]


def test_the_error_of_a_lost_rank_is_raised_once(ranks: Ranks, tmp_path: Path) -> None:
    found = survivors(ranks.run(killed_at_the_start_of_a_thread, tmp_path, timeout=60))
    assert found == [["RankLostError", ""]] * 3


def saves_after_a_thread_that_did_not_start(folder: Path) -> list[str]:
    """The errors of a save in the background whose thread does not start on one rank, and of the next one."""
    found, is_faulty = [], dist.get_rank() == 1

    def fail(pending: PendingSave) -> None:
        time.sleep(0.5)  # the threads of the other ranks wait for this one
        raise ms.errors.BackgroundCancelledError("no thread can be started")

    for step in (1, 2):
        store = ms.Store(folder / "store", timeout_seconds=5)
        with mock.patch.object(PendingSave, "start", fail) if is_faulty and step == 1 else nullcontext():
            save = partial(store.save, step, sharded_objects("fsdp", seed=1), background=True)
            found.append(error_of(save)[0])
        if step == 2 or not is_faulty:
            store.close()
        dist.barrier()
    return found


def test_a_save_after_a_thread_that_did_not_start_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.values(saves_after_a_thread_that_did_not_start, tmp_path, timeout=60)
    assert found == [["BackgroundCancelledError", ""]] * 4


def interrupted_after_the_end_of_a_thread(folder: Path) -> tuple[str, tuple[int, ...]]:
    """The error of a save in the background that has ended where a rank is interrupted, and the steps."""
    store, start = ms.Store(folder / "store", timeout_seconds=20), PendingSave.start

    def interrupted(pending: PendingSave) -> None:
        start(pending)
        pending.wait()
        raise KeyboardInterrupt

    faulty = mock.patch.object(PendingSave, "start", interrupted) if dist.get_rank() == 1 else nullcontext()
    try:
        with faulty:
            store.save(1, sharded_objects("fsdp", seed=1), background=True)
    except BaseException as error:
        store.close()
        return str(error), store.steps()
    return "", ()


def test_an_error_where_the_thread_of_a_save_may_have_ended(ranks: Ranks, tmp_path: Path) -> None:
    for rank, (text, steps) in enumerate(ranks.values(interrupted_after_the_end_of_a_thread, tmp_path, timeout=60)):
        assert rank == 1 or "on 1 of 4 ranks; step-000000001 is complete, or does not exist" in text
        assert steps == (1,)


def save_to_two_stores(folder: Path) -> list[tuple[int, ...]]:
    """The steps of two stores, whose threads write at the same time."""
    objects = sharded_objects("fsdp", seed=1)
    stores = [ms.Store(folder / name, timeout_seconds=30) for name in ("first", "second")]
    for step in range(4):
        pending = [store.save(step, objects, background=True) for store in stores]
        for save in pending:
            assert save is not None
            save.result()
    for store in stores:
        store.close()
    return [store.steps() for store in stores]


def test_two_stores_save_at_the_same_time(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(save_to_two_stores, tmp_path, timeout=100) == [[(0, 1, 2, 3)] * 2] * 4


def save_in_a_locked_store(folder: Path) -> tuple[str, str]:
    return error_of(lambda: ms.Store(folder / "store").save(2, sharded_objects("fsdp", seed=1)))


def test_two_runs_on_one_store(ranks: Ranks, tmp_path: Path) -> None:
    with ms.Store(tmp_path / "store") as store:
        store.save(1, training(models.plain("fsdp", seed=1)))
        for kind, text in ranks.values(save_in_a_locked_store, tmp_path):
            assert kind == "LockedError", text
    check_store(tmp_path, 1)


# Deltas.


@torch.no_grad()
def change_some(net: nn.Module, step: int) -> None:
    """Changes elements that depend on their values, in every layout alike: all of those of a tensor in step 3."""
    for name, param in net.named_parameters():
        values = models.local(param)
        if param.requires_grad:
            is_all = step == 3 and name == "head.weight"
            values += 0.01 * (((values.float() * 1000 + step) % 1 < 0.03) | is_all)
    net.steps += 1


def publish(folder: Path, kind: str, net: models.Net, odd: int = 0, **options: Any) -> list[list[str]]:
    """Saves six steps, in two processes as it were; one in the background, and two at the second try. Returns files."""
    found, disks = [], {2: full_disk, 4: failing_disk}
    rank = dist.get_rank() if dist.is_initialized() else odd
    for first in (0, 3):
        delta = ms.Delta(full_every=4, dtype="bfloat16" if kind in ("fsdp", "2") else None)
        with ms.Store(folder / kind, delta=delta, timeout_seconds=60, **options) as store:
            for step in range(first, first + 3):
                change_some(net, step)
                if step in disks:
                    with disks[step]() if rank == odd else nullcontext():
                        error, text = error_of(partial(store.save, step, {"model": net}))
                    assert error == "WriteFailedError", text
                saved = store.save(step, {"model": net}, background=step == 1)
                saved = saved.result() if isinstance(saved, PendingSave) else saved
                found.append(sorted(path.name.split("-")[0] for path in Path(saved.path).glob("*.safetensors")))
    return found


def publish_on_ranks(
    folder: Path, kind: str, shape: tuple[int, ...], odd: int, options: dict[str, Any]
) -> list[list[str]]:
    """Saves one of the networks, or a wide one on a mesh of the first ranks."""
    if shape:
        ranks = torch.arange(math.prod(shape)).view(shape)
        mesh, net = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b")[: len(shape)]), models.plain("wide", seed=1)
        net.blocks.requires_grad_(False)
        if dist.get_rank() not in ranks:
            return []
        fully_shard(net, mesh=mesh)
        return publish(folder, kind, net, odd, **options)
    if kind == "plain":
        return publish(folder, kind, models.plain(kind, seed=1), process_group=dist.group.WORLD)
    net, other = models.sharded(kind), models.sharded(kind, torch.bfloat16 if kind == "fsdp" else torch.float32, seed=2)
    found = publish(folder, kind, net, odd)
    ms.Store(folder / kind).restore({"model": other})
    expected = models.gathered(net)
    assert all(torch.equal(value, expected[name].to(value.dtype)) for name, value in models.gathered(other).items())
    return found


def all_files(folder: Path) -> dict[str, bytes]:
    """The files of all steps but for the records, which have times."""
    paths = [path for path in folder.glob("step-*/*") if path.name != "checkpoint.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


KINDS = ("plain", "fsdp", "hsdp", "fsdp+tp", "shard1", "uneven", "empty", "tied", "replicated")
WIDE = [("4", (4,), 3, {"shard_size_bytes": 5_000_000}), ("2 x 2", (2, 2), 0, {}), *[("2", (2,), 0, {})] * EXHAUSTIVE]


@pytest.mark.parametrize(("kind", "shape", "odd", "options"), [*((kind, (), 0, {}) for kind in KINDS), *WIDE])
def test_deltas_are_those_of_one_process(
    ranks: Ranks, tmp_path: Path, kind: str, shape: tuple[int, ...], odd: int, options: dict[str, Any]
) -> None:
    """Byte for byte, also after a save that has failed on one rank."""
    found = ranks.values(publish_on_ranks, tmp_path / "ranks", kind, shape, odd, options)[0]
    net = models.plain("wide" if shape else kind, seed=1)
    net.blocks.requires_grad_(not shape)
    assert found == publish(tmp_path / "one", kind, net, **options)
    assert sum("model.delta" in files for files in found) >= (0 if kind == "empty" else 3)
    files, expected = all_files(tmp_path / "ranks" / kind), all_files(tmp_path / "one" / kind)
    assert files.keys() == expected.keys()
    assert [file for file in files if files[file] != expected[file]] == []
    assert ms.Store(tmp_path / "ranks" / kind).verify() == dict.fromkeys(range(6), "")


def saves_with_few_changes(folder: Path) -> list[set[str]]:
    """The tensors of the model that each save links. The blocks are frozen; the head has no gradient."""
    net = models.sharded("fsdp", seed=1)
    net.blocks.requires_grad_(False)
    optimizer = torch.optim.AdamW([net.embed.weight, net.head.weight], fused=True)
    linked, before = [], set[int]()
    with ms.Store(folder / "store") as store:
        for step in range(6):
            if step == 3 and dist.get_rank() == 3:
                with torch.no_grad():
                    net.blocks[0].up.weight.to_local().add_(1)  # of a frozen parameter, on one rank
            net.embed.weight.grad = torch.ones_like(net.embed.weight)
            optimizer.step()
            saved = store.save(step, {"model": net, "optimizer": optimizer}, background=step == 5)
            saved = saved.result() if isinstance(saved, PendingSave) else saved
            assert saved is not None
            files = {path.stat().st_ino: path for path in Path(saved.path).glob("model-*.safetensors")}
            linked.append({name for inode in before & files.keys() for name in ms.open(files[inode])})
            assert bool(saved.linked_bytes) == bool(linked[-1])
            before = set(files)
        expected = bits(net, optimizer)
        other = sharded_objects("fsdp", seed=2)
        other["optimizer"] = torch.optim.AdamW([other["model"].embed.weight, other["model"].head.weight], fused=True)
        store.restore({"model": other["model"], "optimizer": other["optimizer"]})
    found = bits(other["model"], other["optimizer"])
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    return linked


def test_tensors_that_have_not_changed_are_linked(ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = ranks.values(saves_with_few_changes, tmp_path)
    names = set(models.plain("fsdp").state_dict())
    blocks = {name for name in names if name.startswith("blocks")}
    others = {"head.weight", "steps"}  # in a file of their own since the second save
    changed = "blocks.0.up.weight"
    expected = [set(), blocks, blocks | others, others, others | blocks - {changed}, names - {"embed.weight"}]
    for found in of_ranks:
        assert [step ^ other for step, other in zip(found, expected, strict=True)] == [set()] * 6
    assert set(ms.Store(tmp_path / "store").verify().values()) == {""}
