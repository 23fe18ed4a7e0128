"""After any failure of `load` the module, and everything that refers to it, is what it was."""

import copy
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms
from modelstate import errors
from tests.faults import faulty_reads
from tests.loading.fingerprint import described, whole


class Payload(nn.Module):
    """Extra state, a derived attribute and a buffer that hooks touch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(2))
        self.log: list[Any] = ["made"]
        self.options = {"nested": {"list": [1, 2]}}

    def get_extra_state(self) -> Any:
        return {"log": list(self.log)}

    def set_extra_state(self, state: Any) -> None:
        self.log.extend(state["log"])
        self.options["nested"]["list"].append(3)
        self.brand_new = torch.ones(1)
        self.seen += 1


def trained(hooked: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in the middle of training: gradients, optimizer state, ties, frozen parts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 3), Payload())
    model[3].weight = model[2].weight
    model[0].bias.requires_grad_(False)
    if hooked:
        model.register_load_state_dict_post_hook(lambda owner, _: owner[4].log.append(owner[0].weight.sum().item()))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    hidden = model[:4](torch.randn(5, 4)) * model[4].scale
    hidden.square().mean().backward()
    optimizer.step()
    return model, optimizer


def checkpoint_of(model: nn.Module, path: Path) -> Path:
    state = copy.deepcopy(model.state_dict())
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.add_(1)
    torch.save(state, path)
    return path


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    before, state = whole(model), described(optimizer.state_dict())
    references = [id(p) for group in optimizer.param_groups for p in group["params"]]
    yield
    assert whole(model) == before
    assert described(optimizer.state_dict()) == state
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == references


def raising_hook(model: nn.Module) -> None:
    def hook(owner: nn.Module, _: Any) -> None:
        owner[0].weight.data.zero_()  # type: ignore[index, union-attr]
        owner[2] = nn.Linear(1, 1)  # type: ignore[index]
        owner[4].options.clear()  # type: ignore[index, union-attr]
        raise LookupError("the hook gives up")

    model.register_load_state_dict_post_hook(hook)


def raising_extra_state(model: nn.Module) -> None:
    original = model[4].set_extra_state  # type: ignore[index, union-attr]

    class Raising(Payload):
        def set_extra_state(self, state: Any) -> None:
            original(state)
            self.log = None
            raise LookupError("no such state")

    model[4].__class__ = Raising  # type: ignore[index]


def raise_on(last: str) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == last:
            raise LookupError("the transform gives up")
        return tensor * 2

    return transform


def return_for_last(last: str, value: Any) -> Callable[[str, torch.Tensor], Any]:
    return lambda name, tensor: value if name == last else tensor


def no_change(model: nn.Module) -> None:
    pass


FAILURES: dict[str, tuple[Callable[[nn.Module], None], dict[str, Any], type[Exception]]] = {
    "a hook": (raising_hook, {}, errors.ModelCodeError),
    "extra state": (raising_extra_state, {}, errors.ModelCodeError),
    "a transform on the last tensor": (no_change, {"transform": raise_on("4.seen")}, errors.TransformError),
    "a transform to None": (no_change, {"transform": return_for_last("4.seen", None)}, errors.TransformError),
    "a transform to a shape": (
        no_change,
        {"transform": return_for_last("4.seen", torch.ones(5))},
        errors.TransformError,
    ),
    "a transform to meta": (
        no_change,
        {"transform": return_for_last("4.seen", torch.ones(2, device="meta"))},
        errors.TransformError,
    ),
    "an allowed name that is not there": (no_change, {"allow_missing": ["nothing.*"]}, errors.PlanError),
    "a rule that does nothing": (no_change, {"rules": [ms.rules.Prefix(strip="x.")]}, errors.PlanError),
    "a rule that breaks names": (no_change, {"rules": [ms.rules.Prefix(add="x.")]}, errors.PlanError),
    "a key that is not there": (no_change, {"key": "model"}, errors.KeyNotFoundError),
    "too little memory": (no_change, {"max_memory_bytes": 1}, errors.MemoryBudgetError),
}


@pytest.mark.slow_except(8)
@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])
@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_of(case: str, in_place: bool, tmp_path: Path) -> None:
    change, options, error = FAILURES[case]
    if case == "too little memory" and in_place:
        pytest.skip("nothing is staged in place")
    model, optimizer = trained()
    path = checkpoint_of(model, tmp_path / "x.pt")
    change(model)
    with unchanged(model, optimizer), pytest.raises(error):
        ms.load(model, path, in_place=in_place, **options)


@pytest.mark.parametrize("fault", [{"error": OSError(errno.EIO, "Input/output error")}, {"short": 0}], ids=str)
def test_a_read_that_fails_within_code_of_the_model(fault: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint_of(model, tmp_path / "x.pt")
    with faulty_reads() as clean:
        ms.load(trained()[0], path)
    reads = [request.number for request in clean.requests if request.call in ("pread", "preadv")]
    for number in reads[::3]:
        with unchanged(model, optimizer), faulty_reads(at=number, **fault), pytest.raises(ms.ModelStateError):
            ms.load(model, path)


def test_in_place_says_what_an_io_error_leaves(tmp_path: Path) -> None:
    path = checkpoint_of(trained(hooked=False)[0], tmp_path / "x.pt")
    with faulty_reads() as clean:
        ms.load(trained(hooked=False)[0], path, in_place=True)
    last = max(request.number for request in clean.requests if request.call == "preadv")
    error = OSError(errno.EIO, "Input/output error")
    with faulty_reads(at=last, error=error), pytest.raises(errors.ReadFailedError, match="partly overwritten"):
        ms.load(trained(hooked=False)[0], path, in_place=True)


def test_damage_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint_of(model, tmp_path / "x.pt")
    content = bytearray(path.read_bytes())
    location = ms.open(path)["2.weight"].location
    assert location is not None
    content[location.start + 3] ^= 16
    path.write_bytes(content)
    with unchanged(model, optimizer), pytest.raises(errors.ChecksumError, match=r"2\.weight, 3\.weight"):
        ms.load(model, path, verify=True)
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(errors.ChecksumError, match="nothing to verify"):
        ms.load(nn.Linear(2, 2), tmp_path / "x.safetensors", verify=True)
