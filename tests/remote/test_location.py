"""URLs: what they name, what they show, and which settings their clients take."""

import base64
import os

import pytest

import modelstate
from modelstate.errors import ModelStateError, SourceAccessError, SourceTypeError
from modelstate.remote.client import store_of
from modelstate.remote.location import beside, is_remote, locate, redacted

pytest.importorskip("obstore")


@pytest.mark.parametrize(
    ("url", "scheme", "root", "key"),
    [
        ("s3://bucket/a/b.safetensors", "s3", "bucket", "a/b.safetensors"),
        ("gs://bucket", "gs", "bucket", ""),
        ("az://container/a dir/", "az", "container", "a dir/"),
        ("https://host:8080/a%20b", "https", "host:8080", "a b"),
    ],
)
def test_a_url_names_a_location(url: str, scheme: str, root: str, key: str) -> None:
    location = locate(url)
    assert (location.scheme, location.root, location.key) == (scheme, root, key)
    assert locate(location.url) == location


@pytest.mark.parametrize("url", ["s3:///key", "s3://b/a//b", "s3://b/../x", "https://", "http://a b/c", "http://h:x/"])
def test_a_url_that_names_nothing_is_refused(url: str) -> None:
    with pytest.raises(SourceTypeError, match="names nothing"):
        locate(url)


@pytest.mark.parametrize("url", ["https://user:word@host/x", "https://host/x?signature=word"])
def test_secrets_stay_out_of_names(url: str) -> None:
    location = locate(url)
    assert "word" not in location.url
    assert "word" not in repr(location)
    assert "word" not in redacted(f"GET {url} failed")
    assert locate(location.url) == location
    assert locate(url + "2") != location
    store, key = store_of(location)
    assert key == ""
    sent = f"{store.url} {store.client_options}"  # type: ignore[union-attr]
    assert "word" in sent or base64.b64encode(b"user:word").decode() in sent


@pytest.mark.parametrize(
    ("url", "other"),
    [
        ("https://host/a%2Fb/c.safetensors", "https://host/a/b/c.safetensors"),  # a quoted slash is part of a name
        ("https://host/a/caf%E9.safetensors", "https://host/a/caf%E8.safetensors"),  # which need not be UTF-8
    ],
)
def test_names_that_the_client_would_change_are_requested_as_they_are(url: str, other: str) -> None:
    location = locate(url)
    assert location != locate(other)
    assert locate(location.url) == location
    store, key = store_of(location)
    assert (str(store.url), key) == (url, "")  # type: ignore[union-attr]
    assert beside(location.url, "d e") == locate(f"{url.rpartition('/')[0]}/d%20e").url


def test_only_urls_are_remote() -> None:
    assert is_remote("hf://org/name")
    assert not is_remote("file:///x")
    assert not is_remote("s3:/x")


def test_missing_credentials_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(SourceAccessError, match="no credentials"):
        store_of(locate("s3://bucket/key"))


def test_azure_without_an_account_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(SourceAccessError, match="no credentials") as raised:
        store_of(locate("az://container/x"))
    assert "AZURE_STORAGE_ACCOUNT" in raised.value.remedy


def test_azure_takes_a_connection_string(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "DefaultEndpointsProtocol=http;AccountName=me;AccountKey=a2V5;BlobEndpoint=http://127.0.0.1:1/me"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    store, key = store_of(locate("az://box/a"))
    assert key == "a"
    assert store.config["account_name"] == "me"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9/x?sig=word",
        "http://127.0.0.1:9/x?sig=a,word",
        "http://127.0.0.1:9/x?sig=a)word",
        "http://user:p@word@127.0.0.1:bad/x",
        "http://user:word two@127.0.0.1:9/x",
        "http://user:a/word@127.0.0.1:9/x",
        "HTTP://user:word@127.0.0.1:9/x",
        "ftp://user:word@127.0.0.1/x",
        "s3://key:word@bucket/x",
        "s3://key:a/word@bucket/x",
        "s3://bucket/x?X-Amz-Signature=word",
    ],
)
def test_no_secret_in_a_traceback(url: str) -> None:
    with pytest.raises(ModelStateError) as raised:
        modelstate.open(url)
    error: BaseException | None = raised.value
    while error is not None:
        assert "word" not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
