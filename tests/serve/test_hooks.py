"""`without_state_dict_hooks`: all asleep within, all back afterwards."""

import copy
import threading
from typing import Any

import pytest
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


def test_everything_is_put_back_after_an_exception() -> None:
    module = Nested()
    before = tables(module)
    with pytest.raises(KeyError), ms.serve.without_state_dict_hooks(module):
        raise KeyError
    assert tables(module) == before


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
