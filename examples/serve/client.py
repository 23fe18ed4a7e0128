"""A client of the server, with nothing but the standard library."""

import http.client
import json
import time
from collections.abc import Sequence
from typing import Any

_IDLE_SECONDS = 2.0
"""After which a connection is not used again: the server ends those that are idle, after 5 s."""


class RefusedError(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, error: str, detail: str) -> None:
        super().__init__(f"{status} {error}: {detail}")
        self.status = status
        self.error = error
        """The name of its class."""
        self.detail = detail


class Client:
    """One connection, for one thread. Every method raises `RefusedError`, and `OSError` where nobody answers."""

    def __init__(self, port: int, token: str = "", host: str = "127.0.0.1", timeout_seconds: float = 120) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
        self._used = time.monotonic()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def embed(self, texts: Sequence[str]) -> tuple[list[list[float]], int]:
        """A unit vector for each text, and the version that made them."""
        found = self.post("/embed", {"texts": list(texts)})
        return found["embeddings"], found["version"]

    def version(self) -> dict[str, Any]:
        """`version` and `source` of what serves, and the `time` since when."""
        found: dict[str, Any] = json.loads(self._asked("GET", "/version", None))
        return found

    def swap(self, source: str) -> dict[str, Any]:
        """New weights. `version`, `previous`, `source`, `seconds`."""
        return self.post("/swap", {"source": source})

    def rollback(self) -> int:
        """The version before serves again. Returns it."""
        version: int = self.post("/rollback", None)["version"]
        return version

    def metrics(self) -> str:
        """The page for Prometheus."""
        return self._asked("GET", "/metrics", None).decode()

    def post(self, path: str, value: object) -> dict[str, Any]:
        """The answer to any object, or to a body of bytes as it is."""
        body = value if isinstance(value, bytes) else b"" if value is None else json.dumps(value).encode()
        found: dict[str, Any] = json.loads(self._asked("POST", path, body))
        return found

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def _asked(self, method: str, path: str, body: bytes | None) -> bytes:
        if time.monotonic() - self._used > _IDLE_SECONDS:
            self._connection.close()  # the request opens it again
        self._connection.request(method, path, body, self._headers)
        response = self._connection.getresponse()
        content = response.read()
        self._used = time.monotonic()
        if response.status == 200:
            return content
        found = json.loads(content)
        raise RefusedError(response.status, found["error"], found["detail"])
