"""What Python itself and its library have."""

import base64
import json
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any
from uuid import UUID

from modelstate.codec.bounds import MAX_BITS, MAX_RATIO_BITS, Collisions, check_bits
from modelstate.codec.walk import Decoder, Encoder, Kind, Tree

FACTORIES: dict[str, type] = {
    cls.__name__: cls
    for cls in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, OrderedDict, Counter, deque)
}
"""What a `defaultdict` may have as its factory."""
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)


def _int(tree: Tree, decoder: Decoder) -> int:
    text = decoder.expect(tree, str)
    value = int(text, 16)
    if hex(value) != text:
        raise ValueError("not as hex() writes it")
    decoder.large_ints += value.bit_length() > MAX_BITS
    return value


def _float(tree: Tree, decoder: Decoder) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(decoder.expect(tree, str)))
    return float(value)


def _text_of_bytes(value: bytes, encoder: Encoder) -> str:
    return base64.b64encode(value).decode()


def _bytes(tree: Tree, decoder: Decoder) -> bytes:
    return base64.b64decode(decoder.expect(tree, str), validate=True)


def _str(tree: Tree, decoder: Decoder) -> str:
    return _bytes(tree, decoder).decode("utf-8", "surrogatepass")


def _complex(tree: Tree, decoder: Decoder) -> complex:
    real, imag = (decoder.expect(part, float) for part in decoder.children(tree))
    return complex(real, imag)


def _members(value: Any, encoder: Encoder) -> list[Tree]:
    """The members of a set, in an order that does not depend on their hashes where that is possible."""
    trees, collisions = [], Collisions(len(value), encoder.fail)
    for member in value:
        trees.append(encoder.key(member))
        collisions.add(member)
    try:
        return sorted(trees, key=json.dumps)
    except TypeError:
        return trees


def _set(tree: Tree, decoder: Decoder) -> set[Any]:
    members = [decoder.key(member) for member in decoder.expect(tree, list)]
    collisions = Collisions(len(members), decoder.fail)
    for member in members:
        collisions.add(member)
    made = set(members)
    if len(made) != len(members):
        raise decoder.fail("a member of a set stands twice")
    return made


def _frozenset(tree: Tree, decoder: Decoder) -> frozenset[Any]:
    return frozenset(_set(tree, decoder))


def _encode_ordered(value: Any, encoder: Encoder) -> Tree:
    attributes = vars(value)
    if not attributes:
        return encoder.pairs(value)
    if set(attributes) != {"_metadata"}:
        raise encoder.fail("an OrderedDict with attributes", found=", ".join(attributes), remedy="save a dict")
    # The versions of a module's state dict.
    return {"items": encoder.pairs(value), **encoder.named(attributes)}


def _ordered(tree: Tree, decoder: Decoder) -> OrderedDict[Any, Any]:
    made: OrderedDict[Any, Any] = OrderedDict()
    if type(tree) is list:
        return decoder.pairs(tree, made)  # type: ignore[no-any-return]
    items, metadata = decoder.fields(tree, "items", "_metadata")
    decoder.pairs(items, made)
    made._metadata = decoder.named({"_metadata": metadata})["_metadata"]  # type: ignore[attr-defined]
    return made


def _encode_default(value: Any, encoder: Encoder) -> Tree:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and FACTORIES.get(str(name)) is not factory:
        raise encoder.fail(
            "a defaultdict whose factory is not known",
            expected=", ".join(FACTORIES),
            found=f"a {type(factory).__qualname__}",
            remedy="save dict(...) of it",
        )
    return {"factory": name, "items": encoder.pairs(value)}


def _default(tree: Tree, decoder: Decoder) -> defaultdict[Any, Any]:
    factory, items = decoder.fields(tree, "factory", "items")
    made: defaultdict[Any, Any] = defaultdict(None if factory is None else FACTORIES[factory])
    return decoder.pairs(items, made)  # type: ignore[no-any-return]


def _deque(tree: Tree, decoder: Decoder) -> deque[Any]:
    maxlen, items = decoder.fields(tree, "maxlen", "items")
    values = decoder.children(items)
    if maxlen is not None and (type(maxlen) is not int or len(values) > maxlen):
        raise decoder.fail("a deque with more items than it can have, or an impossible maxlen", found=maxlen)
    return deque(values, maxlen)


def _ints(tree: Tree, decoder: Decoder, count: int) -> list[int]:
    values = [decoder.expect(value, int) for value in decoder.children(tree)]
    if len(values) != count:
        raise decoder.fail("not as many numbers as there must be", expected=count, found=len(values))
    return values


def _encode_range(value: range, encoder: Encoder) -> Tree:
    check_bits(encoder.fail, MAX_RATIO_BITS, value.start, value.stop, value.step)
    return encoder.children([value.start, value.stop, value.step])


