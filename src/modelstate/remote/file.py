"""`RemoteFile`: an object, or a file of a web server, that is read by ranges.

Each reply is compared with the version that was opened (its size, and its ETag or its time), so that bytes of two
versions are never mixed. A request that fails is repeated by the client; where a body is cut short, the bytes that have
arrived are kept, and the rest is requested again.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from modelstate.errors import (
    OPEN_AGAIN,
    ModelStateError,
    OpenError,
    ReadFailedError,
    SourceAccessError,
    SourceNotFoundError,
    SourceTypeError,
    TruncatedFileError,
    UnknownFormatError,
)
from modelstate.process import cached_attribute, parallel_for
from modelstate.remote import requests
from modelstate.remote.cache import Cache
from modelstate.remote.client import DOWNLOAD, Cause, Failure, failure_of, hub_store, listed_below, store_of
from modelstate.remote.hub import files_of
from modelstate.remote.location import CACHE_BLOCK_BYTES, CONNECTIONS, Location, locate, without_secrets
from modelstate.remote.requests import call, chunks, wait_to_retry

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import ObjectStore

_FIRST_BYTES = 64 << 10
"""What the first request reads: the headers of most files."""
_LEAST_TAIL_BYTES, _MOST_TAIL_BYTES, _TAIL_SHARE = 64 << 10, 4 << 20, 256
"""What is read of the end of a file, where an archive has its directory: a small part of the file."""
_LEAST_BYTES = 8 << 10
"""What a request for a part of a header reads: in an archive of archives, the next header is behind the end of one."""
_MOST_BLOCKS = 64
"""Parts of headers that are kept beside the first one: readers go through a file in order."""
_CHUNK_BYTES = 256 << 10
"""The memory that a reply needs on its way to its destination."""
_COMPRESSION = re.compile(r"gzip|deflate|\bbr\b|zstd|compress", re.IGNORECASE)
"""The encodings that change the bytes of an object. Others, such as aws-chunked, name what a client has sent."""
_LEAST_ADDRESS_SECONDS = 1.0
"""For how long an address of the hub is valid at least: a file that is refused sooner is not asked for again."""


class ObjectVersion(NamedTuple):
    """Tells versions of an object apart."""

    nbytes: int
    modified_ns: int
    """0 where the server does not say."""
    tag: str
    """The ETag; empty where the server sends none."""


class RemoteFile:
    """An open object. It owns no connection: its client does.

    Args:
        path: The URL.
        version: What the object must be; None for what the first reply says.
        cache: Where blocks of the file are kept.

    Raises:
        OpenError: There is no such object, or it cannot be read.
    """

    def __init__(self, path: str, version: ObjectVersion | None = None, cache: Cache | None = None) -> None:
        self.path, self.cache = path, cache
        self._store, self._key = store_of(locate(path))
        self._asked = -_LEAST_ADDRESS_SECONDS
        self._blocks: list[tuple[int, bytes]] = []
        self._lock, self._address_lock = threading.Lock(), threading.Lock()
        self._pinned = version
        if version is None:
            buffer = memoryview(bytearray(_FIRST_BYTES))
            self._blocks.append((0, bytes(buffer[: self.read_into([buffer], 0)])))

    @property
    def version(self) -> ObjectVersion:
        """What the object was at the first reply."""
        assert self._pinned is not None
        return self._pinned

    @property
    def location(self) -> Location:
        """The place of the object."""
        return locate(self.path)

    def read(self, start: int, nbytes: int) -> bytes:
        """Reads a part of the headers, with what is needed next: the beginning and the end are read at once.

        Returns fewer bytes where the object ends.
        """
        end = min(start + nbytes, self.version.nbytes)
        with self._lock:
            found, at = bytearray(), start
            while at < end:
                block = next((each for each in reversed(self._blocks) if each[0] <= at < each[0] + len(each[1])), None)
                if block is None:
                    block = self._fetch(at, end)
                part = block[1][at - block[0] : end - block[0]]
                found += part
                at += len(part)
            return bytes(found)

    def _fetch(self, start: int, end: int) -> tuple[int, bytes]:
        nbytes = self.version.nbytes
        end = min(max(end, start + _LEAST_BYTES), nbytes)
        if end == nbytes:
            tail = min(max(nbytes // _TAIL_SHARE, _LEAST_TAIL_BYTES), _MOST_TAIL_BYTES)
            known = max((at + len(data) for at, data in self._blocks if at + len(data) <= start), default=0)
            start = max(min(start, nbytes - tail), known)
        buffer = memoryview(bytearray(end - start))
        done = 0
        while done < len(buffer):
            done += self.read_into([buffer[done:]], start + done)
        self._blocks.append((start, bytes(buffer)))
        del self._blocks[1:-_MOST_BLOCKS]
        return self._blocks[-1]

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads from `offset` on into the buffers, one after the other, and returns the number of bytes, 0 at the end.

        Raises `ReadFailedError` where the object has changed, or the server does not answer; at the first reply of an
        object what the constructor raises.
        """
        end = offset + sum(map(len, buffers))
        if self._pinned is not None:
            end = min(end, self._pinned.nbytes)
            if self.cache is not None and self._version_name:
                return self._read_cached(self.cache, self._version_name, buffers, offset, end)
        done = 0
        for chunk in self._received(offset, end):
            _scatter(buffers, done, chunk)
            done += len(chunk)
        return done

    @cached_attribute
    def _version_name(self) -> str:
        """The name of this version in a cache; empty where nothing tells its bytes from those of another one."""
        url, (nbytes, modified_ns, tag) = self.location.url, self.version
        is_known = (tag and not tag.startswith("W/")) or self.location.scheme == "hf"  # whose URL has the commit
        text = f"{url}\0{nbytes}\0{modified_ns}\0{tag}"
        return hashlib.sha256(text.encode()).hexdigest()[:32] if is_known else ""

    def _read_cached(self, cache: Cache, version: str, buffers: Sequence[memoryview], offset: int, end: int) -> int:
        """Reads the blocks that are kept from `offset` on; where the first one is not, requests those that are not."""
        done = 0
        while offset + done < end:
            index, start = divmod(offset + done, CACHE_BLOCK_BYTES)
            block = cache.read(version, index, min(CACHE_BLOCK_BYTES, self.version.nbytes - index * CACHE_BLOCK_BYTES))
            if block is None:
                break
            part = memoryview(block)[start : end - index * CACHE_BLOCK_BYTES]
            _scatter(buffers, done, part)
            done += len(part)
        if done or offset >= end:
            return done
        index = offset // CACHE_BLOCK_BYTES
        last = index + 1
        while last * CACHE_BLOCK_BYTES < end and not cache.has(version, last):
            last += 1
        position, arrived = index * CACHE_BLOCK_BYTES, bytearray()
        stop = min(last * CACHE_BLOCK_BYTES, self.version.nbytes)
        for chunk in self._received(position, stop):
            view = memoryview(chunk)
            part = view[max(offset - position, 0) : max(end - position, 0)]
            _scatter(buffers, max(position - offset, 0), part)
            position += len(view)
            arrived += view
            while len(arrived) >= CACHE_BLOCK_BYTES or (arrived and position == stop):
                cache.write(version, index, bytes(memoryview(arrived)[:CACHE_BLOCK_BYTES]))
                del arrived[:CACHE_BLOCK_BYTES]
                index += 1
        return min(end, stop) - offset

    def _received(self, start: int, end: int) -> Iterator[memoryview]:
        """Requests a range, and yields its bytes as they arrive, to the end of the range or of the object."""
        tries = 0
        while start < end:
            before, store = start, self._store
            try:
                for chunk in self._chunks(store, start, end):
                    part = memoryview(chunk)[: end - start]  # a server may send more than was asked for
                    start += len(part)
                    tries = 0
                    yield part
                    if start == end:
                        break
                end = min(end, self.version.nbytes)
                if start == before and start < end:
                    raise EOFError
            except ModelStateError:
                raise
            except Exception as error:
                failure = _NO_BYTES if isinstance(error, EOFError) else failure_of(error, self.location)
                refusals = (Cause.REFUSED, Cause.NO_CREDENTIALS, Cause.EXPIRED)
                if failure.cause in refusals and tries < requests.RETRIES and self._is_new_address(store):
                    tries += 1
                    continue
                if failure.cause is not Cause.CUT or tries >= requests.RETRIES:
                    raise self._error(failure, start) from without_secrets(error)
                wait_to_retry(tries)
                tries += 1

    def _chunks(self, store: ObjectStore, start: int, end: int) -> Iterator[bytes]:
        """The bytes of a range. Compares the version first."""
        import obstore

        options: GetOptions = {"range": (start, end)}
        if self._pinned is not None and self._pinned.tag and not self._pinned.tag.startswith("W/"):
            options["if_match"] = self._pinned.tag
        result = call(obstore.get_async, store, self._key, options=options)
        self._check(result)
        yield from chunks(result.stream(min_chunk_size=_CHUNK_BYTES))

    def _check(self, result: GetResult) -> None:
        self._check_encoding(result)
        meta = result.meta
        modified_ns = int(meta["last_modified"].timestamp()) * 1_000_000_000
        found = ObjectVersion(meta["size"], modified_ns, meta["e_tag"] or "")
        if self.location.scheme == "hf":  # the commit in its name says which version it is, on whatever host
            found = ObjectVersion(found.nbytes, 0, "")
        if self._pinned is None:
            self._pinned = found
        expected = self._pinned
        if found.nbytes != expected.nbytes or (
            found.tag != expected.tag if expected.tag else found.modified_ns != expected.modified_ns
        ):
            raise ReadFailedError(
                "the object has changed since it was opened",
                where=self.path,
                expected=f"{expected.nbytes} bytes, ETag {expected.tag or 'none'}",
                found=f"{found.nbytes} bytes, ETag {found.tag or 'none'}",
                remedy=OPEN_AGAIN,
            )

    def _check_encoding(self, result: GetResult) -> None:
        """Raises an error for an answer that is compressed: its bytes are not those of the object."""
        encoding = str(result.attributes.get("Content-Encoding", ""))
        if _COMPRESSION.search(encoding):
            raise self._error(Failure(Cause.COMPRESSED, f"Content-Encoding: {encoding[:60]}", DOWNLOAD), 0)

    def _is_new_address(self, refused: ObjectStore) -> bool:
        """Asks the hub where the file is now, unless another thread has: the signature of an address expires."""
        if self._pinned is None or self.location.scheme != "hf":
            return False
        with self._address_lock:
            if self._store is not refused:
                return True
            if time.monotonic() - self._asked < _LEAST_ADDRESS_SECONDS:
                return False
            self._asked = time.monotonic()
            hub_store.cache_clear()
            self._store, self._key = store_of(self.location)
            return True

    def _error(self, failure: Failure, offset: int) -> Exception:
        if self._pinned is None and failure.cause is Cause.NO_SUCH_RANGE:
            return TruncatedFileError(
                "the file is empty",
                where=self.path,
                found=failure.found,
                remedy="its writer was stopped: take an older one, or copy it again",
            )
        if self._pinned is not None:
            what, remedy = f"reading failed: {failure.cause.value}", failure.remedy
            if failure.cause in (Cause.CHANGED, Cause.NO_SUCH_RANGE):
                what = "the object has changed since it was opened"
            elif failure.cause in (Cause.NO_OBJECT, Cause.NO_BUCKET):
                what = "the object has been removed since it was opened"
                remedy = "open the checkpoint again, or another one: what wrote or cleans up there has removed this one"
            return ReadFailedError(what, where=f"{self.path}, byte {offset}", found=failure.found, remedy=remedy)
        if failure.cause is Cause.NO_RANGES and (page := self._page()):
            return page
        return _open_error(failure, self.path)

    def _page(self) -> OpenError | None:
        """The error for a web page or for a compressed file in place of a file; None for something else."""
        import obstore

        try:
            reply = call(obstore.get_async, self._store, self._key)
            self._check_encoding(reply)
            kind = str(reply.attributes.get("Content-Type", ""))
        except SourceTypeError as error:
            return error
        except Exception:
            return None  # the first answer is the error
        if not kind.startswith("text/html"):
            return None
        return UnknownFormatError(
            "the server sends a web page in place of the file",
            where=self.path,
            found=f"Content-Type: {kind}",
            remedy="open the URL in a browser: a login, a licence to accept or another address is needed; on "
            "huggingface.co and github.com the address of the file has /resolve/ or /raw/, not /blob/",
        )

    def check_unchanged(self) -> None:
        """Does nothing: each reply has been compared."""

    def close(self) -> None:
        """Does nothing: the client keeps the connections."""


