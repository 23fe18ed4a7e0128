"""A file of `torch.save`, for those who need one: there in full, on the disk, or not at all."""

from collections.abc import Mapping
from typing import Any

import torch

from modelstate.errors import ModelStateError, UnsavableError
from modelstate.write.checkpoint import write_file
from modelstate.write.files import Output


def write_torch_file(state: Mapping[Any, Any], path: str, *, overwrite: bool) -> dict[str, int]:
    """Saves whatever pickle takes, and returns the path of the file and its bytes.

    Raises `UnsavableError` for what cannot be pickled, and what `write_file` raises.
    """
    return write_file(path, lambda output: _save(state, output, path), overwrite=overwrite)


def _save(state: Mapping[Any, Any], output: Output, path: str) -> None:
    writer = _Writer(output)
    try:
        torch.save(state, writer)  # type: ignore[arg-type]
    except ModelStateError:
        raise
    except Exception as error:
        raise UnsavableError(
            "torch.save cannot save this",
            where=path,
            found=f"{type(error).__name__}: {error}",
            remedy="leave out what cannot be pickled",
        ) from error
    if writer.failed is not None:
        raise writer.failed


class _Writer:
    """What `torch.save` writes to.

    Torch's own writer must not see an error: it would go on writing, and say what it wanted to do next instead of what
    was wrong. So the first one is kept, and nothing is written any more.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self.failed: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if self.failed is None:
            try:
                self._output.append(view)
            except BaseException as error:
                self.failed = error
        return len(view)

    def flush(self) -> None:
        pass
