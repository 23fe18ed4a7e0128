"""The changes of a conversion: target of each tensor, what a function returned, and the write that does it."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from modelstate.errors import ModelStateError, PlacementError, SwapError, TransformError
from modelstate.planning.placement import COPYABLE
from modelstate.planning.plan import Step, cast_text
from modelstate.torch_compat.dtypes import Overflows, device_name, short
from modelstate.torch_compat.plain import has_its_memory, is_dense, is_plain
from modelstate.torch_compat.private import can_set_data, payload_of, slots_of_class, storage_owners
from modelstate.transaction.journal import Journal, Write
from modelstate.transaction.object_snapshot import has_dispatch
from modelstate.transaction.slots import Slot, same_values
from modelstate.transaction.swap_tensors import become, give_grad, give_memory, point_to

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


def of_its_own(value: torch.Tensor) -> torch.Tensor:
    """What a function returned, out of any graph, in memory that it has alone and that can be trained."""
    value = value if value.is_leaf else value.detach()
    if not is_plain(value) or value.is_nested or value.is_meta or (is_dense(value) and storage_owners(value) == 1):
        return value
    return value.clone(memory_format=torch.preserve_format if is_dense(value) else torch.contiguous_format)


def is_referred_to(value: object) -> bool:
    """Whether anything but the one variable of the caller refers to an object."""
    return sys.getrefcount(value) > _ONE_VARIABLE


def _count_one_variable() -> int:
    value = object()
    return _count(value)


def _count(value: object) -> int:
    return sys.getrefcount(value)


_ONE_VARIABLE = _count_one_variable()


def object_of_its_own(name: str, tensor: torch.Tensor, value: torch.Tensor, shared: bool) -> torch.Tensor:
    """The value as an object that can take the place of `tensor`, which it does not hold itself.

    Two objects are exchanged. So a value that others refer to (`shared`) would become the old tensor for them, and one
    that holds the tensor, as `Wrapper(tensor)` does, would hold itself. Both get an alias of the value.

    Raises `TransformError` where the alias holds the tensor, too.
    """
    if not shared and not _holds(value, tensor):
        return value
    try:
        alias = value.detach()
    except (NotImplementedError, RuntimeError, TypeError):  # a class that cannot be detached
        alias = value
    if alias is value or _holds(alias, tensor):
        if not _holds(value, tensor):
            return value
        raise TransformError(
            "the function returned a tensor that holds its input; nothing has been changed",
            where=name,
            expected="a tensor that is made of others",
            found=f"a {type(value).__name__} that refers to the tensor itself",
            remedy="make it of a copy: tensor.clone(), or of tensor.detach(), which shares the memory",
        )
    return alias


def _holds(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the attributes of a value lead to a tensor, through containers and plain objects."""
    waiting: list[object] = [value]
    seen: dict[int, object] = {}
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, _LEAVES):
            continue
        if found is tensor:
            return True
        seen[id(found)] = found
        if isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list | tuple | set | frozenset):
            waiting += found
        else:
            waiting += getattr(found, "__dict__", {}).values()
            waiting += [getattr(found, name, None) for name in slots_of_class(type(found))]
    return False


