"""Words that mean something else beside others: right, or open."""

from collections.abc import Mapping

import pytest

import modelstate as ms
from tests.suggestion.test_suggest import renaming, tree, values

Shape = tuple[int, ...]
WIDE, NARROW, SQUARE = (32, 8), (8, 32), (8, 8)
GATED = ("gate_proj", "up_proj", "down_proj")


def layers(path: str, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {f"{path.replace('*', str(i))}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}


def gated(old: tuple[str, ...], shapes: tuple[Shape, ...], path: str = "h.*.ffn") -> ms.suggestion.Suggestion:
    """What is found for weights of these names, and a model of gate, up and down; all with Llama's shapes or square."""
    wanted = (SQUARE,) * 3 if SQUARE in shapes else (WIDE, WIDE, NARROW)
    new = layers("layers.*.mlp", dict(zip(GATED, wanted, strict=True)))
    return ms.suggest(tree(new), values(layers(path, dict(zip(old, shapes, strict=True)))))


def opened(found: ms.suggestion.Suggestion) -> set[str]:
    return {name.split(".")[3] for name in (*found.missing, *(name for one in found.ambiguous for name in one.names))}


@pytest.mark.parametrize("path", ["h.*", "h.*.ffn", "experts.*"])
@pytest.mark.parametrize(
    "old", [("w1", "w2", "w3"), ("w1", "w2", "c_proj"), ("fc1", "fc2", "proj"), ("fc1", "fc2", "fc3")]
)
def test_shapes_tell_what_goes_down_and_nothing_tells_the_gate(old: tuple[str, ...], path: str) -> None:
    found = gated(old, (WIDE, WIDE, NARROW), path)
    where = path.replace("*", "0")
    assert renaming(found)(f"{where}.{old[2]}.weight") == "layers.0.mlp.down_proj.weight"
    assert opened(found) == {"gate_proj", "up_proj"}
    assert len(found.ambiguous) == 1
    assert len(found) == 1


@pytest.mark.parametrize(
    "old",
    [("w1", "w2", "w3"), ("w1", "w2", "c_proj"), ("fc1", "fc2", "proj"), ("fc1", "fc2", "fc3"), ("w1", "w2", "x")],
)
def test_square_ones_say_nothing(old: tuple[str, ...]) -> None:
    found = gated(old, (SQUARE,) * 3)
    assert list(found) == []
    assert opened(found) == set(GATED)


def test_llamas_convention_is_said() -> None:
    found = gated(("w1", "w2", "w3"), (WIDE, NARROW, WIDE))
    assert not found.complete
    assert {name.split(".")[3] for name in found.guesses} == {"gate_proj", "up_proj"}
    pairs = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for old, new in pairs.items():
        assert renaming(found)(f"h.1.ffn.{old}.weight") == f"layers.1.mlp.{new}.weight"
    assert any("convention" in note for note in found.notes)


def test_llamas_convention_is_said_of_what_is_joined() -> None:
    model = tree(layers("layers.*.mlp", {"gate_up_proj": (64, 8), "down_proj": NARROW}))
    found = ms.suggest(model, values(layers("h.*.ffn", {"w1": WIDE, "w2": NARROW, "w3": WIDE})))
    assert found.accept_guesses()[0] == ms.rules.Concat(
        ["h.*.ffn.w1.weight", "h.*.ffn.w3.weight"], "layers.*.mlp.gate_up_proj.weight"
    )
    assert isinstance(found[0], ms.rules.Guess)
    assert any("convention" in note for note in found.notes)


@pytest.mark.parametrize("down", ["w2", "w3"])
def test_the_same_names_are_the_same_convention(down: str) -> None:
    shapes = {name: NARROW if name == down else WIDE for name in ("w1", "w2", "w3")}
    found = ms.suggest(tree(layers("layers.*.mlp", shapes)), values(layers("h.*.ffn", shapes)))
    assert found.complete
    assert renaming(found)("h.0.ffn.w1.weight") == "layers.0.mlp.w1.weight"
    assert found.notes == ()


def test_one_after_the_other_by_number() -> None:
    old, new = ({f"{name}.{word}{n}.weight": SQUARE for n in range(1, 6)} for name, word in (("a", "fc"), ("b", "lin")))
    found = ms.suggest(tree(new), values(old))
    assert found.complete
    assert all(renaming(found)(f"a.fc{n}.weight") == f"b.lin{n}.weight" for n in range(1, 6))


def norms(old: tuple[str, ...], new: tuple[str, ...]) -> ms.suggestion.Suggestion:
    model = tree(layers("blocks.*", dict.fromkeys(new, (8,))))
    return ms.suggest(model, values(layers("model.layers.*", dict.fromkeys(old, (8,)))))


@pytest.mark.parametrize("new", [("attn_norm", "mlp_norm"), ("norm1", "norm2")])
def test_two_norms(new: tuple[str, str]) -> None:
    old = ("input_layernorm", "post_attention_layernorm")
    found = norms(old, new)
    assert found.complete
    for before, after in zip(old, new, strict=True):
        assert renaming(found)(f"model.layers.1.{before}.weight") == f"blocks.1.{after}.weight"


def test_norms_before_are_none_behind() -> None:
    found = norms(
        ("post_attention_layernorm", "post_feedforward_layernorm"), ("input_layernorm", "post_attention_layernorm")
    )
    assert list(found) == []


@pytest.mark.parametrize(
    "old",
    [
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ],
)
def test_four_norms_are_not_two(old: tuple[str, ...]) -> None:
    assert list(norms(old, ("attn_norm", "mlp_norm"))) == []
