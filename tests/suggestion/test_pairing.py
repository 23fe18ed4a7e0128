"""Who is who, on names and shapes alone."""

from collections.abc import Mapping

import pytest

from modelstate.suggestion.pairing import Pairing, match
from modelstate.suggestion.skeletons import Leaf, Level, skeletons
from modelstate.suggestion.words import concepts, contradict, of_path, role_of

Shapes = Mapping[str, tuple[int, ...]]


def leaves(shapes: Shapes) -> list[Leaf]:
    return [Leaf(name, shape, "float") for name, shape in shapes.items()]


def matched(sources: Shapes, targets: Shapes) -> dict[str, str]:
    pairing = Pairing()
    match(leaves(sources), leaves(targets), pairing)
    return pairing.pairs


class TestConcepts:
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
    def test_the_same_thing(self, one: str, other: str) -> None:
        assert concepts(one) & concepts(other)

    @pytest.mark.parametrize(
        ("one", "other"), [("query", "key"), ("encoder", "decoder"), ("fc1", "fc2"), ("wte", "wpe"), ("gate", "up")]
    )
    def test_what_cannot_be_the_same(self, one: str, other: str) -> None:
        assert contradict(concepts(one), concepts(other))
        assert not contradict(concepts(one), concepts(one))

    def test_roles(self) -> None:
        assert role_of("gamma") == ("", "weight")
        assert role_of("in_proj_bias") == ("in_proj", "bias")
        assert role_of("cls_token") == ("cls_token", "")

    def test_dense_of_attention_is_its_output(self) -> None:
        assert "out" in of_path(["attention", "dense"])
        assert "out" not in of_path(["mlp", "dense"])


class TestSkeletons:
    def test_layers_are_taken_together(self) -> None:
        found = skeletons(leaves({f"layers.{i}.fc.weight": (3, 4) for i in range(5)}), Level.WHOLE)
        assert [one.text for one in found] == ["layers.#.fc.weight"]
        assert list(found[0].leaves) == [(i,) for i in range(5)]

    def test_members_that_differ_are_not(self) -> None:
        shapes = {"net.0.weight": (8, 3, 3, 3), "net.1.weight": (8,), "net.1.bias": (8,), "net.1.running_mean": (8,)}
        assert [one.text for one in skeletons(leaves(shapes), Level.ALL)] == list(shapes)

    def test_numbers_within_words(self) -> None:
        shapes = {f"layer{i}.conv{j}.weight": (4, 4, 3, 3) for i in (1, 2) for j in (1, 2)}
        (one,) = skeletons(leaves(shapes), Level.ALL)
        assert one.text == "layer#.conv#.weight"
        assert len(skeletons(leaves(shapes), Level.WHOLE)) == 4

    def test_ten_comes_after_two(self) -> None:
        (one,) = skeletons(leaves({f"h.{i}.weight": (i + 1,) for i in (10, 2, 1)}), Level.ALL)
        assert {leaf.name: ranks for ranks, leaf in one.leaves.items()} == {
            "h.1.weight": (0,),
            "h.2.weight": (1,),
            "h.10.weight": (2,),
        }


