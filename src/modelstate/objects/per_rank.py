"""States that differ between the ranks of a run, such as those of random generators: all of them are saved.

Modules and optimizers have one state, whose tensors may be spread over the ranks. Of every other object each rank has a
state of its own. Where all ranks have the same one, it is saved once, and every rank of a later run gets it. Otherwise
the states of all ranks are saved, in the order of the ranks:

- A run on as many ranks gives each rank its own state.
- On another number of ranks, a random generator takes the state of the rank with its number. Where that run had no such
  rank, the generator stays as the program has seeded it.
- No other object can be restored on another number of ranks.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping

import torch
from msgspec.structs import replace

from modelstate.codec.codec import decode, encode
from modelstate.distributed.agreement import Agreement, Digest
from modelstate.distributed.connections import number_of
from modelstate.errors import ObjectStateError, UnsavableError
from modelstate.formats.manifest import digest
from modelstate.objects.objects import Target, object_code
from modelstate.objects.parts import KEPT, Kind, Part
from modelstate.text_format import size
from modelstate.torch_compat.plain import byte_tensor

_MAX_TEXT_BYTES = 64_000_000
"""The most bytes of the states of one rank that differ from those of others: they are sent as text."""


def gathered(parts: Mapping[str, Part], agreement: Agreement) -> dict[str, Part]:
    """Returns the parts of a save on all ranks, where states that differ between the ranks are lists of all of them.

    Args:
        parts: the captured states of this rank by path.
        agreement: the ranks that save together.

    Raises:
        DistributedError: The ranks save other objects.
        CodecError: A state has no encoding.
        UnsavableError: The states that differ are too large.
    """
    own = {path: part for path, part in parts.items() if part.kind not in (Kind.MODULE, Kind.OPTIMIZER)}
    kinds = {path: part.kind for path, part in parts.items()}
    with agreement.phase("capturing states", lambda: [Digest.of("the objects", ", ".join(kinds), kinds.items())]):
        texts = {path: _text(path, part.tree, with_values=False) for path, part in own.items()}
        numbers = [number_of([text]) for text in texts.values()]
    of_ranks = [json.loads(text) for text in agreement.texts("comparing states", json.dumps(numbers))]
    differing = [path for path, *values in zip(own, *of_ranks, strict=True) if len(set(values)) > 1]
    if not differing:
        return dict(parts)
    with agreement.phase("encoding states that differ between the ranks"):
        text = json.dumps([_text(path, own[path].tree, with_values=True) for path in differing])
        if len(text) > _MAX_TEXT_BYTES:
            raise UnsavableError(
                "the states of these objects differ between the ranks, and are too large to be saved for each rank",
                where=", ".join(differing),
                expected=f"at most {size(_MAX_TEXT_BYTES)} on each rank",
                found=size(len(text)),
                remedy="make large tensors parameters or buffers of a module, or DTensors",
            )
    states = [json.loads(text) for text in agreement.texts("gathering states", text)]
    with agreement.phase("decoding states that differ between the ranks"):
        of_all = {path: [_tree(text) for text in of_path] for path, *of_path in zip(differing, *states, strict=True)}
    return {
        path: replace(part, tree=of_all[path], ranks=len(states)) if path in of_all else part
        for path, part in parts.items()
    }


def of_this_rank(saved: Mapping[str, Part], targets: Mapping[str, Target], agreement: Agreement) -> dict[str, Part]:
    """Returns the saved parts with the states of this rank in place of those of all ranks.

    Raises:
        ObjectStateError: An object other than a random generator has a state for each of another number of ranks.
    """
    parts = {}
    ranks, position = max(len(agreement.ranks), 1), agreement.position
    for path, part in saved.items():
        target = targets.get(path)
        if not part.ranks or target is None:
            parts[path] = part
        elif part.ranks != ranks and not target.is_restored_last:
            raise ObjectStateError(
                "the state of the object differs from rank to rank, and the number of ranks has changed; nothing has "
                "been changed",
                where=path,
                expected=f"{part.ranks} ranks, as in the run that saved",
                found=f"{ranks} ranks" if ranks > 1 else "1 rank",
                remedy=f"leave the object out, so that it begins anew: allow_unexpected=[{path!r}]",
            )
        else:
            parts[path] = Part(part.kind, part.tree[position] if position < part.ranks else KEPT)
    return parts


def _text(path: str, tree: object, *, with_values: bool) -> str:
    """Returns a state as text, which is the same for equal states; without the values it has their digests."""

    def leaf(tensor: torch.Tensor) -> str:
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        values = b64encode(data).decode() if with_values else digest(data)
        return json.dumps([str(tensor.dtype).removeprefix("torch."), tensor.shape, values])

    with object_code(path, "its state cannot be encoded"):
        return json.dumps(encode(tree, leaf=leaf))


def _tree(text: str) -> object:
    def leaf(tensor: str | int) -> torch.Tensor:
        dtype, shape, data = json.loads(str(tensor))
        return byte_tensor(b64decode(data)).view(getattr(torch, dtype)).reshape(shape)

    return decode(json.loads(text), leaf=leaf)
