"""`cache=`: what is read of a server once is read from the disk afterwards, unless it has changed or is damaged."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from tests.commands import run_command
from tests.programs import CONTEXT
from tests.proxy import FaultProxy, fault_proxy
from tests.remote.servers import FileServer, http_server

pytest.importorskip("obstore")
BLOCK_BYTES = 1 << 20
HEADER_BYTES = 65_536


def make_model(seed: int = 0, device: str = "cpu") -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(512, 512, device=device) for _ in range(4)])


@pytest.fixture
def proxy(files: tuple[Path, str]) -> Iterator[FaultProxy]:
    ms.save(make_model(), files[0] / "model.safetensors")
    with fault_proxy(files[1]) as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> ms.Cache:
    return ms.Cache(tmp_path / "cache", max_bytes=64 << 20)


def url_of(proxy: FaultProxy) -> str:
    return f"{proxy.url}/model.safetensors"


def check_load(proxy: FaultProxy, cache: ms.Cache | None, seed: int = 0) -> None:
    target = make_model(device="meta")
    ms.load(target, url_of(proxy), cache=cache)
    for mine, stored in zip(target.parameters(), make_model(seed).parameters(), strict=True):
        assert torch.equal(mine, stored)


def blocks_of(cache: ms.Cache) -> list[Path]:
    return sorted(path for path in cache.directory.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_second_load_asks_for_the_version_alone(proxy: FaultProxy, cache: ms.Cache) -> None:
    nbytes = sum(parameter.nbytes for parameter in make_model().parameters())
    check_load(proxy, cache)
    assert nbytes <= proxy.downloaded_bytes <= 1.02 * nbytes + HEADER_BYTES
    proxy.reset()
    check_load(proxy, ms.Cache(cache.directory))
    assert (len(proxy.requests), proxy.downloaded_bytes) == (1, HEADER_BYTES)


@pytest.mark.slow
def test_each_function_that_opens_takes_a_cache(proxy: FaultProxy, cache: ms.Cache, files: tuple[Path, str]) -> None:
    check_load(proxy, cache)
    proxy.reset()
    ms.load(make_model(1), ms.plan(make_model(1), url_of(proxy), cache=cache))
    assert ms.diff(url_of(proxy), files[0] / "model.safetensors", cache=cache).is_equal
    assert ms.inspect(url_of(proxy), cache=cache).tensors
    ms.open([url_of(proxy)], cache=cache).tensor("0.weight")
    ms.load(make_model().bfloat16(), url_of(proxy), dtype="bfloat16", cache=cache, max_memory_bytes=4 << 20)
    ms.load(nn.Linear(512, 512), ms.open(url_of(proxy), key="1", cache=cache))
    assert proxy.downloaded_bytes == len(proxy.requests) * HEADER_BYTES == 6 * HEADER_BYTES


@pytest.mark.slow
def test_another_version_is_read_anew(proxy: FaultProxy, cache: ms.Cache, files: tuple[Path, str]) -> None:
    check_load(proxy, cache)
    before = ms.open(url_of(proxy), cache=cache)
    ms.save(make_model(1), files[0] / "model.safetensors")
    check_load(proxy, cache, seed=1)
    assert torch.equal(before.tensor("1.weight"), make_model()[1].weight)  # the blocks of its version are there


@pytest.mark.slow
@pytest.mark.parametrize(
    "damaged", [lambda block: b"", lambda block: block[:-1] + bytes([block[-1] ^ 1]), lambda block: block + b"x"]
)
def test_a_damaged_block_is_read_again(proxy: FaultProxy, cache: ms.Cache, damaged: Callable[[bytes], bytes]) -> None:
    check_load(proxy, cache)
    whole = {path: path.read_bytes() for path in blocks_of(cache)}
    assert len(whole) == 5
    for path, block in whole.items():
        path.write_bytes(damaged(block))
    check_load(proxy, cache)
    assert {path: path.read_bytes() for path in blocks_of(cache)} == whole


@pytest.mark.slow
def test_the_oldest_blocks_make_room(proxy: FaultProxy, tmp_path: Path) -> None:
    small = ms.Cache(tmp_path / "cache", max_bytes=3 * BLOCK_BYTES)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "mine").write_bytes(b"x" * 4 * BLOCK_BYTES)
    for _ in range(2):
        check_load(proxy, small)
        blocks = [path for path in blocks_of(small) if path.name != "mine"]
        assert 0 < sum(path.stat().st_size for path in blocks) <= 3 * BLOCK_BYTES
    assert (tmp_path / "cache" / "mine").exists()


@pytest.mark.slow
@pytest.mark.parametrize("directory", [__file__, "/proc/none"])
def test_a_directory_that_cannot_be_written_is_no_error(proxy: FaultProxy, directory: str) -> None:
    with pytest.warns(ms.errors.CacheWarning, match="nothing more is kept") as caught:
        check_load(proxy, ms.Cache(directory))
    assert len(caught) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes are of POSIX")
def test_a_full_disk_is_no_error(proxy: FaultProxy, cache: ms.Cache) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES // 2, limits[1]))  # a write beyond it is cut short
    try:
        with pytest.warns(ms.errors.CacheWarning):
            check_load(proxy, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(path.stat().st_size < BLOCK_BYTES // 2 for path in blocks_of(cache))  # the last block is a short one
    check_load(proxy, ms.Cache(cache.directory))


def _load_often(url: str, directory: Path) -> None:
    target = make_model(device="meta")
    for _ in range(3):
        ms.load(target, url, cache=ms.Cache(directory, max_bytes=2 * BLOCK_BYTES))
    assert all(map(torch.equal, target.state_dict().values(), make_model().state_dict().values()))


@pytest.mark.slow
def test_processes_share_a_directory_that_is_too_small(proxy: FaultProxy, cache: ms.Cache) -> None:
    processes = [CONTEXT.Process(target=_load_often, args=(url_of(proxy), cache.directory)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert all(path.name.isdecimal() for path in blocks_of(cache))


@pytest.mark.parametrize("tag", [{}, {"ETag": 'W/"1"'}], ids=["none", "weak"])
def test_files_without_a_strong_etag_are_not_kept(tmp_path: Path, cache: ms.Cache, tag: dict[str, str]) -> None:
    """A weak one is that of several versions whose bytes differ."""

    class Tagged(FileServer):
        directory = tmp_path

        def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            others = {name: value for name, value in (headers or {}).items() if name != "ETag"}
            super()._reply(status, body, others | tag)

    ms.save(make_model(), tmp_path / "model.safetensors")
    with http_server(Tagged) as url:
        ms.load(make_model(device="meta"), f"{url}/model.safetensors", cache=cache)
    assert not blocks_of(cache)


@pytest.mark.slow
def test_commands_take_the_directory(proxy: FaultProxy, files: tuple[Path, str], tmp_path: Path) -> None:
    cache = ["--cache", str(tmp_path / "cache")]
    local, copy = str(files[0] / "model.safetensors"), str(tmp_path / "copy.safetensors")
    for command in (
        ["diff", url_of(proxy), local],
        ["inspect", url_of(proxy), "--stats"],
        ["convert", url_of(proxy), copy],
    ):
        proxy.reset()
        done = run_command(*command, *cache)
        assert done.exit_code == 0, done.output
    assert (len(proxy.requests), proxy.downloaded_bytes) == (1, HEADER_BYTES)


@pytest.mark.parametrize("argument", ["/tmp", 5, True])
def test_other_arguments_are_refused(argument: object) -> None:
    with pytest.raises(ms.errors.OptionError, match="must be a modelstate"):
        ms.open({"a": torch.ones(2)}, cache=argument)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("directory", "nbytes"), [(3, 1 << 30), ("x", 5), ("x", True), ("x", 2.5e9), ("x", 2 * BLOCK_BYTES - 1)]
)
def test_other_caches_are_refused(directory: str, nbytes: int) -> None:
    with pytest.raises(ms.errors.OptionError):
        ms.Cache(directory, max_bytes=nbytes)


@pytest.mark.slow
def test_what_was_not_asked_for_is_not_kept(tmp_path: Path, cache: ms.Cache) -> None:
    class Long(FileServer):
        directory = tmp_path
        more = b"Z" * (3 << 20)

        def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            super()._reply(status, body + self.more * (status == 206), headers)

    stored = {"a": torch.rand(1024, 1024), "b": torch.rand(1024, 1024)}
    ms.save(stored, tmp_path / "model.safetensors")
    with http_server(Long) as url:
        with ms.open(f"{url}/model.safetensors", cache=cache) as checkpoint:
            assert torch.equal(checkpoint.tensor("a"), stored["a"])
        Long.more = b""
        with ms.open(f"{url}/model.safetensors", cache=cache) as checkpoint:
            assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in stored.items())


@pytest.mark.slow
def test_a_block_in_the_place_of_another_one_is_requested_again(proxy: FaultProxy, cache: ms.Cache) -> None:
    check_load(proxy, cache)
    first, second = blocks_of(cache)[1:3]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    proxy.reset()
    check_load(proxy, ms.Cache(cache.directory))
    assert 2 * BLOCK_BYTES <= proxy.downloaded_bytes <= 2 * BLOCK_BYTES + HEADER_BYTES
