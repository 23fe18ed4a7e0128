"""`modelstate.diff`: compares two checkpoints by their names, shapes, dtypes, values and bits.

The tensors of both sides are matched first, by their names after the rules that are given. The values of the matched
tensors are then read block by block (`checkpoint.reduction`), and measured (`difference`). Bytes whose digests agree
are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from time import perf_counter

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from modelstate.arguments import checked_call, invalid_option
from modelstate.checkpoint.checkpoint import Checkpoint, merged_fingerprints
from modelstate.checkpoint.inspect import plain_value
from modelstate.checkpoint.open import Source, is_selected, nothing_selected, open as open_checkpoint, patterns_of
from modelstate.checkpoint.reduction import (
    Operand,
    Region,
    check_readable,
    kind_of,
    operand_of,
    parts_of,
    read_dtype,
    reader_of,
    reduce,
)
from modelstate.comparison.difference import Accumulator, equal_unread, is_comparable
from modelstate.comparison.result import Diff, Status, TensorDiff, ValueDiff
from modelstate.errors import CodecError, ComparisonError, ForbiddenGlobalError, OpenError
from modelstate.formats.manifest import ALGORITHM
from modelstate.formats.tree import same_value
from modelstate.planning.matching import entries_of, matching_part
from modelstate.process import gc_paused
from modelstate.remote.cache import Cache
from modelstate.rules.expression import Derived, Source as TensorSource, leaves, memory_bytes, region, values_of
from modelstate.rules.rule import Entries, Entry, Rule, Value
from modelstate.rules.schema import Schema, apply_rules, check_rules
from modelstate.spec import StoredTensor, bytes_key, dtype_name
from modelstate.tensor_spec import TensorSpec
from modelstate.text_format import listed, printable
from modelstate.torch_compat.modules import state_dict_of
from modelstate.torch_compat.plain import is_plain, same_place

Key = str | tuple[str | None, str | None] | None


@checked_call("ms.diff")
@gc_paused()
def diff(
    a: Source | nn.Module | Sequence[Source],
    b: Source | nn.Module | Sequence[Source],
    *,
    rules: Rule | Iterable[Rule] | Schema = (),
    key: Key = None,
    only: Iterable[str] = (),
    values: bool = True,
    progress: bool | None = None,
    allow: Sequence[object] = (),
    skip_forbidden: bool = False,
    cache: Cache | None = None,
) -> Diff:
    """Compares two checkpoints: names, shapes, dtypes, bits, how far values are apart, and the values of other kinds.

    Both are read block by block on several threads, with tens of megabytes of memory. Tensors whose XXH3-128 digests
    agree, which files of `modelstate.save` and steps of a `Store` have, are not read; nor are the same bytes of one
    file. Metadata of the files, such as torch's versions of modules, are not compared.

    Args:
        a: The first checkpoint: what `modelstate.open` opens, or a model.
        b: The second checkpoint.
        rules: Rules, or a `Schema`, that lead from the names of `a` to those of `b`.
        key: The part to compare, such as "model_state"; a pair for a part of each. By default the whole, or, where the
            names have nothing in common, the part of one checkpoint that has the names of the other one.
        only: Patterns of names of `b` (of `a` for names that `b` lacks); other tensors and values are left out.
        values: Whether the values of tensors are read and compared; otherwise names, shapes and dtypes.
        progress: Whether to show a progress bar. None shows one on a terminal after half a second.
        allow: Classes and functions that a pickle may use, as for `modelstate.open`.
        skip_forbidden: Whether other classes and functions are left out, instead of raising.
        cache: Where what is read of remote files is kept, a `Cache`.

    Returns:
        The differences; `print` shows them, and `to_json` returns them for other programs.

    Raises:
        OpenError: A source cannot be opened, or a value in it cannot be read.
        KeyNotFoundError: There is nothing under `key`.
        ComparisonError: The checkpoints have no name in common, or a tensor has no values, as one on the meta device.
        RuleError: The rules cannot be applied.
        ReadFailedError: A file cannot be read, or has changed meanwhile.
        ModelCodeError: A module's own `state_dict` raised.
        OptionError: An argument is not valid.

    Examples:
        >>> import modelstate, torch
        >>> diff = modelstate.diff({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 4.5])})
        >>> diff.tensors[0].difference.max_abs, diff.tensors[0].difference.relative_l2
        (0.5, 0.1)
    """
    begin = perf_counter()
    patterns = patterns_of("only", only)
    opened = partial(open_checkpoint, allow=allow, skip_forbidden=skip_forbidden, cache=cache)
    first, second = _open_both(a, b, key, opened)
    where = f"{first.source} and {second.source}"
    chain = rules.rules_for(first) if isinstance(rules, Schema) else check_rules(rules)
    applied = apply_rules(chain, entries_of(first), first.read)
    applied.check("the rules cannot be applied", where=first.source)
    entries, others = applied.entries, entries_of(second)
    tensors = {name: entry for name, entry in entries.items() if entry.tensor is not None}
    matched = {name for name in tensors if name in second}
    if not matched and len(first) and len(second):
        raise ComparisonError(
            "the checkpoints have no name in common",
            where=where,
            expected=f"names such as {listed(map(printable, second), 3)}",
            found=listed(map(printable, first), 3),
            remedy="give a part of each with key=, or rules= that lead from the first names to the second",
            options="--key twice, for A and for B; or --rename PATTERN=REPLACEMENT, which applies to names of A",
        )
    selected = {name for name in (*entries, *others) if is_selected(name, patterns)}
    if not selected:
        raise nothing_selected(patterns, [*second, *first], where)
    both, one_sided = matched & selected, selected - matched
    comparable = [pair for name in second if name in both for pair in _pairs(name, tensors[name], others[name])]
    differences, read_bytes = _compared(comparable, first, second, values, progress)
    return Diff(
        _label(a, first),
        _label(b, second),
        differences,
        tuple(_removed(name, entry, first) for name, entry in tensors.items() if name in one_sided),
        tuple(spec for spec in second.specs() if spec.name in one_sided),
        tuple(_value_diffs(entries, others, selected)),
        read_bytes,
        sum(tensor.bytes for tensor in differences if not tensor.is_read and tensor.status is Status.EQUAL),
        perf_counter() - begin,
    )


def _open_both(
    a: Source | nn.Module | Sequence[Source],
    b: Source | nn.Module | Sequence[Source],
    key: Key,
    opened: Callable[..., Checkpoint],
) -> tuple[Checkpoint, Checkpoint]:
    """Opens both sides; without a key, the part of one that has the names of the other."""
    keys = key if isinstance(key, tuple) and len(key) == 2 else (key, key)
    if not all(part is None or isinstance(part, str) for part in keys):
        raise invalid_option(
            "key", "must be a path, or a pair of paths", key, expected='"model_state", or ("model", None)'
        )
    first, second = (
        opened(state_dict_of(source) if isinstance(source, nn.Module) else source, key=part)
        for source, part in zip((a, b), keys, strict=True)
    )
    if key is None and not first.keys() & second.keys():
        parts = matching_part(first, [*second], [str]), matching_part(second, [*first], [str])
        if parts[0] is first or parts[1] is second:  # parts of both sides would hide the rest of both
            return parts
    return first, second


def _label(source: object, checkpoint: Checkpoint) -> str:
    name = type(source).__name__ if isinstance(source, nn.Module) else checkpoint.source
    return f"{name}, key {checkpoint.key!r}" if checkpoint.key else name


def _removed(name: str, entry: Entry, checkpoint: Checkpoint) -> TensorSpec:
    source = entry.tensor
    assert source is not None
    if not entry.rules:
        return checkpoint[name]
    if isinstance(source, Derived):  # without bytes of its own
        source = torch.empty(tuple(source.shape), dtype=source.dtype, device="meta")
    return TensorSpec(name, tuple(source.shape), dtype_name(source), source)


def _value_diffs(entries: Entries, others: Entries, selected: Collection[str]) -> Iterator[ValueDiff]:
    """Yields the values other than tensors that differ. Raises an `OpenError` for a value that could not be read."""
    first, second = (
        {path: entry.content for path, entry in side.items() if isinstance(entry.content, Value)}
        for side in (entries, others)
    )
    for path in dict.fromkeys([*first, *second]):
        is_in = path in first, path in second
        a, b = first.get(path, Value(None)), second.get(path, Value(None))
        if path not in selected:
            continue
        for error in (a.error, b.error):
            if isinstance(error, OpenError) and not isinstance(error, ForbiddenGlobalError):
                raise error
        if not (all(is_in) and not (a.error or b.error) and same_value(a.value, b.value)):
            yield ValueDiff(path, is_in, (_json_value(a), _json_value(b)))


def _json_value(value: Value) -> object:
    if isinstance(value.error, CodecError):
        return f"not decoded: {printable(value.error.what)}"
    return plain_value(value.value)


# Plain tensors that are compared.


class _Pair(msgspec.Struct, frozen=True, eq=False):
    """Two plain tensors that are compared, or two tensors that cannot be compared."""

    diff: TensorDiff
    """What is known before their values are read."""
    a: TensorSource
    b: TensorSource

    @property
    def read_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the values that are read."""
        return read_dtype(self.a.dtype), read_dtype(self.b.dtype)

    @property
    def is_comparable(self) -> bool:
        are_plain, (shape, other) = self.diff.kinds == ("strided", "strided"), self.diff.shapes
        return are_plain and shape == other and is_comparable(*self.read_dtypes)


