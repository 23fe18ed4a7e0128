"""Rules that make tensors of tensors: what they make, what they cannot, and the way back."""

import re
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

import modelstate as ms
from modelstate.errors import RuleError

NAMES = {name: getattr(ms.rules, name) for name in ms.rules.__all__}
"""What a program has after `from modelstate.rules import *`."""

ROWS = torch.arange(24.0).reshape(6, 4)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    same = one.keys() == other.keys()
    return same and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in ((one[k], other[k]) for k in one))


@pytest.mark.parametrize(
    ("rule", "state", "becomes"),
    [
        (ms.rules.Split("*.qk", ["*.q", "*.k"]), {"a.qk": ROWS}, {"a.q": ROWS[:3], "a.k": ROWS[3:]}),
        (ms.rules.Split("w", ["a", "b"], dim=1, sizes=[1, 3]), {"w": ROWS}, {"a": ROWS[:, :1], "b": ROWS[:, 1:]}),
        (ms.rules.Split("w", ["a", "b"], dim=-1), {"w": ROWS}, {"a": ROWS[:, :2], "b": ROWS[:, 2:]}),
        (ms.rules.Split("w", ["a", "b"], sizes=[0, 6]), {"w": ROWS}, {"a": ROWS[:0], "b": ROWS}),
        (ms.rules.Concat(["*.q", "*.k"], "*.qk"), {"0.q": ROWS, "0.k": -ROWS}, {"0.qk": torch.cat([ROWS, -ROWS])}),
        (ms.rules.Concat(["k", "q"], "w", dim=1), {"q": ROWS, "k": -ROWS}, {"w": torch.cat([-ROWS, ROWS], 1)}),
        (
            ms.rules.Concat(["a", "b"], "w", sizes=[2, 6]),
            {"a": ROWS[:2], "b": ROWS},
            {"w": torch.cat([ROWS[:2], ROWS])},
        ),
        (ms.rules.Transpose("w"), {"w": ROWS}, {"w": ROWS.T}),
        (ms.rules.Transpose("w", 0, 2), {"w": ROWS.reshape(3, 2, 4)}, {"w": ROWS.reshape(3, 2, 4).transpose(0, 2)}),
        (ms.rules.Reshape("w", [2, -1]), {"w": ROWS}, {"w": ROWS.reshape(2, 12)}),
        (ms.rules.Cast("w", torch.float16), {"w": ROWS}, {"w": ROWS.half()}),
        (ms.rules.Cast("w", torch.float32), {"w": ROWS}, {"w": ROWS}),
        (ms.rules.Copy("wte.*", "head.*"), {"wte.w": ROWS}, {"wte.w": ROWS, "head.w": ROWS}),
        (ms.rules.Same("wte.*", "head.*"), {"wte.w": ROWS, "head.w": ROWS.clone()}, {"wte.w": ROWS}),
        (ms.rules.Fill("b", torch.ones(2)), {"a": ROWS}, {"a": ROWS, "b": torch.ones(2)}),
        (ms.rules.Apply("w", torch.neg), {"w": ROWS}, {"w": -ROWS}),
        (ms.rules.Apply("w", lambda w: torch.tensor(w.sum().item())), {"w": ROWS}, {"w": ROWS.sum()}),
    ],
    ids=lambda value: repr(value) if isinstance(value, ms.rules.Rule) else "",
)  # fmt: skip
def test_what_a_rule_makes(rule: Any, state: dict[str, Any], becomes: dict[str, Any]) -> None:
    before = {name: value.clone() for name, value in state.items()}
    assert equal(ms.rules.Rules([rule]).apply(state), becomes)
    assert equal(state, before)


