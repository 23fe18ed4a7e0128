"""Whether it is certain which number of a name is which of another: layers of experts, or experts of layers."""

from collections.abc import Iterator
from itertools import combinations

from modelstate.plan.suggest.concepts import concepts, shared
from modelstate.plan.suggest.skeletons import Skeleton

_SAME_WORD, _SAME_KIND = 0.5, 0.5
_MARGIN = 0.25


def order_is_told(source: Skeleton, target: Skeleton) -> bool:
    """Whether the words before the numbers tell, where the numbers could as well be exchanged."""
    if len(source.varied) != len(target.varied):
        return True
    return all(_is_told(source, target, pair) for pair in _exchangeable(source))


def _exchangeable(skeleton: Skeleton) -> Iterator[tuple[int, int]]:
    """Pairs of numbers, of those that vary, that can be exchanged with nothing looking different."""
    content = {ranks: (leaf.shape, leaf.kind) for ranks, leaf in skeleton.leaves.items()}
    for one, other in combinations(range(len(skeleton.varied)), 2):
        if all(content.get(_exchanged(ranks, one, other)) == what for ranks, what in content.items()):
            yield one, other


def _exchanged(ranks: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    changed = list(ranks)
    changed[one], changed[other] = changed[other], changed[one]
    return tuple(changed)


def _is_told(source: Skeleton, target: Skeleton, pair: tuple[int, int]) -> bool:
    (one, other), (first, second) = (tuple(side.varied[at] for at in pair) for side in (source, target))
    before, after = source.text.split("#"), target.text.split("#")
    straight = _alike(before, one, after, first) + _alike(before, other, after, second)
    crossed = _alike(before, one, after, second) + _alike(before, other, after, first)
    return straight - crossed >= _MARGIN


def _alike(before: list[str], one: int, after: list[str], other: int) -> float:
    """How much what stands before a number has in common with what stands before another."""
    here, there = _words(before[one]), _words(after[other])
    score = shared(frozenset().union(*map(concepts, here)), frozenset().union(*map(concepts, there)))
    if here and there and here[-1] == there[-1]:
        score += _SAME_WORD
    return score + (_SAME_KIND if _is_whole(before, one) == _is_whole(after, other) else 0.0)


def _words(text: str) -> list[str]:
    return [part for part in text.lower().split(".") if part]


def _is_whole(texts: list[str], at: int) -> bool:
    return texts[at][-1:] in ("", ".") and texts[at + 1][:1] in ("", ".")
