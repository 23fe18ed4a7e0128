"""`modelstate.Live`: a program that serves requests while its weights are swapped.

A request holds a strong reference to the version that it runs on: the callable of the version is on the stack of the
request, or in a `Version` of a `with` block. A swap makes another version, and sets one reference. Nothing is counted.
A version is freed when nothing refers to it, so an interrupt may delay that, and never serves a mixed version.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack

import torch
from msgspec.structs import replace
from torch import nn

from modelstate.arguments import check_choice, check_integer, checked_call, invalid_option, seconds_of
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import Source
from modelstate.errors import LiveTargetError, OptionError, SwapBusyError, VersionGoneError
from modelstate.io.files import local_path
from modelstate.loading.load import OF_TORCH
from modelstate.planning.options import LoadOptions, SelectionArguments, checked_options
from modelstate.process import gc_paused
from modelstate.serve.canary import Calls, Canary, prepared, run_canary
from modelstate.serve.state_names import NameMap
from modelstate.serve.swap import SwapReport, carry_over, modified_buffers, on_gpu, settle, stage
from modelstate.serve.targets import ExportedTarget, ModuleTarget, Program, Target, Weights
from modelstate.text_format import listed
from modelstate.torch_compat.private import default_modes, payload_of, require_aoti
from modelstate.transaction.transaction import exclusive, has_exclusively


class Event(NamedTuple):
    """A row of `Live.history()` or of `Following.events`.

    Attributes:
        action: Of a `Live`: "started", "swapped", "rolled back" or "refused". Of a `Following`: "swapped";
            "skipped", a bad checkpoint; "waiting", an error after which it is tried again; "ended", by an error;
            "callback", which raised.
        version: The id of the version that served afterwards; None in a `Following` that has swapped nothing in.
        source: The path of the checkpoint, or of the store.
        time: Seconds since 1970.
        seconds: The time for a swap, with that for verifying the checkpoint.
        error: The class and text of the error; empty without an error.
        step: The step of a checkpoint that is followed.
    """

    action: str
    version: int | None
    source: str
    time: float
    seconds: float
    error: str = ""
    step: int | None = None


class Answer(NamedTuple):
    """The result of a request, and the id of the version that gave it."""

    value: Any
    version: int


def _serve_nothing(*_: object, **__: object) -> object:
    raise VersionGoneError(
        "nothing serves yet: the target has no weights before the first swap",
        found="weights on meta, without values",
        remedy="swap in a checkpoint first: live.swap(source), or modelstate.follow(live, store)",
    )


class Version:
    """One version for several calls: `with live.version() as v: v(x)`. The block holds the version.

    Attributes:
        id: The id of the version; 0 where nothing serves yet, since the target has weights on meta.
        source: The source of its weights.
        step: The step of its weights, where `Store.open` or `follow` has opened it; else None.
        digest: The `digest` of the checkpoint of its weights, which says what all of them are; empty without digests.
        time: When the version was made, in seconds since 1970.

    Examples:
        >>> with live.version() as v:
        ...     first = v(x)
        ...     second = v.generate(first)
    """

    __slots__ = ("_checkpoint", "_program", "id", "source", "step", "time")

    def __init__(self, program: Program) -> None:
        self._program: Program | None = program
        self.id, self.source, self.time = program.id, program.source, program.time
        self._checkpoint = program.weights.checkpoint
        self.step = None if self._checkpoint is None else self._checkpoint.step

    @property
    def digest(self) -> str:
        """See the class."""
        return "" if self._checkpoint is None else self._checkpoint.digest

    def __repr__(self) -> str:
        return f"<Version {self.id} of {self.source!r}>"

    def __enter__(self) -> Version:
        program = self._in_use()
        if not program.id:
            program.call()
        return self

    def __exit__(self, *_: object) -> None:
        self._program = None

    def __call__(self, *args: object, **named: object) -> Any:
        """Answers a request with this version. Raises `VersionGoneError` after the block."""
        return self._in_use().call(*args, **named)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns a public method that the class of the version's module defines: `v.generate(...)`.

        The method keeps the version in use, as does a generator or a coroutine that it returns. A method of a compiled
        module runs as it was written, without compilation. Raises `VersionGoneError` after the block.
        """
        if name.startswith("_"):  # protocols such as copying look for these
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        program = self._in_use()
        if hasattr(nn.Module, name):
            remedy = "call the version for forward()"
            raise AttributeError(f"requests cannot call {name!r}: methods of nn.Module change the module; {remedy}")
        if not program.has_methods:
            remedy = "serve the module to have them"
            raise AttributeError(f"no method {name!r}: an exported or compiled program has only its call; {remedy}")
        method = getattr(program.module, name)
        if not callable(method):
            kind = type(method).__name__
            raise AttributeError(f"{type(program.module).__name__}.{name} is not a method, it is of type {kind}")
        return method  # type: ignore[no-any-return]

    def _in_use(self) -> Program:
        if self._program is None:
            raise VersionGoneError(
                "the block of this version has ended",
                where=f"version {self.id}",
                remedy="call within the block of `with live.version() as v:`",
            )
        return self._program


