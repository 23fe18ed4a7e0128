"""The journal of a load: what it has changed so far, and what it still has to write.

A load runs code of the model: hooks, `_load_from_state_dict` overrides, `module_load` handlers, `set_extra_state`.
That code expects every earlier write to have happened, as it has in torch; a write that has happened must be undone
if the load fails later. Saving the old bytes of all tensors would make every load slow and twice as large, for the
sake of code that rarely looks at a tensor. So writes wait, and while the model's code runs, a guard watches the
tensors that it uses: the first time it uses one, the old bytes of that one are saved and its write is carried out.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from modelstate.errors import RollbackError
from modelstate.process import deferred_signals
from modelstate.torch_compat.private import (
    enter_mode,
    leave_mode,
    payload_of,
    storage_id,
    storage_of,
    without_subclasses,
)
from modelstate.transaction.object_snapshot import ObjectSnapshot, has_dispatch, put_back, tensor_state

_log = logging.getLogger("modelstate")


class Write:
    """A write to a tensor of the module that may wait."""

    __slots__ = ("done", "order", "target", "value")
    order: int
    """Its place among the writes that are watched."""
    replaces_object = False
    """Whether another object takes the tensor's place, which the model's code sees without using the tensor."""

    def __init__(self, target: torch.Tensor, value: torch.Tensor) -> None:
        self.target = target
        self.value = value
        self.done = False
        self.order = 0

    def run(self, journal: "Journal | None") -> None:
        """Carries the write out. With a journal it first takes down how to undo it."""
        raise NotImplementedError


class Journal:
    """Everything one load has done to a module, so that all of it can be undone."""

    def __init__(self, root: nn.Module) -> None:
        self.writes: list[Write] = []
        """All writes, in their order; those that were carried out already are `done`."""
        self.used: set[int] = set()
        """Storages that the model's code has used, whoever they belong to, by `storage_id`."""
        self.committed = False
        """Whether all is written, so that nothing is undone any more."""
        self.entangled = False
        """Whether a write reads from the module's own memory, so that the order of all writes matters."""
        self.armed = False
        """Whether the model's own code has had a chance to change anything."""
        self.root = root
        self._grad_enabled = torch.is_grad_enabled()
        self._memento: ObjectSnapshot | None = None
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._saved_whole: set[int] = set()
        self._to_protect: list[torch.Tensor] = []
        self._protected: set[int] = set()
        self._undo: list[Callable[[], None]] = []
        self._waiting: dict[int, list[Write]] = {}
        self._replacing: list[Write] = []
        self._watched = 0
        self._guard = _Guard(weakref.ref(self))
        self._storages: set[int] = set()

    def arm(self) -> None:
        """Takes down what the module and everything it holds is, before anything runs that could change it."""
        if not self.armed:
            self.armed = True
            self._memento = ObjectSnapshot(self.root.modules())
            self._storages = {storage_id(tensor) for tensor in self._memento.tensors.values()} - {0}
            for write in self.writes:
                self._watch(write)

    def _reads_module(self, write: Write) -> bool:
        return not write.replaces_object and storage_id(write.value) in self._storages

    def add(self, write: Write) -> None:
        """Lets a write wait."""
        self.writes.append(write)
        if self.armed:
            self._watch(write)

    def _watch(self, write: Write) -> None:
        self.entangled = self.entangled or self._reads_module(write)
        if write.replaces_object:
            self._replacing.append(write)
        write.order = self._watched
        self._watched += 1
        for key in {*_keys(write.target), *_keys(write.value)}:
            self._waiting.setdefault(key, []).append(write)

    def now(self, write: Write) -> None:
        """Carries a write out at once, able to undo it."""
        self.arm()
        if self.entangled or self._reads_module(write):
            self.flush()
        self._run_waiting((*_keys(write.target), *_keys(write.value)))
        write.run(self)
        write.done = True
        self.writes.append(write)

    def undo(self, function: Callable[[], None]) -> None:
        """Takes down how to undo what is about to be done."""
        self._undo.append(function)

    def save(self, tensor: torch.Tensor) -> None:
        """Saves the bytes and the place of a tensor, once."""
        self.save_place(tensor)
        with without_subclasses():
            for part in payload_of(tensor):
                self._save_bytes(part)
            self._save_whole(tensor)

    def save_place(self, tensor: torch.Tensor) -> None:
        """Saves what a tensor is, for a write that gives it other memory and leaves the old alone."""
        with without_subclasses():
            self._undo.append(tensor_state(tensor))

    def protect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that are not the module's among what is restored: their bytes, where model code uses them."""
        self._to_protect.extend(tensors)

    def _save_whole(self, tensor: torch.Tensor) -> None:
        """A copy of a tensor that is no view of one storage: sparse, or in a layout of some library."""
        exotic = not storage_id(tensor) and not has_dispatch(tensor) and not torch.nn.parameter.is_lazy(tensor)
        if exotic and id(tensor) not in self._saved_whole:
            self._saved_whole.add(id(tensor))
            kept = tensor.detach().clone()
            self._undo.append(lambda: put_back(tensor, kept))

    def _save_bytes(self, tensor: torch.Tensor) -> None:
        key = storage_id(tensor)
        if key and key not in self._saved and tensor.device.type != "meta":
            storage: Any = storage_of(tensor)
            self._saved[key] = (storage, storage.clone())

    @contextmanager
    def model_code(self) -> Iterator[None]:
        """Around code of the model: it sees every earlier write, and what it changes can be undone."""
        self.arm()
        self._replace()
        with self._guard.watching(True):
            yield

    @contextmanager
    def our_code(self) -> Iterator[None]:
        """Around our own code, when the model's code has called back into it."""
        with self._guard.watching(False):
            yield
        self._replace()

    def _replace(self) -> None:
        for write in self._replacing:
            self._run(write)
        self._replacing.clear()

    def touched(self, tensor: torch.Tensor) -> None:
        """The model's code is about to use a tensor."""
        self._protected.update(storage_id(part) for kept in self._to_protect for part in payload_of(kept))
        self._to_protect.clear()
        keys = _keys(tensor)
        self.used.update(keys[1:])
        if self.entangled:
            self.flush()
        self._run_waiting(keys)
        for part in payload_of(tensor):
            if storage_id(part) in self._storages or storage_id(part) in self._protected:
                self._save_bytes(part)
        if self._memento is not None and id(tensor) in self._memento.tensors:
            self._save_whole(tensor)

    def _run_waiting(self, keys: Iterable[int]) -> None:
        """Carries out, in their order, the writes that have to do with these tensors and storages."""
        found = {id(write): write for key in keys for write in self._waiting.pop(key, ())}
        for write in sorted(found.values(), key=lambda write: write.order):
            self._run(write)

    def gradients_change(self) -> None:
        """The model's code is about to run a backward pass, which adds to gradients that are there."""
        for tensor in list(self._memento.tensors.values() if self._memento else ()):
            with without_subclasses():
                grad = tensor.grad if tensor.is_leaf else None
            if grad is not None:
                for part in payload_of(grad):
                    self._save_bytes(part)

    def flush(self) -> None:
        """Carries out every write that waits, able to undo it."""
        self._waiting.clear()
        for write in self.writes:
            self._run(write)

    def _run(self, write: Write) -> None:
        if not write.done:
            write.run(self)
            write.done = True

    def commit(self, *last: Callable[[], None]) -> None:
        """Carries out what waits, and then `last`, with no way back and uninterrupted.

        Every write that still waits has been checked, and needs nothing but a copy between memory that is there.
        """
        waiting = [write for write in self.writes if not write.done]
        with deferred_signals() if waiting or last else nullcontext():
            self._waiting.clear()
            for write in waiting:
                write.run(None)
                write.done = True
            for function in last:
                function()
            self.committed = True
            self._let_go()

    def rollback(self) -> None:
        """Undoes everything, in reverse and uninterrupted; nothing once it is committed, or done before.

        An interrupt can come before it has begun, at the call itself. So it is called twice, the second time in the
        `finally` of the first; what has been done is not done again.
        """
        if self.committed:
            return
        with deferred_signals():
            self._guard.stop()
            steps = [*reversed(self._undo), *(self._memento.restores if self._memento is not None else ())]
            steps += [partial(_put_bytes, *saved) for saved in self._saved.values()]
            failures = _all_of(steps)
            unlisted = list(dict.fromkeys(self._memento.unlisted)) if self._memento is not None else []
            torch.set_grad_enabled(self._grad_enabled)  # an interrupt can break off what would have done it
            self._let_go()
        if unlisted:
            _log.warning(
                "what the code of %s may have changed in objects of these classes is not undone, for they raise when "
                "their attributes are read: %s",
                type(self.root).__name__,
                ", ".join(unlisted[:8]),
            )
        if failures:
            raise RollbackError(
                f"{len(failures)} things could not be made what they were; everything else has been",
                where=type(self.root).__name__,
                found=failures[0],
                remedy="the error before this one says what went wrong first; make the model again",
            ) from failures[0]

    def _let_go(self) -> None:
        """Drops everything, so that no cycle of references keeps staged values until the next cyclic collection."""
        for held in (self.writes, self._replacing, self._undo, self._to_protect):
            held.clear()
        self._waiting.clear()
        self._saved.clear()
        self._memento = None


