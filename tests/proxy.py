"""`fault_proxy`: an HTTP server between a client and an object store, which counts, delays and breaks requests."""

import enum
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_PIECE_BYTES = 1 << 18
_CONNECTION_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Fault(enum.Enum):
    """What `fault_proxy` does with a request."""

    UNAVAILABLE = "unavailable"
    """The server does not see the request; the client gets status 503."""
    RESET = "reset"
    """The server does not see the request; the connection of the client is reset."""
    CUT = "cut"
    """The server handles the request; the client gets the first half of the body, then a closed connection."""
    LOST_REPLY = "lost reply"
    """The server handles the request; the connection of the client is reset before the reply."""
    STALE = "stale"
    """The client gets the reply that an earlier request of the same target got, where there was one."""
    STALL = "stall"
    """The server handles the request; the client gets the first half of the body, if there is one, and the rest when
    `FaultProxy.resumed` is set."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request that a `fault_proxy` has received."""

    number: int
    """Counted from 1 in the order of arrival, over all connections."""
    method: str
    target: str
    """The path with the query, as in the request line."""
    headers: dict[str, str]
    """By names in lower case. What a function for faults changes here is what the server gets."""
    nbytes: int
    """The bytes of its body."""

    def __str__(self) -> str:
        return f"{self.number} {self.method} {self.target}"


class FaultProxy:
    """The proxy that `fault_proxy` starts. Its attributes can be changed while it runs."""

    url: str
    """Where it listens; clients use this as their endpoint."""
    requests: list[HttpRequest]
    """All requests so far, including those that were made to fail."""
    uploaded_bytes: int
    """The bytes of the bodies of all requests."""
    downloaded_bytes: int
    """The bytes of the bodies of all replies that clients were sent."""
    stalled: threading.Event
    """Set when a reply stalls."""
    resumed: threading.Event
    """Ends stalls when it is set, as the end of the proxy does."""

    def __init__(
        self,
        server: str,
        fault: Callable[[HttpRequest], Fault | None] | None,
        latency_seconds: float,
        bytes_per_second: float | None,
    ) -> None:
        self.server, self.fault = server, fault
        self.latency_seconds, self.bytes_per_second = latency_seconds, bytes_per_second
        self.url = ""
        self.stalled, self.resumed = threading.Event(), threading.Event()
        self._lock, self._replies = threading.Lock(), dict[str, "_Reply"]()
        self.reset()

    def reset(self) -> None:
        """Forgets the requests and the counts; keeps faults, latency and bandwidth."""
        with self._lock:
            self.requests, self.uploaded_bytes, self.downloaded_bytes = [], 0, 0

    def _add(self, method: str, target: str, headers: dict[str, str], nbytes: int) -> HttpRequest:
        with self._lock:
            request = HttpRequest(len(self.requests) + 1, method, target, headers, nbytes)
            self.requests.append(request)
            self.uploaded_bytes += nbytes
        return request

    def _stall(self) -> None:
        self.stalled.set()
        self.resumed.wait()

    def _sent(self, nbytes: int) -> None:
        with self._lock:
            self.downloaded_bytes += nbytes
        if self.bytes_per_second is not None:
            time.sleep(nbytes / self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    reason: str
    headers: Sequence[tuple[str, str]]
    nbytes: int
    body: bytes | None = None
    """The whole body, where it has been read."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body is sent at once, and not when the client has confirmed the head
    proxy: FaultProxy

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, http.client.HTTPException):
            self.close_connection = True  # one of the two sides has ended the connection

    def _handle(self) -> None:
        proxy = self.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = proxy._add(self.command, self.path, headers, len(body))
        if proxy.bytes_per_second is not None:
            time.sleep(len(body) / proxy.bytes_per_second)
        time.sleep(proxy.latency_seconds)
        fault = proxy.fault(request) if proxy.fault is not None else None
        if fault is Fault.RESET:
            self._reset()
        elif fault is Fault.UNAVAILABLE:
            self._send(_Reply(503, "Service Unavailable", (), 0, b""), None, None)
        elif fault is Fault.STALE and (earlier := proxy._replies.get(self.path)):
            self._send(earlier, None, None)
        else:
            self._forward(request, body, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_OPTIONS = _handle

    def _forward(self, request: HttpRequest, body: bytes, fault: Fault | None) -> None:
        address = urlsplit(self.proxy.server)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        try:
            headers = {name: value for name, value in request.headers.items() if name not in _CONNECTION_HEADERS}
            if body or self.command in ("PUT", "POST"):
                headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _CONNECTION_HEADERS]
            is_listing = self.command == "GET" and ("list-type=" in self.path or "comp=list" in self.path)
            if self.command == "HEAD" or (answer.length is not None and not is_listing and fault is None):
                nbytes = int(answer.getheader("Content-Length") or 0)
                self._send(_Reply(answer.status, answer.reason, kept, nbytes), answer, fault)
                return
            content = answer.read()
            reply = _Reply(answer.status, answer.reason, kept, len(content), content)
            if is_listing:
                self.proxy._replies[self.path] = reply
            if fault is Fault.LOST_REPLY:
                self._reset()
            else:
                self._send(reply, None, fault)
        finally:
            connection.close()

    def _send(self, reply: _Reply, answer: http.client.HTTPResponse | None, fault: Fault | None) -> None:
        if fault is Fault.STALL and not reply.body:
            self.proxy._stall()
        self.send_response_only(reply.status, reply.reason)
        for name, value in reply.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(reply.nbytes))
        if fault is Fault.CUT:
            self.close_connection = True
            if not reply.body:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-")  # there is no body to cut: the head is cut
                return
        self.end_headers()
        if self.command == "HEAD":
            return
        if reply.body is not None:
            half = len(reply.body) // 2 if fault in (Fault.CUT, Fault.STALL) else len(reply.body)
            self.proxy._sent(half)
            self.wfile.write(reply.body[:half])
            if fault is Fault.STALL and reply.body:
                self.proxy._stall()
                self.proxy._sent(len(reply.body) - half)
                self.wfile.write(reply.body[half:])
        while answer is not None and (piece := answer.read(_PIECE_BYTES)):
            self.proxy._sent(len(piece))
            self.wfile.write(piece)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
        self.rfile.close()

    def log_message(self, *_: object) -> None:
        """Writes nothing."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Writes nothing: a client that ends its connection is no error here."""


@contextmanager
def fault_proxy(
    server: str,
    fault: Callable[[HttpRequest], Fault | None] | None = None,
    *,
    latency_seconds: float = 0.0,
    bytes_per_second: float | None = None,
) -> Iterator[FaultProxy]:
    """Starts an HTTP proxy on a free port of the loopback interface, in threads of this process.

    Args:
        server: the URL of the HTTP server that gets the requests, such as an object store for tests.
        fault: called with each request; returns the fault for it, or None for a request that succeeds.
        latency_seconds: how long each request waits.
        bytes_per_second: the bandwidth of each connection; None for no limit.
    """
    proxy = FaultProxy(server, fault, latency_seconds, bytes_per_second)
    with _Server(("127.0.0.1", 0), type("_Handler", (_Handler,), {"proxy": proxy})) as listener:
        proxy.url = f"http://127.0.0.1:{listener.server_port}"
        thread = threading.Thread(target=listener.serve_forever, args=(0.05,), name="fault_proxy", daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.resumed.set()
            listener.shutdown()
            thread.join()
