"""Ranks that load from a server: each requests its own bytes, counted by a proxy."""

from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from tests.distributed import models
from tests.distributed.ranks import Ranks
from tests.distributed.test_bytes import SURPLUS
from tests.proxy import fault_proxy
from tests.remote.servers import file_server

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow
SIZES: dict[str, Any] = {"width": 128, "hidden": 1024, "rows": 256}
"""Of a network of 3 MB."""
_HEADER_BYTES = 64 << 10
"""What each rank reads to open a file."""


def _plain() -> models.Net:
    torch.manual_seed(0)
    return models.Net(**SIZES)


def _loaded(source: str, kind: str, read_once: bool = False) -> dict[str, torch.Tensor]:
    with ms.skeleton():
        net = models.Net(**SIZES)
    models.SHARD[kind](net)
    ms.load(net, source, read_once=read_once)
    return models.gathered(net)


def _equals(url: str, path: str, kind: str, read_once: bool) -> bool:
    remote, local = _loaded(url, kind, read_once), _loaded(path, kind)
    return bool(remote) and all(torch.equal(remote[name], value) for name, value in local.items())


@pytest.mark.parametrize(
    ("kind", "read_once", "copies"),
    [("fsdp", False, 1), ("hsdp", False, 2), ("hsdp", True, 1), ("replicated", True, 1)],
)
def test_the_server_sends_each_part_once_for_each_rank_that_reads_it(
    kind: str, read_once: bool, copies: int, ranks: Ranks, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    ms.save(_plain(), path)
    sent_bytes = copies * sum(value.nbytes for value in _plain().state_dict().values())
    with file_server(tmp_path) as server, fault_proxy(server) as proxy:
        assert all(ranks.values(_equals, f"{proxy.url}/{path.name}", str(path), kind, read_once))
        assert sent_bytes <= proxy.downloaded_bytes <= SURPLUS * sent_bytes + 4 * _HEADER_BYTES
