"""Threads, forks, signals and standard streams of a process."""

import io
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import modelstate as ms
from modelstate.process import deferred_signals


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that a handler of SIGTERM and SIGUSR1 has received."""
    numbers: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    for number in before:
        signal.signal(number, lambda number, _: numbers.append(number))
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_that_raises_loses_no_other_signal(received: list[int]) -> None:
    def interrupted() -> None:
        with deferred_signals():
            for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
                signal.raise_signal(number)
            assert received == []

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert received == [signal.SIGUSR1, signal.SIGTERM]


def test_a_signal_while_the_handlers_come_back(received: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    install = signal.signal

    def interrupted_install(number: int, handler: object) -> object:
        before = install(number, handler)  # type: ignore[arg-type]
        if number == signal.SIGINT:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        return before

    def interrupted() -> None:
        with deferred_signals():
            signal.raise_signal(signal.SIGTERM)
            monkeypatch.setattr(signal, "signal", interrupted_install)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Log:
    """What programs replace standard streams by."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["none", "closed", "log"])
def test_a_program_without_standard_streams_saves_and_loads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, {"none": None, "closed": closed, "log": _Log()}[kind])
    model = nn.Linear(2, 2)
    ms.save(model, tmp_path / "model.safetensors")
    ms.load(model, tmp_path / "model.safetensors")
    assert ms.diff(model, tmp_path / "model.safetensors").is_equal
    with ms.Store(tmp_path / "run") as store:
        store.save(1, {"model": model})
        assert store.restore({"model": model}).step == 1
