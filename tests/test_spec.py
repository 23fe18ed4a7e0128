"""A stored tensor's description."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import modelstate as ms
from modelstate import errors


@pytest.fixture
def spec(tmp_path: Path) -> ms.TensorSpec:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    return ms.open(tmp_path / "x.pt")["w"]


USES: dict[str, Callable[[Any], object]] = {
    "spec * 2": lambda spec: spec * 2,
    "tensor + spec": lambda spec: torch.ones(3) + spec,
    "spec > 0": lambda spec: spec > 0,
    "spec[0]": lambda spec: spec[0],
    "len": len,
    "float": float,
    "a method": lambda spec: spec.to("cpu"),
    "a function": lambda spec: torch.add(spec, 1),
    "a function of a list": lambda spec: torch.cat([spec, spec]),
    "copy_": lambda spec: torch.ones(3).copy_(spec),
    "torch.as_tensor": torch.as_tensor,
    "np.asarray": np.asarray,
    "array * spec": lambda spec: np.ones(3) * spec,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_using_a_description_as_the_tensor(use: Callable[[Any], object], spec: ms.TensorSpec) -> None:
    with pytest.raises(errors.TensorSpecError, match="description of a stored tensor") as caught:
        use(spec)
    assert isinstance(caught.value, TypeError)
    assert caught.value.remedy == "read it first: checkpoint.tensor('w')"


def test_what_a_description_can_do(spec: Any) -> None:
    assert copy.deepcopy(spec) == copy.copy(spec) == pickle.loads(pickle.dumps(spec)) == spec
    assert len({spec, copy.copy(spec)}) == 1
    assert spec
    assert (spec == torch.ones(3), torch.ones(3) == spec, spec in [torch.ones(3)]) == (False, False, False)
    probed = ("to", "_repr_html_", "_ipython_display_", "__array_interface__", "__deepcopy__", "anything")
    assert not any(hasattr(spec, name) for name in probed)
    assert np.array([spec, spec], dtype=object).tolist() == [spec, spec]
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        _ = spec.anything


def test_descriptions_are_neither_loaded_nor_saved(spec: ms.TensorSpec, tmp_path: Path) -> None:
    with pytest.raises(errors.PlanError, match=r"checkpoint\.value\(\)"):
        ms.load(torch.nn.Linear(3, 1), {"weight": spec, "bias": spec})
    for name in ("y.safetensors", "y.pt"):
        with (
            pytest.raises(errors.SaveError, match="TensorSpec")
            if name == "y.pt"
            else pytest.raises(errors.CodecError, match=r"ms\.save\(checkpoint, path\)")
        ):
            ms.save({"w": spec}, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
