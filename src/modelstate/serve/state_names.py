"""Maps between the names of a module's state dict and the names in the module tree that runs.

The two differ where state-dict hooks rename, split or fuse tensors. An exported program has the names of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Literal

import msgspec
import torch
from torch import nn

from modelstate.errors import NameMapError
from modelstate.problems import Problem, ProblemKind
from modelstate.rules.rule import Entry, RuleContext
from modelstate.serve.meta_clone import runtime_state
from modelstate.text_format import listed
from modelstate.torch_compat.modules import state_dict_of
from modelstate.torch_compat.private import storage_id


def names_by_tensor(state: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Groups the names of a state by tensor; the group of a tied tensor has several names."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return list(map(tuple, names.values()))


_LISTED = 8


class NameMap(msgspec.Struct, frozen=True):
    """A map between the names of `module.state_dict()` and the runtime names: those of a program exported from it.

    The names differ where a state-dict hook renames. `NameMap.of(module)` captures them when the program is exported;
    `to_json` saves them beside it, so that the module's code is not needed later. A map is also a rule:
    `rules=[name_map]` renames a checkpoint with either kind of names to the runtime names.

    Examples:
        >>> names = modelstate.serve.NameMap.of(module)
        >>> live = modelstate.Live(torch.export.export(module, (x,)), names=names)
        >>> live.swap("checkpoint.pt")
    """

    runtime: dict[str, str]
    """The runtime name for each name of the state dict."""
    eager: dict[str, str]
    """A name of the state dict for each runtime name. Several runtime names of a tied tensor may have the same one."""
    extra: tuple[str, ...] = ()
    """Names of extra state in the state dict, which a program cannot take."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of runtime names of one tensor. A checkpoint needs one name of each group."""

    def __post_init__(self) -> None:
        has_counterparts = set(self.runtime.values()) <= set(self.eager) and set(self.eager.values()) <= set(
            self.runtime
        )
        if not has_counterparts or not {*chain(*self.ties)} <= set(self.eager):
            raise ValueError("names without a counterpart")

    @property
    def _crossed(self) -> set[str]:
        """Names that the state dict and the runtime state have for different tensors."""
        return {name for name, runtime in self.runtime.items() if name != runtime and name in self.eager}

    def __hash__(self) -> int:
        return hash((*self.runtime.items(), *self.eager.items(), *self.extra))

    def __repr__(self) -> str:
        renamed = sum(name != runtime for name, runtime in self.runtime.items())
        return f"<NameMap of {len(self.eager)} names, {renamed} renamed>"

    @classmethod
    def of(cls, module: nn.Module) -> NameMap:
        """Captures the names of a module by the identity of its tensors.

        Args:
            module: The module that is, or will be, exported.

        Returns:
            The map.

        Raises:
            NameMapError: A hook splits, fuses, computes or leaves out tensors, which a map of names cannot express.
                `modelstate.serve.runtime_state(module, checkpoint)` follows such hooks.
            ModelCodeError: A hook raises.

        Examples:
            >>> names = modelstate.serve.NameMap.of(module)
        """
        state = runtime_state(module)
        saved = state_dict_of(module, keep_vars=True)
        groups = _Groups(state)
        extra = [name for name, value in saved.items() if not isinstance(value, torch.Tensor)]
        for name, value in saved.items():
            if isinstance(value, torch.Tensor):
                groups.add(name, value)
        groups.check(type(module).__name__)
        runtime, eager = groups.pairs()
        order = {name: runtime[name] for name in saved if name in runtime}
        return cls(order, {name: eager[name] for name in state}, tuple(extra), groups.ties())

    def to_json(self) -> str:
        """Returns the map as JSON, for a file beside the program.

        Returns:
            The text that `from_json` reads.

        Examples:
            >>> Path("names.json").write_text(names.to_json())
        """
        head = {"format": "modelstate-name-map", "version": 1}
        return msgspec.json.format(msgspec.json.encode(head | msgspec.to_builtins(self)), indent=1).decode()

    @classmethod
    def from_json(cls, text: str) -> NameMap:
        """Reads the text that `to_json` returns.

        Args:
            text: The map as JSON.

        Returns:
            The map.

        Raises:
            NameMapError: The text is not a map.

        Examples:
            >>> names = modelstate.serve.NameMap.from_json(Path("names.json").read_text())
        """
        try:
            msgspec.json.decode(text, type=_Head)
            return msgspec.json.decode(text, type=cls)
        except (ValueError, TypeError, msgspec.DecodeError, RecursionError) as error:
            raise NameMapError(
                "this is not a map of names",
                expected="the text of NameMap.to_json()",
                found=f"{type(error).__name__}: {error}",
            ) from error

    # As a rule.

    def rename(self, name: str) -> str | None:
        """Returns the runtime name for a name of the state dict.

        Args:
            name: A name in a checkpoint.

        Returns:
            None where the name does not change or is ambiguous.

        Examples:
            >>> names.rename("layers.0.weight")
            'layers.0.layer.weight'
        """
        runtime = self.runtime.get(name)
        return None if runtime == name or (name in self._crossed) else runtime

    def apply(self, context: RuleContext) -> None:
        """Renames all entries, with names of either kind, to the runtime names.

        Args:
            context: The entries of a checkpoint, and the problems that have been found.

        Raises:
            NameMapError: nothing tells which kind of names the entries have.

        Examples:
            >>> live.swap("checkpoint.pt", rules=[names])
        """
        before, renamed = context.entries, dict[str, Entry]()
        has_runtime_names = self._has_runtime_names(before)
        for name, entry in before.items():
            if name in self.extra:
                context.fail(name, "the program has the extra state that it was exported with, and takes no other")
                continue
            runtime = name if has_runtime_names and name in self._crossed else self.runtime.get(name, name)
            if runtime != name:
                entry = entry._replace(rules=(*entry.rules, repr(self)), names=(*entry.names, name))
            first = renamed.setdefault(runtime, entry)
            if first is not entry and not context.equal(first, entry):
                context.problems.append(
                    Problem(ProblemKind.NAME_CLASH, runtime, others=(*first.sources, *entry.sources))
                )
        context.replace(renamed)

    def _has_runtime_names(self, names: Iterable[str]) -> bool:
        """Whether ambiguous names are runtime names, as the unambiguous ones show. False without ambiguous names."""
        names = set(names)
        if self._crossed.isdisjoint(names):
            return False
        eager = sum(name in names for name in self.runtime if name not in self.eager)
        runtime = sum(name in names for name in self.eager if name not in self.runtime)
        if eager == runtime:
            crossed = sorted(self._crossed)
            raise NameMapError(
                "a hook exchanges names, so these names are ambiguous",
                found=listed(crossed, _LISTED),
                remedy="rename them first, so that only one kind of name has them",
                names=crossed,
            )
        return runtime > eager


