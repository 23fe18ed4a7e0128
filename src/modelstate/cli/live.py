"""`modelstate live`: puts new weights into programs that serve."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING

import click

import modelstate as ms
from modelstate.cli import options
from modelstate.cli.common import PROBLEMS, echo, parse_seconds, reported, usage_text

if TYPE_CHECKING:
    from modelstate.serve.follow import FollowEvent

TOKEN = "MODELSTATE_TOKEN"
_WAIT_SECONDS = 0.2
_END_SECONDS = 1.0
"""The time for the thread to give up what it does. The app finishes a running swap."""


@click.group()
def live() -> None:
    """Swap new weights into programs that serve."""


@live.command()
@click.argument("store", help="The directory of a modelstate.Store.")
@click.argument("url", help="The address of the app, such as http://127.0.0.1:8000; it answers /version and /swap.")
@click.option(
    "--select",
    metavar="WHICH",
    default="latest",
    help="latest; best:METRIC for the lowest, best:METRIC:max for the highest.",
)
@click.option("--object", "name", metavar="NAME", default="model", help="The object with the weights.")
@click.option("--poll", metavar="SECONDS", type=parse_seconds, default=5.0, help="Time between two polls.")
@click.option("--once", is_flag=True, help="Poll once, and exit.")
@click.option("--token-file", metavar="FILE", help=f"The file with the app's token; by default, the value of {TOKEN}.")
@click.option("--timeout", metavar="SECONDS", type=parse_seconds, default=300.0, help="The most that a swap may take.")
@options.as_json
@options.debug
def follow(
    store: str,
    url: str,
    select: str,
    name: str,
    poll: float,
    once: bool,
    token_file: str | None,
    timeout: float,
    as_json: bool,
    debug: bool,
) -> None:
    """Have an app serve each checkpoint that a store gets.

    Each checkpoint is verified first. One that is damaged, or that the app refuses, is skipped and reported once. The
    command runs until a signal ends it.

    Exit codes: 0 a signal has ended it; 1 the app refuses the token, or every path in this directory; 2 the command
    line is wrong. With --once: 0 the app serves the selected checkpoint; 1 it does not, or a checkpoint was skipped.
    """
    from modelstate.serve.app import ServingApp

    def print_swap(event: FollowEvent) -> None:
        if as_json:
            echo(json.dumps({"step": event.step, "version": event.version, "source": event.source}))
        else:
            echo(f"step {event.step}: version {event.version} serves, from {event.source}")
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
        except (ms.errors.OptionError, ms.errors.SaveTargetError) as error:
            raise click.BadParameter(usage_text(error)) from error
        if once:
            _poll_once(following, store, select)
        else:
            _poll_until_signal(following)


def _poll_once(following: ms.serve.Following, store: str, select: str) -> None:
    events = following.poll()
    if not events:
        print(f"error: {store}: no checkpoint for --select {shlex.quote(select)}", file=sys.stderr)
        print(f"  to do: modelstate store ls {shlex.quote(store)} shows the steps and their metrics", file=sys.stderr)
    if [event.action for event in events] != ["swapped"]:
        raise click.exceptions.Exit(PROBLEMS)


def _poll_until_signal(following: ms.serve.Following) -> None:
    # Another thread polls, so that a slow swap does not delay the end.
    with ms.Deadline(hours=None, signals=(signal.SIGTERM, signal.SIGINT)) as end:
        following.start()
        while not end.reached and not following.wait(_WAIT_SECONDS):
            pass
        if not end.reached:
            raise click.exceptions.Exit(PROBLEMS)
        following.stop(_END_SECONDS)
        print(f"ended: {end.reason}", file=sys.stderr)


def _token(path: str | None) -> str:
    """Returns the token of a file or of the environment. Raises `click.BadParameter`, which never shows the token."""
    if path is None:
        token = os.environ.get(TOKEN, "")
        if not token:
            raise click.BadParameter(f"no token: give --token-file, or set {TOKEN}")
        return token.strip()
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read(4096).strip()
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"the token cannot be read from {path!r}: {type(error).__name__}") from error
    if not token:
        raise click.BadParameter(f"there is no token in {path!r}")
    return token
