"""From a file in float32 to a module in bfloat16. Memory that the target needs is allocated while the clock runs."""

import torch
from torch import nn

from bench.ways.case import Case, Way, Work, pt

BF16 = torch.bfloat16


def torch_load(*, mmap: bool) -> Way:
    def prepare(case: Case) -> Work:
        model = case.on_meta().to(BF16)

        def work() -> nn.Module:
            model.to_empty(device="cpu")
            model.load_state_dict(torch.load(case.torch_file, weights_only=True, mmap=mmap))
            return model

        return work

    return pt(prepare)


def assign_then_to(case: Case) -> Work:
    model = case.on_meta()

    def work() -> nn.Module:
        model.load_state_dict(torch.load(case.torch_file, weights_only=True, mmap=True), assign=True)
        return model.to(BF16)

    return work


def load_model(case: Case) -> Work:
    from safetensors.torch import load_model as load

    model = case.on_meta().to(BF16)

    def work() -> nn.Module:
        load(model.to_empty(device="cpu"), case.safetensors)
        return model

    return work


def iterate(case: Case) -> Work:
    from safetensors import safe_open

    model = case.on_meta()

    def work() -> nn.Module:
        with safe_open(case.safetensors, "pt") as file:
            state = {name: file.get_tensor(name).to(BF16) for name in file.keys()}  # noqa: SIM118
        model.load_state_dict(state, assign=True)
        return model

    return work


def accelerate(case: Case) -> Work:
    from accelerate import load_checkpoint_in_model

    model = case.on_meta()

    def work() -> nn.Module:
        load_checkpoint_in_model(model, str(case.safetensors), device_map={"": "cpu"}, dtype=BF16)
        return model

    return work
