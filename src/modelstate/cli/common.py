"""What the commands share: how they fail, and how they find a model."""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from operator import attrgetter

import torch
import typer

import modelstate as ms

PROBLEMS = 1
"""Exit code where the work found problems: an error of modelstate, of the model's code, or a plan that is not ok."""
USAGE = 2
"""Exit code where the command line itself is wrong."""


class FactoryError(Exception):
    """The factory that was named raised, or gave no module."""


@contextlib.contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Errors go to stderr as text, with a traceback where `debug` asks for it, and end the program."""
    try:
        yield
    except (ms.ModelStateError, FactoryError, OSError, MemoryError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        _say(error, debug)
        raise typer.Exit(PROBLEMS) from None
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        _say(error, debug, kind=True)
        if not debug:
            print("  to do: run it again with --debug to see where this came from", file=sys.stderr)
        raise typer.Exit(PROBLEMS) from None


def _say(error: BaseException, debug: bool, kind: bool = False) -> None:
    sys.stdout.flush()
    if debug:
        traceback.print_exception(error)
    text = str(error) or type(error).__name__
    print(f"error: {type(error).__name__}: {text}" if kind else f"error: {text}", file=sys.stderr)


def model_factory(spec: str, debug: bool = False) -> Callable[[], object]:
    """The callable that `package.module:factory` names, found from the working directory too.

    Raises `typer.BadParameter` where the text does not lead to one.
    """
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise typer.BadParameter(
            f"{spec!r} is no model: give package.module:factory, where factory() returns a torch.nn.Module"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        raise typer.BadParameter(
            f"cannot import {module_name!r} from {os.getcwd()} or the installed packages: {_one_line(error)}"
        ) from error
    try:
        factory = attrgetter(attribute)(module)
    except AttributeError as error:
        callables = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        known = f"; it has {', '.join(callables[:8])}" if callables else ""
        raise typer.BadParameter(f"module {module_name!r} has no {attribute!r}{known}") from error
    if not callable(factory):
        raise typer.BadParameter(f"{spec!r} is a {type(factory).__name__}, and should be callable without arguments")
    made: Callable[[], object] = factory
    return made


def build_model(spec: str, debug: bool = False, *, initialised: bool = False) -> torch.nn.Module:
    """The model that the factory makes, with its parameters on meta unless they are to be `initialised`.

    What the model's code prints goes to stderr.
    """
    factory = model_factory(spec, debug)
    how = contextlib.nullcontext() if initialised else ms.skeleton()
    try:
        with contextlib.redirect_stdout(sys.stderr), how:
            model = factory()
    except Exception as error:
        raise FactoryError(f"{spec} raised {_one_line(error)}\n  to do: {spec} must work without arguments") from error
    if not isinstance(model, torch.nn.Module):
        raise FactoryError(f"{spec} gave a {type(model).__name__}\n  expected: a torch.nn.Module")
    return model


def parse_dtype(name: str | None) -> torch.dtype | None:
    """A floating dtype by torch's name for it, with or without `torch.`."""
    if name is None:
        return None
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise typer.BadParameter(f"{name!r} is no dtype of torch: give float32, bfloat16, float16, ...")
    return dtype


def parse_device(name: str | None) -> torch.device | None:
    """A device by torch's name for it."""
    if name is None:
        return None
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(f"{name!r} is no device of torch: give cpu, cuda, cuda:1, ...") from error


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
