"""The commands, each a thin layer over the public functions."""

from importlib.metadata import version
from typing import Annotated, Any

import typer

import modelstate as ms
from modelstate.cli.common import PROBLEMS, build_model, parse_device, parse_dtype, reported
from modelstate.report.inspect import inspect_json, inspect_text

app = typer.Typer(
    help="Move model state between files and live PyTorch models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 all is well, 1 problems were found, 2 the command line is wrong.",
)

Path = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint: a file, or a directory with one.", show_default=False)
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:factory, a callable that returns the model; the working directory is searched too.",
        show_default=False,
    ),
]
Key = Annotated[str | None, typer.Option(help="The part of the checkpoint that is meant, such as model_state.")]
Dtype = Annotated[str | None, typer.Option(help="Cast floating point tensors on the way, such as bfloat16.")]
Device = Annotated[str | None, typer.Option(help="Where the tensors shall be, such as cpu or cuda:0.")]
Missing = Annotated[
    list[str] | None,
    typer.Option(help="Pattern of names that the file may lack and the model keeps its own of; may be repeated."),
]
Unexpected = Annotated[list[str] | None, typer.Option(help="Pattern of names to leave out; may be repeated.")]
Strip = Annotated[str | None, typer.Option(help="Prefix to take off the names of the file, such as module.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"modelstate {version('modelstate')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _request(
    key: str | None,
    dtype: str | None,
    device: str | None,
    missing: list[str] | None,
    unexpected: list[str] | None,
    prefix: str | None,
) -> dict[str, Any]:
    """What `ms.plan` and `ms.load` are asked for, before a model is built for it."""
    return {
        "key": key,
        "dtype": parse_dtype(dtype),
        "device": parse_device(device),
        "allow_missing": tuple(missing or ()),
        "allow_unexpected": tuple(unexpected or ()),
        "rules": (ms.Prefix(strip=prefix),) if prefix else (),
    }


@app.command()
def inspect(path: Path, key: Key = None, as_json: Json = False, debug: Debug = False) -> None:
    """Show what is in a checkpoint, without reading its tensors."""
    with reported(debug), ms.open(path, key=key) as checkpoint:
        typer.echo(inspect_json(checkpoint) if as_json else inspect_text(checkpoint))


@app.command()
def plan(
    model: Model,
    path: Path,
    key: Key = None,
    dtype: Dtype = None,
    device: Device = None,
    allow_missing: Missing = None,
    allow_unexpected: Unexpected = None,
    strip_prefix: Strip = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what loading a checkpoint into a model would do, and every problem, without reading its tensors."""
    with reported(debug):
        options = _request(key, dtype, device, allow_missing, allow_unexpected, strip_prefix)
        made = ms.plan(build_model(model, debug, initialised=bool(allow_missing)), path, **options)
        typer.echo(made.to_json() if as_json else str(made))
        if not made.ok:
            raise typer.Exit(PROBLEMS)


@app.command()
def load(
    model: Model,
    path: Path,
    key: Key = None,
    dtype: Dtype = None,
    device: Device = None,
    allow_missing: Missing = None,
    allow_unexpected: Unexpected = None,
    strip_prefix: Strip = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Load a checkpoint into a model, and show how it went: a test that they fit. --json lists every tensor."""
    with reported(debug):
        options = _request(key, dtype, device, allow_missing, allow_unexpected, strip_prefix)
        report = ms.load(build_model(model, debug, initialised=bool(allow_missing)), path, **options)
        typer.echo(report.to_json() if as_json else str(report))


@app.command()
def demo(
    runs: Annotated[int, typer.Option(min=1, help="Runs of each contender; medians are shown.")] = 5,
    debug: Debug = False,
) -> None:
    """Load a real sentence encoder, use it, and measure the load beside the usual one."""
    from modelstate.cli.demo import run_demo

    with reported(debug):
        run_demo(runs)


def main() -> None:
    """What the `modelstate` command runs."""
    app(prog_name="modelstate")
