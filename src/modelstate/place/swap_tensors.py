"""`torch.utils.swap_tensors`, which says beforehand what is in its way."""

from collections.abc import Mapping

import torch

from modelstate.errors import OptionError, SwapError
from modelstate.place.holders import holders_of
from modelstate.place.swap import exchange
from modelstate.plan.shield import uninterrupted
from modelstate.plan.torch_private import is_transforming, slots_of_class


def swap_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchanges what two tensors are, under their identities: class, attributes, slots and storage.

    What `torch.utils.swap_tensors` does, with the same result. Weak references to either are no hindrance: they refer
    to the object, which stays. Nor is an autograd graph whose backward pass has been run, which nothing can use again.
    Views, graphs that wait for backward and reducers of distributed training would go on with the other tensor, so
    then it raises `SwapError`, with nothing changed, and says who holds which of the two, and where.

    Raises `OptionError` for what is no tensor, `SwapError` for tensors that cannot be exchanged.
    """
    for one in (a, b):
        if not isinstance(one, torch.Tensor):
            raise OptionError("not a tensor", expected="two torch.Tensor", found=type(one).__name__)
    if is_transforming():
        raise SwapError(
            "within a transform of torch.func a tensor stands for others, and cannot be swapped",
            remedy="swap before the transform",
        )
    if a is b:
        return
    check_slots(a, b)
    for error in refusals({"the first tensor": a, "the second tensor": b}):
        raise error
    with uninterrupted():
        try:
            exchange(a, b)
        except (RuntimeError, TypeError) as error:
            raise SwapError(
                "torch cannot exchange these tensors; nothing has been changed",
                expected="tensors with no weak reference in torch's core, of classes whose objects have one layout",
                found=f"{type(a).__name__} and {type(b).__name__}: {error}",
                remedy="clone the tensor, and use the clone from now on",
            ) from error


def check_slots(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raises `SwapError` where the classes have different `__slots__`."""
    mine, theirs = set(slots_of_class(type(a))), set(slots_of_class(type(b)))
    if mine != theirs:
        raise SwapError(
            "the classes of the tensors have different __slots__; nothing has been changed",
            expected=f"the same: {sorted(mine)}",
            found=f"{sorted(theirs)} of {type(b).__name__}",
            remedy="keep what differs in attributes of the object, without __slots__",
        )


def refusals(tensors: Mapping[str, torch.Tensor]) -> list[SwapError]:
    """The errors for tensors, by their names, that somebody holds who would go on with them as they were.

    They are returned and not raised, so that no frame in their traceback keeps those holders alive.
    """
    held = holders_of(tensors.values())
    found = [(name, held[id(one)]) for name, one in tensors.items() if id(one) in held and held[id(one)].all()]
    return [
        SwapError(
            "somebody else holds the tensor, and would go on with what it was; nothing has been changed",
            where=name,
            expected="a tensor that only Python refers to",
            found="; ".join(holders.all()),
            remedy=holders.remedy,
        )
        for name, holders in found
    ]
