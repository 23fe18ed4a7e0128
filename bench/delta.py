"""What deltas weigh and how long they take: for a real fine-tune, and for many weights.

`python -m bench.delta` trains all-MiniLM-L6-v2 for some steps at several learning rates: in float32, with AdamW, on
neighbouring sentences from the documentation of torch. A store publishes each step in bfloat16. Of the last step it
prints the bytes: the XOR of the bits, compressed with zstd at level 1, as most trainers publish it; the entropy of the
positions and differences, as if each element of a tensor changed with the same probability; the payloads of the delta;
and all bytes that the store has written.

Then it encodes and applies the changes of `--mb` MB of bfloat16 with 2% changed elements, on two threads. Beside that,
it copies the weights in memory and writes all of them to a disk.
"""

import argparse
import ast
import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.nn import functional

import modelstate as ms
from bench.demo import Material, build_bert, find_material
from modelstate.formats import delta
from modelstate.text_format import columns

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

RATES = (1e-6, 1e-5, 1e-4)
PAIRS = 32
TENSOR_ELEMENTS = 8 << 20
THREADS = 2

State = dict[str, torch.Tensor]


def sentences() -> list[str]:
    """Returns the sentences of the docstrings of `torch.nn`, in their order."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    found: list[str] = []
    for path in sorted((Path(spec.origin).parent / "nn" / "modules").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                found += [part.strip() for part in re.split(r"(?<=[.:])\s+", text) if 40 < len(part) < 300]
    return list(dict.fromkeys(found))


def fine_tune(material: Material, rate: float, steps: int) -> Iterator[torch.nn.Module]:
    """Trains a model, whose embedding of a sentence is to be that of the next one; yields it after each step."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(material.folder / "tokenizer.json"))
    tokenizer.enable_truncation(32)
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
    torch.manual_seed(0)
    model, texts = build_bert(material), sentences()
    ms.load(model, material.checkpoint)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate)

    def embedded(batch: Sequence[str]) -> torch.Tensor:
        tokens = torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(batch)])
        mask = (tokens != 0).float().unsqueeze(-1)
        hidden = model(input_ids=tokens, attention_mask=mask.squeeze(-1)).last_hidden_state
        return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)

    yield model
    for step in range(steps):
        batch = texts[2 * PAIRS * step : 2 * PAIRS * (step + 1)]
        scores = embedded(batch[::2]) @ embedded(batch[1::2]).T / 0.05
        functional.cross_entropy(scores, torch.arange(len(scores))).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield model


def entropy_bytes(before: torch.Tensor, after: torch.Tensor) -> float:
    """Returns the entropy of the positions of changed elements of 2 bytes, and of their differences."""
    old, new = (tensor.flatten().view(torch.int16).numpy() for tensor in (before, after))
    differences, bits = (new - old)[new != old], 0.0
    for counts in (
        np.array([len(differences), len(old) - len(differences)]),
        np.unique(differences, return_counts=True)[1],
    ):
        counts = counts[counts > 0]
        bits -= float((counts * np.log2(counts / counts.sum())).sum())
    return bits / 8


def weigh(before: State, after: State, written_bytes: int) -> list[str]:
    """Returns the row of a step, whose delta has to give its bits."""
    nbytes = changed = payload_bytes = 0
    entropy, xors = 0.0, list[bytes]()
    for name, old in before.items():
        new, out = after[name], old.clone().view(-1)
        payload = delta.encode(old, new)
        if payload is None:
            payload_bytes += new.nbytes
        else:
            changed += delta.apply(payload, out, 0)
            assert torch.equal(out.view(torch.int16), new.view(torch.int16).view(-1))
            payload_bytes += payload.nbytes
        nbytes += new.nbytes
        entropy += entropy_bytes(old, new)
        xors.append((old.view(torch.int16) ^ new.view(torch.int16)).numpy().tobytes())
    field_bytes = len(zstd.compress(b"".join(xors), 1))
    row = [f"{changed / (nbytes / 2):.2%}", *(f"{size:,.0f}" for size in (nbytes, field_bytes, entropy, payload_bytes))]
    ratios = (payload_bytes / field_bytes, payload_bytes / entropy, written_bytes / field_bytes)
    return [*row, f"{written_bytes:,}", *(f"{ratio:.2f}" for ratio in ratios)]


