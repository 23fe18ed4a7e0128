"""Reads program files, `.pt2`, without running code from them, and the manifest that `modelstate.export` adds.

The fields of the manifest: `format` and `version` of the manifest; the versions of `modelstate` and `torch` that wrote
it; `kind`; `tensors`, each with `name`, `shape`, `dtype`, `stride`, `role` and the `alias` that it is tied to; `names`,
a map of names, or `names_reason`, the reason why there is none; `inputs`, for a package.
"""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, Annotated, Literal

import msgspec
import torch

from modelstate.errors import ChecksumError, DamagedFileError, LiveTargetError, NewerManifestError, code_errors
from modelstate.formats.manifest import check_size
from modelstate.io.files import SourceFile
from modelstate.serve.state_names import NameMap
from modelstate.text_format import size
from modelstate.version import __version__

if TYPE_CHECKING:
    from torch.export import ExportedProgram

NAME = "modelstate.json"
"""The name of the manifest among the extra files of the archive."""
_VERSION = 1

Kind = Literal["exported", "aoti"]


_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


class ProgramTensor(msgspec.Struct, frozen=True):
    """A tensor of a program, as the manifest describes it.

    Attributes:
        name: The path in the module tree that runs.
        stride: In elements.
        role: "hidden" is a buffer that is not in the state dict.
        alias: The first name of the tensor; it differs from `name` where the tensor is tied.
    """

    name: _Text
    shape: tuple[_Size, ...]
    dtype: _Text
    stride: tuple[_Size, ...]
    role: Literal["parameter", "buffer", "hidden"]
    alias: _Text

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as an object of torch."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


class ProgramInput(msgspec.Struct, frozen=True):
    """An input of a package. The defaults are those of an input that is not a tensor.

    Attributes:
        order: The dimensions, from the one with the largest stride to the one with the smallest.
        is_written: Whether the program writes to it.
    """

    name: str
    dtype: str = ""
    device: str = ""
    order: tuple[int, ...] = ()
    is_written: bool = False


