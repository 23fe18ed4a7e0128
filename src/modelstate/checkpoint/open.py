"""`modelstate.open`: finds the reader for a path, a directory or a mapping by its content.

The choice of a checkpoint in a directory, whose subdirectories are not searched:

- Every file is a candidate by its content, where its name leaves a doubt. The shards of an index count as the index.
- Files that differ only in their format are one checkpoint: `model.safetensors` and `pytorch_model.bin`,
  `x.safetensors` and `x.pt`. The safetensors file or its index is taken, since it needs no pickle.
- Of several checkpoints the one named `model` is taken, since repositories and training folders of Hugging Face contain
  optimizers beside it.
- Otherwise the `.metadata` of torch.distributed.checkpoint is taken, if there is one: the other files belong to it.
- Otherwise there must be exactly one candidate.
"""

from __future__ import annotations

import inspect
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

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
from modelstate.formats.recognise import (
    DCP_METADATA,
    HEAD_BYTES,
    Format,
    no_checkpoint,
    other_zip,
    recognise,
    tensorflow_prefix,
)
from modelstate.io import system
from modelstate.io.files import (
    NOT_FOUND,
    SourceFile,
    current_fingerprints,
    local_path,
    no_access,
    not_found,
    recorded_fingerprints,
    special_file,
)
from modelstate.process import gc_paused
from modelstate.remote import hub
from modelstate.remote.cache import Cache, check_cache
from modelstate.remote.file import listing, opened
from modelstate.remote.location import is_remote, locate
from modelstate.spec import Contents
from modelstate.text_format import listed, printable

if TYPE_CHECKING:
    from modelstate.checkpoint.combine import Combination, CombineFunction

if "torch" in sys.modules:
    # A program that has torch may open torch's formats, and does not wait for these readers in its first load.
    from modelstate.formats import dcp, torch_legacy, torch_zip  # noqa: F401

MODEL = "model"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.\w+$")
_SUFFIX = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|tar)$")
_FOREIGN = re.compile(r"\.(msgpack|h5|hdf5|keras|gguf|onnx|tflite|npz|index)$")
"""Weights in formats that modelstate does not read."""
_NAMED = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|tar)(\.index\.json)?$")
"""The names of checkpoints in a bucket: each other name would take a request to look at it."""
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
        """The name of the checkpoint, which is the same in all formats."""
        stem = self.name.removesuffix(".index.json")
        return _SUFFIX.sub("", stem).replace("pytorch_model", "model")


