"""Kills a process at one of its requests."""

import os
import signal
import threading
from collections.abc import Callable

from tests.programs import CONTEXT
from tests.proxy import FaultProxy, HttpRequest


def exit_code_of_killed(proxy: FaultProxy, number: int, target: Callable[..., None], *arguments: object) -> int | None:
    """Runs a function in a process that is killed at a request; returns how it ended."""
    process, started = CONTEXT.Process(target=target, args=arguments), threading.Event()

    def kill(request: HttpRequest) -> None:
        if request.number == number:
            started.wait(60)  # the process may send requests before `start` knows its number
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)

    proxy.reset()
    proxy.fault = kill
    process.start()
    started.set()
    process.join(60)
    proxy.fault = None
    return process.exitcode
