"""Shared parts of the commands: reporting errors, finding a model by its name, and parsing options.

The rest of the library, and torch, are imported where they are used: help, versions, wrong command lines and the
completion of a shell do not wait for them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import modelstate as ms
from modelstate.text_format import in_a_line, listed, printable_lines

if TYPE_CHECKING:
    import torch

    from modelstate.html.page import Page, Shown

PROBLEMS = 1
"""Exit code for problems: an error of modelstate or of the model's code, or a plan that is not ok."""
USAGE = 2
"""Exit code for a wrong command line, and for an error of a command whose exit code 1 is a result."""
PASSED_OVER = 3
"""Exit code where a file was written from an earlier step of a store, since a newer one is damaged."""
INTERRUPTED = 130
"""Exit code for an interrupt (Ctrl-C), as in a shell: 1 would say that problems were found."""

WITH_VALUES = "--no-skeleton builds the model with values in its parameters"


class Command(click.Command):
    """A command with `--json` and `--debug`, whose errors end the program with an exit code.

    Errors go to stderr, or with `--json` as a line of JSON to stdout. Their notes, and with `--debug` the traceback, go
    to stderr.
    """

    error_code = PROBLEMS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."))
        self.params.append(click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."))

    def invoke(self, ctx: click.Context) -> Any:
        """Calls the function of the command with all parameters but `--debug`."""
        assert self.callback is not None
        try:
            return ctx.invoke(self.callback, **{name: ctx.params[name] for name in ctx.params if name != "debug"})
        except (ms.ModelStateError, OSError, MemoryError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            _say(error)
        except (click.exceptions.Exit, click.Abort, click.BadParameter):
            raise
        except KeyboardInterrupt:
            if not (_has("as_json") and print_json_error(error="KeyboardInterrupt", what="interrupted")):
                print("interrupted", file=sys.stderr)
            raise click.exceptions.Exit(INTERRUPTED) from None
        except (Exception, SystemExit) as error:  # the code of the model does not decide about the exit code
            _say(error, is_unexpected=True)
        raise click.exceptions.Exit(self.error_code)


class Comparison(Command):
    """A command whose exit code 1 is a result."""

    error_code = USAGE


def _has(option: str) -> bool:
    """Whether the command that runs has a flag."""
    context = click.get_current_context(silent=True)
    return bool(context and context.params.get(option))


def _say(error: BaseException, is_unexpected: bool = False) -> None:
    if _has("debug"):
        traceback.print_exception(error)  # with the notes
    for note in () if _has("debug") else getattr(error, "__notes__", ()):
        print(in_a_line(note), file=sys.stderr)
    name, text = type(error).__name__, str(error) or type(error).__name__
    fields = {field: str(getattr(error, field, "")) for field in ("where", "what", "expected", "found", "page")}
    what, remedy = fields.pop("what") or text, getattr(error, "options", "") or str(getattr(error, "remedy", ""))
    if isinstance(error, ms.ModelStateError) and error.has_fields:
        text = with_options(error, error.text(command_line=True))
        what = text if error.problems else what
    see_where = is_unexpected and not _has("debug")
    remedy = "run it again with --debug to see where this came from" if see_where else remedy
    if _has("as_json") and print_json_error(error=name, what=what, to_do=remedy, **fields):
        return
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    text = printable_lines(text)
    print(f"error: {name}: {text}" if is_unexpected else f"error: {text}", file=sys.stderr)
    if see_where:
        print(f"  to do: {remedy}", file=sys.stderr)


def print_json_error(**fields: str) -> bool:
    """Prints an error as a line of JSON. Returns False where the standard output takes nothing."""
    import json

    names = ("error", "what", "where", "expected", "found", "to_do", "page")
    try:
        click.echo(json.dumps({name: fields.get(name) or None for name in names}))
    except BrokenPipeError:  # the reader has enough
        raise
    except OSError:
        return False
    return True


class Program(click.Group):
    """The commands. A wrong command line is reported as JSON, too, where it has `--json`."""

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **options: Any) -> Any:  # type: ignore[override]
        """Runs a command, and exits."""
        arguments = list(sys.argv[1:] if args is None else args)
        if not standalone_mode or "--json" not in arguments:
            return super().main(arguments, standalone_mode=standalone_mode, **options)
        try:
            code = super().main(arguments, standalone_mode=False, **options)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            remedy = f"{context.command_path} --help" if context else ""
            if not print_json_error(error="UsageError", what=error.format_message(), to_do=remedy):
                error.show()
            code = error.exit_code
        except click.Abort:
            code = PROBLEMS
        sys.exit(code or 0)


def echo(text: object, *, err: bool = False) -> None:
    """Prints to the standard output, or to the standard error. Raises `WriteFailedError`, as for a full disk."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:  # the reader has enough
        raise
    except OSError as error:
        raise ms.errors.WriteFailedError(
            "the output cannot be written",
            where="standard error" if err else "standard output",
            found=error,
            remedy="free space on the disk that it goes to, or direct it to another place",
        ) from error


def _working_directory() -> str:
    """The working directory; empty where it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


class _LastFolder(NamedTuple):
    """Finds modules in a folder, where no other finder has them, except those of Python, as for other systems."""

    folder: str

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        is_candidate = path is None and name not in sys.stdlib_module_names
        return PathFinder.find_spec(name, [self.folder], target) if is_candidate else None


def search_working_directory() -> None:
    """Finds modules in the working directory too, behind all others.

    A command calls this only where its arguments name a module: a folder with checkpoints may have files of any name.
    torch is imported before, which tries to import modules of other packages.
    """
    import torch  # noqa: F401

    finder = _LastFolder(_working_directory())
    if finder.folder and finder not in sys.meta_path:
        sys.meta_path.append(finder)


def user_code() -> contextlib.AbstractContextManager[object]:
    """Prints the output of code that is not of modelstate to stderr."""
    return contextlib.redirect_stdout(sys.stderr)


def model_factory(spec: str) -> Callable[[], object]:
    """Returns the callable that `package.module:factory` names, found from the working directory too.

    For a module instance, it returns a callable that returns the instance. Raises `click.BadParameter` for anything
    else.
    """
    import torch

    what = "no model: the model comes first, as package.module:factory, where factory() returns a torch.nn.Module"
    factory = named_object(spec, what)
    if isinstance(factory, torch.nn.Module):
        return lambda: factory
    if not callable(factory):
        raise click.BadParameter(
            f"{spec!r} is of type {type(factory).__name__}, "
            "and should be a function that returns a torch.nn.Module, or one itself"
        )
    return factory


def named_object(spec: str, what: str) -> object:
    """Imports the object that `package.module:name` names. `what` ends the error for a text of another form."""
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise click.BadParameter(f"{spec!r} is {what}")
    if module_name.endswith(".py") and os.path.exists(module_name):
        module_name = os.path.relpath(module_name)[: -len(".py")].replace(os.sep, ".")
        raise click.BadParameter(f"{spec!r} names a file, not a module: give {module_name}:{attribute}")
    search_working_directory()
    try:
        with user_code():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if _has("debug"):
            traceback.print_exception(error)
        here = _working_directory() or "the working directory"
        raise click.BadParameter(
            f"cannot import {module_name!r} from {here} or the installed packages: {one_line(error)}"
        ) from error
    try:
        return attrgetter(attribute)(module)
    except AttributeError as error:
        known = [name for name, value in vars(module).items() if name[0] != "_" and not inspect.ismodule(value)]
        others = f"; it has {listed(known, 8)}" if known else ""
        file = f" ({module.__file__})" if getattr(module, "__file__", None) else ""
        raise click.BadParameter(f"module {module_name!r}{file} has no {attribute!r}{others}") from error


def build_model(spec: str, factory: Callable[[], object], *, skeleton: bool) -> torch.nn.Module:
    """Builds the model, as a skeleton with its parameters on meta or with values.

    The output of the model's code goes to stderr. Raises `ModelCodeError`.
    """
    import torch

    try:
        with user_code(), ms.skeleton() if skeleton else contextlib.nullcontext():
            model = factory()
    except (Exception, SystemExit) as error:
        remedy = _factory_remedy(factory, error, skeleton)
        raise ms.errors.ModelCodeError(f"{spec} raised {one_line(error)}", remedy=remedy) from error
    if not isinstance(model, torch.nn.Module):
        raise ms.errors.ModelCodeError(
            f"{spec} gave a value of type {type(model).__name__}",
            expected="a torch.nn.Module",
            remedy="let it return the model" + (f"; if it does so otherwise, {WITH_VALUES}" if skeleton else ""),
        )
    return model


def _factory_remedy(factory: Callable[[], object], error: BaseException, skeleton: bool) -> str:
    with contextlib.suppress(ValueError):  # a builtin may have no signature
        try:
            inspect.signature(factory).bind()
        except TypeError:
            return "it must work without arguments: write a function that calls it with them, and name that"
    # torch raises no class of its own for operations that need values.
    if skeleton and "meta" in f"{error} {error.__cause__}":
        return f"it reads the values of its parameters, which have none yet: {WITH_VALUES}"
    where = "the traceback above shows where" if _has("debug") else "--debug shows where"
    return f"{where}; {WITH_VALUES}" if skeleton else where


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Raises `click.BadParameter`, which names the option, in place of an error about an argument."""
    try:
        yield
    except (ms.errors.OptionError, ms.errors.RuleError, ms.errors.UnsavableError) as error:
        where = f"{error.where}: " if error.where else ""
        found = f": {error.found}" if error.found else ""
        advice = error.options or (f"give {error.expected}" if error.expected else "")
        text = in_a_line(f"{where}{error.what}{found}" + (f"; {advice}" if advice else ""))
        raise click.BadParameter(with_options(error, text)) from error


@usage_errors()
def parse_dtype(name: str) -> torch.dtype | None:
    """Returns the floating-point dtype of a name that `dtype=` takes. Raises `click.BadParameter`."""
    from modelstate.torch_compat.dtypes import floating_dtype

    return floating_dtype(name)


def parse_size(text: str) -> int:
    """Returns a number of bytes: 512MB and 5GB count by 1,000, 5GiB by 1,024; 64B. Raises `click.BadParameter`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    nbytes = 0
    if re.fullmatch(r"\s*(?=.*[1-9])\d+(\.\d+)?\s*", text):
        number = text.strip()
        raise click.BadParameter(f"{text!r} has no unit: give {number}GB, {number}MB, {number}kB or {number}B")
    if match and not (match[3] and not match[2]):
        nbytes = int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " "))
    if nbytes < 1:
        raise click.BadParameter(f"{text!r} is not a number of bytes: give 512MB, 5GB, 5GiB, ...")
    return nbytes


