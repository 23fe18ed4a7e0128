"""Counts what the structure of the source is judged by.

    python tools/measure_code.py [--list small|inline|any|private] [FOLDER]

- small: functions with one caller in the source and a body of fewer than 5 lines. The count leaves out functions that
  cannot be inlined: methods that several classes define, overrides of a library's methods, public functions (their
  docstrings have an example), and functions of `torch_compat` that other rooms call to reach a private name of torch.
- inline: those of them whose body could stand at the caller. Left out are functions that are passed as values (sort
  keys, callbacks, entries of a table).
- any: annotations that are, or contain, `Any`.
- private: attributes and imports of torch whose names begin with an underscore, by file.
"""

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "modelstate"
PRIVATE_OF_MODULE = {
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_named_members", "_apply", "_version"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    *("_load_from_state_dict", "_save_to_state_dict", "_backward_hooks", "_post_accumulate_grad_hooks", "_metadata"),
}
"""Private names of `torch.nn.Module` and `torch.Tensor` that are reached through an object."""


def parsed(folder: Path) -> dict[Path, ast.Module]:
    """Every file of the folder, parsed."""
    return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body, without the docstring."""
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and len(body) > 1:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def small_functions(trees: dict[Path, ast.Module]) -> Iterator[tuple[str, bool]]:
    """Functions with one mention besides their definition, and a body of fewer than 5 lines.

    Special methods are left out, and what else must be a function. Each comes with whether its body could stand at the
    caller.
    """
    mentions: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    methods: Counter[str] = Counter()
    inherited: set[str] = set()
    mentioned_in: dict[str, Path] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                calls[node.func.id if isinstance(node.func, ast.Name) else node.func.attr] += 1
            elif isinstance(node, ast.ClassDef):
                methods.update(item.name for item in node.body if isinstance(item, ast.FunctionDef))
            elif isinstance(node, ast.Attribute) and is_super(node.value):
                inherited.add(node.attr)
            elif isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                mentions[name] += 1
                mentioned_in[name] = path
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
                continue
            name = node.name
            if mentions[name] != 1 or body_lines(node) >= 5 or name.startswith("__"):
                continue
            is_one_of_several = methods[name] > 1 or name in inherited
            is_public = ">>>" in (ast.get_docstring(node) or "")
            if not (is_one_of_several or is_public or (mentioned_in[name] != path and is_seam(path, node))):
                yield f"{path.relative_to(SOURCE)}:{node.lineno} {name}", calls[name] == 1


def is_super(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"


def is_seam(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function of `torch_compat` uses a private name of torch: its body can stand in no other room."""
    if not path.is_relative_to(SOURCE / "torch_compat"):
        return False
    attributes = [node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    imports = [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
    return any(name.startswith("_") for name in attributes) or any("._" in text or " _" in text for text in imports)


def any_annotations(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Annotations that mention `Any`."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            annotations: list[ast.expr | None] = []
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                annotations.append(node.returns)
            elif isinstance(node, ast.arg | ast.AnnAssign):
                annotations.append(node.annotation)
            for annotation in annotations:
                if annotation is not None and "Any" in {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)}:
                    yield f"{path.relative_to(SOURCE)}:{annotation.lineno} {ast.unparse(annotation)}"


def own_attributes(tree: ast.Module) -> set[str]:
    """Attributes that classes of a file declare, or set on `self`."""
    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            targets += [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
        elif isinstance(node, ast.Assign):
            targets += [target for target in node.targets if isinstance(target, ast.Attribute) and is_self(target)]
    return {target.id if isinstance(target, ast.Name) else ast.unparse(target).rpartition(".")[2] for target in targets}


def is_self(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id == "self"


def private_torch(trees: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Uses of private names of torch outside `torch_compat`, by file.

    An attribute of `self` that a class of the file declares or sets is the file's own.
    """
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        name = str(path.relative_to(SOURCE))
        if name.startswith("torch_compat/"):
            continue
        own = own_attributes(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                if node.attr in own and is_self(node):
                    continue
                text = ast.unparse(node)
                of_torch = text.startswith(("torch.", "nn.")) and any(
                    part.startswith("_") and not part.startswith("__") for part in text.split(".")
                )
                if of_torch or node.attr in PRIVATE_OF_MODULE:
                    found[name].append(f"{node.lineno} {text}")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                if any(part.startswith("_") for part in parts):
                    found[name].append(f"{node.lineno} {ast.unparse(node)}")
    return found


def main() -> None:
    """Prints the table, or one of the lists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=("small", "inline", "any", "private"))
    parser.add_argument("folder", nargs="?", help="only this folder of the source is listed")
    arguments = parser.parse_args()
    trees = parsed(SOURCE)
    small, broad, private = [*small_functions(trees)], [*any_annotations(trees)], private_torch(trees)
    inline = [function for function, is_movable in small if is_movable]
    if arguments.list:
        lists = {
            "small": [function for function, _ in small],
            "inline": inline,
            "any": broad,
            "private": [f"{name}:{use}" for name, uses in private.items() for use in uses],
        }
        print("\n".join(line for line in lists[arguments.list] if line.startswith(arguments.folder or "")))
        return
    functions = sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for t in trees.values() for n in ast.walk(t))
    print(f"files {len(trees)}, lines {sum(len(path.read_text().splitlines()) for path in trees):,}")
    print(f"functions {functions:,}, small with one caller {len(small)}, of these fit to inline {len(inline)}")
    print(f"annotations with Any {len(broad):,}")
    print(f"files outside torch_compat with private names of torch {len(private)}")


if __name__ == "__main__":
    main()
