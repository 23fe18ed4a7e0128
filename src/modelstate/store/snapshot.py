"""The state that a save writes: captured and encoded, and copied where the save goes on in the background."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from modelstate.distributed.agreement import Agreement
from modelstate.distributed.writing import CollectiveWriter, ShardedTensor
from modelstate.errors import ModelStateError, UnsavableError
from modelstate.formats.block_writer import LazyTensor
from modelstate.formats.manifest import check_size
from modelstate.formats.safetensors import nbytes_of
from modelstate.formats.serialize import SerializedState, serialize
from modelstate.io.engine import for_each, read_threads
from modelstate.io.memory import empty_cpu
from modelstate.objects.objects import Target, capture
from modelstate.objects.parts import Kind
from modelstate.objects.per_rank import gathered
from modelstate.spec import contiguous_stride
from modelstate.torch_compat.sharding import reshard

_ALIGN = 64
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """The objects of a checkpoint that is about to be written. The mappings go by the paths of the objects."""

    kinds: Mapping[str, Kind]
    ranks: Mapping[str, int]
    """For each object the number of ranks whose states it has; 0 for one state for all of them."""
    states: Mapping[str, SerializedState]
    frozen: Mapping[str, frozenset[str]]
    """For each module, the names of parameters that training does not change."""
    pin: bool
    begin_seconds: float
    """When the save began, by `time.perf_counter`."""

    @property
    def nbytes(self) -> int:
        """The size of the tensors."""
        return sum(nbytes_of(tensor) for state in self.states.values() for tensor in state.tensors.values())

    @property
    def spread(self) -> list[str]:
        """The objects whose tensors are spread over several ranks."""
        return [
            path
            for path, state in self.states.items()
            if any(isinstance(tensor, ShardedTensor) for tensor in state.tensors.values())
        ]


def job_of(
    targets: Mapping[str, Target],
    agreement: Agreement,
    writer: CollectiveWriter | None,
    pin: bool = False,
    begin_seconds: float = 0.0,
) -> Job:
    """Encodes the state of the objects. Raises the error for which it cannot be saved."""
    with agreement.phase("capturing the state"):
        for target in targets.values():
            if agreement.is_collective and target.kind is Kind.MODULE:
                reshard(target.obj)
        parts = capture(targets)
    if agreement.is_collective:
        parts = gathered(parts, agreement)
    of_shard = None if writer is None else writer.of_shard
    with agreement.phase("encoding the state"):
        states = {
            path: serialize(part.tree, path, as_tree=part.kind is not Kind.MODULE, of_shard=of_shard)
            for path, part in parts.items()
        }
        for path, state in states.items():
            with size_errors(path):
                check_size(state.manifest(None, {}))
    frozen = {
        path: frozenset(
            name for name, param in target.obj.named_parameters(remove_duplicate=False) if not param.requires_grad
        )
        if target.kind is Kind.MODULE
        else frozenset()
        for path, target in targets.items()
    }
    kinds = {path: part.kind for path, part in parts.items()}
    return Job(kinds, {path: part.ranks for path, part in parts.items()}, states, frozen, pin, begin_seconds)


@contextmanager
def size_errors(path: str) -> Iterator[None]:
    """Raises `UnsavableError` in place of the `ValueError` for a header or a manifest that is too large."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, ModelStateError):
            raise
        raise unsavable(path, error) from error


def unsavable(where: str, found: object) -> UnsavableError:
    """Returns the error for a state with more in it than one checkpoint can hold."""
    return UnsavableError(
        "this is more than a checkpoint of a store holds",
        where=where,
        found=found,
        remedy="large values are better kept as tensors or arrays; shard_size_bytes= makes more files",
    )


class Staging:
    """A buffer of CPU memory for the copy of a state: it grows to the largest one, and is pinned for CUDA."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The size of the buffer now."""
        return 0 if self._buffer is None else self._buffer.numel()

    def copy(self, states: Iterable[SerializedState]) -> None:
        """Copies the tensors of the states, and replaces them by the copies. The copies before are overwritten.

        Raises torch's error where there is not enough memory; then no tensor is replaced.
        """
        states = list(states)
        tensors = [local_part(tensor) for state in states for tensor in state.tensors.values()]
        copies = self._allocate(tensors)
        _copy_all(tensors, copies)
        remaining = iter(copies)
        for state in states:
            state.tensors = {
                name: tensor.with_local(next(remaining)) if isinstance(tensor, ShardedTensor) else next(remaining)
                for name, tensor in state.tensors.items()
            }

    def _allocate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-nbytes_of(tensor) // _ALIGN) * _ALIGN
        pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        buffer = self._buffer
        if buffer is None or buffer.numel() < end or (pinned and not buffer.is_pinned()):
            self._buffer = buffer = None  # released before the new one is allocated
            if pinned:
                buffer = torch.empty(end, dtype=torch.uint8, pin_memory=True)
            else:
                buffer = empty_cpu((max(end, 1),), torch.uint8)
            self._buffer = buffer
        storage = buffer.untyped_storage()
        with torch.inference_mode(False):
            return [
                torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
                    storage, start // tensor.itemsize, tuple(tensor.shape), contiguous_stride(tensor.shape)
                )
                for tensor, start in zip(tensors, starts, strict=True)
            ]


def local_part(tensor: torch.Tensor | LazyTensor) -> torch.Tensor:
    """Returns what this rank holds of a tensor of a live state."""
    held = tensor.local if isinstance(tensor, ShardedTensor) else tensor
    assert isinstance(held, torch.Tensor)
    return held


def _copy_all(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Copies tensors with several threads. Each thread takes pieces of at most a few megabytes."""
    jobs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
    total = 0
    devices: set[torch.device] = set()
    for tensor, copy in zip(tensors, copies, strict=True):
        if tensor.device.type != "cpu":
            devices.add(tensor.device)
        for pair in _pieces(tensor, copy):
            if total >= _BLOCK_BYTES:
                jobs.append([])
                total = 0
            jobs[-1].append(pair)
            total += nbytes_of(pair[1])

    @contextmanager
    def worker() -> Iterator[Callable[[list[tuple[torch.Tensor, torch.Tensor]]], None]]:
        def copy(job: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            for source, target in job:
                target.copy_(source, non_blocking=source.device.type == "cuda")

        with torch.inference_mode(False), torch.no_grad():
            yield copy

    for_each(jobs, worker, min(read_threads(), len(jobs)), with_torch=True)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _pieces(tensor: torch.Tensor, copy: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    nbytes = nbytes_of(tensor)
    if nbytes <= _BLOCK_BYTES or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return [(tensor.detach(), copy)]
    step = _BLOCK_BYTES // tensor.itemsize
    with torch.inference_mode(False):
        source, target = tensor.detach().view(-1), copy.view(-1)
    return [(source[at : at + step], target[at : at + step]) for at in range(0, tensor.numel(), step)]
