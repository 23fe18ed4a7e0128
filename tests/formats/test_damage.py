"""Damaged files of other tools: the values that were written, or an error of the library."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings, strategies as st
from safetensors.torch import save_file

import modelstate as ms
from modelstate import errors
from tests.formats.files import index_text, same
from tests.sweeps import examples

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

STATE = {
    "layers.0.weight": torch.arange(15.0).reshape(3, 5),
    "layers.0.bias": torch.arange(40, dtype=torch.bfloat16).view(8, 5).t().contiguous(),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "ключ 🙂": torch.tensor([True, False]),
}


def _dcp(folder: Path) -> Path:
    dcp.save(STATE, checkpoint_id=folder / "x", no_dist=True)
    return folder / "x"


def _legacy(folder: Path) -> Path:
    torch.save(STATE, folder / "x.pt", _use_new_zipfile_serialization=False)
    return folder / "x.pt"


def _zip(folder: Path) -> Path:
    sparse = {"sparse": torch.eye(3).to_sparse(), "turned": torch.arange(6.0).reshape(2, 3).t()}
    torch.save(STATE | sparse, folder / "x.pt")
    return folder / "x.pt"


def _safetensors(folder: Path) -> Path:
    save_file(STATE, folder / "x.safetensors", metadata={"format": "pt"})
    return folder / "x.safetensors"


def _index(folder: Path) -> Path:
    save_file(STATE, folder / "a.safetensors")
    (folder / "x.index.json").write_text(index_text(dict.fromkeys(STATE, "a.safetensors")))
    return folder / "x.index.json"


@dataclass
class Format:
    write: Callable[[Path], Path]
    """Returns what is opened."""
    file: str = ""
    """The file that is damaged, in a directory that is opened."""
    is_sealed: bool = True
    """Whether damage of anything but the bytes of tensors is found when the file is opened."""
    has_checksums: bool = True


FORMATS = {
    "safetensors": Format(_safetensors, is_sealed=False, has_checksums=False),
    "zip": Format(_zip),
    "legacy": Format(_legacy, is_sealed=False, has_checksums=False),
    "index": Format(_index, has_checksums=False),
    "dcp metadata": Format(_dcp, ".metadata", is_sealed=False),
    "dcp data": Format(_dcp, "__0_0.distcp"),
}


@pytest.fixture(scope="module", params=FORMATS)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path, bytes]:
    """The format, what is opened, the file that is damaged, and its content."""
    opened = FORMATS[request.param].write(tmp_path_factory.mktemp("damage"))
    file = opened / FORMATS[request.param].file
    return request.param, opened, file, file.read_bytes()


def read(path: Path) -> dict[str, Any]:
    checkpoint = ms.open(path)
    dense = {name: checkpoint.tensor(name).to_dense() for name in checkpoint}
    # A copy of a boolean may have other bits that are true, too.
    return {name: (one.view(torch.uint8) if one.dtype is torch.bool else one).clone() for name, one in dense.items()}


def regions_of(path: Path, file: Path) -> list[range]:
    """The bytes of tensors in a file."""
    parts = [part for spec in ms.open(path).values() for part in getattr(spec.stored, "parts", (spec.stored,))]
    places = [part.storage for part in parts if part.storage.path == str(file)]
    return [range(place.start, place.start + place.nbytes) for place in places]


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@example(at=0.998046875, bit=1)
def test_a_flipped_bit(sample: tuple[str, Path, Path, bytes], at: float, bit: int) -> None:
    name, opened, file, data = sample
    file.write_bytes(data)
    true, place = read(opened), int(at * len(data))
    is_in_tensor = any(place in region for region in regions_of(opened, file))
    damaged = bytearray(data)
    damaged[place] ^= 1 << bit
    file.write_bytes(damaged)
    try:
        found = read(opened)
        if FORMATS[name].has_checksums:
            ms.open(opened).verify()
            assert not is_in_tensor
    except errors.ModelStateError:
        assert not is_in_tensor or FORMATS[name].has_checksums
        return
    finally:
        file.write_bytes(data)
    if FORMATS[name].is_sealed:
        assert list(found) == list(true)
    if name != "legacy":  # which has no checksum for the shapes
        with_values = [key for key in found if key in true and getattr(true[key], "nbytes", 1)]  # else only a shape
        differing = [key for key in with_values if not same(found[key], true[key])]
        assert len(differing) == (1 if is_in_tensor else 0)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_short(sample: tuple[str, Path, Path, bytes], share: float) -> None:
    _, opened, file, data = sample
    file.write_bytes(data[: int(share * len(data.rstrip()))])
    try:
        with pytest.raises(errors.OpenError):
            ms.open(opened)
    finally:
        file.write_bytes(data)
