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
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from typing import Annotated

import msgspec
import torch
from msgspec.structs import replace

from modelstate.arguments import invalid_option
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.combine import Combination, label, refuse, versions_of
from modelstate.formats.tree import FlatTree
from modelstate.io.files import read_whole
from modelstate.io.memory import aligned
from modelstate.merge.average import has_sums
from modelstate.planning.matching import KOHYA_PREFIXES, LORA_MATRIX, PEFT_PREFIX, adapter_names
from modelstate.rules.expression import lacks_values
from modelstate.spec import Allocate, Blocks, Combined, FillBlock, Stored, block_elements
from modelstate.text_format import count, listed

_Rank = Annotated[int, msgspec.Meta(ge=1)]
_Roles = dict[str, str]
"""The names of the tensors of a module by what they are: "A", "B", "B.bias", "magnitude_vector", "alpha", ..."""
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
_PARTS = {*_COMPONENTS, *(path.rstrip("_") for paths in _COMPONENTS.values() for path in paths)}
"""The parts of a pipeline, which files of diffusers put before the path of a module."""
_OTHER_BASE = (
    "open the base that the adapter was trained for; its names may need the prefix of a wrapper. Names of experts that "
    "transformers fuses: ms.convert_checkpoint(base, path, rules=ms.rules.from_transformers(model))"
)
_OTHER_CONFIG = "copy the configuration again; or remove it, and give ms.merge.LoRA(alpha=...)"


class LoRA(Combination, frozen=True):
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
        super().__post_init__()
        if self.alpha is not None and not math.isfinite(self.alpha):
            raise invalid_option("alpha", "is not finite", self.alpha, expected="a finite number")

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
        base, *adapters = sources
        merger = _Merger(base, self)
        if adapter_names(base) or not adapters:
            is_adapter = "the first checkpoint is an adapter: its base has to come before it"
            what = is_adapter if adapter_names(base) else "there is no adapter"
            merger.problems[what] = "ms.open([base, adapter], combine=ms.merge.LoRA())"
        else:
            merger.gather(merger.read, ((adapter, label(sources, at)) for at, adapter in enumerate(adapters, 1)))
        refuse("adapters cannot be merged into their base", sources, merger.problems, merger.problems.values())
        return FlatTree(merger.merged(), dict(base.flat.values), base.flat.containers, versions_of([base]))


