"""The ways to load a checkpoint, by what is asked for. The first of each table is what the others are compared with."""

from collections.abc import Callable

import torch
from torch import nn

from bench.ways import casts, ours, peers, pretrained, quantized, stock
from bench.ways.case import Way, pt

META = {
    "modelstate.load": ours.load(),
    "modelstate.load, torch file": ours.load(torch_file=True),
    "modelstate.load, map=False": ours.load(map=False),
    "Model() + torch.load + load_state_dict": pt(stock.usual),
    "torch.load + assign": stock.torch_load(meta=True, mmap=False),
    "torch.load(mmap) + assign": stock.torch_load(meta=True, mmap=True),
    "safetensors load_file + assign": Way(stock.safetensors_assign),
    "to_empty + safetensors load_model": Way(stock.safetensors_load_model(meta=True)),
    "accelerate load_checkpoint_in_model": stock.accelerate_load(meta=True),
    "accelerate load_checkpoint_and_dispatch": peers.of("accelerate", stock.accelerate_dispatch),
    "DCP": peers.dcp(meta=True),
    "DCP, Hugging Face storage": peers.dcp(meta=True, hugging_face=True),
    "fastsafetensors": peers.fastsafetensors(meta=True, direct=True),
    "fastsafetensors, without O_DIRECT": peers.fastsafetensors(meta=True, direct=False),
    "runai-model-streamer": peers.of("runai_model_streamer", peers.runai),
    "tensorizer": peers.of("tensorizer", peers.tensorizer, "tensorizer"),
}
"""Into a module whose parameters are on meta."""

MATERIALISED = {
    "modelstate.load, in_place=True": ours.load(meta=False, in_place=True),
    "modelstate.load, in_place=True, torch file": ours.load(meta=False, in_place=True, torch_file=True),
    "modelstate.load": ours.load(meta=False),
    "torch.load + load_state_dict": stock.torch_load(meta=False, mmap=False),
    "torch.load(mmap) + load_state_dict": stock.torch_load(meta=False, mmap=True),
    "safetensors load_model": Way(stock.safetensors_load_model(meta=False)),
    "safetensors safe_open + copy_": Way(stock.safetensors_copy),
    "accelerate load_checkpoint_in_model": stock.accelerate_load(meta=False),
    "DCP": peers.dcp(meta=False),
    "DCP, Hugging Face storage": peers.dcp(meta=False, hugging_face=True),
    "fastsafetensors, without O_DIRECT": peers.fastsafetensors(meta=False, direct=False),
    "torchsnapshot": peers.of("torchsnapshot", peers.torchsnapshot, "torchsnapshot"),
}
"""Into a module that has memory, and whose parameters an optimizer holds."""

DEFAULT = {
    name: MATERIALISED[name]
    for name in (
        "modelstate.load",
        "torch.load(mmap) + load_state_dict",
        "safetensors load_model",
        "safetensors safe_open + copy_",
        "accelerate load_checkpoint_in_model",
        "modelstate.load, in_place=True",
    )
} | {
    "modelstate.load, torch file": ours.load(meta=False, torch_file=True),
    "modelstate.load, in_place=False": ours.load(meta=False, in_place=False),
}
"""Into a module that has memory, as people load first."""

CAST = {
    "modelstate.load, dtype=bfloat16": ours.load(dtype=torch.bfloat16),
    "modelstate.load, dtype=bfloat16, torch file": ours.load(dtype=torch.bfloat16, torch_file=True),
    "torch.load + load_state_dict": casts.torch_load(mmap=False),
    "torch.load(mmap) + load_state_dict": casts.torch_load(mmap=True),
    "torch.load(mmap) + assign + to": pt(casts.assign_then_to),
    "safetensors load_model": Way(casts.load_model),
    "safetensors safe_open + to + assign": Way(casts.iterate),
    "accelerate load_checkpoint_in_model": peers.of("accelerate", casts.accelerate),
    "DCP": peers.dcp(meta=True, dtype=torch.bfloat16),
    "DCP, Hugging Face storage": peers.dcp(meta=True, hugging_face=True, dtype=torch.bfloat16),
}
"""From a file in float32 to a module in bfloat16."""


def _quantized(config: quantized.Config) -> dict[str, Way]:
    return {
        "modelstate.load, transform=Quantize": quantized.ours(config),
        "torch.load(mmap) + assign + quantize_": quantized.after(config, "mmap"),
        "safetensors load_file + assign + quantize_": quantized.after(config, "safetensors"),
        "torch.load + load_state_dict + quantize_": quantized.after(config, "torch"),
    }


HUB = {
    "modelstate.load, with construction": ours.build_and_load(),
    "transformers from_pretrained": pretrained.from_pretrained(dtype=torch.float32),
}
"""With the construction of the model, which `from_pretrained` does itself."""

HUB_CAST = {
    "modelstate.load, with construction": ours.build_and_load(dtype=torch.bfloat16),
    "transformers from_pretrained": pretrained.from_pretrained(dtype=torch.bfloat16),
}

HUB_INT8 = {
    "modelstate.load, with construction": quantized.ours(quantized.int8, builds=True),
    "transformers from_pretrained": pretrained.from_pretrained(config=quantized.int8, dtype=torch.float32),
}

TABLES = {
    "meta": META,
    "materialised": MATERIALISED,
    "default": DEFAULT,
    "cast": CAST,
    "int8": _quantized(quantized.int8),
    "int4": _quantized(quantized.int4),
    "hub": HUB,
    "hub-cast": HUB_CAST,
    "hub-int8": HUB_INT8,
}


def to_bfloat16(*, swap: bool = False, keeping: bool = False) -> Callable[[nn.Module], object]:
    def work(model: nn.Module) -> object:
        import modelstate as ms

        torch.__future__.set_swap_module_params_on_conversion(swap)
        with ms.reference_keeping(keeping):
            return model.to(torch.bfloat16)

    return work


def converted(model: nn.Module) -> object:
    import modelstate as ms

    return ms.convert(model, torch.bfloat16)


CONVERT: dict[str, Callable[[nn.Module], object]] = {
    "module.to": to_bfloat16(),
    "module.to, swap_tensors switched on": to_bfloat16(swap=True),
    "modelstate.convert": converted,
    "module.to, modelstate.reference_keeping": to_bfloat16(keeping=True),
}
"""From float32 to bfloat16. The first is what the others are compared with."""
