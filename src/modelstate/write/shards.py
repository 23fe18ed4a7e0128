"""Several files with an index, as Hugging Face's tools read them: `NAME.safetensors.index.json`.

The index is what counts: its rename puts the new checkpoint in place, all of it. So the names of shards say what is in
them, and no shard of another checkpoint is ever overwritten: `NAME-<digest>-00001-of-00003.safetensors`.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from modelstate.errors import ModelStateError
from modelstate.read.digests import OPEN_SEAL, SEAL, digest, sealed
from modelstate.read.manifest import KEY
from modelstate.read.sharded import INDEX_SUFFIX, WEIGHT_MAP, read_weight_map
from modelstate.write.later import Later
from modelstate.write.safetensors import nbytes_of

Kind = TypeVar("Kind", torch.Tensor, Later, torch.Tensor | Later)

SUFFIX = ".safetensors"
_OWN = r"-[0-9a-f]{12}-\d{5,}-of-\d{5,}\.safetensors"
_ANY = re.compile(r".*-\d{5,}-of-\d{5,}\.\w+", re.DOTALL)
"""What others call their shards, too. An index that names anything else as one has it left alone."""


def in_shards(tensors: Mapping[str, Kind], shard_bytes: int) -> list[dict[str, Kind]]:
    """The tensors in their order, in groups of at most so many bytes, or of one tensor that is larger."""
    shards: list[dict[str, Kind]] = [{}]
    total = 0
    for name, tensor in tensors.items():
        nbytes = nbytes_of(tensor)
        if shards[-1] and total + nbytes > shard_bytes:
            shards.append({})
            total = 0
        shards[-1][name] = tensor
        total += nbytes
    return shards


def shard_names(path: str, shards: Sequence[str]) -> list[str]:
    """The names of shards, beside the path, by what all of them together hold: digests of each file's content.

    Two that differ in anything have other names, so that those of the old checkpoint are not touched.
    """
    stem = os.path.basename(path).removesuffix(SUFFIX)
    together, count = digest(json.dumps(shards).encode())[:12], len(shards)
    return [f"{stem}-{together}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def index_of(files: Mapping[str, Iterable[str]], total_bytes: int, manifest: str) -> bytes:
    """The text of an index: which file has which tensors, and what is said of them."""
    said = {SEAL: OPEN_SEAL, "total_size": str(total_bytes), KEY: manifest}
    weight_map = {name: file for file, names in files.items() for name in names}
    return sealed(json.dumps({"metadata": said, WEIGHT_MAP: weight_map}, ensure_ascii=False, indent=1).encode() + b"\n")


def old_files(path: str, but: Collection[str] = ()) -> list[str]:
    """The index at a path, its shards, and shards that a killed save to the path has left; none of `but`.

    What another index in the directory names is not among them. Where one of those cannot be read, no shard is.
    """
    directory, name = os.path.split(path)
    index = name + INDEX_SUFFIX
    entries = sorted(os.listdir(directory or "."))
    named = (_named_in(os.path.join(directory, index)) if index in entries else None) or frozenset()
    mine = re.compile(re.escape(name.removesuffix(SUFFIX)) + _OWN)
    shards = {one for one in entries if mine.fullmatch(one) or (one in named and _ANY.fullmatch(one))}
    for other in entries if shards else ():
        if other.endswith(INDEX_SUFFIX) and other != index:
            elsewhere = _named_in(os.path.join(directory, other))
            shards = set() if elsewhere is None else shards - elsewhere
    found = [os.path.join(directory, one) for one in (index, *sorted(shards)) if one in entries]
    return [one for one in found if one not in but]


def _named_in(index: str) -> frozenset[str] | None:
    """The files that an index names; None where it cannot be read."""
    try:
        return frozenset(read_weight_map(index).values())
    except (ModelStateError, OSError):
        return None
