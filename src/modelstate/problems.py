"""The problems that a plan can have, and the text that reports them: grouped by cause, with remedies.

Each class of problem has a title, a remedy and a page; each problem has the name of a tensor and its facts.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from modelstate.errors import ModelCodeError, ModelStateError, PlanError
from modelstate.text_format import folded, listed, printable

GATHER = (
    "gather them first: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
    "torch.distributed.checkpoint.state_dict on every rank, or tensor.full_tensor() for one of them"
)
"""The remedy for a DTensor that would be read."""


REAL = "make them outside of FakeTensorMode: a FakeTensor has a shape and no values"
"""The remedy for a FakeTensor that would be read or filled."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that prevents a plan from being executed."""

    name: str
    """The name in the model, or in the checkpoint if the model has none."""
    name_for_rules: str = field(default="", kw_only=True, repr=False, compare=False)
    """The name that rules see, where it is another."""

    title: ClassVar[str]
    """The heading for problems of this class, in the plural."""
    remedy: ClassVar[str]
    """What to do about problems of this class."""
    page: ClassVar[str]
    """The page that shows the cause and the fix: `modelstate explain PAGE` prints it."""

    template: ClassVar[str] = "{0.name}"
    """The format of a problem as one line of text."""

    @property
    def seen_by_rules(self) -> str:
        """The name that rules see."""
        return self.name_for_rules or self.name

    def line(self) -> str:
        """Returns the problem as one line of text."""
        return self.template.format(self)

    @classmethod
    def remedy_for(cls, problems: "Sequence[Problem]") -> str:
        """Returns what to do about these problems, which are of this class."""
        return cls.remedy

    def as_dict(self) -> dict[str, object]:
        """Returns the problem as a dictionary, with the name of its class and its remedy."""
        return {"problem": type(self).__name__, **asdict(self), "remedy": self.remedy_for([self])}


MOST_NAMES = 8
"""The names of more tensors than this are not written out in a remedy."""


def glob_patterns(names: Iterable[str]) -> list[str]:
    """Returns glob patterns that match these names: the names where they are few, or wildcards in place of numbers.

    Where the names still differ, the patterns are the beginnings that several names have.
    """
    patterns = list(dict.fromkeys(re.sub(r"([*?[])", r"[\1]", name) for name in names))
    if len(patterns) > MOST_NAMES:
        patterns = folded(patterns)
    depth = max((pattern.count(".") for pattern in patterns), default=0)
    while len(patterns) > MOST_NAMES and depth:
        parts = [pattern.split(".") for pattern in patterns]
        patterns = list(dict.fromkeys(".".join([*part[:depth], "*"] if len(part) > depth else part) for part in parts))
        depth -= 1
    return patterns


def allowing(option: str, problems: Iterable[Problem]) -> str:
    """Returns the argument that allows the names of these problems, as code."""
    return f"{option}={glob_patterns(problem.name for problem in problems)!r}"


def ignoring(problems: Sequence[Problem]) -> str:
    """Returns the argument that leaves out the names of these problems, as code.

    A pattern could match a tensor that fits, which would then be left out, too.
    """
    if len(problems) > MOST_NAMES:
        return "rules=[ms.rules.Ignore(name) for name in names], with all of these names"
    names = dict.fromkeys(problem.seen_by_rules for problem in problems)
    return f"rules=[{', '.join(f'ms.rules.Ignore({name!r})' for name in names)}]"


def _initialisation_remedies(tensors: Sequence[tuple[str, str]]) -> list[str]:
    """Returns how to initialise tensors, given as pairs of a name and the methods of the model that initialise it."""
    remedies = ["to have the model initialise them: init_missing=True"] if any(how for _, how in tensors) else []
    if name := next((name for name, how in tensors if not how), ""):
        rule = f"ms.rules.Fill({name!r}, value)"
        remedies.append(
            f"no method of the model initialises {name} (for DTensors they are not called): rules=[{rule}] without "
            "allow_missing"
        )
    return remedies


