"""The problems that a plan can have, and the text that reports them: grouped by kind, with remedies.

`ProblemKind` is a table: each kind has a title, a page, a remedy and the format of a line. A `Problem` has a kind, the
name of a tensor, and its facts. Remedies are written twice, for Python and for the command line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

import msgspec

from modelstate.errors import ModelStateError, PlanError, ProblemGroup, Remedy, RuleError, render
from modelstate.text_format import folded, listed, printable

GATHER = (
    "gather them first: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
    "torch.distributed.checkpoint.state_dict on every rank, or tensor.full_tensor() for one of them"
)
"""The remedy for a DTensor that would be read."""

REAL = "make them outside of FakeTensorMode: a FakeTensor has a shape and no values"
"""The remedy for a FakeTensor that would be read or filled."""

TRANSFORM_IN_PYTHON = "a transform is given in Python: modelstate.load(model, source, transform=...)"
"""The remedy on the command line where only a transform helps."""

OPTIMIZER_RULES = "give the rules by which the model's names have changed, which optimizers follow: rules=[...]"
"""The remedy for the state of an optimizer that has other names."""

LOSES_VALUES, CHANGES_KIND = "casting loses values", "casting changes their kind"
"""Why a cast is refused."""

MOST_NAMES = 8
"""The names of more tensors than this are not written out in a remedy."""

Fact: TypeAlias = tuple[int, ...] | int | str | None


class Problem(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A problem that prevents a plan from being executed. The kind says which of the facts there are."""

    kind: ProblemKind
    name: str
    """The name in the model, or in the checkpoint if the model has none."""
    expected: Fact = None
    """The shape, dtype or size in the model."""
    found: Fact = None
    """The shape, dtype, size or class in the checkpoint; or the argument or rule that does not apply."""
    why: str = ""
    others: tuple[str, ...] = ()
    """Other names, rules or shards that the problem is about."""
    rules: tuple[str, ...] = ()
    """Rules that solve the problem, as code that can be pasted."""
    options: str = ""
    """The same rules as options of the command line; empty without such options."""
    remedy: str = ""
    """What to do about this problem, where the remedy depends on it."""
    initialiser: str | None = None
    """The methods of the model that initialise the tensor, empty if there are none; None if they are not needed."""
    has_values: bool = True
    """Whether the tensor of the model has values that it could keep, because it is not on meta."""
    name_for_rules: str = ""
    """The name that rules see, where it is another."""

    @property
    def seen_by_rules(self) -> str:
        """The name that rules see."""
        return self.name_for_rules or self.name

    def line(self) -> str:
        """Returns the problem as one line of text."""
        line = self.kind.line
        return line(self) if callable(line) else line.format(self) or ": ".join(filter(None, (self.name, self.why)))

    def as_dict(self) -> dict[str, object]:
        """Returns the facts that the problem has, with its kind, and its remedy in Python and on the command line."""
        defaults = zip(self.__struct_fields__[2:], self.__struct_defaults__, strict=True)
        facts = {field: getattr(self, field) for field, default in defaults if getattr(self, field) != default}
        remedies = remedies_for(self.kind, [self])
        texts = {"remedy": join_remedies(remedies), "options": join_remedies(remedies, command_line=True)}
        return {"problem": self.kind.name.lower(), "name": self.name, **facts, **texts}


_WILDCARD = re.compile(r"([*?[])")


def glob_patterns(names: Iterable[str]) -> list[str]:
    """Returns glob patterns that match these names: the names where they are few, or wildcards in place of numbers.

    Where the names still differ, the patterns are the beginnings that several names have.
    """
    patterns = list(dict.fromkeys(_WILDCARD.sub(r"[\1]", name) for name in names))
    if len(patterns) > MOST_NAMES:
        patterns = folded(patterns)
    depth = max((pattern.count(".") for pattern in patterns), default=0)
    while len(patterns) > MOST_NAMES and depth:
        parts = [pattern.split(".") for pattern in patterns]
        patterns = list(dict.fromkeys(".".join([*part[:depth], "*"] if len(part) > depth else part) for part in parts))
        depth -= 1
    return patterns


def option(name: str, *values: str) -> str:
    """Returns an option of the command line with each of its values, as a shell takes it."""
    # A value that begins with a dash would be taken for an option.
    return " ".join(f"{name}{'=' if value.startswith('-') else ' '}{shlex.quote(value)}" for value in values)


