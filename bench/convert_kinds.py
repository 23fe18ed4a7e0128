"""`python -m bench.convert_kinds`: stock conversions and `modelstate.convert` side by side, on each kind of tensor.

Prints a table; `--write` puts it into docs/converting.md. Every verdict is found by looking at the module afterwards.
"""

import copy
import tempfile
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import modelstate as ms
from bench.pages import InPage

Check = Callable[[], str]
"""Says what is wrong after a conversion, or nothing."""


class NotHere(Exception):
    """A kind that cannot be built in this process, and what it needs."""


@dataclass
class Case:
    """A module to be converted, and what is asked for."""

    module: nn.Module
    dtype: torch.dtype | None = torch.float64
    device: str | None = None
    empty: bool = False
    optimizers: Sequence[torch.optim.Optimizer] = ()
    check: Check = field(default=lambda: "")
    """Runs after a conversion that has not raised."""
    held: Any = None
    """What has to live as long as the case."""


class Holder(nn.Module):
    """A module with one tensor."""

    def __init__(self, tensor: torch.Tensor, parameter: bool = True) -> None:
        super().__init__()
        if parameter:
            self.weight = nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())
        else:
            self.register_buffer("scale", tensor)


class Quantized(torch.Tensor):
    """The subclass of PyTorch's tutorial on `swap_tensors`."""

    elem: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, elem: torch.Tensor, scale: float) -> "Quantized":
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Quantized = make(
            cls, elem.shape, dtype=elem.dtype, layout=elem.layout, device=elem.device, strides=elem.stride()
        )
        return made

    def __init__(self, elem: torch.Tensor, scale: float) -> None:
        self.elem, self.scale = elem, scale

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(func(args[0].elem, *args[1:], **(kwargs or {})), args[0].scale)
        raise NotImplementedError(f"Unsupported function {func}")


