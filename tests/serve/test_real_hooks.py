"""Modules of real libraries whose state-dict hooks rename: exported, and new checkpoints swapped in."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import modelstate as ms
from tests.serve.models import randomised

Build = Callable[[], nn.Module]
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(4))
TOKENS = torch.tensor([[1, 11, 2, 12, 3], [11, 4, 5, 12, 6]])


@pytest.fixture(scope="module")
def torchtune(real_file: Callable[[str], Path]) -> ModuleType:
    """The module with the fusion layers, by itself: the package asks for much that it does not need here."""
    spec = importlib.util.spec_from_file_location("torchtune_fusion_layers", real_file("torchtune-fusion"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Fused(nn.Module):
    """A decoder of which every second layer has another one fused before it."""

    def __init__(self, torchtune: Any, tokens: bool) -> None:
        super().__init__()
        if tokens:
            self.tok_embeddings = torchtune.FusionEmbedding(10, 3, 8)
        blocks = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
        cross = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.layers = nn.ModuleList([blocks[0], torchtune.FusionLayer(blocks[1], cross)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "tok_embeddings"):
            x = self.tok_embeddings(x)
        for layer in self.layers:
            x = layer(x)
        return x


def check(build: Build, x: torch.Tensor, renamed: str, shown: str) -> None:
    """Eager weights by either spelling, with a map and with the module's code: answers equal the eager model's."""
    module, trained = build(), randomised(build())
    assert renamed in module.state_dict()
    assert shown in ms.serve.runtime_state(module)
    assert renamed not in ms.serve.runtime_state(module)
    program = torch.export.export(module, (x,))
    assert list(program.state_dict) == list(ms.serve.runtime_state(module))
    with torch.no_grad():
        expected = trained(x)
        for names in (ms.serve.NameMap.from_json(ms.serve.NameMap.of(module).to_json()), module):
            for state in (trained.state_dict(), ms.serve.runtime_state(trained)):
                live = ms.Live(program, names=names)
                assert not torch.allclose(live(x), expected, atol=1e-4)
                live.swap(state)
                assert torch.allclose(live(x), expected, atol=1e-5)
        typo = dict(trained.state_dict())
        typo[f"{renamed}s"] = typo.pop(renamed)
        with pytest.raises(ms.PlanError, match=r"ms\.rules\.Rename"):
            ms.Live(program, names=ms.serve.NameMap.of(module)).swap(typo)


@pytest.mark.slow
def test_the_fusion_layer_of_torchtune(torchtune: ModuleType) -> None:
    build = lambda: Fused(torchtune, tokens=False).eval()  # noqa: E731
    check(build, X, "layers.1.linear1.weight", "layers.1.layer.linear1.weight")


@pytest.mark.slow
def test_the_fusion_embedding_of_torchtune(torchtune: ModuleType) -> None:
    build = lambda: Fused(torchtune, tokens=True).eval()  # noqa: E731
    check(build, TOKENS, "tok_embeddings.weight", "tok_embeddings.embedding.weight")


@pytest.mark.slow
def test_a_bert_with_layers_under_activation_checkpointing() -> None:
    """The wrapper is torch's, and what Lightning and accelerate put around the layers of a model that they train."""
    transformers = pytest.importorskip("transformers")

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.BertConfig(
                vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
            )
            self.bert = transformers.BertModel(config)
            layers = self.bert.encoder.layer
            for at in range(len(layers)):
                layers[at] = checkpoint_wrapper(layers[at])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.bert(tokens).last_hidden_state
            return found

    name = "bert.encoder.layer.0.{}attention.self.query.weight"
    check(lambda: Encoder().eval(), TOKENS, name.format(""), name.format("_checkpoint_wrapped_module."))
