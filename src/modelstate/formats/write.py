"""A state as safetensors, in one file or in shards: at its path in full, or what was there before.

A single file goes before an index of the same name, so whichever of the two is new, one rename puts it in force.
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
    made: SerializedState,
    path: str,
    *,
    schema: str | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = True,
    threads: int | None = None,
    metadata: Mapping[str, str] | None = None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> dict[str, int]:
    """Writes a state, and returns the paths of the files that it is in, with their bytes; of shards the index is first.

    `metadata` is further text, which every tool reads that lists what a file says of itself.

    Raises `UnsavableError` for more than a header holds, and what `write_file` raises. Then what was there before is
    there, and nothing else.
    """
    said = {**(metadata or {}), **SHARD_METADATA}
    whole = _checked(made, path, schema, said)
    if shard_bytes is None or sum(map(nbytes_of, made.tensors.values())) <= shard_bytes:
        return write_file(
            path,
            lambda output: write(output, whole, threads),
            overwrite=overwrite,
            lock_timeout_seconds=lock_timeout_seconds,
        )
    return _write_shards(made, path, schema, shard_bytes, overwrite, threads, said, lock_timeout_seconds)


def write_file(
    path: str,
    write_to: Callable[[Output], object],
    *,
    overwrite: bool,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> dict[str, int]:
    """Puts a file at a path, and takes away the index and the shards that were there. Returns the path and its bytes.

    Raises `TargetExistsError` where something is there that may not be replaced, `SaveTargetError` where it is no
    file, `DirectoryLockedError`, `WriteFailedError` for an I/O error, and what `write_to` raises.
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
    """Raises what keeps a file, or an index, from being put at the path."""
    check_target(path, overwrite=overwrite)
    check_target(path + INDEX_SUFFIX, overwrite=overwrite)


def _checked(made: SerializedState, path: str, schema: str | None, said: Mapping[str, str]) -> Layout:
    def metadata(digests: dict[str, str]) -> dict[str, str]:
        text = made.manifest(schema, digests)
        check_size(text)
        return {**said, KEY: text}

    try:
        return layout(made.tensors, metadata)  # type: ignore[arg-type]
    except ValueError as error:
        raise UnsavableError(
            "this is more than the header of a safetensors file holds",
            where=path,
            found=error,
            remedy="save the parts in files of their own; large values are better kept as tensors or arrays",
        ) from error


def _write_shards(
    made: SerializedState,
    path: str,
    schema: str | None,
    shard_bytes: int,
    overwrite: bool,
    threads: int | None,
    said: Mapping[str, str],
    lock_timeout_seconds: float,
) -> dict[str, int]:
    directory, index = os.path.dirname(path), path + INDEX_SUFFIX
    groups = in_shards(made.tensors, shard_bytes)
    digests: dict[str, str] = {}
    contents: list[str] = []
    sizes: list[int] = []
    check_both(path, overwrite)
    mode = existing_mode(index, path)
    unfinished = unfinished_file(path, mode, lock_timeout_seconds)
    with write_errors(path), unfinished as output, _litter(output, index) as litter:
        for number, group in enumerate(groups, 1):
            litter.append(numbered_path(output, number))
            with new_file(litter[-1], mode) as shard:
                written = write(shard, layout(group, lambda _: said), threads)
            digests |= written.digests
            contents.append(written.content)
            sizes.append(shard.nbytes)
        names = shard_names(path, contents)
        total_bytes = sum(map(nbytes_of, made.tensors.values()))
        output.append(index_of(dict(zip(names, groups, strict=True)), total_bytes, made.manifest(schema, digests)))
        output.sync()
        paths = [os.path.join(directory, name) for name in names]
        with locked_directory(directory, lock_timeout_seconds):
            check_both(path, overwrite)
            old = old_files(path, but=(index, *paths))
            for beside, at in zip(list(litter), paths, strict=True):
                if not os.path.lexists(at):
                    litter.append(at)
                write_system.replace(beside, at)
            sync_directory(directory)
            put_durably(output.path, index, overwrite, instead_of=path)
            remove_all(old)
        return {index: output.nbytes, **dict(zip(paths, sizes, strict=True))}


@contextmanager
def _litter(output: Output, index: str) -> Iterator[list[str]]:
    """Paths of shards that are taken away when the block raises, unless `output` has become the index that names them:
    an interrupt can come when that is done, or cannot be undone."""
    paths: list[str] = []
    try:
        yield paths
    except BaseException:
        if not is_at(output, index):
            remove_all(path for path in paths if os.path.lexists(path))
        raise
