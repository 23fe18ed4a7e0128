"""Every example in a public docstring runs, and prints what it shows.

Examples name things that a reader has: a model, an optimizer, a store, files. `WORLD` makes those that many examples
use, and `SETUPS` what single ones need. Output that a docstring leaves out is not compared.
"""

import doctest
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import modelstate

ROOMS = ("comparison", "conversion", "loading", "objects", "suggestion", "transaction")
"""Rooms with public names that are not in `modelstate.__all__` themselves."""

WORLD = """
torch.manual_seed(0)
model = module = nn.Linear(10, 10).eval()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.ones(2, 10)
ms.save(model, "model.safetensors")
torch.save(model.state_dict(), "model.pt")
"""

LIVE = """
live = ms.Live(model)
ms.save(model, "step-2000.safetensors")
torch.save(model.state_dict(), "checkpoint.pt")
"""
WRITER = f"""
model.__class__ = type("Writer", (nn.Linear,), {{"generate": lambda self, x: self(x)}})
{LIVE}prompt = x
"""
STORE = """
store = ms.Store("checkpoints")
objects = {"model": model, "optimizer": optimizer}
"""
TWO_STEPS = f"""{STORE}
for step in (1000, 2000):
    store.save(step, {{"model": model}})
    with torch.no_grad():
        model.weight.add_(1)
"""
LOOP = "train_step = lambda: 0.5\n"
FOLLOWED = f"""{LIVE}
store = ms.Store("runs/checkpoints")
store.save(1, {{"model": model}}, metrics={{"loss": 0.5}})
"""
FOLLOWING = f"""{FOLLOWED}
following = ms.follow(live, "runs/checkpoints")
"""
NAMES = """
class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 10)
        self.register_state_dict_post_hook(outside)
        self.register_load_state_dict_pre_hook(inside)

    def forward(self, x):
        return self.layer(x)

def outside(module, state, prefix, metadata):
    for name in [name for name in state if name.startswith(prefix + "layer.")]:
        state[prefix + name.removeprefix(prefix + "layer.")] = state.pop(name)

def inside(module, state, prefix, *rest):
    for name in module.layer.state_dict():
        state[f"{prefix}layer.{name}"] = state.pop(prefix + name)

module = nn.ModuleDict({"layers": nn.Sequential(Renamed())}).eval()
names = ms.serve.NameMap.of(module)
Path("names.json").write_text(names.to_json())
"""
SERVED_NAMES = f"""{NAMES}
module = nn.Sequential(Renamed()).eval()
live = ms.Live(torch.export.export(module, (x,)))
torch.save(module.state_dict(), "checkpoint.pt")
program = torch.export.export(module, (x,))
"""
SCHEMA = """
schema = ms.rules.Schema(
    "1.0",
    [ms.rules.Migration("2.0", [ms.rules.Rename("fc.*", "head.*")])],
    recognise={"1.0": lambda names: "fc.weight" in names},
)
model = nn.ModuleDict({"head": nn.Linear(2, 2)})
ms.save(nn.ModuleDict({"fc": nn.Linear(2, 2)}), "old.safetensors", schema="1.0")
ms.save(nn.ModuleDict({"fc": nn.Linear(2, 2)}), "noted.safetensors", schema="1.0")
ms.save(nn.ModuleDict({"fc": nn.Linear(2, 2)}), "unmarked.safetensors")
"""
MANIFEST = 'manifest = ms.export(model, (x,), "program.pt2")\ntext = manifest.to_json()\n'


def tied(model: str, file: str, path: str) -> str:
    return f"model = {model}\ntorch.save({file}, {path!r})\n"


