"""Shards with an index, `*.index.json`, in the layout of Hugging Face: reading, names, and the text of an index.

An index may come from an untrusted place, so it must not make this process read arbitrary files. A shard is named
relative to the directory of the index, never by an absolute path or with `..`. Symbolic links are followed: the file
system has them, not the index.

Invariants:

- The headers of all shards are read when the index is opened, each once.
- The names of shards contain a digest, `NAME-<digest>-00001-of-00003.safetensors`, so no save overwrites a shard of
  another checkpoint. Only shards with such names, or with those of other tools, are ever removed.

The shards of a step of a store with `delta=` are layers: an order of files, in which a later one replaces tensors of
the earlier ones, or has patches of them (`formats/layers.py`). `weight_map` is empty then.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from modelstate.errors import DamagedFileError, ModelStateError, SourceNotFoundError
from modelstate.formats import manifest
from modelstate.formats.manifest import (
    CHANGES,
    LAYERS,
    MAX_INDEX_BYTES,
    MAX_NAMES,
    SEAL,
    WEIGHT_MAP,
    JsonError,
    check_seal,
    digest,
    parse_json,
)
from modelstate.formats.safetensors import strings_of
from modelstate.formats.tree import Contents, Patched
from modelstate.io.files import FileFingerprint, SourceFile
from modelstate.remote.location import beside, is_remote
from modelstate.spec import Described, StoredTensors, set_version_metadata, version_metadata
from modelstate.text_format import count, listed, quote

if TYPE_CHECKING:
    import torch

    from modelstate.formats.block_writer import LazyTensor

MAX_SHARDS = 100_000
"""The most files that one index may name: a hundred times the number of the largest models."""
INDEX_SUFFIX = ".index.json"
_MOST_METADATA = 100
_MOST_PARTS = MAX_NAMES + manifest.MAX_PARTS


class Index(NamedTuple):
    """The content of an index."""

    weight_map: dict[str, str]
    """The shard of each tensor by name."""
    metadata: dict[str, str]
    """The metadata that `modelstate.save` has written."""
    fingerprint: FileFingerprint
    layers: tuple[str, ...] = ()
    """All shards in their order, where later ones replace or patch tensors of earlier ones."""

    @property
    def shards(self) -> list[str]:
        return sorted({*self.weight_map.values(), *self.layers})


def begins(head: bytes, path: str) -> bool:
    """Whether a file with this beginning, or with this path and damaged, is an index."""
    is_named = path.partition("?")[0].endswith(INDEX_SUFFIX)
    return head.lstrip(b" \t\r\n").startswith(b"{") and (is_named or f'"{WEIGHT_MAP}"'.encode() in head)


def read(index_path: str, *, read_file: Callable[[str], Contents], allow: Sequence[object] = ()) -> Contents:
    """Reads the contents of all shards: one flat dict, in the order of the shards' names and of their bytes.

    Where a save replaces the index meanwhile, the new index is read.

    Args:
        index_path: The index.
        read_file: Reads one shard, whatever its format.
        allow: Additional classes that may be created, as for `modelstate.open`.

    Raises:
        DamagedFileError: The index is damaged or too large, has a name twice, or its names are not those in the shards.
        DamagedFileError: The index names a file outside its directory.
        SourceNotFoundError: A shard is missing.

    Also raises what `read_file` raises.
    """
    index = read_index(index_path)
    while True:
        try:
            return _read(index_path, index, read_file, allow)
        except ModelStateError:
            before = index
            if is_remote(index_path):
                from modelstate.remote.file import forget

                forget(index_path)
            with suppress(ModelStateError):
                index = read_index(index_path)
            if index == before:
                raise


def _read(index_path: str, index: Index, read_file: Callable[[str], Contents], allow: Sequence[object]) -> Contents:
    weight_map, metadata, fingerprint, layers = index
    directory, shards = os.path.dirname(index_path), index.shards
    paths = safe_paths(index_path, directory, shards)
    contents = {shard: read_file(path) for shard, path in zip(shards, paths, strict=True)}
    trees = {shard: _flat(shard, contents[shard].tree, index_path) for shard in shards}
    files = {index_path: fingerprint}
    for shard in contents.values():
        files.update(shard.files)
    is_sealed = SEAL in metadata and all(shard.is_sealed for shard in contents.values())
    patched: Mapping[str, Patched] = {}
    own_metadata: dict[str, object] = {}
    if layers:
        from modelstate.formats.layers import resolve

        if manifest.KEY not in metadata:
            raise DamagedFileError("the index has layers, and no manifest", where=index_path)
        weight_map, patched, changes = resolve(index_path, layers, contents, trees)
        own_metadata[CHANGES] = changes
    elif LAYERS in metadata:
        own_metadata[CHANGES] = {}
    # Every name must be in the shard that the index states, and in no other.
    stated = dict.fromkeys(weight_map.items())
    held = {
        (name, shard): None
        for shard, tree in trees.items()
        for name in tree
        if isinstance(tree, StoredTensors) or isinstance(tree[name], Described) or name in weight_map
    }
    lacking, unnamed = (
        [f"{quote(name)} in {quote(shard)}" for name, shard in pairs if (name, shard) not in others]
        for pairs, others in ((stated, held), (held, stated))
    )
    if lacking or unnamed:
        of_index = f"{count(len(lacking), 'tensor')} of the index not in the shard"
        raise DamagedFileError(
            f"the shards do not hold what the index says: {of_index}, {len(unnamed):,} of the shards not in the index",
            where=index_path,
            expected=listed(lacking, 5),
            found=listed(unnamed, 5),
            remedy="index and shards may be of different versions, or shards of two checkpoints are mixed: download or "
            "write them again, elsewhere",
        )

    versions: OrderedDict[str, object] = OrderedDict()
    for tree in trees.values():
        versions.update(version_metadata(tree) or {})
    tables = [tree for tree in trees.values() if isinstance(tree, StoredTensors)]
    merged: Mapping[str, object]
    if len(tables) == len(trees):
        merged = StoredTensors.joined(tables)
    else:
        merged = OrderedDict((name, value) for tree in trees.values() for name, value in tree.items())
    if versions:
        set_version_metadata(merged, versions)
    formats = sorted({shard.format for shard in contents.values()})
    has_manifest = manifest.KEY in metadata
    read = Contents(
        format=" and ".join(formats),
        tree=merged,
        files=files,
        metadata=own_metadata | merged_metadata(contents),
        checksums=lambda: {
            extent: checksum for shard in contents.values() for extent, checksum in shard.checksums().items()
        },
        is_sealed=has_manifest and is_sealed,
        patched={each.tensor: each for each in patched.values()},
    )
    if not has_manifest:
        return read
    return manifest.apply(read, metadata[manifest.KEY], index_path, "metadata", allow, patched)


def read_index(index_path: str) -> Index:
    """Reads an index. Raises `OpenError` and `ChecksumError`."""
    try:
        with SourceFile(index_path) as file:
            if file.nbytes > MAX_INDEX_BYTES:
                what = "it is larger than that of any model"
                raise JsonError(what, f"{file.nbytes:,} bytes", f"at most {MAX_INDEX_BYTES:,} bytes")
            text, fingerprint = file.read(0, file.nbytes, "the index"), file.fingerprint
        if sum(map(text.count, (b"[", b"{", b","))) > _MOST_PARTS:
            raise JsonError(f"it has more than {_MOST_PARTS:,} parts")
        fields = parse_json(text)
        weight_map = strings_of(fields.get(WEIGHT_MAP, {}), MAX_NAMES, MAX_SHARDS)
        is_own = f'"{SEAL}"'.encode() in text
        metadata = strings_of(fields.get("metadata", {}), _MOST_METADATA) if is_own else {}
        layers = msgspec.json.decode(metadata.get(LAYERS, "[]"), type=tuple[str, ...])
        if not weight_map and not layers:
            what = "it has no weight_map, which says what is in which shard, or an empty one"
            raise JsonError(what, remedy="open the file that holds the tensors, or its directory")
    except (msgspec.DecodeError, JsonError) as error:
        cause = error if isinstance(error, JsonError) else JsonError("its layers are no list")
        expected = '{"weight_map": {"name of a tensor": "file", ...}}'
        raise cause.damaged("the index cannot be read", index_path, expected) from error
    if SEAL in metadata:
        check_seal(text, metadata[SEAL], index_path)
    return Index(weight_map, metadata, fingerprint, layers)


def safe_paths(index_path: str, directory: str, shards: list[str]) -> list[str]:
    """The paths of the files that an index names, after checking that all of them may be read.

    A name must not lead out of the directory. A symbolic link is followed wherever it leads, as for a single file: the
    user, or a tool such as DVC and git-annex, has put it there.

    Raises `DamagedFileError` and `SourceNotFoundError`.
    """
    if unsafe := [quote(shard) for shard in shards if not _is_below(shard)]:
        raise DamagedFileError(
            "the index names files outside its directory",
            where=index_path,
            expected=f"files in {directory or '.'}, or links there",
            found=listed(unsafe, 5),
            remedy="if you trust the index, put the files or links to them beside it, and their names there into it",
        )
    if "://" in directory and is_remote(directory):
        from modelstate.remote.file import open_all

        paths = [beside(index_path, shard) for shard in shards]
        absent = open_all(paths)  # all at the same time
    else:
        paths = [os.path.join(directory, shard) for shard in shards]
        absent = {path for path in paths if not os.path.exists(path)}
    if missing := [quote(shard) for shard, path in zip(shards, paths, strict=True) if path in absent]:
        raise SourceNotFoundError(
            f"{len(missing)} of {len(shards)} shards are missing",
            where=index_path,
            found=f"no {listed(missing, 20)} in {directory or '.'}",
            remedy="finish the download or the copy",
        )
    return paths


def _is_below(shard: str) -> bool:
    """Whether the name is that of a file below its directory, on any operating system."""
    try:
        os.fsencode(shard)
    except UnicodeEncodeError:  # half of a surrogate pair, which a pickle may contain
        return False
    kinds = (PurePosixPath(shard), PureWindowsPath(shard))
    return (
        "\0" not in shard
        and bool(kinds[0].name)
        and not any(kind.anchor or kind.is_absolute() or ".." in kind.parts for kind in kinds)
    )


def _flat(shard: str, tree: object, index_path: str) -> Mapping[str, object]:
    if isinstance(tree, Mapping) and all(isinstance(name, str) for name in tree):
        return tree
    raise DamagedFileError(
        f"the shard {quote(shard)} is not a flat mapping of names to tensors",
        where=index_path,
        found=type(tree).__name__,
        remedy="open the shard by itself",
    )


def merged_metadata(contents: Mapping[str, Contents]) -> dict[str, str]:
    """The metadata of the shards; a key whose values differ becomes `shard:key`."""
    merged: dict[str, str] = {}
    for key in dict.fromkeys(key for shard in contents.values() for key in shard.metadata):
        by_shard = {name: shard.metadata[key] for name, shard in contents.items() if key in shard.metadata}
        values = set(by_shard.values())
        merged |= {key: values.pop()} if len(values) == 1 else {f"{name}:{key}": v for name, v in by_shard.items()}
    return merged


Kind = TypeVar("Kind", "torch.Tensor", "LazyTensor", "torch.Tensor | LazyTensor")

SUFFIX = ".safetensors"
SHARD_METADATA = {"format": "pt"}
"""What the header of each file says, which transformers needs."""
_ANY = r"(?s)(.*)-(\d{5,})-of-(\d{5,})(\.\w+)"
"""The shard names of other tools. A file with another name is left alone, even if an index names it."""


def other_shards(files: Collection[str]) -> tuple[str, str, tuple[str, ...]] | None:
    """A shard among the files, the path of the index beside it, and the other shards that are not among the files.

    Returns None where no file is such a shard. The path is empty where no index of the usual name names all of them.
    """
    loaded = {os.path.basename(path) for path in files}
    complete = set[str]()
    for path in files:
        directory, shard = os.path.split(path)
        match = re.fullmatch(_ANY, shard)
        if match is None or int(match[3]) > MAX_SHARDS or shard in complete:
            continue
        numbers = range(1, int(match[3]) + 1)
        names = {f"{match[1]}-{number:0{len(match[2])}d}-of-{match[3]}{match[4]}" for number in numbers}
        if others := tuple(sorted(names - loaded)):
            stem = re.sub(r"-[0-9a-f]{12}$", "", match[1])  # as `shard_names` has it
            index = os.path.join(directory, stem + match[4] + INDEX_SUFFIX)
            are_named = not is_remote(path) and names <= (named_in(index) or frozenset())
            return shard, index if are_named else "", others
        complete |= names
    return None


def in_shards(tensors: Mapping[str, Kind], shard_bytes: int) -> list[dict[str, Kind]]:
    """Groups the tensors, in their order, into shards of at most `shard_bytes`, or of one tensor that is larger."""
    shards: list[dict[str, Kind]] = [{}]
    total = 0
    for name, tensor in tensors.items():
        nbytes = tensor.nbytes
        if shards[-1] and total + nbytes > shard_bytes:
            shards.append({})
            total = 0
        shards[-1][name] = tensor
        total += nbytes
    return shards


def balanced(tensors: Mapping[str, Kind], count: int) -> list[dict[str, Kind]]:
    """Groups the tensors into at most `count` shards of about the same size; those of a shard keep their order."""
    loads = [(0, number) for number in range(count)]
    number_of = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        nbytes, number = loads[0]
        heapq.heapreplace(loads, (nbytes + tensor.nbytes, number))
        number_of[name] = number
    shards: list[dict[str, Kind]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        shards[number_of[name]][name] = tensor
    return [shard for shard in shards if shard]


def shard_names(path: str, shards: Sequence[str]) -> list[str]:
    """The names of shards beside the path, from the digests of their content.

    Two checkpoints that differ have different names, so that a save does not touch the shards of the old one.
    """
    stem = os.path.basename(path).removesuffix(SUFFIX)
    together, count = digest(json.dumps(shards).encode())[:12], len(shards)
    return [f"{stem}-{together}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def own_shards(path: str) -> re.Pattern[str]:
    """Returns the pattern of the names that `shard_names` gives to the shards of any save to a path."""
    stem = os.path.basename(path).removesuffix(SUFFIX)
    return re.compile(re.escape(stem) + r"-[0-9a-f]{12}-\d{5,}-of-\d{5,}" + re.escape(SUFFIX))


def old_files(path: str, but: Collection[str] = ()) -> list[str]:
    """The index at a path, its shards, and shards that a killed save to the path has left; without those in `but`.

    Shards that another index in the directory names are excluded. Where such an index cannot be read, all shards are.
    """
    directory, name = os.path.split(path)
    index = name + INDEX_SUFFIX
    entries = sorted(os.listdir(directory or "."))
    named = (named_in(os.path.join(directory, index)) if index in entries else None) or frozenset()
    mine = own_shards(path)
    shards = {entry for entry in entries if mine.fullmatch(entry) or (entry in named and re.fullmatch(_ANY, entry))}
    for other in entries if shards else ():
        if other.endswith(INDEX_SUFFIX) and other != index:
            elsewhere = named_in(os.path.join(directory, other))
            shards = set() if elsewhere is None else shards - elsewhere
    paths = [os.path.join(directory, entry) for entry in (index, *sorted(shards)) if entry in entries]
    return [path for path in paths if path not in but]


def named_in(index: str) -> frozenset[str] | None:
    """The files that an index names; None where it cannot be read."""
    try:
        return frozenset(read_index(index).shards)
    except (ModelStateError, OSError):
        return None
