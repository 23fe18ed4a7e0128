"""`without_state_dict_hooks`: all asleep within, all back afterwards."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import modelstate as ms
from tests.serve.models import Decoder, Nested

TABLES = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def tables(module: nn.Module) -> list[list[tuple[int, Any]]]:
    """Every hook of every submodule, with its id, in order."""
    return [list(getattr(one, name).items()) for one in module.modules() for name in TABLES]


def hooked(calls: list[str]) -> nn.Module:
    """A module that takes down which of its hooks are called."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for path, one in module.named_modules():
        one.register_state_dict_pre_hook(lambda *_, path=path: calls.append(f"{path} before saving"))
        one.register_state_dict_post_hook(lambda *_, path=path: calls.append(f"{path} after saving"))
        one._register_state_dict_hook(lambda *_, path=path: calls.append(f"{path} after saving, old"))
        one.register_load_state_dict_pre_hook(lambda *_, path=path: calls.append(f"{path} before loading"))
        one.register_load_state_dict_post_hook(lambda *_, path=path: calls.append(f"{path} after loading"))
    return module


def test_no_hook_of_any_kind_is_called_at_any_depth() -> None:
    calls: list[str] = []
    module = hooked(calls)
    before = tables(module)
    with ms.serve.without_state_dict_hooks(module):
        module.load_state_dict(module.state_dict())
        assert not calls
    assert tables(module) == before
    module.load_state_dict(module.state_dict())
    assert len(calls) == 5 * len(list(module.modules()))


@pytest.mark.parametrize("make", [Decoder, Nested, lambda: Decoder(times=2)])
def test_the_state_dict_within_has_the_runtime_names(make: Callable[[], nn.Module]) -> None:
    module = make()
    assert list(module.state_dict()) != list(ms.serve.runtime_state(module))
    with ms.serve.without_state_dict_hooks(module):
        assert module.state_dict().keys() == ms.serve.runtime_state(module).keys()


def test_everything_is_put_back_after_an_exception() -> None:
    module = Nested()
    before = tables(module)
    with pytest.raises(KeyError), ms.serve.without_state_dict_hooks(module):
        raise KeyError
    assert tables(module) == before


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=8))
@settings(deadline=None, max_examples=60)
def test_handles_work_within(places: list[int], actions: list[tuple[bool, int]]) -> None:
    """Whatever is removed and registered within the block, the hooks are then those that they would be without it."""
    results = []
    for context in (True, False):
        module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        modules = list(module.modules())
        numbers: dict[int, int] = {}
        handles = []

        def register(place: int, modules=modules, handles=handles, numbers=numbers) -> None:  # type: ignore[no-untyped-def]
            handles.append(modules[place % 3].register_state_dict_pre_hook(lambda *_: None))
            numbers[handles[-1].id] = len(numbers)

        for place in places:
            register(place)
        manager = ms.serve.without_state_dict_hooks(module) if context else torch.no_grad()
        with manager:
            for removes, number in actions:
                if removes and handles:
                    handles[number % len(handles)].remove()
                elif not removes:
                    register(number)
        for handle in handles[::3]:
            handle.remove()
        results.append([[numbers[key] for key, _ in table] for table in tables(module)])
        assert not any("Asleep" in repr(hook) for table in tables(module) for _, hook in table)
    assert results[0] == results[1]


def test_a_hook_registered_within_works_at_once_and_stays() -> None:
    calls: list[str] = []
    module = hooked(calls)
    with ms.serve.without_state_dict_hooks(module):
        module.register_state_dict_pre_hook(lambda *_: calls.append("new"))
        module.state_dict()
    assert calls == ["new"]
    calls.clear()
    module.state_dict()
    assert "new" in calls


def test_blocks_may_be_nested_and_entered_by_several_threads() -> None:
    module = Decoder()
    before, names = tables(module), list(ms.serve.runtime_state(module))
    with ms.serve.without_state_dict_hooks(module):
        with ms.serve.without_state_dict_hooks(module.layers[1]):
            assert list(module.state_dict()) == names
        assert list(module.state_dict()) == names
    assert tables(module) == before

    # The block that began first ends first.
    began, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with ms.serve.without_state_dict_hooks(module):
            began.set()
            may_end.wait(60)

    thread = threading.Thread(target=other)
    with ms.serve.without_state_dict_hooks(module):
        thread.start()
        began.wait(60)
    assert list(module.state_dict()) == names
    may_end.set()
    thread.join()
    assert tables(module) == before


def test_a_copy_made_within_has_its_hooks_awake() -> None:
    module = Decoder()
    with ms.serve.without_state_dict_hooks(module):
        made = copy.deepcopy(module)
    assert list(made.state_dict()) == list(module.state_dict())
    assert list(made.state_dict()) != list(ms.serve.runtime_state(made))


def test_many_threads_leave_nothing_behind() -> None:
    module = Decoder()
    before = tables(module)

    def work() -> None:
        for _ in range(200):
            with ms.serve.without_state_dict_hooks(module):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tables(module) == before
