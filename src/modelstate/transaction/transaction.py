"""The transaction: one journal for every change to live objects, which commits all changes or undoes all of them.

A load runs code of the model: hooks, `_load_from_state_dict` overrides, `module_load` handlers, `set_extra_state`.
That code expects that every earlier write has happened, as in torch, and all writes must be undone if the load fails
later. To copy the bytes of all tensors first would make every load slow and twice as large, although model code rarely
reads a tensor. So writes wait. While model code runs, a `TorchFunctionMode` sees which tensors it uses: before the
first use of a tensor, the transaction copies its bytes and runs the writes that wait for it.

Changes of one model by several threads wait for one another, under the lock `exclusive`. Two models conflict when they
share a module, a tensor or a storage. Changes of models that do not conflict run at the same time; a change within
another one, in the same thread, runs at once. A forked child drops the locks of threads that it does not have.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from modelstate.errors import ModelBusyError, ModelStateError, RollbackError
from modelstate.forks import at_fork, fork_safe_lock
from modelstate.process import deferred_signals
from modelstate.text_format import listed
from modelstate.torch_compat.modules import modules_of, tensors_of
from modelstate.torch_compat.plain import has_dispatch
from modelstate.torch_compat.private import (
    drop_frozen_code,
    payload_of,
    storage_id,
    storage_of,
    without_modes,
    without_subclasses,
)
from modelstate.transaction.object_snapshot import ObjectSnapshot, put_back, tensor_state

_log = logging.getLogger("modelstate")


class Write:
    """A write to a tensor of the model that may wait until the commit: a copy, a call, or what a subclass does."""

    __slots__ = ("call", "done", "target", "value")

    def __init__(
        self, target: torch.Tensor, value: torch.Tensor, call: Callable[[Transaction | None], None] | None = None
    ) -> None:
        self.target, self.value, self.call = target, value, call
        self.done = False

    def run(self, transaction: Transaction | None) -> None:
        """Writes the value. With a transaction, it registers the undo first; without one, it cannot fail."""
        if self.call is not None:
            self.call(transaction)
            return
        if transaction is not None:
            transaction.save_tensor(self.target)
        with torch.no_grad():
            self.target.copy_(self.value)


class Transaction:
    """The changes of one load, conversion or restore, as a context manager: `commit` keeps them, all else undoes them.

    A block that ends without `commit`, by an error or not, leaves the model as it was before. An interrupt during the
    undo, or before it starts, does not prevent the undo.

    Args:
        root: The model, or a container of several models. Model code may change every object that it refers to.

    Examples:
        >>> with exclusive(model), Transaction(model) as transaction:
        ...     transaction.add(write)
        ...     transaction.commit()
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.others: list[object] = []
        """Optimizers, which code of the model and of other objects may also change."""
        self.writes: list[Write] = []
        """All writes, in order; those that have run are `done`."""
        self.used_storages: set[int] = set()
        """The `storage_id` of each storage that model code has used, of the model or not."""
        self.notes: list[str] = []
        """What a report says of the commit."""
        self.armed = False
        """Whether model code may have run, so that `ObjectSnapshot` has recorded the objects."""
        self.reads_values = False
        """Whether other code will read tensors within the transaction: each value then needs a write of its own."""
        self.ended = False
        """Whether it has been committed or undone."""
        self._without_modes = ExitStack()
        """Ends with the transaction; from the commit on, it keeps the modes of torch out."""
        self._grad_enabled = torch.is_grad_enabled()
        self._at_commit: list[Callable[[], None]] = []
        self._undo: list[Callable[[], object]] = []
        self._snapshot: ObjectSnapshot | None = None
        self._storages: set[int] = set()
        """The storages of the tensors in the snapshot."""
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """By storage id: the storage and a copy of its bytes."""
        self._saved_whole: set[int] = set()
        self._to_protect: list[torch.Tensor] = []
        self._protected: set[int] = set()
        self._waiting: dict[int, list[int]] = {}
        """The places in `writes` of those that wait, by the keys of their tensors (`_keys`)."""
        self._entangled = False
        """Whether a write reads memory of the model, so that all writes have to run in order."""
        self._guard: _Guard | None = None
        """Sees the tensors that model code uses; None until model code runs."""

    def __enter__(self) -> Self:
        # Python handles signals at the start of a function, so an interrupt can end `__exit__` before its first
        # statement. Then the end of the lock that this thread has acquired last rolls back.
        for lock in _locks_of_thread()[-1:]:
            lock.rollbacks.append(self.rollback)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rollback()

    def commit(self) -> None:
        """Runs the waiting writes, and then what `at_commit` has registered. Nothing can be undone afterwards.

        All that still waits has been checked: each write is a copy between existing memory. No code of a user runs:
        signal handlers wait, and the modes of torch that are active are left. They are entered again when the
        transaction ends, so that they cannot stop a caller that describes what has been done.
        """
        with deferred_signals(), torch.no_grad():
            self._without_modes.enter_context(without_modes())
            self._waiting.clear()
            for write in self.writes:
                if not write.done:
                    write.run(None)
            for function in self._at_commit:
                function()
            self.notes += drop_frozen_code()
            self._end()

    def rollback(self) -> None:
        """Undoes everything in reverse order, with signals deferred. After a commit or a rollback it does nothing.

        Raises `RollbackError` when steps of the undo raise; all other steps have run.
        """
        if self.ended:
            self._without_modes.close()
            return
        failures: list[Exception] = []
        unreadable = {} if self._snapshot is None else dict.fromkeys(self._snapshot.unreadable)
        with deferred_signals(), self._without_modes:
            with without_modes():
                steps = self._undo[::-1]
                steps += [partial(_restore_bytes, *copy) for copy in self._saved.values()]
                for step in steps:
                    try:
                        step()
                    except Exception as error:
                        failures.append(error)
                torch.set_grad_enabled(self._grad_enabled)  # an interrupted `torch.no_grad` may have left it off
            self._end()
        if unreadable:
            _log.warning(
                "changes that code of %s may have made to objects of these classes are not undone, because reading "
                "their attributes raises: %s",
                type(self.root).__name__,
                listed(unreadable, 8),
            )
        if failures:
            raise RollbackError(
                f"{len(failures)} changes could not be undone; all others have been",
                where=type(self.root).__name__,
                found=failures[0],
                remedy="the error before this one says what went wrong first; build the model again",
            ) from failures[0]

    def _end(self) -> None:
        """Drops all references, so that no cycle keeps staged values until the next garbage collection."""
        self.ended = True
        for collection in (self.writes, self._waiting, self._undo, self._at_commit, self._to_protect, self._saved):
            collection.clear()
        self._snapshot = None

    # Changes of the library.

    def add(self, *writes: Write) -> None:
        """Adds writes that wait."""
        self.writes += writes
        if self.armed:
            self._watch(len(self.writes) - len(writes))

    def run_now(self, write: Write) -> None:
        """Runs a write at once, after the writes that it depends on."""
        self.arm()
        if self._entangled or self._reads_model(write):
            self._run_all()
        self._run_waiting((*_keys(write.target), *_keys(write.value)))
        self.run(write)
        self.writes.append(write)

    def register_undo(self, undo: Callable[[], object]) -> None:
        """Registers how to undo a change. A rollback calls it once."""
        self._undo.append(undo)

    def change(self, change: Callable[[], Callable[[], object]]) -> None:
        """Makes a change of a tensor, which returns its undo. An interrupt comes before both or after both."""
        with deferred_signals():
            self._undo.append(change())

    def at_commit(self, function: Callable[[], None]) -> None:
        """Registers what a commit calls after the writes, in the order of the calls. It must not raise."""
        self._at_commit.append(function)

    def save_tensor(self, tensor: torch.Tensor) -> None:
        """Saves the bytes of a tensor, once, and its metadata."""
        self.save_metadata(tensor)
        with without_subclasses():
            for part in payload_of(tensor):
                self._save_bytes(part)
            self._save_whole(tensor)

    def save_metadata(self, tensor: torch.Tensor) -> None:
        """Saves class, storage, shape, hooks and gradient of a tensor, for a write that leaves the old memory alone."""
        with without_subclasses():
            self._undo.append(tensor_state(tensor))

    def protect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Restores the bytes of these tensors too, although the model does not refer to them, if model code uses them.

        Their storages are looked up at the first use of a tensor by model code.
        """
        self._to_protect.extend(tensors)

    def _save_whole(self, tensor: torch.Tensor) -> None:
        """Saves a copy of a tensor that is not a view of one storage: a sparse one, or one in a library's layout."""
        has_no_storage = not storage_id(tensor) and not has_dispatch(tensor) and not torch.nn.parameter.is_lazy(tensor)
        if has_no_storage and id(tensor) not in self._saved_whole:
            self._saved_whole.add(id(tensor))
            self._undo.append(partial(put_back, tensor, tensor.detach().clone()))

    def _save_bytes(self, tensor: torch.Tensor) -> None:
        key = storage_id(tensor)
        if key and key not in self._saved and tensor.device.type != "meta":
            storage: Any = storage_of(tensor)
            self._saved[key] = (storage, storage.clone())

    # Model code.

    def arm(self) -> None:
        """Records all objects that the model refers to, before anything runs that could change them."""
        if not self.armed:
            self.armed = True
            with without_modes():
                self._snapshot = ObjectSnapshot(self.root.modules(), self.others)
            self._undo += reversed(self._snapshot.restores)
            self._storages = {storage_id(tensor) for tensor in self._snapshot.tensors.values()} - {0}
            self._watch(0)

    @contextmanager
    def model_code(self) -> Iterator[None]:
        """A block that runs model code: the code sees every earlier write, and its changes can be undone."""
        self.arm()
        if self._guard is None:
            self._guard = _Guard(weakref.ref(self))
        with self._guard.watching(True):
            yield

    @contextmanager
    def library_code(self) -> Iterator[None]:
        """A block within `model_code`, for a call of model code back into the library."""
        with nullcontext() if self._guard is None else self._guard.watching(False):
            yield

    def before_use(self, tensor: torch.Tensor) -> None:
        """Called before model code uses a tensor."""
        self._protected.update(storage_id(part) for protected in self._to_protect for part in payload_of(protected))
        self._to_protect.clear()
        keys = _keys(tensor)
        if len(keys) == 1:  # a wrapper, whose parts have the storages
            keys += tuple(key for part in payload_of(tensor) for key in _keys(part))
        self.used_storages.update(keys[1:])
        if self._entangled:
            self._run_all()
        self._run_waiting(keys)
        for part in payload_of(tensor):
            if storage_id(part) in self._storages or storage_id(part) in self._protected:
                self._save_bytes(part)
        if self._snapshot is not None and id(tensor) in self._snapshot.tensors:
            self._save_whole(tensor)

    def before_backward(self) -> None:
        """Called before model code runs a backward pass, which adds to existing gradients."""
        for tensor in list(self._snapshot.tensors.values() if self._snapshot else ()):
            with without_subclasses():
                grad = tensor.grad if tensor.is_leaf else None
            if grad is not None:
                for part in payload_of(grad):
                    self._save_bytes(part)

    # The order of the writes.

    def _watch(self, first: int) -> None:
        """Has the writes from this place on run before model code uses their tensors."""
        for place, write in enumerate(self.writes[first:], first):
            self._entangled = self._entangled or self._reads_model(write)
            for key in {*_keys(write.target), *_keys(write.value)}:
                self._waiting.setdefault(key, []).append(place)

    def _reads_model(self, write: Write) -> bool:
        return storage_id(write.value) in self._storages

    def _run_waiting(self, keys: Iterable[int]) -> None:
        """Runs the waiting writes that have one of the keys, in order."""
        for place in sorted({place for key in keys for place in self._waiting.pop(key, ())}):
            self.run(self.writes[place])

    def _run_all(self) -> None:
        self._waiting.clear()
        for write in self.writes:
            self.run(write)

    def run(self, write: Write) -> None:
        """Runs a write before the commit, outside of the modes of torch, unless it has run."""
        if not write.done:
            with without_modes():
                write.run(self)
            write.done = True


