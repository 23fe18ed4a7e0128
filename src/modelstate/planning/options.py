"""`LoadOptions`: the options of a load, written and checked once, for every call that loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

import msgspec
import torch
from torch import nn

from modelstate.arguments import TIMEOUT_SECONDS, check_integer, invalid_option
from modelstate.checkpoint.open import patterns_of
from modelstate.errors import OptionError, PlacementError
from modelstate.text_format import short_repr
from modelstate.torch_compat.dtypes import floating_dtype
from modelstate.torch_compat.modules import unwrapped
from modelstate.torch_compat.plain import is_fake, is_sharded
from modelstate.torch_compat.private import is_faking, is_transforming
from modelstate.torch_compat.sharding import mesh_device_type

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which torch may have been built without

    from modelstate.planning.transforms import ModuleTransform, Pairs, Transform
    from modelstate.remote.cache import Cache
    from modelstate.rules.rule import Rule
    from modelstate.rules.schema import Schema

AnyTransform: TypeAlias = "Transform | ModuleTransform"
_CPU = torch.device("cpu")


class SelectionArguments(TypedDict, total=False):
    """The keyword arguments that select what is read of a checkpoint. `LoadOptions` documents them."""

    key: str | None
    rules: Rule | Iterable[Rule] | Schema
    allow_missing: Iterable[str]
    allow_unexpected: Iterable[str]


class PlanArguments(SelectionArguments, total=False):
    """The keyword arguments of `plan`."""

    dtype: torch.dtype | str | None
    device: torch.device | str | None
    transform: AnyTransform | Mapping[str, AnyTransform | None] | None
    map: bool | None
    in_place: bool | None
    init_missing: bool
    read_once: bool
    cache: Cache | None


class LoadArguments(PlanArguments, total=False):
    """The keyword arguments of `load`, but for `background`, which decides what it returns."""

    verify: bool
    optimizers: Iterable[torch.optim.Optimizer]
    progress: bool | None
    max_memory_bytes: int | None
    process_group: ProcessGroup | None
    timeout_seconds: float


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `modelstate.load`, and of every call that loads, where it has them.

    They are passed as keywords. `modelstate.plan` takes those that decide about the plan: all up to `cache`.

    Args:
        key: The dotted path of the part of the checkpoint to load. None selects the part that has the model's names.
        rules: Changes of the checkpoint's names and tensors, applied in order; or a `Schema`, which gives the rules
            that lead from the checkpoint's version to the current version.
        allow_missing: Glob patterns of names that may be missing from the checkpoint.
        allow_unexpected: Glob patterns of names that may be missing from the model.
        dtype: The dtype of floating-point tensors after the load: a `torch.dtype`, or a name such as "bfloat16" or
            "bf16". None casts to the dtype of the model, and only where the cast is lossless.
        device: The device of all tensors after the load. None keeps each tensor on its device, and puts tensors on
            meta on the CPU.
        transform: A function that is called once for each tensor, in the order of the file, with the name in the model
            and the tensor as it is in the file. It returns the tensor to load, of the same shape; a tensor subclass is
            possible. A mapping from glob patterns, of names or of paths of modules, gives each tensor the function of
            the first pattern that matches; None as a function leaves the tensor alone. See also
            `modelstate.loading.Quantize`.
        map: Whether tensors on meta may be copy-on-write maps of the file, so that nothing is copied. None maps a file
            only where that is safe: the file cannot be protected from other processes on every file system, and
            `torch.save` overwrites in place a torch file that this process may write to. True maps such files too, and
            the notes of the report say what is not protected; overwriting such a file in place changes the model, or
            ends the process. False reads into new memory. Tensors that have memory are never mapped.
        in_place: Whether existing memory is read into directly, without a second copy of the values. None does so
            where the read cannot fail: for plain tensors on the CPU or a CUDA device, from files that a read lease can
            hold, when all their bytes are in the page cache; other values are read before the first one is put in
            place. What can still happen is that the kernel evicts bytes within that moment and the disk then fails to
            return them: the error names the tensors that may be old or damaged, or the kernel ends the process
            (SIGBUS) if it is casting them out of a map. False reads all values into memory of their own first. True
            never does; an I/O error or an interrupt during that read, on any rank, leaves a partly overwritten model.
            The report says for each tensor what was done.
        init_missing: Initialises tensors that the checkpoint lacks with the model's own code, as the constructor does:
            `reset_parameters` of the module that owns the tensor, and `_init_weights` of a Hugging Face model. The
            methods run on a copy, so they change no tensor of the checkpoint. The plan and the report name the methods
            for each tensor. A tensor that has values and matches `allow_missing` keeps its values.
        read_once: Has one rank read a value that several ranks hold (replicas of HSDP, norms of tensor parallelism),
            and send it to the others. It pays where storage is slower than the network. By default each rank reads all
            that it holds. The plan and the report say how many values are read in this way.
        cache: Where what is read of remote files is kept for later loads on this machine, a `Cache`.
        verify: Compares the file with its checksums before any value is put in place.
        optimizers: Optimizers whose state follows a parameter that changes its dtype or device, or gets its first
            memory.
        progress: Whether to show a progress bar. None shows one on a terminal after half a second.
        max_memory_bytes: The most memory that the load may use in addition to the final tensors.
        process_group: The ranks that load together, where the model has DTensors. None stands for the ranks of their
            mesh.
        timeout_seconds: How long a rank waits for the others, at the end of planning, of reading, and of the commit.
    """

    key: str | None = None
    rules: tuple[Rule, ...] | Schema = ()
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    transform: AnyTransform | Pairs | None = None
    map: bool | None = None
    in_place: bool | None = None
    init_missing: bool = False
    read_once: bool = False
    cache: Cache | None = None
    verify: bool = False
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    progress: bool | None = None
    max_memory_bytes: int | None = None
    process_group: Any = None
    timeout_seconds: float = TIMEOUT_SECONDS
    device_of_meta: Callable[[torch.Tensor], torch.device] | None = None
    """Inside: the device of each tensor on meta, after a load without `device`. None stands for the CPU."""

    def device_after(self, tensor: torch.Tensor) -> torch.device:
        """Returns the device of a tensor of the model after the load."""
        if self.device is not None or not tensor.is_meta:
            return self.device or tensor.device
        if is_sharded(tensor):
            return torch.empty(0, device=mesh_device_type(tensor)).device
        return _CPU if self.device_of_meta is None else self.device_of_meta(tensor)

    def of_plan(self) -> dict[str, object]:
        """Returns the options that decide about the plan and are not the default, by name."""
        names = PlanArguments.__annotations__.keys() - {"cache"}
        return {name: getattr(self, name) for name in sorted(names) if getattr(self, name) != getattr(_DEFAULT, name)}


