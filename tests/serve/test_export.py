"""`modelstate.export`: what the file says, who can read it, and what is not written."""

import errno
import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import modelstate as ms
from modelstate.errors import (
    ChecksumError,
    DamagedFileError,
    ExportError,
    LiveTargetError,
    NewerManifestError,
    OptionError,
    SourceNotFoundError,
    TargetExistsError,
    UnsavableError,
    WriteFailedError,
)
from modelstate.io import system
from modelstate.serve import export as exporting
from modelstate.serve.program_file import NAME
from tests.serve.models import Decoder, Everything, Fused, Nested, Small, everything, randomised
from tests.serve.packages import linear_package, needs_aoti, package_of, package_of_torch

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "program.pt2"


def manifest_in(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(NAME)]
        return json.loads(archive.read(name))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exported", "aoti"])
def test_what_the_file_says(kind: Any, path: Path) -> None:
    if kind == "aoti":
        path = package_of(everything(), X)
    else:
        manifest = ms.export(Everything(), (X,), path, training=True)
        assert json.loads(manifest.to_json()) == manifest_in(path)
    said = manifest_in(path)
    assert (said["kind"], said["torch"]) == (kind, torch.__version__)
    tensors = {one["name"]: one for one in said["tensors"]}
    assert tensors["a.weight"] == {
        "name": "a.weight",
        "shape": [4, 4],
        "dtype": "float32",
        "stride": [4, 1],
        "role": "parameter",
        "alias": "a.weight",
    }
    assert tensors["b.weight"]["alias"] == "a.weight"
    assert [name for name, one in tensors.items() if one["role"] == "hidden"] == ["shift"]
    assert set(tensors) == {*ms.serve.runtime_state(Everything()), "shift"}


@pytest.mark.slow
def test_others_read_the_exported_file(path: Path) -> None:
    module = Decoder().eval()
    ms.export(module, (X,), path)
    assert torch.equal(torch.export.load(path).module()(X), module(X))


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["eager", "runtime"])
@pytest.mark.parametrize("make", [Decoder, Nested])
def test_the_map_of_names_comes_with_the_file(make: Any, spelling: str, path: Path) -> None:
    ms.export(make().eval(), (X,), path)
    live, trained = ms.Live(path), randomised(make())
    assert live.kind == "exported"
    live.swap(trained.state_dict() if spelling == "eager" else ms.serve.runtime_state(trained))
    assert torch.allclose(live(X), trained(X))


@pytest.mark.slow
def test_hooks_that_fuse_leave_no_map_and_a_reason(path: Path) -> None:
    said = ms.export(Fused().eval(), (X,), path)
    assert said.names is None
    assert "qkv" in said.names_reason
    assert "no map of names" in str(said)
    trained = randomised(Fused())
    ms.Live(path).swap(ms.serve.runtime_state(trained))
    live = ms.Live(path, names=trained)
    live.swap(trained.state_dict(), exact=False)
    assert torch.allclose(live(X), trained(X))


@pytest.mark.slow
def test_ties_stay_one_tensor_in_the_file(path: Path) -> None:
    ms.export(Everything().eval(), (X,), path)
    live, state = ms.Live(path), dict(Everything().state_dict())
    assert live.fixed == ("constant",)
    state["b.weight"] = state["b.weight"] + 1
    with pytest.raises(ms.PlanError):
        live.swap(state)


@pytest.mark.parametrize("wrapper", [lambda module: module, pytest.param(torch.compile, marks=pytest.mark.slow)])
def test_keywords_and_dynamic_sizes(wrapper: Any, path: Path) -> None:
    module, shapes = nn.Linear(4, 4), {"input": {0: Dim("size", min=2, max=16)}}
    manifest = ms.export(wrapper(module), (), path, kwargs={"input": X}, dynamic_shapes=shapes)
    assert [tensor.name for tensor in manifest.tensors] == ["weight", "bias"]
    x = torch.ones(7, 4)
    assert torch.equal(ms.Live(path)(input=x), module(x))


