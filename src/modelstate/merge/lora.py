"""LoRA adapters of peft, diffusers and kohya's tools, merged into the weights of their base when these are read.

Method: "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al., arXiv:2106.09685. The arithmetic is that of
peft's `merge_and_unload`, step by step, so that the results are the same.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeGuard, TypeVar

import msgspec
import torch

from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.combine import Combination, Merged, label, versions_of
from modelstate.checkpoint.reduction import kind_of
from modelstate.errors import CombineError, OpenError, OptionError, ReadFailedError, SourceNotFoundError
from modelstate.formats.tree import FlatTree
from modelstate.io.files import read_whole
from modelstate.io.memory import aligned
from modelstate.planning.differences import KOHYA_PREFIXES, LORA_MATRIX, PEFT_PREFIX, adapter_names
from modelstate.rules.expression import lacks_values
from modelstate.spec import Allocate, Blocks, Combined, Fill, Stored, block_elements, bytes_key
from modelstate.text_format import listed, short_repr

CONFIG_NAME = "adapter_config.json"
_T = TypeVar("_T")
_SAVED = re.compile(r"\.modules_to_save(\.[^.]+)?(?=\.)")
_ORIGINAL = ".original_module."
_CONV = {3: torch.nn.functional.conv1d, 4: torch.nn.functional.conv2d, 5: torch.nn.functional.conv3d}
_CONV_COPIES = 3
"""Copies of its result that a convolution makes: it computes in another memory layout, and is brought into order."""
_OTHER_METHODS = re.compile(
    r"\.(?:(?P<DoRA>lora_magnitude_vector(?:\..+)?|dora_scale)|(?P<LoHa>hada_\w+)|(?P<LoKr>lokr_\w+)"
    r"|(?P<LoCon>lora_mid\.weight)|(?P<OFT>oft_\w+))$"
)
"""The names of tensors of other methods than LoRA, and of variants of it. LoCon without a third matrix is LoRA."""
_COMPONENTS = {
    "unet": ("unet", "diffusion_model", "model.diffusion_model"),
    "transformer": ("transformer", "diffusion_model", "model.diffusion_model"),
    "te": ("text_encoder", "te", "cond_stage_model.transformer"),
    "te1": ("text_encoder", "te1", "conditioner.embedders.0.transformer"),
    "te2": ("text_encoder_2", "te2"),
    "te3": ("text_encoder_3", "te3"),
}
"""What kohya's tools call the parts of a pipeline, with the paths of these parts. A base may be one part alone."""
_PARTS = {*_COMPONENTS, *(path for paths in _COMPONENTS.values() for path in paths)}
_METADATA = "lora_adapter_metadata"
"""The entry of a file's metadata that has the configuration of an adapter of diffusers."""
_HALF = (torch.float16, torch.bfloat16)
_MOST_SUGGESTED = 3
"""Problems that suggest a similar name: finding it compares a name with all names of the base, which is slow."""


