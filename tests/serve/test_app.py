"""`ServingApp`: what is asked of an app, and what is made of each of its answers."""

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate.errors import (
    AppError,
    OptionError,
    SkippedCheckpointError,
    SwapBusyError,
)
from modelstate.serve.app import ServingApp, _closed_after
from tests.serve.models import linear
from tests.serve.serving import TOKEN, Answer, App, serving
from tests.serve.stores import X, damage, save


def raises(kind: type[Exception] | str, match: str | None = None) -> "pytest.RaisesExc[Exception]":
    """As `pytest.raises`; a text is the `reason` of an `AppError`."""
    if isinstance(kind, str):
        return pytest.raises(AppError, match=match, check=lambda error: error.reason == kind)
    return pytest.raises(kind, match=match)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    with serving(tmp_path) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> str:
    ms.save(linear(2), tmp_path / "two.safetensors")
    return str(tmp_path / "two.safetensors")


def test_a_swap(app: App, path: str) -> None:
    done = ServingApp(app.url, TOKEN).swap(path)
    assert (done.version, done.previous, done.source) == (2, 1, path)
    assert done.seconds > 0
    assert float(app.live(X).detach()[0, 0]) == 10
    (asked, asked_path, headers, _), (method, swap_path, swap_headers, body) = app.asked
    assert (asked, asked_path) == ("GET", "/version")
    assert (method, swap_path, body) == ("POST", "/swap", {"source": path})
    assert swap_headers["Authorization"] == f"Bearer {TOKEN}"
    assert swap_headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers


def test_what_serves_already_is_not_posted_again(app: App, path: str) -> None:
    target = ServingApp(app.url + "/", TOKEN)
    target.swap(Path(path))
    assert target.version() == (2, path)
    assert target.swap(path) == (2, 2, path, 0.0)
    os.symlink(os.path.dirname(path), f"{path}.link")
    assert target.swap(f"{path}.link/two.safetensors").previous == 2
    assert app.swaps == [path]
    app.source = "\0"
    assert target.swap(path).version == 3


def test_another_checkpoint_at_the_path_is_posted(app: App, tmp_path: Path) -> None:
    """As of a run that begins again in the same directory."""
    target, directory = ServingApp(app.url, TOKEN), tmp_path / "run"
    with ms.Store(directory) as store:
        save(store, 1)
        following = ms.follow(target, store, background=False)
        assert [event.version for event in following.poll()] == [2]
        before = app.live(X).detach()
    shutil.rmtree(directory)
    with ms.Store(directory) as store:
        store.save(1, {"model": linear(9)})
        assert [event.version for event in following.poll()] == [3]
    assert not torch.equal(app.live(X), before)
    assert len(app.swaps) == 2
    assert len(set(app.swaps)) == 1
    assert target.swap(app.swaps[0]).previous == 3


def test_a_new_client_posts_another_checkpoint_at_the_path(app: App, tmp_path: Path) -> None:
    """It has not swapped before, so only the time of the version shows that another file came to the path."""
    app.has_time, directory = True, tmp_path / "run"
    for version in (2, 3):
        with ms.Store(directory) as store:
            store.save(1, {"model": linear(version)})
            for _ in range(2):
                following = ms.follow(ServingApp(app.url, TOKEN), store, background=False)
                assert [event.version for event in following.poll()] == [version]
        assert torch.equal(app.live(X), linear(version)(X))
        shutil.rmtree(directory)
    assert len(app.swaps) == 2
    assert len(set(app.swaps)) == 1


def test_a_path_before_swap(app: App) -> None:
    with raises("unreachable", match="no serving app answers at this URL"):
        ServingApp(app.url + "/models/small/", TOKEN).swap("x")
    assert app.asked[0][1] == "/models/small/version"


