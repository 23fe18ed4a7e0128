"""The scalars, arrays and dtypes of NumPy that a pickle describes. They are plain data, and need no `allow=`.

The functions have the arguments of those of NumPy, and call none of these: NumPy's own take objects, and trust the
sizes and flags of a state. An array is a read-only view of the bytes in the pickle. `rebuild` copies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from modelstate.errors import UnsupportedTensorError
from modelstate.formats.unpickle import DeferredCall, SafeGlobal, damaged

_KINDS = "biufcSUMm"
_RECONSTRUCT = "numpy._core.multiarray._reconstruct"


def _dtype(text: object, _align: object = False, _copy: object = True, state: object = None) -> np.dtype[np.generic]:
    """`numpy.dtype`, with the state that follows it: byte order, size of text, unit of time."""
    if type(text) is not str or len(text) > 100:
        raise damaged("a dtype of NumPy without a name")
    dtype = np.dtype(text)
    if state is None:
        return dtype
    if type(state) is not tuple or len(state) not in (8, 9) or state[1] not in ("<", ">", "|", "="):
        raise damaged("the state of a dtype of NumPy is not valid")
    _, order, *structure, nbytes, _, _ = state[:8]
    if dtype.kind in "SU" and type(nbytes) is int and 0 <= nbytes < 2**31:
        dtype = np.dtype((dtype.type, nbytes // (4 if dtype.kind == "U" else 1)))
    elif dtype.kind in "Mm":
        (unit, count, *_) = state[8][1] if len(state) == 9 else ("generic", 1)
        unit = unit.decode("ascii") if isinstance(unit, bytes) else unit
        if unit != "generic":
            dtype = np.dtype(f"{dtype.kind}8[{int(count)}{unit}]")
    elif dtype.kind not in "biufcO" or any(part is not None for part in structure):
        raise UnsupportedTensorError(
            f"a structured dtype of NumPy ({text}) is not supported",
            remedy="save an array of a plain dtype for each field",
        )
    return dtype.newbyteorder(order) if order in "<>" else dtype


def _scalar(dtype: object, data: object = b"") -> object:
    """`numpy._core.multiarray.scalar`."""
    kind, raw = _plain(dtype), _bytes(data)
    if len(raw) != kind.itemsize:
        raise damaged("a scalar of NumPy is not as large as its dtype", len(raw))
    return np.frombuffer(raw, kind)[0] if raw else kind.type()


def _array(cls: object, _shape: object, _code: object, state: object = None) -> object:
    """`numpy._core.multiarray._reconstruct`, with the state that follows it."""
    if cls is not np.ndarray or type(state) is not tuple or len(state) != 5:
        raise damaged("the state of an array of NumPy is not valid")
    _, shape, dtype, is_fortran, data = state
    return _view(data, dtype, shape, "F" if is_fortran else "C")


def _view(data: object, dtype: object, shape: object, order: object, _axes: object = None) -> object:
    """`numpy._core.numeric._frombuffer`, as which protocol 5 writes an array."""
    kind = _plain(dtype)
    if type(shape) is not tuple or len(shape) > 64 or not all(type(size) is int and size >= 0 for size in shape):
        raise damaged("the shape of an array of NumPy is not valid")
    if order not in ("C", "F") or _axes is not None:
        raise damaged("the order of an array of NumPy is neither C nor F")
    raw = _bytes(data)
    if not kind.itemsize or math.prod(shape) * kind.itemsize != len(raw):
        raise damaged("an array of NumPy has more or fewer bytes than its shape needs", f"{len(raw)} for {shape}")
    return np.ndarray(shape, kind, raw or None, order=order)


def _plain(dtype: object) -> np.dtype[np.generic]:
    if not isinstance(dtype, np.dtype):
        raise damaged("a dtype of NumPy that is not one", type(dtype).__name__)
    if dtype.kind == "O":
        raise UnsupportedTensorError(
            "an array of NumPy with objects in it is not supported",
            remedy=f'save its tolist(); or, if you trust the file: allow=["{_RECONSTRUCT}"]',
        )
    if dtype.kind not in _KINDS:
        raise damaged("a dtype of NumPy that is not plain", str(dtype)[:80])
    return dtype


def _bytes(data: object) -> bytes | bytearray:
    if isinstance(data, str):
        return data.encode("utf-8")  # a string of Python 2 that happened to be UTF-8
    if not isinstance(data, bytes | bytearray):
        raise damaged("the values of NumPy are not bytes", type(data).__name__)
    return data


def _deferred(name: str, make: Callable[..., object], takes_state: bool, *args: object) -> DeferredCall:
    return DeferredCall(name, make, args, takes_state=takes_state)


def _named(name: str, make: Callable[..., object], takes_state: bool = False) -> dict[str, SafeGlobal]:
    """The function under its names in NumPy 1 and 2."""
    names = {f"numpy.{name}", f"numpy.{name}".replace("_core.", "core.")}
    return {name: SafeGlobal(name, partial(_deferred, name, make, takes_state), copies=True) for name in names}


NUMPY: dict[str, SafeGlobal] = {
    **_named("dtype", _dtype, takes_state=True),
    **_named("_core.multiarray.scalar", _scalar),
    **_named("_core.multiarray._reconstruct", _array, takes_state=True),
    **_named("_core.numeric._frombuffer", _view),
    "numpy.ndarray": SafeGlobal("numpy.ndarray", real=np.ndarray),
}
"""By the names in a pickle."""
