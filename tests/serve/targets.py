"""Every kind of target, and readers that serve while it is swapped."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.serve.models import linear
from tests.serve.packages import linear_package, package_of

AOTI = pytest.param("aoti", marks=pytest.mark.slow)
"""Compiling a package takes seconds."""
KINDS = ("eager", "compiled", "exported", AOTI)


def target_of(
    kind: str, module: nn.Module, *inputs: torch.Tensor, training: bool = False, **named: torch.Tensor
) -> Any:
    """What is served of a module for inputs like these. It is put into eval mode unless `training` is given."""
    module.train(training)
    if kind == "eager":
        return module
    if kind == "compiled":
        return torch.compile(module, backend="aot_eager")
    if kind == "aoti":
        return package_of(module, *inputs, **({"kwargs": named} if named else {}))
    return torch.export.export(module, inputs, named)


def linear_target(kind: str) -> Any:
    """What is served of `linear(1)` for inputs of 3 x 4; its package is that of many tests."""
    return linear_package() if kind == "aoti" else target_of(kind, linear(1), torch.ones(3, 4))


def module_of(live: ms.Live) -> nn.Module:
    """The tensors of the version that serves."""
    return live._versions[-1].module


def buffer_of(live: ms.Live, name: str) -> torch.Tensor:
    return module_of(live).get_buffer(name)


class Readers:
    """Threads that send requests, and look at each answer."""

    def __init__(self, request: Callable[[], tuple[int, torch.Tensor]], count: int = 4) -> None:
        self._request = request
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.requests = 0
        self.torn = 0
        self.wrong_version = 0
        self.went_back = 0
        self.errors: list[str] = []
        self.seen: set[int] = set()
        self._counts = [0] * count
        self._threads = [threading.Thread(target=self._read, args=(at,), daemon=True) for at in range(count)]

    def _read(self, at: int) -> None:
        requests = torn = wrong = back = last = 0
        seen: set[int] = set()
        try:
            while not self._ended.is_set():
                version, answer = self._request()
                self._counts[at] = requests = requests + 1
                low, high = answer.aminmax()
                torn += bool(low != high)
                # Version k has the weights k; -1 where the mechanism knows of no versions.
                wrong += version >= 0 and bool(low != version)
                back += version >= 0 and version < last
                last = version
                seen.add(version)
        except BaseException as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        with self._lock:
            self.requests += requests
            self.torn += torn
            self.wrong_version += wrong
            self.went_back += back
            self.seen |= seen

    @property
    def made(self) -> int:
        """The requests that have been made so far."""
        return sum(self._counts)

    def wait_for_one_each(self, seconds: float = 30) -> None:
        """Until every reader has begun and ended one more request. Raises `TimeoutError`."""
        wanted, until = [count + 2 for count in self._counts], time.monotonic() + seconds
        while not self.errors and any(count < want for count, want in zip(self._counts, wanted, strict=True)):
            if time.monotonic() > until:
                raise TimeoutError(f"readers have made {self._counts} requests, and {wanted} were waited for")
            time.sleep(0.001)

    @contextmanager
    def running(self) -> Iterator["Readers"]:
        with torch.no_grad():
            for thread in self._threads:
                thread.start()
            try:
                yield self
            finally:
                self._ended.set()
                for thread in self._threads:
                    thread.join(60)
