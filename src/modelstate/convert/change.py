"""A tensor of a module that becomes another one: how, why, and the write that does it."""

from typing import Any

import torch

from modelstate.errors import ModelStateError, SwapError
from modelstate.place.swap import become, give_grad, give_memory, point_to
from modelstate.plan.dtypes import device_name, short
from modelstate.plan.journal import Journal, Write
from modelstate.plan.memento import has_dispatch
from modelstate.plan.overlap import same_values
from modelstate.plan.placement import is_plain
from modelstate.plan.plan import Step, cast_text
from modelstate.plan.slots import Slot
from modelstate.plan.torch_private import can_set_data, payload_of
from modelstate.read.overflow import Overflows

Way = tuple[str, str]
"""A placement, and why it was chosen."""
DATA = "data", "other memory under the same object"
GRADIENT = "data", "its gradient alone"
SUBCLASS = "swap", "a tensor subclass: its payload has to change with it"
_LAYOUT = "swap", "a layout that has no data pointer to be changed"
_MEMORY = "swap", "has no memory, or will have none"
_CORE = "swap", "torch cannot change what it points to"


Row = tuple[tuple[str, ...], str, Way, Any, torch.dtype, torch.dtype, torch.device, int]
"""Names, kind, way, shape, old and new dtype, device, and bytes."""


def way_of(tensor: torch.Tensor, value: torch.Tensor) -> Way:
    """The cheapest placement of a new value that keeps every reference."""
    if has_dispatch(tensor) or has_dispatch(value):
        return SUBCLASS
    if tensor.layout is not torch.strided or value.layout is not torch.strided or tensor.is_nested or value.is_nested:
        return _LAYOUT
    if torch.nn.parameter.is_lazy(tensor):
        return DATA
    if type(value) is not type(tensor) and not is_plain(value):
        return SUBCLASS
    if tensor.is_meta is not value.is_meta:
        return _MEMORY
    if tensor.is_inference() or _stops_training(tensor, value) or not can_set_data(tensor, value):
        return _CORE
    return DATA


def _stops_training(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor that needs a gradient becomes one that cannot have any."""
    return tensor.requires_grad and not (value.is_floating_point() or value.is_complex())


class Change(Write):
    """A tensor that becomes another one: the write that does it."""

    __slots__ = ("grad", "held_grad", "overflows", "row", "slot", "waits", "way")

    def __init__(
        self,
        slot: Slot,
        value: torch.Tensor,
        way: Way,
        held_grad: torch.Tensor | None,
        grad: torch.Tensor | None = None,
        waits: bool = False,
        row: Row | None = None,
    ) -> None:
        self.target, self.value, self.done = slot.tensor, value, False
        self.slot, self.way = slot, way
        self.held_grad, self.grad = held_grad, grad
        """What the gradient becomes; None where there is none, or where it has no place any more."""
        self.waits = waits
        """Whether the value is a cast that is made when it is time; until then `value` has its dtype only."""
        self.overflows: Overflows | None = None
        """Counts what becomes infinite or NaN by a cast that waits."""
        self.row: Row = row or _row(slot, value, way)

    @property
    def name(self) -> str:
        return self.slot.names[0]

    @property
    def keeps_values(self) -> bool:
        """Whether the tensor has the same dtype, device and values afterwards, in other memory: another memory format.

        A graph that waits for backward goes on rightly then. It costs a comparison of all values.
        """
        tensor, value = self.target, self.value
        if self.waits or (tensor.dtype, tensor.device) != (value.dtype, value.device) or tensor.is_meta:
            return False
        return same_values(tensor.detach(), value)

    def run(self, journal: Journal | None) -> None:
        tensor, value, grad = self.target, self.value, self.grad
        if self.waits:
            value = tensor.to(self.value.dtype)
            if self.overflows is not None:
                self.overflows.check(self.name, tensor, value)
            if tensor.is_leaf and tensor.grad is not None:
                grad = tensor.grad.to(self.value.dtype)
        if self.way is GRADIENT:
            if self.held_grad is None or grad is None:
                return
            undo = give_grad(tensor, self.held_grad, grad)
        elif self.way is DATA:
            if journal is None and self.held_grad is None:
                tensor.data = value
                return
            undo = point_to(tensor, value, grad, held_grad=self.held_grad, undoable=journal is not None)
        elif is_plain(tensor) and is_plain(value):
            undo = give_memory(tensor, value)
        else:
            undo = become(tensor, value, grad)
        if journal is not None:
            journal.undo(undo)


def _row(slot: Slot, value: torch.Tensor, way: Way) -> Row:
    """What has to be known of a change before it is carried out, to describe it afterwards. It holds no tensor."""
    tensor = slot.tensor
    shape: Any = () if torch.nn.parameter.is_lazy(tensor) or tensor.is_nested else tensor.shape
    return slot.names, slot.kind, way, shape, tensor.dtype, value.dtype, value.device, nbytes_of(tensor)


def step_of(row: Row) -> Step:
    """The description of a change."""
    (name, *ties), kind, (placement, why), shape, old, new, device, nbytes = row
    return Step(
        name,
        kind,
        "",
        placement,
        why,
        tuple(shape),
        short(new),
        cast_text(old, new),
        device_name(device),
        nbytes,
        False,
        tuple(ties),
    )


def carry_out(change: Change, journal: Journal) -> None:
    try:
        change.run(journal)
    except ModelStateError:
        raise
    except (RuntimeError, TypeError) as error:
        raise SwapError(
            "torch cannot put the new tensor in the place of the old one; nothing has been changed",
            where=change.name,
            expected=f"something that a {type(change.target).__name__} can become",
            found=f"{type(change.value).__name__}, {short(change.value.dtype)}: {error}",
            remedy="replace the parameter by hand, and build the optimizer afterwards",
        ) from error
    change.done = True


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, or of its parts' where it is made of several."""
    if is_plain(tensor) and not tensor.is_nested:
        return 0 if tensor.is_meta else tensor.nbytes
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return 0
    return sum(part.numel() * part.itemsize for part in payload_of(tensor))
