"""What every test can use."""

import gc
import logging
import math
import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from modelstate.errors import ModelStateError
from tests.real_files import FILES, path_of

if TYPE_CHECKING:
    from tests.programs import Forks

# The compiler of torch: no vector instructions, which it would try out in every process, and little optimization.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")

# A test that takes long on a busy machine is no failure. Continuous integration tries the same examples in each run, so
# that no run fails by chance; elsewhere each run tries new ones.
settings.register_profile(
    "busy", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("busy")

WHOLE_FILE_IS_SLOW = re.compile(r"^pytestmark = (\[.*)?pytest\.mark\.slow\b", re.MULTILINE)


PACKAGES = "MODELSTATE_TEST_PACKAGES"
"""The environment variable with the folder of what `tests.serve.packages` compiles, for all processes of a run."""


def pytest_configure(config: pytest.Config) -> None:
    """Tests interrupt themselves. A shell has what it runs in the background ignore that."""
    if not hasattr(config, "workerinput"):
        os.environ[PACKAGES] = tempfile.mkdtemp(prefix="modelstate-packages-")
    elif config.args == config.getini("testpaths"):
        # Each worker begins to collect at another place, so that each compiles a part of the files for all.
        places = (config.rootpath / "tests").glob("[a-z]*")
        paths = sorted(str(path) for path in places if path.is_dir() or path.name.startswith("test_"))
        at = len(paths) * int(config.workerinput["workerid"][2:]) // config.workerinput["workercount"]
        config.args = [*paths[at:], *paths[:at]]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the packages of this run."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(PACKAGES, ""), ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    """Skips the tests of a feature for which this torch is too old."""
    with _skipped_by_an_old_torch():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """As `pytest_runtest_setup`."""
    with _skipped_by_an_old_torch():
        return (yield)


@contextmanager
def _skipped_by_an_old_torch() -> Iterator[None]:
    try:
        yield
    except ModelStateError as error:
        if error.has_fields and error.what.endswith("need a newer PyTorch"):
            pytest.skip(f"{error.what}: {error.expected}")
        raise


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out a file that is slow as a whole where slow tests are left out: its imports may take seconds."""
    is_named = collection_path in (Path(argument.partition("::")[0]).absolute() for argument in config.args)
    if is_named or config.getoption("markexpr") != "not slow" or collection_path.suffix != ".py":
        return None
    return True if WHOLE_FILE_IS_SLOW.search(collection_path.read_text()) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Collects tests without collections of garbage: what is imported stays, and they pass over all of it again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, each of two begins with files of slow tests, so that both end at about the same time.

    Workers must have the same tests, so that no name of one may have the address of an object.
    """
    if with_address := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"give ids= to the parameters of {', '.join(with_address)}")
    _mark_slow_cases(items)
    if not hasattr(config, "workerinput"):
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    paths = sorted({item.path for item in items}, key=lambda path: (path not in slow, path))
    turns = [*paths[::2], *paths[1::2]]  # each worker gets one half of the tests first
    rank = {path: place for place, path in enumerate(turns)}
    items.sort(key=lambda item: rank[item.path])


def _mark_slow_cases(items: list[pytest.Item]) -> None:
    """Marks all cases of a test as slow, but for as many as its `slow_except` says, which are drawn."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow_except"):
            cases.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    for found in cases.values():
        mark = found[0].get_closest_marker("slow_except")
        assert mark is not None
        fast = set(random.Random(len(found)).sample(range(len(found)), min(mark.args[0], len(found))))
        for index, item in enumerate(found):
            if index not in fast:
                item.add_marker("slow")


@pytest.fixture(autouse=True, scope="module")
def no_collection_of_what_was_there_before() -> None:
    """Keeps collections fast: they pass over all objects of the imported libraries, which take 0.3 s and more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_stacks_of_seeds() -> None:
    """Keeps `torch.manual_seed` fast: for each kind of device that may be used later, it formats the stack."""
    import torch

    for kind in ("cuda", "xpu", "mtia"):
        getattr(torch, kind).traceback = SimpleNamespace(format_stack=list)


@pytest.fixture(scope="session")
def new_interpreter() -> "Iterator[Forks]":
    """Programs that must not find more than torch imported run as forks of this interpreter."""
    from tests.programs import Forks

    with Forks("import torch") as forks:
        yield forks


@pytest.fixture(autouse=True)
def no_signal_of_another_test() -> None:
    """A signal, and the end of a loop, are for all that comes later in a process, which is other tests here."""
    # Not above: the process that starts the workers would import torch, which takes seconds, before it starts them.
    from modelstate.store import deadline, resumable

    deadline._came.clear()
    resumable._loops.last_stop = -math.inf


class Log(logging.Handler):
    """The records of modelstate's loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def text(self) -> str:
        return "\n".join(record.getMessage() for record in self.records)


@pytest.fixture
def log() -> Iterator[Log]:
    """What is logged in a test. pytest's own plugin would visit fifty loggers of torch twelve times in each test."""
    handler, logger = Log(), logging.getLogger("modelstate")
    level = logger.level
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes with one thread. Convolutions of oneDNN add in an order that depends on the number of threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def real_file() -> Callable[[str], Path]:
    """The path of a published checkpoint, by its name in `tests.real_files`; skips where it was not fetched."""

    def find(name: str) -> Path:
        path = path_of(name)
        if not path.exists():
            how = "make demo" if name == "minilm" else "make setup"
            pytest.skip(f"{name} checkpoint ({FILES[name].requirement}) not fetched: run {how}")
        return path

    return find
