"""Everything that is asked of torch under names that are not public.

Each is used by torch's own `nn.Module`, `torch.utils.swap_tensors` or `torch.export` for the same purpose.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import IO, TYPE_CHECKING, Any

import torch

from modelstate.errors import ModelStateError, keep_interrupt

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.utils._pytree import TreeSpec as TreeSpec
    from typing_extensions import TypeIs

without_subclasses: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which tensor subclasses do not see what is done to them."""


def storage_dtypes() -> dict[str, torch.dtype]:
    """The dtypes of the storage classes that pickles name; torch adds no more of them."""
    return {name: dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()}


def use_count(tensor: torch.Tensor) -> int:
    """How many owners the tensor has in torch's core; 1 where only Python holds it, more for views and graphs."""
    return int(tensor._use_count())  # type: ignore[attr-defined]


def has_gradient_node(tensor: torch.Tensor) -> bool:
    """Whether autograd has a node that accumulates the gradient of the tensor: it is, or was, used by a graph."""
    if not (tensor.requires_grad and tensor.is_leaf) or tensor.is_inference():
        return False
    before = use_count(tensor)
    with torch.inference_mode(False):
        edge = torch.autograd.graph.get_gradient_edge(tensor)  # makes the node where there is none, which then owns too
    return use_count(tensor) == before and edge is not None


def shards_in_use(module: torch.nn.Module) -> bool:
    """Whether a module is sharded by FSDP in a way that remembers the dtype and device of its parameters.

    FSDP2 does from its first forward pass on, when it makes buffers for what it gathers, and FSDP1 from the beginning.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    if isinstance(module, fsdp.FullyShardedDataParallel):
        return True
    if not isinstance(module, fsdp.FSDPModule):
        return False
    return getattr(module._get_fsdp_state(), "_is_root", True) is not None


def optimizers_were_made() -> bool:
    """Whether an optimizer has been made in this process: the first of a class changes the `step` of the class."""
    classes: list[type[torch.optim.Optimizer]] = [torch.optim.Optimizer]
    while classes:
        cls = classes.pop()
        if hasattr(cls.step, "hooked"):
            return True
        classes += cls.__subclasses__()
    return False


def is_faking() -> bool:
    """Whether a `FakeTensorMode` is active: operations return tensors without values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_transforming() -> bool:
    """Whether a transform of `torch.func` is running, in which tensors stand for others."""
    return torch._C._functorch.peek_interpreter_stack() is not None


swap_impl: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
"""Exchanges what two Python tensors stand for in torch's core; classes and attributes stay where they are."""


