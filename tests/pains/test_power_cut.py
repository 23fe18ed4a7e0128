"""A save that was reported done, and a power cut: stock savers never ask the system to put the file on the disk."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import modelstate as ms
from tests.lossy_disk import lossy_disk

SAVERS = {
    "torch": "torch.save",
    "safetensors": "safetensors.torch.save_file",
    "ours": "ms.save",
}


@pytest.fixture(scope="module")
def syncs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often each save syncs its file or its directory."""
    if not shutil.which("strace"):
        pytest.skip("strace is not here")
    folders = {how: tmp_path_factory.mktemp(how) for how in SAVERS}
    saves = [f"{save}({{'a': torch.ones(9)}}, {str(folders[how] / 'x')!r})" for how, save in SAVERS.items()]
    code = "\n".join(["import torch, safetensors.torch, modelstate as ms", *saves])
    log = tmp_path_factory.mktemp("trace") / "trace"
    trace = ["strace", "-f", "-qq", "-y", "-o", str(log), "-e", "trace=fsync,fdatasync,sync_file_range,syncfs"]
    done = subprocess.run([*trace, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr.lower() or done.returncode:
        pytest.skip(f"strace: {done.stderr[-200:]}")
    # With the descriptors' paths (-y): importing torch may sync files of its own.
    return {how: log.read_text().count(str(folder)) for how, folder in folders.items()}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_stock_never_syncs(syncs: dict[str, int], how: str) -> None:
    assert syncs[how] == 0


@pytest.mark.slow
def test_ours_syncs_the_file_and_its_directory(syncs: dict[str, int]) -> None:
    assert syncs["ours"] == 2


def test_ours_is_there_after_a_power_cut(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with lossy_disk(tmp_path / "disk") as disk:
        ms.save({"a": torch.ones(9)}, tmp_path / "disk" / "x")
    disk.write(tmp_path / "after", len(disk.calls), "synced")
    assert torch.equal(ms.open(tmp_path / "after" / "x").tensor("a"), torch.ones(9))
