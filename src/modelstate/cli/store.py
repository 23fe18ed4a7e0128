"""`modelstate store`: lists, verifies and prunes the checkpoints of a store, and writes an object as a file."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

import modelstate as ms
from modelstate.cli import options
from modelstate.cli.common import (
    PASSED_OVER,
    PROBLEMS,
    Command,
    Comparison,
    echo,
    make_parents,
    parse_format,
    usage_errors,
    write_page,
)
from modelstate.text_format import columns, count, in_a_line, size

if TYPE_CHECKING:
    from modelstate.comparison.result import Diff
    from modelstate.store.directory import StepEntry, StepIndex

_directory = click.argument(
    "directory", metavar="DIR", help="A store: the directory of a modelstate.Store, or its URL in a bucket."
)
_step = click.option("--step", metavar="STEP", type=int, help="Only this step.")


@click.group()
def store() -> None:
    """List, verify, prune and restore the steps of a store."""


def is_store(path: str) -> bool:
    """Whether a directory, or a prefix of a bucket, is a store. False also where this cannot be found out.

    Raises `ReadFailedError` for a bucket whose server does not answer, so that no command waits for it again.
    """
    from modelstate.io.files import local_path
    from modelstate.remote.location import is_remote
    from modelstate.store.backend import STORE_FILE
    from modelstate.store.directory import StepIndex

    try:
        if is_remote(path):
            return _is_in_bucket(path) and bool(StepIndex(path).places())
        directory = local_path(path)
        return os.path.isfile(os.path.join(directory, STORE_FILE)) or bool(StepIndex(directory).places())
    except (OSError, ms.ModelStateError) as error:
        if is_remote(path) and isinstance(error, ms.errors.ReadFailedError):
            raise
        return False


def _is_in_bucket(url: str) -> bool:
    """Whether a URL is of a kind of place that can have a store."""
    from modelstate.remote.location import locate
    from modelstate.remote.upload import WRITABLE

    return locate(url).scheme in WRITABLE


def _index(path: str, cache: ms.Cache | None = None) -> StepIndex:
    """Returns the index of the store in a directory. It needs no torch, and creates nothing.

    `cache` keeps what is read of a bucket.

    Raises `SourceTypeError` for a file and a URL of another place, `SourceNotFoundError` where there is no store, and
    `ReadFailedError` for a directory that cannot be read.
    """
    from modelstate.io.files import local_path, not_found
    from modelstate.remote.location import is_remote, locate
    from modelstate.store.backend import STORE_FILE
    from modelstate.store.directory import StepIndex

    is_url = is_remote(path)
    if is_url and not _is_in_bucket(path):
        raise ms.errors.SourceTypeError(
            "a store is a directory, or a prefix of a bucket",
            where=locate(path).url,
            expected="a path, or s3://, gs:// or az://",
            remedy="modelstate verify and inspect read one checkpoint at a URL",
        )
    directory = locate(path.rstrip("/")).url if is_url else local_path(path)
    if not is_url and not os.path.exists(directory):
        raise not_found(directory, path)
    index = StepIndex(directory, cache=cache)
    try:
        if not is_url and not os.path.isdir(directory):
            raise ms.errors.UnsavableError("a store is a directory")
        has_steps = bool(index.all_revisions())  # raises where the directory cannot be read
    except ms.errors.UnsavableError as error:
        raise ms.errors.SourceTypeError(
            "a store is a directory, and this is a file",
            where=directory,
            expected="the directory of a modelstate.Store",
            remedy=f"modelstate inspect {shlex.quote(path)} shows what is in a file",
        ) from error
    if not (has_steps or is_store(path)):
        raise ms.errors.SourceNotFoundError(
            "this is not a store of checkpoints",
            where=directory,
            expected=f"{STORE_FILE} and steps, as modelstate.Store writes them",
            remedy="modelstate inspect shows other checkpoints",
        )
    return index


@store.command("ls", cls=Command)
@_directory
@options.html
def list_steps(directory: str, as_json: bool, html: str | None) -> None:
    """Show the checkpoints of a store.

    No tensor is read. Exit code 1 if one is known to be damaged, not readable, or of a newer version or another store.
    """
    from modelstate.store.retention import infos_page

    index = _index(directory)
    infos = [entry.info for entry in index.read_all(index.steps())]
    write_page(html, infos_page(directory, infos))
    if as_json:
        echo(json.dumps([_fields(info) for info in infos], indent=1))
    elif infos:
        rows = [["step", "saved", "bytes", "", "metrics"], *map(_row, infos)]
        if any(info.patches for info in infos):
            kinds = [f"delta, {count(info.patches, 'layer')}" if info.patches else "full" for info in infos]
            of_deltas = [
                ["written", ""],
                *([size(info.written_bytes), kind] for info, kind in zip(infos, kinds, strict=True)),
            ]
            rows = [[*row[:3], *more, *row[3:]] for row, more in zip(rows, of_deltas, strict=True)]
        echo(columns(rows, right=(0, 2)))
    else:
        echo("no checkpoints")
    if not all(info.intact for info in infos):
        raise click.exceptions.Exit(PROBLEMS)


def _fields(info: ms.store.CheckpointInfo) -> dict[str, object]:
    # NaN and infinity are text, because JSON does not have them.
    metrics = {name: value if value - value == 0 else str(value) for name, value in info.metrics.items()}
    return {
        "step": info.step,
        "time": info.time,
        "metrics": metrics,
        "pinned": info.pinned,
        "intact": info.intact,
        "problem": info.problem or None,
        "bytes": info.nbytes,
        "written": info.written_bytes,
        "patches": info.patches,
        "path": info.path,
    }


def _row(info: ms.store.CheckpointInfo) -> list[str]:
    from modelstate.store.retention import saved_at

    metrics = [f"{name}={value:.6g}" for name, value in info.metrics.items()]
    return [str(info.step), saved_at(info), size(info.nbytes), info.state, " ".join(metrics)]


@store.command(cls=Command)
@_directory
@_step
def verify(directory: str, step: int | None, as_json: bool) -> None:
    """Compare every byte of checkpoints with its digest.

    Exit code 1 if one is damaged.
    """
    verify_steps(directory, step, as_json=as_json)


def verify_steps(directory: str, step: int | None = None, *, cache: ms.Cache | None = None, as_json: bool) -> None:
    """Prints a line for each step as soon as it has been read; exits with 1 if one of them is damaged.

    A line of JSON has the name of what was read, its bytes, and the problem or null.

    Another process may delete and save steps meanwhile. If no step could be read, the new ones are read.
    """
    from modelstate.store.backend import STORE_FILE
    from modelstate.store.directory import store_file_problem

    def say(what: str | int, nbytes: int, problem: str) -> None:
        if as_json:
            echo(json.dumps({"what": what, "bytes": nbytes, "problem": problem or None}))
        else:
            name = f"step {what}" if isinstance(what, int) else what
            echo(f"{name}: {in_a_line(problem) if problem else f'{size(nbytes)}, whole'}")

    index = _index(directory, cache)
    read = problems = 0
    if step is None and (problem := store_file_problem(directory)):
        problems += 1
        say(STORE_FILE, 0, problem)
    while not read:
        infos = {entry.place.step: entry.info for entry in index.read_all(index.steps())}
        if not infos and step is None:
            echo("no checkpoints", err=as_json)
            break
        for number in infos if step is None else (step,):
            try:
                problem = index.problem_of(index.saves(number)[0], None)
            except ms.errors.StepNotFoundError:
                if step is not None:
                    index.step(step)  # raises where it has been removed, and not where it was replaced
                else:
                    echo(f"step {number}: removed meanwhile", err=as_json)
                continue
            read += 1
            problems += bool(problem)
            say(number, infos[number].nbytes if number in infos else 0, problem)
    if problems:
        raise click.exceptions.Exit(PROBLEMS)


@store.command("diff", cls=Comparison)
@_directory
@click.argument("a", type=int, help="The first step.")
@click.argument("b", type=int, help="The second step.")
@options.comparing
@options.html
def compare_steps(directory: str, a: int, b: int, **comparing: Any) -> Diff:
    """Compare two checkpoints of a store, with all their objects.

    The output is that of `modelstate diff`.
    Exit code 0 if both are equal, 1 if they differ, 2 if an error occurs or the command line is wrong.
    """
    _index(directory)
    return ms.Store(directory).diff(a, b, **comparing)


@store.command(cls=Command)
@_directory
@click.option("--keep-last", "last", metavar="N", type=click.IntRange(min=1), help="Keep the last N.")
@click.option("--every-steps", metavar="N", type=click.IntRange(min=1), help="Keep the first of each N steps.")
@click.option("--every-hours", metavar="H", type=float, help="Keep the first of each H hours.")
@click.option("--best", metavar="N", type=click.IntRange(min=1), help="Keep the N with the best metric.")
@click.option("--metric", metavar="NAME", help="The metric by which --best chooses the step.")
@click.option("--max", "maximize", is_flag=True, help="The highest metric is the best, not the lowest.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
def prune(directory: str, maximize: bool, dry_run: bool, as_json: bool, **keep: Any) -> None:
    """Remove the checkpoints that none of the given options keeps.

    At least one of --keep-last, --every-steps, --every-hours and --best is needed.
    Pinned checkpoints and the newest intact one always stay.
    """
    if all(value is None for name, value in keep.items() if name != "metric"):
        raise click.BadParameter("say what is kept: --keep-last, --every-steps, --every-hours or --best")
    if (keep["best"] is None) is not (keep["metric"] is None):
        raise click.BadParameter("--best and --metric go together, such as --best 3 --metric loss")
    with usage_errors():
        policy = ms.Keep(**keep, mode="max" if maximize else "min")
    _index(directory)
    with ms.Store(directory) as opened:
        infos = opened.infos()
        gone = opened.prune(policy, dry_run=dry_run)
    freed = sum(info.nbytes for info in infos if info.step in gone)
    if as_json:
        kept = [info.step for info in infos if info.step not in gone]
        fields = {"removed": list(gone), "kept": kept, "bytes": freed, "dry_run": dry_run}
        echo(json.dumps(fields, indent=1))
        return
    removed = "would be removed" if dry_run else "removed"
    echo(f"{removed}: {_listed(gone)}" if gone else "nothing to remove")
    echo(f"kept: {_listed(info.step for info in infos if info.step not in gone)}")
    if gone:
        echo(f"{size(freed)} in their files; data that other steps share stays on the disk")


def _listed(steps: Iterable[int]) -> str:
    numbers = list(map(str, steps))
    return count(len(numbers), "step") + (f": {', '.join(numbers)}" if numbers else "")


@store.command(cls=Command)
@_directory
@click.argument("path", help="The file to write.")
@_step
@click.option("--object", "name", metavar="NAME", default="model", help="The object of the checkpoint.")
@options.file_format
@options.dtype
@options.shard_size
@options.overwrite
def restore(
    directory: str, path: str, step: int | None, name: str, format: str | None, as_json: bool, **writing: Any
) -> None:
    """Write one object of a checkpoint as a file of its own.

    By default the newest intact checkpoint is used. Its bytes are compared with their digests first. Exit code 3 if a
    newer one was passed over. An existing file is not changed, unless --overwrite is given.
    """
    writing["format"] = parse_format(format, path)
    index = _index(directory)
    make_parents(path)

    def attempt(save: StepEntry) -> tuple[int, ms.SaveReport]:
        with index.whole(save, None).open_object(name) as checkpoint:
            return save.place.step, ms.convert_checkpoint(checkpoint, path, **writing)

    (number, report), found = index.first_usable("latest" if step is None else step, attempt, warns=False)
    skipped = {newer: in_a_line(problem) for newer, problem in found.items()}
    for problem in skipped.values():
        echo(problem, err=True)
    if as_json:
        of_steps = {"step": number, "skipped": [{"step": n, "problem": skipped[n]} for n in skipped]}
        echo(json.dumps({**json.loads(report.to_json()), **of_steps}, indent=2))
    else:
        echo(f"step {number}: {report}")
    if skipped:
        raise click.exceptions.Exit(PASSED_OVER)
