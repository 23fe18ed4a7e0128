"""Which tensor of a checkpoint is which of the model, on names and shapes alone."""

from collections.abc import Mapping

import pytest
import torch

import modelstate as ms
from tests.suggestion.test_suggest import Tree, renaming, tree, values

Shapes = Mapping[str, tuple[int, ...]]


def matched(sources: Shapes, targets: Shapes) -> dict[str, str]:
    found = ms.suggest(tree(targets), values(sources))
    renamed = renaming(found.accept_guesses())
    return {name: renamed(name) for name in sources if renamed(name) in targets}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("query", "q_proj"),
        ("self_attn", "SelfAttention"),
        ("LayerNorm", "ln_1"),
        ("word_embeddings", "tok_emb"),
        ("wpe", "position_embeddings"),
        ("c_attn", "qkv"),
        ("BatchNorm2d", "bn1"),
    ],
)
def test_words_of_one_meaning(one: str, other: str) -> None:
    old, new = ({f"m.{name}.weight": (3, 3), f"m.{more}.weight": (3, 3)} for name, more in ((one, "x"), (other, "y")))
    assert matched(old, new) == dict(zip(old, new, strict=True))


@pytest.mark.parametrize(
    ("one", "other"), [("query", "key"), ("encoder", "decoder"), ("fc1", "fc2"), ("wte", "wpe"), ("gate", "up")]
)
def test_words_that_exclude_each_other(one: str, other: str) -> None:
    assert matched({f"m.{one}.weight": (3, 3)}, {f"m.{other}.weight": (3, 3)}) == {}


@pytest.mark.parametrize("names", [("gamma", "weight"), ("ln_weight", "norm.weight"), ("beta", "bias")])
def test_roles_of_tensors(names: tuple[str, str]) -> None:
    old, new = {names[0]: (5,)}, {names[1]: (5,)}
    assert matched(old, new) == {names[0]: names[1]}


def test_layers_that_start_elsewhere() -> None:
    old, new = ({f"{name}.{i}.fc.weight": (3, 3) for i in range(a, a + 3)} for name, a in (("h", 1), ("blocks", 0)))
    assert matched(old, new) == {f"h.{i + 1}.fc.weight": f"blocks.{i}.fc.weight" for i in range(3)}


def test_another_number_of_layers_is_not_guessed() -> None:
    old, new = ({f"{name}.{i}.fc.weight": (3, 3) for i in range(n)} for name, n in (("h", 4), ("blocks", 2)))
    assert matched(old, new) == {}


def test_one_name_of_two_that_speaks_settles_both() -> None:
    found = matched({"m.query.weight": (3, 3), "m.x.weight": (3, 3)}, {"n.q.weight": (3, 3), "n.y.weight": (3, 3)})
    assert found == {"m.query.weight": "n.q.weight", "m.x.weight": "n.y.weight"}


def test_neighbours_that_are_known_tell_lists_apart() -> None:
    def side(one: str, other: str) -> Shapes:
        both = {f"{path}.{i}.fc.weight": (3, 3) for path in (one, other) for i in range(2)}
        return both | {f"{one}.{i}.only.weight": (7, 7) for i in range(2)}

    old, new = side("aa", "bb"), side("cc", "dd")
    assert matched(old, new) == dict(zip(old, new, strict=True))


def test_another_kind_of_dtype() -> None:
    found = ms.suggest(Tree({"b.scale": torch.zeros(())}), {"a.steps": torch.tensor(3)})
    assert list(found) == []


def test_members_of_one_layer_are_not_layers() -> None:
    old = {"encoder.0.norm1.weight": (4,), "encoder.0.norm2.weight": (4,)}
    assert matched(old, {"h.0.ln_1.weight": (4,), "h.1.ln_1.weight": (4,)}) == {}


@pytest.mark.parametrize("second", ["ln_2", "post_attention_layernorm"])
def test_the_first_norm_of_one_stack_is_not_the_second_of_another(second: str) -> None:
    names = {"encoder.0.norm1": "zoom.0.zen", "h.0.norm1": "h.0.zen", "h.0.norm2": f"h.0.{second}"}
    names |= {"encoder.0.attn": "zoom.0.attention", "h.0.attn": "h.0.attention"}
    old, new = ({f"{name}.weight": (4, 4) for name in side} for side in (names, names.values()))
    assert matched(old, new)["h.0.norm2.weight"] == f"h.0.{second}.weight"


def test_norms_that_are_numbered_and_norms_that_are_named() -> None:
    old = {f"h.{i}.ln_{n}.{role}": (4,) for i in range(2) for n in (1, 2) for role in ("weight", "bias")}
    for first, second in (("input_layernorm", "post_attention_layernorm"), ("attention_norm", "ffn_norm")):
        words = {"h": "layers", "ln_1": first, "ln_2": second}
        new = {name: ".".join(words.get(part, part) for part in name.split(".")) for name in old}
        assert matched(old, dict.fromkeys(new.values(), (4,))) == new
