"""What a pickle becomes before any object of it is created: names, placeholders and deferred calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from modelstate.errors import OpenError, PickleError
from modelstate.spec import ByteRange

MAX_KEY_ITEMS = 64
MAX_KEY_INT = 2**60
MAX_ARGUMENTS = 16
"""More arguments than any known function takes."""


class Refused:
    """An inert placeholder for a class or function that is not allowed, or for an object of it."""

    __slots__ = ("held", "name")

    def __init__(self, name: str, *held: object) -> None:
        self.name = name
        """Module and qualified name."""
        self.held = list(held)
        """The arguments and the state, which are not used; more refused names may be among them."""

    def __repr__(self) -> str:
        return f"<refused {self.name}>"

    @property
    def module_fields(self) -> dict[str, Any] | None:
        """The attributes of the object if it is a `torch.nn.Module`; None for any other."""
        state = self.held[-1] if self.held else None
        if type(state) is tuple and len(state) == 2:  # the state of a class with slots
            state = state[0]
        if not isinstance(state, dict):
            return None
        is_module = all(isinstance(state.get(name), dict) for name in ("_parameters", "_buffers", "_modules"))
        return state if is_module else None


class InvalidTensor:
    """An inert placeholder for a tensor that is not supported, or whose description contradicts itself."""

    __slots__ = ("error",)

    def __init__(self, error: OpenError) -> None:
        self.error = error
        """Raised when the place in the tree is known."""


class SafeGlobal:
    """A function of modelstate that replaces the one that the pickle names."""

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
        """None if the pickle may name it, but not call it."""
        self.real = real
        """The value of the name, if it is a value."""
        self.copies = copies
        """Whether a call takes time in proportion to its arguments."""
        self.takes_inert = takes_inert
        """Whether it may be called with placeholders among its arguments."""


class Allowed:
    """A class or function that torch's safe-globals list or the caller allows."""

    __slots__ = ("name", "real")

    def __init__(self, name: str, real: Any) -> None:
        self.name = name
        self.real = real


class DeferredCall:
    """The description of an allowed object, which is created after the whole pickle has been read and checked."""

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
    """The description of a tensor that consists of others; becomes a `StoredComposite`."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Any
    """A tree that contains tensors."""
    make: Callable[[Any], torch.Tensor]
    """Creates the tensor from the same tree with real tensors."""
    requires_grad: bool = False
    is_parameter: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that a pickle refers to."""

    dtype: torch.dtype
    region: ByteRange
    offset: int = 0
    """Elements from the beginning of the region, for a view of the storage."""
    numel: int = 0


class Globals(Protocol):
    """Looks up the names in a pickle."""

    def find(self, name: str) -> object:
        """Returns a `SafeGlobal`, an `Allowed`, a `Refused`, or a plain value such as a dtype."""


_PLAIN_KEYS = frozenset({str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.layout})
_KEYS = _PLAIN_KEYS | {Refused, Allowed, DeferredCall, SafeGlobal}


def check_key(key: object) -> None:
    """Raises `PickleError` for a key that is mutable, or costly or dangerous to hash.

    A nested tuple can overflow the C stack, a long tuple is hashed again at each use, and many large integers (and
    complex numbers) have the same hash.
    """
    kind = type(key)
    if kind in _KEYS:
        is_plain = not isinstance(key, int) or abs(key) < MAX_KEY_INT
    else:
        is_plain = isinstance(key, tuple) and len(key) <= MAX_KEY_ITEMS and _KEYS.issuperset(map(type, key))
    if not is_plain:
        raise PickleError("a key that is no plain value", where="the pickle", found=kind.__name__)
