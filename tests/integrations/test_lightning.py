"""The Lightning callback in a real training."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from neuralmean import Detector
from neuralmean.errors import InputError
from tests.conftest import TinyNet, count_hooks

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of workers, of few batches and of its dependencies
lightning = pytest.importorskip("lightning.pytorch", reason="the extra `lightning` is not installed")
bridge = pytest.importorskip("neuralmean.integrations.lightning")


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = TinyNet()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, _, dataloader_idx=0):
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(images):
    return DataLoader(TensorDataset(images, torch.arange(len(images)) % 3), batch_size=32)


def make_trainer(tmp_path, callback):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=[callback],
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        **quiet,
    )


def make_callback(path=None, **options):
    return bridge.DetectorCallback(path, make=partial(Detector, scorer="average"), **options)


@pytest.mark.parametrize("network", [None, "net"])
def test_training_ends_with_a_detector_and_validation_logs_the_rate(tmp_path, images, strange, network):
    path = tmp_path / "model.nmd"
    callback = make_callback(path, held_out=images[200:], network=network)
    module, trainer = Classifier(), make_trainer(tmp_path, callback)
    trainer.fit(module, loader(images[:200]), loader(images[200:]))
    assert callback.detector.calibration_source == "held_out"
    usual = trainer.validate(module, loader(torch.rand(200, 3, 8, 8)), verbose=False)[0]["ood_rate"]
    odd = trainer.test(module, loader(strange), verbose=False)[0]["ood_rate"]
    assert usual < 0.2
    assert odd == 1.0
    loaded = Detector.load(path, module if network is None else module.net)
    assert torch.equal(loaded.score(strange), callback.detector.score(strange))
    assert count_hooks(module) == 0


def test_validation_data_sets_the_threshold_where_nothing_else_is_given(tmp_path, images):
    callback = make_callback()
    module, trainer = Classifier(), make_trainer(tmp_path, callback)
    trainer.fit(module, loader(images[:200]), loader(images[200:]))
    assert callback.detector.fitted["n_held_out"] == 100
    rates = trainer.validate(module, [loader(images[200:]), loader(images + 9)], verbose=False)
    assert rates[0]["ood_rate/dataloader_idx_0"] <= 0.05
    assert rates[1]["ood_rate/dataloader_idx_1"] == 1.0


def test_nothing_is_logged_while_training_goes_on(tmp_path, images):
    callback = make_callback()
    module, trainer = Classifier(), make_trainer(tmp_path, callback)
    assert "ood_rate" not in trainer.validate(module, loader(images), verbose=False)[0]
    trainer.fit(module, loader(images[:200]), loader(images[200:]))
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader(images[:200]), loader(images[200:]))  # an old detector would find other weights
    callback.detector.check_weights()


def test_wrong_arguments_fail_before_training(tmp_path, images):
    callback = make_callback(network="nett")
    with pytest.raises(InputError, match="Expected `network` to name a model of Classifier, but got 'nett'"):
        make_trainer(tmp_path, callback).fit(Classifier(), loader(images))
    with pytest.raises(InputError, match="Expected one data loader for held_out, but got 2. Pass `held_out`"):
        make_trainer(tmp_path, make_callback()).fit(Classifier(), loader(images), [loader(images), loader(images)])
