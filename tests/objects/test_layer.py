"""Layers of extra state: bad input, versions, inheritance. An error leaves the module as it was."""

from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.objects.nets import Load, Net, Own, Plain, Required, Two, deep, refused, saved_as, stock, with_values

# Bad input. Through torch as through us, an error leaves the module as it was.


def test_names_that_are_missing_or_too_many() -> None:
    state = {"weight": torch.zeros(2)}
    found = errors.ExtraStateError
    refused(found, Two(), {**state, "_extra_state": saved_as(p=3)}, "'epoch'", "upgrade=")
    refused(found, Two(), {**state, "_extra_state": saved_as(p=3, epoch=1, extra=1)}, "'extra', which nothing declares")
    with pytest.raises(found) as caught:
        Two().load_state_dict({**state, "_extra_state": saved_as(p=3, q=1)})
    assert caught.value.names == ("epoch", "q")


def test_the_error_says_where() -> None:
    state = deep(Two()).state_dict()
    del state["0.body.1._extra_state"]["values"]["p"]
    with pytest.raises(errors.ExtraStateError) as caught:
        deep(Two()).load_state_dict(state)
    assert caught.value.where == "0.body.1._extra_state: Two"


NONSENSE: dict[str, Any] = {
    "a number": 3,
    "a list": [1, 2],
    "what somebody has written": {"p": 1, "epoch": 2},
    "no format": {"version": 1, "values": {"p": 1, "epoch": 2}},
    "a strange format": {"modelstate": "1", "class": "Two", "version": 1, "values": {}},
    "no version": {"modelstate": 1, "class": "Two", "values": {}},
    "version 1.0": {"modelstate": 1, "class": "Two", "version": 1.0, "values": {"p": 1, "epoch": 2}},
    "names that are numbers": {"modelstate": 1, "class": "Two", "version": 1, "values": {1: 2}},
    "a base that is none": {**saved_as("Two", p=1, epoch=2), "base": {"a": 1}},
}


@pytest.mark.parametrize("value", NONSENSE.values(), ids=NONSENSE)
def test_nonsense(value: Any) -> None:
    refused(
        errors.ExtraStateError, Two(), {"weight": torch.zeros(2), "_extra_state": value}, "no extra state of the class"
    )


def test_a_value_that_has_no_encoding() -> None:
    with pytest.raises(errors.CodecError, match=r"Net\['p'\]\[1\]"):
        with_values(Net(), p=[1, object()]).state_dict()


def test_what_an_empty_dict_stands_for() -> None:
    """It is what people put into old state dicts, so that torch calls `set_extra_state` at all."""
    state = {"weight": torch.zeros(2), "_extra_state": {}}
    model = Two()
    for one in (stock, ms.load_state_dict, ms.load):
        one(model, state)
        assert model.epoch == 1
    refused(errors.ExtraStateError, Required(), state, "from before the declaration", "'p'", "optional=True")


def test_a_later_format() -> None:
    value = {"modelstate": 2, "class": "Two", "anything": 1}
    refused(errors.ExtraStateError, Two(), {"weight": torch.zeros(2), "_extra_state": value}, "upgrade modelstate")


# Versions.


def versioned(upgrade: Any, version: int = 3, base: type[nn.Module] = Plain, **more: Any) -> nn.Module:
    body = {"p": "as built", "epoch": -1, **more}
    made = ms.extra_state("p", "epoch", version=version, upgrade=upgrade)(type("Versioned", (base,), body))
    return made()


def state_of(version: int, **values: Any) -> dict[str, Any]:
    return {"weight": torch.zeros(2), "_extra_state": saved_as("Versioned", version, **values)}


def test_an_older_version_is_upgraded(load: Load) -> None:
    calls: list[Any] = []

    def upgrade(old: int, values: dict[str, Any]) -> dict[str, Any]:
        calls.append((old, dict(values)))
        return {"p": values.pop("q"), "epoch": old}

    model = versioned(upgrade)
    load(model, state_of(2, q=[1, 2]))
    assert (model.p, model.epoch) == ([1, 2], 2)
    assert all(call == (2, {"q": [1, 2]}) for call in calls)
    calls.clear()
    load(model, state_of(3, p=1, epoch=9))
    assert not calls


def test_what_somebody_has_written_is_version_0(load: Load) -> None:
    """The way from a `get_extra_state` written by hand to a declaration."""
    tensor = torch.arange(3.0)
    model = versioned(lambda old, values: {"p": values["old_p"], "epoch": old})
    load(model, {"weight": torch.zeros(2), "_extra_state": {"old_p": tensor}})
    assert model.epoch == 0
    model.p.add_(1)
    assert torch.equal(tensor, torch.arange(3.0))


def raising(old: int, values: dict[str, Any]) -> dict[str, Any]:
    values.clear()
    raise KeyError("it has no such thing")


def test_versions_that_nothing_takes() -> None:
    refused(errors.ExtraStateError, versioned(None), state_of(4, p=1, epoch=1), "newer", "version 4", "code that")
    refused(errors.ExtraStateError, versioned(None), state_of(2, p=1, epoch=1), "version 2", "upgrade=")
    never = versioned(lambda old, values: pytest.fail("a newer version is not upgraded"))
    refused(errors.ExtraStateError, never, state_of(4, p=1, epoch=1), "newer version")


