"""`hf://ORG/NAME[@REVISION][/FILE]`: files of the Hugging Face hub, by huggingface_hub.

A revision becomes its commit when a checkpoint is opened, so that all files are of one commit, and stay those. The
token and the endpoint are those of huggingface_hub. A checkpoint that is complete in its cache is read from there, as
files of this machine; without a connection, what the cache has is the only source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple, TypeVar

from modelstate.errors import (
    ModelStateError,
    PackageError,
    ReadFailedError,
    SourceAccessError,
    SourceNotFoundError,
    SourceTypeError,
)
from modelstate.remote import requests

_URL = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<file>.*))?", re.DOTALL)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPEATED = (429, 500, 502, 503, 504)
"""The statuses after which a request is repeated."""
_Result = TypeVar("_Result")


class HubFile(NamedTuple):
    """A file of a repository, or the repository where `file` is empty."""

    name: str
    revision: str
    """Empty for the default branch. `/` is written as `%2F`, as in the addresses of the hub."""
    file: str

    @property
    def url(self) -> str:
        """The name of it everywhere."""
        return f"hf://{self.name}" + (f"@{self.revision}" if self.revision else "") + f"/{self.file}".rstrip("/")


def parse(url: str) -> HubFile:
    """The file that a URL names. Raises `SourceTypeError`."""
    match = _URL.fullmatch(url)
    file = (match["file"] or "").rstrip("/") if match else ""
    if not match or "" in file.split("/")[1:] or {".", ".."} & {*file.split("/")}:
        raise SourceTypeError(
            "this URL names nothing of the hub", where=url, expected="hf://ORG/NAME, hf://ORG/NAME@REVISION/FILE"
        )
    return HubFile(match["name"], match["revision"] or "", file)


def at_commit(url: str) -> str:
    """The path of a file or of a repository at the commit that its revision names now.

    A path of the cache where nothing has to be requested from the hub, otherwise a URL. Raises `OpenError`.
    """
    wanted = parse(url)
    check_installed()
    commit = wanted.revision
    try:
        with _hub_errors(wanted):
            if not _COMMIT.fullmatch(commit):
                commit = _ask(wanted.name, commit)
            elif not wanted.file:
                files_of_commit(wanted.name, commit)  # they are needed next, and the cache may have them
    except ReadFailedError:
        directory = _cached(wanted)
        if directory is None:
            raise
        return os.path.join(directory, wanted.file).rstrip(os.sep)
    return wanted._replace(revision=commit).url


def cached(path: str, others: Iterable[str] = ()) -> str | None:
    """The path of a file in the cache of huggingface_hub; None where it, or one of the others beside it, is missing."""
    wanted = parse(path)
    directory = _cached(wanted)
    if directory is None:
        return None
    here = os.path.join(directory, wanted.file)
    beside = (os.path.join(os.path.dirname(here), other) for other in others)
    return here if all(map(os.path.isfile, (here, *beside))) else None


def files_of(path: str) -> list[str]:
    """The files of a repository below a directory of it, by their names from there. Raises `OpenError`."""
    wanted = parse(path)
    with _hub_errors(wanted):
        prefix = f"{wanted.file}/".lstrip("/")
        names = files_of_commit(wanted.name, wanted.revision)
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def address_of(path: str) -> tuple[str, dict[str, str]]:
    """The web address where the hub keeps a file now, and the headers that it needs. Raises `OpenError`."""
    check_installed()
    import huggingface_hub

    wanted = parse(path)
    with _hub_errors(wanted):
        endpoint = huggingface_hub.HfApi().endpoint
        url = huggingface_hub.hf_hub_url(wanted.name, wanted.file, revision=wanted.revision or None, endpoint=endpoint)
        location = _repeated(lambda: huggingface_hub.get_hf_file_metadata(url, endpoint=endpoint)).location
    # Only the hub gets the token: other hosts have a signature in their addresses.
    token = huggingface_hub.get_token() if location.startswith(f"{endpoint}/") else None
    return location, {"Authorization": f"Bearer {token}"} if token else {}


_files: dict[tuple[str, str], list[str]] = {}
"""The files of each repository at a commit, which do not change."""


def files_of_commit(name: str, commit: str) -> list[str]:
    """All files of a repository at a commit."""
    return _files.get((name, commit)) or _files[name, _ask(name, commit)]


def _ask(name: str, revision: str) -> str:
    """Asks the hub for the commit of a revision, and its files. Returns the commit."""
    import huggingface_hub

    info = _repeated(lambda: huggingface_hub.HfApi().model_info(name, revision=_unquoted(revision)))
    _files[name, str(info.sha)] = [file.rfilename for file in info.siblings or ()]
    return str(info.sha)


def _repeated(request: Callable[[], _Result]) -> _Result:
    """Calls a function; again after an answer of 5xx or 429, a connection that is reset, and a body that is cut short.

    Not where there is no connection, since the cache is read then.
    """
    httpx = _client()
    passing = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
    return requests.repeated(request, lambda error: isinstance(error, passing) or _status_of(error) in _REPEATED)


def _status_of(error: BaseException) -> int:
    """The status of the answer; 0 without an answer."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _client() -> ModuleType:
    """The module of the client of huggingface_hub."""
    try:
        import httpx2 as httpx  # from 2.0 on
    except ImportError:
        import httpx  # type: ignore[import-not-found, no-redef]
    return httpx