@dataclass(frozen=True, slots=True)
class LoRA(Combination):
    """A base with its adapters merged, for `ms.open([base, adapter, ...], combine=ms.merge.LoRA())`.

    Each weight W for which an adapter has matrices A and B becomes W + alpha / r * B @ A, for linear layers,
    embeddings, `Conv1D` of transformers and convolutions, in the base's dtype. Biases and `modules_to_save` of an
    adapter replace those of the base. Several adapters are added one after the other. `alpha`, `r`, their overrides
    for single modules and the scaling of rsLoRA are read from the `adapter_config.json` beside an adapter, or from the
    metadata that diffusers writes; `alpha` of a module is also read from a tensor of this name. In files of diffusers
    and of kohya's tools that have none, it is the rank of the module. Arguments replace all of these, for all adapters
    and modules. DoRA, LoHa, LoKr and other variants are refused.

    Files of kohya's tools have underscores for the dots of a path. A name that stands for several modules of the base
    is refused.

    A matrix that is added to a tied weight of the base changes all its names, as it does in a live model.

    Args:
        alpha: the factor of the product, before it is divided by the rank.
        rank: the rank that all matrices must have; None takes it from their shapes.
        rslora: whether alpha is divided by the square root of the rank instead.
        fan_in_fan_out: whether square weights have their inputs first, as in `Conv1D`; or a bool for each glob pattern
            of modules, the first that matches. Other shapes are unambiguous. None decides for square weights by the
            other weights and by the adapter's configuration; if these contradict each other, it is required.

    Raises:
        OptionError: An argument has another type, or is out of range.

    Examples:
        >>> merged = ms.open(["base.safetensors", "adapter/"], combine=ms.merge.LoRA())
        >>> ms.load(model, merged)
    """

    alpha: float | None = None
    rank: int | None = None
    rslora: bool | None = None
    fan_in_fan_out: bool | Mapping[str, bool] | None = None

    def __post_init__(self) -> None:
        alpha, rank, flips = self.alpha, self.rank, self.fan_in_fan_out
        if alpha is not None and not is_finite_number(alpha):
            is_path = isinstance(alpha, str | os.PathLike)
            raise OptionError(
                "alpha= is not a finite number",
                found=short_repr(alpha),
                remedy="adapters are sources: ms.open([base, adapter], combine=ms.merge.LoRA())" if is_path else "",
            )
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise OptionError("rank= is not a positive integer", found=short_repr(rank))
        if not isinstance(self.rslora, bool | None):
            raise OptionError("rslora= is neither True nor False", found=short_repr(self.rslora))
        values = flips.values() if isinstance(flips, Mapping) else [flips]
        if not all(isinstance(value, bool | None) for value in values) or (
            isinstance(flips, Mapping) and None in values
        ):
            raise OptionError(
                "fan_in_fan_out= is neither True nor False",
                expected="one, or one for each pattern",
                found=short_repr(flips),
            )

    def merge(self, sources: Sequence[Checkpoint]) -> Merged:
        """Returns the weights of the base, to which the products of the adapters are added when they are read.

        Args:
            sources: the opened checkpoints: the base, and the adapters.

        Returns:
            The tensors by name.

        Raises:
            CombineError: the checkpoints are not a base and its adapters.

        Examples:
            >>> checkpoint = ms.open(["base.safetensors", "adapter/"], combine=ms.merge.LoRA())
        """
        base = sources[0]
        if adapter_names(base):
            raise CombineError(
                "the first checkpoint is an adapter, and its base has to be before it",
                where=base.source,
                expected="a base, and one adapter or more",
                found=listed(adapter_names(base), most=2),
                remedy="ms.open([base, adapter], combine=ms.merge.LoRA())",
            )
        if len(sources) < 2:
            raise CombineError("there is no adapter", where=base.source, expected="a base, and one adapter or more")
        for index, adapter in enumerate(sources[1:], 1):
            if not len(adapter):
                raise CombineError("an adapter has no tensors", where=label(sources, index))
            _refuse_other_methods(adapter, label(sources, index))
            if not any(name.startswith(PEFT_PREFIX) or LORA_MATRIX.match(name) for name in adapter):
                raise CombineError(
                    "this checkpoint is not an adapter: it has no LoRA matrices",
                    where=label(sources, index),
                    expected="names such as layer.lora_A.weight and layer.lora_B.weight",
                    found=listed(list(adapter), most=2),
                    remedy="load it with the library that made it, and save it with such names; of old diffusers: "
                    "pipeline.load_lora_weights(path), then pipeline.save_lora_weights(...)"
                    if any("lora" in name.lower() for name in adapter)
                    else "open it by itself, or average several models with combine=ms.merge.Average()",
                )
        problems: list[str] = []
        deltas: dict[str, list[_Delta]] = {}
        replaced: dict[str, tuple[int, Stored]] = {}
        for index, adapter in enumerate(sources[1:], 1):
            beside = config_beside(adapter.files)
            configs = {"": beside} if beside is not None else _configs_within(adapter, label(sources, index))
            reader = _AdapterReader(base, adapter, label(sources, index), configs, self)
            reader.read()
            problems += reader.problems
            for name, stored in reader.replaced.items():
                if name in replaced:
                    problems.append(f"{name!r} is replaced by {label(sources, index)} and by [{replaced[name][0]}]")
                if name in deltas:
                    problems.append(f"{name!r} is replaced by {label(sources, index)}, after something is added to it")
                replaced[name] = index, stored
            for delta in reader.deltas:
                deltas.setdefault(delta.name, []).append(delta)
        if problems:
            raise CombineError(
                f"tensors of adapters that do not fit the base ({len(problems):,})",
                where=base.source,
                found=listed(problems, most=12, between="; "),
                remedy="open the base that the adapter was trained for; its names may need the prefix of a wrapper",
            )
        tensors = _merged_tensors(base, deltas, {name: stored for name, (_, stored) in replaced.items()})
        for name, (_, stored) in replaced.items():
            like = base.get(name)
            if name not in deltas:
                tensors[name] = stored if like is None or like.dtype == stored.dtype else _cast(stored, like.dtype)
        return Merged(FlatTree(tensors, dict(base.flat.values), base.flat.containers), versions_of([base]))


