"""Writes objects into buckets: an object appears as a whole or not at all, and a failure leaves nothing behind.

- A small object is one request. A larger one is a multipart upload, whose parts are sent in parallel while the next
  ones are produced: memory for at most `PARTS_AT_ONCE` parts is used, and no temporary file. An error ends the upload
  with an abort, which removes the parts. The client cannot abort an upload that is being completed, so that begins
  when the server has all parts but the last one, which has a few bytes.
- Where an existing object must not be replaced, a small object has the condition `If-None-Match: *`. A multipart upload
  cannot have it: it goes to a temporary name, which is copied to the final one under the condition.
- A request whose reply is lost may have succeeded. So after each failure the object is read back: an upload has a nonce
  in the metadata of its object. A copy under a condition loses them on S3, so its bytes are compared.
"""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from modelstate.errors import ReadFailedError, TargetExistsError, UnsavableError, WriteFailedError
from modelstate.remote.client import Cause, ObjectInfo, failure_of, listed_below, store_of
from modelstate.remote.location import Location
from modelstate.remote.requests import call, cleanup, pause, repeated

if TYPE_CHECKING:
    from obstore import ObjectMeta

PART_BYTES = 8 << 20
"""About the size of a part. An object of at most this size is sent in one request."""
_LEAST_PART_BYTES = 5 << 20
"""The least size of a part but the last one, for S3."""
PARTS_AT_ONCE = 12
_MOST_PARTS = 10_000
"""The most parts of an upload to S3."""
_COPIED_BYTES = 5 << 30
"""The largest object that S3 copies in one request."""
_NONCE = "modelstatenonce"
"""The name of the nonce in the metadata of an object; Azure takes letters and digits."""
_MOST_SECONDS = 300.0
"""How long an upload waits for the next part to be sent; the client gives a request up before that."""
_POLL_SECONDS = 0.002
SUFFIX = ".unfinished"
_DEFINITE = (
    *(Cause.NO_BUCKET, Cause.NO_CREDENTIALS, Cause.REFUSED, Cause.EXPIRED, Cause.CLOCK, Cause.REDIRECTED),
    *(Cause.REDIRECTED_TOO_OFTEN, Cause.OTHER_REGION),
)
"""Causes that do not go away when the request is repeated."""
WRITABLE = ("s3", "gs", "az")
_Result = TypeVar("_Result")


def check_writable(location: Location) -> None:
    """Raises `UnsavableError` for a location that is no object in a bucket."""
    if location.scheme not in WRITABLE:
        raise UnsavableError(
            f"nothing can be saved to {location.scheme}://",
            where=location.url,
            expected=", ".join(f"{scheme}://" for scheme in WRITABLE),
            remedy="save to a bucket or a local path"
            + ("; hf upload copies a saved file to the hub" if location.scheme == "hf" else ""),
        )


def head(location: Location) -> ObjectMeta | None:
    """Returns what the server says of an object: its size, version and time; None where there is none.

    Raises:
        WriteFailedError: The bucket cannot be read.
    """
    import obstore

    store, key = store_of(location)
    return _found(location, lambda: call(obstore.head_async, store, key))


def get(location: Location) -> bytes | None:
    """Returns the bytes of a small object; None where there is none. Raises `WriteFailedError`."""
    import obstore

    store, key = store_of(location)
    return _found(location, lambda: bytes(call(call(obstore.get_async, store, key).bytes_async)))


def _found(location: Location, read: Callable[[], _Result]) -> _Result | None:
    """Returns what a function reads; None where there is no such object. Reads again where a reply is cut short.

    The client itself repeats the request after any other error.
    """

    def request() -> _Result:
        with client_errors(location, "the bucket cannot be read"):
            return read()

    with suppress(FileNotFoundError):
        return repeated(request, lambda error: _cause_of(error, location) is Cause.CUT)
    return None


def _cause_of(error: BaseException, location: Location) -> Cause:
    return failure_of(error.__cause__ or error, location).cause


def listing(location: Location) -> tuple[list[str], list[ObjectInfo]]:
    """Returns the names of the directories and the objects directly below a prefix. Raises `WriteFailedError`."""
    return _found(location, lambda: listed_below(location)) or ([], [])


def list_all(location: Location) -> list[ObjectInfo]:
    """Returns all objects below a prefix. Raises `WriteFailedError`."""
    import obstore

    store, key = store_of(location)
    prefix = f"{key}/" if key else ""
    items = _found(location, lambda: call(obstore.list(store, prefix or None).collect_async))
    return [ObjectInfo(item["path"].removeprefix(prefix), item["size"], item["last_modified"]) for item in items or ()]


