"""Requests while weights are swapped: how many are torn, by the way in which new weights come in.

All weights of version k are k, and so is every element of a right answer.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import modelstate as ms
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


def live(kind: str, mode: Any, calls: int) -> tuple[Request, Swap]:
    module, x = Constant(), torch.ones(ROWS, WIDTH)
    served = ms.Live(target_of(kind, module, x))
    served(x)

    def request() -> tuple[int, torch.Tensor]:
        with served.pin() as v:
            return v.id, torch.cat([v(x) for _ in range(calls)])

    return request, lambda k: served.swap(module.weights(k), mode=mode)


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
    **{f"modelstate.Live, {kind}": partial(live, kind, "available", 1) for kind in KINDS},
    **{f"modelstate.Live, {kind}, 2 calls a request": partial(live, kind, "available", 2) for kind in KINDS},
    **{f"modelstate.Live, {kind}, mode='in_place'": partial(live, kind, "in_place", 1) for kind in KINDS},
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


def measured(way: str, seconds: float) -> None:
    torture(way, 0.05)  # so that nothing is compiled or imported later
    stages = Stages()
    seen, swaps = torture(way, seconds)
    stages.end("ready", **seen._asdict(), swaps=swaps)
