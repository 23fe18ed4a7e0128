"""`modelstate store`: lists, verifies and prunes the checkpoints of a store, and writes an object as a file."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

import modelstate as ms
from modelstate.cli.common import (
    PROBLEMS,
    USAGE,
    Debug,
    Dtype,
    FileFormat,
    Html,
    Json,
    MaxMemory,
    Overwrite,
    ShardSize,
    make_parents,
    parse_dtype,
    parse_format,
    parse_size,
    reported,
    write_page,
)
from modelstate.cli.diff import All, NoFold, NoValues, Only, Top, show
from modelstate.errors import SourceNotFoundError, SourceTypeError, StepNotFoundError
from modelstate.io.files import local_path, not_found
from modelstate.remote.location import is_remote, locate
from modelstate.text_format import columns, count, in_a_line, size

if TYPE_CHECKING:
    from modelstate.store.directory import StepIndex

app = typer.Typer(
    help="List, verify, prune and restore the steps of a store.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="The directory of a modelstate.Store.", show_default=False)
]
Step = Annotated[int | None, typer.Option(metavar="STEP", help="The step that is meant.")]


def is_store(path: str) -> bool:
    """Whether a directory is a store."""
    from modelstate.store.directory import medium_of
    from modelstate.store.medium import STORE_FILE

    try:
        return os.path.isfile(os.path.join(path, STORE_FILE)) or bool(medium_of(path).places())
    except OSError:
        return False


def _index(path: str) -> StepIndex:
    """Returns the index of the store in a directory. It needs no torch, and creates nothing.

    Raises `SourceTypeError` for a file, and `SourceNotFoundError` where there is no store.
    """
    from modelstate.store.directory import StepIndex
    from modelstate.store.medium import STORE_FILE

    if is_remote(path):
        index = StepIndex(locate(path.rstrip("/")).url)
        if not index.all_revisions():
            raise SourceNotFoundError("there is no checkpoint of a store here", where=index.directory)
        return index
    if not os.path.lexists(path):
        raise SourceNotFoundError(
            "there is no such directory", where=path, remedy="check the path, and the directory that it is relative to"
        )
    if not os.path.exists(path):
        raise not_found(path, path)
    if not os.path.isdir(path):
        raise SourceTypeError(
            "a store is a directory, and this is a file",
            where=path,
            expected="the directory of a modelstate.Store",
            remedy=f"modelstate inspect {shlex.quote(path)} shows what is in a file",
        )
    if not is_store(path):
        raise SourceNotFoundError(
            "this is not a store of checkpoints",
            where=path,
            expected=f"{STORE_FILE}, as modelstate.Store writes it",
            remedy="modelstate inspect shows other checkpoints",
        )
    return StepIndex(local_path(path).rstrip(os.sep))


@app.command("ls")
def list_steps(directory: Directory, as_json: Json = False, html: Html = None, debug: Debug = False) -> None:
    """Show the checkpoints of a store.

    No tensor is read. Exit code 1 if one is known to be damaged.
    """
    with reported(debug):
        from modelstate.store.retention import infos_page

        index = _index(directory)
        infos = [entry.info for entry in index.read_all(index.steps())]
        write_page(html, infos_page(directory, infos))
        if as_json:
            typer.echo(json.dumps([_fields(info) for info in infos], indent=1))
        elif infos:
            rows = [["step", "saved", "bytes", "", "metrics"], *map(_row, infos)]
            typer.echo(columns(rows, right=(0, 2)))
        else:
            typer.echo("no checkpoints")
        if not all(info.intact for info in infos):
            raise typer.Exit(PROBLEMS)


def _fields(info: ms.store.CheckpointInfo) -> dict[str, object]:
    # NaN and infinity are text, because JSON does not have them.
    metrics = {name: value if value - value == 0 else str(value) for name, value in info.metrics.items()}
    return {
        "step": info.step,
        "time": info.time,
        "metrics": metrics,
        "pinned": info.pinned,
        "intact": info.intact,
        "bytes": info.nbytes,
        "path": info.path,
    }


def _row(info: ms.store.CheckpointInfo) -> list[str]:
    from modelstate.store.retention import saved_at

    metrics = [f"{name}={value:.6g}" for name, value in info.metrics.items()]
    return [str(info.step), saved_at(info), size(info.nbytes), info.state, " ".join(metrics)]


@app.command()
def verify(directory: Directory, step: Step = None, as_json: Json = False, debug: Debug = False) -> None:
    """Compare every byte of checkpoints with its digest.

    Exit code 1 if one is damaged.
    """
    with reported(debug):
        verify_steps(directory, step, as_json=as_json)


def verify_steps(directory: str, step: int | None = None, *, as_json: bool) -> None:
    """Prints a line for each step as soon as it has been read; exits with 1 if one of them is damaged.

    A line of JSON has the name of what was read, its bytes, and the problem or null.

    Another process may delete and save steps meanwhile. If no step could be read, the new ones are read.
    """
    from modelstate.store.directory import store_file_problem
    from modelstate.store.medium import STORE_FILE

    def say(what: str | int, nbytes: int, problem: str) -> None:
        if as_json:
            typer.echo(json.dumps({"what": what, "bytes": nbytes, "problem": problem or None}))
        else:
            name = f"step {what}" if isinstance(what, int) else what
            typer.echo(f"{name}: {in_a_line(problem) if problem else f'{size(nbytes)}, whole'}")

    index = _index(directory)
    read = problems = 0
    if step is None and (problem := store_file_problem(directory)):
        problems += 1
        say(STORE_FILE, 0, problem)
    while not read:
        infos = {entry.place.step: entry.info for entry in index.read_all(index.steps())}
        if not infos and step is None:
            typer.echo("no checkpoints", err=as_json)
            break
        for number in infos if step is None else (step,):
            try:
                problem = index.problem_now(number, progress=None)
            except StepNotFoundError:
                if step is not None:
                    raise
                typer.echo(f"step {number}: taken away meanwhile", err=as_json)
                continue
            read += 1
            problems += bool(problem)
            say(number, infos[number].nbytes if number in infos else 0, problem)
    if problems:
        raise typer.Exit(PROBLEMS)


@app.command("diff")
def compare_steps(
    directory: Directory,
    a: Annotated[int, typer.Argument(metavar="STEP", help="The first step.", show_default=False)],
    b: Annotated[int, typer.Argument(metavar="STEP", help="The second step.", show_default=False)],
    only: Only = None,
    top: Top = 30,
    show_all: All = False,
    no_fold: NoFold = False,
    no_values: NoValues = False,
    max_memory: MaxMemory = None,
    as_json: Json = False,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Compare two checkpoints of a store, with all their objects.

    It is shown as `modelstate diff` does.
    Exit code 0 if both are equal, 1 if they differ, 2 if an error occurs or the command line is wrong.
    """
    with reported(debug, USAGE):
        nbytes = parse_size(max_memory)
        _index(directory)
        result = ms.Store(directory).diff(a, b, only=only or (), values=not no_values, max_memory_bytes=nbytes)
        show(result, as_json, None if show_all else top, not no_fold, html)


