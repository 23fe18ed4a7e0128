"""Shards with an index, `*.index.json`, as Hugging Face tools read and write them.

An index comes from elsewhere as often as the shards do, so it may not make us read any other file. A shard is named
relative to the directory of the index, never by an absolute path or with `..`. Where its name leads through symbolic
links, the file it leads to must lie

- in the directory of the index, or
- in the directory of the file that the index itself is a link to (a tree of links, made by a tool), or
- in `blobs` of the same repository, where the index lies in the `snapshots` of a Hugging Face cache.

The headers of all shards are read at opening, each once.

The index is what counts: its rename puts the new checkpoint in place, all of it. So the names of shards say what is in
them, and no shard of another checkpoint is ever overwritten: `NAME-<digest>-00001-of-00003.safetensors`.
"""

import json
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

import torch

from modelstate.errors import (
    DuplicateNameError,
    HeaderTooLargeError,
    MissingShardError,
    ModelStateError,
    ReadFailedError,
    ShardIndexError,
    UnsafePathError,
)
from modelstate.formats import manifest
from modelstate.formats.block_writer import LazyTensor
from modelstate.formats.json_text import JsonLimitError, JsonText, JsonTextError, RepeatedKeyError
from modelstate.formats.manifest import KEY
from modelstate.formats.safetensors import nbytes_of
from modelstate.io import system
from modelstate.io.digests import OPEN_SEAL, SEAL, check_seal, digest, sealed
from modelstate.io.files import SourceFile, forget_fingerprint
from modelstate.spec import Contents, Stored
from modelstate.text_format import quote

MAX_INDEX_BYTES = 100_000_000
MAX_NAMES = 1_000_000
MAX_SHARDS = 100_000
"""Files that one index may name: a hundred times what the largest models have."""
WEIGHT_MAP = "weight_map"
INDEX_SUFFIX = ".index.json"
_PLAIN_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_MOST_SAID = 100
_MOST_TRIES = 20

_Index = tuple[dict[str, str], dict[str, str]]
"""The names of the tensors, each with the name of its shard; and what `modelstate.save` says of them."""


def matches(head: bytes, path: str) -> bool:
    """Whether a file that begins so is an index; one that lacks its `weight_map` is known by its name."""
    begins = head.lstrip(b" \t\r\n").startswith(b"{")
    return begins and (b'"weight_map"' in head or path.endswith(".index.json"))


def read(index_path: str, *, read_file: Callable[[str], Contents], allow: Sequence[object] = ()) -> Contents:
    """What all shards of an index hold: one flat dict, in the order of the shards' names and of their bytes.

    `read_file` opens one shard, whatever its format. Raises `ShardIndexError` where the index is damaged or its names
    are not those of the shards, `HeaderTooLargeError`, `UnsafePathError`, `MissingShardError`, `DuplicateNameError`,
    and what `read_file` raises. Where a save has put another index in its place meanwhile, that one is read.
    """
    index = read_index(index_path)
    for _ in range(_MOST_TRIES):
        try:
            return _read(index_path, *index, read_file, allow)
        except ModelStateError:
            now = _read_again(index_path)
            if now in (None, index):
                raise
            index = now
    return _read(index_path, *index, read_file, allow)


def _read_again(index_path: str) -> _Index | None:
    forget_fingerprint(index_path)
    try:
        return read_index(index_path)
    except ModelStateError:
        return None


