"""`modelstate.save` to a bucket, before which a proxy breaks requests."""

import io
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate.errors import TargetExistsError, UnsavableError, WriteFailedError
from tests.proxy import Fault, FaultProxy, HttpRequest
from tests.remote.kills import exit_code_of_killed
from tests.sweeps import sample, spread

MB = 1 << 20


@pytest.fixture
def content(bucket: str, s3_client: Callable[[], Any], tmp_path: Path) -> Callable[[], dict[str, bytes]]:
    """The objects of the bucket by name, read with another client."""

    def read() -> dict[str, bytes]:
        client = s3_client()
        listed = client.list_objects_v2(Bucket=bucket).get("Contents", [])
        return {item["Key"]: client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read() for item in listed}

    return read


def state(nbytes: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    half = nbytes // 8
    tensors = {name: torch.rand(half, generator=generator) for name in ("a", "b")}
    return tensors | {"c": torch.arange(5), "empty": torch.empty(0)}


def opened(objects: dict[str, bytes], name: str, folder: Path) -> ms.Checkpoint:
    """Opens a checkpoint of a bucket from a copy of all objects."""
    for key, data in objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
    checkpoint = ms.open(folder / name)
    checkpoint.verify()
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [1000, 12 * MB])
def test_the_object_is_the_file(
    bucket: str, content: Callable[[], dict[str, bytes]], tmp_path: Path, nbytes: int
) -> None:
    report = ms.save(state(nbytes), f"s3://{bucket}/run/model.safetensors")
    ms.save(state(nbytes), tmp_path / "model.safetensors")
    objects = content()
    assert objects == {"run/model.safetensors": (tmp_path / "model.safetensors").read_bytes()}
    assert report.files == (f"s3://{bucket}/run/model.safetensors",)
    assert report.bytes == len(objects["run/model.safetensors"])


@pytest.mark.slow
def test_a_large_object_is_sent_in_parts_of_bounded_size(bucket: str, proxy: FaultProxy) -> None:
    ms.save(state(12 * MB), f"s3://{bucket}/model.safetensors")
    first, second, last = sorted(request.nbytes for request in proxy.requests if request.method == "PUT")[::-1]
    assert 5 * MB <= first == second < 7 * MB
    assert last <= 2  # see ObjectWriter.wait_for_parts


@pytest.mark.slow
def test_shards_and_back_to_one_file(bucket: str, content: Callable[[], dict[str, bytes]], tmp_path: Path) -> None:
    path = f"s3://{bucket}/model.safetensors"
    for number, shard_bytes in enumerate([None, 1 * MB, 2 * MB, None]):
        report = ms.save(state(3 * MB, number), path, shard_size_bytes=shard_bytes)
        objects = content()
        assert {f"s3://{bucket}/{name}" for name in objects} == set(report.files)
        folder = tmp_path / str(number)
        folder.mkdir()
        assert torch.equal(opened(objects, "model.safetensors", folder).tensor("b"), state(3 * MB, number)["b"])


@pytest.mark.slow
def test_shards_of_another_checkpoint_stay(bucket: str, content: Callable[[], dict[str, bytes]]) -> None:
    for name in ("a", "b", "a"):
        ms.save(state(3 * MB), f"s3://{bucket}/{name}.safetensors", shard_size_bytes=2 * MB)
    assert sum(name.startswith("b-") for name in content()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [1000, 12 * MB])
def test_an_object_is_kept(bucket: str, content: Callable[[], dict[str, bytes]], nbytes: int) -> None:
    path = f"s3://{bucket}/model.safetensors"
    ms.save(state(nbytes), path, overwrite=False)
    before = content()
    assert len(before) == 1
    with pytest.raises(TargetExistsError):
        ms.save(state(nbytes, 1), path, overwrite=False)
    with pytest.raises(TargetExistsError):
        ms.save(state(3 * MB, 1), path, overwrite=False, shard_size_bytes=MB)
    assert content() == before


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [1000, 12 * MB])
def test_an_object_that_another_writer_puts_meanwhile_is_kept(
    bucket: str, proxy: FaultProxy, s3_client: Callable[[], Any], content: Callable[[], dict[str, bytes]], nbytes: int
) -> None:
    def put_first(request: Any) -> None:
        if request.headers.get("if-none-match"):
            s3_client().put_object(Bucket=bucket, Key="model.safetensors", Body=b"of another writer")

    proxy.fault = put_first
    with pytest.raises(TargetExistsError):
        ms.save(state(nbytes), f"s3://{bucket}/model.safetensors", overwrite=False)
    assert content() == {"model.safetensors": b"of another writer"}


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [1000, 12 * MB])
def test_a_file_for_torch_load(
    bucket: str, content: Callable[[], dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = f"s3://{bucket}/run/model.pt"
    report = ms.save(state(nbytes), path)
    assert (report.files, report.bytes) == ((path,), len(content()["run/model.pt"]))
    loaded = torch.load(io.BytesIO(content()["run/model.pt"]), weights_only=True)
    assert all(map(torch.equal, loaded.values(), state(nbytes).values()))
    with pytest.raises(TargetExistsError):
        ms.save(state(nbytes, 1), path, overwrite=False)
    ms.convert_checkpoint(path, path, dtype="float16")
    assert ms.open(path).tensor("a").dtype == torch.float16
    assert len(content()) == 1
    assert not list(tmp_path.iterdir())


CREATES_UPLOAD = "?uploads"
FAULTS = (Fault.UNAVAILABLE, Fault.RESET, Fault.CUT, Fault.LOST_REPLY)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"overwrite": False}, {"shard_size_bytes": 4 * MB}], ids=str)
def test_each_fault_at_each_request(
    bucket: str,
    proxy: FaultProxy,
    s3_client: Callable[[], Any],
    content: Callable[[], dict[str, bytes]],
    tmp_path: Path,
    options: dict[str, Any],
    record_property: Callable[[str, object], None],
) -> None:
    """A save succeeds, or raises and leaves what was there. Nothing else is left."""
    path, client = f"s3://{bucket}/model.safetensors", s3_client()
    large = state(6 * MB)
    ms.save(large, path, **options)
    points = [(fault, number) for number in range(1, len(proxy.requests) + 1) for fault in FAULTS]
    succeeded, visited = list[int](), sample(points, kind=lambda point: 0, more=2)
    for fault, number in visited:
        for name in content():
            client.delete_object(Bucket=bucket, Key=name)
        if options.get("overwrite", True):
            ms.save(state(1000, 1), path)
        before = content()
        proxy.reset()
        proxy.fault = lambda request, fault=fault, number=number: fault if request.number == number else None  # type: ignore[misc]
        try:
            ms.save(large, path, **options)
        except WriteFailedError:
            assert content() == before
            # A reply that the client could not read had the name of the upload: nothing can abort it.
            allowed = CREATES_UPLOAD in proxy.requests[number - 1].target
        else:
            folder = tmp_path / f"{fault.name}-{number}"
            folder.mkdir()
            objects = content()
            opened(objects, "model.safetensors", folder)
            assert len(objects) == (3 if "shard_size_bytes" in options else 1)
            allowed = fault in (Fault.LOST_REPLY, Fault.CUT)
            succeeded.append(number)
        proxy.fault = None
        uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        assert not uploads or allowed
        for item in uploads:
            client.abort_multipart_upload(Bucket=bucket, Key=item["Key"], UploadId=item["UploadId"])
    record_property("faults", f"{len(visited)}, {len(visited) - len(succeeded)} errors")


