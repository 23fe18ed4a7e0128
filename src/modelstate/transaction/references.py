"""What refers to the tensors of a module: identities before and after a change, and holders by name.

torch counts the owners of a tensor in its core: views of it, autograd graphs, the reducers of distributed training. It
does not say who they are. Here they are looked for among all objects of the process, which takes a fraction of a
second, and is done only where the count says that there is somebody.
"""

import gc
import inspect
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, compress
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from modelstate.torch_compat.plain import is_plain
from modelstate.torch_compat.private import has_gradient_node, slots_of_class, use_count, without_subclasses
from modelstate.transaction.slots import Slots, overlap, sharing, slots_of


@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """A fingerprint of references, to be compared with another one of the same module. Made by `modelstate.identity`.

    It refers to the tensors, and so keeps objects alive that the module has lost; it holds nothing of their values.
    """

    objects: Mapping[str, torch.Tensor]
    """The object under each name; two names of a tied tensor have the same."""
    views: frozenset[tuple[str, str]]
    """Pairs of names of different tensors that show common memory."""
    optimized: Mapping[tuple[int, int, int], torch.Tensor]
    """What each place in an optimizer refers to: by the optimizer, the group and the place within it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and not self.differences(other)

    __hash__ = None  # type: ignore[assignment]

    def differences(self, later: "Identity") -> list[str]:
        """What has changed until `later`, a line each; empty where every reference is what it was."""
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
        """Groups of names that are one object."""
        groups: dict[int, list[str]] = {}
        for name, tensor in self.objects.items():
            groups.setdefault(id(tensor), []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def identity(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> Identity:
    """Who is who in a module, to compare before and after something that should keep all references.

    >>> before = modelstate.identity(model, [optimizer])
    >>> model.bfloat16()
    >>> print(before.differences(modelstate.identity(model, [optimizer])))
    """
    slots = slots_of(module)
    return Identity(
        objects={name: slot.tensor for name, slot in slots.by_name.items()},
        views=frozenset(
            (one.name, other.name)
            for group in sharing([slot for slot in slots.tensors if is_plain(slot.tensor)])
            for one, other in combinations(sorted(group, key=lambda slot: slot.name), 2)
            if overlap(one.tensor, other.tensor)
        ),
        optimized={
            (number, index, place): param
            for number, optimizer in enumerate(optimizers)
            for index, group in enumerate(optimizer.param_groups)
            for place, param in enumerate(group["params"])
        },
    )


def lost_references(before: Slots, module: nn.Module) -> tuple[str, ...]:
    """Names of a module that have lost the object that they had, a line each."""
    now = slots_of(module).by_name
    changed = [name for name, slot in before.by_name.items() if name not in now or now[name].tensor is not slot.tensor]
    return tuple(f"{name} is {'another object' if name in now else 'gone'}" for name in changed)


_OWN_PACKAGE = __name__.partition(".")[0]
_MAX_DEPTH = 4
_CONTAINERS = (list, tuple, set, dict, deque, OrderedDict)
_UNSEEN = "something in torch's core that Python cannot see"


@dataclass(slots=True)
class Holders:
    """What holds one tensor besides Python's references to it."""

    views: list[torch.Tensor] = field(default_factory=list)
    """Views of it, which show its memory and refer to it."""
    waiting: list[torch.Tensor] = field(default_factory=list)
    """Results of autograd graphs that use it, and through which a backward pass is still possible."""
    reducers: list[torch.nn.Module] = field(default_factory=list)
    """DistributedDataParallel modules that it belongs to."""
    nodes: list[object] = field(default_factory=list)
    """Python's references to the node of autograd that accumulates its gradient."""
    spent: bool = False
    """Whether it is part of a graph that has been used up: no backward pass can come through it any more."""
    has_node: bool = False
    """Whether autograd has a node that accumulates its gradient."""
    unknown: bool = False
    """Whether there is somebody whom Python cannot see."""

    def of_the_graph(self) -> list[str]:
        """Those that a change of memory, dtype or device under the same tensor leaves with something else."""
        texts = [
            f"an autograd graph that still waits for backward: its result is {where_held(root)}"
            for root in self.waiting[:3]
        ]
        texts += [f"{type(one).__name__}'s reducer" for one in self.reducers]
        texts += [f"its AccumulateGrad node, {where_held(node)}" for node in self.nodes[:3]]
        return texts + ([_UNSEEN] if self.unknown and self.has_node else [])

    def all(self) -> list[str]:
        """All of them that are in the way of a swap."""
        texts = self.of_the_graph() + [f"a view, {where_held(view)}" for view in self.views[:3]]
        return texts + ([_UNSEEN] if self.unknown and not self.has_node else [])

    @property
    def remedy(self) -> str:
        """What to do about the first of them."""
        if self.waiting:
            return "run backward first; where it has been run, drop the result of the forward pass (del loss)"
        if self.reducers:
            return "do it to the module before it is wrapped, or wrap it again afterwards"
        if self.nodes:
            return "remove the hooks from the node first, and register them again afterwards"
        if self.views:
            return "drop the view first, and take it again afterwards"
        return "find the extension or the graph that has taken it, and do this before that"