class _Update(msgspec.Struct, frozen=True):
    """What an adapter adds to a tensor of the base: scaling * B @ A, to which DoRA gives a norm; or a bias."""

    factors: tuple[Stored, ...]
    """A, B and the magnitude of DoRA; or a bias alone."""
    is_transposed: bool = False
    """Whether the weight has its inputs first."""
    is_rounded: bool = False
    """Whether peft rounds the product to the dtype of the weight before it adds it."""
    experts: int = 0
    """The matrices that the weight consists of; 0 for one matrix without a dimension for them."""
    scaling: float = 1

    @property
    def rank(self) -> int:
        return self.factors[0].shape[0] // (self.experts or 1)

    @property
    def is_convolution(self) -> bool:
        return tuple(self.factors[0].shape[2:]) not in ((), (1, 1))

    def product(self, factors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """Returns the scaled product for some rows of the weight; those of a convolution are all of its rows."""
        if len(factors) == 1:
            return factors[0][rows] * self.scaling
        a, b = factors[:2]
        if self.is_convolution:
            product = _CONVOLUTIONS[a.dim()](a.transpose(0, 1), b).transpose(0, 1)
        elif self.experts:
            a, b = a.view(self.experts, -1, a.shape[1])[rows], b.view(len(b), -1, self.experts)[..., rows]
            product = torch.einsum(f"ore,eri->{'eio' if self.is_transposed else 'eoi'}", b, a)
        elif self.is_transposed:
            product = torch.mm(b, a[:, rows]).T
        else:
            product = torch.mm(b.flatten(1)[rows], a.flatten(1)).view(-1, *a.shape[1:])
        return product.mul_(self.scaling)


def _merged(weight: Stored, dtype: torch.dtype, updates: Sequence[_Update]) -> Stored:
    """Returns a weight in a dtype, with everything that is added to it, to be computed when it is read."""
    if weight.dtype == dtype and not updates:
        return weight
    shape = tuple(weight.shape)
    row = max(math.prod(shape[1:]), 1)
    # The rows of a convolution, and of a weight whose columns get a norm, cannot be computed one by one.
    needs_whole = any(
        update.is_convolution or (len(update.factors) == 3 and update.is_transposed) for update in updates
    )
    unit = max(math.prod(shape), 1) if needs_whole else row
    # peft keeps adapters of a base in half precision in float32.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def begin(parts: Sequence[torch.Tensor], _: Allocate) -> FillBlock:
        values = iter([part.to(wide) for part in parts])
        factors = [[next(values) for _ in update.factors] for update in updates]

        def fill(out: torch.Tensor, blocks: Sequence[torch.Tensor], first: int) -> None:
            original = block = blocks[0].to(dtype).view(-1, *shape[1:])
            rows = slice(first // row, (first + out.numel()) // row)
            for update, of_update in zip(updates, factors, strict=True):
                product = update.product(of_update, rows)
                if len(of_update) == 3:
                    total = (original + product).flatten(1)
                    norm = torch.linalg.norm(total, dim=0 if update.is_transposed else 1, keepdim=True)
                    magnitude = of_update[2].flatten()[slice(None) if update.is_transposed else rows].view_as(norm)
                    product = (magnitude / norm * (block + product).flatten(1)).view(block.shape)
                else:
                    product = product.to(dtype) if update.is_rounded else product
                    product += block.to(product.dtype)  # twice as fast as an addition of two dtypes
                block = product.to(dtype)
            out.copy_(block.flatten())

        return fill

    parts = tuple(factor for update in updates for factor in update.factors)
    temporaries = 3 + 3 * any(len(update.factors) > 2 or update.is_convolution for update in updates)
    elements = sum(math.prod(part.shape) for part in parts) + temporaries * block_elements(shape, unit)
    build = Blocks(begin, len(parts), unit, aligned(elements * wide.itemsize))
    return Combined(f"merged with {len(updates)}", dtype, shape, (weight, *parts), build)


_CONVOLUTIONS = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}


class _MisfitError(Exception):
    """Why a tensor of an adapter, or the adapter, cannot be merged; and what to do about it, if that is known."""


class _Merger:
    """Matches the tensors of adapters with those of the base, one adapter after the other.

    Attributes:
        problems: What does not fit, each with its remedy.
        updates: What the adapters add to tensors of the base, by the names of these.
        replaced: The tensors that replace those of the base.
        by_spelling: The modules of the base with a weight, by their paths with underscores.
        changed: The tensor of the adapter for each tensor of the base that has an update.
        orientations: Whether weights of the adapter have their inputs first: plain weights, and those of experts.
    """

    def __init__(self, base: Checkpoint, options: LoRA) -> None:
        self.base, self.options = base, options
        self.problems: dict[str, str] = {}
        self.updates: dict[str, list[_Update]] = {}
        self.replaced: dict[str, Stored] = {}
        self.by_spelling: dict[str, list[str]] = {}
        for path in (name.removesuffix(".weight") for name in base if name.endswith(".weight")):
            self.by_spelling.setdefault(path.replace(".", "_"), []).append(path)

    def gather(self, function: Callable[..., object], calls: Iterable[tuple[object, ...]]) -> None:
        """Calls a function with the arguments of each call, and records the problems where something does not fit."""
        for arguments in calls:
            try:
                function(*arguments)
            except _MisfitError as error:
                what, remedy = (*error.args, _OTHER_BASE)[:2]
                self.problems[f"{self.label}: {what}"] = remedy

    def read(self, adapter: Checkpoint, at: str) -> None:
        """Matches the tensors of one more adapter."""
        self.adapter, self.label = adapter, at
        self.configs = _configs_of(adapter)
        self.adapters, self.modules, self.changed = set[str](), dict[str, dict[str, _Roles]](), dict[str, str]()
        self.orientations = {False: {config.fan_in_fan_out for config in self.configs.values()}, True: set()}
        self.gather(self._sort, zip(adapter))
        if len(self.adapters) > 1:
            raise _MisfitError(f"it holds several adapters: {listed(sorted(self.adapters))}")
        self.products: list[tuple[_Roles, str, list[_Update], str]] = []
        self.gather(self._match, ((text, [*wrappers.values()]) for text, wrappers in self.modules.items()))
        self.gather(self._add_product, self.products)

    def merged(self) -> dict[str, Stored]:
        """Returns all tensors of the result. One that something is added to is computed once for all its names."""
        tensors = {**self.base.flat.tensors, **self.replaced}
        # peft gives a tensor that it replaces memory of its own: what is added to another name of it stays apart.
        apart = self.replaced.keys() - self.updates.keys()
        groups = [tuple(name for name in names if name not in apart) for names in self.base.aliases]
        tied = {name: names for names in groups for name in names if name in self.updates}
        for names in dict.fromkeys(tied.get(name, (name,)) for name in (*self.replaced, *self.updates)):
            first = next(filter(self.replaced.__contains__, names), names[0])
            updates = [update for name in names for update in self.updates.get(name, ())]
            dtype = (self.base if first in self.base else tensors)[first].dtype
            tensors |= dict.fromkeys(names, _merged(tensors[first], dtype, updates))
        return tensors

    def _sort(self, full: str) -> None:
        """Assigns a tensor to the module whose weights it changes, or to the tensor of the base that it replaces."""
        name = full.removeprefix(PEFT_PREFIX)
        if match := LORA_MATRIX.match(name):
            self.adapters.add(match["adapter"] or "")  # empty if the adapter's name is not in the file
            text, role = match["module"], {"down": "A", "up": "B"}.get(match["kind"], match["kind"])
            role += ".bias" if match["last"] == "bias" else ""
        elif name.endswith(".alpha") and name not in self.base:
            text, role = name.removesuffix(".alpha"), "alpha"
        else:
            plain = _WRAPPED.sub("", name)
            if ".original_module." in plain or (plain != name and PEFT_PREFIX + plain in self.adapter):
                return  # the same tensor is there by another name too
            module = f".{plain.rpartition('.')[0]}."
            if not any(f".{of}." in module for config in self.configs.values() for of in config.modules_to_save or ()):
                self._check_name(plain, full)
            if plain in self.replaced or plain in self.updates:
                raise _MisfitError(f"{full!r} replaces {plain!r}, which another tensor has changed")
            self.replaced[plain] = self.adapter.stored(full)
            return
        roles = self.modules.setdefault(text.replace(".base_layer", ""), {}).setdefault(text, {})
        if (other := roles.setdefault(role, full)) != full:
            raise _MisfitError(f"{full!r} is another matrix for the same as {other!r}")

    def _match(self, text: str, wrappers: Sequence[_Roles]) -> None:
        """Finds the weight that each pair of matrices of a module fits.

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
        if len(pairs) != len(weights):
            raise _MisfitError(f"{first!r} belongs to {count(len(pairs), 'pair')} of matrices for {listed(weights)}")
        for roles in pairs:
            all_updates = ((weight, self._fitting(roles, weight, bool(parameters))) for weight in weights)
            fitting = [(weight, updates) for weight, updates in all_updates if updates]
            if len(fitting) > 1:
                raise _MisfitError(f"{first!r} fits several of {listed(weights)}", "merge this adapter with peft")
            if not fitting:
                raise self._no_fit(roles.values(), weights[0])
            (weight, updates), *_ = fitting
            if len(updates) == 1 and len(updates[0].factors[0].shape) == 2 and not _is_embedding(roles):
                self.orientations[updates[0].experts > 0].add(updates[0].is_transposed)
            self.products.append((roles, weight, updates, weight if parameters else text))

    def _path(self, text: str, full: str) -> str:
        """Returns the path in the base of a module of the adapter.

        Files of diffusers put the part of the pipeline before it. Those of kohya's tools write it with underscores.
        """
        if f"{text}.weight" in self.base or full.startswith(PEFT_PREFIX):
            return text
        if "." in text or not text.startswith(KOHYA_PREFIXES):
            rest = _part_of(text)[1]
            return rest if f"{rest}.weight" in self.base else text
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

    def _fitting(self, roles: _Roles, weight: str, is_parameter: bool) -> list[_Update]:
        """Returns the ways in which matrices fit a weight: two for a square one, which may have its inputs first.

        A parameter of three dimensions consists of a matrix for each expert, which has its own rows of A.
        """
        factors = [self.adapter.stored(roles[role]) for role in ("A", "B", "magnitude_vector") if role in roles]
        a, b, *magnitude = (tuple(factor.shape) for factor in factors)
        shape = tuple(self._weight(weight).shape)
        experts = shape[0] if is_parameter and len(shape) == 3 else 0
        have_product = 2 <= len(a) == len(b) <= 5 and a[0] == b[1] > 0 and {*b[2:]} <= {1}
        if not have_product or factors[0].dtype != factors[1].dtype or a[0] % max(experts, 1):
            return []
        if is_parameter and magnitude:
            return []
        is_embedding = _is_embedding(roles)
        orientations = (False,) if len(a) > 2 or (is_parameter and not experts) else (False, True)
        return [
            _Update(tuple(factors), flips, is_parameter or is_embedding, experts)
            for flips in ((True,) if is_embedding else orientations)
            if shape[experts > 0 :] == (a[1:] + b[:1] if flips else b[:1] + a[1:])
            and all(math.prod(norms) == shape[flips] for norms in magnitude)
        ]

    def _add_product(self, roles: _Roles, weight: str, fits: list[_Update], path: str) -> None:
        """Adds the product of two matrices to a weight, and the bias of the second to the bias beside the weight.

        The path is that of the module in the adapter; of a parameter, it is the name in the base.
        """
        update, first = fits[0], roles["A"]
        if len(fits) > 1:
            # peft knows the class of each module, and its configuration only records that of the last one; so the
            # shapes of the other weights count here as well.
            known = ({self.options.fan_in_fan_out} - {None}) or (self.orientations[update.experts > 0] - {None})
            if len(known) > 1 or (update.experts and not known):
                what = f"{first!r} is for a square weight, which may have its inputs first or last"
                raise _MisfitError(what, "give ms.merge.LoRA(fan_in_fan_out=...)")
            update = fits[True in known]
        update = replace(update, scaling=self._scaling(roles, path, update.rank))
        self._add(weight, update, first)
        if of_b := roles.get("B.bias"):
            bias = f"{weight.rpartition('.')[0]}.bias"
            self._check_name(bias, of_b)
            of_bias = _Update((self.adapter.stored(of_b),), is_rounded=update.is_rounded, scaling=update.scaling)
            if self._weight(bias).shape != of_bias.factors[0].shape:
                raise self._no_fit([of_b], bias)
            self._add(bias, of_bias, of_b)

    def _scaling(self, roles: _Roles, path: str, rank: int) -> float:
        """Returns the factor of a product: alpha by the rank or its root, by the options, a tensor, or the settings."""
        first, (part, _, rest) = roles["A"], path.partition(".")
        config, path = (self.configs[part], rest) if part in self.configs else (self.configs[""], path)
        if (expected := _by_pattern(config.rank_pattern, path, config.r)) not in (None, rank):
            raise _MisfitError(f"{first!r} has rank {rank}, and rank {expected} is expected")
        if config.use_dora and "magnitude_vector" not in roles:
            raise _MisfitError(f"{first!r} lacks its counterpart: there is no lora_magnitude_vector, which DoRA needs")
        alpha = self.options.alpha
        if alpha is None and (full := roles.get("alpha")):
            is_one = math.prod(self.adapter[full].shape) == 1 and not lacks_values(self.adapter.stored(full))
            alpha = self.adapter.tensor(full).item() if is_one else None
            if not (isinstance(alpha, int | float) and math.isfinite(alpha)):
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
        return alpha / (math.sqrt(rank) if by_root else rank)

    def _add(self, name: str, update: _Update, full: str) -> None:
        if (other := self.changed.setdefault(name, full)) != full:
            raise _MisfitError(f"{full!r} is another matrix for the same as {other!r}")
        for tensor in (self._weight(name), *update.factors):
            if not has_sums(tensor):
                raise _MisfitError(f"{full!r} is for {name!r}: nothing can be added to or from {tensor.dtype}")
        self.updates.setdefault(name, []).append(update)

    def _weight(self, name: str) -> Stored:
        """Returns a tensor of the base, or the one that replaces it."""
        return self.replaced[name] if name in self.replaced else self.base.stored(name)

    def _no_fit(self, matrices: Iterable[str], name: str) -> _MisfitError:
        given = [f"{full!r} ({self.adapter[full].dtype} of shape {self.adapter[full].shape})" for full in matrices]
        return _MisfitError(f"{' with '.join(given)} does not fit {name!r} of shape {tuple(self._weight(name).shape)}")

    def _check_name(self, name: str, full: str) -> None:
        if name not in self.base:
            # This compares the name with all names of the base, which is slow.
            near = get_close_matches(name, self.base, n=1) if len(self.problems) < 3 else []
            but = f" (but {near[0]!r})" if near else ""
            raise _MisfitError(f"{full!r} is for {name!r}, which the base lacks{but}")


def _part_of(name: str) -> tuple[str, str]:
    """Returns the part of a pipeline that a name begins with, "" for none, and the rest of the name."""
    part, _, rest = name.partition(".")
    return (part, rest) if part in _PARTS else ("", name)


def _is_embedding(roles: _Roles) -> bool:
    return ".lora_embedding_A" in roles["A"]


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
