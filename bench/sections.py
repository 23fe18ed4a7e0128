"""The tables of loads, as a list. The parts that are not loads are in `bench.other`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

DECODER = "A decoder, {size}"
SMALL = "{count} tensors of 1 to 16 KB, {size}"
IMPORT, FIRST_USE = "import modelstate, after torch", "the first use of modelstate.load, after that"
WITHOUT_TORCH = ("--help", "inspect, safetensors", "verify, safetensors", "store ls")
"""Commands that need no torch."""
META, MEMORY = "into a module on meta", "into a module that has memory and an optimizer"
_SLOW = {
    "safetensors load_model",
    "to_empty + safetensors load_model",
    "torch.load + assign",
    "DCP",
    "DCP, Hugging Face storage",
    "torchsnapshot",
    "tensorizer",
    "runai-model-streamer",
    "fastsafetensors",
    "fastsafetensors, without O_DIRECT",
    "accelerate load_checkpoint_and_dispatch",
}


@dataclass(frozen=True, slots=True)
class Load:
    """One table of loads."""

    key: str
    title: str
    """`{size}` and `{count}` stand for the checkpoint's size and the number of its tensors."""
    table: str
    """Of `bench.contenders.TABLES`."""
    cases: Mapping[str, str]
    """The head of each column, and the case that it has; one without a head is no grid."""
    form: str = "load"
    words: str = ""
    only: Collection[str] = ()
    without: Collection[str] = ()
    why: str = ""
    """Why contenders are left out."""
    cold: bool = False


