"""Modules that were pickled as a whole: their tensors are found without the classes that the pickle asks for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import modelstate as ms
from modelstate.cli.main import app


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.heads = nn.ModuleList([nn.Linear(4, 2, bias=False), nn.Identity()])
        self.scale = nn.Parameter(torch.rand(3))
        self.register_buffer("table", torch.rand(5))
        self.register_buffer("cache", torch.rand(6), persistent=False)
        self.register_parameter("unused", None)
        self.settings = Settings()


class Settings:
    rate = 0.1


class Slotted(nn.Module):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self.extra = 3
        self.weight = nn.Parameter(torch.rand(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.Sequential(Block(), Block(), Slotted())
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def trained() -> Net:
    """Values that a new model does not have."""
    model = Net()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.rand(value.shape) * 100)
    return model


FORMATS: dict[str, dict[str, Any]] = {
    "zip": {},
    "legacy": {"_use_new_zipfile_serialization": False},
    "protocol 4": {"pickle_protocol": 4},
}


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    ("wrap", "key"), [(lambda model: model, None), (lambda model: {"epoch": 3, "ema": model}, "ema")]
)
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_the_names_and_values_are_those_of_the_state_dict(
    wrap: Callable[[nn.Module], object], key: str | None, options: dict[str, Any], tmp_path: Path
) -> None:
    model = trained()
    torch.save(wrap(model), tmp_path / "whole.pt", **options)
    checkpoint = ms.open(tmp_path / "whole.pt", skip_forbidden=True, key=key)
    expected = model.state_dict()
    assert list(checkpoint) == list(expected)
    assert all(torch.equal(checkpoint.tensor(name), value) for name, value in expected.items())
    assert ("embed.weight", "head.weight") in checkpoint.aliases

    with ms.skeleton():
        other = Net()
    ms.load(other, checkpoint)
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_the_error_names_the_way_to_the_tensors(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pt")
    with pytest.raises(ms.errors.ForbiddenGlobalError, match="skip_forbidden=True"):
        ms.open(tmp_path / "whole.pt")
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "whole.pt")])
    assert done.exit_code == 1
    assert "to do: --skip-forbidden" in done.stderr


def test_inspect_shows_them(tmp_path: Path) -> None:
    torch.save({"model": trained()}, tmp_path / "whole.pt")
    done = CliRunner().invoke(app, ["inspect", "--skip-forbidden", str(tmp_path / "whole.pt")])
    assert done.exit_code == 0
    assert "blocks" in done.stdout
    assert " 0 tensors" not in done.stdout


@pytest.mark.parametrize("content", [Settings(), {"a": [Settings()]}], ids=["alone", "nested"])
def test_inspect_says_that_nothing_was_found(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.pt")
    done = CliRunner().invoke(app, ["inspect", "--skip-forbidden", str(tmp_path / "other.pt")])
    assert done.exit_code == 1
    assert "no tensor was found" in done.stderr
    assert "Settings" in done.stderr
    torch.save({"epoch": 3}, tmp_path / "values.pt")
    assert CliRunner().invoke(app, ["inspect", "--skip-forbidden", str(tmp_path / "values.pt")]).exit_code == 0


def test_a_module_as_a_key_stays_a_placeholder(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    torch.save({"of": {model: 1}, "w": torch.ones(2)}, tmp_path / "keys.pt")
    assert list(ms.open(tmp_path / "keys.pt", skip_forbidden=True)) == ["w"]
