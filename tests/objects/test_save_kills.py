"""Savers that are killed at every call, and savers that are at it together: a version in full, and no leftovers."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import modelstate as ms
from tests.faults import faulty_writes, killed_at
from tests.objects.saves import NAME, contents, save, version_at
from tests.programs import CONTEXT, as_process_of_its_own, run_program
from tests.sweeps import sample

pytestmark = pytest.mark.slow


def kill_at_every_call(tmp_path: Path, old: str, new: str) -> None:
    save(tmp_path, 1, old)
    files, seen = len(contents(tmp_path)), []
    with faulty_writes() as clean:
        save(tmp_path, 2, new)
    assert len(clean.requests) > 15
    for request in sample(clean.requests, lambda request: request.call):
        save(tmp_path, 1, old)
        assert len(contents(tmp_path)) == files, "leftovers of the one that was killed"
        assert killed_at(request.number, partial(save, tmp_path, 2, new)), request
        seen.append(version_at(tmp_path / NAME))
    assert seen == sorted(seen), seen
    assert set(seen) == {1, 2}, seen
    assert not killed_at(len(clean.requests) + 1, partial(save, tmp_path, 2, new))


SWEEP = """
import sys
from pathlib import Path
from modelstate.io import atomic
from tests.objects import saves
from tests.objects.test_save_kills import kill_at_every_call

_, directory, old, new, past_page_cache = sys.argv
if past_page_cache == "True":  # as large files are written
    atomic.LEAST_UNCACHED_BYTES, saves.LENGTH = 0, 3000
kill_at_every_call(Path(directory), old, new)
"""


@pytest.mark.parametrize(
    ("old", "new", "past_page_cache"), [("file", "file", False), ("shards", "more", False), ("shards", "shards", True)]
)
def test_a_kill_at_every_call(tmp_path: Path, old: str, new: str, past_page_cache: bool) -> None:
    """In a small process: to fork one with all the modules of the tests takes longer than a save."""
    done = run_program(SWEEP, tmp_path, old, new, past_page_cache)
    assert done.returncode == 0, done.stderr


def save_versions(begin: Any, directory: Path, kinds: list[str], rounds: int, offset: int) -> None:
    as_process_of_its_own()
    begin.wait()
    for number in range(rounds):
        save(directory, 2 * number + offset, kinds[number % len(kinds)])


@pytest.mark.parametrize("kinds", [["file", "shards", "more"]], ids=", ".join)
def test_two_savers_at_once(tmp_path: Path, kinds: list[str]) -> None:
    rounds, begin = 40, CONTEXT.Barrier(2)
    savers = [
        CONTEXT.Process(target=save_versions, args=(begin, tmp_path, order, rounds, number), daemon=True)
        for number, order in enumerate((kinds, kinds[::-1]))
    ]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join(100)
        assert saver.exitcode == 0
    assert version_at(tmp_path / NAME) in (2 * rounds - 2, 2 * rounds - 1)
    names = contents(tmp_path)
    assert not [name for name in names if name.startswith(".")]
    assert set(names) == {os.path.basename(path) for path in ms.open(tmp_path / NAME).files}