def _read(
    index_path: str,
    weight_map: dict[str, str],
    said: dict[str, str],
    read_file: Callable[[str], Contents],
    allow: Sequence[object],
) -> Contents:
    directory = os.path.dirname(index_path)
    shards = sorted(set(weight_map.values()))
    paths = safe_paths(index_path, directory, shards)
    contents = {shard: read_file(path) for shard, path in zip(shards, paths, strict=True)}
    trees = {shard: _flat(shard, contents[shard].tree, index_path) for shard in shards}
    _check_names(index_path, weight_map, trees)

    merged: dict[str, Any] = {}
    versions: OrderedDict[str, Any] = OrderedDict()
    for tree in trees.values():
        merged.update(tree)
        saved = getattr(tree, "_metadata", None)
        if isinstance(saved, Mapping):
            versions.update(saved)
    if versions:
        merged = OrderedDict(merged)
        merged._metadata = versions  # type: ignore[attr-defined]
    formats = sorted({found.format for found in contents.values()})
    checksums = {place: crc for found in contents.values() for place, crc in found.checksums.items()}
    files, metadata = (index_path, *paths), merged_metadata(contents)
    if manifest.KEY not in said:
        return Contents(" and ".join(formats), merged, files, metadata, checksums)
    told = manifest.apply(merged, said[manifest.KEY], index_path, "metadata", allow)
    is_sealed = SEAL in said and all(found.is_sealed for found in contents.values())
    return Contents(
        format=" and ".join(formats),
        tree=told.tree,
        files=files,
        metadata=metadata | told.metadata,
        checksums=told.checksums if is_sealed else {},  # they may be damaged themselves
        is_sealed=is_sealed,
    )


def read_weight_map(index_path: str) -> dict[str, str]:
    """The names of the tensors, each with the name of its shard."""
    return read_index(index_path)[0]


def read_index(index_path: str) -> _Index:
    """The names of the tensors, each with the name of its shard; and what `modelstate.save` says of them."""
    with SourceFile(index_path) as file:
        if file.nbytes > MAX_INDEX_BYTES:
            raise HeaderTooLargeError(
                "the index is larger than that of any model",
                where=index_path,
                expected=f"at most {MAX_INDEX_BYTES:,} bytes",
                found=f"{file.nbytes:,} bytes",
            )
        text = file.read(0, file.nbytes, "the index")
    weight_map: dict[str, str] | None = None
    said: dict[str, str] = {}
    json = JsonText(text)
    try:
        for key in json.members():
            if key == "metadata" and f'"{SEAL}"'.encode() in text:
                said = json.strings(_MOST_SAID)
            elif key != WEIGHT_MAP:
                json.skip()
            elif weight_map is not None:
                raise RepeatedKeyError(key, json.at, json.excerpt())
            else:
                weight_map = json.strings(MAX_NAMES, MAX_SHARDS)
        json.end()
    except RepeatedKeyError as error:
        raise DuplicateNameError(
            f"the index maps {quote(error.key)} twice",
            where=f"{index_path}: byte {error.at}",
            found=error.found,
            remedy="write the shards again: which of the two is meant cannot be known",
        ) from error
    except JsonLimitError as error:
        raise ShardIndexError(
            "the index exceeds a limit of this reader, which does not mean that it is damaged",
            where=f"{index_path}: byte {error.at}",
            expected=f"at most {MAX_SHARDS:,} files, {MAX_NAMES:,} tensors and {_MOST_SAID} metadata entries",
            found=error.what,
            remedy="write the checkpoint again in fewer, larger shards, or as several checkpoints",
        ) from error
    except JsonTextError as error:
        raise ShardIndexError(
            f"the index is damaged: {error.what}",
            where=f"{index_path}: byte {error.at}",
            expected=error.expected or '{"weight_map": {"name of a tensor": "file", ...}}',
            found=error.found,
            remedy="download or copy the index again",
        ) from error
    if not weight_map:
        raise ShardIndexError(
            "the index has no weight_map, which says what is in which shard, or an empty one",
            where=index_path,
            expected='{"weight_map": {"name of a tensor": "file", ...}}',
            remedy="open the file that holds the tensors, or its directory",
        )
    if SEAL in said:
        check_seal(text, said[SEAL], index_path)
    return weight_map, said