@dataclass(frozen=True, slots=True)
class Missing(Problem):
    """The model has the slot and the checkpoint has nothing for it."""

    shape: tuple[int, ...] | None = None
    """None for extra state, and for a lazy buffer that is None in the model."""
    has_values: bool = True
    """Whether the tensor of the model has values that it could keep, because it is not on meta."""
    initialiser: str | None = None
    """The methods of the model that initialise it, empty if there are none; None if they are not needed."""

    title: ClassVar = "names of the model that the checkpoint lacks"
    remedy: ClassVar = "to keep the model's own values for them"
    page: ClassVar = "missing-keys"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        members = [problem for problem in problems if isinstance(problem, Missing)]
        kept = [member for member in members if member.has_values]
        remedies = [f"{cls.remedy}: {allowing('allow_missing', kept)}"] if kept else []
        tensors = [(member.name, member.initialiser) for member in members if member.initialiser is not None]
        return "; ".join([*remedies, *_initialisation_remedies(tensors)])

    def line(self) -> str:
        return self.name + (f" {list(self.shape)}" if self.shape is not None else "")


@dataclass(frozen=True, slots=True)
class Unexpected(Problem):
    """The checkpoint has a value and the model has no slot for it."""

    shape: tuple[int, ...] | None = None
    """None for a value that is not a tensor."""
    why: str = ""

    title: ClassVar = "names of the checkpoint that the model lacks"
    remedy: ClassVar = "if they are not needed"
    page: ClassVar = "unexpected-keys"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        return f"{cls.remedy}: {allowing('allow_unexpected', problems)}"

    def line(self) -> str:
        shape = f" {list(self.shape)}" if self.shape is not None else ""
        return f"{self.name}{shape}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True)
class UnmergedAdapter(Problem):
    """The checkpoint has a part of a LoRA adapter, which must be merged into the weights of its base."""

    title: ClassVar = "tensors of a LoRA adapter, which is to be merged with its base"
    remedy: ClassVar = (
        "open both together, the base first: ms.open([base, adapter], combine=ms.merge.LoRA()); where one file has "
        "both, merge them with peft: merge_and_unload()"
    )
    page: ClassVar = "combine"


@dataclass(frozen=True, slots=True)
class OneShard(Problem):
    """The checkpoint is a shard without the others, and the model has names that it lacks."""

    index: str = ""
    """The path of the index that names the shard; empty where none is beside it."""
    others: tuple[str, ...] = ()
    """The shards that are not loaded."""

    title: ClassVar = "shards that are loaded without the others of their checkpoint"
    remedy: ClassVar = "get the index (*.index.json) and the other shards, and load the index"
    page: ClassVar = "missing-keys"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        indexes = [problem.index for problem in problems if isinstance(problem, OneShard) and problem.index]
        return f"load the index, which has all of them: {indexes[0]}" if indexes else cls.remedy

    def line(self) -> str:
        return f"{self.name} without {listed(self.others, 8)}"


@dataclass(frozen=True, slots=True)
class OtherNames(Problem):
    """Names that differ in one prefix, which a rule adds or removes."""

    count: int = 0
    difference: str = ""
    rule: str = ""
    """The rule, as code that can be pasted."""

    title: ClassVar = "names that differ in one prefix"
    remedy: ClassVar = "pass the rule"
    page: ClassVar = "other-names"
    template: ClassVar = "{0.count} names differ only by {0.difference} (as {0.name!r}): rules=[{0.rule}]"


@dataclass(frozen=True, slots=True)
class WrongShape(Problem):
    """The two shapes differ."""

    expected: tuple[int, ...] = ()
    """The shape in the model."""
    found: tuple[int, ...] = ()
    """The shape in the checkpoint."""

    title: ClassVar = "tensors of another shape"
    remedy: ClassVar = "build the model with the sizes of the checkpoint"
    page: ClassVar = "size-mismatch"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        if len(problems) > MOST_NAMES:
            return cls.remedy
        return (
            f"{cls.remedy}; or, to keep the model's own values for them: {ignoring(problems)}, "
            f"{allowing('allow_missing', problems)}"
        )

    def line(self) -> str:
        return f"{self.name}: the model has {list(self.expected)}, the checkpoint {list(self.found)}"


