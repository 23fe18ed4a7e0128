"""safetensors files: what their own library writes is read alike, and what it refuses is refused."""

import re
import struct
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import modelstate
from modelstate.errors import DamagedFileError, OpenError, TruncatedFileError, UnsupportedTensorError
from modelstate.formats.safetensors import DTYPES
from tests.formats.files import entry, safetensors_bytes, same, value
from tests.programs import run_program
from tests.sweeps import EXHAUSTIVE, examples

A = entry("F32", [1], 0, 4)


def read(path: str) -> Any:
    return modelstate.open(path).contents


def by_library(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def metadata_by_library(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def refused_by_library(path: Path) -> bool:
    try:
        by_library(path)
    except Exception:
        return True
    return False


def assert_agrees(path: Path) -> None:
    tree, expected = read(str(path)).tree, by_library(path)
    assert isinstance(tree, Mapping)
    assert tree.keys() == expected.keys()
    assert all(same(value(tree[name]), expected[name]) for name in tree)


def sample() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "layers.0.weight": torch.randn(3, 5),
        "layers.0.bias": torch.randn(5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7),
        "half": torch.randn(3).to(torch.bfloat16),
        "ключ 模型 🙂": torch.tensor([True, False]),
        "": torch.arange(3, dtype=torch.uint8),
    }


# What is right.


def test_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(sample(), path, metadata={"format": "pt", "note": "ü"})
    assert_agrees(path)
    found = read(str(path))
    assert found.format == "safetensors"
    assert found.metadata == {"format": "pt", "note": "ü"}
    assert [*found.files] == [str(path)]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name: str, tmp_path: Path) -> None:
    dtype, path = getattr(torch, DTYPES[name][0]), tmp_path / "x.safetensors"
    bits = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    if dtype is torch.bool:
        bits %= 2
    save_file({"a": bits.view(dtype).reshape(2, 3), "b": torch.empty(0, dtype=dtype)}, path)
    assert f'"{name}"'.encode() in path.read_bytes()
    assert_agrees(path)


@pytest.mark.parametrize("names", range(12))
def test_tensors_are_aligned_in_the_file_as_in_memory(names: int, tmp_path: Path) -> None:
    """Where both differ by less than a cache line, every copy out of the page cache is slower."""
    path = tmp_path / "x.safetensors"
    modelstate.save({f"w{'x' * names}": torch.ones(8, 8), "b": torch.ones(16)}, path)
    begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert begin % 64 == 0
    assert by_library(path).keys() == {f"w{'x' * names}", "b"}


def test_four_bit_floats_come_in_pairs(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"a": entry("F4", [3, 4], 0, 6)}, 6))
    assert_agrees(path)
    tree = read(str(path)).tree
    assert isinstance(tree, Mapping)
    assert tree["a"].dtype is torch.float4_e2m1fn_x2
    assert tree["a"].shape == (3, 2)


