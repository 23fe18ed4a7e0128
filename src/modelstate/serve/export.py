"""`modelstate.export`: writes a module as a program file, every weight of which can be swapped while it serves."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from modelstate.checkpoint.write import target_path
from modelstate.errors import ExportError, ModelCodeError, ModelStateError, NameMapError, OptionError, SaveTargetError
from modelstate.io.atomic import Output, atomic_file, check_target
from modelstate.serve.captured_references import check_captured_references
from modelstate.serve.checks import check_mode
from modelstate.serve.exported import ExportedTarget
from modelstate.serve.inputs import conditions, is_equality
from modelstate.serve.meta_clone import meta_clone
from modelstate.serve.program_file import NAME, Kind, Manifest, ProgramTensor
from modelstate.serve.state_names import NameMap, runtime_state
from modelstate.serve.swap_pipeline import check_choice
from modelstate.serve.targets import target_of_file
from modelstate.serve.verify_export import ExportVerification, verify_export
from modelstate.torch_compat.private import (
    aoti_compile,
    aoti_package,
    argument_names,
    guards_of,
    guards_of_compiling,
    written_inputs,
)

_OPTIONS: dict[str, object] = {
    # The compiler would turn small tensors, and results of uniform tensors, into numbers in the code.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    "freezing": False,
    "aot_inductor.use_runtime_constant_folding": False,
    # Serving loads two libraries: weights in them would take memory twice, and could not be freed.
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
    "aot_inductor.package": True,
}


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    kind: Kind = "exported",
    dynamic_shapes: Any = None,
    strict: bool = False,
    options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    training: bool = False,
) -> Manifest:
    """Writes a module as a program whose parameters and persistent buffers can be swapped while it serves.

    The program is verified before the file is put in its place: it has to answer as the module does with the original
    weights, with random weights, and with each tensor changed alone. For that the module is called once or a few times
    for each of its tensors, with `args`. The module is not changed. After an error no file is written, and an existing
    file stays.

    Args:
        module: the module, in eval mode (`module.eval()`).
        args: inputs for the export and the verification.
        path: the path of the file, which ends in `.pt2`. `modelstate.Live(path)` serves it. `torch.export.load` or
            `torch._inductor.aoti_load_package` reads it, too; the latter returns a package without its weights.
        kwargs: inputs by keyword.
        kind: "exported" is a graph that torch runs; "aoti" is compiled by AOTInductor, which needs a C++ compiler.
        dynamic_shapes: as for `torch.export.export`.
        strict: as for `torch.export.export`.
        options: options of the compiler, in addition to those that keep weights out of the code.
        overwrite: whether an existing file is replaced.
        training: accepts a module in training mode; the program then works as in training, too.

    Returns:
        The `Manifest` of the file: a description of its tensors.

    Raises:
        ExportError: the module cannot be exported or compiled.
        ExportedAnswerError: the program does not answer as the module does.
        NotSwappableError: the program does not follow changes of some weights.
        LiveTargetError: the module is in training mode, its tensors overlap, or it keeps a view of a weight outside its
            state.
        OptionError: an argument is invalid.
        SaveTargetError: the path cannot be written to; see `modelstate.save`.

    Example:
        >>> manifest = modelstate.export(model.eval(), (x,), "model.pt2")
        >>> live = modelstate.Live("model.pt2")
    """
    where = target_path(path)
    check_choice("kind", kind, ("exported", "aoti"))
    _check_arguments(module, args, where, kind, options)
    check_target(where, overwrite=overwrite)
    kwargs = dict(kwargs or {})
    check_captured_references(module, meta_clone(module))
    check_mode(module, training)
    names, reason = _names(module)
    program = _exported(module, args, kwargs, dynamic_shapes, strict)
    extra = names.extra if names is not None else ()
    files, inputs = (None, None) if kind == "exported" else _compiled(program, module, options or {})

    def manifest_with(verification: ExportVerification) -> Manifest:
        tensors = _tensors(module, verification)
        return Manifest(kind, tensors, names, reason, extra, verification.unseen, torch.__version__, inputs)

    with atomic_file(where, overwrite=overwrite) as output:
        preliminary = manifest_with(ExportVerification(frozenset(), ()))
        _write(output, program, files, preliminary)
        manifest = manifest_with(verify_export(target_of_file(output.path, None, training), module, args, kwargs))
        if manifest != preliminary:
            _write(output, program, files, manifest)
    return manifest


def _check_arguments(module: object, args: object, where: str, kind: str, options: Mapping[str, Any] | None) -> None:
    if not isinstance(module, nn.Module):
        raise OptionError("only modules can be exported", expected="an nn.Module", found=type(module).__name__)
    if not isinstance(args, tuple):
        raise OptionError("args= must be the inputs of a call", expected="a tuple", found=type(args).__name__)
    if not where.endswith(".pt2"):
        raise SaveTargetError("the path of a program must end in .pt2", where=where, expected="a name.pt2")
    if options and kind != "aoti":
        raise OptionError("options= are for the compiler", expected="kind='aoti'", found=f"kind={kind!r}")
    reserved = [name for name in _OPTIONS if name in (options or {})]
    if reserved:
        raise OptionError(
            "these options= are reserved: they decide whether weights can be swapped", found=", ".join(reserved)
        )


def _names(module: nn.Module) -> tuple[NameMap | None, str]:
    """Returns the map of names, or None and the reason why there is none."""
    try:
        return NameMap.of(module), ""
    except (NameMapError, ModelCodeError) as error:
        return None, f"{error.what}: {error.found}"


def _exported(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], shapes: Any, strict: bool) -> Any:
    import torch.export

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, args, named, dynamic_shapes=shapes, strict=strict)
    except Exception as error:
        raise ExportError(
            "torch.export cannot export the module",
            where=type(module).__name__,
            found=_first_lines(error),
            remedy="see the cause above; the module itself can be served: modelstate.Live(module)",
        ) from error
    lacking = [name for name in runtime_state(module) if name not in program.state_dict]
    if lacking:
        raise ExportError(
            "tensors of the module are not among those of the program",
            where=type(module).__name__,
            found=", ".join(lacking[:8]),
            names=lacking,
        )
    return program


def _compiled(program: Any, module: nn.Module, options: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Compiles a program. Returns the files of the package, and the description of its inputs. Raises `ExportError`."""
    where = type(module).__name__
    inputs = ExportedTarget(program, None).inputs
    if inputs.numbers:
        raise ExportError(
            "AOTInductor does not take numbers that change from request to request",
            where=where,
            found=", ".join(inputs.numbers),
            remedy="give them as tensors, or export with kind='exported'",
        )
    if not inputs.is_complete:
        raise _unsupported_guards(where, guards_of(program))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            written = written_inputs(program)
            files = aoti_compile(program, {**options, **_OPTIONS})
    except Exception as error:
        missing = "Cxx" in type(error).__name__ or "C++ compiler" in str(error)
        raise ExportError(
            "AOTInductor cannot compile the module",
            where=where,
            found=_first_lines(error),
            remedy="install a C++ compiler (g++)" if missing else "see the cause above; or export with kind='exported'",
        ) from error
    try:
        inputs.require(_specialized_sizes(program, inputs.names), written)
    except ValueError as error:
        raise _unsupported_guards(where, guards_of_compiling(program)) from error
    return files, inputs.described()