class _Delta(msgspec.Struct, frozen=True):
    """What an adapter adds to one tensor of the base."""

    name: str
    layout: str
    """"linear", "transposed", "embedding", "conv", or "bias", which is one tensor instead of a product."""
    shape: tuple[int, ...]
    """The shape of the tensor of the base."""
    factors: tuple[Stored, ...]
    """A and B, or the bias."""
    scaling: float

    def begin(
        self, factors: Sequence[torch.Tensor], width: int, weight: torch.dtype, allocate: Allocate
    ) -> Callable[[range], torch.Tensor]:
        """Returns the function that computes some rows of what is added to a weight, from A and B.

        It computes in the dtype that peft computes with, and its result is valid until the next call.
        """
        dtype = _computed_in(weight)
        wide = [factor if factor.dtype == dtype else allocate(factor.shape, dtype).copy_(factor) for factor in factors]
        if self.layout == "conv":
            a, b = wide
            if a.dim() == 4 and a.shape[2:] == (1, 1):
                product = (b.squeeze(3).squeeze(2) @ a.squeeze(3).squeeze(2)).unsqueeze(2).unsqueeze(3)
            else:
                product = _CONV[a.dim()](a.transpose(0, 1), b).transpose(0, 1)
            product.mul_(self.scaling)
            return lambda rows: product[rows.start : rows.stop].reshape(len(rows), -1)
        memory = allocate((block_elements(self.shape, width),), dtype)
        if self.layout == "bias":
            (bias,) = wide
            return lambda rows: torch.mul(
                bias[rows.start : rows.stop, None], self.scaling, out=memory[: len(rows)].unsqueeze(1)
            )
        a, b = wide
        transposed = self.layout in ("embedding", "transposed")
        is_power_of_two = abs(math.frexp(self.scaling)[0]) == 0.5
        if is_power_of_two:  # a product with it is exact, so that B can be scaled once
            b = torch.mul(b, self.scaling, out=allocate(b.shape, dtype))

        def rows_of_product(rows: range) -> torch.Tensor:
            block = memory[: width * len(rows)]
            if transposed:
                product = torch.mm(b, a[:, rows.start : rows.stop], out=block.view(width, len(rows)))
            else:
                product = torch.mm(b[rows.start : rows.stop], a, out=block.view(len(rows), width))
            if not is_power_of_two:
                product.mul_(self.scaling)
            return product.T if transposed else product

        return rows_of_product

    def scratch_bytes(self, width: int, weight: torch.dtype) -> int:
        """Returns the memory of a thread for A and B, cast and scaled, and for what is added to a block."""
        dtype = _computed_in(weight)
        cast = 2 * sum(aligned(math.prod(factor.shape) * dtype.itemsize) for factor in self.factors)
        whole = math.prod(self.shape) * _CONV_COPIES if self.layout == "conv" else block_elements(self.shape, width)
        return cast + aligned(dtype.itemsize * whole)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that peft keeps an adapter in: that of its base, but float32 instead of half precision."""
    return torch.float32 if dtype in _HALF else dtype


class _AdapterReader:
    """Matches an adapter's tensors with those of the base, and gathers the problems."""

    def __init__(
        self,
        base: Checkpoint,
        adapter: Checkpoint,
        label: str,
        configs: Mapping[str, "AdapterConfig"],
        options: LoRA,
    ) -> None:
        self.base, self.adapter, self.label, self.configs, self.options = base, adapter, label, configs, options
        self.fan_in_fan_out = options.fan_in_fan_out
        self.alphas: dict[str, str] = {}
        """The names of the tensors that are the alpha of a module."""
        self.flips_square: bool | None = False
        self.texts: dict[str, str] = {}
        """The modules of the base as the adapter names them."""
        self._by_spelling: dict[str, list[str]] = {}
        """The modules of the base with a weight, by their paths with underscores, if the adapter has such names."""
        if any(name.startswith(KOHYA_PREFIXES) for name in adapter):
            for name in base:
                if name.endswith(".weight"):
                    path = name.removesuffix(".weight")
                    self._by_spelling.setdefault(path.replace(".", "_"), []).append(path)
        self.problems: list[str] = []
        self.deltas: list[_Delta] = []
        self.replaced: dict[str, Stored] = {}
        """The tensors that replace those of the base, by their names in the base."""

    def read(self) -> None:
        matrices: dict[str, dict[str, str]] = {}
        adapters: set[str] = set()
        duplicates: list[tuple[str, str]] = []
        for full in self.adapter:
            name = full.removeprefix(PEFT_PREFIX)
            match = LORA_MATRIX.match(name)
            is_alpha = match is None and name.endswith(".alpha") and name not in self.base
            if match is None and not is_alpha:
                self._replacement(full, name.replace(".base_layer.", "."))
                continue
            text = name.removesuffix(".alpha") if match is None else match["module"]
            module = self._module(text, full)
            if module is None:
                continue
            self.texts[module] = text
            if match is None:
                self.alphas[module] = full
                continue
            parts = (match["rest"] or "").split(".")
            last = parts.pop() if parts[-1] in ("weight", "bias", "") else ""
            adapters.add(".".join(parts))  # the adapter's name, empty if it is not in the file
            kind = {"down": "A", "up": "B"}.get(match["kind"], match["kind"])
            kind = f"{kind}.bias" if last == "bias" else kind
            if (other := matrices.setdefault(module, {}).setdefault(kind, full)) != full:
                duplicates.append((full, other))
        if len(adapters) > 1:
            self.problems.append(f"{self.label} holds several adapters: {listed(sorted(adapters))}")
            return
        for full, other in duplicates:
            self._problem(full, f"is another matrix for the same as {other!r}")
        self.flips_square = self._flips_square(matrices)
        for module, full in self.alphas.items():
            if module not in matrices:
                self._problem(full, "lacks its counterpart: there are no matrices of this module")
        for module, names in matrices.items():
            self._read_matrices(module, names)

    def _module(self, text: str, full: str) -> str | None:
        """Returns the path in the base of a module of the adapter; None after a problem.

        Files of diffusers put the part of the pipeline before it. Those of kohya's tools write it with underscores.
        """
        component, _, rest = text.partition(".")
        is_flat = not rest and text.startswith(KOHYA_PREFIXES)
        if f"{text}.weight" in self.base or full.startswith(PEFT_PREFIX) or not (is_flat or component in _PARTS):
            return text
        if not is_flat:
            return rest if f"{rest}.weight" in self.base else text
        flat = text.partition("_")[2]
        component, _, rest = flat.partition("_")
        paths = _COMPONENTS.get(component, ())
        spellings = {flat, *([rest] if paths else []), *(f"{path.replace('.', '_')}_{rest}" for path in paths)}
        modules = [module for spelling in sorted(spellings) for module in self._by_spelling.get(spelling, ())]
        if len(modules) == 1:
            return modules[0]
        if modules:
            self._problem(full, f"is for one of several modules, and does not say which: {listed(sorted(modules))}")
        else:
            self._problem(
                full, f"is for {rest if paths else flat!r} with dots for some underscores, which the base lacks"
            )
        return None

    def _config(self, module: str) -> tuple["AdapterConfig | None", str]:
        """Returns the configuration for a module, and the path that its patterns match."""
        text = self.texts[module]
        component, _, rest = text.partition(".")
        config = self.configs.get(component)
        return (self.configs.get(""), text) if config is None else (config, rest)

    def _alpha(self, module: str, first: str, rank: int) -> float | None:
        """Returns the alpha of a module; None after a problem."""
        if self.options.alpha is not None:
            return self.options.alpha
        if full := self.alphas.get(module):
            is_number = math.prod(self.adapter[full].shape) == 1 and not lacks_values(self.adapter.stored(full))
            number = self.adapter.tensor(full).reshape(()).item() if is_number else None
            if not is_finite_number(number):
                self._problem(full, "is not one finite number")
                return None
            return float(number)
        config, path = self._config(module)
        if (
            config is None
            and not first.startswith(PEFT_PREFIX)
            and first.endswith((".lora_A.weight", ".lora_down.weight"))
        ):
            return rank  # the convention of diffusers and of kohya's tools
        alpha = None if config is None else _by_pattern(config.alphas, path, config.alpha)
        if alpha is None:
            self._problem(first, "comes without adapter_config.json: give ms.merge.LoRA(alpha=...)")
        return alpha

    def _flips_square(self, matrices: dict[str, dict[str, str]]) -> bool | None:
        """Whether square weights have their inputs first, as those of `Conv1D` do; None if that is ambiguous.

        peft knows the class of each module, and its configuration only records that of the last one; so the shapes of
        the other weights count here as well.
        """
        if isinstance(self.fan_in_fan_out, bool):
            return self.fan_in_fan_out
        seen = set()
        for module, names in matrices.items():
            spec = self.base.get(f"{module}.weight")
            if spec is None or not names.keys() >= {"A", "B"} or len(spec.shape) != 2 or len(set(spec.shape)) == 1:
                continue
            if b := self.adapter[names["B"]].shape:
                seen.add(spec.shape[0] != b[0])
        seen |= {config.fan_in_fan_out for config in self.configs.values() if config.fan_in_fan_out is not None}
        return (True in seen) if len(seen) < 2 else None

    def _read_matrices(self, module: str, names: dict[str, str]) -> None:
        embedding = names.keys() == {"embedding_A", "embedding_B"}
        if not embedding and not {"A", "B"} <= names.keys() <= {"A", "B", "B.bias"}:
            self._problem(next(iter(names.values())), f"lacks its counterpart: there are {', '.join(sorted(names))}")
            return
        first, second = (names[f"embedding_{kind}" if embedding else kind] for kind in "AB")
        a, b = self.adapter[first], self.adapter[second]
        if a.dtype != b.dtype:
            self._problem(first, f"is {a.dtype}, and its B is {b.dtype}")
            return
        weight = self._base_name(f"{module}.weight", first)
        if weight is None:
            return
        shape = self.base[weight].shape
        layout = _layout(shape, a.shape, b.shape, embedding)
        if layout == "square":
            patterns = self.fan_in_fan_out.items() if isinstance(self.fan_in_fan_out, Mapping) else ()
            flips = next((flips for pattern, flips in patterns if fnmatchcase(module, pattern)), self.flips_square)
            if flips is None:
                self._problem(
                    first,
                    f"is for the square {weight!r}, which may have its inputs first or last: give "
                    "ms.merge.LoRA(fan_in_fan_out=...)",
                )
                return
            layout = "transposed" if flips else "linear"
        if layout is None:
            self._problem(first, f"of shape {a.shape}, with B of {b.shape}, does not fit {weight!r} of shape {shape}")
            return
        rank = a.shape[0]
        config, path = self._config(module)
        ranks = (self.options.rank, None if config is None else _by_pattern(config.ranks, path, config.rank))
        expected = {rank for rank in ranks if rank is not None}
        if expected - {rank}:
            self._problem(first, f"has rank {rank}, and rank {sorted(expected)} is expected")
            return
        alpha = self._alpha(module, first, rank)
        if alpha is None:
            return
        by_root = self.options.rslora
        if by_root is None:
            by_root = config is not None and config.by_root
        scaling = alpha / math.sqrt(rank) if by_root else alpha / rank
        self._add(weight, layout, (first, second), scaling)
        if "B.bias" in names:
            bias = self._base_name(f"{module}.bias", names["B.bias"])
            if bias is not None and self.base[bias].shape == self.adapter[names["B.bias"]].shape:
                self._add(bias, "bias", (names["B.bias"],), scaling)
            elif bias is not None:
                self._problem(names["B.bias"], f"does not fit {bias!r} of shape {self.base[bias].shape}")

    def _add(self, name: str, layout: str, factors: tuple[str, ...], scaling: float) -> None:
        stored = tuple(self.adapter.stored(factor) for factor in factors)
        for full, tensor in ((name, self.base.stored(name)), *zip(factors, stored, strict=True)):
            if not (tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and kind_of(tensor) == "strided"):
                self._problem(full, f"is {tensor.dtype}, to which nothing can be added")
                return
        self.deltas.append(_Delta(name, layout, tuple(self.base.stored(name).shape), stored, scaling))

    def _replacement(self, full: str, name: str) -> None:
        """Records a tensor that replaces one of the base."""
        if _ORIGINAL in name:
            return  # the base's tensor at the time when the adapter was made
        plain = {_SAVED.sub(r"\1", name), _SAVED.sub("", name)}  # with and without the adapter's name
        if len(plain) > 1 or plain != {name}:
            # The same tensor may be there by its plain name too.
            name = next((candidate for candidate in sorted(plain) if candidate in self.base), _SAVED.sub("", name))
            if PEFT_PREFIX + name in self.adapter or name in self.replaced:
                return
        module = f".{name.rpartition('.')[0]}."
        is_saved = any(f".{saved}." in module for config in self.configs.values() for saved in config.modules_to_save)
        if is_saved or self._base_name(name, full) is not None:
            self.replaced[name] = self.adapter.stored(full)

    def _base_name(self, name: str, full: str) -> str | None:
        """Returns the name if the base has it; otherwise records a problem with the tensor `full`."""
        if name in self.base:
            return name
        near = get_close_matches(name, self.base, n=1) if len(self.problems) < _MOST_SUGGESTED else []
        self._problem(full, f"is for {name!r}, which the base lacks" + (f" (but {near[0]!r})" if near else ""))
        return None

    def _problem(self, full: str, what: str) -> None:
        self.problems.append(f"{full!r} of {self.label} {what}")


