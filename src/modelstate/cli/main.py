"""The commands of `modelstate`. Each parses its options and calls one public function."""

from __future__ import annotations

import inspect as inspection
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

import modelstate as ms
from modelstate.cli.common import (
    PROBLEMS,
    WITH_VALUES,
    Add,
    Allow,
    CacheDirectory,
    Debug,
    Dtype,
    FileFormat,
    Html,
    Ignore,
    Json,
    Key,
    MaxMemory,
    NamedRules,
    Overwrite,
    Path,
    Rename,
    RenameRegex,
    ShardSize,
    Skip,
    Strip,
    build_model,
    make_parents,
    model_factory,
    parse_device,
    parse_dtype,
    parse_format,
    parse_mesh,
    parse_parallel,
    parse_rules,
    parse_size,
    reported,
    terminal_width,
    user_code,
    write_page,
)
from modelstate.cli.diff import diff
from modelstate.cli.get import get
from modelstate.cli.live import app as live_app
from modelstate.cli.store import app as store_app
from modelstate.cli.store import is_store, verify_steps
from modelstate.text_format import columns, listed, printable_lines

if TYPE_CHECKING:
    import torch

    from modelstate.cli.error_pages import Page
    from modelstate.loading.mesh_plan import MeshPlan

app = typer.Typer(
    help="Move model state between files and live PyTorch models.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 all is well, 1 problems were found, 2 the command line is wrong.",
)

app.command()(diff)
app.command()(get)
app.add_typer(store_app, name="store")
app.add_typer(live_app, name="live")

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:name of a callable that returns the model, or of the model itself; the working directory "
        "is searched too.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="Where the tensors shall be, such as cpu or cuda:0.")
]
Missing = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Pattern of names that the file may lack and the model keeps its own of; may be repeated.",
    ),
]
Unexpected = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Pattern of names to leave out; may be repeated.")
]
InitMissing = Annotated[
    bool, typer.Option("--init-missing", help="Have the model initialise what the file lacks, as its constructor does.")
]
Verify = Annotated[bool, typer.Option("--verify", help="Compare the bytes with their digests.")]
Suggested = Annotated[
    bool, typer.Option("--suggest", help="Plan with the rules that `modelstate suggest` works out, and print them.")
]
NoSkeleton = Annotated[
    bool, typer.Option("--no-skeleton", help="Build the model with values in its parameters; needs the memory.")
]

