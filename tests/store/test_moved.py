"""A store's directory that is renamed, removed or replaced while somebody saves to it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import modelstate as ms
from modelstate.errors import SaveFailedWarning, StoreMovedError
from modelstate.io import system
from tests.store.common import Training, contents, program


def rename(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def rename_above(directory: Path) -> None:
    directory.parent.rename(directory.parent.with_name("above elsewhere"))


def remake(directory: Path) -> None:
    rename(directory)
    directory.mkdir()


def remake_in_its_inode(directory: Path) -> None:
    """Which file systems give away again as soon as it is free."""
    shutil.rmtree(directory)
    directory.mkdir()


def replace(directory: Path) -> None:
    rename(directory)
    with ms.Store(directory) as other:
        other.save(7, {"model": Training(1).model})


def become_a_file(directory: Path) -> None:
    rename(directory)
    directory.write_text("a file")


GONE: list[Callable[[Path], None]] = [rename, rename_above, shutil.rmtree]
REPLACED: list[Callable[[Path], None]] = [remake, remake_in_its_inode, replace]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "above" / "run"


@pytest.mark.slow_except(4)
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("change", [*GONE, *REPLACED, become_a_file])
def test_the_next_save_says_so_and_writes_nothing(
    directory: Path, change: Callable[[Path], None], background: bool
) -> None:
    training, store = Training(), ms.Store(directory)
    store.save(1, training.objects)
    change(directory)
    was = contents(directory.parent) if directory.parent.exists() else None
    for _ in range(2):
        with pytest.raises(StoreMovedError) as caught:
            store.save(2, training.train().objects, background=background)  # type: ignore[call-overload]
        assert caught.value.where == str(directory)
        assert caught.value.found == ("nothing is there" if change in GONE else "something else is there")
        assert "Store" in caught.value.remedy
    with pytest.raises(StoreMovedError):
        store.prune(1)
    assert (contents(directory.parent) if directory.parent.exists() else None) == was
    assert not (directory / ".lock").exists() or change is replace


@pytest.mark.slow
@pytest.mark.parametrize(("change", "background"), [(rename, True), (remake, False), (replace, True)])
def test_a_directory_that_is_back_is_saved_to_again(
    directory: Path, change: Callable[[Path], None], background: bool
) -> None:
    training, store = Training(), ms.Store(directory)
    store.save(1, training.objects)
    change(directory)
    with pytest.raises(StoreMovedError):
        store.save(2, training.objects)
    shutil.rmtree(directory, ignore_errors=True)
    directory.with_name("elsewhere").rename(directory)
    store.save(2, training.objects, background=background)  # type: ignore[call-overload]
    store.wait()
    assert store.verify() == {1: "", 2: ""}
    script = "import sys, modelstate as ms; ms.Store(sys.argv[1]).save(3, {'value': 1})"
    assert "LockedError" in program(script, directory).stderr  # it has been this one's all the time


@pytest.mark.parametrize("change", [rename, remake])
@pytest.mark.parametrize("call", ["mkdir", "pwritev", "replace"])
def test_a_save_that_is_under_way(
    directory: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], call: str
) -> None:
    training, store = Training(), ms.Store(directory)
    store.save(1, training.objects)
    real = getattr(system, call)

    def changing(*given: object) -> object:
        monkeypatch.setattr(system, call, real)
        change(directory)
        return real(*given)

    monkeypatch.setattr(system, call, changing)
    store.save(2, training.train().objects, background=True)
    with pytest.raises(StoreMovedError):
        store.wait()
    assert not [path for path in directory.rglob("*") if "step" in path.name]
    shutil.rmtree(directory, ignore_errors=True)
    directory.with_name("elsewhere").rename(directory)
    assert store.steps() == (1,)
    store.save(3, training.objects)
    assert store.verify() == {1: "", 3: ""}


def test_a_thread_looks_before_it_writes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, store = Training(), ms.Store(directory)
    store.save(1, training.objects)
    copy = store._staging.copy

    def copying(drafts: object) -> None:
        copy(drafts)  # type: ignore[arg-type]
        remake(directory)

    monkeypatch.setattr(store._staging, "copy", copying)
    pending = store.save(2, training.objects, background=True)
    assert pending is not None
    with pytest.raises(StoreMovedError):
        pending.result()
    assert os.listdir(directory) == []


@pytest.mark.parametrize("change", [*GONE, remake, replace])
def test_a_store_that_was_restored_from_is_not_made_anew(directory: Path, change: Callable[[Path], None]) -> None:
    training = Training()
    with ms.Store(directory) as first:
        first.save(1, training.objects)
    store = ms.Store(directory)
    store.restore(training.objects)
    change(directory)
    was = contents(directory) if directory.exists() else None
    with pytest.raises(StoreMovedError):
        store.save(2, training.objects)
    assert (contents(directory) if directory.exists() else None) == was


def test_one_that_nothing_was_done_with_is_made(directory: Path) -> None:
    store = ms.Store(directory)
    assert store.steps() == ()
    store.save(1, {"value": 1})
    store.close()
    shutil.rmtree(directory)
    store.save(2, {"value": 1})  # closed: the store is nobody's
    assert store.steps() == (2,)


def run(loop: ms.store.Resumable, store: ms.Store, at: dict[int, Callable[[], object]]) -> None:
    for step in loop:
        if step in at:
            store.wait()
            at[step]()


def test_a_loop_goes_on_and_its_last_save_raises(directory: Path) -> None:
    training, store = Training(), ms.Store(directory)
    loop = ms.resumable(store, training.objects, steps=6, save_every=1)
    with pytest.warns(SaveFailedWarning, match="renamed, removed or replaced"), pytest.raises(StoreMovedError):
        run(loop, store, {2: lambda: rename(directory)})
    assert loop.done == 6
    assert not directory.exists()


def test_a_loop_saves_again_when_the_directory_is_back(directory: Path) -> None:
    training, store = Training(), ms.Store(directory)
    loop = ms.resumable(store, training.objects, steps=6, save_every=1)
    with pytest.warns(SaveFailedWarning, match="renamed, removed or replaced"):
        run(loop, store, {2: lambda: rename(directory), 4: lambda: directory.with_name("elsewhere").rename(directory)})
    assert store.steps() == (1, 2, 5, 6)
    assert set(store.verify().values()) == {""}
