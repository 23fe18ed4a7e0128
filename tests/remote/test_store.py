"""`modelstate.Store` in a bucket: what the store of a directory promises, with each fault at each request."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import (
    LockedError,
    ModelStateError,
    ReadFailedError,
    SaveError,
    StepNotFoundError,
    TargetExistsError,
    UnsavableError,
    WriteFailedError,
)
from modelstate.store import bucket as buckets
from tests.commands import run_command
from tests.proxy import Fault, FaultProxy, HttpRequest
from tests.remote.kills import exit_code_of_killed
from tests.sweeps import EXHAUSTIVE, sample

FAULTS = (Fault.UNAVAILABLE, Fault.RESET, Fault.CUT, Fault.LOST_REPLY)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that expire soon."""
    monkeypatch.setattr(buckets, "LEASE_SECONDS", 4.0)


@pytest.fixture
def url(bucket: str) -> str:
    return f"s3://{bucket}/runs/first"


@pytest.fixture
def names(bucket: str, s3_client: Callable[[], Any]) -> Callable[[], list[str]]:
    """The names of the objects of the store, read with another client."""

    def read() -> list[str]:
        listed = s3_client().list_objects_v2(Bucket=bucket).get("Contents", [])
        return [item["Key"].removeprefix("runs/first/") for item in listed]

    return read


