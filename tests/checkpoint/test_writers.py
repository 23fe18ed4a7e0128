"""How writers put a file where one is already: the table of docs/checkpoints.md, as far as the writers are installed.

Run it with another version of safetensors first in PYTHONPATH to see what that one does.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

import modelstate as ms

Write = Callable[[Path, float], None]
IN_PLACE, REPLACED = "in place", "replaced"


def state(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((64, 64), value)}


def save_pretrained(path: Path, value: float) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
    model = transformers.BertModel(transformers.BertConfig(intermediate_size=8, **sizes))
    torch.nn.init.constant_(model.pooler.dense.weight, value)
    model.save_pretrained(path)


def dcp_save(path: Path, value: float) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state(value), checkpoint_id=path, no_dist=True)


def by_rename(path: Path, value: float) -> None:
    torch.save(state(value), path.with_name("new"))
    os.replace(path.with_name("new"), path)


def by_shutil(path: Path, value: float) -> None:
    torch.save(state(value), path.with_name("new"))
    shutil.copy(path.with_name("new"), path)


def of_safetensors() -> str:
    """What the installed version does."""
    return IN_PLACE if tuple(map(int, safetensors.__version__.split(".")[:2])) < (0, 8) else REPLACED


WRITERS: dict[str, tuple[Write, str]] = {
    "torch.save": (lambda path, value: torch.save(state(value), path), IN_PLACE),
    "torch.save, legacy format": (
        lambda path, value: torch.save(state(value), path, _use_new_zipfile_serialization=False),
        IN_PLACE,
    ),
    "torch.distributed.checkpoint.save": (dcp_save, IN_PLACE),
    "safetensors.torch.save_file": (lambda path, value: save_file(state(value), path), of_safetensors()),
    "transformers save_pretrained": (save_pretrained, of_safetensors()),
    "modelstate.save": (lambda path, value: ms.save(state(value), path) and None, REPLACED),
    "os.replace": (by_rename, REPLACED),
    "shutil.copy": (by_shutil, IN_PLACE),
}


def data_file(path: Path) -> Path:
    """The file that a writer has made at a path: the path, or the one in the directory."""
    if not path.is_dir():
        return path
    (found,) = (*path.glob("*.safetensors"), *path.glob("*.distcp"))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRITERS)
def test_how_a_file_is_written_over(name: str, tmp_path: Path) -> None:
    write, expected = WRITERS[name]
    path = tmp_path / "model.safetensors"
    write(path, 1.0)
    with data_file(path).open("rb") as first:
        before = first.read()
        write(path, 2.0)
        first.seek(0)
        found = REPLACED if first.read() == before else IN_PLACE
        with data_file(path).open("rb") as now:
            assert now.read() != before
            assert os.path.sameopenfile(first.fileno(), now.fileno()) == (found == IN_PLACE)
    assert found == expected


def test_the_table_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    rows = {
        cells[0].strip().strip("`"): cells[1].strip()
        for line in page.splitlines()
        if line.startswith("| `") and len(cells := line.strip("|").split("|")) == 3
    }
    versions = {"safetensors.torch.save_file", "transformers save_pretrained"}  # which have a row for each kind
    assert {name: rows[name] for name in WRITERS.keys() - versions} == {
        name: how for name, (_, how) in WRITERS.items() if name not in versions
    }
    kind = "from 0.8" if of_safetensors() == REPLACED else "before 0.8"
    assert rows[f"safetensors.torch.save_file`, safetensors {kind}"] == of_safetensors()
