"""The children of benchmarks as forks, for tests of what is done with results: a new interpreter takes seconds."""

import json
from collections.abc import Mapping, Sequence

from bench.measure import MeasurementError, Stage
from tests.programs import code_of, run_program


def run_forked(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout_seconds: float = 600
) -> dict[str, Stage]:
    """As `bench.measure.run`, without samples of the memory between stages."""
    done = run_program(code_of(command), environment=environment, timeout=timeout_seconds)
    if done.returncode:
        raise MeasurementError(f"the process failed: {done.stderr.strip()}")
    start, *messages = map(json.loads, done.stdout.splitlines())
    return {
        message["stage"]: Stage(
            message["seconds"],
            max(message["anonymous"] - start["anonymous"], 0),
            max(message["total"] - start["total"], 0),
            message["facts"],
        )
        for message in messages
    }
