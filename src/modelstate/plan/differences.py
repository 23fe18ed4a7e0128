"""Regular differences between the names of a checkpoint and those of a model, and the rules that take them back."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from modelstate.plan.problems import OtherNames
from modelstate.plan.rules.known import WRAPPERS
from modelstate.plan.rules.names import Prefix, Rename
from modelstate.plan.rules.rule import Rule, as_code

_MOST_WAYS = 8
_MOST_HEADS = 12

Shape = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class _Way:
    """A rule, and what it explains."""

    rule: Rule
    difference: str
    pairs: dict[str, str]
    """From missing to unexpected names."""
    narrower: tuple[Rule, ...] = ()
    """Rules that do the same to fewer names, for where the first would touch others."""


def regular_differences(
    missing: Mapping[str, Shape], unexpected: Mapping[str, Shape], fitting: Collection[str] = ()
) -> tuple[list[OtherNames], dict[str, str]]:
    """Ways in which several unexpected names become missing ones.

    A way is found by names of the same shape, and then explains all names that it fits. The rules work together, in
    their order, and leave alone the names that are `fitting` already. Returns the ways, and what they explain: from
    missing to unexpected names.
    """
    ways: list[_Way] = []
    left, over = dict(missing), dict(unexpected)
    while left and over and len(ways) < _MOST_WAYS:
        found = (_strip(left, over), _add(left, over), _unwrap(left, over), _wrap(left, over), _replace(left, over))
        best = max(found, key=lambda way: len(way.pairs))
        if not best.pairs or (len(best.pairs) == 1 and (ways or len(left) > 3)):
            break  # one name of many that ends like another is no regularity
        ways.append(best)
        taken = set(best.pairs.values())
        left = {name: shape for name, shape in left.items() if name not in best.pairs}
        over = {name: shape for name, shape in over.items() if name not in taken}
    ways = _working_together(ways, fitting)
    explained = {name: source for way in ways for name, source in way.pairs.items()}
    problems = [
        OtherNames(next(iter(way.pairs)), count=len(way.pairs), difference=way.difference, rule=as_code(way.rule))
        for way in ways
    ]
    return problems, explained


def _working_together(ways: list[_Way], fitting: Collection[str]) -> list[_Way]:
    """The ways with rules that do not touch what fits already, or what the others explain; without such, left out."""
    kept: list[_Way] = []
    for way in ways:
        others = [other for other in ways if other is not way]
        untouchable = {name for other in others for pair in other.pairs.items() for name in pair} | set(fitting)
        for rule in (way.rule, *way.narrower):
            right = all(rule.rename(source) == name for name, source in way.pairs.items())
            if right and all(rule.rename(name) is None for name in untouchable):
                kept.append(_Way(rule, way.difference, way.pairs))
                break
    return kept


def _strip(missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]) -> _Way:
    """The prefix that most unexpected names have more than a missing one."""
    prefix, pairs = _best_prefix(missing, unexpected)
    narrower = _narrowed(rf"^{re.escape(prefix)}", pairs, "")
    return _Way(Prefix(strip=prefix or "."), f"the prefix {prefix!r} of the checkpoint", pairs, narrower)


def _add(missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]) -> _Way:
    """The prefix that most missing names have more than an unexpected one."""
    prefix, turned = _best_prefix(unexpected, missing)
    narrower = _narrowed("^", turned, prefix.replace("\\", r"\\"))
    pairs = {name: source for source, name in turned.items()}
    return _Way(Prefix(add=prefix or "."), f"the prefix {prefix!r} of the model", pairs, narrower)


def _replace(missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]) -> _Way:
    """The prefix of unexpected names, and the one of missing names in its place, by which most of them differ."""
    by_rest: dict[str, list[str]] = {}
    for name in missing:
        for prefix in prefixes(name):
            by_rest.setdefault(name[len(prefix) :], []).append(prefix)
    votes: Counter[tuple[str, str]] = Counter()
    for name, shape in unexpected.items():
        for prefix in prefixes(name):
            rest = name[len(prefix) :]
            votes.update((prefix, put) for put in by_rest.get(rest, [])[:16] if missing[put + rest] == shape)
    if not votes or max(votes.values()) < 2:  # two single names may be anything to each other
        return _Way(Prefix(strip="."), "", {})
    strip, add = max(votes, key=lambda pair: (votes[pair], -len(pair[0])))
    turned = {name: add + name[len(strip) :] for name in unexpected if name.startswith(strip)}
    pairs = {put: name for name, put in turned.items() if put in missing}
    narrower = _narrowed(rf"^{re.escape(strip)}", (name[len(strip) :] for name in pairs.values()), add)
    return _Way(Prefix(strip, add), f"the prefix {strip!r} of the checkpoint for {add!r}", pairs, narrower)


def _best_prefix(short: Mapping[str, Shape], long: Mapping[str, Shape]) -> tuple[str, dict[str, str]]:
    votes: Counter[str] = Counter()
    for name, shape in long.items():
        votes.update(prefix for prefix in prefixes(name) if short.get(name[len(prefix) :], ...) == shape)
    if not votes:
        return "", {}
    prefix = votes.most_common(1)[0][0]
    rests = {name[len(prefix) :]: name for name in long if name.startswith(prefix)}
    return prefix, {rest: name for rest, name in rests.items() if rest in short}


def _narrowed(start: str, rests: Iterable[str], replacement: str) -> tuple[Rule, ...]:
    """Rules for just the names that go on, behind `start`, as these do."""
    rules: list[Rule] = []
    for parts in ({rest.partition(".")[0] for rest in rests}, set(rests)):
        if parts and len(parts) <= _MOST_HEADS:
            choice = "|".join(sorted(map(re.escape, parts)))
            rules.append(Rename(re.compile(rf"{start}(?=(?:{choice})(?:\.|$))"), replacement))
    return tuple(rules)


def prefixes(name: str) -> Iterator[str]:
    """All prefixes of a dotted name that end with a dot."""
    at = name.find(".")
    while at >= 0:
        yield name[: at + 1]
        at = name.find(".", at + 1)


def without_wrappers(name: str, wrappers: Collection[str] = WRAPPERS) -> str:
    """The name without the parts that wrappers have put into it."""
    return ".".join(part for part in name.split(".") if part not in wrappers)


def _unwrap(missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]) -> _Way:
    """The wrappers that most unexpected names have somewhere within, and missing ones have not."""
    best = _Way(Prefix(strip="."), "", {})
    for wrappers in _choices(unexpected):
        pairs = _pairs_without(wrappers, missing, unexpected)
        if len(pairs) > len(best.pairs):
            rule = Rename(re.compile(rf"(^|\.)(?:(?:{'|'.join(wrappers)})\.)+"), r"\1")
            best = _Way(rule, f"{' or '.join(map(repr, wrappers))} within the names of the checkpoint", pairs)
    return best


def _wrap(missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]) -> _Way:
    """The wrapper that most missing names have somewhere within, and unexpected ones have not."""
    best = _Way(Prefix(add="."), "", {})
    for (wrapper,) in _choices(missing, several=False):
        turned = _pairs_without((wrapper,), unexpected, missing)
        if len(turned) <= len(best.pairs):
            continue
        # Where it belongs: behind these parts of names, whatever the number of the layer.
        heads = {name.partition(f"{wrapper}.")[0] for name in turned.values()}
        places = {re.sub(r"(?<=\\.)\d+(?=\\.)", r"\\d+", re.escape(head)) for head in heads}
        if len(places) <= _MOST_HEADS:
            rule = Rename(re.compile(f"^({'|'.join(sorted(places))})"), rf"\1{wrapper}.")
            pairs = {name: source for source, name in turned.items()}
            best = _Way(rule, f"{wrapper!r} within the names of the model", pairs)
    return best


def _choices(names: Iterable[str], several: bool = True) -> list[tuple[str, ...]]:
    """Each wrapper that is there, and all of them together."""
    parts = {part for name in names for part in name.split(".")}
    present = tuple(wrapper for wrapper in WRAPPERS if wrapper in parts)
    single: list[tuple[str, ...]] = [(wrapper,) for wrapper in present]
    return [*single, present] if several and len(present) > 1 else single


def _pairs_without(
    wrappers: Collection[str], bare: Mapping[str, Shape], wrapped: Mapping[str, Shape]
) -> dict[str, str]:
    """From names of `bare` to those of `wrapped` that are the same but for these wrappers, and of the same shape."""
    pairs: dict[str, str] = {}
    for name, shape in wrapped.items():
        short = without_wrappers(name, wrappers)
        if short != name and bare.get(short, ...) == shape:
            pairs[short] = name
    return pairs
