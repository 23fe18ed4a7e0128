"""The problems that a plan can have, and how they are printed: grouped by cause, with remedies."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from modelstate.errors import ModelCodeError, ModelStateError, PlanError
from modelstate.text_format import printable

GATHER = (
    "gather them first: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
    "torch.distributed.checkpoint.state_dict on every rank, or tensor.full_tensor() for one of them"
)
"""What to do where a DTensor is to be read."""


REAL = "make them outside of FakeTensorMode: a FakeTensor has a shape and no values"
"""What to do where a FakeTensor is to be read, or to be filled."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that keeps a plan from being carried out."""

    name: str
    """The name in the model; in the checkpoint, where the model has none."""

    title: ClassVar[str]
    """What several of these are called, in the plural."""
    remedy: ClassVar[str]
    """What to do about them."""
    page: ClassVar[str]
    """The page that shows the cause and the fix: `modelstate explain PAGE` prints it."""

    def line(self) -> str:
        """This one, on one line."""
        return self.name

    @classmethod
    def remedy_for(cls, problems: "Sequence[Problem]") -> str:
        """What to do about these problems, which are of this class."""
        return cls.remedy


def _first_values(tensors: Sequence[tuple[str, str]]) -> list[str]:
    """How tensors get first values: of their names, and the methods of the model that initialise them."""
    able = [name for name, methods in tensors if methods]
    unable = [name for name, methods in tensors if not methods]
    remedies = []
    if able:
        one = f"rules=[ms.rules.Fill({_pattern(able)!r})]"
        remedies.append(f"to have the model initialise them: init_missing=True, or {one} without allow_missing")
    if unable:
        one = f"rules=[ms.rules.Fill({unable[0]!r}, value)]"
        remedies.append(f"the model has no method that initialises {unable[0]}: {one} without allow_missing")
    return remedies


def _pattern(names: Sequence[str]) -> str:
    """A pattern for the names: one of them, or what stands below the first one's module."""
    above = names[0].rpartition(".")[0]
    return f"{above}.*" if above and len(names) > 1 and names[1].startswith(f"{above}.") else names[0]


@dataclass(frozen=True, slots=True)
class Missing(Problem):
    """The model has the slot and the checkpoint has nothing for it."""

    shape: tuple[int, ...] | None = None
    """None for extra state, and for a lazy buffer that is None in the model."""
    has_values: bool = True
    """Whether the tensor of the model has values that it could keep: it is not on meta."""
    initialiser: str | None = None
    """The methods of the model that initialise it, empty where none do; None where that makes no difference."""

    title: ClassVar = "names of the model that the checkpoint lacks"
    remedy: ClassVar = "if the model is right without them: allow_missing=[pattern, ...]"
    page: ClassVar = "missing-keys"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        members = [one for one in problems if isinstance(one, Missing)]
        remedies = [cls.remedy] if any(one.has_values for one in members) else []
        wanted = [(one.name, one.initialiser) for one in members if one.initialiser is not None]
        return "; ".join([*remedies, *_first_values(wanted)])

    def line(self) -> str:
        return self.name + (f" {list(self.shape)}" if self.shape is not None else "")


@dataclass(frozen=True, slots=True)
class Unexpected(Problem):
    """The checkpoint has a value and the model has no slot for it."""

    shape: tuple[int, ...] | None = None
    """None for a value that is no tensor."""
    why: str = ""

    title: ClassVar = "names of the checkpoint that the model lacks"
    remedy: ClassVar = "if they are not needed: allow_unexpected=[pattern, ...]"
    page: ClassVar = "unexpected-keys"

    def line(self) -> str:
        shape = f" {list(self.shape)}" if self.shape is not None else ""
        return f"{self.name}{shape}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True)
class UnmergedAdapter(Problem):
    """The checkpoint has a part of a LoRA adapter, and the model has no place for it: it belongs into the weights."""

    title: ClassVar = "tensors of a LoRA adapter, which is to be merged with its base"
    remedy: ClassVar = (
        "open both together, the base first: ms.open([base, adapter], combine=ms.merge.LoRA()); where one file has "
        "both, merge them with peft: merge_and_unload()"
    )
    page: ClassVar = "combine"


@dataclass(frozen=True, slots=True)
class OtherNames(Problem):
    """Names that differ in one prefix, which a rule takes back."""

    count: int = 0
    difference: str = ""
    rule: str = ""
    """The rule, as code that can be pasted."""

    title: ClassVar = "names that differ in one prefix"
    remedy: ClassVar = "pass the rule"
    page: ClassVar = "other-names"

    def line(self) -> str:
        return f"{self.count} names differ only by {self.difference} (as {self.name!r}): rules=[{self.rule}]"


