"""The `Checkpoint`: a read-only mapping from names to tensor specs, and the ways to read their bytes."""

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch

from modelstate.checkpoint.mapped import Maps, check_map_option
from modelstate.errors import (
    ChecksumError,
    KeyNotFoundError,
    OptionError,
    ReadFailedError,
    ReadTargetError,
    TensorNotFoundError,
    UnsupportedTensorError,
)
from modelstate.formats.tree import FlatTree, decoded, flatten, is_container, items_of, rebuild, referred_to, subtree
from modelstate.io import system
from modelstate.io.digests import ALGORITHM, hasher
from modelstate.io.engine import Request, open_files, read_ranges, read_threads
from modelstate.io.files import FileFingerprint, current_fingerprints
from modelstate.io.page_cache import read_ahead
from modelstate.io.stream import Consume, Wanted, stream
from modelstate.process import parallel_for
from modelstate.spec import (
    ByteRange,
    Checksum,
    Contents,
    Encoded,
    Stored,
    StoredTensor,
    TensorSpec,
    bytes_key,
    pieces,
)
from modelstate.torch_compat.plain import is_plain_memory

_CHUNK_BYTES = 256 << 10
"""What each thread has in memory at a time."""


def verify(checkpoint: "Checkpoint", on_read: Callable[[int], None] | None = None) -> int:
    """The body of `Checkpoint.verify`; `on_read` hears of the bytes of each storage, and ends it by raising."""
    names_of, expected = what_to_verify(checkpoint), checkpoint.checksums
    found: dict[ByteRange, str] = {}
    waiting, lock = iter(names_of), threading.Lock()

    def work(stop: threading.Event) -> None:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while not stop.is_set():
            with lock:
                storage = next(waiting, None)
            if storage is None:
                return
            value = _read_checksum(descriptors[storage.path], storage, expected[storage], buffer)
            with lock:
                found[storage] = value
                if on_read:
                    on_read(storage.nbytes)

    with open_files((storage.path for storage in names_of), checkpoint.stamps) as descriptors:
        parallel_for(work, min(read_threads(), len(names_of)))
    damaged = [
        name for storage, names in names_of.items() if found[storage] != expected[storage].value for name in names
    ]
    if damaged:
        raise ChecksumError(
            f"{len(damaged)} tensors are not what their checksums say",
            where=checkpoint.source,
            found=", ".join(damaged[:8]) + (", ..." if len(damaged) > 8 else ""),
            remedy="the file is damaged (or was saved with checksums switched off): get it again from where it came",
        )
    return sum(storage.nbytes for storage in names_of)


def what_to_verify(checkpoint: "Checkpoint") -> dict[ByteRange, list[str]]:
    """The storages of all tensors and of those that other values hold, with the names of what is in them.

    Raises `ChecksumError` where one of them has no checksum.
    """
    names_of: dict[ByteRange, list[str]] = {}
    for name, spec in checkpoint.items():
        for part in pieces(spec.stored):
            if isinstance(part, StoredTensor) and part.storage.nbytes:
                names_of.setdefault(part.storage, []).append(name)
    for place, value in checkpoint.encoded():
        for stored in referred_to(value):
            if stored.storage.nbytes:
                names_of.setdefault(stored.storage, []).append(place)
    expected = checkpoint.checksums
    if not checkpoint.key:
        for storage in expected:
            if storage.nbytes:
                names_of.setdefault(storage, ["a value that is no tensor"])
    without = [names[0] for storage, names in names_of.items() if storage not in expected]
    if without or not (names_of or checkpoint.contents.is_sealed):
        listed = ", ".join(without[:3]) + (", ..." if len(without) > 3 else "")
        raise ChecksumError(
            "there is nothing to verify the tensors against",
            where=checkpoint.source,
            expected="a checksum for every tensor",
            found=f"none for {listed}" if expected else f"{checkpoint.format}, which keeps none",
            remedy="modelstate.save(modelstate.open(path), new_path) writes a file that keeps checksums of what is "
            "here now; a load without verify=True asks for none",
        )
    return names_of


