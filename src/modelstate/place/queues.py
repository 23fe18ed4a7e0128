"""Copies to devices that go on while the next block is read."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from modelstate.read.stream import Wait


class Queues:
    """A stream of copies for each device and each thread."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        # The memory of the targets may still be in use by what the caller has queued before.
        self._before = {device: torch.cuda.current_stream(device) for device in devices}
        self._own = threading.local()

    def copy(self, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Wait:
        """Begins to copy values out of pinned memory; returns what waits for the end. They are cast on the device."""
        used: dict[torch.device, Any] = {}
        for target, value in zip(targets, values, strict=True):
            if target.device not in self._before:
                target.copy_(value)
                continue
            stream = used.setdefault(target.device, self._of_this_thread(target.device))
            with torch.cuda.stream(stream):
                there = value.to(target.device, non_blocking=True) if value.dtype != target.dtype else value
                target.copy_(there, non_blocking=True)
        events = [stream.record_event() for stream in used.values()]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def _of_this_thread(self, device: torch.device) -> Any:
        if not hasattr(self._own, "streams"):
            self._own.streams = {}
        streams: dict[torch.device, Any] = self._own.streams
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            streams[device].wait_stream(self._before[device])
        return streams[device]
