"""What a store refuses: each with its own error, and nothing has been changed."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.formats import manifest
from modelstate.formats.manifest import OPEN_SEAL, sealed
from modelstate.io import lock
from tests.commands import run_command
from tests.store.common import Held, Training, contents, flip, litter, network, state


def resealed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edits a record as a program would that knows how it is sealed."""
    said = json.loads(path.read_text())
    change(said)
    said["modelstate_seal"] = OPEN_SEAL
    path.write_bytes(sealed(json.dumps(said).encode()))


@pytest.mark.parametrize("directory", [7, None, b"run", "", "a\0b", "https://example.com/run", ["run"]], ids=repr)
def test_what_is_no_directory(directory: Any) -> None:
    with pytest.raises(errors.UnsavableError):
        ms.Store(directory)


@pytest.mark.parametrize("url", ["s3://", "gs://", "az://", "s3:///"])
def test_a_url_without_a_bucket_is_shown_as_it_was_given(url: str) -> None:
    with pytest.raises(errors.UnsavableError, match="a directory cannot be put here") as raised:
        ms.Store(url)
    assert raised.value.where == url


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(errors.UnsavableError):
        ms.Store(tmp_path / "run")
    inside = ms.Store(tmp_path / "run" / "below")
    with pytest.raises(errors.WriteFailedError):
        inside.save(1, {"value": 1})
    (tmp_path / "run").unlink()
    later = ms.Store(tmp_path / "run")
    (tmp_path / "run").write_text("mine")
    with pytest.raises(errors.WriteFailedError):
        later.save(1, {"value": 1})
    with pytest.raises(errors.ReadFailedError):
        later.steps()
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_directory_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store = ms.Store(tmp_path)
    store.save(1, {"value": 1})
    store.close()
    was, real = contents(tmp_path), os.open

    def refused(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, *more, **options)

    monkeypatch.setattr(lock.os, "open", refused)
    with pytest.raises(errors.WriteFailedError):
        store.save(2, {"value": 2})
    assert store.restore({"value": None})["value"] == 1  # for reading it is enough
    monkeypatch.undo()
    assert contents(tmp_path) == was
    store.save(2, {"value": 2})


NAMES = ["", ".", "..", "a.b", "a/b", "/a", "a\\b", "a\n", "a\0", "\ud800", "x" * 201, "ä" * 101, 7, None, ("a",)]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_cannot_be(tmp_path: Path, name: Any) -> None:
    store = ms.Store(tmp_path / "run")
    for objects in ({name: 1}, {"above": {name: nn.Linear(1, 1)}}):
        with pytest.raises(errors.OptionError):
            store.save(1, objects)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["x" * 200, "ä ö", "model-0", "checkpoint", "pinned", "store", "value", "-", "*?"])
def test_names_that_can_be(tmp_path: Path, name: str) -> None:
    store = ms.Store(tmp_path)
    store.save(1, {name: state(1.0), "model": state(2.0)}, pin=True)
    found = store.restore({name: None, "model": None})
    assert float(found[name]["weight"][0]) == 1.0
    assert store.verify() == {1: ""}


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None, 10**18, "latest"], ids=repr)
def test_steps_that_cannot_be(tmp_path: Path, step: Any) -> None:
    store = ms.Store(tmp_path / "run")
    with pytest.raises(errors.OptionError):
        store.save(step, {"value": 1})
    assert not (tmp_path / "run").exists()
    store.save(1, {"value": 1})
    if step not in (-1, 10**18):
        with pytest.raises(errors.OptionError):
            store.pin(step)
    if step not in (-1, 10**18, "latest"):
        with pytest.raises(errors.OptionError):
            store.restore({"value": None}, step)


