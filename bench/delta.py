"""What deltas weigh and how long they take, beside whole steps and beside the format of most trainers.

    python -m bench.delta [--write]

Bytes: all-MiniLM-L6-v2 is trained for some steps at several learning rates, in float32, with AdamW, on neighbouring
sentences from the documentation of torch. A store publishes each step in bfloat16. Of the last step, all bytes that
the store has written are compared with the XOR of the bits, compressed with zstd at level 1, as most trainers publish
it. Its payloads are compared with the entropy of the positions and differences, as if each element of a tensor changed
with the same probability.

Times: of many weights in bfloat16, in fresh processes that take turns.
"""

import argparse
import ast
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import modelstate as ms
from bench import files
from bench.demo import Material, build_bert, find_material
from bench.measure import ROOT, Stage, Stages, alternate, call, run, temporary_folder
from bench.pages import InPage, Row
from modelstate.formats import delta as formats
from modelstate.io.engine import for_each
from modelstate.io.tensors import compute, read_tensor

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

RATES = (1e-6, 1e-5, 1e-4)
PAIRS = 32
TENSOR_ELEMENTS = 8 << 20
SHARE = 0.02
"""Of the elements that change in a step."""
CHAIN = 32
THREADS = 2
BUCKET_SPEED = 100e6
"""Bytes in a second."""
READY, PUBLISH = "ready", "publish a step, 2% changed"

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


class Weighed(NamedTuple):
    """The bytes of a step."""

    changed: float
    """The share of the elements."""
    xor_bytes: int
    entropy_bytes: float
    payload_bytes: int


