"""Published checkpoints: loaded strictly, run, and compared bit for bit with what stock tools make of them."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import modelstate as ms
from tests import real_models as models

RealFile = Callable[[str], Path]

CASES = {
    "resemblyzer": (models.SpeakerEncoder, lambda: torch.randn(2, 50, 40)),
    "facenet-pnet": (models.ProposalNet, lambda: torch.randn(2, 3, 40, 60)),
    "facenet-onet": (models.OutputNet, lambda: torch.randn(2, 3, 48, 48)),
    "silero-vad": (models.VoiceActivity, lambda: torch.randn(3, 576)),
} | {
    f"lpips-{net}-v{version}": (partial(models.PerceptualHead, net), lambda: torch.tensor(7))
    for net in models.PerceptualHead.CHANNELS
    for version in ("0.0", "0.1")
}


def stock_state(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    return loaded.get("model_state", loaded)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and bool(a.equal(b))


def assert_same_state(found: nn.Module, expected: Mapping[str, Tensor]) -> None:
    state = found.state_dict()
    assert list(state) == list(dict.fromkeys(state))
    assert set(state) == set(expected)
    for name, value in expected.items():
        assert same_bits(state[name], value), name


@pytest.mark.parametrize("name", CASES)
def test_opened_checkpoint_has_the_tensors_that_stock_tools_see(name: str, real_file: RealFile) -> None:
    path = real_file(name)
    expected = stock_state(path)
    with ms.open(path, key="model_state" if name == "resemblyzer" else None) as checkpoint:
        if path.suffix != ".safetensors":
            assert list(checkpoint) == list(expected)
        assert set(checkpoint) == set(expected)
        for key, value in expected.items():
            assert checkpoint[key].shape == tuple(value.shape)
            assert checkpoint[key].dtype == value.dtype
            assert same_bits(checkpoint.tensor(key), value), key


@pytest.mark.slow_except(11)
@pytest.mark.parametrize("target", ["materialised", "in place", "skeleton", "skeleton with memory of its own"])
@pytest.mark.parametrize("name", CASES)
def test_loaded_model_computes_what_the_stock_load_computes(name: str, target: str, real_file: RealFile) -> None:
    factory, make_input = CASES[name]
    path = real_file(name)
    stock = factory().eval()
    stock.load_state_dict(stock_state(path))

    if target.startswith("skeleton"):
        with ms.skeleton():
            model = factory().eval()
        report = ms.load(model, path, map=target == "skeleton")
    else:
        model = factory().eval()
        report = ms.load(model, path, in_place=target == "in place")

    assert report.coverage == 1.0
    assert_same_state(model, stock.state_dict())
    torch.manual_seed(0)
    given = make_input()
    with torch.inference_mode():
        found, expected = model(given), stock(given)
    # The kernels sum in another order where weights lie at odd addresses, as those of a mapped file do.
    torch.testing.assert_close(found, expected)
    assert target == "skeleton" or same_bits(found, expected)


def test_the_speaker_encoder_is_found_without_a_key_and_with_one(real_file: RealFile) -> None:
    path = real_file("resemblyzer")
    by_itself, by_key = models.SpeakerEncoder(), models.SpeakerEncoder()
    ms.load(by_itself, path)
    ms.load(by_key, path, key="model_state")
    assert_same_state(by_itself, by_key.state_dict())


def test_non_tensor_values_of_the_speaker_checkpoint(real_file: RealFile) -> None:
    path = real_file("resemblyzer")
    expected = torch.load(path, map_location="cpu", weights_only=True)
    with ms.open(path) as checkpoint:
        assert checkpoint.format == "torch legacy"
        assert checkpoint.extra["step"] == expected["step"] == 1564501
        assert checkpoint.extra["optimizer_state.param_groups.0.lr"] == 0.0001
        parameter, state = next(iter(expected["optimizer_state"]["state"].items()))
        assert same_bits(checkpoint.tensor(f"optimizer_state.state.{parameter}.exp_avg"), state["exp_avg"])


def test_a_file_saved_from_a_gpu_opens_without_one(real_file: RealFile) -> None:
    path = real_file("lpips-alex-v0.0")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(path, weights_only=True)
    with ms.open(path) as checkpoint:
        assert {checkpoint.tensor(name).device.type for name in checkpoint} == {"cpu"}
