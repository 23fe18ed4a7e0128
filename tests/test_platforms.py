"""Load, save, convert, store and resume without the calls that only Linux has, or only a new one."""

from pathlib import Path

import pytest

from tests.programs import Forks

pytestmark = pytest.mark.slow

BEFORE = """
import builtins, ctypes, errno, fcntl, mmap, os, platform, signal, sys
import numpy, safetensors.torch, torch, torch._dynamo


class Function:
    # A function of the C library that is replaced.

    argtypes = restype = None

    def __init__(self, call):
        self.call = call

    def __call__(self, *arguments):
        failed = self.call(*arguments)
        ctypes.set_errno(failed)
        return -1 if failed else 0


real = ctypes.CDLL(None, use_errno=True)


def madvise(address, nbytes, advice):
    if advice in (22, 23, 25):
        return errno.EINVAL
    return ctypes.get_errno() if real.madvise(address, nbytes, advice) else 0


class Map(mmap.mmap):
    def madvise(self, option, *range):
        if option in (22, 23, 25):
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().madvise(option, *range)


mmap.mmap = Map


class Library(ctypes.CDLL):
    MISSING, REPLACED = set(), {"madvise": madvise}

    def __getattr__(self, name):
        if name in self.MISSING:
            raise AttributeError(name)
        return Function(self.REPLACED[name]) if name in self.REPLACED else super().__getattr__(name)


ctypes.CDLL = Library
"""
MACOS = """
for module, names in {
    os: "posix_fadvise posix_fallocate O_DIRECT O_TMPFILE sched_getaffinity memfd_create copy_file_range eventfd",
    fcntl: "F_SETLEASE F_GETLEASE F_SETSIG F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK",
    mmap: "MADV_POPULATE_READ MADV_POPULATE_WRITE MADV_HUGEPAGE MADV_NOHUGEPAGE MAP_POPULATE MAP_NORESERVE",
    signal: "sigwaitinfo sigtimedwait",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in [name for name in vars(os) if name.startswith(("POSIX_FADV_", "RWF_"))]:
    delattr(os, name)
Library.MISSING = {"mremap", "cachestat", "malloc_trim", "mallopt", "gettid", "__libc_malloc"}


def another_call(*arguments):
    print("the numbers of system calls are other ones there", arguments, file=sys.stderr, flush=True)
    os._exit(1)


Library.REPLACED["syscall"] = another_call
open_file, sysconf = open, os.sysconf


def open_without_proc(path, *args, **options):
    if str(path).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", path)
    return open_file(path, *args, **options)


def sysconf_without_free_pages(name):
    if name == "SC_AVPHYS_PAGES":
        raise ValueError("unrecognized configuration name")
    return sysconf(name)


def control(descriptor, command, *args):
    return sync(descriptor) if command == fcntl.F_FULLFSYNC else control_file(descriptor, command, *args)


def too_little(descriptor):
    print("fsync leaves the data in the cache of the disk there", file=sys.stderr, flush=True)
    os._exit(1)


control_file, sync, fcntl.F_FULLFSYNC = fcntl.fcntl, os.fsync, 51
fcntl.fcntl, os.fsync = control, too_little
builtins.open, os.sysconf = open_without_proc, sysconf_without_free_pages
sys.platform = "darwin"
platform.system = lambda: "Darwin"
MAPS = False  # nothing protects a map there
"""
OLD_LINUX = """
# As Linux 5.4 in a container: new system calls are missing, a file system has neither O_DIRECT nor leases.
Library.REPLACED["syscall"] = lambda *arguments: errno.ENOSYS
open_descriptor, control = os.open, fcntl.fcntl


def open_cached(path, flags, *args, **options):
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument", path)
    return open_descriptor(path, flags, *args, **options)


def control_without_leases(descriptor, command, *args):
    if command == fcntl.F_SETLEASE:
        raise OSError(errno.EINVAL, "Invalid argument")
    return control(descriptor, command, *args)


os.open, fcntl.fcntl = open_cached, control_without_leases
MAPS = False
"""
PROGRAM = """
import modelstate as ms

folder = sys.argv[1]


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 2))


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


model = build()
with torch.no_grad():
    model[0].weight.fill_(2.0)
for name in ("x.safetensors", "x.pt"):
    print(ms.save(model, f"{folder}/{name}"))
    other = build()
    ms.load(other, f"{folder}/{name}")
    assert same(model, other)
    with ms.skeleton():
        empty = build()
    report = ms.load(empty, f"{folder}/{name}")
    assert same(model, empty), report
    assert any(step.mapped for step in report.steps) == MAPS, report
    for options in ({"map": True}, {"map": False}, {"dtype": "bf16", "max_memory_bytes": 1 << 20}):
        with ms.skeleton():
            empty = build()
        ms.load(empty, f"{folder}/{name}", background=options.get("map") is False, **options)
from modelstate.io import system

with torch.no_grad():
    large = torch.nn.Sequential(*(torch.nn.Linear(1024, 2048) for _ in range(10)))
ms.save(large, f"{folder}/large.safetensors")  # large enough to be written and read past the page cache, and ahead
for options in ({}, {"map": True}, {"map": False}):
    if hasattr(os, "posix_fadvise"):
        with open(f"{folder}/large.safetensors", "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with ms.skeleton():
        empty = torch.nn.Sequential(*(torch.nn.Linear(1024, 2048) for _ in range(10)))
    loading = ms.load(empty, f"{folder}/large.safetensors", background=bool(options), **options)
    if options:
        loading.result()
    assert same(large, empty)
assert system.available_bytes() > 0
with ms.skeleton():
    empty = build()
assert ms.load(empty, f"{folder}/x.safetensors", background=True).result() and same(model, empty)
assert ms.convert(model, torch.bfloat16).steps
ms.convert_checkpoint(f"{folder}/x.safetensors", f"{folder}/y.safetensors", dtype="bf16")

model = build()
optimizer = torch.optim.Adam(model.parameters())
objects = {"model": model, "optimizer": optimizer, "rng": ms.RNG()}
seen = []
for stop in (3, 6):
    for step in ms.resumable(f"{folder}/store", objects, steps=stop, save_every=2):
        seen.append(step)
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
assert seen == [0, 1, 2, 3, 4, 5], seen
with ms.Store(f"{folder}/other") as store:
    store.save(1, objects, background=True).result()
    store.restore(objects)
    assert not any(store.verify().values())
print("done")
"""


@pytest.mark.parametrize("system", [MACOS, OLD_LINUX], ids=["macos", "old_linux"])
def test_without_what_only_a_new_linux_has(system: str, new_interpreter: Forks, tmp_path: Path) -> None:
    done = new_interpreter.run(BEFORE + system + PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
