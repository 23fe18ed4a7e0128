"""Counts what the structure of the source, the tests and the docs is judged by.

    python tools/measure_code.py [--list any|private] [FOLDER]

- code lines: those that are not blank, comment or docstring.
- test files that look inside: those that import a module that users do not import from, or patch a name of the library.
- any: annotations that are, or contain, `Any`.
- private: attributes and imports of torch whose names begin with an underscore, by file.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, TESTS, DOCS = ROOT / "src" / "modelstate", ROOT / "tests", ROOT / "docs"
PUBLIC = {"modelstate", *(f"modelstate.{name}" for name in ("errors", "rules", "merge", "store", "serve"))}
"""The packages that users import from, besides `modelstate.integrations`."""
WORD_ANY = r"\bAny\b"
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
PRIVATE_OF_MODULE = {
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_named_members", "_apply", "_version"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    *("_load_from_state_dict", "_save_to_state_dict", "_backward_hooks", "_post_accumulate_grad_hooks", "_metadata"),
}
"""Private names of `torch.nn.Module` and `torch.Tensor` that are reached through an object."""


def parsed(folder: Path) -> dict[Path, ast.Module]:
    """Every file of the folder, parsed."""
    return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


def code_lines(text: str) -> int:
    """Returns the lines that are not blank, comment or docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def looks_inside(text: str) -> bool:
    """Returns whether a test imports a module that users do not import from, or patches a name of the library."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "modelstate":
            packages = [f"{node.module}.{alias.name}" for alias in node.names]
            has_private = any(alias.name.startswith("_") for alias in node.names)
            rooms = [name for name in packages if (SOURCE / name.removeprefix("modelstate.")).is_dir()]
            names = [node.module or "", *(rooms if node.module == "modelstate" else ())]
            if has_private:
                return True
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "modelstate"]
        if any(name not in PUBLIC and not name.startswith("modelstate.integrations") for name in names):
            return True
    return bool(re.search(r'(?:patch\.object|setattr|mock\.patch)\(\s*(?:sys\.modules\[)?"modelstate', text))


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
    parser.add_argument("--list", choices=("any", "private"))
    parser.add_argument("folder", nargs="?", default="", help="only this folder of the source is listed")
    arguments = parser.parse_args()
    trees = parsed(SOURCE)
    broad, private = [*any_annotations(trees)], private_torch(trees)
    if arguments.list:
        uses = [f"{name}:{use}" for name, uses in private.items() for use in uses]
        lines = broad if arguments.list == "any" else uses
        print("\n".join(line for line in lines if line.startswith(arguments.folder)))
        return
    classes = Counter(n.name for t in trees.values() for n in ast.walk(t) if isinstance(n, ast.ClassDef))
    texts = [path.read_text() for path in trees]
    tests = [path.read_text() for path in TESTS.rglob("*.py")]
    test_files = [path.read_text() for path in TESTS.rglob("test_*.py")]
    inside = sum(map(looks_inside, test_files)) / len(test_files)
    words = sum(len(path.read_text().split()) for path in DOCS.rglob("*.md"))
    print(f"files {len(trees)}, lines {sum(len(text.splitlines()) for text in texts):,}")
    print(f"code lines {sum(map(code_lines, texts)):,}")
    twice = sum(number > 1 for number in classes.values())
    print(f"classes {classes.total()}, class names used more than once {twice}")
    print(f"the word Any {sum(len(re.findall(WORD_ANY, text)) for text in texts)}")
    print(f"test lines {sum(len(text.splitlines()) for text in tests):,}, test files that look inside {inside:.2f}")
    print(f"words below docs/ {words:,}")
    print(f"annotations with Any {len(broad):,}")
    print(f"files outside torch_compat with private names of torch {len(private)}")


if __name__ == "__main__":
    main()