_DEFAULT = LoadOptions()


def checked_options(**arguments: Unpack[LoadArguments]) -> LoadOptions:
    """Returns the checked options for the keyword arguments of a call. Raises `OptionError`."""
    checked: dict[str, Any] = {**arguments}
    checked.update((name, check(checked[name])) for name, check in _CHECKS.items() if name in checked)
    return LoadOptions(**checked) if checked else _DEFAULT


def check_model(model: object) -> nn.Module:
    """Returns the model without wrappers of `torch.compile` and data parallelism.

    Raises `OptionError` for another object, and `PlacementError` where torch gives new tensors no values.
    """
    if isinstance(model, nn.Module):
        if is_transforming() or (is_faking() and not any(map(is_fake, model.parameters()))):
            raise PlacementError(
                "tensors stand for others within FakeTensorMode and torch.func; nothing has been changed",
                where=type(model).__name__,
                expected="a call outside of them",
                remedy="make the call before the mode or the transform begins, or after it ends",
            )
        return unwrapped(model)
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise OptionError(
            "this is a class, not a model",
            expected=f"an instance: {model.__name__}(...)",
            found=f"the class {model.__qualname__}",
            remedy=f"with ms.skeleton(): model = {model.__name__}(...), with its arguments; then pass the model",
        )
    raise OptionError("not a model", expected="torch.nn.Module", found=type(model).__name__)


def device_of(device: Any) -> torch.device | None:
    """Returns the device with its index. Raises `OptionError` for an invalid device, or a device that is missing."""
    try:
        # An empty tensor resolves "cuda" to the current device, and fails where there is none.
        return None if device is None else torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        count = torch.accelerator.device_count() if accelerator else 0
        raise OptionError(
            "this machine has no such device",
            expected=", ".join(["cpu", *(f"{accelerator}:{index}" for index in range(count))]),
            found=f"{short_repr(device)}: {error}",
            remedy="device='cpu', or leave it out",
            names=("device",),
        ) from error


def is_device(text: str) -> bool:
    """Whether a text names a kind of device that torch knows, such as "cuda:0", whether or not this machine has it."""
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _key(key: object) -> object:
    if not (key is None or isinstance(key, str)):
        raise invalid_option("key", "must be a path", key, expected="a string such as 'model.encoder'")
    return key


def _rules(rules: object) -> tuple[Rule, ...] | Schema:
    from modelstate.rules.schema import Schema, check_rules  # the options of a restore are made without rules

    return rules if isinstance(rules, Schema) else check_rules(rules)


def device_with_memory(device: object) -> torch.device | None:
    """Returns the device that tensors are loaded to. Raises `OptionError` as `device_of`, and for meta."""
    target = device_of(device)
    if target is not None and target.type == "meta":
        raise OptionError("a load cannot put tensors on the meta device", remedy="device='cpu', or leave it out")
    return target


def _max_memory_bytes(nbytes: object) -> object:
    check_integer("max_memory_bytes", nbytes, least=0, accepts_none=True)
    return nbytes


def _transform(given: Any) -> object:
    is_mapping = isinstance(given, Mapping)
    for pattern, transform in given.items() if is_mapping else (("*", given),):
        if not isinstance(pattern, str):
            expected = "a string such as '*.mlp.*'"
            raise invalid_option("transform", "must have glob patterns as its keys", pattern, expected=expected)
        cls = transform if isinstance(transform, type) else type(transform)
        remedy = f"pass an instance: {cls.__name__}(...)" if cls is transform else ""
        is_config = cls.__module__.partition(".")[0] == "torchao"
        if is_config or (cls is transform and cls.__name__ == "Quantize"):
            config = cls.__name__ if is_config else "torchao.quantization.Int8WeightOnlyConfig"
            remedy = f"transform=ms.loading.Quantize({config}()), with the arguments of the config"
        if remedy or not (transform is None or callable(transform)):
            raise OptionError(
                "the values of transform= must be functions" if is_mapping else "transform= must be a function",
                where=repr(pattern) if is_mapping else "",
                expected="a function of name and tensor, or a mapping from patterns to such functions",
                found=short_repr(transform),
                remedy=remedy,
            )
    return (tuple(given.items()) or None) if is_mapping else given


_CHECKS: dict[str, Callable[[object], object]] = {
    "key": _key,
    "rules": _rules,
    "allow_missing": lambda patterns: patterns_of("allow_missing", patterns),
    "allow_unexpected": lambda patterns: patterns_of("allow_unexpected", patterns),
    "dtype": floating_dtype,
    "device": device_with_memory,
    "transform": _transform,
    "max_memory_bytes": _max_memory_bytes,
}
"""The options that are checked or converted beyond True and False, which `checked_call` checks."""
