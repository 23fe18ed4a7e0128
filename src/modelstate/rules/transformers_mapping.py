"""The names and layouts in which transformers saves its models, as a rule.

From version 5 on, transformers renames, splits and joins the weights of many models as it saves them, and undoes that
as it loads them. The table of these changes is transformers' own (`transformers.conversion_mapping`): it is read from
the version that is installed, and never copied here.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from modelstate.errors import OptionError, PackageError
from modelstate.rules.expression import Derived, Source, derived
from modelstate.rules.rule import Entry, Rule, RuleContext, Shown, describe, irreversible
from modelstate.rules.schema import Applied, Rules
from modelstate.transaction.slots import HIDDEN, slots_of

State = dict[str, list[Source]]
"""What a conversion works on: tensors by the pattern that their names match."""


def from_transformers(model: nn.Module) -> Rules:
    """Rules that lead from the files of `save_pretrained` to the names and shapes of a transformers model.

    They are what transformers itself applies in `from_pretrained`: its conversion mapping for this model, its
    submodules and older files, and the prefix of the base model, which is added or removed where that makes a name
    fit. A name that leads to no tensor of the model is left as it is. `ms.load` and `ms.plan` use these rules by
    themselves where a file fits only with them, so they are needed only together with other rules.

    Args:
        model: a `transformers.PreTrainedModel`, with memory or on the meta device.

    Returns rules for `rules=`. They work in one direction, and can be applied any number of times.
    Raises `OptionError` for any other model, and `PackageError` where transformers has no conversion mapping.

    Example:
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
                tuple(one for one in transforms if not isinstance(one, WeightConverter)),
                tuple(one for one in transforms if isinstance(one, WeightConverter)),
                shapes,
                getattr(model, "base_model_prefix", "") or "",
                getattr(model, "config", None),
            )
        ]
    )


def is_transformers_model(model: nn.Module) -> bool:
    """Whether the class of a model is one of transformers, or derived from one. Nothing is imported to know that."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__ == "transformers.modeling_utils"
        for base in type(model).__mro__
    )


def notes_of(rules: Iterable[Rule], applied: Applied) -> list[str]:
    """What a report says where a conversion mapping has led to names of the model."""
    found = []
    for mapping in [rule for rule in rules if isinstance(rule, TransformersMapping)]:
        made = [name for name, entry in applied.entries.items() if any(map(mapping.has_led, entry.rules))]
        if made:
            listed = ", ".join(made[:4]) + (", ..." if len(made) > 4 else "")
            found.append(f"{len(made)} renamed or converted as transformers does it for {mapping.model}: {listed}")
    return found


class _Target(NamedTuple):
    """Where a tensor of the file goes."""

    name: str
    converter: Any = None
    """What makes it, together with the others that go to that name; None where it only has another name."""
    pattern: str = ""
    """Which of the converter's patterns it matches."""


