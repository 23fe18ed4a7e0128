"""`modelstate get`: writes one tensor of a checkpoint to a file that NumPy reads."""

from __future__ import annotations

import io
import json

import click

import modelstate as ms
from modelstate.cli import options
from modelstate.cli.common import echo, local_target, make_parents, reported, user_code


@click.command()
@options.source
@click.argument("name", help="The name of the tensor.")
@click.argument("path", help="The file to write: *.npy.")
@options.key
@options.overwrite
@options.opening
@options.as_json
@options.debug
def get(
    source: str,
    name: str,
    path: str,
    key: str | None,
    overwrite: bool,
    opening: options.Opening,
    as_json: bool,
    debug: bool,
) -> None:
    """Write one tensor to a .npy file, for NumPy.

    NumPy has no bfloat16 and no 8-bit floats: these are written as float32, which has all their values.
    """
    with reported(debug):
        if not path.endswith(".npy"):
            raise click.BadParameter(f"{path!r}: give a path that ends with .npy")
        import numpy as np
        import torch

        from modelstate.checkpoint.reduction import CONVERTIBLE
        from modelstate.io.atomic import atomic_file
        from modelstate.torch_compat.dtypes import short
        from modelstate.torch_compat.plain import is_plain

        with (
            user_code(),
            ms.open(source, key=key, **opening) as checkpoint,
        ):
            tensor = checkpoint.tensor(name, map=False).detach()
        if not is_plain(tensor) or tensor.dtype not in CONVERTIBLE:
            raise ms.errors.UnsupportedTensorError(
                "NumPy has no array for a tensor of this kind",
                where=f"{source}: {name}",
                expected="a plain tensor",
                found=short(tensor.dtype) if is_plain(tensor) else checkpoint[name].kind,
                remedy="read it in Python: modelstate.open(path).tensor(name)",
            )
        dtype = tensor.dtype
        if dtype.is_floating_point and dtype not in (torch.float16, torch.float32, torch.float64):
            tensor = tensor.float()
        elif dtype is torch.complex32:
            tensor = tensor.to(torch.complex64)
        array = np.ascontiguousarray(tensor.resolve_conj().resolve_neg().numpy()).reshape(tensor.shape)
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
        make_parents(path)
        with atomic_file(local_target(path), overwrite=overwrite) as output:
            output.append(header.getvalue())
            output.append(array.tobytes())
        if as_json:
            fields = {"path": path, "name": name, "shape": list(tensor.shape), "dtype": short(dtype)}
            echo(json.dumps({**fields, "written_dtype": short(tensor.dtype), "bytes": array.nbytes}, indent=1))
            return
        cast = f", written as {short(tensor.dtype)}" if tensor.dtype != dtype else ""
        echo(f"{path}: {list(tensor.shape)} {short(dtype)}{cast}")
