"""The arguments of a load or conversion, checked."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from modelstate.checkpoint.mapped import check_map_option
from modelstate.errors import OptionError
from modelstate.planning.plan import Options
from modelstate.planning.transforms import ModuleTransform, Pairs, Transform
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Schema, check_rules
from modelstate.torch_compat.dtypes import floating_dtype
from modelstate.torch_compat.private import unwrapped


def check_budget_option(max_memory_bytes: object, minimum: int = 0) -> None:
    """Raises `OptionError` unless the budget is None or an integer of at least `minimum`."""
    given = max_memory_bytes
    if given is not None and not (isinstance(given, int) and not isinstance(given, bool) and given >= minimum):
        raise OptionError("max_memory_bytes= is a number of bytes", expected=f"int, from {minimum}", found=repr(given))


def device_of(device: Any) -> torch.device | None:
    """The device that is meant. Raises `OptionError` for what is none, or not here."""
    try:
        # A tensor knows which of several devices "cuda" means, and whether there is one.
        return None if device is None else torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise OptionError(
            "not a device that is here", found=f"{device!r}: {error}", remedy="device='cpu', or none"
        ) from error


def check_model(model: object) -> nn.Module:
    """The model, without the wrappers of compiling and data parallelism. Raises `OptionError` for what is none."""
    if isinstance(model, nn.Module):
        return unwrapped(model)
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise OptionError(
            "this is a class, and not a model of it",
            expected=f"an object of it: {model.__name__}(...)",
            found=f"the class {model.__qualname__}",
            remedy=f"with ms.skeleton(): model = {model.__name__}(...), with its arguments; then give the model",
        )
    raise OptionError("not a model", expected="torch.nn.Module", found=type(model).__name__)


AnyTransform = Transform | ModuleTransform


def options_of(
    key: str | None,
    rules: Iterable[Rule] | Schema,
    allow_missing: Iterable[str],
    allow_unexpected: Iterable[str],
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    transform: AnyTransform | Mapping[str, AnyTransform | None] | None,
    map: bool | None,
    in_place: bool,
    init_missing: bool = False,
) -> Options:
    """Raises `OptionError`."""
    if not isinstance(init_missing, bool):
        raise OptionError(
            "init_missing= is a choice of two",
            expected="True or False",
            found=repr(init_missing),
            remedy="for some tensors only, give their patterns to the rule: rules=[modelstate.rules.Fill(pattern)]",
        )
    if not (key is None or isinstance(key, str)):
        raise OptionError("key= is a path", expected="text, as 'model.encoder'", found=repr(key))
    check_map_option(map)
    target = device_of(device)
    if target is not None and target.type == "meta":
        raise OptionError("nothing can be loaded onto the meta device", remedy="device='cpu', or none")
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
    )


def _transforms(given: Any) -> AnyTransform | Pairs | None:
    if isinstance(given, Mapping):
        pairs = tuple(given.items())
        for pattern, transform in pairs:
            if not isinstance(pattern, str):
                raise OptionError(
                    "transform= goes by patterns of names", expected="text, as '*.mlp.*'", found=repr(pattern)
                )
            if transform is not None and not callable(transform):
                raise OptionError(
                    "transform= is called",
                    where=repr(pattern),
                    expected="a function of name and tensor, or None",
                    found=repr(transform),
                )
        return pairs or None
    if given is not None and not callable(given):
        expected = "a function of name and tensor, or a mapping from patterns to such"
        raise OptionError("transform= is called", expected=expected, found=repr(given))
    found: AnyTransform | None = given
    return found


def patterns_of(option: str, patterns: object) -> tuple[str, ...]:
    found = tuple(patterns) if isinstance(patterns, Iterable) and not isinstance(patterns, str) else None
    if found is not None and all(isinstance(pattern, str) for pattern in found):
        return found
    if isinstance(patterns, str):
        remedy = f"{option}=[{patterns!r}]"
    elif isinstance(patterns, bool):
        every = f'{option}=["head.*"]; for all of them {option}=["*"]'
        remedy = f"name what is meant: {every}" if patterns else f"leave it out: without {option}= none is allowed"
    else:
        remedy = f'{option}=["head.*"]'
    raise OptionError(
        f"{option}= takes glob patterns of names", expected="a list of text", found=repr(patterns), remedy=remedy
    )
