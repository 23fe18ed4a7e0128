"""Layers: the files of a model in a step of a store with `delta=`. Later files change tensors of earlier files.

A layer has whole tensors, or patches (`formats/delta.py`). The value of a tensor is that of the last layer that has it
whole, with the patches of the later layers applied in their order. docs/delta_format.md describes the files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from modelstate.errors import DamagedFileError
from modelstate.formats.manifest import ALGORITHM, BLOCK_BYTES, PATCHES, check_size
from modelstate.formats.tree import Contents, Patched
from modelstate.io.files import FileFingerprint
from modelstate.process import ThreadValue
from modelstate.spec import ByteRange, Checksum, StoredTensor, StoredTensors
from modelstate.text_format import quote

if TYPE_CHECKING:
    import torch

    from modelstate.formats.block_writer import LazyTensor
    from modelstate.formats.delta import Directory

FORMAT = "modelstate-delta"
"""The `format` in `__metadata__` of such a file, which no other tool takes for weights."""
_CHECKED_BYTES = 16 << 20
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
        """Returns the `__metadata__` of the file, in its order. `digests` are those of payloads that have none here."""
        patches = [
            patch if (patch := self.tensors[name]).payload else msgspec.structs.replace(patch, payload=digest)
            for name, digest in digests.items()
        ]
        return {"format": FORMAT, PATCHES: msgspec.json.encode((self.step, self.save, patches)).decode()}


class NewLayers(msgspec.Struct, frozen=True):
    """The layers that a step gets of an object: whole tensors, and patches."""

    whole: Mapping[str, torch.Tensor | LazyTensor]
    constant: Set[str]
    """The whole tensors that do not change from step to step."""
    payloads: Mapping[str, torch.Tensor | LazyTensor] = {}
    patches: PatchLayer | None = None
    """Describes the payloads; None where there are none."""


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
    stored, changes = dict[str, list[_Link]](), dict[str, int]()
    try:
        patches = {layer: patch for layer in tables if (patch := patch_layer(contents[layer].metadata, tables[layer]))}
        needed = chains(tables, patches)
        if tables.keys() != trees.keys():
            raise ValueError("other layers than the index describes")
        for name, (first, *rest) in needed.items():
            if first in patches:
                raise ValueError(f"patches of {quote(name)}, which no layer has whole")
            if rest:
                base, of_layers = tables[first][name], [(patches[layer], tables[layer][name]) for layer in rest]
                links = [_Link(name, layer.step, base, payload, layer.tensors[name]) for layer, payload in of_layers]
                is_chain = all(below.patch.after == link.patch.before for below, link in pairwise(links))
                if not is_chain or any(link.payload.dtype_name != "uint8" for link in links):
                    raise ValueError(f"a patch of another tensor than {quote(name)}, or of other values of it")
                stored[name] = links
    except (ValueError, LookupError) as error:
        what = "the layers of the checkpoint do not fit together"
        raise DamagedFileError(what, where=index_path, found=error) from error
    files = {path: known for each in contents.values() for path, known in each.files.items()}
    patched = _checked(stored, files)
    for layer, table in tables.items():
        if layer not in patches:
            trees[layer] = table.under_names({name: name for name in table if needed[name][0] == layer})
            continue
        del trees[layer], contents[layer]
        step, changed = f"step {patches[layer].step}", sum(patch.changed for patch in patches[layer].tensors.values())
        changes[step] = changes.get(step, 0) + changed
    return {name: chain[0] for name, chain in needed.items()}, patched, changes


class _Link(NamedTuple):
    """A patch in the chain of a tensor."""

    name: str
    step: int
    """The step that it was written for."""
    base: StoredTensor
    """What the first patch of the chain is for."""
    payload: StoredTensor
    patch: Patch


_known: WeakValueDictionary[tuple[FileFingerprint, int, str], Directory] = WeakValueDictionary()
"""The payloads that open checkpoints have checked."""
trusts_known_patches = ThreadValue(False)
"""Whether this thread takes payloads as they are that were checked for a checkpoint that is still open.

A step has files of the steps before it. Who opens a step so verifies the payloads that are applied."""


def _checked(chains: Mapping[str, Sequence[_Link]], files: Mapping[str, FileFingerprint]) -> dict[str, Patched]:
    """Reads payloads, and compares them with their digests. Raises `DamagedFileError`."""
    from modelstate.formats import delta
    from modelstate.formats.block_writer import write_blocks
    from modelstate.io.engine import read_ranges
    from modelstate.io.tensors import runs

    directories: dict[ByteRange, Directory] = {}
    keys = {
        link.payload.extent: (files[link.payload.extent.path], link.payload.extent.start, link.patch.payload)
        for links in chains.values()
        for link in links
    }
    if trusts_known_patches.value:
        directories |= {extent: known for extent, key in keys.items() if (known := _known.get(key)) is not None}
    unchecked = [link for links in chains.values() for link in links if link.payload.extent not in directories]
    unchecked.sort(key=lambda link: link.payload.extent)  # each file is opened and read once
    while unchecked:
        end = nbytes = 0
        while end < len(unchecked) and nbytes < _CHECKED_BYTES:
            nbytes += unchecked[end].payload.nbytes
            end += 1
        group, unchecked = unchecked[:end], unchecked[end:]
        values = runs([link.payload for link in group], partial(read_ranges, files=files))
        for link, value, digest in zip(group, values, write_blocks(None, 0, values), strict=True):
            extent = link.payload.extent
            if digest != link.patch.payload:
                raise DamagedFileError(
                    "a patch is not what its checksum says",
                    where=extent.path,
                    found=f"the patch of {quote(link.name)} in step {link.step}",
                    remedy=f"get step {link.step} again from where it was saved; or take another step",
                )
            directory = delta.check(value, link.base.numel, link.base.dtype.itemsize, extent.path)
            directories[extent] = _known[keys[extent]] = directory
    patched: dict[str, Patched] = {}
    for name, links in chains.items():
        base, payloads = links[0].base, [link.payload for link in links]
        digests = {base.extent: links[0].patch.before, **{link.payload.extent: link.patch.payload for link in links}}
        of_payloads = [directories[payload.extent] for payload in payloads]
        later = partial(delta.patched, payloads=payloads, directories=of_payloads)
        patched[name] = Patched(
            later(base),
            [links[0].patch.before, *(link.patch.after for link in links)],
            {extent: Checksum(ALGORITHM, BLOCK_BYTES, digest) for extent, digest in digests.items()},
            later,
        )
    return patched
