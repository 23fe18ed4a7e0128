"""transformers' `from_pretrained`, which builds the model itself."""

from typing import Any

from torch import nn

from bench import hub
from bench.ways.case import Case, Way, Work
from bench.ways.quantized import Config


def from_pretrained(*, config: Config | None = None, **options: Any) -> Way:
    def prepare(case: Case) -> Work:
        found = hub.transformers()
        cls = found.AutoModel if case.name == "minilm" else found.LlamaForCausalLM
        if config is not None:
            options["quantization_config"] = found.TorchAoConfig(config())

        def work() -> nn.Module:
            model: nn.Module = cls.from_pretrained(case.directory, **options)
            return model.eval()

        return work

    return Way(prepare, package="transformers")