@pytest.mark.parametrize(
    "options",
    [
        {"metrics": {"loss": "low"}},
        {"metrics": {"loss": torch.tensor(1.0)}},
        {"metrics": {1: 1.0}},
        {"metrics": [1.0]},
        {"metrics": {"loss": 10**400}},
        {"when_busy": "never"},
    ],
    ids=repr,
)
def test_options_that_mean_nothing(tmp_path: Path, options: Any) -> None:
    with pytest.raises(errors.OptionError):
        ms.Store(tmp_path / "run").save(1, {"value": 1}, **options)
    for wrong in ({"keep": 0}, {"keep": "all"}, {"shard_size_bytes": 0}, {"shard_size_bytes": 1.5}):
        with pytest.raises(errors.OptionError):
            ms.Store(tmp_path / "run", **wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_stored(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    store.save(1, {"value": 1})
    was = contents(tmp_path)
    loop: list[Any] = []
    loop.append(loop)
    for value, kind in (
        (object(), errors.CodecError),
        ({"f": lambda: 1}, errors.CodecError),
        (loop, errors.CodecError),
        (torch.ones(2, device="meta"), errors.UnsavableError),
        ({"t": torch.eye(2).to_sparse()}, errors.UnsavableError),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, errors.UnsavableError),
        ([nn.Linear(1, 1)], errors.OptionError),
    ):
        for background in (True, False):
            with pytest.raises(kind):
                store.save(2, {"value": value}, background=background)  # type: ignore[call-overload]
    with pytest.raises(errors.OptimizerStateError):
        store.save(2, {"optimizer": Training().optimizer})
    assert contents(tmp_path) == was


@pytest.mark.slow
def test_a_value_that_nobody_would_read_again(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    store.save(1, {"value": 1})
    was = contents(tmp_path)
    with pytest.raises(errors.UnsavableError):
        store.save(2, {"held": Held(text="x" * 65_000_000)})
    with pytest.raises(errors.UnsavableError):
        store.save(2, {"held": Held(text="x" * 65_000_000, tensor=torch.ones(1))})
    with pytest.raises(errors.UnsavableError):
        store.save(2, {str(number): "x" * 22_000_000 for number in range(3)})
    assert contents(tmp_path) == was


@pytest.mark.parametrize(("call", "limit"), [("save", "manifest"), ("check", "manifest"), ("save", "index")])
def test_more_digests_than_a_reader_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, limit: str
) -> None:
    monkeypatch.setattr(manifest, "MAX_BYTES" if limit == "manifest" else "MAX_INDEX_BYTES", 2000)
    objects = {"model": nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(60)])}
    store = ms.Store(tmp_path)
    with pytest.raises(errors.UnsavableError, match="as several objects"):
        store.save(1, objects) if call == "save" else store.check(objects)
    assert store.steps() == ()


def edit(path: Path) -> None:
    record = path / "checkpoint.json"
    record.write_text(record.read_text().replace('"step": 2', '"step":  2'))


def edit_index(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("total_size", "total_sizE"))


def updated(**fields: object) -> Callable[[Path], object]:
    return lambda path: resealed(path / "checkpoint.json", lambda said: said.update(fields))


