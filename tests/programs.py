"""Programs in processes of their own, forked from one that has imported torch: an import takes seconds, a fork 50 ms.

For programs that need a new interpreter (other environment variables, `atexit`, limits of memory, imports that are
measured) tests use `subprocess`.
"""

import atexit
import ctypes
import gc
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Iterable
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import Any

import torch

import modelstate
from modelstate import process

MODULES = [found.name for found in pkgutil.walk_packages(modelstate.__path__, "modelstate.") if "__" not in found.name]
"""All of modelstate: its packages alone import nothing, for their names are resolved when they are used."""
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
        "typer",
        *(name for name in MODULES if not name.startswith("modelstate.integrations.")),
        "pytest",
        "tests.programs",
    ]
)


def as_process_of_its_own() -> None:
    """Makes a forked process like a new one: what it was forked from had no threads, so that none is missing."""
    process._is_forked = False
    gc.freeze()  # a collection that passes over what has been imported takes 0.2 s
    set_start_method(None, force=True)  # for the workers of data loaders: that of the platform
    torch.set_num_threads(1)


def run_program(
    code: str,
    *arguments: object,
    cwd: Path | None = None,
    ignored_warnings: Iterable[str] = (),
    errors: type[Warning] | None = None,
    timeout: float = 300,
    finalizes: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs Python code as `python -c` does, and returns how it ended and what it wrote.

    Args:
        code: The program.
        arguments: `sys.argv[1:]`.
        cwd: Its working directory.
        ignored_warnings: Modules whose warnings are ignored.
        errors: Warnings that are errors.
        timeout: Seconds after which it is killed, and `subprocess.TimeoutExpired` is raised.
        finalizes: Whether the interpreter ends as that of a program does: it waits for threads and is finalized.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = [str(argument) for argument in arguments]
        child = CONTEXT.Process(
            target=_main, args=(code, given, cwd or Path.cwd(), folder, errors, [*ignored_warnings], finalizes)
        )
        child.start()
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired("a program", timeout)
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(given, child.exitcode, out, err)


def _main(
    code: str,
    arguments: list[str],
    cwd: Path,
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
