"""The average of checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

import modelstate as ms
from modelstate.errors import CombineError, ModelStateError, OptionError
from tests.formats.files import same

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
dtypes = st.sampled_from(FLOATS)


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, ...] = (37,)) -> torch.Tensor:
    """Finite values of all sizes, and some that are not."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exponent = draw(st.sampled_from([-30, -6, 0, 3]))
    value = torch.randn(shape, dtype=wide, generator=generator) * 2.0**exponent
    return value.to(dtype)


def average(sources: list[torch.Tensor], **options: Any) -> torch.Tensor:
    return ms.open([{"w": one} for one in sources], combine=ms.merge.Average(**options)).tensor("w")


@pytest.mark.slow
@given(st.data(), dtypes, st.integers(1, 7))
@settings(deadline=None, max_examples=150)
def test_the_average_of_equal_checkpoints_is_the_checkpoint(data: st.DataObject, dtype: torch.dtype, n: int) -> None:
    one = data.draw(tensors(dtype))
    if not dtype.is_complex:
        one[:5] = torch.tensor([0.0, torch.inf, -torch.inf, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 2])
    assert same(average([one.clone() for _ in range(n)]), one)


@pytest.mark.parametrize("weights", [[0.3, 0.7], [0.1, 0.2, 0.7], [1.5, -0.5], [1 / 3] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_weights_that_add_up_to_1_keep_what_is_equal(dtype: torch.dtype, weights: list[float]) -> None:
    one = torch.randn(10_000, dtype=dtype)
    assert same(average([one.clone() for _ in weights], weights=weights), one)


@pytest.mark.parametrize("weights", [[1e300, 1e300], [1e300, -1e300, 1.0], [1.5e308, 1.5e308], [4e38]])
def test_weights_that_are_too_large(weights: list[float]) -> None:
    with pytest.raises(CombineError, match="finite in float32"):
        ms.merge.Average(weights)
    large = torch.finfo(torch.float32).max
    assert average([torch.ones(2)] * 2, weights=[large, -large]).tolist() == [0, 0]


@pytest.mark.slow
@given(st.data(), dtypes, st.integers(1, 5))
@settings(deadline=None, max_examples=100)
def test_a_weight_of_one_gives_that_checkpoint_bit_for_bit(data: st.DataObject, dtype: torch.dtype, n: int) -> None:
    found = [data.draw(tensors(dtype)) for _ in range(n)]
    for one in found:
        one[:4] = torch.tensor([torch.nan, -torch.inf, -0.0, 1.0])
    chosen = data.draw(st.integers(0, n - 1))
    assert same(average(found, weights=[float(index == chosen) for index in range(n)]), found[chosen])


@pytest.mark.slow
@given(st.data(), dtypes, st.integers(1, 5))
@settings(deadline=None, max_examples=100)
def test_the_sum_is_rounded_once(data: st.DataObject, dtype: torch.dtype, n: int) -> None:
    """Against the sum in double precision: half a unit in the last place, and what the wider sum itself may lose."""
    found = [data.draw(tensors(dtype)) for _ in range(n)]
    weights = data.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    assume(dtype != torch.float32 or abs(sum(weights) - 1) > 2.0**-30)  # such sums are made of differences
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = sum(
        (one.to(wide) * weight for one, weight in zip(found, weights, strict=True)), torch.zeros(37, dtype=wide)
    )
    size = sum(abs(weight) * tensor.abs().double() for weight, tensor in zip(weights, found, strict=True))
    loss = {torch.float16: 1e-6, torch.bfloat16: 1e-6}.get(dtype, 1e-14) * size
    eps = torch.finfo(dtype).eps / (2 if not dtype.is_complex else 1)
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    error = (average(found, weights=weights).to(wide) - exact).abs()
    assert (error <= exact.abs() * eps + loss + step).all()


def test_against_the_sum_by_hand() -> None:
    a, b = torch.randn(300, 700), torch.randn(300, 700)
    assert same(average([a, b]), ((a.double() + b.double()) / 2).float())
    assert same(average([a, b], weights=[0.5, 0.25]), (a.double() / 2 + b.double() / 4).float())
    wide = a.bfloat16().float() * 0.25 + b.bfloat16().float() * 0.75
    assert same(average([a.bfloat16(), b.bfloat16()], weights=[0.25, 0.75]), wide.bfloat16())
    assert same(average([a.T, b.T]), ((a.double() + b.double()) / 2).float().T)
    assert average([torch.ones(2, 0), torch.ones(2, 0)]).shape == (2, 0)
    assert average([torch.tensor(1.0), torch.tensor(2.0)]).item() == 1.5
    assert average([a, b], weights=[0, 0]).eq(0).all()


FAR = 2.0**-23
"""A unit in the last place of the largest value, relative to that value."""


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, [0.2, 0.3, 0.5], [1.0, 1.0, -1.0]])
def test_float32_with_weights_that_add_up_to_one(weights: list[float] | None) -> None:
    """Of more elements than are computed at once."""
    generator = torch.Generator().manual_seed(0)
    first, *others = (torch.randn(1100, 1000, generator=generator) for _ in range(3))
    factors = weights or [1 / 3] * 3

    def exact(found: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([one.double() * weight for one, weight in zip(found, factors, strict=True)]).sum(0)

    far = [first, *others]
    error = (average(far, weights=weights).double() - exact(far)).abs()
    assert (error <= 3 * FAR * torch.stack(far).abs().amax(0)).all()
    close = [first, *(first + first * one * 1e-3 for one in others)]
    found, rounded = average(close, weights=weights), exact(close).float()
    assert found.ne(rounded).float().mean() < 0.02
    assert ((found.double() - exact(close)).abs() <= FAR * first.abs()).all()
    assert same(average([first] * 3, weights=weights), first)
    assert same(average([first, far[1]], weights=[1 - 2.0**-40, 0.0]), first)
    zero = torch.tensor([0.0, -0.0])
    assert torch.signbit(average([zero] * 3)).tolist() == [False, True]


def test_infinite_values_beside_finite_ones_in_float32() -> None:
    """Their differences have no meaning."""
    largest = torch.finfo(torch.float32).max
    a = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.inf, largest, 1.0, 3.0])
    b = torch.tensor([torch.inf, 1.0, 1.0, -torch.inf, -largest, torch.inf, 5.0])
    for found in (average([a, b]), average([a, b, a, b])):
        assert found[2:4].isnan().all()
        assert [*found[:2].tolist(), *found[4:].tolist()] == [torch.inf, -torch.inf, 0.0, torch.inf, 4.0]
    assert average([torch.tensor([largest])] * 2).item() == largest
    found = [torch.randn(10_000, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    usual = average(found)
    found[1][7] = torch.inf
    assert same(average(found)[8:], usual[8:])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"weights": [float("nan"), 1]}, CombineError),
        ({"weights": [float("inf"), 1]}, CombineError),
        ({"weights": [1.0]}, CombineError),
        ({"weights": []}, CombineError),
        ({"weights": ["a", 1]}, OptionError),
        ({"weights": 7}, OptionError),
        *(({"weights": weights}, OptionError) for weights in ("12", {1: 2, 3: 4}, [True, False], [10**400, 1])),
        ({"others": "second"}, OptionError),
        ({"others": True}, OptionError),
        ({"others": 2}, CombineError),
        ({"others": -1}, CombineError),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], error: type[ModelStateError]) -> None:
    with pytest.raises(error):
        average([torch.ones(1), torch.ones(1)], **options)


