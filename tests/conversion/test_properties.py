"""Laws of `convert`, held against random module trees: everything is converted, or nothing is changed."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import modelstate as ms
from tests.loading.fingerprint import described, raw, whole
from tests.pains.quantized import quantized_class
from tests.sweeps import examples

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")
Quantized = quantized_class()


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).mul(3).to(dtype)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: values(3, 2),
    "channels last": lambda: values(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: values(3, 4).t(),
    "one number": lambda: values(),
    "empty": lambda: values(0, 3),
    "complex": lambda: values(2, 2, dtype=torch.complex64) * (1 + 1j),
    "conjugate": lambda: (values(2, 2, dtype=torch.complex64) * (1 + 1j)).conj(),
    "integers": lambda: values(3, dtype=torch.int64),
    "booleans": lambda: values(3) > 0,
    "COO": lambda: torch.eye(3).mul(values(3)).to_sparse(),
    "CSR": lambda: torch.eye(3).mul(values(3)).to_sparse_csr(),
    "wrapper": lambda: Quantized(values(2, 3), 0.5),
    "special numbers": lambda: torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 3.4e38]),
}
PLACES = ["parameter", "frozen parameter", "buffer", "hidden buffer"]
RELATIONS = ["none", "none", "tie", "slice", "detached"]
EXTRAS = ["grad", "sparse grad", "shared grad", "hook", "attribute", "optimized"]


class Piece(NamedTuple):
    """What is registered in one place of a tree."""

    kind: str
    place: str
    module: int
    relation: str
    """To the piece registered before it: none, the same tensor, or a view of its memory."""
    extras: frozenset[str]


class Spec(NamedTuple):
    """What a tree is built from, the same each time."""

    parents: tuple[int, ...]
    """For each module but the root, which of those before it is its parent."""
    pieces: tuple[Piece, ...]
    twice: bool
    """Whether a module is registered under a second name."""
    recurrent: bool
    """Whether there is a module with an `_apply` of its own."""


pieces = st.builds(
    Piece,
    st.sampled_from([*KINDS]),
    st.sampled_from(PLACES),
    st.integers(0, 3),
    st.sampled_from(RELATIONS),
    st.frozensets(st.sampled_from(EXTRAS)),
)
specs = st.builds(
    Spec,
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.lists(pieces, min_size=1, max_size=7).map(tuple),
    st.booleans(),
    st.booleans(),
)


class Tree:
    """A module that was built, and everything that refers to its tensors."""

    def __init__(self, spec: Spec) -> None:
        torch.manual_seed(0)
        modules = [nn.Module()]
        for parent in spec.parents:
            modules.append(nn.Module())
            modules[parent % (len(modules) - 1)].add_module(f"m{len(modules)}", modules[-1])
        if spec.twice:
            modules[0].add_module("again", nn.ModuleList(modules[1:]))
        if spec.recurrent:
            modules[0].lstm = nn.LSTM(2, 1)
        self.module = modules[0]
        self.optimized: list[torch.Tensor] = []
        last: torch.Tensor | None = None
        last_grad: torch.Tensor | None = None
        for number, piece in enumerate(spec.pieces):
            last = self._made(piece, last)
            module = modules[piece.module % len(modules)]
            if isinstance(last, nn.Parameter):
                module.register_parameter(f"t{number}", last)
            else:
                module.register_buffer(f"t{number}", last, persistent=piece.place != "hidden buffer")
            last_grad = self._attach(last, piece.extras, last_grad)
        self.optimizer = torch.optim.Adam([*dict.fromkeys(self.optimized), nn.Parameter(torch.ones(1))], lr=0.01)
        for param in self.optimized:
            self.optimizer.state[param] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.randn_like(param.detach()),
                "exp_avg_sq": torch.rand_like(param.detach()),
            }
        self.tensors = [*dict.fromkeys([*self.module.parameters(), *self.module.buffers()])]
        self.references = [weakref.ref(one) for one in self.tensors]
        self.hooks = [(dict(one._backward_hooks or {}), one._post_accumulate_grad_hooks) for one in self.tensors]

    def _made(self, piece: Piece, last: torch.Tensor | None) -> torch.Tensor:
        if piece.relation == "tie" and last is not None:
            return last
        can_share = last is not None and last.layout is torch.strided and last.numel() and not hasattr(last, "elem")
        if piece.relation != "none" and can_share:
            return last.data[..., :1] if piece.relation == "slice" and last.dim() else last.detach()
        tensor = KINDS[piece.kind]()
        if piece.place.endswith("parameter") and (tensor.is_floating_point() or tensor.is_complex()):
            return nn.Parameter(tensor, requires_grad=piece.place == "parameter")
        return tensor

    def _attach(self, one: torch.Tensor, extras: frozenset[str], last_grad: torch.Tensor | None) -> torch.Tensor | None:
        if "attribute" in extras:
            one.note = [1, "two"]  # type: ignore[attr-defined]
            one.companion = torch.ones(2)  # type: ignore[attr-defined]
        if not one.requires_grad:
            return last_grad
        if "hook" in extras:
            one.register_hook(lambda grad: None)
            one.register_post_accumulate_grad_hook(lambda param: None)
        if one.layout is not torch.strided or hasattr(one, "elem"):
            if "grad" in extras:
                one.grad = values(*one.shape) if hasattr(one, "elem") else one.detach().clone()
            return last_grad
        if "optimized" in extras:
            self.optimized.append(one)
        if "sparse grad" in extras and one.dim() == 2 and one.numel():
            one.grad = torch.ones_like(one.detach()).contiguous().to_sparse()
        elif "shared grad" in extras and last_grad is not None and last_grad.shape == one.shape:
            if last_grad.dtype is one.dtype and last_grad.layout is torch.strided:
                one.grad = last_grad
        elif "grad" in extras:
            one.grad = torch.randn_like(one.detach())
        return one.grad

    def everything(self) -> Any:
        """All that there is to be lost: what it is, who it is, and every byte."""
        optimizer = described(self.optimizer.state_dict()), id(self.optimizer.param_groups[0]["params"])
        return whole(self.module), optimizer, self.payloads(), [str(hook) for hook in self.hooks_now()]

    def payloads(self) -> list[Any]:
        """Bytes of the gradients, those that the fingerprint only names included."""
        return [None if one.grad is None else (id(one.grad), raw(one.grad)) for one in self.tensors if one.is_leaf]

    def hooks_now(self) -> list[Any]:
        return [(dict(one._backward_hooks or {}), one._post_accumulate_grad_hooks) for one in self.tensors]

    def identity(self) -> ms.transaction.Identity:
        return ms.identity(self.module, [self.optimizer])

    def convert(self, *args: Any, **options: Any) -> ms.LoadReport:
        # An optimizer of none of the tensors would be refused.
        return ms.convert(self.module, *args, optimizers=[self.optimizer] if self.optimized else [], **options)


# There and back.


@pytest.mark.slow
@given(specs)
@settings(max_examples=examples(60), deadline=None)
def test_there_and_back(spec: Spec) -> None:
    """float32 to float64 and back is what it was, bit for bit, and everybody is who they were all the time."""
    tree = Tree(spec)
    before, who, grads = tree.everything(), tree.identity(), [id(one.grad) for one in tree.tensors if one.is_leaf]
    was = {id(one): (one.dtype, raw(one), one.requires_grad, type(one)) for one in tree.tensors}
    report = tree.convert(torch.float64)
    assert report.references_lost == ()
    assert who.differences(tree.identity()) == []
    assert [ref() is one for ref, one in zip(tree.references, tree.tensors, strict=True)] == [True] * len(tree.tensors)
    assert tree.hooks_now() == tree.hooks
    assert grads == [id(one.grad) for one in tree.tensors if one.is_leaf]
    for one in tree.tensors:
        dtype, bits, requires_grad, cls = was[id(one)]
        assert (one.requires_grad, type(one)) == (requires_grad, cls)
        if dtype is not torch.float32:
            assert raw(one) == bits
            continue
        assert one.dtype is torch.float64
        if one.is_leaf and one.grad is not None:
            assert one.grad.dtype is torch.float64
        if cls is Quantized or hasattr(one, "elem"):
            assert one.elem.dtype is torch.float64
        elif one.layout is torch.strided:
            assert one.stride() == bits[6]
    for param in tree.optimized:
        follows = torch.float64 if was[id(param)][0] is torch.float32 else was[id(param)][0]
        assert tree.optimizer.state[param]["exp_avg"].dtype is follows
        assert tree.optimizer.state[param]["step"].dtype is torch.float32
    tree.convert(torch.float32)
    now = tree.everything()
    assert now[0][0] == before[0][0]
    assert now[1:] == before[1:]
    assert who == tree.identity()


@pytest.mark.slow
@given(specs)
@settings(max_examples=30, deadline=None)
def test_as_torch_converts_it(spec: Spec) -> None:
    """The values are those of `module.to(dtype)`, which loses who they are on the way."""
    ours, theirs = Tree(spec), Tree(spec)
    ours.convert(torch.bfloat16)
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        wanted = other.detach()
        if other.is_floating_point():
            wanted = wanted.to(torch.bfloat16)
        inner = (one.elem, wanted.elem) if hasattr(one, "elem") else (one.detach(), wanted)
        assert inner[0].dtype is inner[1].dtype
        assert inner[0].layout is inner[1].layout
        torch.testing.assert_close(*inner, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@given(specs)
@settings(max_examples=20, deadline=None)
def test_memory_that_is_shown_twice_is_written_once(spec: Spec) -> None:
    """After the conversion a write to one tensor is seen by just those that saw it before."""

    def seen(tree: Tree) -> list[list[bool]]:
        plain = [one for one in tree.tensors if one.layout is torch.strided and not hasattr(one, "elem")]
        rows = []
        with torch.no_grad():
            for one in plain:
                kept = [other.detach().clone() for other in plain]
                one.data.fill_(True if one.dtype is torch.bool else 77)
                changed = [not torch.equal(other, old) for other, old in zip(plain, kept, strict=True)]
                rows.append(changed)
                one.data.fill_(False if one.dtype is torch.bool else 78)
        return rows

    expected = seen(Tree(spec))
    tree = Tree(spec)
    tree.convert(torch.float64)
    assert seen(tree) == expected


@pytest.mark.slow
@given(specs, st.data())
@settings(max_examples=20, deadline=None)
def test_the_budget_is_the_peak(spec: Spec, data: st.DataObject) -> None:
    """What a report says that it took is enough, and a byte less is not."""
    peak = Tree(spec).convert(torch.float64).peak_memory_bytes
    tree = Tree(spec)
    before = tree.everything()
    if peak:
        with pytest.raises(ms.errors.MemoryBudgetError):
            tree.convert(torch.float64, max_memory_bytes=data.draw(st.integers(0, peak - 1)))
        assert tree.everything() == before
    assert tree.convert(torch.float64, max_memory_bytes=peak).peak_memory_bytes == peak


# Failures.


class Uncastable(torch.Tensor):
    """A tensor that refuses to become anything else."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            raise NotImplementedError("not this one")
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_gradient_that_cannot_be_converted() -> None:
    """A gradient can be of any class, whatever its parameter is."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    last = module[1].bias
    last.grad = torch.zeros(2).as_subclass(Uncastable)
    before = [raw(one) for one in module.parameters()]
    with pytest.raises((ms.ModelStateError, NotImplementedError)):
        ms.convert(module, torch.float64)
    assert [raw(one) for one in module.parameters()] == before
    assert type(last.grad) is Uncastable


def test_a_sparse_gradient_that_two_share() -> None:
    module = nn.Sequential(nn.Embedding(3, 2), nn.Embedding(3, 2))
    grad = torch.ones(3, 2).to_sparse()
    module[0].weight.grad = module[1].weight.grad = grad
    ms.convert(module, torch.float64)
    assert module[0].weight.grad is grad
    assert module[1].weight.grad is grad
    assert grad.dtype is torch.float64


def test_a_sparse_gradient_that_torch_cannot_swap() -> None:
    """torch refuses to exchange a tensor to which its core has a weak reference."""
    module = nn.Sequential(nn.Embedding(3, 2), nn.Embedding(3, 2))
    grad = torch.ones(3, 2).to_sparse()
    module[1].weight.grad = grad
    before, weak = whole(module), torch._C._WeakTensorRef(grad)
    try:
        ms.convert(module, torch.float64)
    except ms.ModelStateError:
        assert whole(module) == before
        assert module[1].weight.grad is grad
    else:
        assert module[1].weight.grad.dtype is torch.float64
    assert not weak.expired()
