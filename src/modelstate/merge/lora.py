"""LoRA adapters of peft, diffusers and kohya's tools, merged into the weights of their base when these are read.

The tensors of an adapter are matched with those of the base; what it adds to a weight is computed while the weight is
read. The arithmetic is that of peft's `merge_and_unload`, step by step, so that the results are the same.

Methods: "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al., arXiv:2106.09685; "DoRA: Weight-Decomposed
Low-Rank Adaptation", Liu et al., arXiv:2402.09353.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain, permutations
from typing import Annotated, TypeGuard

import msgspec
import torch

from modelstate.arguments import check_flag, invalid_option, is_number
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.combine import Combination, label, refuse, versions_of
from modelstate.checkpoint.reduction import kind_of
from modelstate.formats.tree import FlatTree
from modelstate.io.files import read_whole
from modelstate.io.memory import aligned
from modelstate.planning.matching import KOHYA_PREFIXES, LORA_MATRIX, PEFT_PREFIX, adapter_names
from modelstate.rules.expression import lacks_values
from modelstate.spec import Allocate, Blocks, Combined, FillBlock, Stored, block_elements
from modelstate.text_format import count, listed

_Rank = Annotated[int, msgspec.Meta(ge=1)]
_Roles = dict[str, str]
"""The names of the tensors of a module by what they are: "A", "B", "B.bias", "magnitude_vector", "alpha", ..."""
_CONVOLUTIONS = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}
_NOT_MERGED = re.compile(
    r"^(?:use_qalora|use_bdlora|layer_replication|trainable_token_indices|alora_invocation_tokens|arrow_config"
    r"|velora_config|monteclora_config|megatron_config|corda_config|lora_ga_config|kasa_config)="
    r"|^peft_type=(?!'LORA'$)|^init_lora_weights='(?:pissa|olora|corda|lora_ga|loftq|mica)"
    r"|\.(?:(?P<DoRA_of_LyCORIS>dora_scale)|(?P<LoHa>hada_\w+)|(?P<LoKr>lokr_\w+)|(?P<LoCon>lora_mid\.weight)"
    r"|(?P<OFT>oft_\w+))$"
)
"""Settings and tensors of other arithmetic than that of LoRA, or for another model than the base: some initialisations
change the base when the adapter is made, and no file says how. LoCon without a third matrix is LoRA."""
_WRAPPED = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.)")
"""The parts of a name by which peft wraps the modules of a model."""
_COMPONENTS = {
    "unet": ("unet_", "diffusion_model_", "model_diffusion_model_", ""),
    "transformer": ("transformer_", "diffusion_model_", "model_diffusion_model_", ""),
    "te": ("text_encoder_", "te_", "cond_stage_model_transformer_", ""),
    "te1": ("text_encoder_", "te1_", "conditioner_embedders_0_transformer_", ""),
    "te2": ("text_encoder_2_", "te2_", ""),
    "te3": ("text_encoder_3_", "te3_", ""),
}
"""What kohya's tools call the parts of a pipeline, with the paths of these parts, where each dot is an underscore. A
base may be one part alone."""
_PART = re.compile(r"(?:unet|transformer|diffusion_model|text_encoder(?:_[23])?|te[123]?)\.")
"""The part of a pipeline before the path of a module, in files of diffusers."""
_OTHER_BASE = (
    "open the base that the adapter was trained for; its names may need the prefix of a wrapper. Names of experts that "
    "transformers fuses: ms.convert_checkpoint(base, path, rules=ms.rules.from_transformers(model))"
)
_OTHER_CONFIG = "copy the configuration again; or remove it, and give ms.merge.LoRA(alpha=...)"


@dataclass(frozen=True, slots=True)
class LoRA(Combination):
    """A base with its adapters merged, for `ms.open([base, adapter, ...], combine=ms.merge.LoRA())`.

    Each weight W for which an adapter has matrices A and B becomes W + alpha / r * B @ A, for linear layers,
    embeddings, `Conv1D` of transformers, convolutions and parameters (`target_parameters` of peft, such as fused
    experts), in the base's dtype. With a magnitude of DoRA, each output of the sum gets that norm. Biases and
    `modules_to_save` of an adapter replace those of the base. Several adapters are added one after the other. `alpha`,
    `r`, their overrides for single modules and the scaling of rsLoRA are read from the `adapter_config.json` beside an
    adapter, or from the metadata that diffusers writes; `alpha` of a module is also read from a tensor of this name. In
    files of diffusers and of kohya's tools that have none, it is the rank of the module. Arguments replace all of
    these, for all adapters and modules. LoHa, LoKr and other variants are refused.

    Files of kohya's tools have underscores for the dots of a path. A name that stands for several modules of the base
    is refused.

    A matrix that is added to a tied weight of the base changes all its names, as it does in a live model.

    Args:
        alpha: The factor of the product, before it is divided by the rank.
        rslora: Whether alpha is divided by the square root of the rank instead.
        fan_in_fan_out: Whether square weights have their inputs first, as in `Conv1D`. Other shapes are unambiguous.
            None decides for square weights by the other weights and by the adapter's configuration; if these contradict
            each other, it is required.

    Raises:
        OptionError: An argument has another type, or is out of range.

    Examples:
        >>> merged = ms.open(["base.safetensors", "adapter/"], combine=ms.merge.LoRA())
        >>> ms.load(model, merged)
    """

    alpha: float | None = None
    rslora: bool | None = None
    fan_in_fan_out: bool | None = None

    def __post_init__(self) -> None:
        check_flag("rslora", self.rslora, accepts_none=True)
        check_flag("fan_in_fan_out", self.fan_in_fan_out, accepts_none=True)
        if self.alpha is not None and not _is_finite_number(self.alpha):
            expected = "a finite number; adapters are sources: ms.open([base, adapter], combine=ms.merge.LoRA())"
            raise invalid_option("alpha", "is not a finite number", self.alpha, expected=expected)

    def merge(self, sources: Sequence[Checkpoint]) -> FlatTree:
        """Returns the weights of the base, to which the products of the adapters are added when they are read.

        Args:
            sources: The opened checkpoints: the base, and the adapters.

        Returns:
            The tensors by name.

        Raises:
            CombineError: The checkpoints are not a base and its adapters.

        Examples:
            >>> checkpoint = ms.open(["base.safetensors", "adapter/"], combine=ms.merge.LoRA())
        """
        base, matcher = sources[0], _AdapterMatcher(sources[0], self)
        if adapter_names(base) or len(sources) < 2:
            is_adapter = "the first checkpoint is an adapter: its base has to come before it"
            what = is_adapter if adapter_names(base) else "there is no adapter"
            matcher.problems[what] = "ms.open([base, adapter], combine=ms.merge.LoRA())"
        else:
            for index, adapter in enumerate(sources[1:], 1):
                matcher.read(adapter, label(sources, index))
        refuse("adapters cannot be merged into their base", sources, matcher.problems, matcher.problems.values())
        return FlatTree(matcher.merged(), dict(base.flat.values), base.flat.containers, versions_of([base]))


class _WeightDelta(msgspec.Struct):
    """What an adapter adds to a tensor of the base: scaling * B @ A, to which DoRA gives a norm; or a bias."""

    scaling: float
    is_transposed: bool | None = False
    """Whether the weight has its inputs first; None as long as that is not clear."""
    is_rounded: bool = False
    """Whether peft rounds the product to the dtype of the weight before it adds it."""
    experts: int = 0
    """The matrices that the weight consists of; 0 for one matrix without a dimension for them."""
    factors: tuple[Stored, ...] = ()
    """A, B and the magnitude of DoRA; or a bias alone."""

    @property
    def is_convolution(self) -> bool:
        return tuple(self.factors[0].shape[2:]) not in ((), (1, 1))

    def product(self, factors: Sequence[torch.Tensor], rows: slice, memory: torch.Tensor) -> torch.Tensor:
        """Returns the product for some rows of the weight; those of a convolution are all of its rows."""
        if len(factors) == 1:
            return memory.copy_(factors[0][rows])
        a, b = factors[:2]
        if self.is_convolution:
            return _CONVOLUTIONS[a.dim()](a.transpose(0, 1), b).transpose(0, 1)
        if self.experts:
            a, b = a.view(self.experts, -1, a.shape[1])[rows], b.view(len(b), -1, self.experts)[..., rows]
            return torch.einsum(f"ore,eri->{'eio' if self.is_transposed else 'eoi'}", b, a)
        if self.is_transposed:
            return torch.mm(b, a[:, rows], out=memory.view(len(b), -1)).T
        return torch.mm(b.flatten(1)[rows], a.flatten(1), out=memory.view(-1, a[0].numel()))


def _merged(weight: Stored, dtype: torch.dtype, deltas: Sequence[_WeightDelta] = ()) -> Stored:
    """Returns a weight in a dtype, with everything that is added to it, to be computed when it is read."""
    if weight.dtype == dtype and not deltas:
        return weight
    shape, has_dora = tuple(weight.shape), any(len(delta.factors) == 3 for delta in deltas)
    row = max(math.prod(shape[1:]), 1)
    # The rows of a convolution, and of a weight whose columns get a norm, cannot be computed one by one.
    needs_whole = any(delta.is_convolution or (len(delta.factors) == 3 and delta.is_transposed) for delta in deltas)
    unit = max(math.prod(shape), 1) if needs_whole else row
    size = block_elements(shape, unit)
    # peft keeps adapters of a base in half precision in float32.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def begin(parts: Sequence[torch.Tensor], allocate: Allocate) -> FillBlock:
        memory, values = allocate((2, size), wide), iter([part.to(wide) for part in parts])
        factors = [[next(values) for _ in delta.factors] for delta in deltas]

        def fill(out: torch.Tensor, blocks: Sequence[torch.Tensor], first: int) -> None:
            if blocks[0].data_ptr() != out.data_ptr():
                out.copy_(blocks[0])
            block = out.view(-1, *shape[1:])
            original = block.clone() if has_dora and len(deltas) > 1 else block
            rows = slice(first // row, (first + out.numel()) // row)
            for delta, of_delta in zip(deltas, factors, strict=True):
                product = delta.product(of_delta, rows, memory[0, : out.numel()]).view(block.shape).mul_(delta.scaling)
                if len(of_delta) == 3:
                    total = (original + product).flatten(1)
                    norm = torch.linalg.norm(total, dim=0 if delta.is_transposed else 1, keepdim=True)
                    magnitude = of_delta[2].flatten()[slice(None) if delta.is_transposed else rows]
                    total = total if original is block else (block + product).flatten(1)
                    block.copy_((magnitude.view_as(norm) / norm * total).view(block.shape))
                    continue
                # In the dtype of the product: twice as fast as an addition of two dtypes.
                total = block if dtype == wide else memory[1, : out.numel()].view(block.shape).copy_(block)
                total += product.to(dtype) if delta.is_rounded else product
                block.copy_(total)

        return fill

    parts = tuple(factor for delta in deltas for factor in delta.factors)
    temporaries = 2 + 3 * has_dora + 2 * any(delta.is_convolution for delta in deltas)
    elements = sum(math.prod(part.shape) for part in parts) + temporaries * size
    build = Blocks(begin, len(parts), unit, aligned(elements * wide.itemsize))
    return Combined(f"merged with {len(deltas)}", dtype, shape, (weight, *parts), build)


class _MisfitError(Exception):
    """Why a tensor of an adapter, or the adapter, cannot be merged; and what to do about it, if that is known."""


class _AdapterMatcher:
    """Matches the tensors of adapters with those of the base, one adapter after the other.

    Attributes:
        problems: What does not fit, each with its remedy.
        deltas: What the adapters add to tensors of the base, by the names of these.
        replaced: The tensors that replace those of the base.
        by_spelling: The modules of the base with a weight, by their paths with underscores.
    """

    def __init__(self, base: Checkpoint, options: LoRA) -> None:
        self.base, self.options = base, options
        self.problems: dict[str, str] = {}
        self.deltas: dict[str, list[_WeightDelta]] = {}
        self.replaced: dict[str, Stored] = {}
        self.by_spelling: dict[str, list[str]] = {}
        for path in (name.removesuffix(".weight") for name in base if name.endswith(".weight")):
            self.by_spelling.setdefault(path.replace(".", "_"), []).append(path)

    def read(self, adapter: Checkpoint, at: str) -> None:
        """Matches the tensors of one more adapter, and gathers the problems."""
        self.adapter, self.label = adapter, at
        modules, named = dict[str, dict[str, _Roles]](), set[str]()
        with self._gathering():
            self.configs = _configs_of(adapter)
            self.orientations = {(False, config.fan_in_fan_out) for config in self.configs.values()}
            self.unclear: list[tuple[str, _WeightDelta]] = []
            self.changed: dict[str, str] = {}
            for full in adapter:
                with self._gathering():
                    name = full.removeprefix(PEFT_PREFIX)
                    if match := LORA_MATRIX.match(name):
                        named.add(match["adapter"] or "")  # empty if the adapter's name is not in the file
                        text, role = match["module"], {"down": "A", "up": "B"}.get(match["kind"], match["kind"])
                        role += ".bias" if match["last"] == "bias" else ""
                    elif name.endswith(".alpha") and name not in self.base:
                        text, role = name.removesuffix(".alpha"), "alpha"
                    else:
                        self._replace(full, name)
                        continue
                    roles = modules.setdefault(text.replace(".base_layer", ""), {}).setdefault(text, {})
                    if (other := roles.setdefault(role, full)) != full:
                        raise _MisfitError(f"{full!r} is another matrix for the same as {other!r}")
            if len(named) > 1:
                raise _MisfitError(f"it holds several adapters: {listed(sorted(named))}")
            for text, wrappers in modules.items():
                with self._gathering():
                    self._read_module(text, wrappers.values())
            for first, delta in self.unclear:
                with self._gathering():
                    delta.is_transposed = self._flips_square(first, bool(delta.experts))

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Records the problem where something does not fit, and goes on."""
        try:
            yield
        except _MisfitError as error:
            what, remedy = (*error.args, _OTHER_BASE)[:2]
            self.problems[f"{self.label}: {what}"] = remedy

    def merged(self) -> dict[str, Stored]:
        """Returns all tensors of the result. One that something is added to is computed once for all its names."""
        tensors = dict(self.base.flat.tensors)
        tied = {name: names for names in self.base.aliases for name in names}
        for names in dict.fromkeys(tied.get(name, (name,)) for name in self.deltas):
            changed = [name for name in names if name in self.deltas]
            weights = [self.replaced[name] for name in changed if name in self.replaced] or [tensors[names[0]]]
            deltas = [delta for name in changed for delta in self.deltas[name]]
            tensors |= dict.fromkeys(names, _merged(weights[0], self.base[names[0]].dtype, deltas))
        for name, stored in self.replaced.items():
            if name not in self.deltas:
                tensors[name] = _merged(stored, self.base[name].dtype if name in self.base else stored.dtype)
        return tensors

    def _replace(self, full: str, wrapped: str) -> None:
        """Records a tensor that replaces one of the base. The same tensor may be there by its plain name too."""
        name = _WRAPPED.sub("", wrapped)
        if ".original_module." in name or (name != wrapped and PEFT_PREFIX + name in self.adapter):
            return
        module = f".{name.rpartition('.')[0]}."
        if not any(f".{of}." in module for config in self.configs.values() for of in config.modules_to_save or ()):
            self._check_name(name, full)
        if name in self.replaced or name in self.deltas:
            raise _MisfitError(f"{full!r} replaces {name!r}, which another tensor has changed")
        self.replaced[name] = self.adapter.stored(full)

    def _read_module(self, text: str, wrappers: Collection[_Roles]) -> None:
        """Adds the products of a module's matrices to the weights that they fit.

        peft wraps a module once for each of its parameters that has matrices. The wrappers do not name the parameter.
        """
        for roles in wrappers:
            matrices = sorted(roles.keys() - {"alpha", "magnitude_vector"})
            if matrices not in (["A", "B"], ["A", "B", "B.bias"], ["embedding_A", "embedding_B"]):
                there = ", ".join(matrices) or "no matrices of this module"
                raise _MisfitError(f"{next(iter(roles.values()))!r} lacks its counterpart: there are {there}")
        pairs = [{role.removeprefix("embedding_"): name for role, name in roles.items()} for roles in wrappers]
        first = pairs[0]["A"]
        module = self._path(text, first)
        targets = [of for config in self.configs.values() for of in config.target_parameters or ()]
        named = {f"{module}.{target.rpartition('.')[2]}": target for target in targets}
        parameters = sorted(name for name, target in named.items() if f".{name}".endswith(f".{target}"))
        weights = [name for name in parameters if name in self.base] or parameters[:1] or [f"{module}.weight"]
        self._check_name(weights[0], first)
        if not len(pairs) == len(weights) <= 6:  # whose orders are few enough to be searched
            raise _MisfitError(f"{first!r} belongs to {count(len(pairs), 'pair')} of matrices for {listed(weights)}")
        fitting = []
        for order in permutations(weights):
            fits = [self._orientations(*pair, bool(parameters)) for pair in zip(pairs, order, strict=True)]
            fitting += [zip(pairs, order, fits, strict=True)] if all(fits) else []
        if len(fitting) > 1:
            raise _MisfitError(f"{first!r} fits several of {listed(weights)}", "merge this adapter with peft")
        if not fitting:
            a, b = (f"{of.dtype} of shape {of.shape}" for of in (self.adapter[pairs[0][role]] for role in "AB"))
            like = f"{weights[0]!r} of shape {self.base[weights[0]].shape}"
            raise _MisfitError(f"{first!r}, {a}, with {b}, does not fit {like}")
        for roles, weight, flips in fitting[0]:
            self._add_product(roles, weight, flips, weight if parameters else text)

    def _path(self, text: str, full: str) -> str:
        """Returns the path in the base of a module of the adapter.

        Files of diffusers put the part of the pipeline before it. Those of kohya's tools write it with underscores.
        """
        if f"{text}.weight" in self.base or full.startswith(PEFT_PREFIX):
            return text
        if "." in text or not text.startswith(KOHYA_PREFIXES):
            part = _PART.match(text)
            return text[part.end() :] if part and f"{text[part.end() :]}.weight" in self.base else text
        flat = text.partition("_")[2]
        component, _, rest = flat.partition("_")
        spellings = {flat, *(path + rest for path in _COMPONENTS.get(component, ()))}
        modules = sorted(module for spelling in spellings for module in self.by_spelling.get(spelling, ()))
        if len(modules) != 1:
            several = f"one of several modules, and does not say which: {listed(modules)}"
            path = rest if component in _COMPONENTS else flat
            missing = f"{path!r} with dots for some underscores, which the base lacks"
            raise _MisfitError(f"{full!r} is for {several if modules else missing}")
        return modules[0]

    def _orientations(self, roles: _Roles, weight: str, is_parameter: bool) -> list[bool]:
        """Returns whether a weight may have its inputs last (False) and first (True); none if the matrices do not fit.

        A weight of three dimensions consists of a matrix for each expert, which has its own rows of A.
        """
        a, b = (self.adapter[roles[role]] for role in "AB")
        shape, inputs, outputs = self.base[weight].shape, a.shape[1:], b.shape[:1]
        fits = 2 <= len(a.shape) == len(b.shape) <= 5 and a.shape[0] == b.shape[1] > 0
        if a.dtype != b.dtype or not fits:
            return []
        if len(a.shape) > 2:
            return [False] if shape == outputs + inputs and {*b.shape[2:]} == {1} else []
        possible = (True,) if _is_embedding(roles) else (False,) if is_parameter else (False, True)
        if is_parameter and len(shape) == 3 and shape[0] and a.shape[0] % shape[0] == 0:
            possible, shape = (False, True), shape[1:]
        return [flips for flips in possible if shape == (inputs + outputs if flips else outputs + inputs)]

    def _flips_square(self, first: str, of_experts: bool) -> bool:
        """Whether square weights have their inputs first, as those of `Conv1D` do.

        peft knows the class of each module, and its configuration only records that of the last one; so the shapes of
        the other weights count here as well.
        """
        if self.options.fan_in_fan_out is not None:
            return self.options.fan_in_fan_out
        seen = {flips for kind, flips in self.orientations if kind == of_experts and flips is not None}
        if len(seen) > 1 or (of_experts and not seen):
            what = f"{first!r} is for a square weight, which may have its inputs first or last"
            raise _MisfitError(what, "give ms.merge.LoRA(fan_in_fan_out=...)")
        return True in seen

    def _add_product(self, roles: _Roles, weight: str, fits: list[bool], path: str) -> None:
        """Records the product of two matrices for a weight, and the bias of the second.

        The path is that of the module in the adapter; of a parameter, it is the name in the base.
        """
        is_parameter, is_embedding = path == weight, _is_embedding(roles)
        first, shape, a = roles["A"], self.base[weight].shape, self.adapter[roles["A"]].shape
        flips = fits[0] if len(fits) == 1 else None
        experts = shape[0] if len(a) == 2 and len(shape) == 3 else 0
        part, _, rest = path.partition(".")
        config, path = (self.configs[part], rest) if part in self.configs else (self.configs[""], path)
        rank = a[0] // (experts or 1)
        if (expected := _by_pattern(config.rank_pattern, path, config.r)) not in (None, rank):
            raise _MisfitError(f"{first!r} has rank {rank}, and rank {expected} is expected")
        alpha = self.options.alpha
        if alpha is None and (full := roles.get("alpha")):
            is_number = math.prod(self.adapter[full].shape) == 1 and not lacks_values(self.adapter.stored(full))
            alpha = self.adapter.tensor(full).reshape(()).item() if is_number else None
            if not _is_finite_number(alpha):
                raise _MisfitError(f"{full!r} is not one finite number")
        elif alpha is None:
            alpha = _by_pattern(config.alpha_pattern, path, config.lora_alpha)
        if alpha is None:  # without any setting it is the rank, by the convention of diffusers and of kohya's tools
            is_usual = not first.startswith(PEFT_PREFIX) and first.endswith((".lora_A.weight", ".lora_down.weight"))
            if config != _AdapterConfig() or not is_usual:
                what = f"{first!r} comes without the lora_alpha of an adapter_config.json"
                raise _MisfitError(what, "give ms.merge.LoRA(alpha=...)")
            alpha = rank
        by_root = config.use_rslora if self.options.rslora is None else self.options.rslora
        scaling = alpha / (math.sqrt(rank) if by_root else rank)
        magnitude = [roles["magnitude_vector"]] if "magnitude_vector" in roles else []
        if magnitude and (is_parameter or math.prod(self.adapter[magnitude[0]].shape) != shape[bool(flips)]):
            raise _MisfitError(f"{magnitude[0]!r} does not fit {weight!r} of shape {shape}")
        if config.use_dora and not magnitude:
            raise _MisfitError(f"{first!r} lacks its counterpart: there is no lora_magnitude_vector, which DoRA needs")
        delta = _WeightDelta(scaling, flips, is_embedding or is_parameter, experts)
        self._add(weight, delta, first, roles["B"], *magnitude)
        if flips is None:
            self.unclear.append((first, delta))
        elif len(a) == 2 and not is_embedding:
            self.orientations.add((experts > 0, flips))
        if of_b := roles.get("B.bias"):
            bias = f"{weight.rpartition('.')[0]}.bias"
            self._add(bias, _WeightDelta(scaling, is_rounded=is_parameter), of_b)
            if self.base[bias].shape != self.adapter[of_b].shape:
                raise _MisfitError(f"{of_b!r} does not fit {bias!r} of shape {self.base[bias].shape}")

    def _add(self, name: str, delta: _WeightDelta, *factors: str) -> None:
        self._check_name(name, factors[0])
        delta.factors = tuple(self.adapter.stored(factor) for factor in factors)
        if (other := self.changed.setdefault(name, factors[0])) != factors[0]:
            raise _MisfitError(f"{factors[0]!r} is another matrix for the same as {other!r}")
        if name in self.replaced and tuple(self.replaced[name].shape) != self.base[name].shape:
            raise _MisfitError(f"{factors[0]!r} is for {name!r}, which the adapter replaces by another shape")
        for full, tensor in zip((name, *factors), (self.base.stored(name), *delta.factors), strict=True):
            if not (tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and kind_of(tensor) == "strided"):
                raise _MisfitError(f"{full!r} is {tensor.dtype}, to which nothing can be added")
        self.deltas.setdefault(name, []).append(delta)

    def _check_name(self, name: str, full: str) -> None:
        if name not in self.base:
            # This compares the name with all names of the base, which is slow.
            near = get_close_matches(name, self.base, n=1) if len(self.problems) < 3 else []
            but = f" (but {near[0]!r})" if near else ""
            raise _MisfitError(f"{full!r} is for {name!r}, which the base lacks{but}")


