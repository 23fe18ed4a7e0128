"""What runs in the processes that are measured: loads, and the contenders of the smaller tables."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from bench import files
from bench.contenders import CONVERT, TABLES, Case
from bench.measure import Stages
from bench.models import KINDS, QUICK, Leaves, run, sizes_of, with_memory
from bench.sections import FIRST_USE, IMPORT


def write(*, case: str, formats: Sequence[str], folder: str, quick: bool) -> None:
    """The checkpoint that contenders read."""
    stages = Stages()
    files.write(case, sizes_of(quick), Path(folder), formats)
    stages.end("written")


def load(*, table: str, contender: str, case: str, folder: str, quick: bool, cold: bool) -> None:
    """From the file to the module, and to the end of the first forward."""
    way, sizes = TABLES[table][contender], sizes_of(quick)
    os.environ.update(way.environment)
    tiny = way.prepare(Case(KINDS[case].tiny, sizes, Path(folder), device=way.device))()
    with torch.inference_mode():
        run(tiny)
    del tiny
    given = Case(case, sizes, Path(folder), device=way.device)
    work = way.prepare(given)
    (files.chill if cold else files.warm)(files.of_case(case, Path(folder)))
    before_bytes = _on_device(way.device, torch.cuda.memory_allocated)
    _on_device(way.device, torch.cuda.reset_peak_memory_stats)
    stages = Stages()
    model = work()
    _on_device(way.device, torch.cuda.synchronize)
    peak_bytes, after_bytes = (
        _on_device(way.device, get) for get in (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated)
    )
    stages.end("ready", device_bytes=peak_bytes - max(before_bytes, after_bytes))
    with torch.inference_mode():
        run(model)
    _on_device(way.device, torch.cuda.synchronize)
    stages.end("forward")
    facts = {"weights": fingerprint(model), "nbytes": sum(part.nbytes for _, part in parts(model))}
    stages.end("check", **facts, references_kept=given.references_kept(model))


def _on_device(device: str, function: Callable[[str], Any]) -> int:
    """What a function of `torch.cuda` returns for a device; 0 for the CPU."""
    return 0 if device == "cpu" else function(device) or 0


def parts(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every plain tensor of the state dict: of a wrapper subclass, those inside."""
    for name, value in model.state_dict().items():
        yield from _inner(name, value)


