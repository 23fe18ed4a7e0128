"""A library that AOTInductor has compiled, and the weights that it works with at the moment."""

import threading
from collections.abc import Mapping
from typing import Any

import torch

from modelstate.errors import LiveTargetError
from modelstate.plan.torch_private import aoti_loader, aoti_refresh_constants, aoti_set_constants


class Loader:
    """A loaded library. It works with tensors that are managed outside of it, and copies nothing.

    A library never lets go of a tensor that it was given. So it is given one empty tensor for each constant, once, and
    these are moved from the storage of one version to that of the next; then it is told to look where they lie. What
    has wrong sizes or strides would make it read past the end: `use` is for tensors that have been checked.
    """

    def __init__(self, path: str, model: str) -> None:
        try:
            self._library = aoti_loader(path, model)
            self.names: tuple[str, ...] = tuple(self._library.get_constant_fqns())
            self.call_spec: tuple[str, str] = tuple(self._library.get_call_spec())
        except RuntimeError as error:
            raise LiveTargetError(
                "the package cannot be loaded",
                where=path,
                found=str(error).splitlines()[0],
                remedy="compile it for this machine and this version of torch",
            ) from error
        self._shells: dict[str, torch.Tensor] | None = None
        # Code of the model in Python lets others in while it runs, who would wait in the library with Python's lock.
        self._lock = threading.Lock()

    def use(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Works with these tensors from now on, all that it has names for. Nobody may be calling it."""
        with torch.inference_mode(False), torch.no_grad():
            made = self._shells is None
            if self._shells is None:
                self._shells = {name: torch.empty(0, dtype=constants[name].dtype) for name in self.names}
            for name, shell in self._shells.items():
                one = constants[name]
                shell.set_(one.untyped_storage(), one.storage_offset(), one.shape, one.stride())
            if not made:
                aoti_refresh_constants(self._library)
            elif self.names:
                aoti_set_constants(self._library, self._shells)

    def let_go(self) -> None:
        """Gives up the tensors that it works with. Until `use` has given it others, `run` must not be called."""
        with torch.inference_mode(False), torch.no_grad():
            for shell in (self._shells or {}).values():
                shell.set_()  # type: ignore[call-overload]

    def run(self, inputs: list[torch.Tensor]) -> list[Any]:
        """Calls it. The inputs have been checked."""
        with self._lock:
            found: list[Any] = self._library.boxed_run(inputs)
            return found
