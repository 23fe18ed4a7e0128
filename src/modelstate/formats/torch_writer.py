"""Writes files that `torch.load(weights_only=True)` reads: the complete file is on the disk, or nothing changes."""

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
from modelstate.torch_compat.private import set_version_metadata


def write_torch_file(
    state: Mapping[Any, Any],
    path: str,
    *,
    overwrite: bool,
    max_memory_bytes: int | None = None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> dict[str, int]:
    """Saves a state with `torch.save`, and returns the path of the file and its size.

    Lazy tensors are written to a temporary file first, which is mapped, so that they need no memory.

    Raises:
        UnsavableError: A value cannot be pickled, or `torch.load(weights_only=True)` does not read it.
        MemoryBudgetError: A lazy tensor does not fit into `max_memory_bytes`.

    Also raises what `write_file` raises.
    """
    _check_tensors(state, path)
    with _without_lazy_tensors(state, path, max_memory_bytes, lock_timeout_seconds) as complete:
        return write_file(
            path,
            lambda output: _save(complete, output, path),
            overwrite=overwrite,
            lock_timeout_seconds=lock_timeout_seconds,
        )


def _check_tensors(state: Mapping[Any, Any], path: str) -> None:
    """Raises `UnsavableError` for tensors that pickle accepts, but of which a file would contain no or a part of the
    values."""
    refused = {
        name: value for name, value in _leaves(state) if isinstance(value, torch.Tensor) and remedies_for([value])
    }
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
    # torch.load maps the file, so it reads no tensor.
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
    """The exception of `torch.load(weights_only=True)` for a file, or None."""
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
    """All values of a tree except plain tensors and the containers that torch.load always accepts."""
    if type(node) in (dict, OrderedDict, list, tuple):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _values_in(value, f"{name}.{key}" if name else str(key))
    elif type(node) not in (torch.Tensor, torch.nn.Parameter):
        yield name, node


@contextmanager
def _without_lazy_tensors(
    state: Mapping[Any, Any], path: str, max_memory_bytes: int | None, lock_timeout_seconds: float
) -> Iterator[Mapping[Any, Any]]:
    """Yields the state with tensors that are mapped from a temporary file in place of the lazy tensors.

    torch.save needs all tensors at once. The mapped tensors are in memory only as far as the pages of a file are. The
    file is removed from its directory before the block begins.
    """
    lazy: dict[object, LazyTensor] = {}
    names: dict[object, str] = {}
    for name, tensor in _lazy_tensors(state):
        lazy.setdefault(tensor.key, tensor)
        names.setdefault(tensor.key, name)
    if not lazy:
        yield state
        return
    # Tensors with wide elements come first, so that every tensor lies at a multiple of its element size.
    ordered = sorted(lazy.items(), key=lambda item: -item[1].itemsize)
    check_repeated({names[key]: tensor for key, tensor in ordered}, path)
    threads = threads_within({names[key]: tensor for key, tensor in ordered}, max_memory_bytes, path)
    end = sum(nbytes_of(tensor) for _, tensor in ordered)
    # Only this process reads the file.
    with write_errors(path), unfinished_file(path, 0o600, lock_timeout_seconds) as output:
        output.reserve(end)
        write_blocks(output, 0, [tensor for _, tensor in ordered], threads)
        memory = mmap.mmap(output.descriptor, end, mmap.MAP_PRIVATE) if end else b""
        write_system.unlink(output.path)
        output.is_synced = True  # the file is not needed after a crash
    tensors, offset = {}, 0
    for key, tensor in ordered:
        if count := tensor.numel():
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset)
            tensors[key] = flat.view(tensor.shape)
        else:
            tensors[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        offset += nbytes_of(tensor)
    yield _replaced(state, tensors)


def _lazy_tensors(node: Any) -> Iterator[tuple[str, LazyTensor]]:
    return ((name, value) for name, value in _leaves(node) if isinstance(value, LazyTensor))


def _leaves(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if is_container(node):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, node


def _replaced(node: Any, tensors: Mapping[object, torch.Tensor]) -> Any:
    """The tree with `tensors` in place of the lazy tensors; containers without lazy tensors are not copied."""
    if isinstance(node, LazyTensor):
        return tensors[node.key]
    if next(_lazy_tensors(node), None) is None:
        return node
    if isinstance(node, Mapping):
        copy: Any = type(node)()
        copy.update((key, _replaced(value, tensors)) for key, value in node.items())
        if hasattr(node, "_metadata"):
            set_version_metadata(copy, node._metadata)
        return copy
    return type(node)(_replaced(value, tensors) for value in node)


class _Writer:
    """The file object that `torch.save` writes to.

    torch's writer must not see an error: it would continue, and report its next failure instead of the first. So the
    first error is kept, and nothing is written after it.
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
