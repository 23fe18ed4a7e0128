"""What the tests of live programs have in common."""

import os

import pytest

from tests.serve.packages import keep_packages_in


@pytest.fixture(scope="session", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One folder for the packages of all workers: theirs are below that of the session."""
    base = tmp_path_factory.getbasetemp()
    keep_packages_in((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packages")
