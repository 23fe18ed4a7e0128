"""Every way to shard, from every format, with every change on the way: each rank holds its part of the whole load."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import modelstate as ms
from modelstate.rules import expression
from tests.distributed import models, sources
from tests.distributed.models import Net
from tests.distributed.ranks import Ranks

SAME_FORWARD = {"fsdp", "hsdp", "shard1", "uneven", "empty", "tied"}
"""Kinds that compute with whole weights, so that the results are equal bit for bit."""


def _differences(net: Net, expected: Net, same_forward: bool) -> Iterator[str]:
    """Says for each tensor that is not, gathered from all ranks, what the unsharded load gave."""
    whole = models.gathered(net)
    named = [
        *expected.named_parameters(remove_duplicate=False),
        *expected.named_buffers(remove_duplicate=False),
    ]
    if whole.keys() != {name for name, _ in named}:
        yield f"names: {sorted(whole)}"
    for name, tensor in named:
        if whole[name].dtype != tensor.dtype:
            yield f"{name}: {whole[name].dtype}"
        elif not torch.equal(whole[name], tensor):
            yield f"{name}: other values"
    if same_forward:
        tokens = torch.arange(5).reshape(1, 5)
        with torch.no_grad():
            if not torch.equal(models.whole(net(tokens)), expected(tokens)):
                yield "forward: other values"


def _compare(kind: str, form: str, folder: Path) -> list[str]:
    """Loads all cases into new models of a kind, on this rank as on all others, and returns what differs."""
    wrong = []
    for case, (source, options) in sources.cases(kind, folder, form).items():
        dtype = options.get("dtype", torch.float32)
        expected = models.plain(kind, dtype)
        ms.load(expected, source(), **options)
        for target, more in {"memory": {}, "meta": {}, "meta, mapped": {"map": True}}.items():
            where = f"{case}, {target}"
            net = models.sharded(kind, dtype, meta=target != "memory")
            before = dict(net.named_parameters(remove_duplicate=False))
            # The tensors here are small. In one of the targets, shards of many runs are read as those of large ones.
            least = 1 if target == "memory" else expression._LEAST_RUN_BYTES
            with mock.patch.object(expression, "_LEAST_RUN_BYTES", least):
                if form == "safetensors" and target == "meta, mapped":
                    ms.load(net, ms.plan(net, source(), **options, **more))
                else:
                    ms.load(net, source(), **options, **more)
            after = dict(net.named_parameters(remove_duplicate=False))
            wrong += [f"{where}: {name}: another object" for name in before if after[name] is not before[name]]
            same_forward = kind in SAME_FORWARD and case == "fp32"
            wrong += [f"{where}: {text}" for text in _differences(net, expected, same_forward)]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("form", sources.FORMATS)
@pytest.mark.parametrize("kind", models.SHARD)
def test_each_rank_holds_its_part_of_the_whole_load(kind: str, form: str, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(_compare, kind, form, tmp_path) == [[]] * 4
