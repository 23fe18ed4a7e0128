"""`modelstate.Live`: a program that serves, and takes new weights while it does."""

import gc
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import OptionError, SwapBusyError, VersionGoneError
from modelstate.loading.load import Source
from modelstate.loading.report import LoadReport
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Schema
from modelstate.serve.buffers import BufferDigests, buffer_digests, carry_over, modified_buffers
from modelstate.serve.canary import Calls, Canary, run_canary
from modelstate.serve.meta_clone import detach_shared_storage
from modelstate.serve.report import Answer, Clock, Event, Mode, SwapReport
from modelstate.serve.state_names import NameMap
from modelstate.serve.swap_pipeline import Buffers, SwapOptions, SwapSource, Undo, check_choice
from modelstate.serve.sync import Bag, SwapLock, WeakHandle, wait_all
from modelstate.serve.target import Program
from modelstate.serve.targets import target_factory
from modelstate.serve.versions import Entry, Method, Pin, Version, VersionGate
from modelstate.transaction.exclusive import exclusive

_HISTORY = 1000
_ALL: "Bag[Live]" = Bag()
"""Of which the child of a fork sees to each."""


@dataclass(slots=True)
class _Swap:
    """A swap that is under way."""

    source: Source
    asked: SwapOptions
    canary: Any
    buffers: Buffers
    until: float | None
    clock: Clock = field(default_factory=Clock)
    new: Version | None = None
    """Set when it is about to serve."""


class _Flip(NamedTuple):
    """What a swap has done when its version serves, and before the one before is gone."""

    old: Version
    new: Version
    loaded: LoadReport
    copies: int
    carried: tuple[str, ...]
    gone: tuple[Version, ...]
    """Nobody can roll back to them any more."""
    users: tuple[WeakHandle[Entry], ...]
    """Who had the old version at the flip."""


