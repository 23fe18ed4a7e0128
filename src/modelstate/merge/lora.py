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
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import lru_cache
from itertools import permutations
from typing import Annotated, TypeGuard

import msgspec
import torch

from modelstate.arguments import check_flag, is_number
from modelstate.checkpoint.checkpoint import Checkpoint
from modelstate.checkpoint.combine import Combination, label, versions_of
from modelstate.checkpoint.reduction import kind_of
from modelstate.errors import CombineError, OptionError
from modelstate.formats.tree import FlatTree
from modelstate.io.files import read_whole
from modelstate.io.memory import aligned
from modelstate.planning.matching import KOHYA_PREFIXES, LORA_MATRIX, PEFT_PREFIX, adapter_names
from modelstate.rules.expression import lacks_values
from modelstate.spec import Allocate, Blocks, Combined, FillBlock, Stored, block_elements, bytes_key
from modelstate.text_format import listed, short_repr

_CONVOLUTIONS = {3: torch.nn.functional.conv1d, 4: torch.nn.functional.conv2d, 5: torch.nn.functional.conv3d}
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
_WRAPPED = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.)")
"""The parts of a name by which peft wraps the modules of a model."""
_OTHER_METHODS = re.compile(
    r"\.(?:(?P<DoRA_of_LyCORIS>dora_scale)|(?P<LoHa>hada_\w+)|(?P<LoKr>lokr_\w+)|(?P<LoCon>lora_mid\.weight)"
    r"|(?P<OFT>oft_\w+))$"
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
_MOST_SUGGESTED = 3
"""Problems that suggest a similar name: finding it compares a name with all names of the base, which is slow."""
_WITHOUT_ALPHA = (".lora_A.weight", ".lora_down.weight")
"""The ends of names in files of diffusers and of kohya's tools, for which alpha is the rank by convention."""
_MOST_NESTED = 6
"""The most parameters of a module for which the order of their adapters is searched."""


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
            is_path = isinstance(self.alpha, str | os.PathLike)
            remedy = "adapters are sources: ms.open([base, adapter], combine=ms.merge.LoRA())" if is_path else ""
            raise OptionError(
                "alpha= cannot be used", expected="a finite number", found=short_repr(self.alpha), remedy=remedy
            )

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
        base = sources[0]
        misplaced = adapter_names(base)
        if misplaced or len(sources) < 2:
            what = "the first checkpoint is an adapter, and its base has to be before it"
            raise CombineError(
                what if misplaced else "there is no adapter",
                where=base.source,
                expected="a base, and one adapter or more",
                found=listed(misplaced, most=2),
                remedy="ms.open([base, adapter], combine=ms.merge.LoRA())",
            )
        problems: list[str] = []
        products: dict[str, list[_Product]] = {}
        replaced: dict[str, tuple[str, Stored]] = {}
        for index, adapter in enumerate(sources[1:], 1):
            at = label(sources, index)
            configs = _configs_of(adapter, at)
            _AdapterReader(base, adapter, at, configs, self, problems, products, replaced).read()
        if problems:
            raise CombineError(
                f"tensors of adapters that do not fit the base ({len(problems):,})",
                where=base.source,
                found=listed(problems, most=12, between="; "),
                remedy="open the base that the adapter was trained for; its names may need the prefix of a wrapper. "
                "Names of experts that transformers fuses: ms.convert_checkpoint(base, path, "
                "rules=ms.rules.from_transformers(model))",
            )
        # A tied tensor that something is added to is computed once for all its names.
        keys = {name: bytes_key(stored, name) for name, stored in base.flat.tensors.items()}
        added: dict[object, list[_Product]] = {}
        for name, of_name in products.items():
            added.setdefault(keys[name], []).extend(of_name)
        weights = {keys[name]: stored for name, (_, stored) in replaced.items() if name in products}
        merged = {
            keys[name]: _merged(weights.get(keys[name], base.stored(name)), base[name].dtype, added[keys[name]])
            for name in products
        }
        tensors = {name: merged.get(keys[name], stored) for name, stored in base.flat.tensors.items()}
        for name, (_, stored) in replaced.items():
            if name not in products:
                tensors[name] = _merged(stored, base[name].dtype if name in base else stored.dtype, ())
        return FlatTree(tensors, dict(base.flat.values), base.flat.containers, versions_of([base]))


class _MisfitError(Exception):
    """A tensor of an adapter that does not fit the base: its name, and why."""


class _Layout(Enum):
    """The tensor that the matrices A and B of an adapter belong to."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    CONV = "conv"
    EXPERTS = "experts"
    """A weight for each of several experts."""
    BIAS = "bias"
    """One tensor in the place of A and B."""


class _Product(msgspec.Struct, frozen=True):
    """What an adapter adds to one tensor of the base: scaling * B @ A, to which DoRA gives a norm; or a bias."""

    roles: Mapping[str, str]
    """The names of the tensors of the module: "A", "B", "B.bias", "magnitude_vector", "alpha"."""
    path: str
    """The module, or the parameter, as the adapter's configuration names it."""
    weight: str
    layout: _Layout
    is_transposed: bool | None = False
    """Whether the weight has its inputs first; None if its shape allows both."""
    is_parameter: bool = False
    """Whether the weight is one of `target_parameters`."""
    experts: int = 1
    """The number of weights that have matrices of their own."""
    scaling: float = 1
    factors: tuple[Stored, ...] = ()
    """A, B and the magnitude of DoRA, or a bias."""

    @property
    def needs_whole(self) -> bool:
        """Whether the rows of the weight cannot be computed one by one."""
        return self.layout is _Layout.CONV or (len(self.factors) == 3 and bool(self.is_transposed))

    def add_to(
        self,
        block: torch.Tensor,
        original: torch.Tensor,
        rows: slice,
        factors: Sequence[torch.Tensor],
        memory: torch.Tensor,
    ) -> None:
        """Adds the product for some rows to them.

        Args:
            block: The rows of the weight.
            original: The rows of the weight before anything was added to it.
            rows: The place of the rows in the weight.
            factors: The values of the factors.
            memory: Memory for a product and a copy of the rows in its dtype.
        """
        product = self._multiply(rows, factors, memory[: block.numel()]).mul_(self.scaling)
        if len(factors) == 3:
            total = original + product
            norm = torch.linalg.norm((total.T if self.is_transposed else total).flatten(1), dim=1)
            factor = factors[2].view(-1)[slice(None) if self.is_transposed else rows] / norm
            factor = factor if self.is_transposed else factor.view(-1, *[1] * (block.dim() - 1))
            block.copy_(factor * (total if original is block else block + product))
        elif block.dtype == product.dtype or self.layout is _Layout.EMBEDDING or self.is_parameter:
            block += product.to(block.dtype)  # peft rounds these products
        else:  # twice as fast as an addition of two dtypes
            block.copy_(memory[-block.numel() :].view(block.shape).copy_(block).add_(product))

    def _multiply(self, rows: slice, factors: Sequence[torch.Tensor], memory: torch.Tensor) -> torch.Tensor:
        if self.layout is _Layout.BIAS:
            return factors[0][rows].clone()
        a, b = factors[:2]
        if self.layout is _Layout.EXPERTS:
            of_experts = b.view(len(b), -1, self.experts)[..., rows], a.view(self.experts, -1, a.shape[1])[rows]
            return torch.einsum(f"ore,eri->{'eio' if self.is_transposed else 'eoi'}", *of_experts)
        if self.layout is not _Layout.CONV:
            if self.is_transposed:
                return torch.mm(b, a[:, rows], out=memory.view(len(b), -1)).T
            return torch.mm(b[rows], a, out=memory.view(-1, a.shape[1]))
        if a.dim() == 4 and a.shape[2:] == (1, 1):
            return (b.squeeze(3).squeeze(2) @ a.squeeze(3).squeeze(2)).unsqueeze(2).unsqueeze(3)
        return _CONVOLUTIONS[a.dim()](a.transpose(0, 1), b).transpose(0, 1)


def _merged(weight: Stored, dtype: torch.dtype, products: Sequence[_Product]) -> Stored:
    """Returns a weight in a dtype, with everything that is added to it, to be computed when it is read."""
    if weight.dtype == dtype and not products:
        return weight
    shape = tuple(weight.shape)
    row = max(math.prod(shape[1:]), 1)
    unit = max(math.prod(shape), 1) if any(product.needs_whole for product in products) else row
    # peft keeps adapters of a base in half precision in float32.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    has_dora = any(len(product.factors) == 3 for product in products)

    def begin(factors: Sequence[torch.Tensor], allocate: Allocate) -> FillBlock:
        memory = allocate((2 * block_elements(shape, unit),), wide)
        values = iter([factor.to(wide) for factor in factors])
        prepared = [(product, [next(values) for _ in product.factors]) for product in products]

        def fill(out: torch.Tensor, blocks: Sequence[torch.Tensor], first: int) -> None:
            if blocks[0].data_ptr() != out.data_ptr():
                out.copy_(blocks[0])
            block = out.view(-1, *shape[1:])
            original = block.clone() if has_dora and len(products) > 1 else block
            rows = slice(first // row, (first + out.numel()) // row)
            for product, of_product in prepared:
                product.add_to(block, original, rows, of_product, memory)

        return fill

    parts = tuple(factor for product in products for factor in product.factors)
    temporaries = 2 + 3 * has_dora + 2 * any(product.layout is _Layout.CONV for product in products)
    elements = sum(math.prod(part.shape) for part in parts) + temporaries * block_elements(shape, unit)
    build = Blocks(begin, len(parts), unit, aligned(elements * wide.itemsize))
    return Combined(f"merged with {len(products)}", dtype, shape, (weight, *parts), build)


# Matching the tensors of an adapter with those of the base.


class _AdapterReader(msgspec.Struct):
    """Matches an adapter's tensors with those of the base, and gathers the problems."""

    base: Checkpoint
    adapter: Checkpoint
    label: str
    configs: Mapping[str, _AdapterConfig]
    options: LoRA
    problems: list[str]
    products: dict[str, list[_Product]]
    """What all adapters so far add to the tensors of the base, by their names."""
    replaced: dict[str, tuple[str, Stored]]
    """The tensors that replace those of the base, by their names in the base, each with its adapter."""
    by_spelling: dict[str, list[str]] = {}
    """The modules of the base with a weight, by their paths with underscores."""

    def read(self) -> None:
        """Fills `products`, `replaced` and `problems`."""
        for path in (name.removesuffix(".weight") for name in self.base if name.endswith(".weight")):
            self.by_spelling.setdefault(path.replace(".", "_"), []).append(path)
        roles_of: dict[str, dict[str, str]] = {}
        adapters: set[str] = set()
        for full in self.adapter:
            name = full.removeprefix(PEFT_PREFIX)
            if match := LORA_MATRIX.match(name):
                adapters.add(match["adapter"] or "")  # empty if the adapter's name is not in the file
                text, role = match["module"], {"down": "A", "up": "B"}.get(match["kind"], match["kind"])
                role = "B.bias" if (role, match["last"]) == ("B", "bias") else role
            elif name.endswith(".alpha") and name not in self.base:
                text, role = name.removesuffix(".alpha"), "alpha"
            else:
                with self._gathering():
                    self._read_replacement(full, name)
                continue
            with self._gathering():
                if (other := roles_of.setdefault(text, {}).setdefault(role, full)) != full:
                    raise _MisfitError(full, f"is another matrix for the same as {other!r}")
        if len(adapters) > 1:
            self.problems.append(f"{self.label} holds several adapters: {listed(sorted(adapters))}")
            return
        by_module: dict[str, dict[str, dict[str, str]]] = {}
        for text, roles in roles_of.items():
            with self._gathering():
                by_module.setdefault(self._module(text.replace(".base_layer", ""), roles), {})[text] = roles
        products: list[_Product] = []
        for module, wrappers in by_module.items():
            with self._gathering():
                products += self._products(module, wrappers)
        flips = {layout: self._flips_square(products, layout) for layout in (_Layout.LINEAR, _Layout.EXPERTS)}
        for product in products:
            with self._gathering():
                self._add_product(product, flips.get(product.layout))

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Records the problem where a tensor does not fit, and goes on."""
        try:
            yield
        except _MisfitError as error:
            full, what = error.args
            self.problems.append(f"{full!r} of {self.label} {what}")

    def _module(self, text: str, roles: Mapping[str, str]) -> str:
        """Returns the path in the base of a module of the adapter.

        Files of diffusers put the part of the pipeline before it. Those of kohya's tools write it with underscores.
        """
        full = next(iter(roles.values()))
        matrices = sorted(roles.keys() - {"alpha", "magnitude_vector"})
        if matrices not in (["A", "B"], ["A", "B", "B.bias"], ["embedding_A", "embedding_B"]):
            there = ", ".join(matrices) or "no matrices of this module"
            raise _MisfitError(full, f"lacks its counterpart: there are {there}")
        component, _, rest = text.partition(".")
        if f"{text}.weight" in self.base or full.startswith(PEFT_PREFIX):
            return text
        if rest or not text.startswith(KOHYA_PREFIXES):
            return rest if component in _PARTS and f"{rest}.weight" in self.base else text
        flat = text.partition("_")[2]
        component, _, rest = flat.partition("_")
        paths = _COMPONENTS.get(component, ())
        spellings = {flat, *([rest] if paths else []), *(f"{path.replace('.', '_')}_{rest}" for path in paths)}
        modules = sorted(module for spelling in spellings for module in self.by_spelling.get(spelling, ()))
        if len(modules) == 1:
            return modules[0]
        what = f"one of several modules, and does not say which: {listed(modules)}"
        if not modules:
            what = f"{rest if paths else flat!r} with dots for some underscores, which the base lacks"
        raise _MisfitError(full, f"is for {what}")

    def _products(self, module: str, wrappers: Mapping[str, Mapping[str, str]]) -> list[_Product]:
        """Returns the products of a module's matrices with the weights that they fit.

        peft wraps a module once for each of its parameters that has matrices. The wrappers do not name the parameter.
        """
        targets = sorted(of for config in self.configs.values() for of in config.target_parameters or ())
        parameters = dict.fromkeys(f"{module}.{target.rpartition('.')[2]}" for target in targets)
        weights = [name for name in parameters if any(f".{name}".endswith(f".{target}") for target in targets)]
        weights = [name for name in weights if name in self.base] or weights[:1]
        is_parameter, weights = bool(weights), weights or [f"{module}.weight"]
        firsts = [roles.get("A") or roles["embedding_A"] for roles in wrappers.values()]
        self._check_name(weights[0], firsts[0])
        if not len(firsts) == len(weights) <= _MOST_NESTED:
            raise _MisfitError(firsts[-1], f"is another matrix for the same as {firsts[0]!r}, {listed(weights)}")
        fitting: list[list[_Product]] = []
        for order in permutations(weights):
            pairs = zip(wrappers.items(), order, strict=True)
            products = [fit for (text, of), weight in pairs if (fit := self._fit(text, of, weight, is_parameter))]
            fitting += [products] if len(products) == len(weights) else []
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise _MisfitError(firsts[0], f"fits several of {listed(weights)}: merge this adapter with peft")
        roles = next(iter(wrappers.values()))
        a, b = (self.adapter[name] for role, name in sorted(roles.items()) if role[-1] in "AB")
        like = f"{weights[0]!r} of shape {self.base[weights[0]].shape}"
        raise _MisfitError(firsts[0], f"{a.dtype} of shape {a.shape}, with {b.dtype} of {b.shape}, does not fit {like}")

    def _fit(self, text: str, roles: Mapping[str, str], weight: str, is_parameter: bool) -> _Product | None:
        """Returns the product of matrices for a weight, without its factors; None if it does not fit."""
        layout = _Layout.EMBEDDING if "embedding_A" in roles else _Layout.LINEAR
        roles = {role.removeprefix("embedding_"): name for role, name in roles.items()}
        specs = [self.adapter[roles[role]] for role in "AB"]
        (a, b), sizes = (spec.shape for spec in specs), self.base[weight].shape
        if specs[0].dtype != specs[1].dtype or len(a) < 2 or len(a) != len(b) or a[0] != b[1] or not a[0]:
            return None
        path = weight if is_parameter else text
        if len(a) > 2:
            fits = sizes == (b[0], *a[1:]) and {*b[2:]} == {1} and len(a) in _CONVOLUTIONS
            return _Product(roles, path, weight, _Layout.CONV, False, is_parameter) if fits else None
        experts = 1
        if is_parameter and len(sizes) == 3 and sizes[0] and a[0] % sizes[0] == 0:
            layout, experts, sizes = _Layout.EXPERTS, sizes[0], sizes[1:]
        is_straight = sizes == (b[0], a[1]) and layout is not _Layout.EMBEDDING
        is_transposed = sizes == (a[1], b[0]) and (layout is _Layout.EXPERTS or not is_parameter)
        if not (is_straight or is_transposed):
            return None
        flips = None if is_straight and is_transposed else is_transposed
        return _Product(roles, path, weight, layout, flips, is_parameter, experts)

    def _flips_square(self, products: Sequence[_Product], layout: _Layout) -> bool | None:
        """Whether square weights have their inputs first, as those of `Conv1D` do; None if that is ambiguous.

        peft knows the class of each module, and its configuration only records that of the last one; so the shapes of
        the other weights count here as well.
        """
        if self.options.fan_in_fan_out is not None:
            return self.options.fan_in_fan_out
        seen = {product.is_transposed for product in products if product.layout is layout}
        if layout is _Layout.LINEAR:
            seen |= {config.fan_in_fan_out for config in self.configs.values()}
        seen -= {None}
        return True in seen if len(seen) == 1 or (layout is _Layout.LINEAR and not seen) else None

    def _add_product(self, product: _Product, flips_square: bool | None) -> None:
        """Records a product with its scaling and factors, and the bias of its second matrix."""
        roles, weight, path = product.roles, product.weight, product.path
        first, shape = roles["A"], self.base[weight].shape
        is_transposed = flips_square if product.is_transposed is None else product.is_transposed
        if is_transposed is None:
            what = f"is for the square {weight!r}, which may have its inputs first or last"
            raise _MisfitError(first, f"{what}: give ms.merge.LoRA(fan_in_fan_out=...)")
        config = self.configs.get("")
        if (part := path.partition("."))[0] in self.configs:
            config, path = self.configs[part[0]], part[2]
        settings = config or _AdapterConfig()
        rank = self.adapter[first].shape[0] // product.experts
        if (expected := _by_pattern(settings.rank_pattern, path, settings.r)) not in (None, rank):
            raise _MisfitError(first, f"has rank {rank}, and rank {expected} is expected")
        by_root = settings.use_rslora if self.options.rslora is None else self.options.rslora
        scaling = self._alpha(roles, config, path, rank) / (math.sqrt(rank) if by_root else rank)
        factors = [first, roles["B"]]
        if magnitude := roles.get("magnitude_vector"):
            if product.is_parameter or math.prod(self.adapter[magnitude].shape) != shape[1 if is_transposed else 0]:
                raise _MisfitError(magnitude, f"does not fit {weight!r} of shape {shape}")
            factors.append(magnitude)
        elif settings.use_dora:
            raise _MisfitError(first, "lacks its counterpart: there is no lora_magnitude_vector, which DoRA needs")
        product = msgspec.structs.replace(product, is_transposed=is_transposed, scaling=scaling)
        self._add(weight, factors, product)
        if of_b := roles.get("B.bias"):
            bias = self._check_name(f"{weight.rpartition('.')[0]}.bias", of_b)
            if self.base[bias].shape != self.adapter[of_b].shape:
                raise _MisfitError(of_b, f"does not fit {bias!r} of shape {self.base[bias].shape}")
            self._add(bias, [of_b], msgspec.structs.replace(product, layout=_Layout.BIAS))

    def _alpha(self, roles: Mapping[str, str], config: _AdapterConfig | None, path: str, rank: int) -> float:
        alpha, first = self.options.alpha, roles["A"]
        if alpha is None and (full := roles.get("alpha")):
            is_number = math.prod(self.adapter[full].shape) == 1 and not lacks_values(self.adapter.stored(full))
            alpha = self.adapter.tensor(full).reshape(()).item() if is_number else None
            if not _is_finite_number(alpha):
                raise _MisfitError(full, "is not one finite number")
        elif alpha is None and config is not None:
            alpha = _by_pattern(config.alpha_pattern, path, config.lora_alpha)
        elif alpha is None and not first.startswith(PEFT_PREFIX) and first.endswith(_WITHOUT_ALPHA):
            alpha = rank
        if alpha is None:
            raise _MisfitError(first, "comes without adapter_config.json: give ms.merge.LoRA(alpha=...)")
        return alpha

    def _add(self, name: str, factors: Sequence[str], product: _Product) -> None:
        stored = tuple(self.adapter.stored(factor) for factor in factors)
        if name in self.replaced and tuple(self.replaced[name][1].shape) != self.base[name].shape:
            raise _MisfitError(factors[0], f"is for {name!r}, which the adapter replaces by another shape")
        for full, tensor in ((name, self.base.stored(name)), *zip(factors, stored, strict=True)):
            if not (tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and kind_of(tensor) == "strided"):
                raise _MisfitError(full, f"is {tensor.dtype}, to which nothing can be added")
        self.products.setdefault(name, []).append(msgspec.structs.replace(product, factors=stored))

    def _read_replacement(self, full: str, wrapped: str) -> None:
        """Records a tensor that replaces one of the base. The same tensor may be there by its plain name too."""
        name = _WRAPPED.sub("", wrapped)
        if ".original_module." in name or (name != wrapped and PEFT_PREFIX + name in self.adapter):
            return
        module = f".{name.rpartition('.')[0]}."
        saved = [of for config in self.configs.values() for of in config.modules_to_save or ()]
        if not any(f".{of}." in module for of in saved):
            self._check_name(name, full)
        if name in self.replaced:
            raise _MisfitError(full, f"replaces {name!r}, and so does {self.replaced[name][0]}")
        if name in self.products:
            raise _MisfitError(full, f"replaces {name!r}, after something is added to it")
        self.replaced[name] = self.label, self.adapter.stored(full)

    def _check_name(self, name: str, full: str) -> str:
        """Returns the name if the base has it."""
        if name in self.base:
            return name
        near = get_close_matches(name, self.base, n=1) if len(self.problems) < _MOST_SUGGESTED else []
        raise _MisfitError(full, f"is for {name!r}, which the base lacks" + (f" (but {near[0]!r})" if near else ""))


def _is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number that fits a float; a bool is not a number here."""
    return is_number(value) and abs(value) <= sys.float_info.max


# The configuration: `adapter_config.json` of peft, or the metadata that diffusers writes.


class _AdapterConfig(msgspec.Struct, frozen=True):
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


def _configs_of(adapter: Checkpoint, where: str) -> dict[str, _AdapterConfig]:
    """Returns the configurations of an adapter by the part of the pipeline; the key is "" for a model.

    Raises `CombineError` if a configuration is damaged, or if the checkpoint is not an adapter of matrices that
    are added to an unchanged base.
    """
    text, of_text = adapter.metadata.get(_METADATA), f"{where}, {_METADATA}"
    path = os.path.join(os.path.dirname(adapter.files[0]), "adapter_config.json") if adapter.files else ""
    if os.path.lexists(path):  # a link to nothing is an error: without its settings, other values are merged
        text, of_text = read_whole(path, _MAX_BYTES, "the adapter's configuration"), path
    parts: dict[str, dict[str, object]] = {}
    try:
        if isinstance(text, str | bytes):
            settings = msgspec.json.decode(text, type=dict[str, object])
            is_of_pipeline = isinstance(text, str) and any(name.endswith(".lora_alpha") for name in settings)
            parts = {} if is_of_pipeline else {"": settings}
            for name, value in settings.items() if is_of_pipeline else ():
                part, _, setting = name.rpartition(".")
                parts.setdefault(part, {})[setting] = value
        configs = {part: msgspec.convert(of_part, _AdapterConfig) for part, of_part in parts.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CombineError(
            "the adapter's configuration is damaged",
            where=of_text,
            found=str(error),
            remedy="copy it again; or remove it, and give ms.merge.LoRA(alpha=...)",
        ) from error
    others = [match for match in map(_OTHER_METHODS.search, adapter) if match][:1]
    unsupported = {str(match.lastgroup).replace("_", " "): match.string for match in others} | {
        name: repr(value)
        for of_part in parts.values()
        for name, value in of_part.items()
        if (name in _NOT_MERGED and value)
        or (name == "peft_type" and value != "LORA")
        or (name == "init_lora_weights" and str(value).startswith(_CHANGE_THE_BASE))
    }
    if unsupported:
        way = ", or save it for the untouched base: save_pretrained(path_initial_model_for_weight_conversion=...)"
        raise CombineError(
            f"an adapter of this kind is not merged here: {', '.join(unsupported)}",
            where=where if others else of_text,
            expected='two matrices of LoRA for each module (peft_type "LORA"), alone, with DoRA or target_parameters',
            found=", ".join(f"{name}: {found}" for name, found in unsupported.items()),
            remedy="merge it with the library that made it, and save the result: PeftModel.merge_and_unload() of peft, "
            "or create_lycoris_from_weights(1.0, path, model)[0].merge_to() of LyCORIS"
            + (way if [*unsupported] == ["init_lora_weights"] else ""),
        )
    if not any(name.startswith(PEFT_PREFIX) or LORA_MATRIX.match(name) for name in adapter):
        raise CombineError(
            f"this checkpoint is not an adapter: it has no {'LoRA matrices' if len(adapter) else 'tensors'}",
            where=where,
            expected="names such as layer.lora_A.weight and layer.lora_B.weight",
            found=listed(list(adapter), most=2),
            remedy="load it with the library that made it, and save it with such names; of old diffusers: "
            "pipeline.load_lora_weights(path), then pipeline.save_lora_weights(...)"
            if any("lora" in name.lower() for name in adapter)
            else "open it by itself, or average several models with combine=ms.merge.Average()",
        )
    return configs


def _by_pattern(patterns: Mapping[str, float] | None, path: str, default: float | None) -> float | None:
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
