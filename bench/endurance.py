"""What a program that serves for a long time shows: torn answers, times of requests, swaps beside a copy, and memory.

`python -m bench.endurance` measures all kinds of programs in about half an hour and prints a table; `--write` puts it
into `bench/results/endurance.md`. `--requests`, `--seconds` and names of kinds make it shorter.
"""

import argparse
import gc
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import modelstate as ms
from bench import files, live
from bench.pages import InPage, Row

READERS, PERIOD_SECONDS = 3, 0.02
SWAPS, SIZED_SWAPS = 500, 12
ROUNDS, BLOCK_SECONDS = 10, 0.5

Cells = dict[str, str]
"""What is found of one kind of program, by the names of the rows."""


def torn(kind: str, requests: int, seconds: float) -> Cells:
    """Readers send requests while the weights are swapped every 20 ms. Weights of version k make every answer k."""
    module, x = live.Constant(2, 8), torch.ones(2, 8)
    program, ended, found = ms.Live(live.target_of(kind, module, x)), threading.Event(), list[live.Seen]()
    program(x)
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
    return {
        "torn answers": f"{seen.torn} of {seen.requests:,}",
        "answers of another version than they name; errors": f"{seen.mislabelled}; {seen.errors}",
        "swaps meanwhile": f"{swaps:,}",
    }


