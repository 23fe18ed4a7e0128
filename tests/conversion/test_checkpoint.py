"""Checkpoints are written anew, whatever their size, with all that is in them."""

import os
import re
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import modelstate as ms
from modelstate.errors import MemoryBudgetError, OptionError, ReadFailedError, RuleError, TargetExistsError
from tests.formats.dcp_files import halves, write as write_dcp
from tests.formats.files import same
from tests.programs import run_program

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def trained() -> dict[str, Any]:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    model.head(model.norm(model.embed(torch.arange(6)))).sum().backward()
    optimizer.step()
    return {
        "epoch": 3,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": [{"loss": torch.tensor(0.5)}, (1, "two")],
        "args": {"sizes": (1, 2), "names": {"a"}},
    }


@pytest.fixture
def training(tmp_path: Path) -> Path:
    torch.save(trained(), tmp_path / "training.pt")
    return tmp_path / "training.pt"


def litter(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if "unfinished" in name)


def assert_same(one: ms.Checkpoint, other: ms.Checkpoint) -> None:
    assert set(one) == set(other)
    for name in one:
        assert same(one.read(one.stored(name)), other.read(other.stored(name))), name
    assert dict(one.extra) == dict(other.extra)
    assert set(map(frozenset, one.aliases)) == set(map(frozenset, other.aliases))


def test_a_training_checkpoint_is_all_there(training: Path, tmp_path: Path) -> None:
    report = ms.convert_checkpoint(training, tmp_path / "x.safetensors")
    old, new = ms.open(training), ms.open(tmp_path / "x.safetensors")
    assert_same(old, new)
    assert new.select("model").versions == old.select("model").versions
    assert new.aliases == (("model.embed.weight", "model.head.weight"),)
    assert new.verify() > 0
    assert report.tensors == len(new) == 17
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    assert ms.load(model, new, key="model").coverage == 1.0
    state = torch.load(training)["optimizer"]
    optimizer.load_state_dict(state)
    assert "model.embed.weight" in load_file(tmp_path / "x.safetensors")


def test_there_and_back_again(training: Path, tmp_path: Path) -> None:
    ms.convert_checkpoint(training, tmp_path / "x.safetensors", shard_size_bytes=100)
    assert (tmp_path / "x.safetensors.index.json").exists()
    report = ms.convert_checkpoint(tmp_path / "x.safetensors", tmp_path / "back.pt", format="torch")
    assert_same(ms.open(training), ms.open(tmp_path / "back.pt"))
    back, first = torch.load(tmp_path / "back.pt"), torch.load(training)
    assert back["args"] == first["args"]
    assert back["model"]._metadata == first["model"]._metadata
    assert back["model"]["embed.weight"].data_ptr() == back["model"]["head.weight"].data_ptr()
    assert back["optimizer"]["param_groups"] == first["optimizer"]["param_groups"]
    assert report.tensors == 17
    # Of views only what they show is written.
    assert (tmp_path / "back.pt").stat().st_size < training.stat().st_size + 2000
    assert not litter(tmp_path)


