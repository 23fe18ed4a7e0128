"""Encodings for values of NumPy and torch: scalars, arrays, dtypes, devices, random generators."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from modelstate.codec.walk import (
    FIELD,
    MAX_BITS,
    MAX_SIZE_BITS,
    REGISTER,
    Decoder,
    Encoder,
    Kind,
    Tree,
    Walk,
    check_bits,
)
from modelstate.torch_compat.plain import own_copy

_DTYPE_KINDS = "biufcmMSUV"
_BIT_GENERATORS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}
_POSITIONS = {"MT19937": ("state", "pos", 624), "Philox": ("", "buffer_pos", 4)}
"""Where the state of a generator contains an index into itself, which NumPy does not check, and its largest value."""
_MAX_POOL = 64
_POOL = 4
_FIELD_COST = 20
"""The number of values that a field of a dtype counts as, since it takes so much longer."""
_MAX_DIMENSIONS = 64
_MAX_SIZE = 2**63 - 1


def _is_portable(dtype: Any) -> bool:
    """Whether the bytes of the dtype mean the same on every platform."""
    if dtype.subdtype is not None:
        return _is_portable(dtype.subdtype[0])
    if dtype.fields is not None:
        return dtype.itemsize > 0 and all(_is_portable(entry[0]) for entry in dtype.fields.values())
    return dtype.kind in _DTYPE_KINDS and dtype.char not in "gG" and dtype.itemsize > 0


def _encode_dtype(dtype: Any, encoder: Encoder) -> Tree:
    try:
        text = _descr(dtype)
        decoded = _dtype_of(text, encoder)
        exact = _is_portable(dtype) and decoded == dtype and decoded.type is dtype.type
    except (TypeError, ValueError):
        exact = False
    if not exact:
        remedy = "save a list of it, or an array of another dtype"
        raise encoder.fail(f"there is no encoding for NumPy's dtype {dtype}", remedy=remedy)
    return text


def _descr(dtype: Any) -> Any:
    if dtype.fields is None:
        # NumPy has two integer types of the same size, only one of which has a portable name.
        same = np.dtype(dtype.str).char == dtype.char
        return dtype.str if same else dtype.type.__name__
    return _listed(np.lib.format.dtype_to_descr(dtype))


def _listed(descr: Any) -> Any:
    return [_listed(part) for part in descr] if isinstance(descr, list | tuple) else descr


def _dtype_of(descr: Any, walk: Walk) -> np.dtype[Any]:
    return np.dtype(descr) if type(descr) is str else np.lib.format.descr_to_dtype(_fields_of(descr, walk))


def _fields_of(descr: list[Any], walk: Walk) -> list[tuple[Any, ...]]:
    """The description of a structured dtype as NumPy requires it: with tuples, where JSON has lists."""
    fields = []
    for name, inner, *shape in descr:
        walk.count(_FIELD_COST)
        title = name if type(name) is str else tuple(name)
        fields.append((title, inner if type(inner) is str else _fields_of(inner, walk), *map(tuple, shape)))
    return fields


def _dtype(tree: Tree, decoder: Decoder) -> np.dtype[Any]:
    dtype = _dtype_of(tree, decoder)
    if not _is_portable(dtype):
        raise decoder.fail("a dtype that is not stored here", found=str(dtype)[:80])
    return dtype


def _encode_array(value: np.ndarray[Any, Any], encoder: Encoder) -> Tree:
    order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    dtype = encoder.child(value.dtype, (FIELD, "dtype"))["$numpy.dtype"]

    def raw_bytes() -> torch.Tensor:
        data = bytearray(value.tobytes(order))
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    return {"dtype": dtype, "shape": list(value.shape), "order": order, "data": encoder.state_of(value, raw_bytes)}


def _array(tree: Tree, decoder: Decoder) -> Any:
    text, shape, order, data = decoder.fields(tree, "dtype", "shape", "order", "data")
    sizes = [decoder.expect(size, int) for size in decoder.expect(shape, list)]
    if len(sizes) > _MAX_DIMENSIONS or not all(0 <= size <= _MAX_SIZE for size in sizes):
        raise decoder.fail("no shape of an array", found=f"{len(sizes)} dimensions")
    if order not in ("C", "F"):
        raise decoder.fail("the order of an array is unknown", expected="C or F")
    dtype = _dtype(text, decoder)
    return decoder.object_of(data, (dtype, sizes, order), partial(_filled, dtype, sizes, order, decoder))


def _filled(dtype: Any, sizes: list[int], order: Any, decoder: Decoder, stored: torch.Tensor) -> Any:
    if stored.dtype != torch.uint8 or stored.device.type != "cpu":
        raise decoder.fail("the data of an array are not bytes")
    raw = stored.contiguous().view(-1).numpy()
    if math.prod(sizes) * dtype.itemsize != len(raw):
        raise decoder.fail("the bytes of an array are not as many as its shape and dtype need", found=len(raw))
    array = np.empty(sizes, dtype, order)
    if len(raw):
        # As bytes, so that the padding of a structured dtype is copied, too.
        (array.T if order == "F" else array).reshape(-1).view(np.uint8)[:] = raw
    return array


def _encode_scalar(value: Any, encoder: Encoder) -> Tree:
    dtype = encoder.child(value.dtype, (FIELD, "dtype"))["$numpy.dtype"]
    kind = value.dtype.kind
    if kind in "biu" or (kind == "f" and math.isfinite(value)):
        return [dtype, encoder.value(value.item())]
    if kind in "mM":
        return [dtype, encoder.value(value.view(np.int64).item())]
    return [dtype, encoder.value(value.tobytes())]


def _scalar(tree: Tree, decoder: Decoder) -> Any:
    text, inner = decoder.expect(tree, list)
    dtype = _dtype(text, decoder)
    value = decoder.value(inner)
    if type(value) is bytes:
        if len(value) != dtype.itemsize:
            raise decoder.fail("the bytes of a scalar are not as many as its dtype needs", found=len(value))
        return np.ndarray((), dtype, value).copy()[()]
    expected: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float, "m": int, "M": int}
    decoder.expect(value, expected[dtype.kind])
    if dtype.kind in "mM":
        return np.int64(value).view(dtype)
    scalar = dtype.type(value)
    if scalar.item() != value:
        raise decoder.fail("a number that its dtype does not have", found=text)
    return scalar


def _encode_bit_generator(value: Any, encoder: Encoder) -> Tree:
    if _BIT_GENERATORS.get(type(value).__name__) is not type(value):
        raise encoder.fail("an unknown bit generator", expected=", ".join(_BIT_GENERATORS), remedy=REGISTER)
    # The seed is needed to spawn further generators.
    seed: Any = getattr(value, "seed_seq", None)
    known = type(seed) is np.random.SeedSequence and seed.pool_size <= _MAX_POOL
    if known:
        _check_seed(seed.state, encoder)
    return encoder.named({"state": value.state, "seed": dict(seed.state) if known else None})


def _check_seed(seed: dict[str, Any], walk: Walk) -> None:
    """Raises for a seed sequence that NumPy would take long to create. It refuses other bad ones itself."""
    check_bits(walk.fail, MAX_BITS, seed["n_children_spawned"])
    # NumPy mixes each word of a seed into the whole pool.
    _count_words([seed["entropy"], seed["spawn_key"]], walk, max(1, seed["pool_size"] // _POOL))


def _count_words(part: Any, walk: Walk, cost: int) -> None:
    if isinstance(part, int):
        check_bits(walk.fail, MAX_BITS, part)
    elif type(part) in (str, range):
        walk.count(len(part) * cost)
    elif isinstance(part, np.ndarray):
        walk.count(part.size * cost)
    elif type(part) in (list, tuple):
        walk.count(len(part) * cost)
        for inner in part:
            _count_words(inner, walk, cost)
    elif part is not None and not isinstance(part, np.generic):
        raise walk.fail("this is no seed", found=f"a {type(part).__qualname__}")


def _bit_generator(tree: Tree, decoder: Decoder) -> Any:
    state_tree, seed_tree = decoder.fields(tree, "state", "seed")
    values = decoder.named({"state": state_tree, "seed": seed_tree})
    seed = values["seed"]
    if seed is not None:
        if set(seed) != {"entropy", "spawn_key", "pool_size", "n_children_spawned"} or seed["pool_size"] > _MAX_POOL:
            raise decoder.fail("this is no seed sequence")
        _check_seed(seed, decoder)
        seed = np.random.SeedSequence(**seed)
    return _with_state(values["state"], seed, decoder)


def _with_state(state: Any, seed: Any, decoder: Decoder) -> Any:
    name = decoder.expect(state, dict)["bit_generator"]
    generator = _BIT_GENERATORS[name](0 if seed is None else seed)
    if name in _POSITIONS:
        part, key, most = _POSITIONS[name]
        if not 0 <= decoder.expect((state[part] if part else state)[key], int) <= most:
            raise decoder.fail("the position in a random state is outside it", expected=f"0 to {most}")
    generator.state = state
    if not _same(generator.state, {key: state[key] for key in generator.state}):
        raise decoder.fail(f"this is no state of {name}")
    return generator


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return type(b) is dict and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _random_state(tree: Tree, decoder: Decoder) -> np.random.RandomState:
    decoder.fields(tree, "state")
    state = decoder.named(tree)["state"]
    own = {key: value for key, value in state.items() if key not in ("has_gauss", "gauss")}
    generator = np.random.RandomState(_with_state(own, None, decoder))
    generator.set_state(state)
    return generator


def _numpy_generator(tree: Tree, decoder: Decoder) -> np.random.Generator:
    (bits,) = decoder.children([tree])
    if type(bits) not in _BIT_GENERATORS.values():
        raise decoder.fail("a generator without a bit generator")
    return np.random.Generator(bits)


# `str()` and `bytes()` of NumPy's classes drop trailing zeros.
NUMPY_KINDS: dict[type, Kind] = {
    np.ndarray: Kind("numpy.array", _encode_array, _array),
    np.str_: Kind(
        "numpy.str",
        lambda value, encoder: encoder.value("".join(value)),
        lambda tree, decoder: np.str_(decoder.expect(decoder.value(tree), str)),
    ),
    np.bytes_: Kind(
        "numpy.bytes",
        lambda value, encoder: encoder.value(b"".join([value, b""])),
        lambda tree, decoder: np.bytes_(decoder.expect(decoder.value(tree), bytes)),
    ),
    np.random.Generator: Kind(
        "numpy.random.Generator",
        lambda value, encoder: encoder.children([value.bit_generator])[0],
        _numpy_generator,
    ),
    np.random.RandomState: Kind(
        "numpy.random.RandomState",
        lambda value, encoder: encoder.named({"state": value.get_state(legacy=False)}),
        _random_state,
    ),
}
SCALAR = Kind("numpy.scalar", _encode_scalar, _scalar)
DTYPE = Kind("numpy.dtype", _encode_dtype, _dtype)
BIT_GENERATOR = Kind("numpy.random.BitGenerator", _encode_bit_generator, _bit_generator)
RULES: tuple[tuple[Callable[[type], bool], Kind], ...] = (
    (lambda cls: issubclass(cls, np.generic) and cls.__module__ == "numpy", SCALAR),
    (lambda cls: issubclass(cls, np.dtype), DTYPE),
    (lambda cls: issubclass(cls, np.random.BitGenerator), BIT_GENERATOR),
)


def _by_name(cls: type) -> tuple[Callable[[Any, Encoder], Tree], Callable[[Any, Decoder], Any]]:
    """The functions that encode and decode constants of torch, such as dtypes."""

    def encode(value: Any, encoder: Encoder) -> Tree:
        return str(value).removeprefix("torch.")

    def decode(tree: Tree, decoder: Decoder) -> Any:
        constant = vars(torch).get(decoder.expect(tree, str))
        if type(constant) is not cls:
            raise decoder.fail(f"torch has no such {cls.__name__}", found=tree[:80], remedy="a newer torch may have it")
        return constant

    return encode, decode


def _parameter(tree: Tree, decoder: Decoder) -> torch.Tensor:
    data, requires_grad = decoder.fields(tree, "data", "requires_grad")
    return decoder.tensor(data, True, decoder.expect(requires_grad, bool))


def _uninitialised(tree: Tree, decoder: Decoder, cls: Any) -> torch.Tensor:
    dtype_tree, requires_grad = decoder.fields(tree, "dtype", "requires_grad")
    dtype = decoder.expect(decoder.value(dtype_tree), torch.dtype)
    with torch.inference_mode(False):  # otherwise it could never be trained
        tensor: torch.Tensor = cls(decoder.expect(requires_grad, bool), "cpu", dtype)
    return tensor


def another_uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    """A new parameter or buffer without a shape, with the properties of this one. (torch cannot copy such a buffer.)"""
    cls: Any = type(tensor)
    other: torch.Tensor = cls(tensor.requires_grad, tensor.device, tensor.dtype)
    return other


def _encode_size(value: torch.Size, encoder: Encoder) -> Tree:
    check_bits(encoder.fail, MAX_SIZE_BITS, *value)
    return list(value)


def _size(tree: Tree, decoder: Decoder) -> torch.Size:
    sizes = [decoder.expect(size, int) for size in decoder.expect(tree, list)]
    check_bits(decoder.fail, MAX_SIZE_BITS, *sizes)
    return torch.Size(sizes)


def _torch_generator(tree: Tree, decoder: Decoder) -> torch.Generator:
    device, state = decoder.fields(tree, "device", "state")
    where = decoder.expect(device, str)

    def make(stored: torch.Tensor) -> torch.Generator:
        generator = torch.Generator(where)
        generator.set_state(own_copy(stored))
        return generator

    return decoder.object_of(state, (torch.Generator, where), make)  # type: ignore[no-any-return]


TORCH_KINDS: dict[type, Kind] = {
    torch.Tensor: Kind(
        "requires_grad",
        lambda value, encoder: encoder.tensor(value),
        lambda tree, decoder: decoder.tensor(tree, False, True),
    ),
    nn.Parameter: Kind(
        "Parameter",
        lambda value, encoder: {"data": encoder.tensor(value), "requires_grad": value.requires_grad},
        _parameter,
    ),
    **{
        cls: Kind(
            cls.__name__,
            lambda value, encoder: encoder.named({"dtype": value.dtype, "requires_grad": value.requires_grad}),
            partial(_uninitialised, cls=cls),
        )
        for cls in (nn.UninitializedParameter, nn.UninitializedBuffer)
    },
    torch.Size: Kind("torch.Size", _encode_size, _size),
    torch.dtype: Kind("torch.dtype", *_by_name(torch.dtype)),
    torch.layout: Kind("torch.layout", *_by_name(torch.layout)),
    torch.memory_format: Kind("torch.memory_format", *_by_name(torch.memory_format)),
    torch.device: Kind(
        "torch.device", lambda value, encoder: str(value), lambda tree, decoder: torch.device(decoder.expect(tree, str))
    ),
    torch.Generator: Kind(
        "torch.Generator",
        lambda value, encoder: {"device": str(value.device), "state": encoder.state_of(value, value.get_state)},
        _torch_generator,
    ),
}
