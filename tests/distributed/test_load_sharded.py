"""Loads into sharded models: the local shard of every rank is the slice of the load into the whole model."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import modelstate as ms
from modelstate import errors
from modelstate.distributed.agreement import Agreement
from modelstate.torch_compat import sharding
from tests.distributed import models
from tests.distributed.ranks import Ranks, die

pytestmark = pytest.mark.slow


def in_use(path: str) -> list[str]:
    net = models.sharded("fsdp")
    net(torch.arange(5)).sum().backward()
    before = models.gathered(net)
    try:
        ms.load(net, path, dtype="bf16")
    except errors.PlanError as error:
        after = models.gathered(net)
        assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
        return sorted({problem.kind.name for problem in error.problems})
    return []


def test_the_dtype_of_a_model_that_has_run(ranks: Ranks, tmp_path: Path) -> None:
    ms.save(models.plain("fsdp", seed=5), tmp_path / "x.safetensors")
    assert ranks.values(in_use, str(tmp_path / "x.safetensors")) == [["SHARDS_IN_USE"]] * 4


def shown_whole(call: str, path: str) -> bool:
    """After a forward pass FSDP2 shows the root's parameters whole. Of one rank the source does not fit."""
    net = nn.Sequential(nn.Linear(8, 8))
    fully_shard(net, mesh=models.mesh(4))
    before = models.gathered(net)
    with torch.no_grad():
        net(torch.ones(3, 8))
    source = path if dist.get_rank() != 1 else path.replace(".safetensors", "-other.safetensors")
    try:
        _ = ms.load(net, source) if call == "load" else ms.restore({"net": net}, source)
    except errors.ModelStateError:
        after = models.gathered(net)
        return all(torch.equal(before[name], tensor) for name, tensor in after.items())
    return False


@pytest.mark.parametrize("call", ["load", "restore"])
def test_ranks_load_together_where_fsdp_shows_whole_parameters(ranks: Ranks, call: str, tmp_path: Path) -> None:
    fits, other = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 9))
    ms.save(fits if call == "load" else {"net": fits}, tmp_path / "x.safetensors")
    ms.save(other if call == "load" else {"net": other}, tmp_path / "x-other.safetensors")
    assert ranks.values(shown_whole, call, str(tmp_path / "x.safetensors")) == [True] * 4


def freed(path: str) -> bool:
    """A model that has run, whose memory was freed, gives the outputs of the file after a load, and can be trained."""
    net, whole, values = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8)), torch.ones(3, 8)
    fully_shard(net, mesh=models.mesh(4))
    net(values)
    net.to("meta")
    ms.load(net, path)
    ms.load(whole, path)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    output = net(values)
    output.sum().backward()
    optimizer.step()
    return torch.equal(output, whole(values)) and not torch.equal(output, net(values))


def test_a_model_that_has_run_and_was_freed(ranks: Ranks, tmp_path: Path) -> None:
    ms.save(nn.Sequential(nn.Linear(8, 8)), tmp_path / "x.safetensors")
    assert ranks.values(freed, str(tmp_path / "x.safetensors")) == [True] * 4