def test_a_cast_is_that_of_torch(tmp_path: Path) -> None:
    count = (4 << 20) // 2 + 3  # of bfloat16: a block that is written at once, and some elements of the next
    state = {"a": torch.randn(count), "b": torch.randn(7, 3).t(), "n": torch.arange(5), "s": torch.tensor(0.3)}
    torch.save(state, tmp_path / "a.pt")
    ms.convert_checkpoint(tmp_path / "a.pt", tmp_path / "a.safetensors", dtype=torch.bfloat16)
    found = load_file(tmp_path / "a.safetensors")
    for name, tensor in state.items():
        assert same(found[name], tensor.bfloat16() if tensor.is_floating_point() else tensor), name
    assert ms.open(tmp_path / "a.safetensors").verify() == sum(tensor.nbytes for tensor in found.values())


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans(), st.integers(0, 2)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([None, torch.float32, torch.bfloat16]),
    st.sampled_from(["safetensors", "torch"]),
    st.sampled_from([None, 1, 64]),
)
def test_any_tensors(
    tmp_path: Path, kinds: list[Any], dtype: torch.dtype | None, format: str, shard_bytes: int | None
) -> None:
    state: dict[str, torch.Tensor] = {}
    for index, (kind, shape, turned, tie) in enumerate(kinds):
        tensor = torch.arange(int(np.prod(shape, dtype=int))).reshape(shape).to(kind)
        state[f"t{index}"] = tensor.mT if turned and tensor.dim() > 1 else tensor
        if tie == 2:
            state[f"tied{index}"] = state[f"t{index}"]
    torch.save(state, tmp_path / "a.pt")
    options: Any = {"format": format, "shard_size_bytes": None if format == "torch" else shard_bytes}
    ms.convert_checkpoint(tmp_path / "a.pt", tmp_path / "b", dtype=dtype, **options)
    found = ms.open(tmp_path / "b")
    assert set(found) == set(state)
    for name, tensor in state.items():
        wanted = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert same(found.read(found.stored(name)), wanted.contiguous()), name
    tied = {name for group in found.aliases for name in group}
    assert tied == {
        one for name in state if "tied" in name and state[name].numel() for one in (name, name.replace("tied", "t"))
    }


def test_rules(tmp_path: Path) -> None:
    model = Tied()
    ms.save(model, tmp_path / "a.safetensors", schema="1", extra={"note": [1]})
    before = (tmp_path / "a.safetensors").read_bytes()
    rules = [
        ms.rules.Prefix(add="net."),
        ms.rules.Split("net.embed.weight", ["q", "k"]),
        ms.rules.Transpose("net.head.weight", 0, 1),
    ]
    ms.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=rules, dtype=torch.float16)
    found = ms.open(tmp_path / "b.safetensors")
    wanted = ms.rules.Rules(rules).apply(model.state_dict())
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        cast = tensor.half() if tensor.is_floating_point() else tensor
        assert same(found.tensor(name), cast.contiguous()), name
    assert found.versions is not None
    assert found.versions["net.norm"] == {"version": 2}
    assert (found.metadata["schema"], found.metadata["extra"]) == ("1", {"note": [1]})
    assert (tmp_path / "a.safetensors").read_bytes() == before


def test_a_schema_brings_it_up_to_date(tmp_path: Path) -> None:
    ms.save({"old.weight": torch.ones(2)}, tmp_path / "a.safetensors", schema="1")
    schema = ms.rules.Schema(
        "1", [ms.rules.Migration("2", ms.rules.Rules([ms.rules.Rename("old.weight", "new.weight")]))]
    )
    ms.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "a.safetensors", rules=schema)
    found = ms.open(tmp_path / "a.safetensors")
    assert list(found) == ["new.weight"]
    assert schema.version_of(found) == "2"
    ms.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "a.safetensors", rules=schema)
    assert list(ms.open(tmp_path / "a.safetensors")) == ["new.weight"]


