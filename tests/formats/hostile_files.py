"""Opens what may be hostile, in a process with little memory: `python -m tests.formats.hostile_files FOLDER`.

Prints a JSON object: for every case "ok", or the names of the classes of the error that it raised. A case that takes
longer than `CASE_SECONDS` is interrupted, which counts as an error that is not the library's.
"""

import json
import os
import resource
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

import modelstate as ms
from tests.formats.files import index_text

CASE_SECONDS = 30
MEMORY_BYTES = 1 << 29
"""Address space beyond what the process has when the cases begin."""
TERABYTE = 1 << 40


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    # The path of a socket may be no longer than 107 bytes.
    before = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(TERABYTE)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "fifo": _fifo,
    "socket": _socket,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "directory": lambda path: path.mkdir(),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    "empty": lambda path: path.touch(),
    "terabyte": _sparse,
}


def open_and_read(path: Path) -> None:
    with ms.open(path) as checkpoint:
        checkpoint.value()


def _replaced(path: Path, put: Callable[[Path], None]) -> None:
    path.unlink()
    put(path)


def places(folder: Path) -> Iterator[tuple[str, Path, Callable[[], Any]]]:
    """Each place where the library opens a file: its name, its path, and what opens it."""
    weights = {"w": torch.ones(3)}
    for name in ("a.pt", "a.safetensors", "model.safetensors.index.json", "a.bin", ".metadata", "plain"):
        path = folder / f"file {name}" / name
        path.parent.mkdir()
        path.touch()
        yield f"the file {name}", path, lambda path=path: open_and_read(path)
    for name in ("a.pt", "model.safetensors", "pytorch_model.bin", "x.index.json", ".metadata", "other"):
        path = folder / f"in directory {name}" / name
        path.parent.mkdir()
        path.touch()
        yield f"in a directory {name}", path, lambda path=path: open_and_read(path.parent)
    for index, shard in (("model.safetensors.index.json", "s.safetensors"), ("pytorch_model.bin.index.json", "s.bin")):
        at = folder / f"shards {shard}"
        at.mkdir()
        (at / index).write_text(index_text({"w": shard}))
        (at / shard).touch()
        yield f"the shard {shard}", at / shard, lambda at=at: open_and_read(at)

    import torch.distributed.checkpoint as dcp

    dcp.save(weights, checkpoint_id=folder / "dcp", no_dist=True)
    yield "dcp data", next((folder / "dcp").glob("*.distcp")), lambda: open_and_read(folder / "dcp")

    adapter = folder / "adapter"
    adapter.mkdir()
    base = {"l.weight": torch.ones(4, 4)}
    ms.save(base, folder / "base.safetensors")
    pair = {f"base_model.model.l.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    ms.save(pair, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").touch()

    def merged() -> None:
        sources = [folder / "base.safetensors", adapter / "adapter_model.safetensors"]
        ms.open(sources, combine=ms.merge.LoRA(alpha=1)).value()

    yield "adapter_config.json", adapter / "adapter_config.json", merged

    for name in ("checkpoint.json", "model*.safetensors", "model*.index.json"):
        at = folder / f"store {name.replace('*', '')}"
        model = torch.nn.Linear(3, 3)
        with ms.Store(at) as store:
            step = Path(store.save(1, {"model": model}).path)
        path = next(step.glob(name))
        yield f"store {name}", path, lambda at=at, model=model: ms.Store(at).restore({"model": model})
    steps = count()
    for name in ("store.json", ".lock"):
        at = folder / f"store {name}"

        def save(at: Path = at) -> None:
            with ms.Store(at) as store:
                store.save(next(steps), {"model": torch.nn.Linear(3, 3)})

        save()
        yield f"saving again: {name}", at / name, save
    (folder / "program").mkdir()
    program = folder / "program" / "x.pt2"
    program.touch()
    yield "a program", program, lambda: ms.Live(program)


def replaced_after_opening(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A file that is another thing when its tensors are read."""
    for kind, put in SPECIAL.items():
        path = folder / f"replaced {kind}.safetensors"
        ms.save({"w": torch.ones(3)}, path)
        checkpoint = ms.open(path)
        _replaced(path, put)
        yield f"replaced after opening: {kind}", checkpoint.value


def bombs(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Small files that stand for much memory."""
    header = folder / "header.safetensors"
    with header.open("wb") as file:
        file.write(struct.pack("<Q", TERABYTE - 8))
        file.truncate(TERABYTE)
    yield "a safetensors header of a terabyte", lambda: ms.open(header)


def outcome(action: Callable[[], Any]) -> list[str]:
    signal.alarm(CASE_SECONDS)
    try:
        action()
    except BaseException as error:
        return [kind.__name__ for kind in type(error).__mro__] + [str(error)[:300]]
    finally:
        signal.alarm(0)
    return []


def main(folder: Path) -> dict[str, list[str]]:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    cases = list(places(folder))
    found: dict[str, list[str]] = {}
    several = [*bombs(folder), *replaced_after_opening(folder)]
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for where, path, action in cases:
        for kind, put in SPECIAL.items():
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
            else:
                shutil.rmtree(path)
            put(path)
            found[f"{where}: {kind}"] = outcome(action)
    for name, action in several:
        found[name] = outcome(action)
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
