from modelstate.text_format import columns, count, seconds, shorten


def test_count() -> None:
    assert (count(1, "tensor"), count(0, "tensor"), count(20_000, "tensor")) == (
        "1 tensor",
        "0 tensors",
        "20,000 tensors",
    )


def test_seconds() -> None:
    assert (seconds(0.0123), seconds(1.234)) == ("12.3 ms", "1.23 s")


def test_shorten() -> None:
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abcde…"


def test_columns_are_aligned_and_have_no_trailing_blanks() -> None:
    text = columns([["a", "1", "x"], ["bbb", "22"], ["日本", "3", ""]], right=(1,))
    assert text.splitlines() == ["a      1  x", "bbb   22", "日本   3"]


def test_columns_of_nothing() -> None:
    assert columns([]) == ""


def test_a_very_long_cell_widens_no_other_row() -> None:
    lines = columns([["n" * 100_000, "1"], ["name", "2"]]).splitlines()
    assert lines[0] == "n" * 100_000 + "  1"
    assert lines[1].split() == ["name", "2"]
    assert len(lines[1]) < 400
