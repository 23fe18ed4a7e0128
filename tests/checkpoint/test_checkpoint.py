"""The Checkpoint: a mapping that says what is in a file, and the ways to its bytes."""

import json
import os
import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import modelstate as ms
from modelstate import Checkpoint, TensorSpec, errors
from modelstate.errors import KeyNotFoundError, OptionError, ReadFailedError
from tests.faults import Request, faulty_reads
from tests.formats.files import entry, safetensors_bytes, same
from tests.formats.torch_files import WEIGHT, as_bytes, rich_tree, saved, training

# A mapping.


def test_it_is_a_mapping_in_the_order_of_the_file(checkpoint: Checkpoint) -> None:
    names = [f"model_state.{name}" for name in training()["model_state"]] + ["optimizer.state.0.exp_avg"]
    assert isinstance(checkpoint, Mapping)
    assert list(checkpoint) == list(checkpoint.keys()) == names
    assert len(checkpoint) == len(names)
    assert all(isinstance(spec, TensorSpec) and spec.name == name for name, spec in checkpoint.items())
    spec = checkpoint["model_state.0.weight"]
    assert (spec.shape, spec.stride) == ((4, 3), (3, 1))
    assert (spec.dtype, spec.nbytes, spec.kind) == (torch.float32, 48, "strided")
    assert "model_state.0.weight" in checkpoint
    assert "model_state" not in checkpoint
    assert 0 not in checkpoint
    assert checkpoint.get("model_state.0.weight") == spec
    assert checkpoint.get("nothing") is None
    assert checkpoint.get("nothing", 3) == 3


def test_it_is_itself_and_nothing_else(checkpoint: Checkpoint, path: str) -> None:
    other = ms.open(path)
    assert checkpoint == checkpoint
    assert checkpoint != other
    assert len({checkpoint, other, checkpoint}) == 2


@pytest.mark.parametrize("ask", [Checkpoint.__getitem__, Checkpoint.tensor, lambda c, name: c.read_into(name, WEIGHT)])
def test_a_name_that_is_not_there(checkpoint: Checkpoint, ask: Callable[[Checkpoint, str], object]) -> None:
    with pytest.raises(KeyNotFoundError, match=r"did you mean 'model_state\.0\.weight'\?") as caught:
        ask(checkpoint, "model_state.0.wieght")
    assert isinstance(caught.value, KeyError)
    assert caught.value.found == "model_state.0.wieght"
    assert caught.value.where == checkpoint.source
    with pytest.raises(KeyNotFoundError, match=r"did you mean 'model_state\.0\.weight' or 'model_state\.1\.weight'\?"):
        ask(checkpoint, "weight")
    with pytest.raises(KeyNotFoundError, match="iterate over the checkpoint"):
        ask(checkpoint, "#")


def test_what_it_says_of_itself(checkpoint: Checkpoint, path: str) -> None:
    assert (checkpoint.source, checkpoint.files, checkpoint.key) == (path, (path,), "")
    assert checkpoint.format == "torch zip"
    assert checkpoint.fingerprints[path].nbytes == os.path.getsize(path)
    assert repr(checkpoint) == f"<Checkpoint {path!r}: 9 tensors, {checkpoint.nbytes} bytes, torch zip>"
    assert f"{path!r}, key='config'" in repr(ms.open(path, key="config"))


# Parts.


@pytest.mark.parametrize("by", [lambda path, key: ms.open(path, key=key), lambda p, k: ms.open(p).select(k)])
def test_a_part(path: str, by: Callable[[str, str], Checkpoint]) -> None:
    part = by(path, "model_state")
    state = training()["model_state"]
    assert list(part) == list(state)
    assert part.key == "model_state"
    assert same(part.tensor("0.weight"), WEIGHT)
    assert dict(part.extra) == {}
    assert part.containers == ("",)
    assert part.aliases == (("0.weight", "tied"),)
    assert part.select("0").key == "model_state.0"
    assert list(part.select("0")) == list(by(path, "model_state.0")) == ["weight", "bias"]
    assert list(by(path, "optimizer.state")) == ["0.exp_avg"]
    assert list(by(path, "")) == list(ms.open(path))


