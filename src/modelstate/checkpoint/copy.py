"""`modelstate.copy`: copies the files of a checkpoint byte for byte, and verifies them on the way."""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import xxhash

from modelstate.checkpoint.open import is_path
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.checkpoint.write import target_path
from modelstate.errors import ChecksumError, OptionError, SaveTargetError, TargetExistsError, UnsafePathError
from modelstate.formats.manifest import ALGORITHM
from modelstate.formats.sharded import write_file
from modelstate.html.page import Kind, Page, Shown
from modelstate.io.atomic import atomic_file
from modelstate.io.engine import Request, read_ranges
from modelstate.io.files import FileFingerprint
from modelstate.process import prefetch_one
from modelstate.progress import progress_bar
from modelstate.remote.location import is_remote, locate
from modelstate.remote.upload import PART_BYTES, head, new_object, remove
from modelstate.spec import ByteRange, Checksum
from modelstate.text_format import count, seconds, size

_WINDOW_BYTES = 16 << 20
"""What is read at once, by all connections; the next window is read while one is written."""


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
            f"{self.files[0]}: {count(len(self.files), 'file')}, {size(self.bytes)}, "
            f"{digests if self.algorithms else 'no digests to compare'}, {seconds(self.seconds)}"
        )

    def _page(self) -> Page:
        facts = {"Copied": size(self.bytes), "Verified": size(self.verified_bytes), "Time": seconds(self.seconds)}
        return Page(self.source, tuple(facts.items()), (("File", Kind.TEXT),), [[file] for file in self.files], "Files")

    def to_json(self) -> str:
        """All fields as JSON."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}, indent=2)


def copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
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
        target: A path or a URL. A directory, for a checkpoint of several files and where it ends with `/` or is one.
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
    targets = _targets(names, os.fspath(target))
    replaced = [path for path in targets if _is_there(path)]
    if replaced and not overwrite:
        raise TargetExistsError(
            "something is there already",
            where=replaced[0],
            remedy="take another path, or overwrite=True to replace it",
        )
    if targets[0] in replaced and len(replaced) > 1:
        raise SaveTargetError(
            "the checkpoint that is there has files of the same names, so it cannot be replaced as a whole",
            where=targets[0],
            found=", ".join(replaced[1:5]),
            remedy="copy to another directory, or remove the one that is there first",
        )
    digests = {path: _Digests(path, checkpoint.checksums) for path in checkpoint.files}
    written: list[str] = []
    is_last = False
    with progress_bar(progress, sum(entry.nbytes for entry in fingerprints.values()), "copying") as advance:
        try:
            for path, to in reversed(list(zip(checkpoint.files, targets, strict=True))):
                is_last = to == targets[0]
                written.append(to)
                copy_file(
                    path,
                    to,
                    fingerprints[path],
                    overwrite=overwrite,
                    digests=digests[path],
                    replaces_shards=len(targets) == 1,
                    advance=advance,
                )
        except BaseException as error:
            # Without an answer of the server the file to open may be there, and may name the others.
            if not (is_last and is_remote(targets[0])) or isinstance(error, TargetExistsError | ChecksumError):
                _remove(written[:-1])
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


def _targets(names: Sequence[str], given: str) -> list[str]:
    is_directory = len(names) > 1 or given.endswith("/") or (not is_remote(given) and os.path.isdir(given))
    target = target_path(given.rstrip("/") if is_directory else given)
    return [f"{target}/{name}" for name in names] if is_directory else [target]


def _is_there(path: str) -> bool:
    return head(locate(path)) is not None if is_remote(path) else os.path.lexists(path)


def _remove(paths: Sequence[str]) -> None:
    with suppress(Exception):  # what is left is not the file that readers open
        if paths and is_remote(paths[0]):
            remove([locate(path) for path in paths])
        for path in paths if paths and not is_remote(paths[0]) else ():
            os.unlink(path)


def copy_file(
    path: str,
    target: str,
    fingerprint: FileFingerprint,
    *,
    overwrite: bool,
    digests: _Digests | None = None,
    replaces_shards: bool = True,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Copies one file; the target has all of it, or what it had before.

    Args:
        path: The file.
        target: The path or the URL that it is written to.
        fingerprint: What the file must be.
        overwrite: Whether a file at the target is replaced.
        digests: What the bytes are compared with.
        replaces_shards: Whether an index and its shards at the target are removed.
        advance: Called with the numbers of bytes.
    """

    def stream(output: Any) -> None:
        def fetch(window: tuple[int, bytearray], _: Callable[[], None]) -> None:
            start, buffer = window
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            request = Request(ByteRange(path, start, len(buffer)), address)
            read_ranges([request], fingerprints={path: fingerprint})

        def use(window: tuple[int, bytearray]) -> None:
            start, buffer = window
            view = memoryview(buffer)
            if digests is not None:
                digests.add(start, view)
            for at in range(0, len(view), PART_BYTES):
                output.append(view[at : at + PART_BYTES])
            advance(len(view))

        prefetch_one(_windows(fingerprint.nbytes), fetch, use, is_fetched=lambda _: True)
        if digests is not None:
            digests.check()

    if is_remote(target):
        with new_object(locate(target), fingerprint.nbytes, overwrite=overwrite) as output:
            stream(output)
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if replaces_shards:
        write_file(target, stream, overwrite=overwrite)
        return
    with atomic_file(target, overwrite=overwrite) as local:
        stream(local)


