"""`plan_for_mesh`: what each rank of a device mesh reads and holds in a load, computed without a process group."""

import json
import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby, product
from typing import NamedTuple

import torch
from torch import nn

from modelstate.distributed.shards import LocalShard, runs_of_all
from modelstate.errors import OptionError
from modelstate.io.files import local_path, read_whole
from modelstate.planning.plan import LoadPlan, Step
from modelstate.rules.expression import leaves, read_bytes
from modelstate.spec import StoredTensor, pieces
from modelstate.text_format import columns, count, listed, short_repr, size

_STYLES = ("colwise", "rowwise", "replicate")
_MOST_RANKS = 1 << 16
_MOST_FILE_BYTES = 1 << 20
"""The largest file with patterns of tensor parallelism."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank of a mesh does in a load."""

    rank: int
    coordinate: tuple[int, ...]
    """The position of the rank in the mesh."""
    held_bytes: int
    """Bytes of the parameters and buffers that the rank holds after the load."""
    read_bytes: int
    """Bytes that the rank reads from files."""
    requests: int
    """Runs of bytes that the rank reads, before neighbours are merged and large runs are divided."""


@dataclass(frozen=True, slots=True, repr=False)
class MeshPlan:
    """What each rank of a device mesh reads and holds. Created by `plan_for_mesh`; `print` shows a table."""

    plan: LoadPlan
    """The plan of the same load into the whole model."""
    mesh: tuple[int, ...]
    """The number of ranks along each dimension of the mesh."""
    parallel: Mapping[str, str] | None
    """The patterns of tensor parallelism; None for FSDP alone."""
    ranks: tuple[RankPlan, ...]

    @property
    def read_bytes(self) -> int:
        """Bytes that all ranks read."""
        return sum(rank.read_bytes for rank in self.ranks)

    @property
    def held_bytes(self) -> int:
        """Bytes of parameters and buffers that all ranks hold."""
        return sum(rank.held_bytes for rank in self.ranks)

    @property
    def imbalance(self) -> float:
        """The most bytes that a rank reads, divided by the mean of all ranks."""
        return max(rank.read_bytes for rank in self.ranks) * len(self.ranks) / self.read_bytes if self.read_bytes else 1

    def __repr__(self) -> str:
        """A summary in one line."""
        return f"<{type(self).__name__}: {self.plan.source} into {self.plan.target} on {self._mesh_text}>"

    @property
    def _mesh_text(self) -> str:
        return f"a mesh of {' x '.join(map(str, self.mesh))}, {count(len(self.ranks), 'rank')}"

    def __str__(self) -> str:
        rows = [["ranks", "holds", "reads", "requests"]]
        for (held, read, requests), group in groupby(
            self.ranks, lambda rank: (rank.held_bytes, rank.read_bytes, rank.requests)
        ):
            numbers = [rank.rank for rank in group]
            text = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
            rows.append([text, size(held), size(read), f"{requests:,}"])
        times = self.read_bytes / self.plan.bytes if self.plan.bytes else 1.0
        lines = [
            f"{self.plan.source} into {self.plan.target} on {self._mesh_text}",
            f"  {size(self.read_bytes)} to read over all ranks, {times:.2f} times the bytes of one load",
            f"  imbalance {self.imbalance:.2f}: the most that a rank reads, divided by the mean",
            columns(rows, right=(1, 2, 3)),
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns the plan of the mesh as JSON, with an object for each rank."""
        return json.dumps(
            {
                "target": self.plan.target,
                "source": self.plan.source,
                "mesh": list(self.mesh),
                "parallel": "fsdp" if self.parallel is None else dict(self.parallel),
                "model_bytes": self.plan.bytes,
                "read_bytes": self.read_bytes,
                "held_bytes": self.held_bytes,
                "imbalance": self.imbalance,
                "ranks": [
                    {
                        "rank": rank.rank,
                        "coordinate": list(rank.coordinate),
                        "held_bytes": rank.held_bytes,
                        "read_bytes": rank.read_bytes,
                        "requests": rank.requests,
                    }
                    for rank in self.ranks
                ],
            },
            indent=1,
        )


def plan_for_mesh(
    plan: LoadPlan,
    model: nn.Module,
    mesh: Sequence[int],
    parallel: Mapping[str, str] | None = None,
) -> MeshPlan:
    """Computes what each rank of a mesh would read and hold, for a plan of the load into the whole model.

    The layout is that of torch's own functions. Without `parallel`, `fully_shard` splits every parameter in its first
    dimension over the last dimension of the mesh, and replicates it over a dimension before that one. With `parallel`,
    `parallelize_module` is applied over the last dimension of the mesh first, and `fully_shard` over the dimensions
    before it. Every rank holds all buffers.

    Args:
        plan: The plan of a load into the model. It must be ok.
        model: The model that the plan was made for, not sharded.
        mesh: The number of ranks along each dimension of the mesh.
        parallel: The style of tensor parallelism of modules, by patterns of their paths: "colwise", "rowwise" or
            "replicate". As in `parallelize_module`, a `*` matches within one part of a path. The first pattern that
            matches a module decides. None for FSDP alone.

    Returns:
        The plan of the mesh.

    Raises:
        OptionError: The mesh or a pattern is invalid, or the plan has problems.

    Examples:
        >>> plan = modelstate.plan(model, "model.safetensors")
        >>> print(modelstate.loading.plan_for_mesh(plan, model, (4, 2), {"layers.*.q": "colwise"}))
    """
    if not isinstance(plan, LoadPlan):
        raise OptionError("not a plan of a load", expected="modelstate.plan(model, source)", found=type(plan).__name__)
    if not plan.ok:
        raise OptionError(
            "a plan with problems cannot be divided over a mesh",
            where=plan.source,
            found=count(len(plan.problems), "problem"),
            remedy="print the plan, and solve its problems",
        )
    most = 2 if parallel is None else 3
    if (
        not isinstance(mesh, Sequence)
        or not 1 <= len(mesh) <= most
        or not all(type(ranks) is int and ranks >= 1 for ranks in mesh)
    ):
        raise OptionError(
            "mesh= is not the shape of a mesh",
            expected=f"1 to {most} positive integers {'for FSDP' if parallel is None else 'for tensor parallelism'}",
            found=short_repr(mesh),
        )
    if math.prod(mesh) > _MOST_RANKS:
        raise OptionError("mesh= has too many ranks", expected=f"at most {_MOST_RANKS:,}", found=f"{math.prod(mesh):,}")
    fsdp_dims = len(mesh) if parallel is None else len(mesh) - 1
    styles = {} if parallel is None else _styles(model, parallel)
    alike: dict[object, list[Step]] = {}  # a large model has hundreds of tensors, and few different ones
    for step in (own for planned in plan.steps for own in _untied(planned, styles)):
        source = step.expression
        layout = (source.dtype, source.shape, source.stride) if isinstance(source, StoredTensor) else step.name
        alike.setdefault((_splits(step, styles, mesh, fsdp_dims), step.shape, step.dtype, layout), []).append(step)
    # By the mesh dimensions that split a tensor, and the positions of a rank along them.
    totals: dict[tuple[int, ...], dict[tuple[int, ...], _Cost]] = {(): {(): _NO_COST}}
    for steps in alike.values():
        splits = _splits(steps[0], styles, mesh, fsdp_dims)
        total = totals.setdefault(tuple(at for at, _ in splits), {})
        for positions, cost in _costs(steps[0], splits, mesh):
            before = total.get(positions, _NO_COST)
            total[positions] = _Cost(*(a + len(steps) * b for a, b in zip(before, cost, strict=True)))
    ranks = []
    for rank, coordinate in enumerate(product(*map(range, mesh))):
        costs = [total[tuple(coordinate[at] for at in dims)] for dims, total in totals.items()]
        ranks.append(RankPlan(rank, coordinate, *map(sum, zip(*costs, strict=True))))
    return MeshPlan(plan, tuple(mesh), parallel, tuple(ranks))


Splits = tuple[tuple[int, int], ...]
"""The dimension of the mesh and the dimension of the tensor of each split, in the order in which torch splits."""


def _splits(step: Step, styles: Mapping[str, str], mesh: Sequence[int], fsdp_dims: int) -> Splits:
    """Returns the splits of a parameter: that of tensor parallelism, then that of FSDP."""
    if step.kind != "parameter":
        return ()
    splits = []
    if (dim := _split_dim(step, styles)) is not None:
        splits.append((len(mesh) - 1, dim))
    if fsdp_dims:
        if not step.shape:
            raise OptionError(
                "fully_shard does not take a parameter without dimensions",
                where=step.name,
                remedy="make it a tensor of one element in the model",
            )
        splits.append((fsdp_dims - 1, 0))
    return tuple(splits)


def _split_dim(step: Step, styles: Mapping[str, str]) -> int | None:
    """Returns the dimension that tensor parallelism splits; None where it replicates the parameter."""
    path, _, leaf = step.name.rpartition(".")
    match styles.get(path), leaf:
        case ("Linear colwise", _) | ("Embedding rowwise", _):
            return 0
        case ("Linear rowwise", "weight") | ("Embedding colwise", _):
            return 1
    return None


def _untied(step: Step, styles: Mapping[str, str]) -> Iterator[Step]:
    """Yields a step for each tensor: `parallelize_module` gives a module with a style parameters of its own."""
    names = (step.name, *step.ties)
    own = [name for name in names if step.kind == "parameter" and name.rpartition(".")[0] in styles]
    if rest := [name for name in names if name not in own]:
        yield step._replace(name=rest[0], ties=tuple(rest[1:]))
    for name in own:
        yield step._replace(name=name, ties=())


def _styles(model: nn.Module, parallel: Mapping[str, str]) -> dict[str, str]:
    """Returns the class and the style of each module that a pattern matches, by its path: "Linear colwise"."""
    if not isinstance(parallel, Mapping) or not all(isinstance(pattern, str) for pattern in parallel):
        raise OptionError(
            "parallel= is not a mapping from patterns of paths to styles",
            expected="such as {'layers.*.q': 'colwise'}",
            found=short_repr(parallel),
        )
    if unknown := [f"{pattern}: {style!r}" for pattern, style in parallel.items() if style not in _STYLES]:
        raise OptionError(
            "parallel= has a style that is unknown", expected=" or ".join(map(repr, _STYLES)), found=listed(unknown)
        )
    styles, unused = {}, set(parallel)
    for path, module in model.named_modules():
        pattern = next((pattern for pattern in parallel if _matches(path, pattern)), None)
        if pattern is None:
            continue
        unused.discard(pattern)
        style = parallel[pattern]
        kind = next((kind.__name__ for kind in (nn.Linear, nn.Embedding) if isinstance(module, kind)), "")
        if style != "replicate" and not kind:
            raise OptionError(
                f"torch has no {style} parallelism for this module",
                where=path,
                expected="a Linear or an Embedding",
                found=type(module).__name__,
            )
        styles[path] = f"{kind} {style}"
    if unused:
        raise OptionError(
            "patterns of parallel= match no module",
            found=listed(sorted(unused)),
            expected=f"paths such as {listed([path for path, _ in model.named_modules() if path], most=3)}",
        )
    return styles


def _matches(path: str, pattern: str) -> bool:
    """As `parallelize_module`, which matches each part of a path with a part of the pattern."""
    parts, patterns = path.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


class _Cost(NamedTuple):
    held_bytes: int
    read_bytes: int
    requests: int


_NO_COST = _Cost(0, 0, 0)


def _costs(step: Step, splits: Splits, mesh: Sequence[int]) -> Iterator[tuple[tuple[int, ...], _Cost]]:
    """Yields what the ranks hold and read of a tensor, by their positions along the mesh dimensions that split it."""
    from torch.distributed.tensor import Shard

    if step.dtype is None:  # an extra state
        yield (), _Cost(0, step.nbytes, 0)
        return
    of_dims = []
    for dim, size_of_dim in enumerate(step.shape):
        split_by = [index for index, (_, split_dim) in enumerate(splits) if split_dim == dim]
        placements = tuple((Shard(dim), mesh[splits[index][0]]) for index in split_by)
        of_dims.append((split_by, runs_of_all(size_of_dim, placements)))
    # What a part of a stored tensor costs depends on its shape alone. There may be very many ranks.
    is_stored = isinstance(step.expression, StoredTensor)
    known: dict[object, _Cost] = {}
    for positions in product(*(range(mesh[at]) for at, _ in splits)):
        runs = tuple(found[tuple(positions[index] for index in split_by)] for split_by, found in of_dims)
        key = tuple(sum(map(len, of_dim)) for of_dim in runs) if is_stored else runs
        if key not in known:
            known[key] = _cost(step, step.dtype, LocalShard(step.shape, runs))
        yield positions, known[key]


def _cost(step: Step, dtype: torch.dtype, shard: LocalShard) -> _Cost:
    held_bytes = shard.numel * dtype.itemsize
    if step.expression is None:  # the model's code computes it, on every rank as a whole
        return _Cost(held_bytes, step.nbytes, 0)
    part = shard.of(step.expression)
    stored = [piece for leaf in leaves(part) for piece in pieces(leaf) if isinstance(piece, StoredTensor)]
    runs = [piece.runs() for piece in stored if piece.nbytes]
    return _Cost(held_bytes, read_bytes(part), sum(run.nbytes // run.run_bytes for run in runs))


def read_parallel(path: str | os.PathLike[str]) -> dict[str, str]:
    """Reads the patterns of tensor parallelism from a TOML file: a line `"PATTERN" = "STYLE"` for each.

    Args:
        path: The file.

    Returns:
        The styles by their patterns, in the order of the file.

    Raises:
        OpenError: The file cannot be opened.
        OptionError: The file has other contents.

    Examples:
        >>> parallel = modelstate.loading.read_parallel("parallel.toml")
    """
    expected = 'lines such as "model.layers.*.q_proj" = "colwise"'
    try:
        patterns = tomllib.loads(read_whole(local_path(os.fspath(path)), _MOST_FILE_BYTES, "patterns").decode())
    except (ValueError, RecursionError) as error:  # the latter of brackets within brackets
        raise OptionError(
            "the file of tensor parallelism is not TOML", where=path, expected=expected, found=str(error)
        ) from error
    if wrong := [f"{key} = {value!r}" for key, value in patterns.items() if not isinstance(value, str)]:
        raise OptionError(
            "the file of tensor parallelism has entries that are no styles",
            where=path,
            expected=expected,
            found=listed(wrong),
        )
    return patterns