def _pair(name: str, entry: Entry, part: str, a: TensorSource, b: TensorSource, kinds: tuple[str, str]) -> _Pair:
    shapes, dtypes, status = (tuple(a.shape), tuple(b.shape)), (a.dtype, b.dtype), Status.NOT_COMPARED
    if kinds[0] != kinds[1]:
        status = Status.OTHER_KIND
    elif shapes[0] != shapes[1]:
        status = Status.OTHER_SHAPE
    elif dtypes[0] != dtypes[1]:
        status = Status.OTHER_DTYPE
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    return _Pair(TensorDiff(name, entry.sources, part, status, shapes, dtypes, kinds, nbytes, False, None), a, b)


def _pairs(name: str, entry: Entry, other: Entry) -> list[_Pair]:
    """Returns the parts of two tensors that consist of several; both as a whole where they do not correspond."""
    a, b = entry.tensor, other.tensor
    assert a is not None
    assert b is not None
    kinds = kind_of(a), kind_of(b)
    if isinstance(a, Derived) or isinstance(b, Derived) or kinds[0] != kinds[1] or tuple(a.shape) != tuple(b.shape):
        return [_pair(name, entry, "", a, b, kinds)]
    first, second = parts_of(a), parts_of(b)
    if len(first) != len(second):
        return [_pair(name, entry, "", a, b, kinds)]
    if first.keys() != second.keys():  # one of the files does not say what the parts are
        first, second = ({f"part {i}": part for i, part in enumerate(side.values())} for side in (first, second))
    plain = ("strided", "strided")
    return [_pair(name, entry, label, part, second[label], plain) for label, part in first.items()]


