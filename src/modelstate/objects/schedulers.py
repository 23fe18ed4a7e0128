"""Schedulers of learning rates that are restored with an optimizer whose own rates are kept.

A scheduler computes the next rate from its saved base rates, or from the current rate. So that a kept rate stays in
effect, all rates that the schedule is computed from are multiplied by the ratio of the kept rate and the saved one.
Schedules of torch are proportional to these rates: the schedule goes on from the kept rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from modelstate.errors import OptionError

_RATES_OF_GROUPS = ("base_lrs", "max_lrs", "_last_lr")
"""Attributes of torch's schedulers with a rate for each group."""
_RATE_OPTIONS = {"OneCycleLR": ("initial_lr", "max_lr", "min_lr"), "SWALR": ("swa_lr",)}
"""The options of groups in which a class of torch's schedulers keeps rates."""
_RATE_OF_ALL = "eta_min"
"""The attribute of torch's schedulers with one rate for all groups."""


def go_on_from_kept_rates(
    path: str, optimizer: torch.optim.Optimizer, objects: Mapping[str, object], keeps: Callable[[str], bool]
) -> None:
    """Scales the schedules of an optimizer's rates, which have been restored, so that they go on from the kept rates.

    Args:
        path: The path of the optimizer.
        optimizer: The optimizer, with its kept and restored options.
        objects: The other objects that have been restored, by path.
        keeps: Whether the optimizer keeps its own value of the option of this name.

    Raises:
        OptionError: A scheduler would set the kept rate to another one, and cannot be scaled, or cycles a momentum that
            is kept.
    """
    for name, obj in objects.items():
        for scheduler in _schedulers_of(obj, optimizer):
            inner = [*_within(scheduler)]
            for each in inner:
                momentum = "betas" if getattr(each, "use_beta1", False) else "momentum"
                # OneCycleLR takes its momenta from options, which may be kept as well.
                keeps_range = not hasattr(each, "max_momentums") and keeps("max_momentum")
                if getattr(each, "cycle_momentum", False) and keeps(momentum) and not keeps_range:
                    why = f"{type(each).__name__} cycles the momentum"
                    raise _refusal(path, momentum, name, why, f"keep the rate alone: keep_options=[{path + '.lr'!r}]")
            if not keeps("lr"):
                continue
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            last = [float(rate) for rate in getattr(scheduler, "_last_lr", ())]
            if rates == last:
                continue
            own = [each for each in inner if not type(each).__module__.startswith("torch.optim.")]
            if own or len(last) != len(rates):
                raise _refusal(path, "lr", name, f"{type((own or inner)[0]).__name__} is not a scheduler of torch's")
            if any((rate == 0) != (before == 0) for rate, before in zip(rates, last, strict=True)):
                why = f"the kept rates are {rates}, the saved ones {last}, and one is 0"
                remedies = ["before the restore, set the rate of each group to one that is not 0"] if all(last) else []
                raise _refusal(path, "lr", name, why, *remedies)
            factors = [rate / before if before else 1.0 for rate, before in zip(rates, last, strict=True)]
            if max(factors) > min(factors) * (1 + 1e-6) and any(getattr(each, _RATE_OF_ALL, 0) for each in inner):
                raise _refusal(
                    path, "lr", name, f"its {_RATE_OF_ALL} is one rate for groups whose rates change differently"
                )
            for each in inner:
                _scale(each, factors)
                options = [key for key in _RATE_OPTIONS.get(type(each).__name__, ()) if not keeps(key)]
                for group, factor in zip(optimizer.param_groups, factors, strict=True):
                    group.update({key: group[key] * factor for key in options})


def _scale(scheduler: Any, factors: list[float]) -> None:
    for name in _RATES_OF_GROUPS:
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list) and len(rates) == len(factors):
            setattr(scheduler, name, [rate * factor for rate, factor in zip(rates, factors, strict=True)])
    if getattr(scheduler, _RATE_OF_ALL, 0):
        setattr(scheduler, _RATE_OF_ALL, getattr(scheduler, _RATE_OF_ALL) * factors[0])


def _refusal(path: str, option: str, name: str, why: str, *remedies: str) -> OptionError:
    leave_out = (
        f"leave the scheduler out of the objects, with allow_unexpected=[{name!r}], and build one for the steps that "
        "are left"
    )
    return OptionError(
        "a scheduler that is restored would set an option that is kept to another value; nothing has been changed",
        where=f"keep_options of {path}.{option}",
        found=f"{name}: {why}",
        remedy="; or ".join([*remedies, leave_out, "restore without keep_options"]),
    )


def _schedulers_of(obj: object, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yields the object, or the values of its attributes, that are schedulers of the optimizer."""
    groups = {id(group) for group in optimizer.param_groups}
    attributes = getattr(obj, "__dict__", None)
    for value in (obj, *(attributes.values() if isinstance(attributes, dict) else ())):
        driven = getattr(value, "optimizer", None)
        is_scheduler = isinstance(value, LRScheduler) or (hasattr(value, "get_last_lr") and hasattr(value, "step"))
        if is_scheduler and not groups.isdisjoint(map(id, getattr(driven, "param_groups", ()))):
            yield value


def _within(scheduler: Any) -> Iterator[Any]:
    """Yields a scheduler and those that it combines, at any depth."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _within(inner)