def _refuse_other_methods(adapter: Checkpoint, where: str) -> None:
    """Raises `CombineError` for an adapter of another method than LoRA."""
    match = next(filter(None, map(_OTHER_METHODS.search, adapter)), None)
    if match is not None:
        raise CombineError(
            f"an adapter of this kind is not merged here: {match.lastgroup}",
            where=where,
            expected="the two matrices of LoRA for each module",
            found=match.string,
            remedy="merge it with the library that made it, and save the result: PeftModel.merge_and_unload() of peft, "
            "or create_lycoris_from_weights(1.0, path, model)[0].merge_to() of LyCORIS",
        )


def _configs_within(adapter: Checkpoint, where: str) -> dict[str, "AdapterConfig"]:
    """Returns the configurations in the metadata that diffusers writes, by the part of the pipeline; "" for a model."""
    text = adapter.metadata.get(_METADATA)
    if not isinstance(text, str):
        return {}
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__} where an object should be")
        if "lora_alpha" in content:
            return {"": _checked(content, where)}
        parts: dict[str, dict[str, object]] = {}
        for key, value in content.items():
            part, _, setting = key.partition(".")
            parts.setdefault(part, {})[setting] = value
        return {part: _checked(settings, where) for part, settings in parts.items()}
    except (ValueError, RecursionError) as error:
        if isinstance(error, CombineError):
            raise
        raise CombineError(
            "the adapter's configuration is damaged",
            where=f"{where}, {_METADATA}",
            found=f"{type(error).__name__}: {error}",
            remedy="copy the file again",
        ) from error


