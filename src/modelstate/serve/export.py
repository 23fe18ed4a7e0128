"""`modelstate.export`: writes a module as a program file, every weight of which can be swapped while it serves."""

from __future__ import annotations

import copy
import os
import warnings
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from modelstate.arguments import check_choice, checked_call
from modelstate.checkpoint.write import target_path
from modelstate.errors import (
    CanaryError,
    ExportError,
    ModelCodeError,
    ModelStateError,
    NameMapError,
    OptionError,
    UnsavableError,
    code_errors,
)
from modelstate.formats.torch_zip import archive_file
from modelstate.io.atomic import atomic_file, check_target
from modelstate.serve.aoti import inputs_of
from modelstate.serve.canary import compare, wide
from modelstate.serve.live import target_factory
from modelstate.serve.meta_clone import buffers_of, check_captured_references, meta_clone, runtime_state, state_module
from modelstate.serve.program_file import NAME, Kind, Manifest, ProgramTensor
from modelstate.serve.state_names import NameMap
from modelstate.serve.targets import Target, check_mode
from modelstate.text_format import listed
from modelstate.torch_compat.modules import unwrapped
from modelstate.torch_compat.private import aoti_compile, aoti_package, flatten, require_aoti, unflatten

_OPTIONS: dict[str, object] = {
    # The compiler would turn small tensors, and results of uniform tensors, into numbers in the code.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    "freezing": False,
    "aot_inductor.use_runtime_constant_folding": False,
    # Serving loads the library for each version: weights in it would take memory each time, and could not be freed.
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
    "aot_inductor.package": True,
}


@checked_call("ms.export")
def export(
    model: nn.Module,
    args: tuple[object, ...],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, object] | None = None,
    kind: Kind = "exported",
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | list[Any] | None = None,
    strict: bool = False,
    options: Mapping[str, object] | None = None,
    overwrite: bool = False,
    training: bool = False,
) -> Manifest:
    """Writes a model as a program whose parameters and persistent buffers can be swapped while it serves.

    The program is verified before the file is put in its place: it has to answer as the model does, with the original
    weights and with all weights changed, each in its own way. For that the model is called a few times with `args`. The
    model is not changed. After an error no file is written, and an existing file stays.

    Args:
        model: The model, in eval mode (`model.eval()`), or a wrapper of `torch.compile` or `DataParallel` around it.
        args: Inputs for the export and the verification.
        path: The path of the file, which ends in `.pt2`. `modelstate.Live(path)` serves it. `torch.export.load` or
            `torch._inductor.aoti_load_package` reads it, too; the latter returns a package without its weights.
        kwargs: Inputs by keyword.
        kind: "exported" is a graph that torch runs; "aoti" is compiled by AOTInductor, for the CPU, which needs a C++
            compiler.
        dynamic_shapes: As for `torch.export.export`.
        strict: As for `torch.export.export`.
        options: Options of the compiler, in addition to those that keep weights out of the code.
        overwrite: Whether an existing file is replaced.
        training: Accepts a model in training mode; the program then works as in training, too.

    Returns:
        The `Manifest` of the file: a description of its tensors.

    Raises:
        ExportError: The model cannot be exported or compiled; or, with "aoti", it is not on the CPU; or the program
            does not answer as the model does, or does not follow changes of some weights.
        LiveTargetError: The model is in training mode, its tensors overlap, or it keeps a view of a weight outside its
            state.
        OptionError: An argument is invalid.
        UnsavableError: The path cannot be written to; see `modelstate.save`.

    Examples:
        >>> manifest = modelstate.export(model.eval(), (x,), "model.pt2")
        >>> live = modelstate.Live("model.pt2")
    """
    import torch.export

    where = target_path(path)
    check_choice("kind", kind, ("exported", "aoti"))
    _check_arguments(model, args, where, kind, options)
    check_target(where, overwrite=overwrite)
    kwargs, model = dict(kwargs or {}), unwrapped(model)
    name = type(model).__name__
    check_captured_references(model, meta_clone(model))
    check_mode(model, training, name)
    if kind == "aoti":
        require_aoti(ExportError, where, "export with kind='exported'")
        _check_on_cpu(model, (args, kwargs))
    try:
        names, reason = NameMap.of(model), ""
    except (NameMapError, ModelCodeError) as error:
        names, reason = None, f"{error.what}: {error.found}"
    remedy = "see the cause above; the module itself can be served: modelstate.Live(module)"
    with _errors_of_torch("torch.export cannot export the module", name, remedy):
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict)
    trial = _Trial(model, (args, kwargs), kind)  # before the compiler, which takes longer
    files = inputs = None
    if kind == "aoti":
        remedy = "see the cause above; or export with kind='exported'"
        with _errors_of_torch("AOTInductor cannot compile the module", name, remedy):
            written = [*program.run_decompositions({}).graph_signature.user_inputs_to_mutate.values()]
            inputs_of(program, written)  # before the compiler, which takes longer
            files, inputs = aoti_compile(program, {**(options or {}), **_OPTIONS}), inputs_of(program, written)
    manifest = Manifest(kind, _tensors(model), names, reason, str(torch.__version__), inputs)
    with atomic_file(where, overwrite=overwrite) as output:
        with archive_file(output) as file, code_errors(ExportError, "torch cannot write the program", where=where):
            if files is None:
                torch.export.save(program, file, extra_files={NAME: manifest.to_json()})
            else:
                aoti_package(file, files, {NAME: manifest.to_json()})
        trial.verify(target_factory(output.path, None, training))
    return manifest


