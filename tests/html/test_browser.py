"""Pages in a real browser: Debian's Chromium, driven by Playwright; `tools/install_browser.sh` installs it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms

pytestmark = pytest.mark.slow

HOSTILE = "<script>document.title = 'run'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("chromium is not installed: run tools/install_browser.sh")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: run make setup")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 10,000 tensors."""
    tensors = {f"layers.{i // 20}.w.{i % 20}": torch.zeros(i % 7 + 1) for i in range(9_999)}
    path: Path = tmp_path_factory.mktemp("large") / "page.html"
    path.write_text(ms.inspect({**tensors, f"head.{HOSTILE}": torch.zeros(100)}).to_html())
    return path


@pytest.fixture
def opened(browser: Any, large: Path) -> Iterator[Any]:
    """The large page; at the end it must have no error, and must have requested nothing but itself."""
    context = browser.new_context(color_scheme="light", viewport={"width": 1400, "height": 900})
    page = context.new_page()
    errors: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(large.as_uri())
    yield page
    assert not errors
    assert set(requests) == {large.as_uri()}
    assert page.title() != "run"
    context.close()


def names(page: Any) -> list[str]:
    return page.locator("#body td:first-child").all_inner_texts()


def test_modules_fold_and_unfold_by_keyboard(opened: Any) -> None:
    assert names(opened) == ["▸ layers", f"head.{HOSTILE}"]
    opened.locator("button[data-path=layers]").focus()
    opened.keyboard.press("Enter")
    assert names(opened)[:2] == ["▾ layers", "▸ 0.w"]
    assert opened.locator("button[data-path=layers]").get_attribute("aria-expanded") == "true"
    opened.keyboard.press("Enter")
    assert len(names(opened)) == 2


def test_a_tensor_whose_name_begins_other_names_has_a_line(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(ms.inspect({"a": torch.zeros(1), "a.b": torch.zeros(2), "c": torch.zeros(3)}).to_html())
    page = browser.new_page()
    page.goto(path.as_uri())
    page.get_by_role("button", name="▸ a").click()
    assert names(page) == ["▾ a", "a", "b", "c"]
    assert page.locator("#body tr").first.locator("td").nth(3).inner_text() == "12 B"
    page.close()


def test_rows_are_searched_sorted_and_added(opened: Any) -> None:
    opened.fill("#search", "layers.12.w")
    assert opened.inner_text("#count") == "20 of 10,000"
    opened.fill("#search", "")
    opened.click("#fold")
    assert len(names(opened)) == 400
    opened.click("#more")
    assert len(names(opened)) == 800
    opened.get_by_role("button", name="Bytes", exact=True).click()
    assert names(opened)[0] == f"head.{HOSTILE}"
    assert opened.locator("#head th[aria-sort=descending]").inner_text() == "Bytes ↓"


def test_the_theme_follows_the_system_and_the_button(opened: Any) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    light = opened.evaluate(back)
    opened.click("#theme")
    dark = opened.evaluate(back)
    opened.click("#theme")
    opened.emulate_media(color_scheme="dark")
    assert light == opened.evaluate(back) == "rgb(255, 255, 255)" != dark  # the button decides
    opened.reload()
    assert opened.evaluate(back) == dark


def test_a_page_is_no_wider_than_the_window(opened: Any) -> None:
    for width in (400, 1400):
        opened.set_viewport_size({"width": width, "height": 900})
        assert opened.evaluate("document.documentElement.scrollWidth") == width


def test_axe_finds_nothing_serious(browser: Any, tmp_path: Path) -> None:
    """axe-core checks contrast, labels, roles and the use by keyboard and screen reader."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="run make setup")
    old = {f"layers.{i}.w": torch.randn(4) for i in range(6)}
    new = {name: tensor + 0.1 * i for i, (name, tensor) in enumerate(old.items())}
    results = {
        "diff": ms.diff(old, {**new, "extra": torch.zeros(1)}),
        "inspect": ms.inspect(old),
        "plan": ms.plan(torch.nn.ParameterDict({"w": torch.zeros(3)}), old),
        "statistics": ms.inspect(old).stats(),
    }
    # The policy of the page would refuse the script of axe-core.
    context = browser.new_context(bypass_csp=True)
    page = context.new_page()
    serious = []
    for kind, result in results.items():
        path = tmp_path / f"{kind}.html"
        path.write_text(result.to_html())
        page.goto(path.as_uri())
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for violation in axe.Axe().run(page).response["violations"]:
                if violation["impact"] in ("serious", "critical"):
                    serious.append((kind, scheme, violation["id"], [node["html"] for node in violation["nodes"]]))
    context.close()
    assert not serious