def target_factory(target: object, names: NameMap | nn.Module | None, training: bool) -> Target:
    """Returns the target for an argument of `Live`. Raises as `Live` does."""
    match target:
        case str() | os.PathLike():
            return _target_of_file(local_path(os.fspath(target)), names, training)
        case nn.Module():
            return ModuleTarget(target, training)
    # There is no program where torch.export has not been imported.
    program_class = getattr(sys.modules.get("torch.export"), "ExportedProgram", None)
    if program_class is not None and isinstance(target, program_class):
        return ExportedTarget(target, names, training)
    raise LiveTargetError(
        "this object cannot be served",
        expected="a module, a compiled module, an ExportedProgram, or the path of a .pt2",
        found=f"{type(target).__module__}.{type(target).__qualname__}",
        remedy="for a function, serve the module that it calls; for a loaded package, give its path",
    )


def _target_of_file(path: str, names: NameMap | nn.Module | None, training: bool) -> Target:
    from modelstate.serve.program_file import ProgramFile

    with ProgramFile(path) as file:
        if file.kind == "aoti":
            require_aoti(LiveTargetError, path, "serve the module, or an exported program")
            from modelstate.serve.aoti import AotiTarget

            return AotiTarget(file)
        if names is None and file.manifest is not None:
            names = file.manifest.names
        return ExportedTarget(file.program(), names, training, path)


_AS_SERVED = "leave it out: each weight goes to the device of the one that it replaces"
FOREIGN = {
    **OF_TORCH,
    "mmap": "leave it out: a version maps its file where that is safe",
    "map_location": _AS_SERVED,
    "device": _AS_SERVED,
    "dtype": "leave it out: weights have the dtypes of the program. To cast them: rules=[ms.rules.Cast(name, dtype)]",
}
"""Arguments of torch's and other loads that a swap does not have, each with what replaces it."""


