"""The state of an optimizer by the names of its parameters, and back.

torch keeps it by the parameters' positions: after a parameter has been added or two have changed places, it goes to
the wrong ones, without a word where the shapes allow it. Names do not move.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from modelstate.checkpoint.open import argument_order, is_module
from modelstate.errors import OptimizerStateError, OptionError
from modelstate.loading.options import check_model, patterns_of
from modelstate.planning.matching import wrapper_rule
from modelstate.process import deferred_signals
from modelstate.rules.optimizer import apply_to_optimizer
from modelstate.rules.rule import Rule
from modelstate.rules.schema import Schema, check_rules, renamed_by, way_back
from modelstate.transaction.optimizers import check_optimizers

_GROUPS, _CLASS = "param_groups", "class"
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""Options that schedulers put into groups."""


def _is_optimizer(value: object) -> bool:
    return isinstance(value, torch.optim.Optimizer)


@argument_order("ms.optimizer_state", is_module, _is_optimizer)
def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer by the names that the model has for its parameters.

    `{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [names], "lr": ...}]}`, as
    `torch.distributed.checkpoint` has it, and "class", the qualified name of the optimizer's class; a parameter that
    has no state is there with an empty one. The tensors are the live ones, as in `state_dict()`; a tied parameter is
    there once, under its first name. Raises `OptionError`, and
    `OptimizerStateError` for a parameter that is not the model's, and for an optimizer that keeps more than that.
    """
    names = _names(check_model(model), optimizer)
    _check_nothing_else(optimizer)
    groups = [
        {**_options(group), "params": [names[param] for param in group["params"]]} for group in optimizer.param_groups
    ]
    state = {name: dict(optimizer.state.get(param, {})) for param, name in names.items()}
    return {"state": state, _GROUPS: groups, _CLASS: _class_name(_class_of(optimizer))}


def _check_nothing_else(optimizer: torch.optim.Optimizer) -> None:
    """Raises for state that belongs to no parameter, which would be lost without a word."""
    more: list[Any] = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        more += [key for key in optimizer.state_dict() if key not in ("state", _GROUPS)]
    if more:
        raise OptimizerStateError(
            "the optimizer keeps state that belongs to no parameter, which has no place here",
            where=type(optimizer).__qualname__,
            found=", ".join(map(repr, more[:8])),
            remedy="save it as an object of its own: one whose state_dict and load_state_dict call the optimizer's",
        )


@argument_order("ms.load_optimizer_state", is_module, _is_optimizer)
def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    rules: Iterable[Rule] | Schema = (),
    allow_missing: bool = False,
    keep_options: Iterable[str] = (),
) -> None:
    """Loads what `optimizer_state` gave, all or nothing, by the names of the parameters.

    `state` may also be a `state_dict()` of an optimizer that was given names (`torch.optim.Adam(model.
    named_parameters())`). `rules` are those by which the checkpoint was loaded into the model: what has a value for
    each element is cut, joined and moved with its parameter. Tensors take the device of their parameter, and what
    torch's optimizers keep for its elements takes its dtype; `step` stays where the optimizer keeps it. Options of a
    group (`lr`, ...) are taken over, except those that match a pattern of `keep_options`: they stay what they are.
    `keep_options=["lr"]` goes on with the learning rate of this optimizer, `["*"]` loads no options at all.

    `rules` may be a `Schema`. The state of an optimizer has no version of its own, so its predicates are called with
    the names of the parameters in it. Where they go by other names, of buffers or of frozen parameters, take the
    version of the model's checkpoint: `rules=schema.rules_for(modelstate.open("model.safetensors"))`.

    A parameter that is there with an empty state has none afterwards. LBFGS, which has all parameters in one vector,
    takes the same ones in the same order only.

    The state of another class of optimizer is refused where it does not fit, and where the saved options would change
    what this one computes: the state of an `Adam` would turn off the decoupled weight decay of an `AdamW`. With
    `keep_options=["*"]` the moments are loaded, and the optimizer computes as it was built to.

        ms.load_optimizer_state(model, torch.optim.AdamW(model.parameters()), state_of_adam, keep_options=["*"])

    Raises `OptimizerStateError` with everything that does not fit: names, shapes, groups, options, the class; without
    `allow_missing`, also where nothing was saved for a parameter. Raises `RuleError` for the rules, `SchemaError` where
    the version cannot be found, and `OptionError`.
    """
    kept = patterns_of("keep_options", keep_options)
    planned = plan_by_name(
        model,
        optimizer,
        state,
        rules=rules,
        may_miss=lambda _: allow_missing,
        may_exceed=lambda _: False,
        keeps=lambda option: any(fnmatchcase(option, pattern) for pattern in kept),
    )
    check_keep_options(kept, [str(key) for group in optimizer.param_groups for key in _options(group)])
    if planned.problems:
        other = planned.other_class
        remedy = remedy_of("True") if other is None else other.remedy('["*"]', "do not load this state")
        raise misfit(type(optimizer).__name__, planned.problems, remedy)
    planned.load()


def check_keep_options(patterns: Iterable[str], options: Sequence[str]) -> None:
    """Raises `OptionError` for a pattern that matches none of the options."""
    for pattern in patterns:
        if not any(fnmatchcase(option, pattern) for option in options):
            raise OptionError(
                "a pattern matches no option of an optimizer",
                where=f"keep_options={pattern!r}",
                expected=", ".join(dict.fromkeys(options)) or "an optimizer",
            )


def remedy_of(allow_missing: str) -> str:
    """For state that does not fit, where so much is to be allowed to be missing."""
    return (
        "give the rules by which the model was loaded: rules=[...]; for parameters that are new in the model: "
        f"allow_missing={allow_missing}"
    )


def misfit(where: str, problems: Sequence[str], remedy: str) -> OptimizerStateError:
    """The error for the state of an optimizer that does not fit."""
    more = f"\n    and {len(problems) - 12} more" if len(problems) > 12 else ""
    return OptimizerStateError(
        "the state does not fit the optimizer; nothing has been changed",
        where=where,
        found="\n    ".join(problems[:12]) + more,
        remedy=remedy,
    )


@dataclass(frozen=True, slots=True)
class OtherClass:
    """The saved state is of another class of optimizer than the live one, and that keeps it from being loaded."""

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
        """What to do, with `keep_options` as an argument and `start_anew` for beginning without the state."""
        keep = f"load the state of the parameters alone, with this optimizer's own options: keep_options={keep_options}"
        return "; or ".join(
            [
                f"build the optimizer that was saved: {self.saved}",
                *([keep] if self.would_fit else []),
                f"to begin with a new {self.live}: {start_anew}",
            ]
        )


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """What loading the state of an optimizer would do. Made by `plan_by_name`."""

    problems: list[str]
    """What does not fit, as lines of text."""
    load: Callable[[], None]
    """Changes all of it, or nothing. To be called where there are no problems."""
    other_class: OtherClass | None = None
    """Given where it is one of the problems."""
    note: str = ""
    """Of a state of another class that is loaded all the same."""


def plan_by_name(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    rules: Iterable[Rule] | Schema,
    may_miss: Callable[[str], bool],
    may_exceed: Callable[[str], bool],
    keeps: Callable[[str], bool],
) -> OptimizerPlan:
    """Plans `load_optimizer_state`: what does not fit, and the load.

    For each name, `may_miss` and `may_exceed` say whether its state may be missing, or too much; `keeps` says of an
    option whether the optimizer keeps its own. The load raises `OptimizerStateError` for a value that cannot be copied.
    """
    model = check_model(model)
    names = _names(model, optimizer)
    params = _by_any_name(model, names)
    by_name, groups = _by_name(state)
    if isinstance(rules, Schema):
        saved = [*by_name, *(name for group in groups for name in group["params"])]
        rules = rules.rules(rules.version_of_names(saved, type(optimizer).__name__))
    checked = check_rules(rules)
    listed = {*by_name, *(name for group in groups for name in group["params"])}
    wrappers = wrapper_rule({renamed_by(checked, name) for name in listed}, params)
    checked = checked if wrappers is None else (*checked, wrappers)
    made_of: dict[str, tuple[str, ...]] = {}
    if checked:
        by_name, made_of = apply_to_optimizer(checked, by_name)
    sources = _sources(params, groups, checked, made_of)
    over = [name for name in by_name if name not in params and not may_exceed(name)]
    wrong = [f"{name}: the optimizer has no such parameter" for name in over]
    by_param = {params[name]: values for name, values in by_name.items() if name in params and values}
    matched = _matched(groups, optimizer, names, sources, wrong, may_miss, may_exceed, keeps)
    wrong_options = [line for group, options in matched for line in _wrong_options(options, group)]
    if isinstance(optimizer, torch.optim.LBFGS):
        wrong += _wrong_order(groups, optimizer, sources)
    if any(by_name.values()):
        there = {params[name] for name in by_name if name in params}
        listed = {name for group in groups for name in group["params"]}
        lost = [param for param in names if param not in there and listed & sources[param]]
        wrong += [f"{names[param]}: its state is not there" for param in lost if not may_miss(names[param])]
    kept = _Kept(optimizer, matched)
    wrong_values = [
        line
        for param, values in by_param.items()
        for line in _wrong_values(names[param], values, param, optimizer, kept.of(param))
    ]
    other, note = _other_class(state, groups, optimizer, keeps, bool(wrong_options), bool(wrong_values))
    wrong = [*([other.text] if other else []), *wrong, *wrong_options, *wrong_values]

    def load() -> None:
        try:
            made = {param: _placed(values, param, kept) for param, values in by_param.items()}
            chosen = [(group, deepcopy(options)) for group, options in matched]
        except Exception as error:
            raise OptimizerStateError(
                "a value of the state cannot be copied; nothing has been changed",
                where=type(optimizer).__name__,
                found=error,
            ) from error
        with deferred_signals():
            for param in names:
                optimizer.state.pop(param, None)
            optimizer.state.update(made)
            for group, options in chosen:
                group.update(options)

    return OptimizerPlan(list(dict.fromkeys(wrong)), load, other, note)


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    check_optimizers([optimizer], model)
    found: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    foreign = sum(param not in found for param in params)
    if foreign:
        raise OptimizerStateError(
            "the optimizer has parameters that the model has not, so they have no names",
            where=type(optimizer).__name__,
            found=f"{foreign} of {len(params)}",
            remedy="give the module that holds all of its parameters",
        )
    return {param: found[param] for param in params}


def _by_name(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """State and groups, by names in either case."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping) or not _are_groups(state):
        raise OptimizerStateError(
            "not the state of an optimizer",
            expected='a mapping with "state" and "param_groups", as modelstate.optimizer_state gives it',
            found=f"a mapping with {', '.join(map(repr, state))}"
            if isinstance(state, Mapping)
            else type(state).__name__,
        )
    groups = [dict(group) for group in state[_GROUPS]]
    for name, values in state["state"].items():
        if not isinstance(values, Mapping):
            raise OptimizerStateError("not the state of a parameter", where=name, found=repr(values)[:80])
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return {str(name): dict(values) for name, values in state["state"].items()}, groups
    names: dict[int, str] = {}
    for group in groups:
        listed = group.pop("param_names", None)
        are_names = isinstance(listed, list | tuple) and all(isinstance(name, str) for name in listed)
        if listed is None or not are_names or len(listed) != len(group["params"]):
            raise OptimizerStateError(
                "the state goes by the positions of the parameters, and nothing says their names",
                expected="names: from modelstate.optimizer_state, or of an optimizer made of named_parameters()",
                found="numbers",
                remedy="build model and optimizer as they were, load it with optimizer.load_state_dict, and take "
                "modelstate.optimizer_state(model, optimizer)",
            )
        names.update(zip(group["params"], listed, strict=True))
        group["params"] = list(listed)
    return {name: dict(state["state"].get(number, {})) for number, name in names.items()}, groups