def allowing(argument: str, problems: Iterable[Problem], why: str) -> Remedy:
    """Returns the argument that allows the names of these problems. `why` says what for."""
    patterns = glob_patterns(problem.name for problem in problems)
    return Remedy(f"{why}: {argument}={patterns!r}", f"{option('--' + argument.replace('_', '-'), *patterns)}, {why}")


def casting(problems: Sequence[Problem]) -> str:
    """Returns how to cast the tensors of these problems, as code; empty text for many."""
    if len(problems) > MOST_NAMES:
        return ""
    names = {problem.seen_by_rules: problem.expected for problem in problems}
    rules = ", ".join(f"ms.rules.Cast({name!r}, {dtype!r})" for name, dtype in names.items())
    kinds = any(problem.why == CHANGES_KIND for problem in problems)
    meant = "where the numbers mean the same, to cast them" if kinds else "to cast these"
    return f"{meant}: rules=[{rules}]"


# The remedies that depend on the problems.

KEEP = "to keep the model's own values for them"


def _missing(problems: Sequence[Problem]) -> list[Remedy]:
    kept = [problem for problem in problems if problem.has_values]
    remedies = [allowing("allow_missing", kept, KEEP)] if kept else []
    return [*remedies, *_initialising([problem for problem in problems if problem.initialiser is not None])]


def _initialising(problems: Sequence[Problem]) -> list[Remedy]:
    remedies = []
    if any(problem.initialiser for problem in problems):
        can_initialise = all(problem.initialiser for problem in problems)
        remedies.append(
            Remedy(
                "to have the model initialise them: init_missing=True",
                "--init-missing, to have the model initialise them" if can_initialise else "",
            )
        )
    if name := next((problem.name for problem in problems if not problem.initialiser), ""):
        how = f"no method of the model initialises {name} (for DTensors they are not called)"
        rule = f"rules=[ms.rules.Fill({name!r}, value)]"
        remedies.append(Remedy(f"{how}: {rule} without allow_missing", f"{how}: --rules of a module with {rule}"))
    return remedies


def _one_shard(problems: Sequence[Problem]) -> list[Remedy]:
    index = next((problem.found for problem in problems if problem.found), None)
    if index is None:
        return [Remedy("get the index of all shards (*.index.json) and the other shards, and load the index")]
    return [
        Remedy(f"load the index, which has all of them: {index}", f"load the index: SOURCE {shlex.quote(str(index))}")
    ]


def _wrong_shape(problems: Sequence[Problem]) -> list[Remedy]:
    remedies = [Remedy("build the model with the sizes of the checkpoint")]
    if len(problems) <= MOST_NAMES:
        kept = allowing("allow_missing", problems, KEEP)
        names = dict.fromkeys(problem.seen_by_rules for problem in problems)
        argument = kept.text.removeprefix(f"{KEEP}: ")
        # A pattern could match a tensor that fits, which would then be left out, too.
        text = f"or, {KEEP}: rules=[{', '.join(f'ms.rules.Ignore({name!r})' for name in names)}], {argument}"
        remedies.append(Remedy(text, f"or {option('--ignore', *names)} {kept.options}"))
    return remedies


def _other_dimensions(problems: Sequence[Problem]) -> list[Remedy]:
    rules = [rule for problem in problems for rule in problem.rules]
    return [Remedy(f"pass the rules: rules=[{', '.join(rules)}]" if len(rules) <= MOST_NAMES else "pass the rules")]


def _wrong_dtype(problems: Sequence[Problem]) -> list[Remedy]:
    lossy = [problem for problem in problems if problem.why == LOSES_VALUES and "float" in str(problem.expected)]
    floats = list(dict.fromkeys(str(problem.expected) for problem in lossy))
    remedies = [Remedy("build the model with the dtypes of the checkpoint")]
    if floats:
        is_enough = len(floats) == 1 and len(lossy) == len(problems)
        text = f"or, to cast all floats: dtype={floats[0]!r}" if is_enough else ""
        remedies.append(Remedy(text, f"or --dtype {floats[0]}, to cast all floats"))
    if casts := casting(problems):
        remedies.append(Remedy(f"or, {casts}", "" if len(lossy) == len(problems) else f"or {TRANSFORM_IN_PYTHON}"))
    return remedies