@pytest.mark.parametrize(
    ("rule", "state", "says"),
    [
        (ms.rules.Split("w", ["a", "b"], sizes=[2, 3]), {"w": ROWS}, r"add up to 5, and dimension 0 of \[6, 4\] has 6"),
        (ms.rules.Split("w", ["a", "b", "c", "d"]), {"w": ROWS}, "6 cannot be cut into 4 parts"),
        (ms.rules.Split("w", ["a", "b"], dim=2), {"w": ROWS}, "no dimension 2"),
        (ms.rules.Split("w", ["a", "b"]), {"w": torch.tensor(1.0)}, "no dimension 0"),
        (ms.rules.Split("w", ["a", "b"]), {"w": "text"}, "not a tensor"),
        (ms.rules.Split("w", ["a", "b"]), {"w": ROWS, "b": ROWS}, "b: from b, w"),
        (ms.rules.Concat(["a", "b"], "w"), {"a": ROWS}, "there is a, and nothing like b"),
        (ms.rules.Concat(["a", "b"], "w"), {"a": ROWS, "b": ROWS[:2]}, r"sizes \[6, 2\], not \[6, 6\]"),
        (ms.rules.Concat(["a", "b"], "w", sizes=[2, 6]), {"a": ROWS, "b": ROWS[:2]}, "sizes"),
        (ms.rules.Concat(["a", "b"], "w"), {"a": ROWS, "b": ROWS[:, :2]}, "differ in more than dimension 0"),
        (ms.rules.Concat(["a", "b"], "w"), {"a": ROWS, "b": ROWS.half()}, "several dtypes"),
        (
            ms.rules.Concat(["*.*.q", "*.*.k"], "*_*.qk"),
            {"a_b.c.q": ROWS, "a_b.c.k": ROWS, "a.b_c.q": -ROWS, "a.b_c.k": -ROWS},
            "a_b_c.qk: .*a_b.c.q and a.b_c.q are both its part",
        ),
        (ms.rules.Transpose("w"), {"w": torch.ones(3)}, "Dimension out of range"),
        (ms.rules.Reshape("w", [5, 5]), {"w": ROWS}, "invalid for input of size"),
        (ms.rules.Reshape("w", [24], before=[4, 6]), {"w": ROWS}, r"shape is \[6, 4\], not \[4, 6\]"),
        (ms.rules.Cast("w", torch.float16, before=torch.float64), {"w": ROWS}, "dtype is torch.float32"),
        (ms.rules.Fill("w", 0), {"w": ROWS}, "has it already"),
        (ms.rules.Fill("b", 0), {"w": ROWS}, "rules that need the names and shapes of a model"),
        (ms.rules.Fill("b.*", torch.ones(2)), {"w": ROWS}, "rules that need the names and shapes of a model"),
        (ms.rules.Same("a", "b"), {"a": ROWS, "b": -ROWS}, "differs from a"),
        (ms.rules.Same("a", "b"), {"b": ROWS}, "no a"),
        (ms.rules.Apply("w", lambda w: 7), {"w": ROWS}, "returned int"),
        (ms.rules.Apply("w", lambda w: 1 / 0), {"w": ROWS}, "ZeroDivisionError"),
        (ms.rules.Copy("a", "b"), {"a": ROWS, "b": ROWS}, "b: from b, a"),
        (ms.rules.Transpose("other"), {"w": ROWS}, "match nothing"),
    ],
)
def test_what_a_rule_cannot(rule: Any, state: dict[str, Any], says: str) -> None:
    with pytest.raises(RuleError, match=says):
        ms.rules.Rules([rule]).apply(state)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ms.rules.Split("w", "ab"), "several names"),
        (lambda: ms.rules.Split("w", ["a", "a"]), "twice"),
        (lambda: ms.rules.Split("w.*", ["a", "b"]), "as many"),
        (lambda: ms.rules.Split("w", ["a", "b"], sizes=[1]), "one size for each part"),
        (lambda: ms.rules.Split("w", ["a", "b"], sizes=[-1, 7]), "integers"),
        (lambda: ms.rules.Split("w", ["a", "b"], sizes=7), "sizes= takes"),
        (lambda: ms.rules.Split("w", ["a", "b"], dim="x"), "dim= must be an integer"),
        (lambda: ms.rules.Concat(["a", 7], "w"), "a name"),
        (lambda: ms.rules.Reshape("w", 7), "shape= takes"),
        (lambda: ms.rules.Transpose(""), "a name"),
        (lambda: ms.rules.Cast("w", "float17"), "takes dtypes"),
        (lambda: ms.rules.Apply("w", 7), "takes functions"),
        (lambda: ms.rules.Apply("w", abs, inverse=7), "takes functions"),
        (lambda: ms.rules.Fill("w", "zero"), "number or a tensor"),
        (lambda: ms.rules.Copy("a.*", "b"), "as many"),
        (lambda: ms.rules.Prefix(), "changes nothing"),
        (lambda: ms.rules.Ignore(""), "a name"),
    ],
)
def test_what_is_no_rule(make: Any, says: str) -> None:
    with pytest.raises(RuleError, match=says):
        make()


