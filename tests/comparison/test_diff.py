"""Two checkpoints: which tensors are matched, what is read, and what is reported."""

import copy
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import modelstate as ms
from modelstate.errors import ComparisonError, OptionError, ReadFailedError, UnsupportedTensorError
from tests.faults import Request, faulty_reads
from tests.programs import run_program

Status = ms.comparison.Status


def layers(count: int = 3, width: int = 8) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {"embed.weight": torch.randn(10, width)}
    for index in range(count):
        state[f"layer.{index}.mlp.weight"] = torch.randn(width, width)
        state[f"layer.{index}.mlp.bias"] = torch.randn(width)
    return state


def changed(state: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: tensor + 0.5 if name in names else tensor.clone() for name, tensor in state.items()}


def with_bytes_read(compare: Callable[[], ms.comparison.Diff]) -> tuple[ms.comparison.Diff, int]:
    """The result of a comparison, and the bytes of files that it has read."""
    with faulty_reads() as reads:
        diff = compare()
    return diff, sum(request.nbytes for request in reads.requests if request.call == "preadv")


def statuses(diff: ms.comparison.Diff) -> dict[str, Status]:
    return {tensor.name: tensor.status for tensor in diff.tensors}


def written(path: Path, state: dict[str, Any]) -> Path:
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path


class TestNames:
    def test_equal_checkpoints(self) -> None:
        diff = ms.diff(layers(), layers())
        assert diff.is_equal
        assert set(statuses(diff).values()) == {Status.EQUAL}
        assert repr(diff) == "<Diff of 'mapping' and 'mapping': equal>"
        assert str(diff).startswith("mapping and mapping: equal\n7 tensors compared")

    def test_names_of_one_side(self) -> None:
        a, b = layers(2), layers(3)
        b["step"] = torch.tensor(3)
        del b["layer.0.mlp.bias"]
        diff = ms.diff(a, b)
        assert [spec.name for spec in diff.removed] == ["layer.0.mlp.bias"]
        assert [spec.name for spec in diff.added] == ["layer.2.mlp.weight", "layer.2.mlp.bias", "step"]
        assert not diff.is_equal
        assert "only in the first (1):\n  layer.0.mlp.bias  [8]  float32" in str(diff)

    def test_other_shapes_and_dtypes(self) -> None:
        a = {"shape": torch.ones(2, 3), "dtype": torch.ones(3), "kind": torch.ones(3), "same": torch.ones(1)}
        b = {"shape": torch.ones(3, 2), "dtype": torch.ones(3).half(), "kind": torch.ones(3, dtype=torch.int32)}
        diff = ms.diff(a, b | {"same": torch.ones(1)})
        assert statuses(diff) == {
            "shape": Status.OTHER_SHAPE,
            "dtype": Status.OTHER_DTYPE,
            "kind": Status.OTHER_DTYPE,
            "same": Status.EQUAL,
        }
        by_name = {tensor.name: tensor for tensor in diff.tensors}
        assert by_name["shape"].difference is None
        assert by_name["kind"].difference is None
        found = by_name["dtype"].difference
        assert found is not None
        assert (found.changed, found.max_abs) == (0.0, 0.0)
        assert not diff.is_equal

    def test_names_that_rules_change_are_no_difference(self) -> None:
        a = layers()
        b = {name.replace("layer", "blocks"): tensor for name, tensor in a.items()}
        diff = ms.diff(a, b, rules=[ms.rules.Rename("layer.*", "blocks.*")])
        assert diff.is_equal
        assert diff.tensors[1].source_names == ("layer.0.mlp.weight",)

    def test_tensors_that_rules_compute(self, tmp_path: Path) -> None:
        whole = torch.randn(24, 8)
        parts = dict(zip(("q", "k", "v"), whole.chunk(3), strict=True))
        a = written(tmp_path / "a.safetensors", {name: part.contiguous() for name, part in parts.items()})
        b = written(tmp_path / "b.safetensors", {"qkv": whole.t().contiguous()})
        rules = [ms.rules.Concat(["q", "k", "v"], "qkv"), ms.rules.Transpose("qkv")]
        assert ms.diff(a, b, rules=rules).is_equal
        (tensor,) = ms.diff(changed(parts, "k"), b, rules=rules).tensors
        assert tensor.source_names == ("q", "k", "v")
        assert tensor.difference is not None
        assert tensor.difference.changed == pytest.approx(1 / 3)

    def test_the_part_with_the_names_is_found(self, tmp_path: Path) -> None:
        state = layers()
        a = written(tmp_path / "a.pt", {"model_state": state, "optimizer": {"0": torch.ones(2)}, "step": 3})
        diff = ms.diff(a, state)
        assert diff.is_equal
        assert diff.a == f"{a}, key 'model_state'"
        assert ms.diff(state, a).is_equal
        assert ms.diff(a, state, key=("model_state", None)).is_equal
        for key in (3, ("model_state",), ("model_state", None, None)):
            with pytest.raises(OptionError, match="key= must be a path"):
                ms.diff(a, state, key=key)  # type: ignore[arg-type]

    def test_only_some_names(self) -> None:
        a = layers()
        diff = ms.diff(a, changed(a, "embed.weight", "layer.1.mlp.bias"), only=["*.bias"])
        assert statuses(diff)["layer.1.mlp.bias"] is Status.CHANGED
        assert len(diff.tensors) == 3
        with pytest.raises(OptionError, match="no name matches the patterns"):
            ms.diff(a, a, only=["heads.*"])


