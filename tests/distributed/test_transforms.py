"""Transforms of modules on DTensors: each rank transforms its part, and gets the part of the transformed tensor."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import modelstate as ms
from modelstate import errors
from modelstate.loading import ModuleTransform, Quantize
from modelstate.torch_compat.sharding import local_tensor
from tests.distributed import models
from tests.distributed.ranks import Ranks

Q: Any = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.slow
GROUP = 32

CONFIGS = {
    "int8 by rows": lambda: Q.Int8WeightOnlyConfig(set_inductor_config=False),
    "int8 by groups": lambda: Q.Int8WeightOnlyConfig(set_inductor_config=False, granularity=Q.PerGroup(GROUP)),
    "int4 by groups": lambda: Q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=Q.PerGroup(GROUP)),
    "int8 by tensor": lambda: Q.Int8WeightOnlyConfig(set_inductor_config=False, granularity=Q.PerTensor()),
}


class ScaledRows(ModuleTransform):
    """Divides each row by its largest element."""

    def applies_to(self, name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and name.endswith("weight")

    def __call__(self, name: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
        return tensor / tensor.abs().amax(1, keepdim=True)

    def block_shape(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
        return 1, *shape[1:]


def net(kind: str, meta: bool = False) -> nn.Sequential:
    """Two layers. With tensor parallelism a rank holds rows of the first, and two groups of columns of the second."""
    torch.manual_seed(dist.get_rank())
    with ms.skeleton() if meta else nullcontext():
        layers = nn.Sequential(nn.Linear(64, 20), nn.Linear(8 * GROUP, 6, bias=False))
    if kind == "tp":
        parallelize_module(layers, models.mesh(4), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    elif kind == "fsdp":
        for layer in layers:
            fully_shard(layer, mesh=models.mesh(4))
    return layers


def parts_of(tensor: Any) -> dict[str, torch.Tensor]:
    is_plain = type(tensor.data) is torch.Tensor
    return {"": tensor} if is_plain else {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def quantizes(path: str, config: str, pattern: str, meta: bool) -> list[str]:
    """What differs between the local tensors and the parts of the tensors of a load on one machine."""
    sharded, whole, rank = net("tp", meta), net(""), dist.get_rank()
    transform = {pattern: Quantize(CONFIGS[config]())}
    ids = [id(tensor) for tensor in sharded.parameters()]
    for model in (sharded, whole):
        ms.load(model, path, transform=transform)
    wrong = [] if ids == [id(tensor) for tensor in sharded.parameters()] else ["identity"]
    for name, tensor in sharded.named_parameters():
        local, expected = local_tensor(tensor), whole.get_parameter(name)
        if type(local) is not type(expected.data) or tensor.requires_grad != expected.requires_grad:
            wrong.append(f"{name}: {type(local)}")
        dim = int(name == "1.weight")
        for part, values in parts_of(expected).items():
            own = parts_of(local)[part]
            if not torch.equal(own, values.tensor_split(4, dim)[rank]):
                wrong.append(f"{name}.{part}")
    x, (first, whole_first) = torch.ones(3, 64), (model.get_parameter("0.weight") for model in (sharded, whole))
    with torch.no_grad():  # as in a module that computes with its local tensors
        found, expected = nn.functional.linear(x, local_tensor(first)), nn.functional.linear(x, whole_first)
    return wrong if torch.allclose(found, expected[:, 5 * rank : 5 * rank + 5], atol=1e-5) else [*wrong, "product"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    torch.manual_seed(9)
    ms.save(nn.Sequential(nn.Linear(64, 20), nn.Linear(8 * GROUP, 6, bias=False)), tmp_path / "x.safetensors")
    return str(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("config", "pattern", "meta"),
    [("int8 by rows", "0.*", False), ("int8 by groups", "*", True), ("int4 by groups", "*", False)],
)
def test_each_rank_quantizes_its_part(ranks: Ranks, path: str, config: str, pattern: str, meta: bool) -> None:
    assert ranks.values(quantizes, path, config, pattern, meta) == [[]] * 4


def transforms_rows(path: str) -> list[str]:
    sharded, whole = net("fsdp"), net("")
    for model in (sharded, whole):
        ms.load(model, path, transform=ScaledRows())
    x = torch.ones(3, 64)
    wrong = [] if torch.allclose(sharded[0](x), whole[0](x)) else ["product"]
    found = models.gathered(sharded)
    return wrong + [name for name, value in whole.named_parameters() if not torch.equal(found[name], value.detach())]


def test_each_rank_of_fsdp_transforms_its_rows(ranks: Ranks, path: str) -> None:
    assert ranks.values(transforms_rows, path) == [[]] * 4


def refused(path: str) -> dict[str, str]:
    cases = {
        "rows are cut": ("tp", Quantize(CONFIGS["int8 by rows"]())),
        "whole tensor": ("tp", {"0.*": Quantize(CONFIGS["int8 by tensor"]())}),
        "subclass": ("fsdp", Quantize(CONFIGS["int8 by rows"]())),
    }
    found = {}
    for name, (kind, transform) in cases.items():
        model = net(kind)
        before = [local_tensor(tensor).clone() for tensor in model.parameters()]
        with pytest.raises(errors.PlanError) as error:
            ms.load(model, path, transform=transform)  # type: ignore[arg-type]
        found[name] = str(error.value)
        assert all(map(torch.equal, before, map(local_tensor, model.parameters())))
    return found


def test_transforms_that_the_parts_do_not_permit(ranks: Ranks, path: str) -> None:
    quantizer = "Quantize(Int8WeightOnlyConfig)"
    for found in ranks.values(refused, path):
        assert f"1.weight: {quantizer} takes blocks of [1, 256], and this rank holds" in found["rows are cut"]
        assert f"0.weight: {quantizer} takes the whole tensor, and this rank holds" in found["whole tensor"]
        assert f"{quantizer} makes tensors of a subclass, while FSDP2 gathers plain ones" in found["subclass"]