def _compared(
    pairs: Sequence[_Pair],
    first: Checkpoint,
    second: Checkpoint,
    values: bool,
    progress: bool | None,
) -> tuple[tuple[TensorDiff, ...], int]:
    """Reads each pair of tensors once, also where it has several names. Returns what differs, and the bytes read."""
    items: list[tuple[Operand, Operand]] = []
    accumulators: list[Accumulator] = []
    known: dict[object, Accumulator] = {}
    read: dict[int, Accumulator] = {}
    """The accumulators of the pairs that are read, by their index."""
    if values:
        for checkpoint, sides in ((first, [pair.a for pair in pairs]), (second, [pair.b for pair in pairs])):
            named = ((pair.diff.name, leaf) for pair, side in zip(pairs, sides, strict=True) for leaf in leaves(side))
            check_readable(
                named,
                where=checkpoint.source,
                remedy="give the model its values first; or values=False, which compares names, shapes and dtypes",
            )
    for index, pair in enumerate(pairs if values else ()):
        if not pair.is_comparable or _is_equal_unread(pair, first, second):
            continue
        key = tuple(
            id(side) if isinstance(side, Derived) else bytes_key(side, pair.diff.name) for side in (pair.a, pair.b)
        )
        if key not in known:
            known[key] = Accumulator(*pair.read_dtypes)
            accumulators.append(known[key])
            items.append((_operand(pair.a, first), _operand(pair.b, second)))
        read[index] = known[key]

    def fold(item: int, values: tuple[torch.Tensor, ...]) -> None:
        accumulators[item].add(*values)

    fingerprints = merged_fingerprints((first, second))
    read_bytes = reduce(items, fold, fingerprints=fingerprints, progress=progress, what="comparing")
    differences = [_measured(pair, read.get(index)) if values else pair.diff for index, pair in enumerate(pairs)]
    return tuple(differences), read_bytes


def _is_equal_unread(pair: _Pair, first: Checkpoint, second: Checkpoint) -> bool:
    """Whether two tensors are known to be equal without reading them."""
    a, b = pair.a, pair.b
    if a.dtype != b.dtype:
        return False
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return is_plain(a, b) and same_place(a, b)
    if not (isinstance(a, StoredTensor) and isinstance(b, StoredTensor) and a.is_contiguous and b.is_contiguous):
        return False
    if not a.nbytes:
        return True
    files = first.fingerprints.get(a.extent.path), second.fingerprints.get(b.extent.path)
    if files[0] is not None and files[0] == files[1] and a.extent.start == b.extent.start:
        return True  # one file, under one name or, as a hard link, under two
    if a.extent != a.storage or b.extent != b.storage:
        return False
    # CRC-32, which files of torch.save have, is too short: of 2**32 different tensors, one has the same.
    digests = first.checksums.get(a.storage), second.checksums.get(b.storage)
    return digests[0] is not None and digests[0].algorithm == ALGORITHM and digests[0] == digests[1]


def _operand(source: TensorSource, checkpoint: Checkpoint) -> Operand:
    read = reader_of(checkpoint)
    if not isinstance(source, Derived):
        return operand_of(source, read)

    def of_region(slices: Sequence[slice]) -> Region:
        part = region(source, slices)
        return Region(memory_bytes(part), partial(values_of, part, read))

    return Operand(source.dtype, tuple(source.shape), of_region)


def _measured(pair: _Pair, accumulator: Accumulator | None) -> TensorDiff:
    """Returns the difference of two tensors whose values have been read, are known to be equal, or have no measure."""
    difference, status = None, pair.diff.status
    if accumulator is not None:
        difference = accumulator.result()
    elif pair.is_comparable:
        difference = equal_unread(math.prod(pair.b.shape), pair.read_dtypes[1])
    if status is Status.NOT_COMPARED:
        is_equal = accumulator is None or accumulator.is_equal
        status = Status.OTHER_KIND if difference is None else Status.EQUAL if is_equal else Status.CHANGED
    return replace(pair.diff, status=status, is_read=accumulator is not None, difference=difference)
