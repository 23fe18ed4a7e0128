"""What modelstate sets out to reach, and what a run has found of it. All are ratios within one run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bench import limits, live, saving
from bench.measure import Stage
from bench.measured import Measured
from bench.reasons import LIMITS
from bench.sections import IMPORT, WITHOUT_TORCH
from modelstate.text_format import size

Found = Mapping[str, Measured]
"""Everything that was measured, by its key."""

_WHOLE_SHARE, _NO_SHARE = 0.8, 0.2
"""Of a checkpoint's bytes in a contender's own memory: above the one it has copied them, below the other it maps."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A row of the table."""

    job: str
    goal: str
    reached: str = ""
    by: str = ""
    met: bool | None = None
    """None where it was not measured."""
    limit: str = ""

    @property
    def verdict(self) -> str:
        return "not measured" if self.met is None else "met" if self.met else "not met"


@dataclass(frozen=True, slots=True)
class Reached:
    """What was found for a row: each condition with its words."""

    conditions: Sequence[tuple[bool, str]]
    by: str


class NotMeasuredError(Exception):
    """A row's tables, or its contenders, are not there."""


def _seconds(found: Found, key: str, row: str, stage: str = "ready", case: str | None = None) -> float:
    stage_found = found[key].at(row, stage, case) if key in found else None
    if stage_found is None:
        raise NotMeasuredError(f"{key}: {row}")
    return stage_found.seconds


def _is_ours(row: str) -> bool:
    return row.startswith("modelstate")


def _best(
    found: Found,
    key: str,
    stage: str = "ready",
    which: Callable[[str], bool] = lambda _: True,
    case: str | None = None,
) -> str:
    """The fastest of the other contenders."""
    if key not in found:
        raise NotMeasuredError(key)
    measured = found[key].rows if case is None else found[key].cases.get(case, ())
    rows = [row for row in measured if not _is_ours(row) and which(row)]
    if not rows:
        raise NotMeasuredError(f"{key}: no other contender")
    return min(rows, key=lambda row: _seconds(found, key, row, stage, case))


def _share(found: Found, key: str, row: str) -> float:
    """How much of the model's bytes the contender has in memory of its own when it is ready."""
    measured = found[key]
    ready, check = measured.at(row), measured.at(row, "check")
    assert ready is not None
    assert check is not None
    return float(ready.anonymous_bytes / check.facts["nbytes"])


def _against(found: Found, key: str, ours: str, peer: str, stage: str = "ready") -> tuple[float, str]:
    mine, theirs = _seconds(found, key, ours, stage), _seconds(found, key, peer, stage)
    return theirs / mine, f"{ours} {_ms(mine)}, {peer} {_ms(theirs)}"


def _ranges(found: Found, key: str, rows: Iterable[str], stage: str) -> str:
    """The fastest and the slowest run of each of the rows, in words."""
    of = {row: [stages[stage].seconds for stages in next(iter(found[key].cases.values()))[row]] for row in rows}
    return " against ".join(f"{_ms(min(seconds))} to {_ms(max(seconds))}" for seconds in of.values())


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds * 1000:,.0f} ms"


def _atleast(ratio: float, goal: float, of: str) -> tuple[bool, str]:
    return ratio >= goal, f"{ratio:.2f}x as fast as {of}"


def mapped(found: Found) -> Reached:
    return _fastest(found, "ready")


def _fastest(found: Found, stage: str) -> Reached:
    """Of all: in each table of loads that map, of which the first has to be there."""
    conditions, words = list[tuple[bool, str]](), list[str]()
    for key, (ours, what) in MAPPED.items():
        if key in found or not words:
            peer = _best(found, key, stage)
            ratio, by = _against(found, key, ours, peer, stage)
            conditions.append(_atleast(ratio, 1, f"the best peer{what}"))
            words.append(f"{by} (runs of {_ranges(found, key, (ours, peer), stage)})")
    return Reached(conditions, "; ".join(words))


def first_forward(found: Found) -> Reached:
    fastest = _fastest(found, "forward")
    reading = min(_seconds(found, "limits", row) for row in _limit_rows(found, limits.TOUCHED))
    bound = reading + _seconds(found, "limits", limits.FORWARD)
    over = _seconds(found, "large/meta", OURS, "forward") / bound
    return Reached(
        [*fastest.conditions, (over <= 1.15, f"{over:.2f}x the time of the limit")],
        f"{fastest.by}; the limit: reading {_ms(reading)} and the forward, {_ms(bound)} together",
    )


