"""Serving on a GPU, where a request ends when its work is queued, and streams run in no order."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.errors import ExportError, LiveTargetError, ProgramInputError
from tests.serve.models import Constant, randomised, weights_of
from tests.serve.packages import needs_a_compiler, needs_aoti, package_of_torch
from tests.serve.targets import Readers, buffer_of, module_of, target_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: serving on one is not tested"),
]

DEVICE = "cuda"
MIB = 1 << 20
LONG = 600_000_000
"""Cycles of the GPU: about 0.3 s, in which a swap that does not wait has ended."""


def constant() -> Constant:
    """A module of 8 MiB whose answer k, in exact arithmetic, tells the version."""
    return Constant(8, 512).to(DEVICE).eval()


def inputs() -> torch.Tensor:
    return torch.ones(64, 512, device=DEVICE)


def on_cpu(k: float) -> dict[str, torch.Tensor]:
    return weights_of(Constant(8, 512), k)


def on_gpu(k: float) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in on_cpu(k).items()}


def in_a_file(k: float, folder: Path) -> Path:
    path = folder / f"{k:g}.safetensors"
    save_file(on_cpu(k), path)
    return path


def answer(live: ms.Live) -> list[float]:
    with torch.no_grad():
        values: list[float] = live(inputs()).unique().tolist()
    return values


def devices(live: ms.Live) -> set[str]:
    return {tensor.device.type for tensor in live._versions[-1].tensors}


def mlp(seed: int) -> nn.Module:
    return randomised(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), seed).to(DEVICE).eval()


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


# What a swap puts in place.


@pytest.mark.parametrize("kind", ["eager", "compiled", "exported"])
def test_every_source_gets_onto_the_device(kind: str, tmp_path: Path) -> None:
    live = ms.Live(target_of(kind, constant(), inputs()))
    given = on_gpu(4)
    for k, source in enumerate([in_a_file(2, tmp_path), on_cpu(3), given], 2):
        live.swap(source, canary=ms.Canary((inputs(),)))
        assert answer(live) == [k]
        assert devices(live) == {DEVICE}
    for value in given.values():
        value.zero_()
    assert answer(live) == [4.0]
    live.rollback()
    assert answer(live) == [3.0]


class OnBoth(nn.Module):
    """Has a buffer of each kind on the CPU, and one that requests count in on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64).to(DEVICE)
        self.register_buffer("limit", torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("seen", torch.zeros((), device=DEVICE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        answer: torch.Tensor = self.layer(x) * float(self.limit[0] + self.table[1])
        return answer


@pytest.mark.parametrize("source", ["file", "cpu", "cuda"])
def test_each_tensor_stays_on_its_device(source: str, tmp_path: Path) -> None:
    module, trained = OnBoth().eval(), OnBoth().eval()
    state: Any = {name: value.to(DEVICE if source == "cuda" else "cpu") for name, value in trained.state_dict().items()}
    if source == "file":
        save_file(state, tmp_path / "x.safetensors")
        state = tmp_path / "x.safetensors"
    live, x = ms.Live(module), torch.ones(2, 64, device=DEVICE)
    expected = {name: value.device.type for name, value in (*module.named_parameters(), *module.named_buffers())}
    live.swap(state)
    served = module_of(live)
    found = {name: value.device.type for name, value in (*served.named_parameters(), *served.named_buffers())}
    assert found == expected
    assert torch.equal(live(x), trained(x))


# Threads and streams.


@pytest.mark.parametrize("stream", ["one for each thread", "default"])
def test_each_answer_is_of_one_version(stream: str, tmp_path: Path) -> None:
    """Each request ends long before the GPU has begun it."""
    live, x, own = ms.Live(constant()), inputs(), threading.local()
    torch.cuda.synchronize()

    def request() -> tuple[int, torch.Tensor]:
        if not hasattr(own, "stream"):
            own.stream = torch.cuda.Stream() if stream != "default" else torch.cuda.default_stream()
        with torch.no_grad(), torch.cuda.stream(own.stream):
            torch.cuda._sleep(2_000_000)
            value, version = live.answer(x)
            return version, value.cpu()

    with Readers(request, 3).running() as readers:
        for k in range(2, 22):
            source = [in_a_file(k, tmp_path), on_cpu(k), on_gpu(k)][k % 3]
            assert live.swap(source).version == k
            readers.wait_for_one_each()
    assert readers.errors == []
    assert (readers.torn, readers.wrong_version, readers.went_back) == (0, 0, 0)
    assert len(readers.seen) > 10


def queued(call: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls on another stream, which has long to do before. The caller keeps the input, whose memory is still read."""
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        found: torch.Tensor = call(x)
    return found


@pytest.mark.parametrize("keep_versions", [0, 1])
def test_memory_is_not_used_again_before_queued_work_has_read_it(keep_versions: int) -> None:
    live, x = ms.Live(constant(), keep_versions=keep_versions), inputs()
    live.swap(on_cpu(2))
    found = queued(live, x)
    for k in range(3, 7):
        live.swap(on_cpu(k))
    torch.cuda.synchronize()
    assert found.unique().tolist() == [2.0]
    if keep_versions:
        found = queued(live, x)
        live.rollback()
        live.swap(on_cpu(7))
        live.swap(on_cpu(8))
        torch.cuda.synchronize()
        assert found.unique().tolist() == [6.0]


@pytest.mark.parametrize("source", ["file", "cuda"])
def test_every_stream_sees_all_of_a_new_version(source: str, tmp_path: Path) -> None:
    """The copies may have been queued behind other work of the thread that swaps."""
    live, x, other = ms.Live(constant()), inputs(), torch.cuda.Stream()
    weights: Any = in_a_file(2, tmp_path) if source == "file" else on_gpu(2)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    live.swap(weights)
    with torch.no_grad(), torch.cuda.stream(other):
        found = live(x)
        assert found.unique().tolist() == [2.0]


def test_buffers_are_carried_over_with_what_is_queued() -> None:
    live, x = ms.Live(OnBoth().eval()), torch.ones(2, 64, device=DEVICE)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        live(x)
    assert live.swap(OnBoth().state_dict()).carried == ("seen",)
    assert float(buffer_of(live, "seen")) == 1


# Memory.


def test_memory_of_the_gpu_does_not_grow(tmp_path: Path) -> None:
    live, path = ms.Live(constant()), in_a_file(2, tmp_path)
    answer(live)  # which loads kernels and makes their workspace
    after = []
    torch.cuda.reset_peak_memory_stats()
    for number in range(30):
        live.swap(path if number % 2 else on_gpu(3))
        answer(live)
        after.append(torch.cuda.memory_allocated())
    assert after[-1] == after[2]
    # Of 8 MiB each: the version that serves, the one before, the new one, and what is given.
    assert torch.cuda.max_memory_allocated() < after[2] + 3 * 8 * MIB


# Compiled programs, and graphs of CUDA.


@pytest.mark.slow
@pytest.mark.parametrize("compile_mode", [None, "reduce-overhead"])
def test_compiled_by_inductor(compile_mode: str | None) -> None:
    needs_a_compiler()
    torch.compiler.reset()
    live, x = ms.Live(torch.compile(mlp(0), mode=compile_mode)), torch.randn(8, 64, device=DEVICE)

    def served() -> torch.Tensor:
        with torch.no_grad():
            for _ in range(3):  # warms up, records, replays
                torch.compiler.cudagraph_mark_step_begin()
                found: torch.Tensor = live(x).clone()
        return found

    served()
    for seed in range(1, 7):
        trained = mlp(seed)
        with torch.no_grad():
            live.swap(trained.state_dict(), canary=ms.Canary((x,), atol=1e6))
            assert torch.allclose(served(), trained(x), atol=1e-2, rtol=1e-3)
    live.rollback()
    with torch.no_grad():
        assert torch.allclose(served(), mlp(5)(x), atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("how", ["load", "load_state_dict", "swap"])
def test_a_graph_that_was_captured_replays_with_the_new_weights(how: str, tmp_path: Path) -> None:
    module, x = mlp(0), torch.randn(8, 64, device=DEVICE)
    live = ms.Live(module) if how == "swap" else None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        module(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = module(x)
    for seed in (1, 2):
        trained = mlp(seed)
        ms.save(trained, tmp_path / f"{seed}.safetensors")
        if live is not None:
            live.swap(tmp_path / f"{seed}.safetensors")
        elif how == "load":
            ms.load(module, tmp_path / f"{seed}.safetensors")
        else:
            ms.load_state_dict(module, trained.state_dict())
        graph.replay()
        torch.cuda.synchronize()
        with torch.no_grad():
            assert torch.allclose(found, trained(x), atol=1e-2, rtol=1e-3)


# Programs in files.


@pytest.mark.slow
def test_an_exported_program_in_a_file(tmp_path: Path) -> None:
    x = torch.randn(8, 64, device=DEVICE)
    random = torch.cuda.get_rng_state()
    ms.export(mlp(0), (x,), tmp_path / "x.pt2")
    assert torch.equal(torch.cuda.get_rng_state(), random)
    live = ms.Live(tmp_path / "x.pt2")
    for seed in (1, 2):
        trained = mlp(seed)
        ms.save(trained, tmp_path / f"{seed}.safetensors")
        live.swap(tmp_path / f"{seed}.safetensors" if seed == 2 else trained.state_dict())
        with torch.no_grad():
            assert torch.allclose(live(x), trained(x), atol=1e-2, rtol=1e-3)
    with pytest.raises(ProgramInputError, match="cpu"):
        live(x.cpu())


@pytest.mark.slow
@needs_aoti
def test_packages_for_a_gpu_are_refused(tmp_path: Path) -> None:
    """A package that torch compiles, and one that `export` would write."""
    x = torch.randn(8, 64, device=DEVICE)
    path = package_of_torch(mlp(0), x)
    with pytest.raises(LiveTargetError, match="for a device that is not served"):
        ms.Live(path)
    with pytest.raises(ExportError, match=r"only on the CPU(?s:.*)cuda:0"):
        ms.export(mlp(0), (x,), tmp_path / "x.pt2", kind="aoti")
    assert list(tmp_path.iterdir()) == []