@dataclass(frozen=True, slots=True)
class OtherDimensions(WrongShape):
    """The two shapes differ in dimensions of size 1 only, so that the elements are the same in the same order."""

    rule: str = ""
    """The rule, as code that can be pasted."""

    title: ClassVar = "tensors whose shapes differ in dimensions of size 1 only"
    remedy: ClassVar = "pass the rules"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        rules = [problem.rule for problem in problems if isinstance(problem, OtherDimensions)]
        return f"{cls.remedy}: rules=[{', '.join(rules)}]" if len(rules) <= MOST_NAMES else cls.remedy

    def line(self) -> str:
        return f"{WrongShape.line(self)}: rules=[{self.rule}]"


def wrong_shape(name: str, expected: tuple[int, ...], found: tuple[int, ...], seen_by_rules: str = "") -> WrongShape:
    """Returns the problem of two shapes; `seen_by_rules` is the name that a rule would see, empty if there is none."""
    same_elements = [size for size in expected if size != 1] == [size for size in found if size != 1]
    if not same_elements or not seen_by_rules:
        other_name = seen_by_rules if seen_by_rules != name else ""
        return WrongShape(name, expected, found, name_for_rules=other_name)
    return OtherDimensions(name, expected, found, f"ms.rules.Reshape({seen_by_rules!r}, {list(expected)})")


@dataclass(frozen=True, slots=True)
class WrongDtype(Problem):
    """The cast would lose values, or change the kind of the dtype."""

    expected: str = ""
    found: str = ""
    how: str = ""
    """"lossy" or "kind"."""

    title: ClassVar = "tensors of a dtype that cannot become the model's without loss"
    remedy: ClassVar = "build the model with the dtypes of the checkpoint"
    page: ClassVar = "lossy-cast"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        members = [problem for problem in problems if isinstance(problem, WrongDtype)]
        floats = {member.expected for member in members if member.how == "lossy" and "float" in member.expected}
        remedies = [cls.remedy]
        if len(floats) == 1 and all(member.expected in floats and member.how == "lossy" for member in members):
            remedies.append(f"to cast all floats: dtype={floats.pop()!r}")
        if casts := cls.casting(members):
            remedies.append(casts)
        return "; or, ".join(remedies)

    @classmethod
    def casting(cls, members: Sequence["WrongDtype"]) -> str:
        """Returns how to cast these tensors, as code; empty text for many."""
        if len(members) > MOST_NAMES:
            return ""
        names = {member.seen_by_rules: member.expected for member in members}
        rules = ", ".join(f"ms.rules.Cast({name!r}, {dtype!r})" for name, dtype in names.items())
        kinds = any(member.how == "kind" for member in members)
        meant = "where the numbers mean the same, to cast them" if kinds else "to cast these"
        return f"{meant}: rules=[{rules}]"

    def line(self) -> str:
        change = "loses values" if self.how == "lossy" else "changes their kind"
        return f"{self.name}: the model has {self.expected}, the checkpoint {self.found}: casting {change}"


@dataclass(frozen=True, slots=True)
class QuantizedCast(Problem):
    """A quantized tensor cannot be cast to the dtype that `dtype=` asks for."""

    expected: str = ""
    found: str = ""
    cls: str = ""

    title: ClassVar = "quantized tensors of another dtype than dtype="
    remedy: ClassVar = "load without dtype=: tensors on meta then get the dtypes of the checkpoint"
    page: ClassVar = "quantized-tensors"
    template: ClassVar = "{0.name}: dtype= is {0.expected}, the checkpoint has {0.cls} of {0.found}"


@dataclass(frozen=True, slots=True)
class QuantizedIntoPlain(QuantizedCast):
    """The checkpoint has a quantized tensor, the model a plain one with values, and the class cannot convert it."""

    title: ClassVar = "quantized tensors of the checkpoint for plain tensors of the model"
    remedy: ClassVar = (
        "build the model with `with ms.skeleton():`, which takes quantized tensors as they are, or quantize the model "
        "in the same way before the load"
    )
    template: ClassVar = "{0.name}: the checkpoint has {0.cls} of {0.found}, the model a plain tensor of {0.expected}"


