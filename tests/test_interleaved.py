"""State that the threads of a process share: other code runs in the middle of what one thread does to it.

The tests run a function before each instruction of another one in turn, or in each garbage collection within it. That
is what another thread, a signal or a finalizer can do, and does not depend on chance.
"""

import atexit
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import modelstate as ms
from modelstate import background, process, text_format
from modelstate.checkpoint.mapped import Maps
from modelstate.codec import codec
from modelstate.codec.codec import decode, encode
from modelstate.codec.walk import Kinds
from modelstate.conversion.reference_keeping import reference_keeping
from modelstate.errors import CodecError
from modelstate.io import system
from modelstate.io.memory import MemoryPool
from modelstate.objects import loaders
from modelstate.process import cached_attribute
from modelstate.serve.versions import ConcurrentWeakSet
from modelstate.spec import ByteRange
from modelstate.store.directory import StepIndex
from tests.io.test_forks import in_child
from tests.sweeps import at_instruction

SOON = 60.0


def before_each_instruction(
    functions: list[Any], call: Callable[[], object], between: Callable[[], object], *, as_signal: bool = False
) -> None:
    """Repeats `call`; in the n-th round, `between` runs once, before the n-th instruction of the functions.

    Args:
        functions: The functions, with the comprehensions and lambdas in them.
        call: Calls them.
        between: May raise, and must not wait for a lock that the functions hold.
        as_signal: Only where Python calls the handlers of signals: after calls, and where functions and loops begin.
    """
    codes: set[CodeType] = set()
    for function in functions:
        code: CodeType = getattr(function, "__wrapped__", function).__code__
        codes |= {code, *(const for const in code.co_consts if isinstance(const, CodeType))}

    def round_of(at: int) -> bool:
        """Whether there is an instruction of this number."""
        with at_instruction(at, codes.__contains__, between, as_signal=as_signal) as found:
            call()
        return found.count >= at

    round_of(0)  # from Python 3.12 on, the first function of a process that is traced so has no such events
    assert sum(1 for _ in takewhile(round_of, itertools.count(1))) > 3


def in_each_collection(call: Callable[[], object], between: Callable[[], object]) -> None:
    """Repeats `call`; in the n-th round, `between` runs in the garbage collection that the n-th allocation starts.

    From Python 3.12 on, the collection comes after the call of a function of C.
    """
    thresholds = gc.get_threshold()

    def on_collection(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            between()

    for allocations in range(1, 16):
        gc.collect()
        gc.callbacks.append(on_collection)
        gc.set_threshold(allocations)
        try:
            call()
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(on_collection)


def interrupt() -> None:
    raise KeyboardInterrupt


# Reference keeping: `Module.to` asks `holds` in any thread, without a lock.


@pytest.fixture
def within_two_switches() -> Iterator[None]:
    stock = nn.Module._apply
    with reference_keeping(False), reference_keeping():
        yield
        assert reference_keeping._is_on()
    assert nn.Module._apply is stock


def test_a_block_is_left_while_another_thread_converts() -> None:
    entered: list[reference_keeping] = []

    def leave() -> None:
        while entered:
            entered.pop().__exit__(None, None, None)

    def call() -> None:
        entered.append(reference_keeping())
        reference_keeping._is_on()
        leave()

    before_each_instruction([reference_keeping._is_on], call, leave)


def test_the_switch_around_a_block_counts_while_it_is_left(within_two_switches: None) -> None:
    seen: list[bool] = []

    def call() -> None:
        with reference_keeping():
            pass

    before_each_instruction([reference_keeping.__exit__], call, lambda: seen.append(reference_keeping._is_on()))
    assert all(seen)


# Registered codecs: a cell of a notebook runs again during a background save.


class Meter:
    def __init__(self, total: int) -> None:
        self.total = total


@pytest.fixture
def no_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_BY_CLASS", {})
    monkeypatch.setattr(codec, "_BY_NAME", {})


def register(cls: type[Any] = Meter) -> None:
    ms.register_codec(cls, lambda meter: meter.total, cls, name="meter")


def test_an_object_is_encoded_while_its_class_is_registered_again(no_codecs: None) -> None:
    register()
    totals: list[int] = []
    before_each_instruction([codec.register_codec], register, lambda: totals.append(decode(encode(Meter(3))).total))
    assert set(totals) == {3}


def test_an_object_whose_class_is_replaced_while_it_is_encoded_is_an_error(no_codecs: None) -> None:
    again = type("Meter", (Meter,), {"__module__": __name__})

    def call() -> None:
        register()
        with suppress(CodecError):
            assert encode([Meter(3)]) == [{"$object": {"codec": "meter", "value": 3}}]

    before_each_instruction([codec._encode, Kinds.of, codec._RULES[0][0]], call, lambda: register(again))


# Snapshots of tables: up to Python 3.11, an allocation may run the garbage collector, and with it other code.


def test_a_path_is_noted_while_an_error_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_format, "given_directories", text_format.given_directories.copy())
    for number in range(20):
        text_format.note_given(f"/a/{number}/model.pt", f"{number}/model.pt")
    counted = iter(range(10**6))

    def note() -> None:
        number = next(counted)
        text_format.note_given(f"/b/{number}/model.pt", f"{number}/model.pt")

    in_each_collection(lambda: text_format.as_given("/c/model.pt"), note)


