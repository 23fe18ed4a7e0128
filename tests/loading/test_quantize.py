"""`Quantize`: what torchao makes of a model after a full load, made of each weight on its way."""

import builtins
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.loading.fingerprint import whole
from tests.sweeps import EXHAUSTIVE

quantization = pytest.importorskip("torchao.quantization")
workflows = pytest.importorskip("torchao.quantization.quantize_.workflows")
Q: Any = quantization


def _configs() -> dict[str, Callable[[], Any]]:
    group = Q.PerGroup(32)
    found: dict[str, Callable[[], Any]] = {
        "int8 per channel": Q.Int8WeightOnlyConfig,
        "int8 per group": lambda: Q.Int8WeightOnlyConfig(granularity=group),
        "int8 per tensor": lambda: Q.Int8WeightOnlyConfig(granularity=Q.PerTensor()),
        "int8 and activations": Q.Int8DynamicActivationInt8WeightConfig,
        "int8 and activations, reduced": lambda: Q.Int8DynamicActivationInt8WeightConfig(reduce_range=True),
        "int8, static": lambda: Q.Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor([[0.1]])),
        "float8 per row": Q.Float8WeightOnlyConfig,
        "float8 per group": lambda: Q.Float8WeightOnlyConfig(granularity=group),
        "float8 per tensor": lambda: Q.Float8WeightOnlyConfig(granularity=Q.PerTensor()),
        "float8 and activations": Q.Float8DynamicActivationFloat8WeightConfig,
        "int4 and float8 activations": Q.Float8DynamicActivationInt4WeightConfig,
        "intx, 8 bits per channel": Q.IntxWeightOnlyConfig,
    }
    for bits in range(1, 8):
        found[f"intx, {bits} bits per group"] = lambda bits=bits: Q.IntxWeightOnlyConfig(  # type: ignore[misc]
            weight_dtype=getattr(torch, f"int{bits}"), granularity=group
        )
    for packing in workflows.Int4PackingFormat:
        found[f"int4 {packing.value}"] = lambda packing=packing: Q.Int4WeightOnlyConfig(  # type: ignore[misc]
            group_size=32, int4_packing_format=packing
        )
    for packing in workflows.IntxPackingFormat:
        found[f"intx {packing.value} and activations"] = lambda p=packing: Q.Int8DynamicActivationIntxWeightConfig(  # type: ignore[misc]
            weight_dtype=torch.int4, weight_granularity=group, intx_packing_format=p
        )
    return found


CONFIGS = _configs()
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
OTHERS = (torch.float16, torch.float32)
"""What is true of bfloat16 is true of these dtypes: some of the cases show it, and with MODELSTATE_EXHAUSTIVE=1 all."""


def with_dtypes(name: str, values: Sequence[str], of_others: Sequence[str]) -> pytest.MarkDecorator:
    """All values of a parameter with bfloat16, and some of them with the other dtypes."""
    others = product(OTHERS, values if EXHAUSTIVE else of_others)
    return pytest.mark.parametrize(
        ("dtype", name),
        [*product([torch.bfloat16], values), *(pytest.param(*case, marks=pytest.mark.slow) for case in others)],
        ids=str,
    )


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return normed


