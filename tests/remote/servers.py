"""The servers of the tests: moto's S3 in a process of its own, and files over HTTP."""

import hashlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Requests are handled one after the other: moto checks a condition and writes the object in two steps.
_MOTO = """
import logging, sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
application, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

def in_turn(environ, start_response):
    with lock:
        return application(environ, start_response)

server = make_server("127.0.0.1", 0, in_turn, threaded=True, request_handler=MotoRequestHandler)
print(server.server_port, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
"""


@contextmanager
def moto_server() -> Iterator[str]:
    """Starts moto's server on a free port of the loopback interface, and yields its URL. It ends with this process."""
    with subprocess.Popen(
        [sys.executable, "-c", _MOTO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError("moto's server does not start")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


class FileServer(BaseHTTPRequestHandler):
    """Answers HEAD and GET for the files of a directory, with ranges, ETags, `If-Match` and `If-None-Match`."""

    protocol_version = "HTTP/1.1"
    directory: Path

    def do_GET(self) -> None:
        path = self.directory / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            return self._reply(404, b"no such file\n")
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        headers["Last-Modified"] = self.date_time_string(path.stat().st_mtime)
        if self.headers.get("If-Match") not in (None, "*", etag):
            return self._reply(412, b"", headers)
        if self.headers.get("If-None-Match") in ("*", etag):
            return self._reply(304, b"", headers)
        if not (match := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))):
            return self._reply(200, content, headers)
        first, last = match.groups()
        start = int(first) if first else max(0, len(content) - int(last))
        end = min(len(content), int(last) + 1 if first and last else len(content))
        if start >= end:
            return self._reply(416, b"", headers | {"Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        return self._reply(206, content[start:end], headers)

    do_HEAD = do_GET

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Writes nothing."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # with the 5 of the class, a connection that is refused is tried again after seconds


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Starts an HTTP server on a free port of the loopback interface, in threads of this process; yields its URL."""
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def file_server(directory: Path) -> Iterator[str]:
    """Serves the files of a directory over HTTP, and yields the URL."""
    with http_server(type("Handler", (FileServer,), {"directory": directory})) as url:
        yield url
