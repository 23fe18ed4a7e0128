"""Sweeps over the places where something can fail visit a sample of them, and with MODELSTATE_EXHAUSTIVE=1 all."""

import dis
import os
import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar

EXHAUSTIVE = os.environ.get("MODELSTATE_EXHAUSTIVE", "0") != "0"

_Place = TypeVar("_Place")


def examples(all: int) -> int:
    """Returns how many examples of a law hypothesis tries: a third of all."""
    return all if EXHAUSTIVE else all // 3


def spread(places: Sequence[_Place], most: int) -> Sequence[_Place]:
    """Returns so many places at the most, evenly apart."""
    return places if EXHAUSTIVE else places[:: -(-len(places) // most)]


def sample(places: Iterable[_Place], kind: Callable[[_Place], Hashable], more: int = 1) -> list[_Place]:
    """Returns, in their order, the first, the middle and the last place of each kind, and some others.

    Args:
        places: Where something can fail.
        kind: What is to be visited for sure, such as the name of a system call.
        more: How many others are drawn. The draw depends on nothing but the number of places.
    """
    every = list(places)
    if EXHAUSTIVE:
        return every
    by_kind: dict[Hashable, list[int]] = {}
    for index, place in enumerate(every):
        by_kind.setdefault(kind(place), []).append(index)
    chosen = {found[at] for found in by_kind.values() for at in (0, len(found) // 2, -1)}
    others = [index for index in range(len(every)) if index not in chosen]
    chosen.update(random.Random(len(every)).sample(others, min(more, len(others))))
    return [every[index] for index in sorted(chosen)]


class Instructions:
    """The instructions that were counted."""

    count = 0


@contextmanager
def at_instruction(
    number: int, is_counted: Callable[[CodeType], bool], act: Callable[[], object], *, as_signal: bool = False
) -> Iterator[Instructions]:
    """Calls `act` within the block, before the instruction of this number; 0 only counts. `sys.settrace` does it.

    Args:
        number: From 1 on, in the order in which the instructions run in this thread.
        is_counted: Whether the instructions of a function count.
        act: May raise, such as `KeyboardInterrupt`.
        as_signal: Only instructions count before which Python calls the handlers of signals: after calls, and where
            functions and loops begin.
    """
    found, previous = Instructions(), ""

    def step(frame: FrameType, event: str, _: object) -> Any:
        nonlocal previous
        if event == "opcode":
            is_place = not as_signal or previous.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
            previous = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            found.count += is_place
            if is_place and found.count == number:
                act()
        return step

    def enter(frame: FrameType, event: str, _: object) -> Any:
        if not is_counted(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield found
    finally:
        sys.settrace(before)


def interrupt() -> None:
    raise KeyboardInterrupt
