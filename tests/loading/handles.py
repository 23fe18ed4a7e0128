"""What tests of loads in the background have in common."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SOON = 60.0
"""Seconds in which everything here ends that does not hang."""


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("modelstate-load")]


def ended() -> bool:
    """Whether no thread of a load is left, after a while."""
    return eventually(lambda: not threads())


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + SOON
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


class Gate:
    """A transform that stops at its first tensor until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.names: list[str] = []
        self.threads: set[str] = set()

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.names.append(name)
        self.threads.add(threading.current_thread().name)
        self.reached.set()
        assert self.opened.wait(SOON)
        return tensor


EVER: list[Any] = []


class Watched(nn.Module):
    """Counts what its loading code is called for, looks at a value, and draws a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls: list[Any] = []
        self.register_load_state_dict_post_hook(Watched.hook)

    @staticmethod
    def hook(module: Any, _: Any) -> None:
        torch.rand(1)
        with torch.no_grad():
            module.layer.weight.mul_(2)

    def get_extra_state(self) -> Any:
        return {"n": 1}

    def set_extra_state(self, state: Any) -> None:
        self.calls.append(state)
        EVER.append(state)
