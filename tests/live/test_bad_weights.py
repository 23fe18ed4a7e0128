"""Weights that may not serve: each refused with its own error, while requests go on."""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.live import staging
from modelstate.plan import problems
from modelstate.testing.faults import faulty_reads
from tests.live.models import weights_of
from tests.live.targets import KINDS, Readers, target_of

X = torch.ones(4, 8)


class Tied(nn.Module):
    """Answers with its weights, all of which are k in version k."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(8, 8))
        self.b = nn.Parameter(torch.ones(8, 8))
        self.again = self.a
        self.register_buffer("c", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x @ self.a) / 8, (x @ self.b) / 8, (x @ self.again) / 8, self.c.expand(4, 8) * x])


def state(k: float = 2, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**weights_of(Tied(), k), **changes}.items() if value is not None}


def typed(*kinds: type[problems.Problem]) -> Callable[[Exception], bool]:
    def check(error: Exception) -> bool:
        return isinstance(error, ms.PlanError) and {type(one) for one in error.problems} == set(kinds)

    return check


def of(kind: type[Exception]) -> Callable[[Exception], bool]:
    return lambda error: type(error) is kind


def half_a_file(folder: Path) -> Path:
    path = folder / "half.safetensors"
    ms.save(state(), path)
    path.write_bytes(path.read_bytes()[:-300])
    return path


def changing_file(folder: Path) -> ms.Checkpoint:
    """One that is written anew after it was opened."""
    path = folder / "changing.safetensors"
    ms.save(state(), path)
    opened = ms.open(path)
    time.sleep(0.02)
    ms.save(state(3), path, overwrite=True)
    return opened


def views_of_one_buffer(_: Path) -> dict[str, torch.Tensor]:
    flat = torch.full((8 * 8 * 2 + 8,), 2.0)
    a, b, c = flat.split([64, 64, 8])
    return {"a": a.view(8, 8), "again": a.view(8, 8), "b": b.view(8, 8), "c": c}


BAD: dict[str, tuple[Callable[[Path], Any], Callable[[Exception], bool]]] = {
    "a wrong name": (lambda _: state(b=None, bb=torch.ones(8, 8)), typed(problems.Missing, problems.Unexpected)),
    "a name too many": (lambda _: state(d=torch.ones(1)), typed(problems.Unexpected)),
    "half of the names": (lambda _: state(a=None, again=None), typed(problems.Missing)),
    "a wrong shape": (lambda _: state(b=torch.ones(8, 9)), typed(problems.WrongShape)),
    "a shape with as many elements": (lambda _: state(b=torch.ones(4, 16)), typed(problems.WrongShape)),
    "another dtype, with loss": (lambda _: state(b=torch.ones(8, 8).double()), typed(problems.WrongDtype)),
    "another dtype, without loss": (lambda _: state(b=torch.ones(8, 8).half()), of(errors.WeightDtypeError)),
    "another stride": (lambda _: state(b=torch.ones(8, 8).T), of(errors.WeightStrideError)),
    "views of one buffer": (views_of_one_buffer, of(errors.WeightStorageError)),
    "a part of a storage": (lambda _: state(c=torch.ones(9)[1:]), of(errors.WeightStorageError)),
    "NaN": (lambda _: state(b=torch.full((8, 8), float("nan"))), of(errors.NonFiniteWeightError)),
    "infinity": (lambda _: state(c=torch.tensor([1.0] * 7 + [float("inf")])), of(errors.NonFiniteWeightError)),
    "conflicting ties": (lambda _: state(again=torch.full((8, 8), 3.0)), typed(problems.TieConflict)),
    "no tensor": (lambda _: state(b="b"), typed(problems.NotATensor)),
    "on meta": (lambda _: state(b=torch.ones(8, 8, device="meta")), typed(problems.NoValues)),
    "half a file": (half_a_file, of(errors.TruncatedFileError)),
    "a file that changes": (changing_file, of(errors.ReadFailedError)),
    "no file": (lambda folder: folder / "nothing.pt", of(errors.SourceNotFoundError)),
    "no checkpoint": (lambda _: 3, of(errors.SourceTypeError)),
}


@pytest.mark.parametrize("mode", ["available", "frugal"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_is_refused_while_requests_go_on(kind: str, mode: Any, tmp_path: Path) -> None:
    live = ms.Live(target_of(kind, Tied(), X))
    live(X)

    def request() -> tuple[int, torch.Tensor]:
        value, version = live.answer(X)
        return version, value

    unexpected = {}
    readers = Readers(request, 2)
    with readers.running():
        for what, (make, expected) in BAD.items():
            source = make(tmp_path)
            try:
                live.swap(source, mode=mode)
                unexpected[what] = "accepted"
            except ms.ModelStateError as error:
                if not expected(error):
                    unexpected[what] = f"{type(error).__name__}: {error}"
        assert live.version == 1
        live.swap(state(2), mode=mode)
        time.sleep(0.05)
    assert not unexpected
    assert not readers.errors
    assert readers.torn == readers.wrong_version == 0
    assert readers.seen == {1, 2}
    assert [event.action for event in live.history()] == ["started", *["refused"] * len(BAD), "swapped"]


def test_what_is_refused_by_choice_only() -> None:
    live = ms.Live(Tied())
    flat = views_of_one_buffer(Path())
    flat["b"] = flat["b"].half()
    with pytest.raises(errors.WeightsError):
        live.swap(flat)
    live.swap(flat, exact=False)
    assert live(X).unique().tolist() == [2.0]
    live.swap(state(c=torch.full((8,), float("nan"))), check_finite=False)
    # What is not finite already may stay so: a mask of minus infinity, say.
    live.swap(state(3, c=torch.full((8,), float("nan"))))
    with pytest.raises(errors.NonFiniteWeightError, match="b: 64 of 64"):
        live.swap(state(b=torch.full((8, 8), float("nan")), c=torch.full((8,), float("nan"))))


def test_channels_last_is_the_order_of_a_program_that_has_it(tmp_path: Path) -> None:
    module = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    live, x = ms.Live(module), torch.randn(1, 4, 5, 5)
    other = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    for source in (other.state_dict(), {name: value.contiguous() for name, value in other.state_dict().items()}):
        live.swap(source)
        with live.pin() as v:
            assert v._program.holder.weight.stride() == module.weight.stride()  # type: ignore[union-attr]
        assert torch.equal(live(x), other(x))


@pytest.mark.parametrize(
    ("canary", "why"),
    [
        (lambda v: time.sleep(0.3) or False, "refused the new version"),
        (lambda v: torch.equal(v(X), torch.zeros(4, 4, 8)), "refused the new version"),
        (lambda v: v(X) == 7, "refused the new version"),
        (lambda v: v(torch.ones(3)), "check raised"),
        (ms.Canary((torch.ones(3),)), "the version that serves raised"),
        (ms.Canary((X,), atol=0.5), "differs too much"),
        (ms.Canary((X,), rtol=0.5, expected=torch.full((4, 4, 8), 9.0)), "differs too much"),
        (ms.Canary((X,), expected=torch.ones(3)), "another kind of tensor"),
        (ms.Canary((X,), expected=[torch.ones(3)]), "another structure"),
        (ms.Canary((X,), check=lambda answer: False), "refused"),
        (ms.Canary((X,), check=lambda answer: 1 / 0), "ZeroDivisionError"),
        (ms.Canary(kwargs={"x": torch.ones(3)}, check=bool), "the new version raised"),
    ],
)
@pytest.mark.parametrize("mode", ["available", "frugal"])
def test_a_canary_that_fails(canary: Any, why: str, mode: Any) -> None:
    live = ms.Live(Tied())
    with pytest.raises(errors.CanaryError, match=why):
        live.swap(state(2), canary=canary, mode=mode)
    assert live.version == 1
    assert live(X).unique().tolist() == [1.0]


def test_a_canary_with_nan_that_nobody_asked_for() -> None:
    with pytest.raises(errors.CanaryError, match="has NaN"):
        ms.Live(Tied()).swap(state(b=torch.full((8, 8), float("nan"))), check_finite=False, canary=ms.Canary((X,)))


@pytest.mark.parametrize("mode", ["available", "frugal"])
def test_canaries_that_are_content(mode: Any) -> None:
    live = ms.Live(Tied())
    live.swap(state(2), mode=mode, canary=ms.Canary((X,), atol=1.5))
    live.swap(state(3), mode=mode, canary=ms.Canary((X,), rtol=0.5))
    live.swap(state(4), mode=mode, canary=ms.Canary(kwargs={"x": X}, check=lambda answer: None))
    live.swap(state(5), mode=mode, canary=lambda v: bool((v(X) == 5).all()))
    report = live.swap(state(6), mode=mode, canary=lambda v: time.sleep(0.05))
    assert report.canary_seconds > 0.04
    assert live(X).unique().tolist() == [6.0]


@pytest.mark.parametrize("mode", ["available", "frugal"])
def test_a_canary_leaves_no_trace_in_the_buffers(mode: Any) -> None:
    module = nn.BatchNorm1d(4)
    live = ms.Live(module)
    live.swap(module.state_dict(), mode=mode, canary=lambda v: v(torch.randn(8, 4)))
    with live.pin() as v:
        assert int(v._program.buffers["num_batches_tracked"]) == 0  # type: ignore[union-attr]
        assert v._program.buffers["running_mean"].tolist() == [0.0] * 4  # type: ignore[union-attr]


def test_statistics_of_a_refused_swap_in_place_do_not_count_as_changed() -> None:
    module = nn.BatchNorm1d(4).eval()
    live = ms.Live(module)
    new = {**module.state_dict(), "running_mean": torch.full((4,), 3.0)}
    with pytest.raises(errors.CanaryError):
        live.swap(new, mode="frugal", canary=lambda v: False)
    assert live.swap(new).carried == ()
    with live.pin() as v:
        assert v._program.buffers["running_mean"].tolist() == [3.0] * 4  # type: ignore[union-attr]


def test_an_undo_that_fails_puts_the_program_into_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    live = ms.Live(Tied())

    def overwrite(self: object, serving: Any, before: dict[str, torch.Tensor]) -> None:
        serving.holder.b.data = torch.ones(3, 3)  # nothing that is known of can be copied back into this
        raise OSError("the disk is gone")

    monkeypatch.setattr(staging.Incoming, "overwrite", overwrite)
    with pytest.raises(errors.QuarantinedError, match="the disk is gone"):
        live.swap(state(2), mode="frugal")
    monkeypatch.undo()
    with pytest.raises(errors.QuarantinedError, match="no version can serve"):
        live(X)
    assert live.swap(state(3)).version == 2
    assert live(X).unique().tolist() == [3.0]
    with pytest.raises(errors.VersionGoneError):
        live.rollback()


@pytest.mark.parametrize("mode", ["available", "frugal"])
def test_an_io_error_at_any_request_leaves_what_serves(mode: Any, tmp_path: Path) -> None:
    path = tmp_path / "two.safetensors"
    ms.save(state(2), path)
    with faulty_reads() as counted:
        ms.Live(Tied()).swap(path, mode=mode)
    assert counted.requests
    for number in range(1, len(counted.requests) + 1):
        live = ms.Live(Tied())
        with faulty_reads(at=number, error=OSError(errno.EIO, "broken")):
            with pytest.raises(ms.ModelStateError):
                live.swap(path, mode=mode)
            assert live(X).unique().tolist() == [1.0]
        live.swap(path, mode=mode)
        assert live(X).unique().tolist() == [2.0]
