"""Whatever happens while a file is written, the old one stands or the new one does, and nothing else."""

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate.errors import LockedError, OptionError, TargetExistsError, UnsavableError, WriteFailedError
from modelstate.io import system
from modelstate.io.atomic import SUFFIX, atomic_file, make_directory
from tests.faults import Request, faulty_writes
from tests.lossy_disk import lossy_disk
from tests.programs import Program, run_program

OLD = b"the old file"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def put(path: Path, data: bytes, overwrite: bool = True) -> None:
    with atomic_file(str(path), overwrite=overwrite) as file:
        file.reserve(len(data))
        file.append(data)


def test_a_file_is_written(tmp_path: Path) -> None:
    for data in (b"", b"one", b"two" * 1_000_000):
        put(tmp_path / "x", data)
        assert (tmp_path / "x").read_bytes() == data
    assert names(tmp_path) == ["x"]


def test_nothing_is_at_the_path_before_the_end(tmp_path: Path) -> None:
    with atomic_file(str(tmp_path / "x"), overwrite=True) as file:
        file.append(b"half")
        (beside,) = names(tmp_path)
        assert beside.startswith(".x.")
        assert beside.endswith(SUFFIX)


def test_the_permissions_are_those_of_new_files(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        put(tmp_path / "x", b"a")
    finally:
        os.umask(old)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_what_the_block_raises_leaves_the_old_file(tmp_path: Path, kind: type[BaseException]) -> None:
    (tmp_path / "x").write_bytes(OLD)

    def interrupted() -> None:
        with atomic_file(str(tmp_path / "x"), overwrite=True) as file:
            file.append(b"half")
            raise kind

    with pytest.raises(kind):
        interrupted()
    assert (tmp_path / "x").read_bytes() == OLD
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("step", ["fallocate", "pwritev", "fchmod", "fsync", "replace", "link", "open_to_write"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_io_errors_leave_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int) -> None:
    (tmp_path / "x").write_bytes(OLD)

    def fail(*args: Any, **named: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(system, step, fail)
        with pytest.raises(WriteFailedError, match=os.strerror(number)) as caught:
            put(tmp_path / "x", b"new")
    assert caught.value.where == str(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == OLD
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize(("number", "remedy"), [(errno.EFBIG, "ulimit -f"), (errno.EMFILE, "ulimit -n")])
def test_limits_of_the_process_have_their_own_remedy(tmp_path: Path, number: int, remedy: str) -> None:
    with faulty_writes(error=OSError(number, os.strerror(number))), pytest.raises(WriteFailedError) as caught:
        put(tmp_path / "x", b"new")
    assert remedy in caught.value.remedy


def test_a_file_system_without_rights(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(OLD)
    with faulty_writes() as clean:
        put(tmp_path / "x", b"new")
    number = [request.call for request in clean.requests].index("fchmod") + 1
    with faulty_writes(at=number, error=OSError(errno.EPERM, "there are none")):
        put(tmp_path / "x", b"newer")
    assert (tmp_path / "x").read_bytes() == b"newer"


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the kernel refuses in the middle of a write."""
    (tmp_path / "x.safetensors").write_bytes(OLD)
    code = (
        "import resource, sys, torch, modelstate as ms\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    ms.save({f'w{n}': torch.ones(1 << 16) for n in range(9)}, sys.argv[1])\n"
        "except ms.errors.WriteFailedError as error:\n"
        "    print(error)\n"
    )
    done = run_program(code, tmp_path / "x.safetensors")
    assert "File too large" in done.stdout
    assert (tmp_path / "x.safetensors").read_bytes() == OLD
    assert names(tmp_path) == ["x.safetensors"]


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UnsavableError):
            put(path, b"new")
    with pytest.raises(WriteFailedError, match="create the directory first"):
        put(tmp_path / "no" / "x", b"new")
    with pytest.raises(WriteFailedError, match="in a directory"):
        put(tmp_path / "file" / "x", b"new")
    with pytest.raises(WriteFailedError, match="shorter name"):
        put(tmp_path / ("x" * 300), b"new")
    assert names(tmp_path) == ["file", "pipe"]


def test_what_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:

    def overtaken() -> None:
        with atomic_file(str(tmp_path / "x"), overwrite=False) as file:
            file.append(b"new")
            (tmp_path / "x").write_bytes(OLD)

    with pytest.raises(TargetExistsError):
        overtaken()
    assert (tmp_path / "x").read_bytes() == OLD
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.EXDEV])
def test_without_links_and_syncs_of_directories_a_rename_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fsync = system.fsync

    def fail(*args: Any, **named: Any) -> None:
        raise OSError(number, "no links here")

    def sync_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "no syncs of directories here")
        fsync(descriptor)

    monkeypatch.setattr(system, "link", fail)
    monkeypatch.setattr(system, "fsync", sync_files)
    put(tmp_path / "x", b"new", overwrite=False)
    assert (tmp_path / "x").read_bytes() == b"new"
    put(tmp_path / "x", b"newer")
    assert (tmp_path / "x").read_bytes() == b"newer"
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("broken", ["link", "replace"])
@pytest.mark.parametrize("is_there", [True, False])
def test_the_error_says_which_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, is_there: bool
) -> None:
    """Where the sync of the directory fails, on a file system without links or one that refuses another rename."""
    if is_there:
        (tmp_path / "x").write_bytes(OLD)
    sync, replace = system.fsync, system.replace

    def fail(*_: Any) -> None:
        raise OSError(errno.EPERM, "not here")

    def sync_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            monkeypatch.setattr(system, broken, fail)
            raise OSError(errno.EPERM if is_there else errno.EIO, "the disk fails")
        sync(descriptor)

    monkeypatch.setattr(system, "fsync", sync_files)
    if broken == "link":
        monkeypatch.setattr(system, "link", fail)
    with pytest.raises(WriteFailedError, match="the disk fails") as caught:
        put(tmp_path / "x", b"new")
    monkeypatch.setattr(system, "replace", replace)
    assert ("untouched" in str(caught.value)) != is_there
    assert ("the new file is at the path" in str(caught.value)) == is_there
    assert names(tmp_path) == ["x"] * is_there
    assert not is_there or (tmp_path / "x").read_bytes() == b"new"


def test_file_and_directory_are_synced_around_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = system.fsync, system.replace
    monkeypatch.setattr(system, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(system, "replace", lambda a, b: done.append("rename") or replace(a, b))
    put(tmp_path / "x", b"new")
    assert done[0].endswith(SUFFIX)
    assert done[1:] == ["rename", str(tmp_path)]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = system.pwritev
    monkeypatch.setattr(system, "pwritev", lambda fd, buffers, at: pwritev(fd, [bytes(buffers[0][:7])], at))
    with atomic_file(str(tmp_path / "x"), overwrite=True) as file:
        file.write_at(0, bytes(range(100)))
        file.write_at(50, b"")
        file.append(memoryview(b"end"))
        assert file.nbytes == 103
    assert (tmp_path / "x").read_bytes() == bytes(range(100)) + b"end"


SAVING = """
import sys, torch, modelstate as ms
path, version = sys.argv[1], 0
while True:
    version += 1
    state = {f"w{n}": torch.full((5000,), float(version)) for n in range(20)}
    ms.save({**state, "_extra_state": {"version": version, "copy": torch.tensor([version])}}, path)
    print(version, flush=True)
"""


@pytest.mark.slow
def test_a_kill_leaves_a_complete_version(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    seen = set()
    for attempt in range(2):
        process = Program(SAVING, path)
        while not process.written():
            assert not process.has_ended, process.wait()
            time.sleep(0.001)
        time.sleep(0.015 * attempt)
        process.kill()
        process.wait()
        checkpoint = ms.open(path)
        extra = checkpoint.extra["_extra_state"]
        assert len(checkpoint) == 20
        assert extra["copy"].tolist() == [extra["version"]]
        assert all(checkpoint.tensor(name).eq(extra["version"]).all() for name in checkpoint)
        seen.add(extra["version"])
    assert seen
    assert all(name == "x.safetensors" or name.endswith(SUFFIX) for name in names(tmp_path))


@pytest.mark.parametrize("name", ["é" * 127, "x" * 255, "a" + "é" * 127, "日" * 85, "\udcff" * 255, "😀" * 63])
def test_names_as_long_as_they_may_be(tmp_path: Path, name: str) -> None:
    for data in (b"one", b"two"):
        put(tmp_path / name, data)
        assert (tmp_path / name).read_bytes() == data
    assert names(tmp_path) == [name]


HOLDER = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH); print('held'); input()"


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds a shared lock on the directory until something is written to it."""
    streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], **streams) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        if process.poll() is None:
            process.communicate("end\n")


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
@pytest.mark.parametrize("shards", [None, 8])
def test_a_lock_that_is_not_given_back_is_an_error_with_its_holder(
    tmp_path: Path, holder: subprocess.Popen[str], name: str, shards: int | None
) -> None:
    if shards and name == "x.pt":
        pytest.skip("no shards in this format")
    (tmp_path / name).write_bytes(OLD)
    state = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(LockedError) as caught:
        ms.save(state, tmp_path / name, shard_size_bytes=shards, lock_timeout_seconds=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.where == str(tmp_path)
    assert f"process {holder.pid} (" in str(caught.value.found)
    assert "fcntl.flock" in str(caught.value.found)
    assert "lock_timeout_seconds=" in caught.value.remedy
    assert (tmp_path / name).read_bytes() == OLD
    assert names(tmp_path) == [name]
    with pytest.raises(OptionError, match="lock_timeout_seconds"):
        ms.save(state, tmp_path / name, lock_timeout_seconds=-1)
    holder.communicate("end\n")
    ms.save(state, tmp_path / name, shard_size_bytes=shards, lock_timeout_seconds=0)
    assert set(ms.open(tmp_path / name)) == {"a", "b"}


@contextmanager
def a_save_under_way(path: Path) -> Iterator[None]:
    """Another thread saves to the path, and has the lock of the directory."""
    inside, go_on = threading.Event(), threading.Event()

    def wait(request: Request) -> None:
        if threading.current_thread() is thread and request.call in ("replace", "link"):
            inside.set()
            go_on.wait(60)

    thread = threading.Thread(target=ms.save, args=({"a": torch.ones(2)}, path))
    with faulty_writes(before=wait):
        thread.start()
        try:
            assert inside.wait(60)
            yield
        finally:
            go_on.set()
            thread.join()


def test_a_forked_child_has_no_descriptor_of_a_save(tmp_path: Path) -> None:
    with a_save_under_way(tmp_path / "a.safetensors"):
        child = os.fork()
        if not child:
            there = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
            os._exit(any(path.startswith(str(tmp_path)) for path in there))
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(LockedError):  # the child has not released the lock of its parent
            ms.save({"b": torch.ones(2)}, tmp_path / "b.safetensors", lock_timeout_seconds=0)


def test_a_forked_child_saves_when_the_save_of_its_parent_has_ended(tmp_path: Path) -> None:
    ready, write = os.pipe()
    with a_save_under_way(tmp_path / "a.safetensors"):
        child = os.fork()
        if not child:
            code = 1
            try:
                os.write(write, b"1")
                ms.save({"b": torch.ones(2)}, tmp_path / "b.safetensors", lock_timeout_seconds=30)
                code = 0
            finally:
                os._exit(code)
        os.read(ready, 1)
    assert os.waitpid(child, 0)[1] == 0
    assert names(tmp_path) == ["a.safetensors", "b.safetensors"]
    os.close(ready)
    os.close(write)


def test_a_lock_of_another_thread_is_named_as_such(tmp_path: Path) -> None:
    with a_save_under_way(tmp_path / "a.safetensors"), pytest.raises(LockedError) as caught:
        ms.save({"b": torch.ones(2)}, tmp_path / "b.safetensors", lock_timeout_seconds=0)
    assert f"another thread of this process ({os.getpid()})" in str(caught.value.found)
    assert "end that process" not in caught.value.remedy
    assert "lock_timeout_seconds=" in caught.value.remedy


WRITES: dict[str, Any] = {
    "file": lambda path: ms.save({"a": torch.ones(2), "b": torch.ones(2)}, path),
    "shards": lambda path: ms.save({"a": torch.ones(2), "b": torch.ones(2)}, path, shard_size_bytes=8),
    "torch": lambda path: ms.save({"a": torch.ones(2)}, path, format="torch"),
    "streamed torch": lambda path: ms.save(ms.open({"a": torch.ones(2)}), path, format="torch"),
    "other": lambda path: put(path, b"new"),
}


@pytest.mark.slow_except(12)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
@pytest.mark.parametrize("kind", ["file", "index", "link"])
def test_nothing_is_ever_more_readable_than_what_it_replaces(tmp_path: Path, write: Any, mode: int, kind: str) -> None:
    path = tmp_path / "d" / "x"
    path.parent.mkdir()
    if kind == "index":
        if write is WRITES["other"]:
            pytest.skip("no index there")
        WRITES["shards"](path)
        for file in path.parent.iterdir():
            file.chmod(mode)
    else:
        there = tmp_path / "elsewhere" if kind == "link" else path
        there.write_bytes(OLD)
        there.chmod(mode)
        if kind == "link":
            path.symlink_to(there)
    seen: set[int] = set()

    def look(_: Request) -> None:
        found = [file.lstat().st_mode for file in path.parent.iterdir()]
        seen.update(stat.S_IMODE(bits) for bits in found if stat.S_ISREG(bits))

    old = os.umask(0o022)
    try:
        with faulty_writes(before=look):
            write(path)
    finally:
        os.umask(old)
    after = {stat.S_IMODE(file.lstat().st_mode) for file in path.parent.iterdir()}
    assert after == {mode}
    assert seen
    assert [oct(bits) for bits in seen if bits & ~mode] == []


def test_a_step_that_is_saved_again_stays_private(tmp_path: Path) -> None:
    with ms.Store(tmp_path / "run") as store:
        store.save(1, {"model": torch.nn.Linear(2, 2)})
        (tmp_path / "run" / "step-000000001").chmod(0o700)
        store.save(1, {"model": torch.nn.Linear(2, 2)}, overwrite=True)
    assert stat.S_IMODE((tmp_path / "run" / "step-000000001.1").stat().st_mode) == 0o700


def test_a_directory_is_made_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    with lossy_disk(tmp_path / "disk") as disk:
        for _ in range(2):
            make_directory(str(tmp_path / "disk" / "a" / "b"))
        monkeypatch.chdir(tmp_path / "disk")
        make_directory("c/d")
        (tmp_path / "disk" / "file").touch()
        for path in ("file", "file/e"):
            with pytest.raises(OSError, match="file"):
                make_directory(path)
    disk.write(tmp_path / "after", len(disk.calls), "synced")
    assert sorted(str(path.relative_to(tmp_path / "after")) for path in (tmp_path / "after").rglob("*")) == [
        "a",
        "a/b",
        "c",
        "c/d",
    ]