SETUPS = {
    "Deadline": f"{STORE}{LOOP}deadline = ms.Deadline(hours=4)\n",
    "RNG.load_state_dict": "state = ms.RNG().state_dict()\n",
    "Live": LIVE,
    "Live.history": f"{LIVE}live.swap('step-2000.safetensors')\n",
    "Live.version": WRITER,
    "Canary": LIVE,
    "Store": STORE,
    **dict.fromkeys(
        (f"Store.{name}" for name in ["diff", "steps", "latest", "infos", "open", "pin", "unpin"]), TWO_STEPS
    ),
    "Store.prune": TWO_STEPS + "store.save(3000, {'model': model})\n",
    "Store.restore": f"{STORE}store.save(1000, objects)\n",
    "store.CheckpointInfo": f"{STORE}store.save(1000, objects, metrics={{'loss': 0.3}})\n",
    "store.RestoredStep": f"{STORE}store.save(3000, {{'model': model, 'epoch': 3}})\n",
    "store.PendingSave": STORE,
    "store.SavedStep": STORE,
    "store.Resumable": LOOP,
    "resumable": LOOP,
    "serve.Following": FOLLOWED,
    "serve.Following.stop": FOLLOWING,
    "serve.SwapReport": LIVE,
    "serve.Manifest.to_json": MANIFEST,
    "serve.Manifest.from_json": MANIFEST,
    "serve.NameMap": SERVED_NAMES,
    "serve.NameMap.rename": NAMES,
    "serve.NameMap.apply": f"{SERVED_NAMES}names = ms.serve.NameMap.of(module)\n",
    "loading.LoadHandle": "class Tokenizer:\n    from_file = staticmethod(open)\nPath('tokenizer.json').touch()\n",
    "loading.Quantize": (
        'model = nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(10, 10)})})])\n'
        'ms.save(model, "model.safetensors")\n'
    ),
    "objects.Restored": 'ms.save({"model": model, "epoch": 3}, "run.safetensors")\n',
    "objects.Restored.rewind_generators": (
        'validate = lambda model: None\nstore = ms.Store("run")\nstore.save(1, {"model": model, "rng": ms.RNG()})\n'
    ),
    "load": "config = None\nModel = lambda config: nn.Linear(10, 10)\n",
    "load_optimizer_state": (
        "adam = torch.optim.Adam(model.parameters())\nmodel(x).sum().backward()\nadam.step()\n"
        "state_of_adam = ms.optimizer_state(model, adam)\n"
    ),
    "merge.Average": 'ms.save(model, "a.safetensors")\nms.save(model, "b.safetensors")\n',
    "merge.LoRA": (
        'import os\nms.save(model, "base.safetensors")\nos.mkdir("adapter")\n'
        'pair = {"lora_A": torch.ones(2, 10), "lora_B": torch.ones(10, 2)}\n'
        'model = nn.ModuleDict({"up": nn.Linear(10, 10)})\nms.save(model, "base.safetensors")\n'
        'adapter = {f"base_model.model.up.{name}.weight": value for name, value in pair.items()}\n'
        'ms.save(adapter, "adapter/adapter_model.safetensors")\n'
        'config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "fan_in_fan_out": False}\n'
        'Path("adapter/adapter_config.json").write_text(json.dumps(config))\n'
    ),
    "rules.Apply": tied(
        'nn.ModuleDict({"a": nn.ParameterDict({"scale": nn.Parameter(torch.ones(2))})})',
        '{"a.scale": torch.ones(2)}',
        "old.pt",
    ),
    "rules.Cast": tied("nn.Linear(2, 2).bfloat16()", "nn.Linear(2, 2).state_dict()", "fp32.pt"),
    "rules.Concat": tied(
        'nn.ModuleDict({"a": nn.ModuleDict({"qkv": nn.Linear(2, 6)})})',
        '{f"a.{p}.{n}": v for p in "qkv" for n, v in nn.Linear(2, 2).state_dict().items()}',
        "separate.pt",
    ),
    "rules.Dequantize": (
        "model = nn.Sequential(nn.Linear(2, 2, bias=False))\n"
        'numbers = {"0.weight": torch.ones(2, 2).to(torch.float8_e5m2), "0.weight_scale": torch.tensor(2.0)}\n'
        'ms.save(numbers, "fp8.safetensors")\n'
    ),
    "rules.Split": tied(
        'nn.ModuleDict({"a": nn.ModuleDict({part: nn.Linear(2, 2) for part in "qkv"})})',
        '{f"a.qkv.{n}": v for n, v in nn.Linear(2, 6).state_dict().items()}',
        "fused.pt",
    ),
    "rules.Copy": tied(
        'nn.ModuleDict({"wte": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})',
        '{"wte.weight": torch.ones(3, 2)}',
        "tied.pt",
    ),
    "rules.Same": tied(
        'nn.ModuleDict({"wte": nn.Embedding(3, 2)})',
        '{"wte.weight": torch.ones(3, 2), "head.weight": torch.ones(3, 2)}',
        "untied.pt",
    ),
    "rules.Fill": tied(
        'nn.ModuleDict({"norm": nn.BatchNorm1d(2)})',
        '{f"norm.{n}": v for n, v in nn.BatchNorm1d(2).state_dict().items() if n != "num_batches_tracked"}',
        "old.pt",
    ),
    "rules.Ignore": tied(
        'nn.ModuleDict({"body": nn.Linear(2, 2), "classifier": nn.Linear(2, 3)})',
        'nn.ModuleDict({"body": nn.Linear(2, 2), "classifier": nn.Linear(2, 9)}).state_dict()',
        "pretrained.pt",
    ),
    "rules.Prefix": tied("nn.Linear(2, 2)", 'nn.ModuleDict({"module": nn.Linear(2, 2)}).state_dict()', "ddp.pt"),
    "rules.Reshape": tied(
        'nn.ParameterDict({"pos_embed": nn.Parameter(torch.ones(196, 768))})',
        '{"pos_embed": torch.ones(1, 196, 768)}',
        "old.pt",
    ),
    "rules.Transpose": (
        'attention = nn.ModuleDict({"c_attn": nn.Linear(2, 6, bias=False)})\n'
        'model = nn.ModuleDict({"h": nn.ModuleList([nn.ModuleDict({"attn": attention})])})\n'
        'ms.save({"h.0.attn.c_attn.weight": torch.ones(2, 6)}, "gpt2.safetensors")\n'
    ),
    "rules.Multiply": tied(
        "nn.Sequential(nn.Linear(2, 2, bias=False))",
        '{"0.weight_orig": torch.ones(2, 2), "0.weight_mask": torch.eye(2)}',
        "pruned.pt",
    ),
    "rules.WeightNorm": tied(
        "nn.Sequential(nn.Linear(2, 2, bias=False))",
        '{"0.weight_g": torch.ones(2, 1), "0.weight_v": torch.eye(2)}',
        "weight_norm.pt",
    ),
    "rules.Rule": tied("nn.Linear(2, 2)", '{"Weight": torch.ones(2, 2), "BIAS": torch.ones(2)}', "old.pt"),
    "rules.Schema": SCHEMA,
    **dict.fromkeys(
        ("suggest", "suggestion.Suggestion", "suggestion.Suggestion.accept_guesses", "rules.Guess"),
        'model = nn.ModuleDict({"q": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})\n'
        'other = nn.ModuleDict({"query": nn.Linear(2, 2), "layer_norm": nn.LayerNorm(2)})\n'
        'path = "other_names.safetensors"\nms.save(other, path)\n',
    ),
}

