"""Reads directories of torch.distributed.checkpoint: `.metadata`, and the `*.distcp` files of each rank.

torch writes `.metadata` as a pickle of its own classes, and loads it without restriction. This reader only describes
the pickle: none of its classes is created, and the content is extracted from the description and checked. The file has
no checksum, so whatever it states twice must agree.

In the `*.distcp` files each chunk of a tensor, and each value other than a tensor, is an archive of `torch.save`. The
archives follow one another, and `.metadata` has their names and places.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import torch

from modelstate.errors import DamagedFileError, OpenError, UnsupportedTensorError
from modelstate.formats import torch_zip
from modelstate.formats.construct import construct, forbidden
from modelstate.formats.recognise import Format, recognise
from modelstate.formats.sharded import safe_paths
from modelstate.formats.torch_globals import MAX_INDEX, TorchGlobals, dims, shape_of
from modelstate.formats.torch_zip import Archive
from modelstate.formats.tree import Contents
from modelstate.formats.unpickle import Allowed, DeferredCall, Keys, damaged, no_storage, places_in, typed, unpickle
from modelstate.io.files import SourceFile
from modelstate.spec import Assemble, Box, ByteRange, Refused, StoredComposite, StoredTensor, box_of
from modelstate.text_format import excerpt

_DCP = "torch.distributed.checkpoint."
_BEFORE_2_3 = "torch.distributed._shard.sharded_tensor.metadata."
_MAX_SHARDED_DIMS = 8
_MAX_PATH_STEPS = 100
_TRY_TORCH = "dcp_to_torch_save(directory, path) of torch.distributed.checkpoint.format_utils may be able to convert it"

Path = tuple[str | int, ...]
"""The keys, and the indices of lists, that lead to a value in the state dict."""
Index = tuple[str, tuple[int, ...] | None]
"""A name, and the offsets of a chunk if the item is a tensor."""


Items = dict[str, Assemble | None]
"""The items by the names under which they were written: how a tensor is put together from its chunks, which cover it
exactly; None for a value other than a tensor."""


def _read_metadata(
    file: SourceFile, *, allow: Sequence[object], skip_forbidden: bool
) -> tuple[Items, dict[Index, ByteRange], dict[str, Path]]:
    """Reads and checks a `.metadata` file.

    Besides torch's classes the file may contain the allowed ones, also in the place of torch's, as subclasses of other
    libraries do. They are not created either, and a name that is given as text is not imported.

    Args:
        file: The file.
        allow: Additional classes that the file may contain.
        skip_forbidden: Whether other names are ignored instead of raising.

    Returns:
        The items; the place of every chunk and of every value other than a tensor, which do not overlap, in files
        relative to the directory; and the path of each item in the state dict, in its order.

    Raises:
        ForbiddenGlobalError: The file contains another name.
        DamagedFileError: The file is damaged, chunks overlap or do not cover their tensor, two items share bytes, or a
            size is impossible.
        TruncatedFileError: The file ends too early.
        UnsupportedTensorError: Items were transformed when they were written.
    """
    path, data = file.path, file.read(0, file.nbytes, "the metadata")
    others = ((_StandIn, entry) if isinstance(entry, str) else entry for entry in allow)
    names = _Names([*others])
    with places_in(path):
        value, end = unpickle(data, 0, no_storage, names.find)
        if names.refused and not skip_forbidden:
            refused = [(name, "") for name in sorted(names.refused)]
            what = "the metadata asks for classes or functions that are not allowed"
            raise forbidden(what, path, refused, can_skip=True)
        if end != len(data):
            raise damaged("it goes on after its end", f"{len(data) - end} more bytes")
        fields = _state(value, "metadata.Metadata")
        items = _items(typed(fields.get("state_dict_metadata"), dict, "the table of contents is missing"))
        places = _places(typed(fields.get("storage_data"), dict, "the table of places is missing"), items)
        return items, places, _paths(items, fields.get("planner_data"))


class _Names(TorchGlobals):
    """As `TorchGlobals`, with one class in the place of those of torch.distributed.checkpoint and of paths."""

    def find(self, name: str) -> object:
        """Returns what a name stands for; a `Refused` if it is not allowed."""
        return Allowed(name, _StandIn) if name.startswith(_OWN) else super().find(name)


class _StandIn:
    """Replaces every class that the metadata may name; no object of it is created."""


_OWN = (_DCP, _BEFORE_2_3, "pathlib.")
"""The path is that of the directory that was passed to `save`."""
_PROPERTIES = (f"{_DCP}metadata.TensorProperties", f"{_BEFORE_2_3}TensorProperties")


# Checking the description.


def _state(node: object, kind: str) -> dict[str, object]:
    """The fields of an object of a class of torch.distributed.checkpoint, or of an allowed class in its place."""
    if type(node) is not DeferredCall or (node.name != _DCP + kind and node.name.startswith(_OWN)):
        raise damaged(f"a {kind.rpartition('.')[2]} is missing", getattr(node, "name", type(node).__name__))
    state = node.states[0] if node.states else {}
    if len(node.states) > 1 or type(state) is not dict:
        raise damaged(f"a {kind.rpartition('.')[2]} is not valid", type(state).__name__)
    return state


def _items(table: dict[object, object]) -> Items:
    items: Items = {}
    seen: dict[int, Assemble] = {}
    for key, node in table.items():
        name = typed(key, str, "the name of an item is missing")
        if type(node) is DeferredCall and node.name == f"{_DCP}metadata.BytesStorageMetadata":
            items[name] = None
            continue
        # A pickle may use one description for many names, which must not cost more than its bytes.
        if id(node) not in seen:
            with places_in(name):
                seen[id(node)] = _tensor_metadata(node)
        items[name] = seen[id(node)]
    return items


def _tensor_metadata(node: object) -> Assemble:
    fields = _state(node, "metadata.TensorStorageMetadata")
    shape, dtype = shape_of(fields.get("size")), _dtype(fields.get("properties"))
    boxes: list[Box] = []
    for chunk in typed(fields.get("chunks"), list, "the list of chunks is missing"):
        box = _state(chunk, "metadata.ChunkStorageMetadata")
        offsets, sizes = dims(box.get("offsets")), dims(box.get("sizes"))
        is_inside = len(offsets) == len(sizes) == len(shape) and all(
            0 <= offset <= offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not is_inside:
            raise _not_covered("a chunk lies outside its tensor", shape, f"shape {sizes} at {offsets}")
        boxes.append(tuple(range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)))
    _check_cover(shape, boxes)
    return Assemble(shape, dtype, tuple(boxes))


def _dtype(node: object) -> torch.dtype:
    """The dtype of a pickled `TensorProperties`.

    Its state is (dtype, layout, requires_grad, memory format, pin_memory). torch 2.15 appends the strides of the
    tensor, or None. They are not needed: each chunk states its own strides.
    """
    is_known = type(node) is DeferredCall and node.name in _PROPERTIES
    state: object = node.states[0] if is_known and isinstance(node, DeferredCall) and len(node.states) == 1 else None
    dtype, strides = (state[0], state[5:]) if type(state) is tuple and len(state) in (5, 6) else (None, ())
    if not isinstance(dtype, torch.dtype):
        raise damaged("the dtype of a tensor is missing", type(dtype).__name__)
    if strides not in ((), (None,)):
        dims(strides[0])
    return dtype


def _starts(box: Box) -> tuple[int, ...]:
    return tuple(indices.start for indices in box)


def _check_cover(shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raises `DamagedFileError` unless each element is in exactly one chunk.

    A box is determined by its corners, each signed by the number of its coordinates that are upper bounds: they are the
    mixed derivative of the function that is 1 in the box and 0 outside. So the corners of the chunks add up to those of
    the tensor exactly if the chunks add up to the tensor, in any arrangement.
    """
    split = [at for at, size in enumerate(shape) if any(len(box[at]) != size for box in boxes)]
    if len(split) > _MAX_SHARDED_DIMS:
        raise UnsupportedTensorError(
            f"a tensor that is split along {len(split)} dimensions is not supported",
            expected=f"at most {_MAX_SHARDED_DIMS}",
            remedy=_TRY_TORCH,
        )
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in [*((1, box) for box in boxes), (-1, box_of(shape, ()))]:
        if all(box):  # dimensions that are not split need no corners, unless the box is empty along them
            for ends in product(*(((box[at].start, 1), (box[at].stop, -1)) for at in split)):
                corners[tuple(at for at, _ in ends)] += sign * math.prod(factor for _, factor in ends)
    if any(corners.values()):
        saved = sum(math.prod(map(len, box)) for box in boxes)
        what = "the chunks of a tensor overlap, or leave holes"
        raise _not_covered(what, shape, f"{saved} of {math.prod(shape)} elements in chunks")