def _quantized_weight(problems: Sequence[Problem]) -> list[Remedy]:
    # The rules that follow those for scales are the same for all weights.
    rules = sorted(
        dict.fromkeys(rule for problem in problems for rule in problem.rules), key=lambda rule: rule.startswith("*")
    )
    scale = "multiply them by their scales"
    in_module = "--rules MODULE:NAME, for a module of Python with NAME = [...], the rules"
    remedies = [Remedy(f"{scale}: rules=[{', '.join(rules)}]", f"{in_module}: [{', '.join(rules)}]")] if rules else []
    if rules and any(problem.why for problem in problems):
        remedies.append(Remedy("which scales are meant is a guess; a Cast of a weight says that its numbers are meant"))
    if any("block=" in rule for rule in rules):
        remedies.append(Remedy("the block is the one that fits the shapes; the config of the checkpoint gives it, too"))
    if unclear := [problem for problem in problems if not (problem.rules or problem.remedy)]:
        rule = f"ms.rules.Dequantize({unclear[0].name!r}, {unclear[0].others[0]!r}, block=...)"
        remedies.append(Remedy(f"{scale}, with the block that the config of the checkpoint gives: rules=[{rule}]"))
    tools = dict.fromkeys((problem.found, problem.remedy) for problem in problems if problem.remedy)
    return [*remedies, *(Remedy(f"no rule reads {layout}: {tool}") for layout, tool in tools)]


def _not_a_tensor(problems: Sequence[Problem]) -> list[Remedy]:
    if any(problem.found == "ndarray" for problem in problems):
        return [Remedy("make tensors of arrays: {name: torch.from_numpy(array) for name, array in arrays.items()}")]
    if all(problem.found == "TensorSpec" for problem in problems):
        return [Remedy("give the checkpoint itself, or its tensors: checkpoint.value()")]
    return [Remedy("look at the file with `modelstate inspect`")]


def _unread(problems: Sequence[Problem]) -> list[Remedy]:
    own = dict.fromkeys(problem.remedy for problem in problems if problem.remedy)
    return [Remedy(text) for text in own or ["look at the file with `modelstate inspect`"]]


def _tie_conflict(problems: Sequence[Problem]) -> list[Remedy]:
    text = "untie them in the model, or leave out the value that is not needed"
    rules = " or ".join(f"rules=[{rule}]" for rule in problems[0].rules)
    return [Remedy(f"{text}: {rules}", f"{problems[0].options}, for the value that is not needed")]


def _uninitialised(problems: Sequence[Problem]) -> list[Remedy]:
    of_code = [problem for problem in problems if problem.why]
    others = [problem for problem in problems if not problem.why]
    remedies = _initialising([problem for problem in others if problem.found == "parameter"])
    if of_code:
        text = (
            f"the loading code of the module has taken {of_code[0].why} and has not assigned {of_code[0].name}: "
            "build the module with values, without ms.skeleton()"
        )
        remedies.append(Remedy(text, ""))
    if buffers := [problem for problem in others if problem.found != "parameter"]:
        text = (
            "build the model with `with ms.skeleton():`, which leaves buffers what the constructor computes; "
            "without it, where the constructor computes them from parameters; where it only allocates them "
            f"(torch.empty), assign them before the load, such as model.{buffers[0].name} = torch.zeros(...)"
        )
        can_initialise = all(buffer.initialiser for buffer in buffers)
        options = "--init-missing, to have the model initialise them" if can_initialise else ""
        remedies.append(Remedy(text + ("; or init_missing=True" if can_initialise else ""), options))
    return [*remedies, Remedy("", "--no-skeleton, if the factory does not build on meta by itself")]


def _uneven_transform(problems: Sequence[Problem]) -> list[Remedy]:
    names = glob_patterns(name for problem in problems for name in (problem.name, *problem.others))
    alone = ", ".join(f"{pattern!r}: None" for pattern in names)
    text = f"untie them, or leave them alone: transform={{{alone}, '*': transform}}"
    return [Remedy(f"{text}; where transform= is a mapping, its patterns follow these names")]


# The lines of problems that no format makes.


def _with_shape(problem: Problem) -> str:
    shape = problem.expected if problem.kind is ProblemKind.MISSING else problem.found
    text = problem.name + (f" {list(shape)}" if isinstance(shape, tuple) else "")
    return text + (f" ({problem.why})" if problem.why else "")


