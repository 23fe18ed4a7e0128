"""`modelstate live follow`: a store in one process, an app in another."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torch import nn

import modelstate as ms
from modelstate.cli.main import app as cli
from tests.programs import Program, code_of
from tests.serve.serving import TOKEN, App, serving
from tests.serve.stores import damage, linear, save

SECONDS = 60.0


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    with serving(tmp_path) as made:
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ms.Store]:
    with ms.Store(tmp_path / "run") as made:
        yield made


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSTATE_TOKEN", TOKEN)


def once(store: ms.Store | Path, url: str, *options: str) -> Result:
    directory = store.directory if isinstance(store, ms.Store) else str(store)
    return CliRunner().invoke(cli, ["live", "follow", directory, url, "--once", *options])


class TestOnce:
    @pytest.mark.slow
    def test_the_app_takes_the_newest(self, app: App, store: ms.Store) -> None:
        save(store, 1)
        path = save(store, 2)
        done = once(store, app.url)
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout == f"step 2: version 2 serves, from {path}\n"
        assert Path(app.swaps[0]).parent == path
        assert app.live.version == 2
        again = once(store, app.url)
        assert (again.exit_code, again.stdout, len(app.swaps)) == (0, done.stdout, 1)

    @pytest.mark.slow
    def test_the_best(self, app: App, store: ms.Store) -> None:
        for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
            save(store, step, metrics={"accuracy": accuracy})
        assert once(store, app.url, "--select", "best:accuracy:max").stdout.startswith("step 2:")
        assert once(store, app.url, "--select", "best:accuracy").stdout.startswith("step 1:")

    @pytest.mark.slow
    def test_another_object(self, app: App, store: ms.Store) -> None:
        store.save(1, {"model": nn.Linear(2, 2), "ema": linear(3)})
        assert once(store, app.url).exit_code == 1
        done = once(store, app.url, "--object", "ema")
        assert (done.exit_code, app.swaps[-1].endswith("ema.safetensors.index.json")) == (0, True)

    @pytest.mark.slow
    def test_a_bad_one_is_skipped(self, app: App, store: ms.Store) -> None:
        save(store, 1)
        damage(save(store, 2))
        store.save(3, {"model": linear(float("nan"))})
        done = once(store, app.url)
        assert done.exit_code == 1
        assert done.stdout.startswith("step 1: version 2 serves")
        assert done.stderr.count("error: ") == 2
        assert "WeightsError" in done.stderr
        assert "the checkpoint is damaged" in done.stderr
        assert len(app.swaps) == 2

    @pytest.mark.parametrize(
        ("status", "says"),
        [
            (401, "refuses the token"),
            (403, "refuses checkpoints outside"),
            (404, "does not find the checkpoint"),
            (409, "another swap of the app"),
            (422, "refuses the checkpoint"),
            (500, "is not valid"),
        ],
    )
    def test_what_the_app_answers(self, app: App, store: ms.Store, status: int, says: str) -> None:
        save(store, 1)
        app.answers.append((status, {"error": "Kind", "detail": "in words"}))
        done = once(store, app.url)
        assert (done.exit_code, done.stdout) == (1, "")
        assert says in done.stderr
        assert f"{status} Kind: in words" in done.stderr
        assert done.stderr.count("error: ") == 1
        assert TOKEN not in done.stderr

    def test_no_app(self, store: ms.Store, tmp_path: Path) -> None:
        with serving(tmp_path) as gone:
            pass
        save(store, 1)
        done = once(store, gone.url)
        assert done.exit_code == 1
        assert "the app does not answer" in done.stderr

    def test_no_store_and_no_checkpoint(self, app: App, tmp_path: Path) -> None:
        done = once(tmp_path / "nothing", app.url)
        assert done.exit_code == 1
        assert "the directory of the store does not exist" in done.stderr
        (tmp_path / "empty").mkdir()
        done = once(tmp_path / "empty", app.url)
        assert (done.exit_code, "no checkpoint for --select latest" in done.stderr) == (1, True)
        assert sorted(os.listdir(tmp_path)) == ["empty"]


class TestCommandLine:
    def test_the_token_of_a_file(
        self, app: App, store: ms.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MODELSTATE_TOKEN", "another")
        (tmp_path / "token").write_text(f"{TOKEN}\n")
        save(store, 1)
        assert once(store, app.url).exit_code == 1
        assert once(store, app.url, "--token-file", str(tmp_path / "token")).exit_code == 0

    @pytest.mark.parametrize("text", [None, "", "\n", "two words", "\x00", "caf\u00e9"])
    def test_no_token(self, app: App, store: ms.Store, tmp_path: Path, text: str | None) -> None:
        if text is not None:
            (tmp_path / "token").write_text(text)
        done = once(store, app.url, "--token-file", str(tmp_path / "token"))
        assert (done.exit_code, app.asked) == (2, [])
        assert "token" in done.stderr
        assert "caf" not in done.stderr

    def test_no_token_at_all(self, app: App, store: ms.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MODELSTATE_TOKEN")
        done = once(store, app.url)
        assert done.exit_code == 2
        assert "MODELSTATE_TOKEN" in done.stderr

    @pytest.mark.parametrize(
        ("option", "value", "text"),
        [
            ("--select", "newest", "--select has an unknown value: 'newest'; give"),
            ("--object", "", "--object must be the name of an object"),
            *[
                (option, value, f"Invalid value for '{option}': '{value}' is not a number of seconds")
                for option, value in (("--poll", "0"), ("--poll", "soon"), ("--poll", "nan"), ("--timeout", "inf"))
            ],
        ],
    )
    def test_what_is_wrong(self, app: App, store: ms.Store, option: str, value: str, text: str) -> None:
        done = once(store, app.url, option, value)
        assert (done.exit_code, done.stdout, app.asked) == (2, "", [])
        assert text in done.stderr

    def test_no_url_and_no_directory(self, app: App, store: ms.Store, tmp_path: Path) -> None:
        assert once(store, "localhost:8000").exit_code == 2
        (tmp_path / "file").write_text("x")
        assert once(tmp_path / "file", app.url).exit_code == 2

    def test_a_password_is_not_shown(self, store: ms.Store) -> None:
        done = once(store, "http://user:hidden@127.0.0.1:1")
        assert done.exit_code == 2
        assert "hidden" not in done.output

    def test_help(self) -> None:
        done = CliRunner().invoke(cli, ["live", "--help"])
        assert done.exit_code == 0
        assert "follow" in done.stdout


class Command:
    """`modelstate live follow` as a process."""

    def __init__(self, directory: str, url: str, *options: str) -> None:
        command = ["-m", "modelstate", "live", "follow", directory, url, "--poll", "0.02", *options]
        token = {"MODELSTATE_TOKEN": os.environ["MODELSTATE_TOKEN"]}
        self.process = Program(code_of(command), environment=token, finalizes=True)
        self._read = 0

    def line(self, stream: str = "out") -> str:
        """Returns the next line that it writes to one of its streams; "" where it has ended."""
        while not (found := self.process.written(stream)[self._read :].partition("\n"))[1]:
            if self.process.has_ended:
                return ""
            time.sleep(0.01)
        self._read += len(found[0]) + 1 if stream == "out" else 0
        return found[0]

    def end(self, number: int | None = None) -> tuple[int, str, str]:
        """Exit code, and what was written to the standard output after the last `line`, and to that of errors."""
        if number is not None:
            os.kill(self.process.pid, number)
        done = self.process.wait(SECONDS)
        return done.returncode, done.stdout[self._read :], done.stderr


@pytest.fixture
def command() -> Iterator[Callable[..., Command]]:
    made: list[Command] = []

    def start(*given: str) -> Command:
        made.append(Command(*given))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_follows_until_a_signal(
    app: App, store: ms.Store, command: Callable[..., Command], number: signal.Signals
) -> None:
    save(store, 1)
    process = command(store.directory, app.url)
    assert process.line().startswith("step 1: version 2 serves")
    save(store, 2)
    assert process.line().startswith("step 2: version 3 serves")
    damage(save(store, 3))
    app.answers += [(409, {"error": "SwapBusyError", "detail": "busy"})] * 3
    app.answers += [(422, {"error": "WeightsError", "detail": "NaN"})]
    save(store, 4)
    until = time.monotonic() + 60
    while app.answers and time.monotonic() < until:
        time.sleep(0.01)
    assert not app.answers, "the weights of step 4 were not sent"
    save(store, 5)
    assert process.line().startswith("step 5: version 4 serves")
    code, out, err = process.end(number)
    assert (code, out) == (0, "")
    assert err.splitlines()[-1] == f"ended: {number.name} was received"
    assert err.count("step-000000003: a checkpoint is skipped") == 1
    assert err.count("step-000000004: a checkpoint is skipped") == 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_an_app_that_goes_and_comes_back(
    store: ms.Store, tmp_path: Path, command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)
    with serving(tmp_path) as app:
        app.version_answers += [(503, b"starting")] * 5
        process = command(store.directory, app.url)
        assert process.line().startswith("step 1: version 2 serves")
    code, out, err = process.end(signal.SIGTERM)
    assert (code, out) == (0, "")
    assert err.count("error: ") == 1


@pytest.mark.slow
def test_an_app_that_does_not_take_the_token_ends_it(
    app: App, store: ms.Store, command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELSTATE_TOKEN", "another")
    save(store, 1)
    code, out, err = command(store.directory, app.url).end()
    assert (code, out, err.count("error: ")) == (1, "", 1)
    assert "refuses the token" in err
    assert "another-token" not in err


@pytest.mark.slow
def test_a_signal_while_the_app_is_at_a_swap(
    app: App, store: ms.Store, command: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the answer."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> tuple[int, object]:
        begun.set()
        go_on.wait(SECONDS)
        return 409, {}

    monkeypatch.setattr(app, "swap", slow)
    save(store, 1)
    process = command(store.directory, app.url)
    try:
        assert begun.wait(SECONDS)
        code, _, err = process.end(signal.SIGTERM)
    finally:
        go_on.set()
    assert (code, err) == (0, "ended: SIGTERM was received\n")


@pytest.mark.slow
def test_a_store_that_comes_later(app: App, tmp_path: Path, command: Callable[..., Command]) -> None:
    process = command(str(tmp_path / "later"), app.url)
    assert "does not exist" in process.line("err")
    with ms.Store(tmp_path / "later") as store:
        save(store, 1)
    assert process.line().startswith("step 1: version 2 serves")
    assert process.end(signal.SIGTERM)[0] == 0
