"""Who may import whom, and what an import does: nothing but define names."""

import ast
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import modelstate
from tests.programs import Forks

SOURCE = Path(modelstate.__file__).parent

ROOMS = (
    {
        "version",
        "lazy",
        "forks",
        "text_format",
        "errors",
        "arguments",
        "spec",
        "tensor_spec",
        "problems",
        "process",
        "background",
    },
    {"html"},
    {"torch_compat"},
    {"remote"},
    {"io"},
    {"codec"},
    {"formats"},
    {"checkpoint"},
    {"transaction"},
    {"rules"},
    {"distributed"},
    {"planning"},
    {"loading"},
    {"suggestion"},
    {"comparison"},
    {"conversion"},
    {"objects"},
    {"store"},
    {"serve"},
    {"merge"},
    {"integrations"},
    {"cli"},
    {"__main__"},
)
"""From the ground up: a room imports from itself and from the rooms above it in this list."""
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}
Fresh = Callable[[str], dict[str, object]]
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def dotted(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def exists(parts: tuple[str, ...]) -> bool:
    place = SOURCE.parent.joinpath(*parts)
    return place.is_dir() or place.with_suffix(".py").exists()


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def imports_of(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and dotted name of everything that a file imports, also inside functions and `TYPE_CHECKING`."""
    package = dotted(path) if path.name == "__init__.py" else dotted(path)[:-1]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            for alias in node.names:
                whole = (*base, alias.name)
                yield node.lineno, whole if base[0] == "modelstate" and exists(whole) else base


def test_every_folder_is_a_room() -> None:
    assert {dotted(path)[1] for path in FILES} <= set(LEVEL)


@pytest.mark.slow
def test_imports_follow_the_order() -> None:
    wrong = []
    for path in FILES:
        here = dotted(path)[1]
        for line, name in imports_of(path):
            if name[0] != "modelstate":
                continue
            # Only the command line imports the public names as a whole, and no room imports the command line.
            there = name[1] if len(name) > 1 else "cli"
            if LEVEL[there] > LEVEL[here]:
                wrong.append(f"{path.relative_to(SOURCE)}, line {line}: {here} imports {'.'.join(name)}")
    assert not wrong


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle() -> None:
    imported = {dotted(path): {name for _, name in imports_of(path) if name[0] == "modelstate"} for path in FILES}
    left = dict(imported)
    while free := [name for name, others in left.items() if not others & left.keys() - {name}]:
        for name in free:
            del left[name]
    assert not left, sorted(".".join(name) for name in left)


@pytest.mark.slow
def test_exactly_one_file_imports_pickle() -> None:
    pickles = {"pickle", "_pickle", "cloudpickle", "dill", "pickletools"}
    found = [path.name for path in FILES if any(name[0] in pickles for _, name in imports_of(path))]
    assert found == ["unpickle.py"]


LAZY = sorted(
    ".".join(("modelstate", *path.parent.relative_to(SOURCE).parts))
    for path in SOURCE.rglob("__init__.py")
    if "attach(" in path.read_text()
)


@pytest.mark.parametrize("package", LAZY)
def test_public_names_are_the_same_for_programs_and_for_type_checkers(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert set(module.__all__) <= {*typed} <= {*dir(module)}
    assert len(set(typed)) == len(typed)
    for name in typed:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing


@pytest.fixture
def fresh(new_interpreter: Forks) -> Fresh:
    """Returns what a program prints as JSON on its last line, run in a process that has imported torch alone."""

    def run(code: str) -> dict[str, object]:
        done = new_interpreter.run(code)
        done.check_returncode()
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.slow
def test_what_an_import_and_the_public_names_pull_in(fresh: Fresh) -> None:
    first, found = fresh(
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        "import modelstate\n"
        "first = sorted(set(sys.modules) - before)\n"
        "[getattr(modelstate, name) for name in modelstate.__all__]\n"
        "with modelstate.skeleton(): torch.nn.Linear(2, 2)\n"
        "print(json.dumps({'new': [first, sorted(set(sys.modules) - before)]}))"
    )["new"]
    assert first == ["modelstate", "modelstate.forks", "modelstate.lazy", "modelstate.version"]
    tops = {name.split(".")[0] for name in found if "cython_" not in name.split(".")[0]}
    assert tops - set(sys.stdlib_module_names) <= {"modelstate", "torch", "numpy", "msgspec", "xxhash"}
    unwanted = {"transformers", "click", "rich", "accelerate", "safetensors", "torchao", "psutil", "asyncio"}
    assert not tops & unwanted
    heavy = ("torch._dynamo", "torch._inductor", "torch.export", "torch.distributed.tensor", "torch.onnx")
    assert not [name for name in found if name.startswith(heavy)]
    above = ("modelstate.cli", "modelstate.integrations")
    assert not [name for name in found if name.startswith(above)]


@pytest.mark.slow
def test_the_first_use_of_a_loop_imports_nothing(fresh: Fresh, tmp_path: Path) -> None:
    """What a training loop calls is imported where its names are looked up, and its stores are made.

    The reader of a format other than safetensors is imported with the first file of that format, what captures the
    state of optimizers with the first optimizer, and what restores with the first restore.
    """
    found = fresh(
        "import json, sys, torch\n"
        "import modelstate as ms\n"
        "model = torch.nn.Linear(2, 2)\n"
        f"path, directory = {str(tmp_path / 'x.safetensors')!r}, {str(tmp_path / 'store')!r}\n"
        "store, live, load, save = ms.Store(directory), ms.Live(torch.nn.Linear(2, 2)), ms.load, ms.save\n"
        "before = set(sys.modules)\n"
        "store.save(1, {'model': model})\n"
        "save(model, path)\n"
        "load(model, path)\n"
        "live.swap(path)\n"
        "new = [name for name in set(sys.modules) - before if name.startswith('modelstate')]\n"
        "print(json.dumps({'new': sorted(new)}))"
    )["new"]
    assert found == []


@pytest.mark.slow
def test_an_import_changes_nothing(fresh: Fresh) -> None:
    code = """
import json, os, threading, warnings
import torch
import torch.utils, torch.__future__, torch.serialization

places = (torch, torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.nn.Buffer, torch.utils, torch.serialization)
settings = lambda: {
    "environment": dict(os.environ),
    "filters": list(map(repr, warnings.filters)),
    "default dtype": str(torch.get_default_dtype()),
    "threads": torch.get_num_threads(),
    "python threads": threading.active_count(),
    "swap": torch.__future__.get_swap_module_params_on_conversion(),
    "overwrite": torch.__future__.get_overwrite_module_params_on_conversion(),
    "safe globals": list(map(repr, torch.serialization.get_safe_globals())),
    "directory": os.getcwd(),
}
names = [dict(vars(place)) for place in places]
was = settings()
import modelstate
for name in modelstate.__all__:
    getattr(modelstate, name)
patched = [
    f"{place.__name__}.{name}"
    for place, old in zip(places, names)
    for name, value in old.items()
    if vars(place).get(name) is not value and name != "__warningregistry__"
]
patched += [
    f"{place.__name__}.{name}"
    for place, old in zip(places, names)
    for name in vars(place)
    if isinstance(place, type) and name not in old
]
print(json.dumps({"patched": patched, "same settings": was == settings()}))
"""
    assert fresh(code) == {"patched": [], "same settings": True}
