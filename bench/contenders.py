"""The ways to load a checkpoint, each as a function that prepares and returns the work.

What is imported and built before the work is returned is not measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bench.models import MODELS, Sizes, on_meta, with_memory


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be loaded."""

    name: str
    sizes: Sizes
    folder: Path

    @property
    def torch_file(self) -> Path:
        return self.folder / f"{self.name}.pt"

    @property
    def safetensors_file(self) -> Path:
        return self.folder / self.name / "model.safetensors"

    def on_meta(self) -> nn.Module:
        return on_meta(self.name, self.sizes)

    def with_memory(self) -> nn.Module:
        return with_memory(self.name, self.sizes)


Work = Callable[[], nn.Module]
Contender = Callable[[Case], Work]


def usual(case: Case) -> Work:
    def work() -> nn.Module:
        model = MODELS[case.name](case.sizes).eval()
        model.load_state_dict(torch.load(case.torch_file, weights_only=True))
        return model

    return work


def torch_assign(*, mmap: bool) -> Contender:
    def prepare(case: Case) -> Work:
        model = case.on_meta()

        def work() -> nn.Module:
            model.load_state_dict(torch.load(case.torch_file, weights_only=True, mmap=mmap), assign=True)
            return model

        return work

    return prepare


def torch_copy(*, mmap: bool) -> Contender:
    def prepare(case: Case) -> Work:
        model = case.with_memory()

        def work() -> nn.Module:
            model.load_state_dict(torch.load(case.torch_file, weights_only=True, mmap=mmap))
            return model

        return work

    return prepare


def safetensors_assign(case: Case) -> Work:
    from safetensors.torch import load_file

    model = case.on_meta()

    def work() -> nn.Module:
        model.load_state_dict(load_file(case.safetensors_file), assign=True)
        return model

    return work


def safetensors_load_model(*, meta: bool) -> Contender:
    def prepare(case: Case) -> Work:
        from safetensors.torch import load_model

        model = case.on_meta() if meta else case.with_memory()

        def work() -> nn.Module:
            if meta:
                model.to_empty(device="cpu")
            load_model(model, case.safetensors_file)
            return model

        return work

    return prepare


def accelerate_load(*, meta: bool) -> Contender:
    def prepare(case: Case) -> Work:
        from accelerate import load_checkpoint_in_model

        model = case.on_meta() if meta else case.with_memory()

        def work() -> nn.Module:
            load_checkpoint_in_model(model, str(case.safetensors_file), device_map={"": "cpu"})
            return model

        return work

    return prepare


def accelerate_dispatch(case: Case) -> Work:
    from accelerate import load_checkpoint_and_dispatch

    model = case.on_meta()

    def work() -> nn.Module:
        dispatched: nn.Module = load_checkpoint_and_dispatch(model, str(case.safetensors_file), device_map={"": "cpu"})
        return dispatched

    return work


def ours(*, meta: bool, torch_file: bool = False, **options: bool) -> Contender:
    def prepare(case: Case) -> Work:
        import modelstate as ms

        model = case.on_meta() if meta else case.with_memory()
        path = case.torch_file if torch_file else case.safetensors_file

        def work() -> nn.Module:
            ms.load(model, path, **options)
            return model

        return work

    return prepare


META = {
    "modelstate.load": ours(meta=True),
    "modelstate.load, torch file": ours(meta=True, torch_file=True),
    "modelstate.load, map=False": ours(meta=True, map=False),
    "Model() + torch.load + load_state_dict": usual,
    "torch.load + assign": torch_assign(mmap=False),
    "torch.load(mmap) + assign": torch_assign(mmap=True),
    "safetensors load_file + assign": safetensors_assign,
    "to_empty + safetensors load_model": safetensors_load_model(meta=True),
    "accelerate load_checkpoint_in_model": accelerate_load(meta=True),
    "accelerate load_checkpoint_and_dispatch": accelerate_dispatch,
}
"""Into a module whose parameters are on meta. The first is what the others are compared with."""

MATERIALISED = {
    "modelstate.load, in_place=True": ours(meta=False, in_place=True),
    "modelstate.load, in_place=True, torch file": ours(meta=False, in_place=True, torch_file=True),
    "modelstate.load": ours(meta=False),
    "torch.load + load_state_dict": torch_copy(mmap=False),
    "torch.load(mmap) + load_state_dict": torch_copy(mmap=True),
    "safetensors load_model": safetensors_load_model(meta=False),
    "accelerate load_checkpoint_in_model": accelerate_load(meta=False),
}
"""Into a module that has memory."""


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
