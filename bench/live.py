"""What is measured of programs that serve.

Requests while weights are swapped: how many are torn, by the way in which new weights come in. All weights of version k
are k, and so is every element of a right answer. Then what a swap and a request cost, beside a copy of the weights and
the bare call."""

import mmap
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn

import modelstate as ms
from bench import files
from bench.measure import Stages

READERS = 4
PERIOD_SECONDS = 0.02
LAYERS, WIDTH, ROWS = 8, 128, 32

Request = Callable[[], tuple[int, torch.Tensor]]
"""What a reader does: the version that has answered, -1 where nothing is known of versions, and the answer."""
Swap = Callable[[int], object]
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
_PACKAGES: dict[tuple[object, ...], Path] = {}
"""Compiled programs, by the class of the module, and the shapes of its input and weights."""


class Constant(nn.Module):
    """Answers k everywhere where all of its weights are k, and something else where they are not."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.ones(width, width)) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x @ layer) / layer.shape[0] for layer in self.layers])

    def weights(self, k: float) -> dict[str, torch.Tensor]:
        return {name: torch.full_like(value, k) for name, value in self.state_dict().items()}


def target_of(kind: str, module: nn.Module, x: torch.Tensor) -> Any:
    """What is served of a module."""
    module.eval()
    if kind == "aoti":
        key = (type(module), x.shape, *(param.shape for param in module.parameters()))
        if key not in _PACKAGES:
            path = _folder() / "program.pt2"
            ms.export(module, (x,), path, kind="aoti")
            _PACKAGES[key] = path
        return _PACKAGES[key]
    if kind == "compiled":
        return torch.compile(module, backend="aot_eager")
    return torch.export.export(module, (x,)) if kind == "exported" else module


def _folder() -> Path:
    """For a package. It is there until the process ends."""
    made = tempfile.TemporaryDirectory(prefix="modelstate-bench-")
    _FOLDERS.append(made)
    return Path(made.name)


def aoti_package(path: str) -> Any:
    """As torch loads it: without weights, which have to come in before it is called."""
    return torch._inductor.aoti_load_package(path)


def live_program(kind: str, calls: int) -> tuple[Request, Swap]:
    module, x = Constant(), torch.ones(ROWS, WIDTH)
    served = ms.Live(target_of(kind, module, x))
    served(x)

    def request() -> tuple[int, torch.Tensor]:
        with served.version() as v:
            return v.id, torch.cat([v(x) for _ in range(calls)])

    return request, lambda k: served.swap(module.weights(k))


def in_place(assign: bool) -> tuple[Request, Swap]:
    module, x = Constant(), torch.ones(ROWS, WIDTH)
    return lambda: (-1, module(x)), lambda k: module.load_state_dict(module.weights(k), assign=assign)


def functional() -> tuple[Request, Swap]:
    """One module for all threads, and the weights of each request in a dict of its own."""
    module, x = Constant(), torch.ones(ROWS, WIDTH)
    current = [module.weights(1)]

    def request() -> tuple[int, torch.Tensor]:
        return -1, torch.func.functional_call(module, current[0], (x,))

    return request, lambda k: current.__setitem__(0, module.weights(k))


def load_constants(calls: int) -> tuple[Request, Swap]:
    """AOTInductor's own way: all weights at once, into the package that answers."""
    module, x = Constant(), torch.ones(ROWS, WIDTH)
    package = aoti_package(str(target_of("aoti", module, x)))

    def swap(k: int) -> None:
        package.load_constants(module.weights(k), check_full_update=True)

    swap(1)
    return lambda: (-1, torch.cat([package(x) for _ in range(calls)])), swap


