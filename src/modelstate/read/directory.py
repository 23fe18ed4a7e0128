"""Which file of a directory is the checkpoint.

Every file is looked at, by its content where its name does not say it all. The shards of an index stand behind the
index. Files that differ only in how they are written are one checkpoint: `model.safetensors` and `pytorch_model.bin`,
`x.safetensors` and `x.pt`; the safetensors file is taken, or its index, since it can be read without a pickle. Of
several checkpoints the one named `model` is taken, as in the repositories and training folders of Hugging Face, where
optimizers lie beside it. Otherwise, where torch.distributed.checkpoint has written its `.metadata`, that is taken:
what lies beside it belongs to it. Otherwise there must be one only. Subdirectories are not searched.
"""

import os
import re
import stat
from typing import NamedTuple

from modelstate.errors import (
    AmbiguousDirectoryError,
    ChecksumError,
    NoCheckpointError,
    NotACheckpointError,
    OpenError,
    ShardIndexError,
)
from modelstate.read import dcp, safetensors, sharded, torch_legacy, torch_zip
from modelstate.read.diagnose import HEAD_BYTES, other_zip
from modelstate.read.source_file import SourceFile

MODEL = "model"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.\w+$")
_SUFFIX = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|tar)$")
_FOREIGN = re.compile(r"\.(msgpack|h5|hdf5|keras|gguf|onnx|tflite|npz|index)$")
"""Weights in formats that are not read."""
_INDEX = re.compile(r"\.(safetensors|bin)\.index\.json$")
_OTHER_TOOLS = (
    (
        re.compile(r"__\d+\.metadata"),
        "torch.distributed.checkpoint, each rank's by itself",
        "load it with torch.distributed.checkpoint on as many ranks, and save it with use_collectives=True",
    ),
    (
        re.compile(r".*\.distcp"),
        "torch.distributed.checkpoint, without its .metadata",
        "it is written last: take a checkpoint whose save was finished, or copy this one again",
    ),
    (re.compile(r"\.snapshot_metadata"), "torchsnapshot", "load it with torchsnapshot, then torch.save"),
    (re.compile(r"saved_model\.pb"), "TensorFlow (SavedModel)", "load it with TensorFlow, save with safetensors"),
    (re.compile(r"_CHECKPOINT_METADATA|manifest\.ocdbt"), "Orbax", "load it with Orbax, save with safetensors"),
)


class _Candidate(NamedTuple):
    name: str
    is_safetensors: bool = False
    shards: frozenset[str] = frozenset()

    @property
    def stem(self) -> str:
        """What the file is called, however it is written."""
        stem = self.name.removesuffix(".index.json")
        return _SUFFIX.sub("", stem).replace("pytorch_model", "model")


def find_in(directory: str) -> str:
    """The path of the checkpoint in a directory.

    Raises `NotACheckpointError` for a directory of another tool's format, `ShardIndexError` where there are shards
    without their index, `NoCheckpointError`, `AmbiguousDirectoryError`, and `PermissionError`.
    """
    entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    files = [entry.name for entry in entries if _is_file(entry)]
    candidates = [found for name in files if (found := _candidate(directory, name))]
    if not any(found.stem == MODEL for found in candidates):
        if dcp.METADATA in files and _is_dcp(directory, files):
            return os.path.join(directory, dcp.METADATA)
        _refuse_other_tools(directory, [entry.name for entry in entries])
    if not candidates:
        by_name = [name for name in files if _SUFFIX.search(name)] or [name for name in files if _FOREIGN.search(name)][
            :1
        ]
        if len(by_name) == 1:
            # Reading it says what is wrong with it.
            return os.path.join(directory, by_name[0])
        raise _nothing(directory, entries)
    indexed = frozenset[str]().union(*(found.shards for found in candidates))
    candidates = [found for found in candidates if found.shards or found.name not in indexed]
    if candidates and all(_SHARD.search(found.name) for found in candidates):
        raise ShardIndexError(
            "the directory holds shards, and not the index that says what is in them",
            where=directory,
            expected="a file *.index.json",
            found=", ".join(found.name for found in candidates[:4]),
            remedy="download or copy the index too; shards of torch.distributed.checkpoint need consolidating first",
        )
    candidates = [found for found in candidates if found.stem == MODEL] or candidates
    names = {found.name for found in candidates}
    chosen = [found for found in candidates if found.is_safetensors] or candidates
    # A file goes before an index of the same name, as it does elsewhere: a save that was killed may leave both.
    chosen = [found for found in chosen if found.name.removesuffix(sharded.INDEX_SUFFIX) not in names - {found.name}]
    if len(chosen) > 1 or len({found.stem for found in candidates}) > 1:
        raise _several(directory, candidates)
    return os.path.join(directory, chosen[0].name)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return stat.S_ISREG(entry.stat().st_mode)
    except OSError:
        # A link whose target is missing is what an interrupted download leaves.
        return entry.is_symlink()


