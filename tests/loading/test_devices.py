"""Loading onto a CUDA device."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: loading onto one is not tested"),
]

ANY_WAY = pytest.mark.parametrize("in_place", [None, False, True], ids=["default", "staged", "in place"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("position", torch.arange(64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) + self.position
        return result


class Several(nn.Module):
    """3 MB of tensors of many kinds: large, small, tied, without elements, without dimensions, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 500)
        self.head = nn.Linear(500, 1000, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(500)
        self.small = nn.ParameterList(nn.Parameter(torch.rand(7 + i)) for i in range(300))
        self.empty = nn.Parameter(torch.rand(0, 3))
        self.register_buffer("flags", torch.rand(33) > 0.5)
        self.register_buffer("turns", torch.rand(5, 3, dtype=torch.complex64))
        self.register_buffer("halves", torch.rand(70_001).half())
        self.register_buffer("eighths", torch.rand(1001).to(torch.float8_e4m3fn))


@contextmanager
def memory_for(more_bytes: int) -> Iterator[None]:
    """Lets torch allocate so much more on the device."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        octets, others = (one.contiguous().view(-1).view(torch.uint8) for one in (found[name], value))
        assert torch.equal(octets, others), name


@pytest.fixture
def large(tmp_path: Path) -> tuple[nn.Module, dict[str, torch.Tensor], Path]:
    """A module of 200 MB on the device, its values, and a file of others."""
    torch.manual_seed(1)
    module = nn.Sequential(*(nn.Linear(2500, 2500) for _ in range(8)))
    path = tmp_path / "large.safetensors"
    ms.save({name: torch.randn_like(value) for name, value in module.state_dict().items()}, path)
    return module.cuda(), values_of(module), path


@pytest.mark.parametrize("target", ["skeleton", "cpu", "cuda"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_onto_a_device(target: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    state = Net().state_dict()
    save_file(state, tmp_path / "x.safetensors")
    if target == "skeleton":
        with ms.skeleton():
            module = Net()
    else:
        module = Net().to(target)
    objects = [*module.parameters(), *module.buffers()]
    ms.load(module, tmp_path / "x.safetensors", device="cuda", dtype=dtype)
    assert [id(t) for t in (*module.parameters(), *module.buffers())] == [id(t) for t in objects]
    assert {t.device.type for t in objects} == {"cuda"}
    expected = state["layer.weight"].to(dtype or torch.float32)
    assert torch.equal(module.layer.weight.cpu(), expected)
    module(torch.ones(2, 64, device="cuda", dtype=dtype)).sum().backward()


def test_what_is_only_moved_to_a_device_is_not_counted_as_loaded() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = {name: value for name, value in module.state_dict().items() if name.startswith("0.")}
    plan = ms.plan(module, state, allow_missing=["1.*"], device="cuda:0")
    assert plan.coverage == 0.5
    assert [step.name for step in plan.steps] == ["0.weight", "0.bias"]
    assert "2 only moved to cuda:0: 1.bias, 1.weight" in plan.notes
    assert not any("own loading code" in note for note in plan.notes)


@ANY_WAY
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_every_kind_of_tensor(in_place: bool | None, suffix: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    source, module = Several(), Several().cuda()
    module.conv.to(memory_format=torch.channels_last)
    module.head.weight = module.embed.weight
    path = tmp_path / f"several.{suffix}"
    ms.save(source, path) if suffix == "safetensors" else torch.save(source.cuda().state_dict(), path)
    before = {name: (id(value), value.data_ptr()) for name, value in module.state_dict(keep_vars=True).items()}
    ms.load(module, path, in_place=in_place)
    assert_same(values_of(module), values_of(source))
    for name, value in module.state_dict(keep_vars=True).items():
        assert (id(value), value.data_ptr()) == before[name], name
    assert module.head.weight is module.embed.weight


@ANY_WAY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_device_casts_and_counts_what_becomes_infinite(
    in_place: bool | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    state = {"weight": torch.randn(1500, 1500), "bias": torch.randn(1500)}
    state["weight"][1499, 3:6] = torch.tensor([3.4028e38, -3.4028e38, 1.0])
    state["bias"][7] = float("nan")
    save_file(state, tmp_path / "x.safetensors")
    module = nn.Linear(1500, 1500, device="cuda", dtype=dtype)
    address = module.weight.data_ptr()
    report = ms.load(module, tmp_path / "x.safetensors", dtype=dtype, in_place=in_place)
    for name, value in values_of(module).items():
        torch.testing.assert_close(value, state[name].to(dtype), rtol=0, atol=0, equal_nan=True)
    assert module.weight.data_ptr() == address
    notes = " ".join(report.notes)
    assert "finite values became infinite or NaN by a cast, 2 in all: weight (2)" in notes
    assert "values were NaN before a cast, 1 in all: bias (1)" in notes


def test_the_default_needs_no_second_copy_on_the_device(large: tuple[nn.Module, dict[str, Any], Path]) -> None:
    module, before, path = large
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    report = ms.load(module, path)
    assert torch.cuda.max_memory_allocated() - allocated < 100 << 20
    assert all("read lease" in step.why for step in report.steps), report.notes
    after = values_of(module)
    assert_same(after, {name: ms.open(path).tensor(name) for name in before})
    module(torch.ones(2, 2500, device="cuda")).sum().backward()
    optimizer.step()
    assert not torch.equal(values_of(module)["0.weight"], after["0.weight"])


def test_a_device_without_room_for_a_second_copy(large: tuple[nn.Module, dict[str, Any], Path]) -> None:
    """The default loads; what has to stage fails, and changes nothing."""
    module, before, path = large
    with memory_for(100 << 20):
        with pytest.raises(torch.OutOfMemoryError):
            ms.load(module, path, in_place=False)
        assert_same(values_of(module), before)
        ms.load(module, path)
    assert_same(values_of(module), {name: ms.open(path).tensor(name) for name in before})


@pytest.mark.parametrize("torch_can", [True, False])
def test_memory_that_cannot_be_pinned(
    torch_can: bool, large: tuple[nn.Module, dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, before, path = large
    empty, runtime, failed = torch.empty, torch.cuda.cudart(), list[int]()

    def refuse(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory and not torch_can:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, pin_memory=pin_memory, **options)

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            """An error that the driver remembers."""
            assert int(runtime.cudaHostRegister(address, nbytes, flags)) == 0
            failed.append(int(runtime.cudaHostRegister(address, nbytes, flags)))
            runtime.cudaHostUnregister(address)
            return failed[-1]

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    ms.load(module, path)
    assert all(failed)
    assert failed
    assert_same(values_of(module), {name: ms.open(path).tensor(name) for name in before})
    assert (torch.ones(5, device="cuda") + 1).sum() == 10


def test_nothing_is_said_when_the_process_ends(tmp_path: Path) -> None:
    """Python may have taken its own calls down when it frees the memory that was pinned."""
    program = f"""
import torch, modelstate as ms
model, store = torch.nn.Linear(2000, 2000).cuda(), ms.Store({str(tmp_path / "runs")!r})
ms.save(model, {str(tmp_path / "x.safetensors")!r})
ms.load(model, {str(tmp_path / "x.safetensors")!r})
store.save(1, {{"model": model}}, background=True).result()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""


@ANY_WAY
@pytest.mark.parametrize("is_cast", [False, True], ids=["same dtype", "cast"])
@pytest.mark.parametrize("where", ["default stream", "side stream"])
def test_the_load_comes_between_what_is_queued_before_and_after_it(
    where: str, is_cast: bool, in_place: bool | None, large: tuple[nn.Module, dict[str, Any], Path]
) -> None:
    module, before, path = large
    stored = {name: ms.open(path).tensor(name) for name in before}
    if is_cast:
        module = module.bfloat16()
        before = values_of(module)
        stored = {name: value.bfloat16() for name, value in stored.items()}
    dtype = torch.bfloat16 if is_cast else None
    ms.load(module, path, dtype=dtype, in_place=in_place)  # the memory that it needs is there
    ms.load(module, before, in_place=in_place)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if where == "side stream" else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # longer than the load
        old = {name: value.detach().clone() for name, value in module.state_dict().items()}
        ms.load(module, path, dtype=dtype, in_place=in_place)
        new = {name: value.detach().clone() for name, value in module.state_dict().items()}
    torch.cuda.synchronize()
    assert_same({name: value.cpu() for name, value in old.items()}, before)
    assert_same({name: value.cpu() for name, value in new.items()}, stored)


def test_a_model_on_two_devices(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700))
    module = nn.Sequential(nn.Linear(700, 700).bfloat16(), nn.Linear(700, 700).cuda().bfloat16())
    ms.save(source, tmp_path / "x.safetensors")
    ms.load(module, tmp_path / "x.safetensors", dtype=torch.bfloat16)
    assert [value.device.type for value in module.parameters()] == ["cpu", "cpu", "cuda", "cuda"]
    assert_same(values_of(module), {name: value.bfloat16() for name, value in values_of(source).items()})