def find_in(directory: str) -> str:
    """Returns the path of the checkpoint in a directory.

    Raises:
        UnknownFormatError: The directory is a checkpoint of another tool.
        DamagedFileError: The directory has shards, but no index.
        SourceNotFoundError: No file is a checkpoint.
        AmbiguousCheckpointError: The choice is not clear.
        PermissionError: The directory may not be read.
    """
    entries = _entries(directory)
    files = [name for name, kind in entries.items() if kind is _Kind.FILE]
    looked_at = [name for name in files if _NAMED.search(name)] if is_remote(directory) else files
    candidates = [candidate for name in looked_at if (candidate := _candidate(directory, name))]
    if not any(candidate.stem == MODEL for candidate in candidates):
        if DCP_METADATA in files and _is_dcp(directory, files):
            return os.path.join(directory, DCP_METADATA)
        _refuse_other_tools(directory, [*entries])
    if not candidates:
        by_name = [name for name in files if _SUFFIX.search(name)]
        by_name = by_name or [name for name in files if _FOREIGN.search(name)][:1]
        if len(by_name) == 1:
            return os.path.join(directory, by_name[0])  # reading it reports what is wrong with it
        raise _nothing(directory, entries)
    indexed = frozenset[str]().union(*(candidate.shards for candidate in candidates))
    candidates = [candidate for candidate in candidates if candidate.shards or candidate.name not in indexed]
    if candidates and all(_SHARD.search(candidate.name) for candidate in candidates):
        raise DamagedFileError(
            "the directory holds shards, and not the index that says what is in them",
            where=directory,
            expected="a file *.index.json",
            found=", ".join(candidate.name for candidate in candidates[:4]),
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


class _Kind(Enum):
    FILE = "file"
    DIRECTORY = "directory"
    OTHER = "other"


def _entries(directory: str) -> dict[str, _Kind]:
    """What is in a directory, or below the prefix of a bucket, by name and sorted."""
    if is_remote(directory):
        files, below = listing(directory)
        return dict(sorted({**dict.fromkeys(below, _Kind.DIRECTORY), **dict.fromkeys(files, _Kind.FILE)}.items()))
    return {entry.name: _kind_of(entry) for entry in sorted(os.scandir(directory), key=lambda entry: entry.name)}


def _kind_of(entry: os.DirEntry[str]) -> _Kind:
    try:
        mode = entry.stat().st_mode
    except OSError:
        # An interrupted download leaves a link whose target is missing.
        return _Kind.FILE if entry.is_symlink() else _Kind.OTHER
    return _Kind.FILE if stat.S_ISREG(mode) else _Kind.DIRECTORY if stat.S_ISDIR(mode) else _Kind.OTHER


def _candidate(directory: str, name: str) -> _Candidate | None:
    """The candidate that a file is, or None. Decided by the name alone where the name leaves no doubt: if such a file
    is damaged, or a pointer to a file that was never downloaded, no other file may be taken instead."""
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
    except OpenError as error:
        if is_remote(path) and isinstance(error, SourceAccessError):
            raise  # it is the same for all of them
        return None
    format = recognise(head, path)
    if format is Format.INDEX or _INDEX.search(name):
        try:
            shards = frozenset(sharded.read_index(path)[0].values())
        except (OpenError, ChecksumError):
            shards = frozenset()  # the index is damaged, which opening it reports
        in_safetensors = any(shard.endswith(".safetensors") for shard in (*shards, name.removesuffix(".index.json")))
        return _Candidate(name, in_safetensors, shards) if shards or _INDEX.search(name) else None
    match format:
        case Format.TORCH_ZIP:
            from modelstate.formats import torch_zip

            return None if other_zip(path, head) or torch_zip.is_foreign(path) else _Candidate(name)
        case Format.TORCH_LEGACY:
            return _Candidate(name)
        case Format.SAFETENSORS:
            return _Candidate(name, is_safetensors=True)
    return None


def _is_dcp(directory: str, files: list[str]) -> bool:
    """Whether the `.metadata` in the directory belongs to torch.distributed.checkpoint."""
    if any(name.endswith(".distcp") for name in files):
        return True
    try:
        with SourceFile(os.path.join(directory, DCP_METADATA)) as file:
            # A path that the user gives needs only this name, but in a directory it may belong to another tool.
            return recognise(file.read(0, min(file.nbytes, HEAD_BYTES), "its beginning")) is Format.DCP
    except OpenError:
        return False


def _refuse_other_tools(directory: str, names: list[str]) -> None:
    for mark, tool, remedy in _OTHER_TOOLS:
        if any(map(mark.fullmatch, names)):
            raise UnknownFormatError(
                f"this is a checkpoint of {tool}, which is not read here",
                where=directory,
                found=", ".join(names[:6]),
                remedy=remedy,
            )


def _nothing(directory: str, entries: Mapping[str, _Kind]) -> SourceNotFoundError:
    below = [name for name, kind in entries.items() if kind is _Kind.DIRECTORY]
    there = [name + ("/" if name in below else "") for name in entries]
    if "store.json" in there:
        remedy = "it is a store: `modelstate store ls` lists its steps, and modelstate.Store(path).open opens them"
    elif below:
        remedy = f"subdirectories are not searched: give one of {', '.join(below[:6])}"
    else:
        remedy = "finish the download or the copy, or give the path of the file to see what it is"
    return SourceNotFoundError(
        "no file of this directory is a checkpoint",
        where=directory,
        expected="model.safetensors, pytorch_model.bin, an index of shards, .metadata of torch.distributed.checkpoint, "
        "or one file of torch.save or safetensors",
        found=listed(there, 12) or "an empty directory",
        remedy=remedy,
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


Source = str | os.PathLike[str] | Mapping[Any, Any]
"""What `modelstate.open` accepts besides a sequence of sources."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


def foreign_arguments(**answers: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function so that an argument of torch's function raises an `OptionError` with the replacement.

    Args:
        answers: For each argument of torch's function, what replaces it here.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs.keys() & answers.keys():
                raise OptionError(
                    f"{function.__name__}() has no {name}=, which is torch's",
                    found=f"{name}={kwargs[name]!r}",
                    remedy=answers[name],
                )
            return function(*args, **kwargs)

        return checked

    return decorate


def argument_order(
    call: str,
    is_first: Callable[[object], bool],
    is_second: Callable[[object], bool],
    *,
    call_for_paths: str = "",
    is_method: bool = False,
    within: Callable[..., AbstractContextManager[object]] = lambda *_, **__: nullcontext(),
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function so that two swapped arguments raise an `OptionError` with the right call.

    Args:
        call: The function as users call it: "ms.load".
        is_first: Whether a value can be the first argument.
        is_second: Whether a value can be the second argument.
        call_for_paths: The function to call where the second argument is a path, if it is another one.
        is_method: Whether `self` comes before the two arguments.
        within: Returns the block that raises the error, such as a phase of all ranks, for the arguments of the call. A
            call that the signature does not allow raises its `TypeError` there, too.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            passed = args[is_method:][:2]
            if len(passed) == 2 and not (is_first(passed[0]) and is_second(passed[1])):
                second, first = passed
                if is_first(first) and is_second(second):
                    names = tuple(signature.parameters)[is_method:][:2]
                    first_text, second_text = _argument_text(names[0], first), _argument_text(names[1], second)
                    right = (call_for_paths if is_path(second) else "") or call
                    with within(*args, **kwargs):
                        raise OptionError(
                            f"the arguments of {call} are in the wrong order; nothing has been changed",
                            expected=f"{call}({', '.join(names)})",
                            found=f"{call}({second_text}, {first_text})",
                            remedy=f"{right}({first_text}, {second_text})",
                        )
            block: AbstractContextManager[object] = nullcontext()
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                block = within(*args, **kwargs)
            with block:
                return function(*args, **kwargs)

        return checked

    return decorate


def _argument_text(name: str, value: object) -> str:
    """An argument in the text of a call: a short value as a literal, any other by the name of its parameter."""
    if isinstance(value, str | os.PathLike):
        return repr(os.fspath(value))
    is_literal = isinstance(value, int) or type(value).__qualname__ == "dtype"
    return str(value) if is_literal else name


def is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def is_module(value: object) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def is_source(value: object) -> bool:
    """Whether `modelstate.open` accepts a value of this kind as a single source."""
    return isinstance(value, str | os.PathLike | Mapping)


def is_objects(value: object) -> bool:
    """Whether a value can be a mapping of objects, like those that a store saves."""
    return isinstance(value, Mapping) and not isinstance(value, Checkpoint)


def check_budget_option(max_memory_bytes: object, minimum: int = 0) -> None:
    """Raises `OptionError` unless the budget is None or an integer of at least `minimum`."""
    given = max_memory_bytes
    if given is not None and not (isinstance(given, int) and not isinstance(given, bool) and given >= minimum):
        raise OptionError(
            "max_memory_bytes= must be a number of bytes", expected=f"an integer >= {minimum}", found=repr(given)
        )


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
        found=repr(patterns),
        remedy=remedy,
    )


NO_PICKLE = "leave it out: no code of a pickle is ever run here"


@foreign_arguments(
    map_location="leave it out: no tensor is read yet. To load onto a device: ms.load(model, path, device=...)",
    weights_only=NO_PICKLE,
    mmap="leave it out: no tensor is read yet. checkpoint.tensor(name, map=True) maps the file",
)
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
            two values of one name; `UnsafePathError` for shards elsewhere; `CombineError` for several sources.
        KeyNotFoundError: There is nothing under `key`.
        OptionError: An argument is not valid.
        ReadFailedError: An I/O error.

    Examples:
        >>> checkpoint = modelstate.open({"layer.weight": torch.zeros(2, 3)})
        >>> checkpoint["layer.weight"]
        TensorSpec(name='layer.weight', shape=(2, 3), dtype=torch.float32)
    """
    check_cache(cache)
    if isinstance(source, list | tuple):
        from modelstate.checkpoint.combine import combine as combined

        opened = [open(entry, key=key, allow=allow, skip_forbidden=skip_forbidden, cache=cache) for entry in source]
        return combined(opened, combine)
    if combine is not None:
        raise OptionError(
            "combine= is for several checkpoints", expected="a list of sources", found=type(source).__name__
        )
    if isinstance(source, Checkpoint):
        return source if key is None else source.select(key)
    source = cast(Source, source)
    with gc_paused(), recorded_fingerprints(cache) as fingerprints:
        repository = _repository(source) if isinstance(source, str) else None
        contents = read_contents(repository or source, allow=allow, skip_forbidden=skip_forbidden)
        name = "mapping" if isinstance(source, Mapping) else os.fspath(source)
        if repository:  # the directory of a commit in the cache of the hub, or a URL
            name = f"hf://{name.partition('@')[0]}@{os.path.basename(repository).rpartition('@')[2]}"
        name = locate(name).url if is_remote(name) else name
        # The fingerprints are from before the headers were read: a file that changed meanwhile is refused when read.
        fingerprints |= current_fingerprints(path for path in contents.files if path not in fingerprints)
        return Checkpoint(
            contents, source=name, key=key, fingerprints={path: fingerprints[path] for path in contents.files}
        )


def _repository(given: str) -> str | None:
    """The path of the hub that a name without a scheme stands for, at its commit; None for a path of this machine."""
    name = given.partition("@")[0]
    if any(_NAMED.search(text) or _FOREIGN.search(text) for text in (given, name)) or not hub.is_bare_name(given):
        return None
    try:
        return hub.at_commit(f"hf://{given}")
    except (SourceNotFoundError, ReadFailedError) as error:
        path = local_path(given)
        missing = not_found(path, path)
        raise SourceNotFoundError(
            f"{missing.what}; and {error.where}: {error.what}",
            where=missing.where,
            found="; ".join(filter(None, (missing.found, error.found))),
            remedy=f"for a path: {missing.remedy}; for a repository: {error.remedy}",
        ) from error


def read_contents(source: Source, *, allow: Sequence[object] = (), skip_forbidden: bool = False) -> Contents:
    """Reads the contents of a path or a mapping. A mapping is not copied. Raises what `open` raises."""
    if isinstance(source, Mapping):
        return Contents("mapping", source)
    given = _path_of(source)
    path = _remote_file(given) if is_remote(given) else _local_file(given)
    read_file = partial(_read_file, allow=allow, skip_forbidden=skip_forbidden)
    head = _head(path)
    found = recognise(head, path)
    match found:
        case Format.INDEX:
            return sharded.read(path, read_file=read_file, allow=allow)
        case Format.DCP:
            from modelstate.formats import dcp

            return dcp.read(path, allow=allow, skip_forbidden=skip_forbidden)
    return read_file(path, head, found)


def _local_file(given: str) -> str:
    """The path of the file at a path, or of the checkpoint in a directory."""
    path = local_path(given)
    if not os.path.lexists(path) and os.path.exists(path + sharded.INDEX_SUFFIX):
        path += sharded.INDEX_SUFFIX  # `modelstate.save` adds this suffix to the path when it writes shards
    try:
        mode = system.stat(path).st_mode
    except PermissionError as error:
        raise no_access(path, error) from error
    except OSError as error:
        if error.errno in NOT_FOUND:
            raise tensorflow_prefix(path) or not_found(path, given) from error
        raise ReadFailedError("the file cannot be opened", where=path, found=error) from error
    if stat.S_ISDIR(mode):
        try:
            path = find_in(path)
        except PermissionError as error:
            raise no_access(path, error) from error
    elif not stat.S_ISREG(mode):
        raise special_file(path, mode)
    return path


def _remote_file(given: str) -> str:
    """The URL of the object that a URL names, or of the checkpoint below a prefix; or a path of the hub's cache."""
    path = locate(given).url
    if not path.startswith("hf://"):
        return _object_or_below(path)
    path = hub.at_commit(path)
    if not is_remote(path):
        return _local_file(path)
    if hub.parse(path).file and hub.cached(path) is None:
        path = _object_or_below(path)
    elif not hub.parse(path).file:
        path = find_in(path)
    shards: Iterable[str] = ()
    if path.endswith(sharded.INDEX_SUFFIX) and (index := hub.cached(path)):
        shards = set(sharded.read_index(index)[0].values())
    return hub.cached(path, shards) or path


def _object_or_below(path: str) -> str:
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
                if location.scheme.startswith("http") or not any(listing(path)):
                    raise missing from missing.__cause__
    return find_in(path.rstrip("/"))


def _path_of(source: object) -> str:
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if isinstance(path, str):
        return path
    if hasattr(source, "state_dict"):
        remedy = "give its .state_dict()"
    elif hasattr(source, "read"):
        remedy = "give the path of the file; an open file cannot be mapped, or read from several threads"
    else:
        remedy = "give a str, a pathlib.Path or a dict"
    raise SourceTypeError(
        "this cannot be opened as a checkpoint",
        expected="a path, or a mapping from names to tensors",
        found=f"{type(source).__module__}.{type(source).__qualname__}",
        remedy=remedy,
    )


def _head(path: str) -> bytes:
    try:
        with SourceFile(path) as file:
            return file.read(0, min(file.nbytes, HEAD_BYTES), "its beginning")
    except SourceAccessError as error:
        raise no_access(path, error) from error
    except SourceNotFoundError as error:
        raise not_found(path, path) from error


def _read_file(
    path: str,
    head: bytes | None = None,
    found: Format | None = None,
    *,
    allow: Sequence[object],
    skip_forbidden: bool,
) -> Contents:
    """Reads one file that contains tensors: a whole checkpoint or a shard.

    `head` is its beginning, and `found` its format, where they are known.
    """
    head = _head(path) if head is None else head
    if not head:
        raise TruncatedFileError(
            "the file is empty",
            where=path,
            found="0 bytes",
            remedy="its writer or its download was stopped, or the disk was full: take an older one, or copy it again",
        )
    match found or recognise(head, path):
        case Format.TORCH_ZIP:
            if error := other_zip(path, head):
                raise error
            from modelstate.formats import torch_zip

            return torch_zip.read(path, allow=allow, skip_forbidden=skip_forbidden)
        case Format.TORCH_LEGACY:
            from modelstate.formats import torch_legacy

            return torch_legacy.read(path, allow=allow, skip_forbidden=skip_forbidden)
        case Format.SAFETENSORS:
            return safetensors.read(path, allow=allow)
        case Format.INDEX:
            raise DamagedFileError("an index names another index as a shard", where=path, remedy="open that index")
    raise no_checkpoint(path, head)
