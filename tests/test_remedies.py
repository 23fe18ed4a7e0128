"""Remedies with code are right when they are followed: the code is taken from the text of the error, and it runs."""

import ast
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import modelstate as ms
from modelstate.cli.main import app, pages
from modelstate.errors import ModelStateError, PlanError

# What an error advises.

ARGUMENT = re.compile(r"(?<![\w.(])([a-z_]+)=(?=\S)")
CALL = re.compile(r"(?<![\w.'\"`=])(?:ms|modelstate|torch)(?:\.\w+)+\(")
COMMAND = re.compile(r"\b(modelstate (?:inspect|verify|store) [^;`\n]+?)(?= shows| says|[;`\n]|$)")


@dataclass(frozen=True)
class Advice:
    """The code in a remedy."""

    calls: list[str]
    arguments: list[dict[str, str]]
    """Arguments for the call that failed. Those that a comma joins belong together; others are alternatives."""
    commands: list[str]


def expression_at(text: str) -> str:
    """The Python expression at the beginning of a text: up to the first end that can be one."""
    for end in range(1, len(text) + 1):
        if end == len(text) or text[end] in ",; \n)]:`":
            code = text[:end].removesuffix(".")
            try:
                ast.parse(code, mode="eval")
            except SyntaxError:
                continue
            return code
    return ""


def advice_in(text: str) -> Advice:
    advice, end_of_calls, end = Advice([], [], COMMAND.findall(text)), 0, -1
    calls = list[tuple[int, int]]()
    for match in CALL.finditer(text):
        if match.start() >= end_of_calls and (code := expression_at(text[match.start() :])).endswith(")"):
            end_of_calls = match.start() + len(code)
            calls.append((match.start(), end_of_calls))
            advice.calls.append(code)
    for match in ARGUMENT.finditer(text):
        inside = match.start() < end or any(start <= match.start() < stop for start, stop in calls)
        code = "" if inside else expression_at(text[match.end() :])
        if not code or code == "...":
            continue
        if end >= 0 and text[end : match.start()] == ", ":
            advice.arguments[-1][match[1]] = code
        else:
            advice.arguments.append({match[1]: code})
        end = match.end() + len(code)
    return advice


def text_of(error: ModelStateError) -> str:
    """The lines of an error that say what to do. Some problems have rules in their own lines."""
    return "\n".join(line for line in str(error).splitlines() if "to do: " in line or re.match(" {4}.*rules=", line))


def causes(error: PlanError) -> set[str]:
    return {problem.kind.name for problem in error.problems}


# Scenarios.


@dataclass
class Scenario:
    """A call that fails."""

    call: Callable[..., object]
    """Called with the arguments that the error advises."""
    options: dict[str, Any] = field(default_factory=dict)
    """The arguments of the first call."""
    names: dict[str, Any] = field(default_factory=dict)
    """The values of names that the advice does not define, such as `value`."""
    takes: tuple[str, ...] = ()
    """The arguments, or the functions, that the advice has to name; all that it names are followed."""


SCENARIOS: dict[str, Callable[[Path], Scenario]] = {}
"""By name: what makes the scenario in a folder."""


def scenario(make: Callable[[Path], Scenario]) -> Callable[[Path], Scenario]:
    SCENARIOS[make.__name__] = make
    return make


WITHOUT_OLD = [ms.rules.Prefix(strip="old.")]
UNTIED = {"wte.weight": torch.ones(3, 2), "head.weight": torch.zeros(3, 2)}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def without_memory() -> nn.Sequential:
    with ms.skeleton():
        return net()


def state(prefix: str = "", **changes: Any) -> dict[str, torch.Tensor]:
    """A state dict of `net()`; None leaves a name out, and `_` stands for a dot."""
    values: dict[str, Any] = {name: value.clone() for name, value in net().state_dict().items()}
    values |= {name.replace("_", ".", 1).lstrip("n"): value for name, value in changes.items()}
    return {prefix + name: value for name, value in values.items() if value is not None}


def loading(source: Any, build: Callable[[], nn.Module] = net, **options: Any) -> Scenario:
    return Scenario(lambda **given: ms.load(build(), source, **given), options)


