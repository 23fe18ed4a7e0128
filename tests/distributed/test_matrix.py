"""Every way to shard, from every format, with every change on the way: each rank holds its part of the whole load."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import modelstate as ms
from modelstate.rules import expression
from tests.distributed import models, sources
from tests.distributed.models import Net
from tests.distributed.ranks import Ranks
from tests.sweeps import EXHAUSTIVE

pytestmark = pytest.mark.slow

SAME_FORWARD = {"fsdp", "hsdp", "shard1", "uneven", "empty", "tied"}
"""Kinds that compute with whole weights, so that the results are equal bit for bit."""


def _named(net: Net) -> dict[str, torch.Tensor]:
    return dict([*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)])


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), getattr(tensor, "placements", None), tensor.shape, tensor.dtype


def _differences(net: Net, expected: Net) -> Iterator[str]:
    """Says for each tensor that differs on this rank in its placements, its dtype or its bits."""
    found, named = _named(net), _named(expected)
    if found.keys() != named.keys():
        yield f"names: {sorted(found)}"
    for name, tensor in named.items():
        if _layout(found[name]) != _layout(tensor):
            yield f"{name}: {_layout(found[name])}"
        elif not torch.equal(models.local(found[name]), models.local(tensor)):
            yield f"{name}: other values"


TARGETS: dict[str, dict[str, Any]] = {"memory": {}, "meta": {}, "meta, mapped": {"map": True}}
"""Where the model is before a load, with options of the load."""


def _targets(kind: str, form: str, index: int) -> Sequence[str]:
    """The targets of one case: one of the three for every fourth case, another case in the next format, else none.

    So each kind and each format is loaded with each case, and into each target, as each case is. With
    MODELSTATE_EXHAUSTIVE=1 each case is loaded into all three.
    """
    place, format_place = [*models.SHARD].index(kind), sources.FORMATS.index(form)
    if EXHAUSTIVE:
        return [*TARGETS]
    return [[*TARGETS][(place + index) % 3]] if (place + format_place + index) % 4 == 0 else []


@cache
def _whole(size: str, case: str, folder: Path) -> dict[str, torch.Tensor]:
    """The state of the network after a case was loaded from a safetensors file before torch has sharded it."""
    source, options = sources.cases(size, folder, "safetensors")[case]
    net = models.plain(size, options.get("dtype", torch.float32))
    ms.load(net, source(), **options)
    return net.state_dict()


def _compare(kind: str, form: str, folder: Path) -> list[str]:
    """Loads all cases into new models of a kind, on this rank as on all others, and returns what differs."""
    wrong = []
    tokens = torch.arange(5).reshape(1, 5)
    size = kind if kind in models.SIZES else ""
    for index, (case, (source, options)) in enumerate(sources.cases(kind, folder, form).items()):
        if not (targets := _targets(kind, form, index)):
            continue
        dtype = options.get("dtype", torch.float32)
        expected = models.plain(kind, dtype)
        expected.load_state_dict(_whole(size, case, folder))
        with torch.no_grad():
            output = expected(tokens)
        models.SHARD[kind](expected)
        for target in targets:
            more, where = TARGETS[target], f"{case}, {target}"
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
            wrong += [f"{where}: {text}" for text in _differences(net, expected)]
            if kind in SAME_FORWARD and case == "fp32":
                with torch.no_grad():
                    same = torch.equal(models.whole(net(tokens)), output)
                wrong += [] if same else [f"{where}: forward: other values"]
    return wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the checkpoints, which kinds of one size share."""
    return tmp_path_factory.mktemp("matrix")


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (kind, form)
        for kind in models.SHARD
        for form in sources.FORMATS
        # What a rank reads depends on the layout, and how it is read on the format.
        if EXHAUSTIVE or form == "safetensors" or kind in ("fsdp+tp", "shard1", "empty", "tied")
    ],
)
def test_each_rank_holds_its_part_of_the_whole_load(kind: str, form: str, ranks: Ranks, folder: Path) -> None:
    assert ranks.values(_compare, kind, form, folder) == [[]] * 4
