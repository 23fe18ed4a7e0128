"""The versions of PyTorch that features need; `docs/compatibility.md` has them as a table."""

import re

import torch

from modelstate.errors import ModelStateError

OLDEST = {
    "AOTInductor packages": (2, 11),
}
"""The oldest PyTorch for what needs a later one than the package itself does."""


def torch_version() -> tuple[int, int]:
    """The major and minor version of the PyTorch that is imported."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def require_torch(feature: str, error: type[ModelStateError], where: str, remedy: str = "") -> None:
    """Raises `error` where this PyTorch is too old for a feature of `OLDEST`.

    Args:
        feature: The name of the feature.
        error: The class of the error.
        where: What is asked for.
        remedy: What can be done without a newer PyTorch.
    """
    needed = ".".join(map(str, OLDEST[feature]))
    if torch_version() < OLDEST[feature]:
        raise error(
            f"{feature} need a newer PyTorch",
            where=where,
            expected=f"torch {needed} or later",
            found=f"torch {torch.__version__}",
            remedy=f"install torch {needed} or later" + (f"; or {remedy}" if remedy else ""),
        )
