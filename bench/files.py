"""The checkpoints: written before anything is measured, in the formats that the contenders read."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bench.models import KINDS, Sizes, minilm_folder, on_meta, values, write_config
from modelstate.io.system import resident


class StaysCached(Exception):
    """The file system keeps the file in memory."""


def write(case: str, sizes: Sizes, folder: Path, formats: Iterable[str]) -> None:
    """The checkpoint of a model with random values: `<case>/` is safetensors, `<case>.<format>` any other."""
    if case == "minilm":
        shutil.copytree(minilm_folder(), folder / case, dirs_exist_ok=True)
        state = load_file(folder / case / "model.safetensors")
    else:
        state = values(case, sizes)
    for name in formats:
        if name != "safetensors":
            WRITERS[name](state, folder / f"{case}.{name}", on_meta(case, sizes))
        elif case != "minilm":
            _safetensors(state, folder / case, KINDS[case].shards)
            write_config(on_meta(case, sizes), folder / case)


def _safetensors(state: Mapping[str, Tensor], folder: Path, shards: int) -> None:
    """Of tied weights the first name only, as `safetensors.torch.save_model` writes them."""
    folder.mkdir(exist_ok=True)
    first_names = {id(value): name for name, value in reversed(list(state.items()))}
    state = {name: value for name, value in state.items() if first_names[id(value)] == name}
    if shards == 1:
        save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})
        return
    total, before = sum(value.nbytes for value in state.values()), 0
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for name, value in state.items():
        parts[before * shards // total][name] = value
        before += value.nbytes
    weight_map: dict[str, str] = {}
    for at, part in enumerate(parts, 1):
        file = f"model-{at:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _filled(module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    module.load_state_dict(state, assign=True)
    return module


def _torch(state: Mapping[str, Tensor], path: Path, module: nn.Module) -> None:
    torch.save(dict(state), path)


def _dcp(state: Mapping[str, Tensor], path: Path, module: nn.Module) -> None:
    from torch.distributed import checkpoint

    checkpoint.save(dict(state), checkpoint_id=str(path), no_dist=True)


def _tensorizer(state: Mapping[str, Tensor], path: Path, module: nn.Module) -> None:
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(path))
    serializer.write_module(_filled(module, state))
    serializer.close()


def _torchsnapshot(state: Mapping[str, Tensor], path: Path, module: nn.Module) -> None:
    from torchsnapshot import Snapshot

    Snapshot.take(str(path), {"model": _filled(module, state)})


WRITERS = {"pt": _torch, "dcp": _dcp, "tensorizer": _tensorizer, "torchsnapshot": _torchsnapshot}


def of_case(case: str, folder: Path) -> list[Path]:
    """The files of its checkpoint, in every format that is there."""
    tops = [folder / case, *folder.glob(f"{case}.*")]
    return [path for top in tops for path in ([top] if top.is_file() else top.rglob("*")) if path.is_file()]


def warm(paths: Iterable[Path]) -> None:
    """Bring files into the page cache."""
    buffer = bytearray(1 << 24)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def chill(paths: Iterable[Path]) -> None:
    """Take files out of the page cache. Raises `StaysCached` where that does not work."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            pages = resident(descriptor, 0, path.stat().st_size)
        finally:
            os.close(descriptor)
        if pages is None or pages.count(1) > len(pages) / 100:
            raise StaysCached("the kernel does not take files out of the page cache here, or does not report it")


def write_sparse(nbytes: int, folder: Path) -> None:
    """Checkpoints of 100 tensors with `nbytes` in all, written as holes: `sparse-<nbytes>.pt` and `.safetensors`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    rows = nbytes // 100 // 4 // 1000
    with FakeTensorMode():
        state = {f"layers.{i}.weight": torch.empty(rows, 1000) for i in range(100)}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, folder / f"sparse-{nbytes}.pt")

    each = rows * 4000
    header = {
        name: {"dtype": "F32", "shape": [rows, 1000], "data_offsets": [i * each, (i + 1) * each]}
        for i, name in enumerate(state)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / f"sparse-{nbytes}.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 100 * each)
