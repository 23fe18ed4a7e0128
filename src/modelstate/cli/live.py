"""`modelstate live`: puts new weights into programs that serve."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

import modelstate as ms
from modelstate.cli.common import PROBLEMS, Debug, Json, reported
from modelstate.errors import OptionError

if TYPE_CHECKING:
    from modelstate.serve.follow import FollowEvent

TOKEN = "MODELSTATE_TOKEN"
_WAIT_SECONDS = 0.2
_END_SECONDS = 1.0
"""The time for a running swap to end. The app finishes it in any case."""

app = typer.Typer(
    help="New weights into programs that serve.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def live() -> None:
    """New weights into programs that serve."""


@app.command()
def follow(
    store: Annotated[str, typer.Argument(metavar="STORE", help="The directory of a modelstate.Store.")],
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="Where the app is, as http://127.0.0.1:8000: it has /version and /swap."),
    ],
    select: Annotated[
        str, typer.Option(metavar="WHICH", help="latest; best:METRIC for the lowest, best:METRIC:max for the highest.")
    ] = "latest",
    name: Annotated[str, typer.Option("--object", metavar="NAME", help="The object that has the weights.")] = "model",
    poll: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two looks.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    token_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help=f"A file with the app's token; without it, it is that of {TOKEN}."),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="The most that a swap may take.")] = 300.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Have an app serve each checkpoint that a store gets.

    Each one is verified first. It goes on until a signal ends it. A checkpoint that is damaged, or that the app
    refuses, is skipped and reported once. Exit codes: 0 a signal has ended it; 1 the app does not take the token, or
    nothing from this directory; 2 the command line is wrong. With --once: 0 the app serves the checkpoint that was
    wanted; 1 it does not, or one was skipped.
    """

    from modelstate.serve.app import ServingApp

    def print_swap(event: FollowEvent) -> None:
        if as_json:
            typer.echo(json.dumps({"step": event.step, "version": event.version, "source": event.source}))
        else:
            typer.echo(f"step {event.step}: version {event.version} serves, from {event.source}")
        sys.stdout.flush()

    with reported(debug):
        try:
            target = ServingApp(url, _token(token_file), timeout_seconds=timeout)
            following = ms.follow(
                target,
                store,
                select=select,
                object=name,
                poll_seconds=poll,
                on_error=lambda error: print(f"error: {error}", file=sys.stderr, flush=True),
                on_swap=print_swap,
                background=False,
            )
        except (OptionError, ms.errors.SaveTargetError) as error:
            raise typer.BadParameter(f"{error.what}: {error.found or error.where}") from error
        if once:
            _poll_once(following, store)
        else:
            _poll_until_signal(following)


def _poll_once(following: ms.serve.Following, store: str) -> None:
    events = following.poll()
    if not events:
        print(f"error: {store} has no checkpoint to take", file=sys.stderr)
    if [event.action for event in events] != ["swapped"]:
        raise typer.Exit(PROBLEMS)


def _poll_until_signal(following: ms.serve.Following) -> None:
    # Another thread polls, so that a slow swap does not delay the end.
    with ms.Deadline(hours=None, signals=(signal.SIGTERM, signal.SIGINT)) as end:
        following.start()
        while not end.reached and not following.wait(_WAIT_SECONDS):
            pass
        if not end.reached:
            raise typer.Exit(PROBLEMS)
        following.stop(_END_SECONDS)
        print(f"ended: {end.reason}", file=sys.stderr)


def _token(path: str | None) -> str:
    """Returns the token of a file or of the environment. Raises `typer.BadParameter`, which never shows the token."""
    if path is None:
        token = os.environ.get(TOKEN, "")
        if not token:
            raise typer.BadParameter(f"no token: give --token-file, or set {TOKEN}")
        return token.strip()
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read(4096).strip()
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"the token cannot be read from {path!r}: {type(error).__name__}") from error
    if not token:
        raise typer.BadParameter(f"there is no token in {path!r}")
    return token