def trains(module: nn.Module, plain: nn.Module, *inputs: torch.Tensor) -> str:
    """How a step differs from one of a plain copy that was made and converted before anything held it."""
    results = []
    for one in (module, plain):
        one.zero_grad()
        out = one(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        try:
            out.square().sum().backward()
        except RuntimeError as error:
            return f"backward raises: {first_line(error)}"
        grads = [getattr(param.grad, "_local_tensor", param.grad) for param in one.parameters()]
        results.append([out.detach(), *grads])
    for what, ours, right in zip(["the output", *["a gradient"] * 99], *results, strict=False):
        if ours is None or ours.dtype != right.dtype or not torch.equal(ours, right):
            return f"{what} is {'missing' if ours is None else 'not what it should be'}"
    return ""


def first_line(error: BaseException) -> str:
    """The first line of an error, or as much of it as a table has place for."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return textwrap.shorten(line, 110, placeholder=" ...")


def x(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=dtype).view(4, 3) / 3


def beside(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A copy in the new dtype that nothing else refers to."""
    return copy.deepcopy(module).to(dtype)


def parameter() -> Case:
    module = nn.Linear(3, 2)
    plain = beside(module)
    return Case(module, check=lambda: trains(module, plain, x()))


def buffer() -> Case:
    return Case(Holder(torch.randn(3), parameter=False))


def shared_buffer() -> Case:
    first, second = (Holder(torch.randn(3), parameter=False) for _ in range(2))
    second.scale = first.scale
    return Case(nn.ModuleList([first, second]))


def integer_buffer() -> Case:
    module = Holder(torch.arange(3), parameter=False)
    module.register_buffer("mask", torch.tensor([True, False]))
    return Case(module)


def tied() -> Case:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    return Case(module, check=lambda: "" if module[1].weight is module[0].weight else "untied")


def with_gradient() -> Case:
    module = nn.Linear(3, 2)
    module(x(torch.float32)).sum().backward()
    return Case(module)


def weak_reference() -> Case:
    module = nn.Linear(3, 2)
    weak = weakref.ref(module.bias)
    return Case(module, check=lambda: "" if weak() is module.bias else "the weak reference is lost", held=weak)


def live_view() -> Case:
    """The view was taken without autograd; it must keep what it shows."""
    module = nn.Linear(3, 2)
    with torch.no_grad():
        view = module.bias.view(2, 1)
    before = view.clone()
    return Case(module, check=lambda: "" if torch.equal(view, before) else "the view shows something else", held=view)


def waiting_graph() -> Case:
    module = nn.Linear(3, 2)
    loss = module(x(torch.float32)).square().sum()
    plain = copy.deepcopy(module)
    plain(x(torch.float32)).square().sum().backward()

    def check() -> str:
        try:
            loss.backward()
        except RuntimeError as error:
            return f"backward raises: {first_line(error)}"
        grad = module.weight.grad
        if grad is None:
            return "backward gives no gradient"
        if grad.dtype != module.weight.dtype:
            return f"the gradient of a {name_of(module.weight.dtype)} parameter is {name_of(grad.dtype)}"
        wanted = plain.weight.grad
        assert wanted is not None
        return "" if torch.allclose(grad, wanted.to(grad)) else "a gradient is not what it should be"

    return Case(module, check=check, held=loss)


def used_graph() -> Case:
    module = nn.Linear(3, 2)
    plain = beside(module)
    loss = module(x(torch.float32)).square().sum()
    loss.backward()
    return Case(module, check=lambda: trains(module, plain, x()), held=loss)


class Square(torch.autograd.Function):
    """Not torch's own: what it has saved is asked of it in another way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return tensor * tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def used_custom_graph() -> Case:
    module = nn.Linear(3, 2)
    plain = beside(module)
    loss = Square.apply(module.weight).sum()
    loss.backward()
    return Case(module, check=lambda: trains(module, plain, x()), held=loss)


def optimizer_state() -> Case:
    module = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(x(torch.float32)).sum().backward()
    optimizer.step()

    def check() -> str:
        for param in module.parameters():
            state = optimizer.state[param]
            if "exp_avg" not in state:
                return "the optimizer has lost the state of a parameter"
            if state["exp_avg"].dtype != param.dtype:
                return f"the optimizer's state is {name_of(state['exp_avg'].dtype)}"
        return ""

    return Case(module, optimizers=[optimizer], check=check)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wrapper() -> Case:
    return Case(Holder(Quantized(torch.randn(5, 3), 0.5)), dtype=torch.bfloat16)


def common_memory() -> Case:
    module: Any = nn.Module()
    flat = torch.randn(6)
    module.first, module.last = nn.Parameter(flat[:4]), nn.Parameter(flat[2:])

    def check() -> str:
        with torch.no_grad():
            module.first.fill_(7)
        return "" if module.last[0] == 7 else "the parameters no longer share memory"

    return Case(module, check=check)


def sparse_coo() -> Case:
    return Case(Holder(torch.eye(3).to_sparse_coo()))


def sparse_csr() -> Case:
    return Case(Holder(torch.eye(3).to_sparse_csr()))


def nested(layout: torch.layout) -> Callable[[], Case]:
    return lambda: Case(Holder(torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)], layout=layout)))


def complex_to(dtype: torch.dtype) -> Callable[[], Case]:
    return lambda: Case(Holder(torch.randn(3, dtype=torch.complex64)), dtype=dtype)


def torchao_int8() -> Case:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise NotHere("torchao") from error
    model: Any = nn.Sequential(nn.Linear(32, 16))
    quantize_(model, Int8WeightOnlyConfig())
    plain = copy.deepcopy(model)
    plain[0].weight = nn.Parameter(model[0].weight.detach().to(torch.bfloat16), requires_grad=False)
    plain[0].bias = nn.Parameter(model[0].bias.detach().to(torch.bfloat16))
    given = torch.ones(2, 32, dtype=torch.bfloat16)

    def check() -> str:
        with torch.no_grad():
            return "" if torch.equal(model(given), plain(given)) else "the output is not what it should be"

    return Case(model, dtype=torch.bfloat16, check=check)


def on_meta(empty: bool) -> Callable[[], Case]:
    def build() -> Case:
        with torch.device("meta"):
            module = nn.BatchNorm1d(3)
        return Case(module, dtype=None, device="cpu", empty=empty)

    return build


def lstm() -> Case:
    module = nn.LSTM(3, 2)
    plain = beside(module)

    def check() -> str:
        flat = [id(one) for one in module._flat_weights]
        if flat != [id(param) for param in module.parameters()]:
            return "the flat weights are other tensors"
        return trains(module, plain, x())

    return Case(module, check=check)


def compiled(in_place: bool) -> Callable[[], Case]:
    def build() -> Case:
        torch._dynamo.reset()
        module = nn.Linear(3, 2)
        plain = beside(module)
        made: Any = module
        if in_place:
            module.compile(backend="eager")
        else:
            made = torch.compile(module, backend="eager")
        made(x(torch.float32)).sum().backward()  # it has been compiled, and has a guard for each parameter
        made.zero_grad()
        return Case(made, check=lambda: trains(made, plain, x()))

    return build


def distributed() -> None:
    """A process group of one process."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise NotHere("gloo")
    if not dist.is_initialized():
        store = dist.FileStore(tempfile.NamedTemporaryFile(delete=False).name, 1)  # noqa: SIM115
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def data_parallel() -> Case:
    distributed()
    module = nn.Linear(3, 2)
    plain = beside(module)
    seen = []

    def hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.buffer().numel())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    made = nn.parallel.DistributedDataParallel(module)
    made.register_comm_hook(None, hook)
    made(x(torch.float32)).sum().backward()
    made.zero_grad()
    seen.clear()

    def check() -> str:
        wrong = trains(made, plain, x())
        return wrong or ("" if sum(seen) == 8 else "gradients are not exchanged")

    return Case(made, check=check)