NOT_RUN = {"Cache", "copy", "rules.from_transformers", "follow", "serve.Following.wait"}
"""Examples that need a bucket, another library or the body of a `for` loop, or that wait for an hour."""


def public_objects(module: ModuleType) -> Iterator[tuple[str, object]]:
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if inspect.ismodule(value):
            yield from public_objects(value)
        elif inspect.isfunction(value):
            yield f"{module.__name__}.{name}", value
        elif inspect.isclass(value):
            yield f"{module.__name__}.{name}", value
            for own, member in vars(value).items():
                function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                if inspect.isfunction(function) and not own.startswith("_"):
                    yield f"{module.__name__}.{name}.{own}", function


def examples() -> dict[str, str]:
    modules = [modelstate, *(importlib.import_module(f"modelstate.{room}") for room in ROOMS)]
    objects = {name: value for module in modules for name, value in public_objects(module)}
    texts = {name.removeprefix("modelstate."): inspect.getdoc(value) or "" for name, value in objects.items()}
    return {name: text for name, text in texts.items() if ">>>" in text and name not in NOT_RUN}


EXAMPLES = examples()


class ShownOutput(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def setup_of(name: str) -> str:
    """Returns the setup of a name, else that of its class."""
    return SETUPS.get(name) or SETUPS.get(name.rpartition(".")[0], "")


@pytest.mark.slow_except(40)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_and_prints_what_it_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {
        "modelstate": modelstate,
        "ms": modelstate,
        "json": json,
        "torch": torch,
        "nn": nn,
        "Path": Path,
        "re": re,
    }
    exec(WORLD + setup_of(name), names)
    runner = doctest.DocTestRunner(ShownOutput(), optionflags=doctest.ELLIPSIS)
    shown: list[str] = []
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name], names, name, name, 0)
    runner.run(test, out=shown.append, clear_globs=False)
    for value in test.globs.values():
        if isinstance(value, modelstate.serve.Following):
            value.stop()  # its thread would go on during other tests
    assert not shown, "".join(shown)


def test_setups_belong_to_examples() -> None:
    owners = {name.rpartition(".")[0] for name in EXAMPLES}
    assert SETUPS.keys() <= EXAMPLES.keys() | owners
