"""Names of state at run time, and maps between them and the names of state dicts."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from modelstate.errors import LiveTargetError, ModelCodeError, NameMapError
from modelstate.formats.tree import same_value
from modelstate.loading.load import Source, load
from modelstate.planning.matching import nearest
from modelstate.problems import NameClash
from modelstate.rules.rule import Entry, Rule, RuleContext
from modelstate.rules.schema import Schema
from modelstate.serve.meta_clone import meta_clone, state_module
from modelstate.torch_compat.private import storage_id, unwrapped


def runtime_state(
    module: nn.Module, source: Source | None = None, *, rules: Iterable[Rule] | Schema = ()
) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a module, by their paths in the module tree that runs.

    The names, order and tensors of `torch.export.export(module, ...).state_dict`, whatever the module's state-dict
    hooks make of its `state_dict()`: a tied tensor stands under all its names. The tensors are the module's own.

    Given a source (see `modelstate.load`), it is the state that the module would have with that checkpoint, read into
    memory of its own through the module's own loading code, while the module itself stays as it is: so a checkpoint
    in the names of `state_dict()` gets those of the exported program, also where hooks split or fuse tensors.

    Raises what `modelstate.load` raises, and `LiveTargetError` where the module cannot be copied.
    """
    module = unwrapped(module)
    if source is not None:
        module = meta_clone(module)
        load(module, source, rules=rules, map=False)
    state: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    state.update(module.named_buffers(remove_duplicate=False))
    for path, one in module.named_modules(remove_duplicate=False):
        for name in one._non_persistent_buffers_set:
            state.pop(f"{path}.{name}" if path else name, None)
    return state


