"""The metrics of the server, for Prometheus."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LISTED_VERSIONS = 100
"""The number of versions that have a line of their own. Older ones are left out, or the page would grow without end."""
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Counters of one server. Every method may be called from any thread."""

    def __init__(self, version: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        Gauge("modelstate_version", "The serving version.", registry=self._registry).set_function(version)
        self._swaps = Counter("modelstate_swaps", "Swaps and rollbacks by result.", ["result"], registry=self._registry)
        self._seconds = Histogram(
            "modelstate_swap_seconds", "The duration of successful swaps.", registry=self._registry, buckets=_BUCKETS
        )
        self._requests = Counter(
            "modelstate_requests", "Requests by the version that answered.", ["version"], registry=self._registry
        )
        self._oldest = 1

    def answered(self, version: int) -> None:
        """Counts a request that this version answered."""
        self._requests.labels(str(version)).inc()

    @contextmanager
    def change(self, done: str) -> Iterator[None]:
        """Counts the swap or rollback of the `with` block as `done`, or under the class of its error."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            self._swaps.labels(type(error).__name__).inc()
            raise
        self._swaps.labels(done).inc()
        if done == "swapped":
            self._seconds.observe(time.perf_counter() - began)

    def forget_before(self, version: int) -> None:
        """Removes the lines of versions that are much older."""
        oldest = max(self._oldest, version - _LISTED_VERSIONS)
        for old in range(self._oldest, oldest):
            self._requests.remove(str(old))
        self._oldest = oldest

    def page(self) -> bytes:
        """Returns the metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