@dataclass(frozen=True, slots=True)
class QuantizedWeight(Problem):
    """The checkpoint has a weight as numbers and scales, and the model a plain weight without a slot for the scales."""

    layout: str = ""
    """The numbers that are stored, such as "float8_e4m3fn with scales" or "NF4 of bitsandbytes"."""
    beside: tuple[str, ...] = ()
    """The names of the checkpoint that are stored beside the weight."""
    rules: tuple[str, ...] = ()
    """The rules that multiply the weight by its scales, as code that can be pasted; empty without such rules."""
    tool: str = ""
    """What reads the layout; empty if rules do."""
    is_guess: bool = False
    """Whether the scales are a guess by their name and shape."""

    title: ClassVar = "weights that the checkpoint stores quantized, for plain weights of the model"
    remedy: ClassVar = "multiply them by their scales"
    page: ClassVar = "quantized-tensors"

    def line(self) -> str:
        beside = [name.rpartition(".")[2] for name in self.beside]
        guess = ", a guess by name and shape" if self.is_guess else ""
        return f"{self.name}: {self.layout}" + (f": {listed(beside, 2)}{guess}" if beside else "")

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        members = [problem for problem in problems if isinstance(problem, QuantizedWeight)]
        # The rules that follow those for scales are the same for all weights.
        rules = sorted(
            dict.fromkeys(rule for member in members for rule in member.rules), key=lambda rule: rule.startswith("*")
        )
        remedies = [f"{cls.remedy}: rules=[{', '.join(rules)}]"] if rules else []
        if rules and any(member.is_guess for member in members):
            remedies.append("which scales are meant is a guess; a Cast of a weight says that its numbers are meant")
        if any("block=" in rule for rule in rules):
            remedies.append("the block is the one that fits the shapes; the config of the checkpoint gives it, too")
        if unclear := [member for member in members if not (member.rules or member.tool)]:
            rule = f"ms.rules.Dequantize({unclear[0].name!r}, {unclear[0].beside[0]!r}, block=...)"
            remedies.append(f"{cls.remedy}, with the block that the config of the checkpoint gives: rules=[{rule}]")
        tools = dict.fromkeys((member.layout, member.tool) for member in members if member.tool)
        remedies += [f"no rule reads {layout}: {tool}" for layout, tool in tools]
        return "; ".join(remedies)


@dataclass(frozen=True, slots=True)
class NotATensor(Problem):
    """A value of another type in place of a tensor."""

    found: str = ""

    title: ClassVar = "values that are not tensors"
    remedy: ClassVar = "look at the file with `modelstate inspect`"
    page: ClassVar = "not-a-tensor"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        if all(isinstance(problem, NotATensor) and problem.found == "TensorSpec" for problem in problems):
            return "give the checkpoint itself, or its tensors: checkpoint.value()"
        return cls.remedy

    template: ClassVar = "{0.name}: found {0.found}"


@dataclass(frozen=True, slots=True)
class Unread(Problem):
    """A value of the checkpoint that is not read, as its class is not allowed, or its kind is not supported."""

    why: str = ""
    way: str = ""
    """What to do about this one."""

    title: ClassVar = "values of the checkpoint that are not read"
    remedy: ClassVar = "look at the file with `modelstate inspect`"
    page: ClassVar = "forbidden-global"
    template: ClassVar = "{0.name}: {0.why}"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        ways = [problem.way for problem in problems if isinstance(problem, Unread) and problem.way]
        return "; ".join(dict.fromkeys(ways)) or cls.remedy


@dataclass(frozen=True, slots=True)
class NumPyArray(NotATensor):
    """A NumPy array in place of a tensor."""

    title: ClassVar = "NumPy arrays in place of tensors"
    remedy: ClassVar = "make tensors of them: {name: torch.from_numpy(array) for name, array in arrays.items()}"


@dataclass(frozen=True, slots=True)
class FakeTensors(Problem):
    """A tensor of `FakeTensorMode`, which has no values, on either side."""

    side: str = "model"
    """"model" or "checkpoint"."""

    title: ClassVar = "fake tensors (of FakeTensorMode), which have a shape and no values"
    remedy: ClassVar = REAL + "; for a model without memory: `with ms.skeleton():`"
    page: ClassVar = "cannot-be-placed"
    template: ClassVar = "{0.name}: a FakeTensor in the {0.side}"


