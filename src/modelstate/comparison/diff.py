"""`modelstate.diff`: compares two checkpoints by their names, shapes, dtypes, values and bits.

The tensors of both sides are matched first, by their names after the rules that are given. The values of the matched
tensors are then read block by block (`checkpoint.reduction`), and measured (`difference`). Bytes whose digests agree
are not read.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import nn

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.inspect import plain_value
from modelstate.checkpoint.open import Source, check_budget_option, checked_call, patterns_of
from modelstate.checkpoint.open import open as open_checkpoint
from modelstate.checkpoint.reduction import Chunk, Operand, Region, kind_of, operand_of, plain_parts, read_dtype, reduce
from modelstate.comparison.difference import Accumulator, equal_unread, is_comparable
from modelstate.comparison.result import Diff, Match, Status, TensorDiff, ValueDiff
from modelstate.errors import (
    CodecError,
    MissingValuesError,
    NothingInCommonError,
    OptionError,
    ReadFailedError,
    UnsupportedTensorError,
)
from modelstate.formats.block_writer import check_expanded
from modelstate.formats.manifest import ALGORITHM
from modelstate.formats.tree import same_value
from modelstate.io.engine import read_ranges
from modelstate.io.files import FileFingerprint
from modelstate.io.tensors import read_tensor
from modelstate.planning.matching import entries_of, matching_part
from modelstate.process import gc_paused
from modelstate.remote.cache import Cache
from modelstate.rules.expression import Derived, lacks_values, leaves, memory_bytes, region, values_of
from modelstate.rules.expression import Source as TensorSource
from modelstate.rules.rule import Entries, Rule, Value
from modelstate.rules.schema import Schema, apply_rules, check_rules
from modelstate.spec import StoredTensor, bytes_key, dtype_name
from modelstate.tensor_spec import TensorSpec
from modelstate.text_format import count, listed, printable, short_repr
from modelstate.torch_compat.modules import state_dict_of
from modelstate.torch_compat.plain import is_plain, remedies_for, same_place

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
    max_memory_bytes: int | None = None,
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
        max_memory_bytes: The most memory for buffers and temporary tensors.
        progress: Whether to show a progress bar. None shows one on a terminal after half a second.
        allow: Classes and functions that a pickle may use, as for `modelstate.open`.
        skip_forbidden: Whether other classes and functions are left out, instead of raising.
        cache: Where what is read of remote files is kept, a `Cache`.

    Returns:
        The differences; `print` shows them, and `to_json` returns them for other programs.

    Raises:
        OpenError: A source cannot be opened.
        KeyNotFoundError: There is nothing under `key`.
        NothingInCommonError: The checkpoints have no name in common.
        MissingValuesError: A tensor has no values, as one on the meta device.
        RuleError: The rules cannot be applied.
        ReadFailedError: A file cannot be read, or has changed meanwhile.
        MemoryBudgetError: The budget is too small.
        ModelCodeError: A module's own `state_dict` raised.
        OptionError: An argument is not valid.

    Examples:
        >>> import modelstate, torch
        >>> diff = modelstate.diff({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 4.5])})
        >>> diff.tensors[0].difference.max_abs, diff.tensors[0].difference.relative_l2
        (0.5, 0.1)
    """
    begin = perf_counter()
    check_budget_option(max_memory_bytes, minimum=1)
    patterns = patterns_of("only", only)
    given_keys = key if isinstance(key, tuple) and len(key) == 2 else (key, key)
    first, second = (
        _opened(source, own_key, allow, skip_forbidden, cache)
        for source, own_key in zip((a, b), given_keys, strict=True)
    )
    if key is None and not first.keys() & second.keys():
        parts = matching_part(first, [*second], [str]), matching_part(second, [*first], [str])
        if parts[0] is first or parts[1] is second:  # parts of both sides would hide the rest of both
            first, second = parts
    comparison = _Comparison(first, second, rules, patterns)
    tensors, read_bytes, skipped_bytes = comparison.compared(values, max_memory_bytes, progress)
    return Diff(
        _label(a, first),
        _label(b, second),
        tensors,
        tuple(comparison.removed),
        tuple(comparison.added),
        tuple(comparison.values()),
        read_bytes,
        skipped_bytes,
        perf_counter() - begin,
    )


