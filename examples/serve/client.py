"""A client of the example server. It needs only the standard library."""

import http.client
import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

_IDLE_SECONDS = 2.0
"""A connection that has been idle for longer is opened again: uvicorn closes idle connections after 5 s."""


class RefusedError(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, error: str, detail: str) -> None:
        super().__init__(f"{status} {error}: {detail}")
        self.status = status
        self.error = error
        """The name of the class of the error."""
        self.detail = detail


class Client:
    """One connection, for one thread.

    Every method raises `RefusedError` for an error of the server, and `OSError` or `http.client.HTTPException` for an
    error of the connection. The client can be used after any of them.
    """

    def __init__(self, port: int, token: str = "", host: str = "127.0.0.1", timeout_seconds: float = 120) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
        self._used = time.monotonic()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def embed(self, texts: Sequence[str]) -> tuple[list[list[float]], int]:
        """Returns a unit vector for each text, and the version that computed them."""
        answer = self.post("/embed", {"texts": list(texts)})
        return answer["embeddings"], answer["version"]

    def version(self) -> dict[str, Any]:
        """Returns the serving `version`, the `source` of its weights, and the `time` when it was made."""
        answer: dict[str, Any] = json.loads(self._request("GET", "/version", None))
        return answer

    def swap(self, source: str) -> dict[str, Any]:
        """Swaps in new weights. Returns `version`, `previous`, `source` and `seconds`."""
        return self.post("/swap", {"source": source})

    def rollback(self) -> int:
        """Serves the previous version again, and returns its number."""
        version: int = self.post("/rollback", None)["version"]
        return version

    def metrics(self) -> str:
        """Returns the metrics in the text format of Prometheus."""
        return self._request("GET", "/metrics", None).decode()

    def post(self, path: str, value: object) -> dict[str, Any]:
        """Sends a value as JSON, or bytes as they are, and returns the answer."""
        body = value if isinstance(value, bytes) else b"" if value is None else json.dumps(value).encode()
        answer: dict[str, Any] = json.loads(self._request("POST", path, body))
        return answer

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        if time.monotonic() - self._used > _IDLE_SECONDS:
            self._connection.close()  # the next request opens it again
        try:
            self._connection.request(method, path, body, self._headers)
            response = self._connection.getresponse()
            content = response.read()
        except BaseException:
            self._connection.close()  # http.client accepts no request after one that has failed
            raise
        self._used = time.monotonic()
        if response.status == 200:
            return content
        try:
            answer = json.loads(content)
            error = RefusedError(response.status, answer["error"], answer["detail"])
        except (ValueError, LookupError, TypeError):  # the answer of a proxy, or of another server
            error = RefusedError(response.status, response.reason, content.decode(errors="replace"))
        raise error


class App:
    """The server as a target of `modelstate.follow`, which gives `swap` the path of each new checkpoint.

    Example:
        >>> modelstate.follow(App(Client(8000, token)), "checkpoints/run")
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def swap(self, source: str) -> SimpleNamespace:
        """Swaps in new weights.

        Args:
            source: The path of a checkpoint, below the server's directory.

        Returns:
            The server's answer: `version`, `previous`, `source` and `seconds`.

        Raises:
            ConnectionError: The server does not answer, is busy, or does not see the path. `follow` tries again.
            TimeoutError: The server does not answer in time. `follow` tries again.
            RefusedError: The server refuses the weights or the token. `follow` skips the checkpoint.
        """
        try:
            return SimpleNamespace(**self._client.swap(source))
        except http.client.HTTPException as error:
            raise ConnectionError(f"the server broke the connection off: {error}") from error
        except RefusedError as error:
            if error.status in (404, 408, 409, 429) or error.status >= 500:
                raise ConnectionError(str(error)) from error
            raise