@dataclass(frozen=True, eq=False, repr=False)
class TransformersMapping:
    """The conversion mapping of one model. Made by `from_transformers`."""

    model: str
    """Its class."""
    renamings: tuple[Any, ...]
    converters: tuple[Any, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Of the model's tensors."""
    base_prefix: str
    config: Any

    def __repr__(self) -> str:
        return f"from_transformers({self.model})"

    def has_led(self, rule: str) -> bool:
        """Whether a rule in the words of a report is this one."""
        return rule.startswith(repr(self))

    def rename(self, name: str) -> str | None:
        target = self._target(name, *self._fresh()).name
        return None if target == name else target

    def reverse(self) -> "TransformersMapping":
        raise irreversible(self, "model.save_pretrained(path) is the way back")

    def apply(self, course: RuleContext) -> None:
        fresh = self._fresh()
        # In the order in which transformers reads: it counts for the experts of a layer, and for grouped renamings.
        targets = {name: self._target(name, *fresh) for name in sorted(course.entries, key=_natural_order)}
        groups: dict[str, dict[str, list[str]]] = {}
        for name, (target, converter, pattern) in targets.items():
            if converter is not None:
                groups.setdefault(target, {}).setdefault(pattern, []).append(name)
        course.used()
        for name, entry in course.entries.items():
            target, converter, _ = targets[name]
            if converter is not None:
                if (group := groups.pop(target, None)) is not None:
                    self._convert(course, target, converter, group)
            elif target == name:
                course.keep(name, entry)
            else:
                course.make(target, entry.content, [(name, entry)])

    def _fresh(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The transforms, without what an earlier use has left in them."""
        return copy.deepcopy((self.renamings, self.converters))

    def _target(self, name: str, renamings: Sequence[Any], converters: Sequence[Any]) -> _Target:
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
        """The name with or without the prefix of the base model, as the model has it."""
        if not (prefix := self.base_prefix and f"{self.base_prefix}."):
            return name
        if name.startswith(prefix) and name.removeprefix(prefix) in self.shapes:
            return name.removeprefix(prefix)
        return prefix + name if prefix + name in self.shapes else name

    def _convert(self, course: RuleContext, target: str, converter: Any, group: Mapping[str, Sequence[str]]) -> None:
        """Puts what a converter makes of a group of tensors under the names of the model."""
        of = [(name, course.entries[name]) for names in group.values() for name in names]
        for name, entry in of:
            if why := entry.why_not_plain:
                return course.fail(name, why)
        state = {pattern: [_tensor(course.entries[name]) for name in names] for pattern, names in group.items()}
        conversion = _Conversion(target, converter.source_patterns, converter.target_patterns, self)
        whole, course.rule = course.rule, _Named(self, converter.operations)
        try:
            for operation in converter.operations:
                state = conversion.apply(operation, state)
            for name, made in conversion.named(state):
                course.make(name, made, of)
        except Exception as error:  # what torch says of these shapes, or what has no counterpart here
            course.fail(target, describe(error))
        finally:
            course.rule = whole


@dataclass(frozen=True, repr=False)
class _Named(Shown):
    """How reports show what has made a tensor."""

    mapping: TransformersMapping
    operations: Sequence[Any]

    def __repr__(self) -> str:
        return f"{self.mapping!r}: {', '.join(type(one).__name__ for one in self.operations)}"


def _tensor(entry: Entry) -> Source:
    assert entry.tensor is not None  # else it would not be plain
    return entry.tensor


def _natural_order(name: str) -> list[tuple[int, str, int]]:
    """Numbers by their value, and before words."""
    parts = [re.fullmatch(r"(.*?)(\d*)", part, re.DOTALL) for part in name.split(".")]
    found = [part.groups() for part in parts if part is not None]
    return [(int(bool(word)), word, int(digits) if digits else -1) for word, digits in found]


@dataclass(frozen=True, slots=True)
class _Conversion:
    """The operations of one converter, for the tensors that go to one name. No values are read."""

    target: str
    sources: Sequence[str]
    """The converter's patterns of names in the file."""
    targets: Sequence[str]
    """Those of the model."""
    mapping: TransformersMapping

    def apply(self, operation: Any, state: State) -> State:
        """One operation. Raises where it has no counterpart here, and what torch raises for the shapes."""
        kind = type(operation)
        own = _OPERATIONS.get(kind.__name__) if kind.__module__ == "transformers.core_model_loading" else None
        if own is None:
            raise NotImplementedError(f"the operation {kind.__module__}.{kind.__name__} is not known here")
        return own(self, operation, state)

    def named(self, state: State) -> Iterator[tuple[str, Source]]:
        """What the operations have made, by names of the model."""
        whole = self.target.replace("*.", "0.")
        first = next((pattern for pattern in state if pattern in whole), None)
        if first is None:
            raise ValueError(f"no pattern of {', '.join(state)} is in the name {whole}")
        before, _, behind = whole.partition(first)
        for pattern, made in state.items():
            yield before + pattern + behind, _only(made)

    def chunk(self, operation: Any, state: State) -> State:
        tensor, targets = _single(state)[1], list(self.targets)
        if operation.num_shards_attribute is not None:
            count = getattr(self.mapping.config.get_text_config(), operation.num_shards_attribute)
            targets = [targets[0].replace("*", str(index)) for index in range(count)]
        return {
            target: [derived(partial(_chunk, len(targets), index, operation.dim), [tensor])]
            for index, target in enumerate(targets)
        }

    def split(self, operation: Any, state: State) -> State:
        tensor, start, made = _single(state)[1], 0, State()
        for target in self.targets:
            size = self.mapping.shapes[self.target.replace(self.targets[0], target)][operation.dim]
            made[target] = [derived(partial(torch.narrow, dim=operation.dim, start=start, length=size), [tensor])]
            start += size
        if start != tensor.shape[operation.dim]:
            raise ValueError(f"parts of {start} in all are wanted of dimension {operation.dim} of {list(tensor.shape)}")
        return made

    def concatenate(self, operation: Any, state: State) -> State:
        parts = [tensor for pattern in self.sources for tensor in state.get(pattern, ())]
        return {_alone(self.targets): [_joined(parts, operation.dim, stacks=False)]}

    def merge(self, operation: Any, state: State) -> State:
        made = {pattern: [_joined(tensors, operation.dim, stacks=True)] for pattern, tensors in state.items()}
        return made if len(made) > 1 else {_alone(self.targets): [_single(made)[1]]}

    def transpose(self, operation: Any, state: State) -> State:
        tensor = _single(state)[1]
        target = _alone(self.targets if len(self.targets) == 1 else self.sources)
        if operation.check_dims and tuple(tensor.shape) == self.mapping.shapes[self.target]:
            return {target: [tensor]}
        return {target: [derived(partial(torch.transpose, dim0=operation.dim0, dim1=operation.dim1), [tensor])]}

    def permute(self, operation: Any, state: State) -> State:
        config = self.mapping.config
        if operation.subconfig_key is not None:
            config = getattr(config, operation.subconfig_key, config)
        change = partial(_permuted, getattr(config, "num_attention_heads", 1), operation.inverse)
        names, made = operation.permute_layer_names, State()
        for pattern, tensors in state.items():
            permutes = names is None or any(name in pattern for name in names)
            target = pattern if len(self.targets) + len(self.sources) > 2 else self.targets[0]
            made[target] = [derived(change, [_only(tensors)])] if permutes else tensors
        return made

    def interleave(self, operation: Any, state: State) -> State:
        change = partial(_interleaved, operation.dim, operation.inverse)
        return {self.targets[0]: [derived(change, [_single(state)[1]])]}

    def flatten(self, operation: Any, state: State) -> State:
        tensor = _single(state)[1]
        return {_alone(self.targets): [derived(partial(torch.flatten, start_dim=1), [tensor])]}

    def unflatten(self, operation: Any, state: State) -> State:
        tensor = _single(state)[1]
        shape = (tensor.shape[0], operation.in_channels, *operation.kernel_size)
        return {_alone(self.targets): [derived(partial(torch.reshape, shape=shape), [tensor])]}

    def fuse_experts(self, operation: Any, state: State) -> State:
        """Cuts each list of experts into one for each target, stacks these, and joins them over the sources."""
        made = State()
        for index, target in enumerate(self.targets):
            lists = [state[pattern] for pattern in self.sources]
            sizes = [-(-len(tensors) // len(self.targets)) for tensors in lists]
            groups = [tensors[index * size : (index + 1) * size] for tensors, size in zip(lists, sizes, strict=True)]
            stacks = [_joined(group, operation.stack_dim, stacks=True) for group in groups]
            made[target] = [_joined(stacks, operation.concat_dim, stacks=False)]
        return made


_OPERATIONS: dict[str, Callable[[_Conversion, Any, State], State]] = {
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
"""By the classes of transformers, which are looked up by their names so that nothing is imported."""


def _alone(patterns: Sequence[str]) -> str:
    if len(patterns) != 1:
        raise ValueError(f"one name is wanted, not {', '.join(patterns)}")
    return patterns[0]


def _only(tensors: Sequence[Source]) -> Source:
    if len(tensors) != 1:
        raise ValueError(f"{len(tensors)} tensors have the name of one")
    return tensors[0]


def _single(state: State) -> tuple[str, Source]:
    """The one tensor that an operation works on."""
    if len(state) != 1:
        raise ValueError(f"one tensor is wanted, not those of {', '.join(state)}")
    ((pattern, tensors),) = state.items()
    return pattern, _only(tensors)


def _chunk(count: int, index: int, dim: int, tensor: torch.Tensor) -> torch.Tensor:
    return torch.chunk(tensor, count, dim)[index]


def _permuted(heads: int, inverse: bool, tensor: torch.Tensor) -> torch.Tensor:
    """Between rotary embeddings whose pairs lie side by side, and such as have them in two halves, head by head."""
    half = tensor.shape[0] // heads // 2
    pairs = (2, half) if inverse else (half, 2)
    return tensor.reshape(heads, *pairs, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _interleaved(dim: int, inverse: bool, tensor: torch.Tensor) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim : dim + 1] = [2, shape[dim] // 2] if inverse else [shape[dim] // 2, 2]
    return tensor.reshape(shape).transpose(dim, dim + 1).reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class _Join:
    """Puts tensors into one, stacked or one behind the other, with no copies on the way."""

    shape: tuple[int, ...]
    dim: int
    stacks: bool
    parts: tuple["_Join | int", ...]
    """For each part its size in that dimension, or how it is put together itself."""

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        whole = tensors[0].new_empty(self.shape)
        self._fill(whole, iter(tensors))
        return whole

    def _fill(self, whole: torch.Tensor, tensors: Iterator[torch.Tensor]) -> None:
        start = 0
        for index, part in enumerate(self.parts):
            size = 1 if self.stacks else part.shape[self.dim] if isinstance(part, _Join) else part
            place = whole.select(self.dim, index) if self.stacks else whole.narrow(self.dim, start, size)
            start += size
            if isinstance(part, _Join):
                part._fill(place, tensors)
            else:
                place.copy_(next(tensors))


def _joined(tensors: Sequence[Source], dim: int, *, stacks: bool) -> Source:
    if len({tensor.dtype for tensor in tensors}) != 1:
        raise ValueError("the parts have several dtypes, or there are none")
    # Not by torch on meta, which takes a second to know a shape, the first time.
    shapes = [list(tensor.shape) for tensor in tensors]
    dim = dim % (len(shapes[0]) + stacks)
    size = len(shapes) if stacks else sum(one[dim] for one in shapes)
    shape = [*shapes[0][:dim], size, *shapes[0][dim + (not stacks) :]]
    if any(one[:dim] + one[dim + (not stacks) :] != shape[:dim] + shape[dim + 1 :] for one in shapes):
        raise ValueError(f"the shapes {shapes[:4]} do not fit together")
    leaves: list[Source] = []
    parts: list[_Join | int] = []
    for tensor in tensors:
        if isinstance(tensor, Derived) and isinstance(tensor.change, _Join):
            leaves += tensor.parts
            parts.append(tensor.change)
        else:
            leaves.append(tensor)
            parts.append(1 if stacks else tensor.shape[dim])
    join = _Join(tuple(shape), dim, stacks, tuple(parts))
    return Derived(tensors[0].dtype, join.shape, tuple(leaves), join)
