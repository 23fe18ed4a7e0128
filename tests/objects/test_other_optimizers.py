"""The optimizers of torch and of pytorch-optimizer: each one resumes bit for bit, or a check refuses it."""

import copy
import importlib.metadata
import inspect
import re
import tempfile
import warnings
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
pytestmark = pytest.mark.filterwarnings("ignore")
ms.register_codec(deque, lambda queue: [list(queue), queue.maxlen], lambda saved: deque(*saved))
Build = Callable[[nn.Module], torch.optim.Optimizer]
_VERSION = importlib.metadata.version("pytorch_optimizer")
_TORCH = ".".join(torch.__version__.split(".")[:2])
_PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return result


class Matrices(nn.Module):
    """For optimizers that take matrices only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False)

    forward = Net.forward


class Tokens(nn.Module):
    """For the optimizer that takes sparse gradients only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.embed((x[:, 0].abs() * 10).long() % 6)
        return result


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def of_matrices(cls: Any) -> Build:
    """Builds an optimizer that treats matrices otherwise than other parameters."""
    return lambda model: cls(
        [
            {"params": [param for param in model.parameters() if (param.dim() == 2) is use_muon], "use_muon": use_muon}
            for use_muon in (True, False)
        ]
    )


po: Any = pytorch_optimizer
_RECIPES: dict[str, Build] = {
    **{name: of_matrices(getattr(po, name)) for name in ("Muon", "AdaMuon", "AdaGO", "NorMuon") if hasattr(po, name)},
    "AdamMini": lambda model: po.AdamMini(model),
    "BSAM": lambda model: po.BSAM(model.parameters(), num_data=4),
    "Ranger21": lambda model: po.Ranger21(model.parameters(), num_iterations=20),
    "SAM": lambda model: po.SAM(model.parameters(), base_optimizer=torch.optim.AdamW),
    "FriendlySAM": lambda model: po.FriendlySAM(model.parameters(), base_optimizer=torch.optim.AdamW),
    "LookSAM": lambda model: po.LookSAM(model.parameters(), base_optimizer=torch.optim.AdamW),
    "WSAM": lambda model: po.WSAM(model, model.parameters(), torch.optim.AdamW),
    "Lookahead": lambda model: po.Lookahead(adamw(model), k=2),
    "ScheduleFreeWrapper": lambda model: po.ScheduleFreeWrapper(adamw(model)),
    "TRAC": lambda model: po.TRAC(adamw(model)),
    "OrthoGrad": lambda model: po.OrthoGrad(adamw(model)),
    "Magma": lambda model: po.Magma(adamw(model)),
}
"""Those that need other arguments than the parameters."""


def _classes() -> dict[str, Any]:
    named = {name: getattr(torch.optim, name) for name in torch.optim.__all__}
    found = {name: cls for name, cls in named.items() if inspect.isclass(cls) and cls is not torch.optim.Optimizer}
    of_package = [po.load_optimizer(name) for name in po.get_supported_optimizers()]
    wrappers = [getattr(po, name) for name in _RECIPES if hasattr(po, name)]
    for cls in (*of_package, *wrappers):
        if cls.__module__.startswith("pytorch_optimizer"):
            found[f"pytorch_optimizer.{cls.__name__}"] = cls
    return dict(sorted(found.items()))


CLASSES = _classes()


def built(name: str, dtype: torch.dtype) -> dict[str, Any]:
    cls, short = CLASSES[name], name.rpartition(".")[2]
    only_matrices = short in ("SpectralSphere",) or name == "Muon"
    model = (Tokens() if short == "SparseAdam" else Matrices() if only_matrices else Net()).to(dtype)
    is_torchs = cls.__module__.startswith("torch.")
    recipe = None if is_torchs else _RECIPES.get(short)
    optimizer = cls(model.parameters()) if recipe is None else recipe(model)
    if short == "ScheduleFreeWrapper":
        optimizer.train()
    return {"model": model, "optimizer": optimizer, "rng": ms.RNG()}


def step(of: dict[str, Any], number: int) -> None:
    model, optimizer = of["model"], of["optimizer"]
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(next(model.parameters()).dtype)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).float().square().mean()
        loss.backward(create_graph=type(optimizer).__name__ in ("SophiaH", "AdaHessian"))
        return loss.detach()

    closure()
    if "closure" in inspect.signature(type(optimizer).step).parameters:
        optimizer.step(closure)
    else:
        optimizer.step()


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        is_like = isinstance(second, torch.Tensor) and first.dtype == second.dtype and first.shape == second.shape
        return is_like and torch.equal(first.nan_to_num(), second.nan_to_num())
    if isinstance(first, dict) and isinstance(second, dict):
        # An empty state of a parameter is none.
        return all(same(first.get(key, {}), second.get(key, {})) for key in first.keys() | second.keys())
    if isinstance(first, list | tuple | deque):
        return isinstance(second, list | tuple | deque) and len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and (first == second or first != first)


def outcome(name: str, dtype: torch.dtype) -> str:
    """Returns how the optimizer is saved: "by name", "whole" or "refused"; empty where it does not run here."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as directory:
        warnings.simplefilter("ignore")
        try:
            torch.manual_seed(0)
            saved = built(name, dtype)
            for number in range(4):
                step(saved, number)
        except Exception:  # it needs other arguments, another package, or another kind of step
            return ""
        store = ms.Store(directory)
        try:
            store.check(saved)
        except ms.errors.OptimizerStateError:
            return "refused"
        store.save(1, saved)
        torch.manual_seed(5)
        of = built(name, dtype)
        step(of, 17)
        restored = store.restore(of)
        assert same(of["optimizer"].state_dict(), saved["optimizer"].state_dict())
        generators = copy.deepcopy(saved["rng"].state_dict())
        for number in range(4, 12):
            step(of, number)
        saved["rng"].load_state_dict(generators)  # Kron draws from the generator of NumPy
        for number in range(4, 12):
            step(saved, number)
        assert same(of["model"].state_dict(), saved["model"].state_dict()), "does not resume bit for bit"
        return "whole" if any("not by name" in note for note in restored.report.notes) else "by name"


@cache
def page() -> dict[str, str]:
    """Returns the outcome of each optimizer on the page about what modelstate works with; skips for other versions."""
    text = _PAGE.read_text()
    (versions,) = re.findall(r"\| outcome \| torch (\S+) \| pytorch-optimizer (\S+) \|", text)
    if versions != (_TORCH, _VERSION):
        pytest.skip(f"the page is of torch {versions[0]} and pytorch-optimizer {versions[1]}")
    rows = re.findall(r"^\| (by name|whole|refused|not tried) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    return {
        prefix + name: kind
        for kind, *cells in rows
        for prefix, cell in zip(("", "pytorch_optimizer."), cells, strict=True)
        for name in cell.split(", ")
        if name != "-"
    }


@pytest.mark.slow_except(8)
@pytest.mark.parametrize("name", CLASSES)
def test_each_one_resumes_bit_for_bit_or_is_refused(name: str) -> None:
    found = outcome(name, torch.bfloat16) or outcome(name, torch.float32) or "not tried"
    assert found == page()[name]


def test_the_page_has_all_of_them() -> None:
    assert page().keys() == CLASSES.keys()
