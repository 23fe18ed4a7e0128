"""`Keep`: the rules for which checkpoints of a store are kept, a pure function of their descriptions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from modelstate.arguments import check_choice, check_integer, invalid_option, is_number
from modelstate.errors import OptionError
from modelstate.html.page import Page
from modelstate.text_format import as_given, short_repr, size


def metric_value(name: object, value: object) -> float:
    """Returns the value of a metric as a float. Raises `OptionError` for a name or a value that cannot be saved."""
    if type(name) is not str or not name.isprintable():
        raise OptionError("the name of a metric is printable text", expected='such as "loss"', found=short_repr(name))
    try:
        if is_number(value):
            return float(value)
    except (ValueError, OverflowError):
        pass  # an int that is too large for a float
    shape = getattr(value, "shape", None)
    found = short_repr(value) if shape is None else f"a {type(value).__name__} of shape {list(shape)}"
    if shape is None:
        remedy = "math.nan stands for a value that is not known yet" if value is None else ""
    elif any(length != 1 for length in shape):
        remedy = f"give one number, such as {name}.float().mean().item() of a tensor"
    else:
        remedy = f"give the number that it holds: {name if name.isidentifier() else 'value'}.item()"
    raise OptionError("the value of a metric is a number", where=f"metrics[{name!r}]", found=found, remedy=remedy)


_HOUR_SECONDS = 3600


class CheckpointInfo(msgspec.Struct, frozen=True):
    """The description of a checkpoint in a store, without its tensors.

    Examples:
        >>> info = store.infos()[-1]
        >>> info.step, info.metrics, info.intact
        (1000, {'loss': 0.3}, True)
    """

    step: int
    time: float
    """When it was saved, in Unix seconds."""
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Numbers that were saved with it, such as a validation loss."""
    pinned: bool = False
    """Whether it stays whatever the rules say."""
    problem: str = ""
    """Why it cannot be used: "damaged"; "not readable", perhaps for now only; "newer version", which wrote it; or
    "other store", also where it was saved as another step. Empty where no problem is known."""
    nbytes: int = 0
    """The size of its files, with those that are linked."""
    path: str = ""
    """Its directory."""
    serial: int = 0
    """The number of the save: of two checkpoints of a store, the later one has the higher; 0 where it is unknown."""
    store: str = ""
    """The name of the store that it was written to; empty where it is unknown."""
    written_bytes: int = 0
    """The size of the files that were written for it; the others are links."""
    patches: int = 0
    """The number of saves whose differences it needs, with its own: see `Delta`. 0 where it is whole."""

    @property
    def intact(self) -> bool:
        """Whether no problem is known."""
        return not self.problem

    @property
    def state(self) -> str:
        """The problem, "pinned", both, or nothing."""
        return ", ".join(filter(None, (self.problem, "pinned" if self.pinned else "")))


def infos_page(directory: str, infos: Sequence[CheckpointInfo]) -> Page:
    """Returns the page of the checkpoints of a store."""
    metrics = list(dict.fromkeys(name for info in infos for name in info.metrics))
    return Page(
        as_given(directory),
        (("Checkpoints", f"{len(infos):,}"), ("Bytes", size(sum(info.nbytes for info in infos)))),
        ("Step", "Saved", "Bytes", "State", *metrics),
        [
            (str(info.step), saved_at(info), info.nbytes, info.state, *[info.metrics.get(name) for name in metrics])
            for info in infos
        ],
        table="Checkpoints",
    )


