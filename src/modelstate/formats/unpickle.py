"""A pickle machine that creates plain values and descriptions, and runs no code of the pickle.

The machine is the one that Python has in Python, `pickle._Unpickler`, for the opcodes of the protocols 2 to 5. What
creates, changes or calls something is replaced. The machine looks up names with a `Find`, whose answers never run
anything that the pickle could choose. A class or function becomes a placeholder or a description of the call. Every
step costs time and memory in proportion to the bytes that it consumes, or counts against a budget.

`pickle.Unpickler`, in C, would not do, even with an inert `find_class`. It hashes a key of a dict before our code sees
the key: a nested tuple overflows the C stack and ends the process, and keys of equal hashes take quadratic time. It
allocates the memo by the largest index: five bytes of a pickle ask for 64 GiB.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import torch

from modelstate.errors import DamagedFileError, OpenError, TruncatedFileError, UnknownFormatError
from modelstate.process import gc_paused
from modelstate.spec import ByteRange, Refused, StoredTensor, contiguous_stride, set_version_metadata
from modelstate.text_format import excerpt
from modelstate.torch_compat.dtypes import QUANTIZED

# What a pickle becomes before any object of it is created.


_T = TypeVar("_T")

MAX_KEY_ITEMS = 64
MAX_KEY_INT = 2**60
MAX_SAME_HASH = 64
"""A dict compares a key with all others of the same hash. The hashes of -1 and -2 are equal, others hardly ever."""
MAX_ARGUMENTS = 16
"""More arguments than any known function takes."""


def damaged(what: str, found: object = "") -> DamagedFileError:
    """The error for a pickle that no writer has written like this."""
    return DamagedFileError(f"the pickle is damaged: {what}", found=found)


def typed(value: object, kind: type[_T], what: str) -> _T:
    """Returns the value if it is of exactly this class. Raises `DamagedFileError`."""
    if type(value) is not kind or not isinstance(value, kind):
        raise damaged(what, type(value).__name__)
    return value


def no_storage(key: tuple[object, ...]) -> object:
    """The `persistent` of a pickle that refers to no storage. Raises `DamagedFileError`."""
    raise damaged("it refers to a storage")


@contextmanager
def places_in(path: str, place: str = "") -> Iterator[None]:
    """Adds a file to the places of errors; `place` is the place within the file of errors without one."""
    try:
        yield
    except OpenError as error:
        if not error.where.startswith(path):
            error.where = f"{path}: {error.where or place}".removesuffix(": ")
        raise


def check_protocol(data: bytes) -> None:
    """Raises `UnknownFormatError` for a pickle of `torch.save` in protocol 0 or 1, which do not begin with `PROTO`."""
    if data and not data.startswith(pickle.PROTO):
        raise UnknownFormatError(
            "a pickle of protocol 0 or 1, which modelstate does not read",
            expected="a pickle of protocol 2 to 5, as torch.save writes by default",
            found=f"a pickle that begins with {excerpt(data[:16])}",
            remedy="if you trust it: torch.save(torch.load(path, weights_only=False), new_path), which runs what the "
            "file names; torch cannot load protocol 0 either: then save the state again where it was made",
        )


def invalid(error: OpenError) -> Refused:
    """Returns the placeholder for a tensor that is not supported, or whose description contradicts itself."""
    return Refused(error.what, error=error)


class SafeGlobal(msgspec.Struct, frozen=True, eq=False):
    """A function of modelstate that replaces the one that the pickle names."""

    name: str
    call: Callable[..., object] | None = None
    """None if the pickle may name it, but not call it."""
    real: object = None
    """The value of the name, if it is a value."""
    takes_inert: bool = False
    """Whether it may be called with placeholders among its arguments."""


class Allowed(msgspec.Struct, frozen=True, eq=False):
    """A class or function that torch's safe-globals list or the caller allows."""

    name: str
    real: Any


