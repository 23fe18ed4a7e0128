"""Ranks that load from a server: each requests its own bytes, counted by a proxy."""

from pathlib import Path

import pytest
import torch

import modelstate as ms
from modelstate.testing import fault_proxy
from tests.distributed import models
from tests.distributed.ranks import Ranks
from tests.distributed.test_bytes import SIZES, SURPLUS
from tests.remote.servers import file_server

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow
_HEADER_BYTES = 64 << 10
"""What each rank reads to open a file."""


def _plain() -> models.Net:
    torch.manual_seed(0)
    return models.Net(**SIZES)


def _loaded(source: str) -> dict[str, torch.Tensor]:
    with ms.skeleton():
        net = models.Net(**SIZES)
    models.SHARD["fsdp"](net)
    ms.load(net, source)
    return models.gathered(net)


def _equals(url: str, path: str) -> bool:
    remote, local = _loaded(url), _loaded(path)
    return bool(remote) and all(torch.equal(remote[name], value) for name, value in local.items())


def test_the_ranks_request_the_model_once(ranks: Ranks, tmp_path: Path) -> None:
    ms.save(_plain(), tmp_path / "model.safetensors")
    state_bytes = sum(value.nbytes for value in _plain().state_dict().values())
    with file_server(tmp_path) as server, fault_proxy(server) as proxy:
        assert all(ranks.values(_equals, f"{proxy.url}/model.safetensors", str(tmp_path / "model.safetensors")))
        headers = 4 * _HEADER_BYTES
        assert state_bytes <= proxy.downloaded_bytes <= SURPLUS * state_bytes + headers
