"""`Live` over packages of AOTInductor: each version has a loaded library."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import (
    CanaryError,
    DamagedFileError,
    LiveTargetError,
    OptionError,
    ProgramInputError,
    WeightsError,
)
from modelstate.io import system
from tests.serve.models import INPUTS_OF_TABLE, Small, Table, everything, linear, weights_of
from tests.serve.packages import linear_package, package_of, package_of_torch
from tests.serve.targets import target_of
from tests.serve.test_export import edited, rewritten

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(4))

pytestmark = pytest.mark.slow  # compiling a package takes seconds


def package_of_others() -> Path:
    """What AOTInductor makes of a module by itself."""
    return package_of_torch(Small(), X)


@pytest.mark.parametrize("after", ["another program", "other bytes", "nothing"])
def test_what_comes_to_the_path_later_is_not_looked_at(tmp_path: Path, after: str) -> None:
    path = tmp_path / "served.pt2"
    shutil.copy(linear_package(), path)
    live = ms.Live(path)
    if after == "nothing":
        path.unlink()
    elif after == "other bytes":
        path.write_bytes(path.read_bytes()[:1000])
    else:
        shutil.copy(package_of(everything(), X), tmp_path / "new.pt2")
        (tmp_path / "new.pt2").rename(path)
    for k in (2, 3, 4):
        live.swap(linear(k).state_dict())
        assert torch.equal(live(X), linear(k)(X))


def test_others_load_the_package() -> None:
    from torch.export.pt2_archive._package import load_pt2

    path = package_of(everything(), X)
    contents = load_pt2(str(path), load_weights_from_disk=True)
    assert "modelstate-program" in contents.extra_files["modelstate.json"]
    assert torch.allclose(contents.aoti_runners["model"](X), everything()(X))
    assert torch._inductor.aoti_load_package(str(path)).get_constant_fqns()


def test_a_package_of_others_and_what_was_inlined_in_it() -> None:
    live = ms.Live(package_of_others())
    assert torch.allclose(live(X), Small()(X))
    with pytest.raises(WeightsError) as caught:
        live.swap({**Small(3.0).state_dict(), "shift": torch.ones(16)})
    assert set(caught.value.names) == {"bias", "scale", *caught.value.names}
    assert live.version().id == 1

    trained = Small(3.0)
    with torch.no_grad():
        trained.bias.copy_(Small().bias), trained.scale.copy_(Small().scale)
    rules = [ms.rules.Ignore(name) for name in caught.value.names]
    live.swap({**trained.state_dict(), "shift": torch.ones(16)}, rules=rules)
    trained.shift.fill_(1.0)
    assert torch.allclose(live(X), trained(X))
    with pytest.raises(OptionError, match="names= is only for exported programs"):
        ms.Live(package_of_others(), names=trained)


class Folded(nn.Module):
    """Has a product of weights, which does not depend on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.a @ self.b)


def test_a_package_that_computes_constants_of_its_weights_says_so() -> None:
    with torch.no_grad():
        options = {"aot_inductor.use_runtime_constant_folding": True}
        path = package_of_torch(Folded(), torch.ones(2, 8), **options)
    with pytest.raises(LiveTargetError, match="computes constants of its weights"):
        ms.Live(path)


@pytest.mark.parametrize(
    ("flags", "lacking"),
    [("fpu sse2 avx2 fma", "avx512f, avx512dq, avx512vl, avx512bw, avx512_vnni"), ("", ""), (None, "")],
)
def test_instructions_that_the_processor_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str | None, lacking: str
) -> None:
    """torch calls such a package, which ends the process. None stands for all that it needs."""
    path = tmp_path / "package.pt2"
    with zipfile.ZipFile(linear_package()) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("_metadata.json"):
                content = json.dumps({**json.loads(content), "AOTI_CPU_ISA": "AVX512 AVX512_VNNI"}).encode()
            new.writestr(name, content)
    needed = "fma avx512f avx512dq avx512vl avx512bw avx512_vnni"
    monkeypatch.setattr(system, "processor_flags", lambda: frozenset((needed if flags is None else flags).split()))
    if not lacking:
        assert isinstance(ms.Live(path)(torch.ones(3, 4)), torch.Tensor)
        return
    with pytest.raises(LiveTargetError, match="instructions that this processor lacks") as caught:
        ms.Live(path)
    assert caught.value.expected == lacking


