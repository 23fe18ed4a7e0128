"""Connections between ranks for the votes of `modelstate.distributed.agreement`, over gloo.

They are made once for a set of ranks, apart from those of torch's groups: with NCCL there is no group for CPU tensors,
and a rank that comes too late breaks these connections and no others. The next call makes new ones. Votes in another
thread, as of a save in the background, have a channel of their own, with its own connections.

Ranks meet in the store before they connect, because gloo waits for a rank that is missing without saying which one.
"""

import atexit
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from modelstate.torch_compat.plain import byte_tensor
from modelstate.torch_compat.sharding import (
    all_gather,
    all_reduce_maximum,
    all_to_all,
    broadcast,
    default_store,
    gloo_group,
)

CONNECT_SECONDS = 60.0
"""How long ranks that have met may take to connect, and a second more for each of them."""


class Connections:
    """Gloo connections between some ranks on a channel, and their keys in the store."""

    def __init__(self, ranks: tuple[int, ...], timeout_seconds: float, channel: str) -> None:
        self.store = default_store()
        self._key = f"modelstate/{number_of([channel, *ranks]):x}"
        self._generation = self._enter()
        store = dist.PrefixStore(f"{self._key}/{self._generation}", self.store)
        self.of_all: Connections | None = None
        """Those of all ranks of the agreement, for connections of some of them."""
        self._size = len(ranks)
        self._decisions = 0
        try:
            self._meet(store, ranks, timeout_seconds)
            timeout_seconds = min(timeout_seconds, CONNECT_SECONDS + len(ranks))
            self._group = gloo_group(store, ranks.index(dist.get_rank()), self._size, timeout_seconds)
            self.maximum([0], timeout_seconds)  # all ranks are connected to each other when it returns
        except BaseException:
            self.abandon()
            raise

    def _enter(self) -> int:
        """Returns the number of connections that these ranks have abandoned, which the store keeps for late ranks.

        A store can be older than the process group: a mesh of an earlier group keeps it alive. Connections that this
        rank has entered before are those of an earlier group, and are abandoned.
        """
        own = uuid4().hex
        while True:
            generation = self._compare_set("generation", "", "0")
            if self._compare_set(f"{generation}/here/{dist.get_rank()}", "", own) == own:
                return int(generation)
            self._compare_set("generation", generation, str(int(generation) + 1))

    def _meet(self, store: Any, ranks: tuple[int, ...], timeout_seconds: float) -> None:
        """Waits until all ranks are here. Raises `RuntimeError` where one does not come, or another one has given up.

        The last rank sets the key that the others wait for, so that no rank waits for a key of each other rank.
        """
        if store.add("here", 1) == len(ranks):
            store.set("all", "")
        started = time.monotonic()
        # `store.wait` would block the other threads that use the store.
        while not store.check(["all"]):
            waited_seconds = time.monotonic() - started
            is_abandoned = self.is_abandoned()
            if is_abandoned or waited_seconds > timeout_seconds:
                missing = [rank for rank in ranks if not store.check([f"here/{rank}"])]
                what = "another rank has stopped waiting for" if is_abandoned else "nothing from"
                raise RuntimeError(f"{what} the ranks {ranks_text(missing)}")
            time.sleep(min(max(waited_seconds / 5, 0.001), 0.5))

    def maximum(self, numbers: Sequence[int], timeout_seconds: float) -> list[int]:
        """Returns the largest of the numbers of all ranks, for each place. Raises what torch raises."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        all_reduce_maximum(self._group, tensor, timeout_seconds, self.is_abandoned)
        return [int(number) for number in tensor.tolist()]

    def gathered(self, text: bytes, longest: int, timeout_seconds: float) -> list[bytes]:
        """Returns the texts of all ranks, none longer than `longest`."""
        tensor = torch.zeros(8 + longest, dtype=torch.uint8, device="cpu")
        data = len(text).to_bytes(8, "little") + text
        tensor[: len(data)] = byte_tensor(data)
        tensors = [torch.empty_like(tensor) for _ in range(self._size)]
        all_gather(self._group, tensors, tensor, timeout_seconds, self.is_abandoned)
        found = [tensor.numpy().tobytes() for tensor in tensors]
        return [data[8 : 8 + int.from_bytes(data[:8], "little")] for data in found]

    def broadcast(self, tensor: torch.Tensor, source: int, timeout_seconds: float) -> None:
        """Copies a contiguous tensor from the rank at a position of the group to the others. Raises as torch does."""
        broadcast(self._group, tensor, source, timeout_seconds, self.is_abandoned)

    def exchange(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        counts: Sequence[int],
        own_counts: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        """Sends parts of a tensor to all ranks, and receives theirs. Raises as torch does."""
        all_to_all(self._group, output, tensor, counts, own_counts, timeout_seconds, self.is_abandoned)

    def decide(self, commit: bool) -> bool:
        """Proposes whether to commit; returns what the first rank has proposed. Without the store: its own proposal."""
        self._decisions += 1
        with suppress(Exception):
            key, proposal = f"{self._generation}/decision/{self._decisions}", "commit" if commit else "abort"
            return self._compare_set(key, "", proposal) == "commit"
        return commit

    def abandon(self, reason: str = "") -> None:
        """Closes the connections, so that ranks which wait for this one end, and has the next load make new ones.

        The other ranks find the reason of the first rank that gives one.
        """
        with suppress(Exception):
            if reason:
                self._compare_set(f"{self._generation}/reason", "", reason)
            self._compare_set("generation", str(self._generation), str(self._generation + 1))
        self._group = None

    def reason(self) -> str:
        """Returns why another rank has abandoned these connections; empty where it does not say."""
        key = f"{self._key}/{self._generation}/reason"
        with suppress(Exception):
            return self.store.get(key).decode() if self.store.check([key]) else ""
        return ""

    def is_abandoned(self) -> bool:
        """Whether another rank has abandoned these connections, or those of all ranks. Asks the store."""
        if self._compare_set("generation", "", "0") != str(self._generation):
            return True
        return self.of_all not in (None, self) and self.of_all.is_abandoned()

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        found: bytes = self.store.compare_set(f"{self._key}/{key}", expected, desired)
        return found.decode()


def without_frames(error: BaseException) -> Exception:
    """Returns an error with the same text. The frames of the original refer to the group, which could not be closed."""
    return RuntimeError(f"{type(error).__name__}: {error}")


_Made = dict[tuple[tuple[int, ...], str], Connections]
_made: WeakKeyDictionary[Any, _Made] = WeakKeyDictionary()
"""The connections of each default process group, by their ranks and channel. They hold the group's store, so they end
with the group: torch cannot make the next group over a store with the keys of a group that has ended."""
# A thread of gloo may still hold a tensor of the last vote. Where it releases it while the interpreter ends, the
# process aborts. The end of the connections waits for their threads.
atexit.register(_made.clear)


def made_connections() -> _Made:
    """Returns the connections of the default process group that have been made."""
    return _made.setdefault(dist.group.WORLD, {})


def connections_of(ranks: tuple[int, ...], timeout_seconds: float, channel: str) -> Connections:
    """Returns the connections between these ranks, which are made at the first call. Raises what torch raises."""
    made = made_connections()
    connections = made.get((ranks, channel))
    if connections is None:
        connections = made[ranks, channel] = Connections(ranks, timeout_seconds, channel)
    return connections


def drop_abandoned(ranks: tuple[int, ...]) -> None:
    """Forgets the connections between these ranks that another rank has given up when this one did not take part.

    Other threads may make and forget connections on their channels meanwhile.
    """
    made = made_connections()
    for key, connections in made.copy().items():
        if key[0] == ranks and connections.is_abandoned() and made.get(key) is connections:
            made.pop(key, None)


def number_of(parts: Iterable[object]) -> int:
    """Returns a number of 62 bits that depends on the texts of all parts."""
    digest = blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 2


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ranks as text: "0-3, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
