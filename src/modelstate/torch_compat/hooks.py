"""State-dict hooks, put to sleep for a while."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from modelstate.process import fork_safe_lock

_TABLES = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_Slept = list[tuple[dict[int, Any], int, "_DisabledHook"]]
_sleeping: list[tuple[int, _Slept]] = []
"""For each block that is running, its thread and the hooks that it has put to sleep."""


class _DisabledHook:
    """Stands in the place of a hook, under its id, and does nothing.

    The table of hooks stays the object that it is and keeps its keys, which is all that handles know of: one that is
    removed meanwhile takes its hook out for good, and what is registered meanwhile comes behind the others.
    """

    __slots__ = ("contexts", "hook")

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.contexts = 0
        """How many blocks, of any thread, the hook sleeps in."""

    def __call__(self, *args: object, **named: object) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.hook, memo)  # nobody would wake the hook of a copy

    def __copy__(self) -> Any:
        return self.hook

    def __reduce__(self) -> Any:
        return _same, (self.hook,)


def _same(hook: Any) -> Any:
    return hook


@contextmanager
def without_state_dict_hooks(module: nn.Module) -> Iterator[None]:
    """Within the block no state-dict hook of the module, or of any module below it, is called.

    That is what `state_dict` calls before and after it collects, and what `load_state_dict` calls before and after it
    fills. Afterwards every hook is where it was, in its order, also after an exception. A handle that is removed within
    the block takes its hook away as ever; a hook that is registered within it works at once, and stays. A copy of the
    module that is made within the block has its hooks awake.

    Blocks may be nested, and entered by several threads: a hook wakes when the last block that put it to sleep ends.
    The hooks belong to the module and not to a thread, so another thread's `state_dict` runs without them as well.
    Overrides of `_save_to_state_dict` and `_load_from_state_dict` are no hooks, and are not touched.
    """
    slept: _Slept = []
    block = threading.get_ident(), slept
    try:
        with _lock:
            _sleeping.append(block)
            for table in _tables(module):
                for key, hook in list(table.items()):
                    asleep = hook if isinstance(hook, _DisabledHook) else _DisabledHook(hook)
                    asleep.contexts += 1
                    slept.append((table, key, asleep))
                    table[key] = asleep
        yield
    finally:
        with _lock:
            _wake(block)


def _wake(block: tuple[int, _Slept]) -> None:
    _sleeping[:] = [other for other in _sleeping if other is not block]
    for table, key, asleep in block[1]:
        asleep.contexts -= 1
        if not asleep.contexts and table.get(key) is asleep:
            table[key] = asleep.hook


def _in_child(thread: int) -> None:
    for block in [block for block in _sleeping if block[0] != thread]:
        _wake(block)


_lock = fork_safe_lock(_in_child)


def _tables(module: nn.Module) -> Iterator[dict[int, Any]]:
    for one in module.modules():
        for name in _TABLES:
            table = getattr(one, name, None)
            if table:
                yield table
