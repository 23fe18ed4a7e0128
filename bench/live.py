"""What a swap and a request cost, beside a copy of the weights and the bare call."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import modelstate as ms
from bench.measure import Stages
from bench.torture import aoti_package, target_of

MEMCPY = "memcpy of the weights"
STAGED, STAGED_FILE = "swap, {}: staging", "swap from a file, {}: staging"
FLIP, ROLLBACK = "swap, {}: all the rest", "rollback, {}"
BARE = {"exported": "ExportedProgram.module()", "aoti": "aoti_load_package(path)"}
MODULE = "the module"
LIVE, ANSWER, PINNED = "live(x), {}", "live.answer(x), {}", "with live.pin() as v: v(x), {}"
GRAPH = "the lifted graph alone"
_WARM, _SWAPS, _ROUNDS, _CALLS = 3, 5, 40, 50


class Matrices(nn.Module):
    """100 MB as 24 matrices of 1024 x 1024, unless told otherwise."""

    def __init__(self, count: int = 24, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(width, width) / width) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(x @ layer)
        return x


def swap(kind: str, count: int, width: int) -> None:
    """Each the median of some swaps, between which the weights are copied into memory that is there.

    The swaps before those take new memory; later ones use that of versions that have been dropped.
    """
    module, x = Matrices(count, width).eval(), torch.ones(4, width)
    live = ms.Live(target_of(kind, module, x))
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    copies = [torch.ones_like(value) for value in state.values()]
    nbytes = sum(value.nbytes for value in copies)
    found: dict[str, list[float]] = {}
    stages = Stages()
    with TemporaryDirectory() as directory:
        path = Path(directory) / "weights.safetensors"
        ms.save(state, path)
        path.read_bytes()  # a save passes the page cache
        for source, staged in ((state, STAGED), (path, STAGED_FILE)):
            for _ in range(_WARM):
                live.swap(source)
            for _ in range(_SWAPS):
                begun = time.perf_counter()
                torch._foreach_copy_(copies, list(state.values()))
                found.setdefault(MEMCPY, []).append(time.perf_counter() - begun)
                report = live.swap(source)
                found.setdefault(staged.format(kind), []).append(report.staged_seconds)
                found.setdefault(FLIP.format(kind), []).append(report.seconds - report.staged_seconds)
    for _ in range(_SWAPS):
        begun = time.perf_counter()
        live.rollback()
        found.setdefault(ROLLBACK.format(kind), []).append(time.perf_counter() - begun)
        live.swap(state)
    for name, seconds in found.items():
        stages.end(name, seconds=statistics.median(seconds), nbytes=nbytes)


def request(kind: str) -> None:
    """A call of a model so small that what is around it shows: each way in turn, for some rounds."""
    torch.set_num_threads(1)
    module, x = Matrices(4, 8).eval(), torch.ones(2, 8)
    target = target_of(kind, module, x)
    live = ms.Live(target)

    def pinned() -> None:
        with live.pin() as v:
            v(x)

    ways: dict[str, Callable[[], Any]] = {
        BARE.get(kind, MODULE): _bare(kind, target, module, x),
        LIVE.format(kind): lambda: live(x),
        ANSWER.format(kind): lambda: live.answer(x),
        PINNED.format(kind): pinned,
    }
    if kind == "exported":
        weights = [parameter.detach() for parameter in module.parameters()]
        ways[GRAPH] = lambda: target.graph_module.forward(*weights, x)
    found: dict[str, list[float]] = {name: [] for name in ways}
    stages = Stages()
    with torch.no_grad():
        for at in range(_ROUNDS + 1):
            for name, call in ways.items():
                begun = time.perf_counter()
                for _ in range(_CALLS):
                    call()
                if at:
                    found[name].append((time.perf_counter() - begun) / _CALLS)
    for name, seconds in found.items():
        stages.end(name, seconds=statistics.median(seconds), nbytes=0)


def _bare(kind: str, target: Any, module: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    if kind == "aoti":
        target = aoti_package(str(target))
        target.load_constants(
            {name: value.detach() for name, value in module.named_parameters()}, check_full_update=True
        )
    call = target.module() if kind == "exported" else target
    return lambda: call(x)
