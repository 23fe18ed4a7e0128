"""Making many small objects without a cyclic collection in their middle."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_quiet: set[int] = set()
"""Who wants it quiet: loads in several threads at once."""
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
        _quiet.add(wish)
        gc.disable()


def _switch_back(wish: int) -> None:
    with _lock:
        if wish in _quiet:
            if len(_quiet) == 1 and _collected_before:
                gc.enable()
            _quiet.discard(wish)