def _inner(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if not hasattr(value, "__tensor_flatten__"):
        yield name, value
        return
    for attribute in value.__tensor_flatten__()[0]:
        yield from _inner(f"{name}.{attribute}", getattr(value, attribute))


def fingerprint(model: nn.Module) -> str:
    """Equal for equal bits. Not of the forward's result, which depends on where in memory the weights lie."""
    digest = xxhash.xxh3_128()
    for name, value in parts(model):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        octets: Any = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest.update(octets)
    return digest.hexdigest()


def state_dict(*, contender: str, count: int) -> None:
    """`load_state_dict` from memory into a module with many children, after one with two."""
    load = _load_state_dict if contender == "modelstate.load_state_dict" else nn.Module.load_state_dict
    load(Leaves(2), Leaves(2).state_dict())
    source, target = Leaves(count).state_dict(), Leaves(count)
    stages = Stages()
    load(target, source)
    stages.end("ready")


def _load_state_dict(module: nn.Module, state: dict[str, Any]) -> object:
    import modelstate as ms

    return ms.load_state_dict(module, state)


def convert(*, contender: str, case: str, quick: bool) -> None:
    """From a module in float32 to the same in bfloat16."""
    work = CONVERT[contender]
    work(with_memory("tiny", QUICK))
    model = with_memory(case, sizes_of(quick))
    stages = Stages()
    work(model)
    stages.end("ready")


def opening(*, contender: str, path: str) -> None:
    """From a path to the names and shapes of what is in it, after a tiny file of the same kind."""
    opener = OPENERS[contender]
    with tempfile.TemporaryDirectory() as folder:
        opener(_saved({"w": torch.ones(3)}, f"{folder}/tiny", Path(path).suffix))
    stages = Stages()
    opened = opener(path)
    stages.end("ready")
    del opened  # its end is not measured


def _saved(state: dict[str, torch.Tensor], path: str, suffix: str) -> str:
    from safetensors.torch import save_file

    (torch.save if suffix == ".pt" else save_file)(state, path + suffix)
    return path + suffix


def _open(path: str) -> object:
    import modelstate as ms

    return ms.open(path)


def _our_shapes(path: str) -> object:
    import modelstate as ms

    return {name: spec.shape for name, spec in ms.open(path).items()}


def _torch_load(path: str) -> object:
    return torch.load(path, mmap=True, weights_only=True)


def _safe_open(path: str) -> object:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


OPENERS: dict[str, Callable[[str], object]] = {
    "modelstate.open": _open,
    "modelstate.open + every shape": _our_shapes,
    "torch.load(mmap)": _torch_load,
    "safetensors safe_open + get_slice": _safe_open,
}


def start(*, arguments: Sequence[str]) -> None:
    """A program from its start to its end."""
    stages = Stages()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    stages.end("ready")


def importing() -> None:
    """The library's import in a program that has imported torch, and what its first use imports beside that."""
    stages = Stages()
    program = (
        "import time, torch; begun = time.perf_counter(); import modelstate; print(time.perf_counter() - begun); "
        "begun = time.perf_counter(); modelstate.load; print(time.perf_counter() - begun)"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    for row, seconds in zip((IMPORT, FIRST_USE), ended.stdout.split(), strict=True):
        stages.end(row, seconds=float(seconds))


def perturbed_copy(*, source: str, target: str) -> None:
    """A checkpoint with the names of another one, in which every value differs a little."""
    from safetensors.torch import load_file

    stages = Stages()
    torch.manual_seed(0)
    state = {name: value + 1e-4 * torch.randn_like(value) for name, value in load_file(source).items()}
    for suffix in (".safetensors", ".pt"):
        _saved(state, target, suffix)
    stages.end("written")


def diff(*, contender: str, a: str, b: str) -> None:
    """From two paths to how far their tensors are apart, after two tiny files of the same kind."""
    way, suffix = DIFFS[contender], Path(a).suffix
    with tempfile.TemporaryDirectory() as folder:
        way(*(_saved({"w": torch.full((3,), value)}, f"{folder}/{value}", suffix) for value in (1.0, 2.0)))
    files.warm([Path(a), Path(b)])
    stages = Stages()
    found = way(a, b)
    stages.end("ready")
    del found  # its end is not measured


def _read_both(a: str, b: str) -> None:
    """Each file on a thread of its own, into one buffer again and again."""

    def read(path: str) -> None:
        buffer = bytearray(4 << 20)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, (a, b)))


def _our_diff(a: str, b: str) -> object:
    import modelstate as ms

    return ms.diff(a, b)


def _loop(a: str, b: str, *, mmap: bool) -> list[tuple[str, object]]:
    """The script that people write; it measures what `modelstate.diff` does."""
    first, second = (torch.load(path, mmap=mmap, weights_only=True) for path in (a, b))
    found: list[tuple[str, object]] = []
    for name, x in first.items():
        y = second[name]
        d = (x - y).abs()
        measures = (
            *((x != y).float().mean(), d.max(), d.norm() / x.norm()),
            *(count for side in (x, y) for count in (side.isnan().sum(), side.isinf().sum())),
        )
        found.append((name, [float(value) for value in measures]))
    return found


DIFFS: dict[str, Callable[[str, str], object]] = {
    "modelstate.diff": _our_diff,
    "reading both files once": _read_both,
    "two torch.load + a loop": partial(_loop, mmap=False),
    "two torch.load(mmap) + a loop": partial(_loop, mmap=True),
}
