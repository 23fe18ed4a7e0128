"""Tensors whose storage somebody has freed or cut, as code that offloads or shards weights does."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.errors import PlacementError, PlanError, ReadFailedError

freed = pytest.mark.parametrize("nbytes", [0, 16 * 16 * 4 - 1])


def cut(nbytes: int) -> nn.Linear:
    model = nn.Linear(16, 16)
    with torch.no_grad():
        model.bias.zero_()
    model.weight.untyped_storage().resize_(nbytes)
    return model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"weight": torch.full((16, 16), 2.0), "bias": torch.ones(16)}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@freed
@pytest.mark.parametrize(
    "options",
    [{}, {"in_place": True}, {"background": True}, {"transform": lambda _, t: t}, {"dtype": torch.float32}],
    ids=["plain", "in place", "background", "transform", "dtype"],
)
def test_nothing_is_written_to_where_the_memory_was(nbytes: int, options: dict[str, Any], path: Path) -> None:
    model = cut(nbytes)
    with pytest.raises(PlanError) as caught:
        ms.load(model, path, **options)
    (problem,) = caught.value.problems
    assert (problem.kind.name, problem.name, problem.expected, problem.found) == (
        "FREED_MEMORY",
        "weight",
        16 * 16 * 4,
        nbytes,
    )
    assert model.weight.untyped_storage().nbytes() == nbytes
    assert model.bias.eq(0).all()


@freed
def test_what_gets_other_memory_needs_none(nbytes: int, path: Path) -> None:
    model = cut(nbytes)
    ms.load(model, path, dtype=torch.bfloat16)
    assert model.weight.eq(2).all()
    assert model.weight.dtype is torch.bfloat16


@freed
@pytest.mark.parametrize("swaps", [False, True])
def test_load_state_dict_says_so(nbytes: int, swaps: bool, path: Path) -> None:
    model = cut(nbytes)
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        with pytest.raises(RuntimeError, match="memory of the parameter has been freed"):
            ms.load_state_dict(model, {"weight": torch.ones(16, 16), "bias": torch.ones(16)})
        assert model.bias.eq(0).all()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    ms.load_state_dict(model, {"weight": torch.ones(16, 16), "bias": torch.ones(16)}, assign=True)
    assert model.weight.eq(1).all()


@freed
def test_nothing_is_read_from_where_the_memory_was(nbytes: int) -> None:
    model = cut(nbytes)
    with pytest.raises(PlacementError, match="has been freed"):
        ms.convert(model, torch.bfloat16)
    assert model.bias.dtype is model.weight.dtype is torch.float32


@freed
@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"dtype": torch.bfloat16}, {"transform": lambda _, t: t}])
@pytest.mark.parametrize("on_meta", [False, True])
def test_a_source_whose_memory_was_freed_has_no_values(nbytes: int, options: dict[str, Any], on_meta: bool) -> None:
    state = {"weight": cut(nbytes).weight.detach(), "bias": torch.ones(16)}
    with ms.skeleton() if on_meta else nullcontext():
        model = nn.Linear(16, 16)
    combined = ms.open([state, state], combine=ms.merge.Average())
    renamed = {"w": state["weight"], "bias": state["bias"]}
    sources: list[Any] = [(state, options), (renamed, {**options, "rules": [ms.rules.Rename("w", "weight")]})]
    for source, arguments in (*sources, (combined, options)):
        with pytest.raises(PlanError) as caught:
            ms.load(model, source, **arguments)
        assert [(problem.kind.name, problem.name) for problem in caught.value.problems] == [("NO_VALUES", "weight")]
    with pytest.raises(ReadFailedError, match="freed"):
        combined.tensor("weight")
    with pytest.raises(RuntimeError, match="memory of the value has been freed"):
        ms.load_state_dict(nn.Linear(16, 16), state)


def test_a_view_that_its_memory_no_longer_holds(path: Path) -> None:
    model, memory = nn.Linear(16, 16), torch.zeros(16, 32)
    model.weight = nn.Parameter(memory[:, ::2])
    ms.load(model, path, in_place=True)
    assert memory[:, ::2].eq(2).all()
    memory.untyped_storage().resize_(16 * 31 * 4)
    with pytest.raises(PlanError, match="freed"):
        ms.load(model, path)


def test_a_tensor_without_elements_needs_none(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(0, 4)}, tmp_path / "x.safetensors")
    model = nn.Linear(4, 0, bias=False)
    model.weight.untyped_storage().resize_(0)
    assert ms.load(model, tmp_path / "x.safetensors").coverage == 1.0
