"""Shards with an index: what the tools of Hugging Face write, and indexes that lie."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate.errors import DamagedFileError, OpenError, SourceNotFoundError
from tests.faults import Request, faulty_reads
from tests.formats.files import index_text, same
from tests.io.test_lease import writes_at_once

STATE = {f"layers.{i}.weight": torch.full((4, 4), float(i)) for i in range(6)}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write(
    directory: Path, weight_map: dict[str, str] | None = None, index: str = "model.safetensors.index.json"
) -> Path:
    """Two shards of `STATE` and an index, which tells the truth unless another is given."""
    directory.mkdir(parents=True, exist_ok=True)
    names = list(STATE)
    held: dict[str, str] = {}
    for shard, part in zip(SHARDS, (names[:4], names[4:]), strict=True):
        save_file({name: STATE[name] for name in part}, directory / shard, metadata={"format": "pt"})
        held |= dict.fromkeys(part, shard)
    path = directory / index
    path.write_text(index_text(held if weight_map is None else weight_map))
    return path


def truth() -> dict[str, str]:
    return {name: SHARDS[0] if i < 4 else SHARDS[1] for i, name in enumerate(STATE)}


# What is right.


def test_what_huggingface_hub_writes(tmp_path: Path) -> None:
    save_torch_state_dict(STATE, tmp_path, max_shard_size=200)
    path = tmp_path / "model.safetensors.index.json"
    found = ms.open(path)
    assert list(found) == list(STATE)
    assert all(same(found.tensor(name), STATE[name]) for name in STATE)


def linears(count: int, width: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


@pytest.mark.slow
def test_more_shards_than_a_process_may_open(tmp_path: Path) -> None:
    """Files make room for others, and are mapped as far as there are descriptors. No file is read for each shard."""
    state = {f"{i}.weight": torch.full((4, 4), float(i)) for i in range(300)}
    save_torch_state_dict(state, tmp_path, max_shard_size=64)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (240, hard))
    try:
        for options in ({}, {"map": True}, {"in_place": True}, {"dtype": "float64"}):
            with ms.skeleton():
                mapped = linears(300)
            for model in (mapped, linears(300)):
                report = ms.load(model, tmp_path, **options)
                assert all(same(value.float(), state[name]) for name, value in model.state_dict().items())
                assert "dtype" in options or any("(ulimit -n)" in note for note in report.notes) == (model is mapped)
        with faulty_reads() as faults:
            ms.convert_checkpoint(tmp_path, tmp_path / "one.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sum(request.call == "open" and request.path.endswith(".json") for request in faults.requests) < 10
    assert same(ms.open(tmp_path / "one.pt").tensor("299.weight"), state["299.weight"])


def test_leased_files_make_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 70 files, 60 may be open: all are looked at, and those of values that are not transformed are leased."""
    sysconf, free = os.sysconf, dict[str, bool]()
    monkeypatch.setattr(os, "sysconf", lambda name: 240 if name == "SC_OPEN_MAX" else sysconf(name))
    shards = {f"{i}.weight": f"model-{70 - i:05d}-of-00070.safetensors" for i in range(70)}
    for name, shard in shards.items():
        save_file({name: torch.ones(300, 300)}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(index_text(shards))

    def on_read(request: Request) -> None:
        if request.call == "preadv_cached" and not free:
            free.update({name: writes_at_once(tmp_path / shard) for name, shard in shards.items()})

    with faulty_reads(before=on_read):
        ms.load(linears(70, 300), tmp_path, transform=dict.fromkeys(list(shards)[:15], lambda _, value: value + 1))
    assert free == {name: name in list(shards)[:15] for name in shards}
    assert all("(ulimit -n)" in step.why for step in ms.load(linears(70, 300), tmp_path).steps)


def test_the_order_is_that_of_the_shards(tmp_path: Path) -> None:
    path = write(tmp_path, dict(reversed(truth().items())))
    found = ms.open(path)
    assert list(found) == list(STATE)
    assert found.format == "safetensors"
    assert [*found.files] == [str(path), *(str(tmp_path / shard) for shard in SHARDS)]
    assert found.metadata == {"format": "pt"}


def test_metadata_that_differs_says_whose_it_is(tmp_path: Path) -> None:
    path = write(tmp_path)
    second = {name: STATE[name] for name in list(STATE)[4:]}
    save_file(second, tmp_path / SHARDS[1], metadata={"format": "np", "by": "x"})
    found = ms.open(path).metadata
    assert found == {f"{SHARDS[0]}:format": "pt", f"{SHARDS[1]}:format": "np", "by": "x"}


@pytest.mark.parametrize(("suffix", "format"), [("safetensors", "safetensors"), ("bin", "torch zip")])
def test_shards_keep_their_versions(suffix: str, format: str, tmp_path: Path) -> None:
    states = [torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict(prefix=prefix) for prefix in ("a.", "b.")]
    shards = {f"model-0000{number}-of-00002.{suffix}": state for number, state in enumerate(states, 1)}
    for shard, state in shards.items():
        ms.save(state, tmp_path / shard)
    path = tmp_path / f"model.{suffix}.index.json"
    path.write_text(index_text({name: shard for shard, state in shards.items() for name in state}))
    found = ms.open(path)
    assert (found.format, list(found)) == (format, [name for shard in shards for name in ms.open(tmp_path / shard)])
    versions = {name: saved for state in states for name, saved in state._metadata.items()}  # type: ignore[attr-defined]
    assert found.versions == found.value()._metadata == versions


def test_an_index_may_be_in_any_order_and_say_more(tmp_path: Path) -> None:
    path = write(tmp_path)
    text = {"weight_map": truth(), "metadata": {"total_size": 1.5, "list": [1, {"a": "]}"}], "none": None}, "x": -1e3}
    path.write_text(json.dumps(text))
    assert ms.open(path).keys() == STATE.keys()


def test_shards_may_lie_in_a_subdirectory(tmp_path: Path) -> None:
    path = write(tmp_path / "weights").rename(tmp_path / "model.safetensors.index.json")
    path.write_text(index_text({name: f"weights/{shard}" for name, shard in truth().items()}))
    assert ms.open(path).keys() == STATE.keys()


# Links.


def link(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))