KINDS = ("eager", "compiled", "exported", "aoti")
STOCK: dict[str, Callable[[], tuple[Request, Swap]]] = {
    "load_state_dict, in place": partial(in_place, False),
    "load_state_dict, assign=True": partial(in_place, True),
    "functional_call, one module for all threads": functional,
    "AOTInductor, load_constants": partial(load_constants, 1),
    "AOTInductor, load_constants, 2 calls a request": partial(load_constants, 2),
}
WAYS: dict[str, Callable[[], tuple[Request, Swap]]] = {
    **{f"modelstate.Live, {kind}": partial(live_program, kind, 1) for kind in KINDS},
    **{f"modelstate.Live, {kind}, 2 calls a request": partial(live_program, kind, 2) for kind in KINDS},
    **STOCK,
}
OURS = tuple(name for name in WAYS if name not in STOCK)


class Seen(NamedTuple):
    """What readers have met, all of them together."""

    requests: int = 0
    torn: int = 0
    """Answers with elements of several versions."""
    mislabelled: int = 0
    """Answers that are not those of the version that they name."""
    back: int = 0
    """Answers of an older version than the same reader has had before."""
    errors: int = 0


def read(request: Request, ended: threading.Event) -> Seen:
    requests = torn = mislabelled = back = errors = last = 0
    while not ended.is_set():
        requests += 1
        try:
            version, answer = request()
        except Exception:
            errors += 1
            continue
        low, high = answer.aminmax()
        torn += bool(low != high)
        mislabelled += version >= 0 and bool(low != version)
        back += 0 <= version < last
        last = max(version, 0)
    return Seen(requests, torn, mislabelled, back, errors)


def torture(way: str, seconds: float) -> tuple[Seen, int]:
    """Four readers, and a swap every 20 ms. Returns what they have seen, and how many swaps there were."""
    torch.set_num_threads(1)
    request, swap = WAYS[way]()
    ended, found, swaps = threading.Event(), list[Seen](), 0
    threads = [threading.Thread(target=lambda: found.append(read(request, ended))) for _ in range(READERS)]
    with torch.no_grad():
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            swaps += 1
            swap(swaps + 1)
            time.sleep(PERIOD_SECONDS)
        ended.set()
        for thread in threads:
            thread.join()
    return Seen(*map(sum, zip(*found, strict=True))), swaps


def measure_torn(*, contender: str, seconds: float) -> None:
    """Requests while weights are swapped."""
    torture(contender, 0.05)  # so that nothing is compiled or imported later
    stages = Stages()
    seen, swaps = torture(contender, seconds)
    stages.end("ready", **seen._asdict(), swaps=swaps)


MEMCPY, READ = "memcpy of the weights", "reading the file into memory that is there"
STAGED, STAGED_FILE = "swap, {}: staging", "swap from a file, {}: staging"
FLIP, ROLLBACK = "swap, {}: all the rest", "rollback, {}"
BARE = {"exported": "ExportedProgram.module()", "aoti": "aoti_load_package(path)"}
MODULE = "the module"
LIVE, ANSWER, PINNED = "live(x), {}", "live.answer(x), {}", "with live.version() as v: v(x), {}"
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


def measure_swaps(*, kind: str, count: int, width: int) -> None:
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
        files.warm([path])  # a save passes the page cache
        # At the beginning of a page, as the file is: 8 bytes behind it, the kernel's copy takes four times as long.
        buffer = mmap.mmap(-1, path.stat().st_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.write(path.read_bytes())
        for source, staged in ((state, STAGED), (path, STAGED_FILE)):
            for _ in range(_WARM):
                live.swap(source)
            for _ in range(_SWAPS):
                begun = time.perf_counter()
                torch._foreach_copy_(copies, list(state.values()))
                found.setdefault(MEMCPY, []).append(time.perf_counter() - begun)
                begun = time.perf_counter()
                with open(path, "rb", buffering=0) as file:
                    file.readinto(buffer)
                found.setdefault(READ, []).append(time.perf_counter() - begun)
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


def measure_requests(*, kind: str) -> None:
    """A call of a model so small that what is around it shows: each way in turn, for some rounds."""
    torch.set_num_threads(1)
    module, x = Matrices(4, 8).eval(), torch.ones(2, 8)
    target = target_of(kind, module, x)
    live = ms.Live(target)

    def pinned() -> None:
        with live.version() as v:
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