def _shapes(problem: Problem) -> str:
    expected, found = [list(shape) for shape in (problem.expected, problem.found) if isinstance(shape, tuple)]
    rules = f": rules=[{problem.rules[0]}]" if problem.rules else ""
    return f"{problem.name}: the model has {expected}, the checkpoint {found}{rules}"


def _layout(problem: Problem) -> str:
    beside = [name.rpartition(".")[2] for name in problem.others]
    guess = f", {problem.why}" if problem.why else ""
    return f"{problem.name}: {problem.found}" + (f": {listed(beside, 2)}{guess}" if beside else "")


MakeRemedies: TypeAlias = Callable[[Sequence[Problem]], Sequence[Remedy]]
Line: TypeAlias = str | Callable[[Problem], str]


class ProblemKind(Enum):
    """The kinds of problems: the heading in the plural, the page, what to do, and the format of a line.

    Without a format, a line has the name and says why.
    """

    title: str
    page: str
    remedy: str | Remedy | MakeRemedies
    line: Line

    def __new__(cls, title: str, page: str, remedy: str | Remedy | MakeRemedies, line: Line = "") -> ProblemKind:
        kind = object.__new__(cls)
        kind.title, kind.page, kind.remedy, kind.line = title, page, remedy, line
        kind._value_ = title
        return kind

    def __repr__(self) -> str:
        return str(self)

    # The model or the checkpoint lacks a name.
    MISSING = "names of the model that the checkpoint lacks", "names", _missing, _with_shape
    UNEXPECTED = (
        "names of the checkpoint that the model lacks",
        "names",
        lambda problems: [allowing("allow_unexpected", problems, "if they are not needed")],
        _with_shape,
    )
    OTHER_NAMES = (
        "names that differ in one prefix",
        "names",
        lambda problems: [Remedy("pass the rule", " ".join(problem.options for problem in problems))],
        "{0.why} (as {0.name!r}): rules=[{0.rules[0]}]",
    )
    ONE_SHARD = (
        "shards that are loaded without the others of their checkpoint",
        "names",
        _one_shard,
        lambda problem: f"{problem.name} without {listed(problem.others, 8)}",
    )
    UNMERGED_ADAPTER = (
        "tensors of a LoRA adapter, which is to be merged with its base",
        "bad-rule",
        Remedy(
            "open both together, the base first: ms.open([base, adapter], combine=ms.merge.LoRA()); where one file has "
            "both, merge them with peft: merge_and_unload()",
            "an adapter is merged in Python: "
            "modelstate.load(model, modelstate.open([BASE, ADAPTER], combine=modelstate.merge.LoRA()))",
        ),
    )
    NOTHING_FITS = (
        "models that would get no tensor",
        "names",
        Remedy(
            "narrow allow_missing and allow_unexpected to the names that they are meant for",
            "narrower patterns for --allow-missing and --allow-unexpected",
        ),
    )
    IDLE_PATTERN = (
        "patterns and rules that match nothing",
        "names",
        "remove them, or correct their spelling",
        lambda problem: f"{problem.found}: {problem.name}" + (f" ({problem.why})" if problem.why else ""),
    )
    # A value has another shape, dtype or class.
    WRONG_SHAPE = "tensors of another shape", "size-mismatch", _wrong_shape, _shapes
    OTHER_DIMENSIONS = (
        "tensors whose shapes differ in dimensions of size 1 only",
        "size-mismatch",
        _other_dimensions,
        _shapes,
    )
    WRONG_DTYPE = (
        "tensors of a dtype that cannot become the model's without loss",
        "size-mismatch",
        _wrong_dtype,
        "{0.name}: the model has {0.expected}, the checkpoint {0.found}: {0.why}",
    )
    NOT_A_TENSOR = "values that are not tensors", "size-mismatch", _not_a_tensor, "{0.name}: found {0.found}"
    UNREAD = "values of the checkpoint that are not read", "forbidden-global", _unread
    BAD_EXTRA_STATE = (
        "extra states that their modules cannot take",
        "objects",
        "load a checkpoint that was saved with this declaration, or let the declaration's upgrade= take it",
    )
    OPTIMIZER_MISFIT = "states that do not fit their optimizers", "optimizer-state", OPTIMIZER_RULES
    # Quantized tensors.
    QUANTIZED_CAST = (
        "quantized tensors of another dtype than dtype=",
        "quantized-tensors",
        Remedy("load without dtype=: tensors on meta then get the dtypes of the checkpoint", "leave out --dtype"),
        "{0.name}: dtype= is {0.expected}, the checkpoint has {0.found}",
    )
    QUANTIZED_INTO_PLAIN = (
        "quantized tensors of the checkpoint for plain tensors of the model",
        "quantized-tensors",
        Remedy(
            "build the model with `with ms.skeleton():`, which takes quantized tensors as they are, or quantize the "
            "model in the same way before the load",
            "leave out --no-skeleton, and name a function that builds the model",
        ),
        "{0.name}: the checkpoint has {0.found}, the model a plain tensor of {0.expected}",
    )
    QUANTIZED_WEIGHT = (
        "weights that the checkpoint stores quantized, for plain weights of the model",
        "quantized-tensors",
        _quantized_weight,
        _layout,
    )
    # Memory and sharing.
    TIE_CONFLICT = (
        "tied tensors with several different values",
        "cannot-be-placed",
        _tie_conflict,
        lambda problem: (
            f"{problem.name} is the same tensor as {', '.join(problem.others)}, but the checkpoint's values differ"
        ),
    )
    NOT_WRITABLE = (
        "tensors of the model that torch does not write to",
        "cannot-be-placed",
        lambda problems: [Remedy(text) for text in dict.fromkeys(problem.remedy for problem in problems)],
    )
    BUFFER_CONFLICT = (
        "non-persistent buffers that differ from the checkpoint",
        "cannot-be-placed",
        lambda problems: [allowing("allow_unexpected", problems, "if the constructor is right")],
    )
    UNINITIALISED = (
        "tensors that would stay on the meta device, without values",
        "left-on-meta",
        _uninitialised,
        "{0.name} ({0.found})",
    )
    NO_VALUES = (
        "tensors of the source without values: on meta, or with their memory freed",
        "left-on-meta",
        "take the state dict of a model that has been loaded",
    )
    NOT_YET_INITIALISED = (
        "names that the source's lazy modules had not initialised, and that are initialised here",
        "left-on-meta",
        "load it before the model's first forward pass, or take a checkpoint that was saved after one",
    )
    FREED_MEMORY = (
        "tensors of the model whose memory has been freed",
        "cannot-be-placed",
        "load before the memory is freed (by offloading or sharding), or after it is restored",
        "{0.name}: of {0.expected} bytes, its storage has {0.found}",
    )
    SCRIPTED_ON_META = (
        "tensors on meta of TorchScript modules, which keep them",
        "left-on-meta",
        "call torch.jit.script after the load, or build the module with values in its parameters",
    )
    FAKE_TENSORS = (
        "fake tensors (of FakeTensorMode), which have a shape and no values",
        "cannot-be-placed",
        REAL + "; for a model without memory: `with ms.skeleton():`",
        "{0.name}: a FakeTensor in the {0.found}",
    )
    # DTensors.
    SHARDED_TENSORS = (
        "DTensors (of FSDP2 or tensor parallelism) for whole tensors of the model",
        "cannot-be-placed",
        GATHER,
        "{0.name}: a DTensor in the checkpoint, a whole tensor in the model",
    )
    UNLOADABLE_LAYOUT = (
        "DTensors whose ranks cannot load their regions of a value",
        "sharded-models",
        "load the model before it is sharded; if it holds partial sums, reduce them before they become a parameter: "
        "tensor.redistribute(placements=[Replicate()])",
    )
    OTHER_SHARDING = (
        "DTensors that are placed in another way than those of the model",
        "sharded-models",
        "place them alike: value.redistribute(param.device_mesh, param.placements); or pass whole tensors: each "
        "rank takes its part",
    )
    SHARDED_TRANSFORM = (
        "DTensors that a transform of modules cannot replace part by part",
        "sharded-models",
        "transform the model before it is sharded, or leave these out of transform=; a function of name and tensor is "
        "called with the whole tensor, and each rank keeps its part",
    )
    SHARDS_IN_USE = (
        "parameters of FSDP2 that would change after a forward pass, which has made buffers for them",
        "sharded-models",
        "load without dtype= and device=, or into a model that has not run: build it, call fully_shard, load, and "
        "then run it; for another dtype of the computation, fully_shard(..., mp_policy=MixedPrecisionPolicy(...))",
    )
    # Rules, transforms and code.
    UNEVEN_TRANSFORM = (
        "tied tensors with a transform for some of their names only",
        "bad-rule",
        _uneven_transform,
        lambda problem: (
            f"{problem.found} is for {problem.name}, but not for {', '.join(problem.others)}, which is the same tensor"
        ),
    )
    NAME_CLASH = (
        "names that several tensors of the checkpoint would get",
        "bad-rule",
        Remedy("make the rules narrower", "a narrower --strip-prefix, --add-prefix or --rename"),
        lambda problem: f"{problem.name}: from {', '.join(problem.others)}",
    )
    BAD_RULE = (
        "rules that cannot be carried out",
        "bad-rule",
        "correct the rule, or make its pattern narrower",
        "{0.found} on {0.name}: {0.why}",
    )
    GUESSED_RULE = (
        "rules that are guesses, which nothing is loaded with",
        "bad-rule",
        "compare them with the code of both models; then take the rules out of ms.rules.Guess(...), or pass "
        "rules=suggestion.accept_guesses()",
    )
    NEEDS_MODEL = (
        "rules that need the names and shapes of a model",
        "bad-rule",
        Remedy(
            "give the model to the conversion: model=model, or load the model with these rules and save it; a tensor "
            "under a whole name needs no model: ms.rules.Fill(name, tensor)",
            "--model MODEL: the function that builds the model, as to `modelstate plan`",
        ),
        "{0.found}",
    )
    CYCLIC_RULES = (
        "names that rules change back and forth",
        "bad-rule",
        "remove one of the rules; to exchange two names, give one of them a third name in between",
        lambda problem: f"{problem.name}: by {', then '.join(problem.others)}",
    )
    COMPLAINT = "messages of the model's own loading code", "model-code", "see the code of the module"