def fully_sharded(begun: bool) -> Callable[[], Case]:
    def build() -> Case:
        distributed()
        try:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            module = nn.Linear(3, 2)
            plain = beside(module)
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
            if begun:
                module(x(torch.float32)).sum().backward()
                module.zero_grad()
        except (ImportError, RuntimeError, AttributeError) as error:
            raise NotHere(f"FSDP2 on the CPU: {first_line(error)}") from error
        return Case(module, check=lambda: trains(module, plain, x()))

    return build


def scripted() -> Case:
    module = nn.Linear(3, 2)
    plain = beside(module)
    made = torch.jit.script(module)
    return Case(made, check=lambda: trains(made, plain, x()))


def lazy() -> Case:
    module = nn.LazyLinear(2)

    def check() -> str:
        out = module(x())
        return "" if out.dtype == module.weight.dtype == torch.float64 else f"its output is {name_of(out.dtype)}"

    return Case(module, check=check)


KINDS: dict[str, Callable[[], Case]] = {
    "plain parameter": parameter,
    "buffer": buffer,
    "buffer that two modules share": shared_buffer,
    "integer and bool buffers": integer_buffer,
    "tied parameter": tied,
    "two parameters in one memory": common_memory,
    "parameter with a gradient": with_gradient,
    "parameter with a weak reference": weak_reference,
    "parameter with a live view": live_view,
    "graph that waits for backward": waiting_graph,
    "graph that has been used up": used_graph,
    "graph of a custom function, used up": used_custom_graph,
    "optimizer with state": optimizer_state,
    "wrapper subclass, to bfloat16": wrapper,
    "torchao int8 weights, to bfloat16": torchao_int8,
    "sparse COO": sparse_coo,
    "sparse CSR": sparse_csr,
    "nested, strided": nested(torch.strided),
    "nested, jagged": nested(torch.jagged),
    "complex, to complex128": complex_to(torch.complex128),
    "complex, to float64": complex_to(torch.float64),
    "meta, to the CPU": on_meta(empty=False),
    "meta, to the CPU without values": on_meta(empty=True),
    "LSTM": lstm,
    "`torch.compile(m)`": compiled(in_place=False),
    "`m.compile()`": compiled(in_place=True),
    "DistributedDataParallel": data_parallel,
    "FSDP2 `fully_shard`, before its first step": fully_sharded(begun=False),
    "FSDP2 `fully_shard`, afterwards": fully_sharded(begun=True),
    "TorchScript module": scripted,
    "lazy module": lazy,
}


HEAD = ("kind", "`m.to()`", "`m.to()`, swapping", "`ms.convert`")
Part = tuple[str, torch.dtype, str, Any]


def stock(case: Case) -> None:
    if case.empty:
        case.module.to_empty(device=case.device)
    else:
        case.module.to(device=case.device, dtype=case.dtype)


def swapping(case: Case) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        stock(case)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def ours(case: Case) -> None:
    ms.convert(case.module, case.dtype, device=case.device, optimizers=case.optimizers, empty=case.empty)


WAYS: tuple[Callable[[Case], None], ...] = (stock, swapping, ours)