def objects_of(wanted: Callable[[type], bool]) -> list[Any]:
    """The objects of this process that the garbage collector knows, of the classes for which `wanted` is true.

    Objects are many and classes few, so the exact class alone decides, without a line of Python for each object.
    """
    objects = gc.get_objects()
    classes = {cls for cls in set(map(type, objects)) if wanted(cls)}
    return list(compress(objects, map(classes.__contains__, map(type, objects)))) if classes else []


def holders_of(tensors: Iterable[torch.Tensor]) -> dict[int, Holders]:
    """By their ids, who holds those tensors that have more than one owner. One search for all of them."""
    held = {id(tensor): tensor for tensor in tensors if use_count(tensor) > 1}
    if not held:
        return {}
    found = {key: Holders(has_node=has_gradient_node(tensor)) for key, tensor in held.items()}
    reducer = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", ())
    objects = objects_of(
        lambda cls: issubclass(cls, torch.Tensor) or issubclass(cls, reducer) or cls.__name__ == "AccumulateGrad"
    )
    nodes = [one for one in objects if type(one).__name__ == "AccumulateGrad"]
    with without_subclasses():
        roots = [one for one in objects if issubclass(type(one), torch.Tensor) and _look_at(one, held, found)]
    for module in (one for one in objects if issubclass(type(one), reducer)):
        for parameter in module.parameters():
            if id(parameter) in found and found[id(parameter)].has_node:
                found[id(parameter)].reducers.append(module)
    del objects
    in_graphs = _search_graphs(roots, held, found)
    for node, is_referred_to in zip(nodes, _referred_to(nodes), strict=True):
        holders = found.get(id(getattr(node, "variable", None)))
        if holders is None or holders.waiting or holders.reducers:
            continue
        if is_referred_to or (id(node) not in in_graphs and _is_held(node, nodes)):
            holders.nodes.append(node)
    for holders in found.values():
        explained = holders.spent or holders.waiting or holders.reducers or holders.nodes
        holders.unknown = not (explained or (holders.views and not holders.has_node))
    return found


def _look_at(one: torch.Tensor, held: Collection[int], found: dict[int, Holders]) -> bool:
    """Takes down whose view a tensor is; whether it is a result of an autograd graph."""
    try:
        base, result = one._base, one.grad_fn
    except RuntimeError:  # a view whose base was changed in a way that torch forbids
        return False
    if base is not None and id(base) in held:
        found[id(base)].views.append(one)
    return result is not None


def _search_graphs(roots: Iterable[torch.Tensor], held: dict[int, torch.Tensor], found: dict[int, Holders]) -> set[int]:
    """Follows the graphs from their results down to the tensors. Returns the ids of the nodes."""
    nodes: dict[int, _Node] = {}
    for root in roots:
        _look_below(root.grad_fn, held, nodes)
    # What was computed last comes first: it is what a person knows, and not something that its graph has saved.
    seen: set[int] = set()
    for root in sorted(roots, key=_order, reverse=True):
        stack: list[Any] = [root.grad_fn]
        while stack:
            node = nodes.get(id(stack.pop()))
            if node is not None and not node.used_up and id(node.it) not in seen:
                seen.add(id(node.it))
                stack.extend(next_node for next_node, _ in node.it.next_functions)
                for key in node.uses:
                    found[key].waiting.append(root)
    for key, node in nodes.items():
        if key not in seen:
            for used in node.uses:
                found[used].spent = True
    return set(nodes)


def _order(root: torch.Tensor) -> int:
    number = getattr(root.grad_fn, "_sequence_nr", None)
    return int(number()) if callable(number) else 0


@dataclass(slots=True)
class _Node:
    """A node of an autograd graph."""

    it: Any
    """Its Python object, which has to live, or another one gets its id."""
    used_up: bool
    """Whether a backward pass that begins at the node would come to one whose saved tensors have been freed: it raises,
    also where it begins with nodes that save nothing, as additions do."""
    uses: set[int]
    """The ids of the tensors that it has saved, or whose gradient it accumulates."""


def _look_below(start: Any, held: Collection[int], nodes: dict[int, _Node]) -> None:
    """Takes down the nodes of a graph from `start` on, each once and after those below it."""
    stack = [start]
    while stack:
        it = stack[-1]
        below = [next_node for next_node, _ in it.next_functions if next_node is not None]
        if id(it) not in nodes:
            is_freed, saved = _saved_by(it)
            used = {id(getattr(it, "variable", None)), *map(id, saved)} & set(held)
            nodes[id(it)] = _Node(it, is_freed, used)
            stack += [next_node for next_node in below if id(next_node) not in nodes]
        else:
            stack.pop()
            node = nodes[id(it)]
            node.used_up = node.used_up or any(nodes[id(next_node)].used_up for next_node in below)