_NO_BYTES = Failure(
    Cause.CUT, "an empty body in each reply", "try again; check the server, and proxies on the way to it"
)
_ERRORS: dict[Cause, type[OpenError]] = {
    Cause.NO_OBJECT: SourceNotFoundError,
    Cause.NO_BUCKET: SourceNotFoundError,
    Cause.NO_CREDENTIALS: SourceAccessError,
    Cause.REFUSED: SourceAccessError,
    Cause.EXPIRED: SourceAccessError,
    Cause.CLOCK: SourceAccessError,
    Cause.NO_RANGES: SourceTypeError,
    Cause.OTHER_RANGE: SourceTypeError,
    Cause.COMPRESSED: SourceTypeError,
    Cause.REDIRECTED: SourceTypeError,
    Cause.REDIRECTED_TOO_OFTEN: SourceTypeError,
    Cause.OTHER_REGION: SourceAccessError,
}


def _open_error(failure: Failure, where: str) -> OpenError | ReadFailedError:
    kind = _ERRORS.get(failure.cause, ReadFailedError)
    page = "" if failure.cause is Cause.NO_OBJECT else ReadFailedError.page
    return kind(failure.cause.value, where=where, found=failure.found, remedy=failure.remedy, page=page)


def _scatter(buffers: Sequence[memoryview], done: int, chunk: memoryview) -> None:
    """Copies a chunk to the buffers, behind the bytes that are there."""
    view = memoryview(chunk)
    for buffer in buffers:
        if done >= len(buffer):
            done -= len(buffer)
            continue
        part = view[: len(buffer) - done]
        buffer[done : done + len(part)] = part
        view, done = view[len(part) :], 0
        if not view:
            return