@dataclass(frozen=True, slots=True)
class WrongShape(Problem):
    """The two shapes differ."""

    expected: tuple[int, ...] = ()
    """The model's."""
    found: tuple[int, ...] = ()
    """The checkpoint's."""

    title: ClassVar = "tensors of another shape"
    remedy: ClassVar = "build the model with the sizes of the checkpoint, or load another checkpoint"
    page: ClassVar = "size-mismatch"

    def line(self) -> str:
        return f"{self.name}: the model has {list(self.expected)}, the checkpoint {list(self.found)}"


@dataclass(frozen=True, slots=True)
class OtherDimensions(WrongShape):
    """The two shapes differ in dimensions of size 1 only, so that the elements are the same in the same order."""

    rule: str = ""
    """The rule, as code that can be pasted."""

    title: ClassVar = "tensors whose shapes differ in dimensions of size 1 only"
    remedy: ClassVar = "pass the rules"

    def line(self) -> str:
        return f"{WrongShape.line(self)}: rules=[{self.rule}]"


def wrong_shape(name: str, expected: tuple[int, ...], found: tuple[int, ...], seen_by_rules: str = "") -> WrongShape:
    """The problem of two shapes; `seen_by_rules` is the name that a rule for it would see, if there is one."""
    same_elements = [size for size in expected if size != 1] == [size for size in found if size != 1]
    if not same_elements or not seen_by_rules:
        return WrongShape(name, expected, found)
    return OtherDimensions(name, expected, found, f"ms.rules.Reshape({seen_by_rules!r}, {list(expected)})")


@dataclass(frozen=True, slots=True)
class WrongDtype(Problem):
    """The cast would lose values, or change what they are."""

    expected: str = ""
    found: str = ""
    how: str = ""
    """"lossy" or "kind"."""

    title: ClassVar = "tensors of a dtype that cannot become the model's without loss"
    remedy: ClassVar = "ask for the cast of floats with dtype=, for any other with transform=, or build the model so"
    page: ClassVar = "lossy-cast"

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

    def line(self) -> str:
        return f"{self.name}: dtype= is {self.expected}, the checkpoint has {self.cls} of {self.found}"


@dataclass(frozen=True, slots=True)
class QuantizedIntoPlain(QuantizedCast):
    """The checkpoint's tensor is quantized, the model's is a plain one with values, and the class cannot convert it."""

    title: ClassVar = "quantized tensors of the checkpoint for plain tensors of the model"
    remedy: ClassVar = (
        "build the model with `with ms.skeleton():`, which takes quantized tensors as they are, or quantize the model "
        "in the same way before the load"
    )

    def line(self) -> str:
        return (
            f"{self.name}: the checkpoint has {self.cls} of {self.found}, the model a plain tensor of {self.expected}"
        )


@dataclass(frozen=True, slots=True)
class NotATensor(Problem):
    """A value of another type stands where a tensor belongs."""

    found: str = ""

    title: ClassVar = "values that are no tensors"
    remedy: ClassVar = "look at the file with `modelstate inspect`"
    page: ClassVar = "not-a-tensor"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        if all(isinstance(problem, NotATensor) and problem.found == "TensorSpec" for problem in problems):
            return "give the checkpoint itself, or its tensors: checkpoint.value()"
        return cls.remedy

    def line(self) -> str:
        return f"{self.name}: found {self.found}"


@dataclass(frozen=True, slots=True)
class NumPyArray(NotATensor):
    """A NumPy array stands where a tensor belongs."""

    title: ClassVar = "NumPy arrays in the place of tensors"
    remedy: ClassVar = "make tensors of them: {name: torch.from_numpy(array) for name, array in arrays.items()}"


@dataclass(frozen=True, slots=True)
class FakeTensors(Problem):
    """A tensor of `FakeTensorMode`, which has no values, on either side."""

    side: str = "model"
    """"model" or "checkpoint"."""

    title: ClassVar = "fake tensors (of FakeTensorMode), which have a shape and no values"
    remedy: ClassVar = REAL + "; for a model without memory: `with ms.skeleton():`"
    page: ClassVar = "cannot-be-placed"

    def line(self) -> str:
        return f"{self.name}: a FakeTensor in the {self.side}"


