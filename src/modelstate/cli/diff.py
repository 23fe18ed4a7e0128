"""`modelstate diff`: compares two checkpoints, and exits as `diff` does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import modelstate as ms
from modelstate.cli.common import (
    PROBLEMS,
    USAGE,
    Add,
    Allow,
    CacheDirectory,
    Debug,
    Html,
    Ignore,
    Json,
    MaxMemory,
    NamedRules,
    Rename,
    RenameRegex,
    Skip,
    Strip,
    parse_rules,
    parse_size,
    reported,
    terminal_width,
    user_code,
    write_page,
)
from modelstate.io.files import local_path

if TYPE_CHECKING:
    from modelstate.comparison.result import Diff

Only = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Compare these names of B only, such as '*.attn.*'; may be repeated."),
]
Top = Annotated[int, typer.Option(metavar="N", min=1, help="Rows of the table of tensors that differ.")]
All = Annotated[bool, typer.Option("--all", help="Show all rows of that table.")]
NoFold = Annotated[bool, typer.Option("--no-fold", help="A row for each tensor, also where layers repeat.")]
NoValues = Annotated[bool, typer.Option("--no-values", help="Compare names, shapes and dtypes; read no tensors.")]


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="The first checkpoint.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The second checkpoint.", show_default=False)],
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="The part to compare, such as model_state; given twice, that of A and of B, '' for all of it.",
        ),
    ] = None,
    only: Only = None,
    top: Top = 30,
    show_all: All = False,
    no_fold: NoFold = False,
    no_values: NoValues = False,
    strip_prefix: Strip = None,
    add_prefix: Add = None,
    rename: Rename = None,
    rename_regex: RenameRegex = None,
    ignore: Ignore = None,
    rules: NamedRules = None,
    no_guess: Annotated[
        bool, typer.Option("--no-guess", help="Do not guess which names of A have become which names of B.")
    ] = False,
    max_memory: MaxMemory = None,
    allow: Allow = None,
    skip_forbidden: Skip = False,
    cache: CacheDirectory = None,
    as_json: Json = False,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes and values.

    The tensors with the largest change come first.
    The options that change names apply to A. Exit code 0 if both are equal, 1 if they differ, 2 if an error occurs or
    the command line is wrong.
    """
    with reported(debug, USAGE), _remedies(a, key or ()):
        if len(key or ()) > 2:
            raise typer.BadParameter("--key is given at most twice: for A, and for B")
        parsed_rules = parse_rules(rules, strip_prefix, add_prefix, rename, rename_regex, ignore, debug)
        nbytes = parse_size(max_memory)
        with user_code():
            result = ms.diff(
                a,
                b,
                rules=parsed_rules,
                key=(key[0] or None, key[-1] or None) if key else None,
                only=only or (),
                values=not no_values,
                guess=not no_guess,
                max_memory_bytes=nbytes,
                allow=allow or (),
                skip_forbidden=skip_forbidden,
                cache=cache,
            )
        show(result, as_json, None if show_all else top, not no_fold, html)


@contextlib.contextmanager
def _remedies(a: str, keys: Sequence[str]) -> Iterator[None]:
    """Makes the remedies of errors name the side that a key is for."""
    try:
        yield
    except ms.errors.KeyNotFoundError as error:
        if len(keys) == 1:
            from modelstate.cli.spelling import option

            both = option("--key", keys[0]) + " --key ''"
            error.remedy = f"give --key twice, for A and for B, where '' is the whole, such as {both}"
        raise
    except ms.errors.AmbiguousCheckpointError as error:
        key = next((key for key, _ in error.candidates if key), None)
        if key is not None:
            from modelstate.cli.spelling import option

            sides = (key, "") if error.where in (a, local_path(a)) else ("", key)
            error.remedy = " ".join(option("--key", side) for side in sides)
        raise


def show(result: Diff, as_json: bool, top: int | None, fold: bool, html: str | None) -> None:
    """Prints the differences, writes their page, and exits with 1 if there are any."""
    typer.echo(result.to_json() if as_json else result.text(top=top, fold=fold, width=terminal_width()))
    write_page(html, result)
    if not result.is_equal:
        raise typer.Exit(PROBLEMS)
