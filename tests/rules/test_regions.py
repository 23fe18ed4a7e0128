"""Regions of sources: the values of a slice, for little more than its bytes."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import modelstate as ms
from modelstate import spec
from modelstate.io.engine import Request
from modelstate.io.tensors import read_tensor
from modelstate.rules import expression
from modelstate.rules.expression import Derived, Source, placed_runs, read_bytes, region, values_of
from modelstate.rules.rule import Entry
from modelstate.rules.schema import apply_rules
from modelstate.spec import Assemble, Blocks, ByteRange, Combined, Stored, StoredComposite, StoredTensor


@dataclass
class File:
    """A file in memory that counts the bytes that are read from it."""

    content: bytearray = field(default_factory=bytearray)
    bytes_read: int = 0

    def store(self, values: torch.Tensor, order: Sequence[int] | None = None) -> StoredTensor:
        """Stores a tensor with its dimensions in another order, if one is given."""
        dims = tuple(order) if order is not None else tuple(range(values.dim()))
        stored = values.permute(dims).contiguous()
        start = len(self.content)
        self.content += bytes(stored.reshape(-1).view(torch.uint8).tolist())
        view = stored.permute([dims.index(dim) for dim in range(values.dim())])
        storage = ByteRange("file", start, stored.nbytes)
        return StoredTensor.view(values.dtype, tuple(view.shape), tuple(view.stride()), storage)

    def read(self, stored: Stored) -> torch.Tensor:
        return read_tensor(stored, self.read_all)

    def read_all(self, requests: list[Request], *, threads: int | None = None) -> None:
        for request in requests:
            _, start, nbytes = request.source
            self.bytes_read += nbytes
            ctypes.memmove(request.address, bytes(self.content[start : start + nbytes]), nbytes)


def numbers(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(tuple(shape))


def negated(tensor: torch.Tensor) -> torch.Tensor:
    return -tensor


def average_of_two(out: torch.Tensor, blocks: Sequence[torch.Tensor], _: int) -> None:
    out.copy_((blocks[0] + blocks[1]) / 2)


SIZES = st.integers(0, 4)
SHAPES = st.lists(SIZES, max_size=3).map(tuple)


@st.composite
def slices_in(draw: st.DrawFn, shape: Sequence[int]) -> list[slice]:
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return [slice(first, end) for first, end in bounds[: draw(st.integers(0, len(shape)))]]


@st.composite
def leaves(draw: st.DrawFn, file: File, shape: tuple[int, ...]) -> tuple[Source, torch.Tensor]:
    """A stored tensor of a kind, and its values."""
    values = numbers(shape) + draw(st.integers(0, 9))
    kind = draw(st.sampled_from(["stored", "permuted", "in memory", "constant", "chunks", "average", "product"]))
    if kind == "permuted":
        return file.store(values, draw(st.permutations(range(len(shape))))), values
    if kind == "in memory":
        return values, values
    if kind == "constant":
        return expression.constant(torch.float32, shape, 7.0), torch.full(shape, 7.0)
    if kind == "chunks" and shape:
        cut = draw(st.integers(0, shape[0]))
        rest = tuple(map(range, shape[1:]))
        parts = (file.store(values[:cut]), file.store(values[cut:]))
        boxes = ((range(cut), *rest), (range(cut, shape[0]), *rest))
        return StoredComposite("chunks", values.dtype, shape, parts, Assemble(shape, values.dtype, boxes)), values
    if kind in ("average", "product"):
        parts = (file.store(values), file.store(values * 3))
        is_average = kind == "average"
        build = Blocks(lambda *_: average_of_two) if is_average else lambda tensors: (tensors[0] + tensors[1]) / 2
        combined = Combined(kind, values.dtype, shape, parts, build)
        return expression.to_be_computed(combined, {}), values * 2
    return file.store(values), values


@st.composite
def sources(draw: st.DrawFn, file: File, depth: int = 3) -> tuple[Source, torch.Tensor]:
    """A source, and the values that it has."""
    if not depth or not draw(st.integers(0, 4)):
        return draw(leaves(file, draw(SHAPES)))
    source, values = draw(sources(file, depth - 1))
    kind = draw(st.sampled_from(["transpose", "reshape", "reshape", "cast", "concat", "split", "function"]))
    dims = values.dim()
    dim = draw(st.integers(0, max(dims - 1, 0)))
    if kind == "cast":
        return expression.cast(source, torch.float64), values.double()
    if kind == "function":
        return Derived(values.dtype, tuple(values.shape), (source,), negated, is_certain=False), -values
    if kind == "reshape":
        count, shape = values.numel(), list[int]()
        while count > 1 and len(shape) < 4:
            size = draw(st.sampled_from([size for size in range(1, count + 1) if count % size == 0]))
            shape, count = [*shape, size], count // size
        shape = [*shape, count]
        return expression.reshaped(source, shape), values.reshape(shape)
    if kind == "transpose" and dims:
        other = draw(st.integers(-dims, dims - 1))
        return expression.transposed(source, dim, other), values.transpose(dim, other)
    if kind == "concat" and dims:
        shape = (*values.shape[:dim], draw(SIZES), *values.shape[dim + 1 :])
        added, more = draw(leaves(file, shape))
        added, more = expression.cast(added, values.dtype), more.to(values.dtype)
        return expression.concatenated([source, added, source], dim), torch.cat([values, more, values], dim)
    cut = draw(slices_in(values.shape))
    return region(source, cut), values[tuple(cut)]


def read(source: Source, file: File) -> torch.Tensor:
    """Reads a source, and checks that its cost is what has been read."""
    file.bytes_read = 0
    values = values_of(source, file.read)
    assert file.bytes_read == read_bytes(source)
    assert tuple(values.shape) == tuple(source.shape)
    assert values.dtype == source.dtype
    return values


@pytest.mark.slow
@pytest.mark.parametrize("gap_bytes", [0, 8, spec.GAP_BYTES])
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_a_region_has_the_values_of_the_slice_for_no_more_bytes(
    gap_bytes: int, data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "GAP_BYTES", gap_bytes)
    file = File()
    source, values = data.draw(sources(file))
    assert torch.equal(read(source, file), values)
    for _ in range(2):  # a region, and a region of that
        slices = data.draw(slices_in(values.shape))
        part, values = region(source, slices), values[tuple(slices)]
        assert torch.equal(read(part, file), values)
        assert read_bytes(part) <= read_bytes(source)
        source = part


@pytest.mark.slow
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_placed_runs_are_the_values_and_each_element_is_written_once(
    data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expression, "_LEAST_RUN_BYTES", 1)
    file = File()
    source, values = data.draw(sources(file))
    slices = data.draw(slices_in(values.shape))
    for part, wanted in ((source, values), (region(source, slices), values[tuple(slices)])):
        placed = placed_runs(part)
        if placed:
            memory, written = bytearray(wanted.nbytes), bytearray(wanted.nbytes)
            for (_, start, nbytes), at in (place for runs in placed for place in runs.places()):
                memory[at : at + nbytes] = file.content[start : start + nbytes]
                assert not any(written[at : at + nbytes])
                written[at : at + nbytes] = b"x" * nbytes
            assert all(written)
            assert torch.equal(torch.frombuffer(memory, dtype=wanted.dtype).reshape(wanted.shape), wanted)


ROWS = numbers((12, 8))


@pytest.mark.parametrize(
    ("rules", "name", "slices", "rows"),
    [
        ([ms.rules.Concat(["a", "b", "c"], "w")], "w", [slice(10, 26)], 16),
        ([ms.rules.Concat(["a", "b"], "w"), ms.rules.Split("w", ["x", "y", "z"])], "y", [slice(2, 8)], 6),
        ([ms.rules.Cast("a", torch.float64)], "a", [slice(3, 5)], 2),
        ([ms.rules.Transpose("a")], "a", [slice(None), slice(3, 5)], 2),
        ([ms.rules.Concat(["a", "b"], "w", dim=1), ms.rules.Transpose("w")], "w", [slice(8), slice(3, 5)], 2),
        ([ms.rules.Reshape("a", [3, 4, 8])], "a", [slice(1, 3)], 8),
        ([ms.rules.Cast("a", torch.float64), ms.rules.Reshape("a", [96])], "a", [slice(8, 24)], 2),
        ([ms.rules.Copy("a", "w")], "w", [slice(2, 4)], 2),
        (ms.rules.known.separate_qkv_by_head("a", ["q", "k", "v"], 2, 2, bias=False), "k.weight", [slice(2, 4)], 2),
        ([ms.rules.Apply("a", negated)], "a", [slice(2, 4)], 12),
    ],
)  # fmt: skip
def test_the_region_of_a_rule_reads_the_bytes_of_the_slice(
    rules: Sequence[ms.rules.Rule], name: str, slices: list[slice], rows: int
) -> None:
    file = File()
    names = ["a.weight"] if name == "k.weight" else ["a", "b", "c"]
    state = {key: ROWS + index for index, key in enumerate(names)}
    entries = {key: Entry(file.store(values), (key,)) for key, values in state.items()}
    applied = apply_rules(rules, entries, file.read)
    assert not applied.problems
    source = applied.entries[name].tensor
    assert source is not None
    part = region(source, slices)
    assert torch.equal(read(part, file), ms.rules.Rules(rules).apply(state)[name][tuple(slices)])
    assert read_bytes(part) == rows * 8 * 4


def test_a_function_that_fails_below_another_rule_changes_nothing(tmp_path: Any) -> None:
    ms.save({"a": ROWS, "b": ROWS}, tmp_path / "w.safetensors")
    module = torch.nn.Module()
    module.register_buffer("a", torch.zeros(12, 8))
    module.register_buffer("b", torch.zeros(8, 12))

    def fails(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            raise ValueError("the values are wrong")
        return tensor

    rules = [ms.rules.Apply("b", fails), ms.rules.Transpose("b")]
    with pytest.raises(ms.ModelStateError):
        ms.load(module, tmp_path / "w.safetensors", rules=rules)
    assert not module.a.any()
    assert not module.b.any()
