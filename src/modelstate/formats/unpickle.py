"""A pickle machine that creates plain values and descriptions, and runs no code of the pickle.

The machine implements the opcodes of the protocols 2 to 5, and creates the types that opcodes create themselves. It
looks up names with a `Find`, whose answers never run anything that the pickle could choose. A class or function becomes
a placeholder or a description of the call. Every step costs time and memory in proportion to the bytes that it
consumes, or counts against a budget.

`pickle.Unpickler` cannot replace the machine, even with an inert `find_class`. It hashes a key of a dict before our
code sees the key: a nested tuple overflows the C stack and ends the process, and keys of equal hashes take quadratic
time. It allocates the memo by the largest index: five bytes of a pickle ask for 64 GiB.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    copies: bool = False
    """Whether a call takes time in proportion to its arguments."""
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
        self._tuples = set[object]()
        self._hashes = Counter[int]()
        """The number of different tuples of each hash."""

    def check(self, key: object) -> None:
        """Raises `DamagedFileError` for a key that is mutable, or costly or dangerous to hash."""
        kind = type(key)
        if kind in _KEYS:
            if not isinstance(key, int) or abs(key) < MAX_KEY_INT:
                return
        elif isinstance(key, tuple) and len(key) <= MAX_KEY_ITEMS and _KEYS.issuperset(map(type, key)):
            if key not in self._tuples:
                self._tuples.add(key)
                self._hashes[hash(key)] += 1
            if self._hashes[hash(key)] <= MAX_SAME_HASH:
                return
            raise DamagedFileError(
                "too many tuples of one hash are keys, or members of sets",
                where="the pickle",
                expected=f"at most {MAX_SAME_HASH}",
                remedy="do not trust this file: tuples of one hash hardly ever occur unless they are searched for",
            )
        raise DamagedFileError(
            "a key that is not a plain value",
            where="the pickle",
            expected=f"text, a number below 2**60, or a tuple of at most {MAX_KEY_ITEMS} of them",
            found=f"a key of type {kind.__name__}",
            remedy="if it was saved so: load it with torch.load, and save it with such keys; otherwise copy it again",
        )


# The machine.


MAX_INT_BYTES = 256

_u16 = struct.Struct("<H").unpack_from
_u32 = struct.Struct("<I").unpack_from
_i32 = struct.Struct("<i").unpack_from

_u32_of_8 = struct.Struct("<8I").unpack

_NUMBER = rb"(?:K.|M..|J....)"
_TUPLE = rb"(%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,8}t)" % ((_NUMBER,) * 4)
_TENSOR = re.compile(
    rb"r(....)h(.)\(\(h(.)h(.)X(.)\0\0\0([0-9]{1,10})r(....)h(.)(%b)tr(....)QK\0" % _NUMBER
    + rb"%br(....)%br(....)\x89h(.)\)Rr(....)tr(....)Rr(....)" % (_TUPLE, _TUPLE),
    re.DOTALL,
)
"""The opcodes of a tensor behind its name in a dict, where it begins with its storage and requires no gradient. `r`
sets the memo, and `h` refers to an index below 256."""


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
            return machine.run(), machine.pos
    except OpenError:
        raise
    except Exception as error:
        # Other exceptions that a damaged pickle causes (an empty stack, a missing key of the memo, text that is not
        # UTF-8) mean the same to the caller.
        if isinstance(error, struct.error) or str(error) == "index out of range":
            raise _ends_early(len(data)) from error
        raise DamagedFileError(
            "the pickle is damaged",
            where=f"byte {machine.pos} of the pickle",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            remedy="get the file again; it was changed after it was written, or was never a checkpoint",
        ) from error


def _ends_early(pos: int) -> TruncatedFileError:
    return TruncatedFileError(f"the pickle ends early, at byte {pos}")


class _Machine:
    def __init__(self, data: bytes, start: int, persistent: Callable[[tuple[object, ...]], object], find: Find) -> None:
        self.data = data
        self.pos = start
        self.persistent = persistent
        self.find = find
        self.stack: list[Any] = []
        self.marks: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.globals: dict[str, object] = {}
        self.protocol = 0
        self.budget = 4 * (len(data) - start) + 1000
        """The number of items and bytes that may still be copied."""
        self.keys = Keys()
        self.layouts: dict[tuple[bytes, ...], tuple[int, tuple[int, ...], tuple[int, ...]] | None] = {}
        """What `_layout` has returned."""

    def run(self) -> object:
        # Files with many tensors consist almost entirely of the opcodes in this loop; the table has the others.
        data, memo, stack, pos = self.data, self.memo, self.stack, self.pos
        marks, call, persistent = self.marks, self.call, self.persistent
        try:
            while True:
                op = data[pos]
                pos += 1
                if op == 0x72:  # LONG_BINPUT
                    memo[_u32(data, pos)[0]] = stack[-1]
                    pos += 4
                elif op == 0x68:  # BINGET
                    stack.append(memo[data[pos]])
                    pos += 1
                elif op == 0x4B:  # BININT1
                    stack.append(data[pos])
                    pos += 1
                elif op == 0x28:  # MARK
                    marks.append(stack)
                    stack = []
                elif op == 0x74:  # TUPLE
                    items = tuple(stack)
                    stack = marks.pop()
                    stack.append(items)
                elif op == 0x52:  # REDUCE
                    args = stack.pop()
                    stack[-1] = call(stack[-1], args)
                elif op == 0x58:  # BINUNICODE
                    end = pos + 4 + _u32(data, pos)[0]
                    if end > len(data):
                        raise _ends_early(len(data))
                    stack.append(str(data[pos + 4 : end], "utf-8", "surrogatepass"))
                    pos = end
                    usual = _TENSOR.match(data, pos)
                    if usual is not None and (tensor := self.usual_tensor(stack[-1], usual)) is not None:
                        stack.append(tensor)
                        pos = usual.end()
                elif op == 0x71:  # BINPUT
                    memo[data[pos]] = stack[-1]
                    pos += 1
                elif op == 0x86:  # TUPLE2
                    last = stack.pop()
                    stack[-1] = (stack[-1], last)
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                elif op == 0x4D:  # BININT2
                    stack.append(_u16(data, pos)[0])
                    pos += 2
                elif op == 0x51:  # BINPERSID
                    key = stack.pop()
                    if type(key) is not tuple:
                        raise damaged("a persistent id that is not a tuple", type(key).__name__)
                    stack.append(persistent(key))
                elif op == 0x29:  # EMPTY_TUPLE
                    stack.append(())
                elif op == 0x89:  # NEWFALSE
                    stack.append(False)
                elif op == 0x4A:  # BININT
                    stack.append(_i32(data, pos)[0])
                    pos += 4
                elif op == 0x2E:  # STOP
                    return stack.pop()
                else:
                    self.pos, self.stack = pos, stack
                    act = _ACTIONS.get(op)
                    if act is None:
                        raise damaged("an opcode of none of the protocols 2 to 5", f"0x{op:02x} at byte {pos - 1}")
                    act(self)
                    pos, stack = self.pos, self.stack
        finally:
            self.pos = pos

    def usual_tensor(self, name: str, match: re.Match[bytes]) -> StoredTensor | None:
        """Executes all opcodes of `_TENSOR`, for a contiguous tensor that fills its storage. Returns None for another.

        Nearly every tensor that `torch.save` writes is such a one. One pattern for all its opcodes takes less time than
        to execute them one by one.
        """
        (name_at, function, word, kind, key_size, key, key_at, device, numel, id_at, shape, shape_at, stride,
         stride_at, hooks, hooks_at, args_at, at) = match.groups()  # fmt: skip
        memo, layout = self.memo, (numel, shape, stride)
        if layout not in self.layouts:
            self.layouts[layout] = _layout(*map(_integers, layout))
        indices = _u32_of_8(b"".join((name_at, key_at, id_at, shape_at, stride_at, hooks_at, args_at, at)))
        rebuild, hooks_type, known = memo.get(function[0]), memo.get(hooks[0]), self.layouts[layout]
        if (
            known is None
            or min(indices) < 256
            or len(key) != key_size[0]
            or getattr(rebuild, "name", "") != "torch._utils._rebuild_tensor_v2"
            or getattr(hooks_type, "real", None) is not OrderedDict
        ):
            return None
        count, sizes, steps = known
        persistent_id = memo[word[0]], memo[kind[0]], key.decode(), memo[device[0]], count
        storage = self.persistent(persistent_id)
        if type(storage) is not Storage or storage.dtype in QUANTIZED:
            return None
        if storage.region.nbytes != count * storage.dtype.itemsize:
            return None
        tensor = StoredTensor.whole(str(storage.dtype).removeprefix("torch."), sizes, storage.region)
        no_hooks = OrderedDict[str, object]()
        args = storage, 0, sizes, steps, False, no_hooks
        values = name, persistent_id[2], persistent_id, sizes, steps, no_hooks, args, tensor
        memo.update(zip(indices, values, strict=True))
        return tensor

    # Reading the data.

    def take(self, nbytes: int) -> bytes:
        end = self.pos + nbytes
        if end > len(self.data):
            raise _ends_early(len(self.data))
        piece = self.data[self.pos : end]
        self.pos = end
        return piece

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            raise _ends_early(len(self.data))
        piece = self.data[self.pos : end]
        self.pos = end + 1
        return piece.decode("utf-8")

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop_last(self, count: int) -> list[object]:
        items = self.stack[-count:]
        if len(items) < count:
            raise IndexError("pop from empty list")
        del self.stack[-count:]
        return items

    def pop_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def text(self, nbytes: int) -> None:
        self.push(str(self.take(nbytes), "utf-8", "surrogatepass"))

    def old_string(self, piece: bytes) -> None:
        """Python 2 wrote both text and bytes with this opcode; a string that is not UTF-8 is bytes."""
        try:
            self.push(piece.decode("utf-8"))
        except UnicodeDecodeError:
            self.push(piece)

    def long(self, nbytes: int) -> None:
        if nbytes > MAX_INT_BYTES:
            raise damaged("an integer that is too large", f"{nbytes} bytes")
        self.push(int.from_bytes(self.take(nbytes), "little", signed=True))

    def int_line(self) -> None:
        """Python 2 wrote integers of more than 32 bits as text, also in protocol 2."""
        line = self.line()
        if len(line) > MAX_INT_BYTES:
            raise damaged("an integer that is too large", f"{len(line)} digits")
        self.push(int(line))

    # Names, calls and objects.

    def name(self, module: str, name: str) -> None:
        if self.protocol < 3:
            if (module, name) in NAME_MAPPING:
                module, name = NAME_MAPPING[(module, name)]
            else:
                module = IMPORT_MAPPING.get(module, module)
        whole = f"{module}.{name}"
        if whole not in self.globals:
            self.globals[whole] = self.find(whole)
        self.push(self.globals[whole])

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise damaged("a name that is not text", type(name).__name__)
        self.budget -= len(module) + len(name)
        self.check_budget()
        self.name(module, name)

    def spend(self, copied: tuple[object, ...]) -> None:
        self.budget -= sum(len(value) for value in copied if hasattr(value, "__len__"))
        self.check_budget()

    def check_budget(self) -> None:
        if self.budget < 0:
            raise damaged("it copies more than it holds")

    def call(self, function: object, args: object) -> object:
        if type(args) is not tuple:
            raise damaged("arguments that are not a tuple", type(args).__name__)
        if type(function) is SafeGlobal:
            if function.call is None or len(args) > MAX_ARGUMENTS:
                raise damaged("a call that is not possible", f"{function.name} of {len(args)} values")
            if Refused in map(type, args) and not function.takes_inert:
                inert = next(arg for arg in args if type(arg) is Refused)
                return Refused(inert.name, args, error=inert.error)
            if args and function.copies:
                self.spend(args)
            return function.call(*args)
        if type(function) is Refused:
            return Refused(function.name, *([function] if function.held else []), args)
        if type(function) is Allowed:
            return DeferredCall(function.name, function.real, args)
        raise damaged("a call of a value that is not a function", type(function).__name__)

    def new(self, parts: list[Any]) -> None:
        cls, args, kwargs = parts
        if type(cls) is not Allowed:
            self.push(self.call(cls, (*args, kwargs) if kwargs else args))
            return
        self.push(DeferredCall(cls.name, cls.real, args, kwargs, new=True))

    def insert(self, items: list[object]) -> None:
        target, kind = self.stack[-1], type(self.stack[-1])
        pairs = list(zip(items[::2], items[1::2], strict=True))
        for key in items[::2]:
            if type(key) is not str:
                self.keys.check(key)
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
            target.update(self.members(items))
        elif kind is DeferredCall:
            target.appended.extend(items)
        elif kind is Refused:
            target.held.extend(items)
        else:
            raise damaged("items for a value that is not a list", kind.__name__)

    def members(self, items: list[object]) -> list[object]:
        """Returns the members of a set. Raises as `Keys.check`."""
        for item in items:
            self.keys.check(item)
        return items

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

    def set_protocol(self) -> None:
        self.protocol = self.number(1)
        if self.protocol > pickle.HIGHEST_PROTOCOL:
            raise damaged("a protocol that does not exist", self.protocol)


def _integers(opcodes: bytes) -> tuple[int, ...]:
    """The integers that these opcodes push."""
    found = re.findall(_NUMBER, opcodes, re.DOTALL)
    return tuple(int.from_bytes(each[1:], "little", signed=each[0] == 0x4A) for each in found)


def _layout(
    numel: tuple[int, ...], shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Returns the number of elements, the shape and the stride; None unless they are those of a contiguous tensor."""
    is_usual = min(shape) > 0 and numel == (math.prod(shape),) and stride == contiguous_stride(shape)
    return (numel[0], shape, stride) if is_usual else None


