"""From a path, a directory or a mapping to a `Checkpoint`: which reader it is for, found by content."""

import inspect
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch

from modelstate.errors import (
    EmptyFileError,
    OptionError,
    ReadFailedError,
    ShardIndexError,
    SourceAccessError,
    SourceNotFoundError,
    SourceTypeError,
)
from modelstate.read import dcp, mapping, safetensors, sharded, system, torch_legacy, torch_zip
from modelstate.read.checkpoint import Checkpoint
from modelstate.read.combine import Combination, CombineFunction
from modelstate.read.combine import combine as combined
from modelstate.read.diagnose import HEAD_BYTES, no_checkpoint, other_zip, tensorflow_prefix
from modelstate.read.directory import find_in
from modelstate.read.paths import NOT_FOUND, local_path, no_access, not_found, special_file
from modelstate.read.quiet import no_collection
from modelstate.read.source_file import SourceFile
from modelstate.read.stamp import noted, stamps_of
from modelstate.spec import Contents

Source = str | os.PathLike[str] | Mapping[Any, Any]
_P = ParamSpec("_P")
_R = TypeVar("_R")


def foreign_arguments(**answers: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Answers arguments of torch's functions with what takes their place here, in an `OptionError`."""

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
    is_first: Callable[[Any], bool],
    is_second: Callable[[Any], bool],
    *,
    call_for_paths: str = "",
    is_method: bool = False,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Answers two swapped arguments with the right call, in an `OptionError`.

    Args:
        call: The function as users call it: "ms.load".
        is_first: Whether a value can be the first argument.
        is_second: Whether a value can be the second argument.
        call_for_paths: The function to call where the second argument is a path, if it is another one.
        is_method: Whether `self` comes before the two arguments.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given = args[is_method:][:2]
            if len(given) == 2 and not (is_first(given[0]) and is_second(given[1])):
                second, first = given
                if is_first(first) and is_second(second):
                    names = tuple(inspect.signature(function).parameters)[is_method:][:2]
                    in_order, as_given = _shown(names[0], first), _shown(names[1], second)
                    right = (call_for_paths if is_path(second) else "") or call
                    raise OptionError(
                        f"the arguments of {call} are in the wrong order; nothing has been changed",
                        expected=f"{call}({', '.join(names)})",
                        found=f"{call}({as_given}, {in_order})",
                        remedy=f"{right}({in_order}, {as_given})",
                    )
            return function(*args, **kwargs)

        return checked

    return decorate


def _shown(name: str, value: object) -> str:
    """An argument in the text of a call: a short value as it is written, any other by the name of its parameter."""
    if isinstance(value, str | os.PathLike):
        return repr(os.fspath(value))
    return str(value) if isinstance(value, int | torch.dtype) else name


def is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def is_module(value: object) -> bool:
    return isinstance(value, torch.nn.Module)


def is_source(value: object) -> bool:
    """Whether `modelstate.open` takes a value of this kind."""
    return isinstance(value, str | os.PathLike | Mapping)


def is_objects(value: object) -> bool:
    """Whether a value can be a mapping of objects, as those that a store saves."""
    return isinstance(value, Mapping) and not isinstance(value, Checkpoint)


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
) -> Checkpoint:
    """Opens a checkpoint: reads names, shapes, dtypes and places, and no tensor bytes.

    `source` is the path of a file of `torch.save`, of a safetensors file, of an index of shards (`*.index.json`), or
    of a directory with one of these or of torch.distributed.checkpoint; a `file://` URL; a mapping in memory; or a
    `Checkpoint`. What a file is, its content says and not its name. Of a directory, `model.safetensors` or its index is
    taken before `pytorch_model.bin`, and these before other files; without them there must be one checkpoint only.

    `key` is the dotted path of the part that is wanted ("model_state"). `allow` has the classes and functions, or their
    qualified names, that a pickle may use besides those that torch allows; `skip_forbidden` leaves the others out
    instead of raising.

    A list of sources is opened as one checkpoint, with what the other arguments say for each of them. Their names must
    be disjoint, unless `combine` says how to make one tensor of several: `Average`, `LoRA`, or a function of a name
    and of the tensors of all checkpoints that have it, in their order. It is called with tensors on the meta device
    first, for the shape and dtype of its result, and with the values when they are wanted: then one name at a time, so
    that no more is in memory than what one name takes.

    Raises `SourceNotFoundError`, `SourceAccessError` and `SourceTypeError` for what is no readable path;
    `EmptyFileError`, `UnknownFormatError` (`LfsPointerError`, `HtmlPageError`, `NotACheckpointError`) and
    `TruncatedFileError` for a file that is no checkpoint or none any more; `NoCheckpointError` and
    `AmbiguousDirectoryError` for directories; `HeaderLengthError`, `HeaderTooLargeError`, `HeaderSyntaxError`,
    `UnknownDtypeError`, `TensorRangeError`, `TensorSizeError` and `UnsupportedTensorError` for damaged tensors;
    `ArchiveError` (`MissingRecordError`, `CompressedRecordError`, `RecordSizeError`), `PickleError` and
    `ForbiddenGlobalError` for files of torch; `ShardIndexError`, `MissingShardError`, `UnsafePathError` and
    `DuplicateNameError` for shards; `CombineError` for a list: all of them `OpenError`. `KeyNotFoundError` where `key`
    selects nothing; `ReadFailedError` for an I/O error.
    """
    if isinstance(source, list | tuple):
        return combined([open(one, key=key, allow=allow, skip_forbidden=skip_forbidden) for one in source], combine)
    if combine is not None:
        raise OptionError(
            "combine= is for several checkpoints", expected="a list of sources", found=type(source).__name__
        )
    if isinstance(source, Checkpoint):
        return source if key is None else source.select(key)
    source = cast(Source, source)
    with no_collection(), noted() as stamps:
        contents = read_contents(source, allow=allow, skip_forbidden=skip_forbidden)
        name = "mapping" if isinstance(source, Mapping) else os.fspath(source)
        # What each file was before its header was read: one that was written meanwhile is refused when it is read.
        stamps |= stamps_of(path for path in contents.files if path not in stamps)
        return Checkpoint(contents, source=name, key=key, stamps={path: stamps[path] for path in contents.files})


