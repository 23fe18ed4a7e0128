"""`Live`: versions, pins, rollback, buffers, modes."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import LiveTargetError, OptionError, SourceNotFoundError, SwapBusyError, VersionGoneError
from tests.serve.models import everything, linear
from tests.serve.targets import AOTI, KINDS, buffer_of, linear_target, target_of

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
every_kind = pytest.mark.parametrize("kind", KINDS)


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


def test_why_a_swap_maps_no_file(tmp_path: Path) -> None:
    """A swap has no `map=`: its note names the call that has it."""
    torch.save(linear(2).state_dict(), tmp_path / "two.pt")
    (note,) = ms.Live(linear(1)).swap(tmp_path / "two.pt").notes
    assert note.startswith("two.pt: read into memory, not mapped")
    assert note.endswith("; ms.load(map=True) maps it all the same")


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
        live.swap(linear(4).state_dict(), timeout_seconds=0)
        assert live.rollback(timeout_seconds=0) == 3  # nothing waits for the block
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


@pytest.mark.parametrize("kind", ["eager", "exported", AOTI])
def test_buffers_that_requests_change_are_carried_over_or_reset(kind: str) -> None:
    module = everything()
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


def test_a_swap_within_a_swap_is_refused() -> None:
    live = ms.Live(linear(1))
    errors = []

    def canary(_: Any) -> None:
        with pytest.raises(SwapBusyError) as caught:
            live.swap(linear(3).state_dict())
        errors.append(caught.value)

    live.swap(linear(2).state_dict(), canary=canary)
    assert len(errors) == 1


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
