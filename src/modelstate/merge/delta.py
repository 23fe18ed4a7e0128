"""What an adapter adds to a weight, computed while the weight is read.

The arithmetic is that of peft's `merge_and_unload`, step by step, so that the results are the same.

Methods: "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al., arXiv:2106.09685; "DoRA: Weight-Decomposed
Low-Rank Adaptation", Liu et al., arXiv:2402.09353.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import msgspec
import torch

from modelstate.io.memory import aligned
from modelstate.spec import Allocate, Blocks, Combined, FillBlock, Stored, block_elements

CONVOLUTIONS = {3: torch.nn.functional.conv1d, 4: torch.nn.functional.conv2d, 5: torch.nn.functional.conv3d}


class Layout(Enum):
    """The tensor that the matrices A and B of an adapter belong to."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    CONV = "conv"
    EXPERTS = "experts"
    """A weight for each of several experts."""
    BIAS = "bias"
    """One tensor in the place of A and B."""


class Delta(msgspec.Struct, frozen=True):
    """What an adapter adds to one tensor of the base."""

    layout: Layout
    factors: tuple[Stored, ...]
    """A, B and the magnitude of DoRA, or a bias."""
    scaling: float
    is_transposed: bool = False
    """Whether the weight has its inputs first."""
    is_rounded: bool = False
    """Whether the product is rounded to the dtype of the weight before it is added."""
    experts: int = 1
    """The number of weights that have matrices of their own."""

    @property
    def needs_whole(self) -> bool:
        """Whether the rows of the weight cannot be computed one by one."""
        return self.layout is Layout.CONV or (len(self.factors) == 3 and self.is_transposed)

    def add_to(
        self,
        block: torch.Tensor,
        original: torch.Tensor,
        rows: slice,
        factors: Sequence[torch.Tensor],
        memory: torch.Tensor,
    ) -> None:
        """Adds the product for some rows to them.

        Args:
            block: The rows of the weight.
            original: The rows of the weight before anything was added to it.
            rows: The place of the rows in the weight.
            factors: The values of the factors.
            memory: Memory for a product and a copy of the rows in its dtype.
        """
        product = self._product(rows, factors, memory[: block.numel()]).mul_(self.scaling)
        if len(factors) == 3:
            total = original + product
            norm = torch.linalg.norm((total.T if self.is_transposed else total).flatten(1), dim=1)
            factor = factors[2].view(-1)[slice(None) if self.is_transposed else rows] / norm
            factor = factor if self.is_transposed else factor.view(-1, *[1] * (block.dim() - 1))
            block.copy_(factor * (total if original is block else block + product))
        elif self.is_rounded or block.dtype == product.dtype:
            block += product.to(block.dtype)
        else:  # twice as fast as an addition of two dtypes
            block.copy_(memory[-block.numel() :].view(block.shape).copy_(block).add_(product))

    def _product(self, rows: slice, factors: Sequence[torch.Tensor], memory: torch.Tensor) -> torch.Tensor:
        if self.layout is Layout.BIAS:
            return factors[0][rows].clone()
        a, b = factors[:2]
        if self.layout is Layout.EXPERTS:
            of_experts = b.view(len(b), -1, self.experts)[..., rows], a.view(self.experts, -1, a.shape[1])[rows]
            return torch.einsum(f"ore,eri->{'eio' if self.is_transposed else 'eoi'}", *of_experts)
        if self.layout is not Layout.CONV:
            if self.is_transposed:
                return torch.mm(b, a[:, rows], out=memory.view(len(b), -1)).T
            return torch.mm(b[rows], a, out=memory.view(-1, a.shape[1]))
        if a.dim() == 4 and a.shape[2:] == (1, 1):
            return (b.squeeze(3).squeeze(2) @ a.squeeze(3).squeeze(2)).unsqueeze(2).unsqueeze(3)
        return CONVOLUTIONS[a.dim()](a.transpose(0, 1), b).transpose(0, 1)


def merged(weight: Stored, dtype: torch.dtype, deltas: Sequence[Delta]) -> Combined:
    """Returns a weight in a dtype, with everything that is added to it, to be computed when it is read."""
    shape = tuple(weight.shape)
    row = max(math.prod(shape[1:]), 1)
    unit = max(math.prod(shape), 1) if any(delta.needs_whole for delta in deltas) else row
    # peft keeps adapters of a base in half precision in float32.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    has_dora = any(len(delta.factors) == 3 for delta in deltas)

    def begin(factors: Sequence[torch.Tensor], allocate: Allocate) -> FillBlock:
        memory = allocate((2 * block_elements(shape, unit),), wide)
        values = iter([factor.to(wide) for factor in factors])
        prepared = [(delta, [next(values) for _ in delta.factors]) for delta in deltas]

        def fill(out: torch.Tensor, blocks: Sequence[torch.Tensor], first: int) -> None:
            if blocks[0].data_ptr() != out.data_ptr():
                out.copy_(blocks[0])
            block = out.view(-1, *shape[1:])
            original = block.clone() if has_dora and len(deltas) > 1 else block
            rows = slice(first // row, (first + out.numel()) // row)
            for delta, of_delta in prepared:
                delta.add_to(block, original, rows, of_delta, memory)

        return fill

    factors = tuple(factor for delta in deltas for factor in delta.factors)
    temporaries = 2 + 3 * has_dora + 2 * any(delta.layout is Layout.CONV for delta in deltas)
    elements = sum(math.prod(factor.shape) for factor in factors) + temporaries * block_elements(shape, unit)
    build = Blocks(begin, len(factors), unit, aligned(elements * wide.itemsize))
    return Combined(f"merged with {len(deltas)}", dtype, shape, (weight, *factors), build)


def cast(stored: Stored, dtype: torch.dtype) -> Combined:
    """Returns a tensor in another dtype."""
    return merged(stored, dtype, ())
