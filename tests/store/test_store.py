"""`modelstate.Store`: what is saved comes back, and what is there can be asked for."""

import json
import os
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import modelstate as ms
from modelstate import errors
from tests.store.common import Training, contents, flip, litter, network, program
from tests.store.training import Run, state_of


def test_the_parent_of_a_symbolic_link_is_that_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "disk" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "inner")
    with ms.Store(f"{tmp_path}/link/../run/") as store:
        store.save(1, {"epoch": 1})
    assert ms.Store(tmp_path / "disk" / "run").steps() == (1,)
    assert not (tmp_path / "run").exists()
    # A directory that is not there yet has the parent that its name says.
    assert ms.Store(f"{tmp_path}/new/../disk/run").steps() == (1,)


def test_everything_comes_back(tmp_path: Path) -> None:
    run = Run()
    run.train(3)
    was = state_of(run.objects)
    store = ms.Store(tmp_path)
    saved = store.save(3, run.objects)
    losses = run.train(3)
    fresh = Run()
    restored = ms.Store(tmp_path).restore(fresh.objects)
    assert state_of(fresh.objects) == was
    assert dict(restored) == {"step": 3, "averaged.decay": 0.5}
    assert (restored.step, restored.skipped, saved.step) == (3, {}, 3)
    assert fresh.head.weight is fresh.model.last.weight
    fresh.step = restored["step"]
    assert fresh.train(3) == losses
    assert store.verify() == {3: ""}  # what was restored and then trained is not what is on the disk


@pytest.mark.parametrize("map", [True, False])
def test_training_after_a_restore_leaves_the_checkpoint(tmp_path: Path, map: bool) -> None:
    training = Training(width=64).train()
    store = ms.Store(tmp_path)
    store.save(1, training.objects)
    was = contents(tmp_path)
    fresh = Training(1, width=64)
    store.restore(fresh.objects, map=map)
    assert fresh.bits() == training.bits()
    fresh.train(3)
    assert contents(tmp_path) == was
    store.save(2, fresh.objects)
    assert store.verify() == {1: "", 2: ""}


def test_values_with_tensors_and_arrays(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    tensors = [torch.arange(6).reshape(2, 3).t(), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 3)]
    array = np.arange(5, dtype=">i2")
    store.save(0, {"all": {"tensors": tensors, "array": array, 5: torch.ones(2, dtype=torch.complex64).conj()}})
    found = store.restore({"all": None})["all"]
    assert all(map(torch.equal, found["tensors"], tensors))
    assert [one.dtype for one in found["tensors"]] == [one.dtype for one in tensors]
    assert (found["array"] == array).all()
    assert torch.equal(found[5], torch.ones(2, dtype=torch.complex64))


def test_what_is_there(tmp_path: Path) -> None:
    store = ms.Store(tmp_path / "above" / "run")
    assert (store.steps(), store.latest(), store.infos(), store.verify()) == ((), None, (), {})
    assert not (tmp_path / "above").exists()
    model = network()
    for step in (10, 5, 2_000_000_000_000):
        saved = store.save(step, {"model": model, "step": step}, metrics={"loss": step / 10})
    assert Path(saved.path).is_dir()
    assert str(saved).startswith("step 2000000000000: ")
    assert (store.steps(), store.latest()) == ((5, 10, 2_000_000_000_000), 2_000_000_000_000)
    assert [info.metrics for info in store.infos()] == [{"loss": 0.5}, {"loss": 1.0}, {"loss": 2e11}]
    assert all(info.intact and not info.pinned and info.nbytes for info in store.infos())
    assert store.restore({"model": model, "step": None}, step=5)["step"] == 5
    assert store.restore({"model": model, "step": None}).metrics == {"loss": 2e11}
    assert torch.equal(store.open("model", step=10).tensor("0.weight"), model[0].weight)
    for wrong in ("step", "other"):
        with pytest.raises(errors.StepNotFoundError):
            store.open(wrong)
    assert store.verify(10) == {10: ""}


def test_retention(tmp_path: Path) -> None:
    store = ms.Store(tmp_path, keep=ms.Keep(last=2, best=1, metric="loss"))
    model = network()
    gone = [store.save(step, {"model": model}, metrics={"loss": abs(step - 2)}).pruned for step in range(5)]
    assert gone == [(), (), (0,), (1,), ()]
    assert store.steps() == (2, 3, 4)
    store.pin(3)
    store.pin(3)
    assert [info.pinned for info in store.infos()] == [False, True, False]
    assert store.prune(1) == (2,)
    assert store.steps() == (3, 4)
    store.unpin(3)
    store.unpin(3)
    assert store.prune() == ()
    assert store.prune(1) == (3,)
    assert store.prune(1) == ()
    assert store.save(9, {"model": model}, pin=True).pruned == ()
    assert [store.save(step, {"model": model}).pruned for step in (10, 11)] == [(), ()]
    assert store.steps() == (4, 9, 10, 11)  # 4 is the only one with the metric
    assert store.verify() == dict.fromkeys(store.steps(), "")
    assert not litter(tmp_path)


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(2), np.int64(3), 1, float("nan"), float("-inf")])
def test_metrics_come_back(tmp_path: Path, value: Any) -> None:
    store = ms.Store(tmp_path)
    store.save(0, {"value": 1}, metrics={"loss": value})
    assert repr(store.infos()[0].metrics) == repr({"loss": float(value)})


