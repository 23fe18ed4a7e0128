"""Loads of every kind, small, for tests that let each of them fail in every way."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from tests.formats import dcp_files
from tests.formats.files import evict

Open = Callable[[], ms.Checkpoint]


class Net(nn.Module):
    """Ties, a buffer, a non-persistent one, and a weight that lies transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor([3.0, 4.0]))
        self.register_buffer("hidden", torch.arange(3.0), persistent=False)


def state(seed: int = 1) -> dict[str, torch.Tensor]:
    """The tied tensor twice, as equal bytes in two places."""
    torch.manual_seed(seed)
    found = {name: torch.randn_like(tensor) for name, tensor in Net().state_dict().items()}
    return {**found, "head.weight": found["embed.weight"].clone(), "hidden": torch.arange(3.0)}


FORMS = ("safetensors", "torch", "legacy", "mapping")


def stored(state: dict[str, Any], folder: Path, form: str) -> Any:
    """Stores a state dict in one of `FORMS`; returns what `ms.load` takes."""
    path = folder / f"{len(list(folder.iterdir()))}.{form}"  # a new file: one that is mapped would have to be read
    if form == "mapping":
        return state
    if form == "safetensors":
        save_file({name: value.clone().contiguous() for name, value in state.items()}, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "torch")
    return path


def built(build: Callable[[], nn.Module], how: str) -> Any:
    """Builds a module with values ("real"), in a skeleton, or on meta."""
    if how == "real":
        return build()
    with ms.skeleton() if how == "skeleton" else torch.device("meta"):
        return build()


def safetensors(folder: Path) -> Open:
    save_file(state(), folder / "x.safetensors")
    return lambda: ms.open(folder / "x.safetensors")


