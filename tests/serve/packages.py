"""Packages of AOTInductor for the tests: each is compiled once in a run, for all of its processes."""

import fcntl
import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import modelstate as ms
from modelstate.torch_compat.private import OLDEST_FOR_AOTI, torch_version
from tests.serve.models import linear

needs_aoti = pytest.mark.skipif(
    torch_version() < OLDEST_FOR_AOTI, reason="this torch is too old for AOTInductor packages"
)


def needs_a_compiler() -> None:
    """Skips a test where nothing can be compiled."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name):
        pytest.skip("no C++ compiler: AOTInductor needs g++ or clang++")


def package_of(module: nn.Module, *args: Any, **options: Any) -> Path:
    """The path of a package with the weights of a module. It is compiled once for all inputs of the same sizes."""

    def compile(path: Path) -> None:
        ms.export(module, args, path, kind="aoti", training=True, **options)

    return _made_once(f"{type(module).__name__}-{_key(module, args, options)}", compile)


def package_of_torch(module: nn.Module, *args: Any, **options: Any) -> Path:
    """As `package_of`, by torch alone, with `options` of Inductor."""

    def compile(path: Path) -> None:
        program = torch.export.export(module, args)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)

    return _made_once(f"torch-{type(module).__name__}-{_key(module, args, options)}", compile)


def _made_once(name: str, make: Callable[[Path], None]) -> Path:
    needs_a_compiler()
    path = Path(os.environ["MODELSTATE_TEST_PACKAGES"]) / f"{name}.pt2"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_suffix(".new.pt2")
            unfinished.unlink(missing_ok=True)
            make(unfinished)
            unfinished.rename(path)
    return path


def linear_package() -> Path:
    """The path of a package of `linear(1)`, for inputs of 2 to 16 rows."""
    rows = Dim("rows", min=2, max=16)
    return package_of(linear(1), torch.ones(3, 4), dynamic_shapes={"input": {0: rows}})


def without_weights() -> Path:
    """The path of a package into which weights have to be loaded before it is called, with a float input of 3 x 4.

    It is `linear_package` without the files that modelstate adds: what torch writes where the weights stay outside of
    the library (`aot_inductor.package_constants_in_so=False`).
    """
    whole = linear_package()

    def copy(unfinished: Path) -> None:
        with zipfile.ZipFile(whole) as old, zipfile.ZipFile(unfinished, "w") as new:
            for name in old.namelist():
                if "/data/weights/" not in name and not name.endswith(("weights_config.json", "modelstate.json")):
                    new.writestr(name, old.read(name))

    return _made_once(f"{whole.stem}-without-weights", copy)


def _key(module: nn.Module, args: Any, options: Any) -> str:
    digest = hashlib.sha256(
        f"{torch.__version__} {module!r} {type(module).__qualname__} {module.training} {options!r}".encode()
    )
    weights = [*module.parameters(), *module.buffers()]
    for tensor in (*(arg for arg in args if isinstance(arg, torch.Tensor)), *weights):
        digest.update(f"{tensor.shape} {tensor.dtype} {tensor.stride()} {tensor.device}".encode())
    for tensor in weights:
        if tensor.numel():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