def _limit_rows(found: Found, *patterns: str) -> list[str]:
    if "limits" not in found:
        raise NotMeasuredError("limits")
    starts = tuple(pattern.partition("{")[0] for pattern in patterns)
    rows = [row for row in found["limits"].rows if row.startswith(starts)]
    if not rows:
        raise NotMeasuredError(f"limits: {patterns}")
    return rows


def own_memory(found: Found) -> Reached:
    ours = f"{OURS}, map=False"
    peer = _best(found, "large/meta", which=lambda row: _share(found, "large/meta", row) > _WHOLE_SHARE)
    ratio, by = _against(found, "large/meta", ours, peer)
    return Reached([_atleast(ratio, 2.5, "the best peer")], by)


def _keeps_references(found: Found, key: str, row: str) -> bool:
    check = found[key].at(row, "check")
    assert check is not None
    return bool(check.facts["references_kept"])


def in_place(found: Found) -> Reached:
    """Beside those that do the same: who puts other parameters into the module has not loaded what is optimized."""
    key, ours, stock = "large/memory", f"{OURS}, in_place=True", "torch.load + load_state_dict"
    peer = _best(found, key, which=lambda row: _keeps_references(found, key, row))
    ratio, by = _against(found, key, ours, peer)
    to_stock, _ = _against(found, key, ours, stock)
    ready = found[key].at(ours)
    assert ready is not None
    extra = ready.total_bytes
    return Reached(
        [
            _atleast(ratio, 1.5, "the best peer that keeps references"),
            _atleast(to_stock, 8, "`torch.load` + `load_state_dict`"),
            (extra <= 64e6, f"{size(extra)} extra"),
        ],
        f"{by}; {stock} {_ms(_seconds(found, key, stock))}",
    )


def default(found: Found) -> Reached:
    """Without options, beside the peers that keep references and read the same kind of file.

    Extra memory is memory of the load's own: pages of a map that it copies from are the page cache's.
    """
    conditions, words, most = list[tuple[bool, str]](), list[str](), 0
    for key, what in DEFAULT.items():
        for ours, kind in ((OURS, "safetensors"), (f"{OURS}, torch file", "torch")):
            peer = _best(found, key, which=partial(_reads_into, found, key, kind))
            ratio, by = _against(found, key, ours, peer)
            conditions.append(_atleast(ratio, 1, f"the best peer with {what}, {kind}"))
            words.append(by)
            most = max(most, _ready(found, key, ours).anonymous_bytes)
    return Reached([*conditions, (most <= 64e6, f"{size(most)} extra")], "; ".join(words))


def _reads_into(found: Found, key: str, kind: str, row: str) -> bool:
    """Whether a contender reads such a file into the parameters that are there."""
    return row.startswith("torch.load") == (kind == "torch") and _keeps_references(found, key, row)


def _ready(found: Found, key: str, row: str) -> Stage:
    stage = found[key].at(row)
    if stage is None:
        raise NotMeasuredError(f"{key}: {row}")
    return stage


def _against_best(
    found: Found, key: str, ours: str, goal: float, *, peers: Callable[[str], bool] | None = None
) -> Reached:
    """Our row of a table beside the best other one."""
    ratio, by = _against(found, key, ours, _best(found, key, which=peers or (lambda _: True)))
    return Reached([_atleast(ratio, goal, "the best peer")], by)


def cold_memory(found: Found) -> Reached:
    return _against_best(found, "cold/memory", OURS, 1.3)


def cast_memory(found: Found) -> Reached:
    return _against_best(found, "cast/memory", f"{OURS}, dtype=bfloat16", 1)


def small_memory(found: Found) -> Reached:
    key = "small/memory"
    return _against_best(found, key, OURS, 1.2, peers=lambda row: _keeps_references(found, key, row))


def keeping(found: Found) -> Reached:
    key, ours, stock = "convert/large", "module.to, modelstate.reference_keeping", "module.to"
    ratio, by = _against(found, key, ours, stock)
    more = max(_ready(found, key, ours).anonymous_bytes - _ready(found, key, stock).anonymous_bytes, 0)
    return Reached([_atleast(ratio, 0.95, "stock"), (more <= 64e6, f"{size(more)} more than stock")], by)


