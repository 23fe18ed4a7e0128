"""What is measured beside loads, by part: the limits of the machine, saving, opening, converting, serving."""

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

import modelstate as ms
from bench import child, files, limits, live, merging, saving, serving
from bench.contenders import CONVERT
from bench.measure import Stage
from bench.measured import Measured, Runs
from bench.models import on_meta, sizes_of
from bench.run import Child, Runner
from bench.sections import IMPORT

_BARE = "bare writes"
_LONG_SECONDS = 3600


class Others:
    """Measures each part that `bench.sections` does not list."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.sizes = sizes_of(runner.quick)

    def limits(self) -> list[Measured]:
        """What every load is up against, with the file of the decoder."""
        runner = self.runner
        runner.write("large", {"safetensors"})
        path = str(runner.folder / "large" / "model.safetensors")
        found, absent = runner.alternate(
            {
                "memory": runner.child(limits.memory, path=path),
                "disk": runner.child(limits.disk, path=path),
                limits.FORWARD: runner.child(limits.forward, quick=runner.quick),
            }
        )
        rows = {**by_stage(found.get("memory", [])), **by_stage(found.get("disk", []))}
        rows |= {limits.FORWARD: found[limits.FORWARD]} if limits.FORWARD in found else {}
        words = (
            "The file of the decoder in float32, read with nothing else done. What is copied into fresh memory is paid "
            "for in page faults; a huge page is 2 MB. The cold file is read in parts of 8 MB into touched memory."
        )
        return [Measured("limits", "The limits of the machine", words, "limits", {"": rows}, runner.runs, absent)]

    def state_dict(self) -> list[Measured]:
        """By the number of modules."""
        cases: dict[str, dict[str, Child]] = {}
        for count in self.sizes.children:
            ways = ["modelstate.load_state_dict", "Module.load_state_dict"]
            if count > self.sizes.most_children_of_torch:
                ways.pop()
            cases[f"{count:,} children"] = {
                name: self.runner.child(child.state_dict, contender=name, count=count) for name in ways
            }
        found, failed = self._grid(cases)
        words = (
            "A state dict in memory into a module with many children of one small tensor each: torch filters the whole "
            "dict for every child, and is left out where that takes half a minute."
        )
        title = "load_state_dict by the number of modules"
        return [Measured("state-dict", title, words, "grid", found, self.runner.runs, failed)]

    def _grid(self, cases: Mapping[str, Mapping[str, Child]]) -> tuple[dict[str, Runs], dict[str, str]]:
        """The contenders of each case in alternation, and those that failed, with their case."""
        found: dict[str, Runs] = {}
        failed: dict[str, str] = {}
        for case, children in cases.items():
            found[case], reasons = self.runner.alternate(children)
            failed |= {f"{name}, {case}": reason for name, reason in reasons.items()}
        return found, failed

    def convert(self) -> list[Measured]:
        sections = []
        for case in ("large", "small"):
            children = {
                name: self.runner.child(child.convert, contender=name, case=case, quick=self.runner.quick)
                for name in CONVERT
            }
            found, absent = self.runner.alternate(children)
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
        runner.child(merging.write_all, folder=str(folder), quick=runner.quick)()
        nbytes = sum(value.nbytes for value in on_meta("large", self.sizes).state_dict().values())
        into = "Into a module that has memory, float32, from files in the page cache."
        average = " `merge.Average` adds the differences to the first checkpoint; the loop adds the tensors."
        sections = []
        for key, ways, title, words in (
            ("lora", merging.LORA, f"A LoRA adapter of rank {merging.RANK} merged into a decoder", into),
            ("average", merging.AVERAGE, "The average of three decoders", into + average),
        ):
            children = {
                name: runner.child(merging.measure, contender=name, folder=str(folder), quick=runner.quick)
                for name in ways
            }
            found, absent = runner.alternate(children)
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
            children[name] = runner.child(saving.measure, contender=name, folder=str(folder), quick=runner.quick)
        children[_BARE] = runner.child(saving.bare_writes, nbytes=nbytes, folder=str(folder))
        found, failed = runner.alternate(children)
        bare = by_stage(found.pop(_BARE, []))
        rows = {**found, **bare}
        words = (
            "A module in memory into a new folder. Those of modelstate are on the disk when they return; of the others "
            "what the name says. A bare write is from touched huge pages into a file that has its size already."
        )
        title = f"Saving a decoder, {nbytes / 1e6:,.0f} MB"
        tables = [Measured("save", title, words, "save", {"": rows}, runner.runs, absent | failed)]
        children = {
            work.__name__: runner.child(work, folder=str(folder), quick=runner.quick)
            for work in (saving.blocked, saving.frozen)
        }
        found, failed = runner.alternate(children)
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
            name: runner.child(saving.from_gpu, contender=name, folder=str(folder), quick=runner.quick)
            for name in saving.FROM_GPU
        }
        found, failed = runner.alternate(children)
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
        cases: dict[str, dict[str, Child]] = {}
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for case, path in paths.items():
            ways = ["modelstate.open", "modelstate.open + every shape"]
            if path.stat().st_size < memory:  # the others map it as memory that may be written, which must exist
                ways.append(
                    "safetensors safe_open + get_slice" if path.suffix == ".safetensors" else "torch.load(mmap)"
                )
            cases[case] = {name: self.runner.child(child.opening, contender=name, path=str(path)) for name in ways}
        found, failed = self._grid(cases)
        sparse = " and ".join(f"{nbytes / 1e9:g}" for nbytes in self.sizes.open_bytes)
        words = (
            "From the path to the names and shapes of everything in it; `every shape` also asks for each of them. "
            f"Before the clock starts, the contender has opened a tiny file. The files of {sparse} GB have 100 tensors "
            "and are sparse. `torch.load(mmap=True)` and `safe_open` cannot map a file larger than memory."
        )
        return [Measured("opening", "Opening", words, "grid", found, self.runner.runs, failed), self._start()]

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
        children = {name: self.runner.child(child.start, arguments=command) for name, command in programs.items()}
        children[IMPORT] = self.runner.child(child.importing)
        found, absent = self.runner.alternate(children)
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
        runner.child(child.perturbed_copy, source=a, target=b)()
        pairs = {".safetensors": (a, f"{b}.safetensors"), ".pt": (str(folder / "large.pt"), f"{b}.pt")}
        children = {}
        for name in child.DIFFS:
            one, other = pairs[".pt" if "torch.load" in name else ".safetensors"]
            children[name] = runner.child(child.diff, contender=name, a=one, b=other)
        found, absent = runner.alternate(children)
        for path in folder.glob("perturbed.*"):
            path.unlink()
        nbytes = sum(value.nbytes for value in on_meta("large", self.sizes).state_dict().values())
        words = (
            "Every value differs. The loops measure what modelstate.diff measures; the files of torch.load have the "
            "same tensors. Before the clock starts, the contender has compared two tiny files. `reading "
            "both files once` compares nothing: it is the time that the reads alone take."
        )
        title = f"Comparing two checkpoints of {nbytes / 1e6:,.0f} MB"
        return [Measured("diff", title, words, "convert", {"": found}, runner.runs, absent)]

    def serving(self) -> list[Measured]:
        """Requests to a server, while its weights are swapped and while they are not."""
        sizes, folder = self.sizes, self.runner.folder / "serving"
        folder.mkdir(exist_ok=True)
        serve = self.runner.child(serving.measure, folder=str(folder), requests=sizes.requests, swaps=sizes.swaps)
        missing = [package for package in serving.PACKAGES if importlib.util.find_spec(package) is None]
        absent = {"the server": f"{', '.join(missing)} not installed"} if missing else {}
        children = {} if absent else {"the server": partial(serve, timeout_seconds=_LONG_SECONDS)}
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
        ways = {name: self.runner.child(live.measure_torn, contender=name, seconds=seconds) for name in live.WAYS}
        found, failed = self.runner.alternate(ways, 1)
        words = (
            f"{live.READERS} threads send requests for {seconds:g} s, and the weights are swapped every "
            f"{live.PERIOD_SECONDS * 1e3:.0f} ms. All weights of version k are k, and so is every element of a correct "
            "answer; a torn answer has elements of several versions. A program of modelstate also names the version "
            "that has answered: the answer must be of that version, and no thread may get an older version than before."
        )
        return Measured("live/torn", "Requests while weights are swapped", words, "torture", {"": found}, 1, failed)

    def _swaps(self, count: int, width: int) -> Measured:
        children = {
            kind: self.runner.child(live.measure_swaps, kind=kind, count=count, width=width) for kind in live.KINDS
        }
        found, failed = self.runner.alternate(children)
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
        children = {kind: self.runner.child(live.measure_requests, kind=kind) for kind in live.KINDS}
        found, failed = self.runner.alternate(children)
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
