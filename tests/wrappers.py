"""Wrappers of modules."""

from typing import Any

from torch import nn


def data_parallel(module: nn.Module) -> nn.DataParallel[Any]:
    """`DataParallel` that leaves its module on the CPU, also where there is a GPU to move it to."""
    wrapped = nn.DataParallel(module)
    wrapped.device_ids = []
    return wrapped.cpu()
