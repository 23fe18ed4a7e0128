"""Savers that are killed at every call, and savers that are at it together: a version in full, and no leftovers."""

import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

import modelstate as ms
from modelstate.testing import Request, faulty_writes
from tests.objects.saves import KINDS, NAME, contents, save, version_at


def killed_at(number: int, directory: Path, version: int, kind: str) -> bool:
    """Whether a process that saves was killed before a call; it is a fork, in which one thread writes."""
    process = os.fork()
    if not process:
        with faulty_writes(at=number, before=lambda _: os.kill(os.getpid(), signal.SIGKILL)):
            save(directory, version, kind)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status)
    return os.WIFSIGNALED(status)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("old", "new"), product(KINDS, KINDS))
def test_a_kill_at_every_call(tmp_path: Path, old: str, new: str) -> None:
    number, seen = 0, []
    save(tmp_path, 1, old)
    files = len(contents(tmp_path))
    while True:
        number += 1
        save(tmp_path, 1, old)
        assert len(contents(tmp_path)) == files, "leftovers of the one that was killed"
        was_killed = killed_at(number, tmp_path, 2, new)
        seen.append(version_at(tmp_path / NAME))
        if not was_killed:
            break
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}
    assert number > 15


def test_what_a_living_saver_has_written_stays(tmp_path: Path) -> None:
    """Another save to the path, at each call of this one, takes nothing away that it needs."""
    with faulty_writes() as clean:
        save(tmp_path, 1, "shards")
    with_lock = [request.number for request in clean.requests if request.call in ("pwritev", "fallocate")]
    for number in with_lock:
        met: list[int] = []

        def other(request: Request, met: list[int] = met) -> None:
            if not met:
                met.append(request.number)
                save(tmp_path, 2, "more")

        with faulty_writes(at=number, before=other):
            save(tmp_path, 1, "shards")
        assert met
        assert version_at(tmp_path / NAME) == 1
        assert len(contents(tmp_path)) == 3


SAVER = """
import sys
from pathlib import Path
from tests.objects.saves import save
directory, kinds, rounds, offset = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4])
sys.stdin.readline()
for number in range(rounds):
    save(directory, 2 * number + offset, kinds[number % len(kinds)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["file", "shards", "file,shards,more"])
def test_two_savers_at_once(tmp_path: Path, kinds: str) -> None:
    rounds = 40
    here = str(Path(__file__).parents[2])
    savers = [
        subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path), order, str(rounds), str(number)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=here,
        )
        for number, order in enumerate((kinds, ",".join(reversed(kinds.split(",")))))
    ]
    for saver in savers:
        assert saver.stdin is not None
        saver.stdin.write("\n")
        saver.stdin.flush()
    for saver in savers:
        _, errors = saver.communicate(timeout=100)
        assert not saver.returncode, errors
    assert version_at(tmp_path / NAME) in (2 * rounds - 2, 2 * rounds - 1)
    names = contents(tmp_path)
    assert not [name for name in names if name.startswith(".")]
    assert set(names) == {os.path.basename(path) for path in ms.open(tmp_path / NAME).files}