@scenario
def missing_in_many_layers(_: Path) -> Scenario:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(30)))
    source = {name: value for name, value in layers.state_dict().items() if name.endswith("weight")}
    return loading(source, lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(30))))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.weight = nn.Parameter(torch.ones(2))


@scenario
def missing_and_not_initialised(_: Path) -> Scenario:
    def build() -> nn.Module:
        with ms.skeleton():
            return Scaled()

    made = loading({"weight": torch.ones(2)}, build)
    made.names = {"value": 2.0}
    return made


@scenario
def unexpected_in_transformers_names(tmp_path: Path) -> Scenario:
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9)
    source = BertModel(config).state_dict() | {"extra": torch.ones(1)}
    return loading(source, lambda: BertModel(config))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.wte.weight


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.ones(2), persistent=False)
        self.weight = nn.Parameter(torch.ones(2))


@scenario
def quantized_weight(_: Path) -> Scenario:
    numbers = torch.ones(4, 3).to(torch.float8_e4m3fn)
    return loading(state("module.", n0_weight=numbers) | {"module.0.weight_scale": torch.tensor(0.5)})


@scenario
def quantized_weight_with_rules(_: Path) -> Scenario:
    source = state("old.", n0_weight=torch.ones(4, 3).to(torch.float8_e4m3fn))
    return loading(source | {"old.0.weight_scale": torch.tensor(0.5)}, rules=WITHOUT_OLD)


@scenario
def conversion_of_numbers_alone(tmp_path: Path) -> Scenario:
    source = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor(0.5)}
    return Scenario(partial(ms.convert_checkpoint, source, tmp_path / "x.safetensors", dtype="bf16"))


@scenario
def converting_a_value_that_holds_itself(tmp_path: Path) -> Scenario:
    config: dict[str, Any] = {"a": 1}
    config["whole"] = config
    torch.save({"model": state(), "config": config, "more": [1, config]}, tmp_path / "x.pt")
    return Scenario(partial(ms.convert_checkpoint, tmp_path / "x.pt", tmp_path / "y.safetensors"))


@scenario
def several_parts(_: Path) -> Scenario:
    source = {"model": state(), "ema": state()}
    made = loading(source)
    made.names = {"source": source}
    return made


@scenario
def memory_budget(tmp_path: Path) -> Scenario:
    def build() -> nn.Module:
        return nn.Linear(512, 512).half()

    ms.save(nn.Linear(512, 512), tmp_path / "x.safetensors")
    return loading(tmp_path / "x.safetensors", build, dtype=torch.float16, in_place=False, max_memory_bytes=200_000)


@scenario
def memory_of_a_save(tmp_path: Path) -> Scenario:
    return Scenario(partial(ms.convert_checkpoint, saved(tmp_path), tmp_path / "y.pt"), {"max_memory_bytes": 1})


def saved(folder: Path, name: str = "x.safetensors") -> Path:
    ms.save(net(), folder / name)
    return folder / name


@scenario
def target_exists(tmp_path: Path) -> Scenario:
    return Scenario(partial(ms.save, net(), saved(tmp_path)), {"overwrite": False})


@scenario
def unknown_suffix(tmp_path: Path) -> Scenario:
    return Scenario(partial(ms.save, net(), tmp_path / "x.weights"))


@scenario
def save_of_a_list(tmp_path: Path) -> Scenario:
    return Scenario(
        partial(ms.save, [torch.ones(1)], tmp_path / "x.pt"),
        names={"path": tmp_path / "x.pt", "state": [torch.ones(1)]},
    )


@scenario
def reading_into_another_shape(tmp_path: Path) -> Scenario:
    checkpoint = ms.open(saved(tmp_path))
    return Scenario(partial(checkpoint.read_into, "0.weight"), {"out": torch.empty(1)})


@scenario
def several_checkpoints(tmp_path: Path) -> Scenario:
    sources = [saved(tmp_path, "a.safetensors"), saved(tmp_path, "b.safetensors")]
    return Scenario(partial(ms.open, sources), takes=("ms.merge.Average",))