def remove(locations: Sequence[Location], is_same: Callable[[], bool] | None = None) -> None:
    """Removes objects of one bucket; one that does not exist counts as removed.

    Args:
        locations: the objects.
        is_same: says before each request whether they are still what is to be removed; else they stay.

    Raises:
        WriteFailedError: The server refuses it, or does not answer.
    """
    import obstore

    def request() -> None:
        if not locations or (is_same is not None and not is_same()):
            return
        store, _ = store_of(locations[0], repeats=is_same is None)
        try:
            with client_errors(locations[0]):
                call(obstore.delete_async, store, [location.key for location in locations])
        except FileNotFoundError:
            # Google and Azure remove one object a request, and the client stops at the first one that is not there.
            for location in locations if len(locations) > 1 else ():
                with client_errors(location), suppress(FileNotFoundError):
                    call(obstore.delete_async, store, location.key)

    repeated(request, lambda error: isinstance(error, WriteFailedError))  # the client does not repeat this request


def put(location: Location, data: bytes, *, overwrite: bool) -> None:
    """Writes a small object in one request.

    Args:
        location: the object.
        data: its bytes.
        overwrite: whether an object that exists is replaced; else it is kept, by a condition that the server checks.

    Raises:
        TargetExistsError: There is another object, and `overwrite` is false.
        WriteFailedError: The server refuses the object, or does not answer.
    """
    import obstore

    store, key = store_of(location)
    nonce = secrets.token_hex(8)

    def send() -> None:
        mode: Literal["overwrite", "create"] = "overwrite" if overwrite else "create"
        call(obstore.put_async, store, key, data, mode=mode, use_multipart=False, attributes={_NONCE: nonce})

    _sent(location, send, lambda: _has_nonce(location, nonce))


def _sent(
    location: Location, send: Callable[[], object], has_arrived: Callable[[], bool], times: int | None = None
) -> None:
    """Calls a function that writes an object; again after a failure where the object has not arrived."""
    from obstore.exceptions import BaseError

    def request() -> None:
        try:
            send()
        except (BaseError, OSError) as error:
            with suppress(WriteFailedError, FileNotFoundError):
                if has_arrived():
                    return
            if _cause_of(error, location) in (Cause.EXISTS, Cause.CHANGED):
                raise TargetExistsError("the target exists already", where=location.url) from error
            raise _failed(location, error) from error

    def is_passing(error: Exception) -> bool:
        return isinstance(error, WriteFailedError) and _cause_of(error, location) not in _DEFINITE

    repeated(request, is_passing, times)


def is_absent(location: Location, error: BaseException) -> bool:
    """Whether an upload with this error has left no object: the server has refused it, and says so when asked."""
    if error.__cause__ is None or _cause_of(error, location) not in _DEFINITE:
        return False
    try:
        return head(location) is None
    except WriteFailedError:
        return False


def _has_nonce(location: Location, nonce: str) -> bool:
    """Whether the object is that of the upload with this nonce."""
    import obstore

    store, key = store_of(location)
    found = _found(location, lambda: call(obstore.get_async, store, key, options={"head": True}).attributes)
    return found is not None and found.get(_NONCE) == nonce


def _is_copy(copied: Location, location: Location) -> bool:
    """Whether two objects have the same bytes."""
    import obstore

    source, target, (store, key), (_, other) = head(copied), head(location), store_of(copied), store_of(location)
    if source is None or target is None or source["size"] != target["size"]:
        return False
    nbytes = source["size"]
    with client_errors(location):
        return all(
            call(obstore.get_range_async, store, key, start=start, end=min(start + PART_BYTES, nbytes))
            == call(obstore.get_range_async, store, other, start=start, end=min(start + PART_BYTES, nbytes))
            for start in range(0, nbytes, PART_BYTES)
        )


class _Buffer(bytearray):
    """Memory to which weak references can be made."""


