"""What HTTP adds to a live program, with a program that waits until it is told to go on."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvicorn
from hypothesis import example, given, settings, strategies as st

import modelstate as ms
from examples.serve.app import Service
from examples.serve.client import Client, RefusedError
from examples.serve.connections import config
from examples.serve.metrics import Metrics
from examples.serve.refusals import NoSuchPathError, OutsideError
from examples.serve.swaps import Swaps
from examples.serve.texts import Limits
from tests.faults import faulty_reads


class Slow:
    """A live program of which every call is held up until `go` is set."""

    def version(self) -> SimpleNamespace:
        return SimpleNamespace(id=1, source="the first weights", time=0.0)

    def __init__(self) -> None:
        self.go = threading.Event()
        self.entered = threading.Semaphore(0)
        self.error: Exception | None = None

    def answer(self, *_: Any) -> tuple[torch.Tensor, int]:
        self._wait()
        return torch.ones(1, 2), 1

    def swap(self, checkpoint: ms.Checkpoint, **_: Any) -> Any:
        self._wait()
        return SimpleNamespace(version=2, previous=1, source=checkpoint.source, seconds=0.5)

    def rollback(self) -> int:
        self._wait()
        return 1

    def _wait(self) -> None:
        self.entered.release()
        assert self.go.wait(60)
        if self.error:
            raise self.error


class InThread:
    """A server in this process."""

    def __init__(self, slow: Slow, folder: Path, limits: Limits, token: bytes = b"token") -> None:
        live: Any = slow
        texts: Any = SimpleNamespace(encode=lambda texts: (texts, texts))
        swaps, metrics = Swaps(live, folder, "the first weights"), Metrics(lambda: slow.version().id)
        service = Service(live, texts, swaps, metrics, limits, token, workers=1)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.server = uvicorn.Server(config(service, log_config=None))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def served(slow: Slow, tmp_path: Path) -> Iterator[InThread]:
    ms.save({"w": torch.ones(2)}, tmp_path / "weights.safetensors")
    made = InThread(slow, tmp_path, Limits(waiting=1, connections=20, client_seconds=1))
    yield made
    slow.go.set()
    made.end()


class Later:
    """A request that another thread sends: its answer, or the status of its refusal."""

    def __init__(self, port: int, ask: Callable[[Client], Any]) -> None:
        self.found: Any = None
        self._thread = threading.Thread(target=self._send, args=(Client(port, "token"), ask))
        self._thread.start()

    def _send(self, client: Client, ask: Callable[[Client], Any]) -> None:
        try:
            self.found = ask(client)
        except RefusedError as error:
            self.found = error.status
        client.close()

    def result(self) -> Any:
        self._thread.join(60)
        return self.found


@pytest.mark.slow
def test_a_swap_during_a_swap_is_refused_and_requests_go_on(slow: Slow, served: InThread) -> None:
    first = Later(served.port, lambda client: client.swap("weights.safetensors"))
    assert slow.entered.acquire(timeout=60)
    client = Client(served.port, "token")
    for ask in (lambda: client.swap("weights.safetensors"), client.rollback):
        with pytest.raises(RefusedError, match="another swap is running") as found:
            ask()
        assert (found.value.status, found.value.error) == (409, "SwapBusyError")
    assert client.version() == {"version": 1, "source": "the first weights", "time": 0.0}
    assert 'modelstate_swaps_total{result="SwapBusyError"} 2.0' in client.metrics()
    slow.go.set()
    assert first.result()["version"] == 2
    assert client.embed(["a"]) == ([[1.0, 1.0]], 1)
    assert client.rollback() == 1
    assert 'modelstate_swaps_total{result="rolled_back"} 1.0' in client.metrics()
    client.close()


@pytest.mark.slow
def test_requests_beyond_those_that_may_wait_are_refused(slow: Slow, served: InThread) -> None:
    several = [Later(served.port, lambda client: client.embed(["a"])[1]) for _ in range(6)]
    client = Client(served.port)
    until = time.monotonic() + 60
    while [one.found for one in several].count(503) < 4:
        assert time.monotonic() < until
        assert client.version()["version"] == 1  # one is computed, one waits, and other routes have no turn to wait for
    slow.go.set()
    assert sorted(one.result() for one in several) == [1, 1, 503, 503, 503, 503]
    client.close()


@pytest.mark.slow
def test_requests_that_are_under_way_are_answered_before_the_end(slow: Slow, served: InThread) -> None:
    request = Later(served.port, lambda client: client.embed(["a"]))
    swap = Later(served.port, lambda client: client.swap("weights.safetensors")["version"])
    for _ in range(2):
        assert slow.entered.acquire(timeout=60)
    served.server.should_exit = True
    threading.Timer(0.5, slow.go.set).start()
    served.end()
    assert request.result() == ([[1.0, 1.0]], 1)
    assert swap.result() == 2


@pytest.mark.slow
def test_a_server_without_a_token_changes_no_weights(slow: Slow, tmp_path: Path) -> None:
    ms.save({"w": torch.ones(2)}, tmp_path / "weights.safetensors")
    slow.go.set()
    served = InThread(slow, tmp_path, Limits(), token=b"")
    try:
        for token in ("", "token"):
            client = Client(served.port, token)
            for change in (client.rollback, lambda client=client: client.swap("weights.safetensors")):
                with pytest.raises(RefusedError, match="started without a token") as found:
                    change()
                assert found.value.status == 401
            client.close()
    finally:
        served.end()
    assert not slow.entered.acquire(blocking=False)


@pytest.mark.slow
def test_what_nobody_has_thought_of_is_an_error_without_particulars(slow: Slow, served: InThread) -> None:
    slow.error = ZeroDivisionError("a secret")
    slow.go.set()
    client = Client(served.port, "token")
    for ask in (lambda: client.embed(["a"]), lambda: client.swap("weights.safetensors")):
        with pytest.raises(RefusedError) as found:
            ask()
        assert (found.value.status, found.value.error) == (500, "ZeroDivisionError")
        assert "secret" not in found.value.detail
    slow.error = None
    assert client.embed(["a"])[1] == 1
    client.close()


SECRET = "root:x:0:0:root:/root:/bin/bash"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "x.safetensors", "model.safetensors.index.json", ".metadata"])
@pytest.mark.parametrize("place", ["a link out", "a file"])
def test_no_answer_quotes_a_file(
    name: str, place: str, slow: Slow, served: InThread, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "sub").mkdir()
    secret = (tmp_path_factory.mktemp("etc") if place == "a link out" else tmp_path / "sub") / name
    secret.write_text(SECRET * 10)
    if place == "a link out":
        (tmp_path / "sub" / name).symlink_to(secret)
    opened: list[str] = []
    client = Client(served.port, "token")
    with faulty_reads(before=lambda request: opened.append(request.path)):
        for source in ("sub", f"sub/{name}"):
            with pytest.raises(RefusedError) as found:
                client.swap(source)
            assert "root:" not in found.value.detail
            assert found.value.error in (("OutsideError",) if place == "a link out" else OPEN_ERRORS)
    assert (str(secret) in map(os.path.realpath, opened)) == (place == "a file")
    client.close()


OPEN_ERRORS = [kind.__name__ for kind in vars(ms.errors).values() if isinstance(kind, type)]


@pytest.mark.slow
def test_slow_clients_do_not_keep_others_out(slow: Slow, served: InThread) -> None:
    slow.go.set()
    beginnings = (b"", b"P", b"POST /embed HTTP/1.1\r\nHost: a\r\nX-A: b", SLOW_BODY)
    several = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(60)]
    for number, one in enumerate(several):
        with suppress(OSError):
            one.sendall(beginnings[number % len(beginnings)])
    client = Client(served.port, "token")
    assert client.embed(["a"])[1] == 1
    until = time.monotonic() + 60
    while len(served.server.server_state.connections) > 20:
        assert time.monotonic() < until
    for one in several:  # each is closed by the server, at the latest when its time is over
        one.settimeout(60)
        with suppress(ConnectionError):
            while one.recv(1000):
                pass
        one.close()
    client.close()
    assert Client(served.port).version()["version"] == 1


SLOW_BODY = b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"


@pytest.mark.slow
def test_a_connection_beyond_the_limit_gets_an_answer(slow: Slow, tmp_path: Path) -> None:
    """If all connections have sent a request, there is none that the server could close for a new one."""
    served = InThread(slow, tmp_path, Limits(waiting=2, connections=2))
    several = [Later(served.port, lambda client: client.embed(["a"])[1])]
    assert slow.entered.acquire(timeout=60)
    several.append(Later(served.port, lambda client: client.rollback()))
    assert slow.entered.acquire(timeout=60)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        answer = b"".join(iter(lambda: connection.recv(1000), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body) == {"error": "OverloadedError", "detail": "too many connections are open"}
    slow.go.set()
    assert [later.result() for later in several] == [1, 1]
    served.end()


def test_versions_that_are_long_gone_have_no_line() -> None:
    metrics = Metrics(lambda: 350)
    for version in range(1, 351):
        metrics.answered(version)
        metrics.forget_before(version)
    lines = [line for line in metrics.page().decode().splitlines() if line.startswith("modelstate_requests_total")]
    assert len(lines) == 101
    assert lines[0] == 'modelstate_requests_total{version="250"} 1.0'
    assert "modelstate_version 350.0" in metrics.page().decode()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links of every kind, and a checkpoint at every place."""
    top: Path = tmp_path_factory.mktemp("tree")
    for place in ("in", "in/a", "in/a/b", "out", "inside"):
        (top / place).mkdir(exist_ok=True)
        ms.save({"w": torch.ones(2)}, top / place / "w")
    links = {"up": "..", "far": "../../out", "near": "b", "far_w": "../../out/w", "loop": "loop", "gone": "../../gone"}
    for name, target in links.items():
        (top / "in" / "a" / name).symlink_to(target)
    (top / "in" / "top").symlink_to(top)
    (top / "in" / "a" / "b" / "model.safetensors").symlink_to(top / "out" / "w")
    return top


