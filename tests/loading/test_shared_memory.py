"""Values and slots that share memory with each other, or with the model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import holding, whole


def tied() -> nn.Module:
    weight = nn.Parameter(torch.zeros(4, 4))
    return holding(a=weight, b=weight)


def conflict(module: nn.Module, source: Any) -> None:
    before = whole(module)
    with pytest.raises(ms.PlanError) as caught:
        ms.load(module, source)
    assert [problem.kind.name for problem in caught.value.problems] == ["TIE_CONFLICT"]
    assert whole(module) == before


def test_a_transpose_of_the_same_bytes_is_another_value(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    conflict(tied(), {"a": weight, "b": weight.T})
    torch.save({"a": weight, "b": weight.T}, tmp_path / "x.pt")
    conflict(tied(), tmp_path / "x.pt")
    ms.load(tied(), {"a": weight, "b": weight.T.contiguous().T})


def test_conjugated_ties() -> None:
    value = torch.randn(4, 4, dtype=torch.complex64)
    weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    conflict(holding(a=weight, b=weight), {"a": value, "b": value.conj()})
    ms.load(holding(a=weight, b=weight), {"a": value.conj(), "b": value.conj().resolve_conj()})


def conjugate_views(memory: torch.Tensor) -> nn.Module:
    """Buffers that are a complex tensor, and views of its memory that read it conjugated and negated."""
    return holding(p=memory, conj=memory.conj(), imag=memory.imag, neg=memory.conj().imag)


@pytest.mark.parametrize("in_place", [None, True, False])
def test_views_that_conjugate_and_negate(in_place: bool | None, tmp_path: Path) -> None:
    module = conjugate_views(torch.randn(3, 4, dtype=torch.complex64))
    saved = {name: buffer.resolve_conj().resolve_neg() for name, buffer in module.named_buffers()}
    path = tmp_path / "x.safetensors"
    ms.save(module, path)
    module = conjugate_views(torch.zeros(3, 4, dtype=torch.complex64))
    ms.load(module, path, in_place=in_place)
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, saved[name])
        assert buffer.untyped_storage().data_ptr() == module.p.untyped_storage().data_ptr()
    assert (module.conj.is_conj(), module.neg.is_neg()) == (True, True)


def test_parameters_that_show_the_same_memory() -> None:
    memory = torch.zeros(4)
    module = holding(a=nn.Parameter(memory), b=nn.Parameter(memory))
    conflict(module, {"a": torch.ones(4), "b": torch.zeros(4)})
    ms.load(module, {"a": torch.ones(4), "b": torch.ones(4)})
    assert torch.equal(module.b, torch.ones(4))


def test_slots_that_overlap() -> None:
    memory = torch.zeros(10)
    module = holding(a=memory[:4], b=memory[2:6], c=memory[6:])
    conflict(module, {"a": torch.arange(4.0), "b": torch.arange(4.0), "c": torch.ones(4)})
    ms.load(module, {"a": torch.arange(4.0), "b": torch.arange(2.0, 6.0), "c": torch.ones(4)})
    assert torch.equal(memory, torch.tensor([0.0, 1, 2, 3, 4, 5, 1, 1, 1, 1]))


@pytest.mark.parametrize("first", [slice(0, 8), slice(4, 12), slice(0, 16, 2)], ids=["same", "part", "strided"])
@pytest.mark.parametrize("in_place", [None, True, False])
def test_slots_that_wrap_one_array(in_place: bool | None, first: slice, tmp_path: Path) -> None:
    """Their tensors have a storage each, and the storages overlap."""
    array = np.zeros(16, np.float32)
    module = holding(a=nn.Parameter(torch.from_numpy(array[first])), b=nn.Parameter(torch.from_numpy(array[:8])))
    path, state = tmp_path / "x.safetensors", {"a": torch.ones(8), "b": torch.full((8,), 2.0)}
    ms.save(holding(**state), path)
    for source in (path, state):
        with pytest.raises(ms.PlanError, match="b is the same tensor as a"):
            ms.load(module, source, in_place=in_place)
        assert not array.any()
    state["b"] = torch.ones(8)
    ms.load(module, state, in_place=in_place)
    assert array[:8].tolist() == array[first].tolist() == [1] * 8


@pytest.mark.parametrize("options", [{}, {"transform": lambda _, tensor: tensor.clone()}])
def test_a_slot_that_overlaps_another_and_has_another_shape_in_the_file(options: dict[str, Any]) -> None:
    base, module = torch.zeros(8, 4), nn.Module()
    module.a = nn.Parameter(base)
    module.register_buffer("v", base.view(-1)[:10])
    state = {"a": torch.ones(8, 4), "v": torch.ones(4, 4)}
    with pytest.raises(ms.ModelStateError, match="v"):
        ms.load(module, state, **options)
    assert not base.any()


def test_overlapping_memory_that_is_not_aligned() -> None:
    memory = bytearray(40)
    first, second = (torch.frombuffer(memory, dtype=torch.float32, count=4, offset=at) for at in (1, 9))
    conflict(holding(a=first, b=second), {"a": torch.arange(4.0), "b": torch.arange(4.0)})
    ms.load(holding(a=first, b=second), {"a": torch.arange(4.0), "b": torch.arange(2.0, 6.0)})
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3], [2, 3, 4, 5])


def of_two_dtypes(start: int) -> nn.Module:
    """Parameters of 8 and 4 bytes an element in one memory: the second begins so many bytes behind the first."""
    memory = torch.zeros(64, dtype=torch.uint8)
    first, second = memory[:32].view(torch.float64), memory[start : start + 16].view(torch.float32)
    return holding(a=nn.Parameter(first), b=nn.Parameter(second))


def test_slots_of_two_dtypes_that_overlap() -> None:
    """The second begins behind the end of the first, if elements are counted and not bytes."""
    values = {"a": torch.ones(4, dtype=torch.float64), "b": torch.zeros(4)}
    conflict(of_two_dtypes(24), values)
    module = of_two_dtypes(32)
    ms.load(module, values)
    assert (module.a.tolist(), module.b.tolist()) == ([1] * 4, [0] * 4)


def test_a_transform_that_returns_tensors_of_the_model() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    first, second = module[0].weight.detach().clone(), module[1].weight.detach().clone()
    swapped = {"0.weight": module[1].weight, "1.weight": module[0].weight}
    ms.load(module, module.state_dict(), transform=lambda name, tensor: swapped[name])
    assert torch.equal(module[0].weight, second)
    assert torch.equal(module[1].weight, first)


def test_values_that_show_the_model_through_numpy() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    first, second = module[0].weight.detach().clone(), module[1].weight.detach().clone()
    arrays = [torch.from_numpy(layer.weight.detach().numpy()) for layer in module]
    ms.load(module, {"0.weight": arrays[1], "1.weight": arrays[0]})
    assert torch.equal(module[0].weight, second)
    assert torch.equal(module[1].weight, first)


def test_an_expanded_result_becomes_memory_that_can_be_trained() -> None:
    with ms.skeleton():
        module = nn.Linear(2, 2)
    state = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    ms.load(module, state, transform=lambda name, tensor: torch.ones(()).expand(tensor.shape))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert module.weight.is_contiguous()


@pytest.mark.parametrize("target", ["materialised", "skeleton"])
@pytest.mark.parametrize("source", ["mapping", "file"])
def test_a_hook_that_changes_a_value_that_another_slot_has_got(source: str, target: str, tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    state: Any = {"0.weight": weight, "1.weight": weight}
    torch.save(state, tmp_path / "x.pt")

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))

    if target == "skeleton":
        with ms.skeleton():
            module = build()
    else:
        module = build()

    def hook(owner: nn.Module, values: Any, prefix: str, *_: Any) -> None:
        values[prefix + "weight"].mul_(5)

    module[1].register_load_state_dict_pre_hook(hook)
    ms.load(module, state if source == "mapping" else tmp_path / "x.pt")
    assert torch.equal(module[0].weight, torch.ones(2, 2))
    assert torch.equal(module[1].weight, torch.full((2, 2), 5.0))
