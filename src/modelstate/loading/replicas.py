"""`read_once=True`: one rank of each group of replicas reads a value, and broadcasts it to the others.

It pays where storage is slower than the network: a cold file system, or one that all ranks share. Values that code of a
user computes are read by every rank, and so are those for other devices than the CPU.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from modelstate.distributed.agreement import Agreement
from modelstate.io.memory import fresh_tensors
from modelstate.planning.transfer import Transfer, Transfers, Way
from modelstate.rules.expression import Derived
from modelstate.spec import AT_ONCE_BYTES
from modelstate.text_format import count, size
from modelstate.torch_compat.sharding import replicas_of


class SharedRead(msgspec.Struct, frozen=True):
    """A value that one rank reads for several."""

    transfer: Transfer
    ranks: tuple[int, ...]
    """The ranks that hold the same part of the tensor."""
    reader: int
    """The rank that reads it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the value as it is loaded."""
        return self.transfer.param.numel() * self.transfer.dtype.itemsize


def shared_reads(transfers: Sequence[Transfer], agreement: Agreement) -> list[SharedRead]:
    """Chooses the values that one rank reads for its replicas, and has them staged before the commit.

    The ranks of a group take turns by bytes. All of them come to the same choice, since their transfers are the same.
    """
    turns: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    found: list[SharedRead] = []
    for item in transfers:
        ranks = agreement.ranks
        if item.sharded is not None:
            ranks = replicas_of(item.sharded.tensor)
        if len(ranks) < 2 or not _is_shared(item):
            continue
        reader = min(ranks, key=turns[ranks].__getitem__)
        turns[ranks][reader] += item.nbytes
        found.append(SharedRead(item, ranks, reader))
        if item.way in (Way.INTO, Way.STAGED):
            item.stage_instead(f"rank {reader} reads it for {len(ranks)} ranks")
    return found


def _is_shared(item: Transfer) -> bool:
    stored = item.stored
    is_computed = item.is_transformed or item.way is Way.CODE
    is_certain = stored.is_certain if isinstance(stored, Derived) else True
    in_file = stored is not None and not isinstance(stored, torch.Tensor)
    has_bytes = item.param.numel() > 0 and item.maps is None
    return in_file and is_certain and has_bytes and item.on_cpu and not is_computed


def notes_on_shared(shared: Sequence[SharedRead]) -> list[str]:
    """Says how many values one rank reads for others."""
    by_size = Counter(len(read.ranks) for read in shared)
    return [
        f"{count(number, 'tensor')} of {size(sum(read.nbytes for read in shared if len(read.ranks) == ranks))} read by "
        f"one of {ranks} ranks and broadcast"
        for ranks, number in sorted(by_size.items())
    ]


def to_read_here(transfers: Sequence[Transfers], shared: Sequence[SharedRead]) -> list[Transfers]:
    """Returns the transfers that this rank reads itself."""
    if not shared:
        return list(transfers)
    rank = dist.get_rank()
    received = {id(read.transfer) for read in shared if read.reader != rank}
    return [item for item in transfers if id(item) not in received]


def connect(shared: Sequence[SharedRead], agreement: Agreement) -> None:
    """Connects the ranks of each group of replicas. Raises `RankLostError` where a rank does not take part."""
    for ranks in dict.fromkeys(read.ranks for read in shared):
        agreement.connect(ranks)


def broadcast(shared: Sequence[SharedRead], agreement: Agreement) -> None:
    """Sends the values that this rank has read to its replicas, and receives the others.

    All values of a group and a reader go together, the groups in the order of their first values: a rank may have no
    part of a value between them. All ranks of a group see the same order, so none waits for a rank that waits for it.
    Small values are sent in a buffer of limited size. Raises `RankLostError` where a rank does not take part.
    """
    rank = dist.get_rank()
    received = [read.transfer for read in shared if read.reader != rank]
    finals = fresh_tensors([layout for item in received for layout in item.layouts()])
    for item, final in zip(received, finals, strict=True):
        item.finals = [final]
    groups: dict[tuple[tuple[int, ...], int], list[SharedRead]] = defaultdict(list)
    for read in shared:
        groups[read.ranks, read.reader].append(read)
    for (ranks, reader), reads in groups.items():
        for batch in _batches(reads):
            _send(batch, ranks, reader, agreement)


def _send(batch: Sequence[SharedRead], ranks: tuple[int, ...], reader: int, agreement: Agreement) -> None:
    finals = [read.transfer.final for read in batch if read.transfer.final is not None]
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


def _batches(reads: Sequence[SharedRead]) -> list[list[SharedRead]]:
    """Returns runs of values that fit into a buffer; a value that does not is alone."""
    batches: list[list[SharedRead]] = []
    left = 0
    for read in reads:
        if not batches or read.nbytes > left:
            batches.append([])
            left = AT_ONCE_BYTES
        batches[-1].append(read)
        left -= read.nbytes
    return batches
