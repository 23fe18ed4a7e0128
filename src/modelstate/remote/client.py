"""The clients of object stores and web servers, their credentials, and what their errors mean.

Credentials, regions and endpoints come from where the tools of each provider take them:

- `s3://BUCKET/KEY`: the variables `AWS_*`; without `AWS_ACCESS_KEY_ID` what boto3 finds, if it is installed (profiles,
  single sign-on, roles), otherwise the metadata services of containers and machines.
- `gs://BUCKET/KEY`: `GOOGLE_APPLICATION_CREDENTIALS`, the default credentials of gcloud, the metadata service;
  `STORAGE_EMULATOR_HOST` for an emulator.
- `az://CONTAINER/KEY`: `AZURE_STORAGE_CONNECTION_STRING`, or `AZURE_STORAGE_ACCOUNT` with `AZURE_STORAGE_KEY` or
  `AZURE_STORAGE_SAS_TOKEN`, and the other variables that obstore reads.
- `http://HOST/PATH`, `https://HOST/PATH`: the user, the password and the query of the URL.
"""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import Enum
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from modelstate.errors import PackageError, ReadFailedError, SourceAccessError, SourceTypeError
from modelstate.remote import requests
from modelstate.remote.hub import address_of
from modelstate.remote.location import Location, redacted, whole_address
from modelstate.remote.requests import call

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_PATH = re.compile(r"(https?://[^/\s]+)/\S*")
"""The path and the query of a URL in an error, behind its host."""
_CODE = re.compile(r"<Code>(\w+)</Code>|\"(?:reason|code)\": ?\"?(\w+)")
"""The code of an error in the answer of a server."""
_RETRY_FOR = timedelta(minutes=2)
_ADDRESS_SECONDS = 600.0
"""For how long an address that the hub gives is used without asking again."""
_CLIENT = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "1h", "user_agent": "modelstate"}


def store_of(location: Location, *, repeats: bool = True) -> tuple[ObjectStore, str]:
    """The client of obstore for a location, and the name that it has there. Clients are kept: they own connections.

    Args:
        location: where an object is.
        repeats: whether the client repeats a request to a bucket that fails.

    Raises:
        PackageError: The extra `remote` is not installed.
        SourceAccessError: There are no credentials.
        SourceTypeError: The client refuses its settings.
        OpenError: The hub has no such file.
        ReadFailedError: This process was forked from one that has used a client.
    """
    global _client_pid
    _client_pid = _client_pid or os.getpid()
    if _client_pid != os.getpid():
        raise ReadFailedError(
            "this process was forked from one that had read remote files, and lacks the threads that do it",
            where=location.url,
            remedy="start the process with the method spawn or forkserver of multiprocessing (of a DataLoader: "
            "multiprocessing_context='forkserver'), or fork before the first remote file is opened",
        )
    if location.scheme == "hf":
        return hub_store(location.url, int(time.monotonic() // _ADDRESS_SECONDS)), ""
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES)))
    if location.mark:
        return _store(location.scheme, location.root, whole_address(location), settings), ""
    return _store(location.scheme, location.root, "", settings, repeats), location.key


class ObjectInfo(msgspec.Struct, frozen=True):
    """An object in a listing."""

    name: str
    """The key, without the prefix that was listed."""
    nbytes: int
    time: datetime
    """When it was written, by the clock of the server."""


def listed_below(location: Location) -> tuple[list[str], list[ObjectInfo]]:
    """The names of the directories, and the objects, directly below a prefix. Raises what the client raises."""
    import obstore

    store, key = store_of(location)
    found = call(obstore.list_with_delimiter_async, store, key or None)
    objects = [
        ObjectInfo(item["path"].rpartition("/")[2], item["size"], item["last_modified"])
        for item in found["objects"]
        if item["path"] != key.rstrip("/")  # the object that stands for an empty directory
    ]
    return [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]], objects


