"""Few rules for many names."""

import modelstate as ms
from tests.suggestion.test_suggest import renaming, tree, values


def suggested(pairs: dict[str, str], fixed: tuple[str, ...] = ()) -> ms.suggestion.Suggestion:
    """What is found where each name and its goal have a shape that no other kind of names has."""
    kinds: dict[str, int] = {}
    shapes = {name: (kinds.setdefault("".join(c for c in name if not c.isdigit()), len(kinds) + 2),) for name in pairs}
    kept = dict.fromkeys(fixed, (1, 1))
    model = tree({goal: shapes[name] for name, goal in pairs.items()} | kept)
    found = ms.suggest(model, values(shapes | kept))
    assert {name: renaming(found)(name) for name in (*pairs, *fixed)} == pairs | {name: name for name in fixed}
    return found


def test_layers_become_stars() -> None:
    kinds = [("x", "p"), ("y", "q")]
    pairs = {f"h.{i}.{old}.{w}": f"b.{i}.{new}.{w}" for i in range(3) for old, new in kinds for w in ("w", "b")}
    assert len(suggested(pairs)) <= 3


def test_a_segment_within() -> None:
    pairs = {f"{a}._orig_mod.{b}": f"{a}.{b}" for a in ("x", "y.0", "y.1") for b in ("weight", "bias")}
    assert list(suggested(pairs)) == [ms.rules.Rename("*._orig_mod.*", "*.*")]


def test_numbers_that_change_stay_numbers() -> None:
    pairs = {f"layer{i}.{j}.{w}": f"stages.{i - 1}.{j}.{w}" for i in (1, 2) for j in range(3) for w in ("w", "v.b")}
    assert set(suggested(pairs)) == {ms.rules.Rename(f"layer{i}.*", f"stages.{i - 1}.*") for i in (1, 2)}


def test_numbers_with_gaps_are_counted() -> None:
    pairs = {f"features.{2 * i}.{w}": f"convs.{i}.{w}" for i in range(4) for w in ("weight", "bias")}
    model = tree({goal: (i // 2 + 2,) for i, goal in enumerate(pairs.values())})
    found = ms.suggest(model, values({name: (i // 2 + 2,) for i, name in enumerate(pairs)}))
    assert {name: renaming(found)(name) for name in pairs} == pairs
    assert len(found) == 4
