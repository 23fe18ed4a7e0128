"""Opens several checkpoints as one: merges their trees, and joins or combines their tensors."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain

import msgspec
import torch

from modelstate.arguments import invalid_option
from modelstate.checkpoint.checkpoint import Checkpoint, join
from modelstate.errors import CombineError, OptionError, code_errors
from modelstate.formats.sharded import merged_metadata
from modelstate.formats.tree import FlatTree, same_value
from modelstate.spec import Combined, Stored, StoredTensor, set_version_metadata
from modelstate.text_format import listed
from modelstate.torch_compat.plain import is_plain

CombineFunction = Callable[[str, list[torch.Tensor]], torch.Tensor]
"""Returns one tensor from a name, and the tensors of all checkpoints that have it, in the order of the checkpoints."""


class Combination(msgspec.Struct, frozen=True):
    """A way to combine several checkpoints into one.

    Raises:
        OptionError: A value is not of the type of its field.
    """

    def __post_init__(self) -> None:
        call, fields = f"ms.merge.{type(self).__name__}", msgspec.structs.fields(self)
        for field in fields:
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except (msgspec.ValidationError, OverflowError) as error:
                is_source = field is fields[0] and isinstance(value, str | os.PathLike | Checkpoint)
                of_open = f"checkpoints are the sources of ms.open: ms.open([first, second], combine={call}())"
                raise OptionError(
                    f"{call} does not take this value of {field.name}=",
                    expected=type(self).__annotations__[field.name],
                    found=str(error),
                    remedy=of_open if is_source else "",
                    names=(field.name,),
                ) from error

    def merge(self, sources: Sequence[Checkpoint]) -> FlatTree:
        """Merges the checkpoints without reading a tensor. Raises `CombineError` with all problems."""
        raise NotImplementedError


def combine(sources: Sequence[Checkpoint], how: object) -> Checkpoint:
    """Combines checkpoints: with disjoint names for None, with a `Combination`, or with a `CombineFunction`.

    Raises `CombineError`, and `ReadFailedError` where a file changed between the opening of two of the checkpoints.
    """
    if not sources:
        raise CombineError("there is nothing to combine", expected="at least one checkpoint", found="an empty list")
    if how is None:
        # Combines parts of one model: every name is in exactly one of them.
        holders = holders_of([{**source.flat.tensors, **source.flat.values} for source in sources])
        twice = [f"{name!r} in {_places(indices)}" for name, indices in holders.items() if len(indices) > 1]
        remedy = (
            "choose how they are combined: combine=ms.merge.Average() averages checkpoints of one model; "
            "combine=ms.merge.LoRA() merges adapters into the first; a function of name and tensors does the rest"
        )
        refuse("names that are in more than one checkpoint", sources, twice, [remedy])
        tensors = {name: stored for source in sources for name, stored in source.flat.tensors.items()}
        values = {name: value for source in sources for name, value in source.flat.values.items()}
        merged = FlatTree(tensors, values, containers_of(sources), versions_of(sources))
    elif isinstance(how, Combination):
        merged = how.merge(sources)
    elif callable(how) and not isinstance(how, type):
        tensors = {
            name: _by_function(how, name, tuple(sources[index].stored(name) for index in indices))
            for name, indices in holders_of([source.flat.tensors for source in sources]).items()
        }
        check_values(sources)
        holders = holders_of([source.flat.values for source in sources])
        values = {name: sources[indices[0]].flat.values[name] for name, indices in holders.items()}
        merged = FlatTree(tensors, values, containers_of(sources), versions_of(sources))
    else:
        raise invalid_option(
            "combine",
            "is not a way to combine checkpoints",
            how,
            expected="ms.merge.Average(...), ms.merge.LoRA(...), or a function of a name and a list of tensors",
        )
    names = [f"{index}: {source.source}" for index, source in enumerate(sources)]
    return join(
        sources,
        _tree(merged, where(sources)),
        where(sources),
        format=" and ".join(dict.fromkeys(source.format for source in sources)),
        metadata=merged_metadata({name: source.contents for name, source in zip(names, sources, strict=True)}),
        is_sealed=all(source.contents.is_sealed for source in sources),
    )


def where(sources: Sequence[Checkpoint]) -> str:
    """The sources in one line, for messages."""
    return listed([source.source for source in sources], most=3)


def label(sources: Sequence[Checkpoint], index: int) -> str:
    """A source by its index and its path, for messages."""
    return f"[{index}] {sources[index].source}"


def refuse(title: str, sources: Sequence[Checkpoint], found: Collection[str], remedies: Iterable[str]) -> None:
    """Raises `CombineError` with all problems that were found, if there are any."""
    if found:
        raise CombineError(
            f"{title} ({len(found):,})",
            where=where(sources),
            found=listed(found, most=12, between="; "),
            remedy="; ".join(dict.fromkeys(filter(None, remedies))),
        )


def holders_of(parts: Sequence[Mapping[str, object]]) -> dict[str, list[int]]:
    """The indices of the sources that have each name, in the order of the sources."""
    holders: dict[str, list[int]] = {}
    for index, names in enumerate(parts):
        for name in names:
            holders.setdefault(name, []).append(index)
    return holders


def _places(indices: Sequence[int]) -> str:
    return " and ".join(f"[{index}]" for index in indices)


def _by_function(function: CombineFunction, name: str, parts: tuple[Stored, ...]) -> Stored:
    tensors_like = [
        torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")
        if isinstance(part, StoredTensor)
        else torch.empty(tuple(part.shape), dtype=part.dtype, device="meta")
        for part in parts
    ]
    meta_function = getattr(function, "meta", None) or function
    remedy = (
        "it must take tensors on the meta device; where it has to look at values, give it an attribute `meta`: a "
        "function of the same arguments that returns a meta tensor of the shape and dtype of its result"
    )
    what = "the combining function raised when it was asked for shape and dtype"
    with code_errors(CombineError, what, where=name, remedy=remedy):
        result = meta_function(name, tensors_like)
    _check_result(name, result, None)

    def build(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        # A function that writes to its arguments must not change tensors of the caller.
        own = [
            tensor.clone() if isinstance(part, torch.Tensor) else tensor
            for tensor, part in zip(tensors, parts, strict=True)
        ]
        with code_errors(CombineError, "the combining function raised", where=name):
            combined = function(name, own)
        _check_result(name, combined, result)
        return combined.detach()

    return Combined(f"combined of {len(parts)}", result.dtype, tuple(result.shape), parts, build)


def _check_result(name: str, result: object, like: torch.Tensor | None) -> None:
    if isinstance(result, torch.Tensor) and is_plain(result):
        if like is None and result.is_meta:
            return
        if like is not None and not result.is_meta and result.dtype == like.dtype and result.shape == like.shape:
            return
        found = f"{result.dtype} of shape {tuple(result.shape)} on {result.device}"
    else:
        found = type(result).__name__
    raise CombineError(
        "the combining function returned something else than it should",
        where=name,
        expected="a plain tensor on the meta device, where it is given such"
        if like is None
        else f"{like.dtype} of shape {tuple(like.shape)}, as for tensors on the meta device",
        found=found,
    )


# Values other than tensors.


def check_values(sources: Sequence[Checkpoint], *, in_all: bool = False) -> None:
    """Raises `CombineError` where a value differs between checkpoints; with `in_all`, also where one lacks it."""
    differing = []
    for name, indices in holders_of([source.flat.values for source in sources]).items():
        values = [sources[index].extra[name] for index in indices] if len(indices) > 1 else []
        lacking = in_all and len(indices) < len(sources)
        if lacking or not all(same_value(values[0], value) for value in values[1:]):
            differing.append(f"{name!r} in {_places(indices)}")
    remedy = (
        "open the parts that hold the weights alone, with key=; or take them from one of the checkpoints: "
        'ms.merge.Average(others="first")'
    )
    others = "" if in_all else " that have them"
    refuse(f"values that are not tensors must be the same in all checkpoints{others}", sources, differing, [remedy])


def containers_of(sources: Sequence[Checkpoint]) -> list[str]:
    """The paths of the containers of all sources."""
    return list(dict.fromkeys(path for source in sources for path in source.flat.containers))


def versions_of(sources: Sequence[Checkpoint]) -> dict[str, Mapping[str, object]]:
    """The merged versions of modules by the paths of containers.

    Raises `CombineError` where two checkpoints have different versions of one module.
    """
    merged: dict[str, dict[str, object]] = {}
    holder: dict[tuple[str, str], int] = {}
    for index, source in enumerate(sources):
        for path, versions in source.flat.versions.items():
            target = merged.setdefault(path, {})
            for module, saved in versions.items():
                first = holder.setdefault((path, module), index)
                if target.setdefault(module, saved) != saved:
                    raise CombineError(
                        "the checkpoints come from different versions of a module",
                        where=where(sources),
                        expected=f"{module or 'the whole'}: {target[module]}, as in {label(sources, first)}",
                        found=f"{saved} in {label(sources, index)}",
                        remedy="load each into a model of today and save it from there",
                    )
    return {**merged}


def _tree(merged: FlatTree, at: str) -> dict[str, object]:
    """Nests a flat tree."""
    nodes: dict[str, dict[str, object]] = {}
    containers = set(merged.containers)

    def container(path: str) -> dict[str, object]:
        if path not in nodes:
            nodes[path] = OrderedDict()
            if path in merged.versions:
                set_version_metadata(nodes[path], merged.versions[path])
            if path:
                put(path, nodes[path])
        return nodes[path]

    def put(name: str, leaf: object) -> None:
        path = name.rpartition(".")[0]
        while path and path not in containers:
            path = path.rpartition(".")[0]
        node, key = container(path), name[len(path) + 1 :] if path else name
        if key in node:
            raise CombineError(
                "a name is a value in one checkpoint and a container in another",
                where=at,
                found=name,
                remedy="open the parts that belong together alone, with key=",
            )
        node[key] = leaf

    for name, leaf in chain[tuple[str, object]](merged.tensors.items(), merged.values.items()):
        put(name, leaf)
    return container("")
