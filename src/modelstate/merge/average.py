"""The weighted average of checkpoints: model soups, averages over training, and sums of task vectors.

Opening an average computes nothing: each tensor is computed when it is read, chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.combine import Combination, check_values, holders_of, label, refuse, versions_of
from modelstate.checkpoint.reduction import kind_of
from modelstate.errors import CombineError
from modelstate.formats.tree import FlatTree
from modelstate.planning.quantized import stored_quantized
from modelstate.problems import ProblemKind, join_remedies, remedies_for
from modelstate.rules.joining import SCALABLE
from modelstate.spec import Blocks, Combined, Stored, bytes_key
from modelstate.text_format import count, listed
from modelstate.torch_compat.dtypes import short
from modelstate.torch_compat.plain import same_values

_CHUNK_ELEMENTS = 1 << 17
"""The elements that are computed at once. Their sums stay in the second-level cache of a processor."""
_BY_DIFFERENCES = {torch.float32: 2.0**-30, torch.float64: 2.0**-50, torch.complex128: 2.0**-50}
"""The dtypes whose averages are computed by differences, and how far the sum of the weights may be from 1.

For float32 the result differs by less than it is rounded by. Weights such as 0.1 and 0.9 are rounded themselves."""

_FROM_ONE = 'from one of them: ms.merge.Average(others="first")'
_DEQUANTIZE = (
    "if it has scales, write plain weights of each checkpoint first: modelstate.convert_checkpoint with the rule "
    "Dequantize; or open other tensors alone, with key="
)


class Average(Combination, frozen=True):
    """The weighted average of checkpoints of one model, for `ms.open(sources, combine=ms.merge.Average(...))`.

    All checkpoints must have the same names, shapes and dtypes. float16 and bfloat16 are summed in float32, float32 and
    complex64 in double precision, and rounded once. float32 with weights that add up to 1 is faster: the weighted
    differences to the first checkpoint are added to it in float32. The result is nearly always the same for checkpoints
    that are close to each other, and always for two with equal weights; for others it is about as exact as a sum in
    float32. Elements that are equal in all checkpoints stay as they are if the weights add up to 1. A checkpoint whose
    weight is zero is left out of the sums; if only one is left, with the weight 1, its tensors are taken as they are.

    Method: "Model soups", Wortsman et al., arXiv:2203.05482; weights of other sums: "Editing Models with Task
    Arithmetic", Ilharco et al., arXiv:2212.04089.

    Args:
        weights: One finite number for each checkpoint. They are used as they are, and need not add up to 1. None for
            equal parts.
        others: The choice for tensors that are neither floating-point nor complex, and for values that are not
            tensors. "equal" requires that all checkpoints agree, which is checked for tensors when they are read;
            "first", "last" or an index takes them from that checkpoint.

    Raises:
        OptionError: The weights are not numbers, or `others` is none of these.
        CombineError: A weight is not finite, or larger than any number of float32.

    Examples:
        >>> average = ms.open(["a.safetensors", "b.safetensors"], combine=ms.merge.Average(weights=[0.7, 0.3]))
        >>> ms.load(model, average)
    """

    weights: Sequence[float] | None = None
    others: Literal["equal", "first", "last"] | int = "equal"

    def __post_init__(self) -> None:
        super().__post_init__()
        largest = torch.finfo(torch.float32).max  # torch multiplies no float32 with a larger number
        if not all(abs(weight) <= largest for weight in self.weights or ()):  # also False for NaN
            raise CombineError("the weights of an average must be finite in float32", found=self.weights)

    def merge(self, sources: Sequence[Checkpoint]) -> FlatTree:
        """Returns the averages, which are computed when they are read.

        Args:
            sources: The opened checkpoints.

        Returns:
            The tensors by name.

        Raises:
            CombineError: The checkpoints, or the weights, cannot be averaged.

        Examples:
            >>> checkpoint = ms.open(["a.safetensors", "b.safetensors"], combine=ms.merge.Average())
        """
        weights = [1 / len(sources)] * len(sources) if self.weights is None else self.weights
        positions = {"equal": None, "first": 0, "last": len(sources) - 1}
        chosen = self.others if isinstance(self.others, int) else positions[self.others]
        found, remedies = _differences(sources, chosen)
        if len(weights) != len(sources):
            found.append(f"weights= has {count(len(weights), 'number')} for {count(len(sources), 'checkpoint')}")
        if chosen not in (None, *range(len(sources))):
            found.append(f"others={chosen} is the index of no checkpoint")
        refuse("an average takes a weight for each, and equal names, shapes and dtypes", sources, found, remedies)
        if chosen is None:
            check_values(sources, in_all=True)
        averages: dict[object, Stored] = {}
        tensors: dict[str, Stored] = {}
        for name in sources[0]:
            parts = tuple(source.stored(name) for source in sources)
            keys = tuple(bytes_key(part, name) for part in parts)
            # Names that are tied in all checkpoints share one average.
            tensors[name] = averages.setdefault(keys, self._averaged(name, parts, weights, chosen))
        values = sources[chosen or 0].flat.values
        return FlatTree(tensors, dict(values), sources[0].flat.containers, versions_of(sources))

    def _averaged(self, name: str, parts: tuple[Stored, ...], weights: Sequence[float], chosen: int | None) -> Stored:
        dtype, shape = parts[0].dtype, tuple(parts[0].shape)
        if not all(map(has_sums, parts)):
            if chosen is not None:
                return parts[chosen]
            return Combined(f"the same in {len(parts)}", dtype, shape, parts, lambda tensors: _same(name, tensors))
        used = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]
        factors = [weight for _, weight in used]
        if factors == [1]:
            return used[0][0]
        by_differences = len(used) > 1 and abs(math.fsum(factors) - 1) <= _BY_DIFFERENCES.get(dtype, -1)
        compute = _mean if by_differences else _sum

        def fill(out: torch.Tensor, blocks: Sequence[torch.Tensor], _: int) -> None:
            chunks = (torch.split(tensor, _CHUNK_ELEMENTS) for tensor in (out, *blocks))
            for result, *pieces in zip(*chunks, strict=True):
                result.copy_(compute(pieces, factors) if pieces else result.new_zeros(()))

        build = Blocks(lambda *_: fill, scratch_bytes=4 * _CHUNK_ELEMENTS * 2 * dtype.itemsize)
        return Combined(f"average of {len(parts)}", dtype, shape, tuple(part for part, _ in used), build)


def _sum(pieces: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Returns the weighted sum in a wider dtype."""
    dtype = pieces[0].dtype
    wide = torch.promote_types(dtype, torch.float32 if dtype.itemsize == 2 else torch.float64)
    total = torch.mul(pieces[0].to(wide), weights[0])
    for piece, weight in zip(pieces[1:], weights[1:], strict=True):
        total.add_(piece.to(wide), alpha=weight)
    return total


