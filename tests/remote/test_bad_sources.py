"""What cannot be read from a server: each is an error of its own, with a remedy, and without secrets."""

import gzip
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

import modelstate as ms
from modelstate.errors import (
    DamagedFileError,
    ReadFailedError,
    SourceAccessError,
    SourceNotFoundError,
    SourceTypeError,
    TruncatedFileError,
    UnknownFormatError,
    WriteFailedError,
)
from tests.programs import Forks
from tests.proxy import FaultProxy
from tests.remote.servers import FileServer, http_server

pytest.importorskip("obstore")


class Odd(FileServer):
    def do_GET(self) -> None:
        status, headers, body = {
            "/page": (200, {"Content-Type": "text/html; charset=utf-8"}, b"<!doctype html>"),
            "/whole": (200, {"Content-Type": "application/octet-stream"}, b"0123"),
            "/ftp": (302, {"Location": "ftp://127.0.0.1/x"}, b""),
            "/file": (302, {"Location": "file:///etc/passwd"}, b""),
            "/moved": (301, {"Location": "file:///etc/passwd"}, b""),
            "/nowhere": (302, {}, b""),
            "/loop": (302, {"Location": "/loop"}, b""),
            "/forbidden": (403, {}, b""),
            "/login": (401, {}, b""),
            "/broken": (500, {}, b""),
            "/gone": (410, {}, b""),
            "/invalid": (400, {}, b""),
            "/method": (405, {}, b""),
            "/conflict": (409, {}, b""),
            "/legal": (451, {}, b""),
            "/unnamed": (206, {}, b"hello"),
            "/unreadable": (206, {"Content-Range": "bytes x-y/z"}, b"hello"),
            "/shifted": (206, {"Content-Range": "bytes 5-9/10"}, b"hello"),
            "/gzip": (206, {"Content-Range": "bytes 0-4/5", "Content-Encoding": "gzip"}, gzip.compress(b"hello")),
            "/gzip-whole": (200, {"Content-Encoding": "gzip"}, gzip.compress(b"hello")),
            "/text": (206, {"Content-Range": "bytes 0-4/5"}, b"hello"),
            "/short": (206, {"Content-Range": "bytes 0-4/5"}, b""),
            "/empty": (416, {}, b"") if "Range" in self.headers else (200, {}, b""),
        }.get(self.path.partition("?")[0], (404, {}, b""))
        self._reply(status, body, headers)

    do_HEAD = do_GET


