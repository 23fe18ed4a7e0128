"""What is followed step by step, and what is reported of it."""

from typing import Any

import modelstate as ms
from modelstate.errors import SkippedCheckpointError
from tests.serve.models import linear
from tests.serve.stores import X, damage, save


class Log(list[Exception]):
    """What has been reported."""

    @property
    def skipped(self) -> list[int | None]:
        return [error.step for error in self if isinstance(error, SkippedCheckpointError)]

    @property
    def causes(self) -> list[str]:
        return [type(error.__cause__ or error).__name__ for error in self]


def by_hand(target: Any, store: Any, **options: Any) -> tuple[ms.serve.Following, Log]:
    log = Log()
    return ms.follow(target, store, background=False, on_error=log.append, **options), log


def serves(live: ms.Live) -> float:
    """The k of the weights that serve."""
    (found,) = {float(value) / 5 for value in live(X).detach().flatten()}
    return round(found, 4)


def actions(following: ms.serve.Following) -> list[tuple[str, int | None]]:
    return [(event.action, event.step) for event in following.poll()]


def nan(store: ms.Store, step: int) -> None:
    store.save(step, {"model": linear(float("nan"))})


def flipped(store: ms.Store, step: int) -> None:
    damage(save(store, step))


class Target:
    """What takes a path, and does with it what it is told to."""

    def __init__(self, *does: Any) -> None:
        self.does, self.given = list(does), list[str]()

    def swap(self, source: str) -> None:
        self.given.append(source)
        doing = self.does.pop(0) if self.does else None
        if isinstance(doing, BaseException):
            raise doing
        if doing is not None:
            doing()
