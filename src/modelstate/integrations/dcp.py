"""`ms.dcp`: storage for `torch.distributed.checkpoint`.

`Reader` has `dcp.load` read every checkpoint that `modelstate.open` opens, `Writer` has `dcp.save` write the files of
`modelstate.save`:

>>> dcp.load(state_dict, storage_reader=ms.dcp.Reader("model.safetensors"))
>>> dcp.save(state_dict, storage_writer=ms.dcp.Writer("run.safetensors"))
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import Placement, Replicate
from torch.futures import Future

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import Source, is_path
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.checkpoint.write import SaveOptions
from modelstate.distributed.agreement import TIMEOUT_SECONDS, Agreement, agreement_of
from modelstate.distributed.connections import number_of
from modelstate.distributed.reports import Digest
from modelstate.errors import CodecError, OptionError, ProcessGroupError, RanksDifferError
from modelstate.formats.block_writer import write_blocks
from modelstate.formats.construct import refusal
from modelstate.formats.dcp import with_positions
from modelstate.formats.torch_zip import pickled
from modelstate.formats.tree import refused_in
from modelstate.io.atomic import make_directory, write_errors
from modelstate.io.engine import Request, read_ranges
from modelstate.io.files import local_path
from modelstate.loading.collective import digest_of_source
from modelstate.objects.objects import tensors_within
from modelstate.objects.save import save_with
from modelstate.planning.matching import DecodeFailure, Patterns, entries_of
from modelstate.planning.quantized import Candidate, quantized_weights
from modelstate.problems import NotATensor, Problem, Unexpected, WrongDtype, plan_error
from modelstate.rules.expression import Source as TensorSource
from modelstate.rules.expression import is_dequantized, region, values_of
from modelstate.rules.quantized import SCALABLE
from modelstate.rules.rule import Rule, Value
from modelstate.rules.schema import Schema, apply_rules, check_rules
from modelstate.spec import Refused, is_run
from modelstate.torch_compat.dtypes import cast_between, short
from modelstate.torch_compat.plain import is_plain_memory, is_sharded
from modelstate.torch_compat.private import storage_id
from modelstate.torch_compat.sharding import dtensor_on, local_tensor

_TARGET = "the state dict of dcp.load"


class Reader(StorageReader):
    """Reads any checkpoint for `torch.distributed.checkpoint.load`: safetensors, shards, torch files, DCP directories.

    Each rank reads the bytes of the regions that it asks for, through the rules. Before a tensor of the state dict is
    touched, `dcp.load` raises on all ranks for a name that the checkpoint lacks, for a shape that differs, for tensors
    of the checkpoint that no rank asks for, for bytes that are not those of their digests, and where the ranks have
    different sources. A cast that loses values or changes their kind is raised by each rank before it touches its own.
    An I/O error later on leaves tensors half loaded, as with all storage of DCP; `modelstate.load` does not.

    Of a checkpoint with several parts, such as a model and an optimizer, the state dict may lack whole parts, the items
    of the outermost container. No code of a pickle is run: `dcp.load` unpickles only what this reader has decoded.

    Args:
        source: What `modelstate.open` opens, or a `Checkpoint`, such as `Store.open("model")`. Each rank opens it.
        key: The part of the source to read, such as "model".
        rules: Rules, or a `Schema`, from the names of the checkpoint to those of the flattened state dict.
        allow_unexpected: Patterns of names that the state dict may lack.
        verify: Compares the checkpoint with its digests first; each rank reads an equal share of it for that.
        process_group: The `process_group` of `dcp.load`, for `verify`; None for all ranks.

    Examples:
        >>> state = {"model": get_model_state_dict(model)}
        >>> dcp.load(state, storage_reader=ms.dcp.Reader("training.pt"))
        >>> set_model_state_dict(model, state["model"])
    """

    def __init__(
        self,
        source: Source | Sequence[Source] | Checkpoint,
        *,
        key: str | None = None,
        rules: Rule | Iterable[Rule] | Schema = (),
        allow_unexpected: Sequence[str] = (),
        verify: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._source, self._key, self._rules = source, key, rules
        self._allow_unexpected, self._verify, self._group = tuple(allow_unexpected), verify, process_group
        self._shares = 1

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes the `checkpoint_id` of `dcp.load`, if there is one, as the source."""
        if checkpoint_id is not None:
            self._source = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a source can be given by this value."""
        return is_path(checkpoint_id)

    # Without parameters that are named `args` and `kwargs`: dcp.load would call it a second time after an error, and
    # where that succeeds, this rank would leave out the collectives.
    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """Opens the source, and returns its names, shapes and dtypes after the rules. Raises what `open` raises."""
        self._checkpoint = open_checkpoint(self._source, key=self._key)
        rules = self._rules
        rules = rules.rules_for(self._checkpoint) if isinstance(rules, Schema) else check_rules(rules)
        applied = apply_rules(rules, entries_of(self._checkpoint), self._checkpoint.read)
        applied.check("the rules cannot be applied; nothing has been changed", where=self._checkpoint.source)
        self._entries = applied.entries
        self._values: dict[str, object] = {}
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, entry in self._entries.items():
            if isinstance(entry.content, Value):
                error = entry.content.error
                failed = {name: DecodeFailure(error)} if isinstance(error, CodecError) else {}
                self._values |= failed or _leaves(name, entry.content.value)
            else:
                shape = torch.Size(entry.content.shape)
                whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
                described[name] = TensorStorageMetadata(TensorProperties(entry.content.dtype), shape, [whole])
        return Metadata({**described, **dict.fromkeys(self._values, BytesStorageMetadata())})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: object, **__: object) -> None:
        """Does nothing: `read_metadata` has opened the source on each rank."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Checks the items of this rank, and this rank's share of the digests."""
        problems = []
        for name in dict.fromkeys(item.storage_index.fqn for item in plan.items):
            if name not in self._values and (why := self._entries[name].why_not_plain):
                problems.append(NotATensor(name, why))
            if isinstance(failure := self._values.get(name), DecodeFailure):
                raise failure.error
            if found := refused_in(self._values.get(name), name):
                raise refusal(found, self._checkpoint.source)
        if problems:
            raise plan_error(_TARGET, self._checkpoint.source, problems)
        if self._verify:
            is_distributed = dist.is_available() and dist.is_initialized()
            self._shares = dist.get_world_size(self._group) if is_distributed else 1
            first = dist.get_rank(self._group) if is_distributed else 0
            self._checkpoint.verification().run(share=slice(first, None, self._shares))
        return replace(plan, storage_data=digest_of_source(self._checkpoint))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks on one rank that all ranks have the same source, and that they ask for all of its tensors."""
        if self._verify and len(plans) != self._shares:
            raise ProcessGroupError(
                "the ranks that compared digests are not those of dcp.load",
                expected=f"{len(plans)} ranks",
                found=f"{self._shares} ranks",
                remedy="modelstate.dcp.Reader(process_group=) with the process_group of dcp.load; or verify=False",
            )
        digests: list[Digest] = [plan.storage_data for plan in plans]
        other = next((rank for rank, digest in enumerate(digests) if digest.number != digests[0].number), None)
        if other is not None:
            raise RanksDifferError(
                "the ranks have different sources; nothing has been changed",
                expected=f"rank 0: {digests[0].text}",
                found=f"rank {other}: {digests[other].text}",
                remedy="give all ranks the same checkpoint",
            )
        self._check_all_are_asked_for({item.storage_index.fqn for plan in plans for item in plan.items})
        return [replace(plan, storage_data=None) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the regions of this rank into the tensors of the state dict."""
        regions, problems, numbers = [], list[Problem](), list[Candidate]()
        state = getattr(planner, "state_dict", {})
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                if isinstance(state.get(item.dest_index.fqn), torch.Tensor):
                    problems.append(NotATensor(name, type(self._values[name]).__name__))
                continue
            source, target = self._tensor(name), planner.resolve_tensor(item).detach()
            cast = cast_between(source.dtype, target.dtype)
            if source.dtype in SCALABLE and source.dtype != target.dtype and target.is_floating_point():
                numbers += [Candidate(name, other, has_numbers=True) for other in self._entries[name].sources]
            if cast == "kind" or (cast == "lossy" and not is_dequantized(source)):
                problems.append(WrongDtype(name, short(target.dtype), short(source.dtype), cast))
            box = zip(item.storage_offsets, item.lengths, strict=True)
            regions.append((item, target, region(source, [slice(start, start + size) for start, size in box])))
        if numbers:
            used = {source for name in self._entries.keys() & state.keys() for source in self._entries[name].sources}
            quantized, _ = quantized_weights(dict.fromkeys(numbers), self._checkpoint, set(self._checkpoint) - used)
            names = {problem.name for problem in quantized}
            problems = [*(problem for problem in problems if problem.name not in names), *quantized]
        if problems:
            remedy = "rules=ms.rules.Cast(name, dtype) casts; or make the state dict with the dtypes of the checkpoint"
            raise plan_error(_TARGET, self._checkpoint.source, list(dict.fromkeys(problems)), {WrongDtype: remedy})
        requests = []
        for _, target, source in regions:
            if is_run(source) and is_plain_memory(target) and source.dtype == target.dtype:
                torch.autograd.graph.increment_version(target)
                requests.append(Request(source.extent, target.data_ptr()))
            else:
                target.copy_(values_of(source, self._checkpoint.read))
        read_ranges(requests, fingerprints=self._checkpoint.fingerprints)
        for item, target, _ in regions:
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, pickled(self._values[item.storage_index.fqn]))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _tensor(self, name: str) -> TensorSource:
        content = self._entries[name].content
        assert not isinstance(content, Value)
        return content

    def _check_all_are_asked_for(self, asked: set[str]) -> None:
        containers = set(self._checkpoint.containers)
        allowed = Patterns("allow_unexpected", self._allow_unexpected)

        def part(source: str) -> str:
            """Returns the outermost container of a name, empty if it is the whole."""
            ends = (at for at, character in enumerate(source) if character == ".")
            return next((source[:end] for end in ends if source[:end] in containers), "")

        parts = {
            name: {part(source) for source in entry.sources}
            for name, entry in self._entries.items()
            if not isinstance(entry.content, Value)
        }
        asked_parts = set().union(*(parts[name] for name in parts if name in asked))
        problems: list[Problem] = [
            Unexpected(name, tuple(self._tensor(name).shape))
            for name in parts
            if name not in asked
            and parts[name] & asked_parts
            and 0 not in self._tensor(name).shape
            # DCP plans no read of a tensor without elements.
            and not allowed.allow(name)
        ]
        problems += allowed.idle()
        if problems:
            raise plan_error(_TARGET, self._checkpoint.source, problems)


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
        self._options = SaveOptions(shard_size_bytes=shard_size_bytes, overwrite=overwrite, progress=None)
        self._timeout_seconds = timeout_seconds

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Takes the `checkpoint_id` of `dcp.save`, if there is one, as the path."""
        if checkpoint_id is not None:
            self._path = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a path can be given by this value."""
        return is_path(checkpoint_id)

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
            raise ProcessGroupError(
                "the ranks of the writer are not those of dcp.save",
                expected=f"{len(plans)} ranks",
                found=f"{min(others)} ranks",
                remedy="modelstate.dcp.Writer(process_group=) with the process_group of dcp.save",
            )
        return [replace(plan, storage_data=len(plans)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes and commits the state of the planner, with all ranks."""
        group = self._group_of_ranks() if plan.storage_data > 1 else None
        agreement = agreement_of((), group, self._timeout_seconds, "dcp.save")
        if agreement.is_collective:  # the thread of dcp.async_save votes while the program may save or load
            agreement = agreement.on_channel("dcp.save")
        with agreement.held():
            with agreement.phase("planning"):
                state = _state_of(planner)
            if group is not None:
                state = _with_values_of_all(state, agreement, group)
            tree = _tree(state)
            if group is None:  # DTensors still need the ranks of their mesh
                agreement = agreement_of(tensors_within(tree, reshards=True), None, self._timeout_seconds, "dcp.save")
            save_with(agreement, tree, self._target, self._options)
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
        path = local_path(os.fspath(self._path))
        if path.endswith(".safetensors"):
            return path
        with write_errors(path):
            make_directory(path)
        return os.path.join(path, "model.safetensors")


_Path = tuple[str | int, ...]


def _state_of(planner: SavePlanner) -> dict[_Path, object]:
    """Returns the values of a planner's state dict by their paths."""
    changed = [
        name
        for name in ("resolve_data", "lookup_object", "transform_object")
        if getattr(type(planner), name, None) is not getattr(DefaultSavePlanner, name)
    ]
    if changed or not isinstance(planner, DefaultSavePlanner):
        raise OptionError(
            "the planner of dcp.save changes what is saved",
            expected="a DefaultSavePlanner, or one that only plans otherwise",
            found=f"{type(planner).__name__}, with its own {', '.join(changed)}",
            remedy="change the state dict before dcp.save",
        )
    return {planner.mappings.get(name, (name,)): value for name, value in planner.state_dict.items()}


@dataclass(frozen=True, slots=True)
class _Layout:
    """A tensor of one rank, for ranks that lack it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    """Empty where the tensor is no DTensor; so is the mesh."""
    mesh: tuple[tuple[int, ...], tuple[int, ...]]
    """The shape of the mesh, and its ranks."""
    digest: str
    """Of the values of a tensor that is no DTensor."""
    tied_to: _Path
    """The first tensor of the rank that shows the same memory."""

    @classmethod
    def of_all(cls, state: Mapping[_Path, object]) -> "dict[_Path, _Layout]":
        """Returns the layouts of the tensors of a state."""
        layouts: dict[_Path, _Layout] = {}
        first: dict[object, _Path] = {}
        for path, value in state.items():
            if isinstance(value, torch.Tensor):
                tensor: Any = value
                local = local_tensor(value) if is_sharded(value) else value
                placements: tuple[Placement, ...] = ()
                mesh: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
                digest = ""
                if is_sharded(value):
                    placements = tuple(tensor.placements)
                    mesh = tuple(tensor.device_mesh.shape), tuple(map(int, tensor.device_mesh.mesh.flatten()))
                else:
                    (digest,) = write_blocks(None, 0, [value])
                view = storage_id(local), local.storage_offset(), local.stride(), tuple(value.shape), value.dtype
                tied_to = first.setdefault(view, path)
                layouts[path] = cls(value.dtype, tuple(value.shape), placements, mesh, digest, tied_to)
        return layouts


def _with_values_of_all(
    state: dict[_Path, object], agreement: Agreement, group: dist.ProcessGroup
) -> dict[_Path, object]:
    """Returns the state with the values and the DTensors that only other ranks have: a call of all ranks."""
    number = number_of(state)
    high, low = agreement.maximum("comparing the names", [number, -number])
    if high == -low:
        return state
    with agreement.phase("describing the state"):
        values = {path: value for path, value in state.items() if not isinstance(value, torch.Tensor)}
        own = values, _Layout.of_all(state)
        pickled(own)  # what cannot be sent is an error here, and not in the gather, where the others would wait
    with agreement.phase("planning"):
        of_ranks = [own] * len(agreement.ranks)
        dist.all_gather_object(of_ranks, own, group)  # raises on a rank that cannot unpickle what another one has sent
        ranks = dist.get_process_group_ranks(group)
        return _united(state, ranks, *zip(*of_ranks, strict=True))


def _united(
    state: dict[_Path, object],
    ranks: Sequence[int],
    values: Sequence[dict[_Path, object]],
    layouts: Sequence[dict[_Path, _Layout]],
) -> dict[_Path, object]:
    """Returns the state with the values and the DTensors of all ranks.

    A tensor of some ranks that is no DTensor becomes one that is replicated on these ranks. The order is the same on
    all ranks.
    """
    of_all: dict[_Path, object] = {}
    locals_of: dict[tuple[int, _Path], torch.Tensor] = {}
    for others in values:
        of_all = {**others, **of_all}
    for path in {path: None for others in layouts for path in others}:
        holders = [position for position, others in enumerate(layouts) if path in others]
        layout = layouts[holders[0]][path]
        mesh, placements = layout.mesh, layout.placements
        if len(holders) == len(ranks) or (path in state and placements):
            continue
        if not placements:
            mesh, placements = ((len(holders),), tuple(ranks[position] for position in holders)), (Replicate(),)
            if len({layouts[position][path] for position in holders}) > 1:
                raise RanksDifferError(
                    "a tensor that is no DTensor differs between the ranks that have it; nothing has been changed",
                    where=".".join(map(str, path)),
                    expected=f"the same values on the ranks {mesh[1]}",
                    remedy="make it a DTensor, or give it another name on each rank",
                )
        value = state.get(path)
        if not isinstance(value, torch.Tensor):
            # Ties are the same on all ranks.
            value = locals_of.setdefault((holders[0], layout.tied_to), torch.empty(0, dtype=layout.dtype, device="cpu"))
        of_all[path] = dtensor_on(*mesh, placements, layout.shape, value)
    # A value that is no tensor stays that of this rank, so that the save finds the ranks that differ.
    own = {path: value for path, value in state.items() if path not in of_all or not isinstance(value, torch.Tensor)}
    of_all = {**of_all, **own}
    return {path: of_all[path] for path in sorted(of_all, key=lambda path: [str(step) for step in path])}


def _tree(state: Mapping[_Path, object]) -> dict[Any, object]:
    """Returns the containers of a flattened state: dicts, and lists where the keys are integers.

    DCP turns the positions in the state of an optimizer into text; they become integers again.
    """
    root = _Node()
    for path, value in state.items():
        node = root
        for step in path[:-1]:
            below = node.setdefault(step, _Node())
            assert isinstance(below, _Node)
            node = below
        node[path[-1]] = value
    return with_positions({key: _finished(value) for key, value in root.items()})


class _Node(dict[Any, object]):
    """A container of the state dict, in contrast to a dict that is a value."""


def _finished(node: object) -> object:
    if type(node) is not _Node:
        return node
    if all(type(key) is int for key in node):
        return [_finished(node[index]) for index in sorted(node)]
    return with_positions({key: _finished(value) for key, value in node.items()})


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields the values below a name as DCP flattens them: dicts always, lists where they contain dicts."""
    if isinstance(value, Refused):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    elif isinstance(value, list) and not _is_leaf(value):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}.{index}", item)
    else:
        yield name, value


def _is_leaf(value: object) -> bool:
    return not isinstance(value, Mapping) and not (isinstance(value, list) and not all(map(_is_leaf, value)))
