"""The states of random generators: the same numbers again, or an error and nothing changed."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import modelstate as ms
from modelstate.codec.codec import decode, encode
from modelstate.errors import ObjectStateError, OptionError

Own = dict[str, Any]

DRAWS: dict[str, Callable[[Own], object]] = {
    "python": lambda own: random.random(),
    "python, normal": lambda own: random.gauss(0, 1),
    "python, bits": lambda own: random.getrandbits(100),
    "numpy": lambda own: float(np.random.rand()),
    "numpy, normal": lambda own: float(np.random.randn()),
    "torch": lambda own: float(torch.rand(())),
    "torch, normal": lambda own: torch.randn(17).tolist(),
    "torch, one normal": lambda own: float(torch.randn(())),
    "loader": lambda own: torch.randperm(9, generator=own["loader"]).tolist(),
    "np": lambda own: float(own["np"].standard_normal()),
    "np, 32 bits": lambda own: int(own["np"].integers(0, 1000, dtype=np.int32)),
    "philox": lambda own: int(own["philox"].random_raw()),
    "legacy": lambda own: float(own["legacy"].normal()),
    "py": lambda own: own["py"].gauss(0, 1),
}
draws = st.lists(st.sampled_from(sorted(DRAWS)), max_size=20)
every_number = sorted(DRAWS) * 2


def own_generators(seed: int = 0) -> Own:
    return {
        "loader": torch.Generator().manual_seed(seed),
        "np": np.random.default_rng(seed),
        "philox": np.random.Philox(seed),
        "legacy": np.random.RandomState(seed),
        "py": random.Random(seed),
    }


def drawn(own: Own, names: list[str]) -> list[object]:
    return [DRAWS[name](own) for name in names]


def numbers_to_come(rng: ms.RNG, own: Own) -> list[object]:
    """What would be drawn next, without drawing it."""
    state = rng.state_dict()
    numbers = drawn(own, every_number)
    rng.load_state_dict(state)
    return numbers


@pytest.fixture
def own() -> Own:
    return own_generators()


@pytest.fixture
def rng(own: Own) -> ms.RNG:
    return ms.RNG(own)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(before=draws, between=draws, seed=st.integers(0, 2**32 - 1))
def test_the_next_numbers_are_the_same(before: list[str], between: list[str], seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    own = own_generators(seed)
    drawn(own, before)
    state = ms.RNG(own).state_dict()
    expected = drawn(own, every_number)
    drawn(own, between)
    ms.RNG(own).load_state_dict(state)
    assert drawn(own, every_number) == expected
    # Nor does the state change with the generators.
    ms.RNG(own).load_state_dict(state)
    assert drawn(own, every_number) == expected


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_every_bit_generator_of_numpy(kind: str) -> None:
    generator = np.random.Generator(getattr(np.random, kind)(5))
    rng = ms.RNG({"np": generator})
    generator.integers(0, 9, dtype=np.int32)
    state = rng.state_dict()
    expected = generator.random(5).tolist(), generator.integers(0, 9, 5, dtype=np.int32).tolist()
    rng.load_state_dict(decode(encode(state)))
    assert (generator.random(5).tolist(), generator.integers(0, 9, 5, dtype=np.int32).tolist()) == expected


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {name: value for name, value in state.items() if name != key}


def _with(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, **values}


def _numpy_with(pos: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, "numpy": {**state["numpy"], "state": {**state["numpy"]["state"], "pos": pos}}}


PYTHON = random.Random(1).getstate()
BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "nothing": (lambda state: None, "python: nothing was saved for it"),
    "another object's": (lambda state: torch.optim.SGD([torch.ones(1)]).state_dict(), "param_groups"),
    **{f"without {key}": (_without(key), f"{key}: nothing") for key in ("python", "numpy", "torch", "generators: np")},
    "more": (_with(jax=1), "jax"),
    "python: none": (_with(python=None), "python:"),
    "python: too large": (_with(python=(3, (2**32 + 5, *PYTHON[1][1:]), None)), "python:"),
    "numpy: a tuple": (_with(numpy=np.random.get_state()), "numpy:"),
    "numpy: position outside": (_numpy_with(10**6), "numpy:"),
    "numpy: of another kind": (_with(numpy=np.random.PCG64(1).state), "numpy:"),
    "torch: floats": (_with(torch=torch.ones(5056)), "torch:"),
    "torch: noise": (_with(torch=torch.arange(5056).to(torch.uint8)), "torch: Invalid mt19937 state"),
    "cuda: none": (_with(**{"cuda: 0": 5}), "cuda: 0:"),
    "generators: one more": (_with(**{"generators: sampler": 1}), "sampler: there is no such generator"),
    "generators: foreign": (_with(**{"generators: py": 7}), "generators: py:"),
    "generators: exchanged": (
        _with(**{"generators: np": np.random.Philox(1).state}),
        "generators: np: state must be for a PCG64",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_state_changes_nothing(bad: str, rng: ms.RNG, own: Own) -> None:
    make, says = BAD[bad]
    foreign = ms.RNG(own_generators(77))
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    state = copy.deepcopy(foreign.state_dict())  # whatever of it was set would be seen
    torch.manual_seed(8)
    random.seed(8)
    np.random.seed(8)
    expected = numbers_to_come(rng, own)
    with pytest.raises(ObjectStateError) as caught:
        rng.load_state_dict(make(state))
    assert says in caught.value.found
    assert drawn(own, every_number) == expected


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_generator_that_cannot_be_set_after_all_leaves_the_others(
    error: BaseException, rng: ms.RNG, own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = rng.state_dict()
    drawn(own, every_number)
    expected = numbers_to_come(rng, own)
    calls: list[object] = []

    class Breaks(random.Random):
        def setstate(self, state: Any) -> None:
            calls.append(state)
            if len(calls) == 1:
                raise error
            super().setstate(state)

    breaking = Breaks(1)
    with pytest.raises(ObjectStateError if isinstance(error, Exception) else KeyboardInterrupt):
        ms.RNG({**own, "breaks": breaking}).load_state_dict(
            {**state, "generators: breaks": random.Random(4).getstate()}
        )
    assert len(calls) == 2
    assert drawn(own, every_number) == expected


@pytest.mark.parametrize(
    "given",
    [
        [torch.Generator()],
        {1: torch.Generator()},
        {"a": 7},
        {"a": np.random},
        {"a": random.SystemRandom()},
        {"a": None},
        {"a": type("Broken", (random.Random,), {"getstate": lambda self: 1 / 0})()},
    ],
)
def test_what_is_no_generator_is_refused(given: Any) -> None:
    with pytest.raises(OptionError):
        ms.RNG(given)


class Devices:
    """As many CUDA devices as one likes, as far as the functions that ask for their states can tell."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
        self.initialised = True
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialised)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.generators))
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: self.generators[index].get_state())
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: self.generators[device].set_state(state))
        real = torch.Generator
        monkeypatch.setattr(torch, "Generator", lambda device="cpu": real())

    def draw(self) -> list[float]:
        return [float(torch.rand((), generator=generator)) for generator in self.generators]


