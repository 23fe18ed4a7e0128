"""Exchanging what two tensors are, under their identities."""

import torch

from modelstate.plan.torch_private import keep_hooks, swap_impl


def swap_unchecked(a: torch.Tensor, b: torch.Tensor) -> None:
    """`torch.utils.swap_tensors(a, b)` without its checks, for what has passed them, or is swapped back."""
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    swap_impl(a, b)


def give_memory(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Makes a plain tensor show the memory of `value`, under its own identity, class, hooks and `requires_grad`.

    This works where assigning `.data` does not: from the meta device. A gradient, which has no values either, is lost.
    Returns the other tensor, with which the swap can be undone.
    """
    restore_hooks, other = keep_hooks(tensor), value.detach()
    if tensor.requires_grad:
        other.requires_grad_()
    swap_impl(tensor, other)
    restore_hooks()
    return other