class TestMatch:
    def test_layers_that_start_elsewhere(self) -> None:
        old, new = ({f"{name}.{i}.fc.weight": (3, 3) for i in range(a, a + 3)} for name, a in (("h", 1), ("blocks", 0)))
        assert matched(old, new) == {f"h.{i + 1}.fc.weight": f"blocks.{i}.fc.weight" for i in range(3)}

    def test_another_number_of_layers_is_not_guessed(self) -> None:
        old, new = ({f"{name}.{i}.fc.weight": (3, 3) for i in range(n)} for name, n in (("h", 4), ("blocks", 2)))
        assert matched(old, new) == {}

    def test_siblings_whose_names_say_nothing(self) -> None:
        assert matched({"a.weight": (3, 3), "b.weight": (3, 3)}, {"x.weight": (3, 3), "y.weight": (3, 3)}) == {}

    def test_the_order_does_not_decide(self) -> None:
        old = {"first.weight": (3, 3), "second.weight": (3, 3)}
        assert matched(old, {"alpha.weight": (3, 3), "omega.weight": (3, 3)}) == {}

    def test_one_name_of_two_that_speaks_settles_both(self) -> None:
        found = matched({"m.query.weight": (3, 3), "m.x.weight": (3, 3)}, {"n.q.weight": (3, 3), "n.y.weight": (3, 3)})
        assert found == {"m.query.weight": "n.q.weight", "m.x.weight": "n.y.weight"}

    def test_what_speaks_only_against_does_not_settle(self) -> None:
        old = {"m.query.weight": (3, 3), "m.zz.weight": (3, 3)}
        assert matched(old, {"n.foo.weight": (3, 3), "n.mlp.weight": (3, 3)}) == {}

    def test_weights_and_biases_of_one_shape(self) -> None:
        old, new = ({f"{name}.{role}": (5,) for role in ("weight", "bias")} for name in ("ln", "norm"))
        assert matched(old, new) == {"ln.weight": "norm.weight", "ln.bias": "norm.bias"}

    def test_a_bias_is_no_weight(self) -> None:
        assert matched({"a.weight": (5,)}, {"b.bias": (5,)}) == {}

    def test_neighbours_that_are_known_tell_lists_apart(self) -> None:
        def side(one: str, other: str) -> Shapes:
            both = {f"{path}.{i}.fc.weight": (3, 3) for path in (one, other) for i in range(2)}
            return both | {f"{one}.{i}.only.weight": (7, 7) for i in range(2)}

        old, new = side("aa", "bb"), side("cc", "dd")
        assert matched(old, new) == dict(zip(old, new, strict=True))

    def test_another_kind_of_dtype(self) -> None:
        pairing = Pairing()
        match([Leaf("a.steps", (), "int")], [Leaf("b.scale", (), "float")], pairing)
        assert pairing.pairs == {}

    def test_members_of_one_layer_are_not_layers(self) -> None:
        old = {"encoder.0.norm1.weight": (4,), "encoder.0.norm2.weight": (4,)}
        assert matched(old, {"h.0.ln_1.weight": (4,), "h.1.ln_1.weight": (4,)}) == {}

    def test_the_first_norm_of_one_stack_is_not_the_second_of_another(self) -> None:
        names = {"encoder.0.norm1": "zoom.0.zen", "h.0.norm1": "h.0.zen", "h.0.norm2": "h.0.ln_2"}
        names |= {"encoder.0.attn": "zoom.0.attention", "h.0.attn": "h.0.attention"}
        old, new = ({f"{name}.weight": (4, 4) for name in side} for side in (names, names.values()))
        assert matched(old, new).get("encoder.0.norm1.weight") != "h.0.ln_2.weight"

    def test_the_first_norm_of_one_stack_is_not_the_one_behind_attention_of_another(self) -> None:
        names = {"decoder.0.attn": "zone.0.attention", "decoder.0.norm1": "zone.0.zen"}
        names |= {"h.0.norm1": "h.0.zen", "h.0.norm2": "h.0.post_attention_layernorm"}
        old, new = ({f"{name}.weight": (4, 4) for name in side} for side in (names, names.values()))
        assert matched(old, new)["h.0.norm2.weight"] == "h.0.post_attention_layernorm.weight"

    def test_norms_that_are_numbered_and_norms_that_are_named(self) -> None:
        old = {f"h.{i}.ln_{n}.{role}": (4,) for i in range(2) for n in (1, 2) for role in ("weight", "bias")}
        for first, second in (("input_layernorm", "post_attention_layernorm"), ("attention_norm", "ffn_norm")):
            words = {"h": "layers", "ln_1": first, "ln_2": second}
            new = {name: ".".join(words.get(part, part) for part in name.split(".")) for name in old}
            assert matched(old, dict.fromkeys(new.values(), (4,))) == new
