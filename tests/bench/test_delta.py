"""What `bench.delta` measures: deltas are near the entropy of what changed, and smaller than what trainers publish."""

import pytest
import torch

from bench import delta
from tests.bench.forked import run_forked


def test_the_entropy() -> None:
    before, after = torch.zeros(1024, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.bfloat16)
    after.view(torch.int16)[:512] = torch.tensor([1, 2]).repeat(256).to(torch.int16)
    assert delta.entropy_bytes(before, after) == pytest.approx(1024 / 8 + 512 / 8)


@pytest.mark.parametrize("share", [0.004, 0.02, 0.2])
def test_the_bytes_of_a_step(share: float) -> None:
    """Of weights of which a share takes a step of a few ulps."""
    generator = torch.Generator().manual_seed(0)
    before = (torch.randn(1 << 21, generator=generator) * 0.02).bfloat16()
    after = before.clone()
    changed = torch.rand(len(before), generator=generator) < share
    steps = torch.empty(len(before)).geometric_(0.8, generator=generator).to(torch.int16)
    up = torch.rand(len(before), generator=generator) < 0.5
    after.view(torch.int16)[changed] += torch.where(up, steps, -steps)[changed]
    weighed = delta.weigh({"weight": before}, {"weight": after})
    assert weighed.payload_bytes < 0.6 * weighed.xor_bytes
    assert weighed.payload_bytes < 1.15 * weighed.entropy_bytes


@pytest.mark.slow
def test_the_times(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "run", run_forked)
    delta.main(["--steps", "0", "--mb", "1", "--runs", "1"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].split(",")[0] for row in rows] == [
        *(["| publish a step"] * 2 + ["| apply a step", "| pause of requests at a swap"]),
        *(["| load a chain of 32"] * 6),
    ]
