"""Reads program files, `.pt2`, without running code from them, and the manifest that `modelstate.export` adds.

The fields of the manifest: `format` and `version` of the manifest; the versions of `modelstate` and `torch` that wrote
it; `kind`; `tensors`, each with `name`, `shape`, `dtype`, `stride`, `role`, `mutable` and the `alias` that it is tied
to; `names`, a map of names, or `names_reason`, the reason why there is none; `extra_state`; `inputs`, for a package;
`unseen`.

A `.pt2` is a zip archive with uncompressed records. A compressed record is refused: torch does not write such records,
and one could expand to any size.
"""

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from msgspec.structs import asdict

from modelstate.checkpoint.verification import DigestCheck
from modelstate.errors import DamagedFileError, LiveTargetError, NameMapError, NewerManifestError, OpenError
from modelstate.formats.manifest import check_size
from modelstate.formats.recognise import Format, recognise
from modelstate.formats.zip_directory import ZipDirectory
from modelstate.io.files import Descriptor, FileFingerprint, SourceFile, current_fingerprints, open_regular
from modelstate.serve.state_names import NameMap
from modelstate.text_format import listed, size
from modelstate.version import __version__

if TYPE_CHECKING:
    from torch.export import ExportedProgram

NAME = "modelstate.json"
"""The name of the manifest among the extra files of the archive."""
_FORMAT = "modelstate-program"
_VERSION = 1

Kind = Literal["exported", "aoti"]


