"""`Live` over a module with weights on meta: nothing serves before the first swap, and the first weights are real."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import CanaryError, LiveTargetError, PlanError, VersionGoneError, WeightsError
from tests.serve.models import linear
from tests.serve.targets import target_of

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Has parameters, a persistent buffer and one that no checkpoint contains."""

    def __init__(self, k: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.constant_(self.linear.weight, k)
        nn.init.constant_(self.linear.bias, k)
        self.register_buffer("scale", torch.full((4,), float(k)))
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * self.scale + self.shift
        return y


def skeleton() -> Net:
    """Has all parameters on meta, and real buffers."""
    with ms.skeleton():
        return Net()


def partly() -> Net:
    """Has one parameter on meta."""
    net = Net()
    net.linear.bias = nn.Parameter(torch.empty(4, device="meta"))
    return net


def without_scale() -> Net:
    """Has real parameters, and a persistent buffer on meta."""
    net = Net()
    net.register_buffer("scale", torch.empty(4, device="meta"))
    return net


every_kind = pytest.mark.parametrize("kind", ["eager", "compiled"])
every_module = pytest.mark.parametrize("make", [skeleton, partly, without_scale])


@every_kind
@every_module
def test_no_request_is_answered_before_the_first_weights(kind: str, make: Callable[[], nn.Module]) -> None:
    live = ms.Live(target_of(kind, make(), X))
    requests: list[Callable[[], object]] = [
        lambda: live(X),
        lambda: live.answer(X),
        lambda: live.version().__enter__(),
        live.rollback,
    ]
    for request in requests:
        with pytest.raises(VersionGoneError):
            request()
    with pytest.raises(VersionGoneError, match=r"nothing serves yet[^!]*to do: swap in a checkpoint first: live\.swap"):
        live(X)
    assert (live.version().id, live.version().id, live.history()[0].version) == (0, 0, 0)
    assert "nothing serves yet" in repr(live)
    report = live.swap(Net(2).state_dict())
    assert (report.version, report.previous, live.version().id) == (1, 0, 1)
    assert torch.equal(live(X), Net(2)(X))
    with live.version() as version:
        assert torch.equal(version(X), Net(2)(X))
    with pytest.raises(VersionGoneError, match="no version to roll back to"):
        live.rollback()
    live.swap(Net(3).state_dict())
    assert torch.equal(live(X), Net(3)(X))
    assert live.rollback() == 1


@every_module
def test_first_weights_are_checked_on_real_values(make: Callable[[], nn.Module]) -> None:
    live = ms.Live(make().eval())
    good = Net(2).state_dict()
    with pytest.raises(WeightsError, match=r"linear\.bias: NaN"):
        live.swap({**good, "linear.bias": torch.full((4,), float("nan"))}, check_finite=True)
    with pytest.raises(CanaryError):
        live.swap(good, canary=lambda version: bool((version(X) == 0).all()))
    with pytest.raises(PlanError):
        live.swap({"linear.weight": good["linear.weight"]})
    assert live.version().id == 0
    with pytest.raises(VersionGoneError):
        live(X)
    report = live.swap(good, canary=lambda version: torch.equal(version(X), Net(2)(X)))
    assert report.version == 1
    assert torch.equal(live(X), Net(2)(X))


def test_a_canary_without_a_reference_refuses_nan_and_says_that_it_compared_nothing() -> None:
    live = ms.Live(skeleton().eval())
    canary = ms.Canary((X,), atol=0.1)
    with pytest.raises(CanaryError, match=r"(?s)the answer has NaN.*to do: nothing has been changed"):
        live.swap({**Net(2).state_dict(), "scale": torch.full((4,), float("nan"))}, canary=canary)
    with pytest.raises(CanaryError, match="differs too much"):
        live.swap(Net(2).state_dict(), canary=ms.Canary((X,), atol=0.1, expected=torch.zeros(3, 4)))
    report = live.swap(Net(2).state_dict(), canary=canary)
    assert any("no answer to compare with" in note for note in report.notes)
    with pytest.raises(CanaryError, match="differs too much"):
        live.swap(Net(9).state_dict(), canary=canary)
    assert live.swap(Net(2).state_dict(), canary=canary).notes == ()


class Allocating(nn.Module):
    """Allocates a buffer in the constructor, and fills it only where its parameter has memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 2))
        self.register_buffer("index", torch.empty(6, dtype=torch.long), persistent=False)
        if not self.table.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        self.index.copy_(torch.arange(6) % 4)

    def forward(self) -> torch.Tensor:
        return self.table[self.index]


@pytest.mark.parametrize("make", [Net, Allocating])
def test_what_no_swap_can_fill_is_refused(make: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        module = make().eval()
    with pytest.raises(LiveTargetError, match=r"(?s)found: (shift|index)\n.*modelstate\.skeleton\(\)"):
        ms.Live(module)
    with ms.skeleton():
        module = make().eval()
    ms.load(module, make().state_dict(), init_missing=True)
    assert ms.Live(module).version().id == 1
    module = nn.Sequential(linear(1))
    module[0].constant = torch.empty(4, device="meta")
    with pytest.raises(LiveTargetError, match=r"(?s)found: 0\.constant\n.*init_missing=True"):
        ms.Live(module.eval())


def test_a_program_that_was_exported_on_meta_is_refused() -> None:
    program = torch.export.export(linear(1).to("meta"), (X.to("meta"),))
    with pytest.raises(LiveTargetError, match=r"(?s)on the meta device.*give the module values before"):
        ms.Live(program)