def _not_covered(what: str, shape: tuple[int, ...], found: str) -> DamagedFileError:
    return DamagedFileError(
        what,
        expected=f"chunks that make up a tensor of shape {shape}",
        found=found,
        remedy="copy the checkpoint again; if it was saved so, save it without the rank that failed",
    )


def _places(table: dict[object, object], items: Items) -> dict[Index, ByteRange]:
    """The places of the items. Raises `DamagedFileError` where one has none, or two share bytes."""
    written: dict[Index, ByteRange] = {}
    keys = Keys()
    for key, node in table.items():
        index, info = _state(key, "metadata.MetadataIndex"), _state(node, "filesystem._StorageInfo")
        name, offset = typed(index.get("fqn"), str, "the name of a place is missing"), index.get("offset")
        at = name, None if offset is None else dims(offset)
        keys.check(at[1])
        place = ByteRange(
            typed(info.get("relative_path"), str, "the file of an item is missing"),
            typed(info.get("offset"), int, "the place of an item is missing"),
            typed(info.get("length"), int, "the length of an item is missing"),
        )
        if not 0 <= place.start < MAX_INDEX or not 0 <= place.nbytes < MAX_INDEX:
            raise DamagedFileError("an item lies nowhere", where=name, found=place)
        transforms = info.get("transform_descriptors")
        if transforms:
            raise UnsupportedTensorError(
                "items that were compressed or otherwise transformed as they were written are not supported",
                where=name,
                found=str(transforms)[:200],
                remedy="load it with the extensions that it was saved with, and save it without",
            )
        written[at] = place
    ordered = sorted(written.items(), key=lambda item: item[1])
    for (first, before), (second, after) in pairwise(ordered):
        if before.path == after.path and before.start + before.nbytes > after.start:
            found = f"{first[0]} and {second[0]}, at byte {after.start}"
            raise DamagedFileError("two items lie in the same bytes", where=after.path, found=found)
    places: dict[Index, ByteRange] = {}
    for name, item in items.items():
        for offsets in [None] if item is None else map(_starts, item.boxes):
            if (name, offsets) not in written:
                raise damaged("the place of an item is missing", name + (f", chunk at {offsets}" if offsets else ""))
            places[name, offsets] = written[name, offsets]
    return places