def _layout(weight: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], embedding: bool) -> str | None:
    """Returns how B @ A fits a weight; None if it does not."""
    if len(a) < 2 or len(a) != len(b) or a[0] != b[1] or not a[0]:
        return None
    if len(a) in _CONV:
        return "conv" if weight == (b[0], *a[1:]) and set(b[2:]) == {1} else None
    straight, across = weight == (b[0], a[1]), weight == (a[1], b[0])
    if len(a) != 2 or not (straight or across):
        return None
    if embedding:
        return "embedding" if across else None
    if straight and across:
        return "square"
    return "transposed" if across else "linear"


def _merged_tensors(
    base: Checkpoint, deltas: dict[str, list[_Delta]], replaced: Mapping[str, Stored]
) -> dict[str, Stored]:
    """Returns the tensors of the base. A tied tensor that something is added to is computed once for all its names."""
    keys = {name: bytes_key(stored, name) for name, stored in base.flat.tensors.items()}
    tied: dict[object, list[_Delta]] = {}
    for name, of_name in deltas.items():
        tied.setdefault(keys[name], []).extend(of_name)
    merged = {}
    for key, of_tensor in tied.items():
        names = [delta.name for delta in of_tensor]
        weight = base.stored(names[0])
        replacement = next((replaced[name] for name in names if name in replaced), weight)
        merged[key] = _merged(replacement, weight.dtype, of_tensor)
    return {name: merged.get(keys[name], stored) for name, stored in base.flat.tensors.items()}


