"""Serves packages of AOTInductor: each version uses a loaded copy of the compiled library."""

import tempfile
import threading
import weakref
from collections.abc import Mapping

import torch
from torch import nn

from modelstate.errors import (
    DamagedFileError,
    LiveTargetError,
    ProgramInputError,
    WeightsError,
)
from modelstate.io import linux
from modelstate.serve.inputs import Inputs
from modelstate.serve.meta_clone import meta_clone, runtime_state, state_module
from modelstate.serve.program_file import Manifest, ProgramFile
from modelstate.serve.state_names import NameMap, names_by_tensor
from modelstate.serve.targets import Program, Target, check_names, cloned
from modelstate.text_format import listed
from modelstate.torch_compat.private import (
    aoti_embedded_constants,
    aoti_loader,
    aoti_metadata,
    flatten,
    keyword_order,
    structure_of,
    unflatten,
    without_modes,
)

_CONSTANTS = ("_tensor_constant", "lifted_tensor_", "_frozen_param")
"""Prefixes by which AOTInductor names constants that are neither parameters nor buffers, or that it has changed."""
_INSTRUCTIONS = {
    "AVX2": ("avx2", "fma"),
    "AVX512": ("avx512f", "avx512dq", "avx512vl", "avx512bw", "fma"),
    "AVX512_VNNI": ("avx512_vnni",),
    "AMX_TILE": ("amx_tile",),
}
"""What a processor needs for the kinds of vector instructions that AOTInductor has compiled for, as Linux names it."""
_COMPUTED = "_FOLDED_CONST_"
"""The prefix of constants that the library computes from others: runtime constant folding."""


class AotiTarget(Target):
    """A `.pt2` package of AOTInductor.

    The manifest that `modelstate.export` writes describes every tensor. For a package from another writer only the
    names and values of the library's constants are known. The compiler may have inlined tensors there; these are
    noticed only where a checkpoint contains them, or where `names` does.
    """

    kind = "aoti"

    def __init__(self, file: ProgramFile, names: NameMap | nn.Module | None) -> None:
        manifest = file.manifest
        _check_machine(file)
        self._runners = _Runners(file)
        runner = self._runners.take()
        self._call = _Call(runner, manifest, file.path)
        values = _values(file, runner)
        file.check_unchanged()
        if manifest is not None:
            names = manifest.names if names is None else names
            state, self.hidden = _state_of_manifest(manifest, values, file.path)
        else:
            state, self.hidden = _state_without_manifest(values, names)
        self._layouts = {name: _layout(values[name]) for name in runner.names}
        self._fixed_values = {
            name: values[name] for name in runner.names if name not in state and name not in self.hidden
        }
        if manifest is not None:
            check_names(state, names, file.path)
        missing = [] if names is None else [name for group in _groups(names) for name in group if name not in state]
        self.fixed = (*self._fixed_values, *missing)
        self._built_in = runtime_state(names) if isinstance(names, nn.Module) and manifest is None else {}
        if manifest is None:  # a manifest lists all weights
            self.unexpected_error = self._fixed_error
        names = meta_clone(names) if isinstance(names, nn.Module) else _restricted(names, state)
        # On meta: a reference to the tensors would keep the memory of version 1 alive.
        super().__init__(file.path, state_module(state), names)
        self._runners.give_back(runner)
        self._first = self._new_version(state_module(state, meta=False))

    def program(self, filled: nn.Module) -> "AotiVersion":
        state = runtime_state(filled)
        changed = [name for name, value in self._built_in.items() if name in self.fixed and name in state]
        changed = [name for name in changed if not torch.equal(state[name], self._built_in[name])]
        if changed:
            raise self._fixed_error(changed)
        return self._new_version(state_module({name: state[name] for name in self.runtime_names}, meta=False))

    def _new_version(self, weights: nn.Module) -> "AotiVersion":
        """Returns a version with these weights. Raises `WeightsError` where a layout is not that of the library."""
        hidden = cloned(self.hidden)
        available = {**self._fixed_values, **hidden, **runtime_state(weights)}
        constants = {name: available[name].detach() for name in self._layouts}
        wrong = [name for name, constant in constants.items() if _layout(constant) != self._layouts[name]]
        if wrong:
            raise WeightsError(
                "weights have another shape, dtype or stride than the library was compiled for",
                expected=listed((f"{name}: {_layout_text(self._layouts[name])}" for name in wrong), 8, "; "),
                found=listed((f"{name}: {_layout_text(_layout(constants[name]))}" for name in wrong), 8, "; "),
                names=wrong,
            )
        return AotiVersion(self._call, self._runners, constants, weights, hidden)

    def _fixed_error(self, names: list[str]) -> WeightsError:
        return WeightsError(
            "the package has no such tensors: they were inlined when it was compiled, or are no part of it",
            where=self.name,
            expected="names that the library has",
            found=listed(names, 8),
            remedy="compile with modelstate.export(..., kind='aoti'), so that every weight can be swapped; or, for "
            "tensors that are the same in every version: rules=[modelstate.rules.Ignore(name)]",
            names=names,
        )


