"""How the names of a checkpoint differ from those of a model.

Names prove two kinds of differences. A wrapper (DataParallel, `torch.compile`, FSDP) adds its name to the names of all
tensors below it: `wrapper_rule` removes or adds such names without a rule of the user. Other prefixes that all names
of one side have are only proposed, by `one_prefix`. All other differences are left to `modelstate.suggest`, which
compares more than names and reports its confidence.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
from torch import nn

from modelstate.planning.recorder import loads_names_itself
from modelstate.problems import Problem, ProblemKind, option
from modelstate.rules.known import WRAPPERS
from modelstate.rules.names import Prefix, Rename
from modelstate.rules.rule import as_code
from modelstate.text_format import count
from modelstate.torch_compat.modules import has_own_load, named_modules_of

Shape = tuple[int, ...] | None
_MOST_HEADS = 12
_MOST_CANDIDATES = 4
"""A name that is the end of more names than this is not evidence of a prefix."""
LORA_MATRIX = re.compile(
    r"(?P<module>.+)\.lora_(?P<kind>embedding_A|embedding_B|A|B|magnitude_vector|down|up)(?:\.(?P<rest>.+))?$"
)
"""The names that peft, diffusers (A and B) and the tools of kohya (down and up) give to the matrices of LoRA."""
KOHYA_PREFIXES = ("lora_", "lycoris_")
"""The beginnings of the names of modules in files of kohya's tools, where each dot of the path is an underscore."""
PEFT_PREFIX = "base_model.model."
"""The prefix of the names of an adapter of peft."""


# Wrappers.


def prefixes(name: str) -> Iterator[str]:
    """Yields all prefixes of a dotted name that end with a dot."""
    at = name.find(".")
    while at >= 0:
        yield name[: at + 1]
        at = name.find(".", at + 1)


def without_wrappers(name: str) -> str:
    """Returns a name without the parts that wrappers add."""
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in WRAPPERS), last])


class Rewrapped(msgspec.Struct, frozen=True):
    """Removes or adds the names of wrappers at certain modules."""

    modules: Mapping[str, str]
    """From prefixes of the checkpoint's names to prefixes of the model's names, such as "module." to ""."""

    def __repr__(self) -> str:
        return (
            f"Rewrapped({dict(self.modules)!r})"
            if len(self.modules) <= 2
            else f"Rewrapped({len(self.modules)} modules)"
        )

    def rename(self, name: str) -> str | None:
        for prefix in (*reversed([*prefixes(name)]), ""):
            put = self.modules.get(prefix)
            if put is not None:
                return put + name[len(prefix) :]
        return None

    def reverse(self) -> Rewrapped:
        return Rewrapped({put: prefix for prefix, put in self.modules.items()})

    def note(self, names: int) -> str:
        """Returns a note for the report, for the number of names that the rule has changed."""
        taken, put = (
            {part for prefix in side for part in prefix.split(".") if part in WRAPPERS}
            for side in (self.modules, self.modules.values())
        )
        what = [f"without {', '.join(sorted(taken - put))}"] if taken - put else []
        what += [f"with {', '.join(sorted(put - taken))}"] if put - taken else []
        are_read = f"{count(names, 'name')} of the checkpoint {'is' if names == 1 else 'are'} read"
        return f"{are_read} {' and '.join(what) or 'with wrappers in other places'}"


def wrapper_rule(
    given: Collection[str], wanted: Collection[str], model: nn.Module | None = None, kept_names: Collection[str] = ()
) -> Rewrapped | None:
    """Returns the rule for names that differ from the model's names only in wrappers.

    Returns None where all names fit without a rule, or where the rule would be uncertain: two names of one side are
    equal without wrappers; some names below a module go through a wrapper and others do not; or code of the model loads
    the names at such a module.

    Args:
        given: The names of the checkpoint.
        wanted: The names of the model.
        model: The model, whose loading code is examined.
        kept_names: Further names, which the rule does not change.
    """
    if all(name in wanted for name in given) or not any(map(_has_wrapper, (*given, *wanted))):
        return None
    sources = {without_wrappers(name): name for name in (*kept_names, *given)}
    targets = {without_wrappers(name): name for name in wanted}
    if len(sources) < len(given) + len(kept_names) or len(targets) < len(wanted):
        return None
    kept = set(kept_names)
    pairs = {name: targets[bare] for bare, name in sources.items() if bare in targets and name not in kept}
    modules: dict[str, str] = {}
    chains: tuple[dict[str, str], dict[str, str]] = {}, {}
    for source, target in pairs.items():
        for (bare, before, chain), (_, put_before, put_chain) in zip(_places(source), _places(target), strict=True):
            if chains[0].setdefault(bare, chain) != chain or chains[1].setdefault(bare, put_chain) != put_chain:
                return None
            if chain != put_chain:
                modules[before + chain] = put_before + put_chain
    left, lacking = set(given).difference(pairs), set(wanted).difference(pairs.values())
    # A wrapper of the model has all names of its place below it: a module with other names beside it is none.
    for side, names in zip(chains, (filter(_has_wrapper, left), lacking), strict=True):
        if any(side.get(bare, chain) != chain for name in names for bare, _, chain in _places(name)):
            return None  # a name without a counterpart goes through a wrapper, and the others do not, or vice versa
    if left and lacking and any(map(_has_wrapper, modules.values())):
        return None  # a name that fits by chance would become one of a module that the checkpoint has elsewhere
    rule = Rewrapped(modules)
    if not modules or any((rule.rename(source) or source) != target for source, target in pairs.items()):
        return None
    if model is not None:
        of_model = named_modules_of(model)
        above = {prefix[:-1] for place in modules.values() for prefix in prefixes(place)} | {""}
        is_wrapped = any(map(_has_wrapper, modules.values()))
        for module in (of_model[path] for path in above if path in of_model):
            if loads_names_itself(module) or (is_wrapped and has_own_load(module)):
                return None  # a module at or above a wrapper may change the meaning of names while it loads
    return rule


