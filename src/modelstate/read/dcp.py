"""Directories that torch.distributed.checkpoint writes: `.metadata`, and what each rank saved in `*.distcp` files.

In these files each chunk of a tensor, and each value that is no tensor, is an archive of `torch.save`. The archives
lie one behind another, and `.metadata` has their names and places.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from modelstate.errors import (
    DuplicateNameError,
    NotACheckpointError,
    OpenError,
    PickleError,
    TensorSizeError,
    UnsupportedTensorError,
)
from modelstate.read import torch_zip
from modelstate.read.construct import construct
from modelstate.read.dcp_metadata import ChunkedTensor, Index, Metadata, Place, read_metadata
from modelstate.read.json_text import excerpt
from modelstate.read.pickled import Refused
from modelstate.read.sharded import safe_paths
from modelstate.read.source_file import SourceFile
from modelstate.read.torch_globals import TorchGlobals
from modelstate.read.torch_zip import Archive
from modelstate.spec import ByteRange, Checksum, Contents, StoredComposite, StoredTensor

FORMAT = "dcp"
METADATA = ".metadata"
KIND = "dcp shards"
_HEAD_BYTES = 512


def matches(head: bytes, path: str) -> bool:
    """Whether a file that begins with `head` is the metadata of a checkpoint; a damaged one is known by its name."""
    by_content = head.startswith(b"\x80") and b"torch.distributed.checkpoint" in head[:_HEAD_BYTES]
    return by_content or os.path.basename(path) == METADATA


def part_of_one(path: str, head: bytes) -> NotACheckpointError | None:
    """The error for a `.distcp` file that is opened by itself."""
    if not path.endswith(".distcp") or not torch_zip.matches(head):
        return None
    return NotACheckpointError(
        "this is a part of a checkpoint of torch.distributed.checkpoint; what is in it stands in .metadata",
        where=path,
        remedy=f"open its directory: {os.path.dirname(path) or '.'}",
    )


def read(path: str, *, allow: Sequence[object] = (), skip_forbidden: bool = False) -> Contents:
    """The table of contents of the checkpoint whose metadata is at `path`.

    Reads the metadata, the tables of all archives, and the values that are no tensors. A tensor that was saved in
    several chunks is a composite of them.

    Args:
        path: The file `.metadata`.
        allow: As of `torch_zip.read`, for the values that are no tensors. In the metadata these names may stand, but
            nothing is made of them.
        skip_forbidden: Leave placeholders in place of what is not allowed, rather than raise.

    Raises:
        ForbiddenGlobalError: The metadata or a value asks for what is not allowed.
        UnsafePathError: The metadata names a file outside its directory.
        MissingShardError: A file that the metadata names is not there.
        TensorRangeError: Chunks overlap, leave holes, or lie in the same bytes.
        TensorSizeError: A chunk is not what the metadata says.
        UnsupportedTensorError: As of `torch_zip.read`; and what was compressed as it was written.
        OpenError: A file is damaged; a subclass says how.
    """
    metadata = read_metadata(path, allow=allow, skip_forbidden=skip_forbidden)
    directory = os.path.dirname(path)
    files = sorted({place.file for place in metadata.places.values()})
    paths = dict(zip(files, safe_paths(path, directory, files), strict=True))
    names = TorchGlobals(allow)
    archives = _read_archives(metadata.places, paths, names)
    made: Any = construct(
        {name: _described(name, item, archives) for name, item in metadata.items.items()},
        path=directory,
        data_nbytes=sum(archive.pickle_nbytes for archive in archives.values()),
        names=names,
        skip_forbidden=skip_forbidden,
    )
    for name, item in metadata.items.items():
        if item is not None:
            made[name] = _tensor(item, made[name], f"{directory}: {name}")
    checksums: dict[ByteRange, Checksum] = {}
    for archive in archives.values():
        checksums.update(archive.checksums)
    return Contents(FORMAT, _tree(made, metadata, path), (path, *paths.values()), checksums=checksums)


def _read_archives(
    places: Mapping[Index, Place], paths: Mapping[str, str], names: TorchGlobals
) -> dict[Index, Archive]:
    found: dict[Index, Archive] = {}
    ordered = sorted(places.items(), key=lambda item: (item[1].file, item[1].start))
    for name, path in paths.items():
        with SourceFile(path) as file:
            while len(found) < len(ordered) and ordered[len(found)][1].file == name:
                index, place = ordered[len(found)]
                found[index] = _read_archive(file, index, place, names)
    return found


def _read_archive(file: SourceFile, index: Index, place: Place, names: TorchGlobals) -> Archive:
    try:
        section = file.section(place.start, place.nbytes, index[0])
        head = section.read(0, min(4, place.nbytes), "its beginning")
        if not torch_zip.matches(head):
            raise PickleError(
                "this is no archive of torch.save",
                expected=f"one at byte {place.start}, as the metadata says",
                found=excerpt(head),
                remedy="copy the checkpoint again",
            )
        return torch_zip.read_archive(section, names)
    except OpenError as error:
        inner = error.where.removeprefix(file.path).lstrip(": ")
        error.where = f"{file.path}: {index[0]}" + (f": {inner}" if inner else "")
        raise


def _described(name: str, item: ChunkedTensor | None, archives: Mapping[Index, Archive]) -> object:
    if item is None:
        return archives[name, None].value
    return [archives[name, chunk.offsets].value for chunk in item.chunks]


def _tensor(item: ChunkedTensor, found: Sequence[object], where: str) -> object:
    """The tensor that the chunks make up."""
    parts: list[StoredTensor | StoredComposite] = []
    for chunk, part in zip(item.chunks, found, strict=True):
        if isinstance(part, Refused):
            return part
        if not isinstance(part, StoredTensor | StoredComposite):
            raise PickleError("a chunk of a tensor is none", where=where, found=type(part).__name__)
        if part.dtype != item.dtype or part.shape != chunk.shape:
            raise TensorSizeError(
                "a chunk of a tensor is not what the metadata says",
                where=where,
                expected=f"{item.dtype} of shape {chunk.shape}",
                found=f"{part.dtype} of shape {part.shape}",
                remedy="copy the checkpoint again: its files may be of two checkpoints",
            )
        if part.shape == item.shape:
            # Ranks for which there was nothing have saved empty chunks beside it.
            return part
        parts.append(part)
    return _assembled(item, parts, where)


def _assembled(item: ChunkedTensor, parts: Sequence[StoredTensor | StoredComposite], where: str) -> StoredComposite:
    stored: list[StoredTensor] = []
    for part in parts:
        if isinstance(part, StoredComposite):
            raise UnsupportedTensorError(f"chunks of kind {part.kind} are not supported", where=where)
        if part.nbytes > part.storage.nbytes:
            # Assembling it would take memory that the file need not have.
            raise TensorSizeError(
                "a chunk has more elements than bytes", where=where, expected=part.nbytes, found=part.storage.nbytes
            )
        stored.append(part)
    boxes = [
        tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.shape, strict=True))
        for chunk in item.chunks
    ]

    def build(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = torch.empty(item.shape, dtype=item.dtype, device="cpu")
        for box, tensor in zip(boxes, tensors, strict=True):
            whole[box].copy_(tensor)
        return whole

    return StoredComposite(kind=KIND, dtype=item.dtype, shape=item.shape, parts=tuple(stored), build=build)


# The state dict.


class _Node(dict[str | int, Any]):
    """A container of the state dict, as opposed to a dict that is a value."""


def _tree(values: Mapping[str, object], metadata: Metadata, where: str) -> dict[Any, Any]:
    """The state dict, with its items at their paths."""
    root = _Node()
    for name, path in metadata.paths.items():
        node = root
        for step in path[:-1]:
            below = node.setdefault(step, _Node())
            if type(below) is not _Node:
                raise _conflict(where, name)
            node = below
        if path[-1] in node:
            raise _conflict(where, name)
        node[path[-1]] = values[name]
    return _with_positions({key: _finished(value, where, name=str(key)) for key, value in root.items()})


def _conflict(where: str, name: str) -> DuplicateNameError:
    return DuplicateNameError("two items have one path in the state dict", where=where, found=name)


def _finished(node: object, where: str, name: str) -> object:
    if type(node) is not _Node:
        return node
    steps = list(node)
    if all(type(step) is str for step in steps):
        return _with_positions({step: _finished(value, where, f"{name}.{step}") for step, value in node.items()})
    if not all(type(step) is int for step in steps):
        raise PickleError("the metadata is damaged: a list with keys, or a dict with indices", where=where, found=name)
    return list(_items(node, where, name))


def _with_positions(node: dict[Any, Any]) -> dict[Any, Any]:
    """The state of an optimizer by the positions of its parameters, which are integers; any other dict as it is.

    The writer turns all keys of dicts into text. `Optimizer.load_state_dict` ignores the state of a parameter "0", so
    keys that `param_groups` lists as integers become integers again.
    """
    groups, state = node.get("param_groups"), node.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict):
        return node
    listed = [group.get("params") for group in groups if isinstance(group, dict)]
    several = [params for params in listed if isinstance(params, list | tuple)]
    positions = {str(param): param for params in several for param in params if type(param) is int}
    return {**node, "state": {positions.get(key, key): values for key, values in state.items()}}


def _items(node: _Node, where: str, name: str) -> Iterator[object]:
    """The items of a list; None where nothing was saved, as of an empty dict."""
    length = 1 + max(int(step) for step in node)
    if length > 1000 + 10 * len(node):
        raise PickleError("the metadata is damaged: a list with few items and many indices", where=where, found=name)
    return (_finished(node.get(index), where, f"{name}.{index}") for index in range(length))
