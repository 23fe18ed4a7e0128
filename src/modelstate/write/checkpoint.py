"""A state as safetensors, in one file or in shards: at its path in full, or what was there before."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from modelstate.errors import UnsavableError
from modelstate.read.manifest import KEY, check_size
from modelstate.read.sharded import INDEX_SUFFIX
from modelstate.write import shards
from modelstate.write.atomic import atomic_file, check, clear, put, unfinished_file
from modelstate.write.draft import Draft
from modelstate.write.files import remove_all, sync_directory, write_errors
from modelstate.write.safetensors import Layout, layout, nbytes_of, write

SHARD_METADATA = {"format": "pt"}


def write_checkpoint(
    made: Draft, path: str, *, schema: str | None = None, shard_bytes: int | None = None, overwrite: bool = True
) -> list[str]:
    """Writes a state, and returns the paths of the files that it is in; of shards the index comes first.

    Raises `UnsavableError` for more than a header holds, and what `atomic_file` raises. Then what was there before is
    there, and nothing else.
    """
    check(path, overwrite=overwrite)
    check(path + INDEX_SUFFIX, overwrite=overwrite)
    whole = _checked(made, path, schema)
    if shard_bytes is None or sum(map(nbytes_of, made.tensors.values())) <= shard_bytes:
        with atomic_file(path, overwrite=overwrite) as output:
            write(output, whole)
        with write_errors(path), _committing(path):
            old = shards.files_of(path)
            remove_all([*old, *shards.orphans_of(path, old)])
        return [path]
    with write_errors(path):
        return _write_shards(made, path, schema, shard_bytes, overwrite)


def _checked(made: Draft, path: str, schema: str | None) -> Layout:
    def metadata(digests: dict[str, str]) -> dict[str, str]:
        return {**SHARD_METADATA, KEY: made.manifest(schema, digests)}

    try:
        planned = layout(made.tensors, metadata)  # type: ignore[arg-type]
        check_size(made.manifest(schema, {}))
    except ValueError as error:
        raise UnsavableError(
            "this is more than the header of a safetensors file holds",
            where=path,
            found=error,
            remedy="save the parts in files of their own; large values are better kept as tensors or arrays",
        ) from error
    return planned


def _write_shards(made: Draft, path: str, schema: str | None, shard_bytes: int, overwrite: bool) -> list[str]:
    directory = os.path.dirname(path)
    groups = shards.in_shards(made.tensors, shard_bytes)
    digests: dict[str, str] = {}
    clear(path)
    with ExitStack() as litter, ExitStack() as opened:
        finished = []
        for group in groups:
            output = opened.enter_context(unfinished_file(path))
            digests |= write(output, layout(group, lambda _: SHARD_METADATA))
            output.sync()
            finished.append(output.path)
        count = len(groups)
        names = [shards.shard_name(path, digests, number, count) for number in range(1, count + 1)]
        text = shards.index_of(
            dict(zip(names, groups, strict=True)),
            sum(map(nbytes_of, made.tensors.values())),
            made.manifest(schema, digests),
        )
        index = path + INDEX_SUFFIX
        paths = [os.path.join(directory, name) for name in names]
        with _committing(path):
            old = shards.files_of(path)
            for beside, at in zip(finished, paths, strict=True):
                if at not in old:
                    litter.callback(remove_all, [at])
                put(beside, at, overwrite=True)
            sync_directory(directory)
            with atomic_file(index, overwrite=overwrite) as output:
                output.append(text)
            _remove_single(path, index, litter)
            litter.pop_all()
            remove_all(at for at in [*old, *shards.orphans_of(path, paths)] if at not in (index, *paths))
    return [index, *paths]


def _remove_single(path: str, index: str, litter: ExitStack) -> None:
    """Takes a single file from the path: as long as it is there, it is what counts, and the index is not."""
    if not os.path.lexists(path):
        return
    litter.callback(remove_all, [index])
    os.unlink(path)
    with suppress(OSError):
        sync_directory(os.path.dirname(path))


@contextmanager
def _committing(path: str) -> Iterator[None]:
    """Within it nobody else puts shards into this directory or takes some away."""
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        with _but_for_no_locks():
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _but_for_no_locks() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF):
            raise
