"""Runs commands of the command line in this process."""

from click.testing import CliRunner, Result

from modelstate.cli.main import app


def run_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
