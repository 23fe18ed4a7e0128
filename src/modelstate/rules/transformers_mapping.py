"""A rule for the names and layouts in which transformers saves its models.

From version 5 on, transformers renames, splits and joins the weights of many models when it saves them, and reverses
that when it loads them. The conversion mapping is transformers' own (`transformers.conversion_mapping`): it is read
from the version that is installed, and not copied here. Operations are recognised by the names of their classes, so
that a load of another model imports nothing of transformers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
from torch import nn

from modelstate.errors import OptionError, PackageError
from modelstate.problems import one_line
from modelstate.rules.expression import Source, concatenated, narrowed, reshaped, transposed
from modelstate.rules.rule import Rule, RuleContext, irreversible
from modelstate.rules.schema import Applied, Rules
from modelstate.text_format import listed
from modelstate.transaction.slots import HIDDEN, slots_of

State = dict[str, list[Source]]
"""The tensors of a conversion, by the pattern that their names match."""

Operation: TypeAlias = Any
"""An operation of transformers; its attributes depend on its class."""


class _Renaming(Protocol):
    """A `WeightRenaming` of transformers."""

    def rename_source_key(self, name: str, /) -> tuple[str, str | None]:
        """Returns the new name, and the pattern that matched it."""


class _Converter(_Renaming, Protocol):
    """A `WeightConverter` of transformers."""

    source_patterns: Sequence[str]
    target_patterns: Sequence[str]
    operations: Sequence[Operation]


def from_transformers(model: nn.Module) -> Rules:
    """Returns rules from the files of `save_pretrained` to the names and shapes of a transformers model.

    They do what transformers does in `from_pretrained`: they apply its conversion mapping for this model, its
    submodules and older files, and add or remove the prefix of the base model where that gives a name of the model.
    A name that leads to no tensor of the model is left as it is. `ms.load` and `ms.plan` apply these rules by
    themselves if a file fits only with them, so they are needed only together with other rules.

    Args:
        model: A `transformers.PreTrainedModel`, with memory or on the meta device.

    Returns:
        Rules for `rules=`. They work in one direction, and can be applied any number of times.

    Raises:
        OptionError: The model is not one of transformers.
        PackageError: This version of transformers has no conversion mapping.

    Examples:
        >>> rules = [ms.rules.Prefix(strip="module."), ms.rules.from_transformers(model)]
        >>> ms.load(model, "training.pt", rules=rules)
    """
    if not is_transformers_model(model):
        raise OptionError(
            "rules can be taken from models of transformers only",
            expected="a transformers.PreTrainedModel",
            found=f"{type(model).__module__}.{type(model).__qualname__}",
            remedy="for a wrapper, give the model within it",
        )
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError as error:
        raise PackageError(
            "this version of transformers has no conversion mapping",
            found=error,
            remedy='pip install "transformers>=5"; older versions save a model under its own names',
        ) from error
    transforms = get_model_conversion_mapping(model)
    shapes = {
        name: tuple(slot.tensor.shape)
        for name, slot in slots_of(model).by_name.items()
        if slot.kind != HIDDEN and not nn.parameter.is_lazy(slot.tensor)
    }
    return Rules(
        [
            TransformersMapping(
                type(model).__name__,
                tuple(transform for transform in transforms if not isinstance(transform, WeightConverter)),
                tuple(transform for transform in transforms if isinstance(transform, WeightConverter)),
                shapes,
                getattr(model, "base_model_prefix", "") or "",
                getattr(model, "config", None),
            )
        ]
    )


def is_transformers_model(model: nn.Module) -> bool:
    """Whether the class of a model is derived from `PreTrainedModel`. Nothing is imported to find out."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__ == "transformers.modeling_utils"
        for base in type(model).__mro__
    )


def notes_of(rules: Iterable[Rule], applied: Applied) -> list[str]:
    """Returns notes for a report on the tensors that a conversion mapping has renamed or converted."""
    notes = []
    for mapping in [rule for rule in rules if isinstance(rule, TransformersMapping)]:
        names = [name for name, entry in applied.entries.items() if repr(mapping) in entry.rules]
        if names:
            what = f"{len(names)} renamed or converted as transformers does it for {mapping.model}"
            notes.append(f"{what}: {listed(names, 4)}")
    return notes


class _Target(NamedTuple):
    """Where a tensor of the file goes."""

    name: str
    converter: _Converter | None = None
    """Makes the tensor of that name from all that have this target; None if the tensor is only renamed."""
    pattern: str = ""
    """The pattern of the converter that it matches."""


