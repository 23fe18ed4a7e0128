"""Loads with the default options into a live module: straight into its memory, and still all or nothing."""

import errno
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from tests.faults import Request, faulty_reads
from tests.io.test_lease import WRITERS, can_lease, writer
from tests.loading.loads import stored, write_shards
from tests.sweeps import EXHAUSTIVE

WIDTH = 512
LEASED = "into the existing memory, directly, while a read lease holds the file"
OPEN_FOR_WRITING = "into the existing memory, after all reads: a process has the file open for writing"


class Net(nn.Module):
    """Ties, counters, frozen parameters, a view of another parameter's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.utils.skip_init(nn.Linear, WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].requires_grad_(False)


def state(value: float) -> dict[str, torch.Tensor]:
    """The same number everywhere, so that a mixture of two states is seen at once."""
    given = Net().state_dict()
    return {name: torch.full_like(one, value) for name, one in given.items()}


FORMS = ("safetensors", "torch", "shards")


def saved(folder: Path, value: float = 2.0, form: str = "safetensors") -> Path:
    named = state(value)
    if form != "torch":
        del named["head.weight"]
    if form != "shards":
        path: Path = stored(named, folder, form)
        return path
    path = folder / f"{len(list(folder.iterdir()))}"
    path.mkdir()
    write_shards(named, path)
    return path


def module(value: float = 1.0, dtype: torch.dtype = torch.float32) -> Net:
    net = Net().to(dtype)
    net.load_state_dict({name: one.to(dtype) if one.is_floating_point() else one for name, one in state(value).items()})
    return net


def values(net: nn.Module) -> set[float]:
    return {value for one in net.state_dict().values() for value in one.flatten().unique().tolist()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not can_lease(tmp_path):
        pytest.skip("the file system of the temporary directory has no leases")
    return tmp_path


@pytest.fixture
def path(folder: Path) -> Path:
    return saved(folder)


def whys(report: ms.LoadReport | ms.LoadPlan) -> set[str]:
    return {step.why for step in report.steps}


@pytest.mark.parametrize("form", FORMS)
def test_the_values_are_read_into_the_memory_that_is_there(form: str, folder: Path) -> None:
    path, net = saved(folder, form=form), module()
    before = {name: (one, one.data_ptr(), one._version) for name, one in net.state_dict(keep_vars=True).items()}
    report = ms.load(net, path)
    assert whys(report) == {LEASED}
    assert report.peak_memory_bytes == 0
    assert values(net) == {2.0}
    for name, one in net.state_dict(keep_vars=True).items():
        tensor, address, version = before[name]
        assert (one is tensor, one.data_ptr()) == (True, address)
        assert one._version > version  # autograd sees that the values a graph has saved are no longer there


@pytest.mark.parametrize("name", ["cut", "overwritten"])
def test_a_writer_waits_for_a_cast(name: str, folder: Path) -> None:
    path, net, processes = saved(folder), module(1.0, torch.bfloat16), list[subprocess.Popen[bytes]]()
    with faulty_reads() as faults:
        ms.load(net, path, dtype=torch.bfloat16)
    last = [request.number for request in faults.requests if request.call == "preadv_cached"][-1]
    net = module(1.0, torch.bfloat16)

    def before(request: Request) -> None:
        if request.number == last:
            processes.append(writer(name, Path(request.path)))
            waits_for_the_lease(name, processes[0])

    with faulty_reads(before=before):
        ms.load(net, path, dtype=torch.bfloat16)
    assert values(net) == {2.0}
    assert [process.wait(60) for process in processes] == [0]


def test_the_plan_says_what_is_done_and_is_executed(path: Path) -> None:
    net = module()
    plan = ms.plan(net, path)
    assert whys(plan) == {LEASED}
    assert plan.peak_memory_bytes == 0
    assert values(net) == {1.0}
    assert whys(ms.load(net, plan)) == {LEASED}
    assert values(net) == {2.0}


def test_in_place_false_reads_everything_first(path: Path) -> None:
    net = module()
    report = ms.load(net, path, in_place=False)
    assert whys(report) == {"into the existing memory, after all reads"}
    assert report.peak_memory_bytes >= report.bytes
    assert values(net) == {2.0}
    with pytest.raises(ms.errors.OptionError, match="in_place="):
        ms.load(net, path, in_place="yes")  # type: ignore[call-overload]


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_file_that_is_open_for_writing_is_staged(is_planned: bool, path: Path) -> None:
    net = module()
    source = ms.plan(net, path) if is_planned else path
    with path.open("r+b"):
        report = ms.load(net, source)
    assert whys(report) == {OPEN_FOR_WRITING}
    assert report.peak_memory_bytes >= report.bytes
    assert values(net) == {2.0}


@pytest.mark.parametrize("budget", [None, 1 << 20])
def test_a_lease_that_is_refused_at_the_commit(budget: int | None, path: Path) -> None:
    """A transform opens the file for writing, after the load has seen that a lease can be had."""
    net, files = module(), []

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        files.append(path.open("r+b"))
        return tensor

    try:
        if budget is None:
            report = ms.load(net, path, transform={"norm.bias": transform})
            assert OPEN_FOR_WRITING in whys(report)
            assert report.peak_memory_bytes >= report.bytes - net.norm.bias.nbytes
        else:
            with pytest.raises(ms.errors.MemoryBudgetError):
                ms.load(net, path, transform={"norm.bias": transform}, max_memory_bytes=budget)
    finally:
        for file in files:
            file.close()
    assert files
    assert values(net) == ({2.0} if budget is None else {1.0})


def test_what_is_staged_beside_it(folder: Path) -> None:
    """A tensor in another memory format, one that a transform changes, and one that code of the model uses."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(64, 64, 9).to(memory_format=torch.channels_last)
            self.plain, self.changed, self.used = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
            self.register_load_state_dict_post_hook(lambda net, _: net.used.weight.sum() and None)

    net = Mixed()
    save_file({name: torch.full_like(one.contiguous(), 2.0) for name, one in net.state_dict().items()}, folder / "x")
    (folder / "x").rename(folder / "x.safetensors")
    path, memory = folder / "x.safetensors", net.conv.weight.data_ptr()
    net.load_state_dict({name: torch.full_like(one, 1.0) for name, one in net.state_dict().items()})
    report = ms.load(net, path, transform={"changed.*": lambda _, tensor: tensor})
    staged = "into the existing memory, after all reads"
    by_name = {step.name: step.why for step in report.steps}
    assert by_name["plain.weight"] == by_name["conv.bias"] == LEASED
    assert by_name["conv.weight"] == by_name["changed.weight"] == staged
    assert by_name["used.weight"] == f"{staged}: code of the model uses it"
    assert values(net) == {2.0}
    assert net.conv.weight.data_ptr() == memory


