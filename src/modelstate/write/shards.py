"""Several files with an index, as Hugging Face's tools read them: `NAME.safetensors.index.json`.

The index is what counts: its rename puts the new checkpoint in place, all of it. So the names of shards say what is in
them, and no shard of another checkpoint is ever overwritten: `NAME-<digest>-00001-of-00003.safetensors`.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from modelstate.errors import OpenError
from modelstate.read.digests import OPEN_SEAL, SEAL, digest, sealed
from modelstate.read.manifest import KEY
from modelstate.read.sharded import INDEX_SUFFIX, WEIGHT_MAP, read_weight_map
from modelstate.write.safetensors import nbytes_of

SUFFIX = ".safetensors"
_OWN = r"-[0-9a-f]{12}-\d{5}-of-\d{5}\.safetensors"


def in_shards(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    """The tensors in their order, in groups of at most so many bytes, or of one tensor that is larger."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    total = 0
    for name, tensor in tensors.items():
        nbytes = nbytes_of(tensor)
        if shards[-1] and total + nbytes > shard_bytes:
            shards.append({})
            total = 0
        shards[-1][name] = tensor
        total += nbytes
    return shards


def shard_name(path: str, digests: Mapping[str, str], number: int, count: int) -> str:
    """The name of a shard, beside the path, by what all shards together hold. Numbers are from 1."""
    stem = os.path.basename(path).removesuffix(SUFFIX)
    together = digest(json.dumps(dict(digests), sort_keys=True).encode())
    return f"{stem}-{together[:12]}-{number:05d}-of-{count:05d}{SUFFIX}"


def index_of(files: Mapping[str, Iterable[str]], total_bytes: int, manifest: str) -> bytes:
    """The text of an index: which file has which tensors, and what is said of them."""
    said = {SEAL: OPEN_SEAL, "total_size": str(total_bytes), KEY: manifest}
    weight_map = {name: file for file, names in files.items() for name in names}
    return sealed(json.dumps({"metadata": said, WEIGHT_MAP: weight_map}, ensure_ascii=False, indent=1).encode() + b"\n")


def files_of(path: str) -> list[str]:
    """The paths of the index at a path, if there is one, and of its shards: what a checkpoint is made of there."""
    index = path + INDEX_SUFFIX
    try:
        names = sorted(set(read_weight_map(index).values()))
    except (OpenError, OSError, ValueError):
        return [index] if os.path.lexists(index) else []
    directory = os.path.dirname(path)
    return [index, *(os.path.join(directory, name) for name in names if os.path.basename(name) == name)]


def orphans_of(path: str, named: Sequence[str]) -> Iterator[str]:
    """Paths of shards that belong to the path by their names, and that no index names: a killed save leaves them."""
    directory, name = os.path.split(path)
    ours = re.compile(re.escape(name.removesuffix(SUFFIX)) + _OWN)
    for found in os.listdir(directory or "."):
        if ours.fullmatch(found) and os.path.join(directory, found) not in named:
            yield os.path.join(directory, found)
