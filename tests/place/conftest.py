"""Fixtures of loads in the background."""

from collections.abc import Iterator

import pytest

from tests.place.handles import Gate, ended


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    yield
    assert ended()


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.opened.set()
