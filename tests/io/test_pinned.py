"""Pinned memory, with a stand-in for the CUDA runtime: these tests run on every machine."""

import ctypes
import gc
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from modelstate.io.pinned import pinned_memory

DEVICE = torch.device("cuda", 0)


class Runtime:
    """Registers ranges, and reads and writes each when it is unregistered: it must be there until then."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.devices: list[object] = []
        """Those that are current."""
        self.fails = False

    def cudaHostRegister(self, address: int, nbytes: int, _flags: int) -> int:
        assert self.devices == [DEVICE]
        if not self.fails:
            self.registered[address] = nbytes
        return int(self.fails)

    def cudaHostUnregister(self, address: int) -> int:
        assert self.devices == [DEVICE]
        ctypes.memset(address, 7, self.registered.pop(address))
        return 0

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield
        self.devices.pop()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime, empty = Runtime(), torch.empty
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", runtime.device)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kw: empty(*args, **kw))
    return runtime


@pytest.mark.parametrize("nbytes", [1, 4095, 3 << 20, 20 << 20])
def test_the_range_of_the_tensor_is_registered_until_no_tensor_uses_it(nbytes: int, runtime: Runtime) -> None:
    tensor = pinned_memory(nbytes, DEVICE)
    tensor.fill_(3)
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (nbytes,))
    assert runtime.registered == {tensor.data_ptr(): nbytes}
    view = tensor[nbytes - 1 :]
    del tensor
    gc.collect()
    assert runtime.registered
    assert view.tolist() == [3]
    del view
    assert not runtime.registered


def test_a_forked_process_has_memory_of_its_own_there(runtime: Runtime) -> None:
    """Otherwise the kernel would give the addresses to what the process allocates, and take that away in the end."""
    tensor = pinned_memory(64 << 20, DEVICE).fill_(1)
    pointer = ctypes.c_ubyte.from_address(tensor.data_ptr())
    child = os.fork()
    if not child:
        is_fine = pointer.value == 0
        others = [mmap.mmap(-1, 8 << 20) for _ in range(100)]
        del tensor
        for other in others:
            other[0] = other[-1] = 1
        os._exit(0 if is_fine and runtime.registered else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.fill_(2).min() == 2


def test_where_nothing_can_be_registered_torch_allocates_it(runtime: Runtime) -> None:
    runtime.fails = True
    assert pinned_memory(1 << 20, DEVICE).fill_(1).sum() == 1 << 20
    assert not runtime.registered
