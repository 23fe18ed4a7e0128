"""`Live`: versions, pins, rollback, buffers, modes."""

import copy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import (
    LiveTargetError,
    OptionError,
    SourceNotFoundError,
    SourceTypeError,
    SwapBusyError,
    VersionGoneError,
)
from tests.serve.models import Constant, Decoder, Everything, linear, randomised, weights_of
from tests.serve.packages import linear_package
from tests.serve.targets import AOTI, KINDS, buffer_of, module_of, target_of

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
every_kind = pytest.mark.parametrize("kind", KINDS)


def linear_target(kind: str) -> Any:
    """What is served of `linear(1)`; its package is that of many tests."""
    return linear_package() if kind == "aoti" else target_of(kind, linear(1), X)


@pytest.mark.slow
@every_kind
def test_new_weights_serve(kind: str, tmp_path: Path) -> None:
    live = ms.Live(linear_target(kind))
    assert (live.version().id, live.kind) == (1, kind)
    assert torch.equal(live(X), linear(1)(X))
    ms.save(linear(2), tmp_path / "two.safetensors")
    torch.save({"model": linear(3).state_dict(), "optimizer": {"m": torch.ones(3, 2).T}}, tmp_path / "three.pt")
    sources = [
        tmp_path / "two.safetensors",
        tmp_path / "three.pt",
        linear(4).state_dict(),
        ms.open(linear(5).state_dict()),
    ]
    for k, source in enumerate(sources, 2):
        report = live.swap(source)
        assert (report.version, report.previous, report.tensors, report.bytes) == (k, k - 1, 2, 80)
        assert live.answer(X).version == live.version().id == k
        assert live.version().source == (str(source) if isinstance(source, Path) else "mapping")
        assert torch.equal(live(X), linear(k)(X))
        assert f"version {k} serves, after {k - 1}" in str(report)
    assert [event.action for event in live.history()] == ["started", *["swapped"] * 4]
    assert [event.version for event in live.history()] == [1, 2, 3, 4, 5]


@every_kind
def test_nothing_of_the_source_is_kept(kind: str, tmp_path: Path) -> None:
    """Neither tensors that are trained on nor a file that is overwritten in place reach what serves."""
    live, state = ms.Live(linear_target(kind)), linear(2).state_dict()
    live.swap(state)
    state["weight"].zero_()
    assert torch.equal(live(X), linear(2)(X))
    path = tmp_path / "three.safetensors"
    ms.save(linear(3), path)
    live.swap(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(live(X), linear(3)(X))


@every_kind
def test_a_pin_keeps_its_version(kind: str) -> None:
    live = ms.Live(linear_target(kind))
    with live.version() as v:
        live.swap(linear(2).state_dict())
        assert v.id == 1
        assert torch.equal(v(X), linear(1)(X))
        assert torch.equal(live(X), linear(2)(X))
        live.swap(linear(3).state_dict())
        live.swap(linear(4).state_dict())
        assert torch.equal(v(X), linear(1)(X))
    with pytest.raises(VersionGoneError, match="has ended"):
        v(X)


@every_kind
def test_rollback_is_one_flip(kind: str) -> None:
    live = ms.Live(linear_target(kind), keep_versions=2)
    for k in (2, 3, 4):
        live.swap(linear(k).state_dict())
    assert live.rollback() == live.version().id == 3
    assert torch.equal(live(X), linear(3)(X))
    assert live.rollback() == 2
    with pytest.raises(VersionGoneError, match="no version to roll back to"):
        live.rollback()
    assert torch.equal(live(X), linear(2)(X))
    assert live.swap(linear(5).state_dict()).version == 5
    assert [event.action for event in live.history()][-3:] == ["rolled back", "rolled back", "swapped"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "exported", AOTI])