@scenario
def a_store_as_a_checkpoint(tmp_path: Path) -> Scenario:
    ms.Store(tmp_path / "run").save(1, {"model": net()})
    names = {"path": tmp_path / "run"}
    return Scenario(partial(ms.open, tmp_path / "run"), names=names, takes=("modelstate.Store", "store ls"))


@scenario
def forbidden_class(tmp_path: Path) -> Scenario:
    torch.save({"model": state(), "config": Config()}, tmp_path / "x.pt")
    return Scenario(partial(ms.load, net(), tmp_path / "x.pt"), names={"model": net()}, takes=("ms.load", "ms.open"))


class Config:
    """A class that a checkpoint names."""


@scenario
def forbidden_module(tmp_path: Path) -> Scenario:
    torch.save(net(), tmp_path / "x.pt")
    return Scenario(partial(ms.load, net(), tmp_path / "x.pt"), takes=("ms.open",))


@scenario
def restore_of_more(tmp_path: Path) -> Scenario:
    ms.save({"model": net()}, tmp_path / "x.safetensors")
    return Scenario(lambda **given: ms.restore({"model": net(), "ema": net()}, tmp_path / "x.safetensors", **given))


@scenario
def restore_of_less(tmp_path: Path) -> Scenario:
    ms.save({"model": net(), "ema": net()}, tmp_path / "x.safetensors")
    return Scenario(lambda **given: ms.restore({"model": net()}, tmp_path / "x.safetensors", **given))


@scenario
def swap_with_more_behind_a_wrapper(_: Path) -> Scenario:
    source = state("module.", n0_bias=None) | {"module.extra": torch.ones(4)}
    return Scenario(lambda **given: ms.Live(net()).swap(source, **given), names={"other": "module.0.bias"})


@scenario
def suggestion_for_several_parts(_: Path) -> Scenario:
    source = {part: {name.replace(".", "_"): value for name, value in state().items()} for part in ("a", "b")}
    return Scenario(partial(ms.suggest, net()), {"source": source})


@scenario
def lossy_cast_of_dcp(tmp_path: Path) -> Scenario:
    import torch.distributed.checkpoint as dcp

    path = saved(tmp_path)

    def call(**given: Any) -> None:
        wanted = {name: value.half() for name, value in state().items()}
        try:
            dcp.load(wanted, storage_reader=ms.dcp.Reader(path, **given))
        except dcp.api.CheckpointException as error:
            raise error.failures[0][0] from error

    return Scenario(call, names={"name": "*", "dtype": torch.float16})


@scenario
def patterns_of_init_missing(_: Path) -> Scenario:
    def call(init_missing: Any = False, **given: Any) -> object:
        return ms.load(net(), state(n0_bias=None), **(given or {"init_missing": init_missing}))

    return Scenario(call, {"init_missing": ["0.bias"]}, {"pattern": "0.bias"})


@scenario
def a_file_as_a_store(tmp_path: Path) -> Scenario:
    return Scenario(partial(command, "store", "ls", str(saved(tmp_path))))


