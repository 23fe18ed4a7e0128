import os
import sys
from pathlib import Path

import pytest

from bench import measure
from bench.measure import MeasurementError, Stage, alternate, median

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

MEGABYTE = 1 << 20


ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], **options: float) -> dict[str, Stage]:
    """Runs a program outside of the checkout, which finds `bench` by its path."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return measure.run(command, environment={"PYTHONPATH": os.pathsep.join(paths)}, **options)


def program(folder: Path, body: str) -> str:
    path = folder / "program.py"
    path.write_text("import mmap, sys, time\nfrom bench.measure import Stages\n" + body)
    return str(path)


@pytest.mark.slow
def test_a_peak_between_stages_is_seen(tmp_path: Path) -> None:
    code = f"""
stages = Stages()
big = bytearray(b"x") * (200 * {MEGABYTE})
time.sleep(0.05)
del big
stages.end("first", answer=42)
time.sleep(0.05)
stages.end("second")
"""
    found = run([program(tmp_path, code)])
    assert list(found) == ["first", "second"]
    assert 195 * MEGABYTE < found["first"].anonymous_bytes < 230 * MEGABYTE
    assert 195 * MEGABYTE < found["first"].total_bytes < 240 * MEGABYTE
    assert found["first"].facts == {"answer": 42}
    assert found["second"].seconds - found["first"].seconds > 0.05
    assert found["first"].seconds > 0.05


@pytest.mark.slow
def test_mapped_pages_count_only_in_the_total(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * (100 * MEGABYTE))
    code = f"""
stages = Stages()
file = open({str(tmp_path / "data")!r}, "rb")
view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
total = sum(view[i] for i in range(0, len(view), 4096))
stages.end("read")
"""
    found = run([program(tmp_path, code)])["read"]
    assert found.anonymous_bytes < 8 * MEGABYTE
    assert found.total_bytes > 95 * MEGABYTE


def test_what_was_there_at_the_start_does_not_count(tmp_path: Path) -> None:
    code = f'big = bytearray(b"x") * (100 * {MEGABYTE})\nstages = Stages()\nstages.end("nothing")\n'
    found = run([program(tmp_path, code)])["nothing"]
    assert found.anonymous_bytes < 4 * MEGABYTE


def test_a_program_that_prints_does_not_disturb(tmp_path: Path) -> None:
    code = 'stages = Stages()\nprint("hello")\nprint("x" * 200_000, file=sys.stderr)\nstages.end("done")\n'
    assert run([program(tmp_path, code)])["done"].seconds >= 0


@pytest.mark.parametrize(
    "code", ['raise SystemExit("no luck")', 'stages = Stages()\nstages.end("a")\nraise SystemExit("no luck")']
)
def test_a_program_that_fails(tmp_path: Path, code: str) -> None:
    with pytest.raises(MeasurementError, match="no luck"):
        run([program(tmp_path, code)])


@pytest.mark.slow
def test_a_program_that_hangs(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="too long"):
        run([program(tmp_path, "stages = Stages()\ntime.sleep(60)\n")], timeout_seconds=1)


def test_alternation_and_medians() -> None:
    order: list[str] = []

    def contender(name: str, *seconds: float) -> dict[str, Stage]:
        order.append(name)
        return {"s": Stage(seconds[order.count(name) - 1], order.count(name), 10, {})}

    found = alternate(
        {"a": lambda: contender("a", 1.0, 9.0, 2.0), "b": lambda: contender("b", 3.0, 3.0, 3.0)},
        3,
    )
    assert order == ["a", "b"] * 3
    assert median(found["a"], "s") == Stage(2.0, 2, 10, {})
