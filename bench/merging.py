"""A LoRA adapter merged into its base, and the average of three checkpoints, into a module that has memory."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

from bench import files
from bench.measure import Stages
from bench.models import QUICK, Sizes, sizes_of, values, with_memory

RANK, ALPHA = 16, 32
_PREFIX = "base_model.model."
Work = Callable[[nn.Module, Path], object]
"""Fills a module from the files in a folder."""


def write(folder: Path, sizes: Sizes, case: str) -> None:
    """Three checkpoints of a decoder, and a peft adapter for all of its linear layers."""
    (folder / "adapter").mkdir(parents=True)
    state = values(case, sizes)
    for index in range(3):
        save_file({name: value + index for name, value in state.items()}, folder / f"{index}.safetensors")
    adapter: dict[str, torch.Tensor] = {}
    targets: set[str] = set()
    for name, module in with_memory(case, sizes).named_modules():
        if isinstance(module, nn.Linear):
            adapter[f"{_PREFIX}{name}.lora_A.weight"] = torch.randn(RANK, module.in_features) / 100
            adapter[f"{_PREFIX}{name}.lora_B.weight"] = torch.randn(module.out_features, RANK) / 100
            targets.add(name.rpartition(".")[2])
    save_file(adapter, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": sorted(targets), "bias": "none"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))


def write_all(*, folder: str, quick: bool) -> None:
    """The files that are merged, and tiny ones."""
    stages = Stages()
    write(Path(folder) / "tiny", QUICK, "tiny")
    write(Path(folder) / "large", sizes_of(quick), "large")
    stages.end("written")


def measure(*, contender: str, folder: str, quick: bool) -> None:
    """From the files to the module; a tiny one first, so that imports and the start of threads do not count."""
    work = {**LORA, **AVERAGE}[contender]
    work(with_memory("tiny", QUICK), Path(folder) / "tiny")
    model = with_memory("large", sizes_of(quick))
    files.warm(Path(folder).rglob("*.safetensors"))
    stages = Stages()
    work(model, Path(folder) / "large")
    stages.end("ready")


def _merge_by_modelstate(model: nn.Module, folder: Path) -> None:
    import modelstate as ms

    ms.load(model, ms.open([folder / "0.safetensors", folder / "adapter"], combine=ms.merge.LoRA()))


def _merge_by_a_loop(model: nn.Module, folder: Path) -> None:
    base, adapter = load_file(folder / "0.safetensors"), load_file(folder / "adapter" / "adapter_model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(base[name])
            module = f"{_PREFIX}{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in adapter:
                a, b = adapter[f"{module}.lora_A.weight"], adapter[f"{module}.lora_B.weight"]
                parameter.add_((b @ a) * (ALPHA / RANK))


def _merge_by_peft(model: nn.Module, folder: Path) -> None:
    import peft

    load_model(model, folder / "0.safetensors")
    peft.PeftModel.from_pretrained(model, folder / "adapter").merge_and_unload()


def _average_by_modelstate(model: nn.Module, folder: Path) -> None:
    import modelstate as ms

    ms.load(model, ms.open([folder / f"{index}.safetensors" for index in range(3)], combine=ms.merge.Average()))


def _average_by_a_loop(model: nn.Module, folder: Path) -> None:
    states = [load_file(folder / f"{index}.safetensors") for index in range(3)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((states[0][name] + states[1][name] + states[2][name]) / 3)


LORA: Mapping[str, Work] = {
    "modelstate.load, merge.LoRA": _merge_by_modelstate,
    "load_file + copy_ + B @ A": _merge_by_a_loop,
    "peft merge_and_unload": _merge_by_peft,
}
AVERAGE: Mapping[str, Work] = {
    "modelstate.load, merge.Average": _average_by_modelstate,
    "load_file + sum + copy_": _average_by_a_loop,
}