def test_parts_of_lists_and_of_flat_names() -> None:
    checkpoint = ms.open({"ema": [{"w": WEIGHT}, {"w": WEIGHT}], "encoder.w": WEIGHT, "encoder.b": WEIGHT[0]})
    assert list(checkpoint.select("ema.1")) == ["w"]
    assert list(checkpoint.select("encoder")) == ["w", "b"]
    quantized = {"w": torch.zeros(2), "w.absmax": torch.ones(1)}  # a name that other names begin with
    assert list(ms.open(quantized).select("w")) == ["absmax"]
    with pytest.raises(KeyNotFoundError):
        checkpoint.select("enc")


@pytest.mark.parametrize("key", ["model", "model_state.0.weight", "step", "model_state.", ".model_state", " "])
def test_a_key_that_selects_nothing(path: str, key: str) -> None:
    with pytest.raises(
        KeyNotFoundError, match=r"one of 'model_state' \(8 tensors\), 'optimizer' \(1 tensor\)"
    ) as caught:
        ms.open(path, key=key)
    assert isinstance(caught.value, KeyError)
    assert repr(key) in caught.value.what


@pytest.mark.parametrize("key", [3, ("a",), b"a", 0, [], False])
def test_a_key_that_is_no_text(checkpoint: Checkpoint, key: Any) -> None:
    for select in (checkpoint.select, lambda key: ms.open({"a": {"b": WEIGHT}}, key=key)):
        with pytest.raises(OptionError, match="dotted path"):
            select(key)


def test_a_key_for_a_flat_state_dict_is_not_answered_with_names_of_tensors() -> None:
    with pytest.raises(KeyNotFoundError, match="no parts") as caught:
        ms.open({"weight": WEIGHT, "bias": WEIGHT[0]}, key="model")
    assert caught.value.expected == ""


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_a_part_of_saved_values(name: str, tmp_path: Path) -> None:
    config = {"lr": 0.1, "model": {"layers": 2, "sizes": [3, 4]}}
    ms.save({"state": {"w": torch.ones(2)}, "config": config}, tmp_path / name)
    checkpoint = ms.open(tmp_path / name)
    assert dict(checkpoint.select("config").extra) == config
    assert dict(ms.open(tmp_path / name, key="config.model").extra) == config["model"]
    assert dict(checkpoint.select("config").select("model").extra) == config["model"]
    assert checkpoint.value("config.model.sizes") == checkpoint.extra["config.model.sizes"] == [3, 4]
    assert checkpoint.select("config").value("model") == config["model"]
    with pytest.raises(KeyNotFoundError):
        checkpoint.value("config.modle")
    with pytest.raises(KeyNotFoundError):
        checkpoint.select("config.lr")


def test_containers(checkpoint: Checkpoint) -> None:
    assert checkpoint.containers == ("", "model_state", "optimizer", "optimizer.state", "optimizer.state.0")
    assert checkpoint.select("optimizer").containers == ("", "state", "state.0")
    for key in checkpoint.containers:
        assert len(checkpoint.select(key)) > 0


# What is shared.


def test_aliases_are_the_same_bytes_in_the_same_shape(tmp_path: Path) -> None:
    tree = {
        "a": WEIGHT,
        "b": WEIGHT,
        "c": WEIGHT.t(),
        "d": WEIGHT[:2],
        "e": WEIGHT[2:],
        "f": WEIGHT[:2],
        "g": WEIGHT.clone(),
    }
    sparse = torch.eye(3).to_sparse()
    tree |= {"empty": torch.empty(0), "none": torch.empty(0), "s": sparse, "t": sparse, "u": torch.eye(3).to_sparse()}
    for source in (tree, saved(tmp_path / "x.pt", tree)):
        assert ms.open(source).aliases == (("a", "b"), ("d", "f"), ("s", "t"))


# Versions and metadata.


def test_versions_under_keys_and_prefixes(checkpoint: Checkpoint) -> None:
    true = {"": {"version": 1}, "0": {"version": 1}, "1": {"version": 2}}
    assert checkpoint.versions is None
    assert checkpoint.metadata == {}
    part = checkpoint.select("model_state")
    assert part.versions == true
    assert part.metadata == {"versions": true}
    assert part.select("1").versions == checkpoint.select("model_state.1").versions == {"": {"version": 2}}
    assert checkpoint.select("optimizer").versions is None


