"""What a report says of its memory is counted, and never more than the plan said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.io.memory import MemoryTracker
from modelstate.loading.report import LoadReport
from tests.loading.loads import KINDS, Kind, Open, three_layers, twice

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def stated(kind: Kind, source: Open, **more: Any) -> int:
    options = {name: value for name, value in kind.options.items() if name != "verify"}
    return ms.plan(kind.build(), source(), **options, **more).peak_memory_bytes


def reached(kind: Kind, source: Open, **more: Any) -> LoadReport:
    return ms.load(kind.build(), source(), **kind.options, **more)


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
    except ms.errors.MemoryBudgetError as error:
        least = int(str(error.found).split()[0])
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


def test_values_that_wait_and_what_a_transform_is_given(tmp_path: Path) -> None:
    """All of the model and the weight that the transform has; in a skeleton that weight and the one after it."""
    source = KINDS["transform, read ahead"].write(tmp_path)
    sizes = [tensor.nbytes for tensor in three_layers().parameters()]
    assert ms.load(three_layers(), source(), transform=twice).peak_memory_bytes == sum(sizes) + max(sizes)
    for budget, weights in ((None, 2), (max(sizes), 1)):
        with ms.skeleton():
            model = three_layers()
        report = ms.load(model, source(), transform=twice, max_memory_bytes=budget)
        assert report.peak_memory_bytes == weights * max(sizes)


@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"transform": twice}, {"dtype": torch.bfloat16}])
def test_weights_in_another_order_pass_through_a_buffer(options: dict[str, Any], tmp_path: Path) -> None:
    module = nn.Conv2d(8, 8, 3, bias=False).to(memory_format=torch.channels_last)
    nbytes = module.weight.nbytes
    torch.save({"weight": torch.randn(8, 8, 3, 3)}, tmp_path / "x.pt")
    most = ms.plan(module, tmp_path / "x.pt", **options).peak_memory_bytes
    assert nbytes <= ms.load(module, tmp_path / "x.pt", **options).peak_memory_bytes <= most


def test_the_most_at_once_is_what_counts() -> None:
    held = MemoryTracker()
    held.take(5)
    with held.during(7):
        pass
    with held.during(3):
        held.take(-5)
    assert held.peak_bytes == 12


@pytest.mark.parametrize(("options", "named"), [({}, True), ({"in_place": True}, False)])
def test_a_budget_names_in_place_to_who_has_not_asked_for_it(
    options: dict[str, Any], named: bool, tmp_path: Path
) -> None:
    module = nn.Module()
    module.register_buffer("counts", torch.zeros(1000, dtype=torch.uint16))  # which waits in memory of its own
    torch.save({"counts": torch.ones(1000, dtype=torch.uint16)}, tmp_path / "x.pt")
    with pytest.raises(ms.errors.MemoryBudgetError) as caught:
        ms.load(module, tmp_path / "x.pt", max_memory_bytes=1, **options)
    assert ("in_place=True" in str(caught.value)) == named