@app.command()
def prune(
    directory: Directory,
    keep_last: Annotated[int | None, typer.Option(metavar="N", help="Keep the last N.")] = None,
    every_steps: Annotated[int | None, typer.Option(metavar="N", help="Keep the first of each N steps.")] = None,
    every_hours: Annotated[float | None, typer.Option(metavar="H", help="Keep the first of each H hours.")] = None,
    best: Annotated[int | None, typer.Option(metavar="N", help="Keep the N with the best metric.")] = None,
    metric: Annotated[str | None, typer.Option(metavar="NAME", help="The metric that --best goes by.")] = None,
    maximize: Annotated[bool, typer.Option("--max", help="The highest metric is the best, not the lowest.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and leave it.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove the checkpoints that no rule keeps.

    Pinned ones and the newest whole one stay in any case.
    """
    with reported(debug):
        if keep_last is every_steps is every_hours is best is None:
            raise typer.BadParameter("say what is kept: --keep-last, --every-steps, --every-hours or --best")
        try:
            keep = ms.Keep(
                last=keep_last,
                every_steps=every_steps,
                every_hours=every_hours,
                best=best,
                metric=metric,
                mode="max" if maximize else "min",
            )
        except ms.errors.OptionError as error:
            raise typer.BadParameter(str(error)) from error
        _index(directory)
        with ms.Store(directory) as store:
            infos = store.infos()
            gone = store.prune(keep, dry_run=dry_run)
        freed = sum(info.nbytes for info in infos if info.step in gone)
        if as_json:
            kept = [info.step for info in infos if info.step not in gone]
            fields = {"removed": list(gone), "kept": kept, "bytes": freed, "dry_run": dry_run}
            typer.echo(json.dumps(fields, indent=1))
            return
        would = "would go" if dry_run else "taken away"
        typer.echo(f"{would}: {_listed(gone)}" if gone else "nothing to take away")
        typer.echo(f"kept: {_listed(info.step for info in infos if info.step not in gone)}")
        if gone:
            typer.echo(f"{size(freed)} in their files; what others are linked to stays on the disk")


def _listed(steps: Iterable[int]) -> str:
    numbers = list(map(str, steps))
    return count(len(numbers), "step") + (f": {', '.join(numbers)}" if numbers else "")


@app.command()
def restore(
    directory: Directory,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The file to write.", show_default=False)],
    step: Step = None,
    name: Annotated[str, typer.Option("--object", metavar="NAME", help="The object of the checkpoint.")] = "model",
    format: FileFormat = None,
    dtype: Dtype = None,
    shard_size: ShardSize = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write one object of a checkpoint as a file of its own.

    By default it is from the newest checkpoint that is whole. Its bytes are compared with their digests first. A file
    that is there already is left as it is, unless --overwrite is given.
    """
    with reported(debug):
        options: dict[str, Any] = {"dtype": parse_dtype(dtype), "shard_size_bytes": parse_size(shard_size)}
        options["format"] = parse_format(format, target)
        index = _index(directory)
        store = ms.Store(directory)
        make_parents(target)
        while True:
            chosen = index.whole_step(step, _report_skipped, progress=None)
            if chosen is None:
                raise StepNotFoundError(
                    "there is no checkpoint that is whole",
                    where=index.directory,
                    remedy=f"modelstate store verify {shlex.quote(directory)} says what is damaged",
                )
            try:
                with store.open(name, chosen) as checkpoint:
                    report = ms.convert_checkpoint(checkpoint, target, overwrite=overwrite, **options)
                break
            except ms.ModelStateError:
                if step is not None or chosen in {info.step for info in store.infos()}:
                    raise
                # The step was deleted while it was read: the next one is tried.
        typer.echo(report.to_json() if as_json else f"step {chosen}: {report}")


def _report_skipped(step: int, problem: str) -> None:
    typer.echo(f"step {step} is passed over: {in_a_line(problem)}", err=True)
