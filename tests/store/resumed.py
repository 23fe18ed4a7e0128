"""A small language model that is trained on text, and can be killed at any moment."""

import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import modelstate as ms
from tests.programs import as_process_of_its_own

LENGTH = 12
LETTERS = "abcdefgh ."


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 32)
        self.positions = nn.Parameter(torch.zeros(LENGTH, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, len(LETTERS), bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        found: torch.Tensor = self.head(self.layers(self.embedding(tokens) + self.positions, mask=mask))
        return found


class Batches:
    """A shuffled loader without end that knows where it is: how its generator began the epoch, and how far it is."""

    def __init__(self) -> None:
        text = torch.Generator().manual_seed(5)
        words = [torch.randint(0, 8, (3,), generator=text) for _ in range(20)]
        lines = [torch.cat([words[int(i)] for i in torch.randint(0, 20, (5,), generator=text)]) for _ in range(100)]
        self.generator = torch.Generator().manual_seed(7)
        data = TensorDataset(torch.stack(lines)[:, : LENGTH + 1])
        self.loader = DataLoader(data, 8, shuffle=True, generator=self.generator, drop_last=True)
        self.began, self.at = self.generator.get_state(), 0
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> torch.Tensor:
        if self._batches is None:
            self.generator.set_state(self.began)
            self._batches = iter(self.loader)
            for _ in range(self.at):
                next(self._batches)
        batch = next(self._batches, None)
        if batch is None:
            self.began, self.at, self._batches = self.generator.get_state(), 0, None
            return next(self)
        self.at += 1
        tokens: torch.Tensor = batch[0]
        return tokens

    def state_dict(self) -> dict[str, Any]:
        return {"began": self.began, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.began, self.at, self._batches = state["began"], state["at"], None


def run(report: Connection, directory: str | None, steps: int) -> None:
    """Trains, from the latest checkpoint on if there is one, and says each step's loss."""
    as_process_of_its_own()
    torch.manual_seed(0 if directory is None else os.getpid())  # what is drawn here is not what counts
    batches = Batches()
    torch.manual_seed(1)
    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps)
    rng = ms.RNG()
    done, store = 0, None if directory is None else ms.Store(directory, keep=2)

    def objects(step: int | None) -> dict[str, Any]:
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "batches": batches,
            "rng": rng,
            "step": step,
        }

    if store is not None and store.latest() is not None:
        done = store.restore(objects(None))["step"]
    report.send(("from", done))
    for step in range(done + 1, steps + 1):
        tokens = next(batches)
        optimizer.zero_grad()
        found = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        report.send((step, loss.item().hex()))
        if store is not None and step % 2 == 0:
            store.save(step, objects(step), background=step % 4 != 0)  # type: ignore[call-overload]
    if store is not None:
        store.close()
