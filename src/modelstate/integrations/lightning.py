"""Writes and reads Lightning's checkpoints as files that are complete and durable, or do not exist.

>>> trainer = Trainer(plugins=[StoreCheckpointIO()])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from time import perf_counter

import torch

from modelstate.arguments import invalid_option
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.checkpoint.write import SaveOptions, StateToWrite, write_state
from modelstate.errors import CodecError, OpenError, OptionError, PackageError, ReadFailedError
from modelstate.formats.recognise import Format, recognise
from modelstate.formats.tree import map_leaves
from modelstate.io import system
from modelstate.io.atomic import make_directory, sync_directory, write_errors
from modelstate.io.files import SourceFile, local_path
from modelstate.text_format import short_repr

try:
    from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
except ImportError as error:
    raise PackageError(
        "this needs lightning, which is not here", found=error, remedy='pip install "modelstate[lightning]"'
    ) from error

_IGNORE_REMEDY = "self.save_hyperparameters(ignore=[...]) leaves one out"


class StoreCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Writes and reads the checkpoints of a Lightning Trainer as `modelstate.save` does, at the Trainer's paths.

    A checkpoint is complete and durable at its path, or does not exist. It is a safetensors file, whatever its suffix:
    tied tensors are written once, other values are encoded without pickle, and reading runs no code of the file.
    Checkpoints that Lightning itself wrote are read by Lightning, so a run can change over at any time.

    Args:
        verify: Whether everything is compared with its digests before it is used.

    Examples:
        >>> trainer = Trainer(max_epochs=3, plugins=[StoreCheckpointIO()])
        >>> trainer.fit(module, ckpt_path="last")
    """

    def __init__(self, *, verify: bool = True) -> None:
        super().__init__()
        self._verify = verify

    def save_checkpoint(
        self, checkpoint: dict[str, object], path: str | os.PathLike[str], storage_options: object = None
    ) -> None:
        """Saves a checkpoint, and returns when it is durable. On any error the path is as it was.

        Args:
            checkpoint: The dict of the Trainer.
            path: The file to write; its directory is created.
            storage_options: Must be None, since the file is local.

        Raises:
            CodecError: A value has no encoding; the error has the keys that lead to it.
            OptionError: There are `storage_options`.

        It raises what `modelstate.save` raises.
        """
        if storage_options is not None:
            raise OptionError("storage_options= means nothing to a local file", found=short_repr(storage_options))
        where = local_path(os.fspath(path))
        with write_errors(where):
            make_directory(os.path.dirname(where))
        try:
            # The suffix is Lightning's, .ckpt by default, and does not choose the format here.
            write_state(StateToWrite(checkpoint), where, perf_counter(), SaveOptions(format="safetensors"))
        except CodecError as error:
            error.remedy = f"{error.remedy}; {_IGNORE_REMEDY}" if error.remedy else _IGNORE_REMEDY
            raise

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Loads a checkpoint.

        Args:
            path: A file of `save_checkpoint`, or of Lightning's own.
            map_location: As in `torch.load`; None leaves tensors on the CPU.
            weights_only: Only for files of Lightning's own, as in `torch.load`.

        Returns:
            The checkpoint as it was saved.

        Raises:
            ChecksumError: The file is damaged.
            CodecError: A class of a value is not imported.

        It raises what `modelstate.open` raises.
        """
        where = local_path(os.fspath(path))
        if _is_torchs(where):
            loaded: dict[str, object] = TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
            return loaded
        checkpoint = open_checkpoint(where)
        if self._verify and checkpoint.checksums:
            checkpoint.verify()
        place, placed = _placement(map_location), dict[int, torch.Tensor]()

        def move(_: object, leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in placed:  # a tensor in several places stays one
                placed[id(leaf)] = place(leaf)
            return placed[id(leaf)]

        state: dict[str, object] = map_leaves(checkpoint.value(), move)
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint, durably. A directory is a checkpoint of Lightning's own."""
        where = local_path(os.fspath(path))
        if os.path.isdir(where) and not os.path.islink(where):
            TorchCheckpointIO().remove_checkpoint(path)
        elif os.path.lexists(where):
            with write_errors(where):
                system.unlink(where)
                sync_directory(os.path.dirname(where))


def _is_torchs(path: str) -> bool:
    try:
        with SourceFile(path) as file:
            return recognise(file.head) in (Format.TORCH_ZIP, Format.TORCH_LEGACY)
    except (OpenError, ReadFailedError):
        return False  # the opening of it raises the error


def _placement(map_location: object) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that does to a tensor from the CPU what torch's `map_location` does."""
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    if map_location is None:
        return lambda tensor: tensor
    if isinstance(map_location, str | torch.device):
        return lambda tensor: tensor.to(map_location)
    if not callable(map_location):
        raise invalid_option(
            "map_location", "has an invalid value", map_location, expected="a device, a mapping or a function"
        )

    def place(tensor: torch.Tensor) -> torch.Tensor:
        storage = map_location(tensor.untyped_storage(), "cpu")
        if storage is None or storage.data_ptr() == tensor.untyped_storage().data_ptr():
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    return place
