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
from functools import partial
from typing import Any

import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.distributed.agreement import COMMIT, PLANNING, READING, Agreement, Digest, agreement_of
from modelstate.io.engine import read_ranges
from modelstate.io.tensors import runs
from modelstate.planning.plan import RankReport
from modelstate.planning.planner import Planner
from modelstate.planning.transfer import Execution, Way, allocate
from modelstate.rules.expression import Derived, leaves, read_bytes
from modelstate.spec import AT_ONCE_BYTES, ByteRange, StoredTensor, pieces
from modelstate.text_format import count, size
from modelstate.torch_compat.plain import is_plain, is_sharded
from modelstate.torch_compat.sharding import replicas_of

SHARING, LAST_CHECKS = "sending values to replicas", "the last checks"
"""The phases that only a load has."""
_ADDRESS = r" at 0x[0-9a-f]+"
_MOST_SAMPLES = 4096
"""The most tensors without checksums whose bytes are sampled."""
_SAMPLE_BYTES = 64


def digests_of(planner: Planner) -> list[Digest]:
    """Returns what must be equal on all ranks of a load, whatever part of it a rank reads.

    Paths are not compared: each machine may have a copy of its own. Neither are addresses and indices of devices.
    """
    matched, slots = planner.matched, planner.slots_before.tensors
    devices = ", ".join(sorted({slot.tensor.device.type for slot in slots}))
    model = f"{planner.names[0]} with {count(len(slots), 'tensor')} on {devices}"
    given = {
        name: text_of(value.type if isinstance(value, torch.device) else value)
        for name, value in matched.options.of_plan().items()
    }
    options = ", ".join(f"{name}={text}" for name, text in given.items()) or "no options"
    return [
        Digest.of("the models", model, _slots(planner)),
        digest_of_source(planner.checkpoint),
        Digest.of("the rules and options", options, [options, *map(text_of, matched.rules)]),
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
        yield tuple(state.shape), state.dtype, _sample(state)
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield key
            yield from described(value)
    elif isinstance(state, list | tuple):
        yield len(state)
        for value in state:
            yield from described(value)
    else:
        yield repr(state) if isinstance(state, str | int | float | None) else type(state).__name__


def text_of(value: object) -> str:
    """Returns the text of a value without addresses, which differ from process to process."""
    return re.sub(_ADDRESS, "", repr(value))


def rank_reports(planner: Planner, agreement: Agreement) -> tuple[tuple[RankReport, ...], int]:
    """Returns what each rank has read, and the bytes that more than one rank has read, counted for each further rank.

    A rank sends four numbers, whatever the size of the model.
    """
    in_columns = [item.transfers for item in planner.executions if item.transfers.own is None]  # in no DTensor
    read_bytes_here = whole_bytes = sum(item.nbytes for item in in_columns if item.maps is None)
    for item in planner.singles:
        facts, stored = item.transfers.facts, item.transfers.facts.stored
        if stored is not None and item.transfers.maps is None:
            whole = stored if facts.sharded is None else planner.incoming.origin_of(facts.sharded.value)[1]
            read_bytes_here += read_bytes(stored) if item.reader in (None, agreement.rank) else 0
            whole_bytes += 0 if whole is None else read_bytes(whole)
    times = [int(agreement.seconds.get(name, 0) * 1e9) for name in (PLANNING, READING, COMMIT)]
    ranks = [
        RankReport(rank, nbytes, *(nanoseconds / 1e9 for nanoseconds in phases))
        for rank, (nbytes, *phases) in agreement.exchanged([read_bytes_here, *times]).items()
    ]
    return tuple(ranks), max(sum(rank.read_bytes for rank in ranks) - whole_bytes, 0)


@contextmanager
def reading(planner: Planner, agreement: Agreement) -> Iterator[None]:
    """The block within a phase in which ranks read: connects the replicas that `broadcast` sends values to.

    Initial values of missing tensors are those of the first rank's random generator. The generators of the other ranks
    do not change.
    """
    for replicas in dict.fromkeys(item.ranks for item in planner.singles if item.reader is not None):
        agreement.connect(replicas)  # first of all, because the other ranks wait here for this one
    if not planner.initialised:
        yield
        return
    state = agreement.decided("reading initial values", lambda: torch.get_rng_state().tolist())
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
    # A few bytes from the middle of the tensors that have no checksum, or of some where they are very many.
    parts = [part for stored in checkpoint.flat.tensors.values() for leaf in leaves(stored) for part in pieces(leaf)]
    known, in_files = checkpoint.checksums, list[StoredTensor]()
    parts = [part for part in parts if not (isinstance(part, StoredTensor) and part.storage in known)]
    for part in parts[:: -(-len(parts) // _MOST_SAMPLES) or 1]:
        if isinstance(part, StoredTensor):
            path, start, nbytes = part.extent
            sampled = ByteRange(path, start + nbytes // 2, min(_SAMPLE_BYTES, nbytes - nbytes // 2))
            in_files.append(StoredTensor.whole("uint8", (sampled.nbytes,), sampled))
        else:
            yield _sample(part)
    yield [part.numpy().tobytes() for part in runs(in_files, partial(read_ranges, files=checkpoint.fingerprints))]


def _sample(tensor: torch.Tensor) -> bytes:
    """Returns a few bytes from the middle of a tensor; none where its memory has no values, or others."""
    if not is_plain(tensor) or tensor.is_meta or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return b""
    middle = tensor.detach().reshape(-1).view(torch.uint8)[tensor.nbytes // 2 :][:_SAMPLE_BYTES]
    return middle.cpu().numpy().tobytes()


# Values that one rank reads for several.


def share_reads(executions: Sequence[Execution], agreement: Agreement) -> list[str]:
    """Chooses the values that one rank reads for its replicas, and has them staged before the commit.

    The ranks of a group take turns by bytes. All of them come to the same choice, since their transfers are the same.
    Returns notes on how many values these are.
    """
    turns: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    numbers, sizes = Counter[int](), Counter[int]()
    for execution in executions:
        item, facts = execution.transfers, execution.transfers.facts
        ranks = agreement.ranks if facts.sharded is None else replicas_of(facts.sharded.tensor)
        stored, nbytes = facts.stored, item.param.numel() * item.dtype.itemsize
        is_computed = facts.is_transformed or item.way is Way.CODE
        is_certain = stored.is_certain if isinstance(stored, Derived) else stored is not None and not facts.is_live
        if len(ranks) < 2 or not (is_certain and nbytes and item.maps is None and item.on_cpu and not is_computed):
            continue
        execution.ranks, execution.reader = ranks, min(ranks, key=turns[ranks].__getitem__)
        turns[ranks][execution.reader] += item.nbytes
        numbers[len(ranks)] += 1
        sizes[len(ranks)] += nbytes
        if item.way in (Way.INTO, Way.STAGED):
            execution.stage_instead(f"rank {execution.reader} reads it for {len(ranks)} ranks")
    return [
        f"{count(number, 'tensor')} of {size(sizes[ranks])} read by one of {ranks} ranks and broadcast"
        for ranks, number in sorted(numbers.items())
    ]


def broadcast(planner: Planner, agreement: Agreement) -> None:
    """Sends the values that this rank has read to its replicas, and receives the others, in a phase.

    All values of a group and a reader go together, the groups in the order of their first values: a rank may have no
    part of a value between them. All ranks of a group see the same order, so none waits for a rank that waits for it.
    Small values are sent in a buffer of limited size. Raises `RankLostError` where a rank does not take part.
    """
    shared = [item for item in planner.singles if item.reader is not None]
    if not shared:
        return
    with agreement.phase(SHARING), agreement.barrier():
        allocate(item for item in shared if item.reader != agreement.rank)
        groups: dict[tuple[tuple[int, ...], int], list[torch.Tensor]] = defaultdict(list)
        for item in shared:
            assert item.reader is not None
            groups[item.ranks, item.reader] += item.finals
        for (ranks, reader), finals in groups.items():
            batches, left = list[list[torch.Tensor]](), 0
            for final in finals:
                if not batches or final.nbytes > left:
                    batches.append([])
                    left = AT_ONCE_BYTES
                batches[-1].append(final)
                left -= final.nbytes
            for batch in batches:
                _send(batch, ranks, reader, agreement)


def _send(finals: Sequence[torch.Tensor], ranks: tuple[int, ...], reader: int, agreement: Agreement) -> None:
    # Their elements may lie in another order on each rank.
    values = [final.detach().contiguous() for final in finals]
    tensors = [value.view(-1).view(torch.uint8) for value in values]
    buffer = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    agreement.broadcast(buffer, ranks, reader)
    if reader == agreement.rank:
        return
    parts = torch.split(buffer, [len(tensor) for tensor in tensors])
    for final, value, tensor, part in zip(finals, values, tensors, parts, strict=True):
        if len(tensors) > 1:
            tensor.copy_(part)
        if not final.is_contiguous():
            final.copy_(value)