def _saved_by(node: Any) -> tuple[bool, list[Any]]:
    """Whether a backward pass has freed what a node saved for it, and what it has saved, as far as that is there.

    No hook of `saved_tensors_hooks` is called: that of `torch.utils.checkpoint` would run the forward pass again.
    """
    is_freed, values = False, list[Any]()
    cls: Any = type(node)
    for name in _saved_names(cls):
        try:
            raw = getattr(node, f"_raw_{name.removeprefix('_')}", None)
            packed = [one for one in (raw if isinstance(raw, list | tuple) else [raw]) if one is not None]
            if any(getattr(one, "unpack_hook", None) is not None for one in packed):
                values += [one.data for one in packed]
                continue
            saved = getattr(node, name)
        except RuntimeError as error:
            is_freed = is_freed or "second time" in str(error) or "already been freed" in str(error)
            continue
        values += saved if isinstance(saved, list | tuple) else [saved]
    return is_freed, values


@cache
def _saved_names(cls: Any) -> list[str]:
    if hasattr(cls, "saved_tensors"):
        return ["saved_tensors"]
    return [name for name in dir(cls) if name.startswith("_saved_")]


def where_held(wanted: object) -> str:
    """Where Python refers to an object: "`loss` in frame `train`", "list `cache` in frame `train`"."""
    return _place(wanted, 0, {id(wanted)}) or f"a {type(wanted).__name__} that no variable of Python leads to"


def _place(wanted: object, depth: int, seen: set[int]) -> str:
    name = _name_in_frames(wanted)
    if name or depth >= _MAX_DEPTH:
        return name
    referrers = [one for one in gc.get_referrers(wanted) if id(one) not in seen and not _is_ours(one)]
    seen.update(map(id, referrers))
    for one in referrers:
        text = _through(one, wanted, depth, seen)
        if text:
            return text
    return ""


def _name_in_frames(wanted: object) -> str:
    for frame in _frames():
        for name, value in _variables(frame):
            if value is wanted:
                return f"held by `{name}` in frame `{frame.f_code.co_name}`"
    return ""


def _variables(frame: FrameType) -> list[tuple[str, object]]:
    """The local variables of a frame. Nothing stays behind that would keep their values alive."""
    variables = frame.f_locals
    found = list(variables.items())
    # Until Python 3.12 the frame keeps a copy of its variables, which outlives their deletion. Ours are the only
    # references to it, unless somebody has called locals() there.
    is_copy = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and type(variables) is dict
    if is_copy and sys.getrefcount(variables) <= 3:
        variables.clear()
    return found


def _frames() -> Iterator[FrameType]:
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_globals.get("__name__", "").partition(".")[0] != _OWN_PACKAGE:
                yield at
            at = at.f_back


def _is_held(node: object, nodes: list[Any]) -> bool:
    """Whether Python refers to a node; that it has an object in Python is not enough, for torch keeps that."""
    others = [one for one in gc.get_referrers(node) if one is not nodes and not _is_ours(one)]
    return bool(others) or bool(_name_in_frames(node))


def _referred_to(nodes: list[Any]) -> list[bool]:
    """For each node that is part of a graph whether Python refers to it, too: whether it has more owners than one that
    is in a graph and in a list alone. To look for the owners of each would take a search of the process for each."""
    with torch.inference_mode(False), torch.enable_grad():
        variable = torch.ones((), requires_grad=True, device="cpu")
        result = variable * 1
        alone = [get_gradient_edge(variable).node]
    expected = _owner_counts(alone)[0]
    del result
    return [count > expected for count in _owner_counts(nodes)]


def _owner_counts(nodes: list[Any]) -> list[int]:
    return [sys.getrefcount(node) for node in nodes]


def _through(referrer: Any, wanted: object, depth: int, seen: set[int]) -> str:
    """Where one referrer can be found, if it is one that has a name."""
    if type(referrer) is dict:
        owners = [one for one in gc.get_referrers(referrer) if getattr(one, "__dict__", None) is referrer]
        if owners:
            return _attribute(owners[0], wanted, depth, seen)
    if isinstance(referrer, _CONTAINERS) or type(referrer).__name__ == "cell":
        within = _place(referrer, depth + 1, seen)
        return within.replace("held by `", f"held by {type(referrer).__name__} `", 1) if within else ""
    return _attribute(referrer, wanted, depth, seen)


def _attribute(owner: Any, wanted: object, depth: int, seen: set[int]) -> str:
    attributes = getattr(owner, "__dict__", None)
    if not isinstance(attributes, dict):
        attributes = {name: getattr(owner, name, None) for name in slots_of_class(type(owner))}
    name = next((name for name, value in attributes.items() if value is wanted), "")
    if isinstance(owner, ModuleType):
        return f"held by `{name}` of module `{owner.__name__}`"
    within = _place(owner, depth + 1, seen)
    return f"attribute `{name}` of a {type(owner).__name__}" + (f" {within}" if within else "") if name else ""


def _is_ours(one: object) -> bool:
    return isinstance(one, FrameType) or type(one).__module__.partition(".")[0] == _OWN_PACKAGE
