"""Runs the command line as `python -m modelstate`, without the installed command."""

from modelstate.cli.main import main

main()
