"""The manifest of a file that `modelstate.save` has written: JSON for what safetensors cannot express.

The manifest is stored in the `__metadata__` of a file, or in the `metadata` of a shard index. All of its fields but the
first are optional:

- `format`, `writer`, `schema`: the versions of this layout, of the program that wrote the file, and of the state.
- `aliases`: additional names of tensors of the file (tied tensors).
- `digests`: the XXH3-128 digests of each tensor, one for each block. `parts` has the sizes of the parts of tensors that
  several processes have written; each part has blocks of its own. `patched` is the digest of the digests of all tensors
  with patches, whose layers have them.
- `subclasses`: tensors of wrapper subclasses, which consist of tensors of the file.
- `extra`: encoded values other than tensors; `extra_tensors` lists the tensors within them.
- `attached`: the encoded values that the caller saved beside the state.
- `versions`: torch's `_metadata`.
- `tree`: the containers of a state that is more than a flat dict of tensors. A node is the name of a tensor, or an
  object with one of the keys `dict` (pairs of an encoded key and a node), `tensors`, `list`, `tuple` and `value`
  (encoded). `tensors` has the keys of a dict in which each value is the tensor that is named by its path: by the keys
  down to it, joined with dots. A dict of either kind may also have `ordered` and `versions`.

Tensors of wrapper subclasses are created by their `__tensor_unflatten__`, which runs code of the class. So only classes
are used that torch itself would load (`torch.serialization.get_safe_globals`) or that the caller allows; nothing is
imported unless the caller names it.
"""

from __future__ import annotations

import json
from collections import ChainMap, Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import xxhash

from modelstate.errors import (
    CUT_SHORT,
    ChecksumError,
    DamagedFileError,
    ForbiddenGlobalError,
    ModelStateError,
    NewerManifestError,
    UnknownClassError,
    code_errors,
    keep_interrupt,
)
from modelstate.formats.tree import Checksums, Contents, Patched
from modelstate.spec import (
    Checksum,
    Described,
    Encoded,
    Stored,
    StoredComposite,
    StoredTensor,
    StoredTensors,
    set_version_metadata,
    under_names,
)
from modelstate.text_format import excerpt, is_unicode, printable, quote, size

if TYPE_CHECKING:
    import torch

KEY = "modelstate"
"""The key of the manifest in the metadata."""
FORMAT = 1
"""The version of the layout that is described here. A reader refuses a newer one."""
MAX_BYTES = 64_000_000
MAX_PARTS = 4_000_000
"""The limit of lists, objects, commas and colons: each becomes an object in memory as soon as the text is parsed."""
MAX_PATH_CHARACTERS = 128_000_000
"""The limit of the paths of all values of a tree together: one long key is in the path of every value below it."""
MAX_INDEX_BYTES = 150_000_000
MAX_NAMES = 1_000_000
"""The limit of the names in an index."""
WEIGHT_MAP = "weight_map"
"""The key of an index that has the file of each tensor."""
LAYERS = "modelstate_layers"
"""The key of the metadata of an index that has the names of the layers in their order, as JSON."""
CHANGES = "changed elements"
"""The key of the metadata of a step of a store with `delta=` that has the number of elements that each step changed."""
PATCHES = "modelstate_patches"
"""The key of `__metadata__` of a file that has changes of tensors: a `PatchLayer` of `formats/layers.py`, as JSON."""
_MAX_DEPTH = 100

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "writer": str,
    "schema": str,
    "aliases": dict,
    "digests": dict,
    "subclasses": dict,
    "versions": dict,
    "extra": dict,
    "extra_tensors": list,
    "tree": (dict, str),
    "attached": dict,
}


def check_size(text: str) -> None:
    """Raises `ValueError` for a manifest that is too large to be parsed."""
    parts = sum(text.count(char) for char in ",[{:")
    if len(text) > MAX_BYTES or parts > MAX_PARTS:
        limits = f"at most {size(MAX_BYTES)} and {MAX_PARTS:,}"
        raise ValueError(f"values that are not tensors, of {size(len(text))} in {parts:,} parts; {limits} are read")


