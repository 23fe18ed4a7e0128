"""The tables of files and of model families in docs/compatibility.md, computed again."""

import json
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import modelstate as ms

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"
EQUAL = "read, bit for bit"


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


MODEL = built()
STATE = dict(MODEL.state_dict())


def torch_file(value: object, **options: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.save(value, folder / "model.pt", **options)
        return folder / "model.pt"

    return write


def beside_quantized(folder: Path) -> Path:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    return torch_file({"model": STATE, "other": {"q": quantized}})(folder)


def repacked(folder: Path, prefix: str, compression: int) -> Path:
    with zipfile.ZipFile(torch_file(STATE)(folder)) as before, zipfile.ZipFile(folder / "again.pt", "w") as after:
        for name in before.namelist():
            after.writestr(prefix + name.partition("/")[2], before.read(name), compression)
    return folder / "again.pt"


def unpacked(folder: Path) -> Path:
    with zipfile.ZipFile(torch_file(STATE)(folder)) as archive:
        archive.extractall(folder / "out")
    return folder / "out" / "model"


def safetensors_file(folder: Path) -> Path:
    save_file(STATE, folder / "model.safetensors")
    return folder / "model.safetensors"


def indexed(folder: Path, suffix: str, save: Callable[[Any, Path], object]) -> Path:
    names = list(STATE)
    files = {f"part-{part}.{suffix}": names[part::2] for part in range(2)}
    for file, members in files.items():
        save({name: STATE[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    index = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}[suffix]
    (folder / index).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def linked(folder: Path) -> Path:
    (folder / "cache").mkdir()
    indexed(folder / "cache", "safetensors", save_file)
    (folder / "model").mkdir()
    for path in (folder / "cache").iterdir():
        (folder / "model" / path.name).symlink_to(path)
    return folder / "model"


def dcp_directory(folder: Path) -> Path:
    dcp.save({"model": dict(STATE)}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def our_file(name: str, **options: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        ms.save(MODEL, folder / name, **options)
        return folder if options else folder / name

    return write


def scripted(folder: Path) -> Path:
    torch.jit.script(MODEL.eval()).save(folder / "model.pt")
    return folder / "model.pt"


class Config:
    """A class that is not allowed."""


def cyclic() -> dict[str, object]:
    hyper: dict[str, object] = {"rate": 0.1}
    hyper["self"] = hyper
    return {"state_dict": STATE, "hyper": hyper}


FILES: Mapping[str, tuple[Callable[[Path], Path], Mapping[str, Any]]] = {
    "`torch.save`": (torch_file(STATE), {}),
    "`torch.save` before PyTorch 1.6": (torch_file(STATE, _use_new_zipfile_serialization=False), {}),
    "`torch.save` of a training run, with NumPy values": (
        torch_file({"model": STATE, "best": np.float64(0.5), "seen": np.arange(3), "step": np.int64(7)}),
        {},
    ),
    "`torch.save`, with an object of another class": (torch_file({"model": STATE, "config": Config()}), {}),
    "the same, with `skip_forbidden=True`": (
        torch_file({"model": STATE, "config": Config()}),
        {"skip_forbidden": True},
    ),
    "`torch.save`, with a dict that contains itself": (torch_file(cyclic()), {}),
    "`torch.save`, beside a quantized tensor": (beside_quantized, {}),
    "`torch.save` of a whole module, with `skip_forbidden=True`": (torch_file(MODEL), {"skip_forbidden": True}),
    "`torch.jit.save`": (scripted, {}),
    "an archive of `torch.save` that was packed again without its directory": (
        lambda folder: repacked(folder, "", zipfile.ZIP_STORED),
        {},
    ),
    "the same, compressed": (lambda folder: repacked(folder, "model/", zipfile.ZIP_DEFLATED), {}),
    "an archive of `torch.save` that was unpacked": (unpacked, {}),
    "safetensors": (safetensors_file, {}),
    "safetensors in shards, with the index of the Hugging Face tools": (
        lambda folder: indexed(folder, "safetensors", save_file),
        {},
    ),
    "the same, as symbolic links into a cache": (linked, {}),
    "`pytorch_model.bin` in shards": (lambda folder: indexed(folder, "bin", torch.save), {}),
    "a directory of `torch.distributed.checkpoint`": (dcp_directory, {"key": "model"}),
    "`ms.save`": (our_file("model.safetensors"), {}),
    "`ms.save` in shards": (our_file("model.safetensors", shard_size_bytes=200), {}),
    "`ms.save`, `.pt`": (our_file("model.pt"), {}),
}


def outcome_of(write: Callable[[Path], Path], options: Mapping[str, Any], folder: Path) -> str:
    folder.mkdir()
    path, options = write(folder), dict(options)
    key = options.pop("key", None)
    with ms.skeleton():
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    try:
        with ms.open(path, **options) as checkpoint:
            ms.load(model, checkpoint, key=key, map=False)
    except ms.ModelStateError as error:
        remedy = ", with the remedy" if error.remedy else ""
        return f"`{type(error).__name__}`{remedy}"
    loaded = model.state_dict()
    assert loaded.keys() == STATE.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE.items())
    return EQUAL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_has_the_outcomes_of_files(tmp_path: Path) -> None:
    rows = [
        f"| {title} | {outcome_of(write, options, tmp_path / str(number))} |"
        for number, (title, (write, options)) in enumerate(FILES.items())
    ]
    assert "\n".join(["| file | outcome |", "|---|---|", *rows]) in PAGE.read_text()


SIZES = {
    0: "pad_token_id",
    1: "encoder_layers decoder_layers",
    2: "num_hidden_layers num_attention_heads num_key_value_heads encoder_attention_heads decoder_attention_heads "
    "num_layers num_heads n_layer n_head n_layers n_heads num_local_experts num_experts",
    4: "state_size",
    8: "head_dim d_kv",
    16: "hidden_size d_model n_embd patch_size embedding_size dim embed_dim word_embed_proj_dim moe_intermediate_size",
    32: "intermediate_size max_position_embeddings encoder_ffn_dim decoder_ffn_dim d_ff n_positions n_inner "
    "image_size hidden_dim ffn_dim",
    64: "vocab_size",
}
"""Names of options by the size that makes a small model."""
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
SMALL_LISTS = {"depths": [1, 1], "hidden_sizes": [8, 16]}
FAMILIES = """
Albert Bart Bert BigBird BlipText Bloom CLIPText CLIPVision CodeGen Cohere ConvBert CTRL Deberta DebertaV2 DeepseekV2
DeepseekV3 DeiT Dinov2 DistilBert Electra Ernie Esm Falcon FNet Gemma Gemma2 Gemma3Text Glm GPT2 GPTBigCode GPTJ GPTNeoX
GptOss Granite IBert Jamba LED LayoutLM Llama Longformer M2M100 MBart MPNet MT5 Mamba Mistral Mixtral MobileBert Mpt
Nystromformer OPT Olmo Olmo2 Pegasus Persimmon Phi Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe RemBert ResNet RoFormer Roberta
Rwkv SegGpt Siglip2Vision Splinter StableLm Starcoder2 SwitchTransformers T5 Timesformer ViT ViTMAE VideoMAE Wav2Vec2
Whisper XGLM XLMRoberta XLNet Xmod
""".split()  # noqa: SIM905


def loads_from_a_skeleton(transformers: Any, family: str, folder: Path) -> bool:
    """Whether a model that is built as a skeleton and loaded equals the one that was saved, bit for bit."""
    config_class = getattr(transformers, f"{family}Config")
    accepted = config_class().to_dict()
    config = config_class(**{name: value for name, value in (SMALL | SMALL_LISTS).items() if name in accepted})
    build = getattr(transformers, f"{family}Model")
    torch.manual_seed(1)
    saved = build(config).eval()
    saved.save_pretrained(folder)
    with ms.skeleton():
        model = build(config).eval()
    ms.load(model, folder, map=False)
    both = [{**dict(each.named_parameters()), **dict(each.named_buffers())} for each in (saved, model)]
    return both[0].keys() == both[1].keys() and all(torch.equal(both[0][name], both[1][name]) for name in both[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_has_the_model_families(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    text = PAGE.read_text()
    ((torch_of_page, version),) = re.findall(r"With torch (\S+) and transformers (\S+), these families", text)
    if (torch_of_page, version) != (torch.__version__.partition("+")[0], transformers.__version__):
        pytest.skip(f"the page is of torch {torch_of_page} and transformers {version}")
    equal = [name for name in FAMILIES if loads_from_a_skeleton(transformers, name, tmp_path / name)]
    assert equal == FAMILIES
    assert ", ".join(FAMILIES) in " ".join(text.split())
