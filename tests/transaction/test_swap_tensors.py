"""`swap_tensors`: what torch's does, and who is in its way where it cannot be done."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

import modelstate as ms
from modelstate import errors
from tests.pains.quantized import quantized_class


class WithSlots(torch.Tensor):
    __slots__ = ("extra",)


class OtherSlots(torch.Tensor):
    __slots__ = ("more",)


def slotted(value: float, extra: object = None) -> torch.Tensor:
    made = torch.full((2,), value).as_subclass(WithSlots)
    if extra is not None:
        made.extra = extra  # type: ignore[attr-defined]
    return made


def tagged(tensor: torch.Tensor, **attributes: object) -> torch.Tensor:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


PAIRS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "plain": lambda: (torch.arange(2), torch.arange(3.0)),
    "parameter and tensor": lambda: (nn.Parameter(torch.ones(2)), torch.zeros(3, dtype=torch.int8)),
    "parameters": lambda: (nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2, 2), requires_grad=False)),
    "attributes": lambda: (tagged(torch.ones(2), a=1, b=[2]), tagged(nn.Parameter(torch.ones(1)), b="other")),
    "a wrapper subclass": lambda: (quantized_class()(torch.ones(2, 2), 0.5), torch.zeros(3)),
    "slots, both set": lambda: (slotted(1, "one"), slotted(2, "two")),
    "slots, one set": lambda: (slotted(1, "one"), slotted(2)),
    "sparse": lambda: (torch.eye(2).to_sparse(), torch.ones(2)),
    "meta": lambda: (torch.ones(2, device="meta"), torch.ones(3)),
}


def described(tensor: torch.Tensor) -> object:
    payload = getattr(tensor, "elem", tensor)
    values = payload.detach().to_dense().tolist() if not payload.is_meta else "meta"
    attributes = {name: repr(value) for name, value in tensor.__dict__.items()}
    slot = getattr(tensor, "extra", None)
    return type(tensor).__name__, tensor.dtype, tensor.shape, tensor.requires_grad, values, attributes, slot


@pytest.mark.parametrize("pair", PAIRS)
def test_it_does_what_torch_does(pair: str) -> None:
    torchs, ours = PAIRS[pair](), PAIRS[pair]()
    torch.utils.swap_tensors(*torchs)  # type: ignore[no-untyped-call]
    ms.swap_tensors(*ours)
    assert [described(one) for one in ours] == [described(one) for one in torchs]
    ms.swap_tensors(*ours)
    assert [described(one) for one in ours] == [described(one) for one in PAIRS[pair]()]


def test_an_optimizer_trains_what_was_swapped_in() -> None:
    linear = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    ms.swap_tensors(linear.weight, nn.Parameter(torch.ones(2, 3)))
    linear(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.allclose(linear.weight, torch.full((2, 3), 0.9))


@pytest.mark.slow
def test_weak_references_go_on_referring_to_the_object() -> None:
    a, b = nn.Parameter(torch.ones(2)), torch.zeros(3)
    gone: list[str] = []
    one, other = weakref.ref(a, lambda _: gone.append("a")), weakref.ref(b)
    keyed = WeakIdKeyDictionary({a: "a"})
    ms.swap_tensors(a, b)
    assert one() is a
    assert other() is b
    assert keyed[a] == "a"
    assert a.shape == (3,)
    del a
    gc.collect()
    assert gone == ["a"]


def test_a_graph_that_is_used_up_is_no_hindrance() -> None:
    linear = nn.Linear(3, 2)
    loss = linear(torch.ones(1, 3)).pow(2).sum()
    loss.backward()
    linear.weight.grad = None
    ms.swap_tensors(linear.weight, nn.Parameter(torch.ones(2, 3)))
    linear(torch.ones(1, 3)).pow(2).sum().backward()
    assert linear.weight.grad is not None
    assert loss.grad_fn is not None


def holding_a_view(weight: torch.Tensor) -> None:
    with torch.no_grad():
        cache = [None, weight[0]]
    ms.swap_tensors(weight, torch.ones(2, 3))
    del cache


def waiting(weight: torch.Tensor) -> None:
    loss = (weight * 2).sum()
    ms.swap_tensors(weight, torch.ones(2, 3))
    loss.backward()


def with_a_node(weight: torch.Tensor) -> None:
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *_: None)
    ms.swap_tensors(weight, torch.ones(2, 3))


HOLDERS: dict[Callable[[torch.Tensor], None], tuple[str, str]] = {
    holding_a_view: (r"a view, held by list `cache` in frame `holding_a_view`", "drop the view"),
    waiting: (r"graph that still waits for backward: its result is held by `loss` in frame `waiting`", "run backward"),
    with_a_node: (r"its AccumulateGrad node, held by `node` in frame `with_a_node`", "remove the hooks"),
}


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.__name__)
def test_it_says_who_is_in_the_way(holder: Callable[[torch.Tensor], None]) -> None:
    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    before = described(weight)
    who, remedy = HOLDERS[holder]
    with pytest.raises(errors.PlacementError, match=who) as caught:
        holder(weight)
    assert remedy in caught.value.remedy
    assert "nothing has been changed" in str(caught.value)
    assert described(weight) == before


def test_both_tensors_are_looked_at() -> None:
    first, second = torch.ones(2), torch.ones(3)
    with torch.no_grad():
        view = second[1:]
    with pytest.raises(errors.PlacementError, match="the second tensor"):
        ms.swap_tensors(first, second)
    assert view.shape == (2,)


@pytest.mark.parametrize(
    ("a", "b", "error", "words"),
    [
        (torch.ones(1), [1.0], errors.OptionError, "found: list"),
        (slotted(1), torch.ones(1).as_subclass(OtherSlots), errors.PlacementError, "without __slots__"),
    ],
)
def test_what_cannot_be_swapped(a: Any, b: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ms.swap_tensors(a, b)
    assert type(a) in (torch.Tensor, WithSlots)


def test_a_weak_reference_in_torchs_core_is_refused_whole() -> None:
    a, b = torch.ones(2), quantized_class()(torch.ones(2, 2), 0.5)
    weak = torch._C._WeakTensorRef(a)
    before = described(a), described(b)
    with pytest.raises(errors.PlacementError, match="weak reference in torch's core"):
        ms.swap_tensors(a, b)
    assert (described(a), described(b)) == before
    assert not weak.expired()


def test_with_itself() -> None:
    a = nn.Parameter(torch.ones(2))
    view = a.view(2)
    ms.swap_tensors(a, a)
    assert view.grad_fn is not None


@pytest.mark.slow
def test_what_the_error_tells_to_do_helps() -> None:
    """In the frame in which it was raised, with the error kept, as a notebook keeps it."""
    weight = nn.Parameter(torch.ones(2))
    loss = (weight * 2).sum()
    try:
        ms.swap_tensors(weight, torch.zeros(3))
    except errors.PlacementError as error:
        kept = error
    del loss
    ms.swap_tensors(weight, torch.zeros(3))
    assert "del loss" in kept.remedy