# The files of one `open`: each is requested once, though several readers look at it.


class _Opening(NamedTuple):
    files: dict[str, RemoteFile]
    cache: Cache | None

    def file(self, path: str) -> RemoteFile:
        if path not in self.files:
            self.files[path] = RemoteFile(path, cache=self.cache)
        return self.files[path]


_opened: ContextVar[_Opening | None] = ContextVar("_opened", default=None)


@contextmanager
def opened_once(cache: Cache | None) -> Iterator[None]:
    """Keeps the beginnings and ends that are read within the block, and opens files with a cache."""
    token = _opened.set(_Opening({}, cache))
    try:
        yield
    finally:
        _opened.reset(token)


def opened(path: str) -> RemoteFile:
    """The file at a URL, from the files of this `open` where it is one of them. Raises what `RemoteFile` raises."""
    opening = _opened.get()
    return RemoteFile(path) if opening is None else opening.file(path)


def listing(directory: str) -> tuple[list[str], list[str]]:
    """The names of the objects and of the directories directly below a prefix.

    Raises `OpenError` where there is no such bucket, or nothing is there, or it cannot be read, and for a web server,
    which has no list.
    """
    location = locate(directory)
    if location.scheme.startswith("http"):
        raise SourceTypeError(
            "a web server does not say what is in a directory",
            where=directory,
            expected="the URL of a file",
            remedy=f"give the file itself, such as {directory.rstrip('/')}/model.safetensors",
        )
    if location.scheme == "hf":
        files = files_of(directory)
        names = [name for name in files if "/" not in name]
        directories = {name.split("/")[0] for name in files} - {*files}
        kind, root = "file", "the repository"
    else:
        try:
            below, objects = listed_below(location)
        except Exception as error:
            raise _open_error(failure_of(error, location), directory) from without_secrets(error)
        names, directories = [item.name for item in objects], {*below}
        kind, root = "object", "the bucket"
    if not names and not directories:
        raise SourceNotFoundError(
            f"{root} has no {kind} below this prefix",
            where=directory,
            remedy="check the name; names are case-sensitive",
        )
    return names, [*directories]


def forget(path: str) -> None:
    """Has the file at a path requested again by this `open`."""
    if opening := _opened.get():
        opening.files.pop(path, None)


def open_all(paths: Iterable[str]) -> set[str]:
    """Opens files of this `open` at the same time, and returns the paths at which there is none."""
    opening = _opened.get()
    missing: set[str] = set()
    if opening is None:
        return missing
    waiting = [path for path in paths if path not in opening.files]

    def work(stop: threading.Event) -> None:
        while waiting and not stop.is_set():
            with suppress(IndexError):
                path = waiting.pop()
                try:
                    opening.file(path)
                except SourceNotFoundError:
                    missing.add(path)

    parallel_for(work, min(CONNECTIONS, len(waiting)))
    return missing