@pytest.mark.slow
def test_the_module_stays_as_it_is(path: Path) -> None:
    module = Everything()
    before = {name: (id(value), value.clone()) for name, value in module.state_dict(keep_vars=True).items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    ms.export(module.eval(), (X,), path)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in module.state_dict(keep_vars=True).items():
        assert id(value) == before[name][0]
        # An export calls the module itself, which counts its calls.
        assert name == "seen" or torch.equal(value, before[name][1])


class Folded(nn.Module):
    """Answers with a number that was taken of a weight when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            return x * self.weight * 2.0
        return x * self.weight * self.scale


class Otherwise(nn.Linear):
    """Answers in another way when it is exported."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x)
        return found + 1 if torch.compiler.is_exporting() else found


class Branches(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.slow
def test_a_weight_that_was_folded_is_named_and_no_file_is_left(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="scale") as caught:
        ms.export(Folded().eval(), (X,), tmp_path / "a.pt2")
    assert caught.value.names == ("scale",)
    with pytest.raises(ExportError):
        ms.export(Otherwise(4, 4).eval(), (X,), tmp_path / "a.pt2")
    with pytest.raises(ExportError, match=r"torch\.export cannot export") as cause:
        ms.export(Branches(4, 4).eval(), (X,), tmp_path / "a.pt2")
    assert cause.value.__cause__ is not None
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_what_the_compiler_inlines_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options that AOTInductor has by itself, small tensors are numbers in the code."""
    files, target = tmp_path / "files", tmp_path / "target"
    target.mkdir()
    with zipfile.ZipFile(package_of_torch(Small(), X)) as archive:
        archive.extractall(files)
    compiled = [str(path) for path in files.glob("*/data/aotinductor/model/*")]
    monkeypatch.setattr(exporting, "aoti_compile", lambda program, options: compiled)
    with pytest.raises(ExportError) as caught:
        ms.export(Small().eval(), (X,), target / "a.pt2", kind="aoti")
    assert caught.value.names == ("bias", "scale")
    assert os.listdir(target) == []


@pytest.mark.slow
@needs_aoti
def test_random_answers_prove_nothing_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before the compiler runs, which may take minutes."""
    monkeypatch.delattr(exporting, "aoti_compile")
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    ms.export(module, (X,), tmp_path / "a.pt2", training=True)
    with pytest.raises(ExportError, match="random"):
        ms.export(module, (X,), tmp_path / "b.pt2", kind="aoti", training=True)
    assert os.listdir(tmp_path) == ["a.pt2"]


@pytest.mark.slow
@needs_aoti
def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(*_: object) -> Any:
        raise RuntimeError("No working C++ compiler found in torch._inductor.config.cpp.cxx")

    monkeypatch.setattr(exporting, "aoti_compile", compile)
    with pytest.raises(ExportError, match=r"install a C\+\+ compiler"):
        ms.export(nn.Linear(4, 4), (X,), tmp_path / "a.pt2", kind="aoti")


@pytest.mark.parametrize(
    ("module", "args", "name", "options", "kind"),
    [
        (torch.relu, (X,), "a.pt2", {}, OptionError),
        (nn.Linear(4, 4), X, "a.pt2", {}, OptionError),
        (nn.Linear(4, 4), (X,), "a.pt", {}, UnsavableError),
        (nn.Linear(4, 4), (X,), "a.pt2", {"kind": "onnx"}, OptionError),
        (nn.Linear(4, 4), (X,), "a.pt2", {"options": {"max_autotune": True}}, OptionError),
        (nn.Linear(4, 4), (X,), "a.pt2", {"kind": "aoti", "options": {"freezing": True}}, OptionError),
        (nn.Linear(4, 4), (X,), "a\0.pt2", {}, UnsavableError),
        (nn.LazyLinear(4), (X,), "a.pt2", {}, LiveTargetError),
        (nn.Linear(4, 4), (X,), "there.pt2", {}, TargetExistsError),
        (nn.Linear(4, 4), (torch.ones(3),), "a.pt2", {}, ExportError),
    ],
)
def test_arguments_that_mean_nothing(
    module: Any, args: Any, name: str, options: Any, kind: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / "there.pt2").write_bytes(b"there")
    with pytest.raises(kind):
        ms.export(module, args, tmp_path / name, **options)
    assert os.listdir(tmp_path) == ["there.pt2"]
    assert (tmp_path / "there.pt2").read_bytes() == b"there"


def test_a_file_is_replaced_on_request_only(path: Path) -> None:
    ms.export(nn.Linear(4, 4), (X,), path)
    with pytest.raises(TargetExistsError):
        ms.export(nn.Linear(4, 4), (X,), path)
    module = nn.Linear(4, 4)
    ms.export(module, (X,), path, overwrite=True)
    assert torch.equal(ms.Live(path)(X), module(X))


def rewritten(path: Path, change: Any) -> Path:
    """The file with another manifest."""
    made = path.with_name("changed.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w") as new:
        for one in old.namelist():
            new.writestr(one, change(old.read(one)) if one.endswith(NAME) else old.read(one))
    return made


def edited(**changes: Any) -> Any:
    return lambda text: json.dumps({**json.loads(text), **changes}).encode()


@pytest.mark.slow_except(5)
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda text: text[:-7], DamagedFileError),
        (lambda text: b"\xff\xfe", LiveTargetError),
        (lambda text: b"{}", DamagedFileError),
        (edited(version=2), NewerManifestError),
        (edited(kind="onnx"), DamagedFileError),
        (edited(tensors=[{"name": "a"}]), DamagedFileError),
    ],
)
def test_a_damaged_manifest(change: Any, kind: type[Exception], path: Path) -> None:
    ms.export(nn.Linear(4, 4), (X,), path)
    with pytest.raises(kind) as caught:
        ms.Live(rewritten(path, change))
    assert type(caught.value) is kind


