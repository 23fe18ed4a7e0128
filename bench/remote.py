"""Counts requests and bytes of opening, loading, saving and of a store in a bucket.

    python -m bench.remote [reading] [saving] [storing]

counts all, or the tables that are named. A proxy counts in front of moto, a server for tests. The steps of a large
store take some minutes.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import modelstate as ms
from tests.distributed.ranks import Ranks
from tests.proxy import FaultProxy, fault_proxy
from tests.remote.servers import moto_server

BUCKET = "bucket"
URL = f"s3://{BUCKET}"
HEAD = "| call | requests | bytes up | bytes down |\n|---|---|---|---|"
STEPS = 1_000
WIDTH = 1_024
"""Of the matrices that are saved."""


@contextmanager
def bucket() -> Iterator[tuple[FaultProxy, Any, str]]:
    """Starts the servers, and yields the proxy, a client of S3 beside it, and the URL of the server without a proxy."""
    import boto3

    with moto_server() as url, fault_proxy(url) as proxy:
        os.environ.update(AWS_ENDPOINT_URL=proxy.url, AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test")
        os.environ.update(AWS_REGION="us-east-1")
        client = boto3.client("s3", region_name="us-east-1", endpoint_url=url)
        client.create_bucket(Bucket=BUCKET)
        yield proxy, client, url


def count(proxy: FaultProxy, title: str, call: Callable[[], object]) -> None:
    """Prints what a call requests."""
    proxy.reset()
    call()
    print(f"| {title} | {len(proxy.requests):,} | {proxy.uploaded_bytes:,} | {proxy.downloaded_bytes:,} |", flush=True)


def reading(proxy: FaultProxy, client: Any) -> None:
    """Prints the table of the formats, and that of other reads of a file of safetensors."""
    model = layers(20)
    nbytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    print(f"{len(model.state_dict())} tensors of {nbytes:,} bytes\n\n{HEAD}")
    with tempfile.TemporaryDirectory() as folder:
        ms.save(model, f"{folder}/a.safetensors")
        os.mkdir(f"{folder}/shards")
        ms.save(model, f"{folder}/shards/model.safetensors", shard_size_bytes=nbytes // 4)
        torch.save(model.state_dict(), f"{folder}/a.pt")
        torch.save(model.state_dict(), f"{folder}/old.pt", _use_new_zipfile_serialization=False)
        dcp.save(model.state_dict(), checkpoint_id=f"{folder}/dcp", no_dist=True)
        for path in filter(Path.is_file, Path(folder).rglob("*")):
            client.upload_file(str(path), BUCKET, str(path.relative_to(folder)))
    formats = {
        "a.safetensors": "safetensors",
        "shards": "safetensors, a prefix with an index and 5 shards",
        "a.pt": "`torch.save`",
    }
    for name, title in {**formats, "old.pt": "`torch.save` before 1.6", "dcp": "torch.distributed.checkpoint"}.items():
        count(proxy, f"open, {title}", partial(ms.open, f"{URL}/{name}"))
        count(proxy, f"load, {title}", partial(ms.load, model, ms.open(f"{URL}/{name}")))
    print(f"\n{HEAD}")
    url = f"{URL}/a.safetensors"
    count(proxy, "`ms.plan`", partial(ms.plan, model, url))
    quarter = layers(5)
    of_quarter = sum(tensor.nbytes for tensor in quarter.state_dict().values())
    subset = partial(ms.load, quarter, ms.open(url), allow_unexpected=["*"])
    count(proxy, f"load of 10 of the 40 tensors, {of_quarter:,} bytes", subset)
    from bench.remote import load_shard  # ranks import it by this name, and not as that of the program

    ranks, settings = Ranks(4), {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    load = partial(ranks.values, load_shard, url, settings)
    try:
        load()  # connects the ranks
        count(proxy, "open and load on 4 ranks, each a quarter of the rows", load)
    finally:
        ranks.close()


def layers(number: int, device: str = "cpu") -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, device=device) for _ in range(number)))


def load_shard(url: str, settings: dict[str, str]) -> None:
    """Loads the rows of one rank, which was started with other settings of the client."""
    os.environ.update(settings)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = layers(20, "meta")
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = distribute_tensor(parameter, mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(shard))
    ms.load(model, url)


def saving(proxy: FaultProxy) -> None:
    """Prints the table of saves."""
    state = {f"layer{number}": torch.randn(WIDTH, WIDTH) for number in range(16)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    print(f"\n{HEAD}")
    count(proxy, f"`ms.save`, {nbytes:,} bytes of tensors", lambda: ms.save(state, f"{URL}/b.safetensors"))
    count(proxy, "the same with `overwrite=False`", lambda: ms.save(state, f"{URL}/c.safetensors", overwrite=False))
    shards = partial(ms.save, state, f"{URL}/d.safetensors", shard_size_bytes=nbytes // 4)
    count(proxy, "the same in 4 shards", shards)


def storing(proxy: FaultProxy, url: str) -> None:
    """Prints the table of a store. The steps that are not counted go to the server itself, which is faster."""
    print(f"\n{HEAD}")
    objects = {"frozen": nn.Linear(512, 512), "trained": nn.Linear(512, 512)}
    with ms.Store(f"{URL}/run") as store:

        def save(step: int) -> None:
            nn.init.normal_(objects["trained"].weight)
            store.save(step, objects)

        count(proxy, "first `Store.save`, 2 objects of 1 MB", partial(save, 1))
        count(proxy, "a later one, one object unchanged", partial(save, 2))
        os.environ["AWS_ENDPOINT_URL"] = url
        for step in range(3, STEPS + 1):
            save(step)
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        count(proxy, f"`latest()` or `steps()`, {STEPS:,} steps", store.latest)
        reader = ms.Store(f"{URL}/run")
        count(proxy, f"`infos()`, {STEPS:,} steps, the first time", reader.infos)
        count(proxy, "`infos()` again", reader.infos)
        count(proxy, f"`save` beside {STEPS:,} steps", partial(save, STEPS + 1))


if __name__ == "__main__":
    tables = sys.argv[1:] or ["reading", "saving", "storing"]
    with bucket() as (running, s3, server):
        if "reading" in tables:
            reading(running, s3)
        if "saving" in tables:
            saving(running)
        if "storing" in tables:
            storing(running, server)
