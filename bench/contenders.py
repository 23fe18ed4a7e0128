"""The contenders: the ways to load a checkpoint, and the tables of them by what is asked for.

The first of each table is what the others are compared with. What a way imports and builds before it returns its work
is not measured.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import modelstate as ms
from bench.models import KINDS, Sizes, on_meta, transformers, with_memory


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint and the model that it is for."""

    name: str
    sizes: Sizes
    folder: Path
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    """Of the model that has memory: they refer to its parameters, as they do in a training run."""
    device: str = "cpu"
    """Where the module with its weights is."""

    @property
    def torch_file(self) -> Path:
        return self.other("pt")

    @property
    def directory(self) -> Path:
        """Of the safetensors files."""
        return self.folder / self.name

    @property
    def shards(self) -> list[Path]:
        return sorted(self.directory.glob("*.safetensors"))

    @property
    def safetensors(self) -> Path:
        """The file, or the directory where there are several."""
        shards = self.shards
        return shards[0] if len(shards) == 1 else self.directory

    @property
    def strict(self) -> bool:
        """Whether torch's own can be: the published checkpoint has a buffer that the model does not save any more."""
        return self.name != "minilm"

    def other(self, suffix: str) -> Path:
        return self.folder / f"{self.name}.{suffix}"

    def on_meta(self) -> nn.Module:
        return on_meta(self.name, self.sizes)

    def from_config(self) -> nn.Module:
        """The model on meta, built of the config beside the checkpoint, as `from_pretrained` builds it."""
        cls, config = hub_class(self), transformers().AutoConfig.from_pretrained(self.directory)
        with ms.skeleton():
            model: nn.Module = cls.from_config(config) if hasattr(cls, "from_config") else cls(config)
            return model.eval()

    def with_memory(self, dtype: torch.dtype | None = None) -> nn.Module:
        """A model with its optimizer, in the dtype of the file or in another one."""
        model = with_memory(self.name, self.sizes)
        model = (model if dtype is None else model.to(dtype)).to(self.device)
        self.optimizers.append(torch.optim.AdamW(value for value in model.parameters() if value.requires_grad))
        return model

    def references_kept(self, model: nn.Module) -> bool:
        """Whether the optimizers' parameters are those of the model."""
        have = {id(parameter) for parameter in model.parameters()}
        return all(id(p) in have for one in self.optimizers for group in one.param_groups for p in group["params"])


def hub_class(case: Case) -> Any:
    """The class of transformers whose `from_pretrained` loads the checkpoint."""
    found = transformers()
    return found.AutoModel if case.name == "minilm" else found.LlamaForCausalLM


Work = Callable[[], nn.Module]
Prepare = Callable[[Case], Work]
"""What is imported and built before the work is returned is not measured."""


@dataclass(frozen=True, slots=True)
class Way:
    """One contender."""

    prepare: Prepare
    files: str = "safetensors"
    """The format that it reads, as `bench.files` writes it."""
    package: str = ""
    """What has to be installed for it, by the name that is imported."""
    environment: tuple[tuple[str, str], ...] = ()
    """What has to be set before the process starts."""
    device: str = "cpu"


def pt(prepare: Prepare) -> Way:
    return Way(prepare, files="pt")


def ours(*, meta: bool = True, torch_file: bool = False, model: torch.dtype | None = None, **options: Any) -> Way:
    def prepare(case: Case) -> Work:
        module = case.on_meta() if meta else case.with_memory(model)
        path = case.torch_file if torch_file else case.safetensors
        more: dict[str, Any] = {"device": case.device} if meta and case.device != "cpu" else {}

        def work() -> nn.Module:
            ms.load(module, path, **options, **more)
            return module

        return work

    return Way(prepare, files="pt" if torch_file else "safetensors")


def ours_with_construction(**options: Any) -> Way:
    """The model is built while the clock runs, as `from_pretrained` does it."""

    def prepare(case: Case) -> Work:
        hub_class(case)  # imports the package

        def work() -> nn.Module:
            model = case.from_config()
            ms.load(model, case.safetensors, **options)
            return model

        return work

    return Way(prepare, package="transformers")