def test_a_load_in_the_background_stages(path: Path) -> None:
    net = module()
    handle = ms.load(net, path, background=True)
    assert values(net) == {1.0}
    report = handle.result()
    assert whys(report) == {"into the existing memory, after all reads: the model is in use until then"}
    assert values(net) == {2.0}


# Faults.


def blocks(load: Callable[[], object]) -> list[Request]:
    """The reads of the commit."""
    with faulty_reads() as faults:
        load()
    return [request for request in faults.requests if request.call == "preadv_cached"]


def waits_for_the_lease(name: str, process: subprocess.Popen[bytes]) -> None:
    if name == "replaced":
        assert process.wait(60) == 0  # the open file is not touched
        return
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "name"), [*(("safetensors", name) for name in WRITERS), ("torch", "cut"), ("shards", "overwritten")]
)
def test_another_process_writes_to_the_file_at_each_block(form: str, name: str, folder: Path) -> None:
    path = saved(folder, form=form)
    count = len(blocks(lambda: ms.load(module(), path)))
    assert count >= 2
    for number in range(count) if EXHAUSTIVE else sorted({0, count // 2, count - 1}):
        net, processes, seen = module(), list[subprocess.Popen[bytes]](), list[Request]()

        def before(request: Request, number: int = number, seen: list[Request] = seen) -> None:
            if request.call == "preadv_cached":
                seen.append(request)
                if len(seen) == number + 1:
                    processes.append(writer(name, Path(request.path)))  # noqa: B023
                    waits_for_the_lease(name, processes[0])  # noqa: B023

        with faulty_reads(before=before):
            report = ms.load(net, path)
        assert whys(report) == {LEASED}
        assert values(net) == {2.0}
        assert processes[0].wait(60) == 0
        for old in [path, *(path.iterdir() if path.is_dir() else ())]:
            if old.is_file():
                old.unlink()
        if path.is_dir():
            path.rmdir()
        path = saved(folder, form=form)


def test_a_sector_that_goes_bad_within_the_commit_is_named(path: Path) -> None:
    net = module()
    stored: Any = ms.open(path).stored("layers.2.weight")
    start: int = stored.extent.start

    def before(request: Request) -> None:
        if request.call.startswith("preadv") and request.start <= start < request.start + request.nbytes:
            raise OSError(errno.EIO, "bad sector")

    with faulty_reads(before=before), pytest.raises(ms.errors.ReadFailedError, match="may be old or damaged") as caught:
        ms.load(net, path)
    assert "in_place=False" in str(caught.value)
    ms.load(net, path)
    assert values(net) == {2.0}


# Several objects.


class Refusing:
    """An object whose state cannot be loaded."""

    def state_dict(self) -> dict[str, int]:
        return {"step": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("no")


def test_a_restore_that_another_object_refuses_changes_nothing(folder: Path) -> None:
    net = module()
    ms.save({"model": module(2.0), "other": Refusing()}, folder / "x.safetensors")
    with pytest.raises(ms.ModelStateError, match="nothing has been changed"):
        ms.restore({"model": net, "other": Refusing()}, folder / "x.safetensors")
    assert values(net) == {1.0}
