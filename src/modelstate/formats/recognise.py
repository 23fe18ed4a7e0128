"""Recognises the format of a file by its beginning, and explains files that are not checkpoints."""

from __future__ import annotations

import os
import re
import shlex
from enum import Enum

from modelstate.errors import TruncatedFileError, UnknownFormatError
from modelstate.formats import safetensors, sharded
from modelstate.io.files import HEAD_BYTES, SourceFile
from modelstate.text_format import count, excerpt

_FORMATS = "a file of torch.save, safetensors, or an index of shards"
_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
"""The beginnings of the files of torch.save; a file that ends within one of them is cut short."""
_FEW_BYTES = 2
"""A text of at most this length is not reported as text: it may be the beginning of a safetensors length."""


class Format(Enum):
    """A format that is read."""

    INDEX = "index of shards"
    DCP = "metadata of torch.distributed.checkpoint"
    TORCH_ZIP = "zip archive"
    TORCH_LEGACY = "torch.save before 1.6"
    SAFETENSORS = "safetensors"


DCP_METADATA = ".metadata"
"""The name of the file with the metadata of torch.distributed.checkpoint."""
_DCP_HEAD_BYTES = 512
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_PICKLE = rb"(?s)L%dL\n\.|\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a%b\." % (
    LEGACY_MAGIC,
    re.escape(LEGACY_MAGIC.to_bytes(10, "little", signed=True)),
)
"""The pickle of `LEGACY_MAGIC` with which such a stream begins, in any protocol. The first byte alone does not
tell: a safetensors file may begin with \\x80, too, as the first byte of a length."""
_SAFETENSORS_FIELDS = (b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"')
_JSON_OBJECT = rb"[ \t\n\r]*\{[ \t\n\r]*[\"}]"


def recognise(head: bytes, path: str = "") -> Format | None:
    """Returns the format of a file; None where it has none that is read.

    Args:
        head: The first `HEAD_BYTES` of the file.
        path: Its path: damaged indexes and metadata of torch.distributed.checkpoint are recognised by their names.
    """
    if safetensors.begins(head):
        return Format.SAFETENSORS
    if sharded.begins(head, path):
        return Format.INDEX
    is_dcp = head.startswith(b"\x80") and b"torch.distributed.checkpoint" in head[:_DCP_HEAD_BYTES]
    if is_dcp or (head and os.path.basename(path) == DCP_METADATA):
        return Format.DCP
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        return Format.TORCH_ZIP
    if re.match(_MAGIC_PICKLE, head):
        return Format.TORCH_LEGACY
    return Format.SAFETENSORS if _is_safetensors(head) else None


def _is_safetensors(head: bytes) -> bool:
    """Whether a file with this beginning is a safetensors file, possibly a damaged one.

    True where the header begins as it must, where it contains the field names of the format, or where the first eight
    bytes can be the length of a header and the bytes behind them can be its text.
    """
    if len(head) < 8 or (head[:8].isascii() and _has_no_control(head[:8])):
        return False
    text = head[8:]
    if re.match(_JSON_OBJECT, text) or any(field in text for field in _SAFETENSORS_FIELDS):
        return True
    length = int.from_bytes(head[:8], "little")
    return 2 <= length <= safetensors.MAX_HEADER_BYTES and _has_no_control(text[: min(length, 64)])


def _has_no_control(data: bytes) -> bool:
    return not any(byte < 32 and byte not in b"\t\n\r" for byte in data) and b"\x7f" not in data


# Files that are not checkpoints.


_UNPACK = "unpack it first, and open what is in it"
_CONVERT = "load it with the library it is of, and save its arrays with safetensors"
_EXPORTED = "take the checkpoint that it was exported or converted from"
_ELSEWHERE = "give the path of the checkpoint"
_UNPICKLE = (
    "unpickling runs whatever the file says: if you trust it, load it once, and save its tensors with safetensors"
)
_FLAX = (
    "restore it with flax.serialization.msgpack_restore(data), and save its arrays, flat by name, with "
    "safetensors.numpy.save_file"
)
_SAVED_AGAIN = (
    "if you trust it, load it with torch.load(path, weights_only=False), which runs what it names, and save that with "
    "torch.save"
)
_NPY = 'pass a mapping: {"name": torch.from_numpy(numpy.load(path))}'
_OPEN_PAGE = (
    "open the link in a browser: a login, a licence to accept or another link is needed; on huggingface.co and "
    "github.com the link to the file has /resolve/ or /raw/, not /blob/"
)
_READ_IT = "read it: it may be what a server answered in place of the file; then download the file again"


_KINDS = (
    (rb"GGUF|lmgg|fmgg|tjgg", "a GGUF or GGML file (llama.cpp)", "take the safetensors files of the model"),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras .h5)", _CONVERT),
    (rb"\x93NUMPY", "a NumPy array (.npy)", _NPY),
    (rb"\x08[\x01-\x20](?:\x12[\x01-\x40][ -~]|:|\x1a)", "an ONNX model", _EXPORTED),
    (rb".{4}TFL3", "a TensorFlow Lite model", _EXPORTED),
    (rb".{4}E[TH]\d\d", "an ExecuTorch program", _EXPORTED),
    (rb"\x1f\x8b\x08", "compressed with gzip", f"gzip -dc FILE > OTHER, or tar -xzf for an archive: {_UNPACK}"),
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd", f"zstd -d: {_UNPACK}"),
    (rb"\xfd7zXZ\0", "compressed with xz", f"xz -d, or tar -xJf: {_UNPACK}"),
    (rb"BZh[1-9]1AY&SY", "compressed with bzip2", f"bzip2 -d, or tar -xjf: {_UNPACK}"),
    (rb"\x04\x22\x4d\x18", "compressed with lz4", f"lz4 -d: {_UNPACK}"),
    (rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07", "a 7z or RAR archive", _UNPACK),
    (rb"(?=.{257}ustar)(?:sys_info|pickle|tensors|storages)\0", "a checkpoint of PyTorch before 0.2", _SAVED_AGAIN),
    (rb".{257}ustar", "a tar archive", f"tar -xf: {_UNPACK}"),
    (rb"\x80[\x02-\x05]", "a plain pickle (not a file of torch.save)", _UNPICKLE),
    (rb"\((?:dp|lp)\d*\n|[\]}]q\0|c[\w.]+\n\w+\n", "a plain pickle of protocol 0 or 1", _UNPICKLE),
    (rb"PAR1|ARROW1|SQLite format 3\0", "a table or a database", _ELSEWHERE),
    (rb'model_checkpoint_path: "', "the text that names the newest TensorFlow checkpoint of a directory", _CONVERT),
    (rb"(?:[\x81-\x8f]|\xde..)(?:[\xa1-\xbf]|\xd9.)[A-Za-z_]\w", "MessagePack (Flax .msgpack)", _FLAX),
    (rb"\x7fELF|%PDF-|\x89PNG\r\n|\xff\xd8\xff", "a program, a document or a picture", _ELSEWHERE),
)
"""The beginning of files that are not read, as an expression; what they are; and what to do."""

_TF_TABLE_END = bytes.fromhex("57fb808b247547db")
_TF_DATA = r"\.data-\d{5}-of-\d{5}$"
_LFS = rb"version https?://(?:git-lfs|hawser)\S+\r?\n"
_PAGE = rb"(?i)\s*<(?:!doctype html|html|head|body|\?xml|error|!--)"


def no_checkpoint(path: str, head: bytes) -> UnknownFormatError | TruncatedFileError:
    """The error for a file whose first `HEAD_BYTES` no format recognises."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    what, found, remedy = "", excerpt(head[:160]), ""
    if any(beginning.startswith(head) for beginning in _BEGINNINGS):
        pass
    elif re.match(_LFS, text):
        what = "this is a Git LFS pointer; the file itself was not downloaded"
        remedy = f"git lfs install && git -C {shlex.quote(os.path.dirname(path) or '.')} lfs pull"
    elif re.match(_PAGE, text):
        what, remedy = "this is a web page, or a server's message, saved in place of the file", _OPEN_PAGE
    elif kind := next((kind for kind in _KINDS if re.match(kind[0], head, re.DOTALL)), None):
        what, found, remedy = f"this is {kind[1]}, which modelstate does not read", excerpt(head[:16]), kind[2]
    elif text[:1] in (b"{", b"[") and _is_text(head) and path.endswith(".json"):
        what = "this is a JSON file; it holds no tensors, and no weight_map of an index of shards"
        remedy = f"open its directory: {os.path.dirname(path) or '.'}"
    elif _is_of_tensorflow(path):
        what, remedy = "this is part of a TensorFlow checkpoint, which modelstate does not read", _CONVERT
    elif not head.strip(b"\0"):
        what = "the file begins with zeros: its writer was stopped before it wrote, or the machine before the disk did"
        found = f"its first {len(head):,} bytes are zero"
        remedy = "take an older checkpoint, or copy the file again"
    elif len(head) > _FEW_BYTES and _is_text(head):
        what, remedy = f"this is a {'JSON text' if text[:1] in (b'{', b'[') else 'text file'}", _READ_IT
    elif len(head) >= 8:
        what, found = "this is not a checkpoint of a known format", f"{head[:16].hex(' ')} ({excerpt(head[:16])})"
        remedy = (
            "compare its size and its SHA-256 with those of the original; if they are right, convert it to safetensors "
            "with what wrote it"
        )
    if what:
        return UnknownFormatError(what, where=path, expected=_FORMATS, found=found, remedy=remedy)
    return TruncatedFileError(
        "the file is shorter than the beginning of any checkpoint",
        where=path,
        expected=_FORMATS,
        found=f"{count(len(head), 'byte')}: {head.hex(' ')}",
    )


def _is_of_tensorflow(path: str) -> bool:
    """Whether a file is part of a TensorFlow checkpoint, by its end or its name."""
    with SourceFile(path) as file:
        end = file.read(max(file.nbytes - 8, 0), min(file.nbytes, 8), "its end")
    of_graph = path.endswith(".meta") and os.path.exists(f"{path.removesuffix('.meta')}.index")
    return end == _TF_TABLE_END or bool(re.search(_TF_DATA, path)) or of_graph


def _is_text(head: bytes) -> bool:
    try:
        return head.decode("utf-8").isprintable() or not re.search(rb"[\x00-\x08\x0e-\x1f\x7f]", head)
    except UnicodeDecodeError as error:
        # The end of the head may cut a character.
        return error.start >= len(head) - 3 and len(head) == HEAD_BYTES and not re.search(rb"[\x00-\x08]", head)


# Paths that are not those of files.


def unpacked(path: str) -> UnknownFormatError | None:
    """The error for a path in an archive of torch.save that was unpacked, as browsers and macOS do; None elsewhere."""
    for directory in (path, os.path.dirname(path)):
        if all(os.path.isfile(os.path.join(directory, name)) for name in ("data.pkl", "version")):
            parent, name = map(shlex.quote, os.path.split(os.path.abspath(directory)))
            packed = shlex.quote(f"{os.path.basename(os.path.abspath(directory))}.pt")
            return UnknownFormatError(
                "this is a file of torch.save that was unpacked",
                where=directory,
                expected="the file itself, a zip archive without compression",
                found="a directory with data.pkl in it",
                remedy=f"pack it again: cd {parent} && zip -0 -r {packed} {name}",
            )
    return None


def tensorflow_prefix(path: str) -> UnknownFormatError | None:
    """The error for a path without a file that is the prefix of a TensorFlow checkpoint, or None."""
    if not os.path.isfile(f"{path}.index"):
        return None
    return UnknownFormatError(
        "this is the prefix of a TensorFlow checkpoint, which modelstate does not read",
        where=path,
        found=f"{os.path.basename(path)}.index",
        remedy=_CONVERT,
    )