def test_what_a_file_says_of_itself_is_kept(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors", {"title": "mine", "format": "pt"})
    for shard_bytes in (None, 1):
        ms.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", shard_size_bytes=shard_bytes)
        metadata = ms.open(tmp_path / "b").metadata
        assert {key: metadata[key] for key in ("title", "format")} == {"title": "mine", "format": "pt"}


def test_parts_and_other_sources(training: Path, tmp_path: Path) -> None:
    ms.convert_checkpoint(training, tmp_path / "m.safetensors", key="model")
    assert set(load_file(tmp_path / "m.safetensors")) < set(Tied().state_dict())
    assert ms.open(tmp_path / "m.safetensors").versions is not None
    ms.convert_checkpoint(tmp_path / "m.safetensors", tmp_path / "n.safetensors", key="norm")  # a part of the names
    found = ms.open(tmp_path / "n.safetensors")
    assert set(found) == set(nn.BatchNorm1d(4).state_dict())
    assert found.versions == {"": {"version": 2}}
    write_dcp(tmp_path / "dcp", {"a": halves(torch.arange(6.0))}, {"n": 3})
    ms.convert_checkpoint(tmp_path / "dcp", tmp_path / "d.safetensors", dtype=torch.float16)
    assert same(ms.open(tmp_path / "d.safetensors").tensor("a"), torch.arange(6.0).half())
    average = ms.open([tmp_path / "m.safetensors"] * 2, combine=ms.merge.Average())
    ms.save(average, tmp_path / "average.safetensors")
    assert same(load_file(tmp_path / "average.safetensors")["norm.bias"], torch.load(training)["model"]["norm.bias"])
    live = {"a": torch.arange(4.0), "b": torch.arange(3)}
    ms.convert_checkpoint(live, tmp_path / "live.safetensors", dtype=torch.bfloat16)
    assert same(load_file(tmp_path / "live.safetensors")["a"], live["a"].bfloat16())


@pytest.mark.parametrize("options", [{}, {"format": "torch"}, {"rules": [ms.rules.Prefix(add="net.")]}])
def test_what_was_skipped_is_left_out(tmp_path: Path, options: Any) -> None:
    odd = defaultdict(list)
    torch.save({"m": {"a": torch.ones(3), "odd": odd}, "odd": odd, "deep": [1, {"odd": odd, "n": 2}]}, tmp_path / "a")
    ms.convert_checkpoint(ms.open(tmp_path / "a", skip_forbidden=True), tmp_path / "b", **options)
    found, prefix = ms.open(tmp_path / "b"), "net." if "rules" in options else ""
    assert list(found) == [f"{prefix}m.a"]
    assert dict(found.extra) == {f"{prefix}deep": [1, {"n": 2}]}


def quantized() -> nn.Sequential:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    quantization.quantize_(model[0], quantization.Int8WeightOnlyConfig())
    return model


def test_subclasses_of_tensors(tmp_path: Path) -> None:
    model = quantized()
    ms.save(model, tmp_path / "q.safetensors")
    ms.convert_checkpoint(
        tmp_path / "q.safetensors", tmp_path / "r.safetensors", rules=[ms.rules.Cast("1.*", torch.bfloat16)]
    )
    old, new = ms.open(tmp_path / "q.safetensors"), ms.open(tmp_path / "r.safetensors")
    assert {name: spec.kind for name, spec in new.items()} == {name: spec.kind for name, spec in old.items()}
    assert same(new.tensor("0.weight").dequantize(), model[0].weight.dequantize())
    assert same(new.tensor("1.weight"), model[1].weight.detach().bfloat16())


def test_quantized_tensors_are_not_left_in_another_dtype_than_the_rest(tmp_path: Path) -> None:
    model = quantized()
    ms.save(model, tmp_path / "q.safetensors")
    with pytest.raises(OptionError, match=r"0.weight[\s\S]*Int8Tensor of torch.float32"):
        ms.convert_checkpoint(tmp_path / "q.safetensors", tmp_path / "r.safetensors", dtype=torch.bfloat16)
    assert not (tmp_path / "r.safetensors").exists()
    ms.convert_checkpoint(tmp_path / "q.safetensors", tmp_path / "r.safetensors", dtype=torch.float32)


SPARSE: dict[str, Any] = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2)),
    "coo, with rows": lambda: torch.randn(3, 4).to_sparse(1),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
}


@pytest.mark.slow_except(8)
@pytest.mark.parametrize("rules", [(), [ms.rules.Rename("weight", "w")]], ids=["as it is", "by rules"])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_tensors_are_cast(kind: str, in_memory: bool, rules: Any, tmp_path: Path) -> None:
    tensor = SPARSE[kind]()
    state = {"weight": tensor, "other": tensor.to(torch.float64), "mask": tensor.to(torch.bool)}
    torch.save(state, tmp_path / "a.pt")
    source = state if in_memory else tmp_path / "a.pt"
    ms.convert_checkpoint(source, tmp_path / "b.pt", rules=rules, dtype=torch.float16)
    found = torch.load(tmp_path / "b.pt")
    assert [found[name].dtype for name in found] == [torch.float16, torch.float16, torch.bool]
    assert found["w" if rules else "weight"].layout is tensor.layout
    assert torch.equal(found["w" if rules else "weight"].to_dense(), tensor.to(torch.float16).to_dense())
    assert tensor.dtype is torch.float32