def write_shards(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes a state dict as two shards with an index, half of the names each."""
    names, weight_map = list(state), {}
    for shard, some in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: state[name] for name in some}, folder / shard)
        weight_map |= dict.fromkeys(some, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def sharded(folder: Path) -> Open:
    write_shards(state(), folder)
    return lambda: ms.open(folder)


def strided() -> dict[str, torch.Tensor]:
    """Tensors that lie in the file transposed, and in every second column."""
    found = state()
    found["mlp.0.weight"] = found["mlp.0.weight"].t().contiguous().t()
    found["mlp.1.weight"] = found["mlp.1.weight"].repeat_interleave(2, 1)[:, ::2]
    return found


def torch_zip(folder: Path) -> Open:
    torch.save({"model": strided(), "step": 3}, folder / "x.pt")
    return lambda: ms.open(folder / "x.pt")


def torch_legacy(folder: Path) -> Open:
    torch.save(strided(), folder / "x.pt", _use_new_zipfile_serialization=False)
    return lambda: ms.open(folder / "x.pt")


def dcp(folder: Path) -> Open:
    dcp_files.write(folder / "dcp", {name: dcp_files.halves(tensor) for name, tensor in state().items()})
    return lambda: ms.open(folder / "dcp")


def averaged(folder: Path) -> Open:
    paths = [folder / f"{seed}.safetensors" for seed in (1, 2)]
    for seed, path in enumerate(paths, 1):
        save_file(state(seed), path)
    return lambda: ms.open(paths, combine=ms.merge.Average())


def combined(folder: Path) -> Open:
    paths = [folder / f"{seed}.safetensors" for seed in (1, 2)]
    for seed, path in enumerate(paths, 1):
        save_file(state(seed), path)
    return lambda: ms.open(paths, combine=lambda name, tensors: (tensors[0] + tensors[-1]) / 2)


def fused(folder: Path) -> Open:
    """What rules have to compute: pieces to be put together, and ones that lie the other way round."""
    found = state()
    weight = found.pop("mlp.0.weight")
    found |= {"mlp.0.weight.top": weight[:4].clone(), "mlp.0.weight.bottom": weight[4:].clone()}
    found["mlp.1.weight"] = found["mlp.1.weight"].t().contiguous()
    save_file(found, folder / "x.safetensors")
    return lambda: ms.open(folder / "x.safetensors")


def large(folder: Path) -> Open:
    """Enough for several threads."""
    torch.manual_seed(1)
    save_file({"weight": torch.randn(1024, 4200), "bias": torch.randn(1024)}, folder / "x.safetensors")
    return lambda: ms.open(folder / "x.safetensors")


def layers(folder: Path) -> Open:
    """Weights that are large enough to be read while another one is transformed, and small biases between them."""
    torch.manual_seed(1)
    state = {name: torch.randn_like(tensor) for name, tensor in three_layers().state_dict().items()}
    save_file(state, folder / "x.safetensors")
    return lambda: ms.open(folder / "x.safetensors")


RULES: Any = (
    ms.rules.Concat(("mlp.0.weight.top", "mlp.0.weight.bottom"), "mlp.0.weight"),
    ms.rules.Transpose("mlp.1.weight"),
    ms.rules.Apply("count", lambda tensor: tensor * 2),
)


def twice(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def in_memory() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def on_meta() -> nn.Module:
    with ms.skeleton():
        return Net()


def three_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(96, 192) for _ in range(3)))


def linear() -> nn.Module:
    module = nn.utils.skip_init(nn.Linear, 4200, 1024)  # 4 million random numbers take longer than a load
    for param in module.parameters():
        nn.init.ones_(param)
    return module


def half() -> nn.Module:
    return linear().to(torch.bfloat16)


@dataclass(frozen=True)
class Kind:
    """A way to load."""

    write: Callable[[Path], Open] = safetensors
    """Writes the files; what it returns opens them."""
    build: Callable[[], nn.Module] = in_memory
    options: Mapping[str, Any] = field(default_factory=dict)
    cold: bool = False
    """Whether the file is taken out of the page cache before each load, which then reads ahead."""

    def load(self, model: nn.Module, source: Open) -> None:
        checkpoint = source()
        if self.cold:
            for path in filter(os.path.exists, checkpoint.files):
                evict(Path(path))
        ms.load(model, checkpoint, **self.options)


KINDS = {
    "mapped": Kind(build=on_meta),
    "memory of its own": Kind(build=on_meta, options={"map": False}),
    "staged": Kind(),
    "in place": Kind(options={"in_place": True}),
    "cast": Kind(options={"dtype": torch.bfloat16}),
    "cast on meta": Kind(build=on_meta, options={"dtype": torch.bfloat16}),
    "transform": Kind(options={"transform": twice}),
    "transform, layers": Kind(layers, three_layers, {"transform": twice}),
    "rules": Kind(fused, options={"rules": RULES}),
    "rules on meta": Kind(fused, on_meta, {"rules": RULES}),
    "rules in place": Kind(fused, options={"rules": RULES[:2], "in_place": True}),
    "sharded": Kind(sharded),
    "sharded, mapped": Kind(sharded, on_meta),
    "torch zip": Kind(torch_zip),
    "torch zip, mapped": Kind(torch_zip, on_meta),
    "torch zip, verified": Kind(torch_zip, options={"verify": True}),
    "torch legacy": Kind(torch_legacy),
    "dcp": Kind(dcp),
    "averaged": Kind(averaged),
    "combined": Kind(combined, on_meta),
    "threads": Kind(large, linear, {"in_place": False}),
    "leased": Kind(large, linear),
    "leased, cast": Kind(large, half, {"dtype": torch.bfloat16}),
    "threads, in place": Kind(large, linear, {"in_place": True}),
    "threads, cast": Kind(large, linear, {"dtype": torch.bfloat16}),
    "cold": Kind(large, linear, {"in_place": False}, cold=True),
    "cold, cast in place": Kind(large, half, {"in_place": True, "dtype": torch.bfloat16}, cold=True),
}
try:
    from torchao.quantization import Int8WeightOnlyConfig

    KINDS["quantized"] = Kind(
        build=on_meta, options={"transform": {"mlp.*": ms.loading.Quantize(Int8WeightOnlyConfig())}}
    )
except ImportError:
    pass
