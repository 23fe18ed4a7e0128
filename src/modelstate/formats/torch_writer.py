"""A file of `torch.save` that `torch.load(weights_only=True)` reads: there in full, on the disk, or not at all."""

import io
import mmap
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from modelstate.errors import ModelStateError, UnsavableError
from modelstate.formats.block_writer import LazyTensor, check_repeated, threads_within, write_blocks
from modelstate.formats.safetensors import listed, nbytes_of
from modelstate.formats.tree import is_container
from modelstate.formats.write import write_file
from modelstate.io import write_system
from modelstate.io.atomic import LOCK_TIMEOUT_SECONDS, Output, unfinished_file, write_errors
from modelstate.torch_compat.plain import remedies_for, why_not_plain


def write_torch_file(
    state: Mapping[Any, Any],
    path: str,
    *,
    overwrite: bool,
    max_memory_bytes: int | None = None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> dict[str, int]:
    """Saves what `torch.load(weights_only=True)` reads, and returns the path of the file and its bytes.

    Raises `UnsavableError` for values that it does not read, what `write_file` raises, and `MemoryBudgetError`.
    """
    _check_tensors(state, path)
    with _all_here(state, path, max_memory_bytes, lock_timeout_seconds) as here:
        return write_file(
            path,
            lambda output: _save(here, output, path),
            overwrite=overwrite,
            lock_timeout_seconds=lock_timeout_seconds,
        )


def _check_tensors(state: Mapping[Any, Any], path: str) -> None:
    """Raises `UnsavableError` for tensors that pickle takes, and of which a file would have no values, or a part."""
    refused = {name: one for name, one in _leaves(state) if isinstance(one, torch.Tensor) and remedies_for([one])}
    if refused:
        raise UnsavableError(
            "tensors have no values here, or only a part of them",
            where=path,
            found=listed({name: why_not_plain(tensor) for name, tensor in refused.items()}),
            remedy="; ".join(remedies_for(refused.values())),
        )


def _save(state: Mapping[Any, Any], output: Output, path: str) -> None:
    writer = _Writer(output)
    try:
        torch.save(state, writer)  # type: ignore[arg-type]
    except ModelStateError:
        raise
    except Exception as error:
        raise UnsavableError(
            "torch.save cannot save this",
            where=path,
            found=f"{type(error).__name__}: {error}",
            remedy="leave out what cannot be pickled",
        ) from error
    if writer.failed is not None:
        raise writer.failed
    # The file is mapped, so no tensor is read for it.
    if (failure := _load_error(output.path)) is not None:
        refused = {name: type(value) for name, value in _values_in(state) if not _is_loadable(value)}
        raise UnsavableError(
            "torch.load(weights_only=True) does not read values of these classes",
            where=path,
            found=listed({name: f"{cls.__module__}.{cls.__qualname__}" for name, cls in refused.items()}) or failure,
            remedy="save to a path that ends in .safetensors, which keeps every value that has an encoding, or leave "
            "these out",
        ) from failure


def _load_error(source: str | io.BytesIO) -> Exception | None:
    """What `torch.load(weights_only=True)` raises for a file; None where it reads it."""
    try:
        torch.load(source, map_location="cpu", mmap=isinstance(source, str), weights_only=True)
    except Exception as error:
        return error
    return None


def _is_loadable(value: object) -> bool:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return _load_error(buffer) is None


def _values_in(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a tree but plain tensors, and containers that are loaded if what is in them is."""
    if type(node) in (dict, OrderedDict, list, tuple):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _values_in(value, f"{name}.{key}" if name else str(key))
    elif type(node) not in (torch.Tensor, torch.nn.Parameter):
        yield name, node


@contextmanager
def _all_here(
    state: Mapping[Any, Any], path: str, max_memory_bytes: int | None, lock_timeout_seconds: float
) -> Iterator[Mapping[Any, Any]]:
    """The state with tensors that show a file beside the path in place of those that come later.

    torch.save wants all tensors at once; so they are no more in memory than the pages of a file are. The file has no
    name any more when they are shown.
    """
    found: dict[object, LazyTensor] = {}
    names: dict[object, str] = {}
    for name, one in _later_in(state):
        found.setdefault(one.key, one)
        names.setdefault(one.key, name)
    if not found:
        yield state
        return
    # Those with wide elements first, so that all lie at multiples of their element's size.
    several = sorted(found.items(), key=lambda item: -item[1].itemsize)
    check_repeated({names[key]: one for key, one in several}, path)
    threads = threads_within({names[key]: one for key, one in several}, max_memory_bytes, path)
    end = sum(nbytes_of(one) for _, one in several)
    # Nobody else reads this file, which soon has no name.
    with write_errors(path), unfinished_file(path, 0o600, lock_timeout_seconds) as output:
        output.reserve(end)
        write_blocks(output, 0, [one for _, one in several], threads)
        memory = mmap.mmap(output.descriptor, end, mmap.MAP_PRIVATE) if end else b""
        write_system.unlink(output.path)
        output.is_synced = True  # nobody needs it after a crash
    made, at = {}, 0
    for key, one in several:
        if count := one.numel():
            made[key] = torch.frombuffer(memory, dtype=one.dtype, count=count, offset=at).view(one.shape)
        else:
            made[key] = torch.empty(one.shape, dtype=one.dtype)
        at += nbytes_of(one)
    yield _put(state, made)


def _later_in(node: Any) -> Iterator[tuple[str, LazyTensor]]:
    return ((name, one) for name, one in _leaves(node) if isinstance(one, LazyTensor))


def _leaves(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if is_container(node):
        for key, one in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _leaves(one, f"{name}.{key}" if name else str(key))
    else:
        yield name, node


def _put(node: Any, made: Mapping[object, torch.Tensor]) -> Any:
    """A copy of the containers with tensors in them."""
    if isinstance(node, LazyTensor):
        return made[node.key]
    if next(_later_in(node), None) is None:
        return node
    if isinstance(node, Mapping):
        copy: Any = type(node)()
        copy.update((key, _put(one, made)) for key, one in node.items())
        if hasattr(node, "_metadata"):
            copy._metadata = node._metadata
        return copy
    return type(node)(_put(one, made) for one in node)


class _Writer:
    """What `torch.save` writes to.

    Torch's own writer must not see an error: it would go on writing, and say what it wanted to do next instead of what
    was wrong. So the first one is kept, and nothing is written any more.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self.failed: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if self.failed is None:
            try:
                self._output.append(view)
            except BaseException as error:
                self.failed = error
        return len(view)

    def flush(self) -> None:
        pass