def _quantized(config: Callable[[], Any], dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A quantized model with inputs and what it answers; the test is skipped where the config does not run here."""
    torch.manual_seed(0)
    model, inputs = Normed().to(dtype), torch.randn(4, 64, dtype=dtype)
    try:
        Q.quantize_(model, config())
        return model, inputs, model(inputs)
    except Exception as error:
        pytest.skip(f"not here: {error}")


@pytest.mark.slow_except(12)
@every_config
@with_dtypes("skeleton", ["float32", "its dtype", "quantized"], ["float32"])
def test_what_was_saved_quantized_answers_the_same(
    tmp_path: Path, config: Callable[[], Any], dtype: torch.dtype, skeleton: str
) -> None:
    model, inputs, answer = _quantized(config, dtype)
    ms.save(model, tmp_path / "q.safetensors")
    with ms.skeleton():
        loaded = Normed()
    if skeleton == "its dtype":
        loaded.to(dtype)
    if skeleton == "quantized":
        try:
            Q.quantize_(loaded, config())
        except Exception as error:
            pytest.skip(f"not on meta: {error}")
    report = ms.load(loaded, tmp_path / "q.safetensors")
    found = loaded(inputs)
    assert found.dtype == answer.dtype
    assert torch.equal(found, answer)
    differs = skeleton != "its dtype" and dtype != torch.float32
    assert any("as it has quantized tensors" in note for note in report.notes) == differs


@pytest.mark.parametrize("config", [Q.Int8WeightOnlyConfig, Q.Float8WeightOnlyConfig])
@pytest.mark.parametrize("live", [False, True])
def test_a_cast_of_quantized_tensors_is_a_problem(tmp_path: Path, config: Callable[[], Any], live: bool) -> None:
    model, *_ = _quantized(config, torch.bfloat16)
    ms.save(model, tmp_path / "q.safetensors")
    if live:
        loaded: nn.Module = Normed().bfloat16()
        Q.quantize_(loaded, config())
    else:
        with ms.skeleton():
            loaded = Normed()
    before = {name: (id(one), one.dtype) for name, one in loaded.named_parameters()}
    with pytest.raises(errors.PlanError) as caught:
        ms.load(loaded, tmp_path / "q.safetensors", dtype=torch.float32)
    assert [one.kind.name for one in caught.value.problems] == ["QUANTIZED_CAST"] * 2
    assert {name: (id(one), one.dtype) for name, one in loaded.named_parameters()} == before
    ms.load(loaded, tmp_path / "q.safetensors", dtype=torch.bfloat16)


@pytest.mark.parametrize("config", [Q.Int8WeightOnlyConfig, Q.Float8WeightOnlyConfig])
@pytest.mark.parametrize("source", ["file", "live"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_tensors_for_plain_ones_are_a_problem(
    tmp_path: Path, config: Callable[[], Any], source: str, dtype: torch.dtype
) -> None:
    model, inputs, answer = _quantized(config, torch.bfloat16)
    ms.save(model, tmp_path / "q.safetensors")
    given = tmp_path / "q.safetensors" if source == "file" else model.state_dict()
    loaded = Normed().to(dtype)
    before = whole(loaded)
    plan = ms.plan(loaded, given)
    with pytest.raises(errors.PlanError, match="quantize the model in the same way") as caught:
        ms.load(loaded, given)
    assert [one.kind.name for one in caught.value.problems] == ["QUANTIZED_INTO_PLAIN"] * 2
    assert plan.problems == tuple(caught.value.problems)
    assert whole(loaded) == before
    Q.quantize_(loaded.bfloat16(), config())
    ms.load(loaded, given)
    assert torch.equal(loaded(inputs), answer)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 64, dtype=dtype)
        self.up = nn.Linear(64, 96, dtype=dtype)
        self.norm = nn.LayerNorm(96, dtype=dtype)
        self.mix = nn.MultiheadAttention(96, 2, dtype=dtype)
        self.head = nn.Linear(96, 32, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(self.embed(x)))
        result: torch.Tensor = self.head(hidden)
        return result


def skeleton(dtype: torch.dtype = torch.float32) -> Net:
    with ms.skeleton():
        return Net(dtype)


def on_meta(dtype: torch.dtype = torch.float32) -> Net:
    with torch.device("meta"):
        return Net(dtype)


def quantized(dtype: torch.dtype = torch.float32) -> Net:
    return after_load(Net(dtype), Q.Int8WeightOnlyConfig())


def after_load(model: Any, config: Any) -> Any:
    """The model, quantized by torchao; skipped where torchao cannot do that here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Q.quantize_(model, config)
    except (ImportError, NotImplementedError, AssertionError, RuntimeError) as error:
        pytest.skip(f"torchao: {str(error).splitlines()[0]}")
    return model


def flat(tensor: torch.Tensor) -> list[Any]:
    """Class, attributes and bytes of a tensor, at any depth."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        payload = tensor.detach().contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []
        return [type(tensor.data), tensor.dtype, tensor.shape, tensor.stride(), payload]
    names, context = flatten()
    inner = {name: getattr(tensor, name) for name in names}
    parts = {name: None if part is None else flat(part) for name, part in inner.items()}
    return [type(tensor.data), tensor.dtype, tensor.shape, repr(context), parts]


def same(ours: nn.Module, theirs: nn.Module) -> None:
    """Every tensor of the same class, bit for bit, and with the same flag."""
    a, b = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert list(a) == list(b)
    for name in a:
        assert flat(a[name]) == flat(b[name]), name
        assert a[name].requires_grad == b[name].requires_grad, name
    assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    path = tmp_path / "net.pt"
    torch.save(Net().state_dict(), path)
    return path


def loaded(path: Path, **options: Any) -> Net:
    model = Net()
    ms.load(model, path, **options)
    return model


@pytest.mark.slow_except(10)
@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_what_torchao_makes_after_a_full_load(config: Callable[[], Any], dtype: torch.dtype, path: Path) -> None:
    theirs = after_load(loaded(path, dtype=dtype), config())
    x = torch.arange(7)
    for make, options in ((Net, {}), (skeleton, {}), (skeleton, {"map": False}), (on_meta, {}), (quantized, {})):
        ours: Any = make()
        held = {name: id(param) for name, param in ours.named_parameters()}
        report = ms.load(ours, path, transform=ms.loading.Quantize(config()), dtype=dtype, **options)
        same(ours, theirs)
        assert {name: id(param) for name, param in ours.named_parameters()} == held
        assert not report.references_lost
        try:
            expected = theirs(x)
        except AssertionError:
            continue  # a config whose forward does not run here, after quantize_ as little as after the load
        assert torch.equal(ours(x), expected)


def test_most_configs_run_here() -> None:
    """The comparison above is skipped where torchao cannot quantize; that must not be everywhere."""
    ran = 0
    for config in CONFIGS.values():
        try:
            Q.quantize_(nn.Linear(64, 32), config())
        except (ImportError, NotImplementedError, AssertionError, RuntimeError):
            continue
        ran += 1
    assert ran >= 14


def test_only_weights_of_linear_layers_leave_the_fast_paths(path: Path) -> None:
    plain = {step.name: step for step in ms.plan(skeleton(), path, map=True).steps}
    plan = ms.plan(skeleton(), path, map=True, transform=ms.loading.Quantize(Q.Int8WeightOnlyConfig()))
    steps = {step.name: step for step in plan.steps}
    changed = {name for name in steps if steps[name] != plain[name]}
    assert changed == {"up.weight", "head.weight"}
    assert {steps[name].why for name in changed} == {"made by Quantize(Int8WeightOnlyConfig)"}
    assert all(steps[name].mapped for name in set(steps) - changed)
    assert not any(steps[name].mapped for name in changed)
    assert not ms.plan(
        skeleton(), path, transform={"mix*": None, "*": ms.loading.Quantize(Q.Int8WeightOnlyConfig())}
    ).problems


def test_several_configs_by_pattern(path: Path) -> None:
    theirs = loaded(path)
    after_load(theirs.up, Q.Int8WeightOnlyConfig())
    after_load(theirs.head, Q.Float8WeightOnlyConfig())
    ours = skeleton()
    quantize = {
        "up": ms.loading.Quantize(Q.Int8WeightOnlyConfig()),
        "head.*": ms.loading.Quantize(Q.Float8WeightOnlyConfig()),
    }
    ms.load(ours, path, transform=quantize)
    same(ours, theirs)


def test_a_weight_that_torchao_leaves_alone(path: Path) -> None:
    """Where the group size does not divide the weight, this config does nothing but freeze it."""
    config = Q.Int4WeightOnlyConfig(group_size=128)
    theirs = after_load(loaded(path), config)
    for make in (Net, skeleton):
        ours = make()
        ms.load(ours, path, transform=ms.loading.Quantize(config))
        same(ours, theirs)
        assert type(ours.up.weight) is nn.Parameter
        assert not ours.up.weight.requires_grad


def test_rules_and_values_in_memory(path: Path) -> None:
    state = torch.load(path)
    both = torch.cat([state.pop("up.weight"), torch.ones(1, 64)])
    state |= {"up.kernel": both[:96].T.contiguous()}
    theirs = after_load(loaded(path), Q.Int8WeightOnlyConfig())
    ours = Net()
    rules = [ms.rules.Rename("up.kernel", "up.weight"), ms.rules.Transpose("up.weight")]
    ms.load(ours, state, rules=rules, transform=ms.loading.Quantize(Q.Int8WeightOnlyConfig()))
    same(ours, theirs)
    assert torch.equal(state["up.kernel"], both[:96].T)


# Ties.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 32, bias=False)
        self.second.weight = self.first.weight
        self.head.weight = self.embed.weight


def test_layers_that_are_tied_stay_tied() -> None:
    state, ours, theirs = Tied().state_dict(), Tied(), Tied()
    theirs.load_state_dict(state)
    config = Q.Int8WeightOnlyConfig()
    after_load(theirs.first, config)
    after_load(theirs.second, config)
    ms.load(ours, state, transform={"head": None, "*": ms.loading.Quantize(config)})
    assert ours.first.weight is ours.second.weight
    assert flat(ours.first.weight) == flat(theirs.first.weight) == flat(theirs.second.weight)
    assert ours.head.weight is ours.embed.weight
    assert type(ours.head.weight) is nn.Parameter


# Failures.


def test_a_config_that_raises_for_a_shape(path: Path) -> None:
    """48 divides 96 columns and not 64."""
    config = Q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=Q.PerGroup(48))
    Q.quantize_(Net().head, config)
    for make in (Net, skeleton):
        model = make()
        before = whole(model)
        with pytest.raises(errors.TransformError, match=r"up\.weight"):
            ms.load(model, path, transform=ms.loading.Quantize(config))
        assert whole(model) == before


class MoreThanTheWeight(Q.Int8WeightOnlyConfig):  # type: ignore[misc]
    """A config whose handler does to the layer what `change` says."""

    change: Any = None


def _handle(module: nn.Module, config: Any) -> nn.Module:
    changed: nn.Module = config.change(module)
    return changed


def _without_bias(module: nn.Module) -> nn.Module:
    module.bias = None
    return module


@pytest.mark.parametrize("change", [_without_bias, lambda module: nn.Identity(), lambda module: nn.Sequential(module)])
def test_a_config_that_changes_more_than_the_weight_is_refused(change: Any, path: Path) -> None:
    from torchao.quantization.transform_module import _QUANTIZE_CONFIG_HANDLER

    config = MoreThanTheWeight()
    config.change = change
    model = Net()
    before = whole(model)
    try:
        _QUANTIZE_CONFIG_HANDLER[MoreThanTheWeight] = _handle
        with pytest.raises(errors.TransformError, match=r"up\.weight(.|\n)*more than the weight"):
            ms.load(model, path, transform=ms.loading.Quantize(config))
    finally:
        del _QUANTIZE_CONFIG_HANDLER[MoreThanTheWeight]
    assert whole(model) == before


@pytest.mark.parametrize("config", ["int8", None, torch.int8, Q.Int8WeightOnlyConfig, lambda: None])
def test_what_is_no_config(config: Any) -> None:
    with pytest.raises(errors.OptionError, match="not a config"):
        ms.loading.Quantize(config)
    with pytest.raises(errors.OptionError, match="transform="):
        ms.loading.Quantize(Q.FqnToConfig({"up": Q.Int8WeightOnlyConfig()}))


def test_without_torchao_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "torchao":
            raise ImportError("No module named 'torchao'")
        return imported(name, *rest)

    config = Q.Int8WeightOnlyConfig()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(errors.PackageError, match="pip install torchao"):
        ms.loading.Quantize(config)


def _rows(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2100, 512, generator=generator)
    if kind == "wide":
        rows *= torch.logspace(-40, 37, 2100).view(-1, 1)
    elif kind == "ties":
        rows = (rows * 127.5).round() / 2
    elif kind == "one sign":
        rows.abs_()
        rows[1000:].neg_()
    elif kind == "zeros":
        rows[::3] = 0
        rows[1::3, ::2] = -0.0
    return rows


@pytest.mark.slow_except(4)
@with_dtypes("kind", ["normal", "wide", "ties", "one sign", "zeros"], ["wide", "ties"])
@pytest.mark.parametrize(
    "name", ["int8 per channel", "int8 per group", "int8 and activations", "float8 per row", "intx, 4 bits per group"]
)
def test_weights_of_many_blocks(name: str, dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    """More rows than are quantized at a time, and numbers where a rounding more or less would show."""
    make: Any = lambda: nn.Sequential(nn.Linear(512, 2100, dtype=dtype))  # noqa: E731
    save_file({"0.weight": _rows(kind).to(dtype), "0.bias": torch.zeros(2100, dtype=dtype)}, tmp_path / "x.safetensors")
    theirs, ours = make(), make()
    ms.load(theirs, tmp_path / "x.safetensors")
    ms.load(ours, tmp_path / "x.safetensors", transform=ms.loading.Quantize(CONFIGS[name]()))
    same(ours, after_load(theirs, CONFIGS[name]()))


@pytest.mark.parametrize("name", ["int8 per channel", "float8 per row", "intx, 4 bits per group"])
def test_the_memory_for_rows_does_not_grow_with_their_number(name: str, tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        model = nn.Linear(512, rows, bias=False)
        save_file(model.state_dict(), path := tmp_path / "x.safetensors")
        return ms.plan(model, path, transform=ms.loading.Quantize(CONFIGS[name]())).peak_memory_bytes

    assert peak(20_000) == peak(40_000)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rows", [64, 2100])
@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.device("meta")], ids=["inference", "meta"])
def test_whatever_the_caller_has_set(context: Any, rows: int, background: bool, tmp_path: Path) -> None:
    save_file({"0.weight": _rows("normal")[:rows].clone()}, tmp_path / "x.safetensors")
    theirs, ours = (nn.Sequential(nn.Linear(512, rows, bias=False)) for _ in range(2))
    ms.load(theirs, tmp_path / "x.safetensors")
    with context():
        loaded: Any = ms.load(
            ours,
            tmp_path / "x.safetensors",
            transform=ms.loading.Quantize(Q.Int8WeightOnlyConfig()),
            background=background,  # type: ignore[call-overload]
        )
        if background:
            loaded.result()
    same(ours, after_load(theirs, Q.Int8WeightOnlyConfig()))
    assert not ours[0].weight.is_inference()


@pytest.mark.parametrize(
    "transform", [ms.loading.Quantize, Q.Int8WeightOnlyConfig, Q.Int8WeightOnlyConfig(), {"*": ms.loading.Quantize}]
)
def test_what_is_no_instance_is_refused_with_the_call_that_is_right(transform: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(errors.OptionError) as caught:
        ms.load(model, state, transform=transform)
    code = caught.value.remedy.removeprefix("transform=").partition("), ")[0] + ")"
    names = {"ms": ms, "Int8WeightOnlyConfig": Q.Int8WeightOnlyConfig, "torchao": pytest.importorskip("torchao")}
    ms.load(model, state, transform=eval(code, names))
    assert type(model[0].weight.data).__name__ == "Int8Tensor"
    with pytest.raises(errors.OptionError, match=r"an instance: ms.loading.Quantize\(Int8WeightOnlyConfig\(\)\)"):
        ms.loading.Quantize(Q.Int8WeightOnlyConfig)


def test_a_package_that_a_config_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ImportError("Requires mslk >= 1.0.0")

    monkeypatch.setattr(Q, "quantize_", fails)
    model = nn.Sequential(nn.Linear(128, 128))
    quantize = ms.loading.Quantize(Q.Int4WeightOnlyConfig())
    with pytest.raises(errors.PackageError, match=r"Int4WeightOnlyConfig, 0\.weight: .* needs mslk") as caught:
        ms.load(model, dict(model.state_dict()), transform=quantize)
    assert "pip install mslk-cuda" in caught.value.remedy