class AotiVersion(Program):
    """One version: its weights, and the runner that uses them until the version is gone."""

    __slots__ = ("_call", "_runner")
    answers_alias_weights = False  # the library allocates its outputs

    def __init__(
        self,
        call: "_Call",
        runners: "_Runners",
        constants: dict[str, torch.Tensor],
        weights: nn.Module,
        hidden: dict[str, torch.Tensor],
    ) -> None:
        super().__init__(weights, hidden)
        self._call, self._runner = call, runners.take()
        self._runner.use(constants)
        weakref.finalize(self, runners.give_back, self._runner).atexit = False

    def __call__(self, *args: object, **named: object) -> object:
        inputs = self._call.inputs(args, named)
        with torch.no_grad():
            return unflatten(self._runner.run(inputs), self._call.out_spec)


class Runner:
    """A loaded library. It uses tensors that are managed outside of it, and copies none.

    A library never releases a tensor that it was given. So it gets one empty tensor for each constant, once. For each
    version these tensors are set to the version's storages, and the library refreshes its pointers. A tensor with wrong
    sizes or strides would make the library read out of bounds, so `use` takes tensors that have been checked.
    """

    def __init__(self, path: str, model: str, where: str) -> None:
        try:
            self._library = aoti_loader(path, model)
            self.names: tuple[str, ...] = tuple(self._library.get_constant_fqns())
            self.call_spec: tuple[str, str] = tuple(self._library.get_call_spec())
        except RuntimeError as error:
            raise LiveTargetError(
                "the package cannot be loaded",
                where=where,
                found=str(error).splitlines()[0],
                remedy="compile it for this machine and this version of torch",
            ) from error
        self._shells: dict[str, torch.Tensor] | None = None
        # Python code of the model may release the GIL while it runs. Another request that enters the library then
        # waits there while it holds the GIL.
        self._lock = threading.Lock()

    def use(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Makes the library use these tensors for all of its names. No call may be running."""
        with torch.inference_mode(False), torch.no_grad():
            is_first = self._shells is None
            if self._shells is None:
                self._shells = {name: torch.empty(0, dtype=constants[name].dtype, device="cpu") for name in self.names}
            for name, shell in self._shells.items():
                value = constants[name]
                shell.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
            # Without a copy: the library uses the memory of the shells, and only looks up its addresses after a change.
            if is_first and self.names:
                self._library.load_constants(self._shells, False, True, True)
            elif not is_first:
                self._library.load_constants({}, False, False, True)

    def release(self) -> None:
        """Releases the tensors. `run` must not be called until `use` has set others.

        The garbage collector may call this in a thread that is tracing, where a mode would take the tensors for fakes.
        """
        with without_modes(), torch.inference_mode(False), torch.no_grad():
            for shell in (self._shells or {}).values():
                shell.set_()  # type: ignore[call-overload]

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Calls the library with inputs that have been checked."""
        with self._lock:
            outputs: list[torch.Tensor] = self._library.boxed_run(inputs)
            return outputs


class _Runners:
    """The runners of a package: one for each version that exists, and those of versions that are gone.

    A loaded library cannot be unloaded completely, so runners are used again. They are loaded from a private copy of
    the library, since the package may be replaced or overwritten later.
    """

    def __init__(self, file: ProgramFile) -> None:
        self._file, self._descriptor = file, file.copied_library()
        self._idle: list[Runner] = []

    def take(self) -> Runner:
        """Returns a runner that no version uses. Raises `LiveTargetError`."""
        try:
            return self._idle.pop()
        except IndexError:
            return Runner(f"/dev/fd/{self._descriptor}", self._file.model, self._file.path)

    def give_back(self, runner: Runner) -> None:
        """Releases the tensors of a runner. The garbage collector may call this at any moment, in any thread."""
        runner.release()
        self._idle.append(runner)


class _Call:
    """The call convention of the library: the structure of its inputs and outputs, and checks of the inputs."""

    def __init__(self, runner: Runner, manifest: Manifest | None, where: str) -> None:
        self._where = where
        try:
            self._in_spec, self.out_spec = map(structure_of, runner.call_spec)
            described = None if manifest is None else manifest.inputs
            self._inputs = None if described is None else Inputs.described_by(where, self._in_spec, described)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise DamagedFileError(
                "the description of the inputs in the file is damaged, or has classes that are not registered",
                where=where,
                found=f"{type(error).__name__}: {error}",
                remedy="import the modules that register the classes of the inputs, or export the program again",
            ) from error

    def inputs(self, args: tuple[object, ...], named: dict[str, object]) -> list[torch.Tensor]:
        """Returns the tensors of a call in the library's order. Raises `ProgramInputError`."""
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
                remedy="give inputs with the structure of the export",
            )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _values(file: ProgramFile, runner: Runner) -> dict[str, torch.Tensor]:
    """Returns the value of each constant of the library. Raises `LiveTargetError` where the package lacks some."""
    values = file.weights()
    if values is None:
        with tempfile.TemporaryDirectory() as folder:
            values = aoti_embedded_constants(file.library(folder))
    lacking = [name for name in runner.names if name not in values]
    computed = [name for name in lacking if name.startswith(_COMPUTED)]
    if computed:  # the library would not compute them again after a swap in place
        raise LiveTargetError(
            "the package computes constants of its weights when it is first called, and keeps them",
            where=file.path,
            found=listed(computed, 8),
            remedy="compile it without aot_inductor.use_runtime_constant_folding, or with "
            "modelstate.export(module, args, path, kind='aoti')",
        )
    if lacking:
        raise LiveTargetError(
            "the package has no weights, and a call of it would end the process",
            where=file.path,
            found=f"none for {listed(lacking, 8)}",
            remedy="write it with modelstate.export(module, args, path, kind='aoti'), or with its constants",
        )
    return values


