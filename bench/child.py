"""One contender in one process: `python -m bench.child KIND ARGUMENTS…`, as JSON in the last argument."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench import files, limits, live, merging, saving, serving
from bench.contenders import CONVERT, TABLES, Case
from bench.measure import Stages
from bench.models import KINDS as MODELS
from bench.models import QUICK, Leaves, Sizes, run, with_memory
from bench.sections import FIRST_USE, IMPORT


def write(*, case: str, formats: Sequence[str], folder: str, quick: bool) -> None:
    """The checkpoint that contenders read."""
    stages = Stages()
    files.write(case, QUICK if quick else Sizes(), Path(folder), formats)
    stages.end("written")


def load(*, table: str, contender: str, case: str, folder: str, quick: bool, cold: bool) -> None:
    """From the file to the module, and to the end of the first forward."""
    way, sizes = TABLES[table][contender], QUICK if quick else Sizes()
    tiny = way.prepare(Case(MODELS[case].tiny, sizes, Path(folder), device=way.device))()
    with torch.inference_mode():
        run(tiny)
    del tiny
    given = Case(case, sizes, Path(folder), device=way.device)
    work = way.prepare(given)
    if cold:
        files.chill(files.of_case(case, Path(folder)))
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


def parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every plain tensor of the state dict: of a wrapper subclass, those inside."""
    for name, value in model.state_dict().items():
        yield from _inner(name, value)


