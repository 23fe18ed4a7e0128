"""Checkpoints in every format for the networks of `models`, which rank 0 or all ranks write."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import Shard, distribute_tensor

import modelstate as ms
from tests.distributed import models

State = dict[str, torch.Tensor]
RULES = (
    ms.rules.Rename("transformer.*", "*"),
    ms.rules.Split("blocks.*.qkv.*", ["blocks.*.q.*", "blocks.*.k.*", "blocks.*.v.*"]),
    ms.rules.Concat(["blocks.*.up.first.*", "blocks.*.up.second.*"], "blocks.*.up.*"),
    ms.rules.Transpose("blocks.*.down.weight"),
)
"""From the names of `fused` to those of the network."""


def fused(state: State) -> State:
    """The state under other names: Q, K and V in one tensor, `up` in two, `down` transposed."""
    result = {}
    for name, tensor in state.items():
        path, _, leaf = name.rpartition(".")
        if path.endswith(".q"):
            parts = [state[f"{path[:-1]}{part}.{leaf}"] for part in "qkv"]
            result[f"transformer.{path[:-1]}qkv.{leaf}"] = torch.cat(parts)
        elif path.endswith(".up"):
            first, second = tensor.chunk(2)
            result |= {f"transformer.{path}.first.{leaf}": first, f"transformer.{path}.second.{leaf}": second}
        elif path.endswith(".down"):
            result[f"transformer.{name}"] = tensor.t()
        elif not path.endswith((".k", ".v")):
            result[f"transformer.{name}"] = tensor
    return {name: tensor.contiguous() for name, tensor in result.items()}


def write_adapter(state: State, folder: Path, rank: int = 2) -> Path:
    """A LoRA adapter for the projections of the network, as peft writes it."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(3)
    tensors = {}
    for name, weight in state.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and path.endswith((".q", ".v", ".up", ".down")):
            rows, columns = weight.shape
            tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(rank, columns)
            tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(rows, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q", "v", "up", "down"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_safetensors(state: State, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


def write_shards(state: State, folder: Path) -> None:
    """Three files with the index of Hugging Face."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(state)
    weight_map = {name: f"model-{index % 3 + 1:05}-of-00003.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: state[name].contiguous() for name in names if weight_map[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_dcp(state: State, folder: Path) -> None:
    """A checkpoint of four ranks, each with its rows. Called on all ranks."""
    mesh = models.mesh(4)
    spread = {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.ndim else tensor for name, tensor in state.items()
    }
    dcp.save(spread, checkpoint_id=folder)


FORMATS = ("safetensors", "shards", "zip", "dcp")


def write(state: State, folder: Path, form: str) -> Path:
    """Writes a state dict in one of `FORMATS`, and returns its path. Called on all ranks."""
    path = folder / {"safetensors": "model.safetensors", "zip": "model.pt"}.get(form, form)
    if form == "dcp":
        write_dcp(state, path)
    elif dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        writers: dict[str, Callable[[State, Path], object]] = {
            "safetensors": write_safetensors,
            "shards": write_shards,
            "zip": torch.save,
        }
        writers[form](state, path)
    dist.barrier()
    return path


@cache
def _written(size: str, folder: Path, form: str) -> tuple[Path, Path, Path]:
    """Writes the state of a network, the same under other names, and an adapter; once in each process for a size."""
    folder = folder / f"{size} {form}"
    state = dict(models.plain(size, seed=7).state_dict())
    if size == "tied":
        del state["head.weight"]
    path, other = write(state, folder / "whole", form), write(fused(state), folder / "fused", form)
    adapter = folder / "adapter"
    if dist.get_rank() == 0:
        write_adapter(state, adapter)
    dist.barrier()
    return path, other, adapter


def cases(kind: str, folder: Path, form: str) -> dict[str, tuple[Callable[[], Any], dict[str, Any]]]:
    """What is loaded into a model of a kind: by name, a function that gives the source, and options of `ms.load`.

    Called on all ranks, which write the checkpoints.
    """
    path, other, adapter = _written(kind if kind in models.SIZES else "", folder, form)
    return {
        "fp32": (lambda: path, {}),
        "bf16": (lambda: path, {"dtype": torch.bfloat16}),
        "rules": (lambda: other, {"rules": RULES}),
        "lora": (lambda: ms.open([path, adapter], combine=ms.merge.LoRA()), {}),
    }
