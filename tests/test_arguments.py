"""The checks of the values that callers give."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.arguments import check_integer, seconds_of
from modelstate.errors import OptionError, SourceTypeError, UnsavableError
from modelstate.text_format import short_repr


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None, [1]])
def test_integers_that_are_refused(value: object) -> None:
    with pytest.raises(OptionError, match=r"shard_size_bytes= must be a number of bytes") as caught:
        check_integer("shard_size_bytes", value, least=1)
    assert (caught.value.expected, caught.value.found) == ("an integer >= 1", repr(value))


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        (0, {"accepts_zero": False}, "a number > 0"),
        (float("nan"), {}, "a number >= 0"),
        (101, {"most": 100}, "a number >= 0 and <= 100"),
        (10**400, {}, "a number >= 0"),
        (True, {"accepts_none": True}, "a number >= 0, or None"),
        (None, {}, "a number >= 0"),
    ],
)
def test_times_that_are_refused(value: object, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(OptionError, match="timeout_seconds= must be a number of seconds") as caught:
        seconds_of("timeout_seconds", value, **options)
    assert (caught.value.expected, caught.value.found) == (expected, short_repr(value))


_FLAGS: dict[str, Callable[[Any], object]] = {
    "overwrite": lambda value: ms.save({"w": torch.ones(1)}, "w.safetensors", overwrite=value),
    "verify": lambda value: ms.load(nn.Linear(1, 1), "w.safetensors", verify=value),
    "progress": lambda value: ms.verify("w.safetensors", progress=value),
    "map": lambda value: ms.plan(nn.Linear(1, 1), "w.safetensors", map=value),
    "init_missing": lambda value: ms.load(nn.Linear(1, 1), "w.safetensors", init_missing=value),
    "skip_forbidden": lambda value: ms.open("w.safetensors", skip_forbidden=value),
    "pin": lambda value: ms.Store("store").save(1, {"model": nn.Linear(1, 1)}, pin=value),
    "dry_run": lambda value: ms.Store("store").prune(1, dry_run=value),
    "training": lambda value: ms.Live(nn.Linear(1, 1), training=value),
    "exact": lambda value: ms.Live(nn.Linear(1, 1)).swap({}, exact=value),
    "background": lambda value: ms.follow(ms.Live(nn.Linear(1, 1)), "store", background=value),
    "on": lambda value: ms.reference_keeping(value),
    "cuda": lambda value: ms.RNG(cuda=value),
}


@pytest.mark.parametrize("value", ["false", 0, torch.tensor([True, False])], ids=["text", "number", "tensor"])
@pytest.mark.parametrize("option", _FLAGS)
def test_a_flag_that_is_neither_true_nor_false(
    option: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=f"{option}= must be True or False"):
        _FLAGS[option](value)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (lambda live, model, store: live.swap({}, allow_mising=["x"]), "allow_missing=, if that is meant"),
        (lambda live, model, store: live.swap({}, device="cpu"), "the device of the one that it replaces"),
        (lambda live, model, store: live.swap({}, weights_only=True), "no code of a pickle"),
        (lambda live, model, store: ms.Live(model, keep_version=2), "keep_versions=, if that is meant"),
        (lambda live, model, store: ms.follow(live, store, alow_missing=["x"]), "allow_missing=, if that is meant"),
        (lambda live, model, store: ms.load(model, {}, allow_mising=["x"]), "allow_missing=, if that is meant"),
        (lambda live, model, store: ms.load(model, {}, strict=False), 'allow_missing=["head.*"], allow_unexpected='),
        (lambda live, model, store: ms.load(model, {}, map_location="cpu"), "device=: the device of the tensors"),
        (lambda live, model, store: ms.plan(model, {}, unexpected=["x"]), "allow_unexpected=, if that is meant"),
        (lambda live, model, store: ms.restore({"m": model}, {}, strict=True), 'allow_missing=["head.*"]'),
        (lambda live, model, store: ms.save(model, "x.pt", max_shard_size=3), "shard_size_bytes=, if that is meant"),
        (lambda live, model, store: store.save(1, {"m": model}, metric={}), "metrics=, if that is meant"),
        (lambda live, model, store: store.restore({"m": model}, allow_misssing=[]), "allow_missing=, if that is meant"),
        (lambda live, model, store: ms.Store("x", kep=3), "keep=, if that is meant"),
        (
            lambda live, model, store: ms.resumable(store, {"m": model}, steps=1, save_every=1, map_location="cpu"),
            "device=: the device of the tensors",
        ),
    ],
)
def test_a_wrong_keyword_names_the_right_one(
    wrong: Callable[..., object], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match=r"\w+\.\w+\(\) has no argument \w+=") as caught:
        wrong(ms.Live(model), model, ms.Store("store"))
    assert isinstance(caught.value, TypeError)
    assert remedy in caught.value.remedy


def test_a_keyword_that_resembles_none_lists_all() -> None:
    with pytest.raises(OptionError, match=r"(?s)ms\.load\(\) has no argument zzz=.*expected:.*rules=, allow_missing="):
        ms.load(nn.Linear(2, 2), {}, zzz=1)  # type: ignore[call-overload]


MODEL: nn.Module = nn.Linear(2, 2)
STATE = MODEL.state_dict()
OPTIMIZER = torch.optim.SGD(MODEL.parameters())

WRONG: list[tuple[Callable[[ms.Store], object], type[Exception]]] = [
    (lambda _: ms.load("m.pt", MODEL), OptionError),  # type: ignore[call-overload]
    (lambda _: ms.load(MODEL, MODEL), SourceTypeError),  # type: ignore[call-overload]
    (lambda _: ms.plan("m.pt", MODEL), OptionError),  # type: ignore[arg-type]
    (lambda _: ms.suggest("m.pt", MODEL), OptionError),  # type: ignore[arg-type]
    (lambda _: ms.load_state_dict("n.pt", MODEL), TypeError),  # type: ignore[arg-type]
    (lambda _: ms.load_state_dict(MODEL, "m.pt"), TypeError),  # type: ignore[arg-type]
    (lambda _: ms.save("out.safetensors", MODEL), UnsavableError),  # type: ignore[arg-type]
    (lambda _: ms.restore("m.pt", {"model": MODEL}), OptionError),  # type: ignore[arg-type]
    (lambda _: ms.convert(torch.float16, MODEL), OptionError),  # type: ignore[arg-type]
    (lambda _: ms.convert_checkpoint("o.pt", STATE), UnsavableError),  # type: ignore[arg-type]
    (lambda _: ms.optimizer_state(OPTIMIZER, MODEL), OptionError),  # type: ignore[arg-type]
    (lambda _: ms.load_optimizer_state(OPTIMIZER, MODEL, {}), OptionError),  # type: ignore[arg-type]
    (lambda store: store.save({"model": MODEL}, 10), OptionError),  # type: ignore[call-overload]
    (lambda store: store.open(10, "model"), OptionError),  # type: ignore[arg-type]
    (lambda store: store.restore("latest", {"model": MODEL}), OptionError),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "error"), WRONG)
def test_what_is_wrong_is_refused(
    call: Callable[[ms.Store], object], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {name: value.clone() for name, value in STATE.items()}
    with ms.Store(tmp_path / "store") as store, pytest.raises(error):
        call(store)
    assert all(torch.equal(STATE[name], value) for name, value in before.items())
    assert list(tmp_path.iterdir()) == []