def latency(kind: str) -> Cells:
    """Times single requests of one thread, in blocks that take turns: alone, and beside another thread.

    A request reads one row of a table of 88 MB, and goes through eight linear layers of 8 x 8.

    Without the time for which a thread was ready and the processors ran other threads or processes, as far as the
    system says it.
    """
    module, x = _table_and_layers(), torch.zeros(1, dtype=torch.long)
    target = live.target_of(kind, module, x)
    bare, program = live._bare(kind, target, module, x), ms.Live(target)
    other = ms.Live(live.target_of(kind, _table_and_layers(), x))
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    copy = {name: torch.ones_like(value) for name, value in state.items()}
    bare(), program(x)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = _saved(state, folder)
        for _ in range(3):
            program.swap(path)
            other.swap(path)
        begun = time.thread_time()
        program.swap(path)
        swap_seconds = time.thread_time() - begun
        ways: dict[str, tuple[Callable[[], object], Callable[[], object] | None]] = {
            "the bare program": (bare, None),
            "`Live`": (lambda: program(x), None),
            "bare, beside copies of 88 MB": (bare, lambda: _copy(copy, state)),
            "bare, beside Python code that takes as long as a swap": (bare, lambda: _compute(swap_seconds)),
            "bare, beside swaps of another program": (bare, lambda: other.swap(path)),
            "`Live`, beside swaps of 88 MB": (lambda: program(x), lambda: program.swap(path)),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, (request, work) in ways.items():
                with _repeated(work):
                    found[name] += _timed(request)
    found = {name: sorted(seconds) for name, seconds in found.items()}
    p99 = {name: seconds[len(seconds) * 99 // 100] for name, seconds in found.items()}
    first, *_, last = found
    per_mille = [
        sum(each > 2 * p99[first] for each in found[name]) / len(found[name]) * 1e3 for name in ("`Live`", last)
    ]
    medians = [f"{found[name][len(found[name]) // 2] * 1e6:.1f}" for name in (first, "`Live`")]
    return {
        "median of a request: bare; `Live`": "; ".join(medians) + " us",
        **{f"p99 of a request: {name}": f"{seconds * 1e6:.0f} us" for name, seconds in p99.items()},
        "the last p99 beside the first": f"{p99[last] / p99[first]:.2f}",
        "processor time of a swap": f"{swap_seconds * 1e3:.1f} ms",
        "requests of 1,000 over twice the first p99: `Live` alone; beside swaps": "{:.1f}; {:.1f}".format(*per_mille),
    }


def _table_and_layers() -> nn.Module:
    return nn.Sequential(nn.Embedding(21 << 17, 8), *(nn.Linear(8, 8) for _ in range(8))).eval()


def _timed(request: Callable[[], object]) -> list[float]:
    """Returns the seconds of each request of a block, without the time in which the thread waited for a processor."""
    found, end = list[float](), time.perf_counter() + BLOCK_SECONDS
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    with path.open("rb", buffering=0) if path.exists() else open(os.devnull, "rb", buffering=0) as file:

        def delay() -> float:
            fields = os.pread(file.fileno(), 64, 0).split()
            return int(fields[1]) / 1e9 if fields else 0.0

        before = delay()
        while time.perf_counter() < end:
            begun = time.perf_counter()
            request()
            seconds = time.perf_counter() - begun
            after = delay()
            found.append(max(seconds - (after - before), 0.0))
            before = after
    return found


@contextmanager
def _repeated(work: Callable[[], object] | None) -> Iterator[None]:
    """Does some work in another thread every 20 ms."""
    ended = threading.Event()

    def run() -> None:
        while work is not None and not ended.wait(PERIOD_SECONDS):
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def sized_swaps(kind: str) -> Cells:
    """Swaps 88 MB from a safetensors file, beside a copy of the same bytes. The first two swaps are left out."""
    module, x = live.Matrices(21).eval(), torch.ones(4, 1024)
    program, ours, copies = ms.Live(live.target_of(kind, module, x)), list[float](), list[float]()
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    targets = {name: torch.ones_like(value) for name, value in state.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = _saved(state, folder)
        for _ in range(SIZED_SWAPS):
            copies.append(_seconds(lambda: _copy(targets, state)))
            ours.append(_seconds(lambda: program.swap(path)))
    swap, copy = statistics.median(ours[2:]), statistics.median(copies[2:])
    return {"a swap of 88 MB beside a copy": f"{swap * 1e3:.1f} ms / {copy * 1e3:.1f} ms = {swap / copy:.2f}"}


def memory(kind: str) -> Cells:
    """Swaps 500 times, and looks at the memory of the process, and at the versions that are alive."""
    module, x = live.Constant(), torch.ones(live.ROWS, live.WIDTH)
    program = ms.Live(live.target_of(kind, module, x), keep_versions=0)
    versions, sizes, most = list[weakref.ref[Any]](), list[str](), 0

    def alive() -> int:
        return sum(version() is not None for version in versions)

    def canary(version: Any) -> None:
        nonlocal most
        versions.append(weakref.ref(version))
        most = max(most, alive())

    for swap in range(SWAPS + 20):
        if swap in (20, SWAPS // 2, SWAPS + 19):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            sizes.append(f"{pages * resource.getpagesize() / 2**20:.0f}")
        program.swap(module.weights(swap), canary=canary)
        program(x)
    gc.collect()
    return {
        "memory after 20 swaps, after half of them, after 500 more": "; ".join(sizes) + " MiB",
        "versions alive: while a swap tries one; at the end": f"{most}; {alive()}",
    }


def _saved(state: dict[str, torch.Tensor], folder: str) -> Path:
    path = Path(folder, "weights.safetensors")
    ms.save(state, path)
    files.warm([path])
    return path


def _copy(targets: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    torch._foreach_copy_([*targets.values()], [*state.values()])


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


GOALS = {
    "torn answers": "0",
    "answers of another version than they name; errors": "0; 0",
    "the last p99 beside the first": "2",
    "a swap of 88 MB beside a copy": "0.5; aoti: 2",
    "memory after 20 swaps, after half of them, after 500 more": "the same",
    "versions alive: while a swap tries one; at the end": "2; 1",
}


def rows(kinds: Sequence[str], requests: int, seconds: float) -> list[Row]:
    """Measures, and returns the rows of the table: one for each measure, with a column for each kind of program."""
    found = list[Cells]()
    for kind in kinds:
        cells: Cells = {}
        for measure in (lambda kind: torn(kind, requests, seconds), latency, sized_swaps, memory):
            begun = time.monotonic()
            cells |= measure(kind)
            print(f"{kind}: {[*cells.items()][-1]}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        found.append(cells)
    return [(name, *(cells[name] for cells in found), GOALS.get(name, "")) for name in found[0]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints or writes the table of the kinds of programs that are given, all by default."""
    parser = argparse.ArgumentParser(prog="python -m bench.endurance", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"some of {', '.join(live.KINDS)}; all by default")
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of each kind while it is swapped")
    parser.add_argument("--seconds", type=float, default=600.0, help="at most for these requests of a kind")
    parser.add_argument("--write", action="store_true", help="put the table into bench/results/endurance.md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kinds = options.kinds or live.KINDS
    measured = partial(rows, kinds, options.requests, options.seconds)
    page, end = "bench/results/endurance.md", "<!-- End of the table -->"
    InPage(page, "endurance", end, ("", *kinds, "goal"), measured).show(options.write)


if __name__ == "__main__":
    main()
