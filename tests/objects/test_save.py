"""What is saved comes back, and other tools read it."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import modelstate as ms
from modelstate.errors import PlanError, UnknownClassError, UnsavableError
from modelstate.formats.safetensors import DTYPES
from modelstate.spec import StoredTensor
from tests.formats.files import same as same_tensor
from tests.formats.torch_files import is_copied


class Net(nn.Module):
    """Ties, buffers, versions, and an extra state."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def randomized(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randint(0, 100, tensor.shape))
    return model


def test_a_module_comes_back(tmp_path: Path) -> None:
    model, other = randomized(Net({"step": (1, 2)})), Net()
    report = ms.save(model, tmp_path / "net.safetensors")
    assert ms.load(other, tmp_path / "net.safetensors").coverage == 1.0
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        if isinstance(a, torch.Tensor)
    )
    assert other.state == {"step": (1, 2)}
    assert other.head.weight is other.embed.weight
    assert (report.path, report.tensors) == (str(tmp_path / "net.safetensors"), 7)
    assert report.bytes == (tmp_path / "net.safetensors").stat().st_size
    assert str(report).startswith(f"{tmp_path}/net.safetensors: 7 tensors, ")


def test_what_the_file_says_of_itself(tmp_path: Path) -> None:
    model = Net({"a": 1})
    ms.save(model, tmp_path / "net.safetensors", schema="2.0")
    checkpoint = ms.open(tmp_path / "net.safetensors")
    assert set(checkpoint) == set(model.state_dict()) - {"_extra_state"}
    assert checkpoint.aliases == (("embed.weight", "head.weight"),)
    assert checkpoint.versions == dict(model.state_dict()._metadata)
    assert checkpoint.metadata == {"format": "pt", "schema": "2.0", "versions": checkpoint.versions}
    assert dict(checkpoint.extra) == {"_extra_state": {"a": 1}}
    ms.save({"a": torch.ones(1)}, tmp_path / "plain.safetensors")
    plain = ms.open(tmp_path / "plain.safetensors")
    assert plain.metadata == {"format": "pt"}
    assert plain.versions is None
    assert not plain.extra


def test_other_tools_read_the_tensors(tmp_path: Path) -> None:
    model = randomized(Net())
    ms.save(model, tmp_path / "net.safetensors")
    found = load_file(tmp_path / "net.safetensors")
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    assert set(found) == set(state) - {"head.weight"}
    assert all(torch.equal(found[name], state[name]) for name in found)
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        manifest = json.loads(file.metadata()["modelstate"])
    assert manifest["aliases"] == {"head.weight": "embed.weight"}
    assert manifest["writer"] == f"modelstate {ms.__version__}"


def test_extra_state_that_cannot_be_decoded_says_where_it_is(tmp_path: Path) -> None:
    class Box:
        pass

    ms.register_codec(Box, lambda box: 1, lambda value: Box(), "a box of this test")
    ms.save(
        {"a.weight": torch.ones(2), "a._extra_state": {"box": Box()}, "b._extra_state": 3}, tmp_path / "x.safetensors"
    )
    ms.register_codec(Box, lambda box: 1, lambda value: Box(), "another name")
    checkpoint = ms.open(tmp_path / "x.safetensors")
    assert checkpoint.extra["b._extra_state"] == 3
    with pytest.raises(UnknownClassError, match="a box of this test") as caught:
        checkpoint.extra["a._extra_state"]
    assert caught.value.where == f"{tmp_path}/x.safetensors: a._extra_state['box']"
    model = nn.ModuleDict({"a": nn.Linear(2, 1)})
    before = model["a"].weight.clone()
    with pytest.raises(PlanError):
        ms.load(model, checkpoint)
    assert torch.equal(model["a"].weight, before)


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([True, False, True])
    return torch.randint(0, 255, (4, 24), dtype=torch.uint8).view(dtype)


