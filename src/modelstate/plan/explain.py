"""Problems as text: grouped by their cause, a few lines each, with what to do next."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from modelstate.errors import ModelCodeError, ModelStateError, PlanError
from modelstate.plan.problems import IdlePattern, Missing, Problem, Unexpected, UnmergedAdapter
from modelstate.words import printable

_SHOWN = 8
SUGGEST = "modelstate suggest MODEL FILE"
"""The command that works out rules."""
_RULES_FROM_SUGGEST = f"ms.suggest(model, source) works out rules (`{SUGGEST}`)"
_OF_A_BASE = "open the base with the adapter; "


def grouped(problems: Sequence[Problem]) -> list[tuple[type[Problem], list[Problem]]]:
    """Problems of one class together, in the order in which the classes first appear.

    What others may follow from comes first: a rule that matches nothing leaves all its names missing and unexpected.
    """
    groups: dict[type[Problem], list[Problem]] = {}
    for problem in problems:
        groups.setdefault(type(problem), []).append(problem)
    return sorted(groups.items(), key=lambda group: group[0] is not IdlePattern)


def _to_do_before(causes: Collection[type[Problem]], suggest: str) -> dict[type[Problem], str]:
    """What to try where several causes come together, before what is to be done about each alone."""
    if UnmergedAdapter in causes:
        return {Missing: _OF_A_BASE}
    return {Missing: f"if the names below are these in another spelling, {suggest}; "} if Unexpected in causes else {}


def explain(
    problems: Sequence[Problem],
    remedies: Mapping[type[Problem], str] | None = None,
    suggest: str = _RULES_FROM_SUGGEST,
) -> str:
    """All problems on a screen.

    `remedies` replace the problems' own; `suggest` says how rules are worked out, in the words of the caller.
    """
    lines = []
    groups = grouped(problems)
    chosen, before = remedies or {}, _to_do_before([cause for cause, _ in groups], suggest)
    for cause, members in groups:
        lines.append(f"  {cause.title} ({len(members)}):")
        lines += [f"    {problem.line()}" for problem in members[:_SHOWN]]
        if len(members) > _SHOWN:
            lines.append(f"    ... and {len(members) - _SHOWN} more")
        lines += [
            f"    to do: {chosen.get(cause) or before.get(cause, '') + cause.remedy_for(members)}",
            f"    more: modelstate explain {cause.page}",
        ]
    return "\n".join(lines)


def plan_error(
    target: str,
    source: str,
    problems: Sequence[Problem],
    remedies: Mapping[type[Problem], str] | None = None,
    suggest: str = _RULES_FROM_SUGGEST,
) -> PlanError:
    """The error that a plan with problems raises."""
    noun = "problem" if len(problems) == 1 else "problems"
    return PlanError(
        f"cannot load {source} into {target}; nothing has been changed. {len(problems)} {noun}:\n"
        f"{explain(problems, remedies, suggest)}",
        problems=problems,
    )


@contextmanager
def model_errors(what: str, model: object) -> Iterator[None]:
    """Around code of a model: what it raises becomes a `ModelCodeError`."""
    try:
        yield
    except ModelStateError:
        raise
    except Exception as error:
        raise ModelCodeError(
            f"{what} raised; nothing has been changed",
            where=type(model).__name__,
            found=f"{type(error).__name__}: {error}",
            remedy="see the traceback of the cause",
        ) from error


def one_line(error: Exception) -> str:
    """The text of an error without its place. Of an error that is not modelstate's, its class and its text."""
    if not isinstance(error, ModelStateError) or not error.has_fields:
        return printable(" ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split()))
    fields = [f"{what} {value}" for what, value in (("expected", error.expected), ("found", error.found)) if value]
    text = error.what + (f" ({', '.join(fields)})" if fields else "") + (f"; {error.remedy}" if error.remedy else "")
    return printable(text.replace("\n", " "))
