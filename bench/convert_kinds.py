"""`python -m bench.convert_kinds`: stock conversions and `modelstate.convert` side by side, on each kind of tensor.

Prints a table; `--write` puts it into docs/converting.md. Every verdict is found by looking at the module afterwards.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import modelstate as ms
from bench.in_page import InPage
from bench.kinds import KINDS, Case, NotHere, first_line, name_of

HEAD = ("kind", "`m.to()`", "`m.to()`, swapping", "`ms.convert`")
Part = tuple[str, torch.dtype, str, Any]


def stock(case: Case) -> None:
    if case.empty:
        case.module.to_empty(device=case.device)
    else:
        case.module.to(device=case.device, dtype=case.dtype)


def swapping(case: Case) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        stock(case)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def ours(case: Case) -> None:
    ms.convert(case.module, case.dtype, case.device, optimizers=case.optimizers, empty=case.empty)


WAYS: tuple[Callable[[Case], None], ...] = (stock, swapping, ours)


def named(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under every name that they have."""
    found = dict(module.named_parameters(remove_duplicate=False))
    return found | dict(module.named_buffers(remove_duplicate=False))


def plain_parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors of which a tensor is made."""
    inner: Mapping[str, torch.Tensor]
    if tensor.layout is torch.sparse_coo:
        inner = {"indices": tensor._indices(), "values": tensor._values()}
    elif tensor.layout is torch.sparse_csr:
        inner = {"crow": tensor.crow_indices(), "col": tensor.col_indices(), "values": tensor.values()}
    elif tensor.is_nested and tensor.layout is torch.strided:
        inner = {str(index): one for index, one in enumerate(tensor.unbind())}
    elif hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        inner = {name: one for name in names if isinstance(one := getattr(tensor, name), torch.Tensor)}
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        inner = {name: one for name, one in tensor.__dict__.items() if isinstance(one, torch.Tensor)}
    else:
        yield "", tensor
        return
    for name, one in inner.items():
        for below, part in plain_parts(one):
            yield f"{name}.{below}".strip("."), part


@torch.no_grad()
def looked_at(tensor: torch.Tensor | None, values: bool = True) -> list[Part]:
    """What a tensor is: dtype, device and a copy of the values of all that it is made of, itself first."""
    if tensor is None:
        return []
    found: list[Part] = [("", tensor.dtype, tensor.device.type, None)]
    if torch.nn.parameter.is_lazy(tensor):
        return found
    for name, part in plain_parts(tensor):
        copied = part.detach().clone() if values and not part.is_meta else None
        found.append((name, part.dtype, part.device.type, copied))
    return found


def difference(seen: list[Part], wanted: list[Part]) -> str:
    """How what is there differs from what should be, or nothing."""
    if len(seen) != len(wanted):
        lazy = len(wanted) == 1  # its values are not looked at
        return "is missing" if not seen else "is no longer lazy" if lazy else "is made of other parts"
    for (name, dtype, device, values), (_, right_dtype, right_device, right_values) in zip(seen, wanted, strict=True):
        label = f"has a payload ({name}) that is" if name else "is"
        if dtype != right_dtype:
            return f"{label} {name_of(dtype)}"
        if device != right_device:
            return f"{label} on {device}"
        if right_values is not None and (values is None or not torch.equal(values, right_values)):
            return "has other values"
    return ""


def wanted_of(tensor: torch.Tensor | None, case: Case) -> list[Part]:
    """What a tensor should be: what its own `to` makes of it, but integers stay, and complex numbers stay complex."""
    if tensor is None:
        return []
    casts = case.dtype is not None and (tensor.is_floating_point() or (tensor.is_complex() and case.dtype.is_complex))
    dtype = case.dtype if casts else tensor.dtype
    if torch.nn.parameter.is_lazy(tensor):
        return [("", dtype or tensor.dtype, tensor.device.type, None)]
    if tensor.is_meta:
        return looked_at(torch.empty_like(tensor, device=case.device), values=False)
    return looked_at(tensor.detach().to(dtype=dtype, device=case.device))


def verdict(build: Callable[[], Case], convert: Callable[[Case], None]) -> str:
    """Converts a new module of a kind, and says what has become of it."""
    torch.manual_seed(0)
    case = build()
    objects = named(case.module)
    grads = {name: one.grad if one.is_leaf else None for name, one in objects.items()}
    before = {name: (looked_at(one), looked_at(grads[name]), one.requires_grad) for name, one in objects.items()}
    wanted = {name: (wanted_of(one, case), wanted_of(grads[name], case)) for name, one in objects.items()}
    del grads
    try:
        convert(case)
    except Exception as error:
        return "half converted" if changed(case, objects, before) else f"refused: {first_line(error)}"
    now = named(case.module)
    if any(now.get(name) is not one for name, one in objects.items()):
        return "identity lost"
    for name, one in now.items():
        text = difference(looked_at(one), wanted[name][0])
        if text:
            return f"wrong: {name.rpartition('.')[2]} {text}"
        text = difference(looked_at(one.grad if one.is_leaf else None), wanted[name][1])
        if text:
            return f"wrong: the gradient of {name} {text}"
        if one.requires_grad != before[name][2]:
            return f"wrong: requires_grad is {one.requires_grad}"
    try:
        text = case.check()
    except Exception as error:
        text = f"it raises afterwards: {first_line(error)}"
    return f"wrong: {text}" if text else "right"


def changed(case: Case, objects: Mapping[str, torch.Tensor], before: Mapping[str, Any]) -> bool:
    """Whether anything is not what it was."""
    now = named(case.module)
    return now.keys() != objects.keys() or any(
        one is not objects[name]
        or difference(looked_at(one), before[name][0]) != ""
        or difference(looked_at(one.grad if one.is_leaf else None), before[name][1]) != ""
        for name, one in now.items()
    )


def row(kind: str) -> tuple[str, ...]:
    try:
        return kind, *(verdict(KINDS[kind], way) for way in WAYS)
    except NotHere as missing:
        return kind, *[f"not run: needs {missing}"] * 3


def rows() -> list[tuple[str, ...]]:
    """All of it: the kind, and a verdict for each way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [row(kind) for kind in KINDS]


TABLE = InPage(
    Path(__file__).resolve().parent.parent / "docs" / "converting.md",
    "<!-- The table: python -m bench.convert_kinds --write -->",
    "<!-- End of the table -->",
    HEAD,
    rows,
)

if __name__ == "__main__":
    TABLE.main(__doc__)
