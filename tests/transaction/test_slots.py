"""The slots of a module: every tensor once, under all its names, in the order of state_dict."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from modelstate.transaction.slots import BUFFER, PARAMETER, overlapping, sharing, slots_of


@pytest.mark.parametrize("hidden_first", [True, False])
def test_a_tensor_of_several_kinds_is_of_the_strictest(hidden_first: bool) -> None:
    shared = torch.zeros(2)
    module = nn.Module()
    module.register_buffer("a", shared, persistent=not hidden_first)
    module.register_buffer("b", shared, persistent=hidden_first)
    (slot,) = slots_of(module).tensors
    assert (slot.names, slot.kind) == (("a", "b"), BUFFER)
    parameter = nn.Parameter(torch.zeros(1))
    module = nn.Module()
    module.register_buffer("a", parameter, persistent=False)
    module.register_parameter("b", parameter)
    (slot,) = slots_of(module).tensors
    assert slot.kind == PARAMETER
    assert set(slot.names) == {"a", "b"}


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(1, 3), st.sampled_from("bhi")), max_size=12)
)
def test_groups_of_slots_that_overlap_are_those_of_all_pairs(views: list[tuple[int, int, int, str]]) -> None:
    memory = np.zeros(256, np.uint8)
    tensors = [
        torch.from_numpy(memory[4 * first : 4 * first + count * step * np.dtype(kind).itemsize].view(kind)[::step])
        for first, count, step, kind in views
    ]
    touched = [
        range(4 * first, 4 * first + ((count - 1) * step + 1) * np.dtype(kind).itemsize if count else 4 * first)
        for first, count, step, kind in views
    ]
    found = sharing(range(len(tensors)), tensors)
    joined = {index: {index} for index in range(len(tensors))}
    pairs = [(a, b) for a, b in combinations(range(len(tensors)), 2) if {*touched[a]} & {*touched[b]}]
    for a, b in pairs:
        if joined[a] is not joined[b]:
            joined[a] |= joined[b]
            joined.update(dict.fromkeys(joined[a], joined[a]))
    groups = {tuple(sorted(group)) for group in joined.values() if len(group) > 1}
    assert {tuple(group) for group in found} == groups
    assert len(found) == len(groups)
    of_groups = [pair for group in found for pair in overlapping(group, [tensors[index] for index in group])]
    assert sorted(of_groups) == pairs
