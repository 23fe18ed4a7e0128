"""Classes with an encoding that their owner has given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate.codec import codec
from modelstate.codec.codec import decode, encode
from modelstate.errors import CodecError, OptionError, UnknownClassError
from tests.codec.values import WAYS, Point


class Meter:
    def __init__(self, total: Any) -> None:
        self.total = total


class Finer(Meter):
    pass


class Other:
    pass


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_BY_CLASS", {})
    monkeypatch.setattr(codec, "_BY_NAME", {})


def register(**options: Any) -> None:
    ms.register_codec(Meter, lambda meter: {"total": meter.total}, lambda value: Meter(value["total"]), **options)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_objects_come_back(way: Callable[[Any], Any]) -> None:
    register()
    made = way({"meter": Meter((torch.ones(2), Meter(3)))})["meter"]
    assert type(made) is Meter
    assert torch.equal(made.total[0], torch.ones(2))
    assert made.total[1].total == 3


def test_the_encoding_is_readable() -> None:
    register()
    assert encode(Meter(3)) == {"$object": {"codec": f"{__name__}:Meter", "value": {"total": 3}}}
    register(name="meter")
    assert encode(Meter(3)) == {"$object": {"codec": "meter", "value": {"total": 3}}}


def test_derived_classes_are_not_implied() -> None:
    register()
    with pytest.raises(CodecError, match="Finer"):
        encode(Finer(1))


def test_registering_again_replaces() -> None:
    register()
    ms.register_codec(Meter, lambda meter: meter.total, Meter, "short")
    assert encode(Meter(1)) == {"$object": {"codec": "short", "value": 1}}
    register(name="short")
    assert decode(encode(Meter(1))).total == 1


def test_a_class_that_was_defined_again_is_the_same() -> None:
    again = type("Meter", (), {"__module__": __name__})
    register(name="meter")
    ms.register_codec(again, lambda meter: 1, lambda value: again(), "meter")
    assert type(decode(encode(again()))) is again
    with pytest.raises(CodecError):
        encode(Meter(1))


def test_a_name_has_one_class() -> None:
    register(name="meter")
    with pytest.raises(CodecError, match=r"(?s)meter: the name belongs.*Meter.*Other.*name="):
        ms.register_codec(Other, lambda other: None, lambda value: Other(), "meter")
    assert decode(encode(Meter(1))).total == 1
    with pytest.raises(CodecError):
        encode(Other())


def test_an_own_encoding_comes_before_that_of_dataclasses() -> None:
    ms.register_codec(Point, lambda point: [point.x, point.y], lambda value: Point(*value), "point")
    assert encode(Point(1, 2)) == {"$object": {"codec": "point", "value": [1, 2]}}


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


def test_what_the_functions_raise_is_the_cause() -> None:
    def fail(value: Any) -> Any:
        raise KeyError("gone")

    ms.register_codec(Meter, fail, Meter)
    with pytest.raises(
        CodecError, match=r"(?s)\[0\]: the function that encodes .*Meter raised KeyError.*gone"
    ) as caught:
        encode([Meter(1)])
    assert isinstance(caught.value.__cause__, KeyError)
    ms.register_codec(Meter, lambda meter: 1, fail)
    with pytest.raises(CodecError, match=r"(?s)\[0\]: the function that decodes .*Meter raised KeyError") as found:
        decode(encode([Meter(1)]))
    assert isinstance(found.value.__cause__, KeyError)


def test_the_functions_have_to_return_the_right_thing() -> None:
    ms.register_codec(Meter, lambda meter: meter, Meter)
    with pytest.raises(CodecError, match="holds itself"):
        encode(Meter(1))
    ms.register_codec(Meter, lambda meter: Meter(1), Meter)
    with pytest.raises(CodecError, match="nested too deeply"):
        encode(Meter(1))
    ms.register_codec(Meter, lambda meter: object(), Meter)
    with pytest.raises(CodecError, match=r"\[0\]\.encoded: .*builtins\.object"):
        encode([Meter(1)])
    ms.register_codec(Meter, lambda meter: 1, lambda value: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(CodecError, match="returned something else"):
        decode(encode(Meter(1)))


def test_what_is_not_registered_where_it_is_read() -> None:
    register(name="meter")
    tree = encode([Meter(1)])
    codec._BY_NAME.clear()
    with pytest.raises(UnknownClassError, match=r"(?s)file\[0\]: nothing is registered under 'meter'.*register_codec"):
        decode(tree, "file")


def local() -> type[Meter]:
    class Local(Meter):
        pass

    return Local


def test_a_class_whose_name_another_one_has_taken_is_refused() -> None:
    first, second = local(), local()
    for cls in (first, second):
        ms.register_codec(cls, lambda meter: meter.total, cls)
    assert type(decode(encode(second(1)))) is second
    with pytest.raises(CodecError, match="Local"):
        encode([first(1)])


def test_classes_of_one_name_may_have_names_of_their_own() -> None:
    classes = {name: local() for name in ("a", "b")}
    for name, cls in classes.items():
        ms.register_codec(cls, lambda meter: meter.total, cls, name)
    for cls in classes.values():
        assert type(decode(encode(cls(1)))) is cls