def can_set_data(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `tensor.data = value` is possible."""
    return bool(torch._has_compatible_shallow_copy_type(tensor, value))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor, whatever its class has to say to that."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return tensor.untyped_storage()
    with without_subclasses():
        return tensor.untyped_storage()


def storage_id(tensor: torch.Tensor) -> int:
    """The address of the storage object of a tensor; 0 where it has none of its own (sparse, wrapper subclasses)."""
    try:
        is_usual = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
        storage = tensor.untyped_storage() if is_usual else storage_of(tensor)
        storage.data_ptr()  # raises for the storage of a wrapper, which is there in name only
        identity: int = storage._cdata
        return identity
    except (NotImplementedError, RuntimeError) as error:
        keep_interrupt(error)
        return 0


def payload_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of which a wrapper subclass is made, at any depth; the tensor itself where it is none."""
    if storage_id(tensor):
        return [tensor]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    names = flatten()[0] if flatten else [*getattr(tensor, "__dict__", {}), *slots_of_class(type(tensor))]
    inner = [getattr(tensor, name, None) for name in names]
    return [part for value in inner if isinstance(value, torch.Tensor) for part in payload_of(value)]


def slots_of_class(cls: type) -> list[str]:
    """The names of a class's `__slots__`, as attributes have them."""
    names: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else list(slots):
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def storage_owners(tensor: torch.Tensor) -> int:
    """How many tensors and storages have the memory of a tensor; 1 where it has it alone, 0 where it has none."""
    if not storage_id(tensor):
        return 0
    alone = torch.empty(0, device="cpu")
    storage, of_alone = storage_of(tensor), storage_of(alone)
    # Python has one object for a storage, however many references there are to it.
    references = sys.getrefcount(storage) - sys.getrefcount(of_alone)
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1 + references


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the storage of a tensor begins and ends in memory; nothing for one that has none."""
    if not storage_id(tensor) or tensor.is_meta:
        return 0, 0
    storage = storage_of(tensor)
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
GradientHooks = dict[str, tuple[dict[int, object], dict[int, object]]]
"""The tables of the gradient hooks of a tensor, to which their handles refer, and copies of them."""


def gradient_hooks(tensor: torch.Tensor) -> GradientHooks:
    """Returns the gradient hooks of a tensor; an empty dict where it has none."""
    return {name: (hooks, dict(hooks)) for name in _HOOKS if (hooks := getattr(tensor, name)) is not None}


def restore_hooks(tensor: torch.Tensor, saved: GradientHooks) -> None:
    """Gives a leaf tensor that requires a gradient the hooks that it had, in the same tables."""
    for name in _HOOKS:
        hooks, content = saved.get(name, (None, {}))
        if hooks is not None and dict(hooks) != content:
            hooks.clear()
            hooks.update(content)
        if hooks is not None or getattr(tensor, name) is not None:
            setattr(tensor, name, hooks)  # the same table, too, since the core of the tensor may be another one


_FILLS = frozenset(
    f"aten::{name}_"
    for name in (
        *("normal", "uniform", "fill", "zero", "copy", "random"),
        *("exponential", "log_normal", "cauchy", "geometric", "bernoulli"),
    )
)
"""Operations that set all elements of a tensor, whatever they were before."""


@contextmanager
def recorded_fills() -> Iterator[dict[int, int]]:
    """Counts the elements that code sets without reading them, by the storage that they are in."""
    found: dict[int, int] = {}

    def record(func: torch._ops.OpOverload, args: Sequence[object], named: Mapping[str, object], _: object) -> None:
        target = args[0] if func._schema.name in _FILLS else named.get("out")
        if isinstance(target, torch.Tensor):
            found[storage_id(target)] = found.get(storage_id(target), 0) + target.numel()

    with _watched_operations(record):
        yield found


Watch = Callable[["torch._ops.OpOverload", Sequence[object], Mapping[str, object], object], None]
"""Called after each operation of torch with the operation, its arguments, those by name, and its result."""


@contextmanager
def _watched_operations(watch: Watch) -> Iterator[None]:
    """A context in which a function is called after each operation of torch in this thread."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Without it, torch imports its compiler at the first operation, which takes a second or more.
            return "torch._dynamo" in sys.modules

        def __torch_dispatch__(
            self,
            func: torch._ops.OpOverload,
            types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            named = kwargs or {}
            result: object = func(*args, **named)
            watch(func, args, named, result)
            return result

    with Watching():  # type: ignore[no-untyped-call]
        yield


def drop_frozen_code() -> list[str]:
    """Drops everything that `torch.compile` has compiled, where it may have made constants of weights.

    Inductor imports a module for that when `torch._inductor.config.freezing` is on for the first time. It does not say
    which code has which weights.

    Returns:
        A note for a report; none where nothing is dropped.
    """
    if "torch._inductor.freezing" not in sys.modules:
        return []
    import torch._dynamo

    torch._dynamo.reset()
    return ["torch.compile has frozen weights: all compiled code is dropped, and compiled again at the next call"]


_UNWRITTEN = (0x7FA57FA57FA57FA5).to_bytes(8, sys.byteorder) * (8 << 10)
"""What memory contains that nothing has written to.

As a float of 16 or 32 bits it is a NaN whose payload no operation makes. It is no valid boolean, and an unlikely
integer or float of 64 bits.
"""


@contextmanager
def marked_empties() -> Iterator[None]:
    """Marks the memory that this thread allocates without writing to it, so that `is_unwritten` recognises it.

    A copy of such memory in another dtype is marked too. Of memory that is written in part, the whole copy is marked.

    Larger memory is only marked at some places, since pages that are not written to cost nothing.
    """
    names = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
    packets = [getattr(torch.ops.aten, name) for name in names]
    creators = {getattr(packet, overload) for packet in packets for overload in packet.overloads()}

    def mark(func: torch._ops.OpOverload, args: Sequence[object], _: object, result: object) -> None:
        is_cast = func is torch.ops.aten._to_copy.default
        is_copy = is_cast and _has_memory(args[0]) and is_unwritten(args[0])
        if (func in creators or is_copy) and _has_memory(result):
            _mark(result)

    with _watched_operations(mark):
        yield


def unwatched() -> AbstractContextManager[None]:
    """A context whose operations no dispatch mode of this thread sees: each would take 20 us more."""
    return torch._C._DisableTorchDispatch()


def _has_memory(tensor: object) -> TypeIs[torch.Tensor]:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_meta or tensor.is_quantized)


def _mark(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    spans = [(0, nbytes)]
    if nbytes > len(_UNWRITTEN):
        spans = [(start // 16 * 16, 16) for start in (0, nbytes // 2, nbytes - 16)]
    for start, length in spans:
        if tensor.is_cpu:
            ctypes.memmove(storage.data_ptr() + start, _UNWRITTEN, length)
        else:
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            data[start : start + length] = torch.frombuffer(bytearray(_UNWRITTEN[:length]), dtype=torch.uint8)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether elements of a plain tensor lie in memory of `marked_empties` that nothing has written to since.

    An integer of 8 or 16 bits may have any value: a run of 16 bytes must be unwritten.
    """
    with torch.no_grad():
        values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
        if values.dtype is torch.bool:
            return bool((values.view(torch.uint8) > 1).any())
        if values.itemsize >= 4 or values.dtype in (torch.float16, torch.bfloat16):
            mark = int.from_bytes(_UNWRITTEN[: values.itemsize], sys.byteorder)
            return bool((values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]) == mark).any())
        data = values.contiguous().view(-1).view(torch.uint8)
        if data.numel() < 16:
            return bytes(data.tolist()) == _UNWRITTEN[: data.numel()]
        runs = data[: data.numel() // 16 * 16].view(-1, 16)
        return bool((runs == runs.new_tensor([*_UNWRITTEN[:16]])).all(1).any())


def has_registration_hooks() -> bool:
    """Whether anything is called whenever a module registers a parameter or a buffer."""
    module = torch.nn.modules.module
    return bool(module._global_parameter_registration_hooks or module._global_buffer_registration_hooks)


def flatten(value: object) -> tuple[list[object], TreeSpec]:
    """The leaves of nested containers, and their structure, as `torch.export` has them."""
    leaves, spec = torch.utils._pytree.tree_flatten(value)
    return leaves, spec


def unflatten(leaves: Iterable[object], spec: TreeSpec) -> Any:
    """The way back of `flatten`."""
    return torch.utils._pytree.tree_unflatten(leaves, spec)


@contextmanager
def without_recomputation() -> Iterator[None]:
    """A context in which this thread does not run a forward pass again to read what `torch.utils.checkpoint` left out.

    The read raises `RuntimeError` instead.
    """
    import torch.utils.checkpoint

    module: Any = torch.utils.checkpoint
    hook, thread = module._recomputation_hook, threading.get_ident()

    def guarded(*args: object) -> object:
        if threading.get_ident() == thread:
            raise RuntimeError("the forward pass would be run again")
        return hook(*args)

    module._recomputation_hook = guarded
    try:
        yield
    finally:
        module._recomputation_hook = hook


def keyword_order(spec: TreeSpec) -> list[str]:
    """The names of keyword arguments, in the order in which the structure of a program's inputs has them."""
    return list(_child(spec, 1).context)


def _child(spec: TreeSpec, place: int) -> TreeSpec:
    return spec.child(place) if hasattr(spec, "child") else spec.children_specs[place]  # before torch 2.10


def structure_of(text: str) -> TreeSpec:
    """The structure of containers from the text that a package stores."""
    return torch.utils._pytree.treespec_loads(text)


def aoti_loader(path: str, model: str) -> Any:
    """Loads the library of a model from an AOTInductor package into the process, with the constants that it embeds."""
    return torch._C._aoti.AOTIModelPackageLoader(path, model, False, 1, -1)


def aoti_metadata(path: str, model: str) -> dict[str, str]:
    """The metadata of a package: the device and the machine that it was compiled for."""
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    return dict(loader.load_metadata_from_package(path, model))


def aoti_embedded_constants(library: str) -> dict[str, torch.Tensor]:
    """Copies of the constants that a library embeds."""
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(library, 1)
    return {name: value.clone() for name, value in runner.extract_constants_map(False).items()}


def aoti_compile(program: ExportedProgram, options: dict[str, object]) -> list[object]:
    """Compiles an exported program ahead of time, as `torch._inductor.aoti_compile_and_package` does."""
    import torch._inductor

    args, named = program.example_inputs
    module = program.module(check_guards=False)
    files: Any = torch._inductor.aot_compile(module, args, named, options=options)
    return list(files)


def aoti_package(file: IO[bytes], files: list[Any], extra: dict[str, str]) -> None:
    """Writes compiled files as a `.pt2` package, with additional text files."""
    from torch.export.pt2_archive._package import package_pt2

    package_pt2(file, aoti_files=files, extra_files=extra)


def check_inputs_by(module: Any, error_for: Callable[[Exception], Exception]) -> None:
    """Makes the checks of inputs of `program.module()` raise the error that `error_for` makes of theirs."""

    def checked(check: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            try:
                return check(*args)
            except Exception as error:
                raise error_for(error) from error

        return call

    hooks = module._forward_pre_hooks
    hooks.update({key: checked(hook) for key, hook in hooks.items()})
    if (guards := getattr(module, "_guards_fn", None)) is not None:
        guards.forward = checked(guards.forward)


def input_conditions(program: ExportedProgram, *, compiled: bool = False) -> list[str]:
    """The conditions on the inputs of a program, as Python of `args`, the tensors and numbers of a call in one list.

    These are what `program.module()` checks. `compiled` adds what a compiler has found out and relied on since.
    """
    import torch.export._unlift
    import torch.export.exported_program

    unlift: Any = torch.export._unlift
    module: Any = program.module(check_guards=False)
    signature = inspect.signature(module.forward)
    paths = unlift._get_input_paths(program.example_inputs, signature)
    placeholders = module.graph.find_nodes(op="placeholder")
    guards = unlift._get_input_guards_for_graph(placeholders, program.range_constraints, paths)
    own: Any = getattr(program, "_guards_code", ())
    if compiled:
        # `program.module()` accepts sizes of 0 and 1, for which nothing is compiled.
        for place, node in enumerate(placeholders):
            for dim, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
                limits = program.range_constraints.get(getattr(getattr(size, "node", None), "expr", None))
                if limits is not None:
                    guards.append(f"args[{place}].size()[{dim}] >= {int(limits.lower)}")
        all_guards: Any = torch.export.exported_program._convert_guards_to_code
        # Comparisons with limits are left out: the compiler makes them to choose among kernels that are all correct.
        own = [*own, *(guard for guard in all_guards(program.graph_module) if _compares_for_equality(guard))]
    guards += unlift._force_gm_signature_match(unlift._force_ep_signature_match(own, paths), signature)
    found = dict.fromkeys(guards)
    for place, path in enumerate(paths):
        found = {text.replace("L" + torch.utils._pytree.keystr(path), f"args[{place}]"): None for text in found}
    return [*found]


def _compares_for_equality(guard: str) -> bool:
    nodes = [node for node in ast.walk(ast.parse(guard.strip(), mode="eval")) if isinstance(node, ast.Compare)]
    return any(isinstance(op, ast.Eq | ast.NotEq) for node in nodes for op in node.ops)


def condition_names() -> dict[str, object]:
    """The functions of the texts that `input_conditions` returns. This imports sympy, which takes seconds."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    return dict(SYMPY_INTERP)


def wrapper_subclass(
    cls: type[torch.Tensor],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    layout: torch.layout,
) -> torch.Tensor:
    """A CPU tensor of a wrapper subclass without its attributes, as the `__new__` of such a class creates it."""
    tensor: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, storage_offset=offset, dtype=dtype, layout=layout, device=torch.device("cpu")
    )
    return tensor


def arguments_of_node(node: Any) -> dict[str, object] | None:
    """The arguments of an operator in a graph, by name and with their defaults; None where it has no schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


stock_apply: Callable[..., torch.nn.Module] = torch.nn.Module._apply
"""torch's own `Module._apply`, also while another function is installed in its place."""


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a sparse COO tensor, coalesced or not, in their own memory."""
    return tensor.detach()._values()


def write_count(tensor: torch.Tensor) -> int:
    """The number of in-place writes to a tensor, which torch counts for autograd."""
    return tensor._version


@contextmanager
def without_modes() -> Iterator[None]:
    """A context outside of the torch function modes and dispatch modes of this thread, such as `FakeTensorMode`.

    These modes are code of the user, or of a profiler, and may raise in any call of torch. The default device of
    `torch.device` as a context is a function mode too.
    """
    operators: Any = torch._ops
    has_dispatch = torch._C._len_torch_dispatch_stack() or operators._len_torch_dispatch_stack_pre_dispatch()
    functions: list[object] = []
    try:
        while torch._C._len_torch_function_stack():
            functions.append(torch._C._pop_torch_function_stack())
        with torch.utils._python_dispatch._disable_current_modes() if has_dispatch else nullcontext():
            yield
    finally:
        for mode in reversed(functions):
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def default_modes() -> Iterator[None]:
    """A context with the modes that a new thread has: no modes of a user, no autocast, no inference mode, gradients."""
    with without_modes(), torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def copy_each(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copies each value into its target, in one call of torch. With `non_blocking` it may only be queued then."""
    torch._foreach_copy_(list(targets), list(values), non_blocking=non_blocking)


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copies the elements of tensors of one dtype into one flat tensor."""
    if all(tensor.dim() == 1 for tensor in tensors):
        return torch.cat(list(tensors))
    flat: torch.Tensor = torch._C._nn.flatten_dense_tensors(list(tensors))
    return flat


# Versions of PyTorch; `docs/compatibility.md` has those that features need as a table.

OLDEST_FOR_AOTI = (2, 11)
"""The oldest PyTorch for AOTInductor packages."""


def weight_norm(direction: torch.Tensor, magnitude: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the weight of weight norm, as torch computes it; `dim` is -1 for one norm of all elements."""
    return torch._weight_norm(direction, magnitude, dim)


def torch_version() -> tuple[int, int]:
    """The major and minor version of the PyTorch that is imported."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def require_aoti(error: type[ModelStateError], where: str, remedy: str) -> None:
    """Raises `error` where this PyTorch is too old for AOTInductor packages.

    Args:
        error: The class of the error.
        where: What is asked for.
        remedy: What can be done without a newer PyTorch.
    """
    needed = "torch " + ".".join(map(str, OLDEST_FOR_AOTI))
    if torch_version() < OLDEST_FOR_AOTI:
        raise error(
            "AOTInductor packages need a newer PyTorch",
            where=where,
            expected=f"{needed} or later",
            found=f"torch {torch.__version__}",
            remedy=f"install {needed} or later; or {remedy}",
        )