@pytest.fixture(scope="module")
def odd() -> Iterator[str]:
    with http_server(Odd) as url:
        yield url


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("page", UnknownFormatError, "a web page in place of the file"),
        ("whole", SourceTypeError, "the whole object where a part was asked for"),
        ("ftp", SourceTypeError, "another scheme"),
        ("file", SourceTypeError, "another scheme"),
        ("moved", SourceTypeError, "another scheme"),
        ("nowhere", SourceTypeError, "redirects to no address"),
        ("loop", SourceTypeError, "redirects too often"),
        ("forbidden", SourceAccessError, "refused"),
        ("login", SourceAccessError, "no credentials"),
        ("missing", SourceNotFoundError, "no such object"),
        ("broken", ReadFailedError, "answers with errors"),
        ("gone", SourceNotFoundError, "no such object"),
        *((name, ReadFailedError, "rejects the request") for name in ("invalid", "method", "conflict", "legal")),
        *((name, SourceTypeError, "which part") for name in ("unnamed", "unreadable", "shifted")),
        ("gzip", SourceTypeError, "compresses"),
        ("gzip-whole", SourceTypeError, "compresses"),
        ("text", UnknownFormatError, "a text file"),
        ("short", ReadFailedError, "an empty body"),
        ("empty", TruncatedFileError, "the file is empty\n  found: .*416 Range Not Satisfiable"),
        ("", SourceTypeError, "what is in a directory"),
    ],
)
def test_each_answer_is_an_error_of_its_own(odd: str, name: str, kind: type[ms.ModelStateError], text: str) -> None:
    with pytest.raises(kind, match=text) as raised:
        ms.open(f"{odd}/{name}?signature=word" if name else f"{odd}/")
    assert raised.value.remedy
    assert raised.value.remedy.startswith("try again") == (name in ("broken", "short"))
    assert "word" not in str(raised.value)


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_a_tensor_is_not_taken_from_compressed_bytes(encoding: str, tmp_path: Path) -> None:
    asked: list[str] = []

    class Compresses(FileServer):
        """Sends the header of the file as it is, and everything else compressed."""

        directory = tmp_path

        def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            asked.append(self.headers["Range"])
            if headers and not headers["Content-Range"].startswith("bytes 0-"):
                body, headers = gzip.compress(body), headers | {"Content-Encoding": encoding}
            super()._reply(status, body, headers)

    save_file({"w": torch.zeros(256, 256)}, tmp_path / "x.safetensors")
    model = torch.nn.ParameterDict({"w": torch.ones(256, 256)})
    with http_server(Compresses) as url:
        with pytest.raises(ReadFailedError, match="compresses") as raised:
            ms.load(model, f"{url}/x.safetensors")
        assert len(asked) == len({*asked})  # nothing was asked for again
        assert encoding in raised.value.found
        checkpoint = ms.open(f"{url}/x.safetensors")
        with pytest.raises(ReadFailedError, match="compresses"):
            checkpoint.tensor("w")
    assert bool((model["w"] == 1).all())


def test_an_encoding_that_leaves_the_bytes_alone(s3_client: Any, bucket: str) -> None:
    """As an upload of botocore to a server that stores its header."""
    s3_client().put_object(
        Bucket=bucket, Key="x.safetensors", Body=save({"w": torch.ones(4)}), ContentEncoding="aws-chunked"
    )
    assert torch.equal(ms.open(f"s3://{bucket}/x.safetensors").tensor("w"), torch.ones(4))
    s3_client().put_object(Bucket=bucket, Key="y.safetensors", Body=save({"w": torch.ones(4)}), ContentEncoding="gzip")
    with pytest.raises(SourceTypeError, match="compresses"):
        ms.open(f"s3://{bucket}/y.safetensors")


def test_a_server_that_is_not_there(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for source in ("s3://bucket/x.safetensors", "s3://bucket/x/", "http://127.0.0.1:9/x.safetensors"):
        with pytest.raises(ReadFailedError, match="does not answer") as raised:
            ms.open(source)
        assert "modelstate explain reading" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "code", "cause", "remedy"),
    [
        (403, "RequestTimeTooSkewed", "the clock of this machine", "set the clock"),
        (400, "ExpiredToken", "credentials have expired", "get new ones"),
        (403, "AccessDenied", "access is refused", "ask for the right"),
        (301, "PermanentRedirect", "in another region", "AWS_REGION"),
    ],
)
def test_what_a_bucket_answers(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, status: int, code: str, cause: str, remedy: str
) -> None:
    class Answers(FileServer):
        def do_GET(self) -> None:
            self._reply(status, f"<Error><Code>{code}</Code></Error>".encode())

    with http_server(Answers) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        for call, kind in (
            (lambda: ms.open("s3://bucket/run/model.safetensors"), SourceAccessError),
            (lambda: ms.open("s3://bucket/run/"), SourceAccessError),
            (lambda: ms.save({"a": torch.ones(2)}, "s3://bucket/model.safetensors"), WriteFailedError),
            (lambda: ms.Store("s3://bucket/run").save(1, {"step": 1}), WriteFailedError),
            (lambda: ms.Store("s3://bucket/run").latest(), ReadFailedError),
        ):
            with pytest.raises(kind, match=cause) as raised:
                call()
            assert remedy in raised.value.remedy