def test_in_the_background_while_the_device_computes(large: tuple[nn.Module, dict[str, Any], Path]) -> None:
    module, before, path = large
    given = torch.ones(64, 2500, device="cuda")
    expected = module(given).detach().clone()
    handle = ms.load(module, path, background=True)
    for _ in range(20):
        assert torch.equal(module(given), expected)
    handle.result()
    assert_same(values_of(module), {name: ms.open(path).tensor(name) for name in before})


def test_what_was_read_in_the_background_is_there_until_it_is_copied(
    large: tuple[nn.Module, dict[str, Any], Path],
) -> None:
    module, before, path = large
    handle = ms.load(module, path, background=True)
    while not handle.done:
        time.sleep(0.001)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(400_000_000)
        handle.result()
    others = [torch.zeros(2500, 2500, device="cuda") for _ in range(8)]  # in the memory that has been freed
    torch.cuda.synchronize()
    assert_same(values_of(module), {name: ms.open(path).tensor(name) for name in before})
    assert not any(other.any() for other in others)


@pytest.mark.parametrize("budget", [1 << 20, 40 << 20])
def test_within_a_budget(budget: int, large: tuple[nn.Module, dict[str, Any], Path]) -> None:
    module, before, path = large
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    report = ms.load(module, path, max_memory_bytes=budget)
    assert report.peak_memory_bytes <= budget
    assert torch.cuda.max_memory_allocated() - allocated <= budget
    assert_same(values_of(module), {name: ms.open(path).tensor(name) for name in before})


@pytest.mark.parametrize("where", ["default stream", "side stream"])
def test_rows_that_a_transform_quantizes_on_the_device(where: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    source = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 1024, bias=False))
    ms.save(source, tmp_path / "x.safetensors")
    with ms.skeleton():
        module = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 1024, bias=False))
    given = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
    config = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    stream = torch.cuda.Stream() if where == "side stream" else torch.cuda.default_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        ms.load(
            *(module, tmp_path / "x.safetensors"),
            device="cuda",
            dtype=torch.bfloat16,
            transform=ms.loading.Quantize(config),
        )
        found = module(given)
    expected = source.to("cuda", torch.bfloat16)
    quantization.quantize_(expected, config)
    torch.cuda.synchronize()
    assert torch.equal(found, expected(given))
