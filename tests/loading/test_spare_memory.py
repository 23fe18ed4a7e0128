"""Loads that read all values first use the memory that earlier ones have left; and what a lack of memory looks like."""

import errno
import mmap
import os
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_memory_of_a_load_in_the_background_is_not_kept(files: list[Path]) -> None:
    """Its values may wait for long."""
    model = constant(-1)
    ms.load(model, files[0], background=True).result()
    assert all(bool((parameter == 0).all()) for parameter in model.parameters())
    assert memory._spare.kept_bytes == 0


class Mixed(torch.nn.Module):
    """Slots that a load fills in different ways: by a cast, by a rule that computes in blocks, by torch."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in {"cast": torch.float64, "joined": torch.float32, "turned": torch.float32}.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(600, 600, dtype=dtype), requires_grad=False))


@pytest.mark.parametrize("in_place", [None, False, True])
def test_memory_that_the_system_lacks_is_named_wherever_it_is(
    in_place: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mapping in turn cannot be had. A load needs no thread, for which the system may have no memory."""
    ones = {"cast": torch.ones(600, 600), "turned": torch.ones(600, 600)}
    ms.save(ones | {"first": torch.ones(300, 600), "second": torch.ones(300, 600)}, tmp_path / "x.safetensors")
    rules = [ms.rules.Concat(["first", "second"], "joined"), ms.rules.Transpose("turned", 0, 1)]
    real, failures = mmap.mmap, 0
    for number in range(1, 30):
        monkeypatch.setattr(memory, "_spare", memory.MemoryPool())
        left, model = number, Mixed()

        class Lacking(real):  # type: ignore[misc,valid-type]
            def __new__(cls, descriptor: int, *arguments: object, **options: object) -> mmap.mmap:
                nonlocal left
                left -= descriptor == -1
                if descriptor == -1 and not left:
                    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
                return real(descriptor, *arguments, **options)  # type: ignore[arg-type]

        failed: ms.errors.MemoryBudgetError | None = None
        with monkeypatch.context() as patched:
            patched.setattr(mmap, "mmap", Lacking)
            try:
                ms.load(model, tmp_path / "x.safetensors", rules=rules, in_place=in_place)
            except ms.errors.MemoryBudgetError as error:
                failed = error
        if failed is None:
            assert all(param.eq(1).all() for param in model.parameters())
            if left > 0:
                break  # there is no mapping of this number
            continue
        failures += 1
        is_unchanged = not any(param.any() for param in model.parameters())
        assert is_unchanged or "partly overwritten" in str(failed)
        assert "Cannot allocate memory" in failed.found
    assert left > 0
    assert failures > 2
