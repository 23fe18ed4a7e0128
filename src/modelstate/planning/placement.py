"""`choose`: selects the cheapest placement of a value in its slot that keeps every reference."""

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
"""Dtypes between which a copy of torch cannot fail."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How a value gets into its slot, and why."""

    name: str
    """"copy", "data", "swap" or "call"."""
    why: str
    mapped: bool = False
    """The memory of the slot is a map of the file."""
    direct: bool = False
    """The bytes are read directly into the memory of the slot. An I/O error does not restore the old values."""
    by_handler: bool = False
    """The `module_load` handler of a tensor subclass decides."""

    @property
    def staged(self) -> bool:
        """Whether the value is read into temporary memory, and copied when all values are read."""
        return self.name == "copy" and not self.direct


CALL = Placement("call", "passed to set_extra_state")
"""The placement of extra state."""
_MAPPED = Placement("swap", "was on meta: becomes a map of the file", mapped=True)
_NEW_MEMORY = Placement("swap", "was on meta: gets memory")
_DIRECT = Placement("copy", "into the existing memory, directly", direct=True)
_STAGED = Placement("copy", "into the existing memory, after all reads")


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
    """Returns the placement of a value in a slot.

    Args:
        param: The tensor of the slot.
        value: The value as it is in the checkpoint.
        dtype: The dtype of the slot after the load.
        device: The device of the slot after the load.
        map: Whether the slot may be a map of the file.
        in_place: Whether the bytes may be read directly into the memory of the slot.
        transformed: Whether a transform may still change the value.
    """
    if not (is_plain(param) and is_plain(value)):
        is_mapped = map and param.is_meta and is_plain(value) and dtype == value.dtype
        return Placement(
            "swap", "a tensor subclass or layout decides in module_load", mapped=is_mapped, by_handler=True
        )
    if param.is_meta:
        is_mapped = map and dtype == value.dtype and device.type == "cpu" and value.stride() == param.stride()
        return _MAPPED if is_mapped else _NEW_MEMORY
    if dtype != param.dtype:
        return Placement("data", f"changes its dtype to {str(dtype).removeprefix('torch.')}")
    if device != param.device:
        return Placement("data", f"moves to {device}")
    if in_place and not transformed and _copy_cannot_fail(param, value):
        return _DIRECT
    return _STAGED


def after_transform(planned: Placement, param: torch.Tensor, result: torch.Tensor, value: torch.Tensor) -> Placement:
    """Returns the placement of the result of a transform, whose class and dtype the slot gets."""
    if not is_plain(result):
        return Placement("swap", "takes the class of the result of the transform")
    if not is_plain(param):
        return Placement("swap", "a tensor subclass decides in module_load", by_handler=True)
    if param.is_meta:
        is_mapped = planned.mapped and storage_id(result) == storage_id(value)
        return planned if is_mapped else Placement("swap", "was on meta: gets the result of the transform")
    if result.dtype != param.dtype:
        return Placement("data", f"changes its dtype to {str(result.dtype).removeprefix('torch.')}")
    return planned


def after_remaking(planned: Placement, param: torch.Tensor, result: torch.Tensor) -> Placement:
    """Returns the placement of the result of a module's transform, whose class and dtype the slot gets."""
    if not is_plain(result):
        return Placement("swap", f"{type(result).__name__} {planned.why}")
    return choose(param, result, result.dtype, result.device, map=False, in_place=False, transformed=True)


def copy_cannot_fail(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `target.copy_(value)` cannot fail, for equal shapes."""
    return is_plain(target) and is_plain(value) and _copy_cannot_fail(target, value)


def _copy_cannot_fail(target: torch.Tensor, value: torch.Tensor) -> bool:
    """`copy_cannot_fail` for plain tensors."""
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
