"""Transforms that need whole tensors: while one is at work, another thread reads what comes next."""

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.faults import Request, faulty_reads
from tests.loading.fingerprint import described_module, raised_by, whole
from tests.loading.test_bad_reads import nothing_left_behind

SOON = 60.0
"""Seconds in which everything here happens that happens at all."""
LAYERS, WIDTH = 4, 256


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

    def __init__(self, path: Path) -> None:
        with ms.open(path) as checkpoint:
            self.names = [name for name in checkpoint if name.endswith("weight")]
            extents: list[Any] = [checkpoint.stored(name) for name in self.names]
        self._starts = {extent.extent.start: name for extent, name in zip(extents, self.names, strict=True)}
        self.begun = {name: threading.Event() for name in self.names}

    def __call__(self, request: Request) -> None:
        name = self._starts.get(request.start) if request.call == "preadv" else None
        if name is not None:
            self.begun[name].set()

    def after(self, name: str) -> str | None:
        """The weight that comes next."""
        at = self.names.index(name) + 1
        return self.names[at] if at < len(self.names) else None


def doubled(path: Path) -> Any:
    module = build()
    ms.load(module, {name: value_of(name, path) * 2 for name in module.state_dict()})
    return described_module(module)


def value_of(name: str, path: Path) -> torch.Tensor:
    with ms.open(path) as checkpoint:
        return checkpoint.tensor(name).clone()


def test_a_function_is_called_while_the_next_tensor_is_read(path: Path) -> None:
    """In the caller's thread, once for each tensor, in the order of the file."""
    watch, module, names, threads = Watch(path), build(), list[str](), set[threading.Thread]()

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        names.append(name)
        threads.add(threading.current_thread())
        following = watch.after(name) if name in watch.names else None
        assert following is None or watch.begun[following].wait(SOON)
        return tensor * 2

    with faulty_reads(before=watch):
        ms.load(module, path, transform=transform)
    assert names == list(ms.open(path))
    assert threads == {threading.current_thread()}
    assert described_module(module) == doubled(path)


@pytest.mark.parametrize(
    ("error", "raised"), [(ValueError("no"), errors.TransformError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_transform_that_raises_while_the_next_tensor_is_read(
    error: BaseException, raised: type[BaseException], path: Path
) -> None:
    """The reading ends with the request that is under way, and nothing is left of it."""
    watch, module = Watch(path), build()
    before = whole(module)

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name != "0.weight":
            return tensor
        assert watch.begun["1.weight"].wait(SOON)
        raise error

    with nothing_left_behind(path), faulty_reads(before=watch):
        assert type(raised_by(lambda: ms.load(module, path, transform=transform))) is raised
        error.__traceback__ = None
    assert not watch.begun["3.weight"].is_set()
    assert whole(module) == before


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