@dataclass(frozen=True, slots=True)
class ShardedTensors(Problem):
    """A `DTensor` of the source, of FSDP2 or tensor parallelism, for a whole tensor of the model."""

    title: ClassVar = "DTensors (of FSDP2 or tensor parallelism) for whole tensors of the model"
    remedy: ClassVar = GATHER
    page: ClassVar = "cannot-be-placed"
    template: ClassVar = "{0.name}: a DTensor in the checkpoint, a whole tensor in the model"


@dataclass(frozen=True, slots=True)
class UnloadableLayout(Problem):
    """A `DTensor` of the model whose ranks hold no regions of a value: partial sums, an unknown placement."""

    why: str = ""

    title: ClassVar = "DTensors whose ranks cannot load their regions of a value"
    remedy: ClassVar = (
        "load the model before it is sharded; if it holds partial sums, reduce them before they become a parameter: "
        "tensor.redistribute(placements=[Replicate()])"
    )
    page: ClassVar = "sharded-models"
    template: ClassVar = "{0.name}: {0.why}"


@dataclass(frozen=True, slots=True)
class OtherSharding(Problem):
    """A `DTensor` of the source that is placed in another way than the one of the model."""

    title: ClassVar = "DTensors that are placed in another way than those of the model"
    remedy: ClassVar = (
        "place them alike: value.redistribute(param.device_mesh, param.placements); or pass whole tensors: each "
        "rank takes its part"
    )
    page: ClassVar = "sharded-models"


@dataclass(frozen=True, slots=True)
class ShardedTransform(Problem):
    """A transform of modules, such as a quantizer, that cannot be called with the parts of a DTensor."""

    transform: str = ""
    needs: str = ""
    """Why it cannot, such as "takes the whole tensor"."""
    shard: str = ""
    """The part of the parameter that this rank holds."""

    title: ClassVar = "DTensors that a transform of modules cannot replace part by part"
    remedy: ClassVar = (
        "transform the model before it is sharded, or leave these out of transform=; a function of name and tensor is "
        "called with the whole tensor, and each rank keeps its part"
    )
    page: ClassVar = "sharded-models"
    template: ClassVar = "{0.name}: {0.transform} {0.needs}, and this rank holds {0.shard}"


@dataclass(frozen=True, slots=True)
class ShardsInUse(Problem):
    """A parameter of FSDP2 that would change its dtype or device after a forward pass."""

    change: str = ""

    title: ClassVar = "parameters of FSDP2 that would change after a forward pass, which has made buffers for them"
    remedy: ClassVar = (
        "load without dtype= and device=, or into a model that has not run: build it, call fully_shard, load, and "
        "then run it; for another dtype of the computation, fully_shard(..., mp_policy=MixedPrecisionPolicy(...))"
    )
    page: ClassVar = "sharded-models"
    template: ClassVar = "{0.name}: {0.change}"


@dataclass(frozen=True, slots=True)
class TieConflict(Problem):
    """Tied names of the model get different values."""

    others: tuple[str, ...] = ()
    names_for_rules: tuple[str, ...] = ()
    """The names that rules see of this tensor and of the others."""

    title: ClassVar = "tied tensors with several different values"
    remedy: ClassVar = "untie them in the model, or leave out the value that is not needed"
    page: ClassVar = "tied-values"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        first = next(problem for problem in problems if isinstance(problem, TieConflict))
        names = first.names_for_rules or (first.name, *first.others)
        return f"{cls.remedy}: {' or '.join(f'rules=[ms.rules.Ignore({name!r})]' for name in names)}"

    def line(self) -> str:
        return f"{self.name} is the same tensor as {', '.join(self.others)}, but the checkpoint's values differ"


@dataclass(frozen=True, slots=True)
class BufferConflict(Problem):
    """The checkpoint's value of a non-persistent buffer differs from the one that the constructor computed."""

    title: ClassVar = "non-persistent buffers that differ from the checkpoint"
    remedy: ClassVar = "if the constructor is right"
    page: ClassVar = "hidden-buffer"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        return f"{cls.remedy}: {allowing('allow_unexpected', problems)}"


