"""Loads a checkpoint from a bucket in fresh processes, at several latencies, with modelstate and with other libraries.

    python -m bench.remote_load --latency-ms 10     # measures; the results are kept in dist/
    python -m bench.remote_load --write             # measures what is missing, and writes the table

Results of another version of the code are not used.

The time is from the URL to the end of the first forward: clients connect in it; imports are done before. The server is
ministack (`make test-remote` installs it), which has the object in memory, behind a proxy that delays each request.
s3fs, which DCP needs, takes an older botocore than constraints.txt: install it into an environment of its own.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import nn

import modelstate as ms
from bench.measure import ROOT, MeasurementError, Stage, Stages, alternate, call, run
from bench.measured import code
from bench.pages import InPage, Row
from modelstate.text_format import size
from tests.proxy import fault_proxy
from tests.remote.servers import http_server, missing, object_store

KEPT = ROOT / "dist" / "remote_load.json"
BUCKET = "bucket"
LAYERS, WIDTH = 16, 1024
LATENCIES_MS = (0, 10, 50)
Target = Callable[[str, str], nn.Module]
"""Loads the model; is given the URL of the server and a directory for temporary files."""


def model(device: str = "meta") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def assigned(state: Mapping[str, Any]) -> nn.Module:
    target = model()
    target.load_state_dict(state, assign=True)
    return target


# The contenders: each imports what it needs, and returns a function that loads.


def of_modelstate() -> Target:
    import obstore.store  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:  # what the first load of a process imports
        ms.save(nn.Linear(2, 2), f"{folder}/a.safetensors")
        ms.load(nn.Linear(2, 2, device="meta"), f"{folder}/a.safetensors")

    def load(url: str, folder: str) -> nn.Module:
        target = model()
        ms.load(target, f"s3://{BUCKET}/model.safetensors")
        return target

    return load


def of_runai() -> Target:
    import runai_model_streamer_s3  # noqa: F401
    from runai_model_streamer import SafetensorsStreamer

    def load(url: str, folder: str) -> nn.Module:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(f"s3://{BUCKET}/model.safetensors")
            return assigned({name: tensor.clone() for name, tensor in streamer.get_tensors()})

    return load


def of_s3torchconnector() -> Target:
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    def load(url: str, folder: str) -> nn.Module:
        config = S3ClientConfig(force_path_style=True)
        with S3Checkpoint("us-east-1", endpoint=url, s3client_config=config).reader(f"s3://{BUCKET}/model.pt") as file:
            return assigned(torch.load(cast(IO[bytes], file)))

    return load


def of_dcp() -> Target:
    import s3fs  # noqa: F401
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    def load(url: str, folder: str) -> nn.Module:
        state = model().to_empty(device="cpu").state_dict()
        dcp.load(state, storage_reader=FsspecReader(f"s3://{BUCKET}/dcp"), no_dist=True)
        return assigned(state)

    return load


def of_boto3() -> Target:
    import boto3
    from safetensors.torch import load_file

    def load(url: str, folder: str) -> nn.Module:
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
        client.download_file(BUCKET, "model.safetensors", f"{folder}/model.safetensors")
        return assigned(load_file(f"{folder}/model.safetensors"))

    return load


def of_hub() -> Target:
    from huggingface_hub import hf_hub_download
    from safetensors.torch import load_file

    def load(url: str, folder: str) -> nn.Module:
        return assigned(load_file(hf_hub_download("org/name", "model.safetensors", endpoint=url, cache_dir=folder)))

    return load


CONTENDERS: dict[str, tuple[Callable[[], Target], str]] = {
    "modelstate": (of_modelstate, "obstore"),
    "runai-model-streamer": (of_runai, "runai-model-streamer-s3"),
    "s3torchconnector, `torch.load`": (of_s3torchconnector, "s3torchconnector"),
    "DCP, fsspec": (of_dcp, "s3fs"),
    "boto3 download, safetensors": (of_boto3, "boto3"),
    "hf download, safetensors": (of_hub, "huggingface_hub"),
}
"""By the name in the table, with the package whose version the table has."""


def load_once(*, name: str, url: str) -> None:
    """One load in this process."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        load = CONTENDERS[name][0]()
        batch = torch.ones(1, WIDTH)
        model("cpu")(batch)
        stages = Stages()
        target = load(url, folder)
        target(batch)
        stored = sum(
            file.lstat().st_size for file in Path(folder).rglob("*") if file.is_file() and not file.is_symlink()
        )
        stages.end("forward", stored=stored, sum=float(sum(each.double().sum() for each in target.parameters())))


# The servers.


