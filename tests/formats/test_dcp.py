"""Directories of torch.distributed.checkpoint, with torch's own reader as the oracle."""

import pickle
import pickletools
import re
import shutil
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import modelstate as ms
from modelstate import errors
from tests.formats.dcp_files import Change, boxes_of, halves, write
from tests.formats.dcp_written import write as write_module
from tests.formats.test_unpickle import Command
from tests.formats.torch_files import DTYPES, assert_same, every_byte, is_copied, read_contents, values
from tests.programs import code_of, run_program

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:ComplexHalf")

RANKS = Path(__file__).parent / "dcp_ranks.py"
WRITTEN = Path(__file__).parent / "dcp_written"


def saved(directory: Path, state: dict[str, Any], **options: Any) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, sync_files=False, **options))
    return directory


def by_torch(directory: Path) -> Any:
    """The state dict as torch reads it."""
    out = directory.parent / "by_torch.pt"
    dcp_to_torch_save(directory, out)
    return torch.load(out, weights_only=False)


def reordered(found: Any, like: Any) -> Any:
    """Dicts in the order of `like`: torch's reader sorts the tensors to the end."""
    if isinstance(found, dict) and isinstance(like, dict) and found.keys() == like.keys():
        return {key: reordered(found[key], like[key]) for key in like}
    if isinstance(found, list) and isinstance(like, list) and len(found) == len(like):
        return [reordered(one, other) for one, other in zip(found, like, strict=True)]
    return found


def contiguous(node: Any) -> Any:
    """torch's reader copies what it reads into new tensors."""
    if isinstance(node, torch.Tensor):
        return node.contiguous()
    if isinstance(node, dict):
        return {key: contiguous(value) for key, value in node.items()}
    return type(node)(map(contiguous, node)) if type(node) in (list, tuple) else node


def assert_as_by_torch(directory: Path) -> None:
    true = by_torch(directory)
    assert_same(reordered(contiguous(values(read_contents(directory))), true), true)


def training_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(7, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "scalar": torch.tensor(2.5),
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "empty": [torch.empty(0, 3), torch.empty(0)],
        "list": [1, torch.ones(2), {"a": torch.zeros(2), "b": [torch.ones(1), None]}],
        "tuple": (1, torch.arange(3), "x"),
        "plain": {"step": 12, "text": "é", "numbers": [1, 2.5, 2**70], "none": None, "size": torch.Size([1, 2])},
        "by number": {0: torch.ones(1), 1: 2},
        "a.b": {"c.d": torch.ones(4)},
    }


@pytest.mark.parametrize(
    "options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=["one file", "threads", "file per item"]
)
def test_a_training_checkpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    state = training_state()
    directory = saved(tmp_path / "checkpoint", state, **options)
    true = by_torch(directory)
    true["optim"]["state"] = {int(key): kept for key, kept in true["optim"]["state"].items()}  # which torch leaves text
    assert_same(reordered(contiguous(values(read_contents(directory))), true), true)
    checkpoint = ms.open(directory)
    assert checkpoint.format == "dcp"
    assert checkpoint.files[0] == str(directory / ".metadata")
    assert set(checkpoint.files) == {str(path) for path in directory.iterdir()}
    assert checkpoint.verify() == checkpoint.nbytes
    assert list(ms.open(directory, key="model")) == list(state["model"])
    assert {"", "model", "optim", "optim.state", "optim.state.0"} <= set(checkpoint.containers)
    assert checkpoint.extra["optim.param_groups.0.betas"] == (0.9, 0.999)
    assert checkpoint.extra["plain"] == state["plain"]
    assert_same(checkpoint.tensor("model.0.weight"), state["model"]["0.weight"])