def usual(case: Case) -> Work:
    def work() -> nn.Module:
        model = KINDS[case.name].build(case.sizes).eval().to(KINDS[case.name].dtype)
        model.load_state_dict(torch.load(case.torch_file, weights_only=True))
        return model

    return work


def torch_load(*, meta: bool, mmap: bool, dtype: torch.dtype | None = None) -> Way:
    """`load_state_dict`: onto meta with `assign=True`, into memory as a copy."""

    def prepare(case: Case) -> Work:
        model = case.on_meta() if meta else case.with_memory(dtype)

        def work() -> nn.Module:
            where = case.device if meta else None  # into memory, `load_state_dict` copies from the mapped file
            state = torch.load(case.torch_file, weights_only=True, mmap=mmap, map_location=where)
            model.load_state_dict(state, strict=case.strict, assign=meta)
            return model

        return work

    return pt(prepare)


def safetensors_assign(case: Case) -> Work:
    from safetensors.torch import load_file

    model = case.on_meta()

    def work() -> nn.Module:
        state = {name: value for file in case.shards for name, value in load_file(file, case.device).items()}
        model.load_state_dict(state, strict=case.strict, assign=True)
        return model

    return work


def safetensors_load_model(*, meta: bool, dtype: torch.dtype | None = None) -> Prepare:
    def prepare(case: Case) -> Work:
        from safetensors.torch import load_model

        model = case.on_meta() if meta else case.with_memory(dtype)

        def work() -> nn.Module:
            if meta:
                model.to_empty(device=case.device)
            load_model(model, case.safetensors, device=case.device)
            return model

        return work

    return prepare


def safetensors_copy(*, dtype: torch.dtype | None = None) -> Prepare:
    def prepare(case: Case) -> Work:
        from safetensors import safe_open

        model = case.with_memory(dtype)

        def work() -> nn.Module:
            state = model.state_dict()
            with safe_open(case.safetensors, "pt", case.device) as file, torch.no_grad():
                for name in file.keys():  # noqa: SIM118
                    state[name].copy_(file.get_tensor(name))
            return model

        return work

    return prepare


def accelerate_load(*, meta: bool) -> Way:
    def prepare(case: Case) -> Work:
        from accelerate import load_checkpoint_in_model

        model = case.on_meta() if meta else case.with_memory()

        def work() -> nn.Module:
            load_checkpoint_in_model(model, str(case.safetensors), device_map={"": case.device})
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
            loader = SafeTensorsFileLoader(SingleGroup(), device=case.device, nogds=True)
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


def way_of(package: str, prepare: Prepare, files: str = "safetensors") -> Way:
    return Way(prepare, files, package)


BF16 = torch.bfloat16


def cast_torch_load(*, mmap: bool) -> Way:
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


def cast_load_model(case: Case) -> Work:
    from safetensors.torch import load_model as load

    model = case.on_meta().to(BF16)

    def work() -> nn.Module:
        load(model.to_empty(device="cpu"), case.safetensors)
        return model

    return work


def cast_one_by_one(case: Case) -> Work:
    from safetensors import safe_open

    model = case.on_meta()

    def work() -> nn.Module:
        with safe_open(case.safetensors, "pt") as file:
            state = {name: file.get_tensor(name).to(BF16) for name in file.keys()}  # noqa: SIM118
        model.load_state_dict(state, assign=True)
        return model

    return work


def cast_accelerate(case: Case) -> Work:
    from accelerate import load_checkpoint_in_model

    model = case.on_meta()

    def work() -> nn.Module:
        load_checkpoint_in_model(model, str(case.safetensors), device_map={"": "cpu"}, dtype=BF16)
        return model

    return work


def int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(set_inductor_config=False)


def int4() -> Any:
    """In groups of 32."""
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(32))  # type: ignore[attr-defined]


Config = Callable[[], Any]


