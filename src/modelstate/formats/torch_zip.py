"""Reads the zip archives that `torch.save` has written since 1.6: `data.pkl`, and one record for each storage."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from modelstate.errors import (
    ArchiveError,
    MissingRecordError,
    NotACheckpointError,
    OpenError,
    PickleError,
    TensorSizeError,
    UnsupportedTensorError,
)
from modelstate.formats.construct import construct
from modelstate.formats.pickled import InvalidTensor, Refused, Storage
from modelstate.formats.torch_globals import StorageType, TorchGlobals
from modelstate.formats.unpickle import unpickle
from modelstate.formats.zip_directory import ZipDirectory
from modelstate.io.files import SourceFile
from modelstate.spec import ByteRange, Checksum, Contents
from modelstate.text_format import excerpt

FORMAT = "torch zip"


def matches(head: bytes) -> bool:
    """Whether a file with this beginning is a zip archive; `read` finds out of which kind."""
    return head.startswith((b"PK\3\4", b"PK\5\6"))


def is_foreign(path: str) -> bool:
    """Whether a zip archive is known not to be a file of `torch.save`. False for a damaged archive."""
    try:
        with SourceFile(path) as file:
            _prefix(ZipDirectory(file))
    except NotACheckpointError:
        return True
    except OpenError:
        return False
    return False


def read(path: str, *, allow: Sequence[object] = (), skip_forbidden: bool = False) -> Contents:
    """Reads the table of contents of a file of `torch.save`.

    Reads the directory of the archive, its headers and the pickle, but no tensor. A storage that was saved by itself
    becomes a one-dimensional tensor; an untyped storage becomes a tensor of bytes. Tensors of other devices are read
    like those of the CPU.

    Args:
        path: The file.
        allow: Classes and functions that the pickle may use, or their qualified names, in addition to torch's own
            `weights_only` list and `torch.serialization.add_safe_globals`.
        skip_forbidden: Leave placeholders for other classes and functions, instead of raising.

    Raises:
        ForbiddenGlobalError: The pickle asks for a class or function that is not allowed.
        NotACheckpointError: The file is a TorchScript program, or an archive of another kind.
        UnsupportedTensorError: A quantized, nested or meta tensor, or a file of a big-endian machine.
        OpenError: The file is damaged; a subclass says how.
    """
    names = TorchGlobals(allow)
    with SourceFile(path) as file:
        try:
            archive = read_archive(file, names)
            tree = construct(
                archive.value, path=path, data_nbytes=archive.pickle_nbytes, names=names, skip_forbidden=skip_forbidden
            )
        except OpenError as error:
            error.where = error.where if error.where.startswith(path) else f"{path}: {error.where or 'data.pkl'}"
            raise
    return Contents(FORMAT, tree, (path,), checksums=archive.checksums)


class Archive(NamedTuple):
    """The contents of an archive of `torch.save`."""

    value: object
    """The value that the pickle describes, which `construct` checks and creates."""
    pickle_nbytes: int
    checksums: Mapping[ByteRange, Checksum]
    """The CRC-32 checksums of the storages."""


def read_archive(file: SourceFile, names: TorchGlobals) -> Archive:
    """Reads an archive from a file or a section of one. Raises what `read` raises for a damaged file."""
    directory = ZipDirectory(file)
    prefix = _prefix(directory)
    _check_byteorder(directory, prefix)
    data = directory.read(f"{prefix}/data.pkl")
    storages = _Storages(directory, prefix)
    value, _ = unpickle(data, 0, storages.find, names)
    return Archive(value, len(data), storages.checksums)


def _prefix(directory: ZipDirectory) -> str:
    """The directory that contains all records: that of the first record, as in torch."""
    records = directory.records
    first = next(iter(records), "")
    prefix = first.partition("/")[0]
    if f"{prefix}/constants.pkl" in records or any(name.startswith(f"{prefix}/code/") for name in records):
        raise NotACheckpointError(
            "a TorchScript program, not a checkpoint",
            where=directory.file.path,
            remedy='torch.save(torch.jit.load(path).state_dict(), "state.pt"), and open that',
        )
    if "/" in first and f"{prefix}/data.pkl" in records:
        return prefix
    has_tensors = any(name.startswith(f"{prefix}/data/") for name in records)
    if has_tensors and not {f"{prefix}/archive_format", f"{prefix}/.data/extern_modules"} & records.keys():
        raise MissingRecordError(
            "the archive has tensors, and no pickle that says what they are",
            where=directory.file.path,
            expected=f"{prefix}/data.pkl",
            remedy="get the file again",
        )
    kind, remedy = _kind(records, prefix)
    raise NotACheckpointError(
        f"{kind}, not a checkpoint",
        where=directory.file.path,
        expected="a file that torch.save wrote",
        found=", ".join(list(records)[:5]) or "no records",
        remedy=remedy,
    )


def _kind(records: dict[str, Any], prefix: str) -> tuple[str, str]:
    if not records:
        return "an empty zip archive", "get the file again"
    if f"{prefix}/archive_format" in records:
        return "a PyTorch program package (.pt2)", "torch.export.load(path).state_dict, saved with torch.save"
    if f"{prefix}/.data/extern_modules" in records:
        return "a torch.package archive", "torch.package.PackageImporter(path).load_pickle(...)"
    if all(name.endswith(".npy") for name in records):
        return "a NumPy archive (.npz)", "open the mapping {name: torch.from_numpy(array)} that numpy.load(path) gives"
    if "model.weights.h5" in records:
        return "a Keras model", "save its weights with safetensors"
    if "[Content_Types].xml" in records:
        return "an office document", "give the path of the checkpoint"
    if any(name.endswith((".dist-info/METADATA", "META-INF/MANIFEST.MF")) for name in records):
        return "a package of programs", "unpack it, and open the checkpoint in it"
    if any(name.endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors")) for name in records):
        return "an archive with checkpoints in it", "unpack it, and open one of them"
    return "a zip archive of another kind", "give the path of the checkpoint"


def _check_byteorder(directory: ZipDirectory, prefix: str) -> None:
    name = f"{prefix}/byteorder"
    record = directory.records.get(name)
    if record is None:
        return
    order = directory.read(name) if record.nbytes < 100 else b""
    if order == b"big":
        raise UnsupportedTensorError(
            "the file was written on a big-endian machine, which is not supported",
            where=directory.file.path,
            remedy="load and save it once with torch.load and torch.save on this machine",
        )
    if order != b"little":
        raise ArchiveError(
            "the byte order is none",
            where=f"{directory.file.path}: {name}",
            expected="little",
            found=excerpt(order[:20]),
        )


class _Storages:
    """Finds the place of a storage that the pickle refers to."""

    def __init__(self, directory: ZipDirectory, prefix: str) -> None:
        self.directory = directory
        self.prefix = prefix
        self.storages: dict[tuple[Any, ...], Storage] = {}
        self.checksums: dict[ByteRange, Checksum] = {}

    def find(self, key: tuple[Any, ...]) -> object:
        """The storage that a persistent id names."""
        if len(key) != 5 or key[0] not in ("storage", b"storage"):
            raise PickleError("the pickle is damaged: it refers to what is no storage", found=len(key))
        _, kind, name, _, numel = key
        if type(kind) is Refused:
            return kind
        if type(kind) is not StorageType or type(name) is not str or type(numel) is not int or len(name) > 100:
            raise PickleError("the pickle is damaged: it refers to a storage that cannot be")
        short = (kind.dtype, name, numel)
        if short not in self.storages:
            record = f"{self.prefix}/data/{name}"
            region = self.directory.region(record)
            nbytes = numel * kind.dtype.itemsize
            if not 0 <= nbytes <= region.nbytes:
                return InvalidTensor(
                    TensorSizeError(
                        "a storage is shorter in the archive than in the pickle",
                        expected=f"{numel} elements of {kind.dtype}",
                        found=f"{region.nbytes} bytes in data/{name}",
                        remedy="get the file again",
                    )
                )
            crc32 = self.directory.records[record].crc32
            if crc32:
                self.checksums[region] = Checksum("crc32", 0, f"{crc32:08x}")
            region = region if nbytes == region.nbytes else region._replace(nbytes=nbytes)
            self.storages[short] = Storage(kind.dtype, region, numel=numel)
        return self.storages[short]
