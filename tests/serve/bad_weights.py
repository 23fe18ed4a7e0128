"""Weights that may not serve, each with its error: `main(kind, folder)`.

It tries each of them in a process that is forked from this one when the target is there. It prints the outcome of each
as JSON; for a process that ends in any other way, how it ended.
"""

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import modelstate as ms
from tests.faults import faulty_reads
from tests.serve.models import weights_of
from tests.serve.targets import Readers, target_of
from tests.sweeps import EXHAUSTIVE

X = torch.ones(4, 8)
LIMIT_SECONDS = 60
CRASH = "a crash"


class Tied(nn.Module):
    """Answers with its weights, all of which are k in version k."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(8, 8))
        self.bias = nn.Parameter(torch.ones(8, 8))
        self.again = self.a
        self.register_buffer("c", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x @ self.a) / 8, (x @ self.bias) / 8, (x @ self.again) / 8, self.c.expand(4, 8) * x])


def state(k: float = 2, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**weights_of(Tied(), k), **changes}.items() if value is not None}


@dataclass(frozen=True)
class Bad:
    """A source, what is done to it, and what comes of it."""

    make: Callable[[Path], Any]
    refused: str
    """The class of the error; of a `PlanError`, the classes of its problems as well."""
    says: str = ""
    """What the error says, too."""
    canary: Any = None
    during: Callable[[Path], AbstractContextManager[object]] = lambda _: nullcontext()


def path_in(folder: Path) -> Path:
    path = folder / f"{os.getpid()}.safetensors"
    ms.save(state(), path, overwrite=True)
    return path


def half_a_file(folder: Path) -> Path:
    path = path_in(folder)
    path.write_bytes(path.read_bytes()[:-300])
    return path


class Named(torch.Tensor):
    """A class whose answers would be of that class, too."""


def sparse_in_a_file(folder: Path) -> Path:
    path = folder / f"{os.getpid()}.pt"
    torch.save(state(bias=torch.ones(8, 8).to_sparse()), path)
    return path


def changed_since(folder: Path) -> ms.Checkpoint:
    """One that is written anew after it was opened."""
    opened = ms.open(path_in(folder))
    time.sleep(0.02)
    path_in(folder)
    return opened


def changing(how: Callable[[Path], object]) -> Callable[[Path], AbstractContextManager[object]]:
    """The file changes when the first bytes of its weights are about to be read."""

    @contextmanager
    def during(folder: Path) -> Iterator[None]:
        path, done = folder / f"{os.getpid()}.safetensors", []

        def before(request: Any) -> None:
            if request.call == "preadv" and not done:
                done.append(True)
                time.sleep(0.02)  # so that the time of the file is another one
                how(path)

        with faulty_reads(before=before):
            yield
        assert done

    return during


def overwritten(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-300] + b"\1" * 300)


def views_of_one_buffer(_: Path) -> dict[str, torch.Tensor]:
    flat = torch.full((8 * 8 * 2 + 8,), 2.0)
    a, b, c = flat.split([64, 64, 8])
    return {"a": a.view(8, 8), "again": a.view(8, 8), "bias": b.view(8, 8), "c": c}


def slow_and_bad(v: Any) -> bool:
    time.sleep(0.3)
    return bool((v(X) == 1).all())


def given(**changes: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda _: state(**changes)


BAD = {
    "a typo": Bad(given(bias=None, bais=torch.ones(8, 8)), "PlanError: MISSING, UNEXPECTED", "bais [8, 8]"),
    "a name too many": Bad(given(d=torch.ones(1)), "PlanError: UNEXPECTED"),
    "half of the names": Bad(given(a=None, again=None), "PlanError: MISSING"),
    "a wrong shape": Bad(given(bias=torch.ones(8, 9)), "PlanError: WRONG_SHAPE"),
    "a shape with as many elements": Bad(given(bias=torch.ones(4, 16)), "PlanError: WRONG_SHAPE"),
    "a shape that is larger": Bad(given(bias=torch.ones(400, 400)), "PlanError: WRONG_SHAPE"),
    "another dtype, with loss": Bad(given(bias=torch.ones(8, 8).double()), "WeightsError", "bias: float64"),
    "another dtype, without loss": Bad(
        given(bias=torch.ones(8, 8).half()), "WeightsError", "another dtype than the program"
    ),
    "sparse": Bad(given(bias=torch.ones(8, 8).to_sparse()), "WeightsError", "torch.sparse_coo"),
    "sparse, by rows": Bad(
        given(bias=torch.ones(8, 8).to_sparse_csr()), "WeightsError", "another kind of tensor than the program's"
    ),
    "sparse, in a file": Bad(sparse_in_a_file, "WeightsError", "bias: "),
    "a subclass": Bad(given(c=torch.ones(8).as_subclass(Named)), "WeightsError", "c: Named"),
    "NaN": Bad(given(bias=torch.full((8, 8), float("nan"))), "CanaryError", "has NaN", ms.Canary((X,))),
    "conflicting ties": Bad(given(again=torch.full((8, 8), 3.0)), "PlanError: TIE_CONFLICT"),
    "no tensor": Bad(given(bias="b"), "PlanError: NOT_A_TENSOR"),
    "on meta": Bad(given(bias=torch.ones(8, 8, device="meta")), "PlanError: NO_VALUES"),
    "half a file": Bad(half_a_file, "TruncatedFileError"),
    "a file that has changed": Bad(changed_since, "ReadFailedError", "has changed since it was opened"),
    "a file that is overwritten while it is read": Bad(
        path_in, "ReadFailedError", "has changed while it was read", during=changing(overwritten)
    ),
    "a file that is cut off while it is read": Bad(
        path_in, "ReadFailedError", during=changing(lambda path: os.truncate(path, path.stat().st_size - 300))
    ),
    "a file that is emptied while it is read": Bad(
        path_in, "ReadFailedError", during=changing(lambda path: os.truncate(path, 0))
    ),
    "no file": Bad(lambda folder: folder / "nothing.pt", "SourceNotFoundError"),
    "no checkpoint": Bad(lambda _: 3, "SourceTypeError"),
    "a canary of 300 ms that fails": Bad(given(), "CanaryError", "refused the new version", slow_and_bad),
    "a canary that raises": Bad(given(), "CanaryError", "ZeroDivisionError", lambda v: 1 / 0),
}


def refused(error: Exception) -> str:
    problems = sorted({one.kind.name for one in error.problems}) if isinstance(error, ms.PlanError) else []
    return f"{type(error).__name__}{': ' if problems else ''}{', '.join(problems)}"


def tried(live: ms.Live, bad: Bad, folder: Path) -> dict[str, Any]:
    """A swap with two readers at work. What came of it, and of them."""

    def request() -> tuple[int, torch.Tensor]:
        value, version = live.answer(X)
        return version, value

    readers, found = Readers(request, 2), {"outcome": "accepted", "text": ""}
    source = bad.make(folder)
    with readers.running():
        readers.wait_for_one_each()
        try:
            with bad.during(folder):
                live.swap(source, canary=bad.canary)
        except ms.ModelStateError as error:
            found = {"outcome": refused(error), "text": str(error)}
        readers.wait_for_one_each()
    wrong = readers.torn + readers.wrong_version + len(readers.errors)
    return {
        **found,
        "version": live.version().id,
        "seen": sorted(readers.seen),
        "wrong": wrong,
        "errors": readers.errors,
    }


def in_a_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it returns in a process of its own, or how that process ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)  # makes torch's pool of threads anew, which several threads at once cannot
            found = work()
        except BaseException:
            found = {"outcome": f"the test itself raised: {traceback.format_exc()}"}
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], LIMIT_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
            return {"outcome": f"no end within {LIMIT_SECONDS} s"}
        text = os.read(reading, 1 << 20)
    finally:
        os.close(reading)
        _, status = os.waitpid(child, 0)
    if status or not text:
        return {"outcome": f"the process ended with {os.waitstatus_to_exitcode(status)}"}
    return dict(json.loads(text))


def main(kind: str, folder: Path, *names: str) -> None:
    live = ms.Live(target_of(kind, Tied(), X))
    # Readers and canaries run with and without gradients: compiled here, so that no forked process compiles.
    live(X)
    with torch.no_grad():
        live(X)
    crash = Bad(lambda _: os.kill(os.getpid(), signal.SIGSEGV), "")
    found = {}
    for name in names or cases(kind):
        bad = crash if name == CRASH else BAD[name]
        found[name] = in_a_fork(lambda bad=bad: tried(live, bad, folder))
    print(json.dumps(found))


def cases(kind: str) -> list[str]:
    """Those for a kind of target: all for an eager program, and for each of the others every third one."""
    kinds = ("compiled", "exported", "aoti")
    if EXHAUSTIVE or kind == "eager":
        return [*BAD]
    return [name for number, name in enumerate(BAD) if kinds[number % 3] == kind]
