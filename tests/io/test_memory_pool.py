"""A pool lends memory again that no tensor, view or array uses any more, and no other."""

import gc
from collections.abc import Callable
from contextlib import suppress
from types import CodeType

import pytest
import torch

from modelstate.io import memory
from modelstate.io.memory import MemoryPool, fresh_tensors
from tests.sweeps import at_instruction, interrupt

SHAPE = torch.Size([1024, 256])
NBYTES = SHAPE.numel() * 4


def staged(pool: MemoryPool, count: int = 1, most_bytes: int = 1 << 30) -> list[torch.Tensor]:
    """Tensors in memory of the pool, which gets that memory at once: it is used as long as they are there."""
    with pool.lending() as lent:
        tensors = fresh_tensors([(SHAPE, None, torch.float32)] * count)
    pool.keep(lent, most_bytes)
    return tensors


def test_memory_of_tensors_that_are_gone_is_lent_again() -> None:
    pool = MemoryPool()
    (first,) = staged(pool)
    address = first.data_ptr()
    (second,) = staged(pool)
    assert second.data_ptr() != address
    del first
    (third,) = staged(pool)
    assert third.data_ptr() == address
    del second, third
    assert pool.kept_bytes == 2 * NBYTES


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor[3:5].t(),
    "its storage": lambda tensor: tensor.untyped_storage(),
    "an array": lambda tensor: tensor.numpy(),
    "a part of an array": lambda tensor: tensor.numpy()[1:],
    "DLPack": lambda tensor: torch.from_dlpack(tensor),
    "a parameter": torch.nn.Parameter,
    "a tensor that autograd has saved": lambda tensor: (torch.ones(SHAPE, requires_grad=True) * tensor).grad_fn,
    "a memoryview": lambda tensor: memoryview(tensor.numpy()),
}


@pytest.mark.parametrize("use", USES)
def test_memory_that_anything_uses_is_not_lent(use: str) -> None:
    pool = MemoryPool()
    (tensor,) = staged(pool)
    address = tensor.data_ptr()
    user = USES[use](tensor)
    del tensor
    (other,) = staged(pool)
    assert other.data_ptr() != address
    del user, other
    gc.collect()
    assert address in [tensor.data_ptr() for tensor in [*staged(pool), *staged(pool)]]


def test_a_tensor_keeps_the_memory_that_it_shares_with_others() -> None:
    pool = MemoryPool()
    first, second = staged(pool, 2)  # in one mapping
    second.fill_(2)
    address = first.data_ptr()
    del first
    assert staged(pool, 2)[0].data_ptr() != address
    assert second.unique().tolist() == [2.0]


def test_no_more_is_kept_than_was_asked_for() -> None:
    pool = MemoryPool()
    for _ in range(5):
        staged(pool, most_bytes=2 * NBYTES)
        assert pool.kept_bytes <= 2 * NBYTES
    pool.keep((), 0)
    assert pool.kept_bytes == 0


def test_nothing_is_kept_where_nothing_can_be_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_COUNTS_REFERENCES", False)
    pool = MemoryPool()
    staged(pool)
    assert pool.kept_bytes == 0


def test_another_size_gets_new_memory() -> None:
    pool = MemoryPool()
    address = staged(pool)[0].data_ptr()
    assert staged(pool, 3)[0].data_ptr() != address
    assert staged(pool)[0].data_ptr() == address


def test_outside_of_the_block_memory_is_new_and_untouched() -> None:
    pool = MemoryPool()
    staged(pool)[0].fill_(7)
    (tensor,) = fresh_tensors([(SHAPE, None, torch.float32)])
    assert tensor.unique().tolist() == [0.0]
    with pool.lending() as lent, MemoryPool().lending() as inner:
        (tensor,) = fresh_tensors([(SHAPE, None, torch.float32)])
        assert tensor.unique().tolist() == [0.0]
    assert (len(lent), len(inner)) == (0, 1)


def is_of_pool(code: CodeType) -> bool:
    return code.co_filename == memory.__file__


@pytest.mark.slow
def test_an_interrupt_before_any_instruction_leaves_used_memory_alone() -> None:
    for at in range(1, 10_000):
        pool = MemoryPool()
        used = [staged(pool)[0].fill_(1), staged(pool)[0].fill_(1)]
        staged(pool)  # is gone at once
        with at_instruction(at, is_of_pool, interrupt) as found, suppress(KeyboardInterrupt):
            used += [tensor.fill_(1) for tensor in staged(pool)]
        later = [tensor.fill_(2) for _ in range(3) for tensor in staged(pool)]
        assert all(bool(tensor.eq(1).all()) for tensor in used)
        assert len({tensor.data_ptr() for tensor in [*used, *later]}) == len([*used, *later])
        del later
        assert not fresh_tensors([(SHAPE, None, torch.float32)])[0].any()
        if found.count < at:
            break
    assert 100 < at < 9_999