def _check_arguments(module: object, args: object, where: str, kind: str, options: Mapping[str, object] | None) -> None:
    if not isinstance(module, nn.Module):
        raise OptionError("only modules can be exported", expected="an nn.Module", found=type(module).__name__)
    if not isinstance(args, tuple):
        raise OptionError("args= must be the inputs of a call", expected="a tuple", found=type(args).__name__)
    if not where.endswith(".pt2"):
        raise UnsavableError("the path of a program must end in .pt2", where=where, expected="a name.pt2")
    if options and kind != "aoti":
        raise OptionError("options= is only for kind='aoti'", expected="kind='aoti'", found=f"kind={kind!r}")
    reserved = [name for name in _OPTIONS if name in (options or {})]
    if reserved:
        raise OptionError(
            "these options= are reserved: they decide whether weights can be swapped", found=", ".join(reserved)
        )


def _check_on_cpu(module: nn.Module, inputs: object) -> None:
    tensors = [*module.parameters(), *module.buffers(), *flatten(inputs)[0]]
    devices = sorted({str(tensor.device) for tensor in tensors if isinstance(tensor, torch.Tensor)} - {"cpu"})
    if devices:
        raise ExportError(
            "packages of AOTInductor are served only on the CPU",
            where=type(module).__name__,
            expected="a module and inputs on the CPU",
            found=", ".join(devices),
            remedy="export with kind='exported', or move the module and the inputs to the CPU",
        )


