"""The connections of the server: a limited number of them, each of which has to send its requests in time.

uvicorn waits without limit for the rest of a request that has begun, and for a client that does not read its answer. A
few hundred clients that do so on purpose would take every connection that the process can have.
"""

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from examples.serve.app import Service, application
from examples.serve.texts import Limits

_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_RECEIVED = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)
"""States of a client that need not send anything more of its request."""


def config(service: Service, **options: Any) -> uvicorn.Config:
    """The configuration of uvicorn for a service, with its limits; `options` are those of `uvicorn.Config`."""
    return uvicorn.Config(application(service), http=_protocol(service.limits), access_log=False, **options)


def _protocol(limits: Limits) -> type[asyncio.Protocol]:
    opened: set[H11Protocol] = set()
    receiving: dict[Any, asyncio.TimerHandle] = {}
    """Connections whose request is incomplete, in the order in which they began to wait, with their timers."""
    sending: dict[Any, asyncio.TimerHandle] = {}
    """Connections whose client does not read what it is sent."""

    class Connection(H11Protocol):
        """Closes a connection whose request or answer takes too long. Beyond the limit, a connection that has sent no
        complete request leaves its place to a new one; where there is none, the new one is refused."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of every byte that waits
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
            self._forget()  # now: the loop calls `connection_lost` later, and may accept others before
            self.transport.abort()

        def _forget(self) -> None:
            opened.discard(self)
            for timers in (receiving, sending):
                _cancel(timers, self)

    return Connection


def _cancel(timers: dict[Any, asyncio.TimerHandle], connection: H11Protocol) -> None:
    if timer := timers.pop(connection, None):
        timer.cancel()
