"""Merges and averages that are computed block by block, into the memory of a live module."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import modelstate as ms
from tests.formats.files import same
from tests.io.test_lease import can_lease

STAGED = "into the existing memory, after all reads"
RANK, ALPHA = 4, 6


class Net(nn.Module):
    """One module of each layout: more rows than a block has, and a last block that is shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1000, 1500)
        self.flipped = Conv1D(1100, 1000)
        self.table = nn.Embedding(1200, 1000)
        self.conv = nn.Conv2d(3, 5, 3)
        self.other = nn.Linear(24, 7)


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape).float()


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float64], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not can_lease(tmp_path):
        pytest.skip("the file system of the temporary directory has no leases")
    torch.manual_seed(0)
    return tmp_path


def base_and_adapter(folder: Path, dtype: torch.dtype) -> tuple[list[Path], dict[str, torch.Tensor]]:
    """Files of a base and an adapter, and the merged weights. Sums and products of whole numbers are exact."""
    base = {name: whole_numbers(*value.shape).to(dtype) for name, value in Net().state_dict().items()}
    save_file(base, folder / "base.safetensors")
    merged, adapter = dict(base), {}
    scaling = ALPHA / RANK
    for name, inputs, outputs in (("linear", 1000, 1500), ("flipped", 1000, 1100), ("table", 1200, 1000)):
        a, b = whole_numbers(RANK, inputs) * 2, whole_numbers(outputs, RANK)
        kinds = ("lora_embedding_A", "lora_embedding_B") if name == "table" else ("lora_A.weight", "lora_B.weight")
        adapter |= {f"base_model.model.{name}.{kind}": value for kind, value in zip(kinds, (a, b), strict=True)}
        product = (b @ a) * scaling
        added = product if name == "linear" else product.T
        weight = f"{name}.weight"
        if name == "table":
            merged[weight] = base[weight] + added.to(dtype)
        else:
            merged[weight] = (base[weight] + added.to(torch.float64 if dtype == torch.float64 else torch.float32)).to(
                dtype
            )
    a, b = whole_numbers(RANK, 3, 3, 3) * 2, whole_numbers(5, RANK, 1, 1)
    adapter |= {"base_model.model.conv.lora_A.weight": a, "base_model.model.conv.lora_B.weight": b}
    added = torch.einsum("or,rihw->oihw", b[:, :, 0, 0], a) * scaling
    merged["conv.weight"] = (base["conv.weight"] + added).to(dtype)
    (folder / "adapter").mkdir()
    save_file(
        {name: value.contiguous() for name, value in adapter.items()}, folder / "adapter" / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return [folder / "base.safetensors", folder / "adapter"], merged


def four_models(folder: Path, dtype: torch.dtype) -> tuple[list[Path], dict[str, torch.Tensor]]:
    """Files of four models, and their average."""
    paths = [folder / f"{index}.safetensors" for index in range(4)]
    states = [
        {name: whole_numbers(*value.shape).to(dtype) * 3 for name, value in Net().state_dict().items()} for _ in paths
    ]
    for path, state in zip(paths, states, strict=True):
        save_file(state, path)
    return paths, {
        name: torch.stack([state[name].double() for state in states]).mean(0).to(dtype) for name in states[0]
    }


Make = Callable[[Path, torch.dtype], tuple[list[Path], dict[str, torch.Tensor]]]
KINDS = pytest.mark.parametrize(
    ("make", "how"), [(base_and_adapter, ms.merge.LoRA()), (four_models, ms.merge.Average())], ids=["LoRA", "Average"]
)


def wrong(net: nn.Module, merged: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in net.state_dict().items() if not same(value, merged[name])]


@pytest.mark.slow_except(6)
@KINDS
@pytest.mark.parametrize("in_place", [None, True, False])
def test_values_are_computed_into_the_memory_that_is_there(
    make: Make, how: ms.merge.LoRA, in_place: bool | None, dtype: torch.dtype, folder: Path
) -> None:
    paths, merged = make(folder, dtype)
    net = Net().to(dtype)
    before = {name: (value.data_ptr(), value._version) for name, value in net.state_dict(keep_vars=True).items()}
    checkpoint = ms.open(paths, combine=how)
    plan = ms.plan(net, checkpoint, in_place=in_place)
    report = ms.load(net, checkpoint, in_place=in_place)
    assert wrong(net, merged) == []
    assert {step.why for step in plan.steps} == {step.why for step in report.steps}
    for name, value in net.state_dict(keep_vars=True).items():
        address, version = before[name]
        assert value.data_ptr() == address
        assert value._version > version
    if in_place is False:
        assert {step.why for step in report.steps} == {STAGED}
    else:
        assert all(step.why.startswith("into the existing memory, directly") for step in report.steps)
        assert report.peak_memory_bytes <= plan.peak_memory_bytes


@KINDS
def test_on_meta_and_one_at_a_time(make: Make, how: ms.merge.LoRA, dtype: torch.dtype, folder: Path) -> None:
    paths, merged = make(folder, dtype)
    with ms.skeleton():
        net = Net().to(dtype)
    checkpoint = ms.open(paths, combine=how)
    ms.load(net, checkpoint)
    assert wrong(net, merged) == []
    assert [name for name in checkpoint if not same(checkpoint.tensor(name), merged[name])] == []


def test_tensors_in_memory_in_another_order() -> None:
    a, b = whole_numbers(30, 50), whole_numbers(50, 30)
    average = ms.open([{"w": a}, {"w": b.T}], combine=ms.merge.Average())
    assert same(average.tensor("w"), (a + b.T) / 2)
