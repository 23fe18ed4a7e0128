"""The command `modelstate`, run in the process of the tests."""

import os
from typing import Any

from click.testing import CliRunner, Result

from modelstate.cli.main import app

__all__ = ["app", "run"]


def run(*arguments: str, **options: Any) -> Result:
    """Runs a command line. MODELS stands for the module of that name in the environment."""
    models = os.environ.get("MODELS", "MODELS")
    return CliRunner().invoke(app, [argument.replace("MODELS", models) for argument in arguments], **options)
