"""What is to be loaded, and what a way to load it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from bench.models import on_meta, with_memory
from bench.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint and the model that it is for."""

    name: str
    sizes: Sizes
    folder: Path
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    """Of the model that has memory: they refer to its parameters, as they do in a training run."""

    @property
    def torch_file(self) -> Path:
        return self.other("pt")

    @property
    def directory(self) -> Path:
        """Of the safetensors files."""
        return self.folder / self.name

    @property
    def shards(self) -> list[Path]:
        return sorted(self.directory.glob("*.safetensors"))

    @property
    def safetensors(self) -> Path:
        """The file, or the directory where there are several."""
        shards = self.shards
        return shards[0] if len(shards) == 1 else self.directory

    @property
    def strict(self) -> bool:
        """Whether torch's own can be: the published checkpoint has a buffer that the model does not save any more."""
        return self.name != "minilm"

    def other(self, suffix: str) -> Path:
        return self.folder / f"{self.name}.{suffix}"

    def on_meta(self) -> nn.Module:
        return on_meta(self.name, self.sizes)

    def with_memory(self) -> nn.Module:
        """A model with its optimizer."""
        model = with_memory(self.name, self.sizes)
        self.optimizers.append(torch.optim.AdamW(model.parameters()))
        return model

    def references_kept(self, model: nn.Module) -> bool:
        """Whether the optimizers' parameters are those of the model."""
        have = {id(parameter) for parameter in model.parameters()}
        return all(id(p) in have for one in self.optimizers for group in one.param_groups for p in group["params"])


Work = Callable[[], nn.Module]
Prepare = Callable[[Case], Work]
"""What is imported and built before the work is returned is not measured."""


@dataclass(frozen=True, slots=True)
class Way:
    """One contender."""

    prepare: Prepare
    files: str = "safetensors"
    """The format that it reads, as `bench.files` writes it."""
    package: str = ""
    """What has to be installed for it, by the name that is imported."""
    environment: tuple[tuple[str, str], ...] = ()
    """What has to be set before the process starts."""


def pt(prepare: Prepare) -> Way:
    return Way(prepare, files="pt")
