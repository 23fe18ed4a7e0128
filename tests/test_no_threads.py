"""Processes for which the system starts few threads, or none: `ulimit -u`, or a limit of the container."""

import _thread
import itertools
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import BackgroundCancelledError
from modelstate.process import parallel_for


@pytest.fixture
def limit_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def limit(most: int) -> None:
        start, numbers = threading.Thread.start, itertools.count()

        def limited(start: Callable[..., object], *arguments: object) -> object:
            if next(numbers) >= most:
                raise RuntimeError("can't start new thread")
            return start(*arguments)

        monkeypatch.setattr(threading.Thread, "start", lambda thread: limited(start, thread))
        monkeypatch.setattr(_thread, "start_new_thread", partial(limited, _thread.start_new_thread))

    return limit


def model(value: float) -> nn.Module:
    module = nn.Linear(600, 600)
    nn.init.constant_(module.weight, value)
    return module


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize(("with_torch", "takes_part"), [(False, False), (True, False), (False, True)])
def test_the_threads_that_can_be_started_do_all_the_work(
    most: int, with_torch: bool, takes_part: bool, limit_threads: Callable[[int], None]
) -> None:
    limit_threads(most)
    items, threads, torch_threads = iter(range(200)), set[int](), set[int]()
    all_there = threading.Barrier(max(most + takes_part, 1))

    def work(_: threading.Event) -> None:
        all_there.wait(60)
        threads.add(threading.get_ident())
        torch_threads.add(torch.get_num_threads())
        deque(items, 0)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        parallel_for(work, 3, with_torch=with_torch, takes_part=takes_part)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert list(items) == []
    assert len(threads) == all_there.parties
    assert (threading.get_ident() in threads) == (takes_part or not most)
    assert torch_threads == {1 if with_torch else 3}  # OpenMP ends a process for which no thread can be started


def test_an_error_of_a_signal_handler_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise RuntimeError("preempted")

    monkeypatch.setattr(_thread, "start_new_thread", interrupted)
    with pytest.raises(RuntimeError, match="preempted"):
        parallel_for(lambda _: None, 2)


def test_models_and_checkpoints_are_saved_and_loaded(tmp_path: Path, limit_threads: Callable[[int], None]) -> None:
    limit_threads(0)
    saved, path, store = model(5.0), tmp_path / "model.safetensors", ms.Store(tmp_path / "store")
    ms.save(saved, path)
    loaded = model(0.0)
    ms.load(loaded, path)
    assert torch.equal(loaded.weight, saved.weight)
    loaded = model(0.0)
    handle = ms.load(loaded, path, background=True)
    assert handle.done
    handle.result()
    assert torch.equal(loaded.weight, saved.weight)
    for _ in ms.resumable(store, {"model": saved}, steps=4, save_every=1):
        pass
    restored = model(0.0)
    store.restore({"model": restored})
    assert torch.equal(restored.weight, saved.weight)
    ms.convert_checkpoint(path, tmp_path / "model.pt", progress=True)
    ms.load(loaded, tmp_path / "model.pt")


def test_following_says_what_to_do(tmp_path: Path, limit_threads: Callable[[int], None]) -> None:
    limit_threads(0)
    live = ms.Live(model(0.0))
    with pytest.raises(BackgroundCancelledError, match=r"no thread can be started(?s:.*)background=False"):
        ms.follow(live, tmp_path)
    with ms.follow(live, tmp_path, background=False) as following:
        assert not following.is_running
        following.poll()
