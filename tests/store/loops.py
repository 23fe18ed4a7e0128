"""Training loops of every structure, which can be killed at any moment and started again.

Each says the loss of every step. Without a directory it runs without modelstate: a plain loop, for comparing.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import set_start_method
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import modelstate as ms
from tests.programs import as_process_of_its_own

EPOCH, BATCH, EPOCHS, STEPS = 44, 4, 4, 24
"""Samples in an epoch (11 batches), and epochs or steps of a run: its steps, of two batches each, take 4.4 epochs."""


class Samples(Dataset[torch.Tensor]):
    """Samples with noise that is drawn when they are read, from all three global generators."""

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), index / EPOCH) + torch.rand(6) + random.random() + np.random.random()


class SamplesInWorkers(Samples):
    """The same in worker processes, whose generators go with the state of the loader."""

    def state_dict(self) -> dict[str, Any]:
        return {"rng": ms.RNG().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ms.RNG().load_state_dict(state["rng"])


class Stream(IterableDataset[torch.Tensor]):
    """A shuffled stream that is shared out among the workers, and knows where it is."""

    def __init__(self) -> None:
        self.at, self.is_restored = 0, False

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = random.Random(0).sample(range(EPOCH), EPOCH)[first::stride]
        self.at, self.is_restored = self.at if self.is_restored else 0, False
        while self.at < len(order):
            self.at += 1
            yield torch.full((6,), order[self.at - 1] / EPOCH)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.is_restored = state["at"], True


class Trained:
    """A model with dropout, its optimizer, scheduler, scaler and average; gradients of two steps are added up."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, 200)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    @property
    def objects(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "ema")
        return {name: getattr(self, name) for name in names} | {"rng": ms.RNG()}

    def step(self, batch: torch.Tensor) -> str:
        loss = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.scaler.scale(loss / 2).backward()
        return float(loss.detach()).hex()

    def update(self) -> str:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.ema.update_parameters(self.model)
        return float(sum(param.sum() for param in self.ema.parameters()).detach()).hex()

    def two(self, batches: Callable[[], torch.Tensor]) -> tuple[str, ...]:
        """One step, of two batches."""
        return self.step(batches()), self.step(batches()), self.update()


Loop = Callable[..., Iterable[int]]
Said = Iterator[tuple[int, Any]]


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def iterator_before(loop: Loop, loader: Any) -> Said:
    """The iterator of the loader is made between `resumable` and the loop, and so is much else."""
    trained = Trained()
    steps = loop({**trained.objects, "loader": loader}, STEPS)
    batches = iter(loader)
    nn.Linear(9, 9)  # which draws random numbers
    for step in steps:
        loss = []
        for _ in range(2):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            loss.append(trained.step(batch))
        yield step, (*loss, trained.update())


def epochs(loop: Loop, loader: Any, objects: dict[str, Any]) -> Said:
    """A step of the loop is an epoch."""
    trained = Trained()
    for epoch in loop({**trained.objects, **objects}, EPOCHS, save_every=1):
        for number, batch in enumerate(loader):
            loss = trained.step(batch)
            yield epoch * 100 + number, (loss, trained.update() if number % 2 or number == 10 else None)


def steps_with_validation(loop: Loop, loader: Any) -> Said:
    """After every sixth step, a look at other data."""
    trained = Trained()
    validation = StatefulDataLoader(Samples(), BATCH)
    batches = endless(loader)
    for step in loop({**trained.objects, "loader": loader, "validation": validation}, STEPS):
        losses = trained.two(lambda: next(batches))
        if step % 6 == 5:
            trained.model.eval()
            losses += tuple(trained.model(batch).sum().item() for batch in validation)
            trained.model.train()
        yield step, losses


def persistent_epochs(loop: Loop) -> Said:
    """Epochs of torch's own loader, whose workers are started before the loop, and draw nothing."""
    trained = Trained()
    data = torch.arange(EPOCH * 6.0).reshape(EPOCH, 6) / EPOCH
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    iter(loader)
    for epoch in loop(trained.objects, EPOCHS, save_every=1):
        for number, batch in enumerate(loader):
            yield epoch * 100 + number, (trained.step(batch), trained.update() if number % 2 or number == 10 else None)


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stateful(samples: Any, **options: Any) -> Any:
    return StatefulDataLoader(samples, BATCH, shuffle=isinstance(samples, Samples), **options)


LOOPS: dict[str, Callable[[Loop], Said]] = {
    "iterator before the loop": lambda loop: iterator_before(loop, stateful(Samples())),
    "two workers": lambda loop: iterator_before(loop, stateful(SamplesInWorkers(), num_workers=2)),
    "workers that persist": lambda loop: steps_with_validation(
        loop, stateful(SamplesInWorkers(), num_workers=2, persistent_workers=True)
    ),
    "epochs": lambda loop: epochs(loop, DataLoader(Samples(), BATCH, shuffle=True), {}),
    "epochs with workers": lambda loop: epochs(loop, DataLoader(Samples(), BATCH, shuffle=True, num_workers=2), {}),
    "epochs of a loader with a state": lambda loop: (lambda loader: epochs(loop, loader, {"loader": loader}))(
        stateful(Samples(), generator=seeded())
    ),
    "epochs with workers that persist": persistent_epochs,
    "a stream with workers": lambda loop: iterator_before(loop, stateful(Stream(), num_workers=2)),
}
"""By names for the reports of tests."""


def run(report: Connection, directory: str | None, name: str) -> None:
    """Trains, and says what each step gave."""
    os.setsid()  # the processes of the loaders belong to it, and are killed with it
    as_process_of_its_own()
    set_start_method("fork", force=True)  # of the workers of loaders
    is_resumed = directory is not None and any(Path(directory).glob("*/step-*"))
    torch.manual_seed(os.getpid() if is_resumed else 0)
    random.seed(os.getpid() if is_resumed else 1)
    np.random.seed(os.getpid() if is_resumed else 2)

    def loop(objects: dict[str, Any], steps: int, save_every: int = 3) -> Iterable[int]:
        if directory is None:
            return range(steps)
        path = os.path.join(directory, "run")
        return ms.resumable(path, objects, steps=steps, save_every=save_every, keep=2, background=False)

    for said in LOOPS[name](loop):
        report.send(said)
    report.send("end")
