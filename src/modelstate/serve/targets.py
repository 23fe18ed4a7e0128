"""What can be served: which kind of target it is."""

import os
from typing import Any

from torch import nn

from modelstate.errors import LiveTargetError, OptionError
from modelstate.io.files import local_path
from modelstate.serve.checks import check_graph_mode
from modelstate.serve.eager import ModuleTarget
from modelstate.serve.state_names import NameMap
from modelstate.serve.target import Target
from modelstate.torch_compat.private import exported_program_class


def target_factory(target: Any, names: NameMap | nn.Module | None, training: bool = False) -> Target:
    """What can be given to `Live`, as the kind that it is. Raises as `Live` does."""
    if isinstance(target, str | os.PathLike):
        return target_of_file(local_path(os.fspath(target)), names, training)
    program_class = exported_program_class()
    if program_class is not None and isinstance(target, program_class):
        from modelstate.serve.exported import ExportedTarget

        check_graph_mode(target, training, "ExportedProgram")
        return ExportedTarget(target, names)
    if isinstance(target, nn.Module):
        if names is not None:
            raise OptionError("names= is for exported programs", found="a module, which has its names with it")
        return ModuleTarget(target, training)
    raise LiveTargetError(
        "this cannot be served",
        expected="a module, a compiled module, an ExportedProgram, or the path of a .pt2",
        found=f"{type(target).__module__}.{type(target).__qualname__}",
        remedy="of a function, serve the module that it calls; of a package that was loaded, give the path",
    )


def target_of_file(path: str, names: NameMap | nn.Module | None, training: bool = False) -> Target:
    """What a `.pt2` is served as. Raises as `Live` does."""
    from modelstate.serve.program_file import read_program_file

    file = read_program_file(path)
    if file.kind == "aoti":
        from modelstate.serve.aoti import AotiTarget

        return AotiTarget(file, names)
    from modelstate.serve.exported import ExportedTarget

    if names is None and file.manifest is not None:
        names = file.manifest.names
    program = file.program()
    check_graph_mode(program, training, path)
    return ExportedTarget(program, names, path)