REFUSED: list[tuple[Answer, type[Exception], str]] = [
    ((401, {"error": "Unauthorized", "detail": "no"}), "access", "refuses the token"),
    ((403, {"error": "Forbidden", "detail": "no"}), "access", "refuses checkpoints outside"),
    ((404, {"error": "SourceNotFoundError", "detail": "no"}), "unreachable", "does not find the checkpoint"),
    ((409, {"error": "SwapBusyError", "detail": "busy"}), SwapBusyError, "another swap of the app"),
    ((422, {"error": "WeightsError", "detail": "NaN"}), "refused", "422 WeightsError: NaN"),
    ((400, {"detail": ["a", "list"]}), "refused", "found: 400\n"),
    ((413, b"<html>"), "refused", "found: 413\n"),
    ((422, {"error": "\x1b[31mX", "detail": "a\nb" * 1000}), "refused", r"422 \\x1b\[31mX: a; ba; "),
    ((500, b"Internal Server Error"), "no answer", "is not valid"),
    ((502, b"\xff\xfe"), "no answer", "is not valid"),
    ((302, b""), "no answer", "found: 302\n"),
    ((200, b""), "no answer", "is not valid"),
    ((200, b"[" * 60_000), "no answer", "is not valid"),
    ((200, [1, 2]), "no answer", "is not valid"),
    ((200, {"version": 3}), "no answer", "is not valid"),
    ((200, {"version": "3", "previous": 2, "source": "x", "seconds": 1}), "no answer", "is not valid"),
    ((200, {"version": 3, "previous": 2, "source": "x", "seconds": "long"}), "no answer", "is not valid"),
    ((200, {"version": True, "previous": False, "source": "x", "seconds": 1}), "no answer", "is not valid"),
    ((429, {"error": "TooManyRequests", "detail": "later"}), "no answer", "429 TooManyRequests: later"),
    ((200, b"{" + b" " * 1_000_000), "no answer", "is not valid"),
    ((200, None), "no answer", "no answer to a swap"),
]


