"""`Canary`, and other checks that try a new version before it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec
import torch
from msgspec.structs import replace

from modelstate.arguments import invalid_option, is_number
from modelstate.errors import CanaryError, OptionError
from modelstate.serve.swap import carry_over
from modelstate.serve.targets import Program
from modelstate.text_format import short_repr
from modelstate.torch_compat.modules import non_persistent_buffers, own_buffers
from modelstate.torch_compat.private import default_modes, flatten, unflatten
from modelstate.transaction.object_snapshot import ObjectSnapshot
from modelstate.transaction.transaction import Transaction

_T = TypeVar("_T")
Calls = Callable[..., Any]
"""What answers requests."""


class Canary(msgspec.Struct, frozen=True):
    """A request that a new version has to answer correctly before it serves.

    The new version must not raise. Its answer must have the structure, shapes and dtypes of a reference, and no NaN
    where the reference has none. The reference is `expected`, or the answer of the version that serves to the same
    inputs. Values other than tensors must be of the reference's type. With a tolerance, numbers and tensors must be
    close to the reference, and text must be equal; other objects are compared by class only.

    Args:
        args: Positional inputs of the request.
        kwargs: Inputs by keyword.
        check: Called with the new answer. It refuses the answer by returning False or raising. False includes numpy's,
            and a tensor or an array of dtype bool that is not all true; None, 0 and every other value accept.
        expected: The reference; None asks the version that serves, which must be stateless for that. Where nothing
            serves yet, the answer may be any without NaN.
        atol: The largest absolute difference of an element, in addition to `rtol`. Without both tolerances, any
            difference is allowed.
        rtol: The largest difference of an element, relative to the reference.

    Raises:
        OptionError: an argument is invalid.

    Examples:
        >>> live.swap("step-2000.safetensors", canary=modelstate.Canary((x,), atol=0.1))
    """

    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = msgspec.field(default_factory=dict)
    check: Callable[..., object] | None = None
    expected: object = None
    atol: float | None = None
    rtol: float | None = None

    def __post_init__(self) -> None:
        for name in ("atol", "rtol"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value >= 0):
                raise invalid_option(name, "must be a tolerance", value, expected="a number from 0, or None")
        if not isinstance(self.args, tuple | list) or not isinstance(self.kwargs, Mapping):
            raise OptionError(
                "args= and kwargs= must be the inputs of a call",
                expected="a tuple, and a dict of names",
                found=f"{type(self.args).__name__}, {type(self.kwargs).__name__}",
            )
        if self.check is not None and not callable(self.check):
            raise OptionError("check= must be callable", found=type(self.check).__name__)

    def _try_out(self, new: Calls) -> None:
        """Calls the new version, and compares its answer with the reference. Raises `CanaryError`."""
        answer = self._answer_of(new, "the new version")
        if self.expected is not None:
            compare(answer, self.expected, atol=self.atol, rtol=self.rtol)
        elif self.needs_reference:
            for leaf in flatten(answer)[0]:
                if isinstance(value := _as_tensor(leaf), torch.Tensor):
                    _check_nan(wide(value))
        if self.check is not None:
            run_check(self.check, answer)

    @property
    def needs_reference(self) -> bool:
        """Whether the version that serves has to give the reference. Without one, only NaN is refused."""
        return self.expected is None and (self.check is None or self.atol is not None or self.rtol is not None)

    def _answer_of(self, program: Calls, who: str) -> object:
        try:
            return program(*self.args, **self.kwargs)
        except Exception as error:
            raise _raised(f"{who} raised on the canary's inputs", error) from error


def prepared(canary: Canary, serving: Calls) -> Canary:
    """Returns a canary with a reference, which the version that serves gives where none is set.

    Raises `CanaryError` where the version that serves raises on the inputs.
    """
    if not canary.needs_reference:
        return canary
    leaves, spec = flatten(canary._answer_of(serving, "the version that serves"))
    # Copies: the next call may use the memory of an answer again, as the graphs of "reduce-overhead" do.
    kept = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return replace(canary, expected=unflatten(kept, spec))


def run_canary(
    canary: Canary | Callable[[Calls], object], new: Program, buffers: Mapping[str, torch.Tensor | None]
) -> None:
    """Tries a program that no request calls, with the buffers that it will take over, and restores its own afterwards.

    Raises `CanaryError`.
    """
    with default_modes():
        transaction = Transaction(new.module)  # which is not committed
        tables = [each for part in new.module.modules() for each in (own_buffers(part), non_persistent_buffers(part))]
        for restore in reversed(ObjectSnapshot(tables).restores):
            transaction.register_undo(restore)
        for buffer in new.module.buffers():
            transaction.save_tensor(buffer)
    try:
        with default_modes():
            carry_over(buffers, new.module)
        if isinstance(canary, Canary):
            canary._try_out(new)
        else:
            run_check(canary, new)
    finally:
        with default_modes():
            transaction.rollback()


def run_check(check: Callable[[_T], object], value: _T) -> None:
    """Runs a check of the user. Raises `CanaryError` where it returns False or raises."""
    try:
        result = check(value)
        if str(getattr(result, "dtype", "")) in ("bool", "torch.bool"):
            refuses = not bool(cast(torch.Tensor, result).all())
        else:
            refuses = result is False
    except Exception as error:
        raise _raised("the canary's check raised", error) from error
    if refuses:
        raise CanaryError("the canary's check refused the new version", found="False")


def compare(answer: object, reference: object, *, atol: float | None, rtol: float | None = None) -> None:
    """Compares an answer with a reference as `Canary` describes it. Raises `CanaryError`."""
    (leaves, spec), (reference_leaves, reference_spec) = flatten(answer), flatten(reference)
    if spec != reference_spec:
        raise CanaryError("the answer has another structure", expected=reference_spec, found=spec)
    is_bounded = atol is not None or rtol is not None
    for leaf, reference_leaf in zip(leaves, reference_leaves, strict=True):
        value, expected = _as_tensor(leaf), _as_tensor(reference_leaf)
        are_tensors = isinstance(leaf, torch.Tensor), isinstance(reference_leaf, torch.Tensor)
        if _kind(value) != _kind(expected) or are_tensors[0] is not are_tensors[1]:
            raise CanaryError("the answer has another type", expected=_kind(reference_leaf), found=_kind(leaf))
        if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
            value, expected = wide(value), wide(expected).to(value.device)
            _check_nan(value[~torch.isnan(expected)])
            if is_bounded and not torch.allclose(value, expected, rtol=rtol or 0.0, atol=atol or 0.0, equal_nan=True):
                most = float((value - expected).abs().max())
                expected_text = f"atol={atol}, rtol={rtol}"
                raise CanaryError("the answer differs too much", expected=expected_text, found=f"up to {most:g}")
        elif is_bounded and isinstance(value, str | bytes) and value != expected:
            raise CanaryError("the answer is another text", expected=repr(expected), found=short_repr(value))


def _raised(what: str, error: Exception) -> CanaryError:
    return CanaryError(what, found=f"{type(error).__name__}: {error}")


def _check_nan(value: torch.Tensor) -> None:
    """Raises `CanaryError` where a tensor has NaN."""
    if bool(torch.isnan(value).any()):
        found = f"{int(torch.isnan(value).sum())} of {value.numel()}"
        raise CanaryError("the answer has NaN", expected="none", found=found)


def _as_tensor(value: object) -> object:
    """Converts numbers and numpy arrays to tensors, so that they are compared in the same way."""
    if isinstance(value, bool | int | float | complex) or type(value).__module__ == "numpy":
        try:
            exact = {float: torch.float64, complex: torch.complex128}.get(type(value))
            return torch.as_tensor(value, dtype=exact)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return value  # such as an array of strings, or a number beyond 64 bits
    return value


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f", {value.layout}"
        return f"a tensor, {list(value.shape)}, {value.dtype}{layout}"
    return type(value).__qualname__


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Converts a tensor to a dense one in the widest dtype of its kind."""
    tensor = tensor.detach()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