def test_a_package_that_was_loaded_has_no_path_any_more() -> None:
    with pytest.raises(LiveTargetError, match="give its path"):
        ms.Live(torch._inductor.aoti_load_package(str(package_of(everything(), X))))


def test_inputs_are_checked_before_the_library_sees_them() -> None:
    live = ms.Live(linear_package())
    for rows in (2, 5, 16):
        x = torch.randn(rows, 4)
        assert torch.allclose(live(x), linear(1)(x), atol=1e-6)
    for wrong in (torch.ones(17, 4), torch.ones(1, 4), torch.ones(3, 5), torch.ones(3), torch.ones(3, 4).double(), 3):
        with pytest.raises(ProgramInputError):
            live(wrong)
    for args, named in ((), {}), ((X, X), {}), ((), {"input": X}):
        with pytest.raises(ProgramInputError):
            live(*args, **named)
    with pytest.raises(ProgramInputError):
        ms.Live(package_of(everything(), X))(X[:2])  # whose sizes are fixed
    with pytest.raises(ProgramInputError):
        ms.Live(package_of_others())(X, X)


def test_inputs_in_another_order_in_memory_are_put_into_the_librarys() -> None:
    live = ms.Live(linear_package())
    weight = torch.randn(4, 4)
    live.swap({"weight": weight, "bias": torch.zeros(4)})
    for x in (torch.randn(4, 3).T, torch.randn(3, 8)[:, ::2], torch.randn(1, 4).expand(3, 4)):
        assert not x.is_contiguous()
        assert torch.allclose(live(x), x @ weight.T, atol=1e-6)


def test_a_canary_that_keeps_the_version_calls_it_with_its_weights() -> None:
    live, kept = ms.Live(linear_package(), keep_versions=0), []
    with pytest.raises(CanaryError):
        live.swap(linear(2).state_dict(), canary=lambda v: kept.append(v) or False)  # type: ignore[func-returns-value]
    for k in (3, 4):
        live.swap(linear(k).state_dict())
    assert torch.equal(kept[0](X), linear(2)(X))


def test_a_manifest_that_is_not_of_the_package() -> None:
    path = linear_package()
    for inputs in ([], {"values": [{}]}):
        with pytest.raises(DamagedFileError):
            ms.Live(rewritten(path, edited(inputs=inputs)))


def test_packages_are_on_the_cpu_whatever_the_default_device_is() -> None:
    path, x = linear_package(), torch.ones(3, 4)
    state = linear(2).state_dict()
    with torch.device("meta"):
        live = ms.Live(path)
        assert live(x).unique().tolist() == [5.0]
        live.swap(state)
        assert live(x).unique().tolist() == [10.0]


def test_each_call_is_checked_also_after_one_with_the_same_sizes() -> None:
    """The answer is another one where the inputs are exchanged."""
    x, y = torch.ones(2, 4), torch.zeros(2, 4)
    live = ms.Live(target_of("aoti", Table(), **INPUTS_OF_TABLE))
    live.swap(weights_of(Table(), 2))

    def answer(x: object, y: object) -> torch.Tensor:
        value: torch.Tensor = live(x=x, y=y)[3]
        assert torch.equal(live(y=y, x=x)[3], value)  # in both orders of the names the same
        return value

    columns = torch.arange(8.0).view(4, 2).T
    for _ in range(2):
        assert answer(x, y).unique().tolist() == [2.0]
        assert answer(y, x).unique().tolist() == [1.0]
        assert answer(x, y).unique().tolist() == [2.0]
        assert torch.equal(answer(x, columns), 2 + columns)
        assert torch.equal(answer(x, torch._neg_view(columns.contiguous())), 2 - columns)
        for args, named in (
            ((x,), {}),
            ((x, y, y), {}),
            ((x,), {"z": y}),
            ((x,), {"x": y}),
            (([x, y],), {}),
            ((), {"x": x}),
            ((), {"x": x, "z": y}),
            ((x, y), {}),
        ):
            with pytest.raises(ProgramInputError):
                live(*args, **named)
        for wrong in (x.double(), x[:, :2], x.to("meta"), x.tolist(), x[0], x.to_sparse()):
            with pytest.raises(ProgramInputError):
                answer(x, wrong)
