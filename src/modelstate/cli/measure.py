"""Wall time and peak memory of a piece of work in a fresh process.

The child (`Stages`) says when it is ready to start and when each stage of its work ends; the parent (`run`) samples the
child's anonymous memory meanwhile from `/proc`, so that no thread of the child's is disturbed by being measured. What
is reported is growth: the modules that were imported before the start do not count.
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
"""How often the parent looks. The end of every stage is looked at by the child itself, so short ones count too."""


class MeasurementError(RuntimeError):
    """The child process failed; the text has what it wrote to stderr."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage, and everything before it, took."""

    seconds: float
    """From the start to the end of this stage."""
    anonymous_bytes: int
    """The most anonymous memory (heap, private copies; no file pages) until then, less what there was at the start."""
    total_bytes: int
    """The most resident memory until then, file pages included, less what there was at the start."""
    facts: Mapping[str, Any]
    """What the child added."""


class Stages:
    """The child's side: wait for the start, then report the end of each stage."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)
        # Imports leave so many new objects that the next few allocations would pay for a pass over all of them.
        gc.collect()
        _reset_high_water_mark()
        self._send({"anonymous": _memory("self", "RssAnon"), "total": _memory("self", "VmRSS")})
        sys.stdin.readline()
        self._started = time.perf_counter()

    def end(self, name: str, **facts: Any) -> None:
        """The stage `name` is over now."""
        seconds = time.perf_counter() - self._started
        memory = {"anonymous": _memory("self", "RssAnon"), "total": _memory("self", "VmHWM")}
        self._send({"stage": name, "seconds": seconds, "facts": facts, **memory})

    def _send(self, message: Mapping[str, Any]) -> None:
        os.write(self._out, json.dumps(message).encode() + b"\n")


def run(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout_seconds: float = 600
) -> dict[str, Stage]:
    """The stages of a program that uses `Stages`, in order. Raises `MeasurementError`."""
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
    peak, pending, complaints = 0, b"", b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.register(child.stderr, selectors.EVENT_READ)
        while child.stdout in selector.get_map():
            if time.monotonic() > deadline:
                raise MeasurementError(f"the process took too long; it said: {complaints.decode(errors='replace')}")
            ready = selector.select(PERIOD_SECONDS)
            peak = max(peak, _memory(child.pid, "RssAnon")) if start else 0
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is child.stderr:
                    complaints += data
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
        raise MeasurementError(f"the process failed: {complaints.decode(errors='replace').strip()}")
    return stages


def _stage(message: Mapping[str, Any], start: Mapping[str, int], peak: int) -> Stage:
    return Stage(
        message["seconds"],
        max(peak - start["anonymous"], 0),
        max(message["total"] - start["total"], 0),
        message["facts"],
    )


def alternate(contenders: Mapping[str, Callable[[], dict[str, Stage]]], runs: int) -> dict[str, list[dict[str, Stage]]]:
    """Every contender once, then again, and so on, so that a slow minute of the machine meets all of them."""
    found: dict[str, list[dict[str, Stage]]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, measure in contenders.items():
            found[name].append(measure())
    return found


def median(results: Sequence[Mapping[str, Stage]], stage: str) -> Stage:
    """The median of each figure by itself."""
    stages = [result[stage] for result in results]
    return Stage(
        statistics.median(one.seconds for one in stages),
        int(statistics.median(one.anonymous_bytes for one in stages)),
        int(statistics.median(one.total_bytes for one in stages)),
        stages[-1].facts,
    )


def _memory(process: int | str, field: str) -> int:
    """Bytes that `/proc` says; 0 where it says nothing (the process has ended, or this is no Linux)."""
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
