"""Replaced methods of torch's classes, which come back whatever ends the need for them; the tree of modules."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError
from modelstate.torch_compat.modules import MethodOverride, Overrides


class Base:
    def value(self) -> int:
        return 1


class Owner(Base):
    def name(self) -> str:
        return "stock"


def louder(stock: Any, self: Any) -> str:
    return f"{stock(self)}!"


@pytest.fixture
def overrides() -> Overrides:
    return Overrides(
        MethodOverride(Owner, "name", louder), MethodOverride(Owner, "value", lambda stock, self: stock(self) + 1)
    )


def test_replaced_within_the_block_alone(overrides: Overrides) -> None:
    owner = Owner()
    with overrides.used(), overrides.used():
        assert (owner.name(), owner.value()) == ("stock!", 2)
    assert (owner.name(), owner.value()) == ("stock", 1)
    assert "value" not in vars(Owner)


def test_an_error_in_the_block_ends_it(overrides: Overrides) -> None:
    with pytest.raises(KeyboardInterrupt), overrides.used():
        raise KeyboardInterrupt
    assert Owner().name() == "stock"


@contextmanager
def used_by_another_thread(overrides: Overrides) -> Iterator[None]:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with overrides.used():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    yield
    leave.set()
    thread.join()


def test_replaced_until_the_last_thread_is_done(overrides: Overrides) -> None:
    with used_by_another_thread(overrides):
        with overrides.used():
            pass
        assert Owner().name() == "stock!"
    assert Owner().name() == "stock"


def test_replaced_while_it_holds() -> None:
    switch = [True]
    overrides = Overrides(MethodOverride(Owner, "name", louder), holds=lambda: switch[-1])
    overrides.update()
    assert Owner().name() == "stock!"
    with overrides.used():
        switch.append(False)
        overrides.update()
        assert Owner().name() == "stock!"
    assert Owner().name() == "stock"


def test_a_method_that_another_library_installs_meanwhile_stays() -> None:
    class Patched:
        def name(self) -> str:
            return "stock"

    patched: Any = Patched
    overrides = Overrides(MethodOverride(patched, "name", louder))
    with overrides.used():
        inner = patched.name
        patched.name = lambda self: f"their {inner(self)}"
        assert patched().name() == "their stock!"
    assert patched().name() == "their stock!"
    with overrides.used():
        assert patched().name() == "stock!", "the stock method is called, and never the replacement again"
    assert patched().name() == "their stock!"


def test_only_torchs_own_method_is_replaced_where_asked() -> None:
    overrides = Overrides(MethodOverride(Owner, "name", louder, over_others=False))
    with overrides.used():
        assert Owner().name() == "stock"


def test_a_module_that_contains_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    state = model.state_dict()
    model[1].parent = model
    with pytest.raises(OptionError, match=r"1\.parent(.|\n)*the model itself(.|\n)*set parent to a tuple"):
        ms.load(model, state)
    del model[1].parent
    model[1].own = model[1]
    with pytest.raises(OptionError, match=r"1\.own is 1"):
        ms.identity(model)
    del model[1].own
    model[1].parent = (model,)
    model.again = model[0]  # under two names, and not within itself
    ms.load(model, {**state, "again.weight": state["0.weight"], "again.bias": state["0.bias"]})
