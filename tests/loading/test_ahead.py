"""Transforms that need whole tensors: while one is at work, another thread reads what comes next."""

import errno
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.io import engine
from tests.faults import Request, faulty_reads
from tests.loading.fingerprint import described_module, interrupted_at, whole
from tests.loading.test_bad_reads import nothing_left_behind

SOON = 60.0
"""Seconds in which everything here happens that happens at all."""
LAYERS, WIDTH = 4, 256
LAYER_BYTES = WIDTH * WIDTH * 4


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Weights that are read ahead, with biases between them that are too small for it."""
    torch.manual_seed(1)
    found = tmp_path / "x.safetensors"
    save_file({name: torch.randn_like(tensor) for name, tensor in build().state_dict().items()}, found)
    return found


def started_since(running: list[threading.Thread]) -> list[str]:
    """The names of the threads of the library that have been started meanwhile and not ended."""
    new = set(threading.enumerate()) - set(running)
    return [thread.name for thread in new if thread.name.startswith("modelstate")]


class Watch:
    """Says which weights somebody has begun to read, and lets their transforms wait for it."""

    def __init__(self, path: Path, on_read: Callable[[str], object] = lambda name: None) -> None:
        with ms.open(path) as checkpoint:
            self.names = [name for name in checkpoint if name.endswith("weight")]
            extents: list[Any] = [checkpoint.stored(name) for name in self.names]
        self._starts = {extent.extent.start: name for extent, name in zip(extents, self.names, strict=True)}
        self.begun = {name: threading.Event() for name in self.names}
        self._on_read = on_read

    def __call__(self, request: Request) -> None:
        name = self._starts.get(request.start) if request.call == "preadv" else None
        if name is not None:
            self.begun[name].set()
            self._on_read(name)

    def after(self, name: str) -> str | None:
        """The weight that comes next."""
        at = self.names.index(name) + 1
        return self.names[at] if at < len(self.names) else None


class Waiting(ms.loading.ModuleTransform):
    """Twice the weights; each time the next one has to be on its way, or must not be."""

    def __init__(self, watch: Watch, is_ahead: bool = True) -> None:
        self.watch, self.is_ahead = watch, is_ahead
        self.names: list[str] = []
        self.threads: set[threading.Thread] = set()

    def applies_to(self, name: str, module: nn.Module) -> bool:
        return name.endswith("weight")

    def __call__(self, name: str, tensor: torch.Tensor, module: nn.Module | None = None) -> torch.Tensor:
        self.names.append(name)
        self.threads.add(threading.current_thread())
        following = self.watch.after(name) if name in self.watch.names else None
        if following is not None:
            assert self.watch.begun[following].wait(SOON if self.is_ahead else 0.05) == self.is_ahead
        return tensor * 2


def function(transform: Waiting) -> Any:
    return lambda name, tensor: transform(name, tensor)


def doubled(path: Path) -> Any:
    module = build()
    ms.load(module, {name: value_of(name, path) * 2 for name in module.state_dict()})
    return described_module(module)


def value_of(name: str, path: Path) -> torch.Tensor:
    with ms.open(path) as checkpoint:
        return checkpoint.tensor(name).clone()


def test_a_function_is_called_while_the_next_tensor_is_read(path: Path) -> None:
    """In the caller's thread, once for each tensor, in the order of the file."""
    watch, module = Watch(path), build()
    transform = Waiting(watch)
    with faulty_reads(before=watch):
        ms.load(module, path, transform=function(transform))
    assert transform.names == list(ms.open(path))
    assert transform.threads == {threading.current_thread()}
    assert described_module(module) == doubled(path)


