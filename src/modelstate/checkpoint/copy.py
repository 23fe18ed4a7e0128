"""`modelstate.copy`: copies the files of a checkpoint byte for byte, and verifies them on the way."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

from modelstate.checkpoint.open import checked_call, is_path
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.checkpoint.write import target_path
from modelstate.errors import ChecksumError, OptionError, SaveTargetError, TargetExistsError, UnsafePathError
from modelstate.formats.copy_file import StreamedDigests, copy_file
from modelstate.formats.sharded import INDEX_SUFFIX, named_in
from modelstate.html.page import Kind, Page, Shown
from modelstate.process import progress_bar
from modelstate.remote.location import is_remote, locate
from modelstate.remote.requests import cleanup
from modelstate.remote.upload import head, is_absent, listing, remove
from modelstate.text_format import as_given, count, listed, seconds, size


@dataclass(frozen=True, slots=True)
class CopyReport(Shown):
    """The files that `modelstate.copy` has written."""

    source: str
    """The checkpoint, as it was opened."""
    files: tuple[str, ...]
    """What was written; the file to open is first."""
    bytes: int
    """The bytes of all files."""
    verified_bytes: int
    """The bytes that were compared with digests of the checkpoint."""
    algorithms: tuple[str, ...]
    """The kinds of digests: "crc32", "xxh3-128"."""
    seconds: float
    """The duration of the copy."""

    def __str__(self) -> str:
        digests = f"{', '.join(self.algorithms)} digests of {size(self.verified_bytes)} compared"
        return (
            f"{as_given(self.files[0])}: {count(len(self.files), 'file')}, {size(self.bytes)}, "
            f"{digests if self.algorithms else 'no digests to compare'}, {seconds(self.seconds)}"
        )

    def _page(self) -> Page:
        facts = {"Copied": size(self.bytes), "Verified": size(self.verified_bytes), "Time": seconds(self.seconds)}
        return Page(self.source, tuple(facts.items()), (("File", Kind.TEXT),), [[file] for file in self.files], "Files")

    def to_json(self) -> str:
        """All fields as JSON."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}, indent=2)


@checked_call("ms.copy")
def copy(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: bool | None = None,
    allow: Sequence[object] = (),
) -> CopyReport:
    """Copies the files of a checkpoint byte for byte, from and to local paths and buckets: all of them, or none.

    The bytes are streamed with at most about 150 MB of memory and without a temporary file elsewhere. Those with
    digests in the checkpoint (tensors of `modelstate.save`, records of `torch.save`) are compared on the way; each
    file must have the length and the version that was opened.

    The files of a checkpoint of several files keep their names, and the one that readers open is written last. Other
    files of the directory, such as `config.json`, are not copied. A `Store` is not copied: `modelstate store restore`
    writes an object of a step.

    Args:
        source: A path, a directory, or a URL that `modelstate.open` accepts.
        path: A path or a URL. A directory, for a checkpoint of several files and where it ends with `/` or is one.
        overwrite: Whether a file that is there is replaced. A checkpoint whose shards have the same names is not, since
            both would be mixed for a moment.
        progress: Whether to show a progress bar. None shows one on a terminal after half a second.
        allow: Classes and functions that a pickle may use, as for `modelstate.open`.

    Returns:
        What was written.

    Raises:
        OpenError: The source cannot be opened.
        ChecksumError: The source is damaged. Nothing is at the target.
        TargetExistsError: A file is there, and `overwrite` is false.
        SaveTargetError: Nothing can be written at the target.
        ReadFailedError: The source cannot be read, or has changed meanwhile.
        WriteFailedError: The target cannot be written.
        OptionError: The source is no path.

    Examples:
        >>> report = modelstate.copy("s3://bucket/run/model.safetensors", "model.safetensors")
    """
    if not is_path(source):
        raise OptionError("only files are copied", expected="a path or a URL", found=type(source).__name__)
    begin = perf_counter()
    checkpoint = open_checkpoint(source, allow=allow)
    fingerprints = checkpoint.fingerprints
    names = _names(checkpoint.files)
    targets = _targets(names, os.fspath(path), overwrite)
    digests = {path: StreamedDigests(path, checkpoint.checksums) for path in checkpoint.files}
    written: list[str] = []
    is_last = False
    with progress_bar(progress, sum(entry.nbytes for entry in fingerprints.values()), "copying") as advance:
        try:
            for file, to in reversed(list(zip(checkpoint.files, targets, strict=True))):
                is_last = to == targets[0]
                written.append(to)
                copy_file(
                    file,
                    to,
                    fingerprints[file],
                    overwrite=overwrite,
                    digests=digests[file],
                    replaces_shards=len(targets) == 1,
                    advance=advance,
                )
        except BaseException as error:
            # Without an answer of the server the file to open may be there, and may name the others.
            is_unknown = is_last and is_remote(targets[0]) and not isinstance(error, TargetExistsError | ChecksumError)
            with cleanup():
                if not is_unknown or is_absent(locate(targets[0]), error):
                    # An object may be there although its request has failed.
                    _remove(written if is_remote(targets[0]) and not is_last else written[:-1])
            raise
    found = [entry for entry in digests.values() if entry.verified_bytes]
    return CopyReport(
        checkpoint.source,
        tuple(targets),
        sum(fingerprints[path].nbytes for path in checkpoint.files),
        sum(entry.verified_bytes for entry in found),
        tuple(sorted({algorithm for entry in found for algorithm in entry.algorithms})),
        perf_counter() - begin,
    )


