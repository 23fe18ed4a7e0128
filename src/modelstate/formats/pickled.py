"""What a pickle becomes before anything of it is made: names, placeholders and recipes among plain values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from modelstate.errors import OpenError, PickleError
from modelstate.spec import ByteRange

MAX_KEY_ITEMS = 64
MAX_KEY_INT = 2**60
MAX_ARGUMENTS = 16
"""More than any function that is known here takes."""


class Refused:
    """An inert placeholder for what is not allowed, or for what would have been made of it."""

    __slots__ = ("held", "name")

    def __init__(self, name: str, *held: object) -> None:
        self.name = name
        """Module and qualified name."""
        self.held = list(held)
        """Arguments and state, unused; more refused names may be among them."""

    def __repr__(self) -> str:
        return f"<refused {self.name}>"

    @property
    def module_fields(self) -> dict[str, Any] | None:
        """The attributes of the object, where it is a `torch.nn.Module`; None for any other."""
        state = self.held[-1] if self.held else None
        if type(state) is tuple and len(state) == 2:  # of a class with slots
            state = state[0]
        if not isinstance(state, dict):
            return None
        is_module = all(isinstance(state.get(name), dict) for name in ("_parameters", "_buffers", "_modules"))
        return state if is_module else None


class InvalidTensor:
    """An inert placeholder for a tensor that is not read here, or contradicts itself."""

    __slots__ = ("error",)

    def __init__(self, error: OpenError) -> None:
        self.error = error
        """Raised when its place in the tree is known."""


class SafeGlobal:
    """A function of ours in place of the one that the pickle names."""

    __slots__ = ("call", "copies", "name", "real", "takes_inert")

    def __init__(
        self,
        name: str,
        call: Callable[..., object] | None = None,
        *,
        real: object = None,
        copies: bool = False,
        takes_inert: bool = False,
    ) -> None:
        self.name = name
        self.call = call
        """None where it may be named but not called."""
        self.real = real
        """What the name stands for where it is a value."""
        self.copies = copies
        """Whether a call costs time in proportion to its arguments."""
        self.takes_inert = takes_inert
        """Whether it is called with placeholders among its arguments."""


class Allowed:
    """A class or function that torch's safe-globals list or the caller allows."""

    __slots__ = ("name", "real")

    def __init__(self, name: str, real: Any) -> None:
        self.name = name
        self.real = real


class DeferredCall:
    """How an allowed object is to be made, once all of the pickle has been read and found good."""

    __slots__ = ("appended", "args", "inserted", "kwargs", "make", "name", "new", "states")

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        new: bool = False,
    ) -> None:
        self.name = name
        self.make = make
        self.args = args
        self.kwargs = kwargs or {}
        self.new = new
        """Whether `make.__new__` is called instead of `make`."""
        self.states: list[Any] = []
        self.appended: list[Any] = []
        self.inserted: list[tuple[Any, Any]] = []


@dataclass(frozen=True, slots=True, eq=False)
class DeferredTensor:
    """How a tensor is to be made of others: what becomes a `StoredComposite`."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Any
    """A tree with tensors in it."""
    make: Callable[[Any], torch.Tensor]
    """From the same tree, all of it made, to the tensor."""
    requires_grad: bool = False
    is_parameter: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage as a pickle refers to it."""

    dtype: torch.dtype
    region: ByteRange
    offset: int = 0
    """Elements from the beginning of the region, for a view of it."""
    numel: int = 0


class Globals(Protocol):
    """What names stand for."""

    def find(self, name: str) -> object:
        """A `SafeGlobal`, `Allowed`, `Refused`, or a plain value such as a dtype."""


_PLAIN_KEYS = frozenset({str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.layout})
_KEYS = _PLAIN_KEYS | {Refused, Allowed, DeferredCall, SafeGlobal}


def check_key(key: object) -> None:
    """Raises `PickleError` for a key that is mutable, or costly or dangerous to hash.

    A nested tuple can overflow C's stack, a long one is hashed again at each use, and there are many large integers
    (and complex numbers) that have one hash.
    """
    kind = type(key)
    if kind in _KEYS:
        good = not isinstance(key, int) or abs(key) < MAX_KEY_INT
    else:
        good = isinstance(key, tuple) and len(key) <= MAX_KEY_ITEMS and _KEYS.issuperset(map(type, key))
    if not good:
        raise PickleError("a key that is no plain value", where="the pickle", found=kind.__name__)
