"""Programs in processes of their own, forked from one that has imported torch: an import takes seconds, a fork 50 ms.

For programs that need a new interpreter (limits of memory, imports that are measured) there are `Forks` of one, and
`subprocess`.
"""

import atexit
import ctypes
import gc
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import Any

import torch

import modelstate
from modelstate import forks

MODULES = [found.name for found in pkgutil.walk_packages(modelstate.__path__, "modelstate.") if "__" not in found.name]
"""All of modelstate: its packages alone import nothing, for their names are resolved when they are used."""
# What is forked from a process that has asked the driver for its devices cannot use them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
CONTEXT: Any = get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "safetensors.torch",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.profiler._cupti_monitor",  # which the first step of an optimizer imports
        "torchdata.stateful_dataloader",
        "rich.table",
        "click",
        *(name for name in MODULES if not name.startswith("modelstate.integrations.")),
        "pytest",
        "tests.programs",
    ]
)


def as_process_of_its_own() -> None:
    """Makes a forked process like a new one: what it was forked from had no threads, so that none is missing."""
    forks._is_forked = False
    gc.freeze()  # a collection that passes over what has been imported takes 0.2 s
    for inherited in weakref.finalize._registry:  # type: ignore[attr-defined]
        inherited.atexit = False  # the end of each library of operators of torch: 45 ms at every exit
    set_start_method(None, force=True)  # for the workers of data loaders: that of the platform
    torch.set_num_threads(1)


class Program:
    """Python code that runs as with `python -c`.

    Args:
        code: The program.
        arguments: `sys.argv[1:]`.
        cwd: Its working directory.
        environment: What its environment has beside that of the tests.
        ignored_warnings: Modules whose warnings are ignored.
        errors: Warnings that are errors.
        finalizes: Whether the interpreter ends as that of a program does: it waits for threads and is finalized.
    """

    def __init__(
        self,
        code: str,
        *arguments: object,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        ignored_warnings: Iterable[str] = (),
        errors: type[Warning] | None = None,
        finalizes: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._arguments = [str(argument) for argument in arguments]
        given = (code, self._arguments, cwd or Path.cwd(), {**(environment or {})})
        self._process = CONTEXT.Process(
            target=_main, args=(*given, self._folder.name, errors, [*ignored_warnings], finalizes)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def has_ended(self) -> bool:
        return self._process.exitcode is not None

    def written(self, stream: str = "out") -> str:
        """Returns what it has written so far to `out`, which is the standard output, or to `err`."""
        path = Path(self._folder.name, stream)
        return path.read_text() if path.exists() else ""

    def kill(self) -> None:
        """Ends it, if it runs."""
        self._process.kill()
        self._process.join()

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Returns how it ended and what it wrote.

        Args:
            timeout: Seconds after which it is killed, and `subprocess.TimeoutExpired` is raised.
        """
        self._process.join(timeout)
        with self._folder:
            if not self.has_ended:
                self.kill()
                raise subprocess.TimeoutExpired("a program", timeout, self.written(), self.written("err"))
            out, err = self.written(), self.written("err")
            return subprocess.CompletedProcess(self._arguments, self._process.exitcode, out, err)


def run_program(
    code: str, *arguments: object, timeout: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a `Program` with these options to its end: see `Program.wait`."""
    return Program(code, *arguments, **options).wait(timeout)


def code_of(command: Sequence[str]) -> str:
    """Returns code that does what an interpreter does with these arguments: `-m` and a module, or a file."""
    kind, arguments = ("module", command[1:]) if command[0] == "-m" else ("path", command)
    name, *given = map(str, arguments)
    return f"import runpy, sys; sys.argv[1:] = {given!r}; runpy.run_{kind}({name!r}, run_name='__main__')"


FORKS = """
import atexit, gc, json, os, sys, traceback

{preamble}
gc.freeze()
for line in sys.stdin:
    code, arguments, cwd, *paths = json.loads(line)
    if not (child := os.fork()):
        for descriptor, path in enumerate(paths, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        os.chdir(cwd)
        sys.argv[1:] = arguments
        status = 0
        try:
            exec(compile(code, "<string>", "exec"), {{"__name__": "__main__"}})
        except SystemExit as ended:
            status = ended.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """Forks of one new interpreter, for programs that must not find all that `Program` has imported.

    Args:
        preamble: What the interpreter runs before it is forked.
        environment: The environment of the interpreter in place of that of the tests.
    """

    def __init__(self, preamble: str, environment: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, "-c", FORKS.format(preamble=preamble)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str, *arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Runs code as with `python -c`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        paths = [str(Path(self._folder.name, name)) for name in ("out", "err")]
        given = [str(argument) for argument in arguments]
        print(json.dumps([code, given, str(cwd or Path.cwd()), *paths]), file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(given, status, *(Path(path).read_text() for path in paths))

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # it ends at the end of its input
        self._folder.cleanup()


RANKS = """
import atexit, importlib, os, runpy, signal, socket, sys, time, traceback
from tests.programs import as_process_of_its_own

number, modules, path, *arguments = sys.argv[1:]
for module in modules.split():
    importlib.import_module(module)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), WORLD_SIZE=number)
running = set()
for rank in range(int(number)):
    pid = os.fork()
    if pid:
        running.add(pid)
        continue
    status = 1
    try:
        as_process_of_its_own()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        sys.argv[1:] = arguments
        runpy.run_path(path, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)
failed, until = False, float("inf")
while running:
    pid, status = os.waitpid(-1, os.WNOHANG)
    if not pid:
        if time.monotonic() > until:
            for each in running:
                os.kill(each, signal.SIGKILL)
        time.sleep(0.02)
        continue
    running.discard(pid)
    if status and not failed:
        failed, until = True, time.monotonic() + 30
        for each in running:
            os.kill(each, signal.SIGTERM)
sys.exit(failed)
"""
"""Runs a file on several ranks as torchrun does: where one fails, the others are sent SIGTERM, and SIGKILL after 30 s.

Its arguments are the number of ranks, modules that they all import, the file, and the arguments of the file.
"""


def _main(
    code: str,
    arguments: list[str],
    cwd: Path,
    environment: dict[str, str],
    folder: str,
    errors: type[Warning] | None,
    ignored: list[str],
    finalizes: bool,
) -> None:
    as_process_of_its_own()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server of the forks ignores
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, "")
    if errors is not None:
        warnings.simplefilter("error", errors)
    for module in ignored:
        warnings.filterwarnings("ignore", module=module)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status: Any = 0
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if finalizes:
        ctypes.pythonapi.Py_Exit(status)
    atexit._run_exitfuncs()
    sys.exit(status)
