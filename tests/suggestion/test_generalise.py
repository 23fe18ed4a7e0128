"""Few rules for many names."""

import modelstate as ms
from modelstate.rules.schema import renaming
from modelstate.suggestion.generalise import covering, families, rename_rules


def test_layers_become_stars() -> None:
    kinds = [("x", "p"), ("y", "q")]
    pairs = {f"h.{i}.{old}.{w}": f"b.{i}.{new}.{w}" for i in range(3) for old, new in kinds for w in ("w", "b")}
    assert set(rename_rules(pairs, ())) == {
        ms.rules.Rename("h.*.x.*", "b.*.p.*"),
        ms.rules.Rename("h.*.y.*", "b.*.q.*"),
    }


def test_a_prefix() -> None:
    assert rename_rules({f"net.{name}": name for name in ("a.w", "a.b", "c")}, ()) == [ms.rules.Prefix(strip="net.")]


def test_a_segment_within() -> None:
    pairs = {f"{a}._orig_mod.{b}": f"{a}.{b}" for a in ("x", "y.0", "y.1") for b in ("weight", "bias")}
    assert rename_rules(pairs, ()) == [ms.rules.Rename("*._orig_mod.*", "*.*")]


def test_what_is_fixed_is_left_alone() -> None:
    rules = rename_rules({"net.a.w": "a.w", "net.b.w": "b.w"}, ["net.head"])
    assert renaming(rules)("net.head") == "net.head"
    assert [renaming(rules)(name) for name in ("net.a.w", "net.b.w")] == ["a.w", "b.w"]


def test_numbers_that_change_stay_numbers() -> None:
    pairs = {f"layer{i}.{j}.{w}": f"stages.{i - 1}.{j}.{w}" for i in (1, 2) for j in range(3) for w in ("w", "v.b")}
    assert set(rename_rules(pairs, ())) == {ms.rules.Rename(f"layer{i}.*", f"stages.{i - 1}.*") for i in (1, 2)}


def test_a_number_is_linked_where_it_is_the_same() -> None:
    (one,) = families([(f"a.{i}.w", f"b.0.{i}.w") for i in range(3)])
    assert one.patterns == ("a.*.w", "b.0.*.w")


def test_steps_where_they_are_fewer() -> None:
    olds, news = [f"a{i}" for i in range(5)], [f"b{i}" for i in range(5)]
    pairs = {
        f"{o}.{x}.w": f"{n}.{y}.w"
        for o, n in zip(olds, news, strict=True)
        for x, y in zip("pqrst", "vwxyz", strict=True)
    }
    rules = rename_rules(pairs, ())
    assert len(rules) == 10
    assert {name: renaming(rules)(name) for name in pairs} == pairs


def test_patterns_that_cover() -> None:
    names = [f"h.{i}.{part}.weight" for i in range(3) for part in ("attn.c_proj", "mlp.c_proj")]
    assert covering(names, ["h.0.ln.weight"]) == ["*.c_proj.weight"]
    more = covering(names, ["lm.c_proj.weight"])
    assert set(more) == {"h.*.attn.c_proj.weight", "h.*.mlp.c_proj.weight"}
