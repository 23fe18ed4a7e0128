"""Finds weights that a checkpoint stores as numbers and scales, and that plain weights of the model would get.

Such a layout has names of its own: `weight_scale`, `weight.absmax`, `qweight`. Where the model has slots for the
scales, it computes with them, and nothing is reported.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from modelstate.problems import Problem, ProblemKind
from modelstate.rules.joining import SCALABLE, Dequantize
from modelstate.rules.rule import as_code
from modelstate.tensor_spec import TensorSpec
from modelstate.torch_compat.dtypes import short

_BITSANDBYTES = "transformers with bitsandbytes reads it, and model.dequantize() makes plain weights"
_COMPRESSED = "transformers with compressed-tensors reads it and decompresses it"
_MXFP4 = "transformers reads it, and quantization_config=Mxfp4Config(dequantize=True) makes plain weights"
_AWQ = "transformers with autoawq reads it, or with gptqmodel"

# Names are given by their ends. One that begins with "." or "_" follows the name of the weight, as in "weight_scale";
# another one takes the place of "weight".
_LAYOUTS = {
    ".quant_state.bitsandbytes__nf4": ("NF4 of bitsandbytes", _BITSANDBYTES),
    ".quant_state.bitsandbytes__fp4": ("FP4 of bitsandbytes", _BITSANDBYTES),
    ".absmax": ("4 bits of bitsandbytes", _BITSANDBYTES),
    "_packed": ("packed integers of compressed-tensors", _COMPRESSED),
    "_blocks": ("MXFP4", _MXFP4),
    "_scale_2": ("NVFP4", "vLLM or modelopt reads it"),
    "_zero_point": ("integers with zero points of compressed-tensors", _COMPRESSED),
    "._data": ("integers of quanto", "optimum-quanto reads it"),
    "SCB": ("LLM.int8() of bitsandbytes", _BITSANDBYTES),
    "g_idx": ("GPTQ", "transformers with gptqmodel reads it"),
    "qweight": ("AWQ, or GPTQ without g_idx", _AWQ),
    "W_q": ("HQQ", "hqq reads it"),
}
"""The name in a layout that no rule reads, with the name of the layout and what reads it. The first one decides."""
_FURTHER = ("qzeros", "scales", "scale", "zero", "meta")
"""Further names in these layouts."""
_SCALES = ("_scale", "_scale_inv", "scale_weight", "scale_inv", "scale")
_OF_ACTIVATIONS = ("input_scale", "scale_input", "output_scale")
_MARKER = "scaled_fp8"
"""The tensor by which ComfyUI recognises scaled float8."""
Names = tuple[str, ...]


class QuantizedCandidate(NamedTuple):
    """A weight of the model, and the name under which a checkpoint may store it."""

    name: str
    source: str
    has_numbers: bool = False
    """Whether the numbers under this name would be read as they are, without scales."""


def quantized_weights(
    candidates: Iterable[QuantizedCandidate],
    part: Mapping[str, TensorSpec],
    left: Collection[str],
    then: Sequence[str] = (),
) -> tuple[list[Problem], set[str]]:
    """Returns a problem for each weight that is stored quantized, and the names that belong to these weights.

    Args:
        candidates: weights of the model.
        part: the tensors of the checkpoint.
        left: the names of the checkpoint that fill no slot of the model.
        then: the code of rules that follow the proposed ones.
    """
    within = defaultdict[str, set[str]](set)
    for name in left:
        within[name.rpartition(".")[0]].add(name)
    problems, used = list[Problem](), set[str]()
    scaled: list[tuple[str, Names, str]] = []
    """The name in the model, the weight and its scale in the checkpoint, and whether the scale is a guess."""
    for name, source, has_numbers in candidates:
        near = {*within[source.rpartition(".")[0]], *within[source], *within[f"{source}.quant_state"]}
        layout = next((_LAYOUTS[end] for other, end in _beside(source, _LAYOUTS).items() if other in near), None)
        if layout is None and has_numbers:
            scale = next((other for other in _beside(source, _SCALES) if other in near and other in part), "")
            why = "" if scale else "a guess by name and shape"
            scale = scale or _likely_scale(source, near, part)
            if scale and part[scale].dtype.is_floating_point:
                scaled.append((name, (source, scale), why))
            elif scale:
                layout = "MXFP8", "vLLM or modelopt reads it"
        if layout is not None:
            own = {other for other in near if other.startswith((f"{source}.", f"{source}_"))}
            own |= near.intersection(_beside(source, (*_LAYOUTS, *_FURTHER)))
            used |= own
            found, remedy = layout
            others = tuple(sorted(own))
            problems.append(Problem(ProblemKind.QUANTIZED_WEIGHT, name, found=found, others=others, remedy=remedy))
    modules = {source.rpartition(".")[0] for _, (source, _), _ in scaled}
    extra = sorted(name for module in modules for name in within[module] if name.endswith(_OF_ACTIVATIONS))
    extra += [_MARKER] if scaled and _MARKER in left and _MARKER in part else []
    ignored = [f"ms.rules.Ignore({pattern!r})" for (pattern,) in _patterns([(name,) for name in extra], part)]
    code = _rules([pair for _, pair, _ in scaled], part)
    for name, (source, scale), why in scaled:
        found, rule = f"{short(part[source].dtype)} with scales", code[source, scale]
        rules = (rule, *ignored, *then) if rule else ()
        problem = Problem(ProblemKind.QUANTIZED_WEIGHT, name, found=found, why=why, others=(scale,), rules=rules)
        problems.append(problem)
    return problems, {*used, *extra, *(scale for _, (_, scale), _ in scaled)}


def stored_quantized(tensors: Mapping[str, TensorSpec]) -> list[Problem]:
    """Returns the weights that a checkpoint stores as numbers and scales, without regard to a model."""
    candidates = []
    for name, tensor in tensors.items():
        if tensor.dtype in SCALABLE or tensor.dtype == torch.uint8:
            candidates.append(QuantizedCandidate(name, name, has_numbers=True))
        weights = [name.removesuffix(end) for end in _LAYOUTS if end[0] in "._" and name.endswith(end)]
        if (last := name.rpartition(".")[2]) in _LAYOUTS:
            weights = [name.removesuffix(last) + "weight"]
        candidates += [QuantizedCandidate(weight, weight) for weight in weights]
    return quantized_weights(dict.fromkeys(candidates), tensors, tensors.keys())[0]


def _beside(source: str, ends: Iterable[str]) -> dict[str, str]:
    """Returns the names with these ends beside a weight, each with its end."""
    module, is_weight = source.removesuffix("weight"), f".{source}".endswith(".weight")
    return {(source if end[0] in "._" else module) + end: end for end in ends if is_weight or end[0] in "._"}


def _likely_scale(source: str, near: Collection[str], part: Mapping[str, TensorSpec]) -> str:
    """Returns the name beside a float8 weight that may have its scales, by its words and its shape; else ""."""
    weight = part.get(source)
    if weight is None or not (weight.dtype.is_floating_point and weight.dtype.itemsize == 1):
        return ""
    for name in sorted(near):
        is_named = "scal" in name.rpartition(".")[2] or name.startswith((f"{source}_", f"{source}."))
        is_scale = name in part and part[name].dtype.is_floating_point and not name.endswith(_OF_ACTIVATIONS)
        if is_named and is_scale and _block([(source, name)], part) is not None:
            return name
    return ""


def _rules(pairs: Iterable[Names], part: Mapping[str, TensorSpec]) -> dict[Names, str]:
    """Returns the code of a rule for each weight and its scale; empty where the shapes do not determine the block."""
    code: dict[Names, str] = {}
    for patterns, members in _patterns(pairs, part).items():
        block = _block(members, part)
        for member in members:
            # Without a common block, each weight has a rule of its own.
            (weight, scale), own = (member, _block([member], part)) if block is None else (patterns, block)
            code[member] = "" if own is None else as_code(Dequantize(weight, scale, own or None))
    return code


def _block(pairs: Iterable[Names], part: Mapping[str, TensorSpec]) -> tuple[int, ...] | None:
    """Returns the block of weights and their scales; () where none is needed, None where the shapes leave it open.

    A block divides a dimension, or it is a power of two. Its sizes are certain where one number fits all weights.
    """
    all_shapes = ((part[weight].shape, part[scale].shape) for weight, scale in pairs)
    shapes = [(size, (*of, *(1,) * (len(size) - len(of)))) for size, of in all_shapes if math.prod(of) != 1]
    if any(len(sizes) != len(counts) for sizes, counts in shapes):
        return None
    if all(count in (1, size) for sizes, counts in shapes for size, count in zip(sizes, counts, strict=True)):
        return ()
    if any(sizes[:-2] != counts[:-2] for sizes, counts in shapes):
        return None
    block = []
    for dim in range(-min(2, *(len(sizes) for sizes, _ in shapes)), 0):
        of_dim = [(sizes[dim], counts[dim]) for sizes, counts in shapes]
        divisors = (size // count for size, count in of_dim if size % count == 0)
        possible = {*(1 << power for power in range(17)), *divisors}
        fitting = [of for of in possible if all(-(-size // of) == count for size, count in of_dim)]
        # One block for the whole dimension is the same, whatever its size.
        if not fitting or (len(fitting) > 1 and any(count != 1 for _, count in of_dim)):
            return None
        block.append(128 if 128 in fitting else min(fitting))
    return tuple(block)


def _patterns(groups: Iterable[Names], names: Collection[str]) -> dict[Names, list[Names]]:
    """Returns patterns, each with the groups that it matches. The names of a group are in one module.

    A pattern that also matches another group among `names` is not used: the names of its groups are the patterns.
    """
    by_ends = defaultdict[Names, dict[Names, None]](dict)
    for group in groups:
        module = group[0].rpartition(".")[0]
        by_ends[tuple(name.removeprefix(module) for name in group)][group] = None
    result: dict[Names, list[Names]] = {}
    for ends, members in by_ends.items():
        modules = (name.removesuffix(ends[0]) for name in names if name.endswith(ends[0]))
        matching = sum(all(module + end in names for end in ends) for module in modules)
        if matching == len(members) and ends[0].startswith("."):
            result[tuple(f"*{end}" for end in ends)] = [*members]
        else:
            result |= {member: [member] for member in members}
    return result
