"""Options and arguments that several commands have, as decorators of click."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib.util import find_spec
from typing import TypedDict

import click

import modelstate as ms
from modelstate.cli.common import parse_dtype, parse_rules, parse_size, search_working_directory


def _allowed(_context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Finds the modules of classes that a pickle may use in the working directory, where they are not installed."""
    for name in names:
        with suppress(ValueError):  # the name is not that of a module
            if find_spec(name.partition(".")[0]) is None:
                search_working_directory()
    return names


def _cache(directory: str) -> ms.Cache:
    try:
        return ms.Cache(directory)
    except ms.errors.OptionError as error:
        raise click.BadParameter(str(error)) from error


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
html = click.option("--html", metavar="FILE", help="Also write a page for a browser, in one file; replaces FILE.")
debug = click.option("--debug", is_flag=True, help="Show the traceback of an error.")
dtype = click.option(
    "--dtype", metavar="DTYPE", type=parse_dtype, help="Cast floating point tensors on the way, such as bfloat16."
)
shard_size = click.option(
    "--shard-size", metavar="SIZE", type=parse_size, help="The most bytes of tensors in one file, such as 5GB."
)
max_memory = click.option(
    "--max-memory",
    metavar="SIZE",
    type=parse_size,
    help="The most memory that tensors may take at once, such as 512MB.",
)
overwrite = click.option("--overwrite", is_flag=True, help="Replace what is there already.")
source = click.argument("source", help="A checkpoint: a file, a directory with one, or a URL.")
key = click.option("--key", metavar="KEY", help="The part of the checkpoint to use, such as model_state.")
allow = click.option(
    "--allow",
    metavar="NAME",
    multiple=True,
    callback=_allowed,
    help="Class or function that a pickle may use, such as library.Class, if you trust it; may be repeated.",
)
file_format = click.option(
    "--format",
    metavar="FORMAT",
    help="safetensors, or torch for a file of torch.load; needed where the suffix of PATH says neither.",
)
no_skeleton = click.option(
    "--no-skeleton", is_flag=True, help="Build the model with values in its parameters; needs the memory."
)
only = click.option(
    "--only",
    metavar="PATTERN",
    multiple=True,
    help="Compare these names of B only, such as '*.attn.*'; may be repeated.",
)
top = click.option(
    "--top",
    metavar="N",
    type=click.IntRange(min=1),
    default=30,
    help="Rows of the table of tensors that differ.",
)
show_all = click.option("--all", "show_all", is_flag=True, help="Show all rows of that table.")
no_fold = click.option("--no-fold", is_flag=True, help="A row for each tensor, also where layers repeat.")
no_values = click.option("--no-values", is_flag=True, help="Compare names, shapes and dtypes; read no tensors.")


class Opening(TypedDict):
    """The options that say how a checkpoint is opened, as arguments of `modelstate.open`."""

    allow: tuple[str, ...]
    skip_forbidden: bool
    cache: ms.Cache | None


def opening(run: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `modelstate.open`, as its argument `opening`."""

    @allow
    @click.option("--skip-forbidden", is_flag=True, help="Leave out objects of classes that are not allowed.")
    @click.option(
        "--cache",
        metavar="DIR",
        type=_cache,
        help="Keep what is read of a remote checkpoint in DIR (at most 64 GiB), and read it from there.",
    )
    @wraps(run)
    def command(allow: tuple[str, ...], skip_forbidden: bool, cache: ms.Cache | None, **own: object) -> None:
        run(opening=Opening(allow=allow, skip_forbidden=skip_forbidden, cache=cache), **own)

    return command


def rules(run: Callable[..., None]) -> Callable[..., None]:
    """Gives a command with `--debug` the options that change names, as its argument `rules`."""

    @click.option(
        "--strip-prefix",
        metavar="PREFIX",
        multiple=True,
        help="Prefix to remove from the names of the file, such as module.; may be repeated.",
    )
    @click.option("--add-prefix", metavar="PREFIX", help="Prefix to add to the names of the file, such as encoder.")
    @click.option(
        "--rename",
        metavar="PATTERN=REPLACEMENT",
        multiple=True,
        help="Names of the file, with * for any part, and their new names, such as old.*.w=new.*.weight; may be "
        "repeated. The last = divides them.",
    )
    @click.option(
        "--rename-regex",
        metavar="PATTERN=REPLACEMENT",
        multiple=True,
        help="Regular expression in names of the file, and its replacement, as in re.sub; may be repeated.",
    )
    @click.option(
        "--ignore",
        metavar="PATTERN",
        multiple=True,
        help="Names of the file to leave out, by their new names, with * for any part; may be repeated.",
    )
    @click.option(
        "--rules",
        metavar="RULES",
        help="package.module:name of a list of rules or a Schema; applied before the other options that change names.",
    )
    @wraps(run)
    def command(
        strip_prefix: tuple[str, ...],
        add_prefix: str | None,
        rename: tuple[str, ...],
        rename_regex: tuple[str, ...],
        ignore: tuple[str, ...],
        rules: str | None,
        debug: bool,
        **own: object,
    ) -> None:
        parsed = parse_rules(rules, strip_prefix, add_prefix, rename, rename_regex, ignore, debug)
        run(rules=parsed, debug=debug, **own)

    return command