def test_a_program_that_has_not_used_cuda_saves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, rng = Devices(2, monkeypatch), ms.RNG()
    devices.initialised = False
    assert not [name for name in rng.state_dict() if "cuda" in name]
    expected = [generator.get_state() for generator in devices.generators]
    rng.load_state_dict(rng.state_dict())
    assert all(map(torch.equal, expected, [generator.get_state() for generator in devices.generators]))


def test_every_device_that_was_there_is_set_and_others_keep_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = ms.RNG()
    few = Devices(2, monkeypatch)
    state = rng.state_dict()
    expected = few.draw()
    many = Devices(4, monkeypatch)
    many.draw()
    kept = [generator.clone_state() for generator in many.generators[2:]]
    rng.load_state_dict(state)
    assert many.draw() == expected + [float(torch.rand((), generator=generator)) for generator in kept]


def test_a_bad_state_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(2, monkeypatch)
    state = ms.RNG().state_dict()
    expected = [generator.clone_state() for generator in devices.generators]
    state["cuda: 0"] = torch.Generator().manual_seed(77).get_state()
    state["cuda: 1"] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(ObjectStateError, match="cuda: 1: "):
        ms.RNG().load_state_dict(state)
    assert devices.draw() == [float(torch.rand((), generator=generator)) for generator in expected]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numbers_of_a_real_device() -> None:
    generator = torch.Generator("cuda")
    rng = ms.RNG({"own": generator})
    torch.rand(3, device="cuda")
    state = rng.state_dict()

    def draw() -> list[list[float]]:
        return [torch.randn(5, device="cuda").tolist(), torch.rand(5, device="cuda", generator=generator).tolist()]

    expected = draw()
    draw()
    rng.load_state_dict(decode(encode(state)))
    assert draw() == expected
    with pytest.raises(ObjectStateError):
        rng.load_state_dict({**state, "cuda: 0": torch.zeros(3, dtype=torch.uint8)})