class TestValues:
    def test_values_that_are_not_tensors(self, tmp_path: Path) -> None:
        a = written(
            tmp_path / "a.pt", {"w": torch.ones(2), "step": 3, "lr": float("nan"), "gone": "x", "args": {"a": 1}}
        )
        b = written(
            tmp_path / "b.pt", {"w": torch.ones(2), "step": 4, "lr": float("nan"), "new": [1], "args": {"a": 1}}
        )
        diff = ms.diff(a, b)
        assert [(value.path, value.is_in, value.values) for value in diff.values] == [
            ("step", (True, True), (3, 4)),
            ("gone", (True, False), ("x", None)),
            ("new", (False, True), (None, [1])),
        ]
        assert not diff.is_equal
        assert "step  3     ->  4" in str(diff)

    def test_names_shapes_and_dtypes_alone(self) -> None:
        a = layers()
        diff = ms.diff(a, changed(a, "embed.weight"), values=False)
        assert set(statuses(diff).values()) == {Status.NOT_COMPARED}
        assert diff.is_equal
        assert diff.read_bytes == 0

    def test_a_model_and_a_file(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        path = written(tmp_path / "m.pt", model.state_dict())
        assert ms.diff(model, path).is_equal
        nn.init.zeros_(model[0].bias)
        diff = ms.diff(path, model)
        assert [name for name, status in statuses(diff).items() if status is not Status.EQUAL] == ["0.bias"]
        assert (diff.a, diff.b) == (str(path), "Sequential")

    def test_a_model_on_meta(self) -> None:
        with ms.skeleton():
            model = nn.Linear(3, 3)
        with pytest.raises(ComparisonError) as caught:
            ms.diff(model, {"weight": torch.ones(3, 3), "bias": torch.ones(3)})
        assert caught.value.names == ("weight", "bias")
        assert "values=False" in caught.value.remedy
        diff = ms.diff(model, {"weight": torch.ones(3, 3), "bias": torch.ones(4)}, values=False)
        assert statuses(diff) == {"weight": Status.NOT_COMPARED, "bias": Status.OTHER_SHAPE}

    def test_no_common_name(self) -> None:
        with pytest.raises(ComparisonError) as caught:
            ms.diff({"a": torch.ones(2)}, {"b": torch.ones(3, 4)})
        assert (caught.value.expected, caught.value.found) == ("names such as b", "a")

    @pytest.mark.parametrize("layout", ["strided view", "transposed", "expanded"])
    def test_tensors_whose_elements_do_not_lie_in_their_order(self, layout: str, tmp_path: Path) -> None:
        base = torch.randn(40, 30)
        view = {"strided view": base[::2, 3:20], "transposed": base.t(), "expanded": base[:1].expand(40, 30)}[layout]
        path = written(tmp_path / "a.pt", {"w": view})
        assert ms.diff(path, {"w": view.contiguous()}).is_equal
        other = view.contiguous()
        other[3, 5] += 1
        for a, b in ((path, {"w": other}), ({"w": view}, {"w": other})):
            (tensor,) = ms.diff(a, b).tensors
            assert tensor.difference is not None
            assert tensor.difference.changed == 1 / other.numel()

    def test_quantized_payloads_are_compared_part_by_part(self, tmp_path: Path) -> None:
        quantize = pytest.importorskip("torchao.quantization")
        model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 4))
        quantize.quantize_(model, quantize.Int8WeightOnlyConfig())
        ms.save(model, tmp_path / "a.safetensors")
        assert ms.diff(tmp_path / "a.safetensors", model).is_equal
        with torch.no_grad():
            model[0].weight.qdata[0, 0] += 1
        diff = ms.diff(tmp_path / "a.safetensors", model)
        assert {(tensor.name, tensor.part) for tensor in diff.tensors if tensor.status is Status.CHANGED} == {
            ("0.weight", "qdata")
        }
        plain = ms.diff(tmp_path / "a.safetensors", nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 4)))
        assert statuses(plain)["0.weight"] is Status.OTHER_KIND

    def test_sparse_tensors(self, tmp_path: Path) -> None:
        a = written(tmp_path / "a.pt", {"s": torch.eye(4).to_sparse()})
        assert ms.diff(a, {"s": torch.eye(4).to_sparse()}).is_equal
        diff = ms.diff(a, {"s": (2 * torch.eye(4)).to_sparse()})
        assert [tensor.status for tensor in diff.tensors] == [Status.EQUAL, Status.CHANGED]

    def test_tied_tensors_are_read_once(self, tmp_path: Path) -> None:
        shared = torch.randn(1000)
        a = written(tmp_path / "a.pt", {"x": shared, "y": shared})
        diff, nbytes = with_bytes_read(lambda: ms.diff(ms.open(a), dict.fromkeys("xy", shared + 1)))
        assert set(statuses(diff).values()) == {Status.CHANGED}
        assert nbytes < 2 * shared.nbytes


