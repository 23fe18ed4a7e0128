"""Ranks in processes of their own, usually four, which share one process group between all tests of a module.

A test sends a function of a module to all ranks with `Ranks.run`, and gets what each of them returned or raised. A rank
that dies, and ranks that are discarded, are replaced by new ones at the next call.
"""

import datetime
import faulthandler
import importlib
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from modelstate.errors import ModelStateError
from modelstate.torch_compat.sharding import default_store
from tests.programs import CONTEXT, as_process_of_its_own

WORLD_SIZE = 4
GROUP_TIMEOUT_SECONDS = 30.0
"""Of the collectives of torch: a test that makes ranks wait for a rank that is gone must not wait for minutes."""
GRACE_SECONDS = 1.0
"""What the other ranks get to end after one has failed in a call that must succeed."""
MOST_STARTS = 3
STACKS_SECONDS = 1.0
"""What ranks that did not end get to write where they are."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a rank."""

    classes: tuple[str, ...]
    """The names of its class and of the base classes."""
    text: str
    traceback: str
    is_ours: bool
    problems: tuple[str, ...] = ()
    """The class names of the problems of a `PlanError`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call on one rank."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    died: bool = False


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """Returns the class and the text of the error of ours that a call raises; empty where it raises none."""
    try:
        call()
    except ModelStateError as error:
        return type(error).__name__, str(error)
    return "", ""


def survivors(outcomes: Sequence[Outcome]) -> list[Any]:
    """Returns what the ranks returned that have not died. None of them has failed."""
    assert not any(outcome.failure for outcome in outcomes), [outcome.failure for outcome in outcomes]
    return [outcome.value for outcome in outcomes if not outcome.died]


def die(*_: object) -> None:
    """Kills this rank."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def late(rank: int, what: str) -> Iterator[Callable[..., None]]:
    """Yields a function that one rank calls within the block, to wait until the others have ended it."""
    store, key = default_store(), f"without the rank that is late: {what}"

    def wait_for_others(*_: object) -> None:
        while store.add(key, 0) < dist.get_world_size() - 1:
            time.sleep(0.02)

    yield wait_for_others
    if dist.get_rank() != rank:
        store.add(key, 1)
    dist.barrier()


