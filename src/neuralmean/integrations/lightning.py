"""Lightning: a callback that fits a detector when training ends and logs the OOD rate of later validation and test data.

Works with `lightning` and with `pytorch_lightning`; needs `pip install neuralmean[lightning]`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from neuralmean.detector.detector import Detector
from neuralmean.errors import InputError, MissingExtraError

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise MissingExtraError(
            "The Lightning integration needs the 'lightning' package. Install it with `pip install neuralmean[lightning]`."
        ) from error

__all__ = ["DetectorCallback"]


class DetectorCallback(Callback):  # type: ignore[misc]
    """Fits a detector when training ends; `validate` and `test` then log the share of inputs that it flags.

    The logged value is `ood_rate`, the mean over all inputs of a data loader. In a distributed training each process fits on
    its own share of the data, and the first one saves.

    Args:
        path: Where to save the detector; None only keeps it as `detector`.
        held_out: In-distribution data that the model was not trained on, which sets the threshold. None takes the validation
            data, of which `validate` then flags `false_alarm_rate` by construction: log other data for a meaningful rate.
        false_alarm_rate: Share of in-distribution inputs that may be flagged.
        network: Name of the attribute of the LightningModule that holds the model; None watches the module itself.
        make: Returns a detector for the trained model, such as `partial(Detector, scorer="average")`.

    Attributes:
        detector: The fitted detector; None until training ends, and again while a later training runs.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        held_out: Any = None,
        false_alarm_rate: float = 0.05,
        network: str | None = None,
        make: Callable[[nn.Module], Detector] = Detector,
    ) -> None:
        self.path = path
        self.held_out = held_out
        self.false_alarm_rate = false_alarm_rate
        self.network = network
        self.make = make
        self.detector: Detector | None = None

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Forget an earlier detector, whose weights are about to change."""
        self.detector = None
        self._model(pl_module)  # so that a wrong name is an error now rather than after hours of training

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Fit the detector and save it."""
        held_out = self.held_out if self.held_out is not None else _only(trainer.val_dataloaders, "held_out")
        self.detector = self.make(self._model(pl_module)).fit(
            _only(trainer.train_dataloader, "training"), held_out=held_out, false_alarm_rate=self.false_alarm_rate
        )
        if self.path is not None and trainer.is_global_zero:
            self.detector.save(self.path)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Log the OOD rate of a validated batch."""
        self._log(pl_module, batch)

    def on_test_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Log the OOD rate of a tested batch."""
        self._log(pl_module, batch)

    def _log(self, pl_module: Any, batch: Any) -> None:
        if self.detector is None:
            return
        decision = self.detector.observe(batch).decision
        if decision is not None:
            rate = decision.is_ood.float().mean()
            pl_module.log("ood_rate", rate, on_step=False, on_epoch=True, batch_size=len(decision.is_ood))

    def _model(self, pl_module: nn.Module) -> nn.Module:
        if self.network is None:
            return pl_module
        model = getattr(pl_module, self.network, None)
        if not isinstance(model, nn.Module):
            raise InputError(
                f"Expected `network` to name a model of {type(pl_module).__name__}, but got {self.network!r}."
            )
        return model


def _only(loaders: Any, name: str) -> Any:
    """Return the only data loader of a trainer, None if it has none."""
    if isinstance(loaders, (list, tuple)):
        if len(loaders) > 1:
            raise InputError(f"Expected one data loader for {name}, but got {len(loaders)}. Pass `held_out`.")
        return loaders[0] if loaders else None
    return loaders