def ours_quantized(config: Config, *, builds: bool = False) -> Way:
    """With `builds`, the model is built while the clock runs, and its head left alone, as transformers does it."""

    def prepare(case: Case) -> Work:
        model = None if builds else case.on_meta()
        quantize = ms.loading.Quantize(config())
        transform: Any = {"lm_head": None, "*": quantize} if builds else quantize

        def work() -> nn.Module:
            target = case.from_config() if model is None else model
            ms.load(target, case.safetensors, transform=transform)
            return target

        return work

    return Way(prepare, package="torchao")


def quantize_after(config: Config, source: str) -> Way:
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


def from_pretrained(*, config: Config | None = None, **options: Any) -> Way:
    def prepare(case: Case) -> Work:
        cls = hub_class(case)
        if config is not None:
            options["quantization_config"] = transformers().TorchAoConfig(config())

        def work() -> nn.Module:
            model: nn.Module = cls.from_pretrained(case.directory, **options)
            return model.eval()

        return work

    return Way(prepare, package="transformers")


META = {
    "modelstate.load": ours(),
    "modelstate.load, torch file": ours(torch_file=True),
    "modelstate.load, map=False": ours(map=False),
    "Model() + torch.load + load_state_dict": pt(usual),
    "torch.load + assign": torch_load(meta=True, mmap=False),
    "torch.load(mmap) + assign": torch_load(meta=True, mmap=True),
    "safetensors load_file + assign": Way(safetensors_assign),
    "to_empty + safetensors load_model": Way(safetensors_load_model(meta=True)),
    "accelerate load_checkpoint_in_model": accelerate_load(meta=True),
    "accelerate load_checkpoint_and_dispatch": way_of("accelerate", accelerate_dispatch),
    "DCP": dcp(meta=True),
    "DCP, Hugging Face storage": dcp(meta=True, hugging_face=True),
    "fastsafetensors": fastsafetensors(meta=True, direct=True),
    "fastsafetensors, without O_DIRECT": fastsafetensors(meta=True, direct=False),
    "runai-model-streamer": way_of("runai_model_streamer", runai),
    "tensorizer": way_of("tensorizer", tensorizer, "tensorizer"),
}
"""Into a module whose parameters are on meta."""

MATERIALISED = {
    "modelstate.load, in_place=True": ours(meta=False, in_place=True),
    "modelstate.load, in_place=True, torch file": ours(meta=False, in_place=True, torch_file=True),
    "modelstate.load": ours(meta=False),
    "torch.load + load_state_dict": torch_load(meta=False, mmap=False),
    "torch.load(mmap) + load_state_dict": torch_load(meta=False, mmap=True),
    "safetensors load_model": Way(safetensors_load_model(meta=False)),
    "safetensors safe_open + copy_": Way(safetensors_copy()),
    "accelerate load_checkpoint_in_model": accelerate_load(meta=False),
    "DCP": dcp(meta=False),
    "DCP, Hugging Face storage": dcp(meta=False, hugging_face=True),
    "fastsafetensors, without O_DIRECT": fastsafetensors(meta=False, direct=False),
    "torchsnapshot": way_of("torchsnapshot", torchsnapshot, "torchsnapshot"),
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
    "modelstate.load, torch file": ours(meta=False, torch_file=True),
    "modelstate.load, in_place=False": ours(meta=False, in_place=False),
}
"""Into a module that has memory, as people load first."""

CAST = {
    "modelstate.load, dtype=bfloat16": ours(dtype=torch.bfloat16),
    "modelstate.load, dtype=bfloat16, torch file": ours(dtype=torch.bfloat16, torch_file=True),
    "torch.load + load_state_dict": cast_torch_load(mmap=False),
    "torch.load(mmap) + load_state_dict": cast_torch_load(mmap=True),
    "torch.load(mmap) + assign + to": pt(assign_then_to),
    "safetensors load_model": Way(cast_load_model),
    "safetensors safe_open + to + assign": Way(cast_one_by_one),
    "accelerate load_checkpoint_in_model": way_of("accelerate", cast_accelerate),
    "DCP": dcp(meta=True, dtype=torch.bfloat16),
    "DCP, Hugging Face storage": dcp(meta=True, hugging_face=True, dtype=torch.bfloat16),
}
"""From a file in float32 to a module in bfloat16."""