class Ranks:
    """The ranks. `close` ends their processes.

    Args:
        size: The number of ranks.
        backend: The backend of their process group. Ranks with "nccl" have the first GPU, which gloo may share.
    """

    def __init__(self, size: int = WORLD_SIZE, backend: str = "gloo") -> None:
        self._size, self._backend = size, backend
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._stacks = ""
        """Where the ranks of the last call were that did not end."""

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Outcome]:
        """Calls a function on every rank, and returns the outcomes in the order of the ranks.

        The outcome of a rank that died says so. The ranks are then replaced at the next call, as they are where one
        does not answer in time.

        Args:
            function: A function of a module that the ranks can import.
            arguments: Picklable arguments.
            timeout: The seconds after which all ranks are killed.

        Raises:
            TimeoutError: A rank did not answer.
        """
        outcomes = self._run(function, arguments, timeout, until_failure=False)
        missing = [rank for rank in range(self._size) if rank not in outcomes]
        if missing:
            raise TimeoutError(f"ranks {missing} did not end {function.__qualname__} in {timeout} s{self._stacks}")
        return [outcomes[rank] for rank in range(self._size)]

    def until_failure(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> dict[int, Outcome]:
        """As `run`, until a rank has failed or died: the outcomes of those that end within a second from then on."""
        return self._run(function, arguments, timeout, until_failure=True)

    def values(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        """As `run`, for a call that must succeed: returns the values of the ranks.

        Where a rank fails, the others may wait for it in a collective: they are replaced, and the test fails at once.
        """
        outcomes = self._run(function, arguments, timeout, until_failure=True)
        for rank in range(self._size):
            outcome = outcomes.get(rank)
            assert outcome is None or not outcome.died, f"rank {rank} died"
            assert outcome is None or outcome.failure is None, f"rank {rank}:\n{outcome.failure.traceback}"
        assert len(outcomes) == self._size, f"only ranks {sorted(outcomes)} ended in {timeout} s{self._stacks}"
        return [outcomes[rank].value for rank in range(self._size)]

    def _run(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float, *, until_failure: bool
    ) -> dict[int, Outcome]:
        """Returns the outcomes of the ranks that ended, and discards the ranks if one died or did not end."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            with suppress(ConnectionError):  # of a rank that has died since: it gives no outcome
                connection.send((function.__module__, function.__qualname__, arguments))
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + timeout
        while len(outcomes) < self._size:
            waited = {self._connections[rank]: rank for rank in range(self._size) if rank not in outcomes}
            ready = wait(list(waited), max(end - time.monotonic(), 0))
            if not ready:
                break
            for each in ready:
                assert isinstance(each, Connection)
                rank = waited[each]
                try:
                    outcomes[rank] = each.recv()
                except (EOFError, ConnectionError):
                    outcomes[rank] = Outcome(rank, died=True)
            if until_failure and any(outcome.failure or outcome.died for outcome in outcomes.values()):
                end = min(end, time.monotonic() + GRACE_SECONDS)
        if len(outcomes) < self._size or any(outcome.died for outcome in outcomes.values()):
            self._stacks = self._stacks_of(rank for rank in range(self._size) if rank not in outcomes)
            self.discard()
        return outcomes

    def _stacks_of(self, ranks: Iterable[int]) -> str:
        """Has ranks that did not end write the stacks of their threads, and returns them."""
        assert self._folder is not None
        files = {rank: _stacks_file(self._folder.name, rank) for rank in ranks}
        for rank, file in files.items():
            if file.exists() and self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if files:
            time.sleep(STACKS_SECONDS)
        return "".join(f"\nrank {rank}:\n{file.read_text()}" for rank, file in files.items() if file.exists())

    def kill(self) -> None:
        """Kills the processes. May be called by another thread while a call runs."""
        for process in self._processes:
            process.kill()

    def discard(self) -> None:
        """Ends the processes, whatever they do: for a group whose ranks may wait for each other."""
        self.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    close = discard

    def _start(self) -> None:
        """Starts the ranks. Now and then torch fails to connect new ones, which is not what the tests are about."""
        for _ in range(MOST_STARTS):
            self._folder = tempfile.TemporaryDirectory(prefix="ranks")
            for rank in range(self._size):
                ours, theirs = CONTEXT.Pipe()
                given = (theirs, rank, self._size, self._folder.name, self._backend)
                process = CONTEXT.Process(target=_serve, args=given, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
            with suppress(EOFError, ConnectionError):
                for connection in self._connections:
                    connection.recv()  # says that the rank has its process group
                return
            self.discard()
        raise RuntimeError(f"the process group of the ranks has failed {MOST_STARTS} times: see stderr")


def _stacks_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stacks-{rank}")


def _serve(connection: Connection, rank: int, size: int, folder: str, backend: str) -> None:
    """Runs the calls that come through a connection, until it is closed."""
    as_process_of_its_own()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1, _stacks_file(folder, rank).open("w"))
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_SECONDS)
    dist.init_process_group(backend, f"file://{folder}/store", timeout=timeout, rank=rank, world_size=size)
    connection.send(None)
    while True:
        try:
            module, name, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        connection.send(_outcome(rank, module, name, arguments))


def _outcome(rank: int, module: str, name: str, arguments: Iterable[Any]) -> Outcome:
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        return Outcome(rank, function(*arguments))
    except BaseException as error:
        classes = tuple(kind.__name__ for kind in type(error).__mro__)
        problems = tuple(problem.kind.name for problem in getattr(error, "problems", ()))
        text = "".join(traceback.format_exception(error))
        return Outcome(rank, None, Failure(classes, str(error), text, isinstance(error, ModelStateError), problems))
