"""A store's directory that is renamed, removed or replaced while somebody saves to it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import modelstate as ms
from modelstate.errors import SaveFailedWarning, StoreMovedError
from tests.faults import Request, faulty_writes
from tests.store.common import Training, contents


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


@pytest.mark.parametrize("change", [rename, remake])
@pytest.mark.parametrize("call", ["mkdir", "pwritev", "replace"])
def test_a_save_that_is_under_way(directory: Path, change: Callable[[Path], None], call: str) -> None:
    training, store, changes = Training(), ms.Store(directory), [change]
    store.save(1, training.objects)

    def before(request: Request) -> None:
        if request.call == call and changes:
            changes.pop()(directory)

    with faulty_writes(before=before):
        store.save(2, training.train().objects, background=True)
        with pytest.raises(StoreMovedError):
            store.wait()
    assert not [path for path in directory.rglob("*") if "step" in path.name]
    shutil.rmtree(directory, ignore_errors=True)
    directory.with_name("elsewhere").rename(directory)
    assert store.steps() == (1,)
    store.save(3, training.objects)
    assert store.verify() == {1: "", 3: ""}


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
