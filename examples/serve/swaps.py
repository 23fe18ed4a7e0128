"""New weights from a directory: which paths are allowed, and one change at a time."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import modelstate as ms
from examples.serve.program import rules_for, sample
from examples.serve.refusals import BadRequestError, NoSuchPathError, OutsideError
from modelstate.errors import SwapBusyError


class Swaps:
    """Changes the weights of a live program. Every method may be called from any thread."""

    def __init__(self, live: ms.Live, directory: Path, first: str) -> None:
        """`first` is where the weights come from that the program was made with."""
        self._live, self._directory, self._first = live, directory, first
        self._turn = threading.Lock()

    @property
    def current(self) -> tuple[int, str, float]:
        """The version that serves, where its weights come from, and the time at which it was made."""
        version, source, time = self._live.serving
        return version, self._first if version == 1 else source, time

    def swap(self, source: object) -> ms.serve.SwapReport:
        """Raises `BadRequestError`, `OutsideError`, `NoSuchPathError`, and what `ms.open` and `Live.swap` raise."""
        path = self._path(source)
        self._check_links(path)
        with self._one_at_a_time(), ms.open(path) as checkpoint:
            for file in checkpoint.files:  # once more: a link may have been replaced meanwhile
                self._check_inside(os.path.realpath(file))
            report = self._live.swap(
                checkpoint,
                rules=rules_for(checkpoint),
                canary=ms.Canary(sample()),
                verify=bool(checkpoint.checksums),
                when_busy="skip",
            )
        if report is None:
            raise SwapBusyError("another swap is under way", remedy="try again later")
        return report

    def rollback(self) -> int:
        """Raises `VersionGoneError`, `SwapBusyError`."""
        with self._one_at_a_time():
            return self._live.rollback()

    def _path(self, source: object) -> str:
        """The path that is meant, without symbolic links; a relative one is under the directory."""
        if not isinstance(source, str) or not source:
            raise BadRequestError('"source" is the path of a checkpoint')
        try:
            path = os.path.realpath(os.path.join(self._directory, source))
            there = os.path.exists(path)
        except ValueError as error:  # a null character, or half of a surrogate pair
            raise BadRequestError(f'"source" is no path: {error}') from error
        # Before anything is said of what is there: nobody shall find out what lies elsewhere.
        self._check_inside(path)
        if not there:
            raise NoSuchPathError(f"there is nothing at {source}")
        return path

    def _check_links(self, path: str) -> None:
        """Raises `OutsideError` where opening the path could read a file outside, before anything is opened.

        `ms.open` looks into all files of a directory. The shards that an index names lie below the directory of the
        index, or in the repository of a Hugging Face cache whose snapshot the index lies in.
        """
        if not os.path.isdir(path):
            repository, is_snapshot, _ = path.rpartition(os.path.join(os.sep, "snapshots", ""))
            if is_snapshot and path.endswith(".json"):
                self._check_inside(repository)
            return
        try:
            entries = list(os.scandir(path))
        except OSError as error:
            raise NoSuchPathError("the directory cannot be read") from error
        for entry in entries:
            if entry.is_symlink() and not os.path.isdir(entry.path):
                self._check_inside(os.path.realpath(entry.path))

    def _check_inside(self, path: str) -> None:
        directory = os.path.realpath(self._directory)
        if os.path.commonpath([directory, path]) != directory:
            raise OutsideError("weights are taken only from under the directory that the server was started with")

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise SwapBusyError("another swap is under way", remedy="try again later")
        try:
            yield
        finally:
            self._turn.release()
