"""What torch has: tensors with their flags, sizes, dtypes, devices, generators."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from modelstate.codec.bounds import MAX_SIZE_BITS, check_bits
from modelstate.codec.plain import own_copy
from modelstate.codec.walk import Decoder, Encoder, Kind, Tree


def _by_name(cls: type) -> tuple[Callable[[Any, Encoder], Tree], Callable[[Any, Decoder], Any]]:
    """The two ways of what torch has as constants of its own."""

    def encode(value: Any, encoder: Encoder) -> Tree:
        return str(value).removeprefix("torch.")

    def decode(tree: Tree, decoder: Decoder) -> Any:
        found = vars(torch).get(decoder.expect(tree, str))
        if type(found) is not cls:
            raise decoder.fail(f"torch has no such {cls.__name__}", found=tree[:80], remedy="a newer torch may have it")
        return found

    return encode, decode


def _encode_parameter(value: nn.Parameter, encoder: Encoder) -> Tree:
    return {"data": encoder.tensor(value), "requires_grad": value.requires_grad}


def _parameter(tree: Tree, decoder: Decoder) -> torch.Tensor:
    data, requires_grad = decoder.fields(tree, "data", "requires_grad")
    return decoder.tensor(data, True, decoder.expect(requires_grad, bool))


def _encode_uninitialised(value: Any, encoder: Encoder) -> Tree:
    return encoder.named({"dtype": value.dtype, "requires_grad": value.requires_grad})


def _uninitialised(tree: Tree, decoder: Decoder, cls: Any) -> torch.Tensor:
    dtype, requires_grad = decoder.fields(tree, "dtype", "requires_grad")
    found = decoder.expect(decoder.value(dtype), torch.dtype)
    with torch.inference_mode(False):  # else it could never be trained
        made: torch.Tensor = cls(decoder.expect(requires_grad, bool), "cpu", found)
    return made


def another_uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    """Another parameter or buffer that has no shape yet, as this one. (torch copies no such buffer.)"""
    cls: Any = type(tensor)
    made: torch.Tensor = cls(tensor.requires_grad, tensor.device, tensor.dtype)
    return made


def _encode_size(value: torch.Size, encoder: Encoder) -> Tree:
    check_bits(encoder.fail, MAX_SIZE_BITS, *value)
    return list(value)


def _size(tree: Tree, decoder: Decoder) -> torch.Size:
    sizes = [decoder.expect(size, int) for size in decoder.expect(tree, list)]
    check_bits(decoder.fail, MAX_SIZE_BITS, *sizes)
    return torch.Size(sizes)


def _device(tree: Tree, decoder: Decoder) -> torch.device:
    return torch.device(decoder.expect(tree, str))


def _encode_generator(value: torch.Generator, encoder: Encoder) -> Tree:
    return {"device": str(value.device), "state": encoder.state_of(value, value.get_state)}


def _generator(tree: Tree, decoder: Decoder) -> torch.Generator:
    device, state = decoder.fields(tree, "device", "state")
    where = decoder.expect(device, str)

    def make(stored: torch.Tensor) -> torch.Generator:
        made = torch.Generator(where)
        made.set_state(own_copy(stored))
        return made

    return decoder.object_of(state, (torch.Generator, where), make)  # type: ignore[no-any-return]


KINDS: dict[type, Kind] = {
    torch.Tensor: Kind(
        "requires_grad",
        lambda value, encoder: encoder.tensor(value),
        lambda tree, decoder: decoder.tensor(tree, False, True),
    ),
    nn.Parameter: Kind("Parameter", _encode_parameter, _parameter),
    nn.UninitializedParameter: Kind(
        "UninitializedParameter", _encode_uninitialised, partial(_uninitialised, cls=nn.UninitializedParameter)
    ),
    nn.UninitializedBuffer: Kind(
        "UninitializedBuffer", _encode_uninitialised, partial(_uninitialised, cls=nn.UninitializedBuffer)
    ),
    torch.Size: Kind("torch.Size", _encode_size, _size),
    torch.dtype: Kind("torch.dtype", *_by_name(torch.dtype)),
    torch.layout: Kind("torch.layout", *_by_name(torch.layout)),
    torch.memory_format: Kind("torch.memory_format", *_by_name(torch.memory_format)),
    torch.device: Kind("torch.device", lambda value, encoder: str(value), _device),
    torch.Generator: Kind("torch.Generator", _encode_generator, _generator),
}