# Values.


def test_versions_of_a_flat_state_dict_under_a_prefix() -> None:
    state = torch.nn.ModuleDict(
        {"m": torch.nn.Sequential(torch.nn.BatchNorm1d(2)), "mm": torch.nn.Linear(1, 1)}
    ).state_dict()
    assert ms.open(state).versions == state._metadata  # type: ignore[attr-defined]
    assert ms.open(state, key="m").versions == {"": {"version": 1}, "0": {"version": 2}}
    assert ms.open({"net": state}, key="net.m.0").versions == {"": {"version": 2}}


def test_values_by_their_paths(checkpoint: Checkpoint) -> None:
    extra = checkpoint.extra
    assert dict(extra) == {
        "step": 12,
        "optimizer.param_groups": [{"lr": 0.1, "params": [0, 1]}],
        "config": {"sizes": [3, 4], "name": "net"},
    }
    assert len(extra) == 3
    assert extra["optimizer.param_groups.0.lr"] == 0.1
    assert extra["optimizer.param_groups.0.params.1"] == 1
    assert extra["config.sizes"] == [3, 4]
    assert checkpoint.select("optimizer").extra["param_groups.0.lr"] == 0.1
    assert "config.name" in extra
    assert "config.nome" not in extra
    assert extra.get("config.sizes.7", "none") == "none"
    assert repr(checkpoint.select("config").extra) == "{'sizes': [3, 4], 'name': 'net'}"


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ("stap", "did you mean 'step'?"),
        ("model_state.0.bias", "it is a tensor: .tensor('model_state.0.bias')"),
        ("optimizer", "there are tensors in it: .select('optimizer')"),
        ("#", "iterate over .extra to see its paths"),
        (0, "iterate over .extra to see its paths"),
        ("", "there are tensors in it: .select('')"),
    ],
)
def test_a_value_that_is_not_there(checkpoint: Checkpoint, asked: str, remedy: str) -> None:
    with pytest.raises(KeyNotFoundError) as caught:
        checkpoint.extra[asked]
    assert caught.value.remedy == remedy
    assert asked not in checkpoint.extra


def test_values_are_copies(tmp_path: Path) -> None:
    state = {"_extra_state": {"scale": WEIGHT, "seen": {1}}, "w": WEIGHT, "config": {"sizes": [1]}}
    ms.save(state, tmp_path / "x.safetensors")
    for source in (state, saved(tmp_path / "x.pt", state), tmp_path / "x.safetensors"):
        checkpoint = ms.open(source)
        value = checkpoint.extra["_extra_state"]
        assert same(value["scale"], WEIGHT)
        value["scale"].zero_()
        value["seen"].add(2)
        value["more"] = 1
        checkpoint.extra["config.sizes"].append(2)
        assert checkpoint.extra["_extra_state"].keys() == {"scale", "seen"}
        assert same(checkpoint.extra["_extra_state"]["scale"], WEIGHT)
        assert checkpoint.extra["_extra_state"]["seen"] == {1}
        assert checkpoint.extra["config"] == {"sizes": [1]}
    assert WEIGHT.sum() == 66


# Tensors that show the file.


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_results_can_be_pickled_and_a_checkpoint_says_why_it_cannot(tmp_path: Path) -> None:
    module, state = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).state_dict()
    results = (ms.load(module, state), ms.diff(state, {"bias": torch.ones(2)}), ms.inspect(state).stats())
    for result in results:
        assert str(pickle.loads(pickle.dumps(result))) == str(result)
    for holder in (ms.open(state), ms.inspect(state), ms.plan(module, state)):
        with pytest.raises(TypeError, match="a Checkpoint holds open files"):
            pickle.dumps(holder)