STORED_DTYPES = [getattr(torch, name) for name, _ in DTYPES.values()]
STATES: dict[str, dict[str, torch.Tensor]] = {
    "every dtype": {str(dtype): of_dtype(dtype) for dtype in STORED_DTYPES if is_copied(dtype)},
    "shapes": {
        "0-d": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "none": torch.empty(2, 0),
        "one": torch.ones(1, 1, 1),
    },
    "views": {
        "t": torch.arange(6.0).view(2, 3).t(),
        "part": torch.arange(100.0)[10:50:3],
        "single": torch.arange(9.0)[4:5].as_strided((1,), (3,)),
        "wide": torch.ones(1).expand(5),
    },
    "lazy": {
        "x": torch.tensor([1 + 2j]),
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j, 3j]).conj().imag,
    },
    "odd sizes": {
        "a": torch.ones(3, dtype=torch.uint8),
        "b": torch.ones(1, dtype=torch.float64),
        "c": torch.ones(1, dtype=torch.bfloat16),
    },
    "parameters": {
        "p": nn.Parameter(torch.ones(2)),
        "grad": torch.ones(2, requires_grad=True) * 2,
        "buffer": nn.Buffer(torch.ones(1)),
    },
    "names": {"": torch.ones(1), 'ü.\n"': torch.ones(2), "modelstate": torch.ones(3)},
    "nothing": {},
    "small": {f"layers.{index}.weight": torch.full((3,), float(index)) for index in range(10_000)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_tensors_of_every_kind(tmp_path: Path, name: str) -> None:
    state = STATES[name]
    ms.save(state, tmp_path / "state.safetensors")
    found = load_file(tmp_path / "state.safetensors")
    checkpoint = ms.open(tmp_path / "state.safetensors")
    assert set(checkpoint) == set(state)
    for key, value in state.items():
        assert same_tensor(checkpoint.tensor(key), torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())), (
            key
        )
        assert found is None or key not in found or found[key].shape == value.shape
        stored = checkpoint[key].stored
        assert isinstance(stored, StoredTensor)
        assert stored.storage.start % stored.dtype.itemsize == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("wide", torch.ones(2, dtype=torch.complex128)),
        ("coo", torch.eye(2).to_sparse()),
        ("csr", torch.eye(2).to_sparse_csr()),
        ("__metadata__", torch.ones(2)),
    ],
)
def test_the_remedy_for_what_only_torch_files_hold(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(UnsavableError, match=r"a path that ends in \.pt keeps them"):
        ms.save({name: tensor}, tmp_path / "x.safetensors")
    ms.save({name: tensor}, tmp_path / "x.pt")
    assert torch.equal(ms.open(tmp_path / "x.pt").tensor(name).to_dense(), tensor.to_dense())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        lambda: torch.ones(2, 2).to_mkldnn(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
        lambda: torch.ones(2, device="meta"),
    ],
    ids=["quantized", "mkldnn", "nested", "meta"],
)
def test_no_remedy_that_loses_the_tensor(tmp_path: Path, build: Any) -> None:
    for state in ({"a": build()}, {"a": build(), "b": torch.ones(2, dtype=torch.complex128)}):
        with pytest.raises(UnsavableError) as caught:
            ms.save(state, tmp_path / "x.safetensors")
        assert ".pt" not in caught.value.remedy


def test_tensors_that_only_begin_in_one_place_and_a_lazy_conjugate_are_no_tie(tmp_path: Path) -> None:
    value, number = torch.arange(4.0).view(2, 2), torch.tensor([1 + 2j])
    state = {"a": value, "b": value.t(), "c": torch.empty(0), "d": torch.empty(0), "e": value, "f": value.view(4)}
    ms.save({**state, "g": number, "h": number.conj(), "i": number}, tmp_path / "x.safetensors")
    checkpoint = ms.open(tmp_path / "x.safetensors")
    assert set(checkpoint.aliases) == {("a", "e"), ("g", "i")}
    assert checkpoint.tensor("h").tolist() == [1 - 2j]
    assert checkpoint.tensor("b").tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert checkpoint["f"].shape == (4,)


def test_a_view_takes_what_it_shows(tmp_path: Path) -> None:
    large = torch.zeros(1000, 1000)
    assert ms.save({"view": large[5, :110]}, tmp_path / "x.safetensors").bytes < 1000
    same_bytes = {"a": large[:2], "b": large[:2], "c": large[:3]}
    assert 20_000 < ms.save(same_bytes, tmp_path / "x.safetensors").bytes < 21_000
    checkpoint = ms.open(tmp_path / "x.safetensors")
    assert checkpoint.aliases == (("a", "b"),)
    assert checkpoint["c"].shape == (3, 1000)


def test_a_live_model_that_shows_the_old_file_is_saved_over_it(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    ms.save(randomized(nn.Linear(100, 100)), path)
    with ms.skeleton():
        model = nn.Linear(100, 100)
    ms.load(model, path)
    before = model.weight.detach().clone()
    for _ in range(2):
        ms.save(model, path)
        assert torch.equal(model.weight, before)
    assert torch.equal(load_file(path)["weight"], before)


@pytest.mark.parametrize("before", [None, 8])
@pytest.mark.parametrize("after", [None, 8])
def test_who_could_not_read_the_old_one_cannot_read_the_new_one(
    tmp_path: Path, before: int | None, after: int | None
) -> None:
    state = {"a": torch.ones(2), "b": torch.zeros(2)}
    ms.save(state, tmp_path / "x", shard_size_bytes=before)
    for file in tmp_path.iterdir():
        file.chmod(0o600)
    state["a"] += 1
    ms.save(state, tmp_path / "x", shard_size_bytes=after)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    ms.save(state, tmp_path / "y", format="torch")
    (tmp_path / "y").chmod(0o640)
    ms.save(state, tmp_path / "y", format="torch")
    assert (tmp_path / "y").stat().st_mode & 0o777 == 0o640


class _Refused:
    """Pickle accepts it, and torch.load(weights_only=True) does not."""


@pytest.mark.parametrize("place", ["key", "versions", "attribute", "item"])
def test_what_torch_does_not_load_is_refused_wherever_it_is(tmp_path: Path, place: str) -> None:
    tensor = torch.zeros(2)
    state: OrderedDict[Any, Any] = OrderedDict(a=tensor)
    if place == "key":
        state[_Refused()] = tensor
    elif place == "versions":
        state._metadata = {"": {"version": _Refused()}}  # type: ignore[attr-defined]
    elif place == "attribute":
        tensor.note = _Refused()  # type: ignore[attr-defined]
    else:
        state["b"] = [tensor, {"c": (None, _Refused())}]
    with pytest.raises(UnsavableError, match="does not read"):
        ms.save(state, tmp_path / "model.pt")
    assert not list(tmp_path.glob("*.pt"))
