"""Every kind of bad weights into every kind of target: each has its error, and what serves stays."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from tests.faults import faulty_reads
from tests.serve.models import WIDTH, X_OF_TIED as X, Named, Tied, tied_state as state
from tests.serve.targets import KINDS, target_of
from tests.sweeps import EXHAUSTIVE


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


def sparse_in_a_file(folder: Path) -> Path:
    path = folder / f"{os.getpid()}.pt"
    torch.save(state(bias=torch.ones(WIDTH, WIDTH).to_sparse()), path)
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


def given(**changes: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda _: state(**changes)


BAD = {
    "a typo": Bad(
        given(bias=None, bais=torch.ones(WIDTH, WIDTH)), "PlanError: MISSING, UNEXPECTED", f"bais [{WIDTH}, {WIDTH}]"
    ),
    "a name too many": Bad(given(d=torch.ones(1)), "PlanError: UNEXPECTED"),
    "half of the names": Bad(given(a=None, again=None), "PlanError: MISSING"),
    "a wrong shape": Bad(given(bias=torch.ones(WIDTH, WIDTH + 1)), "PlanError: WRONG_SHAPE"),
    "a shape with as many elements": Bad(given(bias=torch.ones(WIDTH // 2, 2 * WIDTH)), "PlanError: WRONG_SHAPE"),
    "a shape that is larger": Bad(given(bias=torch.ones(400, 400)), "PlanError: WRONG_SHAPE"),
    "another dtype, with loss": Bad(given(bias=torch.ones(WIDTH, WIDTH).double()), "WeightsError", "bias: float64"),
    "another dtype, without loss": Bad(
        given(bias=torch.ones(WIDTH, WIDTH).half()), "WeightsError", "another dtype than the program"
    ),
    "sparse": Bad(given(bias=torch.ones(WIDTH, WIDTH).to_sparse()), "WeightsError", "torch.sparse_coo"),
    "sparse, by rows": Bad(
        given(bias=torch.ones(WIDTH, WIDTH).to_sparse_csr()),
        "WeightsError",
        "another kind of tensor than the program's",
    ),
    "sparse, in a file": Bad(sparse_in_a_file, "WeightsError", "bias: "),
    "a subclass": Bad(given(c=torch.ones(WIDTH).as_subclass(Named)), "WeightsError", "c: Named"),
    "NaN": Bad(given(bias=torch.full((WIDTH, WIDTH), float("nan"))), "CanaryError", "has NaN", ms.Canary((X,))),
    "conflicting ties": Bad(given(again=torch.full((WIDTH, WIDTH), 3.0)), "PlanError: TIE_CONFLICT"),
    "no tensor": Bad(given(bias="b"), "PlanError: NOT_A_TENSOR"),
    "on meta": Bad(given(bias=torch.ones(WIDTH, WIDTH, device="meta")), "PlanError: NO_VALUES"),
    "half a file": Bad(half_a_file, "TruncatedFileError"),
    "a file that has changed": Bad(changed_since, "ReadFailedError", "has changed since it was opened"),
    "a file that is overwritten while it is read": Bad(
        path_in, "ReadFailedError", "has changed since it was opened", during=changing(overwritten)
    ),
    "a file that is cut off while it is read": Bad(
        path_in, "ReadFailedError", during=changing(lambda path: os.truncate(path, path.stat().st_size - 300))
    ),
    "a file that is emptied while it is read": Bad(
        path_in, "ReadFailedError", during=changing(lambda path: os.truncate(path, 0))
    ),
    "no file": Bad(lambda folder: folder / "nothing.pt", "SourceNotFoundError"),
    "no checkpoint": Bad(lambda _: 3, "SourceTypeError"),
    "a canary that fails": Bad(given(), "CanaryError", "refused the new version", lambda v: bool((v(X) == 1).all())),
    "a canary that raises": Bad(given(), "CanaryError", "ZeroDivisionError", lambda v: 1 / 0),
    "a check that raises": Bad(given(), "CanaryError", "ZeroDivisionError", ms.Canary((X,), check=lambda _: 1 / 0)),
    "a canary with other inputs": Bad(
        given(), "CanaryError", "the new version raised", ms.Canary(kwargs={"x": torch.ones(3)}, check=bool)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_is_refused(kind: str, tmp_path: Path) -> None:
    """All of them by an eager program, and by each of the others every third one."""
    live, others = ms.Live(target_of(kind, Tied(), X)), ("compiled", "exported", "aoti")
    for number, (name, bad) in enumerate(BAD.items()):
        if not EXHAUSTIVE and kind != "eager" and others[number % 3] != kind:
            continue
        source = bad.make(tmp_path)
        with pytest.raises(ms.ModelStateError) as caught, bad.during(tmp_path):
            live.swap(source, canary=bad.canary)
        error = caught.value
        problems = sorted({each.kind.name for each in error.problems}) if isinstance(error, ms.PlanError) else []
        assert f"{type(error).__name__}{': ' if problems else ''}{', '.join(problems)}" == bad.refused, name
        assert bad.says in str(error), name
        assert (live.version().id, live(X).unique().tolist()) == (1, [1.0]), name
