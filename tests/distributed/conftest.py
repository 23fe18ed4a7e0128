from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    """Four ranks, which all tests of this folder share."""
    started = Ranks()
    yield started
    started.close()
