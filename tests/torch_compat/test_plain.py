"""Comparing tensors bit for bit."""

import math
from itertools import permutations

import pytest
import torch
from torch import nn

from modelstate.torch_compat.plain import in_a_row, same_values


class Marked(torch.Tensor):
    """A subclass with memory of its own, whose functions all fail."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise AssertionError(func)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(6, dtype=torch.bfloat16)[::2],
        torch.tensor(math.nan),
        torch.tensor([1 + 2j, 3 - 0j]).conj(),
        torch.tensor([1 + 2j], dtype=torch.complex128),
        torch.tensor([True, False]),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.empty(0, 4),
        nn.Parameter(torch.ones(2)),
        torch.ones(1, 2).expand(3, 2),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_a_copy_is_equal_and_a_changed_copy_is_not(tensor: torch.Tensor) -> None:
    copy = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    assert same_values(tensor, copy)
    if copy.numel():
        copy.view(-1)[0] = 0 if copy.view(-1)[0] else 1
        assert not same_values(tensor, copy)
        assert not same_values(tensor, tensor.detach().unsqueeze(0))


def test_the_sign_of_zero_and_the_dtype_count() -> None:
    assert not same_values(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_values(torch.tensor(1), torch.tensor(1.0))


def test_subclasses_with_memory_are_compared_without_their_code() -> None:
    first, second, other = (torch.tensor([value]).as_subclass(Marked) for value in (1.0, 1.0, 2.0))
    assert same_values(first, second)
    assert not same_values(first, other)


def test_a_quantized_tensor_only_equals_itself() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8)
    assert same_values(quantized, quantized)
    assert not same_values(quantized, quantized.clone())


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_are_equal_by_their_indices_and_values(layout: torch.layout) -> None:
    tensor = torch.eye(2).to_sparse(layout=layout)
    assert same_values(tensor, tensor.clone())
    assert not same_values(tensor, 2 * torch.eye(2).to_sparse(layout=layout))
    assert not same_values(tensor, torch.eye(2).flip(0).to_sparse(layout=layout))
    assert not same_values(tensor, torch.eye(2))


def test_any_range_of_elements_is_copied_alone() -> None:
    whole = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    tensors = [whole.permute(*order) for order in permutations(range(4))]
    tensors += [whole[:, ::2], whole[..., 1:3], whole[0, 0, 0, ::2], whole[:, :1].expand(2, 3, 4, 5), whole[:0]]
    tensors += [tensor.to(torch.complex64).conj() for tensor in (whole, whole[0, 0].t())]
    for tensor in tensors:
        expected = tensor.resolve_conj().reshape(-1)
        count = tensor.numel()
        for first in range(0, count + 1, 7):
            for end in {first, min(first + 1, count), min(first + 29, count), count}:
                found = in_a_row(tensor, first, end)
                assert torch.equal(found, expected[first:end]), (tensor.stride(), first, end)
                if not (tensor.is_contiguous() or tensor.is_conj()):
                    assert found.untyped_storage().nbytes() <= max((end - first) * found.itemsize, 1) or (
                        found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
                    )
