"""Rules that change tensors: transpose, reshape, cast, apply a function, split, concatenate, multiply."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import msgspec
import torch

from modelstate.errors import RuleError, TransformError, code_errors, keep_interrupt
from modelstate.io.memory import empty_cpu
from modelstate.problems import one_line
from modelstate.rules.expression import Derived, Source, cast, meta_like, reshaped, transposed
from modelstate.rules.rule import Entry, EntryRule, RuleContext, Value, check_sizes, irreversible
from modelstate.text_format import short_repr
from modelstate.torch_compat.dtypes import cast_between, dtype_named
from modelstate.torch_compat.plain import is_plain_memory


class _TensorRule(EntryRule):
    """A rule that changes each tensor whose name matches, and keeps its name. A subclass defines `change`."""

    def apply_to(self, context: RuleContext, name: str, entry: Entry, parts: tuple[str, ...]) -> None:
        if entry.tensor is None or entry.why_not_plain:
            return context.fail(name, entry.why_not_plain)
        try:
            result = self.change(entry.tensor)
        except Exception as error:  # torch raises for shapes that do not fit
            keep_interrupt(error)
            return context.fail(name, one_line(error))
        return context.make(name, result, [(name, entry)])

    def change(self, source: Source) -> Source:
        raise NotImplementedError


class Transpose(_TensorRule, msgspec.Struct, frozen=True):
    """Exchanges two dimensions: the weight of a Conv1D becomes that of a Linear.

    Args:
        pattern: A name in which each `*` matches any run of characters.
        dim0: the first dimension.
        dim1: the second dimension.

    Examples:
        >>> ms.load(model, "gpt2.safetensors", rules=ms.rules.Transpose("h.*.attn.c_attn.weight"))
    """

    pattern: str
    dim0: int = 0
    dim1: int = 1

    def change(self, source: Source) -> Source:
        return transposed(source, self.dim0, self.dim1)

    def reverse(self) -> Transpose:
        return self


class Reshape(_TensorRule, msgspec.Struct, frozen=True):
    """Gives tensors another shape, with their elements in the same order.

    Args:
        pattern: A name in which each `*` matches any run of characters.
        shape: The new shape; one size can be -1.
        before: The shape before, which is checked. A rule without it cannot be reversed.

    Raises:
        RuleError: `shape` or `before` is not a sequence of sizes.

    Examples:
        >>> ms.load(model, "old.pt", rules=ms.rules.Reshape("pos_embed", [196, 768], before=[1, 196, 768]))
    """

    pattern: str
    shape: tuple[int, ...]
    before: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("shape", "before"):
            sizes = getattr(self, name)
            if sizes is not None:
                msgspec.structs.force_setattr(self, name, check_sizes(self, name, sizes, least=-1))

    def change(self, source: Source) -> Source:
        if self.before is not None and meta_like(source).reshape(self.before).shape != source.shape:
            raise ValueError(f"its shape is {list(source.shape)}, not {list(self.before)}")
        return reshaped(source, self.shape)

    def reverse(self) -> Reshape:
        if self.before is None:
            raise irreversible(self, "it does not say what the shape was: before=")
        return Reshape(self.pattern, self.before, self.shape)


class Cast(_TensorRule, msgspec.Struct, frozen=True):
    """Casts tensors to a dtype, including one that loses values.

    Args:
        pattern: A name in which each `*` matches any run of characters.
        dtype: A dtype of torch, or its name: `torch.bfloat16`, "bfloat16" or "bf16".
        before: The dtype before, which is checked. A rule without it, or one that loses values, cannot be reversed.

    Raises:
        RuleError: `dtype` or `before` is not a dtype.

    Examples:
        >>> ms.load(model, "fp32.pt", rules=ms.rules.Cast("*", torch.bfloat16))
    """

    pattern: str
    dtype: torch.dtype
    before: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dtype", "before"):
            dtype: object = getattr(self, name)
            if isinstance(dtype, str):
                msgspec.structs.force_setattr(self, name, dtype_named(dtype) or dtype)
            if not isinstance(getattr(self, name), torch.dtype) and (dtype is not None or name == "dtype"):
                raise RuleError("a Cast takes dtypes", where=self, found=short_repr(dtype))

    def change(self, source: Source) -> Source:
        if self.before is not None and source.dtype != self.before:
            raise ValueError(f"its dtype is {source.dtype}, not {self.before}")
        return cast(source, self.dtype)

    def reverse(self) -> Cast:
        if self.before is None:
            raise irreversible(self, "it does not say what the dtype was: before=")
        if cast_between(self.before, self.dtype) in ("lossy", "kind"):
            raise irreversible(self, "the cast loses values")
        return Cast(self.pattern, self.before, self.dtype)


class Apply(EntryRule, msgspec.Struct, frozen=True):
    """Replaces what matches `pattern` by the result of a function, for changes that no other rule makes.

    Args:
        pattern: A name in which each `*` matches any run of characters.
        fn: Called with a tensor on the meta device first, to learn shape and dtype of its result; if it raises, with
            the values, which are then read twice. Later it is called with the values, as a copy that it may change.
            For extra state it is called with a copy of the value.
        inverse: The function of the way back. A rule without it cannot be reversed.
        moves: Declares that `fn` only moves elements, so that the per-element state of an optimizer can be moved in
            the same way.

    Raises:
        RuleError: `fn` or `inverse` is not a function.

    Examples:
        >>> ms.load(model, "old.pt", rules=ms.rules.Apply("*.scale", torch.exp, inverse=torch.log))
    """

    pattern: str
    fn: Callable[[Any], Any]
    inverse: Callable[[Any], Any] | None = None
    moves: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fn) or not (self.inverse is None or callable(self.inverse)):
            raise RuleError(
                "an Apply takes functions",
                where=repr(self.pattern),
                found=f"{short_repr(self.fn)}, {short_repr(self.inverse)}",
            )

    def apply_to(self, context: RuleContext, name: str, entry: Entry, parts: tuple[str, ...]) -> None:
        try:
            if isinstance(entry.content, Value):
                if entry.content.error is not None:
                    return context.fail(name, one_line(entry.content.error))
                result: Source | Value = Value(self.fn(deepcopy(entry.content.value)))
            else:
                result = self._derive(entry.content, context)
        except Exception as error:  # a user's function may raise anything
            keep_interrupt(error)
            return context.fail(name, one_line(error))
        return context.make(name, result, [(name, entry)])

    def _derive(self, source: Source, context: RuleContext) -> Source:
        try:
            example = self._call(meta_like(source))
        except Exception as error:  # the function may need values
            keep_interrupt(error)
            example = self._call(_own_copy(context.values(source)))
        dtype, shape = example.dtype, tuple(example.shape)
        return Derived(dtype, shape, (source,), partial(self._compute, dtype, shape), is_certain=False)

    def _compute(self, dtype: torch.dtype, shape: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor:
        what = "a function raised for the values, and not before; nothing has been changed"
        with code_errors(TransformError, what, where=repr(self)):
            result = self._call(_own_copy(tensor))
        if (result.dtype, tuple(result.shape)) != (dtype, shape):
            raise TransformError(
                "a function returned another shape or dtype for the values than before; nothing has been changed",
                where=repr(self),
                expected=f"{dtype} of shape {shape}",
                found=f"{result.dtype} of shape {tuple(result.shape)}",
            )
        return result.detach()

    def _call(self, tensor: torch.Tensor) -> torch.Tensor:
        result = self.fn(tensor)
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"the function returned {type(result).__name__}, not a tensor")
        return result

    def reverse(self) -> Apply:
        if self.inverse is None:
            raise irreversible(self, "it has no inverse")
        return Apply(self.pattern, self.inverse, self.fn, self.moves)


def _own_copy(values: torch.Tensor) -> torch.Tensor:
    """Returns a copy, which a function may change. The memory of a large one returns to the system when it is freed."""
    if is_plain_memory(values):
        return empty_cpu(values.shape, values.dtype).copy_(values)
    return values.clone()
