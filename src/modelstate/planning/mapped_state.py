"""`MappedState`: the part of a checkpoint that is loaded, as a state dict of mapped tensors."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import TypeGuard

import torch
from torch import nn

from modelstate.checkpoint.mapped import Maps
from modelstate.errors import CodecError, ForbiddenGlobalError, TransformError, UnsupportedTensorError, code_errors
from modelstate.formats.tree import is_container, nodes_of
from modelstate.io.engine import read_ranges
from modelstate.io.tensors import same_bytes
from modelstate.planning.matching import MatchedCheckpoint, prefixes
from modelstate.planning.recorder import own_state
from modelstate.rules.expression import Derived, Source, lacks_values, unchanged, values_of
from modelstate.rules.rule import Entry, Value
from modelstate.spec import Assemble, StoredComposite, StoredTensor
from modelstate.torch_compat.modules import load_pre_hooks, overrides, overrides_loading
from modelstate.torch_compat.plain import same_place, same_values
from modelstate.torch_compat.private import storage_id
from modelstate.transaction.transaction import Transaction, Write


class MappedState:
    """A matched checkpoint as a state dict of mapped tensors and other values, for the model's loading protocol.

    Results of rules, and tensors that the file does not align, get their values when code of the model uses them.
    A tensor that no rule changes is mapped when it is accessed.
    """

    def __init__(self, matched: MatchedCheckpoint, transaction: Transaction, initialised: Mapping[str, Entry]) -> None:
        self._checkpoint, self._transaction = matched.part, transaction
        self._entries, self._initialised = matched.applied.entries, initialised
        self.maps = Maps(matched.part.fingerprints, matched.part.format)
        self._deferred: dict[int, Write] = {}
        """By the ids of tensors that cannot be mapped: what computes or reads the values when code uses the tensor."""
        self._deferred_by_source: dict[object, Write] = {}
        self._values: dict[str, object] = {}
        self._origins: dict[int, tuple[str, Source | None]] = {}
        """Names and sources by the ids of the tensors of the state dict."""

    def value(self, name: str) -> object:
        """Returns the value of a name of the model; None for an unknown name."""
        entry = self._initialised.get(name) or self._entries.get(name)
        if name in self._values or entry is None:
            return self._values.get(name)
        content = entry.content
        if isinstance(content, Value):
            # Code of the model finds the error of a value that cannot be decoded, or is not read as a whole.
            self._values[name] = content.value if content.error is None else content.error
            return self._values[name]
        if isinstance(content, Derived) and lacks_values(content):
            value = torch.empty(content.shape, dtype=content.dtype, device="meta")
        elif isinstance(content, Derived) or self._cannot_be_mapped(content):
            # It gets its values when code uses them. Its pages are not allocated before.
            key = (content.extent, content.dtype, content.shape) if isinstance(content, StoredTensor) else id(content)
            deferred = self._deferred_by_source.get(key)
            if deferred is not None:  # another name of a tied tensor
                value = deferred.target.detach()
            else:
                value = torch.empty(content.shape, dtype=content.dtype, device="cpu")
                compute = partial(_compute, value, content, self.maps)  # which does not refer to this object
                self._deferred_by_source[key] = deferred = Write(value, value, compute)
                self._transaction.add(deferred)
            self._deferred[id(value)] = deferred
        else:
            value = self.maps.tensor(content)
        self._values[name], self._origins[id(value)] = value, (name, content)
        self._transaction.protect([value])
        return value

    def nested_values(self, modules: Mapping[str, nn.Module]) -> dict[str, tuple[object, list[str]]]:
        """Returns the values with tensors in them, such as a list of tensors, that code of modules may take.

        Each has its name in the model, a copy of the value, and the names of what is in it. A value that a rule has
        changed in more than its name is left out.

        Args:
            modules: The modules by the prefixes of their names, such as "encoder.0.".
        """
        part = self._checkpoint
        tree, above = part.contents.tree, f"{part.key}." if part.key else ""
        of_tree = (path for path, node in nodes_of(tree) if path and is_container(node))
        names_in = {path[len(above) :]: list[str]() for path in of_tree if path.startswith(above)}
        coded = tuple(prefix for prefix, module in modules.items() if names_in and _has_code(module))
        if not coded:
            return {}
        for name in (*part.flat.tensors, *part.flat.values):
            for prefix in prefixes(name):
                if prefix[:-1] in names_in:
                    names_in[prefix[:-1]].append(name)
        renamed = {entry.sources[0]: name for name, entry in self._entries.items() if self._is_unchanged(entry)}
        nested: dict[str, tuple[object, list[str]]] = {}
        for path, names in names_in.items():
            new = [renamed.get(name, "") for name in names]
            own = {name.removesuffix(old[len(path) :]) for name, old in zip(new, names, strict=True)}
            if len(own) == 1 and not own.intersection(("", *new)):
                name = own.pop()
                if name.startswith(coded) and _is_value(name, modules):
                    try:
                        value = part.value(path)
                    except (CodecError, ForbiddenGlobalError, UnsupportedTensorError):
                        continue  # matters where code takes what is in it
                    is_shared = part.format == "mapping"  # else it has been read just now
                    nested[name] = deepcopy(value) if is_shared else value, new
        return nested

    def _is_unchanged(self, entry: Entry) -> bool:
        """Whether the content is that of one name of the checkpoint."""
        if len(entry.sources) != 1:
            return False
        content, stored = entry.content, self._checkpoint.flat.tensors.get(entry.sources[0])
        if isinstance(content, Derived) and content.change is unchanged:
            (content,) = content.parts
        return isinstance(content, Value) or content is stored

    def settle(self) -> None:
        """Ends the walk: from now on, deferred values are computed only for their slots."""
        for deferred in self._deferred_by_source.values():
            deferred.done = True

    def origin_of(self, value: torch.Tensor) -> tuple[str, Source | None]:
        """Returns the name and the source of a tensor of the state dict; neither for a tensor of the model's code.

        The source is None where the model's code has used the tensor, because the code may have changed the values.
        """
        name, source = self._origins.get(id(value), ("", None))
        used = self._transaction.used_storages
        return name, None if used and storage_id(value) in used else source

    def with_values(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the state dict with its values, computed or read. Raises `TransformError`."""
        name, stored = self.origin_of(value)
        if isinstance(stored, StoredTensor):
            return self._checkpoint.read(stored)
        deferred = self._deferred.get(id(value))
        if deferred is not None and not deferred.done:
            with code_errors(TransformError, "the value cannot be computed; nothing has been changed", where=name):
                deferred.run(None)
            deferred.done = True
        return value

    def are_equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        deferred = self._deferred.get(id(first))
        if deferred is not None and deferred is self._deferred.get(id(second)):
            return True  # the results of one computation
        if same_place(first, second):
            return same_values(first, second)  # compared by their metadata, without a read
        sources = [self.origin_of(value)[1] for value in (first, second)]
        runs = [stored for stored in sources if isinstance(stored, StoredTensor) and stored.is_contiguous]
        if len(runs) < 2:
            return same_values(self.with_values(first), self.with_values(second))
        one, other = runs
        read = partial(read_ranges, files=self._checkpoint.fingerprints)
        return (one.dtype, one.shape) == (other.dtype, other.shape) and same_bytes(one.extent, other.extent, read)

    def _cannot_be_mapped(self, content: object) -> TypeGuard[StoredTensor | StoredComposite]:
        """Whether the bytes of a tensor cannot be shown as a map: they are not aligned, or their file has no maps."""
        parts = content.parts if isinstance(content, StoredComposite) and isinstance(content.build, Assemble) else ()
        for part in parts or (content,):
            if isinstance(part, StoredTensor) and part.nbytes:
                is_aligned = not part.is_contiguous or part.extent.start % part.dtype.itemsize == 0
                if not (is_aligned and self.maps.is_mappable(part.extent.path)):
                    return True
        return False


def _has_code(module: nn.Module) -> bool:
    """Whether code of a module, or of a user, gets the state dict of the module while it is loaded."""
    return overrides_loading(module) or overrides(module, "load_state_dict") or bool(load_pre_hooks(module))


def _is_value(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a container is a value in the state dict of a module, and does not have the names of a module in it."""
    prefix = name[: name.rfind(".") + 1]
    module = modules.get(prefix)
    if module is None or f"{name}." not in modules:
        return module is not None
    return overrides(module, "load_state_dict") and name[len(prefix) :] in own_state(module)


def _compute(target: torch.Tensor, stored: Source, maps: Maps, _: Transaction | None) -> None:
    with torch.no_grad():
        target.copy_(values_of(stored, maps.read))