def test_an_upgrade_that_raises() -> None:
    refused(errors.ExtraStateError, versioned(raising), state_of(2, p=1), "raised for version 2", "no such thing")
    with pytest.raises(errors.ExtraStateError) as caught:
        versioned(raising).load_state_dict(state_of(2, p=1))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(errors.PlanError) as raised:
        ms.load(versioned(raising), state_of(2, p=1))
    assert isinstance(raised.value.__cause__, errors.ExtraStateError)
    assert isinstance(raised.value.__cause__.__cause__, KeyError)


@pytest.mark.parametrize("returned", [None, [1], {1: 2}])
def test_an_upgrade_that_returns_no_values(returned: Any) -> None:
    refused(
        errors.ExtraStateError, versioned(lambda old, values: returned), state_of(2, p=1), "returned something else"
    )


# Inheritance, and methods that are there already.


@ms.extra_state("momentum", version=2)
class Sub(Net):
    momentum = 0.5


def test_a_subclass_adds_to_its_base(load: Load) -> None:
    model = Sub(3)
    model.momentum, model.p = 0.25, "p"
    made = Sub()
    load(made, model.state_dict())
    assert (made.epoch, made.p, made.momentum) == (3, "p", 0.25)


def test_a_subclass_without_a_declaration(load: Load) -> None:
    class Undeclared(Net):
        pass

    made = Undeclared()
    load(made, Net(3).state_dict())
    assert made.epoch == 3
    load(made, Undeclared(4).state_dict())
    assert made.epoch == 4


def test_a_base_that_was_declared_before_the_subclass(load: Load) -> None:
    """The checkpoint has the base's state alone."""

    @ms.extra_state("more", optional=True)
    class Later(Net):
        more = "as built"

    made = Later()
    load(made, Net(3).state_dict())
    assert (made.epoch, made.more) == (3, "as built")
    strict = type("Strict", (Net,), {"more": 1})
    ms.extra_state("more")(strict)
    with pytest.raises((errors.ExtraStateError, errors.PlanError), match="'more'"):
        load(strict(), Net(3).state_dict())


def test_nothing_is_set_where_one_class_of_several_cannot_take_its_part() -> None:
    class Leaf(Two):
        pass

    ms.extra_state("leaf")(Leaf)
    Leaf.leaf = 0
    state = Leaf().state_dict()
    for part in (state["_extra_state"], state["_extra_state"]["base"]):
        values = dict(part["values"])
        part["values"].popitem()
        refused(errors.ExtraStateError, Leaf(), state, "lacks")
        part["values"] = values


def own() -> type[nn.Module]:
    """A copy of the class, to be declared."""
    return type("Own", (Plain,), {name: value for name, value in vars(Own).items() if name != "__doc__"})


@pytest.mark.parametrize("as_base", [False, True])
def test_methods_that_are_there_already(load: Load, as_base: bool) -> None:
    cls = type("Below", (own(),), {}) if as_base else own()
    cls.p = "as built"
    ms.extra_state("p", optional=True)(cls)
    model, made = with_values(cls(), kept=3, p=[4]), cls()
    load(made, model.state_dict())
    assert (made.kept, made.p) == (3, [4])
    before = cls()
    load(before, with_values(Own(), kept=5).state_dict())  # from before the declaration
    assert (before.kept, before.p) == (5, "as built")
    with pytest.raises(RuntimeError, match="_extra_state"):
        load(before, Plain().state_dict())  # for torch, what the class keeps by itself is missing


def test_a_subclass_that_wraps(load: Load) -> None:
    class Wrapping(Net):
        mine = 1

        def get_extra_state(self) -> Any:
            return {"mine": self.mine, "super": super().get_extra_state()}

        def set_extra_state(self, state: Any) -> None:
            self.mine = state["mine"]
            super().set_extra_state(state["super"])

    model, made = with_values(Wrapping(3), mine=2), Wrapping()
    load(made, model.state_dict())
    assert (made.mine, made.epoch) == (2, 3)
    ms.extra_state("third")(Wrapping)
    model, made = with_values(Wrapping(3), mine=2, third=4), with_values(Wrapping(), third=0)
    load(made, model.state_dict())
    assert (made.mine, made.epoch, made.third) == (2, 3, 4)


def test_loading_code_that_is_there_already(load: Load) -> None:
    """An override that renames, as those that take old files do, and a hook that puts in what is missing."""

    @ms.extra_state("p")
    class Renaming(Plain):
        p: Any = None

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            if prefix + "w" in state_dict:
                state_dict[prefix + "weight"] = state_dict.pop(prefix + "w")
                state_dict[prefix + "_extra_state"] = saved_as("Renaming", p=[state_dict[prefix + "_extra_state"]])
            super()._load_from_state_dict(state_dict, prefix, *rest)

    made = Renaming()
    load(made, {"w": torch.zeros(2), "_extra_state": 5})
    assert made.p == [5]
    assert not made.weight.any()
