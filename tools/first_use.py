"""Measures the first use of the library in a program: from "torch is imported" to the first result.

    python tools/first_use.py [--runs 7] [CALL ...]

Each run is a fresh process with bytecode on the disk; the calls alternate. `help` is the whole process of
`modelstate --help`, beside `python -c pass`. Below the times stand the ten modules whose own code takes longest to
import in one more run of each call (`python -X importtime`).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

PREPARE = """
import torch
from safetensors.torch import save_file
save_file({"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}, "model.safetensors")
"""
CALLS = {
    "load": 'ms.load(model, "model.safetensors")',
    "open": 'ms.open("model.safetensors")["weight"].shape',
    "save": 'ms.save(model, "saved.safetensors")',
    "skeleton": "with ms.skeleton(): torch.nn.Linear(4, 4)",
    "store": 'ms.Store("store").save(next(steps), {"model": model})',
}
PROGRAM = """
import itertools, time
import torch
steps = itertools.count(int(time.time()))
model = torch.nn.Linear(4, 4)
began = time.perf_counter(), time.process_time()
import modelstate as ms
{call}
print(time.perf_counter() - began[0], time.process_time() - began[1])
"""
HELP = ("-m", "modelstate", "--help")


def command(call: str) -> list[str]:
    """Returns the command of a call, or of `help`."""
    return [sys.executable, *(HELP if call == "help" else ("-c", PROGRAM.format(call=CALLS[call])))]


def seconds(call: str, folder: str) -> tuple[float, float]:
    """Returns the elapsed time and the processor time of one run."""
    began, before = time.perf_counter(), os.times()
    done = subprocess.run(command(call), cwd=folder, check=True, capture_output=True, text=True)
    if call != "help":
        elapsed, processor = map(float, done.stdout.split())
        return elapsed, processor
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, used


def modules(call: str, folder: str) -> list[tuple[float, str]]:
    """Returns the milliseconds of each module that the call imports, the most expensive first, without its imports."""
    command_line = command(call)
    done = subprocess.run(
        [command_line[0], "-X", "importtime", *command_line[1:]], cwd=folder, check=True, capture_output=True, text=True
    )
    rows = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines() if "|" in line]
    names = [row[2].strip() for row in rows]
    first = names.index("torch") + 1 if "torch" in names else 1
    return sorted(((int(row[0]) / 1000, row[2].strip()) for row in rows[first:]), reverse=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table of the times, and the modules of each call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("calls", nargs="*", choices=[*CALLS, "help", []])
    options = parser.parse_args(arguments)
    calls = options.calls or [*CALLS, "help"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", PREPARE], cwd=folder, check=True)
        for call in calls:
            seconds(call, folder)  # writes bytecode
        times = [[seconds(call, folder) for call in calls] for _ in range(options.runs)]
        print(f"{'':8} {'ms':>8} {'least':>8} {'most':>8} {'processor ms':>13} {'modules':>8}")
        for call, runs in zip(calls, zip(*times, strict=True), strict=True):
            elapsed, processor = ([run[index] * 1000 for run in runs] for index in range(2))
            found = modules(call, folder)
            figures = statistics.median(elapsed), min(elapsed), max(elapsed)
            print(f"{call:8}" + "".join(f" {ms:8.1f}" for ms in figures), end="")
            print(f" {statistics.median(processor):13.1f} {len(found):8}")
            print("".join(f"{'':8} {ms:8.1f} {name}\n" for ms, name in found[:10]))


if __name__ == "__main__":
    main()
