"""Connections between ranks for the votes of `modelstate.distributed.agreement`, over gloo.

They are made once for a set of ranks, apart from those of torch's groups: with NCCL there is no group for CPU tensors,
and a rank that comes too late breaks these connections and no others. The next call makes new ones. Votes in another
thread, as of a save in the background, have a channel of their own, with its own connections.

Ranks meet in the store before they connect, because gloo waits for a rank that is missing without saying which one.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from uuid import uuid4
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from modelstate.process import check_stopped
from modelstate.torch_compat.plain import byte_tensor
from modelstate.torch_compat.sharding import Gloo, default_store, gloo_group, run_collective

CONNECT_SECONDS = 60.0
"""How long ranks that have met may take to connect, and a second more for each of them."""


class Connections:
    """Gloo connections between some ranks on a channel, and their keys in the store.

    Args:
        ranks: The ranks.
        channel: The name of the connections. Two threads need different ones.
        of_all: The connections of all ranks of a call, for those of some of them, which end with them.
    """

    def __init__(self, ranks: tuple[int, ...], channel: str, of_all: Connections | None = None) -> None:
        self._store = default_store()
        self._world = ref(dist.group.WORLD)
        self._ranks, self._channel, self._of_all = ranks, channel, of_all
        # Another key than that of a call of these ranks alone, whose connections are other ones.
        self._key = f"modelstate/{number_of([channel, ranks, () if of_all is None else of_all._ranks]):x}"
        self._of_some: dict[tuple[int, ...], Connections] = {}
        self._group: Gloo | None = None
        self._decisions = 0
        self._generation = self._enter()

    def connect(self, timeout_seconds: float) -> None:
        """Waits for the other ranks, and connects this one to them.

        Raises:
            ConnectionAbortedError: Another rank has stopped waiting.
            TimeoutError: A rank does not come.
            RuntimeError: Torch cannot connect the ranks.

        In a thread whose work is to end, it raises `Stopped`.
        """
        store = dist.PrefixStore(f"{self._key}/{self._generation}", self._store)
        self._meet(store, timeout_seconds)
        size = len(self._ranks)
        timeout_seconds = min(timeout_seconds, CONNECT_SECONDS + size)
        self._group = gloo_group(store, self._ranks.index(dist.get_rank()), size, timeout_seconds)
        self.maximum([0], timeout_seconds)  # all ranks are connected to each other when it returns

    def _enter(self) -> int:
        """Returns the number of connections that these ranks have abandoned, which the store keeps for late ranks.

        A store can be older than the process group: a mesh of an earlier group keeps it alive. Connections that this
        rank has entered before are those of an earlier group, and are abandoned.
        """
        own, here = uuid4().hex, f"here/{dist.get_rank()}"
        while True:
            generation = int(self._compare_set("generation", "", "0"))
            if self._compare_set(f"{generation}/{here}", "", own) == own:
                return generation
            self._compare_set("generation", str(generation), str(generation + 1))

    def _meet(self, store: dist.Store, timeout_seconds: float) -> None:
        """Waits until all ranks are here.

        The last rank sets the key that the others wait for, so that no rank waits for a key of each other rank.
        """
        if store.add("here", 1) == len(self._ranks):
            store.set("all", "")
        started = time.monotonic()
        # `store.wait` would block the other threads that use the store.
        while not store.check(["all"]):
            waited_seconds = time.monotonic() - started
            is_abandoned = self.is_abandoned()
            if is_abandoned or waited_seconds > timeout_seconds:
                missing = ranks_text([rank for rank in self._ranks if not store.check([f"here/{rank}"])])
                if is_abandoned:
                    raise ConnectionAbortedError(f"another rank has stopped waiting for the ranks {missing}")
                raise TimeoutError(f"nothing from the ranks {missing}")
            check_stopped()
            time.sleep(min(max(waited_seconds / 5, 0.001), 0.5))

    def of(self, ranks: tuple[int, ...], timeout_seconds: float) -> Connections:
        """Returns the connections between some of the ranks, which are made at the first call.

        Raises what the constructor and `connect` raise.
        """
        if ranks == self._ranks:
            return self
        if ranks not in self._of_some:
            self._of_some[ranks] = Connections(ranks, self._channel, self)
            self._of_some[ranks].connect(timeout_seconds)
        return self._of_some[ranks]

    def maximum(self, numbers: Sequence[int], timeout_seconds: float) -> list[int]:
        """Returns the largest of the numbers of all ranks, for each place. Raises what torch raises."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self.run("allreduce", [tensor], timeout_seconds=timeout_seconds, reduceOp=dist.ReduceOp.MAX)
        return [int(number) for number in tensor.tolist()]

    def gathered(self, text: bytes, longest: int, timeout_seconds: float) -> list[bytes]:
        """Returns the texts of all ranks, none longer than `longest`."""
        tensor = torch.zeros(8 + longest, dtype=torch.uint8, device="cpu")
        data = len(text).to_bytes(8, "little") + text
        tensor[: len(data)] = byte_tensor(data)
        tensors = [torch.empty_like(tensor) for _ in self._ranks]
        self.run("allgather", [tensors], [tensor], timeout_seconds=timeout_seconds)
        found = [tensor.numpy().tobytes() for tensor in tensors]
        return [data[8 : 8 + int.from_bytes(data[:8], "little")] for data in found]

    def run(self, name: str, *arguments: object, timeout_seconds: float, **settings: object) -> None:
        """Runs a collective of these ranks, as `run_collective` does. Raises as torch does."""
        run_collective(self._group, self.is_abandoned, name, *arguments, timeout_seconds=timeout_seconds, **settings)

    def decide(self, commit: bool) -> bool:
        """Proposes whether to commit; returns what the first rank has proposed. Without the store: its own proposal."""
        self._decisions += 1
        with suppress(Exception):
            key, proposal = f"{self._generation}/decision/{self._decisions}", "commit" if commit else "abort"
            return self._compare_set(key, "", proposal) == "commit"
        return commit

    def abandon(self, reason: str = "") -> None:
        """Closes the connections, and has the next call make new ones. Ranks that wait for this one find the reason."""
        generation = str(self._generation)
        with suppress(Exception):  # the rank that has the store may be gone
            # A rank that only waited for too long has abandoned them first: then the ranks that it missed may come yet.
            if reason and self._compare_set("generation", "", "0") == generation:
                self._compare_set(f"{generation}/reason", "", reason)
            self._compare_set("generation", generation, str(self._generation + 1))
        for connections in self._of_some.values():
            connections.abandon()
        self._of_some.clear()
        self._group = None

    def reason(self) -> str:
        """Returns why a rank has abandoned the connections of all ranks; empty if it does not say."""
        if self._of_all is not None:
            return self._of_all.reason()
        key = f"{self._key}/{self._generation}/reason"
        with suppress(Exception):
            return self._store.get(key).decode() if self._store.check([key]) else ""
        return ""

    def is_abandoned(self) -> bool:
        """Whether another rank has abandoned these connections, or those of all ranks. Asks the store.

        Also whether this process has destroyed their process group, perhaps in another thread.
        """
        if dist.group.WORLD is not self._world():
            return True
        if self._compare_set("generation", "", "0") != str(self._generation):
            return True
        return self._of_all is not None and self._of_all.is_abandoned()

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        found: bytes = self._store.compare_set(f"{self._key}/{key}", expected, desired)
        return found.decode()


