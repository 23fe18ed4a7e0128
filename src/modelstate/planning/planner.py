"""`Planner`: matches the values of a checkpoint with the slots of a model, and makes the transfers of a load.

`record.record` has the order: names are compared, or the loading protocol of the model calls `Planner.tensor` with each
value; the value is checked; its way is chosen; then every name and every slot is accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.checkpoint.mapped import UNALIGNED
from modelstate.errors import CodecError, ExtraStateError, ModelStateError, PlanError
from modelstate.io.engine import ReadStrategy
from modelstate.planning.mapped_state import MappedState
from modelstate.planning.matching import MatchedCheckpoint, ModelSchemaView, StoredEntries
from modelstate.planning.plan import Binding, LoadPlan, Step
from modelstate.planning.transfer import (
    BY_SUBCLASS,
    DEVICES_READ_INTO,
    Execution,
    RowFacts,
    Transfers,
    Way,
    choose_way,
    copy_cannot_fail,
    peak_bytes,
    plain_transfers,
    single_transfer,
)
from modelstate.planning.transforms import (
    NO_TRANSFORM,
    BlockTransform,
    Choice,
    LocalSlot,
    ShardedSlot,
    Transforms,
    block_shape_of,
    extra_bytes_of,
    sharded_slot,
)
from modelstate.problems import (
    CHANGES_KIND,
    LOSES_VALUES,
    Problem,
    ProblemKind,
    one_line,
    option,
    plan_error,
    wrong_shape,
)
from modelstate.process import cached_attribute
from modelstate.rules.expression import Derived, Source, is_dequantized, lacks_values, placed_runs, read_bytes
from modelstate.spec import GAP_BYTES, ByteRange, Described, StoredTensor, is_run
from modelstate.text_format import count, printable, size
from modelstate.torch_compat.dtypes import cast_between, short
from modelstate.torch_compat.plain import (
    has_its_memory,
    is_dense,
    is_fake,
    is_plain,
    is_quantized,
    is_sharded,
    same_place,
    same_values,
)
from modelstate.torch_compat.private import shards_in_use, storage_id
from modelstate.torch_compat.sharding import sharded_params
from modelstate.transaction.slots import (
    BUFFER,
    EXTRA,
    HIDDEN,
    PARAMETER,
    Slot,
    SlotSignatures,
    clash,
    overlapping,
    place_of,
    sharing,
    signatures,
)
from modelstate.transaction.transaction import Transaction, Write

_CPU = torch.device("cpu")
CHECK_EXTRA_STATE = "_modelstate_check_extra_state"
"""The method of modules that can check an extra state without setting it."""


class Planner:
    """Plans a load: collects the values that go to the slots of a model, with the problems and notes.

    `record` and `bind` call `tensor` with the values of the checkpoint. `assign` turns a value and its slot into a
    transfer, and adds a write to the transaction. The write waits until the load is committed, unless code of the
    model uses the tensor before. The owner of the transaction must roll it back where there are problems.

    Args:
        transaction: The transaction of the load, whose root is the model.
        view: The slots of the model.
        matched: The part of the checkpoint that is loaded.
        make_write: Returns the write that executes a transfer.
        call_extra_state: Whether `set_extra_state` is called; a plan only checks values.
        in_columns: Whether values without facts of their own are planned together.
    """

    def __init__(
        self,
        transaction: Transaction,
        view: ModelSchemaView,
        matched: MatchedCheckpoint,
        make_write: Callable[[Execution], Write],
        *,
        call_extra_state: bool,
        in_columns: bool = False,
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
        self.transforms = None if transform is None else Transforms(transform, transaction.root, self.slots)
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.singles: list[Execution] = []
        """The values with facts of their own."""
        self.plain: list[Execution] = []
        """The other values."""
        self.moves: list[Execution] = []
        """Tensors that get no value, and only move to another device."""
        self.used: set[str] = set()
        """Names, after the rules, whose values have been assigned to a slot."""
        self.uninitialised: dict[str, torch.Tensor] = {}
        """Lazy tensors that stay as they are: neither this module nor the saved one has initialised them."""
        self.initialised: set[str] = set()
        """Names of tensors that the checkpoint lacks, and that the model's own code initialises."""
        self.extra_states: list[str] = []
        self.filled: dict[int, Execution | None] = {}
        """By the ids of the tensors that get a value, under whatever name. None stands for a row of `plain`."""
        self._in_memory: list[Execution] = []
        """Those that get into plain memory of the model, which that of others may overlap."""
        self._mapped_storages: set[ByteRange] = set()
        """The storages of files that slots map. Slots that are not tied must not share memory."""
        in_files = isinstance(matched.applied.entries, StoredEntries)  # which have no quantized tensors
        incoming = {} if in_files else self.incoming
        self.quantized = [n for n, value in incoming.items() if isinstance(value, torch.Tensor) and is_quantized(value)]
        """Names of tensors of the checkpoint that are quantized by a wrapper subclass."""
        quantized = (self.slots.by_name.get(name) for name in self.quantized)
        keeps_stored_dtypes = any(slot is not None and slot.tensor.is_meta for slot in quantized)
        self.changes_dtypes = self.options.dtype is not None or keeps_stored_dtypes
        """Whether floating-point tensors get the dtype that is requested; or, on meta, the dtype of the checkpoint,
        because it has quantized tensors: a layer computes in the dtype that its weight was quantized from, and a cast
        cannot change that dtype."""
        self._make_write, self._call_extra_state, self._in_columns = make_write, call_extra_state, in_columns
        self._cause: Exception | None = None
        self._has_shards = False
        if not call_extra_state:
            _ = self.signatures  # code of the model may change a lazy parameter before `plan` is called

    @cached_attribute
    def incoming(self) -> MappedState:
        """The values as a state dict. It is made when it is first used: plain values get into their slots without."""
        return MappedState(self.matched, self.transaction)

    @cached_attribute
    def signatures(self) -> SlotSignatures:
        """The signatures of the slots as they were before code of the model ran."""
        return signatures(self.slots_before)

    def settle(self) -> None:
        """Ends the recording: from now on, values of rules are computed only for their slots."""
        if self._in_memory:
            self._check_overlaps()
        if self._has_shards:
            self.notes += self._notes_on_strides()
        if "incoming" in vars(self):
            self.incoming.settle()
            self.notes += self.incoming.maps.notes
        self.notes = [*dict.fromkeys(self.notes)]

    @property
    def executions(self) -> list[Execution]:
        """Everything that is loaded."""
        return [*self.singles, *self.plain]

    def _notes_on_strides(self) -> list[str]:
        """Says how the parts of DTensors are read whose bytes do not adjoin in the file."""
        strided = [
            (item.nbytes, read_bytes(facts.stored))
            for item in (single.transfers for single in self.singles)
            for facts in [item.facts]
            if facts.sharded is not None and facts.stored is not None and item.columns is None and item.nbytes
        ]
        if not strided:
            return []
        needed, read = (sum(column) for column in zip(*strided, strict=True))
        gaps = f", {size(read)} with the gaps of up to {size(GAP_BYTES)} between them" if read > needed else ""
        return [f"{count(len(strided), 'shard')} of {size(needed)} read in separate runs{gaps}"]

    def add_plain(self) -> Collection[str]:
        """Adds plain values all at once, and returns their names. Called where a load runs no code of the model."""
        options, entries = self.options, self.matched.applied.entries
        has_others = options.transform is not None or options.read_once
        if has_others or not (self._in_columns and isinstance(entries, StoredEntries)):
            return ()
        transfers = plain_transfers(self.slots.tensors, entries.tensors, options, lambda: self.incoming.maps)
        self.plain = [*map(Execution, transfers)]
        for item in transfers:
            self.used.update(item.names)
            self.filled.update(dict.fromkeys(map(id, item.params)))
        rows = entries.tensors.rows
        if len({*rows.values()}) < len(rows):  # other names of the same bytes are not mapped
            for item in transfers:
                self._mapped_storages.update(item.sources if item.way is Way.MAP else ())
        return self.used

    @property
    def mapped(self) -> int:
        """The number of tensors that become maps of a file."""
        return sum(len(item.transfers.names) for item in self.executions if item.transfers.maps is not None)

    # The methods of `LoadSink`.

    def device_after(self, param: torch.Tensor) -> torch.device:
        return self.options.device_after(param)

    def extra_state(self, module: nn.Module, key: str, value: object) -> None:
        self.extra_states.append(key)
        # A plan calls the method that only checks, of classes that declare extra state. A load sets at once: an invalid
        # value sets nothing, and everything is undone where there are problems.
        take = module.set_extra_state if self._call_extra_state else getattr(module, CHECK_EXTRA_STATE, None)
        try:
            if isinstance(value, ModelStateError):
                if not isinstance(value, CodecError):
                    return self.unread(key, value)
                raise value
            if take is not None:
                take(value)
        except (ExtraStateError, CodecError) as error:
            self._cause = self._cause or error
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
            is_array = f"{type(value).__module__}.{type(value).__name__}" == "numpy.ndarray"
            kind = ProblemKind.NUMPY_ARRAY if is_array else ProblemKind.NOT_A_TENSOR
            self.problems.append(Problem(kind, key, found=type(value).__name__))
        elif type(value) is not torch.Tensor and is_lazy(value):
            self.used.add(given)
            if is_lazy(param):
                self.uninitialised[key] = param
            else:
                self.problems.append(Problem(ProblemKind.NOT_YET_INITIALISED, key))
        elif param.shape != value.shape and not (self.transforms and self.transforms.of(key).first):
            seen_by_rules = self.matched.name_for_rules(given)
            self.problems.append(wrong_shape(key, tuple(param.size()), tuple(value.size()), seen_by_rules))
        else:
            usual = PARAMETER if isinstance(param, nn.Parameter) else BUFFER
            self.assign(key, HIDDEN if key in self.slots.left_out else usual, param, value)

    def unread(self, key: str, error: ModelStateError) -> None:
        """Adds the problem of a value that is not read."""
        self._cause = self._cause or error
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
                self.problems.append(self._tie_conflict(name, first.transfers.name))
            return
        item = self._transfer(name, kind, param, value, given, stored)
        self.filled[id(param)] = execution = Execution(item)
        self.singles.append(execution)
        param, value, stored = item.param, item.facts.value, item.facts.stored
        if not is_plain(param, value) and self._has_other_class(item):
            return  # the value is never written, even where the model's own code uses the tensor
        gets_memory = item.way is Way.NEW and not param.is_meta and item.facts.module_transform is None
        if item.facts.sharded is not None and gets_memory and self._shards_are_in_use:
            self.problems.append(Problem(ProblemKind.SHARDS_IN_USE, name, why=item.why))
        if value.is_meta or (isinstance(stored, torch.Tensor) and lacks_values(stored)):
            self.problems.append(Problem(ProblemKind.NO_VALUES, name))
        elif value.dtype != item.dtype:
            self._check_dtype(item)
        if not param.is_meta:
            self._check_memory(execution)
        self.transaction.add(self._make_write(execution))

    def _transfer(
        self, name: str, kind: str, param: torch.Tensor, value: torch.Tensor, given: str, stored: Source | None
    ) -> Transfers:
        options, choice = self.options, NO_TRANSFORM if self.transforms is None else self.transforms.of(name)
        transform, transformed, last, sharded = choice.first, choice.first is not None, choice.last, None
        device = self.device_after(param)
        if is_sharded(param) and (slots := self._sharded_slot(name, param, value, stored, choice)) is not None:
            sharded, (param, value, stored, transform) = slots
            device = sharded.device_after(options.device)
        dtype, is_meta = param.dtype, param.is_meta
        if self.changes_dtypes and param.is_floating_point() and value.is_floating_point():
            dtype = options.dtype or (value.dtype if is_meta else dtype)
        is_transformed = transformed or last is not None
        can_map = not is_transformed and self._can_map(param, value, stored, dtype, device, sharded is not None)
        is_plain_slot = is_plain(param, value)
        if last is not None:
            way, why = Way.NEW, f"made by {last.transform}"
        elif is_plain_slot:
            can_read_into = not (is_meta or transformed or options.in_place is False)
            can_read_into = can_read_into and self._can_read_into(param, value, device, stored)
            way, why = choose_way(
                *(param, dtype, device), can_map=can_map, in_place=options.in_place, can_read_into=can_read_into
            )
        else:
            way, why = Way.CODE, BY_SUBCLASS
        block_function, transform_bytes = None, 0
        if last is not None:
            in_order = param.is_contiguous() or not is_dense(param)
            if isinstance(last.transform, BlockTransform) and in_order and is_run(stored) and device == _CPU:
                block_function = last.transform.block_function(tuple(param.shape), dtype)
            if block_function is None:
                transform_bytes = extra_bytes_of(last.transform, name, tuple(param.shape), dtype)
        facts = RowFacts(
            value=value,
            given=given,
            stored=stored,
            transform=transform,
            module_transform=last,
            block_function=block_function,
            transform_bytes=transform_bytes,
            sharded=sharded,
        )
        maps = self.incoming.maps if can_map else None
        return single_transfer(name, kind, param, dtype, device, way, why, facts, maps)

    def _can_map(
        self,
        param: torch.Tensor,
        value: torch.Tensor,
        stored: Source | None,
        dtype: torch.dtype,
        device: torch.device,
        is_shard: bool,
    ) -> bool:
        """Whether a tensor on meta becomes a map of its file. Two slots that are not tied do not map the same bytes."""
        requested = self.options.map
        # FSDP2 gathers shards at every step, and pads them: they get memory of their own unless a map is asked for.
        is_wanted = requested is True if is_shard or self.options.read_once else requested is not False
        if not (is_wanted and param.is_meta and isinstance(stored, StoredTensor) and stored.is_contiguous):
            return False
        if stored.nbytes and stored.extent.start % stored.dtype.itemsize:
            self.incoming.maps.note(UNALIGNED, stored.extent.path)
            return False
        if stored.storage in self._mapped_storages or not is_plain(value) or dtype != value.dtype:
            return False
        if is_plain(param) and (device.type != "cpu" or value.stride() != param.stride()):
            return False
        if not self.incoming.maps.can_map(stored.extent, requested):
            return False
        self._mapped_storages.update([stored.storage] if stored.nbytes else [])
        return True

    def _sharded_slot(
        self, name: str, param: torch.Tensor, value: torch.Tensor, stored: Source | None, choice: Choice
    ) -> tuple[ShardedSlot, LocalSlot] | None:
        """Returns the slot of a DTensor, and what is loaded into its local tensor.

        Returns None, and adds a problem, where this rank cannot load its part of the value.
        """
        self._has_shards = True
        slot: ShardedSlot | Problem = sharded_slot(name, param, value, self.options.device)
        if isinstance(slot, ShardedSlot) and choice.last is not None:
            blocks = block_shape_of(choice.last.transform, name, tuple(param.shape), param.dtype)
            needs = ""
            if not choice.last.transform.returns_plain and id(param) in self._gathered:
                needs = "makes tensors of a subclass, while FSDP2 gathers plain ones"
            elif not slot.shard.has_whole_blocks(blocks or tuple(param.shape)):
                needs = "takes the whole tensor" if blocks is None else f"takes blocks of {list(blocks)}"
            if needs:
                why = f"{choice.last.transform} {needs}, and this rank holds {slot.shard}"
                slot = Problem(ProblemKind.SHARDED_TRANSFORM, name, why=why)
        if isinstance(slot, Problem):
            self.problems.append(slot)
            return None
        local = slot.local(stored, choice.first)
        if isinstance(stored, Derived) and isinstance(local.stored, StoredTensor):
            # A part of a rule's result that is a part of a file.
            local = local._replace(value=self.incoming.maps.tensor(local.stored))
        return slot, local

    def _can_read_into(
        self, param: torch.Tensor, value: torch.Tensor, device: torch.device, stored: Source | None
    ) -> bool:
        """Whether a value can get into existing memory without temporary memory for all values."""
        if not (isinstance(stored, Described | Derived) and copy_cannot_fail(param, value)):
            return False
        by_parts = bool(placed_runs(stored)) or (isinstance(stored, Derived) and stored.read_in_blocks is not None)
        if self.options.in_place:
            if isinstance(stored, Derived):
                return by_parts or (stored.is_certain and stored.of_files)
            return by_parts or (isinstance(stored, StoredTensor) and stored.is_contiguous)
        # Bytes of files are read, cast or combined block by block, without a call of other code.
        in_order = param.is_contiguous() and not (param.is_conj() or param.is_neg())
        by_parts = by_parts and device == _CPU and stored.dtype == param.dtype
        return in_order and device.type in DEVICES_READ_INTO and (is_run(stored) or by_parts)

    def move(self, slot: Slot, device: torch.device) -> None:
        """Moves a tensor that gets no value to a device when the load is committed."""
        value = slot.tensor.detach()
        columns = slot.name, slot.kind, slot.tensor, value.dtype, device
        facts = RowFacts(value=value, given="", stored=value)
        item = Execution(single_transfer(*columns, Way.NEW, f"moves to {device}", facts))
        self.moves.append(item)
        self.transaction.add(self._make_write(item))

    def hidden_buffer(self, slot: Slot, name: str) -> bool:
        """Fills a non-persistent buffer on meta; elsewhere the value must equal the buffer. Returns whether it does."""
        value, buffer = self.incoming.get(name), slot.tensor
        if buffer.is_meta or not isinstance(value, torch.Tensor) or is_lazy(value) or value.shape != buffer.shape:
            self.tensor(name, buffer, value, None, [])
            return False
        value, is_equal = self.incoming.with_values(value), False
        if is_plain(value, buffer) and not value.is_meta:
            common = torch.promote_types(value.dtype, buffer.dtype)
            is_equal = same_values(value.to(buffer.device, common), buffer.to(common))
        if not is_equal:
            self.problems.append(Problem(ProblemKind.BUFFER_CONFLICT, name, name_for_rules=self.other_name(name)))
        return is_equal

    def _tie_conflict(self, name: str, first: str) -> Problem:
        names = [self.other_name(of) or of for of in (name, first)]
        return Problem(
            ProblemKind.TIE_CONFLICT,
            name,
            others=(first,),
            rules=tuple(f"ms.rules.Ignore({of!r})" for of in names),
            options=" or ".join(option("--ignore", of) for of in names),
        )

    def other_name(self, name: str) -> str:
        """Returns the name that rules see, empty where it is the same."""
        seen = self.matched.name_for_rules(name)
        return seen if seen != name else ""

    # Checks of single transfers.

    def _has_other_class(self, item: Transfers) -> bool:
        """Adds a problem where the classes of the two tensors rule out a copy. Returns whether they do.

        A FakeTensor has no values, and torch cannot copy from a DTensor to a whole tensor.
        """
        problem: Problem | None = None
        if is_fake(item.param) or is_fake(item.facts.value):
            side = "model" if is_fake(item.param) else "checkpoint"
            problem = Problem(ProblemKind.FAKE_TENSORS, item.name, found=side)
        elif is_sharded(item.param):
            return True  # `_sharded_slot` has added the problem
        elif is_sharded(item.facts.value):
            problem = Problem(ProblemKind.SHARDED_TENSORS, item.name)
        self.problems += [problem] if problem is not None else []
        return problem is not None

    def _check_memory(self, execution: Execution) -> None:
        """Adds problems of slots whose memory is freed, and notes the others for `_check_overlaps`."""
        item = execution.transfers
        param = item.param
        if not is_plain(param):
            return
        if item.way is Way.STAGED and not has_its_memory(param):
            stored = param.untyped_storage().nbytes()
            self.problems.append(Problem(ProblemKind.FREED_MEMORY, item.name, param.nbytes, stored))
            return
        if item.way is Way.STAGED and item.facts.transform is None and any(refusal := refusal_of_writes(param)):
            why, remedy = refusal
            self.problems.append(Problem(ProblemKind.NOT_WRITABLE, item.name, why=why, remedy=remedy))
        if storage_id(param):
            self._in_memory.append(execution)

    def _check_overlaps(self) -> None:
        """Adds problems of slots whose memory overlaps, where one would overwrite the values of the other."""
        in_memory = [item.transfers for item in self._in_memory]
        for group in sharing(in_memory, [item.param for item in in_memory]):
            # Where many slots are the same view of the same memory, each is compared with the first of them only.
            first_at: dict[Hashable, Transfers] = {}
            pairs = [(first_at.setdefault(place_of(second.param), second), second) for second in group]
            pairs = [(first, second) for first, second in pairs if first is not second]
            distinct = list(first_at.values())
            pairs += overlapping(distinct, [item.param for item in distinct])
            for first, second in pairs:
                if any(item.facts.value.shape != item.param.shape for item in (first, second)):
                    continue
                if second.way not in (Way.INTO, Way.STAGED):
                    self.notes.append(f"{first.name} and {second.name} share memory now, and not after the load")
                elif self._clash(first, second):
                    self.problems.append(self._tie_conflict(second.name, first.name))

    def _clash(self, first: Transfers, second: Transfers) -> bool:
        is_whole = first.facts.sharded is None and second.facts.sharded is None
        if is_whole and same_place(first.param, second.param):
            return not self.incoming.are_equal(first.facts.value, second.facts.value)
        return clash(first.param, self._values(first.facts), second.param, self._values(second.facts))

    def _values(self, facts: RowFacts) -> torch.Tensor:
        """The values of a row for a comparison. The local part of a deferred value is never computed."""
        if facts.sharded is not None and isinstance(facts.stored, StoredTensor):
            return self.incoming.maps.tensor(facts.stored)
        return self.incoming.with_values(facts.value)

    def _check_dtype(self, item: Transfers) -> None:
        value = item.facts.value
        if item.facts.transform is not None:
            return  # the result of a transform may have any dtype
        if not is_plain(value):
            keeps_class = item.param.is_meta or is_quantized(item.param)  # else the class converts it to a plain tensor
            if self.options.dtype is not None and keeps_class and is_quantized(value):
                found = f"{type(value.data).__name__} of {short(value.dtype)}"
                problem = Problem(ProblemKind.QUANTIZED_CAST, item.name, short(item.dtype), found)
                self.problems.append(problem)
            return
        cast = cast_between(value.dtype, item.dtype)
        is_requested = self.options.dtype is not None and item.dtype == self.options.dtype
        is_rounded = item.dtype in (torch.bfloat16, torch.float16) and is_dequantized(item.facts.stored)
        if cast == "kind" or (cast == "lossy" and not (is_requested or is_rounded)):
            self.problems.append(
                Problem(
                    ProblemKind.WRONG_DTYPE,
                    item.name,
                    short(item.dtype),
                    short(value.dtype),
                    why=CHANGES_KIND if cast == "kind" else LOSES_VALUES,
                    name_for_rules=self.other_name(item.name),
                )
            )

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

    def error(self) -> PlanError:
        """The error with all problems."""
        error = plan_error(*self.names, self.problems, given=self.matched.given)
        error.__cause__ = self._cause
        return error

    def plan(self) -> LoadPlan:
        """Returns the frozen plan."""
        target, source = self.names
        return LoadPlan(
            target=target,
            source=source,
            problems=tuple(self.problems),
            notes=tuple(self.notes),
            slots=self.slot_count,
            peak_memory_bytes=peak_bytes([item.transfers for item in self.executions], ReadStrategy.fastest()),
            binding=Binding(self.matched, self.signatures, self.transaction.armed, self.mapped),
            make_steps=self.step_maker(),
        )

    @property
    def slot_count(self) -> int:
        """The number of slots that need a value."""
        tensors = sum(1 for slot in self.slots.tensors if slot.kind != HIDDEN or id(slot.tensor) in self.filled)
        return tensors + len(self.slots.extra) - len({id(param) for param in self.uninitialised.values()})

    def step_maker(self) -> Callable[[], tuple[Step, ...]]:
        """Returns a function that makes a step for each value and extra state, in the order of the slots.

        It holds no tensor.
        """
        steps = [self._step(item.transfers, item.seconds) for item in self.singles]
        passed = Way.CODE, "passed to set_extra_state"
        extra = [Step(name, EXTRA, self.incoming.source_of(name), *passed) for name in self.extra_states]
        plain = [steps_of(item) for item in self.plain]
        names = [*self.slots.by_name] if plain and len(plain) + len(steps) > 1 else []

        def make() -> tuple[Step, ...]:
            unordered = [*steps, *(step for make_steps in plain for step in make_steps())]
            positions = {name: position for position, name in enumerate(names)}
            return (*sorted(unordered, key=lambda step: positions.get(step.name, len(names))), *extra)

        return make

    def _step(self, item: Transfers, seconds: float) -> Step:
        facts = item.facts
        slot, entry = self.slots.by_name.get(item.name), self.incoming.entry_of(facts.given)
        return Step(
            name=item.name,
            kind=item.kind,
            source=facts.given if entry is None else ", ".join(entry.sources),
            way=item.way,
            why=item.why,
            shape=item.slot_tensors[0].shape,
            dtype=item.dtype,
            stored_dtype=facts.value.dtype,
            device=item.device,
            nbytes=item.nbytes,
            ties=() if slot is None else tuple(name for name in slot.names if name != item.name),
            rules=() if entry is None else entry.rules,
            mapped=item.maps is not None,
            shard="" if facts.sharded is None else str(facts.sharded.shard),
            seconds=seconds,
        )


def steps_of(execution: Execution) -> Callable[[], list[Step]]:
    """Returns a function that makes the step of each row without facts of its own. It holds no tensor."""
    transfers = execution.transfers
    columns, dtypes, names, kinds = transfers.columns, transfers.dtypes, transfers.names, transfers.kinds
    way, why, device, is_mapped = transfers.way, transfers.why, transfers.device, transfers.maps is not None
    seconds = execution.seconds / transfers.nbytes
    assert columns is not None

    def make() -> list[Step]:
        rows = zip(names, kinds, dtypes, columns.rows(), strict=True)
        return [
            Step(
                *(name, kind, name, way, why, torch.Size(shape), dtype, stored_dtype, device, nbytes),
                mapped=is_mapped,
                seconds=seconds * nbytes,
            )
            for name, kind, dtype, (stored_dtype, shape, _, _, nbytes) in rows
        ]

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
