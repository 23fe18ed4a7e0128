"""Ctrl-C during a request that stalls arrives at once, and leaves everything as after any other error."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.proxy import Fault, FaultProxy, HttpRequest, fault_proxy
from tests.remote.servers import file_server
from tests.sweeps import EXHAUSTIVE

pytest.importorskip("obstore")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_part_at_once")]
MB = 1 << 20
AT_ONCE_SECONDS = 20.0
"""Far less than the 60 s after which the client gives a stalled request up, and far more than an interrupt takes."""


@contextmanager
def interrupted(proxy: FaultProxy, number: int) -> Iterator[list[HttpRequest]]:
    """Stalls the reply to a request, counted from now on, and interrupts this process then.

    Yields a list that has the request, if there is one, when the block ends. The block must raise at once then.
    """
    proxy.stalled.clear()
    proxy.resumed.clear()
    proxy.reset()
    ended, sent, stalled = threading.Event(), list[float](), list[HttpRequest]()

    def fault(request: HttpRequest) -> Fault | None:
        if request.number != number:
            return None
        stalled.append(request)
        return Fault.STALL

    def interrupt() -> None:
        while not proxy.stalled.wait(0.01):
            if ended.is_set():
                return
        time.sleep(0.05)  # the client waits for the rest
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    proxy.fault = fault
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield stalled
    except KeyboardInterrupt:
        assert time.monotonic() - sent[0] < AT_ONCE_SECONDS
    else:
        assert not stalled, "the interrupt is lost"
    finally:
        ended.set()
        thread.join()
        proxy.fault = None
        proxy.resumed.set()


def numbers(most: int) -> Iterator[int]:
    """Requests to be stalled: all of them, or the first ones and a few."""
    yield from range(1, most) if EXHAUSTIVE else (1, 2, 3, 4, 6, 9, 13, 18)


def make_model(seed: int, device: str = "cpu") -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(512, 512, device=device) for _ in range(6)))


def is_equal(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.fixture
def http(tmp_path: Path) -> Iterator[tuple[str, FaultProxy]]:
    """The URL of a checkpoint of `make_model(0)`, and the proxy before its server."""
    directory = tmp_path / "served"
    directory.mkdir()
    ms.save(make_model(0), directory / "model.safetensors")
    with file_server(directory) as server, fault_proxy(server) as proxy:
        yield f"{proxy.url}/model.safetensors", proxy


@pytest.mark.parametrize(("device", "options"), [("cpu", {}), ("meta", {"dtype": "bf16"})], ids=["plain", "meta-cast"])
def test_a_load(http: tuple[str, FaultProxy], device: str, options: dict[str, Any]) -> None:
    url, proxy = http
    for number in numbers(16):
        target = make_model(1, device)
        with interrupted(proxy, number) as stalled:
            ms.load(target, url, **options)
        if not stalled:
            break
        assert device == "meta" or is_equal(target, make_model(1))
        assert all(parameter.is_meta == (device == "meta") for parameter in target.parameters())
    assert number > 3
    target = make_model(1, device)
    ms.load(target, url)
    assert is_equal(target, make_model(0))


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}], ids=["plain", "cast"])
def test_a_background_load_is_cancelled(http: tuple[str, FaultProxy], options: dict[str, Any]) -> None:
    url, proxy = http
    target = make_model(1)
    proxy.reset()
    proxy.fault = lambda request: Fault.STALL if request.number > 1 else None
    try:
        handle = ms.load(target, url, background=True, **options)
        assert proxy.stalled.wait(AT_ONCE_SECONDS)
        begin = time.monotonic()
        assert handle.cancel()
        assert time.monotonic() - begin < AT_ONCE_SECONDS
    finally:
        proxy.fault = None
        proxy.resumed.set()
    assert is_equal(target, make_model(1))
    ms.load(target, url)
    assert is_equal(target, make_model(0))


@pytest.mark.parametrize(
    ("width", "options", "overwrite"),
    [(64, {"shard_size_bytes": 4096}, True), (2048, {}, True)],
    ids=["small-shards-overwritten", "parts-file-overwritten"],
)
def test_a_save(
    bucket: str, proxy: FaultProxy, s3_client: Callable[[], Any], width: int, options: dict[str, Any], overwrite: bool
) -> None:
    state = {"a": torch.ones(width, width // 2), "b": torch.ones(width, width // 4)}
    old = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    aborted = 0
    for number in numbers(30):
        path = f"s3://{bucket}/{number}/model.safetensors"
        if overwrite:
            ms.save(old, path)
        with interrupted(proxy, number) as stalled:
            ms.save(state, path, overwrite=overwrite, **options)
        if not stalled:
            break
        try:
            found = ms.open(f"s3://{bucket}/{number}")
        except ms.errors.SourceNotFoundError:
            assert not overwrite
        else:
            assert any(all(torch.equal(found.tensor(name), each[name]) for name in state) for each in (state, old))
        is_part = "partNumber=" in stalled[0].target and "x-amz-copy-source" not in stalled[0].headers
        # The last part has a few bytes, and belongs to the completion, which cannot be undone.
        if is_part and stalled[0].nbytes > MB and not options:
            aborted += 1
            assert not s3_client().list_multipart_uploads(Bucket=bucket).get("Uploads")
        proxy.resumed.set()
        for left in s3_client().list_multipart_uploads(Bucket=bucket).get("Uploads", ()):
            s3_client().abort_multipart_upload(Bucket=bucket, Key=left["Key"], UploadId=left["UploadId"])
    assert number > 2
    assert width == 64 or options or aborted > overwrite  # at each of the two parts


def test_a_store(bucket: str, proxy: FaultProxy) -> None:
    url, model = f"s3://{bucket}/run", make_model(0)
    with ms.Store(url) as store:
        store.save(1, {"model": model})

    def save() -> None:
        with ms.Store(url) as store:
            store.save(last + 1, {"model": make_model(last + 1)})

    def prune() -> None:
        with ms.Store(url, keep=1) as store:
            store.prune()

    def restore() -> None:
        restored = make_model(99)
        try:
            ms.Store(url).restore({"model": restored})
        except KeyboardInterrupt:
            assert is_equal(restored, make_model(99))
            raise
        assert is_equal(restored, make_model(last) if last > 1 else model)

    for operation in (save, restore, lambda: ms.Store(url).infos(), prune):
        for number in [*numbers(40)][:: 1 if EXHAUSTIVE else 2]:
            last = ms.Store(url).latest()
            assert last is not None
            with interrupted(proxy, number) as stalled:
                operation()
            latest = ms.Store(url).latest()
            assert latest in ((last, last + 1) if operation is save else (last,))
            ms.Store(url).verify()
            if not stalled:
                break
        assert number > 2