class TransformersMapping(msgspec.Struct, frozen=True, eq=False):
    """The conversion mapping of one model. Made by `from_transformers`."""

    model: str
    """The name of the model's class."""
    renamings: tuple[_Renaming, ...]
    converters: tuple[_Converter, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the model's tensors."""
    base_prefix: str
    config: Any
    """The model's configuration, an object of transformers."""

    def __repr__(self) -> str:
        return f"from_transformers({self.model})"

    def rename(self, name: str) -> str | None:
        target = self._target(name, *self._copied_transforms()).name
        return None if target == name else target

    def reverse(self) -> TransformersMapping:
        raise irreversible(self, "model.save_pretrained(path) is the way back")

    def apply(self, context: RuleContext) -> None:
        transforms = self._copied_transforms()
        # In the order in which transformers reads: it matters for the experts of a layer, and for grouped renamings.
        targets = {name: self._target(name, *transforms) for name in sorted(context.entries, key=_natural_order)}
        groups: dict[str, dict[str, list[str]]] = {}
        for name, (target, converter, pattern) in targets.items():
            if converter is not None:
                groups.setdefault(target, {}).setdefault(pattern, []).append(name)
        context.mark_used()
        for name, entry in context.entries.items():
            target, converter, _ = targets[name]
            if converter is not None:
                if (group := groups.pop(target, None)) is not None:
                    self._convert(context, target, converter, group)
            elif target != name:
                context.make(target, entry.content, [(name, entry)])

    def _copied_transforms(self) -> tuple[tuple[_Renaming, ...], tuple[_Converter, ...]]:
        """Returns copies of the transforms, because transforms keep state from one use to the next."""
        return copy.deepcopy((self.renamings, self.converters))

    def _target(self, name: str, renamings: Sequence[_Renaming], converters: Sequence[_Converter]) -> _Target:
        renamed, matched = name, None
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        for converter in converters:
            renamed, pattern = converter.rename_source_key(renamed)
            if pattern is not None:
                matched = converter, pattern
                break
        renamed = self._with_prefix(renamed)
        if renamed in self.shapes:
            return _Target(renamed, *matched) if matched else _Target(renamed)
        return _Target(self._with_prefix(name) if name in self.shapes else name)

    def _with_prefix(self, name: str) -> str:
        """Returns the name with or without the prefix of the base model, whichever the model has."""
        if not (prefix := self.base_prefix and f"{self.base_prefix}."):
            return name
        if name.startswith(prefix) and name.removeprefix(prefix) in self.shapes:
            return name.removeprefix(prefix)
        return prefix + name if prefix + name in self.shapes else name

    def _convert(
        self, context: RuleContext, target: str, converter: _Converter, group: Mapping[str, Sequence[str]]
    ) -> None:
        """Puts what a converter makes of a group of tensors under the names of the model."""
        of = [(name, context.entries[name]) for names in group.values() for name in names]
        for name, entry in of:
            if why := entry.why_not_plain:
                return context.fail(name, why)
        state: State = {}
        for pattern, names in group.items():
            tensors = (context.entries[name].tensor for name in names)
            state[pattern] = [tensor for tensor in tensors if tensor is not None]
        conversion = _Conversion(target, converter.source_patterns, converter.target_patterns, self)
        try:
            for operation in converter.operations:
                state = conversion.apply(operation, state)
            for name, tensor in conversion.named(state):
                context.make(name, tensor, of)
        except Exception as error:  # torch raises for shapes that do not fit; an operation may be unknown
            context.fail(target, one_line(error))


def _natural_order(name: str) -> list[tuple[str, int, str]]:
    """Returns a sort key that orders numbers at the ends of parts by value, and before words."""
    key = []
    for part in name.split("."):
        word = part.rstrip("0123456789")
        digits = part[len(word) :]
        number = digits.lstrip("0")  # not converted: a file may have numbers of any length
        key.append((word, len(number) if digits else -1, number))
    return key


class _Conversion(msgspec.Struct, frozen=True):
    """Applies the operations of one converter to the tensors that go to one name. Reads no values."""

    target: str
    sources: Sequence[str]
    """The converter's patterns for names in the file."""
    targets: Sequence[str]
    """The converter's patterns for names in the model."""
    mapping: TransformersMapping

    def apply(self, operation: Operation, state: State) -> State:
        """Applies one operation. Raises `NotImplementedError` if it is unknown, and what torch raises for shapes."""
        kind = type(operation)
        method = _OPERATIONS.get(kind.__name__) if kind.__module__ == "transformers.core_model_loading" else None
        if method is None:
            raise NotImplementedError(f"the operation {kind.__module__}.{kind.__name__} is not known here")
        return method(self, operation, state)

    def named(self, state: State) -> Iterator[tuple[str, Source]]:
        """Yields the results of the operations, by names of the model."""
        whole = self.target.replace("*.", "0.")
        first = next((pattern for pattern in state if pattern in whole), None)
        if first is None:
            raise ValueError(f"no pattern of {', '.join(state)} is in the name {whole}")
        before, _, after = whole.partition(first)
        for pattern, (tensor,) in state.items():
            yield before + pattern + after, tensor

    def chunk(self, operation: Operation, state: State) -> State:
        tensor, targets = _single(state), list(self.targets)
        if operation.num_shards_attribute is not None:
            count = getattr(self.mapping.config.get_text_config(), operation.num_shards_attribute)
            targets = [targets[0].replace("*", str(index)) for index in range(count)]

        size = -(-tensor.shape[operation.dim] // len(targets))  # as torch.chunk cuts
        return {target: [narrowed(tensor, operation.dim, at * size, size)] for at, target in enumerate(targets)}

    def split(self, operation: Operation, state: State) -> State:
        tensor, start, result = _single(state), 0, State()
        for target in self.targets:
            size = self.mapping.shapes[self.target.replace(self.targets[0], target)][operation.dim]
            result[target] = [narrowed(tensor, operation.dim, start, size)]
            start += size
        if start != tensor.shape[operation.dim]:
            raise ValueError(f"the parts add up to {start} in dimension {operation.dim} of {list(tensor.shape)}")
        return result

    def concatenate(self, operation: Operation, state: State) -> State:
        (target,) = self.targets
        parts = [tensor for pattern in self.sources for tensor in state.get(pattern, ())]
        return {target: [_joined(parts, operation.dim, stacks=False)]}

    def merge(self, operation: Operation, state: State) -> State:
        result = {pattern: [_joined(tensors, operation.dim, stacks=True)] for pattern, tensors in state.items()}
        return result if len(result) > 1 else dict(zip(self.targets, result.values(), strict=True))

    def transpose(self, operation: Operation, state: State) -> State:
        tensor = _single(state)
        (target,) = self.targets if len(self.targets) == 1 else self.sources
        if operation.check_dims and tuple(tensor.shape) == self.mapping.shapes[self.target]:
            return {target: [tensor]}
        return {target: [transposed(tensor, operation.dim0, operation.dim1)]}

    def permute(self, operation: Operation, state: State) -> State:
        config = self.mapping.config
        if operation.subconfig_key is not None:
            config = getattr(config, operation.subconfig_key, config)
        heads = getattr(config, "num_attention_heads", 1)
        names, result = operation.permute_layer_names, State()
        for pattern, tensors in state.items():
            permutes = names is None or any(name in pattern for name in names)
            target = pattern if len(self.targets) + len(self.sources) > 2 else self.targets[0]
            if permutes:
                tensors = [_interleaved(tensor, 0, heads, operation.inverse) for tensor in tensors]
            result[target] = tensors
        return result

    def interleave(self, operation: Operation, state: State) -> State:
        return {self.targets[0]: [_interleaved(_single(state), operation.dim, 1, operation.inverse)]}

    def flatten(self, operation: Operation, state: State) -> State:
        (target,), tensor = self.targets, _single(state)
        return {target: [reshaped(tensor, (tensor.shape[0], math.prod(tensor.shape[1:])))]}

    def unflatten(self, operation: Operation, state: State) -> State:
        (target,), tensor = self.targets, _single(state)
        return {target: [reshaped(tensor, (tensor.shape[0], operation.in_channels, *operation.kernel_size))]}

    def fuse_experts(self, operation: Operation, state: State) -> State:
        """Cuts each list of experts into one group a target, stacks each group, and joins it over the sources."""
        result = State()
        for index, target in enumerate(self.targets):
            lists = [state[pattern] for pattern in self.sources]
            sizes = [-(-len(tensors) // len(self.targets)) for tensors in lists]
            groups = [tensors[index * size : (index + 1) * size] for tensors, size in zip(lists, sizes, strict=True)]
            stacks = [_joined(group, operation.stack_dim, stacks=True) for group in groups]
            result[target] = [_joined(stacks, operation.concat_dim, stacks=False)]
        return result


_OPERATIONS: dict[str, Callable[[_Conversion, Operation, State], State]] = {
    "Chunk": _Conversion.chunk,
    "Split": _Conversion.split,
    "Concatenate": _Conversion.concatenate,
    "MergeModulelist": _Conversion.merge,
    "Transpose": _Conversion.transpose,
    "PermuteForRope": _Conversion.permute,
    "Interleave": _Conversion.interleave,
    "Conv3dToLinear": _Conversion.flatten,
    "LinearToConv3d": _Conversion.unflatten,
    "ErnieFuseAndSplitTextVisionExperts": _Conversion.fuse_experts,
}
"""By the names of the classes in transformers."""


def _single(state: State) -> Source:
    """Returns the single tensor of a state."""
    ((tensor,),) = state.values()
    return tensor


def _interleaved(tensor: Source, dim: int, groups: int, inverse: bool) -> Source:
    """Changes the order of each group of indices from two halves to pairs, or from pairs to two halves.

    Rotary embeddings have one of these orders in each head.
    """
    shape = tuple(tensor.shape)
    dim %= len(shape)
    half = shape[dim] // groups // 2
    parts = (2, half) if inverse else (half, 2)
    separate = reshaped(tensor, (*shape[:dim], groups, *parts, *shape[dim + 1 :]))
    return reshaped(transposed(separate, dim + 1, dim + 2), shape)


def _joined(tensors: Sequence[Source], dim: int, *, stacks: bool) -> Source:
    if stacks and tensors:
        dim %= len(tensors[0].shape) + 1
        tensors = [reshaped(tensor, (*tensor.shape[:dim], 1, *tensor.shape[dim:])) for tensor in tensors]
    return concatenated(tensors, dim)