@usage_errors()
def parse_format(text: str | None, target: str) -> str:
    """Returns the format of a file to write: that of its suffix, or else the given one.

    Raises `click.BadParameter` for an unknown suffix, and if suffix and format contradict each other.
    """
    from modelstate.checkpoint.write import format_of

    return format_of(target, text)


@usage_errors()
def parse_device(name: str) -> torch.device | None:
    """Returns the device with this name. Raises `click.BadParameter` if this machine does not have it."""
    from modelstate.planning.options import device_with_memory

    return device_with_memory(name)


def with_options(error: BaseException, text: str) -> str:
    """Names the options of the command that runs in place of the arguments that an error is about."""
    context = click.get_current_context(silent=True)
    if context is not None and isinstance(error, ms.errors.OptionError):
        for parameter in context.command.params:
            if parameter.name in error.names:
                text = text.replace(f"{parameter.name}=", parameter.opts[0])
    return text


def one_line(error: BaseException) -> str:
    """Returns an error in one line."""
    if isinstance(error, ms.ModelStateError):
        return in_a_line(str(error))
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def show(result: Any, as_json: bool, html: str | None = None, text: str | None = None) -> None:
    """Prints a result as JSON or as text, and writes its page where `--html` asks for it."""
    write_page(html, result)
    echo(result.to_json() if as_json else str(result) if text is None else text)