Mesh = Annotated[
    Any,
    typer.Option(
        metavar="SHAPE", parser=parse_mesh, help="The shape of a device mesh, such as 8 or 4x2, to plan each rank."
    ),
]
Parallel = Annotated[
    Any,
    typer.Option(
        metavar="fsdp|FILE",
        parser=parse_parallel,
        help="How the mesh shards the model: fsdp, or a TOML file that gives patterns of modules a style of tensor "
        "parallelism (colwise, rowwise, replicate) over the last dimension of the mesh.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"modelstate {version('modelstate')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _open(path: str, allow: list[str] | None, skip_forbidden: bool, cache: ms.Cache | None = None) -> ms.Checkpoint:
    with user_code():
        return ms.open(path, allow=allow or (), skip_forbidden=skip_forbidden, cache=cache)


@app.command()
def inspect(
    path: Path,
    key: Key = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the tensors: their least and greatest values, means, zeros, NaN, ...")
    ] = False,
    filter: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="With --stats: these names only, such as '*.bias'; may be repeated."),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="With --stats: a row for each module with N parts in its name."),
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="ORDER", help="With --stats: the order of the rows, file, name or size.")
    ] = "file",
    no_fold: Annotated[
        bool, typer.Option("--no-fold", help="With --stats: a row for each tensor, also where layers repeat.")
    ] = False,
    allow: Allow = None,
    skip_forbidden: Skip = False,
    cache: CacheDirectory = None,
    as_json: Json = False,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Show what is in a checkpoint.

    Its tensors are not read unless --stats is given.
    Exit code 1 if --skip-forbidden has left out objects and no tensor is found in the rest.
    """
    with reported(debug):
        if not stats and (filter or depth is not None or sort != "file" or no_fold):
            raise typer.BadParameter("--filter, --depth, --sort and --no-fold are for --stats")
        if sort not in ("file", "name", "size"):
            raise typer.BadParameter(f"--sort {sort}: give file, name or size")
        with user_code():
            inspection = ms.inspect(path, key=key, allow=allow or (), skip_forbidden=skip_forbidden, cache=cache)
        if stats and (inspection.tensors or not inspection.left_out):
            found = inspection.stats(only=filter or ())
            write_page(html, found)
            typer.echo(
                found.to_json()
                if as_json
                else found.text(depth=depth, sort=sort, fold=not no_fold, width=terminal_width())
            )
        else:
            write_page(html, inspection)
            typer.echo(inspection.to_json() if as_json else inspection)
        if not inspection.tensors and (names := inspection.left_out):
            typer.echo(
                f"error: no tensor was found; objects of these classes were left out: {listed(names, 8)}", err=True
            )
            raise typer.Exit(PROBLEMS)


_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Request:
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
                error.remedy += f"; if the code reads values, {WITH_VALUES}"
            raise


def _with_load_options(run: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `plan` and `load`: it gets the parsed ones, the checkpoint, and that of --json.

    Further parameters of `run` are options of its own.
    """

    def command(
        model: Model,
        path: Path,
        key: Key = None,
        strip_prefix: Strip = None,
        add_prefix: Add = None,
        rename: Rename = None,
        rename_regex: RenameRegex = None,
        ignore: Ignore = None,
        rules: NamedRules = None,
        allow_missing: Missing = None,
        allow_unexpected: Unexpected = None,
        init_missing: InitMissing = False,
        dtype: Dtype = None,
        device: Device = None,
        allow: Allow = None,
        skip_forbidden: Skip = False,
        cache: CacheDirectory = None,
        no_skeleton: NoSkeleton = False,
        as_json: Json = False,
        debug: Debug = False,
        **own: Any,
    ) -> None:
        with reported(debug):
            options: dict[str, object] = {
                "key": key,
                "rules": parse_rules(rules, strip_prefix, add_prefix, rename, rename_regex, ignore, debug),
                "allow_missing": tuple(allow_missing or ()),
                "allow_unexpected": tuple(allow_unexpected or ()),
                "init_missing": init_missing,
                "dtype": parse_dtype(dtype),
                "device": parse_device(device),
            }
            # Names that the file may lack keep the values of the model, which a skeleton does not have.
            skeleton = not (allow_missing or no_skeleton)
            request = Request(model, model_factory(model, debug), skeleton, options)
            with _open(path, allow, skip_forbidden, cache) as checkpoint:
                run(request, checkpoint, as_json, **own)

    common = list(inspection.signature(command, eval_str=True).parameters.values())[:-1]
    # The annotations of the first three need torch.
    own_options = [
        option.replace(annotation=eval(option.annotation, run.__globals__))
        for option in list(inspection.signature(run).parameters.values())[3:]
    ]
    signature = inspection.Signature([*common, *own_options])
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


@app.command()
@_with_load_options
def plan(
    request: Request,
    checkpoint: ms.Checkpoint,
    as_json: bool,
    html: Html = None,
    mesh: Mesh = None,
    parallel: Parallel = "",
    suggest: Suggested = False,
) -> None:
    """Show what a load would do, and every problem.

    No tensor is read.
    With --mesh, show what each rank of a device mesh would read and hold; no process group is needed.
    """
    if parallel and mesh is None:
        raise typer.BadParameter("--parallel says how the ranks of a mesh share the model: give --mesh too")

    if html is not None and mesh is not None:
        raise typer.BadParameter("--html shows the plan of one process: leave out --mesh")
    if suggest and request.options["rules"]:
        raise typer.BadParameter("--suggest works out all rules: leave out the options that change names")

    rules = ""

    def planned(model: torch.nn.Module, source: ms.Checkpoint, **options: Any) -> ms.LoadPlan | MeshPlan:
        if suggest:
            nonlocal rules
            options["rules"] = suggestion = ms.suggest(model, source, key=options["key"])
            rules = f"{suggestion}\n\n"
        load_plan = ms.plan(model, source, **options)
        if mesh is None or not load_plan.ok:
            return load_plan
        from modelstate.loading.mesh_plan import plan_for_mesh

        return plan_for_mesh(load_plan, model, mesh, parallel or None)

    result = request.run(planned, checkpoint)
    problems = result.problems if isinstance(result, ms.LoadPlan) else ()
    if isinstance(result, ms.LoadPlan):
        write_page(html, result)
    remedies = ""
    if problems:
        from modelstate.cli import spelling

        remedies = spelling.as_text(spelling.of_problems(problems))
    typer.echo(result.to_json() if as_json else printable_lines(f"{rules}{result}{remedies}"))
    if problems:
        raise typer.Exit(PROBLEMS)


@app.command()
@_with_load_options
def load(request: Request, checkpoint: ms.Checkpoint, as_json: bool, html: Html = None, verify: Verify = False) -> None:
    """Load a checkpoint into a model: a test that they fit.

    --json lists every tensor.
    """
    request.options["verify"] = verify
    report = request.run(ms.load, checkpoint)
    write_page(html, report)
    typer.echo(report.to_json() if as_json else str(report))


