"""Options and arguments that several commands have, as decorators of click.

A parameter has the name and the type of the argument of modelstate that it becomes, so that a command passes it on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

import modelstate as ms
from modelstate.cli.common import (
    PROBLEMS,
    named_object,
    one_line,
    parse_dtype,
    parse_size,
    search_working_directory,
    show,
    terminal_width,
    usage_errors,
    write_page,
)

if TYPE_CHECKING:
    from modelstate.rules.rule import Rule

Run = Callable[..., object]


def _allowed(_context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Finds the modules of classes that a pickle may use in the working directory, where they are not installed."""
    for name in names:
        with suppress(ValueError):  # the name is not that of a module
            if find_spec(name.partition(".")[0]) is None:
                search_working_directory()
    return names


@usage_errors()
def _cache(directory: str) -> ms.Cache:
    return ms.Cache(directory)


html = click.option("--html", metavar="FILE", help="Also write a page for a browser, in one file; replaces FILE.")
dtype = click.option(
    "--dtype", metavar="DTYPE", type=parse_dtype, help="Cast floating point tensors on the way, such as bfloat16."
)
shard_size = click.option(
    "--shard-size",
    "shard_size_bytes",
    metavar="SIZE",
    type=parse_size,
    help="The most bytes of tensors in one file, such as 5GB.",
)
max_memory = click.option(
    "--max-memory",
    "max_memory_bytes",
    metavar="SIZE",
    type=parse_size,
    help="The most memory that tensors may take at once, such as 512MB.",
)
overwrite = click.option("--overwrite", is_flag=True, help="Replace what is there already.")
model = click.argument(
    "model",
    help="package.module:name of a callable that returns the model, or of the model itself; the working directory is "
    "searched last.",
)
source = click.argument("source", help="A checkpoint: a file, a directory with one, or a URL.")
key = click.option("--key", metavar="KEY", help="The part of the checkpoint to use, such as model_state.")
file_format = click.option(
    "--format",
    metavar="FORMAT",
    help="safetensors, or torch for a file of torch.load; needed where the suffix of PATH says neither.",
)
no_skeleton = click.option(
    "--no-skeleton", is_flag=True, help="Build the model with values in its parameters; needs the memory."
)


def together(*options: Callable[[Run], Run]) -> Callable[[Run], Run]:
    """Returns a decorator that gives a command several options, in their order."""

    def decorate(run: Run) -> Run:
        for option in reversed(options):
            run = option(run)
        return run

    return decorate


opening = together(
    click.option(
        "--allow",
        metavar="NAME",
        multiple=True,
        callback=_allowed,
        help="Class or function that a pickle may use, such as library.Class, if you trust it; may be repeated.",
    ),
    click.option("--skip-forbidden", is_flag=True, help="Leave out objects of classes that are not allowed."),
    click.option(
        "--cache",
        metavar="DIR",
        type=_cache,
        help="Keep what is read of a remote checkpoint in DIR (at most 64 GiB), and read it from there.",
    ),
)
"""The options of `modelstate.open`."""


def comparing(run: Run) -> Run:
    """Gives a command that returns a `Diff` the options of a comparison, prints it, and exits with 1 if they differ."""

    @wraps(run)
    def command(
        top: int, show_all: bool, no_fold: bool, no_values: bool, html: str | None, as_json: bool, **own: Any
    ) -> None:
        result: Any = run(values=not no_values, **own)
        text = result.text(top=None if show_all else top, fold=not no_fold, width=terminal_width())
        show(result, as_json, text=text)
        write_page(html, result)
        if not result.is_equal:
            raise click.exceptions.Exit(PROBLEMS)

    return together(
        click.option(
            "--only",
            metavar="PATTERN",
            multiple=True,
            help="Compare these names of B only, such as '*.attn.*'; may be repeated.",
        ),
        click.option(
            "--top",
            metavar="N",
            type=click.IntRange(min=1),
            default=30,
            help="Rows of the table of tensors that differ.",
        ),
        click.option("--all", "show_all", is_flag=True, help="Show all rows of that table."),
        click.option("--no-fold", is_flag=True, help="A row for each tensor, also where layers repeat."),
        click.option("--no-values", is_flag=True, help="Compare names, shapes and dtypes; read no tensors."),
    )(command)


def _rule(make: Callable[[str], Rule]) -> Callable[[str], Rule]:
    """Returns the type of an option that is a rule."""

    def rule(text: str) -> Rule:
        if not text:
            raise click.BadParameter("give at least one character of a name")
        try:
            with usage_errors():
                return make(text)
        except re.error as error:
            raise click.BadParameter(f"{text!r} is not a regular expression: {error}") from error

    return rule


def _both_sides(text: str) -> tuple[str, str]:
    pattern, equals, replacement = text.rpartition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not PATTERN=REPLACEMENT, such as encoder.*=model.encoder.*")
    return pattern, replacement


def _regex_rename(text: str) -> Rule:
    pattern, replacement = _both_sides(text)
    return ms.rules.Rename(re.compile(pattern), replacement)


_RULES: Mapping[str, tuple[str, Callable[[str], Rule], str]] = {
    "--strip-prefix": (
        "PREFIX",
        lambda text: ms.rules.Prefix(strip=text),
        "Prefix to remove from the names of the file, such as module.",
    ),
    "--add-prefix": (
        "PREFIX",
        lambda text: ms.rules.Prefix(add=text),
        "Prefix to add to the names of the file, such as encoder.",
    ),
    "--rename": (
        "PATTERN=REPLACEMENT",
        lambda text: ms.rules.Rename(*_both_sides(text)),
        "Names of the file, with * for any part, and their new names, such as old.*.w=new.*.weight (the last = counts)",
    ),
    "--rename-regex": (
        "PATTERN=REPLACEMENT",
        _regex_rename,
        "Regular expression in names of the file, and its replacement, as in re.sub",
    ),
    "--ignore": (
        "PATTERN",
        lambda text: ms.rules.Ignore(text),
        "Names of the file to leave out, by their new names, with * for any part",
    ),
}
"""The options that are rules, in the order in which these are applied, with what they take and their help."""


def rules(run: Run) -> Run:
    """Gives a command the options that change names, as its argument `rules`."""

    @wraps(run)
    def command(rules_of: str | None, **own: Any) -> object:
        given = tuple(rule for name in _RULES for rule in own.pop(name[2:].replace("-", "_")))
        return run(rules=_with_named(rules_of, given) if rules_of else given, **own)

    return together(
        *(
            click.option(name, metavar=metavar, multiple=True, type=_rule(make), help=f"{text}; may be repeated.")
            for name, (metavar, make, text) in _RULES.items()
        ),
        click.option(
            "--rules",
            "rules_of",
            metavar="RULES",
            help="package.module:name of a list of rules or a Schema; applied before the other options that change "
            "names.",
        ),
    )(command)


def _with_named(name: str, given: tuple[Rule, ...]) -> tuple[Rule, ...] | ms.rules.Schema:
    """Returns the rules of `package.module:name`, followed by the given ones. Raises `click.BadParameter`."""
    from modelstate.rules.schema import check_rules

    value = named_object(name, "no rules: give package.module:name of a list of rules, or of a Schema")
    if not isinstance(value, ms.rules.Schema):
        try:
            return (*check_rules(value), *given)
        except ms.errors.OptionError as error:
            raise click.BadParameter(f"{name!r} has no rules: {one_line(error)}") from error
    if given:
        raise click.BadParameter("a Schema has all the rules: give it, or the options that change names")
    return value
