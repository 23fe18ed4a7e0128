"""`python -m modelstate.cli`, where the installed command is not at hand."""

from modelstate.cli.main import main

main()
