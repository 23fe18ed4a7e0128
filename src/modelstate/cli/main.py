"""The commands of `modelstate`. Each parses its options and calls one public function."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from msgspec.structs import asdict

import modelstate as ms
from modelstate.cli import options
from modelstate.cli.common import (
    PROBLEMS,
    USAGE,
    WITH_VALUES,
    Command,
    Comparison,
    Program,
    build_model,
    echo,
    make_parents,
    model_factory,
    parse_device,
    parse_format,
    show,
    terminal_width,
    user_code,
)
from modelstate.cli.store import is_store, store, verify_steps
from modelstate.text_format import columns, listed, printable_lines

if TYPE_CHECKING:
    import torch

    from modelstate.comparison.result import Diff


@click.group(
    "modelstate",
    cls=Program,
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all is well, 1 problems were found, 2 the command line is wrong.",
)
@click.version_option(ms.__version__, message="modelstate %(version)s", help="Print the version and exit.")
def app() -> None:
    """Move model state between files and live PyTorch models."""


app.add_command(store)

_Result = TypeVar("_Result")
_LINK = re.compile(r"\[([^\]]*)\]\([\w./-]+\.md(?:#[\w-]+)?\)")


def _open(source: str, allow: tuple[str, ...], skip_forbidden: bool, cache: ms.Cache | None) -> ms.Checkpoint:
    with user_code():
        return ms.open(source, allow=allow, skip_forbidden=skip_forbidden, cache=cache)


@app.command(cls=Command)
@options.source
@options.key
@click.option("--stats", is_flag=True, help="Read the tensors: their least and greatest values, means, zeros, NaN, ...")
@click.option(
    "--filter",
    metavar="PATTERN",
    multiple=True,
    help="With --stats: these names only, such as '*.bias'; may be repeated.",
)
@click.option("--all", "show_all", is_flag=True, help="A row for each tensor, also where layers repeat.")
@options.opening
@options.html
def inspect(
    source: str,
    stats: bool,
    filter: tuple[str, ...],
    show_all: bool,
    as_json: bool,
    html: str | None,
    **inspecting: Any,
) -> None:
    """Show what is in a checkpoint.

    Its tensors are not read unless --stats is given.
    Exit code 1 if --skip-forbidden has left out objects and no tensor is found in the rest.
    """
    if filter and not stats:
        raise click.BadParameter("--filter is for --stats")
    with user_code():
        inspection = ms.inspect(source, **inspecting)
    names = inspection.left_out if not inspection.tensors else ()
    if stats and not names:
        found = inspection.stats(only=filter)
        text = "" if as_json else found.text(fold=not show_all, width=terminal_width())
        show(found, as_json, html, text)
    else:
        show(inspection, as_json, html, inspection.text(fold=not show_all))
    if names:
        echo(f"error: no tensor was found; objects of these classes were left out: {listed(names, 8)}", err=True)
        raise click.exceptions.Exit(PROBLEMS)


def _with_model(
    function: Callable[..., _Result], model: str, source: str, no_skeleton: bool, given: dict[str, Any]
) -> _Result:
    """Opens the source, builds the model, and calls a function of modelstate with both and the given options.

    The model is found before a file is opened, so that a wrong command line fails first.
    """
    opening = {name: given.pop(name) for name in ("allow", "skip_forbidden", "cache")}
    # Names that the file may lack keep the values of the model, which a skeleton does not have.
    skeleton, factory = not (no_skeleton or given.get("allow_missing")), model_factory(model)
    with _open(source, **opening) as checkpoint:
        instance = build_model(model, factory, skeleton=skeleton)
        try:
            with user_code():
                return function(instance, checkpoint, **given)
        except ms.errors.ModelCodeError as error:
            if any(param.is_meta for param in instance.parameters()):
                error.options += f"; if the code reads values, {WITH_VALUES}"
            raise


_loading = options.together(
    options.model,
    options.source,
    options.key,
    options.rules,
    click.option(
        "--allow-missing",
        metavar="PATTERN",
        multiple=True,
        help="Names that the file may lack, with * for any part; the model keeps its own values; may be repeated.",
    ),
    click.option(
        "--allow-unexpected",
        metavar="PATTERN",
        multiple=True,
        help="Names of the file that the model may lack, with * for any part; may be repeated.",
    ),
    click.option(
        "--init-missing",
        is_flag=True,
        help="Have the model initialise what the file lacks, as its constructor does.",
    ),
    options.dtype,
    click.option(
        "--device", metavar="DEVICE", type=parse_device, help="Device of the loaded tensors, such as cpu or cuda:0."
    ),
    options.opening,
    options.no_skeleton,
    options.html,
)
"""The options of `plan` and `load`."""


@app.command(cls=Command)
@_loading
@click.option(
    "--suggest", is_flag=True, help="Plan with the rules that `modelstate suggest` works out, and print them."
)
def plan(
    model: str, source: str, no_skeleton: bool, as_json: bool, html: str | None, suggest: bool, **given: Any
) -> None:
    """Show what a load would do, and every problem.

    Tensors are read only where two values must be compared, or where the model's own code reads them.
    """
    if suggest and given["rules"]:
        raise click.BadParameter("--suggest works out all rules: leave out the options that change names")
    rules = ""

    def planned(model: torch.nn.Module, source: ms.Checkpoint, **options: Any) -> ms.LoadPlan:
        if suggest:
            nonlocal rules
            suggestion = ms.suggest(model, source, key=options["key"])
            options["rules"] = suggestion.accept_guesses()  # a plan loads nothing
            rules = f"{suggestion}\n\n"
        return ms.plan(model, source, **options)

    result = _with_model(planned, model, source, no_skeleton, given)
    show(result, as_json, html, printable_lines(f"{rules}{result.text(command_line=True)}"))
    if result.problems:
        raise click.exceptions.Exit(PROBLEMS)


@app.command(cls=Command)
@_loading
@click.option("--verify", is_flag=True, help="Compare the bytes with their digests.")
def load(model: str, source: str, no_skeleton: bool, as_json: bool, html: str | None, **given: Any) -> None:
    """Load a checkpoint into a model, to test that they fit.

    The report says what happened; --json lists every tensor. The loaded model is not kept.
    """
    show(_with_model(ms.load, model, source, no_skeleton, given), as_json, html)


@app.command(cls=Command)
@options.model
@options.source
@options.key
@options.opening
@options.no_skeleton
def suggest(model: str, source: str, no_skeleton: bool, as_json: bool, **given: Any) -> None:
    """Work out rules by which a checkpoint fits a model.

    They are printed as Python; nothing is loaded.
    """
    suggestion = _with_model(ms.suggest, model, source, no_skeleton, given)
    show(suggestion, as_json)
    if not suggestion.complete:
        raise click.exceptions.Exit(PROBLEMS)


@app.command(cls=Command)
@options.source
@click.argument("path", help="The file to write; its suffix selects the format.")
@options.key
@options.dtype
@options.file_format
@options.shard_size
@options.max_memory
@options.rules
@click.option(
    "--model",
    metavar="MODEL",
    help="package.module:name of a callable that returns the model; a Fill in RULES needs it.",
)
@options.no_skeleton
@options.overwrite
@options.opening
def convert(
    source: str,
    path: str,
    format: str | None,
    model: str | None,
    no_skeleton: bool,
    as_json: bool,
    allow: tuple[str, ...],
    skip_forbidden: bool,
    cache: ms.Cache | None,
    **writing: Any,
) -> None:
    """Write a checkpoint as another file: format, dtype, names.

    It takes a few megabytes of memory.
    An existing file is not changed, unless --overwrite is given; then PATH can also be SOURCE.
    Missing directories of PATH are created.
    """
    writing["format"] = parse_format(format, path)
    if model is not None:
        writing["model"] = build_model(model, model_factory(model), skeleton=not no_skeleton)
    with _open(source, allow, skip_forbidden, cache) as checkpoint, user_code():
        make_parents(path)
        report = ms.convert_checkpoint(checkpoint, path, **writing)
    show(report, as_json)


@app.command(cls=Command)
@options.source
@options.opening
def verify(source: str, as_json: bool, **opening: Any) -> None:
    """Compare the bytes of a checkpoint or a store with their digests.

    SOURCE can be the directory of a modelstate.Store, or its URL: then all of its checkpoints are compared.
    """
    if is_store(source):
        verify_steps(source, cache=opening["cache"], as_json=as_json)
        return
    with user_code():
        result = ms.verify(source, **opening)
    show(result, as_json)


@app.command(cls=Comparison)
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
def diff(a: str, b: str, keys: tuple[str, ...], **comparing: Any) -> Diff:
    """Compare two checkpoints: names, shapes, dtypes and values.

    The tensors with the largest change come first.
    The options that change names apply to A. Exit code 0 if both are equal, 1 if they differ, 2 if an error occurs or
    the command line is wrong.
    """
    if len(keys) > 2:
        raise click.BadParameter("--key is given at most twice: for A, and for B")
    both = (keys[0] or None, keys[-1] or None) if keys else None
    with _remedies(a, keys), user_code():
        return ms.diff(a, b, key=both, **comparing)


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


@app.command(cls=Command)
@click.argument(
    "name",
    required=False,
    help="A page, a class of errors, a kind of problems, or the text of an error; without it, all pages.",
)
def explain(name: str | None, as_json: bool) -> None:
    """Show the page about an error.

    It has the cause, code that fails, and code that works.
    """
    if name is None:
        _show_pages([*pages().values()], as_json)
        return
    found, is_guess = find_pages(name)
    if not found:
        raise click.BadParameter(f"there is no page about {name!r}: modelstate explain lists all of them")
    if is_guess:
        echo(f"there is no page about {name!r}; the nearest is {found[0].name}", err=True)
    _show_pages(found, as_json)


def _show_pages(pages: Sequence[Page], as_json: bool) -> None:
    """Prints one page, or the names and titles of several."""
    if as_json:
        echo(json.dumps([asdict(page) for page in pages], indent=1))
    elif len(pages) == 1:
        echo(pages[0].text.rstrip())
    else:
        echo(columns([[page.name, page.title] for page in pages]))


class Page(msgspec.Struct, frozen=True):
    """A page about the errors of one cause."""

    name: str
    title: str
    """The texts of errors, as a user would search for them, divided by semicolons."""
    text: str
    """Markdown, with the names of other pages in place of links to them."""
    names: tuple[str, ...]
    """The errors and the kinds of problems that name the page."""


def named_pages() -> Iterator[tuple[str, str]]:
    """Yields the name of every class of errors and every kind of problems, with its page."""
    from modelstate.problems import ProblemKind

    for name, kind in vars(ms.errors).items():
        if isinstance(kind, type) and issubclass(kind, ms.ModelStateError) and kind.page:
            yield name, kind.page
    yield from ((kind.name, kind.page) for kind in ProblemKind)


@cache
def pages() -> dict[str, Page]:
    """Returns all pages by name."""
    package = Path(__file__).parent.parent
    folder = package / "pages"
    if not folder.is_dir():  # a checkout, or an editable install of one
        folder = package.parent.parent / "docs" / "errors"
    by_name = {}
    for path in sorted(folder.glob("*.md")):
        if path.stem != "index":
            text = _LINK.sub(r"\1", path.read_text(encoding="utf-8"))
            names = tuple(name for name, page in named_pages() if page == path.stem)
            by_name[path.stem] = Page(path.stem, text.partition("\n")[0].removeprefix("# "), text, names)
    return by_name


def find_pages(query: str) -> tuple[tuple[Page, ...], bool]:
    """Finds the page with a name, of a class or of a kind; the page of an error's text; else those with these words.

    Returns:
        The pages, and whether the page is a guess: nothing has this name or text, and the page is the nearest one.
    """
    import difflib

    named = re.findall(r"modelstate explain ([\w-]+)", query)
    if known := tuple(pages()[name] for name in dict.fromkeys(named) if name in pages()):
        return known, False
    by_name = {_plain(name): page for page in pages().values() for name in (page.name, *page.names)}
    key = _plain(query.rpartition(".")[2])
    if key in by_name:
        return (by_name[key],), False
    if not any(map(str.isspace, query)) and (near := difflib.get_close_matches(key, by_name, n=1, cutoff=0.75)):
        return (by_name[near[0]],), True
    words = " ".join(query.lower().split())
    containing = tuple(page for page in pages().values() if words and words in " ".join(page.text.lower().split()))
    if containing:
        return containing, False
    asked = set(re.findall("[a-z]{3,}", words))
    nearness = {page.name: max(_share(title, asked) for title in page.title.split("; ")) for page in pages().values()}
    nearest = max(nearness, key=nearness.__getitem__)
    return ((pages()[nearest],), True) if nearness[nearest] > 0.6 else ((), False)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _share(title: str, asked: set[str]) -> float:
    """Returns the share of a title's words that are among others, without those in quotes, which are names."""
    words = set(re.findall("[a-z]{3,}", re.sub(r'"[^"]*"', " ", title.lower())))
    return len(words & asked) / len(words) if len(words) > 1 else 0.0


def main() -> None:
    """Runs the `modelstate` command."""
    if sys.stderr is None:  # closed by the shell: `print` would take standard output
        sys.stderr = io.StringIO()
    if sys.stdout is None:
        print("error: standard output is closed\n  to do: direct it to /dev/null", file=sys.stderr)
        sys.exit(USAGE)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name of a file need not be text
    try:
        app(prog_name="modelstate")
    except OSError as error:  # click prints help texts
        print(f"error: standard output: the output cannot be written\n  found: {error}", file=sys.stderr)
        sys.exit(PROBLEMS)
