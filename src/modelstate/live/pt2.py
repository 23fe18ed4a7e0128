"""Program files: what stands in a `.pt2`, without running any of it.

A `.pt2` is a zip archive whose records are stored as they are. A compressed record is refused: torch does not write
such, and it could stand for any amount of memory.
"""

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from modelstate.errors import LiveTargetError, OpenError
from modelstate.live.manifest import NAME, Manifest
from modelstate.read import torch_zip
from modelstate.read.paths import open_regular
from modelstate.read.source_file import SourceFile
from modelstate.read.stamp import Stamp, stamps_of
from modelstate.read.zip_directory import ZipDirectory

_REMEDY = "give a .pt2 that modelstate.export, torch.export.save or AOTInductor has written"
_LIBRARIES = "data/aotinductor/"
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """A `.pt2`, of which the directory and the manifest have been read."""

    path: str
    kind: Literal["exported", "aoti"]
    model: str
    """The name of the package's model."""
    manifest: Manifest | None
    """None where somebody else has written it."""
    stamp: Stamp
    """Of the file that has been looked into."""

    def check_unchanged(self) -> None:
        """Raises `LiveTargetError` where another file, or another content, has come to the path since."""
        if stamps_of([self.path])[self.path] != self.stamp:
            raise LiveTargetError(
                "the program file has been replaced, or changed, while it was opened",
                where=self.path,
                remedy="open it again, when nothing writes to it any more",
            )

    def program(self) -> Any:
        """The exported program. It is read by torch, which trusts the file."""
        import torch.export

        try:
            with os.fdopen(open_regular(self.path)[0], "rb") as file:
                return torch.export.load(file)
        except Exception as error:
            raise _unreadable(self.path, error) from error

    def weights(self) -> dict[str, torch.Tensor] | None:
        """The constants that a package has beside its library, by the names that the library has for them.

        Tied ones are one tensor. None where it has none beside it.
        """
        with _opened(self.path) as archive:
            root = _root(archive)
            place = f"{root}{_LIBRARIES}{self.model}/weights_config.json"
            if place not in archive.records:
                return None
            try:
                found: dict[tuple[Any, ...], torch.Tensor] = {}
                state: dict[str, torch.Tensor] = {}
                for name, (file, shape, stride, offset) in json.loads(archive.read(place)).items():
                    key = (file, tuple(shape), tuple(stride), offset)
                    if key not in found:
                        whole = _weight(archive, f"{root}data/weights/{file}")
                        found[key] = _own(torch.as_strided(whole.detach(), shape, stride, offset))
                    state[name] = found[key]
                return state
            except OpenError:
                raise
            except Exception as error:
                raise _unreadable(self.path, error) from error

    def library(self, folder: str) -> str:
        """Unpacks the library of a package, and returns where it is."""
        with _opened(self.path) as archive:
            folder_in_it = f"{_root(archive)}{_LIBRARIES}{self.model}/"
            found = [name for name in archive.records if name.startswith(folder_in_it) and name.endswith(".so")]
            if len(found) != 1:
                raise _unsupported(self.path, f"{len(found)} libraries")
            place = os.path.join(folder, "model.so")
            with open(place, "wb") as file:
                for chunk in _chunks(archive, found[0]):
                    file.write(chunk)
            return place


def read_program_file(path: str) -> ProgramFile:
    """Looks into a program file. Raises `LiveTargetError`, `OpenError` (`ManifestError`) and `ReadFailedError`."""
    with _opened(path) as archive:
        stamp = stamps_of([path])[path]
        root = _root(archive)
        place = f"{root}extra/{NAME}"
        manifest = None
        if place in archive.records:
            try:
                text = archive.read(place).decode()
            except UnicodeDecodeError as error:
                raise _unreadable(path, error) from error
            manifest = Manifest.from_json(text, path)
        below = {name.removeprefix(root) for name in archive.records}
    models = {name.removeprefix(_LIBRARIES).split("/")[0] for name in below if name.startswith(_LIBRARIES)}
    if len(models) > 1:
        raise _unsupported(path, f"several models: {', '.join(sorted(models))}")
    if models and (manifest is None or manifest.kind == "aoti"):
        return ProgramFile(path, "aoti", models.pop(), manifest, stamp)
    if any(name.startswith("models/") or name == "serialized_exported_program.json" for name in below):
        return ProgramFile(path, "exported", "model", manifest, stamp)
    raise _no_program(path)


@contextmanager
def _opened(path: str) -> Iterator[ZipDirectory]:
    """The archive, none of whose records is compressed or encrypted. Raises `OpenError`, `ReadFailedError`."""
    with SourceFile(path) as file:
        if not torch_zip.matches(file.read(0, min(file.nbytes, 4), "its beginning")):
            raise _no_program(path)
        archive = ZipDirectory(file)
        _check_stored(archive)
        yield archive


def _check_stored(archive: ZipDirectory) -> None:
    for name in archive.records:
        archive.region(name)  # raises for a record that is compressed or encrypted


def _chunks(archive: ZipDirectory, name: str) -> Iterator[bytes]:
    """A record of any size, piece by piece."""
    record = archive.records[name]
    for start in range(0, record.nbytes, _CHUNK_BYTES):
        yield archive.file.read(record.start + start, min(_CHUNK_BYTES, record.nbytes - start), name)


def _weight(archive: ZipDirectory, name: str) -> torch.Tensor:
    """The tensor that a record holds, which is a file of torch.save itself."""
    nbytes = archive.region(name).nbytes
    section = archive.file.section(archive.records[name].start, nbytes, name)
    if torch_zip.matches(section.read(0, min(4, nbytes), name)):
        _check_stored(ZipDirectory(section))
    found: torch.Tensor = torch.load(io.BytesIO(b"".join(_chunks(archive, name))), weights_only=True)
    return found


def _root(archive: ZipDirectory) -> str:
    """The folder that everything is in; empty for files of older versions of torch."""
    names = list(archive.records)
    folder = names[0].split("/")[0] + "/" if names else ""
    return folder if all(name.startswith(folder) for name in names) else ""


def _own(value: torch.Tensor) -> torch.Tensor:
    """In a storage of its own, with the strides that it has."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.copy_(value)


def _no_program(path: str) -> LiveTargetError:
    return LiveTargetError("this file is no program", where=path, expected="a .pt2", remedy=_REMEDY)


def _unreadable(path: str, error: Exception) -> LiveTargetError:
    return LiveTargetError(
        "the program file cannot be read", where=path, found=f"{type(error).__name__}: {error}", remedy=_REMEDY
    )


def _unsupported(path: str, what: str) -> LiveTargetError:
    return LiveTargetError(
        "the package has a form that cannot be served in versions",
        where=path,
        expected="one model, in one library",
        found=what,
        remedy="write it with modelstate.export(module, args, path, kind='aoti')",
    )
