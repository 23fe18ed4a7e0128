"""The `Checkpoint`: a read-only mapping from names to tensor specs, and the ways to read their bytes."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import xxhash

from modelstate.arguments import check_flag
from modelstate.checkpoint.mapped import Maps
from modelstate.errors import (
    ChecksumError,
    KeyNotFoundError,
    OptionError,
    ReadFailedError,
    UnsupportedTensorError,
    code_errors,
)
from modelstate.formats.manifest import ALGORITHM
from modelstate.formats.tree import (
    Contents,
    FlatTree,
    decoded,
    flatten,
    is_container,
    leaves,
    rebuild,
    referred_to,
    refused_in,
    subtree,
)
from modelstate.html.page import Page, Shown
from modelstate.io.engine import Request, for_each, read_fully, read_ranges, read_threads
from modelstate.io.files import FileFingerprint, OpenFiles, RangeFile
from modelstate.process import cached_attribute
from modelstate.remote.location import CONNECTIONS
from modelstate.spec import (
    GAP_BYTES,
    ByteRange,
    Checksum,
    Combined,
    Described,
    Encoded,
    Stored,
    StoredTensor,
    StoredTensors,
    bytes_key,
    dtype_name,
    elements_bytes,
    is_run,
    is_tensor,
    pieces,
    version_metadata,
)
from modelstate.tensor_spec import TensorSpec, specs_of
from modelstate.text_format import count, listed, short_repr, size

if TYPE_CHECKING:
    import torch


class Checkpoint(Mapping[str, TensorSpec], Shown):
    """A read-only mapping from names to `TensorSpec`, in the order of the file. Created by `modelstate.open`.

    The names of nested containers are joined with dots, list items by their index: `optimizer_state.state.0.exp_avg`.
    Opening reads names, shapes and offsets, and no tensor bytes. A checkpoint holds no file open; `close` and `with`
    exist for symmetry, and drop the maps that `tensor` has created.

    Examples:
        >>> checkpoint = modelstate.open({"layer.weight": torch.zeros(2, 3)})
        >>> list(checkpoint)
        ['layer.weight']
        >>> checkpoint["layer.weight"].shape
        (2, 3)
    """

    def __init__(self, contents: Contents, *, source: str) -> None:
        self.contents = contents
        """The contents of the whole source."""
        self.source = source
        """The path as it was passed to `modelstate.open`, or "mapping"."""
        self.fingerprints: Mapping[str, FileFingerprint] = contents.files
        """The fingerprint of each file when its header was read. A file that has changed since is not read."""
        self.key = ""
        """The dotted path of this part of the source; empty for the whole source."""
        self.step: int | None = None
        """The step of a store that was opened; None for other sources."""
        self.tree = contents.tree
        """The tree of this part."""
        self.flat = self._flattened()
        """Tensors, values and containers by path. Must not be modified."""
        if contents.format == "mapping":
            for name, stored in self.flat.tensors.items():
                if is_tensor(stored):  # it has a shape, or this raises
                    _spec(name, stored, source)

    def _decoded(self, value: object) -> object:
        """Decodes a value that `modelstate.save` has encoded; returns any other value as it is."""
        return decoded(value, self.read)

    @cached_attribute
    def _maps(self) -> Maps:
        """The maps of `tensor` and `value`. A load has maps of its own."""
        return Maps(self.fingerprints, self.format)

    # The mapping.

    def __getitem__(self, name: str) -> TensorSpec:
        tensors = self.flat.tensors
        if isinstance(tensors, StoredTensors) and name in tensors.rows:
            return next(specs_of(tensors, [name]))
        return _spec(name, self.stored(name), self.source)

    def specs(self) -> Iterator[TensorSpec]:
        """Describes all tensors, for those of a table in a third of the time of `values`."""
        tensors = self.flat.tensors
        if isinstance(tensors, StoredTensors):
            return specs_of(tensors, tensors.rows)
        return (_spec(name, stored, self.source) for name, stored in tensors.items())

    def __iter__(self) -> Iterator[str]:
        return iter(self.flat.tensors)

    def __len__(self) -> int:
        return len(self.flat.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.flat.tensors

    def get(self, name: str, default: object = None) -> Any:
        """Returns the `TensorSpec` of a name, or a default.

        Args:
            name: A name, which the checkpoint may lack.
            default: The result for a name that the checkpoint lacks.
        """
        # Does not search for the nearest name, which only an error needs.
        return self[name] if name in self.flat.tensors else default

    def stored(self, name: str) -> Stored:
        """Returns the stored tensor of a name.

        Args:
            name: A name of this checkpoint.

        Raises:
            KeyNotFoundError: The checkpoint has no tensor of this name.
        """
        tensors = self.flat.tensors
        try:
            return tensors[name]
        except KeyError:
            above = {path: value for path, value in self.flat.values.items() if f"{name}.".startswith(f"{path}.")}
            self._check_read(refused_in(above).get(name), name)
            ending = (other for other in tensors if other.endswith(f".{name}"))
            near = [*islice(ending, 3)] or get_close_matches(str(name), tensors, n=1)
            raise KeyNotFoundError(
                "the checkpoint has no tensor of this name",
                where=self.source,
                found=name,
                names=(str(name),),
                remedy=f"did you mean {' or '.join(map(repr, near))}?"
                if near
                else "iterate over the checkpoint to see its names",
                options="" if near else "modelstate inspect SOURCE lists the names",
            ) from None

    def _check_read(self, value: object, path: str) -> None:
        """Raises the error for the placeholders in a value at a path of this checkpoint."""
        if found := refused_in(value, ".".join(filter(None, (self.key, path)))):
            from modelstate.formats.construct import refusal

            raise refusal(found, self.source)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        part = f", key={self.key!r}" if self.key else ""
        return f"<Checkpoint {self.source!r}{part}: {len(self)} tensors, {self.nbytes:,} bytes, {self.format}>"

    def _page(self) -> Page:
        tied = {name: group[0] for group in self.aliases for name in group[1:]}
        return Page(
            self.source + (f", key {self.key!r}" if self.key else ""),
            (("Format", self.format), ("Tensors", f"{len(self):,}"), ("Bytes", size(self.nbytes))),
            ("Name", "Shape", "Dtype", "Bytes", "Kind", "Same bytes as", *(["File"] if len(self.files) > 1 else [])),
            [
                [
                    spec.name,
                    str(list(spec.shape)),
                    spec.dtype_name,
                    0 if spec.name in tied else spec.nbytes,
                    spec.kind if spec.kind != "strided" else "",
                    tied.get(spec.name, ""),
                    *([os.path.basename(spec.location.path)] if spec.location and len(self.files) > 1 else []),
                ]
                for spec in self.specs()
            ],
        )

    # Properties of the file.

    @property
    def format(self) -> str:
        """ "torch zip", "torch legacy", "safetensors", "dcp" or "mapping"; for an index, the format of its shards."""
        return self.contents.format

    @property
    def files(self) -> tuple[str, ...]:
        """The files that were read."""
        return tuple(self.contents.files)

    @cached_attribute
    def checksums(self) -> Mapping[ByteRange, Checksum]:
        """The checksums of storages, where the file has them."""
        return self.contents.checksums()

    def digests_of(self, stored: Stored) -> Sequence[str]:
        """The digests of the values of a tensor, the last one, and before it those of the values that patches change.

        Empty where the file has no digest that two tensors with the same bytes share.
        """
        if isinstance(stored, Combined):
            patched = self.contents.patched.get(stored)
            return () if patched is None else patched.digests
        checksum = self.checksums.get(stored.extent) if is_run(stored) else None
        return () if checksum is None or checksum.algorithm != ALGORITHM else (checksum.value,)

    @cached_attribute
    def digest(self) -> str:
        """A digest of all tensors: of their names, dtypes, shapes and digests. Empty where the file lacks digests.

        A step of a store has the same one as a file that `modelstate.save` writes of the same state.
        """
        tensors = [(name, stored, self.digests_of(stored)[-1:]) for name, stored in sorted(self.flat.tensors.items())]
        if not all(digests or not elements_bytes(stored) for _, stored, digests in tensors):
            return ""
        values = [(name, dtype_name(stored), stored.shape, digests) for name, stored, digests in tensors]
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(values))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; the bytes that tied tensors share count once."""
        return sum({key: spec.nbytes for spec, key in self._keyed()}.values())

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the file.

        `versions` is torch's `_metadata` of the state dict, by module path; `schema` and `extra` are what was passed to
        `modelstate.save`; a safetensors file adds the entries of its `__metadata__`. Each access decodes `extra`, which
        raises `CodecError` where that fails.
        """
        metadata = {key: self._decoded(value) for key, value in self.contents.metadata.items()}
        versions = self.versions
        if versions is not None:
            metadata["versions"] = versions
        return metadata

    @property
    def versions(self) -> dict[str, dict[str, object]] | None:
        """torch's `_metadata`, the versions of modules by module path; None if the file does not have it."""
        saved = self.flat.versions.get("")
        return None if saved is None else {str(k): dict(v) for k, v in saved.items() if isinstance(v, Mapping)}

    @property
    def extra(self) -> Mapping[str, Any]:
        """The values other than tensors, by dotted path.

        Iterating yields the largest parts of the tree without tensors; any path within them can be looked up, too. Each
        access returns a copy of the containers, so that changes to it do not change the checkpoint. A value that
        `modelstate.save` has encoded is decoded at the access, which raises `CodecError` where that fails.

        Values that are not read have placeholders here, which print as `<refused ...>`. `value` raises for them.
        """
        return _Extra(self)

    def value(self, path: str = "", *, map: bool | None = False) -> Any:
        """The state, or the part at a dotted path: containers, values, and tensors in memory of their own.

        Tied tensors are one tensor object. An `OrderedDict` of a module's state has torch's `_metadata`.

        Args:
            path: The path of the part; empty for the whole state. It may end within keys: "encoder" is the dict of what
                stands under "encoder.weight" and "encoder.bias".
            map: Whether tensors may be views of their files, as in `tensor`.

        Raises:
            KeyNotFoundError: There is nothing at the path.
            CodecError: A value cannot be decoded.
            ForbiddenGlobalError: A value is of a class that is not allowed, and was skipped when the file was opened.
            UnsupportedTensorError: A tensor is of a kind that is not supported, or a container holds itself.
            ReadFailedError: A file cannot be read, or has changed since it was opened.
        """
        from modelstate.io.tensors import runs

        node = subtree(self.tree, path, self.source, self._decoded)
        check_flag("map", map, accepts_none=True)
        self._check_read(node, path)
        of_part = (self.stored(name) for name in self if not path or f"{name}.".startswith(f"{path}."))
        # All that is not mapped is read at once.
        unmapped = {
            bytes_key(stored, ""): stored
            for stored in of_part
            if is_run(stored) and (map is False or not self._maps.is_mappable(stored.extent.path))
        }
        values = runs([*unmapped.values()], partial(read_ranges, files=self.fingerprints))
        known: dict[object, torch.Tensor] = dict(zip(unmapped, values, strict=True))
        can_map = partial(self._maps.can_map, option=map)

        def read(stored: Stored) -> torch.Tensor:
            key = bytes_key(stored, f"{len(known)}")
            if key not in known:
                known[key] = self.read(stored) if map is False else self._maps.tensor(stored, can_map)
            return known[key]

        return rebuild(node, read)

    @property
    def containers(self) -> tuple[str, ...]:
        """The paths of the dicts that contain tensors, which `key=` accepts; the empty path is the whole state."""
        return tuple(self.flat.containers)

    @property
    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names whose tensors are the same bytes in the same shape: tied tensors."""
        groups: dict[object, list[str]] = {}
        for spec, key in self._keyed():
            groups.setdefault(key, []).append(spec.name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def _keyed(self) -> Iterator[tuple[TensorSpec, object]]:
        """All tensors, with equal keys for those that are the same bytes in the same shape."""
        tensors = self.flat.tensors
        if isinstance(tensors, StoredTensors):  # where the same bytes are one row
            nbytes = tensors.columns.nbytes
            keys: Iterable[object] = (row if nbytes[row] else name for name, row in tensors.rows.items())
            return zip(self.specs(), keys, strict=True)
        return ((spec, bytes_key(spec.stored, spec.name)) for spec in self.specs())

    # Reading.

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Checkpoint holds open files, and cannot be pickled or copied: pass its path on instead")

    def _has_items(self, node: object) -> bool:
        node = self._decoded(node)
        return is_container(node) and bool(node)

    def _flattened(self) -> FlatTree:
        if isinstance(tree := self.tree, StoredTensors):
            versions = version_metadata(tree)
            return FlatTree(tree, {}, [""], {} if versions is None else {"": versions})
        return flatten(tree, self.source)

    def select(self, key: str) -> Checkpoint:
        """Returns the part under a dotted path, with names relative to the path.

        Args:
            key: The path of a container; an empty path selects the whole checkpoint.

        Raises:
            KeyNotFoundError: The checkpoint has no container at the path.
            CodecError: The path leads into a value that cannot be decoded.

        Examples:
            >>> checkpoint = modelstate.open({"model": {"weight": torch.ones(2)}})
            >>> list(checkpoint.select("model"))
            ['weight']
        """
        if not isinstance(key, str):
            raise OptionError("key= must be a dotted path", where=self.source, expected="a str", found=short_repr(key))
        if not key:
            return self
        part = object.__new__(Checkpoint)
        part.contents, part.source, part.step = self.contents, self.source, self.step
        part.fingerprints, part._maps = self.fingerprints, self._maps
        part.key = f"{self.key}.{key}" if self.key else key
        with suppress(KeyNotFoundError):
            node = subtree(self.tree, key, self.source, self._decoded, self._has_items)
            part.tree = self._decoded(node)
            part.flat = part._flattened()
            return part
        counts = Counter(name.split(".", 1)[0] for name in self if "." in name)
        parts = listed((f"{name!r} ({count(number, 'tensor')})" for name, number in counts.most_common()), 8)
        raise KeyNotFoundError(
            f"nothing in the checkpoint is under {key!r}",
            where=self.source,
            expected=f"one of {parts}" if parts else "",
            remedy="give one of these as key=, or none" if parts else "leave key= out: the checkpoint has no parts",
            options="--key KEY, or leave it out",
        )

    def tensor(self, name: str, *, map: bool | None = None) -> torch.Tensor:
        """Returns one tensor, which stays valid when the checkpoint is closed.

        Writing to the tensor never changes the file. Tensors that are the same bytes of a file, as tied tensors are,
        share memory: writing to one changes the others. A tensor that was saved as an `nn.Parameter` is returned as
        one. A tensor of a mapping is returned as a detached alias. A tensor that is combined from several checkpoints
        is computed by each call.

        Args:
            name: A name of this checkpoint.
            map: Whether the tensor may be a view of its file (copy-on-write), so that nothing is copied and nothing is
                read until it is used. None maps a file where nothing that happens to it can change the tensor, as
                `modelstate.load` does, and reads the tensor into memory elsewhere: a file of `torch.save` that this
                process may write to, or a file that cannot be protected from other processes. True maps such files
                too; overwriting one in place then changes the tensor, or ends the process. False reads into memory.

        Returns:
            The tensor on the CPU; for a mapping, an alias on the device of the tensor.

        Raises:
            KeyNotFoundError: The checkpoint has no tensor of this name.
            ReadFailedError: The file cannot be read, or has changed since it was opened.
            CombineError: The tensor cannot be computed from the checkpoints that it is combined from.
            OptionError: `map` is not None, True or False.

        Examples:
            >>> checkpoint = modelstate.open({"weight": torch.ones(2)})
            >>> checkpoint.tensor("weight")
            tensor([1., 1.])
        """
        import torch

        check_flag("map", map, accepts_none=True)
        stored = self[name].stored
        tensor = self._maps.tensor(stored, partial(self._maps.can_map, option=map))
        if isinstance(stored, torch.Tensor):
            return tensor
        differentiable = stored.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        return torch.nn.Parameter(tensor, differentiable) if stored.is_parameter else tensor

    def read_into(self, name: str, out: torch.Tensor, start: int | None = None, stop: int | None = None) -> None:
        """Reads a tensor, or the rows from `start` to before `stop` of it, into existing memory.

        Contiguous CPU memory is read into directly and in parallel, without a copy in between.

        Args:
            name: A name of this checkpoint.
            out: A tensor with the shape and dtype of what is read, on any device.
            start: The first row; None for the beginning.
            stop: The end of the rows; None for the end.

        Raises:
            KeyNotFoundError: The checkpoint has no tensor of this name.
            OptionError: `out` does not fit. Nothing has been written.
            ReadFailedError: The file cannot be read. The content of `out` is then undefined.

        Examples:
            >>> checkpoint = modelstate.open({"w": torch.arange(6.0).reshape(3, 2)})
            >>> out = torch.empty(1, 2)
            >>> checkpoint.read_into("w", out, start=1, stop=2)
            >>> out
            tensor([[2., 3.]])
        """
        import torch

        from modelstate.torch_compat.plain import is_plain_memory

        spec, where = self[name], f"{self.source}: {name}"
        shape, stored = spec.shape, spec.stored
        if start is not None or stop is not None:
            if not shape:
                raise OptionError("a tensor without dimensions has no rows", where=where)
            start, stop, _ = slice(start, stop).indices(shape[0])
            shape = (max(stop - start, 0), *shape[1:])
        _check_target(out, shape, spec.dtype, where)
        if isinstance(stored, StoredTensor) and stored.is_contiguous and is_plain_memory(out):
            skip = 0 if not start else start * (stored.nbytes // stored.shape[0])
            source = ByteRange(stored.extent.path, stored.extent.start + skip, out.nbytes)
            # Autograd must notice that values it may have saved are overwritten.
            torch.autograd.graph.increment_version(out)
            read_ranges([Request(source, out.data_ptr())], files=self.fingerprints)
            return
        rows = [] if start is None else [slice(start, stop)]
        region = stored.region(rows) if isinstance(stored, Described) else None
        values = self.read(stored if region is None else region)
        what, expected = "torch cannot copy this tensor, or these rows of it, to this memory", "memory of its kind"
        remedy = f"take it with tensor({name!r}) and convert it"
        with torch.no_grad(), code_errors(OptionError, what, where=where, expected=expected, remedy=remedy):
            out.copy_(values[start:stop] if rows and region is None else values)

    def read(self, stored: Stored) -> torch.Tensor:
        """Reads the values of a tensor into memory of their own; returns a live tensor as a detached alias.

        Unlike `tensor` it never maps, and each call allocates new memory.

        Args:
            stored: A stored tensor of this checkpoint.

        Raises:
            ReadFailedError: The file cannot be read, or has changed since it was opened.
            CombineError: The tensor cannot be computed from the checkpoints that it is combined from.
        """
        return self._maps.read(stored)

    def verify(self, on_read: Callable[[int], None] | None = None) -> int:
        """Reads the storage of every tensor and compares it with the checksum in the file.

        torch's zip files and the files of `modelstate.save` have checksums; other safetensors files and mappings do
        not.

        Args:
            on_read: Called with numbers of bytes, by one thread at a time; may raise to end the check.

        Returns:
            The number of bytes that were verified.

        Raises:
            ChecksumError: Tensors are damaged, and the error names them, or the file has no checksums.
            ReadFailedError: The file cannot be read, or has changed since it was opened.
        """
        return self.verification().run(on_read)

    def verification(self) -> DigestCheck:
        """What `verify` compares: the storages of all tensors, including those within other values.

        Raises:
            ChecksumError: A storage has no checksum.
        """
        names_of: dict[ByteRange, list[str]] = {}
        for name, stored in self.flat.tensors.items():
            for part in pieces(stored):
                if isinstance(part, StoredTensor) and part.storage.nbytes:
                    names_of.setdefault(part.storage, []).append(name)
        for place, value in (*self.flat.values.items(), *self.contents.metadata.items()):
            for leaf in (leaf for _, leaf in leaves(value) if isinstance(leaf, Encoded)):
                for stored in referred_to(leaf):
                    if stored.storage.nbytes:
                        names_of.setdefault(stored.storage, []).append(place)
        checksums = self.checksums
        if not self.key:
            for storage in checksums:
                if storage.nbytes:
                    names_of.setdefault(storage, ["a value that is not a tensor"])
        without = [names[0] for storage, names in names_of.items() if storage not in checksums]
        if without or not (names_of or self.contents.is_sealed):
            raise ChecksumError(
                "there is nothing to verify the tensors against",
                where=self.source,
                expected="a checksum for every tensor",
                found=f"none for {listed(without, 3)}" if checksums else f"{self.format}, which keeps none",
                remedy="modelstate.save(modelstate.open(source), path) writes a file that keeps checksums of what is "
                "here now; a load without verify=True asks for none",
                options="modelstate convert SOURCE PATH.safetensors writes a file that keeps checksums",
            )
        return DigestCheck(self.source, self.fingerprints, names_of, checksums)

    def close(self) -> None:
        """Drops the maps. Tensors that were mapped stay valid."""
        self.__dict__.pop("_maps", None)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(
    checkpoints: Sequence[Checkpoint],
    tree: object,
    source: str,
    *,
    format: str,
    metadata: Mapping[str, object] | None = None,
    is_sealed: bool = False,
) -> Checkpoint:
    """Returns the checkpoint of a tree whose tensors are those of several checkpoints.

    Raises `ReadFailedError` where a file changed between the opening of two of them.
    """
    contents = Contents(
        format,
        tree,
        merged_fingerprints(checkpoints),
        metadata or {},
        lambda: {extent: checksum for each in checkpoints for extent, checksum in each.checksums.items()},
        is_sealed,
    )
    return Checkpoint(contents, source=source)


def merged_fingerprints(checkpoints: Iterable[Checkpoint]) -> dict[str, FileFingerprint]:
    """Returns the fingerprints of all files. Raises `ReadFailedError` where one changed between two openings."""
    fingerprints: dict[str, FileFingerprint] = {}
    for checkpoint in checkpoints:
        for path, fingerprint in checkpoint.fingerprints.items():
            if fingerprints.setdefault(path, fingerprint) != fingerprint:
                raise ReadFailedError(
                    "the file changed between the opening of two of the checkpoints",
                    where=path,
                    remedy="open them again, when nothing writes to it any more",
                )
    return fingerprints


class _Extra(Mapping[str, Any]):
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, path: str) -> Any:
        checkpoint, path = self._checkpoint, str(path)
        values, head = checkpoint.flat.values, path
        while head and head not in values:
            head = head.rpartition(".")[0]
        if head not in values:
            raise KeyNotFoundError(
                "the checkpoint has no value here", where=checkpoint.source, found=path, remedy=self._remedy(path)
            )
        value = checkpoint._decoded(values[head])
        node = subtree(value, path[len(head) + 1 :], checkpoint.source, checkpoint._decoded)
        if value is not values[head]:
            return node  # created for this access only
        return rebuild(node, lambda stored: checkpoint.read(stored).clone())

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.flat.values)

    def __len__(self) -> int:
        return len(self._checkpoint.flat.values)

    def __repr__(self) -> str:
        return repr(dict(self))

    def _remedy(self, path: str) -> str:
        checkpoint = self._checkpoint
        if path in checkpoint:
            return f"it is a tensor: .tensor({path!r})"
        if path in checkpoint.containers:
            return f"there are tensors in it: .select({path!r})"
        near = get_close_matches(path, checkpoint.flat.values, n=1)
        return f"did you mean {near[0]!r}?" if near else "iterate over .extra to see its paths"


def _spec(name: str, stored: Stored, where: str) -> TensorSpec:
    try:
        return TensorSpec(name, tuple(stored.shape), dtype_name(stored), stored)
    except RuntimeError as error:  # a live tensor of a lazy module, or one whose shape is not a tuple
        raise UnsupportedTensorError(
            f"a tensor without a shape: {type(stored).__name__}",
            where=f"{where}: {name}",
            found=error,
            remedy="leave the name out, and save the tensors that it is made of"
            if getattr(stored, "is_nested", False)
            else "run the module once, so that its parameters are made, or leave the name out",
        ) from error


def _check_target(out: object, shape: tuple[int, ...], dtype: torch.dtype, where: str) -> None:
    from modelstate.torch_compat.plain import is_plain_memory

    if not is_tensor(out):
        found = type(out).__name__
    elif tuple(out.shape) != shape or out.dtype != dtype or out.is_meta:
        found = f"{out.dtype} of shape {tuple(out.shape)} on {out.device}"
    elif is_plain_memory(out) and out.untyped_storage().nbytes() < out.storage_offset() * out.itemsize + out.nbytes:
        found = f"a tensor whose storage has been cut to {out.untyped_storage().nbytes()} bytes"
    else:
        return
    raise OptionError(
        "the tensor to read into does not fit",
        where=where,
        expected=f"{dtype} of shape {shape}",
        found=found,
        remedy=f"torch.empty({shape}, dtype={dtype})",
    )


# Comparing the bytes with the digests that were stored when they were saved.

_CHUNK_BYTES = 256 << 10
"""The size of the buffer of each thread that verifies checksums."""
_REMOTE_CHUNK_BYTES = 4 << 20
"""The same, where each read is a request."""


class DigestCheck(msgspec.Struct, frozen=True):
    """What there is to compare of a checkpoint. Created by `Checkpoint.verification`."""

    source: str
    """The path of the checkpoint, for messages."""
    fingerprints: Mapping[str, FileFingerprint]
    """The files that are read."""
    names_of: Mapping[ByteRange, list[str]]
    """The storages to read, and for each of them the names of the tensors in it."""
    checksums: Mapping[ByteRange, Checksum]
    """The stored digest of each of these storages."""

    def run(self, on_read: Callable[[int], None] | None = None, share: slice = slice(None)) -> int:
        """Reads the storages, compares them with their digests, and returns the number of bytes that were compared.

        Small storages that lie next to each other are read at once. Several ranks verify a checkpoint together with a
        `share` of these reads each. `on_read` is called with numbers of bytes, and may raise to end it.

        Raises:
            ChecksumError: A storage differs from its digest.
            ReadFailedError: A file cannot be read, or has changed since it was opened.
        """
        is_remote = any(self.fingerprints[storage.path].is_remote for storage in self.names_of)
        chunk_bytes = _REMOTE_CHUNK_BYTES if is_remote else _CHUNK_BYTES
        runs = _runs(self.names_of, chunk_bytes)[share]
        computed: dict[ByteRange, str] = {}

        def compute(buffer: memoryview, run: list[ByteRange]) -> None:
            path, start, nbytes = run[0]
            nbytes = run[-1].start + run[-1].nbytes - start
            is_read = nbytes <= chunk_bytes
            if is_read:
                read_fully(files[path], [buffer[:nbytes]], start, nbytes)
            for storage in run:
                checksum, values = self.checksums[storage], []
                for first, end in checksum.blocks(storage.nbytes):
                    begin, stop = storage.start + first, storage.start + end
                    part = [buffer[begin - start : stop - start]]
                    chunks = part if is_read else _chunks(files[path], begin, stop, buffer)
                    crc, hashed = 0, xxhash.xxh3_128()
                    for chunk in chunks:
                        if checksum.algorithm == ALGORITHM:
                            hashed.update(chunk)
                        else:
                            crc = zlib.crc32(chunk, crc)
                    values.append(hashed.hexdigest() if checksum.algorithm == ALGORITHM else f"{crc:08x}")
                computed[storage] = "".join(values)

        on_done = None if on_read is None else lambda run: on_read(sum(storage.nbytes for storage in run))
        with OpenFiles(self.fingerprints) as files:
            threads = min(CONNECTIONS if is_remote else read_threads(), len(runs))
            for_each(runs, [partial(compute, memoryview(bytearray(chunk_bytes))) for _ in range(threads)], on_done)
            files.check_unchanged()
        damaged = [
            name
            for storage, names in self.names_of.items()
            for name in names
            if storage in computed and computed[storage] != self.checksums[storage].value
        ]
        if damaged:
            raise ChecksumError(
                f"tensors that are not what their checksums say ({len(damaged):,})",
                where=self.source,
                found=listed(damaged, 8),
                remedy="the file is damaged, or was saved with checksums switched off: get it again from its source",
            )
        return sum(storage.nbytes for storage in computed)


def _runs(storages: Iterable[ByteRange], most_bytes: int) -> list[list[ByteRange]]:
    """Groups storages in the order of the files: one alone, or neighbours that are within `most_bytes` of a file."""
    runs: list[list[ByteRange]] = []
    end = 0
    for storage in sorted(storages):
        run = runs[-1] if runs else []
        is_next = run and run[0].path == storage.path and 0 <= storage.start - end <= GAP_BYTES
        end = storage.start + storage.nbytes
        if is_next and end - run[0].start <= most_bytes:
            run.append(storage)
        else:
            runs.append([storage])
    return runs


def _chunks(file: RangeFile, start: int, end: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yields a part of a file in pieces, each of them in the buffer."""
    for at in range(start, end, len(buffer)):
        chunk = buffer[: min(len(buffer), end - at)]
        read_fully(file, [chunk], at, len(chunk))
        yield chunk
