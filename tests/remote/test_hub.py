"""Repositories of the hub, at a server that answers as the hub does, and redirects to another host."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from torch import nn

import modelstate as ms
from modelstate.remote import client, hub as hub_files, requests
from tests.remote.servers import FileServer, http_server

pytest.importorskip("obstore")
huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
pytestmark = pytest.mark.slow
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(FileServer):
    """Answers for the repository `org/name`, which has the branch main and the tag v1; large files are elsewhere."""

    elsewhere: str
    files: type["Elsewhere"]
    requests: list[tuple[str, str, str]]
    gated = False
    faults: list[int]
    """The statuses of the next answers; 0 for a connection that is closed."""
    signature = "word"
    """What the addresses have that are given now."""

    def do_GET(self) -> None:
        path = unquote(self.path).partition("?")[0]
        if self.faults and (status := self.faults.pop(0)) != 200:
            if not status:
                self.close_connection = True
                return None
            return self._reply(status, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        self.requests.append((self.command, path, self.headers.get("Authorization", "")))
        known = {f"/api/models/org/name/revision/{revision}" for revision in ("main", "v1", COMMIT)}
        if path in {"/api/models/org/name", *known}:
            names = [str(file.relative_to(self.directory)) for file in self.directory.rglob("*") if file.is_file()]
            info = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in sorted(names)]}
            return self._reply(200, json.dumps(info).encode())
        prefix = f"/org/name/resolve/{COMMIT}/"
        file = self.directory / path.removeprefix(prefix)
        if self.gated:
            return self._reply(403, b"", {"X-Error-Code": "GatedRepo"})
        if path.startswith("/api/models/org/name"):
            return self._reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if not path.startswith("/org/name"):
            return self._reply(401, b"", {"X-Error-Code": "RepoNotFound"})
        if not path.startswith(prefix) or not file.is_file():
            return self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        linked = {"X-Linked-Size": str(file.stat().st_size), "X-Linked-Etag": f'"{digest}"'}
        signed = f"{self.elsewhere}/{file.name}?signature={self.signature}"
        return self._reply(302, b"", {"X-Repo-Commit": COMMIT, "Location": signed, **linked})

    do_HEAD = do_GET


class Elsewhere(FileServer):
    """The host of the files: it takes a signature, and must not get a token."""

    requests: list[tuple[str, str, str]]
    expired: str = ""
    refusal = 403, b"Request has expired"

    def do_GET(self) -> None:
        self.requests.append((self.command, self.path, self.headers.get("Authorization", "")))
        if self.path.endswith(f"={self.expired}"):
            self._reply(*self.refusal)
        else:
            super().do_GET()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    directory = tmp_path / "repository"
    directory.mkdir()
    with ExitStack() as stack:
        files = type("Files", (Elsewhere,), {"directory": directory, "requests": []})
        elsewhere = stack.enter_context(http_server(files))
        handler = type(
            "Handler",
            (Hub,),
            {"directory": directory, "elsewhere": elsewhere, "requests": files.requests, "files": files, "faults": []},
        )
        endpoint = stack.enter_context(http_server(handler))
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        client.hub_store.cache_clear()
        hub_files._files.clear()
        yield handler


def make_model(device: str = "cpu", width: int = 96) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, device=device) for _ in range(4)])


def test_a_repository_is_opened_and_loaded(hub: type[Hub]) -> None:
    model = make_model()
    ms.save(model, hub.directory / "model.safetensors", shard_size_bytes=60_000)
    (hub.directory / "README.md").write_text("# A model")
    checkpoint = ms.open("hf://org/name@v1")
    assert [path for _, path, _ in hub.requests if path.startswith("/api/models")] == [
        "/api/models/org/name/revision/v1"
    ]
    assert all(path.startswith(f"hf://org/name@{COMMIT}/") for path in checkpoint.files)
    target = make_model("meta")
    ms.load(target, checkpoint)
    for mine, stored in zip(target.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, stored)
    assert "signature" not in repr(checkpoint) + repr(checkpoint.files) + repr(checkpoint.fingerprints)
    of_files = [request for request in hub.requests if "model" in request[1]]
    assert {(token, "signature" in path) for _, path, token in of_files} == {("", True), ("Bearer hf_token", False)}
    for path in checkpoint.files:
        name = path.rpartition("/")[2]
        assert sum(name in requested for _, requested, _ in hub.requests) <= 4


@pytest.mark.parametrize("is_renewed", [True, False])
def test_an_address_that_has_expired_is_asked_for_again(hub: type[Hub], is_renewed: bool) -> None:
    model = make_model(width=512)
    ms.save(model, hub.directory / "model.safetensors")
    checkpoint = ms.open("hf://org/name")
    target = make_model("meta", 512)
    hub.files.expired = "word"
    hub.signature = "next" if is_renewed else "word"
    del hub.requests[:]
    if not is_renewed:
        with pytest.raises(ms.errors.ReadFailedError, match="403"):
            ms.load(target, checkpoint)
        return
    ms.load(target, checkpoint)
    assert all(map(torch.equal, target.state_dict().values(), model.state_dict().values()))
    assert sum("/resolve/" in path for _, path, _ in hub.requests) == 1  # for all threads


@pytest.mark.parametrize("status", [0, 429, 503])
def test_requests_to_the_hub_are_repeated(hub: type[Hub], monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    model, target = make_model(), make_model("meta")
    ms.save(model, hub.directory / "model.safetensors")
    hub.faults[:] = [status, 200, status, status]  # the revision, and the address
    ms.load(target, "hf://org/name")
    assert not hub.faults
    assert all(map(torch.equal, target.state_dict().values(), model.state_dict().values()))


def test_a_hub_that_stays_unavailable_is_an_error(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults[:] = [503] * 99
    with pytest.raises(ms.errors.ReadFailedError, match="503"):
        ms.open("hf://org/name")
    assert len(hub.faults) == 99 - 1 - requests.RETRIES


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_is_refused_is_an_error_of_its_own(hub: type[Hub], status: int) -> None:
    hub.faults[:] = [status] * 9
    with pytest.raises(ms.errors.SourceAccessError, match="refuses the token") as raised:
        ms.open("hf://org/name")
    assert "HF_TOKEN" in raised.value.remedy
    assert "hf_token" not in str(raised.value)


def test_a_file_of_the_cache_is_read_from_there(hub: type[Hub], tmp_path: Path) -> None:
    model = make_model()
    ms.save(model, hub.directory / "model.safetensors")
    local = Path(huggingface_hub.hf_hub_download("org/name", "model.safetensors", revision=COMMIT))
    del hub.requests[:]
    checkpoint = ms.open(f"hf://org/name@{COMMIT}/model.safetensors")
    assert checkpoint.files == (str(local),)
    assert not hub.requests


@pytest.mark.parametrize("revision", ["", "@v1", f"@{COMMIT}"])
def test_a_name_without_a_scheme_is_a_repository(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model, target = make_model(), make_model("meta")
    ms.save(model, hub.directory / "model.safetensors", shard_size_bytes=60_000)
    url = f"hf://org/name@{COMMIT}"
    checkpoint = ms.open(f"org/name{revision}")
    assert checkpoint.source == url
    assert all(path.startswith(f"{url}/") for path in checkpoint.files)
    assert url in str(ms.plan(target, f"org/name{revision}"))
    report = ms.load(target, f"org/name{revision}")
    assert url in str(report)
    assert all(map(torch.equal, target.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("source", ["org/name", f"org/name@{COMMIT}"])
def test_without_a_connection_a_name_is_read_from_the_cache(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    ms.save(make_model(), hub.directory / "model.safetensors")
    huggingface_hub.hf_hub_download("org/name", "model.safetensors", revision=COMMIT)
    branch = tmp_path / "cache" / "models--org--name" / "refs" / "main"
    branch.parent.mkdir(exist_ok=True)
    branch.write_text(COMMIT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    del hub.requests[:]
    checkpoint = ms.open(source)
    assert checkpoint.source == f"hf://org/name@{COMMIT}"
    assert checkpoint.files[0].startswith(str(tmp_path / "cache"))
    assert not hub.requests


@pytest.mark.parametrize(
    "source",
    ["org/name", "org/name@v1", Path("none/name"), "none/x.safetensors", "none/x.pt@v1", "none/--x", "none/a/b"],
)
def test_what_may_be_local_is_never_asked_of_the_hub(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        ms.open(source)
    assert not hub.requests


@pytest.mark.parametrize(
    ("is_offline", "source", "text"),
    [(False, "org/other", "no such repository"), (False, "org/name@v9", "no such revision"), (True, "org/name", "hub")],
)
def test_a_name_that_is_nowhere_is_an_error_for_both(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_offline: bool, source: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    with pytest.raises(FileNotFoundError, match=f"(?s)no such file or directory.*hf://{source}: .*{text}") as raised:
        ms.open(source)
    assert isinstance(raised.value, ms.ModelStateError)
    assert raised.value.where == str(tmp_path / source)
    assert "for a path: check the path" in raised.value.remedy
    assert "for a repository: " in raised.value.remedy


def test_a_save_to_a_name_is_local(hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ms.errors.SaveError):
        ms.save(make_model(), "org/name")
    assert not hub.requests


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("hf://org/other", "no such repository"),
        ("hf://org/name@v9", "no such revision"),
        ("hf://org/name/other.safetensors", "no such file"),
    ],
)
def test_what_the_hub_lacks_is_an_error_of_its_own(hub: type[Hub], url: str, text: str) -> None:
    ms.save(make_model(), hub.directory / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=text) as raised:
        ms.open(url)
    assert isinstance(raised.value, ms.ModelStateError)
    assert raised.value.remedy


def test_a_gated_repository_is_an_error_of_its_own(hub: type[Hub]) -> None:
    ms.save(make_model(), hub.directory / "model.safetensors")
    hub.gated = True
    with pytest.raises(PermissionError, match="gated"):
        ms.open("hf://org/name")


@pytest.mark.parametrize("url", ["hf://org", "hf://org/name@/x", "hf://org/name/../x", "hf://org/name/a//b"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(TypeError, match="names nothing"):
        ms.open(url)
