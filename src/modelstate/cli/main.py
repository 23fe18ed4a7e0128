"""The commands of `modelstate`. Each parses its options and calls one public function."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from functools import wraps
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
    Program,
    build_model,
    echo,
    make_parents,
    model_factory,
    parse_device,
    parse_format,
    reported,
    terminal_width,
    user_code,
    write_page,
)
from modelstate.cli.diff import diff
from modelstate.cli.store import is_store, store, verify_steps
from modelstate.text_format import columns, listed, printable_lines
from modelstate.version import __version__

if TYPE_CHECKING:
    import torch

    from modelstate.cli.error_pages import Page
    from modelstate.rules.rule import Rule


def _show_completion(context: click.Context, _: click.Parameter, shell: str | None) -> None:
    from click.shell_completion import get_completion_class

    if shell is not None and (completion := get_completion_class(shell)):
        click.echo(completion(context.command, {}, "modelstate", "_MODELSTATE_COMPLETE").source())
        context.exit()


@click.group(
    "modelstate",
    cls=Program,
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all is well, 1 problems were found, 2 the command line is wrong.",
)
@click.version_option(__version__, message="modelstate %(version)s", help="Print the version and exit.")
@click.option(
    "--show-completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    callback=_show_completion,
    is_eager=True,
    expose_value=False,
    help="Print the script with which a shell completes commands and options, and exit.",
)
def app() -> None:
    """Move model state between files and live PyTorch models."""


for _command in (diff, store):
    app.add_command(_command)

_model = click.argument(
    "model",
    help="package.module:name of a callable that returns the model, or of the model itself; the working directory is "
    "searched last.",
)


def _open(source: str, opening: options.Opening) -> ms.Checkpoint:
    with user_code():
        return ms.open(source, **opening)


@app.command()
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
@options.as_json
@options.html
@options.debug
def inspect(
    source: str,
    key: str | None,
    stats: bool,
    filter: tuple[str, ...],
    show_all: bool,
    opening: options.Opening,
    as_json: bool,
    html: str | None,
    debug: bool,
) -> None:
    """Show what is in a checkpoint.

    Its tensors are not read unless --stats is given.
    Exit code 1 if --skip-forbidden has left out objects and no tensor is found in the rest.
    """
    with reported(debug):
        if filter and not stats:
            raise click.BadParameter("--filter is for --stats")
        with user_code():
            inspection = ms.inspect(source, key=key, **opening)
        if stats and (inspection.tensors or not inspection.left_out):
            found = inspection.stats(only=filter)
            write_page(html, found)
            echo(found.to_json() if as_json else found.text(fold=not show_all, width=terminal_width()))
        else:
            write_page(html, inspection)
            echo(inspection.to_json() if as_json else inspection.text(fold=not show_all))
        if not inspection.tensors and (names := inspection.left_out):
            echo(f"error: no tensor was found; objects of these classes were left out: {listed(names, 8)}", err=True)
            raise click.exceptions.Exit(PROBLEMS)


_Result = TypeVar("_Result")


class Request(msgspec.Struct, frozen=True):
    """The parsed options of `plan`, `load` and `suggest`.

    They are parsed before a file is opened or a model is built, so that a wrong command line fails first.
    """

    model: str
    factory: Callable[[], object]
    skeleton: bool
    options: dict[str, object]

    def run(self, function: Callable[..., _Result], checkpoint: ms.Checkpoint) -> _Result:
        """Builds the model, and calls a function of modelstate with it and the checkpoint."""
        model = build_model(self.model, self.factory, skeleton=self.skeleton)
        try:
            with user_code():
                return function(model, checkpoint, **self.options)
        except ms.errors.ModelCodeError as error:
            if any(param.is_meta for param in model.parameters()):
                error.options += f"; if the code reads values, {WITH_VALUES}"
            raise


def _with_load_options(run: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `plan` and `load`: it gets the parsed ones, the checkpoint, and that of --json.

    Further parameters of `run` are options of its own.
    """

    @_model
    @options.source
    @options.key
    @options.rules
    @click.option(
        "--allow-missing",
        metavar="PATTERN",
        multiple=True,
        help="Names that the file may lack, with * for any part; the model keeps its own values; may be repeated.",
    )
    @click.option(
        "--allow-unexpected",
        metavar="PATTERN",
        multiple=True,
        help="Names of the file that the model may lack, with * for any part; may be repeated.",
    )
    @click.option(
        "--init-missing",
        is_flag=True,
        help="Have the model initialise what the file lacks, as its constructor does.",
    )
    @options.dtype
    @click.option("--device", metavar="DEVICE", help="Device of the loaded tensors, such as cpu or cuda:0.")
    @options.opening
    @options.no_skeleton
    @options.as_json
    @options.debug
    @wraps(run)
    def command(
        model: str,
        source: str,
        key: str | None,
        rules: Sequence[Rule] | ms.rules.Schema,
        allow_missing: tuple[str, ...],
        allow_unexpected: tuple[str, ...],
        init_missing: bool,
        dtype: torch.dtype | None,
        device: str | None,
        opening: options.Opening,
        no_skeleton: bool,
        as_json: bool,
        debug: bool,
        **own: Any,
    ) -> None:
        with reported(debug):
            parsed: dict[str, object] = {
                "key": key,
                "rules": rules,
                "allow_missing": allow_missing,
                "allow_unexpected": allow_unexpected,
                "init_missing": init_missing,
                "dtype": dtype,
                "device": parse_device(device),
            }
            # Names that the file may lack keep the values of the model, which a skeleton does not have.
            skeleton = not (allow_missing or no_skeleton)
            request = Request(model, model_factory(model, debug), skeleton, parsed)
            with _open(source, opening) as checkpoint:
                run(request, checkpoint, as_json, **own)

    return command


