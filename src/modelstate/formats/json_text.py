"""A cursor over JSON that builds only what the caller asks for.

A general parser builds gigabytes of small objects from a hostile document of 100 MB before the caller sees the first of
them. Here every step compares the text at the cursor with what is expected, so memory is spent only on expected
content. All patterns are possessive, so they take time linear in the text.
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
    """The text at a position is not what is expected there. The readers convert it to their own errors."""

    def __init__(self, what: str, at: int, found: str, expected: str = "") -> None:
        super().__init__(what)
        self.what, self.at, self.found, self.expected = what, at, found, expected


class RepeatedKeyError(JsonTextError):
    """An object has a key twice."""

    def __init__(self, key: str, at: int, found: str) -> None:
        super().__init__(f"the key {quote(key)} stands twice in one object", at, found)
        self.key = key


class JsonLimitError(JsonTextError):
    """An object exceeds a limit of the reader."""


class JsonText:
    """A JSON document and a position in it. Every method moves the cursor behind what it returns, or raises
    `JsonTextError`."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.at = 0
        self.take(_SPACE)

    def fail(self, what: str, expected: str = "") -> JsonTextError:
        """The error for the text at the cursor."""
        return JsonTextError(what, self.at, self.excerpt(), expected)

    def excerpt(self) -> str:
        """The text at the cursor, for a message."""
        return excerpt(self.text[self.at : self.at + 60]) or "the end"

    def take(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Moves the cursor behind a match of the pattern, and returns the match, if there is one."""
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def string(self) -> str:
        """Reads a string."""
        at, match = self.at, self.take(_STRING)
        if match is None:
            raise self.fail("this is no string", "text in double quotes, ended by a quote")
        return self.decode(match[0], at)

    def decode(self, quoted: bytes, at: int) -> str:
        """The value of a quoted string, which stands at the offset `at`."""
        try:
            if b"\\" not in quoted:
                return quoted[1:-1].decode()
            text = str(json.loads(quoted))
            text.encode()  # finds half a surrogate pair
        except (UnicodeError, ValueError) as error:
            raise JsonTextError("a string is not UTF-8, or has a wrong escape", at, excerpt(quoted[:60])) from error
        return text

    def opens(self) -> bool:
        """Reads the beginning of an object. Returns whether it has members."""
        if not self.take(_OPEN):
            raise self.fail("this is no JSON object", "{")
        return not self.take(_CLOSE)

    def goes_on(self) -> bool:
        """Reads the comma or the bracket behind a member of an object. Returns whether another member follows."""
        if self.take(_COMMA):
            return True
        if self.take(_CLOSE):
            return False
        raise self.fail("the object neither goes on nor ends", ", or }")

    def members(self) -> Iterator[str]:
        """Yields the keys of an object, with the cursor at the value, which the caller reads before the next key."""
        more = self.opens()
        while more:
            key = self.string()
            if not self.take(_COLON):
                raise self.fail(f"no value for {quote(key)}", ":")
            yield key
            more = self.goes_on()

    def strings(self, limit: int, different: int | None = None) -> dict[str, str]:
        """Reads an object of strings. Equal values become one object, so that memory depends on different values only.

        Args:
            limit: The largest number of keys.
            different: The largest number of different values.
        """
        entries: dict[str, str] = {}
        values: dict[bytes, str] = {}
        more = self.opens()
        while more:
            at, match = self.at, self.take(_STRING_PAIR)
            if match is None:
                raise self.fail("this is not what an object of strings holds", '"key": "value"')
            key, value = self.decode(match[1], at), values.get(match[2])
            if value is None:
                value = values[match[2]] = self.decode(match[2], at)
            if key in entries:
                raise RepeatedKeyError(key, at, f"{quote(entries[key])} and {quote(value)}")
            entries[key] = value
            if len(entries) > limit:
                raise JsonLimitError(f"an object has more than {limit:,} keys", self.at, self.excerpt())
            if different is not None and len(values) > different:
                raise JsonLimitError(f"an object has more than {different:,} different values", self.at, self.excerpt())
            more = self.goes_on()
        return entries

    def skip(self, max_brackets: int = 10_000) -> None:
        """Skips a value without building it. Only its brackets are checked."""
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
        """Checks that the document ends here."""
        self.take(_SPACE)
        if self.at != len(self.text):
            raise self.fail("something follows the end of the JSON", "white space only")


def excerpt(text: bytes) -> str:
    """Bytes for a message, as text where they are text."""
    return printable(text.decode(errors="backslashreplace"))
