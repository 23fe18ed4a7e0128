"""The checks of numbers that callers give."""

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from modelstate.arguments import check_integer, seconds_of
from modelstate.errors import OptionError


@pytest.mark.parametrize("value", [1, 5, None])
def test_integers_that_are_accepted(value: object) -> None:
    check_integer("depth", value, least=1, accepts_none=True)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None, [1]])
def test_integers_that_are_refused(value: object) -> None:
    with pytest.raises(OptionError, match=r"shard_size_bytes= must be a number of bytes") as caught:
        check_integer("shard_size_bytes", value, least=1)
    assert (caught.value.expected, caught.value.found) == ("an integer >= 1", repr(value))


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (0, {}),
        (0.5, {"accepts_zero": False}),
        (np.float32(2), {}),
        (100, {"most": 100}),
    ],
)
def test_times_that_are_accepted(value: object, options: dict[str, Any]) -> None:
    seconds = seconds_of("timeout_seconds", value, **options)
    assert (seconds, type(seconds)) == (value, float)


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        (0, {"accepts_zero": False}, "a number > 0"),
        (-1, {}, "a number >= 0"),
        (float("nan"), {}, "a number >= 0"),
        (float("inf"), {}, "a number >= 0"),
        (101, {"most": 100}, "a number >= 0 and <= 100"),
        (10**400, {}, "a number >= 0"),
        (True, {"accepts_none": True}, "a number >= 0, or None"),
        (None, {}, "a number >= 0"),
        ("1", {}, "a number >= 0"),
        (Decimal(1), {}, "a number >= 0"),
    ],
)
def test_times_that_are_refused(value: object, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(OptionError, match="timeout_seconds= must be a number of seconds") as caught:
        seconds_of("timeout_seconds", value, **options)
    assert (caught.value.expected, caught.value.found) == (expected, repr(value))
