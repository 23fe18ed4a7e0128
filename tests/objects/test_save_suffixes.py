"""The format of a file that is written is that of its suffix."""

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError, UnsavableError

WRITERS = {
    "save": lambda model, path, **options: ms.save(model, path, **options),
    "convert_checkpoint": lambda model, path, **options: ms.convert_checkpoint(model.state_dict(), path, **options),
}
every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


class Noisy(nn.Linear):
    """A layer with extra state."""

    def __init__(self, value: Any) -> None:
        super().__init__(2, 2)
        self.value = value

    def get_extra_state(self) -> Any:
        return {"value": self.value}

    def set_extra_state(self, state: Any) -> None:
        self.value = state["value"]


@every_writer
@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.bin", "x.ckpt", "x.PT", "x.v2.Pth"])
def test_files_for_torch_load(tmp_path: Path, write: Any, name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    write(model, tmp_path / name)
    state = torch.load(tmp_path / name, weights_only=True)
    assert isinstance(state, OrderedDict)
    assert state._metadata["1"] == {"version": 2}  # type: ignore[attr-defined]
    nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).load_state_dict(state)
    assert torch.equal(ms.open(tmp_path / name).tensor("0.weight"), model.state_dict()["0.weight"])
    with pytest.raises(OptionError, match=r"no shards[\s\S]*\.safetensors"):
        write(model, tmp_path / name, shard_size_bytes=8)


@every_writer
@pytest.mark.parametrize("name", ["x.safetensors", ".safetensors", "x", "x.SafeTensors", ".hidden"])
def test_files_of_safetensors(tmp_path: Path, write: Any, name: str) -> None:
    model = nn.Linear(2, 2)
    write(model, tmp_path / name)
    assert torch.equal(load_file(tmp_path / name)["weight"], model.weight.detach())
    write(model, str(tmp_path / name), shard_size_bytes=8)
    assert not (tmp_path / name).exists()
    assert torch.equal(ms.open(tmp_path / name).tensor("weight"), model.weight.detach())


