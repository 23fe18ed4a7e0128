"""The command `modelstate`, run in the process of the tests."""

import os
from typing import Any

import torch
from click.testing import CliRunner, Result
from torch import nn

from modelstate.cli.main import app

__all__ = ["app", "run", "tiny"]


def run(*arguments: str, **options: Any) -> Result:
    """Runs a command line. MODELS stands for the module of that name in the environment."""
    models = os.environ.get("MODELS", "MODELS")
    return CliRunner().invoke(app, [argument.replace("MODELS", models) for argument in arguments], **options)


def tiny() -> nn.Module:
    """The model that `MODELS:tiny` names."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
