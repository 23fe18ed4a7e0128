"""`modelstate.Live`: a program that serves requests while its weights are swapped."""

import gc
import os
import sys
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import msgspec
import torch
from torch import nn

from modelstate.arguments import check_choice, check_integer, checked_call, seconds_of
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import LiveTargetError, OptionError, SwapBusyError, VersionGoneError
from modelstate.io.files import local_path
from modelstate.io.memory import MemoryPool
from modelstate.loading.load import OF_TORCH, Source
from modelstate.process import gc_paused
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Schema
from modelstate.serve.canary import Calls, Canary, run_canary
from modelstate.serve.state_names import NameMap
from modelstate.serve.swap_pipeline import (
    Buffers,
    Loaded,
    Mode,
    SwapOptions,
    SwapReport,
    SwapSource,
    Undo,
    detach_shared_storage,
)
from modelstate.serve.targets import (
    BufferDigests,
    ModuleTarget,
    Program,
    Target,
    buffer_digests,
    carry_over,
    check_graph_mode,
    modified_buffers,
    on_gpu,
    renew_buffers,
    settle,
)
from modelstate.serve.versions import (
    Answer,
    ConcurrentWeakSet,
    DrainGuard,
    Entry,
    Method,
    PinContext,
    SwapLock,
    SwapLockGuard,
    Version,
    VersionGate,
    WeakHandle,
    method_of,
    wait_all,
)
from modelstate.text_format import listed
from modelstate.torch_compat.private import default_modes, payload_of, require_aoti
from modelstate.transaction.transaction import exclusive

_HISTORY = 1000
_ALL: "ConcurrentWeakSet[Live]" = ConcurrentWeakSet()
"""All instances, for the child of a fork."""
AnyCanary = Canary | Callable[[Calls], object]


class Event(NamedTuple):
    """A row of `Live.history()`."""

    action: str
    """ "started", "swapped", "rolled back" or "refused"."""
    version: int
    """The id of the version that served afterwards."""
    source: str
    time: float
    """Seconds since 1970."""
    seconds: float
    error: str = ""
    """The class and text of the error; empty without an error."""


class Clock(defaultdict[str, float]):
    """Seconds by phase: `with clock("staged"): ...` adds the time of the block to the phase."""

    def __init__(self) -> None:
        super().__init__(float)
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._began

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self[name] += time.perf_counter() - began


class _Swap(msgspec.Struct):
    """A swap in progress."""

    source: Source
    options: SwapOptions
    canary: AnyCanary | None
    buffers: Buffers
    deadline: float | None
    clock: Clock = msgspec.field(default_factory=Clock)
    new: Version | None = None
    """Set immediately before the flip."""


class _Flip(NamedTuple):
    """The result of a swap at the time when its version serves and the previous one may still be in use."""

    old: Version
    new: Version
    loaded: Loaded
    copies: int
    carried: tuple[str, ...]
    dropped: tuple[Version, ...]
    """Versions that are no longer kept for a rollback."""
    users: tuple[WeakHandle[Entry], ...]
    """The entries of the old version at the flip. A rollback adds one, which does not end."""


def target_factory(target: object, names: NameMap | nn.Module | None, training: bool) -> Target:
    """Returns the target for an argument of `Live`. Raises as `Live` does."""
    match target:
        case str() | os.PathLike():
            return _target_of_file(local_path(os.fspath(target)), names, training)
        case nn.Module():
            if names is not None:
                raise OptionError("names= is for exported programs", found="a module, which has its own names")
            return ModuleTarget(target, training)
    # There is no program where torch.export has not been imported.
    program_class = getattr(sys.modules.get("torch.export"), "ExportedProgram", None)
    if program_class is not None and isinstance(target, program_class):
        from modelstate.serve.exported import ExportedTarget

        check_graph_mode(target, training, "ExportedProgram")
        return ExportedTarget(target, names)
    raise LiveTargetError(
        "this object cannot be served",
        expected="a module, a compiled module, an ExportedProgram, or the path of a .pt2",
        found=f"{type(target).__module__}.{type(target).__qualname__}",
        remedy="for a function, serve the module that it calls; for a loaded package, give its path",
    )