def _candidate(directory: str, name: str) -> _Candidate | None:
    """What the file is a candidate as. By name alone where the name leaves no doubt: if such a file is damaged, or a
    pointer to what was never downloaded, another must not be taken in its place."""
    path = os.path.join(directory, name)
    if name.startswith("."):
        return None
    if name.endswith(".safetensors"):
        return _Candidate(name, is_safetensors=True)
    if name == "pytorch_model.bin":
        return _Candidate(name)
    try:
        with SourceFile(path) as file:
            head = file.read(0, min(file.nbytes, HEAD_BYTES), "its beginning")
    except OpenError:
        return None
    if sharded.matches(head, path) or _INDEX.search(name):
        shards = _shards(path)
        in_safetensors = any(shard.endswith(".safetensors") for shard in (*shards, name.removesuffix(".index.json")))
        return _Candidate(name, in_safetensors, shards) if shards or _INDEX.search(name) else None
    if torch_zip.matches(head):
        return None if other_zip(path, head) or torch_zip.is_foreign(path) else _Candidate(name)
    if torch_legacy.matches(head):
        return _Candidate(name)
    return _Candidate(name, is_safetensors=True) if safetensors.matches(head) else None


def _is_dcp(directory: str, files: list[str]) -> bool:
    """Whether the `.metadata` in the directory is of torch.distributed.checkpoint."""
    if any(name.endswith(".distcp") for name in files):
        return True
    try:
        with SourceFile(os.path.join(directory, dcp.METADATA)) as file:
            # The name alone would do for a file that is given, but other tools have files of this name.
            return dcp.matches(file.read(0, min(file.nbytes, HEAD_BYTES), "its beginning"), "")
    except OpenError:
        return False


def _shards(index_path: str) -> frozenset[str]:
    """The shards of an index; none where it is damaged, which opening it will say."""
    try:
        return frozenset(sharded.read_weight_map(index_path).values())
    except (OpenError, ChecksumError):
        return frozenset()


def _refuse_other_tools(directory: str, names: list[str]) -> None:
    for mark, tool, remedy in _OTHER_TOOLS:
        if any(map(mark.fullmatch, names)):
            raise NotACheckpointError(
                f"this is a checkpoint of {tool}, which is not read here",
                where=directory,
                found=", ".join(names[:6]),
                remedy=remedy,
            )


def _nothing(directory: str, entries: list[os.DirEntry[str]]) -> NoCheckpointError:
    below = [entry.name for entry in entries if os.path.isdir(entry.path)]
    there = [entry.name + ("/" if entry.name in below else "") for entry in entries]
    more = f", and {len(there) - 12} more" if len(there) > 12 else ""
    if "store.json" in there:
        remedy = "it is a store: modelstate.Store(path) has open, restore and verify; so has `modelstate store`"
    elif below:
        remedy = f"subdirectories are not searched: give one of {', '.join(below[:6])}"
    else:
        remedy = "finish the download or the copy, or give the path of the file to see what it is"
    return NoCheckpointError(
        "no file of this directory is a checkpoint",
        where=directory,
        expected="model.safetensors, pytorch_model.bin, an index of shards, .metadata of torch.distributed.checkpoint, "
        "or one file of torch.save or safetensors",
        found=(", ".join(there[:12]) + more) or "an empty directory",
        remedy=remedy,
    )


def _several(directory: str, candidates: list[_Candidate]) -> AmbiguousDirectoryError:
    names = [found.name for found in candidates]
    more = f", and {len(names) - 12} more" if len(names) > 12 else ""
    return AmbiguousDirectoryError(
        f"several checkpoints are in this directory, {len(names)} of them",
        where=directory,
        expected="one, or one named model",
        found=", ".join(names[:12]) + more,
        remedy=f"give the path of the one that is meant, such as {os.path.join(directory, names[0])}",
    )
