"""A checkpoint that lacks a tensor of one layer, or an expert: all others get their values, and no value is wrong."""

import random
import re

import pytest
import torch

import modelstate as ms
from tests.suggestion.test_suggest import tree

WIDTH, HIDDEN, LAYERS, EXPERTS = 8, 32, 4, 3
ATTENTION, UP, DOWN, NORM = (WIDTH, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN), (WIDTH,)
# For each model the name of a layer in two conventions, and the modules of a layer in both.
MODELS: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
    "GPT-2": [
        ("transformer.h.#", "blocks.#", ()),
        ("ln_1", "norm1", NORM),
        ("attn.c_attn", "attn.qkv", (3 * WIDTH, WIDTH)),
        ("attn.c_proj", "attn.out_proj", ATTENTION),
        ("ln_2", "norm2", NORM),
        ("mlp.c_fc", "mlp.fc1", UP),
        ("mlp.c_proj", "mlp.fc2", DOWN),
    ],
    "BERT": [
        ("bert.encoder.layer.#", "encoder.layers.#", ()),
        ("attention.self.query", "attn.q_proj", ATTENTION),
        ("attention.self.key", "attn.k_proj", ATTENTION),
        ("attention.self.value", "attn.v_proj", ATTENTION),
        ("attention.output.dense", "attn.out_proj", ATTENTION),
        ("attention.output.LayerNorm", "norm1", NORM),
        ("intermediate.dense", "mlp.fc1", UP),
        ("output.dense", "mlp.fc2", DOWN),
        ("output.LayerNorm", "norm2", NORM),
    ],
    "Llama": [
        ("model.layers.#", "layers.#", ()),
        ("self_attn.q_proj", "attention.wq", ATTENTION),
        ("self_attn.k_proj", "attention.wk", ATTENTION),
        ("self_attn.v_proj", "attention.wv", ATTENTION),
        ("self_attn.o_proj", "attention.wo", ATTENTION),
        ("mlp.gate_proj", "feed_forward.w1", UP),
        ("mlp.up_proj", "feed_forward.w3", UP),
        ("mlp.down_proj", "feed_forward.w2", DOWN),
        ("input_layernorm", "attention_norm", NORM),
        ("post_attention_layernorm", "ffn_norm", NORM),
    ],
    "experts": [
        ("model.layers.#", "layers.#", ()),
        ("input_layernorm", "attention_norm", NORM),
        ("block_sparse_moe.gate", "moe.router", (EXPERTS, WIDTH)),
        ("block_sparse_moe.experts.#.w1", "moe.experts.#.gate_proj", UP),
        ("block_sparse_moe.experts.#.w3", "moe.experts.#.up_proj", UP),
        ("block_sparse_moe.experts.#.w2", "moe.experts.#.down_proj", DOWN),
        ("block_sparse_moe.shared_experts.gate_proj", "moe.shared_experts.w1", UP),
        ("block_sparse_moe.shared_experts.up_proj", "moe.shared_experts.w3", UP),
        ("block_sparse_moe.shared_experts.down_proj", "moe.shared_experts.w2", DOWN),
    ],
}


def names_of(model: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """Returns the names of each tensor in both conventions, with its shape."""
    (here, there, _), *members = MODELS[model]
    names = [("model.embed_tokens.weight", "embed.weight", (40, WIDTH)), ("model.norm.weight", "norm.weight", NORM)]
    for layer in range(LAYERS):
        for first, second, shape in members:
            for expert in range(EXPERTS if "#" in first else 1):
                pair = [
                    f"{top.replace('#', str(layer))}.{name.replace('#', str(expert))}"
                    for top, name in ((here, first), (there, second))
                ]
                names.append((f"{pair[0]}.weight", f"{pair[1]}.weight", shape))
                if model in ("GPT-2", "BERT"):
                    names.append((f"{pair[0]}.bias", f"{pair[1]}.bias", shape[:1]))
    return names


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("model", MODELS)
def test_what_is_there_is_found(model: str, seed: int) -> None:
    rng = random.Random(f"{model} {seed}")
    rows = names_of(model)
    if rng.random() < 0.5:
        rows = [(second, first, shape) for first, second, shape in rows]
    state = {name: torch.randn(shape) for name, _, shape in rows}
    # A tensor, or all tensors of a module or an expert.
    lost = rng.choice([name for name in state if re.search(r"\.\d", name)])
    lost = rng.choice([lost, lost.rpartition(".")[0] + ".", re.sub(r"(experts\.\d\.).*", r"\1", lost)])
    state = {name: value for name, value in state.items() if not name.startswith(lost)}
    wanted = tree({goal: shape for _, goal, shape in rows})
    found = ms.suggest(wanted, state)
    values = ms.rules.Rules(found.accept_guesses()).apply(state)
    for name, goal, _ in rows:
        if goal in values and goal not in found.guesses:
            assert torch.equal(values[goal], state[name])
    if ".output." in lost:
        return  # BERT has this word behind the attention and the MLP: what is left are guesses, or stays open
    missing = [goal for name, goal, _ in rows if name not in state]
    assert sorted(found.missing) == sorted(missing)
    assert (found.unused, found.ambiguous) == ((), ())
    for name, goal, _ in rows:
        assert name not in state or torch.equal(values[goal], state[name])
