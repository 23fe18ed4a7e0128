"""`Planner`: matches the values of a checkpoint with the slots of a model, and makes the transfers of a load.

`loading.load` has the order: names are compared, or the loading protocol of the model calls `Planner.tensor` with each
value; the value is checked; its way is chosen; then `coverage` accounts for every name and every slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import cycle, repeat

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.checkpoint.mapped import UNALIGNED, Maps
from modelstate.errors import CodecError, ExtraStateError, ModelStateError
from modelstate.io.engine import ReadStrategy
from modelstate.planning.mapped_state import MappedState
from modelstate.planning.matching import MatchedCheckpoint, ModelSchemaView, StoredEntries
from modelstate.planning.plan import Binding, LoadPlan, Step
from modelstate.planning.transfer import Execution, RowFacts, Transfers, Way, peak_bytes, plain_transfers, with_way
from modelstate.planning.transforms import Bound, ShardedSlot, Transforms, sharded_slot
from modelstate.problems import CHANGES_KIND, LOSES_VALUES, Problem, ProblemKind, one_line, option, wrong_shape
from modelstate.process import cached_attribute
from modelstate.rules.expression import Derived, is_dequantized, lacks_values, read_bytes
from modelstate.rules.rule import Entry
from modelstate.spec import GAP_BYTES, ByteRange, StoredTensor, StoredTensors, is_run
from modelstate.text_format import count, printable, size
from modelstate.torch_compat.dtypes import cast_between, short
from modelstate.torch_compat.plain import has_its_memory, is_fake, is_plain, is_quantized, is_sharded
from modelstate.torch_compat.private import shards_in_use
from modelstate.torch_compat.sharding import local_tensor, sharded_params
from modelstate.transaction.slots import BUFFER, EXTRA, HIDDEN, PARAMETER, SlotSignatures, signatures
from modelstate.transaction.transaction import Transaction, Write

CHECK_EXTRA_STATE = "_modelstate_check_extra_state"
"""The method of modules that can check an extra state without setting it."""
_LEAST_LEASED_BYTES = 1 << 20
"""Fewer bytes are staged: it takes no longer than to lease their files."""


class Planner:
    """Plans a load: collects the values that go to the slots of a model, with the problems and notes.

    A load calls `tensor` with the values of the checkpoint. `assign` turns a value and its slot into a
    transfer, and adds a write to the transaction. The write waits until the load is committed, unless code of the
    model uses the tensor before. The owner of the transaction must roll it back where there are problems.

    Args:
        transaction: The transaction of the load, whose root is the model.
        view: The slots of the model.
        matched: The part of the checkpoint that is loaded.
        make_write: Returns the write that executes a transfer.
        call_extra_state: Whether `set_extra_state` is called; a plan only checks values.
    """

    def __init__(
        self,
        transaction: Transaction,
        view: ModelSchemaView,
        matched: MatchedCheckpoint,
        make_write: Callable[[Execution], Write],
        *,
        call_extra_state: bool,
    ) -> None:
        self.transaction, self.model = transaction, transaction.root
        self.matched, self.view = matched, view
        self.checkpoint, self.options = matched.part, matched.options
        key = f" [{self.checkpoint.key}]" if self.checkpoint.key else ""
        self.names = type(self.model).__name__, self.checkpoint.source + key
        """The class of the model, and the source with the key of its part."""
        self.slots = self.slots_before = view.slots
        """The slots of the model. `slots` is updated after the walk: the model's code may have replaced tensors."""
        transform = self.options.transform
        self.transforms = None if transform is None else Transforms(transform, self.model, self.slots)
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.executions: list[Execution] = []
        """Everything that is loaded."""
        self.singles: list[Execution] = []
        """Those of values with facts of their own."""
        self.moves: list[Execution] = []
        """Tensors that get no value, and only move to another device."""
        self.used: set[str] = set()
        """Names, after the rules, whose values have been assigned to a slot."""
        self.uninitialised: dict[str, torch.Tensor] = {}
        """Lazy tensors that stay as they are: neither this module nor the saved one has initialised them."""
        self.initialised: dict[str, Entry] = {}
        """By name, what the model's own code computes for tensors that the checkpoint lacks."""
        self.extra_states: list[str] = []
        self.filled: dict[int, Execution | None] = {}
        """By the ids of the tensors that get a value, under whatever name. None stands for a row of columns."""
        self._mapped_storages: set[ByteRange] = set()
        """The storages of files that slots map. Slots that are not tied must not share memory."""
        entries = matched.applied.entries
        slots = {} if isinstance(entries, StoredEntries) else self.slots.by_name  # rows of columns are not quantized
        on_meta = [self.incoming.value(name) for name, slot in slots.items() if slot.tensor.is_meta and name in entries]
        has_quantized = any(isinstance(value, torch.Tensor) and is_quantized(value) for value in on_meta)
        self.changes_dtypes = self.options.dtype is not None or has_quantized
        """Whether floating-point tensors get the dtype that is requested; or, on meta, the dtype of the checkpoint,
        because it has quantized tensors: a layer computes in the dtype that its weight was quantized from, and a cast
        cannot change that dtype."""
        self.make_write, self._call_extra_state = make_write, call_extra_state
        self.device_after = self.options.device_after
        self.cause: Exception | None = None
        """The first error of a value that is not read."""
        if not call_extra_state:
            _ = self.signatures  # code of the model may change a lazy parameter before `plan` is called

    @cached_attribute
    def incoming(self) -> MappedState:
        """The values as a state dict. It is made when it is first used: plain values get into their slots without."""
        return MappedState(self.matched, self.transaction, self.initialised)

    @cached_attribute
    def signatures(self) -> SlotSignatures:
        """The signatures of the slots as they were before code of the model ran."""
        return signatures(self.slots_before)

    def settle(self) -> None:
        """Ends the recording: from now on, values of rules are computed only for their slots.

        Few bytes in all are staged.
        """
        waiting = [item for item in self.executions if item.transfers.way is Way.INTO]
        if self.options.in_place is None and sum(item.transfers.nbytes for item in waiting) < _LEAST_LEASED_BYTES:
            for item in waiting:
                item.stage_instead("they are small")
        # How the parts of DTensors are read whose bytes do not adjoin in the file.
        shards = [item for item in (single.transfers for single in self.singles) if item.facts.sharded is not None]
        in_runs = [(item.nbytes, item.facts.stored) for item in shards if item.nbytes and not item.columns.paths]
        if strided := [(nbytes, read_bytes(stored)) for nbytes, stored in in_runs if stored is not None]:
            needed, read = (sum(column) for column in zip(*strided, strict=True))
            gaps = f", {size(read)} with the gaps of up to {size(GAP_BYTES)} between them" if read > needed else ""
            self.notes.append(f"{count(len(strided), 'shard')} of {size(needed)} read in separate runs{gaps}")
        if "incoming" in vars(self):
            self.incoming.settle()
            self.notes += self.incoming.maps.notes
        self.notes = [*dict.fromkeys(self.notes)]

    def add_plain(self) -> Collection[str]:
        """Adds plain values all at once, and returns their names. Called where a load runs no code of the model."""
        options, entries = self.options, self.matched.applied.entries
        has_own_writes = options.transform is not None or options.read_once or self.transaction.reads_values
        if has_own_writes or (self.changes_dtypes and options.dtype is None):
            return ()
        tensors = entries.tensors if isinstance(entries, StoredEntries) else None
        if tensors is None:  # under names that rules have changed, or beside other values
            runs = {name: entry.content for name, entry in entries.items() if is_run(entry.content)}
            tensors = StoredTensors.of(runs)
        if tensors is None:
            return ()
        transfers = plain_transfers(self.slots, entries.keys(), tensors, options, lambda: self.incoming.maps)
        self.executions += map(Execution, transfers)
        # Other names of the same bytes are not mapped.
        has_shared_bytes = len({*tensors.rows.values()}) < len(tensors.rows)
        for item in transfers:
            self.used.update(item.names)
            self.filled.update(dict.fromkeys(map(id, item.params)))
            if has_shared_bytes and item.way is Way.MAP:
                self._mapped_storages.update(tensors[name].storage for name in item.names)
        for slot in self.slots.tied:
            if id(slot.tensor) in self.filled:
                self.used.update(name for name in slot.names if name in tensors)
        return self.used

    @property
    def mapped(self) -> int:
        """The number of tensors that become maps of a file."""
        return sum(len(item.transfers.names) for item in self.executions if item.transfers.maps is not None)

    # The methods of `LoadSink`.

    def extra_state(self, module: nn.Module, key: str, value: object) -> None:
        self.extra_states.append(key)
        # A plan calls the method that only checks, of classes that declare extra state. A load sets at once: an invalid
        # value sets nothing, and everything is undone where there are problems.
        take = module.set_extra_state if self._call_extra_state else getattr(module, CHECK_EXTRA_STATE, None)
        if isinstance(value, ModelStateError) and not isinstance(value, CodecError):
            return self.unread(key, value)
        try:
            if isinstance(value, CodecError):
                raise value
            if take is not None:
                take(value)
        except (ExtraStateError, CodecError) as error:
            self.cause = self.cause or error
            self.problems.append(Problem(ProblemKind.BAD_EXTRA_STATE, key, why=one_line(error)))

    def tensor(self, key: str, param: torch.Tensor, value: object, owner: nn.Module | None, errors: list[str]) -> None:
        given = key
        if self.transaction.armed:
            slot = self.slots.by_name.get(key)
            if slot is None or slot.tensor is not param:  # a module that loads a child by itself uses a shorter name
                key = self._names.get(id(param), key)
        if isinstance(value, ModelStateError):
            self.unread(key, value)
        elif not isinstance(value, torch.Tensor):
            self.problems.append(Problem(ProblemKind.NOT_A_TENSOR, key, found=type(value).__name__))
        elif type(value) is not torch.Tensor and is_lazy(value):
            self.used.add(given)
            if is_lazy(param):
                self.uninitialised[key] = param
            else:
                self.problems.append(Problem(ProblemKind.NOT_YET_INITIALISED, key))
        elif param.shape != value.shape and (
            self.transforms is None or isinstance(self.transforms.of(key), Bound | None)
        ):
            seen_by_rules = (self.other_name(given) or given) if given in self.matched.applied.entries else ""
            self.problems.append(wrong_shape(key, tuple(param.size()), tuple(value.size()), seen_by_rules))
        else:
            usual = PARAMETER if isinstance(param, nn.Parameter) else BUFFER
            self.assign(key, HIDDEN if key in self.slots.left_out else usual, param, value)

    def unread(self, key: str, error: ModelStateError) -> None:
        """Adds the problem of a value that is not read."""
        self.cause = self.cause or error
        why = ": ".join(filter(None, (error.what, error.found)))
        self.problems.append(Problem(ProblemKind.UNREAD, key, why=printable(why), remedy=error.remedy))

    # Values and slots become transfers.

    def assign(self, name: str, kind: str, param: torch.Tensor, value: torch.Tensor) -> None:
        """Assigns `value` to `param`, or adds the problem that keeps it from going there."""
        given, stored = self.incoming.origin_of(value)
        self.used.add(given)
        first = self.filled.get(id(param))
        if first is not None:
            known = first.transfers.facts
            if not self.incoming.are_equal(known.value if known.sharded is None else known.sharded.value, value):
                self.problems.append(self.tie_conflict(name, first.transfers.name))
            return
        item = self._transfer(name, kind, param, RowFacts(value=value, given=given, stored=stored))
        self.filled[id(param)] = execution = Execution(item)
        self.singles.append(execution)
        self.executions.append(execution)
        param, value, stored = item.param, item.facts.value, item.facts.stored
        # A value that cannot be copied is never written, even where the model's own code uses the tensor: a FakeTensor
        # has no values, and torch cannot copy from a DTensor to a whole tensor.
        if is_fake(param) or is_fake(value):
            found = "model" if is_fake(param) else "checkpoint"
            self.problems.append(Problem(ProblemKind.FAKE_TENSORS, name, found=found))
            return
        if is_sharded(param):
            return  # `_local_facts` has added the problem
        if is_sharded(value):
            self.problems.append(Problem(ProblemKind.SHARDED_TENSORS, name))
            return
        gets_memory = item.way is Way.NEW and not param.is_meta and item.facts.module_transform is None
        if item.facts.sharded is not None and gets_memory and self._shards_are_in_use:
            self.problems.append(Problem(ProblemKind.SHARDS_IN_USE, name, why=item.why))
        if value.is_meta or (isinstance(stored, torch.Tensor) and lacks_values(stored)):
            self.problems.append(Problem(ProblemKind.NO_VALUES, name))
        elif value.dtype != item.dtype:
            self._check_dtype(item)
        if is_plain(param) and item.way is Way.STAGED:
            self._check_memory(item)
        self.transaction.add(self.make_write(execution))

    def _transfer(self, name: str, kind: str, param: torch.Tensor, facts: RowFacts) -> Transfers:
        """Chooses how a value gets into its slot."""
        options, device = self.options, self.device_after(param)
        if self.transforms is not None:
            chosen = self.transforms.of(name)
            bound = chosen if isinstance(chosen, Bound) else None
            facts = replace(facts, transform=None if bound else chosen, module_transform=bound)
        if is_sharded(param):
            facts = self._local_facts(name, param, facts)
            if facts.sharded is not None:
                param = local_tensor(facts.sharded.tensor)
        dtype = param.dtype
        if self.changes_dtypes and param.is_floating_point() and facts.value.is_floating_point():
            dtype = options.dtype or (facts.value.dtype if param.is_meta else dtype)
        maps = self._maps_for(param, dtype, device, facts)
        return with_way(Transfers([name], [kind], [param], [dtype], device, maps=maps, own=facts), options.in_place)

    def _local_facts(self, name: str, param: torch.Tensor, facts: RowFacts) -> RowFacts:
        """Returns the facts of what is loaded into the local tensor of a DTensor.

        Adds a problem, and returns the facts as they are, where this rank cannot load its part of the value.
        """
        slot: ShardedSlot | Problem = sharded_slot(name, param, facts.value, self.options.device)
        if isinstance(slot, ShardedSlot) and facts.module_transform is not None:
            transform, needs = facts.module_transform.transform, ""
            blocks = facts.module_transform.block_shape(name, tuple(param.shape), param.dtype)
            if not transform.returns_plain and id(param) in self._gathered:
                needs = "makes tensors of a subclass, while FSDP2 gathers plain ones"
            elif not slot.shard.has_whole_blocks(blocks or tuple(param.shape)):
                needs = "takes the whole tensor" if blocks is None else f"takes blocks of {list(blocks)}"
            if needs:
                why = f"{transform} {needs}, and this rank holds {slot.shard}"
                slot = Problem(ProblemKind.SHARDED_TRANSFORM, name, why=why)
        if isinstance(slot, Problem):
            self.problems.append(slot)
            return facts
        if facts.transform is not None:  # it may look at other elements than those of this rank
            return replace(facts, sharded=slot, transform=partial(slot.cropped, facts.transform))
        value, stored = slot.local_value(facts.stored)
        if isinstance(facts.stored, Derived) and isinstance(stored, StoredTensor):
            value = self.incoming.maps.tensor(stored)  # a part of a rule's result that is a part of a file
        return replace(facts, sharded=slot, value=value, stored=stored)

    def _maps_for(self, param: torch.Tensor, dtype: torch.dtype, device: torch.device, facts: RowFacts) -> Maps | None:
        """Returns what maps the value where a tensor on meta becomes a map of its file; None where it is read.

        Two slots that are not tied do not map the same bytes.
        """
        value, stored, requested = facts.value, facts.stored, self.options.map
        # FSDP2 gathers shards at every step, and pads them: they get memory of their own unless a map is asked for.
        has_own_memory = facts.sharded is not None or self.options.read_once
        if facts.is_transformed or not param.is_meta or requested is False or (has_own_memory and not requested):
            return None
        if not (isinstance(stored, StoredTensor) and stored.is_contiguous):
            return None
        maps = self.incoming.maps
        if stored.nbytes and stored.extent.start % stored.dtype.itemsize:
            maps.note(UNALIGNED, stored.extent.path)
            return None
        is_as_stored = is_plain(param, value) and dtype == value.dtype and stored.storage not in self._mapped_storages
        in_order = device.type == "cpu" and value.stride() == param.stride()
        if not (is_as_stored and in_order and maps.can_map(stored.extent, requested)):
            return None
        self._mapped_storages.update([stored.storage] if stored.nbytes else [])
        return maps

    def other_name(self, name: str) -> str:
        """Returns the name that rules see, empty where it is the same."""
        return self.matched.before_wrappers.get(name, "")

    # Checks of single transfers.

    def _check_memory(self, item: Transfers) -> None:
        """Adds the problem of a plain slot that cannot be written to."""
        param = item.param
        if not has_its_memory(param):
            stored = param.untyped_storage().nbytes()
            self.problems.append(Problem(ProblemKind.FREED_MEMORY, item.name, param.nbytes, stored))
        elif item.facts.transform is None and any(refusal := refusal_of_writes(param)):
            why, remedy = refusal
            self.problems.append(Problem(ProblemKind.NOT_WRITABLE, item.name, why=why, remedy=remedy))

    def tie_conflict(self, name: str, first: str) -> Problem:
        """Returns the problem of a tensor whose value differs from that of another tensor in the same memory."""
        names = [self.other_name(of) or of for of in (name, first)]
        rules = tuple(f"ms.rules.Ignore({of!r})" for of in names)
        options = " or ".join(option("--ignore", of) for of in names)
        return Problem(ProblemKind.TIE_CONFLICT, name, others=(first,), rules=rules, options=options)

    def _check_dtype(self, item: Transfers) -> None:
        """Adds a problem of a cast that loses values, unless it is requested. A transform may return any dtype."""
        name, facts, value, requested = item.name, item.facts, item.facts.value, self.options.dtype
        if facts.transform is not None:
            return
        expected, found = short(item.dtype), short(value.dtype)
        if is_plain(value):
            cast = cast_between(value.dtype, item.dtype)
            is_rounded = item.dtype in (torch.bfloat16, torch.float16) and is_dequantized(facts.stored)
            if cast == "kind" or (cast == "lossy" and item.dtype != requested and not is_rounded):
                why, seen = CHANGES_KIND if cast == "kind" else LOSES_VALUES, self.other_name(name)
                problem = Problem(ProblemKind.WRONG_DTYPE, name, expected, found, why=why, name_for_rules=seen)
                self.problems.append(problem)
        elif requested is not None and is_quantized(value) and (item.param.is_meta or is_quantized(item.param)):
            # Into a plain tensor with memory, the class of the value converts it.
            found = f"{type(value.data).__name__} of {found}"
            self.problems.append(Problem(ProblemKind.QUANTIZED_CAST, name, expected, found))

    @cached_attribute
    def _gathered(self) -> set[int]:
        """The ids of the parameters that FSDP2 gathers."""
        return set(map(id, sharded_params(self.slots.modules.values())))

    @cached_attribute
    def _shards_are_in_use(self) -> bool:
        return any(map(shards_in_use, self.slots.modules.values()))

    @cached_attribute
    def _names(self) -> dict[int, str]:
        return {id(slot.tensor): slot.name for slot in self.slots.tensors}

    # Results.

    def plan(self) -> LoadPlan:
        """Returns the frozen plan."""
        target, source = self.names
        return LoadPlan(
            target=target,
            source=source,
            problems=tuple(self.problems),
            notes=tuple(self.notes),
            slots=self.slot_count,
            peak_memory_bytes=peak_bytes([item.transfers for item in self.executions], ReadStrategy()),
            binding=Binding(self.matched, self.signatures, self.transaction.armed, self.mapped),
            make_steps=self.step_maker(),
        )

    @property
    def slot_count(self) -> int:
        """The number of slots that need a value."""
        tensors = sum(1 for slot in self.slots.tensors if slot.kind != HIDDEN or id(slot.tensor) in self.filled)
        return tensors + len(self.slots.extra) - len({id(param) for param in self.uninitialised.values()})

    def entry_of(self, name: str) -> Entry | None:
        """Returns the entry for a name of the model; None for an unknown name."""
        return self.initialised.get(name) or self.matched.applied.entries.get(name)

    def source_of(self, name: str) -> str:
        """Returns the name in the checkpoint for a name of the model; several names for a result of several tensors."""
        entry = self.entry_of(name)
        return name if entry is None else ", ".join(entry.sources)

    def step_maker(self) -> Callable[[], tuple[Step, ...]]:
        """Returns a function that makes a step for each value and extra state, in the order of the slots.

        It holds no tensor.
        """
        makers = [self._steps_of(item.transfers) for item in self.executions]
        names = [*self.slots.by_name] if self.executions[1:] or self.slots.tied else []
        passed = Way.CODE, "passed to set_extra_state"
        extra = [Step(name, EXTRA, self.source_of(name), *passed) for name in self.extra_states]

        def make() -> tuple[Step, ...]:
            positions = {name: position for position, name in enumerate(names)}
            steps = [step for make_steps in makers for step in make_steps()]
            return (*sorted(steps, key=lambda step: positions.get(step.name, len(names))), *extra)

        return make

    def _steps_of(self, item: Transfers) -> Callable[[], list[Step]]:
        """Returns a function that makes the step of each row. It holds no tensor."""
        own, columns, entries = item.own, item.columns, self.matched.applied.entries
        names, kinds, dtypes, device, way, why = item.names, item.kinds, item.dtypes, item.device, item.way, item.why
        shapes, stored, nbytes, shard = columns.shapes, columns.dtype_names, columns.nbytes, ""
        ties: Iterable[tuple[str, ...]] = repeat(())
        if self.slots.tied:
            slots = [(name, self.slots.by_name.get(name)) for name in names]
            ties = [tuple(other for other in slot.names if other != name) if slot else () for name, slot in slots]
        if own is not None:
            shapes, nbytes = [item.slot_tensors[0].shape], [item.nbytes]
            shard = "" if own.sharded is None else str(own.sharded.shard)
        sources, rules = names, [tuple[str, ...]()]
        # An entry of stored tensors is created when it is accessed, and has the name in the model.
        if own is not None or not isinstance(entries, StoredEntries):
            given = names if own is None else [own.given]
            sources = [*map(self.source_of, given)]
            rules = [() if (entry := self.entry_of(name)) is None else entry.rules for name in given]

        def make() -> list[Step]:
            before = names, kinds, sources, repeat(way), repeat(why), map(torch.Size, shapes), dtypes
            in_file = map(partial(getattr, torch), stored), repeat(device), nbytes
            return [*map(Step, *before, *in_file, ties, cycle(rules), repeat(shard))]

        return make


def refusal_of_writes(tensor: torch.Tensor) -> tuple[str, str]:
    """Returns why torch refuses to write to a tensor, and what to do; empty where neither is known."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        remedy = "load under torch.inference_mode(), as the model was built, or build the model outside of it"
        return "it was created in inference mode", remedy
    if (
        is_plain(tensor)
        and tensor.numel()
        and any(size > 1 and not step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
    ):
        return "its elements share memory (expand)", "give each its own: tensor.data = tensor.data.clone()"
    return "", ""
