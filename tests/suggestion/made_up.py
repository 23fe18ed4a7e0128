"""Made-up models with many equal shapes, and checkpoints of them under other names, whose truth is known."""

import random
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.suggestion.test_suggest import Tree

State = dict[str, torch.Tensor]
Sources = tuple[tuple[str, ...], bool]
"""The names in the checkpoint that a tensor is made of, and whether it is transposed."""

TEXT = """
alpha beta gamma delta left right first_part tower branch stem trunk body mixer router memory slot bridge gatekeeper
audio video text image fusion adapter encoder decoder attention mlp gate norm1 norm2 embed tokens positions head
conv conv1 conv2 shortcut pooler final
"""
WORDS = TEXT.split()
"""Words with different meanings. Of two words with one meaning, the checkpoint may have only one, and the model only
the other."""
SYNONYMS = [
    *({"q", "query", "q_proj", "wq"}, {"k", "key", "k_proj", "wk"}, {"v", "value", "v_proj", "wv"}),
    *({"attention", "attn", "att", "mha"}, {"mlp", "ffn", "feedforward"}, {"out_proj", "o_proj", "wo", "c_proj"}),
    *({"fc1", "linear1", "lin1", "c_fc"}, {"fc2", "linear2", "lin2"}, {"norm1", "ln_1"}, {"norm2", "ln_2"}),
    *({"norm", "ln", "layer_norm", "layernorm"}, {"encoder", "enc"}, {"decoder", "dec"}, {"blocks", "layers", "h"}),
    *({"head", "classifier"}, {"embed", "embedding", "emb"}),
]
SIZE = 4


@dataclass
class MadeUp:
    """A model and a checkpoint, with the truth."""

    model: nn.Module
    state: State
    truth: dict[str, Sources] = field(default_factory=dict)
    """For each name of the model, what it is made of; a name that is missing has no source."""


def made_up(seed: int) -> MadeUp:
    """Returns a model and a checkpoint of it under other names, in another order, partly fused or transposed."""
    rng = random.Random(seed)
    owners = _owners(rng)
    renamed = _renamed(rng, owners)
    target: State = {}
    state: State = {}
    truth: dict[str, Sources] = {}
    fused = rng.random() < 0.3
    wide = rng.choice([1, 1, 2])
    # A checkpoint of square weights alone does not show that they are transposed.
    is_conv1d = wide > 1 and rng.random() < 0.4 and any(_kind(path.split(".")[-1]) == "up" for path in owners)
    groups: dict[str, dict[str, str]] = {}
    for owner, new in renamed.items():
        parent, _, last = owner.rpartition(".")
        if last in ("q", "k", "v"):
            groups.setdefault(parent, {})[last] = new
    whole = {parent for parent, parts in groups.items() if fused and len(parts) == 3}
    for owner, new in renamed.items():
        parent, _, last = owner.rpartition(".")
        sizes = {"norm": (SIZE,), "up": (SIZE * wide, SIZE), "down": (SIZE, SIZE * wide)}
        weight = sizes.get(_kind(last), (SIZE, SIZE))
        for role, shape in (("weight", weight), ("bias", weight[:1])):
            target[f"{new}.{role}"] = torch.empty(shape)
            if parent in whole and last in ("q", "k", "v"):
                source = f"{parent}.qkv.{role}"
                state[source] = torch.empty((3 * SIZE, *shape[1:]))
                truth[f"{new}.{role}"] = ((source,), False)
                continue
            source = f"{owner}.{role}"
            turned = is_conv1d and role == "weight" and len(shape) == 2
            state[source] = torch.empty(shape[::-1] if turned else shape)
            truth[f"{new}.{role}"] = ((source,), turned)
    for owner, new in rng.sample(
        list(renamed.items()), k=min(rng.choice([0, 0, 0, 1, 2]), len(renamed))
    ):  # only one of the two has it
        if owner.rpartition(".")[0] in whole:
            continue
        kept, other = rng.choice(["checkpoint", "model", "both"]), _unknown(rng)
        for role in ("weight", "bias"):
            value = target.pop(f"{new}.{role}")
            del truth[f"{new}.{role}"]
            if kept == "model":
                target[f"{new}.{role}"] = value
                del state[f"{owner}.{role}"]
            elif kept == "both":  # another module has its place
                target[f"{other}.{role}"] = value
        # Where nothing else were open, what is left over on both sides would seem to belong together.
        target["grown"] = torch.empty(SIZE, 1, 1, 3)
    if all(len(set(state[name].shape)) == 1 for names, turned in truth.values() for name in names if turned):
        truth = {name: (names, False) for name, (names, _) in truth.items()}
    return MadeUp(Tree(_shuffled(rng, target)), _shuffled(rng, state), truth)


def _kind(last: str) -> str:
    if any(word in last for word in ("norm", "ln", "bn")):
        return "norm"
    return {"fc1": "up", "linear1": "up", "up": "up", "fc2": "down", "linear2": "down", "down": "down"}.get(last, "")


def _owners(rng: random.Random) -> list[str]:
    """Returns the paths of modules: some in layers, some in blocks within these, some alone."""
    words = rng.sample(WORDS, k=len(WORDS))
    owners: list[str] = []
    layers, stem = rng.choice([0, 1, 2, 3]), rng.choice(["layers", "blocks", "encoder.layers", "h"])
    members: list[str] = []
    for _ in range(rng.choice([1, 2, 3])):
        block = words.pop()
        inner = rng.choice([["q", "k", "v", "out_proj"], ["fc1", "fc2"], [words.pop(), words.pop()], []])
        members += [f"{block}.{name}" for name in inner] or [block]
    owners += [f"{stem}.{layer}.{member}" for layer in range(layers) for member in members]
    for _ in range(rng.choice([1, 2, 4])):
        owners.append(words.pop())
    if rng.random() < 0.4:
        names = [words.pop() for _ in range(2)]
        tail = [words.pop() for _ in range(rng.choice([1, 2]))]
        owners += [f"{name}.{last}" for name in names for last in tail]
    return list(dict.fromkeys(owners))


def _renamed(rng: random.Random, owners: list[str]) -> dict[str, str]:
    """Returns the paths under other names: each part of a path is kept, or becomes a synonym or an unknown word."""
    share = rng.choice([0.1, 0.4, 0.8])
    parts = dict.fromkeys(part for owner in owners for part in owner.split("."))
    new = {}
    for part in parts:
        new[part] = part
        if part.isdecimal() or rng.random() > share:
            continue
        synonyms = [word for group in SYNONYMS if part in group for word in group if word not in parts]
        if synonyms and rng.random() < 0.7:
            new[part] = rng.choice(sorted(synonyms))
        else:
            new[part] = _unknown(rng)
    prefix = rng.choice(["", "", "model.", "module.", "net.core."])
    return {owner: prefix + ".".join(new[part] for part in owner.split(".")) for owner in owners}


def _unknown(rng: random.Random) -> str:
    return "".join(rng.choices("bcdfgh", k=5)) + "".join(rng.choices("aeiou", k=2))


def _shuffled(rng: random.Random, state: State) -> State:
    return {name: state[name] for name in rng.sample(list(state), k=len(state))}