EDITS: dict[str, tuple[Callable[[Path], object], type[errors.ModelStateError]]] = {
    "edited by hand": (edit, errors.DamagedCheckpointError),
    "an index edited by hand": (edit_index, errors.DamagedCheckpointError),
    "a newer format": (updated(format=2), errors.NewerManifestError),
    "a newer format that has no seal": (
        lambda path: (path / "checkpoint.json").write_text('{"format": 2}'),
        errors.NewerManifestError,
    ),
    **{f"saved at {time}": (updated(time=time), errors.DamagedCheckpointError) for time in ("nan", 1e18)},
    "a head that is longer than its file": (
        lambda path: resealed(
            path / "checkpoint.json",
            lambda said: next(iter(said["entries"]["model"]["files"].values())).__setitem__(2, 10**12),
        ),
        errors.DamagedCheckpointError,
    ),
    "an index elsewhere": (
        lambda path: resealed(
            path / "checkpoint.json", lambda said: said["entries"]["model"].update(index="/etc/passwd")
        ),
        errors.DamagedCheckpointError,
    ),
    "another store": (updated(store="theirs"), errors.DamagedCheckpointError),
    "another step": (updated(step=3), errors.DamagedCheckpointError),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", EDITS)
def test_a_manifest_that_is_not_what_was_written(tmp_path: Path, how: str) -> None:
    change, kind = EDITS[how]
    store, training = ms.Store(tmp_path), Training()
    store.save(0, training.train().objects)
    store.save(1, training.train().objects)
    change(Path(store.save(2, training.train().objects).path))
    was, bits = contents(tmp_path), training.bits()
    is_foreign = how in ("another store", "another step")
    for call in (lambda: store.restore(training.objects, step=2), lambda: store.open("model", step=2)):
        with pytest.raises(kind) as caught:
            call()
        assert ("from another store, or under another step" in caught.value.what) is is_foreign
    assert training.bits() == bits
    assert store.verify(2)[2]
    with pytest.warns(errors.DamagedCheckpointWarning):
        assert store.restore(training.objects).step == 1
    assert (store.steps(), store.latest()) == ((0, 1), 1)
    assert contents(tmp_path) == was
    if kind is errors.DamagedCheckpointError and not is_foreign:
        store.save(2, training.objects)
        assert store.steps() == (0, 1, 2)
    else:  # it is of another store or a newer version: it is not removed
        for overwrite in (False, True):
            with pytest.raises(errors.TargetExistsError, match="take it away"):
                store.save(2, training.objects, overwrite=overwrite)
        store.prune(1)
        assert store.steps() == (1,)
        assert (tmp_path / "step-000000002").exists()


def test_a_checkpoint_copied_from_another_store(tmp_path: Path) -> None:
    ours, theirs, model = ms.Store(tmp_path / "ours"), ms.Store(tmp_path / "theirs"), network()
    ours.save(1, {"model": model})
    other = Path(theirs.save(5, {"model": network(1)}).path)
    copied = Path(shutil.copytree(other, tmp_path / "ours" / other.name))
    with pytest.raises(errors.DamagedCheckpointError):
        ours.restore({"model": model}, step=5)
    with pytest.warns(errors.DamagedCheckpointWarning):
        assert ours.restore({"model": model}).step == 1
    assert ours.save(6, {"model": model}).linked_bytes  # to step 1, not to theirs
    revision = shutil.copytree(other, tmp_path / "ours" / "step-000000001.7")  # beside one of ours
    assert ours.prune(1) == (1,)
    assert ours.steps() == (6,)
    for theirs_too in (copied, revision):
        ms.load(model, theirs_too)


def test_a_store_that_is_copied_or_moved_stays_whole(tmp_path: Path) -> None:
    store, model = ms.Store(tmp_path / "one"), network()
    for step in (1, 2):
        store.save(step, {"model": model})
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    copy = ms.Store(tmp_path / "two")
    assert copy.verify() == {1: "", 2: ""}
    copy.save(3, {"model": model})
    assert copy.verify() == {1: "", 2: "", 3: ""}
    # Copying the lock file has lost us the lock, and it is taken anew.
    store.save(3, {"model": model})


CONTENTS = (b"{}", b"[]", b'"x"', b"3", b"null", b'{"store": 3}', b"[" * 5000)


@pytest.mark.parametrize("harm", [Path.unlink, flip, *(methodcaller("write_bytes", content) for content in CONTENTS)])
def test_the_name_of_a_store_is_known_from_its_checkpoints(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    with ms.Store(tmp_path) as store:
        for step in (1, 2):
            store.save(step, {"value": step})
    was = (tmp_path / "store.json").read_bytes()
    harm(tmp_path / "store.json")
    assert store.steps() == (1, 2)
    assert store.restore({"value": None})["value"] == 2
    problems = store.verify()
    assert ("damaged" in problems.pop("store.json", "")) == (harm is not Path.unlink)
    assert problems == {1: "", 2: ""}
    done = run_command("store", "verify", tmp_path)
    assert done.exit_code == (harm is not Path.unlink)
    assert done.stdout.startswith("store.json: ") == (harm is not Path.unlink)
    store.save(3, {"value": 3})
    assert (tmp_path / "store.json").read_bytes() == was
    assert store.verify() == {1: "", 2: "", 3: ""}


def test_a_store_of_a_newer_version_is_not_written_to(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    store.save(1, {"value": 1})
    resealed(tmp_path / "store.json", lambda said: said.update(format=2))
    shutil.copytree(tmp_path / "step-000000001", tmp_path / ".step-000000002.0123456789ab.unfinished")
    store.close()
    was = contents(tmp_path)
    actions = (lambda: store.save(2, {"value": 2}), lambda: store.prune(1), lambda: store.pin(1))
    for action in (*actions, *actions):
        with pytest.raises(errors.NewerManifestError):
            action()
        writer = lock.WriterLock(str(tmp_path))
        writer.acquire()  # which has been given back
        writer.release()
    assert store.restore({"value": None})["value"] == 1
    assert contents(tmp_path) == was


def test_objects_that_lack_or_have_more(tmp_path: Path) -> None:
    store, training = ms.Store(tmp_path), Training().train()
    store.save(1, {**training.objects, "step": 1})
    bits = training.train().bits()
    for objects, kind, says in (
        (training.objects, errors.ObjectStateError, "allow_unexpected=['step']"),
        ({**training.objects, "step": None, "ema": network()}, errors.ObjectStateError, "allow_missing=['ema']"),
        ({**training.objects, "step": network()}, errors.ObjectStateError, "step (module)"),
        ({"optimizer": training.optimizer, "step": None}, errors.ObjectStateError, "allow_unexpected=['model']"),
        ({"model": nn.Linear(3, 3), "optimizer": None, "step": None}, errors.ObjectStateError, "optimizer (value)"),
    ):
        with pytest.raises(kind) as caught:
            store.restore(objects)
        assert says in str(caught.value)
    assert training.bits() == bits
    assert store.steps() == (1,)


def test_two_stores_in_one_directory(tmp_path: Path) -> None:
    first, second = ms.Store(tmp_path), ms.Store(tmp_path)
    first.save(1, {"value": 1})
    was = contents(tmp_path)
    for refused in (
        lambda: second.save(2, {"value": 2}),
        lambda: second.save(2, {"value": 2}, background=True),
        lambda: second.prune(1),
        lambda: second.pin(1),
    ):
        with pytest.raises(errors.LockedError):
            refused()
    assert contents(tmp_path) == was
    assert second.restore({"value": None})["value"] == 1
    first.close()
    second.save(2, {"value": 2})
    with pytest.raises(errors.LockedError):
        first.save(3, {"value": 3})
    assert first.steps() == (1, 2)


@pytest.mark.parametrize("kind", ["file", "link to nothing", "link to itself", "empty directory"])
def test_what_has_the_name_of_a_step_and_is_none(tmp_path: Path, kind: str) -> None:
    with ms.Store(tmp_path) as store:
        store.save(1, {"value": 1})
    path = tmp_path / "step-000000002"
    if kind == "file":
        path.write_text("a note")
    elif kind == "empty directory":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "link to itself" else tmp_path / "unmounted" / path.name)
    store = ms.Store(tmp_path, keep=1)
    assert (store.steps(), store.latest()) == ((1,), 1)
    assert [(info.step, info.intact) for info in store.infos()] == [(1, True), (2, False)]
    assert "checkpoint.json" in store.verify()[2]
    with pytest.raises(errors.DamagedCheckpointError):
        store.restore({"value": None}, 2)
    with pytest.warns(errors.DamagedCheckpointWarning):
        assert store.restore({"value": None})["value"] == 1
    assert store.save(2, {"value": 2}).pruned == (1,)
    assert store.verify() == {2: ""}
    assert store.restore({"value": None})["value"] == 2
    assert not litter(tmp_path)


@pytest.mark.parametrize("step", ["latest", 3])
def test_a_path_at_which_no_store_is(step: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, found in (("lost", "no such directory"), ("empty", "a store without checkpoints")):
        with pytest.raises(errors.StepNotFoundError, match="check the path of the store") as raised:
            ms.Store(tmp_path / name).restore({"value": None}, step)
        assert found in raised.value.found
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