@app.command()
def suggest(
    model: Model,
    path: Path,
    key: Key = None,
    allow: Allow = None,
    skip_forbidden: Skip = False,
    no_skeleton: NoSkeleton = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Work out rules by which a checkpoint fits a model.

    They are printed as Python; nothing is loaded.
    """
    with reported(debug):
        request = Request(model, model_factory(model, debug), not no_skeleton, {"key": key})
        with _open(path, allow, skip_forbidden) as checkpoint:
            suggestion = request.run(ms.suggest, checkpoint)
        typer.echo(suggestion.to_json() if as_json else str(suggestion))
        if not suggestion.complete:
            raise typer.Exit(PROBLEMS)


@app.command()
def convert(
    path: Path,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Where it is written to.", show_default=False)],
    key: Key = None,
    dtype: Dtype = None,
    format: FileFormat = None,
    shard_size: ShardSize = None,
    max_memory: MaxMemory = None,
    strip_prefix: Strip = None,
    add_prefix: Add = None,
    rename: Rename = None,
    rename_regex: RenameRegex = None,
    ignore: Ignore = None,
    rules: NamedRules = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="package.module:name of a callable that returns the model; a Fill in RULES needs it."
        ),
    ] = None,
    no_skeleton: NoSkeleton = False,
    overwrite: Overwrite = False,
    allow: Allow = None,
    skip_forbidden: Skip = False,
    cache: CacheDirectory = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint as another file: format, dtype, names.

    It takes a few megabytes of memory.
    A file that is there already is left as it is, unless --overwrite is given; the source may be overwritten too.
    Directories on the way to TARGET are made.
    """
    with reported(debug):
        options: dict[str, Any] = {
            "rules": parse_rules(rules, strip_prefix, add_prefix, rename, rename_regex, ignore, debug),
            "dtype": parse_dtype(dtype),
            "format": parse_format(format, target),
            "shard_size_bytes": parse_size(shard_size),
            "max_memory_bytes": parse_size(max_memory),
            "overwrite": overwrite,
        }
        if model is not None:
            options["model"] = build_model(model, model_factory(model, debug), skeleton=not no_skeleton)
        with _open(path, allow, skip_forbidden, cache) as checkpoint, user_code():
            make_parents(target)
            report = ms.convert_checkpoint(checkpoint, target, key=key, **options)
        typer.echo(report.to_json() if as_json else str(report))


@app.command()
def cp(
    path: Path,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A file, or a directory with / at its end.", show_default=False)
    ],
    overwrite: Overwrite = False,
    allow: Allow = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Copy the files of a checkpoint, from and to buckets too.

    They are copied byte for byte. Bytes with digests are compared on the way. All files are there at the end, or none.
    A file that is there already is left as it is, unless --overwrite is given.
    """
    with reported(debug):
        report = ms.copy(path, target, overwrite=overwrite, allow=allow or ())
        typer.echo(report.to_json() if as_json else str(report))


@app.command()
def verify(
    path: Path, allow: Allow = None, skip_forbidden: Skip = False, as_json: Json = False, debug: Debug = False
) -> None:
    """Compare the bytes of a checkpoint or a store with their digests."""
    with reported(debug):
        if is_store(path):
            verify_steps(path, as_json=as_json)
            return
        with user_code():
            result = ms.verify(path, allow=allow or (), skip_forbidden=skip_forbidden)
        typer.echo(result.to_json() if as_json else result)


@app.command()
def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A page, a class of errors or problems, or words of an error's text; without it, all pages.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the page about an error.

    It has the cause, code that fails, and code that works.
    """
    from modelstate.cli.error_pages import find, pages

    if name is None:
        _show_pages([*pages().values()], as_json)
        return
    result = find(name)
    if not result.pages:
        raise typer.BadParameter(f"there is no page about {name!r}: modelstate explain lists all of them")
    if result.guess:
        typer.echo(f"there is no page about {name!r}; the nearest is {result.pages[0].name}", err=True)
    _show_pages(result.pages, as_json)


def _show_pages(pages: Sequence[Page], as_json: bool) -> None:
    """Prints one page, or the names and titles of several."""
    if as_json:
        typer.echo(json.dumps([asdict(page) for page in pages], indent=1))
    elif len(pages) == 1:
        typer.echo(pages[0].text.rstrip())
    else:
        typer.echo(columns([[page.name, page.title] for page in pages]))


def main() -> None:
    """Runs the `modelstate` command."""
    if sys.stdout is None:  # closed by the shell
        print("error: standard output is closed\n  to do: direct it to /dev/null", file=sys.stderr)
        sys.exit(2)
    app(prog_name="modelstate")
