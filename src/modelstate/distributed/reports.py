"""What ranks tell each other where a phase has failed, and the error that each rank makes of it.

A report is JSON: the error of a rank, or the digests of one that has none. Ranks with the same error are one entry of
the error that all of them raise.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import convert, to_builtins

from modelstate import errors
from modelstate.distributed.connections import number_of, ranks_text
from modelstate.errors import (
    BackgroundCancelledError,
    DistributedError,
    ModelStateError,
)
from modelstate.problems import Problem, explain
from modelstate.process import Stopped

Report = dict[str, Any]
"""What a rank has to say, as JSON values."""
THE_CALL = "the call"
"""The `Digest.what` of the name of the function that the ranks call."""
_FIELDS = ("expected", "found", "remedy")
"""The fields of an error that stay where they are equal on all ranks."""


class Digest(msgspec.Struct, frozen=True):
    """A part of a load that must be equal on all ranks."""

    what: str
    """The name of the part: "the model"."""
    text: str
    """What the rank has, for the error."""
    number: int
    """A number of 62 bits that depends on the whole of it."""

    @classmethod
    def of(cls, what: str, text: str, parts: Iterable[object]) -> Digest:
        """Returns the digest of the texts of `parts`."""
        return cls(what, text, number_of(parts))


def report_of(error: BaseException | None, digests: Sequence[Digest] = ()) -> Report:
    """Returns the report of this rank."""
    if error is None:
        return {"digests": [[digest.what, digest.text, digest.number] for digest in digests]}
    if isinstance(error, Stopped):
        error = BackgroundCancelledError("this rank has cancelled it", remedy="repeat the call")
    if not isinstance(error, ModelStateError) or not error.has_fields:
        text = " ".join(": ".join(filter(None, (type(error).__name__, str(error)))).split())
        blank = dict.fromkeys(("where", *_FIELDS), "")
        return {"error": "DistributedError", "what": text, **blank, "names": [], "problems": []}
    return {
        "error": type(error).__name__,
        **{name: getattr(error, name) for name in ("what", "where", *_FIELDS)},
        "names": list(error.names),
        "problems": to_builtins(error.problems),
    }


def error_of(failed: Mapping[int, Report], what: str, effect: str, ranks: int) -> ModelStateError:
    """Returns what the reports of the ranks that have failed say together. Its class is that of the first of them.

    Args:
        failed: The reports of these ranks.
        what: The name of the phase.
        effect: What the error leaves.
        ranks: The number of all ranks.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, report in failed.items():
        groups[json.dumps(report)].append(rank)
    first = next(iter(failed.values()))
    kind = getattr(errors, first["error"], DistributedError)
    texts = []
    found: list[Problem] = []
    for text, of_group in groups.items():
        report = json.loads(text)
        where = f"rank {of_group[0]}" if len(of_group) == 1 else f"ranks {ranks_text(of_group)}"
        new = convert(report["problems"], list[Problem])
        found += [problem for problem in new if problem not in found]
        texts.append(f"{where}: {report['what']}" if not new else f"{where}:\n{explain(new)}")
    common = [name for name in _FIELDS if len({report[name] for report in failed.values()}) == 1]
    fields = {name: first[name] for name in common}
    where = first["where"] if len(groups) == 1 else ""
    text = "\n".join([f"{what} failed on {len(failed)} of {ranks} ranks; {effect}", *texts])
    error: ModelStateError = kind(text, where=where, **fields, names=first["names"], problems=found)
    return error


def difference_of(reports: Mapping[int, Report], call: str) -> DistributedError:
    """Returns the error for ranks that have ended a phase with different digests, in the function `call`."""
    values: dict[str, dict[int, list[int]]] = {}
    texts: dict[tuple[str, int], str] = {}
    for rank, report in reports.items():
        for what, text, number in report["digests"]:
            values.setdefault(what, {}).setdefault(number, []).append(rank)
            texts[what, number] = text
    # Other versions of modelstate may compare other parts.
    differing = {what: found for what, found in values.items() if [len(reports)] != [*map(len, found.values())]}

    def found(parts: Iterable[str]) -> str:
        groups = ((part, number, ranks) for part in parts for number, ranks in differing[part].items())
        return "; ".join(f"ranks {ranks_text(ranks)}: {texts[part, number]}" for part, number, ranks in groups)

    if THE_CALL in differing:
        return DistributedError(
            f"the ranks are not in the same call: this one is in {call}; nothing has been changed",
            expected="the same calls in the same order on all ranks of the mesh",
            found=found([THE_CALL]),
            remedy="call modelstate's functions in the same order on every rank, and in one thread at a time",
        )
    return DistributedError(
        f"the ranks call {call} differently: {' and '.join(differing)} differ; nothing has been changed",
        expected="the same on all ranks of the mesh",
        found=found(differing),
        remedy=f"call {call} with the same model and the same other arguments on every rank",
    )