def _range(tree: Tree, decoder: Decoder) -> range:
    start, stop, step = _ints(tree, decoder, 3)
    check_bits(decoder.fail, MAX_RATIO_BITS, start, stop, step)
    return range(start, stop, step)


def _slice(tree: Tree, decoder: Decoder) -> slice:
    start, stop, step = decoder.children(tree)
    return slice(start, stop, step)


def _path(tree: Tree, decoder: Decoder, cls: type) -> Any:
    return cls(decoder.expect(decoder.value(tree), str))


def _encode_datetime(value: datetime, encoder: Encoder) -> Tree:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, *encoder.children([value.tzinfo])]


def _encode_time(value: time, encoder: Encoder) -> Tree:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, *encoder.children([value.tzinfo])]


def _clock(tree: Tree, decoder: Decoder, cls: Any) -> Any:
    text, fold, zone = decoder.expect(tree, list)
    made = cls.fromisoformat(decoder.expect(text, str))
    tzinfo = None if zone is None else decoder.expect(decoder.children([zone])[0], timezone)
    return made.replace(fold=decoder.expect(fold, int), tzinfo=tzinfo)


def _date(tree: Tree, decoder: Decoder) -> date:
    return date.fromisoformat(decoder.expect(tree, str))


def _timedelta(tree: Tree, decoder: Decoder) -> timedelta:
    days, seconds, microseconds = _ints(tree, decoder, 3)
    return timedelta(days, seconds, microseconds)


def _encode_timezone(value: timezone, encoder: Encoder) -> Tree:
    return encoder.children(value.__getinitargs__())  # type: ignore[attr-defined]


def _timezone(tree: Tree, decoder: Decoder) -> timezone:
    return timezone(*decoder.children(tree))


def _decimal(tree: Tree, decoder: Decoder) -> Decimal:
    return Decimal(decoder.expect(tree, str))


def _encode_fraction(value: Fraction, encoder: Encoder) -> Tree:
    check_bits(encoder.fail, MAX_RATIO_BITS, value.numerator, value.denominator)
    return encoder.children([value.numerator, value.denominator])


def _fraction(tree: Tree, decoder: Decoder) -> Fraction:
    numerator, denominator = _ints(tree, decoder, 2)
    check_bits(decoder.fail, MAX_RATIO_BITS, numerator, denominator)
    return Fraction(numerator, denominator)


def _uuid(tree: Tree, decoder: Decoder) -> UUID:
    return UUID(decoder.expect(tree, str))


def _items(value: Any, encoder: Encoder) -> Tree:
    return encoder.children(value)


def _pairs(value: Any, encoder: Encoder) -> Tree:
    return encoder.pairs(value)


def _plainly(get: Callable[[Any], Any]) -> Callable[[Any, Encoder], Tree]:
    return lambda value, encoder: encoder.value(get(value))


def _never(value: Any, encoder: Encoder) -> Tree:
    raise AssertionError("the encoder itself writes these")


KINDS: dict[type, Kind] = {
    str: Kind("str", _never, _str),
    int: Kind("int", _never, _int),
    float: Kind("float", _never, _float),
    complex: Kind("complex", lambda value, encoder: encoder.children([value.real, value.imag]), _complex),
    bytes: Kind("bytes", _text_of_bytes, _bytes),
    bytearray: Kind("bytearray", _text_of_bytes, lambda tree, decoder: bytearray(_bytes(tree, decoder))),
    tuple: Kind("tuple", _items, lambda tree, decoder: tuple(decoder.children(tree))),
    set: Kind("set", _members, _set),
    frozenset: Kind("frozenset", _members, _frozenset),
    dict: Kind("dict", _pairs, lambda tree, decoder: decoder.pairs(tree, {})),
    OrderedDict: Kind("OrderedDict", _encode_ordered, _ordered),
    defaultdict: Kind("defaultdict", _encode_default, _default),
    Counter: Kind("Counter", _pairs, lambda tree, decoder: decoder.pairs(tree, Counter())),
    deque: Kind("deque", lambda value, encoder: {"maxlen": value.maxlen, "items": encoder.children(value)}, _deque),
    range: Kind("range", _encode_range, _range),
    slice: Kind("slice", lambda value, encoder: encoder.children([value.start, value.stop, value.step]), _slice),
    datetime: Kind("datetime", _encode_datetime, partial(_clock, cls=datetime)),
    date: Kind("date", _plainly(date.isoformat), _date),
    time: Kind("time", _encode_time, partial(_clock, cls=time)),
    timedelta: Kind("timedelta", lambda value, encoder: [value.days, value.seconds, value.microseconds], _timedelta),
    timezone: Kind("timezone", _encode_timezone, _timezone),
    Decimal: Kind("Decimal", _plainly(str), _decimal),
    Fraction: Kind("Fraction", _encode_fraction, _fraction),
    UUID: Kind("UUID", _plainly(str), _uuid),
    **{cls: Kind(cls.__name__, _plainly(str), partial(_path, cls=cls)) for cls in _PATHS},
}
