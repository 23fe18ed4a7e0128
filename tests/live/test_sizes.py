"""Sizes as a program file has them: what they are, and what is none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelstate.live.sizes import Size


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
    assert Size(text).subs({Size("s0"): 5, Size("s1"): 3, Size("s2"): 100}) == value


def test_the_symbols_in_them() -> None:
    assert Size("2*s0 + Max(s1, s0)").free_symbols == {Size("s0"), Size("s1")}
    assert Size("s0").free_symbols == Size("(s0) ").free_symbols == {Size("s0")}
    assert Size("4").free_symbols == set()
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
        "+".join(["s0"] * 1500),
        "-" * 3000 + "s0",
    ],
    ids=lambda text: text[:12],
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        Size(text)


@given(st.text(alphabet="s01 +-*/%(),MaxinodFlrDv", max_size=30))
def test_any_text_is_a_size_or_none(text: Any) -> None:
    try:
        size = Size(text)
    except ValueError:
        return
    values = dict.fromkeys(size.free_symbols, 3)
    try:
        assert isinstance(size.subs(values), int)
    except ZeroDivisionError:
        assert "/" in text or "%" in text or "FloorDiv" in text or "Mod" in text
