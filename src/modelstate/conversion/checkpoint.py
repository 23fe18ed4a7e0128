"""`modelstate.convert_checkpoint`."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.open import Source, argument_order, is_path, is_source
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.checkpoint.write import (
    LazyStateBuilder,
    SaveReport,
    StateToWrite,
    allowed,
    around,
    check_options,
    streamed,
    target_path,
    write_state,
)
from modelstate.errors import CodecError, OptionError, RuleError
from modelstate.formats.block_writer import storages_of, whole
from modelstate.formats.pickled import Refused
from modelstate.formats.write import check_both
from modelstate.io.atomic import LOCK_TIMEOUT_SECONDS
from modelstate.loading.options import check_model
from modelstate.planning.initialise import Initialisers
from modelstate.planning.mapped_state import DecodeFailure, ModelSchemaView, renamed_versions
from modelstate.problems import IdlePattern, Problem, explain
from modelstate.rules.expression import Derived, to_be_computed, values_of
from modelstate.rules.expression import Source as DerivedSource
from modelstate.rules.rule import Entry, Rule, Value
from modelstate.rules.schema import Schema, apply_rules, check_rules
from modelstate.spec import Stored
from modelstate.torch_compat.dtypes import floating_dtype
from modelstate.torch_compat.private import unwrapped
from modelstate.transaction.slots import slots_of


@argument_order("ms.convert_checkpoint", lambda value: is_source(value) or isinstance(value, Sequence), is_path)
def convert_checkpoint(
    source: Source | Sequence[Source],
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    rules: Iterable[Rule] | Schema = (),
    model: nn.Module | None = None,
    dtype: torch.dtype | str | None = None,
    format: str | None = None,
    shard_size_bytes: int | None = None,
    max_memory_bytes: int | None = None,
    overwrite: bool = True,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> SaveReport:
    """Writes what any checkpoint holds as `modelstate.save` does, with no more of it in memory than is being written.

    Tied tensors stay tied, values that are no tensors are kept (but for placeholders of what was skipped as forbidden),
    and so are torch's versions of modules and what the file says of itself. Tensors are read and cast in blocks of a
    few megabytes, several at a time; what rules compute, and what is not stored in its own order, one tensor at a time.
    Sparse tensors, and subclasses of tensors, are in memory all the time. Subclasses are not cast, which the report's
    notes say; where they are quantized, `dtype=` is refused.

    Args:
        source: what `modelstate.open` opens; or a `Checkpoint`.
        path: where it is written to; it may be the source.
        key: the part of it that is wanted ("model_state").
        rules: changes of names and tensors, or a `Schema`. The names of what is written are flat then.
        model: a model that what is written is for; it may be a skeleton, and is not changed. A `Fill` among the rules
            needs it, for the names that are lacking, their shapes and dtypes, and their initialisation. What the model
            initialises is in memory from the beginning.
        dtype: what floating point tensors are cast to, those of an optimizer as well: `key=` leaves them out.
        format, shard_size_bytes, overwrite, lock_timeout_seconds: as in `modelstate.save`; the suffix of the path says
            the format. For a file of `torch.save` the tensors are put into a file beside the path first, which takes
            as much room on the disk again.
        max_memory_bytes: the most that tensors may take in memory at once. Where it is small, fewer threads work.

    Raises what `modelstate.open` and `modelstate.save` raise; `RuleError` for rules that cannot be applied,
    `SchemaError`, `CodecError` for a value that cannot be decoded here, `ReadFailedError`, and `MemoryBudgetError`
    where one tensor takes more. Then what was at the path is as it was.
    """
    begin = perf_counter()
    where = target_path(path)
    chosen = check_options(where, format, shard_size_bytes, lock_timeout_seconds)
    to = floating_dtype(dtype)
    _check_budget(max_memory_bytes)
    check_both(where, overwrite)
    checkpoint = open_checkpoint(source, key=key)
    chain = rules.rules_for(checkpoint) if isinstance(rules, Schema) else check_rules(rules)
    state = _by_rules(checkpoint, chain, to, model) if chain else streamed(checkpoint, to)
    if isinstance(rules, Schema):
        state.schema = rules.version
    return write_state(
        state,
        where,
        begin,
        format=chosen,
        shard_bytes=shard_size_bytes,
        overwrite=overwrite,
        max_memory_bytes=max_memory_bytes,
        lock_timeout_seconds=lock_timeout_seconds,
    )


def _check_budget(max_memory_bytes: object) -> None:
    if max_memory_bytes is not None and not (type(max_memory_bytes) is int and max_memory_bytes > 0):
        raise OptionError("max_memory_bytes= is a number of bytes", expected="1 or more", found=repr(max_memory_bytes))


def _by_rules(
    checkpoint: Checkpoint, rules: Sequence[Rule], dtype: torch.dtype | None, model: nn.Module | None
) -> StateToWrite:
    """The checkpoint as the rules change it, by names."""
    computed: dict[Stored, Derived] = {}
    entries = {
        name: Entry(to_be_computed(stored, computed), (name,)) for name, stored in checkpoint.flat.tensors.items()
    }
    values = {name: _value(checkpoint, name) for name in checkpoint.extra}
    entries |= {name: Entry(Value(one), (name,)) for name, one in values.items() if not isinstance(one, Refused)}
    applied = apply_rules(rules, entries, checkpoint.read, None if model is None else _places(model).before)
    problems: list[Problem] = [*applied.problems, *(IdlePattern(rule, option="rules") for rule in applied.idle)]
    if problems:
        raise RuleError(
            f"the rules cannot be applied; nothing has been written\n{explain(problems)}", where=checkpoint.source
        )
    making = LazyStateBuilder(checkpoint, dtype)
    state = OrderedDict((name, _made(making, checkpoint, name, entry)) for name, entry in applied.entries.items())
    if checkpoint.versions is not None:
        state._metadata = renamed_versions(checkpoint.versions, applied, rules)  # type: ignore[attr-defined]
    return around(checkpoint, state, making)


def _places(model: nn.Module) -> ModelSchemaView:
    model = unwrapped(check_model(model))
    return ModelSchemaView(slots_of(model), Initialisers(model))


def _value(checkpoint: Checkpoint, name: str) -> Any:
    try:
        return checkpoint.extra[name]
    except CodecError as error:
        return DecodeFailure(error)  # a rule may leave it out


def _made(making: LazyStateBuilder, checkpoint: Checkpoint, name: str, entry: Entry) -> Any:
    content = entry.content
    if isinstance(content, Value):
        if isinstance(content.value, DecodeFailure):
            raise content.value.error
        return allowed(content.value)
    if not isinstance(content, Derived):
        return making.tensor(content, name)
    if _is_initialised(content):
        # Here and now: the model's code is not made for several threads, and draws its random numbers in order.
        return making.tensor(values_of(content, checkpoint.read, making.on_cast(name)), name)
    to = making.cast_of(content, name) or content.dtype
    needed = content.scratch_bytes + content.result_bytes
    on_cast = making.on_cast(name)
    values = partial(values_of, content, checkpoint.read, on_cast)
    return whole(to, content.shape, content, values, needed, _storages_of(content), on_cast)


def _is_initialised(source: DerivedSource) -> bool:
    """Whether code of a model makes a part of it."""
    if not isinstance(source, Derived):
        return False
    return any(map(_is_initialised, source.parts)) if source.parts else not source.is_certain


def _storages_of(source: DerivedSource) -> dict[object, int]:
    parts = source.parts if isinstance(source, Derived) else ()
    found = {} if isinstance(source, Derived) else dict(storages_of(source))
    for part in parts:
        found |= _storages_of(part)
    return found
