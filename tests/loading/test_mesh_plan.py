"""`plan_for_mesh`: what is counted, the table, and wrong arguments. `tests/distributed` compares it with real ranks."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import OptionError, SourceNotFoundError
from modelstate.loading import MeshPlan, mesh_plan, plan_for_mesh, read_parallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(4096, 16, bias=False)
        self.columns = nn.Linear(4096, 16)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("table", torch.ones(10))


def planned(folder: Path, mesh: Any, parallel: Any = None, source: Any = None, **options: Any) -> MeshPlan:
    net = Net()
    if source is None:
        source = folder / "model.safetensors"
        ms.save(net, source)
    return plan_for_mesh(ms.plan(net, source, **options), net, mesh, parallel)


def test_fsdp_splits_the_first_dimension_over_the_last_of_the_mesh(tmp_path: Path) -> None:
    plan = planned(tmp_path, (4,))
    whole = (2 * 16 * 4096 + 3 * 16) * 4
    assert [rank.held_bytes for rank in plan.ranks] == [whole // 4 + 40] * 4
    assert [rank.read_bytes for rank in plan.ranks] == [whole // 4 + 40] * 4
    assert {rank.requests for rank in plan.ranks} == {6}
    assert plan.imbalance == 1
    hybrid = planned(tmp_path, (3, 4))
    assert [rank.held_bytes for rank in hybrid.ranks] == [whole // 4 + 40] * 12


def test_rowwise_reads_runs_of_each_row(tmp_path: Path) -> None:
    plan = planned(tmp_path, (2,), {"columns": "rowwise", "rows": "replicate"})
    weight = 16 * 4096 * 4
    others = weight + 3 * 16 * 4 + 40
    assert [rank.read_bytes for rank in plan.ranks] == [weight // 2 + others] * 2
    # A row of the columns is a run of 8 kB, with a gap of 8 kB; each of the five others is one run.
    assert [rank.requests for rank in plan.ranks] == [16 + 5] * 2


def test_what_rules_compute_is_sliced_down_to_the_file(tmp_path: Path) -> None:
    state = dict(Net().state_dict())
    state["both"] = torch.cat([state.pop("rows.weight"), state.pop("columns.weight")])
    torch.save(state, tmp_path / "fused.pt")
    rules = [ms.rules.Split("both", ["rows.weight", "columns.weight"])]
    plan = planned(tmp_path, (4,), source=tmp_path / "fused.pt", rules=rules)
    assert plan.read_bytes == planned(tmp_path, (4,)).read_bytes


def test_a_cast_changes_what_is_held_and_not_what_is_read(tmp_path: Path) -> None:
    full, half = planned(tmp_path, (4,)), planned(tmp_path, (4,), dtype="bf16")
    assert half.held_bytes * 2 == full.held_bytes
    assert half.read_bytes == full.read_bytes


def test_the_table_has_a_row_for_ranks_that_do_the_same(tmp_path: Path) -> None:
    plan = planned(tmp_path, (6,))
    lines = str(plan).splitlines()
    assert lines[0].endswith("model.safetensors into Net on a mesh of 6, 6 ranks")
    assert [line.split()[0] for line in lines[3:]] == ["ranks", "0", "5"]
    assert lines[4].startswith("0 to 4 ")
    described = json.loads(plan.to_json())
    assert described["mesh"] == [6]
    assert described["parallel"] == "fsdp"
    assert described["ranks"][5]["held_bytes"] == plan.ranks[5].held_bytes
    assert sum(rank["read_bytes"] for rank in described["ranks"]) == described["read_bytes"] == plan.read_bytes


@pytest.mark.parametrize(
    ("mesh", "parallel", "what"),
    [
        ((), None, "shape of a mesh"),
        ((2, 0), None, "shape of a mesh"),
        (4, None, "shape of a mesh"),
        (None, {"rows": "colwise"}, "shape of a mesh"),
        ((2, 2, 2), None, "shape of a mesh"),
        ((2, 2, 2, 2), {"rows": "colwise"}, "shape of a mesh"),
        ((2,), {"rows": "columnwise"}, "style that is unknown"),
        ((2,), {"raws": "colwise"}, "match no module"),
        ((2,), "colwise", "not a mapping from patterns"),
        ((2,), {3: "colwise"}, "not a mapping from patterns"),
        ((2,), {"norm": "colwise"}, "no colwise parallelism for this module"),
    ],
)
def test_wrong_arguments(mesh: Any, parallel: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=what):
        planned(tmp_path, mesh, parallel)


def test_a_plan_with_problems(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="2 problems"):
        planned(tmp_path, (2,), source={"rows.weight": torch.ones(16, 4096)}, allow_missing=["[!n]*"])


def test_a_source_instead_of_a_plan() -> None:
    net = Net()
    with pytest.raises(OptionError, match="not a plan of a load") as raised:
        plan_for_mesh(net.state_dict(), net, (2,))  # type: ignore[arg-type]
    assert "modelstate.plan" in raised.value.expected


def test_a_parameter_without_dimensions(tmp_path: Path) -> None:
    net = nn.Module()
    net.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(OptionError, match=r"scale: fully_shard does not take"):
        plan_for_mesh(ms.plan(net, {"scale": torch.tensor(2.0)}), net, (2,))


def test_the_file_of_tensor_parallelism(tmp_path: Path) -> None:
    path = tmp_path / "parallel.toml"
    path.write_text('"layers.*.q" = "colwise"\n"layers.*.o" = "rowwise"  # the way back\n')
    assert read_parallel(path) == {"layers.*.q": "colwise", "layers.*.o": "rowwise"}
    path.write_text("[layers]\nq = 1\n")
    with pytest.raises(OptionError, match="no styles"):
        read_parallel(path)
    for text in (b"layers\n", b"\xff\xfe", b"a = " + b"[" * 20_000):
        path.write_bytes(text)
        with pytest.raises(OptionError, match="is not TOML"):
            read_parallel(path)
    with pytest.raises(SourceNotFoundError):
        read_parallel(tmp_path / "none.toml")


class Decoder(nn.Module):
    """The names and shapes of a Llama of 70B parameters."""

    def __init__(self) -> None:
        super().__init__()
        width, hidden = 8192, 28672
        sizes = {"q": (width, width), "k": (width, 1024), "v": (width, 1024), "o": (width, width)}
        sizes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}

        def layer() -> nn.Module:
            linear = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
            return nn.ModuleDict({**linear, "first": nn.RMSNorm(width), "second": nn.RMSNorm(width)})

        self.embed = nn.Embedding(128256, width)
        self.layers = nn.ModuleList(layer() for _ in range(80))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 128256, bias=False)


def write_hole(net: nn.Module, path: Path) -> int:
    """Writes a checkpoint of a model in bfloat16 without its values. Returns the bytes of the tensors."""
    header, end = {}, 0
    for name, tensor in net.state_dict().items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


STYLES = {
    **{f"layers.*.{name}": "colwise" for name in ("q", "k", "v", "gate", "up")},
    **{f"layers.*.{name}": "rowwise" for name in ("o", "down")},
    "head": "colwise",
    "embed": "rowwise",
}


@pytest.mark.slow
def test_a_large_model_on_a_large_mesh_is_planned_by_the_kinds_of_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        net = Decoder().to(torch.bfloat16)
    end = write_hole(net, tmp_path / "model.safetensors")
    computed = mock.Mock(side_effect=mesh_plan._cost)
    monkeypatch.setattr(mesh_plan, "_cost", computed)
    plan = plan_for_mesh(ms.plan(net, tmp_path / "model.safetensors"), net, (64, 8), STYLES)
    assert len(plan.plan.steps) == 723
    assert len(plan.ranks) == 512
    assert computed.call_count < 30  # for 723 tensors and 512 ranks
    # The norms are replicated over the ranks of tensor parallelism.
    norms = 161 * 8192 * 2
    assert plan.held_bytes == end + 7 * norms
    assert plan.imbalance < 1.01