def _opened(source: Any, key: object, allow: Sequence[object], skip_forbidden: bool, cache: Cache | None) -> Checkpoint:
    if not (key is None or isinstance(key, str)):
        raise OptionError(
            "key= must be a path, or a pair of paths",
            expected='"model_state", or ("model", None)',
            found=short_repr(key),
        )
    given = state_dict_of(source) if isinstance(source, nn.Module) else source
    return open_checkpoint(given, key=key, allow=allow, skip_forbidden=skip_forbidden, cache=cache)


def _label(source: object, checkpoint: Checkpoint) -> str:
    name = type(source).__name__ if isinstance(source, nn.Module) else checkpoint.source
    return f"{name}, key {checkpoint.key!r}" if checkpoint.key else name


# Matching.


class _Pair(msgspec.Struct, frozen=True, eq=False):
    """Two tensors that are matched."""

    name: str
    source_names: tuple[str, ...]
    match: Match
    a: TensorSource
    b: TensorSource


class _Comparison(msgspec.Struct, eq=False):
    """The names of two checkpoints, matched."""

    first: Checkpoint
    second: Checkpoint
    given_rules: Rule | Iterable[Rule] | Schema
    patterns: tuple[str, ...]
    pairs: list[_Pair] = msgspec.field(default_factory=list)
    removed: list[TensorSpec] = msgspec.field(default_factory=list)
    added: list[TensorSpec] = msgspec.field(default_factory=list)
    entries: Entries = msgspec.field(default_factory=dict)
    """What the first checkpoint holds, by the names of the second one."""
    others: Entries = msgspec.field(default_factory=dict)
    """What the second checkpoint holds."""

    def __post_init__(self) -> None:
        first, second, given = self.first, self.second, self.given_rules
        rules = given.rules_for(first) if isinstance(given, Schema) else check_rules(given)
        self.entries, self.others = _applied(first, rules), entries_of(second)
        matched = {name: Match.RULE if self.entries[name].rules else Match.NAME for name in self._tensors()}
        matched = {name: how for name, how in matched.items() if name in second}
        found = {name: self.entries[name] for name in matched}
        left = {name for name in self._tensors() if name not in second}
        if not found and len(first) and len(second):
            raise NothingInCommonError(
                "the checkpoints have no name in common",
                where=f"{first.source} and {second.source}",
                expected=f"names such as {listed(map(printable, second), 3)}",
                found=listed(map(printable, first), 3),
                remedy="give a part of each with key=, or rules= that lead from the first names to the second",
            )
        self.added = [spec for name, spec in second.items() if name not in found and self._is_asked(name)]
        self.removed = [self._removed(name) for name in self._tensors() if name in left and self._is_asked(name)]
        for name in second:
            if name in found and self._is_asked(name):
                entry, b = found[name], self.others[name].tensor
                assert entry.tensor is not None
                assert b is not None
                self.pairs.append(_Pair(name, entry.sources, matched[name], entry.tensor, b))
        if self.patterns and not (any(map(self._is_asked, self.others)) or self.removed or any(self.values())):
            raise OptionError(
                "no name matches the patterns",
                where=f"{first.source} and {second.source}",
                found=", ".join(self.patterns),
                remedy=f"patterns are those of whole names, such as {next(iter([*second, *first]), '*')!r}",
            )

    def _tensors(self) -> list[str]:
        return [name for name, entry in self.entries.items() if entry.tensor is not None]

    def _is_asked(self, name: str) -> bool:
        return not self.patterns or any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def _removed(self, name: str) -> TensorSpec:
        entry = self.entries[name]
        if not entry.rules:
            return self.first[name]
        source = entry.tensor
        assert source is not None
        if isinstance(source, Derived):  # without bytes of its own
            source = torch.empty(tuple(source.shape), dtype=source.dtype, device="meta")
        return TensorSpec(name, tuple(source.shape), dtype_name(source), source)

    def values(self) -> Iterable[ValueDiff]:
        """The values other than tensors that differ."""
        first, second = (
            {path: entry.content for path, entry in entries.items() if isinstance(entry.content, Value)}
            for entries in (self.entries, self.others)
        )
        for path in dict.fromkeys([*first, *second]):
            if not self._is_asked(path):
                continue
            is_in = path in first, path in second
            a, b = first.get(path, Value(None)), second.get(path, Value(None))
            if is_in == (True, True) and not (a.error or b.error) and same_value(a.value, b.value):
                continue
            yield ValueDiff(path, is_in, (_shown(a), _shown(b)))

    # Comparing.

    def compared(
        self, values: bool, max_memory_bytes: int | None, progress: bool | None
    ) -> tuple[tuple[TensorDiff, ...], int, int]:
        """The differences of the matched tensors, the bytes that were read, and those that need not be."""
        parts = [part for pair in self.pairs for part in _parts(pair)]
        if values:
            self._check_values()
        reads = _Reads(self.first, self.second)
        planned = [reads.add(part) if values else None for part in parts]
        reads.run(max_memory_bytes, progress)
        tensors = [_tensor_diff(part, values, reads, number) for part, number in zip(parts, planned, strict=True)]
        skipped = sum(tensor.bytes for tensor in tensors if not tensor.is_read and tensor.status is Status.EQUAL)
        return tuple(tensors), reads.read_bytes, skipped

    def _check_values(self) -> None:
        read = ((pair.name, leaf) for pair in self.pairs for side in (pair.a, pair.b) for leaf in leaves(side))
        lacking = {name: leaf for name, leaf in read if lacks_values(leaf) or remedies_for([leaf])}
        if lacking:
            remedies = remedies_for(lacking.values()) or [
                "give the model its values first; or values=False, which compares names, shapes and dtypes"
            ]
            raise MissingValuesError(
                f"{count(len(lacking), 'tensor')} cannot be compared, since there are no values",
                where=f"{self.first.source} and {self.second.source}",
                found=listed(map(printable, lacking), 4),
                remedy="; ".join(remedies),
                names=tuple(lacking),
            )
        for checkpoint, sides in (
            (self.first, [(pair.name, pair.a) for pair in self.pairs]),
            (self.second, [(pair.name, pair.b) for pair in self.pairs]),
        ):
            expanded = UnsupportedTensorError(
                "expanded views have far more elements than are stored, and would take too long to compare",
                remedy="leave the tensor out with only=[pattern, ...]; or values=False compares names and shapes",
            )
            check_expanded({name: leaf for name, side in sides for leaf in leaves(side)}, expanded, checkpoint.source)


