"""Counts the functions of modelstate that a call runs, their files, and the switches from file to file.

    python tools/trace_calls.py [--list load]

A switch is a call from a function in one file of the library to a function in another. Comprehensions and lambdas are
parts of their functions. The first run of each case fills caches and imports modules; the second is counted, in the
thread that calls. `--list CASE` prints the functions of one case, each with its number of calls.
"""

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import modelstate as ms

PACKAGE = str(Path(ms.__file__).parent)


class Calls:
    """The calls of the library's own functions within `counted()`, in this thread."""

    def __init__(self) -> None:
        self.functions: Counter[CodeType] = Counter()
        self.switches = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        self.functions[code] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            self.switches += 1

    @property
    def files(self) -> int:
        """The number of files that have one of the functions."""
        return len({code.co_filename for code in self.functions})

    @property
    def total(self) -> int:
        """The number of calls."""
        return sum(self.functions.values())


def linears(count: int, device: str = "cpu") -> nn.Module:
    """A model of `count` linear layers without bias."""
    return nn.Sequential(*[nn.Linear(4, 4, bias=False, device=device) for _ in range(count)])


def load_case(directory: Path, count: int = 1, device: str = "cpu") -> Callable[[], object]:
    """`ms.load` of a safetensors file with `count` tensors."""
    path = directory / f"{count}.safetensors"
    ms.save(linears(count), path)
    return lambda: ms.load(linears(count, device), path)


def save_case(directory: Path) -> Callable[[], object]:
    """`Store.save` of a model of one tensor."""
    store, model, steps = ms.Store(directory / "store"), linears(1), itertools.count()
    return lambda: store.save(next(steps), {"model": model})


def restore_case(directory: Path) -> Callable[[], object]:
    """`Store.restore` of a model of one tensor."""
    store, model = ms.Store(directory / "restored"), linears(1)
    store.save(0, {"model": model})
    return lambda: store.restore({"model": model})


def swap_case(directory: Path) -> Callable[[], object]:
    """`Live.swap` of a model of one tensor."""
    path = directory / "swap.safetensors"
    ms.save(linears(1), path)
    live = ms.Live(linears(1).eval())
    return lambda: live.swap(path)


def traced(run: Callable[[], Any]) -> Calls:
    """The calls of the second run."""
    run()
    calls = Calls()
    with calls.counted():
        run()
    return calls


def main() -> None:
    """Prints the table, or the functions of one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=("load", "save", "restore", "swap"), help="the functions of one case")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cases = {
            "load": load_case(directory),
            "save": save_case(directory),
            "restore": restore_case(directory),
            "swap": swap_case(directory),
        }
        if arguments.list:
            for code, count in sorted(
                traced(cases[arguments.list]).functions.items(), key=lambda item: item[0].co_filename
            ):
                print(f"{count:5} {code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}")
            return
        print(f"{'':28}{'files':>8}{'functions':>11}{'switches':>10}{'calls':>8}")
        titles = {"load": "ms.load", "save": "Store.save", "restore": "Store.restore", "swap": "Live.swap"}
        for case, title in titles.items():
            calls = traced(cases[case])
            print(f"{title:28}{calls.files:8}{len(calls.functions):11}{calls.switches:10}{calls.total:8}")
        for device in ("cpu", "meta"):
            few, many = (traced(load_case(directory, count, device)).total for count in (10, 110))
            what = "materialised" if device == "cpu" else "skeleton"
            print(f"each further tensor, {what:15}{(many - few) / 100:28.1f}")


if __name__ == "__main__":
    main()
