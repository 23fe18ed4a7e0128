"""`modelstate store`, `convert` and `verify`: what they print, and their exit codes."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import modelstate as ms
from modelstate.cli.common import parse_size
from modelstate.store.record import ObjectEntry
from tests.cli.command import run
from tests.store.common import flip


def model_at(step: int) -> nn.Module:
    torch.manual_seed(step)
    return nn.Linear(8, 8)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of three steps in the working directory."""
    monkeypatch.chdir(tmp_path)
    with ms.Store(tmp_path / "run") as store:
        for step in (10, 20, 30):
            model = model_at(step)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            objects = {"model": model, "optimizer": optimizer, "epoch": step // 10}
            store.save(step, objects, metrics={"loss": 1 / step}, pin=step == 10)
    return tmp_path / "run"


def damage(step: int) -> None:
    """Flips a bit of a tensor."""
    (path,) = Path(f"run/step-{step:09d}").glob("model-*.safetensors")
    flip(path)


def cut(step: int) -> None:
    (path,) = Path(f"run/step-{step:09d}").glob("model-*.safetensors")
    os.truncate(path, 20)


class TestLs:
    def test_shows_the_steps(self) -> None:
        done = run("store", "ls", "run")
        assert done.exit_code == 0
        lines = done.stdout.splitlines()
        assert [line.split()[0] for line in lines] == ["step", "10", "20", "30"]
        assert "pinned" in lines[1]
        assert "loss=0.05" in lines[2]

    def test_deltas(self) -> None:
        with ms.Store("deltas", delta=ms.Delta()) as store:
            model = nn.Linear(100, 100)
            for step in (1, 2, 3):
                model.weight.data[0, :50] += 1
                store.save(step, {"model": model})
        lines = run("store", "ls", "deltas").stdout.splitlines()
        assert lines[0].split() == ["step", "saved", "bytes", "written", "metrics"]
        assert ["full" in line for line in lines] == [False, True, False, False]
        assert "delta, 2 layers" in lines[3]
        listed = json.loads(run("store", "ls", "deltas", "--json").stdout)
        assert [fields["patches"] for fields in listed] == [0, 1, 2]
        assert listed[2]["bytes"] > 40_000 > 8 * listed[2]["written"]
        assert run("store", "verify", "deltas").stdout.count("whole") == 3
        assert "\nfull: no changes of a step before it\n" in run("inspect", "deltas/step-000000001").stdout
        shown = run("inspect", "deltas/step-000000003").stdout
        assert "delta: changes of step 3 (0.50% of the elements), step 2 (0.50% of the elements)\n" in shown
        fields = json.loads(run("inspect", "deltas/step-000000003", "--json").stdout)
        assert fields["metadata"]["changed elements"] == {"step 2": 50, "step 3": 50}
        assert run("store", "restore", "deltas", "model.safetensors").exit_code == 0
        assert ms.diff("model.safetensors", model).is_equal
        assert "delta" not in run("inspect", "model.safetensors").stdout

    def test_json(self) -> None:
        found = json.loads(run("store", "ls", "run", "--json").stdout)
        assert [one["step"] for one in found] == [10, 20, 30]
        assert [one["pinned"] for one in found] == [True, False, False]
        assert found[1]["metrics"] == {"loss": 0.05}
        assert found[0]["bytes"] > 8 * 9 * 4

    def test_a_damaged_one(self) -> None:
        cut(20)
        done = run("store", "ls", "run")
        assert done.exit_code == 1
        assert [line.split()[0] for line in done.stdout.splitlines() if "damaged" in line] == ["20"]

    def test_one_of_a_newer_version_is_not_called_damaged(self) -> None:
        record = Path("run/step-000000020/checkpoint.json")
        record.write_text(json.dumps(json.loads(record.read_text()) | {"format": 99}))
        os.rename("run/step-000000030", "run/step-000000040")
        listed = run("store", "ls", "run")
        assert listed.exit_code == 1
        assert ["newer version" in line for line in listed.stdout.splitlines()] == [False, False, True, False]
        assert "other store" in listed.stdout.splitlines()[3]
        problems = [one["problem"] for one in json.loads(run("store", "ls", "run", "--json").stdout)]
        assert problems == [None, "newer version", "other store"]
        for step, words in ((20, "written by a newer version"), (40, "from another store, or under another step")):
            restored = run("store", "restore", "run", "m.safetensors", "--step", str(step))
            assert restored.exit_code == 1
            assert words in restored.stderr
            assert "damaged" not in listed.stdout + restored.stderr

    @pytest.mark.parametrize("command", ["ls", "verify", "prune", "restore"])
    def test_no_store(self, command: str, tmp_path: Path) -> None:
        more = {"prune": ["--keep-last", "1"], "restore": ["out"]}.get(command, [])
        Path("file").write_text("mine")
        Path("dangling").symlink_to("nowhere")
        Path("loop").symlink_to("loop")
        said = {
            "nothing": "no such file or directory",
            ".": "not a store",
            "file": "this is a file",
            "dangling": "link to something that is not there",
            "loop": "back to itself",
        }
        for path, words in said.items():
            done = run("store", command, path, *more)
            assert (done.exit_code, done.stdout) == (1, "")
            assert words in done.stderr, path
        assert "modelstate inspect file" in run("store", command, "file", *more).stderr
        assert sorted(os.listdir(tmp_path)) == ["dangling", "file", "loop", "run"]

    def test_one_that_cannot_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(path: str) -> list[str]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

        os.mkdir("locked")
        monkeypatch.setattr(os, "listdir", refused)
        for directory in ("run", "locked"):
            done = run("store", "ls", directory)
            assert (done.exit_code, done.stdout) == (1, "")
            assert f"error: {directory}: the store cannot be read" in done.stderr
            assert "ask the owner of the directory for the permissions" in done.stderr

    def test_a_bucket_without_credentials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("obstore")
        for name in [name for name in os.environ if name.startswith("AZURE_")]:
            monkeypatch.delenv(name)
        done = run("store", "ls", "az://container/run")
        assert (done.exit_code, done.stdout, done.stderr.count("to do:")) == (1, "", 1)
        assert done.stderr.startswith("error: az://container/run: there are no credentials for az://")

    def test_an_empty_one(self) -> None:
        with ms.Store("empty") as store:
            store.prune(1)  # which writes store.json
        assert run("store", "ls", "empty").stdout == "no checkpoints\n"
        assert run("store", "verify", "empty").stdout == "no checkpoints\n"
        assert run("store", "restore", "empty", "out").exit_code == 1


class TestVerify:
    @pytest.mark.parametrize("command", [["store", "verify"], ["verify"]])
    def test_a_line_for_each_step(self, command: list[str]) -> None:
        done = run(*command, "run")
        assert done.exit_code == 0
        assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["step 10", "step 20", "step 30"]
        assert done.stdout.count("whole") == 3

    @pytest.mark.parametrize("spoil", [damage, cut])
    def test_a_damaged_one(self, spoil: object) -> None:
        assert callable(spoil)
        spoil(20)
        done = run("store", "verify", "run")
        assert done.exit_code == 1
        lines = done.stdout.splitlines()
        assert ["whole" in line for line in lines] == [True, False, True]
        assert "damaged" in lines[1]
        assert run("store", "verify", "run", "--step", "20").exit_code == 1
        assert run("store", "verify", "run", "--step", "30").exit_code == 0

    def test_no_such_step(self) -> None:
        done = run("store", "verify", "run", "--step", "25")
        assert done.exit_code == 1
        assert "10, 20, 30" in done.stderr


def take_away_when_read(monkeypatch: pytest.MonkeyPatch, *steps: int, save: int | None = None) -> None:
    """Somebody takes steps away as soon as one of them is read, and saves another one."""
    real = ObjectEntry.open

    def opened(entry: ObjectEntry, directory: str, *more: Any, **options: Any) -> ms.Checkpoint:
        if any(f"step-{step:09d}" in directory for step in steps):
            monkeypatch.setattr(ObjectEntry, "open", real)
            for step in steps:
                shutil.rmtree(f"run/step-{step:09d}")
            if save is not None:
                with ms.Store("run") as store:
                    store.save(save, {"model": model_at(save)})
        return real(entry, directory, *more, **options)

    monkeypatch.setattr(ObjectEntry, "open", opened)


class TestWhileARunPrunes:
    def test_verify_goes_on_with_the_rest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        take_away_when_read(monkeypatch, 10, 20)
        done = run("store", "verify", "run")
        assert done.exit_code == 0, done.output
        lines = done.stdout.splitlines()
        assert lines[:2] == ["step 10: removed meanwhile", "step 20: removed meanwhile"]
        assert lines[2].startswith("step 30: ")
        assert "whole" in lines[2]

    def test_verify_reads_what_has_come_where_all_has_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        take_away_when_read(monkeypatch, 10, 20, 30, save=40)
        done = run("store", "verify", "run")
        assert done.exit_code == 0, done.output
        assert [line.split()[1] for line in done.stdout.splitlines()] == ["10:", "20:", "30:", "40:"]
        assert done.stdout.count("whole") == 1

    def test_restore_takes_another_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        take_away_when_read(monkeypatch, 20, 30, save=40)
        done = run("store", "restore", "run", "m")
        assert done.stdout.startswith("step 40: ")
        take_away_when_read(monkeypatch, 10)
        assert run("store", "restore", "run", "m", "--step", "10").exit_code == 1


class TestPrune:
    def test_keeps_what_it_is_told(self) -> None:
        dry = run("store", "prune", "run", "--keep-last", "1", "--dry-run")
        assert ms.Store("run").steps() == (10, 20, 30)
        done = run("store", "prune", "run", "--keep-last", "1")
        assert (dry.exit_code, done.exit_code) == (0, 0)
        assert ms.Store("run").steps() == (10, 30)
        assert dry.stdout.splitlines()[0] == "would be removed: 1 step: 20"
        assert done.stdout.splitlines()[:2] == ["removed: 1 step: 20", "kept: 2 steps: 10, 30"]
        assert run("store", "prune", "run", "--keep-last", "1").stdout.startswith("nothing to remove\n")

    def test_other_rules(self) -> None:
        with ms.Store("run") as store:
            store.unpin(10)
        done = run("store", "prune", "run", "--best", "1", "--metric", "loss", "--max")
        assert done.exit_code == 0, done.output
        assert ms.Store("run").steps() == (10, 30)
        assert run("store", "prune", "run", "--every-steps", "1000").exit_code == 0
        done = run("store", "prune", "run", "--best", "1", "--metric", "accuracy")
        assert (done.exit_code, "to do: --metric of a metric" in done.stderr) == (1, True)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ([], "say what is kept"),
            (["--best", "1"], "--best and --metric go together"),
            (["--keep-last", "-1"], "--keep-last"),
            (["--every-hours", "nan"], "--every-hours must be a time: nan; give hours"),
        ],
    )
    def test_a_wrong_command_line(self, options: list[str], text: str) -> None:
        done = run("store", "prune", "run", *options)
        assert (done.exit_code, text in done.stderr) == (2, True)
        assert ms.Store("run").steps() == (10, 20, 30)