@dataclass(frozen=True, slots=True)
class Uninitialised(Problem):
    """A slot would still be on the meta device after the load."""

    kind: str = ""
    initialiser: str = ""
    """The methods of the model that initialise it; empty if there are none."""
    taken: str = ""
    """What the loading code of its module has taken from the checkpoint, without assigning the tensor."""

    title: ClassVar = "tensors that would stay on the meta device, without values"
    remedy: ClassVar = "give them values: rules=[ms.rules.Fill(pattern, value)]"
    page: ClassVar = "left-on-meta"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        of_code = [problem for problem in problems if isinstance(problem, Uninitialised) and problem.taken]
        members = [problem for problem in problems if isinstance(problem, Uninitialised) and not problem.taken]
        parameters = [(member.name, member.initialiser) for member in members if member.kind == "parameter"]
        remedies = _initialisation_remedies(parameters)
        if of_code:
            remedies.append(
                f"the loading code of the module has taken {of_code[0].taken} and has not assigned {of_code[0].name}: "
                "build the module with values, without ms.skeleton()"
            )
        buffers = [member for member in members if member.kind != "parameter"]
        if buffers:
            remedy = (
                "build the model with `with ms.skeleton():`, which leaves buffers what the constructor computes; "
                "without it, where the constructor computes them from parameters; where it only allocates them "
                f"(torch.empty), assign them before the load, such as model.{buffers[0].name} = torch.zeros(...)"
            )
            remedies.append(
                remedy + ("; or init_missing=True" if all(buffer.initialiser for buffer in buffers) else "")
            )
        return "; ".join(remedies)

    template: ClassVar = "{0.name} ({0.kind})"


@dataclass(frozen=True, slots=True)
class IdlePattern(Problem):
    """An argument that applies to nothing."""

    option: str = ""
    why: str = ""
    """Why it applies to nothing although it matches something."""

    title: ClassVar = "patterns and rules that match nothing"
    remedy: ClassVar = "remove them, or correct their spelling"
    page: ClassVar = "matches-nothing"

    def line(self) -> str:
        return f"{self.option}: {self.name}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True)
class UnevenTransform(Problem):
    """A transform applies to one name of a tied tensor, and not to another."""

    transform: str = ""
    others: tuple[str, ...] = ()

    title: ClassVar = "tied tensors with a transform for some of their names only"
    page: ClassVar = "transform"
    remedy: ClassVar = "untie them, or leave them alone"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        members = [problem for problem in problems if isinstance(problem, UnevenTransform)]
        names = glob_patterns(name for member in members for name in (member.name, *member.others))
        alone = ", ".join(f"{pattern!r}: None" for pattern in names)
        return (
            f"{cls.remedy}: transform={{{alone}, '*': transform}}; where transform= is a mapping, its patterns follow "
            "these names"
        )

    def line(self) -> str:
        return f"{self.transform} is for {self.name}, but not for {', '.join(self.others)}, which is the same tensor"


@dataclass(frozen=True, slots=True)
class OptimizerMisfit(Problem):
    """The saved state of an optimizer does not fit it. Reported together with the problems of the model."""

    why: str = ""

    title: ClassVar = "states that do not fit their optimizers"
    remedy: ClassVar = "give the rules by which the model's names have changed, which optimizers follow: rules=[...]"
    page: ClassVar = "optimizer-state"
    template: ClassVar = "{0.name}: {0.why}"


@dataclass(frozen=True, slots=True)
class NothingFits(Problem):
    """All names are allowed to be missing or unexpected, so that no tensor would be loaded."""

    title: ClassVar = "models that would get no tensor"
    remedy: ClassVar = "narrow allow_missing and allow_unexpected to the names that they are meant for"
    page: ClassVar = "matches-nothing"


@dataclass(frozen=True, slots=True)
class NameClash(Problem):
    """Rules give several names of the checkpoint the same name in the model."""

    sources: tuple[str, ...] = ()

    title: ClassVar = "names that several tensors of the checkpoint would get"
    remedy: ClassVar = "make the rules narrower"
    page: ClassVar = "bad-rule"

    def line(self) -> str:
        return f"{self.name}: from {', '.join(self.sources)}"


