"""The servers that the tests of remote checkpoints use."""

import os
import secrets
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from modelstate.remote import client, requests, upload
from tests.proxy import FaultProxy, fault_proxy
from tests.remote.servers import file_server, missing, object_store


@pytest.fixture(autouse=True)
def _small_and_fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts of 5 MiB, the least that S3 takes, and clients that give up soon."""
    monkeypatch.setattr(upload, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(requests, "RETRIES", 2)
    monkeypatch.setattr(requests, "FIRST_WAIT", timedelta(milliseconds=2))
    client._store.cache_clear()
    yield
    client._store.cache_clear()


@pytest.fixture
def one_part_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads send one part at a time."""
    monkeypatch.setattr(upload, "PARTS_AT_ONCE", 1)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a server of S3 without a proxy: moto, or the one that MODELSTATE_S3_SERVER names."""
    pytest.importorskip("moto")
    server = os.environ.get("MODELSTATE_S3_SERVER", "moto")
    if reason := missing(server):
        pytest.skip(reason)
    with object_store(server) as url:
        yield url


@pytest.fixture(scope="session")
def s3_client(s3_server: str) -> Callable[[], Any]:
    """Another implementation of a client, to look at buckets: returns the client of boto3."""
    boto3 = pytest.importorskip("boto3")
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=s3_server, **keys)
    return lambda: client


@pytest.fixture
def proxy(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultProxy]:
    """A proxy in front of the server, and the environment variables by which clients find the proxy."""
    with fault_proxy(s3_server) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-such-config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-such-credentials"))
        yield running


@pytest.fixture
def bucket(proxy: FaultProxy, s3_client: Callable[[], Any]) -> Iterator[str]:
    """The name of a new bucket of the server."""
    name = f"test-{secrets.token_hex(6)}"
    s3_client().create_bucket(Bucket=name)
    proxy.reset()
    return name


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A directory, and the URL under which its files are served."""
    directory = tmp_path / "served"
    directory.mkdir()
    with file_server(directory) as url:
        yield directory, url
