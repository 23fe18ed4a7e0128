"""Making many small objects without a cyclic collection in their middle."""

import gc
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from modelstate.read.workers import fork_safe_lock

_quiet: dict[int, int] = {}
"""The requests for it, of loads in several threads at once, each with the number of its thread."""
_collected_before = True


@contextmanager
def no_collection() -> Iterator[None]:
    """Switches the cyclic garbage collector off for a while, where it is on.

    There is nothing for it to find in tables of tensors, and with torch imported each of its passes over all objects
    of the process costs more than the table.
    """
    wish = object()
    try:
        try:
            _switch_off(id(wish))
            yield
        finally:
            _switch_back(id(wish))
    except BaseException:
        _switch_back(id(wish))  # an interrupt may have come before the first time
        raise


def _switch_off(wish: int) -> None:
    global _collected_before
    with _lock:
        if not _quiet:
            _collected_before = gc.isenabled()
        _quiet[wish] = threading.get_ident()
        gc.disable()


def _switch_back(wish: int) -> None:
    with _lock:
        _forget([wish])


def _forget(wishes: Iterable[int]) -> None:
    known = [wish for wish in wishes if wish in _quiet]
    if known and len(known) == len(_quiet) and _collected_before:
        gc.enable()
    for wish in known:
        del _quiet[wish]


def _in_child(thread: int) -> None:
    _forget([wish for wish, owner in _quiet.items() if owner != thread])


_lock = fork_safe_lock(_in_child)
