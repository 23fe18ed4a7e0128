"""What notebooks show of results, and their rows for pandas: text from a checkpoint stays text."""

import math
import sys
from pathlib import Path

import pytest
import torch

import modelstate as ms
from modelstate.rules import Rename

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def test_names_have_no_markup() -> None:
    html = ms.inspect({HOSTILE: torch.zeros(2, 3), "b.weight": torch.zeros(4)})._repr_html_()
    assert "<img" not in html
    assert "<script" not in html
    assert "[2, 3]" in html


def test_columns_without_values_are_left_out_and_numbers_are_short() -> None:
    html = ms.open({"a": torch.zeros(1_000_000)})._repr_html_()
    assert "Same bytes as" not in html
    assert "<td class=n>4,000,000</td>" in html
    assert "<td class=n>1</td>" in ms.diff({"w": torch.zeros(4)}, {"w": torch.ones(4)})._repr_html_()


def test_a_frame_has_every_row() -> None:
    frame = ms.diff({"w": torch.ones(4), "a": torch.ones(2)}, {"w": torch.zeros(4), "b": torch.ones(3)}).to_frame()
    rows = dict(zip(frame.Name, frame.Status, strict=True))
    assert rows == {"w": "changed", "a": "removed", "b": "added"}
    assert frame.set_index("Name").Bytes["w"] == 32
    assert math.isnan(frame.set_index("Name").Changed["a"])


def test_without_pandas_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ms.errors.PackageError, match="pip install pandas"):
        ms.inspect({"w": torch.ones(2)}).to_frame()


def test_every_result_has_an_overview(tmp_path: Path) -> None:
    old, new = ({f"layers.{i}.{kind}": torch.randn(4) for i in range(30)} for kind in ("a", "b"))
    model = torch.nn.ParameterDict({"w": torch.zeros(3)})
    ms.save(model, tmp_path / "w.safetensors")
    store = ms.Store(tmp_path / "store")
    store.save(1, {"model": model}, metrics={"loss": 0.5})
    plan = ms.plan(model, tmp_path / "w.safetensors")
    results = {
        "(rule)": ms.diff(old, new, rules=[Rename("layers.*.a", "layers.*.b")]),
        "Min": ms.inspect(old).stats(),
        "Placement": plan,
        "Time": ms.load(model, plan),
        "v.safetensors": ms.save(model, tmp_path / "v.safetensors"),
        "Digests": ms.verify(tmp_path / "w.safetensors"),
        "Slots": store.restore({"model": model}),
        "References lost": ms.convert(model, torch.float64),
        "loss": store,
        "layers.3.a": ms.open(old),
        "rules": ms.suggest(model, {"v": torch.zeros(3)}),
    }
    for text, result in results.items():
        assert len(result._repr_html_()) < 10_000
        assert len(repr(result)) < 300
        assert text in result._repr_html_()
    assert "2 problems" in ms.plan(model, {"v": torch.zeros(3)})._repr_html_()


@pytest.mark.parametrize("number", [10, 20_000])
def test_the_table_is_short(number: int) -> None:
    assert len(ms.open({f"t{i}": torch.zeros(1) for i in range(number)})._repr_html_()) < 3_000


def test_names_forge_no_lines_of_a_report() -> None:
    name = "x\x1b[2J\n  note: all is well\ud800"
    model = torch.nn.Linear(2, 2)
    state = model.state_dict() | {name: torch.ones(1)}
    plan = ms.plan(model, state)
    report = ms.load(model, state, allow_unexpected=["x*"])
    for shown in (plan, report):
        assert "\x1b" not in str(shown)
        assert "\n  note: all is well" not in str(shown)
        shown._repr_html_().encode()