def _inner(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if not hasattr(value, "__tensor_flatten__"):
        yield name, value
        return
    for attribute in value.__tensor_flatten__()[0]:
        yield from _inner(f"{name}.{attribute}", getattr(value, attribute))


def fingerprint(model: torch.nn.Module) -> str:
    """Equal for equal bits. Not of the forward's result, which depends on where in memory the weights lie."""
    digest = hashlib.sha256()
    for name, value in parts(model):
        octets = value.detach().contiguous().view(-1).view(torch.uint8)
        words = octets[: octets.numel() // 8 * 8].view(torch.int64)  # a sum of them wraps round, which is as good
        rest = octets[words.nbytes :].tolist()
        text = f"{name} {value.dtype} {tuple(value.shape)} {int(words.sum())} {int(words[::7].sum())} {rest}"
        digest.update(text.encode())
    return digest.hexdigest()


def memory_limits(*, path: str, quick: bool) -> None:
    limits.memory(path)


def disk_limits(*, path: str, quick: bool) -> None:
    limits.disk(path)


def forward_alone(*, quick: bool) -> None:
    """The first forward of a model whose weights are in memory."""
    with torch.inference_mode():
        run(with_memory("tiny", QUICK))
    model = with_memory("large", QUICK if quick else Sizes())
    stages = Stages()
    with torch.inference_mode():
        run(model)
    stages.end("ready")


def state_dict(*, contender: str, count: int) -> None:
    """`load_state_dict` from memory into a module with many children."""
    import modelstate as ms

    source, target = Leaves(count).state_dict(), Leaves(count)
    stages = Stages()
    if contender == "modelstate":
        ms.load_state_dict(target, source)
    else:
        target.load_state_dict(source)
    stages.end("ready")


def convert(*, contender: str, case: str, quick: bool) -> None:
    """From a module in float32 to the same in bfloat16."""
    work = CONVERT[contender]
    work(with_memory("tiny", QUICK))
    model = with_memory(case, QUICK if quick else Sizes())
    stages = Stages()
    work(model)
    stages.end("ready")


def write_merged(*, folder: str, quick: bool) -> None:
    """The files that are merged."""
    stages = Stages()
    merging.write(Path(folder) / "tiny", QUICK, "tiny")
    merging.write(Path(folder) / "large", QUICK if quick else Sizes(), "large")
    stages.end("written")


def merge(*, contender: str, folder: str, quick: bool) -> None:
    merging.measure(contender, Path(folder), quick)


def save(*, contender: str, folder: str, quick: bool) -> None:
    """From a module in memory to files."""
    model, tiny = with_memory("large", QUICK if quick else Sizes()), with_memory("tiny", QUICK)
    saving.timed_save(contender, model, tiny, Path(folder))


def bare_writes(*, nbytes: int, folder: str) -> None:
    saving.bare_writes(nbytes, Path(folder))


def store(*, contender: str, folder: str, quick: bool) -> None:
    """What a store makes of a second checkpoint."""
    model = with_memory("large", QUICK if quick else Sizes())
    {"blocked": saving.blocked, "frozen": saving.frozen}[contender](model, Path(folder))


def save_from_gpu(*, contender: str, folder: str, quick: bool) -> None:
    """Until training on a GPU goes on."""
    saving.from_gpu(contender, with_memory("large", QUICK if quick else Sizes()), Path(folder))


def serve(*, folder: str, requests: int, swaps: int) -> None:
    serving.measure(Path(folder), requests, swaps)


def live_torture(*, contender: str, seconds: float) -> None:
    """Requests while weights are swapped."""
    live.measure_torn(contender, seconds)


def live_swap(*, target: str, count: int, width: int) -> None:
    live.swap(target, count, width)


def live_request(*, target: str) -> None:
    live.request(target)


def opening(*, contender: str, path: str) -> None:
    """From a path to the names and shapes of what is in it."""
    openers: dict[str, Callable[[], object]] = {
        "modelstate.open": _ours(path),
        "modelstate.open + every shape": _our_shapes(path),
        "torch.load(mmap)": lambda: torch.load(path, mmap=True, weights_only=True),
        "safetensors safe_open + get_slice": _safe_open(path),
    }
    opener = openers[contender]
    stages = Stages()
    kept = opener()
    stages.end("ready", kept=len(str(type(kept))))


def _ours(path: str) -> Callable[[], object]:
    import modelstate as ms

    return lambda: ms.open(path)


def _our_shapes(path: str) -> Callable[[], object]:
    import modelstate as ms

    return lambda: {name: spec.shape for name, spec in ms.open(path).items()}


def _safe_open(path: str) -> Callable[[], object]:
    from safetensors import safe_open

    def work() -> dict[str, tuple[int, ...]]:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    return work


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
    from safetensors.torch import load_file, save_file

    stages = Stages()
    torch.manual_seed(0)
    state = {name: value + 1e-4 * torch.randn_like(value) for name, value in load_file(source).items()}
    save_file(state, target + ".safetensors")
    torch.save(state, target + ".pt")
    stages.end("written")


def diff(*, contender: str, a: str, b: str) -> None:
    """From two paths to how far their tensors are apart."""
    ways: dict[str, Callable[[], object]] = {
        "reading both files once": lambda: _read_both(a, b),
        "modelstate.diff": _our_diff(a, b),
        "two torch.load + a loop": lambda: _loop(a, b, mmap=False),
        "two torch.load(mmap) + a loop": lambda: _loop(a, b, mmap=True),
    }
    way = ways[contender]
    stages = Stages()
    found = way()
    stages.end("ready", kept=len(str(type(found))))


def _read_both(a: str, b: str) -> None:
    """Each file on a thread of its own, into one buffer again and again."""

    def read(path: str) -> None:
        buffer = bytearray(4 << 20)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, (a, b)))


def _our_diff(a: str, b: str) -> Callable[[], object]:
    import modelstate as ms

    ms.diff({"w": torch.ones(3)}, {"w": torch.zeros(3)})
    return lambda: ms.diff(a, b)


def _loop(a: str, b: str, *, mmap: bool) -> list[tuple[str, object]]:
    """The script that people write; it measures what `modelstate.diff` does, without the histogram of ULPs."""
    first, second = (torch.load(path, mmap=mmap, weights_only=True) for path in (a, b))
    found: list[tuple[str, object]] = []
    for name, x in first.items():
        y = second[name]
        d = (x - y).abs()
        measures = (
            *((x != y).float().mean(), d.max(), d.mean(), d.norm() / x.norm()),
            torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0),
            *(count for side in (x, y) for count in (side.isnan().sum(), side.isinf().sum())),
        )
        found.append((name, [float(value) for value in measures]))
    return found


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
