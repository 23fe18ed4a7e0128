"""Limits the number of connections, and the time in which a client sends a request and reads its answer.

uvicorn has no time limit for the rest of a request, or for a client that does not read its answer. A few hundred such
clients would use up all connections that the process can open.
"""

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from examples.serve.app import Service, application
from examples.serve.texts import Limits

_BUSY_BODY = b'{"error": "OverloadedError", "detail": "too many connections are open"}'
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(_BUSY_BODY), _BUSY_BODY)
)
_RECEIVED = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)
"""States in which the client has sent all of its request."""


def config(service: Service, **options: Any) -> uvicorn.Config:
    """Returns the configuration of uvicorn for a service, with its limits. `options` are those of `uvicorn.Config`."""
    return uvicorn.Config(application(service), http=_protocol(service.limits), access_log=False, **options)


def _protocol(limits: Limits) -> type[asyncio.Protocol]:
    opened: set[H11Protocol] = set()
    receiving: dict[Any, asyncio.TimerHandle] = {}
    """The timers of connections with an incomplete request, the longest waiting connection first."""
    sending: dict[Any, asyncio.TimerHandle] = {}
    """The timers of connections whose client does not read its answer."""

    class Connection(H11Protocol):
        """Closes a connection whose request or answer takes too long.

        Beyond the limit of connections, a new connection closes the oldest one with an incomplete request. If there is
        none, the new connection is refused.
        """

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # `pause_writing` is called as soon as a byte waits
            opened.add(self)
            if len(opened) > limits.connections:
                if not receiving:
                    opened.discard(self)
                    transport.write(_BUSY)
                    transport.close()
                    return
                next(iter(receiving))._give_up()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def pause_writing(self) -> None:
            super().pause_writing()
            sending[self] = self.loop.call_later(limits.client_seconds, self._give_up)

        def resume_writing(self) -> None:
            _cancel(sending, self)
            super().resume_writing()

        def _watch(self) -> None:
            if self.conn.their_state in _RECEIVED:
                _cancel(receiving, self)
            elif self not in receiving and not self.transport.is_closing():
                receiving[self] = self.loop.call_later(limits.client_seconds, self._give_up)

        def _give_up(self) -> None:
            self._forget()  # at once: the loop calls `connection_lost` later, and can accept others before
            self.transport.abort()

        def _forget(self) -> None:
            opened.discard(self)
            for timers in (receiving, sending):
                _cancel(timers, self)

    return Connection


def _cancel(timers: dict[Any, asyncio.TimerHandle], connection: H11Protocol) -> None:
    if timer := timers.pop(connection, None):
        timer.cancel()