class Failing(nn.Linear):
    """A Linear whose initialisation fails."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.is_built = True

    def reset_parameters(self) -> None:
        if hasattr(self, "is_built"):
            raise ValueError("no")


@scenario
def failing_initialisation(_: Path) -> Scenario:
    source = {"0.weight": torch.ones(4, 3)}

    def call(init_missing: bool = False, **given: Any) -> object:
        return ms.load(nn.Sequential(Failing()), source, **(given or {"init_missing": init_missing}))

    return Scenario(call, {"init_missing": True}, {"value": 0.0})


@scenario
def transform_of_one_name(_: Path) -> Scenario:
    class OfLinears(ms.loading.ModuleTransform):
        def applies_to(self, name: str, module: nn.Module) -> bool:
            return isinstance(module, nn.Linear)

        def __call__(self, name: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
            return tensor * 2

    return loading({"wte.weight": torch.ones(3, 2)}, Tied, transform=OfLinears())


@scenario
def conversion_that_fills(tmp_path: Path) -> Scenario:
    path, rules = saved(tmp_path), [ms.rules.Fill("2.*", 0.0)]
    model = nn.Sequential(*net(), nn.Linear(2, 2))
    names = {"model": model, "name": "2.weight", "tensor": torch.zeros(2, 2)}
    return Scenario(partial(ms.convert_checkpoint, path, tmp_path / "y.safetensors", rules=rules), names=names)


@scenario
def restore_with_one_schema_for_two(tmp_path: Path) -> Scenario:
    schema = ms.rules.Schema("1.0", recognise={"1.0": lambda _: True})
    ms.save({"a": net(), "b": net()}, tmp_path / "x.safetensors")
    call = partial(ms.restore, {"a": net(), "b": net()}, tmp_path / "x.safetensors")
    return Scenario(call, {"rules": schema}, {"schema": schema})


@scenario
def swap_with_nan(_: Path) -> Scenario:
    live = ms.Live(net().eval())
    source = state(n0_bias=torch.full((4,), torch.nan))
    return Scenario(lambda **given: live.swap(source, **{"check_finite": True, **given}))


@scenario
def step_that_exists(tmp_path: Path) -> Scenario:
    store = ms.Store(tmp_path)
    store.save(1, {"model": net()})
    return Scenario(partial(store.save, 1, {"model": net()}))


@scenario
def conversion_without_values(_: Path) -> Scenario:
    with torch.device("meta"):
        empty = net()
    return Scenario(lambda **given: ms.convert(empty, device="cpu", **given))


@scenario
def transform_of_optimized_parameters(_: Path) -> Scenario:
    class Halves(ms.loading.ModuleTransform):
        def applies_to(self, name: str, module: nn.Module) -> bool:
            return True

        def __call__(self, name: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
            return nn.Parameter(tensor.half())

    def call(**given: Any) -> object:
        model = net()
        return ms.load(model, state(), optimizers=torch.optim.SGD(model[0].parameters()), **given)

    return Scenario(call, {"transform": Halves()})


@scenario
def no_cache(tmp_path: Path) -> Scenario:
    return Scenario(partial(ms.open, saved(tmp_path)), {"cache": True}, {"directory": tmp_path / "cache"})


@scenario
def nothing_under_a_path(tmp_path: Path) -> Scenario:
    return Scenario(partial(ms.open(saved(tmp_path)).value, "nothing"), names={"source": tmp_path / "x.safetensors"})


@scenario
def save_of_a_description(tmp_path: Path) -> Scenario:
    checkpoint, path = ms.open(saved(tmp_path)), tmp_path / "y.safetensors"
    spec = checkpoint["0.weight"]
    names = {"checkpoint": checkpoint, "name": spec.name, "path": path}
    return Scenario(partial(ms.save, {"w": spec}, path), names=names)


def command(*arguments: str) -> None:
    result = CliRunner().invoke(app, [*arguments])
    if result.exit_code:
        raise ms.ModelStateError(result.output, remedy=" ".join(re.findall(r"to do: (.*)", result.output)))


LOADS: dict[str, Callable[[], Scenario]] = {
    "missing": lambda: loading(state(n0_bias=None)),
    "missing_on_meta": lambda: loading(state(n0_bias=None), without_memory),
    "kept_on_meta": lambda: loading(state(n0_bias=None), without_memory, allow_missing=["0.bias"]),
    "missing_beside_what_may_be_missing": lambda: loading(state(n0_bias=None, n1_bias=None), allow_missing=["0.bias"]),
    "unexpected": lambda: loading(state(extra=torch.ones(1))),
    "unexpected_with_brackets": lambda: loading(state() | {"extra[0]": torch.ones(1), "more*": torch.ones(1)}),
    "many_unexpected": lambda: loading(
        state() | {f"ema.{a}.{b}.{c}": torch.ones(1) for a in "xyz" for b in "uvw" for c in range(9)}
    ),
    "unexpected_behind_a_wrapper": lambda: loading(state("_orig_mod.") | {"_orig_mod.extra": torch.ones(1)}),
    "unexpected_in_a_part": lambda: loading({"model": state(extra=torch.ones(1)), "epoch": 3}, key="model"),
    "unexpected_after_rules": lambda: loading(state("old.", extra=torch.ones(1)), rules=WITHOUT_OLD),
    "other_shape": lambda: loading(state(n0_weight=torch.ones(7, 7))),
    "other_shape_behind_a_wrapper": lambda: loading(state("module.", n0_weight=torch.ones(7, 7))),
    "other_shape_after_rules": lambda: loading(
        state("old.", n0_weight=torch.ones(7, 7), n1_weight=torch.ones(5)), rules=WITHOUT_OLD
    ),
    "other_shape_of_one_name_of_a_tie": lambda: loading(UNTIED | {"head.weight": torch.ones(5, 2)}, Tied),
    "other_shape_of_a_tie_under_one_name": lambda: loading({"head.weight": torch.ones(5, 2)}, Tied),
    "other_shape_of_what_batch_norm_counts": lambda: loading(
        nn.BatchNorm1d(2).state_dict() | {"num_batches_tracked": torch.ones(3)}, lambda: nn.BatchNorm1d(2)
    ),
    "other_dimensions": lambda: loading(state(n0_bias=torch.ones(1, 4))),
    "other_prefix": lambda: loading(state("backbone.")),
    "lossy_cast": lambda: loading(state(), lambda: net().half()),
    "numbers_for_floats": lambda: loading(state(n0_bias=torch.arange(4))),
    "tie_conflict": lambda: loading(UNTIED, Tied),
    "tie_conflict_behind_a_wrapper": lambda: loading({f"module.{name}": value for name, value in UNTIED.items()}, Tied),
    "buffer_conflict": lambda: loading({"frequency": torch.zeros(2), "weight": torch.zeros(2)}, Rotary),
    "load_onto_meta": lambda: loading(state(), device="meta"),
    "load_onto_no_device": lambda: loading(state(), device="cuda:99"),
    "conversion_to_a_device": lambda: Scenario(
        partial(ms.convert, net(), "cpu"), names={"model": net()}, takes=("ms.convert",)
    ),
    "retention_without_metric": lambda: Scenario(partial(ms.Keep, best=3), takes=("metric",)),
    "a_class_as_a_model": lambda: Scenario(partial(ms.load, Tied, {})),
}
"""Scenarios that need no folder."""
SCENARIOS |= {name: lambda _, make=make: make() for name, make in LOADS.items()}  # type: ignore[misc]


# The tests.


def failure(call: Callable[[], object]) -> ModelStateError | None:
    try:
        call()
    except ModelStateError as error:
        return error
    return None


def is_other(error: ModelStateError, first: ModelStateError) -> bool:
    """Whether an error is about something else than the first, or about less."""
    if isinstance(error, PlanError) and isinstance(first, PlanError):
        return causes(error).isdisjoint(causes(first)) or causes(error) < causes(first)
    return error.what != first.what


SLOW = {"unexpected_in_transformers_names"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SCENARIOS]
)
def test_what_an_error_advises_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = SCENARIOS[name](tmp_path)
    with pytest.raises(ModelStateError) as caught:
        made.call(**made.options)
    advice = advice_in(text_of(caught.value))
    names = {"ms": ms, "modelstate": ms, "torch": torch, "nn": nn, **made.options, **made.names}
    for code in advice.calls:
        result = eval(code, names)
        option = next((option for start, option in PASSED.items() if code.startswith(start)), "")
        if option:
            made.call(**(made.options | {option: result}))
    for group in advice.arguments:
        added = {option: eval(code, names) for option, code in group.items()}
        error = failure(partial(made.call, **(made.options | added)))
        assert error is None or is_other(error, caught.value), f"{group} does not help: {error}"
    for line in advice.commands:
        command(*shlex.split(line)[1:])
    assert advice.calls or advice.arguments or advice.commands, f"no code was found in: {text_of(caught.value)}"
    assert all(taken in str(advice) for taken in made.takes)
    shown = re.findall(r"more: modelstate explain ([\w-]+)", str(caught.value))
    assert shown
    assert set(shown) <= set(pages())


PASSED = {"ms.merge.": "combine", "torch.empty(": "out", "ms.suggest(": "rules"}
"""The arguments that take what a call returns."""