@dataclass(frozen=True, slots=True)
class ShardedTensors(Problem):
    """A `DTensor`, of FSDP2 or tensor parallelism, on one side, and a whole tensor on the other."""

    side: str = "model"
    """Where the `DTensor` is: "model" or "checkpoint"."""
    on_meta: bool = False
    """Whether the one of the model has no memory."""

    title: ClassVar = "DTensors (of FSDP2 or tensor parallelism) on one side, and whole tensors on the other"
    remedy: ClassVar = (
        "load the model before fully_shard or distribute_tensor; or, on every rank, set_model_state_dict(model, "
        "ms.open(path).value(), options=StateDictOptions(full_state_dict=True)) of "
        "torch.distributed.checkpoint.state_dict"
    )
    page: ClassVar = "cannot-be-placed"

    def line(self) -> str:
        other = "checkpoint" if self.side == "model" else "model"
        return f"{self.name}: a DTensor in the {self.side}, a whole tensor in the {other}"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        members = [one for one in problems if isinstance(one, ShardedTensors)]
        remedies = [cls.remedy] if any(one.side == "model" for one in members) else []
        if any(one.on_meta for one in members):
            remedies.append("where the model is on meta, call model.to_empty(device=...) before set_model_state_dict")
        return "; ".join([*remedies, GATHER] if any(one.side == "checkpoint" for one in members) else remedies)


@dataclass(frozen=True, slots=True)
class TieConflict(Problem):
    """Tied names of the model get different values."""

    others: tuple[str, ...] = ()

    title: ClassVar = "tied tensors with several different values"
    remedy: ClassVar = "untie them in the model, or move one value out of the way: rules=[ms.rules.Ignore('its.name')]"
    page: ClassVar = "tied-values"

    def line(self) -> str:
        return f"{self.name} is the same tensor as {', '.join(self.others)}, but the checkpoint's values differ"


@dataclass(frozen=True, slots=True)
class BufferConflict(Problem):
    """The checkpoint has another value than the constructor computed for a non-persistent buffer."""

    title: ClassVar = "non-persistent buffers that differ from the checkpoint"
    remedy: ClassVar = "if the constructor is right: allow_unexpected=[pattern, ...]"
    page: ClassVar = "hidden-buffer"


@dataclass(frozen=True, slots=True)
class Uninitialised(Problem):
    """A slot would still be on the meta device after the load."""

    kind: str = ""
    initialiser: str = ""
    """The methods of the model that initialise it; empty where none do."""

    title: ClassVar = "tensors that would stay on the meta device, without values"
    remedy: ClassVar = "give them values: rules=[ms.rules.Fill(pattern, value)]"
    page: ClassVar = "left-on-meta"

    @classmethod
    def remedy_for(cls, problems: Sequence[Problem]) -> str:
        members = [one for one in problems if isinstance(one, Uninitialised)]
        parameters = [(one.name, one.initialiser) for one in members if one.kind == "parameter"]
        remedies = _first_values(parameters)
        buffers = [one for one in members if one.kind != "parameter"]
        if buffers:
            kept = "build the model with `with ms.skeleton():`, which leaves buffers what the constructor computes"
            remedies.append(kept + ("; or init_missing=True" if all(one.initialiser for one in buffers) else ""))
        return "; ".join(remedies)

    def line(self) -> str:
        return f"{self.name} ({self.kind})"


@dataclass(frozen=True, slots=True)
class IdlePattern(Problem):
    """An argument that applies to nothing."""

    option: str = ""
    why: str = ""
    """Where it does match something."""

    title: ClassVar = "patterns and rules that match nothing"
    remedy: ClassVar = "take them out, or correct their spelling"
    page: ClassVar = "matches-nothing"

    def line(self) -> str:
        return f"{self.option}: {self.name}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True)
class UnevenTransform(Problem):
    """A transform is for a tensor in one of its places, and not in another."""

    transform: str = ""
    others: tuple[str, ...] = ()

    title: ClassVar = "tied tensors of which a transform is for some places only"
    page: ClassVar = "transform"
    remedy: ClassVar = (
        "leave them alone, with a pattern before the others: transform={'its.name': None, ...}; or untie them"
    )

    def line(self) -> str:
        return f"{self.transform} is for {self.name}, but not for {', '.join(self.others)}, which is the same tensor"


@dataclass(frozen=True, slots=True)
class OptimizerMisfit(Problem):
    """The saved state of an optimizer does not fit the optimizer, beside what is wrong with the model."""

    why: str = ""

    title: ClassVar = "states that do not fit their optimizers"
    remedy: ClassVar = "give the rules by which the model's names have changed, which optimizers follow: rules=[...]"
    page: ClassVar = "optimizer-state"

    def line(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True, slots=True)
