"""Names that nearly match: which part of a checkpoint is meant, and what a misspelt name may have meant."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches

import numpy as np

from modelstate.errors import AmbiguousKeyError
from modelstate.plan.differences import prefixes, without_wrappers
from modelstate.read.checkpoint import Checkpoint


def matching_part(
    checkpoint: Checkpoint, wanted: Collection[str], renamings: Sequence[Callable[[str], str]]
) -> Checkpoint:
    """The state dict in the checkpoint whose names, once renamed in one of these ways, are the model's.

    One that has more than twice as many of them as any other is clear; otherwise `AmbiguousKeyError` lists them.
    """
    if not checkpoint:
        return _part_of_arrays(checkpoint, wanted)
    containers = {"", *checkpoint.containers}
    if len(containers) == 1:
        return checkpoint
    exact: Counter[str] = Counter()
    for rename in renamings:
        exact |= _matches(checkpoint, containers, set(wanted), rename)
    # A wrapper's prefix may be in the way, on either side.
    bare = _matches(checkpoint, containers, {without_wrappers(name) for name in wanted}, without_wrappers)
    counts = exact | bare
    if not counts:
        ends = {name[len(prefix) :] for name in wanted for prefix in prefixes(name)}
        counts = _matches(checkpoint, containers, ends, without_wrappers)
    if not counts:
        return checkpoint
    best, most = max(counts.items(), key=lambda item: (item[1], exact[item[0]], len(item[0])))
    rivals = {
        key: count
        for key, count in counts.items()
        if count * 2 >= most and not (not exact[key] and best.startswith(f"{key}." if key else ""))
    }
    rivals[best] = most
    if len(rivals) > 1:
        listed = ", ".join(
            f"{key or '(the whole)'!r} ({count} of {len(wanted)} names match)" for key, count in rivals.items()
        )
        raise AmbiguousKeyError(
            "the checkpoint holds several state dicts that fit the model",
            where=checkpoint.source,
            found=listed,
            remedy=f"say which: key={best!r}",
            candidates=tuple(rivals.items()),
        )
    return checkpoint.select(best) if best else checkpoint


def _part_of_arrays(checkpoint: Checkpoint, wanted: Collection[str]) -> Checkpoint:
    """In a checkpoint without tensors, the mapping whose NumPy arrays have the most names of the model.

    It cannot be loaded. It is selected so that the problems are about its arrays, as those of a flat mapping are.
    """
    values = checkpoint.flat.values
    bare = {without_wrappers(name) for name in wanted}
    counts: Counter[str] = Counter()
    waiting = [(path, value) for path, value in values.items() if isinstance(value, Mapping)]
    if any(name in values for name in wanted):
        return checkpoint
    while waiting:
        path, value = waiting.pop()
        for key, item in value.items():
            if isinstance(item, Mapping):
                waiting.append((f"{path}.{key}", item))
            elif isinstance(item, np.ndarray) and isinstance(key, str) and without_wrappers(key) in bare:
                counts[path] += 1
    return checkpoint.select(counts.most_common(1)[0][0]) if counts else checkpoint


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


def nearest(name: str, names: Collection[str]) -> str:
    """The name that is spelt most like this one, if any is; empty for too many names to compare."""
    if len(names) > 2000:
        return ""
    found = get_close_matches(name, names, n=1, cutoff=0.75)
    return found[0] if found else ""
