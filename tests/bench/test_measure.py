import os
import sys
from functools import partial
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


@pytest.mark.parametrize(
    "code", ['raise SystemExit("no luck")', 'stages = Stages()\nstages.end("a")\nraise SystemExit("no luck")']
)
def test_a_program_that_fails(tmp_path: Path, code: str) -> None:
    with pytest.raises(MeasurementError, match="no luck"):
        run([program(tmp_path, code)])


def contender(order: list[str], name: str, *seconds: float) -> dict[str, Stage]:
    order.append(name)
    return {"s": Stage(seconds[order.count(name) - 1], order.count(name), 10, {})}


def test_alternation_and_medians() -> None:
    order: list[str] = []
    seconds = {"a": (1.0, 9.0, 2.0), "b": (3.0, 3.0, 3.0)}
    contenders = {name: partial(contender, order, name, *each) for name, each in seconds.items()}
    found, failed = alternate(contenders, 3)
    assert [sorted(order[at : at + 2]) for at in (0, 2, 4)] == [["a", "b"]] * 3
    assert median(found["a"], "s") == Stage(2.0, 2, 10, {})
    assert not failed
