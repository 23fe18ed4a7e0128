"""Steps as differences: each one is complete by itself, gives back every bit, and says so where it cannot."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.formats.manifest import KEY, LAYERS, OPEN_SEAL, SEAL, sealed
from modelstate.rules.expression import region, values_of
from tests.faults import failing, faulty_writes
from tests.store.common import contents, cut, flip, litter


class Model(nn.Module):
    """Tied weights of two dtypes, a frozen layer, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.small = nn.Linear(200, 200).bfloat16(), nn.Linear(20, 20)
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.tied = nn.Linear(200, 200).bfloat16()
        self.tied.weight = self.wide.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def train_step(self, part: float = 0.02) -> dict[str, torch.Tensor]:
        """Changes a part of the elements. Returns a copy of the state."""
        self.steps += 1
        for param in self.parameters():
            if param.requires_grad:
                param += torch.randn_like(param) * 0.01 * (torch.rand_like(param) < part)
        return self.copy()

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}


def is_same(store: ms.Store, step: int, state: dict[str, torch.Tensor]) -> bool:
    model = Model()
    store.restore({"model": model}, step)
    assert model.tied.weight is model.wide.weight
    return same(model.state_dict(), state)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(map(torch.equal, first.values(), second.values()))


def patch_files(step: ms.store.SavedStep) -> list[Path]:
    return sorted(Path(step.path).glob("*.delta-*"), key=lambda path: path.stat().st_mtime_ns)


def only(*arguments: Any, **options: Any) -> ms.Store:
    return ms.Store(*arguments, delta=ms.Delta(), **options)


