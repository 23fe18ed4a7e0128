"""What the tests of torch's formats share: files that torch wrote, and torch as the oracle."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import modelstate as ms
from modelstate.formats.tree import Contents
from modelstate.spec import StoredComposite, StoredTensor

DTYPES = sorted(
    (
        dtype
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype)
        and str(dtype) == f"torch.{name}"
        and not name.startswith(("q", "bits"))
        and not (name.startswith(("int", "uint")) and int(name.lstrip("uint")) < 8)
    ),
    key=str,
)
"""Every dtype that torch can save and load, without the quantized ones."""


def read_contents(path: object, **options: Any) -> Contents:
    """What the reader of a file returns for it."""
    return ms.open(path, **options).contents  # type: ignore[arg-type]


def is_copied(dtype: torch.dtype) -> bool:
    """Whether this torch copies tensors of a dtype; older ones have float4 in name only."""
    try:
        torch.empty(2, dtype=dtype).clone()
    except NotImplementedError:
        return False
    return True


def every_byte(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """A tensor whose bytes are all different patterns, as far as the dtype allows."""
    if dtype is torch.bool:
        return torch.arange(numel) % 3 == 0
    return (torch.arange(numel * dtype.itemsize) * 37 % 251).to(torch.uint8).view(dtype)


def saved(path: Path, value: object, **options: Any) -> str:
    torch.save(value, path, **options)
    return str(path)


def tensor(stored: StoredTensor | StoredComposite) -> torch.Tensor:
    """A described tensor, read with nothing of the code under test but the description."""
    if isinstance(stored, StoredComposite):
        return stored.build([tensor(part) for part in stored.parts])
    empty = torch.empty(0, dtype=stored.dtype)
    if stored.nbytes == 0:
        return torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype)
    with open(stored.storage.path, "rb") as file:
        file.seek(stored.storage.start)
        data = bytearray(file.read(stored.storage.nbytes))
    assert len(data) == stored.storage.nbytes
    storage = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    return empty.set_(storage, stored.offset, stored.shape, stored.stride)


def values(contents: Contents) -> Any:
    """The tree with its tensors in place of their descriptions."""

    def made(node: Any) -> Any:
        if isinstance(node, StoredTensor | StoredComposite):
            return tensor(node)
        if isinstance(node, dict):
            return {key: made(value) for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(map(made, node))
        return node

    return made(contents.tree)


def as_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(found: Any, true: Any) -> None:
    """Equal to the last bit, and of the same dtypes and shapes."""
    if isinstance(true, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape, found.layout) == (true.dtype, true.shape, true.layout)
        if true.layout is torch.sparse_coo:
            assert found.is_coalesced() == true.is_coalesced()
            assert_same([found._indices(), found._values()], [true._indices(), true._values()])
        elif true.layout is not torch.strided:
            rows = true.layout in (torch.sparse_csr, torch.sparse_bsr)
            for part in ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices"):
                assert_same(getattr(found, part)(), getattr(true, part)())
            assert_same(found.values(), true.values())
        else:
            if not (true.is_conj() or true.is_neg()):
                assert found.stride() == true.stride()
            assert as_bytes(found) == as_bytes(true)
    elif isinstance(true, Mapping):
        assert list(found) == list(true)
        for key in true:
            assert_same(found[key], true[key])
    elif isinstance(true, list | tuple):
        assert type(found) is type(true)
        assert len(found) == len(true)
        for one, other in zip(found, true, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(true)
        assert found == true


def rich_tree() -> dict[str, Any]:
    """Everything that a training checkpoint may hold, and what is hard to read in it."""
    base = torch.arange(24.0).reshape(4, 6)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(7, 3)).sum().backward()
    optimizer.step()
    return {
        "step": 12,
        "model_state": model.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "views": [base, base.t(), base[1:3, ::2], base[0].expand(3, 6), base.as_strided((3, 3), (2, 1), 1)],
        "many": {str(i): torch.arange(6.0 * i).reshape(2, 3, i)[:, : 1 + i % 3] for i in range(1, 60)},
        "shared": (base.view(-1)[4:8], base.view(-1)[6:10]),
        "scalar": torch.tensor(2.5),
        "empty": [torch.empty(0), torch.empty(0, 3), torch.empty(2, 0, 5)[:, :, 1:3]],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "frozen": torch.nn.Parameter(torch.randn(3), requires_grad=False),
        "leaf": torch.randn(2, requires_grad=True),
        "complex": {"z": torch.randn(3, dtype=torch.complex64), "number": 1 + 2j},
        "plain": [1, -1, 2**40, -(2**70), 1.5, float("inf"), True, None, "é\n", b"\x00\xff", bytearray(b"ab"), ()],
        "by_number": {0: torch.ones(1), 1: {"nested": [{"deep": torch.ones(2)}]}},
        "kinds": [{1, 2}, torch.float16, torch.device("cpu"), torch.Size([2, 3]), torch.strided],
        "text": {"": "empty key", "a.b": "dots"},
    }  # fmt: skip


WEIGHT = torch.arange(12.0).reshape(4, 3)


def training() -> dict[str, Any]:
    """A checkpoint of a training run, with a tie and views."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    with torch.no_grad():
        model[0].weight.copy_(WEIGHT)
    state = model.state_dict()
    state["tied"] = state["0.weight"]
    return {
        "step": 12,
        "model_state": state,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(4, 3)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "config": {"sizes": [3, 4], "name": "net"},
    }