@pytest.mark.slow
def test_a_tensor_that_changes_meanwhile_is_not_saved(
    bucket: str, proxy: FaultProxy, content: Callable[[], dict[str, bytes]]
) -> None:
    tensors = state(12 * MB)

    def change(request: Any) -> None:
        if "uploads" in request.target:
            tensors["b"][-1] += 1

    proxy.fault = change
    with pytest.raises(WriteFailedError, match="changed while they were saved"):
        ms.save(tensors, f"s3://{bucket}/model.safetensors")
    assert content() == {}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("https://example.com/model.safetensors", "nothing can be saved to https"),
        ("hf://org/name/model.safetensors", "nothing can be saved to hf"),
        ("s3:///model.safetensors", "cannot be put here"),
        ("s3://bucket/a/../b.safetensors", "cannot be put here"),
    ],
)
def test_places_that_take_no_file(path: str, expected: str) -> None:
    with pytest.raises(UnsavableError, match=expected):
        ms.save(state(1000), path)


def test_a_bucket_that_does_not_exist(proxy: FaultProxy) -> None:
    with pytest.raises(WriteFailedError, match="no such bucket"):
        ms.save(state(1000), "s3://there-is-no-such-bucket/model.safetensors")


def _saver(path: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    ms.save({"a": torch.ones(3 << 20), "b": torch.ones(3)}, path, shard_size_bytes=8 * MB)


@pytest.mark.slow
def test_kill_at_each_request(
    bucket: str,
    proxy: FaultProxy,
    content: Callable[[], dict[str, bytes]],
    tmp_path: Path,
    s3_client: Callable[[], Any],
    record_property: Callable[[str, object], None],
) -> None:
    """SIGKILL in the middle of a save leaves the checkpoint that was there, or the new one."""
    path, environment = f"s3://{bucket}/model.safetensors", {"AWS_ENDPOINT_URL": proxy.url}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    _saver(path, environment)
    requests = len(proxy.requests)
    outcomes = []
    for number in spread(range(2, requests + 1), 2):
        for name in content():
            s3_client().delete_object(Bucket=bucket, Key=name)
        ms.save(state(1000), path)
        assert exit_code_of_killed(proxy, number, _saver, path, environment) == -signal.SIGKILL
        folder = tmp_path / str(number)
        folder.mkdir()
        checkpoint = opened(content(), "model.safetensors", folder)
        outcomes.append("c" in checkpoint)
        if not outcomes[-1]:
            assert torch.equal(checkpoint.tensor("a"), torch.ones(3 << 20))
    assert outcomes[0]
    record_property("kills", f"{len(outcomes)}, {outcomes.count(True)} old")


@pytest.mark.slow
@pytest.mark.parametrize("in_shards", [True, False])
def test_a_late_removal_leaves_what_another_save_has_written(in_shards: bool, proxy: FaultProxy, bucket: str) -> None:
    """While the removal of the old checkpoint is repeated, another save replaces what is there in the other form."""
    path = f"s3://{bucket}/model.safetensors"
    forms: list[dict[str, int]] = [{"shard_size_bytes": 8}, {}]
    first, second = forms if in_shards else forms[::-1]
    ms.save(state(64), path, **second)
    others = []

    def fail_once(request: HttpRequest) -> Fault | None:
        if "delete" in request.target and not others:
            others.append(None)
            others[:] = [ms.save(state(64, 2), path, **second)]
            return Fault.UNAVAILABLE
        return None

    proxy.fault = fail_once
    ms.save(state(64, 1), path, **first)
    proxy.fault = None
    assert others[0] is not None
    with ms.open(path) as checkpoint:
        assert checkpoint.verify()
        assert torch.equal(checkpoint.tensor("a"), state(64, 2)["a"])