@pytest.mark.parametrize(
    "content",
    [
        safetensors_bytes({}),
        safetensors_bytes(b"{}  \n\t\r "),
        safetensors_bytes(b" \n{ }"),
        safetensors_bytes({"__metadata__": None}),
        safetensors_bytes({"__metadata__": {}, "a": A}, 4),
        safetensors_bytes({"a": A, "__metadata__": {"k": "v"}}, 4),
        safetensors_bytes({"b": entry("F32", [1], 4, 8), "a": A}, 8),
        safetensors_bytes({"a": A, "z": entry("F32", [0], 4, 4), "b": entry("U8", [1], 4, 5)}, 5),
        safetensors_bytes({"a": A, "z": entry("F32", [0], 0, 0), "b": entry("U8", [1], 4, 5)}, 5),
        safetensors_bytes({"a": entry("U8", [], 0, 1)}, 1),
        safetensors_bytes({"a": entry("U8", [1] * 100, 0, 1)}, 1),
        safetensors_bytes({'a\\b"c\n': A}, 4),
        safetensors_bytes(b'{ "a" : { "shape" : [ 1 , 2 ] ,\n"data_offsets":[ 0 , 2 ] , "dtype":"U8" } }', 2),
        safetensors_bytes({"odd": entry("U8", [3], 0, 3), "unaligned": entry("F64", [2], 3, 19)}, 19),
    ],
)
def test_unusual_files_that_are_right(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert_agrees(path)


def test_names_come_in_the_order_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = {"b": entry("U8", [4], 5, 9), "c": entry("U8", [0], 5, 5), "a": entry("U8", [5], 0, 5)}
    path.write_bytes(safetensors_bytes(header, 9))
    tree = read(str(path)).tree
    assert isinstance(tree, Mapping)
    assert list(tree) == ["a", "c", "b"]


@pytest.mark.slow
def test_a_published_file(real_file: Callable[[str], Path]) -> None:
    path = real_file("minilm")
    assert_agrees(path)
    tree = read(str(path)).tree
    assert isinstance(tree, Mapping)
    assert sum(stored.numel for stored in tree.values()) > 22_000_000


# What is wrong, one error each. The library is asked too.

FIRST = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
SECOND = '{"dtype":"U8","shape":[1],"data_offsets":[1,2]}'
FAR_END = b'{"dtype":"U8","shape":[1],"data_offsets":[0,' + b"9" * 5000 + b"]}"
LONG_SIZE = b'{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}'
FLOAT = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def raw(text: bytes, data: int = 0) -> bytes:
    """A file with this header, in which %F is a good entry of a float, %0 and %1 are two of a byte each."""
    for mark, good in ((b"%F", FLOAT), (b"%0", FIRST), (b"%1", SECOND)):
        text = text.replace(mark, good.encode())
    return safetensors_bytes(text, data)


def one(its: dict[str, Any], data: int = 0) -> bytes:
    """A file with one tensor."""
    return safetensors_bytes({"a": its}, data)


made = safetensors_bytes

# The error of a malformed file, and what its message says.
LENGTH = DamagedFileError, "the file ends within its header"
LIMIT = DamagedFileError, "larger than the format allows"
SYNTAX = DamagedFileError, "the header is damaged: "
TWICE = DamagedFileError, "is in one object twice"
DTYPE = DamagedFileError, "the dtype of .* is unknown"
RANGE = DamagedFileError, "overlap those of|leave a hole behind|end before they begin|goes on behind its last tensor"
SIZE = DamagedFileError, "not as many as its shape and dtype need|a shape that no tensor can have"
CUT = TruncatedFileError, "the file is cut short|ends within the length"
UNSUPPORTED = UnsupportedTensorError, "is stored as F"

MALFORMED: dict[str, tuple[tuple[type[OpenError], str], bytes]] = {
    "length beyond the file": (LENGTH, made({"a": A}, 4, length=5000)),
    "length alone": (LENGTH, struct.pack("<Q", 80)),
    "length above the limit": (LIMIT, made({"a": A}, 4, length=100_000_001)),
    "length of 0": (SYNTAX, made({"a": A}, 4, length=0)),
    "no JSON": (SYNTAX, raw(b"hello, this is no JSON")),
    "no UTF-8": (SYNTAX, raw(b'{"\xff\xfe":%F}', 4)),
    "a byte order mark": (SYNTAX, raw(b"\xef\xbb\xbf{}")),
    "an end missing": (SYNTAX, raw(b'{"a":%F', 4)),
    "something behind it": (SYNTAX, raw(b"{}\0\0")),
    "half a surrogate in the metadata": (SYNTAX, raw(b'{"__metadata__":{"a":"\\ud800"},"b":%F}', 4)),
    "a nested dict": (SYNTAX, made({"a": {"b": A}}, 4)),
    "deep nesting": (SYNTAX, raw(b'{"a":' + b"[" * 200_000)),
    "no dtype": (SYNTAX, made({"a": {"shape": [1], "data_offsets": [0, 4]}}, 4)),
    "no offsets": (SYNTAX, made({"a": {"dtype": "F32", "shape": [1]}}, 4)),
    "a field twice": (SYNTAX, raw(b'{"a":{"shape":[1],"dtype":"F32",' + FLOAT[1:].encode() + b"}", 4)),
    "a negative size": (SYNTAX, one(entry("F32", [-1], 0, 4), 4)),
    "a fraction": (SYNTAX, one(entry("F32", [1.0], 0, 4), 4)),
    "metadata that is a list": (SYNTAX, made({"__metadata__": []})),
    "metadata twice": (SYNTAX, raw(b'{"__metadata__":{"a":"b"},"__metadata__":{"a":"b"}}')),
    "a name twice": (TWICE, raw(b'{"a":%0,"a":%1}', 2)),
    "a name twice, once escaped": (TWICE, raw(b'{"a":%0,"\\u0061":%1}', 2)),
    "an unknown dtype": (DTYPE, one(entry("F128", [1], 0, 16), 16)),
    "6-bit floats, E2M3": (UNSUPPORTED, one(entry("F6_E2M3", [4], 0, 3), 3)),
    "4-bit floats, odd": (UNSUPPORTED, one(entry("F4", [2, 3], 0, 3), 3)),
    "a 4-bit float alone": (UNSUPPORTED, one(entry("F4", [], 0, 1), 1)),
    "an overlap": (RANGE, made({"a": A, "b": entry("F32", [1], 2, 6)}, 6)),
    "the same bytes twice": (RANGE, made({"a": A, "b": A}, 4)),
    "a hole": (RANGE, made({"a": A, "b": entry("F32", [1], 8, 12)}, 12)),
    "an empty tensor inside another": (RANGE, made({"a": A, "b": entry("F32", [0], 2, 2)}, 4)),
    "an end before the begin": (SIZE, one(entry("F32", [1], 4, 0), 4)),
    "an offset of 2**64": (RANGE, one(entry("F32", [1], 2**64, 2**64 + 4), 4)),
    "an offset of 5,000 digits": (SYNTAX, raw(b'{"a":' + FAR_END + b"}", 4)),
    "bytes behind the last tensor": (RANGE, made({"a": A}, 5)),
    "a range too small": (SIZE, one(entry("F32", [2], 0, 4), 4)),
    "a range too large": (SIZE, one(entry("F32", [1], 0, 8), 8)),
    "a scalar of two": (SIZE, one(entry("F32", [], 0, 8), 8)),
    "an empty tensor with bytes": (SIZE, one(entry("F32", [0], 0, 4), 4)),
    "an overflow": (SIZE, one(entry("F32", [2, 2**63], 0, 4), 4)),
    "an overflow beside a 0": (SIZE, one(entry("F32", [2**63, 4, 0], 0, 0))),
    "a size of 2**64": (SIZE, one(entry("F32", [2**64], 0, 0))),
    "a size of 5,000 digits": (SYNTAX, raw(b'{"a":' + LONG_SIZE + b"}", 1)),
    "the data cut off": (CUT, made({"a": A}, 3)),
}  # fmt: skip

STRICTER: dict[str, tuple[tuple[type[OpenError], str], bytes]] = {
    "one entry twice": (TWICE, raw(b'{"a":%0,"a":%0}', 1)),
    "a key of the metadata twice": (SYNTAX, raw(b'{"__metadata__":{"a":"b","a":"c"}}')),
    "a field of its own": (SYNTAX, made({"a": {**A, "stride": [1]}}, 4)),
    "an entry as an array": (SYNTAX, made({"a": ["F32", [1], [0, 4]]}, 4)),
    "2,000 dimensions": (SIZE, one(entry("U8", [1] * 2000, 0, 1), 1)),
}  # fmt: skip
"""What the library reads, and we do not: see the module for why."""


@pytest.mark.parametrize("name", [*MALFORMED, *STRICTER])
def test_malformed(name: str, tmp_path: Path) -> None:
    (error, says), content = {**MALFORMED, **STRICTER}[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(error) as raised:
        read(str(path))
    assert type(raised.value) is error
    assert re.search(says, raised.value.what)
    assert str(path) in raised.value.where
    assert raised.value.remedy
    assert len(str(raised.value)) < 2000
    assert refused_by_library(path) is (name in MALFORMED)


def test_messages_say_what_and_where(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"first": A, "second": entry("F32", [3], 4, 12)}, 12))
    with pytest.raises(DamagedFileError) as size:
        read(str(path))
    assert "'second'" in size.value.what
    assert "12 bytes" in size.value.expected
    assert "8 bytes" in size.value.found
    path.write_bytes(safetensors_bytes({"first": A, "second": entry("F32", [3], 4, 16)}, 11))
    with pytest.raises(TruncatedFileError) as cut:
        read(str(path))
    assert "1 of its 2 tensors" in cut.value.what
    assert "copy it again" in cut.value.remedy


