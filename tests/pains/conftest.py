"""The stock halves of the tests: failures that are there today, and that a later torch may repair."""

from collections.abc import Callable, Iterator

import pytest
import torch

StockFails = Callable[[str, bool], None]
_LAST_SEEN = (2, 13)
"""The last torch that was seen to fail so."""


@pytest.fixture
def stock_fails() -> Iterator[StockFails]:
    """Says what stock torch does wrong, and whether it did.

    A later torch that does right shows as a skip with that name, after our half of the test has run all the same.
    """
    repaired: list[str] = []

    def check(what: str, shown: bool) -> None:
        if not shown and tuple(map(int, torch.__version__.split(".")[:2])) > _LAST_SEEN:
            repaired.append(what)
        else:
            assert shown, f"stock torch {torch.__version__} was said to fail: {what}"

    yield check
    if repaired:
        pytest.skip(f"torch {torch.__version__} repaired: {'; '.join(repaired)}")
