"""A new version, tried before it serves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from modelstate.errors import CanaryError
from modelstate.live.buffers import restorer
from modelstate.live.program import Program
from modelstate.plan.torch_private import flatten

_REMEDY = "the version that served goes on; look at the new weights, or at what the canary asks of them"
Calls = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Canary:
    """Inputs that a new version has to answer well before it serves.

    It must not raise, and its answer must have the structure, shapes and dtypes of what it is compared with, and no
    NaN. That is `expected`, or the answer of the version that serves to the same inputs. With `check` or a tolerance
    more is asked of it.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Any], object] | None = None
    """Called with the new answer. It refuses it by returning False, or by raising."""
    expected: Any = None
    """The answer to compare with; None asks the version that serves, which has to be free of state for that."""
    atol: float | None = None
    """The most that an element may differ from the one compared with, beside `rtol`; None allows any difference."""
    rtol: float | None = None
    """The most that an element may differ, as a part of the one compared with."""

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
        for one, two in zip(new, old, strict=True):
            if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
                continue
            if one.shape != two.shape or one.dtype != two.dtype:
                raise _refused("the answer is another kind of tensor", _shown(two), _shown(one))
            one, two = one.detach(), two.detach()
            if bool(torch.isnan(one).any() & ~torch.isnan(two).any()):
                raise _refused("the answer has NaN", "none", f"{int(torch.isnan(one).sum())} of {one.numel()}")
            rtol, atol = self.rtol or 0.0, self.atol or 0.0
            if self._is_bounded and not torch.allclose(one, two, rtol=rtol, atol=atol, equal_nan=True):
                most = float((one.double() - two.double()).abs().max())
                raise _refused("the answer differs too much", f"atol={self.atol}, rtol={self.rtol}", f"up to {most:g}")


def run_canary(canary: "Canary | Callable[[Calls], object]", new: Program) -> None:
    """Tries a program that nobody else has. What its calls change of its buffers is undone. Raises `CanaryError`."""
    restore = restorer(new)
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
        result = check(value)
    except Exception as error:
        raise _raised("the canary's check raised", error) from error
    if result is False or (isinstance(result, torch.Tensor) and result.dtype == torch.bool and not bool(result.all())):
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


def _shown(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)}, {tensor.dtype}"