class TestRestore:
    def test_the_newest(self) -> None:
        done = run("store", "restore", "run", "model.safetensors")
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("step 30: ")
        found = load_file("model.safetensors")
        assert all(torch.equal(found[name], one) for name, one in model_at(30).state_dict().items())
        assert run("verify", "model.safetensors").exit_code == 0

    def test_another_step_and_object(self) -> None:
        assert run("store", "restore", "run", "m.pt", "--step", "20", "--format", "torch").exit_code == 0
        model_at(1).load_state_dict(torch.load("m.pt"))
        assert torch.equal(torch.load("m.pt")["weight"], model_at(20).weight)
        done = run("store", "restore", "run", "m", "--object", "epoch")
        assert done.exit_code == 1
        assert "model" in done.stderr
        assert run("store", "restore", "run", "m", "--step", "11").exit_code == 1
        assert run("store", "restore", "run", "m", "--format", "onnx").exit_code == 2
        assert not Path("m").exists()

    def test_a_damaged_one_is_passed_over(self) -> None:
        damage(30)
        done = run("store", "restore", "run", "model.safetensors")
        assert done.exit_code == 3
        assert done.stdout.startswith("step 20: ")
        assert "step 30 is passed over" in done.stderr
        done = run("store", "restore", "run", "model.safetensors", "--overwrite", "--json")
        assert done.exit_code == 3
        report = json.loads(done.stdout)
        assert (report["step"], [skipped["step"] for skipped in report["skipped"]]) == (20, [30])
        assert "step 30 is passed over" in report["skipped"][0]["problem"]
        assert report["tensors"] == 2
        done = run("store", "restore", "run", "other.safetensors", "--step", "20", "--json")
        assert done.exit_code == 0
        assert (json.loads(done.stdout)["step"], json.loads(done.stdout)["skipped"]) == (20, [])
        before = Path("model.safetensors").read_bytes()
        done = run("store", "restore", "run", "model.safetensors", "--step", "30")
        assert done.exit_code == 1
        assert "bias" in done.stderr
        assert "leave out --step" in done.stderr
        assert Path("model.safetensors").read_bytes() == before

    def test_an_error_after_a_damaged_one_was_passed_over(self) -> None:
        damage(30)
        done = run("store", "restore", "run", "m", "--object", "epoch")
        assert done.exit_code == 1
        note, error = done.stderr.splitlines()[:2]
        assert note.startswith("step 30 is passed over: ")
        assert error.startswith("error: run/step-000000020: ")
        done = run("store", "restore", "run", "m", "--object", "epoch", "--json")
        assert json.loads(done.stdout)["where"].endswith("run/step-000000020")
        assert done.stderr.startswith("step 30 is passed over: ")

    def test_all_are_damaged(self) -> None:
        for step in (10, 20, 30):
            damage(step)
        done = run("store", "restore", "run", "model.safetensors")
        assert done.exit_code == 1
        assert done.stdout == ""
        assert not Path("model.safetensors").exists()

    def test_a_file_that_is_there(self) -> None:
        Path("model.safetensors").write_text("mine")
        done = run("store", "restore", "run", "model.safetensors")
        assert done.exit_code == 1
        assert "to do: another path, or --overwrite to replace it" in done.stderr
        assert Path("model.safetensors").read_text() == "mine"
        assert run("store", "restore", "run", "model.safetensors", "--overwrite").exit_code == 0
        assert set(load_file("model.safetensors")) == {"weight", "bias"}


