"""Reads the bodies of requests: a limited number of bytes, and a JSON object with one field."""

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from examples.serve.refusals import BadRequestError, TooLargeError


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Returns the body, and holds at most `max_bytes` of it. Raises `TooLargeError`, `BadRequestError`."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect as error:
        raise BadRequestError("the client disconnected before its request was complete") from error
    return bytes(body)


def field_of(body: bytes, name: str) -> Any:
    """Returns the value of the only field of a JSON object. Raises `BadRequestError` for any other body."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict) or list(value) != [name]:
        found = f"an object with {sorted(value)}" if isinstance(value, dict) else type(value).__name__
        raise BadRequestError(f'the body must be an object with the field "{name}" and no other field; found {found}')
    return value[name]


def _too_large(max_bytes: int) -> TooLargeError:
    return TooLargeError(f"the body has more than {max_bytes:,} bytes")
