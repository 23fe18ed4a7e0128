"""Several threads: changes of one module, or of modules that share something, come one after the other."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate import errors

EVENTS: list[str] = []
"""What the threads of a test have done. It is no part of a module, so that nothing puts it back."""


@pytest.fixture(autouse=True)
def _no_events() -> None:
    EVENTS.clear()


class Slow(nn.Module):
    """A module whose loading code notes when it runs, and lets other threads run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.layer = nn.Linear(2, 2)
        self.__dict__["inside"] = threading.Event()

    def _pause(self) -> None:
        name = threading.current_thread().name
        EVENTS.append(f"{name} begins")
        self.inside.set()
        time.sleep(0.1)
        EVENTS.append(f"{name} ends")

    def _load_from_state_dict(self, *args: Any) -> None:
        self._pause()
        super()._load_from_state_dict(*args)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._pause()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def filled(value: float, module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(one, value) for name, one in module.state_dict().items()}


def in_background(module: nn.Module) -> None:
    ms.load(module, filled(2, module), background=True).result()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "load": lambda module: ms.load(module, filled(2, module)),
    "load in the background": in_background,
    "plan": lambda module: ms.plan(module, filled(2, module)),
    "load_state_dict": lambda module: ms.load_state_dict(module, filled(2, module)),
    "restore": lambda module: ms.restore({"m": module}, {"m": filled(2, module)}),
    "convert": lambda module: ms.convert(module, torch.float64),
    "to": lambda module: module.to(torch.float64),
}


def run(target: Callable[..., object], *args: Any, name: str) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            target(*args)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread, raised


def finish(*threads: tuple[threading.Thread, list[BaseException]]) -> list[BaseException]:
    for thread, _ in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    return [error for _, raised in threads for error in raised]


@pytest.mark.slow
@pytest.mark.parametrize("second", CHANGES)
@pytest.mark.parametrize("first", ["load", "convert"])
def test_a_second_change_of_a_module_waits_for_the_first(first: str, second: str) -> None:
    module = nn.Sequential(Slow())
    with ms.reference_keeping():
        one = run(CHANGES[first], module, name="first")
        assert module[0].inside.wait(60)
        other = run(CHANGES[second], module, name="second")
        assert finish(one, other) == []
    check_order()


def check_order() -> None:
    """The first thread has ended before the second has begun."""
    names = [event.split()[0] for event in EVENTS]
    assert {*names} == {"first", "second"}
    assert names == sorted(names)


def parts(case: str, module: Slow) -> nn.Module:
    other = Slow()
    if case == "a submodule":
        other.layer = module.layer
    elif case == "a parameter":
        other.weight = module.weight
    elif case == "memory":
        other.weight = nn.Parameter(module.weight.data[1:])
    elif case == "a part of it":
        other = nn.Sequential(module)  # type: ignore[assignment]
    return other


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a submodule", "a parameter", "memory", "a part of it"])
def test_modules_that_share_something(case: str) -> None:
    module = Slow()
    other = parts(case, module)
    one = run(CHANGES["load"], module, name="first")
    assert module.inside.wait(60)
    another = run(CHANGES["load"], other, name="second")
    assert finish(one, another) == []
    check_order()


def test_modules_that_share_nothing_do_not_wait() -> None:
    """A hook that waits for a thread which loads another module."""
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)

    def hook(*_: Any) -> None:
        assert finish(run(CHANGES["load"], other, name="other")) == []

    module.register_load_state_dict_post_hook(hook)
    ms.load(module, filled(3, module))
    assert torch.equal(other.weight, torch.full((2, 2), 2.0))


def test_a_load_within_a_load_of_the_same_thread() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.register_load_state_dict_post_hook(lambda *_: ms.load(module[1], filled(5, module[1])) and None)
    ms.load(module, filled(3, module))
    assert torch.equal(module[0].weight, torch.full((2, 2), 3.0))
    assert torch.equal(module[1].weight, torch.full((2, 2), 5.0))


@pytest.mark.slow
def test_a_load_that_fails_lets_the_next_one_go_on() -> None:
    module = Slow()
    one = run(ms.load, module, {"weight": torch.zeros(5)}, name="first")
    assert module.inside.wait(60)
    other = run(CHANGES["load"], module, name="second")
    (error,) = finish(one, other)
    assert isinstance(error, errors.PlanError)
    assert torch.equal(module.weight, torch.full((4,), 2.0))


def _load_in_child(path: Path) -> None:
    torch.set_num_threads(1)  # without it torch itself hangs, as every worker of a DataLoader would
    module = nn.Linear(300, 4000)
    ms.load(module, path, dtype=torch.bfloat16)
    assert module.weight.eq(1).all()


def test_a_cast_in_a_forked_process(tmp_path: Path) -> None:
    """The threads that torch used in the parent do not exist in the child."""
    module, path = nn.Linear(300, 4000), tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(4000, 300), "bias": torch.ones(4000)}, path)
    ms.load(module, path, dtype=torch.bfloat16)
    module(torch.ones(64, 300, dtype=torch.bfloat16))
    child = multiprocessing.get_context("fork").Process(target=_load_in_child, args=(path,))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0