def weigh(before: State, after: State) -> Weighed:
    """Returns what a step weighs, whose delta has to give its bits."""
    elements = changed = payload_bytes = 0
    entropy, xors = 0.0, list[bytes]()
    for name, old in before.items():
        new, out = after[name], old.clone().view(-1)
        advanced = formats.advance(old.clone(), new, new.nbytes // 2)
        if advanced is None:
            payload_bytes += new.nbytes
        else:
            payload = advanced.payload(new.numel())
            changed += advanced.changed
            formats.apply(payload, out, 0)
            assert torch.equal(out.view(torch.int16), new.view(torch.int16).view(-1))
            payload_bytes += payload.nbytes
        elements += new.numel()
        entropy += entropy_bytes(old, new)
        xors.append((old.view(torch.int16) ^ new.view(torch.int16)).numpy().tobytes())
    return Weighed(changed / elements, len(zstd.compress(b"".join(xors), 1)), entropy, payload_bytes)


def fine_tuned(*, rate: float, steps: int) -> None:
    """What the last step of a fine-tune weighs."""
    stages = Stages()
    material = find_material()
    with tempfile.TemporaryDirectory() as folder, ms.Store(folder, delta=ms.Delta(dtype="bfloat16")) as store:
        before, after = State(), State()
        for step, model in enumerate(fine_tune(material, rate, steps)):
            store.save(step, {"model": model})
            before = after
            after = {name: value.detach().bfloat16() for name, value in model.named_parameters()}
        stages.end(READY, **weigh(before, after)._asdict(), written_bytes=store.infos()[-1].written_bytes)


class Weights(nn.Module):
    """Weights in bfloat16. A call of `change` changes some elements of each of them."""

    def __init__(self, mb: int) -> None:
        super().__init__()
        self.generator, self.elements = torch.Generator().manual_seed(0), min(TENSOR_ELEMENTS, mb << 19)
        values = (torch.randn(self.elements, generator=self.generator) * 0.02).bfloat16()
        count = max(round(mb * 1e6 / values.nbytes), 1)
        self.layers = nn.ParameterList([nn.Parameter(values.roll(layer).view(-1, 1024)) for layer in range(count)])

    def change(self, share: float = SHARE) -> None:
        """Changes a share of the elements by some steps in the order of the floats."""
        places = (torch.rand(self.elements, generator=self.generator) < share).nonzero().view(-1)
        steps = torch.randn(len(places), generator=self.generator).mul_(2).clamp(-100, 100).to(torch.int16)
        steps += (steps >= 0).to(torch.int16)
        for layer, parameter in enumerate(self.layers):
            parameter.data.view(torch.int16).view(-1)[(places + 1000 * layer) % self.elements] += steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers[0].view(-1)[0].float()


def publish(*, delta: bool, mb: int, folder: str) -> None:
    """A step of a store, after two others."""
    model = Weights(mb)
    with ms.Store(folder, delta=ms.Delta() if delta else None, keep=1) as store:
        for step in range(2):
            store.save(step, {"model": model})
            model.change()
        os.sync()
        stages = Stages()
        saved = store.save(2, {"model": model})
        stages.end(READY, written_bytes=saved.written_bytes)


def apply(*, delta: bool, mb: int) -> None:
    """The patches of a step, or a copy of the weights, on two threads."""
    model = Weights(mb)
    before = [parameter.detach().clone().view(-1) for parameter in model.layers]
    model.change()
    after = [parameter.detach().view(-1) for parameter in model.layers]
    advanced = [formats.advance(old.clone(), new, new.nbytes) for old, new in zip(before, after, strict=True)]
    payloads = [each.payload(model.elements) for each in advanced if each is not None]

    def read_nothing(*_: object, **__: object) -> None:
        """All is in memory."""

    def patch(tensors: Sequence[torch.Tensor]) -> None:
        targets = [
            (formats.patched(tensor, payloads=[payload], directories=[formats.check(payload, len(tensor), 2)]), tensor)
            for tensor, payload in zip(tensors, payloads, strict=False)
        ]
        compute(targets, read_nothing, read_whole=partial(read_tensor, read_all=read_nothing))

    def copy(layer: int) -> None:
        before[layer].copy_(after[layer])

    patch([tensor.clone() for tensor in before[:THREADS]])  # what the first calls import does not count
    for_each(range(THREADS), [lambda _: after[0].clone()] * THREADS, with_torch=True)
    stages = Stages()
    if delta:
        patch(before)
    else:
        for_each(range(len(before)), [copy] * THREADS, with_torch=True)
    stages.end(READY)
    assert all(map(torch.equal, before, after))


def chained(*, mb: int, share: float, folder: str) -> None:
    """Writes a chain of steps, and the last one as a whole."""
    stages, model = Stages(), Weights(mb)
    with ms.Store(f"{folder}/True", delta=ms.Delta(full_every=CHAIN), keep=1) as store:
        for step in range(CHAIN):
            store.save(step, {"model": model})
            model.change(share if step < CHAIN - 1 else 0)
    with ms.Store(f"{folder}/False") as store:
        store.save(CHAIN - 1, {"model": model})
    stages.end(READY)


def load(*, delta: bool, mb: int, folder: str, cold: bool) -> None:
    """Opens a step, and loads it into a module that has memory."""
    model, path = Weights(mb), Path(folder, str(delta))
    with tempfile.TemporaryDirectory() as tiny:  # what the first load imports does not count
        with ms.Store(tiny, delta=ms.Delta()) as store:
            small = nn.Linear(99, 99)
            for step in range(2):
                store.save(step, {"model": small})
                small.weight.data[0] += 1
        ms.load(small, ms.Store(tiny).open("model"))
    (files.chill if cold else files.warm)([file for file in path.rglob("*") if file.is_file()])
    stages = Stages()
    report = ms.load(model, ms.Store(path).open("model"))
    stages.end(READY, tensors=len(report.steps))


def swap(*, delta: bool, mb: int, folder: str) -> None:
    """A swap of a program that serves to the next step, apart from its staging."""
    model = Weights(mb)
    served = Weights(mb).eval()
    with ms.Store(folder, delta=ms.Delta() if delta else None) as store:
        store.save(0, {"model": model})
        live, found = ms.Live(served), list[tuple[float, float]]()
        stages = Stages()
        for step in range(1, 5):
            model.change()
            store.save(step, {"model": model})
            report = live.swap(store.open("model", step))
            found.append((report.seconds - report.staged_seconds, report.staged_seconds))
        pause, staged = map(median, zip(*found[1:], strict=True))
        stages.end(READY, seconds=pause, staged_seconds=staged)


def child(function: Callable[..., None], **arguments: object) -> dict[str, Stage]:
    """Calls a function in a fresh process."""
    return run(call(function, **arguments), environment={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"})


class Job(NamedTuple):
    """A row of the table of times: a job with a delta, and without."""

    name: str
    beside: str
    run: Callable[..., dict[str, Stage]]
    goal: str


def times(mb: int, runs: int) -> Iterator[Row]:
    """Measures in fresh processes, in turn."""

    def in_folder(function: Callable[..., None], *, delta: bool) -> dict[str, Stage]:
        with temporary_folder() as folder:
            return child(function, delta=delta, mb=mb, folder=str(folder))

    jobs = [
        Job(PUBLISH, "`Store.save` of all", partial(in_folder, publish), "0.67"),
        Job("apply a step, 2% changed", "memcpy", partial(child, apply, mb=mb), "1.0"),
        Job("pause of requests at a swap", "of whole steps", partial(in_folder, swap), "under 1 ms"),
    ]
    with ExitStack() as stack:
        for share in (SHARE, SHARE / 5):
            folder = str(stack.enter_context(temporary_folder()))
            child(chained, mb=mb, share=share, folder=folder)
            for cold, where in ((False, "page cache"), (True, "disk")):
                name = f"load a chain of {CHAIN}, {share:.1%} changed in each, from the {where}"
                load_step = partial(child, load, mb=mb, folder=folder, cold=cold)
                jobs.append(Job(name, "one file", load_step, "1.6"))
        contenders = {f"{job.name}\n{delta}": partial(job.run, delta=delta) for job in jobs for delta in (True, False)}
        results, failed = alternate(contenders, runs, lambda stages: f"{stages[READY].seconds * 1e3:.0f} ms")
        assert not failed, failed
    for job in jobs:
        found = [[stages[READY] for stages in results[f"{job.name}\n{delta}"]] for delta in (True, False)]
        of_delta, of_other = (median(stage.facts.get("seconds", stage.seconds) for stage in each) for each in found)
        texts = [f"{seconds * 1e3:,.{0 if seconds > 0.1 else 2}f} ms" for seconds in (of_delta, of_other)]
        yield job.name, job.beside, *texts, f"{of_delta / of_other:.2f}", job.goal
        if job.name == PUBLISH:
            sent = [each[0].facts["written_bytes"] / BUCKET_SPEED for each in found]
            first, second = of_delta + sent[0], of_other + sent[1]
            name = f"{PUBLISH}, and send it at 100 MB/s (computed)"
            yield name, job.beside, f"{first:.2f} s", f"{second:.2f} s", f"{first / second:.2f}", "0.1"
        elif "cache" in job.name:
            memory = [median(stage.anonymous_bytes for stage in each) / 1e6 for each in found]
            texts = [f"{mb:,.0f} MB" for mb in memory]
            yield f"{job.name}: memory", job.beside, *texts, f"{memory[0] - memory[1]:+,.0f} MB", "+64 MB"


def weights(steps: int) -> Iterator[Row]:
    """Yields the rows of the bytes of the last step of a fine-tune, for each learning rate."""
    for rate in RATES:
        facts = child(fine_tuned, rate=rate, steps=steps)[READY].facts
        written, xor, payload, entropy = (
            facts[key] for key in ("written_bytes", "xor_bytes", "payload_bytes", "entropy_bytes")
        )
        step = f"MiniLM at lr {rate:.0e}, {facts['changed']:.2%} changed"
        yield f"{step}: all bytes", "XOR, zstd -1", f"{written:,}", f"{xor:,}", f"{written / xor:.2f}", "0.6"
        yield f"{step}: payloads", "entropy", f"{payload:,}", f"{entropy:,.0f}", f"{payload / entropy:.2f}", "1.15"


HEAD = ("", "beside", "delta", "beside", "ratio", "goal")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, or writes it."""
    parser = argparse.ArgumentParser(prog="python -m bench.delta", description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="steps of each fine-tune; 0 leaves it out")
    parser.add_argument("--mb", type=int, default=600, help="MB of weights; 0 leaves the times out")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="put the table into bench/results/deltas.md")
    options = parser.parse_args(arguments)

    def rows() -> Iterator[Row]:
        if options.steps:
            yield from weights(options.steps)
        if options.mb:
            yield from times(options.mb, options.runs)

    InPage("bench/results/deltas.md", "delta", "<!-- End of the table -->", HEAD, rows).show(options.write)


if __name__ == "__main__":
    main()
