"""The lock of a writer, between processes, within one, across forks and deaths, and where there are no locks."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from modelstate.errors import LockedError, WriteFailedError
from modelstate.io.lock import LOCK_FILE, WriterLock
from tests.io.test_forks import in_child

HOLD = """
import sys
from modelstate.io.lock import WriterLock
lock = WriterLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""
TRY = """
import sys
from modelstate.errors import ModelStateError
from modelstate.io.lock import WriterLock
try:
    WriterLock(sys.argv[1]).acquire()
    print("acquired")
except ModelStateError as error:
    print(type(error).__name__, error.found)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


class Holder:
    """Another process, which has the lock until it is told or killed."""

    def __init__(self, directory: Path, code: str = HOLD) -> None:
        command = [sys.executable, "-c", code, str(directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.line = self.process.stdout.readline() if self.process.stdout else ""

    def end(self) -> None:
        self.process.communicate(timeout=60)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def holder(directory: Path) -> Iterator[Holder]:
    made = Holder(directory)
    assert made.line == "held\n"
    yield made
    made.kill()


def another_process(directory: Path) -> str:
    """What another process gets."""
    done = subprocess.run([sys.executable, "-c", TRY, str(directory)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@contextmanager
def locked(directory: Path) -> Iterator[WriterLock]:
    lock = WriterLock(directory)
    lock.acquire()
    try:
        yield lock
    finally:
        lock.release()


def test_the_second_writer_is_told_who_the_first_is(directory: Path, holder: Holder) -> None:
    with pytest.raises(LockedError) as caught:
        WriterLock(directory).acquire()
    host = re.escape(os.uname().nodename)
    when = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d"
    assert re.fullmatch(rf"process {holder.process.pid} on {host}, {when}", caught.value.found)
    assert str(directory) in str(caught.value)
    assert another_process(directory).startswith(f"LockedError process {holder.process.pid} ")
    holder.end()
    with locked(directory) as mine:
        assert mine.held


def test_the_lock_of_a_killed_process_is_taken_over(directory: Path, holder: Holder) -> None:
    holder.kill()
    assert json.loads((directory / LOCK_FILE).read_text())["pid"] == holder.process.pid
    with locked(directory):
        assert another_process(directory).startswith(f"LockedError process {os.getpid()} ")


def test_what_the_file_says(directory: Path) -> None:
    with locked(directory):
        line = subprocess.run(["cat", directory / LOCK_FILE], capture_output=True, text=True, check=True).stdout
        assert line.endswith("}\n")
        assert json.loads(line).keys() == {"pid", "host", "since"}
    assert (directory / LOCK_FILE).read_bytes() == b""


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"nonsense\x00\xff",
        b"[" * 5000,
        b'{"pid": "\\u001b[31m", "host": "\\n", "since": 1e300}',
        b'{"pid": 1, "host": "h", "since": NaN}',
    ],
)
def test_a_file_that_says_nothing_useful(directory: Path, holder: Holder, text: bytes) -> None:
    (directory / LOCK_FILE).write_bytes(text)
    with pytest.raises(LockedError) as caught:
        WriterLock(directory).acquire()
    assert caught.value.found.isprintable()
    assert (
        "does not name the process that has locked it" in caught.value.found
        or "since a time that cannot be read" in caught.value.found
    )


def test_a_process_has_one_writer(directory: Path) -> None:
    first, second = WriterLock(directory), WriterLock(directory / ".." / directory.name)
    first.acquire()
    for lock_again in (first, second):
        with pytest.raises(LockedError, match=rf"this process \({os.getpid()}\), since ") as caught:
            lock_again.acquire()
        assert "close the other Store of this process" in caught.value.remedy
    assert not second.held
    second.release()
    assert another_process(directory).startswith("LockedError")
    first.release()
    first.release()
    assert not first.held
    second.acquire()
    assert second.held
    second.release()
    assert another_process(directory) == "acquired"


@pytest.mark.slow
def test_a_forked_child_does_not_have_it(directory: Path) -> None:
    mine = WriterLock(directory)
    mine.acquire()

    def does_not_have_it() -> bool:
        for call in (WriterLock(directory).acquire, mine.acquire, mine.confirm):
            with pytest.raises(LockedError):
                call()
        mine.release()
        return not mine.held

    assert in_child(does_not_have_it) == "True"
    assert mine.held
    mine.confirm()
    assert another_process(directory).startswith("LockedError")
    mine.release()


@pytest.mark.slow
def test_a_child_does_not_keep_the_lock_of_a_dead_parent(directory: Path) -> None:
    code = HOLD.replace("print(", "import os, time\nif os.fork() == 0:\n    time.sleep(20)\n    os._exit(0)\nprint(")
    parent = Holder(directory, code)
    assert another_process(directory).startswith("LockedError")
    parent.process.kill()
    parent.process.wait()
    assert another_process(directory) == "acquired"
    for stream in (parent.process.stdin, parent.process.stdout):
        assert stream is not None
        stream.close()


def test_a_fork_while_another_thread_takes_it_does_not_hang(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    real = fcntl.flock

    def slow(*arguments: Any) -> None:
        inside.set()
        go_on.wait(60)
        real(*arguments)

    monkeypatch.setattr(fcntl, "flock", slow)
    mine = WriterLock(directory)
    thread = threading.Thread(target=mine.acquire)
    thread.start()
    inside.wait(60)
    (directory / "other").mkdir()

    def in_the_child() -> bool:
        fcntl.flock = real
        with locked(directory / "other") as theirs:
            return theirs.held

    assert in_child(in_the_child) == "True"
    go_on.set()
    thread.join()
    assert mine.held
    mine.release()


def test_a_lock_file_that_is_removed_is_noticed(directory: Path) -> None:
    mine = WriterLock(directory)
    mine.acquire()
    (directory / LOCK_FILE).read_bytes()  # a copy of the directory reads it too
    mine.confirm()
    assert another_process(directory).startswith("LockedError")
    (directory / LOCK_FILE).unlink()
    with pytest.raises(LockedError, match="removed or replaced"):
        mine.confirm()
    mine.release()
    with pytest.raises(LockedError, match="does not have it"):
        mine.confirm()


def test_a_file_that_is_removed_while_it_is_taken(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, times = fcntl.flock, []

    def unlinking(*arguments: Any) -> None:
        real(*arguments)
        times.append(1)
        if len(times) < 3:
            (directory / LOCK_FILE).unlink()

    monkeypatch.setattr(fcntl, "flock", unlinking)
    with locked(directory) as mine:
        mine.confirm()
        assert another_process(directory).startswith("LockedError")


def test_a_directory_where_no_file_stays(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: (directory / LOCK_FILE).unlink())
    with pytest.raises(WriteFailedError):
        WriterLock(directory).acquire()


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOSPC])
def test_a_directory_that_cannot_be_written_to(directory: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        raise OSError(error, os.strerror(error), path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(WriteFailedError) as caught:
        WriterLock(directory).acquire()
    assert os.strerror(error) in caught.value.found
    assert caught.value.remedy


def test_what_is_no_directory(directory: Path) -> None:
    (directory / "file").write_text("")
    for path in (directory / "file", directory / "nothing"):
        with pytest.raises(WriteFailedError):
            WriterLock(path).acquire()
    assert not (directory / "nothing").exists()


def test_a_lock_file_that_is_none(directory: Path) -> None:
    (directory / "victim").write_text("mine")
    (directory / LOCK_FILE).symlink_to(directory / "victim")
    with pytest.raises(WriteFailedError, match="symbolic link"):
        WriterLock(directory).acquire()
    assert (directory / "victim").read_text() == "mine"
    (directory / LOCK_FILE).unlink()
    (directory / LOCK_FILE).mkdir()
    with pytest.raises(WriteFailedError, match="which is a directory"):
        WriterLock(directory).acquire()


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EIO])
def test_a_file_system_without_locks(directory: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WriteFailedError) as caught:
        WriterLock(directory).acquire()
    if error == errno.EIO:
        assert "Input/output error" in str(caught.value)
    else:
        assert "the file system has no locks" in str(caught.value)
        assert "flock" in caught.value.remedy
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_is_in_nobodys_way(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)
    with locked(directory) as mine:
        assert mine.held
        assert another_process(directory) == f"LockedError {LOCK_FILE} does not name the process that has locked it"
