"""Mapped files that other processes overwrite: real second processes, and this one that goes on using the tensors."""

import ctypes
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from tests.conftest import Log
from tests.programs import run_program

SIZE = 1024


def can_lease(folder: Path) -> bool:
    """Whether the file system of a folder has leases, and this system lets us have them."""
    path = folder / "lease"
    path.write_bytes(b"x")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not can_lease(tmp_path):
        pytest.skip("the file system of the temporary directory has no leases")
    return tmp_path


def saved(path: Path, value: float = 1.0, size: int = SIZE) -> Path:
    save_file({"weight": torch.full((size, size), value), "bias": torch.zeros(size)}, path)
    return path


def mapped(path: Path, size: int = SIZE, map: bool | None = None) -> nn.Linear:
    with ms.skeleton():
        model = nn.Linear(size, size)
    report = ms.load(model, path, map=map)
    assert all(step.mapped for step in report.steps), report
    assert not any("protect" in note for note in report.notes)
    return model


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, timeout=40)  # the lease would be broken after 45 s


WRITERS = {
    "cut": "import os; os.truncate({path!r}, 100)",
    "cut to nothing": "open({path!r}, 'wb')",
    "overwritten": "open({path!r}, 'r+b').write(b'x' * 1000)",
    "replaced": "import os; open({path!r} + '.new', 'wb').write(b'x'); os.replace({path!r} + '.new', {path!r})",
}