def _merged(weight: Stored, dtype: torch.dtype, deltas: Sequence[_Delta]) -> Combined:
    """Returns a weight with everything that is added to it, to be computed when it is read."""
    shape = tuple(weight.shape)
    width = max(math.prod(shape[1:]), 1)
    # A convolution is computed as a whole.
    unit = max(math.prod(shape), 1) if any(delta.layout == "conv" for delta in deltas) else width
    wide = _computed_in(dtype)
    count = block_elements(shape, unit)

    def begin(factors: Sequence[torch.Tensor], allocate: Allocate) -> Fill:
        added: list[tuple[Callable[[range], torch.Tensor], bool]] = []
        start = 0
        for delta in deltas:
            its_factors = factors[start : start + len(delta.factors)]
            added.append((delta.begin(its_factors, width, dtype, allocate), delta.layout == "embedding"))
            start += len(delta.factors)
        sums = None if wide == dtype else allocate((count,), wide)

        def fill(out: torch.Tensor, blocks: Sequence[torch.Tensor], first: int) -> None:
            (block,) = blocks
            if block.data_ptr() != out.data_ptr():
                out.copy_(block)
            rows = range(first // width, (first + out.numel()) // width)
            total = out.view(len(rows), width)
            for rows_of, is_rounded in added:
                delta = rows_of(rows)
                if sums is None:
                    total += delta
                elif is_rounded:  # as peft does for an embedding
                    total += delta.to(dtype)
                else:  # much faster than an addition of two dtypes
                    total.copy_(sums[: out.numel()].view(len(rows), width).copy_(total).add_(delta))

        return fill

    factors = tuple(factor for delta in deltas for factor in delta.factors)
    scratch_bytes = sum(delta.scratch_bytes(unit, dtype) for delta in deltas)
    if wide != dtype:
        scratch_bytes += aligned(count * wide.itemsize) + count * dtype.itemsize  # the latter for a rounded delta
    build = Blocks(begin, len(factors), unit, scratch_bytes)
    return Combined(f"merged with {len(deltas)}", dtype, shape, (weight, *factors), build)


def _cast(stored: Stored, dtype: torch.dtype) -> Combined:
    def fill(out: torch.Tensor, blocks: Sequence[torch.Tensor], _: int) -> None:
        out.copy_(blocks[0])

    return Combined(str(dtype), dtype, tuple(stored.shape), (stored,), Blocks(lambda *_: fill))


_MAX_BYTES = 10_000_000
_MAX_PATTERN = 500
_NOT_MERGED = (
    *("use_dora", "use_qalora", "use_bdlora", "layer_replication", "target_parameters", "trainable_token_indices"),
    *("alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config", "megatron_config"),
    *("corda_config", "lora_ga_config", "kasa_config"),
)
"""Settings of adapters that are more than two matrices, or that are for another model than their base."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Prefixes of `init_lora_weights` that subtract something from the base when the adapter is made. It is in no file of
the adapter; peft computes it again when it loads one."""


class AdapterConfig(msgspec.Struct, frozen=True):
    """The scaling of an adapter. The patterns are regular expressions that match the ends of module paths."""

    alpha: float | None = None
    rank: int | None = None
    alphas: Mapping[re.Pattern[str], float] = msgspec.field(default_factory=dict)
    ranks: Mapping[re.Pattern[str], int] = msgspec.field(default_factory=dict)
    by_root: bool = False
    """Whether alpha is divided by the square root of the rank (rsLoRA, arXiv:2312.03732)."""
    fan_in_fan_out: bool | None = None
    modules_to_save: tuple[str, ...] = ()
    """Modules that the adapter replaces as a whole."""


def _by_pattern(patterns: Mapping[re.Pattern[str], _T], module: str, default: _T | None) -> _T | None:
    """Returns the value of the first pattern that matches the end of the path, as peft does."""
    for pattern, value in patterns.items():
        if pattern.match(module):
            return value
    return default


def config_beside(files: Sequence[str]) -> AdapterConfig | None:
    """Reads the configuration in the directory of an adapter's first file; None if there is none.

    Raises `CombineError` if it is damaged, or if the adapter is of a kind that is not merged here.
    """
    if not files:
        return None
    path = os.path.join(os.path.dirname(files[0]), CONFIG_NAME)
    try:
        text = read_whole(path, _MAX_BYTES, "the adapter's configuration")
    except (OpenError, ReadFailedError) as error:
        if isinstance(error, SourceNotFoundError) and not os.path.islink(path):
            return None
        raise CombineError(
            "the adapter's configuration cannot be read",
            where=path,
            found=f"{error.what}: {error.found}".removesuffix(": "),
            remedy=error.remedy,
        ) from error
    try:
        return _checked(json.loads(text), path)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CombineError):
            raise
        raise CombineError(
            "the adapter's configuration is damaged",
            where=path,
            found=f"{type(error).__name__}: {error}",
            remedy="copy it again; or remove it, and give ms.merge.LoRA(alpha=...)",
        ) from error