_ACTIONS: dict[int, Callable[[_Machine], object]] = {
    pickle.PROTO[0]: _Machine.set_protocol,
    pickle.FRAME[0]: lambda m: m.take(8),
    pickle.NONE[0]: lambda m: m.push(None),
    pickle.NEWTRUE[0]: lambda m: m.push(True),
    pickle.INT[0]: _Machine.int_line,
    pickle.LONG1[0]: lambda m: m.long(m.number(1)),
    pickle.LONG4[0]: lambda m: m.long(m.number(4)),
    pickle.BINFLOAT[0]: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    pickle.SHORT_BINUNICODE[0]: lambda m: m.text(m.number(1)),
    pickle.BINUNICODE8[0]: lambda m: m.text(m.number(8)),
    pickle.SHORT_BINSTRING[0]: lambda m: m.old_string(m.take(m.number(1))),
    pickle.BINSTRING[0]: lambda m: m.old_string(m.take(m.number(4))),
    pickle.SHORT_BINBYTES[0]: lambda m: m.push(m.take(m.number(1))),
    pickle.BINBYTES[0]: lambda m: m.push(m.take(m.number(4))),
    pickle.BINBYTES8[0]: lambda m: m.push(m.take(m.number(8))),
    pickle.BYTEARRAY8[0]: lambda m: m.push(bytearray(m.take(m.number(8)))),
    pickle.EMPTY_LIST[0]: lambda m: m.push([]),
    pickle.EMPTY_DICT[0]: lambda m: m.push({}),
    pickle.EMPTY_SET[0]: lambda m: m.push(set()),
    pickle.FROZENSET[0]: lambda m: m.push(frozenset(m.members(m.pop_mark()))),
    pickle.TUPLE3[0]: lambda m: m.push(tuple(m.pop_last(3))),
    pickle.APPEND[0]: lambda m: m.extend([m.stack.pop()]),
    pickle.APPENDS[0]: lambda m: m.extend(m.pop_mark()),
    pickle.ADDITEMS[0]: lambda m: m.extend(m.pop_mark()),
    pickle.SETITEM[0]: lambda m: m.insert(m.pop_last(2)),
    pickle.SETITEMS[0]: lambda m: m.insert(m.pop_mark()),
    pickle.POP[0]: lambda m: m.stack.pop(),
    pickle.POP_MARK[0]: lambda m: m.pop_mark(),
    pickle.LONG_BINGET[0]: lambda m: m.push(m.memo[m.number(4)]),
    pickle.MEMOIZE[0]: lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    pickle.GLOBAL[0]: lambda m: m.name(m.line(), m.line()),
    pickle.STACK_GLOBAL[0]: _Machine.stack_global,
    pickle.NEWOBJ[0]: lambda m: m.new([*m.pop_last(2), {}]),
    pickle.NEWOBJ_EX[0]: lambda m: m.new(m.pop_last(3)),
    pickle.BUILD[0]: lambda m: m.build(m.stack.pop()),
}
