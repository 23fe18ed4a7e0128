"""Program files, `.pt2`: their entries, read without running them, and our manifest within.

Its fields: `format` and `version` of this description; the versions of `modelstate` and `torch` that wrote it; `kind`;
`tensors`, each with `name`, `shape`, `dtype`, `stride`, `role`, `mutable` and the `alias` that it is tied to; `names`,
the map of names, or `names_reason`, why there is none; `extra_state`; `inputs`, for a package; `unseen`.

A `.pt2` is a zip archive whose records are stored as they are. A compressed record is refused: torch does not write
such, and it could stand for any amount of memory.
"""

import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from modelstate.errors import LiveTargetError, ManifestError, NameMapError, NewerManifestError, OpenError
from modelstate.formats import torch_zip
from modelstate.formats.manifest import check_size
from modelstate.formats.zip_directory import ZipDirectory
from modelstate.io.files import FileFingerprint, SourceFile, current_fingerprints, open_regular
from modelstate.serve.state_names import NameMap
from modelstate.text_format import size
from modelstate.version import __version__

NAME = "modelstate.json"
"""The extra file of the archive."""
_FORMAT = "modelstate-program"
_VERSION = 1

Kind = Literal["exported", "aoti"]


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """A tensor of a program."""

    name: str
    """Its path in the module tree that runs."""
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    """In elements."""
    role: Literal["parameter", "buffer", "hidden"]
    """ "hidden" is a buffer that is in no state dict."""
    mutable: bool
    """Whether requests change it, as far as the inputs of the export tell."""
    alias: str
    """The first name of the tensor: another one where it is tied."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `modelstate.export` has written: the weights of a program, each of which can be swapped."""

    kind: Kind
    tensors: tuple[ProgramTensor, ...]
    names: NameMap | None
    """From the names of the module's `state_dict()`; None where no map can say what its hooks do."""
    names_reason: str
    """Why there is no map; empty where there is one."""
    extra_state: tuple[str, ...]
    """Names of the state dict that hold no tensors. A program has none of it."""
    unseen: tuple[str, ...]
    """Tensors whose change no answer shows, on the inputs of the export: unused ones, most often."""
    torch_version: str
    inputs: Mapping[str, Any] | None = None
    """What a package has to be called with; None where the program itself says that."""

    def __str__(self) -> str:
        weights = {one.alias: one for one in self.tensors if one.role != "hidden"}
        lines = [f"{self.kind}: {len(weights)} weights, {size(sum(one.nbytes for one in weights.values()))}"]
        if self.unseen:
            lines.append(f"  no answer shows a change of {', '.join(self.unseen[:8])}")
        if self.names is None:
            lines.append(f"  no map of names: {self.names_reason}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "modelstate": __version__,
                "torch": self.torch_version,
                "kind": self.kind,
                "tensors": [asdict(one) for one in self.tensors],
                "names": None if self.names is None else json.loads(self.names.to_json()),
                "names_reason": self.names_reason,
                "extra_state": list(self.extra_state),
                "unseen": list(self.unseen),
                "inputs": self.inputs,
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str, where: str) -> "Manifest":
        """What `to_json` has written. Raises `ManifestError`, and `NewerManifestError`."""
        try:
            check_size(text)
            found = json.loads(text)
            if found["format"] != _FORMAT:
                raise ValueError(f"format {found['format']!r}")
            if type(found["version"]) is not int or found["version"] > _VERSION:
                raise NewerManifestError(
                    "the program was written by a newer modelstate",
                    where=where,
                    expected=f"version {_VERSION} or before",
                    found=f"version {found['version']!r}, of modelstate {found.get('modelstate')!r}",
                    remedy="update modelstate",
                )
            if found["kind"] not in ("exported", "aoti"):
                raise ValueError(f"kind {found['kind']!r}")
            names = found["names"]
            return cls(
                found["kind"],
                _tensors(found["tensors"]),
                None if names is None else NameMap.from_json(json.dumps(names)),
                str(found["names_reason"]),
                tuple(map(str, found["extra_state"])),
                tuple(map(str, found["unseen"])),
                str(found["torch"]),
                found["inputs"],
            )
        except NewerManifestError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = error.what if isinstance(error, NameMapError) else f"{type(error).__name__}: {error}"
            raise ManifestError(
                "what the file says of its weights is damaged",
                where=where,
                found=what,
                remedy="export the program again, or get another copy of the file",
            ) from error


def _tensors(found: list[dict[str, Any]]) -> tuple[ProgramTensor, ...]:
    tensors = tuple(
        ProgramTensor(
            name=_text(one["name"]),
            shape=_numbers(one["shape"]),
            dtype=_text(one["dtype"]),
            stride=_numbers(one["stride"]),
            role=one["role"],
            mutable=bool(one["mutable"]),
            alias=_text(one["alias"]),
        )
        for one in found
    )
    by_name = {one.name: one for one in tensors}
    for one in tensors:
        first = by_name[one.alias]
        if not isinstance(getattr(torch, one.dtype), torch.dtype) or len(one.shape) != len(one.stride):
            raise ValueError(f"{one.name}: {one.dtype}, shape {one.shape}, stride {one.stride}")
        if one.role not in ("parameter", "buffer", "hidden"):
            raise ValueError(f"{one.name}: {one.role!r}")
        if (first.shape, first.dtype, first.stride) != (one.shape, one.dtype, one.stride):
            raise ValueError(f"{one.name} is tied to {one.alias}, which is another kind of tensor")
    if len(by_name) != len(tensors):
        raise ValueError("a name twice")
    return tensors


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} in the place of a name")
    return value


def _numbers(value: list[int]) -> tuple[int, ...]:
    if not all(type(one) is int and 0 <= one < 2**48 for one in value):
        raise ValueError(f"{value!r} in the place of sizes")
    return tuple(value)


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
    stamp: FileFingerprint
    """Of the file that has been looked into."""

    def check_unchanged(self) -> None:
        """Raises `LiveTargetError` where another file, or another content, has come to the path since."""
        if current_fingerprints([self.path])[self.path] != self.stamp:
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
        stamp = current_fingerprints([path])[path]
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
