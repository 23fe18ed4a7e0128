"""Files that cannot be read, or change meanwhile: every kind of load fails as one, and leaves nothing behind."""

import errno
import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import ReadFailedError
from tests.faults import Faults, Request, count_threads, faulty_reads, wait_for_threads
from tests.loading.fingerprint import described_module, raised_by, whole
from tests.loading.loads import KINDS, Kind, Open, dcp, large, layers, on_meta
from tests.sweeps import EXHAUSTIVE, sample

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@contextmanager
def nothing_left_behind(folder: Path) -> Iterator[None]:
    """No thread, no open file and no map is there that was not there before."""
    threads = count_threads()
    gc.disable()  # what is left behind must not need a collection to go
    try:
        yield
        wait_for_threads(threads)  # one that looks at the page cache ends by itself
        assert not still_open(folder)
    finally:
        gc.enable()


def still_open(folder: Path) -> list[str]:
    """The files that are open or mapped, once the thread that gives leases back has had its turn."""
    for _ in range(500):
        if not (found := open_now(folder)):
            break
        time.sleep(0.01)
    return found


def open_now(folder: Path) -> list[str]:
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue  # the one of the listing
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [one for one in (*links, *maps) if str(folder) in one]


def requests_of(kind: Kind, source: Open) -> list[Request]:
    with faulty_reads() as faults:
        kind.load(kind.build(), source)
    return faults.requests


def sampled(requests: list[Request]) -> list[Request]:
    """The first, the middle and the last of each system call on a kind of file, and some others."""
    return sample(requests, lambda request: (request.call, Path(request.path).suffix))


def hit(faults: Faults, request: Request) -> str | None:
    """The call that had the number of a request this time: threads may come in another order, and the page cache may
    have more of the file. None where the load made fewer requests."""
    return next((made.call for made in faults.requests if made.number == request.number), None)


def failure(kind: Kind, model: nn.Module, source: Open) -> BaseException | None:
    error = raised_by(lambda: kind.load(model, source))
    if error is None:
        gc.collect()  # a load that succeeds may leave cycles of references
    return error


def loaded(kind: Kind, source: Open) -> Any:
    model = kind.build()
    kind.load(model, source)
    return described_module(model)


def may_be_overwritten(kind: Kind, error: BaseException) -> bool:
    return bool(kind.options.get("in_place")) and "partly overwritten" in str(error)


def sweep(
    kind: Kind,
    folder: Path,
    requests: Callable[[list[Request]], list[Request]],
    fault: Callable[[Request], AbstractContextManager[Faults]],
    check: Callable[[Request, Faults, BaseException | None], None],
) -> None:
    """Loads with a fault at some of the requests in turn: each load fails as one, or the values are right."""
    source = kind.write(folder)
    model, after = kind.build(), loaded(kind, source)
    before = whole(model)
    for request in sampled(requests(requests_of(kind, source))):
        with nothing_left_behind(folder), fault(request) as faults:
            found = failure(kind, model, source)
            values = described_module(model)
            if found is None or may_be_overwritten(kind, found):
                model = kind.build()  # what was loaded may be maps of the files
                before = whole(model)
        check(request, faults, found)
        assert found is not None or values == after, request
        assert whole(model) == before, request
    kind.load(model, source)
    assert described_module(model) == after


@pytest.mark.slow
@every_kind
def test_an_error_at_every_request_in_turn(kind: Kind, tmp_path: Path) -> None:
    error = OSError(errno.EIO, "Input/output error")

    def check(request: Request, faults: Faults, found: BaseException | None) -> None:
        error.__traceback__ = None  # of one that was swallowed
        if found is None:
            assert kind.write is large, request  # the page cache and maps are tried for large files, and are not needed
            assert hit(faults, request) in ("open", "fstat", "preadv_cached", "mmap", None), request
        else:
            assert type(found) is ReadFailedError, (request, found)

    sweep(kind, tmp_path, list, lambda request: faulty_reads(at=request.number, error=error), check)