@pytest.mark.parametrize("index_is_a_link", [True, False])
def test_the_cache_of_hugging_face(index_is_a_link: bool, tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    index = write(repository / "blobs")
    snapshot = repository / "snapshots" / "0123abc"
    for number, shard in enumerate(SHARDS):
        link(snapshot / shard, (repository / "blobs" / shard).rename(repository / "blobs" / f"{number:064x}"))
    place = snapshot / index.name
    if index_is_a_link:
        link(place, index.rename(repository / "blobs" / f"{9:040x}"))
    else:
        index.rename(place)
    assert ms.open(place).keys() == STATE.keys()


# Indexes that change.


def test_an_index_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    """Three times a save removes the shards when the first of them is opened."""
    path, opened = tmp_path / "model.safetensors", set[str]()

    def save(value: int) -> None:
        ms.save({name: torch.full((4,), value) for name in "ab"}, path, shard_size_bytes=16)

    def before(request: Request) -> None:
        if "-00001-of-" in request.path and request.path not in opened and len(opened) < 3:
            opened.add(request.path)
            save(len(opened))

    save(0)
    with faulty_reads(before=before):
        found = ms.open(path)
    assert [found.tensor(name).tolist() for name in found] == [[3] * 4] * 2


# Indexes that lie.


@pytest.mark.parametrize(
    "name",
    ["../{shard}", "/etc/passwd", "..\\{shard}", "C:\\{shard}", "\\\\server\\share\\{shard}", "..", "", "{shard}\0"],
)
def test_a_shard_outside_the_directory(name: str, tmp_path: Path) -> None:
    index = write(tmp_path / "model")
    save_file(STATE, tmp_path / SHARDS[0])
    outside = name.format(shard=SHARDS[0], directory=tmp_path / "model")
    index.write_text(index_text(truth() | {"layers.0.weight": outside}))
    with pytest.raises(DamagedFileError, match="files outside its directory") as raised:
        ms.open(index)
    assert isinstance(raised.value, ValueError)
    assert raised.value.found


def test_every_missing_shard_is_named(tmp_path: Path) -> None:
    index = write(tmp_path)
    for shard in SHARDS:
        (tmp_path / shard).unlink()
    with pytest.raises(SourceNotFoundError, match="2 of 2 shards") as raised:
        ms.open(index)
    assert all(shard in raised.value.found for shard in SHARDS)
    assert isinstance(raised.value, FileNotFoundError)


def test_a_link_to_nothing_is_a_missing_shard(tmp_path: Path) -> None:
    index = write(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    link(tmp_path / SHARDS[1], tmp_path / "not downloaded")
    with pytest.raises(SourceNotFoundError, match="1 of 2"):
        ms.open(index)


def test_a_name_in_two_shards(tmp_path: Path) -> None:
    index = write(tmp_path)
    save_file({name: STATE[name] for name in list(STATE)[3:]}, tmp_path / SHARDS[1])
    with pytest.raises(DamagedFileError, match="0 tensors of the index not in the shard, 1 of the shards") as raised:
        ms.open(index)
    assert raised.value.found == f"'layers.3.weight' in '{SHARDS[1]}'"


def test_a_name_twice_in_the_index(tmp_path: Path) -> None:
    index = write(tmp_path)
    index.write_text('{"weight_map": {"a": "%s", "a": "%s"}}' % SHARDS)  # noqa: UP031
    with pytest.raises(DamagedFileError, match="'a' is in one object twice"):
        ms.open(index)
    index.write_text('{"weight_map": {"a": "x"}, "weight_map": {"b": "x"}}')
    with pytest.raises(DamagedFileError, match="'weight_map' is in one object twice"):
        ms.open(index)


@pytest.mark.parametrize(
    ("change", "expected", "found"),
    [
        ({"more": SHARDS[0]}, "'more'", ""),
        ({"layers.0.weight": SHARDS[1]}, "'layers.0.weight'", "'layers.0.weight'"),
        ({"layers.5.weight": None}, "", "'layers.5.weight'"),
        ({"layers.5.weight": None, "layers.6.weight": SHARDS[1]}, "'layers.6.weight'", "'layers.5.weight'"),
    ],
)
def test_an_index_of_another_version(change: dict[str, str | None], expected: str, found: str, tmp_path: Path) -> None:
    names = {name: shard for name, shard in (truth() | change).items() if shard}
    counts = f"{1 if expected else 0} tensors? of the index not in the shard, {1 if found else 0} of the shards"
    with pytest.raises(DamagedFileError, match=f"do not hold what the index says: {counts}") as raised:
        ms.open(write(tmp_path, names))
    assert expected in raised.value.expected
    assert bool(expected) == bool(raised.value.expected)
    assert found in raised.value.found
    assert bool(found) == bool(raised.value.found)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"metadata": {"total_size": 3}}',
        '{"weight_map": {}}',
        '{"weight_map": null}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "b"}',
        '{"weight_map": {"a": "b"}} and more',
        '{"metadata": {"a": [}, "weight_map": {"a": "b"}',
        '{"metadata": ' + "[" * 100_000,
        '{"metadata": ' + "[]," * 100_000,
        '{"metadata": nonsense, "weight_map": {"a": "b"}}',
        '{"weight_map": {"\ud800": "b"}}',
    ],
)
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    index = write(tmp_path)
    index.write_text(text, errors="surrogatepass")
    with pytest.raises(DamagedFileError) as raised:
        ms.open(index)
    assert type(raised.value) is DamagedFileError
    assert str(index) in raised.value.where
    assert raised.value.remedy


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_shard_that_is_no_file_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    index = write(tmp_path)
    (tmp_path / SHARDS[0]).unlink()
    make(tmp_path / SHARDS[0])
    with pytest.raises(OpenError, match=SHARDS[0]):
        ms.open(index)


