"""Values that are cast and remade block by block: whatever the blocks are, and whoever else loads."""

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.io import engine
from modelstate.io.blocks import Buffers
from modelstate.loading import stream
from tests.loading.fingerprint import whole


class Twice(ms.loading.ModuleTransform):
    """Twice the values."""

    def __init__(self, extra: Any = 0, change: Callable[[torch.Tensor], Any] = lambda t: t * 2) -> None:
        self.extra, self.change = extra, change

    def applies_to(self, name: str, module: nn.Module) -> bool:
        return name.endswith("weight")

    def __call__(self, name: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
        result: torch.Tensor = self.change(tensor)
        return result

    def extra_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        if isinstance(self.extra, Exception):
            raise self.extra
        return self.extra


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.randn(4000, 300), "bias": torch.randn(4000)}, path)
    return path


def loaded(path: Path, **options: Any) -> nn.Linear:
    module = nn.Linear(300, 4000)
    ms.load(module, path, **options)
    return module


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor[:-1],
        lambda tensor: None,
        lambda tensor: 1 / 0,
    ],
    ids=["too few", "nothing", "an error"],
)
def test_results_that_cannot_be_loaded(change: Any, path: Path) -> None:
    module = nn.Linear(300, 4000)
    before = whole(module)
    with pytest.raises(errors.TransformError):
        ms.load(module, path, transform=Twice(change=change))
    assert whole(module) == before


@pytest.mark.parametrize("extra", [-1, 2.5, "x", None, ValueError("no")])
def test_nonsense_about_memory(extra: Any, path: Path) -> None:
    with pytest.raises(errors.TransformError, match=r"extra_bytes\(\)"):
        ms.plan(nn.Linear(300, 4000), path, transform=Twice(extra))


@pytest.mark.slow
def test_loads_at_once_leave_torchs_number_of_threads_alone(tmp_path: Path) -> None:
    save_file({f"{index}.weight": torch.ones(512, 512) for index in range(8)}, tmp_path / "x.safetensors")
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)

    def load() -> None:
        with ms.skeleton():
            model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        ms.load(model, tmp_path / "x.safetensors", dtype=torch.bfloat16)
        seen.append(torch.get_num_threads())

    try:
        for _ in range(5):
            threads = [threading.Thread(target=load) for _ in range(6)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        assert set(seen) == {3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def _load_in_child(path: Path) -> None:
    torch.set_num_threads(1)  # without it torch itself hangs, as every worker of a DataLoader would
    module = loaded(path, dtype=torch.bfloat16)
    assert torch.equal(module.weight, loaded(path).weight.to(torch.bfloat16))


def test_in_a_forked_process(path: Path) -> None:
    """Where threads of torch's are gone that it still counts on."""
    module = loaded(path, dtype=torch.bfloat16)
    module(torch.ones(64, 300, dtype=torch.bfloat16))
    child = multiprocessing.get_context("fork").Process(target=_load_in_child, args=(path,))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0


@pytest.mark.slow
def test_very_small_tensors_take_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins at a multiple of 64 bytes of the buffer."""
    count = 3000
    save_file({f"{index}.bias": torch.full((1,), float(index)) for index in range(count)}, tmp_path / "x.safetensors")
    made: list[int] = []
    real = Buffers._make
    monkeypatch.setattr(
        Buffers, "_make", lambda self, count, nbytes: made.extend([nbytes] * count) or real(self, count, nbytes)
    )
    for budget in (None, 100_000):
        made.clear()
        model = nn.ModuleList(nn.LayerNorm(1) for _ in range(count))
        for layer in model:
            layer.weight = None
        report = ms.load(model, tmp_path / "x.safetensors", dtype=torch.float64, max_memory_bytes=budget)
        assert model[count - 1].bias.tolist() == [count - 1]
        assert 0 < sum(made) <= report.peak_memory_bytes <= (budget or 10**9)


def test_a_step_says_the_route(path: Path) -> None:
    def routes(**options: Any) -> dict[str, str]:
        with ms.skeleton():
            module = nn.Linear(300, 4000)
        found = {step.name: step.route for step in ms.plan(module, path, **options).steps}
        assert found == {step.name: step.route for step in ms.load(module, path, **options).steps}
        return found

    assert routes() == {"weight": "mapped", "bias": "mapped"}
    assert routes(map=False) == {"weight": "direct", "bias": "direct"}
    assert routes(dtype=torch.float16) == {"weight": "streamed", "bias": "streamed"}
    assert routes(transform={"bias": lambda name, tensor: tensor + 1}) == {"weight": "mapped", "bias": "whole"}
    assert routes(transform=Twice()) == {"weight": "whole", "bias": "mapped"}


def test_each_block_of_a_cast_is_processed_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that fails in its thread would be read again by the caller's, which takes more time and is no error."""
    monkeypatch.setattr(engine, "_BLOCK_BYTES", 256 << 10)
    monkeypatch.setattr(engine, "read_threads", lambda: 2)
    copy_runs, copied = stream.copy_runs, list[int]()

    def counted(runs: Sequence[stream.Run], *arguments: Any) -> None:
        assert not torch.is_grad_enabled()
        copied.extend(run.numel for run in runs)
        copy_runs(runs, *arguments)

    monkeypatch.setattr(stream, "copy_runs", counted)
    module = nn.Linear(300, 4000, dtype=torch.bfloat16)
    ms.load(module, path, dtype=torch.bfloat16)
    assert torch.equal(module.weight, loaded(path).weight.bfloat16())
    assert sum(copied) == sum(value.numel() for value in module.state_dict().values())