def _applied(checkpoint: Checkpoint, rules: Iterable[Rule]) -> Entries:
    """What a checkpoint holds, after rules. Raises `RuleError`."""
    applied = apply_rules(rules, entries_of(checkpoint), checkpoint.read)
    applied.check("the rules cannot be applied", where=checkpoint.source)
    return applied.entries


def _shown(value: Value) -> object:
    if isinstance(value.error, CodecError):
        return f"not decoded: {printable(value.error.what)}"
    return plain_value(value.value)


# Parts: plain tensors that are read.


class _Part(msgspec.Struct, frozen=True, eq=False):
    """Two plain tensors that are compared, or what cannot be compared."""

    pair: _Pair
    label: str
    a: TensorSource
    b: TensorSource
    kinds: tuple[str, str]

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self.a.shape), tuple(self.b.shape)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return self.a.dtype, self.b.dtype

    @property
    def read_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the values that are read."""
        return read_dtype(self.a.dtype), read_dtype(self.b.dtype)

    @property
    def is_comparable(self) -> bool:
        are_plain = self.kinds == ("strided", "strided")
        return are_plain and self.shapes[0] == self.shapes[1] and is_comparable(*self.read_dtypes)


def _parts(pair: _Pair) -> list[_Part]:
    """The parts of two tensors that consist of several plain ones; both as a whole where they do not correspond."""
    kinds = kind_of(pair.a), kind_of(pair.b)
    if kinds[0] == kinds[1] != "strided" and tuple(pair.a.shape) == tuple(pair.b.shape):
        first, second = plain_parts(pair.a), plain_parts(pair.b)
        if first.keys() == second.keys():
            return [_Part(pair, name, first[name], second[name], ("strided", "strided")) for name in first]
        if len(first) == len(second):  # one of the files does not say what the parts are
            numbered = enumerate(zip(first.values(), second.values(), strict=True))
            return [_Part(pair, f"part {index}", a, b, ("strided", "strided")) for index, (a, b) in numbered]
    return [_Part(pair, "", pair.a, pair.b, kinds)]


class _Reads(msgspec.Struct, eq=False):
    """The pairs of tensors that are read, each once, also where it has several names."""

    first: Checkpoint
    second: Checkpoint
    items: list[tuple[Operand, Operand]] = msgspec.field(default_factory=list)
    accumulators: list[Accumulator] = msgspec.field(default_factory=list)
    known: dict[object, int] = msgspec.field(default_factory=dict)
    read_bytes: int = 0

    def add(self, part: _Part) -> int | None:
        """The number of the pair of tensors; None where it need not, or cannot, be read."""
        if not part.is_comparable or self.is_equal_unread(part):
            return None
        sides = part.a, part.b
        key = tuple(id(side) if isinstance(side, Derived) else bytes_key(side, part.pair.name) for side in sides)
        if key not in self.known:
            self.known[key] = len(self.items)
            self.items.append((_operand(part.a, self.first), _operand(part.b, self.second)))
            self.accumulators.append(Accumulator(*part.read_dtypes))
        return self.known[key]

    def run(self, max_memory_bytes: int | None, progress: bool | None) -> None:
        """Reads and compares everything. Raises `ReadFailedError` and `MemoryBudgetError`."""

        def fold(chunk: Chunk) -> None:
            self.accumulators[chunk.item].add(*chunk.values)

        self.read_bytes = reduce(
            self.items,
            fold,
            fingerprints=self._fingerprints(),
            max_memory_bytes=max_memory_bytes,
            progress=progress,
            what="comparing",
        )

    def is_equal_unread(self, part: _Part) -> bool:
        """Whether two tensors are known to be equal without reading them."""
        a, b = part.a, part.b
        if part.dtypes[0] != part.dtypes[1]:
            return False
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return is_plain(a, b) and same_place(a, b)
        if not (isinstance(a, StoredTensor) and isinstance(b, StoredTensor) and a.is_contiguous and b.is_contiguous):
            return False
        if not a.nbytes:
            return True
        files = self.first.fingerprints.get(a.extent.path), self.second.fingerprints.get(b.extent.path)
        if files[0] is not None and files[0] == files[1] and a.extent.start == b.extent.start:
            return True  # one file, under one name or, as a hard link, under two
        if a.extent != a.storage or b.extent != b.storage:
            return False
        # CRC-32, which files of torch.save have, is too short: of 2**32 different tensors, one has the same.
        digests = self.first.checksums.get(a.storage), self.second.checksums.get(b.storage)
        return digests[0] is not None and digests[0].algorithm == ALGORITHM and digests[0] == digests[1]

    def _fingerprints(self) -> Mapping[str, FileFingerprint]:
        both = {**self.first.fingerprints, **self.second.fingerprints}
        changed = [path for path, fingerprint in self.first.fingerprints.items() if both[path] != fingerprint]
        if changed:
            raise ReadFailedError(
                "the file changed between the opening of the two checkpoints",
                where=changed[0],
                remedy="compare them again, when nothing writes to it any more",
            )
        return both


def _operand(source: TensorSource, checkpoint: Checkpoint) -> Operand:
    read = partial(read_tensor, read_all=partial(read_ranges, fingerprints=checkpoint.fingerprints, threads=1))
    if not isinstance(source, Derived):
        return operand_of(source, read)

    def of_region(slices: Sequence[slice]) -> Region:
        part = region(source, slices)
        return Region(memory_bytes(part), partial(values_of, part, read))

    return Operand(source.dtype, tuple(source.shape), of_region)


def _tensor_diff(part: _Part, values: bool, reads: _Reads, number: int | None) -> TensorDiff:
    found, is_equal = None, False
    if number is not None:
        accumulator = reads.accumulators[number]
        found, is_equal = accumulator.result(), accumulator.is_equal
    elif values and part.is_comparable:
        found, is_equal = equal_unread(math.prod(part.shapes[1]), part.read_dtypes[1]), True
    if part.kinds[0] != part.kinds[1]:
        status = Status.OTHER_KIND
    elif part.shapes[0] != part.shapes[1]:
        status = Status.OTHER_SHAPE
    elif part.dtypes[0] != part.dtypes[1]:
        status = Status.OTHER_DTYPE
    elif not values:
        status = Status.NOT_COMPARED
    elif not part.is_comparable:
        status = Status.OTHER_KIND
    else:
        status = Status.EQUAL if is_equal else Status.CHANGED
    pair = part.pair
    numbers = (math.prod(shape) * dtype.itemsize for shape, dtype in zip(part.shapes, part.dtypes, strict=True))
    return TensorDiff(
        pair.name,
        pair.source_names,
        pair.match,
        part.label,
        status,
        part.shapes,
        part.dtypes,
        part.kinds,
        sum(numbers),
        number is not None,
        found,
    )