class TestReading:
    def test_equal_digests_skip_the_bytes(self, tmp_path: Path) -> None:
        state = layers(width=64)
        ms.save(state, tmp_path / "a.safetensors")
        ms.save(changed(state, "layer.1.mlp.bias"), tmp_path / "b.safetensors")
        a, b = ms.open(tmp_path / "a.safetensors"), ms.open(tmp_path / "b.safetensors")
        diff, nbytes = with_bytes_read(lambda: ms.diff(a, b))
        assert nbytes == diff.read_bytes == 2 * 64 * 4
        assert diff.skipped_bytes == 2 * sum(tensor.nbytes for tensor in state.values()) - diff.read_bytes
        assert [tensor.name for tensor in diff.tensors if tensor.is_read] == ["layer.1.mlp.bias"]

    def test_the_short_checksums_of_torch_are_not_trusted(self, tmp_path: Path) -> None:
        a, b = (ms.open(written(tmp_path / name, layers())) for name in ("a.pt", "b.pt"))
        diff, nbytes = with_bytes_read(lambda: ms.diff(a, b))
        assert diff.is_equal
        assert nbytes >= diff.read_bytes == 2 * sum(tensor.nbytes for tensor in layers().values())

    def test_the_bytes_of_one_file_are_not_read(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.safetensors", layers())
        os.link(path, tmp_path / "link.safetensors")
        a, b = ms.open(path), ms.open(tmp_path / "link.safetensors")
        diff, nbytes = with_bytes_read(lambda: ms.diff(a, b))
        assert (diff.is_equal, nbytes) == (True, 0)

    @pytest.mark.slow
    @pytest.mark.parametrize("transposed", [False, True])
    def test_memory_does_not_grow_with_the_files(self, transposed: bool, tmp_path: Path) -> None:
        state = {f"w{index}": torch.randn(2048, 2048) for index in range(8)}
        written(tmp_path / "a.safetensors", state)
        other = {name: tensor + 1 for name, tensor in state.items()}
        written(tmp_path / "b.pt", {name: t.t().contiguous().t() if transposed else t for name, t in other.items()})
        done = run_program(
            """
import os, torch
import modelstate as ms

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10

os.sched_setaffinity(0, [*os.sched_getaffinity(0)][:1])  # one thread
warm = {"w": torch.randn(3000)}
ms.diff(warm, {"w": torch.ones(3000)})
open("/proc/self/clear_refs", "w").write("5")
before = peak()
diff = ms.diff("a.safetensors", "b.pt")
assert diff.read_bytes == 2 * 8 * 2048 * 2048 * 4
print(peak() - before)
""",
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < 128 << 20  # as much as one of the files has

    def test_a_file_that_changes_meanwhile(self, tmp_path: Path) -> None:
        state = layers(width=300)
        a, b = written(tmp_path / "a.safetensors", state), written(tmp_path / "b.safetensors", state)

        def change(request: Request) -> None:
            if request.call == "preadv":
                with open(b, "r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(b"x")
                os.utime(b, ns=(1, 1))

        first, second = ms.open(a), ms.open(b)
        with faulty_reads(before=change), pytest.raises(ReadFailedError, match="changed"):
            ms.diff(first, second)

    def test_a_file_that_changed_between_the_two_openings(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.safetensors", layers())
        first = ms.open(path)
        written(path, changed(layers(), "embed.weight"))
        with pytest.raises(ReadFailedError, match="changed between the opening"):
            ms.diff(first, path)


class TestText:
    def test_layers_are_folded_and_the_largest_change_is_first(self) -> None:
        a = layers(12)
        b = {name: tensor * (1.5 if "bias" in name else 1.001) for name, tensor in a.items()}
        diff = ms.diff(a, b | {"embed.weight": a["embed.weight"]})
        rows = str(diff).splitlines()
        at = next(index for index, line in enumerate(rows) if line.startswith("layer.*.mlp.bias (12 ×)"))
        assert rows[at + 1].startswith("layer.*.mlp.weight (12 ×)")
        assert "0.5" in rows[at]
        assert len(rows) == 7
        assert len(diff.text(fold=False, top=None).splitlines()) == 5 + 24
        assert "and 23 more rows" in diff.text(fold=False, top=1)

    def test_nan_and_infinity_are_shown_though_nothing_has_changed(self) -> None:
        state = {"w": torch.tensor([math.nan, math.inf, 1.0])}
        text = str(ms.diff(state, copy.deepcopy(state)))
        assert "NaN: 1 -> 1; infinite: 1 -> 1" in text

    def test_text_of_a_checkpoint_moves_no_cursor(self) -> None:
        text = str(ms.diff({"a\x1b[1m": torch.ones(2), "b": torch.ones(2)}, {"b": torch.zeros(2)}))
        assert "\x1b" not in text
        assert "a\\x1b[1m" in text

    def test_json_is_complete(self, tmp_path: Path) -> None:
        a = written(tmp_path / "a.pt", {"w": torch.tensor([1.0, 2.0]), "x": torch.tensor([math.nan]), "lr": math.inf})
        diff = ms.diff(a, {"w": torch.tensor([1.0, 2.5]), "x": torch.tensor([1.0]), "new": torch.ones(1)})
        found = json.loads(diff.to_json(), parse_constant=pytest.fail)
        assert (found["a"], found["equal"]) == (str(a), False)
        assert found["tensors"][0] == {
            "name": "w",
            "source_names": ["w"],
            "part": "",
            "status": "changed",
            "shapes": [[2], [2]],
            "dtypes": ["float32", "float32"],
            "kinds": ["strided", "strided"],
            "bytes": 16,
            "read": True,
            "difference": {
                "changed": 0.5,
                "max_abs": 0.5,
                "relative_l2": pytest.approx(0.5 / math.sqrt(5)),
                "nan": [0, 0],
                "infinite": [0, 0],
            },
        }
        assert found["added"] == [{"name": "new", "shape": [1], "dtype": "float32"}]
        assert found["values"] == [{"path": "lr", "in_a": True, "in_b": False, "a": "inf", "b": None}]
        assert found["totals"]["statuses"] == {"changed": 2}


class TestRealPairs:
    @pytest.mark.slow
    def test_minilm_before_and_after_conversion(self, real_file: Callable[[str], Path], tmp_path: Path) -> None:
        path = real_file("minilm")
        ms.convert_checkpoint(path, tmp_path / "bf16.safetensors", dtype="bf16")
        diff = ms.diff(path, tmp_path / "bf16.safetensors")
        state = load_file(path)
        floats = [tensor for tensor in diff.tensors if tensor.dtypes[0].is_floating_point]
        assert len(floats) > 90
        for tensor in floats:
            assert tensor.status is Status.OTHER_DTYPE
            assert tensor.difference is not None
            rounded = state[tensor.name].bfloat16().double()
            norm = float(state[tensor.name].double().norm())
            l2 = float((state[tensor.name].double() - rounded).norm()) / norm if norm else 0.0
            assert tensor.difference.relative_l2 == pytest.approx(l2, rel=1e-5)


class TestStores:
    def test_steps_of_a_store(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
        with ms.Store(tmp_path / "run") as store:
            store.save(3, {"model": model, "step": 3})
            nn.init.zeros_(model[1].bias)
            store.save(7, {"model": model, "step": 7})
            diff, nbytes = with_bytes_read(lambda: store.diff(3, 7))
            assert [name for name, status in statuses(diff).items() if status is Status.CHANGED] == ["model.1.bias"]
            assert diff.read_bytes == 16 <= nbytes
            assert [(value.path, value.values) for value in diff.values] == [("step", (3, 7))]
            assert store.diff(7, "latest").is_equal
            assert store.diff(3, 7, only=["model.0.*"]).is_equal
            with pytest.raises(ms.errors.StepNotFoundError):
                store.diff(3, 4)
            assert ms.diff(store.open("model", 7), model).is_equal


def test_a_conjugate_view_of_the_same_memory_differs() -> None:
    values = torch.tensor([1 + 2j, 3 + 4j])
    assert ms.diff({"w": values}, {"w": values.conj()}).tensors[0].status is Status.CHANGED
    assert ms.diff({"w": values.imag}, {"w": values.conj().imag}).tensors[0].status is Status.CHANGED
    assert ms.diff({"w": values.conj()}, {"w": values.conj()}).is_equal


def test_names_that_are_removed_have_their_specs() -> None:
    (kept,) = ms.diff({"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.ones(2)}).removed
    assert (kept.name, kept.dtype_name, kept.nbytes) == ("b", "float32", 12)
    first = {"a": torch.ones(2), "b": torch.ones(2), "d": torch.ones(1)}
    (joined,) = ms.diff(first, {"d": torch.ones(1)}, rules=[ms.rules.Concat(["a", "b"], "c")]).removed
    assert (joined.name, joined.shape, joined.dtype_name, joined.nbytes) == ("c", (4,), "float32", 16)


def test_a_tensor_that_became_nan_comes_first() -> None:
    first = {f"m{i}": torch.full((i + 1,), 1.0) for i in range(40)} | {"head": torch.ones(100)}
    second = {name: tensor * 1.01 for name, tensor in first.items()} | {"head": torch.ones(100)}
    second["head"][1:] = torch.nan
    assert "head" in ms.diff(first, second).text(top=1)


def test_values_that_were_not_read(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(150):
        deep = [deep]
    path = written(tmp_path / "deep.pt", {"w": torch.ones(2), "deep": deep})
    with pytest.raises(UnsupportedTensorError, match=r"deep.*: a container within more than 100 others"):
        ms.diff(path, path)
    assert ms.diff(path, path, only=["w"]).is_equal


def test_only_may_name_an_equal_value() -> None:
    state = {"w": torch.ones(2), "epoch": 3}
    assert ms.diff(state, dict(state), only=["epoch"]).is_equal
    with pytest.raises(OptionError):
        ms.diff(state, dict(state), only=["epochs"])


def test_parts_under_other_names_are_not_compared_without_keys() -> None:
    state = {"w": torch.ones(2, 2), "b": torch.ones(3)}
    sides = {"model": state, "ema": {"x": torch.zeros(5)}}, {"net": state, "gone": {"q": torch.ones(7)}}
    with pytest.raises(ms.errors.ComparisonError):
        ms.diff(*sides)
    assert ms.diff(*sides, key=("model", "net")).is_equal


def test_a_quantized_tensor_of_torch_is_not_equal_to_its_floats() -> None:
    quantized = torch.quantize_per_tensor(torch.tensor([-1.0, 0.5]), 0.5, 0, torch.qint8)
    found = ms.diff({"q": quantized}, {"q": quantized.dequantize()})
    (tensor,) = found.tensors
    assert (tensor.status, tensor.dtypes) == (Status.OTHER_DTYPE, (torch.qint8, torch.float32))
    assert (tensor.difference.max_abs, found.is_equal) == (0.0, False)
    assert ms.diff({"q": quantized}, {"q": quantized.clone()}).is_equal
    other = torch.quantize_per_tensor(torch.tensor([-1.0, 1.5]), 0.5, 0, torch.qint8)
    (tensor,) = ms.diff({"q": quantized}, {"q": other}).tensors
    assert (tensor.status, tensor.difference.max_abs) == (Status.CHANGED, 1.0)


def test_a_module_whose_own_state_dict_raises() -> None:
    def fail(*_: object) -> None:
        raise ValueError("no state")

    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(fail)
    with pytest.raises(ms.errors.ModelCodeError, match="own state_dict raised\n  found: ValueError"):
        ms.diff(model, nn.Linear(2, 2))


def test_a_negative_number_of_rows_is_refused() -> None:
    with pytest.raises(OptionError, match="top="):
        ms.diff({"w": torch.ones(2)}, {"w": torch.zeros(2)}).text(top=-1)
