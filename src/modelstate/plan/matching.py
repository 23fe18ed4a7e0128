"""Names that nearly match: which part of a checkpoint is meant, and what would make the rest fit."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from modelstate.errors import AmbiguousKeyError
from modelstate.plan.problems import OtherNames
from modelstate.read.checkpoint import Checkpoint

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What DataParallel, torch.compile, FSDP and activation checkpointing put into names."""

Shape = tuple[int, ...] | None


def matching_part(checkpoint: Checkpoint, wanted: Collection[str], rename: Callable[[str], str]) -> Checkpoint:
    """The state dict in the checkpoint whose names, once renamed, are the model's.

    One that has more than twice as many of them as any other is clear; otherwise `AmbiguousKeyError` lists them.
    """
    containers = {"", *checkpoint.containers}
    if len(containers) == 1:
        return checkpoint
    counts = _matches(checkpoint, containers, set(wanted), rename)
    if not counts:
        # Nothing matches as it is; a prefix on either side may be in the way.
        bare = {_without_wrappers(name) for name in wanted}
        ends = bare.union(name[len(prefix) :] for name in bare for prefix in _prefixes(name))
        counts = _matches(checkpoint, containers, ends, _without_wrappers)
    if not counts:
        return checkpoint
    (best, most), *others = counts.most_common()
    if others and others[0][1] * 2 >= most:
        rivals = [(key, count) for key, count in ((best, most), *others) if count * 2 >= most]
        listed = ", ".join(f"{key or '(the whole)'!r} ({count} of {len(wanted)} names match)" for key, count in rivals)
        raise AmbiguousKeyError(
            "the checkpoint holds several state dicts that fit the model",
            where=checkpoint.source,
            found=listed,
            remedy=f"say which: key={rivals[0][0]!r}",
            candidates=rivals,
        )
    return checkpoint.select(best) if best else checkpoint


def _matches(
    checkpoint: Checkpoint, containers: Collection[str], wanted: Collection[str], rename: Callable[[str], str]
) -> Counter[str]:
    """For each container the number of names below it that are wanted."""
    counts: Counter[str] = Counter()
    for name in checkpoint:
        head = name
        while head:
            head = head.rpartition(".")[0]
            if head in containers and rename(name[len(head) + 1 :] if head else name) in wanted:
                counts[head] += 1
    return counts


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def regular_differences(
    missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]
) -> tuple[list[OtherNames], dict[str, str]]:
    """Ways in which several unexpected names become missing ones.

    A way is found by names of the same shape, and then explains all names that it fits. Returns the ways, and what
    they explain: from missing to unexpected names.
    """
    found: list[OtherNames] = []
    explained: dict[str, str] = {}
    left, over = dict(missing), dict(unexpected)
    while left and over:
        ways = (_by_prefix(left, over, "strip"), _by_prefix(over, left, "add"), _by_wrappers(left, over))
        best = max(ways, key=lambda way: len(way.pairs))
        if not best.pairs:
            break
        name = next(iter(best.pairs))
        found.append(OtherNames(name, count=len(best.pairs), difference=best.difference, rule=best.rule))
        explained |= best.pairs
        left = {name: shape for name, shape in left.items() if name not in best.pairs}
        taken = set(best.pairs.values())
        over = {name: shape for name, shape in over.items() if name not in taken}
    return found, explained


class _Way(NamedTuple):
    rule: str
    difference: str
    pairs: dict[str, str]
    """From missing to unexpected names."""


def _by_prefix(short: Mapping[str, Shape], long: Mapping[str, Shape], option: str) -> _Way:
    """The prefix that most names of `long` have more than a name of `short`."""
    votes: Counter[str] = Counter()
    for name, shape in long.items():
        votes.update(prefix for prefix in _prefixes(name) if short.get(name[len(prefix) :], ...) == shape)
    if not votes:
        return _Way("", "", {})
    prefix = votes.most_common(1)[0][0]
    pairs = {name[len(prefix) :]: name for name in long if name.startswith(prefix) and name[len(prefix) :] in short}
    if option == "add":
        pairs = {long_name: short_name for short_name, long_name in pairs.items()}
    whose = "of the checkpoint" if option == "strip" else "of the model"
    return _Way(f"ms.Prefix({option}={prefix!r})", f"the prefix {prefix!r} {whose}", pairs)


def _prefixes(name: str) -> Iterator[str]:
    at = name.find(".")
    while at >= 0:
        yield name[: at + 1]
        at = name.find(".", at + 1)


def _by_wrappers(missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]) -> _Way:
    """The wrappers whose names unexpected names have somewhere within, and missing ones have not."""
    best = _Way("", "", {})
    for wrapper in (*map(re.escape, WRAPPERS), "|".join(WRAPPERS)):
        pattern = rf"(^|\.)({wrapper}\.)+" if "|" not in wrapper else rf"(^|\.)(({wrapper})\.)+"
        pairs = {
            bare: name
            for name, shape in unexpected.items()
            if (bare := re.sub(pattern, r"\1", name)) != name and missing.get(bare, ...) == shape
        }
        if len(pairs) > len(best.pairs):
            rule = f'ms.Rename(r"{pattern}", r"\\1")'
            best = _Way(rule, f"the wrapper {wrapper.replace('|', ' or ')} within", pairs)
    return best


def nearest(name: str, names: Collection[str]) -> str:
    """The name that is spelt most like this one, if any is; empty for too many names to compare."""
    if len(names) > 2000:
        return ""
    found = get_close_matches(name, names, n=1, cutoff=0.75)
    return found[0] if found else ""
