"""What forked workers cost: the memory of workers that share a `Live`, before and after each has swapped.

`python -m bench.forks --workers 4 --mb 400` prints a table. The memory is the proportional set size of Linux: a page
that n processes share counts 1/n in each.
"""

import argparse
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import modelstate as ms

WIDTH = 1024
_MB = 1e6


class Row(NamedTuple):
    """Memory of all processes together, in MB, when each worker has done as much."""

    done: str
    together_mb: float
    private_mb: float
    """Of this, what one worker alone has on average."""


def model(mb: float) -> nn.Module:
    """Returns a module on meta with about so many MB of weights."""
    with ms.skeleton():
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(round(mb * _MB / WIDTH**2 / 4))))


def measure(workers: int, mb: float, keep_versions: int = 1) -> list[Row]:
    """Forks workers from a process that has made a `Live`, and returns the memory after each of their steps."""
    torch.set_num_threads(1)  # threads of the parent do not exist in a fork
    with tempfile.TemporaryDirectory() as folder:
        path, state = Path(folder, "weights.safetensors"), model(mb).state_dict()
        _in_a_fork(lambda: ms.save({name: torch.ones(value.shape) for name, value in state.items()}, path))
        module = model(mb)
        ms.load(module, path, map=False)
        live = ms.Live(module, keep_versions=keep_versions)
        del module
        x = torch.ones(1, WIDTH)
        steps: list[tuple[str, Callable[[], object]]] = [
            ("the parent has forked", lambda: None),
            ("each worker has answered a request", lambda: live(x)),
            ("each worker has swapped once", lambda: live.swap(path)),
            ("each worker has swapped twice", lambda: live.swap(path)),
            ("each worker has swapped three times", lambda: live.swap(path)),
        ]
        children = [_fork([step for _, step in steps]) for _ in range(workers)]
        rows = []
        for name, _ in steps:
            for _, connection in children:
                connection.send(None)
            # A worker reports only when all have done the step, since they share pages.
            for _, connection in children:
                connection.recv()
            processes = [os.getpid(), *(process for process, _ in children)]
            memory = [_memory_mb(process) for process in processes]
            private = [alone for _, alone in memory[1:]]
            rows.append(Row(name, sum(share for share, _ in memory), sum(private) / workers))
        for process, connection in children:
            connection.send(None)
            os.waitpid(process, 0)
    return rows


def _in_a_fork(function: Callable[[], object]) -> None:
    """Calls a function in a process of its own, whose memory is gone afterwards."""
    process, connection = _fork([function])
    for _ in range(2):
        connection.send(None)
    os.waitpid(process, 0)


def _fork(steps: list[Callable[[], object]]) -> tuple[int, Connection]:
    """Starts a worker that does a step for each message, and ends at one more."""
    ours, theirs = Pipe()
    process = os.fork()
    if process:
        theirs.close()
        return process, ours
    ours.close()
    status = 1
    try:
        for step in steps:
            theirs.recv()
            step()
            theirs.send(None)
        theirs.recv()
        status = 0
    finally:
        os._exit(status)


def _memory_mb(process: int) -> tuple[float, float]:
    """The proportional set size of a process, and its private memory."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    kilobytes = {name: int(number) for name, number in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return kilobytes["Pss"] * 1024 / _MB, private * 1024 / _MB


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mb", type=float, default=400.0)
    arguments = parser.parse_args()
    for options in ({"keep_versions": 1}, {"keep_versions": 0}):
        print(", ".join(f"{name}={value}" for name, value in options.items()))
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rows = pool.submit(measure, arguments.workers, arguments.mb, **options).result()
        for row in rows:
            print(f"  {row.done:40} {row.together_mb:8,.0f} MB together, {row.private_mb:8,.0f} MB private to a worker")


if __name__ == "__main__":
    main()