def apply(
    contents: Contents,
    text: str,
    path: str,
    place: str,
    allow: Sequence[object] = (),
    patched: Mapping[str, Patched] = {},
) -> Contents:
    """Restores the saved state from the tensors of a file and its manifest.

    Args:
        contents: The contents of the file: a table of tensors.
        text: The manifest.
        path: The file, for messages.
        place: The name of the metadata that contain the manifest, for messages.
        allow: Additional tensor classes that may be created, besides those that torch allows.
        patched: The tensors with patches, by name; `contents` has their bases.

    Returns:
        The saved state, in which tied tensors appear under all their names, and subclasses under theirs. Values other
        than tensors are present but not yet decoded; the tensors within them are not. The metadata have `schema` and
        `extra`, where they were saved.

    Raises:
        DamagedFileError: The manifest is damaged.
        NewerManifestError: A newer version of modelstate wrote the manifest.
        ForbiddenGlobalError: A tensor class is not allowed.
        UnknownClassError: A tensor class does not exist.
    """
    where = f"{path}: {place}[{KEY!r}]"
    at = where
    try:
        if len(text) > MAX_PARTS:  # otherwise it has no more parts than that
            check_size(text)
        manifest = parse_json(text.encode())
        if type(manifest.get("format")) is not int:
            raise damaged(where, "no format version")
        if manifest["format"] > FORMAT:
            raise NewerManifestError(
                "the file was written by a newer version of modelstate, in a format that this version does not know",
                where=where,
                expected=f"format {FORMAT} or older",
                found=f"format {manifest['format']}, by {str(manifest.get('writer', '?'))[:80]}",
                remedy="update modelstate; the safetensors library reads the tensors alone",
            )
        for key, value in manifest.items():
            if key != "format" and not isinstance(value, _FIELDS.get(key, ())):
                raise damaged(where, f"{quote(key)} is unknown, or not what it must be")
        tensors: Any = contents.tree
        if not isinstance(tensors, StoredTensors):
            others = (name for name, value in tensors.items() if not isinstance(value, StoredTensor))
            what = quote(next(others, contents.format))
            raise damaged(where, f"the shards hold {what}, which is not a plain tensor of safetensors")
        metadata = {**contents.metadata} | ({"schema": manifest["schema"]} if "schema" in manifest else {})
        checksums = _checksums(manifest["digests"], tensors, where, patched) if manifest.get("digests") else dict
        if not contents.is_sealed:
            checksums = dict  # the digests may be damaged themselves
        hidden: dict[str, StoredTensor] = {}
        if names := manifest.get("extra_tensors"):
            hidden = {name: tensors[name] for name in _names(names, tensors, where)}
        if "attached" in manifest:
            metadata["extra"] = Encoded(manifest["attached"], hidden, f"{path}: extra")
        composites: dict[str, Stored] = {}
        of_patched = manifest.get("digests", {}).get("patched")
        if patched or of_patched is not None:
            after = {name: patch.digests[-1] for name, patch in patched.items()}
            if not hidden.keys().isdisjoint(after) or of_patched != digest_of_all(after):
                raise damaged(where, "its patches lead to other values than those that were saved")
            composites |= {name: patch.tensor for name, patch in patched.items()}
        known = ChainMap[str, Stored](composites, cast("Any", tensors))
        parts: set[str] = set()
        for name, description in manifest.get("subclasses", {}).items():
            at = f"{where}: {name}"
            composites[name], used = _composite(name, description, known, allow, where)
            parts.update(used)
        at = where
        aliases, owners = manifest.get("aliases", {}), list[str]()
        if aliases:
            owners = _names(list(aliases.values()), known, where)
        for alias, owner in zip(aliases, owners, strict=True):
            if alias in tensors or owner in hidden:
                raise damaged(where, f"{quote(alias)} is another name of {quote(owner)}, and one of them means more")
        if "tree" in manifest:
            tree = _restored(manifest["tree"], known, path, where)
            return msgspec.structs.replace(contents, tree=tree, metadata=metadata, checksums=checksums)
        state: Any = tensors
        if hidden or composites or aliases:
            old_names = {name: name for name in known if name not in hidden and name not in parts}
            old_names.update(zip(aliases, owners, strict=True))
            state = under_names(known if composites else tensors, old_names)
        extra = manifest.get("extra", {})
        if extra or composites:
            state = OrderedDict(state)
        for name, tree in extra.items():
            if name in state or name in hidden:
                raise damaged(where, f"{quote(name)} is both a tensor and another value")
            state[name] = Encoded(tree, hidden, f"{path}: {name}")
        if "versions" in manifest:
            set_version_metadata(state, _versions(manifest["versions"]))
        return msgspec.structs.replace(contents, tree=state, metadata=metadata, checksums=checksums)
    except (DamagedFileError, NewerManifestError, ForbiddenGlobalError, UnknownClassError, MemoryError):
        raise
    except Exception as error:  # the manifest is not as the code expects it
        what = error.what if isinstance(error, JsonError | ModelStateError) else f"{type(error).__name__}: {error}"
        raise damaged(at, what) from error


