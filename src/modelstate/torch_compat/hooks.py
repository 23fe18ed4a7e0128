"""Disables the state-dict hooks of a module for the duration of a block."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from modelstate.process import fork_safe_lock

_TABLES = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
Hook = Callable[..., Any]


@contextmanager
def without_state_dict_hooks(module: nn.Module) -> Iterator[None]:
    """Disables all state-dict hooks of a module and its submodules within a block.

    These are the hooks that `state_dict` and `load_state_dict` call before and after their work. After the block, also
    after an exception, every hook is at its place again, in the same order. Removing a handle within the block removes
    its hook as usual; a hook that is registered within the block works at once, and stays. The hooks of a copy of the
    module that is made within the block are enabled.

    Blocks may be nested, and entered by several threads: a hook is enabled again when the last block that disabled it
    ends. Hooks belong to the module and not to a thread, so another thread's `state_dict` runs without them as well.
    Overrides of `_save_to_state_dict` and `_load_from_state_dict` are not hooks, and stay active.

    Args:
        module: The module.

    Returns:
        A context manager.

    Raises:
        Exception: Only exceptions of the block are passed on.

    Example:
        >>> with without_state_dict_hooks(module):
        ...     state = module.state_dict()
    """
    block = _Block(threading.get_ident(), [])
    try:
        with _lock:
            _blocks.append(block)
            for table in _tables(module):
                for key, hook in list(table.items()):
                    disabled = hook if isinstance(hook, _DisabledHook) else _DisabledHook(hook)
                    disabled.blocks += 1
                    block.disabled.append((table, key, disabled))
                    table[key] = disabled
        yield
    finally:
        with _lock:
            _enable(block)


class _DisabledHook:
    """Replaces a hook in its table, under the same id, and does nothing when it is called.

    The table and its keys stay the same objects, since handles refer to them: a handle that is removed within the block
    removes its hook for good, and a hook that is registered within the block comes after the others.
    """

    __slots__ = ("blocks", "hook")

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.blocks = 0
        """The number of blocks, in all threads, that disable the hook."""

    def __call__(self, *args: object, **named: object) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return copy.deepcopy(self.hook, memo)  # no block would enable the hook of a copy

    def __copy__(self) -> Hook:
        return self.hook

    def __reduce__(self) -> tuple[Callable[[Hook], Hook], tuple[Hook]]:
        return _identity, (self.hook,)


def _identity(hook: Hook) -> Hook:
    return hook


class _Block(NamedTuple):
    """A running block: its thread, and the hooks that it disables, with their tables and keys."""

    thread: int
    disabled: list[tuple[dict[int, Hook], int, _DisabledHook]]


_blocks: list[_Block] = []


def _enable(block: _Block) -> None:
    _blocks[:] = [other for other in _blocks if other is not block]
    for table, key, disabled in block.disabled:
        disabled.blocks -= 1
        present: object = table.get(key)
        if not disabled.blocks and present is disabled:
            table[key] = disabled.hook


def _after_fork(thread: int) -> None:
    """Ends the blocks of threads that do not exist in the child of a fork."""
    for block in [block for block in _blocks if block.thread != thread]:
        _enable(block)


_lock = fork_safe_lock(_after_fork)


def _tables(module: nn.Module) -> Iterator[dict[int, Hook]]:
    for submodule in module.modules():
        for name in _TABLES:
            table = getattr(submodule, name, None)
            if table:
                yield table
