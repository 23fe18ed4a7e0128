"""A new version, tried before it serves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from modelstate.errors import CanaryError, OptionError
from modelstate.serve.buffers import buffer_restorer
from modelstate.serve.target import Program
from modelstate.torch_compat.private import flatten

_REMEDY = "the version that served goes on; look at the new weights, or at what the canary asks of them"
Calls = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Canary:
    """Inputs that a new version has to answer well before it serves.

    It must not raise, and its answer must have the structure, shapes and dtypes of what it is compared with, and no
    NaN. That is `expected`, or the answer of the version that serves to the same inputs. What is no tensor has to be of
    the same type. With `check` or a tolerance more is asked of it: within a tolerance are numbers as tensors are, and
    text has to be the same; other objects are looked at for their class only. Raises `OptionError`.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Any], object] | None = None
    """Called with the new answer. It refuses it by returning False, or by raising. False is also numpy's, and a tensor
    or an array of dtype bool that is not all true; None, 0 and whatever else accept."""
    expected: Any = None
    """The answer to compare with; None asks the version that serves, which has to be free of state for that."""
    atol: float | None = None
    """The most that an element may differ from the one compared with, beside `rtol`; None allows any difference."""
    rtol: float | None = None
    """The most that an element may differ, as a part of the one compared with."""

    def __post_init__(self) -> None:
        for name in ("atol", "rtol"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and value >= 0):
                raise OptionError(f"{name}= is a tolerance", expected="a number from 0, or None", found=repr(value))
        if not isinstance(self.args, tuple | list) or not isinstance(self.kwargs, Mapping):
            raise OptionError(
                "args= and kwargs= are the inputs of a call",
                expected="a tuple, and a dict of names",
                found=f"{type(self.args).__name__}, {type(self.kwargs).__name__}",
            )
        if self.check is not None and not callable(self.check):
            raise OptionError("check= is called with the answer", found=type(self.check).__name__)

    def prepared(self, serving: Calls) -> "Canary":
        """With the answer to compare with, taken of the version that serves where none is given.

        Raises `CanaryError`.
        """
        if self.expected is not None or (self.check is not None and not self._is_bounded):
            return self
        answer = _called(serving, self, "the version that serves raised on the canary's inputs")
        return replace(self, expected=answer)

    def try_out(self, new: Calls) -> None:
        """Raises `CanaryError`."""
        answer = _called(new, self, "the new version raised on the canary's inputs")
        if self.expected is not None:
            self._compare(answer, self.expected)
        if self.check is not None:
            run_check(self.check, answer)

    @property
    def _is_bounded(self) -> bool:
        return self.atol is not None or self.rtol is not None

    def _compare(self, answer: Any, other: Any) -> None:
        (new, spec), (old, other_spec) = flatten(answer), flatten(other)
        if spec != other_spec:
            raise _refused("the answer has another structure", other_spec, spec)
        for its, wanted in zip(new, old, strict=True):
            if isinstance(its, torch.Tensor) is not isinstance(wanted, torch.Tensor):
                raise _refused("the answer has another type", _kind(wanted), _kind(its))
            one, two = _as_tensor(its), _as_tensor(wanted)
            if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
                self._compare_tensors(one, two)
            elif _kind(one) != _kind(two):
                raise _refused("the answer has another type", _kind(two), _kind(one))
            elif self._is_bounded and isinstance(one, str | bytes) and one != two:
                raise _refused("the answer is another text", repr(two), repr(one))

    def _compare_tensors(self, one: torch.Tensor, two: torch.Tensor) -> None:
        if (one.shape, one.dtype, one.layout) != (two.shape, two.dtype, two.layout):
            raise _refused("the answer is another kind of tensor", _shown(two), _shown(one))
        one, two = _wide(one), _wide(two).to(one.device)
        if bool(torch.isnan(one).any() & ~torch.isnan(two).any()):
            raise _refused("the answer has NaN", "none", f"{int(torch.isnan(one).sum())} of {one.numel()}")
        rtol, atol = self.rtol or 0.0, self.atol or 0.0
        if self._is_bounded and not torch.allclose(one, two, rtol=rtol, atol=atol, equal_nan=True):
            most = float((one - two).abs().max())
            raise _refused("the answer differs too much", f"atol={self.atol}, rtol={self.rtol}", f"up to {most:g}")


def run_canary(canary: "Canary | Callable[[Calls], object]", new: Program) -> None:
    """Tries a program that nobody else has. What its calls change of its buffers is undone. Raises `CanaryError`."""
    restore = buffer_restorer(new)
    try:
        if isinstance(canary, Canary):
            canary.try_out(new)
        else:
            run_check(canary, new)
    finally:
        restore()


def run_check(check: Callable[[Any], object], value: Any) -> None:
    """A check of the user's: it refuses by returning False, or by raising. Raises `CanaryError`."""
    try:
        refuses = _is_false(check(value))
    except Exception as error:
        raise _raised("the canary's check raised", error) from error
    if refuses:
        raise _refused("the canary's check refused the new version", "", "False")


def _called(program: Calls, canary: Canary, what: str) -> Any:
    try:
        return program(*canary.args, **canary.kwargs)
    except Exception as error:
        raise _raised(what, error) from error


def _raised(what: str, error: Exception) -> CanaryError:
    return CanaryError(what, found=f"{type(error).__name__}: {error}", remedy=_REMEDY)


def _refused(what: str, expected: object, found: object) -> CanaryError:
    return CanaryError(what, expected=expected, found=found, remedy=_REMEDY)


def _is_false(result: object) -> bool:
    """False, whoever's it is; a number is none, nor is an answer that was returned by the way."""
    if str(getattr(result, "dtype", "")) in ("bool", "torch.bool"):
        return not bool(cast(Any, result).all())
    return result is False


def _as_tensor(value: Any) -> Any:
    """Numbers and arrays as tensors, with which they are compared alike."""
    if isinstance(value, bool | int | float | complex) or type(value).__module__ == "numpy":
        try:
            exact = {float: torch.float64, complex: torch.complex128}.get(type(value))
            return torch.as_tensor(value, dtype=exact)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return value  # an array of texts, a number beyond 64 bits
    return value


def _kind(value: object) -> str:
    return f"a tensor, {_shown(value)}" if isinstance(value, torch.Tensor) else type(value).__qualname__


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In a dtype in which everything can be compared."""
    tensor = tensor.detach()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _shown(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)}, {tensor.dtype}"