def merging(found: Found) -> Reached:
    conditions, words = list[tuple[bool, str]](), list[str]()
    for key, ours in (
        ("merge/average", "modelstate.load, merge.Average"),
        ("merge/lora", "modelstate.load, merge.LoRA"),
    ):
        loop = _best(found, key, which=lambda row: row.startswith("load_file"))
        ratio, by = _against(found, key, ours, loop)
        conditions.append(_atleast(ratio, 1.5, "the loop"))
        words.append(by)
    return Reached(conditions, "; ".join(words))


def opening(found: Found) -> Reached:
    cases = (
        [case for case in found["opening"].cases if case.endswith("tensors, safetensors")] if "opening" in found else []
    )
    if not cases:
        raise NotMeasuredError("opening: small tensors")
    ours, peer = "modelstate.open + every shape", _best(found, "opening", case=cases[0])
    mine, theirs = (_seconds(found, "opening", row, case=cases[0]) for row in (ours, peer))
    return Reached([_atleast(theirs / mine, 1, peer)], f"{ours} {_ms(mine)}, {peer} {_ms(theirs)}")


def start(found: Found) -> Reached:
    most_seconds = {IMPORT: 0.06, **{f"modelstate {name}": 0.3 for name in WITHOUT_TORCH}}
    seconds = {row: _seconds(found, "start", row) for row in (*most_seconds, "import torch", "python -c pass")}
    return Reached(
        [(seconds[row] <= most, f"{row} {_ms(seconds[row])}") for row, most in most_seconds.items()],
        "; ".join(f"{row} {_ms(seconds[row])}" for row in seconds if row not in most_seconds),
    )


def staging(found: Found) -> Reached:
    """From memory of versions that have been dropped."""
    copy = _seconds(found, "live/swap", live.MEMCPY)
    conditions = []
    for words, row in (("a state dict", live.STAGED), ("a file", live.STAGED_FILE)):
        for kind in live.KINDS:
            over = _seconds(found, "live/swap", row.format(kind)) / copy
            conditions.append((over <= 2, f"{kind} from {words} {over:.1f}x the time"))
    return Reached(conditions, f"{live.MEMCPY} {_ms(copy)}")


def cold(found: Found) -> Reached:
    """With the options that are best here: which of them a user needs, the row says."""
    peer = _best(found, "cold", "forward")
    ours = min(filter(_is_ours, found["cold"].rows), key=lambda row: _seconds(found, "cold", row, "forward"))
    ratio, by = _against(found, "cold", ours, peer, "forward")
    maps = _best(found, "cold", "forward", lambda row: _share(found, "cold", row) < _NO_SHARE)
    to_mapped, _ = _against(found, "cold", ours, maps, "forward")
    limit = min(_limit_rows(found, limits.BUFFERED, limits.DIRECT), key=lambda row: _seconds(found, "limits", row))
    at_best, forward = (_seconds(found, "limits", row) for row in (limit, limits.FORWARD))
    share = at_best / max(_seconds(found, "cold", ours, "forward") - forward, 1e-9)
    return Reached(
        [
            _atleast(ratio, 1, "the best peer"),
            (share >= 0.9, f"{min(share, 1.0):.0%} of the disk's bandwidth"),
            _atleast(to_mapped, 1.7, "the best mapped loader"),
        ],
        f"{by}; {maps} {_ms(_seconds(found, 'cold', maps, 'forward'))}; {limit} {_ms(at_best)}, to which the time less "
        f"that of the forward, {_ms(forward)}, is compared",
    )


def _converted(found: Found, key: str, hub: str, ours: str, ratio_goal: float, extra_goal: float) -> Reached:
    ratio, by = _against(found, key, ours, _best(found, key))
    conditions = [_atleast(ratio, ratio_goal, "the best peer")]
    if hub in found:
        to_hub, by_hub = _against(found, hub, HUB_OURS, _best(found, hub))
        conditions.append(_atleast(to_hub, ratio_goal, "from_pretrained"))
        by = f"{by}; with construction: {by_hub}"
    ready, check = found[key].at(ours), found[key].at(ours, "check")
    assert ready is not None
    assert check is not None
    extra = ready.anonymous_bytes - check.facts["nbytes"]
    less = f"{size(abs(extra))} less than the target: a part of the target is still in the mapped file"
    conditions.append((extra <= extra_goal, f"target + {size(extra)}" if extra >= 0 else less))
    return Reached(conditions, by)


