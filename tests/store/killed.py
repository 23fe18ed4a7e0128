"""Programs that are killed: they run in processes that are forked from one that has imported torch already."""

import hashlib
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

import modelstate as ms
from modelstate.errors import LockedError, TargetExistsError
from tests.programs import CONTEXT, as_process_of_its_own

DELTA = ms.Delta(full_every=4)


def change_few(model: nn.Module) -> None:
    """Has training change a twentieth of the elements."""
    for param in model.parameters():
        param.register_hook(partial(torch.mul, torch.rand_like(param) < 0.05))


class Job:
    """A part that is trained with Adam, and a frozen one; all that there is has a digest.

    With deltas, training changes a twentieth of the elements.
    """

    def __init__(self, delta: ms.Delta | None = None) -> None:
        torch.manual_seed(0)
        self.delta = delta
        self.model = nn.ModuleDict({"base": nn.Linear(64, 64).requires_grad_(False), "head": nn.Linear(64, 32)})
        if delta is not None:
            change_few(self.model["head"])
        self.optimizer = torch.optim.Adam(self.model["head"].parameters(), 1e-2)

    def objects(self, step: int | None) -> dict[str, Any]:
        check = None if step is None else self.digest()
        return {"model": self.model, "optimizer": self.optimizer, "step": step, "digest": check}

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model["head"](self.model["base"](torch.randn(4, 64))).pow(2).mean().backward()
        self.optimizer.step()

    def digest(self) -> str:
        found = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            found.update(tensor.numpy().tobytes())
        for values in self.optimizer.state_dict()["state"].values():
            for tensor in values.values():
                found.update(tensor.numpy().tobytes())
        return found.hexdigest()


def start(target: Callable[..., None], *given: Any) -> tuple[Any, Connection]:
    """The process, and where it says what it has done."""
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=target, args=(there, *given))
    process.start()
    there.close()
    return process, here


def said(by: Connection) -> list[Any]:
    """All that a process has said before it was killed."""
    found = []
    try:
        while True:
            found.append(by.recv())
    except (EOFError, OSError):
        return found


def train(report: Connection, directory: str, steps: int, delta: ms.Delta | None = None) -> None:
    """Goes on from the latest checkpoint, and says which step is saved, each time that the store has said so."""
    as_process_of_its_own()
    job, store = Job(delta), ms.Store(directory, keep=2, delta=delta)
    at = 0
    if store.latest() is not None:
        restored = store.restore(job.objects(None))
        at = restored["step"]
        assert restored["digest"] == job.digest()
    report.send(("began", at))
    for step in range(at + 1, at + 1 + steps):
        job.train()
        if step % 3 == 0:
            pending = store.save(step, job.objects(step), background=True)
            assert pending is not None
            job.train()
            pending.result()
        else:
            store.save(step, job.objects(step))
        report.send(("saved", step))
    report.send(("ended", step))


def publish(report: Connection, directory: str, seed: int, steps: int) -> None:
    """Saves steps of a job of its own as differences, beside others that do so, and says which they are."""
    as_process_of_its_own()
    job = Job(DELTA)
    torch.manual_seed(seed)
    for _ in range(steps):
        job.train()
        while True:
            store = ms.Store(directory, delta=DELTA)
            step = (store.latest() or 0) + 1
            try:
                store.save(step, job.objects(step))
                break
            except (LockedError, TargetExistsError):
                time.sleep(0.001)
            finally:
                store.close()
        report.send(step)
