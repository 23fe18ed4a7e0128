"""The program that is served: MiniLM as an encoder of sentences, exported, or compiled as well."""

import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import modelstate as ms
from examples.serve.texts import Limits

NOT_SERVED = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")
"""What published checkpoints of BERT have, and the encoder has no use for."""


def encoder(folder: Path, checkpoint: Path) -> nn.Module:
    """The module, on the CPU, with the weights of a checkpoint. Its names are those of transformers' `BertModel`."""
    from transformers import BertConfig, BertModel

    class Encoder(BertModel):  # type: ignore[misc]
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            """Unit vectors: the mean of the tokens' last hidden states."""
            hidden = super().forward(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).to(hidden.dtype)
            return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)

    with ms.skeleton():
        module = Encoder(BertConfig.from_json_file(str(folder / "config.json")), add_pooling_layer=False)
    opened = ms.open(checkpoint)
    ms.load(module, opened, rules=rules_for(opened), map=False, progress=False)
    made: nn.Module = module.eval()
    return made


def rules_for(checkpoint: ms.Checkpoint) -> list[ms.rules.Rule]:
    """Leaves out what is not served, where the checkpoint has it: a rule that matches nothing is refused."""
    return [ms.rules.Ignore(name) for name in NOT_SERVED if any(f".{one}".endswith(f".{name}") for one in checkpoint)]


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs to export with, and to try new weights on: three texts of up to seven tokens."""
    ids = torch.tensor(
        [[101, 1996, 4937, 25126, 2006, 1996, 102], [101, 2204, 2851, 102, 0, 0, 0], [101, 102, *[0] * 5]]
    )
    return ids, (ids != 0).long()


def _sizes(limits: Limits) -> tuple[dict[int, Any], dict[int, Any]]:
    """Which sizes of the inputs are free, and how large they get."""
    sizes = {
        0: torch.export.Dim("texts", min=1, max=limits.texts),
        1: torch.export.Dim("tokens", min=2, max=limits.tokens),
    }
    return sizes, sizes


def _exported(module: nn.Module, limits: Limits) -> ms.Live:
    with torch.no_grad():
        program = torch.export.export(module, sample(), dynamic_shapes=_sizes(limits))
    return ms.Live(program, names=ms.serve.NameMap.of(module))


def _aoti(module: nn.Module, limits: Limits) -> ms.Live:
    """Compiled at the start, by the machine that it serves on."""
    folder = tempfile.TemporaryDirectory(prefix="modelstate-serve-")
    path = Path(folder.name) / "encoder.pt2"
    ms.export(module, sample(), path, kind="aoti", dynamic_shapes=_sizes(limits))
    made = ms.Live(path)
    weakref.finalize(made, folder.cleanup)  # the first swap loads the file once more
    return made


KINDS: dict[str, Callable[[nn.Module, Limits], ms.Live]] = {"exported": _exported, "aoti": _aoti}


def live(kind: str, folder: Path, checkpoint: Path, limits: Limits) -> ms.Live:
    """The program with its first weights, ready to answer and to be swapped."""
    return KINDS[kind](encoder(folder, checkpoint), limits)
