"""Data loaders in a resumable loop that a resumed run would not iterate in the same way."""

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import modelstate as ms
from modelstate.errors import ResumeWarning

DATA = list(range(8))
ITERS = DataLoader.__iter__, StatefulDataLoader.__iter__


@pytest.fixture(autouse=True)
def classes_are_left_as_they_were() -> Iterator[None]:
    yield
    assert (DataLoader.__iter__, StatefulDataLoader.__iter__) == ITERS


def persistent(kind: Any = DataLoader, **options: Any) -> Any:
    return kind(DATA, batch_size=2, num_workers=1, persistent_workers=True, multiprocessing_context="fork", **options)


def epochs(path: Path, loader: Any, objects: dict[str, Any] | None = None, batches: int | None = None) -> list[str]:
    """Iterates a loader in each of two steps, and returns the warnings, each with its file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in ms.resumable(path, {"rng": ms.RNG(), **(objects or {})}, steps=2, save_every=1):
            for _ in itertools.islice(loader, batches):
                pass
    found = [one for one in caught if issubclass(one.category, ResumeWarning)]
    assert all(one.filename == __file__ for one in found)
    return [str(one.message) for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_persistent_workers_that_start_in_a_step_are_a_warning(tmp_path: Path, kind: Any) -> None:
    (message,) = epochs(tmp_path, persistent(kind))
    assert "persistent_workers=True" in message
    assert "StatefulDataLoader" in message


@pytest.mark.slow
def test_an_object_that_holds_the_loader_saves_its_state(tmp_path: Path) -> None:
    class Holder:
        def __init__(self) -> None:
            self.loader = persistent(StatefulDataLoader)

        def state_dict(self) -> Any:
            return self.loader.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.loader.load_state_dict(state)

    holder = Holder()
    assert epochs(tmp_path, holder.loader, {"holder": holder}) == []


@pytest.mark.slow
def test_persistent_workers_outside_a_loop_are_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumeWarning)
        assert len(list(persistent())) == 4
        for _ in ms.resumable(tmp_path, {"rng": ms.RNG()}, steps=2, save_every=1):
            break
        assert len(list(persistent())) == 4


def test_a_loader_among_the_objects_that_is_left_and_begun_anew_is_a_warning(tmp_path: Path) -> None:
    loader: Any = StatefulDataLoader(DATA, batch_size=2)  # type: ignore[arg-type]
    (message,) = epochs(tmp_path / "left", loader, {"loader": loader}, batches=2)
    assert "in the middle of the data" in message
    assert "out of the objects" in message
    whole: Any = StatefulDataLoader(DATA, batch_size=2)  # type: ignore[arg-type]
    assert epochs(tmp_path / "whole", whole, {"loader": whole}) == []
    assert epochs(tmp_path / "outside", StatefulDataLoader(DATA, batch_size=2), batches=2) == []  # type: ignore[arg-type]


def test_a_loader_that_is_iterated_over_several_steps_is_no_warning(tmp_path: Path) -> None:
    loader: Any = StatefulDataLoader(DATA, batch_size=2)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumeWarning)
        batches = iter(loader)
        for _ in ms.resumable(tmp_path / "next", {"loader": loader}, steps=4, save_every=1):
            next(batches)
        steps = ms.resumable(tmp_path / "zip", {"loader": loader}, steps=4, save_every=1)
        for batch, step in zip(loader, steps, strict=False):
            assert batch.tolist() == [2 * step, 2 * step + 1]


def test_a_resumed_run_does_what_the_warning_says(tmp_path: Path) -> None:
    """A loader that is left in the middle goes on there, and not at the beginning, where a run is resumed."""

    def run(steps: int) -> list[list[int]]:
        torch.manual_seed(0)
        loader: Any = StatefulDataLoader(DATA, batch_size=2)  # type: ignore[arg-type]
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResumeWarning)
            for _ in ms.resumable(tmp_path, {"loader": loader}, steps=steps, save_every=1):
                found += [batch.tolist() for batch in itertools.islice(loader, 2)]
        return found

    assert run(2) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert run(3) == [[4, 5], [6, 7]]
