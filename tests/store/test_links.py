"""Files that have not changed are linked: no less durable, no less complete, and never where there is a doubt."""

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.faults import failing
from tests.store.common import cut, flip, litter


class Adapted(nn.Module):
    """A frozen base with a small part that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(200, 200).requires_grad_(False)
        self.adapter = nn.Linear(4, 4)

    def step(self) -> None:
        with torch.no_grad():
            for param in self.adapter.parameters():
                param += 1


def weights(path: str) -> dict[str, os.stat_result]:
    return {file.name: file.stat() for file in Path(path).glob("*.safetensors")}


def same(store: ms.Store, model: Adapted, step: int, optimizer: bool = False) -> bool:
    fresh = Adapted()
    store.restore({"model": fresh}, step=step, allow_unexpected=["optimizer"] if optimizer else [])
    return all(map(torch.equal, fresh.state_dict().values(), model.state_dict().values()))


def test_frozen_weights_are_written_once(tmp_path: Path) -> None:
    store, model = ms.Store(tmp_path, keep=2), Adapted()
    first = store.save(0, {"model": model})
    for step in range(1, 5):
        model.step()
        saved = store.save(step, {"model": model})
        assert saved.linked_bytes > 160_000
        assert saved.written_bytes < 3_000
        assert same(store, model, step)
    assert first.written_bytes > 160_000
    # Complete, and independent of those that are gone.
    assert store.steps() == (3, 4)
    assert max(one.st_nlink for one in weights(saved.path).values()) == 2
    assert store.prune(1) == (3,)
    assert store.verify() == {4: ""}
    assert [one.st_nlink for one in weights(saved.path).values()] == [1, 1]
    assert same(store, model, 4)


def test_weights_that_turn_out_to_be_steady(tmp_path: Path) -> None:
    """Nobody says that they are: the second save finds it, the third one has them in a file of their own."""
    store, model = ms.Store(tmp_path), Adapted()
    model.base.requires_grad_(True)
    written = []
    for step in range(4):
        model.step()
        written.append(store.save(step, {"model": model}).written_bytes)
    assert [nbytes > 160_000 for nbytes in written] == [True, True, False, False]
    assert store.verify() == dict.fromkeys(range(4), "")


def test_a_weight_that_is_frozen_no_more(tmp_path: Path) -> None:
    store, model = ms.Store(tmp_path), Adapted()
    store.save(0, {"model": model})
    with torch.no_grad():
        model.base.bias += 1
    saved = store.save(1, {"model": model})
    assert saved.linked_bytes < 1000
    assert same(store, model, 1)
    model.base = nn.Linear(200, 200, dtype=torch.float64)
    store.save(2, {"model": model})
    assert store.open("model").tensor("base.weight").dtype == torch.float64
    assert store.verify() == {0: "", 1: "", 2: ""}


def test_the_same_bytes_under_other_names_or_shapes_are_not_taken(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    values = torch.arange(12.0)
    for step, state in enumerate(
        [{"a": values}, {"b": values}, {"b": values.view(3, 4)}, {"b": values.view(torch.int32)}]
    ):
        assert store.save(step, {"state": state}).linked_bytes == 0
        found = store.restore({"state": None})["state"]
        assert found.keys() == state.keys()
        assert all(found[key].dtype == state[key].dtype and torch.equal(found[key], state[key]) for key in state)


def touched(path: Path) -> None:
    os.utime(path)


def replaced_by_a_link(path: Path) -> None:
    aside = path.with_suffix(".aside")
    path.rename(aside)
    path.symlink_to(aside)


@pytest.mark.parametrize("harm", [touched, cut, Path.unlink, replaced_by_a_link, flip], ids=lambda harm: harm.__name__)
def test_what_somebody_has_touched_is_not_linked(tmp_path: Path, harm: object) -> None:
    store, model = ms.Store(tmp_path), Adapted()
    saved = store.save(0, {"model": model})
    for path in Path(saved.path).glob("model-*.safetensors"):
        harm(path)  # type: ignore[operator]
    assert harm is not flip or "damaged" in store.verify()[0]
    model.step()
    assert store.save(1, {"model": model}).linked_bytes == 0
    assert store.verify(1) == {1: ""}
    assert same(store, model, 1)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EXDEV])
def test_a_file_system_without_links(tmp_path: Path, code: int) -> None:
    store, model = ms.Store(tmp_path), Adapted()
    store.save(0, {"model": model})
    model.step()
    with failing(OSError(code, os.strerror(code)), "link"):
        saved = store.save(1, {"model": model})
    assert (saved.linked_bytes, saved.written_bytes > 160_000) == (0, True)
    assert store.verify() == {0: "", 1: ""}
    assert same(store, model, 1)
    assert not litter(tmp_path)