def trained(*names: str, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in names})
    optimizer = torch.optim.Adam(
        model.named_parameters() if options.pop("named", False) else model.parameters(), **options
    )
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return model, optimizer


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("capturable", [False, True], ids=["groups in one piece", "groups with tensors"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("key", ["optim", None])
def test_an_optimizer_takes_its_moments_from_the_converted_directory(
    tmp_path: Path, capturable: bool, suffix: str, key: str | None
) -> None:
    """The writer of torch makes text of the positions, and stock `load_state_dict` loads nothing from those."""
    model, optimizer = trained("a", "b", lr=torch.tensor(0.5) if capturable else 0.5)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    directory = saved(tmp_path / "checkpoint", state if key else optimizer.state_dict())
    path = tmp_path / f"new{suffix}"
    ms.convert_checkpoint(directory, path, format="torch" if suffix == ".pt" else "safetensors")
    whole = torch.load(path) if suffix == ".pt" else ms.open(path).value()
    for found in (whole, ms.open(directory).value()):
        later = torch.optim.Adam(model.parameters())
        later.load_state_dict(found[key] if key else found)
        assert_same(later.state_dict()["state"], optimizer.state_dict()["state"])
        assert later.param_groups[0]["lr"] == 0.5


def test_text_that_looks_like_a_position_stays_text(tmp_path: Path) -> None:
    """Names of parameters, keys that the groups do not list, and dicts of other kinds."""
    state = {
        "by name": {"state": {"0": {"exp_avg": torch.ones(1)}}, "param_groups": [{"params": ["0"], "lr": 1.0}]},
        "not listed": {"state": {"7": {"exp_avg": torch.ones(1)}}, "param_groups": [{"params": [0, True], "lr": 1.0}]},
        "other": {"state": {"0": torch.ones(1)}, "param_groups": [None, {"params": 3}]},
    }
    found = ms.open(saved(tmp_path / "checkpoint", state)).value()
    assert_same(found, state)


@pytest.mark.parametrize("release", ["2.13", "2.15"])
def test_directories_written_by_other_releases_of_torch(release: str) -> None:
    directory = WRITTEN / f"torch-{release}"
    assert_same(contiguous(values(read_contents(directory))), contiguous(write_module.state()))
    assert ms.open(directory).verify() == ms.open(directory).nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = every_byte(dtype, 60).reshape(5, 12)
    if not is_copied(dtype):
        pytest.skip(f"this torch copies no tensors of {dtype}")
    whole = saved(tmp_path / "whole", {"a": tensor, "scalar": tensor[0, 1].clone()})
    assert_same(values(read_contents(whole)), {"a": tensor, "scalar": tensor[0, 1]})
    split = write(tmp_path / "split", {"a": halves(tensor)})
    assert_same(values(read_contents(split)), {"a": tensor})


def test_a_flat_state_dict(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "c": {"d": [1]}, "e": torch.zeros(1)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path / "x", planner=planner)
    contents = read_contents(tmp_path / "x")
    assert_same(values(contents), {name: state[name] for name in contents.tree})  # type: ignore[attr-defined]
    assert set(contents.tree) == set(state)  # type: ignore[call-overload]


def test_a_list_with_gaps(tmp_path: Path) -> None:
    """Nothing is saved of an empty dict. torch's own reader needs it again to read the rest."""
    directory = saved(tmp_path / "x", {"a": [{}, torch.ones(1)]})
    assert_same(values(read_contents(directory)), {"a": [None, torch.ones(1)]})


# Several ranks.


@pytest.fixture(scope="module")
def of_three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    done = run_program(code_of([str(RANKS), "3", str(directory)]), environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 0, done.stderr[-2000:]
    return directory


@pytest.mark.slow
def test_sharded_by_several_ranks(of_three_ranks: Path) -> None:
    directory = of_three_ranks / "checkpoint"
    assert_as_by_torch(directory)
    contents = read_contents(directory)
    true = torch.load(of_three_ranks / "whole.pt")
    assert_same(reordered(values(contents), true), true)
    checkpoint = ms.open(directory)
    assert checkpoint["model.0.weight"].kind == checkpoint["columns"].kind == "dcp shards"
    assert checkpoint["model.0.weight"].shape == (7, 6)
    # Only one of three ranks had a row of it.
    assert checkpoint["model.2.weight"].kind == checkpoint["everywhere"].kind == "strided"
    assert checkpoint.verify() == checkpoint.nbytes == sum(spec.nbytes for spec in checkpoint.values())
    assert len(checkpoint.files) == 4


@pytest.mark.slow
def test_sharded_into_a_model(of_three_ranks: Path) -> None:
    true = torch.load(of_three_ranks / "whole.pt")["model"]
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1))
    ms.load(model, of_three_ranks / "checkpoint")
    assert_same(dict(model.state_dict()), dict(true))
    with ms.skeleton():
        empty = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1))
    ms.load(empty, of_three_ranks / "checkpoint", verify=True)
    assert_same(dict(empty.state_dict()), dict(true))


