"""Replaces methods of torch's classes while something needs it.

PyTorch has no extension point for three things: to take the writing out of the loading protocol, to build modules whose
parameters have no memory, and to keep references when a module is converted. One mechanism does all three.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from modelstate.process import fork_safe_lock
from modelstate.torch_compat.modules import is_stock


class MethodOverride:
    """A method of a class, and the function that can replace it.

    Args:
        owner: the class.
        name: the name of the method.
        function: called as `function(stock, *args, **kwargs)`, where `stock` is the method at the time of the import.
        over_others: whether it also replaces a method that another library has installed.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any], *, over_others: bool = True) -> None:
        self._owner, self._name, self._over_others = owner, name, over_others
        # The method of the import: a method that is installed later may call the replacement.
        stock = getattr(owner, name)

        @wraps(stock)
        def replacement(*args: Any, **kwargs: object) -> object:
            return function(stock, *args, **kwargs)

        self.replacement: Callable[..., object] = replacement
        self._installed: object = staticmethod(replacement) if name == "__new__" else replacement
        self._before: object = None

    def install(self) -> None:
        """Puts the replacement in place, if it is not there already."""
        own = vars(self._owner).get(self._name)
        if own is self._installed or not (self._over_others or is_stock(getattr(self._owner, self._name))):
            return
        self._before = own
        setattr(self._owner, self._name, self._installed)

    def remove(self) -> None:
        """Puts the previous method back, unless another library has installed its own since, which may call this."""
        if vars(self._owner).get(self._name) is not self._installed:
            return
        if self._before is None:
            delattr(self._owner, self._name)  # it is inherited
        else:
            setattr(self._owner, self._name, self._before)


class Overrides:
    """Methods that are replaced while at least one thread uses the replacements.

    Args:
        methods: the methods.
        holds: returns whether they are also replaced while no thread uses them. Call `update` when it changes.

    Examples:
        >>> overrides = Overrides(MethodOverride(torch.nn.Module, "_apply", function))
        >>> with overrides.used():
        ...     module.to(torch.bfloat16)
    """

    def __init__(self, *methods: MethodOverride, holds: Callable[[], bool] = lambda: False) -> None:
        self._methods, self._holds = methods, holds
        self._threads: list[tuple[int, object]] = []
        """The thread of each use, with a token of the use."""
        self._lock = fork_safe_lock(self._in_child)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Replaces the methods within the block, which sees to it that the functions only act in this thread."""
        use = (threading.get_ident(), object())
        try:
            try:
                with self._lock:
                    self._threads.append(use)
                    self._update()
                yield
            finally:
                self._end(use)
        except BaseException:
            self._end(use)  # an interrupt may have broken off the first attempt
            raise

    def update(self) -> None:
        """Installs or removes the replacements as `holds` says."""
        with self._lock:
            self._update()

    def _end(self, use: tuple[int, object]) -> None:
        with self._lock:
            self._threads[:] = [other for other in self._threads if other is not use]
            self._update()

    def _update(self) -> None:
        wanted = bool(self._threads) or self._holds()
        for method in self._methods:
            if wanted:
                method.install()
            else:
                method.remove()

    def _in_child(self, thread: int) -> None:
        self._threads[:] = [use for use in self._threads if use[0] == thread]
        self._update()
