"""Checkpoints on servers are the checkpoints of this machine: the same plan, tensors and errors, in few requests."""

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from tests.programs import run_program
from tests.proxy import Fault, FaultProxy, HttpRequest, fault_proxy
from tests.remote.servers import FileServer, file_server, http_server
from tests.sweeps import EXHAUSTIVE

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow


def make_model(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(96, 96, device=device) for _ in range(8)])


def write_safetensors(model: nn.Module, directory: Path) -> str:
    ms.save(model, directory / "model.safetensors")
    return "model.safetensors"


def write_shards(model: nn.Module, directory: Path) -> str:
    ms.save(model, directory / "model.safetensors", shard_size_bytes=100_000)
    return "model.safetensors.index.json"


def write_torch(model: nn.Module, directory: Path) -> str:
    torch.save(model.state_dict(), directory / "model.pt")
    return "model.pt"


def write_legacy(model: nn.Module, directory: Path) -> str:
    torch.save(model.state_dict(), directory / "model.pt", _use_new_zipfile_serialization=False)
    return "model.pt"


def write_dcp(model: nn.Module, directory: Path) -> str:
    dcp.save(model.state_dict(), checkpoint_id=directory / "dcp", no_dist=True)
    return "dcp/.metadata"


FORMATS: dict[str, Callable[[nn.Module, Path], str]] = {
    "safetensors": write_safetensors,
    "shards": write_shards,
    "torch": write_torch,
    "legacy": write_legacy,
    "dcp": write_dcp,
}
A_REQUEST_A_TENSOR = ("legacy", "dcp")
"""Formats that have a header for each tensor, which is also what a load of small tensors reads between them."""


class Served:
    """A directory that a server has, behind a proxy that counts."""

    def __init__(self, directory: Path, url: str, proxy: FaultProxy) -> None:
        self.directory, self.url, self.proxy = directory, url, proxy

    def publish(self) -> None:
        """Puts the files of the directory on the server."""

    def requests_by_file(self) -> Counter[str]:
        return Counter(request.target for request in self.proxy.requests)


@pytest.fixture
def http(tmp_path: Path) -> Iterator[Served]:
    directory = tmp_path / "served"
    directory.mkdir()
    with file_server(directory) as server, fault_proxy(server) as proxy:
        yield Served(directory, proxy.url, proxy)


@pytest.fixture
def s3(tmp_path: Path, proxy: FaultProxy, bucket: str, s3_client: Callable[[], Any]) -> Served:
    directory = tmp_path / "served"
    directory.mkdir()

    class Bucket(Served):
        def publish(self) -> None:
            for path in directory.rglob("*"):
                if path.is_file():
                    s3_client().upload_file(str(path), bucket, f"run/{path.relative_to(directory)}")

    return Bucket(directory, f"s3://{bucket}/run", proxy)


@pytest.fixture(params=["http", "s3"])
def served(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("format", FORMATS)
def test_a_remote_checkpoint_is_the_local_one(served: Served, format: str) -> None:
    model = make_model()
    name = FORMATS[format](model, served.directory)
    served.publish()
    local = ms.open(served.directory / name)
    remote = ms.open(f"{served.url}/{name}")
    assert format in A_REQUEST_A_TENSOR or max(served.requests_by_file().values()) <= 3
    assert list(remote) == list(local)
    assert remote.format == local.format
    assert remote.metadata == local.metadata
    assert [remote[each].shape for each in remote] == [local[each].shape for each in local]
    for each in local:
        assert torch.equal(remote.tensor(each), local.tensor(each))
    for device in ("cpu", "meta"):
        served.proxy.reset()
        target = make_model(device)
        plan = ms.plan(target, remote, map=False)
        assert not served.proxy.requests
        assert [(step.name, step.nbytes) for step in plan.steps] == [
            (step.name, step.nbytes) for step in ms.plan(target, local, map=False).steps
        ]
        report = ms.load(target, remote)
        assert report.bytes == local.nbytes
        assert local.nbytes <= served.proxy.downloaded_bytes <= (1.1 if format == "dcp" else 1.02) * local.nbytes
        for mine, stored in zip(target.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, stored)


def test_part_of_a_checkpoint_takes_the_bytes_of_the_part(served: Served) -> None:
    name = write_safetensors(make_model(), served.directory)
    served.publish()
    remote = ms.open(f"{served.url}/{name}")
    served.proxy.reset()
    layer = nn.Linear(96, 96)
    report = ms.load(layer, remote.select("3"))
    assert report.bytes <= served.proxy.downloaded_bytes <= 1.02 * report.bytes


def test_an_object_that_changes_is_an_error(served: Served) -> None:
    name = write_safetensors(make_model(), served.directory)
    served.publish()
    remote = ms.open(f"{served.url}/{name}")
    with torch.no_grad():
        other = make_model()
        other[0].weight.add_(1)
    ms.save(other, served.directory / name)
    served.publish()
    target = make_model("meta")
    with pytest.raises(ms.ModelStateError, match="has changed"):
        ms.load(target, remote)
    assert target[0].weight.is_meta


@pytest.mark.parametrize("format", FORMATS if EXHAUSTIVE else ["shards"])
@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.RESET, Fault.CUT, Fault.LOST_REPLY, None])
def test_a_fault_at_each_request_is_overcome(served: Served, fault: Fault | None, format: str) -> None:
    """Each request of an open and a load fails once; without a fault, each waits."""
    model = make_model()
    name = FORMATS[format](model, served.directory)
    served.publish()
    served.proxy.reset()
    seen: set[str] = set()

    def once(request: HttpRequest) -> Fault | None:
        key = f"{request.target} {request.headers.get('range')}"
        if key in seen:
            return None
        seen.add(key)
        return fault

    served.proxy.fault = once
    served.proxy.latency_seconds = 0.02 if fault is None else 0
    target = make_model("meta")
    ms.load(target, f"{served.url}/{name}")
    assert len(seen) >= 2  # the header and the tensors
    for mine, stored in zip(target.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, stored)