def network(value: float = 0.0) -> nn.Sequential:
    """A frozen layer, one that has a value, and one of whose elements a few have it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(64, 64))
    for parameter in model[0].parameters():
        nn.init.constant_(parameter.requires_grad_(False), 1.0)
    nn.init.constant_(model[1].weight, value)
    for parameter in model[2].parameters():
        nn.init.constant_(parameter, 2.0)
    nn.init.constant_(model[2].weight.data[3, 5:20], value)
    return model


def save(store: ms.Store, step: int, **options: Any) -> Any:
    return store.save(step, {"model": network(step), "step": step}, **options)


def restored(store: ms.Store, step: Any = "latest") -> int:
    """Restores a step and returns its number, which all that was saved agrees on."""
    model = network(-1.0)
    result = store.restore({"model": model, "step": 0}, step)
    assert result["step"] == result.step
    assert all(map(torch.equal, model.state_dict().values(), network(result.step).state_dict().values()))
    return result.step


def only(fault: Fault, number: int) -> Callable[[HttpRequest], Fault | None]:
    return lambda request: fault if request.number == number else None


def points(numbers: Iterable[int]) -> list[tuple[Fault, int]]:
    return [(fault, number) for number in numbers for fault in (*FAULTS, Fault.STALE)]


@pytest.mark.slow
def test_a_run(url: str, names: Callable[[], list[str]]) -> None:
    with ms.Store(url, keep=ms.Keep(last=2)) as store:
        assert store.latest() is None
        for step in (1, 2, 3, 4):
            saved = save(store, step, metrics={"loss": 1.0 / step}, pin=step == 1)
        assert saved.pruned == (2,)
        assert store.steps() == (1, 3, 4)
        assert [restored(store, step) for step in (1, 3, "latest")] == [1, 3, 4]
        infos = store.infos()
        assert [(info.step, info.pinned, info.metrics["loss"]) for info in infos] == [
            (1, True, 1.0),
            (3, False, 1 / 3),
            (4, False, 0.25),
        ]
        store.unpin(1)
        assert store.prune() == (1,)
        assert store.verify() == {3: "", 4: ""}
        assert not store.diff(3, 4).is_equal
        assert store.open("model", 3).tensor("1.weight")[0, 0] == 3
        with pytest.raises(TargetExistsError):
            save(store, 4)
        save(store, 4, overwrite=True)
        with pytest.raises(StepNotFoundError):
            store.restore({"step": 0}, 2)
        store.check({"model": network()})
    assert restored(ms.Store(url)) == 4
    assert sum(name.startswith("step-") for name in names()) == 2


@pytest.mark.slow
def test_deltas(url: str, names: Callable[[], list[str]], tmp_path: Path) -> None:
    with ms.Store(url, keep=2, delta=DELTA, cache=ms.Cache(tmp_path)) as store:
        saved = [save(store, step) for step in (1, 2, 3)]
        assert 4 * saved[-1].written_bytes < saved[0].written_bytes
        assert sum(".delta-" in name for name in names()) == 2
    with ms.Store(url, keep=2, delta=DELTA, cache=ms.Cache(tmp_path)) as store:
        assert 4 * save(store, 4).written_bytes < saved[0].written_bytes  # what step 3 has is read
        opened = store.open("model", verify=True)
        assert opened["2.weight"].kind == "patched 3 times"
        rows = torch.empty(2, 64)
        opened.read_into("2.weight", rows, 2, 4)
        assert torch.equal(rows, network(4)[2].weight[2:4])
        assert store.diff(3, 4, only=["model.2.*"]).tensors[0].difference is not None
        assert [info.patches for info in store.infos()] == [2, 3]
        assert [restored(store, step) for step in (3, 4)] == [3, 4]
        save(store, 5)
        save(store, 6)
        assert [info.patches for info in store.infos()] == [0, 1]
        assert sum(".delta-" in name for name in names()) == 1
        assert store.verify() == {5: "", 6: ""}
    assert restored(ms.Store(url)) == 6


@pytest.mark.slow
def test_a_record_that_the_server_does_not_send_for_now_is_not_pruned(url: str, proxy: FaultProxy) -> None:
    with ms.Store(url, keep=ms.Keep(last=1, best=1, metric="loss")) as store:
        for step in (1, 2, 3):
            save(store, step, metrics={"loss": float(step)})
        assert store.steps() == (1, 3)

    def refuse(request: HttpRequest) -> Fault | None:
        is_record = request.method == "GET" and "/step-000000001." in request.target
        return Fault.UNAVAILABLE if is_record else None

    with ms.Store(url, keep=ms.Keep(last=1, best=1, metric="loss")) as store:
        proxy.fault = refuse
        assert save(store, 4, metrics={"loss": 4.0}).pruned == ()
        with pytest.raises(TargetExistsError):
            save(store, 1)
        proxy.fault = None
        assert store.steps() == (1, 3, 4)
        assert restored(store, 1) == 1


@pytest.mark.slow
def test_a_damaged_name_of_the_store_is_found_by_verify(url: str, bucket: str, s3_client: Callable[[], Any]) -> None:
    store = ms.Store(url)
    save(store, 1)
    assert store.verify() == {1: ""}
    s3_client().put_object(Bucket=bucket, Key="runs/first/store.json", Body=b"{}")
    assert "damaged" in store.verify()["store.json"]
    result = run_command("store", "verify", url)
    assert (result.exit_code, "store.json: " in result.output) == (1, True), result.output
    s3_client().delete_object(Bucket=bucket, Key="runs/first/store.json")
    assert store.verify() == {1: ""}


@pytest.mark.slow
def test_what_has_not_changed_is_not_uploaded_again_and_survives_pruning(
    url: str, proxy: FaultProxy, names: Callable[[], list[str]]
) -> None:
    store = ms.Store(url, keep=1)
    first = save(store, 1)
    proxy.reset()
    second = save(store, 2)
    assert second.linked_bytes > 0
    assert second.written_bytes + second.linked_bytes == pytest.approx(first.written_bytes, rel=0.1)
    assert second.pruned == (1,)
    assert restored(store) == 2
    frozen = [name for name in names() if name.startswith("data/model-")]
    assert len(frozen) == 3  # that of the first save; and of the second one, what has changed and what has not
    assert store.verify() == {2: ""}


@pytest.mark.slow
def test_the_order_is_that_of_saving(url: str) -> None:
    with ms.Store(url) as store:
        for step in (5, 7, 6):
            save(store, step)
        assert (store.latest(), store.steps()) == (6, (5, 6, 7))
        assert restored(store) == 6


@pytest.mark.slow
def test_a_second_writer_is_refused_until_the_first_one_closes(url: str) -> None:
    first, second = ms.Store(url), ms.Store(url)
    with mock.patch.object(buckets, "try_start", return_value=False), pytest.raises(WriteFailedError, match="ulimit"):
        save(second, 1)  # its lease would not be renewed
    save(first, 1)
    with pytest.raises(LockedError, match=f"this process .{os.getpid()}"):
        save(second, 2)
    save(first, 2)
    first.close()
    save(second, 3)
    with pytest.raises(LockedError):
        save(first, 4)
    assert second.steps() == (1, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["uploading", "numbering"])
def test_a_writer_that_lost_its_lease_cannot_commit(url: str, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The lease is taken over after the last look of the first writer at the bucket, or before it takes a number."""
    first, second = ms.Store(url), ms.Store(url)
    save(first, 1)
    monkeypatch.setattr(buckets, "_is_alive", lambda holder: False)
    take_over = iter([lambda: second.check({"model": network()})])
    owner, name = (buckets, "put") if moment == "uploading" else (buckets.Bucket, "clear")
    real = getattr(owner, name)

    def call(*args: Any, **options: Any) -> None:
        if moment == "numbering" or "checkpoint.json" in args[0].key:
            for check in take_over:
                check()
        real(*args, **options)

    monkeypatch.setattr(owner, name, call)
    with pytest.raises(LockedError):
        save(first, 2)
    assert second.steps() == (1,)
    save(second, 2)
    assert (second.steps(), restored(second)) == ((1, 2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault.LOST_REPLY, Fault.CUT])
