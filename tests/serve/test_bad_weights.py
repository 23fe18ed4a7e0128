"""Weights that may not serve, canaries, and what is undone; `test_refused` has the rest."""

import errno
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.faults import faulty_reads
from tests.serve.models import WIDTH, X_OF_TIED as X, Named, Tied, tied_state as state
from tests.serve.targets import KINDS, module_of, target_of


def views_of_one_buffer() -> dict[str, torch.Tensor]:
    a, b, c = torch.full(((2 * WIDTH + 1) * WIDTH,), 2.0).split([WIDTH**2, WIDTH**2, WIDTH])
    return state(a=a.view(WIDTH, -1), again=a.view(WIDTH, -1), bias=b.view(WIDTH, -1), c=c)


def test_what_is_refused_by_choice_only() -> None:
    live = ms.Live(Tied().eval())
    flat = views_of_one_buffer()
    flat["bias"] = flat["bias"].half()
    with pytest.raises(errors.WeightsError):
        live.swap(flat)
    live.swap(flat, exact=False)
    assert live(X).unique().tolist() == [2.0]
    live.swap(state(c=torch.full((WIDTH,), float("nan"))))
    # What is not finite already may stay so: a mask of minus infinity, say.
    live.swap(state(3, c=torch.full((WIDTH,), float("nan"))), check_finite=True)
    with pytest.raises(errors.WeightsError, match="bias: NaN or infinity"):
        live.swap(state(bias=torch.full((WIDTH, WIDTH), float("nan"))), check_finite=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plain_tensor_is_refused_by_no_choice(kind: str) -> None:
    """Whether its name says where it goes, or a rule that makes it, or a hook."""
    live = ms.Live(target_of(kind, Tied(), X))
    for bias in (torch.eye(WIDTH).to_sparse(), torch.eye(WIDTH).to_sparse_csr(), torch.eye(WIDTH).as_subclass(Named)):
        for exact in (True, False):
            with pytest.raises(errors.WeightsError) as caught:
                live.swap(state(2, bias=bias), exact=exact)
            assert caught.value.names == ("bias",)
        with pytest.raises(errors.ModelStateError):
            live.swap(state(2, bias=None, other=bias), rules=[ms.rules.Rename("other", "bias")])
    assert (live.version().id, live(X).unique().tolist()) == (1, [1.0])


class Masked(nn.Module):
    def __init__(self, k: float) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.eye(WIDTH) * k).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.mask, x.T)


def test_sparse_tensors_are_taken_where_the_module_has_them() -> None:
    live = ms.Live(Masked(1).eval())
    live.swap(Masked(2).state_dict())
    assert torch.equal(live(X), X.T * 2)
    with pytest.raises(errors.PlacementError):
        live.swap({"mask": torch.eye(WIDTH).to_sparse_csr()})
    assert torch.equal(live(X), X.T * 2)


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_quantized_weights_are_checked_by_their_parts(config: str, tmp_path: Path) -> None:
    """torchao's tensors have no sum and no comparison."""
    quantization = pytest.importorskip("torchao.quantization")

    def quantized() -> nn.Sequential:
        module = nn.Sequential(nn.Linear(16, 16)).eval()
        quantization.quantize_(module, getattr(quantization, config)())
        return module

    serving, new = quantized(), quantized()
    x = torch.randn(2, 16)
    before, after = serving(x), new(x)
    ms.save(new, tmp_path / "new.safetensors")
    live = ms.Live(serving)
    broken = quantized().state_dict()
    broken["0.weight"].scale.fill_(float("nan"))
    with pytest.raises(errors.WeightsError, match=r"0\.weight: NaN or infinity"):
        live.swap(broken, check_finite=True)
    assert torch.equal(live(x), before)
    live.swap(tmp_path / "new.safetensors")
    assert torch.equal(live(x), after)


def test_what_code_of_the_module_has_raised_is_the_cause() -> None:
    def raising(old: int, values: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("no such thing")

    live = ms.Live(
        ms.extra_state("note", version=2, upgrade=raising)(type("Noted", (nn.Linear,), {"note": 0}))(2, 2).eval()
    )
    saved = ms.extra_state("note", version=1)(type("Noted", (nn.Linear,), {"note": 0}))(2, 2)
    with pytest.raises(errors.PlanError) as caught:
        live.swap(saved.state_dict())
    assert isinstance(caught.value.__cause__, errors.ExtraStateError)
    assert live.version().id == 1


def test_channels_last_is_the_order_of_a_program_that_has_it(tmp_path: Path) -> None:
    module = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    live, x = ms.Live(module), torch.randn(1, 4, 5, 5)
    other = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    for source in (other.state_dict(), {name: value.contiguous() for name, value in other.state_dict().items()}):
        live.swap(source)
        assert module_of(live).weight.stride() == module.weight.stride()
        assert torch.equal(live(x), other(x))


def test_canaries_that_are_content() -> None:
    live = ms.Live(Tied().eval())
    live.swap(state(2), canary=ms.Canary((X,), atol=1.5))
    live.swap(state(3), canary=ms.Canary((X,), rtol=0.5))
    live.swap(state(4), canary=ms.Canary(kwargs={"x": X}, check=lambda answer: None))
    live.swap(state(5), canary=lambda v: bool((v(X) == 5).all()))
    report = live.swap(state(6), canary=lambda v: time.sleep(0.05))
    assert report.canary_seconds > 0.04
    assert live(X).unique().tolist() == [6.0]


@pytest.mark.slow
def test_an_io_error_at_any_request_leaves_what_serves(tmp_path: Path) -> None:
    path = tmp_path / "two.safetensors"
    ms.save(state(2), path)
    with faulty_reads() as counted:
        ms.Live(Tied().eval()).swap(path)
    assert counted.requests
    for number in range(1, len(counted.requests) + 1):
        live = ms.Live(Tied().eval())
        with faulty_reads(at=number, error=OSError(errno.EIO, "broken")):
            try:
                live.swap(path)  # a lease that cannot be had is no error: the file is read then
            except ms.ModelStateError:
                assert live(X).unique().tolist() == [1.0]
            else:
                assert live(X).unique().tolist() == [2.0]
        live.swap(path)
        assert live(X).unique().tolist() == [2.0]


def test_a_swap_multiplies_quantized_weights_by_their_scales() -> None:
    live = ms.Live(nn.Linear(4, 4, bias=False).bfloat16())
    source = {"weight": torch.full((4, 4), 3.0).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.5)}
    with pytest.raises(errors.PlanError, match=r"rules=\[ms.rules.Dequantize\('weight', 'weight_scale'\)\]"):
        live.swap(source, allow_unexpected=["weight_scale"])
    live.swap(source, rules=ms.rules.Dequantize("weight", "weight_scale"))
    with live.version() as version:
        assert torch.equal(version(torch.eye(4).bfloat16()), torch.full((4, 4), 1.5).bfloat16())
