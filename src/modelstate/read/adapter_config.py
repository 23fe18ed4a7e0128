"""`adapter_config.json`, which peft writes beside an adapter: what its weights are multiplied with."""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard, TypeVar

from modelstate.errors import AdapterError, OpenError, ReadFailedError, SourceNotFoundError
from modelstate.read.source_file import read_whole

NAME = "adapter_config.json"
_T = TypeVar("_T")
_MAX_BYTES = 10_000_000
_MAX_PATTERN = 500
_NOT_MERGED = (
    *("use_dora", "use_qalora", "use_bdlora", "layer_replication", "target_parameters", "trainable_token_indices"),
    *("alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config", "megatron_config"),
    *("corda_config", "lora_ga_config", "kasa_config"),
)
"""Settings by which an adapter is more than two matrices, or stands for another model than its base."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""How `init_lora_weights` begins where the base had something taken off when the adapter was made, which is in no file
of the adapter. peft computes it anew whenever it loads one."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """How an adapter is scaled. The patterns are regular expressions for the ends of module paths."""

    alpha: float | None = None
    rank: int | None = None
    alphas: Mapping[re.Pattern[str], float] = field(default_factory=dict)
    ranks: Mapping[re.Pattern[str], int] = field(default_factory=dict)
    by_root: bool = False
    """Whether alpha is divided by the square root of the rank (rsLoRA, arXiv:2312.03732)."""
    fan_in_fan_out: bool | None = None
    modules_to_save: tuple[str, ...] = ()
    """Modules that are replaced as a whole."""

    def alpha_of(self, module: str) -> float | None:
        return _by_pattern(self.alphas, module, self.alpha)

    def rank_of(self, module: str) -> int | None:
        return _by_pattern(self.ranks, module, self.rank)


def _by_pattern(patterns: Mapping[re.Pattern[str], _T], module: str, otherwise: _T | None) -> _T | None:
    """As peft finds it: the first pattern that is the end of the path."""
    for pattern, value in patterns.items():
        if pattern.match(module):
            return value
    return otherwise


def config_beside(files: Sequence[str]) -> AdapterConfig | None:
    """The configuration in the directory of an adapter's first file; None where there is none.

    Raises `AdapterError` where it is damaged, or says that the adapter is of a kind that is not merged here.
    """
    if not files:
        return None
    path = os.path.join(os.path.dirname(files[0]), NAME)
    try:
        text = read_whole(path, _MAX_BYTES, "the adapter's configuration")
    except (OpenError, ReadFailedError) as error:
        if isinstance(error, SourceNotFoundError) and not os.path.islink(path):
            return None
        raise AdapterError(
            "the adapter's configuration cannot be read",
            where=path,
            found=f"{error.what}: {error.found}".removesuffix(": "),
            remedy=error.remedy,
        ) from error
    try:
        return _checked(json.loads(text), path)
    except (ValueError, RecursionError) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(
            "the adapter's configuration is damaged",
            where=path,
            found=f"{type(error).__name__}: {error}",
            remedy="copy it again; or remove it, and give ms.LoRA(alpha=...)",
        ) from error


def _checked(found: object, path: str) -> AdapterConfig:
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__} where an object should be")
    kind = found.get("peft_type", "LORA")
    unsupported = [name for name in _NOT_MERGED if found.get(name)]
    if str(found.get("init_lora_weights")).startswith(_CHANGE_THE_BASE):
        unsupported.append("init_lora_weights")
    if kind != "LORA" or unsupported:
        raise AdapterError(
            "an adapter of this kind is not merged here",
            where=path,
            expected='peft_type "LORA", with none of its variants',
            found=f"peft_type {kind!r}"
            if kind != "LORA"
            else ", ".join(f"{name}: {found[name]!r}" for name in unsupported),
            remedy="merge it with peft: PeftModel.merge_and_unload()"
            + (
                ", or save it for the untouched base: save_pretrained(path_initial_model_for_weight_conversion=...)"
                if unsupported == ["init_lora_weights"]
                else ""
            ),
        )
    modules = found.get("modules_to_save") or []
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise ValueError("modules_to_save is no list of names")
    return AdapterConfig(
        alpha=_alpha(found.get("lora_alpha")),
        rank=_rank(found.get("r")),
        alphas=_patterns(found.get("alpha_pattern") or {}, _alpha),
        ranks=_patterns(found.get("rank_pattern") or {}, _rank),
        by_root=_flag(found, "use_rslora"),
        fan_in_fan_out=_flag(found, "fan_in_fan_out") if "fan_in_fan_out" in found else None,
        modules_to_save=tuple(modules),
    )


def _patterns(found: object, checked: Callable[[object], _T | None]) -> dict[re.Pattern[str], _T]:
    """What stands for modules by patterns, each of which is compiled once."""
    if not isinstance(found, dict):
        raise ValueError("a pattern that is no object")
    patterns = {}
    for pattern, given in found.items():
        value = checked(given)
        if value is None:
            raise ValueError(f"the pattern {pattern[:80]!r} has no value")
        patterns[_compiled(pattern)] = value
    return patterns


def _alpha(value: object) -> float | None:
    if value is None:
        return None
    if not is_finite_number(value):
        raise ValueError(f"an alpha of {str(value)[:80]}")
    return float(value)


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number, and no boolean, that fits a float."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int of hundreds of digits
        return False


def _rank(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"a rank of {value!r}")
    return value


def _flag(found: Mapping[str, object], name: str) -> bool:
    value = found.get(name, False)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}")
    return bool(value)


def _compiled(pattern: str) -> re.Pattern[str]:
    """As peft has it, for the ends of module paths.

    Refuses expressions that could take for ever, which the file of a stranger may have.
    """
    repeats = sum(pattern.count(sign) for sign in "*+{")
    if len(pattern) > _MAX_PATTERN or repeats > 3 or re.search(r"\)[*+{?]", pattern) or re.search(r"\\\d", pattern):
        raise ValueError(f"the pattern {pattern[:80]!r} is not read: it could take very long to match")
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise ValueError(f"the pattern {pattern[:80]!r} is no regular expression: {error}") from error