def read_contents(source: Source, *, allow: Sequence[object] = (), skip_forbidden: bool = False) -> Contents:
    """What a path or a mapping holds: what `open` makes a `Checkpoint` of. Raises what `open` raises."""
    if isinstance(source, Mapping):
        return mapping.read(source)
    given = _path_of(source)
    path = local_path(given)
    if not os.path.lexists(path) and os.path.exists(path + sharded.INDEX_SUFFIX):
        path += sharded.INDEX_SUFFIX  # what `modelstate.save` makes of a path when it writes shards
    mode = _mode(path, given)
    if stat.S_ISDIR(mode):
        try:
            path = find_in(path)
        except PermissionError as error:
            raise no_access(path, error) from error
    elif not stat.S_ISREG(mode):
        raise special_file(path, mode)
    read_file = partial(_read_file, allow=allow, skip_forbidden=skip_forbidden)
    head = _head(path)
    if sharded.matches(head, path):
        return sharded.read(path, read_file=read_file, allow=allow)
    if head and dcp.matches(head, path):
        return dcp.read(path, allow=allow, skip_forbidden=skip_forbidden)
    return read_file(path, head)


def _path_of(source: object) -> str:
    found = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if isinstance(found, str):
        return found
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


def _mode(path: str, given: str) -> int:
    try:
        return system.stat(path).st_mode
    except PermissionError as error:
        raise no_access(path, error) from error
    except OSError as error:
        if error.errno in NOT_FOUND:
            raise tensorflow_prefix(path) or not_found(path, given) from error
        raise ReadFailedError("the file cannot be opened", where=path, found=error) from error


def _head(path: str) -> bytes:
    try:
        with SourceFile(path) as file:
            return file.read(0, min(file.nbytes, HEAD_BYTES), "its beginning")
    except SourceAccessError as error:
        raise no_access(path, error) from error
    except SourceNotFoundError as error:
        raise not_found(path, path) from error


def _read_file(path: str, head: bytes | None = None, *, allow: Sequence[object], skip_forbidden: bool) -> Contents:
    """What one file holds that has the tensors themselves: a shard, or all of a checkpoint. It begins with `head`."""
    head = _head(path) if head is None else head
    if not head:
        raise EmptyFileError(
            "the file is empty",
            where=path,
            found="0 bytes",
            remedy="its writer or its download was stopped, or the disk was full: take an older one, or copy it again",
        )
    other = dcp.part_of_one(path, head) or other_zip(path, head)
    if other:
        raise other
    if torch_zip.matches(head):
        return torch_zip.read(path, allow=allow, skip_forbidden=skip_forbidden)
    if torch_legacy.matches(head):
        return torch_legacy.read(path, allow=allow, skip_forbidden=skip_forbidden)
    if safetensors.matches(head):
        return safetensors.read(path, allow=allow)
    if sharded.matches(head, path):
        raise ShardIndexError("an index names another index as a shard", where=path, remedy="open that index")
    raise no_checkpoint(path, head)