def _restored(root: object, known: Mapping[str, Any], path: str, where: str) -> Any:
    """Restores the containers of a `tree`."""
    characters = 0  # the length of all paths so far

    def below(at: str, key: object, depth: int) -> str:
        """The path of a value in the container at `at`, as the writer names tensors by it."""
        nonlocal characters
        step = f".{key}" if depth else str(key)
        characters += len(at) + len(step)
        if characters > MAX_PATH_CHARACTERS:
            raise damaged(where, "its keys stand for paths that are longer than any memory")
        return at + step

    def node(tree: Any, at: str, depth: int) -> Any:
        """Restores a node; `at` is its path in the state."""
        if type(tree) is str:
            return known[_names([tree], known, where)[0]]
        kind = next(kind for kind in ("dict", "tensors", "list", "tuple", "value") if kind in tree)
        if depth > _MAX_DEPTH:
            raise ValueError("a tree that is nested too deeply")
        if kind == "value":
            plain = tree["value"]
            return plain if type(plain) in (str, int, float, bool) else Encoded(plain, known, f"{path}: {at}")
        if kind in ("list", "tuple"):
            items = [node(item, below(at, i, depth), depth + 1) for i, item in enumerate(tree[kind])]
            return items if kind == "list" else tuple(items)
        mapping: dict[object, object] = OrderedDict() if tree.get("ordered") or "versions" in tree else {}
        items = tree[kind] if kind == "dict" else [(key, None) for key in tree[kind]]
        for key, (_, item) in zip(_keys([key for key, _ in items]), items, strict=True):
            name = below(at, key, depth)
            mapping[key] = node(name if kind == "tensors" else item, name, depth + 1)
        if "versions" in tree:
            set_version_metadata(mapping, _versions(tree["versions"]))
        return mapping

    return node(root, "", 0)


def _keys(trees: list[object]) -> list[object]:
    """Decodes the keys of a dict, which differ."""
    if {str}.issuperset(map(type, trees)) and len(set(trees)) == len(trees):
        return trees
    from modelstate.codec.codec import decode

    return [*decode({"$dict": [[tree, None] for tree in trees]})]


def _checksums(
    fields: Mapping[str, Any], tensors: StoredTensors, where: str, patched: Mapping[str, Patched]
) -> Checksums:
    digests, parts = fields["tensors"], fields.get("parts", {})
    if (fields["algorithm"], fields["block_bytes"]) != (ALGORITHM, BLOCK_BYTES):
        raise damaged(where, f"digests of another kind: {str(fields)[:80]}")
    if not digests.keys() <= tensors.rows.keys():
        _names(list(digests), tensors, where)
    for name, own in parts.items():
        is_valid = all(type(nbytes) is int and nbytes > 0 for nbytes in own)
        if not is_valid or sum(own) != tensors.columns.nbytes[tensors.rows[name]]:
            raise damaged(where, f"{quote(name)}: no parts of a tensor: {str(own)[:60]}")
    of_patched = {extent: checksum for patch in patched.values() for extent, checksum in patch.checksums.items()}
    return lambda: (
        {
            tensors.extent(name): Checksum(ALGORITHM, BLOCK_BYTES, digest_of_blocks, tuple(parts.get(name, ())))
            for name, digest_of_blocks in digests.items()
        }
        | of_patched
    )


def are_usual_versions(versions: Mapping[str, object]) -> bool:
    """Whether versions of modules are encoded as they are: almost all modules have torch's version number alone."""
    paths = "".join(versions)
    return (
        all(
            type(entry) is dict and entry.keys() == {"version"} and type(entry["version"]) is int
            for entry in versions.values()
        )
        and (paths.isascii() or is_unicode(paths))
        and not paths.startswith("$")  # as a tag of the encoding does
    )


