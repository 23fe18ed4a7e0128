"""Locations outside this machine: the URLs of buckets, web servers and the hub.

No secret is in a `Location`, so that its URL can be printed and stored: the whole address of a URL with a user or a
query stays in this module. Every open imports this module, and the others of the room only for a URL.
"""

from __future__ import annotations

import hashlib
import os
import re
from importlib.util import find_spec
from urllib.parse import quote, unquote, urlsplit

import msgspec

from modelstate.errors import SourceTypeError

_REMOTE = r"(s3|gs|az|http|https|hf)://"
_SECRET = r"(?<=://)[^/\s]*@|(?<=\?)\S+"
"""The user of a URL, and its query, which may be a signature."""
_SIGNED = r"(?i)\?.*(?:sig|signature|credential|token)="
"""The query of a signed address, which a name in a bucket lacks."""
_KEY = r"(?s)(?!.*(?:^|/)\.{0,2}(?:/|$))[^\0]+"
"""The names that a client takes: without empty parts, `.` and `..`."""
_REPOSITORY = r"(?a)(?P<name>\w(?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?)(?:@[^/]+)?"
"""The names that huggingface_hub takes: a part begins and ends with a letter, a digit or `_`."""

CONNECTIONS = 16
"""Requests at the same time: each waits for the network most of the time."""
CACHE_BLOCK_BYTES = 1 << 20
"""The unit in which a `Cache` keeps files, and in which they are requested."""


def is_remote(path: object) -> bool:
    """Whether a path is the URL of something outside this machine that modelstate reads."""
    return isinstance(path, str) and re.match(_REMOTE, path) is not None


def is_repository(text: str) -> bool:
    """Whether a text is `ORG/NAME[@REVISION]`, nothing is at `ORG` on this machine, and the hub can be asked."""
    match = re.fullmatch(_REPOSITORY, text)
    if not match or os.path.lexists(text.partition("/")[0]) or find_spec("huggingface_hub") is None:
        return False
    name = match["name"]
    return len(name) <= 96 and "--" not in name and ".." not in name and not name.endswith(".git")


class Location(msgspec.Struct, frozen=True):
    """A place outside this machine."""

    scheme: str
    """s3, gs, az, http, https or hf."""
    root: str
    """The bucket, the container, or the host with its port."""
    key: str
    """The name in the bucket, or the path of a web address with its quotes removed. It does not begin with `/`."""
    mark: str = ""
    """A digest of a web address that `root` and `key` do not describe: it has a user, a query or `%2F`, or is
    not UTF-8; else empty."""

    @property
    def url(self) -> str:
        """The URL without secrets, which names the location everywhere. `locate` accepts it in this process."""
        key = quote(self.key) if self.scheme.startswith("http") else self.key
        return f"{self.scheme}://{self.root}/{key}" + (f"?{self.mark}" if self.mark else "")

    def below(self, name: str) -> Location:
        """The location of a name in this directory."""
        return Location(self.scheme, self.root, f"{self.key.rstrip('/')}/{name}".lstrip("/"))


_secrets: dict[str, tuple[Location, str]] = {}
"""The locations with a mark, and their whole addresses, by their `url`."""


def locate(url: str) -> Location:
    """The location that a URL names. Raises `SourceTypeError` for a URL that names none."""
    if url in _secrets:
        return _secrets[url][0]
    scheme, _, rest = url.partition("://")
    if not scheme.startswith("http"):
        root, _, key = rest.partition("/")
        if not root or (key.rstrip("/") and not re.fullmatch(_KEY, key.rstrip("/"))):
            raise _not_valid(url, f"{scheme}://BUCKET/NAME, and no empty part, `.` or `..` in the name")
        if "@" in root or (":" in root and "@" in key) or re.search(_SIGNED, key):
            raise _not_valid(
                url, f"{scheme}://BUCKET/NAME; the environment has the credentials, and https:// a signature"
            )
        return Location(scheme, root, key)
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or not rest.isprintable() or " " in rest:
        raise _not_valid(url, f"{scheme}://HOST/PATH")
    root, key = parts.netloc.rpartition("@")[2], unquote(parts.path.lstrip("/"))
    # `%2F` divides no directories, and names need not be UTF-8.
    is_name = not key or (re.fullmatch(_KEY, key) and "%2f" not in parts.path.lower() and "\ufffd" not in key)
    if is_name and not (parts.query or "@" in parts.netloc):
        return Location(scheme, root, key)
    whole = url.partition("#")[0]
    location = Location(scheme, root, key, hashlib.sha256(whole.encode()).hexdigest()[:12])
    _secrets[location.url] = location, whole
    return location


def whole_address(location: Location) -> str:
    """The whole address of a location with a mark, with its secrets."""
    return _secrets[location.url][1]


def beside(url: str, name: str) -> str:
    """The URL of a name in the directory of a file: with the user of a web address, and without its query."""
    location = locate(url)
    if not location.scheme.startswith("http"):
        key = f"{location.key.rpartition('/')[0]}/{name}".lstrip("/")
        return locate(f"{location.scheme}://{location.root}/{key}").url
    parts = urlsplit(whole_address(location) if location.mark else location.url)
    path = f"{parts.path.rpartition('/')[0]}/{quote(name)}"
    return locate(parts._replace(path=path, query="", fragment="").geturl()).url


def redacted(text: object) -> str:
    """A text without the users and the queries of the URLs in it."""
    return re.sub(_SECRET, "...", str(text))


def redacted_url(url: str) -> str:
    """A URL, which may be invalid, without its user and its query: a password may have any character."""
    scheme, _, rest = url.partition("://")
    return redacted(f"{scheme}://...{rest.rpartition('@')[2]}" if "@" in rest else url)


def _not_valid(url: str, expected: str) -> SourceTypeError:
    return SourceTypeError("this URL names nothing that can be read", where=redacted_url(url), expected=expected)


def without_secrets(error: BaseException) -> BaseException | None:
    """The error as a cause, whose text a traceback shows; None where the text has the user or the query of a URL."""
    return error if redacted(error) == str(error) else None
