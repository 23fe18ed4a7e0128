"""What the ranks of a load compare before they read: the model, the source, and the options."""

import re
from collections.abc import Iterator

import torch

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.distributed.agreement import Digest
from modelstate.io.engine import Request, read_ranges
from modelstate.planning.plan import MatchedCheckpoint, Options
from modelstate.planning.preparation import Preparation
from modelstate.rules.expression import leaves
from modelstate.spec import ByteRange, StoredTensor, pieces
from modelstate.text_format import count
from modelstate.torch_compat.plain import is_plain, is_sharded
from modelstate.torch_compat.sharding import layout_of

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SAMPLES = 8
"""The tensors of which a few bytes are compared: two files of one layout differ in nearly every value."""
_SAMPLE_BYTES = 64


def digests_of(preparation: Preparation) -> list[Digest]:
    """Returns what must be equal on all ranks of a load, whatever part of it a rank reads.

    Paths are not compared: each machine may have a copy of its own.
    """
    checkpoint, matched = preparation.checkpoint, preparation.matched
    model, source = preparation.names
    return [
        Digest.of(
            "the models", f"{model} with {count(len(preparation.slots_before.tensors), 'tensor')}", _slots(preparation)
        ),
        Digest.of("the sources", f"{source} with {count(len(checkpoint.flat.tensors), 'tensor')}", _source(checkpoint)),
        Digest.of("the rules and options", _text(matched.asked), _options(matched)),
    ]


def _slots(preparation: Preparation) -> Iterator[object]:
    for slot in preparation.slots_before.tensors:
        layout = layout_of(slot.tensor) if is_sharded(slot.tensor) else ""
        yield slot.names, slot.kind, tuple(slot.tensor.shape), slot.tensor.dtype, layout


def _source(checkpoint: Checkpoint) -> Iterator[object]:
    for name, stored in checkpoint.flat.tensors.items():
        yield name, stored.dtype, tuple(stored.shape)
    yield from checkpoint.extra
    yield sorted(fingerprint.nbytes for fingerprint in checkpoint.fingerprints.values())
    yield _samples(checkpoint)


def _samples(checkpoint: Checkpoint) -> bytes:
    """Returns a few bytes from the middle of some tensors."""
    tensors = [
        piece
        for stored in checkpoint.flat.tensors.values()
        for leaf in leaves(stored)
        for piece in pieces(leaf)
        if (isinstance(piece, StoredTensor) and piece.nbytes) or (isinstance(piece, torch.Tensor) and _has_bytes(piece))
    ]
    chosen = tensors[:: -(-len(tensors) // _SAMPLES) or 1]
    buffer = torch.zeros(len(chosen) * _SAMPLE_BYTES, dtype=torch.uint8)
    requests = []
    for index, piece in enumerate(chosen):
        place = buffer[index * _SAMPLE_BYTES : (index + 1) * _SAMPLE_BYTES]
        if isinstance(piece, StoredTensor):
            path, start, nbytes = piece.extent
            sampled = ByteRange(path, start + nbytes // 2, min(_SAMPLE_BYTES, nbytes - nbytes // 2))
            requests.append(Request(sampled, place.data_ptr()))
        else:
            data = piece.detach().reshape(-1).view(torch.uint8)[piece.nbytes // 2 :][:_SAMPLE_BYTES]
            place[: len(data)] = data
    read_ranges(requests, fingerprints=checkpoint.fingerprints)
    return bytes(buffer.tolist())


def _has_bytes(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and tensor.is_contiguous() and tensor.device.type == "cpu" and tensor.numel() > 0


def _options(matched: MatchedCheckpoint) -> Iterator[object]:
    yield _text(matched.asked)
    yield from (_ADDRESS.sub("", repr(rule)) for rule in matched.options.rules)


def _text(options: Options) -> str:
    """Returns the options that are not the default, without addresses and without indices of devices."""
    default = Options()
    given = {
        name: value.type if isinstance(value, torch.device) else value
        for name in Options.__dataclass_fields__
        if (value := getattr(options, name)) != getattr(default, name)
    }
    return _ADDRESS.sub("", ", ".join(f"{name}={value!r}" for name, value in given.items())) or "no options"
