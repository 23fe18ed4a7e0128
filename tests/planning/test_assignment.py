"""Placements: the cheapest way that keeps every reference, and what it takes for granted."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from modelstate.planning.assignment import Placement, after_transform, choose, copy_cannot_fail
from modelstate.torch_compat.plain import is_plain
from tests.formats.torch_files import DTYPES, is_copied

CPU = torch.device("cpu")


class Subclass(torch.Tensor):
    """A tensor subclass that changes nothing."""


def place(param: torch.Tensor, value: torch.Tensor, **options: Any) -> Placement:
    chosen: dict[str, Any] = {"dtype": param.dtype, "device": CPU, "map": True, "in_place": False, "transformed": False}
    chosen |= options
    return choose(param, value, chosen.pop("dtype"), chosen.pop("device"), **chosen)


def meta(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device="meta", **options))


VALUE = torch.ones(2, 3)


def test_into_the_memory_that_is_there() -> None:
    found = place(nn.Parameter(torch.zeros(2, 3)), VALUE)
    assert (found.name, found.staged, found.direct, found.mapped, found.by_handler) == (
        "copy",
        True,
        False,
        False,
        False,
    )


@pytest.mark.parametrize(("in_place", "transformed"), list(itertools.product([False, True], repeat=2)))
def test_in_place_is_at_once_unless_the_value_may_change(in_place: bool, transformed: bool) -> None:
    found = place(nn.Parameter(torch.zeros(2, 3)), VALUE, in_place=in_place, transformed=transformed)
    assert found.name == "copy"
    assert found.direct == (in_place and not transformed)
    assert found.staged == (not found.direct)


def test_a_slot_without_memory_shows_the_file() -> None:
    found = place(meta(2, 3), VALUE)
    assert (found.name, found.mapped, found.staged, found.direct) == ("swap", True, False, False)


@pytest.mark.parametrize(
    ("param", "value", "options"),
    [
        (meta(2, 3), VALUE, {"map": False}),
        (meta(2, 3), VALUE, {"dtype": torch.float16}),
        (meta(2, 3), VALUE.half(), {}),
        (meta(2, 3), VALUE, {"device": torch.device("cuda")}),
        (meta(3, 2), VALUE.t(), {}),
        (meta(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(2, 3, 4, 4), {}),
    ],
    ids=["no map", "cast", "cast of the value", "device", "strides", "channels last"],
)
def test_a_slot_without_memory_gets_its_own(param: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> None:
    found = place(param, value, **options)
    assert (found.name, found.mapped, found.staged) == ("swap", False, False)


def test_another_dtype_or_device_is_other_memory() -> None:
    param = nn.Parameter(torch.zeros(2, 3))
    assert place(param, VALUE, dtype=torch.bfloat16).name == "data"
    assert "bfloat16" in place(param, VALUE, dtype=torch.bfloat16).why
    found = place(param, VALUE, device=torch.device("cuda", 1))
    assert (found.name, found.why) == ("data", "moves to cuda:1")
    assert not place(param, VALUE, dtype=torch.float16, in_place=True).direct


def test_a_cast_of_the_value_alone_is_a_copy() -> None:
    assert place(nn.Parameter(torch.zeros(2, 3)), VALUE.half()).name == "copy"


@pytest.mark.parametrize("param", [torch.zeros(2, 3), meta(2, 3)], ids=["memory", "meta"])
@pytest.mark.parametrize("special", [VALUE.as_subclass(Subclass), VALUE.to_sparse()], ids=["subclass", "sparse"])
def test_subclasses_and_layouts_decide_for_themselves(param: torch.Tensor, special: torch.Tensor) -> None:
    for one, other in ((param, special), (special, VALUE)):
        found = place(one, other, in_place=True)
        assert (found.name, found.by_handler, found.direct, found.mapped) == ("swap", True, False, False)


def test_every_placement_says_why() -> None:
    params = [torch.zeros(2, 3), meta(2, 3), VALUE.to_sparse()]
    for param, dtype, map, in_place in itertools.product(
        params, [torch.float32, torch.half], [True, False], [True, False]
    ):
        found = place(param, VALUE, dtype=dtype, map=map, in_place=in_place)
        assert found.why
        assert found.name in ("copy", "data", "swap")


def test_what_is_plain() -> None:
    for tensor in (VALUE, nn.Parameter(VALUE), nn.Buffer(VALUE), meta(2), VALUE.t(), VALUE[0].expand(4, 3)):
        assert is_plain(tensor)
    for tensor in (VALUE.as_subclass(Subclass), VALUE.to_sparse(), nn.UninitializedParameter()):
        assert not is_plain(tensor)


# Copies that cannot fail.


def cut(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(2, 3)


GOOD = {
    "plain": lambda: torch.zeros(2, 3),
    "parameter": lambda: nn.Parameter(torch.zeros(2, 3)),
    "transposed": lambda: torch.zeros(3, 2).t(),
    "channels last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a part": lambda: torch.zeros(4, 3)[1:3],
    "meta": lambda: torch.zeros(2, 3, device="meta"),
    "empty": lambda: torch.zeros(0, 3),
    "scalar": lambda: torch.zeros(()),
}
BAD = {
    "repeated": lambda: torch.zeros(10)[:3].expand(2, 3),
    "overlapping": lambda: torch.zeros(10).as_strided((2, 3), (1, 1)),
    "without memory": lambda: cut(torch.zeros(2, 3), 0),
    "cut short": lambda: cut(torch.zeros(2, 3), 20),
    "made in inference mode": inference,
    "subclass": lambda: torch.zeros(2, 3).as_subclass(Subclass),
    "sparse": lambda: torch.zeros(2, 3).to_sparse(),
    "odd dtype": lambda: torch.zeros(2, 3).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("kind", GOOD)
def test_targets_that_every_copy_fits(kind: str) -> None:
    target = GOOD[kind]()
    value = torch.ones(target.shape)
    assert copy_cannot_fail(target, value)
    with torch.no_grad():
        target.copy_(value)
    assert target.is_meta or torch.equal(target, value)


@pytest.mark.parametrize("kind", BAD)
def test_targets_that_a_copy_may_fail_for(kind: str) -> None:
    promised = copy_cannot_fail(BAD[kind](), torch.ones(2, 3))
    assert not promised  # in a line of its own: showing a tensor without memory would end the process


@pytest.mark.parametrize(
    "value",
    [VALUE.to("meta"), VALUE.to_sparse(), VALUE.as_subclass(Subclass), VALUE.to(torch.float8_e5m2)],
    ids=["meta", "sparse", "subclass", "odd dtype"],
)
def test_values_that_a_copy_may_fail_for(value: torch.Tensor) -> None:
    assert not copy_cannot_fail(torch.zeros(2, 3), value)


@pytest.mark.filterwarnings("ignore:Casting complex", "ignore:ComplexHalf")
def test_promised_copies_between_dtypes_succeed() -> None:
    promised = 0
    for source, target in itertools.product(filter(is_copied, DTYPES), repeat=2):
        value, memory = (torch.zeros(2, 48, dtype=torch.uint8).view(dtype)[:, :2] for dtype in (source, target))
        if copy_cannot_fail(memory.contiguous(), value):
            memory.contiguous().copy_(value)
            promised += 1
    assert promised == 12 * 12 - 2 * 10  # complex into real warns, and a warning may be an error


# After a transform.


def test_what_a_transform_returns_is_asked_for() -> None:
    param, planned = torch.zeros(2, 3), Placement("copy", "as planned")
    assert after_transform(planned, param, VALUE, VALUE) is planned
    found = after_transform(planned, param, VALUE.half(), VALUE)
    assert (found.name, found.why) == ("data", "changes its dtype to float16")
    for special in (VALUE.as_subclass(Subclass), VALUE.to_sparse()):
        found = after_transform(planned, param, special, VALUE)
        assert (found.name, found.by_handler) == ("swap", False)
        assert after_transform(planned, special, VALUE, VALUE).by_handler


def test_only_the_value_itself_is_still_shown() -> None:
    planned = Placement("swap", "was on meta: becomes a map of the file", mapped=True)
    assert after_transform(planned, meta(2, 3), VALUE.view(2, 3), VALUE) is planned
    found = after_transform(planned, meta(2, 3), VALUE.clone(), VALUE)
    assert (found.name, found.mapped) == ("swap", False)
