"""Object stores of other implementations: which conditions each keeps, and that checkpoints and stores work on it.

Only moto is installed for `make test`; `make test-remote` installs the others. docs/remote.md has the table.
"""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import TargetExistsError, WriteFailedError
from modelstate.remote import client, location
from tests.proxy import Fault, FaultProxy, HttpRequest, fault_proxy
from tests.remote import servers
from tests.sweeps import sample

obstore = pytest.importorskip("obstore")
pytestmark = pytest.mark.slow
SERVERS = {"moto": "s3", "ministack": "s3", "azurite": "az", "gcs": "gs"}
"""The servers that can be written to, and the scheme of each."""


class Running:
    """A server behind a proxy, which has an empty bucket."""

    def __init__(self, server: str, direct: str, proxy: FaultProxy) -> None:
        self.proxy, self.bucket = proxy, f"test-{secrets.token_hex(6)}"
        self.url = f"{SERVERS[server]}://{self.bucket}"
        if server == "azurite":
            servers.create_container(direct, self.bucket)
        elif SERVERS[server] == "s3":
            boto3 = pytest.importorskip("boto3")
            keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
            boto3.client("s3", endpoint_url=direct, **keys).create_bucket(Bucket=self.bucket)

    @property
    def store(self) -> Any:
        return client.store_of(location.locate(self.url))[0]

    def names(self) -> list[str]:
        return [item["path"] for page in obstore.list(self.store) for item in page]


@pytest.fixture(scope="module", params=SERVERS)
def started(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    if reason := servers.missing(request.param):
        pytest.skip(reason)
    if SERVERS[request.param] == "s3":
        pytest.importorskip("boto3")
        pytest.importorskip("moto")
    with servers.object_store(request.param) as url:
        yield request.param, url


@pytest.fixture
def running(started: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    server, url = started
    with fault_proxy(url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", servers.azure_connection(proxy.url))
        yield Running(server, url, proxy)


def outcome(call: Callable[[], object]) -> str:
    """How a request under a condition ends."""
    try:
        call()
    except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError) as error:
        return type(error).__name__
    return "done"


def test_each_server_keeps_the_conditions(running: Running) -> None:
    store = running.store
    tag = obstore.put(store, "a", b"first")["e_tag"]
    assert outcome(lambda: obstore.put(store, "b", b"new", mode="create")) == "done"
    assert outcome(lambda: obstore.put(store, "a", b"other", mode="create")) == "AlreadyExistsError"
    assert outcome(lambda: obstore.copy(store, "b", "a", overwrite=False)) == "AlreadyExistsError"
    assert outcome(lambda: obstore.copy(store, "b", "c", overwrite=False)) == "done"
    assert outcome(lambda: obstore.get(store, "a", options={"if_match": tag})) == "done"
    assert outcome(lambda: obstore.get(store, "a", options={"if_match": '"0123"'})) == "PreconditionError"
    put_if = {"version": "123456"} if running.url.startswith("gs:") else {"e_tag": '"0123"'}
    assert outcome(lambda: obstore.put(store, "a", b"other", mode=put_if)) == "PreconditionError"
    assert bytes(obstore.get(store, "a").bytes()) == b"first"


def test_a_checkpoint_is_saved_and_loaded(running: Running) -> None:
    tensors = {"a": torch.rand(3 << 20), "b": torch.arange(5), "empty": torch.empty(0)}
    for path in ("x/model.safetensors", "y.safetensors"):
        ms.save(tensors, f"{running.url}/{path}", overwrite=False)
        with pytest.raises(TargetExistsError):
            ms.save(tensors, f"{running.url}/{path}", overwrite=False)
    checkpoint = ms.open(f"{running.url}/x")
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in tensors.items())
    assert sorted(running.names()) == ["x/model.safetensors", "y.safetensors"]


def test_a_store_keeps_its_promises(running: Running) -> None:
    model = nn.Linear(8, 8)
    with ms.Store(f"{running.url}/run", keep=2) as store:
        for step in (1, 2, 3):
            nn.init.constant_(model.weight, step)
            store.save(step, {"model": model, "step": step})
        assert (store.steps(), store.latest()) == ((2, 3), 3)
    with ms.Store(f"{running.url}/run") as store:
        nn.init.constant_(model.weight, 0)
        assert store.restore({"model": model, "step": 0}, 2)["step"] == 2
        assert model.weight[0, 0] == 2
        assert store.verify() == {2: "", 3: ""}


@pytest.mark.parametrize("started", [name for name in SERVERS if name != "moto"], indirect=True)
@pytest.mark.parametrize("overwrite", [True, False])
def test_each_fault_at_each_request(running: Running, overwrite: bool) -> None:
    """A save succeeds, or raises and leaves what was there. `test_save.py` has the same for moto."""
    path, tensors = f"{running.url}/model.safetensors", {"a": torch.rand(3 << 19)}
    ms.save(tensors, path, overwrite=overwrite)
    numbers = range(1, len(running.proxy.requests) + 1)
    faults = (Fault.UNAVAILABLE, Fault.RESET, Fault.CUT, Fault.LOST_REPLY)
    for fault, number in sample([(fault, number) for number in numbers for fault in faults], lambda point: 0, 3):
        before = {"a": torch.zeros(3)}
        if overwrite:
            ms.save(before, path)
        else:
            obstore.delete(running.store, running.names())
        running.proxy.reset()

        def once(request: HttpRequest, fault: Fault = fault, number: int = number) -> Fault | None:
            return fault if request.number == number else None

        running.proxy.fault = once
        saved = True
        try:
            ms.save(tensors, path, overwrite=overwrite)
        except WriteFailedError:
            saved = False
        running.proxy.fault = None
        if saved or overwrite:
            assert torch.equal(ms.open(path).tensor("a"), (tensors if saved else before)["a"])
        assert running.names() == ["model.safetensors"] * (saved or overwrite)


def test_a_removal_goes_on_after_an_object_that_is_not_there(running: Running) -> None:
    """The reply to a removal is lost, so that the repetition does not find the object."""
    state = {str(number): torch.zeros(2) for number in range(24)}
    ms.save(state, f"{running.url}/model.safetensors", shard_size_bytes=1)
    lost = []

    def lose_one(request: HttpRequest) -> Fault | None:
        if (request.method == "DELETE" or "delete" in request.target) and not lost:
            lost.append(request)
            return Fault.LOST_REPLY
        return None

    running.proxy.fault = lose_one
    ms.save(state, f"{running.url}/model.safetensors", shard_size_bytes=1)
    running.proxy.fault = None
    assert lost
    assert len(running.names()) == 25