def _target_of_file(path: str, names: NameMap | nn.Module | None, training: bool) -> Target:
    from modelstate.serve.program_file import read_program_file

    file = read_program_file(path)
    if file.kind == "aoti":
        require_aoti(LiveTargetError, path, "serve the module, or an exported program")
        from modelstate.serve.aoti import AotiTarget

        return AotiTarget(file, names)
    from modelstate.serve.exported import ExportedTarget

    if names is None and file.manifest is not None:
        names = file.manifest.names
    program = file.program()
    file.check_unchanged()
    check_graph_mode(program, training, path)
    return ExportedTarget(program, names, path)


_AS_SERVED = "leave it out: each weight goes to the device of the one that it replaces"
FOREIGN = {
    **OF_TORCH,
    "mmap": "leave it out: a version has memory of its own",
    "map_location": _AS_SERVED,
    "device": _AS_SERVED,
    "dtype": "leave it out: weights have the dtypes of the program. To cast them: rules=[ms.rules.Cast(name, dtype)]",
}
"""Arguments of torch's and other loads that a swap does not have, each with what replaces it."""


class SwapArguments(TypedDict, total=False):
    """The keyword arguments of `Live.swap`, but for `when_busy`, which decides what it returns."""

    key: str | None
    rules: Rule | Iterable[Rule] | Schema
    allow_missing: Iterable[str]
    allow_unexpected: Iterable[str]
    canary: AnyCanary | None
    mode: Mode
    buffers: Buffers
    timeout_seconds: float | None
    exact: bool
    check_finite: bool
    verify: bool


