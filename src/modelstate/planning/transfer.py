"""`Transfers`: the values of a load, with the one way in which they get into their slots.

Most slots of most loads are plain tensors with the shape that the file has, and a file may have tens of thousands of
small ones. So values are rows of columns, and rows that go the same way are planned, read and placed together:
`names[row]` gets the value at row `row` of `columns`. A value with facts of its own (rules, a transform, a shard, code
of the model, a tensor subclass) is the only row of its columns, which refer to these `RowFacts`.

`Transfers` are frozen. An `Execution` has the results of a load, and refers to other transfers where the load learns
later that a value takes another way: no read lease can be had, code of the model uses it, or a transform decides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, KeysView, Sequence
from enum import IntEnum, StrEnum

import msgspec
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy

from modelstate.checkpoint.mapped import UNALIGNED, Maps
from modelstate.io.engine import ROWS_BYTES, ReadStrategy, Request, Rows, read_threads
from modelstate.io.memory import Layout, aligned, fresh_tensors
from modelstate.planning.options import LoadOptions
from modelstate.planning.transforms import BlockFunction, BlockTransform, Bound, ShardedSlot, Transform
from modelstate.process import cached_attribute
from modelstate.rules.expression import Derived, Source, pieces_of, placed_runs
from modelstate.spec import ByteRange, Combined, Described, Runs, StoredTensor, StoredTensors, TensorColumns, is_run
from modelstate.torch_compat.dtypes import cast_between, short
from modelstate.torch_compat.plain import has_its_memory, is_dense, is_plain
from modelstate.torch_compat.private import payload_of, storage_id
from modelstate.transaction.slots import HIDDEN, Slot, Slots, sharing

_CPU = torch.device("cpu")
_DTYPE_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
COPYABLE = frozenset(_DTYPES.values())
"""Dtypes between which a copy of torch cannot fail."""
_READ_INTO = ("cpu", "cuda")
"""The types of devices with memory that can be read into at the commit: no step of the way there allocates memory."""
_LONG_RUN_BYTES = 256 << 10
"""Runs that are requested one by one, so that several threads share a run."""


class Way(StrEnum):
    """How a value gets into its slot. The tensor in the slot stays the same object."""

    MAP = "map"
    """A tensor on meta becomes a map of the file."""
    NEW = "new"
    """The tensor gets new memory."""
    INTO = "into"
    """The bytes go straight into the memory that the tensor has."""
    STAGED = "staged"
    """The value is read into temporary memory, and copied into the memory of the tensor when all values are read."""
    CODE = "code"
    """The value is passed to code: `module_load` of a tensor subclass, or `set_extra_state`."""


_ON_META = "was on meta: gets memory"
IN_PLACE = "into the existing memory, directly"
LEASED = f"{IN_PLACE}, while a read lease holds the file"
AFTER_READS = "into the existing memory, after all reads"
BY_SUBCLASS = "a tensor subclass or layout decides in module_load"


class Sink(IntEnum):
    """What stands between the bytes of a file and the final memory of a value. Values are read in this order."""

    BLOCKS = 0
    """Blocks, which are cast, moved to a device or transformed while the next ones are read."""
    COMPUTED = 1
    """A computation in blocks from several tensors."""
    MEMORY = 2
    """Nothing: they are read into it."""
    WHOLE = 3
    """The whole value, in memory of its own."""


def choose_way(
    param: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    *,
    can_map: bool,
    in_place: bool | None,
    can_read_into: bool,
) -> tuple[Way, str]:
    """Returns the way of a plain value into a plain slot, and the reason.

    Args:
        param: The tensor of the slot.
        dtype: The dtype of the slot after the load.
        device: The device of the slot after the load.
        can_map: Whether a tensor on meta may be a map of the file, and the file has what it needs.
        in_place: The option of the load.
        can_read_into: Whether a read into the memory of the slot can fail only because of the file.
    """
    if param.is_meta:
        return (Way.MAP, "was on meta: becomes a map of the file") if can_map else (Way.NEW, _ON_META)
    if dtype != param.dtype:
        return Way.NEW, f"changes its dtype to {short(dtype)}"
    if device != param.device:
        return Way.NEW, f"moves to {device}"
    if in_place is False or not can_read_into:
        return Way.STAGED, AFTER_READS
    return Way.INTO, IN_PLACE if in_place else LEASED


def copy_cannot_fail(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `target.copy_(value)` cannot fail, for equal shapes."""
    if not is_plain(target, value) or storage_id(target) == storage_id(value):
        return False
    dtype, value_dtype = target.dtype, value.dtype
    if dtype not in COPYABLE or value.is_meta or target.is_inference():
        return False
    # torch warns where imaginary parts are lost, and a warning may be made an error.
    if value_dtype != dtype and (value_dtype not in COPYABLE or dtype.is_complex < value_dtype.is_complex):
        return False
    return target.is_meta or ((target.is_contiguous() or is_dense(target)) and has_its_memory(target))


