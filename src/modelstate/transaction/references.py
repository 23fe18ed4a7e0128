"""References to the tensors of a module: fingerprints before and after a change, and holders with their names.

torch counts the owners of a tensor in its core: views, autograd graphs, reducers of distributed training. It does not
list them. This file searches all objects of the process for them, which takes a fraction of a second, and only where
the count is above one.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from itertools import compress
from types import FrameType, ModuleType
from typing import Any

import msgspec
import torch
from torch import nn

from modelstate.errors import variables_of
from modelstate.text_format import count
from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.private import (
    has_gradient_node,
    slots_of_class,
    use_count,
    without_recomputation,
    without_subclasses,
)
from modelstate.transaction.slots import Slots, overlapping, sharing, slots_of


class Identity(msgspec.Struct, frozen=True, eq=False):
    """The references of a module, to compare with those at another time. Made by `modelstate.identity`.

    It refers to the tensors, so it keeps tensors alive that the module has dropped. It does not copy their values.
    """

    objects: Mapping[str, torch.Tensor]
    """The tensor of each name. The names of a tied tensor have the same object."""
    views: frozenset[tuple[str, str]]
    """Pairs of names of different tensors that share memory."""
    optimized: Mapping[tuple[int, int, int], torch.Tensor]
    """The parameters of optimizers, by the numbers of optimizer, group and position."""

    def __repr__(self) -> str:
        return f"<Identity: {count(len(self.objects), 'name')}, {count(len(self.views), 'pair')} that share memory>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and not self.differences(other)

    __hash__ = None  # type: ignore[assignment]

    def differences(self, later: Identity) -> list[str]:
        """Returns a line for each reference that differs in `later`; an empty list where none does."""
        texts = []
        for name in {**self.objects, **later.objects}:
            before, now = self.objects.get(name), later.objects.get(name)
            if before is None or now is None:
                texts.append(f"{name} is {'gone' if now is None else 'new'}")
            elif before is not now:
                texts.append(f"{name} is another object")
        texts += [f"{one} and {other} no longer share memory" for one, other in sorted(self.views - later.views)]
        texts += [f"{one} and {other} share memory now" for one, other in sorted(later.views - self.views)]
        places = {**self.optimized, **later.optimized}
        changed = [at for at in places if self.optimized.get(at) is not later.optimized.get(at)]
        return texts + [f"optimizer {at[0]}, group {at[1]}, place {at[2]} refers to another object" for at in changed]

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The groups of names that have the same object."""
        groups: dict[int, list[str]] = {}
        for name, tensor in self.objects.items():
            groups.setdefault(id(tensor), []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def identity(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> Identity:
    """Returns the references of a model, to check that an operation keeps them.

    Args:
        model: The model, with all of its submodules.
        optimizers: Optimizers whose references to parameters are compared too.

    Returns:
        The references, which `Identity.differences` compares.

    Raises:
        AttributeError: `model` is not a model, or an item of `optimizers` has no `param_groups`.

    Examples:
        >>> before = modelstate.identity(model, [optimizer])
        >>> model.bfloat16()
        >>> print(before.differences(modelstate.identity(model, [optimizer])))
    """
    slots = slots_of(model)
    plain = [slot for slot in slots.tensors if is_plain(slot.tensor)]
    return Identity(
        objects={name: slot.tensor for name, slot in slots.by_name.items()},
        views=frozenset(
            (min(one.name, other.name), max(one.name, other.name))
            for group in sharing(plain, [slot.tensor for slot in plain])
            for one, other in overlapping(group, [slot.tensor for slot in group])
        ),
        optimized={
            (number, index, place): param
            for number, optimizer in enumerate(optimizers)
            for index, group in enumerate(optimizer.param_groups)
            for place, param in enumerate(group["params"])
        },
    )


def lost_references(before: Slots, module: nn.Module) -> tuple[str, ...]:
    """Returns a line for each name of a module that no longer has the tensor that it had."""
    now = slots_of(module).by_name
    changed = [name for name, slot in before.by_name.items() if name not in now or now[name].tensor is not slot.tensor]
    return tuple(f"{name} is {'another object' if name in now else 'gone'}" for name in changed)


_OWN_PACKAGE = __name__.partition(".")[0]
_CONTAINERS = (list, tuple, set, dict, deque, OrderedDict)
_UNSEEN = "something in torch's core that Python cannot list"
_SEARCH_SECONDS = 0.2
"""The most processor time of the search for the places of holders, for one error."""
Holder = tuple[str, object]
"""What holds a tensor, as text, and the object whose place in Python is to follow it; None where there is none."""


class Holders(msgspec.Struct):
    """What holds a tensor in torch's core, besides its Python object."""

    views: list[torch.Tensor] = msgspec.field(default_factory=list)
    """Views of the tensor."""
    waiting: list[torch.Tensor] = msgspec.field(default_factory=list)
    """Results of autograd graphs that use the tensor and whose backward pass can still run."""
    reducers: list[torch.nn.Module] = msgspec.field(default_factory=list)
    """DistributedDataParallel modules that have the tensor as a parameter."""
    nodes: list[object] = msgspec.field(default_factory=list)
    """The AccumulateGrad node of the tensor, where Python refers to it."""
    spent: bool = False
    """Whether the tensor is part of a graph whose backward pass has run and cannot run again."""
    has_node: bool = False
    """Whether the tensor has an AccumulateGrad node."""
    unknown: bool = False
    """Whether torch counts an owner that has not been found."""

    def of_the_graph(self) -> list[Holder]:
        """Returns the holders that a change of memory, dtype or device of the tensor would invalidate."""
        graph = "an autograd graph that still waits for backward: its result is "
        holders: list[Holder] = [(graph, root) for root in self.waiting[:3]]
        holders += [(f"{type(module).__name__}'s reducer", None) for module in self.reducers]
        holders += [("its AccumulateGrad node, ", node) for node in self.nodes[:3]]
        return holders + ([(_UNSEEN, None)] if self.unknown and self.has_node else [])

    def all(self) -> list[Holder]:
        """Returns all holders that prevent a swap of the tensor."""
        holders = self.of_the_graph() + [("a view, ", view) for view in self.views[:3]]
        return holders + ([(_UNSEEN, None)] if self.unknown and not self.has_node else [])

    @property
    def remedy(self) -> str:
        """How to release the first of the holders."""
        if self.waiting:
            return "run backward first; where it has been run, drop the result of the forward pass (del loss)"
        if self.reducers:
            return "do it to the module before it is wrapped, or wrap it again afterwards"
        if self.nodes:
            return "remove the hooks from the node first, and register them again afterwards"
        if self.views:
            return "drop the view first, and take it again afterwards"
        return "find the extension or the graph that has taken it, and do this before that"


def described(holders: Iterable[Holder]) -> str:
    """Returns holders as text, each once, with where Python refers to them.

    To find that out takes a pass over all objects of the process, so it ends after `_SEARCH_SECONDS`.
    """
    different = {(text, id(held)): held for text, held in holders}
    texts, until = dict[str, None](), time.thread_time() + _SEARCH_SECONDS
    for (text, _), held in different.items():
        place = "" if held is None else where_held(held) if time.thread_time() < until else "held at an unknown place"
        texts[text + place] = None
    return "; ".join(texts)


def objects_of(wanted: Callable[[type], bool]) -> list[Any]:
    """Returns the objects that the garbage collector tracks, of the classes for which `wanted` is true.

    `wanted` is called once for each class, since there are many more objects than classes.
    """
    objects = gc.get_objects()
    classes = {cls for cls in set(map(type, objects)) if wanted(cls)}
    return list(compress(objects, map(classes.__contains__, map(type, objects)))) if classes else []


def holders_of(tensors: Iterable[torch.Tensor], replaced: Collection[int] = ()) -> dict[int, Holders]:
    """Returns the holders of the tensors that have more than one owner, by the ids of the tensors.

    `replaced` has the ids of results that are computed anew before they are used: their graphs do not wait.
    """
    held = {id(tensor): tensor for tensor in tensors if use_count(tensor) > 1}
    if not held:
        return {}
    found = {key: Holders(has_node=has_gradient_node(tensor)) for key, tensor in held.items()}
    reducer = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", ())
    objects = objects_of(
        lambda cls: issubclass(cls, torch.Tensor) or issubclass(cls, reducer) or cls.__name__ == "AccumulateGrad"
    )
    nodes = [value for value in objects if type(value).__name__ == "AccumulateGrad"]
    roots: list[torch.Tensor] = []
    """The results of autograd graphs."""
    with without_subclasses():
        for tensor in (value for value in objects if issubclass(type(value), torch.Tensor)):
            try:
                base, function = tensor._base, tensor.grad_fn
            except RuntimeError:  # a view whose base was changed in a way that torch forbids
                continue
            if base is not None and id(base) in held:
                found[id(base)].views.append(tensor)
            if function is not None:
                roots.append(tensor)
    for module in (value for value in objects if issubclass(type(value), reducer)):
        for parameter in module.parameters():
            if id(parameter) in found and found[id(parameter)].has_node:
                found[id(parameter)].reducers.append(module)
    del objects
    _search_graphs(roots, held, found, replaced)
    referrers = gc.get_referrers(*nodes) if nodes else []
    others = (referrer for referrer in referrers if referrer is not nodes and not _is_internal(referrer))
    referred_to = {id(value) for referrer in others for value in gc.get_referents(referrer)}
    for node in nodes:
        holders = found.get(id(getattr(node, "variable", None)))
        if holders is None or holders.waiting or holders.reducers:
            continue
        if id(node) in referred_to or _name_in_frames(node):
            holders.nodes.append(node)
    for holders in found.values():
        explained = holders.spent or holders.waiting or holders.reducers or holders.nodes
        holders.unknown = not (explained or (holders.views and not holders.has_node))
    return found


def _search_graphs(
    roots: Iterable[torch.Tensor], held: dict[int, torch.Tensor], found: dict[int, Holders], replaced: Collection[int]
) -> None:
    """Adds the results whose graphs use the tensors to the holders."""
    nodes: dict[int, _Node] = {}
    for root in roots:
        _add_nodes(root.grad_fn, held, nodes)
    # The result that was computed last comes first: the user knows it, unlike tensors that its graph has saved.
    seen: set[int] = set()
    for root in sorted((root for root in roots if id(root) not in replaced), key=_order, reverse=True):
        stack: list[Any] = [root.grad_fn]
        while stack:
            node = nodes.get(id(stack.pop()))
            if node is not None and not node.used_up and id(node.function) not in seen:
                seen.add(id(node.function))
                stack.extend(function for function, _ in node.function.next_functions)
                for key in node.uses:
                    found[key].waiting.append(root)
    for key, node in nodes.items():
        if key not in seen:
            for used in node.uses:
                found[used].spent = True


def _order(root: torch.Tensor) -> int:
    number = getattr(root.grad_fn, "_sequence_nr", None)
    return int(number()) if callable(number) else 0


class _Node(msgspec.Struct):
    """A node of an autograd graph."""

    function: Any
    """The Python object of the node. The reference keeps its id from being used again."""
    used_up: bool
    """Whether a backward pass from this node raises, since it reaches a node whose saved tensors have been freed."""
    uses: set[int]
    """The ids of the tensors that the node has saved, or whose gradient it accumulates."""


def _add_nodes(start: Any, held: Collection[int], nodes: dict[int, _Node]) -> None:
    """Adds the nodes of a graph from `start` on, each once. `used_up` is set after that of the nodes below."""
    stack = [start]
    while stack:
        function = stack[-1]
        below = [next_function for next_function, _ in function.next_functions if next_function is not None]
        if id(function) not in nodes:
            is_freed, saved = _saved_by(function)
            used = {id(getattr(function, "variable", None)), *map(id, saved)} & set(held)
            nodes[id(function)] = _Node(function, is_freed, used)
            stack += [next_function for next_function in below if id(next_function) not in nodes]
        else:
            stack.pop()
            node = nodes[id(function)]
            node.used_up = node.used_up or any(nodes[id(next_function)].used_up for next_function in below)


def _saved_by(node: object) -> tuple[bool, list[object]]:
    """Returns whether a backward pass has freed the saved values of a node, and those values that still exist.

    It calls no hook of `saved_tensors_hooks`: the hook of `torch.utils.checkpoint` would run the forward pass again.
    """
    is_freed, values = False, list[object]()
    cls: object = type(node)
    for name in _saved_names(cls):
        try:
            raw = getattr(node, f"_raw_{name.removeprefix('_')}", None)
            packed = [value for value in (raw if isinstance(raw, list | tuple) else [raw]) if value is not None]
            if any(getattr(value, "unpack_hook", None) is not None for value in packed):
                values += [value.data for value in packed]
                continue
            # An older torch does not say which values have hooks.
            older = any(not hasattr(value, "unpack_hook") for value in packed)
            with without_recomputation() if older else nullcontext():
                saved = getattr(node, name)
        except RuntimeError as error:
            is_freed = is_freed or "second time" in str(error) or "already been freed" in str(error)
            continue
        values += saved if isinstance(saved, list | tuple) else [saved]
    return is_freed, values


@cache
def _saved_names(cls: object) -> list[str]:
    if hasattr(cls, "saved_tensors"):
        return ["saved_tensors"]
    return [name for name in dir(cls) if name.startswith("_saved_")]


def where_held(wanted: object) -> str:
    """Returns where Python refers to an object: "held by `loss` in frame `train`".

    It looks at variables, and at the containers and attributes that refer to the object, not further.
    """
    if name := _name_in_frames(wanted):
        return f"held by {name}"
    for referrer in gc.get_referrers(wanted):
        if _is_internal(referrer):
            continue
        if isinstance(referrer, _CONTAINERS) or type(referrer).__name__ == "cell":
            if name := _name_in_frames(referrer):
                return f"held by {type(referrer).__name__} {name}"
            if type(referrer) is not dict:
                continue
        owners = gc.get_referrers(referrer) if type(referrer) is dict else [referrer]
        for owner in owners:
            attributes = getattr(owner, "__dict__", None)
            if not isinstance(attributes, dict):
                attributes = {name: getattr(owner, name, None) for name in slots_of_class(type(owner))}
            name = next((name for name, value in attributes.items() if value is wanted), "")
            if name and isinstance(owner, ModuleType):
                return f"held by `{name}` of module `{owner.__name__}`"
            if name and not _is_internal(owner):
                held = _name_in_frames(owner)
                return f"attribute `{name}` of a {type(owner).__name__}" + (f" held by {held}" if held else "")
    return f"a {type(wanted).__name__}, and no variable of Python leads to it"


def _name_in_frames(wanted: object) -> str:
    """Returns the variable that refers to an object, with its frame; empty where there is none."""
    for frame in _frames():
        for name, value in variables_of(frame):
            if value is wanted:
                return f"`{name}` in frame `{frame.f_code.co_name}`"
    return ""


def _frames() -> Iterator[FrameType]:
    """The frames of all threads outside of the library. A variable for its own frame would keep a function's values."""
    for frame in sys._current_frames().values():
        current: FrameType | None = frame
        while current is not None:
            if current.f_globals.get("__name__", "").partition(".")[0] != _OWN_PACKAGE:
                yield current
            current = current.f_back


def _is_internal(value: object) -> bool:
    """Whether an object is a frame, or of a class of this library."""
    return isinstance(value, FrameType) or type(value).__module__.partition(".")[0] == _OWN_PACKAGE