def _are_groups(state: Mapping[str, Any]) -> bool:
    groups = state.get(_GROUPS)
    several = isinstance(groups, Sequence) and not isinstance(groups, str)
    return several and all(isinstance(g, Mapping) and isinstance(g.get("params"), Sequence) for g in groups or ())


def _by_any_name(model: nn.Module, names: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by all names that the model has for them."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: param for name, param in named if param in names}


def _sources(
    params: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    rules: Sequence[Rule],
    made_of: Mapping[str, tuple[str, ...]],
) -> dict[torch.Tensor, set[str]]:
    """Under which saved names each parameter may have been."""
    found: dict[torch.Tensor, set[str]] = {param: set() for param in params.values()}
    back = way_back(rules)
    for name, param in params.items():
        found[param].update(made_of.get(name, ()), [renamed_by(back, name)])
    for group in groups:
        for saved in group["params"]:
            if (now := renamed_by(rules, saved)) in params:
                found[params[now]].add(saved)
    return found


def _matched(
    groups: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    sources: Mapping[torch.Tensor, set[str]],
    wrong: list[str],
    may_miss: Callable[[str], bool],
    may_exceed: Callable[[str], bool],
    keeps: Callable[[str], bool],
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each group of the optimizer with the options that were saved for its parameters, and that it does not keep."""
    found = []
    listed = {name for group in groups for name in group["params"]}
    known = set().union(*sources.values())
    over = sorted(name for name in listed - known if not may_exceed(name))
    wrong += [f"{name}: the optimizer has no such parameter" for name in over]
    for group in optimizer.param_groups:
        lacking = [names[param] for param in group["params"] if listed.isdisjoint(sources[param])]
        wrong += [f"{name}: nothing was saved for it" for name in lacking if not may_miss(name)]
        wanted = {source for param in group["params"] for source in sources[param]}
        fitting = [
            {key: value for key, value in _options(saved).items() if not keeps(str(key))}
            for saved in groups
            if wanted & set(saved["params"])
        ]
        if any(one != fitting[0] for one in fitting):
            wrong.append(f"the group of {min(wanted)}: its parameters were in {len(fitting)} groups with other options")
        elif fitting:
            found.append((group, fitting[0]))
    return found


def _wrong_options(saved: Mapping[str, Any], group: Mapping[str, Any]) -> list[str]:
    """Options that the optimizer does not have, or of other kinds."""
    foreign = sorted(set(saved) - set(group) - _OF_SCHEDULERS, key=str)
    noun = "option" if len(foreign) == 1 else "options"
    wrong = [f"the optimizer does not have the saved {noun} {', '.join(map(str, foreign))}"] if foreign else []
    return wrong + [
        f"the option {key} is {value!r}, where the optimizer has {group[key]!r}"
        for key, value in saved.items()
        if key in group and not _alike(value, group[key])
    ]


_MOST_GUESSES = 3
_OF_IMPLEMENTATIONS = {"foreach", "fused", "capturable", "differentiable"}
"""Options that do not change what is computed."""


def _class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class that computes: of a wrapper that shows the groups of another optimizer, as accelerate's, that one's."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and inner.param_groups is optimizer.param_groups:
        return type(inner)
    return type(optimizer)


def _class_name(cls: type) -> str:
    """The qualified name of a class; of torch's own the public one, which does not depend on torch's version."""
    if getattr(torch.optim, cls.__qualname__, None) is cls:
        return f"torch.optim.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _own_classes(cls: type[torch.optim.Optimizer]) -> tuple[type, ...]:
    """The class and those that it is derived from, up to the base class of all optimizers."""
    return cls.__mro__[: cls.__mro__.index(torch.optim.Optimizer)]


def _class_named(name: str) -> type[torch.optim.Optimizer] | None:
    """The class of a qualified name, if it has been imported."""
    module, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None)
    return found if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) else None


def _other_class(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    keeps: Callable[[str], bool],
    has_wrong_options: bool,
    has_wrong_values: bool,
) -> tuple[OtherClass | None, str]:
    """The class of the saved state, where it is another one and stands in the way; or a note, where it does not.

    A class and one that is derived from it may take each other's state, unless an option differs that one of the two
    sets by itself. Any other class needs `keep_options` for all options: nothing says that the same names mean the same
    in both. Files that do not name the class are judged by the names of the options, against torch's own classes only.
    """
    live, recorded = _class_of(optimizer), state.get(_CLASS)
    has_wrong = has_wrong_options or has_wrong_values
    options = [_options(group) for group in groups]
    names = {str(key) for one in options for key in one} - _OF_SCHEDULERS
    if isinstance(recorded, str):
        if recorded.rpartition(".")[2] == live.__name__:
            return None, ""  # the same class, or one that has moved to another module
        saved = [recorded]
        classes = [cls for cls in [_class_named(recorded)] if cls is not None]
    else:
        classes = _likely_classes(names, options, exactly=not has_wrong)
        saved = [_class_name(cls) for cls in classes]
        is_torchs = any(cls.__module__.startswith("torch.optim.") for cls in _own_classes(live))
        if live in classes or not classes or not (is_torchs or has_wrong):
            return None, ""
    own_names = {_class_name(cls) for cls in live.__mro__}
    is_related = not own_names.isdisjoint(saved) or any(issubclass(cls, live) for cls in classes)
    fixed = {name for cls in (live, *classes) for name in _fixed_options(cls, names)}
    changed = {
        f"{key} {group[key]!r} -> {one[key]!r}": None
        for key in sorted(fixed)
        for one in options
        for group in optimizer.param_groups
        if key in one and isinstance(group.get(key), bool | str) and one[key] != group[key] and not keeps(key)
    }
    may_load = not changed if is_related else all(keeps(str(key)) for one in options for key in one)
    text = " or ".join(saved)
    if may_load and (is_related or not has_wrong):
        return None, f"the state of {text} is loaded into {_class_name(live)}"
    guess = not isinstance(recorded, str)
    return OtherClass(text, guess, _class_name(live), not has_wrong_values, tuple(changed)), ""


def _likely_classes(
    names: set[str], options: Sequence[Mapping[str, Any]], exactly: bool
) -> list[type[torch.optim.Optimizer]]:
    """torch's classes that have these options, with the values that a class sets by itself.

    Of a class and one that is derived from it, the derived one is taken, if the values say so. Where not `exactly`
    these are the options of one, those that have more are taken, if they are few: older versions of torch had fewer.
    """
    found: list[type[torch.optim.Optimizer]] = []
    with_more: list[type[torch.optim.Optimizer]] = []
    for name in torch.optim.__all__:
        cls: Any = getattr(torch.optim, name)
        try:
            (group,) = cls([nn.Parameter(torch.zeros(1, 1))]).param_groups
        except Exception:  # not an optimizer, or one that is not built like this
            continue
        own = _options(group)
        fixed = _fixed_options(cls, names)
        if names and names <= own.keys() and all(one[key] == own[key] for one in options for key in fixed & one.keys()):
            (found if own.keys() == names else with_more).append(cls)
    if not found and not exactly:
        return with_more if len(with_more) <= _MOST_GUESSES else []
    return [cls for cls in found if not any(other is not cls and issubclass(other, cls) for other in found)]


def _fixed_options(cls: type[torch.optim.Optimizer], names: set[str]) -> set[str]:
    """Which of these options, that say how it computes, a class sets by itself: its constructor does not take them."""
    fixed: set[str] = set()
    for one in _own_classes(cls):
        if "__init__" in vars(one):
            params = inspect.signature(one.__init__).parameters  # type: ignore[misc]
            if not any(param.kind is param.VAR_KEYWORD for param in params.values()):
                fixed |= names - params.keys()
    return fixed - _OF_IMPLEMENTATIONS


def _alike(saved: object, there: object) -> bool:
    """Whether an option is of the kind that the optimizer has: None may stand for anything that is optional."""
    if isinstance(saved, tuple | list) and isinstance(there, tuple | list):
        return len(saved) == len(there) and all(map(_alike, saved, there))
    if _is_number(there):
        return _is_number(saved)
    return saved is None or there is None or isinstance(saved, type(there)) or isinstance(there, type(saved))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _wrong_order(
    groups: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer, sources: Mapping[torch.Tensor, set[str]]
) -> list[str]:
    """LBFGS has all parameters in one vector, one behind the other."""
    saved = [name for group in groups for name in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    same = len(saved) == len(params) and all(name in sources[param] for name, param in zip(saved, params, strict=True))
    return [] if same else ["LBFGS has all parameters in one vector, which only fits the same ones in the same order"]


def _wrong_values(
    name: str,
    values: Mapping[str, Any],
    param: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    there: Mapping[str, Any] | None,
) -> list[str]:
    known = {} if there is None else there
    foreign = [] if there is None else [str(key) for key in values if key not in there]
    wrong = [f"{name}: the optimizer does not keep the saved {', '.join(foreign)}"] if foreign else []
    wrong += [f"{name}: {key} is lacking" for key in known if key not in values]
    for key, value in values.items():
        why = _why_not(value, param, optimizer) or (_unlike(value, known[key]) if key in known else "")
        if why:
            wrong.append(f"{name}: {key} {why}")
    return wrong


class _Kept:
    """What an optimizer keeps for its parameters, and in which group each is."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, matched: Iterable[tuple[dict[str, Any], dict[str, Any]]]
    ) -> None:
        self._optimizer = optimizer
        self._groups = {param: group for group in optimizer.param_groups for param in group["params"]}
        self._loaded = {id(group): options for group, options in matched}
        """By the ids of groups, the options that they are going to have."""
        self._likely: dict[tuple[int, int], dict[str, Any] | None] = {}

    @property
    def casts(self) -> bool:
        """Whether what it keeps for the elements of a parameter has the parameter's dtype, as far as is known."""
        return _is_torchs(self._optimizer)

    def group(self, param: torch.Tensor) -> dict[str, Any]:
        return self._groups[param]

    def of(self, param: torch.Tensor) -> Mapping[str, Any] | None:
        """What is there; else what would be, with the options that are loaded; None where that cannot be found."""
        there: Mapping[str, Any] | None = self._optimizer.state.get(param)
        if there:
            return there
        group = self._groups[param]
        key = id(group), param.dim()
        if key not in self._likely:
            options = {**group, **self._loaded.get(id(group), {})}
            self._likely[key] = _likeness(self._optimizer, options, param.dim())
        return self._likely[key]


def _likeness(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dims: int) -> dict[str, Any] | None:
    """What an optimizer of torch's keeps for a parameter, found by a step with a small one; None where none can be."""
    build: Any = type(optimizer)
    if not build.__module__.startswith("torch.optim"):
        return None
    options = {key: group[key] for key in inspect.signature(build).parameters if key in group and key != "params"}
    twin = nn.Parameter(torch.zeros([2] * dims))
    twin.grad = torch.ones_like(twin)
    try:
        likely: torch.optim.Optimizer = build([twin], **{**options, **_on_cpu(options)})
        likely.step()
    except Exception:  # it wants a closure, sparse gradients, another device
        return None
    return dict(likely.state.get(twin, {}))


def _on_cpu(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"capturable": False} if "capturable" in options else {}


def _unlike(value: object, there: object) -> str:
    """How a value differs from what the optimizer has in its place; a `step` may be a number or a tensor."""
    number = _is_number(value) and _is_number(there)
    if number or value is None or there is None:
        return ""
    if isinstance(value, torch.Tensor) != isinstance(there, torch.Tensor):
        return f"is {type(value).__name__}, where the optimizer has {type(there).__name__}"
    if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
        if value.dim() != there.dim():
            return f"has {value.dim()} dimensions, where the optimizer has {there.dim()}"
        if value.is_floating_point() != there.is_floating_point():
            return f"is {value.dtype}, where the optimizer has {there.dtype}"
    return ""


def _why_not(value: object, param: torch.Tensor, optimizer: torch.optim.Optimizer) -> str:
    if not isinstance(value, torch.Tensor):
        return "" if value is None or isinstance(value, int | float | list | tuple) else f"is {type(value).__name__}"
    if value.layout is not torch.strided or value.is_meta:
        return f"has no values that could be copied: {value.layout} on {value.device}"
    if value.is_complex() and not param.is_complex():
        return "is complex, and the parameter is not"
    if not value.dim() or isinstance(optimizer, torch.optim.LBFGS):
        return ""
    if not _is_torchs(optimizer):
        return ""  # what others keep for a parameter may have any shape
    fits = (
        _fits_by_rows(value.shape, param.shape)
        if isinstance(optimizer, torch.optim.Adafactor)
        else (value.shape == param.shape)
    )
    return "" if fits else f"has the shape {list(value.shape)}, the parameter {list(param.shape)}"


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def _fits_by_rows(shape: torch.Size, param: torch.Size) -> bool:
    """Whether there is one value for each element, or for each row or column."""
    return len(shape) == len(param) and all(a in (1, b) for a, b in zip(shape, param, strict=True))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


@torch.inference_mode(False)  # what is made in that mode could never be updated
def _placed(values: Mapping[str, Any], param: torch.Tensor, kept: _Kept) -> dict[str, Any]:
    group = kept.group(param)
    beside = bool(group.get("capturable") or group.get("fused"))
    dtype = param.dtype if param.is_floating_point() and kept.casts else None
    made = {key: _copied(key, value, param, dtype, beside) for key, value in values.items()}
    if isinstance((kept.of(param) or {}).get("step"), torch.Tensor) and isinstance(made.get("step"), int | float):
        made["step"] = torch.tensor(float(made["step"]))  # torch has had it as a tensor since 1.12
    return made


def _copied(key: str, value: Any, param: torch.Tensor, dtype: torch.dtype | None, beside: bool) -> Any:
    """Floats for the elements of the parameter become what it is; `step` stays unless it is wanted beside.

    What torch's own loading casts besides that, single numbers and integers, would no longer be what was saved.
    """
    if isinstance(value, torch.Tensor):
        if key == "step":
            return value.detach().clone().to(torch.float32).to(param.device) if beside else value.detach().clone()
        to = dtype if dtype is not None and value.dim() and value.is_floating_point() else value.dtype
        plain = type(value) is torch.Tensor and type(param.detach()) is torch.Tensor
        if plain and value.shape == param.shape and value.stride() != param.stride():
            return torch.empty_like(param.detach(), dtype=to).copy_(value.detach())  # files have no strides
        return value.detach().to(param.device, to, copy=True)
    if isinstance(value, list | tuple):
        return type(value)(_copied(key, one, param, dtype, beside) for one in value)
    return deepcopy(value)