def _windows(nbytes: int) -> Iterator[tuple[int, bytearray]]:
    for start in range(0, nbytes, _WINDOW_BYTES):
        yield start, bytearray(min(_WINDOW_BYTES, nbytes - start))


class _Digests:
    """Compares the bytes of a file, which come in their order, with the digests of the checkpoint."""

    def __init__(self, path: str, checksums: Mapping[ByteRange, Checksum]) -> None:
        self.verified_bytes, self.algorithms = 0, set[str]()
        self._blocks: list[tuple[int, int, ByteRange]] = []
        self._checksums = {storage: checksum for storage, checksum in checksums.items() if storage.path == path}
        self._values = dict.fromkeys(self._checksums, "")
        self._next, self._hash, self._crc = 0, xxhash.xxh3_128(), 0
        end = 0
        for storage in sorted(self._checksums):
            if storage.start < end or not storage.nbytes:
                del self._values[storage]  # it overlaps the one before
                continue
            end = storage.start + storage.nbytes
            blocks = self._checksums[storage].blocks(storage.nbytes)
            self._blocks += [(storage.start + first, storage.start + last, storage) for first, last in blocks]

    def add(self, start: int, view: memoryview) -> None:
        """Takes the bytes that follow."""
        end = start + len(view)
        while self._next < len(self._blocks):
            first, last, storage = self._blocks[self._next]
            if first >= end:
                return
            part, algorithm = view[max(first - start, 0) : last - start], self._checksums[storage].algorithm
            if algorithm == ALGORITHM:
                self._hash.update(part)
            else:
                self._crc = zlib.crc32(part, self._crc)
            self.verified_bytes += len(part)
            if last > end:
                return
            self._values[storage] += self._hash.hexdigest() if algorithm == ALGORITHM else f"{self._crc:08x}"
            self.algorithms.add(algorithm)
            self._next, self._hash, self._crc = self._next + 1, xxhash.xxh3_128(), 0

    def check(self) -> None:
        """Raises `ChecksumError` where the bytes of the whole file are not what the digests say."""
        damaged = [storage for storage, value in self._values.items() if value != self._checksums[storage].value]
        if damaged:
            raise ChecksumError(
                f"{len(damaged)} parts of the file are not what their checksums say; nothing has been copied",
                where=damaged[0].path,
                found=", ".join(f"bytes {part.start} to {part.start + part.nbytes}" for part in damaged[:4]),
                remedy="the file is damaged: get it again from where it came; `modelstate verify` names the tensors",
            )
