"""Several modules as one, under their keys, so that one load is enough for all of them."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from modelstate.errors import ReadFailedError
from modelstate.read.checkpoint import Checkpoint
from modelstate.read.stamp import Stamp
from modelstate.spec import Contents


class Objects(nn.Module):
    """Modules under keys of any spelling; what is inside has the names "key.name"."""

    def get_submodule(self, target: str) -> nn.Module:
        # torch asks for attributes, and a key may be the name of a method.
        head, _, rest = target.partition(".")
        child = self._modules.get(head) if head else self
        if child is None:
            raise AttributeError(f"no module {head!r}")
        return child.get_submodule(rest) if rest else child


def bundle(modules: Mapping[str, nn.Module]) -> Objects:
    """The modules under their dotted paths."""
    root = Objects()
    for path, module in modules.items():
        *above, key = path.split(".")
        place = root
        for name in above:
            place = place._modules.setdefault(name, Objects())  # type: ignore[assignment]
        place._modules[key] = module
    return root


def bundled(checkpoints: Mapping[str, Checkpoint]) -> Checkpoint:
    """The checkpoints of the modules as that of their bundle.

    Raises `ReadFailedError` where a file has changed between the opening of two of them.
    """
    tree: OrderedDict[str, Any] = OrderedDict()
    versions: dict[str, Any] = {}
    for path, checkpoint in checkpoints.items():
        flat = checkpoint.flat
        tree.update((f"{path}.{name}", stored) for name, stored in flat.tensors.items())
        tree.update((f"{path}.{name}", value) for name, value in flat.values.items())
        for name, version in (checkpoint.versions or {}).items():
            versions[f"{path}.{name}" if name else path] = version
    tree._metadata = versions  # type: ignore[attr-defined]
    several = list(checkpoints.values())
    formats = {checkpoint.format for checkpoint in several}
    contents = Contents(
        formats.pop() if len(formats) == 1 else "mapping",
        tree,
        tuple(dict.fromkeys(file for checkpoint in several for file in checkpoint.files)),
        checksums={place: crc for checkpoint in several for place, crc in checkpoint.checksums.items()},
    )
    names = list(dict.fromkeys(checkpoint.source for checkpoint in several))
    source = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return Checkpoint(contents, source=source or "mapping", stamps=_stamps(several))


def _stamps(checkpoints: list[Checkpoint]) -> dict[str, Stamp]:
    stamps: dict[str, Stamp] = {}
    for checkpoint in checkpoints:
        for path, stamp in checkpoint.stamps.items():
            if stamps.setdefault(path, stamp) != stamp:
                raise ReadFailedError(
                    "the file changed between the opening of two parts of it",
                    where=path,
                    remedy="open it again, when nothing writes to it any more",
                )
    return stamps
