"""Which number is which: said by the words before them, or open."""

import pytest

import modelstate as ms
from tests.suggestion.test_suggest import renaming, tree, values


def found_for(old: str, new: str, first: int, second: int) -> ms.suggestion.Suggestion:
    """What is found for names with two numbers, the one below `first`, the other below `second`."""
    numbers = [(i, e) for i in range(first) for e in range(second)]
    state = values({old.format(i=i, e=e): (3, 5) for i, e in numbers})
    return ms.suggest(tree({new.format(i=i, e=e): (3, 5) for i, e in numbers}), state)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("layers.{i}.experts.{e}.fc.weight", "experts.{e}.layers.{i}.fc.weight"),
        ("layers.{i}.experts.{e}.fc.weight", "{e}.{i}.fc.weight"),
        ("a.{i}.{e}.weight", "b.{e}.{i}.weight"),
        ("a.{i}.{e}.weight", "b.{i}.{e}.weight"),
        ("layers.{i}.blocks.{e}.weight", "stages.{i}.layers.{e}.weight"),
    ],
)
@pytest.mark.parametrize("count", [2, 3])
def test_numbers_that_could_be_exchanged(old: str, new: str, count: int) -> None:
    found = found_for(old, new, count, count)
    assert list(found) == []
    assert not found.complete
    assert len(found.ambiguous) == 1
    assert len(found.ambiguous[0].names) == count**2


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2)])
def test_another_order_of_unequal_numbers_does_no_harm(first: int, second: int) -> None:
    found = found_for("layers.{i}.experts.{e}.fc.weight", "experts.{e}.layers.{i}.fc.weight", first, second)
    for i in range(first):
        for e in range(second):
            name = f"layers.{i}.experts.{e}.fc.weight"
            assert renaming(found)(name) in (name, f"experts.{e}.layers.{i}.fc.weight")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("h.{i}.moe.experts.{e}.weight", "model.layers.{i}.mlp.experts.{e}.weight"),
        ("stack.layers.{i}.x.{e}.weight", "net.layers.{i}.y.{e}.weight"),
        ("h.{i}.norm{e}.weight", "blocks.{i}.ln_{e}.weight"),
    ],
)
def test_words_tell(old: str, new: str) -> None:
    found = found_for(old, new, 2, 2)
    assert found.complete
    assert renaming(found)(old.format(i=0, e=1)) == new.format(i=0, e=1)


def test_parts_of_one_tensor_too() -> None:
    numbers = [(i, e) for i in range(2) for e in range(2)]
    state = values({f"a.{i}.{e}.qkv.weight": (12, 4) for i, e in numbers})
    model = tree({f"b.{i}.{e}.{part}.weight": (4, 4) for i, e in numbers for part in "qkv"})
    assert list(ms.suggest(model, state)) == []
