"""Which checkpoints of a store are wanted, and which of two more: a pure function of what is known of them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from modelstate.errors import OptionError
from modelstate.store.retention import CheckpointInfo, ages

_BEST = "best:"
_MODES = ("min", "max")
Rank = tuple[float, float]
"""The higher one is wanted."""


class Candidate(NamedTuple):
    """A checkpoint that could be taken up."""

    rank: Rank
    info: CheckpointInfo

    def is_wanted_after(self, taken: "Candidate | None") -> bool:
        """Whether it is to replace the one that was taken; those of another store cannot be compared, and do."""
        if taken is None or (self.info.store and self.info.store != taken.info.store):
            return True
        return self.rank > taken.rank


@dataclass(frozen=True, slots=True)
class Selection:
    """What `select=` says."""

    metric: str | None = None
    """None goes by when checkpoints were saved."""
    highest: bool = False

    def ranked(self, infos: Iterable[CheckpointInfo]) -> list[Candidate]:
        """The checkpoints that could be taken, the most wanted one first; damaged ones too, for reading says why.

        As with `Keep`, one without the metric, or with NaN, is none of the best, and of equal ones the earlier is.
        """
        several = list(infos)
        found = _by_age(several) if self.metric is None else self._by_metric(several, self.metric)
        return sorted(found, key=lambda candidate: candidate.rank, reverse=True)

    def _by_metric(self, infos: list[CheckpointInfo], metric: str) -> list[Candidate]:
        values = [(info.metrics.get(metric, math.nan), info) for info in infos]
        sign = 1 if self.highest else -1
        return [Candidate((sign * value, -info.step), info) for value, info in values if value == value]


def _by_age(infos: list[CheckpointInfo]) -> list[Candidate]:
    ranks = ages({info.step: info.serial if info.intact else None for info in infos})
    return [Candidate(ranks[info.step], info) for info in infos]


def selection(text: object) -> Selection:
    """What `select=` means: "latest", "best:loss" for the lowest, "best:accuracy:max" for the highest.

    Raises `OptionError`.
    """
    if text == "latest":
        return Selection()
    if isinstance(text, str) and text.startswith(_BEST):
        metric, colon, mode = text.removeprefix(_BEST).rpartition(":")
        if not colon or mode not in _MODES:
            metric, mode = text.removeprefix(_BEST), "min"
        if metric:
            return Selection(metric, mode == "max")
    raise OptionError(
        "select= says which checkpoint is wanted",
        expected='"latest", "best:METRIC" for the lowest, or "best:METRIC:max" for the highest',
        found=repr(text),
    )
