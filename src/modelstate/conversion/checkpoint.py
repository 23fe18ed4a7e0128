"""`modelstate.convert_checkpoint`: rewrites a checkpoint with other names, dtypes or another format, block by block."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter

import torch
from torch import nn

from modelstate.arguments import check_integer, checked_call
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import Source, open as open_checkpoint
from modelstate.checkpoint.write import (
    LazyStateBuilder,
    SaveOptions,
    SaveReport,
    StateToWrite,
    around,
    streamed,
    target_path,
    write_state,
)
from modelstate.errors import CodecError, OptionError
from modelstate.formats.block_writer import bytes_stored, whole
from modelstate.formats.sharded import other_shards
from modelstate.formats.writing import check_both
from modelstate.io.atomic import LOCK_TIMEOUT_SECONDS
from modelstate.planning.matching import ModelSchemaView, entries_of, renamed_versions
from modelstate.planning.options import check_model
from modelstate.problems import ProblemKind, join_remedies, remedies_for
from modelstate.remote.cache import Cache
from modelstate.rules.expression import Derived, Source as DerivedSource, leaves, values_of
from modelstate.rules.rule import Entry, Rule, Value
from modelstate.rules.schema import Schema, apply_rules, check_rules
from modelstate.spec import Refused, set_version_metadata
from modelstate.tensor_spec import TensorSpec
from modelstate.text_format import listed
from modelstate.torch_compat.dtypes import floating_dtype
from modelstate.torch_compat.modules import unwrapped
from modelstate.transaction.slots import slots_of


@checked_call("ms.convert_checkpoint")
def convert_checkpoint(
    source: Source | Sequence[Source],
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    rules: Rule | Iterable[Rule] | Schema = (),
    model: nn.Module | None = None,
    dtype: torch.dtype | str | None = None,
    format: str | None = None,
    shard_size_bytes: int | None = None,
    max_memory_bytes: int | None = None,
    progress: bool | None = None,
    overwrite: bool = True,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    cache: Cache | None = None,
) -> SaveReport:
    """Writes a checkpoint as `modelstate.save` does, holding only the tensors in memory that are being written.

    Tied tensors stay tied. Values that are not tensors are kept, except for placeholders of values that were skipped as
    forbidden, and so are torch's version metadata and the metadata of the file. Tensors are read and cast in blocks of
    a few megabytes, several at a time; tensors that rules compute, or that are not stored in the order of their
    elements, are read whole, one at a time. Sparse tensors and tensor subclasses are in memory all the time.
    Subclasses are not cast, which the notes of the report say; for quantized ones, `dtype=` is refused.

    Args:
        source: What `modelstate.open` opens, or a `Checkpoint`.
        path: The path to write to; it may be the source.
        key: The part of the source to convert ("model_state").
        rules: Changes of names and tensors, or a `Schema`. The names that are written are flat then.
        model: The model that the result is for; it may be a skeleton, and is not changed. A `Fill` among the rules
            needs it, for the missing names, their shapes and dtypes, and their initialisation. Tensors that the model
            initialises are in memory from the beginning.
        dtype: Casts floating-point tensors, including those of an optimizer: `key=` leaves these out.
        format, shard_size_bytes, overwrite, lock_timeout_seconds: As in `modelstate.save`; the suffix of the path says
            the format. For a file of `torch.save` the tensors are put into a file beside the path first, which takes
            as much room on the disk again.
        max_memory_bytes: The most memory that tensors may take at once. If it is small, fewer threads work.
        progress: Whether to show a progress bar. None shows one on a terminal after half a second.
        cache: Where what is read of remote files is kept, a `Cache`.

    Returns:
        A report of what was written.

    Raises:
        OptionError: An argument cannot be used.
        OpenError: The source cannot be opened as a checkpoint; a subclass says why.
        RuleError: The rules cannot be applied.
        RuleError: The version of the checkpoint is unknown.
        CodecError: A value cannot be decoded here.
        ReadFailedError: An I/O error while tensors were read.
        MemoryBudgetError: A single tensor takes more than `max_memory_bytes`.
        SaveError: The result cannot be saved; a subclass says why.

    On any error the path is as before.

    Examples:
        >>> ms.convert_checkpoint("model.pt", "model.safetensors", dtype="bf16")
    """
    begin = perf_counter()
    path = target_path(path)
    options = SaveOptions(
        format=format,
        shard_size_bytes=shard_size_bytes,
        overwrite=overwrite,
        lock_timeout_seconds=lock_timeout_seconds,
        max_memory_bytes=max_memory_bytes,
        progress=progress,
    ).checked(path)
    cast = floating_dtype(dtype)
    check_integer("max_memory_bytes", max_memory_bytes, least=1, accepts_none=True)
    check_both(path, overwrite)
    checkpoint = open_checkpoint(source, key=key, cache=cache)
    chain = rules.rules_for(checkpoint) if isinstance(rules, Schema) else check_rules(rules)
    state = _changed_by_rules(checkpoint, chain, cast, model) if chain else streamed(checkpoint, cast)
    if cast is not None and not chain:
        _check_scales(checkpoint, checkpoint.source, has_rules=False)
    if isinstance(rules, Schema):
        state.schema = rules.version
    if lone := other_shards(checkpoint.files):
        shard, index, others = lone
        note = f"{shard} is one shard of several; the result lacks the tensors of {listed(others, 8)}"
        state.notes = (*state.notes, note + (f", which {index} names" if index else ""))
    return write_state(state, path, begin, options)


def _changed_by_rules(
    checkpoint: Checkpoint, rules: Sequence[Rule], dtype: torch.dtype | None, model: nn.Module | None
) -> StateToWrite:
    """Returns the result of the rules on a checkpoint, by name."""
    model_tensors = None
    if model is not None:
        model = unwrapped(check_model(model))
        model_tensors = ModelSchemaView(model, slots_of(model)).before
    applied = apply_rules(rules, entries_of(checkpoint), checkpoint.read, model_tensors)
    applied.check("the rules cannot be applied; nothing has been written", where=checkpoint.source)
    if dtype is not None:
        tensors = {name: entry.tensor for name, entry in applied.entries.items() if entry.tensor is not None}
        _check_scales(tensors, checkpoint.source, has_rules=True)  # type: ignore[arg-type]
    builder = LazyStateBuilder(checkpoint, dtype)
    written = ((name, _to_write(builder, checkpoint, name, entry)) for name, entry in applied.entries.items())
    state = OrderedDict((name, value) for name, value in written if not isinstance(value, Refused))
    if checkpoint.versions is not None:
        set_version_metadata(state, renamed_versions(checkpoint.versions, applied, rules))
    return around(checkpoint, state, builder)


def _check_scales(tensors: Mapping[str, TensorSpec], where: str, *, has_rules: bool) -> None:
    """Raises `OptionError` where a cast would change float8 numbers that have scales, so that no tool reads them."""
    if not any(tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 for tensor in tensors.values()):
        return
    from modelstate.planning.quantized import stored_quantized

    scaled = [problem for problem in stored_quantized(tensors) if str(problem.found).startswith("float8")]
    if scaled:
        raise OptionError(
            "dtype= would cast numbers whose scales are in other tensors; nothing has been written",
            where=where,
            found=listed([problem.line() for problem in scaled], 3, "; "),
            remedy=join_remedies(remedies_for(ProblemKind.QUANTIZED_WEIGHT, scaled)).replace(
                "rules=[", "rules=[*rules, " if has_rules else "rules=["
            ),
        )


def _to_write(builder: LazyStateBuilder, checkpoint: Checkpoint, name: str, entry: Entry) -> object:
    """Returns the value of an entry, or a tensor that is read and computed when it is written."""
    content = entry.content
    if isinstance(content, Value):
        if isinstance(content.error, CodecError):
            raise content.error
        return builder.node(content.value, name, in_value=True)
    if not isinstance(content, Derived):
        return builder.tensor(content, name)
    if _is_initialised(content):
        # Computed now: the model's code may not be thread-safe, and its random numbers must be drawn in order.
        return builder.tensor(values_of(content, checkpoint.read, builder.on_cast(name)), name)
    to = builder.cast_of(content.dtype, name) or content.dtype
    needed = content.scratch_bytes + content.result_bytes
    on_cast = builder.on_cast(name)
    values = partial(values_of, content, checkpoint.read, on_cast)
    return whole(to, content.shape, content, values, needed, sum(map(bytes_stored, leaves(content))), on_cast)


def _is_initialised(source: DerivedSource) -> bool:
    """Whether the model's own initialisation makes a part of it."""
    if not isinstance(source, Derived):
        return False
    return any(map(_is_initialised, source.parts)) if source.parts else not source.is_certain
