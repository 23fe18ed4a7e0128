"""The configuration of an adapter: `adapter_config.json` of peft, or the metadata that diffusers writes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, TypeVar

import msgspec

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.errors import CombineError, OpenError, ReadFailedError, SourceNotFoundError
from modelstate.io.files import read_whole

_T = TypeVar("_T")
_Rank = Annotated[int, msgspec.Meta(ge=1)]
_MAX_BYTES = 10_000_000
_MAX_PATTERN = 500
_METADATA = "lora_adapter_metadata"
_NOT_MERGED = (
    *("use_qalora", "use_bdlora", "layer_replication", "trainable_token_indices", "alora_invocation_tokens"),
    *("arrow_config", "velora_config", "monteclora_config", "megatron_config", "corda_config", "lora_ga_config"),
    "kasa_config",
)
"""Settings of variants with other arithmetic, or for another model than their base."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq", "mica")
"""Prefixes of `init_lora_weights` that change the base when the adapter is made. No file says how."""


class AdapterConfig(msgspec.Struct, frozen=True):
    """The scaling of an adapter. The patterns are regular expressions that match the ends of module paths."""

    lora_alpha: float | None = None
    r: _Rank | None = None
    alpha_pattern: dict[str, float] | None = None
    rank_pattern: dict[str, _Rank] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    fan_in_fan_out: bool | None = None
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None

    def __post_init__(self) -> None:
        for pattern in {**(self.alpha_pattern or {}), **(self.rank_pattern or {})}:
            _compiled(pattern)

    def alpha_of(self, path: str) -> float | None:
        return _by_pattern(self.alpha_pattern, path, self.lora_alpha)

    def rank_of(self, path: str) -> int | None:
        return _by_pattern(self.rank_pattern, path, self.r)


def adapter_configs(adapter: Checkpoint, where: str) -> dict[str, AdapterConfig]:
    """Returns the configurations of an adapter by the part of the pipeline; the key is "" for a model.

    Raises `CombineError` if a configuration is damaged, or if the adapter is of a kind that is not merged here.
    """
    path = os.path.join(os.path.dirname(adapter.files[0]), "adapter_config.json") if adapter.files else ""
    try:
        if path:
            configs = _decoded(read_whole(path, _MAX_BYTES, "the adapter's configuration"), path)
            return {"": configs.get("", AdapterConfig())}
    except (OpenError, ReadFailedError) as error:
        if isinstance(error, CombineError):
            raise
        if not isinstance(error, SourceNotFoundError) or os.path.islink(path):
            raise CombineError(
                "the adapter's configuration cannot be read",
                where=path,
                found=f"{error.what}: {error.found}".removesuffix(": "),
                remedy=error.remedy,
            ) from error
    text = adapter.metadata.get(_METADATA)
    return _decoded(text, f"{where}, {_METADATA}") if isinstance(text, str) else {}


def _decoded(text: bytes | str, where: str) -> dict[str, AdapterConfig]:
    try:
        settings = msgspec.json.decode(text, type=dict[str, object])
        parts: dict[str, dict[str, object]] = {}
        is_of_pipeline = any(name.endswith(".lora_alpha") for name in settings)
        for name, value in settings.items():
            part, _, setting = name.rpartition(".") if is_of_pipeline else ("", "", name)
            parts.setdefault(part, {})[setting] = value
        configs = {part: msgspec.convert(of_part, AdapterConfig) for part, of_part in parts.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CombineError(
            "the adapter's configuration is damaged",
            where=where,
            found=str(error),
            remedy="copy it again; or remove it, and give ms.merge.LoRA(alpha=...)",
        ) from error
    for of_part in parts.values():
        _check_kind(of_part, where)
    return configs


def _check_kind(settings: Mapping[str, object], where: str) -> None:
    """Raises `CombineError` for an adapter that is more than matrices to be added to an unchanged base."""
    unsupported = [name for name in _NOT_MERGED if settings.get(name)]
    if settings.get("peft_type", "LORA") != "LORA":
        unsupported.insert(0, "peft_type")
    of_base = str(settings.get("init_lora_weights")).startswith(_CHANGE_THE_BASE)
    if unsupported or of_base:
        shown = [*unsupported, "init_lora_weights"] if of_base else unsupported
        way = ", or save it for the untouched base: save_pretrained(path_initial_model_for_weight_conversion=...)"
        raise CombineError(
            "an adapter of this kind is not merged here",
            where=where,
            expected='peft_type "LORA", alone, with DoRA or with target_parameters',
            found=", ".join(f"{name}: {settings[name]!r}" for name in shown),
            remedy="merge it with peft: PeftModel.merge_and_unload()" + ("" if unsupported else way),
        )


def _by_pattern(patterns: Mapping[str, _T] | None, path: str, default: _T | None) -> _T | None:
    """Returns the value of the first pattern that matches the end of the path, as peft does."""
    return next((value for pattern, value in (patterns or {}).items() if _compiled(pattern).match(path)), default)


@lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern for the ends of module paths, as peft does.

    Raises `ValueError` for expressions that could take very long to match, because the file may be from an untrusted
    source: each repetition, and each group of alternatives, multiplies the ways in which a name can be matched.
    """
    groups = pattern.replace("(?:", "(")
    choices = sum(groups.count(sign) for sign in ("*+?{(" if "|" in groups else "*+?{"))
    if len(pattern) > _MAX_PATTERN or choices > 3 or re.search(r"\)[*+{?]|\\\d", pattern):
        raise ValueError(f"the pattern {pattern[:80]!r} is not read: it could take very long to match")
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise ValueError(f"the pattern {pattern[:80]!r} is not a regular expression: {error}") from error