def wrong_shape(name: str, expected: tuple[int, ...], found: tuple[int, ...], seen_by_rules: str = "") -> Problem:
    """Returns the problem of two shapes; `seen_by_rules` is the name that a rule would see, empty if there is none."""
    same_elements = [size for size in expected if size != 1] == [size for size in found if size != 1]
    if not same_elements or not seen_by_rules:
        other_name = seen_by_rules if seen_by_rules != name else ""
        return Problem(ProblemKind.WRONG_SHAPE, name, expected, found, name_for_rules=other_name)
    rule = f"ms.rules.Reshape({seen_by_rules!r}, {list(expected)})"
    return Problem(ProblemKind.OTHER_DIMENSIONS, name, expected, found, rules=(rule,))


_SHOWN = 8
SUGGEST = "modelstate suggest MODEL SOURCE"
"""The command that suggests rules."""
RULES_FROM_SUGGEST = Remedy(f"ms.suggest(model, source) works out rules (`{SUGGEST}`)", f"{SUGGEST} works out rules")
Remedies: TypeAlias = Mapping[ProblemKind, str | MakeRemedies]
"""Texts, or functions of the problems, that replace the remedies of kinds of problems."""


def grouped(problems: Sequence[Problem]) -> list[tuple[ProblemKind, list[Problem]]]:
    """Groups problems by kind, in the order in which the kinds first appear.

    Rules and patterns that match nothing come first, because missing and unexpected names may follow from them.
    """
    groups: dict[ProblemKind, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.kind, []).append(problem)
    return sorted(groups.items(), key=lambda group: group[0] is not ProblemKind.IDLE_PATTERN)