def test_rows_of_a_sharded_tensor(tmp_path: Path) -> None:
    tensor = torch.arange(35.0).reshape(7, 5)
    checkpoint = ms.open(write(tmp_path / "x", {"a": halves(tensor)}))
    rows = torch.empty(3, 5)
    checkpoint.read_into("a", rows, 2, 5)
    assert_same(rows, tensor[2:5])


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_division_into_boxes(tmp_path: Path, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    tensor = torch.randn(shape)
    boxes = boxes_of(shape, lambda n: data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 3)))
    chunks = {
        offset: tensor[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].clone()
        for offset, size in data.draw(st.permutations(boxes))
    }
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
    write(tmp_path / "x", {"a": chunks})
    assert_same(values(read_contents(tmp_path / "x")), {"a": tensor})

    spoiled = dict(chunks)
    gone = data.draw(st.sampled_from(sorted(chunks)))
    if data.draw(st.booleans()):
        # As many elements as there should be, but elsewhere.
        moved = tuple(offset + 1 for offset in gone)
        spoiled = {moved if offset == gone else offset: chunk for offset, chunk in chunks.items()}
        if len(spoiled) < len(chunks):
            return
    elif len(chunks) > 1:
        del spoiled[gone]
    else:
        return
    write(tmp_path / "x", {"a": spoiled}, shapes={"a": shape})
    with pytest.raises(errors.DamagedFileError):
        ms.open(tmp_path / "x")


# What is refused.


@pytest.mark.parametrize("place", ["instead", "planner_data", "storage_meta", "table", "thrown away"])
def test_hostile_metadata_runs_nothing(tmp_path: Path, place: str) -> None:
    marker = tmp_path / "marker"

    def change(metadata: Metadata) -> None:
        if place == "table":
            metadata.state_dict_metadata["b"] = Command(marker)  # type: ignore[assignment]
        else:
            setattr(metadata, place, Command(marker))

    directory = write(tmp_path / "x", {"a": halves(torch.ones(4))}, change=change if place != "instead" else id)
    if place == "instead":
        (directory / ".metadata").write_bytes(pickle.dumps(Command(marker)))
    if place == "thrown away":
        true = (directory / ".metadata").read_bytes()
        (directory / ".metadata").write_bytes(
            pickletools.optimize(pickle.dumps(Command(marker), 2))[:-1] + b"0" + true[2:]
        )
    for options in ({}, {"allow": ["posix.system", "os.system"]}):
        with pytest.raises(errors.ForbiddenGlobalError, match="do not trust") as raised:
            ms.open(directory, **options)  # type: ignore[arg-type]
        assert raised.value.refused == (("posix.system", ""),)
        assert str(directory / ".metadata") in str(raised.value)
    assert not marker.exists()
    if place in ("instead", "table"):
        with pytest.raises(errors.DamagedFileError):
            ms.open(directory, skip_forbidden=True)
    else:
        assert list(ms.open(directory, skip_forbidden=True)) == ["a"]
    assert not marker.exists()
    # The file does what it is feared for.
    pickle.loads((directory / ".metadata").read_bytes())
    assert marker.exists()


class Custom:
    made = 0

    def __init__(self) -> None:
        Custom.made += 1


def test_other_classes_are_named_and_may_be_allowed(tmp_path: Path) -> None:
    directory = write(
        tmp_path / "x",
        {"a": halves(torch.ones(4))},
        {"b.c": [Custom()], "d": {"e": Custom()}},
        change=lambda metadata: setattr(metadata, "storage_meta", Custom()),
    )
    name = f"{Custom.__module__}.Custom"
    with pytest.raises(errors.ForbiddenGlobalError) as raised:
        ms.open(directory)
    assert raised.value.refused == ((name, ""),)
    made = Custom.made
    assert isinstance(ms.open(directory, allow=[Custom]).extra["d"]["e"], Custom)
    assert Custom.made == made

    directory = write(tmp_path / "y", {}, {"b.c": [Custom()], "d": {"e": Custom()}, "f": 1})
    with pytest.raises(errors.ForbiddenGlobalError) as raised:
        ms.open(directory)
    assert raised.value.refused == ((name, "b.c.0"), (name, "d.e"))
    assert ms.open(directory, skip_forbidden=True).extra["f"] == 1


def _first_place(metadata: Metadata) -> tuple[MetadataIndex, _StorageInfo]:
    index: MetadataIndex = next(iter(metadata.storage_data))
    return index, metadata.storage_data[index]


def _place(**fields: Any) -> Change:
    def change(metadata: Metadata) -> None:
        index, info = _first_place(metadata)
        metadata.storage_data[index] = replace(info, **fields)

    return change


def _table(**fields: Any) -> Change:
    return lambda metadata: metadata.state_dict_metadata["a"].__dict__.update(fields)


def _field(name: str, value: object) -> Change:
    return lambda metadata: setattr(metadata, name, value)


def _chunk(**fields: Any) -> Change:
    return lambda metadata: metadata.state_dict_metadata["a"].chunks[0].__dict__.update(fields)  # type: ignore[union-attr]


