"""Names that nearly match: wrappers, one prefix for all names, and which part of a checkpoint is meant."""

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import nn

import modelstate as ms
from modelstate.errors import AmbiguousCheckpointError, PlanError
from tests.rules.naming import renamed
from tests.sweeps import examples
from tests.wrappers import data_parallel

Shapes = dict[str, tuple[int, ...]]
PAST_WRAPPERS = re.compile("of the checkpoint (is|are) read with")
WRAPPERS = ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]
LAYERS: Shapes = {
    name: shape
    for i in range(3)
    for name, shape in (
        (f"layers.{i}.attn.weight", (4, 4)),
        (f"layers.{i}.attn.bias", (4,)),
        (f"layers.{i}.norm", (4,)),
    )
}


def under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def pasted(problem: Any) -> Any:
    """The rule, from the code that the problem proposes."""
    return eval(problem.rules[0], {"ms": ms, "re": re})


def proposal(missing: Shapes, unexpected: Shapes, fitting: Iterable[str] = ()) -> Any:
    """The problem that proposes one prefix to a model without the missing names and a file with the unexpected ones."""
    fits = dict.fromkeys(fitting, (1,))
    file = {name: torch.ones(shape) for name, shape in {**unexpected, **fits}.items()}
    problems = ms.plan(module_of({**missing, **fits}), file).problems
    return next((problem for problem in problems if problem.kind.name == "OTHER_NAMES"), None)


def reads_past_wrappers(names: list[str], given: list[str]) -> bool:
    """Whether a load takes names of a checkpoint for others that differ in wrappers."""
    plan = ms.plan(module_of(names), state(given), allow_missing=["*"], allow_unexpected=["*"])
    return any(PAST_WRAPPERS.search(note) for note in plan.notes)


def state(names: list[str]) -> dict[str, torch.Tensor]:
    """Tensors of one shape, each with values of its own."""
    return {name: torch.full((2, 2), float(i)) for i, name in enumerate(names)}


def module_of(names: Iterable[str] | Shapes) -> nn.Module:
    """A module with a parameter under each name."""
    root, shapes = nn.Module(), names if isinstance(names, dict) else dict.fromkeys(names, (2, 2))
    for name, shape in shapes.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(last, nn.Parameter(torch.full(shape, -1.0)))
    return root


# Wrappers.

HAS_WRAPPERS = [
    (["a.w", "a.b", "c"], ["module.a.w", "module.a.b", "module.c"]),
    (["a.w", "c"], ["module._orig_mod.a.w", "module._orig_mod.c"]),
    (["a.w", "a.b", "c"], ["a._orig_mod.w", "a._orig_mod.b", "c"]),
    (["l.0.w", "l.1.w"], ["_fsdp_wrapped_module.l.0._fsdp_wrapped_module.w", "_fsdp_wrapped_module.l.1.w"]),
    (["module.a", "module.b"], ["module.module.a", "module.module.b"]),
    (["a._orig_mod.w", "a._orig_mod.b"], ["module.a.w", "module.a.b"]),
    (["module.w"], ["_orig_mod.w"]),
]


@pytest.mark.parametrize("turned", [False, True], ids=["in the checkpoint", "in the model"])
@pytest.mark.parametrize(("bare", "wrapped"), HAS_WRAPPERS)
def test_names_that_differ_in_wrappers_load_without_a_rule(bare: list[str], wrapped: list[str], turned: bool) -> None:
    names, given = (wrapped, bare) if turned else (bare, wrapped)
    model, values = module_of(names), state(given)
    report = ms.load(model, values)
    assert report.coverage == 1
    for name, source in zip(names, given, strict=True):
        assert torch.equal(model.get_parameter(name), values[source])
    assert any(PAST_WRAPPERS.search(note) for note in report.notes)
    steps = {step.name: step for step in report.steps}
    assert [steps[name].source for name in names] == given


NO_RULE = {
    "two names of the checkpoint are one": (["a"], ["a", "module.a"]),
    "two names of the model are one": (["a", "module.a"], ["module.b"]),
    "only some names of the checkpoint have it": (["a", "b"], ["module.a", "b"]),
    "only some names of a module have it": (["a.v", "a.w"], ["a._orig_mod.v", "a.w"]),
    "other names": (["a"], ["module.b"]),
    "all fit": (["module.a"], ["module.a"]),
    "no wrapper": (["a.w"], ["model.a.w"]),
    "a tensor that is called so": (["w"], ["module"]),
}