def test_a_run(tmp_path: Path) -> None:
    store, model = ms.Store(tmp_path, delta=ms.Delta(full_every=4)), Model()
    saved, states = {}, {}
    for step in range(9):
        states[step] = model.train_step()
        saved[step] = store.save(step, {"model": model})
    assert [len(patch_files(saved[step])) for step in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert all(20 * saved[step].written_bytes < saved[0].written_bytes * 2 for step in (1, 2, 3, 5, 6, 7))
    assert store.verify() == dict.fromkeys(range(9), "")
    assert all(is_same(store, step, states[step]) for step in states)
    assert not litter(tmp_path)
    # Each is complete without the others.
    assert store.prune(ms.Keep(last=1)) == tuple(range(8))
    assert is_same(store, 8, states[8])
    store.save(9, {"model": model})
    assert store.prune(ms.Keep(last=1)) == (8,)
    assert store.verify() == {9: ""}
    assert is_same(store, 9, states[8])


def test_what_reads_checkpoints_reads_deltas(tmp_path: Path) -> None:
    store, model = only(tmp_path / "store"), Model()
    states = []
    for step in (10, 11, 12):
        states.append(model.train_step())
        saved = store.save(step, {"model": model})
    assert len(patch_files(saved)) == 2
    opened = store.open("model", 12, verify=True)
    spec = opened["wide.weight"]
    assert (spec.shape, spec.dtype, spec.nbytes, spec.kind) == ((200, 200), torch.bfloat16, 80_000, "patched 2 times")
    assert opened.aliases == (("wide.weight", "tied.weight"),)
    assert torch.equal(opened.tensor("wide.weight"), states[-1]["wide.weight"])
    for start, stop in ((50, 55), (0, 0), (199, 200), (0, 200)):
        rows = torch.empty(stop - start, 200, dtype=torch.bfloat16)
        opened.read_into("wide.weight", rows, start, stop)
        assert torch.equal(rows, states[-1]["wide.weight"][start:stop])
    stored = region(region(opened.stored("wide.weight"), [slice(3, 100)]), [slice(10, 20), slice(7, 9)])
    assert torch.equal(values_of(stored, opened.read), states[-1]["wide.weight"][13:23, 7:9])
    loaded = nn.Linear(200, 200).bfloat16()
    ms.load(loaded, opened, key="wide")
    assert torch.equal(loaded.weight, states[-1]["wide.weight"])
    changed = {diff.name: diff.difference.changed for diff in store.diff(11, 12).tensors if diff.difference}
    assert changed["model.wide.weight"] == (states[-2]["wide.weight"] != states[-1]["wide.weight"]).double().mean()
    assert ms.diff(opened, states[-1]).is_equal
    ms.convert_checkpoint(opened, tmp_path / "file.safetensors")
    assert ms.diff(tmp_path / "file.safetensors", states[-1]).is_equal
    index = Path(saved.path) / "model.safetensors.index.json"
    assert ms.verify(index).tensors == len(states[-1])
    assert ms.diff(saved.path, index).is_equal  # a directory, in which the index is found
    # A file of patches by itself is no model.
    with pytest.raises(errors.UnknownFormatError, match="open the step: its directory"):
        ms.load(Model(), patch_files(saved)[-1], allow_missing=["*"])


def test_a_new_process_goes_on_from_what_is_on_the_disk(tmp_path: Path) -> None:
    model = Model()
    for step in range(5):
        state = model.train_step() if step < 4 else model.copy()
        with only(tmp_path) as store:
            saved = store.save(step, {"model": model})
            assert len(patch_files(saved)) == min(step, 3)
            assert is_same(store, step, state)
    assert saved.written_bytes < 5000  # the index, where nothing has changed


def test_frozen_parameters_that_change_all_the_same(tmp_path: Path) -> None:
    """As those of a moving average: not known before the second step, which has them whole."""
    store, average = only(tmp_path), nn.Linear(90, 90).requires_grad_(False)
    for step in range(4):
        average.weight.view(-1)[step] += 1
        store.save(step, {"model": average})
        opened = store.open("model", verify=True)
        assert torch.equal(opened.tensor("weight"), average.weight)
        assert opened["weight"].kind == (f"patched {step - 1} times" if step > 1 else "strided")


@pytest.mark.parametrize("background", [False, True])
def test_tensors_that_changed_altogether_are_whole(tmp_path: Path, background: bool) -> None:
    store, model = only(tmp_path, shard_size_bytes=30_000), Model()
    for step in range(5):
        model.train_step()
        with torch.no_grad():
            model.small.weight.normal_()
        state = model.copy()
        saved = store.save(step, {"model": model}, background=background)
        if background:
            model.train_step()
            saved = saved.result()
            model.load_state_dict(state)
        assert is_same(store, step, state)
    kinds = {name: spec.kind for name, spec in store.open("model").items()}
    assert kinds["wide.weight"] == "patched 4 times"
    assert kinds["small.weight"] == kinds["frozen.weight"] == "strided"
    assert store.verify() == dict.fromkeys(range(5), "")
    with torch.no_grad():
        model.wide.weight.normal_()
    saved = store.save(9, {"model": model})
    assert not patch_files(saved)
    assert is_same(store, 9, model.copy())


def test_another_structure_is_whole(tmp_path: Path) -> None:
    """A tensor that is gone, one that is new, one of another shape, one that is tied no more: all are right."""
    store, model = only(tmp_path), nn.ModuleDict({"a": nn.Linear(90, 90), "b": nn.Linear(90, 90)})

    def change(step: int) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.view(-1)[:3] += 1
        store.save(step, {"model": model})
        opened = store.open("model", step, verify=True)
        assert same({name: opened.tensor(name) for name in sorted(opened)}, dict(sorted(model.state_dict().items())))

    change(0)
    change(1)
    model["c"] = nn.Linear(20, 20)
    change(2)
    del model["b"]
    change(3)
    model["c"] = nn.Linear(30, 20)
    change(4)
    model["c"].weight = nn.Parameter(model["c"].weight.double().detach())
    change(5)
    model["d"] = nn.Linear(90, 90)
    model["d"].weight = model["a"].weight
    change(6)
    model["d"].weight = nn.Parameter(model["a"].weight.detach().clone())
    change(7)
    change(8)
    assert store.verify() == dict.fromkeys(range(9), "")


NAMES = "bfloat16 float16 float32 float64 int8 int64 bool complex64 float8_e4m3fn float4_e2m1fn_x2"


@pytest.mark.parametrize("name", NAMES.split())
def test_every_bit_pattern(tmp_path: Path, name: str) -> None:
    store, module, dtype = only(tmp_path), nn.Module(), getattr(torch, name)
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (8000 * dtype.itemsize,), dtype=torch.uint8)
    module.register_buffer("x", values.view(dtype))
    for step in range(3):
        store.save(step, {"model": module})
        stored = store.open("model", step).tensor("x")
        assert torch.equal(stored.view(torch.uint8), values)
        at = torch.randint(len(values), (40,))
        values[at] = 1 - values[at] if dtype == torch.bool else torch.randint(0, 256, (40,), dtype=torch.uint8)
    assert store.open("model")["x"].kind == "patched 2 times"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint8])
