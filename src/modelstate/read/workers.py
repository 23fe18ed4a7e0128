"""Threads that compute with torch, each of them alone."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch


def work_together(work: Callable[[int], None], threads: int, stop: threading.Event) -> None:
    """Runs `work`, with the numbers from 0, in so many threads at once, and waits for all of them.

    Operations of torch in them do not start threads of their own: theirs and ours would get in each other's way, and
    wait for each other more than they compute. With one thread it is the caller's, where they do.

    The first error of one of them, or an interrupt, sets `stop`, which the others have to look at, and comes through.
    """
    if threads <= 1:
        work(0)
        return
    begun = threading.Barrier(threads + 1)
    before = torch.get_num_threads()

    def run(number: int) -> None:
        torch.get_num_threads()  # the first call takes the number of the process, also after one has been set
        torch.set_num_threads(1)
        begun.wait()
        work(number)

    with ThreadPoolExecutor(threads, "modelstate-work") as pool:
        try:
            try:
                running = [pool.submit(run, number) for number in range(threads)]
                begun.wait()
            except BaseException:
                begun.abort()  # whoever waits for threads that will not come
                raise
            finally:
                # The number is each thread's own, but torch also gives the last one to threads that are new.
                torch.set_num_threads(before)
            for one in as_completed(running):
                one.result()
        except BaseException:
            stop.set()
            raise