def publish(folder: str) -> None:
    """Uploads the checkpoint in each format. boto3 sends it in one request, without a checksum in the body."""
    import boto3
    import torch.distributed.checkpoint as dcp
    from botocore.config import Config

    torch.manual_seed(0)
    state = model("cpu").state_dict()
    ms.save(state, f"{folder}/model.safetensors")
    torch.save(state, f"{folder}/model.pt")
    dcp.save(state, checkpoint_id=f"{folder}/dcp", no_dist=True)
    client = boto3.client("s3", config=Config(request_checksum_calculation="when_required"))
    client.create_bucket(Bucket=BUCKET)
    for path in filter(Path.is_file, Path(folder).rglob("*")):
        client.put_object(Bucket=BUCKET, Key=str(path.relative_to(folder)), Body=path.read_bytes())


@contextmanager
def hub(s3: str) -> Iterator[str]:
    """A server that answers as the hub does, and redirects to the object in the bucket."""
    with urllib.request.urlopen(f"{s3}/{BUCKET}/model.safetensors") as reply:
        nbytes = len(reply.read())

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response_only(302)
            headers = {"X-Repo-Commit": "0" * 40, "X-Linked-Size": str(nbytes), "X-Linked-Etag": '"0123456789"'}
            for name, value in {
                **headers,
                "Location": f"{s3}/{BUCKET}/model.safetensors",
                "Content-Length": "0",
            }.items():
                self.send_header(name, value)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Writes nothing."""

    with http_server(Hub) as url:
        yield url


def measured(latency_ms: int, runs: int) -> dict[str, Any]:
    """By contender: the seconds, and the bytes of memory and of temporary files of each run, or why it failed."""
    with ExitStack() as stack:
        server = stack.enter_context(object_store("ministack"))
        os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_REGION="us-east-1")
        os.environ.update(AWS_DEFAULT_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true", HF_HUB_DISABLE_XET="1")
        os.environ.update(RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING="0", HF_HUB_DISABLE_TELEMETRY="1")
        os.environ["AWS_ENDPOINT_URL"] = server
        publish(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy = stack.enter_context(fault_proxy(server, latency_seconds=latency_ms / 1000))
        hub_proxy = stack.enter_context(
            fault_proxy(stack.enter_context(hub(proxy.url)), latency_seconds=latency_ms / 1000)
        )
        os.environ["AWS_ENDPOINT_URL"] = proxy.url

        def contender(name: str) -> Callable[[], dict[str, Stage]]:
            url = hub_proxy.url if name.startswith("hf ") else proxy.url
            return partial(run, call(load_once, name=name, url=url), timeout_seconds=60)

        contenders = {name: contender(name) for name in CONTENDERS}
        results, failed = alternate(contenders, runs, lambda stages: f"{stages['forward'].seconds:.3f} s")
    stages = {name: [result["forward"] for result in found] for name, found in results.items()}
    sums = {stage.facts["sum"] for found in stages.values() for stage in found}
    if len(sums) > 1:
        raise MeasurementError(f"the contenders loaded different values: {sums}")
    figures = {
        name: [[stage.seconds, stage.anonymous_bytes, stage.facts["stored"]] for stage in found]
        for name, found in stages.items()
    }
    return figures | failed


def rows() -> Iterator[Row]:
    """Medians of what is kept."""
    kept = json.loads(KEPT.read_text())
    for name, (_, package) in CONTENDERS.items():
        try:
            title = f"{name} ({version(package)})" if name != "modelstate" else name
        except PackageNotFoundError:
            title = f"{name} (not installed)"
        row, runs = [title], []
        for latency in LATENCIES_MS:
            found = kept[str(latency)]["contenders"][name]
            if isinstance(found, str):
                row.append(f"does not run: {found}")
                continue
            times = [seconds for seconds, _, _ in found]
            row.append(f"{statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})")
            runs.extend(found)
        row.extend(size(int(statistics.median(run[at] for run in runs))) if runs else "" for at in (1, 2))
        yield tuple(row)


TABLE = InPage(
    "bench/results/remote.md",
    "remote_load",
    "<!-- End of the table of loads -->",
    ("", *(f"{latency} ms" for latency in LATENCIES_MS), "own memory", "temporary files"),
    rows,
    f", {os.cpu_count()} processors, {platform.system()}",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=int, choices=LATENCIES_MS, help="measure this one again, alone")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{TABLE.file}")
    options = parser.parse_args()
    if reason := missing("ministack"):
        parser.error(reason)
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept = {latency: found for latency, found in kept.items() if found.get("code") == code()}
    for latency in LATENCIES_MS if options.latency_ms is None else [options.latency_ms]:
        if options.latency_ms is None and str(latency) in kept:
            continue
        kept[str(latency)] = {"code": code(), "contenders": measured(latency, options.runs)}
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(kept, indent=1))
    if all(str(latency) in kept for latency in LATENCIES_MS):
        TABLE.show(options.write)
    else:
        print(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
