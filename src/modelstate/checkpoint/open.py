"""`modelstate.open`: finds the reader for a path, a URL or a mapping by its content.

Of a directory it chooses one checkpoint. Subdirectories are not searched.

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
import stat
from collections.abc import Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from modelstate.arguments import checked_call
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import (
    AmbiguousCheckpointError,
    ChecksumError,
    DamagedFileError,
    OpenError,
    OptionError,
    ReadFailedError,
    SourceAccessError,
    SourceNotFoundError,
    SourceTypeError,
    TruncatedFileError,
    UnknownFormatError,
)
from modelstate.formats import safetensors, sharded
from modelstate.formats.manifest import PATCHES
from modelstate.formats.recognise import DCP_METADATA, Format, no_checkpoint, recognise, tensorflow_prefix, unpacked
from modelstate.formats.tree import Contents
from modelstate.io import system
from modelstate.io.files import NOT_FOUND, SourceFile, cannot_open, local_path, mode_of, not_found
from modelstate.process import gc_paused
from modelstate.remote.location import is_remote, is_repository, locate
from modelstate.tensor_spec import TensorSpec
from modelstate.text_format import listed, printable, short_repr

if TYPE_CHECKING:
    from modelstate.checkpoint.combine import Combination, CombineFunction
    from modelstate.remote.cache import Cache


Source = str | os.PathLike[str] | Mapping[Any, Any]
"""What `modelstate.open` accepts besides a sequence of sources."""


def patterns_of(option: str, patterns: object) -> tuple[str, ...]:
    """Returns the glob patterns of an option, those of a set in an order that is the same in each process.

    Raises `OptionError`.
    """
    items = tuple(patterns) if isinstance(patterns, Iterable) and not isinstance(patterns, str) else None
    if items is not None and all(isinstance(pattern, str) for pattern in items):
        return tuple(sorted(items)) if isinstance(patterns, Set) else items
    if isinstance(patterns, str):
        remedy = f"{option}=[{patterns!r}]"
    elif isinstance(patterns, bool):
        every = f'{option}=["head.*"]; for all of them {option}=["*"]'
        remedy = f"list the names: {every}" if patterns else "leave it out"
    else:
        remedy = f'{option}=["head.*"]'
    raise OptionError(
        f"{option}= must be glob patterns of names",
        expected="a list of strings",
        found=short_repr(patterns),
        remedy=remedy,
    )


def is_selected(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the patterns of an option, or there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def nothing_selected(patterns: Iterable[str], names: Iterable[str], where: str) -> OptionError:
    """Returns the error for patterns that none of the names matches."""
    return OptionError(
        "no name matches the patterns",
        where=where,
        found=", ".join(patterns),
        remedy=f"patterns are those of whole names, such as {next(iter(names), '*')!r}",
    )


NO_PICKLE = "leave it out: no code of a pickle is ever run here"


@checked_call(
    "ms.open",
    foreign={
        "map_location": "leave it out: no tensor is read yet. To load onto a device: ms.load(model, path, device=...)",
        "weights_only": NO_PICKLE,
        "mmap": "leave it out: no tensor is read yet. checkpoint.tensor(name, map=True) maps the file",
    },
)
@gc_paused()
def open(
    source: Source | Sequence[Source],
    *,
    key: str | None = None,
    allow: Sequence[object] = (),
    skip_forbidden: bool = False,
    combine: Combination | CombineFunction | None = None,
    cache: Cache | None = None,
) -> Checkpoint:
    """Opens a checkpoint: reads names, shapes, dtypes and places, and no tensor bytes.

    The format of a file is recognised by its content. In a directory, `model.safetensors` or its index is preferred to
    `pytorch_model.bin`, and these to other files; without them the directory must contain exactly one checkpoint.

    Several sources are opened as one checkpoint, each with the other arguments. Their names must be disjoint, unless
    `combine` computes one tensor from several: `Average`, `LoRA`, or a function of a name and of the tensors of all
    checkpoints that have it, in their order. The function is called with tensors on the meta device first, for the
    shape and dtype of its result, and with the values when they are read: one name at a time, so that no more than the
    tensors of one name are in memory.

    Args:
        source: The path of a file of `torch.save`, of a safetensors file, of an index of shards (`*.index.json`), or of
            a directory with one of these or with torch.distributed.checkpoint; a URL; a mapping in memory; a
            `Checkpoint`; or a list of these. A string `ORG/NAME[@REVISION]` is a repository of the Hugging Face hub
            where nothing is at `ORG` on this machine, it does not end as a file of a checkpoint does, and
            huggingface_hub is installed; a `Path` never is.
        key: The dotted path of a part of the checkpoint, such as "model_state".
        allow: Classes and functions, or their qualified names, that a pickle may use besides those that torch allows.
        skip_forbidden: Whether other classes and functions are left out, instead of raising `ForbiddenGlobalError`.
        combine: How several sources are combined.
        cache: Where what is read of remote files is kept, now and in later reads of the checkpoint.

    Returns:
        The checkpoint, a read-only mapping from names to `TensorSpec`.

    Raises:
        OpenError: The source cannot be opened. Its subclasses: `SourceNotFoundError`, `SourceAccessError` and
            `SourceTypeError` for a path that cannot be read; `UnknownFormatError` for a file that is not a checkpoint;
            `TruncatedFileError` and `DamagedFileError` for a damaged file; `ForbiddenGlobalError` and
            `UnsupportedTensorError` for contents that are not read; `AmbiguousCheckpointError` for a directory, and for
            two values of one name; `DamagedFileError` for shards elsewhere; `CombineError` for several sources.
        KeyNotFoundError: There is nothing under `key`.
        CodecError: `key` leads into a value that cannot be decoded.
        OptionError: An argument is not valid.
        ReadFailedError: An I/O error.

    Examples:
        >>> checkpoint = modelstate.open({"layer.weight": torch.zeros(2, 3)})
        >>> checkpoint["layer.weight"]
        TensorSpec(name='layer.weight', shape=(2, 3), dtype=torch.float32)
    """
    if cache is not None:
        from modelstate.remote.cache import check_cache

        check_cache(cache)
    if isinstance(source, list | tuple):
        from modelstate.checkpoint.combine import combine as combined

        of_source = partial(open, key=key, allow=allow, skip_forbidden=skip_forbidden, cache=cache)
        return combined([of_source(entry) for entry in source], combine)
    if combine is not None:
        raise OptionError("combine= needs a list of sources", expected="a list of sources", found=type(source).__name__)
    if isinstance(source, Checkpoint):
        return _part(source, key)
    if isinstance(source, Mapping):
        return _part(Checkpoint(Contents("mapping", source), source="mapping"), key)
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if not isinstance(name, str):
        raise _no_source(source)
    read = partial(_read_file, allow=allow, skip_forbidden=skip_forbidden)
    # Of a repository it is the directory of a commit in the cache of the hub, or a URL.
    repository = _repository(source) if isinstance(source, str) else None
    path, label = repository or name, name
    if "://" in path and is_remote(path):
        label = locate(path).url
        from modelstate.remote.file import opened_once

        with opened_once(cache):
            contents = read(_remote_file(path))
    else:
        file = local_path(path)
        contents = read(file if stat.S_ISREG(mode_of(file)) else _at_no_file(file, path))
    if PATCHES in contents.metadata:
        raise UnknownFormatError(
            "this is a file of changes, which is a part of a step of a store",
            where=label,
            expected="all files of the step, which have the tensors",
            remedy="open the step: its directory, its *.index.json, or modelstate.Store(path).open('model')",
        )
    if repository:
        commit = os.path.basename(repository).rpartition("@")[2]
        label = f"hf://{name.partition('@')[0]}@{commit}"
    return _part(Checkpoint(contents, source=label), key)


def _part(checkpoint: Checkpoint, key: str | None) -> Checkpoint:
    return checkpoint if key is None else checkpoint.select(key)


def _no_source(source: object) -> SourceTypeError:
    if isinstance(source, TensorSpec):
        remedy = "give the checkpoint; key= selects a part of it, and checkpoint.tensor(name) reads a tensor"
    elif hasattr(source, "steps") and hasattr(source, "restore"):  # a Store, which is above this room
        remedy = 'give one object of it: store.open("model")'
    elif hasattr(source, "state_dict"):
        remedy = "give its .state_dict()"
    elif hasattr(source, "read"):
        remedy = "give the path of the file; an open file cannot be mapped, or read from several threads"
    else:
        remedy = "give a str, a pathlib.Path or a dict"
    return SourceTypeError(
        "this cannot be opened as a checkpoint",
        expected="a path, or a mapping from names to tensors",
        found=f"{type(source).__module__}.{type(source).__qualname__}",
        remedy=remedy,
    )


def _read_file(path: str, *, allow: Sequence[object], skip_forbidden: bool, is_shard: bool = False) -> Contents:
    """Reads a whole checkpoint that is a file or begins with one, or a shard. Raises what `open` raises."""
    with SourceFile(path) as file:
        if safetensors.begins(file.head):
            return safetensors.read(file, allow=allow)
        if sharded.begins(file.head, path):
            if is_shard:
                raise DamagedFileError("an index names another index as a shard", where=path, remedy="open that index")
            read = partial(_read_file, allow=allow, skip_forbidden=skip_forbidden, is_shard=True)
            return sharded.read(path, read_file=read, allow=allow)
        match recognise(file.head, path):
            case Format.SAFETENSORS:
                return safetensors.read(file, allow=allow)
            case Format.TORCH_ZIP:
                from modelstate.formats import torch_zip

                return torch_zip.read(file, allow=allow, skip_forbidden=skip_forbidden)
            case Format.TORCH_LEGACY:
                from modelstate.formats import torch_legacy

                return torch_legacy.read(file, allow=allow, skip_forbidden=skip_forbidden)
            case Format.DCP if not is_shard:
                from modelstate.formats import dcp

                return dcp.read(file, allow=allow, skip_forbidden=skip_forbidden)
    if file.head:
        raise unpacked(path) or no_checkpoint(path, file.head)
    raise TruncatedFileError(
        "the file is empty",
        where=path,
        found="0 bytes",
        remedy="its writer or its download was stopped, or the disk was full: take an older one, or copy it again",
    )


# Paths that are not those of files.


def _at_no_file(path: str, argument: str) -> str:
    """The path of the file that is meant by the path of a directory, or of nothing."""
    if not os.path.lexists(path) and os.path.exists(path + sharded.INDEX_SUFFIX):
        return path + sharded.INDEX_SUFFIX  # `modelstate.save` adds this suffix to the path when it writes shards
    try:
        mode = system.stat(path).st_mode
    except OSError as error:
        prefix = tensorflow_prefix(path) if error.errno in NOT_FOUND else None
        raise prefix or cannot_open(path, argument, error) from error
    try:
        if stat.S_ISDIR(mode) and (of_archive := unpacked(path)):
            raise of_archive
        return find_in(path) if stat.S_ISDIR(mode) else path
    except PermissionError as error:
        raise cannot_open(path, path, error) from error


def _repository(source: str) -> str | None:
    """The path of the hub that a name without a scheme stands for, at its commit; None for a path of this machine."""
    name = source.partition("@")[0]
    if any(re.search(NAMED, text) or re.search(FOREIGN, text) for text in (source, name)) or not is_repository(source):
        return None
    from modelstate.remote import hub

    try:
        return hub.at_commit(f"hf://{source}")
    except (SourceNotFoundError, ReadFailedError) as error:
        path = local_path(source)
        missing = not_found(path, path)
        raise SourceNotFoundError(
            f"{missing.what}; and {error.where}: {error.what}",
            where=missing.where,
            found="; ".join(filter(None, (missing.found, error.found))),
            remedy=f"for a path: {missing.remedy}; for a repository: {error.remedy}",
        ) from error


def _remote_file(argument: str) -> str:
    """The URL of the object that a URL names, or of the checkpoint below a prefix; or a path of the hub's cache."""
    path = locate(argument).url
    if not path.startswith("hf://"):
        return _object_or_below(path)
    from modelstate.remote import hub

    path = hub.at_commit(path)
    if not is_remote(path):
        path = local_path(path)
        return path if os.path.isfile(path) else _at_no_file(path, path)
    if hub.parse(path).file and hub.cached(path) is None:
        path = _object_or_below(path)
    elif not hub.parse(path).file:
        path = find_in(path)
    shards: Iterable[str] = ()
    if path.endswith(sharded.INDEX_SUFFIX) and (index := hub.cached(path)):
        shards = sharded.read_index(index).shards
    return hub.cached(path, shards) or path