@dataclass(frozen=True, slots=True)
class NoValues(Problem):
    """The tensor of the source is on the meta device, or its memory has been freed."""

    title: ClassVar = "tensors of the source without values: on meta, or with their memory freed"
    remedy: ClassVar = "take the state dict of a model that has been loaded"
    page: ClassVar = "left-on-meta"


@dataclass(frozen=True, slots=True)
class NotYetInitialised(Problem):
    """The source was saved before a lazy module initialised this tensor; the model has initialised it."""

    title: ClassVar = "names that the source's lazy modules had not initialised, and that are initialised here"
    remedy: ClassVar = "load it before the model's first forward pass, or take a checkpoint that was saved after one"
    page: ClassVar = "uninitialized-parameter"


@dataclass(frozen=True, slots=True)
class FreedMemory(Problem):
    """The storage of the model's tensor is smaller than its elements: it was freed or resized."""

    expected: int = 0
    """Bytes of the tensor."""
    found: int = 0
    """Bytes of its storage."""

    title: ClassVar = "tensors of the model whose memory has been freed"
    remedy: ClassVar = "load before the memory is freed (by offloading or sharding), or after it is restored"
    page: ClassVar = "cannot-be-placed"
    template: ClassVar = "{0.name}: of {0.expected} bytes, its storage has {0.found}"


@dataclass(frozen=True, slots=True)
class ScriptedOnMeta(Problem):
    """A TorchScript module would keep the meta tensor: its C++ object does not see that the parameter gets memory."""

    title: ClassVar = "tensors on meta of TorchScript modules, which keep them"
    remedy: ClassVar = "call torch.jit.script after the load, or build the module with values in its parameters"
    page: ClassVar = "left-on-meta"


@dataclass(frozen=True, slots=True)
class Complaint(Problem):
    """A message that the model's own code added to torch's list of errors."""

    message: str = ""

    title: ClassVar = "messages of the model's own loading code"
    remedy: ClassVar = "see the code of the module"
    page: ClassVar = "model-code"
    template: ClassVar = "{0.message}"


@dataclass(frozen=True, slots=True)
class BadRule(Problem):
    """A rule that cannot be carried out on this tensor."""

    rule: str = ""
    why: str = ""

    title: ClassVar = "rules that cannot be carried out"
    remedy: ClassVar = "correct the rule, or make its pattern narrower"
    page: ClassVar = "bad-rule"
    template: ClassVar = "{0.rule} on {0.name}: {0.why}"


@dataclass(frozen=True, slots=True)
class GuessedRule(Problem):
    """A rule that `modelstate.suggest` marks as a guess."""

    title: ClassVar = "rules that are guesses, which nothing is loaded with"
    remedy: ClassVar = (
        "compare them with the code of both models; then take the rules out of ms.rules.Guess(...), or pass "
        "rules=suggestion.accept_guesses()"
    )
    page: ClassVar = "bad-rule"
    template: ClassVar = "{0.name}"


@dataclass(frozen=True, slots=True)
class NeedsModel(Problem):
    """A rule needs a model, and is applied without one."""

    rule: str = ""

    title: ClassVar = "rules that need the names and shapes of a model"
    remedy: ClassVar = (
        "give the model to the conversion: model=model, or load the model with these rules and save it; a tensor under "
        "a whole name needs no model: ms.rules.Fill(name, tensor)"
    )
    page: ClassVar = "bad-rule"
    template: ClassVar = "{0.rule}"


@dataclass(frozen=True, slots=True)
class CyclicRules(Problem):
    """Rules that give an entry a name that it had before."""

    rules: tuple[str, ...] = ()

    title: ClassVar = "names that rules change back and forth"
    remedy: ClassVar = "remove one of the rules; to exchange two names, give one of them a third name in between"
    page: ClassVar = "bad-rule"

    def line(self) -> str:
        return f"{self.name}: by {', then '.join(self.rules)}"


@dataclass(frozen=True, slots=True)
class BadExtraState(Problem):
    """A module cannot take the checkpoint's value of its declared extra state."""

    why: str = ""
    error: str = ""
    """The class of the error that `set_extra_state` raises: an `ExtraStateError` or a `CodecError`."""

    title: ClassVar = "extra states that their modules cannot take"
    remedy: ClassVar = (
        "load a checkpoint that was saved with this declaration, or let the declaration's upgrade= take it"
    )
    page: ClassVar = "extra-state"
    template: ClassVar = "{0.name}: {0.why}"


