"""Versions that are retired are gone."""

import gc
import weakref

import psutil
import pytest
import torch
from torch import nn

import modelstate as ms
from tests.serve.models import Constant, weights_of
from tests.serve.targets import KINDS, module_of, target_of

X = torch.ones(32, 128)


def holder_of(live: ms.Live) -> "weakref.ref[nn.Module]":
    return weakref.ref(module_of(live))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_retired_versions_are_freed_at_once(kind: str) -> None:
    live = ms.Live(target_of(kind, Constant(), X), keep_versions=1)
    gc.collect()
    gc.disable()
    try:
        found = []
        for k in range(2, 8):
            live.swap(weights_of(Constant(), k))
            live(X)
            found.append(holder_of(live))
    finally:
        gc.enable()
    # The current one, and the one that is kept.
    assert [ref() is not None for ref in found] == [False] * 4 + [True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_version_is_freed_where_nobody_else_has_it(kind: str) -> None:
    module = Constant()
    live = ms.Live(target_of(kind, module, X), keep_versions=0)
    if kind == "aoti":  # a package has no module
        return
    refs = [weakref.ref(tensor) for tensor in module.parameters()]
    del module
    live(X)
    gc.collect()
    assert all(ref() is not None for ref in refs)
    live.swap(weights_of(Constant(), 2))
    gc.collect()  # what has compiled or exported it may have cycles of its own
    assert not any(ref() is not None for ref in refs)
    assert live(X).unique().tolist() == [2.0]


class Cyclic(Constant):
    """Holds itself, as modules with hooks that are their own methods do."""

    def __init__(self) -> None:
        super().__init__(2, 8)
        self.register_state_dict_pre_hook(self._nothing)

    def _nothing(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_modules_that_hold_themselves_are_collected() -> None:
    live, refs = ms.Live(Cyclic().eval(), keep_versions=0), []
    gc.disable()
    try:
        for k in range(2, 12):
            live.swap(weights_of(Cyclic(), k))
            refs.append(holder_of(live))
    finally:
        gc.enable()
    assert sum(ref() is not None for ref in refs) <= 3


def test_a_pinned_version_is_freed_by_its_last_request() -> None:
    live = ms.Live(Constant(2, 8).eval(), keep_versions=0)
    live.swap(weights_of(Constant(2, 8), 2))
    ref = holder_of(live)
    with live.version() as v:
        live.swap(weights_of(Constant(2, 8), 3))
        assert ref() is not None
        assert v(torch.ones(2, 8)).unique().tolist() == [2.0]
    assert ref() is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_over_two_hundred_swaps(kind: str) -> None:
    """Of 512 KB each."""
    module = Constant()
    live, process, state = ms.Live(target_of(kind, module, X)), psutil.Process(), weights_of(module, 2)
    after = []
    for k in range(200):
        live.swap(state)
        if k % 20 == 19:
            live(X)
            after.append((process.memory_info().rss, process.num_fds()))
    assert after[-1][0] - after[1][0] < 24 * 2**20
    assert after[-1][1] <= after[1][1]
