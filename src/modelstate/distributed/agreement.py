"""`Agreement`: the ranks of one load or save, which end each phase with a vote, so that it succeeds on all or on none.

A phase is a block. Where it ends, one all-reduce of a few numbers tells every rank whether all have ended it without an
error, and with the same digests. Nothing is gathered in the good case. Otherwise the texts of the errors are gathered,
and every rank raises them with the numbers of the ranks.

The first collective of each call is such an all-reduce, with a digest of the name of the call. Gloo ends the process
where ranks are in an all-reduce with different numbers of elements, and waits where they are in different collectives.

The vote before the commit must not end differently on two ranks. An all-reduce alone cannot ensure that: where a rank
dies within it, some ranks may have its result and others not. So each rank proposes what it has seen to the store of
the default process group. The store keeps the first proposal, and all ranks follow it.

The votes go over connections of their own (`modelstate.distributed.connections`).
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import RLock
from typing import Any, TypeVar
from weakref import ref

import msgspec
import torch
import torch.distributed as dist
from msgspec import convert, to_builtins
from torch import nn

from modelstate import errors
from modelstate.arguments import TIMEOUT_SECONDS as TIMEOUT_SECONDS, seconds_of
from modelstate.distributed.connections import (
    Connections,
    connections_of,
    made_connections,
    number_of,
    ranks_text,
)
from modelstate.errors import (
    BackgroundCancelledError,
    DistributedError,
    ModelBusyError,
    ModelStateError,
    RankLostError,
    is_interrupt,
    keep_interrupt,
)
from modelstate.problems import Problem, explain
from modelstate.process import Stopped
from modelstate.text_format import listed
from modelstate.torch_compat.modules import modules_of, tensors_of
from modelstate.torch_compat.plain import byte_tensor, is_sharded
from modelstate.torch_compat.sharding import gathered_shards, ranks_of_meshes

_R = TypeVar("_R")
_NUMBERS = 2 + 2 * 4
"""The numbers of a vote: whether it failed, the length of what follows it, and two for each of up to four digests."""
_MAX_SHOWN = 12
NOTHING_CHANGED = "nothing has been changed"
PLANNING, READING, COMMIT = "planning", "reading", "the commit"
"""Phases that several calls have. Each phase ends with a vote of all ranks."""
_TAKES_RANKS = {
    "modelstate.restore": "",
    "modelstate.resumable": "modelstate.Store",
    **dict.fromkeys(("Store.save", "Store.check", "Store.restore"), "modelstate.Store"),
    "dcp.save": "modelstate.dcp.Writer",
}
"""What takes the `process_group=` and the `timeout_seconds=` of a call, where it is not the call; empty for nothing."""


class _Order(msgspec.Struct):
    """The order of the calls of this process over the same ranks and channel. A call within a call is part of it."""

    lock: AbstractContextManager[bool] = msgspec.field(default_factory=RLock)
    """Held by the thread of the call: collectives of two calls that overlap would be taken for one call."""
    calls: int = 0
    """The calls that have begun, which are as many on all ranks."""
    is_in_call: bool = False
    has_failed: bool = False
    """Whether all ranks raise since the last phase began: a vote has failed, or the connections are lost."""


_orders: dict[tuple[tuple[int, ...], str], _Order] = {}
"""By ranks and channel."""


class _Phase(msgspec.Struct):
    name: str
    effect: str = NOTHING_CHANGED
    """What an error leaves, on all ranks."""
    decides: bool = False
    digests: Sequence[Digest] = ()
    """What must be equal on all ranks at the end of the phase."""
    length: int = 0
    """The length of what this rank sends after the vote; when all ranks have voted, the largest one of all of them."""


class Agreement:
    """The ranks of one load or save. Created by `agreement_of`.

    Args:
        ranks: The global ranks that take part. A load on a single rank has no votes.
        timeout_seconds: How long a rank waits for the others at the end of a phase.
        call: The function that all ranks call, for errors.
        channel: The name of the connections. Two threads need different ones.

    Examples:
        >>> with agreement.phase("reading"):
        ...     read()
        >>> # all ranks have read, or each of them has raised
    """

    def __init__(
        self, ranks: Sequence[int], timeout_seconds: float, *, call: str = "modelstate.load", channel: str = ""
    ) -> None:
        self.ranks = tuple(ranks)
        self.is_collective = len(self.ranks) > 1
        """Whether other ranks take part."""
        self.timeout_seconds = timeout_seconds
        self.call, self._channel = call, channel
        self._phase = _Phase("connecting")
        """The last phase that this rank has begun."""
        is_initialized = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_initialized else 0
        """The global rank of this process; 0 where there is no process group."""
        self._world: Callable[[], object] = ref(dist.group.WORLD) if is_initialized else lambda: None
        self._order = _orders.setdefault((self.ranks, channel), _Order())
        self.seconds: dict[str, float] = {}
        """The time of each phase on this rank, without the time that it waited for others."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first one, which decides where one rank has to."""
        return not self.is_collective or self.rank == self.ranks[0]

    @property
    def position(self) -> int:
        """The position of this rank among them; 0 where there are no others."""
        return self.ranks.index(self.rank) if self.is_collective else 0

    @property
    def _connections(self) -> Connections | None:
        """The connections of these ranks; None where they have not been made, or are lost."""
        return made_connections(self._world()).get((self.ranks, self._channel))

    @property
    def _is_destroyed(self) -> bool:
        """Whether this process has destroyed the process group in which the call has begun."""
        return self._world() is not dist.group.WORLD

    def on_channel(self, channel: str, calls: int | None = None) -> Agreement:
        """Returns the agreement of the same ranks over connections of their own, for another thread.

        Args:
            channel: The name of the connections.
            calls: A new number to count the calls from, the same on all ranks, where one of them may have missed a
                call; None counts on.
        """
        other = Agreement(self.ranks, self.timeout_seconds, call=self.call, channel=channel)
        if calls is not None:
            other._order.calls = calls
        return other

    @contextmanager
    def collective(self) -> Iterator[None]:
        """The block of a call: all its phases. Calls in other threads, over the same ranks, wait for its end.

        The calls of several threads run in the same order on all ranks, or their digests differ. A phase outside of
        such a block is a call of its own.

        Where the block raises between two votes, the other ranks wait for this one no longer. That is an interrupt, an
        error that can occur anywhere, such as `MemoryError`, or a model that another thread of this rank changes. Any
        other `ModelStateError` between two votes follows from what all ranks know, so all ranks raise it.
        """
        if not self.is_collective:
            yield
            return
        order = self._order
        with order.lock:
            is_outermost = not order.is_in_call
            try:
                if is_outermost:
                    order.calls += 1
                    self._drop_abandoned()
                    order.is_in_call, order.has_failed = True, False
                yield
            except BaseException as error:
                if not isinstance(error, ModelStateError) or isinstance(error, ModelBusyError):
                    self.abandon(error)
                raise
            finally:
                if is_outermost:
                    order.is_in_call = False

    def _drop_abandoned(self) -> None:
        """Forgets connections that another rank has abandoned when this one did not take part.

        They are kept where it has abandoned them in this call: the first vote raises its error.
        """
        connections = self._connections
        with suppress(Exception):  # the rank that has the store may be gone: the first vote raises it
            if connections is not None and connections.is_abandoned():
                call, *_ = json.loads(connections.reason() or "[0]")
                if call != self._order.calls:
                    del made_connections(self._world())[self.ranks, self._channel]

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """The part of a phase in which ranks wait for each other: where it raises, they wait for this one no longer."""
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise

    def phase(
        self,
        name: str,
        digests: Callable[[], Sequence[Digest]] | None = None,
        *,
        decides: bool = False,
        effect: str = NOTHING_CHANGED,
    ) -> AbstractContextManager[None]:
        """Returns a block that all ranks end, or that raises on every rank.

        Args:
            name: The name of the phase, for errors.
            digests: Called at the end of the block. All ranks return digests of the same parts.
            decides: Whether a rank commits when the block has ended, so that no two ranks may see a different end.
            effect: What an error in the block leaves on the other ranks, for their errors.

        Raises:
            RankLostError: A rank did not end the block in time.
            DistributedError: The digests differ.
            ModelStateError: The block raised on another rank: the class is that of the first such rank.
        """
        return self._block(_Phase(name, effect, decides), digests) if self.is_collective else nullcontext()

    @contextmanager
    def _block(self, phase: _Phase, digests: Callable[[], Sequence[Digest]] | None = None) -> Iterator[None]:
        with self.collective():
            self._order.has_failed = False
            self._phase = phase
            try:
                try:
                    self.connect(self.ranks)  # so that the death of a rank within the block shows at once
                    started = time.perf_counter()
                    yield
                    phase.digests = digests() if digests is not None else ()
                    self.seconds[phase.name] = time.perf_counter() - started
                except Exception as error:
                    self._vote(phase, error)
                    raise
                self._vote(phase, None)
            except BaseException:
                connections = self._connections
                if phase.decides and connections is not None and not self._order.has_failed:
                    connections.decide(False)  # an interrupt: this rank does not wait for the others
                raise

    @contextmanager
    def before(self, name: str) -> Iterator[None]:
        """A block before the phase of this name, where the other ranks wait: an error is an error on all of them.

        The block is part of the call that follows: the other ranks find an interrupt when they begin that call.
        """
        try:
            yield
        except BaseException as error:
            # An error may also be one of torch, such as for a lack of memory.
            with self.collective(), self.phase(name) if isinstance(error, Exception) else nullcontext():
                raise

    def decided(self, name: str, choose: Callable[[], _R], *, effect: str = NOTHING_CHANGED) -> _R:
        """Returns what the first rank chooses, on all ranks.

        Args:
            name: The name of the phase in which it chooses.
            choose: Called on the first rank; returns JSON values. An error is an error on all ranks.
            effect: What an error leaves, as for `phase`.

        Raises what `phase` raises.
        """
        if not self.is_collective:
            return choose()
        phase, data = _Phase(name, effect), b""
        with self.collective():
            with self._block(phase):
                if self.is_first:
                    data = json.dumps(choose()).encode()
                    phase.length = len(data)
            text = byte_tensor(data or bytes(phase.length))
            self.broadcast(text, self.ranks, self.ranks[0])
        result: _R = json.loads(text.numpy().tobytes())
        return result

    def texts(self, name: str, text: str) -> list[str]:
        """Returns the text of each rank, in the order of the ranks. Where all are empty, one all-reduce shows it.

        Args:
            name: What the texts are for, in an error.
            text: The text of this rank.

        Raises:
            RankLostError: A rank does not take part in time.
            DistributedError: A rank is in another call.
        """
        if not self.is_collective:
            return [text]
        data = text.encode()
        phase = _Phase(name, length=len(data))
        with self.collective():
            with self._block(phase):
                pass
            if not phase.length:
                return [""] * len(self.ranks)
            gather = lambda made: made.gathered(data, phase.length, self.timeout_seconds)  # noqa: E731
            return [other.decode() for other in self._use_connections(self.ranks, gather)]

    def exchanged(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Returns the numbers of each rank, as many as this rank has; those of this rank alone where one is lost."""
        connections, longest = self._connections, 21 * len(numbers) + 2  # of numbers with 64 bits, as JSON
        if connections is not None:
            # After an error the connections stay as they are, so that the next vote fails, too.
            with suppress(Exception):
                gathered = connections.gathered(json.dumps([*numbers]).encode(), longest, self.timeout_seconds)
                return {rank: json.loads(text) for rank, text in zip(self.ranks, gathered, strict=True)}
        return {self.rank: [*numbers]}

    def connect(self, ranks: tuple[int, ...]) -> None:
        """Connects ranks in a phase before a broadcast, so that the death of one shows at once in it.

        Raises:
            RankLostError: A rank does not take part in time.
        """
        self._use_connections(ranks, lambda _: None)

    def broadcast(self, tensor: torch.Tensor, ranks: tuple[int, ...], source: int) -> None:
        """Copies a tensor on the CPU from the rank `source` to the other `ranks`, in a phase.

        Raises:
            RankLostError: A rank does not take part in time.
        """
        options = {"timeout_seconds": self.timeout_seconds, "rootRank": ranks.index(source)}
        self._use_connections(ranks, lambda made: made.run("broadcast", [tensor], **options))

    def exchange(self, sent: Sequence[Sequence[torch.Tensor]], counts: Sequence[int]) -> torch.Tensor:
        """Sends bytes to the other ranks and receives theirs, in a phase.

        Args:
            sent: For each rank, tensors of bytes.
            counts: The number of bytes that come from each rank.

        Returns:
            The bytes that have come, in the order of the ranks.

        Raises:
            RankLostError: A rank does not take part in time.
        """
        tensor = torch.cat(
            [torch.empty(0, dtype=torch.uint8, device="cpu"), *(part for parts in sent for part in parts)]
        )
        if not self.is_collective:
            return tensor
        own_counts = [sum(part.numel() for part in parts) for parts in sent]
        output = torch.empty(sum(counts), dtype=torch.uint8, device="cpu")
        arguments, timeout_seconds = (output, tensor, [*counts], own_counts), self.timeout_seconds
        self._use_connections(
            self.ranks, lambda made: made.run("alltoall_base", *arguments, timeout_seconds=timeout_seconds)
        )
        return output

    def _use_connections(self, ranks: tuple[int, ...], use: Callable[[Connections], _R]) -> _R:
        """Returns what `use` returns for the connections of some of the ranks."""
        with self.collective():
            try:
                of_all = connections_of(self._world(), self.ranks, self.timeout_seconds, self._channel)
                return use(of_all.of(ranks, self.timeout_seconds))
            except Exception as cause:
                if is_interrupt(cause):
                    self.abandon(cause)
                    raise
                # The frames of the error refer to the group, which could not be closed.
                raise self._lost(self._phase, cause.with_traceback(None)) from cause

    def abandon(self, error: BaseException) -> None:
        """Closes the connections for an error, which the other ranks raise, too: they wait for this one no longer.

        Does nothing where they raise already, and where there are none.
        """
        if self.is_collective and not self._order.has_failed:
            self._close(error)

    def _close(self, error: BaseException | None = None) -> None:
        """Closes the connections, and has the next call make new ones. The other ranks find the error."""
        connections = made_connections(self._world()).pop((self.ranks, self._channel), None)
        if connections is not None:
            connections.abandon(json.dumps([self._order.calls, self.rank, report_of(error)]) if error else "")
        self._order.has_failed = True

    def _vote(self, phase: _Phase, error: Exception | None) -> None:
        """Votes. Returns where all ranks have ended the phase, and where `error` says it all."""
        if error is not None and self._order.has_failed:
            return  # it says why all ranks raise already
        reports: list[Report] = []
        lost: Exception | None = None
        connections = self._connections
        try:
            if connections is None or self._is_destroyed:
                raise ConnectionError("the connections were lost before the end of the phase")
            reports = self._reports(connections, phase, error)
        except Exception as cause:
            keep_interrupt(cause)
            lost = cause.with_traceback(None)
        if (
            phase.decides
            and not reports
            and connections is not None
            and connections.decide(lost is None) != (lost is None)
        ):
            # Another rank has seen the opposite, and was first to say so.
            lost = None if lost is not None else RuntimeError("the connection between other ranks was lost")
        if lost is not None:
            lost_rank = self._lost(phase, lost)
            if error is None:
                raise lost_rank from lost
            error.add_note(f"{lost_rank.what}: {lost_rank.found}")
        elif reports:
            self._raise(phase, error, reports)

    def _reports(self, connections: Connections, phase: _Phase, error: Exception | None) -> list[Report]:
        """Returns the reports of all ranks; none where all agree."""
        digests = [Digest.of(THE_CALL, f"{self.call} ({phase.name})", (self.call, phase.name)), *phase.digests]
        numbers = [error is not None, phase.length]
        numbers += (sign * digest.number for digest in digests if error is None for sign in (1, -1))
        numbers += [0] * (_NUMBERS - len(numbers))
        failed, length, *pairs = connections.maximum(numbers, self.timeout_seconds)
        if not failed and all(high == -low for high, low in zip(pairs[::2], pairs[1::2], strict=True)):
            phase.length = length
            return []
        report = json.dumps(report_of(error, digests)).encode()
        (longest,) = connections.maximum([len(report)], self.timeout_seconds)
        return [json.loads(text) for text in connections.gathered(report, longest, self.timeout_seconds)]

    def _lost(self, phase: _Phase, cause: Exception) -> ModelStateError:
        """Returns the error for connections that broke or were not made. The next load makes new ones.

        Where another rank has abandoned them for an error, it is that one.
        """
        connections = self._connections
        reason = "" if connections is None else connections.reason()
        error: ModelStateError
        takes_ranks, lost = _TAKES_RANKS.get(self.call, self.call), f"a rank did not end {phase.name}; {phase.effect}"
        if self._is_destroyed:
            error = DistributedError(
                f"the process group was destroyed before the end of {phase.name}; {phase.effect}",
                where=f"rank {self.rank}",
                expected=f"the process group in which {self.call} has begun",
                remedy="call dist.destroy_process_group() after the call; of a save in the background, wait for "
                "`result()` first",
            )
        elif reason:
            _, rank, report = json.loads(reason)
            error = error_of({rank: report}, phase.name, phase.effect, len(self.ranks))
            if isinstance(error, RankLostError):  # of a rank that has not failed, but noticed it first
                error.what = lost
        else:
            error = RankLostError(
                lost,
                where=f"the ranks {ranks_text(self.ranks)}, noticed by rank {self.rank}",
                expected=f"all of them within {self.timeout_seconds:g} seconds",
                found=str(cause).split("\n")[0],
                remedy="see the log of the rank that is missing"
                + (f"; if it needs more time: {takes_ranks}(timeout_seconds=)" if takes_ranks else ""),
            )
        self._close(None if isinstance(cause, TimeoutError) else error)  # a rank that is late may come yet
        return error

    def _raise(self, phase: _Phase, error: BaseException | None, reports: Sequence[Report]) -> None:
        """Raises what the reports of all ranks say together. Returns where `error` is the same on all ranks."""
        self._order.has_failed = True
        of_ranks = dict(zip(self.ranks, reports, strict=True))
        failed = {rank: report for rank, report in of_ranks.items() if "error" in report}
        if not failed:
            raise difference_of(of_ranks, self.call)
        is_same = len(failed) == len(self.ranks) and len({json.dumps(report) for report in failed.values()}) == 1
        if error is not None and (is_same or not isinstance(error, ModelStateError)):
            return  # of an interrupt, or an error of a library, the others say where it came from
        raise error_of(failed, phase.name, phase.effect, len(self.ranks)) from error


def agreement_of(
    model: nn.Module | Iterable[torch.Tensor],
    process_group: dist.ProcessGroup | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    call: str = "modelstate.load",
) -> Agreement:
    """Returns the ranks that load or save a model together: those of the mesh of its DTensors.

    An error of an argument is an error on all ranks of the mesh, also where it is wrong on one of them.

    Args:
        model: The model, or its tensors.
        process_group: The ranks, where they are not those of the mesh.
        timeout_seconds: How long a rank waits for the others.
        call: The function that all ranks call, for errors.

    Raises:
        DistributedError: The model has DTensors, and there is no process group, or one that lacks ranks of a mesh.
        OptionError: `timeout_seconds` is not a positive number.
    """
    # A program without DTensors has not imported their module, and its models are not searched.
    sharded: list[torch.Tensor] = []
    if "torch.distributed.tensor" in sys.modules:
        modules = modules_of(model) if isinstance(model, nn.Module) else []
        tensors = [*tensors_of(modules), *gathered_shards(modules)] if isinstance(model, nn.Module) else model
        sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    if not sharded and process_group is None:
        return Agreement((), seconds_of("timeout_seconds", timeout_seconds, accepts_zero=False), call=call)
    where = type(model).__name__ if isinstance(model, nn.Module) else "the state"
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributedError(
            "there are DTensors, and there is no process group",
            where=where,
            expected="a process group on every rank of the mesh",
            remedy=f"torch.distributed.init_process_group() before {call}",
        )
    meshes = ranks_of_meshes(sharded)
    rank, of_mesh = dist.get_rank(), max(meshes, key=len, default=())
    if process_group is None:
        ranks = of_mesh
    else:  # torch gives another object to a rank that is not in the group
        is_group = isinstance(process_group, dist.ProcessGroup)
        ranks = tuple(dist.get_process_group_ranks(process_group)) if is_group else ()
    takes_ranks = _TAKES_RANKS.get(call, call)
    all_of_meshes = {rank for mesh in meshes for rank in mesh}
    is_valid = all_of_meshes <= set(ranks) and rank in ranks
    # Where it is not, the ranks that wait for this one are those of the mesh.
    waiting = ranks if is_valid else of_mesh if rank in of_mesh else ()
    agreement = Agreement(sorted(waiting), TIMEOUT_SECONDS, call=call)
    try:
        if not is_valid:
            raise DistributedError(
                f"a mesh of a DTensor has ranks that do not take part in {call}"
                if rank in ranks
                else f"this rank is not among the ranks that take part in {call}",
                where=where,
                expected=f"meshes within the ranks {ranks_text(ranks)}"
                + ("" if process_group else ", those of one mesh"),
                found=f"meshes over the ranks {ranks_text(sorted(all_of_meshes))}",
                remedy=f"{takes_ranks}(process_group=) with a group of all ranks of all meshes, such as group.WORLD"
                if takes_ranks
                else "make all meshes over the same ranks",
            )
        agreement.timeout_seconds = seconds_of("timeout_seconds", timeout_seconds, accepts_zero=False)
    except ModelStateError:
        with agreement.before(PLANNING):
            raise
    return agreement


# Reports. Where a phase has failed, the ranks send each other the error of a rank, or the digests of one that has none.
# Ranks with the same error are one entry of the error that all of them raise.

Report = dict[str, Any]
"""What a rank has to say, as JSON values."""
THE_CALL = "the call"
"""The `Digest.what` of the name of the function that the ranks call."""
_THE_VALUES = "the values"
_FIELDS = ("expected", "found", "remedy")
"""The fields of an error that stay where they are equal on all ranks."""


class Digest(msgspec.Struct, frozen=True):
    """A part of a load that must be equal on all ranks."""

    what: str
    """The name of the part: "the model"."""
    text: str
    """What the rank has, for the error."""
    number: int
    """A number of 62 bits that depends on the whole of it."""
    values: Mapping[str, object] = {}
    """What it is made of, where an error has the names of what differs."""

    @classmethod
    def of(cls, what: str, text: str, parts: Iterable[object]) -> Digest:
        """Returns the digest of the texts of `parts`."""
        return cls(what, text, number_of(parts))

    @classmethod
    def of_values(cls, values: Mapping[str, object]) -> Digest:
        """Returns the digest of values that are saved once for all ranks, or of their own digests, by their names."""
        return cls(_THE_VALUES, "", number_of(values.items()), values)


def report_of(error: BaseException | None, digests: Sequence[Digest] = ()) -> Report:
    """Returns the report of this rank."""
    if error is None:
        values = {name: number_of([value]) for digest in digests for name, value in digest.values.items()}
        return {"digests": [[digest.what, digest.text, digest.number] for digest in digests], "values": values}
    if isinstance(error, Stopped):
        error = BackgroundCancelledError("this rank has cancelled it", remedy="repeat the call")
    if not isinstance(error, ModelStateError) or not error.has_fields:
        # No error is made here: where a signal handler has raised this one, it would be raised again.
        text = " ".join(": ".join(filter(None, (type(error).__name__, str(error)))).split())
        blank = dict.fromkeys(("where", *_FIELDS), "")
        return {"error": "DistributedError", "what": text, **blank, "names": [], "problems": []}
    return {
        "error": type(error).__name__,
        **{name: getattr(error, name) for name in ("what", "where", *_FIELDS)},
        "names": list(error.names),
        "problems": to_builtins(error.problems),
    }


def error_of(failed: Mapping[int, Report], what: str, effect: str, ranks: int) -> ModelStateError:
    """Returns what the reports of the ranks that have failed say together. Its class is that of the first of them.

    Args:
        failed: The reports of these ranks.
        what: The name of the phase.
        effect: What the error leaves.
        ranks: The number of all ranks.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, report in failed.items():
        groups[json.dumps(report)].append(rank)
    first = next(iter(failed.values()))
    kind = getattr(errors, first["error"], DistributedError)
    texts = []
    found: list[Problem] = []
    for text, of_group in groups.items():
        report = json.loads(text)
        where = f"rank {of_group[0]}" if len(of_group) == 1 else f"ranks {ranks_text(of_group)}"
        new = convert(report["problems"], list[Problem])
        found += [problem for problem in new if problem not in found]
        texts.append(f"{where}: {report['what']}" if not new else f"{where}:\n{explain(new)}")
    common = [name for name in _FIELDS if len({report[name] for report in failed.values()}) == 1]
    fields = {name: first[name] for name in common}
    where = first["where"] if len(groups) == 1 else ""
    text = "\n".join([f"{what} failed on {len(failed)} of {ranks} ranks; {effect}", *texts])
    error: ModelStateError = kind(text, where=where, **fields, names=first["names"], problems=found)
    return error


def difference_of(reports: Mapping[int, Report], call: str) -> DistributedError:
    """Returns the error for ranks that have ended a phase with different digests, in the function `call`."""
    values: dict[str, dict[int, list[int]]] = {}
    texts: dict[tuple[str, int], str] = {}
    for rank, report in reports.items():
        for what, text, number in report["digests"]:
            values.setdefault(what, {}).setdefault(number, []).append(rank)
            texts[what, number] = text
    # Other versions of modelstate may compare other parts.
    differing = {what: found for what, found in values.items() if [len(reports)] != [*map(len, found.values())]}

    def found(parts: Iterable[str]) -> str:
        groups = ((part, number, ranks) for part in parts for number, ranks in differing[part].items())
        return "; ".join(f"ranks {ranks_text(ranks)}: {texts[part, number]}" for part, number, ranks in groups)

    if THE_CALL in differing:
        return DistributedError(
            f"the ranks are not in the same call: this one is in {call}; nothing has been changed",
            expected="the same calls in the same order on all ranks of the mesh",
            found=found([THE_CALL]),
            remedy="call modelstate's functions in the same order on every rank, and in one thread at a time",
        )
    if [*differing] == [_THE_VALUES]:
        of_ranks = [report["values"] for report in reports.values()]
        names = dict.fromkeys(name for of_rank in of_ranks for name in of_rank)
        different = [name for name in names if len({of_rank.get(name) for of_rank in of_ranks}) > 1]
        return DistributedError(
            "the ranks have different values where one value is saved for all of them; nothing has been changed",
            where=call,
            expected="the same value on all ranks, or a DTensor that says which part a rank holds",
            found=f"{listed(different, _MAX_SHOWN)}: {len(different):,} of {len(names):,} values",
            remedy="copy what has to be the same from one rank to all: torch.distributed.broadcast(tensor, src=0); "
            "of a model in DistributedDataParallel, save the wrapper itself, whose buffers are those of the first "
            "rank. Where each rank has values of its own, make them DTensors; or save with each rank alone, without "
            "process_group=, to a path of its own; or save them with a Store as an object of their own with "
            "state_dict and load_state_dict, which is no module: its state may differ between the ranks",
            names=different,
        )
    differing.pop(_THE_VALUES, None)
    return DistributedError(
        f"the ranks call {call} differently: {' and '.join(differing)} differ; nothing has been changed",
        expected="the same on all ranks of the mesh",
        found=found(differing),
        remedy=f"call {call} with the same model and the same other arguments on every rank",
    )
