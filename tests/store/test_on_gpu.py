"""Saving and resuming what is trained on a GPU: the state at the call, whatever is queued, and the same losses."""

import copy
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import modelstate as ms
from modelstate import errors
from tests.loading.fingerprint import described, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: saving from one is not tested"),
]

SLEEP_CYCLES = 100_000_000
"""Some 50 ms of an H100: what is queued behind it has not begun when the queueing call returns."""
OPTIMIZERS: dict[str, Any] = {
    "plain": lambda params: torch.optim.AdamW(params, 1e-2),
    "fused": lambda params: torch.optim.AdamW(params, 1e-2, fused=True),
    "capturable": lambda params: torch.optim.AdamW(params, 1e-2, capturable=True),
}
STEPS, SAVED_EVERY, KILLED_AT = 12, 3, 8


class Run:
    """A small training loop with mixed precision and dropout."""

    def __init__(self, optimizer: str = "fused", device: str = "cuda", scaled: bool = True) -> None:
        torch.manual_seed(0)
        self.device, self.step = device, 0
        self.model = nn.Sequential(
            *(nn.Embedding(32, 64), nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(128)),
            nn.Linear(128, 32),
        ).to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, 30)
        self.scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=3, enabled=scaled)
        self.data = torch.Generator(device).manual_seed(5)

    @property
    def objects(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "step")
        return {name: getattr(self, name) for name in names}

    def train(self, steps: int = 1) -> list[str]:
        """Returns the losses, with all of their digits."""
        losses = []
        for _ in range(steps):
            tokens = torch.randint(32, (16, 8), device=self.device, generator=self.data)
            with torch.autocast(self.device, torch.float16):
                scores = self.model(tokens).flatten(0, 1).float()
            loss = nn.functional.cross_entropy(scores, tokens.roll(1, 1).flatten())
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.step += 1
            losses.append(float(loss.detach()).hex())
        return losses

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the model and of the optimizer, by names."""
        found = dict(self.model.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": value for key, value in state.items()}
        return found


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def all_bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


# What is saved.


class Filled(nn.Module):
    """Tensors that have the same value everywhere: large and small ones, and one that is not contiguous."""

    def __init__(self, value: float, device: str = "cuda") -> None:
        super().__init__()
        for number, shape in enumerate([(1 << 24,), (1000,), ()]):
            self.register_parameter(f"p{number}", nn.Parameter(torch.full(shape, value, device=device)))
        self.register_buffer("transposed", torch.full((512, 300), value, device=device).t())

    def tensors(self) -> Iterable[torch.Tensor]:
        return self.state_dict().values()


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("background", "default stream"),
        ("background", "own stream"),
        ("background", "stream of another part of the program"),
        ("store", "default stream"),
        ("store", "own stream"),
        ("file", "default stream"),
        ("file", "own stream"),
    ],
)
def test_what_is_saved_is_the_state_at_the_call(how: str, where: str, tmp_path: Path) -> None:
    """Updates are queued before the call, behind a wait; the next ones right after it."""
    module, store = Filled(1.0), ms.Store(tmp_path / "store")
    store.save(0, {"model": module}, background=how == "background")  # what is allocated once is there
    store.wait()
    stream = torch.cuda.current_stream() if where == "default stream" else torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        for tensor in module.tensors():
            tensor.add_(1)
    with torch.cuda.stream(torch.cuda.current_stream() if where.startswith("stream of") else stream):
        if how == "file":
            ms.save(module, tmp_path / "x.safetensors")
        else:
            store.save(1, {"model": module}, background=how == "background")
    with torch.no_grad(), torch.cuda.stream(stream):
        for tensor in module.tensors():
            tensor.fill_(7)
    store.wait()
    found = Filled(0.0, "cpu")
    if how == "file":
        ms.load(found, tmp_path / "x.safetensors")
    else:
        assert store.restore({"model": found}).step == 1
    assert [tensor.unique().tolist() for tensor in found.tensors()] == [[2.0]] * 4


@pytest.mark.parametrize("optimizer", ["fused", "capturable"])
def test_training_goes_on_while_checkpoints_are_written(optimizer: str, tmp_path: Path) -> None:
    """The saves follow each other, so that they share the memory of the copies."""
    run, store, expected = Run(optimizer), ms.Store(tmp_path), {}
    for _ in range(4):
        torch.cuda._sleep(SLEEP_CYCLES // 4)
        run.train(2)
        expected[run.step] = {name: tensor.clone() for name, tensor in run.tensors().items()}
        store.save(run.step, run.objects, background=True)
    run.train(2)
    store.wait()
    for step, tensors in expected.items():
        other = Run(optimizer)
        assert store.restore(other.objects, step)["step"] == step
        assert all_bits(other.tensors()) == all_bits(tensors)


def test_a_save_in_the_background_takes_no_memory_of_the_device(tmp_path: Path) -> None:
    module, store = nn.Linear(2048, 2048, device="cuda"), ms.Store(tmp_path)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pending = store.save(1, {"model": module}, background=True)
    assert pending is not None
    pending.result()
    assert torch.cuda.max_memory_allocated() == before
    assert pending.staging_bytes >= 2048 * 2049 * 4


# Resuming.


def main(folder: str, killed_at: int) -> None:
    """Trains with two optimizers at once, from the last checkpoint on, and prints the losses."""
    torch.use_deterministic_algorithms(True)
    runs = {name: Run(name) for name in ("fused", "capturable")}
    objects: dict[str, Any] = {name: run.objects for name, run in runs.items()}
    objects["rng"] = ms.RNG({name: run.data for name, run in runs.items()})
    store = ms.Store(folder)
    if store.steps():
        restored = store.restore(objects)
        for name, run in runs.items():
            run.step = restored[f"{name}.step"]
    print("from", runs["fused"].step, flush=True)
    while (step := runs["fused"].step) < STEPS:
        print(step, *(loss for run in runs.values() for loss in run.train()), flush=True)
        if (step + 1) % SAVED_EVERY == 0:
            objects |= {name: run.objects for name, run in runs.items()}
            store.save(step + 1, objects, background=True)
        if step + 1 == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
    store.wait()
    print("whole")
    runs = {name: Run(name) for name in runs}
    for step in range(STEPS):
        print(step, *(loss for run in runs.values() for loss in run.train()), flush=True)


def lines_of(folder: Path, killed_at: int) -> list[list[str]]:
    program = f"from tests.store.test_on_gpu import main; main({str(folder)!r}, {killed_at})"
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert ended.returncode == (-signal.SIGKILL if killed_at else 0), ended.stderr
    return [line.split() for line in ended.stdout.splitlines()]


def test_losses_after_a_kill_are_those_of_a_run_without_one(tmp_path: Path) -> None:
    first, *killed = lines_of(tmp_path, KILLED_AT)
    begin, *rest = lines_of(tmp_path, 0)
    middle = rest.index(["whole"])
    resumed, expected = rest[:middle], rest[middle + 1 :]
    assert first == ["from", "0"]
    assert begin[1] in ("3", "6")
    assert len({loss for line in expected for loss in line[1:]}) == 2 * STEPS
    assert killed == expected[:KILLED_AT]
    assert resumed == expected[int(begin[1]) :]


@pytest.mark.parametrize(("saved", "live"), [*product(OPTIMIZERS, OPTIMIZERS)])
def test_the_state_of_an_optimizer_is_where_its_options_need_it(saved: str, live: str, tmp_path: Path) -> None:
    """The saved options take the place of the live ones, and decide where the step counters are.

    Without a scaler: torch's own does not work for an optimizer that was built as fused and no longer is.
    """
    run, other = Run(saved, scaled=False), Run(live, scaled=False)
    run.train(3)
    ms.Store(tmp_path).save(1, run.objects)
    ms.Store(tmp_path).restore(other.objects)
    assert other.optimizer.param_groups[0]["fused"] == run.optimizer.param_groups[0]["fused"]
    found, expected = other.tensors(), run.tensors()
    assert {name: (t.device, t.dtype) for name, t in found.items()} == {
        name: (t.device, t.dtype) for name, t in expected.items()
    }
    assert all_bits(found) == all_bits(expected)
    rng = ms.RNG({"data": run.data})
    other.data.set_state(run.data.get_state())
    random = rng.state_dict()
    losses = [float.fromhex(loss) for loss in run.train(2)]
    rng.load_state_dict(random)
    assert [float.fromhex(loss) for loss in other.train(2)] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("optimizer", ["fused", "capturable"])
def test_a_run_goes_on_on_another_device(optimizer: str, first: str, then: str, tmp_path: Path) -> None:
    run = Run(optimizer if first == "cuda" else "plain", first)
    other = Run(optimizer if then == "cuda" else "plain", then)
    run.train(3)
    ms.Store(tmp_path).save(3, run.objects, background=True).result()
    store = ms.Store(tmp_path)
    # A capturable optimizer needs a GPU, and a fused one takes the place of every other one.
    store.restore(other.objects, keep_options=["optimizer.capturable", "optimizer.fused"])
    assert all_bits(other.tensors()) == all_bits(run.tensors())
    assert {tensor.device.type for tensor in other.model.state_dict().values()} == {then}
    assert {state["exp_avg"].device.type for state in other.optimizer.state.values()} == {then}
    assert {state["step"].device.type for state in other.optimizer.state.values()} == {then}
    assert other.scaler.get_scale() == run.scaler.get_scale()
    other.train(2)


def test_random_generators_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator("cuda").manual_seed(3)
    objects = {"rng": ms.RNG({"own": own}), "alone": torch.Generator("cuda").manual_seed(4)}

    def drawn() -> list[bytes]:
        generators = (None, own, objects["alone"])
        numbers = [torch.rand(5, device="cuda", generator=generator) for generator in generators]
        return [bits(number) for number in (*numbers, nn.functional.dropout(torch.ones(99, device="cuda")))]

    drawn()  # so that the offsets of the generators are not 0
    store = ms.Store(tmp_path)
    store.save(1, objects, background=True)
    expected = drawn()
    assert drawn() != expected
    restored = store.restore(objects)
    assert drawn() == expected
    restored.rewind_generators()
    assert drawn() == expected

    ms.save({"rng": ms.RNG()}, tmp_path / "x.safetensors")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(errors.ObjectStateError, match=r"RNG\(cuda=False\) leaves CUDA out"):
        ms.restore({"rng": ms.RNG()}, tmp_path / "x.safetensors")
    ms.restore({"rng": ms.RNG(cuda=False)}, tmp_path / "x.safetensors")


class Refusing:
    """An object that is restored last, and fails."""

    restored_last = True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.rand(3, device="cuda")
        raise RuntimeError("no")


def test_a_restore_that_fails_changes_nothing(tmp_path: Path) -> None:
    run, store = Run(), ms.Store(tmp_path)
    rng = ms.RNG({"data": run.data})
    store.save(1, {**run.objects, "rng": rng, "refusing": Refusing()})
    run.train(2)

    def everything() -> Any:
        states = run.optimizer.state_dict(), run.scaler.state_dict(), rng.state_dict()
        return whole(run.model), described(states)

    before = everything()
    with pytest.raises(errors.ObjectStateError, match="no"):
        store.restore({**run.objects, "rng": rng, "refusing": Refusing()})
    assert everything() == before


# CUDA graphs.


@pytest.mark.parametrize("source", ["state dict", "file", "store"])
@pytest.mark.parametrize("name", ["SGD", "capturable"])
def test_a_graph_of_a_training_step_trains_the_restored_values(name: str, source: str, tmp_path: Path) -> None:
    """A graph has recorded addresses: the values have to come to the memory that is there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)).cuda()
    optimizer = (
        torch.optim.SGD(model.parameters(), 0.1)
        if name == "SGD"
        else torch.optim.AdamW(model.parameters(), torch.tensor(0.01, device="cuda"), capturable=True)
    )
    batch = torch.randn(16, 32, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph: Any = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        step()
    objects = {"model": model, "optimizer": optimizer}
    store, path = ms.Store(tmp_path / "store"), tmp_path / "x.safetensors"
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    optimized = copy.deepcopy(ms.optimizer_state(model, optimizer))
    ms.save(objects, path)
    store.save(1, objects, background=True)

    def addresses() -> list[int]:
        rates = [rate for group in optimizer.param_groups if isinstance(rate := group["lr"], torch.Tensor)]
        moments = [value for values in optimizer.state.values() for value in values.values()]
        return [tensor.data_ptr() for tensor in (*model.parameters(), *moments, *rates)]

    before = addresses()
    for _ in range(5):
        graph.replay()
    expected = all_bits(model.state_dict())
    assert expected != all_bits(state)
    if source == "state dict":
        ms.load(model, state)
        ms.load_optimizer_state(model, optimizer, optimized)
    elif source == "file":
        ms.restore(objects, path)
    else:
        store.restore(objects)
    assert all_bits(model.state_dict()) == all_bits(state)
    assert addresses() == before
    for _ in range(5):
        graph.replay()
    assert all_bits(model.state_dict()) == expected