class RowFacts(msgspec.Struct, frozen=True, eq=False, kw_only=True, dict=True):
    """The facts of a value that no column has. Such a value is the only row of its columns."""

    value: torch.Tensor
    """The value as it is in the checkpoint: a map of the file, whose bytes have not been read."""
    given: str
    """The name of the value in the state dict for the model; empty where code of the model computed the value."""
    stored: Source | None
    """The source of the value; None where the model's code computed the value, or may have changed it."""
    transform: Transform | None = None
    """Called with the value as it is in the checkpoint. Its result may have any dtype."""
    module_transform: Bound | None = None
    """Called with the value as it would be loaded: cast, and on its device."""
    transform_bytes: int = 0
    """Bytes of memory that a call of `module_transform` needs in addition to its argument and its result."""
    block_function: BlockFunction | None = None
    """Computes the result of `module_transform` in blocks of rows; None where a call needs the whole value."""
    sharded: ShardedSlot | None = None
    """The DTensor whose local tensor is the tensor of the row; None for a slot that is on one rank."""
    own_stride: tuple[int, ...] | None = None
    """The stride of a slot whose elements are dense in memory and in another order than a new tensor's; else None."""

    @cached_attribute
    def placed(self) -> tuple[Runs, ...]:
        """The parts of files that the value consists of, where it is several ranges."""
        stored = self.stored
        return placed_runs(stored) if isinstance(stored, Described | Derived) and not is_run(stored) else ()

    @property
    def is_transformed(self) -> bool:
        """Whether a transform computes the final value."""
        return self.transform is not None or self.module_transform is not None

    @property
    def is_live(self) -> bool:
        """Whether the value is in memory, and not in a file."""
        return isinstance(self.stored, torch.Tensor)

    @property
    def combined(self) -> Combined | None:
        """The tensor that can be computed in blocks from several tensors of files; None for other values."""
        return self.stored.read_in_blocks if isinstance(self.stored, Derived) else None


