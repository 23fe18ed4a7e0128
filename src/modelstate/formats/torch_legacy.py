"""Reads the stream that `torch.save` wrote before 1.6: five pickles, then each storage behind its length."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from msgspec.structs import replace

from modelstate.errors import DamagedFileError, TruncatedFileError, UnknownFormatError, UnsupportedTensorError
from modelstate.formats.construct import construct
from modelstate.formats.recognise import LEGACY_MAGIC
from modelstate.formats.torch_globals import TorchGlobals, storage_of
from modelstate.formats.tree import Contents
from modelstate.formats.unpickle import Allowed, Storage, check_protocol, damaged, no_storage, places_in, unpickle
from modelstate.io.files import MAX_STRUCTURE_BYTES, SourceFile
from modelstate.spec import ByteRange, Refused

FORMAT = "torch legacy"
VERSION = 1001

_FIRST_BYTES = 1 << 20
"""The first read, into which the pickles of a model fit; larger pickles are read again, four times as much."""


def read(file: SourceFile, *, allow: Sequence[object] = (), skip_forbidden: bool = False) -> Contents:
    """Reads the table of contents of a file that `torch.save` wrote before 1.6, or later with its old format.

    Reads the pickles and the length in front of each storage, but no tensor except what lies close to the pickles. For
    the arguments and errors see `modelstate.formats.torch_zip.read`.
    """
    path, nbytes = file.path, min(_FIRST_BYTES, file.nbytes)
    with places_in(path):
        while True:
            data, storages = file.read(0, nbytes, "the pickles"), _StreamStorages(file)
            try:
                start, keys, end = _pickles(data, storages)
                break
            except TruncatedFileError:
                if nbytes == file.nbytes or nbytes > MAX_STRUCTURE_BYTES // 4:
                    raise
                nbytes = min(nbytes * 4, file.nbytes)
        storages.locate(keys, end)
        names = TorchGlobals(allow)
        value, stop = unpickle(data, start, storages.find, names.find)
        tree = construct(value, path=path, data_nbytes=stop - start, names=names, skip_forbidden=skip_forbidden)
    return Contents(FORMAT, tree, {path: file.fingerprint})


def _pickles(data: bytes, storages: _StreamStorages) -> tuple[int, object, int]:
    """The start of the main pickle, the keys of the storages in their order, and the start of the first storage."""
    check_protocol(data)
    names = TorchGlobals()
    magic, pos = unpickle(data, 0, no_storage, names.find)
    version, pos = unpickle(data, pos, no_storage, names.find)
    if magic != LEGACY_MAGIC or version != VERSION:
        raise UnknownFormatError(
            "not the stream that torch.save wrote before 1.6",
            expected=f"version {VERSION}",
            found=str(version)[:100],
            remedy="load and save it once with a current PyTorch",
        )
    # The next pickle describes the machine that wrote the file; the numbers of tensors are always little-endian.
    _, start = unpickle(data, pos, no_storage, names.find)
    _, pos = unpickle(data, start, storages.find, names.find)
    keys, end = unpickle(data, pos, no_storage, names.find)
    return start, keys, end


class _StreamStorages:
    """The storages of a file. The pickle that refers to them is read twice: `locate` finds their places in between."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self.declared: dict[str, Storage] = {}
        """What the pickle says about each storage, without its place."""
        self.located: dict[str, Storage] | None = None

    def find(self, key: tuple[object, ...]) -> object:
        """The storage that the pickle refers to; before `locate`, in a place that is not its own."""
        if len(key) == 4 and key[0] in ("module", b"module") and type(key[1]) in (Refused, Allowed):
            return key[1]  # the class of a module, beside its source
        description = storage_of(key, 6)
        if isinstance(description, Refused):
            # Without the size of its elements the storages behind it cannot be found.
            raise UnsupportedTensorError(
                f"a storage of class {description.name[:100]} is not supported",
                remedy="if you trust it: torch.load may read it; save its tensors as plain ones then",
            )
        (dtype, name, numel), view = description, key[5]
        if self.located is None and name not in self.declared:
            # The first mention decides the size of an element in the file.
            region = ByteRange(self.file.path, 0, numel * dtype.itemsize)
            self.declared[name] = Storage(dtype, region, numel=numel)
        storage = (self.declared if self.located is None else self.located).get(name)
        if storage is None:
            raise DamagedFileError("a storage is missing", expected=f"storage {name}")
        offset = 0
        if view is not None:
            if type(view) is not tuple or len(view) != 3 or {type(view[1]), type(view[2])} != {int}:
                raise damaged("the view of a storage is not valid")
            _, offset, numel = view
        return replace(storage, dtype=dtype, offset=offset, numel=numel)

    def locate(self, keys: object, pos: int) -> None:
        """Finds the storages, which follow one another."""
        if type(keys) is not list or not all(type(key) in (str, int) for key in keys):
            raise damaged("the names of its storages are not a list", type(keys).__name__)
        self.located = {}
        for key in map(str, keys):
            declared = self.declared.get(key)
            if declared is None:
                raise DamagedFileError("the file has a storage that nothing refers to", found=key[:100])
            if key in self.located:
                raise DamagedFileError("a storage stands twice in the file", found=key)
            (numel,) = struct.unpack("<q", self.file.read(pos, 8, "the length of a storage"))
            if numel != declared.numel:
                raise DamagedFileError(
                    "the file contradicts itself about a storage",
                    where=f"storage {key}",
                    expected=f"{declared.numel} elements, as the pickle says",
                    found=f"{numel} elements, at byte {pos}",
                )
            region = declared.region._replace(start=pos + 8)
            pos = region.start + region.nbytes
            if pos > self.file.nbytes:
                raise self.file.truncated(f"storage {key}", pos)
            self.located[key] = replace(declared, region=region)
