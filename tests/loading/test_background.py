"""`load(..., background=True)`: the same result as without it, and a model that is left alone until then."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate import errors
from modelstate.rules.names import Fill
from tests.loading.fingerprint import whole
from tests.loading.handles import EVER, SOON, Gate, Watched, eventually
from tests.loading.test_load import Tied, made, other

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "model.pt"
    torch.save(other(Tied()), found)
    return found


# The same as a load.


def doubled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "own memory": {"map": False},
    "cast": {"dtype": torch.bfloat16},
    "transform": {"transform": doubled},
    "transform of some": {"transform": {"embed.*": doubled}},
    "verified": {"verify": True},
}
try:
    from torchao.quantization import Int8WeightOnlyConfig

    QUANTIZE = ms.loading.Quantize(Int8WeightOnlyConfig(set_inductor_config=False))
    WAYS["quantized"] = {"transform": {"*.0.weight": QUANTIZE}}
except ImportError:  # no version of it works with this torch
    pass


FORMS = ["torch", "legacy", "safetensors", "mapping"]
CASES = [(way, form) for way in WAYS for form in FORMS if form == "torch" or way != "verified"]


@pytest.mark.slow_except(15)
@pytest.mark.parametrize("target", ["materialised", "skeleton", "mixed"])
@pytest.mark.parametrize(("way", "form"), CASES)
def test_the_result_is_that_of_a_load(way: str, target: str, form: str, tmp_path: Path) -> None:
    source: Any = tmp_path / "checkpoint"
    if form == "mapping":
        source = other(Tied())
    elif form == "safetensors":
        save_file({name: value.clone() for name, value in other(Tied()).items()}, source)
    else:
        torch.save(other(Tied()), source, _use_new_zipfile_serialization=form == "torch")
    torch.manual_seed(0)
    expected, module = made(target), made(target)
    state = module.state_dict(keep_vars=True)
    there = ms.load(expected, source, **WAYS[way])
    report = ms.load(module, source, background=True, **WAYS[way]).result()

    after = module.state_dict(keep_vars=True)
    assert list(after) == list(expected.state_dict())
    for name, tensor in expected.state_dict(keep_vars=True).items():
        assert after[name] is state[name]
        assert type(after[name]) is type(tensor)
        assert (after[name].dtype, after[name].requires_grad) == (tensor.dtype, tensor.requires_grad)
        assert after[name].stride() == tensor.stride()
        assert torch.equal(_plain(after[name]), _plain(tensor))
    assert report.steps == there.steps
    assert report.notes == there.notes
    assert (report.slots, report.verified_bytes, report.references_lost) == (7, there.verified_bytes, ())
    assert report.peak_memory_bytes == there.peak_memory_bytes
    assert module.head.weight is module.embed.weight


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    convert = getattr(tensor, "dequantize", None)
    return convert() if convert is not None and type(tensor) not in (torch.Tensor, nn.Parameter) else tensor


def test_what_was_brought_in_is_what_is_put_in_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read again in `result`, but for what costs nothing."""
    from modelstate.loading import commit as commit_module
    from modelstate.loading import load as load_module

    module, again = made("materialised"), []
    handle = ms.load(module, path, background=True)
    assert eventually(lambda: handle.done)
    real = load_module.stage

    def spied(staging: Any, assignments: Any, progress: Any) -> None:
        again.extend(assignment.name for assignment in assignments if assignment.final is None)
        real(staging, assignments, progress)

    for user in (load_module, commit_module):
        monkeypatch.setattr(user, "stage", spied)
    assert len(handle.result().steps) == 7
    assert again == []


@pytest.mark.slow
def test_seconds_are_those_from_the_call_to_the_result(path: Path) -> None:
    started = time.perf_counter()
    handle = ms.load(made("materialised"), path, background=True)
    time.sleep(0.2)
    report = handle.result()
    assert 0.2 < report.seconds < time.perf_counter() - started


# The model until then.


def test_the_model_is_left_alone_until_the_result(path: Path, gate: Gate) -> None:
    module = made("materialised")
    before = whole(module)
    handle = ms.load(module, path, background=True, transform=gate)
    assert whole(module) == before
    assert gate.reached.wait(SOON)
    assert not handle.done
    assert "coming in" in repr(handle)
    gate.opened.set()
    assert eventually(lambda: handle.done)
    assert "ready" in repr(handle)
    assert whole(module) == before
    handle.result()
    assert "loaded" in repr(handle)
    assert torch.equal(module.embed.weight, other(Tied())["embed.weight"])


