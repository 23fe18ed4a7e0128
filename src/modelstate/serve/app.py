"""A serving app in another process: checkpoints go into it by its `POST /swap`."""

import json
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from modelstate.errors import (
    AppAccessError,
    AppAnswerError,
    AppRefusedError,
    AppUnreachableError,
    LiveError,
    OptionError,
    SwapBusyError,
)
from modelstate.store.retention import is_number
from modelstate.text_format import printable

_MOST_BYTES = 64_000
"""Of an answer; what is behind is not read."""
_MOST_WORDS = 500
_SECONDS = 10.0
"""For connecting, and for a question that takes no work."""
_VISIBLE = range(33, 127)


class AppSwap(NamedTuple):
    """What an app has answered to a swap."""

    version: int
    previous: int
    """The same where it served this checkpoint already, and nothing was to do."""
    source: str
    seconds: float


class ServingApp:
    """An app that serves, by its URL: `swap(path)` posts the path, which the app has to see as well.

    The app is asked with `GET /version` first, so that a checkpoint that it serves is not posted again, as after a
    swap whose answer was lost. `POST /swap` has the token as `Authorization: Bearer` and the body `{"source": path}`.
    Redirections are not followed, and proxies not used: the token goes to that address and to no other.

    Raises `OptionError` for what is no URL, and for a token that no header can have.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = 300.0) -> None:
        if not is_number(timeout_s) or not 0 < timeout_s < 1e8:
            raise OptionError("timeout_s= is a number of seconds", expected="above 0", found=repr(timeout_s))
        if not token or not all(ord(char) in _VISIBLE for char in token):
            raise OptionError("the token is not what a header can have", expected="visible ASCII without blanks")
        self._is_https, self._host, self._port, self._path = _parts(url)
        self._token, self._timeout_s = token, timeout_s

    def __repr__(self) -> str:
        return f"<ServingApp {self.url!r}>"

    @property
    def url(self) -> str:
        """Where it is."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        port = f":{self._port}" if self._port is not None else ""
        return f"http{'s' if self._is_https else ''}://{host}{port}{self._path}"

    def version(self) -> tuple[int, str]:
        """The version that serves, and where its weights are from. Raises `AppUnreachableError`, `AppAccessError`."""
        with self._silence(AppUnreachableError, "the app does not answer", "start it, or look at the URL"):
            status, said = self._ask("GET", "/version", None, _SECONDS)
        self._check_access("GET /version", status, said)
        version, source = said.get("version"), said.get("source")
        if status != 200 or type(version) is not int or type(source) is not str:
            raise AppUnreachableError(
                "no serving app answers there",
                where=f"{self.url}/version",
                expected='200 and {"version": int, "source": text}',
                found=_in_words(status, said),
                remedy="look at the URL: it is the one before /version and /swap",
            )
        return version, source

    def swap(self, source: str | os.PathLike[str], /) -> AppSwap:
        """Has the app take up a checkpoint, and waits until it serves.

        Raises `AppUnreachableError`, and `SwapBusyError` where another swap is under way: try again.
        `AppAnswerError` where nobody knows; `AppRefusedError` for weights that the app does not take; `AppAccessError`.
        """
        path = os.fspath(source)
        version, serves = self.version()
        if _is_same(serves, path):
            return AppSwap(version, version, serves, 0.0)
        remedy = "look at whether it runs, and whether it has the memory for a second copy"
        with self._silence(AppAnswerError, "the app gave no answer to a swap", remedy):
            status, said = self._ask("POST", "/swap", {"source": path}, self._timeout_s)
        self._check_access("POST /swap", status, said)
        if status != 200:
            raise self._refusal(status, said, path)
        return self._done(said)

    def _done(self, said: dict[str, Any]) -> AppSwap:
        try:
            version, previous = said["version"], said["previous"]
            found = AppSwap(version, previous, str(said["source"]), float(said["seconds"]))
        except (LookupError, TypeError, ValueError) as error:
            raise self._no_answer(200, said) from error
        if type(version) is not int or type(previous) is not int:
            raise self._no_answer(200, said)
        return found

    def _check_access(self, what: str, status: int, said: dict[str, Any]) -> None:
        if status in (401, 403):
            raise AppAccessError(
                "the app does not take the token" if status == 401 else "the app takes no checkpoints from there",
                where=f"{what} at {self.url}",
                found=_in_words(status, said),
                remedy="give the token that the app was started with"
                if status == 401
                else "have the app's directory be the one of the store, or one above it",
            )

    def _refusal(self, status: int, said: dict[str, Any], path: str) -> LiveError:
        found = _in_words(status, said)
        if status == 409:
            return SwapBusyError("the app is at another swap", where=self.url, found=found, remedy="try again later")
        if status == 404:
            return AppUnreachableError(
                "the app does not see the checkpoint",
                where=path,
                found=found,
                remedy="the app has to see the store at the same path as this command",
            )
        if 400 <= status < 500:
            return AppRefusedError("the app refuses the checkpoint", where=path, found=found)
        return self._no_answer(status, said)

    def _no_answer(self, status: int, said: dict[str, Any]) -> AppAnswerError:
        return AppAnswerError(
            "the answer of the app says nothing",
            where=self.url,
            expected='200 and {"version": int, "previous": int, "source": text, "seconds": number}',
            found=_in_words(status, said),
            remedy="look at what the app writes to its log",
        )

    @contextmanager
    def _silence(self, kind: type[LiveError], what: str, remedy: str) -> Iterator[None]:
        """Within it, what keeps an answer from coming comes through as an error of ours."""
        try:
            yield
        except (OSError, HTTPException) as error:
            found = f"{type(error).__name__}: {error}"
            raise kind(what, where=self.url, found=found, remedy=remedy) from error

    def _ask(self, method: str, path: str, body: object, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """The status, and the object of the answer; an empty one where it has none.

        Raises `OSError` and `HTTPException`.
        """
        headers = {"Accept": "application/json", "User-Agent": "modelstate", "Connection": "close"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers |= {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        connection = self._connection()
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            connection.request(method, self._path + path, data, headers)
            response = connection.getresponse()
            answer = response.read(_MOST_BYTES)
        finally:
            connection.close()
        try:
            said = json.loads(answer)
        except (ValueError, RecursionError):
            said = None
        return response.status, said if isinstance(said, dict) else {}

    def _connection(self) -> HTTPConnection:
        if self._is_https:
            context = ssl.create_default_context()
            return HTTPSConnection(self._host, self._port, timeout=_SECONDS, context=context)
        return HTTPConnection(self._host, self._port, timeout=_SECONDS)


def _parts(url: object) -> tuple[bool, str, int | None, str]:
    """Whether it is https, the host, the port and the path. Raises `OptionError`."""
    try:
        given = urlsplit(url if isinstance(url, str) else "")
        port = given.port
        (given.hostname or "").encode("idna")
    except ValueError as error:
        raise _no_url(url, str(error)) from error
    if given.scheme not in ("http", "https") or not given.hostname:
        raise _no_url(url, repr(url)[:200])
    if given.username is not None or given.password is not None:
        raise _no_url("", "a name or a password in it, which others see")
    if given.query or given.fragment:
        raise _no_url(url, f"something behind the path: {given.query or given.fragment}"[:200])
    if not all(ord(char) in _VISIBLE for char in given.path):
        raise _no_url(url, repr(url)[:200])
    return given.scheme == "https", given.hostname, port, given.path.rstrip("/")


def _is_same(source: str, path: str) -> bool:
    try:
        return source == path or os.path.realpath(source) == os.path.realpath(path)
    except ValueError:
        return False  # what the app says need not be a path


def _no_url(url: object, found: str) -> OptionError:
    return OptionError("this is no URL of a serving app", expected="such as http://127.0.0.1:8000", found=found)


def _in_words(status: int, said: dict[str, Any]) -> str:
    """What an app has said, which is others' words."""
    kind, detail = said.get("error"), said.get("detail")
    words = ": ".join(one for one in (kind, detail) if isinstance(one, str) and one)
    words = "; ".join(line.strip() for line in words.splitlines())
    return f"{status}{' ' if words else ''}{printable(words)[:_MOST_WORDS]}"
