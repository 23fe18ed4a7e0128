"""DCP, and the packages that are made to load fast. None of them knows of a meta target: they fill memory of their own.

What they fill is given to the model with `load_state_dict(assign=True)`, as their documentation does it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bench.ways.case import Case, Prepare, Way, Work


def dcp(*, meta: bool, hugging_face: bool = False, dtype: torch.dtype | None = None) -> Way:
    """Without a process group."""

    def prepare(case: Case) -> Work:
        from torch.distributed import checkpoint

        model = case.on_meta() if meta else case.with_memory()
        if dtype is not None:
            model = model.to(dtype)

        def work() -> nn.Module:
            state = model.state_dict()
            if meta:
                state = {name: torch.empty_like(value, device="cpu") for name, value in state.items()}
            if hugging_face:
                reader = checkpoint.HuggingFaceStorageReader(str(case.directory))
                checkpoint.load(state, storage_reader=reader, no_dist=True)
            else:
                checkpoint.load(state, checkpoint_id=str(case.other("dcp")), no_dist=True)
            if meta:
                model.load_state_dict(state, assign=True)
            return model

        return work

    return Way(prepare, files="safetensors" if hugging_face else "dcp")


def fastsafetensors(*, meta: bool, direct: bool) -> Way:
    def prepare(case: Case) -> Work:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        model: Any = case.on_meta() if meta else case.with_memory()

        def work() -> nn.Module:
            loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
            loader.add_filenames({0: [str(path) for path in case.shards]})
            buffers = loader.copy_files_to_device()
            state = {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}
            model.load_state_dict(state, assign=meta)
            if meta:
                model.held = loader, buffers  # the tensors do not keep their memory alive
            return model

        return work

    return Way(prepare, package="fastsafetensors", environment=(("FASTSAFETENSORS_ODIRECT", str(int(direct))),))


def runai(case: Case) -> Work:
    from runai_model_streamer import SafetensorsStreamer

    model = case.on_meta()

    def work() -> nn.Module:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in case.shards])
            state: dict[str, Tensor] = dict(streamer.get_tensors())
            model.load_state_dict(state, assign=True)
        return model

    return work


def tensorizer(case: Case) -> Work:
    from tensorizer import TensorDeserializer

    model = case.on_meta()

    def work() -> nn.Module:
        with TensorDeserializer(str(case.other("tensorizer")), device="cpu") as deserializer:
            deserializer.load_into_module(model)
        return model

    return work


def torchsnapshot(case: Case) -> Work:
    from torchsnapshot import Snapshot

    model = case.with_memory()

    def work() -> nn.Module:
        Snapshot(str(case.other("torchsnapshot"))).restore({"model": model})
        return model

    return work


def of(package: str, prepare: Prepare, files: str = "safetensors") -> Way:
    return Way(prepare, files, package)
