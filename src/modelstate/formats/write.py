"""Writes a state as safetensors, in one file or in shards: all of it is at the path afterwards, or nothing changes.

A reader prefers a single file to an index of the same name, so one rename activates the one that is written, whichever
of the two it is.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from modelstate.errors import UnsavableError
from modelstate.formats.manifest import KEY, check_size
from modelstate.formats.safetensors import Layout, layout, nbytes_of, write
from modelstate.formats.serialize import SerializedState
from modelstate.formats.sharded import INDEX_SUFFIX, in_shards, index_of, old_files, shard_names
from modelstate.io import write_system
from modelstate.io.atomic import (
    LOCK_TIMEOUT_SECONDS,
    Output,
    check_target,
    existing_mode,
    is_at,
    locked_directory,
    new_file,
    numbered_path,
    put_durably,
    remove_all,
    sync_directory,
    unfinished_file,
    write_errors,
)

SHARD_METADATA = {"format": "pt"}


def write_checkpoint(
    state: SerializedState,
    path: str,
    *,
    schema: str | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = True,
    threads: int | None = None,
    metadata: Mapping[str, str] | None = None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> dict[str, int]:
    """Writes a state to one file, or to shards with an index.

    Args:
        state: The state.
        path: The target.
        schema: The version of the state.
        shard_bytes: The largest size of the tensors of a file; a larger state is written in shards.
        overwrite: Whether existing files are replaced.
        threads: The number of threads; by default one for each processor, up to 8.
        metadata: Additional text for `__metadata__`, which other tools display.
        lock_timeout_seconds: How long to wait for the lock of the directory.

    Returns:
        The sizes of the files by path; for shards the index is first.

    Raises:
        UnsavableError: The header would be larger than the format allows.

    Also raises what `write_file` raises. The previous files are then untouched, and no other file is left.
    """
    text = {**(metadata or {}), **SHARD_METADATA}
    planned = _planned(state, path, schema, text)
    if shard_bytes is None or sum(map(nbytes_of, state.tensors.values())) <= shard_bytes:
        return write_file(
            path,
            lambda output: write(output, planned, threads),
            overwrite=overwrite,
            lock_timeout_seconds=lock_timeout_seconds,
        )
    return _write_shards(state, path, schema, shard_bytes, overwrite, threads, text, lock_timeout_seconds)


def write_file(
    path: str,
    write_to: Callable[[Output], object],
    *,
    overwrite: bool,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> dict[str, int]:
    """Puts a file at a path, and removes the index and the shards that were there. Returns the path and its size.

    Raises:
        TargetExistsError: Something is at the path, and `overwrite` is False.
        SaveTargetError: Something that is not a regular file is at the path.
        DirectoryLockedError: The lock of the directory is not free in time.
        WriteFailedError: An I/O error. What `write_to` raises passes through.
    """
    check_both(path, overwrite)
    mode = existing_mode(path, path + INDEX_SUFFIX)
    with write_errors(path), unfinished_file(path, mode, lock_timeout_seconds) as output:
        write_to(output)
        output.sync()
        with locked_directory(os.path.dirname(path), lock_timeout_seconds):
            check_both(path, overwrite)
            old = old_files(path)
            put_durably(output.path, path, overwrite)
            remove_all(old)
        return {path: output.nbytes}


def check_both(path: str, overwrite: bool) -> None:
    """Raises `SaveTargetError` or `TargetExistsError` where no file, or no index, can be put at the path."""
    check_target(path, overwrite=overwrite)
    check_target(path + INDEX_SUFFIX, overwrite=overwrite)


def _planned(state: SerializedState, path: str, schema: str | None, entries: Mapping[str, str]) -> Layout:
    def metadata(digests: dict[str, str]) -> dict[str, str]:
        text = state.manifest(schema, digests)
        check_size(text)
        return {**entries, KEY: text}

    try:
        return layout(state.tensors, metadata)  # type: ignore[arg-type]
    except ValueError as error:
        raise UnsavableError(
            "this is more than the header of a safetensors file holds",
            where=path,
            found=error,
            remedy="save the parts in files of their own; large values are better kept as tensors or arrays",
        ) from error


def _write_shards(
    state: SerializedState,
    path: str,
    schema: str | None,
    shard_bytes: int,
    overwrite: bool,
    threads: int | None,
    metadata: Mapping[str, str],
    lock_timeout_seconds: float,
) -> dict[str, int]:
    directory, index = os.path.dirname(path), path + INDEX_SUFFIX
    groups = in_shards(state.tensors, shard_bytes)
    digests: dict[str, str] = {}
    contents: list[str] = []
    sizes: list[int] = []
    check_both(path, overwrite)
    mode = existing_mode(index, path)
    unfinished = unfinished_file(path, mode, lock_timeout_seconds)
    with write_errors(path), unfinished as output, _removed_on_error(output, index) as shards:
        for number, group in enumerate(groups, 1):
            shards.append(numbered_path(output, number))
            with new_file(shards[-1], mode) as shard:
                written = write(shard, layout(group, lambda _: metadata), threads)
            digests |= written.digests
            contents.append(written.content)
            sizes.append(shard.nbytes)
        names = shard_names(path, contents)
        total_bytes = sum(map(nbytes_of, state.tensors.values()))
        output.append(index_of(dict(zip(names, groups, strict=True)), total_bytes, state.manifest(schema, digests)))
        output.sync()
        paths = [os.path.join(directory, name) for name in names]
        with locked_directory(directory, lock_timeout_seconds):
            check_both(path, overwrite)
            old = old_files(path, but=(index, *paths))
            for unfinished_shard, target in zip(list(shards), paths, strict=True):
                if not os.path.lexists(target):
                    shards.append(target)
                write_system.replace(unfinished_shard, target)
            sync_directory(directory)
            put_durably(output.path, index, overwrite, instead_of=path)
            remove_all(old)
        return {index: output.nbytes, **dict(zip(paths, sizes, strict=True))}


@contextmanager
def _removed_on_error(output: Output, index: str) -> Iterator[list[str]]:
    """Yields a list for the paths of shards, which are removed when the block raises.

    They stay if `output` has become the index that names them: an interrupt may arrive when the save is complete.
    """
    paths: list[str] = []
    try:
        yield paths
    except BaseException:
        if not is_at(output, index):
            remove_all(path for path in paths if os.path.lexists(path))
        raise