def test_a_step_that_exists(tmp_path: Path) -> None:
    store, model = ms.Store(tmp_path), network()
    first = store.save(1, {"model": model}, pin=True)
    was = contents(tmp_path)
    with pytest.raises(errors.TargetExistsError):
        store.save(1, {"model": network(1)})
    assert contents(tmp_path) == was
    other = network(1)
    second = store.save(1, {"model": other}, overwrite=True)
    assert (store.steps(), Path(first.path).exists()) == ((1,), False)
    assert second.path != first.path
    third = store.save(1, {"model": other}, overwrite=True)
    assert third.linked_bytes > 0
    store.restore({"model": model})
    assert torch.equal(model[0].weight, other[0].weight)
    assert store.infos()[0].pinned
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_an_earlier_save_of_a_step_is_restored_with_a_warning(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    store.save(0, {"value": 0})
    first = Path(store.save(1, {"value": 1}).path)
    shutil.copytree(first, tmp_path / "aside")
    second = Path(store.save(1, {"value": 2}, overwrite=True).path)
    (tmp_path / "aside").rename(first)  # as if the process had been killed before it took it away
    restored = store.restore({"value": None})
    assert (restored["value"], restored.skipped) == (2, {})
    flip(second / "checkpoint.json", 60)
    for step in ("latest", 1):
        with pytest.warns(errors.DamagedCheckpointWarning, match="the last save of step 1 is passed over"):
            restored = store.restore({"value": None}, step)
        assert (restored.step, restored["value"], list(restored.skipped)) == (1, 1, [1])
    store.save(1, {"value": 3}, overwrite=True)
    assert [path.name for path in tmp_path.glob("step-*1*")] == ["step-000000001.2"]


def test_an_earlier_save_of_a_step_is_found_while_the_last_one_is_read(tmp_path: Path) -> None:
    store, model, found = ms.Store(tmp_path), network(), network(1)
    store.save(0, {"model": network(2)})
    first = Path(store.save(1, {"model": model}).path)
    shutil.copytree(first, tmp_path / "aside")
    second = Path(store.save(1, {"model": network(3)}, overwrite=True).path)
    (tmp_path / "aside").rename(first)
    flip(next(second.glob("model-*.safetensors")))
    for _ in range(2):  # the second one knows the damage before it reads
        with pytest.warns(errors.DamagedCheckpointWarning, match="the last save of step 1"):
            restored = store.restore({"model": found}, step=1)
        assert torch.equal(found[0].weight, model[0].weight)
        assert "not what their checksums say" in restored.skipped[1]
        assert "not what their checksums say" in store.verify()[1]
    with pytest.warns(errors.DamagedCheckpointWarning, match="the last save of step 1"):
        assert store.open("model").tensor("0.weight").equal(model[0].weight)


@pytest.mark.filterwarnings("error")
def test_a_later_save_of_a_step_that_is_of_another_store_is_not_used(tmp_path: Path) -> None:
    with ms.Store(tmp_path / "own") as store, ms.Store(tmp_path / "other") as other:
        store.save(1, {"value": 1})
        shutil.copytree(other.save(1, {"value": 2}).path, tmp_path / "own" / "step-000000001.1")
    for step in ("latest", 1):
        restored = store.restore({"value": None}, step)
        assert (restored["value"], restored.skipped) == (1, {})
    assert store.verify() == store.verify(1) == {1: ""}


def test_the_latest_is_what_was_saved_last(tmp_path: Path) -> None:
    store, of = ms.Store(tmp_path), {"model": nn.Linear(1, 1)}
    for step in (10, 20, 30):
        store.save(step, of)
    store.restore(of, 10)
    of["model"].weight.data.fill_(7)
    store.save(15, of)
    assert store.latest() == 15
    again = {"model": nn.Linear(1, 1)}
    assert ms.resumable(store, again, steps=50, save_every=5).start == 15
    assert again["model"].weight.item() == 7
    assert store.steps() == (10, 15, 20, 30)


DAMAGE = {
    "a bit in the weights": lambda path: flip(next(path.glob("model-*.safetensors"))),
    "a bit in the record": lambda path: flip(path / "checkpoint.json", 60),
    "no record": lambda path: (path / "checkpoint.json").unlink(),
    "an empty record": lambda path: (path / "checkpoint.json").write_bytes(b""),
    "a record of something else": lambda path: (path / "checkpoint.json").write_bytes(b"[" * 100_000),
    "a file too little": lambda path: next(path.glob("model-*.safetensors")).unlink(),
    "a file cut short": lambda path: os.truncate(next(path.glob("optimizer-*.safetensors")), 200),
    "an index of something else": lambda path: (path / "model.safetensors.index.json").write_text("{}"),
    "nothing left": lambda path: [file.unlink() for file in path.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_is_reported_and_the_one_before_restored(tmp_path: Path, damage: str) -> None:
    store, training = ms.Store(tmp_path, keep=2), Training()
    store.save(1, training.train().objects)
    was = training.bits()
    path = Path(store.save(2, training.train().objects).path)
    content = {file: file.read_bytes() for file in path.iterdir()}
    DAMAGE[damage](path)
    fresh = Training(3)
    other = ms.Store(tmp_path)
    with pytest.warns(errors.DamagedCheckpointWarning, match="step 2 is passed over"):
        restored = other.restore(fresh.objects)
    assert (restored.step, list(restored.skipped)) == (1, [2])
    assert fresh.bits() == was
    before = fresh.bits()
    with pytest.raises(ms.ModelStateError) as refused:
        other.restore({"model": nn.Linear(3, 3)})
    assert "step 2 is passed over" in "".join(traceback.format_exception_only(refused.value))
    with pytest.raises(errors.DamagedCheckpointError):
        other.restore(fresh.objects, step=2)
    assert fresh.bits() == before
    found = other.verify()
    assert found[1] == ""
    assert "damaged" in found[2]
    # Known until it is repaired: not linked to, not counted as the newest, and replaced.
    assert other.steps() == (1,)
    for file, data in content.items():
        file.write_bytes(data)
    assert other.restore(fresh.objects).step == 2
    DAMAGE[damage](path)
    assert other.verify()[2]
    store.close()
    saved = other.save(2, training.objects)
    assert saved.linked_bytes == 0
    assert other.verify() == {1: "", 2: ""}
    assert not litter(tmp_path)


def test_a_last_good_one_outlives_damaged_ones(tmp_path: Path) -> None:
    store, model, known = ms.Store(tmp_path), network(), set[str]()
    for step in range(4):
        path = Path(store.save(step, {"model": model}).path)
        with torch.no_grad():
            model[0].weight += 1
        files = [file for file in path.glob("model-*.safetensors") if file.name not in known]
        known.update(file.name for file in files)
        if step:
            flip(files[0])  # one that is linked from the step before may be damaged already, and would be whole again
    store.verify()
    assert store.prune(1) == (1, 2)  # 3 would stay if it were whole
    assert store.steps() == (0,)


def test_all_damaged(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    for step in (1, 2):
        flip(Path(store.save(step, {"value": step}).path) / "checkpoint.json", 60)
    with pytest.raises(errors.StepNotFoundError, match="no checkpoint of the store can be used") as raised:
        store.restore({"value": None})
    assert all(text in raised.value.found for text in ("step 1: ", "step 2: "))
    assert not any(text in raised.value.found for text in ("\n", "to do:"))
    assert store.prune(1) == ()


def test_files_that_others_read(tmp_path: Path) -> None:
    store = ms.Store(tmp_path, shard_size_bytes=100)
    run = Run()
    run.train(2)
    path = Path(store.save(1, run.objects).path)
    found: dict[str, torch.Tensor] = {}
    files = sorted(path.glob("model-*.safetensors"))
    assert len(files) > 1
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        assert all(one.isfinite().all() for one in tensors.values() if one.is_floating_point())
        found |= tensors if file in files else {}
    assert all(torch.equal(found[name], one) for name, one in run.model.state_dict().items() if torch.is_tensor(one))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert {path / file for file in index["weight_map"].values()} == set(files)
    with ms.open(path) as opened:  # the directory is a checkpoint of the model
        assert set(found) <= set(opened)
    fresh = Run()
    ms.load(fresh.model, path)
    assert torch.equal(fresh.model.last.weight, run.model.last.weight)


@dataclass
class Position:
    """A class of a program's own."""

    epoch: int


@pytest.mark.slow
def test_a_value_whose_class_is_not_known_here_is_no_damage(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    store.save(1, {"plain": Position(3), "with tensors": {"tensor": torch.ones(2), "position": Position(4)}})
    assert store.restore({"plain": None, "with tensors": None})["plain"] == Position(3)
    store.save(2, {"with tensors": nn.ParameterList([TwoTensor(torch.ones(2), torch.ones(2))])})
    code = """
import sys, modelstate as ms
store = ms.Store(sys.argv[1])
print(store.verify(1))
for step in (1, "latest"):
    try:
        store.restore({"plain": None, "with tensors": None}, step)
    except (ms.errors.UnknownClassError, ms.errors.ForbiddenGlobalError) as error:
        print(type(error).__name__, store.steps())
"""
    done = program(code, tmp_path)
    assert done.stdout == "{1: ''}\nUnknownClassError (1, 2)\nForbiddenGlobalError (1, 2)\n", done.stderr
