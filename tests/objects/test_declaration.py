"""What is declared wrongly is refused at once."""

from typing import Any

import pytest
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.objects.nets import Net, Own, Plain

# What is declared wrongly, at once.


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "no names": ((), {}),
    "no parentheses": ((Plain,), {}),
    "a list of names": ((["p", "q"],), {}),
    "a name twice": (("p", "p"), {}),
    "no identifier": (("a.b",), {}),
    "an empty name": (("",), {}),
    "a private one of Python's": (("__dict__",), {}),
    "optional by name": (("p",), {"optional": ["p"]}),
    "version 0": (("p",), {"version": 0}),
    "version 1.0": (("p",), {"version": 1.0}),
    "version True": (("p",), {"version": True}),
    "a default for another name": (("p",), {"defaults": {"q": 1}}),
    "defaults that are no mapping": (("p",), {"defaults": ["p"]}),
    "an upgrade that is no function": (("p",), {"upgrade": 3}),
}


@pytest.mark.parametrize(("names", "options"), WRONG.values(), ids=WRONG)
def test_arguments_that_mean_nothing(names: Any, options: Any) -> None:
    with pytest.raises(errors.OptionError):
        ms.extra_state(*names, **options)
    cls = type("Mine", (nn.Module,), {})
    with pytest.raises(errors.OptionError):
        ms.declare_extra_state(cls, *names, **options)
    assert not [name for name in vars(cls) if "state" in name]


@pytest.mark.parametrize("cls", [int, nn.Module, 3, None, Plain(), dict], ids=repr)
def test_what_is_no_class_of_modules(cls: Any) -> None:
    with pytest.raises(errors.OptionError, match=r"subclass of torch\.nn\.Module"):
        ms.extra_state("p")(cls)
    with pytest.raises(errors.OptionError, match=r"subclass of torch\.nn\.Module"):
        ms.declare_extra_state(cls, "p")


@pytest.mark.parametrize("half", ["get_extra_state", "set_extra_state"])
def test_half_of_the_methods(half: str) -> None:
    cls = type("Half", (Plain,), {half: vars(Own)[half]})
    with pytest.raises(errors.OptionError, match=half):
        ms.declare_extra_state(cls, "p")


def test_a_name_of_a_base_class() -> None:
    with pytest.raises(errors.OptionError, match="a base class has declared"):
        ms.declare_extra_state(type("Again", (Net,), {}), "epoch")
