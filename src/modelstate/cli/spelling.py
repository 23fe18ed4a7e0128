"""Translates the remedies of errors and problems, which are Python, to options of the command line.

The translation uses the classes and fields of errors, so that it does not depend on the text of a message.
"""

import ast
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import click

from modelstate import errors
from modelstate import problems as causes
from modelstate.problems import MOST_NAMES, SUGGEST, Problem, glob_patterns, grouped

_LORA_IN_PYTHON = (
    "an adapter is merged in Python: "
    "modelstate.load(model, modelstate.open([BASE, ADAPTER], combine=modelstate.merge.LoRA()))"
)
_ARGUMENT = re.compile(r"\b([a-z]\w*)=(?=[\s:;,]|$)")
"""The name of an argument in the text of an error, without a value."""
_UNIT = re.compile("_(seconds|bytes)$")
_IN_PYTHON = "a transform is given in Python: modelstate.load(model, source, transform=...)"


def of_error(error: BaseException, debug: bool = False) -> list[str]:
    """Returns what to do about an error, one line each; empty if the error's own remedy fits the command line."""
    if isinstance(error, errors.PlanError):
        return of_problems(error.problems)
    if isinstance(error, errors.ForbiddenGlobalError) and error.allow:
        allowing = " ".join(option("--allow", name) for name in error.allow)
        return [f"{allowing} if you trust them", "--skip-forbidden"]
    if isinstance(error, errors.ForbiddenGlobalError) and "skip_forbidden" in error.remedy:
        return ["--skip-forbidden"]
    if isinstance(error, errors.SourceNotFoundError) and "modelstate store ls" in error.remedy:
        return ["modelstate store restore DIR PATH writes one object of it as a file; give the path of this file"]
    if isinstance(error, errors.AmbiguousCheckpointError) and error.candidates and "key=" in error.remedy:
        return [option("--key", next((key for key, _ in error.candidates if key), "KEY"))]
    if isinstance(error, errors.KeyNotFoundError) and "iterate" in error.remedy:
        return ["modelstate inspect SOURCE lists the names"]
    if isinstance(error, errors.KeyNotFoundError):
        return ["--key KEY, or leave it out"] if "key=" in error.remedy else []
    if isinstance(error, errors.NothingInCommonError):
        return ["--key twice, for A and for B; or --rename PATTERN=REPLACEMENT, which applies to the names of A"]
    if isinstance(error, errors.UnsupportedTensorError) and "skip_forbidden" in error.remedy:
        return ["--skip-forbidden, without the --allow of it"]
    if isinstance(error, errors.PlacementError):
        return [_IN_PYTHON]
    if isinstance(error, errors.MemoryBudgetError) and _has("--max-memory"):
        return ["--max-memory of as many bytes, or leave it out"]
    if isinstance(error, errors.RuleError) and causes.NeedsModel.remedy in str(error):
        return ["--model MODEL: the function that builds the model, as to `modelstate plan`"]
    if isinstance(error, errors.DamagedCheckpointError) and "store.restore(" in error.remedy:
        return [
            "another step" + (", or leave out --step: the newest one that is whole is taken" if _has("--step") else "")
        ]
    if isinstance(error, errors.OptionError) and "metrics=" in error.expected:
        return ["--metric of a metric that the checkpoints have, or another rule than --best"]
    if isinstance(error, errors.TargetExistsError):
        return ["another path, or --overwrite to replace it"]
    if isinstance(error, errors.ChecksumError) and "modelstate.save" in error.remedy:
        return ["modelstate convert SOURCE PATH.safetensors writes a file that keeps checksums"]
    if isinstance(error, errors.ModelCodeError) and not debug:
        return ["--debug shows the traceback of the cause"]
    return []


def _has(name: str) -> bool:
    """Whether the command that runs has the option; True outside of a command."""
    context = click.get_current_context(silent=True)
    return context is None or any(name in parameter.opts for parameter in context.command.params)


def in_options(text: str) -> str:
    """Names the options of the command that runs in place of arguments: `poll_seconds=` becomes `--poll`."""
    context = click.get_current_context(silent=True)
    known = set[str]() if context is None else {name for parameter in context.command.params for name in parameter.opts}

    def in_command(match: re.Match[str]) -> str:
        names = [f"--{name.replace('_', '-')}" for name in (match[1], _UNIT.sub("", match[1]))]
        return next((name for name in names if name in known), match[0])

    return _ARGUMENT.sub(in_command, text)


def of_problems(problems: Sequence[Problem]) -> list[str]:
    """Returns what to do about the problems of a plan, one line each."""
    groups = grouped(problems)
    lines = [line for cause, members in groups if cause in _PROBLEMS for line in _PROBLEMS[cause](members)]
    if {causes.Missing, causes.Unexpected} <= {cause for cause, _ in groups}:
        lines.insert(0, f"{SUGGEST}, which works out rules where only names differ")
    return list(dict.fromkeys(lines))