# Hostile headers, and what opening costs.


def measured(*paths: Path) -> list[tuple[str, int, int]]:
    """What reading each file takes in a process with 600 MB at most: outcome, bytes read, and MB of memory."""
    program = """
        import os, resource, sys
        from pathlib import Path
        import modelstate as ms

        def status(name, file="status"):
            return int(Path("/proc/self", file).read_text().split(name + ":")[1].split()[0])

        ms.open({})  # imports what an open needs
        for path in sys.argv[1:]:
            if pid := os.fork():
                assert os.waitpid(pid, 0)[1] == 0
                continue
            limit = (status("VmSize") << 10) + (600 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            before, memory = status("rchar", "io"), status("VmRSS")
            try:
                outcome = f"{len(ms.open(path))} tensors"
            except ms.ModelStateError as error:
                outcome = error.what
            print(outcome, status("rchar", "io") - before, (status("VmHWM") - memory) >> 10, flush=True)
            os._exit(0)
    """
    done = run_program(textwrap.dedent(program), *paths)
    assert done.returncode == 0, done.stderr
    results = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()]
    return [(outcome, int(read_bytes), int(memory_mb)) for outcome, read_bytes, memory_mb in results]


HOSTILE = {
    "empty lists": (b'{"a":[', b"[],", b"", "the header is damaged"),
    "a long name": (b'{"', b"a", b'":1}', "the header is damaged"),
    "dimensions": (
        b'{"a":{"dtype":"U8","shape":[',
        b"1,",
        b'1],"data_offsets":[0,1]}}',
        "more numbers than the shapes of its tensors",
    ),
    "tensors": (b"{", b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},', b"", "more tensors than any model"),
}


