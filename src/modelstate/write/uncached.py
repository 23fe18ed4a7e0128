"""Writes past the page cache (`O_DIRECT`), of files that are large.

What is saved has to be on the disk before it counts, so that a copy in the page cache spares no time: its memory has to
be found, which throws out what others use, and is copied to once more. Past it the disk takes whole pages from the
memory of the process; what lies before the first of a write and behind the last goes through the cache.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from modelstate.read.uncached import ALIGN_BYTES, FLAG, UNSUPPORTED
from modelstate.write import system
from modelstate.write.files import Output

LEAST_BYTES = 64 << 20
"""A smaller file stays in the page cache, where it is in nobody's way."""


class Uncached:
    """A file that is written to at any place, by any thread, past the page cache as far as that can be."""

    def __init__(self, output: Output, descriptor: int) -> None:
        self._output, self._descriptor = output, descriptor
        self._is_refused = False

    def write_at(self, offset: int, buffer: memoryview) -> None:
        """Writes the buffer, all of it. Its pages have to begin where those of the file do to go past the cache."""
        before = min(-offset % ALIGN_BYTES, len(buffer))
        done = before + self._write_pages(offset + before, buffer[before:])
        self._output.write_at(offset, buffer[:before])
        self._output.write_at(offset + done, buffer[done:])

    def _write_pages(self, offset: int, buffer: memoryview) -> int:
        """How many bytes were written: as many as the disk took at once, the page cache takes the others."""
        nbytes = len(buffer) // ALIGN_BYTES * ALIGN_BYTES
        if not nbytes or self._is_refused:
            return 0
        try:
            return system.pwritev(self._descriptor, [buffer[:nbytes]], offset)
        except OSError as error:
            # A file system may take the flag and refuse the write, or ask for larger blocks.
            if error.errno not in UNSUPPORTED:
                raise
            self._is_refused = True
            return 0


@contextmanager
def past_page_cache(output: Output, nbytes: int) -> Iterator[Output | Uncached]:
    """What to write so many bytes of a file with: `output` itself, where they are few or there is no other way."""
    descriptor = None
    if FLAG and nbytes >= LEAST_BYTES:
        with suppress(OSError):
            descriptor = system.open(output.path, os.O_WRONLY | FLAG)
    if descriptor is None:
        yield output
        return
    try:
        yield Uncached(output, descriptor)
    finally:
        with suppress(OSError):  # the sync of the other descriptor says what is wrong
            system.close(descriptor)