@pytest.mark.parametrize("tree", [[1], {"a": {"b": 1}, 3: 4}])
def test_a_shard_that_is_no_flat_mapping(tree: object, tmp_path: Path) -> None:
    index = write(tmp_path)
    torch.save(tree, tmp_path / SHARDS[0])
    with pytest.raises(DamagedFileError, match="flat mapping"):
        ms.open(index)


@pytest.mark.slow
def test_an_index_of_more_shards_than_are_read_is_not_called_damaged(tmp_path: Path) -> None:
    index = write(tmp_path, {f"w{number}": f"{number}.safetensors" for number in range(100_001)})
    with pytest.raises(DamagedFileError, match="100,000 different values") as raised:
        ms.open(index)
    assert "fewer, larger shards" in raised.value.remedy
    assert "download" not in str(raised.value)


def test_an_index_beyond_all_measure_is_not_read(tmp_path: Path) -> None:
    index = write(tmp_path)
    with index.open("r+b") as file:
        file.truncate(10 << 30)
    with pytest.raises(DamagedFileError, match="larger than that of any model"):
        ms.open(index)


def test_an_index_of_more_parts_than_are_parsed(tmp_path: Path) -> None:
    index = write(tmp_path)
    index.write_text('{"more": [%s[]],%s' % ("[]," * 2_500_000, index.read_text().lstrip()[1:]))  # noqa: UP031
    with pytest.raises(DamagedFileError, match="more than 5,000,000 parts"):
        ms.open(index)


def test_errors_of_a_shard_name_the_shard(tmp_path: Path) -> None:
    index = write(tmp_path)
    shard = tmp_path / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(OpenError) as raised:
        ms.open(index)
    assert raised.value.where == str(shard)
