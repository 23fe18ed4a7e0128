"""The class of the optimizer whose state was saved: whether another class can take the state.

The state of one class may fit another one and mean something else there: `exp_avg` of Adam is also a name of other
classes. What `modelstate.optimizer_state` returns names the class; of other states it is guessed from their options.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from modelstate.errors import keep_interrupt

CLASS = "class"
"""The key of the class in a saved state."""
SCHEDULER_OPTIONS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Options that schedulers put into groups."""
_IMPLEMENTATION_OPTIONS = {"foreach", "fused", "capturable", "differentiable"}
"""Options that do not change what is computed."""
_MAX_GUESSES = 3

Group = Mapping[str, Any]
"""A parameter group: "params", and options by name."""


class OtherClass(msgspec.Struct, frozen=True):
    """The saved state is of another class of optimizer than the live one, and cannot be loaded for that reason."""

    saved: str
    """The qualified name of the class, or of several that it may be; empty where nothing is known."""
    is_guess: bool
    live: str
    would_fit: bool
    """Whether the live optimizer could take the state of the parameters, with its own options kept."""
    changed: tuple[str, ...] = ()
    """The saved options that would make the live optimizer compute as the saved one."""

    @property
    def text(self) -> str:
        guess = " (a guess from the names of its options, since it does not name its class)" if self.is_guess else ""
        changed = f"; the saved options would change what it computes ({', '.join(self.changed)})"
        return f"the state is of {self.saved}{guess}, the optimizer is {self.live}" + (changed if self.changed else "")

    def remedy(self, keep_options: str, start_anew: str) -> str:
        """Returns the remedy. `keep_options` is the value it proposes, `start_anew` how to begin without the state."""
        keep = f"load the state of the parameters alone, with this optimizer's own options: keep_options={keep_options}"
        return "; or ".join(
            [
                f"build the optimizer that was saved: {self.saved}",
                *([keep] if self.would_fit else []),
                f"to begin with a new {self.live}: {start_anew}",
            ]
        )


def group_options(group: Group) -> dict[str, Any]:
    """Returns the options of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def computing_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Returns the class that computes: of a wrapper that shares the groups of an optimizer, as accelerate's, its class.

    For every other optimizer it is the optimizer's own class.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and inner.param_groups is optimizer.param_groups:
        return type(inner)
    return type(optimizer)


def class_name(cls: type) -> str:
    """Returns the qualified name of a class; of torch's own the public one, which every version of torch has."""
    if getattr(torch.optim, cls.__qualname__, None) is cls:
        return f"torch.optim.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _own_classes(cls: type[torch.optim.Optimizer]) -> tuple[type, ...]:
    """Returns the class and its bases below `torch.optim.Optimizer`."""
    return cls.__mro__[: cls.__mro__.index(torch.optim.Optimizer)]


def other_class(
    state: Mapping[str, object],
    groups: Sequence[Group],
    optimizer: torch.optim.Optimizer,
    keeps: Callable[[str], bool],
    has_option_problems: bool,
    has_value_problems: bool,
) -> tuple[OtherClass | None, str]:
    """Returns the class of the saved state where it is another one that cannot be loaded; else None and a note.

    A class and one that is derived from it may take each other's state, unless an option differs that one of the two
    sets by itself. Any other class needs `keep_options` for all options: the same names may mean something else in it.
    Files that do not name the class are judged by the names of the options, against torch's own classes only.
    """
    live, recorded = computing_class(optimizer), state.get(CLASS)
    has_problems = has_option_problems or has_value_problems
    options = [group_options(group) for group in groups]
    names = {str(key) for group in options for key in group} - SCHEDULER_OPTIONS
    classes: list[type[torch.optim.Optimizer]]
    if isinstance(recorded, str):
        module, _, attribute = recorded.rpartition(".")
        if attribute == live.__name__:
            return None, ""  # the same class, or one that has moved to another module
        saved = [recorded]
        imported = getattr(sys.modules.get(module), attribute, None)
        is_optimizer = isinstance(imported, type) and issubclass(imported, torch.optim.Optimizer)
        classes = [imported] if imported is not None and is_optimizer else []
    else:
        classes = _likely_classes(names, options, exactly=not has_problems)
        saved = [class_name(cls) for cls in classes]
        is_torchs = any(cls.__module__.startswith("torch.optim.") for cls in _own_classes(live))
        if live in classes or not classes or not (is_torchs or has_problems):
            return None, ""
    own_names = {class_name(cls) for cls in live.__mro__}
    is_related = not own_names.isdisjoint(saved) or any(issubclass(cls, live) for cls in classes)
    fixed = {name for cls in (live, *classes) for name in _fixed_options(cls, names)}
    changed = {
        f"{key} {group[key]!r} -> {saved_group[key]!r}": None
        for key in sorted(fixed)
        for saved_group in options
        for group in optimizer.param_groups
        if key in saved_group
        and isinstance(group.get(key), bool | str)
        and saved_group[key] != group[key]
        and not keeps(key)
    }
    may_load = not changed if is_related else all(keeps(str(key)) for group in options for key in group)
    text = " or ".join(saved)
    if may_load and (is_related or not has_problems):
        return None, f"the state of {text} is loaded into {class_name(live)}"
    is_guess = not isinstance(recorded, str)
    return OtherClass(text, is_guess, class_name(live), not has_value_problems, tuple(changed)), ""


def _likely_classes(
    names: set[str], options: Sequence[Mapping[str, object]], exactly: bool
) -> list[type[torch.optim.Optimizer]]:
    """Returns torch's classes that have these options, with the values that a class sets by itself.

    Of a class and one that is derived from it, the derived one is taken, if the values say so. Without `exactly`, and
    where no class has just these options, a few classes that have more are taken: older versions of torch had fewer.
    """
    exact: list[type[torch.optim.Optimizer]] = []
    with_more: list[type[torch.optim.Optimizer]] = []
    for name in torch.optim.__all__:
        cls: Any = getattr(torch.optim, name)
        try:
            (group,) = cls([nn.Parameter(torch.zeros(1, 1, device="cpu"))]).param_groups
        except Exception as error:  # not an optimizer, or one that needs other arguments
            keep_interrupt(error)
            continue
        own = group_options(group)
        fixed = _fixed_options(cls, names)
        if not names or not names <= own.keys():
            continue
        if all(saved[key] == own[key] for saved in options for key in fixed & saved.keys()):
            (exact if own.keys() == names else with_more).append(cls)
    if not exact and not exactly:
        return with_more if len(with_more) <= _MAX_GUESSES else []
    return [cls for cls in exact if not any(other is not cls and issubclass(other, cls) for other in exact)]


def _fixed_options(cls: type[torch.optim.Optimizer], names: set[str]) -> set[str]:
    """Returns the options that change what is computed and that the constructor does not take: the class sets them."""
    fixed: set[str] = set()
    for base in _own_classes(cls):
        if "__init__" in vars(base):
            params = inspect.signature(base.__init__).parameters  # type: ignore[misc]
            if not any(param.kind is param.VAR_KEYWORD for param in params.values()):
                fixed |= names - params.keys()
    return fixed - _IMPLEMENTATION_OPTIONS