def _paths(items: Items, mapping: object) -> dict[str, Path]:
    """The paths of the items, as the planner stored them; without them, the names themselves."""
    if type(mapping) is not dict:
        return {name: (name,) for name in items}
    paths: dict[str, Path] = {}
    for name, path in mapping.items():
        is_path = type(path) is tuple and 0 < len(path) <= _MAX_PATH_STEPS and type(path[0]) is str
        is_valid = type(name) is str and is_path
        if not is_valid or not all(type(step) is str or (type(step) is int and 0 <= step < MAX_INDEX) for step in path):
            raise damaged("a path of the state dict is not valid", str(name)[:200])
        if name != ".".join(map(str, path)):
            raise damaged("a name is not that of its path", f"{str(name)[:200]!r} and {str(path)[:200]}")
        # The table may contain values of other ranks that were not written.
        if name in items:
            paths[name] = path
    for name in items:
        if name not in paths:
            raise damaged("an item has no path in the state dict", name)
    return paths


FORMAT = "dcp"
KIND = "dcp shards"


def read(file: SourceFile, *, allow: Sequence[object] = (), skip_forbidden: bool = False) -> Contents:
    """Reads the table of contents of a checkpoint.

    Reads the metadata, the tables of all archives, and the values other than tensors. A tensor that was saved in
    several chunks is a composite of them.

    Args:
        file: The file `.metadata`.
        allow: As of `torch_zip.read`, for the values other than tensors. The metadata may contain these names, too, but
            no objects of them are created.
        skip_forbidden: Leave placeholders for other classes and functions, instead of raising.

    Raises:
        ForbiddenGlobalError: The metadata or a value asks for a class or function that is not allowed.
        DamagedFileError: The metadata names a file outside its directory.
        SourceNotFoundError: A file that the metadata names is missing.
        DamagedFileError: Chunks overlap, leave holes, share bytes, or do not match the metadata.
        UnsupportedTensorError: As of `torch_zip.read`; also for items that were transformed when they were written.
        OpenError: A file is damaged; a subclass says how.
    """
    items, places, state_paths = _read_metadata(file, allow=allow, skip_forbidden=skip_forbidden)
    path, directory = file.path, os.path.dirname(file.path)
    by_file: dict[str, list[tuple[Index, ByteRange]]] = {}
    for index, place in sorted(places.items(), key=lambda item: item[1]):
        by_file.setdefault(place.path, []).append((index, place))
    names = TorchGlobals(allow)
    fingerprints = {path: file.fingerprint}
    archives: dict[Index, Archive] = {}
    for own_path, own_places in zip(safe_paths(path, directory, [*by_file]), by_file.values(), strict=True):
        with SourceFile(own_path) as part:
            fingerprints[own_path] = part.fingerprint
            archives |= {index: _read_archive(part, index, place, names) for index, place in own_places}
    values: Any = construct(
        {
            name: archives[name, None].value
            if item is None
            else [archives[name, _starts(box)].value for box in item.boxes]
            for name, item in items.items()
        },
        path=directory,
        data_nbytes=sum(archive.pickle_nbytes for archive in archives.values()),
        names=names,
        skip_forbidden=skip_forbidden,
    )
    for name, item in items.items():
        if item is not None:
            values[name] = _tensor(item, values[name], f"{directory}: {name}")
    return Contents(
        FORMAT,
        tree_of({path: values[name] for name, path in state_paths.items()}, path),
        fingerprints,
        checksums=lambda: {
            extent: checksum for archive in archives.values() for extent, checksum in archive.checksums().items()
        },
    )


