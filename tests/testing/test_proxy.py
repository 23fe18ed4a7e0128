"""The proxy that breaks requests, before a server of files."""

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelstate.testing import Fault, FaultProxy, fault_proxy
from tests.remote.servers import file_server


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[FaultProxy]:
    (tmp_path / "file").write_bytes(b"0123456789" * 100)
    with file_server(tmp_path) as url, fault_proxy(url) as running:
        yield running


def get(proxy: FaultProxy, target: str = "/file", **headers: str) -> bytes:
    request = urllib.request.Request(proxy.url + target, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        content: bytes = answer.read()
    return content


def test_forwards_and_counts(proxy: FaultProxy) -> None:
    assert get(proxy) == b"0123456789" * 100
    assert get(proxy, Range="bytes=5-8") == b"5678"
    assert [(request.number, request.method, request.target) for request in proxy.requests] == [
        (1, "GET", "/file"),
        (2, "GET", "/file"),
    ]
    assert proxy.requests[1].headers["range"] == "bytes=5-8"
    assert proxy.downloaded_bytes == 1004
    proxy.reset()
    assert (proxy.requests, proxy.downloaded_bytes) == ([], 0)


def test_unavailable(proxy: FaultProxy) -> None:
    proxy.fault = lambda request: Fault.UNAVAILABLE if request.number == 1 else None
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get(proxy)
    assert get(proxy)


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.LOST_REPLY])
def test_reset(proxy: FaultProxy, fault: Fault) -> None:
    proxy.fault = lambda request: fault
    with pytest.raises((ConnectionResetError, urllib.error.URLError, http.client.RemoteDisconnected)):
        get(proxy)


def test_cut_body(proxy: FaultProxy) -> None:
    proxy.fault = lambda request: Fault.CUT
    with pytest.raises(http.client.IncompleteRead) as caught:
        get(proxy)
    assert len(caught.value.partial) == 500


@pytest.mark.parametrize("target", ["/file", "/no-such-file"])
def test_a_stalled_reply_goes_on_when_it_is_resumed(proxy: FaultProxy, target: str) -> None:
    proxy.fault = lambda request: Fault.STALL
    address = urllib.parse.urlsplit(proxy.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    connection.request("GET", target)
    assert proxy.stalled.wait(60)
    if target == "/file":
        answer = connection.getresponse()
        assert answer.read(500) == b"0123456789" * 50
        assert proxy.downloaded_bytes == 500
    proxy.resumed.set()
    rest = answer.read() if target == "/file" else connection.getresponse().read()
    assert rest == (b"0123456789" * 50 if target == "/file" else b"no such file\n")
    connection.close()


def test_a_stale_listing_is_the_one_before(proxy: FaultProxy, tmp_path: Path) -> None:
    (tmp_path / "list-type=").write_bytes(b"old")
    assert get(proxy, "/list-type=") == b"old"
    (tmp_path / "list-type=").write_bytes(b"new")
    proxy.fault = lambda request: Fault.STALE
    assert get(proxy, "/list-type=") == b"old"
    proxy.fault = None
    assert get(proxy, "/list-type=") == b"new"


@pytest.mark.slow
def test_latency_and_bandwidth(proxy: FaultProxy) -> None:
    proxy.latency_seconds, proxy.bytes_per_second = 0.05, 10_000.0
    begin = time.monotonic()
    get(proxy)
    assert time.monotonic() - begin >= 0.15  # a lower bound: 50 ms, and 1,000 bytes at 10,000 a second
