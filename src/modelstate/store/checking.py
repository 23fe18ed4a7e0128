"""Which step of a store is whole, where somebody else may take steps away, or save them anew, meanwhile."""

from collections.abc import Callable

from modelstate.errors import StepNotFoundError
from modelstate.store.store import Store


def problem_now(store: Store, step: int) -> str:
    """What reading all of a step shows to be wrong; empty where nothing is.

    Raises `StepNotFoundError` where it is not there, and where it is taken away before all has been read.
    """
    while True:
        problems = store.verify(step)
        if step in problems:
            return problems[step]
        # It is not what it was when reading began: it is gone, or there is a new one.


def newest_whole(store: Store, passed_over: Callable[[int, str], None]) -> int | None:
    """The step that was saved last of those that are whole; None where none is.

    `passed_over` hears of those that were saved later, and of what is wrong with each.
    """
    while True:
        for step in [info.step for info in store.infos(by_age=True)][::-1]:
            try:
                problem = problem_now(store, step)
            except StepNotFoundError:
                break  # it was taken away: there are others now
            if not problem:
                return step
            passed_over(step, problem)
        else:
            return None
