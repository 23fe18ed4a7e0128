"""Inputs that a program takes, and would answer wrongly: what `torch.export` has found is checked before the call."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import modelstate as ms
from modelstate.errors import ProgramInputError
from modelstate.torch_compat.private import torch_version
from tests.serve.guarded import DYNAMIC, Even, Longer, Many, Pairs, Product, Same, Within, Writes, rows
from tests.serve.packages import package_of

Making = Callable[..., tuple[torch.Tensor, ...]]
needs_guards = pytest.mark.skipif(torch_version() < (2, 9), reason="this torch finds no guards")


def flat_and_square(long: int, wide: int, flat: int) -> tuple[torch.Tensor, ...]:
    return rows(long, width=wide)[0], torch.arange(float(flat))


PROGRAMS: list[tuple[nn.Module, Making, tuple[int, ...], Any]] = [
    (Even(), rows, (4,), (DYNAMIC,)),
    (Within(), rows, (3, 6), (DYNAMIC, DYNAMIC)),
    (Longer(), rows, (6, 3), (DYNAMIC, DYNAMIC)),
    (Pairs(), rows, (6,), ({0: 2 * Dim("pairs", min=2, max=4)},)),
    (Same(), rows, (4, 4), (DYNAMIC, DYNAMIC)),
    (Product(), flat_and_square, (3, 4, 12), ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, DYNAMIC)),
]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("module", "make", "sizes", "shapes"), PROGRAMS, ids=lambda one: type(one).__name__)
def test_it_answers_exactly_what_the_program_answers(
    module: nn.Module, make: Making, sizes: tuple[int, ...], shapes: Any, strict: bool
) -> None:
    program = torch.export.export(module, make(*sizes), dynamic_shapes=shapes, strict=strict)
    torch_says = program.module()
    lives = [ms.Live(program), ms.Live(_loaded(program))]

    @settings(max_examples=60, deadline=None)
    @given(st.tuples(*[st.integers(2, 14)] * len(sizes)), st.sampled_from(lives))
    def law(given: tuple[int, ...], live: ms.Live) -> None:
        inputs = make(*given)
        try:
            expected = torch_says(*inputs)
        except (AssertionError, RuntimeError):
            with pytest.raises(ProgramInputError):
                live(*inputs)
        else:
            assert torch.equal(live(*inputs), expected)
            assert torch.equal(module(*inputs), expected)

    law()
    for live in lives:
        assert torch.equal(live(*make(*sizes)), module(*make(*sizes)))


def _loaded(program: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(program, file)
    return torch.export.load(io.BytesIO(file.getvalue()))


@pytest.mark.slow
@needs_guards
@pytest.mark.parametrize("strict", [False, True])
def test_the_inputs_of_a_guard_are_found_wherever_they_are(strict: bool) -> None:
    shapes = {"xs": (DYNAMIC, DYNAMIC), "of": {"a": [DYNAMIC]}, "n": Dim.DYNAMIC}
    named = {"of": {"a": [torch.ones(8, 3)]}, "n": 5}
    program = torch.export.export(Many(), rows(6, 3), named, dynamic_shapes=shapes, strict=strict)
    live, torch_says = ms.Live(program), program.module()
    for long, short, count, n in [(6, 3, 8, 5), (4, 3, 5, 5), (4, 3, 7, 3), (3, 4, 8, 5), (6, 3, 4, 5), (6, 6, 2, 2)]:
        inputs, named = rows(long, short), {"n": n, "of": {"a": [torch.ones(count, 3)]}}
        if long > short and count * n > 20 and (n == 5 or not strict):  # a strict export has made n a constant
            assert torch.equal(live(*inputs, **named), torch_says(*inputs, **named))
            continue
        with pytest.raises(AssertionError):
            torch_says(*inputs, **named)
        with pytest.raises(ProgramInputError):
            live(*inputs, **named)


def test_a_size_that_is_twice_another_one() -> None:
    class Times(Same):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x * self.weight

    module = Times()
    live = ms.Live(torch.export.export(module, rows(5), dynamic_shapes=({0: 2 * Dim("n", max=8) + 1},)))
    for count in (1, 3, 5, 17):
        assert torch.equal(live(*rows(count)), module(*rows(count)))
    with pytest.raises(ProgramInputError):
        live(*rows(19))


@pytest.mark.slow
def test_a_package_checks_what_the_program_was_exported_for() -> None:
    """The library itself looks at no size: it would read past the end of `y`."""
    module = Writes()
    live = ms.Live(package_of(module, *rows(4, 6), dynamic_shapes=(DYNAMIC, DYNAMIC)))
    torch_says = torch.export.export(module, rows(4, 6), dynamic_shapes=(DYNAMIC, DYNAMIC)).module()

    @settings(max_examples=60, deadline=None)
    @given(st.integers(2, 14), st.integers(2, 14))
    def law(long: int, other: int) -> None:
        x, y = rows(long, other)
        expected = x.clone()
        try:
            answer = torch_says(expected, y)
        except AssertionError:
            with pytest.raises(ProgramInputError):
                live(x, y)
            assert torch.equal(x, expected)
        else:
            assert torch.equal(live(x, y), answer)
            assert torch.equal(x, expected)

    law()
    with pytest.raises(ProgramInputError, match="other sizes"):
        live(torch.ones(100_000, 3), torch.ones(2, 3))


@pytest.mark.slow
def test_what_a_package_writes_to_is_not_copied() -> None:
    live = ms.Live(package_of(Writes(), *rows(4, 6), dynamic_shapes=(DYNAMIC, DYNAMIC)))
    x, y = rows(4, 6)
    for wrong in (x.T.contiguous().T, torch.ones(4, 6)[:, ::2], torch.ones(1, 3).expand(4, 3)):
        before = wrong.clone()
        with pytest.raises(ProgramInputError, match="writes to x"):
            live(wrong, y)
        assert torch.equal(wrong, before)
    inside = torch.ones(13)[1:].view(4, 3)  # at no round address
    for right in (x, inside):
        before = right.clone()
        assert torch.equal(live(right, y.T.contiguous().T), before * 2 + y[:4])
        assert torch.equal(right, before * 2)
