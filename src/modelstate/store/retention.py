"""Which checkpoints of a store are kept: a pure function of what is known of them."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, TypeGuard, TypeVar

from modelstate.errors import OptionError


def is_number(given: object) -> TypeGuard[float]:
    """Whether it is a real number, NumPy's among them, and no truth value."""
    return isinstance(given, Real) and not isinstance(given, bool)


def metric_value(name: object, value: object) -> float:
    """The value of a metric as a float. Raises `OptionError` for a name or a value that cannot be saved."""
    if type(name) is not str:
        raise OptionError("the name of a metric is text", expected='such as "loss"', found=repr(name)[:200])
    try:
        if is_number(value):
            return float(value)
    except (ValueError, OverflowError):
        pass  # an int that no float can hold
    shape = getattr(value, "shape", None)
    found = repr(value)[:200] if shape is None else f"a {type(value).__name__} of shape {list(shape)}"
    if shape is None:
        remedy = "math.nan stands for a value that is not known yet" if value is None else ""
    elif any(length != 1 for length in shape):
        remedy = f"give one number, such as {name}.float().mean().item() of a tensor"
    else:
        remedy = f"give the number that it holds: {name if name.isidentifier() else 'value'}.item()"
    raise OptionError("the value of a metric is a number", where=f"metrics[{name!r}]", found=found, remedy=remedy)


