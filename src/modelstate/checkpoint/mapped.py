"""Maps tensors from files: nothing is read until it is used, and nothing is copied."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from modelstate.errors import OPEN_AGAIN, ReadFailedError, SourceTypeError
from modelstate.forks import fork_safe_lock
from modelstate.io import system
from modelstate.io.engine import read_ranges
from modelstate.io.files import FileFingerprint, check_mapped, open_regular, open_unchanged, read_failed
from modelstate.io.lease import NAMELESS, hold
from modelstate.io.linux import MAP_NORESERVE
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
        self._maps: dict[str, mmap.mmap] = {}
        self._views: dict[tuple[ByteRange, int], tuple[torch.Tensor, int]] = {}
        self._read: weakref.WeakValueDictionary[tuple[ByteRange, int], torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._can_map: dict[tuple[str, bool | None], bool] = {}
        self._mappable: dict[str, bool] = {}
        self._notes: dict[str, list[str]] = {}

    def tensor(self, stored: Stored) -> torch.Tensor:
        """The tensor as a view of its file; a tensor that is in memory already as a detached alias.

        Bytes are copied only where the file stores numbers at an address that is not a multiple of their size. Raises
        `ReadFailedError` where the file cannot be mapped, or has changed.
        """
        import torch

        if torch.is_inference_mode_enabled():
            # A tensor that is created in inference mode cannot be trained later.
            with torch.inference_mode(False):
                return self.tensor(stored)
        if isinstance(stored, StoredComposite):
            return stored.build([self.tensor(part) for part in stored.parts])
        if isinstance(stored, Combined):
            return self.read(stored)  # computed tensors have no place in a file
        if not isinstance(stored, StoredTensor):
            return stored.detach()
        if stored.nbytes == 0:
            return torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device="cpu")
        if not self.is_mappable(stored.extent.path):
            return self.read(stored)
        region, dtype = stored.extent, stored.dtype
        key = region, dtype.itemsize
        view, address = self._views.get(key, _NO_VIEW)
        # The code that received the first tensor may have changed its storage.
        if view is None or view.data_ptr() != address or view.untyped_storage().nbytes() != region.nbytes:
            # Its storage is no larger than these bytes, even if the stored storage is.
            path, start, nbytes = region
            file = self._map(path)
            if start % dtype.itemsize == 0:
                view = torch.frombuffer(file, dtype=dtype, count=nbytes // dtype.itemsize, offset=start)
            else:  # torch's vectorised code may assume that a number lies at a multiple of its size
                raw = torch.frombuffer(file, dtype=torch.uint8, count=nbytes, offset=start)
                view = torch.empty(0, dtype=dtype, device="cpu").set_(raw.clone().untyped_storage())
            self._views[key] = view, view.data_ptr()
            if stored.is_contiguous:
                # Reshaped in place: no other object is created, and torch parses single numbers faster than a tuple.
                shape = stored.shape
                return view if len(shape) == 1 else view.resize_(*shape) if shape else view.resize_(shape)
        empty = torch.empty(0, dtype=dtype, device="cpu")
        return empty.set_(view.untyped_storage(), 0, stored.shape, stored.stride)

    def tensors(self, columns: TensorColumns) -> list[torch.Tensor]:
        """Contiguous tensors as views of their files. They have bytes, at multiples of their size, and share none.

        Raises `ReadFailedError` where a file cannot be mapped, or has changed.
        """
        return views_of({path: self._map(path) for path in {*columns.paths}}, columns)

    def tensor_for_user(self, stored: Stored, option: bool | None) -> torch.Tensor:
        """The tensor as a view of its file where `can_map` allows that, else in memory of its own.

        In both cases tensors of the same bytes share memory while one of them is alive. Raises `ReadFailedError`.
        """
        import torch

        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.tensor_for_user(stored, option)
        if isinstance(stored, StoredTensor) and stored.nbytes:
            is_mapped = option is not False and self.can_map(stored.extent, option)
            return self.tensor(stored) if is_mapped else self._in_memory(stored)
        if isinstance(stored, StoredComposite):
            return stored.build([self.tensor_for_user(part, option) for part in stored.parts])
        return self.tensor(stored)

    def _in_memory(self, stored: StoredTensor) -> torch.Tensor:
        runs = stored.runs()
        storage = self._in_use(stored)
        if storage is None:
            tensor = self.read(stored)
            with _lock:
                storage = self._in_use(stored)  # another thread may have read them meanwhile
                if storage is None:
                    self._read[runs.extent, runs.run_bytes] = tensor.untyped_storage()
                    return tensor
        import torch

        return torch.empty(0, dtype=stored.dtype, device="cpu").set_(storage, 0, stored.shape, runs.stride)

    def _in_use(self, stored: StoredTensor) -> torch.UntypedStorage | None:
        """The memory of a tensor that is alive, into which these bytes have been read."""
        runs = stored.runs()
        storage = self._read.get((runs.extent, runs.run_bytes))
        return storage if storage is not None and storage.nbytes() == runs.nbytes else None

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
            if fingerprint is not None:
                check_mapped(path, fingerprint, mapped.size())

    def is_remote(self, path: str) -> bool:
        """Whether a file of the checkpoint is outside this machine, so that it cannot be mapped."""
        known = self._fingerprints.get(path)
        return known is not None and known.is_remote

    def is_mappable(self, path: str) -> bool:
        """Whether a file of the checkpoint can be mapped: it is on this machine, and its file system has maps.

        Raises `ReadFailedError` where mapping it fails for another reason.
        """
        known = self._mappable.get(path)
        if known is None:
            known = not self.is_remote(path)
            try:
                if known:
                    self._map(path)
            except ReadFailedError as error:
                if getattr(error.__cause__, "errno", None) not in _NO_MAPS:
                    raise
                known = False
            self._mappable[path] = known
        return known

    def can_map(self, extent: ByteRange, option: bool | None) -> bool:
        """Whether tensors that are kept may be mapped from this file, which is then protected while its map lives.

        A read lease makes other processes that open the file for writing wait until the tensors have memory of their
        own; see `modelstate.io.lease`. `notes` has the remarks about the decision.

        Args:
            extent: The bytes of a tensor. The file is mapped, unless there are none.
            option: The option `map`: with None a file may be mapped only where nothing can go wrong, with True always.
        """
        path = extent.path
        if self.is_remote(path):
            if option:
                self.note("read into memory: only files of this machine are mapped", path)
            return False
        known = self._can_map.get((path, option))
        if known is None:
            if extent.nbytes and not self.is_mappable(path):
                self.note("read into memory, not mapped: its file system has no maps, or the system refuses them", path)
                return False
            if path not in self._maps:
                return True  # only tensors without bytes were requested
            known = self._can_map[path, option] = self._protect(path, option)
        return known

    def _protect(self, path: str, option: bool | None) -> bool:
        mapped, fingerprint = self._maps[path], self._fingerprints.get(path)
        try:
            descriptor, status = open_regular(path)
        except (FileNotFoundError, NotADirectoryError, SourceTypeError):
            return True  # the mapped file has no name any more, by which it could be overwritten
        except OSError as error:
            raise read_failed("the file can no longer be opened", path, error) from error
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
            unprotected = hold(path, descriptor, mapped) if status.st_nlink else NAMELESS
        finally:
            descriptor.close()
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
        self._notes.setdefault(what, []).append(os.path.basename(path))

    @property
    def notes(self) -> list[str]:
        """Remarks about files that are mapped, or cannot be, for the report of a load."""
        return [
            f"{names[0]}{f' and {len(names) - 1} more files' if len(names) > 1 else ''}: {what}"
            for what, names in self._notes.items()
        ]

    def _map(self, path: str) -> mmap.mmap:
        """The map of a file, which is as long as when it was opened. Raises `ReadFailedError`."""
        mapped = self._maps.get(path)
        if mapped is None:
            fingerprint = self._fingerprints.get(path)
            descriptor, _ = open_unchanged(path, fingerprint)
            try:
                mapped = system.mmap(descriptor, 0, mmap.MAP_PRIVATE | MAP_NORESERVE)
            except (OSError, ValueError) as error:
                raise read_failed("the file cannot be mapped", path, error) from error
            finally:
                descriptor.close()
            if fingerprint is not None and len(mapped) < fingerprint.nbytes:
                raise ReadFailedError(
                    "the file has become shorter since it was opened",
                    where=path,
                    expected=f"{fingerprint.nbytes} bytes",
                    found=f"{len(mapped)} bytes",
                    remedy=OPEN_AGAIN,
                )
            mapped = self._maps.setdefault(path, mapped)  # another thread may have mapped it meanwhile
        return mapped


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


UNALIGNED = "read into memory, not mapped: its elements are not at multiples of their size, as memory needs them"
_MAPS_IT = "map=True, in Python, maps it all the same"
_NO_MAPS = (errno.ENODEV, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM)
"""The errors of a file system that has no maps, and of a system that does not permit them."""
_WRITABLE = 0o222
"""A file without these bits can be written to only by changing its mode, or as root."""
_NO_VIEW: tuple[torch.Tensor | None, int] = (None, 0)