def _unsupported_guards(where: str, guards: list[str]) -> ExportError:
    return ExportError(
        "what the inputs must fulfil cannot be written down, and AOTInductor does not check it",
        where=where,
        found="; ".join(guards[:8]),
        remedy="export with other dynamic_shapes=, or with kind='exported'",
    )


def _specialized_sizes(program: Any, names: list[str]) -> list[str]:
    """Returns the conditions by which the compiler has specialized the code to single sizes or multiples.

    Comparisons with limits are left out. The compiler makes them to choose among kernels that are all correct.
    """
    specialized = []
    for guard in set(guards_of_compiling(program)) - set(guards_of(program)):
        (condition,) = conditions([guard], program.call_spec.in_spec, argument_names(program), names)
        if is_equality(condition):
            specialized.append(condition)
    return sorted(specialized)


def _write(output: Output, program: Any, files: list[Any] | None, manifest: Manifest) -> None:
    """Writes the archive, which replaces the previous content of the file."""
    extra = {NAME: manifest.to_json()}
    with open(os.dup(output.descriptor), "r+b") as file:
        file.seek(0)
        file.truncate()
        if files is None:
            torch.export.save(program, file, extra_files=extra)
        else:
            aoti_package(file, files, extra)
        file.flush()


def _tensors(module: nn.Module, verification: ExportVerification) -> tuple[ProgramTensor, ...]:
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
            mutable=name in verification.mutable,
            alias=first.setdefault(id(tensor), name),
        )
        for name, tensor in everything.items()
    )


def _first_lines(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    cause = error.found if isinstance(error, ModelStateError) else " ".join(lines[:3])
    return f"{type(error).__name__}: {cause}"[:600]
