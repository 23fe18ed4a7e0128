"""What keeps a small file from asking for much time or memory. Values are refused with the same words when saved."""

from collections.abc import Callable

MAX_BITS = 4096
"""Of an int that is a seed, a flag, or part of a key: what libraries do with it takes time that grows by the square."""
MAX_SIZE_BITS = 63
"""Of a size of a tensor."""
MAX_RATIO_BITS = 65_536
"""Of an int of a fraction or a range, which are divided."""
COMPARISONS_A_KEY = 20
FREE_COMPARISONS = 1000
MAX_DRAWN = 8
"""How many times over the memory of a stored tensor may be copied. Whoever saves a tensor gives it its own memory."""
FREE_DRAWN_BYTES = 1024

Fail = Callable[..., Exception]
"""Makes the error, with its place."""


def check_bits(fail: Fail, most: int, *numbers: int) -> None:
    """Raises for an int with more bits than that."""
    found = max(number.bit_length() for number in numbers) if numbers else 0
    if found > most:
        raise fail("an int that is too large for what it is part of", expected=f"at most {most:,} bits", found=found)


class Collisions:
    """The comparisons that it takes to put keys into one dict or set: each key meets those of the same hash.

    Hashes of numbers, and of what is made of them, can be chosen by whoever writes the file.
    """

    def __init__(self, keys: int, fail: Fail) -> None:
        self._most = FREE_COMPARISONS + COMPARISONS_A_KEY * keys
        self._matters = keys * (keys - 1) // 2 > self._most
        self._fail = fail
        self._seen: dict[int, int] = {}
        self._comparisons = 0

    def add(self, key: object) -> None:
        """Counts a key. Raises where the keys so far take too many comparisons."""
        if not self._matters:
            return
        found = hash(key)
        before = self._seen.get(found, 0)
        self._seen[found] = before + 1
        self._comparisons += before
        if self._comparisons > self._most:
            raise self._fail(
                "too many keys, or members of a set, have the same hash",
                expected=f"at most {COMPARISONS_A_KEY} comparisons a key",
                found=f"{before + 1:,} of one hash",
                remedy="save them as a list, or as one tensor or array",
            )