_LEAVES = (str, bytes, int, float, type(None), type, torch.dtype, torch.device, FunctionType, ModuleType, nn.Module)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the values of one."""
    if torch.nn.parameter.is_lazy(tensor):
        return []
    if tensor.layout is torch.sparse_coo:
        return [tensor.detach()._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return [tensor.detach().values()]
    return payload_of(tensor)


UNCHANGED: Any = type("Unchanged", (), {"__repr__": lambda _: "modelstate.conversion.UNCHANGED"})()
"""What a function returns that is given to `modelstate.convert`, for a tensor that is to stay as it is."""


class Target(Protocol):
    """What becomes of each tensor."""

    @property
    def words(self) -> str:
        """For a report: "bfloat16", "what quantize makes of it"."""

    @property
    def cause(self) -> str:
        """What makes infinite or NaN values, for a note; empty where they are not counted."""

    @property
    def by_user(self) -> bool:
        """Whether a function of the user's makes it, which may return anything; what torch does to tensors can be done
        to the common memory of several as well."""

    def make(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The new tensor, complete; the tensor itself where it stays as it is."""

    def grad(self, grad: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        """What becomes of the gradient of a tensor that becomes `new`; None where it has no place any more."""

    def later(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What becomes of plain CPU tensors of a dtype, as an empty tensor, where that is a cast (or nothing), which is
        certain to succeed as long as there is memory, and can be put off; else None."""


@dataclass(frozen=True, slots=True)
class To:
    """Another dtype for floats, another device, or both. `empty` says that values are not kept."""

    dtype: torch.dtype | None = None
    device: torch.device | None = None
    empty: bool = False

    @property
    def cause(self) -> str:
        return "" if self.empty else "a cast"

    @property
    def by_user(self) -> bool:
        return False

    @property
    def words(self) -> str:
        dtype = f" {short(self.dtype)}" if self.dtype else ""
        place = f" device {device_name(self.device)}" if self.device else ""
        return f"{dtype}{' on' if dtype and place else ''}{place}".strip()

    def _dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Integers and booleans stay what they are, and so do complex numbers unless a complex dtype is asked for."""
        if self.dtype is None or not (dtype.is_floating_point or (dtype.is_complex and self.dtype.is_complex)):
            return dtype
        return self.dtype

    def make(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype, device = self._dtype_of(tensor.dtype), self.device or tensor.device
        if self.empty:
            return torch.empty_like(tensor, dtype=dtype, device=device)
        if tensor.is_meta and device.type != "meta":
            raise PlacementError(
                "a tensor on meta has no values to be converted; nothing has been changed",
                where=name,
                expected="a tensor with memory",
                found=f"{short(tensor.dtype)} of shape {tuple(tensor.shape)} on meta",
                remedy="fill it with modelstate.load, or convert(..., empty=True) for memory without values",
            )
        if is_plain(tensor) and not tensor.is_meta and not has_its_memory(tensor):
            raise PlacementError(
                "the memory of a tensor has been freed; nothing has been changed",
                where=name,
                expected=f"{tensor.nbytes} bytes",
                found=f"a storage of {tensor.untyped_storage().nbytes()}",
                remedy="have what freed it (offloading, sharding) bring it back first, or convert before that",
            )
        try:
            return tensor.to(device, dtype)
        except (NotImplementedError, RuntimeError) as error:
            raise PlacementError(
                "torch cannot convert this tensor; nothing has been changed",
                where=name,
                expected=self.words,
                found=f"{short(tensor.dtype)} on {device_name(tensor.device)}: {error}",
                remedy="give fn= for it, or another dtype",
            ) from error

    def grad(self, grad: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        if self.empty and (grad.is_meta or new.is_meta):
            return None
        return grad.to(new.device, new.dtype if grad.is_floating_point() or grad.is_complex() else grad.dtype)

    def later(self, dtype: torch.dtype) -> torch.Tensor | None:
        if self.empty or (self.device is not None and self.device.type != "cpu"):
            return None
        new = self._dtype_of(dtype)
        return _stand_in(new) if new in COPYABLE and dtype in COPYABLE else None


@cache
def _stand_in(dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device="cpu")


@dataclass(frozen=True, slots=True)
class Made:
    """What a function of the user's makes of a tensor, and then perhaps another dtype or device."""

    function: Callable[..., Any]
    by_name: bool
    then: To | None

    @property
    def cause(self) -> str:
        casts = self.then is not None and self.then.dtype is not None
        return "fn= or the cast after it" if casts else "fn="

    @property
    def by_user(self) -> bool:
        return True

    @property
    def words(self) -> str:
        return f"what {getattr(self.function, '__name__', 'the function')} makes of it"

    def make(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        new = self._call(name, tensor)
        return new if self.then is None else self.then.make(name, new)

    def _call(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        version = None if torch.nn.parameter.is_lazy(tensor) or tensor.is_inference() else tensor._version
        try:
            new = self.function(name, tensor) if self.by_name else self.function(tensor)
        except ModelStateError:
            raise
        except Exception as error:
            raise TransformError(
                "the function raised; nothing has been changed",
                where=name,
                found=f"{type(error).__name__}: {error}",
                remedy="see the traceback of the cause",
            ) from error
        if version is not None and tensor._version != version:
            raise TransformError(
                "the function has changed its input in place, which nothing can undo",
                where=name,
                expected="a new tensor",
                found=f"{version} writes to it before, {tensor._version} after",
                remedy="let it work on a copy: tensor.clone()",
            )
        if new is UNCHANGED:
            return tensor
        if new is tensor:
            raise TransformError(
                "the function returned its own input; nothing has been changed",
                where=name,
                expected="a new tensor",
                remedy="return modelstate.conversion.UNCHANGED for a tensor that is to stay as it is",
            )
        if not isinstance(new, torch.Tensor):
            raise TransformError(
                "the function returned no tensor; nothing has been changed",
                where=name,
                expected="a torch.Tensor, or modelstate.conversion.UNCHANGED",
                found=repr(new)[:80],
                remedy="let it return a tensor for every name that it is called with",
            )
        return new

    def grad(self, grad: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        if not (new.is_floating_point() or new.is_complex()) or new.layout is not grad.layout:
            return None
        if new.is_nested or grad.is_nested or grad.shape != new.shape:
            return None
        return grad.to(new.device, new.dtype)

    def later(self, dtype: torch.dtype) -> torch.Tensor | None:
        return None


def takes_name(function: Callable[..., Any]) -> bool:
    """Whether a function is to be called with name and tensor: whether it has two parameters that have to be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one of torch's own, which take a tensor
        return False
    needed = [
        one
        for one in parameters
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) >= 2
