"""Bodies of requests: so many bytes at most, and a JSON object with one field."""

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from examples.serve.refusals import BadRequestError, TooLargeError


async def read_body(request: Request, most_bytes: int) -> bytes:
    """All of it, and never more in memory than is allowed. Raises `TooLargeError`, `BadRequestError`."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most_bytes:
        raise _too_large(most_bytes)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > most_bytes:
                raise _too_large(most_bytes)
    except ClientDisconnect as error:
        raise BadRequestError("the client left before its request was complete") from error
    return bytes(body)


def field_of(body: bytes, name: str) -> Any:
    """The value of an object that has this field and no other. Raises `BadRequestError`."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict) or list(value) != [name]:
        found = f"an object with {sorted(value)}" if isinstance(value, dict) else type(value).__name__
        raise BadRequestError(f'the body is an object with the field "{name}" and no other; found {found}')
    return value[name]


def _too_large(most_bytes: int) -> TooLargeError:
    return TooLargeError(f"the body has more than {most_bytes:,} bytes")