def safe_paths(index_path: str, directory: str, shards: list[str]) -> list[str]:
    """The paths of the files that an index names, all of which may be read.

    Raises `UnsafePathError`, `MissingShardError`, and `ShardIndexError` for what are no files.
    """
    unsafe = [quote(shard) for shard in shards if not _is_below(shard)]
    paths = [] if unsafe else [os.path.join(directory, shard) for shard in shards]
    unsafe += _links_outside(shards, paths, _roots(index_path, directory))
    if unsafe:
        raise UnsafePathError(
            "the index names files outside its directory",
            where=index_path,
            expected=f"files in {directory or '.'}, or links to files in it",
            found=_some(unsafe),
            remedy="if you trust the index, put the files themselves beside it, or make the index a link to the one "
            "in their directory",
        )
    missing = [shard for shard, path in zip(shards, paths, strict=True) if not os.path.exists(path)]
    if missing:
        raise MissingShardError(
            f"{len(missing)} of {len(shards)} shards are missing",
            where=index_path,
            expected=f"in {directory or '.'}: {_some(map(quote, missing), most=20)}",
            remedy="finish the download or the copy",
        )
    try:
        modes = [system.stat(path).st_mode for path in paths]
    except OSError as error:
        raise ReadFailedError("a shard cannot be opened", where=index_path, found=error) from error
    odd = [quote(shard) for shard, mode in zip(shards, modes, strict=True) if not stat.S_ISREG(mode)]
    if odd:
        raise ShardIndexError("the index names shards that are no files", where=index_path, found=_some(odd))
    return paths


def _is_below(shard: str) -> bool:
    """Whether the name is that of a file below its directory, as any system would read it."""
    if _PLAIN_NAME.fullmatch(shard):
        return True
    try:
        os.fsencode(shard)
    except UnicodeEncodeError:  # half of a surrogate pair, which a pickle can have
        return False
    kinds = (PurePosixPath(shard), PureWindowsPath(shard))
    return (
        "\0" not in shard
        and bool(kinds[0].name)
        and not any(kind.anchor or kind.is_absolute() or ".." in kind.parts for kind in kinds)
    )


def _links_outside(shards: Sequence[str], paths: Sequence[str], roots: Sequence[str]) -> list[str]:
    """The shards whose symbolic links lead outside of all roots, each with the place that it leads to.

    Each directory is resolved once; the shards themselves only where they are links.
    """
    prefixes = tuple(os.path.join(root, "") for root in roots)
    resolved: dict[str, str] = {}
    found = []
    for shard, path in zip(shards, paths, strict=False):
        parent, name = os.path.split(path)
        if parent not in resolved:
            resolved[parent] = os.path.realpath(parent)
        real = os.path.join(resolved[parent], name)
        if real.startswith(prefixes) and os.path.islink(real):
            real = os.path.realpath(real)
        if not real.startswith(prefixes):
            found.append(f"{quote(shard)} -> {real}")
    return found


def _roots(index_path: str, directory: str) -> list[str]:
    here = os.path.realpath(directory or os.curdir)
    roots = [here, os.path.dirname(os.path.realpath(index_path))]
    repository, inside, _ = here.rpartition(os.path.join(os.sep, "snapshots", ""))
    if inside and os.path.isdir(os.path.join(repository, "blobs")):
        roots.append(os.path.join(repository, "blobs"))
    return roots


def _flat(shard: str, tree: object, index_path: str) -> Mapping[str, Any]:
    if isinstance(tree, Mapping) and all(isinstance(name, str) for name in tree):
        return tree
    raise ShardIndexError(
        f"the shard {quote(shard)} is not a flat mapping of names to tensors",
        where=index_path,
        found=type(tree).__name__,
        remedy="open the shard by itself",
    )


def _check_names(index_path: str, weight_map: Mapping[str, str], trees: Mapping[str, Mapping[str, Any]]) -> None:
    """Every name is in the shard that the index gives for it, and in no other."""
    holders: dict[str, list[str]] = {}
    for shard, tree in trees.items():
        for name, value in tree.items():
            if isinstance(value, Stored) or name in weight_map:
                holders.setdefault(name, []).append(shard)
    twice = [
        f"{quote(name)} in {' and '.join(map(quote, shards))}" for name, shards in holders.items() if len(shards) > 1
    ]
    if twice:
        raise DuplicateNameError(
            f"{len(twice)} names are in more than one shard",
            where=index_path,
            found=_some(twice),
            remedy="shards of two checkpoints may be mixed here: download or write them again, elsewhere",
        )
    lacking = [f"{quote(name)} in {quote(shard)}" for name, shard in weight_map.items() if holders.get(name) != [shard]]
    unnamed = [f"{quote(name)} in {quote(shards[0])}" for name, shards in holders.items() if name not in weight_map]
    if lacking or unnamed:
        raise ShardIndexError(
            "the shards do not hold what the index says: "
            f"{len(lacking)} tensors are not in their shard, {len(unnamed)} are not in the index",
            where=index_path,
            expected=_some(lacking),
            found=_some(unnamed),
            remedy="index and shards may be of different versions: download or write them again, elsewhere",
        )


