"""Exchanging what two tensors are, under their identities."""

import torch


def swap_back(a: torch.Tensor, b: torch.Tensor) -> None:
    """Undoes `torch.utils.swap_tensors(a, b)`, without its checks: what was swapped once can be swapped back."""
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)