def write_page(path: str | None, result: Shown | Page) -> None:
    """Writes the page of a result, where `--html` asks for it."""
    if path is not None:
        from modelstate.io.atomic import atomic_file
        from modelstate.io.files import SourceFile, local_path

        try:
            path = local_path(path)
        except ms.errors.SourceTypeError as error:
            raise ms.errors.UnsavableError(
                "this file is written on this machine only",
                where=error.where,
                found=error.what,
                remedy="give the path of a file; for a URL, write there, and copy it to its place",
            ) from error
        make_parents(path)
        if os.path.isfile(path):
            with SourceFile(path) as file:
                beginning = file.head[:15]
            if beginning and beginning.lower() != b"<!doctype html>":
                raise ms.errors.UnsavableError(
                    "--html replaces web pages only, and this file is not one",
                    where=path,
                    remedy="give the path of a new file",
                )
        with atomic_file(path, overwrite=True) as output:
            output.append(result.to_html().encode())


def terminal_width() -> int | None:
    """The width of the terminal; None where the output goes elsewhere."""
    from modelstate.process import is_terminal

    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def make_parents(target: str) -> None:
    """Creates the directory of a file that is going to be written; nothing for a URL of a bucket."""
    from modelstate.io.atomic import make_directory, write_errors
    from modelstate.io.files import local_path
    from modelstate.remote.location import is_remote

    if not is_remote(target):
        # What is not a path: what writes the file says so.
        with contextlib.suppress(ms.errors.SourceTypeError), write_errors(target):
            make_directory(os.path.dirname(local_path(target)))
