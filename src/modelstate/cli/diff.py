"""`modelstate diff`: compares two checkpoints, and exits as `diff` does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

import modelstate as ms
from modelstate.cli import options
from modelstate.cli.common import (
    PROBLEMS,
    USAGE,
    echo,
    reported,
    terminal_width,
    user_code,
    write_page,
)

if TYPE_CHECKING:
    from modelstate.comparison.result import Diff
    from modelstate.rules.rule import Rule


@click.command()
@click.argument("a", help="The first checkpoint.")
@click.argument("b", help="The second checkpoint.")
@click.option(
    "--key",
    metavar="KEY",
    multiple=True,
    help="The part to compare, such as model_state; given twice, that of A and of B, '' for all of it.",
)
@options.only
@options.top
@options.show_all
@options.no_fold
@options.no_values
@options.rules
@options.max_memory
@options.opening
@options.as_json
@options.html
@options.debug
def diff(
    a: str,
    b: str,
    key: tuple[str, ...],
    only: tuple[str, ...],
    top: int,
    show_all: bool,
    no_fold: bool,
    no_values: bool,
    rules: Sequence[Rule] | ms.rules.Schema,
    max_memory: int | None,
    opening: options.Opening,
    as_json: bool,
    html: str | None,
    debug: bool,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes and values.

    The tensors with the largest change come first.
    The options that change names apply to A. Exit code 0 if both are equal, 1 if they differ, 2 if an error occurs or
    the command line is wrong.
    """
    with reported(debug, USAGE), _remedies(a, key):
        if len(key) > 2:
            raise click.BadParameter("--key is given at most twice: for A, and for B")
        with user_code():
            result = ms.diff(
                a,
                b,
                rules=rules,
                key=(key[0] or None, key[-1] or None) if key else None,
                only=only,
                values=not no_values,
                max_memory_bytes=max_memory,
                **opening,
            )
        show(result, as_json, None if show_all else top, not no_fold, html)


@contextlib.contextmanager
def _remedies(a: str, keys: Sequence[str]) -> Iterator[None]:
    """Makes the remedies of errors name the side that a key is for."""
    try:
        yield
    except ms.errors.KeyNotFoundError as error:
        if len(keys) == 1:
            from modelstate.problems import option

            both = option("--key", keys[0]) + " --key ''"
            error.options = f"give --key twice, for A and for B, where '' is the whole, such as {both}"
        raise
    except ms.errors.AmbiguousCheckpointError as error:
        key = next((key for key, _ in error.candidates if key), None)
        if key is not None:
            from modelstate.io.files import local_path
            from modelstate.problems import option

            sides = (key, "") if error.where in (a, local_path(a)) else ("", key)
            error.options = option("--key", *sides)
        raise


def show(result: Diff, as_json: bool, top: int | None, fold: bool, html: str | None) -> None:
    """Prints the differences, writes their page, and exits with 1 if there are any."""
    echo(result.to_json() if as_json else result.text(top=top, fold=fold, width=terminal_width()))
    write_page(html, result)
    if not result.is_equal:
        raise click.exceptions.Exit(PROBLEMS)