_HOUR_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What is known of a checkpoint in a store without reading its tensors."""

    step: int
    time: float
    """When it was complete: Unix seconds."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Numbers that were saved with it, as a validation loss."""
    pinned: bool = False
    """Never removed by a rule."""
    intact: bool = True
    """Whether nothing is known to be wrong with it."""
    nbytes: int = 0
    """Of its files."""
    path: str = ""
    """Its directory."""
    serial: int = 0
    """Of two checkpoints of a store the one with the higher one was saved later; 0 where that cannot be read."""
    store: str = ""
    """The name of the store that it was written to; empty where that cannot be read."""

    def __post_init__(self) -> None:
        if type(self.step) is not int:
            raise OptionError("the step of a checkpoint is a number", expected="int", found=repr(self.step))
        if not is_number(self.time) or not math.isfinite(self.time):
            raise OptionError("the time of a checkpoint is in seconds", expected="a number", found=repr(self.time))
        object.__setattr__(self, "metrics", dict(self.metrics))
        if not all(type(name) is str and is_number(value) for name, value in self.metrics.items()):
            raise OptionError(
                "metrics are numbers by their names", expected="dict[str, float]", found=repr(self.metrics)
            )


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints of a store are kept: all that one of these rules keeps.

    - `last`: that many of the highest steps.
    - `every_steps=1000`: the first of steps 0 to 999, the first of 1000 to 1999, and so on.
    - `every_hours=6`: the first of each six hours, counted from 1970 (UTC), so that it is the same ones at any time.
    - `best` and `metric`: that many with the lowest metric, or with the highest for `mode="max"`; of equal ones the
      earlier steps. A checkpoint without the metric, or with NaN, is never among them.

    Whatever the rules say, pinned checkpoints are kept, and the newest intact one: the one of the highest step, and
    the one that was written last, where that is another. Raises `OptionError` for rules that mean nothing.
    """

    last: int | None = None
    every_steps: int | None = None
    every_hours: float | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every_steps", "best"):
            given = getattr(self, name)
            if given is not None and (type(given) is not int or given < 1):
                raise OptionError(f"{name}= is how many", expected="int, from 1", found=repr(given))
        hours = self.every_hours
        if hours is not None and not (is_number(hours) and 1 <= hours * _HOUR_SECONDS < math.inf):
            raise OptionError("every_hours= is a time", expected="hours, from 1/3600", found=repr(hours))
        if self.metric is not None and type(self.metric) is not str:
            raise OptionError("metric= is the name of a metric", expected="text, as 'loss'", found=repr(self.metric))
        if (self.best is None) is not (self.metric is None):
            raise OptionError(
                "best= and metric= go together",
                found=f"best={self.best!r}, metric={self.metric!r}",
                remedy="Keep(best=3, metric='loss')",
            )
        if self.mode not in ("min", "max"):
            raise OptionError("mode= says which is better", expected="'min' or 'max'", found=repr(self.mode))
        if self.last is self.every_steps is self.every_hours is self.best is None:
            raise OptionError("rules that keep nothing", remedy="Keep(last=3), or keep=None to keep all")


def as_keep(keep: Keep | int | None) -> Keep | None:
    """The rules that are meant: a number is that of the last ones, None keeps all. Raises `OptionError`."""
    if keep is None or isinstance(keep, Keep):
        return keep
    if type(keep) is not int:
        raise OptionError(
            "keep= says which checkpoints stay",
            expected="a modelstate.Keep, a number of checkpoints, or None",
            found=repr(keep),
        )
    return Keep(last=keep)


def kept(infos: Iterable[CheckpointInfo], keep: Keep | int | None) -> set[int]:
    """The steps of the checkpoints that stay.

    A damaged checkpoint takes no intact one's place, and goes when it would have gone if it were intact. Where none is
    intact, all stay.

    Each rule chooses by an order that no other checkpoint changes. So pruning twice is pruning once, and pruning after
    each save keeps what pruning at the end would keep, as long as steps and times go up.
    """
    infos, rules = list(infos), as_keep(keep)
    intact = [info for info in infos if info.intact]
    if rules is None or not intact:
        return {info.step for info in infos}
    stay = {info.step for info in infos if info.pinned}
    stay |= {info.step for info in _chosen(intact, rules)}
    stay |= {info.step for info in _chosen(infos, rules) if not info.intact}
    return stay | {max(intact, key=_by_step).step, max(intact, key=_by_age).step}


def check_metric(infos: Iterable[CheckpointInfo], keep: Keep) -> None:
    """Raises `OptionError` where no checkpoint has the metric that `best` goes by, so that it keeps nothing."""
    metrics = {name for info in infos for name in info.metrics}
    if keep.metric is not None and keep.metric not in metrics:
        raise OptionError(
            f"Keep(best={keep.best}, metric={keep.metric!r}): no checkpoint has this metric; none has been removed",
            expected=f"metrics={{{keep.metric!r}: ...}} at Store.save, or loop.metrics[{keep.metric!r}] = ...",
            found=", ".join(sorted(metrics)) or "no metrics",
            remedy="give it with each checkpoint; math.nan stands for a value that is not known yet",
        )


def ages(serials: Mapping[int, int | None]) -> dict[int, tuple[int, int]]:
    """What each step sorts by where steps go by when they were saved: the higher, the later.

    One that cannot be used has None for a serial, as what it says of its age may be wrong: it comes behind the step
    before it.
    """
    found, last = {}, 0
    for step in sorted(serials):
        serial = serials[step]
        last = last if serial is None else serial
        found[step] = last, step
    return found


def _by_step(info: CheckpointInfo) -> tuple[int, float]:
    return info.step, info.time


def _by_age(info: CheckpointInfo) -> tuple[int, float, int]:
    return info.serial, info.time, info.step  # clocks go back


def _by_time(info: CheckpointInfo) -> tuple[float, int]:
    return info.time, info.step


def _chosen(infos: list[CheckpointInfo], keep: Keep) -> list[CheckpointInfo]:
    chosen: list[CheckpointInfo] = []
    if keep.last is not None:
        chosen += sorted(infos, key=_by_step)[-keep.last :]
    if keep.every_steps is not None:
        steps = keep.every_steps
        chosen += _firsts(sorted(infos, key=_by_step), lambda info: info.step // steps)
    if keep.every_hours is not None:
        seconds = keep.every_hours * _HOUR_SECONDS
        chosen += _firsts(sorted(infos, key=_by_time), lambda info: info.time // seconds)
    if keep.best is not None and keep.metric is not None:
        chosen += _best(infos, keep.best, keep.metric, keep.mode)
    return chosen


T = TypeVar("T")


def _firsts(infos: list[CheckpointInfo], bucket: Callable[[CheckpointInfo], T]) -> list[CheckpointInfo]:
    found: dict[T, CheckpointInfo] = {}
    for info in infos:
        found.setdefault(bucket(info), info)
    return list(found.values())


def _best(infos: list[CheckpointInfo], count: int, metric: str, mode: str) -> list[CheckpointInfo]:
    values = [(info.metrics.get(metric, math.nan), info) for info in infos]
    ranked = [(value if mode == "min" else -value, info.step, info) for value, info in values if value == value]
    ranked.sort(key=lambda entry: entry[:2])
    return [info for _, _, info in ranked[:count]]