@pytest.mark.parametrize("case", NO_RULE)
def test_what_speaks_against_a_wrapper(case: str) -> None:
    wanted, given = NO_RULE[case]
    assert not reads_past_wrappers(wanted, given)
    assert not reads_past_wrappers(given, wanted)


def test_what_is_missing_beside_a_wrapper_is_all_that_is_reported() -> None:
    model, values = module_of(["a.w", "head.w"]), state(["module.a.w", "module.old.w"])
    with pytest.raises(PlanError) as caught:
        ms.load(model, values)
    assert [(problem.kind.name, problem.name) for problem in caught.value.problems] == [
        ("MISSING", "head.w"),
        ("UNEXPECTED", "old.w"),
    ]
    ms.load(model, values, allow_missing=["head.*"], allow_unexpected=["module.old.*"])
    assert torch.equal(model.get_parameter("a.w"), values["module.a.w"])
    assert model.get_parameter("head.w").eq(-1).all()


@pytest.mark.parametrize("is_hook", [True, False], ids=["a hook", "an override"])
def test_code_of_a_module_that_gives_names_another_meaning_decides(is_hook: bool) -> None:
    """A wrapper's own code puts its name in, as a hook of activation checkpointing does; it must not come twice."""
    model = module_of(["a._checkpoint_wrapped_module.w", "c"])

    def put_in(module: Any, values: dict[str, Any], prefix: str, *_: Any) -> None:
        values[f"{prefix}_checkpoint_wrapped_module.w"] = values.pop(f"{prefix}w")

    module: Any = model.get_submodule("a")
    stock = module._load_from_state_dict

    def load(values: dict[str, Any], prefix: str, *rest: Any) -> None:
        put_in(module, values, prefix)
        stock(values, prefix, *rest)

    if is_hook:
        module.register_load_state_dict_pre_hook(put_in)
    else:
        module._load_from_state_dict = load
    values = state(["a.w", "c"])
    ms.load(model, values)
    assert torch.equal(model.get_parameter("a._checkpoint_wrapped_module.w"), values["a.w"])


def test_buffers_and_versions_go_past_wrappers_too() -> None:
    trained = data_parallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    trained(torch.randn(4, 2))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    report = ms.load(model, trained.state_dict())
    for name, value in trained.module.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert not any("version" in note for note in report.notes)


# One prefix.


@pytest.mark.parametrize("prefix", ["model.", "bert.", "a.b.c.", "odd'name."])
@pytest.mark.parametrize("strips", [True, False])
def test_one_prefix_for_all(prefix: str, strips: bool) -> None:
    missing, unexpected = (LAYERS, under(prefix, LAYERS)) if strips else (under(prefix, LAYERS), LAYERS)
    problem = proposal(missing, unexpected)
    assert f"the prefix {prefix!r} of the {'checkpoint' if strips else 'model'}" in problem.why
    assert pasted(problem) == (ms.rules.Prefix(strip=prefix) if strips else ms.rules.Prefix(add=prefix))
    assert problem.why.startswith(f"{len(missing)} names ")
    assert renamed([pasted(problem)], unexpected) == dict(zip(missing, unexpected, strict=True))


NOT_PROVED: dict[str, tuple[Shapes, Shapes]] = {
    "nothing": ({}, {}),
    "nothing in the checkpoint": (LAYERS, {}),
    "nothing in the model": ({}, LAYERS),
    "other names": ({"a.weight": (1,)}, {"b.weight": (1,)}),
    "no whole part of a name": ({"weight": (1,)}, {"my_weight": (1,)}),
    "two prefixes": ({"a": (1,), "b": (1,)}, {"x.a": (1,), "y.b": (1,)}),
    "one prefix for another": ({"q_proj.weight": (1,), "q_proj.bias": (1,)}, {"key.weight": (1,), "key.bias": (1,)}),
    "a name is left over": ({"a": (1,), "b": (1,)}, {"x.a": (1,), "x.c": (1,)}),
    "one more in the checkpoint": ({"a": (1,)}, {"x.a": (1,), "x.b": (1,)}),
    "one more in the model": ({"a": (1,), "b": (1,)}, {"x.a": (1,)}),
    "two that could be it": ({"w": (1,)}, {"teacher.w": (1,), "student.w": (1,)}),
    "other shapes": (LAYERS, {f"x.{name}": (9, 9, 9) for name in LAYERS}),
}