def _read_archive(file: SourceFile, index: Index, place: ByteRange, names: TorchGlobals) -> Archive:
    try:
        section = file.section(place.start, place.nbytes, index[0])
        if recognise(section.head) is not Format.TORCH_ZIP:
            raise DamagedFileError(
                "not an archive of torch.save",
                expected=f"one at byte {place.start}, as the metadata says",
                found=excerpt(section.head),
            )
        return torch_zip.read_archive(section, names)
    except OpenError as error:
        inner = error.where.removeprefix(file.path).lstrip(": ")
        error.where = f"{file.path}: {index[0]}" + (f": {inner}" if inner else "")
        raise


def _tensor(whole: Assemble, chunks: Sequence[object], where: str) -> object:
    """The tensor that consists of the chunks."""
    parts: list[StoredTensor] = []
    for box, part in zip(whole.boxes, chunks, strict=True):
        if isinstance(part, Refused):
            return part
        if not isinstance(part, StoredTensor | StoredComposite):
            raise DamagedFileError("a chunk of a tensor is not a tensor", where=where, found=type(part).__name__)
        shape = tuple(map(len, box))
        if part.dtype != whole.dtype or part.shape != shape:
            raise DamagedFileError(
                "a chunk of a tensor is not what the metadata says",
                where=where,
                expected=f"{whole.dtype} of shape {shape}",
                found=f"{part.dtype} of shape {part.shape}",
                remedy="copy the checkpoint again: its files may be of two checkpoints",
            )
        if part.shape == whole.shape:
            # The other chunks are empty: ranks without elements have saved them.
            return part
        if isinstance(part, StoredComposite):
            raise UnsupportedTensorError(
                f"chunks of kind {part.kind} are not supported", where=where, remedy=_TRY_TORCH
            )
        if part.nbytes > part.storage.nbytes:
            # Assembling it would take more memory than the file has bytes.
            raise DamagedFileError(
                "a chunk has more elements than bytes", where=where, expected=part.nbytes, found=part.storage.nbytes
            )
        parts.append(part)
    return StoredComposite(kind=KIND, dtype=whole.dtype, shape=whole.shape, parts=tuple(parts), build=whole)


# The state dict.


class _Container(dict[str | int, object]):
    """A container of the state dict, in contrast to a dict that is a value."""


def tree_of(values: Mapping[Path, object], where: str = "") -> dict[Any, object]:
    """The containers of a flat state by the paths of its values: dicts, and lists where the keys are integers.

    Raises `DamagedFileError` for paths that make no tree; `where` is the file, for messages.
    """
    root = _Container()
    for path, value in values.items():
        node: Any = root
        for step in path[:-1]:
            node = node.setdefault(step, _Container()) if type(node) is _Container else None
        if type(node) is not _Container or path[-1] in node:
            raise DamagedFileError("two items have one path in the state dict", where=where, found=_dotted(path))
        node[path[-1]] = value
    return _finished(root, where, ())  # type: ignore[return-value]


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _finished(node: _Container, where: str, path: Path) -> object:
    steps = [*node]
    nodes = {
        step: _finished(value, where, (*path, step)) if type(value) is _Container else value
        for step, value in node.items()
    }
    if not path or all(type(step) is str for step in steps):
        return with_positions(nodes)
    if not all(type(step) is int for step in steps) or 1 + max(steps) > 1000 + 10 * len(steps):
        what = "a list with keys, a dict with indices, or a list with few items and many indices"
        raise DamagedFileError(f"the metadata is damaged: {what}", where=where, found=_dotted(path))
    # None for an index under which nothing was saved, such as an empty dict.
    return [nodes.get(index) for index in range(1 + max(steps))]


def with_positions(node: dict[str | int, object]) -> dict[str | int, object]:
    """The state of an optimizer by the positions of its parameters, which are integers; any other dict as it is.

    The writer turns all keys of dicts into text. `Optimizer.load_state_dict` ignores the state of a parameter "0", so
    keys that `param_groups` lists as integers become integers again.
    """
    groups, state = node.get("param_groups"), node.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict):
        return node
    of_groups = [group.get("params") for group in groups if isinstance(group, dict)]
    several = [params for params in of_groups if isinstance(params, list | tuple)]
    positions = {str(param): param for params in several for param in params if type(param) is int}
    return {**node, "state": {positions.get(key, key): values for key, values in state.items()}}
