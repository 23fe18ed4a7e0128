"""A working directory with models, for the tests of commands."""

import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.cli.command import tiny

MODULE = """
import torch
from torch import nn

class Settings:
    def __init__(self):
        self.rate = 0.1

def tiny():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

def half():
    return tiny().half()

def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model

def looks():
    model = nn.Linear(4, 3)
    if model.weight.sum().item() > 1e9:
        raise RuntimeError
    return model

def hooked():
    def hook(module, state, *_):
        raise ValueError("the hook is broken")
    model = tiny()
    model.register_load_state_dict_pre_hook(hook)
    return model

def ends():
    raise SystemExit(0)

def ends_in_a_hook():
    def hook(module, state, *_):
        raise SystemExit(0)
    model = tiny()
    model.register_load_state_dict_pre_hook(hook)
    return model

def prints():
    def hook(module, state, *_):
        print("loading")
    model = tiny()
    model.register_load_state_dict_pre_hook(hook)
    return model

def reads_in_a_hook():
    def hook(module, *_):
        if module[0].weight.sum().item() > 1e9:
            raise RuntimeError
    model = tiny()
    model._register_load_state_dict_pre_hook(hook, with_module=True)
    return model

def swallows():
    try:
        return looks()
    except RuntimeError:
        return None

instance = tiny()

def lost():
    model = tiny()
    model.register_buffer("table", torch.arange(3.0, device="meta"), persistent=False)
    return model

def wide():
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))

def building():
    print("building")
    return tiny()

def fails():
    raise LookupError("no such size")

def number():
    return 3

def needs(size):
    return nn.Linear(size, size)

class Zoo:
    @staticmethod
    def small():
        return nn.Linear(4, 3)

not_callable = 5
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a checkpoint of `tiny`, and with a module of models that MODELS stands for."""
    name = f"models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "broken_zoo.py").write_text("import there_is_no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("MODELS", name)
    save_file(tiny().state_dict(), tmp_path / "tiny.safetensors")
    return tmp_path