def mixed_precision(path: str) -> bool:
    """A tied model on meta, with a policy of mixed precision, against the same model sharded with its values."""
    whole = models.plain("tied", seed=1)
    ms.load(whole, path)
    nets = [whole]
    with ms.skeleton():
        nets.append(models.Net(tied=True))
    for net in nets:
        for block in (*net.blocks, net):
            fully_shard(block, mesh=models.mesh(4), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ms.load(nets[1], path)
    outputs = [net(torch.arange(5)) for net in nets]
    outputs[1].float().sum().backward()
    assert nets[1].head.weight is nets[1].embed.weight
    return outputs[1].dtype == torch.bfloat16 and torch.equal(*outputs)


def test_mixed_precision_and_ties_on_meta(ranks: Ranks, tmp_path: Path) -> None:
    ms.save(models.plain("tied", seed=5), tmp_path / "x.safetensors")
    assert ranks.values(mixed_precision, str(tmp_path / "x.safetensors")) == [True] * 4


class Columns(nn.Module):
    """Rows of 1024 bytes, and rows of 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.zeros(32, 256))
        self.long = nn.Parameter(torch.zeros(8, 16384))


def strided(path: str) -> tuple[tuple[str, ...], bool, bool]:
    with ms.skeleton():
        net = Columns()
    fully_shard(net, mesh=models.mesh(4), shard_placement_fn=lambda _: Shard(1))
    plan = ms.plan(net, path)
    ms.load(net, plan)
    whole = Columns()
    ms.load(whole, path)
    found = models.gathered(net)
    same = all(torch.equal(found[name], tensor.detach()) for name, tensor in whole.state_dict().items())
    return plan.notes, same, any(step.mapped for step in plan.steps)


def test_columns_are_read_by_cost_and_the_plan_says_so(ranks: Ranks, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ms.save({"short": torch.randn(32, 256), "long": torch.randn(8, 16384)}, tmp_path / "x.safetensors")
    for notes, same, mapped in ranks.values(strided, str(tmp_path / "x.safetensors")):
        assert same
        assert not mapped
        assert any("2 shards of 139.3 kB read in separate runs, " in note and "with the gaps" in note for note in notes)


def reads_once(kind: str, path: str, meta: bool) -> tuple[bool, int, int, list[str]]:
    """Whether the values are right; the bytes of the model and those that all ranks read; what the plan says."""
    net = models.sharded(kind, meta=meta)
    notes = [note for note in ms.plan(net, path, read_once=True).notes if "broadcast" in note]
    report = ms.load(net, path, read_once=True)
    whole = models.plain(kind, seed=1)
    ms.load(whole, path)
    found = models.gathered(net)
    same = all(torch.equal(found[name], tensor.detach()) for name, tensor in whole.state_dict().items())
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in whole.state_dict().values())
    assert report.reread_bytes == 0 or kind == "tp"  # whose columns are read with the bytes between them
    assert len({rank.read_bytes for rank in report.ranks}) > 1 or kind == "hsdp"
    return same, nbytes, sum(rank.read_bytes for rank in report.ranks), notes


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("kind", ["hsdp", "tp", "replicated"])
def test_one_rank_reads_for_its_replicas(ranks: Ranks, kind: str, meta: bool, tmp_path: Path) -> None:
    torch.save(models.plain(kind, seed=5).state_dict(), tmp_path / "x.pt")
    for same, nbytes, read, notes in ranks.values(reads_once, kind, str(tmp_path / "x.pt"), meta):
        assert same
        if kind != "tp":
            assert read == nbytes
        assert notes
        assert all("of 4 ranks" in note or "of 2 ranks" in note for note in notes)


def loses_a_reader(path: str) -> tuple[str, bool]:
    """A rank that dies while values are sent to its replicas."""
    net = models.sharded("hsdp")
    before = [tensor.clone() for tensor in map(models.local, net.parameters())]
    if dist.get_rank() == 2:
        broadcast = Agreement.broadcast

        def dies(self: Agreement, tensor: torch.Tensor | None, *arguments: Any) -> None:
            if tensor is not None:
                die()
            broadcast(self, tensor, *arguments)

        Agreement.broadcast = dies  # type: ignore[method-assign]
    try:
        # gloo may miss that a rank of a pair has died. The other pair ends with an error of all connections.
        with mock.patch.object(sharding, "CHECK_SECONDS", 0.2):
            ms.load(net, path, read_once=True, timeout_seconds=60)
    except errors.ModelStateError as error:
        after = [models.local(param) for param in net.parameters()]
        return type(error).__name__, all(map(torch.equal, before, after))
    return "", False


def test_a_reader_that_dies(ranks: Ranks, tmp_path: Path) -> None:
    torch.save(models.plain("hsdp", seed=5).state_dict(), tmp_path / "x.pt")
    outcomes = ranks.run(loses_a_reader, str(tmp_path / "x.pt"), timeout=30)
    assert outcomes[2].died
    assert all(outcome.value == ("RankLostError", True) for outcome in outcomes if not outcome.died), outcomes


def replicas_of_a_plain_model(path: str) -> tuple[bool, int, str]:
    """A model without DTensors. Every rank has a replica, as with `DistributedDataParallel`."""
    net, whole = models.plain("fsdp", seed=1), models.plain("fsdp", seed=2)
    report = ms.load(net, path, process_group=dist.group.WORLD, read_once=True)
    ms.load(whole, path)
    same = all(torch.equal(found, tensor) for found, tensor in zip(net.parameters(), whole.parameters(), strict=True))
    missing = path if dist.get_rank() else f"{path}.missing"
    try:
        ms.load(net, missing, process_group=dist.group.WORLD)
        error = ""
    except errors.ModelStateError as raised:
        error = type(raised).__name__
    return same, report.reread_bytes, error


def test_a_plain_model_on_all_ranks_of_a_group(ranks: Ranks, tmp_path: Path) -> None:
    torch.save(models.plain("fsdp", seed=5).state_dict(), tmp_path / "x.pt")
    expected = (True, 0, "SourceNotFoundError")
    assert ranks.values(replicas_of_a_plain_model, str(tmp_path / "x.pt")) == [expected] * 4


class BetweenShards(nn.Module):
    """Replicas on all ranks, and between them a parameter without elements on half of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in {"a": 10, "b": 10, "c": 10, "d": 1}.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))
        mesh = init_device_mesh("cpu", (2, 2))
        self.row = nn.Parameter(distribute_tensor(torch.zeros(1, 4), mesh, [Replicate(), Shard(0)]))
        self.register_parameter("e", nn.Parameter(torch.zeros(1)))


