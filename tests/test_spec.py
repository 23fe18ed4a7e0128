"""A stored tensor's description."""

import math
from dataclasses import fields

import torch
from hypothesis import given
from hypothesis import strategies as st

from modelstate.spec import ByteRange, StoredTensor, contiguous_stride


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.integers(0, 100),
)
def test_the_short_way_to_a_whole_tensor_gives_the_same(dtype: torch.dtype, shape: tuple[int, ...], start: int) -> None:
    storage = ByteRange("file", start, math.prod(shape) * dtype.itemsize)
    stride = contiguous_stride(shape)
    short, full = StoredTensor.whole(dtype, shape, stride, storage), StoredTensor(dtype, shape, stride, storage)
    for field in fields(StoredTensor):
        if field.name != "extent" or full.nbytes:  # where there are no bytes, it does not matter where they would lie
            assert getattr(short, field.name) == getattr(full, field.name), field.name