def _has_wrapper(name: str) -> bool:
    return any(wrapper in name for wrapper in WRAPPERS)


def _places(name: str) -> Iterator[tuple[str, str, str]]:
    """Yields for each module on the path of a name: its path without wrappers, its prefix, and its wrappers."""
    bare = before = chain = ""
    *path, _ = name.split(".")
    for part in path:
        if part in WRAPPERS:
            chain += f"{part}."
            continue
        yield bare, before, chain
        bare, before, chain = f"{bare}{part}.", f"{before}{chain}{part}.", ""
    yield bare, before, chain


# One prefix.


def one_prefix(
    missing: Mapping[str, Shape],
    unexpected: Mapping[str, Shape],
    *,
    fitting: Collection[str] = (),
    optional: Collection[str] = (),
) -> tuple[Problem | None, dict[str, str]]:
    """Returns a problem with the rule for the one prefix by which all missing and unexpected names differ.

    The rule is certain. Every unexpected name is the prefix and a missing name, or every missing name is the prefix and
    an unexpected name; no name is left on either side, except for missing names that are `optional`. There is no rule
    where most shapes differ, and none where a part of the prefix leads to a `fitting` name, as from "a.a.w" to "a.w":
    all names may then have an additional "a.". The rule does not change `fitting` names. The second result is the
    pairs, from missing to unexpected names; it is empty without a problem.
    """
    required = missing.keys() - set(optional)
    candidates = [
        (prefix, strips, pairs)
        for prefix, strips in _candidates(required, missing, unexpected)
        for pairs in [_paired(prefix, strips, missing, unexpected)]
        if len(pairs) == len(unexpected) and required <= pairs.keys()
    ]
    if len(candidates) != 1:
        return None, {}
    ((prefix, strips, pairs),) = candidates
    longer = pairs.values() if strips else pairs.keys()
    if any(name[len(part) :] in fitting for name in longer for part in prefixes(name) if len(part) < len(prefix)):
        return None, {}
    if 2 * sum(missing[name] == unexpected[source] for name, source in pairs.items()) <= len(pairs):
        return None, {}
    start, put = (rf"^{re.escape(prefix)}", "") if strips else ("^", prefix.replace("\\", r"\\"))
    rests = [name if strips else source for name, source in pairs.items()]
    whole = Prefix(strip=prefix) if strips else Prefix(add=prefix)
    rules: list[Prefix | Rename] = [whole, *_narrowed(start, rests, put)]
    for rule in rules:
        right = all(rule.rename(source) == name for name, source in pairs.items())
        if right and all(rule.rename(name) is None for name in fitting):
            side = "checkpoint" if strips else "model"
            problem = Problem(
                ProblemKind.OTHER_NAMES,
                next(iter(pairs)),
                why=f"{len(pairs)} names differ only by the prefix {prefix!r} of the {side}",
                rules=(as_code(rule),),
                options=as_options(rule),
            )
            return problem, pairs
    return None, {}


def as_options(rule: Prefix | Rename) -> str:
    """Returns the rule as an option of the command line; empty where there is none."""
    if isinstance(rule, Prefix):
        return option("--strip-prefix", rule.strip) if rule.strip else option("--add-prefix", rule.add)
    is_regex = isinstance(rule.pattern, re.Pattern)
    pattern = rule.pattern.pattern if isinstance(rule.pattern, re.Pattern) else rule.pattern
    if "=" in rule.replacement:
        return ""
    return option("--rename-regex" if is_regex else "--rename", f"{pattern}={rule.replacement}")


def _candidates(required: Collection[str], missing: Iterable[str], unexpected: Iterable[str]) -> list[tuple[str, bool]]:
    """Returns the prefixes that are possible for the longest name, and whether a rule would strip them."""
    candidates: list[tuple[str, bool]] = []
    for strips, names, others in ((True, required, unexpected), (False, unexpected, missing)):
        last = max(names, key=len, default="")
        candidates += [(other[: -len(last)], strips) for other in others if last and other.endswith(f".{last}")]
    return candidates if len(candidates) <= _MOST_CANDIDATES else []


def _paired(prefix: str, strips: bool, missing: Iterable[str], unexpected: Collection[str]) -> dict[str, str]:
    """Returns a map from missing names to the unexpected names that differ by the prefix."""
    starting = missing if strips else (name for name in missing if name.startswith(prefix))
    pairs = {name: prefix + name if strips else name[len(prefix) :] for name in starting}
    return {name: source for name, source in pairs.items() if source in unexpected}


def _narrowed(start: str, rests: Iterable[str], replacement: str) -> tuple[Rename, ...]:
    """Returns rules for only the names that continue after `start` as these do."""
    rules: list[Rename] = []
    for parts in ({rest.partition(".")[0] for rest in rests}, set(rests)):
        if parts and len(parts) <= _MOST_HEADS:
            choice = "|".join(sorted(map(re.escape, parts)))
            rules.append(Rename(re.compile(rf"{start}(?=(?:{choice})(?:\.|$))"), replacement))
    return tuple(rules)


# Other names.


def adapter_names(names: Iterable[str]) -> list[str]:
    """Returns the names that belong to a LoRA adapter; empty if no name is the name of a LoRA matrix."""
    given = list(names)
    matrices = {name for name in given if ".lora_" in name and LORA_MATRIX.match(name)}
    prefixes = (PEFT_PREFIX, *KOHYA_PREFIXES)
    return [name for name in given if name in matrices or name.startswith(prefixes)] if matrices else []
