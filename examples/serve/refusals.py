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


def detail_of(error: Exception) -> str:
    """What an answer says of an error.

    An error of opening or reading a file may quote the file, which need not be a checkpoint: the answer has the meaning
    of its class, and only the log has the rest.
    """
    if isinstance(error, errors.ModelStateError) and not isinstance(error, errors.LiveError | errors.PlanError):
        return f"{(type(error).__doc__ or '').partition(chr(10))[0]} The log of the server has more."
    return str(error) if status_of(error) != 500 else "the log of the server has more"


def status_of(error: Exception) -> int:
    """The status for an error; 500 for what nobody has thought of."""
    if isinstance(error, RequestError):
        return error.status
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