@pytest.mark.parametrize(
    "rule",
    [
        ms.rules.Split("*.qkv", ["*.q", "*.k", "*.v"], dim=1, sizes=[1, 2, 3]),
        ms.rules.Concat(["q", "k"], "qk"),
        ms.rules.Transpose("w", 1, 2),
        ms.rules.Reshape("w", [1, -1], before=[4]),
        ms.rules.Cast("*", torch.float64, before=torch.float32),
        ms.rules.Copy("a", "b"),
        ms.rules.Same("a", "b"),
        ms.rules.Fill("a.*", 0),
        ms.rules.Fill("a"),
    ],
    ids=repr,
)
def test_rules_print_as_the_code_that_makes_them(rule: Any) -> None:
    pasted = eval(repr(rule), {**NAMES, "re": re, "torch": torch})
    assert repr(pasted) == repr(rule)


@pytest.mark.parametrize(
    "rule",
    [
        ms.rules.Ignore("a"),
        ms.rules.Rename(re.compile("a"), "b"),
        ms.rules.Reshape("a", [4]),
        ms.rules.Cast("a", torch.float64),
        ms.rules.Cast("a", torch.float16, before=torch.float32),
        ms.rules.Cast("a", torch.int8, before=torch.float32),
        ms.rules.Apply("a", torch.neg),
    ],
    ids=repr,
)
def test_what_nothing_takes_back(rule: Any) -> None:
    with pytest.raises(RuleError, match="cannot be reversed") as caught:
        ms.rules.Rules([rule]).reverse()
    assert repr(rule) in str(caught.value)


# Functions of a user's.


def halves_in_place(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0].zero_()
    return tensor[:3]


@pytest.mark.parametrize(
    ("fn", "becomes"),
    [
        (lambda t: t.mul_(2), ROWS * 2),
        (lambda t: t.neg_().T, -ROWS.T),
        (halves_in_place, torch.cat([torch.zeros(1, 4), ROWS[1:3]])),
        (lambda t: t[:, 1:], ROWS[:, 1:]),
        (lambda t: t.mul_(t.max().item()), ROWS * 23),
        (lambda t: torch.from_numpy(t.numpy() * 2), ROWS * 2),
    ],
)
@pytest.mark.parametrize("way", ["apply", "mapping", "file"])
def test_a_function_gets_a_copy_and_what_it_returns_counts(
    fn: Any, becomes: torch.Tensor, way: str, tmp_path: Any
) -> None:
    state = {"w": ROWS.clone()}
    rules = ms.rules.Rules([ms.rules.Apply("w", fn)])
    if way == "apply":
        made = rules.apply(state)["w"]
    else:
        ms.save(state, tmp_path / "w.safetensors")
        module = nn.Module()
        module.register_buffer("w", torch.zeros_like(becomes, memory_format=torch.contiguous_format))
        source = state if way == "mapping" else tmp_path / "w.safetensors"
        assert ms.plan(module, source, rules=rules).ok
        ms.load(module, source, rules=rules)
        made = module.w
    assert torch.equal(made, becomes)
    assert torch.equal(state["w"], ROWS)


def test_extra_state_that_a_function_changes_in_place() -> None:
    state: dict[str, Any] = {"_extra_state": [1]}
    rules = ms.rules.Rules([ms.rules.Apply("_extra_state", lambda value: [*value, value.append(2)])])
    assert rules.apply(state)["_extra_state"] == [1, None]
    assert state == {"_extra_state": [1]}


def emptied() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "value",
    [emptied(), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), nn.parameter.UninitializedParameter()],
    ids=["emptied", "sparse", "csr", "uninitialised"],
)
@pytest.mark.parametrize(
    "rule",
    [
        ms.rules.Concat(["w", "x"], "a"),
        ms.rules.Split("w", ["a", "b"]),
        ms.rules.Cast("w", torch.half),
        ms.rules.Transpose("w"),
    ],
    ids=repr,
)
def test_tensors_that_are_not_just_elements(value: torch.Tensor, rule: Any) -> None:
    state = {"w": value, "x": torch.ones(2)}
    with pytest.raises(RuleError, match=r"it is \w+ of layout|memory has been freed"):
        ms.rules.Rules([rule]).apply(state)
    if "Uninit" not in type(value).__name__ and value.layout is not torch.strided:
        module = nn.Module()
        module.register_buffer("a", torch.ones(4))
        with pytest.raises(ms.ModelStateError):
            ms.load(module, state, rules=[rule], allow_unexpected=["*"])


