"""Checks of arguments: one check, and one text of an error, for each kind."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from types import MappingProxyType
from typing import ParamSpec, TypeGuard, TypeVar

from modelstate.errors import OptionError, keep_interrupt
from modelstate.text_format import short_repr

TIMEOUT_SECONDS = 1800.0
"""How long a rank waits for the others by default: as long as the collectives of torch."""


def invalid_option(option: str, why: str, value: object, *, expected: str) -> OptionError:
    """The error for the value of an option."""
    return OptionError(f"{option}= {why}", expected=expected, found=short_repr(value), names=(option,))


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number, also of NumPy, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_integer(option: str, value: object, *, least: int, accepts_none: bool = False) -> None:
    """Checks an integer. The text of the error says bytes where the name of the argument ends so.

    Args:
        option: The name of the argument.
        value: What the caller has given.
        least: The least integer that is accepted.
        accepts_none: Whether None is accepted, too.

    Raises:
        OptionError: The value is not accepted.
    """
    if value is None and accepts_none:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise invalid_option(
            option,
            f"must be {'a number of bytes' if option.endswith('bytes') else 'an integer'} >= {least}",
            value,
            expected=f"an integer >= {least}{', or None' if accepts_none else ''}",
        )


def seconds_of(
    option: str,
    value: object,
    *,
    accepts_zero: bool = True,
    most: float = sys.float_info.max,
    accepts_none: bool = False,
) -> float:
    """Checks a time that is not None.

    Args:
        option: The name of the argument.
        value: What the caller has given.
        accepts_zero: Whether 0 is accepted.
        most: The longest time that is accepted.
        accepts_none: Whether the argument may also be None, for the text of the error.

    Returns:
        The time, in seconds.

    Raises:
        OptionError: The value is not accepted.
    """
    if is_number(value) and 0 <= value <= most and (value or accepts_zero):
        return float(value)
    limit = f" and <= {most:g}" if most < sys.float_info.max else ""
    raise invalid_option(
        option,
        "must be a number of seconds",
        value,
        expected=f"a number {'>=' if accepts_zero else '>'} 0{limit}{', or None' if accepts_none else ''}",
    )


def check_flag(option: str, value: object, *, accepts_none: bool = False) -> None:
    """Raises `OptionError` where the value of an argument is not True or False.

    A text counts as true in Python, also `overwrite="false"` from a command line or the environment.
    """
    if isinstance(value, bool) or (value is None and accepts_none):
        return
    raise OptionError(
        f"{option}= must be True or False",
        expected=f"True or False{', or None' if accepts_none else ''}",
        found=short_repr(value),
        remedy=_FLAG_REMEDIES.get(option, ""),
        names=(option,),
    )


_FLAG_REMEDIES = {
    "init_missing": "to initialise some tensors only, a rule in place of it: rules=[modelstate.rules.Fill(pattern)]"
}


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises `OptionError` where the value of an argument is not one of the choices."""
    if not (isinstance(value, str) and value in choices):
        raise invalid_option(name, "has an unknown value", value, expected=" or ".join(map(repr, choices)))


def check_keywords(
    call: str, given: Mapping[str, object], accepted: Collection[str], foreign: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raises `OptionError` for the first keyword that a call does not accept, and names the right one.

    Args:
        call: The function as users call it: "ms.load".
        given: The keyword arguments of the call.
        accepted: The names that the function accepts.
        foreign: For arguments of other functions, what replaces each here. `strict` and `map_location` are added where
            the function has the argument that replaces them.
    """
    for name in given:
        if name in accepted:
            continue
        own, remedy = _OF_TORCH.get(name, ("", ""))
        remedy = foreign.get(name, remedy if own in accepted else "")
        close = [] if remedy else get_close_matches(name, accepted, 1)
        raise OptionError(
            f"{call}() has no argument {name}=",
            expected="" if remedy or close else ", ".join(f"{each}=" for each in accepted),
            found=f"{name}={short_repr(given[name])}",
            remedy=f"{close[0]}=, if that is meant" if close else remedy,
        )


_OF_TORCH = {
    "strict": (
        "allow_missing",
        'leave it out: all names have to fit. To allow exceptions: allow_missing=["head.*"], '
        'allow_unexpected=["old.*"]',
    ),
    "map_location": ("device", "device=: the device of the tensors; without it each tensor stays on its device"),
}
"""Arguments of torch's functions: the argument that replaces each, and how."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked_call(
    call: str,
    *,
    foreign: Mapping[str, str] = MappingProxyType({}),
    within: Callable[..., AbstractContextManager[object]] = lambda *_, **__: nullcontext(),
    options: type | None = None,
    defaults: object = None,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function so that a wrong call raises an `OptionError` with the right one.

    A call is wrong with a keyword that the function does not have, and with a value of another kind for an argument
    whose annotation is `bool` or `bool | None`.

    Args:
        call: The function as users call it: "ms.load".
        foreign: For arguments of other functions, what replaces each here; see `check_keywords`.
        within: Returns the block that raises the error, such as a phase of all ranks, for the arguments of the call. A
            call that the signature does not allow raises its `TypeError` there, too.
        options: The `TypedDict` of a function that takes `**options: Unpack[...]`.
        defaults: An object with the default of each of these options.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = _expanded(inspect.signature(function), options, defaults)
        flags = {}
        parameters = signature.parameters.values()
        named = [each for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
        keywords = [each.name for each in named if each.name != "self"]
        accepted, required = {each.name for each in named}, {each.name for each in named if each.default is each.empty}
        in_order = [each.name for each in named if each.kind is each.POSITIONAL_OR_KEYWORD]
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
        for name, parameter in signature.parameters.items():
            kind = parameter.annotation
            kind = kind if isinstance(kind, str) else inspect.formatannotation(kind)
            if kind in ("bool", "bool | None"):
                flags[name] = kind != "bool"

        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                given: Mapping[str, object] = dict(zip(in_order, args, strict=False)) | kwargs
                if len(given) < len(args) + len(kwargs) or not required <= given.keys() <= accepted:
                    given = signature.bind(*args, **kwargs).arguments  # which takes ten times as long
                for name, accepts_none in flags.items():
                    if name in given:
                        check_flag(name, given[name], accepts_none=accepts_none)
            except OptionError:
                with within(*args, **kwargs):
                    raise
            except TypeError as error:
                keep_interrupt(error)
            else:
                return function(*args, **kwargs)
            with within(*args, **kwargs):
                if not takes_any:
                    check_keywords(call, kwargs, keywords, foreign)
                return function(*args, **kwargs)  # raises the `TypeError`

        vars(checked)["__signature__"] = signature
        return checked

    return decorate


def _expanded(signature: inspect.Signature, options: type | None, defaults: object) -> inspect.Signature:
    """Returns a signature with a keyword for each option in place of `**options`."""
    if options is None:
        return signature
    parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(defaults, name),
            annotation=getattr(annotation, "__forward_arg__", annotation),
        )
        for name, annotation in options.__annotations__.items()
    ]
    return signature.replace(parameters=parameters)