class ProgramTensor(msgspec.Struct, frozen=True):
    """A tensor of a program, as the manifest describes it."""

    name: str
    """The path in the module tree that runs."""
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    """In elements."""
    role: Literal["parameter", "buffer", "hidden"]
    """ "hidden" is a buffer that is not in the state dict."""
    mutable: bool
    """Whether requests change it, as far as the inputs of the export show."""
    alias: str
    """The first name of the tensor; it differs from `name` where the tensor is tied."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as an object of torch."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


class Manifest(msgspec.Struct, frozen=True):
    """The description of a program that `modelstate.export` writes and returns. Each weight in it can be swapped.

    Examples:
        >>> manifest = modelstate.export(model.eval(), (x,), "model.pt2")
        >>> [tensor.name for tensor in manifest.tensors]
        ['weight', 'bias']
    """

    kind: Kind
    tensors: tuple[ProgramTensor, ...]
    names: NameMap | None
    """A map from the names of the module's `state_dict()`; None where no map can express the module's hooks."""
    names_reason: str
    """The reason why there is no map; empty where there is one."""
    extra_state: tuple[str, ...]
    """Names of extra state in the state dict, which a program does not have."""
    unseen: tuple[str, ...]
    """Tensors whose change does not change any answer, with the inputs of the export. Most often they are unused."""
    torch_version: str
    inputs: Mapping[str, object] | None = None
    """The description of a package's inputs; None for an exported program, which contains it."""

    def __str__(self) -> str:
        weights = {tensor.alias: tensor for tensor in self.tensors if tensor.role != "hidden"}
        lines = [f"{self.kind}: {len(weights)} weights, {size(sum(tensor.nbytes for tensor in weights.values()))}"]
        if self.unseen:
            lines.append(f"  no answer shows a change of {listed(self.unseen, 8)}")
        if self.names is None:
            lines.append(f"  no map of names: {self.names_reason}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns the manifest as JSON.

        Returns:
            The text that `modelstate.export` writes into the file.

        Examples:
            >>> modelstate.serve.Manifest.from_json(manifest.to_json(), "program.pt2") == manifest
            True
        """
        return json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "modelstate": __version__,
                "torch": self.torch_version,
                "kind": self.kind,
                "tensors": [asdict(tensor) for tensor in self.tensors],
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
        """Reads the text that `to_json` returns.

        Args:
            text: the manifest.
            where: the path of the file, for errors.

        Returns:
            The manifest.

        Raises:
            DamagedFileError: the text is damaged.
            NewerManifestError: a newer version of modelstate wrote it.

        Examples:
            >>> manifest = modelstate.serve.Manifest.from_json(text, "program.pt2")
        """
        try:
            check_size(text)
            fields = json.loads(text)
            if fields["format"] != _FORMAT:
                raise ValueError(f"format {fields['format']!r}")
            if type(fields["version"]) is not int or fields["version"] > _VERSION:
                raise NewerManifestError(
                    "the program was written by a newer modelstate",
                    where=where,
                    expected=f"version {_VERSION} or before",
                    found=f"version {fields['version']!r}, of modelstate {fields.get('modelstate')!r}",
                )
            if fields["kind"] not in ("exported", "aoti"):
                raise ValueError(f"kind {fields['kind']!r}")
            names = fields["names"]
            return cls(
                fields["kind"],
                _tensors_from_json(fields["tensors"]),
                None if names is None else NameMap.from_json(json.dumps(names)),
                str(fields["names_reason"]),
                tuple(map(str, fields["extra_state"])),
                tuple(map(str, fields["unseen"])),
                str(fields["torch"]),
                fields["inputs"],
            )
        except NewerManifestError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = error.what if isinstance(error, NameMapError) else f"{type(error).__name__}: {error}"
            raise DamagedFileError(
                "the description of the weights in the file is damaged",
                where=where,
                found=what,
                remedy="export the program again, or get another copy of the file",
            ) from error


def _tensors_from_json(items: list[dict[str, Any]]) -> tuple[ProgramTensor, ...]:
    tensors = tuple(
        ProgramTensor(
            name=_text(item["name"]),
            shape=_numbers(item["shape"]),
            dtype=_text(item["dtype"]),
            stride=_numbers(item["stride"]),
            role=item["role"],
            mutable=bool(item["mutable"]),
            alias=_text(item["alias"]),
        )
        for item in items
    )
    by_name = {tensor.name: tensor for tensor in tensors}
    for tensor in tensors:
        first = by_name[tensor.alias]
        if not isinstance(getattr(torch, tensor.dtype), torch.dtype) or len(tensor.shape) != len(tensor.stride):
            raise ValueError(f"{tensor.name}: {tensor.dtype}, shape {tensor.shape}, stride {tensor.stride}")
        if tensor.role not in ("parameter", "buffer", "hidden"):
            raise ValueError(f"{tensor.name}: {tensor.role!r}")
        if (first.shape, first.dtype, first.stride) != (tensor.shape, tensor.dtype, tensor.stride):
            raise ValueError(f"{tensor.name} is tied to {tensor.alias}, whose shape, dtype or stride differs")
    if len(by_name) != len(tensors):
        raise ValueError("a name twice")
    return tensors


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} instead of a name")
    return value


def _numbers(value: list[int]) -> tuple[int, ...]:
    if not all(type(number) is int and 0 <= number < 2**48 for number in value):
        raise ValueError(f"{value!r} instead of sizes")
    return tuple(value)


_REMEDY = "give a .pt2 that modelstate.export, torch.export.save or AOTInductor has written"
_LIBRARIES = "data/aotinductor/"
_CHUNK_BYTES = 16 << 20


class ProgramFile(msgspec.Struct, frozen=True):
    """A `.pt2` whose directory and manifest have been read."""

    path: str
    kind: Kind
    model: str
    """The name of the model in a package."""
    manifest: Manifest | None
    """None where another tool wrote the file."""
    stamp: FileFingerprint
    """The fingerprint of the file when it was read."""

    def check_unchanged(self) -> None:
        """Raises `LiveTargetError` where the file has been replaced or changed since."""
        if current_fingerprints([self.path])[self.path] != self.stamp:
            raise LiveTargetError(
                "the program file has been replaced, or changed, while it was opened",
                where=self.path,
                remedy="open it again after the writer has finished",
            )

    def program(self) -> "ExportedProgram":
        """Returns the exported program. Torch reads it, and trusts the file. Raises `LiveTargetError`."""
        import torch.export

        try:
            with open_regular(self.path)[0] as descriptor, open(descriptor, "rb", closefd=False) as file:
                return torch.export.load(file)
        except Exception as error:
            raise _unreadable(self.path, error) from error

    def weights(self) -> dict[str, torch.Tensor] | None:
        """Returns the constants of a package by the library's names; None where the library itself contains them.

        Constants that are tied are one tensor. Raises `OpenError` and `LiveTargetError`.
        """
        with _opened(self.path) as archive:
            root = _root(archive)
            config = f"{root}{_LIBRARIES}{self.model}/weights_config.json"
            if config not in archive.records:
                return None
            try:
                tensors: dict[tuple[object, ...], torch.Tensor] = {}
                state: dict[str, torch.Tensor] = {}
                for name, (file, shape, stride, offset) in json.loads(archive.read(config)).items():
                    key = (file, tuple(shape), tuple(stride), offset)
                    if key not in tensors:
                        whole = _read_tensor(archive, f"{root}data/weights/{file}")
                        view = torch.as_strided(whole.detach(), shape, stride, offset)
                        # A copy with a storage of its own, since the view may be a part of a larger one.
                        tensors[key] = torch.empty_strided(
                            view.shape, view.stride(), dtype=view.dtype, device=view.device
                        ).copy_(view)
                    state[name] = tensors[key]
                return state
            except OpenError:
                raise
            except Exception as error:
                raise _unreadable(self.path, error) from error

    def copied_library(self) -> Descriptor:
        """Copies the compiled model, without separate weights, to a package that has no path.

        Returns the descriptor of the copy. Raises `OpenError` and `ReadFailedError`.
        """
        with _opened(self.path) as archive, tempfile.TemporaryFile() as copy:
            prefix = f"{_root(archive)}{_LIBRARIES}"
            with zipfile.ZipFile(copy, "w") as package:
                for name in archive.records:
                    if name.startswith(prefix):
                        with package.open(name, "w", force_zip64=True) as record:
                            record.writelines(_chunks(archive, name))
            return Descriptor.of(os.dup, copy.fileno())

    def library(self, folder: str) -> str:
        """Unpacks the library of a package into a folder, and returns its path. Raises `LiveTargetError`."""
        with _opened(self.path) as archive:
            prefix = f"{_root(archive)}{_LIBRARIES}{self.model}/"
            libraries = [name for name in archive.records if name.startswith(prefix) and name.endswith(".so")]
            if len(libraries) != 1:
                raise _unsupported(self.path, f"{len(libraries)} libraries")
            path = os.path.join(folder, "model.so")
            with open(path, "wb") as file:
                for chunk in _chunks(archive, libraries[0]):
                    file.write(chunk)
            return path


def read_program_file(path: str) -> ProgramFile:
    """Reads the directory and the manifest of a program file, and determines its kind.

    Raises:
        LiveTargetError: the file is not a program, or its form is not supported.
        OpenError: the file cannot be opened, or its manifest is damaged (`DamagedFileError`).
        ChecksumError: the weights, the code or anything else in the file has been damaged.
        ReadFailedError: reading failed.
    """
    with _opened(path) as archive:
        root = _root(archive)
        record = f"{root}extra/{NAME}"
        manifest = None
        if record in archive.records:
            try:
                text = archive.read(record).decode()
            except UnicodeDecodeError as error:
                raise _unreadable(path, error) from error
            manifest = Manifest.from_json(text, path)
        records = {name.removeprefix(root) for name in archive.records}
        stamp, checksums = archive.file.fingerprint, archive.checksums(archive.records)
        names_of = {archive.region(name): [name] for name, record in archive.records.items() if record.crc32}
    models = {name.removeprefix(_LIBRARIES).split("/")[0] for name in records if name.startswith(_LIBRARIES)}
    if len(models) > 1:
        raise _unsupported(path, f"several models: {', '.join(sorted(models))}")
    if models and (manifest is None or manifest.kind == "aoti"):
        file = ProgramFile(path, "aoti", models.pop(), manifest, stamp)
    elif any(name.startswith("models/") or name == "serialized_exported_program.json" for name in records):
        file = ProgramFile(path, "exported", "model", manifest, stamp)
    else:
        raise _no_program(path)
    # torch does not compare: damaged weights give other answers, and damaged machine code may do anything.
    DigestCheck(path, {path: stamp}, names_of, checksums, "parts of the program").run()
    return file


@contextmanager
def _opened(path: str) -> Iterator[ZipDirectory]:
    """Opens an archive without compressed or encrypted records. Raises `OpenError` and `ReadFailedError`."""
    with SourceFile(path) as file:
        if recognise(file.head) is not Format.TORCH_ZIP:
            raise _no_program(path)
        archive = ZipDirectory(file)
        _check_stored(archive)
        yield archive


def _check_stored(archive: ZipDirectory) -> None:
    for name in archive.records:
        archive.region(name)  # raises for a record that is compressed or encrypted


def _chunks(archive: ZipDirectory, name: str) -> Iterator[bytes]:
    """Yields the bytes of a record in chunks."""
    record = archive.records[name]
    for start in range(0, record.nbytes, _CHUNK_BYTES):
        yield archive.file.read(archive.starts[name] + start, min(_CHUNK_BYTES, record.nbytes - start), name)


def _read_tensor(archive: ZipDirectory, name: str) -> torch.Tensor:
    """Reads a tensor from a record, which is itself a file of `torch.save`."""
    nbytes = archive.region(name).nbytes
    section = archive.file.section(archive.starts[name], nbytes, name)
    if recognise(section.head) is Format.TORCH_ZIP:
        _check_stored(ZipDirectory(section))
    tensor: torch.Tensor = torch.load(io.BytesIO(b"".join(_chunks(archive, name))), weights_only=True)
    return tensor


def _root(archive: ZipDirectory) -> str:
    """The folder that contains all records; empty for files of older versions of torch."""
    names = list(archive.records)
    folder = names[0].split("/")[0] + "/" if names else ""
    return folder if all(name.startswith(folder) for name in names) else ""


def _no_program(path: str) -> LiveTargetError:
    return LiveTargetError("the file is not a program", where=path, expected="a .pt2", remedy=_REMEDY)


def _unreadable(path: str, error: Exception) -> LiveTargetError:
    return LiveTargetError(
        "the program file cannot be read",
        where=path,
        found=f"{type(error).__name__}: {error}",
        remedy=f"if it is damaged, copy it or export it again; otherwise {_REMEDY}",
    )


def _unsupported(path: str, what: str) -> LiveTargetError:
    return LiveTargetError(
        "the package has a form that cannot be served in versions",
        where=path,
        expected="one model, in one library",
        found=what,
        remedy="write it with modelstate.export(module, args, path, kind='aoti')",
    )