def test_subclasses_that_are_not_cast_are_noted(tmp_path: Path) -> None:
    state = {"pair": TwoTensor(torch.ones(2), torch.zeros(2)), "plain": torch.ones(2)}
    report = ms.convert_checkpoint(state, tmp_path / "a.safetensors", dtype=torch.float16)
    assert report.notes == ("1 tensor of the class TwoTensor is not cast: pair",)
    found = ms.open(tmp_path / "a.safetensors", allow=[TwoTensor])
    assert (found["pair"].dtype, found["plain"].dtype) == (torch.float32, torch.float16)
    assert not ms.convert_checkpoint(state, tmp_path / "a.safetensors").notes


class Grown(nn.Module):
    """A later version of a model that had only `body`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)


GROWN = ms.rules.Schema(
    "1.0",
    [
        ms.rules.Migration("2.0", [ms.rules.Fill("norm.num_batches_tracked", 7), ms.rules.Fill("norm.running_*", 0.5)]),
        ms.rules.Migration(
            "3.0", [ms.rules.Fill("norm.*"), ms.rules.Fill("top.*"), ms.rules.Rename("top.*", "head.*")]
        ),
    ],
)


@pytest.mark.parametrize("skeleton", [False, True])
def test_a_model_says_what_is_to_be_filled_in(skeleton: bool, tmp_path: Path) -> None:
    body = nn.Linear(3, 3)
    ms.save({"body": body.state_dict()}, tmp_path / "a.safetensors", schema="1.0")
    with ms.skeleton() if skeleton else nullcontext():
        model = Grown()
    before = {name: None if tensor.is_meta else tensor.clone() for name, tensor in model.state_dict().items()}
    files = []
    for number in range(2):
        torch.manual_seed(5)
        path = tmp_path / f"{number}.safetensors"
        ms.convert_checkpoint(tmp_path / "a.safetensors", path, rules=GROWN, model=model, dtype=torch.bfloat16)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    for name, tensor in model.state_dict().items():
        assert tensor.is_meta if before[name] is None else torch.equal(tensor, before[name])
    loaded = Grown()
    report = ms.load(loaded, path, rules=GROWN)
    assert report.coverage == 1
    assert torch.equal(loaded.body.weight, body.weight.bfloat16())
    assert loaded.norm.num_batches_tracked.item() == 7
    assert loaded.norm.running_mean.eq(0.5).all()
    assert loaded.norm.weight.eq(1).all()
    assert 0 < loaded.head.weight.abs().max() <= 3**-0.5
    assert ms.open(path)["head.weight"].dtype == torch.bfloat16


def test_what_only_a_model_can_say_is_asked_for(tmp_path: Path) -> None:
    ms.save({"body": nn.Linear(3, 3).state_dict()}, tmp_path / "a.safetensors", schema="1.0")
    with pytest.raises(RuleError, match="give the model to the conversion: model=model") as caught:
        ms.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=GROWN)
    assert "match nothing" not in str(caught.value)
    assert "    Fill('norm.running_*', value=0.5)\n" in str(caught.value)
    assert not (tmp_path / "b.safetensors").exists()
    with pytest.raises(OptionError):
        ms.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=GROWN, model=3)  # type: ignore[arg-type]
    rules = [ms.rules.Fill("scale", torch.ones(2))]
    ms.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=rules)
    assert ms.open(tmp_path / "b.safetensors").tensor("scale").tolist() == [1, 1]


def test_it_can_be_written_over_its_source(training: Path) -> None:
    ms.convert_checkpoint(training, training, key="model", dtype=torch.float16)
    found = ms.open(training)
    assert (found.format, found["embed.weight"].dtype) == ("torch zip", torch.float16)


# What fails leaves nothing behind, and what was there.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": torch.int64}, OptionError),
        ({"dtype": "bfloat61"}, OptionError),
        ({"format": "onnx"}, OptionError),
        ({"max_memory_bytes": 0}, OptionError),
        ({"shard_size_bytes": "5GB"}, OptionError),
        ({"rules": [3]}, OptionError),
        ({"rules": [ms.rules.Ignore("nothing")]}, RuleError),
        ({"rules": [ms.rules.Rename(re.compile(".*weight"), "w")]}, RuleError),
        ({"overwrite": False}, TargetExistsError),
        ({"max_memory_bytes": 100}, MemoryBudgetError),
        ({"max_memory_bytes": 100, "format": "torch"}, MemoryBudgetError),
        ({"dtype": torch.float4_e2m1fn_x2}, OptionError),
    ],
)
def test_what_cannot_be(training: Path, tmp_path: Path, options: Any, error: type[Exception]) -> None:
    (tmp_path / "b").write_text("what was there")
    with pytest.raises(error):
        ms.convert_checkpoint(training, tmp_path / "b", **options)
    assert (tmp_path / "b").read_text() == "what was there"
    assert not litter(tmp_path)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_a_source_that_is_cut_meanwhile(tmp_path: Path, format: str) -> None:
    save_file({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "a.safetensors")
    checkpoint = ms.open(tmp_path / "a.safetensors")
    os.truncate(tmp_path / "a.safetensors", 5000)
    with pytest.raises(ReadFailedError):
        ms.convert_checkpoint(checkpoint, tmp_path / "b", format=format)
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_tensor_in_chunks_is_converted_in_pieces(dim: int, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """With less memory than the tensor takes. Chunks of columns, and rows that no block ends with."""
    tensor = torch.randn(5001, 1201) if dim else torch.randn(6_000_001)
    offsets = 500 if dim else 2_000_000
    second = (0, offsets) if dim else (offsets,)
    chunks = {
        (0,) * tensor.ndim: tensor.narrow(dim, 0, offsets),
        second: tensor.narrow(dim, offsets, tensor.shape[dim] - offsets),
    }
    write_dcp(tmp_path / "dcp", {"a": {at: chunk.clone() for at, chunk in chunks.items()}})
    ms.convert_checkpoint(tmp_path / "dcp", tmp_path / "b", dtype=dtype, max_memory_bytes=21 << 20)
    assert torch.equal(ms.open(tmp_path / "b").tensor("a"), tensor.to(dtype or torch.float32))


PROGRAM = """
import sys, threading, torch, modelstate as ms

