"""The models that are loaded, and their checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is."""

    hidden: int = 1024
    layers: int = 14
    vocabulary: int = 32_000
    small_blocks: int = 5_000
    """Blocks of four small tensors, all children of one module."""
    children: tuple[int, ...] = (5_000, 10_000, 20_000)
    """Modules with one tensor each, for the cost of `load_state_dict` by their number."""
    open_bytes: tuple[int, ...] = (10**9, 10**11)
    """Sizes of the sparse files that are opened."""


QUICK = Sizes(hidden=64, layers=2, vocabulary=500, small_blocks=50, children=(50, 100), open_bytes=(10**7, 10**9))


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
        normed = self.attention_norm(x)
        q, k, v = (
            part(normed).view(batch, length, self.heads, 64).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, hidden))
        normed = self.forward_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """A language model of the usual kind; 1.07 GB in fp32 with the default sizes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(DecoderLayer(sizes.hidden) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)

    def forward(self) -> Tensor:
        """Logits of the last of 16 fixed tokens."""
        x = self.embed(torch.arange(16).unsqueeze(0))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)[:, -1] @ self.embed.weight.T


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


def _tiny(_: Sizes) -> nn.Module:
    return Decoder(QUICK)


MODELS: dict[str, Callable[[Sizes], nn.Module]] = {"large": Decoder, "small": Wide, "tiny": _tiny}
"""By the name of the case; `tiny` is what every contender loads and runs once before it is measured."""


def on_meta(case: str, sizes: Sizes) -> nn.Module:
    with torch.device("meta"):
        return MODELS[case](sizes).eval()


def with_memory(case: str, sizes: Sizes) -> nn.Module:
    """The model in memory that has been touched, so that page faults are not what a load into it pays for."""
    model = on_meta(case, sizes).to_empty(device="cpu")
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    return model


def write(case: str, sizes: Sizes, folder: Path) -> None:
    """The checkpoint of a model with random values, as `<case>.pt` and in `<case>/model.safetensors`."""
    model = with_memory(case, sizes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0.0, 0.02, generator=generator)
    state = dict(model.state_dict())
    torch.save(state, folder / f"{case}.pt")
    (folder / case).mkdir(exist_ok=True)
    save_file(state, folder / case / "model.safetensors", metadata={"format": "pt"})


def write_sparse(nbytes: int, folder: Path) -> None:
    """Checkpoints of 100 tensors with `nbytes` in all, written as holes: `sparse-<nbytes>.pt` and `.safetensors`."""
    import json

    from torch._subclasses.fake_tensor import FakeTensorMode

    rows = nbytes // 100 // 4 // 1000
    with FakeTensorMode():
        state = {f"layers.{i}.weight": torch.empty(rows, 1000) for i in range(100)}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, folder / f"sparse-{nbytes}.pt")

    each = rows * 4000
    header = {
        name: {"dtype": "F32", "shape": [rows, 1000], "data_offsets": [i * each, (i + 1) * each]}
        for i, name in enumerate(state)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / f"sparse-{nbytes}.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 100 * each)