def named(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under every name that they have."""
    found = dict(module.named_parameters(remove_duplicate=False))
    return found | dict(module.named_buffers(remove_duplicate=False))


def plain_parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors of which a tensor is made."""
    inner: Mapping[str, torch.Tensor]
    if tensor.layout is torch.sparse_coo:
        inner = {"indices": tensor._indices(), "values": tensor._values()}
    elif tensor.layout is torch.sparse_csr:
        inner = {"crow": tensor.crow_indices(), "col": tensor.col_indices(), "values": tensor.values()}
    elif tensor.is_nested and tensor.layout is torch.strided:
        inner = {str(index): one for index, one in enumerate(tensor.unbind())}
    elif hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        inner = {name: one for name in names if isinstance(one := getattr(tensor, name), torch.Tensor)}
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        inner = {name: one for name, one in tensor.__dict__.items() if isinstance(one, torch.Tensor)}
    else:
        yield "", tensor
        return
    for name, one in inner.items():
        for below, part in plain_parts(one):
            yield f"{name}.{below}".strip("."), part


@torch.no_grad()
def looked_at(tensor: torch.Tensor | None, values: bool = True) -> list[Part]:
    """What a tensor is: dtype, device and a copy of the values of all that it is made of, itself first."""
    if tensor is None:
        return []
    found: list[Part] = [("", tensor.dtype, tensor.device.type, None)]
    if torch.nn.parameter.is_lazy(tensor):
        return found
    for name, part in plain_parts(tensor):
        copied = part.detach().clone() if values and not part.is_meta else None
        found.append((name, part.dtype, part.device.type, copied))
    return found


def difference(seen: list[Part], wanted: list[Part]) -> str:
    """How what is there differs from what should be, or nothing."""
    if len(seen) != len(wanted):
        lazy = len(wanted) == 1  # its values are not looked at
        return "is missing" if not seen else "is no longer lazy" if lazy else "is made of other parts"
    for (name, dtype, device, values), (_, right_dtype, right_device, right_values) in zip(seen, wanted, strict=True):
        label = f"has a payload ({name}) that is" if name else "is"
        if dtype != right_dtype:
            return f"{label} {name_of(dtype)}"
        if device != right_device:
            return f"{label} on {device}"
        if right_values is not None and (values is None or not torch.equal(values, right_values)):
            return "has other values"
    return ""


def wanted_of(tensor: torch.Tensor | None, case: Case) -> list[Part]:
    """What a tensor should be: what its own `to` makes of it, but integers stay, and complex numbers stay complex."""
    if tensor is None:
        return []
    casts = case.dtype is not None and (tensor.is_floating_point() or (tensor.is_complex() and case.dtype.is_complex))
    dtype = case.dtype if casts else tensor.dtype
    if torch.nn.parameter.is_lazy(tensor):
        return [("", dtype or tensor.dtype, tensor.device.type, None)]
    if tensor.is_meta:
        return looked_at(torch.empty_like(tensor, device=case.device), values=False)
    return looked_at(tensor.detach().to(dtype=dtype, device=case.device))


def verdict(build: Callable[[], Case], convert: Callable[[Case], None]) -> str:
    """Converts a new module of a kind, and says what has become of it."""
    torch.manual_seed(0)
    case = build()
    objects = named(case.module)
    grads = {name: one.grad if one.is_leaf else None for name, one in objects.items()}
    before = {name: (looked_at(one), looked_at(grads[name]), one.requires_grad) for name, one in objects.items()}
    wanted = {name: (wanted_of(one, case), wanted_of(grads[name], case)) for name, one in objects.items()}
    del grads
    try:
        convert(case)
    except Exception as error:
        return "half converted" if changed(case, objects, before) else f"refused: {first_line(error)}"
    now = named(case.module)
    if any(now.get(name) is not one for name, one in objects.items()):
        return "identity lost"
    for name, one in now.items():
        text = difference(looked_at(one), wanted[name][0])
        if text:
            return f"wrong: {name.rpartition('.')[2]} {text}"
        text = difference(looked_at(one.grad if one.is_leaf else None), wanted[name][1])
        if text:
            return f"wrong: the gradient of {name} {text}"
        if one.requires_grad != before[name][2]:
            return f"wrong: requires_grad is {one.requires_grad}"
    try:
        text = case.check()
    except Exception as error:
        text = f"it raises afterwards: {first_line(error)}"
    return f"wrong: {text}" if text else "right"


def changed(case: Case, objects: Mapping[str, torch.Tensor], before: Mapping[str, Any]) -> bool:
    """Whether anything is not what it was."""
    now = named(case.module)
    return now.keys() != objects.keys() or any(
        one is not objects[name]
        or difference(looked_at(one), before[name][0]) != ""
        or difference(looked_at(one.grad if one.is_leaf else None), before[name][1]) != ""
        for name, one in now.items()
    )


def row(kind: str) -> tuple[str, ...]:
    try:
        return kind, *(verdict(KINDS[kind], way) for way in WAYS)
    except NotHere as missing:
        return kind, *[f"not run: needs {missing}"] * 3


def rows() -> list[tuple[str, ...]]:
    """All of it: the kind, and a verdict for each way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [row(kind) for kind in KINDS]


TABLE = InPage(
    "bench/results/converting.md",
    "convert_kinds",
    "<!-- End of the table -->",
    HEAD,
    rows,
)

if __name__ == "__main__":
    TABLE.main(__doc__)
