"""The program: the installed command `modelstate`, and `python -m modelstate`."""

import os
import sys


def main() -> None:
    """Runs the `modelstate` command. It imports nothing from the working directory."""
    _leave_out_working_directory()
    from modelstate.cli.main import main as run

    run()


def _leave_out_working_directory() -> None:
    """Removes the working directory from the path of modules, unless modelstate itself is there.

    `python -m` puts it first, and an empty part of PYTHONPATH stands for it. A folder with checkpoints may have files
    of the names that the command imports. Before this call, only modules that Python has loaded may be imported.
    """
    try:
        here = os.path.realpath(os.curdir)
    except FileNotFoundError:  # the working directory was removed
        return
    if here != os.path.realpath(os.path.dirname(os.path.dirname(__file__))):
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]


if __name__ == "__main__":
    main()