CAST_INTO_MEMORY = {
    "modelstate.load, dtype=bfloat16": ours(meta=False, model=BF16, dtype=BF16),
    "modelstate.load, dtype=bfloat16, torch file": ours(meta=False, model=BF16, dtype=BF16, torch_file=True),
    "torch.load(mmap) + load_state_dict": torch_load(meta=False, mmap=True, dtype=BF16),
    "safetensors load_model": Way(safetensors_load_model(meta=False, dtype=BF16)),
    "safetensors safe_open + copy_": Way(safetensors_copy(dtype=BF16)),
}
"""From a file in float32 into a module in bfloat16 that has memory, and whose parameters an optimizer holds."""


def _quantized(config: Config) -> dict[str, Way]:
    return {
        "modelstate.load, transform=Quantize": ours_quantized(config),
        "torch.load(mmap) + assign + quantize_": quantize_after(config, "mmap"),
        "safetensors load_file + assign + quantize_": quantize_after(config, "safetensors"),
        "torch.load + load_state_dict + quantize_": quantize_after(config, "torch"),
    }


HUB = {
    "modelstate.load, with construction": ours_with_construction(),
    "transformers from_pretrained": from_pretrained(dtype=torch.float32),
}
"""With the construction of the model, which `from_pretrained` does itself."""

HUB_CAST = {
    "modelstate.load, with construction": ours_with_construction(dtype=torch.bfloat16),
    "transformers from_pretrained": from_pretrained(dtype=torch.bfloat16),
}

HUB_INT8 = {
    "modelstate.load, with construction": ours_quantized(int8, builds=True),
    "transformers from_pretrained": from_pretrained(config=int8, dtype=torch.float32),
}


def _on_gpu(ways: dict[str, Way], names: Collection[str]) -> dict[str, Way]:
    return {name: replace(way, device="cuda:0") for name, way in ways.items() if name in names}


TABLES = {
    "gpu-memory": _on_gpu(
        DEFAULT | MATERIALISED,
        (
            "modelstate.load",
            "modelstate.load, in_place=False",
            "torch.load(mmap) + load_state_dict",
            "safetensors load_model",
            "safetensors safe_open + copy_",
            "accelerate load_checkpoint_in_model",
            "fastsafetensors, without O_DIRECT",
        ),
    ),
    "gpu-cast-memory": _on_gpu(CAST_INTO_MEMORY, CAST_INTO_MEMORY),
    "gpu-meta": _on_gpu(
        META,
        (
            "modelstate.load",
            "torch.load(mmap) + assign",
            "safetensors load_file + assign",
            "accelerate load_checkpoint_in_model",
            "fastsafetensors, without O_DIRECT",
        ),
    ),
    "meta": META,
    "materialised": MATERIALISED,
    "default": DEFAULT,
    "cast": CAST,
    "cast-memory": CAST_INTO_MEMORY,
    "int8": _quantized(int8),
    "int4": _quantized(int4),
    "hub": HUB,
    "hub-cast": HUB_CAST,
    "hub-int8": HUB_INT8,
}


def to_bfloat16(*, swap: bool = False, keeping: bool = False) -> Callable[[nn.Module], object]:
    def work(model: nn.Module) -> object:
        torch.__future__.set_swap_module_params_on_conversion(swap)
        with ms.reference_keeping(keeping):
            return model.to(torch.bfloat16)

    return work


def converted(model: nn.Module) -> object:
    return ms.convert(model, torch.bfloat16)


CONVERT: dict[str, Callable[[nn.Module], object]] = {
    "module.to": to_bfloat16(),
    "module.to, swap_tensors switched on": to_bfloat16(swap=True),
    "modelstate.convert": converted,
    "module.to, modelstate.reference_keeping": to_bfloat16(keeping=True),
}
"""From float32 to bfloat16. The first is what the others are compared with."""