@pytest.mark.slow
def test_a_hostile_header_costs_little_more_than_its_bytes(tmp_path: Path) -> None:
    size_mb, paths = 89 if EXHAUSTIVE else 55, []
    for name, (begin, middle, end, _) in HOSTILE.items():
        paths.append(tmp_path / f"{name}.safetensors")
        paths[-1].write_bytes(safetensors_bytes(begin + middle * (size_mb * 1_000_000 // len(middle)) + end))
    results = measured(*paths)
    for path in paths:
        path.unlink()
    for name, (outcome, _, memory_mb) in zip(HOSTILE, results, strict=True):
        assert HOSTILE[name][-1] in outcome, name
        assert memory_mb < 4.5 * size_mb, name


@pytest.mark.slow
def test_opening_reads_and_allocates_no_more_than_the_header(tmp_path: Path) -> None:
    paths = [tmp_path / "announced.safetensors", tmp_path / "small.safetensors", tmp_path / "large.safetensors"]
    paths[0].write_bytes(safetensors_bytes(b"{}", length=99_999_999))
    for path, size in zip(paths[1:], (1 << 20, 100 << 30), strict=True):
        names = {f"layer.{i}": entry("F32", [size // 4], i * size, (i + 1) * size) for i in range(4)}
        path.write_bytes(safetensors_bytes(names))
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + 4 * size)
    announced, small, large = measured(*paths)
    assert [announced[0], small[0], large[0]] == ["the file ends within its header", "4 tensors", "4 tensors"]
    assert max(announced[2], small[2], large[2]) < 20
    assert announced[1] < 100_000
    assert abs(small[1] - large[1]) < 1000
    assert max(small[1], large[1]) < 20_000


NUMBERS = st.sampled_from(["0", "4", "4.0", "4e0", "true", "null", str(2**64 + 4), "8"])
TEXTS = st.sampled_from(['"a"', '"b"', r'"\""', r'"\\"', r'"\ud800"', '"F32"', '"é"', '"__metadata__"', "1", "null"])
FIELDS = st.one_of(
    st.builds('"dtype": {}'.format, st.one_of(st.just('"F32"'), TEXTS)),
    st.builds('"shape": [{}]'.format, st.one_of(st.just("1"), NUMBERS)),
    st.builds('"data_offsets": [{}, {}]'.format, st.one_of(st.just("0"), NUMBERS), st.one_of(st.just("4"), NUMBERS)),
    st.builds("{}: {}".format, TEXTS, TEXTS),
)
USUAL = '"dtype": "F32", "shape": [1], "data_offsets": [0, 4]'
ENTRIES = st.one_of(st.just(f"{{{USUAL}}}"), st.lists(FIELDS, max_size=4).map(lambda found: f"{{{', '.join(found)}}}"))
PAIRS = st.lists(st.builds("{}: {}".format, TEXTS, TEXTS), max_size=3).map(lambda found: f"{{{', '.join(found)}}}")
HEADERS = st.lists(
    st.one_of(
        st.builds("{}: {}".format, st.one_of(st.just('"a"'), TEXTS), ENTRIES),
        st.builds('"__metadata__": {}'.format, st.one_of(PAIRS, TEXTS)),
    ),
    max_size=3,
).map(lambda found: f"{{{', '.join(found)}}}")


@pytest.mark.slow
@given(header=HEADERS)
@example(header=f'{{"a": {{"dtype": "F16", {USUAL}}}}}')
@example(header=f'{{"a": {{{USUAL}, "shape": [1]}}, "__metadata__": {{"x": 1}}}}')
@example(header=f'{{"a": {{{USUAL}}}, "a": {{{USUAL}}}}}')
@example(header=f'{{"a": {{"dtype": "F32", "shape": [1], "data_offsets": [0, {10**27}]}}}}')
@example(header=f'{{"__metadata__": {{"x": "\\""}}, "a": {{{USUAL}}}}}')
@settings(max_examples=examples(450), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header_is_read_as_by_the_library(header: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    data = header.encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(4))

    try:
        found = read(str(path))
    except OpenError:
        return
    assert_agrees(path)
    assert found.metadata == metadata_by_library(path)
