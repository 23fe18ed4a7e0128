"""`modelstate.copy` and `modelstate cp`: whole files from anywhere to anywhere, or an error and nothing."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn

import modelstate as ms
from modelstate.cli.main import app
from modelstate.remote import requests, upload
from modelstate.testing import Fault, FaultProxy
from tests.lossy_disk import lossy_disk

obstore = pytest.importorskip("obstore")


def make_model(seed: int = 0, width: int = 512) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def objects(client: Any, bucket: str, prefix: str = "") -> dict[str, bytes]:
    found = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {
        item["Key"].removeprefix(prefix): client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
        for item in found
    }


def write_one(directory: Path) -> None:
    ms.save(make_model(), directory / "model.safetensors")


def write_shards(directory: Path) -> None:
    ms.save(make_model(), directory / "model.safetensors", shard_size_bytes=2_500_000)


def write_torch(directory: Path) -> None:
    torch.save(make_model().state_dict(), directory / "model.pt")


def write_dcp(directory: Path) -> None:
    dcp.save(make_model().state_dict(), checkpoint_id=directory, no_dist=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [write_one, write_shards, write_torch, write_dcp])
def test_a_copy_has_the_same_files_everywhere(
    write: Callable[[Path], None], tmp_path: Path, bucket: str, s3_client: Callable[[], Any]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    write(here)
    expected = contents(here)
    report = ms.copy(here, f"s3://{bucket}/run/")
    assert report.bytes == sum(map(len, expected.values()))
    assert report.verified_bytes >= (0 if write is write_dcp else 0.99 * report.bytes)
    ms.copy(f"s3://{bucket}/run", f"s3://{bucket}/other/")
    assert objects(s3_client(), bucket, "run/") == objects(s3_client(), bucket, "other/") == expected
    assert ms.copy(f"s3://{bucket}/other", f"{there}/").files[0] == str(there / Path(report.files[0]).name)
    assert contents(there) == expected
    assert ms.diff(there, make_model()).is_equal


@pytest.mark.slow
def test_a_file_takes_the_name_of_the_target(files: tuple[Path, str], tmp_path: Path) -> None:
    write_one(files[0])
    for target in ("copy.safetensors", "below/", "below/copy.safetensors"):
        ms.copy(f"{files[1]}/model.safetensors?signature=word", f"{tmp_path}/new/{target}")
    expected = (files[0] / "model.safetensors").read_bytes()
    assert contents(tmp_path / "new") == dict.fromkeys(
        ("copy.safetensors", "below/model.safetensors", "below/copy.safetensors"), expected
    )


def test_what_is_there_stays_unless_it_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_one(tmp_path / "a")
    target = tmp_path / "copy.safetensors"
    ms.save(make_model(1), target, shard_size_bytes=2_500_000)
    before = contents(tmp_path)
    with pytest.raises(ms.errors.TargetExistsError):
        ms.copy(tmp_path / "a", target)
    assert contents(tmp_path) == before
    ms.copy(tmp_path / "a", target, overwrite=True)
    assert ms.diff(target, make_model()).is_equal
    assert {path.name for path in tmp_path.iterdir()} == {"a", "copy.safetensors"}  # no index, no shards of it


def test_shards_are_not_mixed_with_those_that_are_there(tmp_path: Path) -> None:
    for directory in (tmp_path / "a", tmp_path / "b"):
        directory.mkdir()
        write_shards(directory)
    before = contents(tmp_path)
    with pytest.raises(ms.errors.TargetExistsError):
        ms.copy(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ms.errors.SaveTargetError, match="as a whole"):
        ms.copy(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert contents(tmp_path) == before
    (tmp_path / "b" / "model.safetensors.index.json").unlink()  # as a copy that was killed leaves it
    ms.copy(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("write", [write_one, write_shards, write_torch])
def test_a_damaged_file_is_not_copied(write: Callable[[Path], None], tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    write(here)
    damaged = sorted(here.iterdir())[0]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ms.errors.ChecksumError, match="checksums say"):
        ms.copy(here, f"{there}/")
    assert not contents(there)


@pytest.mark.slow
def test_an_upload_that_fails_leaves_nothing(
    tmp_path: Path, proxy: FaultProxy, bucket: str, s3_client: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "FIRST_WAIT", timedelta(milliseconds=2))
    monkeypatch.setattr(upload, "FIRST_WAIT_SECONDS", 0.002)
    write_shards(tmp_path)
    for wanted in ("-00002-of", "index.json"):
        proxy.fault = lambda request, wanted=wanted: (
            Fault.RESET if wanted in request.target and request.method == "PUT" else None
        )
        with pytest.raises(ms.errors.WriteFailedError):
            ms.copy(tmp_path, f"s3://{bucket}/run/")
        left = objects(s3_client(), bucket)
        assert not any(name.endswith("index.json") for name in left)
        if wanted == "-00002-of":
            assert not left
        s3_client().delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in left or ["x"]]})


def test_the_command(tmp_path: Path) -> None:
    write_one(tmp_path)
    source, target = str(tmp_path / "model.safetensors"), str(tmp_path / "copy.safetensors")
    done = CliRunner().invoke(app, ["cp", source, target, "--json"])
    assert done.exit_code == 0, done.output
    fields = json.loads(done.output)
    assert fields["files"] == [target]
    assert fields["bytes"] == Path(source).stat().st_size
    assert CliRunner().invoke(app, ["cp", source, target]).exit_code == 1
    done = CliRunner().invoke(app, ["cp", source, target, "--overwrite"])
    assert "xxh3-128 digests of" in done.output


def test_a_store_and_other_files_are_refused(tmp_path: Path) -> None:
    with ms.Store(tmp_path / "run") as store:
        store.save(1, {"model": make_model(width=8)})
        with pytest.raises(ms.errors.SourceTypeError, match=r'to do: give one object of it: store.open\("model"\)'):
            ms.open(store)  # type: ignore[arg-type]
        with pytest.raises(ms.errors.SourceTypeError, match=r"checkpoint.tensor\(name\)"):
            ms.open(store.open("model")["0.weight"])  # type: ignore[arg-type]
    with pytest.raises(ms.errors.SourceNotFoundError, match=r"it is a store.*open\('model'\)"):
        ms.copy(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(ms.errors.OptionError):
        ms.copy({"a": torch.ones(2)}, tmp_path / "x.safetensors")  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ms.errors.UnknownFormatError):
        ms.copy(tmp_path / "config.json", tmp_path / "other.json")


def test_a_copy_is_not_hidden_by_a_file_of_its_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    ms.save(make_model(0), tmp_path / "a" / "model.safetensors", shard_size_bytes=600_000)
    ms.save(make_model(1), tmp_path / "b" / "model.safetensors")
    with pytest.raises(ms.errors.TargetExistsError):
        ms.copy(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ms.errors.SaveTargetError):
        ms.copy(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert ms.diff(tmp_path / "b", make_model(1)).is_equal


@pytest.mark.slow
def test_an_index_that_is_refused_leaves_no_shards(
    tmp_path: Path, bucket: str, s3_client: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = obstore.put_async

    def refuse(store: Any, key: str, *args: Any, **kwargs: Any) -> object:
        if key.endswith(".index.json"):
            raise obstore.exceptions.PermissionDeniedError("status code: 403 Forbidden")
        return put(store, key, *args, **kwargs)

    monkeypatch.setattr(obstore, "put_async", refuse)
    write_shards(tmp_path)
    with pytest.raises(ms.errors.WriteFailedError, match="refused"):
        ms.copy(tmp_path, f"s3://{bucket}/run/")
    with pytest.raises(ms.errors.WriteFailedError, match="refused"):
        ms.save(make_model(), f"s3://{bucket}/saved.safetensors", shard_size_bytes=2_500_000)
    assert not objects(s3_client(), bucket)


def test_shards_of_another_index_are_not_replaced(tmp_path: Path) -> None:
    for directory in (tmp_path / "a", tmp_path / "b"):
        directory.mkdir()
        write_shards(directory)
    (tmp_path / "b" / "model.safetensors.index.json").rename(tmp_path / "b" / "other.safetensors.index.json")
    before = contents(tmp_path)
    with pytest.raises(ms.errors.SaveTargetError, match="another checkpoint"):
        ms.copy(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert contents(tmp_path) == before


def test_a_target_that_cannot_be_made(tmp_path: Path) -> None:
    ms.save(make_model(), tmp_path / "model.safetensors")
    for target in ("model.safetensors/x.safetensors", "model.safetensors/x/"):
        with pytest.raises(ms.ModelStateError):
            ms.copy(tmp_path / "model.safetensors", f"{tmp_path}/{target}")


def test_a_copy_is_there_after_a_power_cut(tmp_path: Path) -> None:
    ms.save(make_model(), tmp_path / "model.safetensors")
    (tmp_path / "disk").mkdir()
    with lossy_disk(tmp_path / "disk") as disk:
        ms.copy(tmp_path / "model.safetensors", tmp_path / "disk" / "runs" / "first" / "model.safetensors")
    disk.write(tmp_path / "after", len(disk.calls), "synced")
    assert ms.verify(tmp_path / "after" / "runs" / "first" / "model.safetensors")


@pytest.mark.slow
def test_the_root_of_a_bucket(bucket: str, tmp_path: Path, s3_client: Callable[[], Any]) -> None:
    with pytest.raises(ms.errors.SaveTargetError, match="the root of a bucket"):
        ms.save(make_model(), f"s3://{bucket}")
    ms.save(make_model(), tmp_path / "model.safetensors")
    for target in (f"s3://{bucket}", f"s3://{bucket}/"):
        ms.copy(tmp_path / "model.safetensors", target, overwrite=True)
    ms.save(make_model(), tmp_path / "other.safetensors", shard_size_bytes=600_000)
    ms.copy(tmp_path / "other.safetensors", f"s3://{bucket}/")
    names = [item["Key"] for item in s3_client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert {"model.safetensors", "other.safetensors.index.json"} <= {*names}
    with pytest.raises(ms.errors.TargetExistsError):
        ms.copy(tmp_path / "model.safetensors", f"s3://{bucket}/other.safetensors")


@pytest.mark.slow
def test_one_file_takes_the_place_of_an_index(tmp_path: Path, bucket: str, s3_client: Callable[[], Any]) -> None:
    url = f"s3://{bucket}/model.safetensors"
    for replace in (
        lambda: ms.save(make_model(1), url),
        lambda: ms.copy(tmp_path / "model.safetensors", url, overwrite=True),
    ):
        ms.save(make_model(0), url, shard_size_bytes=100_000)
        ms.save(make_model(1), tmp_path / "model.safetensors")
        replace()
        assert ms.diff(f"s3://{bucket}", make_model(1)).is_equal
        listed = s3_client().list_objects_v2(Bucket=bucket)["Contents"]
        assert [item["Key"] for item in listed] == ["model.safetensors"]
