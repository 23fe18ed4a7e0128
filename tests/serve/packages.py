"""Packages of AOTInductor for the tests: each is compiled once in a session, by one of its workers."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelstate as ms

_folder: list[Path] = []


def keep_packages_in(folder: Path) -> None:
    """Where they are kept for the session, for all of its workers."""
    _folder[:] = [folder]


def packages_folder() -> Path:
    """Where packages are kept."""
    folder = _folder[0] if _folder else Path(tempfile.gettempdir()) / "modelstate-packages"
    folder.mkdir(exist_ok=True)
    return folder


def needs_a_compiler() -> None:
    """Skips a test where nothing can be compiled."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name):
        pytest.skip("no C++ compiler: AOTInductor needs g++ or clang++")


def package_of(module: nn.Module, *args: Any, **options: Any) -> Path:
    """The path of a package with the weights of a module. The same one is not compiled again."""
    needs_a_compiler()
    path = packages_folder() / f"{type(module).__name__}-{_key(module, args, options)}.pt2"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            ms.export(module, args, path, kind="aoti", training=True, **options)
    return path


def _key(module: nn.Module, args: Any, options: Any) -> str:
    digest = hashlib.sha256(
        f"{torch.__version__} {module!r} {type(module).__qualname__} {module.training} {options!r}".encode()
    )
    for one in (*args, *module.parameters(), *module.buffers()):
        if isinstance(one, torch.Tensor):
            digest.update(f"{one.shape} {one.dtype} {one.stride()}".encode())
            digest.update(
                one.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if one.numel() else b""
            )
    return digest.hexdigest()[:16]
