"""Tensors that are made of others are stored by their parts, and come back as what they were."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import modelstate as ms
from modelstate.errors import DamagedFileError, ForbiddenGlobalError, UnsavableError
from tests.objects.saves import NAME
from tests.programs import run_program

quantization = pytest.importorskip("torchao.quantization")


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    """torch is told of the class, as packages tell it of theirs."""
    with torch.serialization.safe_globals([TwoTensor]):
        yield


class Failing(TwoTensor):
    def __tensor_flatten__(self) -> Any:
        raise LookupError("no parts today")


def two(start: int = 0) -> TwoTensor:
    return TwoTensor(torch.arange(start, start + 6.0).view(2, 3), torch.arange(6.0).view(2, 3))


def same_parts(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if not hasattr(a, "__tensor_flatten__"):
        return torch.equal(a, b)
    (names, context), (others, other_context) = a.__tensor_flatten__(), b.__tensor_flatten__()
    return (
        names == others
        and str(context) == str(other_context)
        and all(same_parts(getattr(a, name), getattr(b, name)) for name in names)
    )


CONFIGS = {
    "int8 weight only": lambda: quantization.Int8WeightOnlyConfig(),
    "int4 in int8": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
}


def quantized(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False))
    try:
        quantization.quantize_(model, CONFIGS[name]())
    except (ImportError, AssertionError, NotImplementedError, RuntimeError) as error:
        pytest.skip(f"torchao: {str(error).splitlines()[0]}")
    return model


@pytest.mark.parametrize("shard_size_bytes", [None, 1000])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantized_model(tmp_path: Path, name: str, shard_size_bytes: int | None) -> None:
    model, other = quantized(name), quantized(name, 1)
    assert type(model[0].weight.data) is not torch.Tensor
    ms.save(model, tmp_path / NAME, shard_size_bytes=shard_size_bytes)
    checkpoint = ms.open(tmp_path / NAME)
    assert set(checkpoint) == set(model.state_dict())
    assert checkpoint.verify()
    ms.load(other, checkpoint, verify=True)
    for key, value in model.state_dict().items():
        assert same_parts(other.state_dict()[key], value)
    x = torch.ones(3, 64)
    assert torch.equal(model(x), other(x))


def test_nested_ones_parameters_and_others_beside(tmp_path: Path) -> None:
    whole = TwoTensor(two(), two(5))
    state = {"plain": torch.ones(2), "deep": whole, "p": nn.Parameter(two(9)), "z": torch.zeros(1)}
    for target in (state, {"tree": [state]}):
        ms.save(target, tmp_path / NAME)
        checkpoint = ms.open(tmp_path / NAME)
        prefix = "" if target is state else "tree.0."
        assert set(checkpoint) == {prefix + name for name in state}
        assert checkpoint.verify()
        assert same_parts(checkpoint.tensor(f"{prefix}deep"), whole)
        assert same_parts(checkpoint.tensor(f"{prefix}p"), two(9))
        assert all(type(value) is torch.Tensor for value in load_file(tmp_path / NAME).values())


def test_ties(tmp_path: Path) -> None:
    """Of modules, whose `state_dict` makes a new object for each name; of parts; and of a part and a plain tensor."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False))
    model[0].weight = model[1].weight = nn.Parameter(two())
    ms.save(model, tmp_path / NAME)
    assert ms.open(tmp_path / NAME).aliases == (("0.weight", "1.weight"),)
    assert len(load_file(tmp_path / NAME)) == 2
    one = two()
    for state in ({"x": one, "part": one.a}, {"part": one.a, "x": one}, {"x": one, "y": TwoTensor(one.a, one.b * 2)}):
        ms.save(state, tmp_path / NAME)
        checkpoint = ms.open(tmp_path / NAME)
        assert set(checkpoint) == set(state)
        assert all(same_parts(checkpoint.tensor(name), value) for name, value in state.items())


@pytest.mark.slow
def test_a_class_that_is_not_known(tmp_path: Path) -> None:
    ms.save({"w": two()}, tmp_path / NAME)
    code = "import sys, modelstate as ms; print(repr(ms.open(sys.argv[1], allow=sys.argv[2:]).tensor('w')))"
    refused = run_program(code, tmp_path / NAME)
    assert "ForbiddenGlobalError" in refused.stderr
    assert "torch.testing._internal.two_tensor.TwoTensor" in refused.stderr
    assert "allow=['torch.testing._internal.two_tensor.TwoTensor']" in refused.stderr
    allowed = run_program(code, tmp_path / NAME, f"{TwoTensor.__module__}.TwoTensor")
    assert "TwoTensor" in allowed.stdout, allowed.stderr


@pytest.mark.parametrize("name", ["os.system", "torch.nn.Linear", "torch.Tensor", "no.such.Thing", "", "builtins.dict"])
def test_a_class_that_is_none(tmp_path: Path, name: str) -> None:
    ms.save({"w": two()}, tmp_path / NAME)
    data = load_file(tmp_path / NAME)
    text = json.dumps(
        {
            "format": 1,
            "subclasses": {
                "w": {
                    "class": name,
                    "parts": {"a": "w.a", "b": "w.b"},
                    "context": None,
                    "shape": [2, 3],
                    "stride": [3, 1],
                    "dtype": {"$dtype": "float32"},
                }
            },
        }
    )
    from safetensors.torch import save_file

    save_file(data, tmp_path / NAME, metadata={"modelstate": text})
    with pytest.raises((ForbiddenGlobalError, DamagedFileError)):
        ms.open(tmp_path / NAME, allow=["os.system"])


REFUSED = {
    "a class that raises": ({"w": Failing(torch.ones(1), torch.ones(1))}, "'w': its class Failing raised LookupError"),
    "parts on meta": ({"w": TwoTensor(torch.ones(1, device="meta"), torch.ones(1, device="meta"))}, "'w.a': .*meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved(tmp_path: Path, name: str) -> None:
    target, message = REFUSED[name]
    with pytest.raises(UnsavableError, match=message):
        ms.save(target, tmp_path / NAME)
    assert not list(tmp_path.iterdir())