def _is_embedding(roles: _Roles) -> bool:
    return ".lora_embedding_A" in roles["A"]


def _is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number that fits a float; a bool is not a number here."""
    return is_number(value) and abs(value) <= torch.finfo(torch.float64).max


# The configuration: `adapter_config.json` of peft, or the metadata that diffusers writes.


class _AdapterConfig(msgspec.Struct, frozen=True):
    """The settings of an adapter. The patterns are regular expressions that match the ends of module paths."""

    lora_alpha: float | None = None
    r: _Rank | None = None
    alpha_pattern: dict[str, float] | None = None
    rank_pattern: dict[str, _Rank] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    fan_in_fan_out: bool | None = None
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None


def _configs_of(adapter: Checkpoint) -> dict[str, _AdapterConfig]:
    """Returns the configurations of an adapter by the part of the pipeline; the key is "" for a model.

    Raises `_MisfitError` if a configuration is damaged, or if the checkpoint is not an adapter of matrices that are
    added to an unchanged base.
    """
    text: object = adapter.metadata.get("lora_adapter_metadata")
    path = os.path.join(os.path.dirname(adapter.files[0]), "adapter_config.json") if adapter.files else ""
    if os.path.lexists(path):  # a link to nothing is an error: without its settings, other values are merged
        text = read_whole(path, 10_000_000, "the adapter's configuration")
    parts: dict[str, dict[str, object]] = {}
    try:
        settings = msgspec.json.decode(text, type=dict[str, object]) if isinstance(text, str | bytes) else {}
        for name, value in settings.items():
            # Only the metadata of diffusers has the part of the pipeline before the name of a setting.
            part, _, setting = name.rpartition(".") if isinstance(text, str) else ("", "", name)
            parts.setdefault(part, {})[setting] = value
        configs = {part: msgspec.convert(of_part, _AdapterConfig) for part, of_part in parts.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _MisfitError(f"the adapter's configuration is damaged: {error}", _OTHER_CONFIG) from error
    given = (f"{name}={value!r}" for of_part in parts.values() for name, value in of_part.items() if value)
    if unsupported := next(filter(None, map(_NOT_MERGED.search, chain(adapter, given))), None):
        kind = f"{unsupported.lastgroup.replace('_', ' ')}: " if unsupported.lastgroup else ""
        raise _MisfitError(
            f"an adapter of this kind is not merged here: {kind}{unsupported.string}",
            "merge it with the library that made it, and save the result: PeftModel.merge_and_unload() of peft, or "
            "create_lycoris_from_weights(1.0, path, model)[0].merge_to() of LyCORIS; where init_lora_weights changed "
            "the base, save it for the old one: save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    if not any(name.startswith(PEFT_PREFIX) or LORA_MATRIX.match(name) for name in adapter):
        raise _MisfitError(
            f"not an adapter: it has no {'LoRA matrices' if len(adapter) else 'tensors'}, but {listed(adapter, 2)}",
            "load it with the library that made it, and save it with such names as layer.lora_A.weight; of old "
            "diffusers: pipeline.load_lora_weights(path), then pipeline.save_lora_weights(...)"
            if any("lora" in name.lower() for name in adapter)
            else "open it by itself, or average several models with combine=ms.merge.Average()",
        )
    return {"": _AdapterConfig(), **configs}


def _by_pattern(patterns: Mapping[str, float] | None, path: str, default: float | None) -> float | None:
    """Returns the value of the first pattern that matches the end of the path, as peft does."""
    return next((value for pattern, value in (patterns or {}).items() if _compiled(pattern).match(path)), default)


@lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern for the ends of module paths, as peft does.

    Raises `_MisfitError` for expressions that could take very long to match, because the file may be from an untrusted
    source: each repetition, and each group, multiplies the ways in which a name can be matched.
    """
    choices = re.findall(r"[*+?{]|\((?:\?:)?", pattern)
    try:
        if len(pattern) > 500 or len(choices) > 3 or re.search(r"\)[*+{?]|\\\d", pattern):
            raise re.error("it could take very long to match")
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise _MisfitError(f"the pattern {pattern[:80]!r} is not read: {error}", _OTHER_CONFIG) from error
