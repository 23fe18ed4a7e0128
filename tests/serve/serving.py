"""A tiny app that serves over HTTP on loopback, as apps are expected to, and one that does what it is told to."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import modelstate as ms
from tests.remote.servers import http_server
from tests.serve.models import linear

TOKEN = "a-token-of-the-tests"
Answer = tuple[int, object]
"""Status and body: bytes as they are, None for a connection that is closed, and anything else as JSON."""


@dataclass
class App:
    """Serves a linear layer, and answers what is in `answers` first."""

    directory: Path
    """Only what is below it is taken."""
    live: ms.Live = field(default_factory=lambda: ms.Live(linear(0)))
    answers: list[Answer] = field(default_factory=list)
    """To swaps."""
    version_answers: list[Answer] = field(default_factory=list)
    asked: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    """Method, path, headers and body of each request."""
    source: str = "the first one"
    has_time: bool = False
    """Whether it answers when the version was made."""
    url: str = ""

    @property
    def time(self) -> dict[str, float]:
        return {"time": self.live.version().time} if self.has_time else {}

    @property
    def swaps(self) -> list[str]:
        """What was posted."""
        return [body["source"] for method, _, _, body in self.asked if method == "POST"]

    def answer(self, method: str, path: str, headers: dict[str, str], body: Any) -> Answer:
        self.asked.append((method, path, headers, body))
        if (method, path) == ("GET", "/version"):
            if self.version_answers:
                return self.version_answers.pop(0)
            return 200, {"version": self.live.version().id, "source": self.source, **self.time}
        if (method, path) != ("POST", "/swap"):
            return 404, {"detail": "Not Found"}
        return self.answers.pop(0) if self.answers else self.swap(headers, Path(body["source"]))

    def swap(self, headers: dict[str, str], source: Path) -> Answer:
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Unauthorized", "detail": "no token, or another one"}
        if not source.resolve().is_relative_to(self.directory.resolve()):
            return 403, {"error": "Forbidden", "detail": "outside of the directory"}
        if not source.exists():
            return 404, {"error": "SourceNotFoundError", "detail": "there is nothing at the path"}
        try:
            report = self.live.swap(source, when_busy="skip")
        except ms.ModelStateError as error:
            return 422, {"error": type(error).__name__, "detail": str(error)}
        if report is None:
            return 409, {"error": "SwapBusyError", "detail": "another swap is under way"}
        self.source = str(source)
        done = {"version": report.version, "previous": report.previous, "source": report.source}
        return 200, {**done, "seconds": report.seconds}


@contextmanager
def serving(directory: Path) -> Iterator[App]:
    """An app that listens within the block."""
    app = App(directory)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, given: Any) -> None:
            status, body = app.answer(self.command, self.path, dict(self.headers), given)
            if body is None:
                return
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if 300 <= status < 400:
                self.send_header("Location", f"{app.url}/elsewhere")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with http_server(Handler) as app.url:
        yield app