@app.command()
@_with_load_options
@options.html
@click.option(
    "--suggest", is_flag=True, help="Plan with the rules that `modelstate suggest` works out, and print them."
)
def plan(
    request: Request,
    checkpoint: ms.Checkpoint,
    as_json: bool,
    html: str | None,
    suggest: bool,
) -> None:
    """Show what a load would do, and every problem.

    Tensors are read only where two values must be compared, or where the model's own code reads them.
    """
    if suggest and request.options["rules"]:
        raise click.BadParameter("--suggest works out all rules: leave out the options that change names")

    rules = ""

    def planned(model: torch.nn.Module, source: ms.Checkpoint, **options: Any) -> ms.LoadPlan:
        if suggest:
            nonlocal rules
            suggestion = ms.suggest(model, source, key=options["key"])
            options["rules"] = suggestion.accept_guesses()  # a plan loads nothing
            rules = f"{suggestion}\n\n"
        return ms.plan(model, source, **options)

    result = request.run(planned, checkpoint)
    write_page(html, result)
    echo(result.to_json() if as_json else printable_lines(f"{rules}{result.text(command_line=True)}"))
    if result.problems:
        raise click.exceptions.Exit(PROBLEMS)


@app.command()
@_with_load_options
@options.html
@click.option("--verify", is_flag=True, help="Compare the bytes with their digests.")
def load(request: Request, checkpoint: ms.Checkpoint, as_json: bool, html: str | None, verify: bool) -> None:
    """Load a checkpoint into a model, to test that they fit.

    The report says what happened; --json lists every tensor. The loaded model is not kept.
    """
    request.options["verify"] = verify
    report = request.run(ms.load, checkpoint)
    write_page(html, report)
    echo(report.to_json() if as_json else str(report))


@app.command()
@_model
@options.source
@options.key
@options.opening
@options.no_skeleton
@options.as_json
@options.debug
def suggest(
    model: str,
    source: str,
    key: str | None,
    opening: options.Opening,
    no_skeleton: bool,
    as_json: bool,
    debug: bool,
) -> None:
    """Work out rules by which a checkpoint fits a model.

    They are printed as Python; nothing is loaded.
    """
    with reported(debug):
        request = Request(model, model_factory(model, debug), not no_skeleton, {"key": key})
        with _open(source, opening) as checkpoint:
            suggestion = request.run(ms.suggest, checkpoint)
        echo(suggestion.to_json() if as_json else str(suggestion))
        if not suggestion.complete:
            raise click.exceptions.Exit(PROBLEMS)


@app.command()
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
@options.as_json
@options.debug
def convert(
    source: str,
    path: str,
    key: str | None,
    dtype: torch.dtype | None,
    format: str | None,
    shard_size: int | None,
    max_memory: int | None,
    rules: Sequence[Rule] | ms.rules.Schema,
    model: str | None,
    no_skeleton: bool,
    overwrite: bool,
    opening: options.Opening,
    as_json: bool,
    debug: bool,
) -> None:
    """Write a checkpoint as another file: format, dtype, names.

    It takes a few megabytes of memory.
    An existing file is not changed, unless --overwrite is given; then PATH can also be SOURCE.
    Missing directories of PATH are created.
    """
    with reported(debug):
        parsed: dict[str, Any] = {
            "rules": rules,
            "dtype": dtype,
            "format": parse_format(format, path),
            "shard_size_bytes": shard_size,
            "max_memory_bytes": max_memory,
            "overwrite": overwrite,
        }
        if model is not None:
            parsed["model"] = build_model(model, model_factory(model, debug), skeleton=not no_skeleton)
        with _open(source, opening) as checkpoint, user_code():
            make_parents(path)
            report = ms.convert_checkpoint(checkpoint, path, key=key, **parsed)
        echo(report.to_json() if as_json else str(report))


@app.command()
@options.source
@options.opening
@options.as_json
@options.debug
def verify(source: str, opening: options.Opening, as_json: bool, debug: bool) -> None:
    """Compare the bytes of a checkpoint or a store with their digests.

    SOURCE can be the directory of a modelstate.Store, or its URL: then all of its checkpoints are compared.
    """
    with reported(debug):
        if is_store(source):
            verify_steps(source, cache=opening["cache"], as_json=as_json)
            return
        with user_code():
            result = ms.verify(source, **opening)
        echo(result.to_json() if as_json else result)


@app.command()
@click.argument(
    "name",
    required=False,
    help="A page, a class of errors or problems, or words of an error's text; without it, all pages.",
)
@options.as_json
def explain(name: str | None, as_json: bool) -> None:
    """Show the page about an error.

    It has the cause, code that fails, and code that works.
    """
    from modelstate.cli.error_pages import find, pages

    with reported(debug=False):
        if name is None:
            _show_pages([*pages().values()], as_json)
            return
        result = find(name)
        if not result.pages:
            raise click.BadParameter(f"there is no page about {name!r}: modelstate explain lists all of them")
        if result.is_guess:
            echo(f"there is no page about {name!r}; the nearest is {result.pages[0].name}", err=True)
        _show_pages(result.pages, as_json)


def _show_pages(pages: Sequence[Page], as_json: bool) -> None:
    """Prints one page, or the names and titles of several."""
    if as_json:
        echo(json.dumps([asdict(page) for page in pages], indent=1))
    elif len(pages) == 1:
        echo(pages[0].text.rstrip())
    else:
        echo(columns([[page.name, page.title] for page in pages]))


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