class ObjectWriter(msgspec.Struct):
    """An object that is being uploaded, from its first byte to its last one."""

    location: Location
    nbytes: int
    _writer: Any
    _last_part: int = 0
    """Where the last part begins."""
    _done_bytes: int = 0
    _buffers: list[weakref.ref[_Buffer]] = msgspec.field(default_factory=list)
    """What was given to the client before the last part. The client refers to the memory until it has been sent."""

    def append(self, data: bytes | memoryview) -> None:
        """Adds bytes to the end. They are copied. Raises `WriteFailedError`."""
        if isinstance(self._writer, bytearray):
            self._writer += data
            self._done_bytes += len(data)
            return
        before_last = max(self._last_part - self._done_bytes, 0)
        self._done_bytes += len(data)
        for part, is_last in ((data[:before_last], False), (data[before_last:], True)):
            buffer = _Buffer(part)
            if not is_last:
                self._buffers = [*self._unsent(), weakref.ref(buffer)]
            if buffer:
                with client_errors(self.location):
                    call(self._writer.write, memoryview(buffer))
            del buffer

    def wait_for_parts(self) -> None:
        """Waits until all parts but the last one have been sent, or have failed."""
        before, until = 0, 0.0
        while unsent := len(self._unsent()):
            if unsent != before:
                before, until = unsent, time.monotonic() + _MOST_SECONDS
            elif time.monotonic() > until:
                return
            pause(_POLL_SECONDS)

    def _unsent(self) -> list[weakref.ref[_Buffer]]:
        return [reference for reference in self._buffers if reference() is not None]

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """As `append`, for a caller that writes in order."""
        self.append(data)


@contextmanager
def new_object(location: Location, nbytes: int, *, overwrite: bool) -> Iterator[ObjectWriter]:
    """Yields a writer of an object, which appears when the block ends, and does not when the block raises.

    Args:
        location: the object.
        nbytes: its size, which has to be known.
        overwrite: whether an object that exists is replaced.

    Raises:
        TargetExistsError: There is another object, and `overwrite` is false.
        UnsavableError: Nothing can be written there.
        WriteFailedError: The server refuses the object, or does not answer. The object that was there is untouched.
    """
    import obstore

    check_writable(location)
    if nbytes <= PART_BYTES:
        whole = ObjectWriter(location, nbytes, bytearray())
        yield whole
        put(location, bytes(whole._writer), overwrite=overwrite)
        return
    if not overwrite and location.scheme == "s3" and nbytes > _COPIED_BYTES:
        raise UnsavableError(
            "S3 has no upload of this size that keeps an object which another writer puts there meanwhile",
            where=location.url,
            expected=f"at most {_COPIED_BYTES:,} bytes in one file",
            found=f"{nbytes:,} bytes",
            remedy="shard_size_bytes= makes smaller files; overwrite=True needs no condition",
        )
    target = location
    if not overwrite:
        target = Location(location.scheme, location.root, f"{location.key}.{secrets.token_hex(6)}{SUFFIX}")
    store, key = store_of(target)
    # Equal parts of about `PART_BYTES`, and one of the few bytes that are left.
    parts = -(-nbytes // (PART_BYTES + PART_BYTES // 16))
    parts = max(1, min(parts, (nbytes - 1) // min(PART_BYTES, _LEAST_PART_BYTES), _MOST_PARTS - 1))
    part_bytes = (nbytes - 1) // parts
    nonce = secrets.token_hex(8)
    writer = obstore.open_writer_async(
        store, key, attributes={_NONCE: nonce}, buffer_size=part_bytes, max_concurrency=PARTS_AT_ONCE
    )
    upload = ObjectWriter(target, nbytes, writer, part_bytes * parts)
    entered = call(writer.__aenter__)
    try:
        yield upload
        if upload._done_bytes != nbytes:
            raise ValueError(f"{upload._done_bytes:,} bytes were written, not {nbytes:,}")
        upload.wait_for_parts()
    except BaseException as error:
        with suppress(Exception), cleanup():
            call(writer.__aexit__, type(error), error, error.__traceback__)  # aborts the upload
        raise
    try:
        _sent(target, lambda: call(entered.close), lambda: _has_nonce(target, nonce), times=0)
        if not overwrite:
            copy = lambda: call(obstore.copy_async, store, key, location.key, overwrite=False)  # noqa: E731
            _sent(location, copy, lambda: _is_copy(target, location))
    finally:
        if not overwrite:
            with suppress(WriteFailedError), cleanup():
                remove([target])


@contextmanager
def client_errors(location: Location, what: str = "the object cannot be written") -> Iterator[None]:
    """Raises `WriteFailedError` in place of an error of the client; a missing object stays `FileNotFoundError`."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError as error:
        if failure_of(error, location).cause is Cause.NO_OBJECT:
            raise
        raise _failed(location, error, what) from error
    except BaseError as error:
        raise _failed(location, error, what) from error


def _failed(location: Location, error: BaseException, what: str = "the object cannot be written") -> WriteFailedError:
    failure = failure_of(error, location)
    return WriteFailedError(
        f"{what}: {failure.cause.value}",
        where=location.url,
        found=failure.found,
        remedy=failure.remedy,
        page=ReadFailedError.page,
    )
