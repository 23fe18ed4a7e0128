"""Lightning's checkpoints as files that are complete and durable, or not there.

trainer = Trainer(plugins=[StoreCheckpointIO()])
"""

import os
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch

from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.checkpoint.write import StateToWrite, write_state
from modelstate.errors import OpenError, OptionError, PackageError, ReadFailedError, UnsupportedValueError
from modelstate.formats import torch_legacy, torch_zip
from modelstate.io import write_system
from modelstate.io.atomic import sync_directory, write_errors
from modelstate.io.files import SourceFile, local_path

try:
    from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
except ImportError as found:
    raise PackageError(
        "this needs lightning, which is not here", found=found, remedy='pip install "modelstate[lightning]"'
    ) from found

_HEAD_BYTES = 64
_SKIP = "self.save_hyperparameters(ignore=[...]) leaves one out"


class StoreCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Writes and reads the checkpoints of a Lightning Trainer as `modelstate.save` does, at the paths that it chooses.

    A checkpoint is at its path in full, on the disk, or it is not there. It is a safetensors file, whatever its name:
    tied tensors are written once, values that are no tensors are encoded without pickle, and reading runs nothing.
    Checkpoints that Lightning itself has written are read as Lightning does, so a run can change over at any time.

    Args:
        verify: whether everything is compared with its digests before it is used.
    """

    def __init__(self, *, verify: bool = True) -> None:
        super().__init__()
        self._verify = verify

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Returns when the checkpoint is durable.

        Raises `UnsupportedValueError` for a value without an encoding, with the keys that lead to it, and what
        `modelstate.save` raises. Then what was at the path is as it was.
        """
        if storage_options is not None:
            raise OptionError("storage_options= means nothing to a local file", found=repr(storage_options)[:80])
        where = local_path(os.fspath(path))
        with write_errors(where):
            os.makedirs(os.path.dirname(where) or ".", exist_ok=True)
        try:
            # Lightning chooses the suffix, .ckpt by default, which does not say the format here.
            write_state(
                StateToWrite(checkpoint), where, perf_counter(), format="safetensors", shard_bytes=None, overwrite=True
            )
        except UnsupportedValueError as error:
            error.remedy = f"{error.remedy}; {_SKIP}" if error.remedy else _SKIP
            raise

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint as it was saved, on the CPU unless `map_location` says otherwise.

        `weights_only` has a meaning for files of Lightning's own alone. Raises what `modelstate.open` raises,
        `ChecksumError` for a damaged file, and `CodecError` for a class that is not imported here.
        """
        where = local_path(os.fspath(path))
        if _is_torchs(where):
            loaded: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
            return loaded
        checkpoint = open_checkpoint(where)
        if self._verify and checkpoint.checksums:
            checkpoint.verify()
        made: dict[str, Any] = _moved(checkpoint.value(), _placing(map_location), {})
        return made

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Takes the file away, durably. A directory is one of Lightning's own."""
        where = local_path(os.fspath(path))
        if os.path.isdir(where) and not os.path.islink(where):
            TorchCheckpointIO().remove_checkpoint(path)
        elif os.path.lexists(where):
            with write_errors(where):
                write_system.unlink(where)
                sync_directory(os.path.dirname(where))


def _is_torchs(path: str) -> bool:
    try:
        with SourceFile(path) as file:
            head = file.read(0, min(file.nbytes, _HEAD_BYTES), "its beginning")
    except (OpenError, ReadFailedError):
        return False  # whoever opens it says what is wrong
    return torch_zip.matches(head) or torch_legacy.matches(head)


def _placing(map_location: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What torch's `map_location` does to a tensor that was saved from the CPU."""
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    if map_location is None:
        return lambda tensor: tensor
    if isinstance(map_location, str | torch.device):
        return lambda tensor: tensor.to(map_location)
    if not callable(map_location):
        raise OptionError("map_location= says where tensors belong", found=repr(map_location)[:80])
    return lambda tensor: _on(map_location(tensor.untyped_storage(), "cpu"), tensor)


def _on(storage: torch.UntypedStorage | None, tensor: torch.Tensor) -> torch.Tensor:
    if storage is None or storage.data_ptr() == tensor.untyped_storage().data_ptr():
        return tensor
    empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _moved(node: Any, place: Callable[[torch.Tensor], torch.Tensor], made: dict[int, torch.Tensor]) -> Any:
    """The containers with their tensors placed; those that are one object stay one."""
    if isinstance(node, torch.Tensor):
        if id(node) not in made:
            made[id(node)] = place(node)
        return made[id(node)]
    if isinstance(node, dict):
        for key, value in node.items():
            node[key] = _moved(value, place, made)
        return node
    if isinstance(node, list):
        node[:] = [_moved(value, place, made) for value in node]
        return node
    return tuple(_moved(value, place, made) for value in node) if type(node) is tuple else node
