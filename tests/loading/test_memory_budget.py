"""The memory that a load takes: the plan states it, the report counts it, and a budget is kept or refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.errors import MemoryBudgetError
from tests.loading.loads import KINDS, Kind, Open, twice

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def stated(kind: Kind, source: Open, **more: Any) -> int:
    options = {name: value for name, value in kind.options.items() if name != "verify"}
    return ms.plan(kind.build(), source(), **options, **more).peak_memory_bytes


def reached(kind: Kind, source: Open, **more: Any) -> ms.LoadReport:
    return ms.load(kind.build(), source(), **kind.options, **more)


def least_of(error: MemoryBudgetError) -> int:
    (number,) = re.findall(r"(\d+) bytes, at the least", str(error))
    return int(number)


@pytest.mark.slow_except(12)
@every_kind
def test_no_load_holds_more_than_its_plan_says(kind: Kind, tmp_path: Path) -> None:
    source = kind.write(tmp_path)
    most = stated(kind, source)
    found = reached(kind, source).peak_memory_bytes
    assert found <= most
    assert (found > 0) == (most > 0)


@pytest.mark.slow_except(8)
@every_kind
def test_nor_does_one_with_as_little_as_there_can_be(kind: Kind, tmp_path: Path) -> None:
    source = kind.write(tmp_path)
    try:
        reached(kind, source, max_memory_bytes=0)
    except MemoryBudgetError as error:
        least = least_of(error)
    else:
        least = 0
    assert reached(kind, source, max_memory_bytes=least).peak_memory_bytes <= least


@pytest.mark.slow_except(8)
@every_kind
def test_one_in_the_background_holds_as_much(kind: Kind, tmp_path: Path) -> None:
    source = kind.write(tmp_path)
    if kind.options.get("in_place"):
        pytest.skip("reads into memory that is in use")
    report = ms.load(kind.build(), source(), background=True, **kind.options).result()
    most = stated(Kind(kind.write, kind.build, {**kind.options, "in_place": False}), source)  # the model is in use
    assert report.peak_memory_bytes <= most
    assert (report.peak_memory_bytes > 0) == (most > 0)


@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"transform": twice}, {"dtype": torch.bfloat16}])
def test_weights_in_another_order_pass_through_a_buffer(options: dict[str, Any], tmp_path: Path) -> None:
    module = nn.Conv2d(8, 8, 3, bias=False).to(memory_format=torch.channels_last)
    nbytes = module.weight.nbytes
    torch.save({"weight": torch.randn(8, 8, 3, 3)}, tmp_path / "x.pt")
    most = ms.plan(module, tmp_path / "x.pt", **options).peak_memory_bytes
    assert nbytes <= ms.load(module, tmp_path / "x.pt", **options).peak_memory_bytes <= most


@pytest.mark.parametrize(("options", "named"), [({}, True), ({"in_place": True}, False)])
def test_a_budget_names_in_place_to_who_has_not_asked_for_it(
    options: dict[str, Any], named: bool, tmp_path: Path
) -> None:
    module = nn.Module()
    module.register_buffer("counts", torch.zeros(1000, dtype=torch.complex32))  # which torch copies in part
    torch.save({"counts": torch.zeros(1000, dtype=torch.complex32)}, tmp_path / "x.pt")
    with pytest.raises(MemoryBudgetError) as caught:
        ms.load(module, tmp_path / "x.pt", max_memory_bytes=1, **options)
    assert ("in_place=True" in str(caught.value)) == named


# Budgets that are drawn.

SIZES = st.lists(st.sampled_from([1, 30, 4096, 70_000, 600_000]), min_size=1, max_size=6)
CHANGES = st.sampled_from([{}, {"dtype": torch.bfloat16}, {"transform": lambda name, tensor: tensor * 2}])


class Parameters(nn.Module):
    """One parameter of each size."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)


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


def test_a_plan_states_the_memory_of_a_load_from_it_too(tmp_path: Path) -> None:
    """Such a load reads the values of both dtypes in one stream."""
    net = nn.Sequential(nn.Linear(1400, 1400, bias=False), nn.Linear(1400, 1400, bias=False))
    state = {"0.weight": torch.full((1400, 1400), 2.0).half(), "1.weight": torch.full((1400, 1400), 2.0).bfloat16()}
    save_file(state, tmp_path / "x.safetensors")
    plan = ms.plan(net, tmp_path / "x.safetensors", in_place=True)
    for options, source in (({"in_place": True}, tmp_path / "x.safetensors"), ({}, plan)):
        assert 0 < ms.load(net, source, **options).peak_memory_bytes <= plan.peak_memory_bytes
    assert all(bool((weight == 2.0).all()) for weight in net.parameters())