class DeferredCall(msgspec.Struct, eq=False):
    """The description of an allowed object, which is created after the whole pickle has been read and checked."""

    name: str
    make: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object] = msgspec.field(default_factory=dict)
    new: bool = False
    """Whether `make.__new__` is called instead of `make`."""
    takes_state: bool = False
    """Whether `make` takes the state as an argument."""
    states: list[object] = msgspec.field(default_factory=list)
    appended: list[object] = msgspec.field(default_factory=list)
    inserted: list[tuple[object, object]] = msgspec.field(default_factory=list)

    @property
    def pieces(self) -> tuple[object, ...]:
        """The values that the object is created from, in the order in which they are used."""
        return self.args, self.kwargs, self.states, self.appended, self.inserted


class DeferredTensor(msgspec.Struct, frozen=True, eq=False):
    """The description of a tensor that consists of others; becomes a `StoredComposite`."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: object
    """A tree that contains tensors."""
    make: Callable[[Any], torch.Tensor]
    """Creates the tensor from the same tree with real tensors."""
    requires_grad: bool = False
    is_parameter: bool = False


class Storage(msgspec.Struct):
    """A storage that a pickle refers to. (Not frozen: there are very many of them, and freezing triples their time.)"""

    dtype: torch.dtype
    region: ByteRange
    offset: int = 0
    """Elements from the beginning of the region, for a view of the storage."""
    numel: int = 0


Find = Callable[[str], object]
"""Looks up a name in a pickle: returns a `SafeGlobal`, an `Allowed`, a `Refused`, or a plain value such as a dtype."""

_PLAIN_KEYS = frozenset({str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.layout})
_KEYS = _PLAIN_KEYS | {Refused, Allowed, DeferredCall, SafeGlobal}


class Keys:
    """Checks the keys of dicts and the members of sets, before they are put there.

    A nested tuple can overflow the C stack, a long tuple is hashed again at each use, and many large integers (and
    complex numbers) have the same hash. Tuples of equal hashes are easy to find, too, so these are counted.
    """

    def __init__(self) -> None:
        self._tuples = dict[int, set[object]]()
        """The tuples of each hash."""

    def checked(self, keys: Iterable[object]) -> list[object]:
        """Returns the keys of a dict, or the members of a set. Raises as `check`."""
        items = list(keys)
        for key in items:
            if type(key) is not str:
                self.check(key)
        return items

    def check(self, key: object) -> None:
        """Raises `DamagedFileError` for a key that is mutable, or costly or dangerous to hash."""
        kind = type(key)
        if kind in _KEYS:
            if not isinstance(key, int) or abs(key) < MAX_KEY_INT:
                return
        elif isinstance(key, tuple) and len(key) <= MAX_KEY_ITEMS and _KEYS.issuperset(map(type, key)):
            same = self._tuples.setdefault(hash(key), set())
            same.add(key)
            if len(same) <= MAX_SAME_HASH:
                return
        raise DamagedFileError(
            "a key that is not a plain value",
            where="the pickle",
            expected=f"text, a number below 2**60, or a tuple of at most {MAX_KEY_ITEMS} of them, few of one hash",
            found=f"a key of type {kind.__name__}",
            remedy="if it was saved so: load it with torch.load, and save it with such keys; otherwise copy it again",
        )


# The machine.


MAX_INT_BYTES = 256

_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES}
_INDICES = {4 * count: struct.Struct(f"<{count}I").unpack for count in (5, 7)}
"""Reads the indices of the memo in the opcodes of a tensor, which are fewer without dimensions, by their bytes."""
_NUMBER = rb"(?:K.|M..|J....)"
_TUPLE = rb"(%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,8}t)" % ((_NUMBER,) * 4)
_TENSOR = re.compile(
    rb"\(\(h(.)h(.)X(.)\0\0\0([0-9]{1,20})r(....)h(.)(%b)(N?)tr(....)QK\0" % _NUMBER
    + rb"(?:%br(....)%br(....)|\)\))\x89h(.)\)Rr(....)tr(....)Rr(....)" % (_TUPLE, _TUPLE),
    re.DOTALL,
)
"""The opcodes of a tensor behind its function, where it begins with its storage and requires no gradient. `r` sets the
memo, and `h` refers to an index below 256."""


def unpickle(
    data: bytes, start: int, persistent: Callable[[tuple[object, ...]], object], find: Find
) -> tuple[object, int]:
    """Returns the value of the pickle that begins at `start`, and the position behind it.

    The value may contain `Refused`, `DeferredCall`, `Allowed` and `SafeGlobal` where the pickle names a class or a
    function, and containers may contain themselves: `modelstate.formats.construct` checks the value.

    Args:
        data: The bytes.
        start: Where the pickle begins.
        persistent: Converts the tuples by which torch identifies storages to descriptions of them.
        find: Looks up the names of classes and functions.

    Raises:
        DamagedFileError: The pickle is damaged.
        TruncatedFileError: The data ends before the pickle does.
    """
    machine = _Machine(data, start, persistent, find)
    try:
        with gc_paused():
            return machine.run(), machine.file.tell()
    except OpenError:
        raise
    except Exception as error:
        # Other exceptions that a damaged pickle causes (an empty stack, a missing key of the memo, text that is not
        # UTF-8) mean the same to the caller. What is cut off has no bytes for an argument, or a part of a text.
        pos = machine.file.tell()
        is_cut = isinstance(error, struct.error | UnicodeDecodeError) and pos == len(data)
        if is_cut or str(error) == "index out of range":
            raise machine.ends_early() from error
        raise DamagedFileError(
            "the pickle is damaged",
            where=f"byte {pos} of the pickle",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            remedy="get the file again; it was changed after it was written, or was never a checkpoint",
        ) from error


class _Machine(pickle._Unpickler):
    """Executes the opcodes of a pickle. `_ACTIONS` has the action of each."""

    stack: list[Any]
    pop_mark: Callable[[], list[object]]

    def __init__(self, data: bytes, start: int, persistent: Callable[[tuple[object, ...]], object], find: Find) -> None:
        self.data, self.file = data, io.BytesIO(data)
        self.file.seek(start)
        self.persistent, self.find = persistent, find
        # The attributes with which the actions of Python work.
        self.read, self.readline = self.file.read, self.file.readline
        self.stack, self.metastack = [], list[list[object]]()
        self.append = self.stack.append
        self.memo: dict[int, object] = {}
        self.proto = 0
        self.rebuild: object = self
        """The function of tensors, if the pickle has named it."""
        self.budget = 4 * (len(data) - start) + 1000
        """The number of items and bytes that may still be copied."""
        self.keys = Keys()

    def run(self) -> object:
        """Returns the value of the pickle."""
        read = self.read
        while (opcode := read(1)) != pickle.STOP:
            action = _ACTIONS.get(opcode)
            if action is None:
                what, found = "an opcode of none of the protocols 2 to 5", f"0x{opcode.hex()}"
                raise damaged(what, f"{found} at byte {self.file.tell() - 1}") if opcode else self.ends_early()
            action(self)
        return self.stack.pop()

    def ends_early(self) -> TruncatedFileError:
        """Returns the error for data that ends before the pickle does."""
        return TruncatedFileError(f"the pickle ends early, at byte {len(self.data)}")

    def binget(self) -> None:
        """Pushes a value of the memo. A tensor that begins with its function is created, if nearly all are like it."""
        value = self.memo[self.read(1)[0]]
        if value is self.rebuild and (usual := _TENSOR.match(self.data, self.file.tell())) is not None:
            tensor = self.usual_tensor(usual)
            if tensor is not None:
                self.file.seek(usual.end())
                value = tensor
        self.append(value)

    def usual_tensor(self, match: re.Match[bytes]) -> StoredTensor | None:
        """Executes all opcodes of `_TENSOR`, for a contiguous tensor that fills its storage. Returns None for another.

        Nearly every tensor that `torch.save` writes is such a one. One pattern for all its opcodes takes less time than
        to execute them one by one.
        """
        (word, kind, key_size, key, key_at, device, numel, view, id_at, shape, shape_at, stride, stride_at, hooks,
         hooks_at, args_at, at) = match.groups(b"")  # fmt: skip
        memo, known = self.memo, _layout(numel, shape, stride)
        places = b"".join((key_at, id_at, hooks_at, args_at, at, shape_at, stride_at))
        indices = _INDICES[len(places)](places)
        is_usual = getattr(memo.get(hooks[0]), "real", None) is OrderedDict and len(key) == key_size[0]
        if known is None or min(indices) < 256 or not is_usual:
            return None
        count, sizes, steps = known
        persistent_id = memo[word[0]], memo[kind[0]], key.decode(), memo[device[0]], count, *([None] if view else [])
        storage = self.persistent(persistent_id)
        if type(storage) is not Storage or storage.dtype in QUANTIZED:
            return None
        if storage.region.nbytes != count * storage.dtype.itemsize:
            return None
        tensor = StoredTensor.whole(_DTYPE_NAMES[storage.dtype], sizes, storage.region)
        no_hooks = OrderedDict[str, object]()
        args = storage, 0, sizes, steps, False, no_hooks
        values = persistent_id[2], persistent_id, no_hooks, args, tensor, sizes, steps
        memo.update(zip(indices, values, strict=False))  # a tensor without dimensions has no sizes
        return tensor

    def long(self, nbytes: int) -> None:
        if nbytes > MAX_INT_BYTES:
            raise damaged("an integer that is too large", f"{nbytes} bytes")
        self.append(pickle.decode_long(self.read(nbytes)))

    def _decode_string(self, value: bytes) -> str | bytes:
        """Python 2 wrote both text and bytes with one opcode; a string that is not UTF-8 is bytes."""
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value

    # Names, calls and objects.

    def persistent_load(self, pid: object) -> object:
        if type(pid) is not tuple:
            raise damaged("a persistent id that is not a tuple", type(pid).__name__)
        return self.persistent(pid)

    def find_class(self, module: str, name: str) -> object:
        if self.proto < 3:
            if (module, name) in NAME_MAPPING:
                module, name = NAME_MAPPING[(module, name)]
            else:
                module = IMPORT_MAPPING.get(module, module)
        self.spend((module, name))
        known = self.find(f"{module}.{name}")
        if name == "_rebuild_tensor_v2" and module == "torch._utils":
            self.rebuild = known
        return known

    def spend(self, copied: tuple[object, ...]) -> None:
        self.budget -= sum(len(value) for value in copied if hasattr(value, "__len__"))
        if self.budget < 0:
            raise damaged("it copies more than it holds")

    def reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], args)

    def call(self, function: object, args: object) -> object:
        if type(args) is not tuple:
            raise damaged("arguments that are not a tuple", type(args).__name__)
        if type(function) is SafeGlobal:
            if function.call is None or len(args) > MAX_ARGUMENTS:
                raise damaged("a call that is not possible", f"{function.name} of {len(args)} values")
            if Refused in map(type, args) and not function.takes_inert:
                inert = next(arg for arg in args if type(arg) is Refused)
                return Refused(inert.name, args, error=inert.error)
            self.spend(args)
            return function.call(*args)
        if type(function) is Refused:
            return Refused(function.name, *([function] if function.held else []), args)
        if type(function) is Allowed:
            return DeferredCall(function.name, function.real, args)
        raise damaged("a call of a value that is not a function", type(function).__name__)

    def new(self, kwargs: dict[str, object]) -> None:
        args, cls = self.stack.pop(), self.stack.pop()
        if type(cls) is Allowed:
            self.append(DeferredCall(cls.name, cls.real, args, kwargs, new=True))
        else:
            self.append(self.call(cls, (*args, kwargs) if kwargs else args))

    def insert(self, items: list[object]) -> None:
        target, kind = self.stack[-1], type(self.stack[-1])
        pairs = list(zip(self.keys.checked(items[::2]), items[1::2], strict=True))
        if kind is dict or kind is OrderedDict:
            target.update(pairs)
        elif kind is DeferredCall:
            target.inserted.extend(pairs)
        elif kind is Refused:
            target.held.extend(items)
        else:
            raise damaged("keys and values for a value that is not a dict", kind.__name__)

    def extend(self, items: list[object]) -> None:
        target, kind = self.stack[-1], type(self.stack[-1])
        if kind is list:
            target.extend(items)
        elif kind is set:
            target.update(self.keys.checked(items))
        elif kind is DeferredCall:
            target.appended.extend(items)
        elif kind is Refused:
            target.held.extend(items)
        else:
            raise damaged("items for a value that is not a list", kind.__name__)

    def frozen(self, items: list[object]) -> None:
        self.append(frozenset(self.keys.checked(items)))

    def build(self, state: object) -> None:
        target, kind = self.stack[-1], type(self.stack[-1])
        if kind is DeferredCall and target.takes_state:
            self.spend(state if type(state) is tuple else ())
            target.kwargs["state"] = state
        elif kind is DeferredCall:
            target.states.append(state)
        elif kind is Refused:
            target.held.append(state)
        elif kind is OrderedDict:
            # Only the attribute that torch uses: any other could replace a method of the dict.
            versions = state.get("_metadata") if isinstance(state, dict) else None
            if isinstance(versions, dict):
                set_version_metadata(target, versions)
        else:
            raise damaged("a state for a value without a state", kind.__name__)


def _integers(opcodes: bytes) -> tuple[int, ...]:
    """The integers that these opcodes push."""
    found = re.findall(_NUMBER, opcodes, re.DOTALL)
    return tuple(int.from_bytes(each[1:], "little", signed=each[0] == 0x4A) for each in found)


@lru_cache
def _layout(*opcodes: bytes) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Returns the number of elements, the shape and the stride; None unless they are those of a contiguous tensor."""
    numel, shape, stride = map(_integers, opcodes)
    is_usual = min(shape, default=1) > 0 and numel == (math.prod(shape),) and stride == contiguous_stride(shape)
    return (numel[0], shape, stride) if is_usual else None


