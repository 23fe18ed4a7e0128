"""Writes a state to a path or to the URL of an object in a bucket: one file, or shards with an index.

All of a state is at its place after a save, or nothing has changed. A reader prefers a single file to an index of the
same name. So one rename, or one upload, activates the one that is written, whichever of the two it is. What was there
before is removed after that.

A bucket has no rename: shards get their names before their content is known. So these contain a random number in place
of a digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from modelstate.errors import TargetExistsError, UnsavableError, WriteFailedError
from modelstate.formats.manifest import KEY, WEIGHT_MAP, check_size, index_of
from modelstate.formats.safetensors import FileLayout, Written, blank_digests, layout, write, write_in_order
from modelstate.formats.sharded import INDEX_SUFFIX, SHARD_METADATA, Kind, in_shards, old_files, own_shards, shard_names
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


class CheckpointWriter:
    """Writes the files or objects of a checkpoint. This class does so in this process, others with several ranks.

    Args:
        threads: The number of threads that write.
        on_written: Called with numbers of bytes of tensors that were written.
    """

    of_shard: OfShard | None = None
    """The argument of `serialize` for DTensors; None where they are refused."""

    def __init__(self, threads: int | None = None, on_written: Callable[[int], None] = lambda _: None) -> None:
        self._threads, self._on_written = threads, on_written

    def planning(self) -> AbstractContextManager[None]:
        """A block before `write`, whose errors reach all processes."""
        return nullcontext()

    def write(
        self, layouts: Sequence[FileLayout], outputs: Outputs, compared: Callable[[], Mapping[str, object]]
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
        written = []
        with closing(outputs()) as opened:
            for planned, output in zip(layouts, opened, strict=True):
                written.append(write(output, planned, self._threads, self._on_written))
        return written

    def shards(self, tensors: Mapping[str, Kind]) -> list[dict[str, Kind]]:
        """Returns the objects of tensors, where the caller has no size for them; none where they become one object."""
        return []

    def upload(
        self,
        layouts: Sequence[FileLayout],
        names: Callable[[], Sequence[str]],
        compared: Callable[[], Mapping[str, object]],
    ) -> Sequence[Written]:
        """Writes shards into a bucket, and replaces what is there, as `write` writes files.

        Args:
            layouts: What the shards hold. Their metadata do not depend on digests.
            names: Returns their URLs. Of several processes only the first one calls it.
            compared: As in `write`.

        Returns:
            As in `write`. After an error the caller removes the shards, in the first process.
        """
        return [
            self.upload_object(locate(name), planned, overwrite=True)
            for name, planned in zip(names(), layouts, strict=True)
        ]

    def upload_object(self, location: Location, planned: FileLayout, *, overwrite: bool) -> Written:
        """Writes one object in this process. Raises what `modelstate.remote.upload.new_object` raises."""
        from modelstate.remote.upload import new_object  # a save to a file needs no client

        return write_in_order(
            lambda _: new_object(location, planned.nbytes, overwrite=overwrite),
            planned,
            self._threads,
            self._on_written,
        )

    def commit(self, put: Callable[[], Files]) -> Files:
        """Returns what `put` returns, which only the first process calls: it puts the files in their places."""
        return put()


def write_checkpoint(
    state: SerializedState,
    path: str,
    *,
    writer: CheckpointWriter,
    schema: str | None,
    shard_bytes: int | None,
    overwrite: bool,
    metadata: Mapping[str, str] | None,
    lock_timeout_seconds: float,
) -> Files:
    """Writes a state to one file, or to shards with an index.

    Args:
        state: The state.
        path: The target, or its URL.
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
        if is_remote(path) and not groups and state.tensors:
            groups = writer.shards(state.tensors)
        layouts = _layouts(state, groups, path, schema, text)

    def compared() -> Mapping[str, object]:
        options = {"overwrite": overwrite, "shard_size_bytes": shard_bytes, "schema": schema}
        return {**options, "metadata": text, "values": state.values()}

    if is_remote(path):
        return _upload(state, path, layouts, groups, writer, schema, overwrite, compared)
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
            output.sync()
            directory = os.path.dirname(path)
            paths = [os.path.join(directory, name) for name in names]
            with locked_directory(directory, lock_timeout_seconds):
                check_both(path, overwrite)
                old = old_files(path, but=(index, *paths))
                for shard, target in zip(list(unfinished), paths, strict=True):
                    if not os.path.lexists(target):  # it is removed after an error, unless a file had its name before
                        unfinished.append(target)
                    system.replace(shard, target)
                sync_directory(directory)
                put_durably(output.path, index, overwrite, instead_of=path)
                remove_all(old)
            sizes = (planned.nbytes for planned in layouts)
            return {index: output.nbytes, **dict(zip(paths, sizes, strict=True))}

        return writer.commit(put)


