"""Names that nearly match: which part of a checkpoint is meant, and what would make the rest fit."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches

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
        # Nothing matches as it is; a wrapper's prefix may be in the way.
        bare = {_without_wrappers(name) for name in wanted}
        counts = _matches(checkpoint, containers, bare, _without_wrappers)
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
) -> tuple[list[OtherNames], set[str], set[str]]:
    """Ways in which several unexpected names become missing ones of the same shape.

    Returns them with the names, of either side, that they explain.
    """
    found: list[OtherNames] = []
    left, over = dict(missing), dict(unexpected)
    while left and over:
        best = max(
            (_by_prefix(left, over, "strip"), _by_prefix(over, left, "add"), _by_wrappers(left, over)),
            key=lambda pairs: len(pairs[1]),
        )
        rule, pairs, difference = best
        if not pairs:
            break
        found.append(OtherNames(pairs[0][1], count=len(pairs), difference=difference, rule=rule))
        for name, source in pairs:
            left.pop(name, None)
            over.pop(source, None)
    return found, missing.keys() - left.keys(), unexpected.keys() - over.keys()


def _by_prefix(
    short: Mapping[str, Shape], long: Mapping[str, Shape], option: str
) -> tuple[str, list[tuple[str, str]], str]:
    """The prefix that most names of `long` have more than a name of `short`; pairs are (missing, unexpected)."""
    by_prefix: dict[str, list[tuple[str, str]]] = {}
    for name, shape in long.items():
        at = name.find(".")
        while at >= 0:
            rest = name[at + 1 :]
            if rest in short and short[rest] == shape:
                pair = (rest, name) if option == "strip" else (name, rest)
                by_prefix.setdefault(name[: at + 1], []).append(pair)
            at = name.find(".", at + 1)
    if not by_prefix:
        return "", [], ""
    prefix = max(by_prefix, key=lambda key: len(by_prefix[key]))
    whose = "of the checkpoint" if option == "strip" else "of the model"
    return f"ms.Prefix({option}={prefix!r})", by_prefix[prefix], f"the prefix {prefix!r} {whose}"


def _by_wrappers(
    missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]
) -> tuple[str, list[tuple[str, str]], str]:
    """The wrapper whose name most unexpected names have somewhere within, and missing ones have not."""
    best: tuple[str, list[tuple[str, str]], str] = ("", [], "")
    for wrapper in WRAPPERS:
        pattern = rf"(^|\.){re.escape(wrapper)}\."
        pairs = [
            (bare, name)
            for name, shape in unexpected.items()
            if (bare := re.sub(pattern, r"\1", name)) != name and bare in missing and missing[bare] == shape
        ]
        if len(pairs) > len(best[1]):
            rule = f'ms.Rename(r"(^|\\.){wrapper}\\.", r"\\1")'
            best = (rule, pairs, f"the wrapper {wrapper!r} within")
    return best


def nearest(name: str, names: Collection[str]) -> str:
    """The name that is spelt most like this one, if any is; empty for too many names to compare."""
    if len(names) > 2000:
        return ""
    found = get_close_matches(name, names, n=1, cutoff=0.75)
    return found[0] if found else ""