def _checked(content: object, path: str) -> AdapterConfig:
    """Returns the configuration in the content of its file. Raises `ValueError` if it is damaged."""
    if not isinstance(content, dict):
        raise ValueError(f"a {type(content).__name__} where an object should be")
    kind = content.get("peft_type", "LORA")
    unsupported = [name for name in _NOT_MERGED if content.get(name)]
    if str(content.get("init_lora_weights")).startswith(_CHANGE_THE_BASE):
        unsupported.append("init_lora_weights")
    if kind != "LORA" or unsupported:
        raise CombineError(
            "an adapter of this kind is not merged here",
            where=path,
            expected='peft_type "LORA", with none of its variants',
            found=f"peft_type {kind!r}"
            if kind != "LORA"
            else ", ".join(f"{name}: {content[name]!r}" for name in unsupported),
            remedy="merge it with peft: PeftModel.merge_and_unload()"
            + (
                ", or save it for the untouched base: save_pretrained(path_initial_model_for_weight_conversion=...)"
                if unsupported == ["init_lora_weights"]
                else ""
            ),
        )
    modules = content.get("modules_to_save") or []
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise ValueError("modules_to_save is not a list of names")
    return AdapterConfig(
        alpha=_alpha(content.get("lora_alpha")),
        rank=_rank(content.get("r")),
        alphas=_patterns(content.get("alpha_pattern") or {}, _alpha),
        ranks=_patterns(content.get("rank_pattern") or {}, _rank),
        by_root=_flag(content, "use_rslora"),
        fan_in_fan_out=_flag(content, "fan_in_fan_out") if "fan_in_fan_out" in content else None,
        modules_to_save=tuple(modules),
    )


def _patterns(values: object, check: Callable[[object], _T | None]) -> dict[re.Pattern[str], _T]:
    """Returns the checked values by their compiled patterns."""
    if not isinstance(values, dict):
        raise ValueError("a pattern that is not an object")
    patterns = {}
    for pattern, unchecked in values.items():
        value = check(unchecked)
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
    """Whether a value is a finite number that fits a float; a bool is not a number here."""
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


def _flag(content: Mapping[str, object], name: str) -> bool:
    value = content.get(name, False)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}")
    return bool(value)


def _compiled(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern for the ends of module paths, as peft does.

    Refuses expressions that could take very long to match, because the file may come from an untrusted source: each
    repetition, and each group of alternatives, multiplies the ways in which a name can be matched.
    """
    groups = pattern.replace("(?:", "(")
    choices = sum(groups.count(sign) for sign in ("*+?{(" if "|" in groups else "*+?{"))
    if len(pattern) > _MAX_PATTERN or choices > 3 or re.search(r"\)[*+{?]", pattern) or re.search(r"\\\d", pattern):
        raise ValueError(f"the pattern {pattern[:80]!r} is not read: it could take very long to match")
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise ValueError(f"the pattern {pattern[:80]!r} is not a regular expression: {error}") from error