def cast(found: Found) -> Reached:
    return _converted(found, "cast", "hub/cast", f"{OURS}, dtype=bfloat16", 2, 128e6)


def int8(found: Found) -> Reached:
    return _converted(found, "int8", "hub/int8", f"{OURS}, transform=Quantize", 2, 256e6)


def small(found: Found) -> Reached:
    key = "small/meta"
    stock = _best(found, key, which=lambda row: not row.startswith("accelerate"))
    to_stock, by = _against(found, key, OURS, stock)
    other = "accelerate load_checkpoint_in_model"
    to_other, _ = _against(found, key, OURS, other)
    return Reached(
        [_atleast(to_stock, 8, "stock and safetensors"), _atleast(to_other, 1.7, "accelerate")],
        f"{by}; {other} {_ms(_seconds(found, key, other))}",
    )


def many(found: Found) -> Reached:
    conditions, words = [], []
    for row in (OURS, f"{OURS}, map=False"):
        few, more = (_seconds(found, "many", row, case=case) for case in ("20,000 tensors", "100,000 tensors"))
        conditions.append((more / few <= 5 * 1.15, f"{more / few:.1f}x the time for 5x the tensors"))
        words.append(f"{row} {_ms(few)}, {_ms(more)}")
    return Reached(conditions, "; ".join(words))


def shards(found: Found) -> Reached:
    conditions, words = [], []
    for row in (OURS, f"{OURS}, map=False"):
        one, ten = (_seconds(found, "shards", row, "forward", case) for case in ("1 file", "10 shards"))
        conditions.append((ten / one <= 1.1, f"{ten / one:.2f}x the time"))
        words.append(f"{row} {_ms(one)}, {_ms(ten)} to the end of the first forward")
    return Reached(conditions, "; ".join(words))


def fastest_bare_write(table: Measured) -> str:
    """Its row, of those that are on the disk when they end."""
    rows = [row for row in table.rows if row.startswith(saving.SYNCED)]
    return min(rows, key=lambda row: _seconds({table.key: table}, table.key, row), default="")


def save(found: Found) -> Reached:
    """With the same durability; beside it, what stock does not wait for."""
    ours, stock = "modelstate.save", "torch.save"
    synced = f"{stock}, then fsync"
    ratio, by = _against(found, "save", ours, synced)
    bare = fastest_bare_write(found["save"]) if "save" in found else ""
    over = _seconds(found, "save", ours) / _seconds(found, "save", bare)
    return Reached(
        [
            _atleast(ratio, 2, f"`{stock}` with fsync"),
            (over <= 1.2, f"{over:.2f}x the time of the fastest bare write with fsync"),
        ],
        f"{by}; {bare} {_ms(_seconds(found, 'save', bare))}; {stock} without fsync "
        f"{_ms(_seconds(found, 'save', stock))}",
    )


def blocked(found: Found) -> Reached:
    ours, copy = saving.BLOCKED, saving.MEMCPY
    over = _seconds(found, "store", ours) / _seconds(found, "store", copy)
    by = f"{_ms(_seconds(found, 'store', ours))}, {_ms(_seconds(found, 'store', copy))}"
    return Reached([(over <= 1.3, f"{over:.2f}x the time of the copy")], by)


def frozen(found: Found) -> Reached:
    ratio, by = _against(found, "store", saving.FROZEN, saving.FULL)
    return Reached([_atleast(ratio, 5, "a full one")], by)


def torn(found: Found) -> Reached:
    """Every way of ours beside every stock one."""
    if "live/torn" not in found:
        raise NotMeasuredError("live/torn")
    requests = wrong = 0
    stock = []
    for row in found["live/torn"].rows:
        one = found["live/torn"].at(row)
        assert one is not None
        if row in live.STOCK:
            stock.append(f"{row} {one.facts['torn'] / max(one.facts['requests'], 1):.1%}")
            continue
        requests += one.facts["requests"]
        wrong += sum(one.facts[key] for key in ("torn", "mislabelled", "back", "errors"))
    return Reached([(not wrong, f"{wrong} of {requests:,} requests")], f"torn by stock ways: {', '.join(stock)}")


