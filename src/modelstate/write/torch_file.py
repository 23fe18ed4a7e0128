"""A file of `torch.save`, for those who need one: there in full, on the disk, or not at all."""

from collections.abc import Mapping
from typing import Any

import torch

from modelstate.errors import ModelStateError, UnsavableError
from modelstate.write.atomic import atomic_file
from modelstate.write.files import Output


def write_torch_file(state: Mapping[Any, Any], path: str, *, overwrite: bool) -> int:
    """Saves whatever pickle takes, and returns how many tensors the mapping has.

    Raises `UnsavableError` for what cannot be pickled, and what `atomic_file` raises.
    """
    with atomic_file(path, overwrite=overwrite) as output:
        try:
            torch.save(state, _Writer(output))  # type: ignore[arg-type]
        except (OSError, ModelStateError):
            raise
        except Exception as error:
            if isinstance(error.__context__, OSError):  # torch's own writer speaks of what it wanted to do next
                raise error.__context__ from None
            raise UnsavableError(
                "torch.save cannot save this",
                where=path,
                found=f"{type(error).__name__}: {error}",
                remedy="leave out what cannot be pickled",
            ) from error
    return sum(isinstance(value, torch.Tensor) for value in state.values())


class _Writer:
    """What `torch.save` writes to."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._output.append(view)
        return len(view)

    def flush(self) -> None:
        pass