def test_a_lost_reply_to_the_commit(url: str, proxy: FaultProxy, fault: Fault) -> None:
    with ms.Store(url) as store:
        save(store, 1)
        proxy.reset()
        hit = []

        def lose(request: HttpRequest) -> Fault | None:
            is_commit = request.method == "PUT" and "claim-" in request.target and not hit
            hit.extend([request] * is_commit)
            return fault if is_commit else None

        proxy.fault = lose
        save(store, 2)
        proxy.fault = None
        save(store, 3)
    assert hit
    assert [place.step for place in ms.Store(url).index.backend.places()] == [1, 2, 3]
    assert restored(ms.Store(url)) == 3


@pytest.mark.slow
def test_each_fault_at_each_request(
    url: str, proxy: FaultProxy, record_property: Callable[[str, object], None]
) -> None:
    """A save succeeds, or raises a clear error, and no step is lost, half there or there twice."""
    with ms.Store(url) as store:
        save(store, 0)
        proxy.reset()
        save(store, 1)
        numbers = range(1, len(proxy.requests) + 3)
    expected, step = [0, 1], 1
    visited = sample(points(numbers), lambda point: 0, 1)
    for fault, number in visited:
        step += 1
        with ms.Store(url) as store:
            store.check({"step": 0})
            proxy.reset()
            proxy.fault = only(fault, number)
            try:
                save(store, step)
                expected.append(step)
            except (SaveError, ReadFailedError):
                pass  # nothing is committed, as what follows shows
            proxy.fault = None
            assert list(store.steps()) == expected
            assert restored(store) == expected[-1]
    assert not any(ms.Store(url).verify().values())
    record_property("faults", f"{len(visited)}, {len(visited) + 2 - len(expected)} errors")


def restore(url: str) -> None:
    restored(ms.Store(url))


def prune(url: str) -> None:
    with ms.Store(url, keep=2) as store:
        store.prune()


def resume(url: str) -> list[int]:
    seen = []
    with ms.Store(url) as store:
        model = network()
        for step in ms.resumable(store, {"model": model}, steps=3, save_every=1):
            nn.init.constant_(model[1].weight, step)
            seen.append(step)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("call", [restore, prune, resume])
def test_each_fault_at_each_request_of_other_calls(
    url: str, proxy: FaultProxy, call: Callable[[str], Any], record_property: Callable[[str, object], None]
) -> None:
    """They do what they should, or raise a clear error: the steps that should be there are, and a next call works."""

    def begin(number: int) -> str:
        run = f"{url}-{number}"
        if call is not resume:
            with ms.Store(run) as store:
                for step in (1, 2, 3):
                    save(store, step)
        return run

    run = begin(0)
    proxy.reset()
    call(run)
    numbers = range(1, len(proxy.requests) + 1)
    expected = ms.Store(run).steps()
    errors = 0
    for index, (fault, number) in enumerate(sample(points(numbers), lambda point: 0, 0), 1):
        if call is not restore:
            run = begin(index)
        proxy.reset()
        proxy.fault = only(fault, number)
        try:
            call(run)
        except ModelStateError:
            errors += 1
        proxy.fault = None
        store = ms.Store(run)
        found = store.steps()
        assert not any(store.verify().values())
        if call is resume:
            assert set(found) <= set(expected)  # a save that fails is a warning, and the loop goes on
            assert resume(run) == list(range(expected.index(found[-1]) + 1 if found else 0, 3))
            assert ms.Store(run).latest() == expected[-1]
        else:
            assert {2, 3} <= set(found) <= {1, 2, 3}
            assert [restored(store, step) for step in found] == list(found)
            call(run)
            assert ms.Store(run).steps() == expected
    record_property("faults", f"{index}, {errors} errors")


