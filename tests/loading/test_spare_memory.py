"""Loads that read all values first use the memory that earlier ones have left."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError
from modelstate.io import memory
from modelstate.loading import set_spare_bytes

NBYTES = 32 << 20
LAYERS = 8
PAGE_BYTES = resource.getpagesize()


def constant(value: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    size = int((NBYTES / LAYERS / 4) ** 0.5)
    model = nn.Sequential(*[nn.Linear(size, size, bias=False, dtype=dtype) for _ in range(LAYERS)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two checkpoints of the same model."""
    paths = [tmp_path / f"{value}.safetensors" for value in range(2)]
    for value, path in enumerate(paths):
        ms.save(constant(float(value)), path)
    return paths


@pytest.fixture(autouse=True)
def own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_spare", memory.MemoryPool())
    monkeypatch.setattr(memory, "_spare_bytes", memory._spare_bytes)


def new_pages(model: nn.Module, path: Path, **options: Any) -> int:
    """The pages that the kernel has had to clear for a load, at most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ms.load(model, path, in_place=False, **options)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_load_needs_no_new_memory(dtype: torch.dtype, files: list[Path]) -> None:
    model = constant(-1, dtype)
    ms.load(model, files[0], in_place=False, dtype=dtype)
    staged_bytes = NBYTES * dtype.itemsize // 4
    for value in (1.0, 0.0, 1.0):
        assert new_pages(model, files[int(value)], dtype=dtype) < staged_bytes / PAGE_BYTES / 4
        assert all(bool((parameter == value).all()) for parameter in model.parameters())
    assert memory._spare.kept_bytes <= 2 * NBYTES


def test_no_more_is_kept_than_was_asked_for(files: list[Path]) -> None:
    model = constant(-1)
    set_spare_bytes(NBYTES // 2)
    for path in files:
        ms.load(model, path, in_place=False)
        assert memory._spare.kept_bytes <= NBYTES // 2
    set_spare_bytes(1 << 30)
    ms.load(model, files[0], in_place=False)
    assert memory._spare.kept_bytes >= NBYTES
    set_spare_bytes(0)
    assert memory._spare.kept_bytes == 0


def test_memory_that_the_model_gets_is_not_kept(files: list[Path]) -> None:
    """What a skeleton is loaded into belongs to the model."""
    with ms.skeleton():
        model = constant(-1)
    ms.load(model, files[0], map=False)
    assert memory._spare.kept_bytes == 0
    other = constant(-1)
    ms.load(other, files[1], in_place=False)
    ms.load(other, files[1], in_place=False)
    assert all(bool((parameter == 0).all()) for parameter in model.parameters())


def test_a_failed_load_leaves_its_memory_to_the_next(files: list[Path]) -> None:
    model = constant(-1)
    ms.load(model, files[0], in_place=False)

    def refuse(name: str, tensor: torch.Tensor) -> torch.Tensor:
        raise ValueError(name)

    with pytest.raises(ms.errors.TransformError):
        ms.load(model, files[1], in_place=False, transform={"7.*": refuse})
    assert all(bool((parameter == 0).all()) for parameter in model.parameters())
    assert new_pages(model, files[1]) < NBYTES / PAGE_BYTES / 4


@pytest.mark.parametrize("nbytes", [-1, 0.5, True, "1 GB"])
def test_what_is_no_size(nbytes: Any) -> None:
    with pytest.raises(OptionError):
        set_spare_bytes(nbytes)


def test_memory_of_a_load_in_the_background_is_not_kept(files: list[Path]) -> None:
    """Its values may wait for long."""
    model = constant(-1)
    ms.load(model, files[0], background=True).result()
    assert all(bool((parameter == 0).all()) for parameter in model.parameters())
    assert memory._spare.kept_bytes == 0