def _object_or_below(path: str) -> str:
    from modelstate.remote.file import listing, opened

    location = locate(path)
    if location.key and not location.key.endswith("/"):
        try:
            return opened(path).path
        except SourceNotFoundError as missing:
            if location.mark:  # a query is of this address alone
                raise
            try:
                return opened(path + sharded.INDEX_SUFFIX).path  # `modelstate.save` adds this suffix to the path
            except SourceNotFoundError:
                if location.scheme.startswith("http"):
                    raise missing from missing.__cause__
                try:
                    listing(path)
                except SourceNotFoundError:
                    raise missing from missing.__cause__
    return find_in(path.rstrip("/"))


# Directories.


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
        r"__\d+\.metadata",
        "torch.distributed.checkpoint with metadata of each rank, which modelstate does not read",
        "load it with torch.distributed.checkpoint on as many ranks, and save it with use_collectives=True",
    ),
    (
        r".*\.distcp",
        "torch.distributed.checkpoint without .metadata: its save was not finished, or the copy is not complete",
        "take a checkpoint whose save was finished, or copy this one again",
    ),
    (
        r"\.snapshot_metadata",
        "torchsnapshot, which modelstate does not read",
        "load it with torchsnapshot, then torch.save",
    ),
    *(
        (mark, f"{tool}, which modelstate does not read", f"load it with {tool}, save with safetensors")
        for mark, tool in ((r"saved_model\.pb", "TensorFlow"), (r"_CHECKPOINT_METADATA|manifest\.ocdbt", "Orbax"))
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
        named = [*files, *below]
        for mark, tool, remedy in _OTHER_TOOLS:
            if any(re.fullmatch(mark, name) for name in named):
                raise UnknownFormatError(
                    f"this is a checkpoint of {tool}", where=directory, found=listed(named), remedy=remedy
                )
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
        several = [candidate.name for candidate in candidates]
        raise AmbiguousCheckpointError(
            f"several checkpoints are in this directory, {len(several)} of them",
            where=directory,
            expected="one, or one named model",
            found=listed(map(printable, several), 12),
            remedy=f"give the path of the one that is meant, such as {os.path.join(directory, several[0])}",
        )
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
        shards = frozenset(sharded.read_index(path).shards)
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


def _nothing(directory: str, below: Sequence[str], others: Sequence[str]) -> SourceNotFoundError:
    options = ""
    there = sorted([*(f"{name}/" for name in below), *others])
    if "store.json" in there:
        remedy = (
            "it is a store: give one object of it, such as modelstate.Store(path).open('model'). Store.restore and "
            f"Store.verify read all objects; `modelstate store ls {shlex.quote(directory)}` lists the steps"
        )
        options = "it is a store: give the directory of a step, or what modelstate store restore DIR PATH writes"
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
