"""Values that are cast and remade block by block: whatever the blocks are, and whoever else loads."""

import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
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


class ByRows(ms.loading.ModuleTransform):
    """Twice the values, in some dtype, some rows at a time."""

    def __init__(
        self, rows: Any = 100, extra: Any = 0, change: Callable[[torch.Tensor], Any] = lambda t: t * 2
    ) -> None:
        self.rows, self.extra, self.change = rows, extra, change
        self.seen: list[int] = []

    def applies_to(self, name: str, module: nn.Module) -> bool:
        return name.endswith("weight")

    def __call__(self, name: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
        self.seen.append(len(tensor))
        result: torch.Tensor = self.change(tensor)
        return result

    def rows_at_once(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows

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


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 7, 100, 3999, 4000, 10**9, None])
def test_rows_are_joined_in_their_order(rows: int | None, path: Path) -> None:
    twice = ByRows(rows)
    module = loaded(path, transform=twice)
    assert torch.equal(module.weight, loaded(path).weight * 2)
    assert sum(twice.seen) == 4000
    assert max(twice.seen) == min(rows or 4000, 4000)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.to([torch.float32, torch.float16, torch.int8][int(tensor[0, 0] * 1000) % 3]),
        lambda tensor: tensor[:, :1] if tensor[0, 0] > 0 else tensor,
        lambda tensor: tensor.to_sparse(),
        lambda tensor: tensor[:-1],
        lambda tensor: None,
        lambda tensor: 1 / 0,
    ],
    ids=["dtypes", "widths", "layout", "too few", "nothing", "an error"],
)
def test_rows_that_do_not_belong_together(change: Any, path: Path) -> None:
    module = nn.Linear(300, 4000)
    before = whole(module)
    with pytest.raises(errors.TransformError):
        ms.load(module, path, transform=ByRows(change=change))
    assert whole(module) == before


@pytest.mark.parametrize("rows", [0, -1, 2.5, True, "x", ValueError("no")])
def test_nonsense_about_rows(rows: Any, path: Path) -> None:
    with pytest.raises(errors.TransformError, match=r"rows_at_once\(\)"):
        ms.plan(nn.Linear(300, 4000), path, transform=ByRows(rows))


@pytest.mark.parametrize("extra", [-1, 2.5, "x", None, ValueError("no")])
def test_nonsense_about_memory(extra: Any, path: Path) -> None:
    with pytest.raises(errors.TransformError, match=r"extra_bytes\(\)"):
        ms.plan(nn.Linear(300, 4000), path, transform=ByRows(extra=extra))


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
    assert routes(transform=ByRows()) == {"weight": "streamed", "bias": "mapped"}


class Writing(ByRows):
    """Writes twice the values itself."""

    def like(self, shape: tuple[int, ...], dtype: torch.dtype, module: nn.Module) -> Any:
        return torch.empty(0, *shape[1:], dtype=dtype)

    def rows_writer(self, shape: tuple[int, ...], dtype: torch.dtype, module: nn.Module) -> Any:
        def write(rows: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
            assert set(parts) == {""}
            assert parts[""].shape == rows.shape
            parts[""].copy_(self.change(rows))

        return ms.loading.RowsWriter(self.like(shape, dtype, module), write)


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("rows", [1, 7, 100, 3999, 4000])
def test_rows_that_are_written_by_the_transform(rows: int, path: Path) -> None:
    twice = Writing(rows)
    module = loaded(path, transform=twice)
    assert torch.equal(module.weight, loaded(path).weight * 2)
    assert twice.seen == []  # it is not called beside that


def test_what_rows_become_depends_on_the_module(tmp_path: Path) -> None:
    save_file({f"{index}.weight": torch.full((64, 32), index + 0.5) for index in range(20)}, tmp_path / "x")
    model = nn.Sequential(*(nn.Linear(32, 64, bias=False) for _ in range(20)))
    dtypes = {layer: (torch.float32, torch.float16, torch.bfloat16)[index % 3] for index, layer in enumerate(model)}

    class ByModule(Writing):
        def like(self, shape: tuple[int, ...], dtype: torch.dtype, module: nn.Module) -> Any:
            return nn.Parameter(torch.empty(1, *shape[1:], dtype=dtypes[module]), requires_grad=False)

    ms.load(model, tmp_path / "x", transform=ByModule(16))
    for index, layer in enumerate(model):
        assert layer.weight.dtype == dtypes[layer]
        assert not layer.weight.requires_grad
        assert bool((layer.weight == index * 2 + 1).all())  # type: ignore[operator]


@pytest.mark.parametrize(
    "like",
    [
        lambda columns: 1 / 0,
        lambda columns: None,
        lambda columns: torch.empty(1, columns + 1),
        lambda columns: torch.empty(1, columns, device="meta"),
        lambda columns: torch.empty(1, columns).to_sparse(),
    ],
    ids=["an error", "nothing", "another width", "meta", "sparse"],
)
def test_a_writer_that_says_nonsense(like: Callable[[int], Any], path: Path) -> None:
    class Wrong(Writing):
        def like(self, shape: tuple[int, ...], dtype: torch.dtype, module: nn.Module) -> Any:
            return like(shape[1])

    module = nn.Linear(300, 4000)
    before = whole(module)
    with pytest.raises(errors.TransformError):
        ms.load(module, path, transform=Wrong())
    assert whole(module) == before


def test_a_writer_that_is_none_of_ours(path: Path) -> None:
    class Wrong(Writing):
        def rows_writer(self, shape: tuple[int, ...], dtype: torch.dtype, module: nn.Module) -> Any:
            return lambda rows, parts: None

    with pytest.raises(errors.TransformError, match="RowsWriter"):
        ms.load(nn.Linear(300, 4000), path, transform=Wrong())


def test_a_writer_that_fails(path: Path) -> None:
    module = nn.Linear(300, 4000)
    before = whole(module)
    with pytest.raises(errors.TransformError, match="no_good"):
        ms.load(module, path, transform=Writing(change=lambda rows: torch.stack([rows, rows]) / rows.no_good))  # type: ignore[attr-defined]
    assert whole(module) == before


def test_rows_become_fewer_before_a_budget_is_refused(path: Path) -> None:
    twice = ByRows(4000)
    module = loaded(path, transform=twice, max_memory_bytes=300_000)
    assert torch.equal(module.weight, loaded(path).weight * 2)
    assert max(twice.seen) < 200
    with pytest.raises(errors.MemoryBudgetError):
        loaded(path, transform=ByRows(4000), max_memory_bytes=1000)


def test_fewer_rows_are_asked_about_anew(path: Path) -> None:
    class Hungry(ByRows):
        def extra_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
            return 8 * shape[0] * shape[1] * dtype.itemsize

    module = loaded(path, transform=Hungry(4000), max_memory_bytes=1_000_000)
    assert torch.equal(module.weight, loaded(path).weight * 2)


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
