"""Load, save, convert, store and resume without the calls that only Linux has, as on macOS."""

import os
import subprocess
import sys
from pathlib import Path

import modelstate

WITHOUT = """
import builtins, ctypes, fcntl, mmap, os, platform, signal, sys
import numpy, safetensors.torch, torch, torch._dynamo

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


class Library(ctypes.CDLL):
    LINUX = {"mremap", "cachestat", "syscall", "malloc_trim", "mallopt", "gettid", "__libc_malloc"}

    def __getattr__(self, name):
        if name in self.LINUX:
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = Library
open_file = open


def open_without_proc(path, *args, **options):
    if str(path).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", path)
    return open_file(path, *args, **options)


builtins.open = open_without_proc
sys.platform = "darwin"
platform.system = lambda: "Darwin"
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
    assert not any(step.mapped for step in report.steps), "nothing protects a map there"
    for options in ({"map": True}, {"map": False}, {"dtype": "bf16", "max_memory_bytes": 1 << 20}):
        with ms.skeleton():
            empty = build()
        ms.load(empty, f"{folder}/{name}", background=options.get("map") is False, **options)
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


def test_without_what_only_linux_has(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(modelstate.__file__).parent.parent)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
