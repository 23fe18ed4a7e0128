"""A save that was reported done, and a power cut: stock savers never ask the system to put the file on the disk."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import modelstate as ms
from modelstate.testing import lossy_disk

SAVERS = {
    "torch": "torch.save(state, path)",
    "safetensors": "safetensors.torch.save_file(state, path)",
    "ours": "ms.save(state, path)",
}


def syncs(how: str, path: Path) -> int:
    """How often a save syncs the file or its directory."""
    if not shutil.which("strace"):
        pytest.skip("strace is not here")
    code = f"import torch, safetensors.torch, modelstate as ms\nstate, path = {{'a': torch.ones(9)}}, {str(path)!r}\n"
    trace = ["strace", "-f", "-qq", "-y", "-o", f"{path}.trace", "-e", "trace=fsync,fdatasync,sync_file_range,syncfs"]
    done = subprocess.run(
        [*trace, sys.executable, "-c", code + SAVERS[how]], capture_output=True, text=True, check=False
    )
    if "ptrace" in done.stderr.lower() or done.returncode:
        pytest.skip(f"strace: {done.stderr[-200:]}")
    # With the descriptors' paths (-y): importing torch may sync files of its own.
    return sum(str(path.parent) in line for line in Path(f"{path}.trace").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_stock_never_syncs(tmp_path: Path, how: str) -> None:
    assert not syncs(how, tmp_path / "x")


@pytest.mark.slow
def test_ours_syncs_the_file_and_its_directory(tmp_path: Path) -> None:
    assert syncs("ours", tmp_path / "x") == 2


def test_ours_is_there_after_a_power_cut(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with lossy_disk(tmp_path / "disk") as disk:
        ms.save({"a": torch.ones(9)}, tmp_path / "disk" / "x")
    disk.write(tmp_path / "after", len(disk.calls), "synced")
    assert torch.equal(ms.open(tmp_path / "after" / "x").tensor("a"), torch.ones(9))