@every_writer
@pytest.mark.parametrize("name", ["x.gguf", "x.onnx", "x.npz", "x.h5", "x.pt2", "x.zip", "x.v2", "x.tar"])
def test_other_suffixes_are_refused(tmp_path: Path, write: Any, name: str) -> None:
    with pytest.raises(UnsavableError, match=r"\.safetensors for safetensors; \.pt, \.pth, \.bin or \.ckpt"):
        write(nn.Linear(2, 2), tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    write(nn.Linear(2, 2), tmp_path / name, format="torch")
    assert set(torch.load(tmp_path / name, weights_only=True)) == {"weight", "bias"}


@every_writer
def test_an_index_as_path_is_refused_with_the_path_to_give(tmp_path: Path, write: Any) -> None:
    path = tmp_path / "model.safetensors.index.json"
    with pytest.raises(UnsavableError) as caught:
        write(nn.Linear(2, 2), path, shard_size_bytes=8)
    assert f"{str(tmp_path / 'model.safetensors')!r} and shard_size_bytes=" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


@every_writer
@pytest.mark.parametrize(("name", "format"), [("x.pt", "safetensors"), ("x.SAFETENSORS", "torch")])
def test_a_format_that_contradicts_the_suffix(tmp_path: Path, write: Any, name: str, format: str) -> None:
    with pytest.raises(OptionError, match="contradict"):
        write(nn.Linear(2, 2), tmp_path / name, format=format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [3, "text", [1.5, None], {"t": torch.ones(2)}, (1, {"a": b"x"}), True])
def test_values_that_torch_load_reads_are_kept_in_a_torch_file(tmp_path: Path, value: Any) -> None:
    ms.save(Noisy(value), tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert str(found["_extra_state"]) == str({"value": value})
    loaded = Noisy(None)
    loaded.load_state_dict(found)
    assert str(loaded.value) == str(value)


@pytest.mark.parametrize("value", [Path("/data"), np.random.default_rng(3), defaultdict(int, a=1), np.ones(2), len])
def test_values_that_torch_load_refuses_are_refused_by_name(tmp_path: Path, value: Any) -> None:
    ms.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    before = (tmp_path / "x.pt").read_bytes()
    try:
        torch.save(value, tmp_path / "value")
        torch.load(tmp_path / "value", weights_only=True)
        pytest.skip("this torch reads it")
    except Exception:
        (tmp_path / "value").unlink()
    with pytest.raises(UnsavableError) as caught:
        ms.save(nn.Sequential(nn.Linear(2, 2), Noisy([1, value])), tmp_path / "x.pt")
    assert "1._extra_state.value.1" in str(caught.value.found)
    assert type(value).__name__ in str(caught.value.found)
    assert ".safetensors" in caught.value.remedy
    assert (tmp_path / "x.pt").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "x.pt"]


def test_training_state_in_a_torch_file(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    report = ms.save({"model": model, "optimizer": optimizer, "step": 7}, tmp_path / "training.pt")
    assert report.tensors == len(ms.open(tmp_path / "training.pt"))
    assert report.bytes == (tmp_path / "training.pt").stat().st_size
    found = torch.load(tmp_path / "training.pt", weights_only=True)
    assert found["step"] == 7
    nn.Linear(2, 2).load_state_dict(found["model"])
    fresh = torch.optim.Adam(nn.Linear(2, 2).parameters())
    fresh.load_state_dict(found["optimizer"])
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def _freed(nbytes: int) -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("create", "why"),
    [
        (lambda: torch.ones(3, device="meta"), "meta"),
        (lambda: nn.Parameter(torch.ones(3, device="meta")), "meta"),
        (lambda: torch.eye(3).to_sparse().to("meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8), "quantized"),
        (lambda: _nested(torch.strided), "nested"),
        (lambda: _nested(torch.jagged), "nested|NestedTensor"),
        (lambda: _freed(0), "given back"),
        (lambda: _freed(4), "given back"),
        (lambda: {2**61: torch.ones(2)}, "key of type int"),
        (lambda: {("a", ("b",)): torch.ones(2)}, "key of type tuple"),
        (lambda: reduce(lambda inner, _: [inner], range(150), torch.ones(2)), "more than 100 others"),
    ],
)
def test_no_torch_file_has_what_open_would_not_read(create: Callable[[], Any], why: str, tmp_path: Path) -> None:
    ms.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    before = (tmp_path / "x.pt").read_bytes()
    with pytest.raises(UnsavableError) as caught:
        ms.save({"good": torch.ones(2), "list": [{"bad": create()}]}, tmp_path / "x.pt")
    assert re.search(why, caught.value.found)
    assert "list.0.bad" in caught.value.found or "key of type" in caught.value.found
    assert "leave" in caught.value.remedy
    assert (tmp_path / "x.pt").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "x.pt"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(4).to_sparse(),
        torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.ones(2), (3,)),
        torch.eye(4).to_sparse_csr(),
        torch.eye(4).to_sparse_csc(),
        torch.eye(4).to_sparse_bsr((2, 2)),
        torch.eye(4).to_sparse_bsc((2, 2)),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        nn.Parameter(torch.eye(3).to_sparse()),
        torch.ones(1).expand(5),
        torch.empty(0, 3),
        torch.ones(2).untyped_storage(),
    ],
    ids=lambda tensor: str(getattr(tensor, "layout", "storage")),
)
def test_every_other_kind_of_tensor_comes_back(tensor: Any, tmp_path: Path) -> None:
    ms.save({"good": torch.ones(2), "list": [{"t": tensor}]}, tmp_path / "x.pt")
    found = ms.open(tmp_path / "x.pt").value()["list"][0]["t"]
    if isinstance(tensor, torch.Tensor):
        assert found.layout is tensor.layout
        assert torch.equal(found.to_dense().detach(), tensor.to_dense().detach())