class Live:
    """A program that serves: `live(*args)` answers a request. New weights are swapped in between requests.

    One version of the weights answers a request from its start to its end. `swap` stages, checks and tries a new
    version beside the one that serves, makes it the current one, and frees the old one when its last request has ended.
    After any failure the old version continues to serve. Every method may be called from any thread.

    Args:
        target: a module, the result of `torch.compile`, a `torch.export.ExportedProgram`, or the path of a `.pt2`,
            which is an exported program or a package of AOTInductor. The target itself, with its memory, is version 1,
            and should not be changed by other code. Later versions have memory of their own. A module with weights on
            meta, as `modelstate.skeleton` makes it, serves nothing until the first swap: every request raises
            `VersionGoneError`, and `version` is 0. Opening a `.pt2` runs code from it.
        names: for an exported program: a `NameMap`, or the module that was exported. Checkpoints with the names of the
            module's `state_dict()` are accepted then, besides those with the program's own names. A file written by
            `modelstate.export` contains a map.
        keep_versions: the number of versions before the current one that stay in memory for a rollback.
        spare_bytes: the most bytes of retired versions that stay in memory, so that a later swap reads into pages that
            the kernel need not clear. Memory that a request, or one of its answers, still uses is not written to. None
            takes the size of one version, and 0 keeps nothing.
        training: accepts a module in training mode, or a program that was exported in it: dropout is active, and
            requests change statistics. By default such a target is refused, except for layers of `torch.nn` that
            compute the same in both modes, such as `Linear`.

    Raises:
        LiveTargetError: the target cannot be served in versions.
        OptionError: an argument is invalid.
        OpenError: the file cannot be opened.
        ChecksumError: the file has been damaged.

    Examples:
        >>> live = modelstate.Live(model.eval())
        >>> live(x)
        >>> live.swap("step-2000.safetensors")
        >>> live.rollback()
        1
    """

    @checked_call("ms.Live", is_method=True)
    def __init__(
        self,
        target: object,
        *,
        names: NameMap | nn.Module | None = None,
        keep_versions: int = 1,
        spare_bytes: int | None = None,
        training: bool = False,
    ) -> None:
        check_integer("keep_versions", keep_versions, least=0)
        check_integer("spare_bytes", spare_bytes, least=0, accepts_none=True)
        with gc_paused(), default_modes():
            self._target = target_factory(target, names, training)
            program = self._target.first()
            digests = buffer_digests(program)
        fixed = listed(self._target.fixed, 8)
        stale = "not in the state, so not changed; stale where the values were computed from weights"
        self._notes = (f"{stale}: {fixed}",) if fixed else ()
        self._pool, self._spare_bytes = MemoryPool(), spare_bytes
        self._keep_versions = keep_versions
        self._kept: deque[Version] = deque()
        """Kept versions, the newest last."""
        self._unsettled: deque[tuple[tuple[WeakHandle[Entry], ...], list[torch.Tensor]]] = deque()
        """The tensors of retired versions on GPUs, with the entries of each version."""
        self._swap_lock = SwapLock()
        """Held by a swap from its start to its flip."""
        self._flip_lock = SwapLock()
        """Held while the current version, or its memory, changes. It is acquired after `_swap_lock`."""
        has_values = not any(part.is_meta for tensor in program.tensors for part in payload_of(tensor))
        source = "the target as it was given" if has_values else "none: the weights of the target are on meta"
        first = Version(int(has_values), program, source, digests)
        self._first_id = self._last_id = first.id
        self._gate = VersionGate(first)
        self._events: deque[Event] = deque([Event("started", first.id, first.source, first.time, 0.0)], _HISTORY)
        _ALL.add(self)

    def __repr__(self) -> str:
        serves = f"version {self.version}" if self.version else "nothing serves yet"
        return f"<Live {self._target.name}, {self._target.kind}: {serves}>"

    # Serving.

    def __call__(self, *args: object, **named: object) -> Any:
        """Answers a request with the current version.

        Raises:
            VersionGoneError: nothing serves yet, since the target has weights on meta.
            QuarantinedError: a swap in place failed, and its undo failed as well.
            SwapBusyError: the canary of a swap in place calls the program itself.
            Exception: what the program raises.
        """
        return self._gate.entry(*args, **named)

    def answer(self, *args: object, **named: object) -> Answer:
        """Answers a request, and returns the result with the id of the version that gave it.

        Args:
            args: positional inputs of the request.
            named: inputs by keyword.

        Returns:
            An `Answer` with the fields `value` and `version`.

        Raises:
            Exception: what a call of the `Live` raises.

        Examples:
            >>> value, version = live.answer(x)
        """
        with self.pin() as version:
            return Answer(version(*args, **named), version.id)

    def method(self, name: str) -> Method:
        """Returns a method of the module that serves: `live.method("generate")(ids)`.

        Each call uses one version. The version is in use until the call has ended; for a generator or coroutine
        function, until the generator or coroutine has ended or is dropped. `live.method("generate").answer(ids)`
        returns the version's id as well. Within a pin, write `v.generate(ids)`. A method of a compiled module runs as
        it was written, without compilation.

        Args:
            name: a method that the module's own class defines, or a submodule.

        Returns:
            A callable for any number of threads. Each call uses the version that is current at that time.

        Raises:
            AttributeError: the module has no such method.
            OptionError: every `nn.Module` has the method; it changes the module or exposes its weights.
            LiveTargetError: the target is an exported program or a compiled package.

        Examples:
            >>> generate = live.method("generate")
            >>> ids = generate(prompt)
        """
        method_of(self._serving()[1], name)
        return Method(self.pin, name)

    def pin(self) -> PinContext:
        """Returns a context that holds one version for several calls.

        Returns:
            The context; its value is a `Pin`, which is called as the `Live` is.

        Examples:
            >>> with live.pin() as version:
            ...     ids = version.generate(prompt)
            ...     score = version(ids)
            >>> version.id
            1
        """
        return self._gate.pinned()

    @property
    def version(self) -> int:
        """The id of the version that serves; 0 where nothing serves yet, since the target has weights on meta."""
        return self._gate.current.id

    @property
    def serving(self) -> tuple[int, str, float]:
        """The id of the version that serves, the source of its weights, and the time at which it was made, in seconds
        since 1970. The id is 0 where nothing serves yet."""
        version = self._gate.current
        return version.id, version.source, version.time

    @property
    def kind(self) -> str:
        """ "eager", "compiled", "exported" or "aoti"."""
        return self._target.kind

    @property
    def fixed(self) -> tuple[str, ...]:
        """Tensors that are not part of the state, so that no swap changes them, as far as they are known.

        These are tensors and arrays in plain attributes of a module, which only its own loading code may change,
        constants of an exported program or a package, and, in a package that `modelstate.export` has not written,
        tensors that the compiler has inlined. A value that was computed from the weights, such as a cached transpose,
        is stale after a swap. A note of the `SwapReport` lists these tensors.
        """
        return self._target.fixed

    def history(self) -> tuple[Event, ...]:
        """Returns the last thousand events.

        Returns:
            The events, the oldest first.

        Examples:
            >>> [event.action for event in live.history()]
            ['started', 'swapped']
        """
        return tuple(self._events.copy())  # a copy is made in one step, and other threads append events

    # Changing.

    @overload
    def swap(
        self, source: Source, *, when_busy: Literal["wait"] = ..., **arguments: Unpack[SwapArguments]
    ) -> SwapReport: ...
    @overload
    def swap(
        self, source: Source, *, when_busy: Literal["wait", "skip"], **arguments: Unpack[SwapArguments]
    ) -> SwapReport | None: ...
    @checked_call("live.swap", is_method=True, foreign=FOREIGN)
    def swap(
        self,
        source: Source,
        *,
        key: str | None = None,
        rules: Rule | Iterable[Rule] | Schema = (),
        allow_missing: Iterable[str] = (),
        allow_unexpected: Iterable[str] = (),
        canary: AnyCanary | None = None,
        mode: Mode = "available",
        buffers: Buffers = "carry",
        timeout_seconds: float | None = 60.0,
        when_busy: Literal["wait", "skip"] = "wait",
        exact: bool = True,
        check_finite: bool = True,
        verify: bool = False,
    ) -> SwapReport | None:
        """Puts new weights into service, all or nothing. After any failure the old version continues to serve.

        Args:
            source: any source of `modelstate.open`: a path, a directory, a state dict, a `Checkpoint`.
            key: as for `modelstate.load`, like `rules`, `allow_missing` and `allow_unexpected`.
            rules: changes of the checkpoint's names and tensors.
            allow_missing: glob patterns of names that may be missing from the checkpoint. The new version has copies of
                their values in the version that serves.
            allow_unexpected: glob patterns of names that may be missing from the program.
            canary: tries the new version before it serves: a `Canary`, or a function that is called with the version
                and refuses it by returning False or raising.
            mode: "available" stages a second copy, and no request waits. "in_place" lets requests wait while it reads
                into the existing memory, with a copy of the old weights for an undo; no version remains for a rollback.
            buffers: "carry" takes over the buffers that requests have changed, with their values at the flip. "reset"
                takes the values of the checkpoint, and for other buffers those of the original target.
            timeout_seconds: seconds to wait for other swaps, and for requests; None waits without limit. In the mode
                "available" the new version serves even if requests of the old one have not ended by then.
            when_busy: what to do while another swap is under way: "wait" for it, or "skip" this one and return None.
            exact: requires the program's dtypes, strides and storages; False converts them without loss, as
                `modelstate.load` does.
            check_finite: refuses NaN and infinity where the weights that serve have none.
            verify: compares the file with the checksums that it contains.

        Returns:
            A `SwapReport`: the ids of both versions, sizes, and times; None where the swap was skipped.

        Raises:
            OpenError: the source cannot be opened; see `modelstate.open`.
            PlanError: the source does not fit; see `modelstate.load`.
            WeightsError: the program cannot take the weights.
            CanaryError: the canary refuses the new version.
            SwapBusyError: a swap calls this, by its canary or by code of the model, or the version was rolled back
                meanwhile.
            SwapBusyError: other swaps or requests did not end in time.
            LiveTargetError: the target cannot take these weights in this mode.
            OptionError: an argument is invalid.
            QuarantinedError: an undo of the mode "in_place" failed. Every request is refused until a swap succeeds.

        Examples:
            >>> report = live.swap("step-2000.safetensors", canary=modelstate.Canary((x,)))
            >>> report.version
            2
        """
        check_choice("mode", mode, ("available", "in_place"))
        check_choice("buffers", buffers, ("carry", "reset"))
        check_choice("when_busy", when_busy, ("wait", "skip"))
        if canary is not None and not callable(canary) and not isinstance(canary, Canary):
            raise OptionError(
                "canary= must be a Canary or a function",
                expected="a Canary, or a function",
                found=type(canary).__name__,
            )
        deadline = _deadline(timeout_seconds)
        options = SwapOptions(key, rules, allow_missing, allow_unexpected, exact, check_finite, verify)
        swap = _Swap(source, options, canary, buffers, deadline)
        clock = swap.clock
        try:
            with SwapLockGuard(self._swap_lock, when_busy == "wait", timeout_seconds) as is_held:
                if not is_held:
                    return None
                self._gate.reopen()  # an interrupt may have kept the last swap in place from its undo
                if not self.version:
                    mode = "available"  # there is no memory to read into
                flip = self._swap_beside(swap) if mode == "available" else self._swap_in_place(swap)
                self._log("swapped", flip.new.source, clock.seconds)
        except BaseException as error:
            if swap.new is None or self._gate.current is not swap.new:
                match source:
                    case Checkpoint():
                        name = source.source
                    case str() | os.PathLike():
                        name = str(source)
                    case _:
                        name = type(source).__name__
                self._log("refused", name, clock.seconds, f"{type(error).__name__}: {error}")
            elif self._events[-1].version != swap.new.id:  # an interrupt arrived between the flip and its event
                self._log("swapped", swap.new.source, clock.seconds)
            raise
        # The lock is released: a request that does not end must not delay a rollback.
        for version in flip.dropped:
            self._free(version)
        with clock("drain"):
            # A pin of this thread cannot end while this thread waits.
            drained = wait_all(flip.users, 0.0 if self._gate.holds(flip.old) else deadline)
            self._free_settled()
        return SwapReport(
            version=flip.new.id,
            previous=flip.old.id,
            target=self._target.name,
            source=flip.new.source,
            mode=mode,
            tensors=flip.loaded.tensors,
            bytes=flip.loaded.bytes,
            copies=flip.copies,
            staged_seconds=clock["staged"],
            canary_seconds=clock["canary"],
            flip_seconds=clock["flip"],
            drain_seconds=clock["drain"],
            drained=drained,
            seconds=clock.seconds,
            carried=flip.carried,
            notes=(*flip.loaded.notes, *self._notes),
        )

    def rollback(self, *, timeout_seconds: float | None = 60.0) -> int:
        """Makes the previous version serve again, by one flip, and frees the version that served.

        The previous version has its buffers as it left them. A rollback does not wait for a swap that has not flipped
        yet, while it reads or runs its canary; that swap raises `SwapBusyError`.

        Args:
            timeout_seconds: how long to wait for a swap in place; None waits without limit.

        Returns:
            The id of the version that serves now.

        Raises:
            VersionGoneError: no previous version is kept.
            SwapBusyError: a swap calls this, by its canary or by code of the model.
            SwapBusyError: a swap or requests did not end in time.

        Examples:
            >>> live.swap("step-2000.safetensors").version
            2
            >>> live.rollback()
            1
        """
        _deadline(timeout_seconds)
        clock = Clock()
        self._swap_lock.check_not_nested()
        with SwapLockGuard(self._flip_lock, True, timeout_seconds):
            if not self._kept:
                raise VersionGoneError(
                    "there is no version to roll back to",
                    where=repr(self),
                    found="the first version, one that was rolled back to or swapped in place, or keep_versions=0",
                    remedy="swap in the wanted weights; Live(..., keep_versions=n) keeps n versions",
                )
            old = self._kept.pop()
            dropped = self._gate.flip(old)
            self._log("rolled back", old.source, clock.seconds)
        self._free(dropped)
        self._free_settled()
        return old.id

    # How.

    def _swap_beside(self, swap: _Swap) -> _Flip:
        (old, serving), copies, clock = self._serving(), self._gate.programs + 1, swap.clock
        with self._pool.lending() as memory:
            try:
                with clock("staged"), gc_paused(), default_modes():
                    self._free_settled()
                    incoming = SwapSource(self._target, swap.source, swap.options)
                    program, loaded = incoming.stage(serving)
            except BaseException:
                self._keep_memory(memory)
                raise
        try:
            serves_none, notes = self._gate.serves_none, list(loaded.notes)
            carries = swap.buffers == "carry" and not serves_none
            with clock("canary"):
                if swap.canary is not None:
                    prepared = self._prepared(swap.canary)
                    with default_modes():
                        buffers = modified_buffers(serving, old.buffer_digests) if carries else {}
                    run_canary(prepared, program, buffers)
            with clock("flip"), gc_paused(), default_modes(), self._flipping(old, None):
                new = self._new_version(program, incoming.source, buffer_digests(program))
                new.memory = memory
                carried: tuple[str, ...] = ()
                if carries:
                    carried = carry_over(modified_buffers(serving, old.buffer_digests), program)
                    settle(program.buffers.values() if carried else ())
                swap.new = new
                self._gate.flip(new)
                if not serves_none:
                    self._kept.append(old)
                elif isinstance(swap.canary, Canary) and swap.canary.needs_reference:
                    notes.append("nothing served before, so the canary had no answer to compare with")
                dropped = [self._kept.popleft() for _ in range(len(self._kept) - self._keep_versions)]
                dropped += [old] * serves_none
                loaded = loaded._replace(notes=tuple(notes))
                return _Flip(old, new, loaded, copies, carried, tuple(dropped), old.users)
        except BaseException:
            if self._gate.current.program is not program:
                self._keep_memory(memory)
            raise

    def _swap_in_place(self, swap: _Swap) -> _Flip:
        (old, program), copies, clock = self._serving(), self._gate.programs + 1, swap.clock
        if self._gate.holds(old):
            raise OptionError("a swap in place waits for all pins, and this thread holds one", where="mode='in_place'")
        with clock("staged"), gc_paused(), default_modes():
            incoming = SwapSource(self._target, swap.source, swap.options)
            incoming.check(program)
        prepared = None if swap.canary is None else self._prepared(swap.canary)
        with (
            self._flipping(old, swap.deadline),
            DrainGuard(self._gate, swap.deadline, clock("drain")),
            exclusive(program.weights_module),
        ):
            with default_modes():
                settle(program.tensors)
                touched = modified_buffers(program, old.buffer_digests) if swap.buffers == "carry" else {}
                if program.answers_alias_weights:
                    detach_shared_storage(program)
                undo = Undo(program)
                self._gate.register_undo(undo)
                before = undo.before
                with clock("staged"):
                    renew_buffers(program.weights_module, self._target.skeleton)
                    loaded = incoming.overwrite(program, before)
                with clock("flip"):
                    if swap.buffers == "reset":
                        carry_over(self._target.hidden, program)
                    digests = buffer_digests(program)
                    carried = carry_over({name: before.get(name) for name in touched}, program)
            with clock("canary"):
                if prepared is not None:
                    run_canary(prepared, program, {})
            settle(program.tensors)
            swap.new = new = self._new_version(program, incoming.source, digests)
            old.memory = ()  # weights may have moved to other memory, so their storages alone keep it
            self._gate.flip(new)
            dropped = [self._kept.popleft() for _ in range(len(self._kept))]
            return _Flip(old, new, loaded, copies, carried, tuple(dropped), old.users)

    def _serving(self) -> tuple[Version, Program]:
        """The version that serves, and its program, which a rollback in another thread may take from it meanwhile."""
        while True:
            version = self._gate.current
            if (program := version.program) is not None:
                return version, program

    @contextmanager
    def _flipping(self, old: Version, deadline: float | None) -> Iterator[None]:
        """Within the block the current version cannot change. Raises `SwapBusyError` where it is not `old`."""
        remaining_seconds = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        with SwapLockGuard(self._flip_lock, True, remaining_seconds):
            if self._gate.current is not old:
                raise SwapBusyError(
                    "the serving version was rolled back during this swap; nothing has been changed",
                    where=repr(self),
                    found=f"version {self.version} serves, and {old.id} did when the swap began",
                    remedy="swap again, if the new weights are still wanted",
                )
            yield

    def _prepared(self, canary: AnyCanary) -> AnyCanary:
        """Returns a canary with a reference, if something serves that can give one. Raises `CanaryError`."""
        return canary._prepared(self) if isinstance(canary, Canary) and self.version else canary

    def _new_version(self, program: Program, source: str, digests: BufferDigests) -> Version:
        self._last_id += 1
        return Version(self._last_id, program, source, digests)

    def _free(self, version: Version) -> None:
        """Releases a version, and collects garbage where only a reference cycle of the module keeps it alive."""
        program, version.program = version.program, None
        if program is not None and (tensors := on_gpu(program.tensors)):
            self._unsettled.append((version.users, tensors))
        # The first version is the user's module.
        is_given = version.id == self._first_id
        module = None if program is None or is_given else weakref.ref(program.weights_module)
        del program
        if module is not None and module() is not None and wait_all(version.users, 0.0):
            gc.collect()
        memory, version.memory = version.memory, ()
        self._keep_memory(memory)

    def _free_settled(self) -> None:
        """Frees the GPU memory of retired versions whose requests have ended, and so have their kernels.

        torch uses freed memory again in the order of the stream that it was allocated on. Without the wait, a later
        version could overwrite weights that a request on another stream has yet to read.
        """
        ended: list[torch.Tensor] = []
        for _ in range(len(self._unsettled)):
            try:
                users, tensors = self._unsettled.popleft()
            except IndexError:  # another thread frees them
                break
            if wait_all(users, 0.0):
                ended += tensors
            else:
                self._unsettled.append((users, tensors))
        settle(ended)

    def _keep_memory(self, memory: Sequence[mmap]) -> None:
        """Gives the memory of a retired version, which requests may still use, to the pool."""
        most_bytes = self._spare_bytes
        if most_bytes is None:
            most_bytes = sum(map(len, self._gate.current.memory or memory))
        self._pool.keep(memory, most_bytes)

    def _after_fork(self) -> None:
        for part in (self._gate, self._swap_lock, self._flip_lock):
            part.after_fork()

    def _log(self, action: str, source: str, seconds: float, error: str = "") -> None:
        self._events.append(Event(action, self.version, source, time.time(), seconds, error))


def _deadline(timeout_seconds: float | None) -> float | None:
    if timeout_seconds is None:
        return None
    return time.monotonic() + seconds_of("timeout_seconds", timeout_seconds, most=1e8, accepts_none=True)


def _after_fork() -> None:
    for live in _ALL:
        live._after_fork()


os.register_at_fork(after_in_child=_after_fork)
