"""Ranks that save a sharded model into a bucket: each uploads objects of its own, and one commit shows all of them."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import modelstate as ms
from modelstate.distributed import uploading
from modelstate.formats.manifest import KEY
from modelstate.remote import requests
from modelstate.store import bucket as buckets
from tests.distributed import models
from tests.distributed.ranks import WORLD_SIZE, Ranks, error_of
from tests.proxy import Fault, FaultProxy, HttpRequest, fault_proxy
from tests.remote import servers
from tests.sweeps import EXHAUSTIVE

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow
KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}


@dataclass
class Server:
    """A server of S3, with a proxy for each rank in front of it."""

    url: str
    client: Any
    """That of boto3, without a proxy."""
    proxies: list[FaultProxy]
    bucket: str = ""

    @property
    def urls(self) -> list[str]:
        return [proxy.url for proxy in self.proxies]

    def names(self) -> list[str]:
        return sorted(item["Key"] for item in self.client.list_objects_v2(Bucket=self.bucket).get("Contents", ()))

    def read(self, name: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.bucket, Key=name)["Body"].read()
        return data


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    pytest.importorskip("moto")
    boto3 = pytest.importorskip("boto3")  # not above: each new rank would import it, which takes longer than a save
    name = os.environ.get("MODELSTATE_S3_SERVER", "moto")
    if reason := servers.missing(name):
        pytest.skip(reason)
    with servers.object_store(name) as url, ExitStack() as opened:
        client = boto3.client("s3", endpoint_url=url, **KEYS)
        yield Server(url, client, [opened.enter_context(fault_proxy(url)) for _ in range(WORLD_SIZE)])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Four ranks of this module alone, since `connect` changes settings of their processes."""
    started = Ranks()
    yield started
    started.close()


