"""Fixtures of modules on several ranks."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """The default process group, with this process as its only rank."""
    if not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