def swap(found: Found) -> Reached:
    """Beyond staging, which reads the weights."""
    copy = _seconds(found, "live/swap", live.MEMCPY)
    rows = {kind: _seconds(found, "live/swap", live.FLIP.format(kind)) for kind in live.KINDS}
    staged = {kind: _seconds(found, "live/swap", live.STAGED.format(kind)) for kind in live.KINDS}
    by = "; ".join(f"{kind}: staging {_ms(staged[kind])}" for kind in rows)
    return Reached([(one <= 0.01, f"{kind} {_ms(one)}") for kind, one in rows.items()], f"{by}; memcpy {_ms(copy)}")


def request(found: Found) -> Reached:
    """Against the bare call of the same process."""
    conditions, words = [], []
    for kind, bare, most in (("eager", live.MODULE, 20e-6), ("exported", live.BARE["exported"], 0.0)):
        key = f"live/request/{kind}"
        one, other = _seconds(found, key, live.LIVE.format(kind)), _seconds(found, key, bare)
        conditions.append((one - other <= most, f"{kind} {(one - other) * 1e6:+.1f} µs"))
        words.append(f"{bare} {other * 1e6:.1f} µs, {live.LIVE.format(kind)} {one * 1e6:.1f} µs")
    return Reached(conditions, "; ".join(words))


OURS = "modelstate.load"
HUB_OURS = "modelstate.load, with construction"
DEFAULT = {
    "default/large": "1.2 GB",
    "default/middle": "90 MB",
    "default/mixed": "ties, BatchNorm and frozen parameters",
}
"""Tables of loads without options into a module with memory and an optimizer, and what is loaded."""
MAPPED = {
    "large/meta": (OURS, ""),
    "bf16/meta": (OURS, " with a file in bfloat16"),
    "hub/load": (HUB_OURS, " with a Llama and its construction"),
    "hub/minilm": (HUB_OURS, " with MiniLM and its construction"),
    "hub/minilm/meta": (OURS, " with MiniLM"),
}
"""Tables of loads that map into a module on meta: our row, and what differs from the first."""

