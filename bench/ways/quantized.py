"""From a file in float32 to a module whose linear weights torchao has quantized."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.ways.case import Case, Way, Work


def int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(set_inductor_config=False)


def int4() -> Any:
    """In groups of 32."""
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(32))  # type: ignore[attr-defined]


Config = Callable[[], Any]


def ours(config: Config, *, builds: bool = False) -> Way:
    """With `builds`, the model is built while the clock runs, and its head left alone, as transformers does it."""

    def prepare(case: Case) -> Work:
        import modelstate as ms

        model = None if builds else case.on_meta()
        quantize = ms.loading.Quantize(config())
        transform: Any = {"lm_head": None, "*": quantize} if builds else quantize

        def work() -> nn.Module:
            target = case.on_meta() if model is None else model
            ms.load(target, case.safetensors, transform=transform)
            return target

        return work

    return Way(prepare, package="torchao")


def after(config: Config, source: str) -> Way:
    """`quantize_` after a load: from torch's file, mapped or not, or from safetensors."""

    def prepare(case: Case) -> Work:
        from safetensors.torch import load_file
        from torchao.quantization import quantize_

        model = case.on_meta()
        chosen = config()

        def work() -> nn.Module:
            if source == "safetensors":
                model.load_state_dict(load_file(case.safetensors), assign=True)
            elif source == "mmap":
                model.load_state_dict(torch.load(case.torch_file, weights_only=True, mmap=True), assign=True)
            else:
                model.to_empty(device="cpu")
                model.load_state_dict(torch.load(case.torch_file, weights_only=True))
            quantize_(model, chosen)
            return model

        return work

    return Way(prepare, files="safetensors" if source == "safetensors" else "pt", package="torchao")
