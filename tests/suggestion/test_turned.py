"""Weights without biases are transposed only where that is certain."""

import modelstate as ms
from tests.suggestion.test_suggest import tree, values


def transposed(found: ms.suggestion.Suggestion) -> list[ms.rules.Transpose]:
    return [rule for rule in found if isinstance(rule, ms.rules.Transpose)]


def test_words_alone_turn_nothing() -> None:
    old = {f"h.{i}.{name}.weight": shape for i in range(2) for name, shape in (("up", (8, 32)), ("down", (32, 8)))}
    new = {f"b.{i}.{name}_proj.weight": shape[::-1] for i in range(2) for name, shape in (("up", (8, 32)),)}
    new |= {f"b.{i}.down_proj.weight": (8, 32) for i in range(2)}
    found = ms.suggest(tree(new), values(old))
    assert list(found) == []
    assert not found.complete


def test_what_fits_in_no_other_way_is_turned_and_so_are_its_neighbours() -> None:
    sizes = {"up": (8, 32), "down": (32, 8), "key": (8, 4)}
    words = {"up": "up_proj", "down": "down_proj", "key": "k_proj"}
    old = {f"h.{i}.{name}.weight": shape for i in range(2) for name, shape in sizes.items()}
    new = {f"b.{i}.{words[name]}.weight": shape[::-1] for i in range(2) for name, shape in sizes.items()}
    model, state = tree(new), values(old)
    found = ms.suggest(model, state)
    assert found.complete
    ms.load(model, state, rules=found)
    assert model.get_parameter("b.1.up_proj.weight").equal(state["h.1.up.weight"].T)
    assert model.get_parameter("b.1.k_proj.weight").equal(state["h.1.key.weight"].T)


def test_beside_biases_of_a_conv1d_it_is_certain() -> None:
    old = {"h.0.c_attn.weight": (8, 24), "h.0.c_attn.bias": (24,), "h.0.up.weight": (8, 32), "h.0.down.weight": (32, 8)}
    new = {
        "b.0.qkv.weight": (24, 8),
        "b.0.qkv.bias": (24,),
        "b.0.up_proj.weight": (32, 8),
        "b.0.down_proj.weight": (8, 32),
    }
    found = ms.suggest(tree(new), values(old))
    assert found.complete, str(found)
    assert transposed(found)