@pytest.mark.slow
@every_kind
def test_the_end_of_the_file_at_every_read_in_turn(kind: Kind, tmp_path: Path) -> None:
    def reads(requests: list[Request]) -> list[Request]:
        return [request for request in requests if request.call in ("pread", "preadv")]

    def check(request: Request, faults: Faults, found: BaseException | None) -> None:
        if found is None:
            # A file that is not what is looked for in the directory, or an index that is looked at before it is read.
            passed_over = kind.write is dcp or request.path.endswith(".index.json")
            assert passed_over or hit(faults, request) not in ("pread", "preadv"), request
        else:
            assert isinstance(found, ms.ModelStateError), (request, found)

    sweep(kind, tmp_path, reads, lambda request: faulty_reads(at=request.number, short=0), check)


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("short", [1, 1000])
def test_short_reads(kind: Kind, short: int, tmp_path: Path) -> None:
    if kind.write in (large, layers) and short == 1:
        pytest.skip("a request for each of too many bytes")
    source = kind.write(tmp_path)
    model, other = kind.build(), kind.build()
    kind.load(model, source)
    with faulty_reads(short=short):
        kind.load(other, source)
    assert described_module(model) == described_module(other)


def cut(path: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


def cut_to_nothing(path: str) -> None:
    os.truncate(path, 0)


def write_over(path: str) -> None:
    """Other bytes at the end, of the same number."""
    status = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\1" * 8)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def replace(path: str) -> None:
    """Another file takes the name."""
    shutil.copyfile(path, path + ".new")
    write_over(path + ".new")
    os.replace(path + ".new", path)


CHANGES = (cut, cut_to_nothing, write_over, replace)


def changes_for(number: int) -> Sequence[Callable[[str], None]]:
    """One change for each kind of load: each change is made to several kinds. All with MODELSTATE_EXHAUSTIVE=1."""
    return CHANGES if EXHAUSTIVE else CHANGES[number % 4 :][:1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        pytest.param(kind, change, id=f"{name}-{change.__name__}")
        for number, (name, kind) in enumerate(KINDS.items())
        if "leased" not in name  # see test_leased_reads
        for change in changes_for(number)
    ],
)
def test_a_file_that_changes_at_every_request_in_turn(
    kind: Kind, change: Callable[[str], None], tmp_path: Path
) -> None:
    """Either the load fails, or the values are those of the file as it was opened."""
    source = kind.write(tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    requests = requests_of(kind, source)
    model, after = kind.build(), loaded(kind, source)
    before = whole(model)
    with faulty_reads() as faults:
        source()
    opening = len(faults.requests)  # as long as that lasts, the other file may be the one that is opened
    changed: list[Path] = []

    def change_file(request: Request) -> None:
        changed.append(Path(request.path))  # threads make their requests in another order each time
        change(request.path)

    for request in sampled(requests):
        with faulty_reads(at=request.number, before=change_file):
            found = failure(kind, model, source)
        if found is None:
            cut_short = change in (cut, cut_to_nothing) and any(str(path) in open_now(tmp_path) for path in changed)
            assert not cut_short, request
            assert request.number <= opening or described_module(model) == after, request
        else:
            assert isinstance(found, ms.ModelStateError), (request, found)
        if found is None or may_be_overwritten(kind, found):
            model = kind.build()
            before = whole(model)
        assert whole(model) == before, request
        assert not still_open(tmp_path), request
        while changed:
            path = changed.pop()
            if path in files:  # and not a directory
                path.unlink()
                path.write_bytes(files[path])


# A file that is cut where the load lets somebody compute.


def cutting(path: Path) -> Callable[..., torch.Tensor]:
    """A function of tensors that shortens the file before it looks at them."""

    def look(*given: Any) -> torch.Tensor:
        os.truncate(path, 64)
        tensors = given[-1] if isinstance(given[-1], list) else [given[-1]]
        return torch.stack([tensor.clone() for tensor in tensors]).sum(0)

    return look


WHERE: dict[str, Callable[[Path], Kind]] = {
    "transform": lambda path: Kind(build=on_meta, options={"transform": cutting(path)}),
    "transform, staged": lambda path: Kind(options={"transform": cutting(path)}),
    "rule": lambda path: Kind(build=on_meta, options={"rules": [ms.rules.Apply("count", cutting(path))]}),
    "combine": lambda path: Kind(lambda folder: lambda: ms.open([path, path], combine=cutting(path)), on_meta),
}


@pytest.mark.parametrize("where", WHERE)
def test_a_file_that_is_cut_where_the_load_computes(where: str, tmp_path: Path) -> None:
    source = KINDS["mapped"].write(tmp_path)
    kind = WHERE[where](tmp_path / "x.safetensors")
    model = kind.build()
    before = whole(model)
    with nothing_left_behind(tmp_path):
        found = failure(kind, model, kind.write(tmp_path) if where == "combine" else source)
        assert type(found) is ReadFailedError, found
    assert whole(model) == before


@pytest.mark.parametrize(("number", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.ENOMEM, "vm.max_map_count")])
@pytest.mark.parametrize("map", [True, False])
def test_limits_of_the_process_have_their_own_remedy(tmp_path: Path, number: int, remedy: str, map: bool) -> None:
    checkpoint = layers(tmp_path)()
    with ms.skeleton():
        model = nn.Sequential(*(nn.Linear(96, 192) for _ in range(3)))
    error = OSError(number, os.strerror(number))
    with faulty_reads(error=error), pytest.raises(ReadFailedError) as caught:
        ms.load(model, checkpoint, map=map)
    assert remedy in caught.value.remedy
    for call in (ms.open, ms.verify):
        with faulty_reads(error=error), pytest.raises(ReadFailedError) as caught:
            call(tmp_path / "x.safetensors")
        assert remedy in caught.value.remedy