def test_the_user_of_a_url_goes_to_its_host_alone() -> None:
    seen: list[tuple[str, str | None]] = []

    class Elsewhere(Odd):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Authorization")))
            super().do_GET()

    with http_server(Elsewhere) as other:

        class Redirects(Elsewhere):
            def do_GET(self) -> None:
                seen.append((self.path, self.headers.get("Authorization")))
                self._reply(302, b"", {"Location": f"{other}/text"})

        with http_server(Redirects) as url, pytest.raises(UnknownFormatError, match="a text file") as raised:
            ms.open(f"{url.replace('://', '://us%40er:word@')}/a")
    assert seen[:2] == [("/a", "Basic dXNAZXI6d29yZA=="), ("/text", None)]
    assert "word" not in str(raised.value)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "us:word@host", "ftp://host", "https://", "http://host:1x"])
def test_an_endpoint_that_is_no_url(bucket: str, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(SourceTypeError, match="AWS_ENDPOINT_URL is not the URL of an endpoint") as raised:
        ms.open(f"s3://{bucket}/model.safetensors")
    assert raised.value.remedy
    assert "word" not in str(raised.value)


def test_a_bucket_that_is_not_there(proxy: Any) -> None:
    with pytest.raises(SourceNotFoundError, match="no such bucket"):
        ms.open("s3://no-such-bucket-at-all/model.safetensors")


def test_what_a_bucket_lacks(bucket: str, s3_client: Any) -> None:
    with pytest.raises(SourceNotFoundError, match="no such object"):
        ms.open(f"s3://{bucket}/model.safetensors")
    for prefix in ("", "none/"):
        with pytest.raises(SourceNotFoundError, match="the bucket has no object below this prefix"):
            ms.open(f"s3://{bucket}/{prefix}")
    s3_client().put_object(Bucket=bucket, Key="run/notes.txt", Body=b"hello")
    with pytest.raises(SourceNotFoundError, match=r"(?s)no file of this directory is a checkpoint.*notes\.txt"):
        ms.open(f"s3://{bucket}/run")


def test_an_object_that_is_removed_after_it_was_opened(bucket: str, s3_client: Any) -> None:
    ms.save({"a": torch.ones(40_000)}, f"s3://{bucket}/model.safetensors")
    with ms.open(f"s3://{bucket}/model.safetensors") as checkpoint:
        s3_client().delete_object(Bucket=bucket, Key="model.safetensors")
        with pytest.raises(ReadFailedError, match="has been removed since it was opened") as raised:
            checkpoint.tensor("a")
    assert "open the checkpoint again" in raised.value.remedy


def test_shards_that_are_missing_are_listed(bucket: str, s3_client: Any) -> None:
    index = b'{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    s3_client().put_object(Bucket=bucket, Key="model.safetensors.index.json", Body=index)
    with pytest.raises(SourceNotFoundError, match=r"(?s)2 of 2 shards are missing.*one\.safetensors"):
        ms.open(f"s3://{bucket}")


@pytest.mark.slow
def test_local_work_imports_no_client(tmp_path: Path, new_interpreter: Forks) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    code = f"""
import sys
sys.modules["obstore"] = None
import modelstate as ms
ms.open({str(tmp_path / "x.pt")!r}).tensor("a")
assert not [name for name in ("boto3", "huggingface_hub", "httpx2") if name in sys.modules]
try:
    ms.open("s3://bucket/x")
except ms.ModelStateError as error:
    print(error.remedy)
"""
    done = new_interpreter.run(code)
    assert done.stdout.strip() == "pip install 'modelstate[remote]'"


@pytest.mark.parametrize(
    "shard", ["%2e%2e/outside.safetensors", "..%2foutside.safetensors", ".%2e/outside.safetensors"]
)
def test_an_index_of_a_web_server_stays_in_its_directory(files: tuple[Path, str], shard: str) -> None:
    (files[0] / "in").mkdir()
    save_file({"w": torch.ones(4)}, files[0] / "outside.safetensors")
    (files[0] / "in" / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(ms.errors.OpenError):
        ms.open(f"{files[1]}/in/m.safetensors.index.json")


def test_bytes_between_the_records_of_an_archive_are_refused_as_in_a_file(
    files: tuple[Path, str], tmp_path: Path
) -> None:
    """Where the data of a record begins follows from where the next one begins, without a request for its header."""
    torch.save({"a": torch.arange(20_000.0), "b": torch.arange(20_000)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(files[0] / "b.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
            new.start_dir += 12 * name.endswith("data/0")
    for source in (files[0] / "b.pt", f"{files[1]}/b.pt"):
        with pytest.raises(DamagedFileError, match="contradicts itself about a record"):
            ms.open(source)


@pytest.mark.parametrize("shard", ["a b.safetensors", "a#b.safetensors", "a?b.safetensors", "a%41.safetensors"])
def test_names_of_shards_are_quoted(files: tuple[Path, str], shard: str) -> None:
    save_file({"w": torch.ones(4)}, files[0] / shard)
    (files[0] / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    assert torch.equal(ms.open(f"{files[1]}/m.safetensors.index.json").tensor("w"), torch.ones(4))


def test_an_index_with_a_query_is_known_by_its_name(files: tuple[Path, str]) -> None:
    save_file({"w": torch.ones(4)}, files[0] / "a.safetensors")
    index = {"metadata": {"text": "x" * 5000}, "weight_map": {"w": "a.safetensors"}}
    (files[0] / "m.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(ms.open(f"{files[1]}/m.safetensors.index.json?download=true").tensor("w"), torch.ones(4))


def test_shards_are_requested_with_the_user_of_their_index(tmp_path: Path) -> None:
    class Private(FileServer):
        directory = tmp_path

        def do_GET(self) -> None:
            if self.headers.get("Authorization") == "Basic dXNlcjp3b3Jk":
                super().do_GET()
            else:
                self._reply(401, b"")

    save_file({"w": torch.ones(4)}, tmp_path / "a b.safetensors")
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a b.safetensors"}}))
    with http_server(Private) as url:
        checkpoint = ms.open(f"{url.replace('://', '://user:word@')}/m.safetensors.index.json")
        assert torch.equal(checkpoint.tensor("w"), torch.ones(4))
    assert "word" not in str(checkpoint.files)


def test_a_missing_file_with_a_query(tmp_path: Path) -> None:
    class Signed(FileServer):
        directory = tmp_path

        def do_GET(self) -> None:
            if "sig=word" in self.path:
                super().do_GET()
            else:
                self._reply(401, b"")

    with http_server(Signed) as url, pytest.raises(ms.errors.SourceNotFoundError):
        ms.open(f"{url}/missing.safetensors?sig=word")


@pytest.mark.parametrize("change", ["size", "time"])
def test_an_object_without_an_etag_that_changes_is_an_error(tmp_path: Path, change: str) -> None:
    """A server states times in seconds, in which a file can be written again: then its size tells."""

    class WithoutTags(FileServer):
        directory, modified = tmp_path, 1_000_000_000.0

        def _answer(self, content: bytes, modified: float, headers: dict[str, str]) -> None:
            super()._answer(content, type(self).modified, headers)

        def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            super()._reply(status, body, {name: value for name, value in (headers or {}).items() if name != "ETag"})

    save_file({"w": torch.ones(100_000)}, tmp_path / "x.safetensors")
    with http_server(WithoutTags) as url:
        checkpoint = ms.open(f"{url}/x.safetensors")
        save_file({"w": torch.zeros(100_000 + (change == "size"))}, tmp_path / "x.safetensors")
        WithoutTags.modified += change == "time"
        with pytest.raises(ReadFailedError, match="has changed since it was opened"):
            checkpoint.tensor("w")