@pytest.mark.parametrize("case", NOT_PROVED)
def test_nothing_is_proposed_that_is_not_proved(case: str) -> None:
    assert proposal(*NOT_PROVED[case]) is None


@pytest.mark.parametrize("strips", [True, False])
def test_nothing_is_proved_where_names_fit_that_lie_between(strips: bool) -> None:
    short, between, long = {"head": (1,)}, "model.head", {"model.model.head": (1,)}
    missing, unexpected = (short, long) if strips else (long, short)
    assert proposal(missing, unexpected, fitting=[between]) is None


def test_a_prefix_that_a_module_of_the_model_has_too_is_not_proposed() -> None:
    def net() -> nn.Module:
        return nn.ModuleDict({"model": nn.ModuleDict({"head": nn.Linear(2, 2)}), "head": nn.Linear(2, 2)})

    file = {f"model.{name}": value for name, value in net().state_dict().items()}
    with pytest.raises(ms.PlanError) as raised:
        ms.load(net(), file)
    assert "Prefix(" not in str(raised.value)
    assert "ms.suggest" in str(raised.value)
    suggestion = ms.suggest(net(), file)
    assert not suggestion
    assert {name for group in suggestion.ambiguous for name in group.names} == {"head.weight", "head.bias"}
    assert "may each have moved by one" in str(suggestion)


def test_a_checkpoint_of_lightning_gets_the_rule_for_its_prefix() -> None:
    model, trained = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    weights = {f"model.{name}": value for name, value in trained.state_dict().items()}
    optimizer = torch.optim.Adam(trained.parameters())
    trained(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    file = {"epoch": 1, "state_dict": weights, "optimizer_states": [optimizer.state_dict()]}
    with pytest.raises(ms.PlanError) as raised:
        ms.load(model, file)
    (problem,) = raised.value.problems
    ms.load(model, file, rules=[pasted(problem)])
    assert torch.equal(model[0].weight, weights["model.0.weight"])


def test_one_name_of_another_shape_goes_with_the_others() -> None:
    problem = proposal(LAYERS, under("model.", LAYERS) | {"model.layers.0.norm": (9,)})
    assert pasted(problem) == ms.rules.Prefix(strip="model.")


@pytest.mark.parametrize("strips", [True, False])
def test_the_rule_leaves_names_alone_that_fit_already(strips: bool) -> None:
    bare, behind = {"a": (1,), "b": (2,)}, {"model.a": (1,), "model.b": (2,)}
    fitting = "model.head" if strips else "head"
    missing, unexpected = (bare, behind) if strips else (behind, bare)
    problem = proposal(missing, unexpected, fitting=[fitting])
    assert renamed([pasted(problem)], [*unexpected, fitting]).keys() == {*missing, fitting}


def test_nothing_is_proved_where_another_name_goes_through_a_wrapper() -> None:
    wanted = ["encoder.module.q", "encoder.module.w"]
    assert reads_past_wrappers(wanted, ["encoder.w"])
    assert not reads_past_wrappers(wanted, ["q", "module.w", "encoder.w"])  # "module.w" may be meant
    assert not reads_past_wrappers(["q", "module.w", "encoder.w"], wanted)


@pytest.mark.parametrize(
    ("names", "given"),
    [
        (["module.q", "head.w"], ["q", "encoder.module.q"]),
        (["encoder.module.w", "encoder.key"], ["encoder.w", "key"]),
        (["module.q", "module.key"], ["q", "encoder.module.key"]),
    ],
)
def test_a_module_of_a_model_that_is_called_module_is_no_wrapper(names: list[str], given: list[str]) -> None:
    """A name of the checkpoint that is left over does not become one of this module, whatever may be left."""
    model, values = module_of(names), state(given)
    planned = ms.plan(model, values, allow_missing=["*"], allow_unexpected=["*"])
    assert not planned.steps


# What an error proposes.

PROJECTIONS = [("query", "key", "value"), ("q_proj", "k_proj", "v_proj")]


@pytest.mark.parametrize("more", [[], ["dense"]], ids=["three", "with an output"])
def test_projections_of_one_shape_are_not_paired_by_their_order(more: list[str]) -> None:
    old, new = ([*side, *(["o_proj"] if side[0] == "q_proj" and more else more)] for side in PROJECTIONS)
    file = nn.ModuleDict({name: nn.Linear(8, 8) for name in reversed(old)}).state_dict()
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in new})
    with pytest.raises(PlanError) as caught:
        ms.load(model, file)
    text = str(caught.value)
    assert {problem.kind.name for problem in caught.value.problems} == {"MISSING", "UNEXPECTED"}
    assert "did you mean" not in text
    assert "rules=[" not in text
    assert "ms.suggest(model, source)" in text
    assert "modelstate suggest MODEL SOURCE" in text
    suggestion = ms.suggest(model, file)
    assert suggestion.complete is not bool(more)  # two that are left over, with names that have nothing in common
    ms.load(model, file, rules=suggestion.accept_guesses())
    assert torch.equal(model["q_proj"].weight, file["query.weight"])