def _read_checksum(descriptor: int, storage: ByteRange, kind: Checksum, buffer: memoryview) -> str:
    """What the checksum of a storage would be now."""
    blocks = kind.block_bytes or storage.nbytes
    end = storage.start + storage.nbytes
    runs = (ByteRange(storage.path, at, min(blocks, end - at)) for at in range(storage.start, end, blocks))
    return "".join(_of_run(descriptor, run, kind.algorithm, buffer) for run in runs)


def _of_run(descriptor: int, run: ByteRange, algorithm: str, buffer: memoryview) -> str:
    crc, hashed = 0, hasher()
    for at in range(0, run.nbytes, len(buffer)):
        chunk = buffer[: min(len(buffer), run.nbytes - at)]
        _read_all(descriptor, chunk, run.start + at, run.path)
        if algorithm == ALGORITHM:
            hashed.update(chunk)
        else:
            crc = zlib.crc32(chunk, crc)
    return hashed.hexdigest() if algorithm == ALGORITHM else f"{crc:08x}"


def _read_all(descriptor: int, into: memoryview, at: int, path: str) -> None:
    while into:
        try:
            got = system.preadv(descriptor, [into], at)
        except OSError as error:
            raise ReadFailedError("reading failed", where=f"{path}, byte {at}", found=error) from error
        if not got:
            raise ReadFailedError("the file ends before the tensor does", where=f"{path}, byte {at}")
        into, at = into[got:], at + got


