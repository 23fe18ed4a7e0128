"""Program files: what stands in a `.pt2`, without running any of it."""

import io
import json
import os
import zipfile
from dataclasses import dataclass
from typing import Any, Literal

import torch

from modelstate.errors import LiveTargetError, SourceAccessError, SourceNotFoundError
from modelstate.live.manifest import NAME, Manifest
from modelstate.read.stamp import Stamp, stamps_of

_REMEDY = "give a .pt2 that modelstate.export, torch.export.save or AOTInductor has written"
_LIBRARIES = "data/aotinductor/"


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
            with open(self.path, "rb") as file:
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
            if place not in archive.namelist():
                return None
            try:
                found: dict[tuple[Any, ...], torch.Tensor] = {}
                state: dict[str, torch.Tensor] = {}
                for name, (file, shape, stride, offset) in json.loads(archive.read(place)).items():
                    key = (file, tuple(shape), tuple(stride), offset)
                    if key not in found:
                        whole = torch.load(io.BytesIO(archive.read(f"{root}data/weights/{file}")), weights_only=True)
                        found[key] = _own(torch.as_strided(whole.detach(), shape, stride, offset))
                    state[name] = found[key]
                return state
            except Exception as error:
                raise _unreadable(self.path, error) from error

    def library(self, folder: str) -> str:
        """Unpacks the library of a package, and returns where it is."""
        with _opened(self.path) as archive:
            names = [
                name for name in archive.namelist() if name.startswith(f"{_root(archive)}{_LIBRARIES}{self.model}/")
            ]
            found = [name for name in names if name.endswith(".so")]
            if len(found) != 1:
                raise _unsupported(self.path, f"{len(found)} libraries")
            place = os.path.join(folder, "model.so")
            with open(place, "wb") as file:
                file.write(archive.read(found[0]))
            return place


def read_program_file(path: str) -> ProgramFile:
    """Looks into a program file. Raises `LiveTargetError`, `OpenError` and `ManifestError`."""
    with _opened(path) as archive:
        stamp = stamps_of([path])[path]
        root = _root(archive)
        names = archive.namelist()
        place = f"{root}extra/{NAME}"
        manifest = None
        if place in names:
            try:
                text = archive.read(place).decode()
            except (OSError, ValueError, zipfile.BadZipFile) as error:
                raise _unreadable(path, error) from error
            manifest = Manifest.from_json(text, path)
        below = {name.removeprefix(root) for name in names}
    models = {name.removeprefix(_LIBRARIES).split("/")[0] for name in below if name.startswith(_LIBRARIES)}
    if len(models) > 1:
        raise _unsupported(path, f"several models: {', '.join(sorted(models))}")
    if models and (manifest is None or manifest.kind == "aoti"):
        return ProgramFile(path, "aoti", models.pop(), manifest, stamp)
    if any(name.startswith("models/") or name == "serialized_exported_program.json" for name in below):
        return ProgramFile(path, "exported", "model", manifest, stamp)
    raise LiveTargetError("this file is no program", where=path, expected="a .pt2", remedy=_REMEDY)


def _opened(path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise SourceNotFoundError("there is no such program file", where=path) from error
    except PermissionError as error:
        raise SourceAccessError("the program file may not be read", where=path) from error
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from error


def _root(archive: zipfile.ZipFile) -> str:
    """The folder that everything is in; empty for files of older versions of torch."""
    names = archive.namelist()
    folder = names[0].split("/")[0] + "/" if names else ""
    return folder if all(name.startswith(folder) for name in names) else ""


def _own(value: torch.Tensor) -> torch.Tensor:
    """In a storage of its own, with the strides that it has."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.copy_(value)


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