@pytest.mark.slow
def test_a_server_that_stays_away_is_a_clear_error(url: str, proxy: FaultProxy) -> None:
    store = ms.Store(url)
    save(store, 1)
    proxy.fault = lambda request: Fault.UNAVAILABLE
    with pytest.raises(WriteFailedError, match="503"):
        save(store, 2)
    with pytest.raises(ModelStateError, match="503"):
        store.latest()
    proxy.fault = None
    assert store.latest() == 1
    save(store, 2)


DELTA = ms.Delta(full_every=4)


def _saver(url: str, environment: dict[str, str], step: int, delta: ms.Delta | None = None) -> None:
    os.environ.update(environment)
    with ms.Store(url, delta=delta) as store:
        save(store, step)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [None, DELTA], ids=["whole", "deltas"])
def test_kill_at_each_request(
    url: str,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    delta: ms.Delta | None,
) -> None:
    """SIGKILL of a saver: the step is there in full or not at all, and the next writer goes on at once."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    _saver(url, environment, 0, delta)
    proxy.reset()
    _saver(url, environment, 1, delta)
    commit = next(r.number for r in proxy.requests if r.method == "PUT" and "claim-" in r.target and r.number > 5)
    visited = range(1, len(proxy.requests) + 1) if EXHAUSTIVE else (commit // 2, commit, commit + 2)
    expected = {0, 1}
    for step, number in enumerate(visited, 2):
        exit_code = exit_code_of_killed(proxy, number, _saver, url, environment, step, delta)
        # Behind the commit a save may end while a request is under way.
        assert exit_code == -signal.SIGKILL or number > commit
        store = ms.Store(url)
        found = set(store.steps())
        assert expected <= found <= expected | {step}
        expected = found
        assert restored(store) == max(expected)
    record_property("kills", f"{len(visited)}, {len(expected) - 2} new")
    monkeypatch.setattr(buckets, "pause", lambda _: pytest.fail("a save waits for a dead writer"))
    _saver(url, environment, 100, delta)
    assert restored(ms.Store(url)) == 100


@pytest.mark.slow
def test_what_dead_saves_left_is_removed_when_it_is_old(
    url: str, proxy: FaultProxy, names: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ms.Store(url) as store:
        save(store, 1)
        save(store, 2)
        kept = set(names())
        # A save that ends without a word: nothing removes what it has written.
        monkeypatch.setattr(buckets.NewObjects, "discard", lambda self: None)
        proxy.fault = lambda request: Fault.UNAVAILABLE if "claim-" in request.target else None
        with pytest.raises(WriteFailedError):
            save(store, 3)
        proxy.fault = None
    left = [name for name in set(names()) - kept if name.startswith(("data/", "step-"))]
    assert len(left) == 3
    with ms.Store(url) as store:
        store.check({"step": 0})
        assert set(left) <= set(names())  # it may be that of a save that goes on
    monkeypatch.setattr(buckets, "LEFTOVER_SECONDS", -10.0)
    with ms.Store(url, keep=1) as store:
        store.prune()
        assert not set(left) & set(names())
        assert restored(store) == 2


@pytest.mark.slow
def test_clocks_of_clients_do_not_matter(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ms.Store(url)
    save(first, 1)
    for skew_seconds in (-86400.0, 86400.0):
        real = time.time
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda real=real, skew=skew_seconds: real() + skew)
            with pytest.raises(LockedError):
                save(ms.Store(url), 2)
            save(first, int(3 + skew_seconds / 86400))
    assert first.latest() == 4


def test_a_bucket_that_ignores_conditions_is_refused(
    url: str, proxy: FaultProxy, names: Callable[[], list[str]]
) -> None:
    def ignore(request: HttpRequest) -> None:
        request.headers.pop("if-none-match", None)

    proxy.fault = ignore
    with pytest.raises(WriteFailedError, match="ignores the condition If-None-Match"):
        save(ms.Store(url), 1)
    assert not any(name.startswith("step-") for name in names())


@pytest.mark.slow
def test_a_prefix_with_other_objects(url: str, bucket: str, s3_client: Callable[[], Any]) -> None:
    for name in ("step-000000001", "claim-x", "step-000000009.000000000001.0123456789ab/checkpoint.json", "data/x"):
        s3_client().put_object(Bucket=bucket, Key=f"runs/first/{name}", Body=b"something else")
    store = ms.Store(url)
    assert (store.steps(), store.latest()) == ((), None)
    save(store, 1)
    assert (store.steps(), restored(store)) == ((1,), 1)


def test_an_object_is_no_directory(url: str, bucket: str, s3_client: Callable[[], Any]) -> None:
    s3_client().put_object(Bucket=bucket, Key=url.removeprefix(f"s3://{bucket}/"), Body=b"something else")
    with pytest.raises(UnsavableError, match="a store is a directory"):
        save(ms.Store(url), 1)
    for read in (ms.Store(url).latest, ms.Store(url).infos, lambda: ms.Store(url).open("latest")):
        with pytest.raises(UnsavableError, match="a store is a directory"):
            read()
    assert [item["Key"] for item in s3_client().list_objects_v2(Bucket=bucket)["Contents"]] == ["runs/first"]


@pytest.mark.slow
def test_follow(url: str) -> None:
    live = ms.Live(network(0))
    following = ms.follow(live, url, background=False)
    assert following.poll() == ()
    with ms.Store(url) as store:
        save(store, 3)
    (event,) = following.poll()
    assert (event.action, event.step) == ("swapped", 3)


@pytest.mark.slow
def test_a_cache_keeps_what_is_read(url: str, proxy: FaultProxy, tmp_path: Path) -> None:
    cache = ms.Cache(tmp_path / "cache")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(2)))
    with ms.Store(url) as store:
        store.save(1, {"model": model})
    nbytes = sum(parameter.nbytes for parameter in model.parameters())

    def restore(cache: ms.Cache | None) -> None:
        target = nn.Sequential(*(nn.Linear(512, 512) for _ in range(2)))
        ms.Store(url, cache=cache).restore({"model": target})
        assert all(map(torch.equal, target.state_dict().values(), model.state_dict().values()))

    restore(cache)
    proxy.reset()
    restore(cache)
    ms.Store(url, cache=cache).verify()
    done = run_command("verify", url, "--cache", str(cache.directory))
    assert done.exit_code == 0, done.output
    assert proxy.downloaded_bytes < nbytes / 2
    proxy.reset()
    restore(None)
    assert proxy.downloaded_bytes >= nbytes


@pytest.mark.slow
def test_a_lease_that_fails_does_not_show_the_step_of_a_killed_writer(
    url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One writer ends before the claim of its step. The next one writes the claim of its lease, and then fails."""
    with ms.Store(url) as store:
        save(store, 1)
        monkeypatch.setattr(buckets.NewObjects, "discard", lambda _: None)  # as after SIGKILL
        with monkeypatch.context() as patch:
            patch.setattr(buckets.Bucket, "claim", mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                save(store, 2)
    claims = []

    def refuse(request: HttpRequest) -> Fault | None:
        if request.method == "PUT" and "/claim-" in request.target:
            claims.append(request)
            return Fault.UNAVAILABLE if len(claims) > 1 else None
        return None

    proxy.fault = refuse
    with ms.Store(url) as store, pytest.raises(WriteFailedError):
        save(store, 3)
    proxy.fault = None
    assert ms.Store(url).steps() == (1,)
    with ms.Store(url) as store:
        save(store, 4)
    assert ms.Store(url).steps() == (1, 4)