def merged_metadata(contents: Mapping[str, Contents]) -> dict[str, str]:
    """What the shards say of themselves; where they differ, under `shard:key`."""
    merged: dict[str, str] = {}
    for key in dict.fromkeys(key for found in contents.values() for key in found.metadata):
        said = {shard: found.metadata[key] for shard, found in contents.items() if key in found.metadata}
        values = set(said.values())
        merged |= {key: values.pop()} if len(values) == 1 else {f"{shard}:{key}": v for shard, v in said.items()}
    return merged


def _some(items: Iterable[str], most: int = 5) -> str:
    items = list(items)
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


Kind = TypeVar("Kind", torch.Tensor, LazyTensor, torch.Tensor | LazyTensor)

SUFFIX = ".safetensors"
_OWN = r"-[0-9a-f]{12}-\d{5,}-of-\d{5,}\.safetensors"
_ANY = re.compile(r".*-\d{5,}-of-\d{5,}\.\w+", re.DOTALL)
"""What others call their shards, too. An index that names anything else as one has it left alone."""


def in_shards(tensors: Mapping[str, Kind], shard_bytes: int) -> list[dict[str, Kind]]:
    """The tensors in their order, in groups of at most so many bytes, or of one tensor that is larger."""
    shards: list[dict[str, Kind]] = [{}]
    total = 0
    for name, tensor in tensors.items():
        nbytes = nbytes_of(tensor)
        if shards[-1] and total + nbytes > shard_bytes:
            shards.append({})
            total = 0
        shards[-1][name] = tensor
        total += nbytes
    return shards


def shard_names(path: str, shards: Sequence[str]) -> list[str]:
    """The names of shards, beside the path, by what all of them together hold: digests of each file's content.

    Two that differ in anything have other names, so that those of the old checkpoint are not touched.
    """
    stem = os.path.basename(path).removesuffix(SUFFIX)
    together, count = digest(json.dumps(shards).encode())[:12], len(shards)
    return [f"{stem}-{together}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def index_of(files: Mapping[str, Iterable[str]], total_bytes: int, manifest: str) -> bytes:
    """The text of an index: which file has which tensors, and what is said of them."""
    said = {SEAL: OPEN_SEAL, "total_size": str(total_bytes), KEY: manifest}
    weight_map = {name: file for file, names in files.items() for name in names}
    return sealed(json.dumps({"metadata": said, WEIGHT_MAP: weight_map}, ensure_ascii=False, indent=1).encode() + b"\n")


def old_files(path: str, but: Collection[str] = ()) -> list[str]:
    """The index at a path, its shards, and shards that a killed save to the path has left; none of `but`.

    What another index in the directory names is not among them. Where one of those cannot be read, no shard is.
    """
    directory, name = os.path.split(path)
    index = name + INDEX_SUFFIX
    entries = sorted(os.listdir(directory or "."))
    named = (_named_in(os.path.join(directory, index)) if index in entries else None) or frozenset()
    mine = re.compile(re.escape(name.removesuffix(SUFFIX)) + _OWN)
    shards = {one for one in entries if mine.fullmatch(one) or (one in named and _ANY.fullmatch(one))}
    for other in entries if shards else ():
        if other.endswith(INDEX_SUFFIX) and other != index:
            elsewhere = _named_in(os.path.join(directory, other))
            shards = set() if elsewhere is None else shards - elsewhere
    found = [os.path.join(directory, one) for one in (index, *sorted(shards)) if one in entries]
    return [one for one in found if one not in but]


def _named_in(index: str) -> frozenset[str] | None:
    """The files that an index names; None where it cannot be read."""
    try:
        return frozenset(read_weight_map(index).values())
    except (ModelStateError, OSError):
        return None
