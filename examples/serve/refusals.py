"""The errors of requests, and the HTTP status of each error."""

from modelstate import errors


class RequestError(Exception):
    """The request is refused, and nothing has been changed."""

    status = 400


class BadRequestError(RequestError):
    """The body is not the required JSON object."""


class UnauthorizedError(RequestError):
    """The token is missing or wrong."""

    status = 401


class OutsideError(RequestError):
    """The path is not under the directory of checkpoints."""

    status = 403


class NoSuchPathError(RequestError):
    """The path does not exist."""

    status = 404


class TooLargeError(RequestError):
    """The request is larger than a limit."""

    status = 413


class OverloadedError(RequestError):
    """Too many requests are waiting."""

    status = 503


_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (errors.SourceNotFoundError, 404),
    (errors.DamagedFileError, 403),
    (errors.SwapBusyError, 409),
    (errors.VersionGoneError, 409),
    (errors.ModelStateError, 422),
)


def detail_of(error: Exception) -> str:
    """Returns the text about an error for the client.

    An error of opening or reading a file can quote the file, which need not be a checkpoint. So its answer has the
    description of its class, and only the log has the full text.
    """
    if isinstance(error, errors.ModelStateError) and not isinstance(error, errors.LiveError | errors.PlanError):
        return f"{(type(error).__doc__ or '').partition(chr(10))[0]} The log of the server has more."
    return str(error) if status_of(error) != 500 else "the log of the server has more"


def status_of(error: Exception) -> int:
    """Returns the HTTP status for an error: 500 for an unexpected one."""
    if isinstance(error, RequestError):
        return error.status
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