def saved_at(info: CheckpointInfo) -> str:
    """Returns when a checkpoint was saved: "2026-03-01 12:00:00 UTC"."""
    return datetime.fromtimestamp(info.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class Keep(msgspec.Struct, frozen=True):
    """The rules for which checkpoints of a store are kept: each one that at least one rule keeps.

    Pinned checkpoints are always kept. So is the newest intact one: the one of the highest step, and the one that was
    written last, where that is another.

    Args:
        last: how many of the highest steps to keep.
        every_steps: keeps the first checkpoint of each range of so many steps: with 1000 the first of the steps 0 to
            999, the first of 1000 to 1999, and so on.
        every_hours: keeps the first checkpoint of each so many hours, counted from 1970 (UTC), so that the choice does
            not depend on the time of pruning.
        best: how many to keep with the best value of `metric`; of equal ones the earlier steps. A checkpoint without
            the metric, or with NaN, is never among them.
        metric: the name of a metric of `Store.save`.
        mode: whether the lowest ("min") or the highest ("max") values are the best.

    Raises:
        OptionError: A rule cannot be used, or there is none.

    Examples:
        >>> store = ms.Store("checkpoints", keep=ms.Keep(last=3, best=2, metric="loss"))
    """

    last: int | None = None
    every_steps: int | None = None
    every_hours: float | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every_steps", "best"):
            check_integer(name, getattr(self, name), least=1, accepts_none=True)
        hours = self.every_hours
        if hours is not None and not (is_number(hours) and 1 <= hours * _HOUR_SECONDS < math.inf):
            raise invalid_option("every_hours", "must be a time", hours, expected="hours, from 1/3600")
        if self.metric is not None and type(self.metric) is not str:
            raise invalid_option("metric", "must be the name of a metric", self.metric, expected="text, as 'loss'")
        if (self.best is None) is not (self.metric is None):
            raise OptionError(
                "best= and metric= go together",
                found=f"best={self.best!r}, metric={self.metric!r}",
                remedy="Keep(best=3, metric='loss')",
            )
        check_choice("mode", self.mode, ("min", "max"))
        if self.last is self.every_steps is self.every_hours is self.best is None:
            raise OptionError("rules that keep nothing", remedy="Keep(last=3), or keep=None to keep all")


def as_keep(keep: Keep | int | None) -> Keep | None:
    """Returns rules as a `Keep`: a number means that many of the last ones, None keeps all. Raises `OptionError`."""
    if keep is None or isinstance(keep, Keep):
        return keep
    if type(keep) is not int or keep < 1:
        raise invalid_option(
            "keep",
            "must be an integer, a Keep, or None",
            keep,
            expected="an int >= 1, which is the number of the last ones; a modelstate.Keep; or None for all",
        )
    return Keep(last=keep)


def kept(infos: Iterable[CheckpointInfo], keep: Keep) -> set[int]:
    """Returns the steps of the checkpoints that stay.

    A damaged checkpoint never takes the place of an intact one, and is removed when it would be removed if it were
    intact. Where none is intact, all stay.

    Each rule chooses by an order that does not depend on other checkpoints. So pruning twice has the effect of pruning
    once, and pruning after each save keeps what pruning at the end would keep, as long as steps and times increase.
    """
    infos = list(infos)
    intact = [info for info in infos if info.intact]
    if not intact:
        return {info.step for info in infos}
    kept_steps = {info.step for info in infos if info.pinned}
    kept_steps |= {info.step for info in _chosen(intact, keep)}
    kept_steps |= {info.step for info in _chosen(infos, keep) if not info.intact}
    # The serial comes before the time, since a clock may be set back.
    newest = max(intact, key=lambda info: (info.serial, info.time, info.step))
    return kept_steps | {max(intact, key=_by_step).step, newest.step}


def check_metric(infos: Iterable[CheckpointInfo], keep: Keep) -> None:
    """Raises `OptionError` where no checkpoint has the metric of `best`, which would keep nothing then."""
    metrics = {name for info in infos for name in info.metrics}
    if keep.metric is not None and keep.metric not in metrics:
        raise OptionError(
            f"Keep(best={keep.best}, metric={keep.metric!r}): no checkpoint has this metric; none has been removed",
            expected=f"metrics={{{keep.metric!r}: ...}} at Store.save, or loop.metrics[{keep.metric!r}] = ...",
            found=", ".join(sorted(metrics)) or "no metrics",
            remedy="give it with each checkpoint; math.nan stands for a value that is not known yet",
            options="--metric of a metric that the checkpoints have, or another rule than --best",
        )


def _by_step(info: CheckpointInfo) -> tuple[int, float]:
    return info.step, info.time


def _chosen(infos: list[CheckpointInfo], keep: Keep) -> list[CheckpointInfo]:
    chosen: list[CheckpointInfo] = []
    if keep.last is not None:
        chosen += sorted(infos, key=_by_step)[-keep.last :]
    if keep.every_steps is not None:
        latest_first = sorted(infos, key=_by_step, reverse=True)
        chosen += {info.step // keep.every_steps: info for info in latest_first}.values()
    if keep.every_hours is not None:
        seconds = keep.every_hours * _HOUR_SECONDS
        latest_first = sorted(infos, key=lambda info: (info.time, info.step), reverse=True)
        chosen += {info.time // seconds: info for info in latest_first}.values()
    if keep.best is not None and keep.metric is not None:
        values = [(info.metrics.get(keep.metric, math.nan), info) for info in infos]
        sign = 1 if keep.mode == "min" else -1
        ranked = [(sign * value, info.step, info) for value, info in values if value == value]
        chosen += [info for _, _, info in sorted(ranked, key=lambda entry: entry[:2])[: keep.best]]
    return chosen
