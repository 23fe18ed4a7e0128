"""Values that are brought in by one preparation of a load, and put in place by a later one."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from modelstate.errors import StalePlanError
from modelstate.place.fetch import ask_for, bring_in
from modelstate.place.stage import Progress, stage
from modelstate.plan.assignment import Assignment
from modelstate.plan.derived import Derived, Source
from modelstate.plan.placement import is_plain
from modelstate.plan.prepare import Preparation
from modelstate.read.verify import what_to_verify


class _Slot(NamedTuple):
    """What a slot has to be at the end, as it was at the beginning."""

    given: str
    kind: type
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Staged:
    """The values of a load that has been planned and undone, and that is going to be planned again.

    They depend on the checkpoint and on what the slots are like, not on what is in them: the model may be used, and
    trained, while they are brought in. What the model's own loading code has looked at is left to the second plan,
    since that code will look again; so is what depends on the model's values, or costs nothing.
    """

    def __init__(self, preparation: Preparation, verify: bool, notes: Sequence[str] = ()) -> None:
        """Takes the preparation over, before it is undone; `notes` are for the report.

        Raises `ChecksumError` where nothing can be verified.
        """
        if verify:
            what_to_verify(preparation.checkpoint)
        self.plan = preparation.plan()
        self.verified_bytes = 0
        self._verify, self._notes = verify, [*notes]
        self._given: list[Assignment] = []
        waiting = [made for made in preparation.assignments if _comes_from_elsewhere(made)]
        self._slots = {made.name: _slot(made) for made in waiting}
        for made in waiting:
            if is_plain(made.param):
                made.param = made.param.detach()  # which stays what it is, whatever becomes of the model meanwhile
        preparation.assignments, preparation.moves = waiting, []
        if preparation.options.transform is not None:
            _ = preparation.own_memory  # looked up now, in the thread that has the model
        self._preparation: Preparation | None = preparation
        self.nbytes = preparation.nbytes

    def bring_in(self, progress: Progress) -> None:
        """Reads, casts and transforms. `progress` hears of the bytes, and ends it by raising.

        Raises `ReadFailedError`, `ChecksumError` and `TransformError`.
        """
        preparation = self._preparation
        assert preparation is not None
        if self._verify:
            self.verified_bytes = preparation.checkpoint.verify(lambda _: progress(0))
        self._notes += ask_for(preparation)
        for made in preparation.assignments:
            if made.placement.mapped:
                made.final = made.value
        stage(preparation, progress)
        _wait_for_devices(preparation.assignments)
        self._notes += bring_in(preparation.assignments, progress)

    def give(self, preparation: Preparation) -> None:
        """Hands the values to a second preparation of the same load. Raises `StalePlanError` where a slot changed."""
        assert self._preparation is not None
        ready = {made.name: made for made in self._preparation.assignments if made.final is not None}
        for made in preparation.assignments:
            first = ready.get(made.name)
            if first is not None and made.final is None and made.stored is not None:
                self._check(made, preparation)
                self._hand_over(first, made, preparation)
        preparation.notes += self._notes
        preparation.overflows.add(self._preparation.overflows.counts)
        preparation.means = self._preparation.means  # which may have become others, for a file that was cold
        preparation.held = self._preparation.held

    def _check(self, made: Assignment, preparation: Preparation) -> None:
        was, now = self._slots[made.name], _slot(made)
        if was != now:
            raise StalePlanError(
                "the model is no longer what was planned for; nothing has been changed",
                where=f"{preparation.names[0]}: {made.name}",
                expected=was,
                found=now,
                remedy=LOAD_AGAIN,
            )

    def _hand_over(self, first: Assignment, made: Assignment, preparation: Preparation) -> None:
        final = first.final
        # What a transform returned may be memory that the model has come to hold since.
        if final is not None and made.placement.name == "copy" and first.transform is not None:
            final = final.clone() if preparation.own_memory.hold(final) else final
        made.final, made.dtype, made.placement = final, first.dtype, first.placement
        made.freezes, made.seconds = first.freezes, first.seconds
        self._given.append(made)

    def release(self) -> None:
        """Frees everything that has been brought in, whoever still holds the plans."""
        for made in (*(self._preparation.assignments if self._preparation is not None else ()), *self._given):
            made.final = None
        self._preparation, self._given = None, []


LOAD_AGAIN = "load again, and leave the model's parameters what they are until the result"


def _comes_from_elsewhere(made: Assignment) -> bool:
    """Whether the value waits to be brought in, and comes from the checkpoint alone."""
    if made.final is not None or made.stored is None or not _of_checkpoint(made.stored):
        return False
    stays = made.placement.name == "copy" and made.transform is None and made.remake is None
    return not (stays and isinstance(made.stored, torch.Tensor))


def _of_checkpoint(stored: Source) -> bool:
    """Whether it is not made by code of the model's, as an initialiser is."""
    if isinstance(stored, Derived):
        return bool(stored.parts) and all(map(_of_checkpoint, stored.parts))
    return True


def _slot(made: Assignment) -> _Slot:
    param = made.param
    stride = tuple(param.stride()) if is_plain(param) else ()
    return _Slot(made.given, type(param), param.shape, stride, param.dtype, param.device)


def _wait_for_devices(assignments: Iterable[Assignment]) -> None:
    """What was begun on the stream of this thread is done, before other threads use it on theirs."""
    finals = [made.final for made in assignments if made.final is not None]
    for device in {final.device for final in finals if final.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
