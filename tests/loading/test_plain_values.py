"""Plain values in every way into a model: steps, casts, views, and bytes that several names share."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import modelstate as ms
from tests.faults import faulty_reads


class Mixed(nn.Module):
    """Four plain slots, two of them in one storage, and one of each kind that is loaded in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.zeros(8)
        buffers = {
            "first_half": flat[:4],
            "plain_buffer": torch.zeros(3),
            "second_half": flat[4:],
            "transposed": torch.zeros(2, 3).T,
            "other_dtype": torch.zeros(2, dtype=torch.float64),
            "conjugate": torch.zeros(2, dtype=torch.complex64).conj(),
            "empty": torch.zeros(0),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.plain = nn.Parameter(torch.zeros(2, 2))
        self.tied = self.also_tied = nn.Parameter(torch.zeros(2))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    state = {name: torch.randn_like(value).contiguous().resolve_conj() for name, value in Mixed().state_dict().items()}
    state |= {"other_dtype": torch.randn(2), "also_tied": state["tied"].clone()}
    save_file(state, tmp_path / "mixed.safetensors")
    return tmp_path / "mixed.safetensors"


@pytest.mark.parametrize("in_place", [None, True, False])
def test_the_steps_are_those_of_the_plan_in_its_order(path: Path, in_place: bool | None) -> None:
    model = Mixed()
    planned = ms.plan(model, path, in_place=in_place)
    report = ms.load(model, path, in_place=in_place)
    assert report.steps == planned.steps
    assert report.coverage == 1.0
    assert report.bytes == planned.bytes
    loaded = model.state_dict()
    for name, value in load_file(path).items():
        assert torch.equal(loaded[name], value.to(loaded[name].dtype)), name


@pytest.mark.parametrize("target", ["cpu", "meta"])
@pytest.mark.parametrize("in_place", [None, True, False])
def test_each_name_of_the_same_bytes_gets_their_cast(tmp_path: Path, in_place: bool | None, target: str) -> None:
    """The file has tied tensors once, and the slots of the model are not tied. Here they take several blocks."""

    def build() -> nn.Sequential:
        return nn.Sequential(*[nn.Linear(300, 300) for _ in range(5)])

    tied = build()
    tied[2].weight = tied[4].weight = tied[1].weight
    tied[3].bias = tied[0].bias
    ms.save(tied, tmp_path / "tied.safetensors")
    model = build().to(torch.bfloat16).to(target)
    options: Any = {"dtype": "bfloat16", "in_place": None if target == "meta" else in_place}
    nbytes = sum(value.nbytes for value in model.state_dict().values())
    ms.load(model, tmp_path / "tied.safetensors", **options, max_memory_bytes=nbytes + (256 << 10))
    for name, value in tied.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.bfloat16()), name


@pytest.mark.parametrize("target", ["cpu", "meta"])
@pytest.mark.parametrize("in_place", [None, True, False])
def test_casts_of_many_slots_are_those_of_torch(tmp_path: Path, in_place: bool | None, target: str) -> None:
    """Slots that adjoin in the file share blocks; with little memory, a slot has several."""
    stored = nn.Sequential(*[nn.Linear(3, size) for size in (1, 50_000, 7)], nn.Linear(200, 600, bias=False))
    with torch.no_grad():
        stored[0].weight[0, 1] = 3.4e38  # more than the largest bfloat16
        stored[2].bias[:] = torch.tensor([0, torch.inf, -torch.inf, torch.nan, 1, -1, 3e38])
    save_file(stored.state_dict(), tmp_path / "float32.safetensors")
    expected = {name: value.bfloat16() for name, value in stored.state_dict().items()}
    model = nn.Sequential(*[nn.Linear(3, size) for size in (1, 50_000, 7)], nn.Linear(200, 600, bias=False))
    model = model.to(torch.bfloat16).to(target)
    options: Any = {"dtype": "bfloat16", "in_place": None if target == "meta" else in_place}
    planned = ms.plan(model, tmp_path / "float32.safetensors", **options)
    least_bytes = sum(value.nbytes for value in expected.values()) * (in_place is False) + (256 << 10)
    report = ms.load(model, tmp_path / "float32.safetensors", **options, max_memory_bytes=least_bytes)
    assert [step.decision for step in report.steps] == [step.decision for step in planned.steps]
    assert {step.cast for step in report.steps} == {"float32 to bfloat16"}
    assert report.peak_memory_bytes <= least_bytes
    for name, value in model.state_dict().items():
        assert torch.equal(value.view(torch.int16), expected[name].view(torch.int16)), name
    assert not [note for note in report.notes if "infinite" in note]  # bfloat16 has the range of float32


@pytest.mark.parametrize(
    "shared",
    [
        lambda flat: {"a": flat, "b": flat},
        lambda flat: {"a": flat, "b": flat.view(4, 4)},
        lambda flat: {"a": flat.view(4, 4).T, "b": torch.ones(2)},
        lambda flat: {"a": flat[:12], "b": flat[4:]},
        lambda flat: {"a": flat, "c": flat[1:3], "b": flat[8:]},
        lambda flat: {"a": flat.view(4, 4).T, "b": flat[4:]},
        lambda flat: {"a": flat[:4], "b": flat[4:], "c": flat[:0], "d": flat[:0]},
    ],
)
@pytest.mark.parametrize("on_meta", [False, True])
def test_slots_whose_tensors_share_bytes_in_the_file_share_none(tmp_path: Path, shared: Any, on_meta: bool) -> None:
    state = shared(torch.randn(16))
    torch.save(state, tmp_path / "shared.pt")
    model = nn.Module()
    for name, value in state.items():
        model.register_buffer(name, torch.zeros(value.shape, device="meta" if on_meta else "cpu"))
    ms.load(model, tmp_path / "shared.pt", map=True)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    model.get_buffer("a").zero_()
    assert torch.equal(model.get_buffer("b"), state["b"])


def test_bytes_between_values_that_are_cast_are_not_read(tmp_path: Path) -> None:
    state = {name: torch.ones(1 << 19) for name in "abc"}
    save_file(state, tmp_path / "x.safetensors")
    module = nn.Module()
    for name in "ac":
        module.register_parameter(name, nn.Parameter(torch.zeros(1 << 19, dtype=torch.bfloat16)))
    with faulty_reads() as faults:
        ms.load(module, tmp_path / "x.safetensors", dtype=torch.bfloat16, allow_unexpected=["b"], in_place=True)
    assert all(parameter.eq(1).all() for parameter in module.parameters())
    read_bytes = sum(request.nbytes for request in faults.requests if "read" in request.call)
    assert 2 * state["a"].nbytes <= read_bytes < 2.5 * state["a"].nbytes
