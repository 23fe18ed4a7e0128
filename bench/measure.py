"""Measures wall time and peak memory of the stages of a program, in a fresh process.

The child (`Stages`) reports when it is ready to start and when each stage of its work ends. The parent (`run`) samples
the child's anonymous memory from `/proc`, so that measuring does not disturb the child's threads. The reported memory
is growth: modules that were imported before the start do not count.

`python -m bench.measure MODULE:FUNCTION ARGUMENTS` is the program of a child that calls a function: the arguments are
a JSON object.
"""

import gc
import importlib
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ParamSpec, TypeVar

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

PERIOD_SECONDS = 0.002
"""The time between two samples. The child itself samples at the end of each stage, so short stages count too."""


class MeasurementError(RuntimeError):
    """The child process failed. The text includes its stderr."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Time and memory of one stage and everything before it."""

    seconds: float
    """From the start to the end of this stage."""
    anonymous_bytes: int
    """The peak of anonymous memory (heap, private copies; no file pages) until then, less that at the start."""
    total_bytes: int
    """The peak of resident memory until then, file pages included, less that at the start."""
    facts: Mapping[str, Any]
    """Values that the child reported, from JSON."""


class Stages:
    """The side of the child: waits for the start, then reports the end of each stage."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)
        # Imports leave so many new objects that the next allocations would trigger a collection of all of them.
        gc.collect()
        _reset_high_water_mark()
        self._send({"anonymous": _memory("self", "RssAnon"), "total": _memory("self", "VmRSS")})
        sys.stdin.readline()
        self._started = time.perf_counter()

    def end(self, name: str, **facts: object) -> None:
        """Reports that the stage `name` has ended."""
        seconds = time.perf_counter() - self._started
        memory = {"anonymous": _memory("self", "RssAnon"), "total": _memory("self", "VmHWM")}
        self._send({"stage": name, "seconds": seconds, "facts": facts, **memory})

    def _send(self, message: Mapping[str, object]) -> None:
        os.write(self._out, json.dumps(message).encode() + b"\n")


def call(function: Callable[Arguments, object], *_: Arguments.args, **arguments: Arguments.kwargs) -> list[str]:
    """Returns the command of a child that calls a function of a module with these arguments, which JSON can hold."""
    module = function.__module__
    if module == "__main__":
        module = sys.modules[module].__spec__.name  # type: ignore[union-attr]
    return ["-m", "bench.measure", f"{module}:{function.__qualname__}", json.dumps(arguments)]


def run(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout_seconds: float = 600
) -> dict[str, Stage]:
    """Runs a program that uses `Stages`, and returns its stages in order. Raises `MeasurementError`."""
    return run_together([command], environment=environment, timeout_seconds=timeout_seconds)[0]


def run_together(
    commands: Sequence[Sequence[str]],
    *,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 600,
) -> list[dict[str, Stage]]:
    """Runs programs at the same time, and returns the stages of each. Raises `MeasurementError`.

    All of them are ended, with the processes that they have started, when one fails or this process is interrupted.
    """
    deadline = time.monotonic() + timeout_seconds
    children: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack, ThreadPoolExecutor(len(commands)) as pool:
        try:
            for command in commands:
                child = subprocess.Popen(
                    [sys.executable, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,  # its group has the processes that it starts
                )
                children.append(stack.enter_context(child))
            watching = [pool.submit(_watch, child, deadline) for child in children]
            for finished in as_completed(watching):
                finished.result()  # raises at once: ranks wait long for another one that has failed
            return [finished.result() for finished in watching]
        finally:
            for child in children:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)


def _watch(child: "subprocess.Popen[bytes]", deadline: float) -> dict[str, Stage]:
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    stages: dict[str, Stage] = {}
    start: dict[str, int] | None = None
    peak, pending, stderr = 0, b"", b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.register(child.stderr, selectors.EVENT_READ)
        while child.stdout in selector.get_map():
            if time.monotonic() > deadline:
                raise MeasurementError(f"the process took too long; it said: {stderr.decode(errors='replace')}")
            ready = selector.select(PERIOD_SECONDS)
            peak = max(peak, _memory(child.pid, "RssAnon")) if start else 0
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is child.stderr:
                    stderr += data
                else:
                    pending += data
            *lines, pending = pending.split(b"\n")
            for message in map(json.loads, lines):
                if start is None:
                    start = message
                    child.stdin.write(b"go\n")
                    child.stdin.flush()
                else:
                    peak = max(peak, message["anonymous"])
                    stages[message["stage"]] = _stage(message, start, peak)
    try:
        status = child.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"the process took too long to end: {stderr.decode(errors='replace')}") from error
    if status or not stages:
        os.set_blocking(child.stderr.fileno(), False)  # processes that it has started may have it open
        stderr += child.stderr.read() or b""
        raise MeasurementError(f"the process failed: {stderr.decode(errors='replace').strip() or f'status {status}'}")
    return stages


def _stage(message: Mapping[str, Any], start: Mapping[str, int], peak: int) -> Stage:
    return Stage(
        message["seconds"],
        max(peak - start["anonymous"], 0),
        max(message["total"] - start["total"], 0),
        message["facts"],
    )


def alternate(
    contenders: Mapping[str, Callable[[], Result]], runs: int, show: Callable[[Result], str] | None = None
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """Runs every contender once, then again, and so on, so that a slow phase of the machine affects all of them.

    The order changes from turn to turn, in the same way in every run of the program: a contender that takes much
    memory may be slower after others that took little, when the host of the machine has taken the free memory back.

    Args:
        contenders: Functions that measure, by the name of the contender.
        runs: How often each is called.
        show: What to print to stderr of each result; without it, nothing is printed.

    Returns:
        The results of each contender that has not failed, and the reason for each that has: it is not run again, and
        its earlier results are dropped.
    """
    results: dict[str, list[Result]] = {name: [] for name in contenders}
    failed: dict[str, str] = {}
    for turn in range(runs):
        for name, measure in Random(turn).sample(list(contenders.items()), len(contenders)):
            if name in failed:
                continue
            try:
                result = measure()
            except MeasurementError as error:
                failed[name] = last_line(error)
                del results[name]
                text = f"failed: {error}"
            else:
                results[name].append(result)
                text = show(result) if show else ""
            if show:
                print(f"  {', '.join(filter(None, name.splitlines()))}: {text}", file=sys.stderr, flush=True)
    return results, {name: failed[name] for name in contenders if name in failed}


def last_line(error: BaseException) -> str:
    """Returns the last line of an error: of a program in Python that failed, the exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200].rstrip(".") if lines else type(error).__name__


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yields a folder on the disk of `parent`, of `TMPDIR`, or of the checkout, which is removed at the end.

    A SIGTERM meanwhile ends the program as an interrupt does, so that the folder is removed and no child is left.
    """
    where = parent or os.environ.get("TMPDIR") or ROOT / ".venv"
    with tempfile.TemporaryDirectory(prefix="modelstate-bench-", dir=where) as folder:
        if threading.current_thread() is not threading.main_thread():
            yield Path(folder)
            return
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            yield Path(folder)
        finally:
            signal.signal(signal.SIGTERM, before)


def median(results: Sequence[Mapping[str, Stage]], stage: str) -> Stage:
    """Returns the median of each figure of a stage, independently."""
    stages = [result[stage] for result in results]
    return Stage(
        statistics.median(result.seconds for result in stages),
        int(statistics.median(result.anonymous_bytes for result in stages)),
        int(statistics.median(result.total_bytes for result in stages)),
        stages[-1].facts,
    )


def _memory(process: int | str, field: str) -> int:
    """Returns a field of `/proc` in bytes; 0 if it is not available (the process has ended, or this is not Linux)."""
    try:
        with open(f"/proc/{process}/status") as status:
            for line in status:
                if line.startswith(field):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def _reset_high_water_mark() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5")
    except OSError:
        pass


def main() -> None:
    """Calls the function that the command line names."""
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