def test_files_are_verified() -> None:
    ms.save(model_at(1), "ours.safetensors")
    torch.save(model_at(1).state_dict(), "torchs.pt")
    for path, algorithm in (("ours.safetensors", "xxh3-128"), ("torchs.pt", "crc32")):
        done = run("verify", path)
        assert done.exit_code == 0
        assert algorithm in done.stdout
    flip(Path("ours.safetensors"))
    done = run("verify", "ours.safetensors")
    assert (done.exit_code, done.stdout, "bias" in done.stderr) == (1, "", True)


class TestConvert:
    @pytest.fixture(autouse=True)
    def training(self) -> None:
        torch.save({"epoch": 3, "model": model_at(1).state_dict()}, "training.pt")

    def test_dtype_names_and_shards(self) -> None:
        done = run(
            *("convert", "training.pt", "out.safetensors", "--key", "model", "--dtype", "bfloat16"),
            *("--rename", "weight=w", "--shard-size", "64B", "--max-memory", "100MB"),
        )
        assert done.exit_code == 0, done.output
        assert "2 shards" in done.stdout
        found = ms.open("out.safetensors")
        assert set(found) == {"w", "bias"}
        assert torch.equal(found.tensor("w"), model_at(1).weight.bfloat16())

    @pytest.mark.parametrize("options", [(), ("--shard-size", "64B")], ids=["a file", "shards"])
    def test_what_is_there_is_replaced_only_on_demand(self, options: tuple[str, ...], tmp_path: Path) -> None:
        arguments = ("convert", "training.pt", "out.safetensors", "--key", "model", *options)
        assert run(*arguments).exit_code == 0
        before = {path: path.read_bytes() for path in tmp_path.glob("out*")}
        torch.save({"model": model_at(2).state_dict()}, "training.pt")
        done = run(*arguments)
        assert done.exit_code == 1
        assert "to do: another path, or --overwrite to replace it" in done.stderr
        assert {path: path.read_bytes() for path in tmp_path.glob("out*")} == before
        assert run(*arguments, "--overwrite").exit_code == 0
        assert torch.equal(ms.open("out.safetensors").tensor("weight"), model_at(2).weight)

    def test_a_model_says_what_is_to_be_filled_in(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        Path("my_grown_model.py").write_text(
            "import torch\nimport modelstate as ms\n"
            "def build():\n"
            "    return torch.nn.ModuleDict({'new': torch.nn.Linear(3, 2), 'old': torch.nn.Linear(2, 3)})\n"
            "rules = [ms.rules.Rename('*', 'old.*'), ms.rules.Fill('new.*', 0.5)]\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        arguments = ("convert", "training.pt", "out.safetensors", "--key", "model", "--rules", "my_grown_model:rules")
        done = run(*arguments)
        assert done.exit_code == 1
        assert "to do: --model MODEL" in done.stderr
        done = run(*arguments, "--model", "my_grown_model:build")
        assert done.exit_code == 0, done.output
        found = ms.open("out.safetensors")
        assert set(found) == {"old.weight", "old.bias", "new.weight", "new.bias"}
        assert found.tensor("new.weight").eq(0.5).all()

    @pytest.mark.parametrize(
        ("target", "options", "says"),
        [
            ("x.gguf", (), ".safetensors for safetensors; .pt, .pth, .bin or .ckpt"),
            ("x.v2", (), "--format"),
            ("x.pt", ("--format", "safetensors"), "'torch' for a path that ends in .pt"),
            ("x.safetensors", ("--format", "torch"), "'safetensors' for a path that ends in .safetensors"),
            ("x.safetensors.index.json", (), "x.safetensors' and --shard-size"),
        ],
    )
    def test_a_suffix_that_is_not_that_of_the_format(self, target: str, options: tuple[str, ...], says: str) -> None:
        done = run("convert", "training.pt", target, *options)
        assert done.exit_code == 2
        assert says in " ".join(done.stderr.replace("│", " ").split())
        assert not Path(target).exists()

    @pytest.mark.parametrize(
        ("options", "code", "says"),
        [
            (["--format", "onnx"], 2, "onnx"),
            (["--dtype", "int8"], 2, "int8"),
            (["--shard-size", "much"], 2, "much"),
            (["--max-memory", "0"], 2, "0"),
            (["--max-memory", "10B"], 1, "--max-memory"),
            (["--ignore", "nothing*"], 1, "match nothing"),
            (["--key", "nothing"], 1, "--key"),
            ([], 1, "--overwrite"),
            (["--format", "torch", "--shard-size", "1MB"], 1, "shards"),
        ],
    )
    def test_what_is_wrong(self, options: list[str], code: int, says: str, tmp_path: Path) -> None:
        Path("out").write_text("mine")
        before = sorted(os.listdir(tmp_path))
        done = run("convert", "training.pt", "out", *options, *(["--overwrite"] if says != "--overwrite" else []))
        assert done.exit_code == code
        assert says in done.stderr
        assert "Traceback" not in done.stderr
        assert Path("out").read_text() == "mine"
        assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1B", 1), ("512MB", 512_000_000), ("5 GB", 5_000_000_000), ("1.5kb", 1500), ("2GiB", 2 << 30), ("7b", 7)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


def test_urls_of_local_files(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    for done in (
        run("store", "ls", f"{url}/run"),
        run("store", "verify", f"{url}/run/"),
        run("verify", f"{url}/run"),
        run("store", "restore", f"{url}/run", f"{url}/new/a/model.safetensors"),
        run("convert", f"{url}/new/a/model.safetensors", f"{url}/new/b/model.safetensors"),
        run("inspect", f"{url}/new/a/model.safetensors", "--html", f"{url}/new/d/page.html"),
    ):
        assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a", "b", "d"]
    assert run("convert", "new/a/model.safetensors", "ftp://host/b/model.safetensors").exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run"]


@pytest.mark.parametrize("url", ["https://127.0.0.1:1/run?token=secret", "hf://org/name"])
@pytest.mark.parametrize("command", [("ls",), ("verify",), ("prune", "--keep-last", "1")])
def test_urls_of_places_without_stores(url: str, command: tuple[str, ...]) -> None:
    name, *options = command
    done = run("store", name, url, *options)
    assert done.exit_code == 1
    assert "a store is a directory, or a prefix of a bucket" in done.output
    assert "secret" not in done.output
