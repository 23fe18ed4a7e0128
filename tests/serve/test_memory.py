"""Versions that are retired are gone."""

import gc
import mmap
import weakref
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import modelstate as ms
from tests.serve.models import X_OF_TIED as X, Constant, Tied, weights_of
from tests.serve.targets import KINDS, module_of, target_of


def holder_of(live: ms.Live) -> "weakref.ref[nn.Module]":
    return weakref.ref(module_of(live))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "compiled", "exported"])  # a package has no module
def test_the_first_version_is_freed_where_nobody_else_has_it(kind: str) -> None:
    module = Tied()
    live = ms.Live(target_of(kind, module, X), keep_versions=0)
    refs = [weakref.ref(tensor) for tensor in module.parameters()]
    del module
    live(X)
    gc.collect()
    assert all(ref() is not None for ref in refs)
    live.swap(weights_of(Tied(), 2))
    gc.collect()  # what has compiled or exported it may have cycles of its own
    assert not any(ref() is not None for ref in refs)
    assert live(X).unique().tolist() == [2.0]


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
def test_memory_stays_flat_over_two_hundred_swaps(kind: str) -> None:
    """Of 512 KB each: one that is left behind at each swap would take 100 MB. They are freed without a collection."""
    module = Tied()
    live, process, state = ms.Live(target_of(kind, module, X), keep_versions=0), psutil.Process(), weights_of(module, 2)
    sizes, descriptors, versions, alive = [], [], list[weakref.ref[Any]](), set[int]()

    def canary(version: Any) -> None:
        versions.append(weakref.ref(version))
        alive.add(sum(each() is not None for each in versions))

    gc.disable()
    try:
        for k in range(200):
            live.swap(state, canary=canary)
            live(X)
            if k % 40 == 19:
                sizes.append(process.memory_info().rss)
                descriptors.append(process.num_fds())
    finally:
        gc.enable()
    assert sizes[-1] - sizes[0] < 24 << 20
    assert descriptors[-1] <= descriptors[0]
    assert alive == {1, 2}  # no canary has seen the first version
    assert sum(each() is not None for each in versions) == 1


def test_requests_that_keep_versions_cause_no_collection_at_each_swap() -> None:
    """A collection of all objects stops the requests for about 0.1 s."""
    live, collections = ms.Live(Constant(2, 8).eval(), keep_versions=0), list[int]()
    callback = lambda phase, info: collections.append(info["generation"]) if phase == "stop" else None  # noqa: E731
    gc.callbacks.append(callback)
    try:
        with ExitStack() as requests:
            for k in range(2, 14):
                if k < 7:
                    requests.enter_context(live.version())
                live.swap(weights_of(Constant(2, 8), k))
    finally:
        gc.callbacks.remove(callback)
    assert collections.count(2) <= 2


class Cyclic(Constant):
    """Refers to itself, as modules with hooks that are their own methods do."""

    def __init__(self) -> None:
        super().__init__(2, 8)
        self.register_state_dict_pre_hook(self._nothing)

    def _nothing(self, *_: object) -> None:
        pass


def test_versions_that_refer_to_themselves_are_collected() -> None:
    live, versions = ms.Live(Cyclic().eval(), keep_versions=0), []
    gc.disable()
    try:
        for k in range(2, 8):
            live.swap(weights_of(Cyclic(), k))
            versions.append(holder_of(live))
    finally:
        gc.enable()
    assert sum(version() is not None for version in versions) <= 3


def test_the_memory_of_a_dropped_version_is_that_of_a_later_one() -> None:
    live, addresses = ms.Live(Constant(2, 8).eval(), keep_versions=0), set[int]()
    for k in range(2, 10):
        live.swap(weights_of(Constant(2, 8), k))
        addresses.update(weight.data_ptr() for weight in module_of(live).parameters())
    assert len(addresses) == 2 * 2  # weights of two versions
    with live.version() as v:
        live.swap(weights_of(Constant(2, 8), 10))
        live.swap(weights_of(Constant(2, 8), 11))
        assert v(torch.ones(2, 8)).unique().tolist() == [9.0]


def test_weights_that_another_process_has_are_not_written_to() -> None:
    live, weight = ms.Live(Constant(2, 8).eval(), keep_versions=0), next(iter(weights_of(Constant(2, 8), 2)))
    live.swap(weights_of(Constant(2, 8), 2))
    answer = module_of(live).get_parameter(weight).detach()
    descriptor, nbytes = answer.untyped_storage()._share_fd_cpu_()  # as a queue of torch.multiprocessing sends it
    received = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=answer.dtype)
    before = received.clone()
    del answer
    for k in range(3, 8):
        live.swap(weights_of(Constant(2, 8), k))
    assert torch.equal(received, before)
