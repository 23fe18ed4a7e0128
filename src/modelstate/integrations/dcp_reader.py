"""`ms.dcp.Reader`: reads every checkpoint for `torch.distributed.checkpoint.load`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import Source, open as open_checkpoint
from modelstate.distributed.agreement import Digest
from modelstate.errors import CodecError, DistributedError
from modelstate.formats.construct import refusal
from modelstate.formats.torch_zip import pickled
from modelstate.formats.tree import refused_in
from modelstate.io.engine import Request, read_ranges
from modelstate.loading.collective import digest_of_source
from modelstate.planning.matching import Patterns, entries_of
from modelstate.planning.quantized import QuantizedCandidate, quantized_weights
from modelstate.problems import CHANGES_KIND, LOSES_VALUES, Problem, ProblemKind, plan_error
from modelstate.rules.expression import Source as TensorSource, is_dequantized, region, values_of
from modelstate.rules.joining import SCALABLE
from modelstate.rules.rule import Rule, Value
from modelstate.rules.schema import Schema, apply_rules, check_rules
from modelstate.spec import Refused, is_run
from modelstate.torch_compat.dtypes import cast_between, short
from modelstate.torch_compat.plain import is_plain_memory

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
        return isinstance(checkpoint_id, str | os.PathLike)

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
                failed = {name: error} if isinstance(error, CodecError) else {}
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
                problems.append(Problem(ProblemKind.NOT_A_TENSOR, name, found=why))
            if isinstance(error := self._values.get(name), CodecError):
                raise error
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
            raise DistributedError(
                "the ranks that compared digests are not those of dcp.load",
                expected=f"{len(plans)} ranks",
                found=f"{self._shares} ranks",
                remedy="modelstate.dcp.Reader(process_group=) with the process_group of dcp.load; or verify=False",
            )
        digests: list[Digest] = [plan.storage_data for plan in plans]
        other = next((rank for rank, digest in enumerate(digests) if digest.number != digests[0].number), None)
        if other is not None:
            raise DistributedError(
                "the ranks have different sources; nothing has been changed",
                expected=f"rank 0: {digests[0].text}",
                found=f"rank {other}: {digests[other].text}",
                remedy="give all ranks the same checkpoint",
            )
        self._check_all_are_asked_for({item.storage_index.fqn for plan in plans for item in plan.items})
        return [replace(plan, storage_data=None) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the regions of this rank into the tensors of the state dict."""
        regions, problems, numbers = [], list[Problem](), list[QuantizedCandidate]()
        state = getattr(planner, "state_dict", {})
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                if isinstance(state.get(item.dest_index.fqn), torch.Tensor):
                    found = type(self._values[name]).__name__
                    problems.append(Problem(ProblemKind.NOT_A_TENSOR, name, found=found))
                continue
            source, target = self._tensor(name), planner.resolve_tensor(item).detach()
            cast = cast_between(source.dtype, target.dtype)
            if source.dtype in SCALABLE and source.dtype != target.dtype and target.is_floating_point():
                numbers += [QuantizedCandidate(name, other, has_numbers=True) for other in self._entries[name].sources]
            if cast == "kind" or (cast == "lossy" and not is_dequantized(source)):
                why = CHANGES_KIND if cast == "kind" else LOSES_VALUES
                problem = Problem(ProblemKind.WRONG_DTYPE, name, short(target.dtype), short(source.dtype), why=why)
                problems.append(problem)
            box = zip(item.storage_offsets, item.lengths, strict=True)
            regions.append((item, target, region(source, [slice(start, start + size) for start, size in box])))
        if numbers:
            used = {source for name in self._entries.keys() & state.keys() for source in self._entries[name].sources}
            quantized, _ = quantized_weights(dict.fromkeys(numbers), self._checkpoint, set(self._checkpoint) - used)
            names = {problem.name for problem in quantized}
            problems = [*(problem for problem in problems if problem.name not in names), *quantized]
        if problems:
            remedy = "rules=ms.rules.Cast(name, dtype) casts; or make the state dict with the dtypes of the checkpoint"
            raise plan_error(
                _TARGET, self._checkpoint.source, list(dict.fromkeys(problems)), {ProblemKind.WRONG_DTYPE: remedy}
            )
        requests = []
        for _, target, source in regions:
            if is_run(source) and is_plain_memory(target) and source.dtype == target.dtype:
                torch.autograd.graph.increment_version(target)
                requests.append(Request(source.extent, target.data_ptr()))
            else:
                target.copy_(values_of(source, self._checkpoint.read))
        read_ranges(requests, files=self._checkpoint.fingerprints)
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
            Problem(ProblemKind.UNEXPECTED, name, found=tuple(self._tensor(name).shape))
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