def _versions(tree: object) -> OrderedDict[str, object]:
    if type(tree) is dict and are_usual_versions(tree):
        return OrderedDict(tree)
    from modelstate.codec.codec import decode

    versions = decode(tree)
    if not isinstance(versions, dict) or not all(isinstance(entry, dict) for entry in versions.values()):
        raise ValueError("the versions of modules are not a dict of dicts")
    return OrderedDict(versions)


def _names(names: list[str], known: Mapping[str, object], where: str) -> list[str]:
    for name in names:
        if type(name) is not str or name not in known:
            raise damaged(where, f"it names the tensor {quote(str(name))}, which the file lacks")
    return names


class JsonError(ValueError):
    """A text is not the JSON that a reader expects. The readers convert it to their own errors."""

    def __init__(self, what: str, found: str = "", expected: str = "", at: int | None = None, remedy: str = "") -> None:
        super().__init__(what)
        self.what, self.found, self.expected, self.at, self.remedy = what, found, expected, at, remedy

    def damaged(self, what: str, where: str, expected: str) -> DamagedFileError:
        """The error for the file that has the text."""
        return DamagedFileError(
            f"{what}: {self.what}",
            where=where if self.at is None else f"{where}: byte {self.at}",
            expected=self.expected or expected,
            found=self.found,
            remedy=self.remedy,
        )


def parse_json(text: bytes) -> dict[str, Any]:
    """Parses a JSON object of UTF-8, in which no object has a key twice. The caller has limited its parts.

    Raises `JsonError`, also for half of a surrogate pair, which `\\u` in JSON can make, and which no program can read.
    """
    try:
        string = text.decode()
        value = json.loads(string, object_pairs_hook=_unique)
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        # Without its cause, which keeps the whole text in memory.
        what = error.msg[:1].lower() + error.msg[1:]
        raise JsonError(what, printable(string[error.pos : error.pos + 60]) or "the end", at=error.pos) from None
    except JsonError:
        raise
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8, half of a surrogate pair, a long integer
        keep_interrupt(error)
        raise JsonError("it cannot be parsed", str(error)[:200]) from None
    if not isinstance(value, dict):
        raise JsonError("not a JSON object", excerpt(text[:60]) or "the end", "{", at=0)
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        repeated = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        remedy = "write the file again: which of the two is meant cannot be known"
        raise JsonError(f"the key {quote(repeated)} is in one object twice", remedy=remedy)
    return value


def damaged(where: str, found: str) -> DamagedFileError:
    """The error for a manifest that is not as it must be."""
    return DamagedFileError(
        "the manifest that modelstate has put into the file is damaged",
        where=where,
        found=found[:500],
        remedy=f"{CUT_SHORT}; the safetensors library reads the tensors alone",
    )


