"""The servers of the tests: object stores in processes of their own, and files over HTTP.

    python -m tests.remote.servers ministack

starts an object store on a free port of the loopback interface, prints its URL, and runs until its input ends.
"""

import base64
import hashlib
import hmac
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree.ElementTree import fromstring
from xml.sax.saxutils import escape

INSTALLED = Path(os.environ.get("MODELSTATE_SERVERS", ".venv-servers")).absolute()
"""Where `make test-remote` installs servers that `make test` does without."""

# Requests are handled one after the other: moto checks a condition and writes the object in two steps.
_MOTO = """
import logging, sys, threading
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
application, lock = create_backend_app("s3"), threading.Lock()

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


def missing(server: str) -> str:
    """Says what of a server is not installed; nothing where it can be started."""
    if server in ("moto", "gcs"):
        return ""  # of the extra `test`, and a part of the tests
    pattern = {"ministack": _MINISTACK, "azurite": _AZURITE}[server]
    return "" if any(INSTALLED.glob(pattern)) else f"{server} is not installed: make test-remote"


_MINISTACK = "lib/python3*/site-packages/ministack/app.py"
_AZURITE = "node_modules/.bin/azurite-blob"


@contextmanager
def object_store(server: str) -> Iterator[str]:
    """Starts an object store on a free port of the loopback interface, and yields its URL. Ends it by its process id.

    Args:
        server: moto, ministack (both S3), azurite (Azure Blob Storage) or gcs (Google Cloud Storage).
    """
    if server in ("moto", "gcs"):
        with moto_server() if server == "moto" else gcs_server() as url:
            yield url
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    python, url = str(INSTALLED / "bin/python"), f"http://127.0.0.1:{port}"
    command: Sequence[str]
    if server == "ministack":
        command = (python, "-m", "hypercorn", "ministack.app:app", "--bind", f"127.0.0.1:{port}")
    else:
        command = (str(INSTALLED / _AZURITE), "--blobPort", port, "--inMemoryPersistence")
        command = (*command, "--silent", "--disableTelemetry", "--skipApiVersionCheck")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "SERVICES": "s3", "LOG_LEVEL": "ERROR", "GATEWAY_PORT": port, "TMPDIR": folder}
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait_for(process, int(port))
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} does not listen on port {port}")


AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account and the key of azurite, which its documentation publishes."""


def azure_connection(url: str) -> str:
    """The connection string for azurite at a URL."""
    account = f"AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY}"
    return f"DefaultEndpointsProtocol=http;{account};BlobEndpoint={url}/{AZURE_ACCOUNT}"


