"""Models as people write them, with names of their own, for `bench.suggest_pairs`: all can be run."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Of several heads, with query, key and value apart or in one."""

    def __init__(self, size: int, heads: int, fused: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        if fused:
            self.qkv = nn.Linear(size, 3 * size)
        else:
            self.q, self.k, self.v = (nn.Linear(size, size) for _ in range(3))
        self.proj = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.qkv(x).chunk(3, dim=-1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in whole)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return cast(Tensor, self.proj(mixed.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    def __init__(self, size: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1, self.fc2, self.activation = nn.Linear(size, inner), nn.Linear(inner, size), activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.activation == "relu":
            return cast(Tensor, self.fc2(x.relu()))
        return cast(Tensor, self.fc2(functional.gelu(x, approximate=self.activation)))


class Block(nn.Module):
    """A layer of a transformer, with its norms before its parts, or behind them."""

    def __init__(
        self,
        size: int,
        inner: int,
        heads: int,
        *,
        fused: bool = False,
        causal: bool = False,
        activation: str = "none",
        after: bool = False,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.after = after
        self.norm1 = nn.LayerNorm(size, eps=eps)
        self.attn = Attention(size, heads, fused, causal)
        self.norm2 = nn.LayerNorm(size, eps=eps)
        self.mlp = FeedForward(size, inner, activation)

    def forward(self, x: Tensor) -> Tensor:
        if self.after:
            x = self.norm1(x + self.attn(x))
            return cast(Tensor, self.norm2(x + self.mlp(x)))
        x = x + self.attn(self.norm1(x))
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class SentenceEncoder(nn.Module):
    """What MiniLM is, in other words."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos, self.typ = nn.Embedding(30522, 384), nn.Embedding(512, 384), nn.Embedding(2, 384)
        self.ln = nn.LayerNorm(384, eps=1e-12)
        self.blocks = nn.ModuleList(Block(384, 1536, 12, after=True, eps=1e-12) for _ in range(6))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]] + self.typ.weight[0]
        x = self.ln(x)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, x)


class TinyGPT(nn.Module):
    """What GPT-2 is, with Linear layers, and a head that is tied to its embedding."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(90, 48), nn.Embedding(32, 48)
        self.blocks = nn.ModuleList(Block(48, 192, 4, fused=fused, causal=True, activation="tanh") for _ in range(3))
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, 90, bias=False)
        self.head.weight = self.tok_emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_emb(ids) + self.pos_emb.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))


class _Patches(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 48, 8, 8, bias=bias)

    def forward(self, image: Tensor) -> Tensor:
        return cast(Tensor, self.proj(image)).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """With timm's names: query, key and value in one."""

    def __init__(self, eps: float = 1e-12) -> None:
        super().__init__()
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 48)), nn.Parameter(torch.zeros(1, 17, 48))
        self.patch_embed = _Patches(bias=True)
        self.blocks = nn.Sequential(*(Block(48, 96, 4, fused=True, eps=eps) for _ in range(2)))
        self.norm = nn.LayerNorm(48, eps=eps)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return cast(Tensor, self.norm(self.blocks(x)))


class Bottleneck(nn.Module):
    def __init__(self, before: int, inner: int, size: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, size, 1, bias=False), nn.BatchNorm2d(size)
        self.downsample = None
        if before != size or stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(before, size, 1, stride, bias=False), nn.BatchNorm2d(size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        y = self.bn3(self.conv3(y))
        return cast(Tensor, (y + (x if self.downsample is None else self.downsample(x))).relu())


class ResNet(nn.Module):
    """With torchvision's names."""

    def __init__(self, depths: tuple[int, ...] = (2, 3, 3, 2), sizes: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        before = 8
        for stage, (depth, size) in enumerate(zip(depths, sizes, strict=True)):
            blocks = []
            for at in range(depth):
                blocks.append(Bottleneck(before, size // 4, size, 2 if stage and not at else 1))
                before = size
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(before, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.max_pool2d(self.bn1(self.conv1(image)).relu(), 3, 2, 1)
        for stage in range(4):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return cast(Tensor, self.fc(x.mean(dim=(2, 3))))


class Encoder(nn.Module):
    """What `nn.TransformerEncoder` is, in other words."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(48, 96, 4, activation="relu") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _MetaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"wq": (48, 48), "wk": (48, 24), "wv": (48, 24), "wo": (48, 48)}
        self.attention = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        sizes = {"w1": (48, 96), "w2": (96, 48), "w3": (48, 96)}
        self.feed_forward = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.attention_norm, self.ffn_norm = nn.RMSNorm(48), nn.RMSNorm(48)


class MetaLlama(nn.Module):
    """The names that Meta gives a Llama. It is not run: its heads hold their rotated elements in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(90, 48)
        self.layers = nn.ModuleList(_MetaBlock() for _ in range(2))
        self.norm = nn.RMSNorm(48)
        self.output = nn.Linear(48, 90, bias=False)


class Features(nn.Module):
    """Convolutions in a Sequential, as VGG has them: their numbers have gaps."""

    def __init__(self) -> None:
        super().__init__()
        members: list[nn.Module] = []
        for before, size in ((3, 8), (8, 8), (8, 16), (16, 16)):
            members += [nn.Conv2d(before, size, 3, padding=1), nn.ReLU()]
        self.features = nn.Sequential(*members)

    def forward(self, image: Tensor) -> Tensor:
        return cast(Tensor, self.features(image))


class Convolutions(nn.Module):
    """The same, as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(before, size, 3, padding=1) for before, size in ((3, 8), (8, 8), (8, 16), (16, 16))
        )

    def forward(self, image: Tensor) -> Tensor:
        for conv in self.convs:
            image = conv(image).relu()
        return image


class Towers(nn.Module):
    """Two that are alike, and whose names say nothing."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__()
        for name in (one, other):
            self.add_module(name, nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
        self.head = nn.Linear(16, 2)