def _state_of_manifest(
    manifest: Manifest, values: Mapping[str, torch.Tensor], where: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the state, with the ties of the module, and the hidden buffers. Raises `DamagedFileError`."""
    groups: dict[str, torch.Tensor] = {}
    for entry in manifest.tensors:
        if entry.name in values:
            value = values[entry.name]
            if (tuple(value.shape), value.dtype, value.stride()) != (entry.shape, entry.torch_dtype, entry.stride):
                raise DamagedFileError(
                    "the file's description of its weights differs from the weights",
                    where=where,
                    expected=f"{entry.name}: shape {entry.shape}, {entry.dtype}, stride {entry.stride}",
                    found=_layout_text(_layout(value)),
                    remedy="export the program again, or get another copy of the file",
                )
            groups.setdefault(entry.alias, value)
    state: dict[str, torch.Tensor] = {}
    hidden: dict[str, torch.Tensor] = {}
    for entry in manifest.tensors:
        if entry.alias in groups:
            value = groups[entry.alias]
        elif entry.role == "hidden":
            continue
        else:  # the program does not use the tensor, so the package does not contain it
            value = torch.empty_strided(entry.shape, entry.stride, dtype=entry.torch_dtype, device="cpu").zero_()
        if entry.role == "parameter" and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        groups[entry.alias] = value
        (hidden if entry.role == "hidden" else state)[entry.name] = value
    return state, hidden


def _state_without_manifest(
    values: Mapping[str, torch.Tensor], names: NameMap | nn.Module | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the state and the hidden buffers of a package without a manifest."""
    known = {name: value for name, value in values.items() if not name.startswith(_CONSTANTS)}
    if names is None:
        return known, {}
    state: dict[str, torch.Tensor] = {}
    for group in _groups(names):
        found = [values[name] for name in group if name in values]
        if found:
            state.update(dict.fromkeys(group, found[0]))
    return state, {name: value for name, value in known.items() if name not in state}


def _groups(names: NameMap | nn.Module) -> list[tuple[str, ...]]:
    """Returns the runtime names of each tensor."""
    if isinstance(names, NameMap):
        tied = {name for tie in names.ties for name in tie}
        return [*names.ties, *((name,) for name in names.eager if name not in tied)]
    return names_by_tensor(runtime_state(names))


def _restricted(names: NameMap | None, state: Mapping[str, torch.Tensor]) -> NameMap | None:
    """Returns a map without the names that the package does not have."""
    if names is None:
        return None
    runtime = {name: to for name, to in names.runtime.items() if to in state}
    eager = {name: to for name, to in names.eager.items() if name in state}
    ties = tuple(tie for tie in names.ties if set(tie) <= state.keys())
    return NameMap(runtime, eager, names.extra, ties)


def _check_machine(file: ProgramFile) -> None:
    """Raises `LiveTargetError` for a package for another device than the CPU, or for another CPU."""
    try:
        metadata = aoti_metadata(file.path, file.model)
    except RuntimeError as error:
        raise LiveTargetError(
            "the package cannot be loaded", where=file.path, found=str(error).split("\n")[0]
        ) from error
    device = metadata.get("AOTI_DEVICE_KEY", "cpu")
    if device != "cpu":
        raise LiveTargetError(
            "the package is for a device that is not served",
            where=file.path,
            expected="cpu",
            found=device,
            remedy="serve the exported program, or the compiled module",
        )
    needed = [flag for kind in metadata.get("AOTI_CPU_ISA", "").split() for flag in _INSTRUCTIONS.get(kind, ())]
    flags = linux.processor_flags()
    if flags and not flags.issuperset(needed):
        raise LiveTargetError(
            "the package has instructions that this processor lacks, and a call of it would end the process",
            where=file.path,
            expected=listed(flag for flag in dict.fromkeys(needed) if flag not in flags),
            found="a processor without them",
            remedy="compile the package on this machine, or serve the exported program",
        )


_Layout = tuple[torch.layout, tuple[int, ...], torch.dtype, tuple[int, ...], torch.device]


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.layout, tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()), tensor.device


def _layout_text(layout: _Layout) -> str:
    kind, shape, dtype, stride, device = layout
    return f"shape {shape}, {dtype}, stride {stride}, {device}" + ("" if kind is torch.strided else f", {kind}")