def _unquoted(revision: str) -> str | None:
    return revision.replace("%2F", "/") or None


def _cached(wanted: HubFile) -> str | None:
    """The directory of a commit in the cache; None where the cache lacks it."""
    import huggingface_hub

    with _hub_errors(wanted):
        try:
            path: str = huggingface_hub.snapshot_download(
                wanted.name, revision=_unquoted(wanted.revision), local_files_only=True
            )
            return path
        except FileNotFoundError:
            return None


@contextmanager
def _hub_errors(wanted: HubFile) -> Iterator[None]:
    """Turns the errors of huggingface_hub into ours."""
    from huggingface_hub import errors

    httpx, page = _client(), f"https://huggingface.co/{wanted.name}"
    try:
        yield
    except (errors.EntryNotFoundError, errors.HFValidationError, httpx.HTTPError, ConnectionError) as error:
        kind: type[ModelStateError] = SourceNotFoundError
        found = ""
        match error:
            case errors.GatedRepoError():
                kind, what = SourceAccessError, "the repository is gated"
                remedy = f"accept its terms at {page}, then hf auth login"
            case errors.RepositoryNotFoundError():
                what = "the hub has no such repository, or this user may not see it"
                remedy = f"check the name at {page}; for a private one hf auth login, or set HF_TOKEN"
            case errors.RevisionNotFoundError():
                what, found = "the repository has no such revision", wanted.revision
                remedy = f"see the branches and tags at {page}/tree/main; in a name with / write %2F"
            case errors.EntryNotFoundError() | errors.HFValidationError():
                what, remedy = "the repository has no such file", f"see its files at {page}/tree/main"
            case _:
                found = str(error).partition("\n")[0][:200]
                kind, what = ReadFailedError, "the hub does not answer"
                remedy = (
                    "check the network, HF_ENDPOINT and HF_HUB_OFFLINE; `hf download` fills the cache, which is read "
                    "without a connection"
                )
                if _status_of(error) in (401, 403):
                    kind, what = SourceAccessError, "the hub refuses the token, or the access with it"
                    remedy = "hf auth login, or set HF_TOKEN to a valid token with the right to read the repository"
        raise kind(what, where=wanted.url, found=found, remedy=remedy) from error


def check_installed() -> None:
    """Raises `PackageError` where huggingface_hub is not installed."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise PackageError(
            "hf:// is read with huggingface_hub, which is not installed", remedy="pip install 'modelstate[remote]'"
        ) from error
