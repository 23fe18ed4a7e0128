"""What `ms.save` writes for a sharded model is what it writes for the same model on one machine."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

import modelstate as ms
from modelstate.distributed import writing
from modelstate.distributed.shards import replicated
from tests.distributed import models
from tests.distributed.ranks import Ranks

SHARD_BYTES = 300
"""Makes several shards of each model."""
SAVES = ("one", "shards", "held", "held shards", "state dict")


def _save(kind: str, folder: Path, how: str) -> None:
    """Saves the network of a kind. Called on all ranks, or, for the network that is not sharded, on one."""
    net = models.sharded(kind, seed=3) if dist.is_initialized() else models.plain(kind, seed=3)
    target = get_model_state_dict(net) if how == "state dict" else net
    shard_size_bytes = SHARD_BYTES if how.endswith("shards") else None
    report = ms.save(target, folder / how / "model.safetensors", shard_size_bytes=shard_size_bytes, extra={"epoch": 3})
    assert report.bytes == sum(Path(file).stat().st_size for file in report.files)
    assert report.tensors == len(net.state_dict())


def _ways(kind: str) -> tuple[str, ...]:
    """Returns all ways for one kind of model, and two for each other kind, which differ in the layout only."""
    return SAVES if kind == "fsdp+tp" else ("one", "held shards")


def _save_in_all_ways(kind: str, folder: Path) -> None:
    for how in _ways(kind):
        if dist.get_rank() == 0:
            (folder / how).mkdir()
        dist.barrier()
        # Short runs, too, are written by the ranks that hold them.
        with mock.patch.object(writing, "PART_BYTES", 1) if how.startswith("held") else nullcontext():
            _save(kind, folder, how)
        assert (folder / how / "model.safetensors.index.json").exists() == how.endswith("shards")
    again = models.sharded(kind, seed=4)
    ms.load(again, folder / "held shards" / "model.safetensors", verify=True)
    expected = models.plain(kind, seed=3)
    named = {**dict(expected.named_parameters(remove_duplicate=False)), **dict(expected.named_buffers())}
    for name, tensor in models.gathered(again).items():
        assert torch.equal(tensor, named[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", models.SHARD)
def test_the_files_are_those_of_one_machine(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    ranks.values(_save_in_all_ways, kind, tmp_path / "ranks")
    for how in {"one", "shards"} & {*_ways(kind)}:
        (tmp_path / "here" / how).mkdir(parents=True)
        _save(kind, tmp_path / "here", how)
        assert _files(tmp_path / "ranks" / how) == _files(tmp_path / "here" / how)
    state = models.plain(kind, seed=3).state_dict()
    for how in _ways(kind):
        with ms.open(tmp_path / "ranks" / how / "model.safetensors") as checkpoint:
            assert checkpoint.verify() > 0
            assert checkpoint.metadata["extra"] == {"epoch": 3}
            for name, tensor in state.items():
                assert torch.equal(checkpoint.tensor(name), tensor), (how, name)
    if kind == "fsdp+tp":
        with safe_open(tmp_path / "ranks" / "held" / "model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert torch.equal(file.get_tensor(name), state[name])


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Copies(TorchDispatchMode):
    """The sizes of the storages that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.sizes.append(result.untyped_storage().nbytes())
        return result


def test_a_part_of_a_tensor_that_is_not_contiguous_is_copied_alone() -> None:
    """A large tensor is written in many parts: a copy of the whole for each of them took the square of its size."""
    tensor = torch.arange(1000.0).repeat(1000, 1).t()[:, :999]
    expected = tensor.reshape(-1)[5000:7000].clone()
    parts = replicated(tensor.numel(), 4, (0, 1))
    piece = writing.Piece("w", tensor, range(5000, 7000), 0, parts, parts.regions[0])
    with Copies() as copies:
        elements = writing.elements_of(piece)
        assert not isinstance(elements, torch.Tensor)
        made = elements.make(0, 2000)
        sent = writing.in_a_row(tensor, 5000, 7000)
    assert torch.equal(made, expected)
    assert torch.equal(sent, expected)
    assert max(size for size in copies.sizes if size != tensor.untyped_storage().nbytes()) <= 3 * 4 * 1000
