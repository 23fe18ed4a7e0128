"""Steps as differences: weights in memory catch up by the patches that they lack, and are what was published."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.serve.followed import actions, by_hand
from tests.serve.models import X_OF_TIED as X, Tied
from tests.serve.targets import KINDS, module_of, target_of
from tests.store.common import flip

BIG = "a"


class Trained(Tied):
    """A tied weight that changes a little, a frozen one, an empty one, and statistics that change altogether."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        with torch.no_grad():
            self.a.normal_(), self.bias.requires_grad_(False).normal_()
        self.eval()

    @torch.no_grad()
    def train_step(self) -> None:
        self.a.view(-1)[torch.randint(self.a.numel(), (40,))] += 0.25
        self.get_buffer("c").normal_()


class Run:
    """A store with steps, and the answers of the model at each of them."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.model, self.store = Trained(), ms.Store(directory, **{"delta": ms.Delta(), **options})
        self.answers, self.paths = list[torch.Tensor](), list[Path]()

    def save(self) -> ms.Checkpoint:
        self.model.train_step()
        self.paths.append(Path(self.store.save(len(self.paths), {"model": self.model}).path))
        self.answers.append(self.model(X).detach())
        return self.open(len(self.paths) - 1)

    def open(self, step: int) -> ms.Checkpoint:
        return self.store.open("model", step)

    def is_served(self, live: ms.Live, step: int, atol: float = 0.0) -> bool:
        opened, module = self.open(step), module_of(live)
        assert (live.version().step, live.version().digest) == (step, opened.digest)
        are_equal = (torch.equal(module.get_parameter(name), opened.tensor(name)) for name in (BIG, "bias"))
        return all(are_equal) and torch.allclose(live(X), self.answers[step], rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_what_was_published_and_a_version_in_use_stays(tmp_path: Path, kind: str) -> None:
    run, live = Run(tmp_path), ms.Live(target_of(kind, Tied(), X))
    reports, addresses = [], set()
    for step in range(9):
        with live.version() as held:
            reports.append(live.swap(run.save(), verify=True))
            assert held.step is None or torch.allclose(held(X), run.answers[held.step], rtol=0, atol=1e-5)
        assert run.is_served(live, step, 1e-5)
        addresses.add(module_of(live).get_parameter(BIG).data_ptr())
    assert live.swap(run.open(8)).caught_up  # its patch is not applied twice
    assert run.is_served(live, 8, 1e-5)
    # The first one is whole. The second one is a copy of it; then there are three versions in turn.
    assert [report.caught_up for report in reports] == [False] + 8 * [True]
    assert len(addresses) <= 4
    assert "caught up in memory" in str(reports[-1])
    assert not any("missing" in note for report in reports for note in report.notes)


def test_only_what_is_lacked_is_read(tmp_path: Path) -> None:
    """What has been read is not read again, so damage to it since then does no harm."""
    run, live = Run(tmp_path), ms.Live(Trained(1))
    following, log = by_hand(live, run.store)
    for step in range(4):
        run.save()
        assert actions(following) == [("swapped", step)]
    unverified = ms.Live(Trained(1))
    unverified.swap(run.open(3))
    run.save()
    flip(Path(run.open(4).stored("bias").storage.path))
    assert actions(following) == [("swapped", 4)]
    assert torch.equal(live(X), run.answers[4])
    with pytest.raises(errors.ChecksumError):  # the frozen weights are read
        unverified.swap(run.open(4), verify=True)
    assert log == []


def test_a_follower_that_was_away(tmp_path: Path) -> None:
    run, live = Run(tmp_path, keep=2, delta=ms.Delta(full_every=8)), ms.Live(Trained(1), keep_versions=0)
    following, _ = by_hand(live, tmp_path)
    for step in (0, 1, 2, 6, 7, 27):
        while len(run.paths) <= step:
            run.save()
        assert actions(following) == [("swapped", step)]
        assert run.is_served(live, step)


def test_back_and_forth(tmp_path: Path) -> None:
    """Steps in any order, the same one again, rollbacks, other sources between them, and requests that write."""
    run, chance, other = Run(tmp_path), random.Random(5), Trained(9)
    for _ in range(8):
        run.save()
    live, serves, ways = ms.Live(Trained(1), keep_versions=2), [None], set[bool]()
    for _ in range(100):
        kind = chance.choices(["step", "rollback", "state dict", "parameter", "buffer"], [6, 1, 1, 1, 1])[0]
        if kind == "step":
            step = chance.randrange(8)
            ways.add(live.swap(run.open(step), buffers="reset").caught_up)
            serves = [*serves[-2:], step]
        elif kind == "rollback" and len(serves) > 1:
            live.rollback()
            serves.pop()
        elif kind == "state dict":
            live.swap(other.state_dict(), buffers="reset")
            assert torch.equal(live(X), other(X))
            serves = [*serves[-2:], None]
        elif kind != "rollback":
            with torch.inference_mode():
                module, is_parameter = module_of(live), kind == "parameter"
                tensor = module.get_parameter(BIG) if is_parameter else module.get_buffer("c")
                tensor.detach().numpy()[:] *= 2  # torch does not count this write
            serves[-1] = None
        assert serves[-1] is None or run.is_served(live, serves[-1])
    assert ways == {True, False}


def test_what_is_not_read_as_it_is_is_read_whole(tmp_path: Path) -> None:
    run = Run(tmp_path)
    rules, program = [ms.rules.Cast("bias", torch.float32)], Trained(1)
    lives = [ms.Live(Trained(1)), ms.Live(torch.export.export(program, (X,)), names=ms.serve.NameMap.of(program))]
    for step in range(5):
        opened = run.save()
        assert not lives[0].swap(opened, rules=rules).caught_up
        assert run.is_served(lives[0], step)
        assert lives[1].swap(opened).caught_up is (step > 0)
        assert run.is_served(lives[1], step)
    half = ms.Live(Trained(1).double())
    for step in range(5):
        assert not half.swap(run.open(step), exact=False).caught_up
        assert torch.allclose(half(X.double()).float(), run.answers[step], atol=1e-4)
    wider = Trained(1)
    wider.more = nn.Linear(2, 2)
    with pytest.raises(errors.PlanError, match=r"more\.weight"):
        ms.Live(wider).swap(run.open(4))


def test_a_damaged_patch_names_its_step_and_changes_nothing(tmp_path: Path) -> None:
    run, live = Run(tmp_path), ms.Live(Trained(1))
    for _ in range(4):
        live.swap(run.save())
    run.save()
    flip(max(run.paths[4].glob("*.delta-*"), key=lambda path: path.stat().st_mtime_ns))
    with pytest.raises((errors.DamagedFileError, errors.ChecksumError), match=r"step.0*4"):
        live.swap(run.paths[4])
    following, log = by_hand(live, run.store)
    following.poll()
    assert log.skipped == [4]
    assert "step-000000004" in str(log[0])
    assert following.step == 3
    assert run.is_served(live, 3)
    assert run.store.verify()[4]
    run.model.train_step()
    run.store.save(4, {"model": run.model}, overwrite=True)
    assert actions(following) == [("swapped", 4)]
    assert torch.equal(live(X), run.model(X))
