"""Layers: the files of a model in a step of a store with `delta=`. Later files change tensors of earlier files.

A layer has whole tensors, or patches (`formats/delta.py`). The value of a tensor is that of the last layer that has it
whole, with the patches of the later layers applied in their order. docs/delta_format.md describes the files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import pairwise

import msgspec

from modelstate.errors import DamagedFileError
from modelstate.formats.manifest import ALGORITHM, BLOCK_BYTES, check_size
from modelstate.formats.tree import Contents, Patched
from modelstate.io.files import FileFingerprint
from modelstate.spec import Checksum, StoredTensor, StoredTensors
from modelstate.text_format import quote

PATCHES = "modelstate_patches"
"""The key of `__metadata__` of a file that has a `PatchLayer`, as JSON."""
FORMAT = "modelstate-delta"
"""The `format` in `__metadata__` of such a file, which no other tool takes for weights."""
CHANGES = "changed elements"
"""The key of the metadata of a checkpoint with patches that has the number of elements that each step has changed."""
_CHECKED_BYTES = 64 << 20
"""The patches that are read at once when they are checked, but for one that is larger."""


class Patch(msgspec.Struct, frozen=True, array_like=True):
    """What a layer says of a patch."""

    changed: int
    """The number of elements that it changes."""
    before: str
    """The digests of the tensor that is patched, as the manifest has them."""
    after: str
    payload: str = ""
    """The digests of the payload."""


class PatchLayer(msgspec.Struct, frozen=True):
    """What a file of patches says of itself."""

    step: int
    """The step of the store that it was written for."""
    save: int
    """The number of that save."""
    tensors: dict[str, Patch]

    def metadata(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Returns the `__metadata__` of the file, whose payloads have these digests, in the order of the file."""
        patches = [msgspec.structs.replace(self.tensors[name], payload=digest) for name, digest in digests.items()]
        return {"format": FORMAT, PATCHES: msgspec.json.encode((self.step, self.save, patches)).decode()}


def patch_layer(metadata: Mapping[str, str], names: Iterable[str]) -> PatchLayer | None:
    """Returns what the `__metadata__` of a layer says of its patches; None for whole tensors. Raises `ValueError`.

    `names` are those of the tensors in the file, in its order.
    """
    text = metadata.get(PATCHES)
    if text is None:
        return None
    check_size(text)
    try:
        step, save, patches = msgspec.json.decode(text, type=tuple[int, int, list[Patch]])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return PatchLayer(step, save, dict(zip(names, patches, strict=True)))


def chains(layers: Mapping[str, Iterable[str]], patches: Collection[str]) -> dict[str, list[str]]:
    """Returns the layers that the value of each tensor needs: the last one that has it whole, and the patches after it.

    A layer may have patches of a tensor that a later layer has whole, without the layer that they were for.

    Args:
        layers: The names of the tensors in each layer, in the order of the layers.
        patches: The layers that have patches.
    """
    needed: dict[str, list[str]] = {}
    for layer, names in layers.items():
        for name in names:
            needed[name] = [*needed.get(name, ()), layer] if layer in patches else [layer]
    return needed


def resolve(
    index_path: str,
    layers: Iterable[str],
    contents: dict[str, Contents],
    trees: dict[str, Mapping[str, object]],
) -> tuple[dict[str, str], dict[str, Patched], dict[str, int]]:
    """Removes from `contents` and `trees` the layers with patches, and from the others the tensors that are replaced.

    Returns the layer of each tensor that remains; the patched tensors, whose patches have been read and checked; and
    the number of elements that each step has changed. Raises `DamagedFileError`.
    """
    tables = {layer: tree for layer in layers if isinstance(tree := trees[layer], StoredTensors)}
    stored, changes = dict[str, _Stored](), dict[str, int]()
    try:
        patches = {layer: patch for layer in tables if (patch := patch_layer(contents[layer].metadata, tables[layer]))}
        needed = chains(tables, patches)
        if tables.keys() != trees.keys():
            raise ValueError("other layers than the index describes")
        for name, (first, *rest) in needed.items():
            if first in patches:
                raise ValueError(f"patches of {quote(name)}, which no layer has whole")
            if rest:
                base, payloads = tables[first][name], [tables[layer][name] for layer in rest]
                records = [patches[layer].tensors[name] for layer in rest]
                is_chain = all(below.after == patch.before for below, patch in pairwise(records))
                if not is_chain or any(payload.dtype_name != "uint8" for payload in payloads):
                    raise ValueError(f"a patch of another tensor than {quote(name)}, or of other values of it")
                stored[name] = _Stored(base, payloads, records)
    except (ValueError, LookupError) as error:
        what = "the layers of the checkpoint do not fit together"
        raise DamagedFileError(what, where=index_path, found=error) from error
    files = {path: known for each in contents.values() for path, known in each.files.items()}
    patched = _checked([*stored.items()], files)
    for layer, table in tables.items():
        if layer not in patches:
            trees[layer] = table.under_names({name: name for name in table if needed[name][0] == layer})
            continue
        del trees[layer], contents[layer]
        step, changed = f"step {patches[layer].step}", sum(patch.changed for patch in patches[layer].tensors.values())
        changes[step] = changes.get(step, 0) + changed
    return {name: chain[0] for name, chain in needed.items()}, patched, changes


class _Stored(msgspec.Struct, frozen=True):
    """A tensor with patches, which have not been checked."""

    base: StoredTensor
    payloads: list[StoredTensor]
    records: list[Patch]


def _checked(tensors: list[tuple[str, _Stored]], files: Mapping[str, FileFingerprint]) -> dict[str, Patched]:
    """Reads payloads, and compares them with their digests. Raises `DamagedFileError`."""
    from modelstate.formats import delta
    from modelstate.formats.block_writer import write_blocks
    from modelstate.io.engine import read_ranges
    from modelstate.io.tensors import runs

    patched: dict[str, Patched] = {}
    while tensors:
        end = nbytes = 0
        while end < len(tensors) and nbytes < _CHECKED_BYTES:
            nbytes += sum(payload.nbytes for payload in tensors[end][1].payloads)
            end += 1
        group, tensors = tensors[:end], tensors[end:]
        payloads = [payload for _, of in group for payload in of.payloads]
        values = runs(payloads, partial(read_ranges, files=files))
        found = iter(zip(values, write_blocks(None, 0, values), strict=True))
        for name, of in group:
            base, checksums = of.base, {of.base.extent: Checksum(ALGORITHM, BLOCK_BYTES, of.records[0].before)}
            directories = []
            for payload, record, (value, digest) in zip(of.payloads, of.records, found, strict=False):
                if digest != record.payload:
                    raise DamagedFileError("a patch is not what its checksum says", where=payload.extent.path)
                checksums[payload.extent] = Checksum(ALGORITHM, BLOCK_BYTES, digest)
                directories.append(delta.check(value, base.numel, base.dtype.itemsize, payload.extent.path))
            patched[name] = Patched(delta.patched(base, of.payloads, directories), of.records[-1].after, checksums)
    return patched
