"""Options mean the same in every process."""

from modelstate.checkpoint.open import patterns_of


def test_patterns_of_a_set_come_in_the_same_order_in_every_process() -> None:
    names = [f"{letter}.*" for letter in "hgfedcba"]
    assert patterns_of("allow_missing", set(names)) == tuple(sorted(names))
    assert patterns_of("allow_missing", names) == tuple(names)