PARTS = ("", ".", "..", "a", "b", "w", "up", "far", "near", "far_w", "loop", "gone", "top", "in", "out", "inside")


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=8), absolute=st.booleans())
@example(parts=["a", "b"], absolute=False)
@example(parts=["a", "near"], absolute=False)
@example(parts=["top", "in", "w"], absolute=False)
@example(parts=["in", "a", "up", "w"], absolute=True)
def test_no_path_leads_out(parts: list[str], absolute: bool, tree: Path) -> None:
    taken: list[str] = []

    def swap(checkpoint: ms.Checkpoint, **_: object) -> SimpleNamespace:
        taken.extend(checkpoint.files)
        return SimpleNamespace(version=2)

    live: Any = SimpleNamespace(swap=swap)
    source = os.path.join(*([str(tree)] if absolute else []), *parts) or "."
    root = (tree / "in").resolve()
    meant = Path(os.path.realpath(root / source))
    inside, there = meant.is_relative_to(root), meant.exists()
    try:
        Swaps(live, tree / "in", "").swap(source)
    except OutsideError:
        assert not inside or meant in (root / "a", root / "a" / "b")  # which have links out in them
    except NoSuchPathError:
        assert inside
        assert not there
    except ms.ModelStateError:
        assert inside
        assert meant.is_dir()  # without a checkpoint, or with several
    else:
        assert inside
        assert taken
        assert all(Path(os.path.realpath(file)).is_relative_to(root) for file in taken)