def _same_bytes(metadata: Metadata) -> None:
    one, other = metadata.storage_data
    metadata.storage_data[other] = metadata.storage_data[one]


def _colliding(metadata: Metadata) -> None:
    _, place = _first_place(metadata)
    for offsets in product(range(-4, 5), repeat=3):
        metadata.storage_data[MetadataIndex("a", [(2**61 - 1) * offset for offset in offsets])] = place


FLAWS: dict[str, tuple[Change, type[errors.OpenError], str]] = {
    "parent": (_place(relative_path="../__0_0.distcp"), errors.DamagedFileError, "outside its directory"),
    "no text as a file": (_place(relative_path="a/\udfff"), errors.DamagedFileError, "outside its directory"),
    "missing": (_place(relative_path="__7_0.distcp"), errors.SourceNotFoundError, "__7_0.distcp"),
    "behind the end": (_place(offset=10**6), errors.TruncatedFileError, "ends within a"),
    "too short": (_place(length=700), errors.TruncatedFileError, "has no end"),
    "negative": (_place(offset=-1), errors.DamagedFileError, "nowhere"),
    "shifted": (_place(offset=5, length=100), errors.DamagedFileError, "not an archive"),
    "number as a file": (_place(relative_path=1), errors.DamagedFileError, "the file of an item"),
    "compressed": (_place(transform_descriptors=["stream.zstd"]), errors.UnsupportedTensorError, "stream.zstd"),
    "same bytes": (_same_bytes, errors.DamagedFileError, "in the same bytes"),
    "offsets of one hash": (_colliding, errors.DamagedFileError, "of one hash"),
    "no place": (lambda m: m.storage_data.pop(_first_place(m)[0]), errors.DamagedFileError, "the place of an item"),
    "no places": (_field("storage_data", None), errors.DamagedFileError, "the table of places"),
    "no table": (_field("state_dict_metadata", []), errors.DamagedFileError, "the table of contents"),
    "no entry": (lambda m: m.state_dict_metadata.update(b=1), errors.DamagedFileError, "TensorStorageMetadata"),  # type: ignore[call-overload]
    "no text": (lambda m: m.state_dict_metadata.update({1: 2}), errors.DamagedFileError, "the name of an item"),  # type: ignore[dict-item]
    "other dtype": (
        lambda m: setattr(m.state_dict_metadata["a"].properties, "dtype", torch.int32),  # type: ignore[union-attr]
        errors.DamagedFileError,
        "not what the metadata says",
    ),
    "no dtype": (_table(properties=None), errors.DamagedFileError, "the dtype"),
    "larger": (_table(size=torch.Size([5, 3])), errors.DamagedFileError, "leave holes"),
    "smaller": (_table(size=torch.Size([3, 3])), errors.DamagedFileError, "outside its tensor"),
    "text": (_table(size="4"), errors.DamagedFileError, "not a tuple"),
    "immense": (_table(size=torch.Size([2**62, 4])), errors.DamagedFileError, "impossible layout"),
    "overlapping": (_chunk(offsets=torch.Size([1, 0])), errors.DamagedFileError, "overlap"),
    "before the beginning": (_chunk(offsets=torch.Size([-1, 0])), errors.DamagedFileError, "outside its tensor"),
    "paths of others": (_field("planner_data", {"b": ("b",)}), errors.DamagedFileError, "no path"),
    "another path": (_field("planner_data", {"a": ("b",)}), errors.DamagedFileError, "not that of its path"),
    "no path": (_field("planner_data", {"a": "a"}), errors.DamagedFileError, "a path"),
    "path of lists": (_field("planner_data", {"0": (0,)}), errors.DamagedFileError, "a path"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaws_of_the_metadata(tmp_path: Path, flaw: str) -> None:
    change, error, match = FLAWS[flaw]
    directory = write(tmp_path / "x", {"a": halves(torch.randn(4, 3))}, change=change)
    shutil.copy(directory / "__0_0.distcp", tmp_path)
    with pytest.raises(error, match=match) as raised:
        ms.open(directory)
    assert str(directory) in raised.value.where


@pytest.mark.parametrize(
    ("paths", "error"),
    [
        ({"a": ("a",), "a.b": ("a", "b")}, errors.DamagedFileError),
        ({"a.b": ("a", "b"), "a": ("a",)}, errors.DamagedFileError),
        ({"a.0": ("a", 0), "a.b": ("a", "b")}, errors.DamagedFileError),
        ({"a.1000000000": ("a", 1_000_000_000)}, errors.DamagedFileError),
        ({"a" + ".a" * 200: ("a",) * 201}, errors.DamagedFileError),
    ],
    ids=["leaf, then dict", "dict, then leaf", "list and dict", "a long list", "deep"],
)
def test_paths_that_make_no_tree(tmp_path: Path, paths: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        ms.open(write(tmp_path / "x", {}, dict.fromkeys(paths, 1), paths=paths))


def test_chunks_of_another_shape_or_kind(tmp_path: Path) -> None:
    good = halves(torch.randn(4, 3))
    second = list(good)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2, 3), 1.0, 0, torch.qint8)
    for number, (chunk, error) in enumerate(
        [
            (good[second].t().contiguous(), errors.DamagedFileError),
            (torch.ones(1, 1).expand(2, 3), errors.DamagedFileError),
            (torch.ones(2, 3).to_sparse(), errors.UnsupportedTensorError),
            (quantized, errors.UnsupportedTensorError),
        ]
    ):
        directory = write(tmp_path / str(number), {"a": {**good, second: chunk}}, shapes={"a": (4, 3)})
        with pytest.raises(error, match=rf"^{re.escape(str(directory))}"):
            ms.open(directory).tensor("a")
    directory = write(tmp_path / "x", {"a": {(0,): torch.ones(2)}}, {"b": 1})
    # The places of the two are exchanged.
    raw = pickle.loads((directory / ".metadata").read_bytes())
    one, other = raw.storage_data
    raw.storage_data[one], raw.storage_data[other] = raw.storage_data[other], raw.storage_data[one]
    (directory / ".metadata").write_bytes(pickle.dumps(raw))
    with pytest.raises(errors.DamagedFileError, match="is not a tensor"):
        ms.open(directory)


def test_a_tensor_of_no_chunks(tmp_path: Path) -> None:
    change: Change = lambda metadata: metadata.state_dict_metadata["a"].chunks.clear()  # type: ignore[union-attr]  # noqa: E731
    directory = write(tmp_path / "x", {"a": {(0, 0): torch.empty(0, 3)}}, change=change)
    assert_same(values(read_contents(directory)), {"a": torch.empty(0, 3)})


def test_metadata_of_before_2_3(tmp_path: Path) -> None:
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    tensor = torch.randn(4)
    directory = write(tmp_path / "x", {"a": halves(tensor)}, change=_table(properties=TensorProperties(torch.float32)))
    assert_same(values(read_contents(directory)), {"a": tensor})


def test_damaged_metadata(tmp_path: Path) -> None:
    directory = write(tmp_path / "x", {"a": halves(torch.ones(4))})
    true = (directory / ".metadata").read_bytes()
    for data, error, match in (
        (true[:-40], errors.TruncatedFileError, "ends early"),
        (b"", errors.TruncatedFileError, "empty"),
        (b"text", errors.DamagedFileError, "damaged"),
        (true + b".", errors.DamagedFileError, "goes on after its end"),
        (pickle.dumps({}), errors.DamagedFileError, "a Metadata is missing"),
        (b"\x80\x02U\x01aQ.", errors.DamagedFileError, "damaged"),
        (b"\x80\x02(U\x01atQ.", errors.DamagedFileError, "refers to a storage"),
    ):
        (directory / ".metadata").write_bytes(data)
        with pytest.raises(error, match=match):
            ms.open(directory)


# Directories.


def test_which_file_of_a_directory(tmp_path: Path) -> None:
    directory = write(tmp_path / "x", {"a": halves(torch.ones(4))})
    torch.save({"step": 1}, directory / "train_state.pt")
    assert ms.open(directory).format == ms.open(directory / ".metadata").format == "dcp"
    with pytest.raises(errors.UnknownFormatError, match="open its directory"):
        ms.open(directory / "__0_0.distcp")
    for path in directory.glob("*.distcp"):
        path.unlink()
    with pytest.raises(errors.SourceNotFoundError):
        ms.open(directory)
    (directory / ".metadata").write_text("of another tool")
    assert ms.open(directory).format == "torch zip"
    torch.save({"a": torch.ones(1)}, directory / "pytorch_model.bin")
    write(directory, {"a": halves(torch.ones(4))})
    assert ms.open(directory).format == "torch zip"


def test_a_save_that_was_not_finished(tmp_path: Path) -> None:
    directory = write(tmp_path / "x", {"a": halves(torch.ones(4))})
    (directory / ".metadata").unlink()
    with pytest.raises(errors.UnknownFormatError, match=r"without \.metadata"):
        ms.open(directory)
