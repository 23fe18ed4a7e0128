"""`modelstate.save`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from modelstate.codec.walk import is_unicode
from modelstate.errors import (
    ModelCodeError,
    ModelStateError,
    OptionError,
    SaveTargetError,
    SourceTypeError,
    UnsavableError,
)
from modelstate.read.checkpoint import Checkpoint
from modelstate.read.json_text import quote
from modelstate.read.manifest import KEY, check_size
from modelstate.read.paths import local_path
from modelstate.read.tree import EXTRA_STATE
from modelstate.words import size
from modelstate.write.atomic import atomic_file, check
from modelstate.write.manifest import Draft, draft
from modelstate.write.safetensors import data_of, header_of, in_file_order, listed, why_not


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save has written. Made by `modelstate.save`."""

    path: str
    """The file."""
    tensors: int
    """Names of tensors that the file has, tied ones under each of theirs."""
    bytes: int
    """Bytes of the file."""
    seconds: float
    """From the call to the return, when all of it is on the disk."""

    def __str__(self) -> str:
        return f"{self.path}: {self.tensors} tensors, {size(self.bytes)} in {self.seconds:.3f} s"


def save(
    target: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    schema: str | None = None,
    overwrite: bool = True,
) -> SaveReport:
    """Saves a module, or a state dict, as a safetensors file, and returns when it is on the disk.

    The file is at the path in full or not at all: it is written beside it and renamed. Every tool that reads
    safetensors reads its tensors; `modelstate.open` also gives back what the format has no word for: tied tensors,
    which are written once, under all their names, torch's versions of modules, and what `get_extra_state` returned.
    Tensors are written from their own memory, one after the other; of a view, what it shows.

    `schema` is a text of yours, not empty, by which the file says how its state is to be understood; it comes back in
    `Checkpoint.metadata`. Without `overwrite` a file that is there stays.

    Raises `SaveTargetError` for what is no module or flat state dict, and for a path where no file can be,
    `UnsavableError` for tensors and names that the format does not have, all of them at once,
    `UnsupportedValueError` for extra state without an encoding (see `register_codec`), `ModelCodeError` where the
    module's own `state_dict` raises, `TargetExistsError`, and `WriteFailedError` for an I/O error. Whatever raises,
    the old file is as it was and nothing new is left.
    """
    begin = perf_counter()
    if schema is not None and (not isinstance(schema, str) or not schema):
        raise OptionError("schema= is a text", expected='such as "2.0"', found=repr(schema))
    where = _path(path)
    check(where, overwrite=overwrite)
    made, names = _draft(_state_of(target), where)
    metadata = {"format": "pt", KEY: made.text(schema)}
    try:
        check_size(metadata[KEY])
        tensors = in_file_order(made.tensors)
        header = header_of(tensors, metadata)
    except ValueError as error:
        raise UnsavableError(
            "this is more than the header of a safetensors file holds",
            where=where,
            found=error,
            remedy="save the parts in files of their own; large values are better kept as tensors or arrays",
        ) from error
    with atomic_file(where, overwrite=overwrite) as file:
        file.write(header)
        for data in data_of(tensors):
            file.write(data)
    return SaveReport(where, names, file.nbytes, perf_counter() - begin)


def _path(path: object) -> str:
    given = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(given, str):
        raise SaveTargetError("a file is saved to a path", expected="a str or a pathlib.Path", found=repr(path)[:80])
    try:
        return local_path(given)
    except SourceTypeError as error:
        remedy = "give the path of a file; save there, and copy it to its place"
        raise SaveTargetError(
            "a file cannot be put here", where=error.where, found=error.what, remedy=remedy
        ) from error


def _state_of(target: object) -> Mapping[Any, Any]:
    state = _state_dict(target) if isinstance(target, nn.Module) else target
    if isinstance(state, Mapping) and not isinstance(state, Checkpoint):
        return state
    raise SaveTargetError(
        "this is nothing that can be saved",
        expected="a module, or a state dict",
        found=f"{type(state).__module__}.{type(state).__qualname__}",
        remedy="give {name: checkpoint.tensor(name) for name in checkpoint}" if isinstance(state, Checkpoint) else "",
    )


def _state_dict(module: nn.Module) -> object:
    try:
        return module.state_dict()
    except ModelStateError:
        raise
    except Exception as error:
        what = f"the module's own state_dict raised {type(error).__name__}"
        raise ModelCodeError(what, where=type(module).__qualname__, found=error) from error


def _draft(state: Mapping[Any, Any], where: str) -> tuple[Draft, int]:
    """What goes into the file, and how many names of tensors the state has."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    wrong: dict[object, str] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(name, str) and is_unicode(name) and name.rpartition(".")[2] == EXTRA_STATE:
            values[name] = value
        else:
            wrong[name] = f"{type(value).__qualname__}, not a tensor"
    if wrong:
        raise SaveTargetError(
            f"{len(wrong)} of {len(state)} values are neither tensors nor extra state",
            where=where,
            expected=f"a flat mapping from names to tensors; other values under names that end in {quote(EXTRA_STATE)}",
            found=listed(wrong),
            remedy="save each state dict of a nested checkpoint to a file of its own",
        )
    _check_tensors(tensors, where)
    # What conjugates or negates when it is read has the memory of what does not, and is not tied to it.
    tensors = {name: tensor.resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    versions = getattr(state, "_metadata", None)
    return draft(tensors, values, versions if isinstance(versions, Mapping) else None, where), len(tensors)


def _check_tensors(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    wrong = {name: problem for name, tensor in tensors.items() if (problem := why_not(name, tensor))}
    if wrong:
        raise UnsavableError(
            f"{len(wrong)} of {len(tensors)} tensors cannot be stored in a safetensors file",
            where=where,
            found=listed(wrong),
            remedy="convert them, or leave them out; a subclass is saved as the plain tensors that it is made of",
        )
