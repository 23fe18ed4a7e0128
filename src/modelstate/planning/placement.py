"""How a value gets into its slot: the cheapest way that keeps every reference."""

from dataclasses import dataclass

import torch

from modelstate.torch_compat.plain import has_its_memory, is_dense, is_plain
from modelstate.torch_compat.private import storage_id

COPYABLE = frozenset(
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ]
)
"""Dtypes between which torch copies without fail."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A way, and why it was chosen."""

    name: str
    """"copy", "data", "swap" or "call"."""
    why: str
    mapped: bool = False
    """The slot will show the file itself."""
    direct: bool = False
    """The bytes are read into the memory of the slot, with nothing between; not undone by an I/O error."""
    by_handler: bool = False
    """A tensor subclass decides, through `module_load`."""

    @property
    def staged(self) -> bool:
        """The value waits in memory of its own until all values are there, and is then copied."""
        return self.name == "copy" and not self.direct


CALL = Placement("call", "set_extra_state takes it")
"""The placement of extra state."""
_MAPPED = Placement("swap", "had no memory: shows the file", mapped=True)
_NEW_MEMORY = Placement("swap", "had no memory: gets its own")
_DIRECT = Placement("copy", "into the memory that is there, at once", direct=True)
_STAGED = Placement("copy", "into the memory that is there, when all is read")


def choose(
    param: torch.Tensor,
    value: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    *,
    map: bool,
    in_place: bool,
    transformed: bool,
) -> Placement:
    """The placement of `value` in `param`, which will have `dtype` and be on `device` afterwards.

    `map` says that the slot may show the value's own memory, `transformed` that the value may still become anything.
    """
    if not (is_plain(param) and is_plain(value)):
        shows = map and param.is_meta and is_plain(value) and dtype == value.dtype
        return Placement("swap", "a tensor subclass or layout decides by module_load", mapped=shows, by_handler=True)
    if param.is_meta:
        shows = map and dtype == value.dtype and device.type == "cpu" and value.stride() == param.stride()
        return _MAPPED if shows else _NEW_MEMORY
    if dtype != param.dtype:
        return Placement("data", f"changes its dtype to {str(dtype).removeprefix('torch.')}")
    if device != param.device:
        return Placement("data", f"moves to {device}")
    if in_place and not transformed and _copy_cannot_fail(param, value):
        return _DIRECT
    return _STAGED


def after_transform(planned: Placement, param: torch.Tensor, result: torch.Tensor, value: torch.Tensor) -> Placement:
    """The placement of what a transform has made of `value`: what it returns is asked for."""
    if not is_plain(result):
        return Placement("swap", "takes the class of what the transform returned")
    if not is_plain(param):
        return Placement("swap", "a tensor subclass decides by module_load", by_handler=True)
    if param.is_meta:
        shows = planned.mapped and storage_id(result) == storage_id(value)
        return planned if shows else Placement("swap", "had no memory: gets what the transform returned")
    if result.dtype != param.dtype:
        return Placement("data", f"changes its dtype to {str(result.dtype).removeprefix('torch.')}")
    return planned


def after_remaking(planned: Placement, param: torch.Tensor, result: torch.Tensor) -> Placement:
    """The placement of what a module's transform has made, which `planned` says: its class is asked for."""
    if not is_plain(result):
        return Placement("swap", f"{type(result).__name__} {planned.why}")
    return choose(param, result, result.dtype, result.device, map=False, in_place=False, transformed=True)


def copy_cannot_fail(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `target.copy_(value)` is sure to succeed, the shapes being equal."""
    return is_plain(target) and is_plain(value) and _copy_cannot_fail(target, value)


def _copy_cannot_fail(target: torch.Tensor, value: torch.Tensor) -> bool:
    """The same of plain tensors."""
    return (
        target.dtype in COPYABLE
        and value.dtype in COPYABLE
        and not value.is_meta
        and not target.is_inference()
        and target.is_complex() >= value.is_complex()  # torch warns, and a warning may be made an error
        and (target.is_meta or target.is_contiguous() or is_dense(target))
        and (target.is_meta or has_its_memory(target))
        and (storage_id(target) != storage_id(value))
    )