class Live:
    """A program that serves: `live(*args)` answers a request. New weights are swapped in between requests.

    One version of the weights answers a request from its start to its end. `swap` loads, checks and tries a new version
    beside the one that serves, and makes it the current one. The old one is freed when its last request has ended.
    After any failure the old version continues to serve. Every method may be called from any thread.

    Args:
        target: A module, the result of `torch.compile`, a `torch.export.ExportedProgram`, or the path of a `.pt2`,
            which is an exported program or a package of AOTInductor. The target itself, with its memory, is version 1,
            and should not be changed by other code. A module with weights on meta, as `modelstate.skeleton` makes it,
            serves nothing until the first swap: every request raises `VersionGoneError`, and the id of the version
            is 0. Opening a `.pt2` runs code from it.
        names: For an exported program: a `NameMap`, or the module that was exported. Checkpoints with the names of the
            module's `state_dict()` are accepted then, besides those with the program's own names. A file written by
            `modelstate.export` contains a map.
        keep_versions: The number of versions before the current one that stay in memory for a rollback.
        training: Accepts a module in training mode, or a program that was exported in it. By default such a target is
            refused where a part of it computes something else in training mode, such as dropout.

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

    @checked_call("ms.Live")
    def __init__(
        self,
        target: object,
        *,
        names: NameMap | nn.Module | None = None,
        keep_versions: int = 1,
        training: bool = False,
    ) -> None:
        check_integer("keep_versions", keep_versions, least=0)
        with gc_paused(), default_modes():
            self._target = target_factory(target, names, training)
            if names is not None and not isinstance(self._target, ExportedTarget):
                found = f"the kind {self._target.kind!r}, which has its own names"
                raise OptionError("names= is only for exported programs", found=found)
            program = self._target.first
            del self._target.first  # no other reference keeps its memory
        fixed = listed(self._target.fixed, 8)
        stale = "not in the state, so not changed; stale where the values were computed from weights"
        self._notes = (f"{stale}: {fixed}",) if fixed else ()
        self._keep_versions = keep_versions
        # The modules of versions that neither serve nor are kept, and their tensors on GPUs.
        self._retired: list[tuple[weakref.ref[nn.Module], list[torch.Tensor]]] = []
        self._in_use = 0
        """How many of them a collection has left alive: requests use them."""
        self._free = Weights()
        """Those of the version that was retired last, whose memory the next one may use."""
        self._swaps, self._flips = nn.Module(), nn.Module()
        """What a swap has exclusively: the first from its start to its end, the second while it flips."""
        has_values = not any(part.is_meta for tensor in program.tensors for part in payload_of(tensor))
        source = "the target as it was given" if has_values else "none: the weights of the target are on meta"
        program.id, program.source = int(has_values), source
        if not has_values:
            program.call = _serve_nothing
        self._ids = itertools.count(1 + has_values)
        self._versions: tuple[Program, ...] = (program,)
        """The kept versions, the oldest first, and the one that serves. A flip replaces the tuple in one step."""
        self._events: deque[Event] = deque(maxlen=1000)
        self._log("started", source, 0.0)

    def __repr__(self) -> str:
        serves = f"version {self._versions[-1].id}" if self._versions[-1].id else "nothing serves yet"
        return f"<Live {self._target.name}, {self._target.kind}: {serves}>"

    # Serving.

    def __call__(self, *args: object, **named: object) -> Any:
        """Answers a request with the current version.

        Raises:
            VersionGoneError: Nothing serves yet, since the target has weights on meta.
            Exception: What the program raises.
        """
        return self._versions[-1].call(*args, **named)

    def answer(self, *args: object, **named: object) -> Answer:
        """Answers a request, and returns the result with the id of the version that gave it.

        Args:
            args: Positional inputs of the request.
            named: Inputs by keyword.

        Returns:
            An `Answer` with the fields `value` and `version`.

        Raises:
            Exception: What a call of the `Live` raises.

        Examples:
            >>> value, version = live.answer(x)
        """
        program = self._versions[-1]
        return Answer(program.call(*args, **named), program.id)

    def version(self) -> Version:
        """Returns the current version. As a context it holds that version for several calls.

        Returns:
            The version. It is called as the `Live` is, and has the methods of the module: `v.generate(...)`.

        Examples:
            >>> live.version().id
            1
            >>> with live.version() as v:
            ...     ids = v.generate(prompt)
            ...     score = v(ids)
        """
        return Version(self._versions[-1])

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

    @checked_call("live.swap", foreign=FOREIGN, options=SelectionArguments, defaults=LoadOptions())
    def swap(
        self,
        source: Source,
        *,
        canary: Canary | Callable[[Calls], object] | None = None,
        buffers: Literal["carry", "reset"] = "carry",
        timeout_seconds: float | None = 60.0,
        exact: bool = True,
        check_finite: bool = False,
        verify: bool = False,
        **selection: Unpack[SelectionArguments],
    ) -> SwapReport:
        """Puts new weights into service, all or nothing. After any failure the old version continues to serve.

        Requests do not wait. The weights of a version are maps of the file where that is safe, as for
        `modelstate.load`, and have memory of their own elsewhere.

        Args:
            source: A source of `modelstate.open`: a path, a directory, a state dict, a `Checkpoint`.
            canary: Tries the new version before it serves: a `Canary`, or a function that is called with the version
                and refuses it by returning False or raising.
            buffers: "carry" takes over the buffers that requests have changed, with their values at the flip. "reset"
                takes the values of the checkpoint, and for other buffers those of the original target.
            timeout_seconds: Seconds to wait for other swaps; None waits without limit.
            exact: Requires the program's dtypes; False converts them without loss, as `modelstate.load` does.
            check_finite: Refuses weights with NaN or infinity where those that serve have none. All of them are read
                for that. A `Canary` refuses answers with NaN.
            verify: Compares the file with the checksums that it contains.
            **selection: `key`, `rules`, `allow_missing` and `allow_unexpected` of `modelstate.loading.LoadOptions`. The
                new version has a copy of each weight that may be missing, with its value in the version that serves.

        Returns:
            A `SwapReport`: the ids of both versions, sizes, and times.

        Raises:
            OpenError: The source cannot be opened; see `modelstate.open`.
            PlanError: The source does not fit; see `modelstate.load`.
            WeightsError: The program cannot take the weights.
            CanaryError: The canary refuses the new version.
            SwapBusyError: Other swaps did not end in time; a swap calls this, by its canary or by code of the model; or
                the version was rolled back meanwhile.
            OptionError: An argument is invalid.

        Examples:
            >>> report = live.swap("step-2000.safetensors", canary=modelstate.Canary((x,)))
            >>> report.version
            2
        """
        check_choice("buffers", buffers, ("carry", "reset"))
        if canary is not None and not callable(canary) and not isinstance(canary, Canary):
            raise invalid_option("canary", "tries nothing", canary, expected="a Canary, or a function")
        loading = checked_options(**selection, verify=verify, progress=False)
        began, notes = time.perf_counter(), list[str]()
        program: Program | None = None
        try:
            self._check_not_nested()
            with self._exclusively(self._swaps, timeout_seconds):
                old = self._versions[-1]
                carries = buffers == "carry" and bool(old.id)
                with gc_paused(), default_modes():
                    program, report = stage(
                        self._target, source, loading, old, self._free, exact=exact, check_finite=check_finite
                    )
                staged = time.perf_counter()
                if canary is not None:
                    if isinstance(canary, Canary) and old.id:
                        canary = prepared(canary, self)
                    elif isinstance(canary, Canary) and canary.needs_reference:
                        notes.append("nothing served before, so the canary had no answer to compare with")
                    with default_modes():
                        modified = modified_buffers(old) if carries else {}
                    run_canary(canary, program, modified)
                tried = time.perf_counter()
                with gc_paused(), default_modes(), self._exclusively(self._flips, None):
                    if self._versions[-1] is not old:
                        raise SwapBusyError(
                            "the serving version was rolled back during this swap; nothing has been changed",
                            where=repr(self),
                            found=f"version {self._versions[-1].id} serves, and {old.id} did when the swap began",
                            remedy="swap again, if the new weights are still wanted",
                        )
                    # Buffers that are carried over count as modified in the next swap, too.
                    carried = carry_over(modified_buffers(old) if carries else {}, program.module)
                    program.id, program.source = next(self._ids), report.source
                    first_kept = max(len(self._versions) - self._keep_versions, 0) if old.id else 1
                    for each in self._versions[:first_kept]:
                        self._retire(each)
                    self._versions = (*self._versions[first_kept:], program)
                    self._log("swapped", report.source, time.perf_counter() - began)
                flipped = time.perf_counter()
        except BaseException as error:
            if program is None or program is not self._versions[-1]:
                where = source.source if isinstance(source, Checkpoint) else source
                name = str(where) if isinstance(where, str | os.PathLike) else type(where).__name__
                self._log("refused", name, time.perf_counter() - began, f"{type(error).__name__}: {error}")
            raise
        report = replace(
            report,
            version=program.id,
            previous=old.id,
            staged_seconds=staged - began,
            canary_seconds=tried - staged,
            flip_seconds=flipped - tried,
            seconds=flipped - began,
            carried=carried,
            notes=(*report.notes, *notes, *self._notes),
        )
        del old, program
        with self._exclusively(self._flips, None):
            self._free_retired()
        return report

    def rollback(self, *, timeout_seconds: float | None = 60.0) -> int:
        """Makes the previous version serve again, by one flip, and frees the version that served.

        The previous version has its buffers as it left them. A rollback does not wait for a swap that has not flipped
        yet, while it reads or runs its canary; that swap raises `SwapBusyError`.

        Args:
            timeout_seconds: How long to wait for the flip of a swap; None waits without limit.

        Returns:
            The id of the version that serves now.

        Raises:
            VersionGoneError: No previous version is kept.
            SwapBusyError: A flip did not end in time, or a swap calls this, by its canary or by code of the model.

        Examples:
            >>> live.swap("step-2000.safetensors").version
            2
            >>> live.rollback()
            1
        """
        self._check_not_nested()
        began = time.perf_counter()
        with default_modes(), self._exclusively(self._flips, timeout_seconds):
            *kept, dropped = self._versions
            if not kept:
                raise VersionGoneError(
                    "there is no version to roll back to",
                    where=repr(self),
                    found="the first version, one that was rolled back to, or keep_versions=0",
                    remedy="swap in the wanted weights; Live(..., keep_versions=n) keeps n versions",
                )
            self._retire(dropped)
            self._versions = tuple(kept)
            self._log("rolled back", kept[-1].source, time.perf_counter() - began)
            del dropped
            self._free_retired()
            return kept[-1].id

    # How.

    def _exclusively(self, lock: nn.Module, timeout_seconds: float | None) -> exclusive:
        """Returns a context of one thread at a time. Raises `OptionError` for a bad time."""
        seconds = math.inf
        if timeout_seconds is not None:
            seconds = seconds_of("timeout_seconds", timeout_seconds, most=1e8, accepts_none=True)
        busy = SwapBusyError("another swap did not end in time", remedy="give more time with timeout_seconds=")
        return exclusive(lock, timeout_seconds=seconds, busy=busy)

    def _check_not_nested(self) -> None:
        """Raises `SwapBusyError` where this thread swaps."""
        if has_exclusively(self._swaps):
            raise SwapBusyError(
                "a swap was called from within a swap, by its canary or by code of the model",
                remedy="call it when that one has ended",
            )

    def _retire(self, program: Program) -> None:
        self._retired.append((weakref.ref(program.module), on_gpu(program.tensors)))
        self._free = program.weights

    def _free_retired(self) -> None:
        """Frees the GPU memory of versions that no request uses, and finds versions that a reference cycle keeps.

        torch uses freed GPU memory again in the order of the stream that it was allocated on. Without the wait, a later
        version could overwrite weights that a request on another stream has yet to read.
        """
        alive = sum(module() is not None for module, _ in self._retired)
        if alive > 1 + max(1, self._in_use):  # not at each swap: a collection stops every thread for about 0.1 s
            gc.collect()
            self._in_use = alive
        ended = [tensors for module, tensors in self._retired if module() is None]
        self._retired = [each for each in self._retired if each[0]() is not None]
        self._in_use = min(self._in_use, len(self._retired))
        settle([tensor for tensors in ended for tensor in tensors])

    def _log(self, action: str, source: str, seconds: float, error: str = "") -> None:
        self._events.append(Event(action, self._versions[-1].id, source, time.time(), seconds, error))