def _upload(
    state: SerializedState,
    path: str,
    layouts: Sequence[FileLayout],
    groups: Sequence[Mapping[str, torch.Tensor | LazyTensor]],
    writer: CheckpointWriter,
    schema: str | None,
    overwrite: bool,
    compared: Callable[[], Mapping[str, object]],
) -> Files:
    """Writes an object, or shards and then their index, into a bucket, and removes what was there."""
    from modelstate.remote.requests import cleanup
    from modelstate.remote.upload import head, is_absent, new_object, remove

    where, index, directory = locate(path), locate(path + INDEX_SUFFIX), path.rpartition("/")[0]
    shards: list[Location] = []
    old_index: bytes | None = None
    single: object = None
    is_unknown = False

    def names() -> list[str]:
        nonlocal old_index, single
        old_index = index_of_object(path)
        single = head(where) if old_index is not None or not overwrite or groups else None
        if not overwrite and (old_index is not None or single is not None):
            raise TargetExistsError("the target exists already", where=where.url)
        unique = shard_names(path, [os.urandom(16).hex()] * len(groups))
        shards[:] = [locate(f"{directory}/{name}") for name in unique]
        return [shard.url for shard in shards]

    def put() -> Files:
        nonlocal is_unknown
        if not groups:
            writer.upload_object(where, layouts[0], overwrite=overwrite)
            files = {path: layouts[0].nbytes}
        else:
            digests = {name: value for file in written for name, value in file.digests.items()}
            by_name = {shard.key.rpartition("/")[2]: group for shard, group in zip(shards, groups, strict=True)}
            text = index_of(by_name, state.nbytes, state.manifest(schema, digests))
            is_unknown = True
            with new_object(index, len(text), overwrite=overwrite) as output:
                output.append(text)
            if single is not None:  # readers prefer it to the index; one that was saved meanwhile is newer
                remove([where], lambda: head(where) == single)
            sizes = (planned.nbytes for planned in layouts)
            files = {index.url: len(text)} | {shard.url: nbytes for shard, nbytes in zip(shards, sizes, strict=True)}
        if old_index is not None:
            remove_index(path, old_index, keeps_index=bool(groups))
        return files

    try:
        written = writer.upload(layouts if groups else [], names, compared)
        return writer.commit(put)
    except BaseException as error:
        # Without an answer of the server the index may be there, and may name the shards.
        with suppress(WriteFailedError), cleanup():
            if not is_unknown or isinstance(error, TargetExistsError) or is_absent(index, error):
                remove(shards)
        raise


def index_of_object(path: str) -> bytes | None:
    """The index that a save to this URL replaces; None where there is none. Raises `WriteFailedError`."""
    from modelstate.remote.upload import get

    return get(locate(path + INDEX_SUFFIX))


def remove_index(path: str, index: bytes, *, keeps_index: bool = False) -> None:
    """Removes an index that a save to a URL has replaced, and its shards. Readers have the new checkpoint already."""
    from modelstate.remote.upload import remove

    with suppress(WriteFailedError):
        if not keeps_index:  # one that was written meanwhile is that of another save
            remove([locate(path + INDEX_SUFFIX)], lambda: index_of_object(path) == index)
        try:
            named = set(json.loads(index)[WEIGHT_MAP].values())
        except (ValueError, LookupError, TypeError, AttributeError):
            return
        directory, mine = path.rpartition("/")[0], own_shards(path)
        shards = (shard for shard in named if isinstance(shard, str) and mine.fullmatch(shard))
        remove([locate(f"{directory}/{shard}") for shard in shards])


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
        UnsavableError: Something that is not a regular file is at the path.
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


def check_both(path: str, overwrite: bool) -> None:
    """Raises `UnsavableError` or `TargetExistsError` where no file, or no index, can be put at the path."""
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
) -> list[FileLayout]:
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