def test_nothing_is_to_be_looked_for_where_only_one_side_has_more() -> None:
    assert "suggest" not in str(ms.plan(module_of(["a", "b"]), state(["a"])))
    assert "suggest" not in str(ms.plan(module_of(["a"]), state(["a", "b"])))


# Whatever the names are.

OLD = ["q", "key", "value", "encoder", "layer", "0", "1", "w", "b", "module"]
SYNONYMS = {name: f"{name}_proj" for name in OLD if not name.isdecimal() and name != "module"}


@st.composite
def renamings(draw: st.DrawFn) -> tuple[dict[str, str], set[str]]:
    """From names of a model to those of the same tensors in a file, and names that the file has besides."""
    path = st.lists(st.sampled_from(OLD), min_size=1, max_size=3)
    paths = draw(st.lists(path.map(tuple), min_size=1, max_size=6, unique=True))
    # No tensor has the name of a module.
    paths = [one for one in paths if not any(len(one) < len(other) and other[: len(one)] == one for other in paths)]
    renamed_parts = draw(st.sets(st.sampled_from(sorted(SYNONYMS))))
    prefix = draw(st.sampled_from(["", "", "model.", "encoder.", "module.", "_orig_mod.", "module._orig_mod."]))
    wrapped = draw(st.sets(st.sampled_from(OLD)))
    wrapper = draw(st.sampled_from(WRAPPERS))
    names: dict[str, str] = {}
    for one in paths:
        parts = [SYNONYMS[part] if part in renamed_parts else part for part in one]
        inside = [f"{part}.{wrapper}" if part in wrapped else part for part in parts[:-1]]
        names[".".join(one)] = prefix + ".".join([*inside, parts[-1]])
    if draw(st.booleans()):
        names = {other: name for name, other in names.items()}
    left = draw(st.sets(st.sampled_from(sorted(names)), max_size=2))
    extra = draw(st.sets(st.sampled_from(["x.w", "ema.w", "module.ema.q", "q", "encoder.w"]), max_size=2))
    gone = {name for name in left if len(left) < len(names)}
    return {name: ("" if name in gone else other) for name, other in names.items()}, extra - {*names.values()}


@pytest.mark.slow
@given(renamings())
@example(({"encoder.q": "q", "encoder.encoder.module.q": "encoder.module.q"}, set()))
@settings(deadline=None, max_examples=examples(400))
def test_what_is_loaded_or_proposed_is_what_was_meant(renaming: tuple[dict[str, str], set[str]]) -> None:
    names, extra = renaming
    file = state([*filter(None, names.values()), *sorted(extra)])
    truth = {name: file[other] for name, other in names.items() if other}

    def check(rules: list[Any]) -> None:
        model = module_of(list(names))
        try:
            ms.load(model, file, rules=rules, allow_missing=["*"], allow_unexpected=["*"])
        except PlanError:
            return
        for name, param in model.named_parameters():
            meant = [file[name]] if name in file else []  # it fits as it is, which no load can doubt
            meant += [truth[name]] if name in truth else []
            assert param.eq(-1).all() or any(torch.equal(param, value) for value in meant), (name, names, rules)

    check([])
    planned = ms.plan(module_of(list(names)), file)
    check([pasted(problem) for problem in planned.problems if problem.kind.name in ("OTHER_NAMES", "OTHER_DIMENSIONS")])


# The part of a checkpoint that is meant.

NAMES = ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "fc.weight"]