def published(steps: int) -> Iterator[list[str]]:
    """Yields the row of the last step of a fine-tune, for each learning rate."""
    material = find_material()
    for rate in RATES:
        with (
            tempfile.TemporaryDirectory() as folder,
            ms.Store(folder, delta=ms.Delta(dtype="bfloat16")) as store,
        ):
            before, after = State(), State()
            for step, model in enumerate(fine_tune(material, rate, steps)):
                store.save(step, {"model": model})
                before = after
                after = {name: value.detach().bfloat16() for name, value in model.named_parameters()}
            yield [f"{rate:.0e}", *weigh(before, after, store.infos()[-1].written_bytes)]


def seconds(jobs: Iterable[Callable[[], object]]) -> tuple[float, float]:
    """Returns the time of jobs on two threads, and that of the processors."""
    with ThreadPoolExecutor(THREADS) as pool:
        start, busy = time.perf_counter(), time.process_time()
        for job in [pool.submit(job) for job in jobs]:
            job.result()
        return time.perf_counter() - start, time.process_time() - busy


def write(path: Path, tensors: Sequence[torch.Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            file.write(tensor.view(torch.uint8).numpy().data)
        os.fsync(file.fileno())


def timed(mb: int, runs: int, folder: Path | None) -> Iterator[list[str]]:
    """Yields the times of each job: the least, the median, and the least of the processors. The jobs take turns."""
    generator = torch.Generator().manual_seed(0)
    before, after = list[torch.Tensor](), list[torch.Tensor]()
    for _ in range(max(round(mb * 1e6 / 2 / TENSOR_ELEMENTS), 1)):
        old = (torch.randn(TENSOR_ELEMENTS, generator=generator) * 0.02).bfloat16()
        new = old.clone()
        places = (torch.rand(TENSOR_ELEMENTS, generator=generator) < 0.02).nonzero().view(-1)
        size = torch.randn(len(places), generator=generator).abs().clamp(max=100).to(torch.int16) + 1
        new.view(torch.int16)[places] += torch.where(torch.rand(len(places), generator=generator) < 0.5, size, -size)
        before.append(old)
        after.append(new)
    payloads = [payload for payload in map(delta.encode, before, after) if payload is not None]
    directories = [delta.check(payload, TENSOR_ELEMENTS, 2) for payload in payloads]
    out = [torch.empty_like(tensor) for tensor in before]
    blocks = [
        (index, first) for index in range(len(before)) for first in range(0, TENSOR_ELEMENTS, delta.BLOCK_ELEMENTS)
    ]

    def copy(index: int, first: int) -> None:
        block = slice(first, first + delta.BLOCK_ELEMENTS)
        out[index][block].copy_(before[index][block])

    def apply(index: int, first: int) -> None:
        last = min(first + delta.BLOCK_ELEMENTS, TENSOR_ELEMENTS)
        begin, end = directories[index].frames(first, last)
        delta.apply_frames([directories[index]], [payloads[index][begin:end]], out[index][first:last], first)

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name, "weights")
        jobs: dict[str, Callable[[], tuple[float, float]]] = {
            "a copy in memory": lambda: seconds(partial(copy, *block) for block in blocks),
            "apply": lambda: seconds(partial(apply, *block) for block in blocks),
            "encode": lambda: seconds(map(partial, repeat(delta.encode), before, after)),
            "write and sync the delta": lambda: seconds([partial(write, path, payloads)]),
            "write and sync all": lambda: seconds([partial(write, path, after)]),
        }
        times: dict[str, list[tuple[float, float]]] = {job: [] for job in jobs}
        for _ in range(runs):
            for job, measure in jobs.items():
                times[job].append(measure())
    for job, measured in times.items():
        walls, busy = ([1e3 * of_run[kind] for of_run in measured] for kind in (0, 1))
        yield [job, *(f"{value:.0f}" for value in (min(walls), median(walls), min(busy)))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.delta", description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="steps of each fine-tune; 0 leaves it out")
    parser.add_argument("--mb", type=int, default=600, help="MB of weights; 0 leaves the times out")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    options = parser.parse_args(arguments)
    if options.steps:
        head = ["lr", "changed", "weights", "XOR", "entropy", "payloads", "written", "p/XOR", "p/entropy", "w/XOR"]
        print(columns([head, *published(options.steps)], right=range(10)))
    if options.mb:
        head = ["", "least ms", "median ms", "of processors"]
        print(columns([head, *timed(options.mb, options.runs, options.folder)], right=range(1, 4)))


if __name__ == "__main__":
    main()
