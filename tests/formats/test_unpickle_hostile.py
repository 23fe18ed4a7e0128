"""Hostile pickles: input of any kind costs no more than its size, and is a value or our error."""

import json
import struct
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import modelstate as ms
from modelstate import errors
from tests.formats.torch_files import read_contents, saved, tensor
from tests.programs import run_program


def deep_key(levels: int) -> bytes:
    return b"\x80\x02}" + b"K\1" + b"\x85" * levels + b"K\1s."


def laughs(levels: int) -> bytes:
    data = b"\x80\x02]q\0"
    for level in range(levels):
        data += b"](" + b"h" + bytes([level]) + b"h" + bytes([level]) + b"eq" + bytes([level + 1])
    return data + b"."


def copies(call: bytes, times: int) -> bytes:
    """Asks for many copies of one large argument."""
    return b"\x80\x02](" + call + (b"h\0h\1\x85R" * times) + b"e."


def test_containers_that_are_not_read_leave_the_others_readable(tmp_path: Path) -> None:
    ring: list[Any] = []
    ring.append({"again": ring})
    tuple_ring: tuple[Any, ...] = ([],)
    tuple_ring[0].append(tuple_ring)
    ordered: OrderedDict[str, Any] = OrderedDict()
    ordered["x"] = [ordered]
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for number, value in enumerate((ring, tuple_ring, ordered, deep)):
        checkpoint = ms.open(saved(tmp_path / f"{number}.pt", {"a": value, "w": torch.ones(2), "b": [1]}))
        assert torch.equal(checkpoint.tensor("w"), torch.ones(2))
        assert checkpoint.value("b") == [1]
        assert "refused" in repr(checkpoint.extra)
        for ask in (partial(checkpoint.value, "a"), checkpoint.value):
            with pytest.raises(errors.UnsupportedTensorError, match=r"holds itself|more than 100") as caught:
                ask()
            assert "save it" in caught.value.remedy
            assert caught.value.names[0].startswith("a.")


