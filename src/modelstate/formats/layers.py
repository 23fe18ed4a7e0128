"""Layers: the files of a model in a step of a store with `delta=`, of which later ones change tensors of earlier ones.

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

    dtype: str
    """The name that torch has for the dtype of the tensor."""
    shape: tuple[int, ...]
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
        """Returns the `__metadata__` of the file, whose payloads have these digests."""
        tensors = {name: msgspec.structs.replace(self.tensors[name], payload=digests[name]) for name in digests}
        layer = PatchLayer(self.step, self.save, tensors)
        return {"format": FORMAT, PATCHES: msgspec.json.encode(layer).decode()}


def patch_layer(metadata: Mapping[str, str]) -> PatchLayer | None:
    """Returns what the `__metadata__` of a layer says of its patches; None for whole tensors. Raises `ValueError`."""
    text = metadata.get(PATCHES)
    if text is None:
        return None
    check_size(text)
    try:
        return msgspec.json.decode(text, type=PatchLayer)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def chains(layers: Mapping[str, Iterable[str]], patches: Collection[str]) -> dict[str, list[str]]:
    """Returns the layers that the value of each tensor needs: the last one that has it whole, and the patches after it.

    Args:
        layers: The names of the tensors in each layer, in the order of the layers.
        patches: The layers that have patches.

    Raises `KeyError` for a patch of nothing.
    """
    needed: dict[str, list[str]] = {}
    for layer, names in layers.items():
        for name in names:
            needed[name] = [*needed[name], layer] if layer in patches else [layer]
    return needed


def resolve(
    index_path: str,
    layers: Iterable[str],
    weight_map: Mapping[str, str],
    contents: dict[str, Contents],
    trees: dict[str, Mapping[str, object]],
) -> tuple[dict[str, str], dict[str, Patched], dict[str, int]]:
    """Removes from `contents` and `trees` the layers with patches, and from the others the tensors that are replaced.

    Returns the layer of each tensor that remains; the patched tensors, whose patches have been read and checked; and
    the number of elements that each step has changed. Raises `DamagedFileError`.
    """
    from modelstate.formats import delta

    tables = {layer: tree for layer in layers if isinstance(tree := trees[layer], StoredTensors)}
    patched, changes = dict[str, Patched](), dict[str, int]()
    payloads: list[tuple[StoredTensor, StoredTensor, str]] = []
    try:
        patches = {layer: patch for layer in tables if (patch := patch_layer(contents[layer].metadata)) is not None}
        needed = chains(tables, patches)
        if tables.keys() != trees.keys() or weight_map != {name: chain[-1] for name, chain in needed.items()}:
            raise ValueError("other layers than the index describes")
        for name, (first, *rest) in needed.items():
            if rest:
                base, of_base = tables[first][name], [tables[layer][name] for layer in rest]
                records = [patches[layer].tensors[name] for layer in rest]
                kinds = {
                    (payload.dtype_name, record.dtype, record.shape)
                    for payload, record in zip(of_base, records, strict=True)
                }
                is_chain = all(below.after == patch.before for below, patch in pairwise(records))
                if kinds != {("uint8", base.dtype_name, base.shape)} or not is_chain:
                    raise ValueError(f"a patch of another tensor than {quote(name)}, or of other values of it")
                of_parts = {base.extent: records[0].before}
                of_parts |= {payload.extent: record.payload for payload, record in zip(of_base, records, strict=True)}
                checksums = {extent: Checksum(ALGORITHM, BLOCK_BYTES, value) for extent, value in of_parts.items()}
                patched[name] = Patched(delta.patched(base, of_base), records[-1].after, checksums)
                payloads += [(base, payload, of_parts[payload.extent]) for payload in of_base]
    except (ValueError, LookupError) as error:
        what = "the layers of the checkpoint do not fit together"
        raise DamagedFileError(what, where=index_path, found=error) from error
    _check_payloads(payloads, {path: known for each in contents.values() for path, known in each.files.items()})
    for layer, table in tables.items():
        if layer not in patches:
            trees[layer] = table.under_names({name: name for name in table if needed[name][0] == layer})
            continue
        del trees[layer], contents[layer]
        step, changed = f"step {patches[layer].step}", sum(patch.changed for patch in patches[layer].tensors.values())
        changes[step] = changes.get(step, 0) + changed
    return {name: chain[0] for name, chain in needed.items()}, patched, changes


def _check_payloads(
    payloads: list[tuple[StoredTensor, StoredTensor, str]], files: Mapping[str, FileFingerprint]
) -> None:
    """Reads payloads, each with the tensor that it patches and with its digests. Raises `DamagedFileError`."""
    from modelstate.formats import delta
    from modelstate.formats.block_writer import write_blocks
    from modelstate.io.engine import read_ranges
    from modelstate.io.tensors import runs

    while payloads:
        end = nbytes = 0
        while end < len(payloads) and nbytes < _CHECKED_BYTES:
            nbytes += payloads[end][1].nbytes
            end += 1
        group, payloads = payloads[:end], payloads[end:]
        values = runs([payload for _, payload, _ in group], partial(read_ranges, files=files))
        digests = write_blocks(None, 0, values)
        for (base, payload, expected), value, digest in zip(group, values, digests, strict=True):
            where = payload.extent.path
            if digest != expected:
                raise DamagedFileError("a patch is not what its checksum says", where=where)
            delta.check(value, base.numel, base.dtype.itemsize, where)
