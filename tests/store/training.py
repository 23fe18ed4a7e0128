"""A training run in small, with every kind of object, and what all of it is, for comparing."""

import copy
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

import modelstate as ms
from modelstate.objects.objects import capture, targets_of
from modelstate.objects.parts import Part
from tests.loading.fingerprint import described, whole


class Counted(nn.Linear):
    """Extra state, and a table that is there from the first forward pass on."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.passes = 0
        ms.register_lazy_buffer(self, "table")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.table is None:
            self.table = torch.zeros(3)
        self.table.add_(1)
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"passes": self.passes}

    def set_extra_state(self, state: Any) -> None:
        self.passes = state["passes"]


class Model(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.LazyLinear(width)
        self.body = nn.Sequential(Counted(width), nn.BatchNorm1d(width), nn.Dropout(0.2))
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.body(self.first(x)))
        return result


class Positions:
    """A loader that knows where it is."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.at = 0

    def next(self) -> torch.Tensor:
        self.at += 1
        self.seen.append(self.at)
        return torch.full((5, 3), float(self.at)) / 7

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.seen[:] = state["seen"]


class Random:
    """torch's own generator as an object."""

    restored_last = True

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, 1e-2, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, 1e-2),
    "SGD": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9),
    "LBFGS": lambda params: torch.optim.LBFGS(params, 1e-2, max_iter=3),
    "Adafactor": lambda params: torch.optim.Adafactor(params, 1e-2),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda it: lr_scheduler.StepLR(it, 2),
    "CosineAnnealingLR": lambda it: lr_scheduler.CosineAnnealingLR(it, 9),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(
        it, 0.1, 40, cycle_momentum=not {"betas", "momentum"}.isdisjoint(it.defaults)
    ),
    "ReduceLROnPlateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, patience=1),
    "SequentialLR": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.LinearLR(it), lr_scheduler.ExponentialLR(it, 0.9)], [3]
    ),
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda epoch: 0.9**epoch),
}


class Run:
    """Objects that train together."""

    def __init__(self, optimizer: str = "Adam", scheduler: str = "StepLR") -> None:
        self.model, self.ema = Model(), nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.model.last.weight  # tied across modules
        self.model(torch.zeros(2, 3))  # which makes what is lazy
        params = [*self.model.parameters(), self.head.bias]
        self.optimizer = OPTIMIZERS[optimizer](params)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.generator = torch.Generator().manual_seed(3)
        self.loader, self.random, self.step = Positions(), Random(), 0

    @property
    def objects(self) -> dict[str, Any]:
        return {
            "rng": self.random,
            "step": self.step,
            "generator": self.generator,
            "scheduler": self.scheduler,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "loader": self.loader,
            "model": self.model,
            "head": self.head,
            "averaged": {"ema": self.ema, "decay": 0.5},
        }

    def train(self, steps: int) -> list[float]:
        return [self._train() for _ in range(steps)]

    def _train(self) -> float:
        x = self.loader.next()
        x = x + torch.rand(x.shape, generator=self.generator)

        def closure() -> float:
            self.optimizer.zero_grad()
            found = (self.head(self.model(x)) - 1).pow(2).mean()
            self.scaler.scale(found).backward()
            return float(found.detach())

        if isinstance(self.optimizer, torch.optim.LBFGS):
            loss = float(self.optimizer.step(closure))  # type: ignore[arg-type]
        else:
            loss = closure()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        takes_loss = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
        self.scheduler.step(*([loss] if takes_loss else []))
        with torch.no_grad():
            for mean, param in zip(self.ema.parameters(), self.model.last.parameters(), strict=True):
                mean.lerp_(param, 0.5)
        self.step += 1
        return loss


class Saved:
    """A step of a store, which is gone when nothing refers to it."""

    def __init__(self, objects: dict[str, Any]) -> None:
        self._folder = TemporaryDirectory()
        with ms.Store(self._folder.name) as store:
            store.save(1, objects)

    def restore(self, objects: Any, **options: Any) -> Any:
        return ms.Store(self._folder.name).restore(objects, 1, **options)


def kept(objects: dict[str, Any]) -> dict[str, Part]:
    """The state of the objects, in memory of its own."""
    return copy.deepcopy(dict(capture(targets_of(objects))))


def state_of(objects: dict[str, Any]) -> Any:
    """All that is captured, but for plain values, by what it is."""
    return {path: described(part.tree) for path, part in capture(targets_of(objects)).items() if part.kind != "value"}


def everything(objects: dict[str, Any]) -> Any:
    """All that a restore that fails must leave as it is, and who is who."""
    found: dict[str, Any] = {"state": state_of(objects)}
    for path, target in targets_of(objects).items():
        if target.kind == "module":
            found[path] = whole(target.obj)
        elif target.kind == "optimizer":
            state = target.obj.state.items()
            found[path] = [
                (id(param), id(values), {key: id(value) for key, value in values.items()}) for param, values in state
            ]
            found[f"{path} groups"] = [
                (
                    id(group),
                    [(key, *map(id, value)) if key == "params" else (key, value) for key, value in group.items()],
                )
                for group in target.obj.param_groups
            ]
        elif target.kind == "stateful":
            found[path] = sorted(vars(target.obj))
    return found