@pytest.mark.parametrize("content", [b"", b"no program", b"PK\x03\x04 cut off"])
def test_files_that_are_no_programs(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises((LiveTargetError, DamagedFileError)):
        ms.Live(path)
    with pytest.raises(SourceNotFoundError):
        ms.Live(path.with_name("nothing.pt2"))
    torch.save({"a": X}, path)
    with pytest.raises(LiveTargetError, match="is not a program"):
        ms.Live(path)
    ms.export(nn.Linear(4, 4), (X,), path, overwrite=True)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedFileError):
        ms.Live(str(path))


def test_an_exported_program_of_others(path: Path) -> None:
    module, trained = Decoder(), randomised(Decoder())
    torch.export.save(torch.export.export(module, (X,)), path)
    live = ms.Live(path, names=module)
    live.swap(trained.state_dict())
    assert torch.allclose(live(X), trained(X))
    with pytest.raises(ms.PlanError):
        ms.Live(path).swap(trained.state_dict())


def test_the_proof_looks_at_buffers_that_are_written(path: Path) -> None:
    """An answer that is right while the statistics behind it are not."""

    class Slower(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.momentum = 0.5 if torch.compiler.is_exporting() else 0.1
            return super().forward(x)

    with pytest.raises(ExportError, match="running_"):
        ms.export(Slower(4), (X,), path, training=True)


@needs_aoti
@pytest.mark.parametrize("which", ["module", "input"])
def test_packages_are_for_the_cpu_which_is_said_before_anything_is_compiled(which: str, path: Path) -> None:
    module, x = nn.Linear(4, 4).eval(), X
    if which == "module":
        module = module.to("meta")
    else:
        x = X.to("meta")
    with pytest.raises(ExportError, match=r"only on the CPU(?s:.*)meta"):
        ms.export(module, (x,), path, kind="aoti")
    assert not path.exists()


@pytest.mark.slow
def test_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's own writer, a full disk would end the process."""
    model, real, written = nn.Linear(600, 600).eval(), system.pwritev, list[int]()
    ms.export(model, (torch.ones(2, 600),), path)
    before = path.read_bytes()

    def pwritev(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        written.append(offset)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(system, "pwritev", pwritev)
    with pytest.raises(WriteFailedError, match="No space left on device"):
        ms.export(nn.Linear(600, 600).eval(), (torch.ones(2, 600),), path, overwrite=True)
    assert (path.read_bytes(), os.listdir(path.parent)) == (before, [path.name])


def test_a_program_that_torch_cannot_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*_: object, **__: object) -> None:
        raise ValueError("Out of range float values are not JSON compliant")

    monkeypatch.setattr(torch.export, "save", save)
    with pytest.raises(ExportError, match="torch cannot write the program") as caught:
        ms.export(nn.Linear(4, 4).eval(), (X,), path)
    assert "not JSON compliant" in str(caught.value)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("kind", ["exported", pytest.param("aoti", marks=[needs_aoti, pytest.mark.slow])])
def test_a_flipped_bit_in_any_part(path: Path, kind: str) -> None:
    """torch would take other weights, and run other code, without a word."""
    if kind == "exported":
        ms.export(nn.Linear(4, 4).eval(), (X,), path)
    content = (linear_package() if kind == "aoti" else path).read_bytes()
    path.write_bytes(content)
    assert isinstance(ms.Live(path)(X), torch.Tensor)
    with zipfile.ZipFile(path) as archive:
        records = [record for record in archive.infolist() if record.file_size]
    assert len(records) > 5
    for record in records:
        name_size, extra_size = struct.unpack_from("<HH", content, record.header_offset + 26)
        damaged = bytearray(content)
        damaged[record.header_offset + 30 + name_size + extra_size + record.file_size // 2] ^= 1
        path.write_bytes(damaged)
        with pytest.raises((ChecksumError, DamagedFileError)) as caught:
            ms.Live(path)
        assert record.filename in str(caught.value)
