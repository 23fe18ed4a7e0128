"""Tensors that are views of files: nothing is read until it is used, nothing is copied."""

import mmap
import os
import sys
from collections.abc import Mapping
from functools import partial

import torch

from modelstate.errors import ReadFailedError
from modelstate.read import system
from modelstate.read.own import own_values
from modelstate.read.ranges import read_ranges
from modelstate.read.stamp import Stamp, check_mapped, open_unchanged
from modelstate.spec import ByteRange, Combined, Stored, StoredComposite, StoredTensor

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Linux would count a map that may be written as memory, and refuse a file that is larger than there is."""


class Maps:
    """Private, copy-on-write maps of the files of a checkpoint.

    Writing to a tensor changes neither the file nor the tensors of another `Maps`; it does change the other tensors
    of this one that share its bytes. So every load takes a `Maps` of its own. A map lives as long as a tensor that
    shows it.

    The file must not be overwritten in place while a map of it lives: that changes the tensors, and shortening it
    ends the process with SIGBUS when they are used. Replacing it by a rename is safe, for the map keeps the old file.
    """

    def __init__(self, stamps: Mapping[str, Stamp]) -> None:
        self._stamps = stamps
        self._maps: dict[str, mmap.mmap] = {}
        self._shown: dict[tuple[ByteRange, int], tuple[torch.Tensor, int]] = {}

    def tensor(self, stored: Stored) -> torch.Tensor:
        """The tensor as a view of its file; in memory already: a detached alias.

        Only where the file has put a number at an odd address are its bytes copied. Raises `ReadFailedError` where
        the file cannot be mapped, or has become shorter than it was.
        """
        if torch.is_inference_mode_enabled():
            # What is made in that mode could never be trained.
            with torch.inference_mode(False):
                return self.tensor(stored)
        if isinstance(stored, StoredTensor):
            if stored.nbytes == 0:
                return torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device="cpu")
            return self._strided(stored)
        if isinstance(stored, StoredComposite):
            return stored.build([self.tensor(part) for part in stored.parts])
        if isinstance(stored, Combined):
            return self.read(stored)  # what is computed is looked at here and now
        return stored.detach()

    def read(self, stored: Stored) -> torch.Tensor:
        """The values in memory of their own, with no map. See `own_values`."""
        return own_values(stored, partial(read_ranges, stamps=self._stamps))

    def check_unchanged(self) -> None:
        """Raises `ReadFailedError` where a file is not what it was when it was mapped.

        That its name belongs to another file by now does no harm.
        """
        for path, found in self._maps.items():
            stamp = self._stamps.get(path)
            if stamp is not None:
                check_mapped(path, stamp, found.size())

    def _strided(self, stored: StoredTensor) -> torch.Tensor:
        region, dtype = stored.extent, stored.dtype
        key = region, dtype.itemsize
        shown, address = self._shown.get(key, _NOTHING_SHOWN)
        # Whoever got the first tensor may have made it point elsewhere.
        if shown is None or shown.data_ptr() != address or shown.untyped_storage().nbytes() != region.nbytes:
            shown = self._flat(region, dtype)
            self._shown[key] = shown, shown.data_ptr()
            if stored.is_contiguous:
                return _reshaped(shown, stored.shape)
        empty = torch.empty(0, dtype=dtype, device="cpu")
        return empty.set_(shown.untyped_storage(), 0, stored.shape, stored.stride)

    def _flat(self, region: ByteRange, dtype: torch.dtype) -> torch.Tensor:
        """These bytes, in a storage that shows no more, whatever larger one of the file they are a part of."""
        file, (_, start, nbytes), itemsize = self._map(region), region, dtype.itemsize
        if start % itemsize == 0:
            return torch.frombuffer(file, dtype=dtype, count=nbytes // itemsize, offset=start)
        # torch's vector code may assume that a number lies at a multiple of its size.
        raw = torch.frombuffer(file, dtype=torch.uint8, count=nbytes, offset=start)
        return torch.empty(0, dtype=dtype, device="cpu").set_(raw.clone().untyped_storage())

    def _map(self, region: ByteRange) -> mmap.mmap:
        found = self._maps.get(region.path)
        if found is None:
            descriptor = open_unchanged(region.path, self._stamps.get(region.path))
            try:
                found = system.mmap(descriptor, 0, mmap.MAP_PRIVATE | _NO_RESERVE)
            except (OSError, ValueError) as error:
                raise ReadFailedError("the file cannot be mapped", where=region.path, found=error) from error
            finally:
                os.close(descriptor)
            self._maps[region.path] = found
        if region.start + region.nbytes > len(found):
            raise ReadFailedError(
                "the file has become shorter since it was opened",
                where=region.path,
                expected=f"at least {region.start + region.nbytes} bytes",
                found=f"{len(found)} bytes",
                remedy="open the checkpoint again, when nothing writes to it any more",
            )
        return found


_NOTHING_SHOWN: tuple[torch.Tensor | None, int] = (None, 0)


def _reshaped(flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of one dimension with another shape of as many elements, without another object."""
    if len(shape) == 1:
        return flat
    return flat.resize_(*shape) if shape else flat.resize_(shape)  # torch parses numbers faster than a tuple of them