def test_memory_is_given_back_while_the_pool_is_measured() -> None:
    pool = MemoryPool()
    pool._kept.extend([b""] * 60)  # type: ignore[list-item]
    in_each_collection(lambda: pool.kept_bytes, lambda: pool._kept.append(b""))  # type: ignore[arg-type]


def test_an_object_is_collected_while_a_weak_set_is_iterated() -> None:
    class Item:
        pass

    items, group = [Item() for _ in range(60)], ConcurrentWeakSet[Item]()
    for item in items:
        group.add(item)
    in_each_collection(lambda: list(group), lambda: items and items.pop())


# What an interrupt leaves.


def test_an_interrupt_in_the_first_task_does_not_keep_later_ones_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(background, "_is_watching_exit", False)
    monkeypatch.setattr(threading, "_register_atexit", registered.append)
    monkeypatch.setattr(atexit, "register", lambda *_: interrupt())
    with pytest.raises(KeyboardInterrupt):
        background._watch_exit()
    monkeypatch.setattr(atexit, "register", lambda *given: registered.append(given))
    background._watch_exit()
    background._watch_exit()
    assert registered == [(background._cancel, background.AtExit.CANCEL_LAST), background._end_of_main_thread]


# Objects that several threads use.


def test_a_deadline_is_left_by_two_threads_at_once() -> None:
    deadline = ms.Deadline(hours=1, signals=())

    def leave() -> None:
        deadline.__exit__(None, None, None)

    def call() -> None:
        deadline.__enter__()
        leave()

    before_each_instruction([ms.Deadline.__exit__, ms.Deadline._restore_handlers], call, leave)


def test_a_loop_ends_while_another_one_checks_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = DataLoader(range(4), num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    loader.next_iter_state = None  # as of a StatefulDataLoader

    def call() -> None:
        monkeypatch.setattr(loaders, "_saved_objects", [[object()], [loader]])
        assert loaders._resume_problem(loader) == ""

    def end() -> None:
        loaders._saved_objects[:] = loaders._saved_objects[1:]

    before_each_instruction([loaders._resume_problem], call, end)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A file in which `a` and `b` are the same bytes."""
    tensor, path = torch.arange(8.0), tmp_path / "model.pt"
    torch.save({"a": tensor, "b": tensor}, path)
    return path


def test_a_file_that_two_threads_map_is_mapped_once(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[object] = []
    maps, original = Maps({}), system.mmap

    def mmap(*args: Any) -> Any:
        monkeypatch.setattr(system, "mmap", original)
        others.append(maps._map(ByteRange(str(tied), 0, 8)))
        return original(*args)

    monkeypatch.setattr(system, "mmap", mmap)
    assert maps._map(ByteRange(str(tied), 0, 8)) is others[0]


def test_tied_tensors_that_two_threads_read_share_memory(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[torch.Tensor] = []
    checkpoint, original = ms.open(tied), Maps.read

    def read(*args: Any) -> torch.Tensor:
        tensor = original(*args)
        monkeypatch.setattr(Maps, "read", original)
        others.append(checkpoint.tensor("b", map=False))
        return tensor

    monkeypatch.setattr(Maps, "read", read)
    checkpoint.tensor("a", map=False).zero_()
    assert not others[0].any()


def test_threads_that_compute_an_attribute_at_once_get_one_object() -> None:
    class Owner:
        @cached_attribute
        def value(self) -> object:
            if not inner:
                inner.append(None)
                inner[0] = self.value
            return object()

    inner: list[object] = []
    owner = Owner()
    assert owner.value is owner.value is inner[0]


# Forks.


class _Lock:
    """A lock that calls a function after it was released."""

    def __init__(self, after_release: Callable[[], object] = lambda: None) -> None:
        self._lock, self._after_release = threading.Lock(), after_release
        self.acquire, self.locked = self._lock.acquire, self._lock.locked

    def release(self) -> None:
        self._lock.release()
        self._after_release()


def test_two_threads_fork_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second fork begins when the first lock is free, and the first one must not release its locks."""
    has_begun, may_end = threading.Event(), threading.Event()
    locks = [_Lock(lambda: has_begun.wait(SOON)), _Lock()]
    monkeypatch.setattr(process, "_fork_safe", [(lock, None) for lock in locks])
    held: list[bool] = []

    def fork() -> None:
        process._before_fork()
        has_begun.set()
        may_end.wait(SOON)
        held.extend(lock.locked() for lock in locks)
        process._after_fork_in_parent()

    process._before_fork()
    thread = threading.Thread(target=fork)
    thread.start()
    process._after_fork_in_parent()
    may_end.set()
    thread.join()
    assert held == [True, True]
    assert not any(lock.locked() for lock in locks)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_process_is_forked_while_a_thread_reads_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_reading, may_end = threading.Event(), threading.Event()
    store, name = ms.Store(tmp_path), StepIndex._name
    store.save(1, {"model": nn.Linear(2, 2)})

    def slow_name(*args: Any) -> str:
        is_reading.set()
        may_end.wait(SOON)
        return name(*args)

    monkeypatch.setattr(StepIndex, "_name", slow_name)
    thread = threading.Thread(target=store.infos)
    thread.start()
    is_reading.wait(SOON)
    monkeypatch.setattr(StepIndex, "_name", name)
    try:
        assert in_child(lambda: [info.step for info in store.infos()] == [1], seconds=10) == "True"
    finally:
        may_end.set()
        thread.join()