class NothingFits(Problem):
    """Everything is allowed to be missing or unexpected, and not one tensor would be loaded."""

    title: ClassVar = "models that would get nothing at all"
    remedy: ClassVar = "narrow allow_missing and allow_unexpected to the names that they are meant for"
    page: ClassVar = "matches-nothing"


@dataclass(frozen=True, slots=True)
class NameClash(Problem):
    """Rules lead several names of the checkpoint to one name of the model."""

    sources: tuple[str, ...] = ()

    title: ClassVar = "names that several tensors of the checkpoint claim"
    remedy: ClassVar = "make the rules narrower"
    page: ClassVar = "bad-rule"

    def line(self) -> str:
        return f"{self.name}: from {', '.join(self.sources)}"


@dataclass(frozen=True, slots=True)
class NoValues(Problem):
    """The source's tensor is on the meta device itself, or its memory has been freed."""

    title: ClassVar = "tensors of the source without values: on meta, or with their memory freed"
    remedy: ClassVar = "take the state dict of a model that has been loaded"
    page: ClassVar = "left-on-meta"


@dataclass(frozen=True, slots=True)
class NotYetInitialised(Problem):
    """The source was saved before a lazy module had made this tensor; the model has made it."""

    title: ClassVar = "names that the source's lazy modules had not initialised, and that are initialised here"
    remedy: ClassVar = "load it before the model's first forward pass, or take a checkpoint that was saved after one"
    page: ClassVar = "uninitialized-parameter"


@dataclass(frozen=True, slots=True)
class FreedMemory(Problem):
    """The storage of the model's tensor ends before its elements do: somebody has freed it, or cut it."""

    expected: int = 0
    """Bytes of the tensor."""
    found: int = 0
    """Bytes of its storage."""

    title: ClassVar = "tensors of the model whose memory has been freed"
    remedy: ClassVar = "have what freed it (offloading, sharding) bring it back first, or load before that"
    page: ClassVar = "cannot-be-placed"

    def line(self) -> str:
        return f"{self.name}: of {self.expected} bytes, its storage has {self.found}"


@dataclass(frozen=True, slots=True)
class Complaint(Problem):
    """A message that code of the model added to torch's list of errors."""

    message: str = ""

    title: ClassVar = "messages of the model's own loading code"
    remedy: ClassVar = "see the code of the module"
    page: ClassVar = "model-code"

    def line(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class BadRule(Problem):
    """A rule that cannot be carried out on this tensor."""

    rule: str = ""
    why: str = ""

    title: ClassVar = "rules that cannot be carried out"
    remedy: ClassVar = "correct the rule, or make its pattern narrower"
    page: ClassVar = "bad-rule"

    def line(self) -> str:
        return f"{self.rule} on {self.name}: {self.why}"


@dataclass(frozen=True, slots=True)
class NeedsModel(Problem):
    """A rule makes what a model lacks, and is applied without a model."""

    rule: str = ""

    title: ClassVar = "rules that only a model can say the names and shapes for"
    remedy: ClassVar = (
        "ms.convert_checkpoint(..., model=model), or load the model with these rules and save it; a tensor under a "
        "whole name needs no model: ms.rules.Fill('name', tensor)"
    )
    page: ClassVar = "bad-rule"

    def line(self) -> str:
        return self.rule


@dataclass(frozen=True, slots=True)
class CyclicRules(Problem):
    """Rules that lead a name back to one that it had before."""

    rules: tuple[str, ...] = ()

    title: ClassVar = "names that rules change back and forth"
    remedy: ClassVar = (
        "take one of the rules out; to exchange two names, give one of them a third name for the time being"
    )
    page: ClassVar = "bad-rule"

    def line(self) -> str:
        return f"{self.name}: by {', then '.join(self.rules)}"


@dataclass(frozen=True, slots=True)
class BadExtraState(Problem):
    """A module that declares its extra state cannot take the checkpoint's."""

    why: str = ""
    error: str = ""
    """The class of the error that `set_extra_state` raises: an `ExtraStateError` or a `CodecError`."""

    title: ClassVar = "extra states that their modules cannot take"
    remedy: ClassVar = (
        "load a checkpoint that was saved with this declaration, or let the declaration's upgrade= take it"
    )
    page: ClassVar = "extra-state"

    def line(self) -> str:
        return f"{self.name}: {self.why}"


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
