"""Sizes and other people's words, as they are printed. What every layer may use."""

_UNITS = ("kB", "MB", "GB", "TB", "PB")


def size(nbytes: float) -> str:
    """A number of bytes as people say it: "512 B", "1.5 kB", "90.9 MB"."""
    if round(nbytes) < 1000:
        return f"{nbytes:.0f} B"
    value = float(nbytes)
    for unit in _UNITS:
        value /= 1000
        if round(value, 1) < 1000 or unit == _UNITS[-1]:
            break
    return f"{value:,.1f} {unit}"


def printable(text: str) -> str:
    """The text with what would move the cursor or break the line made visible: names in files are others' words."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def in_a_line(text: str) -> str:
    """The text of an error of ours in one line, without what is to be done and where to read more."""
    return "; ".join(line.strip() for line in text.splitlines() if not line.startswith(("  more:", "  to do:")))