class Live:
    """A program that serves: `live(*args)`. New weights come in between requests, all or nothing.

    A request is answered by one version of the weights, from its beginning to its end; `swap` stages, checks and tries
    a new version beside the one that serves, makes it the current one, and frees the old one when its last request has
    ended. After any failure the old version serves on. Every method may be called from any thread.

    Args:
        target: a module, what `torch.compile` made of one, a `torch.export.ExportedProgram`, or the path of a `.pt2`,
            which is an exported program or a package of AOTInductor. It is version 1 itself, with its memory, and
            should not be changed by others any more; later versions have their own. A `.pt2` has code that is run.
        names: for an exported program: a `NameMap`, or the module that was exported, so that checkpoints in the names
            of its `state_dict()` are taken as well as those in the program's own. What `modelstate.export` has written
            has a map with it.
        keep: how many versions before the current one stay in memory, to roll back to.
        training: takes a module in training mode, or a program that was exported in it: dropout is active, and
            requests change statistics. Without it such a target is refused, except for layers of `torch.nn` that
            compute the same in both modes, as `Linear`.

    Raises `LiveTargetError` for what cannot be served so, `OptionError`, and for a file `OpenError`.
    """

    def __init__(
        self, target: Any, *, names: NameMap | nn.Module | None = None, keep: int = 1, training: bool = False
    ) -> None:
        if type(keep) is not int or keep < 0:
            raise OptionError("keep= is a number of versions", expected="0 or more", found=repr(keep))
        self._target = target_factory(target, names, training)
        self._keep = keep
        self._before: deque[Version] = deque()
        """Kept versions, the newest last."""
        self._turn = SwapLock()
        """Of swaps, from their beginning to their flip."""
        self._flips = SwapLock()
        """Of what changes which version serves, or its memory. Who takes both takes this one second."""
        program = self._target.first()
        first = Version(1, program, "the target as it was given", buffer_digests(program))
        self._last_id = 1
        self._gate = VersionGate(first)
        self._events: deque[Event] = deque([Event("started", 1, first.source, first.time, 0.0)], _HISTORY)
        _ALL.add(self)

    def __repr__(self) -> str:
        return f"<Live {self._target.name}, {self._target.kind}: version {self.version}>"

    # Serving.

    def __call__(self, *args: Any, **named: Any) -> Any:
        """What the current version makes of a request.

        It raises what the program raises, `QuarantinedError`, and `SwapBusyError` in a canary of a swap in place.
        """
        return self._gate.entry(*args, **named)

    def answer(self, *args: Any, **named: Any) -> Answer:
        """The same, with the id of the version that gave the answer."""
        with self.pin() as version:
            return Answer(version(*args, **named), version.id)

    def method(self, name: str) -> Method:
        """A method of the module that serves, called with one version: `live.method("generate")(ids)`.

        The version is in use until the call has ended; where the method is a generator or a coroutine function, until
        that has ended or is dropped. `live.method("generate").answer(ids)` gives the version's id as well. Within a pin
        it is `v.generate(ids)`. A compiled module runs the method as it was written, and compiles nothing.

        Args:
            name: the name of a method that the module's class defines, or of a submodule.

        Returns a callable, which any number of threads can use; it takes the version that is current at each call.
        Raises `AttributeError` for a name that the module does not have; `OptionError` for methods that every
        `nn.Module` has, which change the module or hand out its weights; `LiveTargetError` where an exported or
        compiled program is served.
        """
        with self.pin() as version:
            version.method(name)
        return Method(self.pin, name)

    def pin(self) -> AbstractContextManager[Pin]:
        """One version for several calls: `with live.pin() as v: v(x); v.generate(y)`. `v.id` is its id."""
        return self._gate.pinned()

    @property
    def version(self) -> int:
        """The id of the version that serves."""
        return self._gate.current.id

    @property
    def serving(self) -> tuple[int, str]:
        """The id of the version that serves, and where its weights come from."""
        version = self._gate.current
        return version.id, version.source

    @property
    def kind(self) -> str:
        """ "eager", "compiled", "exported" or "aoti"."""
        return self._target.kind

    @property
    def fixed(self) -> tuple[str, ...]:
        """Tensors of an exported program or a package that no swap changes, as far as they are known.

        They are constants that are no state; and, in a package of others, what was inlined when it was compiled.
        """
        return self._target.fixed

    def history(self) -> tuple[Event, ...]:
        """What has happened, the oldest first: the last thousand events."""
        return tuple(self._events)

    # Changing.

    def swap(
        self,
        source: Source,
        *,
        rules: Iterable[Rule] | Schema = (),
        canary: Canary | Callable[[Calls], object] | None = None,
        mode: Mode = "available",
        buffers: Buffers = "carry",
        timeout_s: float | None = 60.0,
        when_busy: Literal["wait", "refuse"] = "wait",
        exact: bool = True,
        check_finite: bool = True,
        verify: bool = False,
    ) -> SwapReport:
        """Puts new weights into service, all or nothing. The old version serves on after any failure.

        Args:
            source: whatever `modelstate.open` takes: a path, a directory, a state dict, a `Checkpoint`.
            rules: as for `modelstate.load`.
            canary: tried with the new version before it serves: a `Canary`, or a function that is called with it, and
                refuses it by returning False or raising.
            mode: "available" stages a second copy, and no request waits. "frugal" has requests wait while it reads
                into the memory that is there, with a copy of the old weights to undo it; nothing is left to roll back
                to.
            buffers: "carry" takes over the buffers that requests have changed, as they are at the flip; "reset" has
                what the checkpoint says, and for the others what the target had when it was given.
            timeout_s: seconds to wait for other swaps, and for requests. In the mode "available" the new version
                serves whether or not the requests of the old one have ended by then.
            when_busy: "refuse" raises `SwapBusyError` where another swap is under way.
            exact: whether dtypes, strides and storages must be as the program's; otherwise they are converted as
                `modelstate.load` does, without loss.
            check_finite: whether NaN and infinity are refused, where the weights that serve have none.
            verify: compares the file with the checksums that it keeps.

        Raises what `modelstate.open` and `modelstate.load` raise; `WeightsError` (`WeightDtypeError`,
        `WeightKindError`, `WeightStrideError`, `WeightStorageError`, `NonFiniteWeightError`); `CanaryError`,
        `SwapBusyError`, `SwapTimeoutError`, `LiveTargetError`, `OptionError`. `QuarantinedError` where an undo of the
        mode "frugal" failed: then every request is refused until another swap succeeds.
        """
        check_choice("mode", mode, ("available", "frugal"))
        check_choice("buffers", buffers, ("carry", "reset"))
        check_choice("when_busy", when_busy, ("wait", "refuse"))
        until = _until(timeout_s)
        swap = _Swap(source, SwapOptions(rules, exact, check_finite, verify), canary, buffers, until)
        clock = swap.clock
        try:
            with self._turn.taken(when_busy == "wait", timeout_s):
                flip = self._swap_beside(swap) if mode == "available" else self._swap_in_place(swap)
                self._note("swapped", flip.new.source, clock.seconds)
        except BaseException as error:
            if swap.new is None or self._gate.current is not swap.new:
                self._note("refused", _text(source), clock.seconds, f"{type(error).__name__}: {error}")
            elif self._events[-1].version != swap.new.id:  # an interrupt came when it was done
                self._note("swapped", swap.new.source, clock.seconds)
            raise
        # The turn is over: a request that does not end keeps nobody from rolling back.
        for version in flip.gone:
            self._free(version)
        with clock("drain"):
            # A pin of this very thread would be waited for in vain.
            drained = wait_all(flip.users, 0.0 if self._gate.holds(flip.old) else until)
        return self._report(flip, mode, drained, clock)

    def rollback(self, *, timeout_s: float | None = 60.0) -> int:
        """Makes the version before serve again, by one flip, and frees the one that served. Returns its id.

        It has its buffers as it left them. A swap that has not flipped yet, for it reads or is in its canary, is not
        waited for, and raises `SwapBusyError` then. `timeout_s` are the seconds to wait for a swap in place; and, where
        a package of AOTInductor has given the library of that version away, for other swaps and for requests that have
        it. Raises `VersionGoneError` where no version is kept, `SwapBusyError` and `SwapTimeoutError`.
        """
        until = _until(timeout_s)
        clock = Clock()
        self._turn.check()
        with self._flips.taken(True, timeout_s):
            seats, old = self._target.seats, self._kept()
            gone = self._step_back(old, clock) if seats is None or seats.holds(old.program) else None
        if gone is None:  # it takes a library that a swap which is under way may be working with
            with self._turn.taken(True, _left(until)), self._flips.taken(True, _left(until)):
                old = self._kept()
                assert old.program is not None
                self._seat(old.program, until)
                gone = self._step_back(old, clock)
        self._free(gone)
        return old.id

    # How.

    def _kept(self) -> Version:
        """What a rollback makes the current version. Raises `VersionGoneError`."""
        if not self._before:
            raise VersionGoneError(
                "there is no version to roll back to",
                where=repr(self),
                found="the first version, one that was rolled back to, or one that was swapped in place",
                remedy="swap in the weights that are wanted; Live(..., keep=n) keeps n versions",
            )
        return self._before[-1]

    def _step_back(self, old: Version, clock: Clock) -> Version:
        self._before.pop()
        gone = self._gate.flip(old)
        self._note("rolled back", old.source, clock.seconds)
        return gone

    def _swap_beside(self, swap: _Swap) -> _Flip:
        old, copies, clock = self._gate.current, self._gate.programs + 1, swap.clock
        serving = old.program
        assert serving is not None
        with clock("staged"):
            incoming = SwapSource(self._target, swap.source, swap.asked)
            program, loaded = incoming.stage(serving)
        try:
            with clock("drain"), self._flipping(old, swap.until):
                self._seat(program, swap.until)
            with clock("canary"):
                if swap.canary is not None:
                    run_canary(self._prepared(swap.canary), program)
            with clock("flip"), self._flipping(old, None):
                broken = self._gate.is_quarantined
                new = self._new(program, incoming.source, buffer_digests(program))
                carries = swap.buffers == "carry" and not broken
                carried = carry_over(modified_buffers(serving, old.marks), program) if carries else ()
                swap.new = new
                self._gate.flip(new)
                if not broken:
                    self._before.append(old)
                gone = [self._before.popleft() for _ in range(len(self._before) - self._keep)]
        except BaseException:
            if self._gate.current.program is not program:
                program.end()
            raise
        return _Flip(old, new, loaded, copies, carried, (*gone, old) if broken else tuple(gone), old.users)

    def _swap_in_place(self, swap: _Swap) -> _Flip:
        old, copies, clock = self._gate.current, self._gate.programs + 1, swap.clock
        program = old.program
        assert program is not None
        if self._gate.holds(old):
            raise OptionError("a swap in place waits for all pins, and this thread holds one", where="mode='frugal'")
        with clock("staged"):
            incoming = SwapSource(self._target, swap.source, swap.asked)
            incoming.check(program)
            prepared = None if swap.canary is None else self._prepared(swap.canary)
        with (
            self._flipping(old, swap.until),
            self._gate.closed(swap.until, clock("drain")),
            exclusive(program.holder),
        ):
            touched = modified_buffers(program, old.marks) if swap.buffers == "carry" else {}
            if self._target.seats is None:  # the answers of a library have memory of their own
                detach_shared_storage(program)
            undo = Undo(program)
            self._gate.undone_by(undo)
            before = undo.before
            with clock("staged"):
                self._target.renew(program)
                loaded = incoming.overwrite(program, before)
            with clock("flip"):
                if swap.buffers == "reset":
                    carry_over(self._target.hidden(), program)
                untouched = buffer_digests(program)
                carried = carry_over({name: before.get(name) for name in touched}, program)
            with clock("canary"):
                if prepared is not None:
                    run_canary(prepared, program)
            swap.new = new = self._new(program, incoming.source, untouched)
            self._gate.flip(new)
            gone = [self._before.popleft() for _ in range(len(self._before))]
        return _Flip(old, new, loaded, copies, carried, tuple(gone), old.users)

    @contextmanager
    def _flipping(self, old: Version, until: float | None) -> Iterator[None]:
        """Within the block no other version is made the current one. Raises `SwapBusyError` where one was before."""
        with self._flips.taken(True, _left(until)):
            if self._gate.current is not old:
                raise SwapBusyError(
                    "the version that served was rolled back while this swap was under way; nothing has been changed",
                    where=repr(self),
                    found=f"version {self.version} serves, and {old.id} did when the swap began",
                    remedy="swap again, if the new weights are still wanted",
                )
            yield

    def _report(self, flip: _Flip, mode: Mode, drained: bool, clock: Clock) -> SwapReport:
        return SwapReport(
            version=flip.new.id,
            previous=flip.old.id,
            target=self._target.name,
            source=flip.new.source,
            mode=mode,
            tensors=len(flip.loaded.loaded),
            bytes=flip.loaded.bytes,
            copies=flip.copies,
            staged_seconds=clock["staged"],
            canary_seconds=clock["canary"],
            flip_seconds=clock["flip"],
            drain_seconds=clock["drain"],
            drained=drained,
            seconds=clock.seconds,
            carried=flip.carried,
            notes=flip.loaded.notes,
        )

    def _seat(self, program: Program, until: float | None) -> None:
        """Has a program take over what calls it, where there is not one of that for each version."""
        seats, serving = self._target.seats, self._gate.current.program
        if seats is None or serving is None or seats.holds(program):
            return
        leaving = seats.in_the_way(serving)
        if leaving is not None:
            self._gate.wait_until_left(leaving, until)
        seats.seat(program, serving)

    def _prepared(self, canary: Any) -> Any:
        if isinstance(canary, Canary):
            return canary.prepared(self)
        if not callable(canary):
            raise OptionError(
                "canary= is what tries a new version", expected="a Canary, or a function", found=type(canary).__name__
            )
        return canary

    def _new(self, program: Program, source: str, untouched: BufferDigests) -> Version:
        self._last_id += 1
        return Version(self._last_id, program, source, untouched)

    def _free(self, version: Version) -> None:
        """Lets go of a version; where it is held by nothing but a cycle of its own, that is collected."""
        program = version.program
        held = None if program is None or version.id == 1 else weakref.ref(program.holder)  # version 1 is the user's
        del program
        version.retire()
        if held is not None and held() is not None and wait_all(version.users, 0.0):
            gc.collect()

    def _forked(self) -> None:
        for one in (self._gate, self._turn, self._flips, self._target.seats):
            if one is not None:
                one.forked()

    def _note(self, action: str, source: str, seconds: float, error: str = "") -> None:
        self._events.append(Event(action, self.version, source, time.time(), seconds, error))


def _until(timeout_s: float | None) -> float | None:
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and 0 <= timeout_s < 1e8):
        raise OptionError("timeout_s= is a number of seconds", expected="from 0, or None", found=repr(timeout_s))
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0.0)


def _forked() -> None:
    for live in _ALL:
        live._forked()


os.register_at_fork(after_in_child=_forked)


def _text(source: object) -> str:
    if isinstance(source, Checkpoint):
        return source.source
    return str(source) if isinstance(source, str) or hasattr(source, "__fspath__") else type(source).__name__
