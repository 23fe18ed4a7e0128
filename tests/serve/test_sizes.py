"""Sizes and conditions of them as a program file has them: what they are, and what is none."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelstate.serve.inputs import Condition, Size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("s0", 5),
        ("2*s0 - s1", 7),
        ("-s0 + s1", -2),
        ("(s0 + 1)//2", 3),
        ("s0 % s1", 2),
        ("FloorDiv(s0, 2)", 2),
        ("Mod(s0, s1)", 2),
        ("Max(1, s0 - s1, s1)", 3),
        ("Min(s0, s1)", 3),
    ],
)
def test_what_they_are(text: str, value: int) -> None:
    assert Size(text).value({"s0": 5, "s1": 3, "s2": 100}) == value


def test_the_symbols_in_them() -> None:
    assert Size("2*s0 + Max(s1, s0)").symbols == {"s0", "s1"}
    assert Size("(s0) ").text == "s0"
    assert Size("s0").symbols == Size("(s0) ").symbols == {"s0"}
    assert Size("4").symbols == set()
    assert [Size(text).is_symbol for text in ("s0", "s0 + 1", "4")] == [True, False, False]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s0 +",
        "s0; s1",
        "1.5",
        "'s0'",
        "s0.real",
        "s0[0]",
        "s0 ** 99",
        "s0 / 2",
        "~s0",
        "open(s0, s0)",
        "Max(s0, s1, key=s0)",
        "Max(*s0, s1)",
        "Max(s0)",
        "Mod(s0, s1, s2)",
        "FloorDiv()",
        "lambda: s0",
        "(" * 10_000 + "s0" + ")" * 10_000,
        "-" * 3000 + "s0",
    ],
    ids=lambda text: text[:12],
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        Size(text)


@given(st.integers(-4, 4), st.integers(-9, 9), st.integers(0, 50))
def test_the_symbol_of_a_sum_is_found_and_nothing_else_is(times: int, more: int, value: int) -> None:
    size = Size(f"{times}*s0 + {more}*s1")
    found = size.solved("s0", value, {"s1": 2})
    fitting = [one for one in range(120) if times * one + more * 2 == value]
    assert found == (fitting[0] if times and fitting else None)


RANKS = [("x", 2), ("n", None), ("y", 1), ("name", 0)]


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("x.shape[0] % 2 == 0", True),
        ("x.shape[1] <= y.shape[0]", False),
        ("x.shape[0] * x.shape[1] == 2 * n", True),
        ("0.5 * torch.sym_float(x.shape[0]) > 2.5", False),
        ("x.shape[0] / 8 == 0.5", True),
        ("math.ceil(n / 8) != math.floor(n / 8) and n > 5", True),
        ("not (n == 10 or x.shape[0] == 7)", False),
        ("max(n, 11) == 11", True),
        ("-n < abs(-1)", True),
        ("n // (x.shape[0] - 4) == 1", False),
        ("1 < n < 11", True),
    ],
)
def test_conditions(text: str, holds: bool) -> None:
    assert Condition(text, RANKS).holds([torch.empty(4, 5), 10, torch.empty(3), "a"]) is holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n",
        "n + 1",
        "x == 1",
        "n.shape[0] == 1",
        "name == 1",
        "x.shape[2] == 1",
        "x.shape[-1] == 1",
        "x.stride()[0] == 1",
        "z.shape[0] == 1",
        "x.size()[0] == 1",
        "n is 1",
        "n ** 9 == 1",
        "n == 'a'",
        "open(n) == 1",
        "math.exit(n) == 1",
        "(lambda: 1)() == 1",
    ],
    ids=lambda text: text[:16],
)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no (condition|size)"):
        Condition(text, RANKS)


@given(st.text(alphabet="s01 +-*/%(),MaxinodFlrDv", max_size=30))
def test_any_text_is_a_size_or_none(text: Any) -> None:
    try:
        size = Size(text)
    except ValueError:
        return
    values = dict.fromkeys(size.symbols, 3)
    try:
        assert isinstance(size.value(values), int)
    except ZeroDivisionError:
        assert "/" in text or "%" in text or "FloorDiv" in text or "Mod" in text