@pytest.fixture
def server(started: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server with an empty bucket, which this process reaches without a proxy."""
    started.bucket = f"test-{os.urandom(6).hex()}"
    started.client.create_bucket(Bucket=started.bucket)
    for proxy in started.proxies:
        proxy.fault = None
        proxy.resumed.clear()
        proxy.reset()
    for name, value in environment(started.url).items():
        monkeypatch.setenv(name, value)
    return started


def environment(url: str) -> dict[str, str]:
    names = {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    return names | {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def connect(urls: list[str], part_bytes: int = 1024) -> None:
    """Has this rank use its proxy, give up soon, and make small objects: each rank has some of a network."""
    os.environ.update(environment(urls[dist.get_rank()]))
    requests.RETRIES, requests.FIRST_WAIT = 1, timedelta(milliseconds=10)
    buckets.LEASE_SECONDS = 4.0
    uploading.PART_BYTES = part_bytes


# Equality with a save on one machine.


def save(urls: list[str], kind: str, path: str, shard_bytes: int | None) -> tuple[str, ...]:
    connect(urls, part_bytes=256)  # the smallest network has 500 bytes
    net = models.sharded(kind, seed=3)
    report = ms.save(net, path, shard_size_bytes=shard_bytes, extra={"epoch": 3})
    again = models.sharded("tp" if kind == "fsdp" else kind, seed=4)
    ms.load(again, path, verify=True)
    check_equal(again, models.plain(kind, seed=3))
    return report.files


def check_equal(net: models.Net, expected: models.Net) -> None:
    named = {**dict(expected.named_parameters(remove_duplicate=False)), **dict(expected.named_buffers())}
    for name, tensor in models.gathered(net).items():
        assert torch.equal(tensor, named[name]), name


def manifest_of(index: bytes) -> Any:
    return json.loads(json.loads(index)["metadata"][KEY])


@pytest.mark.parametrize(
    ("kind", "shard_bytes"),
    # The other kinds are saved to files in `test_save_sharded`, which splits them in the same way.
    [(kind, size) for size in (None, 300) for kind in models.SHARD]
    if EXHAUSTIVE
    else [("fsdp", 300), ("fsdp+tp", None), ("empty", None), ("tied", None)],
)
def test_the_checkpoint_is_that_of_one_machine(
    kind: str, shard_bytes: int | None, ranks: Ranks, server: Server, tmp_path: Path
) -> None:
    path = f"s3://{server.bucket}/run/model.safetensors"
    files, *others = ranks.values(save, server.urls, kind, path, shard_bytes)
    assert others == [files] * 3
    assert sorted(files) == [f"s3://{server.bucket}/{name}" for name in server.names()]
    assert shard_bytes or 2 < len(files) <= 1 + WORLD_SIZE
    net = models.plain(kind, seed=3)
    ms.save(net, tmp_path / "model.safetensors", shard_size_bytes=300, extra={"epoch": 3})
    index = (tmp_path / "model.safetensors.index.json").read_bytes()
    assert manifest_of(server.read("run/model.safetensors.index.json")) == manifest_of(index)
    found = {}
    for url in files[1:]:
        found |= safetensors.torch.load(server.read(url.split("/", 3)[3]))  # another reader
    assert found
    state = net.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    with ms.open(path) as checkpoint:
        assert checkpoint.verify() > 0
        assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in state.items())


# A store.


def objects_of(value: int, kind: str = "fsdp") -> dict[str, Any]:
    return models.filled(value, kind, frozen=True)


def restored(store: ms.Store, kind: str = "fsdp") -> int:
    """Restores the latest step, and returns its number, which all elements have."""
    objects = objects_of(-1, kind)
    step = store.restore(objects).step
    for tensor in models.changing(objects):
        assert torch.equal(tensor, torch.full_like(tensor, step))
    frozen = models.sharded(kind).blocks[0].state_dict()
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in objects["model"].blocks[0].state_dict().items())
    return step


def use_store(urls: list[str], path: str) -> list[tuple[int, int]]:
    connect(urls, part_bytes=4096)
    sizes = []
    with ms.Store(path, keep=2) as store:
        for step in (1, 2):
            saved = store.save(step, objects_of(step))
            sizes.append((saved.written_bytes, saved.linked_bytes))
        pending = store.save(3, objects_of(3), background=True)
        saved = pending.result()
        sizes.append((saved.written_bytes, saved.linked_bytes))
        assert saved.pruned == (1,)
        assert [restored(store, kind) for kind in ("hsdp", "shard1")] == [3, 3]
    for steps in ((1, 2), (3,)):
        with ms.Store(f"{path}-deltas", delta=ms.Delta()) as store:
            for step in steps:
                store.save(step, objects_of(step))
            assert restored(store) == store.infos()[-1].patches + 1 == step
    return sizes


def test_a_store_uploads_what_has_changed(ranks: Ranks, server: Server) -> None:
    path = f"s3://{server.bucket}/run"
    sizes, *others = ranks.values(use_store, server.urls, path)
    assert others == [sizes] * 3
    frozen = sum(tensor.nbytes for tensor in models.plain("fsdp").blocks[0].state_dict().values())
    assert sizes[0][1] == 0
    for written, linked in sizes[1:]:
        assert linked > frozen
        assert written + linked == pytest.approx(sizes[0][0], rel=0.2)
    store = ms.Store(path)
    assert (store.steps(), store.verify()) == ((2, 3), {2: "", 3: ""})
    assert ms.Store(f"{path}-deltas").verify() == {1: "", 2: "", 3: ""}
    assert referenced(store) == {name for name in server.names() if name.startswith("run/data/")}


def referenced(store: ms.Store) -> set[str]:
    names = (entry.file_names() for entry in store.index.read_all())
    return {f"run/data/{name}" for of_entry in names for name in of_entry or ()}


# Errors.


def save_value(urls: list[str], url: str, value: int, how: str, overwrite: bool = True) -> tuple[str, str]:
    """Saves a tensor for each rank to upload, in a file or as a step of a store."""
    connect(urls)
    mesh = models.mesh(2, 2)["inner"] if how.startswith("race") else models.mesh(4)
    value = dist.get_rank() // 2 if how.startswith("race") else value
    state: Any = {
        str(number): distribute_tensor(torch.full((64, 8), float(value)), mesh, [Shard(0)], src_data_rank=None)
        for number in range(4)
    }
    if how.endswith("store"):
        with ms.Store(f"{url}/run", timeout_seconds=20) as store:
            return error_of(lambda: store.save(1 if how.startswith("race") else value, {"model": Holder(state)}))
    path = f"{url}/model.safetensors"
    return error_of(lambda: ms.save(state, path, overwrite=overwrite, timeout_seconds=20))


class Holder(nn.Module):
    """A module whose state is a mapping of tensors."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_buffer(f"b{name}", tensor)


def value_in(server: Server, how: str) -> float:
    """The value of all elements in the file, or in the latest step."""
    url = f"s3://{server.bucket}"
    checkpoint = ms.Store(f"{url}/run").open("model") if how.endswith("store") else ms.open(f"{url}/model.safetensors")
    values = {float(value) for name in checkpoint for value in checkpoint.tensor(name).unique()}
    assert len(values) == 1
    return values.pop()


def without_leases(server: Server) -> set[str]:
    return {name for name in server.names() if "/lease-" not in name and "/claim-" not in name}


@pytest.mark.parametrize("how", ["file", "store"])
@pytest.mark.parametrize("rank", [0, 1, 3] if EXHAUSTIVE else [0, 3])
def test_an_upload_that_fails_on_one_rank_is_an_error_on_all(how: str, rank: int, ranks: Ranks, server: Server) -> None:
    url = f"s3://{server.bucket}"
    assert ranks.values(save_value, server.urls, url, 1, how) == [("", "")] * 4
    before = without_leases(server)

    def refuse(request: HttpRequest) -> Fault | None:
        is_upload = request.method in ("PUT", "POST") and ("/data/" in request.target or "-of-" in request.target)
        return Fault.UNAVAILABLE if is_upload else None

    server.proxies[rank].fault = refuse
    for kind, text in ranks.values(save_value, server.urls, url, 2, how):
        assert kind == "WriteFailedError"
        assert "503" in text
        assert f"rank {rank}" in text or "failed on" not in text
    server.proxies[rank].fault = None
    assert without_leases(server) == before
    assert value_in(server, how) == 1
    assert ranks.values(save_value, server.urls, url, 3, how) == [("", "")] * 4
    assert value_in(server, how) == 3


def cancel_save(urls: list[str], url: str, who: list[int], stalled: Path, cancelled: Path) -> tuple[str, int, int]:
    """Some ranks cancel a save when an upload of a rank has stalled. Returns the error, and two restored steps."""
    connect(urls)
    with ms.Store(f"{url}/run", timeout_seconds=60) as store:
        pending = store.save(2, objects_of(2), background=True)
        assert pending is not None
        while not stalled.exists():
            time.sleep(0.01)
        if dist.get_rank() in who:
            assert pending.cancel()
            cancelled.touch()
        kind, _ = error_of(pending.result)
        first = restored(store)
        store.save(3, objects_of(3))
        return kind, first, restored(store)


def save_first(urls: list[str], url: str) -> None:
    connect(urls)
    with ms.Store(f"{url}/run") as store:
        store.save(1, objects_of(1))


def stalling(stalled: Path) -> Callable[[HttpRequest], Fault | None]:
    """Returns what makes the server stall at the first upload of tensors, when it creates a file."""

    def stall(request: HttpRequest) -> Fault | None:
        if request.method == "PUT" and "/data/" in request.target and not stalled.exists():
            stalled.touch()
            return Fault.STALL
        return None

    return stall


@pytest.mark.parametrize("rank", [0, 1] if EXHAUSTIVE else [0])
def test_a_save_is_cancelled_while_the_server_stalls(rank: int, ranks: Ranks, server: Server, tmp_path: Path) -> None:
    url, stalled = f"s3://{server.bucket}", tmp_path / "stalled"
    ranks.values(save_first, server.urls, url)

    proxy = server.proxies[rank]
    proxy.fault = stalling(stalled)
    try:
        found = ranks.values(cancel_save, server.urls, url, [*range(4)], stalled, tmp_path / "cancelled", timeout=25)
    finally:
        proxy.resumed.set()
    assert found == [("BackgroundCancelledError", 1, 3)] * 4
    store = ms.Store(f"{url}/run")
    assert store.verify() == {1: "", 3: ""}
    assert referenced(store) == {name for name in server.names() if name.startswith("run/data/")}


@pytest.mark.parametrize("how", ["race, file", "race, store"])
def test_two_runs_race(how: str, ranks: Ranks, server: Server) -> None:
    """Two ranks save one state while the two others save another one: exactly one of the saves succeeds."""
    for number in range(25 if EXHAUSTIVE else 1):
        url = f"s3://{server.bucket}/{number}"
        found = [kind for kind, _ in ranks.values(save_value, server.urls, url, 0, how, False)]
        assert found[0] == found[1]
        assert found[2] == found[3]
        first, second = found[0], found[2]
        assert "" in (first, second)
        assert {first, second} & {"TargetExistsError", "LockedError"}
        checkpoint = (
            ms.Store(f"{url}/run").open("model") if how.endswith("store") else ms.open(f"{url}/model.safetensors")
        )
        winner = 0.0 if first == "" else 1.0
        assert all(checkpoint.tensor(name).eq(winner).all() for name in checkpoint)
        assert checkpoint.verify() > 0


@pytest.mark.parametrize("how", ["file", "store"])
def test_kill_of_a_rank_at_each_request(
    how: str, ranks: Ranks, server: Server, record_property: Callable[[str, object], None]
) -> None:
    """SIGKILL of a rank: the step before is there or the whole new one, and the next run goes on at once."""
    url, step = f"s3://{server.bucket}", 1
    for value in (1, 2):
        for proxy in server.proxies:
            proxy.reset()
        assert ranks.values(save_value, server.urls, url, value, how) == [("", "")] * 4
    counts = [len(proxy.requests) for proxy in server.proxies]
    points = [(rank, number) for rank, requests in enumerate(counts) for number in range(1, requests + 1)]
    assert min(counts) > 0
    if not EXHAUSTIVE:
        points = [(0, counts[0] // 2), (0, counts[0] - 1), (2, counts[2]) if how == "store" else (1, 1)]
    last, new = 2, 0
    for step, (rank, number) in enumerate(points, 3):
        pid = ranks.values(os.getpid)[rank]

        def kill(request: HttpRequest, pid: int = pid, number: int = number) -> None:
            if request.number == number:
                os.kill(pid, signal.SIGKILL)

        for proxy in server.proxies:
            proxy.reset()
        server.proxies[rank].fault = kill
        outcomes = ranks.until_failure(save_value, server.urls, url, step, how)
        server.proxies[rank].fault = None
        assert all(outcome.died or outcome.value is not None for outcome in outcomes.values())
        found = value_in(server, how)
        assert found in (last, step)
        assert found == step or not any(outcome.value == ("", "") for outcome in outcomes.values())
        new += found == step
        last = int(found)
        if how == "store":
            assert not any(ms.Store(f"{url}/run").verify().values())
    record_property("kills", f"{len(points)}, {new} new")
    assert ranks.values(save_value, server.urls, url, step + 1, how) == [("", "")] * 4
    assert value_in(server, how) == step + 1
    if how == "store":
        with mock.patch.object(buckets, "LEFTOVER_SECONDS", -10.0), ms.Store(f"{url}/run") as store:
            store.prune(keep=1)
            assert referenced(store) == {name for name in server.names() if name.startswith("run/data/")}
