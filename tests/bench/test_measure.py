import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import measure
from bench.measure import MeasurementError, Stage, alternate, call, median, run_together

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


@pytest.mark.slow
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


def has_ended(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_what_fails_is_said_at_once_and_nothing_goes_on_running(tmp_path: Path) -> None:
    """A rank that fails is not waited for by the others, and takes the processes that they started with it."""
    ids = tmp_path / "ids"
    (tmp_path / "waits").mkdir()
    waits = program(
        tmp_path / "waits",
        f"""
import os, subprocess
sleeping = subprocess.Popen(["sleep", "600"])
open({str(ids)!r}, "w").write(f"{{os.getpid()}} {{sleeping.pid}}")
stages = Stages()
sleeping.wait()
""",
    )
    fails = program(
        tmp_path, f"import os\nwhile not os.path.exists({str(ids)!r}): time.sleep(0.01)\nsys.exit('no luck')"
    )
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with pytest.raises(MeasurementError, match="no luck"):  # and not that the one that waits took too long
        run_together([[waits], [fails]], environment={"PYTHONPATH": paths}, timeout_seconds=60)
    assert all(has_ended(int(pid)) for pid in ids.read_text().split())


INTERRUPTED = """
import sys
from bench.measure import run, temporary_folder
with temporary_folder() as folder:
    run([sys.argv[1], str(folder)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_leaves_no_files_and_no_processes(tmp_path: Path, number: signal.Signals) -> None:
    ids, files = tmp_path / "ids", tmp_path / "files"
    files.mkdir()
    waits = program(
        tmp_path,
        f"""
import os, pathlib
pathlib.Path(sys.argv[1], "made").touch()
stages = Stages()
pathlib.Path({str(ids)!r}).write_text(str(os.getpid()))
time.sleep(60)
""",
    )
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(files)}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, waits], env=environment, stderr=subprocess.DEVNULL) as it:
        while not (ids.exists() and ids.read_text()):
            assert it.poll() is None
            time.sleep(0.02)
        it.send_signal(number)
        assert it.wait(30) != 0
    assert not list(files.iterdir())
    assert has_ended(int(ids.read_text()))


def write_sum(*, path: str, numbers: list[int]) -> None:
    Path(path).write_text(str(sum(numbers)))


def test_a_function_is_called_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = call(write_sum, path=str(tmp_path / "sum"), numbers=[1, 2])
    assert command[:2] == ["-m", "bench.measure"]
    monkeypatch.setattr(sys, "argv", command[1:])
    measure.main()
    assert (tmp_path / "sum").read_text() == "3"
    # The program that runs, as `python -m bench.sharded`, is another module in the process that is started.
    monkeypatch.setattr(write_sum, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=SimpleNamespace(name="bench.sharded")))
    assert call(write_sum, path="", numbers=[])[2] == "bench.sharded:write_sum"


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


def test_contenders_run_once_a_turn_in_another_order() -> None:
    names, orders = list("abcdef"), []
    for _ in range(2):
        ran: list[str] = []
        found, _failed = alternate({name: partial(contender, ran, name, *range(7)) for name in names}, 7)
        assert list(found) == names
        orders.append([ran[at : at + 6] for at in range(0, 42, 6)])
    assert all(sorted(turn) == names for turn in orders[0])
    assert len(set(map(tuple, orders[0]))) > 1
    assert orders[0] == orders[1]