class Checkpoint(Mapping[str, TensorSpec]):
    """What is in a checkpoint: names to `TensorSpec`, in the order of the file. Made by `modelstate.open`.

    Nested containers are joined with dots, list items by their index: `optimizer_state.state.0.exp_avg`. Making it
    has read names, shapes and offsets, and no tensor bytes. It holds no file open; `close` and `with` are there for
    symmetry and drop the maps that `tensor` has made.
    """

    def __init__(
        self,
        contents: Contents,
        *,
        source: str,
        key: str | None = None,
        stamps: Mapping[str, FileFingerprint] | None = None,
    ) -> None:
        self._contents = contents
        self._source = source
        self._stamps = current_fingerprints(contents.files) if stamps is None else stamps
        self._maps = Maps(self._stamps)
        flat = flatten(contents.tree, source)
        self._set(flat, key or "")

    def _set(self, flat: FlatTree, key: str) -> None:
        if key:
            flat = _below(flat, key, self._source)
        self._flat, self._key = flat, key
        for name, stored in flat.tensors.items():
            if isinstance(stored, torch.Tensor):
                _spec(name, stored, self._source)

    # The mapping.

    def __getitem__(self, name: str) -> TensorSpec:
        return _spec(name, self.stored(name), self._source)

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat.tensors)

    def __len__(self) -> int:
        return len(self._flat.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._flat.tensors

    def get(self, name: str, default: Any = None) -> Any:
        # Without the search for the nearest name, which an error needs.
        stored = self._flat.tensors.get(name)
        return default if stored is None else _spec(name, stored, self._source)

    def stored(self, name: str) -> Stored:
        """Where a tensor is. Raises `TensorNotFoundError`."""
        tensors = self._flat.tensors
        try:
            return tensors[name]
        except KeyError:
            near = get_close_matches(str(name), tensors, n=1)
            raise TensorNotFoundError(
                "the checkpoint has no tensor of this name",
                where=self._source,
                found=name,
                remedy=f"did you mean {near[0]!r}?" if near else "iterate over the checkpoint to see its names",
            ) from None

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        part = f", key={self._key!r}" if self._key else ""
        return f"<Checkpoint {self._source!r}{part}: {len(self)} tensors, {self.nbytes:,} bytes, {self.format}>"

    # What it says of itself.

    @property
    def source(self) -> str:
        """The path as it was given, or "mapping"."""
        return self._source

    @property
    def key(self) -> str:
        """The part of the source that this is; empty for all of it."""
        return self._key

    @property
    def format(self) -> str:
        """ "torch zip", "torch legacy", "safetensors", "dcp" or "mapping"; the shards' where an index names them."""
        return self._contents.format

    @property
    def files(self) -> tuple[str, ...]:
        """The files that were read."""
        return self._contents.files

    @property
    def stamps(self) -> Mapping[str, FileFingerprint]:
        """What each file was when its header had been read; reading from another one is refused."""
        return self._stamps

    @property
    def checksums(self) -> Mapping[ByteRange, Checksum]:
        """Checksums of the storages that the file keeps one of."""
        return self._contents.checksums

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; those of tied tensors, which are the same in all, counted once."""
        seen: set[object] = set()
        total = 0
        for name, spec in self.items():
            key = bytes_key(spec.stored, name)
            if key not in seen:
                seen.add(key)
                total += spec.nbytes
        return total

    @property
    def metadata(self) -> Mapping[str, Any]:
        """`versions`: torch's `_metadata` of the state dict, by module path, where it is there; what a safetensors
        file says of itself, by its own keys; `schema` and `extra`, as `modelstate.save` got them."""
        found = {key: decoded(value, self.read) for key, value in self._contents.metadata.items()}
        versions = self.versions
        if versions is not None:
            found["versions"] = versions
        return found

    @property
    def versions(self) -> dict[str, dict[str, Any]] | None:
        """torch's `_metadata`: what modules saved of their versions, by module path; None where it is lost."""
        path, rest = self._key, ""
        while True:
            try:
                node = subtree(self._contents.tree, path, self._source)
                break
            except KeyNotFoundError:
                head, _, tail = path.rpartition(".")
                path, rest = head, f"{tail}.{rest}" if rest else tail
        saved = getattr(node, "_metadata", None)
        if not isinstance(saved, Mapping):
            return None
        within = {str(k): dict(v) for k, v in saved.items() if isinstance(v, Mapping)}
        if not rest:
            return within
        return {
            name[len(rest) + 1 :]: value
            for name, value in within.items()
            if name == rest or name.startswith(rest + ".")
        }

    @property
    def extra(self) -> Mapping[str, Any]:
        """The values that are no tensors, by their dotted paths.

        Iterating gives the largest parts of the tree without tensors; any path within them works too. Each access
        gives a copy of the containers, so nobody changes the checkpoint by it. What `modelstate.save` has encoded is
        decoded at the access, which raises `CodecError` where that fails.
        """
        return _Extra(self)

    def value(self, path: str = "") -> Any:
        """The state itself, or what is at a dotted path of it: containers, values, and tensors in memory of their own.

        Tied tensors are one tensor. An `OrderedDict` of a module's state has torch's `_metadata`. Raises
        `KeyNotFoundError`, `CodecError` for a value that cannot be decoded, and `ReadFailedError`.
        """
        node = subtree(self._contents.tree, ".".join(filter(None, (self._key, path))), self._source)
        known = self._read_at_once(name for name in self if not path or f"{name}.".startswith(f"{path}."))

        def read(stored: Stored) -> torch.Tensor:
            key = bytes_key(stored, f"{len(known)}")
            if key not in known:
                known[key] = self.read(stored)
            return known[key]

        return rebuild(node, read)

    def _read_at_once(self, names: Iterable[str]) -> dict[object, torch.Tensor]:
        """Those of the tensors that are one run of bytes, by what tells them apart."""
        known: dict[object, torch.Tensor] = {}
        requests = []
        for name in names:
            stored = self.stored(name)
            if isinstance(stored, StoredTensor) and stored.is_contiguous and stored.nbytes:
                key = bytes_key(stored, name)
                if key not in known:
                    with torch.inference_mode(False):  # else they could never be trained
                        known[key] = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
                    requests.append(Request(stored.extent, known[key].data_ptr()))
        self.read_all(requests)
        return known

    def encoded(self) -> Iterator[tuple[str, Encoded]]:
        """The values that are decoded when they are asked for, with the paths that they are at or below."""
        waiting = [
            (path, value) for values in (self._flat.values, self._contents.metadata) for path, value in values.items()
        ]
        while waiting:
            path, value = waiting.pop()
            if isinstance(value, Encoded):
                yield path, value
            elif is_container(value):
                waiting += [(path, item) for _, item in items_of(value)]

    @property
    def contents(self) -> Contents:
        """What was read of the source, all of it."""
        return self._contents

    @property
    def flat(self) -> FlatTree:
        """Tensors, values and containers by their paths. Not to be changed."""
        return self._flat

    @property
    def containers(self) -> tuple[str, ...]:
        """Paths of the dicts that hold tensors: what `key=` may name; the empty path is the whole."""
        return tuple(self._flat.containers)

    @property
    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that are the same bytes in the same shape: tied tensors."""
        groups: dict[object, list[str]] = {}
        for name, spec in self.items():
            groups.setdefault(bytes_key(spec.stored, name), []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    # The bytes.

    def select(self, key: str) -> "Checkpoint":
        """The part under a dotted path, with names relative to it. Raises `KeyNotFoundError`."""
        part = object.__new__(Checkpoint)
        part._contents, part._source, part._stamps = self._contents, self._source, self._stamps
        part._maps = self._maps
        part._set(_below(self._flat, key, self._source) if key else self._flat, "")
        part._key = f"{self._key}.{key}" if self._key and key else self._key or key
        return part

    def tensor(self, name: str, *, map: bool | None = None) -> torch.Tensor:
        """Returns one tensor, which stays valid when the checkpoint is closed.

        Writing to the tensor never changes the file. Tensors of one checkpoint that are the same bytes of a file, as
        tied ones are, share memory: writing to one shows in the others. What was saved as an `nn.Parameter` comes as
        one. A tensor of a mapping comes as a detached alias. A tensor that is combined from several checkpoints is
        computed anew by each call.

        Args:
            name: a name of this checkpoint.
            map: whether the tensor may be a view of its file (copy-on-write), so that nothing is copied and nothing is
                read until it is used. None maps a file where nothing that happens to it can change the tensor, as
                `modelstate.load` does, and reads the tensor into memory elsewhere: a file of `torch.save` that this
                process may write to, or a file that cannot be protected from other processes. True maps such files
                too; overwriting one in place then changes the tensor, or ends the process. False reads into memory.

        Raises:
            TensorNotFoundError: the checkpoint has no tensor of this name.
            ReadFailedError: the file cannot be read, or has changed since it was opened.
            CombineError: the tensor cannot be computed from the checkpoints that it is combined from.
            OptionError: `map` is not None, True or False.

        Example:
            >>> weight = modelstate.open("model.safetensors").tensor("layers.0.weight")
        """
        check_map_option(map)
        stored = self[name].stored
        tensor = self._maps.tensor_for_user(stored, map)
        if isinstance(stored, torch.Tensor):
            return tensor
        differentiable = stored.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        return torch.nn.Parameter(tensor, differentiable) if stored.is_parameter else tensor

    def read_into(self, name: str, out: torch.Tensor, start: int | None = None, stop: int | None = None) -> None:
        """Reads a tensor, or the rows from `start` to before `stop` of it, into memory that exists.

        `out` has the shape and dtype of what is read, on any device; contiguous CPU memory is read into directly, in
        parallel, with no copy between. Raises `TensorNotFoundError`, `ReadTargetError` before anything is written,
        and `ReadFailedError`, after which the content of `out` is undefined.
        """
        spec, where = self[name], f"{self._source}: {name}"
        shape, stored = spec.shape, spec.stored
        if start is not None or stop is not None:
            if not shape:
                raise ReadTargetError("a tensor without dimensions has no rows", where=where)
            start, stop, _ = slice(start, stop).indices(shape[0])
            shape = (max(stop - start, 0), *shape[1:])
        _check_target(out, shape, spec.dtype, where)
        if isinstance(stored, StoredTensor) and stored.is_contiguous and is_plain_memory(out):
            skip = 0 if not start else start * (stored.nbytes // stored.shape[0])
            source = ByteRange(stored.extent.path, stored.extent.start + skip, out.nbytes)
            # Autograd has to see that what it may have saved is no longer there.
            torch.autograd.graph.increment_version(out)
            self.read_all([Request(source, out.data_ptr())])
            return
        whole = self.read(_rows(stored, start, stop))
        try:
            with torch.no_grad():
                out.copy_(whole if start is None or isinstance(stored, StoredTensor) else whole[start:stop])
        except RuntimeError as error:
            raise ReadTargetError(
                "torch cannot copy this tensor, or these rows of it, to this memory",
                where=where,
                expected=f"memory that a {spec.kind} tensor can be copied to",
                found=error,
                remedy=f"take it with tensor({name!r}) and convert it",
            ) from error

    def read(self, stored: Stored) -> torch.Tensor:
        """The values of a tensor in memory of their own; a live tensor as a detached alias.

        Unlike `tensor` it never maps, and each call gives memory of its own. Raises `ReadFailedError`, and
        `CombineError` where the tensor is computed from several checkpoints.
        """
        return self._maps.read(stored)

    def read_all(self, requests: list[Request], on_read: Any = None, **options: Any) -> None:
        """Reads many ranges of this checkpoint's files at once. See `modelstate.io.engine.read_ranges`."""
        read_ranges(requests, fingerprints=self._stamps, on_read=on_read, **options)

    def stream(self, wanted: Sequence[Wanted], consume: Consume, **options: Any) -> None:
        """Reads ranges of this checkpoint's files in blocks. See `modelstate.io.stream.stream`."""
        stream(wanted, consume, fingerprints=self._stamps, **options)

    def read_ahead(self, ranges: Iterable[ByteRange]) -> int:
        """Has the kernel begin to read ranges of this checkpoint's files that are not in its page cache, and does not
        wait. Returns the bytes that it is asked for."""
        return read_ahead(ranges, self._stamps)

    def verify(self, on_read: Any = None) -> int:
        """Reads every tensor's storage and compares it with the checksum that the file keeps of it.

        Returns the number of bytes that were verified. Raises `ChecksumError` that names the tensors whose bytes are
        damaged, or that says that the file has no checksums (torch's zip files and what `modelstate.save` writes have
        them, other safetensors files and mappings do not), and `ReadFailedError`.
        """
        return verify(self, on_read)

    def maps(self) -> Maps:
        """New maps of the files, shared with no one."""
        return Maps(self._stamps)

    def close(self) -> None:
        """Drops the maps; tensors that show them stay valid."""
        self._maps = Maps(self._stamps)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_target(out: object, shape: tuple[int, ...], dtype: torch.dtype, where: str) -> None:
    if not isinstance(out, torch.Tensor):
        found = type(out).__name__
    elif tuple(out.shape) != shape or out.dtype != dtype or out.is_meta:
        found = f"{out.dtype} of shape {tuple(out.shape)} on {out.device}"
    elif is_plain_memory(out) and out.untyped_storage().nbytes() < out.storage_offset() * out.itemsize + out.nbytes:
        found = f"a tensor whose storage has been cut to {out.untyped_storage().nbytes()} bytes"
    else:
        return
    raise ReadTargetError(
        "the tensor to read into does not fit",
        where=where,
        expected=f"{dtype} of shape {shape}",
        found=found,
        remedy=f"torch.empty({shape}, dtype={dtype})",
    )


class _Extra(Mapping[str, Any]):
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, path: str) -> Any:
        checkpoint = self._checkpoint
        values = checkpoint._flat.values
        head, dot = str(path), "."
        while head not in values and dot:
            head, dot, _ = head.rpartition(".")
        if head not in values:
            raise KeyNotFoundError(
                "the checkpoint has no value here",
                where=checkpoint.source,
                found=path,
                remedy=self._remedy(str(path)),
            )
        node = decoded(values[head], checkpoint.read)
        node = subtree(node, str(path)[len(head) + 1 :], checkpoint.source)
        if isinstance(values[head], Encoded):
            return node  # made for this access alone
        return rebuild(node, lambda stored: _copied(checkpoint.read(stored)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint._flat.values)

    def __len__(self) -> int:
        return len(self._checkpoint._flat.values)

    def __repr__(self) -> str:
        return repr(dict(self))

    def _remedy(self, path: str) -> str:
        checkpoint = self._checkpoint
        if path in checkpoint:
            return f"it is a tensor: .tensor({path!r})"
        if path in checkpoint.containers:
            return f"there are tensors in it: .select({path!r})"
        near = get_close_matches(path, checkpoint._flat.values, n=1)
        return f"did you mean {near[0]!r}?" if near else "iterate over .extra to see its paths"


def _rows(stored: Stored, start: int | None, stop: int | None) -> Stored:
    """The rows of a strided tensor as a tensor of the file; any other as it is."""
    if not isinstance(stored, StoredTensor) or start is None or stop is None:
        return stored
    count = max(stop - start, 0)
    offset = stored.offset + (start * stored.stride[0] if count else 0)
    return StoredTensor(stored.dtype, (count, *stored.shape[1:]), stored.stride, stored.storage, offset)


def _spec(name: str, stored: Stored, where: str) -> TensorSpec:
    try:
        return TensorSpec(name, tuple(stored.shape), stored.dtype, stored)
    except RuntimeError as error:  # a live tensor that has no shape yet, or none that is a tuple
        raise UnsupportedTensorError(
            f"a tensor without a shape: {type(stored).__name__}",
            where=f"{where}: {name}",
            found=error,
            remedy="run the module once, so that its parameters are made, or leave the name out",
        ) from error


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with no more memory than the bytes that the tensor shows, however often it repeats them."""
    if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor or 0 not in tensor.stride():
        return tensor.clone()
    storage: Any = tensor.untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage.clone(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _values_below(flat: FlatTree, key: str, where: str) -> dict[str, Any]:
    """The items of a container without tensors, which the flat view keeps whole."""
    head = key
    while head and head not in flat.values:
        head = head.rpartition(".")[0]
    if not head:
        return {}
    try:
        node = subtree(flat.values[head], key[len(head) + 1 :], where)
    except KeyNotFoundError:
        return {}
    return dict(items_of(node)) if is_container(node) else {}


def _below(flat: FlatTree, key: str, where: str) -> FlatTree:
    if not isinstance(key, str):
        raise OptionError("key= is a dotted path", where=where, expected="a str", found=repr(key))
    prefix, cut = key + ".", len(key) + 1
    part = FlatTree(
        {name[cut:]: stored for name, stored in flat.tensors.items() if name.startswith(prefix)},
        {name[cut:]: value for name, value in flat.values.items() if name.startswith(prefix)},
        [path[cut:] for path in flat.containers if path == key or path.startswith(prefix)],
    )
    if not part.tensors and not part.values:
        part.values = _values_below(flat, key, where)
    if not part.tensors and not part.values:
        counts = Counter(name.split(".", 1)[0] for name in flat.tensors if "." in name)
        listed = ", ".join(f"{k!r} ({n} tensors)" for k, n in counts.most_common(8))
        raise KeyNotFoundError(
            f"nothing in the checkpoint is under {key!r}",
            where=where,
            expected=f"one of {listed}" if listed else "",
            remedy="give one of these as key=, or none" if listed else "leave key= out: the checkpoint has no parts",
        )
    return part