def names_by_tensor(state: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """The names of each tensor of a state: several of one that is tied."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return list(map(tuple, names.values()))


_V = TypeVar("_V")
_FORMAT = "modelstate-name-map"
_LISTED = 8


@dataclass(frozen=True, slots=True)
class NameMap:
    """What the names of `module.state_dict()` are called in the module as it runs, and in a program exported from it.

    They differ where a state-dict hook renames. Captured with `NameMap.of(module)` when the program is exported, and
    kept beside it (`to_json`), it does without the module's code. It is a rule, too: `rules=[name_map]` leads a
    checkpoint in either spelling to the runtime names.
    """

    runtime: Mapping[str, str]
    """From each name of the state dict to the runtime name of the same tensor."""
    eager: Mapping[str, str]
    """From each runtime name to a name of the state dict; where tensors are tied, several may lead to one."""
    extra: tuple[str, ...] = ()
    """Names of the state dict that hold no tensors: extra state, which a program cannot take."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Runtime names of one tensor: one of them is enough."""
    _crossed: frozenset[str] = field(init=False, repr=False, compare=False)
    """Names that both sides have, for different tensors."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "runtime", MappingProxyType(dict(self.runtime)))
        put(self, "eager", MappingProxyType(dict(self.eager)))
        put(self, "_crossed", frozenset(n for n, to in self.runtime.items() if n != to and n in self.eager))

    def __hash__(self) -> int:
        return hash((*self.runtime.items(), *self.eager.items(), *self.extra))

    def __reduce__(self) -> Any:
        return NameMap, (dict(self.runtime), dict(self.eager), self.extra, self.ties)

    def __repr__(self) -> str:
        renamed = sum(name != to for name, to in self.runtime.items())
        return f"<NameMap of {len(self.eager)} names, {renamed} renamed>"

    @classmethod
    def of(cls, module: nn.Module) -> "NameMap":
        """Finds out which tensor stands under which name, by the identity of the tensors and not by their names.

        Raises `NameMapError` where a hook splits, fuses, computes or leaves out tensors, which no map of names can
        express (with the module at hand, `modelstate.serve.runtime_state(module, checkpoint)` follows them), and
        `ModelCodeError` where a hook raises.
        """
        state = runtime_state(module)
        try:
            saved = module.state_dict(keep_vars=True)
        except Exception as error:
            raise ModelCodeError(
                "state_dict() of the module raised",
                where=type(module).__name__,
                found=f"{type(error).__name__}: {error}",
            ) from error
        groups = _Groups(state)
        extra = [name for name, value in saved.items() if not isinstance(value, torch.Tensor)]
        for name, value in saved.items():
            if isinstance(value, torch.Tensor):
                groups.add(name, value)
        groups.check(type(module).__name__)
        runtime, eager = groups.pairs()
        order = {name: runtime[name] for name in saved if name in runtime}
        return cls(order, {name: eager[name] for name in state}, tuple(extra), groups.ties())

    def to_runtime(self, state: Mapping[str, _V]) -> dict[str, _V]:
        """A state dict, or anything else by these names, in either spelling, by runtime names: all of them.

        Extra state is left out. Raises `NameMapError` for names that are too many or missing, with the nearest ones,
        and for two spellings of one name that have different values.
        """
        shown = self._crossed if self._means_runtime(state) else ()
        given: dict[str, _V] = {}
        for name, value in state.items():
            to = name if name in shown else self.runtime.get(name, name)
            if name not in self.extra and not same_value(given.setdefault(to, value), value):
                raise NameMapError(
                    "two names of one tensor, with different values",
                    where=to,
                    found=f"{name!r}, and another spelling of it",
                    remedy="leave one of them out",
                    names=(name, to),
                )
        self._check(given, self.eager, "runtime")
        return {name: given[name] if name in given else given[self._twin(name, given)] for name in self.eager}

    def to_eager(self, state: Mapping[str, _V]) -> dict[str, _V]:
        """The same by the names of the state dict. Raises what `to_runtime` raises."""
        given = self.to_runtime(state)
        return {name: given[to] for name, to in self.runtime.items()}

    def to_json(self) -> str:
        """All of it, for a file beside the program."""
        return json.dumps(
            {
                "format": _FORMAT,
                "version": 1,
                "runtime": dict(self.runtime),
                "eager": dict(self.eager),
                "extra": list(self.extra),
                "ties": list(map(list, self.ties)),
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> "NameMap":
        """What `to_json` has written. Raises `NameMapError`."""
        try:
            found = json.loads(text)
            if found["format"] != _FORMAT or found["version"] != 1:
                raise ValueError(f"{found['format']!r}, version {found['version']!r}")
            runtime, eager, extra = found["runtime"], found["eager"], found["extra"]
            ties = tuple(map(tuple, found["ties"]))
            texts = [*runtime, *runtime.values(), *eager, *eager.values(), *extra]
            if not all(isinstance(one, str) for one in texts):
                raise ValueError("a name that is no text")
            if not (
                set(runtime.values()) <= set(eager)
                and set(eager.values()) <= set(runtime)
                and {*chain(*ties)} <= set(eager)
            ):
                raise ValueError("names that lead nowhere")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise NameMapError(
                "this is no map of names",
                expected="what NameMap.to_json() has written",
                found=f"{type(error).__name__}: {error}",
            ) from error
        return cls(runtime, eager, tuple(extra), ties)

    # As a rule.

    def rename(self, name: str) -> str | None:
        """The runtime name of a name of the state dict; None for every other."""
        to = self.runtime.get(name)
        return None if to == name or (name in self._crossed) else to

    def apply(self, course: RuleContext) -> None:
        """Leads all names to the runtime names, from either spelling."""
        before, made = course.entries, dict[str, Entry]()
        shown = self._means_runtime(before)
        for name, entry in before.items():
            if name in self.extra:
                course.fail(name, "the program has the extra state that it was exported with, and takes no other")
                continue
            to = name if shown and name in self._crossed else self.runtime.get(name, name)
            if to != name:
                entry = entry._replace(rules=(*entry.rules, repr(self)), names=(*entry.names, name))
            first = made.setdefault(to, entry)
            if first is not entry and not course.equal(first, entry):
                course.problems.append(NameClash(to, (*first.sources, *entry.sources)))
        course.replace(made)

    def _means_runtime(self, names: Iterable[str]) -> bool:
        return bool(self._crossed) and not self._crossed.isdisjoint(names) and self._is_runtime(names)

    def _is_runtime(self, names: Iterable[str]) -> bool:
        """Whether names that both sides have are meant as the program has them: the others tell."""
        names = set(names)
        eager = sum(name in names for name in self.runtime if name not in self.eager)
        runtime = sum(name in names for name in self.eager if name not in self.runtime)
        if eager == runtime:
            crossed = sorted(self._crossed)
            raise NameMapError(
                "a hook exchanges names, so that nothing tells which spelling these are",
                found=_listed(crossed),
                remedy="rename them first, so that only one spelling has them",
                names=crossed,
            )
        return runtime > eager

    def _twin(self, name: str, given: Mapping[str, object]) -> str:
        """Another runtime name of the same tensor that is given; the name itself where there is none."""
        return next((one for tie in self.ties if name in tie for one in tie if one in given), name)

    def _check(self, given: Mapping[str, object], wanted: Mapping[str, str], what: str) -> None:
        known = [*self.eager, *(name for name in self.runtime if name not in self.eager)]
        unknown = [name for name in given if name not in wanted]
        missing = [name for name in wanted if name not in given and self._twin(name, given) not in given]
        if not unknown and not missing:
            return
        lines = [f"{name!r} is unknown{_did_you_mean(name, known)}" for name in unknown[:_LISTED]]
        lines += [f"{name!r} is missing" for name in missing[:_LISTED]]
        more = len(unknown) + len(missing) - len(lines)
        raise NameMapError(
            f"names that are not those of the program: {len(unknown)} too many, {len(missing)} missing",
            expected=f"the {len(wanted)} {what} names, or those of the state dict",
            found="; ".join(lines) + (f"; and {more} more" if more else ""),
            remedy="correct the names, or take the state dict of the module that was exported",
            names=(*unknown, *missing),
        )


class _Groups:
    """Which names of a state dict, and which runtime names, stand for one tensor."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._by_id: dict[int, list[str]] = {}
        self._by_view: dict[object, list[str]] = {}
        self._by_storage: dict[int, list[str]] = {}
        for name, tensor in state.items():
            group = self._by_id.setdefault(id(tensor), [])
            group.append(name)
            self._by_view[view_key(tensor)] = group
            self._by_storage.setdefault(storage_id(tensor), []).append(name)
        self._groups = {id(group): group for group in self._by_id.values()}
        self._saved: dict[int, list[str]] = {key: [] for key in self._groups}
        self._computed: list[tuple[str, str]] = []

    def add(self, name: str, value: torch.Tensor) -> None:
        group = self._by_id.get(id(value))
        if group is None:
            group = self._by_view.get(view_key(value))  # a hook may detach what it renames
        if group is not None:
            self._saved[id(group)].append(name)
            return
        shared = self._by_storage.get(storage_id(value), []) if storage_id(value) else []
        why = f"a part of {shared[0]}" if shared else "made of others, or of nothing that the module has"
        self._computed.append((name, why))

    def check(self, where: str) -> None:
        lost = [name for key, group in self._groups.items() if not self._saved[key] for name in group]
        if not self._computed and not lost:
            return
        lines = [f"{name} is {why}" for name, why in self._computed[:_LISTED]]
        if lost:
            lines.append(f"nothing saved is {_listed(lost)} as the module has it")
        raise NameMapError(
            "state-dict hooks split, fuse, compute or leave out tensors, which a map of names cannot express",
            where=where,
            expected="each tensor of the module, as it is, under a name of the state dict",
            found="; ".join(lines),
            remedy="keep the module's code at hand: ms.serve.runtime_state(module, checkpoint) follows its hooks",
            names=(*(name for name, _ in self._computed), *lost),
        )

    def ties(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(group) for group in self._groups.values() if len(group) > 1)

    def pairs(self) -> tuple[dict[str, str], dict[str, str]]:
        runtime: dict[str, str] = {}
        eager: dict[str, str] = {}
        for key, group in self._groups.items():
            saved = self._saved[key]
            same = [name for name in group if name in saved]
            old, new = [n for n in saved if n not in same], [n for n in group if n not in same]
            pairs = [(name, name) for name in same] + list(zip(old, new, strict=False))
            runtime.update(pairs)
            eager.update((to, name) for name, to in pairs)
            # A tie that one side knows under fewer names.
            runtime.update((name, group[0]) for name in saved if name not in runtime)
            eager.update((name, saved[0]) for name in group if name not in eager)
        return runtime, eager


def view_key(tensor: torch.Tensor) -> object:
    """The same for tensors that are the same elements of one storage, in the same order."""
    storage = storage_id(tensor)
    if not storage or tensor.layout is not torch.strided:
        return id(tensor)
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _did_you_mean(name: str, names: list[str]) -> str:
    near = nearest(name, names)
    return f" (did you mean {near!r}?)" if near else ""


class StateNames:
    """Leads checkpoints, by a map or by the code of the module that was exported, to the names of a program's state."""

    def __init__(self, state: Mapping[str, torch.Tensor], names: NameMap | nn.Module | None) -> None:
        self._state = state
        self._names = names if isinstance(names, NameMap) else None
        self._module = meta_clone(names) if isinstance(names, nn.Module) else None

    def names(self) -> Collection[str]:
        """As `Target.names`."""
        if self._module is not None:
            return list(self._module.state_dict())
        return list(self._state if self._names is None else self._names.runtime)

    def rules(self) -> tuple[Rule, ...]:
        """As `Target.rules`."""
        return () if self._names is None else (self._names,)

    def skeleton(self, given: Collection[str]) -> nn.Module:
        """As `Target.skeleton`."""
        # Code of the module is for the names that it saves; the program's own names need none.
        if self._module is not None and not set(given) <= self._state.keys():
            return meta_clone(self._module)
        return state_module(self._state)


class NamedTargetMixin:
    """What targets have in common that are a graph and a state. As `Target`."""

    _names: StateNames
    _hidden: dict[str, torch.Tensor]

    def names(self) -> Collection[str]:
        return self._names.names()

    def is_runtime(self, given: Collection[str]) -> bool:
        return False  # rules lead to a skeleton without hooks, or the module's own take the names that it saves

    def rules(self, given: Collection[str]) -> tuple[Rule, ...]:
        return self._names.rules()

    def skeleton(self, given: Collection[str]) -> nn.Module:
        return self._names.skeleton(given)

    def hidden(self) -> dict[str, torch.Tensor]:
        return self._hidden

    def renew(self, program: Any) -> None:
        """Code of a graph writes into buffers, and replaces none."""


def check_names(state: Collection[str], names: NameMap | nn.Module | None, where: str) -> None:
    """Raises `LiveTargetError` for names of another module than the one that was exported."""
    if names is None:
        return
    found = runtime_state(names) if isinstance(names, nn.Module) else names.eager
    if set(found) != set(state):
        differing = sorted(set(found) ^ set(state))
        raise LiveTargetError(
            "names= is of another module than the program",
            where=where,
            expected="the module that was exported, or NameMap.of(module)",
            found=f"names that only one of them has: {', '.join(differing[:8])}",
        )