def key_of(tree: dict[str, Any], names: list[str] = NAMES, *rules: Any) -> str:
    """Which part a plan for a model of these names takes; empty for the whole."""
    found = re.search(r"\[(.+)\]$", ms.plan(module_of(names), tree, rules=rules).source)
    return found[1] if found else ""


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        (state(NAMES), ""),
        ({"model": state(NAMES), "step": 3}, "model"),
        ({"a": {"b": [state(NAMES)]}}, "a.b.0"),
        ({"a": {"b": {"c": state(NAMES)}}}, "a.b.c"),
        ({"state": state(NAMES), "optimizer": {"state": {0: state(["exp_avg"])}}}, "state"),
        ({"ema": state(NAMES[:2]), "model": state(NAMES)}, "model"),
        ({"other": state(["x", "y"]), "another": state(["z"])}, ""),
        ({**state(NAMES), "old": state(NAMES[:2])}, ""),
        ({"model": state([f"module.{name}" for name in NAMES])}, "model"),
        ({"model": state([f"net.{name}" for name in NAMES]), "ema": state(["x"])}, "model"),
        ({"run": {"model": state([f"net.{name}" for name in NAMES])}, "epoch": 1}, "run.model"),
        ({"model": state([f"net.{name}" for name in [*NAMES, "x"]])}, "model"),
    ],
)
def test_the_part_with_the_names_of_the_model(tree: dict[str, Any], key: str) -> None:
    assert key_of(tree) == key


def test_a_model_with_a_prefix_that_the_checkpoint_lacks() -> None:
    wanted = [f"encoder.{name}" for name in NAMES]
    assert key_of({"net": state(NAMES), "optimizer": state(["x"])}, wanted) == "net"


def test_rules_decide_with() -> None:
    tree = {"a": state([f"old.{name}" for name in NAMES]), "b": state(NAMES[:1])}
    assert key_of(tree) == "b"
    assert key_of(tree, NAMES, ms.rules.Prefix(strip="old.")) == "a"


def test_several_state_dicts_that_fit() -> None:
    tree = {"model": state(NAMES), "ema": state(NAMES), "half": state(NAMES[:3]), "little": state(NAMES[:1])}
    with pytest.raises(AmbiguousCheckpointError) as caught:
        key_of(tree)
    assert caught.value.candidates == (("model", 5), ("ema", 5), ("half", 3))
    assert "'ema' (5 of 5 names match)" in caught.value.found
    assert "little" not in str(caught.value)
    assert str(caught.value.remedy).startswith("say which one is meant, for example key='model'; ")


def test_the_whole_as_one_of_several() -> None:
    with pytest.raises(AmbiguousCheckpointError, match=re.escape("'(the whole)' (5 of 5 names match)")) as caught:
        key_of({**state(NAMES), "ema": state(NAMES)})
    assert dict(caught.value.candidates) == {"": 5, "ema": 5}


@pytest.mark.parametrize(("others", "clear"), [(2, True), (3, False)])
def test_twice_as_many_names_are_clear(others: int, clear: bool) -> None:
    tree = {"model": state(NAMES), "ema": state(NAMES[:others])}
    if clear:
        assert key_of(tree) == "model"
    else:
        with pytest.raises(AmbiguousCheckpointError):
            key_of(tree)


def test_what_else_a_checkpoint_holds_is_noted(tmp_path: Any) -> None:
    module = nn.Linear(2, 2)
    torch.save({"model": module.state_dict(), "moments": {"a": torch.ones(1)}}, tmp_path / "x.pt")
    assert "1 tensor of other parts" in ms.load(module, tmp_path / "x.pt").notes[0]


def test_nothing_at_all_is_not_a_load() -> None:
    with pytest.raises(ms.PlanError) as caught:
        ms.load(nn.Linear(2, 2), {"x": torch.ones(1)}, allow_missing=["*"], allow_unexpected=["*"])
    assert caught.value.problems[0].kind.name == "NOTHING_FITS"


def test_two_state_dicts_behind_one_prefix_are_no_choice() -> None:
    """No key would make either of them load: the problems are those of the whole checkpoint."""
    model = nn.Linear(3, 2)
    part = {f"net.{name}": value for name, value in model.state_dict().items()}
    with pytest.raises(ms.PlanError, match="6 problems"):
        ms.load(model, {"model": part, "ema": part})
