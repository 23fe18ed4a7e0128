"""Measures wall time and peak memory of the stages of a program, in a fresh process.

The child (`Stages`) reports when it is ready to start and when each stage of its work ends. The parent (`run`) samples
the child's anonymous memory from `/proc`, so that measuring does not disturb the child's threads. The reported memory
is growth: modules that were imported before the start do not count.
"""

import gc
import json
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def run(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout_seconds: float = 600
) -> dict[str, Stage]:
    """Runs a program that uses `Stages`, and returns its stages in order. Raises `MeasurementError`."""
    child = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    try:
        return _watch(child, time.monotonic() + timeout_seconds)
    finally:
        child.kill()
        child.communicate()


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
    if child.wait() or not stages:
        raise MeasurementError(f"the process failed: {stderr.decode(errors='replace').strip()}")
    return stages


def _stage(message: Mapping[str, Any], start: Mapping[str, int], peak: int) -> Stage:
    return Stage(
        message["seconds"],
        max(peak - start["anonymous"], 0),
        max(message["total"] - start["total"], 0),
        message["facts"],
    )


def alternate(contenders: Mapping[str, Callable[[], dict[str, Stage]]], runs: int) -> dict[str, list[dict[str, Stage]]]:
    """Runs each contender once, then again, and so on, so that a slow phase of the machine affects all of them."""
    results: dict[str, list[dict[str, Stage]]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, measure in contenders.items():
            results[name].append(measure())
    return results


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