@pytest.mark.parametrize(
    ("value", "dtype", "fits"),
    [
        (0, torch.int64, True),
        (0.5, torch.int64, False),
        (1.9, torch.int8, False),
        (-1, torch.uint8, False),
        (300, torch.int8, False),
        (2, torch.bool, False),
        (True, torch.bool, True),
        (0.1, torch.float16, True),
        (1e6, torch.float16, False),
        (float("inf"), torch.float16, True),
        (1j, torch.float32, False),
        (1j, torch.complex64, True),
        (float("nan"), torch.float32, True),
        (float("nan"), torch.int64, False),
    ],
)
def test_fill_with_a_number_of_another_kind(value: Any, dtype: torch.dtype, fits: bool) -> None:
    module = nn.Module()
    module.register_buffer("w", torch.ones(2, dtype=dtype))
    module.register_buffer("x", torch.ones(2))
    plan = ms.plan(module, {"x": torch.zeros(2)}, rules=[ms.rules.Fill("w", value)])
    assert plan.ok == fits
    if fits:
        ms.load(module, plan)
        assert module.w.isnan().all() if value != value else torch.equal(module.w, torch.full((2,), value, dtype=dtype))


# Chains, and the way back.


@st.composite
def chains(draw: st.DrawFn) -> tuple[ms.rules.Rules, dict[str, torch.Tensor]]:
    """A state dict, and rules that each apply to some of it. New names are new, so that the way back is exact."""
    state = {
        f"n{index}.{leaf}": torch.randint(-9, 9, draw(st.sampled_from([(6, 4), (4, 6, 2), (12,), (6, 6)]))).float()
        for index in range(draw(st.integers(1, 3)))
        for leaf in draw(st.sampled_from([("w",), ("w", "b"), ("w", "b", "c")]))
    }
    rules: list[Any] = []
    now = dict(state)
    for step in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(sorted(now)))
        new = [f"s{step}.{index}.{name.rpartition('.')[2]}" for index in range(3)]
        last, dims = now[name].shape[-1], now[name].dim()
        fitting: list[Any] = [
            ms.rules.Rename(name, new[0]),
            ms.rules.Prefix(add=f"p{step}."),
            ms.rules.Rename(f"*.{name.rpartition('.')[2]}", f"*.r{step}"),
            ms.rules.Copy(name, new[1]),
            ms.rules.Cast(name, torch.float64, before=torch.float32) if now[name].dtype is torch.float32 else None,
            ms.rules.Reshape(name, [-1], before=list(now[name].shape)),
            ms.rules.Transpose(name, 0, dims - 1),
            ms.rules.Apply(name, torch.neg, inverse=torch.neg),
            ms.rules.Split(name, new, dim=-1) if last % 3 == 0 else None,
            ms.rules.Split(name, new[:2], dim=dims - 1, sizes=[1, last - 1]) if last else None,
            ms.rules.Fill(new[2], torch.ones(3)),
        ]
        same = [other for other in now if other != name and now[other].shape == now[name].shape]
        if same:
            fitting.append(ms.rules.Concat([name, same[0]], new[0]))
        rule = draw(st.sampled_from([one for one in fitting if one is not None]))
        try:
            now = ms.rules.Rules([rule]).apply(now)
        except RuleError:
            continue  # dtypes that differ, or nothing to rename but itself
        rules.append(rule)
    return ms.rules.Rules(rules), state


@pytest.mark.slow
@given(chains())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_chain_can_be_loaded_with_and_its_reverse_changes_it_back(
    chain: tuple[ms.rules.Rules, dict[str, torch.Tensor]],
) -> None:
    rules, state = chain
    wanted = rules.apply(state)
    assert equal(rules.reverse().apply(wanted), state)
    module = nn.Module()
    for name, value in wanted.items():
        owner = module
        *path, leaf = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(leaf, torch.zeros_like(value))
    ms.load(module, state, rules=rules)
    assert equal(dict(module.state_dict()), wanted)