LOADS: dict[str, tuple[Load, ...]] = {
    "default": (
        Load(
            "default/large",
            f"Without options: a decoder, {{size}}, {MEMORY}",
            "default",
            {"": "large"},
            words="With `modelstate.load` the module keeps its values when the load fails; `in_place=False` and "
            "`in_place=True` show what the alternatives cost.",
        ),
        Load(
            "default/middle",
            f"Without options: a decoder, {{size}}, {MEMORY}",
            "default",
            {"": "middle"},
        ),
        Load(
            "default/mixed",
            f"Without options: tied weights, BatchNorm and frozen parameters, {{size}}, {MEMORY}",
            "default",
            {"": "mixed"},
        ),
    ),
    "large": (
        Load(
            "large/meta",
            f"{DECODER}, {META}",
            "meta",
            {"": "large"},
        ),
        Load(
            "large/memory",
            f"{DECODER}, {MEMORY}",
            "materialised",
            {"": "large"},
        ),
    ),
    "cold": (
        Load(
            "cold",
            f"{DECODER}, cold, {META}",
            "meta",
            {"": "large"},
            words="The file is taken out of the page cache before the clock starts, and the kernel is asked whether "
            "it is gone.",
            without=("Model() + torch.load + load_state_dict", "accelerate load_checkpoint_and_dispatch", "DCP"),
            why="what they add to the others is not in the reading",
            cold=True,
        ),
        Load(
            "cold/memory",
            f"{DECODER}, cold, {MEMORY}",
            "materialised",
            {"": "large"},
            only=(
                "modelstate.load, in_place=True",
                "modelstate.load",
                "torch.load(mmap) + load_state_dict",
                "safetensors load_model",
                "DCP, Hugging Face storage",
                "fastsafetensors, without O_DIRECT",
            ),
            cold=True,
        ),
    ),
    "cast": (
        Load(
            "cast",
            f"{DECODER} in float32, into a module in bfloat16",
            "cast",
            {"": "large"},
            form="cast",
        ),
        Load(
            "cast/memory",
            f"{DECODER} in float32, into a module in bfloat16 that has memory and an optimizer",
            "cast-memory",
            {"": "large"},
            form="cast",
        ),
    ),
    "int8": (
        Load(
            "int8",
            f"{DECODER} in float32, into a module with int8 weights",
            "int8",
            {"": "large"},
            form="cast",
        ),
    ),
    "int4": (
        Load(
            "int4",
            f"{DECODER} in float32, into a module with int4 weights in groups of 32",
            "int4",
            {"": "large"},
            form="cast",
            without=("torch.load + load_state_dict + quantize_",),
            why="int8 shows what it adds",
        ),
    ),
    "shards": (
        Load(
            "shards",
            "By the number of files",
            "meta",
            {"1 file": "large", "5 shards": "large-5", "10 shards": "large-10"},
            form="grid",
            words="The decoder in float32, into a module on meta.",
            only=(
                "modelstate.load",
                "modelstate.load, map=False",
                "accelerate load_checkpoint_in_model",
                "DCP, Hugging Face storage",
            ),
        ),
    ),
    "bf16": (
        Load(
            "bf16/meta",
            f"{DECODER} in bfloat16, {META}",
            "meta",
            {"": "large-bf16"},
            without=(
                "Model() + torch.load + load_state_dict",
                "accelerate load_checkpoint_and_dispatch",
                "fastsafetensors",
                "DCP",
                "tensorizer",
            ),
            why="float32 shows how they compare",
        ),
        Load(
            "bf16/memory",
            f"{DECODER} in bfloat16, {MEMORY}",
            "materialised",
            {"": "large-bf16"},
            without=("DCP", "torchsnapshot", "modelstate.load", "fastsafetensors, without O_DIRECT"),
            why="float32 shows how they compare",
        ),
    ),
    "small": (
        Load(
            "small/meta",
            f"{SMALL}, {META}",
            "meta",
            {"": "small"},
            without=_SLOW,
            why="they end with the same `load_state_dict`, which is what takes the time",
        ),
        Load(
            "small/memory",
            f"{SMALL}, {MEMORY}",
            "materialised",
            {"": "small"},
            without=_SLOW,
            why="the rows of the large decoder show how they compare",
        ),
    ),
    "many": (
        Load(
            "many",
            "By the number of tensors",
            "meta",
            {"20,000 tensors": "small", "100,000 tensors": "many"},
            form="grid",
            words="Tensors of 1 to 16 KB in one safetensors file, into a module on meta.",
            only=("modelstate.load", "modelstate.load, map=False", "accelerate load_checkpoint_in_model"),
            why="they call `load_state_dict`, whose time grows with the square of the number of modules",
        ),
    ),
    "hub": (
        Load("hub/load", "A Llama of transformers, {size}, with its construction", "hub", {"": "llama"}),
        Load(
            "hub/cast",
            "A Llama of transformers, {size} in float32, with its construction, in bfloat16",
            "hub-cast",
            {"": "llama"},
            form="cast",
        ),
        Load(
            "hub/int8",
            "A Llama of transformers, {size} in float32, with its construction, with int8 weights",
            "hub-int8",
            {"": "llama"},
            form="cast",
        ),
        Load(
            "hub/minilm",
            "A published checkpoint: all-MiniLM-L6-v2, {size}, with the construction of the model",
            "hub",
            {"": "minilm"},
        ),
        Load(
            "hub/minilm/meta",
            f"A published checkpoint: all-MiniLM-L6-v2, {{size}}, {META}",
            "meta",
            {"": "minilm"},
            only=(
                "modelstate.load",
                "modelstate.load, map=False",
                "torch.load(mmap) + assign",
                "safetensors load_file + assign",
                "accelerate load_checkpoint_in_model",
            ),
        ),
    ),
}
"""By the part of the harness, as `--only` names it."""

ON_GPU: dict[str, tuple[Load, ...]] = {
    "gpu": (
        *(
            Load(
                f"gpu/{case}",
                f"{title}, into a module on a GPU, with an optimizer",
                "gpu-memory",
                {"": case},
                form="gpu",
            )
            for case, title in (("large", DECODER), ("middle", DECODER), ("small", SMALL))
        ),
        Load(
            "gpu/cast",
            f"{DECODER} in float32, into a module in bfloat16 on a GPU, with an optimizer",
            "gpu-cast-memory",
            {"": "large"},
            form="gpu",
        ),
        Load(
            "gpu/meta", f"{DECODER}, into a module on meta that gets onto a GPU", "gpu-meta", {"": "large"}, form="gpu"
        ),
    ),
}
"""The same, measured only where there is a CUDA device."""
