"""Making many small objects without a cyclic collection in their middle."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Switches the cyclic garbage collector off for a while, where it is on.

    There is nothing for it to find in tables of tensors, and with torch imported each of its passes over all objects
    of the process costs more than the table.
    """
    switch_back = gc.enable if gc.isenabled() else gc.disable
    try:
        try:
            gc.disable()
            yield
        finally:
            switch_back()
    except BaseException:
        switch_back()  # an interrupt may have come before the first time
        raise