FORK = """
import multiprocessing, sys
import modelstate as ms

def read():
    try:
        ms.open(sys.argv[1])
    except ms.errors.ReadFailedError as error:
        assert "forkserver" in error.remedy
        sys.exit(7)

ms.open(sys.argv[1])
child = multiprocessing.get_context("fork").Process(target=read)
child.start()
child.join(60)
print(child.exitcode)
child.kill()
"""


def test_a_forked_child_gets_an_error_and_does_not_hang(files: tuple[Path, str]) -> None:
    name = write_safetensors(make_model(), files[0])
    assert run_program(FORK, f"{files[1]}/{name}").stdout.strip() == "7"


@pytest.mark.parametrize(("budget_bytes", "dtype"), [(256 << 10, "bfloat16"), (12 << 20, "float32")])
def test_a_budget_bounds_the_replies_under_way(tmp_path: Path, budget_bytes: int, dtype: str) -> None:
    lock, under_way, sizes = threading.Lock(), list[int](), [(0, 0)]

    class Counting(FileServer):
        directory = tmp_path

        def do_GET(self) -> None:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            nbytes = int(last) + 1 - int(first)
            with lock:
                under_way.append(nbytes)
                sizes.append((len(under_way), sum(under_way)))
            time.sleep(0.02)
            with lock:  # before the reply: the client may ask again while this thread still waits to go on
                under_way.remove(nbytes)
            super().do_GET()

    rows = 2048 if budget_bytes > 1 << 20 else 256  # so that there are some replies, but no hundreds
    model = nn.Linear(2048, rows)
    ms.save(model, tmp_path / "model.safetensors")
    with http_server(Counting) as url:
        checkpoint = ms.open(f"{url}/model.safetensors")
        del sizes[:]
        target = nn.Linear(2048, rows, dtype=getattr(torch, dtype))
        ms.load(target, checkpoint, dtype=dtype, in_place=True, max_memory_bytes=budget_bytes)
    assert torch.equal(target.weight, model.weight.to(target.weight.dtype))
    replies, requested_bytes = map(max, zip(*sizes, strict=True))
    assert replies <= max(budget_bytes // (5 << 19), 1)  # the client has at most 2.5 MiB of each
    assert requested_bytes <= budget_bytes or budget_bytes >= 5 << 19


@pytest.mark.slow
def test_a_process_that_ends_after_its_last_request(files: tuple[Path, str]) -> None:
    """A thread of the client has given the reply to the loop, and has not returned from that when Python ends."""
    directory, url = files
    save_file({"w": torch.ones(2)}, directory / "x.safetensors")
    code = f"""
import asyncio.selector_events, threading, time
import modelstate as ms

loop = asyncio.selector_events.BaseSelectorEventLoop
write = loop._write_to_self
def slow(self):
    write(self)
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.3)
loop._write_to_self = slow
print(len(ms.open("{url}/x.safetensors")))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
