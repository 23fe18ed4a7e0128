"""Several checkpoints opened as one."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.errors import (
    CombineError,
    OptionError,
    PlanError,
    ReadFailedError,
    SourceNotFoundError,
    SourceTypeError,
)


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False))


def total(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


# Parts of one model.


@pytest.mark.parametrize("write", ["torch", "safetensors", "dcp", "mapping", "opened"])
def test_parts_of_one_model_in_any_format(write: str, tmp_path: Path) -> None:
    state = net(0).state_dict()
    names = list(state)
    parts: list[dict[str, torch.Tensor]] = [{n: state[n] for n in names[:3]}, {n: state[n] for n in names[3:]}]
    sources: list[Any] = []
    for index, part in enumerate(parts):
        path = tmp_path / str(index)
        if write == "safetensors":
            save_file(part, path)
        elif write == "dcp":
            dcp.save(part, storage_writer=dcp.FileSystemWriter(path, sync_files=False))
        elif write in ("torch", "opened"):
            torch.save(part, path)
        sources.append(part if write == "mapping" else ms.open(path) if write == "opened" else path)
    checkpoint = ms.open(sources)
    assert set(checkpoint) == set(names)
    assert all(torch.equal(checkpoint.tensor(name), state[name]) for name in names)
    model = net(1)
    assert ms.load(model, checkpoint)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_name_in_two_parts(tmp_path: Path) -> None:
    with pytest.raises(CombineError, match=r"'0.bias' in \[0\] and \[1\]") as caught:
        ms.open([{"0.bias": torch.ones(2), "a": torch.ones(1)}, {"0.bias": torch.ones(2)}])
    assert "combine=" in caught.value.remedy
    assert "'a'" not in str(caught.value)


def test_a_value_where_another_has_a_container() -> None:
    with pytest.raises(CombineError, match="container"):
        ms.open([{"a": 1, "x": torch.ones(1)}, {"a": {"b": torch.ones(1)}}])


def test_nested_parts_stay_nested(tmp_path: Path) -> None:
    torch.save({"model": net(0).state_dict(), "step": 3}, tmp_path / "a.pt")
    checkpoint = ms.open([tmp_path / "a.pt", {"optimizer": {"lr": 0.1, "m": torch.ones(2)}}])
    assert checkpoint.containers == ("", "model", "optimizer")
    assert checkpoint.extra["step"] == 3
    assert checkpoint.extra["optimizer.lr"] == 0.1
    versions = ms.open(tmp_path / "a.pt", key="model").versions
    assert versions
    assert checkpoint.select("model").versions == versions
    assert ms.load(net(1), checkpoint)
    part = ms.open([tmp_path / "a.pt"], key="model")
    assert part.versions == versions
    assert list(part) == list(net(0).state_dict())


def test_sources_that_are_none() -> None:
    with pytest.raises(CombineError, match="nothing to combine"):
        ms.open([])
    with pytest.raises(SourceNotFoundError):
        ms.open([{"a": torch.ones(1)}, "/nowhere/at/all.pt"])
    with pytest.raises(SourceTypeError):
        ms.open([{"a": torch.ones(1)}, 7])  # type: ignore[list-item]
    with pytest.raises(OptionError, match="list of sources"):
        ms.open({"a": torch.ones(1)}, combine=total)
    for wrong in (7, "average", ms.merge.Average):
        with pytest.raises(OptionError, match=r"ms\.merge\.Average\(\.\.\.\)"):
            ms.open([{"a": torch.ones(1)}], combine=wrong)  # type: ignore[arg-type]


# A function for each name.


def test_a_function_gets_all_that_have_the_name() -> None:
    a, b = {"x": torch.ones(2), "y": torch.ones(3)}, {"x": torch.full((2,), 2.0), "z": torch.ones(1)}
    calls: list[tuple[str, int, bool]] = []

    def combine(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        calls.append((name, len(tensors), tensors[0].is_meta))
        return total(name, tensors).bfloat16()

    checkpoint = ms.open([a, b], combine=combine)
    assert calls == [("x", 2, True), ("y", 1, True), ("z", 1, True)]
    assert checkpoint["x"].dtype is torch.bfloat16
    assert checkpoint.tensor("x").tolist() == [3.0, 3.0]
    assert checkpoint["x"].nbytes == 4
    out = torch.empty(1, dtype=torch.bfloat16)
    checkpoint.read_into("x", out, start=1)
    assert out.item() == 3


def add_up(_: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for one in tensors[1:]:
        total += one
    return total


def add_up_or_answer(_: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if tensors[0].is_meta else tensors[0] + tensors[1]


@pytest.mark.parametrize("target", ["meta", "cpu"])
@pytest.mark.parametrize("combine", [add_up, add_up_or_answer, lambda _, t: t[0].add_(t[1])])
def test_a_function_whose_answer_on_meta_is_what_it_was_given_is_called_all_the_same(
    combine: Any, target: str, tmp_path: Path
) -> None:
    parts = []
    for index in range(2):
        save_file(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).state_dict(), tmp_path / f"{index}.safetensors")
        parts.append(ms.open(tmp_path / f"{index}.safetensors"))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(target)
    ms.load(model, ms.open([part.source for part in parts], combine=combine))
    for name, value in model.state_dict().items():
        assert torch.equal(value, parts[0].tensor(name) + parts[1].tensor(name))


def test_a_function_that_writes_to_what_it_is_given_reaches_nobody(tmp_path: Path) -> None:
    live = torch.ones(2)
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    checkpoint = ms.open([{"w": live}, tmp_path / "w.safetensors"], combine=lambda name, t: t[0].add_(1) + t[1].add_(1))
    assert checkpoint.tensor("w").tolist() == [4, 4]
    assert checkpoint.tensor("w").tolist() == [4, 4]
    assert live.tolist() == [1, 1]


def test_a_function_that_looks_at_values_says_its_shape() -> None:
    def larger(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        return max(tensors, key=lambda tensor: float(tensor.norm()))

    sources = [{"w": torch.ones(2)}, {"w": torch.full((2,), 5.0)}]
    with pytest.raises(CombineError, match="meta"):
        ms.open(sources, combine=larger)
    larger.meta = lambda name, tensors: tensors[0]  # type: ignore[attr-defined]
    assert ms.open(sources, combine=larger).tensor("w").tolist() == [5, 5]


@pytest.mark.parametrize(
    "combine",
    [
        lambda name, tensors: None,
        lambda name, tensors: 1 / 0,
        lambda name, tensors: torch.ones(2),
        lambda name, tensors: tensors[0].to_sparse(),
    ],
)
def test_a_function_that_makes_no_tensor(combine: Any) -> None:
    with pytest.raises(CombineError):
        ms.open([{"w": torch.ones(2)}], combine=combine)


@pytest.mark.parametrize("late", [lambda: 1 / 0, lambda: torch.ones(3), lambda: torch.ones(2).double(), lambda: None])
def test_a_function_that_fails_late_changes_nothing(late: Any) -> None:
    def combine(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0] * 2 if tensors[0].is_meta or name == "weight" else late()

    model = nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoint = ms.open([{"weight": torch.ones(2, 2), "bias": torch.ones(2)}], combine=combine)
    with pytest.raises(CombineError, match="bias"):
        ms.load(model, checkpoint)
    with pytest.raises(CombineError, match="bias"):
        checkpoint.tensor("bias")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_values_that_are_no_tensors_must_agree() -> None:
    def opened(*values: Any) -> ms.Checkpoint:
        return ms.open([{"w": torch.ones(1), "v": value} for value in values], combine=total)

    nan = float("nan")
    assert opened([1, {"a": nan}], [1, {"a": nan}]).extra["v"][0] == 1
    for one, other in (
        (1, 2),
        ([1], (1,)),
        ({"a": 1}, {"a": 1, "b": 2}),
        ("1", 1),
        (None, 0),
        (np.ones(2), np.ones(1)),
    ):
        with pytest.raises(CombineError, match=r"'v' in \[0\] and \[1\]"):
            opened(one, other)


# Loading it.


def test_versions_that_differ() -> None:
    states = [OrderedDict(net(0).state_dict()) for _ in range(2)]
    states[0]._metadata = {"1": {"version": 1}}  # type: ignore[attr-defined]
    states[1]._metadata = {"1": {"version": 2}}  # type: ignore[attr-defined]
    with pytest.raises(CombineError, match="versions of a module"):
        ms.open(states, combine=ms.merge.Average())
    assert ms.open([*states[:1], dict(states[0])], combine=ms.merge.Average()).versions == {"1": {"version": 1}}


@pytest.mark.parametrize("target", ["live", "skeleton"])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.float64}, {"transform": lambda name, tensor: tensor * 2}, {"in_place": True}, {"map": False}],
    ids=lambda options: ", ".join(options),
)
def test_loading_is_as_of_the_same_tensors_in_a_file(target: str, options: dict[str, Any], tmp_path: Path) -> None:
    for index in range(2):
        torch.save(net(index).state_dict(), tmp_path / f"{index}.pt")
    checkpoint = ms.open([tmp_path / "0.pt", tmp_path / "1.pt"], combine=ms.merge.Average(others="first"))
    model, wanted = net(2), net(2)
    if target == "skeleton":
        with ms.skeleton():
            model = net(2)
    assert ms.plan(model, checkpoint, **options).ok
    ms.load(model, checkpoint, **options)
    ms.load(wanted, {name: checkpoint.tensor(name) for name in checkpoint}, **options)
    for name, value in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
        assert model.state_dict()[name].dtype == value.dtype


def test_nothing_is_computed_before_it_is_wanted() -> None:
    calls: list[str] = []

    def combine(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        calls.extend([] if tensors[0].is_meta else [name])
        return tensors[0] + tensors[1]

    checkpoint = ms.open([net(0).state_dict(), net(1).state_dict()], combine=combine)
    model = net(2)
    assert ms.plan(model, checkpoint).ok
    with pytest.raises(PlanError):
        ms.load(nn.Linear(3, 3), checkpoint)
    assert not calls
    ms.load(model, checkpoint)
    assert sorted(calls) == sorted(checkpoint)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_a_tied_tensor_is_combined_once(tmp_path: Path) -> None:
    for index in range(2):
        torch.save(Tied().state_dict(), tmp_path / f"{index}.pt")
    checkpoint = ms.open([tmp_path / "0.pt", tmp_path / "1.pt"], combine=ms.merge.Average())
    assert checkpoint.aliases == (("first.weight", "second.weight"),)
    model = Tied()
    assert ms.load(model, checkpoint)
    assert model.first.weight is model.second.weight
    assert torch.equal(model.first.weight, checkpoint.tensor("second.weight"))


def test_every_file_is_watched(tmp_path: Path) -> None:
    for index in range(2):
        save_file(net(index).state_dict(), tmp_path / f"{index}.safetensors")
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    checkpoint = ms.open(paths, combine=ms.merge.Average())
    assert checkpoint.files == tuple(map(str, paths))
    model = net(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(net(3).state_dict(), tmp_path / "new")
    os.replace(tmp_path / "new", paths[1])
    with pytest.raises(ReadFailedError, match=r"1\.safetensors: the file has changed since"):
        ms.load(model, checkpoint)
    os.remove(paths[1])
    with pytest.raises(ReadFailedError, match=r"1\.safetensors"):
        checkpoint.tensor("0.weight")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_file_that_changes_between_two_openings(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "x.pt")
    first = ms.open(tmp_path / "x.pt")
    torch.save({"a": torch.ones(1), "b": torch.ones(9)}, tmp_path / "x.pt")
    with pytest.raises(ReadFailedError, match="between"):
        ms.open([first, tmp_path / "x.pt"], combine=lambda name, tensors: tensors[0])


def test_verify_reads_all_files(tmp_path: Path) -> None:
    for index in range(2):
        torch.save(net(index).state_dict(), tmp_path / f"{index}.pt")
    paths = [tmp_path / "0.pt", tmp_path / "1.pt"]
    checkpoint = ms.open(paths, combine=ms.merge.Average())
    assert checkpoint.verify() == sum(ms.open(path).verify() for path in paths)
    data = bytearray(paths[1].read_bytes())
    at = ms.open(paths[1])["2.weight"].location
    assert at is not None
    data[at.start] ^= 1
    paths[1].write_bytes(data)
    with pytest.raises(ms.errors.ChecksumError, match=r"2\.weight"):
        ms.open(paths, combine=ms.merge.Average()).verify()
    save_file(net(0).state_dict(), tmp_path / "s.safetensors")
    with pytest.raises(ms.errors.ChecksumError, match="nothing to verify"):
        ms.open([paths[0], tmp_path / "s.safetensors"], combine=ms.merge.Average()).verify()
