"""What keeps a goal from being met: a sentence or two for each row, with the figures of the run."""

from collections.abc import Callable

from bench import limits, live, saving

Fastest = Callable[..., str]
"""Returns a time in words. Its arguments are the key of a table, the name of a row, and a stage. In place of a name,
the beginning of several names selects the fastest of their rows."""


def _mapped(fastest: Fastest) -> str:
    return (
        f"A load that maps reads no values, so the {fastest('large/meta', 'modelstate.load')} for the decoder are "
        "Python: most of it makes the plan, the undo journal and the report, which the other loaders do not have."
    )


def _first_forward(fastest: Fastest) -> str:
    return (
        f"The load itself takes {fastest('large/meta', 'modelstate.load')}. After it, every loader that maps the file "
        f"does the same work: {fastest('limits', limits.FORWARD)} for the forward alone, and the page faults of the "
        "map. The ranges beside the times show how much the runs of one contender differ."
    )


def _own_memory(fastest: Fastest) -> str:
    return (
        "The cost is fresh memory. With nothing else done, reading the file into fresh small pages takes "
        f"{fastest('limits', limits.SMALL)}, and `userfaultfd`, which the load uses, "
        f"{fastest('limits', limits.FILLED)}; the load takes {fastest('large/meta', 'modelstate.load, map=False')}. "
        f"Into fresh huge pages it is {fastest('limits', limits.HUGE)}, and into memory that exists "
        f"{fastest('limits', limits.TOUCHED)}."
    )


def _in_place(fastest: Fastest) -> str:
    return (
        f"With nothing else done, reading into existing small pages, as a module's are, takes "
        f"{fastest('limits', limits.TOUCHED_SMALL)}, and into huge ones {fastest('limits', limits.TOUCHED)}; the load "
        f"takes {fastest('large/memory', 'modelstate.load, in_place=True')}. The other loaders copy the same bytes. "
        "Planning, checking and reporting take what a load takes that only maps, "
        f"{fastest('large/meta', 'modelstate.load')}."
    )


def _cold(fastest: Fastest) -> str:
    return (
        f"Reading past the page cache into existing memory takes {fastest('limits', limits.DIRECT)}, and a load into "
        f"such memory {fastest('cold/memory', 'modelstate.load, in_place=True')}. A mapped file has to come through "
        f"the page cache, which needs fresh memory: {fastest('limits', limits.BUFFERED)} for a buffered read with "
        f"nothing else done. The load with its first forward takes {fastest('cold', 'modelstate.load', 'forward')}: "
        f"the forward, {fastest('limits', limits.FORWARD)} by itself, starts before all pages are there."
    )


def _cast(fastest: Fastest) -> str:
    return (
        "The cost is fresh memory, the same for every loader. The load takes "
        f"{fastest('cast', 'modelstate.load, dtype=bfloat16')}. It casts from a map of the file, as the fastest other "
        "loaders do, but locks the map in memory first, and looks at all values once more for those that have become "
        "infinite. The other loaders do not look for such values; if the file is truncated meanwhile, their process "
        "ends with SIGBUS, where this load raises an error. With nothing else done, reading the file in blocks and "
        f"casting them into fresh small pages takes {fastest('limits', limits.CAST)}."
    )


def _cast_memory(fastest: Fastest) -> str:
    return (
        f"The load takes {fastest('cast/memory', 'modelstate.load, dtype=bfloat16')}. It casts from a map of the file, "
        "as the other loaders do, but locks the map in memory first, and looks at all values once more for those that "
        "have become infinite. The other loaders do not look for such values; if a page of the map cannot be read, "
        "their process ends with SIGBUS, where this load raises an error."
    )


def _int8(fastest: Fastest) -> str:
    return (
        f"Reading the bytes takes {fastest('limits', limits.TOUCHED)} with nothing else done. The rest is fresh memory "
        "for the weights, and the scales and the rounding, which torchao computes for every contender."
    )


def _shards(fastest: Fastest) -> str:
    return "Each further file is opened and mapped, and its header is parsed."


def _default(fastest: Fastest) -> str:
    return (
        f"A load of the large decoder takes {fastest('default/large', 'modelstate.load')}. It copies from a map of the "
        "file, as the other loaders do. Before it writes the first byte, it plans and checks everything, takes a read "
        "lease, and locks the pages of the file in memory, so that nothing can fail half way; where the kernel is slow "
        f"to lock them, it reads the file instead ({fastest('limits', limits.TOUCHED)} with nothing else done), after "
        f"it has asked whether every page is there ({fastest('limits', limits.RESIDENT)}). It always reads files of "
        "less than 256 MiB: to make and lock a map would take longer. The other loaders do none of this: where one of "
        "their reads fails, the module has some of the new values, or the process ends."
    )


def _cold_memory(fastest: Fastest) -> str:
    return (
        f"The disk: with nothing else done, reading the cold file takes {fastest('limits', limits.DIRECT)} past the "
        f"page cache and {fastest('limits', limits.BUFFERED)} through it; the load takes "
        f"{fastest('cold/memory', 'modelstate.load')}."
    )


def _staging(fastest: Fastest) -> str:
    return (
        f"With nothing else done, reading the file into existing memory takes {fastest('live/swap', live.READ)} on one "
        f"thread, and the copy from memory {fastest('live/swap', live.MEMCPY)} on all of them. The rest is the check "
        "that every value is finite, and opening the file, planning and committing the load."
    )


def _save(fastest: Fastest) -> str:
    return (
        "The disk: the fastest bare write of the same bytes with the same durability takes "
        f"{fastest('save', saving.SYNCED)}, and the save {fastest('save', 'modelstate.save')}. The save also copies "
        "each block before it is hashed and written, so that both are of the same bytes, and syncs the directory."
    )


def _blocked(fastest: Fastest) -> str:
    return "Besides the copy, the call runs `state_dict`, names the tensors, and encodes the other values."


def _keeping(fastest: Fastest) -> str:
    return (
        "The casts are the same. In addition, other references to each parameter are searched for before its value is "
        "swapped, so that nothing has changed where a swap is refused."
    )


def _opening(fastest: Fastest) -> str:
    return (
        "Opening also checks that the byte ranges of the tensors lie within the file and do not overlap, and arranges "
        "dtypes, shapes and offsets in columns."
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
