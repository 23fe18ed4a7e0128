"""Writes a state to a path: one file, or shards with an index.

All of a state is at its path after a save, or nothing has changed. A reader prefers a single file to an index of the
same name, so one rename activates the one that is written, whichever of the two it is. What was there before is removed
after that rename. Into a bucket `modelstate.formats.uploading` writes instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from modelstate.errors import UnsavableError
from modelstate.formats.manifest import KEY, check_size
from modelstate.formats.safetensors import Layout, Written, blank_digests, layout, write
from modelstate.formats.sharded import INDEX_SUFFIX, SHARD_METADATA, Kind, in_shards, index_of, old_files, shard_names
from modelstate.formats.uploading import Uploader, upload_checkpoint, upload_object
from modelstate.io import system
from modelstate.io.atomic import (
    LOCK_TIMEOUT_SECONDS,
    Output,
    check_target,
    existing_mode,
    locked_directory,
    new_file,
    put_durably,
    remove_all,
    sync_directory,
    unfinished_file,
    write_errors,
)
from modelstate.remote.location import Location, is_remote, locate

if TYPE_CHECKING:
    import torch

    from modelstate.formats.block_writer import LazyTensor
    from modelstate.formats.serialize import OfShard, SerializedState

Files = dict[str, int]
"""The sizes of files by path."""
Outputs = Callable[[], Generator[Output]]


class Writer(Protocol):
    """Writes the files of a checkpoint, in this process alone or together with other ranks."""

    @property
    def of_shard(self) -> OfShard | None:
        """The argument of `serialize` for DTensors; None where they are refused."""

    def planning(self) -> AbstractContextManager[None]:
        """A block before `write`, whose errors reach all processes."""

    def write(
        self, layouts: Sequence[Layout], outputs: Outputs, compared: Callable[[], Mapping[str, object]]
    ) -> Sequence[Written]:
        """Writes files, which are durable when it returns, but for their names.

        Args:
            layouts: What the files hold.
            outputs: Creates the files one after the other. Of several processes only the first one calls it.
            compared: Returns what else must be equal in all processes, by names for an error: options, and mappings of
                the values that are no tensors.

        Returns:
            The digests of the files; in the other processes nothing.
        """

    def commit(self, put: Callable[[], Files]) -> Files:
        """Returns what `put` returns, which only the first process calls: it puts the files in their places."""


class LocalWriter(msgspec.Struct, frozen=True):
    """Writes the files of a checkpoint in this process, with a number of threads."""

    threads: int | None = None
    of_shard: OfShard | None = None
    on_written: Callable[[int], None] = lambda _: None
    """Called with numbers of bytes of tensors that were written."""

    def planning(self) -> AbstractContextManager[None]:
        return nullcontext()

    def write(
        self, layouts: Sequence[Layout], outputs: Outputs, compared: Callable[[], Mapping[str, object]]
    ) -> Sequence[Written]:
        written = []
        with closing(outputs()) as opened:
            for planned, output in zip(layouts, opened, strict=True):
                written.append(write(output, planned, self.threads, self.on_written))
        return written

    def shards(self, tensors: Mapping[str, Kind]) -> list[dict[str, Kind]]:
        return []

    def upload(
        self,
        layouts: Sequence[Layout],
        names: Callable[[], Sequence[str]],
        compared: Callable[[], Mapping[str, object]],
    ) -> Sequence[Written]:
        return [
            self.upload_object(locate(name), planned, overwrite=True)
            for name, planned in zip(names(), layouts, strict=True)
        ]

    def upload_object(self, location: Location, planned: Layout, *, overwrite: bool) -> Written:
        return upload_object(location, planned, overwrite=overwrite, threads=self.threads, on_written=self.on_written)

    def commit(self, put: Callable[[], Files]) -> Files:
        return put()


def write_checkpoint(
    state: SerializedState,
    path: str,
    *,
    writer: Writer,
    schema: str | None,
    shard_bytes: int | None,
    overwrite: bool,
    metadata: Mapping[str, str] | None,
    lock_timeout_seconds: float,
) -> Files:
    """Writes a state to one file, or to shards with an index.

    Args:
        state: The state.
        path: The target.
        writer: The process or the ranks that write it.
        schema: The version of the state.
        shard_bytes: The largest size of the tensors of a file; a larger state is written in shards.
        overwrite: Whether existing files are replaced.
        metadata: Additional text for `__metadata__`, which other tools display.
        lock_timeout_seconds: How long to wait for the lock of the directory.

    Returns:
        The sizes of the files by path; for shards the index is first.

    Raises:
        UnsavableError: The header, the manifest or the index would be larger than a reader takes.

    Also raises what `write_file` raises. The previous files are then untouched, or the error says that they are not,
    and no other file is left.
    """
    text = {**(metadata or {}), **SHARD_METADATA}
    total_bytes = state.nbytes
    index = path + INDEX_SUFFIX
    groups = [] if shard_bytes is None or total_bytes <= shard_bytes else in_shards(state.tensors, shard_bytes)
    with writer.planning():
        uploader = None
        if is_remote(path):
            assert isinstance(writer, Uploader)
            uploader = writer
        if uploader is not None and state.tensors:
            groups = groups or uploader.shards(state.tensors)
        layouts = _layouts(state, groups, path, schema, text)

    def compared() -> Mapping[str, object]:
        options = {"overwrite": overwrite, "shard_size_bytes": shard_bytes, "schema": schema}
        return {**options, "metadata": text, "values": state.values()}

    if uploader is not None:
        return upload_checkpoint(path, layouts, groups, uploader, overwrite, compared, partial(state.manifest, schema))
    with write_errors(path), ExitStack() as opened:
        output: Output | None = None
        unfinished: list[str] = []

        def outputs() -> Generator[Output]:
            nonlocal output, unfinished
            check_both(path, overwrite)
            mode = existing_mode(index, path) if groups else existing_mode(path, index)
            output = opened.enter_context(unfinished_file(path, mode, lock_timeout_seconds))
            if not groups:
                yield output
                return
            unfinished = opened.enter_context(_removed_on_error(output, index))
            for number in range(1, len(groups) + 1):
                unfinished.append(output.numbered_path(number))
                with new_file(unfinished[-1], mode) as shard:
                    yield shard

        written = writer.write(layouts, outputs, compared)

        def put() -> Files:
            assert output is not None
            if not groups:
                return _put_file(output, path, overwrite, lock_timeout_seconds)
            names = shard_names(path, [file.content for file in written])
            digests = {name: value for file in written for name, value in file.digests.items()}
            output.append(index_of(dict(zip(names, groups, strict=True)), total_bytes, state.manifest(schema, digests)))
            sizes = {name: planned.nbytes for name, planned in zip(names, layouts, strict=True)}
            return _put_shards(output, path, unfinished, sizes, overwrite, lock_timeout_seconds)

        return writer.commit(put)


def write_file(
    path: str,
    write_to: Callable[[Output], object],
    *,
    overwrite: bool,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> Files:
    """Puts a file at a path, and removes the index and the shards that were there. Returns the path and its size.

    Raises:
        TargetExistsError: Something is at the path, and `overwrite` is False.
        SaveTargetError: Something that is not a regular file is at the path.
        LockedError: The lock of the directory is not free in time.
        WriteFailedError: An I/O error. What `write_to` raises passes through.
    """
    check_both(path, overwrite)
    mode = existing_mode(path, path + INDEX_SUFFIX)
    with write_errors(path), unfinished_file(path, mode, lock_timeout_seconds) as output:
        write_to(output)
        return _put_file(output, path, overwrite, lock_timeout_seconds)


def _put_file(output: Output, path: str, overwrite: bool, lock_timeout_seconds: float) -> Files:
    """Puts a finished file at a path, durably, and removes the index and the shards that were there."""
    output.sync()
    with locked_directory(os.path.dirname(path), lock_timeout_seconds):
        check_both(path, overwrite)
        old = old_files(path)
        put_durably(output.path, path, overwrite)
        remove_all(old)
    return {path: output.nbytes}


def _put_shards(
    output: Output,
    path: str,
    unfinished: list[str],
    sizes: Mapping[str, int],
    overwrite: bool,
    lock_timeout_seconds: float,
) -> Files:
    """Puts finished shards beside a path, and their index, durably; removes what was there.

    A shard that has got its name is added to `unfinished`, unless a file had it before.
    """
    directory, index = os.path.dirname(path), path + INDEX_SUFFIX
    output.sync()
    paths = [os.path.join(directory, name) for name in sizes]
    with locked_directory(directory, lock_timeout_seconds):
        check_both(path, overwrite)
        old = old_files(path, but=(index, *paths))
        for shard, target in zip(list(unfinished), paths, strict=True):
            if not os.path.lexists(target):
                unfinished.append(target)
            system.replace(shard, target)
        sync_directory(directory)
        put_durably(output.path, index, overwrite, instead_of=path)
        remove_all(old)
    return {index: output.nbytes, **dict(zip(paths, sizes.values(), strict=True))}


def check_both(path: str, overwrite: bool) -> None:
    """Raises `SaveTargetError` or `TargetExistsError` where no file, or no index, can be put at the path."""
    if is_remote(path):
        return  # the upload asks the server
    check_target(path, overwrite=overwrite)
    check_target(path + INDEX_SUFFIX, overwrite=overwrite)


def _layouts(
    state: SerializedState,
    groups: Sequence[Mapping[str, torch.Tensor | LazyTensor]],
    path: str,
    schema: str | None,
    entries: Mapping[str, str],
) -> list[Layout]:
    """Plans the file of a state, or the shards for groups of its tensors. Raises `UnsavableError`."""

    def metadata(digests: Mapping[str, str]) -> dict[str, str]:
        text = state.manifest(schema, digests)
        check_size(text)
        return {**entries, KEY: text}

    def check_index(groups: Sequence[Mapping[str, object]]) -> None:
        names = shard_names(path, [""] * len(groups))
        text = metadata(blank_digests(state.tensors))[KEY]
        index_of(dict(zip(names, groups, strict=True)), state.nbytes, text)

    try:
        if not groups:
            return [layout(state.tensors, metadata)]
        check_index(groups)
        return [layout(group, lambda _: entries) for group in groups]
    except ValueError as error:
        remedy = "save the parts in files of their own; large values are better kept as tensors or arrays"
        if not groups:
            with suppress(ValueError):
                check_index([state.tensors])
                remedy = "take a shard_size_bytes= that makes several files, each of which has a header of its own"
        raise UnsavableError(
            "this is more than the header or the index of safetensors files holds",
            where=path,
            found=error,
            remedy=remedy,
        ) from error


@contextmanager
def _removed_on_error(output: Output, index: str) -> Iterator[list[str]]:
    """Yields a list for the paths of shards, which are removed when the block raises.

    They stay if `output` has become the index that names them: an interrupt may arrive when the save is complete, also
    while this block and that of `output` are left, in any order.
    """
    paths: list[str] = []
    status = os.fstat(output.descriptor)  # now: the descriptor may be closed before the paths are removed
    try:
        yield paths
    except BaseException:
        is_saved = False
        with suppress(OSError):
            is_saved = os.path.samestat(status, os.lstat(index))
        if not is_saved:
            remove_all(path for path in paths if os.path.lexists(path))
        raise
