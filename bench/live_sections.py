"""The part about programs that serve: what is torn, what a swap costs, and what a request does."""

from bench import torture
from bench.measure import Stage
from bench.measured import Measured
from bench.other import by_stage
from bench.run import Runner
from bench.sizes import Sizes


def measure(runner: Runner, sizes: Sizes) -> list[Measured]:
    return [_torn(runner, sizes.torture_seconds), _swaps(runner, *sizes.matrices), *_requests(runner)]


def _torn(runner: Runner, seconds: float) -> Measured:
    ways = {name: runner.child("live_torture", contender=name, seconds=seconds) for name in torture.WAYS}
    found, failed = runner.alternate(ways, 1)
    words = (
        f"{torture.READERS} threads send requests, and new weights come in every {torture.PERIOD_SECONDS * 1e3:.0f} "
        f"ms, for {seconds:g} s. All weights of version k are k, and so is every element of a right answer: a torn one "
        "has elements of several versions. A program of modelstate also says which version has answered: that must be "
        "the one, and no reader may get an older one than before."
    )
    return Measured("live/torn", "Requests while weights are swapped", words, "torture", {"": found}, 1, failed)


def _swaps(runner: Runner, count: int, width: int) -> Measured:
    children = {kind: runner.child("live_swap", target=kind, count=count, width=width) for kind in torture.KINDS}
    found, failed = runner.alternate(children, runner.runs)
    rows: dict[str, list[dict[str, Stage]]] = {}
    for runs in found.values():
        for name, results in by_stage(runs).items():  # that of the copy is in all of them
            rows.setdefault(name, []).extend(results)
    words = (
        f"{count} matrices of {width} x {width}, {4 * count * width**2 / 1e6:,.0f} MB, from a state dict in memory, "
        "and from a file in the page cache. Staging reads and checks the weights while the old version serves; from "
        "the fourth swap on it reads into memory of dropped versions. The rest is the time until the new version "
        "serves and the requests of the old version have ended; this table has no requests. The copy writes to "
        "existing memory."
    )
    return Measured("live/swap", "New weights into a program", words, "swap", {"": rows}, runner.runs, failed)


def _requests(runner: Runner) -> list[Measured]:
    found, failed = runner.alternate({k: runner.child("live_request", target=k) for k in torture.KINDS}, runner.runs)
    words = "A model of four matrices of 8 x 8, on one thread. The difference is to the first row."
    return [
        Measured(
            f"live/request/{kind}",
            f"A request to a program, {kind}",
            words,
            "request",
            {"": by_stage(found.get(kind, []))},
            runner.runs,
            {kind: failed[kind]} if kind in failed else {},
        )
        for kind in torture.KINDS
    ]