_Made = dict[tuple[tuple[int, ...], str], Connections]
_made: WeakKeyDictionary[object, _Made] = WeakKeyDictionary()
"""The connections of each default process group, by their ranks and channel. They hold the group's store, so they end
with the group: torch cannot make the next group over a store with the keys of a group that has ended."""
# A thread of gloo may still hold a tensor of the last vote. Where it releases it while the interpreter ends, the
# process aborts. The end of the connections waits for their threads.
atexit.register(_made.clear)


def made_connections(world: object) -> _Made:
    """Returns the connections of a default process group that have been made; none where there is no such group."""
    return {} if world is None else _made.setdefault(world, {})


def connections_of(world: object, ranks: tuple[int, ...], timeout_seconds: float, channel: str) -> Connections:
    """Returns the connections between ranks of the default process group, which are made at the first call.

    Raises what the constructor and `connect` raise, and `RuntimeError` where the process group has been destroyed.
    Where ranks cannot be connected, the caller abandons them.
    """
    if world is None or world is not dist.group.WORLD:
        raise RuntimeError("the process group was destroyed")
    made = made_connections(world)
    connections = made.get((ranks, channel))
    if connections is None:
        connections = made[ranks, channel] = Connections(ranks, channel)
        connections.connect(timeout_seconds)
    return connections


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