def test_a_checkpoint_within_itself(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": {"weight": torch.ones(2)}}
    state["callbacks"] = {"last": [state]}
    checkpoint = ms.open(saved(tmp_path / "x.pt", state))
    assert list(checkpoint) == ["model.weight"]
    model = torch.nn.RMSNorm(2)
    assert ms.load(model, checkpoint, key="model").coverage == 1
    with pytest.raises(errors.UnsupportedTensorError, match=r"callbacks\.last\.0: a dict that holds itself"):
        checkpoint.value("callbacks")


HOSTILE = {
    "deep tuple as a key": deep_key(200_000),
    "deep tuple in a frozenset": b"\x80\x04()" + b"\x85" * 200_000 + b"\x91.",
    "deep lists": b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "a list that holds itself": b"\x80\x02]q\0h\0a.",
    "a dict that holds itself": b"\x80\x02}q\0K\1h\0s.",
    "a billion laughs": laughs(60),
    "a text longer than the data": b"\x80\x02X\xff\xff\xff\xffabc.",
    "bytes longer than the data": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",
    "an integer of 4 GB": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "an integer of a million bytes": b"\x80\x02\x8b" + struct.pack("<I", 1_000_000) + b"\1" * 1_000_000 + b".",
    "a long decimal": b"I" + b"9" * 1_000_000 + b"\n.",
    "memo beyond": b"\x80\x02K\1r\xff\xff\xff\xffj\xfe\xff\xff\xff.",
    "a bytearray by its size": b"\x80\x02c__builtin__\nbytearray\n\x8a\5\0\0\0\0\x10\x85R.",
    "bytes copied": copies(b"c__builtin__\nbytearray\nq\0B\x40\x42\x0f\0" + b"x" * 1_000_000 + b"q\1", 20_000),
    "lists copied": copies(b"c__builtin__\nset\nq\0](" + b"K\1" * 100_000 + b"eq\1", 20_000),
    "a long key again and again": b"\x80\x02(" + b"K\1" * 100_000 + b"tq\0}(" + b"h\0N" * 100_000 + b"u.",
    "an unhashable key": b"\x80\x02}]K\1s.",
    "an unhashable item": b"\x80\x04\x8f(]\x90.",
    "a shape of a million sizes": b"\x80\x02ctorch\nSize\n(" + b"K\1" * 1_000_000 + b"t\x85R.",
    "colliding integers": b"\x80\x02}("
    + b"".join(b"\x8a\x10" + ((2**61 - 1) * (i + 1)).to_bytes(16, "little") + b"N" for i in range(50_000))
    + b"u.",
    "colliding complex numbers": b"\x80\x02c__builtin__\ncomplex\nq\0}("
    + b"".join(
        b"h\0G" + struct.pack(">d", -1000003.0 * i) + b"G" + struct.pack(">d", i) + b"\x86RN" for i in range(20_000)
    )
    + b"u.",
    "long names again and again": b"\x80\x02X\x40\x42\x0f\0"
    + b"n" * 1_000_000
    + b"q\0]q\1("
    + b"K\1" * 1000
    + b"e0}(h\0h\1u.",
    "refused, again and again": b"\x80\x02(cx\ny\nq\0(" + b"K\1" * 100_000 + b"tq\1" + b"h\0h\1R0" * 50_000 + b"t.",
    "no end": b"\x80\x02K\1",
    "nothing": b"",
    "only a stop": b".",
    "an unknown opcode": b"\x80\x02\xff.",
    "out-of-band buffers": b"\x80\x05\x97.",
    "extension codes": b"\x80\x02\x82\x01.",
    "protocol 99": b"\x80\x63N.",
    "a call of a number": b"\x80\x02K\1)R.",
    "a call without a tuple": b"\x80\x02ccollections\nOrderedDict\nK\1R.",
    "a mark too few": b"\x80\x02K\1t.",
    "a value too few": b"\x80\x02K\1K\1\x87.",
    "a text that is none": b"\x80\x02X\1\0\0\0\xff.",
    "a device that is none": b"\x80\x02ctorch\ndevice\nX\3\0\0\0abc\x85R.",
    "a value that is not a layout": b"\x80\x02ctorch.serialization\n_get_layout\nX\3\0\0\0abc\x85R.",
    "a persistent id of text": b"Pabc\n.",
    "an odd number of items": b"\x80\x02}(K\1u.",
}


@pytest.mark.slow
def test_hostile_input_in_little_memory_and_time() -> None:
    """In a process of its own, with so many bytes of memory for each that their number follows from its size."""
    code = """
import json, resource
from modelstate import errors
from tests.formats.test_unpickle import loads
from tests.formats.test_unpickle_hostile import HOSTILE

outcomes = {}
for name, data in HOSTILE.items():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 50_000_000 + 100 * len(data), resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    try:
        loads(data)
        outcomes[name] = "loaded"
    except (errors.DamagedFileError, errors.TruncatedFileError, errors.ForbiddenGlobalError):
        outcomes[name] = "refused"
    except Exception as error:
        outcomes[name] = repr(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
print(json.dumps(outcomes))
"""
    done = run_program(code, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = ("deep lists", "deep tuples", "a list that holds itself", "a dict that holds itself")
    assert json.loads(done.stdout) == dict.fromkeys(HOSTILE, "refused") | dict.fromkeys(loaded, "loaded")


LEAVES = "a tensor leaves its storage"
SIZE = "impossible layout|than any memory|too many dimensions"
TENSOR = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        ((0, (2**40, 2**40), (2**40, 1)), errors.DamagedFileError, SIZE),
        ((0, (2,), (2**62,)), errors.DamagedFileError, SIZE),
        ((0, (0, 2**40), (2**70, 1)), errors.DamagedFileError, SIZE),
        ((0, (2**40, 2**40, 0), (0, 0, 1)), errors.DamagedFileError, SIZE),
        ((0, (10**12,), (1,)), errors.DamagedFileError, LEAVES),
        ((3, (2,), (1,)), errors.DamagedFileError, LEAVES),
        ((-1, (2,), (1,)), errors.DamagedFileError, SIZE),
        ((0, (-2,), (1,)), errors.DamagedFileError, SIZE),
        ((0, (2,), (-1,)), errors.DamagedFileError, SIZE),
        ((0, (2, 2), (1,)), errors.DamagedFileError, SIZE),
        ((0, (1,) * 65, (1,) * 65), errors.DamagedFileError, SIZE),
        ((0, 2, 1), errors.DamagedFileError, "."),
        ((0, (2.0,), (1,)), errors.DamagedFileError, "."),
        ((0, (True,), (1,)), errors.DamagedFileError, "."),
        (("0", (2,), (1,)), errors.DamagedFileError, "."),
        ((0, (2,), (1,), 1), errors.DamagedFileError, "."),
        ((0, (2,), (1,), False, None, {"conj": True}), errors.DamagedFileError, "."),
        ((0, (2,), (1,), False, None, {"other": True}), errors.UnsupportedTensorError, "."),
    ],
)  # fmt: skip
def test_impossible_tensors(tmp_path: Path, args: tuple[Any, ...], error: type[Exception], says: str) -> None:
    class Made:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (torch.ones(4)._typed_storage(), *args)

    path = saved(tmp_path / "x.pt", {"a": [Made()]})
    with pytest.raises(error, match=says) as caught:
        ms.open(path).tensor("a.0")
    if error is not errors.DamagedFileError:
        assert "a.0" in str(caught.value)


def test_stride_0_stands_for_more_than_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"a": torch.ones(1).expand(10**12)})
    stored = read_contents(path).tree["a"]
    assert (stored.nbytes, stored.extent.nbytes) == (4 * 10**12, 4)
    assert tensor(stored).stride() == (0,)
