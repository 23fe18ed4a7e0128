"""Whatever happens while a file is written, the old one stands or the new one does, and nothing else."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import modelstate as ms
from modelstate.errors import SaveTargetError, TargetExistsError, WriteFailedError
from modelstate.testing import faulty_writes
from modelstate.write.atomic import SUFFIX, atomic_file

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


@pytest.mark.parametrize("step", ["posix_fallocate", "pwritev", "fchmod", "fsync", "replace", "link", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_io_errors_leave_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int) -> None:
    (tmp_path / "x").write_bytes(OLD)

    def fail(*args: Any, **named: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(WriteFailedError, match=os.strerror(number)) as caught:
            put(tmp_path / "x", b"new")
    assert caught.value.where == str(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == OLD
    assert names(tmp_path) == ["x"]


def test_a_file_system_without_rights(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(OLD)
    with faulty_writes() as clean:
        put(tmp_path / "x", b"new")
    number = [request.call for request in clean.requests].index("fchmod") + 1
    with faulty_writes(at=number, error=OSError(errno.EPERM, "there are none")):
        put(tmp_path / "x", b"newer")
    assert (tmp_path / "x").read_bytes() == b"newer"


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
    command = [sys.executable, "-c", code, str(tmp_path / "x.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "File too large" in done.stdout
    assert (tmp_path / "x.safetensors").read_bytes() == OLD
    assert names(tmp_path) == ["x.safetensors"]


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(SaveTargetError):
            put(path, b"new")
    with pytest.raises(WriteFailedError, match="make the directory first"):
        put(tmp_path / "no" / "x", b"new")
    with pytest.raises(WriteFailedError, match="in a directory"):
        put(tmp_path / "file" / "x", b"new")
    with pytest.raises(WriteFailedError, match="shorter name"):
        put(tmp_path / ("x" * 300), b"new")
    assert names(tmp_path) == ["file", "pipe"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(WriteFailedError, match="permission"):
        put(tmp_path / "x", b"new")
    tmp_path.chmod(0o700)
    assert not names(tmp_path)


def test_what_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:

    def overtaken() -> None:
        with atomic_file(str(tmp_path / "x"), overwrite=False) as file:
            file.append(b"new")
            (tmp_path / "x").write_bytes(OLD)

    with pytest.raises(TargetExistsError):
        overtaken()
    assert (tmp_path / "x").read_bytes() == OLD
    assert names(tmp_path) == ["x"]


def test_without_links_a_rename_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **named: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", fail)
    put(tmp_path / "x", b"new", overwrite=False)
    assert (tmp_path / "x").read_bytes() == b"new"
    put(tmp_path / "x", b"newer")
    assert (tmp_path / "x").read_bytes() == b"newer"
    assert names(tmp_path) == ["x"]


def test_file_and_directory_are_synced_around_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda a, b: done.append("rename") or replace(a, b))
    put(tmp_path / "x", b"new")
    assert done[0].endswith(SUFFIX)
    assert done[1:] == ["rename", str(tmp_path)]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: pwritev(fd, [bytes(buffers[0][:7])], at))
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


def test_a_kill_leaves_a_complete_version(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    seen = set()
    for attempt in range(4):
        with subprocess.Popen([sys.executable, "-c", SAVING, str(path)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.007 * attempt)
            process.send_signal(signal.SIGKILL)
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