class ProgramInputs(msgspec.Struct, frozen=True):
    """What a package takes.

    Attributes:
        conditions: Python of `args`, the inputs of a call in one list.
    """

    values: tuple[ProgramInput, ...]
    conditions: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, tag_field="format", tag="modelstate-program"):
    """The description of a program that `modelstate.export` writes and returns. Each weight in it can be swapped.

    Attributes:
        names: A map from the names of the module's `state_dict()`; None where no map can express the module's
            hooks.
        names_reason: The reason why there is no map; empty where there is one.
        inputs: The description of a package's inputs; None for an exported program, which contains it.
        version: The version of the JSON.
        modelstate: The version of modelstate that wrote it.

    Examples:
        >>> manifest = modelstate.export(model.eval(), (x,), "model.pt2")
        >>> [tensor.name for tensor in manifest.tensors]
        ['weight', 'bias']
    """

    kind: Kind
    tensors: tuple[ProgramTensor, ...]
    names: NameMap | None
    names_reason: str
    torch_version: str = msgspec.field(name="torch")
    inputs: ProgramInputs | None = None
    version: int = _VERSION
    modelstate: str = __version__

    def __str__(self) -> str:
        weights = {tensor.alias: tensor for tensor in self.tensors if tensor.role != "hidden"}
        lines = [f"{self.kind}: {len(weights)} weights, {size(sum(tensor.nbytes for tensor in weights.values()))}"]
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
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Reads the text that `to_json` returns.

        Args:
            text: The manifest.
            where: The path of the file, for errors.

        Returns:
            The manifest.

        Raises:
            DamagedFileError: The text is damaged.
            NewerManifestError: A newer version of modelstate wrote it.

        Examples:
            >>> manifest = modelstate.serve.Manifest.from_json(text, "program.pt2")
        """
        what = "the description of the weights in the file is damaged"
        remedy = "export the program again, or get another copy of the file"
        with code_errors(DamagedFileError, what, where=where, remedy=remedy):
            check_size(text)
            head = msgspec.json.decode(text, type=_Head)
            if head.version > _VERSION:
                raise NewerManifestError(
                    "the program was written by a newer modelstate",
                    where=where,
                    expected=f"version {_VERSION} or before",
                    found=f"version {head.version}, of modelstate {head.modelstate!r}",
                )
            return msgspec.json.decode(text, type=cls)


class _Head(msgspec.Struct):
    version: int
    modelstate: str = ""


_REMEDY = "give a .pt2 that modelstate.export, torch.export.save or AOTInductor has written"
_LIBRARIES = "data/aotinductor/"


class ProgramFile(zipfile.ZipFile):
    """A `.pt2`, opened once: its kind and its manifest. It is a context that closes the file.

    All bytes are compared with their CRCs, since torch does not do so: damaged weights give other answers, and damaged
    machine code may do anything.

    Args:
        path: The path of the file.

    Raises:
        LiveTargetError: the file is not a program, or its form is not supported.
        OpenError: the file cannot be opened, or its manifest is damaged (`DamagedFileError`).
        ChecksumError: the weights, the code or anything else in the file has been damaged.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.manifest: Manifest | None = None
        """None where another tool wrote the file."""
        self.kind: Kind = "exported"
        self.model = "model"
        """The name of the model in a package."""
        with SourceFile(path) as file:  # raises the errors of `modelstate.open`
            head, end = file.head, file.read(max(file.nbytes - 22, 0), min(file.nbytes, 22), "the archive's end")
        if not head.startswith(b"PK"):
            raise _no_program(path)
        with self._readable():
            try:
                # `zipfile` would find the end of an archive within a file that is cut off.
                if not end.startswith(b"PK\5\6"):
                    raise zipfile.BadZipFile("the end of the archive is missing")
                super().__init__(path)
                damaged = self.testzip()
            except zipfile.BadZipFile as error:
                raise DamagedFileError(
                    "the archive is damaged", where=path, found=error, remedy="get another copy of the file"
                ) from error
            if damaged is not None:
                raise ChecksumError(
                    "parts of the program differ from their checksums",
                    where=path,
                    found=damaged,
                    remedy="get another copy of the file, or export it again",
                )
            self._read_names()

    def _read_names(self) -> None:
        names = self.namelist()
        folder = names[0].split("/")[0] + "/" if names else ""
        self._root = folder if all(name.startswith(folder) for name in names) else ""
        records = {name.removeprefix(self._root) for name in names}
        if f"extra/{NAME}" in records:
            self.manifest = Manifest.from_json(self.read(f"{self._root}extra/{NAME}").decode(), self.path)
        models = {name.removeprefix(_LIBRARIES).split("/")[0] for name in records if name.startswith(_LIBRARIES)}
        if len(models) > 1:
            raise _unsupported(self.path, f"several models: {', '.join(sorted(models))}")
        if models and (self.manifest is None or self.manifest.kind == "aoti"):
            self.kind, self.model = "aoti", models.pop()
        elif not any(name.startswith("models/") or name == "serialized_exported_program.json" for name in records):
            raise _no_program(self.path)

    def _readable(self) -> AbstractContextManager[None]:
        remedy = f"if it is damaged, copy it or export it again; otherwise {_REMEDY}"
        return code_errors(LiveTargetError, "the program file cannot be read", where=self.path, remedy=remedy)

    def program(self) -> ExportedProgram:
        """Returns the exported program. Torch reads it, and trusts the file. Raises `LiveTargetError`."""
        import torch.export

        with self._readable():
            assert self.fp is not None
            self.fp.seek(0)
            return torch.export.load(self.fp)

    def weights(self) -> dict[str, torch.Tensor] | None:
        """Returns the constants of a package by the library's names; None where the library itself contains them.

        Constants that are tied are one tensor. Raises `LiveTargetError`.
        """
        config = f"{self._root}{_LIBRARIES}{self.model}/weights_config.json"
        if config not in self.namelist():
            return None
        tensors: dict[tuple[object, ...], torch.Tensor] = {}
        state: dict[str, torch.Tensor] = {}
        with self._readable():
            for name, (file, shape, stride, offset) in json.loads(self.read(config)).items():
                key = (file, tuple(shape), tuple(stride), offset)
                if key not in tensors:
                    data = io.BytesIO(self.read(f"{self._root}data/weights/{file}"))
                    whole: torch.Tensor = torch.load(data, weights_only=True)
                    # A clone has a storage of its own, since the view may be a part of a larger one.
                    tensors[key] = torch.as_strided(whole.detach(), shape, stride, offset).clone()
                state[name] = tensors[key]
        return state

    def copied_library(self) -> IO[bytes]:
        """Copies the compiled model, without separate weights, to a package that has no path."""
        copied = tempfile.TemporaryFile()  # noqa: SIM115
        with zipfile.ZipFile(copied, "w") as package:
            for name in self.namelist():
                if name.startswith(f"{self._root}{_LIBRARIES}"):
                    package.writestr(name, self.read(name))
        copied.flush()
        return copied

    def library(self, folder: str) -> str:
        """Unpacks the library of a package into a folder, and returns its path. Raises `LiveTargetError`."""
        prefix = f"{self._root}{_LIBRARIES}{self.model}/"
        libraries = [name for name in self.namelist() if name.startswith(prefix) and name.endswith(".so")]
        if len(libraries) != 1:
            raise _unsupported(self.path, f"{len(libraries)} libraries")
        return self.extract(libraries[0], folder)


def _no_program(path: str) -> LiveTargetError:
    return LiveTargetError("the file is not a program", where=path, expected="a .pt2", remedy=_REMEDY)


def _unsupported(path: str, what: str) -> LiveTargetError:
    return LiveTargetError(
        "the package has a form that cannot be served in versions",
        where=path,
        expected="one model, in one library",
        found=what,
        remedy="write it with modelstate.export(module, args, path, kind='aoti')",
    )
