"""Tensors in random layouts, saved in one and loaded into another: every rank holds its part of the whole tensor."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import modelstate as ms
from modelstate.distributed import writing
from modelstate.distributed.shards import local_shard
from modelstate.spec import slices_of
from tests.distributed import models
from tests.distributed.ranks import Ranks
from tests.sweeps import EXHAUSTIVE

pytestmark = pytest.mark.slow
CASES = 300 if EXHAUSTIVE else 24
MESHES = [(4,), (2, 2), (4, 1), (1, 4)]
SIZES = [0, 1, 1, 2, 3, 4, 5, 7, 8, 13, 16]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


def random_tensor(chance: random.Random) -> torch.Tensor:
    shape = [chance.choice(SIZES) for _ in range(chance.choice([0, 1, 1, 2, 2, 2, 3]))]
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    return (torch.randn(shape, generator=generator) * 10).to(chance.choice(DTYPES))


def random_placements(chance: random.Random, dims: int, mesh_dims: int, inner_ranks: int) -> list[Placement]:
    if dims and mesh_dims == 2 and chance.random() < 0.3:  # of FSDP2 over tensor parallelism
        dim = chance.randrange(dims)
        return [_StridedShard(dim, split_factor=inner_ranks), Shard(dim)]
    places: list[Placement] = [Replicate(), *map(Shard, range(dims))]
    return [chance.choice(places) for _ in range(mesh_dims)]


def distributed(chance: random.Random, whole: torch.Tensor) -> torch.Tensor:
    """The tensor in a random layout; at times a plain one, or one whose local tensor is not contiguous."""
    shape = chance.choice(MESHES)
    placements = random_placements(chance, whole.ndim, len(shape), shape[-1])
    is_plain, is_transposed = chance.random() < 0.15, chance.random() < 0.3
    if is_plain:
        return whole.clone()
    mesh = models.mesh(*shape)
    local = part_of(whole, placements, mesh)
    if is_transposed and local.ndim == 2:
        local = local.t().contiguous().t()
    strides = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=strides, run_check=False)


def part_of(whole: torch.Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> torch.Tensor:
    place = mesh.get_coordinate()
    assert place is not None
    shard = local_shard(tuple(whole.shape), tuple(placements), tuple(mesh.shape), tuple(place))
    local = torch.empty(shard.shape, dtype=whole.dtype)
    for box, to in shard.boxes():
        local[slices_of(to)] = whole[slices_of(box)]
    return local


def in_random_layouts(chance: random.Random, wholes: Mapping[str, torch.Tensor]) -> nn.Module:
    net = nn.Module()
    for name, whole in wholes.items():
        net.register_buffer(name, distributed(chance, whole))
    return net


def differing(net: nn.Module, wholes: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the tensors whose local part on this rank is wrong."""
    wrong = []
    for name, tensor in net.named_buffers():
        expected, found = wholes[name], models.local(tensor)
        if isinstance(tensor, DTensor):
            expected = part_of(expected, tensor.placements, tensor.device_mesh)
        is_same = found.dtype == expected.dtype and found.shape == expected.shape
        bits = [each.contiguous().view(-1).view(torch.uint8) for each in (found, expected)]
        wrong += [] if is_same and torch.equal(*bits) else [f"{name}: {tuple(tensor.shape)}"]
    return wrong


def save_and_load(folder: Path, seed: int) -> list[str]:
    chance, group = random.Random(seed), dist.group.WORLD
    wholes = {f"tensor{number}": random_tensor(chance) for number in range(chance.randrange(1, 9))}
    saved = in_random_layouts(chance, wholes)
    loaded = in_random_layouts(chance, {name: torch.zeros_like(whole) for name, whole in wholes.items()})
    again = in_random_layouts(chance, {name: torch.zeros_like(whole) for name, whole in wholes.items()})
    first, second = folder / f"{seed}.safetensors", folder / f"{seed} again.safetensors"
    part_bytes, round_bytes = chance.choice([1, 8, 1 << 20]), chance.choice([16, 1 << 20])
    with mock.patch.multiple(writing, PART_BYTES=part_bytes, ROUND_BYTES=round_bytes):
        ms.save(saved, first, process_group=group)
    dist.barrier()
    ms.load(loaded, first, process_group=group, read_once=chance.random() < 0.3)
    ms.save(loaded, second, process_group=group)
    dist.barrier()
    files = [{name: checkpoint.tensor(name) for name in checkpoint} for checkpoint in map(ms.open, (first, second))]
    wrong = differing(loaded, wholes) + ["the files"] * any(
        not torch.equal(*(file[name].reshape(-1).view(torch.uint8) for file in files)) for name in wholes
    )
    with ms.Store(folder / f"{seed}", process_group=group) as store:
        store.save(1, {"model": loaded})
        store.restore({"model": again})
    return [f"seed {seed}: {what}" for what in wrong + differing(again, wholes)]


def all_cases(folder: Path) -> list[str]:
    return [what for seed in range(CASES) for what in save_and_load(folder, seed)]


def test_random_layouts(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(all_cases, tmp_path) == [[]] * 4
