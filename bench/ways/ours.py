"""modelstate's own ways."""

from typing import Any

from torch import nn

from bench.ways.case import Case, Way, Work


def load(*, meta: bool = True, torch_file: bool = False, **options: Any) -> Way:
    def prepare(case: Case) -> Work:
        import modelstate as ms

        model = case.on_meta() if meta else case.with_memory()
        path = case.torch_file if torch_file else case.safetensors

        def work() -> nn.Module:
            ms.load(model, path, **options)
            return model

        return work

    return Way(prepare, files="pt" if torch_file else "safetensors")


def build_and_load(**options: Any) -> Way:
    """The model is built while the clock runs, as `from_pretrained` does it."""

    def prepare(case: Case) -> Work:
        import modelstate as ms

        def work() -> nn.Module:
            model = case.on_meta()
            ms.load(model, case.safetensors, **options)
            return model

        return work

    return Way(prepare, package="transformers")
