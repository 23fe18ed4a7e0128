"""Maps between the names of a module's state dict and the names in the module tree that runs.

The two differ where state-dict hooks rename, split or fuse tensors. An exported program has the names of the tree.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, repeat
from typing import Literal

import msgspec
import torch
from torch import nn

from modelstate.errors import NameMapError, code_errors
from modelstate.rules.rule import Entry, RuleContext
from modelstate.serve.meta_clone import runtime_state
from modelstate.text_format import listed
from modelstate.torch_compat.modules import state_dict_of
from modelstate.torch_compat.private import storage_id


class NameMap(msgspec.Struct, frozen=True, tag_field="format", tag="modelstate-name-map"):
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
    version: Literal[1] = 1
    """The version of the JSON."""

    def __post_init__(self) -> None:
        if not {*self.runtime.values()} <= self.eager.keys() or not {*self.eager.values()} <= self.runtime.keys():
            raise ValueError("names without a counterpart")

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
        new_names: defaultdict[object, list[str]] = defaultdict(list)
        for name, tensor in state.items():
            new_names[view_key(tensor)].append(name)
        old_names: defaultdict[object, list[str]] = defaultdict(list)
        by_storage = {storage_id(tensor): name for name, tensor in reversed(state.items()) if storage_id(tensor)}
        extra, found, wrong = list[str](), list[str](), list[str]()
        for name, value in state_dict_of(module, keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                extra.append(name)
            elif view_key(value) in new_names:  # also where a hook detaches the tensors that it renames
                old_names[view_key(value)].append(name)
            else:
                part = by_storage.get(storage_id(value))
                found.append(f"{name} is " + (f"a part of {part}" if part else "computed, or no tensor of the module"))
                wrong.append(name)
        runtime: dict[str, str] = {}
        eager: dict[str, str] = {}
        for key, names in new_names.items():
            saved = old_names[key]
            if not saved:
                found.append(f"no entry is {', '.join(names)} unchanged")
                wrong += names
                continue
            # The state dict and the module may have different numbers of names for a tied tensor.
            same = {name: name for name in names if name in saved}
            old, new = [name for name in saved if name not in same], [name for name in names if name not in same]
            runtime |= same | dict(zip(old, chain(new, repeat(names[0])), strict=False))
            eager |= same | dict(zip(new, chain(old, repeat(saved[0])), strict=False))
        exchanged = [name for name, other in runtime.items() if name != other and name in state]
        found += [f"{name} is the name of another tensor of the module" for name in exchanged]
        if found:
            raise NameMapError(
                "state-dict hooks do more than rename tensors, which a map of names cannot express",
                where=type(module).__name__,
                expected="each tensor of the module, unchanged, under a name of the state dict",
                found=listed(found, 8, "; "),
                remedy="keep the module's code: modelstate.serve.runtime_state(module, checkpoint) follows its hooks",
                names=[*wrong, *exchanged],
            )
        return cls(runtime, eager, tuple(extra))

    def to_json(self) -> str:
        """Returns the map as JSON, for a file beside the program.

        Returns:
            The text that `from_json` reads.

        Examples:
            >>> Path("names.json").write_text(names.to_json())
        """
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

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
        expected, remedy = "the text of NameMap.to_json()", "write the map again: NameMap.of(module).to_json()"
        with code_errors(NameMapError, "this is not a map of names", expected=expected, remedy=remedy):
            return msgspec.json.decode(text, type=cls)

    # As a rule.

    def rename(self, name: str) -> str | None:
        """Returns the runtime name for a name of the state dict.

        Args:
            name: A name in a checkpoint.

        Returns:
            None where the name does not change.

        Examples:
            >>> names.rename("layers.0.weight")
            'layers.0.layer.weight'
        """
        runtime = self.runtime.get(name)
        return None if runtime == name else runtime

    def apply(self, context: RuleContext) -> None:
        """Renames all entries, with names of either kind, to the runtime names.

        Args:
            context: The entries of a checkpoint, and the problems that have been found.

        Examples:
            >>> live.swap("checkpoint.pt", rules=[names])
        """
        context.mark_used()
        first = dict[str, Entry]()
        for name, entry in context.entries.items():
            runtime = self.runtime.get(name, name)
            if name in self.extra:
                context.fail(name, "the program has the extra state that it was exported with, and takes no other")
            elif first.setdefault(runtime, entry) is not entry and context.equal(first[runtime], entry):
                context.leave_out(name)  # the same tensor under both kinds of names
            elif runtime != name:
                context.make(runtime, entry.content, [(name, entry)])


def view_key(tensor: torch.Tensor) -> object:
    """A key that is equal for tensors with the same elements of one storage, in the same order."""
    storage = storage_id(tensor)
    if not storage or tensor.layout is not torch.strided:
        return id(tensor)
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
