import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelstate.checkpoint.inspect import build, rows
from modelstate.tensor_spec import TensorSpec


def specs(*names: str, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, TensorSpec]:
    made = {}
    for name in names:
        shape = (shapes or {}).get(name, (2,))
        made[name] = TensorSpec(name, shape, "float32", torch.empty(shape, device="meta"))
    return made


def labels(*names: str, **options: dict[str, tuple[int, ...]]) -> list[str]:
    return ["  " * row.depth + row.label for row in rows(build(specs(*names, **options)))]


def test_chains_take_one_line() -> None:
    assert labels("model.encoder.norm.weight") == ["model.encoder.norm.weight"]
    assert labels("a.b.w", "a.b.v") == ["a.b", "  w", "  v"]


def test_alike_layers_are_folded() -> None:
    names = [f"encoder.layer.{i}.{part}" for i in range(12) for part in ("q.weight", "q.bias")]
    assert labels("embed", *names, "norm") == [
        "embed",
        "encoder.layer.0 … layer.11 (12 ×)",
        "  q",
        "    weight",
        "    bias",
        "norm",
    ]


def test_numbers_are_ordered_as_numbers() -> None:
    names = [f"layer.{i}.w" for i in (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)]
    assert labels(*names) == ["layer.0 … layer.11 (12 ×)", "  w"]


def test_a_layer_that_differs_stands_alone() -> None:
    names = [f"layer.{i}.w" for i in range(5)]
    assert labels(*names, shapes={"layer.2.w": (3,)}) == [
        "layer",
        "  0 … 1 (2 ×)",
        "    w",
        "  2.w",
        "  3 … 4 (2 ×)",
        "    w",
    ]


def test_a_gap_in_the_numbers_is_kept() -> None:
    assert labels("l.0", "l.1", "l.3") == ["l", "  0 … 1 (2 ×)", "  3"]


def test_many_numbers_are_folded_wherever_alike_ones_stand() -> None:
    address = 140178894849152
    names = [f"state.{address + 72 * i}.{part}" for i in range(10) for part in ("exp_avg", "exp_avg_sq")]
    odd = f"state.{address + 72 * 3}.exp_avg"
    assert labels(*names, shapes={odd: (5,)}) == [
        "state",
        f"  {address} … (9 ×)",
        "    exp_avg",
        "    exp_avg_sq",
        f"  {address + 72 * 3}",
        "    exp_avg",
        "    exp_avg_sq",
    ]


def test_layers_in_turn_are_folded_where_there_are_many() -> None:
    few, many = ([f"l.{i}.{'ab'[i % 2]}" for i in range(number)] for number in (8, 10))
    assert labels(*few) == ["l", *(f"  {i}.{'ab'[i % 2]}" for i in range(8))]
    assert labels(*many) == ["l", "  0 … (5 ×)", "    a", "  1 … (5 ×)", "    b"]


def test_numbers_with_leading_zeros_are_names() -> None:
    assert labels("l.00", "l.01") == ["l", "  00", "  01"]


def test_a_name_that_is_also_a_prefix() -> None:
    assert labels("a", "a.b", "a.c") == ["a", "  b", "  c"]


def test_sizes_count_tied_names_once() -> None:
    tree = build(specs("a.x", "a.y", "b"), tied=frozenset({"a.y"}))
    assert tree.nbytes == 16
    assert [row.nbytes for row in rows(tree)] == [8, 8, 0, 8]


def test_a_name_of_ten_thousand_dots() -> None:
    assert len(labels("." * 10_000)) == 1


@pytest.mark.slow
@given(
    st.dictionaries(
        st.lists(st.sampled_from([*map(str, range(12)), "a", "b"]), min_size=1, max_size=4).map(".".join),
        st.sampled_from([(1,), (2, 2)]),
        min_size=1,
    )
)
def test_every_tensor_stands_for_itself_exactly_once(shapes: dict[str, tuple[int, ...]]) -> None:
    found = 0
    factors: list[int] = []
    for row in rows(build(specs(*shapes, shapes=shapes))):
        del factors[row.depth :]
        factors.append(row.times * (factors[-1] if factors else 1))
        found += factors[-1] if row.spec is not None else 0
    assert found == len(shapes)
