"""Chooses the checkpoint in a directory, whose subdirectories are not searched.

- Every file is a candidate by its content, where its name leaves a doubt. The shards of an index count as the index.
- Files that differ only in their format are one checkpoint: `model.safetensors` and `pytorch_model.bin`,
  `x.safetensors` and `x.pt`. The safetensors file or its index is taken, since it needs no pickle.
- Of several checkpoints the one named `model` is taken, since repositories and training folders of Hugging Face contain
  optimizers beside it.
- Otherwise the `.metadata` of torch.distributed.checkpoint is taken, if there is one: the other files belong to it.
- Otherwise there must be exactly one candidate.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from modelstate.errors import (
    AmbiguousCheckpointError,
    ChecksumError,
    DamagedFileError,
    OpenError,
    SourceAccessError,
    SourceNotFoundError,
    UnknownFormatError,
)
from modelstate.formats import sharded
from modelstate.formats.recognise import DCP_METADATA, Format, recognise
from modelstate.io.files import SourceFile
from modelstate.remote.location import is_remote
from modelstate.text_format import listed, printable

MODEL = "model"
_SHARD = r"-\d{5}-of-\d{5}\.\w+$"
_SUFFIX = r"\.(safetensors|bin|pt|pth|ckpt|tar)$"
FOREIGN = r"\.(msgpack|h5|hdf5|keras|gguf|onnx|tflite|npz|index)$"
"""Weights in formats that modelstate does not read."""
NAMED = r"\.(safetensors|bin|pt|pth|ckpt|tar)(\.index\.json)?$"
"""The names of checkpoints in a bucket: each other name would take a request to look at it."""
_INDEX = r"\.(safetensors|bin)\.index\.json$"
_OTHER_TOOLS = (
    (
        re.compile(r"__\d+\.metadata"),
        "torch.distributed.checkpoint with metadata of each rank, which modelstate does not read",
        "load it with torch.distributed.checkpoint on as many ranks, and save it with use_collectives=True",
    ),
    (
        re.compile(r".*\.distcp"),
        "torch.distributed.checkpoint without .metadata: its save was not finished, or the copy is not complete",
        "take a checkpoint whose save was finished, or copy this one again",
    ),
    (
        re.compile(r"\.snapshot_metadata"),
        "torchsnapshot, which modelstate does not read",
        "load it with torchsnapshot, then torch.save",
    ),
    (
        re.compile(r"saved_model\.pb"),
        "TensorFlow (SavedModel), which modelstate does not read",
        "load it with TensorFlow, save with safetensors",
    ),
    (
        re.compile(r"_CHECKPOINT_METADATA|manifest\.ocdbt"),
        "Orbax, which modelstate does not read",
        "load it with Orbax, save with safetensors",
    ),
)


class _Candidate(NamedTuple):
    name: str
    is_safetensors: bool = False
    shards: frozenset[str] = frozenset()

    @property
    def stem(self) -> str:
        """The name of the checkpoint, which is the same in all formats."""
        stem = self.name.removesuffix(".index.json")
        return re.sub(_SUFFIX, "", stem).replace("pytorch_model", "model")


def find_in(directory: str) -> str:
    """Returns the path of the checkpoint in a directory.

    Raises:
        UnknownFormatError: The directory is a checkpoint of another tool.
        DamagedFileError: The directory has shards, but no index.
        SourceNotFoundError: No file is a checkpoint.
        AmbiguousCheckpointError: The choice is not clear.
        PermissionError: The directory may not be read.
    """
    files, below, others = _entries(directory)
    looked_at = [name for name in files if re.search(NAMED, name)] if is_remote(directory) else files
    candidates = [candidate for name in looked_at if (candidate := _candidate(directory, name))]
    if not any(candidate.stem == MODEL for candidate in candidates):
        if DCP_METADATA in files and _is_dcp(directory, files):
            return os.path.join(directory, DCP_METADATA)
        _refuse_other_tools(directory, [*files, *below])
    if not candidates:
        by_name = [name for name in files if re.search(_SUFFIX, name)]
        by_name = by_name or [name for name in files if re.search(FOREIGN, name)][:1]
        if len(by_name) == 1:
            return os.path.join(directory, by_name[0])  # reading it reports what is wrong with it
        raise _nothing(directory, below, [*files, *others])
    indexed = frozenset[str]().union(*(candidate.shards for candidate in candidates))
    # A save that was stopped leaves shards that no index names.
    own = [sharded.own_shards(each.name.removesuffix(".index.json")) for each in candidates if each.shards]
    candidates = [
        each
        for each in candidates
        if each.shards or not (each.name in indexed or any(shards.fullmatch(each.name) for shards in own))
    ]
    if candidates and all(re.search(_SHARD, candidate.name) for candidate in candidates):
        raise DamagedFileError(
            "the directory holds shards, and not the index that says what is in them",
            where=directory,
            expected="a file *.index.json",
            found=listed((candidate.name for candidate in candidates), 4),
            remedy="download or copy the index too; shards of torch.distributed.checkpoint need consolidating first",
        )
    candidates = [candidate for candidate in candidates if candidate.stem == MODEL] or candidates
    names = {candidate.name for candidate in candidates}
    chosen = [candidate for candidate in candidates if candidate.is_safetensors] or candidates
    # A file is preferred to an index of the same name, as in other tools: a save that was killed may leave both.
    chosen = [entry for entry in chosen if entry.name.removesuffix(sharded.INDEX_SUFFIX) not in names - {entry.name}]
    if len(chosen) > 1 or len({candidate.stem for candidate in candidates}) > 1:
        raise _several(directory, candidates)
    return os.path.join(directory, chosen[0].name)


def _entries(directory: str) -> tuple[list[str], list[str], list[str]]:
    """The names of the files, the directories and the special files in a directory, or below the prefix of a bucket."""
    if is_remote(directory):
        from modelstate.remote.file import listing

        files, below = listing(directory)
        return sorted(files), sorted({*below} - {*files}), []
    entries: tuple[list[str], list[str], list[str]] = [], [], []
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        # An interrupted download leaves a link whose target is missing.
        is_file = os.path.isfile(path) or (os.path.islink(path) and not os.path.exists(path))
        entries[0 if is_file else 1 if os.path.isdir(path) else 2].append(name)
    return entries


def _candidate(directory: str, name: str) -> _Candidate | None:
    """The candidate that a file is, or None. Decided by the name alone where the name leaves no doubt: if such a file
    is damaged, or a pointer to a file that was never downloaded, no other file may be taken instead."""
    if name.startswith("."):
        return None
    if name.endswith(".safetensors"):
        return _Candidate(name, is_safetensors=True)
    if name == "pytorch_model.bin":
        return _Candidate(name)
    path = os.path.join(directory, name)
    try:
        with SourceFile(path) as file:
            format = recognise(file.head, path)
            is_foreign = False
            if format is Format.TORCH_ZIP:
                from modelstate.formats import torch_zip

                is_foreign = name.endswith(".distcp") or torch_zip.is_foreign(file)
    except OpenError as error:
        if is_remote(path) and isinstance(error, SourceAccessError):
            raise  # it is the same for all of them
        return None
    if format is not Format.INDEX and not re.search(_INDEX, name):
        is_known = format in (Format.TORCH_ZIP, Format.TORCH_LEGACY, Format.SAFETENSORS) and not is_foreign
        return _Candidate(name, format is Format.SAFETENSORS) if is_known else None
    try:
        shards = frozenset(sharded.read_index(path).weight_map.values())
    except (OpenError, ChecksumError):
        shards = frozenset()  # the index is damaged, which opening it reports
    in_safetensors = any(shard.endswith(".safetensors") for shard in (*shards, name.removesuffix(".index.json")))
    return _Candidate(name, in_safetensors, shards) if shards or re.search(_INDEX, name) else None


def _is_dcp(directory: str, files: list[str]) -> bool:
    """Whether the `.metadata` in the directory belongs to torch.distributed.checkpoint."""
    if any(name.endswith(".distcp") for name in files):
        return True
    try:
        with SourceFile(os.path.join(directory, DCP_METADATA)) as file:
            # A path that the user gives needs only this name, but in a directory it may belong to another tool.
            return recognise(file.head) is Format.DCP
    except OpenError:
        return False


def _refuse_other_tools(directory: str, names: list[str]) -> None:
    for mark, tool, remedy in _OTHER_TOOLS:
        if any(map(mark.fullmatch, names)):
            raise UnknownFormatError(
                f"this is a checkpoint of {tool}",
                where=directory,
                found=listed(names),
                remedy=remedy,
            )


def _nothing(directory: str, below: Sequence[str], others: Sequence[str]) -> SourceNotFoundError:
    options = ""
    there = sorted([*(f"{name}/" for name in below), *others])
    if "store.json" in there:
        remedy = (
            "it is a store: give one object of it, such as modelstate.Store(path).open('model'). Store.restore and "
            f"Store.verify read all objects; `modelstate store ls {shlex.quote(directory)}` lists the steps"
        )
        options = "modelstate store restore DIR PATH writes one object of it as a file; give the path of this file"
    elif below:
        remedy = f"subdirectories are not searched: give one of {listed(below)}"
    else:
        remedy = "finish the download or the copy, or give the path of the file to see what it is"
    return SourceNotFoundError(
        "no file of this directory is a checkpoint",
        where=directory,
        expected="model.safetensors, pytorch_model.bin, an index of shards, .metadata of torch.distributed.checkpoint, "
        "or one file of torch.save or safetensors",
        found=listed(there, 12) or "an empty directory",
        remedy=remedy,
        options=options,
    )


def _several(directory: str, candidates: list[_Candidate]) -> AmbiguousCheckpointError:
    names = [candidate.name for candidate in candidates]
    return AmbiguousCheckpointError(
        f"several checkpoints are in this directory, {len(names)} of them",
        where=directory,
        expected="one, or one named model",
        found=listed(map(printable, names), 12),
        remedy=f"give the path of the one that is meant, such as {os.path.join(directory, names[0])}",
    )