def _restore_bytes(storage: torch.UntypedStorage, saved: torch.UntypedStorage) -> None:
    with without_subclasses(), torch.no_grad():
        if storage.nbytes() != saved.nbytes():
            storage.resize_(saved.nbytes())
        storage.copy_(saved, non_blocking=False)


def _keys(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the keys of a tensor: its id, and the id of its storage, which its aliases share."""
    storage = storage_id(tensor)
    return (id(tensor), storage) if storage else (id(tensor),)


class _Guard(TorchFunctionMode):
    """Sees every use of a tensor through torch's functions and methods while model code runs."""

    def __init__(self, transaction: weakref.ref[Transaction]) -> None:
        super().__init__()
        self._transaction = transaction
        self._watching: bool | None = None
        """None outside of all blocks."""

    @contextmanager
    def watching(self, on: bool) -> Iterator[None]:
        before, self._watching = self._watching, on
        try:
            with self if before is None else nullcontext():
                yield
        finally:
            self._watching = before

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Iterable[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        transaction = self._transaction() if self._watching else None
        if transaction is not None and func not in _HARMLESS:
            if func in _BACKWARD:
                transaction.before_backward()
            for tensor in _tensors((*args, *kwargs.values()), 0):
                transaction.before_use(tensor)
        return func(*args, **kwargs)


def _tensors(values: Iterable[object], depth: int) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth < 3 and isinstance(value, list | tuple):
            yield from _tensors(value, depth + 1)
        elif depth < 3 and isinstance(value, dict):
            yield from _tensors(value.values(), depth + 1)


_BACKWARD = (torch.Tensor.backward, torch.autograd.backward)

_HARMLESS = frozenset(
    [
        getattr(torch.Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_meta"),
            *("is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "is_cuda", "is_cpu", "_version"),
        )
    ]
    + [
        getattr(torch.Tensor, name)
        for name in (
            *("size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
            *("element_size", "__len__", "__hash__", "is_conj", "is_neg", "is_inference", "storage_offset"),
        )
    ]
)
"""Functions that read the metadata of a tensor only, and change nothing."""


# The lock.

_POLL_SECONDS = 0.01
"""The interval in which a waiting thread looks whether the lock has ended."""
_TIMEOUT_SECONDS = 600.0
"""The limit of a wait. The owner of a lock may wait for this thread, as a hook may."""

_held: weakref.WeakValueDictionary[int, exclusive] = weakref.WeakValueDictionary()
"""The acquired locks by their ids. A lock that an interrupt has kept from ending is gone with its last reference."""
_guard = fork_safe_lock()


class exclusive:
    """A context manager: no other thread changes the models, or what they share with others, through this library.

    Its end also rolls back the transactions within it, which an interrupt may have kept from ending.

    Raises `busy`, by default a `ModelBusyError`, when the wait exceeds the time.
    """

    __slots__ = ("__weakref__", "_busy", "_models", "_shared_ids", "_thread", "_timeout_seconds", "rollbacks")

    def __init__(
        self, *models: nn.Module, timeout_seconds: float | None = None, busy: ModelStateError | None = None
    ) -> None:
        self._thread, self._models, self._busy = threading.get_ident(), models, busy
        self._timeout_seconds = _TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        self._shared_ids: set[int] | None = None
        """The ids of modules, tensors and storages; computed only when two threads change models at once."""
        self.rollbacks: list[Callable[[], None]] = []
        """The rollbacks of the transactions within it."""

    def __enter__(self) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            with _guard:
                others = [lock for lock in _held.values() if lock._thread != self._thread]
                if all(self._ids().isdisjoint(lock._ids()) for lock in others):
                    _held[id(self)] = self
                    return
            time.sleep(_POLL_SECONDS)
            if time.monotonic() >= deadline:
                raise self._busy or ModelBusyError(
                    "another thread is changing the module, or one that shares tensors with it; nothing has been "
                    "changed",
                    where=", ".join(type(model).__name__ for model in self._models),
                    found=f"it has been for {self._timeout_seconds:.0f} seconds",
                    remedy="load, convert and restore a module in one thread, and not in a hook that waits for another "
                    "thread",
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for rollback in reversed(self.rollbacks):
                rollback()
        finally:
            self.rollbacks.clear()
            with _guard:
                _held.pop(id(self), None)

    def _ids(self) -> set[int]:
        if self._shared_ids is None:
            self._shared_ids = set(map(id, self._models)).union(*map(_ids_of, self._models))
        return self._shared_ids


def has_exclusively(model: nn.Module) -> bool:
    """Whether this thread has the lock of a model."""
    return any(model in lock._models for lock in _locks_of_thread())


def _locks_of_thread() -> list[exclusive]:
    """Returns the locks that this thread has, in the order in which it has acquired them."""
    thread = threading.get_ident()
    with _guard:
        return [lock for lock in _held.values() if lock._thread == thread]


def _ids_of(model: nn.Module) -> set[int]:
    modules = modules_of(model)
    tensors = tensors_of(modules)
    plain = [tensor for tensor in tensors if not torch.nn.parameter.is_lazy(tensor)]
    storages = {storage_id(part) for tensor in plain for part in payload_of(tensor)} - {0}
    return {*map(id, modules), *map(id, tensors), *storages}


def _drop_in_child() -> None:
    for key, lock in [*_held.items()]:
        if lock._thread != threading.get_ident():
            del _held[key]


at_fork(in_child=_drop_in_child)