class Doubled(nn.Linear):
    """Has loading code of its own, which computes with the value that it gets."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EACCES])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file_system_without_maps(tmp_path: Path, suffix: str, number: int) -> None:
    def refuse(request: Request) -> None:
        if request.call == "mmap":
            raise OSError(number, os.strerror(number))

    path, saved = tmp_path / f"x{suffix}", nn.Linear(4, 4)
    ms.save(saved, path)
    with faulty_reads(before=refuse):
        for map in (None, True, False):
            with ms.skeleton():
                model = nn.Linear(4, 4)
            report = ms.load(model, path, map=map)
            assert torch.equal(model.weight, saved.weight)
            assert not any(step.mapped for step in report.steps)
            assert any("its file system has no maps" in note for note in report.notes) == (map is not False)
        doubled, nested = Doubled(4, 4), nn.Sequential(nn.Linear(4, 4))
        ms.load(doubled, path)
        large, half = nn.Linear(1024, 1024), nn.Linear(1024, 1024).bfloat16()
        ms.save(large, tmp_path / f"large{suffix}")
        ms.load(half, tmp_path / f"large{suffix}", dtype=torch.bfloat16)
        assert torch.equal(half.weight, large.weight.bfloat16())
        ms.load(nested, path, rules=[ms.rules.Prefix(add="0.")])
        assert torch.equal(doubled.weight, saved.weight * 2)
        assert torch.equal(nested[0].weight, saved.weight)
        checkpoint = ms.open(path)
        assert torch.equal(checkpoint.tensor("weight"), saved.weight)
        assert torch.equal(checkpoint.value(map=True)["bias"], saved.bias)


@pytest.mark.parametrize("in_place", [None, True, False])
def test_a_file_that_code_of_the_model_rewrites_changes_nothing(in_place: bool | None, tmp_path: Path) -> None:
    """The file stays open from the reading of its header on, and is the same file."""
    path, module = tmp_path / "x.safetensors", nn.Linear(600, 600)
    state = module.state_dict()
    ms.save({name: value + 1 for name, value in state.items()}, path)
    content, before = path.read_bytes(), whole(module)

    def rewrite(*_: object) -> None:
        with path.open("r+b") as file:
            file.write(content[:-4] + b"\0\0\0\0")

    module.register_load_state_dict_pre_hook(rewrite)
    with pytest.raises(ReadFailedError, match="changed"):
        ms.load(module, path, in_place=in_place)
    assert whole(module) == before
