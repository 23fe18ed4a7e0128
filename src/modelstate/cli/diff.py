"""`modelstate diff`: compares two checkpoints, and exits as `diff` does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

import modelstate as ms
from modelstate.cli import options
from modelstate.cli.common import PROBLEMS, Comparison, show, terminal_width, user_code, write_page

if TYPE_CHECKING:
    from modelstate.comparison.result import Diff


@click.command(cls=Comparison)
@click.argument("a", help="The first checkpoint.")
@click.argument("b", help="The second checkpoint.")
@click.option(
    "--key",
    "keys",
    metavar="KEY",
    multiple=True,
    help="The part to compare, such as model_state; given twice, that of A and of B, '' for all of it.",
)
@options.comparing
@options.rules
@options.opening
@options.html
def diff(
    a: str,
    b: str,
    keys: tuple[str, ...],
    top: int,
    show_all: bool,
    no_fold: bool,
    no_values: bool,
    html: str | None,
    as_json: bool,
    **comparing: Any,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes and values.

    The tensors with the largest change come first.
    The options that change names apply to A. Exit code 0 if both are equal, 1 if they differ, 2 if an error occurs or
    the command line is wrong.
    """
    if len(keys) > 2:
        raise click.BadParameter("--key is given at most twice: for A, and for B")
    both = (keys[0] or None, keys[-1] or None) if keys else None
    with _remedies(a, keys), user_code():
        result = ms.diff(a, b, key=both, values=not no_values, **comparing)
    show_differences(result, as_json, None if show_all else top, not no_fold, html)


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

            error.options = option("--key", *((key, "") if error.where in (a, local_path(a)) else ("", key)))
        raise


def show_differences(result: Diff, as_json: bool, top: int | None, fold: bool, html: str | None) -> None:
    """Prints the differences, writes their page, and exits with 1 if there are any."""
    show(result, as_json, text=result.text(top=top, fold=fold, width=terminal_width()))
    write_page(html, result)
    if not result.is_equal:
        raise click.exceptions.Exit(PROBLEMS)
