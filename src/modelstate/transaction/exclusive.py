"""The lock under which a model is changed: loads and conversions by several threads wait for one another.

Two models conflict when they share a module, a tensor or a storage. Changes of models that do not conflict run at the
same time; a change within another one, in the same thread, runs at once. Locks are registered by weak references, so
that a lock ends with its object. A forked child drops the locks of threads that it does not have.
"""

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import torch
from torch import nn

from modelstate.errors import ModelBusyError
from modelstate.process import fork_safe_lock
from modelstate.torch_compat.modules import modules_of, own_buffers, own_parameters
from modelstate.torch_compat.private import payload_of, storage_id

_POLL_SECONDS = 0.1
"""The interval in which a waiting thread looks whether a lock has ended without a release."""
_TIMEOUT_SECONDS = 600.0
"""The limit of a wait. The owner of a lock may wait for this thread in a way that cannot be seen, as a hook may."""

_held: list["weakref.ref[exclusive]"] = []
_waiting: dict[int, set[int]] = {}
"""By waiting thread, the threads that it waits for."""


class exclusive:
    """A context manager: no other thread changes the models, or what they share with others, through this library.

    Its end rolls back the transactions within it that an interrupt has kept from ending.

    Raises `ModelBusyError` when threads would wait for each other, or when the wait exceeds ten minutes.
    """

    __slots__ = ("__weakref__", "_ids", "_models", "_released", "_thread", "rollbacks")

    def __init__(self, *models: nn.Module) -> None:
        self._thread = threading.get_ident()
        self._models = models
        self._ids: set[int] | None = None
        self.rollbacks: list[Callable[[], None]] = []
        """The rollbacks of the transactions within it that have not ended."""
        self._released = threading.Lock()
        self._released.acquire()

    def __enter__(self) -> None:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        try:
            while (released := self._acquire()) is not None:
                if time.monotonic() >= deadline:
                    raise self._busy(f"it has been for {_TIMEOUT_SECONDS:.0f} seconds")
                if released.acquire(timeout=_POLL_SECONDS):
                    released.release()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        finally:
            _waiting.pop(self._thread, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for rollback in reversed(self.rollbacks):
                rollback()
        finally:
            self.rollbacks.clear()
            with _guard:
                _held[:] = [reference for reference in _held if reference() not in (None, self)]
            with suppress(RuntimeError):  # it has been released
                self._released.release()

    def _acquire(self) -> "threading.Lock | None":
        """Acquires the lock, or returns what is released when a conflicting lock ends."""
        with _guard:
            others = [lock for lock in _locks() if lock._thread != self._thread]
            conflicts = [lock for lock in others if not self._shared_ids().isdisjoint(lock._shared_ids())]
            if not conflicts:
                _held.append(weakref.ref(self))
                return None
            _waiting[self._thread] = {lock._thread for lock in conflicts}
            reachable, stack = set[int](), [*_waiting[self._thread]]
            while stack:
                thread = stack.pop()
                if thread not in reachable:
                    reachable.add(thread)
                    stack += _waiting.get(thread, ())
            if self._thread in reachable:
                raise self._busy("it waits for this thread to end another change")
            return conflicts[0]._released

    def _busy(self, found: str) -> ModelBusyError:
        return ModelBusyError(
            "another thread is changing the module, or one that shares tensors with it; nothing has been changed",
            where=", ".join(type(model).__name__ for model in self._models),
            found=found,
            remedy="load, convert and restore a module in one thread, and not in a hook that waits for another thread",
        )

    def _shared_ids(self) -> set[int]:
        """The ids of modules, tensors and storages. They are computed only when two threads change models at once."""
        if self._ids is None:
            ids = set(map(id, self._models))
            for model in self._models:
                for _ in range(100):
                    with suppress(RuntimeError):  # the owner of a dict has changed it meanwhile
                        ids |= _ids_of(model)
                        break
            self._ids = ids
        return self._ids


def innermost_lock() -> exclusive | None:
    """Returns the lock that this thread has acquired last and not released."""
    thread = threading.get_ident()
    with _guard:
        return next((lock for lock in reversed(_locks()) if lock._thread == thread), None)


def _locks() -> list[exclusive]:
    return [lock for reference in _held if (lock := reference()) is not None]


def _ids_of(model: nn.Module) -> set[int]:
    modules = modules_of(model)
    tensors = [
        tensor
        for module in modules
        for tensor in (*own_parameters(module).values(), *own_buffers(module).values())
        if tensor is not None
    ]
    plain = [tensor for tensor in tensors if not torch.nn.parameter.is_lazy(tensor)]
    storages = {storage_id(part) for tensor in plain for part in payload_of(tensor)} - {0}
    return {*map(id, modules), *map(id, tensors), *storages}


def _in_child(thread: int) -> None:
    _held[:] = [reference for reference in _held if (lock := reference()) is not None and lock._thread == thread]
    _waiting.clear()


_guard = fork_safe_lock(_in_child)
