"""Pages for browsers and notebooks: what is in them, and that text from a checkpoint stays text."""

import json
import math
import re
import sys
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import pytest
import torch

import modelstate as ms
from modelstate.rules import Rename

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def data_of(html: str) -> dict[str, list]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(text)


def test_a_page_has_every_row_and_no_markup_of_a_name() -> None:
    inspection = ms.inspect({HOSTILE: torch.zeros(2, 3), "b.weight": torch.zeros(4)})
    html = inspection.to_html()
    rows = data_of(html)["rows"]
    assert [(row[0], row[1], row[3]) for row in rows] == [(HOSTILE, "[2, 3]", 24), ("b.weight", "[4]", 16)]
    assert "<img" not in html
    assert html.count("</script>") == 2
    assert "<img" not in inspection._repr_html_()


def test_the_policy_allows_the_style_and_the_script_of_the_page_only() -> None:
    html = ms.inspect({"w": torch.zeros(2)}).to_html()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert f"{tag}-src &#39;sha256-{digest}&#39;" in policy
    assert "default-src &#39;none&#39;" in policy
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert " style=" not in html  # the policy forbids it


@pytest.mark.slow
def test_a_frame_has_the_rows_of_the_page() -> None:
    frame = ms.diff({"w": torch.ones(4), "a": torch.ones(2)}, {"w": torch.zeros(4), "b": torch.ones(3)}).to_frame()
    rows = dict(zip(frame.Name, frame.Status, strict=True))
    assert rows == {"w": "changed", "a": "removed", "b": "added"}
    assert frame.set_index("Name").Bytes["w"] == 32
    assert math.isnan(frame.set_index("Name").Changed["a"])


def test_without_pandas_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ms.errors.PackageError, match="pip install pandas"):
        ms.inspect({"w": torch.ones(2)}).to_frame()


def test_values_that_json_lacks_are_text(tmp_path: Path) -> None:
    store = ms.Store(tmp_path)
    for step, loss in enumerate((math.nan, math.inf, 1.5)):
        store.save(step, {"w": torch.zeros(1)}, metrics={"loss": loss})
    assert {row[-1] for row in data_of(store.to_html())["rows"]} == {"nan", "inf", 1.5}


def test_every_result_has_a_page_and_a_short_one_for_notebooks(tmp_path: Path) -> None:
    old, new = ({f"layers.{i}.{kind}": torch.randn(4) for i in range(30)} for kind in ("a", "b"))
    model = torch.nn.ParameterDict({"w": torch.zeros(3)})
    ms.save(model, tmp_path / "w.safetensors")
    store = ms.Store(tmp_path / "store")
    store.save(1, {"model": model}, metrics={"loss": 0.5})
    plan = ms.plan(model, tmp_path / "w.safetensors")
    results = {
        "layers.3.b": ms.diff(old, new, rules=[Rename("layers.*.a", "layers.*.b")]),
        "min": ms.inspect(old).stats(),
        "placement": plan,
        "seconds": ms.load(model, plan),
        "files": ms.save(model, tmp_path / "v.safetensors"),
        "digests": ms.verify(tmp_path / "w.safetensors"),
        "step": store.restore({"model": model}),
        "converted": ms.convert(model, torch.float64),
        "loss": store,
        "layers.3.a": ms.open(old),
        "rules": ms.suggest(model, {"v": torch.zeros(3)}),
    }
    for result in results.values():
        assert len(result._repr_html_()) < 10_000
        assert len(repr(result)) < 300
        assert "<script" not in result._repr_html_()
        assert result.to_html().startswith("<!doctype html>")
    assert "2 problems" in ms.plan(model, {"v": torch.zeros(3)}).to_html()


@pytest.mark.slow
@pytest.mark.parametrize("number", [10, 20_000])
def test_the_table_of_a_notebook_is_short(number: int) -> None:
    assert len(ms.open({f"t{i}": torch.zeros(1) for i in range(number)})._repr_html_()) < 3_000


def test_names_forge_no_lines_of_a_report_and_break_no_page() -> None:
    name = "x\x1b[2J\n  note: all is well\ud800"
    model = torch.nn.Linear(2, 2)
    state = model.state_dict() | {name: torch.ones(1)}
    plan = ms.plan(model, state)
    report = ms.load(model, state, allow_unexpected=["x*"])
    for shown in (plan, report):
        assert "\x1b" not in str(shown)
        assert "\n  note: all is well" not in str(shown)
        shown.to_html().encode()
        shown._repr_html_().encode()
