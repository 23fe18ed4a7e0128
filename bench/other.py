"""What is measured beside loads: the machine's limits, `load_state_dict`, opening and converting."""

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import modelstate as ms
from bench import files, live, merging, saving, serving
from bench import limits as names
from bench.contenders import CONVERT
from bench.measure import Stage
from bench.measured import Measured, Runs
from bench.models import QUICK, Sizes, on_meta
from bench.run import Runner
from bench.sections import IMPORT

_BARE = "bare writes"
_LONG_SECONDS = 3600


class Others:
    """The parts that are no lists of ways."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.sizes = QUICK if runner.quick else Sizes()

    def limits(self) -> list[Measured]:
        """What every load is up against, with the file of the decoder."""
        runner = self.runner
        runner.write("large", {"safetensors"})
        path = str(runner.folder / "large" / "model.safetensors")
        found, absent = runner.alternate(
            {
                "memory": runner.child("memory_limits", path=path, quick=runner.quick),
                "disk": runner.child("disk_limits", path=path, quick=runner.quick),
                names.FORWARD: runner.child("forward_alone", quick=runner.quick),
            },
            runner.runs,
        )
        results = {**by_stage(found.get("memory", [])), **by_stage(found.get("disk", []))}
        if names.FORWARD in found:
            results[names.FORWARD] = found[names.FORWARD]
        words = (
            "The file of the decoder in float32, read with nothing else done. What is copied into fresh memory is paid "
            "for in page faults; a huge page is 2 MB. The cold file is read in parts of 8 MB into touched memory."
        )
        return [Measured("limits", "The limits of the machine", words, "limits", {"": results}, runner.runs, absent)]

    def state_dict(self) -> list[Measured]:
        cases: dict[str, Runs] = {}
        for count in self.sizes.children:
            ways = {"modelstate.load_state_dict": "modelstate", "Module.load_state_dict": "torch"}
            if count > self.sizes.most_children_of_torch:
                del ways["Module.load_state_dict"]
            children = {n: self.runner.child("state_dict", contender=way, count=count) for n, way in ways.items()}
            cases[f"{count:,} children"] = self.runner.alternate(children, self.runner.runs)[0]
        words = (
            "A state dict in memory into a module with many children of one small tensor each: torch filters the whole "
            "dict for every child, and is left out where that takes half a minute."
        )
        title = "load_state_dict by the number of modules"
        return [Measured("state-dict", title, words, "grid", cases, self.runner.runs)]

    def convert(self) -> list[Measured]:
        sections = []
        for case in ("large", "small"):
            children = {
                name: self.runner.child("convert", contender=name, case=case, quick=self.runner.quick)
                for name in CONVERT
            }
            found, absent = self.runner.alternate(children, self.runner.runs)
            values = on_meta(case, self.sizes).state_dict().values()
            nbytes = sum(value.nbytes for value in values)
            what = "a decoder" if case == "large" else f"{len(values):,} small tensors"
            words = (
                "A module in memory. The ratios are to torch's own. Own memory is what the process grew by on the way, "
                "at the most; the module itself is half as large afterwards."
            )
            title = f"From float32 to bfloat16: {what}, {nbytes / 1e6:,.0f} MB"
            sections.append(Measured(f"convert/{case}", title, words, "convert", {"": found}, self.runner.runs, absent))
        return sections

    def merge(self) -> list[Measured]:
        """Several checkpoints into one module."""
        runner, folder = self.runner, self.runner.folder / "merged"
        runner.child("write_merged", folder=str(folder), quick=runner.quick)()
        nbytes = sum(value.nbytes for value in on_meta("large", self.sizes).state_dict().values())
        words = (
            "Into a module that has memory, float32, from files in the page cache. `merge.Average` adds the "
            "differences to the first checkpoint, in float32; the loop adds the tensors, in float32."
        )
        sections = []
        for key, ways, title in (
            ("lora", merging.LORA, f"A LoRA adapter of rank {merging.RANK} merged into a decoder"),
            ("average", merging.AVERAGE, "The average of three decoders"),
        ):
            children = {
                name: runner.child("merge", contender=name, folder=str(folder), quick=runner.quick) for name in ways
            }
            found, absent = runner.alternate(children, runner.runs)
            title = f"{title}, {nbytes / 1e6:,.0f} MB each"
            sections.append(Measured(f"merge/{key}", title, words, "convert", {"": found}, runner.runs, absent))
        shutil.rmtree(folder)
        return sections

    def save(self) -> list[Measured]:
        """A module to files, and what a store makes of the next checkpoint."""
        runner, folder = self.runner, self.runner.folder / "saved"
        folder.mkdir(exist_ok=True)
        values = on_meta("large", self.sizes).state_dict().values()
        nbytes = sum(value.nbytes for value in values)
        absent: dict[str, str] = {}
        children = {}
        for name in saving.SAVE:
            package = saving.PACKAGES.get(name.partition(",")[0])
            if package and importlib.util.find_spec(package) is None:
                absent[name] = f"{package} is not installed"
                continue
            children[name] = runner.child("save", contender=name, folder=str(folder), quick=runner.quick)
        children[_BARE] = runner.child("bare_writes", nbytes=nbytes, folder=str(folder))
        found, failed = runner.alternate(children, runner.runs)
        bare = by_stage(found.pop(_BARE, []))
        rows = {**found, **bare}
        words = (
            "A module in memory into a new folder. Those of modelstate are on the disk when they return; of the others "
            "what the name says. A bare write is from touched huge pages into a file that has its size already."
        )
        title = f"Saving a decoder, {nbytes / 1e6:,.0f} MB"
        tables = [Measured("save", title, words, "save", {"": rows}, runner.runs, absent | failed)]
        children = {
            name: runner.child("store", contender=name, folder=str(folder), quick=runner.quick)
            for name in ("blocked", "frozen")
        }
        found, failed = runner.alternate(children, runner.runs)
        rows = {name: runs for kind in found.values() for name, runs in by_stage(kind).items()}
        words = (
            "The same module as the second checkpoint of a store. Of the time until `save(background=True)` returns, "
            "the memory that the state is copied to is there from the first. GB/s are those of what is written."
        )
        title = "The second checkpoint of a store"
        tables.append(Measured("store", title, words, "save", {"": rows}, runner.runs, failed))
        shutil.rmtree(folder)
        return tables

    def save_from_gpu(self) -> Measured:
        """How long training on a GPU waits."""
        runner, folder = self.runner, self.runner.folder / "saved"
        nbytes = sum(value.nbytes for value in on_meta("large", self.sizes).state_dict().values())
        children = {
            name: runner.child("save_from_gpu", contender=name, folder=str(folder), quick=runner.quick)
            for name in saving.FROM_GPU
        }
        found, failed = runner.alternate(children, runner.runs)
        rows = {name: runs for kind in found.values() for name, runs in by_stage(kind).items()}
        words = (
            "Until the state has been copied to memory of the host, and training may go on. The first save of a "
            "process allocates that memory."
        )
        title = f"Saving a decoder from a GPU in the background, {nbytes / 1e6:,.0f} MB"
        return Measured("gpu/save", title, words, "save", {"": rows}, runner.runs, failed)

    def opening(self) -> list[Measured]:
        paths: dict[str, Path] = {}
        self.runner.write("small", {"pt", "safetensors"})
        many = f"{4 * self.sizes.small_blocks:,} tensors"
        paths[f"{many}, torch"] = self.runner.folder / "small.pt"
        paths[f"{many}, safetensors"] = self.runner.folder / "small" / "model.safetensors"
        for nbytes in self.sizes.open_bytes:
            files.write_sparse(nbytes, self.runner.folder)
            for suffix, name in (("pt", "torch"), ("safetensors", "safetensors")):
                paths[f"{nbytes / 1e9:g} GB, {name}"] = self.runner.folder / f"sparse-{nbytes}.{suffix}"
        cases: dict[str, Runs] = {}
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for case, path in paths.items():
            ways = ["modelstate.open", "modelstate.open + every shape"]
            if path.stat().st_size < memory:  # the others map it as memory that may be written, which must exist
                ways.append(
                    "safetensors safe_open + get_slice" if path.suffix == ".safetensors" else "torch.load(mmap)"
                )
            children = {name: self.runner.child("opening", contender=name, path=str(path)) for name in ways}
            cases[case] = self.runner.alternate(children, self.runner.runs)[0]
        words = (
            "From the path to the names and shapes of everything in it; `every shape` also asks for each of them. The "
            "files of 1 and 100 GB have 100 tensors and "
            "are sparse. `torch.load(mmap=True)` and `safe_open` cannot map a file larger than memory."
        )
        return [Measured("opening", "Opening", words, "grid", cases, self.runner.runs), self._start()]

    def _start(self) -> Measured:
        """Commands about small checkpoints, beside an interpreter that imports torch and does nothing else."""
        folder = self.runner.folder / "start"
        folder.mkdir(exist_ok=True)
        model = torch.nn.Linear(4, 4)
        ms.save(model, folder / "model.safetensors")
        torch.save(model.state_dict(), folder / "model.pt")
        ms.Store(folder / "store").save(1, {"model": model})
        commands = {
            "--help": ["-m", "modelstate", "--help"],
            "inspect, safetensors": ["-m", "modelstate", "inspect", f"{folder}/model.safetensors"],
            "verify, safetensors": ["-m", "modelstate", "verify", f"{folder}/model.safetensors"],
            "store ls": ["-m", "modelstate", "store", "ls", f"{folder}/store"],
            "inspect, torch": ["-m", "modelstate", "inspect", f"{folder}/model.pt"],
        }
        others = {"python -c pass": ["-c", "pass"], "import torch": ["-c", "import torch"]}
        programs = {f"modelstate {name}": command for name, command in commands.items()} | others
        children = {name: self.runner.child("start", arguments=command) for name, command in programs.items()}
        children[IMPORT] = self.runner.child("importing")
        found, absent = self.runner.alternate(children, self.runner.runs)
        found |= by_stage(found.pop(IMPORT, []))
        shutil.rmtree(folder)
        words = "Programs from their start to their end, in a new process each. The checkpoints are a few kilobytes."
        return Measured(
            "start",
            "Start of the command line",
            words,
            "grid",
            {"of a small checkpoint": found},
            self.runner.runs,
            absent,
        )

    def diff(self) -> list[Measured]:
        """Two checkpoints, compared."""
        runner, folder = self.runner, self.runner.folder
        runner.write("large", {"safetensors", "pt"})
        a, b = str(folder / "large" / "model.safetensors"), str(folder / "perturbed")
        runner.child("perturbed_copy", source=a, target=b)()
        pair: dict[str, Any] = {"a": a, "b": f"{b}.safetensors"}
        pickled: dict[str, Any] = {"a": str(folder / "large.pt"), "b": f"{b}.pt"}
        children = {
            "modelstate.diff": runner.child("diff", contender="modelstate.diff", **pair),
            "reading both files once": runner.child("diff", contender="reading both files once", **pair),
            **{
                name: runner.child("diff", contender=name, **pickled)
                for name in ("two torch.load + a loop", "two torch.load(mmap) + a loop")
            },
        }
        found, absent = runner.alternate(children, runner.runs)
        nbytes = sum(value.nbytes for value in on_meta("large", self.sizes).state_dict().values())
        words = (
            "Every value differs. The loops measure what modelstate.diff measures, without the histogram of ULPs; the "
            "files of torch.load have the same tensors. The files are in the page cache."
        )
        title = f"Comparing two checkpoints of {nbytes / 1e6:,.0f} MB"
        return [Measured("diff", title, words, "convert", {"": found}, runner.runs, absent)]

    def serving(self) -> list[Measured]:
        """Requests to a server, while its weights are swapped and while they are not."""
        sizes, folder = self.sizes, self.runner.folder / "serving"
        folder.mkdir(exist_ok=True)
        child = self.runner.child("serve", folder=str(folder), requests=sizes.requests, swaps=sizes.swaps)
        missing = [package for package in serving.PACKAGES if importlib.util.find_spec(package) is None]
        absent = {"the server": f"{', '.join(missing)} not installed"} if missing else {}
        children = {} if absent else {"the server": partial(child, timeout_seconds=_LONG_SECONDS)}
        found, failed = self.runner.alternate(children, 1)
        rows = by_stage(found.get("the server", []))
        title = "Requests to a server that takes new weights"
        words = (
            "A sentence encoder (all-MiniLM-L6-v2, 90 MB) behind HTTP, as in [Serving over HTTP](serving.md): two "
            "clients run in another process on the same processors, and each sends its next request when it has its "
            "answer; requests "
            "without swaps and with them in turn, between two sets of weights. Every answer is compared with what the "
            f"module itself computes with the weights of the version that it names.{_swap_words(rows)}"
        )
        shutil.rmtree(folder)
        return [Measured("serving", title, words, "serving", {"": rows}, 1, absent | failed)]

    def live(self) -> list[Measured]:
        """What is torn, what a swap costs, and what a request does."""
        seconds = self.sizes.torture_seconds
        return [self._torn(seconds), self._swaps(*self.sizes.matrices), *self._requests()]

    def _torn(self, seconds: float) -> Measured:
        ways = {name: self.runner.child("live_torture", contender=name, seconds=seconds) for name in live.WAYS}
        found, failed = self.runner.alternate(ways, 1)
        words = (
            f"{live.READERS} threads send requests, and new weights come in every {live.PERIOD_SECONDS * 1e3:.0f} "
            f"ms, for {seconds:g} s. All weights of version k are k, and so is every element of a right answer: a torn "
            "one has elements of several versions. A program of modelstate also says which version has answered: that "
            "must be the one, and no reader may get an older one than before."
        )
        return Measured("live/torn", "Requests while weights are swapped", words, "torture", {"": found}, 1, failed)

    def _swaps(self, count: int, width: int) -> Measured:
        children = {kind: self.runner.child("live_swap", target=kind, count=count, width=width) for kind in live.KINDS}
        found, failed = self.runner.alternate(children, self.runner.runs)
        rows: dict[str, list[dict[str, Stage]]] = {}
        for runs in found.values():
            for name, results in by_stage(runs).items():  # that of the copy is in all of them
                rows.setdefault(name, []).extend(results)
        words = (
            f"{count} matrices of {width} x {width}, {4 * count * width**2 / 1e6:,.0f} MB, from a state dict in memory "
            "and from a file in the page cache. Staging reads and checks the weights while the old version serves; "
            "from the fourth swap on it reads into memory of dropped versions. The rest is the time until the new "
            "version serves and the requests of the old version have ended; this table has no requests. The copy "
            "writes to existing memory."
        )
        return Measured("live/swap", "New weights into a program", words, "swap", {"": rows}, self.runner.runs, failed)

    def _requests(self) -> list[Measured]:
        found, failed = self.runner.alternate(
            {k: self.runner.child("live_request", target=k) for k in live.KINDS}, self.runner.runs
        )
        words = "A model of four matrices of 8 x 8, on one thread. The difference is to the first row."
        return [
            Measured(
                f"live/request/{kind}",
                f"A request to a program, {kind}",
                words,
                "request",
                {"": by_stage(found.get(kind, []))},
                self.runner.runs,
                {kind: failed[kind]} if kind in failed else {},
            )
            for kind in live.KINDS
        ]


def _swap_words(rows: Mapping[str, Sequence[Mapping[str, Stage]]]) -> str:
    taken = [run["ready"].facts["swap_seconds"] for runs in rows.values() for run in runs]
    return f" A swap takes {max(taken) * 1000:,.0f} ms, at the median." if any(taken) else ""


def by_stage(runs: Sequence[Mapping[str, Stage]]) -> dict[str, list[dict[str, Stage]]]:
    """Each stage of each run as a row with its own time."""
    found: dict[str, list[dict[str, Stage]]] = {}
    for run in runs:
        for name, stage in run.items():
            found.setdefault(name, []).append({"ready": _own_time(stage)})
    return found


def _own_time(stage: Stage) -> Stage:
    """The stage's own time, not that of everything before it."""
    return Stage(stage.facts["seconds"], stage.anonymous_bytes, stage.total_bytes, stage.facts)
