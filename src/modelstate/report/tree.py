"""The names of a checkpoint as a tree of modules, with repeated layers folded into one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from modelstate.spec import TensorSpec

_MAX_DEPTH = 60
"""Parts of a name that become levels of the tree; the rest of a longer name stays in one piece."""
MAX_RUNS = 8
"""Runs of alike numbers that are shown by themselves. Where there are more, alike ones are folded wherever they stand:
the state of an optimizer, whose numbers are those of parameters or addresses, or layers of two kinds in turn."""


@dataclass(slots=True)
class Node:
    """A module, a tensor, or (where a name is also a prefix) both."""

    name: str
    children: dict[str, "Node"] = field(default_factory=dict)
    spec: TensorSpec | None = None
    nbytes: int = 0
    """Bytes of everything below, without the tied ones, which are counted elsewhere."""
    shape: int = 0
    """Equal for nodes that look alike: the same names, shapes, dtypes and kinds below."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the tree."""

    depth: int
    label: str
    spec: TensorSpec | None
    nbytes: int
    """Bytes of everything that the line stands for."""
    times: int
    """How many alike siblings the line stands for."""


def build(specs: Mapping[str, TensorSpec], tied: frozenset[str] = frozenset()) -> Node:
    """The tree of the names. Those in `tied` stand for bytes of others: they count nothing, and are not folded with
    names that do."""
    root = Node("")
    for name, spec in specs.items():
        node = root
        for part in name.split(".", _MAX_DEPTH):
            node = node.children.setdefault(part, Node(part))
        node.spec = spec
    _measure(root, {}, tied)
    return root


def _measure(node: Node, known: dict[object, int], tied: frozenset[str]) -> None:
    own: object = None
    if node.spec is not None:
        spec = node.spec
        own = (spec.shape, spec.dtype, spec.kind, spec.name in tied)
        node.nbytes = 0 if spec.name in tied else spec.nbytes
    for child in node.children.values():
        _measure(child, known, tied)
        node.nbytes += child.nbytes
    below = frozenset((name, child.shape) for name, child in node.children.items())
    node.shape = known.setdefault((own, below), len(known))


def rows(root: Node) -> Iterator[Row]:
    """The lines of the tree, from top to bottom."""
    yield from _below(root, 0)


def _below(node: Node, depth: int) -> Iterator[Row]:
    for alike in _runs(node):
        prefix, group = _follow(alike)
        first, last = group[0], group[-1]
        label = prefix + first.name
        if len(group) > 1:
            to = f"{prefix[prefix[:-1].rfind('.') + 1 :]}{last.name} " if _is_run(group) else ""
            label += f" … {to}({len(group)} ×)"
        yield Row(depth, label, first.spec, sum(one.nbytes for one in group), len(group))
        yield from _below(first, depth + 1)


def _follow(group: list[Node]) -> tuple[str, list[Node]]:
    """Goes down while there is only one thing below, so that a chain of modules takes one line."""
    prefix = ""
    while len(group) == 1 and group[0].spec is None and len(below := _runs(group[0])) == 1:
        prefix += group[0].name + "."
        group = below[0]
    return prefix, group


def _runs(node: Node) -> list[list[Node]]:
    """The children, those with consecutive numbers that look alike in one list. Numbers stand in numeric order."""
    numbered = sorted((int(name), child) for name, child in node.children.items() if is_number(name))
    found: list[list[Node]] = []
    for name, child in node.children.items():
        if not is_number(name):
            found.append([child])
        elif numbered:
            runs = list(_numbered_runs(numbered))
            found += _alike(runs) if len(runs) > MAX_RUNS else runs
            numbered = []
    return found


def _numbered_runs(numbered: list[tuple[int, Node]]) -> Iterator[list[Node]]:
    run: list[Node] = []
    previous = -1
    for number, child in numbered:
        if run and (number != previous + 1 or child.shape != run[0].shape):
            yield run
            run = []
        run.append(child)
        previous = number
    if run:
        yield run


def _alike(runs: list[list[Node]]) -> list[list[Node]]:
    """The runs with those that look alike in one, in the order of their first."""
    groups: dict[int, list[Node]] = {}
    for run in runs:
        groups.setdefault(run[0].shape, []).extend(run)
    return list(groups.values())


def _is_run(group: list[Node]) -> bool:
    return int(group[-1].name) - int(group[0].name) == len(group) - 1


def is_number(name: str) -> bool:
    """Whether a part of a name is a number, which may be one of a row of alike ones."""
    return name.isascii() and name.isdigit() and len(name) <= 18 and (name == "0" or name[0] != "0")