def test_a_tensor_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = json.dumps({"w": entry("F32", [1 << 28], 0, 1 << 30)}).encode()
    path.write_bytes(safetensors_bytes(header.ljust(-(-len(header) // 8) * 8)))
    os.truncate(path, path.stat().st_size + (1 << 30))
    before = resident_bytes()
    tensor = ms.open(path).tensor("w")
    assert tensor.shape == (1 << 28,)
    assert tensor[-1] == 0
    assert resident_bytes() - before < 32 << 20


@pytest.mark.parametrize("map", [None, True, False])
def test_writing_to_a_tensor_stays_private(map: bool | None, checkpoint: Checkpoint, path: str) -> None:
    before = Path(path).read_bytes()
    name, tied = "model_state.0.weight", "model_state.tied"
    ours, other = checkpoint.tensor(name, map=map), ms.open(path).tensor(name, map=map)
    ours.fill_(7)
    assert (checkpoint.tensor(name, map=map) == 7).all()
    assert (checkpoint.tensor(tied, map=map) == 7).all()
    assert same(other, WEIGHT)
    assert same(ms.open(path).tensor(name), WEIGHT)
    assert Path(path).read_bytes() == before


def test_tensors_outlive_the_checkpoint(path: str) -> None:
    with ms.open(path) as checkpoint:
        tensor = checkpoint.tensor("model_state.0.weight")
        tensor[0, 0] = 7
    assert isinstance(checkpoint, Checkpoint)
    assert tensor[0, 0] == 7
    assert checkpoint.tensor("model_state.0.weight")[0, 0] == 0
    del checkpoint
    assert same(tensor[1:], WEIGHT[1:])


def test_close_gives_the_map_up(path: str) -> None:
    checkpoint = ms.open(path)
    checkpoint.tensor("model_state.0.weight", map=True)
    assert path in Path("/proc/self/maps").read_text()
    checkpoint.close()
    assert path not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("size", [8, 1 << 18])
def test_torch_save_over_the_file_does_not_change_a_tensor(size: int, tmp_path: Path) -> None:
    """`torch.save` of the same process overwrites the file in place, with the same layout and then a shorter one."""
    path = tmp_path / "x.pt"
    weight = torch.ones(2 * size)
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 1.0], (3,))
    torch.save({"weight": weight, "rows": weight[size:], "tied": weight, "sparse": sparse}, path)
    checkpoint = ms.open(path)
    whole, rows, coo = (checkpoint.tensor(name) for name in ("weight", "rows", "sparse"))
    torch.save({"weight": weight * 2, "rows": weight[size:] * 2, "tied": weight, "sparse": sparse * 2}, path)
    assert whole.eq(1).all()
    assert rows.eq(1).all()
    assert coo.to_dense().tolist() == [1, 0, 1]
    torch.save({}, path)
    assert whole.eq(1).all()


def test_map_says_how_a_tensor_is_given(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"weight": torch.ones(4)}, path)

    def is_mapped(**options: Any) -> bool:
        weight = ms.open(path).tensor("weight", **options)
        assert weight.tolist() == [1] * 4
        return _shows(path, weight)

    assert is_mapped(map=True)
    assert not is_mapped()
    assert not is_mapped(map=False)
    with pytest.raises(errors.OptionError, match="map="):
        ms.open(path).tensor("weight", map="yes")  # type: ignore[arg-type]


def _shows(path: Path, tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is a map of the file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith(str(path))
    return False


def test_it_holds_no_descriptor(path: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = ms.open(path)
    checkpoint.read_into("model_state.0.weight", torch.empty(4, 3))
    checkpoint.verify()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_mapping_gives_detached_aliases() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    found = ms.open({"p": parameter}).tensor("p")
    assert not found.requires_grad
    assert found.data_ptr() == parameter.data_ptr()


def test_numbers_at_odd_addresses_are_aligned(tmp_path: Path) -> None:
    values = WEIGHT[0, 1:]
    header = {"byte": entry("U8", [1], 0, 1), "odd": entry("F32", [2], 1, 9), "next": entry("F32", [2], 9, 17)}
    path = tmp_path / "x.safetensors"
    for padding in range(4):  # one of them puts "odd" at a multiple of 4
        path.write_bytes(
            safetensors_bytes(json.dumps(header).encode() + b" " * padding, b"\x01" + as_bytes(values) * 2)
        )
        for name in ("odd", "next"):
            found = ms.open(path).tensor(name)
            assert found.data_ptr() % 4 == 0
            assert same(found, values)


# Reading into memory.


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return ms.open(saved(tmp_path_factory.mktemp("rich") / "x.pt", rich_tree()))


def test_everything_can_be_read_into_memory(rich: Checkpoint) -> None:
    for name, spec in rich.items():
        out = torch.empty(spec.shape, dtype=spec.dtype)
        rich.read_into(name, out)
        assert same(out, rich.tensor(name))


bounds = st.none() | st.integers(-6, 6)


@pytest.mark.slow
@given(start=bounds, stop=bounds, data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_counted_as_slices_count_them(
    rich: Checkpoint, start: int | None, stop: int | None, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([f"views.{i}" for i in range(5)] + ["shared.1", "empty.0", "empty.1", "empty.2"]))
    true = rich.tensor(name)[start:stop]
    memory = torch.full((true.numel() + 2,), 77.0)
    out = memory[1:-1].view(true.shape)
    rich.read_into(name, out, start, stop)
    assert same(out, true)
    assert memory[0] == memory[-1] == 77


@pytest.mark.parametrize("name", ["views.0", "views.1"], ids=["contiguous", "strided"])
def test_memory_that_is_not_contiguous(rich: Checkpoint, name: str) -> None:
    true = rich.tensor(name)
    wide = torch.full((true.shape[0], 2 * true.shape[1]), 77.0)
    rich.read_into(name, wide[:, ::2])
    assert torch.equal(wide[:, ::2], true)
    assert (wide[:, 1::2] == 77).all()
    across = torch.empty(true.shape[::-1]).t()
    rich.read_into(name, across)
    assert torch.equal(across, true)


@pytest.mark.parametrize("name", ["views.0", "views.1"], ids=["contiguous", "strided"])
def test_autograd_sees_that_memory_was_read_into(rich: Checkpoint, name: str) -> None:
    out = torch.zeros(rich[name].shape)
    product = (out * torch.ones_like(out, requires_grad=True)).sum()
    rich.read_into(name, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def cut(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


UNFIT: dict[str, Callable[[], Any]] = {
    "too few rows": lambda: torch.full((3, 6), 7.0),
    "another shape of the same size": lambda: torch.full((6, 4), 7.0),
    "another dtype": lambda: torch.full((4, 6), 7.0, dtype=torch.float64),
    "a dtype of the same size": lambda: torch.full((4, 6), 7, dtype=torch.int32),
    "meta": lambda: torch.empty(4, 6, device="meta"),
    "no memory behind it": lambda: cut(torch.full((4, 6), 7.0), 0),
    "too little memory behind it": lambda: cut(torch.full((4, 6), 7.0), 40),
    "no tensor": lambda: [7.0],
    "elements that share memory": lambda: torch.full((1, 6), 7.0).expand(4, 6),
    "sparse": lambda: torch.full((4, 6), 7.0).to_sparse(),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("name", ["views.0", "strided"])
def test_what_does_not_fit_is_not_written_to(tmp_path: Path, kind: str, name: str) -> None:
    wide = torch.arange(48.0).reshape(4, 12)
    checkpoint = ms.open(saved(tmp_path / "x.pt", {"views": [wide[:, :6].clone()], "strided": wide[:, ::2]}))
    out = UNFIT[kind]()
    before = bytes(out.untyped_storage()) if kind not in ("meta", "no tensor", "sparse") else None
    with pytest.raises(OptionError) as caught:
        checkpoint.read_into(name, out)
    assert isinstance(caught.value, ValueError)
    assert caught.value.where == f"{checkpoint.source}: {name}"
    assert caught.value.expected
    assert caught.value.found
    assert before is None or bytes(out.untyped_storage()) == before


def test_rows_have_to_fit_too(rich: Checkpoint) -> None:
    out = torch.full((4, 6), 7.0)
    with pytest.raises(OptionError, match=r"torch\.float32 of shape \(2, 6\)"):
        rich.read_into("views.0", out, 1, 3)
    assert (out == 7).all()
    with pytest.raises(OptionError, match="no rows"):
        rich.read_into("scalar", torch.empty(()), 0, 1)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["sparse", "sparse_csr"])
def test_what_sparse_tensors_do_not_allow(tmp_path: Path, layout: str) -> None:
    tensor = getattr(torch.eye(3), f"to_{layout}")()
    checkpoint = ms.open(saved(tmp_path / "x.pt", {"s": tensor}))
    for rows in ((), (1, 2)):
        with pytest.raises(OptionError, match="cannot copy"):
            checkpoint.read_into("s", torch.empty((1, 3) if rows else (3, 3)), *rows)


def test_a_tensor_without_data_cannot_be_read() -> None:
    with pytest.raises(OptionError, match="no data"):
        ms.open({"m": torch.empty(2, device="meta")}).read_into("m", torch.empty(2))


# Files that change.


def append(path: str) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def touch(path: str) -> None:
    os.utime(path, ns=(0, time.time_ns() + 10**9))


def replace(path: str) -> None:
    os.replace(saved(Path(path + ".new"), {"another": torch.zeros(1000)}), path)


CHANGES: dict[str, Callable[[str], None]] = {
    "longer": append,
    "shorter": lambda path: os.truncate(path, 900),
    "written to": touch,
    "replaced": replace,
    "gone": os.unlink,
}
READS: dict[str, Callable[[Checkpoint], object]] = {
    "tensor": lambda checkpoint: checkpoint.tensor("model_state.0.weight"),
    "read_into": lambda checkpoint: checkpoint.read_into("model_state.0.weight", torch.empty(4, 3)),
    "read_into a view": lambda checkpoint: checkpoint.read_into("model_state.0.weight", torch.empty(3, 4).t()),
    "verify": lambda checkpoint: checkpoint.verify(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_is_not_read(
    path: str, checkpoint: Checkpoint, change: str, read: Callable[[Checkpoint], object]
) -> None:
    CHANGES[change](path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ReadFailedError, match="open the checkpoint again") as caught:
        read(checkpoint)
    assert isinstance(caught.value, OSError)
    assert path in caught.value.where
    assert ("another file under the same name" in caught.value.found) == (change == "replaced")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("change", ["replaced", "gone"])
def test_tensors_keep_the_file_that_was_replaced(path: str, checkpoint: Checkpoint, change: str) -> None:
    tensor = checkpoint.tensor("model_state.0.weight")
    CHANGES[change](path)
    assert same(tensor, WEIGHT)
    assert same(checkpoint.tensor("model_state.tied"), WEIGHT)


def test_a_file_that_cannot_be_read(checkpoint: Checkpoint) -> None:
    def fail(request: Request) -> None:
        if request.call == "preadv":
            raise OSError(5, "Input/output error")

    for name in ("read_into", "verify"):
        with faulty_reads(before=fail), pytest.raises(ReadFailedError, match="Input/output error"):
            READS[name](checkpoint)


@pytest.mark.filterwarnings("ignore")
def test_live_tensors_without_a_shape() -> None:
    with pytest.raises(errors.UnsupportedTensorError, match="without a shape"):
        ms.open({"w": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])})


@pytest.mark.parametrize("change", [lambda t: t.float(), lambda t: torch.full((1,), -5.0), lambda t: t[1:]])
@pytest.mark.parametrize("map", [None, True])
def test_what_is_done_to_a_tensor_does_not_show_in_the_next(map: bool | None, change: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4.0).half()}, tmp_path / "x.pt")
    checkpoint = ms.open(tmp_path / "x.pt")
    tensor = checkpoint.tensor("w", map=map)
    tensor.data = change(tensor.data)
    again = checkpoint.tensor("w", map=map)
    assert again.dtype is torch.float16
    assert again.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "shards.safetensors", "mapping"])
@pytest.mark.parametrize("path", ["", "run.model"])
def test_values_of_state_dicts_keep_the_versions_of_modules(tmp_path: Path, name: str, path: str) -> None:
    """Without them torch would load a BatchNorm as one of an old version."""
    state = torch.nn.BatchNorm1d(2).state_dict()
    source: Any = {"run": {"model": state, "step": 3}} if path else state
    if name != "mapping":
        ms.save(source, tmp_path / name, shard_size_bytes=8 if name.startswith("shards") else None)
        source = tmp_path / name
    value = ms.open(source).value(path)
    assert value._metadata == state._metadata  # type: ignore[attr-defined]
    assert value._metadata is not state._metadata  # type: ignore[attr-defined]