def test_a_transform_is_called_once_for_each_in_the_order_of_the_file(path: Path, gate: Gate) -> None:
    gate.opened.set()
    ms.load(made("materialised"), path, background=True, transform=gate).result()
    assert gate.names == [name for name in other(Tied()) if name not in ("head.weight", "body.same")]
    assert gate.threads == {"modelstate-load"}


def test_the_model_may_be_trained_meanwhile(path: Path, gate: Gate) -> None:
    module = made("materialised")
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad])
    handle = ms.load(module, path, background=True, transform=gate, optimizers=[optimizer])
    assert gate.reached.wait(SOON)
    module(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    gate.opened.set()
    handle.result()
    assert torch.equal(module.embed.weight, other(Tied())["embed.weight"])
    assert module.embed.weight in optimizer.state


def test_optimizers_follow_as_they_are_at_the_result(path: Path) -> None:
    module = made("materialised")
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad])
    handle = ms.load(module, path, background=True, dtype=torch.float64, optimizers=[optimizer])
    module(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    handle.result()
    state = optimizer.state[module.embed.weight]
    assert state["exp_avg"].dtype is torch.float64
    assert state["exp_avg"].abs().sum() > 0


def test_a_tensor_that_gets_no_value_keeps_what_it_has_become(path: Path) -> None:
    module = made("materialised")
    handle = ms.load(module, path, background=True, device="cpu")
    module.position.add_(5)
    handle.result()
    assert module.position.tolist() == [5, 6, 7, 8, 9, 10]


# The model's own code.


def test_the_models_code_counts_once(tmp_path: Path) -> None:
    source = Watched()
    torch.save(source.state_dict(), tmp_path / "model.pt")
    module, before = Watched(), None
    EVER.clear()
    before = whole(module)
    torch.manual_seed(1)
    handle = ms.load(module, tmp_path / "model.pt", background=True)
    assert whole(module) == before
    assert EVER == []
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert eventually(lambda: handle.done)
    assert torch.equal(torch.rand(1), expected)
    report = handle.result()
    assert EVER == module.calls == [{"n": 1}]
    assert torch.equal(module.layer.weight, source.layer.weight * 2)
    assert torch.equal(module.layer.bias, source.layer.bias)
    assert report.coverage == 1.0


def test_the_call_draws_no_random_numbers(tmp_path: Path) -> None:
    torch.save(Watched().state_dict(), tmp_path / "model.pt")
    module = Watched()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    handle = ms.load(module, tmp_path / "model.pt", background=True)
    assert torch.equal(torch.get_rng_state(), before)
    handle.cancel()


def test_set_extra_state_that_raises_is_an_error_of_the_result(tmp_path: Path) -> None:
    class Refusing(Watched):
        def set_extra_state(self, state: Any) -> None:
            raise LookupError("not this")

    torch.save(Watched().state_dict(), tmp_path / "model.pt")
    module = Refusing()
    before = whole(module)
    handle = ms.load(module, tmp_path / "model.pt", background=True)
    with pytest.raises(errors.ModelCodeError, match="not this") as first:
        handle.result()
    assert whole(module) == before
    with pytest.raises(errors.ModelCodeError) as second:
        handle.result()
    assert second.value is first.value


def test_a_lazy_module_gets_its_shapes(tmp_path: Path) -> None:
    torch.save(nn.Linear(5, 3).state_dict(), tmp_path / "model.pt")
    expected, module = nn.LazyLinear(3), nn.LazyLinear(3)
    ms.load(expected, tmp_path / "model.pt")
    handle = ms.load(module, tmp_path / "model.pt", background=True)
    assert torch.nn.parameter.is_lazy(module.weight)
    handle.result()
    assert torch.equal(module.weight, expected.weight)


def test_an_initialiser_draws_its_numbers_at_the_result(tmp_path: Path) -> None:
    state = nn.Linear(3, 3).state_dict()
    del state["weight"]
    torch.save(state, tmp_path / "model.pt")
    module = nn.Linear(3, 3)
    handle = ms.load(module, tmp_path / "model.pt", background=True, rules=[Fill("weight")])
    assert eventually(lambda: handle.done)
    torch.manual_seed(3)
    handle.result()
    torch.manual_seed(3)
    assert torch.equal(module.weight, nn.Linear(3, 3).weight)
