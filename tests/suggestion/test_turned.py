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


def square_beside(source: dict[str, tuple[int, int]], goal: dict[str, tuple[int, int]]) -> ms.suggestion.Suggestion:
    """Suggests for two layers with a square `q`, and with other weights."""
    state = {f"h.{i}.{name}.weight": shape for i in range(2) for name, shape in {"q": (8, 8), **source}.items()}
    other = {f"b.{i}.{name}.weight": shape for i in range(2) for name, shape in {"attn.q_proj": (8, 8), **goal}.items()}
    return ms.suggest(tree(other), values(state))


def test_a_square_weight_is_a_guess_unless_the_match_of_another_of_its_layer_is_sure() -> None:
    apart = {"mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8), "mlp.down_proj": (8, 16)}
    squares = {f"b.{i}.attn.q_proj.weight" for i in range(2)}
    turned = square_beside(apart, {"mlp.gate_up_proj": (8, 32), "mlp.down_proj": (16, 8)})
    assert [rule.pattern for rule in transposed(turned)] == ["h.*.mlp.down_proj.weight"]
    assert {*turned.guesses} == squares
    crossed = square_beside({"mlp.up": (16, 8), "mlp.down": (8, 16)}, {"fc1": (8, 16), "fc2": (16, 8)})
    assert squares <= {*crossed.guesses}
    assert not square_beside(apart, apart).guesses


def test_a_number_within_a_word_is_not_that_of_a_layer() -> None:
    norms = {"h.0.ln1.weight": (4,), "h.0.ln2.weight": (4,), "h.1.ln1.weight": (4,), "h.1.ln1.bias": (4,)}
    names = ("input_layernorm", "post_attention_layernorm")
    model = tree({f"b.{i}.{name}.{role}": (4,) for i in range(2) for name in names for role in ("weight", "bias")})
    state = {**values(norms), "h.1.ln2.bias": values({"x": (4,)})["x"]}
    rules = ms.suggest(model, state).accept_guesses()
    ms.load(model, state, rules=rules, allow_missing=["b.0.*.bias", "b.1.post_*.weight"])
    for name, tensor in model.named_parameters():
        _, layer, word, role = name.split(".")
        source = state.get(f"h.{layer}.ln{names.index(word) + 1}.{role}")
        assert not tensor.any() if source is None else tensor.equal(source)
