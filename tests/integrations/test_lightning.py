"""A Lightning Trainer saves and resumes through our files as through its own."""

import importlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import modelstate as ms
from modelstate.errors import ChecksumError, CodecError, OptionError, SourceNotFoundError, WriteFailedError
from modelstate.io import system
from tests.codec.values import same
from tests.store.common import flip

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
# Lightning is imported in functions: it takes four seconds, which each worker would spend on the collection.


def checkpoint_io(**options: Any) -> Any:
    pytest.importorskip("lightning.pytorch")
    return importlib.import_module("modelstate.integrations.lightning").StoreCheckpointIO(**options)


@cache
def net_class() -> Any:
    from lightning.pytorch import LightningModule

    class Net(LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 4, cfg: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.body = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 1))
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.body(batch[0]).square().mean()
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Net


class Config:
    """What has no encoding."""


def fit(folder: Path, plugin: Any, epochs: int, resume: str | None = None, model: Any = None) -> tuple[Any, Any]:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    lightning.seed_everything(0)
    model = net_class()() if model is None else model
    best = ModelCheckpoint(folder, "best-{epoch}", monitor="loss", save_last=True, save_top_k=1)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        plugins=[plugin] if plugin else [],
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    torch.manual_seed(1 if resume is None else 2)
    data = TensorDataset(torch.linspace(0, 1, 24).reshape(8, 3))
    trainer.fit(model, DataLoader(data, batch_size=4), ckpt_path=resume)
    return trainer, model


def test_a_checkpoint_comes_back_as_from_lightnings_own_files(tmp_path: Path) -> None:
    trainer, model = fit(tmp_path / "a", checkpoint_io(), 2)
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    path = tmp_path / "a" / "last.ckpt"
    assert ms.open(path).format == "safetensors"
    assert sorted(os.listdir(tmp_path / "a")) == ["best-epoch=1.ckpt", "last.ckpt"]
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    found = checkpoint_io().load_checkpoint(tmp_path / "ours.ckpt")
    TorchCheckpointIO().save_checkpoint(found, tmp_path / "torchs.ckpt")
    wanted = torch.load(tmp_path / "torchs.ckpt", weights_only=False)
    assert same(found, wanted)
    assert found["state_dict"]._metadata == model.state_dict()._metadata
    assert found["hyper_parameters"] == {"width": 4, "cfg": None}
    assert {"loops", "callbacks", "optimizer_states", "lr_schedulers"} <= set(found)
    assert same(checkpoint_io().load_checkpoint(tmp_path / "torchs.ckpt", weights_only=False), wanted)
    assert ms.load(net_class()(), path, key="state_dict").coverage == 1.0


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_is_what_it_would_have_been(tmp_path: Path, background: bool) -> None:
    ours, results = checkpoint_io(), {}
    if background:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        ours = AsyncCheckpointIO(ours)
    for name, plugin in (("ours", ours), ("lightnings", None)):
        fit(tmp_path / name, plugin, 2)
        _, model = fit(tmp_path / name, checkpoint_io(), 4, str(tmp_path / name / "last.ckpt"))
        results[name] = model
    assert results["ours"].losses == results["lightnings"].losses
    assert len(results["ours"].losses) == 4
    assert same(dict(results["ours"].state_dict()), dict(results["lightnings"].state_dict()))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_io(), 1)
    path = tmp_path / "last.ckpt"
    flip(path)
    with pytest.raises(ChecksumError):
        fit(tmp_path, checkpoint_io(), 2, str(path))
    checkpoint_io(verify=False).load_checkpoint(path)


def test_what_has_no_encoding_is_named(tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="hyper_parameters") as caught:
        fit(tmp_path, checkpoint_io(), 1, model=net_class()(cfg=Config()))
    assert "save_hyperparameters(ignore" in caught.value.remedy
    assert os.listdir(tmp_path) == []


def test_an_error_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io = checkpoint_io()
    io.save_checkpoint({"state_dict": {"a": torch.ones(2)}}, tmp_path / "deep" / "x.ckpt")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(system, "fsync", full)
        with pytest.raises(WriteFailedError):
            io.save_checkpoint({"state_dict": {"a": torch.zeros(2)}}, tmp_path / "deep" / "x.ckpt")
    assert os.listdir(tmp_path / "deep") == ["x.ckpt"]
    assert torch.equal(io.load_checkpoint(tmp_path / "deep" / "x.ckpt")["state_dict"]["a"], torch.ones(2))


def test_map_location(tmp_path: Path) -> None:
    io, path = checkpoint_io(), tmp_path / "x.ckpt"
    tensor = torch.arange(4.0)
    io.save_checkpoint({"a": tensor, "b": [tensor, (tensor,)]}, path)
    for where in ("meta", torch.device("meta"), {"cpu": "meta"}):
        found = io.load_checkpoint(path, map_location=where)
        assert found["a"].is_meta
        assert found["a"] is found["b"][0] is found["b"][1][0]
    for where in (None, "cpu", {"cuda:0": "meta"}, lambda storage, location: storage, lambda storage, location: None):
        assert torch.equal(io.load_checkpoint(path, map_location=where)["b"][0], tensor)
    found = io.load_checkpoint(path, map_location=lambda storage, location: storage.clone())
    assert torch.equal(found["a"], tensor)
    with pytest.raises(OptionError):
        io.load_checkpoint(path, map_location=3)


def test_removing(tmp_path: Path) -> None:
    io = checkpoint_io()
    io.save_checkpoint({"a": torch.ones(1)}, tmp_path / "x.ckpt")
    (tmp_path / "shards").mkdir()
    for name in ("x.ckpt", "shards", "nothing.ckpt"):
        io.remove_checkpoint(tmp_path / name)
    assert os.listdir(tmp_path) == []
    with pytest.raises(SourceNotFoundError):
        io.load_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(OptionError):
        io.save_checkpoint({}, tmp_path / "x.ckpt", storage_options={"a": 1})