def test_every_difference_in_one_error() -> None:
    one = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": torch.ones(1)}
    other = {"a": torch.ones(3), "b": torch.ones(2).half(), "c": torch.ones(2), "e": torch.ones(1)}
    with pytest.raises(CombineError) as caught:
        ms.open([one, other], combine=ms.merge.Average())
    assert "(4)" in str(caught.value)
    assert all(f"'{name}'" in str(caught.value) for name in "abde")
    assert "'c'" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_what_has_no_average(dtype: torch.dtype) -> None:
    one, other = torch.tensor([0, 1]).to(dtype), torch.tensor([1, 1]).to(dtype)
    assert same(average([one, one.clone()]), one)
    assert same(average([one, other], others="first"), one)
    assert same(average([one, other], others="last"), other)
    assert same(average([one, other, one], others=1), other)
    with pytest.raises(CombineError, match=r"others than in the first in \[1\]") as caught:
        average([one, other])
    assert ('others="first"' in caught.value.remedy) == (dtype is not torch.float8_e4m3fn)


def test_numbers_are_not_taken_without_their_scales(tmp_path: Path) -> None:
    weights = torch.randn(2, 4, 4)
    scales = weights.abs().amax((1, 2)) / 448
    sources = [
        {"a.weight": (weight / scale).to(torch.float8_e4m3fn), "a.weight_scale": scale}
        for weight, scale in zip(weights, scales, strict=True)
    ]
    with pytest.raises(CombineError, match="float8_e4m3fn with scales") as caught:
        ms.open(sources, combine=ms.merge.Average(others="first"))
    assert "rules=[ms.rules.Dequantize('*.weight', '*.weight_scale')]" in caught.value.remedy
    rule = ms.rules.Dequantize("*.weight", "*.weight_scale")
    paths = [tmp_path / f"{index}.safetensors" for index in range(2)]
    for source, path in zip(sources, paths, strict=True):
        ms.convert_checkpoint(source, path, rules=[rule])
    result = ms.open(paths, combine=ms.merge.Average()).tensor("a.weight")
    expected = (sources[0]["a.weight"].double() * scales[0] + sources[1]["a.weight"].double() * scales[1]) / 2
    assert torch.allclose(result.double(), expected, atol=1e-6)  # weights of both signs nearly cancel out


