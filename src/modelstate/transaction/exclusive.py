"""One change of a module at a time: loads and conversions by several threads wait for one another.

Two modules meet where they have a module, a tensor or a memory in common. Changes of modules that do not meet go on
side by side; a change within another one, in the same thread, goes on at once. A claim is found through a weak
reference, so that it ends with the object. The child of a fork forgets the claims of threads that it does not have.
"""

import threading
import time
import weakref
from contextlib import suppress
from types import TracebackType

import torch
from torch import nn

from modelstate.errors import ModelBusyError
from modelstate.process import fork_safe_lock
from modelstate.torch_compat.private import payload_of, storage_id
from modelstate.transaction.slots import modules_of

_LOOK_SECONDS = 0.1
"""How often a thread that waits looks again, should the owner of a claim have gone without a word."""
_PATIENCE_SECONDS = 600.0
"""How long a thread waits: the owner of a claim may be waiting for this very thread, as a hook that joins it does."""

_claims: list["weakref.ref[exclusive]"] = []
_waiting: dict[int, set[int]] = {}
"""By threads that wait, the threads that they wait for."""


class exclusive:
    """A context in which no other thread changes the modules, or what they share with others, through this library.

    Raises `ModelBusyError` where the threads would wait for each other, or one has waited for ten minutes.
    """

    __slots__ = ("__weakref__", "_ended", "_ids", "_roots", "thread")

    def __init__(self, *roots: nn.Module) -> None:
        self.thread = threading.get_ident()
        self._roots = roots
        self._ids: set[int] | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def __enter__(self) -> None:
        until = time.monotonic() + _PATIENCE_SECONDS
        try:
            while (ended := self._try()) is not None:
                if time.monotonic() >= until:
                    raise self._busy(f"it has been for {_PATIENCE_SECONDS:.0f} seconds")
                if ended.acquire(timeout=_LOOK_SECONDS):
                    ended.release()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        finally:
            _waiting.pop(self.thread, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _claims[:] = [claim for claim in _claims if claim() not in (None, self)]
        with suppress(RuntimeError):  # it has been released
            self._ended.release()

    def _try(self) -> "threading.Lock | None":
        """Claims the modules; where another thread has them, what is released when that claim ends."""
        with _lock:
            others = [
                claim
                for reference in _claims
                if (claim := reference()) is not None and claim.thread != self.thread and self._meets(claim)
            ]
            if not others:
                _claims.append(weakref.ref(self))
                return None
            _waiting[self.thread] = {claim.thread for claim in others}
            if self._waits_for_itself():
                raise self._busy("it waits for this thread to end another change")
            return others[0]._ended

    def _waits_for_itself(self) -> bool:
        seen: set[int] = set()
        threads = list(_waiting[self.thread])
        while threads:
            thread = threads.pop()
            if thread not in seen:
                seen.add(thread)
                threads += _waiting.get(thread, ())
        return self.thread in seen

    def _busy(self, found: str) -> ModelBusyError:
        return ModelBusyError(
            "another thread is changing the module, or one that shares tensors with it; nothing has been changed",
            where=", ".join(type(root).__name__ for root in self._roots),
            found=found,
            remedy="load, convert and restore a module in one thread, and not in a hook that waits for another thread",
        )

    def _meets(self, other: "exclusive") -> bool:
        return any(a is b for a in self._roots for b in other._roots) or not self.ids().isdisjoint(other.ids())

    def ids(self) -> set[int]:
        """What the modules are made of: modules, tensors and storages. It is asked for only where two threads meet."""
        if self._ids is None:
            ids = set(map(id, self._roots))
            for root in self._roots:
                for _ in range(100):
                    with suppress(RuntimeError):  # its owner has just changed a dict
                        ids |= _ids_of(root)
                        break
            self._ids = ids
        return self._ids


def _ids_of(root: nn.Module) -> set[int]:
    modules = modules_of(root)
    tensors = [
        tensor
        for module in modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    plain = [tensor for tensor in tensors if not torch.nn.parameter.is_lazy(tensor)]
    storages = {storage_id(part) for tensor in plain for part in payload_of(tensor)} - {0}
    return {*map(id, modules), *map(id, tensors), *storages}


def _in_child(thread: int) -> None:
    _claims[:] = [claim for claim in _claims if (one := claim()) is not None and one.thread == thread]
    _waiting.clear()


_lock = fork_safe_lock(_in_child)