ROWS: dict[str, tuple[str, str, Callable[[Found], Reached]]] = {
    "mapped": ("file to ready on a meta target (mapped)", "fastest of all", mapped),
    "first-forward": (
        "file to the end of the first forward, warm cache",
        "fastest of all, and at most 1.15x the time of reading the bytes once at the measured limit plus the forward",
        first_forward,
    ),
    "own-memory": (
        "meta target, memory of its own (`map=False`)",
        "at least 2.5x as fast as the best peer",
        own_memory,
    ),
    "in-place": (
        "into a materialised module with its optimizer (in place)",
        "at least 1.5x as fast as the best peer and 8x as fast as `torch.load` + `load_state_dict`; extra memory under "
        "64 MB",
        in_place,
    ),
    "default": (
        "without options, into a module with its optimizer",
        "at least as fast as the best peer that keeps references; extra memory of its own under 64 MB",
        default,
    ),
    "cold-memory": (
        "cold file, into a module with its optimizer",
        "at least 1.3x as fast as the best peer",
        cold_memory,
    ),
    "cast-memory": (
        "fp32 file into a bf16 module with its optimizer",
        "at least as fast as the best peer",
        cast_memory,
    ),
    "small-memory": (
        "20,000 small tensors into a module with its optimizer",
        "at least 1.2x as fast as the best peer that keeps references",
        small_memory,
    ),
    "opening": (
        "opening 20,000 tensors, with every shape, safetensors",
        "at least as fast as the library of safetensors",
        opening,
    ),
    "merging": (
        "the average of three checkpoints; a LoRA adapter merged",
        "at least 1.5x as fast as the plain loop",
        merging,
    ),
    "keeping": (
        "`Module.to` with `reference_keeping`",
        "at least 0.95x as fast as stock; under 64 MB more memory than stock",
        keeping,
    ),
    "start": (
        "start of the library and of commands that need no torch",
        "60 ms for the import after torch; 300 ms for each command",
        start,
    ),
    "staging": (
        "staging of a swap, from the fourth on",
        "at most 2x the time of a memcpy of the weights",
        staging,
    ),
    "cold": (
        "cold cache, to the end of the first forward",
        "faster than all; at least 90% of the disk's measured parallel bandwidth; at least 1.7x as fast as the best "
        "mapped loader",
        cold,
    ),
    "cast": (
        "fp32 file to bf16 module",
        "at least 2x as fast as the best peer; own memory at most target + 128 MB",
        cast,
    ),
    "int8": (
        "fp32 file to int8 module",
        "at least 2x as fast as quantizing after the load; own memory at most target + 256 MB",
        int8,
    ),
    "small": (
        "20,000 small tensors",
        "at least 8x as fast as stock and safetensors, 1.7x as fast as accelerate",
        small,
    ),
    "many": ("100,000 tensors against 20,000", "linear: at most 1.15x the time per tensor", many),
    "shards": ("10 shards against 1", "flat: at most 1.1x the time", shards),
    "save": (
        "module to safetensors, on the disk",
        "at least 2x as fast as `torch.save`; at most 1.2x the time of a bare parallel write with the same durability",
        save,
    ),
    "blocked": ("how long `save(background=True)` blocks", "at most 1.3x the time of a memcpy of the state", blocked),
    "torn": ("requests while weights are swapped every 20 ms", "none is torn, mislabelled or fails", torn),
    "swap": ("new weights into a program of 100 MB", "at most 10 ms beyond staging", swap),
    "request": (
        "`live(x)` beside the bare call",
        "at most 20 µs more for a module; nothing more than `ExportedProgram.module()`",
        request,
    ),
    "frozen": ("a checkpoint with 90% of its bytes unchanged", "at least 5x as fast as a full one", frozen),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of the summary of a page: a job, and the row of our time in a table."""

    job: str
    key: str
    ours: str
    stage: str = "ready"
    peers: Callable[[Found, str], bool] = lambda found, row: True
    """Whether another row of the table does the same job."""
    case: str | None = None
    """The column of a grid; without one, the first."""


COMPARISONS = {
    "benchmarks.md": (
        Comparison(
            "1.2 GB file into a module with its optimizer",
            "default/large",
            OURS,
            peers=lambda found, row: _keeps_references(found, "default/large", row),
        ),
        Comparison(
            "90 MB with ties, BatchNorm and frozen parameters",
            "default/mixed",
            OURS,
            peers=lambda found, row: _keeps_references(found, "default/mixed", row),
        ),
        Comparison("1.2 GB file, cold, into a module with its optimizer", "cold/memory", OURS),
        Comparison("float32 file into a bfloat16 module", "cast/memory", f"{OURS}, dtype=bfloat16"),
        Comparison(
            "20,000 small tensors into a module",
            "small/memory",
            OURS,
            peers=lambda found, row: _keeps_references(found, "small/memory", row),
        ),
        Comparison("1.2 GB file onto meta, to the end of the first forward", "large/meta", OURS, "forward"),
        Comparison("float32 file onto meta, as int8 weights", "int8", f"{OURS}, transform=Quantize"),
        Comparison("a Llama of transformers, with its construction", "hub/load", HUB_OURS),
    ),
    "benchmarks_gpu.md": (
        *(
            Comparison(
                f"{what} into a module on a GPU",
                f"gpu/{case}",
                OURS,
                peers=partial(lambda key, found, row: _keeps_references(found, key, row), f"gpu/{case}"),
            )
            for case, what in (("large", "1.2 GB file"), ("middle", "90 MB file"), ("small", "20,000 small tensors"))
        ),
        Comparison("float32 file into a bfloat16 module on a GPU", "gpu/cast", f"{OURS}, dtype=bfloat16"),
        Comparison("1.2 GB file into a module on meta, onto a GPU", "gpu/meta", OURS),
        *(
            Comparison(
                f"until the {turn} background save of 1.2 GB has copied the state",
                "gpu/save",
                name.format(saving.STORE),
                peers=partial(lambda turn, found, row: row.endswith(turn), turn),
            )
            for turn, name in (("first", saving.FIRST), ("second", saving.SECOND))
        ),
    ),
    "benchmarks_converting.md": (
        Comparison(
            "1.2 GB module in memory, from float32 to bfloat16",
            "convert/large",
            "modelstate.convert",
            peers=lambda found, row: "modelstate" not in row,
        ),
        Comparison(
            "20,000 small tensors in memory, from float32 to bfloat16",
            "convert/small",
            "modelstate.convert",
            peers=lambda found, row: "modelstate" not in row,
        ),
        Comparison("the average of three checkpoints of 1.2 GB", "merge/average", "modelstate.load, merge.Average"),
        Comparison("a LoRA adapter merged into 1.2 GB", "merge/lora", "modelstate.load, merge.LoRA"),
        Comparison(
            "two checkpoints of 1.2 GB compared",
            "diff",
            "modelstate.diff",
            peers=lambda found, row: row.startswith("two torch.load"),
        ),
        *(
            Comparison(
                f"names and shapes of 20,000 tensors, a {kind} file",
                "opening",
                "modelstate.open + every shape",
                case=f"20,000 tensors, {kind}",
            )
            for kind in ("safetensors", "torch")
        ),
        Comparison("load_state_dict of 5,000 modules", "state-dict", "modelstate.load_state_dict"),
    ),
    "benchmarks_saving.md": (
        Comparison(
            "1.2 GB module to safetensors, synced to the disk",
            "save",
            "modelstate.save",
            peers=lambda found, row: row.endswith(", then fsync"),
        ),
        Comparison(
            "until a background save of 1.2 GB returns",
            "store",
            saving.BLOCKED,
            peers=lambda found, row: row == saving.MEMCPY,
        ),
    ),
    "benchmarks_serving.md": (
        *(
            Comparison(
                f"staging of a swap of 100 MB from a file, {kind}",
                "live/swap",
                live.STAGED_FILE.format(kind),
                peers=lambda found, row: row == live.MEMCPY,
            )
            for kind in live.KINDS
        ),
        *(
            Comparison(
                f"a request to a small program, {kind}",
                f"live/request/{kind}",
                live.LIVE.format(kind),
                peers=lambda found, row: row == live.MODULE or row in live.BARE.values(),
            )
            for kind in live.KINDS
        ),
    ),
}
"""The rows of the summary at the top of each page, at most eight."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A row of the summary of a page, with what was found."""

    job: str
    ours: str
    our_seconds: float
    peer: str
    """The fastest other contender that does the same job."""
    peer_seconds: float
    range: tuple[float, float]
    """The least and the largest ratio of both times in one turn, in which each contender runs once."""

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return self.our_seconds / self.peer_seconds

    @property
    def cells(self) -> list[str]:
        """The row as text."""
        times = (_short(seconds) for seconds in (self.our_seconds, self.peer_seconds))
        ours, peer = map(" ".join, zip((self.ours, self.peer), times, strict=True))
        return [self.job, ours, peer, f"{self.ratio:.2f}", "{:.2f} to {:.2f}".format(*self.range)]


def compared(found: Found, page: str) -> list[Compared]:
    """The rows of the summary of a page, of those that were measured."""
    rows = []
    for one in COMPARISONS[page]:
        try:
            peer = _best(found, one.key, one.stage, partial(one.peers, found), one.case)
            ours, theirs = (_seconds(found, one.key, row, one.stage, one.case) for row in (one.ours, peer))
        except NotMeasuredError:
            continue
        cases = found[one.key].cases
        runs = next(iter(cases.values())) if one.case is None else cases[one.case]
        turns = [
            mine[one.stage].seconds / other[one.stage].seconds
            for mine, other in zip(runs[one.ours], runs[peer], strict=False)
        ]
        rows.append(Compared(one.job, one.ours, ours, peer, theirs, (min(turns), max(turns))))
    return rows


def _short(seconds: float) -> str:
    return _ms(seconds) if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def reached(found: Found, keys: Iterable[str] = ROWS) -> list[Goal]:
    """These rows, with what was found where it was measured."""
    return [_row(key, found) for key in keys]


def _row(key: str, found: Found) -> Goal:
    job, goal, measure = ROWS[key]
    try:
        got = measure(found)
    except NotMeasuredError as error:
        return Goal(job, goal, by=f"missing: {error}")
    met = all(one for one, _ in got.conditions)
    texts = [words if one else f"**{words}**" for one, words in got.conditions]
    return Goal(job, goal, "; ".join(texts), got.by, met, "" if met else _limit(key, found))


def _limit(key: str, found: Found) -> str:
    """The sentence with the limit, for a row that is not met."""

    def fastest(table: str, begin: str, stage: str = "ready") -> str:
        try:
            rows = [row for row in found[table].rows if row == begin]
            rows = rows or [row for row in found[table].rows if row.startswith(begin.partition("{")[0])]
            return _ms(min(_seconds(found, table, row, stage) for row in rows))
        except (KeyError, ValueError, NotMeasuredError):
            return "(not measured)"

    return LIMITS[key](fastest) if key in LIMITS else ""
