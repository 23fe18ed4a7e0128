"""What the ranks of a load tell each other: digests of what they load before they read, and what they have read.

With `read_once=True` one rank of each group of replicas reads a value, and broadcasts it to the others. It pays where
storage is slower than the network: a cold file system, or one that all ranks share. Values that code of a user computes
are read by every rank, and so are those for other devices than the CPU.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.distributed.agreement import Agreement, Digest, agreement_of
from modelstate.io.engine import Request, read_ranges
from modelstate.io.memory import fresh_tensors
from modelstate.planning.matching import MatchedCheckpoint
from modelstate.planning.plan import RankReport
from modelstate.planning.planner import Planner
from modelstate.planning.transfer import Execution, Way
from modelstate.rules.expression import Derived, leaves, read_bytes
from modelstate.spec import AT_ONCE_BYTES, ByteRange, StoredTensor, pieces
from modelstate.text_format import count, size
from modelstate.torch_compat.plain import is_plain, is_sharded
from modelstate.torch_compat.sharding import replicas_of

PLANNING, READING, SHARING = "planning", "reading", "sending values to replicas"
LAST_CHECKS, COMMIT = "the last checks", "the commit"
"""The phases of a load. Each phase ends with a vote of all ranks."""
_ADDRESS = r" at 0x[0-9a-f]+"
_MOST_SAMPLES = 4096
"""The most tensors without checksums whose bytes are sampled."""
_SAMPLE_BYTES = 64


def digests_of(planner: Planner) -> list[Digest]:
    """Returns what must be equal on all ranks of a load, whatever part of it a rank reads.

    Paths are not compared: each machine may have a copy of its own.
    """
    checkpoint, matched = planner.checkpoint, planner.matched
    model, _ = planner.names
    slots = planner.slots_before.tensors
    devices = sorted({slot.tensor.device.type for slot in slots})
    return [
        Digest.of("the models", f"{model} with {count(len(slots), 'tensor')} on {', '.join(devices)}", _slots(planner)),
        digest_of_source(checkpoint),
        Digest.of("the rules and options", _text(matched), [_text(matched), *map(text_of, matched.rules)]),
    ]


def digest_of_source(checkpoint: Checkpoint) -> Digest:
    """Returns the digest of a checkpoint: its names, shapes and dtypes, and its checksums or samples of its bytes."""
    part = f" [{checkpoint.key}]" if checkpoint.key else ""
    text = f"{checkpoint.source}{part} with {count(len(checkpoint.flat.tensors), 'tensor')}"
    return Digest.of("the sources", text, _source(checkpoint))


def before_call(call: str) -> Callable[..., AbstractContextManager[object]]:
    """Returns the `within=` of `checked_call` for a call with a model: its ranks raise the error of any of them."""

    def within(*args: object, process_group: Any = None, **options: object) -> AbstractContextManager[object]:
        models = [value for value in (*args, *options.values()) if isinstance(value, nn.Module)]
        return agreement_of(models[0] if models else (), process_group, call=call).before(PLANNING)

    return within


def described(state: object) -> Iterator[object]:
    """Yields what a digest of a tree of containers and values has of it: of a tensor shape, dtype and a few bytes."""
    if isinstance(state, torch.Tensor):
        data = _middle(state) if _has_bytes(state) else b""
        yield tuple(state.shape), state.dtype, data
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield key
            yield from described(value)
    elif isinstance(state, list | tuple):
        yield len(state)
        for value in state:
            yield from described(value)
    elif isinstance(state, str | int | float | None):
        yield repr(state)
    else:
        yield type(state).__name__


def rank_reports(
    planner: Planner, shared: Sequence[SharedRead], agreement: Agreement
) -> tuple[tuple[RankReport, ...], int]:
    """Returns what each rank has read, and the bytes that more than one rank has read, counted for each further rank.

    A rank sends four numbers, whatever the size of the model.
    """
    in_columns = [item.transfers for item in planner.executions if item.transfers.own is None]  # in no DTensor
    read_bytes_here = whole_bytes = sum(item.nbytes for item in in_columns if item.maps is None)
    is_read_here = set(map(id, to_read_here(planner.singles, shared)))
    for item in planner.singles:
        facts = item.transfers.facts
        stored, whole = facts.stored, facts.stored
        if stored is None or item.transfers.maps is not None:
            continue
        if facts.sharded is not None:
            whole = planner.incoming.origin_of(facts.sharded.value)[1]
        read_bytes_here += read_bytes(stored) if id(item) in is_read_here else 0
        whole_bytes += 0 if whole is None else read_bytes(whole)
    times = [int(agreement.seconds.get(name, 0) * 1e9) for name in (PLANNING, READING, COMMIT)]
    ranks = [
        RankReport(rank, nbytes, *(nanoseconds / 1e9 for nanoseconds in phases))
        for rank, (nbytes, *phases) in agreement.exchanged([read_bytes_here, *times]).items()
    ]
    return tuple(ranks), max(sum(rank.read_bytes for rank in ranks) - whole_bytes, 0)


@contextmanager
def shared_generator(planner: Planner, agreement: Agreement) -> Iterator[None]:
    """Has the initial values of missing tensors be those of the first rank's random generator, in a phase.

    The generators of the other ranks do not change.
    """
    if not planner.initialised:
        yield
        return
    state = agreement.on_first(lambda: torch.get_rng_state().tolist())
    with nullcontext() if agreement.is_first else torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))
        yield


def _slots(planner: Planner) -> Iterator[object]:
    for slot in planner.slots_before.tensors:
        tensor: Any = slot.tensor
        layout = f"{tensor.placements!r} on {tuple(tensor.device_mesh.shape)}" if is_sharded(tensor) else ""
        yield slot.names, slot.kind, tuple(tensor.shape), tensor.dtype, layout
    if planner.options.read_once:
        # Which values one rank reads for others depends on where they go, and whether they may be maps.
        for item in (single.transfers for single in planner.singles):
            yield item.name, item.on_cpu, bool(planner.options.map and item.param.is_meta)


def _source(checkpoint: Checkpoint) -> Iterator[object]:
    for name, stored in checkpoint.flat.tensors.items():
        yield name, stored.dtype, tuple(stored.shape)
    yield from checkpoint.extra
    yield sorted(fingerprint.nbytes for fingerprint in checkpoint.fingerprints.values())
    yield from (checksum.value for checksum in checkpoint.checksums.values())
    yield _samples(checkpoint)


def _samples(checkpoint: Checkpoint) -> bytes:
    """Returns a few bytes from the middle of the tensors that have no checksum, or of some where they are very many."""
    known = checkpoint.checksums
    tensors = [
        piece
        for stored in checkpoint.flat.tensors.values()
        for leaf in leaves(stored)
        for piece in pieces(leaf)
        if (isinstance(piece, StoredTensor) and piece.nbytes and piece.storage not in known)
        or (isinstance(piece, torch.Tensor) and _has_bytes(piece))
    ]
    chosen = tensors[:: -(-len(tensors) // _MOST_SAMPLES) or 1]
    buffer = torch.zeros(len(chosen) * _SAMPLE_BYTES, dtype=torch.uint8, device="cpu")
    requests = []
    for index, piece in enumerate(chosen):
        place = buffer[index * _SAMPLE_BYTES : (index + 1) * _SAMPLE_BYTES]
        if isinstance(piece, StoredTensor):
            path, start, nbytes = piece.extent
            sampled = ByteRange(path, start + nbytes // 2, min(_SAMPLE_BYTES, nbytes - nbytes // 2))
            requests.append(Request(sampled, place.data_ptr()))
        else:
            data = _middle(piece)
            place[: len(data)] = data
    read_ranges(requests, files=checkpoint.fingerprints)
    return buffer.numpy().tobytes()


def _middle(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a few bytes from the middle of a tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)[tensor.nbytes // 2 :][:_SAMPLE_BYTES]


def _has_bytes(tensor: torch.Tensor) -> bool:
    is_view = tensor.is_conj() or tensor.is_neg()  # its memory has other values
    return is_plain(tensor) and tensor.is_contiguous() and not is_view and not tensor.is_meta and tensor.numel() > 0


def text_of(value: object) -> str:
    """Returns the text of a value without addresses, which differ from process to process."""
    return re.sub(_ADDRESS, "", repr(value))


def _text(matched: MatchedCheckpoint) -> str:
    """Returns the options that are not the default, without addresses and without indices of devices."""
    texts = [
        f"{name}={text_of(value.type if isinstance(value, torch.device) else value)}"
        for name, value in matched.options.of_plan().items()
    ]
    return ", ".join(texts) or "no options"


# Values that one rank reads for several.


class SharedRead(msgspec.Struct, frozen=True):
    """A value that one rank reads for several."""

    execution: Execution
    ranks: tuple[int, ...]
    """The ranks that hold the same part of the tensor."""
    reader: int
    """The rank that reads it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the value as it is loaded."""
        return self.execution.transfers.param.numel() * self.execution.transfers.dtype.itemsize


def shared_reads(executions: Sequence[Execution], agreement: Agreement) -> list[SharedRead]:
    """Chooses the values that one rank reads for its replicas, and has them staged before the commit.

    The ranks of a group take turns by bytes. All of them come to the same choice, since their transfers are the same.
    """
    turns: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    found: list[SharedRead] = []
    for execution in executions:
        item, facts = execution.transfers, execution.transfers.facts
        ranks = agreement.ranks
        if facts.sharded is not None:
            ranks = replicas_of(facts.sharded.tensor)
        stored = facts.stored
        is_computed = facts.is_transformed or item.way is Way.CODE
        is_certain = stored.is_certain if isinstance(stored, Derived) else True
        in_file = stored is not None and not facts.is_live
        has_bytes = item.param.numel() > 0 and item.maps is None
        if len(ranks) < 2 or not (in_file and is_certain and has_bytes and item.on_cpu and not is_computed):
            continue
        reader = min(ranks, key=turns[ranks].__getitem__)
        turns[ranks][reader] += item.nbytes
        found.append(SharedRead(execution, ranks, reader))
        if item.way in (Way.INTO, Way.STAGED):
            execution.stage_instead(f"rank {reader} reads it for {len(ranks)} ranks")
    return found


def notes_on_shared(shared: Sequence[SharedRead]) -> list[str]:
    """Says how many values one rank reads for others."""
    by_size = Counter(len(read.ranks) for read in shared)
    return [
        f"{count(number, 'tensor')} of {size(sum(read.nbytes for read in shared if len(read.ranks) == ranks))} read by "
        f"one of {ranks} ranks and broadcast"
        for ranks, number in sorted(by_size.items())
    ]


def to_read_here(executions: Sequence[Execution], shared: Sequence[SharedRead]) -> list[Execution]:
    """Returns what this rank reads itself."""
    if not shared:
        return list(executions)
    rank = dist.get_rank()
    received = {id(read.execution) for read in shared if read.reader != rank}
    return [item for item in executions if id(item) not in received]


def broadcast(shared: Sequence[SharedRead], agreement: Agreement) -> None:
    """Sends the values that this rank has read to its replicas, and receives the others.

    All values of a group and a reader go together, the groups in the order of their first values: a rank may have no
    part of a value between them. All ranks of a group see the same order, so none waits for a rank that waits for it.
    Small values are sent in a buffer of limited size. Raises `RankLostError` where a rank does not take part.
    """
    rank = dist.get_rank()
    received = [read.execution for read in shared if read.reader != rank]
    finals = fresh_tensors([layout for item in received for layout in item.transfers.layouts()])
    for item, final in zip(received, finals, strict=True):
        item.finals = [final]
    groups: dict[tuple[tuple[int, ...], int], list[SharedRead]] = defaultdict(list)
    for read in shared:
        groups[read.ranks, read.reader].append(read)
    for (ranks, reader), reads in groups.items():
        batch, left = list[SharedRead](), AT_ONCE_BYTES
        for read in reads:
            if batch and read.nbytes > left:
                _send(batch, ranks, reader, agreement)
                batch, left = [], AT_ONCE_BYTES
            batch.append(read)
            left -= read.nbytes
        _send(batch, ranks, reader, agreement)


def _send(batch: Sequence[SharedRead], ranks: tuple[int, ...], reader: int, agreement: Agreement) -> None:
    finals = [read.execution.final for read in batch if read.execution.final is not None]
    # Their elements may lie in another order on each rank.
    values = [final.detach().contiguous() for final in finals]
    tensors = [value.view(-1).view(torch.uint8) for value in values]
    buffer = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    agreement.broadcast(buffer, ranks, reader)
    if reader == dist.get_rank():
        return
    for final, value, tensor, part in zip(
        finals, values, tensors, torch.split(buffer, [len(tensor) for tensor in tensors]), strict=True
    ):
        if len(tensors) > 1:
            tensor.copy_(part)
        if not final.is_contiguous():
            final.copy_(value)