def test_ties_buffers_and_modes(kind: str) -> None:
    torch.manual_seed(0)
    module, trained = Everything(), randomised(Everything())
    trained.shift.copy_(module.shift)
    trained.norm.running_mean.fill_(3.0)
    target = target_of(kind, module, X, training=True)
    live = ms.Live(target, training=True)
    with torch.no_grad():
        module.norm.running_mean.zero_()  # what an export in training mode has run
    live.swap(trained.state_dict(), buffers="reset")
    assert torch.allclose(live(X), trained(X))
    if kind == "eager":
        served = module_of(live)
        assert served.a.weight is served.b.weight
        assert served.norm.running_mean.equal(trained.norm.running_mean)


@pytest.mark.parametrize("kind", ["eager", "exported", AOTI])
def test_buffers_that_requests_change_are_carried_over_or_reset(kind: str) -> None:
    torch.manual_seed(0)
    module = Everything()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    state["scale"] = torch.full((), 5.0)
    live = ms.Live(target_of(kind, module, X, training=True), training=True)

    def seen() -> float:
        return float(buffer_of(live, "seen"))

    before = seen()
    live(X), live(X)
    report = live.swap(state)
    assert seen() == before + 2
    assert set(report.carried) == {"seen", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    live.swap(state)
    assert seen() == before + 2  # carried over again, though no request has changed it since
    live(X)
    report = live.swap(state, buffers="reset")
    assert report.carried == ()
    assert seen() == float(state["seen"])
    assert float(buffer_of(live, "scale")) == 5.0


class Cache(nn.Module):
    """A buffer that requests replace, and that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("cache", torch.zeros(0, 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.cat([self.cache, (x * self.weight)[None]])
        return self.cache.sum(0)


def test_a_cache_that_grows_is_carried_over_or_reset() -> None:
    live, x = ms.Live(Cache().eval()), torch.ones(2)
    live(x), live(x)
    live.swap({"weight": torch.full((2,), 10.0)})
    assert live(x).tolist() == [12.0, 12.0]
    live.swap({"weight": torch.full((2,), 10.0)}, buffers="reset")
    assert live(x).tolist() == [10.0, 10.0]
    assert live.rollback() == 2
    assert live(x).tolist() == [22.0, 22.0]


@pytest.mark.slow
def test_a_second_swap_waits_or_is_refused() -> None:
    live = ms.Live(linear(1))
    inside, may_end = threading.Event(), threading.Event()

    def slow(_: Any) -> bool:
        inside.set()
        return may_end.wait(60)

    thread = threading.Thread(target=lambda: live.swap(linear(2).state_dict(), canary=slow))
    thread.start()
    inside.wait(60)
    for seconds in (0, 0.05):
        with pytest.raises(SwapBusyError, match="another swap"):
            live.swap(linear(3).state_dict(), timeout_seconds=seconds)
    threading.Timer(0.1, may_end.set).start()
    assert live.swap(linear(3).state_dict()).version == 3
    thread.join()


def test_swaps_from_many_threads_come_one_after_the_other() -> None:
    live = ms.Live(Constant(2, 8).eval())
    versions: list[int] = []

    def work(k: int) -> None:
        for _ in range(5):
            versions.append(live.swap(weights_of(Constant(2, 8), k)).version)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(versions) == list(range(2, 22))
    assert live.version().id == 21


def test_a_swap_within_a_swap_is_refused() -> None:
    live = ms.Live(linear(1))
    errors = []

    def canary(_: Any) -> None:
        with pytest.raises(SwapBusyError) as caught:
            live.swap(linear(3).state_dict())
        errors.append(caught.value)

    live.swap(linear(2).state_dict(), canary=canary)
    assert len(errors) == 1


def test_rules_are_applied() -> None:
    live = ms.Live(linear(1))
    state = {f"old.{name}": value for name, value in linear(2).state_dict().items()}
    live.swap(state, rules=[ms.rules.Prefix(strip="old.")])
    assert torch.equal(live(X), linear(2)(X))


def test_requests_raise_what_the_program_raises_and_leave_nothing_behind() -> None:
    live = ms.Live(linear(1))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        live(torch.ones(3))
    live.swap(linear(2).state_dict(), timeout_seconds=60)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (torch.relu, "this object cannot be served"),
        (nn.LazyLinear(3), "has not run yet"),
        (3, "this object cannot be served"),
    ],
)
def test_what_cannot_be_served(target: Any, why: str) -> None:
    with pytest.raises(LiveTargetError, match=why):
        ms.Live(target)


@pytest.mark.parametrize("path", ["a\0.pt2", ""])
def test_what_can_be_no_path_is_refused_as_open_refuses_it(path: str) -> None:
    said = []
    for take in (ms.open, ms.Live):
        with pytest.raises(SourceTypeError) as caught:
            take(path)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_modules_of_which_no_second_one_can_be_made() -> None:
    module = linear(1)
    module.lock = threading.Lock()
    with pytest.raises(LiveTargetError, match="cannot be copied"):
        ms.Live(module)
    flat = torch.zeros(6)
    module = nn.Module()
    module.a, module.b = nn.Parameter(flat[:4]), nn.Parameter(flat[2:])
    with pytest.raises(LiveTargetError, match="overlap"):
        ms.Live(module)
    module.b = nn.Parameter(flat[4:])
    ms.Live(module)
    module = nn.Sequential(linear(1))
    module[0].compile(backend="eager")
    with pytest.raises(LiveTargetError, match="compiled in place"):
        ms.Live(module)


class CopiesItself(nn.Module):
    """A module whose class says how it is copied, and that reads its part for that."""

    def __init__(self) -> None:
        super().__init__()
        self.part = linear(1)
        self.scale = self.part.in_features / 4

    def __deepcopy__(self, memo: dict[int, object]) -> "CopiesItself":
        clone = CopiesItself.__new__(CopiesItself)
        nn.Module.__init__(clone)
        memo[id(self)] = clone
        clone.part = copy.deepcopy(self.part, memo)
        clone.scale = clone.part.in_features / 4
        return clone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) * self.scale


def test_a_module_that_says_how_it_is_copied() -> None:
    module = nn.Sequential(linear(1), CopiesItself(), linear(1)).eval()
    module[0].sibling = (module[2],)
    live = ms.Live(module)
    live.swap({name: torch.full_like(value, 2) for name, value in module.state_dict().items()})
    assert torch.equal(live(X), linear(2)(linear(2)(linear(2)(X))))


@pytest.mark.parametrize(
    "options",
    [
        {"buffers": "keep"},
        {"timeout_seconds": -1},
        {"timeout_seconds": "soon"},
        {"timeout_seconds": True},
        {"timeout_seconds": float("nan")},
        {"exact": 2},
        {"check_finite": None},
        {"verify": "yes"},
        {"canary": 3},
    ],
)
def test_arguments_that_mean_nothing(options: dict[str, Any]) -> None:
    live = ms.Live(linear(1))
    with pytest.raises(OptionError):
        live.swap("nothing is opened", **options)
    assert live.version().id == 1


def test_more_arguments_that_mean_nothing() -> None:
    with pytest.raises(OptionError):
        ms.Live(linear(1), keep_versions=-1)
    with pytest.raises(OptionError):
        ms.Live(linear(1), names=ms.serve.NameMap.of(linear(1)))
    live = ms.Live(linear(1))
    with pytest.raises(SourceNotFoundError):
        live.swap("nowhere.safetensors")
    assert live.history()[-1].action == "refused"
    assert live.history()[-1].source == "nowhere.safetensors"
    assert "SourceNotFoundError" in live.history()[-1].error
    assert repr(live) == "<Live Linear, eager: version 1>"


def test_a_request_costs_little_more_than_the_bare_call() -> None:
    module, x = nn.Identity(), torch.ones(1)
    live = ms.Live(module)

    def calls_of(request: Any) -> int:
        """How many functions a request calls: Python's, and those of C."""
        events: list[str] = []
        sys.setprofile(lambda frame, event, arg: events.append(event))
        try:
            request(x)
        finally:
            sys.setprofile(None)
        return sum(event in ("call", "c_call") for event in events)

    live(x)
    assert calls_of(live) - calls_of(module) < 10


def test_a_module_with_a_hook_that_takes_new_weights() -> None:
    live, trained = ms.Live(Decoder().eval()), randomised(Decoder())
    live.swap(trained.state_dict())
    assert torch.equal(live(X), trained(X))
