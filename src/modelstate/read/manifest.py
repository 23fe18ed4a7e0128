"""The manifest that `modelstate.save` puts into a file's `__metadata__`, and what it makes of the file's tensors."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from modelstate.codec.codec import decode
from modelstate.errors import CodecError, ManifestError, NewerManifestError
from modelstate.read.json_text import quote
from modelstate.read.source_file import CUT_SHORT
from modelstate.spec import Encoded, StoredTensor
from modelstate.words import size

KEY = "modelstate"
"""Under which the manifest stands."""
FORMAT = 1
"""The version of what is described here. A reader refuses what is newer."""
MAX_BYTES = 32_000_000
MAX_PARTS = 4_000_000
"""Lists, objects and commas: each becomes an object in memory as soon as the text is parsed."""

_FIELDS: dict[str, type] = {
    "writer": str,
    "schema": str,
    "aliases": dict,
    "versions": dict,
    "extra": dict,
    "extra_tensors": list,
}


def check_size(text: str) -> None:
    """Raises `ValueError` for a manifest that nobody should parse."""
    parts = sum(text.count(char) for char in ",[{")
    if len(text) > MAX_BYTES or parts > MAX_PARTS:
        limits = f"at most {size(MAX_BYTES)} and {MAX_PARTS:,}"
        raise ValueError(f"values that are no tensors, of {size(len(text))} in {parts:,} parts; {limits} are read")


def apply(tensors: Mapping[str, StoredTensor], text: str, path: str) -> tuple[OrderedDict[str, Any], dict[str, str]]:
    """The state dict that was saved, and what else the file says of it.

    Tied tensors stand under all their names, values that are no tensors are there, not yet decoded, and their tensors
    are not. Raises `ManifestError` and `NewerManifestError`.
    """
    manifest = _parse(text, path)
    hidden = {name: tensors[name] for name in _names(manifest.get("extra_tensors", []), tensors, path)}
    state: OrderedDict[str, Any] = OrderedDict((name, one) for name, one in tensors.items() if name not in hidden)
    aliases = manifest.get("aliases", {})
    owners = _names(list(aliases.values()), tensors, path)
    for alias, owner in zip(aliases, owners, strict=True):
        if alias in tensors or owner in hidden:
            raise _damaged(path, f"{quote(alias)} is another name of {quote(owner)}, and one of them means more")
        state[alias] = tensors[owner]
    for name, tree in manifest.get("extra", {}).items():
        if name in state or name in hidden:
            raise _damaged(path, f"{quote(name)} is a tensor and a value that is none")
        state[name] = Encoded(tree, hidden, f"{path}: {name}")
    if "versions" in manifest:
        state._metadata = _versions(manifest["versions"], path)  # type: ignore[attr-defined]
    return state, {"schema": manifest["schema"]} if "schema" in manifest else {}


def _versions(tree: object, path: str) -> OrderedDict[str, Any]:
    try:
        versions = decode(tree)
    except CodecError as error:
        raise _damaged(path, f"the versions of modules: {error.what}") from error
    if not isinstance(versions, dict) or not all(isinstance(kept, dict) for kept in versions.values()):
        raise _damaged(path, "the versions of modules are no dict of dicts")
    return OrderedDict(versions)


def _parse(text: str, path: str) -> dict[str, Any]:
    try:
        check_size(text)
        manifest = json.loads(text, object_pairs_hook=_once, parse_constant=_never)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error) if isinstance(error, ValueError) else "nested without end") from error
    if type(manifest) is not dict or type(manifest.get("format")) is not int:
        raise _damaged(path, "no format version")
    if manifest["format"] > FORMAT:
        raise NewerManifestError(
            "the file was written by a newer version of modelstate, and says what this one does not know",
            where=path,
            expected=f"format {FORMAT} or older",
            found=f"format {manifest['format']}, by {str(manifest.get('writer', '?'))[:80]}",
            remedy="update modelstate; the safetensors library reads the tensors alone",
        )
    for key, value in manifest.items():
        if key != "format" and type(value) is not _FIELDS.get(key):
            raise _damaged(path, f"{quote(key)} is unknown, or not what it must be")
    return manifest


def _names(names: list[Any], tensors: Mapping[str, StoredTensor], path: str) -> list[str]:
    for name in names:
        if type(name) is not str or name not in tensors:
            raise _damaged(path, f"it speaks of a tensor {quote(str(name))}, which is not there")
    return names


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return made


def _never(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _damaged(path: str, found: str) -> ManifestError:
    return ManifestError(
        "the manifest that modelstate has put into the file is damaged",
        where=f"{path}: __metadata__[{KEY!r}]",
        found=found[:500],
        remedy=f"{CUT_SHORT}; the safetensors library reads the tensors alone",
    )
