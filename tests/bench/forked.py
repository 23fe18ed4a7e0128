"""The children of benchmarks as forks, for tests of what is done with results: a new interpreter takes seconds."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BufferedWriter
from pathlib import Path
from typing import Any

from bench.measure import MeasurementError, Stage
from tests.programs import Program, code_of, run_program


def run_forked(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 600,
    preamble: str = "",
) -> dict[str, Stage]:
    """As `bench.measure.run`, without samples of the memory between stages. The process runs `preamble` first."""
    return _stages(run_program(preamble + code_of(command), environment=environment, timeout=timeout_seconds))


def run_together_forked(
    commands: Sequence[Sequence[str]], *, environment: Mapping[str, str] | None = None, timeout_seconds: float = 600
) -> list[dict[str, Stage]]:
    """As `bench.measure.run_together`, without samples of the memory between stages."""
    with ThreadPoolExecutor(len(commands)) as pool:
        run = partial(run_forked, environment=environment, timeout_seconds=timeout_seconds)
        return list(pool.map(run, commands))


def run_as_fork_of_this(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout_seconds: float = 600
) -> dict[str, Stage]:
    """As `run_forked`, in a fork of this process, which has what it has imported. It must have no other threads."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            child = _fork_of_this(command, Path.cwd(), environment or {}, stdout, stderr)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return _stages(subprocess.CompletedProcess([*command], status, out.read_text(), err.read_text()))


def _fork_of_this(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str], stdout: BufferedWriter, stderr: BufferedWriter
) -> int:
    """Returns the process that runs a command of the interpreter."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status: Any = 1
    try:
        for descriptor, file in ((1, stdout), (2, stderr)):
            os.dup2(file.fileno(), descriptor)
        os.chdir(cwd)
        os.environ.update(environment)
        exec(compile(code_of(command), "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


_IN_PLACE_OF_POPEN = """
import os, sys, tempfile
tempfile.tempdir = None  # it is that of the environment
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
for descriptor in (1, 2):
    os.dup2(os.open({log!r}, os.O_WRONLY | os.O_APPEND), descriptor)
{code}
"""


class ForkedServer:
    """What `bench.serving` needs of a `subprocess.Popen` of an interpreter, as a fork."""

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: BufferedWriter, stderr: BufferedWriter
    ) -> None:
        assert stdout is stderr
        code = _IN_PLACE_OF_POPEN.format(log=stdout.name, code=code_of(command[1:]))
        self._program = Program(code, cwd=cwd, environment=env)

    def poll(self) -> int | None:
        return self.wait() if self._program.has_ended else None

    def terminate(self) -> None:
        os.kill(self._program.pid, signal.SIGTERM)

    def kill(self) -> None:
        self._program.kill()

    def wait(self, timeout: float = 300) -> int:
        return self._program.wait(timeout).returncode


def _stages(done: "subprocess.CompletedProcess[str]") -> dict[str, Stage]:
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
