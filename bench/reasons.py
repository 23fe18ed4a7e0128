"""What keeps a goal from being met: a sentence for each row, with the figures of the run."""

from collections.abc import Callable

from bench import limits, live, saving

Fastest = Callable[..., str]
"""The time of a row of a table, in words, or of the fastest one whose name begins so: of the table's key, the name or
its beginning, and a stage."""


def _mapped(fastest: Fastest) -> str:
    return (
        f"Nothing is read, so all of the {fastest('large/meta', 'modelstate.load')} is Python, most of it for the plan "
        "that is checked before anything is touched, for what undoes it, and for the report. The others do without."
    )


def _first_forward(fastest: Fastest) -> str:
    return (
        "Every loader that maps the file and reads it in the forward does the same work: "
        f"{fastest('limits', limits.FORWARD)} for the forward alone, and the page faults of the map. The "
        f"load itself takes {fastest('large/meta', 'modelstate.load')}. The runs of one "
        "contender differ as the ranges beside the times show."
    )


def _own_memory(fastest: Fastest) -> str:
    return (
        "The cost is fresh memory. To read the file into fresh small pages takes "
        f"{fastest('limits', limits.SMALL)} with nothing else done; to have the kernel make pages with its bytes in "
        f"them, as the load does, {fastest('limits', limits.FILLED)}; and the load "
        f"{fastest('large/meta', 'modelstate.load, map=False')}. Into huge pages it is "
        f"{fastest('limits', limits.HUGE)}: the machine's host takes back what is free, and where huge pages have to "
        "come from there, they take several times as long, so the load uses small ones. Into memory that is "
        "there it is "
        f"{fastest('limits', limits.TOUCHED)}."
    )


def _in_place(fastest: Fastest) -> str:
    return (
        f"Reading into memory that is there takes {fastest('limits', limits.TOUCHED_SMALL)} with nothing else done "
        f"where it is in small pages, as a module's is, and {fastest('limits', limits.TOUCHED)} in huge ones; the load "
        f"takes {fastest('large/memory', 'modelstate.load, in_place=True')}. The others copy the same bytes. "
        f"Planning and reporting take what a load takes that only maps, {fastest('large/meta', 'modelstate.load')}; "
        "the rest is the reads, which vary by more than that from run to run."
    )


def _cold(fastest: Fastest) -> str:
    return (
        f"The disk alone takes {fastest('limits', limits.DIRECT)}, past the page cache and into memory that is there, "
        f"where the load comes in within {fastest('cold/memory', 'modelstate.load, in_place=True')}. What is mapped "
        "comes through the page cache, whose pages are fresh memory: "
        f"{fastest('limits', limits.BUFFERED)} for a buffered read with nothing else done, and "
        f"{fastest('cold', 'modelstate.load', 'forward')} for the load with its first forward, which runs right behind "
        f"the pages and takes {fastest('limits', limits.FORWARD)} by itself."
    )


def _cast(fastest: Fastest) -> str:
    return (
        f"To read the file in blocks, and to cast them into fresh small pages, takes {fastest('limits', limits.CAST)} "
        f"with nothing else done, and the load {fastest('cast', 'modelstate.load, dtype=bfloat16')}: reading alone "
        f"takes {fastest('limits', limits.TOUCHED)}, and fresh memory for float32, which is twice as much, "
        f"{fastest('limits', limits.SMALL)} with its reading. Others cast out of a map: there a file that is cut "
        "meanwhile ends the process with SIGBUS, and here it is an error."
    )


def _int8(fastest: Fastest) -> str:
    return (
        f"Reading the bytes takes {fastest('limits', limits.TOUCHED)} with all processors and nothing else done; the "
        "rest is the arithmetic of the scales and the rounding, which torchao does for every contender, and the fresh "
        "memory for the weights."
    )


def _shards(fastest: Fastest) -> str:
    return (
        "Each file more is opened, and its header parsed and mapped, once. The rest is within what the runs differ by."
    )


def _default(fastest: Fastest) -> str:
    return (
        f"Of the {fastest('default/large', 'modelstate.load')} for 1.2 GB, the reads take what `in_place=True` takes, "
        f"{fastest('default/large', 'modelstate.load, in_place=True')}. Before the first byte is written, the load "
        "asks the kernel for each page of the file whether it can be read without the disk, so that no read can fail "
        f"half way: {fastest('limits', limits.RESIDENT)} with nothing else done. The others read first, and a read "
        "that fails leaves a part of the new values in the module."
    )


def _cold_memory(fastest: Fastest) -> str:
    return (
        f"The disk: a cold read of the file takes {fastest('limits', limits.DIRECT)} past the page cache and "
        f"{fastest('limits', limits.BUFFERED)} through it with nothing else done, and the load "
        f"{fastest('cold/memory', 'modelstate.load')}."
    )


def _staging(fastest: Fastest) -> str:
    return (
        f"Reading the file into memory that is there takes {fastest('live/swap', live.READ)} on one thread, with "
        f"nothing else done, and the copy from memory {fastest('live/swap', live.MEMCPY)} on all of them. The rest is "
        "the check that every value is finite before the new version serves, a quarter of the copy, and opening the "
        "file, planning and committing the load, about 2 ms."
    )


def _save(fastest: Fastest) -> str:
    return (
        "The disk: the fastest bare write of the same bytes with the same durability takes "
        f"{fastest('save', saving.SYNCED)}, and the save {fastest('save', 'modelstate.save')}. The rest is the copy by "
        "which what is hashed is what is written, the hashing, and fsync of the directory."
    )


def _blocked(fastest: Fastest) -> str:
    return "What is beside the copy is `state_dict`, naming, and encoding the values that are not tensors."


def _keeping(fastest: Fastest) -> str:
    return (
        "The casts are the same. Beside them each parameter becomes the same object again: its old value is swapped "
        "out, and what refers to it is looked for first, so that nothing is changed where that would be refused."
    )


def _opening(fastest: Fastest) -> str:
    return (
        "Before the first name is given, it is checked that the ranges of the tensors fit the file and do not overlap, "
        "and the dtypes, shapes and offsets are put into columns."
    )


def _cast_memory(fastest: Fastest) -> str:
    return (
        f"The load takes {fastest('cast/memory', 'modelstate.load, dtype=bfloat16')}. Reading alone takes "
        f"{fastest('limits', limits.TOUCHED)} into memory, from where the values are cast, and then summed to find "
        "those that have become infinite. The others cast out of a map and do not look for such values; and where the "
        "disk cannot read a page of a map, the process ends with SIGBUS, and here it is an error."
    )


LIMITS: dict[str, Callable[[Fastest], str]] = {
    "mapped": _mapped,
    "first-forward": _first_forward,
    "own-memory": _own_memory,
    "in-place": _in_place,
    "default": _default,
    "cold-memory": _cold_memory,
    "cast-memory": _cast_memory,
    "keeping": _keeping,
    "opening": _opening,
    "staging": _staging,
    "cold": _cold,
    "cast": _cast,
    "int8": _int8,
    "shards": _shards,
    "save": _save,
    "blocked": _blocked,
}
"""By the key of the row in `bench.goals.ROWS`."""
