"""Modules with a `state_dict` or a `load_state_dict` of their own: what they save, they get back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.errors import ModelStateError, PlanError


class Part(nn.Module):
    """Two layers; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(self.frozen(x)))


class OnlySavesTrained(Part):
    def state_dict(self, *args: Any, prefix: str = "", **named: Any) -> Any:
        state = super().state_dict(*args, prefix=prefix, **named)
        return _without_frozen(self, state, prefix, None)


class KeepsTrained(OnlySavesTrained):
    """Saves what it trains, and loads that."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False)


class Renames(Part):
    """Saves under other names."""

    def state_dict(self, *args: Any, prefix: str = "", **named: Any) -> Any:
        state = super().state_dict(*args, prefix=prefix, **named)
        for name in [name for name in state if name.startswith(prefix)]:
            state[f"{prefix}net/{name.removeprefix(prefix)}"] = state.pop(name)
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({name.removeprefix("net/"): value for name, value in state_dict.items()}, strict)


class Packs(Part):
    """Saves other values, with a number among them, and loads them without torch's method."""

    def state_dict(self, *args: Any, **named: Any) -> Any:
        state = {name: value.detach().double() for name, value in nn.Module.state_dict(self).items()}
        return {"packed": state, "format": 3}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        assert state_dict["format"] == 3
        own = nn.Module.state_dict(self)
        for name, value in state_dict["packed"].items():
            own[name].copy_(value)


class PacksBeside(Part):
    """Saves a nested value beside its layers, and takes it from a copy of the state dict."""

    def state_dict(self, *args: Any, **named: Any) -> Any:
        return {**super().state_dict(*args, **named), "ema": {"a": [self.a.weight, 1]}}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        own = dict(state_dict)
        (weight, _) = own.pop("ema")["a"]
        assert torch.equal(weight, own["a.weight"])
        return super().load_state_dict(own, strict)