def _composite(
    name: str, description: Mapping[str, Any], known: Mapping[str, Stored], allow: Sequence[object], where: str
) -> tuple[StoredComposite, list[str]]:
    """Creates the stored tensor of a subclass that a manifest describes.

    Args:
        name: The name of the tensor.
        description: The entry of the manifest.
        known: The tensors of the file by name.
        allow: Additional classes that may be created.
        where: The place of the manifest, for messages.

    Returns:
        The tensor, and the names of the parts that are no tensors of the state by themselves.

    Raises:
        ValueError: The description is damaged.
        CodecError: An encoded field is damaged.
        ForbiddenGlobalError: The class is not allowed.
    """
    import torch

    from modelstate.codec.codec import decode
    from modelstate.formats.torch_globals import dims, shape_of

    parts, dtype, class_name = description["parts"], decode(description["dtype"]), description["class"]
    shape, stride = shape_of(description["shape"]), dims(description["stride"])
    if not isinstance(dtype, torch.dtype) or not parts or len(shape) != len(stride):
        raise ValueError(f"shape {shape}, stride {stride}, {dtype}, made of {len(parts)} tensors")
    cls = _allowed(class_name, allow, where, name)
    context = decode(description["context"], f"{where}: {name}")
    inner = {attribute: known[part] for attribute, part in parts.items()}

    def build(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        what = f"a tensor of the class {class_name} cannot be created from its stored parts"
        remedy = (
            "the version of the package that defines the class may be another one; the safetensors library reads the "
            "parts alone"
        )
        with code_errors(DamagedFileError, what, where=f"{where}: {name}", remedy=remedy):
            within = dict(zip(inner, tensors, strict=True))
            tensor: torch.Tensor = cls.__tensor_unflatten__(within, context, torch.Size(shape), stride)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(f"it became a tensor of {tensor.dtype} of shape {tuple(tensor.shape)}")
        return tensor

    own_parts = [part for attribute, part in parts.items() if part == f"{name}.{attribute}"]
    described = tuple(part for part in inner.values() if isinstance(part, Described))
    return StoredComposite(class_name, dtype, shape, described, build, part_names=tuple(inner)), own_parts


def _allowed(cls: str, allow: Sequence[object], where: str, name: str) -> Any:
    import torch

    from modelstate.formats.torch_globals import TorchGlobals
    from modelstate.formats.unpickle import Allowed

    entry = TorchGlobals(allow).find(cls)
    real = entry.real if isinstance(entry, Allowed) else None
    if isinstance(real, type) and issubclass(real, torch.Tensor) and hasattr(real, "__tensor_unflatten__"):
        return real
    raise ForbiddenGlobalError(
        "a tensor is of a class that is not known here, or not allowed",
        where=f"{where}: {name}",
        found=cls,
        refused=[(cls, name)],
        allow=[cls],
        remedy="import the package that defines it, which tells torch of its classes, or do so with "
        f"torch.serialization.add_safe_globals; or, for ms.open and loads, allow=[{cls!r}], which imports it and lets "
        "its code make the tensor",
    )


# Digests of tensors and headers. They detect damage, not tampering.

BLOCK_BYTES = 4 << 20
"""A tensor has one digest for each block of this size."""
ALGORITHM = "xxh3-128"
HEX = 32
"""Characters of a digest."""
SEAL = "modelstate_seal"
"""The key of `__metadata__` that holds the seal: the digest of the header, with zeros in the place of the seal."""
OPEN_SEAL = f"{ALGORITHM}:{'0' * HEX}"


digest = xxhash.xxh3_128_hexdigest
"""The hexadecimal XXH3-128 digest of some bytes."""


def digest_of_all(digests: Mapping[str, str]) -> str:
    """Returns one digest of the digests of tensors by name, in the order of the names."""
    return digest("".join(digests[name] for name in sorted(digests)).encode())


def sealed(data: bytes) -> bytes:
    """Replaces the `OPEN_SEAL` within `data` by the seal."""
    placeholder = OPEN_SEAL.encode()
    assert placeholder in data
    return data.replace(placeholder, f"{ALGORITHM}:{digest(data)}".encode(), 1)


def index_of(
    files: Mapping[str, Iterable[str]], total_bytes: int, manifest: str, layers: Collection[str] | None = None
) -> bytes:
    """The text of an index: the file of each tensor, and the manifest. Raises `ValueError` where none would read it.

    Where the files are `layers`, in their order, their headers say what is in which file. A whole step of a store with
    `delta=` has none.
    """
    metadata = {SEAL: OPEN_SEAL, "total_size": str(total_bytes), KEY: manifest}
    weight_map = {name: file for file, names in files.items() for name in names}
    if layers is not None:
        metadata[LAYERS], weight_map = json.dumps([*layers]), {} if layers else weight_map
    # With an indentation, the encoder of the standard library takes four times as long.
    data = msgspec.json.format(msgspec.json.encode({"metadata": metadata, WEIGHT_MAP: weight_map}), indent=1) + b"\n"
    if len(data) > MAX_INDEX_BYTES or len(weight_map) > MAX_NAMES:
        limits = f"at most {MAX_INDEX_BYTES:,} bytes for {MAX_NAMES:,} tensors are read"
        raise ValueError(f"an index of {len(data):,} bytes for {len(weight_map):,} tensors; {limits}")
    return sealed(data)


def check_seal(data: bytes, seal: str, where: str) -> None:
    """Raises `ChecksumError` where `seal` is not the seal of `data`, which contains it."""
    text = seal.encode()
    if len(seal) == len(OPEN_SEAL) and text in data:
        computed = digest(data.replace(text, OPEN_SEAL.encode(), 1))
        if seal == f"{ALGORITHM}:{computed}":
            return
    raise ChecksumError(
        "what the file says of its tensors has been damaged, or changed, since it was written",
        where=where,
        expected=f"the digest {seal[:60]}",
        found="another one",
        remedy="get the file again from where it came; if another program has changed it on purpose, have it leave "
        f"out the key {quote(SEAL)}",
    )