def remedies_for(kind: ProblemKind, problems: Sequence[Problem], other: str | MakeRemedies = "") -> list[Remedy]:
    """Returns what to do about problems of one kind; `other` replaces the remedy of the kind."""
    remedy = other or kind.remedy
    if callable(remedy):
        return list(remedy(problems))
    return [remedy if isinstance(remedy, Remedy) else Remedy(remedy)]


def join_remedies(remedies: Iterable[Remedy], *, command_line: bool = False) -> str:
    """Returns remedies as one text."""
    return "; ".join(filter(None, (remedy.spelled(command_line=command_line) for remedy in remedies)))


def problem_groups(
    problems: Sequence[Problem],
    remedies: Remedies | None = None,
    suggest: Remedy = RULES_FROM_SUGGEST,
    given: Mapping[str, str] | None = None,
) -> tuple[ProblemGroup, ...]:
    """Returns what an error says about problems: by their kinds, in lines that fit on a screen.

    Args:
        problems: The problems.
        remedies: Replace the remedies of kinds of problems.
        suggest: Says how rules can be found.
        given: The lists that the call has already, as code by the name of the argument, such as "*rules". A remedy
            adds to them.
    """
    groups = grouped(problems)
    kinds = {kind for kind, _ in groups}
    hint = Remedy("", "")  # for missing names, if another kind explains them
    if ProblemKind.UNMERGED_ADAPTER in kinds:
        hint = Remedy("open the base with the adapter", "")
    elif ProblemKind.ONE_SHARD in kinds:
        hint = Remedy("load all shards")
    elif ProblemKind.UNEXPECTED in kinds:
        spelled = "if the names below are these in another spelling, "
        hint = Remedy(spelled + suggest.text, spelled + (suggest.options or suggest.text))
    result = []
    for kind, members in groups:
        texts = _lines(members)
        lines = [printable(extended(text, given)) for text, _ in texts[:_SHOWN]]
        if more := sum(count for _, count in texts[_SHOWN:]):
            lines.append(f"... and {more} more")
        found = remedies_for(kind, members, (remedies or {}).get(kind, ""))
        if kind is ProblemKind.MISSING and kind not in (remedies or {}):
            found.insert(0, hint)
        text = extended(join_remedies(found), given)
        options = join_remedies(found, command_line=True)
        result.append(ProblemGroup(kind.title, len(members), tuple(lines), Remedy(text, options), kind.page))
    return tuple(result)