def _names(files: Sequence[str]) -> list[str]:
    """The names of files from the directory of the first one. Raises `UnsafePathError` for one that is elsewhere."""
    first = files[0]
    if len(files) == 1:
        return [os.path.basename(locate(first).key if is_remote(first) else first)]
    directory = os.path.dirname(first)
    for path in files:
        if not path.startswith(f"{directory}/"):
            raise UnsafePathError("a shard is not in the directory of its index", where=path, expected=directory)
    return [path[len(directory) + 1 :] for path in files]


def _targets(names: Sequence[str], given: str, overwrite: bool) -> list[str]:
    """The paths of the copies. Raises where something is there that is not replaced, or not replaceable as a whole."""
    has_index = len(names) > 1
    is_there = not locate(given).key if is_remote(given) else os.path.isdir(given)
    is_directory = has_index or given.endswith("/") or is_there
    targets = [target_path(f"{given.rstrip('/')}/{name}") for name in names] if is_directory else [target_path(given)]
    first = targets[0]
    replaced = [path for path in targets if _is_there(path)]
    # Of a file and an index of the same name, readers prefer the file.
    other = first.removesuffix(INDEX_SUFFIX) if has_index else f"{first}{INDEX_SUFFIX}"
    preferred = [other] if other != first and _is_there(other) else []
    if not overwrite and (replaced or preferred):
        raise TargetExistsError(
            "something is there already",
            where=(replaced or preferred)[0],
            remedy="" if replaced else "copy to another directory, or remove it first",
        )
    if has_index and (preferred or (first in replaced and len(replaced) > 1)):
        raise SaveTargetError(
            "the checkpoint that is there has files of the same names, so it cannot be replaced as a whole",
            where=first,
            found=listed([*replaced, *preferred], 5),
            remedy="copy to another directory, or remove the one that is there first",
        )
    if has_index and replaced:
        _check_other_indexes(first, replaced)
    return targets


def _check_other_indexes(target: str, replaced: Sequence[str]) -> None:
    """Raises `SaveTargetError` where another index in the directory may name a file that is going to be replaced."""
    directory, _, own = target.rpartition("/")
    is_bucket = is_remote(target)
    names = [item.name for item in listing(locate(directory))[1]] if is_bucket else os.listdir(directory or os.sep)
    for name in names:
        if name.endswith(INDEX_SUFFIX) and name != own:
            shards = named_in(f"{directory}/{name}")
            if shards is None or not shards.isdisjoint(path.removeprefix(f"{directory}/") for path in replaced):
                raise SaveTargetError(
                    "a shard of another checkpoint would be replaced",
                    where=f"{directory}/{name}",
                    found=listed(replaced, 5),
                    remedy="copy to another directory, or remove the checkpoint that is there first",
                )


def _is_there(path: str) -> bool:
    return head(locate(path)) is not None if is_remote(path) else os.path.lexists(path)


def _remove(paths: Sequence[str]) -> None:
    with suppress(Exception):  # what is left is not the file that readers open
        if paths and is_remote(paths[0]):
            remove([locate(path) for path in paths])
        for path in paths if paths and not is_remote(paths[0]) else ():
            os.unlink(path)
