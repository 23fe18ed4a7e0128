"""A cursor over JSON that builds only what is asked for.

A hostile document of 100 MB makes a general parser build gigabytes of small objects before anyone can look at the
first of them. Here every step checks what stands at the cursor against what must stand there, so memory is spent on
what belongs there only. Patterns are possessive throughout: they take time linear in the text.
"""

import json
import re
from collections.abc import Iterator

from modelstate.text_format import printable, quote

STRING = rb'"(?:[^"\\\x00-\x1f]++|\\.)*+"'
SPACE = rb"[ \t\n\r]*+"

_SPACE = re.compile(SPACE)
_STRING = re.compile(STRING)
_COLON = re.compile(SPACE + rb":" + SPACE)
_COMMA = re.compile(SPACE + rb"," + SPACE)
_OPEN = re.compile(rb"\{" + SPACE)
_CLOSE = re.compile(SPACE + rb"\}")
_STRING_PAIR = re.compile(rb"(" + STRING + rb")" + SPACE + rb":" + SPACE + rb"(" + STRING + rb")")
_SCALAR = re.compile(rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null|" + STRING)
_BETWEEN_BRACKETS = re.compile(rb"(?:[^\"\[\]{}]++|" + STRING + rb")*+")


class JsonTextError(Exception):
    """What stands at a position is not what must stand there. Never leaves the readers."""

    def __init__(self, what: str, at: int, found: str, expected: str = "") -> None:
        super().__init__(what)
        self.what, self.at, self.found, self.expected = what, at, found, expected


class RepeatedKeyError(JsonTextError):
    """An object has a key twice."""

    def __init__(self, key: str, at: int, found: str) -> None:
        super().__init__(f"the key {quote(key)} stands twice in one object", at, found)
        self.key = key


class JsonLimitError(JsonTextError):
    """An object has more of something than is read."""


class JsonText:
    """A JSON document and a position in it. Every method raises `JsonTextError`, and passes what it returns."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.at = _skip_space(text, 0)

    def fail(self, what: str, expected: str = "") -> JsonTextError:
        """The error for what stands at the cursor."""
        return JsonTextError(what, self.at, self.excerpt(), expected)

    def excerpt(self) -> str:
        """What stands at the cursor, for a message."""
        return excerpt(self.text[self.at : self.at + 60]) or "the end"

    def take(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Passes what the pattern matches at the cursor, if it does."""
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def string(self) -> str:
        """A string."""
        at, match = self.at, self.take(_STRING)
        if match is None:
            raise self.fail("this is no string", "text in double quotes, ended by a quote")
        return self.decode(match[0], at)

    def decode(self, quoted: bytes, at: int) -> str:
        """What a quoted string means. `at` is where it stands."""
        try:
            if b"\\" not in quoted:
                return quoted[1:-1].decode()
            text = str(json.loads(quoted))
            text.encode()  # finds half a surrogate pair
        except (UnicodeError, ValueError) as error:
            raise JsonTextError("a string is not UTF-8, or has a wrong escape", at, excerpt(quoted[:60])) from error
        return text

    def opens(self) -> bool:
        """The beginning of an object: whether it has members."""
        if not self.take(_OPEN):
            raise self.fail("this is no JSON object", "{")
        return not self.take(_CLOSE)

    def goes_on(self) -> bool:
        """What stands behind a member of an object: whether it has another."""
        if self.take(_COMMA):
            return True
        if self.take(_CLOSE):
            return False
        raise self.fail("the object neither goes on nor ends", ", or }")

    def members(self) -> Iterator[str]:
        """The keys of an object, each with the cursor at its value, which the caller passes before the next."""
        more = self.opens()
        while more:
            key = self.string()
            if not self.take(_COLON):
                raise self.fail(f"no value for {quote(key)}", ":")
            yield key
            more = self.goes_on()

    def strings(self, limit: int, different: int | None = None) -> dict[str, str]:
        """An object of strings: at most `limit` keys, and `different` different values, each of which is one object."""
        found: dict[str, str] = {}
        values: dict[bytes, str] = {}
        more = self.opens()
        while more:
            at, match = self.at, self.take(_STRING_PAIR)
            if match is None:
                raise self.fail("this is not what an object of strings holds", '"key": "value"')
            key, value = self.decode(match[1], at), values.get(match[2])
            if value is None:
                value = values[match[2]] = self.decode(match[2], at)
            if key in found:
                raise RepeatedKeyError(key, at, f"{quote(found[key])} and {quote(value)}")
            found[key] = value
            if len(found) > limit:
                raise JsonLimitError(f"an object has more than {limit:,} keys", self.at, self.excerpt())
            if different is not None and len(values) > different:
                raise JsonLimitError(f"an object has more than {different:,} different values", self.at, self.excerpt())
            more = self.goes_on()
        return found

    def skip(self, max_brackets: int = 10_000) -> None:
        """Passes any value, and builds nothing. Only that its brackets close is checked."""
        if self.take(_SCALAR):
            return
        if self.text[self.at : self.at + 1] not in (b"{", b"["):
            raise self.fail("this is no JSON value")
        begin, depth, brackets = self.at, 0, 0
        while True:
            self.take(_BETWEEN_BRACKETS)
            bracket = self.text[self.at : self.at + 1]
            brackets += 1
            if bracket not in (b"{", b"}", b"[", b"]") or brackets > max_brackets:
                self.at = begin
                raise self.fail("a value does not end, or has too many parts")
            self.at += 1
            depth += 1 if bracket in (b"{", b"[") else -1
            if depth == 0:
                return

    def end(self) -> None:
        """The end of the document."""
        self.take(_SPACE)
        if self.at != len(self.text):
            raise self.fail("something follows the end of the JSON", "white space only")


def excerpt(text: bytes) -> str:
    """Bytes for a message: as text where they are text."""
    return printable(text.decode(errors="backslashreplace"))


def _skip_space(text: bytes, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
