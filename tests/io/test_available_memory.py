"""The memory that is available, within the limits of control groups."""

from pathlib import Path

import pytest

from modelstate.io import linux

GB = 1 << 30
V1 = {"limit": "memory.limit_in_bytes", "used": "memory.usage_in_bytes", "prefix": "total_"}
V2 = {"limit": "memory.max", "used": "memory.current", "prefix": ""}


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = [(str(tmp_path / root), *rest) for root, (_, *rest) in zip(("v2", "v1"), linux._GROUP_FILES, strict=True)]
    monkeypatch.setattr(linux, "_GROUP_FILES", tuple(files))
    monkeypatch.setattr(linux, "_GROUPS", str(tmp_path / "cgroup"))
    monkeypatch.setattr(linux, "_available_of_system", lambda: 100 * GB)
    return tmp_path


def write_group(directory: Path, names: dict[str, str], limit: str, used: int, cached: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / names["limit"]).write_text(f"{limit}\n")
    (directory / names["used"]).write_text(f"{used}\n")
    prefix = names["prefix"]
    (directory / "memory.stat").write_text(
        f"anon 7\n{prefix}inactive_file {cached - 5}\n{prefix}active_file 5\nslab 3\n"
    )


@pytest.mark.parametrize(("root", "names", "line"), [("v2", V2, "0::"), ("v1", V1, "4:cpu,memory:")], ids=["v2", "v1"])
def test_what_the_limit_of_a_group_leaves(groups: Path, root: str, names: dict[str, str], line: str) -> None:
    (groups / "cgroup").write_text(f"1:name=systemd:/\n{line}/pod/container\n")
    write_group(groups / root / "pod" / "container", names, str(8 * GB), 5 * GB, 2 * GB)
    assert linux.available_bytes() == 5 * GB
    write_group(groups / root / "pod", names, str(6 * GB), 5 * GB, 2 * GB)  # a limit of a group around it
    assert linux.available_bytes() == 3 * GB


def test_in_a_container_the_group_may_be_at_the_root(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/system.slice/docker-4711.scope\n")
    write_group(groups / "v2", V2, str(4 * GB), 3 * GB, GB)
    assert linux.available_bytes() == 2 * GB


def test_more_is_used_than_the_limit_allows(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/\n")
    write_group(groups / "v2", V2, str(GB), 3 * GB, GB)
    assert linux.available_bytes() == 0


@pytest.mark.parametrize("text", ["0::/a\n", "0::/none\n", "", "nothing\n", "3:cpu:/a\n"])
def test_without_a_limit(groups: Path, text: str) -> None:
    (groups / "cgroup").write_text(text)
    write_group(groups / "v2" / "a", V2, "max", 3 * GB, GB)
    assert linux.available_bytes() == 100 * GB
