"""Uploads a state into a bucket: one object, or shards with an index.

The object that a reader opens is written last, so a reader has the old checkpoint or the new one, in full. A bucket has
no rename: shards get their names before their content is known, so these contain a random number in place of a digest.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from modelstate.errors import TargetExistsError, WriteFailedError
from modelstate.formats.safetensors import Layout, Written, write_in_order
from modelstate.formats.sharded import INDEX_SUFFIX, WEIGHT_MAP, Kind, index_of, own_shards, shard_names
from modelstate.remote.location import Location, locate
from modelstate.remote.requests import cleanup
from modelstate.remote.upload import ObjectWriter, get, head, is_absent, new_object, remove

if TYPE_CHECKING:
    import torch

    from modelstate.formats.block_writer import LazyTensor


@runtime_checkable
class Uploader(Protocol):
    """Writes the objects of a checkpoint, in this process alone or together with other ranks."""

    def shards(self, tensors: Mapping[str, Kind]) -> list[dict[str, Kind]]:
        """Returns the shards of tensors, where the caller has no size for them; none where they become one object."""

    def upload(
        self,
        layouts: Sequence[Layout],
        names: Callable[[], Sequence[str]],
        compared: Callable[[], Mapping[str, object]],
    ) -> Sequence[Written]:
        """Writes shards, and replaces what is there, as `modelstate.formats.writing.Writer.write` writes files.

        Args:
            layouts: What the shards hold. Their metadata do not depend on digests.
            names: Returns their URLs. Of several processes only the first one calls it.
            compared: As in `write`.

        Returns:
            As in `write`. After an error the caller removes the shards, in the first process.
        """

    def upload_object(self, location: Location, planned: Layout, *, overwrite: bool) -> Written:
        """Writes one object in this process."""

    def commit(self, put: Callable[[], dict[str, int]]) -> dict[str, int]:
        """As that of `modelstate.formats.writing.Writer`."""


def upload_checkpoint(
    path: str,
    layouts: Sequence[Layout],
    groups: Sequence[Mapping[str, torch.Tensor | LazyTensor]],
    writer: Uploader,
    overwrite: bool,
    compared: Callable[[], Mapping[str, object]],
    manifest_of: Callable[[Mapping[str, str]], str],
) -> dict[str, int]:
    """Writes an object, or shards and then their index, into a bucket, and removes what was there.

    Args:
        path: The URL of the target.
        layouts: What the objects hold: that of the state, or those of the shards.
        groups: The tensors of each shard; none for one object.
        writer: The process or the ranks that write them.
        overwrite: Whether an existing checkpoint is replaced.
        compared: Returns what must be equal on all ranks.
        manifest_of: Returns the manifest for the digests of the tensors.

    Returns:
        The sizes of the objects by URL; for shards the index is first.

    Raises:
        TargetExistsError: A checkpoint is at the URL, and `overwrite` is false.
        WriteFailedError: The server refuses an object, or does not answer.
    """
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
            raise TargetExistsError("something is there already", where=where.url)
        unique = shard_names(path, [secrets.token_hex(16)] * len(groups))
        shards[:] = [locate(f"{directory}/{name}") for name in unique]
        return [shard.url for shard in shards]

    def put() -> dict[str, int]:
        nonlocal is_unknown
        if not groups:
            writer.upload_object(where, layouts[0], overwrite=overwrite)
            files = {path: layouts[0].nbytes}
        else:
            digests = {name: value for file in written for name, value in file.digests.items()}
            total_bytes = sum(tensor.nbytes for group in groups for tensor in group.values())
            by_name = {shard.key.rpartition("/")[2]: group for shard, group in zip(shards, groups, strict=True)}
            text = index_of(by_name, total_bytes, manifest_of(digests))
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


def upload_object(
    location: Location,
    planned: Layout,
    *,
    overwrite: bool,
    threads: int | None = None,
    on_written: Callable[[int], None] = lambda _: None,
) -> Written:
    """Writes one object into a bucket. Raises what `modelstate.remote.upload.new_object` raises."""

    def upload(_: Written) -> AbstractContextManager[ObjectWriter]:
        return new_object(location, planned.nbytes, overwrite=overwrite)

    return write_in_order(upload, planned, threads, on_written)


def index_of_object(path: str) -> bytes | None:
    """The index that a save to this URL replaces; None where there is none. Raises `WriteFailedError`."""
    return get(locate(path + INDEX_SUFFIX))


def remove_index(path: str, index: bytes, *, keeps_index: bool = False) -> None:
    """Removes an index that a save to a URL has replaced, and its shards. Readers have the new checkpoint already."""
    with suppress(WriteFailedError):
        if not keeps_index:  # one that was written meanwhile is that of another save
            remove([locate(path + INDEX_SUFFIX)], lambda: index_of_object(path) == index)
        remove(_own_shards(path, index))


def _own_shards(path: str, index: bytes) -> list[Location]:
    """The shards that an index of an earlier save to a path names."""
    directory, mine = path.rpartition("/")[0], own_shards(path)
    try:
        named = set(json.loads(index)[WEIGHT_MAP].values())
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
    return [locate(f"{directory}/{shard}") for shard in named if isinstance(shard, str) and mine.fullmatch(shard)]
