"""Packages of AOTInductor: two loaded runners that versions take turns in."""

import tempfile
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from modelstate.errors import (
    FixedWeightError,
    LiveTargetError,
    ManifestError,
    ProgramInputError,
    VersionGoneError,
    WeightsError,
)
from modelstate.serve.inputs import Inputs
from modelstate.serve.meta_clone import state_module
from modelstate.serve.program_file import Manifest, ProgramFile
from modelstate.serve.state_names import (
    NamedTargetMixin,
    NameMap,
    StateNames,
    check_names,
    names_by_tensor,
    runtime_state,
)
from modelstate.torch_compat.private import (
    aoti_embedded_constants,
    aoti_loader,
    aoti_metadata,
    aoti_refresh_constants,
    aoti_set_constants,
    flatten,
    keyword_order,
    structure_of,
    unflatten,
)


class Loader:
    """A loaded library. It works with tensors that are managed outside of it, and copies nothing.

    A library never lets go of a tensor that it was given. So it is given one empty tensor for each constant, once, and
    these are moved from the storage of one version to that of the next; then it is told to look where they lie. What
    has wrong sizes or strides would make it read past the end: `use` is for tensors that have been checked.
    """

    def __init__(self, path: str, model: str) -> None:
        try:
            self._library = aoti_loader(path, model)
            self.names: tuple[str, ...] = tuple(self._library.get_constant_fqns())
            self.call_spec: tuple[str, str] = tuple(self._library.get_call_spec())
        except RuntimeError as error:
            raise LiveTargetError(
                "the package cannot be loaded",
                where=path,
                found=str(error).splitlines()[0],
                remedy="compile it for this machine and this version of torch",
            ) from error
        self._shells: dict[str, torch.Tensor] | None = None
        # Code of the model in Python lets others in while it runs, who would wait in the library with Python's lock.
        self._lock = threading.Lock()

    def use(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Works with these tensors from now on, all that it has names for. Nobody may be calling it."""
        with torch.inference_mode(False), torch.no_grad():
            made = self._shells is None
            if self._shells is None:
                self._shells = {name: torch.empty(0, dtype=constants[name].dtype) for name in self.names}
            for name, shell in self._shells.items():
                one = constants[name]
                shell.set_(one.untyped_storage(), one.storage_offset(), one.shape, one.stride())
            if not made:
                aoti_refresh_constants(self._library)
            elif self.names:
                aoti_set_constants(self._library, self._shells)

    def let_go(self) -> None:
        """Gives up the tensors that it works with. Until `use` has given it others, `run` must not be called."""
        with torch.inference_mode(False), torch.no_grad():
            for shell in (self._shells or {}).values():
                shell.set_()  # type: ignore[call-overload]

    def run(self, inputs: list[torch.Tensor]) -> list[Any]:
        """Calls it. The inputs have been checked."""
        with self._lock:
            found: list[Any] = self._library.boxed_run(inputs)
            return found


_CONSTANTS = ("_tensor_constant", "lifted_tensor_", "_frozen_param")
"""How AOTInductor begins the names of what is no parameter and no buffer, or is not as the module has it."""

_COMPUTED = "_FOLDED_CONST_"
"""The same of what the library computes of others: runtime constant folding."""


class AotiVersion:
    """The weights of one version; and a library, as long as it has a seat in one."""

    __slots__ = ("__weakref__", "_call", "_hidden", "_runners", "constants", "loader", "weights_module")
    module = None

    def __init__(
        self, seats: "RunnerPool", call: "_Call", filled: nn.Module, hidden: dict[str, torch.Tensor], wanted: "_Wanted"
    ) -> None:
        self._runners, self._call, self._hidden = seats, call, hidden
        self.weights_module = filled
        self.loader: Loader | None = None
        self.constants = wanted.constants(runtime_state(filled), hidden)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        return {**dict(self.weights_module.named_buffers()), **self._hidden}

    def end(self) -> None:
        self._runners.release(self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.loader is None:  # a library that is called without weights takes the process down
            raise VersionGoneError(
                "this version has no library any more", remedy="call versions within their canary, or within their pin"
            )
        inputs = self._call.inputs(args, named)
        with torch.no_grad():
            return unflatten(self.loader.run(inputs), self._call.out_spec)


class RunnerPool:
    """The two libraries. Both are loaded at once: later another file may be at the path.

    A version has its seat as long as it is there, and no longer than until another one is given it.
    """

    def __init__(self, file: ProgramFile) -> None:
        self._lock = threading.Lock()
        """A version goes with its last request, while the next one may be taking the other seat."""
        self._taken: list[tuple[Loader, weakref.ref[AotiVersion] | None]]
        self._taken = [(Loader(file.path, file.model), None) for _ in range(2)]

    @property
    def first(self) -> Loader:
        return self._taken[0][0]

    def holds(self, program: Any) -> bool:
        return any(one is program for one in self._versions())

    def next_evicted(self, serving: Any) -> AotiVersion | None:
        others = [one for one in self._versions() if one is not serving]
        return others[0] if others else None

    def attach(self, program: AotiVersion, serving: Any) -> None:
        with self._lock:
            self._seat(program, serving)

    def release(self, program: AotiVersion) -> None:
        """Its library keeps nothing of it."""
        with self._lock:
            for place, (loader, one) in enumerate(self._taken):
                if one is not None and one() is program:
                    program.loader = None
                    self._taken[place] = loader, None
                    loader.let_go()

    def after_fork(self) -> None:
        """In the child of a fork, where nobody else is."""
        self._lock = threading.Lock()

    def _versions(self) -> list[AotiVersion | None]:
        return [None if one is None else one() for _, one in self._taken]

    def _sweep(self) -> None:
        """The libraries keep nothing of versions that are gone. Called when one goes, in the middle of anything."""
        if self._lock.acquire(blocking=False):  # otherwise a seat is being given, and none is kept for nothing
            try:
                for place, (loader, one) in enumerate(self._taken):
                    if one is not None and one() is None:
                        self._taken[place] = loader, None
                        loader.let_go()
            finally:
                self._lock.release()

    def _seat(self, program: AotiVersion, serving: Any) -> None:
        free = [place for place, one in enumerate(self._versions()) if one is None]
        place = free[0] if free else next(place for place, one in enumerate(self._versions()) if one is not serving)
        before = self._versions()[place]
        if before is not None:
            before.loader = None
        loader, _ = self._taken[place]
        self._taken[place] = loader, None
        loader.use(program.constants)
        me = weakref.ref(self)

        def gone(_: object) -> None:
            seats = me()
            if seats is not None:
                seats._sweep()

        self._taken[place] = loader, weakref.ref(program, gone)
        program.loader = loader


class AotiTarget(NamedTargetMixin):
    """A `.pt2` of AOTInductor. What `modelstate.export` has written says of each of its tensors what it is.

    Of what others have written there is known which names the library has, and what stands in it: tensors that were
    inlined are not among them, and are found only where a checkpoint has them, or `names` knows of them.
    """

    kind = "aoti"

    def __init__(self, file: ProgramFile, names: NameMap | nn.Module | None) -> None:
        self.name = file.path
        manifest = file.manifest
        _check_machine(file)
        self.runners = RunnerPool(file)
        loader = self.runners.first
        self._call = _Call(loader, manifest, file.path)
        values = _values(file, loader)
        file.check_unchanged()
        if manifest is not None:
            names = manifest.names if names is None else names
            state, self._hidden = _of_manifest(manifest, values, file.path)
        else:
            state, self._hidden = _of_others(values, names)
        self._wanted = _Wanted(loader, values, state, self._hidden)
        if manifest is not None:
            check_names(state, names, file.path)
        self.fixed: tuple[str, ...] = (*self._wanted.fixed, *_missing(state, names))
        self._built_in = runtime_state(names) if isinstance(names, nn.Module) and manifest is None else {}
        self._is_known = manifest is not None
        self._first: dict[str, torch.Tensor] | None = state
        shown = runtime_state(state_module(state))
        self._state = {name: shown[name] for name in state}
        """Without memory: that of the first version is the first version's."""
        self._spellings = StateNames(self._state, _without(names, state))

    def first(self) -> AotiVersion:
        given, self._first = self._first, None
        assert given is not None
        hidden = {name: value.clone() for name, value in self._hidden.items()}
        made = AotiVersion(self.runners, self._call, state_module(given, meta=False), hidden, self._wanted)
        self.runners.attach(made, None)
        return made

    def program(self, filled: nn.Module) -> AotiVersion:
        state = runtime_state(filled)
        changed = [name for name, value in self._built_in.items() if name in self.fixed and name in state]
        changed = [name for name in changed if not torch.equal(state[name], self._built_in[name])]
        if changed:
            raise self._no_place(changed)
        filled = state_module({name: state[name] for name in self._state}, meta=False)
        hidden = {name: value.clone() for name, value in self._hidden.items()}
        return AotiVersion(self.runners, self._call, filled, hidden, self._wanted)

    def unexpected_error(self, unexpected: list[str]) -> FixedWeightError | None:
        """The error for weights that the package has no place for; None where there is another reason."""
        return None if self._is_known else self._no_place(unexpected)

    def _no_place(self, names: list[str]) -> FixedWeightError:
        return FixedWeightError(
            "the package has no such tensors: they were inlined when it was compiled, or are no part of it",
            where=self.name,
            expected="names that the library has",
            found=", ".join(names[:8]),
            remedy="compile with modelstate.export(..., kind='aoti'), so that every weight can be swapped; or leave "
            "out by rules=[modelstate.rules.Ignore(name)] what is the same in every version",
            names=names,
        )


class _Call:
    """How the library is called."""

    def __init__(self, loader: Loader, manifest: Manifest | None, where: str) -> None:
        self._where = where
        try:
            self._in_spec, self.out_spec = map(structure_of, loader.call_spec)
            described = None if manifest is None else manifest.inputs
            self._inputs = None if described is None else Inputs.described_by(where, self._in_spec, described)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ManifestError(
                "what the file says of its inputs is damaged, or of classes that are not known here",
                where=where,
                found=f"{type(error).__name__}: {error}",
                remedy="import what registers the classes of the inputs; or export the program again",
            ) from error

    def inputs(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor]:
        if self._inputs is not None:
            return self._inputs.as_exported(self._inputs.flat(args, named))
        order = keyword_order(self._in_spec)
        if list(named) != order and named.keys() == set(order):
            named = {name: named[name] for name in order}
        leaves, spec = flatten((args, named))
        if spec != self._in_spec:
            raise ProgramInputError(
                "the arguments have another structure",
                where=self._where,
                expected=self._in_spec,
                found=spec,
                remedy="give what the program was exported for",
            )
        return [one for one in leaves if isinstance(one, torch.Tensor)]


class _Wanted:
    """Which tensor each constant of the library is."""

    def __init__(
        self,
        loader: Loader,
        values: Mapping[str, torch.Tensor],
        state: Mapping[str, torch.Tensor],
        hidden: Mapping[str, torch.Tensor],
    ) -> None:
        self.fixed = tuple(name for name in loader.names if name not in state and name not in hidden)
        """Those that are the same in every version."""
        self._values = {name: values[name] for name in self.fixed}
        self._layouts = {name: _layout(values[name]) for name in loader.names}

    def constants(
        self, state: Mapping[str, torch.Tensor], hidden: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """All of them in a version. Raises `WeightsError` where one is another kind of tensor than the library's."""
        given = {**self._values, **hidden, **state}
        found = {name: given[name].detach() for name in self._layouts}
        wrong = [name for name, one in found.items() if _layout(one) != self._layouts[name]]
        if wrong:
            raise WeightsError(
                "weights have another shape, dtype or stride than the library was compiled for",
                expected="; ".join(f"{name}: {_words(self._layouts[name])}" for name in wrong[:8]),
                found="; ".join(f"{name}: {_shown(found[name])}" for name in wrong[:8]),
                names=wrong,
            )
        return found


def _values(file: ProgramFile, loader: Loader) -> dict[str, torch.Tensor]:
    """What each constant of the library is in the package."""
    values = file.weights()
    if values is None:
        with tempfile.TemporaryDirectory() as folder:
            values = aoti_embedded_constants(file.library(folder))
    lacking = [name for name in loader.names if name not in values]
    computed = [name for name in lacking if name.startswith(_COMPUTED)]
    if computed:  # it would not compute them again after a swap in place
        raise LiveTargetError(
            "the package computes constants of its weights when it is first called, and keeps them",
            where=file.path,
            found=", ".join(computed[:8]),
            remedy="compile it without aot_inductor.use_runtime_constant_folding, or with "
            "modelstate.export(module, args, path, kind='aoti')",
        )
    if lacking:
        raise LiveTargetError(
            "the package has no weights, and a call of it would end the process",
            where=file.path,
            found=f"none for {', '.join(lacking[:8])}",
            remedy="write it with modelstate.export(module, args, path, kind='aoti'), or with its constants",
        )
    return values


def _of_manifest(
    manifest: Manifest, values: Mapping[str, torch.Tensor], where: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The state, tied as it was, and the buffers that no checkpoint has."""
    groups: dict[str, torch.Tensor] = {}
    for one in manifest.tensors:
        if one.name in values:
            value = values[one.name]
            if (tuple(value.shape), value.dtype, value.stride()) != (one.shape, one.torch_dtype, one.stride):
                raise ManifestError(
                    "what the file says of its weights is not what it has",
                    where=where,
                    expected=f"{one.name}: shape {one.shape}, {one.dtype}, stride {one.stride}",
                    found=_shown(value),
                    remedy="export the program again, or get another copy of the file",
                )
            groups.setdefault(one.alias, value)
    state: dict[str, torch.Tensor] = {}
    hidden: dict[str, torch.Tensor] = {}
    for one in manifest.tensors:
        if one.alias not in groups and one.role == "hidden":
            continue
        if one.alias in groups:
            value = groups[one.alias]
        else:  # the program does not use it, and no package has it
            value = torch.empty_strided(one.shape, one.stride, dtype=one.torch_dtype).zero_()
        if one.role == "parameter" and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        groups[one.alias] = value
        (hidden if one.role == "hidden" else state)[one.name] = value
    return state, hidden


def _of_others(
    values: Mapping[str, torch.Tensor], names: NameMap | nn.Module | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same of a package that does not say what its tensors are."""
    known = {name: value for name, value in values.items() if not name.startswith(_CONSTANTS)}
    if names is None:
        return known, {}
    groups = _groups(names)
    state: dict[str, torch.Tensor] = {}
    for group in groups:
        found = [values[name] for name in group if name in values]
        if found:
            state.update(dict.fromkeys(group, found[0]))
    return state, {name: value for name, value in known.items() if name not in state}


def _groups(names: NameMap | nn.Module) -> list[tuple[str, ...]]:
    """The runtime names of each tensor."""
    if isinstance(names, NameMap):
        tied = {name for tie in names.ties for name in tie}
        return [*names.ties, *((name,) for name in names.eager if name not in tied)]
    return names_by_tensor(runtime_state(names))


def _missing(state: Mapping[str, torch.Tensor], names: NameMap | nn.Module | None) -> tuple[str, ...]:
    """Tensors of the module that was exported which the package has under no name."""
    return () if names is None else tuple(name for group in _groups(names) for name in group if name not in state)


def _without(names: NameMap | nn.Module | None, state: Mapping[str, torch.Tensor]) -> NameMap | nn.Module | None:
    """A map without the names that the package does not have."""
    if not isinstance(names, NameMap):
        return names
    runtime = {name: to for name, to in names.runtime.items() if to in state}
    eager = {name: to for name, to in names.eager.items() if name in state}
    ties = tuple(tie for tie in names.ties if set(tie) <= state.keys())
    return NameMap(runtime, eager, names.extra, ties)


def _check_machine(file: ProgramFile) -> None:
    try:
        device = aoti_metadata(file.path, file.model).get("AOTI_DEVICE_KEY", "cpu")
    except RuntimeError as error:
        raise LiveTargetError(
            "the package cannot be loaded", where=file.path, found=str(error).split("\n")[0]
        ) from error
    if device != "cpu":
        raise LiveTargetError(
            "the package is for a device that is not served",
            where=file.path,
            expected="cpu",
            found=device,
            remedy="serve the exported program, or the compiled module",
        )


_Layout = tuple[torch.layout, tuple[int, ...], torch.dtype, tuple[int, ...], torch.device]


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.layout, tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()), tensor.device


def _words(layout: _Layout) -> str:
    kind, shape, dtype, stride, device = layout
    return f"shape {shape}, {dtype}, stride {stride}, {device}" + ("" if kind is torch.strided else f", {kind}")


def _shown(tensor: torch.Tensor) -> str:
    return _words(_layout(tensor))
