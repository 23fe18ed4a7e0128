"""The counts of requests that bench/results/remote.md shows."""

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto")

from bench import remote

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_tables_count_requests_and_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.setenv(f"AWS_{name}", "")  # put back afterwards
    monkeypatch.setattr(remote, "STEPS", 3)
    monkeypatch.setattr(remote, "WIDTH", 256)
    with remote.bucket() as (proxy, client, url):
        remote.reading(proxy, client)
        remote.saving(proxy)
        remote.storing(proxy, url)
    cells = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.count("|") == 5]
    rows = {
        title: [int(number.replace(",", "")) for number in numbers]
        for title, *numbers in cells
        if numbers and numbers[0][0].isdigit()
    }
    assert rows["open, safetensors"][0] == 1
    assert rows["open, `torch.save`"][0] == 2
    assert all(5_263_360 <= row[2] <= 1.02 * 5_263_360 for title, row in rows.items() if title.startswith("load, "))
    assert rows["`ms.save`, 4,194,304 bytes of tensors"][1] > 4_194_304
    assert rows["a later one, one object unchanged"][1] < 0.6 * rows["first `Store.save`, 2 objects of 1 MB"][1]
    assert rows["`latest()` or `steps()`, 3 steps"][:2] == [1, 0]