def replicas_between_shards(path: str) -> tuple[bool, bool]:
    """Whether the replicas that one rank reads for all are right, and shards that half of the ranks do not have."""
    net, state = BetweenShards(), torch.load(path)
    ms.load(net, path, read_once=True, timeout_seconds=30)
    row = models.local(net.row)
    return all(torch.equal(getattr(net, name), state[name]) for name in "abcde"), torch.equal(
        row, state["row"][: len(row)]
    )


def test_values_between_empty_shards_are_sent(ranks: Ranks, tmp_path: Path) -> None:
    sizes = {"a": (10,), "b": (10,), "c": (10,), "d": (1,), "row": (1, 4), "e": (1,)}
    torch.save({name: torch.randn(size) for name, size in sizes.items()}, tmp_path / "x.pt")
    assert ranks.values(replicas_between_shards, str(tmp_path / "x.pt")) == [(True, True)] * 4


def replicas_in_two_memory_formats(path: str) -> tuple[bool, bool]:
    """Whether all values are right where the tensors of one rank lie in memory in another order."""
    net = nn.Conv2d(4, 3, 2)
    if dist.get_rank() == 0:
        net.to(memory_format=torch.channels_last)
    stride = net.weight.stride()
    ms.load(net, path, process_group=dist.group.WORLD, read_once=True)
    return torch.equal(net.weight, torch.load(path)["weight"]), net.weight.stride() == stride


def test_replicas_may_have_another_memory_format(ranks: Ranks, tmp_path: Path) -> None:
    torch.save(nn.Conv2d(4, 3, 2).state_dict(), tmp_path / "x.pt")
    assert ranks.values(replicas_in_two_memory_formats, str(tmp_path / "x.pt")) == [(True, True)] * 4


def replicas_on_meta(path: str) -> list[bool | str]:
    """Loads into a model that only one rank has in memory, so that with maps the others would map what it sends."""
    outcomes: list[bool | str] = []
    for option in (None, True):
        net = nn.Linear(4, 3, device="meta" if dist.get_rank() else "cpu")
        try:
            ms.load(net, path, process_group=dist.group.WORLD, read_once=True, map=option, timeout_seconds=30)
            outcomes.append(torch.equal(net.weight, load_file(path)["weight"]))
        except errors.DistributedError as error:
            outcomes.append(error.found)
    return outcomes


def test_replicas_that_are_not_all_in_memory(ranks: Ranks, tmp_path: Path) -> None:
    ms.save(nn.Linear(4, 3), tmp_path / "x.safetensors")
    differ = "ranks 0: Linear with 2 tensors on cpu; ranks 1-3: Linear with 2 tensors on meta"
    assert ranks.values(replicas_on_meta, str(tmp_path / "x.safetensors")) == [[True, differ]] * 4