def test_a_single_element_of_any_stride(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("one", torch.arange(3).to(dtype)[1::2])
    model.register_buffer("none", torch.empty(0, 3, dtype=dtype))
    with ms.Store(tmp_path, delta=ms.Delta()) as store:
        for step in range(3):
            store.save(step, {"model": model})
            assert torch.equal(store.open("model").tensor("one"), model.one)
            model.one += 1


def test_publishing_in_another_dtype(tmp_path: Path) -> None:
    store, model = ms.Store(tmp_path, delta=ms.Delta(dtype="bfloat16")), Model()
    model.register_buffer("floats", torch.randn(8, dtype=torch.float64))
    optimizer = torch.optim.AdamW(model.small.parameters())
    model.small(torch.randn(2, 20)).sum().backward()
    optimizer.step()
    floats = nn.ParameterList([torch.ones(2)])
    objects = {"model": model, "optimizer": optimizer, "float": floats, "state": torch.ones(3)}
    for step in range(2):
        model.train_step()
        store.save(step, objects, background=step == 1)
    store.wait()
    opened = store.open("model", verify=True)
    expected = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    assert same({name: opened.tensor(name) for name in sorted(opened)}, dict(sorted(expected.items())))
    assert opened["small.weight"].kind == "patched 1 times"
    assert opened["tied.weight"].kind == "patched 1 times"
    assert store.open("float")["0"].dtype == torch.bfloat16
    assert all(spec.dtype == torch.float32 for spec in store.open("optimizer").values())
    assert model.small.weight.dtype == torch.float32
    assert store.restore({"state": None}, allow_unexpected=["*"])["state"].dtype == torch.float32


@pytest.mark.parametrize("options", [{"full_every": 0}, {"full_every": 1.5}, {"dtype": "int8"}, {"dtype": 16}, None])
def test_options(tmp_path: Path, options: dict[str, Any] | None) -> None:
    with pytest.raises(errors.OptionError):
        ms.Store(tmp_path, delta=True if options is None else ms.Delta(**options))  # type: ignore[arg-type]
    assert ms.Delta() == ms.Delta(full_every=32, dtype=None)


def test_a_store_that_has_no_deltas_any_more(tmp_path: Path) -> None:
    model = Model()
    with only(tmp_path) as store:
        for step in range(2):
            model.train_step()
            store.save(step, {"model": model})
    with ms.Store(tmp_path) as store:
        state = model.train_step()
        saved = store.save(2, {"model": model})
        assert not patch_files(saved)
        assert saved.linked_bytes > 6000  # the frozen layer
        assert is_same(store, 2, state)
        saved = store.save(3, {"model": model})
    with only(tmp_path) as store:
        state = model.train_step()
        assert len(patch_files(store.save(4, {"model": model}))) == 1
        assert is_same(store, 4, state)


# What goes wrong.


def test_a_save_that_fails_is_followed_by_a_right_one(tmp_path: Path) -> None:
    store, model = only(tmp_path), Model()
    states = {}
    for step in range(2):
        states[step] = model.train_step()
        store.save(step, {"model": model})
    was = contents(tmp_path)
    model.train_step()
    with (
        faulty_writes(at=12, error=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        pytest.raises(errors.WriteFailedError),
    ):
        store.save(2, {"model": model})
    assert contents(tmp_path) == was
    states[2] = model.train_step()
    assert len(patch_files(store.save(2, {"model": model}))) == 2
    pending = store.save(3, {"model": model}, background=True)
    assert pending is not None
    pending.cancel()
    states[3] = model.train_step()
    store.save(3, {"model": model}, overwrite=True)
    assert all(is_same(store, step, state) for step, state in states.items())
    assert store.verify() == dict.fromkeys(range(4), "")


def test_the_last_step_is_taken_away_or_is_of_another_process(tmp_path: Path) -> None:
    """The values that are there are the base, not the copy that this process has kept."""
    store, model = only(tmp_path), Model()
    for step in range(3):
        model.train_step()
        saved = store.save(step, {"model": model})
    shutil.rmtree(saved.path)
    state = model.train_step()
    assert len(patch_files(store.save(3, {"model": model}))) == 2
    assert is_same(store, 3, state)
    with pytest.raises(errors.LockedError), only(tmp_path) as other:
        other.save(4, {"model": model})
    copied = shutil.copytree(
        tmp_path, f"{tmp_path}.copy", copy_function=os.link, ignore=shutil.ignore_patterns(".lock")
    )
    with only(copied) as other:
        model.train_step()
        path = other.save(4, {"model": model}).path
    shutil.copytree(path, path.replace(".copy", ""))
    state = model.train_step()
    assert len(patch_files(store.save(5, {"model": model}))) == 4
    assert is_same(store, 5, state)


@pytest.mark.parametrize("files", ["", r"model\.delta-"], ids=["all", "some"])
def test_links_that_fail(tmp_path: Path, files: str) -> None:
    store, model = only(tmp_path), Model()
    for step in range(4):
        state = model.train_step()
        with nullcontext() if files and step < 3 else failing(OSError(errno.EPERM, "no links"), "link", files):
            saved = store.save(step, {"model": model})
        assert bool(saved.linked_bytes) == bool(files and step)
        assert is_same(store, step, state)
    assert not patch_files(saved)
    assert store.verify(3) == {3: ""}
    assert {path.name for path in Path(saved.path).iterdir()} - {"checkpoint.json"} == set(
        ms.Store(tmp_path).index.step(3).file_names() or ()
    )


def test_a_step_that_is_removed_after_it_was_opened(tmp_path: Path) -> None:
    """What has been read is right; what is gone is an error, also where a later step has links to it."""
    store, model = only(tmp_path), Model()
    for step in range(3):
        state = model.train_step()
        store.save(step, {"model": model})
    opened, target = [ms.Store(tmp_path).open("model", step) for step in (1, 2)], Model()
    before = target.copy()
    assert store.prune(1) == (0, 1)
    with pytest.raises(errors.ModelStateError, match="step-000000001"):
        ms.load(target, opened[0])
    assert same(target.state_dict(), before)
    ms.load(target, opened[1])
    assert same(target.state_dict(), state)


@pytest.mark.parametrize("harm", [flip, Path.unlink, cut])
@pytest.mark.parametrize("layer", [0, 1, 2], ids=["base", "first patch", "last patch"])
def test_a_damaged_layer(tmp_path: Path, layer: int, harm: Callable[[Path], object]) -> None:
    """No wrong weights: the step is refused, the one before is restored, and the next save is whole."""
    store, model, states = only(tmp_path), Model(), []
    for step in range(3):
        states.append(model.train_step())
        saved = store.save(step, {"model": model})
    base = max(Path(saved.path).glob("model-*"), key=lambda path: path.stat().st_size)
    harmed = [base, *patch_files(saved)][layer]
    harm(harmed)  # only the link of this step
    reader, target = ms.Store(tmp_path), Model()
    before = target.copy()
    assert "damaged" in reader.verify()[2]
    for _ in range(2):
        with pytest.raises(errors.DamagedCheckpointError, match="restore another step, such as 1: "):
            reader.restore({"model": target}, 2)
    assert same(target.state_dict(), before)
    if layer and harm is flip:  # also without `verify`: a patch must not fail in the middle of a commit
        with pytest.raises(errors.DamagedCheckpointError, match="patch"):
            ms.Store(tmp_path).open("model", 2)
        with pytest.raises(errors.DamagedFileError, match="checksum") as raised:
            ms.open(Path(saved.path) / "model.safetensors.index.json")
        assert raised.value.where == str(harmed)
    with pytest.warns(errors.DamagedCheckpointWarning):
        assert ms.Store(tmp_path).restore({"model": target}).step == 1
    assert same(target.state_dict(), states[1])
    store.verify()
    state = model.train_step()
    store.save(3, {"model": model})
    assert is_same(store, 3, state)
    assert store.verify(3) == {3: ""}


@pytest.mark.parametrize("is_other", [True, False], ids=["of another store", "the same one twice"])
def test_a_patch_of_another_base_is_refused(tmp_path: Path, is_other: bool) -> None:
    """Files of two stores, with records and indexes that are right by themselves; or one patch in place of the next."""
    saved = []
    for number in range(2):
        store, model = only(tmp_path / str(number)), Model()
        for step in range(3):
            torch.manual_seed(number)
            model.train_step(0.01 * (number + 1))
            last = store.save(step, {"model": model})
        saved.append(last)
    mine, other = (patch_files(step) for step in saved)
    lost, instead = (mine[0], other[0]) if is_other else (mine[1], mine[0])
    lost.unlink()
    os.link(instead, lost)
    with pytest.raises(errors.DamagedFileError, match="do not fit together"):
        ms.open(saved[0].path)
    assert "damaged" in ms.Store(tmp_path / "0").verify()[2]


def test_base_that_is_damaged_is_not_patched(tmp_path: Path) -> None:
    """A new process reads it, and sees that its digest is another one."""
    model = Model()
    with only(tmp_path) as store:
        model.train_step()
        saved = store.save(0, {"model": model})
    flip(max(Path(saved.path).glob("model-*"), key=lambda path: path.stat().st_size))
    with only(tmp_path) as store:
        state = model.train_step()
        store.save(1, {"model": model})
        fresh = Model()
        ms.load(fresh, store.open("model", 1, verify=True))
        assert same(fresh.state_dict(), state)


def test_in_inference_mode_and_out_of_it(tmp_path: Path) -> None:
    store, model = only(tmp_path), Model()
    for step in range(4):
        state = model.train_step()
        with torch.inference_mode(step % 2 == 0):
            assert len(patch_files(store.save(step, {"model": model}))) == step
        assert is_same(store, step, state)


def patches(layers: list[str]) -> list[str]:
    return [layer for layer in layers if ".delta-" in layer]


def swapped(index: dict[str, Any], layers: list[str]) -> None:
    first, second = map(layers.index, patches(layers)[:2])
    layers[first], layers[second] = layers[second], layers[first]


OTHER_LAYERS: dict[str, Callable[[dict[str, Any], list[Any]], object]] = {
    "swapped": swapped,
    "without the first patches": lambda index, layers: layers.remove(patches(layers)[0]),
    "with a gap": lambda index, layers: layers.remove(patches(layers)[1]),
    "cut short": lambda index, layers: layers.pop(),
    "without a base": lambda index, layers: layers.__delitem__(slice(2)),
    "without a manifest": lambda index, layers: index["metadata"].pop(KEY),
    "elsewhere": lambda index, layers: layers.insert(0, "../other.safetensors"),
    "of numbers": lambda index, layers: layers.append(1),
}


@pytest.mark.parametrize("change", OTHER_LAYERS)
def test_an_index_with_other_layers_is_refused(tmp_path: Path, change: str) -> None:
    store, model = only(tmp_path), Model()
    for step in range(4):
        model.train_step()
        saved = store.save(step, {"model": model})
    path = Path(saved.path) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    layers = json.loads(index["metadata"][LAYERS])
    OTHER_LAYERS[change](index, layers)
    index["metadata"] |= {SEAL: OPEN_SEAL, LAYERS: json.dumps(layers)}
    path.write_bytes(sealed(json.dumps(index).encode().ljust(path.stat().st_size)))
    with pytest.raises(errors.DamagedCheckpointError):
        store.open("model", 3)
    if change != "without the first patches":  # the record of the step has the names of all files
        with pytest.raises(errors.DamagedFileError):
            ms.open(path)


def test_a_tensor_that_begins_anew_after_patches(tmp_path: Path) -> None:
    """Its patches are in files that another tensor needs; the file that they were for is not linked any more."""
    store, model = only(tmp_path), nn.ModuleDict({"a": nn.Linear(90, 90)})
    for step in range(6):
        if step == 1:
            model["b"] = nn.Linear(20, 20)
        for param in model.parameters():
            param.data.view(-1)[:3] += 1
        if step == 4:
            nn.init.uniform_(model["b"].weight)
            nn.init.uniform_(model["b"].bias)
        store.save(step, {"model": model})
        assert ms.diff(ms.Store(tmp_path).open("model", verify=True), model).is_equal
    kinds = {name: spec.kind for name, spec in store.open("model").items()}
    assert (kinds["a.weight"], kinds["b.weight"]) == ("patched 5 times", "patched 1 times")


class Run:
    """A model of layers of several kinds, which come and go, with all that a run does to a store."""

    def __init__(self, directory: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.chance, self.directory, self.states = random.Random(seed), directory, dict[int, dict[str, torch.Tensor]]()
        self.model = nn.ModuleDict({f"{number}": self.layer() for number in range(4)})
        self.store = self.opened()

    def layer(self) -> nn.Module:
        sizes = self.chance.choices([8, 40, 90], k=2)
        layer = nn.Linear(*sizes).to(self.chance.choice([torch.float32, torch.bfloat16, torch.float64]))
        return layer.requires_grad_(self.chance.random() < 0.7)

    def opened(self) -> ms.Store:
        delta = self.chance.choice([None, *(ms.Delta(full_every=number) for number in (1, 2, 4, 32, 32))])
        size = self.chance.choice([None, 3000, 20_000])
        return ms.Store(self.directory, delta=delta, shard_size_bytes=size, keep=self.chance.choice([1, 3]))

    @torch.no_grad()
    def change(self) -> None:
        kind, names = self.chance.random(), list(self.model)
        if kind < 0.1:
            self.model[f"{self.chance.randrange(8)}"] = self.layer()
        elif kind < 0.15 and len(names) > 1:
            self.model.pop(self.chance.choice(names))
        elif kind < 0.25:
            self.store.close()
            self.store = self.opened()
        for param in self.model.parameters() if kind > 0.3 else ():
            if self.chance.random() < 0.05:
                param.normal_()
            elif param.requires_grad and self.chance.random() < 0.8:
                param += torch.randn_like(param) * (torch.rand_like(param) < 0.02)

    def save(self) -> None:
        step = max(self.states, default=0) + self.chance.choice([0, 1, 1])
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        full, at = OSError(errno.ENOSPC, "full"), self.chance.choice([10_000, 10_000, self.chance.randrange(1, 20)])
        with suppress(errors.WriteFailedError), faulty_writes(at=at, error=full):
            pending = self.store.save(step, {"model": self.model}, overwrite=True, background=True)
            assert pending is not None
            pending.result()
            self.states[step] = state

    def check(self) -> None:
        store = ms.Store(self.directory)
        for step in store.steps():
            opened = store.open("model", step, verify=True)
            assert same(dict(sorted(opened.value().items())), dict(sorted(self.states[step].items()))), step


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens(tmp_path: Path, seed: int) -> None:
    run = Run(tmp_path, seed)
    for number in range(60):
        run.change()
        run.save()
        if number % 5 == 0:
            run.check()
    run.check()
