"""The suggestion as a whole: what it claims is true, and what it cannot know it leaves open."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelstate as ms


class Tree(nn.Module):
    """Parameters under dotted names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(tensor, requires_grad=False))


def tree(shapes: Mapping[str, tuple[int, ...]]) -> Tree:
    return Tree({name: torch.zeros(shape) for name, shape in shapes.items()})


def values(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def renaming(rules: Iterable[ms.rules.Rule]) -> Callable[[str], str]:
    """Returns a function from a name of the checkpoint to the name that all rules together give it."""

    def renamed(name: str) -> str:
        for rule in rules:
            name = rule.rename(name) or name
        return name

    return renamed


def test_nothing_to_do() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    found = ms.suggest(model, model.state_dict())
    assert list(found) == []
    assert found.complete
    assert (found.explained, found.total) == (7, 7)
    assert str(found).startswith("rules = []")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "backbone.", "model.encoder."])
@pytest.mark.parametrize("turned", [False, True])
def test_prefixes(prefix: str, turned: bool) -> None:
    bare = {
        f"layers.{i}.fc.{role}": (4, 4) if role == "weight" else (4,) for i in range(3) for role in ("weight", "bias")
    }
    longer = {prefix + name: shape for name, shape in bare.items()}
    model, state = (tree(longer), values(bare)) if turned else (tree(bare), values(longer))
    found = ms.suggest(model, state)
    assert list(found) == [ms.rules.Prefix(add=prefix) if turned else ms.rules.Prefix(strip=prefix)]
    assert ms.plan(model, state, rules=found).ok


def test_values_are_not_decoded(tmp_path: Path) -> None:
    manifest = {"format": 1, "extra": {"module._extra_state": {"$object": {"codec": "gone", "value": 1}}}}
    state = {f"module.{name}": value for name, value in nn.Linear(2, 3).state_dict().items()}
    save_file(state, tmp_path / "x.safetensors", metadata={"modelstate": json.dumps(manifest)})
    suggestion = ms.suggest(nn.Linear(2, 3), tmp_path / "x.safetensors")
    assert list(suggestion) == [ms.rules.Prefix(strip="module.")]
    assert suggestion.unused == ("module._extra_state",)


def test_names_of_any_length() -> None:
    """Names of 8,000 parts take no longer than others."""
    state = {"a." * 8000 + "w": (3, 5), "q.fc.weight": (4, 2), "1." * 8000 + "w": (3,), "1" * 5000: (4,)}
    model = tree({"fc.weight": (4, 2)})
    model.register_buffer("own", torch.zeros(6))
    suggestion = ms.suggest(model, values(state | {"own": (6,)}))
    assert list(suggestion) == [ms.rules.Prefix(strip="q.")]
    assert (suggestion.missing, len(suggestion.unused), suggestion.explained) == ((), 3, 2)


def test_what_prints_can_be_pasted() -> None:
    old = {
        f"h.{i}.attn.c_attn.{role}": shape for i in range(2) for role, shape in (("weight", (4, 12)), ("bias", (12,)))
    }
    new = {
        f"blocks.{i}.{part}.{role}": shape
        for i in range(2)
        for part in ("q", "k", "v")
        for role, shape in (("weight", (4, 4)), ("bias", (4,)))
    }
    found = ms.suggest(tree(new), values(old))
    scope: dict[str, object] = {"ms": ms}
    exec(str(found), scope)
    assert scope["rules"] == list(found)
    assert found.complete


def test_a_part_of_a_checkpoint() -> None:
    shapes = {"net.fc.weight": (3, 5), "net.fc.bias": (3,)}
    source = {"epoch": 1, "weights": values({name.replace("net", "body"): shape for name, shape in shapes.items()})}
    model = tree(shapes)
    found = ms.suggest(model, source)
    assert found.complete
    ms.load(model, source, rules=found)
    assert torch.equal(model.get_parameter("net.fc.bias"), source["weights"]["body.fc.bias"])


def test_two_parts_that_would_do() -> None:
    state = values({"body.fc.weight": (3, 5)})
    with pytest.raises(ms.errors.AmbiguousCheckpointError):
        ms.suggest(tree({"net.fc.weight": (3, 5)}), {"weights": state, "average": dict(state)})
    assert ms.suggest(
        tree({"net.fc.weight": (3, 5)}), {"weights": state, "average": dict(state)}, key="average"
    ).complete


def test_what_stays_open() -> None:
    model = tree({"a.fc.weight": (3, 5), "head.weight": (7, 3)})
    found = ms.suggest(model, values({"b.fc.weight": (3, 5), "extra.weight": (2, 2)}))
    assert not found.complete
    assert found.missing == ("head.weight",)
    assert found.unused == ("extra.weight",)
    assert (found.explained, found.total) == (1, 2)
    assert "head.weight" in str(found)
    assert "extra.weight" in str(found)