@pytest.mark.parametrize("number", [torch.arange(4), torch.arange(4).half(), torch.arange(6), torch.ones(2).bool()])
def test_tensors_without_an_average_may_differ_where_one_is_chosen(number: torch.Tensor, tmp_path: Path) -> None:
    first = {"w": torch.ones(2), "position_ids": torch.arange(4)}
    second = {"w": torch.zeros(2), "position_ids": number}
    for name, state in (("a.pt", first), ("b.pt", second)):
        torch.save(state, tmp_path / name)
    sources = [tmp_path / "a.pt", tmp_path / "b.pt"]
    if number.dtype != torch.int64 or number.shape != (4,):
        with pytest.raises(CombineError) as caught:
            ms.open(sources, combine=ms.merge.Average())
        assert caught.value.remedy.endswith('ms.merge.Average(others="first")')
        assert "key=" not in str(caught.value)
    for others, state in (("first", first), ("last", second)):
        merged = ms.open(sources, combine=ms.merge.Average(others=others))
        assert same(merged.tensor("position_ids"), state["position_ids"])
        assert same(merged.tensor("w"), torch.full((2,), 0.5))


@pytest.mark.parametrize(
    ("states", "remedies"),
    [
        ([{"w": torch.zeros(2)}, {"w": torch.ones(2).half()}], 1),
        ([{"w": torch.zeros(2)}, {"w": torch.ones(2), "x": torch.ones(1)}], 1),
        ([{"w": torch.zeros(2), "y": torch.ones(3)}, {"w": torch.ones(2), "x": torch.ones(1)}], 2),
        ([{"w": torch.zeros(2), "y": torch.ones(3)}, {"w": torch.ones(2), "y": torch.ones(4)}], 2),
        (
            [{"w": torch.zeros(2), "y": torch.ones(3)}, {"w": torch.ones(2)}, {"w": torch.ones(2), "y": torch.ones(3)}],
            2,
        ),
    ],
)
def test_the_remedies_for_other_differences_work(
    states: list[dict[str, torch.Tensor]], remedies: int, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{index}.safetensors" for index in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        ms.save(state, path)
    with pytest.raises(CombineError) as caught:
        ms.open(paths, combine=ms.merge.Average(others="first"))
    given = list(paths)
    for remedy in caught.value.remedy.split("; "):
        index, code = int(remedy[remedy.index("[") + 1]), remedy.partition(": ")[2]
        given[index] = tmp_path / f"new_{index}.safetensors"
        eval(code, {"ms": ms, "path": paths[index], "new_path": given[index]})
    assert len(caught.value.remedy.split("; ")) == remedies
    expected = torch.full((2,), (len(states) - 1) / len(states))
    assert torch.allclose(ms.open(given, combine=ms.merge.Average()).tensor("w"), expected)
