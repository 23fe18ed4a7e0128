"""The rule for the names in which transformers saves its models, by itself: without transformers."""

import random

import torch

import modelstate as ms
from modelstate.rules.transformers_mapping import TransformersMapping


def names_in_order(names: list[str]) -> list[str]:
    """The order in which a mapping looks at names."""
    seen: list[str] = []

    class Recorder:
        def rename_source_key(self, name: str) -> tuple[str, None]:
            seen.append(name)
            return name, None

        def __deepcopy__(self, _: object) -> "Recorder":
            return self

    mapping = TransformersMapping("Model", (Recorder(),), (), {}, "", None)
    ms.rules.Rules([mapping]).apply(dict.fromkeys(names, torch.ones(1)))
    return seen


def test_numbers_are_in_the_order_of_their_values() -> None:
    names = ["a", "a.0.w", "a.2.w", "a.10.w", "a.b", "a.x2", "a.x10", "a.x10.y", "b1", "b" + "2" * 5000]
    for seed in range(5):
        shuffled = random.Random(seed).sample(names, len(names))
        assert names_in_order(shuffled) == names
