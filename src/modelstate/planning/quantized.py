"""Finds weights that a checkpoint stores as numbers and scales, and that plain weights of the model would get.

Such a layout has names of its own: `weight_scale`, `weight.absmax`, `qweight`. Where the model has slots for the
scales, it computes with them, and nothing is reported.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from modelstate.problems import Problem, ProblemKind
from modelstate.rules.joining import SCALABLE, Dequantize
from modelstate.rules.rule import as_code, template
from modelstate.tensor_spec import TensorSpec
from modelstate.torch_compat.dtypes import short

_BITSANDBYTES = "transformers with bitsandbytes reads it, and model.dequantize() makes plain weights"
_COMPRESSED = "transformers with compressed-tensors reads it and decompresses it"
_MXFP4 = "transformers reads it, and quantization_config=Mxfp4Config(dequantize=True) makes plain weights"
_AWQ = "transformers with autoawq reads it, or with gptqmodel"

_BESIDE_WEIGHT = {
    ".quant_state.bitsandbytes__nf4": ("NF4 of bitsandbytes", _BITSANDBYTES),
    ".quant_state.bitsandbytes__fp4": ("FP4 of bitsandbytes", _BITSANDBYTES),
    ".absmax": ("4 bits of bitsandbytes", _BITSANDBYTES),
    "_packed": ("packed integers of compressed-tensors", _COMPRESSED),
    "_blocks": ("MXFP4", _MXFP4),
    "_scale_2": ("NVFP4", "vLLM or modelopt reads it"),
    "_zero_point": ("integers with zero points of compressed-tensors", _COMPRESSED),
    "._data": ("integers of quanto", "optimum-quanto reads it"),
}
"""What follows the name of a weight in a layout that no rule reads, with the name of the layout and what reads it."""
_BESIDE_MODULE = {
    "SCB": ("LLM.int8() of bitsandbytes", _BITSANDBYTES),
    "g_idx": ("GPTQ", "transformers with gptqmodel reads it"),
    "qweight": ("AWQ, or GPTQ without g_idx", _AWQ),
    "W_q": ("HQQ", "hqq reads it"),
}
"""What replaces `weight` in names beside it, in the same way."""
_PARTS = {
    *("weight_scale", "weight_shape", "weight_g_idx", "weight_global_scale", "weight_format", "weight._scale"),
    *("qzeros", "scales", "scale", "zero", "meta"),
}
"""Further names of these layouts in a module."""
_SCALES_OF_WEIGHT = ("_scale", "_scale_inv")
_SCALES_OF_MODULE = ("scale_weight", "scale_inv", "scale")
_OF_ACTIVATIONS = ("input_scale", "scale_input", "output_scale")
_MARKER = "scaled_fp8"
"""The tensor by which ComfyUI recognises scaled float8."""
_POWERS = [1 << power for power in range(17)]
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
    beside: dict[str, set[str]] = {}
    for name in left:
        beside.setdefault(name.rpartition(".")[0], set()).add(name)
    problems: list[Problem] = []
    scaled: list[tuple[str, str, str]] = []
    guessed: set[str] = set()
    used: set[str] = set()
    for name, source, has_numbers in candidates:
        module = source.rpartition(".")[0]
        prefix, is_weight = f"{module}." if module else "", source.rpartition(".")[2] == "weight"
        near = {*beside.get(module, ()), *beside.get(source, ()), *beside.get(f"{source}.quant_state", ())}
        ends = [(source + end, layout) for end, layout in _BESIDE_WEIGHT.items()]
        ends += [(prefix + last, layout) for last, layout in _BESIDE_MODULE.items()] if is_weight else []
        scales = [source + end for end in _SCALES_OF_WEIGHT]
        scales += [prefix + last for last in _SCALES_OF_MODULE] if is_weight else []
        layout = next((layout for other, layout in ends if other in near), None)
        scale = next((other for other in scales if other in near and other in part), "")
        if layout is None and has_numbers and not scale and (scale := _likely_scale(source, near, part)):
            guessed.add(name)
        if layout is None and has_numbers and scale:
            if part[scale].dtype.is_floating_point:
                scaled.append((name, source, scale))
                continue
            layout = ("MXFP8", "vLLM or modelopt reads it")
        if layout is not None:
            own = {other for other in near if other.startswith((f"{source}.", f"{source}_"))}
            own |= near & {prefix + last for last in (*_BESIDE_MODULE, *_PARTS)} if is_weight else set()
            used |= own
            others = tuple(sorted(own))
            problems.append(
                Problem(ProblemKind.QUANTIZED_WEIGHT, name, found=layout[0], others=others, remedy=layout[1])
            )
    modules = {source.rpartition(".")[0] for _, source, _ in scaled}
    extra = sorted(name for module in modules for name in beside.get(module, ()) if name.endswith(_OF_ACTIVATIONS))
    extra += [_MARKER] if scaled and _MARKER in left else []
    ignored = [f"ms.rules.Ignore({pattern!r})" for (pattern,) in _patterns([(name,) for name in extra], part)]
    code = _rules([(source, scale) for _, source, scale in scaled], part)
    for name, source, scale in scaled:
        rule, layout_name = code[source, scale], f"{short(part[source].dtype)} with scales"
        rules = (rule, *ignored, *then) if rule else ()
        why = "a guess by name and shape" if name in guessed else ""
        problems.append(
            Problem(ProblemKind.QUANTIZED_WEIGHT, name, found=layout_name, why=why, others=(scale,), rules=rules)
        )
    return problems, {*used, *extra, *(scale for *_, scale in scaled)}


def _likely_scale(source: str, near: Collection[str], part: Mapping[str, TensorSpec]) -> str:
    """Returns the name beside a float8 weight that may have its scales, by its words and its shape; else ""."""
    weight = part.get(source)
    if weight is None or not (weight.dtype.is_floating_point and weight.dtype.itemsize == 1):
        return ""
    for name in sorted(near):
        is_named = "scal" in name.rpartition(".")[2] or name.startswith((f"{source}_", f"{source}."))
        if not is_named or name.endswith(_OF_ACTIVATIONS) or name not in part:
            continue
        scale = part[name]
        if scale.dtype.is_floating_point and (
            math.prod(scale.shape) == 1 or _block([(source, name)], part) is not None
        ):
            return name
    return ""


def stored_quantized(tensors: Mapping[str, TensorSpec]) -> list[Problem]:
    """Returns the weights that a checkpoint stores as numbers and scales, without regard to a model."""
    candidates = []
    for name, tensor in tensors.items():
        if tensor.dtype in SCALABLE or tensor.dtype == torch.uint8:
            candidates.append(QuantizedCandidate(name, name, has_numbers=True))
        last = name.rpartition(".")[2]
        if last in _BESIDE_MODULE:
            weights = [name.removesuffix(last) + "weight"]
        else:
            weights = [name.removesuffix(end) for end in _BESIDE_WEIGHT if name.endswith(end)]
        candidates += [QuantizedCandidate(weight, weight) for weight in weights]
    return quantized_weights(dict.fromkeys(candidates), tensors, tensors.keys())[0] if candidates else []


def _rules(pairs: Sequence[Names], part: Mapping[str, TensorSpec]) -> dict[Names, str]:
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
    shapes = []
    for weight, scale in pairs:
        sizes, counts = part[weight].shape, part[scale].shape
        if math.prod(counts) != 1:
            shapes.append((sizes, (*counts, *(1,) * (len(sizes) - len(counts)))))
    if any(len(sizes) != len(counts) for sizes, counts in shapes):
        return None
    if all(count in (1, size) for sizes, counts in shapes for size, count in zip(sizes, counts, strict=True)):
        return ()
    if any(sizes[:-2] != counts[:-2] for sizes, counts in shapes):
        return None
    block = []
    for dim in range(-min(2, *(len(sizes) for sizes, _ in shapes)), 0):
        pairs_of_dim = [(sizes[dim], counts[dim]) for sizes, counts in shapes]
        possible = {*_POWERS, *(size // count for size, count in pairs_of_dim if size % count == 0)}
        fitting = sorted(of for of in possible if all(-(-size // of) == count for size, count in pairs_of_dim))
        is_whole = all(count == 1 for _, count in pairs_of_dim)  # then each of them gives the same
        if not fitting or (len(fitting) > 1 and not is_whole):
            return None
        block.append(128 if 128 in fitting else fitting[0])
    return tuple(block)


def _patterns(groups: Iterable[Names], names: Collection[str]) -> dict[Names, list[Names]]:
    """Returns patterns, each with the groups that it matches. The names of a group are in one module.

    A pattern that also matches another group among `names` is not used: the names of its groups are the patterns.
    """
    by_pattern: dict[Names, list[Names]] = {}
    for group in groups:
        module = group[0].rpartition(".")[0]
        pattern = tuple(f"*{name[len(module) :]}" for name in group) if module else group
        by_pattern.setdefault(pattern, []).append(group)
    result: dict[Names, list[Names]] = {}
    for pattern, members in by_pattern.items():
        known = set(members)
        matches = (template(pattern[0]).match(name) for name in names)
        filled = (tuple(template(text).fill(parts) for text in pattern) for parts in matches if parts is not None)
        if all(group in known or not all(name in names for name in group) for group in filled):
            result[pattern] = members
        else:
            result |= {member: [member] for member in members}
    return result