@contextmanager
def _errors_of_torch(what: str, where: str, remedy: str) -> Iterator[None]:
    """Turns the errors of a step of an export into an `ExportError`, and silences its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ExportError:
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        cause = error.found if isinstance(error, ModelStateError) else " ".join(lines[:3])
        if "Cxx" in type(error).__name__ or "C++ compiler" in str(error):
            remedy = "install a C++ compiler (g++)"
        raise ExportError(what, where=where, found=f"{type(error).__name__}: {cause}"[:600], remedy=remedy) from error


def _tensors(module: nn.Module) -> tuple[ProgramTensor, ...]:
    state: dict[str, torch.Tensor] = runtime_state(module)
    everything = state | dict(module.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    return tuple(
        ProgramTensor(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            stride=tensor.stride(),
            role="hidden" if name not in state else "parameter" if isinstance(tensor, nn.Parameter) else "buffer",
            alias=first.setdefault(id(tensor), name),
        )
        for name, tensor in everything.items()
    )


_Answer = dict[str, object]
"""The outputs of a call with their structure, and the buffers after it."""

_REMEDIES = {
    "exported": "take the values from the tensors in forward(), also while it is exported",
    "aoti": "leave out the options of the compiler that fold or freeze weights; or export with kind='exported'",
}


class _Trial:
    """Calls a module, and its program, with the same inputs and with any weights.

    Args:
        module: The module that is exported.
        inputs: Positional inputs of the calls, and those by keyword.
        kind: The kind of the program.

    Raises:
        ExportError: The module cannot be compared with a program, since its answers are random.
    """

    def __init__(self, module: nn.Module, inputs: tuple[tuple[object, ...], dict[str, object]], kind: str) -> None:
        self._module, self._inputs, self._state = module, inputs, runtime_state(module)
        self._where = type(module).__name__
        # An exported program draws the same random numbers; what is compiled draws others.
        first = self._of_module(self._state)
        if kind == "aoti" and _difference(self._of_module(self._state, seed=1), first):
            raise ExportError(
                "the answers of the module are random, so the compiled program cannot be verified",
                where=self._where,
                remedy="call module.eval() before it is exported, or export with kind='exported'",
            )

    def verify(self, target: Target) -> None:
        """Compares the answers: with the original weights, and with all of them changed, each in its own way.

        Where these differ, each tensor is changed alone, to name those that the program does not follow.

        Raises:
            ExportError: The answers of the program differ, or do not follow a change of some weights.
        """
        groups: defaultdict[int, list[str]] = defaultdict(list)
        for name, tensor in self._state.items():
            groups[id(tensor)].append(name)
        # None for the original weights; else how far values are moved away from zero, after scaling: a small change
        # need not show in an answer.
        for offset in (None, 0.0, 1.0):
            changes = [
                dict.fromkeys(names, _perturbed(self._state[names[0]], offset, seed))
                for seed, names in enumerate(groups.values())
                if offset is not None
            ]
            difference = self._difference_with(target, dict(ChainMap(*changes)))
            if not difference:
                continue
            which = "changed" if changes else "the original"
            what = f"the program does not answer as the module does, with {which} weights"
            expected = "the same answer, within the tolerance of its dtype"
            remedy = "export it with other options, or serve the module"
            each_alone = {next(iter(change)): self._difference_with(target, change) for change in changes}
            if wrong := {name: each for name, each in each_alone.items() if each}:
                what = "the program does not follow changes of its weights: they were compiled into it"
                expected, remedy = "the answer of the module with the changed tensor", _REMEDIES[target.kind]
                difference = listed((f"{name}: {each}" for name, each in wrong.items()), 8, "; ")
            raise ExportError(
                what, where=self._where, expected=expected, found=difference, remedy=remedy, names=list(wrong)
            )

    def _difference_with(self, target: Target, changed: dict[str, torch.Tensor]) -> str:
        """Describes how the answers differ with other weights. Empty where the module cannot be called with them."""
        state = self._state | changed
        try:
            expected = self._of_module(state)
        except Exception:
            return ""
        program = target.program(state_module(copy.deepcopy(state), meta=False))
        remedy = "export it with other options, or serve the module"
        with code_errors(ExportError, "the program raised where the module does not", where=self._where, remedy=remedy):
            answer = self._answer(program, program.module)
        return _difference(answer, expected)

    def _of_module(self, state: dict[str, torch.Tensor], seed: int = 0) -> _Answer:
        """Returns the answer of the module with these weights. Raises what the module raises."""
        copies = copy.deepcopy(state)
        module = meta_clone(self._module, {id(tensor): copies[name] for name, tensor in self._state.items()})
        return self._answer(module, module, seed)

    def _answer(self, call: Callable[..., object], module: nn.Module, seed: int = 0) -> _Answer:
        """Returns the outputs of a call, and the buffers after it."""
        leaves, spec = flatten(self._inputs)
        args, named = unflatten([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count()) if is_used else []):
            torch.manual_seed(seed)
            outputs, spec = flatten(call(*args, **named))
        values: dict[str, object] = {f"output {index}": value for index, value in enumerate(outputs)}
        buffers = {f"buffer {name}": value for name, value in buffers_of(module).items()}
        return {"structure": str(spec), **values, **buffers}


def _perturbed(tensor: torch.Tensor, offset: float, seed: int) -> torch.Tensor:
    """Returns a tensor with other values.

    Signs are preserved, since variances have to be positive. Integers are permuted, since they may be indices; where
    all are equal they are incremented, or decremented with an offset.
    """
    value, generator = tensor.detach(), torch.Generator().manual_seed(seed)

    def random() -> torch.Tensor:
        return torch.rand(value.shape, generator=generator, dtype=torch.float64, device="cpu").to(value.device)

    if value.dtype == torch.bool:
        changed = ~value
    elif value.is_floating_point() or value.is_complex():
        widened = wide(value)
        away = torch.where(widened == 0, 0.02 + 0.04 * random(), 0.0) + offset * (0.5 + random())
        changed = widened * (0.75 + 0.5 * random()) + torch.where(widened == 0, 1.0, widened.sgn()) * away
    else:
        changed = value.reshape(-1).roll(1).reshape(value.shape)
        if torch.equal(changed, value):
            changed = value + (-1 if offset else 1)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(changed)


def _difference(answer: _Answer, expected: _Answer) -> str:
    """Describes the first difference beyond the tolerance of the dtype; empty where there is none."""
    for name, value in expected.items():
        tolerance = 0.0
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            sizes = wide(value).abs()
            largest = float(sizes[sizes.isfinite()].max()) if bool(sizes.isfinite().any()) else 0.0
            tolerance = max(largest, 1e-6) * torch.finfo(value.dtype).eps ** 0.6  # 1e-4 for float32
        try:
            compare(answer.get(name, value), value, atol=tolerance)
        except CanaryError as error:
            return f"{name}: {error.what}: expected {error.expected}, found {error.found}"
    return ""
