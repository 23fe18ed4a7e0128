"""The client of a serving app in another process, which swaps checkpoints by `POST /swap`."""

import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from modelstate.arguments import seconds_of
from modelstate.errors import (
    AppError,
    AppReason,
    LiveError,
    OptionError,
    SwapBusyError,
)
from modelstate.process import call_apart
from modelstate.text_format import printable

_MAX_ANSWER_BYTES = 64_000
"""The rest of a longer answer is not read."""
_MAX_TEXT = 500
_SECONDS = 10.0
"""The timeout for connecting, and for `GET /version`."""
_TEMPORARY = (408, 425, 429)
"""Statuses of 4xx that are independent of the checkpoint: a timeout, or too many requests."""
_VISIBLE = range(33, 127)


class AppSwap(NamedTuple):
    """The answer of an app to a swap."""

    version: int
    """The id of the version that serves."""
    previous: int
    """The id of the version before; equal to `version` where the app already served this checkpoint."""
    source: str
    seconds: float


class ServingApp:
    """A serving app at a URL. `swap(path)` posts a path, which must also exist for the app.

    `swap` requests `GET /version` first, so that a checkpoint that already serves is not posted again, as after a swap
    whose answer was lost. It is posted again where another file has come to its path: since this object's last swap, or
    since the version that serves was made, where the app answers that time.
    `POST /swap` has the header `Authorization: Bearer` with the token, and the body `{"source": path}`. The client
    follows no redirects and uses no proxies, so the token goes to that address only.

    Args:
        url: the URL before `/version` and `/swap`.
        token: the token that the app was started with.
        timeout_seconds: seconds to wait for the complete answer to a swap.

    Raises:
        OptionError: the URL is invalid, or a header cannot contain the token.

    Examples:
        >>> app = ServingApp("http://127.0.0.1:8000", token)
        >>> app.swap("/checkpoints/step-2000/model.safetensors").version
        2
    """

    def __init__(self, url: str, token: str, *, timeout_seconds: float = 300.0) -> None:
        timeout_seconds = seconds_of("timeout_seconds", timeout_seconds, accepts_zero=False, most=1e8)
        if not token or not all(ord(char) in _VISIBLE for char in token):
            raise OptionError("a header cannot contain the token", expected="visible ASCII without blanks")
        self._parts = _checked_url(url)
        self.url = f"{self._parts.scheme}://{self._parts.netloc}{self._parts.path.rstrip('/')}"
        """The URL, without a trailing slash."""
        self._token, self._timeout_seconds = token, timeout_seconds
        self._taken: tuple[str, _File | None] | None = None
        """The path that the app has taken last, and the file that was there."""

    def __repr__(self) -> str:
        return f"<ServingApp {self.url!r}>"

    def version(self) -> tuple[int, str]:
        """Returns the id of the version that serves, and the source of its weights.

        Raises:
            AppError: no app answers at this URL, or it refuses access.
        """
        version, source, _ = self._serving()
        return version, source

    def _serving(self) -> tuple[int, str, float | None]:
        """Returns the version, its source, and the time at which it was made, if the app answers that."""
        with self._connection_errors("unreachable", "the app does not answer", "start it, or look at the URL"):
            status, answer = self._request("GET", "/version", None, _SECONDS)
        self._check_access("GET /version", status, answer)
        version, source, seconds = answer.get("version"), answer.get("source"), answer.get("time")
        if status != 200 or type(version) is not int or type(source) is not str:
            raise AppError(
                "no serving app answers at this URL",
                reason="unreachable",
                status=status,
                where=f"{self.url}/version",
                expected='200 and {"version": int, "source": text}',
                found=_answer_text(status, answer),
                remedy="check the URL: it is the part before /version and /swap",
            )
        return version, source, seconds if isinstance(seconds, int | float) else None

    def swap(self, source: str | os.PathLike[str], /) -> AppSwap:
        """Swaps a checkpoint into the app, and waits until it serves.

        Args:
            source: the path of a checkpoint, which the app reads.

        Returns:
            An `AppSwap`.

        Raises:
            AppError: no app answers at this URL, or it has not taken the checkpoint; `reason` says which.
            SwapBusyError: another swap is under way; try again later.
        """
        path = os.fspath(source)
        version, served, made_at = self._serving()
        file = _file_at(path)
        # A run that begins again in the same directory has other checkpoints at the same paths.
        is_other = self._taken is not None and self._taken[0] == path and self._taken[1] != file
        is_other |= file is not None and made_at is not None and made_at < file.changed_at
        with suppress(ValueError):  # the source that the app reports need not be a path
            if not is_other and (served == path or os.path.realpath(served) == os.path.realpath(path)):
                self._taken = path, file
                return AppSwap(version, version, served, 0.0)
        remedy = "check that it runs, and that it has memory for a second copy"
        with self._connection_errors("no answer", "the app gave no answer to a swap", remedy):
            status, answer = self._request("POST", "/swap", {"source": path}, self._timeout_seconds)
        self._check_access("POST /swap", status, answer)
        if status != 200:
            raise self._swap_error(status, answer, path)
        match answer:
            case {
                "version": int(new),
                "previous": int(old),
                "source": str(name),
                "seconds": int() | float() as seconds,
            } if not isinstance(new, bool) and not isinstance(old, bool):
                self._taken = path, file
                return AppSwap(new, old, name, seconds)
        raise self._invalid_answer(200, answer)

    def _check_access(self, request: str, status: int, answer: dict[str, object]) -> None:
        if status in (401, 403):
            raise AppError(
                "the app refuses the token" if status == 401 else "the app refuses checkpoints outside its directory",
                reason="access",
                status=status,
                where=f"{request} at {self.url}",
                found=_answer_text(status, answer),
                remedy="give the token that the app was started with"
                if status == 401
                else "start the app with the store's directory, or a directory above it",
            )

    def _swap_error(self, status: int, answer: dict[str, object], path: str) -> LiveError:
        found = _answer_text(status, answer)
        if status == 409:
            return SwapBusyError(
                "another swap of the app is under way", where=self.url, found=found, remedy="try again later"
            )
        if status == 404:
            return AppError(
                "the app does not find the checkpoint",
                reason="unreachable",
                status=status,
                where=path,
                found=found,
                remedy="mount the store at the same path for the app and for this command",
            )
        if 400 <= status < 500 and status not in _TEMPORARY:
            return AppError("the app refuses the checkpoint", reason="refused", status=status, where=path, found=found)
        return self._invalid_answer(status, answer)

    def _invalid_answer(self, status: int, answer: dict[str, object]) -> AppError:
        return AppError(
            "the answer of the app is not valid",
            status=status,
            where=self.url,
            expected='200 and {"version": int, "previous": int, "source": text, "seconds": number}',
            found=_answer_text(status, answer),
            remedy="look at the log of the app",
        )

    @contextmanager
    def _connection_errors(self, reason: AppReason, what: str, remedy: str) -> Iterator[None]:
        """Converts errors of the connection."""
        try:
            yield
        except (OSError, HTTPException) as error:
            found = f"{type(error).__name__}: {error}"
            raise AppError(what, reason=reason, where=self.url, found=found, remedy=remedy) from error

    def _request(self, method: str, path: str, body: object, timeout_seconds: float) -> tuple[int, dict[str, object]]:
        """Returns the status, and the JSON object of the answer, which is empty where the answer has none.

        Raises `OSError` and `HTTPException`. Raises `Stopped` in a thread of `follow` that is to end; the app goes on
        with a swap then.
        """
        headers = {"Accept": "application/json", "User-Agent": "modelstate", "Connection": "close"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers |= {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        host, port = self._parts.hostname or "", self._parts.port

        def exchange() -> tuple[int, bytes]:
            connection = (
                HTTPSConnection(host, port, timeout=_SECONDS, context=ssl.create_default_context())
                if self._parts.scheme == "https"
                else HTTPConnection(host, port, timeout=_SECONDS)
            )
            try:
                connection.connect()
                with _closed_after(connection.sock, timeout_seconds):
                    connection.request(method, self._parts.path.rstrip("/") + path, data, headers)
                    response = connection.getresponse()
                    return response.status, response.read(_MAX_ANSWER_BYTES)
            finally:
                connection.close()

        status, content = call_apart(exchange)
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        return status, answer if isinstance(answer, dict) else {}


@contextmanager
def _closed_after(connected: socket.socket, seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` where the block lasts longer, also where single bytes arrive all the time."""
    connected.settimeout(seconds)  # for a single read
    is_late = threading.Event()

    def end_reads() -> None:
        is_late.set()
        with suppress(OSError):
            socket.socket.shutdown(connected, socket.SHUT_RDWR)  # that of SSL cannot be called during a read

    timer = threading.Timer(seconds, end_reads)
    timer.daemon = True
    timer.start()
    late = "the answer was not complete in time"
    try:
        yield
    except Exception as error:  # an interrupt, and the end of the thread, come through
        if is_late.is_set():
            raise TimeoutError(late) from error
        raise
    finally:
        timer.cancel()
    if is_late.is_set():
        raise TimeoutError(late)


class _File(NamedTuple):
    """Identifies the file or directory at a path without reading it."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_at: float
    """Seconds since 1970 at which something was written to it last, or it got its name."""


def _file_at(path: str) -> _File | None:
    """Returns the file at a path; None where nothing is there, as for a URL."""
    with suppress(OSError, ValueError):
        status = os.stat(path)
        return _File(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime)
    return None


def _checked_url(url: object) -> SplitResult:
    """Splits the URL of an app. Raises `OptionError`, which never shows a password."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        _ = (parts.hostname or "").encode("idna"), parts.port  # both raise ValueError
        if parts.username is not None or parts.password is not None:
            raise ValueError("a user name or a password in the URL, where others can read it")
        is_path = all(ord(char) in _VISIBLE for char in parts.path) and not parts.query and not parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_path:
            raise ValueError(repr(url)[:200])
    except ValueError as error:
        raise OptionError(
            "this is not the URL of a serving app", expected="such as http://127.0.0.1:8000", found=error
        ) from error
    return parts


def _answer_text(status: int, answer: dict[str, object]) -> str:
    """Describes an answer in one line. Its text comes from the app, so it is made printable and shortened."""
    text = ": ".join(part for part in (answer.get("error"), answer.get("detail")) if isinstance(part, str) and part)
    text = "; ".join(line.strip() for line in text.splitlines())
    return f"{status}{' ' if text else ''}{printable(text)[:_MAX_TEXT]}"
