"""`modelstate.export`: a program file whose every weight can be swapped."""

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

_OPTIONS: dict[str, Any] = {
    # Small tensors, and what is computed of a tensor that is uniform, would be numbers in the code.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    "freezing": False,
    "aot_inductor.use_runtime_constant_folding": False,
    # Two libraries are loaded to serve: weights in them would be there twice, and for ever.
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
    """Writes a module as a program, each parameter and persistent buffer of which can be swapped while it serves.

    That is tried out before the file is put in its place: the program has to answer as the module does with the weights
    that it was made with, with random ones, and with each tensor changed alone. The module is called once or a few
    times for each of its tensors, with `args`. It stays as it is.

    Args:
        module: what is to serve, in eval mode (`module.eval()`).
        args: inputs that it is exported with, and tried with.
        path: of the file, which ends in `.pt2`. `modelstate.Live(path)` serves it. torch's own `torch.export.load` or
            `torch._inductor.aoti_load_package` read it, too; the latter gives a package whose weights have yet to be
            loaded.
        kwargs: inputs by keyword.
        kind: "exported" is a graph that torch runs; "aoti" is compiled by AOTInductor, for which a C++ compiler has to
            be there.
        dynamic_shapes: as for `torch.export.export`.
        strict: as for `torch.export.export`.
        options: for the compiler, beside those that keep weights out of the code.
        overwrite: whether a file that is there is replaced.
        training: whether the module may be in training mode; the program then works as in training, too.

    Returns what the file says of its tensors. Raises `ExportError` where the module cannot be exported or compiled,
    `ExportedAnswerError`, `NotSwappableError`, `LiveTargetError` where it is in training mode, where its tensors
    overlap, or where it keeps a view of a weight that is no part of its state, `OptionError`, and what
    `modelstate.save` raises for a path; then no file is written, and one that was there stays.
    """
    where = target_path(path)
    check_choice("kind", kind, ("exported", "aoti"))
    _check_arguments(module, args, where, kind, options)
    check_target(where, overwrite=overwrite)
    kwargs = dict(kwargs or {})
    check_captured_references(module, meta_clone(module))  # both raise for what no version could have as it is
    check_mode(module, training)
    names, reason = _names(module)
    program = _exported(module, args, kwargs, dynamic_shapes, strict)
    extra = names.extra if names is not None else ()
    files, inputs = (None, None) if kind == "exported" else _compiled(program, module, options or {})

    def manifest(proof: ExportVerification) -> Manifest:
        tensors = _tensors(module, proof)
        return Manifest(kind, tensors, names, reason, extra, proof.unseen, torch.__version__, inputs)

    with atomic_file(where, overwrite=overwrite) as output:
        first = manifest(ExportVerification(frozenset(), ()))
        _write(output, program, files, first)
        proof = verify_export(target_of_file(output.path, None, training), module, args, kwargs)
        made = manifest(proof)
        if made != first:
            _write(output, program, files, made)
    return made


def _check_arguments(module: object, args: object, where: str, kind: str, options: object) -> None:
    if not isinstance(module, nn.Module):
        raise OptionError("only modules can be exported", expected="an nn.Module", found=type(module).__name__)
    if not isinstance(args, tuple):
        raise OptionError("args= are the inputs of a call", expected="a tuple", found=type(args).__name__)
    if not where.endswith(".pt2"):
        raise SaveTargetError("a program is written to a file that is called so", where=where, expected="a name.pt2")
    if options and kind != "aoti":
        raise OptionError("options= are for the compiler", expected="kind='aoti'", found=f"kind={kind!r}")
    own = [name for name in _OPTIONS if name in (options or {})]  # type: ignore[operator]
    if own:
        raise OptionError("options= that decide whether weights can be swapped are not free", found=", ".join(own))


def _names(module: nn.Module) -> tuple[NameMap | None, str]:
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
    """The files of a package, and what it has to be called with."""
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
        raise _unwritten(where, guards_of(program))
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
        inputs.require(_relied_on(program, inputs.names), written)
    except ValueError as error:
        raise _unwritten(where, guards_of_compiling(program)) from error
    return files, inputs.described()


def _unwritten(where: str, guards: list[str]) -> ExportError:
    return ExportError(
        "what the inputs must fulfil cannot be written down, and AOTInductor does not check it",
        where=where,
        found="; ".join(guards[:8]),
        remedy="export with other dynamic_shapes=, or with kind='exported'",
    )


def _relied_on(program: Any, names: list[str]) -> list[str]:
    """Which sizes the compiler has made code for, and no others.

    It also compares sizes with limits, to choose among kinds of code that are right for all: these are left out.
    """
    found = []
    for guard in set(guards_of_compiling(program)) - set(guards_of(program)):
        (one,) = conditions([guard], program.call_spec.in_spec, argument_names(program), names)
        if is_equality(one):
            found.append(one)
    return sorted(found)


def _write(output: Output, program: Any, files: list[Any] | None, manifest: Manifest) -> None:
    """Writes the archive from its beginning."""
    extra = {NAME: manifest.to_json()}
    with open(os.dup(output.descriptor), "r+b") as file:
        file.seek(0)
        file.truncate()
        if files is None:
            torch.export.save(program, file, extra_files=extra)
        else:
            aoti_package(file, files, extra)
        file.flush()


def _tensors(module: nn.Module, proof: ExportVerification) -> tuple[ProgramTensor, ...]:
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
            mutable=name in proof.mutable,
            alias=first.setdefault(id(tensor), name),
        )
        for name, tensor in everything.items()
    )


def _first_lines(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    cause = error.found if isinstance(error, ModelStateError) else " ".join(lines[:3])
    return f"{type(error).__name__}: {cause}"[:600]