def as_text(lines: Sequence[str]) -> str:
    """Returns the text to print below an error; empty for no lines."""
    if len(lines) == 1:
        return f"\n  on the command line: {lines[0]}"
    return "\n  on the command line:" + "".join(f"\n    {line}" for line in lines) if lines else ""


def rule_as_options(code: str) -> str | None:
    """Returns the option for a rule in a remedy (`ms.rules.Prefix(strip='module.')`); None if there is no option."""
    call = ast.parse(code, mode="eval").body
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return None
    is_regex = bool(call.args) and isinstance(call.args[0], ast.Call)  # re.compile(...)
    positional = [ast.literal_eval(arg.args[0] if isinstance(arg, ast.Call) else arg) for arg in call.args]
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    if call.func.attr == "Prefix" and named.keys() in ({"strip"}, {"add"}):
        ((action, prefix),) = named.items()
        return option(f"--{action}-prefix", prefix)
    if call.func.attr == "Rename" and len(positional) == 2 and "=" not in positional[1]:
        return option("--rename-regex" if is_regex else "--rename", "=".join(positional))
    return None


def option(name: str, value: str) -> str:
    """Returns an option with its value, as a shell takes it."""
    # A value that begins with a dash would be taken for an option.
    return f"{name}={shlex.quote(value)}" if value.startswith("-") else f"{name} {shlex.quote(value)}"


def _options(name: str, members: Sequence[Problem]) -> str:
    """Returns the options that allow the names of problems."""
    return " ".join(option(name, pattern) for pattern in glob_patterns(member.name for member in members))


def _misshapen(members: Sequence[causes.WrongShape]) -> list[str]:
    if len(members) > MOST_NAMES:
        return []
    ignored = " ".join(option("--ignore", member.seen_by_rules) for member in members)
    return [f"{ignored} {_options('--allow-missing', members)}, to keep the model's own values for them"]


def _rules(members: Sequence[causes.OtherNames]) -> list[str]:
    options = [rule_as_options(problem.rule) for problem in members]
    return [" ".join(filter(None, options))] if all(options) else []


def _casts(members: Sequence[causes.WrongDtype]) -> list[str]:
    from modelstate.torch_compat.dtypes import dtype_named

    lossy = [member.expected for member in members if member.how == "lossy"]
    floats = [name for name in lossy if (dtype := dtype_named(name)) is not None and dtype.is_floating_point]
    lines = [f"--dtype {floats[0]}"] if floats else []
    return lines if len(floats) == len(members) else [*lines, _IN_PYTHON]


def _dequantized(members: Sequence[causes.QuantizedWeight]) -> list[str]:
    has_rules = any(member.rules for member in members)
    return ["--rules MODULE:NAME, for a module of Python with NAME = [...], the rules"] if has_rules else []


def _untied(members: Sequence[causes.TieConflict]) -> list[str]:
    names = members[0].names_for_rules or (members[0].name, *members[0].others)
    return [f"{' or '.join(option('--ignore', name) for name in names)}, for the value that is not needed"]


def _initialised(members: Sequence[causes.Missing | causes.Uninitialised]) -> list[str]:
    can_initialise = all(member.initialiser for member in members)
    return ["--init-missing, to have the model initialise them"] if can_initialise else []


_PROBLEMS: dict[type[Problem], Callable[[Sequence[Any]], list[str]]] = {
    causes.Missing: lambda members: [
        *([_options("--allow-missing", kept)] if (kept := [member for member in members if member.has_values]) else []),
        *_initialised(members),
    ],
    causes.Unexpected: lambda members: [_options("--allow-unexpected", members)],
    causes.OneShard: lambda members: [f"SOURCE {shlex.quote(member.index)}" for member in members if member.index],
    causes.UnmergedAdapter: lambda _: [_LORA_IN_PYTHON],
    causes.BufferConflict: lambda members: [_options("--allow-unexpected", members)],
    causes.NothingFits: lambda _: ["narrower patterns for --allow-missing and --allow-unexpected"],
    causes.OtherNames: _rules,
    causes.NameClash: lambda _: ["a narrower --strip-prefix, --add-prefix or --rename"],
    causes.WrongShape: _misshapen,
    causes.WrongDtype: _casts,
    causes.QuantizedCast: lambda _: ["leave out --dtype"],
    causes.QuantizedIntoPlain: lambda _: ["leave out --no-skeleton, and name a function that builds the model"],
    causes.QuantizedWeight: _dequantized,
    causes.TieConflict: _untied,
    causes.Uninitialised: lambda members: [
        *_initialised(members),
        "--no-skeleton, if the factory does not build on meta by itself",
    ],
}
