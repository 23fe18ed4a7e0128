"""The memory that a load takes beyond the final tensors: it is predicted, and a budget is kept or refused."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.errors import MemoryBudgetError
from modelstate.io.engine import ReadStrategy

SIZES = st.lists(st.sampled_from([1, 30, 4096, 70_000, 600_000]), min_size=1, max_size=6)
CHANGES = st.sampled_from([{}, {"dtype": torch.bfloat16}, {"transform": lambda name, tensor: tensor * 2}])


class Parameters(nn.Module):
    """One parameter of each size."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)


def least_of(error: MemoryBudgetError) -> int:
    (number,) = re.findall(r"(\d+) bytes, at the least", str(error))
    return int(number)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, changes=CHANGES, budget=st.integers(0, 8_000_000))
def test_a_budget_is_kept_or_refused_with_the_least_that_is_enough(
    tmp_path: Path, sizes: list[int], changes: dict[str, object], budget: int
) -> None:
    path = tmp_path / "model.safetensors"
    state = {name: torch.ones(tensor.shape) for name, tensor in Parameters(sizes).state_dict().items()}
    save_file(state, path)

    def peak(most: int) -> int:
        model = Parameters(sizes)
        report = ms.load(model, path, in_place=False, max_memory_bytes=most, **changes)
        assert all(bool(tensor.ne(0).all()) for tensor in model.state_dict().values())
        return report.peak_memory_bytes

    try:
        assert peak(budget) <= budget
    except MemoryBudgetError as error:
        least = least_of(error)
        assert least > budget
        assert peak(least) <= least
        with pytest.raises(MemoryBudgetError):
            peak(least - 1)


class Labelled(nn.Parameter):
    """A class of parameters without behaviour of its own."""


def test_a_read_in_place_of_a_class_of_parameters_counts_its_buffer(tmp_path: Path) -> None:
    save_file({"weight": torch.randn(300, 200)}, tmp_path / "x.safetensors")
    module = nn.Module()
    module.weight = Labelled(torch.zeros(300, 200))
    planned = ms.plan(module, tmp_path / "x.safetensors", in_place=True)
    report = ms.load(module, tmp_path / "x.safetensors", in_place=True)
    assert report.peak_memory_bytes == planned.peak_memory_bytes == 240_000
    with pytest.raises(MemoryBudgetError):
        ms.load(module, tmp_path / "x.safetensors", in_place=True, max_memory_bytes=1000)


@pytest.mark.parametrize("total", [1 << 20, 90 << 20, 300 << 20, 2 << 30])
def test_pinned_memory_is_little_beside_what_gets_to_a_device(total: int) -> None:
    usual = ReadStrategy(threads=8, block_bytes=4 << 20)
    used = usual.for_devices(total)
    assert used.threads * used.block_bytes <= max(total // 8, 2 * usual.block_bytes)
    assert used.threads * used.block_bytes <= 64 << 20
    threads_bytes, block_bytes = usual.stream_bytes(total, 4, 0, to_device=True)
    assert threads_bytes <= used.threads * block_bytes <= used.threads * used.block_bytes
    network = ReadStrategy(threads=16, block_bytes=4 << 20)
    assert network.for_devices(total).threads == 16


def test_a_plan_states_the_memory_of_a_load_from_it_too(tmp_path: Path) -> None:
    """Such a load reads the values of both dtypes in one stream."""
    net = nn.Sequential(nn.Linear(1400, 1400, bias=False), nn.Linear(1400, 1400, bias=False))
    state = {"0.weight": torch.full((1400, 1400), 2.0).half(), "1.weight": torch.full((1400, 1400), 2.0).bfloat16()}
    save_file(state, tmp_path / "x.safetensors")
    plan = ms.plan(net, tmp_path / "x.safetensors")
    for source in (tmp_path / "x.safetensors", plan):
        assert 0 < ms.load(net, source).peak_memory_bytes <= plan.peak_memory_bytes
    assert all(bool((weight == 2.0).all()) for weight in net.parameters())