def _all_of(steps: Iterable[Callable[[], None]]) -> list[Exception]:
    """Takes every step, whatever becomes of the others."""
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as error:
            failures.append(error)
    return failures


def _put_bytes(storage: torch.UntypedStorage, kept: torch.UntypedStorage) -> None:
    with without_subclasses(), torch.no_grad():
        if storage.nbytes() != kept.nbytes():
            storage.resize_(kept.nbytes())
        storage.copy_(kept, non_blocking=False)


def _keys(tensor: torch.Tensor) -> tuple[int, ...]:
    """What a tensor is found by: itself, and its storage, which the aliases of it share."""
    storage = storage_id(tensor)
    return (id(tensor), storage) if storage else (id(tensor),)


class _Guard(TorchFunctionMode):
    """Sees every use of a tensor through torch's functions and methods while the model's code runs."""

    def __init__(self, journal: "weakref.ref[Journal]") -> None:
        super().__init__()
        self._journal = journal
        self._watching = False
        self._depth = 0

    @contextmanager
    def watching(self, on: bool) -> Iterator[None]:
        before, self._watching = self._watching, on
        self._depth += 1
        try:
            if self._depth == 1:
                enter_mode(self)
            yield
        finally:
            self._depth -= 1
            self._watching = before
            if self._depth == 0:
                leave_mode(self)

    def stop(self) -> None:
        """Sees nothing any more, wherever an interrupt has broken off."""
        self._watching, self._depth = False, 0
        leave_mode(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        journal = self._journal() if self._watching else None
        if journal is not None and func not in _HARMLESS:
            if func in _BACKWARD:
                journal.gradients_change()
            for tensor in _tensors((*args, *kwargs.values()), 0):
                journal.touched(tensor)
        return func(*args, **kwargs)


def _tensors(values: Any, depth: int) -> Iterator[torch.Tensor]:
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
"""What tells of a tensor nothing but its metadata, and changes nothing."""