Remedy = Callable[[Sequence[Any]], str]
"""Returns what to do about problems of one class."""
_SHOWN = 8
SUGGEST = "modelstate suggest MODEL SOURCE"
"""The command that suggests rules."""
RULES_FROM_SUGGEST = f"ms.suggest(model, source) works out rules (`{SUGGEST}`)"


def grouped(problems: Sequence[Problem]) -> list[tuple[type[Problem], list[Problem]]]:
    """Groups problems by class, in the order in which the classes first appear.

    Rules and patterns that match nothing come first, because missing and unexpected names may follow from them.
    """
    groups: dict[type[Problem], list[Problem]] = {}
    for problem in problems:
        groups.setdefault(type(problem), []).append(problem)
    return sorted(groups.items(), key=lambda group: group[0] is not IdlePattern)


def explain(
    problems: Sequence[Problem],
    remedies: Mapping[type[Problem], str | Remedy] | None = None,
    suggest: str = RULES_FROM_SUGGEST,
    given: Mapping[str, str] | None = None,
) -> str:
    """Returns a text of all problems that fits on a screen.

    Args:
        problems: the problems.
        remedies: texts, or functions of the problems, that replace the remedies of classes of problems.
        suggest: says how rules can be found, for example by a command.
        given: the lists that the call has already, as code by the name of the argument, such as "*rules". A remedy
            adds to them.
    """
    lines = []
    groups = grouped(problems)
    causes = {cause for cause, _ in groups}
    hint = ""  # for missing names, if another cause explains them
    if UnmergedAdapter in causes:
        hint = "open the base with the adapter; "
    elif OneShard in causes:
        hint = "load all shards; "
    elif Unexpected in causes:
        hint = f"if the names below are these in another spelling, {suggest}; "
    for cause, members in groups:
        lines.append(f"  {cause.title} ({len(members)}):")
        texts = _lines(members)
        lines += [f"    {printable(extended(text, given))}" for text, _ in texts[:_SHOWN]]
        if more := sum(count for _, count in texts[_SHOWN:]):
            lines.append(f"    ... and {more} more")
        other = (remedies or {}).get(cause)
        remedy = other(members) if callable(other) else other
        remedy = remedy or (hint if cause is Missing else "") + cause.remedy_for(members)
        remedy = extended(remedy, given)
        lines += [f"    to do: {remedy}", f"    more: modelstate explain {cause.page}"]
    return "\n".join(lines)


def extended(text: str, given: Mapping[str, str] | None) -> str:
    """Returns a text with the lists that the call has already at the beginnings of those that it proposes."""
    for option, before in (given or {}).items():
        text = text if before in text else text.replace(f"{option}=[", f"{option}=[{before}, ")
    return text


def _lines(problems: Sequence[Problem]) -> list[tuple[str, int]]:
    """Returns the lines of problems of one class, each with the number of its problems.

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
    remedies: Mapping[type[Problem], str | Remedy] | None = None,
    suggest: str = RULES_FROM_SUGGEST,
    given: Mapping[str, str] | None = None,
) -> PlanError:
    """Returns the error for a plan that has problems."""
    noun = "problem" if len(problems) == 1 else "problems"
    return PlanError(
        f"cannot load {source} into {target}; nothing has been changed. {len(problems)} {noun}:\n"
        f"{explain(problems, remedies, suggest, given)}",
        problems=problems,
    )


@contextmanager
def model_errors(what: str, model: object) -> Iterator[None]:
    """Turns errors of the model's own code into `ModelCodeError`. `what` says which code it is."""
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
    """Returns an error on one line: its fields without the place, or class and text if it is not modelstate's."""
    if not isinstance(error, ModelStateError) or not error.has_fields:
        return printable(" ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split()))
    fields = [f"{label} {value}" for label, value in (("expected", error.expected), ("found", error.found)) if value]
    text = error.what + (f" ({', '.join(fields)})" if fields else "") + (f"; {error.remedy}" if error.remedy else "")
    return printable(text.replace("\n", " "))
