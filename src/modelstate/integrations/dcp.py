"""`ms.dcp`: storage for `torch.distributed.checkpoint`.

`Reader` has `dcp.load` read every checkpoint that `modelstate.open` opens, `Writer` has `dcp.save` write the files of
`modelstate.save`:

>>> dcp.load(state_dict, storage_reader=ms.dcp.Reader("model.safetensors"))
>>> dcp.save(state_dict, storage_writer=ms.dcp.Writer("run.safetensors"))

A step of training waits for what is imported here: `Writer` imports what writes in the thread that writes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from modelstate.arguments import TIMEOUT_SECONDS
from modelstate.errors import DistributedError, OptionError

if TYPE_CHECKING:
    from modelstate.integrations.dcp_reader import Reader as Reader

__all__ = ["Reader", "Writer"]


def __getattr__(name: str) -> Any:
    if name != "Reader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from modelstate.integrations.dcp_reader import Reader

    return Reader


class Writer(StorageWriter):
    """Writes what `torch.distributed.checkpoint.save` and `async_save` save, as `modelstate.save` does.

    All ranks write their regions straight into the final safetensors files, with digests, and one rank commits: the
    path has the old checkpoint or the new one, in full and durable, whichever rank fails. The files have the names of
    the flattened state dict; every tool for safetensors reads them, and `modelstate.open` gives back the tree.

    Names that only some ranks have, such as the layers of a stage of a pipeline, are saved from those ranks. Tensors
    that are no DTensors, and other values, must be equal on all ranks that have them. Errors are raised on all ranks,
    as `CheckpointException`.

    Args:
        path: The file to write, which ends in ".safetensors"; or a directory, for the file `model.safetensors` in it.
            None for the `checkpoint_id` of `dcp.save`, which replaces the path.
        shard_size_bytes, overwrite: As in `modelstate.save`.
        process_group: The `process_group` of `dcp.save`; None for all ranks.
        timeout_seconds: How long a rank waits for the others.

    Examples:
        >>> dcp.save({"model": model, "optimizer": optimizer}, storage_writer=ms.dcp.Writer("run.safetensors"))
        >>> future = dcp.async_save(state, storage_writer=ms.dcp.Writer("run.safetensors"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        shard_size_bytes: int | None = None,
        overwrite: bool = True,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._path, self._group = path, process_group
        self._options: dict[str, Any] = {"shard_size_bytes": shard_size_bytes, "overwrite": overwrite, "progress": None}
        self._timeout_seconds = timeout_seconds

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes the `checkpoint_id` of `dcp.save`, if there is one, as the path."""
        if checkpoint_id is not None:
            self._path = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path can be given by this value."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def set_up_storage_writer(self, is_coordinator: bool, *_: object, **__: object) -> None:
        """Does nothing: the files are created when all ranks write."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Checks the path. What each rank writes follows from the placements of its tensors."""
        self._target = self._file()
        group = self._group_of_ranks()
        return replace(plan, storage_data=0 if group is None else dist.get_world_size(group))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells each rank how many of them save."""
        others = {plan.storage_data for plan in plans} - {len(plans)}
        if len(plans) > 1 and others:
            raise DistributedError(
                "the ranks of the writer are not those of dcp.save",
                expected=f"{len(plans)} ranks",
                found=f"{min(others)} ranks",
                remedy="modelstate.dcp.Writer(process_group=) with the process_group of dcp.save",
            )
        return [replace(plan, storage_data=len(plans)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes and commits the state of the planner, with all ranks."""
        # In the thread of `dcp.async_save`, where a program does not wait for the imports.
        from modelstate.checkpoint.write import SaveOptions
        from modelstate.distributed.agreement import PLANNING, agreement_of
        from modelstate.formats.dcp import tree_of
        from modelstate.integrations.dcp_state import state_of, with_values_of_all
        from modelstate.objects.objects import tensors_within
        from modelstate.objects.save import save_with

        group = self._group_of_ranks() if plan.storage_data > 1 else None
        agreement = agreement_of((), group, self._timeout_seconds, "dcp.save")
        if agreement.is_collective:  # the thread of dcp.async_save votes while the program may save or load
            agreement = agreement.on_channel("dcp.save")
        with agreement.collective():
            with agreement.phase(PLANNING):
                state = state_of(planner)
            if group is not None:
                state = with_values_of_all(state, agreement, group)
            tree = tree_of(state)
            if group is None:  # DTensors still need the ranks of their mesh
                agreement = agreement_of(tensors_within(tree, reshards=True), None, self._timeout_seconds, "dcp.save")
            save_with(agreement, tree, self._target, SaveOptions(**self._options))
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Does nothing: `write_data` has committed."""

    def _group_of_ranks(self) -> dist.ProcessGroup | None:
        is_distributed = dist.is_available() and dist.is_initialized()
        return self._group or (dist.group.WORLD if is_distributed else None)

    def _file(self) -> str:
        if self._path is None:
            raise OptionError("dcp.save has no path", remedy="ms.dcp.Writer(path); or dcp.save(checkpoint_id=path)")
        from modelstate.io.atomic import make_directory, write_errors
        from modelstate.io.files import local_path

        path = local_path(os.fspath(self._path))
        if path.endswith(".safetensors"):
            return path
        with write_errors(path):
            make_directory(path)
        return os.path.join(path, "model.safetensors")
