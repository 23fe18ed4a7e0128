"""Requests while weights are swapped: weights of version k make every element of every answer k."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from tests.serve.models import X_OF_TIED as X, Tied, weights_of
from tests.serve.targets import KINDS, Readers, target_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SECONDS = float(os.environ.get("MODELSTATE_TORTURE_SECONDS", "0.4"))


def swapped_for_a_while(readers: Readers, swap: Callable[[int], object], seconds: float = SECONDS) -> int:
    """Swaps every 20 ms, on a busy machine for longer. Returns how often."""
    with readers.running():
        begun, k = time.monotonic(), 1
        while not readers.errors and (
            (passed := time.monotonic() - begun) < seconds or (passed < 60 and (k < 10 or readers.made < 40))
        ):
            k += 1
            swap(k)
            time.sleep(0.02)
    return k - 1


@pytest.mark.parametrize("way", ["single", "pinned", "file"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_request_is_torn(kind: str, way: str, tmp_path: Path) -> None:
    module = Tied()
    live = ms.Live(target_of(kind, module, X))
    live(X)

    def request() -> tuple[int, torch.Tensor]:
        if way != "pinned":
            value, version = live.answer(X)
            return version, value
        with live.version() as v:
            return v.id, torch.cat([v(X), v(X)])

    def swap(k: int) -> None:
        source: Any = weights_of(module, k)
        if way == "file":
            ms.save(source, tmp_path / "new.safetensors", overwrite=True)
            source = tmp_path / "new.safetensors"
        live.swap(source)

    readers = Readers(request)
    swaps = swapped_for_a_while(readers, swap)
    assert not readers.errors
    assert readers.torn == readers.wrong_version == readers.went_back == 0
    assert swaps > 5
    assert readers.requests > 20
    assert len(readers.seen) > 2
    assert live.version().id == swaps + 1
