"""Maps tensors from files: nothing is read until it is used, and nothing is copied."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from modelstate.errors import OPEN_AGAIN, ReadFailedError, SourceTypeError
from modelstate.forks import fork_safe_lock
from modelstate.io import system
from modelstate.io.engine import read_ranges
from modelstate.io.files import FileFingerprint, LocalFile, fingerprint_of, open_unchanged, read_failed
from modelstate.io.lease import NAMELESS, hold
from modelstate.io.system import MAP_NORESERVE
from modelstate.spec import ByteRange, Combined, Stored, StoredComposite, StoredTensor, TensorColumns

if TYPE_CHECKING:
    import torch


class Maps:
    """Private, copy-on-write maps of the files of a checkpoint.

    Writing to a tensor changes neither the file nor the tensors of another `Maps`, but it changes the other tensors of
    this one that share its bytes. So every load takes a `Maps` of its own. A map lives as long as a tensor that is
    mapped from it.

    Replacing the file by a rename is safe, since the map keeps the old file. Overwriting the file in place changes the
    tensors, and truncating it ends the process with SIGBUS when they are used, unless a lease is held: see `can_map`.

    Args:
        fingerprints: What each file of the checkpoint must be.
        format: The format of the checkpoint. A writer of any other than "safetensors" may be torch.save.
    """

    def __init__(self, fingerprints: Mapping[str, FileFingerprint], format: str) -> None:
        self._fingerprints, self._is_safetensors = fingerprints, format == "safetensors"
        self._maps: dict[str, mmap.mmap | None] = {}
        """None for a file that cannot be mapped."""
        self._storages: weakref.WeakValueDictionary[tuple[ByteRange, int, bool], torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        """The memory of tensors that are alive: by the bytes in it, their runs, and whether it is a map."""
        self._can_map: dict[tuple[str, bool | None], bool] = {}
        self._notes: dict[str, dict[str, None]] = {}

    def tensor(self, stored: Stored, can_map: Callable[[ByteRange], bool] | None = None) -> torch.Tensor:
        """The tensor as a view of its file; a tensor that is in memory already as a detached alias.

        Tensors of the same bytes share memory while one of them is alive. Bytes are copied where the file stores
        numbers at an address that is not a multiple of their size, and read where the file cannot be mapped.

        Args:
            stored: The tensor.
            can_map: Whether bytes may be mapped, such as `can_map` with an option; by default wherever they can be.

        Raises `ReadFailedError` where the file cannot be read, or has changed.
        """
        import torch

        if torch.is_inference_mode_enabled():
            # A tensor that is created in inference mode cannot be trained later.
            with torch.inference_mode(False):
                return self.tensor(stored, can_map)
        if isinstance(stored, StoredComposite):
            return stored.build([self.tensor(part, can_map) for part in stored.parts])
        if isinstance(stored, Combined):
            return self.read(stored)  # computed tensors have no place in a file
        if not isinstance(stored, StoredTensor):
            return stored.detach()
        if stored.nbytes == 0:
            return torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device="cpu")
        region, stride = stored.extent, stored.stride
        mapped = self._map(region.path) if can_map is None or can_map(region) else None
        if mapped is not None:
            # torch's vectorised code may assume that a number lies at a multiple of its size.
            is_copied = int(region.start % stored.dtype.itemsize > 0)
            key, nbytes = (region, is_copied, True), region.nbytes
        else:
            runs = stored.runs()
            key, nbytes, stride = (region, runs.run_bytes, False), runs.nbytes, runs.stride
        storage = self._in_use(key, nbytes)
        if storage is None:
            if mapped is None:
                new = self.read(stored)
            else:
                # The storage is no larger than these bytes, even if the stored storage is.
                new = torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=region.start)
                new = new.clone() if is_copied else new
            with _lock:
                storage = self._in_use(key, nbytes)  # another thread may have read them meanwhile
                if storage is None:
                    storage = self._storages[key] = new.untyped_storage()
        return torch.empty(0, dtype=stored.dtype, device="cpu").set_(storage, 0, stored.shape, stride)

    def _in_use(self, key: tuple[ByteRange, int, bool], nbytes: int) -> torch.UntypedStorage | None:
        """The memory of a tensor that is alive, unless the code that got the tensor has changed its size."""
        storage = self._storages.get(key)
        return storage if storage is not None and storage.nbytes() == nbytes else None

    def tensors(self, columns: TensorColumns) -> list[torch.Tensor]:
        """Contiguous tensors as views of their files. They have bytes, at multiples of their size, and share none.

        Raises `ReadFailedError` where a file cannot be mapped, or has changed.
        """
        return views_of({path: mapped for path in {*columns.paths} if (mapped := self._map(path))}, columns)

    def read(self, stored: Stored) -> torch.Tensor:
        """Reads the values into memory of their own, without a map. See `read_tensor`."""
        from modelstate.io.tensors import read_tensor

        return read_tensor(stored, partial(read_ranges, files=self._fingerprints))

    def check_unchanged(self) -> None:
        """Raises `ReadFailedError` where a file has changed since it was mapped.

        A rename of another file to the same path is no change.
        """
        for path, mapped in self._maps.items():
            fingerprint = self._fingerprints.get(path)
            if mapped is not None and fingerprint is not None:
                found = replace(fingerprint, nbytes=mapped.size())
                with suppress(FileNotFoundError):  # the path may name another file now, or none
                    at_path = fingerprint_of(path)
                    if (at_path.inode, at_path.device) == (fingerprint.inode, fingerprint.device):
                        found = at_path
                fingerprint.check(path, found)

    def is_mappable(self, path: str) -> bool:
        """Whether a file of the checkpoint can be mapped: it is on this machine, and its file system has maps.

        Raises `ReadFailedError` where mapping it fails for another reason.
        """
        return self._map(path) is not None

    def can_map(self, extent: ByteRange, option: bool | None) -> bool:
        """Whether tensors that are kept may be mapped from this file, which is then protected while its map lives.

        A read lease makes other processes that open the file for writing wait until the tensors have memory of their
        own; see `modelstate.io.lease`. `notes` has the remarks about the decision.

        Args:
            extent: The bytes of a tensor. The file is mapped, unless there are none.
            option: The option `map`: with None a file may be mapped only where nothing can go wrong, with True always,
                with False never.
        """
        path = extent.path
        if option is False or not extent.nbytes:
            return option is not False
        known = self._can_map.get((path, option))
        if known is None:
            mapped = self._map(path)
            known = mapped is not None and self._protect(path, mapped, option)
            if mapped is None and not self._is_remote(path):
                self.note(f"read into memory, not mapped: {_REFUSED if path in self._maps else _TOO_MANY}", path)
            elif mapped is None and option:
                self.note("read into memory: only files of this machine are mapped", path)
            self._can_map[path, option] = known
        return known

    def _protect(self, path: str, mapped: mmap.mmap, option: bool | None) -> bool:
        fingerprint = self._fingerprints.get(path)
        try:
            file = LocalFile(path)
        except (FileNotFoundError, NotADirectoryError, SourceTypeError):
            return True  # the mapped file has no name any more, by which it could be overwritten
        except OSError as error:
            raise read_failed("the file can no longer be opened", path, error) from error
        status = file.status
        try:
            if fingerprint is not None and (status.st_ino, status.st_dev) != (fingerprint.inode, fingerprint.device):
                return True  # the path names another file
            # A lease does not protect from a writer of this process that holds the interpreter lock: the thread that
            # answers the lease needs the lock.
            is_overwritten = not self._is_safetensors and os.access(
                path, os.W_OK, effective_ids=os.access in os.supports_effective_ids
            )
            if is_overwritten and not option:
                self.note(f"read into memory, not mapped: torch.save overwrites such files in place; {_MAPS_IT}", path)
                return False
            unprotected = hold(path, file.descriptor, mapped) if status.st_nlink else NAMELESS
        finally:
            file.close()
        if is_overwritten:
            self.note("mapped: torch.save onto it in this process ends the process; save beside it and rename", path)
        elif not unprotected or not status.st_mode & _WRITABLE:
            return True
        elif not option:
            self.note(f"read into memory, not mapped: it cannot be protected, for {unprotected}; {_MAPS_IT}", path)
            return False
        if unprotected:
            self.note(
                f"mapped without protection, for {unprotected}: overwriting it in place changes the model, or ends the "
                "process",
                path,
            )
        return True

    def note(self, what: str, path: str) -> None:
        """Adds a remark about a file to `notes`."""
        self._notes.setdefault(what, {})[path] = None

    @property
    def notes(self) -> list[str]:
        """Remarks about files that are mapped, or cannot be, for the report of a load."""
        return [
            f"{os.path.basename(first)}{f' and {len(others)} more files' if others else ''}: {what}"
            for what, (first, *others) in self._notes.items()
        ]

    def _is_remote(self, path: str) -> bool:
        known = self._fingerprints.get(path)
        return known is not None and known.is_remote

    def _map(self, path: str) -> mmap.mmap | None:
        """The map of a file, which is as long as when it was opened; None where there is none, or there are too many.

        Raises `ReadFailedError`.
        """
        if path in self._maps or self._is_remote(path) or len(_mapped) >= system.most_open():
            return self._maps.get(path)
        fingerprint, mapped = self._fingerprints.get(path), None
        with open_unchanged(path, fingerprint).descriptor as descriptor:
            try:
                mapped = system.mmap(descriptor, 0, mmap.MAP_PRIVATE | MAP_NORESERVE)
            except (OSError, ValueError) as error:
                if getattr(error, "errno", None) not in _NO_MAPS:
                    raise read_failed("the file cannot be mapped", path, error) from error
            else:
                _mapped.add(mapped)
        if mapped is not None and fingerprint is not None and len(mapped) < fingerprint.nbytes:
            raise ReadFailedError(
                "the file has become shorter since it was opened",
                where=path,
                expected=f"{fingerprint.nbytes} bytes",
                found=f"{len(mapped)} bytes",
                remedy=OPEN_AGAIN,
            )
        return self._maps.setdefault(path, mapped)  # another thread may have mapped it meanwhile


def views_of(maps: Mapping[str, mmap.mmap], columns: TensorColumns) -> list[torch.Tensor]:
    """Returns tensors, as those of `Maps.tensors`, as views of maps of their files."""
    import torch

    views: list[torch.Tensor] = []
    with torch.inference_mode(False):  # a tensor of that mode cannot be trained later
        for dtype, shape, path, start, nbytes in columns.rows():
            tensor = torch.frombuffer(maps[path], dtype=dtype, count=nbytes // dtype.itemsize, offset=start)
            views.append(tensor if len(shape) == 1 else tensor.resize_(*shape) if shape else tensor.resize_(shape))
    return views


_lock = fork_safe_lock()
_mapped = weakref.WeakSet[mmap.mmap]()
"""The maps of this process. Each has a file descriptor."""


UNALIGNED = "read into memory, not mapped: its elements are not at multiples of their size, as memory needs them"
_REFUSED = "its file system has no maps, or the system refuses them"
_TOO_MANY = "a quarter of the file descriptors that this process may have (ulimit -n) hold maps already"
_MAPS_IT = "ms.load(map=True) maps it all the same"
_NO_MAPS = (errno.ENODEV, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM)
"""The errors of a file system that has no maps, and of a system that does not permit them."""
_WRITABLE = 0o222
"""A file without these bits can be written to only by changing its mode, or as root."""
