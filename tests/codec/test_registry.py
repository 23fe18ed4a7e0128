"""Classes with an encoding that their owner has given."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import modelstate as ms
from modelstate.errors import CodecError, OptionError, UnknownClassError
from tests.codec.values import Point
from tests.programs import run_program


class Meter:
    def __init__(self, total: Any) -> None:
        self.total = total


class Finer(Meter):
    pass


class Other:
    pass


class Failing:
    pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


@pytest.fixture
def again(path: Path) -> Callable[[Any], Any]:
    """Saves a value, and returns what the file has."""

    def save_and_open(value: Any) -> Any:
        ms.save({"_extra_state": value}, path, overwrite=True)
        return ms.open(path).extra["_extra_state"]

    return save_and_open


@pytest.fixture
def written(again: Callable[[Any], Any], path: Path) -> Callable[[Any], Any]:
    """Saves a value, and returns the JSON in the file."""

    def save_and_read(value: Any) -> Any:
        again(value)
        with safe_open(path, "pt") as file:
            return json.loads(file.metadata()["modelstate"])["extra"]["_extra_state"]

    return save_and_read


def register(cls: type = Meter, **options: Any) -> None:
    ms.register_codec(cls, lambda meter: {"total": meter.total}, lambda value: cls(value["total"]), **options)


def test_objects_come_back(again: Callable[[Any], Any]) -> None:
    register(name="test.meter")
    made = again({"meter": Meter((torch.ones(2), Meter(3)))})["meter"]
    assert type(made) is Meter
    assert torch.equal(made.total[0], torch.ones(2))
    assert made.total[1].total == 3


def test_the_encoding_is_readable_and_can_be_replaced(written: Callable[[Any], Any]) -> None:
    register()
    assert written(Meter(3)) == {"$object": {"codec": f"{__name__}:Meter", "value": {"total": 3}}}
    ms.register_codec(Meter, lambda meter: meter.total, Meter, "test.meter")
    assert written(Meter(3)) == {"$object": {"codec": "test.meter", "value": 3}}


def test_derived_classes_are_not_implied(again: Callable[[Any], Any]) -> None:
    register(name="test.meter")
    with pytest.raises(CodecError, match="Finer"):
        again(Finer(1))


def test_a_class_that_was_defined_again_is_the_same(again: Callable[[Any], Any]) -> None:
    first, second = (type("Cell", (Meter,), {"__module__": __name__}) for _ in range(2))
    register(first, name="cell")
    register(second, name="cell")
    assert type(again(second(1))) is second
    with pytest.raises(CodecError):
        again(first(1))


def test_a_name_has_one_class(again: Callable[[Any], Any]) -> None:
    register(name="test.meter")
    with pytest.raises(CodecError, match=r"(?s)meter: the name belongs.*Meter.*Other.*name="):
        ms.register_codec(Other, lambda other: None, lambda value: Other(), "test.meter")
    assert again(Meter(1)).total == 1
    with pytest.raises(CodecError):
        again(Other())


@pytest.mark.parametrize(
    "arguments",
    [
        (3, str, str),
        (Meter, 3, str),
        (Meter, str, None),
        (Meter, str, str, ""),
        (Meter, str, str, 3),
        (dict, str, str),
        (bool, str, str),
        (torch.Tensor, str, str),
    ],
    ids=str,
)
def test_what_cannot_be_registered(arguments: Any) -> None:
    with pytest.raises(OptionError):
        ms.register_codec(*arguments)


def test_what_the_functions_raise_is_the_cause(again: Callable[[Any], Any]) -> None:
    def fail(value: Any) -> Any:
        raise KeyError("gone")

    ms.register_codec(Failing, fail, lambda value: Failing())
    with pytest.raises(
        CodecError, match=r"(?s)\[0\]: the function that encodes .*Failing raised.*KeyError.*gone"
    ) as caught:
        again([Failing()])
    assert isinstance(caught.value.__cause__, KeyError)
    ms.register_codec(Failing, lambda value: 1, fail)
    with pytest.raises(CodecError, match=r"(?s)\[0\]: the function that decodes .*Failing raised.*KeyError") as found:
        again([Failing()])
    assert isinstance(found.value.__cause__, KeyError)


def test_the_functions_have_to_return_the_right_thing(again: Callable[[Any], Any]) -> None:
    for encode, says in (
        (lambda value: value, "holds itself"),
        (lambda value: Failing(), "nested too deeply"),
        (lambda value: object(), r"\[0\]\.encoded: .*builtins\.object"),
    ):
        ms.register_codec(Failing, encode, lambda value: Failing())
        with pytest.raises(CodecError, match=says):
            again([Failing()])
    ms.register_codec(Failing, lambda value: 1, lambda value: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(CodecError, match="returned something else"):
        again([Failing()])


def test_what_is_not_registered_where_it_is_read(written: Callable[[Any], Any], path: Path) -> None:
    register(name="test.meter")
    written([Meter(1)])
    register(name="another meter")
    with pytest.raises(UnknownClassError, match=r"(?s)\[0\]: nothing is registered under 'test.meter'.*register_codec"):
        ms.open(path).extra["_extra_state"]


def test_an_own_encoding_comes_before_that_of_dataclasses(written: Callable[[Any], Any]) -> None:
    cls = type("OwnPoint", (Point,), {"__module__": __name__})
    ms.register_codec(cls, lambda point: [point.x, point.y], lambda value: cls(*value), "point")
    assert written(cls(1, 2)) == {"$object": {"codec": "point", "value": [1, 2]}}


def test_a_deque_has_the_encoding_that_its_error_names(tmp_path: Path) -> None:
    """In a process of its own, since a registered class stays registered."""
    code = """
import collections
import modelstate as ms

state = {"_extra_state": collections.deque([1, 2], 3)}
try:
    ms.save(state, "x.safetensors")
except ms.errors.CodecError as error:
    eval(error.remedy)
ms.save(state, "x.safetensors")
value = ms.open("x.safetensors").extra["_extra_state"]
assert (value, value.maxlen) == (collections.deque([1, 2]), 3)
"""
    done = run_program(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def local() -> type[Meter]:
    class Local(Meter):
        pass

    return Local


def test_classes_of_one_name_need_names_of_their_own(again: Callable[[Any], Any]) -> None:
    first, second = local(), local()
    for cls in (first, second):
        register(cls)
    assert type(again(second(1))) is second
    with pytest.raises(CodecError, match="Local"):
        again(first(1))
    for name, cls in {"a": first, "b": second}.items():
        register(cls, name=name)
    assert (type(again(first(1))), type(again(second(1)))) == (first, second)
