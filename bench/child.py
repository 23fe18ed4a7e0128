"""One contender in one process: `python -m bench.child KIND ARGUMENTS…`, as JSON in the last argument."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.contenders import CONVERT, MATERIALISED, META, Case
from bench.models import QUICK, Leaves, Sizes, with_memory
from modelstate.cli.measure import Stages


def load(*, target: str, contender: str, case: str, folder: str, quick: bool) -> None:
    """From the file to the module, and to the end of the first forward."""
    prepare = (META if target == "meta" else MATERIALISED)[contender]
    tiny = prepare(Case("tiny", QUICK, Path(folder)))()
    with torch.inference_mode():
        tiny()
    work = prepare(Case(case, QUICK if quick else Sizes(), Path(folder)))
    stages = Stages()
    model = work()
    stages.end("ready")
    with torch.inference_mode():
        model()
    stages.end("forward")
    stages.end("check", weights=_fingerprint(model))


def _fingerprint(model: torch.nn.Module) -> str:
    """Equal for equal bits. Not of the forward's result, which depends on where in memory the weights lie."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        words = value.contiguous().view(torch.int32).to(torch.int64).flatten()
        digest.update(f"{name} {tuple(value.shape)} {int(words.sum())} {int(words[::7].sum())}".encode())
    return digest.hexdigest()


def state_dict(*, contender: str, count: int) -> None:
    """`load_state_dict` from memory into a module with many children."""
    import modelstate as ms

    source, target = Leaves(count).state_dict(), Leaves(count)
    stages = Stages()
    if contender == "modelstate":
        ms.load_state_dict(target, source)
    else:
        target.load_state_dict(source)
    stages.end("ready")


def convert(*, contender: str, case: str, quick: bool) -> None:
    """From a module in float32 to the same in bfloat16."""
    work = CONVERT[contender]
    work(with_memory("tiny", QUICK))
    model = with_memory(case, QUICK if quick else Sizes())
    stages = Stages()
    work(model)
    stages.end("ready")
    stages.end("check", weights=str({value.dtype for value in model.state_dict().values()}))


def opening(*, contender: str, path: str) -> None:
    """From a path to the names and shapes of what is in it."""
    openers: dict[str, Callable[[], object]] = {
        "modelstate.open": _ours(path),
        "torch.load(mmap)": lambda: torch.load(path, mmap=True, weights_only=True),
        "safetensors safe_open + get_slice": _safe_open(path),
    }
    opener = openers[contender]
    stages = Stages()
    kept = opener()
    stages.end("ready", kept=len(str(type(kept))))


def _ours(path: str) -> Callable[[], object]:
    import modelstate as ms

    return lambda: ms.open(path)


def _safe_open(path: str) -> Callable[[], object]:
    from safetensors import safe_open

    def work() -> dict[str, tuple[int, ...]]:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    return work


KINDS: dict[str, Callable[..., Any]] = {"load": load, "state_dict": state_dict, "opening": opening, "convert": convert}

if __name__ == "__main__":
    KINDS[sys.argv[1]](**json.loads(sys.argv[2]))
