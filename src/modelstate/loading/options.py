"""Checks the arguments of loads and conversions."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from modelstate.checkpoint.mapped import check_map_option
from modelstate.checkpoint.open import patterns_of
from modelstate.errors import OptionError
from modelstate.planning.plan import Options
from modelstate.planning.transforms import ModuleTransform, Pairs, Transform
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Schema, check_rules
from modelstate.torch_compat.dtypes import floating_dtype
from modelstate.torch_compat.modules import unwrapped


def device_of(device: Any) -> torch.device | None:
    """Returns the device with its index. Raises `OptionError` for an invalid device, or a device that is missing."""
    try:
        # An empty tensor resolves "cuda" to the current device, and fails where there is none.
        return None if device is None else torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise OptionError(
            "this machine has no such device", found=f"{device!r}: {error}", remedy="device='cpu', or leave it out"
        ) from error


def check_model(model: object) -> nn.Module:
    """Returns the model without wrappers of `torch.compile` and data parallelism. Raises `OptionError`."""
    if isinstance(model, nn.Module):
        return unwrapped(model)
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise OptionError(
            "this is a class, not a model",
            expected=f"an instance: {model.__name__}(...)",
            found=f"the class {model.__qualname__}",
            remedy=f"with ms.skeleton(): model = {model.__name__}(...), with its arguments; then pass the model",
        )
    raise OptionError("not a model", expected="torch.nn.Module", found=type(model).__name__)


AnyTransform = Transform | ModuleTransform
_NOTHING_GIVEN = (None, (), (), (), None, None, None, None, None, False, False)
"""The defaults of the arguments of `options_of`, in their order."""


def options_of(
    key: str | None,
    rules: Iterable[Rule] | Schema,
    allow_missing: Iterable[str],
    allow_unexpected: Iterable[str],
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    transform: AnyTransform | Mapping[str, AnyTransform | None] | None,
    map: bool | None,
    in_place: bool | None,
    init_missing: bool = False,
    read_once: bool = False,
) -> Options:
    """Returns the checked options of a load. Raises `OptionError`."""
    names = key, rules, allow_missing, allow_unexpected
    given = (*names, dtype, device, transform, map, in_place, init_missing, read_once)
    if all(value is default for value, default in zip(given, _NOTHING_GIVEN, strict=True)):
        return Options()
    if not isinstance(init_missing, bool):
        raise OptionError(
            "init_missing= must be a boolean",
            expected="True or False",
            found=repr(init_missing),
            remedy="to initialise some tensors only, pass a rule: rules=[modelstate.rules.Fill(pattern)]",
        )
    if not isinstance(read_once, bool):
        raise OptionError(
            "read_once= says whether one rank reads for its replicas", expected="True or False", found=repr(read_once)
        )
    if not (key is None or isinstance(key, str)):
        raise OptionError("key= must be a path", expected="a string such as 'model.encoder'", found=repr(key))
    check_map_option(map)
    if not (in_place is None or isinstance(in_place, bool)):
        raise OptionError(
            "in_place= says whether existing memory is read into directly",
            expected="None, True or False",
            found=repr(in_place),
        )
    target = device_of(device)
    if target is not None and target.type == "meta":
        raise OptionError("a load cannot put tensors on the meta device", remedy="device='cpu', or leave it out")
    return Options(
        key=key,
        rules=() if isinstance(rules, Schema) else check_rules(rules),
        schema=rules if isinstance(rules, Schema) else None,
        allow_missing=patterns_of("allow_missing", allow_missing),
        allow_unexpected=patterns_of("allow_unexpected", allow_unexpected),
        dtype=floating_dtype(dtype),
        device=target,
        transform=_transforms(transform),
        map=map,
        in_place=in_place,
        init_missing=init_missing,
        read_once=read_once,
    )


def _transforms(given: Any) -> AnyTransform | Pairs | None:
    if isinstance(given, Mapping):
        pairs = tuple(given.items())
        for pattern, transform in pairs:
            if not isinstance(pattern, str):
                raise OptionError(
                    "the keys of transform= must be glob patterns",
                    expected="a string such as '*.mlp.*'",
                    found=repr(pattern),
                )
            if transform is not None and not callable(transform):
                raise OptionError(
                    "the values of transform= must be functions",
                    where=repr(pattern),
                    expected="a function of name and tensor, or None",
                    found=repr(transform),
                )
        return pairs or None
    if given is not None and not callable(given):
        expected = "a function of name and tensor, or a mapping from patterns to such functions"
        raise OptionError("transform= must be a function", expected=expected, found=repr(given))
    transform_function: AnyTransform | None = given
    return transform_function
