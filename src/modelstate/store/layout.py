"""The names in a store's directory.

store.json                   the store's own name
.lock                        who writes
step-000000100/              a checkpoint: complete and durable since it has this name
    checkpoint.json          what it holds; written last
    model.safetensors.index.json, model-<digest>.safetensors
step-000000100.1/            the same step, saved again: the highest number counts
.step-000000200.<random>.unfinished/    what is being written, or being taken away
"""

import os
import re
import secrets
from typing import NamedTuple

STORE_FILE = "store.json"
RECORD_FILE = "checkpoint.json"
PIN_FILE = "pinned"
_STEP = re.compile(r"step-(\d{9,18})(?:\.(\d{1,9}))?")
_UNFINISHED = re.compile(r"\.step-\d+(?:\.\d+)?\.[0-9a-f]{12}\.unfinished")


class Place(NamedTuple):
    """A directory that holds a step."""

    step: int
    revision: int
    """From 0; a step that is saved again has the next one."""
    path: str


def name_of(step: int, revision: int) -> str:
    """The name of a step's directory."""
    return f"step-{step:09d}" + (f".{revision}" if revision else "")


def unfinished_name(step: int) -> str:
    """A new name for what is not, or no longer, a checkpoint."""
    return f".step-{step:09d}.{secrets.token_hex(6)}.unfinished"


def places(directory: str) -> list[Place]:
    """All steps in a store, every revision of them, by step and revision. Raises `OSError`."""
    found = []
    for name in os.listdir(directory):
        if match := _STEP.fullmatch(name):
            place = Place(int(match[1]), int(match[2] or 0), os.path.join(directory, name))
            if name == name_of(place.step, place.revision):
                found.append(place)
    return sorted(found)


def newest_revisions(every: list[Place]) -> list[Place]:
    """Of each step the one that counts, in the order of the steps."""
    return list({place.step: place for place in sorted(every)}.values())


def unfinished(directory: str) -> list[str]:
    """Paths of what killed saves and prunes have left. Raises `OSError`."""
    return [os.path.join(directory, name) for name in os.listdir(directory) if _UNFINISHED.fullmatch(name)]