def explain(problems: Sequence[Problem], *, given: Mapping[str, str] | None = None, command_line: bool = False) -> str:
    """Returns a text of all problems that fits on a screen. `problem_groups` says what the arguments mean."""
    return render(problem_groups(problems, given=given), command_line=command_line)


def extended(text: str, given: Mapping[str, str] | None) -> str:
    """Returns a text with the lists that the call has already at the beginnings of those that it proposes."""
    for argument, before in (given or {}).items():
        text = text if before in text else text.replace(f"{argument}=[", f"{argument}=[{before}, ")
    return text


def _lines(problems: Sequence[Problem]) -> list[tuple[str, int]]:
    """Returns the lines of problems of one kind, each with the number of its problems.

    Where they are many, problems that differ only in numbers within their names share a line.
    """
    if len(problems) <= _SHOWN:
        return [(problem.line(), 1) for problem in problems]
    counts: dict[str, int] = {}
    for problem in problems:
        line = problem.line()
        if problem.name:
            line = line.replace(problem.name, folded([problem.name])[0], 1)
        counts[line] = counts.get(line, 0) + 1
    return [(f"{line} ({count} of these)" if count > 1 else line, count) for line, count in counts.items()]


def plan_error(
    target: str,
    source: str,
    problems: Sequence[Problem],
    remedies: Remedies | None = None,
    suggest: Remedy = RULES_FROM_SUGGEST,
    given: Mapping[str, str] | None = None,
) -> PlanError:
    """Returns the error for a plan that has problems."""
    noun = "problem" if len(problems) == 1 else "problems"
    what = f"cannot load {source} into {target}; nothing has been changed. {len(problems)} {noun}:"
    return PlanError(what, problems=problems, groups=problem_groups(problems, remedies, suggest, given))


def rule_error(what: str, problems: Sequence[Problem], where: str = "") -> RuleError:
    """Returns the error for rules that have problems."""
    return RuleError(what, where=where, problems=problems, groups=problem_groups(problems))


def one_line(error: Exception) -> str:
    """Returns an error on one line: its fields without the place, or class and text if it is not modelstate's."""
    if not isinstance(error, ModelStateError) or not error.has_fields:
        return printable(" ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split()))
    fields = [f"{label} {value}" for label, value in (("expected", error.expected), ("found", error.found)) if value]
    lines = [line for group in error.groups for line in group.lines]
    text = " ".join([error.what, *lines]) + (f" ({', '.join(fields)})" if fields else "")
    return printable((text + (f"; {error.remedy}" if error.remedy else "")).replace("\n", " "))
