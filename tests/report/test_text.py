import pytest

from modelstate.report.text import columns, count, printable, seconds, shorten, size


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (90_868_376, "90.9 MB"),
        (999_999, "1.0 MB"),
        (2 * 10**12, "2.0 TB"),
        (10**19, "10,000.0 PB"),
    ],
)
def test_size(nbytes: int, expected: str) -> None:
    assert size(nbytes) == expected


def test_count() -> None:
    assert (count(1, "tensor"), count(0, "tensor"), count(20_000, "tensor")) == (
        "1 tensor",
        "0 tensors",
        "20,000 tensors",
    )


def test_seconds() -> None:
    assert (seconds(0.0123), seconds(1.234)) == ("12.3 ms", "1.23 s")


def test_names_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[2Jb\nc\u202e") == r"a\x1b[2Jb\nc\u202e"
    assert printable("größe ×") == "größe ×"


def test_shorten() -> None:
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abcde…"


def test_columns_are_aligned_and_have_no_trailing_blanks() -> None:
    text = columns([["a", "1", "x"], ["bbb", "22"], ["日本", "3", ""]], right=(1,))
    assert text.splitlines() == ["a      1  x", "bbb   22", "日本   3"]


def test_columns_of_nothing() -> None:
    assert columns([]) == ""
