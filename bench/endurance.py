"""What a program that serves for a long time shows: torn requests, memory, swaps beside a copy, and request times.

`python -m bench.endurance --requests 250000 --seconds 120 eager exported` prints a line for each measure and kind of
program. A kind stops at the number of requests, or at the number of seconds.
"""

import argparse
import gc
import os
import resource
import statistics
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import modelstate as ms
from bench import files, live

READERS, PERIOD_SECONDS = 3, 0.02
SWAPS, SIZED_SWAPS, CALLS = 500, 12, 20_000
LAYERS, WIDTH = 8, 8


def served(kind: str, module: nn.Module, x: torch.Tensor, **options: Any) -> ms.Live:
    """Returns a `Live` of one kind of program, which has answered once."""
    program = ms.Live(live.target_of(kind, module, x), **options)
    program(x)
    return program


def torn(kind: str, requests: int, seconds: float) -> str:
    """Readers send requests while the weights are swapped every 20 ms. Weights of version k make every answer k."""
    module, x = live.Constant(LAYERS, WIDTH), torch.ones(2, WIDTH)
    program, ended, found = served(kind, module, x), threading.Event(), list[live.Seen]()
    counts = [0] * READERS

    def read(place: int) -> None:
        def request() -> tuple[int, torch.Tensor]:
            counts[place] += 1
            value, version = program.answer(x)
            return version, value

        found.append(live.read(request, ended))

    threads = [threading.Thread(target=read, args=(place,)) for place in range(READERS)]
    end, swaps = time.monotonic() + seconds, 0
    with torch.no_grad():
        for thread in threads:
            thread.start()
        while sum(counts) < requests and time.monotonic() < end:
            swaps += 1
            program.swap(module.weights(swaps + 1))
            time.sleep(PERIOD_SECONDS)
        ended.set()
        for thread in threads:
            thread.join()
    seen = live.Seen(*map(sum, zip(*found, strict=True)))
    return f"{seen.torn} of {seen.requests} torn, {seen.mislabelled} mislabelled, {seen.errors} errors, {swaps} swaps"


def memory(kind: str) -> str:
    """Swaps 500 times, and shows the memory of the process at each hundredth swap, and the versions that are alive."""
    module, x = live.Constant(), torch.ones(live.ROWS, live.WIDTH)
    program, sizes = served(kind, module, x, keep_versions=0), list[str]()
    versions: list[weakref.ref[nn.Module]] = []
    for swap in range(1, SWAPS + 1):
        program.swap(module.weights(swap))
        versions.append(weakref.ref(program._versions[-1].module))
        program(x)
        if swap % 100 == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            sizes.append(f"{pages * resource.getpagesize() / 2**20:.0f}")
    gc.collect()
    alive = sum(version() is not None for version in versions)
    return f"{', '.join(sizes)} MiB after 100, 200, ... swaps; {alive} of {SWAPS} versions alive"


def sized_swaps(kind: str) -> str:
    """Swaps 88 MB from a safetensors file, beside a copy of the same bytes. The first two swaps are left out."""
    module, x = live.Matrices(21).eval(), torch.ones(4, 1024)
    program, ours, copies = served(kind, module, x), list[float](), list[float]()
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    targets = [torch.ones_like(value) for value in state.values()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.safetensors")
        ms.save(state, path)
        files.warm([path])
        for _ in range(SIZED_SWAPS):
            copies.append(_seconds(lambda: torch._foreach_copy_(targets, list(state.values()))))
            ours.append(_seconds(lambda: program.swap(path)))
    swap, copy = statistics.median(ours[2:]), statistics.median(copies[2:])
    return f"swap {swap * 1e3:.1f} ms, copy {copy * 1e3:.1f} ms: {swap / copy:.2f}x"


def latency(kind: str) -> str:
    """Times single requests beside the bare program: alone, and while another thread swaps every 20 ms."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).eval()
    x, other = torch.ones(1, WIDTH), {name: value.clone() for name, value in module.state_dict().items()}
    target = live.target_of(kind, module, x)
    bare, program, ended = live._bare(kind, target, module, x), ms.Live(target), threading.Event()

    def swaps() -> None:
        while not ended.wait(PERIOD_SECONDS):
            program.swap(other)

    thread = threading.Thread(target=swaps)
    with torch.no_grad():
        before = [(_seconds(bare), _seconds(lambda: program(x))) for _ in range(CALLS)][CALLS // 10 :]
        thread.start()
        during = [(_seconds(bare), _seconds(lambda: program(x))) for _ in range(CALLS)]
        ended.set()
        thread.join()
    columns = [sorted(column) for rows in (before, during) for column in zip(*rows, strict=True)]
    names = ("bare", "live", "bare, while it is swapped", "live, while it is swapped")
    return "; ".join(
        f"{name}: p50 {column[len(column) // 2] * 1e6:.1f}, p99 {column[len(column) * 99 // 100] * 1e6:.1f} us"
        for name, column in zip(names, columns, strict=True)
    )


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> None:
    """Prints the measures of the kinds of programs that are given, all by default."""
    parser = argparse.ArgumentParser(prog="python -m bench.endurance", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"some of {', '.join(live.KINDS)}; all by default")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for kind in options.kinds or live.KINDS:
        measures = {
            "latency": latency,
            "swaps of 88 MB": sized_swaps,
            "memory": memory,
            "torn": lambda kind: torn(kind, options.requests, options.seconds),
        }
        for name, measure in measures.items():
            print(f"{kind}, {name}: {measure(kind)} (load {os.getloadavg()[0]:.1f})", flush=True)


if __name__ == "__main__":
    main()