def _mean(pieces: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Returns a weighted sum whose weights add up to 1, in the dtype of the tensors.

    The weighted differences to the first tensor are subtracted from it: what is rounded is small where the tensors are
    close to each other, and an element that is equal in all of them stays as it is. Two halves are added, which rounds
    once. Elements for which that is infinite or NaN are computed by `_sum`.
    """
    base, *others = pieces
    if weights == [0.5, 0.5]:
        mean = torch.add(base, others[0]).mul_(0.5)
    else:
        total = torch.sub(base, others[0]).mul_(weights[1])
        for piece, weight in zip(others[1:], weights[2:], strict=True):
            total.add_(torch.sub(base, piece), alpha=weight)
        mean = torch.sub(base, total, out=total)
    return mean if mean.sum().isfinite() else torch.where(mean.isfinite(), mean, _sum(pieces, weights))


def _same(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the first tensor. Raises `CombineError` if another one differs."""
    differing = [f"[{index}]" for index, tensor in enumerate(tensors) if not same_values(tensors[0], tensor)]
    if differing:
        raise CombineError(
            "a tensor that cannot be averaged differs between the checkpoints",
            where=name,
            expected=f"the same {tensors[0].dtype} values in all",
            found=f"others than in the first in {', '.join(differing)}",
            remedy=_DEQUANTIZE if tensors[0].dtype in SCALABLE else f"take it {_FROM_ONE}",
        )
    return tensors[0]


def has_sums(tensor: Stored) -> bool:
    """Whether sums make sense: they do not for numbers whose scales are other tensors, such as float8."""
    dtype = tensor.dtype
    return kind_of(tensor) == "strided" and (dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1))


def _differences(sources: Sequence[Checkpoint], chosen: int | None) -> tuple[list[str], list[str]]:
    """Returns the differences that show that the checkpoints have no average, and what to do about them."""
    found, remedies = list[str](), dict[str, None]()
    unfit, casts = list[str](), dict[int, torch.dtype]()
    for name, indices in holders_of([source.flat.tensors for source in sources]).items():
        specs = {index: sources[index][name] for index in indices}
        are_summed, is_alone = all(has_sums(spec.stored) for spec in specs.values()), len(specs) < len(sources)
        shapes, dtypes = {spec.shape for spec in specs.values()}, {spec.dtype for spec in specs.values()}
        if not is_alone and (len(shapes) == len(dtypes) == 1 or not (are_summed or chosen is None)):
            continue
        places = listed(f"{spec.dtype} of shape {spec.shape} in [{index}]" for index, spec in specs.items())
        found.append(f"{name!r} is {places}{' alone' if is_alone else ''}")
        if not (is_alone or are_summed):
            remedies[f"take tensors without an average {_FROM_ONE}"] = None
        elif is_alone or len(shapes) > 1:
            unfit.append(name)
        else:
            casts |= {index: specs[0].dtype for index, spec in specs.items() if spec.dtype != specs[0].dtype}
    for index, source in enumerate(sources):
        rules = [f"ms.rules.Ignore({name!r})" for name in unfit if name in source]
        shown = [*rules[:3], *["..."][: len(rules) > 3]]
        options = [f"rules=[{', '.join(shown)}]"] if rules else []
        options += [f"dtype={short(casts[index])!r}"] if index in casts else []
        if options:
            how = f"ms.convert_checkpoint(path, new_path, {', '.join(options)})"
            remedies[f"write {label(sources, index)} as the others are: {how}"] = None
    if chosen is not None and (quantized := stored_quantized(sources[0])):
        found += [f"{each.name!r} is {each.found}, and only the scales have an average" for each in quantized]
        how = join_remedies(remedies_for(ProblemKind.QUANTIZED_WEIGHT, quantized))
        remedies[f"write plain weights of each first, with modelstate.convert_checkpoint: {how}"] = None
    return found, list(remedies)
