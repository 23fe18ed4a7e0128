"""Memory of retired versions serves later ones, and is never written to while a request or an answer uses it."""

import gc
import mmap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import CanaryError, OptionError
from tests.serve.models import Constant, weights_of
from tests.serve.targets import KINDS, Readers, target_of

X = torch.ones(32, 128)
SWAPS = 10
NBYTES = 8 * 128 * 128 * 4
"""The size of the weights of `Constant()`."""


class Lender(nn.Module):
    """Its answers are views of its weight, so they use the memory of their version."""

    def __init__(self, k: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((512, 512), k), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[1:3]


def sources(tmp_path: Path, module: nn.Module, way: str) -> list[Any]:
    states = [weights_of(module, k) for k in range(SWAPS)]
    if way == "mapping":
        return list(states)
    paths = [tmp_path / f"{k}.safetensors" for k in range(SWAPS)]
    for path, state in zip(paths, states, strict=True):
        ms.save(state, path)
    return list(paths)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all memory that has been mapped, other than files."""
    sizes, make = [], mmap.mmap

    def counted(descriptor: int, nbytes: int, **options: int) -> mmap.mmap:
        if descriptor < 0:
            sizes.append(nbytes)
        return make(descriptor, nbytes, **options)

    monkeypatch.setattr("modelstate.io.memory.mmap.mmap", counted)
    return sizes


def addresses(live: ms.Live) -> set[int]:
    with live.pin() as version:
        module = version._entry().program.weights_module  # type: ignore[union-attr]
        return {parameter.data_ptr() for parameter in module.parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "mapping"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_version_lies_where_the_version_before_last_lay(
    kind: str, way: str, tmp_path: Path, mapped: list[int]
) -> None:
    module = Constant()
    live = ms.Live(target_of(kind, module, X), keep_versions=0)
    every, lies = sources(tmp_path, module, way), []
    mapped.clear()
    for k, source in enumerate(every):
        live.swap(source)
        assert live(X).unique().tolist() == [float(k)]
        lies.append(addresses(live))
        gc.collect()  # what the compiler of torch keeps in cycles after a compilation
    assert lies[2:] == lies[:-2]
    assert lies[0].isdisjoint(lies[1])
    assert sum(nbytes for nbytes in mapped if nbytes <= NBYTES) == 2 * NBYTES


def test_with_kept_versions_it_is_the_memory_of_those_that_are_dropped(tmp_path: Path) -> None:
    module = Constant()
    live = ms.Live(module.eval(), keep_versions=2)
    lies = []
    for source in sources(tmp_path, module, "file"):
        live.swap(source)
        lies.append(addresses(live))
    assert lies[4:] == lies[:-4]
    assert not set.intersection(*lies[:4])
    live.rollback()
    assert live(X).unique().tolist() == [SWAPS - 2.0]
    live.rollback()
    assert live(X).unique().tolist() == [SWAPS - 3.0]


@pytest.mark.parametrize("mode", ["available", "in_place"])
def test_an_answer_that_is_a_view_of_a_weight_never_changes(mode: Any) -> None:
    live = ms.Live(Lender().eval(), keep_versions=0)
    answers = []
    for k in range(2, 2 + SWAPS):
        answers.append((k - 1, live(X)))
        live.swap({"weight": torch.full((512, 512), float(k))}, mode=mode if k % 3 else "available")
    assert [answer.unique().tolist() for _, answer in answers] == [[float(k)] for k, _ in answers]


def test_a_version_that_is_pinned_never_changes(tmp_path: Path) -> None:
    module = Constant()
    live = ms.Live(module.eval(), keep_versions=0)
    every = sources(tmp_path, module, "file")
    live.swap(every[3])
    with live.pin() as version:
        for source in every[4:]:
            live.swap(source)
            assert version(X).unique().tolist() == [3.0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_request_is_torn_by_swaps_into_used_memory(kind: str, tmp_path: Path) -> None:
    module = Constant()
    live = ms.Live(target_of(kind, module, X), keep_versions=0)
    every = sources(tmp_path, module, "file")
    live.swap(every[0])
    lies = []

    def request() -> tuple[int, torch.Tensor]:
        return -1, live(X)

    readers = Readers(request)
    with readers.running():
        for at in range(30):
            live.swap(every[at % SWAPS])
            lies.append(frozenset(addresses(live)))
            if at % 10 == 0:
                readers.wait_for_one_each()
    assert not readers.errors
    assert readers.torn == 0
    assert readers.requests > 20
    assert len(set(lies)) < len(lies)


def test_what_a_refused_version_took_is_free_again(tmp_path: Path) -> None:
    module = Constant()
    live = ms.Live(module.eval(), keep_versions=0)
    every = sources(tmp_path, module, "file")
    for source in every[:2]:
        live.swap(source)
    tried = []

    def refuses(version: Any) -> bool:
        tried.append({parameter.data_ptr() for parameter in version.weights_module.parameters()})
        return False

    for source in every[2:6]:
        with pytest.raises(CanaryError):
            live.swap(source, canary=refuses)
        assert live(X).unique().tolist() == [1.0]
    assert len(set(map(frozenset, tried))) == 1


@pytest.mark.parametrize(("spare_bytes", "share", "new"), [(0, 0, SWAPS), (NBYTES // 2, 0.5, SWAPS), (None, 1, 2)])
def test_no_more_is_kept_than_was_asked_for(
    spare_bytes: int | None, share: float, new: int, tmp_path: Path, mapped: list[int]
) -> None:
    live = ms.Live(Constant().eval(), keep_versions=0, spare_bytes=spare_bytes)
    for source in sources(tmp_path, Constant(), "file"):
        live.swap(source)
        assert live._pool.kept_bytes <= share * NBYTES
    assert mapped.count(NBYTES) == new


@pytest.mark.slow
def test_swaps_of_two_programs_do_not_share_memory(tmp_path: Path) -> None:
    module = Constant()
    every = sources(tmp_path, module, "file")
    lives = [ms.Live(Constant().eval(), keep_versions=0) for _ in range(2)]
    errors: list[BaseException] = []

    def work(live: ms.Live) -> None:
        try:
            for _ in range(3):
                for k, source in enumerate(every):
                    live.swap(source)
                    assert live(X).unique().tolist() == [float(k)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(live,)) for live in lives]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert addresses(lives[0]).isdisjoint(addresses(lives[1]))


@pytest.mark.parametrize("spare_bytes", [-1, 0.5, True, "1 GB"])
def test_what_is_no_size(spare_bytes: Any) -> None:
    with pytest.raises(OptionError):
        ms.Live(Constant(2, 8).eval(), spare_bytes=spare_bytes)