@pytest.mark.parametrize(("answer", "kind", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_each_answer_that_is_no_swap(
    app: App, path: str, answer: Answer, kind: type[Exception] | str, says: str
) -> None:
    app.answers.append(answer)
    with raises(kind, match=says) as caught:
        ServingApp(app.url, TOKEN).swap(path)
    assert TOKEN not in str(caught.value)
    assert len(app.swaps) == 1
    assert app.live.version == 1
    assert not [asked for asked in app.asked if asked[1] == "/elsewhere"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((401, {}), "access"),
        ((403, b""), "access"),
        ((500, {}), "unreachable"),
        ((302, {}), "unreachable"),
        ((200, {"version": "1", "source": "x"}), "unreachable"),
        ((200, {"version": 1}), "unreachable"),
        ((200, b"<html>"), "unreachable"),
        ((200, None), "unreachable"),
    ],
    ids=str,
)
def test_each_answer_that_is_no_version(app: App, answer: Answer, kind: str) -> None:
    app.version_answers.append(answer)
    with raises(kind):
        ServingApp(app.url, TOKEN).swap("x")
    assert app.swaps == []


def test_nobody_listens(path: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with raises("unreachable", match="does not answer"):
            ServingApp(f"http://127.0.0.1:{taken.getsockname()[1]}", TOKEN).swap(path)


def test_an_app_that_never_answers(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelstate.serve.app._SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with raises("unreachable", match="TimeoutError"):
            ServingApp(url, TOKEN).swap(path)


@pytest.mark.slow
@pytest.mark.parametrize(("request_of", "reason"), [(b"GET", "unreachable"), (b"POST", "no answer")])
def test_an_app_that_answers_byte_by_byte(
    path: str, request_of: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, and the answer never ends."""
    monkeypatch.setattr("modelstate.serve.app._SECONDS", 0.5)

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            if connection.recv(65_536).startswith(request_of):
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.05)
            connection.sendall(b'HTTP/1.1 200 OK\r\n\r\n{"version": 1, "source": "x"}')

    def accept(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        app = ServingApp(f"http://127.0.0.1:{server.getsockname()[1]}", TOKEN, timeout_seconds=0.5)
        with raises(reason, match="TimeoutError: the answer was not complete in time"):
            app.swap(path)


def test_an_interrupt_comes_through_where_the_answer_is_late() -> None:
    here, there = socket.socketpair()

    def interrupted() -> None:
        with _closed_after(here, 0.01):
            is_open = True
            while is_open:
                with suppress(TimeoutError):
                    is_open = bool(here.recv(1))  # empty when the time is over
            raise KeyboardInterrupt

    with here, there, pytest.raises(KeyboardInterrupt):
        interrupted()


def test_numbers_beyond_those_of_a_float(app: App, path: str) -> None:
    app.version_answers.append((200, {"version": 1, "source": "x", "time": 10**400}))
    app.answers.append((200, {"version": 2, "previous": 1, "source": path, "seconds": 10**400}))
    assert ServingApp(app.url, TOKEN).swap(path).version == 2


def test_a_swap_that_takes_too_long(app: App, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, real = threading.Event(), app.swap

    def slow(headers: Any, source: Path) -> Answer:
        go_on.wait(60)
        return real(headers, source)

    monkeypatch.setattr(app, "swap", slow)
    target = ServingApp(app.url, TOKEN, timeout_seconds=0.05)
    with raises("no answer", match="TimeoutError"):
        target.swap(path)
    go_on.set()
    while app.source != path:
        threading.Event().wait(0.01)
    assert target.swap(path).previous == 2  # its answer was lost, and it was not asked for again
    assert len(app.swaps) == 1


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://127.0.0.1",
        "http://",
        "http://127.0.0.1:port",
        "http://127.0.0.1:99999",
        "http://user:secret@127.0.0.1",
        "http://127.0.0.1/?a=b",
        "http://127.0.0.1/#a",
        "http://127.0.0.1/a b",
        "http://127.0.0.1/\u00e4",
        "http://" + "a" * 70,
        "http://[::1",
        None,
        b"http://127.0.0.1",
    ],
)
def test_what_is_no_url(url: Any) -> None:
    with pytest.raises(OptionError, match="not the URL of a serving app") as caught:
        ServingApp(url, TOKEN)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["", "a b", "a\r\nX: y", "\u00e4", "a\n"])
def test_what_is_no_token(token: str) -> None:
    with pytest.raises(OptionError, match="a header cannot contain the token") as caught:
        ServingApp("http://127.0.0.1", token)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize("timeout_seconds", [0, -1, float("nan"), "5"])
def test_what_is_no_time(timeout_seconds: Any) -> None:
    with pytest.raises(OptionError, match="timeout_seconds="):
        ServingApp("http://127.0.0.1", TOKEN, timeout_seconds=timeout_seconds)


def test_urls() -> None:
    assert ServingApp("https://[::1]:8443/a/", TOKEN).url == "https://[::1]:8443/a"
    assert ServingApp("http://example.org", TOKEN).url == "http://example.org"
    assert TOKEN not in repr(ServingApp("http://example.org", TOKEN))


def test_a_store_is_followed_into_an_app(app: App, tmp_path: Path) -> None:
    store, log = ms.Store(tmp_path / "run"), list[Exception]()
    following = ms.follow(ServingApp(app.url, TOKEN), store, background=False, on_error=log.append)
    save(store, 1)
    (event,) = following.poll()
    assert (event.action, event.version) == ("swapped", 2)
    assert float(app.live(X).detach()[0, 0]) == pytest.approx(5, abs=0.05)
    damage(save(store, 2))
    store.save(3, {"model": linear(float("nan"))})
    app.answers += [(409, {"error": "SwapBusyError", "detail": "busy"})]
    assert [(one.action, one.step) for one in following.poll()] == [("waiting", 3)]
    assert [(one.action, one.step) for one in following.poll()] == [("skipped", 3), ("skipped", 2)]
    assert following.poll() == ()
    assert [type(error) for error in log] == [SwapBusyError, SkippedCheckpointError, SkippedCheckpointError]
    assert "WeightsError" in str(log[1])
    assert app.live.version == 2
    assert len(app.swaps) == 3  # the damaged one was never posted


def test_an_app_that_does_not_take_the_token_ends_it(app: App, tmp_path: Path) -> None:
    store, log = ms.Store(tmp_path / "run"), list[Exception]()
    save(store, 1)
    following = ms.follow(ServingApp(app.url, "another"), store, on_error=log.append)
    assert following.wait(60)
    assert [error.reason for error in log if isinstance(error, AppError)] == ["access"]
    assert [event.action for event in following.events] == ["ended"]


def test_the_end_of_following_does_not_wait_for_the_answer_to_a_swap(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The app goes on with the swap."""
    begun, go_on = threading.Event(), threading.Event()
    real = app.swap

    def slow(headers: dict[str, str], source: Path) -> Answer:
        begun.set()
        assert go_on.wait(60)
        return real(headers, source)

    monkeypatch.setattr(app, "swap", slow)
    with ms.Store(tmp_path / "run") as store:
        save(store, 1)
        following = ms.follow(ServingApp(app.url, TOKEN), store, on_error=pytest.fail)
        try:
            assert begun.wait(60)
            assert following.stop(timeout_seconds=20)
        finally:
            go_on.set()
    assert following.events == ()
    while app.live.version == 1:
        time.sleep(0.01)
    assert app.live.version == 2