class Delegates(Part):
    """Has its layers saved and loaded one by one."""

    def state_dict(self, *args: Any, **named: Any) -> Any:
        return {"first": self.a.state_dict(), "second": self.frozen.state_dict(), "third": self.norm.state_dict()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.a.load_state_dict(state_dict["first"])
        self.frozen.load_state_dict(state_dict["second"])
        self.norm.load_state_dict(state_dict["third"])


class Derives(Part):
    """Computes an attribute after a load. Has no method of its own for saving."""

    doubled: torch.Tensor | None = None

    def load_state_dict(self, state_dict: Any, *args: Any, **named: Any) -> Any:
        returned = super().load_state_dict(state_dict, *args, **named)
        self.doubled = self.a.weight.detach() * 2
        return returned


class SavesByHook(Part):
    """Leaves names out by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(_without_frozen)


def _without_frozen(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> dict[str, Any]:
    for name in [name for name in state if name.startswith(f"{prefix}frozen")]:
        del state[name]
    return state


LEAVE_OUT: tuple[object, ...] = (KeepsTrained, OnlySavesTrained, SavesByHook)


class Within(nn.Module):
    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.head, self.part = nn.Linear(2, 2), build()


PAIRS = [KeepsTrained, OnlySavesTrained, SavesByHook, Renames, Packs, PacksBeside, Delegates, Derives]


def filled(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)
    return model


def values(model: nn.Module) -> dict[str, set[float]]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: set(map(float, value.detach().flatten())) for name, value in tensors}


def expected(build: Callable[[], nn.Module], model: nn.Module) -> dict[str, set[float]]:
    leaves_out = build in LEAVE_OUT
    return {name: {0.0 if leaves_out and "frozen" in name else 1.0} for name in values(model)}


def restores(build: Callable[[], nn.Module], folder: Path) -> list[tuple[nn.Module, Any]]:
    """Saves a model in each way, and returns it restored, with the report."""
    source, found = filled(build(), 1), []
    folder.mkdir(exist_ok=True)
    with ms.Store(folder / "store") as store:
        store.check({"m": source})
        store.save(1, {"m": source})
        store.save(2, {"m": source}, background=True).result()
        for step in (1, 2):
            model = filled(build(), 0)
            found.append((model, store.restore({"m": model}, step).report))
    ms.save({"m": source}, folder / "objects.safetensors")
    ms.save(source, folder / "model.safetensors")
    torch.save(source.state_dict(), folder / "model.pt")
    model = filled(build(), 0)
    found.append((model, ms.restore({"m": model}, folder / "objects.safetensors").report))
    for file in ("model.safetensors", "model.pt"):
        model = filled(build(), 0)
        found.append((model, ms.load(model, folder / file)))
    return found


@pytest.mark.parametrize("build", PAIRS)
def test_what_a_model_saves_comes_back(tmp_path: Path, build: type[nn.Module]) -> None:
    for model, report in restores(build, tmp_path):
        assert values(model) == expected(build, model)
        if "load_state_dict" in vars(build):
            assert any("own load_state_dict was called" in note for note in report.notes)
        if build in LEAVE_OUT:
            assert any("own state_dict leaves them out" in note for note in report.notes)
        if build is Derives:
            assert torch.equal(model.doubled, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("build", [OnlySavesTrained, KeepsTrained, Renames, SavesByHook])
def test_what_a_module_within_a_model_saves_comes_back(tmp_path: Path, build: type[nn.Module]) -> None:
    for model, _ in restores(lambda: Within(build), tmp_path):
        part = {f"part.{name}": value for name, value in expected(build, build()).items()}
        assert values(model) == part | {"head.weight": {1.0}, "head.bias": {1.0}}


def test_a_name_that_the_model_saves_and_the_file_lacks_is_missing(tmp_path: Path) -> None:
    for build in (KeepsTrained, Renames, Packs):
        state = {"m": build().state_dict()}
        inner = state["m"].get("packed", state["m"])
        del inner[next(name for name in inner if name.endswith("a.weight"))]
        model = filled(build(), 0)
        with pytest.raises(PlanError, match=r"a\.weight") as raised:
            ms.restore({"m": model}, state)
        assert raised.value.problems
        assert values(model) == values(filled(build(), 0))


def test_a_name_that_the_model_does_not_save_is_unexpected() -> None:
    model = filled(KeepsTrained(), 0)
    state = {**filled(KeepsTrained(), 1).state_dict(), "other": torch.ones(1)}
    with pytest.raises(PlanError, match="other"):
        ms.load(model, state)
    assert values(model) == values(filled(KeepsTrained(), 0))
    report = ms.load(model, state, allow_unexpected=["other"])
    assert report.notes
    assert values(model) == expected(KeepsTrained, model)


@pytest.mark.parametrize("build", [Packs, Derives, Delegates])
def test_an_error_undoes_what_the_method_has_written(tmp_path: Path, build: type[nn.Module]) -> None:
    class Fails(build):  # type: ignore[valid-type, misc]
        def load_state_dict(self, *args: Any, **named: Any) -> Any:
            super().load_state_dict(*args, **named)
            self.loaded = True
            self.extra = nn.Linear(1, 1)
            raise ValueError("no")

    source, other = filled(Fails(), 1), nn.Linear(2, 2)
    model, plain = filled(Fails(), 0), filled(nn.Linear(2, 2), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with ms.Store(tmp_path) as store:
        store.save(1, {"plain": other, "m": source, "optimizer": torch.optim.SGD(source.parameters(), lr=0.1)})
        with pytest.raises(ModelStateError, match="no"):
            store.restore({"plain": plain, "m": model, "optimizer": optimizer})
    assert values(model) == values(filled(Fails(), 0))
    assert values(plain) == values(filled(nn.Linear(2, 2), 0))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not {"loaded", "extra"}.intersection(vars(model) | model._modules)
    assert getattr(model, "doubled", None) is None


def test_a_plan_calls_the_method_and_changes_nothing() -> None:
    state, model = filled(Packs(), 1).state_dict(), filled(Packs(), 0)
    plan = ms.plan(model, state)
    assert values(model) == values(filled(Packs(), 0))
    ms.load(model, plan)
    assert values(model) == values(filled(Packs(), 1))


def test_a_model_on_meta() -> None:
    with ms.skeleton():
        model = Renames()
    ms.load(model, filled(Renames(), 1).state_dict())
    assert values(model) == values(filled(Renames(), 1))
    with ms.skeleton():
        frozen = KeepsTrained()
    with pytest.raises(PlanError, match=r"frozen\.weight"):
        ms.load(frozen, filled(KeepsTrained(), 1).state_dict())


class KeepsToItself(nn.Module):
    """Its `state_dict` takes no notice of `destination` and `prefix`."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(2, 2)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {"generator": self.generator.state_dict()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.generator.load_state_dict(state["generator"])


def test_a_module_within_whose_state_does_not_reach_the_model_is_not_saved(tmp_path: Path) -> None:
    model = nn.ModuleDict({"inner": KeepsToItself(), "other": nn.Linear(1, 1)})
    store = ms.Store(tmp_path / "run")
    for call in (
        lambda: store.check({"m": model}),
        lambda: store.save(1, {"m": model}),
        lambda: ms.save(model, tmp_path / "x.safetensors"),
        lambda: ms.save(model, tmp_path / "x.pt"),
    ):
        with pytest.raises(ms.errors.ObjectStateError, match="inner: a module within the model"):
            call()
    assert store.steps() == ()
    store.save(1, {"m": KeepsToItself()})
    store.restore({"m": KeepsToItself()})


def test_a_model_whose_names_nothing_takes_back_is_not_saved(tmp_path: Path) -> None:
    class OnlySaves(Part):
        def state_dict(self, *args: Any, **named: Any) -> Any:
            return {f"net/{name}": value for name, value in super().state_dict(*args, **named).items()}

    class SavesMore(Part):
        def state_dict(self, *args: Any, **named: Any) -> Any:
            return {**super().state_dict(*args, **named), "epoch": 3}

    class OnlyGets(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

    for model, name in ((OnlySaves(), "net/a.weight"), (SavesMore(), "epoch"), (OnlyGets(2, 2), "_extra_state")):
        with ms.Store(tmp_path / type(model).__name__) as store:
            for call in (store.check, lambda objects, store=store: store.save(1, objects)):
                with pytest.raises(ModelStateError, match=name) as raised:
                    call({"m": model})
                assert "load_state_dict" in str(raised.value) or "set_extra_state" in str(raised.value)
            # The remedy of the error.
            store.save(2, {"m": model.state_dict()})
            assert name in store.restore({"m": None})["m"]
