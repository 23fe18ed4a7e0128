"""What cannot be saved is refused, all of it at once, and nothing is written."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import CodecError, ModelCodeError, OptionError, TargetExistsError, UnsavableError
from modelstate.formats import serialize


class Sub(torch.Tensor):
    pass


class Failing(nn.Module):
    def state_dict(self, *args: Any, **named: Any) -> Any:
        raise LookupError("gone")


class Odd(nn.Module):
    def get_extra_state(self) -> Any:
        return {"cfg": [object()]}

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError


def emptied() -> torch.Tensor:
    made = torch.ones(3)
    made.untyped_storage().resize_(0)
    return made


WIDE = torch.ones(1, dtype=torch.complex128)


def doubled(times: int) -> dict[str, Any]:
    made: list[Any] = [torch.ones(1)]
    for _ in range(times):
        made = [made, made]
    return {"a": made}


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "number": (3, UnsavableError, "builtins.int"),
    "list": ([torch.ones(1)], UnsavableError, "builtins.list"),
    "nested name": ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, UnsavableError, "'a.b': two values have"),
    "number and text": ({"a": {0: torch.ones(1), "0": torch.ones(1)}}, UnsavableError, "'a.0': two values have"),
    "modules in a list": ({"models": [nn.Linear(1, 1)]}, CodecError, r"'models'\[0\].*save its state_dict\(\)"),
    "class": (nn.Linear, UnsavableError, r"cannot save the class Linear.*pass a module: Linear\(...\)"),
    "tensor": (torch.ones(1), UnsavableError, r"object of type Tensor.*ms.save\({'tensor': state}, path\)"),
    "nested value": ({"a": torch.ones(1), "b": [object()]}, CodecError, "object.*register_codec"),
    "shared without end": (doubled(40), CodecError, "too many values"),
    "nested meta": ({"a": [torch.ones(1, device="meta")]}, UnsavableError, r"'a\.0': .*meta"),
    "name": ({3: torch.ones(1)}, UnsavableError, "'3': not a name"),
    "reserved": ({"__metadata__": torch.ones(1)}, UnsavableError, "not a name"),
    "subclass": ({"a": torch.ones(1).as_subclass(Sub)}, UnsavableError, "'a': .*Sub"),
    "sparse": ({"a": torch.eye(2).to_sparse()}, UnsavableError, "'a': .*sparse_coo"),
    "meta": (nn.Linear(2, 2, device="meta"), UnsavableError, "'weight': .*meta.*'bias': .*meta.*load values into"),
    "dtype": ({"a": WIDE}, UnsavableError, "'a': torch.complex128, which safetensors"),
    "no memory": ({"a": emptied()}, UnsavableError, "memory has been given back"),
    "state_dict": (Failing(), ModelCodeError, "Failing: .*state_dict raised\n  found: LookupError: .*gone"),
    "extra": (Odd(), CodecError, r"_extra_state\['cfg'\]\[0\]: .*builtins.object.*register_codec"),
    "extra too large": ({"a._extra_state": "a" * 100_000_000}, UnsavableError, "more than the header"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, kind, text = REFUSED[name]
    if name == "shared without end":
        monkeypatch.setattr(serialize, "_MAX_NODES", 20_000)  # the limit is 5 million, which takes 20 seconds
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"the old file")
    with pytest.raises(kind) as caught:
        ms.save(target, path)
    assert re.search(f"(?s){text}", str(caught.value)), caught.value
    assert isinstance(caught.value, ms.ModelStateError)
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
    assert path.read_bytes() == b"the old file"


def test_a_value_that_holds_itself_is_in_no_file_of_torch(tmp_path: Path) -> None:
    itself: dict[str, Any] = {}
    itself["itself"] = [itself]
    with pytest.raises(CodecError, match="holds itself"):
        ms.save({"w": torch.ones(1), "value": itself}, tmp_path / "x.pt")
    assert not list(tmp_path.iterdir())


def test_many_problems_are_counted(tmp_path: Path) -> None:
    with pytest.raises(UnsavableError, match=r"20 of 21 tensors .*\n.*and 12 more"):
        ms.save({"ok": torch.ones(1), **{f"w{n}": torch.ones(1, device="meta") for n in range(20)}}, tmp_path / "x")


@pytest.mark.parametrize("path", [3, None, b"x", "", "a\0b", "x.safetensors/", "file:///x/"])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(UnsavableError):
        ms.save({}, path)


def test_options(tmp_path: Path) -> None:
    for schema in (2, ""):
        with pytest.raises(OptionError, match="schema="):
            ms.save({}, tmp_path / "x", schema=schema)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    ms.save({}, tmp_path / "x")
    with pytest.raises(TargetExistsError, match="overwrite=True"):
        ms.save({"a": torch.ones(1)}, tmp_path / "x", overwrite=False)
    assert not list(ms.open(tmp_path / "x"))
    ms.save({"a": torch.ones(1)}, tmp_path / "y", overwrite=False)
    assert list(ms.open(tmp_path / "y")) == ["a"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x", "y"]