def used():  # without the pages of files that are mapped
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

path, target = sys.argv[1:3]
source, options = map(eval, sys.argv[3:])
ms.convert_checkpoint({"a": torch.ones(3)}, target, **options)  # what is made once is made now
before, ended, samples = used(), threading.Event(), []

def sample():
    while not ended.wait(0.001):
        samples.append(used() - before)

thread = threading.Thread(target=sample)
thread.start()
ms.convert_checkpoint(source, target, **options)
ended.set()
thread.join()
print(max(samples))
"""
NBYTES = 1 << 28


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "options", "most_bytes"),
    [
        ("path", "dict(dtype=torch.bfloat16)", 60 << 20),
        ("path", "dict(dtype=torch.bfloat16, max_memory_bytes=16 << 20)", 40 << 20),
        ("path", "dict(format='torch')", 60 << 20),
        ("ms.open([path] * 2, combine=ms.merge.Average())", "{}", (128 + 60) << 20),  # a tensor is computed whole
    ],
)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, source: str, options: str, most_bytes: int) -> None:
    """The largest tensor has 128 MB, and 64 MB in another dtype."""
    path = tmp_path / "a.safetensors"
    shapes = {"large": NBYTES // 8, **{f"x{index}": NBYTES // 64 for index in range(8)}}
    header, at = [], 0
    for name, count in shapes.items():
        header.append(f'"{name}":{{"dtype":"F32","shape":[{count}],"data_offsets":[{at},{at + 4 * count}]}}')
        at += 4 * count
    text = ("{" + ",".join(header) + "}").encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)  # zeros that take no room on the disk
    done = run_program(PROGRAM, path, tmp_path / "b", source, options)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < most_bytes
    assert ms.open(tmp_path / "b").nbytes == at // (2 if "bfloat16" in options else 1)
    if "torch'" in options:  # and from the torch file back
        done = run_program(PROGRAM, tmp_path / "b", tmp_path / "c", "path", "{}")
        assert int(done.stdout) < most_bytes, done.stderr