def create_container(url: str, name: str) -> None:
    """Creates a container of azurite, which obstore does not do."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "PUT" + "\n" * 12 + "".join(f"{key}:{value}\n" for key, value in headers.items())
    signed += f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
    digest = hmac.new(base64.b64decode(AZURE_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    _request("PUT", f"{url}/{AZURE_ACCOUNT}/{name}?restype=container", b"", headers)


def _request(method: str, url: str, body: bytes, headers: dict[str, str]) -> None:
    request = urllib.request.Request(url, body or None, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


class FileServer(BaseHTTPRequestHandler):
    """Answers HEAD and GET for the files of a directory, with ranges, ETags, `If-Match` and `If-None-Match`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    directory: Path

    def do_GET(self) -> None:
        path = self.directory / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            return self._reply(404, b"no such file\n")
        return self._answer(path.read_bytes(), path.stat().st_mtime, {})

    def _answer(self, content: bytes, modified: float, headers: dict[str, str]) -> None:
        """Answers a GET or a HEAD with the content or a range of it, under its conditions."""
        etag = _etag(content)
        headers |= {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        headers["Last-Modified"] = self.date_time_string(modified)
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

    def handle_error(self, request: object, client_address: object) -> None:
        """Prints the error, unless the client has gone away."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


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


@dataclass
class _Stored:
    """An object of a bucket of Google Cloud Storage."""

    content: bytes
    generation: int
    metadata: dict[str, str]
    time: float = field(default_factory=time.time)


@dataclass
class _Upload:
    """A multipart upload that has not ended."""

    path: str
    metadata: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


class GcsServer(FileServer):
    """Answers the requests of the XML interface of Google Cloud Storage, from memory, as its documentation describes.

    These are those that obstore sends: objects are put, copied, read, listed and removed, and uploaded in parts. A put
    and a copy take `x-goog-if-generation-match`; a multipart upload takes no condition, and its parts except the last
    one have 5 MiB at least. Every bucket exists. Any token is taken.
    """

    objects: dict[str, _Stored]
    """By `/BUCKET/NAME`."""
    uploads: dict[str, _Upload]
    lock: threading.Lock
    generations: Iterator[int]

    def parse_request(self) -> bool:
        is_valid = super().parse_request()
        if is_valid:
            parts = urlsplit(self.path)
            self.name, self.query = unquote(parts.path), dict(parse_qsl(parts.query, keep_blank_values=True))
        return is_valid

    def do_GET(self) -> None:
        with self.lock:
            if "list-type" in self.query:
                return self._list()
            stored = self.objects.get(self.name)
        if stored is None:
            return self._error(404, "NoSuchKey")
        headers = {**stored.metadata, "x-goog-generation": str(stored.generation)}
        return self._answer(stored.content, stored.time, headers)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.lock:
            if "uploadId" in self.query:
                upload = self.uploads.get(self.query["uploadId"])
                if upload is None or upload.path != self.name:
                    return self._error(404, "NoSuchUpload")
                upload.parts[int(self.query["partNumber"])] = content
                return self._reply(200, b"", {"ETag": _etag(content)})
            metadata = self._metadata()
            if source := self.headers.get("x-goog-copy-source"):
                copied = self.objects.get("/" + unquote(source).lstrip("/"))
                if copied is None:
                    return self._error(404, "NoSuchKey")
                content, metadata = copied.content, copied.metadata
            expected, current = self.headers.get("x-goog-if-generation-match"), self.objects.get(self.name)
            if expected is not None and int(expected) != (current.generation if current else 0):
                return self._error(412, "PreconditionFailed")
            return self._store(content, metadata, b"<CopyObjectResult/>" if source else b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.lock:
            if any(name.lower().startswith("x-goog-if-") for name in self.headers):
                return self._error(400, "NotImplemented")
            if "uploads" in self.query:
                number = f"upload-{next(self.generations)}"
                self.uploads[number] = _Upload(self.name, self._metadata())
                text = _xml("InitiateMultipartUploadResult", Key=self.name, UploadId=number)
                return self._reply(200, text)
            upload = self.uploads.get(self.query["uploadId"])
            if upload is None or upload.path != self.name:
                return self._error(404, "NoSuchUpload")
            fields = [{field.tag.rpartition("}")[2]: field.text or "" for field in part} for part in fromstring(body)]
            numbers = [int(part["PartNumber"]) for part in fields]
            parts = [upload.parts.get(number, b"") for number in numbers]
            tags = [part["ETag"] for part in fields]
            if not numbers or numbers != sorted(set(numbers)) or tags != [_etag(part) for part in parts]:
                return self._error(400, "InvalidPart")
            if any(len(part) < 5 << 20 for part in parts[:-1]):
                return self._error(400, "EntityTooSmall")
            del self.uploads[self.query["uploadId"]]
            content = b"".join(parts)
            text = _xml("CompleteMultipartUploadResult", Key=self.name, ETag=_etag(content))
            return self._store(content, upload.metadata, text)

    def do_DELETE(self) -> None:
        with self.lock:
            if "uploadId" in self.query:
                is_there = self.uploads.pop(self.query["uploadId"], None) is not None
            else:
                is_there = self.objects.pop(self.name, None) is not None
        return self._reply(204, b"") if is_there else self._error(404, "NoSuchKey")

    def _metadata(self) -> dict[str, str]:
        return {name: value for name, value in self.headers.items() if name.lower().startswith("x-goog-meta-")}

    def _store(self, content: bytes, metadata: dict[str, str], answer: bytes) -> None:
        stored = self.objects[self.name] = _Stored(content, next(self.generations), metadata)
        self._reply(200, answer, {"ETag": _etag(content), "x-goog-generation": str(stored.generation)})

    def _list(self) -> None:
        root, prefix = f"{self.name.rstrip('/')}/", self.query.get("prefix", "")
        delimiter, after = self.query.get("delimiter", ""), self.query.get("continuation-token", "")
        items: dict[str, str] = {}
        for path, stored in sorted(self.objects.items()):
            name = path.removeprefix(root)
            if path.startswith(root + prefix):
                head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
                if found:
                    directory = prefix + head + delimiter
                    items[directory] = f"<CommonPrefixes><Prefix>{escape(directory)}</Prefix></CommonPrefixes>"
                    continue
                when = datetime.fromtimestamp(stored.time, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                items[name] = (
                    f"<Contents><Key>{escape(name)}</Key><Size>{len(stored.content)}</Size>"
                    f"<LastModified>{when}</LastModified><ETag>{escape(_etag(stored.content))}</ETag></Contents>"
                )
        page = [name for name in items if name > after][:1000]
        rest = [name for name in items if page and name > page[-1]]
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        text = "".join(items[name] for name in page)
        self._reply(
            200, f"<ListBucketResult><IsTruncated>{bool(rest)}</IsTruncated>{token}{text}</ListBucketResult>".encode()
        )

    def _error(self, status: int, code: str) -> None:
        self._reply(status, _xml("Error", Code=code))


def _etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _xml(name: str, **fields: str) -> bytes:
    text = "".join(f"<{field}>{escape(value)}</{field}>" for field, value in fields.items())
    return f"<?xml version='1.0' encoding='UTF-8'?><{name}>{text}</{name}>".encode()


@contextmanager
def gcs_server() -> Iterator[str]:
    """Starts an empty `GcsServer`, and yields its URL."""
    state = {"objects": {}, "uploads": {}, "lock": threading.Lock(), "generations": count(1)}
    with http_server(type("Handler", (GcsServer,), state)) as url:
        yield url


if __name__ == "__main__":
    with object_store(sys.argv[1]) as started:
        print(started, flush=True)
        sys.stdin.read()