def writer(name: str, path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", WRITERS[name].format(path=str(path))])


def _write(path: Path, new: Path) -> None:
    thread = threading.Thread(target=path.write_bytes, args=(new.read_bytes(),))
    thread.start()
    thread.join(40)


def shorten(path: Path) -> None:
    """Makes a file shorter, from another process."""
    assert writer("cut", path).wait(40) == 0


OVERWRITERS: dict[str, Callable[[Path, Path], object]] = {
    "cp": lambda new, path: run("cp", new, path),
    "a thread of this process": lambda new, path: _write(path, new),
    **{name: lambda new, path, name=name: writer(name, path).wait(40) for name in WRITERS if name != "replaced"},  # type: ignore[misc]
}


@pytest.mark.parametrize("how", OVERWRITERS)
def test_values_survive(how: str, folder: Path) -> None:
    path, new = saved(folder / "model.safetensors"), saved(folder / "new", 2.0, size=4)
    model = mapped(path)
    address, before = model.weight.data_ptr(), path.read_bytes()
    OVERWRITERS[how](new, path)
    assert path.read_bytes() != before
    assert model.weight.eq(1).all()
    assert model.weight.data_ptr() == address
    with torch.no_grad():
        model.weight.add_(1)
    assert model.weight.eq(2).all()


def test_torch_files_that_are_mapped_on_request(folder: Path) -> None:
    path, new = folder / "model.pt", saved(folder / "new", 2.0, size=4)
    torch.save({"weight": torch.full((SIZE, SIZE), 1.0), "bias": torch.zeros(SIZE)}, path)
    model = mapped(path, map=True)
    run("cp", new, path)
    assert model.weight.eq(1).all()


def test_what_was_changed_in_the_map_stays(folder: Path) -> None:
    path = saved(folder / "model.safetensors", size=2 * SIZE)  # replaced in several pieces
    weight = mapped(path, size=2 * SIZE).weight.detach()
    weight[:SIZE].mul_(3)
    shorten(path)
    assert weight[:SIZE].eq(3).all()
    assert weight[SIZE:].eq(1).all()
    maps = [int(line.partition("-")[0], 16) for line in Path("/proc/self/maps").read_text().splitlines()]
    assert not any(0 < start - weight.data_ptr() < weight.nbytes for start in maps), "a process has 65,530 maps"


@pytest.mark.slow
def test_no_write_of_another_thread_is_lost(folder: Path) -> None:
    """A trained model is written to all the time, also while its memory is being replaced."""
    path = saved(folder / "model.safetensors", 0.0, size=4096)
    model, steps, stop = mapped(path, size=4096), 0, threading.Event()
    rows = model.weight.detach()[:64]  # small, so that there are very many steps

    def train() -> None:
        nonlocal steps
        while not stop.is_set():
            rows.add_(1)
            steps += 1

    thread = threading.Thread(target=train)
    thread.start()
    try:
        shorten(path)
    finally:
        stop.set()
        thread.join()
    assert steps
    assert rows.eq(steps).all()
    assert model.weight[64:].eq(0).all()


@pytest.mark.parametrize("generations", [1, 2])
def test_forked_children_keep_their_values(generations: int, folder: Path) -> None:
    path = saved(folder / "model.safetensors")
    model = mapped(path)
    with torch.no_grad():
        model.bias.fill_(7)
    (ready_read, ready), (go, go_write) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        with_child = 0
        try:
            if generations == 2:
                with_child = os.fork()
            os.write(ready, b"x")
            os.read(go, 1)
            ok = model.weight.numpy(force=True).min() == 1 and model.bias.numpy(force=True).min() == 7
            ok = ok and (not with_child or os.waitpid(with_child, 0)[1] == 0)
            os._exit(0 if ok else 1)
        finally:
            os._exit(2)
    for _ in range(generations):
        os.read(ready_read, 1)
    run("cp", "/dev/null", path)
    os.write(go_write, b"x" * generations)
    assert os.waitpid(child, 0)[1] == 0
    assert model.weight.eq(1).all()
    for descriptor in (ready, ready_read, go, go_write):
        os.close(descriptor)


@pytest.mark.slow
def test_a_child_that_outlives_its_parent_holds_nobody_up(folder: Path) -> None:
    """What a child has inherited of its parent's leases must not make a writer wait for a process that is gone."""
    path = saved(folder / "model.safetensors")
    code = f"""
import os, sys, time, torch, modelstate as ms
with ms.skeleton():
    model = torch.nn.Linear({SIZE}, {SIZE})
ms.load(model, sys.argv[1])
if os.fork():
    os.kill(os.getpid(), 9)
while os.path.getsize(sys.argv[1]) > 100:
    time.sleep(0.02)
with open(sys.argv[2] + ".new", "w") as file:
    print(model.weight.numpy(force=True).min(), file=file)
os.rename(file.name, sys.argv[2])
"""
    said = folder / "said"
    assert run_program(code, path, said).returncode == -signal.SIGKILL
    shorten(path)
    until = time.monotonic() + 40
    while not said.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert said.read_text() == "1.0\n"


@pytest.mark.slow
def test_nobody_waits_once_the_last_tensor_has_gone(folder: Path) -> None:
    path = saved(folder / "model.safetensors")
    model = mapped(path)
    weight = model.weight
    del model
    assert not writes_at_once(path)
    assert weight.eq(1).all()
    os.replace(saved(folder / "new"), path)  # the other inode is free
    model = mapped(path)
    del model
    gc.collect()
    assert writes_at_once(path)


def writes_at_once(path: Path) -> bool:
    """Whether nobody has a lease on a file; with O_NONBLOCK an open does not wait for one that has."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except BlockingIOError:
        return False
    return True


def test_renames_and_readers_break_no_lease(folder: Path, log: Log) -> None:
    path = saved(folder / "model.safetensors")
    model = mapped(path)
    path.read_bytes()
    ms.save({"weight": torch.zeros(2)}, path)
    save_file({"weight": torch.zeros(2)}, path)
    assert model.weight.eq(1).all()
    assert not log.records


def test_what_was_done_is_logged(folder: Path, log: Log) -> None:
    path = saved(folder / "model.safetensors")
    model = mapped(path)
    shorten(path)
    assert [record.name for record in log.records] == ["modelstate"]
    assert f"{path} is opened for writing: the 4.2 MB" in log.text
    assert model.weight.eq(1).all()


def test_a_file_that_is_open_for_writing_is_read(folder: Path) -> None:
    path = saved(folder / "model.safetensors")
    with ms.skeleton():
        model, forced = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
    with path.open("r+b"):
        report = ms.load(model, path)
        told = ms.load(forced, path, map=True)
    assert not any(step.mapped for step in report.steps)
    assert (
        "model.safetensors: read into memory, not mapped: it cannot be protected, for a process has the file open"
        in ("\n".join(report.notes))
    )
    assert all(step.mapped for step in told.steps)
    assert "model.safetensors: mapped without protection, for a process has the file open" in "\n".join(told.notes)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no memfd_create")
def test_memory_of_memfd_create_whose_writers_do_not_wait_is_neither_mapped_nor_held(folder: Path) -> None:
    content, live = saved(folder / "model.safetensors", 3.0).read_bytes(), nn.Linear(SIZE, SIZE)
    with ms.skeleton():
        model = nn.Linear(SIZE, SIZE)
    with os.fdopen(os.memfd_create("model"), "r+b", buffering=0) as file:
        file.write(content)
        notes = "\n".join(ms.load(model, f"/proc/self/fd/{file.fileno()}").notes)
        steps = ms.load(live, f"/proc/self/fd/{file.fileno()}").steps
        os.pwrite(file.fileno(), bytes(len(content) // 2), len(content) // 2)
    assert "not mapped: it cannot be protected, for it has no name" in notes
    assert all("after all reads: it has no name" in step.why for step in steps)
    assert model.weight.eq(3).all()


@contextmanager
def open_for_writing(path: Path) -> Iterator[None]:
    """Another process has the file open for writing, so that no lease can be had."""
    code = "import sys; file = open(sys.argv[1], 'r+b'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        yield
        writer.communicate(timeout=40)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("when", ["planned", "loaded"])
def test_a_plan_holds_when_the_file_may_not_be_mapped_any_more(when: str, background: bool, folder: Path) -> None:
    path = saved(folder / "model.safetensors", 3.0)
    with ms.skeleton():
        model = nn.Linear(SIZE, SIZE)
    with open_for_writing(path) if when == "planned" else nullcontext():
        plan = ms.plan(model, path)
    assert all(step.mapped == (when == "loaded") for step in plan.steps)
    with open_for_writing(path) if when == "loaded" else nullcontext():
        report = ms.load(model, plan, background=True).result(60) if background else ms.load(model, plan)
    assert not any(step.mapped for step in report.steps), "what the plan says, unless it is not safe any more"
    assert model.weight.eq(3).all()
    notes = "\n".join(report.notes)
    if when == "loaded":
        assert "2 tensors are read into memory; when the plan was made, the file could be mapped" in notes
        assert "a process has the file open for writing" in notes


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o644, 0o444])
def test_files_of_another_user(mode: int, folder: Path) -> None:
    """No lease can be had: what somebody may write to is read, and what nobody may write to is mapped."""
    path = saved(folder / "model.safetensors")
    path.chmod(mode)
    for parent in (folder, *folder.parents):
        if parent.stat().st_mode & 0o001:
            break
        parent.chmod(0o711)
    with ms.skeleton():
        model = nn.Linear(SIZE, SIZE)
    child = os.fork()
    if not child:
        try:
            os.setresuid(65534, 65534, 65534)
            report = ms.load(model, path)
            told = any("the file belongs to another user" in note for note in report.notes)
            is_mapped = all(step.mapped for step in report.steps)
            os._exit(0 if (is_mapped, told) == (mode == 0o444, mode != 0o444) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
def test_too_many_leases(folder: Path) -> None:
    """A program keeps the descriptors that it needs itself, and ends as usual with mapped weights."""
    paths = [saved(folder / f"{i}.safetensors", size=2) for i in range(12)]
    code = """
import resource, sys, torch, modelstate as ms
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
models = []
for path in sys.argv[1:]:
    with ms.skeleton():
        models.append(torch.nn.Linear(2, 2))
    print(all(step.mapped for step in ms.load(models[-1], path).steps))
"""
    done = run_program(code, *paths, finalizes=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["True"] * 10 + ["False"] * 2


def test_the_tensors_of_a_checkpoint(folder: Path) -> None:
    path = saved(folder / "model.safetensors")
    weight = ms.open(path).tensor("weight")
    shorten(path)
    assert weight.eq(1).all()


def test_a_saver_that_keeps_pythons_lock_does_not_wait_for_a_checkpoint(tmp_path: Path) -> None:
    """The tensor was looked at, and the file is written again: nothing may hold that up for the lease's 45 seconds."""
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.ones(3)}, path)
    weight = ms.open(path).tensor("weight")
    assert weight.eq(1).all()
    assert writes_at_once(path)


def test_handlers_and_signals_stay_the_users(folder: Path) -> None:
    """A handler of SIGSEGV is put back, and a signal that the process sends itself goes to its own handler."""
    path, got = saved(folder / "model.safetensors"), list[int]()
    libc = ctypes.CDLL(None)
    before = signal.signal(signal.SIGURG, lambda number, _: got.append(number))
    handlers = [ctypes.create_string_buffer(256) for _ in range(2)]
    try:
        model = mapped(path)
        libc.sigaction(signal.SIGSEGV, None, handlers[0])
        shorten(path)
        libc.sigaction(signal.SIGSEGV, None, handlers[1])
        assert not got
        signal.raise_signal(signal.SIGURG)
        os.kill(os.getpid(), signal.SIGURG)
        deadline = time.monotonic() + 60
        while len(got) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert got == [signal.SIGURG] * 2
        assert model.weight.eq(1).all()
    finally:
        signal.signal(signal.SIGURG, before)
    assert handlers[0].raw[:8] == handlers[1].raw[:8]
