"""What the README says under "Limits" about models and their files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms


class Overriding(nn.Linear):
    """Overrides what may be overridden, and takes down what is called."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.called: list[str] = []
        self.register_load_state_dict_pre_hook(lambda *_: self.called.append("pre-hook"))
        self.register_load_state_dict_post_hook(lambda *_: self.called.append("post-hook"))

    def load_state_dict(self, *args: Any, **named: Any) -> Any:
        self.called.append("load_state_dict")
        return super().load_state_dict(*args, **named)

    def _load_from_state_dict(self, *args: Any, **named: Any) -> None:
        self.called.append("_load_from_state_dict")
        super()._load_from_state_dict(*args, **named)


def test_load_calls_hooks_and_overrides_as_torch_does() -> None:
    model = Overriding()
    state = nn.Linear(2, 2).state_dict()
    ms.load(model, state)
    assert model.called == ["load_state_dict", "_load_from_state_dict", "pre-hook", "post-hook"]
    assert torch.equal(model.weight, state["weight"])


@pytest.mark.filterwarnings("ignore")
def test_a_wrapped_model_of_transformers_needs_the_rules_of_its_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.ViTModel(transformers.ViTConfig(**size, image_size=32, patch_size=16))
    model.save_pretrained(tmp_path)
    wrapper = nn.ModuleDict({"inner": model})
    assert ms.plan(model, tmp_path).ok
    assert not ms.plan(wrapper, tmp_path).ok
    rules = [ms.rules.from_transformers(model), ms.rules.Prefix(add="inner.")]
    assert ms.plan(wrapper, tmp_path, rules=rules).ok