@pytest.mark.slow
@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_module_transform_is_called_while_what_comes_next_is_read(
    is_ahead: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight at a time, where the buffers are as small as that."""
    monkeypatch.setattr(engine, "_SCRATCH_BYTES", 2 * LAYER_BYTES if is_ahead else LAYER_BYTES)
    watch, module = Watch(path), build()
    transform = Waiting(watch, is_ahead)
    plan = ms.plan(module, path, transform=Waiting(watch))
    assert plan.peak_memory_bytes == 2 * LAYER_BYTES + sum(layer.bias.nbytes for layer in module)
    budget = None if is_ahead else plan.peak_memory_bytes - 1
    with faulty_reads(before=watch):
        ms.load(module, path, transform=transform, max_memory_bytes=budget)
    assert transform.names == watch.names
    assert transform.threads == {threading.current_thread()}
    assert torch.equal(module[2].weight, value_of("2.weight", path) * 2)
    assert torch.equal(module[2].bias, value_of("2.bias", path))


@pytest.mark.slow
def test_a_budget_ends_the_reading_ahead_first(path: Path) -> None:
    module, model_bytes = build(), sum(p.nbytes for p in build().parameters())
    plan = ms.plan(module, path, transform=lambda name, tensor: tensor * 2)
    assert plan.peak_memory_bytes == model_bytes + 2 * LAYER_BYTES
    for budget, is_ahead in ((plan.peak_memory_bytes, True), (plan.peak_memory_bytes - 1, False)):
        watch, module = Watch(path), build()
        with faulty_reads(before=watch):
            ms.load(module, path, transform=function(Waiting(watch, is_ahead)), max_memory_bytes=budget)
        assert described_module(module) == doubled(path)
    module, least = build(), model_bytes + LAYER_BYTES
    with pytest.raises(errors.MemoryBudgetError, match=f"max_memory_bytes={least}"):
        ms.load(module, path, transform=lambda name, tensor: tensor * 2, max_memory_bytes=least - 1)


@pytest.mark.parametrize(
    ("error", "raised"), [(ValueError("no"), errors.TransformError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_transform_that_raises_while_the_next_tensor_is_read(
    error: BaseException, raised: type[BaseException], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading ends with the requests that are under way, and nothing is left of it."""
    monkeypatch.setattr(engine, "BATCH_BYTES", LAYER_BYTES // 64)
    watch, module, raising, starts = Watch(path), build(), threading.Event(), list[int]()
    before = whole(module)

    def slowly(request: Request) -> None:
        watch(request)
        if request.call == "preadv" and watch.begun["1.weight"].is_set():
            starts.append(request.start)
            raising.wait(SOON)
            time.sleep(0.1)

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name != "0.weight":
            return tensor
        assert watch.begun["1.weight"].wait(SOON)
        raising.set()
        raise error

    with nothing_left_behind(path), faulty_reads(before=slowly):
        assert type(raised_by(lambda: ms.load(module, path, transform=transform))) is raised
        error.__traceback__ = None
    assert 0 < len(starts) < 32
    assert whole(module) == before


def raised_by(function: Callable[[], object]) -> BaseException | None:
    """What it raises, without the tracebacks, which would keep alive what the load has in its frames."""
    try:
        function()
    except BaseException as error:
        one: BaseException | None = error
        while one is not None:
            one.__traceback__, one = None, one.__cause__ or one.__context__
        return error
    return None


@pytest.mark.slow
def test_ctrl_c_at_any_line(path: Path) -> None:
    """The model is what it was, or loaded, and no thread goes on."""
    running, expected, module = threading.enumerate(), doubled(path), build()
    before = whole(module)

    def load() -> None:
        ms.load(module, path, transform=lambda name, tensor: tensor * 2, progress=False)

    for line in range(1, interrupted_at(0, load), 193):
        module = build()
        before = whole(module)
        interrupted_at(line, load)
        gc.collect()
        assert not started_since(running), line
        assert whole(module) == before or described_module(module) == expected, line


def test_an_error_of_the_reading_ahead(path: Path) -> None:
    """It comes when its tensor is wanted; what comes behind is not transformed."""
    running, watch, module, names = threading.enumerate(), Watch(path), build(), list[str]()
    before = whole(module)

    def fail(request: Request) -> None:
        watch(request)
        if watch.begun["1.weight"].is_set():
            raise OSError(errno.EIO, "Input/output error")

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        names.append(name)
        return tensor

    with faulty_reads(before=fail), pytest.raises(errors.ReadFailedError, match=path.name):
        ms.load(module, path, transform=transform)
    assert "0.weight" in names
    assert "1.weight" not in names
    assert whole(module) == before
    assert not started_since(running)