_client_pid = 0
"""The process that has used a client first."""
_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST")
"""The beginnings of the environment variables that a client is made from."""
_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@lru_cache(maxsize=256)
def _store(scheme: str, root: str, whole: str, settings: tuple[tuple[str, str], ...], repeats: bool = True) -> Any:
    store, errors = _obstore(scheme)
    client: dict[str, object] = dict(_CLIENT)
    options = {"retry_config": _retry(requests.RETRIES if repeats else 0), "client_options": client}
    try:
        match scheme:
            case "s3":
                # A copy that keeps an existing object, which R2 and others need another value for.
                config = {"copy_if_not_exists": os.environ.get("AWS_COPY_IF_NOT_EXISTS", "multipart")}
                _check_endpoints()
                provider = _s3_credentials()
                client["allow_http"] = any(os.environ.get(name, "").startswith("http://") for name in _S3_ENDPOINTS)
                return store.S3Store(root, config=config, credential_provider=provider, **options)
            case "gs":
                emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
                if not emulator:
                    return store.GCSStore(root, **options)
                url = emulator if "://" in emulator else f"http://{emulator}"
                client["allow_http"] = url.startswith("http://")
                # An emulator takes any token. Without one the client asks the metadata service before each write.
                token = {"token": "emulator", "expires_at": None}
                return store.GCSStore(root, config={"base_url": url}, credential_provider=lambda: token, **options)
            case "az":
                config = _azure_config()
                client["allow_http"] = config.get("endpoint", "").startswith("http://")
                return store.AzureStore(root, config=config, **options)
        return _web_store(whole or f"{scheme}://{root}")
    except errors.BaseError as error:
        if "must be specified" in str(error):
            raise SourceAccessError(
                f"there are no credentials for {scheme}://",
                where=f"{scheme}://{root}",
                found=first_line(error),
                remedy=_LOGIN.get(scheme, ""),
            ) from error
        raise SourceTypeError(
            f"the settings for {scheme}:// are not valid",
            where=f"{scheme}://{root}",
            found=first_line(error),
            remedy="check the variables of the environment for this provider",
        ) from error


@lru_cache(maxsize=256)
def hub_store(path: str, period: int) -> ObjectStore:
    """A client for the place where the hub keeps a file. Asks the hub once in each period, or after `cache_clear`."""
    client: ObjectStore = _web_store(*address_of(path))
    return client


def _web_store(url: str, headers: Mapping[str, str] | None = None) -> Any:
    store, _ = _obstore("http")
    headers = dict(headers or {})
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    if user:  # the client sends no user that is in the URL; it drops this header where a redirect leaves the host
        headers["Authorization"] = f"Basic {base64.b64encode(unquote(user).encode()).decode()}"
        url = parts._replace(netloc=host).geturl()
    client: dict[str, object] = {**_CLIENT, "allow_http": url.startswith("http://"), "default_headers": headers}
    return store.HTTPStore(url, client_options=client, retry_config=_retry(requests.RETRIES))


def _retry(times: int) -> dict[str, object]:
    backoff = {"init_backoff": requests.FIRST_WAIT, "max_backoff": requests.LONGEST_WAIT, "base": 2}
    return {"max_retries": times, "backoff": backoff, "retry_timeout": _RETRY_FOR}


def _obstore(scheme: str) -> tuple[ModuleType, ModuleType]:
    """The modules `store` and `exceptions` of obstore."""
    try:
        from obstore import exceptions, store
    except ImportError as error:
        raise PackageError(
            f"{scheme}:// is read with obstore, which is not installed", remedy="pip install 'modelstate[remote]'"
        ) from error
    return store, exceptions


def _check_endpoints() -> None:
    """Raises `SourceTypeError` for an endpoint of S3 that is no URL, with which the client panics."""
    for name in _S3_ENDPOINTS:
        value = os.environ.get(name, "")
        try:
            parts = urlsplit(value)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of the port
            is_url = False
        if value and not is_url:
            raise SourceTypeError(
                f"{name} is not the URL of an endpoint",
                expected="https://HOST or http://HOST:PORT",
                found=redacted(value.rpartition("@")[2]),
                remedy=f"set {name} with https:// or http:// before the host, or unset it",
            )


