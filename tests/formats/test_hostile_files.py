"""Pipes, devices, links to nowhere and bombs, at every place where the library opens a file."""

import json

import pytest

from tests.programs import code_of, run_program

pytestmark = pytest.mark.slow

OUTCOMES_OK = {
    # A save replaces a damaged store.json, and one that leads nowhere; the lock's content does not matter.
    "saving again: store.json: dangling",
    "saving again: store.json: loop",
    "saving again: store.json: empty",
    "saving again: .lock: empty",
    "saving again: .lock: terabyte",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("hostile")
    done = run_program(code_of(["-m", "tests.formats.hostile_files", str(folder)]), timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_nothing_hangs_or_fills_memory_and_every_error_is_of_the_library(outcomes: dict[str, list[str]]) -> None:
    assert len(outcomes) > 150
    foreign = {case: error for case, error in outcomes.items() if error and "ModelStateError" not in error}
    assert foreign == {}
    assert {case for case, error in outcomes.items() if not error} == OUTCOMES_OK


@pytest.mark.parametrize("kind", ["fifo", "socket", "zero", "directory"])
@pytest.mark.parametrize("place", ["a program", "adapter_config.json", "saving again: store.json"])
def test_the_error_says_what_was_found(place: str, kind: str, outcomes: dict[str, list[str]]) -> None:
    words = {"fifo": "a pipe", "socket": "a socket", "zero": "a device", "directory": "a directory"}
    assert words[kind] in outcomes[f"{place}: {kind}"][-1]


def test_links_are_named_as_what_they_are(outcomes: dict[str, list[str]]) -> None:
    for place in ("the file a.pt", "in a directory a.pt", "a program", "adapter_config.json"):
        assert "not there" in outcomes[f"{place}: dangling"][-1], place
        assert "leads back to itself" in outcomes[f"{place}: loop"][-1], place
