"""What a request is refused with: a class for each cause, and the status that it is answered with."""

from modelstate import errors


class RequestError(Exception):
    """A request that is refused. Nothing has been changed."""

    status = 400


class BadRequestError(RequestError):
    """The body is not what it must be."""


class UnauthorizedError(RequestError):
    """No token, or another one."""

    status = 401


class OutsideError(RequestError):
    """A path that is not under the directory of checkpoints."""

    status = 403


class NoSuchPathError(RequestError):
    """Nothing is there under the path."""

    status = 404


class TooLargeError(RequestError):
    """More than is allowed at once."""

    status = 413


class OverloadedError(RequestError):
    """Too many requests are waiting already."""

    status = 503


_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (errors.SourceNotFoundError, 404),
    (errors.UnsafePathError, 403),
    (errors.SwapBusyError, 409),
    (errors.VersionGoneError, 409),
    (errors.QuarantinedError, 503),
    (errors.ModelStateError, 422),
)


def status_of(error: Exception) -> int:
    """The status for an error; 500 for what nobody has thought of."""
    if isinstance(error, RequestError):
        return error.status
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
