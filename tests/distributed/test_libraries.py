"""Sharded saves with other libraries: transformers reads the files, torchdata's loaders resume on each rank."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

import modelstate as ms
from tests.distributed import models
from tests.distributed.ranks import Ranks, error_of

pytestmark = pytest.mark.slow


def llama(tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied)
    )


def tree_of(state: dict[str, torch.Tensor]) -> nn.Module:
    """Modules with the parameters of a state dict under their names; a tensor with several names is one parameter."""
    top, parameters = nn.Module(), {id(tensor): nn.Parameter(tensor) for tensor in state.values()}
    for name, tensor in state.items():
        module = top
        *path, last = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, parameters[id(tensor)])
    return top


def save_sharded(state: dict[str, torch.Tensor], path: Path, shard_size_bytes: int | None) -> None:
    """Shards each layer of a Llama with FSDP2, and saves the parameters.

    They are in plain modules: in four ranks, an import of transformers takes ten seconds of processor time.
    """
    model: Any = tree_of(state)
    for layer in model.model.layers.children():
        fully_shard(layer, mesh=models.mesh(4))
    fully_shard(model, mesh=models.mesh(4))
    ms.save(model, path, shard_size_bytes=shard_size_bytes)


@pytest.mark.parametrize(("tied", "shard_size_bytes"), [(False, 4000), (True, None)])
def test_from_pretrained_reads_the_files(
    ranks: Ranks, tmp_path: Path, tied: bool, shard_size_bytes: int | None
) -> None:
    from transformers import LlamaForCausalLM

    model = llama(tied)
    model.config.save_pretrained(tmp_path)
    ranks.values(save_sharded, model.state_dict(), tmp_path / "model.safetensors", shard_size_bytes)
    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    expected, found = model.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (len(list(tmp_path.glob("*.safetensors"))) == 1) == (shard_size_bytes is None)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def objects_of(workers: int) -> dict[str, Any]:
    """A sharded network, and the loader of this rank, which shuffles."""
    rank, size = dist.get_rank(), dist.get_world_size()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.manual_seed(rank)
    loader: Any = StatefulDataLoader(range(rank, 40, size), batch_size=2, shuffle=True, num_workers=workers)
    return {"model": models.sharded("fsdp"), "rng": ms.RNG(), "loader": loader}


def batches_of_a_resumed_run(folder: Path, workers: int) -> list[bool]:
    """Whether a run that is resumed in the middle of an epoch has the batches of one without an interruption."""
    objects = objects_of(workers)
    with ms.Store(folder / "store") as store:
        expected = []
        for number, batch in enumerate(objects["loader"]):
            expected.append(batch.tolist())
            if number == 1:
                store.save(1, objects)
        expected += [batch.tolist() for batch in objects["loader"]]
        assert len(expected) == 10
        resumed = objects_of(workers)
        torch.manual_seed(99)
        store.restore(resumed)
        found = [batch.tolist() for batch in resumed["loader"]]
        found += [batch.tolist() for batch in resumed["loader"]]
        half = dist.new_group([0, 1])
        refused = ""
        if dist.get_rank() < 2:
            smaller = ms.Store(folder / "store", process_group=half)
            refused, text = error_of(lambda: smaller.restore({"loader": resumed["loader"]}, allow_unexpected=["*"]))
            assert "allow_unexpected=['loader']" in text
        return [found == expected[2:], refused == ("ObjectStateError" if dist.get_rank() < 2 else "")]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_of_each_rank_goes_on(ranks: Ranks, tmp_path: Path, workers: int) -> None:
    assert ranks.values(batches_of_a_resumed_run, tmp_path, workers) == [[True, True]] * 4