class _Head(msgspec.Struct):
    format: Literal["modelstate-name-map"]
    version: Literal[1]


class _Groups:
    """Groups the runtime names by tensor, and assigns the names of a state dict to the groups."""

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
        """Assigns an entry of the state dict to the group of its tensor."""
        group = self._by_id.get(id(value))
        if group is None:
            group = self._by_view.get(view_key(value))  # a hook may detach the tensors that it renames
        if group is not None:
            self._saved[id(group)].append(name)
            return
        shared = self._by_storage.get(storage_id(value), []) if storage_id(value) else []
        reason = f"a part of {shared[0]}" if shared else "computed, or no tensor of the module"
        self._computed.append((name, reason))

    def check(self, where: str) -> None:
        """Raises `NameMapError` where an entry is computed, or a tensor has no entry."""
        lost = [name for key, group in self._groups.items() if not self._saved[key] for name in group]
        if not self._computed and not lost:
            return
        computed = listed((f"{name} is {reason}" for name, reason in self._computed), _LISTED, "; ")
        absent = f"no entry is {listed(lost, _LISTED)} unchanged" if lost else ""
        raise NameMapError(
            "state-dict hooks split, fuse, compute or leave out tensors, which a map of names cannot express",
            where=where,
            expected="each tensor of the module, unchanged, under a name of the state dict",
            found="; ".join(filter(None, (computed, absent))),
            remedy="keep the module's code: modelstate.serve.runtime_state(module, checkpoint) follows its hooks",
            names=(*(name for name, _ in self._computed), *lost),
        )

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The groups of more than one name."""
        return tuple(tuple(group) for group in self._groups.values() if len(group) > 1)

    def pairs(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the runtime name for each saved name, and a saved name for each runtime name."""
        runtime: dict[str, str] = {}
        eager: dict[str, str] = {}
        for key, group in self._groups.items():
            saved = self._saved[key]
            same = [name for name in group if name in saved]
            old = [name for name in saved if name not in same]
            new = [name for name in group if name not in same]
            pairs = [(name, name) for name in same] + list(zip(old, new, strict=False))
            runtime.update(pairs)
            eager.update((new_name, old_name) for old_name, new_name in pairs)
            # The state dict and the module may have different numbers of names for a tied tensor.
            runtime.update((name, group[0]) for name in saved if name not in runtime)
            eager.update((name, saved[0]) for name in group if name not in eager)
        return runtime, eager


def view_key(tensor: torch.Tensor) -> object:
    """A key that is equal for tensors with the same elements of one storage, in the same order."""
    storage = storage_id(tensor)
    if not storage or tensor.layout is not torch.strided:
        return id(tensor)
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
