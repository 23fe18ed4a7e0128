"""The checkpoints of a store in a bucket.

claim-<serial>                             decides what has the serial number: a checkpoint, or a lease
step-<step>.<serial>.<nonce>/checkpoint.json    the record of a checkpoint
lease-<serial>.<nonce>                     the holder of a lease, written again all the time while it lives
pin-<serial>                               a checkpoint that is pinned
data/<object>-<number>.<nonce>.safetensors, data/<object>.<nonce>.safetensors.index.json
store.json                                 the name of the store

A checkpoint is visible from the moment at which its claim is there: a small object with a nonce, written last and under
the condition `If-None-Match: *`. One listing shows all checkpoints.

Claims are one sequence for checkpoints and leases, which keeps a writer out that has lost its lease: the claim of the
next lease has the serial number that this writer would give to its next checkpoint. So claims of leases are kept.
Whether a lease has expired is decided by the clock of the server alone, from the times of two objects.

The files of all checkpoints are in one directory. A checkpoint refers to files of earlier ones that have not changed. A
file is removed when no record names it: with the last of them, or a day later where a save or a prune was killed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import msgspec

from modelstate.errors import LockedError, ReadFailedError, TargetExistsError, UnsavableError, WriteFailedError
from modelstate.formats.manifest import digest
from modelstate.formats.safetensors import FileLayout, Written, write_in_order
from modelstate.formats.sharded import INDEX_SUFFIX, SUFFIX
from modelstate.io.lock import holder_text
from modelstate.process import try_start
from modelstate.remote.location import Location, locate
from modelstate.remote.requests import cleanup, pause
from modelstate.remote.upload import get, head, list_all, listing, new_object, put, remove
from modelstate.store.backend import DATA, STORE_FILE, Place
from modelstate.store.record import RECORD_FILE, FileRecord

LEASE_SECONDS = 60.0
"""How long a lease lasts after its holder has written it for the last time."""
LEFTOVER_SECONDS = 24 * 3600.0
"""The age from which what no checkpoint refers to counts as left by a killed save."""
_TRIES = 20
_RELEASED = b'{"released": true}'
_CLAIM = re.compile(r"claim-(\d{12})")
_STEP = re.compile(r"step-(\d{9,18})\.(\d{12})\.([0-9a-f]{12})")
_LEASE = re.compile(r"lease-(\d{12})\.([0-9a-f]{12})")
_PIN = re.compile(r"pin-(\d{12})")


class _Listing(msgspec.Struct, frozen=True):
    """What is in the bucket at one moment."""

    claims: Mapping[int, datetime]
    holders: Mapping[int, Mapping[str, Place | datetime]]
    """By serial number and name: the place of a checkpoint, or when a lease was last written. One without a claim is of
    a save that goes on, or was killed."""
    pins: frozenset[int]


class Bucket:
    """A prefix of a bucket. Objects do not change, and a checkpoint gets its claim when all of them are there.

    Its methods are those of `LocalBackend`.
    """

    is_lazy = True

    def __init__(self, directory: str) -> None:
        self._root = locate(directory)
        self.lock = _Lease(self)
        self._names: dict[tuple[int, datetime], str] = {}
        """What has a serial number, where the listing leaves that open. Claims do not change."""
        self._last_serial = 0
        self.listed = _Listing({}, {}, frozenset())
        self._cleared_for = ""

    def at(self, name: str) -> Location:
        return self._root.below(name)

    def check_no_object(self) -> None:
        """Raises `UnsavableError` where the name of the directory is that of an object."""
        if self._root.key and head(self._root) is not None:
            raise UnsavableError(
                "a store is a directory", where=self._root.url, found="an object", remedy="take another path"
            )

    def listing(self) -> _Listing:
        """Lists the bucket. Raises `WriteFailedError`."""
        directories, objects = listing(self._root)
        claims, holders, pins = {}, defaultdict[int, dict[str, Place | datetime]](dict), set()
        files = self.at(DATA).url
        for name in directories:
            if match := _STEP.fullmatch(name):
                place = Place(int(match[1]), int(match[2]), self.at(name).url, files)
                holders[place.revision][name] = place
        for item in objects:
            if match := _CLAIM.fullmatch(item.name):
                claims[int(match[1])] = item.time
            elif match := _LEASE.fullmatch(item.name):
                holders[int(match[1])][item.name] = item.time
            elif match := _PIN.fullmatch(item.name):
                pins.add(int(match[1]))
        self.listed = _Listing(claims, holders, frozenset(pins))
        return self.listed

    def holder(self, listed: _Listing, serial: int) -> tuple[str, Place | datetime | None]:
        """Returns the checkpoint or the lease that has a serial number, and its name; None where there is none.

        Where only one was written, it has it. Where several writers have tried to, the claim names one of them.
        """
        holders = listed.holders[serial]
        if serial not in listed.claims:
            return "", None
        key = serial, listed.claims[serial]
        if len(holders) > 1 and key not in self._names:
            content = get(self.at(f"claim-{serial:012d}"))
            self._names[key] = str(_fields(content).get("name", ""))
        name = self._names.get(key, next(iter(holders)))
        return name, holders.get(name)

    def places(self) -> list[Place]:
        listed = self.listing()
        if not listed.claims:
            self.check_no_object()
        holders = (self.holder(listed, serial)[1] for serial in listed.holders)
        return sorted(place for place in holders if isinstance(place, Place))

    def identity(self, path: str) -> object:
        return True  # its name has a nonce

    contents = identity

    def is_gone(self, path: str) -> bool:
        match = _STEP.fullmatch(os.path.basename(path))
        with suppress(WriteFailedError):  # the error of what is read next says more
            return match is None or get(self.at(f"claim-{match[2]}")) is None
        return False

    def is_pinned(self, place: Place) -> bool:
        return place.revision in self.listed.pins

    def problem_of(self, place: Place, files: Mapping[str, FileRecord]) -> str:
        return ""

    def is_untouched(self, path: str, record: FileRecord) -> bool:
        return True

    # Writing.

    def make(self) -> None:
        """Does nothing: a bucket is made elsewhere, and a prefix needs no directory."""

    def probe(self) -> None:
        """Does nothing: the lease was written, and the server has shown that it keeps conditions."""

    def free_bytes(self) -> None:
        return None

    def write_name(self, text: bytes) -> None:
        put(self.at(STORE_FILE), text, overwrite=True)

    def serial(self, last: int) -> int:
        # A listing may be old: the numbers that this process has claimed count in any case. A listing that shows the
        # lease of another writer gives no number: the next one would be free, and the claim would not fail.
        listed = self.listed
        self.lock.check_listing(listed)
        self._last_serial = max(self._last_serial, *listed.claims, last)
        return self._last_serial + 1

    def new_step(self, name: str, step: int, serial: int, revisions: Sequence[Place]) -> NewObjects:
        return NewObjects(self, self.lock, step, serial)

    def claim(self, serial: int, name: str) -> None:
        """Gives a serial number to a checkpoint or a lease. Raises `TargetExistsError` where another writer has it."""
        content = json.dumps({"name": name, "lease": self.lock.name, "nonce": secrets.token_hex(8)}).encode()
        put(self.at(f"claim-{serial:012d}"), content, overwrite=False)
        self._last_serial = max(self._last_serial, serial)

    def set_pin(self, place: Place, pinned: bool) -> None:
        pin = self.at(f"pin-{place.revision:012d}")
        if pinned:
            put(pin, b"", overwrite=True)
        else:
            remove([pin])

    def discard(self, removed: Sequence[Place], names: Set[str], kept: Callable[[], Set[str] | None]) -> None:
        if not removed:
            return
        self.lock.confirm()
        remove([self.at(f"claim-{place.revision:012d}") for place in removed])
        remove([locate(f"{place.path}/{RECORD_FILE}") for place in removed])
        remove([self.at(f"pin-{place.revision:012d}") for place in removed if self.is_pinned(place)])
        referenced = kept()
        if referenced is not None:
            remove([self.at(f"{DATA}/{name}") for name in sorted(names - referenced)])

    def clear(self, kept: Callable[[], Set[str] | None]) -> None:
        """Removes what is older than `LEFTOVER_SECONDS` and belongs to no checkpoint; once for each lease."""
        if self._cleared_for == self.lock.name:
            return
        self._cleared_for = self.lock.name
        with suppress(WriteFailedError, ReadFailedError):
            lease = head(self.at(self.lock.name)) if self.lock.name else None
            if lease is None:
                return
            now, every = lease["last_modified"], list_all(self._root)  # by the clock of the server
            old = [item.name for item in every if now - item.time > timedelta(seconds=LEFTOVER_SECONDS)]
            committed = {os.path.basename(place.path) for place in self.places()}
            nonces = {name.rpartition(".")[2] for name in committed}
            records = [name for name in old if name.endswith(f"/{RECORD_FILE}") and name.split("/")[0] not in committed]
            files = [name for name in old if name.startswith(f"{DATA}/") and not nonces & set(name.split("."))]
            if files:
                referenced = kept()
                files = [name for name in files if referenced is not None and name[len(DATA) + 1 :] not in referenced]
            remove([self.at(name) for name in (*records, *files)])


class NewObjects:
    """The objects of a checkpoint that is being written. Its record names those of earlier checkpoints, as links."""

    def __init__(self, bucket: Bucket, lease: _Lease, step: int, serial: int) -> None:
        self._bucket, self._lease, self._serial = bucket, lease, serial
        self._nonce = secrets.token_hex(6)
        self._name = f"step-{step:09d}.{serial:012d}.{self._nonce}"
        self.path = bucket.at(self._name).url
        self._written: list[Location] = []
        self._may_be_visible = False

    def _new(self, name: str) -> Location:
        self._written.append(self._bucket.at(name))
        return self._written[-1]

    def write_text(self, name: str, text: bytes) -> tuple[str, FileRecord]:
        suffix = SUFFIX + INDEX_SUFFIX
        name = f"{name.removesuffix(suffix)}.{self._nonce}{suffix}"
        with new_object(self._new(f"{DATA}/{name}"), len(text), overwrite=True) as output:
            output.append(text)
        return name, FileRecord(len(text), 0, len(text), digest(text))

    def begin(self, key: str) -> str:
        return self._new(f"{DATA}/{key}-{len(self._written):05d}.{self._nonce}{SUFFIX}").url

    def write(self, path: str, planned: FileLayout) -> Written:
        return write_in_order(lambda _: new_object(locate(path), planned.nbytes, overwrite=True), planned)

    def finish(self, path: str, key: str, written: Written, nbytes: int) -> tuple[str, FileRecord]:
        return path.rpartition("/")[2], FileRecord(nbytes, 0, len(written.header), digest(written.header))

    def link(self, file: str) -> bool:
        return True

    def unlink(self, name: str) -> None:
        """Does nothing: the record does not name the file."""

    def commit(self, text: bytes, files: Set[str], pinned: bool, check: Callable[[], object]) -> str:
        pin = f"pin-{self._serial:012d}"
        if pinned:
            put(self._new(pin), b"", overwrite=True)
        elif self._serial in self._bucket.listed.pins:  # left by a save that failed with this number
            remove([self._bucket.at(pin)])
        put(self._new(f"{self._name}/{RECORD_FILE}"), text, overwrite=True)
        check()
        self._may_be_visible = True
        try:
            self._bucket.claim(self._serial, self._name)
        except TargetExistsError as error:
            self._may_be_visible = False
            raise self._lease.lost() from error
        return self.path

    def discard(self) -> None:
        if not self._may_be_visible:  # without an answer to the claim, the checkpoint may become visible later
            with suppress(WriteFailedError), cleanup():
                remove(self._written)


class _Lease:
    """The right of one writer to change the store: the newest lease among the claims, which is written regularly."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.name = ""
        self._serial = self._pid = 0
        self._beat: weakref.finalize[[], _Lease] | None = None

    @property
    def held(self) -> bool:
        return self._beat is not None and self._beat.alive and self._pid == os.getpid()

    def acquire(self) -> None:
        """Acquires the lease; waits for the end of one whose holder gives no sign of life.

        Raises:
            LockedError: Another process holds the lease, and renews it.
            UnsavableError: There is no store yet, and the name is that of an object.
            WriteFailedError: The bucket cannot be written to, or does not keep conditions.
        """
        nonce, seen = secrets.token_hex(6), None
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), "since": time.time()}
        for _ in range(_TRIES):
            listed = self._bucket.listing()
            if not listed.claims:
                self._bucket.check_no_object()
            serial = max(listed.claims, default=0) + 1
            name, text = f"lease-{serial:012d}.{nonce}", json.dumps({**holder, "nonce": nonce}).encode()
            intent, stop = self._bucket.at(name), threading.Event()
            try:
                put(intent, text, overwrite=True)
                while (other := self._newest(listed)) is not None:
                    left = LEASE_SECONDS
                    if (own := head(intent)) is not None:
                        left -= (own["last_modified"] - other[1]).total_seconds()
                    if left <= 0 or not _is_alive(found := get(self._bucket.at(other[0]))):
                        break
                    if seen is not None and seen != other:
                        raise self._locked(found)
                    seen = other
                    pause(min(left, LEASE_SECONDS / 10))
                    put(intent, text, overwrite=True)
                    listed = self._bucket.listing()
                self._bucket.claim(serial, name)
                self._check_conditions(serial)
                arguments = (intent, text, stop, LEASE_SECONDS / 4)
                renewal = threading.Thread(target=_renew, args=arguments, name="modelstate lease", daemon=True)
                # In a function of `atexit` no thread can be started: what a program saves there is short.
                if not try_start(renewal) and threading.main_thread().is_alive():
                    raise WriteFailedError(
                        "no thread can be started, which renews the lease of the store during a save",
                        where=self._bucket.at("").url,
                        remedy="end other threads of this program, or allow more: ulimit -u, or the limit of the "
                        "container",
                    )
            except TargetExistsError:
                remove([intent])
                continue  # another writer was faster
            except BaseException:
                stop.set()  # an interrupt may have come when the thread ran
                # The next writer need not wait for a lease that is released. Its object stays where its claim may be
                # there: without it the claim would count as that of a step that a killed writer has left.
                with suppress(WriteFailedError), cleanup():
                    put(intent, _RELEASED, overwrite=True)
                    if get(self._bucket.at(f"claim-{serial:012d}")) is None:
                        remove([intent])
                raise
            self.name, self._serial, self._pid = name, serial, os.getpid()
            self._beat = weakref.finalize(self, stop.set)
            return
        raise self._locked(None)

    def _check_conditions(self, serial: int) -> None:
        """Raises `WriteFailedError` where the server writes an object in spite of `If-None-Match: *`."""
        try:
            put(self._bucket.at(f"claim-{serial:012d}"), b"{}", overwrite=False)
        except TargetExistsError:
            return
        with suppress(WriteFailedError):
            remove([self._bucket.at(f"claim-{serial:012d}")])
        raise WriteFailedError(
            "the server of this bucket ignores the condition If-None-Match, which keeps two writers apart",
            where=self._bucket.at("").url,
            expected="status 412 for an object that exists",
            found="the object was replaced",
            remedy="take a bucket of another provider, or a directory; ms.save needs no conditions",
        )

    def release(self) -> None:
        """Ends the lease, so that the next writer need not wait."""
        if self.held and self._beat is not None:
            self._beat()
            with suppress(WriteFailedError), cleanup():
                put(self._bucket.at(self.name), _RELEASED, overwrite=True)

    def confirm(self) -> None:
        """Raises `LockedError` where another writer has taken the lease over."""
        listed = self._bucket.listing()
        if not self.held or self._newest(listed) is None:
            raise self.lost()
        self.check_listing(listed)

    def check_listing(self, listed: _Listing) -> None:
        """Raises `LockedError` where a listing shows that another writer has taken the lease over."""
        newest = self._newest(listed)
        if newest is not None and newest[0] > self.name:
            raise self.lost()

    def check_directory(self) -> None:
        """Does nothing: the claim of a checkpoint is the check."""

    def lost(self) -> LockedError:
        """Ends this lease, and returns the error for it."""
        if self._beat is not None:
            self._beat()
        newest = None
        with suppress(WriteFailedError):
            newest = self._newest(self._bucket.listing())
        return self._locked(get(self._bucket.at(newest[0])) if newest is not None and newest[0] != self.name else None)

    def _newest(self, listed: _Listing) -> tuple[str, datetime] | None:
        """Returns the name of the newest lease, and when it was last written."""
        for serial in sorted(listed.holders, reverse=True):
            name, written = self._bucket.holder(listed, serial)
            if isinstance(written, datetime):
                return name, written
        return None

    def _locked(self, holder: bytes | None) -> LockedError:
        return LockedError(
            "another writer uses this store",
            where=self._bucket.at("").url,
            expected="one writer at a time",
            found=holder_text(holder or b"{}", "a writer that has taken the lease over"),
            remedy="end the other writer, or take another prefix; the lease of a writer that has ended expires after "
            f"{LEASE_SECONDS:g} s",
        )


def _renew(location: Location, text: bytes, stop: threading.Event, seconds: float) -> None:
    while not stop.wait(seconds):
        with suppress(Exception):  # a lease that cannot be renewed expires
            put(location, text, overwrite=True)


def _boot() -> str:
    """Returns what identifies the boot of the machine, and the container, in which the ids of processes are valid."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return file.read().strip() + os.readlink("/proc/self/ns/pid")
    return ""


def _is_alive(holder: bytes | None) -> bool:
    """Whether the holder of a lease may be alive: it has not released it, and is not a process that ended here."""
    fields = _fields(holder)
    if fields.get("released") or holder is None:
        return False
    if (fields.get("host"), fields.get("boot")) != (socket.gethostname(), _boot()):
        return True
    try:
        os.kill(int(fields["pid"]), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        pass
    return True


def _fields(holder: bytes | None) -> dict[str, Any]:
    try:
        fields = json.loads(holder or b"{}")
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