_AS_IN_PYTHON = """
    PROTO NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 BINFLOAT BINSTRING SHORT_BINSTRING
    BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET MARK TUPLE TUPLE1 TUPLE2 TUPLE3 POP POP_MARK
    LONG_BINGET BINPUT LONG_BINPUT MEMOIZE BINPERSID GLOBAL STACK_GLOBAL
"""
"""The opcodes that push plain values or rearrange the stack, and those that call methods that are replaced here."""
_ACTIONS: dict[bytes, Callable[[Any], object]] = {
    **{code: pickle._Unpickler.dispatch[code[0]] for code in (getattr(pickle, name) for name in _AS_IN_PYTHON.split())},
    pickle.FRAME: lambda m: m.read(8),
    pickle.LONG1: lambda m: m.long(m.read(1)[0]),
    pickle.LONG4: lambda m: m.long(struct.unpack("<I", m.read(4))[0]),
    pickle.BINGET: _Machine.binget,
    pickle.BYTEARRAY8: lambda m: m.append(bytearray(m.read(struct.unpack("<Q", m.read(8))[0]))),
    pickle.FROZENSET: lambda m: m.frozen(m.pop_mark()),
    pickle.APPEND: lambda m: m.extend([m.stack.pop()]),
    pickle.APPENDS: lambda m: m.extend(m.pop_mark()),
    pickle.ADDITEMS: lambda m: m.extend(m.pop_mark()),
    pickle.SETITEM: lambda m: m.insert([m.stack.pop(-2), m.stack.pop()]),
    pickle.SETITEMS: lambda m: m.insert(m.pop_mark()),
    pickle.REDUCE: _Machine.reduce,
    pickle.NEWOBJ: lambda m: m.new({}),
    pickle.NEWOBJ_EX: lambda m: m.new(m.stack.pop()),
    pickle.BUILD: lambda m: m.build(m.stack.pop()),
}
