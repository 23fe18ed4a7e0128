"""The ways of torch, safetensors and accelerate."""

import torch
from torch import nn

from bench.models import KINDS
from bench.ways.case import Case, Prepare, Way, Work, pt


def usual(case: Case) -> Work:
    def work() -> nn.Module:
        model = KINDS[case.name].build(case.sizes).eval().to(KINDS[case.name].dtype)
        model.load_state_dict(torch.load(case.torch_file, weights_only=True))
        return model

    return work


def torch_load(*, meta: bool, mmap: bool) -> Way:
    """`load_state_dict`: onto meta with `assign=True`, into memory as a copy."""

    def prepare(case: Case) -> Work:
        model = case.on_meta() if meta else case.with_memory()

        def work() -> nn.Module:
            state = torch.load(case.torch_file, weights_only=True, mmap=mmap)
            model.load_state_dict(state, strict=case.strict, assign=meta)
            return model

        return work

    return pt(prepare)


def safetensors_assign(case: Case) -> Work:
    from safetensors.torch import load_file

    model = case.on_meta()

    def work() -> nn.Module:
        state = {name: value for file in case.shards for name, value in load_file(file).items()}
        model.load_state_dict(state, strict=case.strict, assign=True)
        return model

    return work


def safetensors_load_model(*, meta: bool) -> Prepare:
    def prepare(case: Case) -> Work:
        from safetensors.torch import load_model

        model = case.on_meta() if meta else case.with_memory()

        def work() -> nn.Module:
            if meta:
                model.to_empty(device="cpu")
            load_model(model, case.safetensors)
            return model

        return work

    return prepare


def safetensors_copy(case: Case) -> Work:
    from safetensors import safe_open

    model = case.with_memory()

    def work() -> nn.Module:
        state = model.state_dict()
        with safe_open(case.safetensors, "pt") as file, torch.no_grad():
            for name in file.keys():  # noqa: SIM118
                state[name].copy_(file.get_tensor(name))
        return model

    return work


def accelerate_load(*, meta: bool) -> Way:
    def prepare(case: Case) -> Work:
        from accelerate import load_checkpoint_in_model

        model = case.on_meta() if meta else case.with_memory()

        def work() -> nn.Module:
            load_checkpoint_in_model(model, str(case.safetensors), device_map={"": "cpu"})
            return model

        return work

    return Way(prepare, package="accelerate")


def accelerate_dispatch(case: Case) -> Work:
    from accelerate import load_checkpoint_and_dispatch

    model = case.on_meta()

    def work() -> nn.Module:
        dispatched: nn.Module = load_checkpoint_and_dispatch(model, str(case.safetensors), device_map={"": "cpu"})
        return dispatched

    return work
