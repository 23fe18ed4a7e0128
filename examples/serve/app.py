"""The HTTP routes around a `modelstate.Live`: bodies, the token, the queue of requests, errors as JSON."""

import hmac
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import modelstate as ms
from examples.serve.bodies import field_of, read_body
from examples.serve.metrics import CONTENT_TYPE, Metrics
from examples.serve.refusals import OverloadedError, RequestError, UnauthorizedError, detail_of, status_of
from examples.serve.swaps import Swaps
from examples.serve.texts import Limits, Texts
from modelstate.errors import ModelStateError

log = logging.getLogger("examples.serve")
_MAX_SWAP_BODY_BYTES = 1 << 16
"""The body of a swap holds one path."""


@dataclass(frozen=True, slots=True)
class Service:
    """The objects that the routes use."""

    live: ms.Live
    texts: Texts
    swaps: Swaps
    metrics: Metrics
    limits: Limits
    token: bytes
    """The token that a swap needs; empty where all swaps are refused."""
    workers: int
    """How many requests are computed at the same time; the others wait."""

    def embed(self, body: bytes) -> bytes:
        """Returns the answer to `POST /embed`. One version computes all of it."""
        ids, mask = self.texts.encode(field_of(body, "texts"))
        with torch.inference_mode():
            vectors, version = self.live.answer(ids, mask)
        self.metrics.answered(version)
        return json.dumps({"embeddings": vectors.tolist(), "version": version}, allow_nan=False).encode()

    def swap(self, body: bytes) -> dict[str, Any]:
        """Returns the answer to `POST /swap`."""
        report = self.swaps.swap(field_of(body, "source"))
        self.metrics.forget_before(report.version)
        log.info("%s", report)
        return {
            "version": report.version,
            "previous": report.previous,
            "source": report.source,
            "seconds": report.seconds,
        }

    def rollback(self) -> dict[str, Any]:
        """Returns the answer to `POST /rollback`."""
        version = self.swaps.rollback()
        log.info("version %s serves again", version)
        return {"version": version}

    def authorise(self, request: Request) -> None:
        """Raises `UnauthorizedError` for a request without the token."""
        if not self.token:
            raise UnauthorizedError("the server was started without a token, so it refuses to change its weights")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Compares in constant time, so that the time of an answer tells nothing about the token.
        if not hmac.compare_digest(given.strip().encode("latin-1"), self.token) or scheme.lower() != "bearer":
            raise UnauthorizedError("this needs the header Authorization: Bearer TOKEN, with the server's token")


def application(service: Service) -> Starlette:
    """Returns the ASGI application."""
    limiter: CapacityLimiter | None = None  # created by the event loop, in `lifespan`
    active = 0  # requests that are computed or wait; only the thread of the event loop uses it

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        nonlocal limiter
        # For these requests alone: anyio's default limiter stays free for swaps, even if many requests wait.
        limiter = CapacityLimiter(service.workers)
        yield

    async def embed(request: Request) -> Response:
        nonlocal active
        body = await read_body(request, service.limits.body_bytes)
        if active >= service.workers + service.limits.waiting:
            raise OverloadedError("too many requests are waiting already")
        active += 1
        try:
            content = await run_sync(service.embed, body, limiter=limiter)
        finally:
            active -= 1
        return Response(content, media_type="application/json")

    async def version(_: Request) -> Response:
        number, source, time = service.swaps.current
        return JSONResponse({"version": number, "source": source, "time": time})

    async def swap(request: Request) -> Response:
        with service.metrics.change("swapped"):
            service.authorise(request)
            body = await read_body(request, _MAX_SWAP_BODY_BYTES)
            return JSONResponse(await run_sync(service.swap, body))

    async def rollback(request: Request) -> Response:
        with service.metrics.change("rolled_back"):
            service.authorise(request)
            return JSONResponse(await run_sync(service.rollback))

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE)

    return Starlette(
        routes=[
            Route("/embed", embed, methods=["POST"]),
            Route("/version", version),
            Route("/swap", swap, methods=["POST"]),
            Route("/rollback", rollback, methods=["POST"]),
            Route("/healthz", health),
            Route("/metrics", metrics),
        ],
        exception_handlers=dict.fromkeys((RequestError, ModelStateError, HTTPException, Exception), _refused),
        lifespan=lifespan,
    )


async def _refused(request: Request, error: Exception) -> Response:
    """Returns an error as JSON. The traceback of an unexpected error (500) is only in the log."""
    status, headers = status_of(error), dict[str, str]()
    detail = detail_of(error)
    if isinstance(error, HTTPException):
        status, detail = error.status_code, error.detail
        headers |= error.headers or {}
    if status == 500:
        headers["Connection"] = "close"  # uvicorn closes the connection after a 500, and does not announce it
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if request.url.path in ("/swap", "/rollback"):
        log.warning("%s %s: %s", request.url.path, status, error)
    return JSONResponse({"error": type(error).__name__, "detail": detail}, status, headers)