def _s3_credentials() -> object:
    """The source of credentials for S3; None where the client finds them itself."""
    if {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE"} & os.environ.keys():
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        if "AWS_PROFILE" in os.environ or os.path.exists(os.path.expanduser("~/.aws/credentials")):
            raise PackageError(
                "the profiles of AWS are read with boto3, which is not installed",
                remedy="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            ) from error
        return None
    try:
        return Boto3CredentialProvider()
    except Exception as error:  # of botocore: an unknown profile, a damaged file, or no credentials
        raise SourceAccessError(
            "there are no credentials for s3://",
            found="none in the environment, in ~/.aws, and from the machine"
            if isinstance(error, ValueError)
            else first_line(error),
            remedy=_LOGIN["s3"],
        ) from error


def _azure_config() -> dict[str, str]:
    """The settings that the command `az storage` takes from the environment."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    given = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    config = {
        "account_name": given.get("AccountName") or os.environ.get("AZURE_STORAGE_ACCOUNT"),
        "account_key": given.get("AccountKey") or os.environ.get("AZURE_STORAGE_KEY"),
        "sas_key": given.get("SharedAccessSignature") or os.environ.get("AZURE_STORAGE_SAS_TOKEN"),
        "endpoint": given.get("BlobEndpoint") or os.environ.get("AZURE_STORAGE_ENDPOINT"),
    }
    return {key: value for key, value in config.items() if value}


# Errors.


class Cause(Enum):
    """What an error of a client means."""

    NO_OBJECT = "there is no such object"
    NO_BUCKET = "there is no such bucket"
    NO_CREDENTIALS = "there are no credentials"
    REFUSED = "the access is refused"
    EXPIRED = "the credentials have expired"
    CLOCK = "the clock of this machine differs from that of the server"
    CHANGED = "the object is not the one that was expected"
    EXISTS = "there is an object already"
    NO_RANGES = "the server answers with the whole object where a part was asked for"
    OTHER_RANGE = "the server does not say which part of the object it sends, or sends another than was asked for"
    COMPRESSED = "the server compresses what it sends, so that a part of it is not a part of the object"
    NO_SUCH_RANGE = "the object is shorter"
    REDIRECTED = "the server redirects to no address, or to one of another scheme"
    REDIRECTED_TOO_OFTEN = "the server redirects too often, which may be a loop"
    OTHER_REGION = "the bucket is in another region"
    CUT = "the answer of the server is cut short"
    REJECTED = "the server rejects the request"
    FAILED = "the server does not answer, or answers with errors"


DOWNLOAD = "open the URL in a browser, to see what the server sends; or download the file first"
_OTHER_RANGE = re.compile(r"Requested \d+\.\.\d+, got ")
_REJECTED = "check the address and the settings of the server: the same request will be rejected again"
_PASSING = (408, 423, 425, 429)
"""The statuses from 400 to 499 that may be others when a request is repeated."""
_REDIRECTIONS = (301, 302, 303, 307, 308)
_CLOCK_CODES = ("RequestTimeTooSkewed", "RequestInTheFuture")
_EXPIRED_CODES = ("ExpiredToken", "ExpiredTokenException", "RequestExpired")
_LOGIN = {
    "s3": "aws configure, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket set "
    "AWS_SKIP_SIGNATURE=true",
    "gs": "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_ACCOUNT, and AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
    "hf": "hf auth login, or set HF_TOKEN; a gated repository must be accepted on its page first",
}


class Failure(NamedTuple):
    """An error of a client."""

    cause: Cause
    found: str
    """What the client or the server says, in one line without secrets."""
    remedy: str


def failure_of(error: BaseException, location: Location) -> Failure:
    """What an exception of obstore for this location means."""
    from obstore import exceptions

    found = first_line(error)
    status, code = _status_of(str(error))
    # The name of the object may have words that causes are told apart by, such as "Credentials".
    text = _PATH.sub(r"\1", str(error))
    if location.key:
        text = re.sub(rf"(?<!\w){re.escape(location.key)}(?!\w)", "", text)
    login = _LOGIN.get(location.scheme, "open the URL in a browser: a login or another address may be needed")
    if "NoSuchBucket" in text or "ContainerNotFound" in text or "bucket does not exist" in text:
        return Failure(Cause.NO_BUCKET, found, f"check the name {location.root!r}, the region and the endpoint")
    if code in _CLOCK_CODES or "Request date header too old" in text:
        return Failure(Cause.CLOCK, found, "set the clock, such as by timedatectl set-ntp true, and try again")
    if code in _EXPIRED_CODES:
        return Failure(Cause.EXPIRED, found, f"get new ones: {login}")
    if "Content-Range" in text or "CONTENT_RANGE" in text or _OTHER_RANGE.search(text):
        return Failure(Cause.OTHER_RANGE, found, DOWNLOAD)
    if status == 410:
        return Failure(Cause.NO_OBJECT, found, "it was there once: ask who runs the server for its address now")
    if status == 405 or (status == 409 and "performing GET" in text):
        return Failure(Cause.REJECTED, found, _REJECTED)
    match error:
        case FileNotFoundError():
            return Failure(Cause.NO_OBJECT, found, "check the name; names are case-sensitive")
        case exceptions.PermissionDeniedError():
            return Failure(Cause.REFUSED, found, f"ask for the right to read it; or {login}")
        case exceptions.UnauthenticatedError():
            return Failure(Cause.NO_CREDENTIALS, found, login)
        case exceptions.PreconditionError():
            return Failure(Cause.CHANGED, found, "open it again, when nothing writes to it any more")
        case exceptions.AlreadyExistsError():
            return Failure(Cause.EXISTS, found, "overwrite=True replaces it")
        case exceptions.NotSupportedError():
            return Failure(Cause.NO_RANGES, found, DOWNLOAD)
    if "builder error" in text or "URL scheme is not allowed" in text:
        return Failure(Cause.REDIRECTED, found, "give the address that it redirects to, if you trust it")
    if "error following redirect" in text:
        return Failure(Cause.REDIRECTED_TOO_OFTEN, found, "ask who runs the server for the address of the file")
    if "Wanted range starting at" in text or status == 416:
        return Failure(Cause.NO_SUCH_RANGE, found, "open it again, when nothing writes to it any more")
    if "body error" in text:
        return Failure(Cause.CUT, found, "try again; check the network")
    if "169.254." in text or "metadata.google" in text or "Credentials" in text:
        return Failure(Cause.NO_CREDENTIALS, found, login)
    if status == 403:  # of a listing, for which the client has no class
        return Failure(Cause.REFUSED, found, f"ask for the right to list it; or {login}")
    is_region = status == 301 or "PermanentRedirect" in text or "missing region" in text or "configured region" in text
    if is_region and location.scheme == "s3":
        return Failure(Cause.OTHER_REGION, found, "set AWS_REGION to the region of the bucket")
    if is_region or status in _REDIRECTIONS:  # to what the client cannot follow, such as file:///x
        return Failure(Cause.REDIRECTED, found, "ask who runs the server for the address of the file")
    if 400 <= status < 500 and status not in _PASSING:
        return Failure(Cause.REJECTED, found, _REJECTED)
    return Failure(Cause.FAILED, found, "try again; check the address and the network")


def _status_of(text: str) -> tuple[int, str]:
    """The status and the code in the answer of a server; 0 and nothing without an answer."""
    answer = text.partition("status code: ")[2]
    code = _CODE.search(answer)
    return int(answer[:3]) if answer[:3].isdecimal() else 0, (code[1] or code[2]) if code else ""


def first_line(error: object) -> str:
    """The first line of an error, without secrets: of the answer of a server only the status and the code are kept."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    head, status, answer = text.partition("status code: ")
    code = _status_of(text)[1]
    return redacted(head + status + answer.partition(":")[0] + (code and f", {code}"))[:300]
