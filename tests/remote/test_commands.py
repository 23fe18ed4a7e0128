"""What a location is: commands decide it for buckets as for directories."""

import os
from pathlib import Path

import pytest
import torch

import modelstate as ms
from tests.commands import run_command
from tests.proxy import Fault, FaultProxy, HttpRequest

pytestmark = pytest.mark.slow


@pytest.fixture(params=["directory", "bucket"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory, or a prefix of a bucket, with a file, shards and a store."""
    where = str(tmp_path) if request.param == "directory" else f"s3://{request.getfixturevalue('bucket')}/runs"
    model = torch.nn.Linear(4, 4)
    ms.save(model, f"{where}/one/file.safetensors")
    ms.save(model, f"{where}/shards/model.safetensors", shard_size_bytes=40)
    with ms.Store(f"{where}/store") as store:
        store.save(1, {"model": model})
    return where


@pytest.fixture(autouse=True)
def directories(tmp_path: Path) -> None:
    for name in ("one", "shards"):
        os.mkdir(tmp_path / name)


def run(*arguments: str) -> tuple[int, str, str]:
    done = run_command(*arguments)
    return done.exit_code, done.stdout, done.stderr


def test_commands_on_each_kind_of_location(base: str, tmp_path: Path) -> None:
    for name in ("one/file.safetensors", "one", "one/", "shards", "shards/", "shards/model.safetensors"):
        code, out, err = run("verify", f"{base}/{name}")
        assert (code, "equal to their" in out) == (0, True), err
        assert run("inspect", f"{base}/{name}")[0] == 0
        assert run("diff", f"{base}/one/file.safetensors", f"{base}/{name}")[0] == 0
        assert ms.verify(f"{base}/{name}").tensors == 2
    for name in ("store", "store/"):
        for command in (["verify"], ["store", "verify"]):
            code, out, err = run(*command, f"{base}/{name}")
            assert (code, "step 1" in out) == (0, True), err
        assert run("store", "ls", f"{base}/{name}")[0] == 0
        assert run("store", "prune", f"{base}/{name}", "--keep-last", "1")[0] == 0
        assert run("store", "restore", f"{base}/{name}", str(tmp_path / "out.safetensors"), "--overwrite")[0] == 0
        code, _, err = run("inspect", f"{base}/{name}")
        assert (code, "modelstate store restore" in err) == (1, True), err


def test_a_server_that_does_not_answer_is_waited_for_once(bucket: str, proxy: FaultProxy) -> None:
    def refuse(request: HttpRequest) -> Fault:
        asked.append(request.target)
        return Fault.UNAVAILABLE

    asked: list[str] = []
    proxy.fault = refuse
    code, _, err = run("verify", f"s3://{bucket}/run/model.safetensors")
    assert (code, "answers with errors" in err) == (1, True), err
    assert len(set(asked)) == 1


def test_a_store_command_on_another_location(base: str) -> None:
    for command in ("ls", "verify"):
        code, out, err = run("store", command, f"{base}/one/file.safetensors")
        assert (code, out) == (1, "")
        assert "a store is a directory, and this is a file" in err
        assert f"modelstate inspect {base}/one/file.safetensors" in err
        code, out, err = run("store", command, f"{base}/shards")
        assert (code, out) == (1, "")
        assert "this is not a store of checkpoints" in err
    code, _, err = run("verify", f"{base}/nowhere.safetensors")
    assert code == 1
    assert "there is no such" in err
