"""A training run that is killed and resumed, with a tensor that gets its value only after some epochs.

At first, a classifier learns from its features alone. At epoch 12 it chooses prototypes among the features, and from
then on it also learns from the distances to them. The prototypes are chosen once: the weights that are learned after
that do not fit other prototypes. The job is killed (SIGKILL) at epoch 20 and resumed in a new process. This is done in
two ways:

- stock: `torch.save` of the state dicts of the model and the optimizer. The prototypes are an attribute that is not in
  the state dict. The resumed job finds None, and chooses other prototypes.
- modelstate: the prototypes are a lazy buffer, and one file has everything that the training depends on.

    python examples/lazy_tensor.py [--plot picture.svg]

prints the accuracy by epoch of these two runs and of an uninterrupted run, and whether they agree bit for bit. `--plot`
needs matplotlib.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import modelstate as ms

EPOCHS, CHOOSING, KILLED = 32, 12, 20
CLASSES, FEATURES, PROTOTYPES = 8, 32, 24


class Classifier(nn.Module):
    """Classifies points on the plane into eight classes, the interleaved arms of a spiral."""

    def __init__(self, lazy: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES), nn.Tanh())
        self.head = nn.Linear(FEATURES, CLASSES)
        self.by_prototype = nn.Linear(PROTOTYPES, CLASSES)
        if lazy:
            ms.register_lazy_buffer(self, "prototypes")
        else:
            self.prototypes: torch.Tensor | None = None

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        features = self.body(points)
        if self.prototypes is None:
            return self.head(features)
        near = torch.softmax(-8 * torch.cdist(features, self.prototypes), -1)
        return self.head(features) + 8 * self.by_prototype(near)

    def choose(self, points: torch.Tensor, generator: torch.Generator) -> None:
        chosen = torch.randperm(len(points), generator=generator)[:PROTOTYPES]
        self.prototypes = self.body(points[chosen]).detach()


@ms.extra_state("epoch", "order_state", "optimizer_state")
class Training(nn.Module):
    """Everything that the training depends on. It is saved as one module."""

    def __init__(self, lazy: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Classifier(lazy)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.order = torch.Generator().manual_seed(1)
        self.epoch = 0
        self.losses: list[float] = []

    @property
    def optimizer_state(self) -> dict[str, Any]:
        return ms.optimizer_state(self.model, self.optimizer)

    @optimizer_state.setter
    def optimizer_state(self, state: dict[str, Any]) -> None:
        ms.load_optimizer_state(self.model, self.optimizer, state)

    @property
    def order_state(self) -> torch.Tensor:
        return self.order.get_state()

    @order_state.setter
    def order_state(self, state: torch.Tensor) -> None:
        self.order.set_state(state.cpu())

    def run_epoch(self, points: torch.Tensor, labels: torch.Tensor) -> None:
        if self.epoch >= CHOOSING and self.model.prototypes is None:
            self.model.choose(points, self.order)
        self.losses = []
        for batch in torch.randperm(len(points), generator=self.order).split(64):
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(points[batch]), labels[batch])
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
        self.epoch += 1


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(2048) % CLASSES
    radius = torch.rand(2048, generator=generator)
    angle = 2 * torch.pi * labels / CLASSES + 5 * radius + 0.1 * torch.randn(2048, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), labels


def save(training: Training, path: Path, way: str) -> None:
    if way == "modelstate":
        ms.save(training, path)
        return
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    torch.save({**state, "epoch": training.epoch, "order": training.order.get_state()}, path)


def resume(training: Training, path: Path, way: str) -> None:
    if way == "modelstate":
        ms.load(training, path, progress=False)
        return
    state = torch.load(path)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.order.set_state(state["order"])
    training.epoch = state["epoch"]


def train(way: str, path: Path, log: Path, kill_at: int = 0) -> None:
    """Trains from the checkpoint, if there is one, to the end. Saves after each epoch, and then writes to the log."""
    torch.set_num_threads(1)
    points, labels = data()
    training = Training(lazy=way == "modelstate")
    if path.exists():
        resume(training, path, way)
    while training.epoch < EPOCHS:
        training.run_epoch(points, labels)
        with torch.no_grad():
            accuracy = (training.model(points).argmax(1) == labels).float().mean().item()
        save(training, path, way)
        with log.open("a") as file:
            print(json.dumps({"epoch": training.epoch, "accuracy": accuracy, "losses": training.losses}), file=file)
        if training.epoch == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def in_a_process(way: str, folder: Path, kill_at: int = 0) -> list[dict[str, Any]]:
    """Runs the training in a process of its own and returns its log. With `kill_at`, it is killed once and resumed."""
    folder.mkdir()
    path, log = folder / "checkpoint", folder / "log.jsonl"
    command = [sys.executable, __file__, "--train", way, str(path), str(log)]
    if kill_at:
        killed = subprocess.run([*command, str(kill_at)], check=False)
        assert killed.returncode == -signal.SIGKILL, killed.returncode
    subprocess.run([*command, "0"], check=True)
    return [json.loads(line) for line in log.read_text().splitlines()]


def plot(runs: dict[str, list[dict[str, Any]]], path: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "modelstate"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    styles = {"uninterrupted": ("0.6", 5), "stock": ("tab:red", 1.5), "modelstate": ("black", 1.5)}
    for name, log in runs.items():
        color, width = styles[name]
        label = name if name == "uninterrupted" else f"killed and resumed: {name}"
        axes.plot(
            [entry["epoch"] for entry in log], [entry["accuracy"] for entry in log], color=color, lw=width, label=label
        )
    axes.axvline(CHOOSING, color="0.85", zorder=0)
    axes.axvline(KILLED, color="0.85", zorder=0)
    axes.text(CHOOSING, 0.02, " prototypes are chosen", transform=axes.get_xaxis_transform(), fontsize=8)
    axes.text(KILLED, 0.02, " kill -9", transform=axes.get_xaxis_transform(), fontsize=8)
    axes.set(xlabel="epoch", ylabel="accuracy")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", metavar="PATH", help="write the curves to an image file")
    parser.add_argument("--train", nargs=4, metavar=("WAY", "PATH", "LOG", "KILL_AT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        way, path, log, kill_at = arguments.train
        train(way, Path(path), Path(log), int(kill_at))
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "uninterrupted": in_a_process("modelstate", Path(folder, "whole")),
            "stock": in_a_process("stock", Path(folder, "stock"), KILLED),
            "modelstate": in_a_process("modelstate", Path(folder, "modelstate"), KILLED),
        }
    print("epoch  " + "  ".join(f"{name:>13}" for name in runs))
    for rows in zip(*runs.values(), strict=True):
        print(f"{rows[0]['epoch']:>5}  " + "  ".join(f"{row['accuracy']:>13.3f}" for row in rows))
    for name in ("stock", "modelstate"):
        is_same = runs[name] == runs["uninterrupted"]
        print(f"{name}: {'bit for bit the same as' if is_same else 'differs from'} the uninterrupted run")
    if arguments.plot:
        plot(runs, arguments.plot)


if __name__ == "__main__":
    main()
