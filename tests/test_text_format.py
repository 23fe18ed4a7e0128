from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate.io.files import local_path
from modelstate.text_format import as_given, columns, count, seconds, short_repr, shorten, size


def test_sizes() -> None:
    assert (size(0), size(999), size(999.7), size(90_868_376)) == ("0 B", "999 B", "1.0 kB", "90.9 MB")
    assert (size(999_949), size(999_999), size(10**19)) == ("999.9 kB", "1.0 MB", "10,000.0 PB")


def test_counts_times_and_texts() -> None:
    assert (count(1, "tensor"), count(20_000, "tensor")) == ("1 tensor", "20,000 tensors")
    assert (seconds(0.0123), seconds(1.234)) == ("12.3 ms", "1.23 s")
    assert (shorten("abcdef", 6), shorten("abcdefg", 6)) == ("abcdef", "abcde…")


def test_paths_are_as_the_caller_wrote_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    for given in ("a.pt", "sub/b.pt"):
        local_path(given)
    text = f"{tmp_path}/a.pt, {tmp_path}/sub/b.pt, {tmp_path} and /x{tmp_path}/c.pt"
    assert as_given(text) == f"a.pt, sub/b.pt, {tmp_path} and /x{tmp_path}/c.pt"
    monkeypatch.chdir("/")  # a relative path leads elsewhere now
    assert as_given(text) == text
    monkeypatch.chdir(tmp_path)
    local_path(str(tmp_path / "a.pt"))
    assert as_given(f"{tmp_path}/a.pt") == f"{tmp_path}/a.pt"


def test_a_path_with_a_newline_takes_one_line(tmp_path: Path) -> None:
    with pytest.raises(ms.errors.SourceNotFoundError) as caught:
        ms.open(tmp_path / "a\nb.pt")
    assert caught.value.where.endswith("a\nb.pt")
    assert "a\\nb.pt: there is no such file" in str(caught.value).splitlines()[0]


def test_an_error_has_absolute_fields_and_a_text_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ms.errors.SourceNotFoundError) as caught:
        ms.open("missing.pt")
    assert caught.value.where == str(tmp_path / "missing.pt")
    assert str(caught.value).startswith("missing.pt: ")
    assert str(ms.save({"w": torch.ones(1)}, "w.safetensors")).startswith("w.safetensors: 1 tensor")


def test_columns_are_aligned_and_have_no_trailing_blanks() -> None:
    text = columns([["a", "1", "x"], ["bbb", "22"], ["日本", "3", ""]], right=(1,))
    assert text.splitlines() == ["a      1  x", "bbb   22", "日本   3"]


def test_a_very_long_cell_widens_no_other_row() -> None:
    lines = columns([["n" * 100_000, "1"], ["name", "2"]]).splitlines()
    assert lines[0] == "n" * 100_000 + "  1"
    assert lines[1].split() == ["name", "2"]
    assert len(lines[1]) < 400


def test_columns_that_do_not_fit_are_left_out_and_named() -> None:
    rows = [["name", "size", "note", "mean"], ["weight", "1000", "", "0.25"], ["bias", "10", "", "1"]]
    everything = columns(rows, right=(1, 3), optional=(3, 2))
    assert columns(rows, right=(1, 3), width=80, optional=(3, 2)) == everything
    fitted = columns(rows, right=(1, 3), width=18, optional=(3, 2)).splitlines()
    assert fitted == [
        "name    size  mean",
        "weight  1000  0.25",
        "bias      10     1",
        "not shown: note",
    ]  # it is empty
    narrow = columns(rows, right=(1, 3), width=5, optional=(3, 2)).splitlines()
    assert narrow == ["name    size", "weight  1000", "bias      10", "not shown: note, mean"]


class Hostile:
    """Its repr fails, and so does every comparison."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = object.__hash__


def test_a_value_in_an_error_is_short_whatever_its_repr_is() -> None:
    holds_itself: list[object] = []
    holds_itself.append(holds_itself)
    assert short_repr({"b": [1, "x"], "a": (2.5, None)}) == "{'a': (2.5, None), 'b': [1, 'x']}"
    assert short_repr(holds_itself).startswith("[[[")
    assert short_repr([Hostile()]) == "[<Hostile, whose repr raises RuntimeError>]"
    assert short_repr(10**5000) == "<int, whose repr raises ValueError>"
    for large in ("x" * 10**6, list(range(10**6)), {"k" * 10**6: 1}, [["y" * 10**6] * 9] * 9):
        assert len(short_repr(large)) <= 200


def test_an_argument_whose_repr_fails_is_refused_as_any_other() -> None:
    calls: list[Callable[[Any], object]] = [
        lambda value: ms.open({}, key=value),
        lambda value: ms.load(torch.nn.Linear(1, 1), {}, rules=value),
        lambda value: ms.load(torch.nn.Linear(1, 1), {}, dtype=value),
        lambda value: ms.save({}, value),
        lambda value: ms.Store(value),
    ]
    for call in calls:
        for value in (Hostile(), [Hostile()]):
            with pytest.raises(ms.ModelStateError):
                call(value)