@pytest.mark.parametrize("layers", [0, 1, 2, 12], ids=lambda layers: f"{layers} layers")
@pytest.mark.parametrize("turned", [False, True])
def test_numbered_members_of_an_mlp_in_a_list_of_layers(layers: int, turned: bool) -> None:
    def block(up: str, down: str) -> dict[str, tuple[int, ...]]:
        mlp = {f"mlp.{up}": (32, 8), f"mlp.{down}": (8, 32)}
        return {"norm.weight": (8,)} | {
            f"{name}.{role}": shape if role == "weight" else shape[:1]
            for name, shape in mlp.items()
            for role in ("weight", "bias")
        }

    prefixes = [f"blocks.{i}." for i in range(layers)] or [""]
    numbered, named = (
        {prefix + name: shape for prefix in prefixes for name, shape in block(*members).items()}
        for members in (("0", "2"), ("up", "down"))
    )
    given, wanted = (named, numbered) if turned else (numbered, named)
    model, state = tree(wanted), values(given)
    found = ms.suggest(model, state)
    assert found.complete
    ms.load(model, state, rules=found)
    for target, source in zip(wanted, given, strict=True):
        assert torch.equal(model.get_parameter(target), state[source])


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 0), (3, 4)])
def test_layers_that_are_numbered_from_another_number_stay_open(first: int, last: int) -> None:
    """The layers at the ends are not paired: each layer may have moved by one."""
    shapes, others = ({f"layers.{at + i}.weight": (8, 8) for i in range(3)} for at in (first, last))
    found = ms.suggest(tree(others), values(shapes))
    assert list(found) == []
    assert not found.complete


def test_siblings_whose_names_say_nothing_are_reported() -> None:
    model = tree({"foo.weight": (3, 3), "bar.weight": (3, 3), "fc.weight": (3, 5)})
    found = ms.suggest(model, values({"one.weight": (3, 3), "two.weight": (3, 3), "net.fc.weight": (3, 5)}))
    (group,) = found.ambiguous
    assert set(group.names) == {"foo.weight", "bar.weight"}
    assert set(group.candidates) == {"one.weight", "two.weight"}
    assert found.missing == ()
    assert found.unused == ()
    assert found.explained == 1


def test_a_missing_name_is_reported_where_a_candidate_has_it_too() -> None:
    model = tree({"weight": (5,), "a.foo.weight": (6, 2)})
    found = ms.suggest(model, values(dict.fromkeys(("weight", "a.bar.weight", "a.baz.weight"), (6, 2))))
    assert found.missing == ("weight",)
    assert "weight" in found.ambiguous[0].candidates


def test_a_tied_name_needs_no_source() -> None:
    model = nn.ModuleDict({"tok": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["tok"].weight
    found = ms.suggest(model, {"wte.weight": torch.randn(9, 4)})
    assert found.complete
    assert list(found) == [ms.rules.Rename("wte.*", "tok.*")]
    assert ms.plan(model, {"wte.weight": torch.randn(9, 4)}, rules=found).ok


def test_parts_that_take_turns_are_not_cut() -> None:
    new = {f"h.{i}.attn.{part}.weight": (4, 4) for i in range(2) for part in ("q", "k", "v")}
    found = ms.suggest(tree(new), values({f"layers.{i}.attention.query_key_value.weight": (12, 4) for i in range(2)}))
    assert list(found) == []
    assert "query_key_value" in str(found)
    assert "head by head" in str(found)


def test_names_that_fit_are_never_broken() -> None:
    shapes = {"net.fc.weight": (3, 3), "fc.weight": (3, 3)}
    model = tree(shapes)
    state = values({"net.fc.weight": (3, 3), "module.fc.weight": (3, 3)})
    ms.load(model, state, rules=ms.suggest(model, state))
    assert torch.equal(model.get_parameter("net.fc.weight"), state["net.fc.weight"])
    assert torch.equal(model.get_parameter("fc.weight"), state["module.fc.weight"])


def test_names_that_may_all_have_moved_are_not_matched() -> None:
    """Names that are equal may be wrong: each may have got the prefix once more."""
    found = ms.suggest(tree({"a.w": (4, 4), "a.a.w": (4, 4)}), values({"w": (4, 4), "a.w": (4, 4)}))
    assert (list(found), found.complete) == ([], False)
    assert "moved by one" in str(found)


def test_a_name_behind_a_prefix_tells_tensors_of_one_shape_apart() -> None:
    names = {f"layers.{layer}.mlp.{name}": (4, 4) for layer in (0, 1) for name in ("w1", "w2")}
    found = ms.suggest(
        tree({f"{name}.weight": shape for name, shape in names.items()}),
        values({f"module.{name.replace('w2', 'c_proj')}.weight": shape for name, shape in names.items()}),
    )
    assert (found.explained, found.ambiguous) == (4, ())
    renamed = renaming(found.accept_guesses())
    assert renamed("module.layers.1.mlp.w1.weight") == "layers.1.mlp.w1.weight"
    assert renamed("module.layers.1.mlp.c_proj.weight") == "layers.1.mlp.w2.weight"


def test_not_a_model() -> None:
    with pytest.raises(ms.errors.OptionError):
        ms.suggest({"a": 1}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [{}, {"epoch": 3}, {"x": torch.zeros(0)}])
def test_nothing_in_common(state: dict[str, object]) -> None:
    found = ms.suggest(nn.Linear(3, 4), state)
    assert list(found) == []
    assert found.missing == ("weight", "bias")


# Laws, on trees of random names.


@pytest.mark.parametrize("name", ["a*b", "a.#.b", "a\nb", "a..b", ".", "é.²", f"a.{'9' * 5000}.b"])
def test_strange_names_do_no_harm(name: str) -> None:
    found = ms.suggest(nn.Linear(3, 4), {name: torch.zeros(4, 3), "net.bias": torch.zeros(4)})
    assert found.missing in ((), ("weight",))
    assert str(found)