class Transfers(msgspec.Struct, frozen=True, eq=False):
    """Values that get into their slots in one way: a row for each slot, in columns of equal length."""

    names: list[str]
    """The names in the model."""
    kinds: list[str]
    params: list[torch.Tensor]
    """The tensors that are in the slots before the load; of a DTensor its local tensor."""
    dtypes: list[torch.dtype]
    """After the load."""
    device: torch.device
    """After the load."""
    way: Way = Way.NEW
    why: str = ""
    """The reason for the way."""
    maps: Maps | None = None
    """Maps the values; None where they are read."""
    own: RowFacts | None = None
    """What the only row has besides; None for rows without facts of their own."""
    columns: TensorColumns = TensorColumns((), (), (), (), ())
    """Dtypes and shapes of the values, and where they are in files; without that for a value that is not one range."""
    sink: Sink = Sink.WHOLE
    """All rows in blocks have one dtype in the files."""
    nbytes: int = 0
    """Bytes to read."""

    @property
    def name(self) -> str:
        """The name of the only row, or of the first one."""
        return self.names[0]

    @property
    def param(self) -> torch.Tensor:
        """The tensor of the only row."""
        return self.params[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the only row after the load."""
        return self.dtypes[0]

    @property
    def facts(self) -> RowFacts:
        """What the only row has besides. Called where rows without facts do not come."""
        assert self.own is not None
        return self.own

    @property
    def slot_tensors(self) -> Sequence[torch.Tensor]:
        """The tensors of the model: `params`, or the DTensor whose local tensor it is."""
        return self.params if self.own is None or self.own.sharded is None else [self.own.sharded.tensor]

    @property
    def on_cpu(self) -> bool:
        """Whether the values are on the CPU after the load."""
        return self.device.type == "cpu"

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the first value in its file."""
        dtype: torch.dtype = getattr(torch, self.columns.dtype_names[0])
        return dtype

    @property
    def extents(self) -> list[ByteRange]:
        """The ranges of files that the values are read from. Ranges of rows that adjoin are one."""
        if self.own is None:
            return self.columns.extents
        stored = self.own.stored
        parts = () if stored is None else pieces_of(stored)
        return [part.extent for part in parts if isinstance(part, StoredTensor)]

    @property
    def is_from_files(self) -> bool:
        """Whether a thread may read the values while the model is in use: only the checkpoint decides about them."""
        facts = self.own
        if facts is None:
            return True
        stays = self.way is Way.STAGED and facts.is_live and not facts.is_transformed
        # The result of a transform depends on its slot, and only the commit initialises that of a lazy module.
        waits = facts.is_transformed and is_lazy(self.param)
        return facts.stored is not None and _is_from_checkpoint(facts.stored) and not (stays or waits)

    @property
    def is_read_into_place(self) -> bool:
        """Whether the values are ranges of files that can be read to where their elements belong."""
        return bool(self.columns.paths) or bool(self.facts.placed)

    def casts(self) -> list[tuple[str, torch.dtype, torch.dtype]]:
        """The name, the dtype in the file and the dtype after the load of each row that is cast."""
        if self.sink is Sink.MEMORY:
            return []
        stored, rows = self.stored_dtype, zip(self.names, self.dtypes, strict=True)
        return [(name, stored, dtype) for name, dtype in rows if dtype is not stored]

    def requests(self, targets: Iterable[torch.Tensor]) -> list[Request | Rows]:
        """The reads of values into contiguous memory: a target for each row."""
        if self.columns.paths:
            return [*map(Request, self.columns.ranges(), [target.data_ptr() for target in targets])]
        (address,) = [target.data_ptr() for target in targets]
        requests: list[Request | Rows] = []
        for runs in self.facts.placed:
            if not runs.dims or runs.run_bytes >= _LONG_RUN_BYTES:
                requests += [Request(source, address + at) for source, at in runs.places()]
            else:  # many short runs are one request
                requests += [Rows(source, address + at, *runs.dims[-1]) for source, at in runs.places(-1)]
        return requests

    def layouts(self) -> list[Layout]:
        """Shape, stride and dtype of new memory for each slot. The stride is None unless it is a dense format.

        The shapes are not those of the slots, which may change during a load in the background. A block function
        allocates the memory of its result.
        """
        if self.own is not None and self.own.block_function is not None:
            return []
        stride = None if self.own is None else self.own.own_stride
        rows = zip(self.columns.shapes, self.dtypes, strict=True)
        return [(torch.Size(shape), stride, dtype) for shape, dtype in rows]

    # Memory that a load needs.

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory that the values need until they are copied into their slots."""
        if self.way is Way.CODE:
            # The value, which a handler copies, and the old tensor of the slot, for an undo.
            parts = [part for part in payload_of(self.param) if not part.is_meta and storage_id(part)]
            return self.nbytes + sum({storage_id(part): part.untyped_storage().nbytes() for part in parts}.values())
        if self.way is not Way.STAGED or (self.own is not None and self.own.is_live):
            return 0
        if self.sink is Sink.MEMORY:
            return self.nbytes
        rows = zip(self.columns.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in rows)

    @property
    def turn_bytes(self) -> int:
        """Bytes of memory that a value that is needed whole takes for itself, as far as known before a transform."""
        facts, stored, needed = self.facts, self.facts.stored, self.nbytes
        if not self.is_read_into_place and isinstance(stored, Derived):
            needed = stored.result_bytes + stored.scratch_bytes
        elif not self.is_read_into_place and isinstance(stored, StoredTensor) and stored.read_bytes != needed:
            needed += stored.read_bytes  # gathers strided elements
        if facts.transform is not None:
            return needed  # the argument of the transform
        if facts.module_transform is None:
            return 0 if facts.is_live else needed
        ordered = all(tensor.is_contiguous() for tensor in (facts.value, self.param) if is_plain(tensor))
        straight = facts.value.dtype == self.dtype and ordered and not isinstance(stored, Derived)
        copied = 0 if straight or not self.on_cpu else facts.value.numel() * self.dtype.itemsize
        return needed + facts.transform_bytes + copied

    @property
    def unit_bytes(self) -> int:
        """The smallest number of bytes that a value in blocks can be split into: an element, or a row."""
        by_rows = self.own is not None and self.own.block_function is not None
        return self.nbytes // self.facts.value.shape[0] if by_rows else self.stored_dtype.itemsize


class Execution(msgspec.Struct, eq=False):
    """The execution of transfers: the values that have been read so far, and the way that they really take."""

    transfers: Transfers
    """As planned; replaced where a load learns later that the values take another way."""
    finals: list[torch.Tensor] = []
    """The final values, or the slots that they were read into; empty until then."""
    freezes: bool = False
    """Whether the result of a module's transform clears `requires_grad` of the slot."""
    ranks: tuple[int, ...] = ()
    """The ranks that one rank reads the value for."""
    reader: int | None = None
    """That rank; None where each rank reads the value itself."""

    def stage_instead(self, reason: str) -> None:
        """Has values staged that were planned to be read at the commit."""
        self.transfers = replace(self.transfers, way=Way.STAGED, why=f"{AFTER_READS}: {reason}")


def allocate(executions: Iterable[Execution]) -> None:
    """Sets the final values to the memory that they are read into: the slots, or new memory."""
    for item in executions:
        transfers = item.transfers
        if transfers.way is Way.INTO:
            item.finals = transfers.params
        elif transfers.device.type == "cpu":
            item.finals = fresh_tensors(transfers.layouts())
        else:
            with torch.inference_mode(False):
                layouts, device = transfers.layouts(), transfers.device
                item.finals = [torch.empty(shape, dtype=dtype, device=device) for shape, _, dtype in layouts]


def with_way(item: Transfers, in_place: bool | None = None) -> Transfers:
    """Returns the transfer of a value with facts of its own, with its way and what follows from its source and slot.

    Args:
        item: The transfer. A way that has a reason stays.
        in_place: The option of the load.
    """
    facts, param, value, stored = item.facts, item.param, item.facts.value, item.facts.stored
    bound, way, why = facts.module_transform, item.way, item.why
    if bound is not None:
        transform, shape, block_function = bound.transform, tuple(param.shape), None
        in_order = param.is_contiguous() or not is_dense(param)
        if isinstance(transform, BlockTransform) and in_order and is_run(stored) and item.on_cpu:
            block_function = transform.block_function(shape, item.dtype)
        nbytes = 0 if block_function is not None else bound.extra_bytes(item.name, shape, item.dtype)
        facts = replace(facts, block_function=block_function, transform_bytes=nbytes)
        way, why = Way.NEW, f"made by {transform}"
    elif not why and is_plain(param, value):
        can_map, can_read_into = item.maps is not None, _can_read_into(item, in_place)
        plain = param, item.dtype, item.device
        way, why = choose_way(*plain, can_map=can_map, in_place=in_place, can_read_into=can_read_into)
    elif not why:
        way, why = Way.CODE, BY_SUBCLASS
    in_file = [[of_extent] for of_extent in stored.extent] if is_run(stored) else ((), (), ())
    columns = TensorColumns([short(value.dtype)], [value.size()], *in_file)
    if isinstance(stored, Described | Derived):
        nbytes = stored.nbytes
    else:
        nbytes = sum(part.nbytes for part in payload_of(value)) or value.numel() * value.itemsize
    in_order = way is not Way.INTO or (param.is_contiguous() and not (param.is_conj() or param.is_neg()))
    if is_plain(param) and not param.is_contiguous() and is_dense(param):
        in_order, facts = False, replace(facts, own_stride=tuple(param.stride()))
    is_final, sink = value.dtype == item.dtype and item.on_cpu and bound is None, Sink.WHOLE
    if way is not Way.CODE and facts.transform is None and in_order:
        if is_final and facts.combined is not None:
            sink = Sink.COMPUTED
        elif is_final and (columns.paths or facts.placed):
            sink = Sink.MEMORY
        elif columns.paths and (bound is None or facts.block_function is not None):
            sink = Sink.BLOCKS
    return replace(item, way=way, why=why, columns=columns, sink=sink, nbytes=nbytes, own=facts)


def _can_read_into(item: Transfers, in_place: bool | None) -> bool:
    """Whether a value can get into existing memory without temporary memory for all values."""
    facts, param, stored = item.facts, item.param, item.facts.stored
    if facts.transform is not None or not isinstance(stored, Described | Derived):
        return False
    if not copy_cannot_fail(param, facts.value):
        return False
    by_parts = bool(facts.placed) or facts.combined is not None
    if in_place:
        if isinstance(stored, Derived):
            return by_parts or (stored.is_certain and stored.of_files)
        return by_parts or (isinstance(stored, StoredTensor) and stored.is_contiguous)
    # Bytes of files are read, cast or combined block by block, without a call of other code.
    in_order = param.is_contiguous() and not (param.is_conj() or param.is_neg())
    by_parts = by_parts and item.on_cpu and stored.dtype == param.dtype
    return in_order and item.device.type in _READ_INTO and (is_run(stored) or by_parts)


def _is_from_checkpoint(stored: Source) -> bool:
    """Whether no part of the value is computed by code of the model, as initialisers do."""
    if isinstance(stored, Derived):
        return bool(stored.parts) and all(map(_is_from_checkpoint, stored.parts))
    return True


# Memory that a load needs beyond the final tensors.


def peak_bytes(transfers: Iterable[Transfers], strategy: ReadStrategy) -> int:
    """The memory beyond the final tensors: staged values, and buffers of casts and moves."""
    reading = [item for item in transfers if item.way is not Way.MAP]
    blocks = [item for item in reading if item.sink is Sink.BLOCKS]
    devices = {item.device for item in blocks}
    whole = [item for item in reading if item.sink is Sink.WHOLE]
    combined = [item.facts.combined for item in reading if item.sink is Sink.COMPUTED]
    computing = max((read_threads() * each.thread_bytes for each in combined if each is not None), default=0)
    ranges = max((item.turn_bytes for item in whole), default=0)
    if any(runs.dims for item in reading if item.own is not None for runs in item.own.placed):
        ranges += strategy.threads * ROWS_BYTES
    if strategy.remote and (whole or any(item.sink is Sink.MEMORY for item in reading)):
        ranges += strategy.threads * strategy.reply_bytes
    streamed = sum(_stream_bytes([item for item in blocks if item.device == device], strategy) for device in devices)
    # These reads follow each other, and each frees its memory.
    return sum(item.staged_bytes for item in reading) + max(streamed, computing, ranges)


def _stream_bytes(items: Sequence[Transfers], strategy: ReadStrategy) -> int:
    """The memory of the threads of a stream of values to one device, and of a block there."""
    total = sum(aligned(nbytes) for item in items for nbytes in item.columns.nbytes)
    is_cuda = items[0].device.type == "cuda"
    used = strategy.for_devices(total) if is_cuda else strategy
    largest_unit = max(min(item.unit_bytes, item.nbytes) for item in items)
    block_bytes = min(aligned(max(used.block_bytes, largest_unit)), total)
    working_bytes = 0  # of each thread, beside its buffer
    for item in items:
        if item.own is not None and (function := item.own.block_function) is not None:
            cast = min(max(strategy.block_bytes, item.unit_bytes), item.nbytes) // item.stored_dtype.itemsize
            cast_bytes = cast * item.dtype.itemsize if item.stored_dtype != item.dtype else 0
            working_bytes = max(working_bytes, function.extra_bytes + cast_bytes)
    threads = used.threads if total > block_bytes else 1
    return threads * (used.reply_bytes + block_bytes + working_bytes) + (block_bytes if is_cuda else 0)


# Values without facts of their own.

_PLAIN_CLASSES = (nn.Parameter, torch.Tensor)
_Group = tuple[Way, str, str, torch.device]
"""The way, its reason, the stored dtype where values pass through blocks, and the device after the load."""
_Kind = tuple[str, torch.dtype, torch.device, torch.device | None, str]
"""The dtype in the file; dtype and device of the slot; for a slot on meta, its device after the load and the file."""
_Row = tuple[Slot, int, torch.dtype]
"""A slot, the row of its value, and the dtype after the load."""


def plain_transfers(
    slots: Slots, given: KeysView[str], tensors: StoredTensors, options: LoadOptions, maps_of_load: Callable[[], Maps]
) -> list[Transfers]:
    """Returns the transfers of the slots that get the tensor of their name in a way that cannot fail.

    A tied slot is among them where all its names that have a value have the same one. A slot whose memory overlaps that
    of another one is left out. No two slots map the same bytes.

    Args:
        slots: The slots of the model.
        given: The names of all values, in the model.
        tensors: The values that are tensors in files, by these names.
        options: The options of the load.
        maps_of_load: Returns what maps values, where a slot may be a map.
    """
    rows, columns, by_tensor = tensors.rows, tensors.columns, options.device_of_meta
    dtype_names, shapes, nbytes = columns.dtype_names, columns.shapes, columns.nbytes
    paths, starts = columns.paths, columns.starts
    groups = defaultdict[_Group, list[_Row]](list)
    kinds = dict[_Kind, tuple[list[_Row], torch.dtype, bool] | None]()
    """The rows of the group, the dtype after the load, and whether they are maps, for slots that go the same way."""
    with_memory, mapped = list[torch.Tensor](), set[int]()
    for slot in slots.tensors:
        names, slot_kind, param = slot
        row, is_meta, known = rows.get(names[0]), param.is_meta, None
        if len(names) > 1:
            of_tie = {rows.get(name) for name in names if name in given}
            row = of_tie.pop() if len(of_tie) == 1 and slots.left_out.isdisjoint(names) else None
        if (
            row is not None
            and slot_kind != HIDDEN
            and type(param) in _PLAIN_CLASSES
            and param.layout is torch.strided
            and param.shape == tuple(shapes[row])
            and nbytes[row]
            and param.is_contiguous()
            and not (param.is_conj() or param.is_neg() or param.is_inference())
        ):
            after = by_tensor(param) if is_meta and by_tensor is not None else None
            key = dtype_names[row], param.dtype, param.device, after, paths[row] if is_meta else ""
            try:
                known = kinds[key]
            except KeyError:
                group = _group_of(dtype_names[row], param, options, paths[row], maps_of_load)
                known = kinds[key] = group and (groups[group[0]], group[1], group[0][0] is Way.MAP)
            # The memory may have been freed, as `has_its_memory` says of any tensor.
            end_bytes = 0 if is_meta or known is None else param.storage_offset() * param.itemsize + param.nbytes
            if end_bytes and param.untyped_storage().nbytes() < end_bytes:
                known = None
            if known is not None:
                of_group, dtype, is_map = known
                if is_map and row not in mapped and not starts[row] % dtype.itemsize:
                    mapped.add(row)
                elif is_map:
                    of_group = groups[Way.NEW, _ON_META, "", _CPU]
                    if row not in mapped:
                        maps_of_load().note(UNALIGNED, paths[row])
                of_group.append((slot, row, dtype))
        if not is_meta and (known is not None or is_plain(param)):
            with_memory.append(param)
    shared = {id(tensor) for tensors in sharing(with_memory, with_memory) for tensor in tensors}
    found = list[Transfers]()
    for (way, why, in_blocks, device), of_group in groups.items():
        if of_group := [row for row in of_group if id(row[0].tensor) not in shared] if shared else of_group:
            of_slots, indices, dtypes = map(list, zip(*of_group, strict=True))
            of_names, of_kinds, params = map(list, zip(*of_slots, strict=True))
            firsts = [names[0] if names[0] in rows else next(filter(rows.__contains__, names)) for names in of_names]
            before, values = (firsts, of_kinds, params), columns.selected(indices)
            sink, maps = Sink.BLOCKS if in_blocks else Sink.MEMORY, maps_of_load() if way is Way.MAP else None
            found.append(Transfers(*before, dtypes, device, way, why, maps, None, values, sink, sum(values.nbytes)))
    return found


def _group_of(
    stored_name: str, param: torch.Tensor, options: LoadOptions, path: str, maps_of_load: Callable[[], Maps]
) -> tuple[_Group, torch.dtype] | None:
    """Returns the group of a plain slot, and its dtype after the load; None where the value cannot be copied or cast.

    Args:
        stored_name: The name of the dtype in the file.
        param: The tensor of the slot, of the class and in the layout of plain tensors.
        options: The options of the load.
        path: The file.
        maps_of_load: See `plain_transfers`.
    """
    stored, dtype, device = _DTYPES.get(stored_name), param.dtype, options.device_after(param)
    if stored is None or device.type not in _READ_INTO or not (param.is_meta or param.device == device):
        return None
    if options.dtype is not None and stored.is_floating_point and dtype.is_floating_point:
        dtype = options.dtype
    cast = cast_between(stored, dtype) if dtype in COPYABLE and (param.is_meta or dtype == param.dtype) else ""
    if not (cast in ("same", "lossless") or (cast == "lossy" and dtype == options.dtype)):
        return None
    is_changed = device != _CPU or dtype != stored
    can_map = param.is_meta and options.map is not False and not is_changed
    can_map = can_map and maps_of_load().can_map(ByteRange(path, 0, 1), options.map)
    way, why = choose_way(param, dtype, device, can_map=can_map, in_place=options.in_place, can_read_into=True)
    return (way, why, stored_name if is_changed else "", device), dtype
