"""Swaps in weights from a directory: checks the paths, and makes one change at a time."""

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
        """Takes the directory of checkpoints, and `first`, the source of the first version's weights."""
        self._live, self._directory, self._first = live, directory, first
        self._lock = threading.Lock()

    @property
    def current(self) -> tuple[int, str, float]:
        """The serving version, the source of its weights, and when it was made, in seconds since 1970."""
        version = self._live.version()
        return version.id, self._first if version.id == 1 else version.source, version.time

    def swap(self, source: object) -> ms.serve.SwapReport:
        """Swaps in the weights of a path.

        Raises `BadRequestError`, `OutsideError`, `NoSuchPathError`, and the errors of `ms.open` and `Live.swap`.
        """
        path = self._path(source)
        self._check_links(path)
        with self._one_at_a_time(), ms.open(path) as checkpoint:
            for file in checkpoint.files:  # again: a link may have been replaced since
                self._check_inside(os.path.realpath(file))
            return self._live.swap(
                checkpoint,
                rules=rules_for(checkpoint),
                canary=ms.Canary(sample()),
                verify=bool(checkpoint.checksums),
            )

    def rollback(self) -> int:
        """Serves the previous version again, and returns its number. Raises `VersionGoneError`, `SwapBusyError`."""
        with self._one_at_a_time():
            return self._live.rollback()

    def _path(self, source: object) -> str:
        """Returns the path without symbolic links. A relative path is under the directory."""
        if not isinstance(source, str) or not source:
            raise BadRequestError('"source" must be the path of a checkpoint, a text that is not empty')
        try:
            path = os.path.realpath(os.path.join(self._directory, source))
            exists = os.path.exists(path)
        except ValueError as error:  # a null character, or a lone surrogate
            raise BadRequestError(f'"source" is not a valid path: {error}') from error
        # Checked first, so that an answer does not tell whether a path outside the directory exists.
        self._check_inside(path)
        if not exists:
            raise NoSuchPathError(f"{source} does not exist in the directory of checkpoints")
        return path

    def _check_links(self, path: str) -> None:
        """Raises `OutsideError` if opening the path could read a file outside of the directory. Opens no file.

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
            raise OutsideError("the path is not under the directory of checkpoints that the server was started with")

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise SwapBusyError("another swap is running", remedy="try again later")
        try:
            yield
        finally:
            self._lock.release()
